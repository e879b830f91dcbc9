"""The inbox port: which messages a consumer has handled, and which of them it has put aside.

Before this: a subscription has received a message. After it: its effect is in the database, once. The row of the inbox
is the first thing that a transaction writes, and the effect the second, so one is there if and only if the other is.
Whoever brings the same message at the same time waits for that transaction, and goes by its outcome.

A message that cannot take effect now is *spilled*: its row of the inbox, a claim, and a delivery to an inbound lane are
one transaction. The effect's own transaction deletes the claim. As long as a line has a claim that gates it, its later
messages are spilled behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from uuid import RFC_4122, UUID

import msgspec

from .outbox import stable_hash
from .transport import Message


class KnownBy(StrEnum):
    """What the inbox knows a message by."""

    EVENT = "event"
    """The id of its event."""
    CONTENT = "content"
    """A hash of all that it says: it could not be read."""
    BODY = "body"
    """A hash of the id of its event and of its body: another body had come under that id before."""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A message as the inbox knows it."""

    event_id: UUID
    schema_version: int
    digest: bytes
    """What `digest_of` says of its body."""

    @classmethod
    def of_event(cls, event_id: UUID, schema_version: int, body: bytes) -> Arrival:
        """A message that was read. By the id of its event, unless that is of a variant that is not in use: MariaDB
        takes no such.
        """
        known = event_id if event_id.variant == RFC_4122 else _name(event_id.bytes)
        return cls(known, schema_version, digest_of(body))

    @classmethod
    def of_content(cls, message: Message) -> Arrival:
        """A message that cannot be read. Once it can, the inbox gets the id of its event, too."""
        headers = message.headers
        said = [f"{name}={headers[name]}".encode(errors="surrogatepass") for name in sorted(headers)]
        place = [part.encode(errors="surrogatepass") for part in (message.topic, message.key)]
        return cls(_name(*place, *said, message.body), 0, digest_of(message.body))

    def altered(self) -> Arrival:
        """A message whose id was seen with another body: each such body once."""
        return Arrival(_name(self.event_id.bytes, self.digest), self.schema_version, self.digest)

    @property
    def why_altered(self) -> str:
        """Why such a message fails."""
        return f"event {self.event_id} was seen before in version {self.schema_version}, with another body"


class Admission(StrEnum):
    """What the inbox says of an arrival."""

    NEW = "new"
    """Never seen: its row is written now, and stands if this transaction commits."""
    DUPLICATE = "duplicate"
    """Handled or spilled before, perhaps in another version of its schema."""
    ALTERED = "altered"
    """Its id and schema version were seen before, with another body."""


class Admitted(NamedTuple):
    """What the inbox says of some arrivals."""

    admissions: Sequence[Admission]
    gated: Collection[int] = ()
    """Those of their lines in which an earlier message waits."""


class Claim(msgspec.Struct, frozen=True, gc=False):
    """The right of a spilled message to take effect, once."""

    line: int
    """The hash of its line, or of its tenant if it has none."""
    inbox_id: UUID
    """By which the inbox knows the message."""


class Spill(NamedTuple):
    """A claim on its way into the database."""

    claim: Claim
    delivery: UUID
    """The event id of its row in the inbound lane."""
    gate: bool
    """Whether later messages of its line wait for it."""
    refused: str | None = None
    """Why it fails as soon as its lane comes to it; None: it is to be tried."""


class Inbox(Protocol):
    """What each consumer has handled. The key of a row is (consumer, tenant, event id).

    Every method works in the transaction of ``connection``, which the caller commits. Claims go by the number of the
    consumer itself, whatever the generation of its projection.
    """

    def admit(
        self,
        connection: Any,
        consumer: int,
        tenant: str | None,
        arrivals: Sequence[Arrival],
        *,
        claims: int = 0,
        lines: Callable[[], Collection[int]] = tuple,
    ) -> Admitted:
        """Write the rows of all that are new, and say of each what it is, in their order. Waits for transactions that
        are just writing the same rows. The second of two arrivals with one id is never new. Of these ``lines``, say
        which are gated for the consumer that ``claims`` names; they are only asked for if any line may be.
        """
        ...

    def spill(self, connection: Any, claims: int, tenant: str | None, spills: Sequence[Spill]) -> None:
        """Write claims, beside rows of the inbox that this transaction has written."""
        ...

    def redeem(self, connection: Any, claims: int, claim: Claim) -> tuple[bool, str | None]:
        """Delete a claim, so that its message takes effect in this transaction. Whether it was there, and why its
        message was refused. Does not wait: if another transaction has locked it, the database's error says so.
        """
        ...

    def count_claims(self, connection: Any, claims: int, limit: int) -> int:
        """How many messages are spilled; ``limit`` also if they are more."""
        ...

    def prune(self, connection: Any, consumer: int, older_than: timedelta, limit: int) -> int:
        """Delete up to ``limit`` rows that were written longer ago than that and have no claim; how many they were."""
        ...


@lru_cache(maxsize=1024)
def consumer_id(name: str, generation: int = 1) -> int:
    """The number of a consumer in the inbox. A rebuilt projection is another generation, which starts afresh."""
    return stable_hash(name if generation == 1 else f"{name}@{generation}")


def digest_of(body: bytes) -> bytes:
    """Two bodies with the same digest are the same."""
    return hashlib.blake2b(body, digest_size=16).digest()


def _name(*parts: bytes) -> UUID:
    content = hashlib.blake2b(digest_size=16)
    for part in parts:
        content.update(len(part).to_bytes(8, "big") + part)
    return UUID(bytes=content.digest(), version=5)


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that a consumer could not turn into an effect: a failed delivery of one of its lanes, or of the outbox
    to it.
    """

    consumer: str
    reason: str
    message: Message
    """As it was received, or as an operator has edited it."""
    event_type: str
    tenant: str | None
    attempts: int
    created_at: datetime
    """When it came into the lane."""
    row: int
    """Of the lane's table."""

    @property
    def event_id(self) -> str | None:
        """Which event it is, if a header names one."""
        return self.message.headers.get("event_id")
