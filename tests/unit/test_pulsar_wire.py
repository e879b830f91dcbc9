"""Pulsar's protocol as we speak it: frames, and a peer that does what no broker does."""

from __future__ import annotations

import asyncio
import re
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import cast

import google_crc32c
import lz4.block
import pytest
import sqlalchemy as sa
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pillarbox import IntegrationEvent, Pillarbox, Route
from pillarbox.errors import ConfigurationError
from pillarbox.transport import Message, TopicsRefusedError
from pillarbox.transports import connect
from pillarbox.transports.pulsar import Anonymous, PulsarTransport, Tls, Token, credentials, wire_pb2
from pillarbox.transports.pulsar import connection as pulsar_connection
from pillarbox.transports.pulsar import producer as pulsar_producer
from pillarbox.transports.pulsar import transport as pulsar_transport
from pillarbox.transports.pulsar import wire_pb2 as wire
from pillarbox.transports.pulsar.client import Client
from pillarbox.transports.pulsar.connection import SMALLEST_MESSAGE_LIMIT, BrokerError, Connection, Endpoint
from pillarbox.transports.pulsar.entries import MAX_MESSAGES, Compression, Cut, Cutter
from pillarbox.transports.pulsar.frames import LARGEST_COMMAND, PING, Entry, Frames, ProtocolError, framed
from pillarbox.transports.pulsar.names import MAX_PARTITIONS, TopicName
from pillarbox.transports.pulsar.producer import Producer
from tests.relays import soon

Type = wire.Command.Type
TOPIC = TopicName.parse("orders")
texts = st.text(max_size=200)


class Happened(IntegrationEvent, name="pulsar_wire.happened"):
    number: int


def message(number: int, key: str = "k", body: bytes = b"{}", **headers: str) -> Message:
    return Message(str(TOPIC), key, body, headers, number)


# -- frames ------------------------------------------------------------------------------------------------------------


def test_the_generated_code_is_that_of_the_proto_file() -> None:
    text = (Path(wire_pb2.__file__).parent / "wire.proto").read_text("utf-8")
    written = {
        (name, field, int(number))
        for name, body in re.findall(r"^message (\w+) \{(\}|.*?^\})", text, re.MULTILINE | re.DOTALL)
        for field, number in re.findall(r"(?:optional|required|repeated) [\w.]+ (\w+) = (\d+)", body)
    }
    compiled = {
        (name, field.name, field.number)
        for name, kind in wire_pb2.DESCRIPTOR.message_types_by_name.items()
        for field in kind.fields
    }
    assert written == compiled, "run `make wire`"


COMMANDS = [
    wire.Command(type=Type.PING, ping=wire.Ping()),
    wire.Command(type=Type.SUCCESS, success=wire.Success(request_id=2**64 - 1)),
    wire.Command(type=Type.ERROR, error=wire.Error(request_id=1, error=wire.TopicNotFound, message="no" * 500)),
]


@given(st.lists(st.sampled_from(COMMANDS), max_size=20), st.lists(st.integers(1, 1_500), min_size=1, max_size=5))
def test_commands_come_whole_however_the_stream_is_cut(commands: list[wire.Command], sizes: list[int]) -> None:
    stream = b"".join(map(framed, commands))
    frames, found, size = Frames(), list[wire.Command](), cycle(sizes)
    while stream:
        length = next(size)
        found += frames.feed(stream[:length])
        stream = stream[length:]
    assert found == commands


def test_a_command_that_we_do_not_know_can_be_read() -> None:
    unknown = b"\x08\x44\xa2\x04\x02\x08\x01"  # type 68, and its part
    [command] = Frames().feed(struct.pack(">II", len(unknown) + 4, len(unknown)) + unknown)
    assert not command.HasField("type")
    error = wire.SendError(producer_id=1, sequence_id=2).SerializeToString() + b"\x18\x63"  # an error of number 99
    assert wire.SendError.FromString(error).error == wire.UnknownError


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack(">I", LARGEST_COMMAND + 1),
        struct.pack(">I", 0xFFFF_FFFF),
        struct.pack(">II", 3, 0),
        struct.pack(">II", 8, 5) + b"xxxx",
        struct.pack(">II", 8, 0xFFFF_FFFF) + b"xxxx",
        struct.pack(">II", 8, 4) + b"\xff\xff\xff\xff",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_what_is_no_frame_is_an_error_at_once(stream: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Frames().feed(stream))


@given(st.lists(st.binary(max_size=2_000), max_size=20))
def test_noise_is_an_error_or_nothing_and_keeps_no_more_than_a_frame(pieces: list[bytes]) -> None:
    frames = Frames()
    try:
        for piece in pieces:
            for command in frames.feed(piece):
                assert isinstance(command, wire.Command)
            assert len(frames._rest) <= LARGEST_COMMAND + 4
    except ProtocolError:
        pass


class Read:
    """An entry as a broker and a consumer read it."""

    def __init__(self, frame: bytes) -> None:
        total, size = struct.unpack_from(">II", frame)
        assert total + 4 == len(frame)
        self.send = wire.Command.FromString(frame[8 : 8 + size]).send
        magic, checksum = struct.unpack_from(">HI", frame, 8 + size)
        rest = frame[14 + size :]
        assert (magic, checksum) == (0x0E01, google_crc32c.value(rest))
        (length,) = struct.unpack_from(">I", rest)
        self.metadata = wire.EntryMetadata.FromString(rest[4 : 4 + length])
        payload = rest[4 + length :]
        whole = self.metadata.uncompressed_size
        if self.metadata.compression == wire.LZ4:
            payload = lz4.block.decompress(payload, uncompressed_size=whole)
        elif self.metadata.compression == wire.ZSTD:
            payload = zstandard.ZstdDecompressor().decompress(payload)
        assert len(payload) == whole
        self.messages: list[tuple[str, bytes, dict[str, str], int]] = []
        while payload:
            (length,) = struct.unpack_from(">I", payload)
            one = wire.MessageMetadata.FromString(payload[4 : 4 + length])
            end = 4 + length + one.payload_size
            properties = {each.key: each.value for each in one.properties}
            self.messages.append((one.partition_key, payload[4 + length : end], properties, one.sequence_id))
            payload = payload[end:]


