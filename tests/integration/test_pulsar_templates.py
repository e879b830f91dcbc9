"""Topics by template on a real Pulsar: in any part of their names, with those of tenants that come later."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from uuid import uuid4

import pulsar as official
import pytest
from sqlalchemy import String
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import IntegrationEvent, MessageContext, Pillarbox, Route, UnitOfWork
from pillarbox.errors import ConfigurationError
from pillarbox.testing.conformance.publisher import answer, by_key, messages
from pillarbox.testing.conformance.subscriber import received_by_key
from pillarbox.transport import Message, Received, Subscription
from pillarbox.transports.pulsar import PulsarSubscriber, PulsarTransport
from pillarbox.transports.pulsar.admin import Policies, PulsarAdmin
from pillarbox.transports.pulsar.names import TopicName
from tests.servers import Database, Pulsar

SOON = 5.0
"""Seconds after which the first event of a new tenant has taken effect."""


class Booked(IntegrationEvent, name="test.pulsar-templates.booked"):
    cents: int


class Base(DeclarativeBase):
    pass


class Booking(Base):
    __tablename__ = "bookings"

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(String(100))
    topic: Mapped[str] = mapped_column(String(200))


@pytest.fixture
def unique() -> str:
    return uuid4().hex


@pytest.fixture
async def publisher(pulsar: Pulsar) -> AsyncIterator[PulsarTransport]:
    publisher = PulsarTransport(pulsar.url, guarantee="at_least_once")
    yield publisher
    await publisher.close()


@pytest.fixture
async def members() -> AsyncIterator[list[Subscription]]:
    """Whoever is in it leaves at the end."""
    members: list[Subscription] = []
    yield members
    for member in members:
        await answer(member.close())


@pytest.fixture
async def admin(pulsar: Pulsar) -> AsyncIterator[PulsarAdmin]:
    async with PulsarAdmin(pulsar.admin_url) as admin:
        yield admin


async def publish(publisher: PulsarTransport, messages: Sequence[Message]) -> None:
    outcome = await publisher.send("producer", messages)
    assert len(outcome.accepted) == len(messages), outcome


async def receive(member: Subscription, count: int, patience: float = 30.0) -> list[Received]:
    found: list[Received] = []
    async with asyncio.timeout(patience):
        while len(found) < count:
            found += await member.receive(count - len(found))
    return found


async def make(admin: PulsarAdmin, *namespaces: str) -> None:
    for namespace in namespaces:
        await admin.create_tenant(namespace.partition("/")[0])
        await admin.create_namespace(namespace, Policies())


# -- subscriptions -----------------------------------------------------------------------------------------------------


async def test_topics_and_templates_in_one_subscription(
    pulsar: Pulsar, publisher: PulsarTransport, members: list[Subscription], unique: str
) -> None:
    plain, short, whole = f"p-{unique}", f"a-{unique}.{{tenant}}", f"persistent://public/default/b-{unique}.{{tenant}}"
    topics = [plain, short.format(tenant="acme"), whole.format(tenant="acme"), short.format(tenant="globex")]
    sent = [each for topic in topics for each in messages(topic, "xyx")]
    await publish(publisher, [*sent, *messages(f"c-{unique}.acme", "x"), *messages(f"a-{unique}.a.b", "x")])
    subscriber = PulsarSubscriber(pulsar.url)
    members.append(member := await subscriber.subscribe([plain, short, whole, topics[3]], "billing"))
    found = await receive(member, len(sent))
    for topic in topics:  # each by the name that its template has
        theirs = [each for each in found if each.message.topic == topic]
        assert received_by_key(theirs) == by_key([each for each in sent if each.topic == topic])
    await member.ack(found)
    await member.close()
    members.append(successor := await subscriber.subscribe([plain, short, whole], "billing"))
    late = [each for topic in topics for each in messages(topic, "x", first=9)]
    await publish(publisher, late)
    ids = {each.message.headers["event_id"] for each in await receive(successor, len(late))}
    assert ids == {each.headers["event_id"] for each in late}


@pytest.mark.parametrize("partitions", [0, 3])
async def test_topics_that_come_later_are_received_soon_from_their_beginning(
    pulsar: Pulsar,
    *,
    publisher: PulsarTransport,
    admin: PulsarAdmin,
    members: list[Subscription],
    unique: str,
    partitions: int,
) -> None:
    template = f"t-{unique}-{{tenant}}"
    members.append(member := await PulsarSubscriber(pulsar.url, start="latest").subscribe([template], "billing"))
    for tenant in ("acme", "globex"):
        topic = template.format(tenant=tenant)
        if partitions:
            await admin.create_topic(TopicName.parse(topic), partitions)
        await publish(publisher, sent := messages(topic, "abcdeabcde"))
        found = await receive(member, len(sent), SOON)
        assert {each.message.topic for each in found} == {topic}
        assert received_by_key(found) == by_key(sent)
        await member.ack(found)


@pytest.mark.parametrize(
    ("template", "first", "later"),
    [
        ("persistent://{{tenant}}/pay/{0}", "acme-{0}/pay", "globex-{0}/pay"),
        ("persistent://public/{0}-{{tenant}}/events", "public/{0}-acme", "public/{0}-globex"),
        ("acme-{0}/{{aggregate}}/of-{{tenant}}", "acme-{0}/orders", "acme-{0}/bills"),
        ("persistent://{{tenant}}/{{tenant}}/{0}", "acme-{0}/acme-{0}", "globex-{0}/globex-{0}"),
    ],
)
async def test_any_part_of_a_name_may_be_a_placeholder(
    pulsar: Pulsar,
    *,
    publisher: PulsarTransport,
    admin: PulsarAdmin,
    members: list[Subscription],
    unique: str,
    template: str,
    first: str,
    later: str,
) -> None:
    template, namespaces = template.format(unique), [each.format(unique) for each in (first, later)]
    last = template.rpartition("/")[2].replace("{tenant}", "acme")
    await make(admin, namespaces[0], f"acme-{unique}/other")
    topics = [("persistent://" if "://" in template else "") + f"{each}/{last}" for each in namespaces]
    await publish(publisher, [*messages(topics[0], "ab"), *messages(f"acme-{unique}/other/of--acme", "a")])
    subscriber = PulsarSubscriber(pulsar.url, admin_url=pulsar.admin_url)
    members.append(member := await subscriber.subscribe([template], "billing"))
    assert {each.message.topic for each in await receive(member, 2)} == {topics[0]}
    await make(admin, namespaces[1])
    await publish(publisher, messages(topics[1], "ab"))
    assert {each.message.topic for each in await receive(member, 2, SOON)} == {topics[1]}


async def test_a_topic_that_cannot_be_joined_keeps_no_other_waiting(
    pulsar: Pulsar,
    publisher: PulsarTransport,
    members: list[Subscription],
    unique: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    template = f"t-{unique}-{{tenant}}"
    client = official.Client(pulsar.url)
    rival = client.subscribe(template.format(tenant="acme"), "billing", official.ConsumerType.Exclusive)
    members.append(member := await PulsarSubscriber(pulsar.url).subscribe([template], "billing"))
    await publish(publisher, sent := messages(template.format(tenant="globex"), "ab"))
    assert received_by_key(await receive(member, 2, SOON)) == by_key(sent)
    rival.close()
    client.close()
    assert [each for each in caplog.messages if f"{unique}-acme cannot be received now" in each]


async def test_a_topic_that_does_not_answer_makes_no_other_late(
    pulsar: Pulsar, publisher: PulsarTransport, members: list[Subscription], unique: str
) -> None:
    template, answered = f"t-{unique}-{{tenant}}", threading.Event()
    members.append(member := await PulsarSubscriber(pulsar.url).subscribe([template], "billing"))
    subscribe = member._subscribe

    def hang(topic: str, **options: Any) -> Any:
        if topic.endswith("-acme"):
            answered.wait()
        return subscribe(topic, **options)

    member._subscribe = hang
    await publish(publisher, acme := messages(template.format(tenant="acme"), "a"))
    async with asyncio.timeout(SOON):
        while not member._joins:  # noqa: ASYNC110  nobody is told of it
            await asyncio.sleep(0.01)
    await publish(publisher, globex := messages(template.format(tenant="globex"), "a"))
    assert received_by_key(await receive(member, 1, SOON)) == by_key(globex)
    answered.set()
    assert received_by_key(await receive(member, 1)) == by_key(acme)


async def test_a_topic_that_is_lost_is_joined_again(
    pulsar: Pulsar,
    publisher: PulsarTransport,
    members: list[Subscription],
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client says nothing of it."""
    monkeypatch.setattr("pillarbox.transports.pulsar.subscriber._LOST", 0)
    template, plain = f"t-{unique}-{{tenant}}", f"p-{unique}"
    await publish(publisher, messages(template.format(tenant="acme"), "a"))
    member = await PulsarSubscriber(pulsar.url).subscribe([template, plain], "billing")
    members.append(member)
    await member.ack(await receive(member, 1))
    of_template, of_plain = (
        next(each.of_client for topic, each in member._consumers.items() if topic.topic == name)
        for name in (template.format(tenant="acme"), plain)
    )
    of_template.close()
    await publish(publisher, sent := messages(template.format(tenant="acme"), "a", first=2))
    assert received_by_key(await receive(member, 1)) == by_key(sent)
    of_plain.close()
    with pytest.raises(ConnectionError, match=rf"lost: .*{plain} has had no connection"):
        await receive(member, 1)


