"""The contract of `Subscriber`, one test per promise.

Bind it by a subclass with a ``world`` fixture::

    class TestMyTransport(SubscriberContract):
        @pytest.fixture
        def world(self) -> World: ...
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Protocol
from uuid import uuid4

import pytest

from ...transport import Message, Received, Subscriber, Subscription
from .publisher import PATIENCE, answer, by_key, message, messages


class World(ABC):
    """A subscriber, and the means to fill its topics."""

    subscriber: Subscriber

    @abstractmethod
    async def new_topic(self) -> str:
        """A new topic, ready for subscriptions."""

    @abstractmethod
    async def publish(self, messages: Iterable[Message]) -> None:
        """Publish messages on their topics, in order per key."""


class Join(Protocol):
    """Adds a member to a group. Groups belong to the test; all members leave at its end."""

    async def __call__(self, *topics: str, group: str = "group") -> Subscription: ...


class SubscriberContract:
    """The promises of `Subscriber` and `Subscription`."""

    @pytest.fixture
    async def join(self, world: World) -> AsyncIterator[Join]:
        """See `Join`."""
        unique, members = uuid4().hex, list[Subscription]()

        async def join(*topics: str, group: str = "group") -> Subscription:
            members.append(await answer(world.subscriber.subscribe(topics, f"{group}-{unique}")))
            return members[-1]

        yield join
        for member in members:
            await answer(member.close())

    # -- receive -------------------------------------------------------------------------------------------------------

    async def test_messages_are_received_exactly(self, world: World, join: Join) -> None:
        member = await join(topic := await world.new_topic())
        sent = message(topic, "Käy ✓", 1, body=bytes(range(256)), headers={"user_id": 'Ä✓ \\ "%0A="'})
        await world.publish([sent])
        [received] = await self.receive(member, 1)
        found = received.message
        assert (found.topic, found.key, found.body) == (sent.topic, sent.key, sent.body)
        assert {name: found.headers.get(name) for name in sent.headers} == sent.headers
        assert received.attempt == 1  # a hint, which is right at least on the first delivery

    async def test_messages_come_in_order_per_key_and_never_more_than_asked_for(self, world: World, join: Join) -> None:
        member = await join(topic := await world.new_topic())
        sent = messages(topic, "abcab" * 10)
        await world.publish(sent)
        found: list[Received] = []
        while len(found) < len(sent):
            some = await answer(member.receive(7))
            assert 1 <= len(some) <= 7
            found += some
        assert received_by_key(found) == by_key(sent)

    async def test_no_more_bytes_are_received_than_asked_for(self, world: World, join: Join) -> None:
        """Except for the message that exceeds the limit."""
        member = await join(topic := await world.new_topic())
        sent = [message(topic, f"k{number % 7}", number, body=b"x" * 30_000) for number in range(1, 41)]
        await world.publish(sent)
        found: list[Received] = []
        for limit in (1, 60_000, 100_000):
            some = await answer(member.receive(1_000, limit))
            size = sum(len(each.message.body) for each in some)
            assert 0 < size < limit + 30_000
            found += some
        while len(found) < len(sent):
            found += await answer(member.receive(1_000, 300_000))
        assert received_by_key(found) == by_key(sent)

    async def test_receive_waits_for_a_message(self, world: World, join: Join) -> None:
        member = await join(topic := await world.new_topic())
        receiving = asyncio.ensure_future(member.receive(10))
        await asyncio.sleep(0)
        assert not receiving.done()
        await world.publish(sent := messages(topic, "a"))
        assert received_by_key(await answer(receiving)) == by_key(sent)

    async def test_a_cancelled_receive_loses_nothing(self, world: World, join: Join) -> None:
        member = await join(topic := await world.new_topic())
        sent = messages(topic, "a" * 20)
        found: list[Received] = []
        for turns, each in enumerate(sent):
            receiving = asyncio.ensure_future(member.receive(1))
            await asyncio.sleep(0)
            await world.publish([each])
            for _ in range(turns % 5):
                await asyncio.sleep(0)
            receiving.cancel()
            assert (await asyncio.wait({receiving}, timeout=PATIENCE))[0], "it does not stop"
            found += [] if receiving.cancelled() else receiving.result()
        found += await self.receive(member, len(sent) - len(found))
        assert received_by_key(found) == by_key(sent)

    async def test_a_subscription_may_have_several_topics(self, world: World, join: Join) -> None:
        one, other = await world.new_topic(), await world.new_topic()
        member = await join(one, other)
        await world.publish([message(one, "a", 1), message(other, "a", 1), message(one, "a", 2)])
        assert sorted(each.message.topic for each in await self.receive(member, 3)) == sorted([one, one, other])

    # -- acknowledge ---------------------------------------------------------------------------------------------------

    async def test_h80_what_is_acknowledged_does_not_come_again(self, world: World, join: Join) -> None:
        member = await join(topic := await world.new_topic())
        await world.publish(messages(topic, "ab"))
        await member.ack(await self.receive(member, 2))
        await member.close()
        await world.publish(fresh := messages(topic, "ab", first=3))
        assert received_by_key(await self.receive(await join(topic), 2)) == by_key(fresh)

    async def test_acknowledging_twice_is_fine(self, world: World, join: Join) -> None:
        member = await join(topic := await world.new_topic())
        await world.publish(messages(topic, "a"))
        received = await self.receive(member, 1)
        await member.ack(received)
        await member.ack(received)
        await world.publish(fresh := messages(topic, "a", first=2))
        assert received_by_key(await self.receive(member, 1)) == by_key(fresh)

    async def test_what_is_not_acknowledged_comes_again(self, world: World, join: Join) -> None:
        member = await join(topic := await world.new_topic())
        await world.publish(messages(topic, "abaa"))
        done, *left = await self.receive(member, 4)
        await member.ack([done])
        await member.close()
        assert received_by_key(await self.receive(await join(topic), 3)) == received_by_key(left)

    # -- groups --------------------------------------------------------------------------------------------------------

    async def test_each_message_goes_to_every_group(self, world: World, join: Join) -> None:
        topic = await world.new_topic()
        members = [await join(topic, group=group) for group in ("one", "other")]
        await world.publish(sent := messages(topic, "abca"))
        for member in members:
            assert received_by_key(await self.receive(member, 4)) == by_key(sent)

    async def test_each_message_goes_to_one_member_of_a_group(self, world: World, join: Join) -> None:
        topic = await world.new_topic()
        members = [await join(topic), await join(topic)]
        sent = messages(topic, [f"k{index}" for index in range(40)])
        found: list[Received] = []
        enough = asyncio.Event()

        async def work(member: Subscription) -> None:
            while True:
                found.extend(await member.receive(5))
                if len(found) >= len(sent):
                    enough.set()

        workers = [asyncio.ensure_future(work(member)) for member in members]
        await world.publish(sent)
        await answer(enough.wait())
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers)
        assert received_by_key(found) == by_key(sent)

    async def test_what_a_member_leaves_behind_goes_to_the_others(self, world: World, join: Join) -> None:
        topic = await world.new_topic()
        leaving = await join(topic)
        await world.publish(messages(topic, "aba"))
        left = await self.receive(leaving, 3)
        staying = await join(topic)
        await leaving.close()
        assert received_by_key(await self.receive(staying, 3)) == received_by_key(left)

    async def test_a_group_keeps_its_place_while_nobody_is_there(self, world: World, join: Join) -> None:
        member = await join(topic := await world.new_topic())
        await member.close()
        await world.publish(sent := messages(topic, "aaa"))
        assert received_by_key(await self.receive(await join(topic), 3)) == by_key(sent)

    async def test_closing_twice_is_fine(self, world: World, join: Join) -> None:
        member = await join(await world.new_topic())
        await answer(member.close())
        await answer(member.close())

    # -- helpers -------------------------------------------------------------------------------------------------------

    async def receive(self, member: Subscription, count: int) -> list[Received]:
        """Receive this many messages."""
        found: list[Received] = []
        while len(found) < count:
            found += await answer(member.receive(count - len(found)))
        return found


def received_by_key(found: Iterable[Received]) -> dict[str, list[str]]:
    """The event ids of each key, in order."""
    return by_key(each.message for each in found)