def as_read(messages: Sequence[Message]) -> list[tuple[str, bytes, dict[str, str], int]]:
    return [(each.key, each.body, dict(each.headers), each.number) for each in messages]


large = st.integers(0, 20_000).map(lambda size: "ä" * size)
some_messages = st.lists(
    st.tuples(texts, st.binary(max_size=500), st.dictionaries(texts, texts | large, max_size=5)),
    min_size=1,
    max_size=30,
).map(
    lambda drawn: [Message("t", key, body, headers, index * 7 + 1) for index, (key, body, headers) in enumerate(drawn)]
)


@pytest.mark.parametrize(("name", "value"), [(1, 15_999), (400, 15_990), (16_000, 0), (20_000, 1), (1, 16_384)])
def test_headers_of_any_length_can_be_read(name: int, value: int) -> None:
    """A dead letter has the properties that somebody else gave it."""
    sent = [Message("t", "k", b"{}", {"n" * name: "v" * value, "after": "it"}, 1)]
    [entry] = Cutter(Cut.MIXED).entries(sent, range(1), max_bytes=100_000)
    assert Read(entry.framed(1, "lane")).messages == as_read(sent)


@given(some_messages, st.sampled_from(Cut), st.sampled_from(Compression), st.integers(100, 5_000), st.integers(-1, 250))
def test_entries_hold_what_was_sent_in_its_order(
    messages: list[Message], cut: Cut, compression: Compression, limit: int, after: int
) -> None:
    entries = Cutter(cut, compression, compress_from=200).entries(
        messages, range(len(messages)), max_bytes=limit, after=after
    )
    read = [Read(entry.framed(5, "lane")) for entry in entries]
    assert [each for entry in read for each in entry.messages] == as_read(messages)
    assert [index for entry in entries for index in entry.indexes] == list(range(len(messages)))
    for entry, found in zip(entries, read, strict=True):
        first, last, count = entry.messages[0].number, entry.messages[-1].number, len(entry.messages)
        assert (found.send.sequence_id, found.send.highest_sequence_id, found.send.num_messages) == (first, last, count)
        metadata = found.metadata
        assert (metadata.sequence_id, metadata.highest_sequence_id) == (first, last)
        assert (metadata.producer_name, metadata.num_messages_in_batch) == ("lane", count)
        assert not first <= after < last, "the broker would drop it whole"
        assert count == 1 or metadata.uncompressed_size <= limit
        if cut is Cut.BY_KEY:
            assert {each.key for each in entry.messages} == {metadata.partition_key}


def test_an_entry_has_so_many_messages_and_no_more() -> None:
    messages = [message(number) for number in range(1, 2 * MAX_MESSAGES + 2)]
    entries = Cutter(Cut.MIXED).entries(messages, range(len(messages)), max_bytes=10**9)
    assert [len(entry.messages) for entry in entries] == [MAX_MESSAGES, MAX_MESSAGES, 1]


# -- a peer ------------------------------------------------------------------------------------------------------------

Script = Callable[["Peer", wire.Command], None]


