"""O3.2 to O3.5: what is counted, bounded and rendered; without a process."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
import timeit
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

import planes.metrics
import planes.series
from planes.instruments import LAG_EVERY_S
from planes.metrics import FOREIGN_CODES_MAX, UNLISTED_MODELS_MAX, Metrics
from planes.series import OTHER, Counters, Histograms, Names
from planes.settings import Settings
from planes.telemetry import Ended, State, Telemetry
from relay.errors import ClientGone, GatewayFault, RelayError, UpstreamUnavailable
from relay.inflight import InFlight
from relay.lifecycle import Outcome
from relay.money import Settlement, Source
from relay.record import Attempt, RequestRecord
from tests.support.metrics import Scrape

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/metrics.md").read_text("utf-8")
CHAT = "/v1/chat/completions"


def state(
    inflight: InFlight | None = None, *, unsettled: int = 0, open_holds: int = 0, runs: int = 0
) -> State:
    return State(
        inflight=inflight or InFlight(),
        unsettled=lambda: unsettled,
        open_holds=lambda: open_holds,
        runs=lambda: runs,
        followers=lambda: 2 * runs,
    )


def rendered(*series: planes.series.Series) -> Scrape:
    registry = CollectorRegistry()
    for one in series:
        registry.register(one)
    return Scrape(generate_latest(registry).decode())


def attempt(provider: str = "p", error_code: str | None = None, started: float = 1.0) -> Attempt:
    return Attempt(
        provider=provider, model="m", error_code=error_code, started=started, duration_ms=500
    )


def ended(
    *attempts: Attempt,
    model: str | None = "listed",
    status: int = 200,
    error: RelayError | None = None,
    at: float = 4.0,
    **fields: Any,
) -> Ended:
    """A request that began at 0 and ended at 4."""
    own: dict[str, Any] = {"stream": True, "outcome": Outcome.COMPLETED} | fields
    record = RequestRecord(
        request_id="req_1",
        started=0.0,
        model=model,
        provider=attempts[-1].provider if attempts else None,
        attempts=list(attempts),
        error=error,
        **own,
    )
    code = error.code if error is not None else None
    return Ended(
        record=record,
        at=at,
        method="POST",
        route=CHAT,
        status=status,
        error_code=code,
        headers={},
    )


async def scraped(metrics: Metrics) -> Scrape:
    return Scrape((await metrics.scrape()).decode())


# --- series ---------------------------------------------------------------------------------------


@given(values=st.lists(st.floats(0, 1000)), bounds=st.sets(st.floats(0.001, 500), min_size=1))
def test_a_histogram_counts_each_value_into_its_bucket(
    values: list[float], bounds: set[float]
) -> None:
    """A bound is inclusive, buckets are cumulative, the last is the count."""
    histogram = Histograms("h", "Text.", sorted(bounds), ("a",))
    for value in values:
        histogram.observe(("x",), value)
    seen = rendered(histogram)
    if not values:
        assert seen.values("h_count") == {}
        return
    buckets = {float(le): n for (le,), n in seen.values("h_bucket", "le").items()}
    assert buckets == {
        bound: sum(value <= bound for value in values) for bound in (*bounds, float("inf"))
    }
    assert seen.value("h_count", a="x") == len(values)
    assert seen.value("h_sum", a="x") == pytest.approx(sum(values))


def test_a_stopwatch_counts_what_lies_between_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """O3.3: the first call is no gap; watches of the same labels count into one series."""
    times = [5.0, 5.02, 5.5, 7.0]
    clock = iter([*times, 100.0, 100.1])
    monkeypatch.setattr(planes.series, "monotonic", lambda: next(clock))
    histogram = Histograms("h", "Text.", [0.05, 0.2, 1.0], ("a",))
    lap = histogram.stopwatch(("x",))
    for _ in times:
        lap()
    other = histogram.stopwatch(("x",))
    other()
    other()
    seen = rendered(histogram)
    gaps = [b - a for a, b in pairwise(times)] + [0.1]
    assert seen.value("h_count", a="x") == len(gaps)
    assert seen.value("h_sum", a="x") == pytest.approx(sum(gaps))
    assert seen.value("h_bucket", le="0.2") == 2


def test_a_lap_costs_next_to_nothing() -> None:
    """O3.3: a fifth of a microsecond when nothing else runs; ten times that is allowed here."""
    lap = Histograms("h", "Text.", [2.0**n for n in range(-10, 7)]).stopwatch(())
    assert min(timeit.repeat(lap, number=10_000, repeat=5)) / 10_000 < 2e-6


def test_values_of_labels_are_escaped_and_encodable() -> None:
    """What clients and providers choose cannot break the text, or end every later scrape."""
    odd = ['a"b', "c\\d", "e\nf", "{}", "\u00fcber", "\ud800half", ""]
    names = Names([], len(odd))
    counter = Counters("c_total", "Text.", ("a",))
    for name in odd:
        counter.add((names.learn(name),))
    seen = {value for (value,) in rendered(counter).values("c_total", "a")}
    assert seen == {*odd[:-2], "?half", ""}


@given(st.lists(st.text(max_size=5)), st.integers(0, 4))
def test_names_are_bounded(asked: list[str], more_max: int) -> None:
    """Known ones are always named; of others the first few, for good."""
    names = Names(["known"], more_max)
    first: dict[str, str] = {}
    for name in asked:
        value = names.learn(name)
        assert value == first.setdefault(name, value)
        assert names.get(name) == value
    assert names.learn("known") == "known"
    named = {name for name, value in first.items() if value == name} - {"known", OTHER}
    assert len(named) <= more_max


def test_a_name_that_is_too_long_is_other() -> None:
    assert Names([], 5).learn("x" * 10_000) == OTHER


# --- what is made of a record ---------------------------------------------------------------------


async def test_ten_thousand_invented_models_stay_within_the_bound() -> None:
    """O3.4, and what that bound means for the size and the time of a scrape."""
    metrics = Metrics(["listed"], state())
    for number in range(10_000):
        name = f"p/model-{number}"
        metrics.ended(ended(attempt(error_code="upstream_error"), model=f"p/no-{number}"))
        end = ended(attempt(), model=name, first_byte=2.0)
        with metrics.streaming(end.record) as lap:
            lap()
            lap()
        metrics.ended(end)
    started = time.perf_counter()
    seen = await scraped(metrics)
    assert time.perf_counter() - started < 10
    for label in ("model", "gen_ai_request_model"):
        named = seen.label_values(label)
        assert len(named) == UNLISTED_MODELS_MAX + 1
        assert OTHER in named
    assert seen.value("sluicegate_requests_total") == 20_000
    assert seen.value("sluicegate_requests_total", model="p/model-0") == 1
    assert len(seen.text) < 2_000_000


async def test_codes_that_providers_invent_are_bounded() -> None:
    metrics = Metrics(["listed"], state())
    for number in range(1000):
        error = UpstreamUnavailable("no")
        error.code = f"code-{number}"
        failed = attempt(error_code=error.code)
        metrics.ended(ended(failed, status=503, error=error, outcome=Outcome.UPSTREAM_ERROR))
    seen = await scraped(metrics)
    codes = {value for (value,) in seen.values("sluicegate_requests_total", "error_code")}
    assert codes == {*(f"code-{n}" for n in range(FOREIGN_CODES_MAX)), OTHER}
    assert seen.value("sluicegate_upstream_errors_total") == 1000


def test_every_code_of_ours_has_a_name_of_its_own() -> None:
    """O3.4: those of every plane, for they are all subclasses."""
    names = Names(planes.metrics._codes(RelayError), 0)
    pending: list[type[RelayError]] = [RelayError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        assert names.get(kind.code) == kind.code
    assert {names.get(c) for c in ("payload_too_large", "invalid_api_key")} != {OTHER}


async def test_a_hang_up_while_dialled_is_no_upstream_error() -> None:
    metrics = Metrics(["listed"], state())
    gone = ClientGone("gone")
    metrics.ended(
        ended(
            attempt(error_code="cancelled"),
            status=499,
            error=gone,
            outcome=Outcome.CLIENT_ABORT,
        )
    )
    seen = await scraped(metrics)
    assert seen.values("sluicegate_upstream_errors_total") == {}
    assert seen.value("sluicegate_client_aborts_total", stage="before_output") == 1


async def test_a_bug_of_ours_is_no_upstream_error() -> None:
    metrics = Metrics(["listed"], state())
    fault = GatewayFault("bug")
    metrics.ended(ended(attempt(), status=500, error=fault, outcome=Outcome.UPSTREAM_ERROR))
    seen = await scraped(metrics)
    assert seen.values("sluicegate_upstream_errors_total") == {}
    assert seen.value("sluicegate_requests_total", error_code="internal_error") == 1


async def test_times_are_those_of_the_record() -> None:
    """O3.2: a failed attempt until its failure, one that answered until the request's end."""
    metrics = Metrics(["listed"], state())
    failed = attempt("bad", "upstream_timeout", started=0.5)
    metrics.ended(ended(failed, attempt("good", started=1.0), first_byte=2.5))
    seen = await scraped(metrics)
    by_provider = seen.values(
        "gen_ai_client_inference_duration_seconds_sum", "gen_ai_provider_name"
    )
    assert by_provider == {("bad",): 0.5, ("good",): 3.0}
    assert seen.value("gen_ai_server_request_duration_seconds_sum") == 4.0
    assert seen.value("gen_ai_server_time_to_first_token_seconds_sum") == 2.5
    assert seen.value("gen_ai_client_inference_time_to_first_chunk_seconds_sum") == 1.5


