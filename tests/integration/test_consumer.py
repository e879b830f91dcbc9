"""Consumers on real databases: effects once, in order, through failures of every class."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import uuid4

import msgspec
import pytest
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from pillarbox import (
    IntegrationEvent,
    Message,
    MessageContext,
    Pillarbox,
    Poison,
    Reject,
    RetryPolicy,
    Route,
    UnitOfWork,
    upcaster,
)
from pillarbox.codec import Content
from pillarbox.codecs.cloudevents import CloudEventsCodec
from pillarbox.consumers.consumer import Consumer
from pillarbox.consumers.intake import SubscriptionIntake
from pillarbox.consumers.lanes import LaneDestination
from pillarbox.consumers.processing import Processor
from pillarbox.consumers.progress import MANY_LINES
from pillarbox.consumers.window import Work
from pillarbox.errors import ConfigurationError
from pillarbox.stores import inbox as stored
from pillarbox.stores.inbox import SqlInbox
from pillarbox.stores.operations import Action
from pillarbox.stores.tables import inbox
from pillarbox.transport import Subscription
from pillarbox.transports.memory import MemoryTransport
from tests.conftest import EACH_DATABASE, FreshDatabase
from tests.questions import (
    QUICKLY,
    REPLIES,
    TOPIC,
    Answered,
    Asked,
    Effect,
    answering,
    ask,
    ask_for,
    dead_letters,
    effects,
    fail_for,
    fail_once,
    open_box,
    redrive,
)
from tests.relays import until
from tests.servers import Database


class Picky(IntegrationEvent, name="test.consumer.picky", version=2):
    """Some of them cannot be built."""

    raises: str

    def __post_init__(self) -> None:
        if self.raises == "ValueError":
            raise ValueError("not with me")


@upcaster("test.consumer.picky", from_version=1)
def _picky(payload: dict[str, Any]) -> dict[str, Any]:
    if payload["raises"] in _RAISED:
        raise _RAISED[payload["raises"]]("not with me")
    return payload


_RAISED: dict[str, type[Exception]] = {"KeyError": KeyError, "Poison": Poison, "Reject": Reject}


@pytest.fixture(params=EACH_DATABASE)
def database(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> Database:
    return fresh_database(request.param, shards=2)


@pytest.fixture
async def opened(database: Database) -> AsyncIterator[tuple[Pillarbox, MemoryTransport]]:
    async with open_box(database) as found:
        yield found


@pytest.fixture
def box(opened: tuple[Pillarbox, MemoryTransport]) -> Pillarbox:
    return opened[0]


@pytest.fixture
def broker(opened: tuple[Pillarbox, MemoryTransport]) -> MemoryTransport:
    return opened[1]


def processor_of(consumer: Consumer) -> Processor:
    intake = consumer._intakes[0]
    assert isinstance(intake, SubscriptionIntake)
    return intake._processor


# -- once --------------------------------------------------------------------------------------------------------------


@pytest.mark.dialects
async def test_h80_what_comes_again_has_no_second_effect(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)
    await ask(box, ("a", 1), ("b", 1), ("a", 2))
    first = await consumer.drain()
    broker.redeliver(TOPIC)
    broker.redeliver(TOPIC, 2, 0)
    again = await consumer.drain()
    assert (first.handled, first.duplicates) == (3, 0)
    assert (again.handled, again.duplicates) == (0, 5)
    assert sorted(await effects(box)) == [("a", 1), ("a", 2), ("b", 1)]


@pytest.mark.dialects
async def test_h79_a_failure_after_the_effect_undoes_it_with_the_row_of_the_inbox(box: Pillarbox) -> None:
    consumer = answering(box)
    calls = fail_once(consumer, lambda: ConnectionError("away"))
    await ask(box, ("a", 1), ("a", 2), ("a", 3))
    await consumer.drain()
    assert calls == [1, 2, 2, 3]
    assert await effects(box) == [("a", 1), ("a", 2), ("a", 3)]
    assert await dead_letters(box) == []


@pytest.mark.dialects
async def test_h78_two_members_that_get_the_same_message_at_once(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)
    await ask(box, *[(f"k{index}", index) for index in range(20)])
    for _ in range(4):
        broker.redeliver(TOPIC)
    tally = await consumer.drain()
    assert tally.handled == 20
    assert sorted(await effects(box)) == sorted((f"k{index}", index) for index in range(20))


@pytest.mark.dialects
async def test_h83_consumers_and_tenants_do_not_see_each_other(box: Pillarbox, broker: MemoryTransport) -> None:
    one, other = answering(box), answering(box, "other")
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    twin = Message(TOPIC, sent.key, sent.body, {**sent.headers, "tenant_id": "globex"})
    await broker.send("somebody", [twin])
    assert (await one.drain()).handled == 2
    assert (await other.drain()).handled == 2
    with pytest.raises(ConfigurationError, match="two consumers"):
        answering(box)


@pytest.mark.parametrize("step", ["close", "__aexit__", "commit", "rollback", "ROLLBACK"])
async def test_h79_a_handler_that_ends_the_transaction_of_its_inbox_fails(
    postgres_database: Database, step: str
) -> None:
    async with open_box(postgres_database) as (box, _):
        consumer = box.consumer("ends-it", source="broker", topics=[TOPIC], retry=RetryPolicy(0.01, 0.02, 1))

        @consumer.on(Asked)
        async def end(_event: Asked, session: AsyncSession) -> None:
            await session.execute(text("SELECT 1"))
            if step == "ROLLBACK":
                await session.execute(text(step))
            else:
                await getattr(session, step)(*(None, None, None) if step == "__aexit__" else ())

        await ask(box, ("a", 1))
        tally = await consumer.drain()
        assert (tally.handled, len(await dead_letters(box))) == (0, 1)


async def test_a_batch_that_fails_is_tried_one_by_one(box: Pillarbox) -> None:
    consumer = answering(box, batch=100)
    calls: list[int] = []

    @consumer.on(Asked)
    async def refuse(event: Asked) -> None:
        calls.append(event.number)
        if event.number == 3:
            raise Reject("three is not liked here")

    await ask(box, *[(f"k{number % 3}", number) for number in range(8)])
    await consumer.drain()
    assert len(calls) > 8
    assert sorted(number for _, number in await effects(box)) == [0, 1, 2, 4, 5, 6, 7]
    assert [letter.reason for letter in await dead_letters(box)] == ["three is not liked here"]


async def test_events_of_a_handler_are_caused_by_the_message(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)

    @consumer.on(Asked)
    async def answer(event: Asked, uow: UnitOfWork) -> None:
        uow.publish(Answered(subject=event.subject), key=event.subject)

    [asked] = await ask(box, ("a", 1))
    await consumer.drain()
    broker.redeliver(TOPIC)
    await consumer.drain()
    await box.relay().drain()
    [reply] = broker.sent(REPLIES)
    assert reply.headers["causation_id"] == reply.headers["correlation_id"] == str(asked.event_id)
    assert reply.headers["tenant_id"] == "acme"


# -- in order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 50])
async def test_h90_a_key_waits_for_its_failed_message_and_the_others_go_on(box: Pillarbox, batch: int) -> None:
    consumer = answering(box, batch=batch)
    calls = fail_once(consumer, lambda: TimeoutError("slow"))
    await ask(box, *[(key, number) for number in range(5) for key in "ab"])
    await consumer.drain()
    assert calls.count(2) > 2
    found = await effects(box)
    for key in "ab":
        assert [number for subject, number in found if subject == key] == [0, 1, 2, 3, 4]


async def test_h90_keys_go_on_that_come_behind_failing_ones_in_a_batch(box: Pillarbox) -> None:
    """Those that fail wait for about an hour, and nobody waits with them: no other key of a tenant of which a few fail,
    and no other tenant if it is many.
    """
    consumer = answering(box, batch=100, retry=RetryPolicy(base=3600.0, cap=3600.0))
    fail_for(consumer, "failing")
    healthy = [(f"healthy {number % 5}", number) for number in range(10)]
    await ask(box, *[(f"failing {number}", number) for number in range(2 * MANY_LINES)], tenant="many")
    await ask(box, *[(f"failing {number}", number) for number in range(MANY_LINES - 1)], *healthy, tenant="few")
    await ask(box, *healthy, tenant="none")
    running = asyncio.create_task(consumer.run())
    await until(lambda: consumer.status()["handled"] == 2 * len(healthy), seconds=20)
    consumer.stop()
    await running
    assert sorted(await effects(box)) == sorted(2 * healthy)


@pytest.mark.parametrize("batch", [1, 100])
async def test_a_drain_tries_every_key(box: Pillarbox, batch: int) -> None:
    consumer = answering(box, batch=batch)
    tried = fail_for(consumer, "failing")
    failing = [(f"failing {number}", number) for number in range(40)]
    healthy = [(f"healthy {number % 5}", number) for number in range(10)]
    await ask(box, *failing, *healthy)
    tally = await asyncio.wait_for(consumer.drain(), 60)  # though somebody tries those that fail all the time
    assert tally.handled == len(healthy)
    assert {*tried} == {subject for subject, _ in failing + healthy}
    found = await effects(box)
    for key in range(5):
        assert [number for subject, number in found if subject == f"healthy {key}"] == [key, key + 5]


async def test_messages_that_have_failed_before_come_after_the_others_and_are_halved(
    box: Pillarbox, broker: MemoryTransport
) -> None:
    consumer = answering(box, batch=100)
    tried = fail_for(consumer, "failing")
    failing = [f"failing {number}" for number in range(4)]
    await ask(box, *[(subject, 0) for subject in failing], ("healthy", 1), ("healthy", 2))
    works = [Work(message) for message in sorted(broker.sent(TOPIC), key=lambda message: message.key)]
    for work in works:
        work.tries = int(work.message.key in failing)
    await consumer.register()
    processed = await processor_of(consumer).process(works)
    first, second, third, fourth = failing
    assert tried == ["healthy", "healthy", first, first, first, second, third, third, fourth]
    assert [work.message.key for work in processed.settled] == ["healthy", "healthy"]
    assert [work.message.key for work, _ in processed.failed] == failing


@pytest.mark.every_loop
async def test_h87_while_the_database_is_away_the_rest_of_a_batch_is_not_tried(
    box: Pillarbox, broker: MemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = answering(box, batch=100)
    await ask(box, *[(f"k{number}", number) for number in range(50)])
    works = [Work(message) for message in broker.sent(TOPIC)]

    asked: list[int] = []

    def away(*arguments: Any) -> Any:
        asked.append(len(arguments[-1]))
        raise ConnectionRefusedError("the database")

    monkeypatch.setattr(Processor, "_admit", away)
    for _ in range(2):
        asked.clear()
        processed = await processor_of(consumer).process(works)
        assert asked == [50]
        assert processed.left == works
        assert processed.away == "ConnectionRefusedError: the database"
        assert not processed.failed


async def test_tenants_are_never_in_one_transaction(box: Pillarbox) -> None:
    consumer = answering(box, batch=100)
    seen: set[tuple[str | None, int]] = set()

    @consumer.on(Asked)
    async def see(context: MessageContext, uow: UnitOfWork, _event: Asked) -> None:
        seen.add((context.tenant, id(uow)))

    for tenant in ("acme", "globex", None):
        await ask(box, ("a", 1), ("b", 2), tenant=tenant)
    await consumer.drain()
    assert len({uow for _, uow in seen}) >= 1
    assert {tenant for tenant, _ in seen} == {"acme", "globex", None}
    assert len(await effects(box)) == 6


async def test_h79_a_handler_cannot_end_the_transaction(box: Pillarbox) -> None:
    consumer = answering(box)
    endings = ["commit", "rollback"]

    @consumer.on(Asked)
    async def end(_event: Asked, session: AsyncSession) -> None:
        if endings:
            await getattr(session, endings.pop())()

    await ask(box, ("a", 1))
    tally = await consumer.drain()
    assert (tally.failures, tally.handled) == (2, 1)
    assert await effects(box) == [("a", 1)]


# -- dead letters ------------------------------------------------------------------------------------------------------


async def test_a_rejected_event_is_a_dead_letter_with_its_reason(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)

    @consumer.on(Asked)
    async def refuse(_event: Asked) -> None:
        raise Reject("nobody knows")

    [asked] = await ask(box, ("a", 1))
    await consumer.drain()
    broker.redeliver(TOPIC)
    await consumer.drain()
    [letter] = await dead_letters(box, consumer="answers")
    assert (letter.consumer, letter.reason, letter.event_id) == ("answers", "nobody knows", str(asked.event_id))
    assert (letter.tenant, letter.event_type, letter.attempts) == ("acme", "test.consumer.asked", 1)
    [sent] = broker.sent(TOPIC)
    assert (letter.message.topic, letter.message.key, letter.message.body) == (TOPIC, "a", sent.body)
    assert letter.message.headers == sent.headers
    assert await dead_letters(box, consumer="other") == await dead_letters(box, tenant="globex") == []
    assert await effects(box) == []
    await box.relay().drain()
    assert broker.sent(f"{TOPIC}.dlq") == []


async def test_h88_poison_goes_to_the_dead_letter_topic_whenever_it_is_there(
    box: Pillarbox, broker: MemoryTransport
) -> None:
    consumer = answering(box)

    @consumer.on(Asked)
    async def choke(_event: Asked) -> None:
        raise Poison("cannot be swallowed")

    await ask(box, ("a", 1))
    broker.reject(lambda message: message.topic.endswith(".dlq"))
    await consumer.drain()
    await box.relay().drain()
    assert broker.sent(f"{TOPIC}.dlq") == []
    assert [letter.reason for letter in await dead_letters(box)] == ["Poison: cannot be swallowed"]


async def test_the_dead_letter_says_why(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    strange = Message(TOPIC, "k", b"not json", {**sent.headers, "event_id": str(uuid4())})
    foreign = Message(TOPIC, "k", b"{}", {**sent.headers, "event_id": str(uuid4()), "event_type": "test.nobody.knows"})
    newer = Message(TOPIC, "k", sent.body, {**sent.headers, "event_id": str(uuid4()), "schema_version": "v9"})
    nameless = Message(TOPIC, "", b"\xff\x00", {})
    await broker.send("somebody", [strange, foreign, newer, nameless])
    tally = await consumer.drain()
    await box.relay().drain()
    found = await dead_letters(box)
    assert (tally.handled, tally.spilled) == (1, 4)
    assert all(letter.reason for letter in found)
    assert {letter.message.body for letter in found} == {b"not json", b"{}", sent.body, b"\xff\x00"}
    dead = broker.sent(f"{TOPIC}.dlq")
    assert len(dead) == 4
    assert all(message.headers["dlq_reason"] and message.headers["dlq_consumer"] == "answers" for message in dead)
    broker.redeliver(TOPIC)
    await consumer.drain()
    assert len(await dead_letters(box)) == 4


async def test_a_topic_that_leaves_no_room_for_the_name_of_another_one_has_dead_letters_all_the_same(
    box: Pillarbox, broker: MemoryTransport, caplog: pytest.LogCaptureFixture
) -> None:
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    topics = ["t" * 396, "t" * 397]  # the first one's name has room
    consumer = box.consumer("answers", source="broker", topics=topics, retry=QUICKLY)

    @consumer.on(Asked)
    async def write(event: Asked, uow: UnitOfWork) -> None:
        uow.add(Effect(event_id=event.event_id, subject=event.subject, number=event.number))

    for topic in topics:
        ids = [{**sent.headers, "event_id": str(uuid4())} for _ in range(3)]
        bodies = [b"not json", b"nor this", sent.body]
        messages = [Message(topic, "k", body, headers) for body, headers in zip(bodies, ids, strict=True)]
        await broker.send("somebody", messages)
    tally = await consumer.drain()
    await box.relay().drain()
    assert (tally.handled, tally.spilled) == (2, 4)
    assert {letter.message.topic for letter in await dead_letters(box)} == {*topics}
    assert len(broker.sent(f"{topics[0]}.dlq")) == 2
    assert broker.sent(f"{topics[1]}.dlq") == []
    assert caplog.text.count("leaves no room for '.dlq'") == 1


async def test_what_is_known_and_not_wanted_is_left_out(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box, ignores=["test.nobody.*"])
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    for kind in ("test.nobody.knows", "test.consumer.answered"):
        headers = {**sent.headers, "event_id": str(uuid4()), "event_type": kind, "schema_version": "v1"}
        await broker.send("somebody", [Message(TOPIC, "k", b'{"subject": "a"}', headers)])
    assert (await consumer.drain()).handled == 1
    assert await dead_letters(box) == []


async def test_an_older_version_is_brought_to_the_one_that_is_wanted(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    headers = {**sent.headers, "event_id": str(uuid4()), "schema_version": "v1"}
    await broker.send("somebody", [Message(TOPIC, "a", b'{"subject": "old"}', headers)])
    await consumer.drain()
    assert await effects(box) == [("a", 1), ("old", 0)]


@pytest.mark.dialects
async def test_h82_the_same_event_with_another_body_is_quarantined_once(
    box: Pillarbox, broker: MemoryTransport
) -> None:
    consumer = answering(box)
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    await broker.send("somebody", [Message(TOPIC, "a", b'{"subject": "b", "number": 7}', sent.headers)])
    await consumer.drain()
    broker.redeliver(TOPIC)
    await consumer.drain()
    assert await effects(box) == [("a", 1)]
    [letter] = await dead_letters(box)
    assert "another body" in letter.reason


async def test_h82_what_cannot_be_read_is_a_dead_letter_also_under_a_known_id(
    box: Pillarbox, broker: MemoryTransport
) -> None:
    consumer = answering(box)
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    await broker.send("somebody", [Message(TOPIC, "a", b"not json", sent.headers)])
    for _ in range(2):
        await consumer.drain()
        broker.redeliver(TOPIC)
    assert [letter.message.body for letter in await dead_letters(box)] == [b"not json"]


async def test_an_id_that_stands_in_the_body_alone_is_one_name_for_effect_and_dead_letter(
    box: Pillarbox, broker: MemoryTransport
) -> None:
    consumer = answering(box)
    calls: list[int] = []

    @consumer.on(Asked)
    async def refuse_once(event: Asked) -> None:
        calls.append(event.number)
        if len(calls) == 1:
            raise Reject("not today")

    event_id, now = uuid4(), datetime.now(UTC)
    content = Content("test.consumer.asked", 2, event_id, now, {"subject": "a", "number": 7})
    codec = CloudEventsCodec()
    headers = {"content_type": codec.content_type}
    full = {
        **headers,
        "event_id": str(event_id),
        "event_type": "test.consumer.asked",
        "schema_version": "v2",
        "occurred_at": now.isoformat(),
        "aggregate_id": "a",
        "aggregate_type": "question",
    }
    await broker.send("somebody", [Message(TOPIC, "a", codec.encode(content, full), headers)])
    for _ in range(2):
        await consumer.drain()
        broker.redeliver(TOPIC)
    assert calls == [7]
    assert len(await dead_letters(box)) == 1
    await redrive(box, consumer)
    broker.redeliver(TOPIC)
    await consumer.drain()
    assert calls == [7, 7]
    assert await effects(box) == [("a", 7)]


async def test_another_version_of_an_admitted_event_is_a_duplicate(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    await broker.send("somebody", [Message(TOPIC, "a", b'{"subject": "a"}', {**sent.headers, "schema_version": "v1"})])
    tally = await consumer.drain()
    assert (tally.handled, tally.duplicates) == (1, 1)
    assert await dead_letters(box) == []


@pytest.mark.parametrize("batch", [1, 50])
async def test_an_event_that_came_first_in_an_unknown_version_takes_effect_in_a_known_one(
    box: Pillarbox, broker: MemoryTransport, batch: int
) -> None:
    consumer = answering(box, batch=batch)
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    await consumer.drain()
    event_id = str(uuid4())
    newer = Message(TOPIC, "b", b'{"number": "two"}', {**sent.headers, "event_id": event_id, "schema_version": "v3"})
    known = Message(TOPIC, "b", b'{"subject": "b", "number": 2}', {**sent.headers, "event_id": event_id})
    await broker.send("somebody", [newer])
    await consumer.drain()
    [letter] = await dead_letters(box)
    assert "comes in version 3, and 2 is the newest that is known" in letter.reason
    # In many lines, so that transactions meet.
    await broker.send("somebody", [Message(TOPIC, f"b{key}", known.body, known.headers) for key in range(8)])
    tally = await consumer.drain()
    assert (tally.handled, tally.duplicates, tally.spilled) == (1, 7, 0)
    await redrive(box, consumer)
    assert [each.message.body for each in await dead_letters(box)] == [newer.body]  # nobody can read it yet
    older = {**known.headers, "schema_version": "v1"}
    altered = Message(TOPIC, "b", b'{"subject": "c", "number": 3}', known.headers)
    await broker.send("somebody", [Message(TOPIC, "b", b'{"subject": "b"}', older), altered])
    broker.redeliver(TOPIC)
    again = await consumer.drain()
    assert again.handled == 0
    assert [letter.message.body for letter in await dead_letters(box)] == [newer.body, altered.body]
    assert await effects(box) == [("a", 1), ("b", 2)]


async def test_what_cannot_be_read_stays_a_dead_letter_whatever_becomes_of_the_known_version(
    box: Pillarbox, broker: MemoryTransport
) -> None:
    consumer = answering(box)
    fail_once(consumer, lambda: Reject("not today"))
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    await broker.send("somebody", [Message(TOPIC, "a", b"not json", sent.headers)])
    await broker.send("somebody", [Message(TOPIC, "a", b'{"subject": "a"}', {**sent.headers, "schema_version": "v1"})])
    two = {**sent.headers, "event_id": str(uuid4())}
    body = b'{"subject": "b", "number": 2}'
    await broker.send("somebody", [Message(TOPIC, "b", b"{}", {**two, "schema_version": "v3"})])
    await broker.send("somebody", [Message(TOPIC, "b", body, two)])
    for _ in range(2):
        await consumer.drain()
        assert await effects(box) == [("a", 1)]
        assert {letter.message.body for letter in await dead_letters(box)} == {b"not json", b"{}", body}
        broker.redeliver(TOPIC)
    await redrive(box, consumer)
    assert sorted(await effects(box)) == [("a", 1), ("b", 2)]
    assert {letter.message.body for letter in await dead_letters(box)} == {b"not json", b"{}"}


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", 'application/json;charset="UTF-8"', "Application/JSON"]
)
async def test_a_content_type_may_say_that_its_text_is_utf8(
    box: Pillarbox, broker: MemoryTransport, content_type: str
) -> None:
    consumer = answering(box)
    await ask(box, ("a", 1))
    [message] = broker.sent(TOPIC)
    for number, each in enumerate((content_type, "application/json; charset=latin-1", "application/json; profile=x")):
        headers = {**message.headers, "event_id": str(uuid4()), "content_type": each}
        await broker.send("stranger", [Message(TOPIC, str(number), message.body, headers)])
    assert (await consumer.drain()).handled == 2
    assert ["no codec reads" in letter.reason for letter in await dead_letters(box)] == [True, True]


async def test_strangers_headers_do_no_harm(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    for index, more in enumerate(
        (
            {"tenant_id": "x" * 500},
            {"tenant_id": "a\nb"},
            {"tenant_id": " acme"},
            {"traceparent": "nonsense"},
            {"version": "seven"},
            {"event_id": "no id"},
            {"event_index": "first"},
        )
    ):
        headers = {**sent.headers, "event_id": str(uuid4()), **more}
        await broker.send("somebody", [Message(TOPIC, f"k{index}" + "é" * 600, sent.body, headers)])
    tally = await consumer.drain()
    assert (tally.handled, tally.spilled) == (2, 6)
    found = await dead_letters(box)
    assert len(found) == 6
    assert {letter.message.key[2:] for letter in found} == {"é" * 600}


async def test_s54_a_message_by_the_topic_of_another_tenant_is_quarantined(
    box: Pillarbox, broker: MemoryTransport
) -> None:
    consumer = box.consumer("answers", source="broker", topics=["by-{tenant}"], retry=QUICKLY)
    seen: list[tuple[str | None, str]] = []

    @consumer.on(Asked)
    async def see(event: Asked, context: MessageContext) -> None:
        seen.append((context.tenant, event.subject))

    [asked] = await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    nobodys = {name: value for name, value in sent.headers.items() if name != "tenant_id"}
    await broker.send("the enemy", [Message("by-evil", "a", b'{"subject": "bad", "number": 1}', sent.headers)])
    assert (await consumer.drain()).spilled == 1
    await broker.send("acme itself", [Message("by-acme", "a", sent.body, sent.headers)])
    await broker.send("a stranger", [Message("by-evil", "a", sent.body, {**nobodys, "event_id": str(uuid4())})])
    tally = await consumer.drain()
    assert (tally.handled, tally.spilled) == (1, 1)  # the enemy has not taken the event's place
    assert seen == [("acme", "a")]
    await redrive(box, consumer)
    enemys, strangers = sorted(await dead_letters(box), key=lambda letter: letter.event_id != str(asked.event_id))
    assert (enemys.tenant, enemys.event_id) == (None, str(asked.event_id))
    assert "'acme' does not fit the topic 'by-evil'" in enemys.reason
    assert strangers.tenant is None
    assert "none is named, and 'by-evil' is a tenant's topic" in strangers.reason
    assert len(seen) == 1


async def test_s54_what_no_header_can_be_and_what_is_nested_too_deep_is_poison_at_once(
    box: Pillarbox, broker: MemoryTransport
) -> None:
    consumer = answering(box)
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    deep = b'{"subject": ' + b"[" * 50_000 + b"]" * 50_000 + b', "number": 1}'
    bad = [
        Message(TOPIC, "b", sent.body, {**sent.headers, "event_id": str(uuid4()), "correlation_id": "\n"}),
        Message(TOPIC, "c", deep, {**sent.headers, "event_id": str(uuid4())}),
    ]
    await broker.send("somebody", bad)
    tally = await consumer.drain()
    assert (tally.handled, tally.spilled) == (1, 2)
    assert {letter.message.key: letter.attempts for letter in await dead_letters(box)} == {"b": 1, "c": 1}


@pytest.mark.dialects
async def test_an_id_that_is_none_for_some_databases_stops_nobody(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)
    await ask(box, ("a", 1))
    sent = broker.sent(TOPIC)[0]
    odd = {**sent.headers, "event_id": "2b90926d-3bb5-869b-5d19-30624a30878e"}  # of no variant that is in use
    await broker.send("somebody", [Message(TOPIC, "b", sent.body, odd)])
    first = await consumer.drain()
    assert first.handled + first.spilled == 2  # MariaDB does not take it for the column of the effect either
    broker.redeliver(TOPIC)
    again = await consumer.drain()
    assert (again.handled, again.spilled) == (0, 0)


# -- classes of failures -----------------------------------------------------------------------------------------------


async def test_h87_an_unknown_error_is_a_dead_letter_only_after_its_attempts(box: Pillarbox) -> None:
    attempts = 4
    consumer = answering(box, retry=RetryPolicy(base=0.001, cap=0.01, attempts=attempts))
    calls: list[int] = []

    @consumer.on(Asked)
    async def stumble(event: Asked) -> None:
        calls.append(event.number)
        if event.number == 2:
            raise KeyError("a bug")

    await ask(box, ("a", 2), ("b", 1))
    async with asyncio.timeout(20):
        while not (found := await dead_letters(box)):
            await consumer.drain()
    assert calls.count(2) >= attempts
    assert await effects(box) == [("b", 1)]
    [letter] = found
    assert letter.attempts == attempts
    assert "KeyError" in letter.reason


class UnspeakableError(Exception):
    """An error with a bug of its own."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class UnspeakableReject(Reject):
    """A decision with a bug of its own."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Panic(BaseException):
    """As extensions in other languages raise."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(2), "SystemExit: 2"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "CancelledError: what it waited for was cancelled"),
        (BaseExceptionGroup("two", [Panic("one"), KeyError("other")]), "BaseExceptionGroup: two (2 sub-exceptions)"),
        (ExceptionGroup("unhandled errors in a TaskGroup", [KeyError("a bug")]), "KeyError: 'a bug'"),
        (Panic("in another language"), "Panic: in another language"),
        (UnspeakableError(), "UnspeakableError: its text cannot be read"),
        (UnspeakableReject("no"), "its text cannot be read"),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, BaseException) else "",
)
@pytest.mark.parametrize("source", ["broker", "outbox"])
@pytest.mark.parametrize("shape", ["async", "plain"])
async def test_whatever_a_handler_raises_is_an_error_of_its_message(
    box: Pillarbox, error: BaseException, said: str, source: str, shape: str
) -> None:
    """A handler that calls sys.exit() would else end each process that gets its message."""
    where: dict[str, Any] = {"source": "outbox"} if source == "outbox" else {"source": "broker", "topics": [TOPIC]}
    consumer = box.consumer("answers", **where, retry=RetryPolicy(base=0.001, cap=0.01, attempts=2))

    @consumer.on(Asked)
    async def write(event: Asked, uow: UnitOfWork) -> None:
        uow.add(Effect(event_id=event.event_id, subject=event.subject, number=event.number))
        if shape == "async" and event.number == 2:
            raise error

    @consumer.on(Asked)
    def plain(event: Asked) -> None:
        if shape == "plain" and event.number == 2:
            raise error

    await ask(box, ("a", 2), ("b", 1))
    async with asyncio.timeout(20):
        while not (failed := await reasons(box)):
            await consumer.drain()
    if shape == "plain" and isinstance(error, GeneratorExit):
        said = "RuntimeError: the handler raised GeneratorExit"  # the event loop would take it for its own
    assert failed == [said]
    await ask(box, ("c", 1))
    await consumer.drain()
    assert await effects(box) == [("b", 1), ("c", 1)]


