"""The floor: lock a batch by SKIP LOCKED, hand it over, mark it by an UPDATE, commit; with asyncpg and nothing else."""

from __future__ import annotations

import asyncio

import asyncpg  # type: ignore[import-untyped]

from bench.figures import body, seq_of

from .contender import Arrived, Contender, main

_TABLE = """
CREATE TABLE outbox (
    id bigserial PRIMARY KEY, topic text NOT NULL, key text, payload bytea NOT NULL, headers jsonb,
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(), created_at timestamptz NOT NULL DEFAULT now(),
    sent_at timestamptz, lease_token uuid, lease_until timestamptz);
CREATE INDEX outbox_pending ON outbox (id) WHERE sent_at IS NULL
"""
_PICK = """
SELECT id, topic, key, payload, headers FROM outbox WHERE sent_at IS NULL ORDER BY id LIMIT 500 FOR UPDATE SKIP LOCKED
"""
_MARK = "UPDATE outbox SET sent_at = now() WHERE id = ANY($1::bigint[])"
_INSERT = "INSERT INTO outbox (topic, key, payload) VALUES ('orders', $1, $2)"


class Floor(Contender):
    left = "SELECT count(*) FROM outbox WHERE sent_at IS NULL"

    async def prepare(self) -> None:
        self._connection = await asyncpg.connect(self.dsn)
        await self._connection.execute(_TABLE)

    async def fill(self, events: int) -> None:
        await self._connection.copy_records_to_table(
            "outbox",
            columns=["topic", "key", "payload"],
            records=[("orders", str(seq), body(seq)) for seq in range(events)],
        )

    async def start(self, arrived: Arrived, *, drain: bool) -> None:  # noqa: ARG002  looks every 5 ms either way
        async def look() -> None:
            while True:
                async with self._connection.transaction():
                    rows = await self._connection.fetch(_PICK)
                    for row in rows:
                        arrived(seq_of(row["payload"]))
                    if rows:
                        await self._connection.execute(_MARK, [row["id"] for row in rows])
                if not rows:
                    await asyncio.sleep(0.005)

        self._looking = asyncio.create_task(look())

    async def stop(self) -> None:
        self._looking.cancel()

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(self.dsn, min_size=4, max_size=4)

    async def commit(self, seq: int) -> None:
        await self._pool.execute(_INSERT, str(seq), body(seq))


if __name__ == "__main__":
    main(Floor)
