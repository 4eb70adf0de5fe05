"""Templates and expressions: Jinja2's syntax, cut down and bounded (cnl.md, W3.1).

    text --Jinja's parser--> tree --_Compiler (allow-list)--> closures --Meter--> text or value

Only Jinja's parser is used. What it makes is no Python: every kind of node that is allowed has a
closure here, and all others are errors when the document is loaded. So there is no call, no
attribute of a Python object and no import to be had; `x.name` is an entry of a JSON object.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jinja2 import Environment, TemplateSyntaxError
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from pydantic_core import PydanticCustomError, core_schema

from relay.engines.embedded import limits
from relay.engines.embedded.compiling import TemplateCompiler
from relay.engines.embedded.evaluation import Meter, Names, Refused, kind, present, truth
from relay.engines.embedded.expressions import ExpressionCompiler
from relay.engines.embedded.syntax import Fault, References, in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jinja2 import nodes
    from pydantic import GetCoreSchemaHandler

_MARKUP: Final = re.compile(r"\{[{%#]")
_WRAPPED: Final = re.compile(r"\{\{-?((?:(?!\}\}).)*?)-?\}\}", re.DOTALL)


class TemplateProblem(Exception):
    """A template or expression has no value with what is there.

    Attributes:
        message: names the expression, and the bound if it is one.
        line: in the template, from 1.
    """

    def __init__(self, message: str, line: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


class TemplateFaults(ValueError):
    """A template cannot be used; `faults` are all that is wrong with it."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Template:
    """Text with `{{ … }}`, `{% if %}` and `{% for %}` in it.

    Attributes:
        text: as it stands in the document. references: what it refers to.
    """

    text: str
    references: References = field(repr=False, compare=False)
    _run: Callable[[Meter], Any] = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str, cache: Cache | None = None) -> Template:
        """Check a template and compile it.

        Args:
            cache: what was compiled before for the same document.

        Raises:
            TemplateFaults: it holds what is not allowed.
        """
        if not _MARKUP.search(text):
            return cls(text, References(), lambda meter: meter.write(text))
        compiled = (cache or Cache()).template(text)
        if compiled.faults:
            raise TemplateFaults(compiled.faults)
        return cls(text, compiled.references, compiled.run)

    def render(self, names: Names) -> str:
        """The text with what is there; at most 1 MiB, and in bounded time.

        Args:
            names: `inputs`, `tasks` (id → `{"output": …, "status": …}`, those that have ended) and
                the batch variables in scope. JSON values.

        Raises:
            TemplateProblem: something is missing, or a bound is reached.
        """
        meter = Meter(names)
        _evaluate(self._run, meter)
        return meter.result()

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.with_info_after_validator_function(
            lambda text, info: parse_field(cls.parse, text, info),
            core_schema.str_schema(strict=True, min_length=1),
        )


@dataclass(frozen=True, slots=True)
class Expression:
    """What stands between `{{` and `}}`, with or without these; or a constant boolean.

    Attributes:
        text: as it stands in the document. references: what it refers to.
    """

    text: str
    references: References = field(repr=False, compare=False)
    _run: Callable[[Meter], Any] = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str | bool, cache: Cache | None = None) -> Expression:
        """Check an expression and compile it.

        Args:
            cache: what was compiled before for the same document.

        Raises:
            TemplateFaults: it holds what is not allowed.
        """
        if isinstance(text, bool):
            return cls("true" if text else "false", References(), lambda _: text)
        wrapped = _WRAPPED.fullmatch(text.strip())
        compiled = (cache or Cache()).expression(wrapped[1] if wrapped else text)
        if compiled.faults:
            raise TemplateFaults(compiled.faults)
        return cls(text, compiled.references, compiled.run)

    def value(self, names: Names) -> Any:
        """Its JSON value; in bounded time.

        Args:
            names: as of `Template.render`.

        Raises:
            TemplateProblem: something is missing, or a bound is reached.
        """
        return _evaluate(lambda meter: present(self._run(meter)), Meter(names))

    def holds(self, names: Names) -> bool:
        """Whether its value is true, as of an `if`: empty is false.

        Raises:
            TemplateProblem: as `value`.
        """
        return truth(self.value(names))

    def entries(self, names: Names) -> list[Any]:
        """Its value as the items of a batch: at most 10,000.

        Raises:
            TemplateProblem: as `value`, and if it is no list or a longer one.
        """
        value = self.value(names)
        if not isinstance(value, list | tuple):
            raise TemplateProblem(f"`{_short(self.text)}` is {kind(value)}; items are a list")
        if len(value) > limits.BATCH_ITEMS:
            raise TemplateProblem(
                f"`{_short(self.text)}` has {len(value):,} items; at most"
                f" {limits.BATCH_ITEMS:,} are allowed"
            )
        return list(value)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        plain = core_schema.union_schema(
            [core_schema.bool_schema(strict=True), core_schema.str_schema(strict=True)]
        )
        return core_schema.with_info_plain_validator_function(
            lambda text, info: parse_field(cls.parse, _expression_text(text), info),
            json_schema_input_schema=plain,
        )


