"""A clock for tests: the time of day changes only on request."""

from __future__ import annotations

import random
import threading
from datetime import datetime, timedelta
from uuid import UUID

from ..clock import EPOCH, SystemClock, uuid7
from ..errors import ConfigurationError

_MILLISECOND = timedelta(milliseconds=1)


class FakeClock:
    """A `Clock`. The time of day starts at the machine's. Elapsed time is real, and jumps with `advance`: if it stood
    still, leases and time-outs would never expire.
    """

    def __init__(self) -> None:
        self._system = SystemClock()
        self._now = self._system.now()
        self._ahead = 0.0
        self._last = 0
        self._lock = threading.Lock()

    def advance(self, seconds: float | timedelta) -> None:
        """Let time pass."""
        step = seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)
        if step < timedelta(0):
            raise ConfigurationError(f"advance: time does not go back, got {seconds!r}; move_to sets the time of day")
        self._now += step
        self._ahead += step.total_seconds()

    def move_to(self, moment: datetime) -> None:
        """Set the time of day. It may go back, but elapsed time never does."""
        if moment.tzinfo is None:
            raise ConfigurationError(f"move_to: {moment.isoformat()} has no time zone: give it one, best UTC")
        self._ahead += max(0.0, (moment - self._now).total_seconds())
        self._now = moment.astimezone(EPOCH.tzinfo)

    # -- the port ------------------------------------------------------------------------------------------------------

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._system.monotonic() + self._ahead

    def new_id(self) -> UUID:
        stamp = ((self._now - EPOCH) // _MILLISECOND) << 12
        with self._lock:  # plain functions as handlers run in threads
            self._last = stamp = max(stamp, self._last + 1)
        return uuid7(stamp, random.getrandbits(62))