class Peer(asyncio.Protocol):
    """The other side of a connection, as the test wants it."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.frames = b""
        self.heard: list[wire.Command] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class

    def data_received(self, data: bytes) -> None:
        self.frames += data
        while len(self.frames) >= 8:
            total, size = struct.unpack_from(">II", self.frames)
            if len(self.frames) < total + 4:
                return
            command = wire.Command.FromString(self.frames[8 : 8 + size])
            self.frames = self.frames[4 + total :]
            self.heard.append(command)
            self.script(self, command)

    def say(self, **part: object) -> None:
        [name] = part
        self.transport.write(framed(wire.Command(type=Type.Value(name.upper()), **part)))  # type: ignore[arg-type]


def well_behaved(peer: Peer, command: wire.Command) -> None:
    if command.type == Type.CONNECT:
        peer.say(connected=wire.Connected(server_version="4.0", max_message_size=1_000_000))
    elif command.type == Type.PRODUCER:
        asked = command.producer
        peer.say(
            producer_success=wire.ProducerSuccess(
                request_id=asked.request_id, producer_name=asked.producer_name or "made-up", last_sequence_id=7
            )
        )
    elif command.type == Type.SEND:
        peer.say(
            send_receipt=wire.SendReceipt(
                producer_id=command.send.producer_id,
                sequence_id=command.send.sequence_id,
                message_id=wire.MessageId(ledger_id=1, entry_id=1),
            )
        )
    elif command.type == Type.CLOSE_PRODUCER:
        peer.say(success=wire.Success(request_id=command.close_producer.request_id))


@asynccontextmanager
async def peer_that(script: Script) -> AsyncIterator[tuple[Endpoint, list[Peer]]]:
    peers: list[Peer] = []

    def accept() -> Peer:
        peers.append(Peer(script))
        return peers[-1]

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    try:
        yield Endpoint(*server.sockets[0].getsockname()[:2]), peers
    finally:
        server.close()
        for peer in peers:
            peer.transport.abort()


async def connected(endpoint: Endpoint, patience: float = 1.0, keep_alive: float = 30.0) -> Connection:
    return await Connection.open(endpoint, Anonymous(), patience=patience, keep_alive=keep_alive)


def entries_of(*messages: Message) -> list[Entry]:
    return Cutter(Cut.BY_KEY).entries(messages, range(len(messages)), max_bytes=100_000)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 100, b"\x00" * 100, struct.pack(">II", 8, 9) + b"x" * 4]
)
async def test_a_peer_that_is_no_broker_is_an_error_at_once(answer: bytes) -> None:
    async with peer_that(lambda peer, _: peer.transport.write(answer)) as (endpoint, _):
        with pytest.raises(ConnectionError):
            await connected(endpoint, patience=30.0)


async def test_a_peer_that_says_nothing_is_given_up() -> None:
    async with peer_that(lambda _peer, _command: None) as (endpoint, peers):
        with pytest.raises(TimeoutError, match="does not answer"):
            await connected(endpoint, patience=0.05)
        await soon(peers[0].transport.is_closing)


async def test_half_a_frame_and_then_silence_ends_the_connection() -> None:
    def stalls(peer: Peer, command: wire.Command) -> None:
        well_behaved(peer, command)
        peer.transport.write(b"\x00\x00")

    async with peer_that(stalls) as (endpoint, peers):
        connection = await connected(endpoint, keep_alive=0.05)
        producer = asyncio.ensure_future(Producer.open(connection, str(TOPIC), "lane", patience=30.0))
        with pytest.raises(ConnectionError):
            await producer
        assert connection.lost
        assert peers


async def test_a_dead_link_is_found_by_its_silence() -> None:
    async with peer_that(
        lambda peer, command: well_behaved(peer, command) if command.type == Type.CONNECT else None
    ) as (
        endpoint,
        peers,
    ):
        connection = await connected(endpoint, keep_alive=0.05)
        await soon(lambda: connection.lost is not None)
        assert "nothing was heard" in str(connection.lost)
        assert Type.PING in {each.type for each in peers[0].heard}


async def test_a_peer_that_is_heard_of_is_kept() -> None:
    def answers_pings(peer: Peer, command: wire.Command) -> None:
        well_behaved(peer, command)
        if command.type == Type.PING:
            peer.say(pong=wire.Pong())

    async with peer_that(answers_pings) as (endpoint, peers):
        connection = await connected(endpoint, keep_alive=0.1)
        await soon(lambda: sum(each.type == Type.PING for each in peers[0].heard) >= 3)
        assert connection.lost is None
        peers[0].say(ping=wire.Ping())
        await soon(lambda: peers[0].heard[-1].type == Type.PONG)
        connection.close()


async def test_closing_leaves_no_socket_open_to_a_peer_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written goes out first, and with TLS the peer says goodbye. Neither is waited for without end."""

    def stalls(peer: Peer, command: wire.Command) -> None:
        well_behaved(peer, command)
        peer.transport.pause_reading()

    monkeypatch.setattr(pulsar_connection, "CLOSE_SECONDS", 0.05)
    async with peer_that(stalls) as (endpoint, _):
        client = Client(f"pulsar://{endpoint}", Anonymous(), Tls(), timeout=1.0, keep_alive=30.0)
        connection = await client._any()
        socket = connection._socket.get_extra_info("socket")
        connection.write(bytes(50_000_000))
        await client.close()
        await soon(lambda: socket.fileno() == -1)


async def test_who_we_are_is_said_again_when_the_broker_asks() -> None:
    tokens = iter(["first", "second"])

    def asks(peer: Peer, command: wire.Command) -> None:
        well_behaved(peer, command)
        if command.type == Type.CONNECT:
            peer.say(auth_challenge=wire.AuthChallenge(challenge=wire.AuthData(auth_method_name="token")))

    async with peer_that(asks) as (endpoint, peers):
        connection = await Connection.open(endpoint, Token(lambda: next(tokens)))
        await soon(lambda: len(peers[0].heard) >= 2)
        connect, response = peers[0].heard
        assert (connect.connect.auth_method_name, connect.connect.auth_data) == ("token", b"first")
        assert response.auth_response.response.auth_data == b"second"
        connection.close()


async def test_a_token_that_is_not_to_be_had_again_ends_the_connection() -> None:
    tokens = iter(["first"])

    def asks(peer: Peer, command: wire.Command) -> None:
        well_behaved(peer, command)
        if command.type == Type.CONNECT:
            peer.say(auth_challenge=wire.AuthChallenge(challenge=wire.AuthData(auth_method_name="token")))

    def vault() -> str:
        for token in tokens:
            return token
        raise RuntimeError("sealed, password=hunter2")

    async with peer_that(asks) as (endpoint, _):
        connection = await Connection.open(endpoint, Token(vault))
        await soon(lambda: connection.lost is not None)
        assert "could not be renewed: the function that gives the token failed: RuntimeError" in str(connection.lost)
        assert "hunter2" not in str(connection.lost)


