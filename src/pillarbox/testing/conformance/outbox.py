"""The contract of `LaneStore` and `OutboxStore`, one test per promise.

Bind it by a subclass with a ``world`` fixture::

    class TestMyStore(OutboxStoreContract):
        @pytest.fixture
        def world(self) -> World: ...
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol
from uuid import UUID, uuid4

import pytest
from msgspec.structs import replace

from ... import clock
from ...errors import BatchMismatchError, DuplicateEventError, LeaseLostError, RouteError, StoreError
from ...outbox import (
    Batch,
    Delivery,
    Failure,
    FailurePolicy,
    Key,
    Lane,
    LaneName,
    LaneStore,
    OutboxStore,
    Page,
    RouteRecord,
    Row,
    Status,
    Trouble,
)

ROUTE = RouteRecord("broker:orders", "broker", "orders")
SKIPPING = RouteRecord("broker:audit", "broker", "audit", on_failure=FailurePolicy.SKIP)
LEASE = 30.0


class Store(LaneStore, OutboxStore, Protocol):
    """The operations that a relay needs."""


class World(ABC):
    """A store, and the means to fill it, to read it, and to act as an operator."""

    store: Store

    @abstractmethod
    async def register(self, *records: RouteRecord) -> int:
        """Register routes in a transaction that commits."""

    @abstractmethod
    async def append(self, deliveries: Sequence[Delivery]) -> None:
        """Write deliveries in a transaction that commits."""

    @abstractmethod
    async def status(self, row: int) -> Status:
        """The status of a row."""

    @abstractmethod
    async def tamper(self, row: int) -> None:
        """Take a row out of its announced batch behind the store's back."""

    @abstractmethod
    async def request(self, row: int, action: str, *, body: bytes | None = None, event_id: UUID | None = None) -> int:
        """Request a redrive, a discard or an edit. Returns the id of the request."""

    @abstractmethod
    async def pause_lane(self, name: LaneName, paused: bool = True) -> None:
        """Pause or resume a lane."""

    @abstractmethod
    async def pause_tenant(self, tenant: str, paused: bool = True) -> None:
        """Pause or resume a tenant."""

    @abstractmethod
    async def set_rate(self, rate: float | None, *, lane: LaneName | None = None, tenant: str | None = None) -> None:
        """Set the rate of a lane or a tenant."""

    @abstractmethod
    async def trouble(self, name: LaneName) -> str | None:
        """The stored trouble of a lane."""

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        """Announce a batch made of the next page."""
        page = await self.store.poll(lane, limit=1000)
        return await self.store.announce(lane, replace(batch, cursor=page.cursor), settle=settle)


def delivery(
    key: str = "k", *, route: RouteRecord = ROUTE, tenant: str | None = "acme", body: bytes = b"{}", shard: int = 0
) -> Delivery:
    """A delivery with values that a store might corrupt."""
    event_id = uuid4()
    headers = {
        "event_id": str(event_id),
        "event_type": "orders.order.placed",
        "occurred_at": str(datetime.now(UTC)),
        "user_id": 'Ä✓ \\ "',
    }
    return Delivery(event_id, "orders.order.placed", route.id, shard, 1, "orders", key, tenant, headers, body)