async def reasons(box: Pillarbox) -> list[str]:
    """Why deliveries have failed for good."""
    async with box.engine.connect() as connection:
        found = await connection.execute(text("SELECT last_error FROM outbox_events WHERE status = 'FAILED'"))
        return [*found.scalars()]


@pytest.mark.parametrize("raised", ["ValueError", "KeyError", "Poison", "Reject"])
@pytest.mark.parametrize("batch", [1, 50])
async def test_h87_what_fails_while_it_is_built_is_a_dead_letter_as_if_a_handler_had_failed(
    box: Pillarbox, broker: MemoryTransport, raised: str, batch: int
) -> None:
    consumer = answering(box, batch=batch, retry=RetryPolicy(base=0.001, cap=0.01, attempts=3))

    @consumer.on(Picky)
    async def write(event: Picky, uow: UnitOfWork) -> None:
        uow.add(Effect(event_id=event.event_id, subject=event.raises, number=0))

    event_id, codec = uuid4(), CloudEventsCodec()
    version = 2 if raised == "ValueError" else 1
    content = Content("test.consumer.picky", version, event_id, datetime.now(UTC), {"raises": raised})
    body = codec.encode(content, {"aggregate_id": "k", "occurred_at": "2026-01-01T00:00:00Z"})
    await broker.send("somebody", [Message(TOPIC, "k", body, {"content_type": codec.content_type})])
    await ask(box, ("b", 1))
    async with asyncio.timeout(20):
        while not (found := await dead_letters(box)):
            await consumer.drain()
    broker.redeliver(TOPIC)
    await consumer.drain()
    assert await dead_letters(box) == found
    [letter] = found
    assert "not with me" in letter.reason
    assert letter.attempts == (1 if raised in ("Poison", "Reject") else 3)
    assert await effects(box) == [("b", 1)]


