"""What every `Cache` must do, one test per promise.

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
    """A cache, and the power over its time."""

    cache: Cache

    @abstractmethod
    async def advance(self, seconds: float) -> None:
        """Let time pass for the cache."""


class CacheContract:
    """The promises of `Cache`."""

    # -- values --------------------------------------------------------------------------------------------------------

    async def test_values_come_back_exactly(self, world: World) -> None:
        values = dict(zip(KEYS, (b"", bytes(range(256)), b"V", b"x" * 100_000), strict=True))
        tickets = await self.tickets(world, *KEYS)
        await world.cache.set({tickets[key]: value for key, value in values.items()}, ttl=TTL)
        assert await world.cache.get(KEYS) == values

    async def test_nothing_is_asked_and_nothing_is_answered(self, world: World) -> None:
        assert await world.cache.get([]) == {}
        await world.cache.set({}, ttl=TTL)
        await world.cache.delete([])

    async def test_values_and_tickets_come_together(self, world: World) -> None:
        await self.fill(world, "there", b"1")
        found = await world.cache.get(["there", "missing"])
        assert found["there"] == b"1"
        assert isinstance(found["missing"], Ticket)

    async def test_a_value_lives_for_its_time(self, world: World) -> None:
        await self.fill(world, "key", b"1", ttl=30)
        await world.advance(29)
        assert await world.cache.get(["key"]) == {"key": b"1"}
        await world.advance(1.5)
        await self.tickets(world, "key")

    async def test_a_deleted_value_is_gone(self, world: World) -> None:
        await self.fill(world, "key", b"1")
        await self.fill(world, "other", b"2")
        await world.cache.delete(["key", "missing"])
        await self.tickets(world, "key")
        assert await world.cache.get(["other"]) == {"other": b"2"}

    # -- tickets -------------------------------------------------------------------------------------------------------

    async def test_all_who_miss_a_key_may_fill_it_and_the_first_one_does(self, world: World) -> None:
        mine = (await self.tickets(world, "key"))["key"]
        theirs = (await self.tickets(world, "key"))["key"]
        await world.cache.set({theirs: b"1"}, ttl=TTL)
        await world.cache.set({mine: b"2"}, ttl=TTL)
        assert await world.cache.get(["key"]) == {"key": b"1"}

    async def test_a_delete_refuses_the_tickets_from_before(self, world: World) -> None:
        early = (await self.tickets(world, "key"))["key"]
        await world.cache.delete(["key"])
        await world.cache.set({early: b"old"}, ttl=TTL)
        late = (await self.tickets(world, "key"))["key"]
        await world.cache.set({early: b"old"}, ttl=TTL)
        await world.cache.set({late: b"new"}, ttl=TTL)
        await world.cache.set({early: b"old"}, ttl=TTL)
        assert await world.cache.get(["key"]) == {"key": b"new"}

    async def test_a_delete_refuses_the_tickets_from_before_also_if_the_key_was_filled_meanwhile(
        self, world: World
    ) -> None:
        early = (await self.tickets(world, "key"))["key"]
        await self.fill(world, "key", b"1")
        await world.cache.delete(["key"])
        await world.cache.set({early: b"old"}, ttl=TTL)
        await self.tickets(world, "key")

    async def test_a_ticket_runs_out(self, world: World) -> None:
        ticket = (await self.tickets(world, "key"))["key"]
        await world.advance(TICKET_SECONDS + 0.5)
        await world.cache.set({ticket: b"late"}, ttl=TTL)
        await self.tickets(world, "key")

    async def test_one_refused_ticket_does_not_refuse_the_others(self, world: World) -> None:
        tickets = await self.tickets(world, "changed", "same")
        await world.cache.delete(["changed"])
        await world.cache.set({tickets["changed"]: b"old", tickets["same"]: b"1"}, ttl=TTL)
        assert (await world.cache.get(["same"])) == {"same": b"1"}
        await self.tickets(world, "changed")

    # ------------------------------------------------------------------------------------------------------------------

    async def tickets(self, world: World, *keys: str) -> dict[str, Ticket]:
        """The tickets for these keys, none of which has a value."""
        found = await world.cache.get(keys)
        tickets = {key: ticket for key, ticket in found.items() if isinstance(ticket, Ticket)}
        assert tickets.keys() == set(keys)
        return tickets

    async def fill(self, world: World, key: str, value: bytes, ttl: float = TTL) -> None:
        ticket = (await self.tickets(world, key))[key]
        await world.cache.set({ticket: value}, ttl=ttl)
