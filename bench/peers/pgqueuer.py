"""pgqueuer: enqueued on the caller's connection, one manager on asyncpg, with its own settings for autovacuum."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Any

import asyncpg  # type: ignore[import-untyped]
from pgqueuer import PgQueuer  # type: ignore[import-not-found]
from pgqueuer.db import AsyncpgDriver  # type: ignore[import-not-found]
from pgqueuer.queries import Queries  # type: ignore[import-not-found]

from bench.figures import body, seq_of

from .contender import Arrived, Contender, main

logging.disable(logging.WARNING)


class PgQueuerQueue(Contender):
    left = "SELECT count(*) FROM pgqueuer"

    async def prepare(self) -> None:
        self._connection = await asyncpg.connect(self.dsn)
        self._queries = Queries(AsyncpgDriver(self._connection))
        await self._queries.install()
        await self._connection.execute(self._queries.qbe.build_optimize_autovacuum_query())

    async def fill(self, events: int) -> None:
        for first in range(0, events, 1000):
            bodies = [body(seq) for seq in range(first, min(first + 1000, events))]
            await self._queries.enqueue(["orders"] * len(bodies), bodies, [0] * len(bodies))

    async def start(self, arrived: Arrived, *, drain: bool) -> None:
        self._manager = PgQueuer(AsyncpgDriver(self._connection))

        @self._manager.entrypoint("orders")  # type: ignore[untyped-decorator]
        async def handle(job: Any) -> None:
            arrived(seq_of(job.payload))

        run = self._manager.run(batch_size=500 if drain else 10, dequeue_timeout=timedelta(seconds=1))
        self._running = asyncio.create_task(run)

    async def stop(self) -> None:
        self._manager.shutdown.set()
        await asyncio.wait([self._running], timeout=5)

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(self.dsn, min_size=4, max_size=4)

    async def commit(self, seq: int) -> None:
        async with self._pool.acquire() as connection, connection.transaction():
            await Queries(AsyncpgDriver(connection)).enqueue("orders", body(seq))


if __name__ == "__main__":
    main(PgQueuerQueue)
