"""Signals: what is told is what happened, nobody is hurt by who listens, and nothing is told that must not be."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from runpy import run_path
from typing import Any, cast
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from pillarbox import clock, telemetry
from pillarbox.errors import ConfigurationError
from pillarbox.gauges import ANSWER_SECONDS, FAILURE_SECONDS, Gauges, Question
from pillarbox.lane_report import _ages
from pillarbox.outbox import Status
from pillarbox.prometheus import OTHER, PrometheusSignals
from pillarbox.relay import Relay
from pillarbox.telemetry import METRICS, Activity, JsonFormatter, LogEvent, Metric, Observer, Sample, Signals
from pillarbox.transport import Message, Outcome, Verdict
from tests.relays import TOPIC, Broker, Line, World, freeze, in_virtual_time, running, until

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "pillarbox"
PAGE = ROOT / "docs" / "reference" / "signals.md"
WAY = {"route": "orders", "destination": "broker"}


def value(metrics: PrometheusSignals, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


class FaultyBroker(Broker):
    """Draws its answers, and keeps what it has answered."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.said: Counter[str] = Counter()

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        fault = self.draw.random()
        if fault < 0.15:
            self.said["unavailable"] += 1
            return Outcome((), unfinished=Verdict.UNAVAILABLE, reason="away")
        outcome = await super().send(producer, messages)
        if fault < 0.3:  # it has stored them, and the answer gets lost
            self.said["unknown"] += 1
            return Outcome((), unfinished=Verdict.UNKNOWN, reason="lost")
        self.said["accepted"] += len(outcome.accepted)
        self.said["rejected"] += len(outcome.rejected)
        return outcome


