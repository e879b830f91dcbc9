"""What a member of a group has received and not acknowledged, and how much more may come in."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from ...transport import Message


@dataclass(slots=True, eq=False)
class Copy:
    """A message that is with us until it is acknowledged."""

    message: Message
    order: int
    place: Hashable
    """Where the broker stores it: the same message that comes again has the same."""
    consumer: Any
    id: Any
    """What that consumer acknowledges it by."""
    attempt: int
    offered: bool = False
    """It was taken before."""
    out: bool = False


class Shelf:
    """Lives on the loop. Nothing is searched for: a message that was acknowledged is found out when its turn comes."""

    def __init__(self) -> None:
        self._open: dict[Hashable, Copy] = {}
        self._free: list[tuple[int, Copy]] = []
        """A heap of what may be offered."""

    def __len__(self) -> int:
        """How many are not acknowledged."""
        return len(self._open)

    def __contains__(self, copy: Copy) -> bool:
        return self._open.get(copy.place) is copy

    def put(self, copy: Copy) -> bool:
        """Whether it is new. After a lost connection the broker sends all again that is not acknowledged: what we have
        is not put twice, and what is out is offered again, as nobody knows whether it will ever be acknowledged.
        """
        known = self._open.setdefault(copy.place, copy)
        if known is not copy:  # the client counts acknowledgements of an entry by the ids that came last
            known.consumer, known.id = copy.consumer, copy.id
            known.attempt = max(known.attempt + known.out, copy.attempt)
        if known is copy or known.out:
            known.out = False
            heappush(self._free, (known.order, known))
        return known is copy

    def take(self, limit: int, max_bytes: float) -> list[Copy]:
        """Up to so many, in order, and none behind the one that reaches ``max_bytes``; they are out then."""
        taken: list[Copy] = []
        size = 0
        while self._free and len(taken) < limit and size < max_bytes:
            _, copy = heappop(self._free)
            if copy in self:
                copy.out = True
                taken.append(copy)
                size += len(copy.message.body)
        return taken

    def drop(self, copy: Copy) -> None:
        """It is acknowledged."""
        del self._open[copy.place]


class Room:
    """How much may come in before some of it is offered: the client's thread waits here, and the loop makes room.

    Each of the two counts for itself, so that neither needs a lock for each message.
    """

    def __init__(self, messages: int, size: int) -> None:
        self._change = threading.Condition()
        self._messages = messages
        self._size = size
        self._used_messages = self._used_size = 0
        self._closed = False

    @property
    def _is_full(self) -> bool:
        return self._used_messages >= self._messages or self._used_size >= self._size

    def use(self, size: int) -> bool:
        """Wait for room, and use some of it; False once it is closed. A message may be larger than what is left."""
        if self._is_full:
            with self._change:
                while self._is_full and not self._closed:
                    self._change.wait()
        self._used_messages += 1
        self._used_size += size
        return not self._closed

    def free(self, messages: int, size: int) -> None:
        """Give back what so many messages have used."""
        with self._change:
            self._messages += messages
            self._size += size
            self._change.notify()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._change:
            self._closed = True
            self._change.notify()