async def test_h87_a_duplicate_is_no_success(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)
    broken = False

    @consumer.on(Asked)
    async def stumble(_event: Asked) -> None:
        if broken:
            raise KeyError("everything is broken")

    await ask(box, ("known", 0), *[(f"k{number}", number) for number in range(1, MANY_LINES + 1)], tenant=None)
    known, *others = [Work(message) for message in broker.sent(TOPIC)]
    await consumer.register()
    processor = processor_of(consumer)
    assert (await processor.process([known])).settled == [known]
    consumer._progress._well.clear()  # that was long ago
    broken = True
    for other in others:
        await processor.process([other])
    assert (await processor.process([known])).settled == [known]
    assert consumer._progress.everything_fails


async def test_h87_no_transient_error_ever_makes_a_dead_letter(box: Pillarbox) -> None:
    consumer = answering(box)
    calls = 0

    @consumer.on(Asked)
    async def away(event: Asked) -> None:
        nonlocal calls
        calls += 1
        if event.number == 2:
            raise ConnectionRefusedError("away")

    await ask(box, ("a", 2), ("b", 1))
    for _ in range(3):
        await consumer.drain()
    assert calls > 3
    assert await dead_letters(box) == []
    assert await effects(box) == [("b", 1)]


# -- redrive -----------------------------------------------------------------------------------------------------------


