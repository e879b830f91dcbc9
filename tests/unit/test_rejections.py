"""A destination that rejects everything: its lanes stop, nobody's attempt is counted, and one event at a time asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from itertools import islice, product
from random import Random
from string import ascii_lowercase
from typing import Any
from uuid import UUID

import pytest

from pillarbox import clock
from pillarbox.outbox import Failure, Key, Lane, LaneName, Page, RouteRecord, Row, Status
from pillarbox.rejections import FEW_KEYS, FORGOTTEN_SECONDS, MANY_KEYS, MOST_KEYS, Rejections
from pillarbox.retry import RetryPolicy
from pillarbox.transport import Message
from tests.memory.log import MemoryLogStore
from tests.memory.store import MemoryStore
from tests.relays import TOPIC, World, freeze, half, in_virtual_time, running, soon, until

MANY = " ".join(f"{letter}1" for letter in ascii_lowercase)


def lane(shard: int = 0) -> Lane:
    route = RouteRecord("orders", "broker", TOPIC)
    return Lane(route, shard, 1, UUID(int=1), 0, 1, None, 0, frozenset())


def row(
    number: int, *, key: str | None = None, attempts: int = 0, topic: str = TOPIC, tenant: str | None = None
) -> Row:
    return Row(number, f"{number:032x}", topic, key or f"k{number}", tenant, {}, b"", attempts)


def accept(rejections: Rejections, topic: str = TOPIC, tenant: str | None = None) -> None:
    headers = {"tenant_id": tenant} if tenant else {}
    rejections.accepted(lane(), [Message(topic, "good", b"", headers)], [0])


def reject(rejections: Rejections, rows: Iterable[Row], of: Lane | None = None) -> list[bool]:
    """Whether each of these rejections was the destination's fault."""
    return [rejections.rejected(of or lane(), each, "no") is not None for each in rows]


def attempts_after(rejections: Rejections, attempts: dict[int, int]) -> dict[int, int]:
    """The attempts of rows, when the destination has rejected all of them twice."""
    for number in [*attempts] * 2:
        given_back = rejections.rejected(lane(), row(number, attempts=attempts[number]), "no")
        attempts |= {number: attempts[number] + 1 if given_back is None else given_back}
        attempts |= {failure.row: failure.attempts for failure in settle(rejections)}
    return attempts


def settle(rejections: Rejections) -> list[Failure]:
    """The attempts that the lane gives back."""
    owed = rejections.owed(lane())
    rejections.paid(lane(), owed)
    return owed


