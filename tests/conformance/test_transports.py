"""Every transport against the same promises, and what each of them can do beside."""

from __future__ import annotations

import asyncio
import logging
import re
from ast import literal_eval
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pillarbox.testing.conformance import publisher as publishing
from pillarbox.testing.conformance import subscriber as subscribing
from pillarbox.testing.conformance.publisher import Feature, PublisherContract, message, messages
from pillarbox.testing.conformance.subscriber import SubscriberContract
from pillarbox.transport import Capabilities, Message, Outcome, Publisher, Received, Rejection, Subscriber, Verdict
from pillarbox.transports.logging import LoggingTransport
from pillarbox.transports.memory import MemoryTransport

_numbers = count(1)


def new_topic() -> str:
    return f"topic-{next(_numbers)}"


# -- memory ------------------------------------------------------------------------------------------------------------


class MemoryPublisherWorld(publishing.World):
    def __init__(self, capabilities: Capabilities) -> None:
        self.broker = MemoryTransport(capabilities)
        self.publisher: Publisher = self.broker

    async def new_topic(self) -> str:
        return new_topic()

    async def read(self, topic: str) -> Sequence[Message]:
        return self.broker.sent(topic)

    async def go_away(self) -> None:
        self.broker.go_away()

    async def come_back(self) -> None:
        self.broker.come_back()

    async def unwelcome(self, topic: str, key: str, number: int) -> Message:
        unwelcome = message(topic, key, number)
        self.broker.reject(lambda each: each == unwelcome)
        return unwelcome

    async def lose_answer(self) -> None:
        self.broker.lose_answers(1)


class MemorySubscriberWorld(subscribing.World):
    def __init__(self) -> None:
        self.broker = MemoryTransport()
        self.subscriber: Subscriber = self.broker

    async def new_topic(self) -> str:
        return new_topic()

    async def publish(self, messages: Iterable[Message]) -> None:
        await self.broker.send("producer", list(messages))


class TestMemoryPublisher(PublisherContract):
    @pytest.fixture(params=[False, True], ids=["plain", "numbered"])
    def world(self, request: pytest.FixtureRequest) -> publishing.World:
        return MemoryPublisherWorld(Capabilities(numbered=request.param))


class TestMemorySubscriber(SubscriberContract):
    @pytest.fixture
    def world(self) -> subscribing.World:
        return MemorySubscriberWorld()


class TestMemoryAsATestDouble:
    """Faults and redeliveries, as a user's test asks for them."""

    @pytest.fixture
    def broker(self) -> MemoryTransport:
        return MemoryTransport()

    async def test_a_test_waits_for_messages_instead_of_sleeping(self, broker: MemoryTransport) -> None:
        sent = messages("orders", "ab")
        waiting = asyncio.ensure_future(broker.received("orders", 2))
        for each in sent:
            await asyncio.sleep(0)
            assert not waiting.done()
            await broker.send("producer", [each])
        assert await waiting == broker.sent("orders") == sent
        assert broker.sent("nothing was ever sent here") == []

    async def test_a_rejection_stops_its_key_in_this_request_and_no_other(self, broker: MemoryTransport) -> None:
        broker.reject(lambda message: message.number == 3, reason="no such customer")
        sent = messages("orders", "abaacb")
        assert await broker.send("producer", sent) == Outcome([0, 1, 4, 5], (Rejection(2, "no such customer"),), [])
        assert broker.sent("orders") == [sent[0], sent[1], sent[4], sent[5]]
        broker.stop_rejecting()
        assert (await broker.send("producer", sent[2:4])).accepted == [0, 1]

    async def test_a_group_that_was_removed_begins_anew(self, broker: MemoryTransport) -> None:
        await broker.send("producer", messages("orders", "ab"))
        member = await broker.subscribe(["orders"], "group")
        await member.ack(await member.receive(2))
        with pytest.raises(ConnectionError, match="has a member"):
            await broker.unsubscribe(["orders"], "group")
        for _ in range(2):
            await member.close()
            await broker.unsubscribe(["orders"], "group")
        assert len(await (await broker.subscribe(["orders"], "group")).receive(2)) == 2

    async def test_faults_are_told_apart(self, broker: MemoryTransport) -> None:
        broker.go_away()
        assert (await broker.send("producer", messages("orders", "a"))).unfinished is Verdict.UNAVAILABLE
        assert broker.sent("orders") == []
        broker.come_back()
        broker.lose_answers(1)
        assert (await broker.send("producer", messages("orders", "a"))).unfinished is Verdict.UNKNOWN
        assert len(broker.sent("orders")) == 1
        assert (await broker.send("producer", messages("orders", "a"))).unfinished is None

    async def test_stored_messages_are_delivered_again(self, broker: MemoryTransport) -> None:
        await broker.send("producer", messages("orders", "abc"))
        member = await broker.subscribe(["orders"], "billing")
        first = await member.receive(10)
        await member.ack(first)
        await member.close()
        broker.redeliver("orders")
        broker.redeliver("orders", 2)
        member = await broker.subscribe(["orders"], "billing")
        assert keys(await member.receive(10)) == ["a", "b", "c", "c"]
        assert len(broker.sent("orders")) == 3, "a redelivery is nothing new"

    async def test_redelivery_wakes_who_waits(self, broker: MemoryTransport) -> None:
        await broker.send("producer", messages("orders", "a"))
        member = await broker.subscribe(["orders"], "billing")
        await member.ack(await member.receive(1))
        waiting = asyncio.ensure_future(member.receive(1))
        await asyncio.sleep(0)
        broker.redeliver("orders")
        assert keys(await waiting) == ["a"]

    async def test_a_new_group_begins_with_the_first_message(self, broker: MemoryTransport) -> None:
        await broker.send("producer", messages("orders", "ab"))
        assert keys(await (await broker.subscribe(["orders"], "late")).receive(10)) == ["a", "b"]

    async def test_a_key_stays_with_the_member_that_holds_it(self, broker: MemoryTransport) -> None:
        member = await broker.subscribe(["orders"], "billing")
        other = await broker.subscribe(["orders"], "billing")
        await broker.send("producer", messages("orders", "aab"))
        held = await member.receive(1)
        assert keys(await other.receive(10)) == ["b"]
        waiting = asyncio.ensure_future(other.receive(10))
        await asyncio.sleep(0)
        assert not waiting.done()
        await member.ack(held)
        assert keys(await waiting) == ["a"]

    async def test_an_outage_reaches_the_members_of_a_group_too(self, broker: MemoryTransport) -> None:
        member = await broker.subscribe(["orders"], "billing")
        await broker.send("producer", messages("orders", "a"))
        received = await member.receive(1)
        waiting = asyncio.ensure_future(member.receive(1))
        broker.go_away()
        for attempt in (member.ack(received), broker.subscribe(["orders"], "billing")):
            with pytest.raises(ConnectionError):
                await attempt
        assert not waiting.done()
        broker.come_back()
        [again] = await waiting
        assert (again.message, again.attempt) == (received[0].message, 2)

    async def test_a_closed_subscription_does_not_wait_for_ever(self, broker: MemoryTransport) -> None:
        member = await broker.subscribe(["orders"], "billing")
        waiting = asyncio.ensure_future(member.receive(1))
        await asyncio.sleep(0)
        await member.close()
        with pytest.raises(ConnectionError, match="closed"):
            await waiting


