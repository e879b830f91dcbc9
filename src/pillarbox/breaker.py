"""Rests of a lane: its destination is unavailable, or it waits for a person, and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .outbox import Trouble
from .redaction import redacted
from .report import Report
from .retry import RetryPolicy
from .transport import Verdict

RESTS = RetryPolicy(base=0.1, cap=2.0, attempts=1)
"""How long a lane rests: the longer, the more often its destination was unavailable. Each lane draws for itself, so the
cap is how late the last of them may be when the destination is back.
"""


class Breaker:
    """Keeps a lane from asking a destination that is unavailable again and again."""

    def __init__(self, report: Report, draw: Callable[[], float], changed: Callable[[], None]) -> None:
        self.failures = 0
        """How often in a row the destination was unavailable."""
        self.trouble: Trouble | None = None
        self.stopping = asyncio.Event()
        """The lane is to come to an end."""
        self._report = report
        self._draw = draw
        self._changed = changed

    def close(self) -> None:
        """The destination has accepted something."""
        self.failures, self.trouble = 0, None

    def tell(self, why: str) -> None:
        """The lane cannot send, for an unknown time."""
        self.trouble = Trouble(why)
        self._changed()

    async def rest(self, verdict: Verdict, reason: str) -> bool:
        """The destination is unavailable: wait, the longer the more often. False if the lane is to stop."""
        said = self._report.away(verdict, redacted(reason), first=self.failures == 0)
        self.failures += 1
        return await self.wait(RESTS.delay(self.failures, self._draw), said)

    async def wait(self, seconds: float, why: str) -> bool:
        """Do nothing for a while, and say why. False if the lane is to stop."""
        self.trouble = Trouble(why, seconds)
        self._changed()
        try:
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        except TimeoutError:
            return True
        return False

    async def halt(self, why: str) -> None:
        """Do nothing until the lane is to stop."""
        self.trouble = Trouble(why)
        self._changed()
        await self.stopping.wait()