class TestNoLie:
    @pytest.mark.parametrize("seed", range(20))
    def test_i11_counters_are_what_the_broker_has_said_and_the_outbox_has(self, seed: int) -> None:
        @in_virtual_time
        async def through_faults() -> None:
            world, broker, metrics = World(shards=4), FaultyBroker(seed), PrometheusSignals()
            world.write(" ".join(f"{key}{number}" for number in (1, 2, 3) for key in "abcdefgh"))
            poison = ("a2", "b1")
            broker.reject(lambda message: message.body.decode() in poison)
            relay = world.relay(publisher=broker, signals=Signals([metrics]))
            async with running(relay):
                await until(lambda: all(world.status(event) is Status.FAILED for event in poison))
                await until(lambda: len(world.statuses(Status.SENT).split()) == 24 - 2 - 1 - 2)
            sent = len(world.statuses(Status.SENT).split())
            assert value(metrics, "outbox_publish_success_total", **WAY) == broker.said["accepted"] == sent
            assert value(metrics, "outbox_publish_latency_seconds_count", **WAY) == sent
            assert value(metrics, "outbox_publish_error_total", **WAY) == broker.said["rejected"]
            assert value(metrics, "event_publish_retry_total", **WAY) == broker.said["rejected"] - 2
            assert value(metrics, "outbox_err_total", **WAY) == len(world.statuses(Status.FAILED).split())
            for verdict in ("unavailable", "unknown"):
                told = value(metrics, "outbox_publish_unfinished_total", **WAY, verdict=verdict)
                assert (told or 0) == broker.said[verdict]
            counts = relay.counts
            assert (counts.sent, counts.rejected, counts.dead) == (sent, broker.said["rejected"], 2)

        through_faults()

    @in_virtual_time
    async def test_i11_rejections_count_while_everything_is_rejected(self) -> None:
        world, broker, metrics = World(), FaultyBroker(0), PrometheusSignals()
        broker.draw = random.Random()
        broker.draw.random = lambda: 1.0  # type: ignore[method-assign]
        world.write("a1 b1 c1 d1 e1")
        broker.reject(lambda _message: True)
        async with running(world.relay(publisher=broker, signals=Signals([metrics]))):
            await until(lambda: broker.said["rejected"] > 6)
        assert value(metrics, "outbox_publish_error_total", **WAY) == broker.said["rejected"]
        assert value(metrics, "event_publish_retry_total", **WAY) == broker.said["rejected"]
        assert value(metrics, "outbox_err_total", **WAY) == 0

    @in_virtual_time
    async def test_a_lost_lease_is_counted_once(self) -> None:
        world, metrics = World(), PrometheusSignals()
        relay = world.relay(signals=Signals([metrics]))
        async with running(relay):
            await until(lambda: relay.status()["lanes"] == 1)
            freeze(60)
            await world.take("r2")
            await until(lambda: value(metrics, "outbox_lease_lost_total", route="orders") == 1)
            await asyncio.sleep(10)
        assert value(metrics, "outbox_lease_lost_total", route="orders") == 1

    @in_virtual_time
    async def test_gauges_of_a_relay(self) -> None:
        world = World(shards=4)
        relay = world.relay()
        assert list(relay.samples()) == []
        world.broker.go_away()
        world.write("a1")
        async with running(relay):
            await until(lambda: relay.status()["troubles"])
            shown = {sample.metric: sample.value for sample in relay.samples()}
        assert (shown[telemetry.LANES_HELD], shown[telemetry.LANES_STOPPED]) == (4, 1)
        assert 0 <= shown[telemetry.CYCLE_AGE] < 6
        assert list(relay.samples()) == []

    @in_virtual_time
    async def test_a_relay_that_has_drained_is_not_shown(self) -> None:
        world = World()
        relay = world.relay()
        await relay.drain()
        assert list(relay.samples()) == []

    @in_virtual_time
    async def test_the_age_counts_from_the_beginning_while_the_outbox_was_never_reached(self) -> None:
        line = Line(World().store)
        line.fail(OSError("away"))
        relay = Relay(line, {})
        async with running(relay):
            await asyncio.sleep(60)
            (shown,) = relay.samples()
            assert shown.metric is telemetry.CYCLE_AGE
            assert shown.value == pytest.approx(60, abs=1)
            line.mend()
            await until(lambda: relay.healthy)
            (shown,) = relay.samples()
            assert shown.value < 6

    @in_virtual_time
    async def test_after_a_failure_the_backlog_is_asked_for_again_soon(self) -> None:
        question, asked = Question("how much is pending", lambda _: []), list[float]()

        class Hanging:
            @asynccontextmanager
            async def connect(self) -> AsyncIterator[None]:
                asked.append(clock.current().monotonic())
                await asyncio.sleep(1000)
                yield

        for _ in range(2):
            assert await question.asked(cast("AsyncEngine", Hanging())) == []
            await asyncio.sleep(FAILURE_SECONDS + 0.1)
        assert asked[1] - asked[0] == pytest.approx(ANSWER_SECONDS + FAILURE_SECONDS, abs=1)

    @in_virtual_time
    async def test_counters_are_there_before_they_rise(self) -> None:
        world, metrics = World(), PrometheusSignals()
        async with running(world.relay(signals=Signals([metrics]))):
            await until(lambda: value(metrics, "outbox_err_total", **WAY) == 0)
        assert value(metrics, "outbox_commit_unknown_total") == 0

    @in_virtual_time
    async def test_the_latency_is_the_age_of_the_event(self) -> None:
        world, metrics = World(), PrometheusSignals()
        world.write("a1 b1")
        await asyncio.sleep(20)
        await world.relay(signals=Signals([metrics])).drain()
        seconds = value(metrics, "outbox_publish_latency_seconds_sum", **WAY)
        assert seconds == pytest.approx(40, abs=1)
        assert value(metrics, "outbox_publish_latency_seconds_bucket", **WAY, le="10") == 0
        assert value(metrics, "outbox_publish_latency_seconds_bucket", **WAY, le="30") == 2


