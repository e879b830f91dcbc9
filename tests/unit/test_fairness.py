"""A tenant that floods a lane, or is held back, takes a detour: the others pass it, and it loses nothing."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from msgspec.structs import replace

from pillarbox.cursor import RowAt
from pillarbox.fairness import FLOOD_PAGES, REST_SECONDS
from pillarbox.outbox import Lane, LaneName, Page
from pillarbox.stores.announced import position
from tests.memory.log import MemoryLogStore
from tests.relays import TOPIC, Choosy, World, in_virtual_time, running, until


def numbered(key: str, count: int) -> str:
    return " ".join(f"{key}{number}" for number in range(1, count + 1))


def of(key: str, sent: str) -> str:
    return " ".join(event for event in sent.split() if event[0] == key)


@in_virtual_time
async def test_h47_a_tenant_that_floods_its_lane_does_not_hold_up_the_others() -> None:
    world = World(kind=MemoryLogStore)
    world.write(numbered("a", 400), tenant="flood")
    world.write("b1 b2", tenant="small")
    async with running(world.relay(pacing={"batch": 5})):
        await world.received(402)
    assert world.sent.split().index("b2") < 5 * (FLOOD_PAGES + 6)
    assert of("a", world.sent) == numbered("a", 400)


@in_virtual_time
async def test_a_flood_that_the_lane_is_still_passing_over_has_no_turns() -> None:
    world = World(kind=Crowded)
    world.write(numbered("a", 400), tenant="flood")
    world.write("b1", tenant="small")
    async with running(world.relay(pacing={"batch": 5})):
        await world.received(401)
    assert world.sent.split().index("b1") < 5 * (FLOOD_PAGES + 2)
    assert of("a", world.sent) == numbered("a", 400)


class Crowded(MemoryLogStore):
    """A look of a lane with detours goes through twenty rows, as it does through many more in a database."""

    up_to: float = math.inf

    async def poll(self, lane: Lane, *, detour: str | None = None, **options: Any) -> Page:
        ahead = [row.id for row in self._written(lane.name) if row.id > position(lane).high]
        if detour is None and lane.detours and len(ahead) > 20:
            self.up_to = ahead[19]
        page = await super().poll(lane, detour=detour, **options)
        scan_exhausted, self.up_to = self.up_to < math.inf and not page.fresh, math.inf
        return replace(page, scan_exhausted=scan_exhausted)

    def _written(self, lane: LaneName) -> list[RowAt]:
        return [row for row in super()._written(lane) if row.id <= self.up_to]


@in_virtual_time
async def test_events_that_come_while_the_flood_is_served_pass_it() -> None:
    world = World(kind=MemoryLogStore)
    world.write(numbered("a", 400), tenant="flood")

    async def others_come(_producer: str, events: str) -> None:
        if "a100" in events.split():
            world.write("b1", tenant="small")
            world.write("a401", tenant="flood")

    world.broker.before = others_come
    async with running(world.relay(pacing={"batch": 5})):
        await world.received(402)
    assert world.sent.split().index("b1") < 130
    assert of("a", world.sent) == numbered("a", 401)


@in_virtual_time
async def test_tenants_that_share_a_lane_evenly_are_no_flood() -> None:
    world = World(kind=MemoryLogStore)
    for number in range(1, 101):
        for key in "abcde":
            world.write(f"{key}{number}", tenant=key)
    async with running(world.relay(pacing={"batch": 5})):
        await world.received(500)
    assert not (await world.take("r2")).detours


@in_virtual_time
async def test_a_tenant_is_no_flood_while_its_lane_catches_up_every_now_and_then() -> None:
    world = World(kind=MemoryLogStore)
    async with running(world.relay(pacing={"batch": 5})):
        for burst in range(3 * FLOOD_PAGES):
            world.write(" ".join(f"a{burst * 6 + number}" for number in range(1, 7)), tenant="one")
            await world.received(6 * (burst + 1))
    assert not (await world.take("r2")).detours


@pytest.mark.parametrize("floods", [2, 3])
@in_virtual_time
async def test_h47_tenants_that_flood_their_lane_side_by_side_do_not_hold_up_the_others(floods: int) -> None:
    world = World(kind=MemoryLogStore)
    for number in range(1, 151):
        for key in "abc"[:floods]:
            world.write(f"{key}{number}", tenant=key)
    world.write("x1", tenant="small")
    async with running(world.relay(pacing={"batch": 5})):
        await world.received(150 * floods + 1)
    assert world.sent.split().index("x1") < 5 * (FLOOD_PAGES + 6)
    for key in "abc"[:floods]:
        assert of(key, world.sent) == numbered(key, 150)


@in_virtual_time
async def test_h47_a_tenant_that_floods_its_lane_among_neighbours_does_not_hold_up_the_others() -> None:
    world = World(kind=MemoryLogStore)
    for number in range(1, 701):
        world.write(f"a{number}", tenant="flood")
        if number % 7 == 0:
            world.write(f"b{number}", tenant=f"neighbour {number}")
    world.write("x1", tenant="small")
    async with running(world.relay(pacing={"batch": 20})):
        await world.received(700 + 100 + 1)
    assert world.sent.split().index("x1") < 400
    assert of("a", world.sent) == numbered("a", 700)


@in_virtual_time
async def test_nobody_floods_a_lane_that_has_a_rate() -> None:
    """All wait for that; a detour would get what the others leave of it, which is nothing."""
    world = World(kind=MemoryLogStore)
    name = (await world.take("nobody", lease=0.001)).name
    world.store.set_rate(10, lane=name)
    for number in range(1, 41):
        world.write(f"a{number} b{number} c{number}", tenant="one")
        world.write(f"d{number}", tenant="two")
    async with running(world.relay(pacing={"batch": 5})):
        await world.received(100)
        lane = next(iter(world.store._lanes.values()))
        assert not lane.detours
    assert 20 <= len(of("d", world.sent).split()) <= 30


@in_virtual_time
async def test_events_of_nobody_in_particular_are_no_flood() -> None:
    world = World(kind=MemoryLogStore)
    world.write(numbered("a", 200))
    async with running(world.relay(pacing={"batch": 5})):
        await world.received(200)
    assert not (await world.take("r2")).detours


@in_virtual_time
async def test_a_detour_ends_when_it_was_empty_for_a_while() -> None:
    world = World(kind=MemoryLogStore)
    world.write(numbered("a", 100), tenant="flood")
    async with running(world.relay(pacing={"batch": 5})):
        await world.received(100)
        kept = next(iter(world.store._lanes.values()))
        assert [*kept.detours] == ["flood"]
        await asyncio.sleep(REST_SECONDS + 1)
        assert not kept.detours
        world.write("a101", tenant="flood")
        assert (await world.received(101)).endswith("a101")


@in_virtual_time
async def test_the_detour_of_a_tenant_with_a_rate_ends_too() -> None:
    """It was looked at again when the rate allowed more, and that was sooner."""
    world = World(kind=MemoryLogStore)
    world.store.set_rate(1, tenant="acme")
    world.write("a1 a2 a3", tenant="acme")
    async with running(world.relay()):
        await world.received(3)
        kept = next(iter(world.store._lanes.values()))
        await asyncio.sleep(3)
        assert kept.detours
        await asyncio.sleep(REST_SECONDS)
        assert not kept.detours


@in_virtual_time
async def test_a_paused_tenant_keeps_its_detour_and_goes_on_where_it_was() -> None:
    world = World(kind=MemoryLogStore)
    world.store.pause_tenant("acme")
    world.write("a1 a2", tenant="acme")
    world.write("b1", tenant="ball")
    async with running(world.relay()):
        await world.received(1)
        await asyncio.sleep(3 * REST_SECONDS)
        world.write("a3", tenant="acme")
        world.write("b2", tenant="ball")
        await asyncio.sleep(1)
        assert world.sent == "b1 b2"
    async with running(world.relay("another")):
        await asyncio.sleep(1)
        world.store.pause_tenant("acme", paused=False)
        assert await world.received(5) == "b1 b2 a1 a2 a3"


@in_virtual_time
async def test_a_tenant_with_a_rate_is_passed_by_the_others_and_keeps_to_it() -> None:
    world = World(kind=MemoryLogStore)
    world.store.set_rate(2, tenant="flood")
    world.write(numbered("a", 20), tenant="flood")
    world.write("b1 b2", tenant="small")
    async with running(world.relay()):
        await until(lambda: "b2" in world.sent)
        assert len(world.sent.split()) <= 4
        loop = asyncio.get_running_loop()
        began = loop.time()
        await world.received(22)
        assert 8 <= loop.time() - began <= 15
    assert of("a", world.sent) == numbered("a", 20)


@in_virtual_time
async def test_what_is_refused_while_its_tenant_gets_a_detour_is_told_once() -> None:
    world = World(kind=MemoryLogStore)
    world.store.set_rate(100, tenant="acme")
    world.broker = Choosy("a1")
    world.write("a1 b1", tenant="acme")
    relay = world.relay()
    async with running(relay):
        await world.received(1)
        assert (relay.counts.rejected, world.attempts("a1")) == (1, 1)


@in_virtual_time
async def test_to_get_a_detour_costs_a_tenant_nothing_of_its_rate() -> None:
    world = World(kind=MemoryLogStore)
    world.store.set_rate(0.05, tenant="acme")
    world.write("a1", tenant="acme")
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with running(world.relay()):
        await world.received(1)
        assert loop.time() - began < 1


@in_virtual_time
async def test_a_rejected_event_of_a_detour_holds_its_key_and_nobody_else() -> None:
    world = World(kind=MemoryLogStore)
    world.store.set_rate(100, tenant="acme")
    world.write("a1 b1 a2 b2", tenant="acme")
    world.write("c1", tenant="ball")
    world.reject("a1")
    async with running(world.relay()):
        await world.received(3)
        assert sorted(world.sent.split()) == ["b1", "b2", "c1"]
        world.broker.stop_rejecting()
        await world.received(5)
    assert of("a", world.sent) == "a1 a2"


@in_virtual_time
async def test_two_floods_take_turns() -> None:
    world = World(kind=MemoryLogStore)
    world.write(numbered("a", 300), tenant="one")
    world.write(numbered("b", 300), tenant="two")
    world.write("c1", tenant="small")
    async with running(world.relay(pacing={"batch": 5})):
        await world.received(601)
    assert world.sent.split().index("c1") < 200
    assert of("a", world.sent) == numbered("a", 300)
    assert of("b", world.sent) == numbered("b", 300)


@in_virtual_time
async def test_a_successor_serves_the_detours_that_it_finds() -> None:
    world = World(kind=MemoryLogStore)
    world.write(numbered("a", 300), tenant="flood")
    async with running(world.relay(pacing={"batch": 5})):
        await world.received(100)
    async with running(world.relay("another", pacing={"batch": 5})):
        world.write("b1", tenant="small")
        await world.received(301)
    assert of("a", world.sent) == numbered("a", 300)


@pytest.mark.parametrize("tenant", [None, "loud"], ids=["lane", "detour"])
@in_virtual_time
async def test_late_rows_that_wait_for_a_rate_keep_nobody_busy(tenant: str | None) -> None:
    world = World(kind=MemoryLogStore)
    world.store.set_rate(1_000, tenant="loud")
    store = world.store
    assert isinstance(store, MemoryLogStore)
    name = (await world.take("nobody", lease=0.001)).name
    late = store.begin()
    for event in numbered("a", 20).split():
        store.append(None, [world._delivery(event, tenant, 0, TOPIC)], xid=late)
    world.rows |= dict.fromkeys(numbered("a", 20).split(), 0)
    announced = 0
    announce = store.announce

    async def watched(*args: Any, **kwargs: Any) -> Lane:
        nonlocal announced
        announced += 1
        return await announce(*args, **kwargs)

    store.announce = watched  # type: ignore[method-assign]
    store.set_rate(1, lane=name)
    async with running(world.relay(pacing={"batch": 2})):
        world.write("b1", tenant=tenant)
        await world.received(1)
        store.end(late)
        await asyncio.sleep(5)
    assert announced < 30