class _Compiled(NamedTuple):
    run: Callable[[Meter], Any]
    references: References
    faults: list[Fault]


class Cache:
    """Compiles the templates of one document, each once, and bounds them together.

    The parser takes about 10 µs for a token of Jinja's (a name, a dot, a bracket, the text between
    two tags).
    """

    def __init__(self) -> None:
        self._made: dict[tuple[bool, str], _Compiled] = {}
        self._tokens = _Tokens()

    def template(self, text: str) -> _Compiled:
        """The closure of a template."""
        known = self._made.get((True, text))
        if known is None:
            known = self._made[True, text] = self._template(text)
        return known

    def expression(self, text: str) -> _Compiled:
        """The closure of an expression."""
        known = self._made.get((False, text))
        if known is None:
            known = self._made[False, text] = self._expression(text)
        return known

    def _template(self, text: str) -> _Compiled:
        compiler = TemplateCompiler()
        tree = self._parse(compiler, text, lambda: Parser(self._tokens, text).parse())
        run = compiler.body(tree.body) if tree else lambda _: None
        return _Compiled(run, compiler.references, compiler.faults)

    def _expression(self, text: str) -> _Compiled:
        compiler = ExpressionCompiler()
        tree = self._parse(compiler, text, lambda: self._whole_expression(text))
        if tree is None:
            return _Compiled(lambda _: None, compiler.references, compiler.faults)
        code = compiler.expression(tree)
        where = (_short(text), 1)

        def run(meter: Meter) -> Any:
            meter.where = where
            return code(meter)

        return _Compiled(run, compiler.references, compiler.faults)

    def _whole_expression(self, text: str) -> nodes.Expr:
        parser = Parser(self._tokens, text, state="variable")
        tree = parser.parse_expression()
        if not parser.stream.eos:
            rest = parser.stream.current
            parser.fail(f"the expression ends before `{str(rest.value)[:40]}`", rest.lineno)
        return tree

    def _parse(self, compiler: ExpressionCompiler, text: str, parse: Callable[[], Any]) -> Any:
        """Jinja's tree, or None and a fault."""
        try:
            return parse()
        except TemplateSyntaxError as error:
            message = in_words(error.message or "syntax error", text)
            compiler.faults.append(Fault(message, error.lineno))
        except RecursionError:
            compiler.faults.append(Fault("is nested too deeply", 1))
        except ValueError:  # of int(): more digits than Python reads
            compiler.faults.append(Fault("a number is too large: whole numbers have 64 bits", 1))
        return None


class _Tokens(Environment):
    """Jinja's syntax with a bound on the tokens of all that is parsed with it."""

    def __init__(self) -> None:
        super().__init__(keep_trailing_newline=True)
        self._left = limits.TEMPLATE_TOKENS

    def _tokenize(
        self, source: str, name: str | None, filename: str | None = None, state: str | None = None
    ) -> TokenStream:
        return TokenStream(
            self._bounded(super()._tokenize(source, name, filename, state)), name, filename
        )

    def _bounded(self, tokens: TokenStream) -> Iterator[Token]:
        for token in tokens:
            self._left -= 1
            if self._left < 0:
                raise TemplateSyntaxError(
                    f"the templates of the document have more than {limits.TEMPLATE_TOKENS:,}"
                    " words and signs in their tags",
                    token.lineno,
                )
            yield token


def _evaluate(run: Callable[[Meter], Any], meter: Meter) -> Any:
    try:
        return run(meter)
    except Refused as refused:
        what, line = meter.where
        told = what in ("", "…") or str(refused).startswith(f"`{what}`")
        what = "" if told else f"`{what}`: "
        raise TemplateProblem(f"{what}{refused}", line) from None


def _expression_text(value: Any) -> str | bool:
    if isinstance(value, str | bool):
        return value
    raise PydanticCustomError("expression_type", "must be an expression, as text")


def parse_field(
    parse: Callable[[Any, Cache | None], Any], text: Any, info: core_schema.ValidationInfo
) -> Any:
    """What `parse` makes of a field; its faults as an error of pydantic."""
    try:
        return parse(text, info.context)
    except TemplateFaults as error:
        raise PydanticCustomError(
            "template", "{message}", {"message": str(error), "faults": error.faults}
        ) from None


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:79] + "…"
