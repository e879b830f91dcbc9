"""What we publish to a real Pulsar, as its official clients for Python and for Java read it.

We speak the protocol ourselves, so these clients are the judges: of how entries are laid out, of what the broker and a
key_shared subscription make of them, and of the partition that a key belongs to.
"""

from __future__ import annotations

import asyncio
import random
import string
from base64 import b64decode
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import pulsar as official
import pytest

from pillarbox.transport import Message
from pillarbox.transports.pulsar import PulsarTransport
from pillarbox.transports.pulsar.names import TopicName, partition_of
from tests.servers import JavaClient, Pulsar, Server

Cut = Literal["by_key", "mixed"]
Compression = Literal["none", "lz4", "zstd"]

ALONE, PARTITIONED = 0, 3
"""How many partitions a topic has."""
KINDS = pytest.mark.parametrize("partitions", [ALONE, PARTITIONED], ids=["one-topic", "partitioned"])
PRODUCER = "orders/0"
KEYS = ("order-1", "order-2", "ключ", "鍵 🔑", "e\u0301", "\u00e9", '"quoted" \\ key', "k" * 512)


@pytest.fixture
def java(use_server: Callable[[str], Server]) -> JavaClient:
    server = use_server("java")
    assert isinstance(server, JavaClient)
    return server


# -- sending -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def publishing(
    pulsar: Pulsar, partitions: int, cut: Cut, compression: Compression = "none"
) -> AsyncIterator[tuple[PulsarTransport, str]]:
    """A transport, and a new topic that is open."""
    topic = f"persistent://public/default/read-back-{uuid4().hex}"
    transport = PulsarTransport(pulsar.url, admin_url=pulsar.admin_url, entries=cut, compression=compression)
    try:
        assert transport.admin is not None
        await transport.admin.create_topic(TopicName.parse(topic), partitions)
        await transport.open(PRODUCER, [topic])
        yield transport, topic
    finally:
        await transport.close()


def runs(seed: int, length: int) -> Iterator[str]:
    """Keys in runs, as a lane brings them to a transport that cuts by key."""
    chosen = random.Random(seed)
    left = length
    while left:
        run = min(left, chosen.randint(1, 6))
        yield from [chosen.choice(KEYS)] * run
        left -= run


def bodies(seed: int) -> Iterator[bytes]:
    """Nothing, what is no text, small ones, and 100 kB that get smaller by compression or do not."""
    chosen = random.Random(seed)
    yield from (b"", b"\x00\xff\n", b"outbox " * 14_000, chosen.randbytes(100_000), b"")
    while True:
        yield b'{"amount": %d}' % chosen.randrange(10**6) * chosen.randint(1, 40)


def headers() -> Iterator[dict[str, str]]:
    for number in count():
        yield {}
        yield {"event_id": str(number), "empty": "", "": "no name"}
        yield {"tenant_id": "Zürich ☃", "naïve 名": "🎉\n\t\"'\\ \x00"}
        yield {"long": "ü" * 10_000} if number == 1 else {"event_type": "placed"}


def numbers(seed: int) -> Iterator[int]:
    """Rising, with gaps, from 0 to beyond what 32 bits can hold."""
    chosen = random.Random(seed)
    number = 0
    while True:
        yield number
        number += chosen.choice((1, 1, 2, 100, 10_000, 2**30))


def placed(transport: PulsarTransport, topic: str, keys: Iterable[str], seed: int = 1) -> list[Message]:
    """Messages with these keys, each with the place that a lane would give it."""
    partitions = transport.partitions(topic)
    return [
        Message(topic, key, body, heads, number, transport.place(topic, key, partitions) if partitions else "")
        for key, body, heads, number in zip(keys, bodies(seed), headers(), numbers(seed), strict=False)
    ]


async def send(transport: PulsarTransport, messages: Sequence[Message], *, at_once: int) -> None:
    for start in range(0, len(messages), at_once):
        some = messages[start : start + at_once]
        outcome = await transport.send(PRODUCER, some)
        assert sorted(outcome.accepted) == [*range(len(some))], outcome
        assert not outcome.duplicates


def by_place(messages: Iterable[Message]) -> dict[str, list[Message]]:
    found: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        found[message.place or message.topic].append(message)
    return found


# -- reading -----------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """A message as a client tells it."""

    key: str
    headers: Mapping[str, str]
    body: bytes
    id: tuple[int, int, int]
    """Ledger, entry, and which of the entry."""


def sent(message: Message) -> tuple[str, Mapping[str, str], bytes]:
    return message.key, message.headers, message.body


def read_by_java(told: Sequence[Mapping[str, Any]]) -> dict[str, list[Seen]]:
    found: dict[str, list[Seen]] = defaultdict(list)
    for each in told:
        place = each["ledger"], each["entry"], each["batch_index"]
        found[each["topic"]].append(Seen(each["key"], each["properties"], b64decode(each["body"]), place))
    return found


def read_by_python(url: str, topic: str, expected: int) -> dict[str, list[Seen]]:
    """So many messages from the start, and whatever is there beyond them."""
    client = official.Client(url, logger=official.ConsoleLogger(official.LoggerLevel.Error))
    try:
        reader = client.create_reader(topic, official.MessageId.earliest)
        found: dict[str, list[Seen]] = defaultdict(list)
        for index in count():
            if index >= expected and not reader.has_message_available():
                return found
            message = reader.read_next(20_000)
            place = message.message_id()
            found[message.topic_name()].append(
                Seen(
                    message.partition_key(),
                    message.properties(),
                    message.data(),
                    (place.ledger_id(), place.entry_id(), place.batch_index()),
                )
            )
            assert not message.has_null_value()
        raise AssertionError
    finally:
        client.close()


