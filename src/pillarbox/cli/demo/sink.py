"""The sink: a process that messages are sent to over TCP. It acknowledges what it has appended to its file.

A frame is four bytes of length and MessagePack. The first one says which relay is talking, each further one is a
request of several posts and is answered by a receipt. The file has one line of JSON per accepted message; it is the
witness that the ledger listens to, so a process that was killed in the middle of a line takes that line back when it
starts again: it was never acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from io import BufferedWriter
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from .child import Told, live, say

POISONED = "demo.order.poisoned"
"""The type of event that the sink rejects while it is told to."""


class Post(msgspec.Struct, frozen=True, array_like=True):
    """A message on its way to the sink."""

    event_id: str
    event_type: str
    topic: str
    tenant: str | None
    key: str
    version: str | None
    body: bytes


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """What the sink did with a request."""

    accepted: list[int]
    rejected: list[tuple[int, str]]


class Arrival(msgspec.Struct, frozen=True):
    """A line of the sink's file."""

    event_id: str
    topic: str
    tenant: str | None
    key: str
    version: str | None
    relay: str
    """Who sent it."""
    connection: str
    at: float


class Arrivals:
    """Reads the sink's file while it grows."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._position = 0
        self._decoder = msgspec.json.Decoder(Arrival)

    def more(self) -> list[Arrival]:
        """What has come since the last time."""
        with suppress(FileNotFoundError), self._file.open("rb") as file:
            file.seek(self._position)
            whole = file.read().rpartition(b"\n")
            self._position += len(whole[0]) + len(whole[1])
            return self._decoder.decode_lines(whole[0])
        return []


def frame(value: Any) -> bytes:
    """A value as it goes over the wire."""
    content = msgspec.msgpack.encode(value)
    return len(content).to_bytes(4, "big") + content


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The content of the next frame."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


class Sink:
    """Appends what it accepts, then says so."""

    def __init__(self, file: BufferedWriter, told: Told) -> None:
        self._file = file
        self._told = told
        self._connections = count(1)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        connection = f"{os.getpid()}/{next(self._connections)}"
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            relay = msgspec.msgpack.decode(await read_frame(reader), type=str)
            while True:
                posts = msgspec.msgpack.decode(await read_frame(reader), type=list[Post])
                writer.write(frame(self._take(posts, relay, connection)))
                await writer.drain()
        writer.close()

    def _take(self, posts: Sequence[Post], relay: str, connection: str) -> Receipt:
        receipt = Receipt([], [])
        held = set()
        for index, post in enumerate(posts):
            key = (post.tenant, post.key)
            if key in held:
                continue
            if post.event_type == POISONED and self._told.get("rejects"):
                held.add(key)
                receipt.rejected.append((index, f"the sink cannot digest {post.event_type}"))
            else:
                receipt.accepted.append(index)
        self._append([posts[index] for index in receipt.accepted], relay, connection)
        return receipt

    def _append(self, posts: Sequence[Post], relay: str, connection: str) -> None:
        now = time.time()
        for post in posts:
            arrival = Arrival(post.event_id, post.topic, post.tenant, post.key, post.version, relay, connection, now)
            self._file.write(msgspec.json.encode(arrival) + b"\n")
        self._file.flush()


async def serve(told: Told) -> None:
    """Run the sink until SIGTERM; it says on which port it listens."""
    with opened(Path(told["file"])) as file:
        server = await asyncio.start_server(Sink(file, told).talk, "127.0.0.1", told["port"])
        say(server.sockets[0].getsockname()[1])
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()
        server.close()


def opened(path: Path) -> BufferedWriter:
    """The file, ready to be appended to. A line that was torn when we were killed is taken back."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    return path.open("ab")


if __name__ == "__main__":
    live(serve)
