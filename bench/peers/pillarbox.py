"""Pillarbox: rows as its units of work write them, and its relay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import asyncpg  # type: ignore[import-untyped]

from bench.figures import BATCH, PAYLOAD_BYTES, seq_of
from bench.load import ROUTE, Sink, Ticked, box_on, fill
from pillarbox import Message

from .contender import Arrived, Contender, main


class _Handing(Sink):
    arrived: Arrived

    def take(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.arrived(seq_of(message.body))


class PillarboxRelay(Contender):
    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self._sink = _Handing()
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        self._box = await self._stack.enter_async_context(box_on(self.url, self._sink))

    async def prepare(self) -> None:
        await self.open()

    async def fill(self, events: int) -> None:
        await fill(self._box, events)

    async def start(self, arrived: Arrived, *, drain: bool) -> None:
        self._sink.arrived = arrived
        self._relay = self._box.relay(batch=BATCH) if drain else self._box.relay()
        self._running = asyncio.create_task(self._relay.run())

    async def stop(self) -> None:
        self._relay.stop()
        await self._running
        await self._stack.aclose()

    async def count_left(self, connection: asyncpg.Connection) -> int:  # noqa: ARG002  the store knows
        return len(await self._box.store.ready([ROUTE.id]))

    async def commit(self, seq: int) -> None:
        async with self._box.unit_of_work() as uow:
            uow.publish(Ticked(seq=seq, note="x" * (PAYLOAD_BYTES - 30)), key=str(seq))


if __name__ == "__main__":
    main(PillarboxRelay)
