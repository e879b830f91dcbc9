"""The Pulsar transport on a real broker: the promises of every publisher, and those of this one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

import httpx
import pulsar as official
import pytest

from pillarbox.testing.conformance import publisher as publishing
from pillarbox.testing.conformance.publisher import PublisherContract, message
from pillarbox.testing.link import Link, Way
from pillarbox.transport import Message
from pillarbox.transports.pulsar import PulsarTransport
from pillarbox.transports.pulsar.connection import Endpoint
from pillarbox.transports.pulsar.names import TopicName
from pillarbox.transports.pulsar.producer import Producer
from tests.servers import Pulsar

SMALL = 20_000
"""Bytes that an unwelcoming topic takes."""


def new_topic() -> str:
    return f"persistent://public/default/test-{uuid4().hex}"


def read_back(url: str, topic: str) -> list[Message]:
    """All that is on a topic, by the official client."""
    client = official.Client(url, logger=official.ConsoleLogger(official.LoggerLevel.Error))
    try:
        reader = client.create_reader(topic, official.MessageId.earliest)
        found = []
        while reader.has_message_available():
            each = reader.read_next(timeout_millis=10_000)
            found.append(Message(topic, each.partition_key(), each.data(), each.properties()))
        return found
    finally:
        client.close()


class PulsarWorld(publishing.World):
    """A transport behind a link that can be made bad."""

    def __init__(self, server: Pulsar, link: Link, **options: Any) -> None:
        self._server = server
        self._link = link
        self.publisher: PulsarTransport = PulsarTransport(
            f"pulsar://127.0.0.1:{link.port}",
            admin_url=server.admin_url,
            **{"timeout": 2.0, "keep_alive": 0.5} | options,
        )
        # The broker says where it is itself, and that is not the link.
        here = Endpoint("127.0.0.1", link.port)
        self.publisher._client._through = lambda *_: here  # type: ignore[method-assign]

    async def new_topic(self) -> str:
        topic = new_topic()
        assert self.publisher.admin is not None
        await self.publisher.admin.create_topic(TopicName.parse(topic))
        return topic

    async def read(self, topic: str) -> Sequence[Message]:
        return await asyncio.to_thread(read_back, self._server.url, topic)

    async def go_away(self) -> None:
        self._link.cut()

    async def come_back(self) -> None:
        self._link.mend()

    async def unwelcome(self, topic: str, key: str, number: int) -> Message:
        await limit_messages(self._server, topic, SMALL)
        return message(topic, key, number, body=b"x" * SMALL * 2)

    async def lose_answer(self) -> None:
        self._link.swallow(frozenset({Way.DOWN}))
        asyncio.get_running_loop().call_later(0.3, self._link.mend)


async def limit_messages(server: Pulsar, topic: str, size: int) -> None:
    """A topic may take less than its broker; the policy takes a moment to be known."""
    async with httpx.AsyncClient(base_url=f"{server.admin_url}/admin/v2/{TopicName.parse(topic).path}") as rest:
        for _ in range(100):
            (await rest.post("/maxMessageSize", json=size)).raise_for_status()
            if (await rest.get("/maxMessageSize")).text == str(size):
                return
            await asyncio.sleep(0.05)
    raise TimeoutError


@pytest.fixture
async def link(pulsar: Pulsar) -> AsyncIterator[Link]:
    async with Link("127.0.0.1", int(pulsar.url.rpartition(":")[2])) as link:
        yield link


async def test_a_producer_that_is_opened_while_we_give_up_is_not_lost(
    pulsar: Pulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker would keep its name from us for as long as we are connected."""
    transport, topic = PulsarTransport(pulsar.url, admin_url=pulsar.admin_url), new_topic()
    really_open = Producer.open

    async def open_and_give_up(*args: Any, **options: Any) -> Producer:
        producer = await really_open(*args, **options)
        asyncio.get_running_loop().call_soon(opening.cancel)  # when we are done, and before anybody is told
        return producer

    with monkeypatch.context() as patch:
        patch.setattr(Producer, "open", open_and_give_up)
        opening = asyncio.ensure_future(transport.open("lane", [topic]))
        with pytest.raises(asyncio.CancelledError):
            await opening
    assert await transport.open("lane", [topic]) == {topic: -1}
    await transport.close()


async def test_a_holder_that_is_frozen_costs_its_successor_no_more_than_the_broker_takes_to_notice(
    pulsar: Pulsar, link: Link
) -> None:
    """A lane has several topics, and what fails while others are open is left alone for longer and longer."""
    sleeper = PulsarWorld(pulsar, link, keep_alive=3600.0).publisher
    successor, topics = PulsarTransport(pulsar.url, admin_url=pulsar.admin_url), [new_topic() for _ in range(3)]
    await sleeper.open("lane", topics[:1])
    await successor.open("lane", topics[1:])
    link.swallow(frozenset(Way))
    began = asyncio.get_running_loop().time()
    assert await successor.open("lane", topics) == dict.fromkeys(topics, -1)
    assert asyncio.get_running_loop().time() - began < 7.5
    await sleeper.close()
    await successor.close()


async def test_lanes_that_begin_together_ask_once_for_what_they_share(
    pulsar: Pulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, topic, other = PulsarTransport(pulsar.url, admin_url=pulsar.admin_url), new_topic(), new_topic()
    assert transport.admin is not None
    asked: Counter[str] = Counter()
    really_ask = transport.admin._request

    async def ask(method: str, path: str, *args: Any, **options: Any) -> Any:
        asked[path] += 1
        return await really_ask(method, path, *args, **options)

    monkeypatch.setattr(transport.admin, "_request", ask)
    await asyncio.gather(*(transport.open(f"lane{number}", [topic]) for number in range(16)))
    assert set(asked.values()) == {1}
    seen = dict(asked)
    await transport.open("lane0", [other])
    assert asked - Counter(seen) == {f"{TopicName.parse(other).path}/deduplicationEnabled?applied=true": 1}
    await transport.close()


@pytest.mark.parametrize("entries", ["by_key", "mixed"])
class TestPulsarPublisher(PublisherContract):
    @pytest.fixture
    async def world(self, pulsar: Pulsar, link: Link, entries: str) -> AsyncIterator[publishing.World]:
        world = PulsarWorld(pulsar, link, entries=entries)
        yield world
        await world.publisher.close()


class TestAtLeastOnce(PublisherContract):
    @pytest.fixture
    async def world(self, pulsar: Pulsar, link: Link) -> AsyncIterator[publishing.World]:
        world = PulsarWorld(pulsar, link, guarantee="at_least_once")
        yield world
        await world.publisher.close()
