"""A destination that rejects everything: its lanes stop, nobody's attempt is counted, and one event at a time asks."""

from __future__ import annotations

import asyncio
import logging
from string import ascii_lowercase
from typing import Any
from uuid import UUID

import pytest

from pillarbox import clock
from pillarbox.outbox import Key, Lane, Page, RouteRecord, Row, Status
from pillarbox.retry import RetryPolicy
from pillarbox.suspicion import FEW_KEYS, MANY_KEYS, Suspicion
from tests.memory.log import MemoryLogStore
from tests.relays import TOPIC, World, half, in_virtual_time, running, soon, until

MANY = " ".join(f"{letter}1" for letter in ascii_lowercase)


def lane(shard: int = 0) -> Lane:
    route = RouteRecord("orders", "broker", TOPIC)
    return Lane(route, shard, 1, UUID(int=1), 0, 1, None, 0, frozenset())


def row(number: int, *, key: str | None = None, attempts: int = 0, topic: str = TOPIC) -> Row:
    return Row(number, UUID(int=number), topic, key or f"k{number}", None, {}, b"", attempts)


class TestJudgement:
    def test_three_keys_are_enough_if_it_never_took_anything(self) -> None:
        suspicion = Suspicion(half)
        verdicts = [suspicion.rejected(lane(), row(number), "no") is not None for number in range(1, FEW_KEYS + 1)]
        assert verdicts == [False, False, True]

    def test_twenty_keys_are_needed_if_it_did(self) -> None:
        suspicion = Suspicion(half)
        suspicion.accepted(lane(), TOPIC)
        verdicts = [suspicion.rejected(lane(), row(number), "no") is not None for number in range(1, MANY_KEYS + 1)]
        assert verdicts == [False] * (MANY_KEYS - 1) + [True]

    def test_one_key_is_never_enough(self) -> None:
        suspicion = Suspicion(half)
        assert not any(
            suspicion.rejected(lane(), row(number, key="poison"), "no") is not None for number in range(1, 100)
        )

    def test_a_success_between_them_counts(self) -> None:
        suspicion = Suspicion(half)
        for number in range(1, 100):
            assert suspicion.rejected(lane(), row(number), "no") is None
            suspicion.accepted(lane(), TOPIC)

    def test_lanes_are_counted_together_and_topics_are_not(self) -> None:
        suspicion = Suspicion(half)
        suspicion.rejected(lane(0), row(1), "no")
        suspicion.rejected(lane(1), row(2), "no")
        suspicion.rejected(lane(2), row(3, topic="another"), "no")
        rows = [row(5), row(6, topic="another")]
        assert suspicion.let_through(lane(0), rows) == (rows, None)
        suspicion.rejected(lane(3), row(4), "no")
        assert [suspicion.let_through(lane(shard), rows)[0] for shard in range(4)] == [
            rows[1:],
            rows[1:],
            rows,
            rows[1:],
        ]

    def test_what_is_behind_a_row_that_waits_waits_with_it_whatever_its_topic(self) -> None:
        suspicion = Suspicion(half)
        for number in range(1, FEW_KEYS + 1):
            suspicion.rejected(lane(), row(number), "no")
        behind = row(5, key="k4", topic="another")
        through, place = suspicion.let_through(lane(), [row(4), behind, row(6, topic="another")])
        assert [it.id for it in through] == [6]
        assert place is not None
        assert place.name == ("broker", TOPIC)

    def test_the_key_of_another_tenant_is_another_key(self) -> None:
        place = Suspicion(half)
        assert row(1).order_key == Key(None, "k1")
        assert place.rejected(lane(), row(1, key="k"), "no") is None


