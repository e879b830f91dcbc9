"""What a relay costs: drain rate, client CPU, WAL and latency, beside the same work by hand.

The floor is what a team writes with asyncpg and nothing else: lock a batch by FOR UPDATE SKIP LOCKED, publish, mark it
by an UPDATE, commit; one connection, 500 rows at a time. It keeps no order and hands nothing over; it is a floor for
speed. Floor and relay take turns on one PostgreSQL with default durability; a run ends when every event is durably
done.

Latency is measured across processes: a second one commits a hundred events per second, and the time runs from its
COMMIT returning to our sink being called.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from uuid import UUID

import asyncpg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import IntegrationEvent, Message, Pillarbox, Route, clock
from pillarbox.outbox import Delivery, stable_hash
from pillarbox.transport import Capabilities, Outcome

EVENTS = 20_000
BATCH = 500
PAIRS = 5
PAYLOAD_BYTES = 300
PER_SECOND = 100
WARM_UP = 1.0
SECONDS = 10.0

ROUTE = Route("bench.**", to="sink", topic="bench.order.events")

FLOOR_TABLE = """
CREATE TABLE floor_outbox (
    id bigserial PRIMARY KEY, topic text NOT NULL, key text, payload bytea NOT NULL, headers jsonb,
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(), created_at timestamptz NOT NULL DEFAULT now(),
    sent_at timestamptz, lease_token uuid, lease_until timestamptz);
CREATE INDEX floor_pending ON floor_outbox (id) WHERE sent_at IS NULL
"""
FLOOR_PICK = """
SELECT id, topic, key, payload, headers FROM floor_outbox WHERE sent_at IS NULL ORDER BY id LIMIT $1
FOR UPDATE SKIP LOCKED
"""
FLOOR_MARK = "UPDATE floor_outbox SET sent_at = now() WHERE id = ANY($1::bigint[])"


class Ticked(IntegrationEvent, name="bench.clock.ticked", version=1):
    seq: int
    note: str


class Sink:
    """Takes everything and keeps nothing but the moment."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.count = 0
        self.arrived: dict[int, float] = {}
        self.timing = False

    def preflight(self, message: Message) -> str | None:  # noqa: ARG002
        return None

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:  # noqa: ARG002
        return {}

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:  # noqa: ARG002
        if self.timing:
            now = time.monotonic()
            for message in messages:
                self.arrived[json.loads(message.body)["seq"]] = now
        self.count += len(messages)
        return Outcome(range(len(messages)))

    async def close(self, producer: str | None = None) -> None:
        pass


def body(seq: int) -> bytes:
    fields: dict[str, object] = {"seq": seq, "order_id": str(UUID(int=seq)), "customer": f"customer-{seq % 1000}"}
    fields["note"] = "x" * (PAYLOAD_BYTES - len(json.dumps(fields)) - 12)
    return json.dumps(fields, separators=(",", ":")).encode()


def delivery(seq: int, shards: int) -> Delivery:
    event_id = clock.current().new_id()
    headers = {
        "event_id": str(event_id),
        "event_type": "bench.clock.ticked",
        "occurred_at": "2026-01-01T00:00:00.000000Z",
        "aggregate_type": "order",
        "aggregate_id": str(seq),
        "schema_version": "1",
        "content_type": "application/json",
        "event_index": "0",
        "event_count": "1",
    }
    shard = stable_hash(str(seq)) % shards
    return Delivery(event_id, "bench.clock.ticked", ROUTE.id, shard, 1, ROUTE.topic, str(seq), None, headers, body(seq))


async def measure(url: str) -> dict[str, object]:
    """All figures, by name."""
    raw = url.replace("+asyncpg", "")
    engine = create_async_engine(url)
    floor = await asyncpg.connect(raw)
    try:
        await floor.execute(FLOOR_TABLE)
        sink = Sink()
        async with Pillarbox(engine, transports={"sink": sink}, routes=[ROUTE]) as box:
            await box.migrate()
            drained = await _drains(box, sink, floor)
            latency = await _latency(box, sink, url)
    finally:
        await floor.close()
        await engine.dispose()
    return {**drained, "latency_ms": latency}


async def _drains(box: Pillarbox, sink: Sink, floor: asyncpg.Connection) -> dict[str, object]:
    ratios, rates, floors, cpu, wal = [], [], [], [], []
    for _ in range(PAIRS):
        await _fill_floor(floor)
        floor_rate = await _drain_floor(floor)
        await fill(box)
        before = await _wal(floor)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        rate = await drain(box, sink)
        used = resource.getrusage(resource.RUSAGE_SELF)
        wal.append((await _wal(floor) - before) / EVENTS)
        cpu.append((used.ru_utime + used.ru_stime - usage.ru_utime - usage.ru_stime) / EVENTS * 1e6)
        ratios.append(rate / floor_rate)
        rates.append(rate)
        floors.append(floor_rate)
    return {
        "drain_ratio": statistics.median(ratios),
        "drain_per_second": statistics.median(rates),
        "drain_floor_per_second": statistics.median(floors),
        "cpu_us_per_event": statistics.median(cpu),
        "wal_bytes_per_event": statistics.median(wal),
    }


