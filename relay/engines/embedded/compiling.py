"""Templates: from the statements of Jinja's tree to closures that write (cnl.md). [pure]"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes

from relay.engines.embedded import limits
from relay.engines.embedded.evaluation import Meter, Refused, kind, present, to_text, truth
from relay.engines.embedded.expressions import Code, ExpressionCompiler, nothing
from relay.engines.embedded.syntax import describe


class TemplateCompiler(ExpressionCompiler):
    """Makes the closure of a template, which writes its text to the meter."""

    def body(self, statements: list[nodes.Node]) -> Code:
        """A closure that writes what the statements say."""
        codes = [self._statement(statement) for statement in statements]
        if len(codes) == 1:
            return codes[0]

        def run(meter: Meter) -> None:
            for code in codes:
                code(meter)

        return run

    def _statement(self, node: nodes.Node) -> Code:
        with self.deeper(node) as allowed:
            if not allowed:
                return nothing
            match node:
                case nodes.Output():
                    return self._output(node)
                case nodes.If():
                    return self._if(node)
                case nodes.For():
                    return self._for(node)
                case _:
                    return self.refuse(node)

    def _located(self, node: nodes.Node) -> Code:
        """The closure of an expression, which says where it stands before it is evaluated."""
        assert isinstance(node, nodes.Expr)
        code = self.expression(node)
        where = (describe(node), node.lineno)

        def run(meter: Meter) -> Any:
            meter.where = where
            return code(meter)

        return run

    def _output(self, node: nodes.Output) -> Code:
        parts: list[str | Code] = [
            part.data if isinstance(part, nodes.TemplateData) else self._located(part)
            for part in node.nodes
        ]

        def run(meter: Meter) -> None:
            for part in parts:
                text = part if isinstance(part, str) else to_text(part(meter), meter)
                meter.spend(len(text))
                meter.write(text)

        return run

    def _if(self, node: nodes.If) -> Code:
        branches = [
            (self._located(branch.test), self.body(branch.body)) for branch in (node, *node.elif_)
        ]
        otherwise = self.body(node.else_)

        def run(meter: Meter) -> None:
            for test, body in branches:
                meter.spend()
                if truth(test(meter)):
                    body(meter)
                    return
            otherwise(meter)

        return run

    def _for(self, node: nodes.For) -> Code:
        source = self._located(node.iter)
        otherwise = self.body(node.else_)
        if not isinstance(node.target, nodes.Name):
            return self.fault(node, "`for` takes one name: `for x in …`")
        name = node.target.name
        if node.recursive:
            return self.fault(node, "`for … recursive` is not allowed")
        if name in ("inputs", "tasks") or name.startswith("_"):
            return self.fault(node, f"a `for` must not name its variable `{name}`")
        if len(self.variables) == limits.FOR_DEPTH:
            return self.fault(node, f"`for` is nested more than {limits.FOR_DEPTH} deep")
        self.variables.append(name)
        test = self._located(node.test) if node.test is not None else None
        body = self.body(node.body)
        self.variables.pop()

        def run(meter: Meter) -> None:
            values = _entries(source(meter), meter)
            variables = meter.variables
            outer = variables.get(name, variables)
            some = False
            for value in values:
                meter.spend()
                variables[name] = value
                if test is None or truth(test(meter)):
                    some = True
                    body(meter)
            if outer is variables:
                variables.pop(name, None)
            else:
                variables[name] = outer
            if not some:
                otherwise(meter)

        return run


def _entries(value: Any, meter: Meter) -> list[Any]:
    """What a `for` goes over: the entries of a list, or the keys of an object."""
    if isinstance(present(value), list | tuple | dict):
        meter.spend(len(value))
        return list(value)
    raise Refused(f"`for` goes over lists and objects, not over {kind(value)}")