async def test_entries_of_several_keys_are_told_of_once(
    pulsar: Pulsar, members: list[Subscription], unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = PulsarTransport(pulsar.url, guarantee="at_least_once", entries="mixed")
    topics = [f"t-{unique}", f"u-{unique}"]
    for kind, warnings in (("failover", 0), ("key_shared", 2)):
        members.append(member := await PulsarSubscriber(pulsar.url, kind=kind).subscribe(topics, kind))  # type: ignore[arg-type]
        for topic in topics:
            for first in (1, 20):
                await publish(publisher, messages(topic, "aabb" * 3, first=first))
        await receive(member, 48 if kind == "failover" else 96)
        assert len([each for each in caplog.messages if "entries with several keys" in each]) == warnings
    await publisher.close()


# -- consumers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def open_box(postgres_database: Database, pulsar: Pulsar) -> AsyncIterator[Callable[[str], Awaitable[Pillarbox]]]:
    engine = create_async_engine(postgres_database.url())
    boxes: list[Pillarbox] = []

    async def open_box(topic: str) -> Pillarbox:
        transport = PulsarTransport(pulsar.url, admin_url=pulsar.admin_url)
        routes = [Route("test.pulsar-templates.*", to="pulsar", topic=topic)]
        boxes.append(box := Pillarbox(engine, transports={"pulsar": transport}, routes=routes))
        await box.start()
        await box.migrate()
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        return box

    yield open_box
    for box in boxes:
        await box.stop()
    await engine.dispose()


@pytest.mark.parametrize("template", ["persistent://{{tenant}}/pay/{0}", "{0}-{{tenant}}"])
async def test_the_first_event_of_a_new_tenant_takes_effect_soon(
    open_box: Callable[[str], Awaitable[Pillarbox]],
    admin: PulsarAdmin,
    unique: str,
    template: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its namespace and its topic were not there when the consumer started."""
    box = await open_box(template.format(unique))
    consumer = box.consumer("bookings", source="pulsar", topics=[template.format(unique)])
    booked: asyncio.Queue[tuple[str | None, str]] = asyncio.Queue()

    @consumer.on(Booked)
    async def book(_event: Booked, uow: UnitOfWork, context: MessageContext) -> None:
        uow.add(Booking(tenant=context.tenant, topic=context.topic))
        booked.put_nowait((context.tenant, context.topic))

    running, relaying = asyncio.create_task(consumer.run()), asyncio.create_task((relay := box.relay()).run())
    for tenant in (f"acme-{unique}", f"globex-{unique}"):
        await make(admin, f"{tenant}/pay")
        async with box.unit_of_work(tenant=tenant) as uow:
            uow.publish(Booked(cents=1), key="k")
        async with asyncio.timeout(SOON):
            assert await booked.get() == (tenant, template.format(unique).replace("{tenant}", tenant))
    consumer.stop()
    relay.stop()
    await asyncio.gather(running, relaying)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_s54_a_tenant_cannot_speak_for_another_by_a_topic_of_its_own(
    open_box: Callable[[str], Awaitable[Pillarbox]], publisher: PulsarTransport, admin: PulsarAdmin, unique: str
) -> None:
    """Not even if the last part of it is the name of a topic that all may write to."""
    template, plain = f"{{tenant}}/pay/{unique}", unique
    box = await open_box(template)
    acme, evil = f"acme-{unique}", f"evil-{unique}"
    await make(admin, f"{acme}/pay", f"{evil}/pay")
    consumer = box.consumer("bookings", source="pulsar", topics=[template, plain])
    booked: list[tuple[str | None, str]] = []

    @consumer.on(Booked)
    async def book(_event: Booked, context: MessageContext) -> None:
        booked.append((context.tenant, context.topic))

    async with box.unit_of_work(tenant=acme) as uow:
        uow.publish(Booked(cents=1), key="k")
    await box.relay().drain()
    [sent] = [each.message for each in await box_messages(box, f"{acme}/pay/{unique}")]
    for topic, event_id in ((f"{evil}/pay/{unique}", uuid4()), (plain, uuid4())):
        await publish(publisher, [Message(topic, "k", sent.body, {**sent.headers, "event_id": str(event_id)})])
    await consumer.drain(idle=2.0)
    assert sorted(booked) == sorted([(acme, f"{acme}/pay/{unique}"), (acme, plain)])


async def box_messages(box: Pillarbox, topic: str) -> Sequence[Received]:
    transport = box.transports["pulsar"]
    assert isinstance(transport, PulsarTransport)
    member = await transport.subscribe([topic], "looks")
    found = await receive(member, 1)
    await member.close()
    return found


async def test_what_cannot_be_served_is_refused_when_the_consumer_is_declared(postgres_database: Database) -> None:
    transport = PulsarTransport("pulsar://127.0.0.1:1", guarantee="at_least_once")
    box = Pillarbox(postgres_database.url(), transports={"pulsar": transport})
    for topic, what in (
        ("persistent://{tenant}/pay/events", "'persistent://{tenant}/pay/events': .* give admin_url"),
        ("acme/{tenant}/events", "give admin_url"),
        ("orders-{tenants}", "no other braces"),
        ("orders/{tenant}", "write persistent://"),
        ("orders-partition-1", "-partition-N"),
    ):
        with pytest.raises(ConfigurationError, match=what):
            box.consumer("one", source="pulsar", topics=["fine", topic])
    assert not box.consumers
    with pytest.raises(ConfigurationError, match="subscription is one of key_shared, failover"):
        PulsarTransport("pulsar://a", guarantee="at_least_once", subscription="shared")  # type: ignore[arg-type]