# -- tests -------------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("cut", ["by_key", "mixed"])
async def test_both_official_clients_read_what_was_sent(
    pulsar: Pulsar, java: JavaClient, cut: Cut, compression: Compression, partitions: int
) -> None:
    async with publishing(pulsar, partitions, cut, compression) as (transport, topic):
        messages = placed(transport, topic, runs(7, 160))
        await send(transport, messages, at_once=53)  # the last one goes alone, too small to be compressed
        again = await transport.send(PRODUCER, messages[-10:])
    assert sorted(again.duplicates) == [*range(10)]  # and both clients shall see nothing of it
    wanted = by_place(messages)
    assert len(wanted) == max(partitions, 1)

    told = await asyncio.to_thread(java.run, "read", pulsar.url, topic, len(messages))
    by_java = read_by_java(told)
    by_python = await asyncio.to_thread(read_by_python, pulsar.url, topic, len(messages))
    for place in wanted.keys() | by_java.keys() | by_python.keys():
        assert [each[:3] for each in by_java[place]] == [sent(each) for each in wanted[place]]
        assert by_python[place] == by_java[place]
    check_what_only_java_tells(told, wanted, cut, compression)


def check_what_only_java_tells(
    told: Sequence[Mapping[str, Any]], wanted: Mapping[str, Sequence[Message]], cut: Cut, compression: Compression
) -> None:
    for place, messages in wanted.items():
        there = [each for each in told if each["topic"] == place]
        assert [each["sequence_id"] for each in there] == [each.number for each in messages]
        assert {each["producer"] for each in there} == {PRODUCER}
    assert {each["compression"] for each in told} == {"NONE", compression.upper()}
    assert not any(each["value_is_null"] or each["event_time"] or each["ordering_key"] for each in told)
    entries: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for each in told:
        entries[each["ledger"], each["entry"]].append(each)
    for entry in entries.values():
        assert [each["batch_index"] for each in entry] == [*range(entry[0]["batch_size"])]
    assert max(map(len, entries.values())) > 1
    keys = max(len({each["key"] for each in entry}) for entry in entries.values())
    assert keys == 1 if cut == "by_key" else keys > 1


@KINDS
async def test_a_key_shared_pair_sees_each_key_in_order_and_at_one_of_them(
    pulsar: Pulsar, java: JavaClient, partitions: int
) -> None:
    async with publishing(pulsar, partitions, "by_key") as (transport, topic):
        messages = placed(transport, topic, runs(3, 300))
        await send(transport, messages, at_once=100)
    log = await asyncio.to_thread(java.run, "key-shared", pulsar.url, topic, "pair", len(messages))
    check_order_of_keys(log, messages)
    assert all(len(consumers) == 1 for consumers in consumers_of_keys(log).values())
    assert {each["consumer"] for each in log} == {"first", "second"}


async def test_a_key_moves_to_a_consumer_that_joins_only_when_the_other_one_is_done(
    pulsar: Pulsar, java: JavaClient
) -> None:
    async with publishing(pulsar, ALONE, "by_key") as (transport, topic):
        messages = placed(transport, topic, runs(4, 400))
        await send(transport, messages, at_once=100)
    log = await asyncio.to_thread(java.run, "key-shared", pulsar.url, topic, "pair", len(messages), 100)
    check_order_of_keys(log, messages)
    assert {"first", "second"} in consumers_of_keys(log).values()  # else this has tried nothing


async def test_the_same_pair_finds_mixed_entries_to_be_wrong(pulsar: Pulsar, java: JavaClient) -> None:
    """Which is why they are not the default; and the two tests above can fail."""
    async with publishing(pulsar, ALONE, "mixed") as (transport, topic):
        messages = placed(transport, topic, runs(5, 300))
        await send(transport, messages, at_once=10)
    log = await asyncio.to_thread(java.run, "key-shared", pulsar.url, topic, "pair", len(messages))
    assert {"first", "second"} in consumers_of_keys(log).values()


def check_order_of_keys(log: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> None:
    """Each key in its order, each message once, and nobody holds a message of a key while another one does."""
    received: dict[str, list[int]] = defaultdict(list)
    holders: dict[str, str] = {}
    for each in log:
        key = each["key"]
        if each["event"] == "received":
            assert key not in holders, f"{key!r} came to {each['consumer']} while {holders[key]} had it"
            holders[key] = each["consumer"]
            received[key].append(each["sequence_id"])
        else:
            assert holders.pop(key) == each["consumer"]
    wanted: dict[str, list[int]] = defaultdict(list)
    for message in messages:
        wanted[message.key].append(message.number)
    assert received == wanted


def consumers_of_keys(log: Sequence[Mapping[str, Any]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for each in log:
        found[each["key"]].add(each["consumer"])
    return found


@pytest.mark.parametrize("partitions", [3, 16, 1_000])
def test_java_and_we_choose_the_same_partition_for_10_000_keys(java: JavaClient, partitions: int) -> None:
    chosen = random.Random(partitions)
    letters = string.ascii_letters + string.digits + "-:äßЖ鍵🔑é"
    keys = [*KEYS, "", *("".join(chosen.choices(letters, k=chosen.randint(1, 40))) for _ in range(5_000))]
    keys += [f"order-{number}" for number in range(10_000 - len(keys))]
    assert java.run("partitions", partitions, keys=keys) == [partition_of(key, partitions) for key in keys]
