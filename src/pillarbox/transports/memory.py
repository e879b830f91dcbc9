"""A broker in memory, for tests and first steps: sent messages can be read, and faults can be injected.

It follows the rules of a real one: order per key, groups with a position, redelivery until the acknowledgement. It
belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import msgspec

from ..route import topic_pattern
from ..transport import Capabilities, Message, Outcome, Received, Rejection, Verdict

_Found = TypeVar("_Found")


class MemoryTransport:
    """A `Publisher` and a `Subscriber`. ``capabilities`` are those of the broker that it replaces: with
    ``numbered=True`` it deduplicates. Messages that are neither acknowledged nor extended within ``ack_deadline``
    seconds are redelivered.
    """

    def __init__(self, capabilities: Capabilities | None = None, *, ack_deadline: float | None = None) -> None:
        self._capabilities = capabilities or Capabilities()
        self._ack_deadline = ack_deadline
        self._topics: defaultdict[str, list[Message]] = defaultdict(list)
        self._highest: dict[tuple[str, str], int] = {}
        self._groups: defaultdict[str, dict[str, _Open]] = defaultdict(dict)
        self._members: Counter[str] = Counter()
        """Number of subscriptions per group."""
        self._refusals: list[tuple[Callable[[Message], bool], str]] = []
        self._answers_to_lose = 0
        self._away = False
        self._random: random.Random | None = None
        self._within_keys = False
        self._waiting: list[asyncio.Future[None]] = []

    # -- for tests -----------------------------------------------------------------------------------------------------

    def sent(self, topic: str) -> list[Message]:
        """All messages of a topic, in the order of arrival."""
        return list(self._topics.get(topic, ()))

    def topics(self) -> list[str]:
        """The topics with messages, in the order of their first message."""
        return [topic for topic, messages in self._topics.items() if messages]

    async def received(self, topic: str, count: int = 1) -> list[Message]:
        """Wait until the topic has this many messages, and return all of them."""
        return await self._until(lambda: found if len(found := self.sent(topic)) >= count else None)

    def redeliver(self, topic: str, *indexes: int) -> None:
        """Redeliver stored messages to every group: those at these indexes, or all."""
        messages = self.sent(topic)
        self._deliver(topic, [messages[index] for index in indexes] if indexes else messages)
        self._wake()

    def reject(self, which: Callable[[Message], bool], *, reason: str = "rejected by the test") -> None:
        """Reject the messages that ``which`` selects, until `stop_rejecting`."""
        self._refusals.append((which, reason))

    def stop_rejecting(self) -> None:
        """Accept every message again."""
        self._refusals.clear()

    def go_away(self) -> None:
        """Be unavailable. Unacknowledged messages are redelivered after `come_back`."""
        self._away = True
        for groups in self._groups.values():
            _take_back(groups.values())

    def come_back(self) -> None:
        """Be available again, with all stored messages."""
        self._away = False
        self._wake()

    def lose_answers(self, count: int = 1) -> None:
        """Store the messages of the next requests, and lose the answers."""
        self._answers_to_lose += count

    def reorder(self, seed: int = 0, *, within_keys: bool = False) -> None:
        """Deliver waiting messages in a random order, repeatable by the seed. Each key keeps its order, as brokers
        promise, unless ``within_keys`` breaks that too.
        """
        self._random, self._within_keys = random.Random(seed), within_keys  # noqa: S311  repeatable, not secret

    def stop_reordering(self) -> None:
        """Deliver in the order of arrival again."""
        self._random = None

    # -- publisher -----------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def preflight(self, message: Message) -> str | None:
        limits = self._capabilities
        if len(message.body) > limits.max_body_bytes:
            return f"the body has {len(message.body):,} bytes, and {limits.max_body_bytes:,} are allowed"
        size = sum(len(name.encode()) + len(value.encode()) for name, value in message.headers.items())
        if size > limits.max_header_bytes:
            return f"the headers have {size:,} bytes, and {limits.max_header_bytes:,} are allowed"
        return None

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
        self._check()
        numbered = topics if self._capabilities.numbered else ()
        return {topic: self._highest.get((producer, topic), -1) for topic in numbered}

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        if self._away:
            return Outcome((), unfinished=Verdict.UNAVAILABLE, reason="the broker is away")
        outcome = self._store(producer, messages)
        self._wake()
        lost = self._answers_to_lose > 0
        self._answers_to_lose -= lost
        await asyncio.sleep(0)  # the answer is in flight: other tasks may run, and the caller may be cancelled
        return Outcome((), unfinished=Verdict.UNKNOWN, reason="the answer was lost") if lost else outcome

    async def close(self, producer: str | None = None) -> None:
        """Do nothing: there is nothing to close."""

    def _store(self, producer: str, messages: Sequence[Message]) -> Outcome:
        accepted, duplicates, rejected = list[int](), list[int](), list[Rejection]()
        numbered = self._capabilities.numbered
        keys, topics = set[str](), set[str]()
        for index, message in enumerate(messages):
            if message.key in keys or (numbered and message.topic in topics):
                continue
            if reason := self._refusal(message):
                rejected.append(Rejection(index, reason))
                keys.add(message.key)
                topics.add(message.topic)
                continue
            accepted.append(index)
            if numbered and message.number <= self._highest.get((producer, message.topic), -1):
                duplicates.append(index)
                continue
            self._highest[producer, message.topic] = message.number
            self._topics[message.topic].append(message)
            self._deliver(message.topic, [message])
        return Outcome(accepted, tuple(rejected), duplicates)

    def _refusal(self, message: Message) -> str | None:
        return self.preflight(message) or next((reason for which, reason in self._refusals if which(message)), None)

    # -- subscriber ----------------------------------------------------------------------------------------------------

    def check_topics(self, topics: Sequence[str]) -> None:
        for topic in topics:
            topic_pattern(topic)

    async def subscribe(self, topics: Sequence[str], group: str) -> MemorySubscription:
        """Join a group. A new group begins with the first message of each topic. A topic may be a template, such as
        ``orders.{tenant}``: it stands for all matching topics, including later ones.
        """
        self._check()
        subscription = MemorySubscription(self, topics, group)
        subscription.backlog()  # creates the group
        return subscription

    async def unsubscribe(self, topics: Sequence[str], group: str) -> None:
        """Remove a group and its unacknowledged messages."""
        self._check()
        if self._members[group]:
            raise ConnectionError(f"group {group!r} has a member")
        for name in self._named(topics):
            self._groups[name].pop(group, None)

    async def reread(self, topics: Sequence[str]) -> MemoryHistory:
        """Read all messages of these topics, or of the topics that match a template."""
        self._check()
        return MemoryHistory(self, topics)

    def _named(self, topics: Sequence[str]) -> list[str]:
        names: dict[str, None] = {}
        for topic in topics:
            pattern = topic_pattern(topic)
            names |= dict.fromkeys([topic] if pattern is None else filter(pattern.fullmatch, self._topics))
        return [*names]

    def _open_in(self, topics: Sequence[str], group: str) -> list[_Open]:
        """Unacknowledged messages of a group, by topic."""
        names = self._named(topics)
        for name in names:
            if group not in self._groups[name]:
                self._groups[name][group] = dict.fromkeys(map(_Copy, self.sent(name)))
        return [self._groups[name][group] for name in names]

    def _in_some_order(self, taken: list[Received]) -> list[Received]:
        if self._random is None:
            return taken
        if self._within_keys:
            return self._random.sample(taken, len(taken))
        lines: defaultdict[tuple[str, str | None, str], deque[Received]] = defaultdict(deque)
        for each in taken:
            lines[_line(each.message)].append(each)
        places = [line for line, waiting in lines.items() for _ in waiting]
        return [lines[line].popleft() for line in self._random.sample(places, len(places))]

    def _deliver(self, topic: str, messages: Sequence[Message]) -> None:
        for copies in self._groups[topic].values():
            copies.update(dict.fromkeys(map(_Copy, messages)))

    def _check(self) -> None:
        if self._away:
            raise ConnectionError("the broker is away")

    async def _until(self, look: Callable[[], _Found | None]) -> _Found:
        """Wait until ``look`` returns a result. It is called again after every change."""
        while not (found := look()):
            change = asyncio.get_running_loop().create_future()
            self._waiting.append(change)
            try:
                await change
            finally:
                self._waiting.remove(change)
        return found

    def _wake(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)


class MemoryHistory:
    """All messages of some topics, once."""

    def __init__(self, broker: MemoryTransport, topics: Sequence[str]) -> None:
        self._broker = broker
        self._names = [*topics]
        self._read: dict[str, int] = {}

    async def pages(self) -> AsyncGenerator[Sequence[Message], None]:
        self._broker._check()
        for name, sent in [(name, [*self._broker.sent(name)]) for name in self._broker._named(self._names)]:
            new, self._read[name] = sent[self._read.get(name, 0) :], len(sent)
            if new:
                yield new

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""


class MemorySubscription:
    """A member of a group. While it holds messages of a key, no other member gets later ones of that key."""

    def __init__(self, broker: MemoryTransport, topics: Sequence[str], group: str) -> None:
        self._broker = broker
        self._names = [*topics]
        self._group = group
        self._closed = False
        broker._members[group] += 1

    @property
    def _topics(self) -> list[_Open]:
        return self._broker._open_in(self._names, self._group)

    async def receive(self, limit: int, max_bytes: float = math.inf) -> Sequence[Received]:
        return await self._broker._until(lambda: self._take(limit, max_bytes))

    async def ack(self, received: Sequence[Received]) -> None:
        self._check()
        for copies in self._topics:
            for each in received:
                copies.pop(each.handle, None)
        self._broker._wake()

    async def extend(self, received: Sequence[Received]) -> None:
        self._check()
        self._set_deadlines([each.handle for each in received if each.handle.holder is self])

    @property
    def deadline(self) -> float | None:
        return self._broker._ack_deadline

    def backlog(self) -> int | None:
        return None if self._broker._away else sum(map(len, self._topics))

    async def close(self) -> None:
        if not self._closed:
            self._broker._members[self._group] -= 1
        self._closed = True
        _take_back(self._topics, self)
        self._broker._wake()

    def _take(self, limit: int, max_bytes: float) -> list[Received]:
        if self._broker._away and not self._closed:
            return []
        self._check()
        taken: list[Received] = []
        size = 0
        for copy in chain.from_iterable(_free(copies, self) for copies in self._topics):
            if len(taken) >= limit or size >= max_bytes:
                break
            taken.append(copy.give(self))
            size += len(copy.message.body)
        self._set_deadlines([each.handle for each in taken])
        return self._broker._in_some_order(taken)

    def _set_deadlines(self, copies: Sequence[_Copy]) -> None:
        if self.deadline is not None:
            for copy in copies:
                copy.extensions += 1
                asyncio.get_running_loop().call_later(self.deadline, self._expire, copy, copy.extensions)

    def _expire(self, copy: _Copy, extensions: int) -> None:
        if copy.holder is self and copy.extensions == extensions:
            copy.holder = None
            self._broker._wake()

    def _check(self) -> None:
        self._broker._check()
        if self._closed:
            raise ConnectionError("the subscription is closed")


class _Copy(msgspec.Struct, eq=False, gc=False):
    """A message for one group."""

    message: Message
    attempts: int = 0
    holder: MemorySubscription | None = None
    extensions: int = 0

    def give(self, holder: MemorySubscription) -> Received:
        self.holder = holder
        self.attempts += 1
        return Received(self.message, self.attempts, self)


_Open = dict[_Copy, None]
"""Unacknowledged messages of a group in a topic, in order."""


def _free(copies: _Open, member: MemorySubscription) -> Iterator[_Copy]:
    """The messages that this member may get: none behind a message of the same key that another member holds."""
    stopped: set[str] = set()
    for copy in copies:
        if copy.holder not in (None, member):
            stopped.add(copy.message.key)
        elif copy.holder is None and copy.message.key not in stopped:
            yield copy


def _line(message: Message) -> tuple[str, str | None, str]:
    """The unit of order."""
    return message.topic, message.headers.get("tenant_id"), message.key


def _take_back(topics: Collection[_Open], member: MemorySubscription | None = None) -> None:
    for copies in topics:
        for copy in copies:
            if member is None or copy.holder is member:
                copy.holder = None
