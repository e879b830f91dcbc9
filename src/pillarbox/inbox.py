"""The inbox port: which messages a consumer has dealt with, and the letters about those that it could not.

Before this: a subscription has received a message. After it: its effect is in the database, once. The row of the inbox
is the first thing that a transaction writes, and the effect the second, so one is there if and only if the other is.
Whoever brings the same message at the same time waits for that transaction, and goes by its outcome.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol
from uuid import UUID

import msgspec

from .outbox import stable_hash
from .transport import Message


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A message as the inbox knows it."""

    event_id: UUID
    schema_version: int
    digest: bytes
    """What `digest_of` says of its body."""


class Admission(StrEnum):
    """What the inbox says of an arrival."""

    NEW = "new"
    """Never seen: its row is written now, and stands if this transaction commits."""
    DUPLICATE = "duplicate"
    """Dealt with before."""
    OTHER_VERSION = "other version"
    """Its event was dealt with before, in another version of its schema."""
    ALTERED = "altered"
    """Its id and schema version were seen before, with another body."""


class LetterKind(StrEnum):
    """Why a message has become a letter."""

    REJECTED = "rejected"
    """A handler has said `Reject`: what the event asks for cannot be done."""
    POISON = "poison"
    """No handler can bear it."""
    UNKNOWN = "unknown"
    """It cannot be read: no type is registered for its name or version, or its content does not fit."""
    ALTERED = "altered"
    """See `Admission.ALTERED`: never given to a handler."""
    HELD = "held"
    """It came before its predecessors, and waits for them. The projection itself ends that."""


UNDECIDING = (LetterKind.ALTERED, LetterKind.HELD)
"""What becomes of such a letter decides nothing about the event of its name, which has come, or comes, by itself."""


class LetterState(StrEnum):
    """What has become of a letter."""

    OPEN = "open"
    REDRIVEN = "redriven"
    """Its effect is there."""
    DISCARDED = "discarded"
    SUPERSEDED = "superseded"
    """Its event has come again, perhaps in another version, and was dealt with then."""


class Redriven(StrEnum):
    """What has become of a letter that was to be redriven. True if it has had its effect by that."""

    DONE = "done"
    SUPERSEDED = "superseded"
    """See `LetterState.SUPERSEDED`: it is closed without a second effect."""
    GONE = "gone"
    """It is not open any more: somebody else was quicker."""

    def __bool__(self) -> bool:
        return self is Redriven.DONE


class Letter(msgspec.Struct, frozen=True):
    """A message that a consumer could not turn into an effect, whole, with the reason."""

    consumer: str
    kind: LetterKind
    reason: str
    message: Message
    event_id: UUID | None
    """None if it cannot be read."""
    event_type: str
    schema_version: int
    tenant: str | None = None
    id: int = 0
    """Given by the store."""
    state: LetterState = LetterState.OPEN
    attempts: int = 1
    """How often it was tried as a letter and before; each redrive adds one."""
    edited: bytes | None = None
    """The body that a person has put in the place of the original one."""
    created_at: datetime | None = None
    updated_at: datetime | None = None

    @property
    def body(self) -> bytes:
        """What a redrive would use."""
        return self.message.body if self.edited is None else self.edited

    @property
    def is_decision(self) -> bool:
        """Whether it is closed, and a person has decided something else about its event than to do what that says."""
        about_event = self.event_id is not None and self.kind not in UNDECIDING
        changed = self.state is LetterState.DISCARDED or self.edited is not None
        return about_event and changed and self.state is not LetterState.OPEN


class LetterFilter(msgspec.Struct, frozen=True):
    """Which letters; what is None does not matter."""

    consumer: str | None = None
    tenant: str | None = None
    kinds: tuple[LetterKind, ...] = ()
    """All of them, if none is named."""
    states: tuple[LetterState, ...] = (LetterState.OPEN,)
    event_type: str | None = None
    event_id: UUID | None = None
    topic: str | None = None
    key: str | None = None
    ids: tuple[int, ...] | None = None


class Inbox(Protocol):
    """What each consumer has dealt with. The key of a row is (consumer, tenant, event id).

    Every method works in the transaction of ``connection``, which the caller commits.
    """

    def admit(
        self, connection: Any, consumer: int, tenant: str | None, arrivals: Sequence[Arrival]
    ) -> Sequence[Admission]:
        """Write the rows of all that are new, and say of each what it is, in their order. Waits for transactions that
        are just writing the same rows. The second of two arrivals with one id is never new.
        """
        ...

    def forget(self, connection: Any, consumer: int, tenant: str | None, arrival: Arrival) -> bool:
        """Let the event be new again, if it is this arrival that was admitted, and no other with its id; whether it
        was.
        """
        ...

    def prune(self, connection: Any, consumer: int, older_than: timedelta, limit: int) -> int:
        """Delete up to ``limit`` rows that were written longer ago than that; how many they were."""
        ...


class Letters(Protocol):
    """The letters of all consumers. Every method works in the transaction of ``connection``."""

    def write(self, connection: Any, letters: Sequence[Letter]) -> Sequence[int]:
        """Store new letters; their ids come back."""
        ...

    def find(self, connection: Any, wanted: LetterFilter, *, after: int = 0, limit: int = 100) -> Sequence[Letter]:
        """Letters in the order of their ids, from behind ``after``."""
        ...

    def count(self, connection: Any, wanted: LetterFilter) -> Mapping[tuple[str, LetterKind], int]:
        """How many there are, by consumer and kind."""
        ...

    def take(self, connection: Any, letter_id: int) -> Letter | None:
        """Lock an open letter until the end of the transaction. None if it is not open any more, which is decided
        after having waited for whoever had locked it.
        """
        ...

    def close(self, connection: Any, letter_id: int, state: LetterState) -> bool:
        """It is open no longer; false if it was not any more, and then nothing is changed."""
        ...

    def failed(self, connection: Any, letter_id: int, kind: LetterKind, reason: str) -> bool:
        """Tried once more, without success; false if it is not open."""
        ...

    def edit(self, connection: Any, letter_id: int, body: bytes) -> bool:
        """Let a redrive use another body; the original is kept. False if it is not open."""
        ...

    def prune(
        self, connection: Any, consumer: str, older_than: timedelta, limit: int, *, keep_decisions: bool = False
    ) -> int:
        """Delete up to ``limit`` letters that were closed longer ago than that; how many they were. Those that are a
        `Letter.is_decision` may be kept.
        """
        ...


def consumer_id(name: str, generation: int = 1) -> int:
    """The number of a consumer in the inbox. A rebuilt projection is another generation, which starts afresh."""
    return stable_hash(name if generation == 1 else f"{name}@{generation}")


def digest_of(body: bytes) -> bytes:
    """Two bodies with the same digest are the same."""
    return hashlib.blake2b(body, digest_size=16).digest()
