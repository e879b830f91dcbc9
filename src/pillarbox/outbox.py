"""The outbox port: deliveries, lanes and batches, and what a store promises about them.

Before this: routes and codecs have made final bytes. After it: a relay that owns a lane sends them. A delivery is one
event for one route. A lane is (route, shard): the unit of ownership, order and failure. A batch is announced, with
everything that its order and numbers depend on, before its first message leaves; it is amended when the destination
rejects something, and settled when all of it is stored there. A successor rebuilds an announced batch exactly, or
halts.

Every write of progress is fenced: it names the lane's epoch, token and batch number, and changes nothing if one of them
is not the stored one. `LeaseLostError` then says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import msgspec

from .retry import RetryPolicy

SHARDS = 16
BUS = "local"
"""The destination of handlers that run in this process."""


class Status(StrEnum):
    """The life of a delivery, as people see it."""

    PENDING = "PENDING"
    SENDING = "SENDING"
    SENT = "SENT"
    RETRYING = "RETRYING"
    PARKED = "PARKED"
    FAILED = "FAILED"
    DISCARDED = "DISCARDED"


class FailurePolicy(StrEnum):
    """What happens to a key whose delivery has failed for good."""

    PARK = "park"
    """Later deliveries of the key wait for a person."""
    SKIP = "skip"
    """The key goes on without it."""


def stable_hash(text: str) -> int:
    """63 bits of a text, the same in every process and release."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class RouteRecord(msgspec.Struct, frozen=True):
    """A route as the database knows it: everything that a relay needs, so that it needs no configuration of its own."""

    name: str
    destination: str
    topic: str
    schema_version: int | None = None
    on_failure: FailurePolicy = FailurePolicy.PARK
    retry: RetryPolicy = msgspec.field(default_factory=RetryPolicy)

    @property
    def id(self) -> int:
        """A number made from the name, so that a writer knows it without asking the database."""
        return stable_hash(self.name)


class Delivery(msgspec.Struct, frozen=True):
    """One event, encoded, for one route: a row of the outbox before it is written."""

    event_id: UUID
    event_type: str
    route: int
    shard: int
    schema_version: int
    topic: str
    key: str
    tenant: str | None
    headers: Mapping[str, str]
    body: bytes


class Key(NamedTuple):
    """The unit of order: a key within its tenant."""

    tenant: str | None
    key: str


class Row(msgspec.Struct, frozen=True):
    """A stored delivery, as a relay reads it."""

    id: int
    event_id: UUID
    topic: str
    key: str
    tenant: str | None
    headers: Mapping[str, str]
    body: bytes
    attempts: int

    @property
    def order_key(self) -> Key:
        """What this row is ordered by."""
        return Key(self.tenant, self.key)


class Announcement(msgspec.Struct, frozen=True):
    """All that the order and the numbers of a batch depend on. Stored before its first message leaves."""

    first_number: int
    count: int
    digest: str
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """What the store and the transport need beside it: cursors, paused tenants, grouping, partitions."""


class Lane(msgspec.Struct, frozen=True):
    """A lane in the hands of a relay, with the fence that all its writes must pass."""

    route: RouteRecord
    shard: int
    epoch: int
    token: UUID
    batch: int
    """The number of the newest batch that was announced."""
    next_number: int
    """The number that the next announced item gets."""
    announced: Announcement | None
    """The batch that was announced and is not settled."""
    tries: int
    """How many owners took this lane over while that batch was open. A clean release does not count."""
    waiting: frozenset[Key]
    """Keys that have a failed or parked delivery: their new rows go behind it."""


class Page(msgspec.Struct, frozen=True):
    """What a lane has to do next."""

    redo: tuple[Row, ...]
    """Failed rows that are due, per key a prefix in id order."""
    fresh: tuple[Row, ...]
    """Rows that were never tried, in id order."""
    cursor: Any = None
    """Where the next page starts. Only the store that gave it understands it."""


class Failure(msgspec.Struct, frozen=True):
    """A delivery that was rejected, or that must be tried again through no fault of its own."""

    row: int
    attempts: int
    """Including this one, if it counts."""
    error: str | None
    """Already redacted; None for a row that shared a request with a rejected one."""
    retry_after: float | None
    """Seconds until it is due; None: it is dead and needs a person."""


class Batch(msgspec.Struct, frozen=True):
    """What one turn of a lane decided, before anything is sent."""

    items: Sequence[int] = ()
    """Row ids in send order; the i-th gets the number ``lane.next_number + i``."""
    failures: Sequence[Failure] = ()
    """Rows that preflight refused."""
    parked: Sequence[int] = ()
    """Rows that go behind a failed one of their key."""
    cursor: Any = None
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)


class OutboxStore(Protocol):
    """Where deliveries live and how progress is kept. Times are the database's own."""

    async def take(self, relay: str, *, lease: float, limit: int, destinations: Collection[str]) -> list[Lane]:
        """Claim up to ``limit`` lanes that nobody holds, whose route goes to one of the destinations.

        A lane is free when it was never held, was released, or its lease has expired by the database's clock; no other
        process is needed to free it. Each lane comes with a higher epoch, a new token and its unsettled batch, if it
        has one; then ``tries`` has risen. Two relays never get the same lane in the same epoch. Paused lanes are not
        given out.
        """
        ...

    async def poll(self, lane: Lane, *, limit: int, cursor: Any = None, paused: Collection[str] = ()) -> Page:
        """Read what comes next: at most ``limit`` fresh rows and as many to redo. Changes nothing; asking twice gives
        the same.

        Rows of an announced batch, and of paused tenants, are not in it. A row that commits late with a low id is still
        found. Within a key rows come in the order of their ids.
        """
        ...

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        """Make the batch durable, in one fenced write; the lane with its new batch number comes back.

        With ``settle`` the same write settles the batch before. A batch without items only records its failures, its
        parked rows and its cursor. Either all of it is stored or nothing. Announcing over an unsettled batch is a
        `StoreError`.
        """
        ...

    async def amend(self, lane: Lane, failures: Sequence[Failure], *, parked: Sequence[int] = ()) -> Lane:
        """Take rows out of the announced batch, fenced, before anything with a higher number leaves.

        Their numbers stay unused. What remains can be rebuilt and settled.
        """
        ...

    async def settle(self, lane: Lane) -> Lane:
        """Everything that is left of the announced batch is stored at the destination: mark it sent, fenced."""
        ...

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        """The announced batch with its numbers, in send order, without what was amended.

        `BatchMismatchError` if its count or digest is not what was announced.
        """
        ...


class Appends(Protocol):
    """The write side of a store: called by the session's flush, inside the business transaction."""

    def register(self, connection: Any, records: Iterable[RouteRecord]) -> int:
        """Make route and lane rows that are missing, and bring changed ones up to date; the number of shards comes
        back.

        Safe to call from many processes at once. Nothing is registered if the transaction rolls back.
        """
        ...

    def append(self, connection: Any, deliveries: Sequence[Delivery]) -> None:
        """Write the rows, in this order, by one statement. `DuplicateEventError` if one of them is there already."""
        ...


def digest(items: Iterable[tuple[int, int]]) -> str:
    """The fingerprint of a batch: its numbers and row ids in send order."""
    summary = hashlib.blake2b(digest_size=16)
    for number, row in items:
        summary.update(b"%d:%d;" % (number, row))
    return summary.hexdigest()
