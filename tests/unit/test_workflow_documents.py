"""Workflow documents: every kind, every problem at its place (W1.4, cnl.md)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from relay.engines.base import DocumentError, Problem
from relay.engines.embedded import document as kinds
from relay.engines.embedded import limits, loading, reading
from relay.engines.embedded.loading import load
from relay.engines.embedded.schema import document_schema
from relay.engines.embedded.schemas import AnswerSchema, SchemaFault

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures/workflows"
AGENTS = ("critic", "judge", "writer")
GOOD = sorted((FIXTURES / "good").iterdir())
BAD = sorted((FIXTURES / "bad").rglob("*.yaml"))


def names(paths: list[Path]) -> list[str]:
    return [f"{path.parent.name}/{path.stem}" for path in paths]


def problems(document: Any, inputs: dict[str, Any] | None = None) -> list[Problem]:
    with pytest.raises(DocumentError) as caught:
        load(document, inputs or {}, agents=AGENTS)
    return caught.value.problems


def told(found: list[Problem]) -> str:
    return "".join(
        f"{p.line or '-'}:{p.column or '-'} {p.path or '-'} [{p.task_id or '-'}] {p.message}\n"
        for p in found
    )


def workflow(*tasks: Any, **others: Any) -> dict[str, Any]:
    return {"workflow": {"name": "w", "tasks": list(tasks), **others}}


def ask(identifier: str, prompt: str = "p", **others: Any) -> dict[str, Any]:
    return {"type": "yield", "id": identifier, "prompt": prompt, **others}


@pytest.mark.parametrize("path", GOOD, ids=names(GOOD))
def test_good_documents_load_as_text_and_as_object(path: Path) -> None:
    text = path.read_text()
    loaded = load(text, {}, agents=AGENTS)
    assert loaded.task_count == len(list(loaded.workflow.walk()))
    again = load(reading.read(text).value, {}, agents=AGENTS)
    assert [t.id for t in again.workflow.walk()] == [t.id for t in loaded.workflow.walk()]


def test_good_documents_hold_every_kind() -> None:
    found = {
        task.type
        for path in GOOD
        for task in load(path.read_bytes(), {}, agents=AGENTS).workflow.walk()
    }
    assert found == set(kinds.KINDS)


@pytest.mark.parametrize("path", BAD, ids=names(BAD))
def test_bad_documents_have_all_their_problems_in_order(path: Path) -> None:
    assert told(problems(path.read_bytes())) == path.with_suffix(".txt").read_text()


@pytest.mark.parametrize("path", GOOD, ids=names(GOOD))
def test_good_documents_fit_the_schema(path: Path) -> None:
    validator = jsonschema_rs.validator_for(document_schema())
    assert list(validator.iter_errors(reading.read(path.read_text()).value)) == []


STRUCTURE = sorted((FIXTURES / "bad/structure").glob("*.yaml"))


@pytest.mark.parametrize("path", STRUCTURE, ids=names(STRUCTURE))
def test_structural_errors_do_not_fit_the_schema(path: Path) -> None:
    value = reading.read(path.read_text()).value
    assert not jsonschema_rs.is_valid(document_schema(), value)


def test_each_single_structural_error_is_one_of_the_schema_too() -> None:
    good = {"type": "task", "id": "a", "agent": "writer", "prompt": "p"}
    validator = jsonschema_rs.validator_for(document_schema())
    assert validator.is_valid(workflow(good))
    for change in (
        {"id": "a.b"}, {"id": ""}, {"prompt": ""}, {"prompt": 3}, {"retries": 6}, {"retries": -1},
        {"timeout_s": 0}, {"on_error": "x"}, {"type": "x"}, {"other": 1}, {"max_tokens": 0},
        {"json": False}, {"when": 1}, {"agent": None},
    ):  # fmt: skip
        document = workflow({**good, **change})
        assert not validator.is_valid(document), change
        assert problems(document), change


def test_the_schema_names_every_key_of_every_kind_and_describes_it() -> None:
    definitions = document_schema()["$defs"]
    for model in kinds.KINDS.values():
        properties = definitions[model.__name__]["properties"]
        keys = {field.alias or name for name, field in model.model_fields.items()}
        assert set(properties) == keys
        assert [k for k, v in properties.items() if k != "type" and "description" not in v] == []


def test_fields_are_typed_and_compiled() -> None:
    loaded = load((FIXTURES / "good/batch.yaml").read_bytes(), {}, agents=AGENTS)
    outer = loaded.workflow.tasks[0]
    assert isinstance(outer, kinds.Batch)
    assert (outer.variable, outer.concurrency) == ("ticket", 8)
    assert outer.items.entries({"inputs": loaded.inputs, "tasks": {}}) == loaded.inputs["tickets"]
    each = outer.task
    assert isinstance(each, kinds.Sequential)
    assert each.when is not None
    assert each.when.holds({"ticket": {"id": 1}}) is True
    assert each.when.holds({"ticket": {"id": 0}}) is False
    label = each.tasks[0]
    assert isinstance(label, kinds.AgentTask)
    assert label.prompt.render({"ticket": {"id": 1, "text": "a"}}) == "1: a"
    with pytest.raises(ValueError, match="frozen"):
        label.id = "other"


def test_inputs_are_the_defaults_with_those_of_the_request_over_them() -> None:
    document = workflow(ask("a"), inputs={"x": 1, "y": {"z": None}})
    assert load(document, {"x": [2]}, agents=()).inputs == {"x": [2], "y": {"z": None}}
    wrong = problems(document, {"xx": 1, "x": 2**70, "y": "\ud800"})
    assert [(p.path, p.message.split(";")[0]) for p in wrong] == [
        ("inputs.x", "a number does not fit: whole numbers have 64 bits, others must be finite"),
        ("inputs.y", "holds half of a surrogate pair, which is no character"),
        ("inputs.xx", "unknown input `xx` (did you mean `x`?)"),
    ]


def test_bounds_are_named() -> None:
    many = workflow(*(ask(f"t{n}") for n in range(limits.TASKS + 1)))
    assert "501 tasks; at most 500" in told(problems(many))
    load(workflow(*(ask(f"t{n}") for n in range(limits.TASKS))), {}, agents=())

    def batch(count: int) -> dict[str, Any]:
        items = [0] * count
        return workflow({"type": "batch", "id": "b", "items": items, "task": ask("t")})

    assert "10,001 items; at most 10,000" in told(problems(batch(limits.BATCH_ITEMS + 1)))
    load(batch(limits.BATCH_ITEMS), {}, agents=())

    def deep(depth: int) -> dict[str, Any]:
        task = ask(f"t{depth}")
        for level in range(depth - 1, 0, -1):
            task = {"type": "sequential", "id": f"t{level}", "tasks": [task]}
        return workflow(task)

    load(deep(limits.TASK_DEPTH), {}, agents=())
    assert "at most 8 deep" in told(problems(deep(limits.TASK_DEPTH + 1)))


def test_a_batch_in_a_batch_counts_as_deeper() -> None:
    task: dict[str, Any] = ask("t9")
    for level in range(8, 0, -1):
        task = {"type": "batch", "id": f"t{level}", "items": [1], "task": task}
    assert "[t9] stands too deep" in told(problems(workflow(task)))


def test_a_flood_of_problems_is_cut() -> None:
    found = problems(workflow(*(ask("a", "{{ x }}") for _ in range(300))))
    assert len(found) == limits.PROBLEMS + 1
    assert found[-1].message == "there are more problems than these"


def text_of(task: str) -> str:
    return f"workflow:\n  name: x\n  inputs: {{a: 1}}\n  tasks:\n    - {task}\n"


FLOODS = {
    "tags": text_of("{type: yield, id: t, prompt: '" + "{{inputs.a}}" * 20_000 + "'}"),
    "parentheses": text_of("{type: yield, id: t, prompt: '{{ " + "(" * 100_000 + " }}'}"),
    "terms": text_of("{type: yield, id: t, prompt: '{{ " + "1+" * 100_000 + "1 }}'}"),
    "not": text_of("{type: yield, id: t, prompt: '{{ " + "not " * 60_000 + "1 }}'}"),
    "names": text_of("{type: yield, id: t, prompt: '" + "{{b}}" * 50_000 + "'}"),
    "if": text_of("{type: yield, id: t, prompt: '" + "{% if 1 %}" * 20_000 + "'}"),
    "opened": text_of("{type: yield, id: t, prompt: '" + "{% raw %}" * 20_000 + "'}"),
    "keys": text_of("{" + ",".join(f"k{n}: 1" for n in range(15_000)) + "}"),
    "agents": text_of("\n    - ".join(
        f"{{type: task, id: t{n}, agent: a{n}, prompt: p}}" for n in range(499))),
    "references": text_of("\n    - ".join(
        f"{{type: yield, id: t{n}, prompt: '{'{{ tasks.zz.output }}' * 3}'}}" for n in range(499))),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOODS)
def test_no_document_takes_long_to_check(name: str) -> None:
    assert len(FLOODS[name]) <= limits.DOCUMENT_BYTES
    before = time.process_time()
    assert problems(FLOODS[name])
    assert time.process_time() - before < 3  # about 0.2 s


def test_answer_schemas_tell_what_is_wrong_without_the_value() -> None:
    schema = AnswerSchema({"type": "object", "properties": {"a": {"items": {"type": "integer"}}}})
    assert schema.problems({"a": [1]}) == []
    secret = "x" * 10_000
    assert schema.problems({"a": [1, secret]}) == ['a[1]: the value is not of type "integer"']
    assert schema.problems(secret) == ['the value is not of type "object"']
    many = AnswerSchema({"items": {"type": "string"}}).problems([1] * 100)
    assert len(many) == 5
    assert AnswerSchema(True).problems(None) == []


def test_patterns_of_answer_schemas_do_not_backtrack() -> None:
    schema = AnswerSchema({"pattern": "^(a+)+$"})
    before = time.process_time()
    assert schema.problems("a" * 100_000 + "b")
    assert time.process_time() - before < 1


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"enum": ["x" * 70_000]}, "at most 65,536"),
        ({"properties": {f"p{n}": {"pattern": "a"} for n in range(65)}}, "64 patterns"),
        ({"$defs": {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(30)}
          | {"a30": {}}, "$ref": "#/$defs/a0"}, "10,000 nodes"),
        ({"$defs": {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(1500)}}, "128 levels"),
        ({"$dynamicRef": "#x"}, "`$dynamicRef` is not supported"),
        ({"$defs": {"a": {"$ref": "b.json"}}}, "only `#/…` is supported"),
        ({"properties": {"a": {"$ref": "#/properties"}}}, "loops"),
    ],
)  # fmt: skip
def test_schemas_that_would_run_away_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(SchemaFault, match=message.replace("$", r"\$")):
        AnswerSchema(schema)


def test_a_property_may_be_called_as_a_keyword() -> None:
    schema = {"properties": {"$ref": {"type": "string"}, "id": {}, "$id": {}}}
    assert AnswerSchema(schema).problems({"$ref": 1}) != []


def test_a_document_that_was_seen_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs are looked at each time, and one that was wrong is not remembered."""
    loader = loading.Loader()
    text = "workflow: {name: w, inputs: {a: 1}, tasks: [{type: task, id: t, agent: x, prompt: p}]}"
    first = loader.load(text, {}, agents=["x"])
    assert loader.knows(text, ["x"])
    assert not loader.knows(text, ["x", "y"])
    monkeypatch.setattr(reading, "read", None)
    again = loader.load(text, {"a": 2}, agents=["x"])
    assert again.workflow is first.workflow
    assert (first.inputs, again.inputs) == ({"a": 1}, {"a": 2})
    with pytest.raises(DocumentError, match="nope"):
        loader.load(text, {"nope": 2}, agents=["x"])
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(DocumentError):
            loader.load(text, {}, agents=["y"])
    assert not loader.knows(text, ["y"])
