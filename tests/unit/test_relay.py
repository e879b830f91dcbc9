"""Relays: who serves which lane, what happens when one is added, stops, hangs or dies, and what draining waits for."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from string import ascii_lowercase
from typing import Any

import msgspec
import pytest

from pillarbox import clock
from pillarbox.doorbell import Doorbell
from pillarbox.errors import ConfigurationError
from pillarbox.outbox import LOCAL, Batch, Census, Delivery, LaneName, RouteRecord, Status, shard_of
from pillarbox.relay import Pacing, Relay, fair_share, open_ground
from pillarbox.telemetry import Sample
from pillarbox.transport import Capabilities, Outcome
from tests.memory.store import MemoryStore
from tests.relays import Broker, Line, World, freeze, half, in_virtual_time, running, until

KEYS = " ".join(f"{letter}1" for letter in ascii_lowercase)


def owners(world: World) -> Counter[str]:
    """How many lanes each relay has, by the store."""
    now = clock.current().monotonic()
    held = [lane.locked_by for lane in world.store._lanes.values() if lane.locked_by and lane.locked_until > now]
    return Counter(held)


class TestFairShare:
    @staticmethod
    def census(lanes: int, relays: Collection[str], **shards: Collection[int]) -> Census:
        return Census(
            routes={},
            relays=dict.fromkeys(relays, frozenset({7, 8, 9})),
            shards={name: frozenset(found) for name, found in shards.items()},
            shard_count=lanes,
        )

    @pytest.mark.parametrize("lanes", [0, 1, 2, 5, 16, 17])
    @pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
    def test_h48_the_shares_of_all_relays_are_the_lanes_and_differ_by_one_at_most(self, lanes: int, count: int) -> None:
        names = [f"r{number}" for number in range(count)]
        shares = [fair_share(name, 7, None, self.census(lanes, names)) for name in names]
        assert sum(shares) == lanes
        assert max(shares) - min(shares) <= 1

    def test_the_rest_is_not_always_the_same_relays(self) -> None:
        census = self.census(1, ["r1", "r2", "r3"])
        assert {sum(fair_share(name, route, None, census) for route in (7, 8, 9)) for name in census.relays} == {1}

    def test_who_does_not_serve_the_route_has_no_part_in_it(self) -> None:
        census = Census(routes={}, relays={"r1": frozenset({7}), "r2": frozenset({8})}, shards={}, shard_count=16)
        assert fair_share("r1", 7, None, census) == 16

    def test_a_relay_that_has_not_said_yet_that_it_is_there_counts_itself(self) -> None:
        assert fair_share("new", 7, None, self.census(16, ["old"])) == 8

    def test_relays_that_keep_to_the_same_shards_share_them(self) -> None:
        low, high = frozenset(range(8)), frozenset(range(8, 16))
        census = self.census(16, ["a", "b", "c"], a=low, b=low, c=high)
        shares = [fair_share(name, 7, shards, census) for name, shards in (("a", low), ("b", low), ("c", high))]
        assert shares == [4, 4, 8]

    def test_what_others_keep_to_is_left_to_them_while_they_live(self) -> None:
        census = self.census(16, ["a", "b", "c"], c=[3, 4])
        assert [fair_share(name, 7, None, census) for name in "ab"] == [7, 7]
        assert fair_share("c", 7, frozenset([3, 4]), census) == 2
        assert open_ground(7, None, census) == {*range(16)} - {3, 4}
        elsewhere = msgspec.structs.replace(census, relays={**census.relays, "c": frozenset({8})})
        assert open_ground(7, None, elsewhere) == {*range(16)}

    def test_paused_lanes_are_nobodys(self) -> None:
        census = msgspec.structs.replace(self.census(16, ["a"]), paused=frozenset([LaneName(7, 1), LaneName(8, 2)]))
        assert fair_share("a", 7, None, census) == 15
        assert fair_share("a", 7, frozenset([1, 2]), census) == 1


class TestLeases:
    @in_virtual_time
    async def test_h48_lanes_are_shared_when_relays_come_and_go(self) -> None:
        world = World(shards=16)
        one, two, three = (world.relay(name) for name in ("r1", "r2", "r3"))
        async with running(one):
            await until(lambda: owners(world) == {"r1": 16})
            async with running(two):
                await until(lambda: owners(world) == {"r1": 8, "r2": 8})
                async with running(three):
                    await until(lambda: sorted(owners(world).values()) == [5, 5, 6])
                await until(lambda: owners(world) == {"r1": 8, "r2": 8})
            await until(lambda: owners(world) == {"r1": 16})
        assert owners(world) == {}

    @in_virtual_time
    async def test_h48_the_spread_takes_no_longer_than_two_leases_and_then_nothing_moves(self) -> None:
        world = World(shards=16)
        relays = [world.relay(f"r{number}") for number in range(4)]
        async with running(*relays):
            await asyncio.sleep(6)
            assert owners(world) == {f"r{number}": 4 for number in range(4)}
            epochs = [lane.epoch for lane in world.store._lanes.values()]
            await asyncio.sleep(60)
            assert [lane.epoch for lane in world.store._lanes.values()] == epochs

    @in_virtual_time
    async def test_h48_no_more_lanes_are_let_go_than_are_too_many(self) -> None:
        """The first relay is busy in all its lanes, so they take their time to change hands."""
        world = World(shards=8)
        busy = Broker()
        least = 8

        async def slow(_producer: str, _events: str) -> None:
            await asyncio.sleep(1.7)

        busy.before = slow
        one, two = world.relay("r1", busy), world.relay("r2")
        async with running(one):
            await until(lambda: owners(world) == {"r1": 8})
            for number in range(1, 40):
                world.write(" ".join(f"{letter}{number}" for letter in ascii_lowercase))
            async with running(two):
                for _ in range(200):
                    await asyncio.sleep(0.05)
                    least = min(least, owners(world)["r1"])
                await until(lambda: owners(world) == {"r1": 4, "r2": 4})
        assert least == 4

    @in_virtual_time
    async def test_h45_the_lanes_of_a_relay_that_hangs_are_taken_over_when_its_leases_end(self) -> None:
        world = World(shards=4)
        line = Line(world.store)
        one, two = world.relay("r1", store=line), world.relay("r2")
        async with running(one):
            await until(lambda: owners(world) == {"r1": 4})
            line.cut()
            cut_at = clock.current().monotonic()
            async with running(two):
                await until(lambda: owners(world) == {"r2": 4})
                assert clock.current().monotonic() - cut_at <= 3.0 + 1.0
                line.mend()
                await until(lambda: owners(world) == {"r1": 2, "r2": 2})

    @in_virtual_time
    async def test_h32_a_relay_that_hung_with_answers_in_hand_settles_nothing(self) -> None:
        world = World()
        line = Line(world.store)
        one, two = world.relay("r1", store=line), world.relay("r2")

        async def cut(_producer: str, _events: str) -> None:
            world.broker.before = None
            line.cut()

        async with running(one):
            await until(lambda: owners(world) == {"r1": 1})
            world.broker.before = cut
            world.write("a1 a2")
            await world.received(2)
            async with running(two):
                await world.received(4)  # it cannot know that they arrived
                line.mend()
                world.write("a3")
                assert (await world.received(5)).endswith("a3")
                await until(lambda: world.status("a3") is Status.SENT)
        assert world.sent == "a1 a2 a1 a2 a3"

    @in_virtual_time
    async def test_h31_a_relay_that_was_frozen_beyond_its_lease_sends_nothing_when_it_wakes(self) -> None:
        world = World(capabilities=Capabilities(max_messages=1))
        frozen_at = 0

        async def stand_still(_producer: str, _events: str) -> None:
            nonlocal frozen_at
            world.broker.before = None
            frozen_at = len(world.broker.requests)
            lane = next(iter(world.store._lanes.values()))
            freeze(10.0)
            lane.epoch, lane.locked_by, lane.locked_until = lane.epoch + 1, "r2", clock.current().monotonic() + 5.0

        world.broker.before = stand_still
        relay = world.relay()
        async with running(relay):
            world.write("a1 a2 a3")
            await until(lambda: frozen_at)
            await asyncio.sleep(4)
            assert len(world.broker.requests) == frozen_at
            assert world.statuses(Status.SENT) == ""

    @in_virtual_time
    async def test_h91_a_relay_that_stops_lets_its_lanes_go_at_once(self) -> None:
        world = World(shards=4)
        one, two = world.relay("r1"), world.relay("r2")
        async with running(two):
            async with running(one):
                await until(lambda: owners(world) == {"r1": 2, "r2": 2})
                stopped_at = clock.current().monotonic()
            await until(lambda: owners(world) == {"r2": 4})
            assert clock.current().monotonic() - stopped_at < 1.0
            assert set((await world.store.census()).relays) == {"r2"}

    @in_virtual_time
    async def test_h91_what_is_announced_is_finished_first_so_nothing_is_sent_twice(self) -> None:
        world = World(capabilities=Capabilities(max_messages=1))

        async def slow(_producer: str, _events: str) -> None:
            await asyncio.sleep(1)

        world.broker.before = slow
        lane = await world.take("gone", lease=0.01)
        world.write("a1 a2 a3 a4")
        await world.store.announce(lane, Batch(items=[1, 2, 3]), settle=False)
        relay = world.relay()
        async with running(relay):
            await until(lambda: world.broker.requests)
        assert world.sent == "a1 a2 a3"
        assert (world.statuses(Status.SENT), world.statuses(Status.PENDING)) == ("a1 a2 a3", "a4")

    @in_virtual_time
    async def test_h91_a_destination_that_does_not_answer_is_not_waited_for_longer_than_the_grace(self) -> None:
        world = World()

        async def hang(_producer: str, _events: str) -> None:
            await asyncio.Event().wait()

        world.broker.before = hang
        world.write("a1")
        async with running(world.relay(pacing={"grace": 7.0})):
            await until(lambda: world.broker.requests)
            stopped_at = clock.current().monotonic()
        assert clock.current().monotonic() - stopped_at == pytest.approx(7.0, abs=1.1)
        assert owners(world) == {}
        world.broker.before = None
        await world.relay("r2").drain()
        assert world.sent == "a1"

    @in_virtual_time
    async def test_h91_a_transport_that_cannot_be_closed_does_not_keep_its_lanes(self) -> None:
        world = World(shards=4)

        async def fail(_producer: str | None = None) -> None:
            raise ConnectionResetError("gone")

        world.broker.close = fail  # type: ignore[assignment, method-assign]
        async with running(world.relay()):
            await until(lambda: owners(world) == {"r1": 4})
        assert owners(world) == {}

    @in_virtual_time
    async def test_h91_a_slow_transport_keeps_all_lanes_of_a_relay_that_stops_no_longer_than_one(self) -> None:
        world = World(shards=16)
        world.broker = Leisurely()
        async with running(world.relay()):
            await until(lambda: owners(world) == {"r1": 16})
            stopped_at = clock.current().monotonic()
        assert owners(world) == {}
        assert clock.current().monotonic() - stopped_at < 1.5

    @in_virtual_time
    async def test_h91_a_lane_that_was_being_let_go_when_its_relay_stopped_waits_for_no_lease(self) -> None:
        world = World(shards=2)
        world.broker = slow = Leisurely()
        one, two = world.relay("r1", pacing={"lease": 60.0}), world.relay("r2", pacing={"lease": 60.0})
        task = asyncio.ensure_future(one.run())
        await until(lambda: one.status()["lanes"] == 2)
        async with running(two):
            await until(lambda: one.status()["lanes"] == 1)  # it makes room, and closes the producer
            assert owners(world) == {"r1": 2}
            slow.seconds = 0.0
            one.stop()
            await task
            assert "r1" not in owners(world)
            await until(lambda: owners(world) == {"r2": 2}, seconds=5)

    @in_virtual_time
    async def test_the_feed_ends_with_its_relay_even_if_that_is_cancelled_while_it_leaves(self) -> None:
        world = World()
        world.broker = Leisurely()
        feed = IdleFeed()
        task = asyncio.ensure_future(world.relay(feed=feed).run())
        await until(lambda: owners(world) == {"r1": 1})
        for _ in range(2):
            assert feed.state == "up"
            task.cancel()
            await asyncio.sleep(0.1)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert feed.state == "off"

    @in_virtual_time
    async def test_h48_a_relay_that_comes_is_made_room_for_at_once(self) -> None:
        """Not only when the others look at their leases the next time."""
        world = World(shards=4)
        bell = Doorbell(DeafCarrier())
        one, two = (world.relay(name, bell=bell, pacing={"lease": 60.0}) for name in ("r1", "r2"))
        async with running(one):
            await until(lambda: owners(world) == {"r1": 4})
            came_at = clock.current().monotonic()
            async with running(two):
                await until(lambda: owners(world) == {"r1": 2, "r2": 2})
                assert clock.current().monotonic() - came_at < 1.0

    @in_virtual_time
    async def test_a_relay_that_is_stopped_before_it_ran_does_not_touch_its_store(self) -> None:
        line = Line(World().store)
        line.cut()
        relay = World().relay(store=line)
        task = asyncio.ensure_future(relay.run())
        relay.stop()
        async with asyncio.timeout(5):
            await task

    @in_virtual_time
    async def test_h128_a_stop_after_a_drain_does_not_stop_the_next_run(self) -> None:
        world = World()
        relay = world.relay()
        await relay.drain()
        relay.stop()
        world.write("a1")
        async with running(relay):
            await until(lambda: world.status("a1") is Status.SENT)

    @in_virtual_time
    async def test_a_relay_that_runs_is_not_run_a_second_time(self) -> None:
        world = World()
        relay = world.relay()
        async with running(relay):
            await until(lambda: owners(world) == {"r1": 1})
            with pytest.raises(ConfigurationError, match="relay r1 runs already"):
                await relay.run()
            world.write("a1")
            await until(lambda: world.status("a1") is Status.SENT)

    @in_virtual_time
    async def test_a_relay_can_run_again(self) -> None:
        world = World()
        relay = world.relay()
        for event in ("a1", "a2"):
            world.write(event)
            async with running(relay):
                await until(lambda event=event: world.status(event) is Status.SENT)  # type: ignore[misc]
        assert world.sent == "a1 a2"

    @in_virtual_time
    async def test_h72_leases_are_renewed_every_third_also_with_a_bell_that_works(self) -> None:
        world = World()
        renewed: list[float] = []
        renew = world.store.renew

        async def watched(*args: Any, **kwargs: Any) -> dict[LaneName, bool]:
            renewed.append(clock.current().monotonic())
            return await renew(*args, **kwargs)

        world.store.renew = watched  # type: ignore[method-assign]
        async with running(world.relay(bell=Doorbell(DeafCarrier()))):
            await asyncio.sleep(30)
        assert max(later - earlier for earlier, later in itertools.pairwise(renewed)) <= 1.1

    @in_virtual_time
    async def test_h45_a_dead_relay_is_not_counted_when_lanes_are_shared(self) -> None:
        world = World(shards=4)
        await world.store.renew("dead", [], lease=3.0, serves=[world.route.id])
        async with running(world.relay()):
            await until(lambda: owners(world) == {"r1": 2})
            await until(lambda: owners(world) == {"r1": 4})

    @in_virtual_time
    async def test_h114_it_serves_what_the_table_says_and_only_what_it_can_send_to(self) -> None:
        world = World()
        unknown = RouteRecord("invoices", "another broker", "invoices")
        handler = RouteRecord("handler", LOCAL, "shop.remember")
        world.store.register(None, [unknown, handler])
        async with running(world.relay()):
            await until(lambda: owners(world) == {"r1": 1})
            new = RouteRecord("parcels", "broker", "parcels")
            world.store.register(None, [new])  # a service was deployed
            world.store.append(None, [_delivery(new)])
            await world.broker.received("parcels")
            assert owners(world) == {"r1": 2}
        assert world.store._lanes[LaneName(unknown.id, 0)].epoch == 0
        assert world.store._lanes[LaneName(handler.id, 0)].epoch == 0

    @in_virtual_time
    async def test_r6_a_relay_keeps_to_its_shards(self) -> None:
        world = World(shards=4)
        world.write(KEYS)
        low, high = world.relay("low", shards=[0, 1]), world.relay("high", shards=[2, 3])
        await low.drain()
        assert {lane.epoch for name, lane in world.store._lanes.items() if name.shard > 1} == {0}
        sent = len(world.sent.split())
        assert 0 < sent < 26
        await high.drain()
        assert len(world.sent.split()) == 26


class TestTenants:
    """A relay for some tenants, beside those for everybody."""

    shards = 16
    plans = RouteRecord("plans", "broker", "plans", shard_by="tenant")

    def world(self) -> World:
        world = World(shards=self.shards)
        world.store.register(None, [self.plans])
        return world

    def write(self, world: World, *tenants: str) -> None:
        for tenant in tenants:
            place = {"shard": shard_of(tenant, self.shards), "tenant": tenant, "headers": {"tenant_id": tenant}}
            world.store.append(None, [msgspec.structs.replace(_delivery(self.plans), **place)])

    def owner(self, world: World, tenant: str) -> str | None:
        return world.store._lanes[LaneName(self.plans.id, shard_of(tenant, self.shards))].locked_by

    @in_virtual_time
    async def test_it_keeps_to_their_lanes_and_to_routes_that_are_sharded_by_tenant(self) -> None:
        world = self.world()
        self.write(world, "acme", "globex", "initech")
        world.write(KEYS)
        assert (await world.relay("own", tenants=["acme", "globex"]).drain()).sent == 2
        assert {message.headers["tenant_id"] for message in world.broker.sent("plans")} == {"acme", "globex"}
        assert world.sent == ""

    @in_virtual_time
    async def test_the_others_leave_its_lanes_to_it_and_take_them_over_when_it_is_gone(self) -> None:
        world = self.world()
        own, *others = world.relay("own", tenants=["acme"]), world.relay("r1"), world.relay("r2")
        async with running(*others):
            await until(lambda: owners(world) == {"r1": 16, "r2": 16})
            async with running(own):
                await until(lambda: self.owner(world, "acme") == "own")
                await until(lambda: sorted(owners(world).values()) == [1, 15, 16])
                self.write(world, "acme", "globex", "acme")
                await world.broker.received("plans", 3)
                assert own.counts.sent == 2
            await until(lambda: self.owner(world, "acme") in ("r1", "r2"))
            self.write(world, "acme")
            await world.broker.received("plans", 4)

    @in_virtual_time
    async def test_one_that_dies_is_missed_when_its_lease_ends(self) -> None:
        world = self.world()
        lane = {self.plans.id: [shard_of("acme", self.shards)]}
        await world.store.renew("own", [], lease=5.0, serves=[self.plans.id], shards=lane[self.plans.id])
        assert await world.store.take("own", lease=5.0, wanted={self.plans.id: 1}, shards=lane)
        self.write(world, "acme")
        async with running(world.relay("r1")):
            await world.broker.received("plans", 1)
            assert self.owner(world, "acme") == "r1"

    @pytest.mark.parametrize("tenants", ["acme", [], [""], [7]])
    def test_what_are_no_tenants(self, tenants: Any) -> None:
        with pytest.raises(ConfigurationError, match="tenants are names"):
            self.world().relay("own", tenants=tenants)

    def test_shards_or_tenants(self) -> None:
        with pytest.raises(ConfigurationError, match="not to both"):
            self.world().relay("own", tenants=["acme"], shards=[1])


class TestOrder:
    @in_virtual_time
    async def test_h27_r5_many_relays_send_each_event_once_and_each_key_in_order(self) -> None:
        world = World(shards=16)
        relays = [world.relay(f"r{number}") for number in range(4)]
        async with running(*relays):
            for number in range(1, 31):
                world.write(" ".join(f"{letter}{number}" for letter in ascii_lowercase))
                await asyncio.sleep(0.1)
            await world.received(26 * 30)
        sent = world.sent.split()
        assert len(sent) == len({*sent})
        for letter in ascii_lowercase:
            assert [event for event in sent if event[0] == letter] == [f"{letter}{n}" for n in range(1, 31)]
        assert sum(relay.counts.sent for relay in relays) == 26 * 30
        assert all(relay.counts.sent for relay in relays)

    @in_virtual_time
    async def test_order_survives_rejections_outages_and_relays_that_come_and_go(self) -> None:
        world = World(shards=4)
        world.broker.reject(lambda message: clock.current().monotonic() % 7 < 1 and message.key in "aeiou")
        long_lived = world.relay("r0")
        async with running(long_lived):
            for number in range(1, 41):
                world.write(" ".join(f"{letter}{number}" for letter in "abcdefghij"))
                if number % 10 == 3:
                    world.broker.go_away()
                if number % 10 == 5:
                    world.broker.come_back()
                async with running(world.relay(f"r{number}")):
                    await asyncio.sleep(0.7)
            await until(lambda: not world.statuses(Status.PENDING, Status.SENDING, Status.RETRYING, Status.PARKED))
        first_copies = [*dict.fromkeys(world.sent.split())]
        for letter in "abcdefghij":
            mine = [event for event in first_copies if event[0] == letter]
            assert mine == [f"{letter}{number}" for number in range(1, 41)]


class TestPaused:
    @in_virtual_time
    async def test_a_paused_lane_is_let_go_and_taken_up_again(self) -> None:
        world = World(shards=2)
        relay = world.relay()
        async with running(relay):
            await until(lambda: owners(world) == {"r1": 2})
            name = LaneName(world.route.id, 0)
            world.store.pause_lane(name)
            await until(lambda: owners(world) == {"r1": 1})
            world.write(KEYS)
            await until(lambda: len(world.sent.split()) == 26 - len(world.statuses(Status.PENDING).split()))
            waiting = len(world.statuses(Status.PENDING).split())
            assert waiting > 0
            world.store.pause_lane(name, paused=False)
            await world.received(26)

    @in_virtual_time
    async def test_drain_does_not_wait_for_paused_lanes_and_tenants(self) -> None:
        world = World(shards=2)
        world.store.pause_lane(LaneName(world.route.id, 0))
        world.store.pause_tenant("acme")
        world.write(KEYS)
        world.write("x2 y2 z2", tenant="acme")
        started = clock.current().monotonic()
        done = await world.relay().drain()
        assert 0 < done.sent < 26
        assert clock.current().monotonic() - started < 1.0


class TestDrain:
    @in_virtual_time
    async def test_it_sends_all_and_says_what_it_did(self) -> None:
        world = World(shards=16)
        world.write(KEYS)
        world.reject("c1")
        done = await world.relay(pacing={"batch": 1}).drain()
        assert (done.sent, done.rejected, done.dead) == (25, 1, 0)
        assert owners(world) == {}
        again = await world.relay().drain()
        assert (again.sent, again.rejected) == (0, 0)

    @in_virtual_time
    async def test_it_waits_out_the_lease_of_a_dead_relay(self) -> None:
        world = World()
        world.write("a1 a2")
        lane = await world.take("dead", lease=3.0)
        await world.store.announce(lane, Batch(items=[1]), settle=False)
        started = clock.current().monotonic()
        done = await world.relay().drain()
        assert (done.sent, world.sent) == (2, "a1 a2")
        assert clock.current().monotonic() - started == pytest.approx(3.0, abs=0.5)

    @in_virtual_time
    async def test_it_does_not_wait_for_parked_dead_and_later_due_events(self) -> None:
        world = World()
        world.write("a1 a2 b1")
        world.reject("a1")
        relay = world.relay()
        started = clock.current().monotonic()
        done = await relay.drain()
        assert clock.current().monotonic() - started < 0.5
        assert (done.sent, world.statuses(Status.RETRYING, Status.PARKED)) == (1, "a1 a2")
        async with running(relay):
            await until(lambda: world.status("a1") is Status.FAILED)
        world.write("b2")
        assert (await relay.drain()).sent == 1

    @in_virtual_time
    async def test_it_does_not_wait_for_a_destination_that_is_away(self) -> None:
        world = World(shards=4)
        world.write(KEYS)
        world.broker.go_away()
        started = clock.current().monotonic()
        assert (await world.relay().drain()).sent == 0
        assert clock.current().monotonic() - started < 10
        world.broker.come_back()
        assert (await world.relay("r2").drain()).sent == 26

    @in_virtual_time
    async def test_its_leases_are_renewed_while_one_lane_is_slow_and_another_destination_is_away(self) -> None:
        world = World(shards=8)
        world.write(KEYS)
        world.broker.go_away()
        slow, route = Broker(Capabilities(timeout=None)), RouteRecord("slow", "slow", "slow.events")
        world.store.register(None, [route])
        world.store.append(None, [_delivery(route)])

        async def take_long(_producer: str, _events: str) -> None:
            await asyncio.sleep(8)

        slow.before = take_long
        publishers = {"broker": world.broker, "slow": slow}
        done = await Relay(world.store, publishers, pacing=Pacing(lease=3.0), draw=half).drain()
        assert (done.sent, len(slow.requests)) == (1, 1)

    @in_virtual_time
    async def test_it_takes_its_turn_behind_a_living_relay(self) -> None:
        world = World(shards=2)
        async with running(world.relay("living")):
            world.write(KEYS)
            await world.relay("drains").drain()
            assert world.statuses(Status.PENDING) == ""

    @in_virtual_time
    async def test_it_goes_on_while_what_it_sends_writes_more(self) -> None:
        """As handlers do that raise events."""
        world = World(shards=4)

        async def chain(_producer: str, events: str) -> None:
            for event in events.split():
                if int(event[1:]) < 5:
                    world.write(f"{chr(ord(event[0]) + 1)}{int(event[1:]) + 1}")

        world.broker.before = chain
        world.write("a1")
        done = await world.relay().drain()
        assert (done.sent, world.sent) == (5, "a1 b2 c3 d4 e5")

    @in_virtual_time
    async def test_people_s_requests_are_carried_out(self) -> None:
        world = World()
        world.write("a1 a2")
        world.reject("a1")
        async with running(world.relay()):
            await until(lambda: world.status("a1") is Status.FAILED)
        world.broker.stop_rejecting()
        world.redrive("a1")
        await world.relay("r2").drain()
        assert world.sent == "a1 a2"


class TestRunOnce:
    @in_virtual_time
    async def test_r1_one_turn_of_every_lane(self) -> None:
        world = World()
        world.write("a1 a2 a3")
        relay = world.relay(pacing={"batch": 2})
        assert (await relay.run_once()).sent == 2
        assert (await relay.run_once()).sent == 1
        assert (await relay.run_once()).sent == 0
        assert owners(world) == {}

    @in_virtual_time
    async def test_it_renews_its_leases_while_a_destination_is_slow(self) -> None:
        world = World()
        world.write("a1")

        async def slow(_producer: str, _events: str) -> None:
            await asyncio.sleep(8)

        world.broker.before = slow
        assert (await world.relay().run_once()).sent == 1
        assert (world.broker.requests, world.status("a1")) == (["a1"], Status.SENT)

    @in_virtual_time
    async def test_a_destination_that_is_away_is_left_for_the_next_time(self) -> None:
        world = World()
        world.write("a1")
        world.broker.go_away()
        relay = world.relay()
        assert (await relay.run_once()).sent == 0
        world.broker.come_back()
        assert (await relay.run_once()).sent == 1


class OddError(BaseException):
    """What an exotic library may raise."""


class TestOddErrors:
    """What a transport raises that is no `Exception`, though nobody has cancelled the lane."""

    @pytest.mark.parametrize("where", ["preflight", "open"])
    def test_the_lane_is_served_again_soon(self, caplog: pytest.LogCaptureFixture, where: str) -> None:
        @in_virtual_time
        async def serve() -> None:
            world = World(capabilities=Capabilities(opens=True))
            failures = iter([OddError()])
            method = getattr(world.broker, where)

            def fail(*given: Any) -> Any:
                if (failure := next(failures, None)) is not None:
                    raise failure
                return method(*given)

            setattr(world.broker, where, fail)
            relay = world.relay(pacing={"lease": 60.0})
            async with running(relay):
                world.write("a1")
                await until(lambda: relay.status()["troubles"], seconds=5)
                assert "OddError" in str(relay.status()["troubles"])
                await until(lambda: world.status("a1") is Status.SENT, seconds=5)
            assert "lane orders/0 stumbled: OddError" in caplog.text

        serve()

    @pytest.mark.parametrize("odd", [asyncio.CancelledError, OddError])
    def test_a_producer_that_cannot_be_closed_ends_no_relay(self, odd: type[BaseException]) -> None:
        @in_virtual_time
        async def serve() -> None:
            world = World(shards=4)

            async def fail(_producer: str | None = None) -> None:
                raise odd

            world.broker.close = fail  # type: ignore[assignment, method-assign]
            async with running(world.relay("r1")):
                await until(lambda: owners(world) == {"r1": 4})
                async with running(world.relay("r2")):
                    await until(lambda: owners(world) == {"r1": 2, "r2": 2})
                await until(lambda: owners(world) == {"r1": 4})
            assert owners(world) == {}

        serve()

    @in_virtual_time
    async def test_a_relay_that_is_cancelled_ends_its_lanes(self) -> None:
        world = World()
        task = asyncio.ensure_future(world.relay().run())
        await until(lambda: owners(world) == {"r1": 1})
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert owners(world) == {}


class TestTrouble:
    @in_virtual_time
    async def test_h93_a_lane_that_stumbles_is_taken_up_again(self, caplog: pytest.LogCaptureFixture) -> None:
        world = World()
        world.write("a1")
        poll = world.store.poll
        failures = iter(range(3))

        async def stumble(*args: Any, **kwargs: Any) -> Any:
            if next(failures, None) is not None:
                raise ConnectionResetError("the database went away")
            return await poll(*args, **kwargs)

        world.store.poll = stumble  # type: ignore[method-assign]
        async with running(world.relay()):
            assert await world.received(1) == "a1"
        assert "lane orders/0 stumbled" in caplog.text

    @in_virtual_time
    async def test_what_a_lane_stumbles_over_is_shown_until_a_turn_goes_well(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        world = World()
        name, poll, fails = LaneName(world.route.id, 0), world.store.poll, True

        async def stumble(*args: Any, **kwargs: Any) -> Any:
            if fails:
                raise TypeError("password=swordfish")
            return await poll(*args, **kwargs)

        def shown() -> str:
            trouble = world.store.trouble_of(name)
            return "" if trouble is None else trouble.reason

        world.store.poll = stumble  # type: ignore[method-assign]
        relay, failed = world.relay(), "TypeError: password=***"
        async with running(relay):
            await until(lambda: shown() == f"the lane failed: {failed}")
            await until(lambda: shown() == f"the lane failed 3 times in a row: {failed}")
            seen: Counter[bool] = Counter()
            for _ in range(600):
                await asyncio.sleep(0.01)
                if world.store._lanes[name].locked_by is not None:
                    seen[bool(shown())] += 1
            assert seen[True] > 100
            assert not seen[False]
            assert "the lane failed" in relay.status()["troubles"]["orders/0"]
            fails = False
            world.write("a1")
            await until(lambda: world.status("a1") is Status.SENT and not shown())
            fails = True
            relay._workers[name].ring()
            await until(lambda: shown() == f"the lane failed: {failed}")
        told = [record.message for record in caplog.records if "stumbled" in record.message]
        assert [" in stumble: " in each for each in told] == [True] + [False] * (len(told) - 1)
        assert "swordfish" not in caplog.text

    @in_virtual_time
    async def test_a_lane_that_is_never_idle_is_forgiven_too(self) -> None:
        world = World()
        name, announce, fails = LaneName(world.route.id, 0), world.store.announce, iter([True])

        async def stumble(*args: Any, **kwargs: Any) -> Any:
            if next(fails, False):
                raise TypeError("odd")
            return await announce(*args, **kwargs)

        async def slow(_producer: str, events: str) -> None:
            await asyncio.sleep(1)
            world.write(f"a{int(events[1:]) + 1}")

        world.store.announce = stumble  # type: ignore[method-assign]
        world.broker.before = slow
        world.write("a1")
        async with running(world.relay()):
            await until(lambda: world.store.trouble_of(name) is not None)
            await until(lambda: world.store.trouble_of(name) is None and "a5" in world.rows)

    @in_virtual_time
    async def test_a_lane_that_halts_is_kept_and_named_and_the_others_go_on(self) -> None:
        world = World(shards=2)
        world.write(KEYS)
        name = LaneName(world.route.id, 0)
        (lane,) = await world.store.take("dead", lease=0.01, wanted={name.route: 1}, shards={name.route: [0]})
        first = next(iter(world.store._lanes[name].fresh))
        await world.store.announce(lane, Batch(items=[first]), settle=False)
        world.store._move(first, Status.DISCARDED)  # by hand
        relay = world.relay()
        async with running(relay):
            await until(lambda: relay.status()["troubles"])
            (reason,) = relay.status()["troubles"].values()
            assert "somebody changed them by hand" in reason
            await until(lambda: not world.store._lanes[LaneName(name.route, 1)].fresh)
            await asyncio.sleep(30)
            assert world.store._lanes[name].locked_by == "r1"
            trouble = world.store.trouble_of(name)
            assert trouble is not None
            assert trouble.seconds is None
        assert world.store._lanes[name].fresh

    @in_virtual_time
    async def test_drain_does_not_wait_for_a_lane_that_halts(self) -> None:
        world = World()
        world.write("a1 b1")
        await world.store.announce(await world.take("dead", lease=0.01), Batch(items=[1]), settle=False)
        world.store._move(1, Status.DISCARDED)
        assert (await world.relay().drain()).sent == 0
        assert owners(world) == {}

    @in_virtual_time
    async def test_a_store_that_cannot_be_reached_is_reported_once_and_tried_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        world = World()
        line = Line(world.store)
        relay = world.relay(store=line)
        async with running(relay):
            await until(lambda: owners(world) == {"r1": 1})
            assert relay.healthy
            line.fail(ConnectionRefusedError("no"))
            await until(lambda: not relay.healthy)
            await asyncio.sleep(20)
            world.write("a1")
            line.mend()
            await world.received(1)
            assert relay.healthy
        messages = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert sum("the outbox cannot be reached" in message for message in messages) == 1
        assert sum("the outbox can be reached again" in message for message in messages) == 1

    @in_virtual_time
    async def test_a_relay_that_cannot_see_what_there_is_to_send_says_so_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        world = World()

        async def forbidden(*_: object, **__: object) -> frozenset[LaneName]:
            raise PermissionError("no right to read requests")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world.store, "ready", forbidden)
            async with running(world.relay()):
                await until(lambda: "cannot see what there is to send" in caplog.text)
                await asyncio.sleep(20)
                patch.undo()
                await until(lambda: "sees again" in caplog.text)
        assert caplog.text.count("cannot see what there is to send: PermissionError: no right to read requests") == 1

    @in_virtual_time
    async def test_h93_a_relay_whose_own_task_dies_ends_with_its_error(self) -> None:
        world = World()
        relay = world.relay()

        async def die(_over: asyncio.Event) -> None:
            raise ZeroDivisionError

        relay._keep_looking = die  # type: ignore[assignment,method-assign]
        with pytest.raises(ZeroDivisionError):
            await relay.run()
        assert owners(world) == {}

    @in_virtual_time
    async def test_h93_health_is_the_age_of_the_last_look_at_the_leases(self) -> None:
        world = World()
        line = Line(world.store)
        relay = world.relay(store=line)
        assert not relay.healthy
        async with running(relay):
            await until(lambda: relay.healthy)
            line.cut()
            await until(lambda: not relay.healthy)
            line.mend()
            await until(lambda: relay.healthy)

    @in_virtual_time
    async def test_it_is_as_healthy_as_the_consumers_that_it_runs(self) -> None:
        world, notices = World(), Consumer()
        relay = world.relay(consumers=[notices])
        async with running(relay):
            await until(lambda: relay.healthy)
            assert notices.served_how == ["run"]
            notices.progresses = False
            assert not relay.healthy
            assert "none takes effect" in relay.status()["troubles"]["notices"]
        await relay.drain()
        await relay.run_once()
        assert notices.served_how == ["run", "ended", "drain", "ended", "drain", "ended"]

    @in_virtual_time
    async def test_s38_its_status_has_no_keys_and_no_secrets(self) -> None:
        world = World()
        world.write("secretkey1", tenant="acme")

        async def fail(_producer: str, _events: str) -> Outcome:
            raise OSError("amqp://user:swordfish@host refused")

        world.broker.before = fail
        relay = world.relay()
        async with running(relay):
            await until(lambda: relay.status()["troubles"])
            said = json.dumps(relay.status())
            assert relay.status()["lanes"] == 1
        assert not any(word in said for word in ("secretkey", "acme", "swordfish"))

    def test_settings_that_cannot_work_are_refused(self) -> None:
        for option, given, what in (
            *((option, 0, "above 0") for option in ("lease", "batch", "window_bytes", "look", "grace")),
            *((option, math.nan, "a number above 0") for option in ("lease", "grace")),
            *((option, math.inf, "up to 3,600") for option in ("lease", "grace")),
            *((option, 1.5, "a whole number") for option in ("batch", "window_bytes")),
            *(("batch", 10_001, "up to 10,000"), ("batch", True, "a whole number"), ("lease", "5", "a number")),
        ):
            with pytest.raises(ConfigurationError, match=f"{option} must be .*{what}.*, got {given!r}"):
                Pacing(**{option: given})  # type: ignore[arg-type]

    @in_virtual_time
    async def test_an_idle_relay_asks_seldom(self) -> None:
        """With a bell that works, a look in a second."""
        world = World(shards=16)
        asked = 0
        ready = world.store.ready

        async def watched(*args: Any, **kwargs: Any) -> frozenset[LaneName]:
            nonlocal asked
            asked += 1
            return await ready(*args, **kwargs)

        world.store.ready = watched  # type: ignore[method-assign]
        async with running(world.relay(bell=Doorbell(DeafCarrier()))):
            await asyncio.sleep(60)
        assert asked <= 70


class Leisurely(Broker):
    """Takes its time to close a producer."""

    seconds = 1.0

    async def close(self, producer: str | None = None) -> None:
        await asyncio.sleep(self.seconds)
        await super().close(producer)


class Consumer:
    """One that a relay runs."""

    name = "notices"
    progresses = True

    def __init__(self) -> None:
        self.served_how: list[str] = []

    @asynccontextmanager
    async def served(self, *, draining: bool) -> AsyncIterator[None]:
        self.served_how.append("drain" if draining else "run")
        yield
        self.served_how.append("ended")


class IdleFeed:
    """Brings nothing."""

    state = "off"
    works = True

    def start(self, hearer: object, lanes: object) -> None:  # noqa: ARG002  the port has them
        self.state = "up"

    async def stop(self) -> None:
        await asyncio.sleep(0)
        self.state = "off"

    def samples(self) -> Iterable[Sample]:
        return ()


class DeafCarrier:
    """Works, and has nobody to talk to."""

    works = True

    async def carry(self, lanes: Collection[LaneName]) -> None:
        """Nobody is there."""

    async def listen(self, hearer: Any) -> None:  # noqa: ARG002  nobody rings
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing is open."""


def _delivery(route: RouteRecord) -> Delivery:
    return Delivery(clock.new_id(), "t", route.id, 0, 1, route.topic, "k", None, {}, b"s1")


def test_names_of_relays_differ() -> None:
    names = {Relay(MemoryStore(), {}).name for _ in range(20)}
    assert len(names) == 20
