"""The examples of docs/workflows: right by the schema and by the engine, each kind once (W1.4)."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from encoders.workflow import VOCABULARY
from planes.config_file import load_defaults
from relay.engines.embedded.loading import load
from relay.engines.embedded.reading import read
from relay.engines.embedded.schema import document_schema

FOLDER = Path(__file__).resolve().parents[2] / "docs/workflows"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))
KINDS = {"task", "sequential", "parallel", "condition", "batch", "dynamic", "debate", "yield"}


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_example_is_right(path: Path) -> None:
    text = path.read_text()
    assert jsonschema_rs.validator_for(document_schema()).is_valid(read(text).value)
    assert yaml.safe_load(text) == read(text).value, "other readers of YAML take it too"
    loaded = load(text, {}, agents=tuple(load_defaults({}).agents))
    kinds = {task.type for task in loaded.workflow.walk()}
    assert path.stem == "triage" or path.stem in kinds
    assert f"sluicegate run docs/workflows/{path.name}" in text, "it says how to run it"


def test_every_kind_has_its_example() -> None:
    assert {path.stem for path in EXAMPLES} == KINDS | {"triage"}
    page = (FOLDER / "README.md").read_text()
    assert re.findall(r"\]\((\w+)\.yaml\)", page) == [
        *("task", "sequential", "parallel", "condition", "batch", "dynamic", "debate", "yield"),
        "triage",
    ]


def test_the_table_of_events_has_them_all() -> None:
    page = (FOLDER / "README.md").read_text()
    table = page.partition("| events | `data` |")[2].partition("\n\n")[0]
    named = {
        word
        for row in table.splitlines()
        if row
        for word in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert {name for name in VOCABULARY | {"token"} if name not in named} == set()
