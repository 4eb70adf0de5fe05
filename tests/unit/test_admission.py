"""M1.1, M1.2: keys and the request schema."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from planes.auth import AccountSuspended, InvalidKey, KeyRing
from planes.errors import InvalidJson
from planes.models.schemas import parse
from planes.settings import Key
from relay.errors import BadRequest

KEY = "ozk_test_0123456789abcdef"


def ring(**fields: Any) -> KeyRing:
    keys = [{"key": KEY, "org": "test", "max_concurrent": 3} | fields, {"key": "k2", "org": "b"}]
    return KeyRing([Key.model_validate(key) for key in keys])


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"bearer  {KEY} "},
        {"x-api-key": KEY},
        {"Authorization": "Basic eDp5", "x-api-key": KEY},
    ],
)
def test_both_ways_to_present_a_key(headers: dict[str, str]) -> None:
    principal = ring().authenticate(headers)
    assert (principal.org, principal.max_concurrent) == ("test", 3)
    assert KEY not in repr(principal)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": KEY},
        {"x-api-key": ""},
        {"Authorization": "Bearer \udce4\udcbd"},
        {"Authorization": "Bearer ключ"},
        {"x-api-key": "\ud83d"},
    ],
)
def test_anything_else_is_a_plain_401(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidKey) as error:
        ring().authenticate(headers)
    assert (error.value.status, error.value.code) == (401, "invalid_api_key")


def test_suspended_and_revoked() -> None:
    with pytest.raises(AccountSuspended) as suspended:
        ring(status="suspended").authenticate({"x-api-key": KEY})
    assert (suspended.value.status, suspended.value.code) == (403, "account_suspended")
    with pytest.raises(InvalidKey):
        ring(status="revoked").authenticate({"x-api-key": KEY})


def test_no_key_is_kept_in_clear() -> None:
    assert KEY not in repr(vars(ring()))


def request(body: Any) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(data, request_id="req_1", created=1)


GOOD = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_what_the_gateway_reads() -> None:
    chat = request({**GOOD, "stream": True, "n": 2, "stream_options": {"include_usage": True}})
    assert (chat.slug, chat.stream, chat.choices, chat.include_usage) == ("m", True, 2, True)
    chat = request({**GOOD, "stream": None, "stream_options": None, "n": None})
    assert (chat.stream, chat.choices, chat.include_usage) == (False, 1, False)
    assert not request({**GOOD, "stream_options": {"include_usage": False}}).include_usage


def test_a_million_bad_messages_are_one_problem() -> None:
    """Pydantic would make an error of each: 8 MB were 20 s and 4 GB."""
    started = time.process_time()
    with pytest.raises(BadRequest) as error:
        request(b'{"model":"m","messages":[' + b"1," * 1_000_000 + b"1]}")
    assert error.value.param == "messages.0"
    assert time.process_time() - started < 5


def test_unknown_fields_are_kept() -> None:
    """M1.1."""
    body = {**GOOD, "x": {"y": [1, 2.5, None]}, "stream_options": {"z": 1}, "temperature": 7}
    assert request(body).body == body


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"model": "m",\n "messages": [}', "line 2, column 15"),
        (b"{", "line 1, column 2"),
        (b"", "empty"),
        (b'{"model": "\xff"}', "line 1"),
        (b'{"model": NaN}', "line 1, column 11"),
        (b"[" * 100_000, "line 1"),
    ],
)
def test_invalid_json_names_the_place(body: bytes, where: str) -> None:
    with pytest.raises(InvalidJson) as error:
        request(body)
    assert where in error.value.message
    assert error.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"n": True}, "n"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        request({**GOOD, **change})
    assert error.value.param == param
    assert f"`{param}`" in error.value.message


@pytest.mark.parametrize("body", [[], "x", 3, None])
def test_a_body_that_is_no_object(body: Any) -> None:
    with pytest.raises(BadRequest):
        request(body)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(BadRequest) as error:
        request({"messages": GOOD["messages"]})
    assert error.value.param == "model"


def test_lone_surrogates_in_a_request_are_legal() -> None:
    """B20, on the way in."""
    chat = request(b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}')
    assert chat.body["messages"][0]["content"] == "\ud83d"
