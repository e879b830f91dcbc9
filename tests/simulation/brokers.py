"""Two simulated brokers: a plain one that takes whatever comes, and one that tells duplicates by producer and number.

What the second one does was seen on Apache Pulsar: a message is *pushed* first and *stored* a moment later, opening
tells what was pushed, and a crash loses what was not stored. A producer's name belongs to whoever holds it, while that
one answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pillarbox.transport import Capabilities, Message, Outcome, Rejection, Verdict
from tests.simulation.loop import Life
from tests.simulation.wire import Chaos, Reply, Wire
from tests.transport_bugs import Bug, misbehave

FOR_EVER = 1_000_000
UNSENDABLE = b"!"
"""A body that begins like this is refused by preflight."""


@dataclass(eq=False)
class Link:
    """A producer's connection."""

    life: Life
    producer: str
    closed: bool = False
    lasts: dict[str, int] = field(default_factory=dict)
    doubtful: bool = True
    """As its owner sees it: nobody knows what the broker has of the last request."""


class Broker:
    """Topics in memory, with moods."""

    numbered = False
    manners: Sequence[str] = ("refuse all", "stop", "go on")
    """What becomes of the messages in a request behind one that is rejected."""

    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos
        self.topics: defaultdict[str, list[Message]] = defaultdict(list)
        self.refusals: dict[str, int] = {}
        """How often an event, by its id, will still be rejected."""
        self.deadly: set[str] = set()
        """Events that kill whoever sends them."""
        self.rejections: Counter[str] = Counter()
        self.bugs: dict[str, Bug] = {}
        """What the transport does when it meets an event."""
        self.rejected: set[str | None] = set()
        """Topics and tenants of which everything is rejected."""
        self.away = False
        self.rejects_everything = False

    def open(self, link: Link, topics: Collection[str]) -> Mapping[str, int]:  # noqa: ARG002  nothing to remember
        return {}

    def take(self, link: Link, messages: Sequence[Message], reply: Reply) -> None:
        """A request has arrived."""
        chaos = self.chaos
        chaos.note("arrives", link.producer, [(message.number, event_of(message)[-6:]) for message in messages])
        if any(event_of(message) in self.deadly and self.is_new(link, message) for message in messages):
            chaos.kill(link.life)
            if chaos.draw.random() < 0.5:
                return
        if self.away:
            reply(Outcome((), unfinished=Verdict.UNAVAILABLE, reason="the broker is away"))
            return
        tried = [*self._tried(messages, chaos.draw.choice(self.manners))]
        breaks_at = chaos.draw.randrange(len(tried) + 1) if chaos.draw.random() < chaos.rate else None
        for index, refused in tried[:breaks_at]:
            if refused:
                self._reject(messages[index])
        self.store(link, messages, tried[:breaks_at], breaks_at is not None, reply)

    def _tried(self, messages: Sequence[Message], manner: str) -> Iterator[tuple[int, bool]]:
        """Which messages are tried, and whether each is rejected: nothing of a key behind one that is."""
        refused = [index for index, message in enumerate(messages) if self.refuses(message)]
        if refused and manner == "refuse all":
            yield refused[0], True
            return
        stopped: set[str] = set()
        for index, message in enumerate(messages):
            if message.key not in stopped:
                yield index, index in refused
            if index in refused:
                stopped.add(message.key)
                if manner == "stop":
                    return

    def _reject(self, message: Message) -> None:
        self.rejections[event_of(message)] += 1
        self.refusals[event_of(message)] = self.refusals.get(event_of(message), 1) - 1

    def refuses(self, message: Message) -> bool:
        if self.rejects_everything or self.refusals.get(event_of(message), 0) > 0:
            return True
        return bool(self.rejected) and not self.rejected.isdisjoint((message.topic, message.headers.get("tenant_id")))

    def is_new(self, link: Link, message: Message) -> bool:  # noqa: ARG002  it does not know
        return True

    def store(
        self,
        link: Link,  # noqa: ARG002  it does not ask
        messages: Sequence[Message],
        tried: Sequence[tuple[int, bool]],
        breaks: bool,
        reply: Reply,
    ) -> None:
        for index, refused in tried:
            if not refused:
                self.topics[messages[index].topic].append(messages[index])
        reply(_outcome(tried, breaks))

    def crash(self) -> None:
        """Forget what only memory knew."""


