"""The lifecycle table: every (state, input) pair, and every short sequence of inputs."""

from __future__ import annotations

import itertools

import pytest

from relay.lifecycle import TABLE, IllegalTransition, Lifecycle, Outcome, StreamInput, StreamState

S, I, O = StreamState, StreamInput, Outcome  # noqa: E741  the table reads better with them

# The table of the contract, row by row, in the order of StreamInput. None is our own bug.
CONTRACT: dict[StreamState, list[StreamState | Outcome | None]] = {
    S.RESERVED: [S.OPENING, None, None, None, None, O.REJECTED, O.CLIENT_ABORT, O.DEADLINE,
                 O.SHUTDOWN],
    S.OPENING: [S.OPENING, S.STREAMING, None, None, O.UPSTREAM_ERROR, O.UPSTREAM_ERROR,
                O.CLIENT_ABORT, O.DEADLINE, O.SHUTDOWN],
    S.STREAMING: [None, None, S.STREAMING, O.COMPLETED, O.TRUNCATED, O.UPSTREAM_ERROR,
                  O.CLIENT_ABORT, O.DEADLINE, O.SHUTDOWN],
    S.DRAINING: [None, None, S.DRAINING, O.CLIENT_ABORT, O.CLIENT_ABORT, O.CLIENT_ABORT,
                 S.DRAINING, O.CLIENT_ABORT, O.CLIENT_ABORT],
    S.CLOSED: [None, None, None, None, None, None, S.CLOSED, S.CLOSED, S.CLOSED],
}  # fmt: skip

REACH: dict[StreamState, list[StreamInput]] = {
    S.RESERVED: [],
    S.OPENING: [I.DIAL],
    S.STREAMING: [I.DIAL, I.HEADERS],
    S.DRAINING: [I.DIAL, I.HEADERS, I.CLIENT_GONE],
    S.CLOSED: [I.DIAL, I.HEADERS, I.TERMINAL],
}


def at(state: StreamState) -> Lifecycle:
    life = Lifecycle(drain_on_abort=state is S.DRAINING)
    for event in REACH[state]:
        life.advance(event)
    assert life.state is state
    return life


@pytest.mark.parametrize("state", list(S))
@pytest.mark.parametrize("event", list(I))
def test_every_pair(state: StreamState, event: StreamInput) -> None:
    expected = CONTRACT[state][list(I).index(event)]
    life = at(state)
    if expected is None:
        with pytest.raises(IllegalTransition):
            life.advance(event)
        assert (life.state, life.outcome) == (state, at(state).outcome)
    elif isinstance(expected, Outcome):
        assert life.advance(event) is S.CLOSED
        assert life.outcome is expected
    else:
        assert life.advance(event) is expected
        assert life.closed is (expected is S.CLOSED)


def test_the_table_holds_nothing_else() -> None:
    pairs = {(s, i) for s in S for i, step in zip(I, CONTRACT[s], strict=True) if step is not None}
    assert set(TABLE) == pairs


def test_eof_after_a_finish_reason_is_a_normal_end() -> None:
    life = at(S.STREAMING)
    life.advance(I.EOF, finished=True)
    assert life.outcome is O.COMPLETED


def test_a_hang_up_drains_only_where_it_was_opted_in() -> None:
    life = at(S.STREAMING)
    life.advance(I.CLIENT_GONE)
    assert life.outcome is O.CLIENT_ABORT
    assert at(S.DRAINING).outcome is None


def test_no_sequence_ends_twice_and_every_open_state_can_be_ended() -> None:
    """All sequences of up to five inputs: one Outcome at most, and it never changes."""
    for length in range(1, 6):
        for events in itertools.product(I, repeat=length):
            life = Lifecycle()
            seen: list[Outcome] = []
            for event in events:
                try:
                    life.advance(event)
                except IllegalTransition:
                    break
                if life.outcome is not None and life.outcome not in seen:
                    seen.append(life.outcome)
            assert len(seen) <= 1
            for last in (I.CLIENT_GONE, I.DEADLINE, I.SHUTDOWN):
                assert (life.state, last) in TABLE
