"""The received and unacknowledged messages of a group's member, and the room for more."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from ...transport import Message


@dataclass(slots=True, eq=False)
class Copy:
    """A message that is kept until it is acknowledged."""

    message: Message
    order: int
    place: Hashable
    """The broker's place of the message, the same at every redelivery."""
    consumer: Any
    id: Any
    """The client's id for the acknowledgement."""
    attempt: int
    offered: bool = False
    """Whether it was offered before."""
    out: bool = False


class Unacked:
    """Belongs to the loop. It is never searched: an acknowledged message is skipped when its turn comes."""

    def __init__(self) -> None:
        self._open: dict[Hashable, Copy] = {}
        self._free: list[tuple[int, Copy]] = []
        """A heap of messages that may be offered."""

    def __len__(self) -> int:
        """Number of unacknowledged messages."""
        return len(self._open)

    def __contains__(self, copy: Copy) -> bool:
        return self._open.get(copy.place) is copy

    def put(self, copy: Copy) -> bool:
        """Add a message. Returns whether it is new. After a lost connection, the broker redelivers all unacknowledged
        messages: a known one is not added twice, and one that is in use is offered again, because it may never be
        acknowledged.
        """
        known = self._open.setdefault(copy.place, copy)
        if known is not copy:  # the client acknowledges an entry by the ids received last
            known.consumer, known.id = copy.consumer, copy.id
            known.attempt = max(known.attempt + known.out, copy.attempt)
        if known is copy or known.out:
            known.out = False
            heappush(self._free, (known.order, known))
        return known is copy

    def take(self, limit: int, max_bytes: float) -> list[Copy]:
        """Offer up to ``limit`` messages in order, and none behind the one that reaches ``max_bytes``."""
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
        """Remove an acknowledged message."""
        del self._open[copy.place]


class Room:
    """Room for received messages: the client's thread waits here, and the loop makes room.

    One side only uses room, the other only frees it, so neither needs a lock for each message.
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
        """Wait for room, and use some of it. Returns False once closed. A message may exceed the remaining room."""
        if self._is_full:
            with self._change:
                while self._is_full and not self._closed:
                    self._change.wait()
        self._used_messages += 1
        self._used_size += size
        return not self._closed

    def free(self, messages: int, size: int) -> None:
        """Free the room of this many messages."""
        with self._change:
            self._messages += messages
            self._size += size
            self._change.notify()

    def close(self) -> None:
        """End all waits."""
        with self._change:
            self._closed = True
            self._change.notify()
