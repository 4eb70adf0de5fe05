"""J1.1, J1.2, J1.4: positions, identities, texts, steps and outputs of a run's journal."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from relay.stores.base import StoreError
from relay.stores.runs import Batch, JournalEvent, StoredEvent, StoredText
from tests.contract.values import event, events, new_run, piece, run_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from relay.stores.base import Store

    Gateway = Callable[..., Awaitable[Store]]

STARTED = "streaming_started"


def stored(position: int, said: JournalEvent) -> StoredEvent:
    return StoredEvent(position=position, name=said.name, task_id=said.task_id, frame=said.frame)


async def frames(store: Store, *, after: int = 0, limit: int = 1000) -> Sequence[StoredEvent]:
    page = await store.runs.read("e1", after=after, limit=limit)
    assert page is not None
    return page.events


async def begun(store: Store, batch: Batch | None = None) -> Store:
    await store.runs.create_run(new_run(), batch or Batch())
    return store


# -- positions ------------------------------------------------------------------------------------


async def test_positions_are_counted_from_one(store: Store) -> None:
    """J1.1: `append` tells the first of its own."""
    await begun(store, events("a", "b"))
    assert await store.runs.append("e1", 1, events("c")) == 3
    assert await store.runs.append("e1", 1, events("d", "e", "f")) == 4
    assert await store.runs.append("e1", 1, Batch()) == 6
    assert await frames(store) == [stored(n + 1, event(id_)) for n, id_ in enumerate("abcdef")]


async def test_a_page_is_a_part_of_the_journal(store: Store) -> None:
    await begun(store, events(*"abcdef"))
    page = await store.runs.read("e1", after=2, limit=3)
    assert page is not None
    assert [e.position for e in page.events] == [3, 4, 5]
    assert (page.head, page.oldest) == (6, 1)
    beyond = await store.runs.read("e1", after=6, limit=3)
    assert beyond is not None
    assert (beyond.events, beyond.head) == ([], 6)
    assert await store.runs.read("e2", after=0, limit=3) is None


async def test_an_empty_journal(store: Store) -> None:
    await begun(store)
    page = await store.runs.read("e1", after=0, limit=3)
    assert page is not None
    assert (page.events, page.head, page.oldest) == ([], 0, 1)
    assert await store.runs.append("e1", 1, Batch()) == 0
    assert await store.runs.outline("e1") == []


async def test_each_journal_has_its_own_positions(store: Store) -> None:
    for name in ("e1", "e2"):
        await store.runs.create_run(new_run(name), events("a"))
    assert await store.runs.append("e1", 1, events("b")) == 2
    assert await store.runs.append("e2", 1, events("b", "c")) == 2
    assert [e.position for e in await store.runs.outline("e2")] == [1, 2, 3]


async def test_concurrent_writers_leave_no_gap(gateway: Gateway) -> None:
    """J1.1: strict for each journal; every append's events stand side by side."""
    stores = [await gateway(), await gateway()]
    await begun(stores[0])
    sizes = [1 + n % 4 for n in range(60)]
    firsts = await asyncio.gather(
        *(
            stores[n % 2].runs.append("e1", 1, events(*(f"{n}.{i}" for i in range(size))))
            for n, size in enumerate(sizes)
        )
    )
    found = await stores[0].runs.outline("e1")
    assert [e.position for e in found] == list(range(1, sum(sizes) + 1))
    for n, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
        assert first is not None
        said = [event(f"{n}.{i}").frame for i in range(size)]
        assert [e.frame for e in found[first - 1 : first - 1 + size]] == said


async def test_a_cancelled_append_comes_before_what_its_caller_does_next(store: Store) -> None:
    """Its outcome is not known, its place is: nothing is said after the end."""
    await begun(store)
    appending = asyncio.create_task(store.runs.append("e1", 1, events("a")))
    await asyncio.sleep(0)
    appending.cancel()
    assert await store.runs.finish("e1", 1, events("a", "z"), run_end()) == 1
    with pytest.raises(asyncio.CancelledError):
        await appending
    assert await frames(store) == [stored(1, event("a")), stored(2, event("z"))]