async def test_a_plain_request_has_no_first_token() -> None:
    """O3.3: nobody saw it come."""
    metrics = Metrics(["listed"], state())
    metrics.ended(ended(attempt(), stream=False, first_byte=2.0))
    seen = await scraped(metrics)
    assert seen.values("gen_ai_server_time_to_first_token_seconds_count") == {}
    assert seen.value("gen_ai_server_request_duration_seconds_count") == 1


async def test_money_beyond_doubles_first_digits_is_kept() -> None:
    metrics = Metrics(["listed"], state())
    settled = Settlement(
        request_id="req_1",
        at=0.0,
        org="o",
        key_id="k",
        plane="models",
        model="listed",
        provider="p",
        status=200,
        error_code=None,
        prompt_tokens=1,
        completion_tokens=0,
        source=Source.REPORTED,
        cost_micro_usd=10**12 + 1,
        duration_ms=1,
    )
    for _ in range(3):
        metrics.ended(ended(attempt(), settlement=settled))
    seen = await scraped(metrics)
    assert seen.value("sluicegate_cost_micro_usd_total") == 3 * (10**12 + 1)
    assert seen.values("gen_ai_client_inference_usage_output_tokens_total") == {}


# --- rendering and the loop -----------------------------------------------------------------------


async def test_scrapes_that_meet_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """O3.5: off the loop, and one at a time; a scrape that is given up leaves the others be."""
    metrics = Metrics([], state())
    go, threads = threading.Event(), list[int]()

    def slow(registry: CollectorRegistry) -> bytes:
        threads.append(threading.get_ident())
        go.wait(10)
        return generate_latest(registry)

    monkeypatch.setattr(planes.metrics, "generate_latest", slow)
    scrapes = [asyncio.create_task(metrics.scrape()) for _ in range(20)]
    while not threads:
        await asyncio.sleep(0.001)
    scrapes.pop().cancel()
    go.set()
    texts = await asyncio.gather(*scrapes)
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    assert all(text is texts[0] for text in texts)
    await metrics.scrape()
    assert len(threads) == 2


