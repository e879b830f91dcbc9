"""The contract of `Cache`, one test per promise.

Bind it by a subclass with a ``world`` fixture::

    class TestMyCache(CacheContract):
        @pytest.fixture
        def world(self) -> World: ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ...cache import TICKET_SECONDS, Cache, Ticket

TTL = 60.0
KEYS = ("plain", 'with "quotes" and ä ✓', "with\nlines", "k" * 500)


class World(ABC):
    """A cache, and control over its time."""

    cache: Cache

    @abstractmethod
    async def advance(self, seconds: float) -> None:
        """Let time pass for the cache."""


class CacheContract:
    """The promises of `Cache`."""

    # -- values --------------------------------------------------------------------------------------------------------

    async def test_values_come_back_exactly(self, world: World) -> None:
        values = dict(zip(KEYS, (b"", bytes(range(256)), b"V", b"x" * 100_000), strict=True))
        for key, value in values.items():
            await self.fill(world, key, value)
        assert {key: await world.cache.get(key) for key in KEYS} == values

    async def test_nothing_is_deleted(self, world: World) -> None:
        await self.fill(world, "key", b"1")
        await world.cache.delete([])
        assert await world.cache.get("key") == b"1"

    async def test_a_value_lives_for_its_time(self, world: World) -> None:
        await self.fill(world, "key", b"1", ttl=30)
        await world.advance(29)
        assert await world.cache.get("key") == b"1"
        await world.advance(1.5)
        await self.ticket(world, "key")

    async def test_a_deleted_value_is_gone(self, world: World) -> None:
        await self.fill(world, "key", b"1")
        await self.fill(world, "other", b"2")
        await world.cache.delete(["key", "missing"])
        await self.ticket(world, "key")
        assert await world.cache.get("other") == b"2"

    # -- tickets -------------------------------------------------------------------------------------------------------

    async def test_all_who_miss_a_key_may_fill_it_and_the_first_one_does(self, world: World) -> None:
        mine = await self.ticket(world, "key")
        theirs = await self.ticket(world, "key")
        await world.cache.set(theirs, b"1", ttl=TTL)
        await world.cache.set(mine, b"2", ttl=TTL)
        assert await world.cache.get("key") == b"1"

    async def test_a_delete_refuses_the_tickets_from_before(self, world: World) -> None:
        early = await self.ticket(world, "key")
        await world.cache.delete(["key"])
        await world.cache.set(early, b"old", ttl=TTL)
        late = await self.ticket(world, "key")
        await world.cache.set(early, b"old", ttl=TTL)
        await world.cache.set(late, b"new", ttl=TTL)
        await world.cache.set(early, b"old", ttl=TTL)
        assert await world.cache.get("key") == b"new"

    async def test_a_delete_refuses_the_tickets_from_before_also_if_the_key_was_filled_meanwhile(
        self, world: World
    ) -> None:
        early = await self.ticket(world, "key")
        await self.fill(world, "key", b"1")
        await world.cache.delete(["key"])
        await world.cache.set(early, b"old", ttl=TTL)
        await self.ticket(world, "key")

    async def test_a_ticket_runs_out(self, world: World) -> None:
        ticket = await self.ticket(world, "key")
        await world.advance(TICKET_SECONDS + 0.5)
        await world.cache.set(ticket, b"late", ttl=TTL)
        await self.ticket(world, "key")

    # ------------------------------------------------------------------------------------------------------------------

    async def ticket(self, world: World, key: str) -> Ticket:
        """The ticket for a key that has no value."""
        ticket = await world.cache.get(key)
        assert isinstance(ticket, Ticket)
        return ticket

    async def fill(self, world: World, key: str, value: bytes, ttl: float = TTL) -> None:
        await world.cache.set(await self.ticket(world, key), value, ttl=ttl)