@pytest.mark.parametrize(
    "frame", [b"", b"\0\xff\xfe not UTF-8 \r\n", b"x" * 300_000], ids=["empty", "bytes", "large"]
)
async def test_a_frame_is_kept_byte_for_byte(store: Store, frame: bytes) -> None:
    await begun(store)
    said = JournalEvent(event_id="a", name="of a remote engine \N{SNOWMAN}", frame=frame)
    await store.runs.append("e1", 1, Batch(events=[said]))
    assert await frames(store) == [stored(1, said)]
    assert await store.runs.outline("e1") == [stored(1, said)]


async def test_lone_surrogates_in_names_become_replacements(store: Store) -> None:
    """The store's rule for texts: the same name, wherever it stands."""
    await begun(store)
    said = event("cut \ud83d", STARTED, task_id="t\udc00")
    written = Batch(
        events=[said],
        texts=[replace(piece("cut \ud83d", 0, b"abc"), task_id="t\udc00")],
        steps={"s\ud83d": 1},
        outputs={"t\udc00": 2},
    )
    assert await store.runs.append("e1", 1, written) == 1
    assert await store.runs.append("e1", 1, Batch(events=[said])) == 1
    assert await store.runs.open_texts("e1", at=1) == [
        StoredText(position=1, task_id="t\ufffd", raw=b"abc", chars=3)
    ]
    assert await store.runs.steps("e1") == {"s\ufffd": 1}
    assert await store.runs.outputs("e1") == {"t\ufffd": 2}
    assert await store.runs.output("e1", "t\udc00") == (2,)


# -- identities -----------------------------------------------------------------------------------


async def test_an_event_said_twice_is_one_event(store: Store) -> None:
    """J1.2: the first position, and the first bytes."""
    await begun(store, events("a"))
    assert await store.runs.append("e1", 1, events("b", "c")) == 2
    again = JournalEvent(event_id="b", name="other", frame=b"other")
    assert await store.runs.append("e1", 1, Batch(events=[again])) == 2
    assert await store.runs.append("e1", 1, Batch(events=[again, event("d"), event("a")])) == 2
    assert await store.runs.append("e1", 1, events("e", "e", "f")) == 5
    assert await frames(store) == [stored(n + 1, event(id_)) for n, id_ in enumerate("abcdef")]
    row = await store.runs.get_run("e1")
    assert row is not None
    assert row.head == 6


@pytest.mark.parametrize("known", [0, 15, 16, 17, 39])
async def test_of_many_events_one_is_there_already(store: Store, known: int) -> None:
    """J1.2: it keeps its position, wherever it stands; the others have no gap."""
    ids = [f"e{n}" for n in range(40)]
    await begun(store, events("first", ids[known]))
    first = 2 if known == 0 else 3
    assert await store.runs.append("e1", 1, events(*ids)) == first
    others = [id_ for id_ in ids if id_ != ids[known]]
    expected = ["first", ids[known], *others]
    assert await frames(store) == [stored(n + 1, event(id_)) for n, id_ in enumerate(expected)]
    assert await store.runs.append("e1", 1, events("last")) == 42


async def test_an_identity_is_the_journals_own(store: Store) -> None:
    for name in ("e1", "e2"):
        await store.runs.create_run(new_run(name), events("a"))
        assert await store.runs.append(name, 1, events("b")) == 2


async def test_a_whole_append_said_twice_writes_nothing(store: Store) -> None:
    """What a caller does that does not know what became of its first try."""
    await begun(store)
    said = Batch(
        events=[event("a", STARTED, "t1"), event("b")],
        texts=[piece("a", 0, b"abc"), piece("a", 3, b"de")],
        steps={"task/t1": {"n": 1}},
        outputs={"t1": "abcde"},
    )
    assert await store.runs.append("e1", 1, said) == 1
    assert await store.runs.append("e1", 1, said) == 1
    assert len(await frames(store)) == 2
    (text,) = await store.runs.texts("e1", first=1, last=2)
    assert (text.raw, text.chars) == (b"abcde", 5)


