"""The contract of `Publisher`, one test per promise.

Bind it by a subclass with a ``world`` fixture::

    class TestMyTransport(PublisherContract):
        @pytest.fixture
        def world(self) -> World: ...

If a world cannot bring about a situation, it names it in ``lacks``, with the reason; tests that need it are skipped
with that reason.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar
from uuid import uuid4

import pytest
from msgspec.structs import replace

from ... import clock
from ...transport import Message, Outcome, Publisher, Verdict

PATIENCE = 60.0
"""Seconds after which an answer, or a message on a topic, counts as missing."""

REQUEST_BYTES = 4_194_304
"""Bytes that a relay reads at once."""

_Answer = TypeVar("_Answer")


class Feature(Enum):
    """Situations that a world may be unable to bring about."""

    EXACT_READS = "show bodies and headers of what arrived"
    OUTAGES = "make the destination unavailable"
    REJECTIONS = "let the destination reject a message"
    LOST_ANSWERS = "lose an answer on its way back"


class World(ABC):
    """A publisher that is not open yet, and control over its destination."""

    publisher: Publisher
    lacks: Mapping[Feature, str] = {}
    """The features that this world lacks, with reasons."""

    @abstractmethod
    async def new_topic(self) -> str:
        """A new topic, ready for messages."""

    @abstractmethod
    async def read(self, topic: str) -> Sequence[Message]:
        """Messages of the topic, in order per key, read without the publisher; with keys and ``event_id``."""

    async def go_away(self) -> None:
        """Make the destination unavailable."""
        raise NotImplementedError

    async def come_back(self) -> None:
        """Make it available again, with all stored messages."""
        raise NotImplementedError

    async def unwelcome(self, topic: str, key: str, number: int) -> Message:
        """A message that the destination rejects when it is sent."""
        raise NotImplementedError

    async def lose_answer(self) -> None:
        """Let the next request arrive, and lose the answer."""
        raise NotImplementedError

    def needs(self, feature: Feature) -> None:
        """Skip the test if the world cannot do this."""
        if feature in self.lacks:
            pytest.skip(f"cannot {feature.value}: {self.lacks[feature]}")


class PublisherContract:
    """The promises of `Publisher`. Requests have up to twenty messages, in one test as many as are accepted."""

    # -- capabilities and preflight ------------------------------------------------------------------------------------

    async def test_capabilities_are_known_without_a_connection_and_never_change(self, world: World) -> None:
        before = world.publisher.capabilities
        producer, topic = await self.opened(world)
        await self.deliver(world, producer, messages(topic, "a"))
        assert world.publisher.capabilities == before

    async def test_the_largest_request_is_accepted(self, world: World) -> None:
        count = world.publisher.capabilities.max_messages
        producer, topic = await self.opened(world)
        body = b"x" * (REQUEST_BYTES // count)
        await self.deliver(
            world, producer, [message(topic, f"k{number % 7}", number, body=body) for number in range(1, count + 1)]
        )

    async def test_h111_the_largest_message_may_go_and_is_accepted(self, world: World) -> None:
        producer, topic = await self.opened(world)
        largest = sized(topic, *self.limits(world))
        assert world.publisher.preflight(largest) is None
        await self.deliver(world, producer, [largest])

    @pytest.mark.parametrize("over", [(1, 0), (0, 1)], ids=["body", "headers"])
    async def test_h69_preflight_refuses_what_the_destination_would_not_take(
        self, world: World, over: tuple[int, int]
    ) -> None:
        body, headers = self.limits(world)
        producer, topic = await self.opened(world)
        too_large = sized(topic, body + over[0], headers + over[1])
        assert world.publisher.preflight(too_large)
        assert not (await self.attempt(world, producer, [too_large])).accepted
        assert not await world.read(topic)

    # -- opening -------------------------------------------------------------------------------------------------------

    async def test_open_says_nothing_if_the_transport_does_not_number(self, world: World) -> None:
        if world.publisher.capabilities.numbered:
            pytest.skip("it numbers")
        assert await world.publisher.open(new_producer(), [await world.new_topic()]) == {}

    async def test_open_says_the_highest_number_of_each_topic_under_this_name(self, world: World) -> None:
        self.needs_numbers(world)
        mine, theirs, one, other, unused = new_producer(), new_producer(), *[await world.new_topic() for _ in range(3)]
        topics = [one, other, unused]
        assert await world.publisher.open(mine, topics) == dict.fromkeys(topics, -1)
        await self.deliver(world, mine, [message(one, "a", 3), message(other, "a", 5), message(one, "a", 9)])
        assert await world.publisher.open(mine, topics) == {one: 9, other: 5, unused: -1}
        assert await world.publisher.open(theirs, topics) == dict.fromkeys(topics, -1)

    async def test_opening_again_is_fine(self, world: World) -> None:
        producer, topic = await self.opened(world)
        sent = messages(topic, "aaa")
        for each in sent:
            await world.publisher.open(producer, [topic])
            assert set((await self.attempt(world, producer, [each])).accepted) == {0}
        await self.arrived(world, sent)

    async def test_opening_while_the_destination_is_away_is_an_os_error(self, world: World) -> None:
        world.needs(Feature.OUTAGES)
        topic = await world.new_topic()
        await world.go_away()
        with pytest.raises(OSError):  # noqa: PT011  a TimeoutError is one, too; messages are the transport's own
            await answer(world.publisher.open(new_producer(), [topic]))
        await world.come_back()

    # -- sending -------------------------------------------------------------------------------------------------------

    async def test_messages_arrive_exactly(self, world: World) -> None:
        world.needs(Feature.EXACT_READS)
        producer, topic = await self.opened(world)
        sent = message(topic, "Käy ✓", 1, body=bytes(range(256)), headers={"user_id": 'Ä✓ \\ "%0A="'})
        await self.deliver(world, producer, [sent])
        [found] = await world.read(topic)
        assert (found.topic, found.key, found.body) == (sent.topic, sent.key, sent.body)
        assert {name: found.headers.get(name) for name in sent.headers} == sent.headers

    async def test_messages_of_a_key_keep_their_order_over_requests(self, world: World) -> None:
        producer, topic = await self.opened(world)
        sent = messages(topic, "abcab" * 20)
        for start in range(0, len(sent), 20):
            outcome = await self.attempt(world, producer, sent[start : start + 20])
            assert (len(outcome.accepted), outcome.unfinished) == (20, None)
        await self.arrived(world, sent)

    async def test_a_request_may_hold_several_topics(self, world: World) -> None:
        producer, topics = new_producer(), [await world.new_topic(), await world.new_topic()]
        await world.publisher.open(producer, topics)
        await self.deliver(world, producer, [message(topics[number % 2], "a", number) for number in range(1, 11)])

    async def test_producers_send_side_by_side(self, world: World) -> None:
        topic = await world.new_topic()

        async def send(key: str) -> None:
            producer = new_producer()
            await world.publisher.open(producer, [topic])
            await self.deliver(world, producer, messages(topic, key * 20))

        await asyncio.gather(*map(send, "abcde"))

    async def test_a_cancelled_request_can_be_sent_again(self, world: World) -> None:
        producer, topic = await self.opened(world)
        sent: list[Message] = []
        for turns in range(5):
            request = messages(topic, "aab", first=len(sent) + 1)
            task = asyncio.ensure_future(world.publisher.send(producer, request))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            assert (await asyncio.wait({task}, timeout=PATIENCE))[0], "it does not stop"
            assert task.cancelled() or not task.result().rejected
            await self.recover(world, producer, request)
            sent += request
        await self.arrived(world, sent, copies=True)

    async def test_h66_an_outage_is_not_the_fault_of_a_message(self, world: World) -> None:
        world.needs(Feature.OUTAGES)
        producer, topic = await self.opened(world)
        before, after = messages(topic, "ab"), messages(topic, "aab", first=3)
        await self.deliver(world, producer, before)
        await world.go_away()
        outcome = await self.attempt(world, producer, after)
        assert (list(outcome.accepted), list(outcome.rejected)) == ([], [])
        assert outcome.unfinished
        await world.come_back()
        await self.recover(world, producer, after)
        await self.arrived(world, [*before, *after], copies=True)

    async def test_h37_a_lost_answer_is_unknown(self, world: World) -> None:
        world.needs(Feature.LOST_ANSWERS)
        producer, topic = await self.opened(world)
        sent = messages(topic, "aab")
        await world.lose_answer()
        outcome = await self.attempt(world, producer, sent)
        assert (list(outcome.accepted), list(outcome.rejected)) == ([], [])
        assert outcome.unfinished is Verdict.UNKNOWN
        await self.recover(world, producer, sent)
        await self.arrived(world, sent, copies=True)

    # -- rejections ----------------------------------------------------------------------------------------------------

    async def test_a_message_that_the_destination_refuses_is_rejected_with_a_reason(self, world: World) -> None:
        world.needs(Feature.REJECTIONS)
        producer, topic = await self.opened(world)
        outcome = await self.attempt(world, producer, [await world.unwelcome(topic, "a", 1)])
        assert ([each.index for each in outcome.rejected], list(outcome.accepted)) == ([0], [])
        assert outcome.rejected[0].reason
        assert outcome.unfinished is None
        await self.deliver(world, producer, messages(topic, "b", first=2))
        assert [each.key for each in await world.read(topic)] == ["b"]

    async def test_h36_nothing_of_a_key_is_accepted_behind_a_rejected_message(self, world: World) -> None:
        world.needs(Feature.REJECTIONS)
        producer, topic = await self.opened(world)
        sent = messages(topic, "abaacb")
        sent[2] = await world.unwelcome(topic, "a", 3)
        outcome = await self.attempt(world, producer, sent)
        assert not {2, 3} & {*outcome.accepted}
        assert [each.index for each in outcome.rejected] == [2] or (outcome.unfinished and not outcome.rejected)
        for key in "abc":
            mine = [index for index, each in enumerate(sent) if each.key == key]
            accepted = [index for index in mine if index in {*outcome.accepted}]
            assert accepted == mine[: len(accepted)], f"not a prefix of {key}"
        # The others can be sent, under new numbers; the rejected one, and the one behind it, are nowhere.
        kept_back = [sent[index] for index in (0, 1, 4, 5) if index not in {*outcome.accepted}]
        await world.publisher.open(producer, [topic])
        for number, each in enumerate(kept_back, 10):
            assert (await self.attempt(world, producer, [replace(each, number=number)])).accepted
        await self.arrived(world, [sent[index] for index in (0, 1, 4, 5)])

    # -- numbers -------------------------------------------------------------------------------------------------------

    async def test_h34_what_was_stored_under_its_number_is_not_stored_twice(self, world: World) -> None:
        self.needs_numbers(world)
        producer, topic = await self.opened(world)
        sent = messages(topic, "aba")
        await self.deliver(world, producer, sent)
        await world.publisher.close(producer)
        assert await world.publisher.open(producer, [topic]) == {topic: 3}
        outcome = await self.attempt(world, producer, sent[2:])
        assert ([*outcome.accepted], [*outcome.duplicates]) == ([0], [0])
        await self.deliver(world, producer, messages(topic, "c", first=4))
        await self.arrived(world, sent)

    async def test_h34_no_number_is_stored_behind_a_rejected_message_of_its_topic(self, world: World) -> None:
        self.needs_numbers(world)
        world.needs(Feature.REJECTIONS)
        producer, topic = await self.opened(world)
        sent = messages(topic, "abcd")
        sent[1] = await world.unwelcome(topic, "b", 2)
        outcome = await self.attempt(world, producer, sent)
        assert not {1, 2, 3} & {*outcome.accepted}
        await world.publisher.close(producer)
        assert await world.publisher.open(producer, [topic]) in ({topic: -1}, {topic: 1})

    async def test_a_request_that_repeats_a_part_of_another_loses_and_doubles_nothing(self, world: World) -> None:
        self.needs_numbers(world)
        producer, topic = await self.opened(world)
        sent = messages(topic, "abab")
        await self.deliver(world, producer, sent[:2])
        outcome = await self.attempt(world, producer, sent)
        await self.read(world, topic, by_key(sent[index] for index in outcome.accepted))
        await self.recover(world, producer, sent)
        await self.arrived(world, sent)

    async def test_numbers_may_have_gaps(self, world: World) -> None:
        producer, topic = await self.opened(world)
        await self.deliver(world, producer, [message(topic, "a", number) for number in (4, 5, 90)])
        await self.deliver(world, producer, [message(topic, "b", number) for number in (1000, 1002)])

    async def test_the_numbers_of_two_producers_have_nothing_to_do_with_each_other(self, world: World) -> None:
        topic, sent = await world.new_topic(), list[Message]()
        for key in "ab":
            producer = new_producer()
            await world.publisher.open(producer, [topic])
            sent += (request := messages(topic, key * 3))
            assert not (await self.attempt(world, producer, request)).duplicates
        await self.arrived(world, sent)

    # -- closing -------------------------------------------------------------------------------------------------------

    async def test_closing_twice_is_fine(self, world: World) -> None:
        producer, _ = await self.opened(world)
        for name in (producer, producer, None, None):
            await answer(world.publisher.close(name))

    async def test_closing_one_producer_leaves_the_others_open(self, world: World) -> None:
        mine, topic = await self.opened(world)
        theirs, _ = await self.opened(world)
        await world.publisher.close(theirs)
        await self.deliver(world, mine, messages(topic, "aab"))

    async def test_what_was_closed_can_be_opened_again(self, world: World) -> None:
        producer, topic = await self.opened(world)
        for number, name in enumerate((producer, None), 1):
            await world.publisher.close(name)
            await world.publisher.open(producer, [topic])
            assert (await self.attempt(world, producer, [message(topic, "a", number)])).accepted

    async def test_closing_while_the_destination_is_away_does_not_wait_for_it(self, world: World) -> None:
        world.needs(Feature.OUTAGES)
        await self.opened(world)
        await world.go_away()
        await answer(world.publisher.close())
        await world.come_back()

    # -- helpers -------------------------------------------------------------------------------------------------------

    async def opened(self, world: World) -> tuple[str, str]:
        """A producer and a new topic, open for each other."""
        producer, topic = new_producer(), await world.new_topic()
        await answer(world.publisher.open(producer, [topic]))
        return producer, topic

    async def attempt(self, world: World, producer: str, request: Sequence[Message]) -> Outcome:
        """Send as a relay does: an error means unknown."""
        try:
            return await answer(world.publisher.send(producer, request))
        except Exception as error:
            return Outcome((), unfinished=Verdict.UNKNOWN, reason=repr(error))

    async def deliver(self, world: World, producer: str, request: Sequence[Message]) -> None:
        """Send messages that must be accepted, and find them on their topics."""
        outcome = await answer(world.publisher.send(producer, request))
        assert {*outcome.accepted} == {*range(len(request))}, outcome
        assert (list(outcome.rejected), list(outcome.duplicates), outcome.unfinished) == ([], [], None)
        await self.arrived(world, request)

    async def recover(self, world: World, producer: str, request: Sequence[Message]) -> None:
        """Repeat a request of one topic until all of it is stored, as a relay does. The message with the topic's last
        number is sent alone; if it is accepted, everything up to it is stored.
        """
        deadline = clock.current().monotonic() + PATIENCE
        while clock.current().monotonic() < deadline:
            try:
                last = (await answer(world.publisher.open(producer, [request[0].topic]))).get(request[0].topic, -1)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            numbered = world.publisher.capabilities.numbered
            known = [each for each in request if numbered and each.number == last]
            left = [each for each in request if not numbered or each.number > last]
            for part in filter(None, (known, left)):
                if len((await self.attempt(world, producer, part)).accepted) < len(part):
                    break
            else:
                return
        pytest.fail("it was never accepted")

    async def arrived(self, world: World, sent: Sequence[Message], *, copies: bool = False) -> None:
        """Find these messages on their topics, in order per key. With ``copies``, there may be duplicates, unless the
        transport is numbered.
        """
        for topic in {each.topic for each in sent}:
            expected = by_key(each for each in sent if each.topic == topic)
            found = await self.read(world, topic, expected)
            for key, wanted in expected.items():
                once = copies and not world.publisher.capabilities.numbered
                assert (list(dict.fromkeys(found[key])) if once else found[key]) == wanted

    async def read(self, world: World, topic: str, expected: Mapping[str, list[str]]) -> Mapping[str, list[str]]:
        """The event ids of the topic, once these are among them."""
        deadline = clock.current().monotonic() + PATIENCE
        while clock.current().monotonic() < deadline:
            found = by_key(await world.read(topic))
            if all({*wanted} <= {*found.get(key, ())} for key, wanted in expected.items()):
                return found
            await asyncio.sleep(0.02)
        pytest.fail(f"not all of {expected} arrived at {topic}")

    def limits(self, world: World) -> tuple[int, int]:
        """The largest body and the largest headers."""
        capabilities = world.publisher.capabilities
        if max(capabilities.max_body_bytes, capabilities.max_header_bytes) > 2**30:
            pytest.skip("it has no limits")
        return capabilities.max_body_bytes, capabilities.max_header_bytes

    def needs_numbers(self, world: World) -> None:
        """Skip the test if the transport does not deduplicate."""
        if not world.publisher.capabilities.numbered:
            pytest.skip("it does not number")


async def answer(call: Awaitable[_Answer]) -> _Answer:
    """The answer of a call. Without one, the test fails."""
    task = asyncio.ensure_future(call)
    done, _ = await asyncio.wait({task}, timeout=PATIENCE)
    if not done:
        task.cancel()
        pytest.fail(f"no answer within {PATIENCE:.0f} s")
    return task.result()


def new_producer() -> str:
    """A new producer name."""
    return f"producer-{uuid4().hex}"


def message(
    topic: str, key: str, number: int = 0, *, body: bytes = b"{}", headers: Mapping[str, str] | None = None
) -> Message:
    """A message with a new event id."""
    known = {"event_id": str(uuid4()), "event_type": "orders.order.placed", "tenant_id": "acme"}
    return Message(topic, key, body, {**known, **(headers or {})}, number)


def messages(topic: str, keys: Iterable[str], *, first: int = 1) -> list[Message]:
    """A message for each of these keys, numbered."""
    return [message(topic, key, number) for number, key in enumerate(keys, first)]


def sized(topic: str, body: int, headers: int) -> Message:
    """A message of exactly this size; no single header is longer than a thousand bytes."""
    plain = message(topic, "k", 1, body=b"x" * body)
    left = headers - sum(len(name) + len(value) for name, value in plain.headers.items())
    padding: dict[str, str] = {}
    while left > 0:
        size = left if left <= 1000 else min(900, left - 100)
        name = f"h{len(padding):04}"
        padding[name] = "x" * (size - len(name))
        left -= size
    return replace(plain, headers={**plain.headers, **padding})


def by_key(found: Iterable[Message]) -> dict[str, list[str]]:
    """The event ids of each key, in order."""
    ids: dict[str, list[str]] = {}
    for each in found:
        ids.setdefault(each.key, []).append(each.headers["event_id"])
    return ids
