"""Floors for speed: the same work by hand, with asyncpg and nothing else, on one connection, 500 rows at a time.

    mark    lock a batch by FOR UPDATE SKIP LOCKED, publish, mark it by an UPDATE, commit: what a team writes
    delete  the same, but the rows are deleted
    cursor  no row is touched: read past the last id, publish, move the one cursor; as if no commit were ever late

None of them keeps order per key once there are two, knows failures, or can be taken over.
"""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import asyncpg  # type: ignore[import-untyped]

from .figures import BATCH, body, seq_of

TABLES = """
CREATE TABLE floor_outbox (
    id bigserial PRIMARY KEY, topic text NOT NULL, key text, payload bytea NOT NULL, headers jsonb,
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(), created_at timestamptz NOT NULL DEFAULT now(),
    sent_at timestamptz, lease_token uuid, lease_until timestamptz);
CREATE INDEX floor_pending ON floor_outbox (id) WHERE sent_at IS NULL;
CREATE TABLE floor_cursor (id bigint NOT NULL);
INSERT INTO floor_cursor VALUES (0)
"""
_COLUMNS = "id, topic, key, payload, headers"
_PICK = "FROM floor_outbox WHERE sent_at IS NULL ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED"
_MARK = "UPDATE floor_outbox SET sent_at = now() WHERE id = ANY($1::bigint[])"
_DELETE = f"DELETE FROM floor_outbox WHERE id = ANY(ARRAY(SELECT id {_PICK})) RETURNING {_COLUMNS}"
_READ = f"SELECT {_COLUMNS} FROM floor_outbox WHERE id > $1 ORDER BY id LIMIT $2"

KINDS = ("mark", "delete", "cursor")


class Floor:
    """The hand-written relays, on a connection."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection

    async def fill(self, events: int) -> None:
        """Put events into an empty table."""
        await self.connection.execute("TRUNCATE floor_outbox RESTART IDENTITY; UPDATE floor_cursor SET id = 0")
        await copy_events(self.connection, events)
        await self.connection.execute("VACUUM ANALYZE floor_outbox")

    async def drain(self, events: int, kind: str = "mark") -> float:
        """Send them; events per second."""
        step = {"mark": self._mark, "delete": self._delete, "cursor": self._cursor}[kind]
        seen: set[int] = set()
        started = time.perf_counter()
        while await step(seen):
            pass
        seconds = time.perf_counter() - started
        assert len(seen) == events, len(seen)
        return events / seconds

    async def refill_and_drain(self, events: int, kind: str = "mark") -> float:
        await self.fill(events)
        gc.collect()
        return await self.drain(events, kind)

    async def wal_bytes(self) -> int:
        """How much WAL the server has written so far."""
        return int(await self.connection.fetchval("SELECT pg_current_wal_insert_lsn() - '0/0'"))

    async def _mark(self, seen: set[int]) -> int:
        return await claim_and_mark(self.connection, seen.update)

    async def _delete(self, seen: set[int]) -> int:
        async with self.connection.transaction():
            rows = await self.connection.fetch(_DELETE, BATCH)
            rows.sort(key=lambda row: row["id"])
            seen.update([seq_of(row["payload"]) for row in rows])
        return len(rows)

    async def _cursor(self, seen: set[int]) -> int:
        position = await self.connection.fetchval("SELECT id FROM floor_cursor")
        rows = await self.connection.fetch(_READ, position, BATCH)
        if rows:
            seen.update([seq_of(row["payload"]) for row in rows])
            await self.connection.execute("UPDATE floor_cursor SET id = $1", rows[-1]["id"])
        return len(rows)


async def copy_events(connection: asyncpg.Connection, events: int) -> None:
    """Commit so many events, numbered from 0."""
    records = [("orders", str(seq), body(seq)) for seq in range(events)]
    await connection.copy_records_to_table("floor_outbox", columns=["topic", "key", "payload"], records=records)


async def claim_and_mark(connection: asyncpg.Connection, publish: Callable[[list[int]], None]) -> int:
    """One batch of the floor that all others are compared with; how many rows it had."""
    async with connection.transaction():
        rows = await connection.fetch(f"SELECT {_COLUMNS} {_PICK}", BATCH)
        if rows:
            publish([seq_of(row["payload"]) for row in rows])
            await connection.execute(_MARK, [row["id"] for row in rows])
    return len(rows)


@asynccontextmanager
async def floor_on(url: str) -> AsyncIterator[Floor]:
    """The floors, on tables of their own in that database."""
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        await connection.execute(TABLES)
        yield Floor(connection)
    finally:
        await connection.close()
