"""Frames: the wire format of commands and entries. Converts between bytes and commands; no socket, and no state but an
incomplete frame.

A frame is its size, the size of its command, the command, and for an entry a checksum, its metadata and its payload.
Input of the peer is not trusted: sizes are limited, and an unreadable frame is an error that ends the connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import NamedTuple

import google_crc32c
from google.protobuf.message import DecodeError

from ...transport import Message
from . import wire_pb2 as wire

LARGEST_COMMAND = 16 * 1_048_576
"""A peer that announces a larger frame is no Pulsar broker: the largest command, a list of the topics of a namespace,
has room for a hundred thousand of them.
"""

_SIZE, _SIZES, _CHECKED = Struct(">I"), Struct(">II"), Struct(">HI")
_MAGIC = 0x0E01
_Type = wire.Command.Type


class ProtocolError(ConnectionError):
    """The peer does not follow Pulsar's protocol."""


def framed(command: wire.Command) -> bytes:
    """The wire format of a command."""
    encoded = command.SerializeToString()
    return _SIZES.pack(len(encoded) + 4, len(encoded)) + encoded


PING = framed(wire.Command(type=_Type.PING, ping=wire.Ping()))
PONG = framed(wire.Command(type=_Type.PONG, pong=wire.Pong()))


class Frames:
    """Splits the byte stream of a peer into commands."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[wire.Command]:
        """The commands that this piece completes."""
        rest = self._rest
        rest += data
        start, end = 0, len(rest)
        try:
            while end - start >= 4:
                (total,) = _SIZE.unpack_from(rest, start)
                if not 4 <= total <= LARGEST_COMMAND:
                    raise ProtocolError(f"a frame of {total:,} bytes: is this the port of a Pulsar broker?")
                if end - start < 4 + total:
                    return
                (size,) = _SIZE.unpack_from(rest, start + 4)
                if size > total - 4:
                    raise ProtocolError(f"a command of {size:,} bytes in a frame of {total:,}")
                begin = start + 8
                start += 4 + total
                try:
                    yield wire.Command.FromString(bytes(rest[begin : begin + size]))
                except DecodeError as error:
                    raise ProtocolError(f"a command that cannot be read: {error}") from None
        finally:
            del rest[:start]


class Entry(NamedTuple):
    """Messages that the broker stores together, under their first and last number."""

    messages: Sequence[Message]
    payload: bytes
    indexes: Sequence[int]
    """Positions of the messages in the request."""
    key: str | None = None
    """The common key of the messages, if they have one."""
    compression: wire.Compression = wire.NONE
    uncompressed_size: int = 0

    @property
    def first(self) -> int:
        return self.messages[0].number

    @property
    def last(self) -> int:
        return self.messages[-1].number

    def framed(self, producer_id: int, producer_name: str) -> bytes:
        """The wire format of the entry."""
        first, last, count = self.first, self.last, len(self.messages)
        # Both have the first and the last number: the broker deduplicates by the command, and restores its numbers from
        # the metadata when it loads the topic.
        command = wire.Command(
            type=_Type.SEND,
            send=wire.Send(producer_id=producer_id, sequence_id=first, highest_sequence_id=last, num_messages=count),
        ).SerializeToString()
        metadata = wire.EntryMetadata(
            producer_name=producer_name,
            sequence_id=first,
            highest_sequence_id=last,
            publish_time=time.time_ns() // 1_000_000,
            num_messages_in_batch=count,
            uncompressed_size=self.uncompressed_size,
            partition_key=self.key,
            compression=self.compression or None,
        ).SerializeToString()
        head = _SIZE.pack(len(metadata)) + metadata
        checksum = google_crc32c.extend(google_crc32c.value(head), self.payload)
        total = 4 + len(command) + 6 + len(head) + len(self.payload)
        return b"".join((
            _SIZES.pack(total, len(command)),
            command,
            _CHECKED.pack(_MAGIC, checksum),
            head,
            self.payload,
        ))  # fmt: skip


# -- messages ----------------------------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_SHORT = tuple(map(_varint, range(16_384)))
_names: dict[str, bytes] = {}
"""Encoded beginnings of properties, by name. There are as many as header names, which are few."""


def packed(message: Message) -> tuple[bytes, bytes]:
    """A message in the payload of its entry: size and metadata, and the body.

    This runs once per message, so the few fields are encoded by hand: their tags are those of MessageMetadata in
    wire.proto.
    """
    parts: list[bytes] = []
    for name, value in message.headers.items():
        start = _names.get(name) or _beginning(name)
        encoded = value.encode()
        size = len(encoded)
        if len(start) + size < 16_000:
            length = _SHORT[size]
            parts += (b"\x0a", _SHORT[len(start) + len(length) + size], start, length, encoded)
        else:
            length = _varint(size)
            parts += (b"\x0a", _varint(len(start) + len(length) + size), start, length, encoded)
    key = message.key.encode()
    parts += (b"\x12", _varint(len(key)), key, b"\x18", _varint(len(message.body)), b"\x40", _varint(message.number))
    metadata = b"".join(parts)
    return _SIZE.pack(len(metadata)) + metadata, message.body


def _beginning(name: str) -> bytes:
    encoded = name.encode()
    start = b"\x0a" + _varint(len(encoded)) + encoded + b"\x12"
    if len(_names) < 256:
        _names[name] = start
    return start