class Bystander:
    """A producer that waits for the end of its connection."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    def received(self, receipt: wire.SendReceipt) -> None: ...

    def refused(self, error: wire.SendError) -> None: ...

    def lost(self, why: str) -> None:  # noqa: ARG002
        self.told.set()


@pytest.mark.every_loop
async def test_h129_what_is_written_to_a_lost_connection_goes_nowhere_on_every_loop() -> None:
    bystander = Bystander()
    async with peer_that(well_behaved) as (endpoint, peers):
        connection = await connected(endpoint)
        connection.join(bystander)
        peers[0].transport.abort()
        async with asyncio.timeout(20):
            await bystander.told.wait()
        connection.write(PING)
    assert connection.lost is not None


async def test_a_slow_token_is_not_the_fault_of_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow() -> str:
        await asyncio.sleep(0.6)
        return "token"

    async with peer_that(well_behaved) as (endpoint, _):
        connection = await Connection.open(endpoint, Token(slow), patience=0.5)
        connection.close()
        monkeypatch.setattr(credentials, "TIMEOUT", 0.01)
        with pytest.raises(TimeoutError, match="credentials were unavailable"):
            await Connection.open(endpoint, Token(slow))


async def test_a_refusal_to_connect_says_why() -> None:
    def refuses(peer: Peer, _command: wire.Command) -> None:
        peer.say(error=wire.Error(request_id=2**64 - 1, error=wire.AuthenticationError, message="who are you?"))

    async with peer_that(refuses) as (endpoint, _):
        with pytest.raises(BrokerError, match="AuthenticationError: who are you"):
            await connected(endpoint)


async def test_a_broker_that_takes_next_to_nothing_is_of_no_use_and_says_why() -> None:
    def takes(size: int) -> Script:
        return lambda peer, _: peer.say(connected=wire.Connected(server_version="4.0", max_message_size=size))

    async with peer_that(takes(SMALLEST_MESSAGE_LIMIT - 1)) as (endpoint, _):
        with pytest.raises(ConnectionError, match="at most 262,143 bytes, and we need 262,144: raise its maxMessage"):
            await connected(endpoint)
    async with peer_that(takes(SMALLEST_MESSAGE_LIMIT)) as (endpoint, _):
        connection = await connected(endpoint)
        assert connection.message_limit == SMALLEST_MESSAGE_LIMIT
        connection.close()


async def test_answers_that_nobody_asked_for_are_ignored() -> None:
    def talks(peer: Peer, command: wire.Command) -> None:
        peer.say(send_receipt=wire.SendReceipt(producer_id=99, sequence_id=1))
        peer.say(send_error=wire.SendError(producer_id=99, sequence_id=1))
        peer.say(close_producer=wire.CloseProducer(producer_id=99, request_id=1))
        peer.say(success=wire.Success(request_id=999))
        well_behaved(peer, command)
        if command.type == Type.SEND:
            peer.say(send_receipt=wire.SendReceipt(producer_id=1, sequence_id=12345))

    async with peer_that(talks) as (endpoint, _):
        connection = await connected(endpoint)
        producer = await Producer.open(connection, str(TOPIC), "lane", patience=1.0)
        answers = await producer.publish(entries_of(message(8)), largest=0)
        assert (answers.stored, answers.lost) == ([0], None)
        connection.close()


async def test_a_broker_that_is_there_and_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps_silent(peer: Peer, command: wire.Command) -> None:
        if command.type == Type.PING:
            peer.say(pong=wire.Pong())
        elif command.type != Type.SEND or command.send.sequence_id < 10:
            well_behaved(peer, command)

    monkeypatch.setattr(pulsar_producer, "SILENCE", 0.05)
    async with peer_that(keeps_silent) as (endpoint, _):
        connection = await connected(endpoint, keep_alive=0.02)
        producer = await Producer.open(connection, str(TOPIC), "lane", patience=1.0)
        sent = [message(number, key=str(number)) for number in (8, 9, 10)]
        answers = await producer.publish(entries_of(*sent), largest=1_000)
        assert answers.stored == [0, 1]
        assert "the broker said nothing" in str(answers.lost)
        assert connection.lost is None
        connection.close()


def refuses_nine(peer: Peer, command: wire.Command) -> None:
    if command.type == Type.SEND and command.send.sequence_id == 9:
        told = wire.SendError(producer_id=1, sequence_id=9, error=wire.NotAllowedError, message="too large")
        peer.say(send_error=told)
    else:
        well_behaved(peer, command)


async def test_h99_nothing_leaves_behind_an_entry_that_may_be_refused() -> None:
    async with peer_that(refuses_nine) as (endpoint, peers):
        connection = await connected(endpoint)
        producer = await Producer.open(connection, str(TOPIC), "lane", patience=1.0)
        assert producer.last == 7
        sizes = {8: 100, 9: 5_000, 10: 100, 11: 6_000}
        sent = [message(number, key=str(number), body=b"x" * size) for number, size in sizes.items()]
        answers = await producer.publish(entries_of(*sent), largest=1_000)
        assert (answers.stored, [*answers.refused]) == ([0], [1])
        assert [each.send.sequence_id for each in peers[0].heard if each.type == Type.SEND] == [8, 9]
        assert producer.last == 8
        connection.close()


async def test_h36_an_entry_does_not_overtake_a_refused_one_of_its_key() -> None:
    async with peer_that(refuses_nine) as (endpoint, _):
        connection = await connected(endpoint)
        producer = await Producer.open(connection, str(TOPIC), "lane", patience=1.0)
        entries = [entry for number, key in ((8, "a"), (9, "b"), (10, "c"), (11, "b"), (12, "d"))
                   for entry in entries_of(message(number, key=key))]  # fmt: skip
        answers = await producer.publish(entries, largest=10_000)
        assert (answers.stored, [*answers.refused]) == ([0, 2], [1])
        connection.close()


@pytest.mark.parametrize("code", [wire.NotAllowedError, wire.PersistenceError])
async def test_h36_a_mixed_entry_does_not_overtake_a_refused_one_that_shares_a_key(code: wire.ServerError) -> None:
    def refuses_eight(peer: Peer, command: wire.Command) -> None:
        if command.type == Type.SEND and command.send.sequence_id == 8:
            peer.say(send_error=wire.SendError(producer_id=1, sequence_id=9, error=code, message="not now"))
        else:
            well_behaved(peer, command)

    async with peer_that(refuses_eight) as (endpoint, peers):
        connection = await connected(endpoint)
        producer = await Producer.open(connection, str(TOPIC), "lane", patience=1.0)
        transport = PulsarTransport(f"pulsar://{endpoint}", guarantee="at_least_once", entries="mixed")
        transport._largest[str(TOPIC)] = 600_000  # so none of them has to go alone
        sizes = {8: ("a", 300_000), 9: ("b", 200_000), 10: ("c", 300_000), 11: ("b", 200_000), 12: ("a", 100_000)}
        sent = [message(number, key=key, body=b"x" * size) for number, (key, size) in sizes.items()]
        entries, answers = await transport._publish(producer, sent, range(5))
        assert [[each.number for each in entry.messages] for entry in entries] == [[8, 9], [10, 11], [12]]
        assert [each.send.sequence_id for each in peers[0].heard if each.type == Type.SEND] == [8]
        assert (answers.stored, [*answers.refused]) == ([], [])
        assert answers.lost is not None, "all of them come again, in their order"
        connection.close()


async def test_mixed_entries_without_a_common_key_are_on_their_way_together() -> None:
    def answers_the_second(peer: Peer, command: wire.Command) -> None:
        if command.type != Type.SEND:
            well_behaved(peer, command)
        elif command.send.sequence_id == 10:
            for each in peer.heard:
                well_behaved(peer, each) if each.type == Type.SEND else None

    async with peer_that(answers_the_second) as (endpoint, _):
        connection = await connected(endpoint)
        producer = await Producer.open(connection, str(TOPIC), "lane", patience=1.0)
        sent = [message(number, key=key, body=b"x" * 100) for number, key in ((8, "a"), (9, "b"), (10, "c"), (11, "d"))]
        entries = Cutter(Cut.MIXED).entries(sent, range(4), max_bytes=250)
        assert [len(entry.messages) for entry in entries] == [2, 2]
        assert (await producer.publish(entries, largest=1_000)).stored == [0, 1]
        connection.close()


@pytest.mark.parametrize("number", [8, 9])
async def test_h99_an_entry_that_failed_before_a_stored_one_is_not_taken_for_stored(number: int) -> None:
    def fails_once(peer: Peer, command: wire.Command) -> None:
        if command.type == Type.SEND and command.send.sequence_id == number:
            told = wire.SendError(producer_id=1, sequence_id=number, error=wire.PersistenceError, message="the disk")
            peer.say(send_error=told)
        else:
            well_behaved(peer, command)

    async with peer_that(fails_once) as (endpoint, _):
        connection = await connected(endpoint)
        producer = await Producer.open(connection, str(TOPIC), "lane", patience=1.0)
        transport = PulsarTransport(f"pulsar://{endpoint}", guarantee="at_least_once")
        transport._largest[str(TOPIC)] = 10_000  # both may be on their way at once
        sent = [message(8, key="a"), message(9, key="b")]
        _, answers = await transport._publish(producer, sent, range(2))
        if number == 8:
            assert (answers.stored, [*answers.refused], answers.lost) == ([1], [0], None)
        else:
            assert (answers.stored, [*answers.refused]) == ([0], [])
            assert "PersistenceError" in str(answers.lost)
        connection.close()


async def test_h99_an_entry_that_is_too_large_all_at_once_is_not_taken_for_stored() -> None:
    """Somebody lowers the limit of the topic: what is refused was pushed among others, as larger ones had been."""

    def takes_less(peer: Peer, command: wire.Command) -> None:
        if command.type == Type.SEND and command.send.num_messages > 1:
            number = command.send.highest_sequence_id
            told = wire.SendError(producer_id=1, sequence_id=number, error=wire.NotAllowedError, message="too large")
            peer.say(send_error=told)
        else:
            well_behaved(peer, command)

    async with peer_that(takes_less) as (endpoint, _):
        connection = await connected(endpoint)
        producer = await Producer.open(connection, str(TOPIC), "lane", patience=1.0)
        transport = PulsarTransport(f"pulsar://{endpoint}", guarantee="at_least_once")
        transport._largest[str(TOPIC)] = 10_000
        sent = [message(8, key="a"), message(9, key="b"), message(10, key="b"), message(11, key="c")]
        entries, answers = await transport._publish(producer, sent, range(4))
        assert (answers.stored, [*answers.refused], answers.lost) == ([0, 2], [1], None)
        assert transport._entry_limits[str(TOPIC)] < len(entries[1].payload)
        assert str(TOPIC) not in transport._largest, "from now on nothing follows what may be refused"
        connection.close()


async def test_a_topic_that_moves_ends_the_producer_and_not_the_connection() -> None:
    def unloads(peer: Peer, command: wire.Command) -> None:
        if command.type == Type.SEND:
            peer.say(close_producer=wire.CloseProducer(producer_id=1, request_id=0))
        else:
            well_behaved(peer, command)

    async with peer_that(unloads) as (endpoint, _):
        connection = await connected(endpoint)
        producer = await Producer.open(connection, str(TOPIC), "lane", patience=1.0)
        answers = await producer.publish(entries_of(message(8)), largest=0)
        assert answers.lost is not None
        assert "topic moves" in answers.lost
        assert connection.lost is None
        connection.close()


# -- lookups -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def client_of(*endpoints: Endpoint, listener_name: str | None = None) -> AsyncIterator[Client]:
    url = "pulsar://" + ",".join(f"{each.host}:{each.port}" for each in endpoints)
    client = Client(url, Anonymous(), Tls(), timeout=1.0, keep_alive=30.0, listener_name=listener_name)
    try:
        yield client
    finally:
        await client.close()


def looks_up(answer: Callable[[wire.Lookup], wire.LookupResponse]) -> Script:
    def script(peer: Peer, command: wire.Command) -> None:
        well_behaved(peer, command)
        if command.type == Type.LOOKUP:
            peer.say(lookup_response=answer(command.lookup))

    return script


async def test_redirects_are_followed_to_the_broker_of_the_topic() -> None:
    def here(asked: wire.Lookup) -> wire.LookupResponse:
        assert asked.authoritative
        return wire.LookupResponse(
            request_id=asked.request_id, response=wire.LookupResponse.Connect, broker_service_url=f"pulsar://{there}"
        )

    async with peer_that(looks_up(here)) as (there, peers):

        def elsewhere(asked: wire.Lookup) -> wire.LookupResponse:
            return wire.LookupResponse(
                request_id=asked.request_id,
                response=wire.LookupResponse.Redirect,
                broker_service_url=f"pulsar://{there}",
                authoritative=True,
            )

        async with peer_that(looks_up(elsewhere)) as (first, _), client_of(first) as client:
            connection = await client.broker_of(TOPIC)
            assert connection.address == there
            assert len(peers) == 1, "one connection to each broker"


async def test_a_broker_with_several_listeners_is_told_which_one_we_mean() -> None:
    def asked_for(asked: wire.Lookup) -> wire.LookupResponse:
        assert asked.advertised_listener_name == "outside"
        return wire.LookupResponse(
            request_id=asked.request_id, response=wire.LookupResponse.Connect, broker_service_url=f"pulsar://{place}"
        )

    async with peer_that(looks_up(asked_for)) as (place, _), client_of(place, listener_name="outside") as client:
        assert (await client.broker_of(TOPIC)).address == place


async def test_going_round_in_circles_ends() -> None:
    def again(asked: wire.Lookup) -> wire.LookupResponse:
        return wire.LookupResponse(
            request_id=asked.request_id, response=wire.LookupResponse.Redirect, broker_service_url=f"pulsar://{place}"
        )

    async with peer_that(looks_up(again)) as (place, _), client_of(place) as client:
        with pytest.raises(ConnectionError, match="in circles"):
            await client.broker_of(TOPIC)


async def test_through_a_proxy_the_broker_is_named_and_the_proxy_connected() -> None:
    def proxied(asked: wire.Lookup) -> wire.LookupResponse:
        return wire.LookupResponse(
            request_id=asked.request_id,
            response=wire.LookupResponse.Connect,
            broker_service_url="pulsar://broker-7.internal:6650",
            proxy_through_service_url=True,
        )

    async with peer_that(looks_up(proxied)) as (proxy, peers), client_of(proxy) as client:
        connection = await client.broker_of(TOPIC)
        assert (connection.address.host, connection.address.port) == proxy[:2]
        assert peers[1].heard[0].connect.proxy_to_broker_url == "broker-7.internal:6650"
        assert await client.broker_of(TOPIC) is connection


@pytest.mark.parametrize("url", ["", "pulsar://", "pulsar://host:port", "pulsar://host:99999999"])
async def test_an_address_that_cannot_be_read_is_an_error(url: str) -> None:
    def nonsense(asked: wire.Lookup) -> wire.LookupResponse:
        return wire.LookupResponse(
            request_id=asked.request_id, response=wire.LookupResponse.Connect, broker_service_url=url
        )

    async with peer_that(looks_up(nonsense)) as (place, _), client_of(place) as client:
        with pytest.raises(ConnectionError):
            await client.broker_of(TOPIC)


async def test_another_host_is_tried_if_one_is_away() -> None:
    async with peer_that(well_behaved) as (gone, _):
        pass

    def here(asked: wire.Lookup) -> wire.LookupResponse:
        return wire.LookupResponse(
            request_id=asked.request_id, response=wire.LookupResponse.Connect, broker_service_url=f"pulsar://{there}"
        )

    async with peer_that(looks_up(here)) as (there, _):
        for _ in range(8):  # they are tried in any order
            async with client_of(gone, there) as client:
                assert (await client.broker_of(TOPIC)).address == there


async def test_a_lost_connection_is_opened_again() -> None:
    def here(asked: wire.Lookup) -> wire.LookupResponse:
        return wire.LookupResponse(
            request_id=asked.request_id, response=wire.LookupResponse.Connect, broker_service_url=f"pulsar://{place}"
        )

    async with peer_that(looks_up(here)) as (place, peers), client_of(place) as client:
        connection = await client.broker_of(TOPIC)
        peers[0].transport.abort()
        await soon(lambda: connection.lost is not None)
        assert (await client.broker_of(TOPIC)).lost is None


# -- the transport -----------------------------------------------------------------------------------------------------


class OneBroker:
    """Serves all topics, and gives a name to one producer at a time."""

    def __init__(self) -> None:
        self.endpoint = Endpoint("", 0)
        self.names: dict[tuple[str, str], int] = {}
        """Who holds a name on a topic, by its number."""

    def __call__(self, peer: Peer, command: wire.Command) -> None:
        if command.type == Type.PARTITIONED_METADATA:
            peer.say(
                partitioned_metadata_response=wire.PartitionedMetadataResponse(
                    request_id=command.partitioned_metadata.request_id, partitions=0
                )
            )
        elif command.type == Type.LOOKUP:
            peer.say(
                lookup_response=wire.LookupResponse(
                    request_id=command.lookup.request_id,
                    response=wire.LookupResponse.Connect,
                    broker_service_url=f"pulsar://{self.endpoint}",
                )
            )
        elif command.type == Type.PRODUCER and (command.producer.topic, command.producer.producer_name) in self.names:
            peer.say(error=wire.Error(request_id=command.producer.request_id, error=wire.ProducerBusy, message="held"))
        else:
            if command.type == Type.PRODUCER:
                asked = command.producer
                self.names[asked.topic, asked.producer_name] = asked.producer_id
            elif command.type == Type.CLOSE_PRODUCER:
                closed = command.close_producer.producer_id
                self.names = {name: holder for name, holder in self.names.items() if holder != closed}
            well_behaved(peer, command)


@asynccontextmanager
async def transport_to(broker: OneBroker, *topics: str) -> AsyncIterator[PulsarTransport]:
    async with peer_that(broker) as (broker.endpoint, _):
        transport = PulsarTransport(f"pulsar://{broker.endpoint}", admin_url="http://127.0.0.1:1", timeout=1.0)
        transport._deduplicating.update(topics)
        try:
            yield transport
        finally:
            await transport.close()


async def test_a_lane_that_rested_for_long_gets_its_name_again(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = ["orders", "invoices"]
    async with transport_to(OneBroker(), *topics) as transport:
        await transport.open("lane", topics)
        for producer in transport._producers["lane"].values():
            producer.used -= 10 * pulsar_transport.IDLE
        monkeypatch.setattr(pulsar_transport, "RECOUNT", -1.0)  # whatever was seen is long ago
        assert await transport.open("lane", ["orders"]) == {"orders": 7}
        assert await transport.open("lane", ["orders"]) == {"orders": 7}
        assert [*transport._producers["lane"]] == ["orders"], "what is closed is forgotten"
        assert await transport.open("lane", topics) == dict.fromkeys(topics, 7)


async def test_a_producer_that_is_asked_for_is_not_closed_while_others_are_opened() -> None:
    async with transport_to(OneBroker(), "orders", "invoices") as transport:
        await transport.open("lane", ["orders"])
        transport._producers["lane"]["orders"].used -= 1.5 * pulsar_transport.IDLE
        await transport.open("lane", ["orders", "invoices"])
        sent = [Message("orders", "k", b"{}", {}, 8), Message("invoices", "k", b"{}", {}, 9)]
        assert sorted((await transport.send("lane", sent)).accepted) == [0, 1]


async def test_the_limit_is_that_of_the_brokers_we_are_connected_to_now() -> None:
    class Limited(OneBroker):
        limit = 300_000

        def __call__(self, peer: Peer, command: wire.Command) -> None:
            if command.type == Type.CONNECT:
                peer.say(connected=wire.Connected(server_version="4.0", max_message_size=self.limit))
            else:
                super().__call__(peer, command)

    broker, large = Limited(), Message("orders", "k", b"x" * 200_000, {}, 8)
    async with transport_to(broker, "orders") as transport:
        assert transport.preflight(large) is None, "nobody knows yet"
        await transport.open("lane", ["orders"])
        assert transport.preflight(large) == "the body has 200,000 bytes, and 87,008 are allowed"
        broker.limit = 1_000_000
        await transport._client.close()
        broker.names.clear()  # of the connection that has ended
        await transport.open("lane", ["orders"])
        assert transport.preflight(large) is None


async def test_more_partitions_than_a_topic_may_have_are_not_believed() -> None:
    def has_many(peer: Peer, command: wire.Command) -> None:
        well_behaved(peer, command)
        if command.type == Type.PARTITIONED_METADATA:
            asked = command.partitioned_metadata.request_id
            answer = wire.PartitionedMetadataResponse(request_id=asked, partitions=MAX_PARTITIONS + 1)
            peer.say(partitioned_metadata_response=answer)

    async with peer_that(has_many) as (endpoint, _):
        transport = PulsarTransport(f"pulsar://{endpoint}", guarantee="at_least_once", timeout=1.0)
        with pytest.raises(ProtocolError, match="has 10,001 partitions, and 10,000 are allowed"):
            await transport.open("lane", ["orders"])
        await transport.close()


# -- topics that cannot be opened --------------------------------------------------------------------------------------


class Spoilt(OneBroker):
    """Some topics cannot be opened: the broker says why, or nothing."""

    def __init__(self, **spoilt: str | None) -> None:
        super().__init__()
        self.spoilt = spoilt
        self.asked: Counter[str] = Counter()
        self.stored: Counter[str] = Counter()
        """How many messages, by topic."""

    def __call__(self, peer: Peer, command: wire.Command) -> None:
        if command.type == Type.PRODUCER:
            topic = command.producer.topic.rpartition("/")[2]
            self.asked[topic] += 1
            command.producer.producer_name = command.producer.producer_name or f"made-up-{self.asked.total()}"
            if topic in self.spoilt:
                code = self.spoilt[topic]
                if code is not None:
                    asked = command.producer.request_id
                    peer.say(error=wire.Error(request_id=asked, error=code, message="the ledger"))
                return
        elif command.type == Type.SEND:
            names = {holder: topic for (topic, _), holder in self.names.items()}
            self.stored[names[command.send.producer_id].rpartition("/")[2]] += command.send.num_messages
        super().__call__(peer, command)


UNOPENED = ["PersistenceError", "ServiceNotReady", "ProducerBusy", None]


@pytest.mark.parametrize("code", UNOPENED)
async def test_h47_a_topic_that_keeps_failing_is_refused_and_the_others_stay_open(
    monkeypatch: pytest.MonkeyPatch, code: str | None
) -> None:
    broker, topics = Spoilt(spoilt=code), ["spoilt", "orders", "invoices"]
    monkeypatch.setattr(pulsar_transport, "MOVING", 600.0)
    async with transport_to(broker, *topics) as transport:
        transport._timeout = 0.3
        with pytest.raises(OSError, match=code or "did not answer PRODUCER") as moving:
            await transport.open("lane", topics)
        assert not isinstance(moving.value, TopicsRefusedError), "it may be on its way to another broker"
        monkeypatch.setattr(pulsar_transport, "MOVING", 0.0)
        with pytest.raises(TopicsRefusedError) as refused:
            await transport.open("lane", topics)
        assert [*refused.value.reasons] == ["spoilt"]
        assert (code or "did not answer PRODUCER") in refused.value.reasons["spoilt"]
        assert await transport.open("lane", topics[1:]) == {"orders": 7, "invoices": 7}
        assert (broker.asked["orders"], broker.asked["invoices"]) == (1, 1)
        with pytest.raises(TopicsRefusedError):
            await transport.open("lane", ["spoilt"])  # there is nothing else in this batch
        broker.spoilt.clear()
        await soon(lambda: transport._failing["lane", "spoilt"].again < asyncio.get_running_loop().time())
        assert await transport.open("lane", topics) == dict.fromkeys(topics, 7)
        assert not transport._failing


@pytest.mark.parametrize("code", UNOPENED)
async def test_when_no_topic_can_be_opened_it_is_the_broker_and_not_the_topics(
    monkeypatch: pytest.MonkeyPatch, code: str | None
) -> None:
    monkeypatch.setattr(pulsar_transport, "MOVING", 0.0)
    broker = Spoilt(orders=code, invoices=code)
    async with transport_to(broker, "orders", "invoices") as transport:
        transport._timeout = 0.05
        for tries in range(1, 4):
            with pytest.raises(OSError, match=code or "did not answer PRODUCER") as away:
                await transport.open("lane", ["orders", "invoices"])
            assert not isinstance(away.value, TopicsRefusedError)
            assert broker.asked["orders"] == tries, "it is tried each time"
        broker.spoilt.clear()
        transport._timeout = 5.0
        assert await transport.open("lane", ["orders", "invoices"]) == {"orders": 7, "invoices": 7}


async def test_a_broker_that_goes_away_while_topics_are_opened_refuses_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dies(Spoilt):
        def __call__(self, peer: Peer, command: wire.Command) -> None:
            if command.type == Type.PRODUCER and command.producer.topic.endswith("invoices"):
                peer.transport.abort()
            else:
                super().__call__(peer, command)

    monkeypatch.setattr(pulsar_transport, "MOVING", 0.0)
    async with transport_to(Dies(), "orders", "invoices") as transport:
        assert await transport.open("lane", ["orders"]) == {"orders": 7}
        with pytest.raises(ConnectionError) as away:
            await transport.open("lane", ["orders", "invoices"])
        assert not isinstance(away.value, TopicsRefusedError)


async def test_topics_that_do_not_answer_are_asked_at_once_and_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulsar_transport, "MOVING", 0.0)
    silent = [f"silent{number}" for number in range(10)]
    broker = Spoilt(**dict.fromkeys(silent))
    async with transport_to(broker, "orders", *silent) as transport:
        transport._timeout, clock = 0.3, asyncio.get_running_loop().time
        began = clock()
        with pytest.raises(TopicsRefusedError) as refused:
            await transport.open("lane", [*silent, "orders"])
        assert {*refused.value.reasons} == {*silent}
        assert clock() - began < 5 * transport._timeout, "each of them was given the time of all"
        with pytest.raises(TopicsRefusedError):
            await transport.open("lane", [*silent, "orders"])
        assert {broker.asked[topic] for topic in silent} == {1}


@pytest.mark.parametrize("code", ["PersistenceError", None])
async def test_h47_a_tenant_whose_topic_cannot_be_opened_stops_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str | None
) -> None:
    monkeypatch.setattr(pulsar_transport, "MOVING", 0.5)
    broker = Spoilt(spoilt=code)
    async with peer_that(broker) as (broker.endpoint, _):
        transport = PulsarTransport(f"pulsar://{broker.endpoint}", guarantee="at_least_once", timeout=0.5)
        route = Route("pulsar_wire.**", to="pulsar", topic="persistent://public/default/{tenant}")
        url = f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}"
        async with Pillarbox(url, transports={"pulsar": transport}, routes=[route]) as box:
            await box.migrate()
            for tenant in ("spoilt", "acme", "globex"):
                async with box.unit_of_work(tenant=tenant) as uow:
                    for number in range(20):
                        uow.publish(Happened(number=number), key=f"k{number}")
            relay = box.relay()
            running = asyncio.create_task(relay.run())
            await soon(lambda: broker.stored == {"acme": 20, "globex": 20}, seconds=10.0)
            relay.stop()
            await running
            async with box.engine.connect() as connection:
                attempts = await connection.execute(sa.text("SELECT DISTINCT attempts, status FROM outbox_events"))
                assert {*attempts.all()} <= {(0, "SENT"), (0, "RETRYING"), (0, "PARKED"), (0, "PENDING")}


# -- the address of the settings ---------------------------------------------------------------------------------------


def test_an_address_says_how_to_send() -> None:
    transport = connect("broker", "pulsar://host:6650?admin=http://host:8080&entries=mixed&compress_from=100")
    assert not transport.capabilities.grouped
    assert transport.capabilities.numbered
    assert repr(transport) == "PulsarTransport('pulsar://host:6650')"


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("pulsar://host", "exactly_once needs admin_url"),
        ("pulsar://host?admin=http://host&speed=9", "no option 'speed'"),
        ("pulsar://host?admin=http://host&timeout=soon", "timeout of a Pulsar address is a number"),
        ("pulsar://host?admin=http://host&timeout=0", "must be above 0"),
        ("pulsar://host?admin=http://host&entries=small", "entries is one of by_key, mixed"),
        ("pulsar://host?admin=http://host&guarantee=perhaps", "guarantee is one of"),
        ("pulsar://host?admin=http://host&token=secret", "holds a secret"),
    ],
)
def test_an_address_that_is_wrong_says_what_is(address: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as error:
        connect("broker", address)
    assert "=secret" not in str(error.value)
