"""One lane: what becomes of events that are rejected, unanswered, too large, or that kill their relays."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from pillarbox import clock
from pillarbox.errors import BatchMismatchError, LaneHaltedError, LeaseLostError
from pillarbox.fairness import Pace
from pillarbox.outbox import Batch, Failure, FailurePolicy, Key, Lane, Page, Row, Status
from pillarbox.sending import LARGE
from pillarbox.transport import Capabilities, Message, Outcome, Rejection, TopicsRefusedError, Verdict
from tests.memory.log import MemoryLogStore
from tests.memory.store import MemoryStore
from tests.relays import Broker, Choosy, World, freeze, in_virtual_time, running, until

OPEN = (Status.PENDING, Status.SENDING, Status.RETRYING, Status.PARKED)


class TestRejected:
    @in_virtual_time
    async def test_h43_only_the_key_of_a_rejected_event_waits(self) -> None:
        world = World()
        world.write("a1 b1 a2 b2")
        world.reject("a1")
        done = await world.relay().drain()
        assert world.sent == "b1 b2"
        assert (done.sent, done.rejected, done.dead) == (2, 1, 0)
        assert (world.status("a1"), world.status("a2")) == (Status.RETRYING, Status.PARKED)

    @in_virtual_time
    async def test_parked_events_follow_in_order_once_the_first_one_is_taken(self) -> None:
        world = World()
        world.write("a1 a2 b1")
        world.reject("a1")
        async with running(world.relay()):
            await world.received(1)
            world.write("a3 b2")
            await world.received(2)
            world.broker.stop_rejecting()
            assert await world.received(5) == "b1 b2 a1 a2 a3"
        assert world.statuses(Status.SENT) == "a1 a2 b1 a3 b2"

    @in_virtual_time
    async def test_h38_dead_after_the_last_attempt_and_redriven_by_a_person(self) -> None:
        world = World()
        world.write("a1 a2")
        world.reject("a1")
        relay = world.relay()
        async with running(relay):
            await until(lambda: world.status("a1") is Status.FAILED)
            assert (world.broker.requests, world.sent) == (["a1 a2"] * 3, "")
            assert (relay.counts.rejected, relay.counts.dead) == (3, 1)
            world.broker.stop_rejecting()
            world.redrive("a1")
            assert await world.received(2) == "a1 a2"
        assert world.statuses(Status.SENT) == "a1 a2"

    @in_virtual_time
    async def test_h43_with_skip_a_key_waits_for_the_attempts_and_then_goes_on(self) -> None:
        world = World(on_failure=FailurePolicy.SKIP)
        world.write("a1 a2")
        world.reject("a1")
        async with running(world.relay()):
            await until(lambda: world.attempts("a1") == 2)
            assert world.sent == ""
            assert await world.received(1) == "a2"
            world.write("a3")
            assert await world.received(2) == "a2 a3"
        assert world.status("a1") is Status.FAILED

    @in_virtual_time
    async def test_h44_every_event_that_is_not_done_for_is_tried_again(self) -> None:
        world = World()
        world.write("a1 b1 a2")
        world.reject("a1", "b1")
        async with running(world.relay()):
            await until(lambda: world.attempts("a1") == 2)
            assert all(stored.due_at < clock.current().monotonic() + 60 for stored in world.store._rows.values())
            world.broker.stop_rejecting()
            await world.received(3)
        assert world.statuses(*OPEN, Status.FAILED) == ""

    @in_virtual_time
    async def test_h111_what_the_destination_would_surely_reject_is_never_sent(self) -> None:
        world = World(capabilities=Capabilities(max_body_bytes=100))
        world.write("a1 b1")
        world.write("a2", size=101)  # the limit was higher when it was written
        world.write("a3 b2")
        async with running(world.relay()):
            await until(lambda: world.status("a2") is Status.FAILED)
            assert await world.received(3) == "a1 b1 b2"
        assert all("a2" not in request for request in world.broker.requests)
        assert world.status("a3") is Status.PARKED

    @in_virtual_time
    async def test_h99_a_rejection_is_written_before_anything_higher_leaves(self) -> None:
        world = World(capabilities=Capabilities(max_messages=2, numbered=True))
        lane = await world.take()
        world.write("a1 b1")
        first = await world.store.announce(lane, Batch(items=[1, 2]), settle=False)
        world.reject("a1")
        seen = []

        async def look(_producer: str, events: str) -> None:
            seen.append((events, world.statuses(Status.SENDING)))

        world.broker.before = look
        world.write("b2 c1")
        await world.worker(first).run_once()
        assert seen == [("a1 b1", "a1 b1"), ("b1 c1", "b1 c1")]  # b1 was not stored behind a1, and goes first
        assert world.status("a1") is Status.RETRYING

    @in_virtual_time
    async def test_h36_nothing_of_a_key_leaves_behind_a_rejected_one_within_a_batch(self) -> None:
        """Three requests in one batch, and the first of them has the rejection."""
        world = World()
        world.write("a1 b1 a2 b2 a3 b3")
        world.reject("a1")
        lane = await world.store.announce(await world.take(), Batch(items=[1, 2, 3, 4, 5, 6]), settle=False)
        world.broker._capabilities = Capabilities(max_messages=2)
        await world.worker(lane).run_once()
        assert world.sent == "b1 b2 b3"
        assert world.broker.requests[:2] == ["a1 b1", "b2 b3"]

    @in_virtual_time
    async def test_a_request_refused_whole_costs_the_innocent_no_attempt(self) -> None:
        world = World(capabilities=Capabilities(numbered=True))
        world.write("a1 b1 c1")

        async def refuse_whole(_producer: str, events: str) -> Outcome | None:
            return Outcome((), [Rejection(1, "no")]) if "b1" in events else None

        world.broker.before = refuse_whole
        relay = world.relay()
        async with running(relay):
            assert sorted((await world.received(2)).split()) == ["a1", "c1"]
            assert [world.attempts(event) for event in ("a1", "b1", "c1")] == [0, 1, 0]
            numbers = [message.number for message in world.broker.sent("orders.events")]
            assert min(numbers) > 3  # those of the refused request are never used again
            world.broker.before = None
            await world.received(3)
        assert world.statuses(Status.SENT) == "a1 b1 c1"

    @in_virtual_time
    @pytest.mark.parametrize("events", ["a1 b1 c1 d1", "a1 b1 b2 d1"])
    @pytest.mark.parametrize("rejected", [[Rejection(1, "too large")], []])
    async def test_h99_what_was_passed_over_is_sent_though_the_request_was_not_answered_whole(
        self, events: str, rejected: list[Rejection]
    ) -> None:
        """The second one is refused, the third one stored, and then the connection breaks."""
        world = World(capabilities=Capabilities(numbered=True))
        world.write(events)

        really_send = world.broker.send

        async def break_off(producer: str, messages: Sequence[Message]) -> Outcome:
            world.broker.send = really_send  # type: ignore[method-assign]
            assert len(world.broker._store(producer, [messages[0], messages[2]]).accepted) == 2
            return Outcome([0, 2], rejected, unfinished=Verdict.UNKNOWN, reason="the connection broke")

        world.broker.send = break_off  # type: ignore[method-assign]
        async with running(world.relay()):
            assert sorted((await world.received(4)).split()) == sorted(events.split()), "each once"
        assert world.statuses(Status.SENT) == events

    @in_virtual_time
    async def test_h104_rows_parked_when_the_batch_is_announced_are_not_lost_when_the_key_is_free_at_its_end(
        self,
    ) -> None:
        """a1 is redone in the same batch that parks a3."""
        world = World()
        world.write("a1 a2")
        world.reject("a1")
        async with running(world.relay()):
            await until(lambda: world.attempts("a1") == 1)

            async def write_meanwhile(_producer: str, events: str) -> None:
                if events == "a1 a2":
                    world.broker.before = None
                    world.write("a3 a4")

            world.broker.before = write_meanwhile
            world.broker.stop_rejecting()
            assert await world.received(4) == "a1 a2 a3 a4"
        assert world.waiting() == set()

    @in_virtual_time
    async def test_keys_of_two_tenants_are_two_keys(self) -> None:
        world = World()
        world.write("a1", tenant="acme")
        world.write("a2", tenant="ball")
        world.reject("a1")
        lane = await world.take()
        worker = world.worker(lane)
        world.broker._capabilities = Capabilities(max_messages=1)
        await worker.run_once()
        assert worker.lane.waiting == {Key("acme", "a")}
        await world.worker(worker.lane).run_once()
        assert world.sent == "a2"


class TestUnavailable:
    @in_virtual_time
    async def test_h66_an_outage_burns_no_attempt_and_ends_in_order(self) -> None:
        world = World()
        world.broker.go_away()
        relay = world.relay()
        async with running(relay):
            world.write("a1 b1 a2")
            await until(lambda: relay.status()["troubles"])
            (reason,) = relay.status()["troubles"].values()
            assert reason == "broker is unavailable: the broker is away"
            await asyncio.sleep(60)
            world.write("a3 b2")
            world.broker.come_back()
            assert await world.received(5) == "a1 b1 a2 a3 b2"
            await until(lambda: not relay.status()["troubles"])
        assert {world.attempts(event) for event in world.rows} == {0}

    @in_virtual_time
    async def test_h46_while_it_is_away_it_is_asked_seldom(self) -> None:
        world = World()
        world.write(" ".join(f"k{number}" for number in range(1, 300)))
        world.broker.go_away()
        async with running(world.relay()):
            await asyncio.sleep(60)
            assert len(world.broker.requests) < 90
            world.broker.come_back()
            await world.received(299)

    @in_virtual_time
    async def test_people_can_see_what_holds_a_lane_back(self) -> None:
        world = World()
        world.write("a1")
        world.broker.go_away()
        name = (await world.take("nobody", lease=0.001)).name
        async with running(world.relay()):
            await until(lambda: world.store.trouble_of(name))
            world.broker.come_back()
            await world.received(1)
            await until(lambda: world.store.trouble_of(name) is None)

    @in_virtual_time
    async def test_a_relay_that_stops_meanwhile_sends_nothing_twice_that_was_taken(self) -> None:
        world = World(capabilities=Capabilities(max_messages=1))
        world.write("a1 b1 a2")
        lane = await world.store.announce(await world.take(), Batch(items=[1, 2, 3]), settle=False)

        async def go_away(_producer: str, events: str) -> None:
            if events == "b1":
                world.broker.go_away()

        world.broker.before = go_away
        await world.worker(lane).run_once()
        await world.store.release("r1", [lane])
        world.broker.before = None
        world.broker.come_back()
        await world.relay("r2").drain()
        assert world.sent == "a1 b1 a2"

    @in_virtual_time
    async def test_what_is_refused_while_the_destination_is_away_is_told_once(self) -> None:
        """Only what is announced has happened; a batch whose topics cannot be opened is planned again."""
        world = World()
        world.broker = Away("a1", capabilities=Capabilities(opens=True))
        world.write("a1 b1")
        relay = world.relay()
        async with running(relay):
            await world.received(1)
            assert (relay.counts.rejected, world.attempts("a1")) == (1, 1)


class Away(Choosy):
    """For the first three times that it is asked."""

    asked = 0

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
        self.asked += 1
        if self.asked <= 3:
            raise ConnectionRefusedError("nobody there")
        return await super().open(producer, topics)


class TestUnknown:
    @in_virtual_time
    async def test_h37_an_answer_that_does_not_come_is_neither_success_nor_failure(self) -> None:
        world = World()
        world.write("a1 b1 a2")
        world.broker.lose_answers()
        async with running(world.relay()):
            await world.received(6)
        assert world.sent == "a1 b1 a2 a1 b1 a2"  # at least once, and the first copies are in order
        assert {world.attempts(event) for event in world.rows} == {0}

    @in_virtual_time
    async def test_h34_a_second_copy_has_the_same_event_id(self) -> None:
        world = World()
        world.write("a1")
        world.broker.lose_answers()
        async with running(world.relay()):
            first, second = await world.broker.received("orders.events", 2)
        assert first.headers["event_id"] == second.headers["event_id"]

    @pytest.mark.parametrize("lost", [1, 2, 5])
    def test_h34_a_destination_that_deduplicates_has_one_copy(self, lost: int) -> None:
        @in_virtual_time
        async def scenario() -> None:
            world = World(capabilities=Capabilities(numbered=True))
            world.write("a1 b1 a2")
            world.broker.lose_answers(lost)
            async with running(world.relay()):
                await until(lambda: world.statuses(Status.SENT) == "a1 b1 a2")
                world.write("a3")
                assert await world.received(4) == "a1 b1 a2 a3"

        scenario()

    @in_virtual_time
    async def test_what_was_answered_before_the_connection_broke_is_not_sent_again(self) -> None:
        world = World()
        world.write("a1 b1 a2")

        async def half_way(_producer: str, events: str) -> Outcome | None:
            world.broker.before = None
            await world.broker.send("", [message for message in messages if message.key == "b"])
            world.broker.requests.pop()
            return Outcome([1], unfinished=Verdict.UNKNOWN, reason="reset") if events else None

        lane = await world.take()
        page = await world.store.poll(lane, limit=10)
        messages = [Message(row.topic, row.key, row.body, row.headers) for row in page.fresh]
        world.broker.before = half_way
        await world.store.release("r1", [lane])
        async with running(world.relay()):
            await world.received(3)
        assert world.broker.requests == ["a1 b1 a2", "a1 a2"]


class TestLease:
    @in_virtual_time
    async def test_an_owner_that_comes_back_sends_only_what_was_not_acknowledged(self) -> None:
        world = World()
        world.write("a1 b1")
        first = world.worker(await world.take("r1"))
        await first.turn()
        assert world.sent == "a1 b1"
        await asyncio.sleep(3.01)
        again = world.worker(await world.take("r1"), acknowledged=first.acknowledged)
        await again.run_once()
        assert world.sent == "a1 b1"
        assert world.statuses(Status.SENT) == "a1 b1"

    @in_virtual_time
    async def test_h102_what_was_acknowledged_before_a_failover_does_not_stand_for_other_events(self) -> None:
        """The database that took over knows nothing of the batch, and has given its numbers and rows to others."""
        lost, world = World(), World()
        lost.write("a1")
        before = lost.worker(await lost.take("r1"))
        await before.turn()
        world.write("b1")
        after = world.worker(await _after_deaths(world, 1), acknowledged=before.acknowledged)
        await after.run_once()
        assert before.acknowledged.keys() == {1}
        assert world.sent == "b1"

    @in_virtual_time
    async def test_h32_an_owner_that_was_replaced_settles_nothing(self) -> None:
        world = World()
        world.write("a1")
        sleeper = world.worker(await world.take("sleeper"))
        await sleeper.turn()
        await asyncio.sleep(3.01)
        successor = world.worker(await world.take("successor"))
        assert world.sent == "a1"
        with pytest.raises(LeaseLostError):
            await sleeper.run_once()
        assert world.status("a1") is Status.SENDING
        await successor.run_once()
        assert world.status("a1") is Status.SENT

    @in_virtual_time
    async def test_h32_an_owner_that_was_replaced_announces_and_amends_nothing(self) -> None:
        world = World()
        world.write("a1")
        sleeper = world.worker(await world.take("sleeper"))
        await asyncio.sleep(3.01)
        lane = await world.take("successor")
        with pytest.raises(LeaseLostError):
            await sleeper.turn()
        assert (world.sent, world.status("a1")) == ("", Status.PENDING)
        announced = await world.store.announce(lane, Batch(items=[1]), settle=False)
        world.reject("a1")
        with pytest.raises(LeaseLostError):
            await world.worker(replace(announced, epoch=announced.epoch - 1)).run_once()
        assert world.status("a1") is Status.SENDING

    @in_virtual_time
    async def test_h31_after_the_local_deadline_nothing_is_sent_or_written(self) -> None:
        world = World()
        world.write("a1")
        worker = world.worker(await world.take(lease=100.0), seconds=2.0)
        await asyncio.sleep(2.0)
        with pytest.raises(LeaseLostError):
            await worker.turn()
        assert (world.broker.requests, world.status("a1")) == ([], Status.PENDING)

    @in_virtual_time
    async def test_h116_an_owner_that_was_frozen_within_a_batch_sends_no_more_of_it(self) -> None:
        world = World(capabilities=Capabilities(max_messages=1))
        world.write("a1 a2")
        lane = await world.store.announce(await world.take(lease=100.0), Batch(items=[1, 2]), settle=False)

        async def freeze_once(_producer: str, _events: str) -> None:
            freeze(5.0)

        world.broker.before = freeze_once
        with pytest.raises(LeaseLostError):
            await world.worker(lane, seconds=2.0).run()
        assert (world.broker.requests, world.statuses(Status.SENDING)) == (["a1"], "a1 a2")

    @in_virtual_time
    async def test_h116_a_request_ends_before_the_lease_does(self) -> None:
        world = World()
        world.write("a1")
        world.broker.before = _hang
        worker = world.worker(await world.take(lease=100.0), seconds=2.0)
        started = clock.current().monotonic()
        with pytest.raises(LeaseLostError):
            await worker.run()
        assert clock.current().monotonic() - started == pytest.approx(2.0, abs=0.2)

    @in_virtual_time
    async def test_a_slow_request_may_go_on_while_the_lease_is_renewed(self) -> None:
        world = World()
        world.write("a1")

        async def slow(_producer: str, _events: str) -> None:
            await asyncio.sleep(8)

        world.broker.before = slow
        async with running(world.relay()):
            await world.received(1)
        assert world.broker.requests == ["a1"]

    @in_virtual_time
    async def test_h33_a_lane_that_was_lost_gives_its_request_up_at_once(self) -> None:
        world = World()
        world.write("a1")
        world.broker.before = _hang
        worker = world.worker(await world.take(lease=100.0), seconds=50.0)
        running = asyncio.ensure_future(worker.run())
        await until(lambda: world.broker.requests)
        worker.lose()
        async with asyncio.timeout(0.1):
            await running
        assert world.status("a1") is Status.SENDING


class TestRecovery:
    @in_virtual_time
    async def test_h103_a_successor_sends_what_was_announced_before_anything_else(self) -> None:
        world = World()
        world.write("a1 b1")
        await world.store.announce(await world.take("dead"), Batch(items=[1, 2]), settle=False)
        world.write("a2")
        world.store.pause_tenant("nobody")
        async with running(world.relay()):
            assert await world.received(3) == "a1 b1 a2"

    @in_virtual_time
    async def test_h103_a_batch_that_cannot_be_rebuilt_halts_the_lane(self) -> None:
        world = World()
        world.write("a1 b1")
        await world.store.announce(await world.take("dead"), Batch(items=[1, 2]), settle=False)
        world.store._move(2, Status.DISCARDED)  # by hand
        await asyncio.sleep(4)
        with pytest.raises(BatchMismatchError):
            await world.worker(await world.take()).run_once()
        assert world.sent == ""

    @in_virtual_time
    async def test_h07_a_database_that_went_back_in_time_halts_the_lane(self) -> None:
        world = World(capabilities=Capabilities(numbered=True))
        world.write("a1")
        before = copy.deepcopy(world.store)
        world.write("a2 a3")
        await world.relay().drain()
        world.store = before
        world.write("b1")  # the numbers of a2 and a3 are given to others
        with pytest.raises(LaneHaltedError, match="the database went back in time"):
            await world.worker(await world.take()).run_once()
        assert world.sent == "a1 a2 a3"

    @in_virtual_time
    async def test_h07_also_when_it_is_found_out_by_a_successor(self) -> None:
        world = World(capabilities=Capabilities(numbered=True))
        world.write("a1 a2 a3")
        before = copy.deepcopy(world.store)
        await world.relay().drain()
        world.store = before
        lane = await world.store.announce(await world.take("dead"), Batch(items=[1]), settle=False)
        with pytest.raises(LaneHaltedError, match="the database went back in time"):
            await world.worker(lane).run_once()

    @in_virtual_time
    async def test_a_destination_that_forgets_what_it_says_it_had_halts_the_lane(self) -> None:
        world = World(capabilities=Capabilities(numbered=True))
        world.write("a1")
        lane = await world.store.announce(await world.take(), Batch(items=[1]), settle=False)
        world.broker._highest[f"memory/{lane}", "orders.events"] = 1

        async def stores_it_again(_producer: str, _events: str) -> Outcome:
            return Outcome([0])

        world.broker.before = stores_it_again
        with pytest.raises(LaneHaltedError, match="is deduplication on"):
            await world.worker(lane).run_once()

    @in_virtual_time
    async def test_several_topics_of_a_lane_are_recovered_each_by_its_own_last_number(self) -> None:
        world = World(capabilities=Capabilities(numbered=True))
        world.write("a1")
        world.write("b1", topic="others")
        world.write("a2")
        world.write("b2", topic="others")
        lane = await world.store.announce(await world.take("dead"), Batch(items=[1, 2, 3, 4]), settle=False)
        items = await world.store.rebuild(lane)
        await world.broker.send(
            f"memory/{lane}", [Message(row.topic, row.key, row.body, row.headers, n) for n, row in items[:3]]
        )
        async with running(world.relay()):
            await until(lambda: world.statuses(Status.SENT) == "a1 b1 a2 b2")
        assert world.sent == "a1 a2"
        assert [message.body for message in world.broker.sent("others")] == [b"b1", b"b2"]


class Settled(MemoryStore):
    """Somebody takes the lane over and settles its batch while it is read again."""

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        self._lanes[lane.name].epoch += 1
        raise BatchMismatchError("it had 2 rows and has 0 now")


@in_virtual_time
async def test_h32_a_batch_that_its_next_owner_has_settled_is_no_reason_to_halt() -> None:
    world = World(kind=Settled)
    world.write("a1 a2")
    lane = await world.take()
    announced = await world.store.announce(lane, Batch(items=[1, 2]), settle=False)
    with pytest.raises(LeaseLostError):
        await world.worker(announced).run()


async def _never(_messages: Sequence[Message]) -> Any:
    await asyncio.Event().wait()


def _raises(error: BaseException) -> Callable[[Sequence[Message]], Any]:
    async def fail(_messages: Sequence[Message]) -> Any:
        raise error

    return fail


def _answers(outcome: Callable[[int], Any]) -> Callable[[Sequence[Message]], Any]:
    async def answer(messages: Sequence[Message]) -> Any:
        return outcome(len(messages))

    return answer


WRONG: dict[str, Callable[[Sequence[Message]], Any]] = {
    "raises ValueError": _raises(ValueError("password=swordfish")),
    "raises MemoryError": _raises(MemoryError()),
    "raises CancelledError": _raises(asyncio.CancelledError()),
    "never answers": _never,
    "returns None": _answers(lambda _count: None),
    "names another message": _answers(lambda count: Outcome([count])),
    "says nothing": _answers(lambda _count: Outcome(())),
    "names a message twice": _answers(lambda _count: Outcome([0, 0])),
    "accepts and rejects": _answers(lambda _count: Outcome([0], [Rejection(0, "no")])),
    "names a fraction": _answers(lambda _count: Outcome([0.0])),  # type: ignore[list-item]
    "rejects with an error": _answers(lambda _count: Outcome((), [Rejection(0, ValueError())])),  # type: ignore[arg-type]
    "has a verdict of its own": _answers(lambda _count: Outcome((), unfinished="unknown")),  # type: ignore[arg-type]
    "gives an error as reason": _answers(lambda _count: Outcome((), (), (), Verdict.UNKNOWN, OSError())),  # type: ignore[arg-type]
    "answers with no indexes": _answers(lambda _count: Outcome(None)),  # type: ignore[arg-type]
}


class Buggy(Choosy):
    """A broker whose client has a bug that one event brings about."""

    def __init__(self, event: str, wrong: Callable[[Sequence[Message]], Any], **capabilities: Any) -> None:
        super().__init__(capabilities=Capabilities(**capabilities))
        self.event, self.wrong = event, wrong
        self.mended = False

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        if not self.mended and any(message.body.decode() == self.event for message in messages):
            self.requests.append(" ".join(message.body.decode() for message in messages))
            answer: Outcome = await self.wrong(messages)
            return answer
        return await super().send(producer, messages)


class TestBugsOfTransports:
    @pytest.mark.parametrize("numbered", [False, True], ids=["plain", "numbered"])
    @pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
    def test_h120_only_the_event_that_brings_a_bug_about_fails(
        self, wrong: Callable[[Sequence[Message]], Any], numbered: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        @in_virtual_time
        async def scenario() -> None:
            world = World(kind=MemoryLogStore)
            world.broker = broker = Buggy("x1", wrong, numbered=numbered)
            world.write("a1 b1 x1 c1 x2 d1")
            relay = world.relay()
            async with running(relay):
                assert sorted((await world.received(4)).split()) == ["a1", "b1", "c1", "d1"]
                await until(lambda: world.status("x1") is Status.FAILED)
                world.write("e1 a2")
                await world.received(6)
                broker.mended = True
                world.redrive("x1")
                await world.received(8)
            assert world.sent.split()[-2:] == ["x1", "x2"]
            copies = " ".join(broker.requests).split()
            assert max(copies.count(event) for event in ("a1", "b1", "c1", "d1", "e1", "a2")) <= 2
            assert relay.counts.rejected == 3

        scenario()
        bugs = [record for record in caplog.records if getattr(record, "event", "") == "transport.bug"]
        assert len([record for record in bugs if record.levelname == "ERROR"]) == (wrong is not _never)
        assert all("bug in transport broker: " in record.message for record in bugs)
        assert "swordfish" not in caplog.text

    @in_virtual_time
    async def test_h120_a_transport_that_never_works_costs_no_attempts(self) -> None:
        world = World()
        world.broker.before = lambda _producer, _events: WRONG["raises ValueError"](())
        world.write("a1 b1 c1 d1 e1 f1")
        relay = world.relay()
        async with running(relay):
            await asyncio.sleep(60)
            assert {world.attempts(event) for event in world.rows} == {0}
            (trouble,) = relay.status()["troubles"].values()
            assert "rejects everything: bug in transport broker: ValueError: password=***" in trouble
            world.broker.before = None
            await world.received(6)

    @in_virtual_time
    async def test_an_outage_in_which_nothing_is_answered_costs_no_attempts(self) -> None:
        world = World(capabilities=Capabilities(timeout=5.0))
        world.write("a1 b1 c1 a2")

        async def hang(_producer: str, _events: str) -> None:
            await asyncio.Event().wait()

        world.broker.before = hang
        async with running(world.relay()):
            await asyncio.sleep(200)
            assert {world.attempts(event) for event in world.rows} == {0}
            world.broker.before = None
            await world.received(4)
        assert world.sent.index("a1") < world.sent.index("a2")

    @in_virtual_time
    async def test_h120_an_event_that_the_transport_never_answers_for_fails(self) -> None:
        """As a client does that has a time limit of its own, and says so."""
        world = World(kind=MemoryLogStore)

        async def unanswered(_producer: str, events: str) -> Outcome | None:
            if "x1" in events.split():
                raise TimeoutError("no answer from the server")
            return None

        world.broker.before = unanswered
        world.write("a1 x1 b1 x2 c1")
        async with running(world.relay()):
            assert sorted((await world.received(3)).split()) == ["a1", "b1", "c1"]
            await until(lambda: world.status("x1") is Status.FAILED)
        assert world.status("x2") is Status.PARKED

    @in_virtual_time
    async def test_h120_preflight_may_have_a_bug_too(self) -> None:
        class Strict(Choosy):
            def preflight(self, message: Message) -> str | None:
                if message.body.decode().strip() == "x1":
                    raise KeyError("size")
                return None

        world = World(kind=MemoryLogStore)
        world.broker = Strict()
        world.write("a1 x1 b1")
        async with running(world.relay()):
            assert await world.received(2) == "a1 b1"
            await until(lambda: world.status("x1") is Status.FAILED)

    @in_virtual_time
    async def test_h120_a_topic_whose_opening_has_a_bug_holds_up_no_other(self) -> None:
        class Picky(Choosy):
            async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
                if "strange" in topics:
                    raise KeyError("strange")
                return await super().open(producer, topics)

        world = World(kind=MemoryLogStore)
        world.broker = Picky(capabilities=Capabilities(opens=True))
        world.write("x1", topic="strange")
        world.write("a1 b1")
        async with running(world.relay()):
            assert await world.received(2) == "a1 b1"
        assert world.attempts("x1") == 0

    @pytest.mark.parametrize("wrong", ["cancels", "hangs", "refuses another topic", "opens nothing"])
    def test_h120_a_topic_whose_opening_brings_a_bug_about_holds_up_no_other(self, wrong: str) -> None:
        class Picky(Broker):
            async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
                if "strange" not in topics:
                    return await super().open(producer, topics)
                if wrong == "cancels":
                    raise asyncio.CancelledError
                if wrong == "hangs":
                    await asyncio.Event().wait()
                if wrong == "refuses another topic":
                    raise TopicsRefusedError({"persistent://strange": "no right"})
                return None  # type: ignore[return-value]

        @in_virtual_time
        async def scenario() -> None:
            world = World(kind=MemoryLogStore)
            world.broker = Picky(Capabilities(numbered=True))
            world.write("x1", topic="strange")
            world.write("a1 b1")
            async with running(world.relay()):
                assert await world.received(2) == "a1 b1"
            assert world.attempts("x1") == 0

        scenario()

    @pytest.mark.parametrize("refusal", [True, ValueError("too long"), asyncio.CancelledError])
    def test_h120_what_preflight_must_not_answer_fails_its_event_only(self, refusal: Any) -> None:
        class Strange(Broker):
            def preflight(self, message: Message) -> str | None:
                if message.body != b"x1":
                    return None
                if isinstance(refusal, type):
                    raise refusal
                answer: str = refusal
                return answer

        @in_virtual_time
        async def scenario() -> None:
            world = World(kind=MemoryLogStore)
            world.broker = Strange()
            world.write("a1 x1 b1")
            async with running(world.relay()):
                assert await world.received(2) == "a1 b1"
                await until(lambda: world.status("x1") is Status.FAILED)

        scenario()

    @in_virtual_time
    async def test_a_rejection_without_a_reason_counts(self) -> None:
        world = World(kind=MemoryLogStore)

        async def reject(_producer: str, events: str) -> Outcome | None:
            found = events.split()
            if "x1" not in found:
                return None
            at = found.index("x1")
            return Outcome([index for index in range(len(found)) if index != at], [Rejection(at, "")])

        world.broker.before = reject
        world.write("a1 x1 b1")
        async with running(world.relay()):
            await until(lambda: world.status("x1") is Status.FAILED)
        assert world.attempts("x1") == 3
        assert world.statuses(Status.SENT) == "a1 b1"

    @in_virtual_time
    async def test_what_a_destination_cannot_take_now_is_offered_again_and_costs_no_attempt(self) -> None:
        world = World(kind=MemoryLogStore)
        offered: list[float] = []

        async def busy(_producer: str, events: str) -> Outcome | None:
            late = [index for index, event in enumerate(events.split()) if event.startswith("x")]
            if not late or len(offered) == 5:
                return None
            offered.append(asyncio.get_running_loop().time())
            others = [index for index in range(len(events.split())) if index not in late]
            return Outcome(others, [Rejection(index, "busy", retry_after=10.0) for index in late])

        world.broker.before = busy
        world.write(" ".join(f"x{number}" for number in range(30)))  # evidence enough, if they were rejections
        world.write("a1 b1")
        async with running(world.relay()):
            await until(lambda: world.statuses(Status.SENT) == "a1 b1")
            assert {world.attempts(event) for event in world.rows} == {0}
            assert {world.status(event) for event in world.rows} - {Status.SENT} <= {Status.RETRYING, Status.PARKED}
            await until(lambda: len(world.statuses(Status.SENT).split()) == 32)
        assert all(later - earlier >= 10.0 for earlier, later in pairwise(offered))

    @in_virtual_time
    async def test_rejections_that_stand_alone_count_however_many_there_are(self) -> None:
        world = World(kind=MemoryLogStore)

        async def reject(_producer: str, events: str) -> Outcome:
            return Outcome((), [Rejection(index, "no", alone=True) for index in range(len(events.split()))])

        world.broker.before = reject
        world.write(" ".join(f"x{number}" for number in range(30)))
        async with running(world.relay()):
            await until(lambda: {world.status(event) for event in world.rows} == {Status.FAILED}, seconds=600)
        assert {world.attempts(event) for event in world.rows} == {3}

    @in_virtual_time
    async def test_h120_a_numbered_event_that_is_stored_before_the_bug_shows_stops_no_other(self) -> None:
        """What was pushed is asked for by the event before it."""
        world = World(kind=MemoryLogStore)

        class Late(Buggy):
            async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
                outcome = await Choosy.send(self, producer, messages)
                if any(message.body.decode() == self.event for message in messages):
                    raise ValueError("cannot read the answer")
                return outcome

        world.broker = Late("x1", _never, numbered=True)
        world.write("a1 b1 x1")
        async with running(world.relay()):
            await until(lambda: world.status("x1") is Status.FAILED)
            world.write("c1")
            await until(lambda: world.status("c1") is Status.SENT)
        assert [world.status(event) for event in ("a1", "b1")] == [Status.SENT] * 2

    @in_virtual_time
    async def test_h120_a_deadly_batch_with_an_event_that_is_never_answered_goes_on(self) -> None:
        world = World()
        world.broker = Buggy("x1", _never)
        world.write("x1 a1 b1")
        worker = world.worker(await _after_deaths(world, 3))
        running = asyncio.ensure_future(worker.run())
        assert sorted((await world.received(2)).split()) == ["a1", "b1"]
        await until(lambda: world.status("x1") is Status.RETRYING)
        worker.stop()
        await running

    @in_virtual_time
    async def test_h120_a_deadly_numbered_batch_with_an_event_that_is_stored_before_the_bug_shows_goes_on(self) -> None:
        """It is asked for before it is blamed: else a redrive would send it again under another number."""
        world = World()

        class Late(Buggy):
            async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
                outcome = await Choosy.send(self, producer, messages)
                if outcome.accepted and not outcome.duplicates and messages[0].body.decode() == self.event:
                    raise ValueError("cannot read the answer")
                return outcome

        world.broker = Late("x1", _never, numbered=True)
        world.write("x1 a1")
        worker = world.worker(await _after_deaths(world, 3))
        await worker.run_once()
        assert world.statuses(Status.SENT) == "x1 a1"
        assert world.sent == "x1 a1"

    @pytest.mark.parametrize("wrong", [TimeoutError("busy"), None])
    def test_h120_a_single_topic_whose_opening_is_not_answered_lets_its_lane_rest(
        self, wrong: Exception | None
    ) -> None:
        class Silent(Broker):
            opened = 0

            async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
                self.opened += 1
                if self.mended:
                    return await super().open(producer, topics)
                if wrong is not None:
                    raise wrong
                await asyncio.Event().wait()
                return {}

            mended = False

        @in_virtual_time
        async def scenario() -> None:
            world = World(kind=MemoryLogStore)
            world.broker = broker = Silent(Capabilities(opens=True, timeout=2.0))
            world.write("a1")
            async with running(relay := world.relay()):
                await until(lambda: relay.status()["troubles"])
                await asyncio.sleep(60)
                assert broker.opened < 80
                broker.mended = True
                assert await world.received(1) == "a1"
            assert world.attempts("a1") == 0

        scenario()

    @in_virtual_time
    async def test_h120_a_topic_that_cannot_be_opened_makes_its_relay_unhealthy(self) -> None:
        class Picky(Broker):
            mended = False

            async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
                if not self.mended:
                    raise ValueError("a bug")
                return await super().open(producer, topics)

        world = World(kind=MemoryLogStore)
        world.broker = broker = Picky(Capabilities(opens=True))
        world.write("a1")
        async with running(relay := world.relay()):
            await until(lambda: world.status("a1") is Status.RETRYING)
            assert relay.healthy
            await until(lambda: not relay.healthy, seconds=60)
            broker.mended = True
            assert await world.received(1) == "a1"
            await until(lambda: relay.healthy)

    @in_virtual_time
    async def test_h120_a_request_that_does_not_end_when_it_is_cancelled_is_told(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        world, ends = World(kind=MemoryLogStore, capabilities=Capabilities(timeout=2.0)), asyncio.Event()

        async def cling(_producer: str, _events: str) -> None:
            world.broker.before = None
            try:
                await asyncio.sleep(1_000)
            finally:
                await ends.wait()

        world.broker.before = cling
        world.write("a1")
        async with running(relay := world.relay()):
            await until(lambda: "does not end" in str(relay.status()["troubles"]), seconds=60)
            assert "was cancelled after 2 s and does not end" in caplog.text
            ends.set()
            assert await world.received(1) == "a1"
            await until(lambda: not relay.status()["troubles"])

    @in_virtual_time
    async def test_h120_an_error_that_no_exception_is_fails_its_event_only(self) -> None:
        class PanicError(BaseException):
            pass

        async def panic(_messages: Sequence[Message]) -> None:
            raise PanicError

        world = World(kind=MemoryLogStore)
        world.broker = Buggy("x1", panic)
        world.write("a1 x1 b1")
        async with running(world.relay()):
            assert await world.received(2) == "a1 b1"
            await until(lambda: world.status("x1") is Status.FAILED)

    @in_virtual_time
    async def test_what_was_acknowledged_is_known_though_the_lane_was_lost_once_more(self) -> None:
        world = World()
        world.write("a1")
        first = world.worker(await world.take("r1"))
        await first.turn()
        await asyncio.sleep(3.01)
        again = world.worker(await world.take("r1"), acknowledged=first.acknowledged)
        assert again.acknowledged == first.acknowledged != {}

    @pytest.mark.parametrize("action", ["discard", "redrive"])
    def test_h120_what_people_ask_for_an_event_on_its_way_is_done(self, action: str) -> None:
        @in_virtual_time
        async def scenario() -> None:
            world = World(kind=MemoryLogStore)

            async def lost(_producer: str, _events: str) -> Outcome:
                return Outcome((), unfinished=Verdict.UNAVAILABLE, reason="closed for today")

            world.broker.before = lost
            world.write("a1 b1")
            async with running(world.relay()):
                await until(lambda: world.broker.requests)
                assert world.status("a1") is Status.SENDING
                world.store.request(world.rows["a1"], action)
                (lane,) = world.store._lanes.values()
                await until(lambda: not lane.requests)
                assert (world.status("a1") is Status.DISCARDED) is (action == "discard")
                world.broker.before = None
                await until(lambda: world.status("b1") is Status.SENT)
            assert world.attempts("a1") == 0
            assert ("a1" in world.sent) is (action == "redrive")

        scenario()

    @in_virtual_time
    async def test_h121_a_relay_that_was_only_slow_does_not_make_its_batch_deadly(self) -> None:
        """Two relays whose loops are blocked for longer than their leases, whenever they send a certain event."""
        world = World(kind=MemoryLogStore)
        tries: list[int] = []

        async def block(_producer: str, events: str) -> None:
            tries.append(next(iter(world.store._lanes.values())).tries)
            if "x1" in events:
                freeze(4.0)

        world.broker.before = block
        world.write("a1 x1 b1")
        async with running(world.relay("r1"), world.relay("r2")):
            await until(lambda: world.statuses(Status.SENT) == "a1 x1 b1")
        assert max(tries) <= 1
        assert world.sent.split().count("x1") <= 2


class TestDeadlyBatches:
    @in_virtual_time
    async def test_h111_a_batch_that_three_relays_died_of_is_sent_one_by_one(self) -> None:
        world = World()
        world.write("a1 b1 a2")
        lane = await _after_deaths(world, 3)
        assert lane.tries == 3
        attempts = []

        async def look(_producer: str, events: str) -> None:
            attempts.append((events, world.attempts(events)))

        world.broker.before = look
        worker = world.worker(lane)
        await worker.run_once()
        assert attempts == [("a1", 1), ("b1", 1), ("a2", 1)]  # counted before it goes
        assert world.statuses(Status.SENT) == "a1 b1 a2"

    @in_virtual_time
    async def test_h111_the_one_that_kills_is_dead_in_the_end_and_the_others_get_through(self) -> None:
        world = World()
        world.write("a1 b1 a2")
        for _ in range(10):
            if world.status("a1") is Status.FAILED:
                break
            lane = await _after_deaths(world, 0 if world.broker.requests else 3)

            async def kill(_producer: str, events: str) -> None:
                if "a1" in events:
                    raise KeyboardInterrupt  # nothing in us catches it, as nothing catches kill -9

            world.broker.before = kill
            try:
                await world.worker(lane).run_once()
            except KeyboardInterrupt:
                await asyncio.sleep(4)
        assert world.status("a1") is Status.FAILED
        assert world.sent == "b1"
        assert world.status("a2") is Status.PARKED
        assert world.broker.requests.count("a1") == 3

    @in_virtual_time
    async def test_h111_those_that_are_taken_before_the_one_that_kills_are_innocent(self) -> None:
        world = World()
        world.write("a1 b1 c1 d1")
        lane = await _after_deaths(world, 3)

        async def kill(_producer: str, events: str) -> None:
            if "c1" in events:
                raise KeyboardInterrupt  # nothing in us catches it, as nothing catches kill -9

        world.broker.before = kill
        while world.status("c1") is not Status.FAILED:
            try:
                await world.worker(lane).run_once()
            except KeyboardInterrupt:
                await asyncio.sleep(4)
                lane = await world.take()
        assert world.statuses(Status.SENT) == "a1 b1 d1"
        assert world.broker.requests.count("c1") == 3

    @in_virtual_time
    async def test_h111_where_progress_is_remembered_requests_grow_again(self) -> None:
        world = World(capabilities=Capabilities(numbered=True))
        world.write("a1 b1 a2 c1 d1 e1 f1 g1 h1")
        lane = await _after_deaths(world, 3)
        await world.worker(lane).run_once()
        assert world.broker.requests == ["a1", "b1 a2", "c1 d1 e1 f1", "g1 h1"]
        assert world.statuses(Status.SENT) == "a1 b1 a2 c1 d1 e1 f1 g1 h1"

    @in_virtual_time
    async def test_h111_the_one_that_kills_is_found_in_requests_that_grow(self) -> None:
        world = World(capabilities=Capabilities(numbered=True))
        world.write("a1 b1 c1 d1 e1 f1 g1 h1")
        lane = await _after_deaths(world, 3)

        async def kill(_producer: str, events: str) -> None:
            if "f1" in events:
                raise KeyboardInterrupt  # nothing in us catches it, as nothing catches kill -9

        world.broker.before = kill
        while world.status("f1") is not Status.FAILED:
            try:
                await world.worker(lane).run_once()
            except KeyboardInterrupt:
                await asyncio.sleep(4)
                lane = await world.take()
        assert world.sent == "a1 b1 c1 d1 e1 g1 h1"
        assert world.statuses(Status.SENT) == "a1 b1 c1 d1 e1 g1 h1", "once each, and nobody else is blamed"
        assert world.broker.requests.count("f1") == 3

    @in_virtual_time
    async def test_h111_an_outage_within_it_sends_nothing_twice_that_was_answered(self) -> None:
        world = World()
        world.write("a1 b1")
        lane = await _after_deaths(world, 3)

        async def away(_producer: str, events: str) -> Outcome | None:
            if events == "b1" and world.broker.requests.count("b1") < 6:
                return Outcome((), unfinished=Verdict.UNAVAILABLE, reason="away")
            return None

        world.broker.before = away
        await world.store.release("r1", [lane])
        async with running(world.relay()):
            await until(lambda: world.statuses(Status.SENT) == "a1 b1")
        assert world.sent == "a1 b1"

    @in_virtual_time
    async def test_h111_an_outage_takes_the_attempt_back(self) -> None:
        world = World()
        world.write("a1")
        lane = await _after_deaths(world, 3)
        world.broker.go_away()
        await world.worker(lane).run_once()
        assert world.attempts("a1") == 0
        await world.store.release("r1", [lane])
        world.broker.come_back()
        await world.relay().drain()
        assert world.statuses(Status.SENT) == "a1"

    @in_virtual_time
    async def test_a_clean_release_is_no_death(self) -> None:
        world = World()
        world.write("a1")
        lane = await world.store.announce(await world.take(), Batch(items=[1]), settle=False)
        for _ in range(5):
            await world.store.release("r1", [lane])
            lane = await world.take()
        assert lane.tries == 0


class TestSizes:
    @in_virtual_time
    async def test_h67_a_turn_takes_nothing_more_into_memory_once_it_has_its_bytes(self) -> None:
        world = World()
        world.write(" ".join(f"k{number}" for number in range(1, 41)), size=10_000)
        worker = world.worker(await world.take())
        worker.pace = Pace(max_bytes=65_536)
        await worker.turn()
        assert len(world.broker.sent("orders.events")) == 7
        while await worker.turn():
            pass
        assert len(world.broker.sent("orders.events")) == 40

    @pytest.mark.parametrize("kind", [MemoryStore, MemoryLogStore])
    @in_virtual_time
    async def test_a_lane_does_not_fall_asleep_before_a_row_that_does_not_fit(self, kind: type[MemoryStore]) -> None:
        world = World(kind=kind)
        for number in range(1, 21):
            world.write(f"small{number}", size=10_000)
            world.write(f"large{number}", size=60_000)
        worker = world.worker(await world.take())
        worker.pace = Pace(max_bytes=65_536)
        turns = 1
        while await worker.turn():
            turns += 1
        assert len(world.broker.sent("orders.events")) == 40
        assert turns <= 20 + 1  # one in vain: nobody knows what is behind a full page

    @in_virtual_time
    async def test_h61_a_relay_shares_its_window_among_its_lanes(self) -> None:
        world = World(shards=4)
        world.write(" ".join(f"k{number}x1" for number in range(1, 201)), size=20_000)
        async with running(world.relay(pacing={"window_bytes": 400_000})):
            await world.received(200)
        assert max(len(request.split()) for request in world.broker.requests) <= 5

    @in_virtual_time
    async def test_h111_a_message_larger_than_any_before_goes_alone(self) -> None:
        world = World()
        world.write("a1")
        world.write("b1", size=LARGE + 1)
        world.write("a2")
        world.write("c1", size=LARGE + 1)
        async with running(world.relay()):
            await world.received(4)
        assert world.broker.requests == ["a1", "b1", "a2 c1"]

    @in_virtual_time
    async def test_h111_a_large_one_that_breaks_the_connection_takes_nobody_with_it(self) -> None:
        """What is before it has arrived, and in its request there is nobody else."""
        world = World()
        world.write("a1 b1")
        world.write("b2", size=LARGE + 1)
        world.write("a2")

        async def reset(_producer: str, events: str) -> Outcome | None:
            return Outcome((), unfinished=Verdict.UNKNOWN, reason="connection reset") if "b2" in events else None

        world.broker.before = reset
        async with running(world.relay()):
            await until(lambda: world.broker.requests.count("b2") > 3)
            assert world.sent == "a1 b1"

    @in_virtual_time
    async def test_requests_have_as_many_messages_as_the_destination_takes(self) -> None:
        world = World(capabilities=Capabilities(max_messages=3))
        world.write("a1 a2 a3 a4 a5 a6 a7")
        async with running(world.relay()):
            await world.received(7)
        assert world.broker.requests == ["a1 a2 a3", "a4 a5 a6", "a7"]

    @in_virtual_time
    async def test_nor_have_they_more_when_failed_events_join_new_ones(self) -> None:
        world = World(capabilities=Capabilities(max_messages=3))
        world.write("a1 b1 c1")
        lane = await world.take("nobody", lease=0.001)
        again = [Failure(row, 0, None, 0.0) for row in world.rows.values()]
        await world.store.announce(lane, Batch(failures=again), settle=False)
        world.write("d1 e1 f1")
        async with running(world.relay()):
            await world.received(6)
        assert world.broker.requests == ["a1 b1 c1", "d1 e1 f1"]


class TestRates:
    @in_virtual_time
    async def test_a_lane_keeps_to_its_rate(self) -> None:
        world = World()
        name = (await world.take("nobody", lease=0.001)).name
        world.store.set_rate(5, lane=name)
        world.write(" ".join(f"a{number}" for number in range(1, 51)))
        started = clock.now()
        async with running(world.relay()):
            await world.received(50)
        took = clock.now() - started
        assert timedelta(seconds=8) <= took <= timedelta(seconds=15)
        assert world.sent.split() == [f"a{number}" for number in range(1, 51)]

    @in_virtual_time
    async def test_h47_a_tenant_with_a_rate_does_not_hold_up_the_others(self) -> None:
        world = World()
        world.store.set_rate(2, tenant="flood")
        world.write(" ".join(f"a{number}" for number in range(1, 21)), tenant="flood")
        world.write("b1 b2", tenant="small")
        async with running(world.relay()):
            await until(lambda: "b2" in world.sent)
            assert len(world.sent.split()) <= 4
            await world.received(22)
        assert [event for event in world.sent.split() if event[0] == "a"] == [f"a{n}" for n in range(1, 21)]

    @in_virtual_time
    async def test_a_rate_below_one_in_a_second(self) -> None:
        world = World()
        name = (await world.take("nobody", lease=0.001)).name
        world.store.set_rate(0.1, lane=name)
        world.write("a1 a2 a3")
        started = clock.current().monotonic()
        async with running(world.relay()):
            await world.received(3)
        assert 19 <= clock.current().monotonic() - started <= 40

    @in_virtual_time
    async def test_a_lane_that_waits_for_its_rate_does_not_ask_more_and_more_often(self) -> None:
        world = World()
        name = (await world.take("nobody", lease=0.001)).name
        world.store.set_rate(0.137, lane=name)
        world.write(" ".join(f"a{number}" for number in range(1, 101)))
        polls = 0
        poll = world.store.poll

        async def watched(*args: Any, **kwargs: Any) -> Page:
            nonlocal polls
            polls += 1
            return await poll(*args, **kwargs)

        world.store.poll = watched  # type: ignore[method-assign]
        async with running(world.relay()):
            await asyncio.sleep(60)
            in_the_first_minute, polls = polls, 0
            await asyncio.sleep(60)
        assert polls <= 1.2 * in_the_first_minute

    @in_virtual_time
    async def test_the_order_within_a_key_survives_a_rate_and_a_rejection(self) -> None:
        world = World()
        name = (await world.take("nobody", lease=0.001)).name
        world.store.set_rate(2, lane=name)
        world.write("a1 a2 b1 a3 b2")
        world.reject("a1")
        async with running(world.relay()):
            await until(lambda: world.attempts("a1") == 1)
            world.broker.stop_rejecting()
            await world.received(5)
        assert [event for event in world.sent.split() if event[0] == "a"] == ["a1", "a2", "a3"]
        assert [event for event in world.sent.split() if event[0] == "b"] == ["b1", "b2"]

    @in_virtual_time
    async def test_a_paused_tenant_waits_and_others_do_not(self) -> None:
        world = World()
        world.store.pause_tenant("acme")
        world.write("a1 a2", tenant="acme")
        world.write("b1", tenant="ball")
        async with running(world.relay()):
            await world.received(1)
            await asyncio.sleep(10)
            assert world.sent == "b1"
            world.store.pause_tenant("acme", paused=False)
            assert await world.received(3) == "b1 a1 a2"

    @in_virtual_time
    async def test_a_tenant_that_is_paused_while_its_event_is_rejected_stays_in_order(self) -> None:
        world = World()
        world.write("a1 a2", tenant="acme")
        world.reject("a1")
        async with running(world.relay()):
            await until(lambda: world.attempts("a1") == 1)
            world.store.pause_tenant("acme")
            await asyncio.sleep(5)
            world.broker.stop_rejecting()
            world.write("a3", tenant="acme")
            await asyncio.sleep(30)
            assert world.sent == ""
            world.store.pause_tenant("acme", paused=False)
            assert await world.received(3) == "a1 a2 a3"


async def _hang(_producer: str, _events: str) -> None:
    await asyncio.Event().wait()


async def _after_deaths(world: World, deaths: int) -> Lane:
    """The lane after so many owners died of what it has announced, which is everything."""
    if deaths:
        await world.store.announce(await world.take("dead"), Batch(items=[*world.rows.values()]), settle=False)
    for _ in range(deaths - 1):
        await asyncio.sleep(4)
        await world.take("dead, too")
    await asyncio.sleep(4)
    return await world.take("r1")