@pytest.mark.dialects
async def test_h89_a_dead_letter_is_redriven_once(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)
    closed = True

    @consumer.on(Asked)
    async def refuse(_event: Asked) -> None:
        if closed:
            raise Reject("closed today")

    await ask(box, ("a", 1))
    await consumer.drain()
    [letter] = await dead_letters(box)
    await redrive(box, consumer)
    assert await dead_letters(box) == [letter]
    closed = False
    assert await ask_for(box, Action.REDRIVE) == 1
    assert await ask_for(box, Action.REDRIVE) == 0  # it is asked for already
    assert (await consumer.drain()).handled == 1
    assert await dead_letters(box) == []
    assert await ask_for(box, Action.REDRIVE) == 0
    broker.redeliver(TOPIC)
    assert (await consumer.drain()).duplicates == 1
    assert await effects(box) == [("a", 1)]


class Stranger:
    """Somebody whose CloudEvents have their id in the body, and perhaps another one in a header."""

    def __init__(self, broker: MemoryTransport, headers: dict[str, str]) -> None:
        self.event_id = uuid4()
        self.name = f"test.consumer.stranger-{self.event_id}"
        """A type that nobody knows before `deploy`."""
        self._broker = broker
        self._headers = {"content_type": CloudEventsCodec().content_type, **headers}

    async def send(self, number: int) -> None:
        attributes = {
            "specversion": "1.0",
            "id": str(self.event_id),
            "source": "elsewhere",
            "type": self.name,
            "subject": "a",
            "time": "2026-01-01T00:00:00Z",
            "schemaversion": "v1",
            "data": {"number": number},
        }
        await self._broker.send("stranger", [Message(TOPIC, "a", msgspec.json.encode(attributes), self._headers)])

    def deploy(self, consumer: Consumer, *, rejecting: Callable[[], bool] = lambda: False) -> None:
        """From now on the consumer knows them."""

        class Strange(IntegrationEvent, name=self.name, version=1):
            number: int

        @consumer.on(Strange)
        async def write(event: Strange, uow: UnitOfWork) -> None:
            if rejecting():
                raise Reject("not today")
            uow.add(Effect(event_id=event.event_id, subject="strange", number=event.number))


