"""The transport ports: how messages leave and arrive, and what a destination can carry.

A route names a transport. The limits of the transport are checked when a delivery is written, so no relay ever finds a
message that is too large. A message has one of three answers, which a transport must not confuse: *rejected* is the
message's own fault, *unavailable* is the destination's, and *unknown* is neither success nor failure.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import msgspec


class Message(msgspec.Struct, frozen=True, gc=False):
    """A delivery in flight: final bytes, and everything that a broker is told about them."""

    topic: str
    key: str
    body: bytes
    headers: Mapping[str, str]
    number: int = 0
    """Its number in the order of its lane, for transports that deduplicate. Rises, with gaps."""
    place: str = ""
    """The partition for it, on topics whose partitions are numbered separately."""
    attempts: int = 0
    """How often its destination has rejected it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Guarantees and limits of a transport."""

    max_body_bytes: int = 1_048_576
    """Size of the largest accepted body."""

    max_header_bytes: int = 65_536
    """Largest size of all headers together, names and values."""

    max_messages: int = 1_000
    """Most messages in one request."""

    timeout: float | None = 10.0
    """Seconds until a request without an answer is given up; None: when the lease ends."""

    numbered: bool = False
    """It deduplicates by producer name and number: a topic has one copy of each message."""

    grouped: bool = False
    """Messages of one topic and key are best sent together, so the lane groups them."""

    opens: bool = False
    """Topics are opened before each batch, so that a closed one holds up no other. Implied by ``numbered``."""

    forgets_after: float | None = None
    """Seconds until it forgets the numbers of an absent producer; None: never."""


class Verdict(Enum):
    """Why a request was not finished."""

    UNAVAILABLE = "unavailable"
    """The destination cannot accept messages now. The messages are not at fault."""
    UNKNOWN = "unknown"
    """No answer arrived. An unacknowledged message may or may not be stored."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A message that the destination refuses, however often it is sent, or refuses now."""

    index: int
    reason: str
    retry_after: float | None = None
    """Seconds until it may be sent again; its key waits. It is not at fault: no attempt is counted, and the rejection
    is no evidence against the destination.
    """
    final: bool = False
    """No attempt will ever succeed: the delivery fails at once. No evidence against the destination."""
    alone: bool = False
    """An attempt is counted, however many others are rejected: no evidence against the destination."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a request. Per key a prefix is accepted, at most one message is rejected, and the rest is not tried."""

    accepted: Collection[int]
    """Indexes of messages that the destination has confirmed as stored."""
    rejected: Sequence[Rejection] = ()
    duplicates: Collection[int] = ()
    """Accepted messages that the destination had already stored under their numbers."""
    unfinished: Verdict | None = None
    """Why the other messages were not tried or not answered; None if only rejections stopped them."""
    reason: str = ""
    """Text of the destination or the network."""


class Publisher(Protocol):
    """A destination for messages. Routes refer to it by its name in the box.

    A producer sends for one lane, under a name that no other lane uses. A transport may share connections among
    producers.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Guarantees and limits. Constant, and known without a connection."""
        ...

    def preflight(self, message: Message) -> str | None:
        """Why the destination would certainly reject this message, as far as that is known without a request; None if
        it may be sent.
        """
        ...

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:
        """Open the topics that are not open or were lost. Numbered transports return the highest number that each topic
        has received under this producer's name (-1: none), which may not be stored yet. Other transports return an
        empty mapping and may open topics when they send; a relay calls this method if they set ``opens``.

        A relay calls it before each batch, so open topics must cost nothing. A topic that has left a request unanswered
        is no longer open. `OSError` and `TimeoutError` mean unavailable. `TopicsRefusedError` means that only the named
        topics are unavailable.
        """
        ...

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:
        """Send messages, in order per key, and wait for the answers. Never called concurrently for a producer.

        If a message of a key is not accepted, no later one of that key may be. On a numbered transport, if a message of
        a topic is not stored, no later one of that topic may be: a successor knows only the highest number and assumes
        that everything below it is stored. A cancelled request counts as unknown.

        `OSError` means unavailable, `TimeoutError` unknown. Any other error, or an answer that contradicts itself, is a
        bug: the messages are sent again one by one, and the one that triggers the bug is rejected. So is a message that
        never gets an answer while others do.
        """
        ...

    async def close(self, producer: str | None = None) -> None:
        """Close one producer, or all of them. May be called twice."""
        ...


Transport = Publisher


