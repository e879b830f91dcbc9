"""How many transactions a consumer may have at a time, and how its tenants share them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Hands:
    """Not for several event loops at the same time. As long as there is one tenant only, it may use all; from the
    second on, none may use the last one unless it has no other: what hangs, or takes long, leaves room for the others.
    """

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self._busy: Counter[str | None] = Counter()
        self._seen: set[str | None] = set()
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}
        self.offer: Callable[[], bool] = lambda: False
        """Offers a free hand to what the broker has brought; whether it was taken."""
        self._was_offered = False

    @property
    def is_shared(self) -> bool:
        """Whether there are several tenants."""
        return len(self._seen) > 1

    def is_free(self, tenant: str | None) -> bool:
        """Whether a message of this tenant may be begun now."""
        if len(self._seen) < 2:
            self._seen.add(tenant)
        free = self.concurrency - self._busy.total()
        if free <= 0:
            return False
        return free > 1 or not self._busy[tenant] or not self.is_shared

    def begin(self, tenant: str | None) -> None:
        """One more of this tenant is at work."""
        self._busy[tenant] += 1

    def end(self, tenant: str | None) -> None:
        """It is at work no longer. A waiting message of a tenant that may begin one goes on; tenants take turns."""
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]
        # By turns: else those that wait by `one` might keep all others waiting.
        self._was_offered = bool(self._waiting) and not self._was_offered and self.offer()
        for each, futures in [*self._waiting.items()]:
            while futures and self.is_free(each):
                future = futures.popleft()
                if not future.done():
                    self.begin(each)
                    future.set_result(None)
            if futures:
                self._waiting[each] = self._waiting.pop(each)
            else:
                del self._waiting[each]
        while self.offer():
            pass

    @asynccontextmanager
    async def one(self, tenant: str | None) -> AsyncIterator[None]:
        """Wait until a message of this tenant may be begun, and hold its place."""
        if self.is_free(tenant):
            self.begin(tenant)
        else:
            future = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(future)
            try:
                await future
            except BaseException:
                if future.done() and not future.cancelled():
                    self.end(tenant)
                raise
        try:
            yield
        finally:
            self.end(tenant)
