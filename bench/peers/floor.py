"""The floor: lock a batch by SKIP LOCKED, hand it over, mark it by an UPDATE, commit; with asyncpg and nothing else."""

from __future__ import annotations

import asyncio

import asyncpg  # type: ignore[import-untyped]

from bench.figures import body
from bench.floors import TABLES, claim_and_mark, copy_events

from .contender import Arrived, Contender, main


class HandWritten(Contender):
    left = "SELECT count(*) FROM floor_outbox WHERE sent_at IS NULL"

    async def prepare(self) -> None:
        self._connection = await asyncpg.connect(self.dsn)
        await self._connection.execute(TABLES)

    async def fill(self, events: int) -> None:
        await copy_events(self._connection, events)

    async def start(self, arrived: Arrived, *, drain: bool) -> None:  # noqa: ARG002  looks every 5 ms either way
        def publish(numbers: list[int]) -> None:
            for number in numbers:
                arrived(number)

        async def look() -> None:
            while True:
                if not await claim_and_mark(self._connection, publish):
                    await asyncio.sleep(0.005)

        self._looking = asyncio.create_task(look())

    async def stop(self) -> None:
        self._looking.cancel()

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(self.dsn, min_size=4, max_size=4)

    async def commit(self, seq: int) -> None:
        insert = "INSERT INTO floor_outbox (topic, key, payload) VALUES ('orders', $1, $2)"
        await self._pool.execute(insert, str(seq), body(seq))


if __name__ == "__main__":
    main(HandWritten)
