"""Time and ids, as a port: all code that reads a clock or creates an id uses it.

A `Clock` has the time of day, the elapsed time and the next id. The system clock is the default; `use` replaces it in
the running context, for tests and the simulator.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Protocol
from uuid import UUID

import msgspec

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clock(Protocol):
    """A source of time and ids."""

    def now(self) -> datetime:
        """The time of day in UTC, with time zone."""
        ...

    def monotonic(self) -> float:
        """Seconds since a fixed moment. Never goes back, and does not stop while the machine sleeps."""
        ...

    def new_id(self) -> UUID:
        """A UUIDv7, greater than every earlier one of this clock."""
        ...


class SystemClock:
    """The machine's clock. Its ids rise strictly, also within one tick and across threads."""

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return _elapsed()

    def new_id(self) -> UUID:
        # 48 bits of milliseconds and 12 of their fraction: RFC 9562, method 3.
        stamp = (time.time_ns() << 12) // 1_000_000
        with self._lock:
            self._last = stamp = max(stamp, self._last + 1)
        # Unique, not secret. A forked process seeds its generator again.
        return uuid7(stamp, random.getrandbits(62))


def _elapsed_with_sleep() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# A machine that sleeps must notice that its leases have expired; on Linux, the plain monotonic clock stops meanwhile.
_elapsed = _elapsed_with_sleep if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


def uuid7(stamp: int, tail: int) -> UUID:
    """A UUIDv7 from a 60-bit time stamp (in 1/4096 ms) and 62 random bits."""
    number = (stamp >> 12) << 80 | 0x7 << 76 | (stamp & 0xFFF) << 64 | 0b10 << 62 | tail
    return msgspec.convert(number.to_bytes(16, "big"), UUID)  # equal to UUID(int=number), in half the time


def first_uuid7(seconds: float) -> UUID:
    """A lower bound of all UUIDv7 from this moment on, above all earlier ones."""
    return UUID(int=max(0, int(seconds * 1000)) << 80)


def time_of(event_id: UUID) -> datetime:
    """The creation time of a UUIDv7, to the millisecond."""
    return EPOCH + timedelta(milliseconds=event_id.int >> 80)


_current: ContextVar[Clock] = ContextVar("pillarbox_clock", default=SystemClock())  # noqa: B039  shared on purpose


def current() -> Clock:
    """The clock of the running context."""
    return _current.get()


def new_id() -> UUID:
    """The next id of the current clock."""
    return _current.get().new_id()


def now() -> datetime:
    """The time of day of the current clock."""
    return _current.get().now()


@contextmanager
def use(clock: Clock) -> Iterator[Clock]:
    """Use ``clock`` within the block."""
    token = _current.set(clock)
    try:
        yield clock
    finally:
        _current.reset(token)
