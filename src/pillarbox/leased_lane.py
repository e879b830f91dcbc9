"""A lane and the lease on it: nothing is read, written or sent on a lease that may have ended.

Before this: a relay has leased the lane. After it: what one turn of the lane reads and writes, with the lane as the
store has it now.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

from . import clock
from .errors import LeaseLostError
from .outbox import Batch, Failure, Lane, OutboxStore, Page, Row


class LeasedLane:
    """What the owner of a lane does with it in the store."""

    def __init__(self, lane: Lane, store: OutboxStore, deadline: float) -> None:
        self.lane = lane
        self._store = store
        self._deadline = deadline
        self._timeout: asyncio.Timeout | None = None

    def extend(self, deadline: float) -> None:
        """The lease was renewed: until then, by the monotonic clock of this process."""
        self._deadline = deadline
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(_loop_time(deadline))

    def check(self) -> None:
        """`LeaseLostError` if the lease may have ended: the process may have slept, and another may own the lane."""
        if clock.current().monotonic() >= self._deadline:
            raise LeaseLostError(f"the lease of lane {self.lane} was not renewed in time")

    @asynccontextmanager
    async def within(self) -> AsyncIterator[None]:
        """A request ends when the lease does, which may be extended meanwhile."""
        self.check()
        try:
            async with asyncio.timeout_at(_loop_time(self._deadline)) as timeout:
                self._timeout = timeout
                yield
        finally:
            self._timeout = None

    async def poll(self, *, limit: int, max_bytes: int, paused: Collection[str], detour: str | None) -> Page:
        """What comes next."""
        self.check()
        return await self._store.poll(self.lane, limit=limit, max_bytes=max_bytes, paused=paused, detour=detour)

    async def announce(self, batch: Batch) -> None:
        """Announce a batch, and settle the one before."""
        self.check()
        self.lane = await self._store.announce(self.lane, batch, settle=self.lane.announced is not None)

    async def amend(
        self,
        failures: Sequence[Failure] = (),
        *,
        parked: Sequence[int] = (),
        attempts: Mapping[int, int] | None = None,
    ) -> None:
        """Take rows out of the announced batch. With nothing to change it tells whether the lane is still owned."""
        self.check()
        self.lane = await self._store.amend(self.lane, failures, parked=parked, attempts=attempts)

    async def settle(self) -> None:
        """All that is left of the announced batch is at the destination."""
        self.check()
        self.lane = await self._store.settle(self.lane)

    async def part(self, tenants: Collection[str]) -> None:
        """Give tenants a detour."""
        self.check()
        self.lane = await self._store.part(self.lane, tenants)

    async def join(self, tenants: Collection[str]) -> None:
        """End the detours of tenants that have come as far as the lane."""
        self.check()
        self.lane = await self._store.join(self.lane, tenants)

    async def rebuild(self) -> list[tuple[int, Row]]:
        """The announced batch, with its numbers."""
        self.check()
        return await self._store.rebuild(self.lane)

    async def asked(self, rows: Collection[int]) -> frozenset[int]:
        """Those of the rows that people have requests about."""
        return await self._store.asked(self.lane, rows)


def _loop_time(deadline: float) -> float:
    return asyncio.get_running_loop().time() + deadline - clock.current().monotonic()
