"""Signals on real databases: what is committed is counted, the backlog is what is there, and a trace goes all the
way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import sessionmaker

from pillarbox import CommitOutcomeUnknown, Pillarbox, RetryPolicy, Route, event_context, gauges, telemetry
from pillarbox.otel import OtelSignals
from pillarbox.prometheus import PrometheusSignals
from pillarbox.stores import overview
from pillarbox.stores.overview import backlog, unowned_lanes
from pillarbox.telemetry import Observer
from pillarbox.transports.memory import MemoryTransport
from tests.conftest import FreshDatabase
from tests.domain import Order, OrderNoted, OrderPlaced, set_up
from tests.proxy import Proxy
from tests.servers import Database

TOPIC = "tests.order.events"
ROUTE = Route(
    "tests.order.*", to="broker", topic=TOPIC, name="orders", retry=RetryPolicy(base=0.01, cap=0.01, attempts=1)
)
INCOMING = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

on_two = pytest.mark.parametrize("database", ["embedded", "sqlite"], indirect=True)


@pytest.fixture
async def engine(database: Database) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database.url())
    yield engine
    await engine.dispose()


def box_with(engine: AsyncEngine | str, *signals: Observer, broker: MemoryTransport | None = None) -> Pillarbox:
    return Pillarbox(engine, transports={"broker": broker or MemoryTransport()}, routes=[ROUTE], signals=signals)


def value(metrics: PrometheusSignals, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


class TestWriting:
    @on_two
    async def test_i11_what_is_committed_is_counted_and_nothing_else(self, engine: AsyncEngine) -> None:
        metrics = PrometheusSignals(tenant_label=True)
        async with box_with(engine, metrics) as box:
            await set_up(box)
            async with box.unit_of_work(tenant="acme") as uow:
                uow.add(Order.place(), Order.place())
                with pytest.raises(RuntimeError):
                    async with uow.nested():
                        uow.add(Order.place())
                        await uow.flush()
                        raise RuntimeError
            with pytest.raises(RuntimeError):
                async with box.unit_of_work(tenant="acme") as uow:
                    uow.add(Order.place())
                    await uow.flush()
                    raise RuntimeError
            async with box.unit_of_work():
                pass  # nothing was written: nothing is told
        assert value(metrics, "outbox_new_total", route="orders", tenant="acme") == 2
        assert value(metrics, "outbox_commit_duration_seconds_count") == 1
        assert value(metrics, "outbox_commit_unknown_total") == 0

    async def test_plain_sessions_are_counted_too(self, sqlite_database: Database) -> None:
        metrics = PrometheusSignals()
        async with box_with(sqlite_database.url(), metrics) as box:
            await set_up(box)
            plain = create_engine(sqlite_database.url("pysqlite"))
            with box.bind(sessionmaker(plain)).begin() as session:
                session.add(Order.place())
            plain.dispose()
        assert value(metrics, "outbox_new_total", route="orders") == 1
        assert value(metrics, "outbox_commit_duration_seconds_count") == 1

    async def test_a_session_in_a_transaction_of_somebody_else_has_not_committed(
        self, sqlite_database: Database
    ) -> None:
        metrics = PrometheusSignals()
        async with box_with(sqlite_database.url(), metrics) as box:
            await set_up(box)
            plain = create_engine(sqlite_database.url("pysqlite"))
            maker = box.bind(sessionmaker(plain))
            with plain.connect() as connection, connection.begin() as theirs:
                with maker(bind=connection) as session, session.begin():
                    session.add(Order.place())
                theirs.rollback()
            plain.dispose()
        assert value(metrics, "outbox_commit_duration_seconds_count") == 0
        assert value(metrics, "outbox_new_total", route="orders") is None

    async def test_h10_a_commit_without_an_answer_is_counted(self, fresh_database: FreshDatabase) -> None:
        database = fresh_database("system")
        metrics = PrometheusSignals()
        async with box_with(database.url()) as direct:
            await set_up(direct)
        with Proxy(database.url("asyncpg")) as proxy:
            async with box_with(proxy.url, metrics) as box:
                await box.register()
                proxy.mode = "lose the answer"
                with pytest.raises(CommitOutcomeUnknown):
                    async with box.unit_of_work() as uow:
                        uow.add(Order.place())
        assert value(metrics, "outbox_commit_unknown_total") == 1
        assert value(metrics, "outbox_new_total", route="orders") is None


class TestBacklog:
    async def test_it_is_what_is_there(self, engine: AsyncEngine) -> None:
        broker, metrics = MemoryTransport(), PrometheusSignals()
        async with box_with(engine, metrics, broker=broker) as box:
            await set_up(box)
            assert await self.asked(box) == (0, 0, 0.0, 16)
            broker.reject(lambda message: message.key == "dead")
            for key in ("dead", "dead", "fine"):
                async with box.unit_of_work() as uow:
                    uow.publish(OrderNoted(note="x"), key=key)
            pending, failed, oldest, unowned = await self.asked(box)
            assert (pending, failed, unowned) == (3, 0, 16)
            assert 0 < oldest < 60
            await box.relay().drain()
            pending, failed, oldest, unowned = await self.asked(box)
            assert (pending, failed, unowned) == (1, 1, 16)  # one is dead, and one is parked behind it
            assert oldest > 0
            body, _ = await metrics.render()
            lines = body.decode().splitlines()
            assert 'outbox_pending_count{route="orders"} 1.0' in lines
            assert 'outbox_max_delivery_attempts{route="orders"} 1.0' in lines
            assert 'outbox_lanes_unowned{route="orders"} 16.0' in lines

    async def test_i11_what_is_pending_has_an_age_although_its_first_is_sent_meanwhile(
        self, postgres_database: Database
    ) -> None:
        other = create_engine(postgres_database.url("psycopg"))

        def send_all(_connection: Any, _cursor: Any, statement: str, *_rest: object) -> None:
            if "_unsent" in statement:
                with other.begin() as connection:
                    connection.execute(text("UPDATE pillarbox_lanes SET cursor = '1000 ' || pg_current_snapshot()"))

        async with box_with(postgres_database.url()) as box:
            await set_up(box)
            async with box.unit_of_work() as uow:
                uow.add(Order.place())
            event.listen(box.engine.sync_engine, "after_cursor_execute", send_all)
            pending, _, oldest, _ = await self.asked(box)
            assert pending == 1
            assert oldest > 0
            assert await self.asked(box) == (0, 0, 0.0, 16)
        other.dispose()

    @staticmethod
    async def asked(box: Pillarbox) -> tuple[int, int, float, int]:
        async with box.engine.connect() as connection:
            (route,) = await connection.run_sync(backlog)
            (unowned,) = (await connection.run_sync(unowned_lanes)).values()
        return route.pending, route.failed, route.oldest_pending_seconds, unowned

    async def test_a_huge_one_is_not_counted_to_its_end(
        self, postgres_database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(overview, "COUNTED", 2)
        async with box_with(postgres_database.url()) as box:
            await set_up(box)
            async with box.unit_of_work() as uow:
                for _ in range(5):
                    uow.publish(OrderNoted(note="x"), key="one lane")
            pending, _, oldest, _ = await self.asked(box)
            assert pending == 2
            assert oldest > 0

    async def test_one_that_cannot_be_counted_hides_no_other_gauge_and_is_told_once(
        self, postgres_database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(gauges, "ANSWER_SECONDS", 0.5)
        monkeypatch.setattr(gauges, "FAILURE_SECONDS", 0.0)
        metrics = PrometheusSignals()
        async with box_with(postgres_database.url(), metrics) as box:
            await set_up(box)
            async with box.engine.begin() as connection:
                await connection.execute(text("LOCK TABLE pillarbox_outbox"))
                for _ in range(2):
                    shown, _ = await metrics.render()
                    assert b'outbox_lanes_unowned{route="orders"} 16.0' in shown
                    assert b"outbox_pending_count{" not in shown
            assert b'outbox_pending_count{route="orders"} 0.0' in (await metrics.render())[0]
        (told,) = [record.message for record in caplog.records if "missing" in record.message]
        assert (
            told
            == "the database does not say how much is pending, and these gauges are missing: no answer within 0.5 s"
        )

    async def test_the_database_is_asked_seldom_and_an_outage_shows_nothing(self, sqlite_database: Database) -> None:
        metrics = PrometheusSignals()
        async with box_with(sqlite_database.url(), metrics) as box:
            assert b"outbox_pending_count{" not in (await metrics.render())[0]  # there are no tables yet
            await set_up(box)
            assert b"outbox_pending_count{" not in (await metrics.render())[0]  # it is not asked again so soon

    async def test_the_only_connection_of_an_in_memory_sqlite_is_left_alone(self) -> None:
        metrics = PrometheusSignals()
        async with box_with("sqlite+aiosqlite://", metrics) as box:
            await set_up(box)
            async with box.unit_of_work() as uow:
                uow.add(Order.place())
                await uow.flush()
                await metrics.render()
            assert (await box.relay().drain()).sent == 1


class Tracing:
    """A process with its own tracer provider."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("tests")
        self.signals = OtelSignals(self.provider)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def span(self, name: str, kind: SpanKind | None = None) -> ReadableSpan:
        (found,) = [span for span in self.spans(name) if kind in (None, span.kind)]
        return found


