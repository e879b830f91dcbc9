"""txoutbox: its PostgreSQL storage and relay on asyncpg, woken by its trigger; rows are deleted once they are sent."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg  # type: ignore[import-untyped]
from txoutbox import Relay, RelayConfig  # type: ignore[import-not-found]
from txoutbox.adapters.postgres import PostgresStorage  # type: ignore[import-not-found]

from bench.figures import body, seq_of

from .contender import Arrived, Contender, main


class TxOutbox(Contender):
    left = "SELECT count(*) FROM outbox"

    async def prepare(self) -> None:
        await self.open()
        await self._storage.create_schema()

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(self.dsn, min_size=4, max_size=4)
        self._storage = PostgresStorage(self._pool, strict_ordering=True, delete_on_ack=True, notify_channel="outbox")

    async def fill(self, events: int) -> None:
        async with self._pool.acquire() as connection, connection.transaction():
            for seq in range(events):
                await self._storage.insert(connection, "orders", body(seq))

    async def start(self, arrived: Arrived, *, drain: bool) -> None:  # noqa: ARG002  its batches are as large as there are events
        async def publish(message: Any) -> None:
            arrived(seq_of(message.payload))

        pace = RelayConfig(batch_size=500, concurrency=100, lease=timedelta(minutes=2), poll_min=0.01, poll_max=1.0)
        self._relay = Relay(self._storage, publish, config=pace)
        self._listening = await self._storage.listen(self._relay.wake)
        self._running = asyncio.create_task(self._relay.run())

    async def stop(self) -> None:
        self._relay.stop()
        await asyncio.wait([self._running], timeout=5)
        await self._listening.close()

    async def commit(self, seq: int) -> None:
        async with self._pool.acquire() as connection, connection.transaction():
            await self._storage.insert(connection, "orders", body(seq))


if __name__ == "__main__":
    main(TxOutbox)