@pytest.fixture(params=[{}, {"event_id": "0198a2f0-0000-7000-8000-000000000001"}], ids=["no-header", "another-header"])
def stranger(request: pytest.FixtureRequest, broker: MemoryTransport) -> Stranger:
    return Stranger(broker, request.param)


async def test_h80_a_dead_letter_without_an_id_is_no_second_effect_of_what_came_again(
    box: Pillarbox, broker: MemoryTransport, stranger: Stranger
) -> None:
    consumer = answering(box)
    await stranger.send(1)
    await consumer.drain()
    assert len(await dead_letters(box)) == 1
    stranger.deploy(consumer)
    broker.redeliver(TOPIC)
    assert (await consumer.drain()).handled == 1
    await redrive(box, consumer)
    assert await effects(box) == [("strange", 1)]
    assert await dead_letters(box) == []
    assert (consumer.status()["handled"], consumer.status()["duplicates"]) == (1, 1)


async def test_h80_what_comes_again_after_its_dead_letter_was_redriven_has_no_second_effect(
    box: Pillarbox, broker: MemoryTransport, stranger: Stranger
) -> None:
    consumer = answering(box)
    await stranger.send(1)
    await consumer.drain()
    stranger.deploy(consumer)
    await redrive(box, consumer)
    broker.redeliver(TOPIC)
    assert (await consumer.drain()).duplicates == 1
    assert await effects(box) == [("strange", 1)]
    assert await dead_letters(box) == []


