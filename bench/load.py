"""Events, the sink that they go to, and the box between: what all subjects are measured with."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from pillarbox import IntegrationEvent, Message, Pillarbox, Route, clock
from pillarbox.outbox import Delivery, LaneName
from pillarbox.transport import Capabilities, Outcome

from .figures import BATCH, PAYLOAD_BYTES, body, seq_of

ROUTE = Route("bench.**", to="sink", topic="bench.order.events")
_TYPE = "bench.clock.ticked"


class Ticked(IntegrationEvent, name=_TYPE, version=1):
    seq: int
    note: str


class Sink:
    """Takes everything and remembers which events came."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def preflight(self, message: Message) -> str | None:  # noqa: ARG002
        return None

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:  # noqa: ARG002
        return {}

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:  # noqa: ARG002
        self.take(messages)
        return Outcome(range(len(messages)))

    def take(self, messages: Sequence[Message]) -> None:
        self.seen.update([seq_of(message.body) for message in messages])

    async def close(self, producer: str | None = None) -> None:
        pass


class TimingSink(Sink):
    """Remembers when each event came."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: dict[int, float] = {}

    def take(self, messages: Sequence[Message]) -> None:
        now = time.monotonic()
        for message in messages:
            self.arrived.setdefault(seq_of(message.body), now)


class OrderSink(Sink):
    """Counts, and checks that the events of a key come in order, once each. Keeps the last number of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.disordered = 0
        self._last: dict[str, int] = {}

    def take(self, messages: Sequence[Message]) -> None:
        last = self._last
        for message in messages:
            seq = seq_of(message.body)
            self.disordered += last.get(message.key, -1) >= seq
            last[message.key] = seq
        self.count += len(messages)


@asynccontextmanager
async def box_on(url: str, sink: Sink, route: Route = ROUTE, **options: Any) -> AsyncIterator[Pillarbox]:
    """A box with one route to the sink, `ROUTE` or another form of it, on tables that are made if they are missing."""
    engine = create_async_engine(url, **({"pool_size": 20} if url.startswith("postgresql") else {}))
    try:
        async with Pillarbox(engine, transports={"sink": sink}, routes=[route], **options) as box:
            await box.migrate()
            yield box
    finally:
        await engine.dispose()


# -- putting events in -------------------------------------------------------------------------------------------------


async def fill(box: Pillarbox, events: int, *, keys: int | None = None, first: int = 0) -> None:
    """Commit events, one key each unless told otherwise, and ring for them."""
    async with box.engine.begin() as connection:
        if box.engine.dialect.name == "postgresql":
            await seed(connection, events, keys=keys, first=first, shards=box.router.shards)
        else:
            await _append(box, connection, events, first)
    ring(box)


def ring(box: Pillarbox) -> None:
    """What the commit of a unit of work does."""
    box.doorbell.ring({LaneName(ROUTE.id, shard) for shard in range(box.router.shards)})


async def seed(
    connection: AsyncConnection,
    events: int,
    *,
    keys: int | None = None,
    first: int = 0,
    shards: int = 1,
    prefix: str = "",
    tenant: str | None = None,
) -> None:
    """The rows that as many units of work would have written, by one statement of PostgreSQL's own."""
    statement = f"""
    INSERT INTO pillarbox_outbox
        (event_id, event_type, route, shard, schema_version, topic, key, tenant, headers, body)
    SELECT event_id, '{_TYPE}', :route, k % :shards, 1, :topic, '{prefix}' || k, :tenant,
        '{{"event_id":"' || event_id || '","event_type":"{_TYPE}","occurred_at":"2026-01-01T00:00:00.000000Z",'
            '"aggregate_type":"order","aggregate_id":"' || k || '","schema_version":"1",'
            '"content_type":"application/json","event_index":"0","event_count":"1"}}',
        convert_to('{{"seq":' || n || ',"order_id":"' || event_id || '","customer":"customer-' || n % 1000
            || '","note":"' || repeat('x', :note) || '"}}', 'UTF8')
    FROM (
        SELECT n, n % :keys AS k, CAST(
            lpad(to_hex(CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)), 12, '0') || '70008'
            || lpad(to_hex(n), 15, '0') AS uuid) AS event_id
        FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS n
        OFFSET 0) AS numbered
    ORDER BY n
    """
    parameters = {
        "route": ROUTE.id,
        "topic": ROUTE.topic,
        "tenant": tenant,
        "shards": shards,
        "keys": keys or first + events,
        "first": first,
        "last": first + events - 1,
        "note": PAYLOAD_BYTES - len(body(first + events - 1).partition(b'"note":"')[0]) - 10,
    }
    await connection.execute(text(statement), parameters)


async def _append(box: Pillarbox, connection: AsyncConnection, events: int, first: int) -> None:
    for start in range(first, first + events, 1000):
        rows = [_delivery(seq, box.router.shards) for seq in range(start, min(start + 1000, first + events))]
        await connection.run_sync(box.store.append, rows)


def _delivery(seq: int, shards: int) -> Delivery:
    event_id = clock.new_id()
    headers = {
        "event_id": str(event_id),
        "event_type": _TYPE,
        "occurred_at": "2026-01-01T00:00:00.000000Z",
        "aggregate_type": "order",
        "aggregate_id": str(seq),
        "schema_version": "1",
        "content_type": "application/json",
        "event_index": "0",
        "event_count": "1",
    }
    return Delivery(event_id, _TYPE, ROUTE.id, seq % shards, 1, ROUTE.topic, str(seq), None, headers, body(seq))


async def empty(box: Pillarbox) -> None:
    """Take all rows away."""
    verb = "TRUNCATE" if box.engine.dialect.name == "postgresql" else "DELETE FROM"
    async with box.engine.begin() as connection:
        await connection.execute(text(f"{verb} pillarbox_outbox"))


async def vacuum(box: Pillarbox) -> None:
    """As autovacuum would have done, had it had the time, and the collector of this process: what it took to fill the
    outbox is not the drain's to clear away.
    """
    gc.collect()
    if box.engine.dialect.name == "postgresql":
        async with box.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            await connection.execute(text("VACUUM ANALYZE pillarbox_outbox"))


# -- getting them out --------------------------------------------------------------------------------------------------


async def drain(box: Pillarbox, sink: Sink, events: int) -> float:
    """Send what is there, to the last durable mark; events per second."""
    sink.seen.clear()
    relay = box.relay(batch=BATCH)
    started = time.perf_counter()
    await relay.drain()
    seconds = time.perf_counter() - started
    assert len(sink.seen) == events, len(sink.seen)
    assert not await box.store.ready([ROUTE.id])
    return events / seconds


async def refill_and_drain(box: Pillarbox, sink: Sink, events: int, *, keys: int | None = None) -> float:
    """`drain` from an outbox that holds nothing else."""
    await empty(box)
    await fill(box, events, keys=keys)
    await vacuum(box)
    return await drain(box, sink, events)
