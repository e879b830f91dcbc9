"""What a projection costs: events per second from messages in memory into a table, beside the same work by hand.

The floor is what a team writes with asyncpg, on one connection, for each 500 messages: read their JSON, one INSERT into
an inbox, an upsert of the rows whose events are new, with their version as a guard, one COMMIT. It knows no failures,
no letters, no tenants and no versions of events. Both take turns with the same messages, each on empty tables.

Beside that: the same projection while one key in a hundred always fails, so that its messages wait in inbound lanes.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg  # type: ignore[import-untyped]
from sqlalchemy import Text, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import IntegrationEvent, Message, Pillarbox, clock
from pillarbox.consumers.consumer import Consumer
from pillarbox.projections import Change, Projection, ProjectionRow, on
from pillarbox.transports.memory import MemoryTransport

from .figures import BATCH, body, cpu_seconds
from .proof import meant
from .servers import Bench

_TOPIC = "bench.consumed"
_TYPE = "bench.order.changed"
_ONE_BAD_IN = 100
_VERSIONS = 4
"""Events of each order."""


class OrderChanged(IntegrationEvent, name=_TYPE, version=1):
    seq: int
    order_id: UUID
    customer: str
    note: str


class Base(DeclarativeBase):
    pass


class OrderRow(ProjectionRow, Base):
    __tablename__ = "bench_order_rows"

    order_id: Mapped[UUID] = mapped_column(primary_key=True)
    seq: Mapped[int]
    customer: Mapped[str] = mapped_column(Text)
    note: Mapped[str] = mapped_column(Text)


class OrderRows(Projection, row=OrderRow):
    """Each event says all of its row, and the version guards it."""

    some_fail = False

    @on(OrderChanged)
    def changed(self, event: OrderChanged) -> Change:
        if self.some_fail and _is_bad(event.order_id):
            raise ValueError(event.order_id)
        return self.put(order_id=event.order_id, seq=event.seq, customer=event.customer, note=event.note)


_FLOOR = """
CREATE TABLE floor_inbox (
    consumer bigint NOT NULL, event_id uuid NOT NULL, at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, event_id));
CREATE TABLE floor_rows (LIKE bench_order_rows INCLUDING ALL)
"""
_ADMIT = """
INSERT INTO floor_inbox (consumer, event_id) SELECT 1, * FROM unnest($1::uuid[])
ON CONFLICT DO NOTHING RETURNING event_id
"""
_UPSERT = """
INSERT INTO floor_rows AS t
    (order_id, seq, customer, note, projected_version, projected_index, projected_count, deleted, projected_at)
VALUES ($1, $2, $3, $4, $5, 0, 1, false, now())
ON CONFLICT (order_id) DO UPDATE SET seq = excluded.seq, customer = excluded.customer, note = excluded.note,
    projected_version = excluded.projected_version, projected_at = excluded.projected_at
