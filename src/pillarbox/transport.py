"""The transport ports: how messages leave, how they come in, and what a destination can carry.

A route names a transport; the limits of the transport are checked when a delivery is written, so that no message is
ever found to be too large by the relay. What becomes of a message has three answers, and a transport must not mix them
up: *rejected* is the message's own fault, *unavailable* the destination's, and *unknown* is neither success nor
failure.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import msgspec


class Message(msgspec.Struct, frozen=True, gc=False):
    """A delivery on its way: final bytes, and everything that a broker is told about them."""

    topic: str
    key: str
    body: bytes
    headers: Mapping[str, str]
    number: int = 0
    """Where it stands in the order of its lane, for transports that deduplicate by it. Rises, with gaps."""
    place: str = ""
    """The partition of the topic that it goes to, where a topic has partitions that are numbered by themselves."""
    attempts: int = 0
    """How often its destination has rejected it before."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport promises and what it can carry."""

    max_body_bytes: int = 1_048_576
    """The largest body that it accepts."""

    max_header_bytes: int = 65_536
    """The most that all headers together, names and values, may take."""

    max_messages: int = 1_000
    """The most messages in one request."""

    timeout: float | None = 10.0
    """Seconds after which a request without an answer is given up; None: it may take as long as the lease lasts."""

    numbered: bool = False
    """It deduplicates by producer name and number: one copy on the topic, whatever happens."""

    grouped: bool = False
    """Messages of one topic and key are best sent together: the lane brings them in groups."""

    opens: bool = False
    """Topics are opened before each batch, so that one that cannot be holds up no other. If it is numbered, always."""

    forgets_after: float | None = None
    """Seconds after which it forgets the numbers of a producer that is away, if it does."""


class Verdict(Enum):
    """Why a request was not finished."""

    UNAVAILABLE = "unavailable"
    """The destination could not take it: nothing about the messages is wrong."""
    UNKNOWN = "unknown"
    """No answer came: what was not acknowledged may or may not have arrived."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A message that the destination refuses, whatever we do; or now."""

    index: int
    reason: str
    retry_after: float | None = None
    """Seconds after which it may be offered again, and its key waits. Then nothing is wrong with it: no attempt is
    counted, and nothing is held against the destination.
    """
    final: bool = False
    """No attempt will ever succeed: the delivery fails at once. Nothing is held against the destination."""
    alone: bool = False
    """An attempt is counted, however many others are rejected: nothing is held against the destination."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request. Per key a prefix is accepted, at most one message is rejected, the rest not tried."""

    accepted: Collection[int]
    """Indexes of the messages that the destination has stored, by its own word."""
    rejected: Sequence[Rejection] = ()
    duplicates: Collection[int] = ()
    """Of the accepted ones, those that the destination had already stored under their number."""
    unfinished: Verdict | None = None
    """Why the others were not tried or not answered; None if only rejections kept them back."""
    reason: str = ""
    """What the destination or the network said."""


class Publisher(Protocol):
    """A destination that messages are sent to. Routes refer to it by the name under which it is given to the box.

    A producer is the voice of one lane, by a name that is the lane's alone; a transport may share connections among
    them as it likes.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Fixed for the life of the transport; known without a connection."""
        ...

    def preflight(self, message: Message) -> str | None:
        """Why the destination would surely reject this message, as far as can be told without asking it; None if it
        may go.
        """
        ...

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
        """Make ready to send: open what is not open, or is lost. Numbered transports say the highest number that each
        topic was ever given under this producer's name (-1: none), which is not yet a promise that it is stored. The
        others answer nothing, and open what they need when they send; a relay calls it if they say `opens`.

        A relay calls it before each batch, so what is open costs nothing. What has left a request unanswered is not
        open any more. An `OSError` or `TimeoutError` means unavailable; `TopicsRefusedError`, that these topics are,
        and that the others can be opened.
        """
        ...

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        """Send messages, in this order per key, and wait for the answers. Never called twice at once for a producer.

        Nothing of a key is accepted behind a message of that key that was not. If the transport is numbered, nothing of
        a topic is stored behind one that was not: whoever takes over knows nothing but the highest number, and takes
        all below it for stored. Being cancelled means unknown.

        An `OSError` means unavailable, a `TimeoutError` unknown. Any other error, and an answer that contradicts
        itself, is a bug: the messages are sent again one by one, and the one that brings it about is rejected. So is
        one that never gets an answer, while others do.
        """
        ...

    async def close(self, producer: str | None = None) -> None:
        """Let go of one producer, or of everything. Twice is fine."""
        ...


