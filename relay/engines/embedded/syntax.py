"""What a template is made of: faults, references, and Jinja's nodes in words. [pure]"""

from __future__ import annotations

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


def hint(name: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, or nothing if no known name is near."""
    near = get_close_matches(name[:64], list(known)[:_HINTS], n=1)
    return f" (did you mean `{near[0]}`?)" if near else ""
