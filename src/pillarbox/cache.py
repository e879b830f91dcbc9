"""The cache port: values that may be forgotten at any time, and are never older than the last `delete` of their key.

Between reading a row and filling the cache with it, another process may change the row and delete the key: a late fill
would bring the old value back, for as long as it lives. So a missing key is answered with a `Ticket`, and only a ticket
fills. `delete` invalidates all tickets of a key. Take the ticket first and read afterwards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from . import clock

TICKET_SECONDS = 10.0
"""How long a ticket is valid. A slower read does not fill."""
MAX_KEYS = 10_000
"""The size of a `MemoryCache`."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to fill a key with a value that is read after the ticket was issued."""

    key: str
    number: str


class Cache(Protocol):
    """Keeps values for a while. No method fails because the cache is unavailable."""

    async def get(self, key: str) -> bytes | Ticket | None:
        """The value of a key, or a ticket if there is none. None if the cache is unavailable."""
        ...

    async def set(self, ticket: Ticket, value: bytes, *, ttl: float) -> None:
        """Fill a key for ``ttl`` seconds. An expired ticket, or one whose key was deleted since, fills nothing."""
        ...

    async def delete(self, keys: Collection[str]) -> None:
        """Forget the values and invalidate the tickets. If the cache is unavailable, they stay until they expire."""
        ...


class MemoryCache:
    """A cache for one process. Beyond 10,000 keys it forgets the least recently used."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[bytes | Ticket, float]] = OrderedDict()
        self._numbers = count(1)

    async def get(self, key: str) -> bytes | Ticket | None:
        found = self._live(key)
        if found is None:
            found = Ticket(key, str(next(self._numbers)))
            self._put(key, found, TICKET_SECONDS)
        self._entries.move_to_end(key)
        return found

    async def set(self, ticket: Ticket, value: bytes, *, ttl: float) -> None:
        if self._live(ticket.key) == ticket:
            self._put(ticket.key, value, ttl)

    async def delete(self, keys: Collection[str]) -> None:
        for key in keys:
            self._entries.pop(key, None)

    def _live(self, key: str) -> bytes | Ticket | None:
        entry, until = self._entries.get(key, (None, 0.0))
        return entry if until > clock.current().monotonic() else None

    def _put(self, key: str, entry: bytes | Ticket, seconds: float) -> None:
        self._entries[key] = entry, clock.current().monotonic() + seconds
        if len(self._entries) > MAX_KEYS:
            self._entries.popitem(last=False)