async def turns(count: int) -> None:
    """So many turns of the loop, however long they take."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_loop_that_is_held_up_is_seen() -> None:
    """O3.2: the sampler's task ends with its owner."""
    metrics = Metrics([], state())
    before = asyncio.all_tasks()
    metrics.start()
    await turns(5)  # it sleeps
    time.sleep(LAG_EVERY_S + 0.4)  # the next sample is due in the middle of it
    await turns(5)
    seen = await scraped(metrics)
    await metrics.close()
    name = "sluicegate_event_loop_lag_seconds"
    assert seen.value(f"{name}_count") == 1
    assert seen.value(f"{name}_sum") > 0.3
    assert seen.value(f"{name}_bucket", le="0.25") == 0
    assert asyncio.all_tasks() == before


async def test_lag_is_what_comes_on_top_of_the_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never below zero, whatever the clocks of the loop and ours make of half a second."""
    clock = iter([10.0 + LAG_EVERY_S + 0.03, 10.0 + 2 * LAG_EVERY_S])
    monkeypatch.setattr(planes.metrics, "monotonic", lambda: next(clock))
    metrics = Metrics([], state())
    metrics._slept_at = 10.0
    await metrics._sample_lag()
    await metrics._sample_lag()
    seen = await scraped(metrics)
    assert seen.value("sluicegate_event_loop_lag_seconds_sum") == pytest.approx(0.03)
    assert seen.value("sluicegate_event_loop_lag_seconds_count") == 2


async def test_gauges_read_the_state() -> None:
    inflight = InFlight()
    metrics = Metrics([], state(inflight, unsettled=7, open_holds=3, runs=2))
    with inflight.request():
        seen = await scraped(metrics)
    assert seen.value("sluicegate_settlements_pending") == 7
    assert seen.value("sluicegate_open_holds") == 3
    assert seen.value("sluicegate_runs") == 2
    assert seen.value("sluicegate_run_followers") == 4
    assert seen.value("sluicegate_requests_in_flight") == 1
    assert (await scraped(metrics)).value("sluicegate_requests_in_flight") == 0


async def test_two_gateways_in_one_process_count_apart() -> None:
    one, two = Metrics(["listed"], state()), Metrics(["listed"], state())
    one.ended(ended(attempt()))
    assert (await scraped(one)).value("sluicegate_requests_total") == 1
    assert (await scraped(two)).value("sluicegate_requests_total") == 0


# --- the switch -----------------------------------------------------------------------------------


def test_what_is_off_is_not_imported() -> None:
    """O3.1: neither library is, by a gateway that has both off; nor are traces' by default."""
    program = (
        "import sys; from planes.app import make_app; from planes.settings import Settings;"
        "make_app(Settings(telemetry={'metrics': False}));"
        "assert not {'prometheus_client', 'opentelemetry'} & set(sys.modules);"
        "make_app(Settings());"
        "assert 'prometheus_client' in sys.modules;"
        "assert 'opentelemetry' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


async def test_without_metrics_nothing_is_on_the_path_of_a_chunk() -> None:
    telemetry = Telemetry(Settings.model_validate({"telemetry": {"metrics": False}}), state())
    with telemetry.streaming(ended().record) as on_frames:
        assert on_frames is None
    telemetry.ended(ended())


def test_a_fault_in_the_measuring_harms_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """O3.5: it is logged; `ended` runs while a hang-up's cancellation passes through."""
    telemetry = Telemetry(Settings(), state())
    assert telemetry.metrics is not None

    def broken(_: Ended) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(telemetry.metrics, "ended", broken)
    telemetry.ended(ended())


# --- the page -------------------------------------------------------------------------------------


def all_names(metrics: Metrics) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {s.name: (s.kind, s.labels) for s in metrics.instruments.all}


async def test_the_page_has_every_metric() -> None:
    """docs/metrics.md: name, type and labels of each, and no other."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?)\| .+ \|$", PAGE, re.MULTILINE)
    listed = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in rows
        if not name.startswith("process_")
    }
    assert listed == all_names(Metrics([], state()))
    shown = {name for name, *_ in rows if name.startswith("process_")}
    assert shown
    assert shown <= (await scraped(Metrics([], state()))).families.keys()


def test_every_metric_is_named_as_prometheus_wants_it() -> None:
    for name, (kind, labels) in all_names(Metrics([], state())).items():
        assert re.fullmatch(r"(gen_ai|sluicegate)_[a-z_]+", name)
        assert name.endswith("_total") == (kind == "counter")
        assert name.endswith("_seconds") == (kind == "histogram")
        assert all(re.fullmatch(r"[a-z_]+", label) for label in labels)


def test_its_examples_name_metrics_that_exist() -> None:
    """The scrape configuration and the alerts are YAML, and ask for what there is."""
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    (scrapes,) = [block for block in blocks if "scrape_configs" in block]
    assert scrapes["scrape_configs"][0]["static_configs"]
    (alerts,) = [block for block in blocks if "groups" in block]
    known = all_names(Metrics([], state()))
    rules = alerts["groups"][0]["rules"]
    assert len(rules) >= 5
    for rule in rules:
        assert rule.keys() == {"alert", "expr", "for", "annotations"}
        asked = re.findall(
            r"\b(?:gen_ai|sluicegate)_\w+", re.sub(r"\{.*?\}|by \(.*?\)", "", rule["expr"])
        )
        assert asked, rule
        for name in asked:
            base = re.sub(r"_(bucket|count|sum)$", "", name)
            assert base in known, name
            assert (base != name) == (known[base][0] == "histogram"), name
        for label in re.findall(r"(\w+)(?:=~|!=|!~|=)\"", rule["expr"]):
            assert any(label in labels for _, labels in known.values()), label