class TestJudgement:
    def test_three_keys_are_enough_if_the_topic_never_accepted_anything(self) -> None:
        assert reject(Rejections(half), map(row, range(FEW_KEYS))) == [False, False, True]

    def test_twenty_keys_are_needed_if_it_did(self) -> None:
        rejections = Rejections(half)
        accept(rejections)
        assert reject(rejections, map(row, range(MANY_KEYS))) == [False] * (MANY_KEYS - 1) + [True]

    def test_fewer_are_enough_if_all_of_them_were_rejected_twice(self) -> None:
        rejections = Rejections(half)
        accept(rejections)
        assert not any(reject(rejections, map(row, range(FEW_KEYS))))
        again = [row(number, attempts=1) for number in range(FEW_KEYS)]
        assert reject(rejections, again) == [False, False, True]

    def test_one_key_is_never_enough(self) -> None:
        assert not any(reject(Rejections(half), [row(number, key="poison") for number in range(99)]))

    def test_a_success_between_them_counts(self) -> None:
        rejections = Rejections(half)
        for number in range(99):
            assert reject(rejections, [row(number)]) == [False]
            accept(rejections)

    def test_h118_a_success_in_the_same_request_counts(self) -> None:
        rejections = Rejections(half)
        verdicts = [rejections.rejected(lane(), row(number), "no", {(TOPIC, None)}) for number in range(99)]
        assert verdicts == [None] * 99

    def test_h118_what_was_rejected_while_others_were_accepted_is_no_evidence_when_it_is_tried_again(self) -> None:
        rejections = Rejections(half)
        reject(rejections, map(row, range(2)))
        accept(rejections)
        assert not any(reject(rejections, [row(number, attempts=1) for number in range(99)]))

    def test_h118_a_topic_that_accepts_a_few_of_many_is_given_longer_runs(self) -> None:
        rejections = Rejections(half)
        accept(rejections)
        reject(rejections, map(row, range(MANY_KEYS + 10)))
        accept(rejections)
        assert not any(reject(rejections, map(row, range(2 * MANY_KEYS))))
        accept(rejections)
        assert any(reject(rejections, map(row, range(MOST_KEYS))))

    def test_h118_a_key_loses_an_attempt_whenever_others_were_accepted_between_two_of_its_rejections(self) -> None:
        """Also if it is always one of a few that are all rejected: else it would never be out of attempts."""
        rejections, attempts = Rejections(half), dict.fromkeys(range(FEW_KEYS), 0)
        accept(rejections)
        for expected in (0, 1):
            attempts = attempts_after(rejections, attempts)
            assert attempts == dict.fromkeys(range(FEW_KEYS), expected)
            accept(rejections)
            settle(rejections)

    def test_a_key_that_was_accepted_meanwhile_loses_none(self) -> None:
        rejections, unhurt = Rejections(half), dict.fromkeys(range(FEW_KEYS), 0)
        accept(rejections)
        for _ in range(2):
            assert attempts_after(rejections, dict(unhurt)) == unhurt
            rejections.accepted(lane(), [Message(TOPIC, f"k{number}", b"", {}) for number in unhurt], [*unhurt])
            settle(rejections)

    def test_lanes_are_counted_together_and_topics_are_not(self) -> None:
        rejections = Rejections(half)
        reject(rejections, [row(1)], lane(0))
        reject(rejections, [row(2)], lane(1))
        reject(rejections, [row(3, topic="another")], lane(2))
        rows = [row(5), row(6, topic="another")]
        assert rejections.filter_blocked(lane(0), rows) == rows
        reject(rejections, [row(4)], lane(3))
        assert [rejections.filter_blocked(lane(shard), rows) for shard in range(4)] == [rows[1:]] * 4

    def test_h118_a_tenant_whose_messages_are_all_rejected_stops_no_other(self) -> None:
        rejections = Rejections(half)
        accept(rejections, tenant="good")
        verdicts = reject(rejections, [row(number, tenant="bad") for number in range(MANY_KEYS)])
        assert verdicts[-1]
        rows = [row(98, tenant="bad"), row(99, tenant="good")]
        assert rejections.filter_blocked(lane(), rows) == rows[1:]
        assert rejections.held(lane()) == {"bad"}

    def test_a_topic_that_rejects_several_tenants_is_blocked_for_all_but_a_first_probe_of_each(self) -> None:
        rejections = Rejections(half)
        assert any(reject(rejections, [row(1, tenant="t1"), row(2, tenant="t2"), row(3, tenant="t3")]))
        new = [row(4, tenant="t4"), row(5, tenant="t4")]
        assert rejections.filter_blocked(lane(), [row(6, tenant="t1"), *new]) == new[:1]
        accept(rejections, tenant="t4")
        assert rejections.filter_blocked(lane(), [row(6, tenant="t1"), *new]) == [row(6, tenant="t1"), *new]

    def test_what_is_behind_a_row_that_waits_waits_with_it_whatever_its_topic(self) -> None:
        rejections = Rejections(half)
        reject(rejections, map(row, range(1, FEW_KEYS + 1)))
        behind = row(5, key="k4", topic="another")
        free = rejections.filter_blocked(lane(), [row(4), behind, row(6, topic="another")])
        assert [it.id for it in free] == [6]
        place = rejections.next_to_probe(lane().name)
        assert str(place) == f"broker {TOPIC}"

    def test_the_key_of_another_tenant_is_another_key(self) -> None:
        assert row(1).order_key == Key(None, "k1")

    @in_virtual_time
    async def test_h119_probes_go_to_keys_that_were_never_tried_and_then_to_those_tried_longest_ago(self) -> None:
        rejections = Rejections(half)
        bad = [row(number) for number in range(1, FEW_KEYS + 1)]
        reject(rejections, bad)
        probed = []
        for _ in range(FEW_KEYS + 3):
            freeze(2.0)
            (probe,) = rejections.filter_blocked(lane(), [*bad, row(8), row(9)])
            probed.append(probe.id)
            reject(rejections, [probe])
        assert probed == [8, 9, 1, 2, 3, 8]

    @in_virtual_time
    async def test_a_place_that_has_no_more_messages_is_forgotten(self) -> None:
        rejections = Rejections(half)
        reject(rejections, map(row, range(FEW_KEYS)))
        assert rejections.next_to_probe(lane().name) is not None
        freeze(FORGOTTEN_SECONDS + 1)
        assert rejections.next_to_probe(lane().name) is None
        rejections.forget(lane().name)
        assert not rejections.standing()


