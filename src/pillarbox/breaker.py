"""Pauses of a lane: its destination is unavailable, or it waits for an operator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .lane_report import Report
from .outbox import Trouble
from .redaction import redacted
from .retry import RetryPolicy
from .transport import Verdict

RESTS = RetryPolicy(base=0.1, cap=2.0, attempts=1)
"""Pause of a lane: it grows with the consecutive failures of its destination. Each lane draws its own jitter, so after
an outage the last lane continues within the cap.
"""


class Breaker:
    """Pauses a lane while its destination is unavailable."""

    def __init__(self, report: Report, draw: Callable[[], float], changed: Callable[[], None]) -> None:
        self.failures = 0
        """Number of consecutive failures of the destination."""
        self.trouble: Trouble | None = None
        self.stopping = asyncio.Event()
        """Set when the lane must end."""
        self._report = report
        self._draw = draw
        self._changed = changed

    def close(self) -> None:
        """The destination has answered."""
        self.failures, self.trouble = 0, None

    def tell(self, why: str) -> None:
        """Report that the lane cannot send, for an unknown time."""
        self.trouble = Trouble(why)
        self._changed()

    async def rest(self, verdict: Verdict, reason: str) -> bool:
        """Pause because the destination is unavailable, with backoff. Returns False if the lane must stop."""
        said = self._report.away(verdict, redacted(reason), first=self.failures == 0)
        self.failures += 1
        return await self.wait(RESTS.delay(self.failures, self._draw), said)

    async def wait(self, seconds: float, why: str) -> bool:
        """Pause for ``seconds``, and report why. Returns False if the lane must stop."""
        self.trouble = Trouble(why, seconds)
        self._changed()
        try:
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        except TimeoutError:
            return True
        return False

    async def halt(self, why: str) -> None:
        """Wait until the lane must stop, and report why."""
        self.trouble = Trouble(why)
        self._changed()
        await self.stopping.wait()