def keys(received: Sequence[Received]) -> list[str]:
    return [each.message.key for each in received]


# -- logging -----------------------------------------------------------------------------------------------------------

FIELDS = ("topic", "key", "event_id", "event_type", "tenant")
LINE = re.compile(" ".join(f"{name}=(.+)" for name in FIELDS) + r" size=\d+")


class LoggingWorld(publishing.World):
    lacks: Mapping[Feature, str] = {
        Feature.EXACT_READS: "a log never shows what is in a message",
        Feature.OUTAGES: "the log is always there",
        Feature.REJECTIONS: "the log takes everything",
        Feature.LOST_ANSWERS: "there is no way back on which to lose one",
    }

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "pillarbox.transports.logging")
        self.caplog = caplog
        self.publisher: Publisher = LoggingTransport()

    async def new_topic(self) -> str:
        return new_topic()

    async def read(self, topic: str) -> Sequence[Message]:
        lines = [LINE.fullmatch(line) for line in self.caplog.messages]
        found = [[literal_eval(value) for value in line.groups()[:3]] for line in lines if line]
        return [Message(name, key, b"", {"event_id": event_id}) for name, key, event_id in found if name == topic]


class TestLoggingPublisher(PublisherContract):
    @pytest.fixture
    def world(self, caplog: pytest.LogCaptureFixture) -> publishing.World:
        return LoggingWorld(caplog)


class TestLogging:
    @pytest.fixture(autouse=True)
    def level(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "pillarbox.transports.logging")

    async def test_s41_a_line_says_what_went_where_and_never_what_was_in_it(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        headers = {"event_id": "e-1", "event_type": "orders.order.placed", "tenant_id": "acme", "user_id": "secret"}
        await LoggingTransport().send("producer", [Message("orders", "o-1", b'{"card":"secret"}', headers)])
        assert caplog.messages == [
            "topic='orders' key='o-1' event_id='e-1' event_type='orders.order.placed' tenant='acme' size=17"
        ]
        [record] = caplog.records
        assert (record.name, record.levelname) == ("pillarbox.transports.logging", "INFO")

    @pytest.mark.parametrize("bad", ["\r\n", "\x1b[2J", "\x85", "\u2028", "\u202e", "\x00", "' size=1\n"])
    async def test_s12_nothing_in_a_message_can_fake_a_line(self, bad: str, caplog: pytest.LogCaptureFixture) -> None:
        headers = dict.fromkeys(("event_id", "event_type", "tenant_id"), bad)
        await LoggingTransport().send("producer", [Message(bad, bad, b"", headers)])
        [line] = caplog.messages
        assert line.isprintable()
        assert line == " ".join(f"{name}={bad!r}" for name in FIELDS) + " size=0"

    async def test_it_can_stand_for_a_broker_with_limits_but_remembers_no_numbers(self) -> None:
        limits = Capabilities(max_body_bytes=1000, numbered=True)
        assert LoggingTransport(limits).capabilities == Capabilities(max_body_bytes=1000)


# -- a user's own ------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs/reference/transports.md"


class TestTransportOfThePage(PublisherContract):
    """The example of the documentation is bound as its reader would bind it."""

    @pytest.fixture
    def world(self, tmp_path: Path) -> publishing.World:
        blocks = re.findall(r"^```python\n(.+?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        names: dict[str, Any] = {}
        exec("\n".join(block for block in blocks if "class File" in block), names)  # noqa: S102  our own page
        world: publishing.World = names["FileWorld"](tmp_path / "topics")
        (tmp_path / "topics").mkdir()
        return world
