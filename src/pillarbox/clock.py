"""Time and identity, as ports: everything that reads a clock or makes an id asks here.

A `Clock` answers three questions: what time is it, how much time has passed, what is the next id. The system clock is
the default; `use` puts another one in its place for the running context, which is how tests and the simulator bend
time.
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
    """Where time and ids come from."""

    def now(self) -> datetime:
        """The wall clock, aware, in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back, and does not stand still while the machine sleeps."""
        ...

    def new_id(self) -> UUID:
        """A UUIDv7, greater than every one that this clock gave before."""
        ...


class SystemClock:
    """The machine's own clock. Its ids rise strictly, also within one tick and across threads."""

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
        # Unique, not secret; and the generator is seeded anew in a forked process.
        return uuid7(stamp, random.getrandbits(62))


def _elapsed_with_sleep() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# A machine that sleeps must notice that its leases have ended; on Linux the plain monotonic clock stands still then.
_elapsed = _elapsed_with_sleep if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


def uuid7(stamp: int, tail: int) -> UUID:
    """A UUIDv7 from a 60-bit time stamp (in 1/4096 ms) and 62 random bits."""
    number = (stamp >> 12) << 80 | 0x7 << 76 | (stamp & 0xFFF) << 64 | 0b10 << 62 | tail
    return msgspec.convert(number.to_bytes(16, "big"), UUID)  # as UUID(int=number), in half of the time


def first_uuid7(seconds: float) -> UUID:
    """Below all UUIDv7 of a moment, and above those before it."""
    return UUID(int=max(0, int(seconds * 1000)) << 80)


def time_of(event_id: UUID) -> datetime:
    """When a UUIDv7 was made, to the millisecond."""
    return EPOCH + timedelta(milliseconds=event_id.int >> 80)


_current: ContextVar[Clock] = ContextVar("pillarbox_clock", default=SystemClock())  # noqa: B039  shared on purpose


def current() -> Clock:
    """The clock of the running context."""
    return _current.get()


def new_id() -> UUID:
    """The next id of that clock."""
    return _current.get().new_id()


def now() -> datetime:
    """Its time."""
    return _current.get().now()


@contextmanager
def use(clock: Clock) -> Iterator[Clock]:
    """Let everything inside the block read ``clock``."""
    token = _current.set(clock)
    try:
        yield clock
    finally:
        _current.reset(token)
