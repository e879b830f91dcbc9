"""When to retry, and when to give up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .errors import ConfigurationError

LONGEST = 366 * 86_400.0
"""Longest delay in seconds: databases cannot store times thousands of years ahead."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter.

    The wait after attempt *n* is a random part of ``base * 2 ** (n - 1)``, at most ``cap`` seconds. After ``attempts``
    of them, there is no further try. Full jitter keeps thousands of failures from being retried at the same time.
    """

    base: float = 10.0
    cap: float = 600.0
    attempts: int = 5

    def __post_init__(self) -> None:
        if not (0 < self.base <= self.cap):
            raise ConfigurationError(
                f"RetryPolicy: base must be above 0 and at most cap, got base={self.base}, cap={self.cap}"
            )
        if self.cap > LONGEST:
            raise ConfigurationError(f"RetryPolicy: cap must be at most a year ({LONGEST:.0f} s), got {self.cap}")
        if self.attempts < 1:
            raise ConfigurationError(f"RetryPolicy: attempts must be at least 1, got {self.attempts}")

    def ceiling(self, attempt: int) -> float:
        """The longest wait after the given attempt (the first one is 1)."""
        # The exponent is limited: 2 ** 10_000 does not fit into a float, and the cap is reached long before.
        return min(self.cap, self.base * 2.0 ** min(attempt - 1, 64))

    def delay(self, attempt: int, draw: Callable[[], float] = random.random) -> float:
        """Seconds to wait after the given attempt; ``draw`` returns a number in [0, 1)."""
        return draw() * self.ceiling(attempt)

    def exhausted(self, attempt: int) -> bool:
        """Whether the given attempt was the last one."""
        return attempt >= self.attempts