async def fill(box: Pillarbox) -> None:
    """Put the events into an empty outbox."""
    async with box.engine.begin() as connection:
        await connection.execute(text("TRUNCATE pillarbox_outbox"))
        for start in range(0, EVENTS, 1000):
            rows = [delivery(seq, box.router.shards) for seq in range(start, start + 1000)]
            await connection.run_sync(box.store.append, rows)
    async with box.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        await connection.execute(text("VACUUM ANALYZE pillarbox_outbox"))


async def drain(box: Pillarbox, sink: Sink) -> float:
    """Send them; events per second."""
    sink.count = 0
    relay = box.relay(batch=BATCH)
    started = time.perf_counter()
    await relay.drain()
    seconds = time.perf_counter() - started
    async with box.engine.connect() as connection:
        left = (await connection.execute(text("SELECT count(*) FROM pillarbox_outbox WHERE status <> 'SENT'"))).scalar()
    assert sink.count == EVENTS, sink.count
    assert left == 0, left
    return EVENTS / seconds


async def _fill_floor(floor: asyncpg.Connection) -> None:
    await floor.execute("TRUNCATE floor_outbox")
    records = [("orders", str(seq), body(seq)) for seq in range(EVENTS)]
    await floor.copy_records_to_table("floor_outbox", columns=["topic", "key", "payload"], records=records)
    await floor.execute("VACUUM ANALYZE floor_outbox")


async def _drain_floor(floor: asyncpg.Connection) -> float:
    handled: set[int] = set()
    started = time.perf_counter()
    while True:
        async with floor.transaction():
            rows = await floor.fetch(FLOOR_PICK, BATCH)
            if not rows:
                break
            for row in rows:
                handled.add(json.loads(row["payload"])["seq"])
            await floor.execute(FLOOR_MARK, [row["id"] for row in rows])
    assert len(handled) == EVENTS
    return EVENTS / (time.perf_counter() - started)


async def _wal(connection: asyncpg.Connection) -> int:
    return int(await connection.fetchval("SELECT pg_current_wal_insert_lsn() - '0/0'"))


async def _latency(box: Pillarbox, sink: Sink, url: str) -> dict[str, float]:
    sink.timing = True
    relay = box.relay()
    running = asyncio.ensure_future(relay.run())
    producer = await asyncio.create_subprocess_exec(sys.executable, __file__, url, stdout=subprocess.PIPE)
    output, _ = await producer.communicate()
    committed = {int(seq): at for seq, at in json.loads(output).items()}
    async with asyncio.timeout(10):
        while len(sink.arrived) < len(committed):  # noqa: ASYNC110  a sink rings no bell
            await asyncio.sleep(0.01)
    relay.stop()
    await running
    waits = sorted(max(0.0, sink.arrived[seq] - at) * 1000 for seq, at in committed.items())
    measured = waits[: len(waits)]
    return {"p50": measured[len(measured) // 2], "p99": measured[int(len(measured) * 0.99)]}


async def _produce(url: str) -> None:
    """The other process: commits at a fixed rate; prints when each COMMIT returned, without the warm-up."""
    engine = create_async_engine(url)
    committed: dict[int, float] = {}
    sink = Sink()
    async with Pillarbox(engine, transports={"sink": sink}, routes=[ROUTE]) as box:
        started = time.monotonic()
        for seq in range(int((WARM_UP + SECONDS) * PER_SECOND)):
            await asyncio.sleep(max(0.0, started + seq / PER_SECOND - time.monotonic()))
            async with box.unit_of_work() as uow:
                uow.publish(Ticked(seq=seq, note="x" * PAYLOAD_BYTES), key=str(seq))
            if seq >= WARM_UP * PER_SECOND:
                committed[seq] = time.monotonic()
    await engine.dispose()
    print(json.dumps(committed))


def report(results: Mapping[str, object]) -> str:
    """Lines for people."""
    latency = results["latency_ms"]
    assert isinstance(latency, dict)
    return "\n".join(
        [
            f"relay: {EVENTS:,} events of {PAYLOAD_BYTES} bytes to a sink that does nothing",
            f"  drain              {results['drain_per_second']:10,.0f} events/s",
            f"  by hand            {results['drain_floor_per_second']:10,.0f} events/s",
            f"  ratio              {results['drain_ratio']:10.2f}",
            f"  client CPU         {results['cpu_us_per_event']:10.1f} us per event",
            f"  WAL                {results['wal_bytes_per_event']:10,.0f} bytes per event",
            f"  commit to sink     {latency['p50']:10.2f} ms p50, {latency['p99']:.2f} ms p99 at {PER_SECOND}/s",
        ]
    )


if __name__ == "__main__":
    asyncio.run(_produce(sys.argv[1]))