class TestTurns:
    @in_virtual_time
    async def test_h119_lanes_probe_a_place_in_turns(self) -> None:
        rejections, woken = self.blocked()
        for shard in (0, 1, 2, 0):
            freeze(0.5)
            assert self.may_probe(rejections) == [shard]
            assert rejections.until_probe(lane(shard).name, more=True) is None
            assert rejections.filter_blocked(lane(shard), [row(9, tenant="bad")])
            assert woken.pop() == lane((shard + 1) % 3).name
            assert rejections.until_probe(lane((shard + 1) % 3).name, more=False) is not None
            assert self.may_probe(rejections) == []

    @in_virtual_time
    async def test_h119_a_lane_that_has_nothing_to_probe_with_lets_the_next_one_try_at_once(self) -> None:
        rejections, woken = self.blocked()
        freeze(0.5)
        for shard in (0, 1, 2):
            assert self.may_probe(rejections) == [shard]
            woken.clear()
            rejections.until_probe(lane(shard).name, more=False)
            assert woken == [lane((shard + 1) % 3).name]
        woken.clear()
        rejections.until_probe(lane().name, more=False)
        assert woken == [], "no lane has anything"

    @in_virtual_time
    async def test_h119_a_lane_that_misses_its_turn_holds_up_no_other(self) -> None:
        rejections, _ = self.blocked()
        wait = rejections.until_probe(lane(1).name, more=False)
        assert wait is not None
        freeze(wait)
        assert self.may_probe(rejections) == [0, 1, 2]
        assert rejections.filter_blocked(lane(1), [row(9, tenant="bad")])
        freeze(0.5)
        assert self.may_probe(rejections) == [2]

    def blocked(self) -> tuple[Rejections, list[LaneName]]:
        """Three lanes have met a place that rejects everything; and which lanes were woken."""
        woken: list[LaneName] = []
        rejections = Rejections(half, woken.extend)
        for shard in range(3):
            reject(rejections, [row(shard, tenant="bad")], lane(shard))
        return rejections, woken

    def may_probe(self, rejections: Rejections) -> list[int]:
        return [shard for shard in range(3) if not rejections.held(lane(shard))]


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
            assert len(world.broker.requests) < 200
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
    async def test_h129_a_blocked_lane_waits_on_a_loop_whose_handles_are_no_timers(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """uvloop answers a delay below half a millisecond with a handle that knows no time."""
        for module in ("sending", "rejections"):
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


def words(letters: str, count: int, first: int = 1) -> str:
    """Events of many keys: ``xa1 xb1 ... xaa1``."""
    names = ("".join(pair) for size in (1, 2) for pair in product(ascii_lowercase, repeat=size))
    return " ".join(f"{letters}{name}{first}" for name in islice(names, count))


class TestShares:
    """Some keys are bad for good, and the others must not wait for them. Bad keys begin with z."""

    @pytest.mark.parametrize("kind", [MemoryStore, MemoryLogStore])
    @pytest.mark.parametrize("shards", [1, 4])
    @pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.95])
    def test_h118_every_healthy_event_arrives(self, share: float, shards: int, kind: type[MemoryStore]) -> None:
        @in_virtual_time
        async def scenario() -> None:
            world = World(shards=shards, kind=kind)
            world.broker.reject(lambda message: message.body.startswith(b"z"))
            bad = round(400 * share)
            async with running(world.relay(pacing={"batch": 50})):
                events = [*words("z", bad).split(), *words("a", 400 - bad).split()]
                Random(7).shuffle(events)
                world.write(" ".join(events))
                before = clock.current().monotonic()
                await world.received(400 - bad)
                assert clock.current().monotonic() - before < 30
                world.write("ab2 ac2")
                await world.received(402 - bad)
                if share < 0.9:  # else the last ones that are left look like a destination that rejects everything
                    await until(lambda: len(world.statuses(Status.FAILED).split()) == bad)
            copies = " ".join(world.broker.requests).split()
            assert max(copies.count(event) for event in world.rows if event[0] == "a") == 1

        scenario()

    @pytest.mark.parametrize("tenant", [None, "t"])
    @pytest.mark.parametrize("kind", [MemoryStore, MemoryLogStore])
    def test_h119_good_keys_behind_bad_ones_are_found(self, kind: type[MemoryStore], tenant: str | None) -> None:
        """In a log the tenant has a detour: what failed before is in the lane itself, and what is fresh is not."""

        @in_virtual_time
        async def scenario() -> None:
            world = World(kind=kind)
            world.broker.reject(lambda message: message.body.startswith(b"z"))
            async with running(world.relay()):
                world.write(words("z", 30), tenant=tenant)
                await asyncio.sleep(60)
                world.write(words("zz", 60), tenant=tenant)
                world.write(words("a", 20), tenant=tenant)
                before = clock.current().monotonic()
                await world.received(20)
                assert clock.current().monotonic() - before < 600

        scenario()

    @pytest.mark.parametrize("ahead", [10, 600])
    @pytest.mark.parametrize("tenants", [(None, None), ("t", "t"), (None, "t"), ("t", None), ("t", "u")])
    @pytest.mark.parametrize("kind", [MemoryStore, MemoryLogStore])
    def test_h118_a_topic_that_rejects_everything_holds_up_no_other_one_of_the_lane(
        self, kind: type[MemoryStore], tenants: tuple[str | None, str | None], ahead: int
    ) -> None:
        bad, good = tenants

        @in_virtual_time
        async def scenario() -> None:
            world = World(kind=kind, template="{aggregate}")
            world.broker.reject(lambda message: message.topic == "bad")
            async with running(world.relay()):
                world.write(words("z", 4), topic="bad", tenant=bad)
                await asyncio.sleep(100)  # it is probed seldom by now
                world.write(words("y", ahead), topic="bad", tenant=bad)
                world.write(words("a", 20), tenant=good)
                before = clock.current().monotonic()
                await world.received(20)
                assert clock.current().monotonic() - before < 5
                assert {world.attempts(event) for event in world.rows if event[0] in "yz"} == {0}
                world.broker.stop_rejecting()
                await world.broker.received("bad", 4 + ahead)
                assert clock.current().monotonic() - before < 70, "what was put off goes as soon as it may"

        scenario()

    @pytest.mark.parametrize("kind", [MemoryStore, MemoryLogStore])
    def test_h118_a_tenant_whose_keys_are_all_bad_keeps_no_other_waiting(self, kind: type[MemoryStore]) -> None:
        @in_virtual_time
        async def scenario() -> None:
            world = World(kind=kind)
            world.broker.reject(lambda message: message.body.startswith(b"z"))
            relay = world.relay(pacing={"batch": 50})
            async with running(relay):
                world.write(words("z", 600), tenant="bad")
                world.write("a1 b1 c1", tenant="good")
                before = clock.current().monotonic()
                await world.received(3)
                for number in range(2, 40):
                    world.write(f"a{number}", tenant="good")
                    await world.received(number + 2)
                    await asyncio.sleep(1)
                assert clock.current().monotonic() - before < 45
                assert {world.attempts(event) for event in world.rows if event[0] == "z"} == {0}
                assert relay.healthy
                (trouble,) = relay.status()["troubles"].values()
                assert trouble.startswith(f"broker {TOPIC} of tenant bad rejects everything")
                world.broker.stop_rejecting()
                await world.received(len(world.rows))
            assert relay.status()["troubles"] == {}

        scenario()

    @in_virtual_time
    async def test_h132_a_topic_that_only_rejects_is_unhealthy(self) -> None:
        world = World()
        world.write(MANY)
        world.broker.reject(lambda _message: True)
        relay = world.relay()
        async with running(relay):
            await asyncio.sleep(10)
            assert relay.healthy
            await asyncio.sleep(60)
            assert not relay.healthy
            world.broker.stop_rejecting()
            await world.received(26)
            assert relay.healthy