# -- texts ----------------------------------------------------------------------------------------


async def test_pieces_of_a_text_are_one_text(store: Store) -> None:
    """J1.4: in the append of its start or later; characters are not bytes."""
    await begun(store, events("x"))
    begins = Batch(events=[event("a", STARTED, "t1")], texts=[piece("a", 0, "äö".encode())])
    assert await store.runs.append("e1", 1, begins) == 2
    assert await store.runs.append("e1", 1, Batch(texts=[piece("a", 2, b'\\"x')])) == 2
    whole = StoredText(position=2, task_id="t1", raw='äö\\"x'.encode(), chars=5)
    assert await store.runs.texts("e1", first=1, last=9) == [whole]
    assert await store.runs.texts("e1", first=2, last=2) == [whole]
    assert await store.runs.texts("e1", first=3, last=9) == []
    assert await store.runs.texts("e2", first=0, last=9) == []
    assert await store.runs.open_texts("e2", at=9) == []


async def test_texts_come_by_position(store: Store) -> None:
    await begun(store)
    for n, task in enumerate(("t3", "t1", "t2")):
        said = Batch(events=[event(str(n), STARTED, task)], texts=[piece(str(n), 0, b"a", task)])
        await store.runs.append("e1", 1, said)
    for n, task in ((2, "t2"), (0, "t3")):
        await store.runs.append("e1", 1, Batch(texts=[piece(str(n), 1, b"b", task)]))
    texts = [(t.position, t.task_id, t.raw) for t in await store.runs.texts("e1", first=1, last=3)]
    assert texts == [(1, "t3", b"ab"), (2, "t1", b"a"), (3, "t2", b"ab")]
    assert await store.runs.texts("e1", first=1, last=3) == await store.runs.open_texts("e1", at=3)
    for bytes_max, count in ((0, 0), (1, 1), (2, 1), (3, 2), (4, 3), (100, 3)):
        found = await store.runs.texts("e1", first=1, last=3, bytes_max=bytes_max)
        assert [text.position for text in found] == [1, 2, 3][:count]


async def test_a_text_without_a_stream_or_with_a_gap_is_refused(store: Store) -> None:
    """Nothing of the append is stored then."""
    await begun(store, Batch(events=[event("a", STARTED, "t1"), event("b", task_id="t1")]))
    await store.runs.append("e1", 1, Batch(texts=[piece("a", 0, b"abc")]))
    for wrong in (
        piece("b", 0, b"x"),  # an event, but none that begins a text
        piece("c", 0, b"x"),
        piece("a", 3, b"x", task_id="t2"),
        piece("a", 4, b"x"),
        piece("a", 2, b"xyz"),
    ):
        with pytest.raises(StoreError):
            await store.runs.append("e1", 1, Batch(events=[event("d")], texts=[wrong]))
    assert len(await frames(store)) == 2
    (text,) = await store.runs.texts("e1", first=1, last=9)
    assert text.raw == b"abc"
    assert await store.runs.append("e1", 1, Batch(texts=[piece("a", 3, b"")])) == 2


async def test_a_text_is_open_until_an_event_of_its_task_ends_it(store: Store) -> None:
    """Asked of any position, also of one long ago; another task's end ends nothing."""
    await begun(store)
    said = [
        event("1", STARTED, "t1"),
        event("2", STARTED, "t2"),
        event("3", "task_dispatched", "t1"),
        event("4", "streaming_completed", "t1"),
        event("5", STARTED, "t3"),
        event("6", "task_error", "t2"),
        event("7", STARTED, "t2"),
        event("8", "task_completed", "t3"),
        event("9", STARTED, "t2"),
    ]
    pieces = [
        piece(e.event_id, 0, e.event_id.encode(), e.task_id) for e in said if e.name == STARTED
    ]
    assert await store.runs.append("e1", 1, Batch(events=said, texts=pieces)) == 1
    found = {
        at: [(t.position, t.task_id) for t in await store.runs.open_texts("e1", at=at)]
        for at in range(11)
    }
    one, two, three = (1, "t1"), (2, "t2"), (5, "t3")
    assert found == {
        0: [], 1: [one], 2: [one, two], 3: [one, two], 4: [two], 5: [two, three], 6: [three],
        7: [three, (7, "t2")], 8: [(7, "t2")], 9: [(9, "t2")], 10: [(9, "t2")],
    }  # fmt: skip


