"""docs/configuration.md is current and complete (O3)."""

import re
from pathlib import Path

from planes.settings import Settings
from planes.settings.base import Section
from planes.settings.providers import Reading
from planes.settings.reference import page, parts

PAGE = Path(__file__).parents[2] / "docs/configuration.md"


def test_the_page_is_current() -> None:
    """After a change: `python -m planes.settings.reference > docs/configuration.md`."""
    assert PAGE.read_text("utf-8") == page()


def test_every_field_of_every_section_stands_in_it() -> None:
    """Each section has one table, and each of its fields one row with a default."""
    bases = {Section, Reading}
    every, pending = set(), [Section]
    while pending:
        section = pending.pop()
        pending.extend(section.__subclasses__())
        every.add(section)
    tables = {"Sections": Settings} | {part.heading: part.section for part in parts()}
    assert set(tables.values()) == every - bases
    chunks = dict(chunk.split("\n", 1) for chunk in page().split("\n## ")[2:])
    for heading, section in tables.items():
        rows = re.findall(
            r"^\| \*?`(\w+)`\*? \| .+ \| .+ \| .+\. \|$", chunks[heading], re.MULTILINE
        )
        assert sorted(rows) == sorted(section.model_fields), heading


def test_its_links_lead_to_its_headings() -> None:
    """As GitHub makes anchors of headings."""
    headings = re.findall(r"^## (.*)", page(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
    assert len(anchors) == len(headings)
    assert set(re.findall(r"\]\(#([^)]*)\)", page())) <= anchors