def id_of(span: ReadableSpan | None) -> tuple[int, int]:
    assert span is not None
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


class TestTraces:
    @on_two
    async def test_m5_one_trace_from_the_request_to_the_sink(self, engine: AsyncEngine) -> None:
        web, relay, broker = Tracing(), Tracing(), MemoryTransport()
        incoming = TraceContextTextMapPropagator().extract({"traceparent": INCOMING})
        async with box_with(engine, web.signals) as box:
            await set_up(box)
            with (
                web.tracer.start_as_current_span("POST /orders", incoming, SpanKind.SERVER),
                event_context(traceparent=INCOMING),
            ):
                async with box.unit_of_work() as uow:
                    uow.add(Order.place(), Order.place())
        async with box_with(engine, relay.signals, broker=broker) as box:
            await box.relay().drain()
        request, append = web.span("POST /orders"), web.span("append")
        assert parent_of(append) == id_of(request)
        assert [event.name for event in append.events] == ["raise", "raise"]
        trace_id, span_id = id_of(append)
        stored = f"00-{trace_id:032x}-{span_id:016x}-01"
        messages = broker.sent(TOPIC)
        assert [message.headers["traceparent"] for message in messages] == [stored, stored]
        assert f"{trace_id:032x}" == INCOMING.split("-")[1] == messages[0].headers["trace_id"]
        sends = [span for span in relay.spans(f"send {TOPIC}") if span.kind is SpanKind.PRODUCER]
        assert {parent_of(span) for span in sends} == {id_of(append)}
        said = {str((span.attributes or {})["messaging.message.id"]) for span in sends}
        assert said == {message.headers["event_id"] for message in messages}

    async def test_the_request_is_linked_to_all_its_messages(self, sqlite_database: Database) -> None:
        tracing = Tracing()
        async with box_with(sqlite_database.url(), tracing.signals) as box:
            await set_up(box)
            for number in range(3):
                async with box.unit_of_work() as uow:
                    uow.publish(OrderNoted(note=str(number)), key="k")
            await box.relay().drain()
        request = tracing.span(f"send {TOPIC}", SpanKind.CLIENT)
        assert request.parent is None
        assert {(link.context.trace_id, link.context.span_id) for link in request.links} == {
            id_of(span) for span in tracing.spans("append")
        }
        assert (request.attributes or {})["messaging.batch.message_count"] == 3
        assert (request.attributes or {})["messaging.destination.name"] == TOPIC

    async def test_handlers_go_on_with_the_trace(self, sqlite_database: Database) -> None:
        tracing, broker = Tracing(), MemoryTransport()
        box = box_with(sqlite_database.url(), tracing.signals, broker=broker)

        @box.subscribe(OrderPlaced, name="note")
        async def note(event: OrderPlaced) -> None:
            async with box.unit_of_work() as uow:
                uow.publish(OrderNoted(note="seen"), key=str(event.order_id))

        async with box:
            await set_up(box)
            with tracing.tracer.start_as_current_span("POST /orders"):
                async with box.unit_of_work() as uow:
                    uow.add(Order.place())
            await box.relay().drain()
            await box.relay().drain()
        request, process = tracing.span("POST /orders"), tracing.span("process note")
        first, second = tracing.spans("append")
        assert parent_of(process) == id_of(first)
        assert parent_of(second) == id_of(process)
        traces = {message.headers["trace_id"] for message in broker.sent(TOPIC)}
        assert traces == {f"{id_of(request)[0]:032x}"}

    async def test_an_event_of_another_trace_stays_in_it(self, sqlite_database: Database) -> None:
        tracing = Tracing()
        async with box_with(sqlite_database.url(), tracing.signals) as box:
            await set_up(box)
            with tracing.tracer.start_as_current_span("job"):
                async with box.unit_of_work() as uow:
                    with event_context(traceparent=INCOMING):
                        uow.publish(OrderNoted(note="theirs"), key="k")
                    uow.publish(OrderNoted(note="ours"), key="k")
            broker = box.transports["broker"]
            await box.relay().drain()
        assert isinstance(broker, MemoryTransport)
        theirs, ours = (message.headers["traceparent"] for message in broker.sent(TOPIC))
        append = tracing.span("append")
        assert theirs == INCOMING
        assert ours.split("-")[1] == f"{id_of(append)[0]:032x}"
        assert [f"{link.context.trace_id:032x}" for link in append.links] == [INCOMING.split("-")[1]]

    async def test_s41_spans_hold_no_payload_key_or_text_of_errors(self, sqlite_database: Database) -> None:
        tracing, broker = Tracing(), MemoryTransport()
        broker.reject(lambda message: message.key == "secret-key", reason="secret-reason")
        async with box_with(sqlite_database.url(), tracing.signals, broker=broker) as box:
            await set_up(box)
            async with box.unit_of_work(tenant="secret-tenant") as uow:
                uow.publish(OrderNoted(note="secret-payload"), key="secret-key")
            await box.relay().drain()
        spans = tracing.exporter.get_finished_spans()
        assert "secret" not in " ".join(span.to_json() for span in spans)
        one = tracing.span(f"send {TOPIC}", SpanKind.PRODUCER)
        assert (one.status.status_code, (one.attributes or {})["error.type"]) == (StatusCode.ERROR, "rejected")

    @on_two
    async def test_spans_have_the_attributes_of_the_list(self, engine: AsyncEngine) -> None:
        tracing = Tracing()
        box = box_with(engine, tracing.signals)
        box.subscribe(OrderPlaced, name="see")(lambda _event: None)
        async with box:
            await set_up(box)
            async with box.unit_of_work() as uow:
                uow.add(Order.place())
            await box.relay().drain()
        kinds = {
            ("append", SpanKind.PRODUCER): telemetry.APPEND,
            ("send", SpanKind.CLIENT): telemetry.SEND,
            ("send", SpanKind.PRODUCER): telemetry.SEND_ONE,
            ("process", SpanKind.CONSUMER): telemetry.PROCESS,
        }
        seen = set()
        for span in tracing.exporter.get_finished_spans():
            listed = kinds[span.name.partition(" ")[0], span.kind]
            batches = {"messaging.batch.message_count"} if listed is telemetry.PROCESS else set()
            optional = {"error.type"} | batches
            assert {*(span.attributes or {})} == {*listed.attributes} - optional, span.name
            seen.add(listed)
        assert seen == set(telemetry.SPANS)
        assert (tracing.span("append").attributes or {})["db.system.name"] == engine.dialect.name

    async def test_without_a_provider_headers_stay_as_they_are(self, sqlite_database: Database) -> None:
        broker = MemoryTransport()
        async with box_with(sqlite_database.url(), OtelSignals(trace.NoOpTracerProvider()), broker=broker) as box:
            await set_up(box)
            async with box.unit_of_work() as uow:
                uow.publish(OrderNoted(note="x"), key=str(uuid4()))
                with event_context(traceparent=INCOMING):
                    uow.publish(OrderNoted(note="y"), key="k")
            await box.relay().drain()
        stored: Sequence[Any] = [message.headers.get("traceparent") for message in broker.sent(TOPIC)]
        assert sorted(stored, key=str) == [INCOMING, None]