KEYS = ["".join(letters) for letters in islice(product(ascii_lowercase, repeat=3), 150)]


@pytest.mark.parametrize("tenant", [None, "acme"])
@pytest.mark.parametrize("kind", [MemoryStore, MemoryLogStore])
def test_h118_what_is_put_off_never_passes_what_was_left_where_it_is(kind: Any, tenant: str | None) -> None:
    """More rows wait for a blocked topic than are kept at hand for its probes."""

    @in_virtual_time
    async def scenario() -> None:
        world, rejects = World(kind=kind, retry=RetryPolicy(base=1.0, cap=8.0)), asyncio.Event()
        world.broker.reject(lambda _message: rejects.is_set(), reason="no right")
        world.write("ok1", tenant=tenant)
        relay = world.relay()
        async with running(relay):
            await world.received(1)
            rejects.set()
            world.write(MANY, tenant=tenant)
            await until(lambda: relay._rejections._blocked)
            await asyncio.sleep(20)
            world.write(" ".join(f"{key}{turn}" for turn in (1, 2) for key in KEYS), tenant=tenant)
            rejects.clear()
            await until(lambda: len(world.statuses(Status.SENT).split()) == len(world.rows), seconds=200)
        sent = world.sent.split()
        assert [key for key in KEYS if sent.index(f"{key}1") > sent.index(f"{key}2")] == []

    scenario()


