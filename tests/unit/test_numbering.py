"""Destinations that deduplicate: groups, partitions, topics that cannot be opened, and brokers that forget."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

import pytest
from msgspec.structs import replace

from pillarbox.outbox import Status
from pillarbox.transport import Capabilities, Message, Outcome, TopicsRefusedError
from tests.memory.log import MemoryLogStore
from tests.memory.store import MemoryStore
from tests.relays import TOPIC, Broker, World, in_virtual_time, running, until

GROUPED = Capabilities(numbered=True, grouped=True)
STORES = pytest.mark.parametrize("kind", [MemoryStore, MemoryLogStore])


class PartitionedBroker(Broker):
    """Two partitions, or more later; a key belongs where its first letter says."""

    def __init__(self, capabilities: Capabilities | None = None) -> None:
        super().__init__(capabilities)
        self.count = 2

    def partitions(self, topic: str) -> int:  # noqa: ARG002  all have as many
        return self.count

    def place(self, topic: str, key: str, partitions: int) -> str:
        return f"{topic}-{ord(key[0]) % partitions}"

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
        return await super().open(producer, [f"{topic}-{number}" for topic in topics for number in range(self.count)])

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        return await super().send(producer, [replace(each, topic=each.place, place="") for each in messages])

    def events(self, number: int) -> str:
        return " ".join(message.body.decode() for message in self.sent(f"{TOPIC}-{number}"))


def partitioned(capabilities: Capabilities, kind: type[MemoryStore] = MemoryStore) -> tuple[World, PartitionedBroker]:
    world = World(kind=kind)
    broker = world.broker = PartitionedBroker(capabilities)
    return world, broker


@STORES
@in_virtual_time
async def test_a_batch_goes_in_groups_of_keys_and_numbers_rise(kind: type[MemoryStore]) -> None:
    world = World(capabilities=GROUPED, kind=kind)
    world.write("a1 b1 a2 c1 b2 a3")
    async with running(world.relay()):
        assert await world.received(6) == "a1 a2 a3 b1 b2 c1"
    numbers = [message.number for message in world.broker.sent(TOPIC)]
    assert numbers == sorted(numbers)


@STORES
@in_virtual_time
async def test_h34_a_successor_sends_the_same_groups_under_the_same_numbers(kind: type[MemoryStore]) -> None:
    world = World(capabilities=GROUPED, kind=kind)
    world.write("a1 b1 a2 c1 b2 a3")
    world.broker.lose_answers(1)
    lane = await world.take("dead", lease=1.0)
    worker = world.worker(lane)
    worker.stop()
    await worker.turn()
    assert world.sent == "a1 a2 a3 b1 b2 c1"
    async with running(world.relay("heir")):
        await until(lambda: world.statuses(Status.SENT) == "a1 b1 a2 c1 b2 a3")
        world.write("a4 b3")
        assert await world.received(8) == "a1 a2 a3 b1 b2 c1 a4 b3"


@STORES
@in_virtual_time
async def test_each_partition_is_recovered_by_its_own_last_number(kind: type[MemoryStore]) -> None:
    world, broker = partitioned(Capabilities(numbered=True), kind)
    world.write("a1 b1 a2 b2 a3 b3")
    lane = await world.take("dead", lease=1.0)
    worker = world.worker(lane)
    worker.stop()
    broker.lose_answers(1)
    await worker.turn()
    assert (broker.events(1), broker.events(0)) == ("a1 a2 a3", "b1 b2 b3")
    async with running(world.relay("heir")):
        await until(lambda: world.statuses(Status.SENT) == "a1 b1 a2 b2 a3 b3")
    assert (broker.events(1), broker.events(0)) == ("a1 a2 a3", "b1 b2 b3")


@in_virtual_time
async def test_a_successor_sends_where_it_was_announced_to_go_though_there_are_more_partitions() -> None:
    world, broker = partitioned(Capabilities(numbered=True))
    world.write("a1 c1 a2 c2")
    lane = await world.take("dead", lease=1.0)
    worker = world.worker(lane)
    worker.stop()
    broker.lose_answers(1)
    await worker.turn()
    broker.count = 4
    async with running(world.relay("heir")):
        await until(lambda: world.statuses(Status.SENT) == "a1 c1 a2 c2")
        assert [broker.events(number) for number in range(4)] == ["", "a1 c1 a2 c2", "", ""]
        world.write("a3 c3")
        await until(lambda: world.statuses(Status.SENT) == "a1 c1 a2 c2 a3 c3")
    assert [broker.events(number) for number in range(4)] == ["", "a1 c1 a2 c2 a3", "", "c3"]


class ClosedTopic(Broker):
    """One topic cannot be opened."""

    closed = "no such namespace"

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
        if self.closed and "closed" in topics:
            raise TopicsRefusedError({"closed": self.closed})
        return await super().open(producer, topics)


@STORES
@in_virtual_time
async def test_what_goes_to_a_topic_that_cannot_be_opened_waits_alone(
    kind: type[MemoryStore], caplog: pytest.LogCaptureFixture
) -> None:
    world = World(kind=kind)
    broker = world.broker = ClosedTopic(Capabilities(numbered=True))
    world.write("a1 b1")
    world.write("x1 x2 y1", topic="closed")
    world.write("a2")
    async with running(world.relay()):
        assert await world.received(3) == "a1 b1 a2"
        await until(lambda: world.statuses(Status.RETRYING, Status.PARKED) == "x1 x2 y1")
        assert [world.attempts(event) for event in ("x1", "x2", "y1")] == [0, 0, 0]
        assert "closed cannot be opened, and what goes there waits: no such namespace" in caplog.text
        broker.closed = ""
        await broker.received("closed", 3)
    assert [message.body for message in broker.sent("closed")] == [b"x1", b"x2", b"y1"]


@STORES
@in_virtual_time
async def test_no_event_overtakes_one_of_its_key_whose_topic_cannot_be_opened(kind: type[MemoryStore]) -> None:
    world = World(kind=kind)
    broker = world.broker = ClosedTopic(Capabilities(numbered=True))
    world.write("a1", topic="closed")
    world.write("a2 b1")
    async with running(world.relay()):
        assert await world.received(1) == "b1"
        await until(lambda: world.statuses(Status.RETRYING, Status.PARKED) == "a1 a2")
        broker.closed = ""
        assert await world.received(2) == "b1 a2"
    assert [message.body for message in broker.sent("closed")] == [b"a1"]


@STORES
@in_virtual_time
async def test_h115_a_broker_that_has_forgotten_is_reported(
    kind: type[MemoryStore], caplog: pytest.LogCaptureFixture
) -> None:
    world = World(capabilities=Capabilities(numbered=True), kind=kind)
    world.write("a1")
    async with running(world.relay()):
        await until(lambda: world.statuses(Status.SENT) == "a1")
    world.write("a2")
    lane = await world.take("dead", lease=1.0)
    worker = world.worker(lane)
    await worker.turn()
    world.write("a3")
    worker.stop()
    world.broker.lose_answers(1)
    await worker.turn()
    world.broker._highest.clear()
    with caplog.at_level(logging.ERROR, "pillarbox"):
        async with running(world.relay("heir")):
            await until(lambda: world.statuses(Status.SENT) == "a1 a2 a3")
    assert "has forgotten this producer: it had stored message 2" in caplog.text
    assert world.sent == "a1 a2 a3 a3", "at least once, and said so"


@in_virtual_time
async def test_h115_it_is_noticed_though_nobody_is_left_who_sent_there_before(caplog: pytest.LogCaptureFixture) -> None:
    world = World(capabilities=Capabilities(numbered=True))
    world.write("a1")
    async with running(world.relay()):
        await until(lambda: world.statuses(Status.SENT) == "a1")
    world.write("a2")
    worker = world.worker(await world.take("dead", lease=1.0))
    worker.stop()
    world.broker.lose_answers(1)
    await worker.turn()
    world.broker._highest.clear()
    async with running(world.relay("heir")):
        await until(lambda: world.statuses(Status.SENT) == "a1 a2")
    assert "has forgotten this producer: it had stored message 1" in caplog.text


@pytest.mark.parametrize(("away", "reports"), [(50.0, 0), (70.0, 1)])
@in_virtual_time
async def test_h115_a_first_batch_that_may_be_forgotten_is_reported(
    away: float, reports: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was stored before it, so nothing but its age says that the broker may know less than it has."""
    world = World(capabilities=Capabilities(numbered=True, forgets_after=60.0))
    world.write("a1 a2")
    worker = world.worker(await world.take("dead", lease=1.0))
    worker.stop()
    world.broker.lose_answers(1)
    await worker.turn()
    if reports:
        world.broker._highest.clear()
    await asyncio.sleep(away)
    async with running(world.relay("heir")):
        await until(lambda: world.statuses(Status.SENT) == "a1 a2")
    assert world.sent == ("a1 a2 a1 a2" if reports else "a1 a2")
    assert caplog.text.count("may have forgotten this producer") == reports


@in_virtual_time
async def test_h115_a_partition_that_has_forgotten_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    world, broker = partitioned(Capabilities(numbered=True))
    world.write("a1 b1")
    async with running(world.relay()):
        await until(lambda: world.statuses(Status.SENT) == "a1 b1")
        del broker._highest["memory/orders/0", f"{TOPIC}-0"]
        for number in range(2, 7):  # of the other one
            world.write(f"a{number}")
            await until(lambda number=number: world.status(f"a{number}") is Status.SENT)  # type: ignore[misc]
    assert caplog.text.count("has forgotten this producer") == 1
