"""The doorbell: who hears what, from which thread, and what goes to other processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection

import pytest

from pillarbox.doorbell import ANYBODY, Doorbell
from pillarbox.outbox import LaneName
from tests.relays import World, in_virtual_time, running, until

A, B, C = (LaneName(1, shard) for shard in range(3))


class Wire:
    """A carrier within this process: what it carries can be looked at, and others can ring through it."""

    works = True

    def __init__(self) -> None:
        self.carried: list[set[LaneName]] = []
        self.hearer: Callable[[Collection[LaneName]], object] | None = None
        self.broken = False
        self.slow = asyncio.Event()
        self.slow.set()
        self.closed = False

    async def carry(self, lanes: Collection[LaneName]) -> None:
        await self.slow.wait()
        if self.broken:
            raise ConnectionResetError("gone")
        self.carried.append({*lanes})

    async def listen(self, hearer: Callable[[Collection[LaneName]], object]) -> None:
        self.hearer = hearer
        try:
            await asyncio.Event().wait()
        finally:
            self.hearer = None

    async def close(self) -> None:
        self.closed = True


class Ear:
    """Somebody who owns some lanes."""

    def __init__(self, *owned: LaneName) -> None:
        self.owned = owned
        self.heard: set[LaneName] = set()

    def __call__(self, lanes: Collection[LaneName]) -> Collection[LaneName]:
        self.heard.update(lanes)
        return [lane for lane in lanes if lane not in self.owned]


@in_virtual_time
async def test_whoever_is_in_this_process_is_told_at_once() -> None:
    bell, ear = Doorbell(), Ear(A)
    stop = bell.hear(ear)
    bell.ring([A, B])
    await until(lambda: ear.heard == {A, B})
    stop()
    bell.ring([C])
    await asyncio.sleep(1)
    assert ear.heard == {A, B}


@in_virtual_time
async def test_a_hearer_that_fails_does_not_fail_the_commit(caplog: pytest.LogCaptureFixture) -> None:
    bell = Doorbell()

    def fail(_lanes: Collection[LaneName]) -> Collection[LaneName]:
        raise ValueError("a bug")

    bell.hear(fail)
    bell.ring([A])
    assert "the doorbell was not heard" in caplog.text


@in_virtual_time
async def test_only_what_nobody_here_owns_is_carried_to_others() -> None:
    wire = Wire()
    bell = Doorbell(wire)
    bell.hear(Ear(A))
    bell.hear(Ear(B))
    bell.ring([A, B, C])
    await until(lambda: wire.carried)
    assert wire.carried == [{C}]
    bell.ring([A])
    await asyncio.sleep(1)
    assert wire.carried == [{C}]
    await bell.close()


@in_virtual_time
async def test_h54_what_rings_while_a_message_is_on_its_way_goes_with_the_next() -> None:
    wire = Wire()
    bell = Doorbell(wire)
    wire.slow.clear()
    for number in range(1000):
        bell.ring([LaneName(1, number % 16)])
        await asyncio.sleep(0)
    wire.slow.set()
    await until(lambda: {lane for message in wire.carried for lane in message} == {LaneName(1, n) for n in range(16)})
    assert len(wire.carried) <= 3
    await bell.close()


@in_virtual_time
@pytest.mark.parametrize(("rings", "seconds", "messages"), [(100, 0.008, 100), (250, 0.004, 100), (1000, 0.001, 50)])
async def test_the_more_rings_come_the_less_often_they_are_carried(rings: int, seconds: float, messages: int) -> None:
    wire = Wire()
    bell = Doorbell(wire)
    for _ in range(rings):
        bell.ring([A])
        await asyncio.sleep(seconds)
    assert messages * 0.9 <= len(wire.carried) <= messages * 1.1
    await bell.close()


@in_virtual_time
async def test_a_message_that_is_lost_loses_nothing_else() -> None:
    wire = Wire()
    bell = Doorbell(wire)
    wire.broken = True
    bell.ring([A])
    await asyncio.sleep(1)
    wire.broken = False
    bell.ring([B])
    await until(lambda: wire.carried == [{B}])
    await bell.close()


@in_virtual_time
async def test_what_others_ring_is_heard_while_somebody_listens() -> None:
    wire = Wire()
    bell, ear = Doorbell(wire), Ear(A)
    stop = bell.hear(ear)
    await until(lambda: wire.hearer)
    assert wire.hearer is not None
    wire.hearer([A])
    assert ear.heard == {A}
    stop()
    await until(lambda: wire.hearer is None)
    again = bell.hear(ear)
    await until(lambda: wire.hearer)
    again()
    await bell.close()
    assert wire.closed


@in_virtual_time
async def test_closing_lets_what_is_on_its_way_go_out() -> None:
    wire = Wire()
    bell = Doorbell(wire)
    bell.ring([A])
    await bell.close()
    assert (wire.carried, wire.closed) == ([{A}], True)
    bell.ring([B])
    await bell.close()
    assert wire.carried == [{A}]  # a carrier that is closed carries nothing


async def test_h25_a_plain_session_in_a_thread_rings_and_does_not_wait() -> None:
    bell, ear = Doorbell(), Ear()
    bell.hear(ear)
    await asyncio.to_thread(bell.ring, [A])
    async with asyncio.timeout(5):
        await until(lambda: ear.heard == {A})


async def test_a_thread_with_a_loop_of_its_own_rings_in_the_loop_that_hears() -> None:
    """Hearers and connections belong to one loop: they must not be touched from another."""
    bell = Doorbell()
    heard_in: list[threading.Thread] = []

    def hear(lanes: Collection[LaneName]) -> Collection[LaneName]:
        heard_in.append(threading.current_thread())
        return lanes

    async def commit() -> None:
        bell.ring([A])
        await asyncio.sleep(0)

    bell.hear(hear)
    await asyncio.to_thread(asyncio.run, commit())
    async with asyncio.timeout(5):
        await until(lambda: heard_in)
    assert heard_in == [threading.main_thread()]
    bell.ring([B])
    async with asyncio.timeout(5):
        await until(lambda: len(heard_in) == 2)


def test_without_any_loop_nothing_happens_and_nothing_is_kept() -> None:
    bell = Doorbell(Wire())
    for _ in range(3):
        bell.ring([A])
    assert bell._rung == set()


def test_a_loop_that_is_gone_does_not_hurt_the_commit() -> None:
    bell = Doorbell()

    async def once() -> None:
        bell.hear(Ear())

    asyncio.run(once())
    bell.ring([A])

    async def again() -> None:
        ear = Ear()
        bell.hear(ear)
        bell.ring([B])
        async with asyncio.timeout(5):
            await until(lambda: B in ear.heard)

    asyncio.run(again())


@in_virtual_time
async def test_w7_a_commit_is_sent_at_once_not_at_the_next_look() -> None:
    world = World(shards=4)
    bell = Doorbell()
    relay = world.relay(bell=bell)
    async with running(relay):
        await until(lambda: relay.status()["lanes"] == 4)
        for event in ("a1", "b1", "c1", "d1"):
            await asyncio.sleep(5)
            world.write(event)
            rung_at = asyncio.get_running_loop().time()
            bell.ring([lane for lane, stored in world.store._lanes.items() if stored.fresh])
            await world.received(len(world.rows))
            assert asyncio.get_running_loop().time() - rung_at < 0.01


@in_virtual_time
async def test_h51_what_was_not_rung_is_found_by_looking() -> None:
    world = World()
    async with running(world.relay(bell=Doorbell(Wire()))):
        await asyncio.sleep(10)
        world.write("a1")
        written_at = asyncio.get_running_loop().time()
        await world.received(1)
        assert asyncio.get_running_loop().time() - written_at <= 1.1


@in_virtual_time
async def test_h48_relays_hear_of_lanes_that_were_let_go() -> None:
    world = World(shards=2)
    bell = Doorbell()
    heard = Ear()
    bell.hear(heard)
    one, two = world.relay("r1", bell=bell), world.relay("r2", bell=bell)
    async with running(two):
        async with running(one):
            await until(lambda: two.status()["lanes"] == one.status()["lanes"] == 1)
        left_at = asyncio.get_running_loop().time()
        await until(lambda: two.status()["lanes"] == 2)
        assert asyncio.get_running_loop().time() - left_at < 0.1
    assert ANYBODY in heard.heard


@in_virtual_time
async def test_a_ring_between_the_poll_and_the_sleep_is_not_lost() -> None:
    """The bell is cleared before the poll: what is committed during it is heard after it."""
    world = World()
    bell = Doorbell()
    poll = world.store.poll
    relay = world.relay(bell=bell, pacing={"look": 1000.0})

    async def poll_and_commit_behind_it(*args: object, **kwargs: object) -> object:
        page = await poll(*args, **kwargs)  # type: ignore[arg-type]
        if not world.rows:
            world.write("a1")
            bell.ring([*world.store._lanes])
            await asyncio.sleep(0.01)
        return page

    world.store.poll = poll_and_commit_behind_it  # type: ignore[assignment]
    async with running(relay):
        await world.received(1)
        assert world.sent == "a1"


@pytest.mark.parametrize("lanes", [[], [A]])
def test_ringing_is_cheap_without_anybody_to_hear(lanes: list[LaneName]) -> None:
    Doorbell().ring(lanes)


async def test_who_stops_listening_is_not_disturbed_while_it_says_goodbye() -> None:
    closing, parted = asyncio.Event(), asyncio.Event()

    class Polite(Wire):
        async def listen(self, hearer: Callable[[Collection[LaneName]], object]) -> None:
            try:
                await super().listen(hearer)
            finally:
                await closing.wait()  # it closes its connection
                parted.set()

    bell = Doorbell(Polite())
    stop = bell.hear(lambda _lanes: [])
    await asyncio.sleep(0)
    stop()
    ending = asyncio.create_task(bell.close())
    await asyncio.sleep(0)
    closing.set()
    await ending
    assert parted.is_set()
