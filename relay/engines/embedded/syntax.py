"""What a template is made of: faults, references, and Jinja's nodes in words. [pure]"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, NamedTuple

from jinja2 import nodes

if TYPE_CHECKING:
    from collections.abc import Iterable

REFUSED: Final[dict[type[nodes.Node], str]] = {
    nodes.Call: "calls are not allowed; filters are",
    nodes.Macro: "macros are not allowed",
    nodes.Include: "`include` is not allowed",
    nodes.Import: "`import` is not allowed",
    nodes.FromImport: "`import` is not allowed",
    nodes.Extends: "`extends` is not allowed",
    nodes.Block: "`block` is not allowed",
    nodes.Assign: "`set` is not allowed",
    nodes.AssignBlock: "`set` is not allowed",
    nodes.With: "`with` is not allowed",
    nodes.FilterBlock: "`filter` blocks are not allowed",
    nodes.CallBlock: "`call` is not allowed",
}


# Jinja's messages and ours. A tag's end has no name that its writer knows.
_FROM_JINJA: Final = tuple(
    (re.compile(theirs, re.DOTALL), ours)
    for theirs, ours in (
        (
            r"^Encountered unknown tag '(end\w+|elif|else)'.* be closed is '(\w+)'.*",
            r"`\1` stands in `\2`, which is not closed",
        ),
        (
            r"^Encountered unknown tag '(end\w+|elif|else)'.*",
            r"`\1` stands alone: no tag that it belongs to is open",
        ),
        (r"^Encountered unknown tag '(\w+)'.*", r"there is no tag `\1`"),
        (r"^Unexpected end of template\. .* be closed is '(\w+)'.*", r"`{% end\1 %}` is missing"),
        (r"^No filter named '(\w+)'.*", r"there is no filter `\1`"),
        (r"^Missing end of comment tag$", "`#}` is missing"),
        (r"^expected name or number$", "no name follows the `.`"),
        (r"^unexpected char (.+) at \d+$", r"unexpected \1"),
        (r"'?end of print statement'?", "`}}`"),
        (r"'?end of statement block'?", "`%}`"),
        (r"'?end of template'?", "end of the text"),
        (r"expected token 'name'", "expected a name"),
        (r"expected token ", "expected "),
        (r"^Expected", "expected"),
        (r"\.$", ""),
    )
)
_OFFENDING: Final = re.compile(r"""(?:unexpected|got|before) [`'"]([=&|!?$%}'"])[`'"](?!,)""")
_MEANT: Final = {
    "=": "`==` compares",
    "&": "write `and`",
    "!": "write `not`",
    "?": "write `a if b else c`",
    "$": "names have no `$`",
    "%": "an expression has no `{% %}` around it",
    "}": "`{{` ends with `}}`, `{%` with `%}`",
    "'": "is a quote not closed?",
    '"': "is a quote not closed?",
}
_HINTS: Final = 500  # names that are looked at
_WRITTEN: Final = {
    "eq": "==", "ne": "!=", "lt": "<", "lteq": "<=", "gt": ">", "gteq": ">=", "in": "in",
    "notin": "not in",
}  # fmt: skip


class Fault(NamedTuple):
    """One thing that is wrong with a template, at a line of it (from 1)."""

    message: str
    line: int


@dataclass(slots=True)
class References:
    """What a template refers to: names with their lines, in order, each once."""

    names: dict[tuple[str, int], None] = field(default_factory=dict)
    inputs: dict[tuple[str, int], None] = field(default_factory=dict)
    tasks: dict[tuple[str, int], None] = field(default_factory=dict)


def key_of(node: nodes.Getattr | nodes.Getitem) -> str | int | None:
    """The key if it is written out."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    value = node.arg.value if isinstance(node.arg, nodes.Const) else None
    return value if isinstance(value, str) or type(value) is int else None


def task_of(node: nodes.Getattr | nodes.Getitem) -> str | None:
    """The id in `tasks.<id>` and `tasks.<id>.<part>`, None for all else."""
    inner = node.node
    if isinstance(inner, nodes.Getattr | nodes.Getitem):
        node, inner = inner, inner.node
    if isinstance(inner, nodes.Name) and inner.name == "tasks":
        key = key_of(node)
        return key if isinstance(key, str) else None
    return None


def describe(node: nodes.Node, levels: int = 6) -> str:
    """An expression as it may have been written; `…` for what is below so many levels."""
    levels -= 1
    match node:
        case _ if levels < 0:
            return "…"
        case nodes.Name():
            return str(node.name)
        case nodes.Getattr():
            return f"{describe(node.node, levels)}.{node.attr}"
        case nodes.Getitem(arg=nodes.Const(value=key)):
            return f"{describe(node.node, levels)}[{key!r}]"[:80]
        case nodes.Getitem():
            return f"{describe(node.node, levels)}[{describe(node.arg, levels)}]"[:80]
        case nodes.Const():
            return repr(node.value)[:40]
        case nodes.Filter() if node.node is not None:
            return f"{describe(node.node, levels)} | {node.name}"
        case nodes.BinExpr(operator=str()):
            return f"{describe(node.left, levels)} {node.operator} {describe(node.right, levels)}"
        case nodes.Compare():
            first = node.ops[0]
            left, right = describe(node.expr, levels), describe(first.expr, levels)
            return f"{left} {_WRITTEN[first.op]} {right}"
        case nodes.Not():
            return f"not {describe(node.node, levels)}"
        case nodes.Test():
            return f"{describe(node.node, levels)} is {node.name}"
        case _:
            return "…"


def in_words(message: str, text: str) -> str:
    """What Jinja says of a template, in words of its writer, and what may have been meant."""
    for theirs, ours in _FROM_JINJA:
        message = theirs.sub(ours, message)
    offending = _OFFENDING.search(message)
    meant = _MEANT.get(offending[1]) if offending else None
    if offending and offending[1] == "|" and "||" in text:
        meant = "write `or`"
    if meant is None and text.count("{{") > text.count("}}") and "`}}`" not in message:
        meant = "is a `{{` not closed by `}}`?"
    return message[:300] + (f" ({meant})" if meant else "")


def hint(name: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, or nothing if no known name is near."""
    near = get_close_matches(name[:64], list(known)[:_HINTS], n=1)
    return f" (did you mean `{near[0]}`?)" if near else ""