class NumberedBroker(Broker):
    """One copy of each message, if what it says about numbers is heeded."""

    numbered = True
    manners = ("refuse all", "stop")  # what is stored behind a rejected message would hide that it is missing

    def __init__(self, chaos: Chaos) -> None:
        super().__init__(chaos)
        self.disk_hangs_until = 0.0
        self._pushed: defaultdict[tuple[str, str], int] = defaultdict(lambda: -1)
        self._stored: defaultdict[tuple[str, str], int] = defaultdict(lambda: -1)
        self._holders: dict[str, Link] = {}
        self._unstored: deque[tuple[str, Message]] = deque()
        self._unanswered: list[tuple[Reply, Outcome, int]] = []
        self._written = 0
        self._crashes = 0

    def open(self, link: Link, topics: Collection[str]) -> Mapping[str, int]:
        holder = self._holders.get(link.producer)
        if self.away or link.closed:
            raise ConnectionError("the broker is away")
        if holder is not None and not holder.closed and holder.life is not link.life and self._answers(holder.life):
            raise ConnectionError(f"{link.producer} is held by {holder.life.name}")
        if holder is not None:
            holder.closed = True
        self._holders[link.producer] = link
        return {topic: self._pushed[link.producer, topic] for topic in topics}

    def _answers(self, life: Life) -> bool:
        return life.alive and (life.paused_at is None or self.chaos.loop.time() - life.paused_at < 5.0)

    def take(self, link: Link, messages: Sequence[Message], reply: Reply) -> None:
        if link.closed or self._holders.get(link.producer) is not link:
            reply(ConnectionError("the producer is closed"))
        else:
            super().take(link, messages, reply)

    def is_new(self, link: Link, message: Message) -> bool:
        return message.number > self._pushed[link.producer, message.topic]

    def store(
        self, link: Link, messages: Sequence[Message], tried: Sequence[tuple[int, bool]], breaks: bool, reply: Reply
    ) -> None:
        duplicates: list[int] = []
        for place, (index, refused) in enumerate(tried):
            message = messages[index]
            if refused:
                continue
            if self.is_new(link, message):
                self._pushed[link.producer, message.topic] = message.number
                self._unstored.append((link.producer, message))
            elif message.number <= self._stored[link.producer, message.topic]:
                duplicates.append(index)
            else:  # pushed, and who knows whether it will be stored
                tried, breaks = tried[:place], True
                break
        upto = self._written + len(self._unstored)
        self._unanswered.append((reply, _outcome(tried, breaks, duplicates), upto))
        hanging = max(0.0, self.disk_hangs_until - self.chaos.loop.time())
        self.chaos.later(hanging + self.chaos.draw.random() * 0.005, self._write, self._crashes, upto)

    def _write(self, crashes: int, upto: int) -> None:
        """The disk has taken all that was pushed until then, unless a crash came first."""
        if crashes != self._crashes:
            return
        while self._written < upto:
            self._write_next()
        finished = [it for it in self._unanswered if it[2] <= self._written]
        self._unanswered = [it for it in self._unanswered if it[2] > self._written]
        for reply, outcome, _ in finished:
            self.chaos.note("stored", outcome)
            reply(outcome)

    def _write_next(self) -> None:
        producer, message = self._unstored.popleft()
        self._written += 1
        self._stored[producer, message.topic] = message.number
        self.topics[message.topic].append(message)

    def crash(self) -> None:
        self._crashes += 1
        for _ in range(self.chaos.draw.randrange(len(self._unstored) + 1)):
            self._write_next()
        self._unstored.clear()
        self._pushed = self._stored.copy()
        for link in self._holders.values():
            link.closed = True
        for reply, outcome, _ in self._unanswered:
            known = outcome.rejected if self.chaos.draw.random() < 0.5 else ()
            reply(Outcome((), known, unfinished=Verdict.UNKNOWN, reason="the broker has crashed"))
        self._unanswered.clear()