class TestAges:
    """Of the events in one request: exact by bucket, whatever they are."""

    NOW = 1_800_000_000.0

    def ages(self, *ids: str) -> dict[float, int]:
        class Now(clock.SystemClock):
            def now(self) -> datetime:
                return clock.EPOCH + timedelta(seconds=TestAges.NOW)

        with clock.use(Now()):
            return _ages([Message(TOPIC, "k", b"", {"event_id": each}) for each in ids])

    def made(self, seconds_ago: float) -> str:
        return str(clock.uuid7(round((self.NOW - seconds_ago) * 1000) << 12, random.getrandbits(62)))

    def test_equally_old_ones_are_told_by_their_mean(self) -> None:
        ((mean, times),) = self.ages(*(self.made(3 + number / 100) for number in range(100))).items()
        assert mean == pytest.approx(3.5, abs=0.1)
        assert times == 100

    def test_others_bucket_by_bucket(self) -> None:
        found = self.ages(self.made(100), self.made(0.5), self.made(0.5), self.made(-7))
        assert found == {100.0: 1, 0.5: 2, 0.0: 1}

    @pytest.mark.parametrize("seed", range(20))
    def test_every_bucket_has_as_many_as_belong_to_it(self, seed: int) -> None:
        draw = random.Random(seed)
        bounds = telemetry.LATENCY.buckets
        # To the millisecond, and often on a bound.
        ages = [draw.choice([*bounds, round(draw.uniform(0, 2) ** 12, 3)]) for _ in range(draw.randrange(1, 400))]
        found = Counter[int]()
        for age, times in self.ages(*(self.made(age) for age in ages)).items():
            found[bisect_left(bounds, age)] += times
        assert found == Counter(bisect_left(bounds, age) for age in ages)

    def test_ids_that_people_have_chosen_are_left_out(self) -> None:
        assert self.ages(str(uuid4()), str(uuid4())) == {}
        assert self.ages(str(uuid4()), self.made(2)) == {2.0: 1}
        assert self.ages("order-1") == {}


class TestPrometheus:
    def test_s38_tenants_beyond_the_limit_are_one(self) -> None:
        metrics = PrometheusSignals(tenant_label=True, tenant_limit=2)
        for tenant in ("t1", "t2", "t3", "t4", "t1", None):
            metrics.count(telemetry.NEW, ("r",), 1, tenant)
        shown = {tenant: value(metrics, "outbox_new_total", route="r", tenant=tenant) for tenant in ("t1", "t2", "t3")}
        assert shown == {"t1": 2, "t2": 1, "t3": None}
        assert value(metrics, "outbox_new_total", route="r", tenant=OTHER) == 2
        assert value(metrics, "outbox_new_total", route="r", tenant="") == 1

    def test_s38_without_being_asked_for_there_is_no_tenant(self) -> None:
        metrics = PrometheusSignals()
        metrics.count(telemetry.NEW, ("r",), 1, "acme")
        assert value(metrics, "outbox_new_total", route="r") == 1

    def test_a_limit_that_is_none(self) -> None:
        with pytest.raises(ConfigurationError, match="tenant_limit must be at least 1, got 0"):
            PrometheusSignals(tenant_limit=0)

    def test_two_in_one_registry_are_refused(self) -> None:
        registry = CollectorRegistry()
        PrometheusSignals(registry)
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            PrometheusSignals(registry)

    @in_virtual_time
    async def test_it_is_by_tenant_where_that_was_asked_for(self) -> None:
        world, metrics = World(), PrometheusSignals(tenant_label=True)
        world.write("a1 a2", tenant="acme")
        world.write("b1", tenant="zeta")
        await world.relay(signals=Signals([metrics])).drain()
        assert value(metrics, "outbox_publish_success_total", **WAY, tenant="acme") == 2
        assert value(metrics, "outbox_publish_latency_seconds_count", **WAY, tenant="zeta") == 1

    async def test_gauges_are_asked_for_when_somebody_looks_and_several_are_shown_as_one(self) -> None:
        class Gauges:
            def samples(self) -> list[Sample]:
                return [Sample(telemetry.LANES_HELD, ("r",), 2), Sample(telemetry.CYCLE_AGE, (), 3)]

            async def asked(self) -> list[Sample]:
                return [Sample(telemetry.PENDING, ("r",), 7)]

        metrics, one, two = PrometheusSignals(), Gauges(), Gauges()
        for source in (one, two):
            metrics.watch(source)
        body, kind = await metrics.render()
        assert kind.startswith("text/plain")
        lines = body.decode().splitlines()
        assert 'outbox_lanes_held{route="r"} 4.0' in lines
        assert "relay_last_cycle_age_seconds 3.0" in lines
        assert 'outbox_pending_count{route="r"} 14.0' in lines
        assert value(metrics, "outbox_pending_count", route="r") is None  # nobody has asked the database for this one

    @pytest.mark.parametrize(("method", "status"), [("GET", 200), ("HEAD", 200), ("POST", 405)])
    async def test_it_is_an_asgi_application(self, method: str, status: int) -> None:
        said: list[Any] = []

        async def send(message: Any) -> None:
            said.append(message)

        async def receive() -> Any:
            raise AssertionError

        metrics = PrometheusSignals()
        await metrics({"type": "http", "method": method, "headers": []}, receive, send)
        assert said[0]["status"] == status
        assert (b"outbox_commit_unknown_total 0.0" in said[1]["body"]) is (method == "GET")