class OutboxStoreContract:
    """The promises of `LaneStore`, `OutboxStore` and `Appends`."""

    # -- writes --------------------------------------------------------------------------------------------------------

    async def test_what_is_appended_comes_back_exactly(self, world: World) -> None:
        written = [
            delivery("käy ", body=bytes(range(256)), tenant=None),
            delivery("KÄY", body=b"\xff\x00"),
            delivery("k" * 512),
        ]
        await world.register(ROUTE)
        await world.append(written)
        rows = (await world.store.poll(await self.lane(world), limit=10)).fresh
        assert [(row.event_id, row.topic, row.key, row.tenant, dict(row.headers), row.body) for row in rows] == [
            (row.event_id, row.topic, row.key, row.tenant, dict(row.headers), row.body) for row in written
        ]

    async def test_rows_keep_the_order_in_which_they_were_appended(self, world: World) -> None:
        await world.register(ROUTE)
        written = [delivery(f"k{index}") for index in range(250)]
        await world.append(written)
        rows = (await world.store.poll(await self.lane(world), limit=1000)).fresh
        assert [row.event_id for row in rows] == [row.event_id for row in written]
        assert [row.id for row in rows] == sorted(row.id for row in rows)

    async def test_an_event_is_written_once_per_route_and_version(self, world: World) -> None:
        await world.register(ROUTE, SKIPPING)
        first = delivery()
        await world.append([first])
        with pytest.raises(DuplicateEventError):
            await world.append([first])
        await world.append([replace(first, route=SKIPPING.id), replace(first, schema_version=2)])

    async def test_registering_twice_changes_nothing_and_an_edit_is_taken_over(self, world: World) -> None:
        shards = await world.register(ROUTE)
        assert await world.register(ROUTE) == shards
        await world.register(replace(ROUTE, on_failure=FailurePolicy.SKIP))
        lanes = await world.store.take("r1", lease=LEASE, wanted={ROUTE.id: 1000})
        assert [lane.shard for lane in lanes] == list(range(shards))
        assert {lane.route.on_failure for lane in lanes} == {FailurePolicy.SKIP}

    async def test_what_lanes_are_chosen_by_is_not_changed(self, world: World) -> None:
        await world.register(ROUTE)
        with pytest.raises(RouteError, match="shard_by='tenant', but its lanes are chosen by 'key'"):
            await world.register(replace(ROUTE, shard_by="tenant"))
        [lane] = await world.store.take("r1", lease=LEASE, wanted={ROUTE.id: 1})
        assert lane.route.shard_by == "key"

    # -- leases --------------------------------------------------------------------------------------------------------

    async def test_take_gives_a_lane_to_one_relay_only(self, world: World) -> None:
        shards = await world.register(ROUTE)
        takers = [world.store.take(f"r{index}", lease=LEASE, wanted={ROUTE.id: 3}) for index in range(4)]
        taken = [lane.shard for lanes in await asyncio.gather(*takers) for lane in lanes]
        assert len(taken) == len(set(taken)) <= shards

    async def test_take_gives_of_each_route_no_more_than_was_wanted(self, world: World) -> None:
        await world.register(ROUTE, SKIPPING)
        assert await world.store.take("r1", lease=LEASE, wanted={}) == []
        taken = await world.store.take("r1", lease=LEASE, wanted={ROUTE.id: 2, SKIPPING.id: 1, 12345: 3})
        assert Counter(lane.route.id for lane in taken) == {ROUTE.id: 2, SKIPPING.id: 1}

    async def test_take_keeps_to_the_shards_that_were_asked_for(self, world: World) -> None:
        await world.register(ROUTE)
        taken = await world.store.take("r1", lease=LEASE, wanted={ROUTE.id: 1000}, shards={ROUTE.id: [1, 3]})
        assert [lane.shard for lane in taken] == [1, 3]

    async def test_paused_lanes_are_not_given_out(self, world: World) -> None:
        shards = await world.register(ROUTE)
        await world.pause_lane(LaneName(ROUTE.id, 2))
        taken = await world.store.take("r1", lease=LEASE, wanted={ROUTE.id: 1000})
        assert [lane.shard for lane in taken] == [shard for shard in range(shards) if shard != 2]
        await world.pause_lane(LaneName(ROUTE.id, 2), False)
        assert [lane.shard for lane in await world.store.take("r1", lease=LEASE, wanted={ROUTE.id: 1000})] == [2]

    async def test_h45_an_expired_lease_is_taken_over_with_a_higher_epoch_and_a_new_token(self, world: World) -> None:
        await world.register(ROUTE)
        old = await self.lane(world, lease=0.05)
        new = await self.lane(world, "r2")
        assert new.epoch == old.epoch + 1
        assert new.token != old.token

    async def test_h32_a_relay_that_lost_its_lease_can_write_nothing(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery(), delivery("other")])
        old = await self.lane(world, lease=0.05)
        first, second = (await world.store.poll(old, limit=10)).fresh
        old = await world.announce(old, Batch(items=[first.id]), settle=False)
        new = await self.lane(world, "r2")
        for step in (
            world.store.settle(old),
            world.announce(old, Batch(items=[second.id]), settle=True),
            world.store.amend(old, [Failure(first.id, 1, "no", 1.0)]),
        ):
            with pytest.raises(LeaseLostError):
                await step
        assert await world.status(first.id) is Status.SENDING
        assert await world.status(second.id) is Status.PENDING
        assert [row.id for _, row in await world.store.rebuild(new)] == [first.id]

    async def test_h102_another_token_is_fenced_even_in_the_same_epoch_and_batch(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        stranger = replace(lane, token=uuid4())
        for step in (
            world.store.settle(stranger),
            world.announce(stranger, Batch(items=[rows[1].id]), settle=True),
            world.store.amend(stranger, ()),
        ):
            with pytest.raises(LeaseLostError):
                await step
        assert await world.status(rows[0].id) is Status.SENDING
        await world.store.settle(lane)

    async def test_h102_a_batch_that_the_database_has_forgotten_to_settle_is_fenced(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        announced = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        ahead = replace(announced, announced=None)  # as if a failover had lost the settlement
        with pytest.raises(LeaseLostError):
            await world.announce(ahead, Batch(items=[row.id for row in rows]), settle=False)
        assert await world.status(rows[0].id) is Status.SENDING

    async def test_a_stale_batch_number_is_fenced_too(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery("a"), delivery("b")])
        stale = await self.lane(world)
        first, second = (await world.store.poll(stale, limit=10)).fresh
        await world.announce(stale, Batch(items=[first.id]), settle=False)
        with pytest.raises(LeaseLostError):
            await world.announce(stale, Batch(items=[first.id, second.id]), settle=False)
        assert await world.status(second.id) is Status.PENDING

    async def test_tries_rise_when_an_owner_was_lost_with_an_open_batch(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery()])
        lane = await self.lane(world, lease=0.05)
        assert lane.tries == 0
        [row] = (await world.store.poll(lane, limit=10)).fresh
        await world.announce(lane, Batch(items=[row.id]), settle=False)
        second = await self.lane(world, "r2", lease=0.05)
        third = await self.lane(world, "r3")
        assert (second.tries, third.tries) == (1, 2)
        assert (await world.store.settle(third)).tries == 0

    async def test_a_released_lane_is_free_at_once_and_its_batch_does_not_count_against_anybody(
        self, world: World
    ) -> None:
        rows, lane = await self.filled(world, "a")
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        await world.store.release("r1", [lane])
        [successor] = await world.store.take("r2", lease=LEASE, wanted={ROUTE.id: 1})
        assert (successor.name, successor.tries) == (lane.name, 0)
        assert [row.id for _, row in await world.store.rebuild(successor)] == [rows[0].id]

    async def test_h121_an_owner_that_releases_late_was_only_slow_and_its_batch_does_not_count(
        self, world: World
    ) -> None:
        rows, slow = await self.filled(world, "a", lease=0.05)
        slow = await world.announce(slow, Batch(items=[rows[0].id]), settle=False)
        successor = await self.lane(world, "r2", lease=0.05)
        assert successor.tries == 1
        await world.store.release("r1", [slow])
        third = await self.lane(world, "r3")
        assert third.tries == 1  # for the second owner, which was lost
        assert [row.id for _, row in await world.store.rebuild(third)] == [rows[0].id]
        assert (await world.store.settle(third)).tries == 0

    async def test_whoever_has_released_a_lane_can_write_nothing_any_more(self, world: World) -> None:
        rows, lane = await self.filled(world, "a")
        await world.store.release("r1", [lane])
        with pytest.raises(LeaseLostError):
            await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        assert await world.store.renew("r1", [lane], lease=LEASE, serves=[ROUTE.id]) == {}
        assert await world.store.take("r2", lease=LEASE, wanted={ROUTE.id: 1})

    async def test_a_lane_that_has_another_owner_is_not_released(self, world: World) -> None:
        await world.register(ROUTE)
        old = await self.lane(world, lease=0.05)
        new = await self.lane(world, "r2")
        await world.store.release("r1", [old])
        assert new.name in await world.store.renew("r2", [new], lease=LEASE, serves=[ROUTE.id])

    async def test_renewing_extends_a_lease_even_if_it_had_expired(self, world: World) -> None:
        await world.register(ROUTE)
        lanes = await world.store.take("r1", lease=0.05, wanted={ROUTE.id: 1000})
        await self.until_nothing_is_leased(world)
        kept = await world.store.renew("r1", lanes, lease=LEASE, serves=[ROUTE.id])
        assert kept == {lane.name: True for lane in lanes}
        assert await world.store.take("r2", lease=LEASE, wanted={ROUTE.id: 1000}) == []

    async def test_a_lane_that_somebody_else_took_is_not_renewed(self, world: World) -> None:
        await world.register(ROUTE)
        lost, *_ = await world.store.take("r1", lease=0.05, wanted={ROUTE.id: 1})
        await self.until_nothing_is_leased(world)
        [new] = await world.store.take("r2", lease=LEASE, wanted={ROUTE.id: 1})
        [kept] = await world.store.take("r1", lease=LEASE, wanted={ROUTE.id: 1})
        assert new.name == lost.name
        assert await world.store.renew("r1", [lost, kept], lease=LEASE, serves=[]) == {kept.name: True}
        assert await world.store.renew("r2", [new], lease=LEASE, serves=[]) == {new.name: True}

    async def test_troubles_are_kept_while_there_are_any(self, world: World) -> None:
        await world.register(ROUTE)
        one, two = await world.store.take("r1", lease=LEASE, wanted={ROUTE.id: 2})
        troubles = {one.name: Trouble("no route to host", 5.0), two.name: Trouble("halted")}
        await world.store.renew("r1", [one, two], lease=LEASE, serves=[], troubles=troubles)
        assert [await world.trouble(lane.name) for lane in (one, two)] == ["no route to host", "halted"]
        await world.store.renew("r1", [one, two], lease=LEASE, serves=[], troubles={two.name: Trouble("still halted")})
        assert [await world.trouble(lane.name) for lane in (one, two)] == [None, "still halted"]
        await world.store.release("r1", [two])
        assert await world.trouble(two.name) is None

    async def test_only_the_owner_says_what_troubles_a_lane(self, world: World) -> None:
        await world.register(ROUTE)
        old = await self.lane(world, lease=0.05)
        await self.lane(world, "r2")
        await world.store.renew("r1", [old], lease=LEASE, serves=[], troubles={old.name: Trouble("slow")})
        assert await world.trouble(old.name) is None

    # -- the census ----------------------------------------------------------------------------------------------------

    async def test_the_census_knows_routes_and_lanes_and_what_people_have_stopped(self, world: World) -> None:
        shards = await world.register(ROUTE, SKIPPING)
        stopped, slow = LaneName(ROUTE.id, 1), LaneName(ROUTE.id, 2)
        await world.pause_lane(stopped)
        await world.pause_tenant("loud")
        await world.pause_tenant("calm")
        await world.pause_tenant("calm", False)
        await world.set_rate(50.0, lane=slow)
        await world.set_rate(5.0, tenant="greedy")
        census = await world.store.census()
        assert census.routes == {ROUTE.id: ROUTE, SKIPPING.id: SKIPPING}
        assert census.shard_count == shards
        assert census.paused == {stopped}
        assert census.paused_tenants == {"loud"}
        assert (census.lane_rates, census.tenant_rates) == ({slow: 50.0}, {"greedy": 5.0})
        assert census.install
        await world.set_rate(None, lane=slow)
        await world.set_rate(None, tenant="greedy")
        census = await world.store.census()
        assert (census.lane_rates, census.tenant_rates) == ({}, {})

    async def test_the_census_names_the_living_and_what_they_serve(self, world: World) -> None:
        await world.register(ROUTE, SKIPPING)
        await world.store.renew("r1", [], lease=LEASE, serves=[ROUTE.id])
        await world.store.renew("r2", [], lease=LEASE, serves=[ROUTE.id, SKIPPING.id], shards=[1, 0])
        census = await world.store.census()
        assert census.relays == {"r1": {ROUTE.id}, "r2": {ROUTE.id, SKIPPING.id}}
        assert census.shards == {"r2": {0, 1}}
        await world.store.renew("r1", [], lease=LEASE, serves=[SKIPPING.id])
        await world.store.release("r2", [], leaving=True)
        census = await world.store.census()
        assert census.relays == {"r1": {SKIPPING.id}}
        assert census.shards == {}

    async def test_a_relay_that_is_not_heard_of_leaves_the_census(self, world: World) -> None:
        await world.store.renew("r1", [], lease=LEASE, serves=[])
        await world.store.renew("r2", [], lease=0.05, serves=[])
        async with asyncio.timeout(10):
            while set((await world.store.census()).relays) != {"r1"}:
                pass

    async def test_the_census_knows_when_the_next_lease_ends(self, world: World) -> None:
        await world.register(ROUTE)
        assert (await world.store.census()).next_expiry is None
        await world.store.take("r1", lease=2 * LEASE, wanted={ROUTE.id: 1})
        await world.store.take("r2", lease=LEASE, wanted={ROUTE.id: 1})
        next_expiry = (await world.store.census()).next_expiry
        assert next_expiry is not None
        assert 0 < next_expiry <= LEASE

    # -- ready lanes ---------------------------------------------------------------------------------------------------

    async def test_ready_names_lanes_with_fresh_rows(self, world: World) -> None:
        await world.register(ROUTE, SKIPPING)
        assert await world.store.ready([ROUTE.id, SKIPPING.id]) == frozenset()
        await world.append([delivery(shard=1), delivery(route=SKIPPING, shard=2)])
        assert await world.store.ready([ROUTE.id, SKIPPING.id]) == {LaneName(ROUTE.id, 1), LaneName(SKIPPING.id, 2)}
        assert await world.store.ready([SKIPPING.id]) == {LaneName(SKIPPING.id, 2)}
        assert await world.store.ready([]) == frozenset()

    async def test_ready_names_lanes_with_an_open_batch_until_it_is_settled(self, world: World) -> None:
        rows, lane = await self.filled(world, "a")
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        assert await world.store.ready([ROUTE.id]) == {lane.name}
        await world.store.settle(lane)
        assert await world.store.ready([ROUTE.id]) == frozenset()

    async def test_ready_names_lanes_with_rows_that_are_due(self, world: World) -> None:
        rows, lane = await self.filled(world, "a")
        lane = await world.announce(lane, Batch(failures=[Failure(rows[0].id, 1, "no", 600.0)]), settle=False)
        assert await world.store.ready([ROUTE.id]) == frozenset()
        lane = await world.announce(lane, Batch(failures=[Failure(rows[0].id, 1, "no", 0.0)]), settle=False)
        await self.due(world, lane)
        assert await world.store.ready([ROUTE.id]) == {lane.name}

    async def test_ready_says_nothing_about_rows_behind_one_that_waits(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a")
        failures = [Failure(rows[0].id, 1, "no", 600.0), Failure(rows[1].id, 0, None, -1.0)]
        lane = await world.announce(lane, Batch(failures=failures), settle=False)
        assert (await world.store.poll(lane, limit=10)).redo == ()
        assert await world.store.ready([ROUTE.id]) == frozenset()

    async def test_ready_names_lanes_with_requests_that_can_be_carried_out(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        lane = await world.announce(lane, Batch(items=[row.id for row in rows]), settle=False)
        lane = await world.store.settle(await world.store.amend(lane, [Failure(rows[0].id, 5, "no", None)]))
        assert await world.store.ready([ROUTE.id]) == frozenset()
        await world.request(rows[0].id, "redrive")
        assert await world.store.ready([ROUTE.id]) == {lane.name}

    async def test_ready_leaves_out_paused_lanes_and_those_of_other_relays(self, world: World) -> None:
        await world.register(ROUTE)
        lane = await self.lane(world)
        await world.append([delivery()])
        assert await world.store.ready([ROUTE.id], relay="r1") == {lane.name}
        assert await world.store.ready([ROUTE.id], relay="r2") == frozenset()
        await world.pause_lane(lane.name)
        assert await world.store.ready([ROUTE.id]) == frozenset()

    # -- polls ---------------------------------------------------------------------------------------------------------

    async def test_poll_changes_nothing_and_respects_the_limit(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery(f"k{index}") for index in range(5)])
        lane = await self.lane(world)
        first = await world.store.poll(lane, limit=3)
        assert len(first.fresh) == 3
        assert (await world.store.poll(lane, limit=3)).fresh == first.fresh

    async def test_poll_sees_its_own_lane_only(self, world: World) -> None:
        await world.register(ROUTE, SKIPPING)
        await world.append([delivery(shard=1), delivery(route=SKIPPING)])
        assert (await world.store.poll(await self.lane(world), limit=10)).fresh == ()

    async def test_rows_of_paused_tenants_are_passed_over(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery(tenant="loud"), delivery(tenant="calm"), delivery(tenant=None)])
        lane = await self.lane(world)
        page = await world.store.poll(lane, limit=10, paused=["loud"])
        if page.held:  # where they cannot be left out, they need a detour
            assert page.held == {"loud"}
            assert not page.fresh
            page = await world.store.poll(await world.store.part(lane, page.held), limit=10, paused=["loud"])
        assert [row.tenant for row in page.fresh] == ["calm", None]

    async def test_h61_a_page_goes_no_further_than_its_bytes(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery(f"k{size}", body=b"x" * size) for size in (60, 40, 1, 500, 3)])
        lane = await self.lane(world)
        sizes = [len(row.body) for row in (await world.store.poll(lane, limit=10, max_bytes=100)).fresh]
        assert sizes == [60, 40]
        assert len((await world.store.poll(lane, limit=10, max_bytes=10)).fresh) == 1
        assert len((await world.store.poll(lane, limit=10, max_bytes=1000)).fresh) == 5

    async def test_h61_a_page_that_was_cut_has_reached_a_limit(self, world: World) -> None:
        """However large the next row is, a poll must show that there is one."""
        await world.register(ROUTE)
        sizes = [1, 2, 500, 3]
        await world.append([delivery(f"k{size}", body=b"x" * size) for size in sizes])
        lane = await self.lane(world)
        for max_bytes, expected in ((1, 1), (3, 2), (4, 3), (503, 3), (504, 4), (1000, 4)):
            page = await world.store.poll(lane, limit=10, max_bytes=max_bytes)
            assert [len(row.body) for row in page.fresh] == sizes[:expected], max_bytes

    async def test_h61_rows_to_redo_go_no_further_than_their_bytes_either(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery("a", body=b"x" * 60), delivery("b", body=b"x"), delivery("a", body=b"x" * 50)])
        lane = await self.lane(world)
        one, other, two = (await world.store.poll(lane, limit=10)).fresh
        failures = [Failure(one.id, 1, "no", 0.0), Failure(other.id, 1, "no", 0.0)]
        lane = await world.announce(lane, Batch(failures=failures, parked=[two.id]), settle=False)
        assert len(await self.due(world, lane)) == 3
        for max_bytes, expected in ((10, [one]), (61, [one, other]), (62, [one, other, two])):
            page = await world.store.poll(lane, limit=10, max_bytes=max_bytes)
            assert [row.id for row in page.redo] == [row.id for row in expected]

    async def test_fresh_rows_and_rows_to_redo_have_limits_of_their_own(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "c", "d", "e")
        failures = [Failure(row.id, 1, "no", 0.0) for row in rows[:3]]
        lane = await world.announce(lane, Batch(failures=failures), settle=False)
        await self.due(world, lane, 3)
        page = await world.store.poll(lane, limit=2)
        assert (len(page.redo), len(page.fresh)) == (2, 2)

    async def test_waiting_rows_of_paused_tenants_are_not_redone(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery("a", tenant="loud"), delivery("a", tenant="calm"), delivery("a", tenant=None)])
        lane = await self.lane(world)
        rows = (await world.store.poll(lane, limit=10)).fresh
        failures = [Failure(row.id, 1, "no", 0.0) for row in rows]
        lane = await world.announce(lane, Batch(failures=failures), settle=False)
        await self.due(world, lane, 3)
        page = await world.store.poll(lane, limit=10, paused=["loud", "other"])
        assert [row.tenant for row in page.redo] == ["calm", None]

    # -- batches -------------------------------------------------------------------------------------------------------

    async def test_an_announced_batch_is_rebuilt_exactly_by_a_successor(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "c", lease=0.05)
        order = [rows[2].id, rows[0].id, rows[1].id]
        announced = await world.announce(lane, Batch(items=order, details={"grouping": "key"}), settle=False)
        successor = await self.lane(world, "r2")
        assert successor.announced == announced.announced
        assert [(number, row.id) for number, row in await world.store.rebuild(successor)] == list(
            enumerate(order, start=1)
        )

    async def test_numbers_rise_over_batches_and_are_never_given_twice(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "c")
        lane = await world.announce(lane, Batch(items=[rows[0].id, rows[1].id]), settle=False)
        lane = await world.store.amend(lane, [Failure(rows[1].id, 1, "rejected", 60.0)])
        lane = await world.announce(lane, Batch(items=[rows[2].id]), settle=True)
        assert [number for number, _ in await world.store.rebuild(lane)] == [3]

    async def test_announced_rows_are_not_polled_and_settled_ones_are_sent(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        assert [row.id for row in (await world.store.poll(lane, limit=10)).fresh] == [rows[1].id]
        lane = await world.store.settle(lane)
        assert lane.announced is None
        assert [await world.status(row.id) for row in rows] == [Status.SENT, Status.PENDING]

    async def test_one_write_settles_a_batch_and_announces_the_next(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        lane = await world.announce(lane, Batch(items=[rows[1].id]), settle=True)
        assert [await world.status(row.id) for row in rows] == [Status.SENT, Status.SENDING]

    async def test_announcing_over_an_unsettled_batch_is_refused(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        with pytest.raises(StoreError):
            await world.announce(lane, Batch(items=[rows[0].id]), settle=True)
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        with pytest.raises(StoreError):
            await world.announce(lane, Batch(items=[rows[1].id]), settle=False)

    async def test_an_announcement_is_all_or_nothing(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        unknown = Failure(rows[1].id + 1, 1, "no", 0.0)
        with pytest.raises(StoreError):
            await world.announce(lane, Batch(items=[rows[0].id], failures=[unknown]), settle=False)
        assert await world.status(rows[0].id) is Status.PENDING
        assert (await world.announce(lane, Batch(items=[rows[0].id]), settle=False)).batch == lane.batch + 1

    async def test_a_row_that_was_sent_cannot_fail_any_more(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        lane = await world.store.settle(lane)
        with pytest.raises(StoreError):
            await world.announce(lane, Batch(failures=[Failure(rows[0].id, 1, "too late", 0.0)]), settle=False)
        assert await world.status(rows[0].id) is Status.SENT

    async def test_h103_a_batch_that_was_tampered_with_is_not_rebuilt(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        lane = await world.announce(lane, Batch(items=[row.id for row in rows]), settle=False)
        await world.tamper(rows[0].id)
        with pytest.raises(BatchMismatchError):
            await world.store.rebuild(lane)

    # -- failures ------------------------------------------------------------------------------------------------------

    async def test_h99_an_amended_row_is_retried_and_the_rest_of_the_batch_settles(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "a")
        lane = await world.announce(lane, Batch(items=[row.id for row in rows]), settle=False)
        lane = await world.store.amend(lane, [Failure(rows[0].id, 1, "no such topic", 60.0)], parked=[rows[2].id])
        assert lane.waiting == {Key("acme", "a")}
        assert [row.id for _, row in await world.store.rebuild(lane)] == [rows[1].id]
        await world.store.settle(lane)
        assert [await world.status(row.id) for row in rows] == [Status.RETRYING, Status.SENT, Status.PARKED]

    async def test_a_failed_row_is_redone_when_it_is_due_with_those_parked_behind_it(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", "b")
        lane = await world.announce(
            lane, Batch(failures=[Failure(rows[0].id, 1, "no", 0.0)], parked=[rows[1].id]), settle=False
        )
        page = await self.due(world, lane)
        assert [(row.id, row.attempts) for row in page] == [(rows[0].id, 1), (rows[1].id, 0)]
        lane = await world.announce(lane, Batch(items=[row.id for row in page]), settle=False)
        assert (await world.store.settle(lane)).waiting == frozenset()

    async def test_a_row_that_is_not_due_holds_its_key_and_no_other(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "a")
        failures = [Failure(rows[0].id, 1, "no", 600.0), Failure(rows[1].id, 1, "no", 0.0)]
        lane = await world.announce(lane, Batch(failures=failures, parked=[rows[2].id]), settle=False)
        assert [row.id for row in await self.due(world, lane)] == [rows[1].id]

    async def test_parked_rows_that_are_left_behind_become_due(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", "a")
        lane = await world.announce(
            lane, Batch(failures=[Failure(rows[0].id, 1, "no", 0.0)], parked=[rows[1].id, rows[2].id]), settle=False
        )
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        lane = await world.store.settle(lane)
        assert lane.waiting == {Key("acme", "a")}
        assert [row.id for row in await self.due(world, lane)] == [rows[1].id, rows[2].id]

    async def test_a_dead_row_holds_its_key_until_a_person_comes(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", "b")
        lane = await world.announce(
            lane, Batch(failures=[Failure(rows[0].id, 5, "no", None)], parked=[rows[1].id]), settle=False
        )
        assert await world.status(rows[0].id) is Status.FAILED
        assert lane.waiting == {Key("acme", "a")}
        assert (await world.store.poll(lane, limit=10)).redo == ()

    async def test_a_dead_row_of_a_skipping_route_lets_its_key_go_on(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", route=SKIPPING)
        lane = await world.announce(
            lane, Batch(failures=[Failure(rows[0].id, 5, "no", None)], parked=[rows[1].id]), settle=False
        )
        assert [row.id for row in await self.due(world, lane)] == [rows[1].id]

    async def test_what_waits_behind_dead_rows_goes_on_when_the_route_is_told_to_skip_them(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", "a", "b", "b")
        dead = [Failure(rows[0].id, 5, "no", None), Failure(rows[3].id, 5, "no", None)]
        parked = [rows[1].id, rows[2].id, rows[4].id]
        lane = await world.announce(lane, Batch(failures=dead, parked=parked), settle=False)
        await world.store.release("r1", [lane])
        await world.register(replace(ROUTE, on_failure=FailurePolicy.SKIP))
        lane = await self.lane(world)
        assert lane.waiting == {Key("acme", "a"), Key("acme", "b")}
        assert [row.id for row in await self.due(world, lane)] == parked
        lane = await world.announce(lane, Batch(items=parked), settle=False)
        assert (await world.store.settle(lane)).waiting == frozenset()

    async def test_the_same_key_of_two_tenants_is_two_keys(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery("a", tenant="one"), delivery("a", tenant="two")])
        lane = await self.lane(world)
        one, two = (await world.store.poll(lane, limit=10)).fresh
        lane = await world.announce(lane, Batch(failures=[Failure(one.id, 1, "no", 600.0)]), settle=False)
        assert lane.waiting == {Key("one", "a")}
        assert await world.status(two.id) is Status.PENDING

    async def test_a_dead_row_of_one_tenant_does_not_hold_up_the_same_key_of_another(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([*(delivery("a", tenant="one") for _ in range(12)), delivery("a", tenant="two")])
        lane = await self.lane(world)
        *one, two = (await world.store.poll(lane, limit=100)).fresh
        failures = [Failure(one[0].id, 5, "no", None), Failure(two.id, 1, "no", 0.0)]
        lane = await world.announce(lane, Batch(failures=failures, parked=[row.id for row in one[1:]]), settle=False)
        assert [row.id for row in await self.due(world, lane)] == [two.id]

    async def test_a_successor_knows_which_keys_wait(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", lease=0.05)
        await world.announce(lane, Batch(failures=[Failure(rows[0].id, 1, "no", 600.0)]), settle=False)
        assert (await self.lane(world, "r2")).waiting == {Key("acme", "a")}

    async def test_a_dead_row_can_get_its_attempts_back(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        lane = await world.announce(lane, Batch(failures=[Failure(rows[0].id, 5, "no", None)]), settle=False)
        lane = await world.announce(lane, Batch(failures=[Failure(rows[0].id, 2, None, 0.0)]), settle=False)
        assert [(row.id, row.attempts) for row in await self.due(world, lane)] == [(rows[0].id, 2)]

    async def test_h112_who_gets_attempts_back_does_not_depend_on_rows_that_were_dealt_with(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "c")
        failures = [Failure(row.id, 1, "no", 0.0) for row in rows]
        lane = await world.announce(lane, Batch(failures=failures), settle=False)
        asked = await world.request(rows[0].id, "discard")
        lane = await world.announce(lane, Batch(items=[rows[1].id], requests=[asked]), settle=False)
        back = [Failure(row.id, 0, None, 0.0) for row in rows]
        lane = await world.announce(await world.store.settle(lane), Batch(failures=back), settle=False)
        assert [await world.status(row.id) for row in rows] == [Status.DISCARDED, Status.SENT, Status.RETRYING]
        assert [(row.id, row.attempts) for row in await self.due(world, lane)] == [(rows[2].id, 0)]

    async def test_attempts_are_counted_for_rows_that_stay_in_the_batch(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", lease=0.05)
        lane = await world.announce(lane, Batch(items=[row.id for row in rows]), settle=False)
        lane = await world.store.amend(lane, (), attempts={rows[1].id: 3})
        assert [(row.id, row.attempts) for _, row in await world.store.rebuild(lane)] == [
            (rows[0].id, 0),
            (rows[1].id, 3),
        ]
        successor = await self.lane(world, "r2")
        assert successor.announced == lane.announced
        with pytest.raises(LeaseLostError):
            await world.store.amend(lane, (), attempts={rows[1].id: 4})
        await world.store.settle(successor)
        assert [await world.status(row.id) for row in rows] == [Status.SENT, Status.SENT]

    async def test_attempts_of_a_row_outside_the_batch_are_refused(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        with pytest.raises(StoreError):
            await world.store.amend(lane, (), attempts={rows[1].id: 1})

    async def test_an_amendment_of_nothing_tells_whose_lane_it_is(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", lease=0.05)
        assert await world.store.amend(lane, ()) == lane
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        assert await world.store.amend(lane, ()) == lane
        await self.lane(world, "r2")
        with pytest.raises(LeaseLostError):
            await world.store.amend(lane, ())

    async def test_without_a_batch_there_is_nothing_to_amend(self, world: World) -> None:
        rows, lane = await self.filled(world, "a")
        with pytest.raises(StoreError):
            await world.store.amend(lane, [Failure(rows[0].id, 1, "no", 1.0)])

    async def test_a_row_that_comes_back_from_the_batch_is_before_those_that_were_parked_behind_it(
        self, world: World
    ) -> None:
        rows, lane = await self.filled(world, "a", "a", "a")
        parked = Batch(failures=[Failure(rows[0].id, 1, "no", 0.0)], parked=[rows[1].id, rows[2].id])
        lane = await world.announce(lane, parked, settle=False)
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        lane = await world.store.amend(lane, [Failure(rows[0].id, 2, "no", 600.0)])
        assert (await world.store.poll(lane, limit=10)).redo == ()

    async def test_keys_stay_in_order_however_their_rows_fail(self, world: World) -> None:
        keys = [f"k{index % 12}" for index in range(60)]
        rows, lane = await self.filled(world, *keys)
        failing = {rows[index].id: 2 for index in (0, 3, 7, 13, 14, 25, 50)}
        sent: list[Row] = []
        async with asyncio.timeout(60):
            while len(sent) < len(rows):
                page = await world.store.poll(lane, limit=4)
                lane = await self.send(world, lane, page, failing, sent)
        assert {key: [row.id for row in sent if row.key == key] for key in keys} == {
            key: [row.id for row in rows if row.key == key] for key in keys
        }
        assert (await world.store.settle(lane)).waiting == frozenset()

    # -- requests of operators -----------------------------------------------------------------------------------------

    async def test_a_dead_row_is_redriven_with_those_that_waited_for_it(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", "b")
        dead = Batch(failures=[Failure(rows[0].id, 5, "no", None)], parked=[rows[1].id])
        lane = await world.announce(lane, dead, settle=False)
        asked = await world.request(rows[0].id, "redrive")
        page = await world.store.poll(lane, limit=10)
        assert (page.requests, page.redo) == ((asked,), ())
        lane = await world.announce(lane, Batch(requests=page.requests), settle=False)
        assert [(row.id, row.attempts) for row in await self.due(world, lane)] == [(rows[0].id, 0), (rows[1].id, 0)]
        assert (await world.store.poll(lane, limit=10)).requests == ()

    async def test_a_request_is_carried_out_together_with_a_batch_and_the_settling_of_another(
        self, world: World
    ) -> None:
        rows, lane = await self.filled(world, "a", "b", "c")
        lane = await world.announce(
            lane, Batch(items=[rows[1].id], failures=[Failure(rows[0].id, 5, "no", None)]), settle=False
        )
        asked = await world.request(rows[0].id, "redrive")
        lane = await world.announce(lane, Batch(items=[rows[2].id], requests=[asked]), settle=True)
        assert [await world.status(row.id) for row in rows] == [Status.RETRYING, Status.SENT, Status.SENDING]

    async def test_later_rows_go_behind_a_redriven_row_of_a_skipping_route(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", route=SKIPPING)
        lane = await world.announce(lane, Batch(failures=[Failure(rows[0].id, 5, "no", None)]), settle=False)
        assert lane.waiting == frozenset()
        asked = await world.request(rows[0].id, "redrive")
        lane = await world.announce(lane, Batch(requests=[asked]), settle=False)
        assert lane.waiting == {Key("acme", "a")}
        lane = await world.announce(lane, Batch(parked=[rows[1].id]), settle=False)
        assert [row.id for row in await self.due(world, lane)] == [rows[0].id, rows[1].id]

    async def test_a_redriven_row_of_a_skipping_route_goes_before_one_that_waits_already(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", route=SKIPPING)
        failures = [Failure(rows[0].id, 5, "no", None), Failure(rows[1].id, 1, "no", 0.0)]
        lane = await world.announce(lane, Batch(failures=failures), settle=False)
        assert [row.id for row in await self.due(world, lane)] == [rows[1].id]
        asked = await world.request(rows[0].id, "redrive")
        lane = await world.announce(lane, Batch(requests=[asked]), settle=False)
        assert [row.id for row in await self.due(world, lane, 2)] == [rows[0].id, rows[1].id]

    async def test_a_row_on_its_way_is_not_sent_again_behind_one_that_is_redriven(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", "a", route=SKIPPING)
        failures = [Failure(rows[0].id, 5, "no", None), Failure(rows[1].id, 1, "no", 0.0)]
        lane = await world.announce(lane, Batch(failures=failures, parked=[rows[2].id]), settle=False)
        asked = await world.request(rows[0].id, "redrive")
        lane = await world.announce(lane, Batch(items=[rows[1].id], requests=[asked]), settle=False)
        found = [row.id for row in await self.due(world, lane, 2)]
        assert found == [rows[0].id, rows[2].id]
        lane = await world.announce(lane, Batch(items=found), settle=True)
        assert [row.id for _, row in await world.store.rebuild(lane)] == found

    async def test_a_parked_row_keeps_its_turn_when_it_is_redriven(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a")
        dead = Batch(failures=[Failure(rows[0].id, 5, "no", None)], parked=[rows[1].id])
        lane = await world.announce(lane, dead, settle=False)
        asked = await world.request(rows[1].id, "redrive")
        lane = await world.announce(lane, Batch(requests=[asked]), settle=False)
        assert await world.status(rows[1].id) is Status.PARKED
        assert (await world.store.poll(lane, limit=10)).requests == ()

    async def test_a_discarded_row_is_never_sent_and_its_key_goes_on(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", "a", "b")
        dead = Batch(failures=[Failure(rows[0].id, 5, "no", None)], parked=[rows[1].id, rows[2].id])
        lane = await world.announce(lane, dead, settle=False)
        asked = [await world.request(rows[index].id, "discard") for index in (0, 1, 3)]
        lane = await world.announce(lane, Batch(requests=asked), settle=False)
        assert [await world.status(rows[index].id) for index in (0, 1, 3)] == [Status.DISCARDED] * 3
        assert [row.id for row in await self.due(world, lane)] == [rows[2].id]
        assert (await world.store.poll(lane, limit=10)).fresh == ()

    async def test_h103_a_batch_that_goes_past_a_discarded_row_is_rebuilt_exactly(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "c", "d")
        asked = await world.request(rows[1].id, "discard")
        lane = await world.announce(lane, Batch(items=[rows[0].id], requests=[asked]), settle=False)
        lane = await world.announce(lane, Batch(items=[rows[2].id]), settle=True)
        assert [row.id for _, row in await world.store.rebuild(lane)] == [rows[2].id]
        lane = await world.announce(lane, Batch(items=[rows[3].id]), settle=True)
        assert [row.id for _, row in await world.store.rebuild(lane)] == [rows[3].id]
        await world.store.settle(lane)
        statuses = [await world.status(row.id) for row in rows]
        assert statuses == [Status.SENT, Status.DISCARDED, Status.SENT, Status.SENT]

    async def test_the_last_waiting_row_of_a_key_can_be_discarded(self, world: World) -> None:
        rows, lane = await self.filled(world, "a")
        lane = await world.announce(lane, Batch(failures=[Failure(rows[0].id, 5, "no", None)]), settle=False)
        asked = await world.request(rows[0].id, "discard")
        lane = await world.announce(lane, Batch(requests=[asked]), settle=False)
        assert lane.waiting == frozenset()

    async def test_an_edited_row_goes_out_as_another_event_with_a_link_to_the_old_one(self, world: World) -> None:
        rows, lane = await self.filled(world, "a")
        lane = await world.announce(lane, Batch(failures=[Failure(rows[0].id, 5, "no", None)]), settle=False)
        new = uuid4()
        asked = await world.request(rows[0].id, "edit", body=b"\xffbetter", event_id=new)
        again = await world.request(rows[0].id, "edit", body=b"\xffbetter", event_id=new)
        lane = await world.announce(lane, Batch(requests=[asked, again]), settle=False)
        [row] = await self.due(world, lane)
        assert (row.id, row.event_id, row.body, row.attempts) == (rows[0].id, new, b"\xffbetter", 0)
        links = {"event_id": str(new), "original_event_id": str(rows[0].event_id)}
        assert dict(row.headers) == {**rows[0].headers, **links}

    async def test_h103_a_row_on_its_way_is_not_changed_by_requests(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        asked = await world.request(rows[0].id, "discard")
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        assert (await world.store.poll(lane, limit=10)).requests == ()
        lane = await world.announce(
            await world.store.settle(lane), Batch(items=[rows[1].id], requests=[asked]), settle=False
        )
        assert await world.status(rows[0].id) is Status.SENT

    async def test_h103_a_request_about_a_row_that_is_announced_with_it_waits(self, world: World) -> None:
        rows, lane = await self.filled(world, "a")
        asked = await world.request(rows[0].id, "discard")
        lane = await world.announce(lane, Batch(items=[rows[0].id], requests=[asked]), settle=False)
        assert [row.id for _, row in await world.store.rebuild(lane)] == [rows[0].id]
        lane = await world.store.settle(await world.store.amend(lane, [Failure(rows[0].id, 1, "no", 600.0)]))
        assert (await world.store.poll(lane, limit=10)).requests == (asked,)

    async def test_h120_requests_about_rows_on_their_way_are_known(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "c")
        lane = await world.announce(lane, Batch(items=[row.id for row in rows]), settle=False)
        await world.request(rows[1].id, "discard")
        await world.request(rows[1].id, "redrive")
        assert await world.store.asked(lane, [row.id for row in rows]) == {rows[1].id}
        assert await world.store.asked(lane, [rows[0].id]) == frozenset()

    async def test_a_request_about_a_row_that_was_sent_does_nothing_and_is_gone(self, world: World) -> None:
        rows, lane = await self.filled(world, "a")
        lane = await world.announce(lane, Batch(items=[rows[0].id]), settle=False)
        lane = await world.store.settle(lane)
        edit = await world.request(rows[0].id, "edit", body=b"late", event_id=uuid4())
        asked = [await world.request(rows[0].id, "redrive"), await world.request(rows[0].id, "discard"), edit]
        lane = await world.announce(lane, Batch(requests=asked), settle=False)
        assert await world.status(rows[0].id) is Status.SENT
        assert (await world.store.poll(lane, limit=10)).requests == ()
        assert lane.waiting == frozenset()

    async def test_requests_are_carried_out_in_the_order_in_which_they_were_made(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        failures = [Failure(row.id, 5, "no", None) for row in rows]
        lane = await world.announce(lane, Batch(failures=failures), settle=False)
        asked = [
            await world.request(row, action)
            for row, action in (
                (rows[0].id, "redrive"),
                (rows[0].id, "discard"),
                (rows[1].id, "discard"),
                (rows[1].id, "redrive"),
            )
        ]
        await world.announce(lane, Batch(requests=asked), settle=False)
        assert [await world.status(row.id) for row in rows] == [Status.DISCARDED, Status.DISCARDED]

    async def test_h32_only_the_owner_carries_out_requests(self, world: World) -> None:
        rows, old = await self.filled(world, "a", lease=0.05)
        old = await world.announce(old, Batch(failures=[Failure(rows[0].id, 5, "no", None)]), settle=False)
        asked = await world.request(rows[0].id, "redrive")
        new = await self.lane(world, "r2")
        with pytest.raises(LeaseLostError):
            await world.announce(old, Batch(requests=[asked]), settle=False)
        assert await world.status(rows[0].id) is Status.FAILED
        assert (await world.store.poll(new, limit=10)).requests == (asked,)

    async def test_requests_about_another_lane_are_left_to_its_owner(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery(shard=1)])
        lanes = await world.store.take("r1", lease=LEASE, wanted={ROUTE.id: 2})
        [row] = (await world.store.poll(lanes[1], limit=10)).fresh
        asked = await world.request(row.id, "discard")
        assert (await world.store.poll(lanes[0], limit=10)).requests == ()
        await world.announce(lanes[0], Batch(requests=[asked]), settle=False)
        assert (await world.store.poll(lanes[1], limit=10)).requests == (asked,)

    # -- helpers -------------------------------------------------------------------------------------------------------

    async def lane(self, world: World, relay: str = "r1", *, route: RouteRecord = ROUTE, lease: float = LEASE) -> Lane:
        """Shard 0 of the route, as soon as it is free."""
        held: list[Lane] = []
        deadline = clock.current().monotonic() + 10
        while clock.current().monotonic() < deadline:
            held += await world.store.take(relay, lease=lease, wanted={route.id: 1000})
            for lane in held:
                if lane.route.id == route.id and lane.shard == 0:
                    return lane
        raise AssertionError("the lane was not given out")

    async def filled(
        self, world: World, *keys: str, route: RouteRecord = ROUTE, lease: float = LEASE
    ) -> tuple[tuple[Row, ...], Lane]:
        """Rows with these keys, and their lane."""
        await world.register(route)
        await world.append([delivery(key, route=route) for key in keys])
        lane = await self.lane(world, route=route, lease=lease)
        return (await world.store.poll(lane, limit=1000)).fresh, lane

    async def send(self, world: World, lane: Lane, page: Page, failing: dict[int, int], sent: list[Row]) -> Lane:
        """One turn of a relay: failing rows are amended away, and their keys wait."""
        stopped = set(lane.waiting)
        items = [*page.redo, *(row for row in page.fresh if row.order_key not in stopped)]
        parked = [row.id for row in page.fresh if row.order_key in stopped]
        batch = Batch(items=[row.id for row in items], parked=parked)
        lane = await world.announce(lane, batch, settle=lane.announced is not None)
        failures, behind, failed = [], [], set()
        for row in items:
            if row.order_key in failed:
                behind.append(row.id)
            elif failing.get(row.id):
                failing[row.id] -= 1
                failed.add(row.order_key)
                failures.append(Failure(row.id, row.attempts + 1, "no", 0.0))
            else:
                sent.append(row)
        return await world.store.amend(lane, failures, parked=behind)

    async def due(self, world: World, lane: Lane, count: int = 1) -> tuple[Row, ...]:
        """The rows to redo, once there are this many."""
        async with asyncio.timeout(10):
            while len(page := (await world.store.poll(lane, limit=10)).redo) < count:
                pass
        return page

    async def until_nothing_is_leased(self, world: World) -> None:
        """Wait until all leases have expired."""
        async with asyncio.timeout(10):
            while (await world.store.census()).next_expiry is not None:
                pass
