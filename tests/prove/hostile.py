"""A broker that does to consumers what brokers may do, and more often: it delivers messages up to five times and out of
order, within a key too, to whoever asks; and what a consumer held when its connection was lost comes again.

It serves consumers in other processes, over a Unix socket. Which copies come when is drawn from a seed.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Self

import msgspec

from pillarbox.transport import Message, Received

COPIES = (1, 1, 1, 1, 1, 1, 1, 2, 3, 5)
"""How often a message is delivered is one of these, if nobody is killed."""
WINDOW = 200
"""By how many messages the first copy of one may be late."""
AFTER = 2_000
"""By how many the others."""


class Hello(msgspec.Struct, tag=True):
    """Who calls."""

    member: str
    group: str


class Ask(msgspec.Struct, tag=True):
    """Send me so many."""

    limit: int


class Ack(msgspec.Struct, tag=True):
    """These are dealt with."""

    copies: list[int]


class Delivered(msgspec.Struct):
    """A copy of a message."""

    copy: int
    attempt: int
    message: Message


_asked = msgspec.msgpack.Decoder(Hello | Ask | Ack)
_answered = msgspec.msgpack.Decoder(list[Delivered])
_LENGTH = 4


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        size = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the other side has gone") from None


def _write(writer: asyncio.StreamWriter, content: object) -> None:
    frame = msgspec.msgpack.encode(content)
    writer.write(len(frame).to_bytes(_LENGTH, "big") + frame)


# -- the broker --------------------------------------------------------------------------------------------------------


class Group:
    """What one group has still to get, and in which order."""

    def __init__(self, seed: str) -> None:
        self.deliveries = 0
        self.duplicates = 0
        """Of these, those of a message that was delivered before."""
        self.disordered = 0
        """Messages that were first delivered after a later one of their key."""
        self.acknowledged = 0
        self.complete = False
        """No more messages will be offered: the last ones need not wait to be late."""
        self.offered = 0
        """Messages, not copies."""
        self._draw = random.Random(seed)
        self._copies: dict[int, tuple[int, Message]] = {}
        """All that are not acknowledged, with the place of their message."""
        self._line: list[tuple[float, int]] = []
        """Those of them that nobody holds: when they are due, in offered messages."""
        self._attempts: Counter[int] = Counter()
        self._numbers = count()
        self._last: dict[str, int] = {}

    def offer(self, message: Message) -> None:
        place = self.offered
        self.offered += 1
        for number in range(self._draw.choice(COPIES)):
            copy = next(self._numbers)
            self._copies[copy] = place, message
            self._push(copy, AFTER if number else WINDOW)

    def take(self, limit: int) -> list[Delivered]:
        taken: list[Delivered] = []
        while self._line and len(taken) < limit and (self.complete or self._line[0][0] <= self.offered):
            copy = heapq.heappop(self._line)[1]
            place, message = self._copies[copy]
            self._attempts[place] += 1
            if self._attempts[place] == 1:
                self.disordered += self._last.get(message.key, -1) > place
                self._last[message.key] = max(place, self._last.get(message.key, -1))
            taken.append(Delivered(copy, self._attempts[place], message))
        self.deliveries += len(taken)
        self.duplicates += sum(each.attempt > 1 for each in taken)
        return taken

    def settle(self, copy: int) -> None:
        self.acknowledged += self._copies.pop(copy, None) is not None

    def take_back(self, copy: int) -> None:
        if copy in self._copies:
            self._push(copy, WINDOW)

    @property
    def left(self) -> int:
        """Copies that are not acknowledged."""
        return len(self._copies)

    def _push(self, copy: int, window: int) -> None:
        at = self._line[0][0] if self.complete and self._line else self.offered
        heapq.heappush(self._line, (at + self._draw.random() * window, copy))


class HostileBroker:
    """``async with HostileBroker(socket, groups, seed)``: serves until the end of the block."""

    def __init__(self, socket: Path, groups: Sequence[str], seed: int) -> None:
        self.socket = socket
        self.groups = {name: Group(f"{seed} {name}") for name in groups}
        self.trap: tuple[str, Callable[[str], None]] | None = None
        """The next acknowledgement of this group is not heeded: whoever says it is named to this function."""
        self._asking: dict[asyncio.StreamWriter, tuple[Group, int, set[int]]] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    def offer(self, messages: Sequence[Message]) -> None:
        """Here is more for every group."""
        for group in self.groups.values():
            for message in messages:
                group.offer(message)
        self._answer()

    def complete(self) -> None:
        """That was all."""
        for group in self.groups.values():
            group.complete = True
        self._answer()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        holds: set[int] = set()
        group: Group | None = None
        member = name = ""
        try:
            while True:
                match _asked.decode(await _read(reader)):
                    case Hello(member, name):
                        group = self.groups[name]
                    case Ask(limit) if group is not None:
                        self._asking[writer] = group, limit, holds
                        self._answer()
                    case Ack(copies) if group is not None:
                        if self.trap is not None and self.trap[0] == name:
                            spring, self.trap = self.trap[1], None
                            spring(member)
                            return
                        for copy in copies:
                            holds.discard(copy)
                            group.settle(copy)
        except OSError:
            pass
        finally:
            self._asking.pop(writer, None)
            if group is not None:
                for copy in sorted(holds):
                    group.take_back(copy)
                self._answer()
            writer.close()

    def _answer(self) -> None:
        for writer, (group, limit, holds) in [*self._asking.items()]:
            if found := group.take(limit):
                del self._asking[writer]
                holds |= {each.copy for each in found}
                _write(writer, found)


# -- a member of a group, in another process ---------------------------------------------------------------------------


class HostileSubscriber:
    """The `Subscriber` of a `HostileBroker`."""

    def __init__(self, socket: Path, member: str) -> None:
        self._socket = socket
        self._member = member

    async def subscribe(self, topics: Sequence[str], group: str) -> HostileSubscription:  # noqa: ARG002  there is one
        reader, writer = await asyncio.open_unix_connection(self._socket)
        _write(writer, Hello(self._member, group))
        return HostileSubscription(reader, writer)


class HostileSubscription:
    """One connection."""

    deadline = None

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._answer: asyncio.Future[bytes] | None = None

    async def receive(self, limit: int, max_bytes: float = math.inf) -> Sequence[Received]:  # noqa: ARG002  all are small
        if self._answer is None:
            _write(self._writer, Ask(limit))
            self._answer = asyncio.ensure_future(_read(self._reader))
        answer = await asyncio.shield(self._answer)  # whoever is cancelled asks again for the same
        self._answer = None
        return [Received(each.message, each.attempt, each.copy) for each in _answered.decode(answer)]

    async def ack(self, received: Sequence[Received]) -> None:
        _write(self._writer, Ack([each.handle for each in received]))
        await self._writer.drain()

    async def extend(self, received: Sequence[Received]) -> None:
        """There is no deadline."""

    def backlog(self) -> int | None:
        return None

    async def close(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