class Watcher(Protocol):
    """Is told what a relay's transport does."""

    def sending(self, life: Life, producer: str, messages: Sequence[Message]) -> None:
        """A request leaves."""
        ...

    def answered(self, life: Life, messages: Sequence[Message], outcome: Outcome) -> None:
        """It has come to this."""
        ...


class BrokerPublisher:
    """The `Publisher` of one process."""

    def __init__(
        self,
        broker: Broker,
        wire: Wire,
        life: Life,
        watch: Watcher,
        capabilities: Capabilities,
    ) -> None:
        self.capabilities = capabilities
        self._broker = broker
        self._wire = wire
        self._life = life
        self._watch = watch
        self._links: dict[str, Link] = {}

    def preflight(self, message: Message) -> str | None:
        if not message.body.startswith(UNSENDABLE):
            return None
        self._broker.rejections[event_of(message)] += 1
        return "it is far too large"

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
        link = self._links.get(producer)
        if link is not None and not link.doubtful and link.lasts.keys() >= {*topics}:
            return {topic: link.lasts[topic] for topic in topics}
        self._let_go(producer)
        link = self._links[producer] = Link(self._life, producer)

        def effect(reply: Reply) -> None:
            try:
                reply(self._broker.open(link, sorted(topics)))
            except ConnectionError as error:
                reply(error)

        lasts: Mapping[str, int] = await self._wire.ask("open", effect)
        link.lasts, link.doubtful = dict(lasts), False
        return lasts

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        if self._broker.numbered and producer not in self._links:
            raise ConnectionError("the producer is not open")
        link = self._links.setdefault(producer, Link(self._life, producer))
        self._watch.sending(self._life, producer, messages)
        link.doubtful = True
        for index, message in enumerate(messages):
            # What a numbered broker has already is only asked for: a bug there would hide for good that it is stored.
            if event_of(message) in self._broker.bugs and self._broker.is_new(link, message):
                return await self._stumble(link, messages, index)
        outcome = await self._give(link, messages)
        link.doubtful = outcome.unfinished is not None
        for index in outcome.accepted:
            link.lasts[messages[index].topic] = messages[index].number
        self._watch.answered(self._life, messages, outcome)
        return outcome

    async def _give(self, link: Link, messages: Sequence[Message]) -> Outcome:
        outcome: Outcome = await self._wire.ask(
            "send", lambda reply: self._broker.take(link, messages, reply), patience=8.0
        )
        return outcome

    async def _stumble(self, link: Link, messages: Sequence[Message], found: int) -> Outcome:
        """The message that was found makes the transport misbehave, when those before it have left, or it as well."""
        event = event_of(messages[found])
        if len(messages) == 1:  # else nothing says which one it was
            self._broker.rejections[event] += 1
        self._watch.answered(self._life, messages, Outcome((), [Rejection(found, "a bug")]))
        leaving = messages[: found + (self._broker.chaos.draw.random() < 0.2)]
        stored = (await self._give(link, leaving)).accepted if leaving else ()
        return await misbehave(self._broker.bugs[event], stored, len(messages))

    async def close(self, producer: str | None = None) -> None:
        for name in [*self._links] if producer is None else [producer]:
            self._let_go(name)
        await asyncio.sleep(0.001)

    def _let_go(self, producer: str) -> None:
        link = self._links.pop(producer, None)
        if link is not None and self._broker.numbered:
            link.closed = True


def event_of(message: Message) -> str:
    """The id of the event in a message."""
    return message.headers["event_id"]


def _outcome(tried: Sequence[tuple[int, bool]], breaks: bool, duplicates: Sequence[int] = ()) -> Outcome:
    accepted = [index for index, refused in tried if not refused]
    rejected = [Rejection(index, "refused") for index, refused in tried if refused]
    return Outcome(accepted, rejected, duplicates, Verdict.UNKNOWN if breaks else None, "no more was heard")