async def test_h80_a_dead_letter_without_an_id_may_be_rejected_before_it_has_its_effect(
    box: Pillarbox, broker: MemoryTransport
) -> None:
    consumer = answering(box)
    stranger = Stranger(broker, {})
    await stranger.send(1)
    await consumer.drain()
    rejects = True
    stranger.deploy(consumer, rejecting=lambda: rejects)
    await redrive(box, consumer)
    assert [letter.reason for letter in await dead_letters(box)] == ["not today"]
    rejects = False
    await redrive(box, consumer)
    broker.redeliver(TOPIC)
    assert (await consumer.drain()).duplicates == 1
    assert await effects(box) == [("strange", 1)]


async def test_a_dead_letter_with_its_id_in_the_body_has_its_effect(
    box: Pillarbox, broker: MemoryTransport, stranger: Stranger
) -> None:
    consumer = answering(box)
    rejects = True
    stranger.deploy(consumer, rejecting=lambda: rejects)
    await stranger.send(1)
    await consumer.drain()
    assert [letter.reason for letter in await dead_letters(box)] == ["not today"]
    rejects = False
    await redrive(box, consumer)
    broker.redeliver(TOPIC)
    assert (await consumer.drain()).duplicates == 1
    assert await effects(box) == [("strange", 1)]


async def test_h82_a_dead_letter_whose_event_has_come_with_another_body_stays(
    box: Pillarbox, stranger: Stranger
) -> None:
    consumer = answering(box)
    await stranger.send(1)
    await consumer.drain()
    stranger.deploy(consumer)
    await stranger.send(2)
    assert (await consumer.drain()).handled == 1
    for _ in range(2):
        await redrive(box, consumer)
        [letter] = await dead_letters(box)
        assert f"event {stranger.event_id} was seen before in version 1, with another body" in letter.reason
    assert await effects(box) == [("strange", 2)]


async def test_h83_a_consumer_takes_no_dead_letters_of_another_one(box: Pillarbox) -> None:
    billing = answering(box, "billing")
    shipping = answering(box, "shipping")
    fail_once(billing, lambda: Reject("closed today"))
    await ask(box, ("a", 2))
    await billing.drain()
    await shipping.drain()
    [letter] = await dead_letters(box)
    assert letter.consumer == "billing"
    assert await ask_for(box, Action.REDRIVE, "shipping") == 0
    assert await ask_for(box, Action.REDRIVE, "billing") == 1
    await shipping.drain()
    assert await effects(box) == [("a", 2)]
    assert [each.row for each in await dead_letters(box)] == [letter.row]
    await billing.drain()
    assert await effects(box) == [("a", 2)] * 2
    assert await dead_letters(box) == []


# -- without a broker --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 100])
async def test_the_outbox_itself_is_a_source(box: Pillarbox, batch: int) -> None:
    consumer = box.consumer("inside", source="outbox", batch=batch, retry=QUICKLY)
    calls: list[int] = []

    @consumer.on(Asked)
    async def write(event: Asked, uow: UnitOfWork) -> None:
        calls.append(event.number)
        if event.number == 3:
            raise Reject("three")
        uow.add(Effect(event_id=event.event_id, subject=event.subject, number=event.number))

    async with box.unit_of_work(tenant="acme") as uow:
        for number in range(6):
            uow.publish(Asked(subject=f"k{number % 2}", number=number), key=f"k{number % 2}")
    tally = await consumer.drain()
    assert tally.handled == 5
    found = await effects(box)
    assert [number for subject, number in found if subject == "k0"] == [0, 2, 4]
    assert [number for subject, number in found if subject == "k1"] == [1, 5]
    assert [letter.reason for letter in await dead_letters(box)] == ["three"]
    assert (await consumer.drain()).handled == 0


async def test_concurrency_holds_over_all_lanes_of_the_outbox(box: Pillarbox) -> None:
    consumer = box.consumer("inside", source="outbox", concurrency=1)
    at_work, most = 0, 0

    @consumer.on(Asked)
    async def work(_event: Asked) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0.01)
        at_work -= 1

    async with box.unit_of_work() as uow:
        for number in range(40):
            uow.publish(Asked(subject="any", number=number), key=f"k{number}")
    assert (await consumer.drain()).handled == 40
    assert most == 1