WHERE t.projected_version < excluded.projected_version
"""
_EMPTY = "TRUNCATE bench_order_rows, pillarbox_inbox"


async def measure(bench: Bench) -> dict[str, float]:
    """All figures, by name."""
    sizes = bench.sizes
    ratios, rates, singles, floors, cpu = [], [], [], [], []
    async with (
        bench.database() as url,
        _subject(url, sizes.consume, BATCH) as (box, broker, many),
        _subject(url, sizes.consume_singly, 1) as (_, few, single),
        _connected(url) as connection,
    ):
        await connection.execute(_FLOOR)
        for number in range(sizes.rounds + 1):
            found: dict[str, float] = {}
            # Each goes first in every second pair: what comes second finds everything warm.
            for which in ("floor", "ours") if number % 2 else ("ours", "floor"):
                await _empty(box)
                began = cpu_seconds()
                if which == "floor":
                    await connection.execute("TRUNCATE floor_rows, floor_inbox")
                    found[which] = await _by_hand(connection, broker.sent(_TOPIC))
                else:
                    found[which] = await _consume(many, broker)
                    found["cpu"] = (cpu_seconds() - began) / sizes.consume * 1e6
            await _empty(box)
            found["single"] = await _consume(single, few)
            if number:  # the first pair warms up
                ratios.append(found["ours"] / found["floor"])
                rates.append(found["ours"])
                floors.append(found["floor"])
                singles.append(found["ours"] / found["single"])
                cpu.append(found["cpu"])
    spills = [await _measure_spills(bench) for _ in range(sizes.few)]
    return {
        "consume_ratio": statistics.median(ratios),
        "consume_spill_ratio": statistics.median(spills),
        "consume_batch_gain": statistics.median(singles),
        "consume_cpu_us": statistics.median(cpu),
        "consume_per_second": statistics.median(rates),
        "consume_floor_per_second": statistics.median(floors),
        "consume_events": sizes.consume,
    }


async def _measure_spills(bench: Bench) -> float:
    """The rate while some keys fail, to the rate without."""
    rates = []
    async with bench.database() as url, _subject(url, bench.sizes.consume, BATCH) as (box, broker, consumer):
        messages = broker.sent(_TOPIC)
        bad = sum(_is_bad(UUID(message.headers["aggregate_id"])) for message in messages)
        for some_fail in (False, True):
            await _empty(box)
            OrderRows.some_fail = some_fail
            try:
                with meant("ValueError"):
                    rates.append(await _run(consumer, broker, len(messages) - bad * some_fail))
            finally:
                OrderRows.some_fail = False
    return rates[1] / rates[0]


def _is_bad(order: UUID) -> bool:
    return order.int % _ONE_BAD_IN == 0


async def _run(consumer: Consumer, broker: MemoryTransport, wanted: int) -> float:
    """All messages once more, until so many have taken effect; those per second, from the second event of each order
    on: before that, every batch meets keys that have not failed yet.
    """
    broker.redeliver(_TOPIC)
    before, first = consumer.status()["handled"], wanted // _VERSIONS
    running = asyncio.create_task(consumer.run())

    async def handled(number: int) -> float:
        while consumer.status()["handled"] - before < number:  # noqa: ASYNC110  it rings no bell
            await asyncio.sleep(0.005)
        return time.perf_counter()

    seconds = -await handled(first) + await handled(wanted)
    consumer.stop()
    await running
    return (wanted - first) / seconds


@asynccontextmanager
async def _subject(url: str, events: int, batch: int) -> AsyncIterator[tuple[Pillarbox, MemoryTransport, Consumer]]:
    """A projection, and a broker with its messages, which were consumed once."""
    engine, broker = create_async_engine(url), MemoryTransport()
    async with Pillarbox(engine, transports={"broker": broker}) as box:
        await box.migrate()
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await broker.send("bench", [_message(seq, events) for seq in range(events)])
        consumer = box.projection(OrderRows, source="broker", topics=[_TOPIC], batch=batch)
        await consumer.drain()
        yield box, broker, consumer
    await engine.dispose()


def _message(seq: int, events: int) -> Message:
    order = seq % (events // _VERSIONS)
    headers = {
        "event_id": str(clock.new_id()),
        "event_type": _TYPE,
        "occurred_at": "2026-01-01T00:00:00.000000Z",
        "aggregate_type": "order",
        "aggregate_id": str(UUID(int=order)),
        "schema_version": "v1",
        "content_type": "application/json",
        "version": str(seq // (events // _VERSIONS) + 1),
        "event_index": "0",
        "event_count": "1",
    }
    return Message(_TOPIC, str(order), body(seq, order), headers)


async def _empty(box: Pillarbox) -> None:
    async with box.engine.begin() as connection:
        await connection.execute(text(_EMPTY))


async def _consume(consumer: Consumer, broker: MemoryTransport) -> float:
    """All messages once more; events per second."""
    broker.redeliver(_TOPIC)
    started = time.perf_counter()
    tally = await consumer.drain()
    seconds = time.perf_counter() - started
    assert (tally.handled, tally.failures) == (len(broker.sent(_TOPIC)), 0), tally
    return tally.handled / seconds


async def _by_hand(connection: asyncpg.Connection, messages: Sequence[Message]) -> float:
    """The floor; events per second."""
    started = time.perf_counter()
    for start in range(0, len(messages), BATCH):
        batch = messages[start : start + BATCH]
        ids = [UUID(message.headers["event_id"]) for message in batch]
        contents = [json.loads(message.body) for message in batch]
        async with connection.transaction():
            new = {event_id for (event_id,) in await connection.fetch(_ADMIT, ids)}
            rows = [
                (UUID(it["order_id"]), it["seq"], it["customer"], it["note"], int(message.headers["version"]))
                for event_id, it, message in zip(ids, contents, batch, strict=True)
                if event_id in new
            ]
            await connection.executemany(_UPSERT, rows)
    seconds = time.perf_counter() - started
    assert await connection.fetchval("SELECT count(*) FROM floor_inbox") == len(messages)
    return len(messages) / seconds


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        yield connection
    finally:
        await connection.close()


def report(results: Mapping[str, Any]) -> str:
    """Lines for people."""
    return (
        f"consume: {results['consume_events']:,} messages into a projection, to the same by hand\n"
        f"  ratio              {results['consume_ratio']:10.3f}\n"
        f"  {BATCH} at once to one{results['consume_batch_gain']:12.1f}\n"
        f"  projection         {results['consume_per_second']:10,.0f} events/s, "
        f"{results['consume_cpu_us']:.0f} us of CPU per event\n"
        f"  floor              {results['consume_floor_per_second']:10,.0f} events/s\n"
        f"  1 % of keys fail   {results['consume_spill_ratio']:10.3f} of the rate without"
    )