class TestLanes:
    @in_virtual_time
    async def test_h112_the_lanes_stop_and_no_attempt_is_burnt(self, caplog: pytest.LogCaptureFixture) -> None:
        world = World(shards=4)
        world.write(MANY)
        world.broker.reject(lambda _message: True, reason="no such right")
        relay = world.relay()
        async with running(relay):
            await asyncio.sleep(300)
            assert world.statuses(Status.FAILED) == ""
            assert {world.attempts(event) for event in world.rows} == {0}
            assert len(world.broker.requests) < 40
            assert set(relay.status()["troubles"].values()) == {f"broker {TOPIC} rejects everything: no such right"}
        alarms = [record.message for record in caplog.records if record.levelno == logging.ERROR]
        (alarm,) = alarms
        assert alarm.startswith(f"broker {TOPIC} rejects everything (3 different keys, no such right)")

    @in_virtual_time
    async def test_h112_one_event_at_a_time_asks_and_the_first_that_is_taken_opens_the_way(self) -> None:
        world = World()
        world.write(MANY)
        world.broker.reject(lambda _message: True)
        async with running(world.relay()):
            await until(lambda: len(world.broker.requests) > 5)
            assert all(len(request.split()) == 1 for request in world.broker.requests[1:])
            world.broker.stop_rejecting()
            await world.received(26)
        assert sorted(world.sent.split()) == sorted(world.rows)

    @in_virtual_time
    async def test_h112_attempts_that_were_counted_too_early_are_taken_back(self) -> None:
        """With one attempt each, two are dead in their lanes before a third one makes clear whose fault it is."""
        world = World(shards=4, retry=RetryPolicy(base=1.0, cap=8.0, attempts=1))
        world.write("ka1 kb1 kc1 kd1")
        world.broker.reject(lambda _message: True)
        async with running(world.relay()):
            await until(lambda: len(world.broker.requests) >= 4)
            await asyncio.sleep(1)
            assert world.statuses(Status.FAILED) == ""
            world.broker.stop_rejecting()
            await world.received(4)

    @pytest.mark.every_loop
    async def test_h129_a_suspected_lane_waits_on_a_loop_whose_handles_are_no_timers(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """uvloop answers a delay below half a millisecond with a handle that knows no time."""
        for module in ("lane", "suspicion"):
            monkeypatch.setattr(f"pillarbox.{module}.PROBES", RetryPolicy(base=0.0004, cap=0.0004, attempts=1))
        world = World(retry=RetryPolicy(base=0.001, cap=0.001, attempts=3))
        world.write("a1 b1 c1")
        world.broker.reject(lambda _message: True)
        async with running(world.relay(pacing={"look": 0.01})):
            await soon(lambda: len(world.broker.requests) > 6)
            world.broker.stop_rejecting()
            await world.received(3)
        assert "stumbled" not in caplog.text

    @in_virtual_time
    async def test_order_per_key_survives_it(self) -> None:
        world = World(shards=2)
        world.write("a1 b1 c1 d1 a2 b2 c2 d2")
        world.broker.reject(lambda _message: True)
        async with running(world.relay()):
            await until(lambda: len(world.broker.requests) > 6)
            world.write("a3 b3")
            await asyncio.sleep(20)
            world.broker.stop_rejecting()
            await world.received(10)
        for key in "abcd":
            mine = [event for event in world.sent.split() if event[0] == key]
            assert mine == sorted(mine)

    @in_virtual_time
    async def test_h112_the_lanes_of_other_topics_go_on(self) -> None:
        world = World(shards=1)
        world.broker.reject(lambda message: message.topic != TOPIC)
        world.write("a1 b1 c1 d1", topic="forbidden")
        world.write("x1 y1")
        async with running(world.relay()):
            assert await world.received(2) == "x1 y1"

    @in_virtual_time
    async def test_h112_two_topics_that_reject_everything_are_asked_one_event_at_a_time_each(self) -> None:
        world = World(shards=1)
        world.broker.reject(lambda message: message.topic != TOPIC)
        world.write("a1 b1 c1 d1 e1", topic="forbidden")
        world.write("k1 l1 m1 n1 o1", topic="unknown")
        async with running(world.relay()):
            await until(lambda: len(world.broker.requests) > 8)
        for request in world.broker.requests[1:]:
            topics = [event < "k" for event in request.split()]
            assert len(topics) == len({*topics}), world.broker.requests

    @in_virtual_time
    async def test_a_lane_rests_though_a_topic_that_has_nothing_due_could_be_asked(self) -> None:
        world = World(shards=1)
        world.broker.reject(lambda message: message.topic != TOPIC)
        world.write("a1 b1 c1", topic="forbidden")
        world.write("k1 l1 m1", topic="unknown")
        polls = 0
        poll = world.store.poll

        async def counted(*args: Any, **kwargs: Any) -> Page:
            nonlocal polls
            polls += 1
            return await poll(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world.store, "poll", counted)
            async with running(world.relay()):
                await asyncio.sleep(1)
                world.write("n1 o1 p1 q1", topic="unknown")
                await asyncio.sleep(30)
        assert polls < 200

    @in_virtual_time
    async def test_h112_a_detour_goes_on_while_failed_events_wait_for_their_topic(self) -> None:
        world = World(kind=MemoryLogStore)
        world.store.set_rate(1000, tenant="loud")
        world.write("x1", tenant="loud")
        async with running(world.relay()):
            await world.received(1)
            world.broker.reject(lambda message: message.topic != TOPIC)
            world.write("a1 b1 c1 d1 e1", topic="forbidden")
            for number in range(2, 12):
                await asyncio.sleep(8)  # so the detour does not end
                before = clock.current().monotonic()
                world.write(f"x{number}", tenant="loud")
                await world.received(number)
                assert clock.current().monotonic() - before < 2

    @in_virtual_time
    async def test_drain_does_not_wait_for_it(self) -> None:
        world = World()
        world.write(MANY)
        world.broker.reject(lambda _message: True)
        done = await world.relay().drain()
        assert (done.sent, world.statuses(Status.FAILED)) == (0, "")