async def test_a_drain_settles_what_a_drain_that_was_cancelled_has_left_in_the_lanes(
    box: Pillarbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had taken effect, and its claim was gone, before the lane heard of it."""
    consumer = answering(box, grace=0.1)
    calls = fail_once(consumer, lambda: Reject("not now"))
    await consumer.drain()
    await ask(box, ("a", 2))
    await consumer.drain()
    await ask_for(box, Action.REDRIVE)
    send = LaneDestination.send

    async def cut(*given: Any) -> Any:
        await send(*given)
        draining.cancel()
        await asyncio.sleep(60)

    with monkeypatch.context() as patch:
        patch.setattr(LaneDestination, "send", cut)
        draining = asyncio.create_task(consumer.drain())
        with suppress(asyncio.CancelledError):
            await draining
    assert (calls, await effects(box)) == ([2, 2], [("a", 2)])
    await consumer.drain()
    async with box.engine.connect() as connection:
        assert await connection.scalar(text("SELECT count(*) FROM pillarbox_unsent")) == 0


async def test_a_drain_waits_for_a_handler_that_takes_long(box: Pillarbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that is not drained would go on with others."""
    monkeypatch.setattr("pillarbox.consumers.lanes.SLOW", 0.01)
    consumer = box.consumer("inside", source="outbox", concurrency=1)

    @consumer.on(Asked)
    async def dawdle(_event: Asked) -> None:
        await asyncio.sleep(0.05)

    async with box.unit_of_work() as uow:
        for number in range(5):
            uow.publish(Asked(subject="any", number=number), key=f"k{number}")
    tally = await consumer.drain()
    assert (tally.handled, tally.failures) == (5, 0)


# -- its life ----------------------------------------------------------------------------------------------------------


async def test_it_runs_until_it_is_stopped_and_finishes_what_it_has_begun(box: Pillarbox) -> None:
    consumer = answering(box)
    begun, go = asyncio.Event(), asyncio.Event()

    @consumer.on(Asked)
    async def dawdle(_event: Asked) -> None:
        begun.set()
        await go.wait()

    await ask(box, ("a", 1), ("a", 2))
    running = asyncio.create_task(consumer.run())
    await asyncio.wait_for(begun.wait(), 10)
    await until(lambda: consumer.healthy)
    consumer.stop()
    go.set()
    await asyncio.wait_for(running, 10)
    assert not consumer.alive
    assert await effects(box) == [("a", 1)]  # the second was not begun, and is not lost
    assert (await consumer.drain()).handled == 1


async def test_h91_what_takes_too_long_is_undone_and_comes_again(box: Pillarbox) -> None:
    consumer = answering(box, grace=0.05)
    begun = asyncio.Event()
    for_ever = True

    @consumer.on(Asked)
    async def dawdle(_event: Asked) -> None:
        begun.set()
        if for_ever:
            await asyncio.get_running_loop().create_future()

    await ask(box, ("a", 1))
    running = asyncio.create_task(consumer.run())
    await asyncio.wait_for(begun.wait(), 10)
    consumer.stop()
    await asyncio.wait_for(running, 10)
    assert await effects(box) == []
    for_ever = False
    assert (await consumer.drain()).handled == 1
    assert await effects(box) == [("a", 1)]


async def test_what_takes_longer_than_the_timeout_is_named_as_such(
    box: Pillarbox, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = answering(box, timeout=0.5)

    @consumer.on(Asked)
    async def dawdle(event: Asked) -> None:
        if event.number == 1:
            raise TimeoutError  # of the handler's own
        await asyncio.sleep(60)

    await ask(box, ("a", 1))
    await consumer.drain()
    assert "the handler did not finish" not in caplog.text
    await ask(box, ("b", 2), tenant="other")
    await consumer.drain()
    assert "failed (transient): TimeoutError: the handler did not finish within 0.5 s (timeout)" in caplog.text


@pytest.mark.parametrize("source", ["broker", "outbox"])
async def test_a_consumer_is_unhealthy_while_a_tenant_makes_no_progress(box: Pillarbox, source: str) -> None:
    where: dict[str, Any] = {"source": "outbox"} if source == "outbox" else {"source": "broker", "topics": [TOPIC]}
    consumer = box.consumer("answers", **where, retry=QUICKLY, patience=0.3)
    mended = asyncio.Event()

    @consumer.on(Asked)
    async def write(event: Asked, context: MessageContext, uow: UnitOfWork) -> None:
        if context.tenant == "bad" and not mended.is_set():
            raise ConnectionError("its server is away")
        uow.add(Effect(event_id=event.event_id, subject=event.subject, number=event.number))

    await ask(box, ("a", 1), ("b", 1), tenant="bad")
    await ask(box, *[(f"k{number}", number) for number in range(20)], tenant="good")
    running = asyncio.create_task(consumer.run())
    await until(lambda: consumer.status()["standstill"] == ["bad"])
    assert consumer.alive
    assert not consumer.healthy
    assert {sample.metric.name: sample.value for sample in consumer.samples()}["consumer_standstill_tenants"] == 1
    mended.set()
    await until(lambda: consumer.status()["handled"] == 22)
    await until(lambda: consumer.healthy)
    consumer.stop()
    await running


async def test_a_plain_handler_that_outlives_its_timeout_is_not_called_beside_itself_and_stops_nobody(
    box: Pillarbox,
) -> None:
    consumer = box.consumer("plain", source="broker", topics=[TOPIC], retry=QUICKLY, timeout=0.1, concurrency=2)
    ended, calls, at_once = threading.Event(), [], set()
    dealt_with: set[int] = set()

    @consumer.on(Asked)
    def work(event: Asked) -> None:
        if event.subject != "slow":
            dealt_with.add(event.number)
            return
        calls.append(event.number)
        at_once.add(len(calls))
        ended.wait()
        calls.pop()

    await ask(box, ("slow", 1), *[(f"quick {number}", number) for number in range(50)], ("slow", 2))
    running = asyncio.create_task(consumer.run())
    await until(lambda: len(dealt_with) == 50)
    await until(lambda: consumer._report.tally.failures > 5)
    ended.set()
    consumer.stop()
    await running
    await consumer.drain()
    assert at_once == {1}
    assert consumer.status()["handled"] == 52


async def test_a_group_that_was_joined_in_the_moment_of_being_cancelled_is_left(
    box: Pillarbox, broker: MemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker would deal messages to a member that is not there. The loop may end with `run`."""
    consumer, subscribe, left = answering(box), broker.subscribe, asyncio.Event()

    async def join(topics: Sequence[str], group: str) -> Subscription:
        subscription = await subscribe(topics, group)
        monkeypatch.setattr(subscription, "close", close)
        asyncio.get_running_loop().call_soon(running.cancel)
        return subscription

    async def close() -> None:
        await asyncio.sleep(0.05)  # a broker has to be told
        left.set()

    monkeypatch.setattr(broker, "subscribe", join)
    running = asyncio.create_task(consumer.run())
    with pytest.raises(asyncio.CancelledError):
        await running
    assert left.is_set()


async def test_a_box_that_stops_waits_for_all_its_consumers_at_once(postgres_database: Database) -> None:
    async with open_box(postgres_database) as (box, _):
        consumers = [answering(box, f"answers {number}", grace=0.5) for number in range(6)]
        at_work = asyncio.Semaphore(0)

        async def dawdle(_event: Asked) -> None:
            at_work.release()
            await asyncio.get_running_loop().create_future()

        for consumer in consumers:
            consumer.on(Asked)(dawdle)
        running = [asyncio.create_task(consumer.run()) for consumer in consumers]
        await ask(box, ("a", 1))
        for _ in consumers:
            await at_work.acquire()
        began = asyncio.get_running_loop().time()
        await box.stop()
        assert asyncio.get_running_loop().time() - began < 2.0
        await asyncio.gather(*running)


async def test_a_broker_that_goes_away_costs_nothing(box: Pillarbox, broker: MemoryTransport) -> None:
    consumer = answering(box)
    came = asyncio.Event()

    @consumer.on(Asked)
    async def see(event: Asked) -> None:
        if event.number == 2:
            came.set()

    running = asyncio.create_task(consumer.run())
    await ask(box, ("a", 1))
    broker.go_away()
    broker.come_back()
    await ask(box, ("a", 2))
    await asyncio.wait_for(came.wait(), 10)
    consumer.stop()
    await running
    assert await effects(box) == [("a", 1), ("a", 2)]


async def test_messages_of_a_lost_connection_are_forgotten(
    box: Pillarbox, broker: MemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key each message is a line of its own, and comes again as another one."""
    retry = RetryPolicy(base=3600.0, cap=3600.0)
    consumer = box.consumer("forgetful", source="broker", topics=["keyless"], retry=retry, concurrency=1)
    all_failed = [asyncio.Event() for _ in range(3)]
    connections: list[Subscription] = []
    calls: list[int] = []
    subscribe = broker.subscribe

    async def subscribed(topics: Sequence[str], group: str) -> Subscription:
        connections.append(await subscribe(topics, group))
        calls.clear()
        return connections[-1]

    monkeypatch.setattr(broker, "subscribe", subscribed)

    @consumer.on(Asked)
    async def fail(event: Asked) -> None:
        calls.append(event.number)
        if len({*calls}) == 3:
            all_failed[len(connections) - 1].set()
        raise ConnectionError("its server is away")

    await ask(box, *[("a", number) for number in range(3)])
    await broker.send("somebody", [Message("keyless", "", sent.body, sent.headers) for sent in broker.sent(TOPIC)])
    running = asyncio.create_task(consumer.run())
    for each in all_failed:
        await asyncio.wait_for(each.wait(), 10)
        assert consumer.status()["at_hand"] == 3
        await connections[-1].close()
    consumer.stop()
    await running


async def test_no_more_bytes_come_in_than_a_consumer_may_hold(box: Pillarbox, broker: MemoryTransport) -> None:
    """But for the message by which they become more: a thousand large ones would not fit into its memory."""
    largest, handled, begun, go = 100_000, set[int](), asyncio.Event(), asyncio.Event()
    consumer = box.consumer("small", source="broker", topics=["large"], max_bytes=3 * largest, concurrency=2)

    @consumer.on(Asked)
    async def dawdle(event: Asked) -> None:
        begun.set()
        await go.wait()
        assert sum(len(work.message.body) for work in consumer._at_hand()) < 4 * largest
        handled.add(event.number)

    await ask(box, *[(f"k{number % 5}", number) for number in range(40)])
    padded = [Message("large", sent.key, sent.body.ljust(largest), sent.headers) for sent in broker.sent(TOPIC)]
    await broker.send("somebody", padded)
    draining = asyncio.create_task(consumer.drain())
    await asyncio.wait_for(begun.wait(), 10)
    assert len(consumer._at_hand()) == 3
    go.set()
    await draining
    assert handled == {*range(40)}


async def test_it_stops_while_it_waits_for_its_source(box: Pillarbox) -> None:
    asked = asyncio.Event()

    class Silent(MemoryTransport):
        async def subscribe(self, topics: Sequence[str], group: str) -> Any:  # noqa: ARG002  it never answers
            asked.set()
            await asyncio.get_running_loop().create_future()

    consumer = box.consumer("patient", source=Silent(), topics=[TOPIC])
    consumer.on(Asked)(lambda _event: None)
    running = asyncio.create_task(consumer.run())
    await asyncio.wait_for(asked.wait(), 10)
    consumer.stop()
    await asyncio.wait_for(running, 10)


async def test_its_place_is_written_down_and_the_inbox_forgets(box: Pillarbox) -> None:
    consumer = answering(box, retention=timedelta(microseconds=1))
    await ask(box, ("a", 1), ("b", 2))
    await consumer.drain()
    async with box.engine.connect() as connection:
        [record] = await connection.run_sync(stored.consumers)
        kept = (await connection.execute(select(func.count()).select_from(inbox))).scalar_one()
    assert (record.name, record.kind, record.source, record.topics) == ("answers", "handlers", "broker", (TOPIC,))
    assert record.handled == 2
    assert record.last_occurred_at is not None
    assert kept == 0


async def test_what_was_handled_is_counted_once_although_nothing_can_be_pruned(
    box: Pillarbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_given: object) -> int:
        raise RuntimeError("DELETE is not granted")

    monkeypatch.setattr(SqlInbox, "prune", refuse)
    consumer = answering(box)
    for subject in ("a", "b", "c"):
        await ask(box, (subject, 1))
        await consumer.drain()
    async with box.engine.connect() as connection:
        [record] = await connection.run_sync(stored.consumers)
    assert record.handled == 3


async def test_a_handler_may_take_longer_than_the_brokers_deadline(sqlite_database: Database) -> None:
    engine = create_async_engine(sqlite_database.url())
    broker = MemoryTransport(ack_deadline=0.1)
    routes = [Route("test.consumer.asked", to="broker", topic=TOPIC)]
    async with Pillarbox(engine, transports={"broker": broker}, routes=routes) as box:
        await box.migrate()
        consumer = box.consumer("slow", source="broker", topics=[TOPIC])
        calls: list[int] = []
        begun, go = asyncio.Event(), asyncio.Event()

        @consumer.on(Asked)
        async def dawdle(event: Asked) -> None:
            calls.append(event.number)
            begun.set()
            await go.wait()

        await ask(box, ("a", 1))
        draining = asyncio.create_task(consumer.drain())
        await asyncio.wait_for(begun.wait(), 10)
        other = await broker.subscribe([TOPIC], "slow")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(other.receive(1), 0.5)  # five deadlines
        go.set()
        await draining
        assert calls == [1]
    await engine.dispose()


# -- what cannot work --------------------------------------------------------------------------------------------------


async def test_what_cannot_work_is_refused_at_once(box: Pillarbox) -> None:
    with pytest.raises(ConfigurationError, match="no transport is called 'nowhere'"):
        box.consumer("one", source="nowhere", topics=["t"])
    with pytest.raises(ConfigurationError, match="needs topics"):
        box.consumer("two", source="broker")
    with pytest.raises(ConfigurationError, match="has no topics"):
        box.consumer("three", source="outbox", topics=["t"])
    silent = box.consumer("four", source="broker", topics=["t"])
    with pytest.raises(ConfigurationError, match="has no handler"):
        await silent.drain()

    async def handle(_event: Asked) -> None: ...

    with pytest.raises(ConfigurationError, match=r"on takes event types, as in @four\.on\(OrderPlaced\)"):
        silent.on(cast(Any, handle))  # as @silent.on without parentheses

    with pytest.raises(ConfigurationError, match="must not be a generator"):

        @box.subscribe(Asked, before_commit=True)
        def generator(event: Asked, _session: Any) -> Any:
            yield event


@pytest.mark.parametrize(
    ("option", "wrong", "said"),
    [
        *[
            (name, wrong, "must be a whole number above 0")
            for name in ("batch", "concurrency", "max_messages", "max_bytes", "max_spilled")
            for wrong in (0, -1, 1.5, True, "3", None)
        ],
        *[
            (name, wrong, "must be a number above 0")
            for name in ("timeout", "patience", "grace")
            for wrong in (0, -1.0, float("nan"), float("inf"), "3", None)
        ],
        *[
            ("retention", wrong, "must be a timedelta above 0, like timedelta(days=30)")
            for wrong in (30, timedelta(0), timedelta(days=-1), None)
        ],
        *[
            ("ignores", wrong, "is a list of patterns")
            for wrong in ("test.**", ["***"], [5], 5, ["test.consumer.asked", "no pattern"])
        ],
        ("on_failure", "explode", "is 'park' or 'skip'"),
        ("retry", 5, "is a RetryPolicy"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_its_name(option: str, wrong: Any, said: str) -> None:
    box = Pillarbox(transports={"broker": MemoryTransport()})
    for source in ({"source": "broker", "topics": ["t"]}, {"source": "outbox"}):
        with pytest.raises(ConfigurationError, match=re.escape(f"consumer 'odd': {option} {said}")) as caught:
            box.consumer("odd", **source, **{option: wrong})
        assert "got" in str(caught.value)
    assert not box.consumers


async def test_housekeeping_that_fails_is_told_of_once_for_each_outage(
    box: Pillarbox, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = answering(box)
    await consumer.register()
    for _ in range(2):
        await rename(box, "pillarbox_consumers", "elsewhere")
        await consumer._note()
        await consumer._note()
        await rename(box, "elsewhere", "pillarbox_consumers")
        await consumer._note()
        await consumer._note()
    lines = [record.getMessage() for record in caplog.records if "prune" in record.getMessage()]
    assert [line.endswith("again") for line in lines] == [False, True, False, True]
    assert "consumer answers cannot store its position or prune its inbox" in lines[0]
    assert "pillarbox_consumers" in lines[0]


async def rename(box: Pillarbox, old: str, new: str) -> None:
    async with box.engine.begin() as connection:
        await connection.execute(text(f"ALTER TABLE {old} RENAME TO {new}"))
