"""What every `OutboxStore` must do, one test per promise.

Bind it by a subclass with a ``world`` fixture::

    class TestMyStore(OutboxStoreContract):
        @pytest.fixture
        def world(self) -> World: ...
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from msgspec.structs import replace

from ... import clock
from ...errors import BatchMismatchError, DuplicateEventError, LeaseLostError, StoreError
from ...outbox import Batch, Delivery, Failure, FailurePolicy, Key, Lane, OutboxStore, RouteRecord, Row, Status

ROUTE = RouteRecord("broker:orders", "broker", "orders")
SKIPPING = RouteRecord("broker:audit", "broker", "audit", on_failure=FailurePolicy.SKIP)
LEASE = 30.0


class World(ABC):
    """A store and the means to fill it and to look into it."""

    store: OutboxStore

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


def delivery(
    key: str = "k", *, route: RouteRecord = ROUTE, tenant: str | None = "acme", body: bytes = b"{}", shard: int = 0
) -> Delivery:
    """A delivery with everything in it that a store might spoil."""
    event_id = uuid4()
    headers = {
        "event_id": str(event_id),
        "event_type": "orders.order.placed",
        "occurred_at": str(datetime.now(UTC)),
        "user_id": 'Ä✓ \\ "',
    }
    return Delivery(event_id, "orders.order.placed", route.id, shard, 1, "orders", key, tenant, headers, body)


class OutboxStoreContract:
    """The promises of `OutboxStore` and `Appends`."""

    # -- writing -------------------------------------------------------------------------------------------------------

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
        lanes = await world.store.take("r1", lease=LEASE, limit=1000, destinations=["broker"])
        assert [lane.shard for lane in lanes] == list(range(shards))
        assert {lane.route.on_failure for lane in lanes} == {FailurePolicy.SKIP}

    # -- leases --------------------------------------------------------------------------------------------------------

    async def test_take_gives_a_lane_to_one_relay_only(self, world: World) -> None:
        shards = await world.register(ROUTE)
        takers = [world.store.take(f"r{index}", lease=LEASE, limit=3, destinations=["broker"]) for index in range(4)]
        taken = [lane.shard for lanes in await asyncio.gather(*takers) for lane in lanes]
        assert len(taken) == len(set(taken)) <= shards

    async def test_take_serves_only_the_destinations_that_were_asked_for(self, world: World) -> None:
        await world.register(ROUTE)
        assert await world.store.take("r1", lease=LEASE, limit=100, destinations=["other"]) == []

    async def test_take_respects_the_limit(self, world: World) -> None:
        await world.register(ROUTE)
        assert len(await world.store.take("r1", lease=LEASE, limit=2, destinations=["broker"])) == 2

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
        old = await world.store.announce(old, Batch(items=[first.id]), settle=False)
        new = await self.lane(world, "r2")
        for step in (
            world.store.settle(old),
            world.store.announce(old, Batch(items=[second.id]), settle=True),
            world.store.amend(old, [Failure(first.id, 1, "no", 1.0)]),
        ):
            with pytest.raises(LeaseLostError):
                await step
        assert await world.status(first.id) is Status.SENDING
        assert await world.status(second.id) is Status.PENDING
        assert [row.id for _, row in await world.store.rebuild(new)] == [first.id]

    async def test_a_stale_batch_number_is_fenced_too(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery("a"), delivery("b")])
        stale = await self.lane(world)
        first, second = (await world.store.poll(stale, limit=10)).fresh
        await world.store.announce(stale, Batch(items=[first.id]), settle=False)
        with pytest.raises(LeaseLostError):
            await world.store.announce(stale, Batch(items=[second.id]), settle=False)
        assert await world.status(second.id) is Status.PENDING

    async def test_tries_rise_when_an_owner_was_lost_with_an_open_batch(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery()])
        lane = await self.lane(world, lease=0.05)
        assert lane.tries == 0
        [row] = (await world.store.poll(lane, limit=10)).fresh
        await world.store.announce(lane, Batch(items=[row.id]), settle=False)
        second = await self.lane(world, "r2", lease=0.05)
        third = await self.lane(world, "r3")
        assert (second.tries, third.tries) == (1, 2)
        assert (await world.store.settle(third)).tries == 0

    # -- polling -------------------------------------------------------------------------------------------------------

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
        page = await world.store.poll(await self.lane(world), limit=10, paused=["loud"])
        assert [row.tenant for row in page.fresh] == ["calm", None]

    # -- batches -------------------------------------------------------------------------------------------------------

    async def test_an_announced_batch_is_rebuilt_exactly_by_a_successor(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "c", lease=0.05)
        order = [rows[2].id, rows[0].id, rows[1].id]
        announced = await world.store.announce(lane, Batch(items=order, details={"grouping": "key"}), settle=False)
        successor = await self.lane(world, "r2")
        assert successor.announced == announced.announced
        assert [(number, row.id) for number, row in await world.store.rebuild(successor)] == list(
            enumerate(order, start=1)
        )

    async def test_numbers_rise_over_batches_and_are_never_given_twice(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "c")
        lane = await world.store.announce(lane, Batch(items=[rows[0].id, rows[1].id]), settle=False)
        lane = await world.store.amend(lane, [Failure(rows[1].id, 1, "rejected", 60.0)])
        lane = await world.store.announce(lane, Batch(items=[rows[2].id]), settle=True)
        assert [number for number, _ in await world.store.rebuild(lane)] == [3]

    async def test_announced_rows_are_not_polled_and_settled_ones_are_sent(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        lane = await world.store.announce(lane, Batch(items=[rows[0].id]), settle=False)
        assert [row.id for row in (await world.store.poll(lane, limit=10)).fresh] == [rows[1].id]
        lane = await world.store.settle(lane)
        assert lane.announced is None
        assert [await world.status(row.id) for row in rows] == [Status.SENT, Status.PENDING]

    async def test_one_write_settles_a_batch_and_announces_the_next(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        lane = await world.store.announce(lane, Batch(items=[rows[0].id]), settle=False)
        lane = await world.store.announce(lane, Batch(items=[rows[1].id]), settle=True)
        assert [await world.status(row.id) for row in rows] == [Status.SENT, Status.SENDING]

    async def test_announcing_over_an_unsettled_batch_is_refused(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        with pytest.raises(StoreError):
            await world.store.announce(lane, Batch(items=[rows[0].id]), settle=True)
        lane = await world.store.announce(lane, Batch(items=[rows[0].id]), settle=False)
        with pytest.raises(StoreError):
            await world.store.announce(lane, Batch(items=[rows[1].id]), settle=False)

    async def test_an_announcement_is_all_or_nothing(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        with pytest.raises(StoreError):
            await world.store.announce(lane, Batch(items=[rows[0].id, 10_000]), settle=False)
        assert await world.status(rows[0].id) is Status.PENDING
        assert (await world.store.announce(lane, Batch(items=[rows[0].id]), settle=False)).batch == lane.batch + 1

    async def test_a_row_that_was_sent_cannot_fail_any_more(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        lane = await world.store.announce(lane, Batch(items=[rows[0].id]), settle=False)
        lane = await world.store.settle(lane)
        with pytest.raises(StoreError):
            await world.store.announce(lane, Batch(failures=[Failure(rows[0].id, 1, "too late", 0.0)]), settle=False)
        assert await world.status(rows[0].id) is Status.SENT

    async def test_h103_a_batch_that_was_tampered_with_is_not_rebuilt(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b")
        lane = await world.store.announce(lane, Batch(items=[row.id for row in rows]), settle=False)
        await world.tamper(rows[0].id)
        with pytest.raises(BatchMismatchError):
            await world.store.rebuild(lane)

    # -- failures ------------------------------------------------------------------------------------------------------

    async def test_h99_an_amended_row_is_retried_and_the_rest_of_the_batch_settles(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "a")
        lane = await world.store.announce(lane, Batch(items=[row.id for row in rows]), settle=False)
        lane = await world.store.amend(lane, [Failure(rows[0].id, 1, "no such topic", 60.0)], parked=[rows[2].id])
        assert lane.waiting == {Key("acme", "a")}
        assert [row.id for _, row in await world.store.rebuild(lane)] == [rows[1].id]
        await world.store.settle(lane)
        assert [await world.status(row.id) for row in rows] == [Status.RETRYING, Status.SENT, Status.PARKED]

    async def test_a_failed_row_is_redone_when_it_is_due_with_those_parked_behind_it(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "a")
        lane = await world.store.announce(
            lane, Batch(failures=[Failure(rows[0].id, 1, "no", 0.0)], parked=[rows[2].id]), settle=False
        )
        page = await self.due(world, lane)
        assert [(row.id, row.attempts) for row in page] == [(rows[0].id, 1), (rows[2].id, 0)]
        lane = await world.store.announce(lane, Batch(items=[row.id for row in page]), settle=False)
        assert (await world.store.settle(lane)).waiting == frozenset()

    async def test_a_row_that_is_not_due_holds_its_key_and_no_other(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", "a")
        failures = [Failure(rows[0].id, 1, "no", 600.0), Failure(rows[1].id, 1, "no", 0.0)]
        lane = await world.store.announce(lane, Batch(failures=failures, parked=[rows[2].id]), settle=False)
        assert [row.id for row in await self.due(world, lane)] == [rows[1].id]

    async def test_parked_rows_that_are_left_behind_become_due(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", "a")
        lane = await world.store.announce(
            lane, Batch(failures=[Failure(rows[0].id, 1, "no", 0.0)], parked=[rows[1].id, rows[2].id]), settle=False
        )
        lane = await world.store.announce(lane, Batch(items=[rows[0].id]), settle=False)
        lane = await world.store.settle(lane)
        assert lane.waiting == {Key("acme", "a")}
        assert [row.id for row in await self.due(world, lane)] == [rows[1].id, rows[2].id]

    async def test_a_dead_row_holds_its_key_until_a_person_comes(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", "b")
        lane = await world.store.announce(
            lane, Batch(failures=[Failure(rows[0].id, 5, "no", None)], parked=[rows[1].id]), settle=False
        )
        assert await world.status(rows[0].id) is Status.FAILED
        assert lane.waiting == {Key("acme", "a")}
        assert (await world.store.poll(lane, limit=10)).redo == ()

    async def test_a_dead_row_of_a_skipping_route_lets_its_key_go_on(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "a", route=SKIPPING)
        lane = await world.store.announce(
            lane, Batch(failures=[Failure(rows[0].id, 5, "no", None)], parked=[rows[1].id]), settle=False
        )
        assert [row.id for row in await self.due(world, lane)] == [rows[1].id]

    async def test_the_same_key_of_two_tenants_is_two_keys(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([delivery("a", tenant="one"), delivery("a", tenant="two")])
        lane = await self.lane(world)
        one, two = (await world.store.poll(lane, limit=10)).fresh
        lane = await world.store.announce(lane, Batch(failures=[Failure(one.id, 1, "no", 600.0)]), settle=False)
        assert lane.waiting == {Key("one", "a")}
        assert await world.status(two.id) is Status.PENDING

    async def test_a_dead_row_of_one_tenant_does_not_hold_up_the_same_key_of_another(self, world: World) -> None:
        await world.register(ROUTE)
        await world.append([*(delivery("a", tenant="one") for _ in range(12)), delivery("a", tenant="two")])
        lane = await self.lane(world)
        *one, two = (await world.store.poll(lane, limit=100)).fresh
        failures = [Failure(one[0].id, 5, "no", None), Failure(two.id, 1, "no", 0.0)]
        lane = await world.store.announce(
            lane, Batch(failures=failures, parked=[row.id for row in one[1:]]), settle=False
        )
        assert [row.id for row in await self.due(world, lane)] == [two.id]

    async def test_a_successor_knows_which_keys_wait(self, world: World) -> None:
        rows, lane = await self.filled(world, "a", "b", lease=0.05)
        await world.store.announce(lane, Batch(failures=[Failure(rows[0].id, 1, "no", 600.0)]), settle=False)
        assert (await self.lane(world, "r2")).waiting == {Key("acme", "a")}

    # -- helpers -------------------------------------------------------------------------------------------------------

    async def lane(self, world: World, relay: str = "r1", *, route: RouteRecord = ROUTE, lease: float = LEASE) -> Lane:
        """Shard 0 of the route, as soon as it can be had."""
        held: list[Lane] = []
        deadline = clock.current().monotonic() + 10
        while clock.current().monotonic() < deadline:
            held += await world.store.take(relay, lease=lease, limit=1000, destinations=["broker"])
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

    async def due(self, world: World, lane: Lane) -> tuple[Row, ...]:
        """What is to be redone, as soon as there is something."""
        deadline = clock.current().monotonic() + 10
        while clock.current().monotonic() < deadline:
            if page := (await world.store.poll(lane, limit=10)).redo:
                return page
        raise AssertionError("nothing became due")
