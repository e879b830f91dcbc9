"""A lane and its lease: no read, write or request without a valid lease.

Before this: a relay has leased the lane. After it: the reads and writes of a turn, with the lane in its stored state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

from . import clock
from .errors import LeaseLostError
from .outbox import Batch, Failure, Lane, OutboxStore, Page, Row


class LeasedLane:
    """The store operations of a lane's owner. Each checks the lease first."""

    def __init__(self, lane: Lane, store: OutboxStore, deadline: float) -> None:
        self.lane = lane
        self._store = store
        self._deadline = deadline
        self._timeout: asyncio.Timeout | None = None

    def extend(self, deadline: float) -> None:
        """Set the end of a renewed lease, by the monotonic clock of this process."""
        self._deadline = deadline
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(_loop_time(deadline))

    def check(self) -> None:
        """Raise `LeaseLostError` if the lease may have ended: after a sleep, another relay may own the lane."""
        if clock.current().monotonic() >= self._deadline:
            raise LeaseLostError(f"the lease of lane {self.lane} was not renewed in time")

    @asynccontextmanager
    async def within(self) -> AsyncIterator[None]:
        """Cancel a request when the lease ends. A renewal meanwhile extends the limit."""
        self.check()
        try:
            async with asyncio.timeout_at(_loop_time(self._deadline)) as timeout:
                self._timeout = timeout
                yield
        finally:
            self._timeout = None

    async def poll(self, *, limit: int, max_bytes: int, paused: Collection[str], detour: str | None) -> Page:
        """Read the next page."""
        self.check()
        return await self._store.poll(self.lane, limit=limit, max_bytes=max_bytes, paused=paused, detour=detour)

    async def announce(self, batch: Batch) -> None:
        """Announce a batch, and settle the previous one."""
        self.check()
        self.lane = await self._store.announce(self.lane, batch, settle=self.lane.announced is not None)

    async def amend(
        self,
        failures: Sequence[Failure] = (),
        *,
        parked: Sequence[int] = (),
        attempts: Mapping[int, int] | None = None,
    ) -> None:
        """Take rows out of the announced batch. Without changes, this only checks whether the lane is still owned."""
        self.check()
        self.lane = await self._store.amend(self.lane, failures, parked=parked, attempts=attempts)

    async def settle(self) -> None:
        """Settle the announced batch: the destination has all rows that are left in it."""
        self.check()
        self.lane = await self._store.settle(self.lane)

    async def part(self, tenants: Collection[str]) -> None:
        """Give tenants a detour."""
        self.check()
        self.lane = await self._store.part(self.lane, tenants)

    async def join(self, tenants: Collection[str]) -> None:
        """End the detours of tenants that have caught up with the lane."""
        self.check()
        self.lane = await self._store.join(self.lane, tenants)

    async def rebuild(self) -> list[tuple[int, Row]]:
        """Read the announced batch, with its numbers."""
        self.check()
        return await self._store.rebuild(self.lane)

    async def asked(self, rows: Collection[int]) -> frozenset[int]:
        """The given rows for which operators have requests."""
        return await self._store.asked(self.lane, rows)


def _loop_time(deadline: float) -> float:
    return asyncio.get_running_loop().time() + deadline - clock.current().monotonic()