Transport = Publisher


class TopicsRefusedError(OSError):
    """Some topics cannot be opened now, by no fault of their messages, while others can."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


@runtime_checkable
class Partitioned(Protocol):
    """A publisher whose topics have partitions that are numbered by themselves: `Publisher.open` then says the highest
    number of each of them, by its place.
    """

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has that was opened; 0 if it is not partitioned. The lane announces it with the
        batch: a successor, who may find more of them, sends each message to the same place.
        """
        ...

    def place(self, topic: str, key: str, partitions: int) -> str:
        """Where a key belongs, if the topic has so many."""
        ...


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message that came in, and how the subscription knows it."""

    message: Message
    attempt: int = 1
    """How often it was delivered to the group, as far as the broker counts: a hint, and no more. Pulsar 4.0 does not
    count deliveries to a member that died, so 1 does not say that it comes for the first time.
    """
    handle: Any = None


class Subscription(Protocol):
    """A stream of messages. A message that is not acknowledged is delivered again after `close`, or after `deadline`;
    there is no way to refuse one: on most brokers the next message of its key would pass it.
    """

    async def receive(self, limit: int, max_bytes: float = math.inf) -> Sequence[Received]:
        """At least one message and at most ``limit``, in order per key; none behind the one by which the bodies reach
        ``max_bytes``. Waits; may be cancelled without loss.
        """
        ...

    async def ack(self, received: Sequence[Received]) -> None:
        """These are dealt with. Twice is fine. An `OSError` says that the subscription is lost: they come again."""
        ...

    async def extend(self, received: Sequence[Received]) -> None:
        """These are still being dealt with: their deadline begins anew. What is not held any more is left alone."""
        ...

    @property
    def deadline(self) -> float | None:
        """Seconds after which what is neither acknowledged nor extended goes to others; None if it stays here as long
        as we do.
        """
        ...

    def backlog(self) -> int | None:
        """How many messages the group has not acknowledged, if that is known without asking anybody."""
        ...

    async def close(self) -> None:
        """Stop. What was received and not acknowledged goes to others. Twice is fine."""
        ...


class Subscriber(Protocol):
    """A source that messages are received from."""

    async def subscribe(self, topics: Sequence[str], group: str) -> Subscription:
        """Join a group: each message goes to one member of each group. A group keeps its place between lives. A
        subscription that is cancelled while it is made leaves no member behind.
        """
        ...


@runtime_checkable
class TakesTemplates(Protocol):
    """A subscriber whose topics may be templates, as routes have them: ``orders-{tenant}`` stands for all topics that
    look like it. The first messages of a topic that is made later are received within five seconds.
    """

    def check_topics(self, topics: Sequence[str]) -> None:
        """Refuse topics that it cannot serve, when a consumer is declared: a `ConfigurationError` says what to do.
        Nothing is opened.
        """
        ...


@runtime_checkable
class Redelivers(Protocol):
    """A subscriber that knows how long its broker keeps what was not acknowledged."""

    async def redelivery(self, topics: Sequence[str]) -> float | None:
        """The longest of these topics, in seconds; infinite without a limit, None if it is not known."""
        ...


class History(Protocol):
    """The messages that a broker has kept, for one reader."""

    def pages(self) -> AsyncGenerator[Sequence[Message], None]:
        """Those that earlier calls did not bring, up to the positions that their topics have when it is called. In
        order per key.
        """
        ...

    async def aclose(self) -> None:
        """Stop reading. Twice is fine."""
        ...


@runtime_checkable
class Rereads(Protocol):
    """A subscriber whose broker lets messages be read without a group, however often."""

    async def reread(self, topics: Sequence[str]) -> History:
        """Read these topics from their first message on. Nothing of that is left at the broker, even if the process
        dies. A `ConnectionError` says why the broker does not let us in.
        """
        ...


@runtime_checkable
class Unsubscribes(Protocol):
    """A subscriber that can remove a group from its broker, which keeps messages for it as long as it is there."""

    async def unsubscribe(self, topics: Sequence[str], group: str) -> None:
        """Remove the group from these topics. One that is not there is fine. An `OSError` says why it is left: the
        broker is unavailable, or the group has a member.
        """
        ...


@runtime_checkable
class Respells(Protocol):
    """A subscriber whose broker knows a topic by several names."""

    def spellings(self, topic: str) -> Sequence[str]:
        """All names of this topic, or all templates that say the same as this one."""
        ...


def spellings_of(topics: Sequence[str], subscriber: object) -> Sequence[str]:
    """All names of these topics, as far as the subscriber knows others."""
    if not isinstance(subscriber, Respells):
        return topics
    return [name for topic in topics for name in subscriber.spellings(topic)]


def contradiction(messages: Sequence[Message], outcome: Any, *, numbered: bool = False) -> str | None:
    """What is wrong with an answer, so that nothing of it may be believed.

    What a numbered destination has stored behind something that it did not is believed: else the next who asks how far
    it has come would take both for stored.
    """
    if (wrong := _mistyped(outcome)) is not None:
        return wrong
    accepted, rejected = {*outcome.accepted}, {rejection.index for rejection in outcome.rejected}
    if len(accepted) != len(outcome.accepted) or len(rejected) != len(outcome.rejected):
        return "its Outcome names a message twice"
    if not accepted | rejected <= {*range(len(messages))}:
        return "its Outcome names a message that was not in the request"
    if accepted & rejected:
        return "its Outcome accepts and rejects the same message"
    if not (accepted or rejected or outcome.unfinished):
        return "its Outcome says nothing about any message"
    return None if numbered or len(accepted) == len(messages) else _gap(messages, accepted)


def _mistyped(outcome: object) -> str | None:
    if not isinstance(outcome, Outcome):
        return f"send returned {type(outcome).__name__}, not an Outcome"
    for name, values, kind in (
        ("accepted", outcome.accepted, int),
        ("duplicates", outcome.duplicates, int),
        ("rejected", outcome.rejected, Rejection),
        ("rejected", [rejection.index for rejection in outcome.rejected if isinstance(rejection, Rejection)], int),
        ("rejected", [rejection.reason for rejection in outcome.rejected if isinstance(rejection, Rejection)], str),
        (
            "rejected",
            [it.retry_after for it in outcome.rejected if getattr(it, "retry_after", None) is not None],
            float,
        ),
        ("unfinished", () if outcome.unfinished is None else (outcome.unfinished,), Verdict),
        ("reason", (outcome.reason,), str),
    ):
        if not {*map(type, values)} <= {kind} and (odd := [each for each in values if not isinstance(each, kind)]):
            return f"its Outcome.{name} holds {type(odd[0]).__name__}, not {kind.__name__}"
    return None


def _gap(messages: Sequence[Message], accepted: Collection[int]) -> str | None:
    missing: set[tuple[str | None, str]] = set()
    for index, message in enumerate(messages):
        key = message.headers.get("tenant_id"), message.key
        if index not in accepted:
            missing.add(key)
        elif key in missing:
            return f"its Outcome accepts message {index}, and not one of the same key before it"
    return None