async def test_a_start_said_again_opens_nothing(store: Store) -> None:
    await begun(store)
    start, end = event("a", STARTED, "t1"), event("b", "streaming_completed", "t1")
    await store.runs.append("e1", 1, Batch(events=[start, end], texts=[piece("a", 0, b"x")]))
    assert await store.runs.append("e1", 1, Batch(events=[start])) == 1
    assert await store.runs.open_texts("e1", at=2) == []
    assert len(await store.runs.open_texts("e1", at=1)) == 1


async def test_a_long_text(store: Store) -> None:
    """2 MiB in 4,096 pieces: all of them once."""
    await begun(store, Batch(events=[event("a", STARTED, "t1")]))
    for begin in range(0, 4096, 256):
        pieces = [piece("a", n * 512, b"%04d" % n * 128) for n in range(begin, begin + 256)]
        await store.runs.append("e1", 1, Batch(texts=pieces))
    (text,) = await store.runs.open_texts("e1", at=1)
    assert text.raw == b"".join(b"%04d" % n * 128 for n in range(4096))
    assert text.chars == 4096 * 512


# -- steps and outputs ----------------------------------------------------------------------------


async def test_a_step_keeps_its_first_value(store: Store) -> None:
    await begun(store, Batch(steps={"task/b": [1]}))
    await store.runs.append("e1", 1, Batch(steps={"task/b": [2], "task/a": None}))
    assert await store.runs.steps("e1") == {"task/b": [1], "task/a": None}
    assert await store.runs.steps("e2") == {}


async def test_an_output_is_replaced(store: Store) -> None:
    """None is an output too."""
    await begun(store, Batch(outputs={"t1": "a", "t2": None}))
    await store.runs.append("e1", 1, Batch(outputs={"t1": {"n": 2**70}}))
    assert await store.runs.output("e1", "t1") == ({"n": 2**70},)
    assert await store.runs.output("e1", "t2") == (None,)
    assert await store.runs.output("e1", "t3") is None
    assert await store.runs.output("e2", "t1") is None
    assert sorted(await store.runs.outputs("e1")) == ["t1", "t2"]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, nested(100_000)], ids=["object", "set", "deep"]
)
async def test_what_is_no_json_is_refused(store: Store, value: Any) -> None:
    await begun(store)
    with pytest.raises((TypeError, ValueError)):
        await store.runs.append("e1", 1, Batch(events=[event("a")], outputs={"t": value}))
    assert await frames(store) == []


async def test_a_value_that_nests_deeply(store: Store) -> None:
    """What is taken can be read again."""
    await begun(store, Batch(outputs={"t": nested(500)}))
    assert await store.runs.output("e1", "t") == (nested(500),)


async def test_the_last_batch_of_a_run_is_whole(store: Store) -> None:
    await begun(store, Batch(events=[event("a", STARTED, "t1")]))
    last = Batch(
        events=[event("b", "task_completed", "t1"), event("c", "workflow_result")],
        texts=[piece("a", 0, b"abc")],
        steps={"task/t1": 1},
        outputs={"t1": "abc"},
    )
    assert await store.runs.finish("e1", 1, last, run_end()) == 2
    assert await store.runs.output("e1", "t1") == ("abc",)
    assert await store.runs.steps("e1") == {"task/t1": 1}
    assert [t.raw for t in await store.runs.open_texts("e1", at=1)] == [b"abc"]
    assert await store.runs.open_texts("e1", at=2) == []