class TestObservers:
    def test_without_any_nothing_is_told(self) -> None:
        assert not Signals()
        assert Signals([PrometheusSignals()])

    def test_one_that_fails_does_no_harm_and_is_reported_once(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken(Observer):
            def count(self, *_told: object) -> None:
                raise RuntimeError("broken")

            def during(self, _activity: Activity) -> AbstractContextManager[object]:
                return self._fails()

            @contextmanager
            def _fails(self) -> Iterator[None]:
                try:
                    yield
                finally:
                    raise RuntimeError("broken at the end")

        @in_virtual_time
        async def drain() -> None:
            world, metrics = World(), PrometheusSignals()
            world.write("a1 b1")
            done = await world.relay(signals=Signals([Broken(), metrics])).drain()
            assert done.sent == value(metrics, "outbox_publish_success_total", **WAY) == 2

        drain()
        assert [record.message for record in caplog.records] == ["Broken fails, and what it misses is lost"]

    def test_one_that_fails_to_watch_does_no_harm(self, caplog: pytest.LogCaptureFixture) -> None:
        class Blind(Observer):
            def watch(self, _source: object) -> None:
                raise RuntimeError("blind")

        seen = list[object]()

        class Seeing(Observer):
            def watch(self, source: object) -> None:
                seen.append(source)

        signals, source = Signals([Blind(), Seeing()]), Gauges(lambda: None, list)
        signals.watch(source)
        signals.add(Blind())
        assert seen == [source]
        assert [record.message for record in caplog.records] == ["Blind fails, and what it misses is lost"] * 2

    def test_an_error_that_is_being_handled_outside_is_none_of_ours(self) -> None:
        ends = list[object]()

        class Watching(Observer):
            @contextmanager
            def during(self, _activity: Activity) -> Iterator[None]:
                try:
                    yield
                except BaseException as error:
                    ends.append(error)
                    raise
                ends.append("well")

        try:
            [].pop()
        except IndexError:
            with Signals([Watching()]).during(Activity(telemetry.APPEND, "", {}, [])):
                pass
        assert ends == ["well"]

    def test_errors_of_what_is_observed_pass_through(self) -> None:
        with pytest.raises(KeyError), Signals([PrometheusSignals()]).during(Activity(telemetry.SEND, "", {}, [])):
            raise KeyError


class TestLog:
    @pytest.fixture
    def lines(self) -> Iterator[list[dict[str, Any]]]:
        """What is logged as JSON."""
        found: list[dict[str, Any]] = []

        class Keep(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                line = self.format(record)
                assert "\n" not in line
                found.append(json.loads(line))

        handler = Keep()
        handler.setFormatter(JsonFormatter())
        logging.getLogger("pillarbox").addHandler(handler)
        yield found
        logging.getLogger("pillarbox").removeHandler(handler)

    def test_m4_a_dead_event_is_named(self, lines: list[dict[str, Any]]) -> None:
        @in_virtual_time
        async def until_dead() -> None:
            world = World()
            world.write("a1", tenant="acme")
            world.reject("a1", reason="no\nmore password=geheim")
            async with running(world.relay()):
                await until(lambda: world.status("a1") is Status.FAILED)

        until_dead()
        first, last = lines[0], lines[-1]
        assert (first["event"], first["level"], first["attempts"]) == ("delivery.rejected", "warning", 1)
        assert (last["event"], last["level"], last["attempts"]) == ("delivery.dead", "error", 3)
        assert (last["tenant"], last["lane"], last["destination"]) == ("acme", "orders/0", "broker")
        assert last["event_id"] == first["event_id"]
        assert last["message_id"].startswith("orders/0#")
        assert last["reason"] == "no more password=***"

    def test_s12_control_characters_are_escaped_and_foreign_fields_left_out(self) -> None:
        record = logging.LogRecord("pillarbox", logging.WARNING, "", 0, "a\nb\x1b[2J %s", ("c\r",), None)
        record.tenant, record.payload = "x\ny", "secret"
        line = JsonFormatter().format(record)
        assert line.isprintable()
        assert json.loads(line) == {
            "time": json.loads(line)["time"],
            "level": "warning",
            "logger": "pillarbox",
            "message": "a\nb\x1b[2J c\r",
            "tenant": "x\ny",
        }

    def test_s41_the_text_of_an_error_is_redacted(self) -> None:
        with pytest.raises(ValueError, match="invalid literal") as caught:
            int("postgresql://app:geheim@db/shop")
        error = caught.value
        information = type(error), error, error.__traceback__
        record = logging.LogRecord("pillarbox", logging.ERROR, "", 0, "failed", (), information)
        line = json.loads(JsonFormatter().format(record))
        assert line["error"] == "ValueError: invalid literal for int() with base 10: 'postgresql://app:***@db/shop'"
        assert __file__ in line["traceback"]


class TestList:
    def test_the_page_is_what_the_list_says(self) -> None:
        """`make signals` writes it anew."""
        assert PAGE.read_text("utf-8").endswith(run_path(str(ROOT / "scripts" / "signals"))["page"]())

    def test_names_are_well_formed(self) -> None:
        assert len({metric.name for metric in METRICS}) == len(METRICS)
        for metric in METRICS:
            assert metric.name.endswith("_total") is (metric.kind == "counter"), metric.name
            assert (metric.unit == "seconds") is metric.name.endswith("_seconds"), metric.name
            assert bool(metric.buckets) is (metric.kind == "histogram"), metric.name
            assert list(metric.buckets) == sorted(metric.buckets)

    def test_the_list_is_complete(self) -> None:
        constants = vars(telemetry).values()
        assert {it for it in constants if isinstance(it, Metric)} == set(METRICS)
        assert {it for it in constants if isinstance(it, telemetry.Span)} == set(telemetry.SPANS)
        assert {it for it in constants if isinstance(it, LogEvent)} == set(telemetry.LOG_EVENTS)

    def test_nothing_is_listed_that_nothing_tells(self) -> None:
        files = [file for file in SOURCE.glob("**/*.py") if file.name not in ("telemetry.py", "otel.py")]
        used = set(re.findall(r"telemetry\.([A-Z_]+)", " ".join(file.read_text("utf-8") for file in files)))
        listed = (*METRICS, *telemetry.SPANS, *telemetry.LOG_EVENTS)
        constants = {name for name, it in vars(telemetry).items() if any(it is each for each in listed)}
        assert constants - used == {"SEND_ONE"}  # a part of SEND

    def test_s38_only_log_lines_of_single_deliveries_name_aggregates(self) -> None:
        """As the page promises."""
        assert {each.name for each in telemetry.LOG_EVENTS if "aggregate_id" in each.fields} == {
            *("delivery.rejected", "delivery.dead", "consumer.failed"),
        }
        assert not [name for span in telemetry.SPANS for name in span.attributes if "aggregate" in name]

    def test_s38_no_label_can_be_without_bounds(self) -> None:
        assert {label for metric in METRICS for label in metric.labels} == {
            *("route", "destination", "verdict"),
            *("consumer", "class"),
            *("source", "reason", "slot"),  # a slot that is kept has a name of its own, the others share one
        }


async def test_without_signals_a_lane_makes_no_spans_and_no_samples() -> None:
    world = World()
    worker = world.worker(await world.take())
    with worker._report.sending("p", [Message(TOPIC, "a", b"", {})]) as tell:
        assert tell(Outcome([0])) is None
    assert not worker._report._signals
