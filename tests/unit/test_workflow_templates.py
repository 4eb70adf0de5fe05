"""Templates and expressions: what they can do, and that they can do no more (W3.1, cnl.md)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from relay.engines.embedded import limits
from relay.engines.embedded.templates import (
    Expression,
    Template,
    TemplateFaults,
    TemplateProblem,
)

NAMES: dict[str, Any] = {
    "inputs": {
        "n": 7, "f": 2.5, "t": "Some text", "l": [3, 1, 2], "o": {"a": {"b": "deep"}, "items": 1},
        "yes": True, "no": False, "null": None, "empty": [], "many": list(range(10_000)),
        "big": "x" * 1_000_000, "texts": ["x" * 100] * 10_000, "tree": [[["y"] * 20] * 20] * 20,
        "large": 2**63,
    },
    "tasks": {
        "t1": {"output": {"label": "bug", "tags": ["a", "b"]}, "status": "completed"},
        "gone": {"output": None, "status": "skipped"},
    },
    "item": {"id": 1},
}  # fmt: skip


def render(text: str) -> str:
    return Template.parse(text).render(NAMES)


def value(text: str) -> Any:
    return Expression.parse(text).value(NAMES)


AS_JINJA = [
    "plain", "a\n", "{{ inputs.t }}", "{{ inputs['t'] }}!", "{{ inputs.n + 1 - 2 * 3 }}",
    "{{ inputs.n // 2 }} {{ inputs.n / 2 }} {{ inputs.n % 4 }} {{ 2 ** 10 }} {{ 2 ** 3 ** 2 }}",
    "{{ -inputs.n }} {{ +inputs.n }} {{ inputs.f ** 2 }}", "{{ 'a' ~ 1 ~ inputs.t }}",
    "{{ 'a' + 'b' }}", "{{ inputs.t | upper | lower }}", "{{ '  x ' | trim }}",
    "{{ 'xxaxx' | trim('x') }}", "{{ inputs.l | length }} {{ inputs.t | length }}",
    "{{ inputs.l | first }} {{ inputs.l | last }}", "{{ inputs.l | join(', ') }}",
    "{{ inputs.l | join }}", "{{ inputs.t | truncate(7) }}",
    "{{ 'a b c d e f g h' | truncate(6) }}",
    "{{ 'abcdefghijklmnop' | truncate(8, true, '…') }}", "{{ inputs.nope | default('d') }}",
    "{{ inputs.empty | default('d', true) }}", "{{ inputs.empty | default('d', boolean=true) }}",
    "{% if inputs.yes %}a{% elif inputs.no %}b{% else %}c{% endif %}",
    "{% if not inputs.yes %}a{% elif inputs.n > 6 %}b{% else %}c{% endif %}",
    "{% for x in inputs.l %}<{{ x }}>{% endfor %}",
    "{% for x in inputs.empty %}a{% else %}b{% endfor %}",
    "{% for x in inputs.l if x > 1 %}{{ x }}{% endfor %}",
    "{% for k in inputs.o %}{{ k }},{% endfor %}",
    "{% for x in inputs.l %}{% for y in inputs.l %}{{ x * y }},{% endfor %}{% endfor %}",
    "{% for item in inputs.l %}{{ item }}{% endfor %}{{ item.id }}",
    "{{ 'a' if inputs.yes else 'b' }}",
    "{{ inputs.o.a.b }}{{ inputs.o['a'].b }}",
    "{{ inputs.t[0] }}{{ inputs.l[-1] }}{{ inputs.t[2:4] }}{{ inputs.t[::-1] }}",
    "{{ tasks.t1.status }} {{ tasks.t1.output.label }}",
    "{{ inputs.n is defined }}{{ inputs.x is undefined }}"
    " {{ inputs.null is none }}", "{# comment #}x", "{% raw %}{{ x }}{% endraw %}", "a {{- 1 -}} b",
    "{{ 1 < 2 <= 2 != 3 }} {{ 3 in inputs.l }} {{ 'x' not in inputs.t }} {{ 'a' in inputs.o }}",
    "{{ inputs.yes and inputs.n or 3 }} {{ inputs.empty or 'e' }}", "{{ [1, 2] + [3] }}",
]  # fmt: skip


@pytest.mark.parametrize("text", AS_JINJA)
def test_what_is_allowed_means_what_it_means_in_jinja(text: str) -> None:
    def finalize(value: Any) -> Any:
        return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))

    jinja = SandboxedEnvironment(keep_trailing_newline=True, finalize=finalize)
    strict = StrictUndefined if "undefined" not in text and "default" not in text else None
    if strict:
        jinja.undefined = strict
    assert render(text) == jinja.from_string(text).render(NAMES)


def test_values_render_as_json() -> None:
    assert render("{{ inputs.o }} {{ tasks.t1.output.tags }}") == (
        '{"a":{"b":"deep"},"items":1} ["a","b"]'
    )
    assert render("{{ inputs.null }} {{ inputs.yes }} {{ inputs.f }}") == "null true 2.5"
    assert render("{{ inputs.t | tojson }}{{ '<&>' | tojson }}") == '"Some text""<&>"'
    assert render("{{ {'a': [1, inputs.n]} }}") == '{"a":[1,7]}'


def test_entries_are_of_the_value_never_of_python() -> None:
    assert render("{{ inputs.o.items }}") == "1"
    for text in ("inputs.l.append", "inputs.t.upper", "inputs.n.real", "inputs.t['__class__']"):
        with pytest.raises(TemplateProblem, match="no such entr"):
            value(text)


def test_expressions_have_values_with_or_without_braces() -> None:
    assert value("inputs.l") == [3, 1, 2]
    assert value("{{ inputs.l }}") == [3, 1, 2]
    assert value(" {{- tasks.t1.output -}} ") == NAMES["tasks"]["t1"]["output"]
    assert Expression.parse(False).value({}) is False
    assert Expression.parse("inputs.empty").holds(NAMES) is False
    assert Expression.parse("inputs.many").entries(NAMES) == NAMES["inputs"]["many"]
    with pytest.raises(TemplateProblem, match="is an object; items are a list"):
        Expression.parse("inputs.o").entries(NAMES)
    with pytest.raises(TemplateProblem, match="20,000 items; at most 10,000"):
        Expression.parse("inputs.many + inputs.many").entries(NAMES)


def test_what_is_missing_is_named_with_its_line() -> None:
    with pytest.raises(TemplateProblem) as caught:
        render("a\nb {{ inputs.o.x.y }}")
    assert (caught.value.line, caught.value.message) == (
        2, "`inputs.o.x.y`: `inputs.o.x` is not there: the object has no such entry",
    )  # fmt: skip
    for text, why in {
        "{{ tasks.later.output }}": "it has not run",
        "{{ tasks.gone.output.x }}": "null has no such entries",
        "{{ inputs.l[9] }}": "a list has only 3 entries",
        "{{ inputs.l.length }}": "^`inputs.l.length` is not there: .* `. length` counts them$",
        "{{ inputs.empty | first }}": "there are no entries",
        "{% if inputs.x %}{% endif %}": "no such entry",
        "{% for x in inputs.n %}{% endfor %}": "not over a number",
        "{{ inputs.o + 1 }}": "`+` is for numbers, not for an object",
        "{{ inputs.t < 1 }}": "is for numbers, not for text",
        "{{ 1 / 0 }}": "division by zero",
    }.items():
        with pytest.raises(TemplateProblem, match=why.replace("+", r"\+")):
            render(text)


REFUSED = [
    "{{ ''.__class__ }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ inputs._x }}",
    "{{ '' | attr('__class__') }}", "{{ inputs | map(attribute='__class__') }}",
    "{{ '{0.__class__}'.format(1) }}", "{{ '%s' | format(1) }}", "{{ cycler.__init__ }}",
    "{{ joiner() }}", "{{ lipsum() }}", "{{ lipsum.__globals__ }}", "{{ self.__init__ }}",
    "{{ namespace(a=1) }}", "{{ range(9) }}", "{{ dict(a=1) }}", "{{ config() }}",
    "{% set x = 1 %}", "{% set x %}a{% endset %}", "{% macro m() %}{% endmacro %}",
    "{% include 'x' %}", "{% import 'x' as y %}", "{% from 'x' import y %}", "{% extends 'x' %}",
    "{% block b %}{% endblock %}", "{% with a = 1 %}{% endwith %}", "{% call x() %}{% endcall %}",
    "{% filter upper %}a{% endfilter %}", "{% do 1 %}", "{% autoescape true %}{% endautoescape %}",
    "{% for a, b in inputs.l %}{% endfor %}", "{% for x in inputs.l recursive %}{% endfor %}",
    "{% for inputs in inputs.l %}{% endfor %}", "{% for _x in inputs.l %}{% endfor %}",
    "{% for a in x %}{% for b in a %}{% for c in b %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ 1 is odd }}", "{{ 1 is callable }}", "{{ x | safe }}", "{{ x | pprint }}", "{{ x | sort }}",
    "{{ x | center(1000000000) }}", "{{ x | indent(1000000) }}", "{{ x | join('a', 'b') }}",
    "{{ x | join(attribute='__class__') }}", "{{ x | lower(1) }}", "{{ x | join(*y) }}",
    "{{ tasks }}", "{{ tasks.a }}", "{{ tasks.a.__class__ }}", "{{ tasks[inputs.x].output }}",
    "{{ " + "9" * 5000 + " }}", "{{ 18446744073709551616 }}", "{{ 1e999 }}", "{{ '\\ud800' }}",
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "{{ " + "1 + " * 500 + "1 }}",
    "{{ a" + ".b" * 500 + " }}", "{{ " + "not " * 5000 + "1 }}", "{{ a" + " | lower" * 100 + " }}",
    "{{", "{% if %}", "{{ a b }}", "{% endfor %}", "{{ a }", "{# a", "{% raw %} a", "{{ }}",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_what_is_not_allowed_is_refused_when_it_is_loaded(text: str) -> None:
    with pytest.raises(TemplateFaults):
        Template.parse(text)


MANY, END = "{% for x in inputs.many %}", "{% endfor %}"
BOUNDED = {
    "{{ '%c' % inputs.large }}": "`%` is for numbers",
    "{{ '%1000000000s' % 1 }}": "`%` is for numbers",
    "{{ inputs.t * 1000000000 }}": "`*` is for numbers",
    "{{ inputs.l * 1000000000 }}": "`*` is for numbers",
    "{{ [[0] * 9] }}": "`*` is for numbers",
    "{{ 9 ** 9 ** 9 ** 9 }}": "too large",
    "{{ 2 ** 64 }}": "too large",
    "{{ 10.0 ** 400 }}": "too large",
    "{{ (0 - 8) ** 0.5 }}": "no such power",
    "{{ inputs.large * 4 }}": "too large",
    "{{ inputs.big ~ inputs.big }}": "1 MiB",
    "{{ inputs.big + inputs.big }}": "1 MiB",
    "{{ inputs.big }}{{ inputs.big }}": "1 MiB",
    "{{ inputs.texts | join(inputs.big) }}": "1 MiB",
    "{{ inputs.many | join(inputs.texts | join) }}": "1 MiB",
    "{{ [inputs.big, inputs.big] }}": "1 MiB",
    MANY + "{{ inputs.texts }}" + END: "1 MiB",
    MANY + "{% for y in inputs.many %}{% endfor %}" + END: "200,000 steps",
    MANY + "{% for y in inputs.many %}{{ y }}{% endfor %}" + END: "steps",
    MANY + "{% if inputs.big == inputs.big ~ '' %}{% endif %}" + END: "step",
    MANY + "{% if 'q' in inputs.big %}{% endif %}" + END: "steps",
    MANY + "{% if 'q' in inputs.texts %}{% endif %}" + END: "steps",
    MANY + "{% if inputs.tree == [x] %}{% endif %}" + END: "steps",
    MANY + "{% if inputs.big | upper | lower %}{% endif %}" + END: "steps",
    MANY + "{% if inputs.big[::-1] %}{% endif %}" + END: "steps",
    MANY + "{% if inputs.texts | tojson %}{% endif %}" + END: "steps",
    MANY + "{% if inputs.many + inputs.many %}{% endif %}" + END: "steps",
    MANY + "{% if inputs.big | trim('xyz' ~ x) %}{% endif %}" + END: "steps",
    MANY + "{% if inputs.big | truncate(9, true) %}{% endif %}" + END: "step",
    MANY + "{% for y in inputs.texts %}{% endfor %}" + END: "steps",
}  # fmt: skip


@pytest.mark.parametrize("text", BOUNDED, ids=lambda text: text[:70])
def test_what_grows_is_stopped(text: str) -> None:
    template = Template.parse(text)
    before = time.process_time()
    with pytest.raises(TemplateProblem, match=BOUNDED[text].replace("*", r"\*")):
        template.render(NAMES)
    assert time.process_time() - before < 1  # below 0.1 s


def test_a_loop_over_ten_thousand_items_is_within_the_bounds() -> None:
    text = "{% for x in inputs.many %}{% if x > 5 and x != 9 %}{{ x + 1 }}\n{% endif %}{% endfor %}"
    assert len(render(text).splitlines()) == 10_000 - 7


def test_values_that_are_nested_without_end_are_no_harm() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for text in ("{{ inputs.d }}", "{{ inputs.d == inputs.e }}", "{{ inputs.d | tojson }}"):
        with pytest.raises(TemplateProblem):
            Template.parse(text).render({"inputs": {"d": deep, "e": [deep]}})


ATOMS = st.sampled_from(
    ["1", "7", "2.5", "'x'", "'%s'", "inputs.n", "inputs.big", "inputs.many", "inputs.texts", "a",
     "inputs.tree", "inputs.o", "inputs.large", "inputs.nope", "tasks.t1.output", "true", "b"]
)  # fmt: skip


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operators = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "!="]
    filters = ["join", "upper", "length", "tojson", "first", "truncate(9)", "default('x')", "trim"]
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(operators), inner),
        st.builds("({} | {})".format, inner, st.sampled_from(filters)),
        st.builds("({} | join({}))".format, inner, inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("({})[{}]".format, inner, inner),
        st.builds("({})[::{}]".format, inner, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
    )


EXPRESSIONS = st.recursive(ATOMS, _grown, max_leaves=8)
TEMPLATES = st.one_of(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
    st.builds(
        "{{% for a in {} %}}{{% for b in {} %}}{{{{ {} }}}}{{% endfor %}}{{% endfor %}}".format,
        EXPRESSIONS, EXPRESSIONS, EXPRESSIONS,
    ),
    st.builds(
        "{{% for a in {} %}}{{% if {} %}}{{{{ {} }}}}{{% endif %}}{{% endfor %}}".format,
        EXPRESSIONS, EXPRESSIONS, EXPRESSIONS,
    ),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(TEMPLATES)
def test_no_template_takes_long_or_makes_much(text: str) -> None:
    try:
        template = Template.parse(text)
    except TemplateFaults:
        return
    before = time.process_time()
    try:
        result = template.render({**NAMES, "a": 1, "b": "b"})
    except TemplateProblem as problem:
        result = problem.message
    assert 0 <= len(result) <= limits.RESULT_CHARS
    assert time.process_time() - before < 1


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(
    ["{{", "}}", "{%", "%}", "{#", "#}", "a", ".", "|", "(", ")", "[", "]", "for", "if", "in", " ",
     "endfor", "endif", "1", "'", "\"", "\\", "not", "\n", "-", "*", "~", ":", ",", "=", "raw"]
), max_size=30).map("".join))  # fmt: skip
def test_nothing_but_faults_is_raised_for_a_text(text: str) -> None:
    faults = None
    try:
        Template.parse(text)
    except TemplateFaults as error:
        faults = error.faults
    assert faults != []