class TopicsRefusedError(OSError):
    """Some topics cannot be opened now, through no fault of their messages, while others can."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


@runtime_checkable
class Partitioned(Protocol):
    """A publisher whose topics have partitions that are numbered separately: `Publisher.open` then returns the highest
    number of each partition, by place.
    """

    def partitions(self, topic: str) -> int:
        """Number of partitions of an open topic; 0 if it is not partitioned. The lane announces it with the batch, so
        that a successor sends each message to the same place even if partitions were added.
        """
        ...

    def place(self, topic: str, key: str, partitions: int) -> str:
        """The place of a key, for this number of partitions."""
        ...


class Received(msgspec.Struct, frozen=True, gc=False):
    """A received message, and the subscription's handle for it."""

    message: Message
    attempt: int = 1
    """Number of deliveries to the group, as far as the broker counts them. Only a hint: Pulsar 4.0 does not count
    deliveries to a member that died, so 1 does not mean a first delivery.
    """
    handle: Any = None


class Subscription(Protocol):
    """A stream of messages. A message that is not acknowledged is redelivered after `close` or ``deadline``. There is
    no nack: on most brokers, the next message of the key would overtake the refused one.
    """

    async def receive(self, limit: int, max_bytes: float = math.inf) -> Sequence[Received]:
        """Wait for at least one message, and return at most ``limit``, in order per key. Stops at the message by which
        the bodies reach ``max_bytes``. Cancellation loses no message.
        """
        ...

    async def ack(self, received: Sequence[Received]) -> None:
        """Acknowledge processed messages. May be called twice. `OSError` means that the subscription is lost and the
        messages are redelivered.
        """
        ...

    async def extend(self, received: Sequence[Received]) -> None:
        """Restart the deadline of messages in progress. Messages that are not held any more are ignored."""
        ...

    @property
    def deadline(self) -> float | None:
        """Seconds after which a message that is neither acknowledged nor extended goes to another member; None: never,
        while the subscription is open.
        """
        ...

    def backlog(self) -> int | None:
        """Number of messages that the group has not acknowledged, if known without a request."""
        ...

    async def close(self) -> None:
        """Stop. Unacknowledged messages go to other members. May be called twice."""
        ...


class Subscriber(Protocol):
    """A source of messages."""

    async def subscribe(self, topics: Sequence[str], group: str) -> Subscription:
        """Join a group: each message goes to one member of each group. The broker keeps a group's position between
        subscriptions. A cancelled call leaves no member behind.
        """
        ...


@runtime_checkable
class TakesTemplates(Protocol):
    """A subscriber that accepts topic templates, as routes do: ``orders-{tenant}`` stands for all topics that match.
    The first messages of a topic that is created later arrive within five seconds.
    """

    def check_topics(self, topics: Sequence[str]) -> None:
        """Raise a `ConfigurationError`, with advice, for topics that it cannot serve. Called when a consumer is
        declared; opens nothing.
        """
        ...


@runtime_checkable
class Redelivers(Protocol):
    """A subscriber that knows how long its broker keeps unacknowledged messages."""

    async def redelivery(self, topics: Sequence[str]) -> float | None:
        """The longest retention of these topics in seconds; infinite without a limit, None if unknown."""
        ...


class History(Protocol):
    """The messages that a broker has kept, for one reader."""

    def pages(self) -> AsyncGenerator[Sequence[Message], None]:
        """Messages that earlier calls did not return, up to the end of the topics at the call. In order per key."""
        ...

    async def aclose(self) -> None:
        """Stop reading. May be called twice."""
        ...


@runtime_checkable
class Rereads(Protocol):
    """A subscriber whose broker lets messages be read without a group, repeatedly."""

    async def reread(self, topics: Sequence[str]) -> History:
        """Read these topics from their first message on. Leaves nothing at the broker, even if the process dies. Raises
        `ConnectionError` with the reason if the broker refuses access.
        """
        ...


@runtime_checkable
class Unsubscribes(Protocol):
    """A subscriber that can remove a group from its broker, which otherwise keeps messages for the group."""

    async def unsubscribe(self, topics: Sequence[str], group: str) -> None:
        """Remove the group from these topics. A missing group is fine. Raises `OSError` if the group remains: the
        broker is unavailable, or the group has a member.
        """
        ...


@runtime_checkable
class Respells(Protocol):
    """A subscriber whose broker accepts several names for a topic."""

    def spellings(self, topic: str) -> Sequence[str]:
        """All names of this topic, or all templates that are equivalent to this one."""
        ...


def spellings_of(topics: Sequence[str], subscriber: object) -> Sequence[str]:
    """All names of these topics, if the subscriber knows others, or else the topics themselves."""
    if not isinstance(subscriber, Respells):
        return topics
    return [name for topic in topics for name in subscriber.spellings(topic)]


def contradiction(messages: Sequence[Message], outcome: Any, *, numbered: bool = False) -> str | None:
    """Why an answer is invalid and none of it may be believed; None if it is valid.

    From a numbered destination, an accepted message behind one that was not accepted is valid: the next query of its
    last number would count both as stored.
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
