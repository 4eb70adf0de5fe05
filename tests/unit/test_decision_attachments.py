"""Inline attachments: D4.3 at a mutation and at the decide, and D4.4's served limits."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from encoders.decision_attachments import (
    MAX_DECODED_BYTES,
    AttachmentRefused,
    check_list,
    check_media,
    parse_items,
)
from encoders.decision_served import ModelLimits, Served, Subject, check_served
from tests.support.decision_driver import PNG, attachment

ALL = ("image", "audio", "document", "video")
MP4 = b"\0\0\0\x18ftypisom"
WAV = b"RIFF\x24\0\0\0WAVEfmt "


def refusal(items: list[Any]) -> tuple[int, str, str | None]:
    with pytest.raises(AttachmentRefused) as caught:
        parse_items(items, "attachments")
    error = caught.value.error
    return error.status, error.code, error.param


@pytest.mark.parametrize("name", ["", "1a", "_a", "-a", "a b", "é", "a" * 65, "a\n", 5, None, "a."])
def test_d4_3_bad_names(name: Any) -> None:
    item = attachment("a") | {"name": name}
    assert refusal([item]) == (400, "invalid_request", "attachments.0.name")


@pytest.mark.parametrize("name", ["a", "Z9", "a" * 64, "a_-9"])
def test_d4_3_good_names(name: str) -> None:
    (item,) = parse_items([attachment(name)], "attachments")
    assert (item.name, item.kind, item.mime) == (name, "image", "image/png")
    assert (item.size, item.head) == (len(PNG), PNG[:12])


@pytest.mark.parametrize(
    "item",
    [
        {"name": "a", "type": "image"},
        {"name": "a", "type": "image", "upload_id": "up_1"},
        {"name": "a", "type": "image", "data": "data:image/png;base64,", "mime": "image/png"},
        "a",
        None,
        [],
    ],
)
def test_d4_3_upload_references_and_other_shapes(item: Any) -> None:
    assert refusal([attachment("b"), item]) == (400, "invalid_request", "attachments.1")


@pytest.mark.parametrize("kind", ["picture", "", None, 1, "Image"])
def test_d4_3_other_kinds(kind: Any) -> None:
    item = attachment("a") | {"type": kind}
    assert refusal([item]) == (400, "invalid_request", "attachments.0.type")


@pytest.mark.parametrize(
    "data",
    [
        5,
        None,
        "",
        "aGk=",
        "https://example.com/a.png",
        "up_1",
        "data:image/png,aGk=",
        "data:;base64,aGk=",
        "data:image/png;base64",
        "data:image/png;base64;x,aGk=",
        "DATA:image/png;base64,aGk=",
        "data:image/png;base64,aGk",
        "data:image/png;base64,aGl=",  # bits left over
        "data:image/png;base64,aGk=\n",
        "data:image/png;base64, aGk=",
        "data:image/png;base64,aG k=",
        "data:image/png;base64,aGk==",
        "data:image/png;base64,aGk=aGk=",
        "data:image/png;base64,_-8=",  # the URL alphabet
        "data:image/png;base64,é===",
        "data:image/png;base64,=",
    ],
)
def test_d4_3_what_is_not_canonical_base64_of_a_data_url(data: Any) -> None:
    item = attachment("a") | {"data": data}
    assert refusal([item]) == (400, "invalid_request", "attachments.0.data")


@pytest.mark.parametrize("data", [b"", b"a", b"ab", b"abc", bytes(range(256))])
def test_d4_3_every_length_has_a_canonical_form(data: bytes) -> None:
    (item,) = parse_items([attachment("a", data)], "attachments")
    assert (item.size, item.head) == (len(data), data[:12])


def test_d4_3_over_16_items() -> None:
    items = [attachment(f"a{n}", kind="document") for n in range(17)]
    assert refusal(items) == (400, "invalid_request", "attachments")
    sixteen = parse_items(items[:16], "attachments")
    assert check_list(sixteen, "attachments") is None
    seventeen = (*sixteen, *parse_items(items[16:], "attachments"))
    problem = check_list(seventeen, "attachments")
    assert problem is not None
    assert (problem.status, problem.code) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        (["image"] * 4 + ["audio"], None),
        (["image"] * 5, "media_unsupported"),
        (["audio"] * 2, "media_unsupported"),
        (["document"] * 16, None),
        (["video"] * 2, None),
    ],
)
def test_d4_3_counts_of_kinds(kinds: list[str], code: str | None) -> None:
    items = [attachment(f"a{n}", kind=kind) for n, kind in enumerate(kinds)]
    problem = check_list(parse_items(items, "attachments"), "attachments")
    assert (problem.code if problem else None) == code
    assert problem is None or problem.status == 400


def test_d4_3_a_name_is_given_once() -> None:
    items = parse_items([attachment("a"), attachment("b"), attachment("a")], "attachments")
    problem = check_list(items, "attachments")
    assert problem is not None
    assert (problem.status, problem.code) == (400, "invalid_request")


def decide(*items: dict[str, str], served: tuple[str, ...] = ALL) -> tuple[int, str] | None:
    problem = check_media(parse_items(list(items), "attachments"), served, "attachments")
    return None if problem is None else (problem.status, problem.code)


@pytest.mark.parametrize(
    ("kind", "mime", "data"),
    [
        ("image", "image/png", PNG),
        ("image", "image/jpeg", b"\xff\xd8\xff\xe0"),
        ("image", "IMAGE/PNG", PNG),
        ("audio", "audio/wav", WAV),
        ("document", "application/pdf", b"%PDF-1.7"),
        ("video", "video/mp4", MP4),
    ],
)
def test_d4_3_files_that_are_served(kind: str, mime: str, data: bytes) -> None:
    assert decide(attachment("a", data, kind=kind, mime=mime)) is None
    wrong = attachment("a", b"x" + data, kind=kind, mime=mime)
    assert decide(wrong) == (422, "media_decode_failed")
    empty = attachment("a", b"", kind=kind, mime=mime)
    assert decide(empty) == (422, "media_decode_failed")
    others = tuple(other for other in ALL if other != kind)
    good = attachment("a", data, kind=kind, mime=mime)
    assert decide(good, served=others) == (404, f"{kind}_not_available")


@pytest.mark.parametrize(
    ("kind", "mime"),
    [
        ("image", "image/svg+xml"),
        ("image", "application/pdf"),
        ("audio", "audio/mpeg"),
        ("document", "text/plain"),
        ("document", "image/png"),
        ("video", "video/webm"),
        ("audio", "image/gif"),
    ],
)
def test_d4_3_other_types(kind: str, mime: str) -> None:
    assert decide(attachment("a", PNG, kind=kind, mime=mime)) == (400, "media_unsupported")


@pytest.mark.parametrize(
    ("mime", "data"), [("image/gif", b"GIF89a"), ("image/webp", b"RIFF\0\0\0\0WEBP")]
)
def test_d4_3_images_without_a_price(mime: str, data: bytes) -> None:
    assert decide(attachment("a", data, mime=mime)) == (403, "media_unpriced")
    assert decide(attachment("a", PNG, mime=mime)) == (422, "media_decode_failed")


def test_d4_3_decoded_bytes_together() -> None:
    half = PNG + bytes(MAX_DECODED_BYTES // 2 - len(PNG))
    assert decide(attachment("a", half), attachment("b", half)) is None
    more = attachment("b", half + b"x")
    assert decide(attachment("a", half), more) == (413, "media_too_large")


def test_d4_3_a_video_is_alone() -> None:
    video = attachment("v", MP4, kind="video", mime="video/mp4")
    assert decide(video) is None
    assert decide(video, attachment("a")) == (400, "media_unsupported")


def test_the_encoded_form_is_compact_and_in_one_order() -> None:
    given = dict(reversed(attachment("a").items()))
    (item,) = parse_items([given], "attachments")
    payload = base64.b64encode(PNG)
    assert item.encoded == (
        b'{"name":"a","type":"image","data":"data:image/png;base64,%s"}' % payload
    )


BOOLEAN = {"type": "boolean", "instructions": "?"}
SERVED = Served(
    models={"m": ModelLimits(questions=2, choice_options=2, score_levels=3)}, media=("image",)
)


def choice(options: int) -> dict[str, Any]:
    return {"type": "choice", "instructions": "?", "criteria": dict.fromkeys("abcd"[:options])}


def score(levels: int) -> dict[str, Any]:
    return {"type": "score", "instructions": "?", "criteria": list("abcd"[:levels])}


@pytest.mark.parametrize(
    ("model", "questions", "refused"),
    [
        ("m", {"a": BOOLEAN, "b": choice(2)}, None),
        ("m", {"a": score(3)}, None),
        ("x", {"a": BOOLEAN}, (404, "model_not_found", "model")),
        ("m", dict.fromkeys("abc", BOOLEAN), (413, "questions_too_large", "questions")),
        ("m", {"a": choice(3)}, (422, "invalid_criteria", "questions.a.criteria")),
        ("m", {"b": score(4)}, (422, "invalid_criteria", "questions.b.criteria")),
    ],
)
def test_d4_4_served_limits(
    model: str, questions: dict[str, Any], refused: tuple[int, str, str] | None
) -> None:
    problem = check_served(Subject(model, questions, ()), SERVED)
    assert refused == (problem and (problem.status, problem.code, problem.param))


def test_a_model_that_is_not_there_is_told_which_are() -> None:
    problem = check_served(Subject("x", {"a": BOOLEAN}, ()), SERVED)
    assert problem is not None
    assert problem.message == "there is no such decision model; there are: m"


def test_d4_4_media_are_checked_with_the_rest() -> None:
    video = parse_items([attachment("v", MP4, kind="video", mime="video/mp4")], "attachments")
    problem = check_served(Subject("m", {"a": BOOLEAN}, video), SERVED)
    assert problem is not None
    assert problem.code == "video_not_available"
