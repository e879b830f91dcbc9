"""An alarm: calls a function once, at the earliest of the requested moments.

The alarm stores its deadline itself, because the handle of an event loop may not know it: uvloop rounds to whole
milliseconds, and for a delay below half of one `call_later` returns a handle that is no timer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """Calls ``ring`` at its deadline. It can be set again at any time, also from within ``ring``."""

    def __init__(self, ring: Callable[[], object]) -> None:
        self._ring = ring
        self._deadline = math.inf
        self._handle: asyncio.Handle | None = None

    def set(self, seconds: float) -> None:
        """Ring after this many seconds, never earlier, unless an earlier deadline is set."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        deadline = math.ceil(due * 1000) / 1000  # uvloop would round down
        if deadline < due:  # the product was rounded down
            deadline += 0.001
        if deadline < self._deadline:
            self.cancel()
            self._deadline, self._handle = deadline, loop.call_at(deadline, self._due)

    def cancel(self) -> None:
        """Do not ring until it is set again."""
        if self._handle is not None:
            self._handle.cancel()
        self._deadline, self._handle = math.inf, None

    def _due(self) -> None:
        self.cancel()
        self._ring()
