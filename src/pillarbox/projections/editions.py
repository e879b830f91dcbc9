"""Cached rows of a table that may be replaced as a whole, as a rebuild does it.

A cache forgets keys, and nobody knows all that it has of a table. So each value says of which edition of the table it
is, and the cache has the name of the edition that holds now, under a key that is asked for together with the row's.
Whoever replaces the table has that key forgotten: the next reader makes another name, and all that bears the old one
counts as missing. A name is always taken before the row is read: so no old row ever gets a new name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from uuid import uuid4

from ..cache import Cache, Ticket
from ..interceptors.read_cache import cache_key, forget

NAME_SECONDS = 30 * 24 * 3600.0
"""How long the name of an edition lives. When it ends, all rows are read once more."""
_NAME_BYTES = 32


async def replaced(cache: Cache, model: Any) -> None:
    """The table of this class is another one now: nothing that was cached of it holds. Does not fail."""
    await forget(cache, [_edition_key(model)])


class Editions:
    """A `Cache` for rows of one class, whose values end with their edition."""

    def __init__(self, cache: Cache, model: Any) -> None:
        self._cache = cache
        self._key = _edition_key(model)

    async def get(self, keys: Collection[str]) -> dict[str, bytes | Ticket]:
        found = await self._cache.get([self._key, *keys])
        name = await self._name(found.pop(self._key, None))
        if name is None:
            return {}
        fitting: dict[str, bytes | Ticket] = {}
        for key, entry in found.items():
            if isinstance(entry, Ticket):
                fitting[key] = Ticket(key, name.decode() + entry.number)
            elif entry.startswith(name):
                fitting[key] = entry[_NAME_BYTES:]
        if old := found.keys() - fitting.keys():
            await self._cache.delete(old)
        return fitting

    async def set(self, values: Mapping[Ticket, bytes], *, ttl: float) -> None:
        named = {
            Ticket(ticket.key, ticket.number[_NAME_BYTES:]): ticket.number[:_NAME_BYTES].encode() + value
            for ticket, value in values.items()
        }
        await self._cache.set(named, ttl=ttl)

    async def delete(self, keys: Collection[str]) -> None:
        await self._cache.delete(keys)

    async def _name(self, found: bytes | Ticket | None) -> bytes | None:
        """The name of the edition, a new one if there is none; None if that is unavailable now."""
        if isinstance(found, Ticket):
            await self._cache.set({found: uuid4().hex.encode()}, ttl=NAME_SECONDS)
            found = (await self._cache.get([self._key])).get(self._key)  # somebody else may have been first
        return found if isinstance(found, bytes) else None


def _edition_key(model: Any) -> str:
    return cache_key(model, None, ())
