"""Expressions of templates: from Jinja's tree to closures, by an allow-list (cnl.md). [pure]

All that is not allowed is reported at once, with its line. What can only be known where the
template stands in its document (which tasks, which inputs, which batch variable) is collected in
`References`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from jinja2 import nodes

from relay.engines.embedded import limits
from relay.engines.embedded.evaluation import (
    Meter,
    Missing,
    Refused,
    arithmetic,
    attribute,
    compare,
    cut,
    kind,
    number,
    present,
    to_text,
    too_long,
    truth,
)
from relay.engines.embedded.filters import FILTERS
from relay.engines.embedded.syntax import (
    REFUSED,
    Fault,
    References,
    describe,
    hint,
    key_of,
    task_of,
)

Code: TypeAlias = Callable[[Meter], Any]

_BINARY: Final[dict[type[nodes.Node], str]] = {
    nodes.Add: "+", nodes.Sub: "-", nodes.Mul: "*", nodes.Div: "/", nodes.FloorDiv: "//",
    nodes.Mod: "%", nodes.Pow: "**",
}  # fmt: skip
_TESTS: Final = ("defined", "none", "undefined")

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def nothing(meter: Meter) -> Any:
    """The closure that stands for what is not there, or not allowed."""
    return None


class ExpressionCompiler:
    """Makes the closure of an expression.

    Attributes:
        faults: all that is not allowed in it; if there are any the closure is of no use.
        references: what it refers to outside itself.
        variables: of the `for` loops around it.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.references = References()
        self.variables: list[str] = []
        self._depth = 0

    def expression(self, node: nodes.Expr) -> Code:
        """A closure that returns the expression's value."""
        with self.deeper(node) as allowed:
            if not allowed:
                return nothing
            operator = _BINARY.get(type(node))
            if operator is not None and isinstance(node, nodes.BinExpr):
                return self._binary(operator, node)
            make = _EXPRESSIONS.get(type(node))
            return make(self, node) if make else self.refuse(node)

    def _constant(self, node: nodes.Const) -> Code:
        value = node.value
        if isinstance(value, str) and _SURROGATE.search(value):
            return self.fault(node, "text holds half of a surrogate pair, which is no character")
        if not isinstance(value, str | bool | None):
            try:
                number(value)
            except Refused as refused:
                return self.fault(node, str(refused))
        return lambda _: value

    def _name(self, node: nodes.Name) -> Code:
        name = node.name
        if name in self.variables:
            return lambda meter: meter.variables[name]
        if name == "tasks":
            return self.fault(node, "write `tasks.<id>.output` or `tasks.<id>.status`")
        self.references.names[name, node.lineno] = None

        def run(meter: Meter) -> Any:
            meter.spend()
            try:
                return meter.names[name]
            except KeyError:
                return Missing(f"`{name}` is not there")

        return run

    def _entry(self, node: nodes.Getattr | nodes.Getitem) -> Code:
        if isinstance(node, nodes.Getattr) and node.attr.startswith("_"):
            return self.fault(node, f'a name must not begin with `_`: write `["{node.attr}"]`')
        task = task_of(node)
        if task is not None:
            return self._task(node, task)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self._slice(node.node, node.arg)
        key = key_of(node)
        if describe(node.node) == "inputs" and isinstance(key, str):
            self.references.inputs[key, node.lineno] = None
        value = self.expression(node.node)
        what = describe(node)
        if key is not None:

            def run_known(meter: Meter) -> Any:
                meter.spend()
                return attribute(value(meter), key, what)

            return run_known
        assert isinstance(node, nodes.Getitem)
        index = self.expression(node.arg)

        def run(meter: Meter) -> Any:
            meter.spend()
            return attribute(value(meter), present(index(meter)), what)

        return run

    def _task(self, node: nodes.Getattr | nodes.Getitem, task: str) -> Code:
        part = key_of(node)
        if part not in ("output", "status"):
            wrong = f"`{describe(node)}`: a task has `output` and `status`"
            if part == task:
                wrong = (
                    f"write `{describe(node)}.output` or `{describe(node)}.status`; an id with `-`"
                    ' is written `tasks["a-b"]`'
                )
            return self.fault(node, wrong)
        self.references.tasks[task, node.lineno] = None
        what = describe(node)

        def run(meter: Meter) -> Any:
            meter.spend()
            state = meter.names.get("tasks", {}).get(task)
            return (
                Missing(f"`{what}` is not there: it has not run") if state is None else state[part]
            )

        return run

    def _slice(self, target: nodes.Expr, node: nodes.Slice) -> Code:
        value = self.expression(target)
        bounds = [
            self.expression(bound) if bound is not None else nothing
            for bound in (node.start, node.stop, node.step)
        ]

        def run(meter: Meter) -> Any:
            start, stop, step = (bound(meter) for bound in bounds)
            return cut(value(meter), start, stop, step, meter)

        return run

    def _binary(self, operator: str, node: nodes.BinExpr) -> Code:
        left, right = self.expression(node.left), self.expression(node.right)

        def run(meter: Meter) -> Any:
            meter.spend()
            return arithmetic(operator, left(meter), right(meter), meter)

        return run

    def _either(self, node: nodes.And | nodes.Or) -> Code:
        left, right = self.expression(node.left), self.expression(node.right)
        stops = isinstance(node, nodes.Or)

        def run(meter: Meter) -> Any:
            meter.spend()
            value = left(meter)
            return value if truth(value) is stops else right(meter)

        return run

    def _not(self, node: nodes.Not) -> Code:
        value = self.expression(node.node)
        return lambda meter: not truth(value(meter))

    def _sign(self, node: nodes.Neg | nodes.Pos) -> Code:
        value = self.expression(node.node)
        operator = "-" if isinstance(node, nodes.Neg) else "+"
        return lambda meter: arithmetic(operator, 0, present(value(meter)), meter)

    def _compare(self, node: nodes.Compare) -> Code:
        first = self.expression(node.expr)
        rest = [(operand.op, self.expression(operand.expr)) for operand in node.ops]

        def run(meter: Meter) -> bool:
            left = first(meter)
            for operator, code in rest:
                meter.spend()
                right = code(meter)
                if not compare(operator, left, right, meter):
                    return False
                left = right
            return True

        return run

    def _concat(self, node: nodes.Concat) -> Code:
        parts = [self.expression(part) for part in node.nodes]

        def run(meter: Meter) -> str:
            texts: list[str] = []
            length = 0
            for part in parts:
                text = to_text(part(meter), meter)
                meter.spend(len(text))
                length += len(text)
                if length > limits.RESULT_CHARS:
                    raise Refused(too_long())
                texts.append(text)
            return "".join(texts)

        return run

    def _choice(self, node: nodes.CondExpr) -> Code:
        test, yes = self.expression(node.test), self.expression(node.expr1)
        no = self.expression(node.expr2) if node.expr2 is not None else lambda _: ""

        def run(meter: Meter) -> Any:
            meter.spend()
            return yes(meter) if truth(test(meter)) else no(meter)

        return run

    def _list(self, node: nodes.List | nodes.Tuple) -> Code:
        entries = [self.expression(entry) for entry in node.items]

        def run(meter: Meter) -> list[Any]:
            meter.spend(16 * len(entries))
            return [present(entry(meter)) for entry in entries]

        return run

    def _dict(self, node: nodes.Dict) -> Code:
        pairs = [(self.expression(p.key), self.expression(p.value)) for p in node.items]

        def run(meter: Meter) -> dict[str, Any]:
            meter.spend(16 * len(pairs))
            made: dict[str, Any] = {}
            for key, value in pairs:
                name = key(meter)
                if not isinstance(name, str):
                    raise Refused(f"the keys of an object are text, not {kind(name)}")
                made[name] = present(value(meter))
            return made

        return run

    def _filter(self, node: nodes.Filter) -> Code:
        known = FILTERS.get(node.name)
        if known is None:
            near = hint(node.name, FILTERS)
            there_are = ", ".join(FILTERS)
            return self.fault(
                node, f"there is no filter `{node.name}`{near}; there are {there_are}"
            )
        if node.node is None:
            return self.fault(node, "`filter` blocks are not allowed")
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            return self.fault(node, "`*` and `**` in arguments are not allowed")
        arguments = dict(zip(known.arguments, node.args, strict=False))
        arguments |= {str(pair.key): pair.value for pair in node.kwargs}
        unknown = sorted(set(arguments) - set(known.arguments))
        if unknown or len(node.args) > len(known.arguments):
            takes = ", ".join(known.arguments) or "no arguments"
            return self.fault(node, f"the filter `{node.name}` takes {takes}")
        value = self.expression(node.node)
        codes = {name: self.expression(code) for name, code in arguments.items()}
        apply = known.apply

        def run(meter: Meter) -> Any:
            meter.spend()
            given = {name: present(code(meter)) for name, code in codes.items()}
            return apply(meter, value(meter), **given)

        return run

    def _test(self, node: nodes.Test) -> Code:
        name = node.name
        if name not in _TESTS or node.args or node.kwargs or node.dyn_args or node.dyn_kwargs:
            return self.fault(node, f"there is no test `{name}`; there are {', '.join(_TESTS)}")
        value = self.expression(node.node)
        if name == "none":
            return lambda meter: present(value(meter)) is None
        wanted = name == "undefined"
        return lambda meter: isinstance(value(meter), Missing) is wanted

    def fault(self, node: nodes.Node, message: str) -> Code:
        """Say what is wrong at a node."""
        fault = Fault(message, node.lineno or 1)
        if len(self.faults) <= limits.PROBLEMS and fault not in self.faults:
            self.faults.append(fault)
        return nothing

    def refuse(self, node: nodes.Node) -> Code:
        """Say that this kind of node is not allowed."""
        name = type(node).__name__.lower()
        return self.fault(node, REFUSED.get(type(node), f"`{name}` is not allowed here"))

    @contextmanager
    def deeper(self, node: nodes.Node) -> Iterator[bool]:
        """Whether one level more is allowed; else it is a fault."""
        self._depth += 1
        allowed = self._depth <= limits.EXPRESSION_DEPTH
        if not allowed:
            self.fault(node, f"is nested more than {limits.EXPRESSION_DEPTH} deep")
        try:
            yield allowed
        finally:
            self._depth -= 1


_EXPRESSIONS: Final[dict[type[nodes.Node], Callable[[ExpressionCompiler, Any], Code]]] = {
    nodes.And: ExpressionCompiler._either,
    nodes.Compare: ExpressionCompiler._compare,
    nodes.Concat: ExpressionCompiler._concat,
    nodes.CondExpr: ExpressionCompiler._choice,
    nodes.Const: ExpressionCompiler._constant,
    nodes.Dict: ExpressionCompiler._dict,
    nodes.Filter: ExpressionCompiler._filter,
    nodes.Getattr: ExpressionCompiler._entry,
    nodes.Getitem: ExpressionCompiler._entry,
    nodes.List: ExpressionCompiler._list,
    nodes.Name: ExpressionCompiler._name,
    nodes.Neg: ExpressionCompiler._sign,
    nodes.Not: ExpressionCompiler._not,
    nodes.Or: ExpressionCompiler._either,
    nodes.Pos: ExpressionCompiler._sign,
    nodes.Test: ExpressionCompiler._test,
    nodes.Tuple: ExpressionCompiler._list,
}
