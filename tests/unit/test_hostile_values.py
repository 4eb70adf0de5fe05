"""Values that are JSON and fit nowhere: halves of emojis, levels and spaces without end."""

from __future__ import annotations

import json
import re
import resource
import time
from typing import Any

import pytest

from relay.engines.base import DocumentError
from relay.engines.embedded.answers import JSON_CHARS, Unreadable, json_value
from relay.engines.embedded.loading import load
from relay.engines.embedded.schemas import AnswerSchema
from tests.support.engines import play, task

HALF = "\ud83d"
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"properties": {"a": {"type": "string", "pattern": "x"}}},
    {"patternProperties": {".": {"maxLength": 3}}},
    {"enum": ["x", {"a": 1}]},
    {"uniqueItems": True, "minItems": 1},
    {"additionalProperties": False},
]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
@pytest.mark.parametrize(
    "value",
    [HALF, {HALF: 1}, {"a": HALF}, [HALF, HALF], {"b": [HALF]}, nested(900), [nested(900)]],
    ids=lambda value: ascii(value)[:24],
)
def test_a_schema_judges_every_json_value(schema: dict[str, Any], value: Any) -> None:
    problems = AnswerSchema(schema).problems(value)
    for problem in problems:
        problem.encode()
        assert len(problem) < 1000


def test_what_a_schema_cannot_look_at_does_not_fit_it() -> None:
    texts = AnswerSchema({"properties": {"a": {"type": "string", "pattern": "x"}}})
    assert texts.problems({"a": HALF}) == [
        "the value holds half of a surrogate pair, which is no character"
    ]
    assert texts.problems(nested(900)) == ["the value is nested too deeply for its schema"]
    assert texts.problems({"a": "x"}) == []


MANY: dict[str, Any] = {"anyOf": [{"const": f"a{n}"} for n in range(2500)]}


@pytest.mark.parametrize(
    ("schema", "value", "told"),
    [
        ({"items": MANY}, [0] * 200_000, "too large for its schema"),
        ({"items": MANY}, [0] * 1000, "too large to say where"),
        ({"anyOf": [{"items": MANY}, {"const": 1}]}, [0] * 900, "too large to say where"),
        ({"items": {"type": "string"}}, [0] * 300_000, "too large to say where"),
        ({"items": {"type": "string"}}, [0] * 3_000_000, "too large for its schema"),
        ({"additionalProperties": MANY}, dict.fromkeys(map(str, range(1000)), 0), "to say where"),
        ({"allOf": [{"pattern": f"a*b{n}"} for n in range(60)]}, "a" * 20_000_000, "too large"),
    ],
)
def test_a_schema_costs_little_whatever_it_is_and_whatever_is_held_to_it(
    schema: dict[str, Any], value: Any, told: str
) -> None:
    """One answer could stop the process for a minute, or end it: gigabytes of problems."""
    judge = AnswerSchema(schema)
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    [problem] = judge.problems(value)
    assert told in problem
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_large_values_that_fit_are_taken() -> None:
    schema = {"type": "array", "items": {"type": "object", "required": ["a"]}, "uniqueItems": True}
    assert AnswerSchema(schema).problems([{"a": n} for n in range(200_000)]) == []
    assert AnswerSchema({"type": "string", "pattern": "b$"}).problems("a" * 4_000_000 + "b") == []


@pytest.mark.parametrize("reply", ['{"a": "\\ud83d"}', json.dumps(nested(900))])
def test_a_reply_that_no_schema_can_look_at_is_an_invalid_output(reply: str) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "x"}}}
    played = play([task("t", json=schema)], {"t": [reply]})
    [error] = [said.data for said in played.outlet.said if said.name == "task_error"]
    assert error["error"]["code"] == "invalid_output"


@pytest.mark.parametrize(
    ("document", "inputs", "path"),
    [
        ({"workflow": {HALF: 1}}, {}, "workflow"),
        ({HALF: 1}, {}, ""),
        ({"workflow": {"name": "w", "inputs": {"x": {HALF: 1}}}}, {}, "workflow.inputs.x"),
        ({"workflow": {"name": "w", "inputs": {"x": 1}}}, {"x": {HALF: 1}}, "inputs.x"),
    ],
)
def test_w1_4_half_an_emoji_in_a_key_is_a_problem_with_its_place(
    document: dict[str, Any], inputs: dict[str, Any], path: str
) -> None:
    with pytest.raises(DocumentError) as refused:
        load(document, inputs, agents=("a",))
    found = [p for p in refused.value.problems if p.message.startswith("a key holds half")]
    assert [problem.path for problem in found] == [path]


@pytest.mark.parametrize(
    "text",
    [
        "```\n" + " " * (JSON_CHARS - 4),  # as models do that do not find their end
        "```json\n" + "\t\n" * (JSON_CHARS // 2 - 4),
        "```\n{" + " " * (JSON_CHARS - 9) + "```",
        "`" * JSON_CHARS,
        "```a\n" * (JSON_CHARS // 5),
    ],
    ids=["spaces", "lines", "closed", "ticks", "fences"],
)
def test_a_long_reply_is_read_in_linear_time(text: str) -> None:
    began = time.process_time()
    with pytest.raises(Unreadable):
        json_value(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1e999}', "1e999 is more than a double holds"),
        ("[-1.5e400]", "-1.5e400 is more than a double holds"),
        ("NaN", "NaN is not JSON"),
        ("9" * 5000, "a whole number has more than 4,300 digits"),
    ],
)
def test_a_reply_with_a_number_that_would_not_be_kept_is_no_json(text: str, told: str) -> None:
    with pytest.raises(Unreadable, match=f"^the reply is no JSON: {re.escape(told)}$"):
        json_value(text)
    numbers = [1e308, -0.5, 12345678901234567890123]
    assert json_value(json.dumps(numbers)) == numbers


@pytest.mark.parametrize(
    "text", ["```json\n[1]\n```", "```\r\n[1]\r\n  ```", "so:\n```\n[1]```\nthat is it", "[1]  \n"]
)
def test_a_fenced_reply_is_read_without_its_fence(text: str) -> None:
    assert json_value(text) == [1]