@pytest.mark.parametrize("kind", [MemoryStore, MemoryLogStore])
def test_h119_a_key_that_was_tried_and_has_a_new_event_does_not_keep_others_from_probing(kind: Any) -> None:
    """A log must end its batch before what waits, and the new event waits in front of all keys that were not tried."""

    @in_virtual_time
    async def scenario() -> None:
        world, rejects = World(kind=kind, retry=RetryPolicy(base=1.0, cap=8.0)), asyncio.Event()
        world.broker.reject(lambda _message: rejects.is_set(), reason="no right")
        world.write("ok1")
        relay = world.relay()
        async with running(relay):
            await world.received(1)
            rejects.set()
            world.write(MANY)
            await until(lambda: relay._rejections._blocked)
            await asyncio.sleep(5)
            (topic,) = relay._rejections._topics.values()
            tried = [*topic.places[None].keys][-1].key
            world.store.request(world.rows[f"{tried}1"], "discard")
            await until(lambda: world.status(f"{tried}1") is Status.DISCARDED)
            world.write(f"{tried}2 new1 new2 newer1")
            await asyncio.sleep(1)
            rejects.clear()
            left = {f"{tried}1"}
            await until(lambda: {*world.statuses(Status.SENT).split()} | left == {*world.rows}, seconds=60)

    scenario()


@in_virtual_time
async def test_an_outage_with_a_success_in_between_uses_up_no_delivery() -> None:
    world, rejects = World(retry=RetryPolicy(base=10.0, cap=600.0, attempts=5)), asyncio.Event()
    world.broker.reject(lambda _message: rejects.is_set(), reason="no right")
    world.write("ok1")
    events = [f"{letter}1" for letter in "abcdefghij"]
    async with running(world.relay()):
        await world.received(1)
        rejects.set()
        world.write(" ".join(events))
        await until(lambda: all(world.attempts(event) == 1 for event in events))
        rejects.clear()
        world.write("ok2")
        await world.received(2)
        rejects.set()
        await asyncio.sleep(300)
        rejects.clear()
        await until(lambda: all(world.status(event) is Status.SENT for event in events), seconds=600)


@in_virtual_time
async def test_a_failed_delivery_is_not_tried_again_because_its_topic_rejects_everything() -> None:
    world, rejects = World(retry=RetryPolicy(base=1.0, cap=8.0, attempts=1)), asyncio.Event()
    world.broker.reject(lambda it: rejects.is_set() or it.key == "k", reason="no")
    world.write("ok1")
    async with running(world.relay()):
        await world.received(1)
        world.write("k1")
        await until(lambda: world.status("k1") is Status.FAILED)
        world.write("ok2")
        await world.received(2)
        world.redrive("k1")
        await asyncio.sleep(1)
        assert world.status("k1") is Status.FAILED
        rejects.set()
        world.write(" ".join(f"{letter}1" for letter in ascii_lowercase if letter != "k"))
        await asyncio.sleep(30)
        assert (world.status("k1"), world.attempts("k1")) == (Status.FAILED, 1)
