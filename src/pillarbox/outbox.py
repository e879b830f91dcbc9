"""The outbox port: deliveries, lanes and batches, and the contract of a store.

Before this: routes and codecs have made final bytes. After it: a relay that owns a lane sends them. A delivery is one
event for one route. A lane is (route, shard): the unit of ownership, order and failure. A batch is announced before its
first message leaves, with everything that its order and numbers depend on. It is amended when the destination rejects a
message, and settled when the destination has stored all of it. A successor rebuilds an announced batch exactly, or
halts.

Every write of progress is fenced: it names the lane's epoch, token and batch number. If one of them differs from the
stored one, it changes nothing and raises `LeaseLostError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import msgspec

from .cursor import RowAt
from .errors import BatchMismatchError, RouteError, StoreError
from .retry import RetryPolicy

SHARDS = 16
LOCAL = "local"
"""The destination of handlers and of the outbox's own consumers."""
INBOX_DESTINATION = "inbound"
"""The destination of received messages that wait for their consumer."""
OUTBOUND = "pillarbox_outbox"
"""Table of deliveries to transports and handlers."""
INBOUND = "pillarbox_inbound"
"""Table of deliveries that wait for a consumer. Its shape and its lanes are the same."""
TABLES = (OUTBOUND, INBOUND)


class Direction(StrEnum):
    """Direction of a delivery."""

    OUTBOUND = "outbound"
    """To a transport or a handler of this service."""
    INBOUND = "inbound"
    """To a consumer, after it could not process the received message at once."""

    @property
    def table(self) -> str:
        """The table of these deliveries."""
        return INBOUND if self is Direction.INBOUND else OUTBOUND


class Status(StrEnum):
    """States of a delivery, as operators see them."""

    PENDING = "PENDING"
    SENDING = "SENDING"
    SENT = "SENT"
    RETRYING = "RETRYING"
    PARKED = "PARKED"
    FAILED = "FAILED"
    DISCARDED = "DISCARDED"


class FailurePolicy(StrEnum):
    """What happens to a key after a delivery of it has failed."""

    PARK = "park"
    """Later deliveries of the key wait for an operator."""
    SKIP = "skip"
    """The key continues without the failed delivery."""


def stable_hash(text: str) -> int:
    """A 63-bit hash of a text, the same in every process and release."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def shard_of(unit: str, shards: int) -> int:
    """The shard of a key or of a tenant."""
    return stable_hash(unit) % shards


_route_id = lru_cache(maxsize=4096)(stable_hash)


class RouteRecord(msgspec.Struct, frozen=True):
    """A route as stored in the database: a relay needs no other configuration to serve it."""

    name: str
    destination: str
    topic: str
    schema_version: int | None = None
    on_failure: FailurePolicy = FailurePolicy.PARK
    retry: RetryPolicy = msgspec.field(default_factory=RetryPolicy)
    shard_by: str = "key"
    """What the shard is computed from: ``key`` or ``tenant``."""

    @property
    def id(self) -> int:
        """A number derived from the name, so that writers need no query for it."""
        return _route_id(self.name)

    @property
    def needs(self) -> str:
        """What a relay must have to serve the route: the name of a transport, handler or consumer."""
        named = self.destination in (LOCAL, INBOX_DESTINATION)
        return f"{self.destination}:{self.topic}" if named else self.destination

    @property
    def direction(self) -> Direction:
        """Direction of its deliveries."""
        return Direction.INBOUND if self.destination == INBOX_DESTINATION else Direction.OUTBOUND

    @property
    def table(self) -> str:
        """Table of its deliveries."""
        return self.direction.table

    def check_lanes(self, shard_by: str) -> None:
        """Raise `RouteError` if stored rows were sharded by something else: new rows could overtake them."""
        if self.shard_by != shard_by:
            raise RouteError(
                f"the route {self.name!r} says shard_by={self.shard_by!r}, but its lanes are chosen by {shard_by!r}, "
                "and later rows would overtake those that wait: say that again, or, when none waits, give it a new name"
            )


class Delivery(msgspec.Struct, frozen=True):
    """One event, encoded, for one route: a row of the outbox that is not written yet."""

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


class Key(msgspec.Struct, frozen=True, gc=False):
    """The unit of order: a key and its tenant."""

    tenant: str | None
    key: str


class LaneName(NamedTuple):
    """A route and one of its shards."""

    route: int
    shard: int


NewRows = dict[tuple[LaneName, str | None], int]
"""Number of rows that a transaction has written, by lane and tenant."""


def count_rows(deliveries: Iterable[Delivery], rows: NewRows) -> NewRows:
    """Add these deliveries to the counts."""
    for row in deliveries:
        place = LaneName(row.route, row.shard), row.tenant
        rows[place] = rows.get(place, 0) + 1
    return rows


Shards = Mapping[int, Collection[int]]
"""Some shards of some routes, by the route's id."""


class Row(msgspec.Struct, frozen=True, gc=False):
    """A stored delivery, as a relay reads it. It references no containers, so it is exempt from garbage collection: a
    relay creates tens of thousands of rows per second.
    """

    id: int
    event: str
    """The id of its event, in a form that `UUID` accepts: a UUID object per row would cost more than the row."""
    topic: str
    key: str
    tenant: str | None
    headers: Mapping[str, str]
    body: bytes
    attempts: int

    @property
    def event_id(self) -> UUID:
        """The id of its event."""
        return UUID(self.event)

    @property
    def order_key(self) -> Key:
        """The unit of order that the row belongs to."""
        return Key(self.tenant, self.key)


class Ahead(NamedTuple):
    """A row that a cursor has not reached, and its tenant."""

    at: RowAt
    tenant: str | None


class Announcement(msgspec.Struct, frozen=True):
    """Everything that the order and the numbers of a batch depend on. Stored before its first message leaves."""

    first_number: int
    count: int
    digest: str
    items: tuple[int, ...] = ()
    """Row ids in send order, with 0 for a removed row, whose number stays unused. Empty in a store that finds its
    batches in another way.
    """
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Details of the store and the transport: cursors, paused tenants, grouping, partitions."""


class Lane(msgspec.Struct, frozen=True):
    """A leased lane, with the fence of its owner's writes."""

    route: RouteRecord
    shard: int
    epoch: int
    token: UUID
    batch: int
    """Number of the newest announced batch."""
    next_number: int
    """Number of the next announced item."""
    announced: Announcement | None
    """The batch that is announced and not settled."""
    tries: int
    """Number of owners that took the lane over while that batch was open. A clean release does not count."""
    waiting: frozenset[Key]
    """Keys that have a failed or parked delivery: new rows of them are parked."""
    cursor: Any = None
    """The lane's position, where it is not kept in the rows. Opaque to everything but the store."""
    detours: Mapping[str, Any] | None = None
    """Tenants on a detour, with their cursors. None if the store has no detours."""

    @property
    def name(self) -> LaneName:
        """Route and shard of the lane."""
        return LaneName(self.route.id, self.shard)

    def check_announced(self, *, wanted: bool = True) -> None:
        """Raise `StoreError` unless a batch is announced, or, with ``wanted=False``, if one is."""
        if (self.announced is not None) != wanted:
            raise StoreError(
                "there is no announced batch to settle" if wanted else "a batch is announced over an unsettled one"
            )

    def check_batch(self, found: Sequence[tuple[int, Row]]) -> None:
        """Raise `BatchMismatchError` if these numbers and rows differ from the announced batch."""
        announced, items = self.announced, [(number, row.id) for number, row in found]
        if announced is not None and (len(items) != announced.count or digest(items) != announced.digest):
            raise BatchMismatchError(
                f"batch {self.batch} of lane {self} had {announced.count} rows "
                f"when it was announced and has {len(items)} now, or others: somebody changed them by hand"
            )

    def __str__(self) -> str:
        return f"{self.route.name}/{self.shard}"


class Page(msgspec.Struct, frozen=True):
    """The next work of a lane."""

    redo: tuple[Row, ...]
    """Failed rows that are due; per key a prefix in the order of ids."""
    fresh: tuple[Row, ...]
    """Rows that were never tried, in the order of ids."""
    held: frozenset[str] = frozenset()
    """Paused tenants whose rows come next and need a detour. Until they have one, the page has no fresh rows."""
    passed: bool = False
    """Whether the lane moves on, even if only past rows of detours. There may be more behind them."""
    scan_exhausted: bool = False
    """Whether the poll found nothing but rows of detours, and did not reach their end."""
    requests: tuple[int, ...] = ()
    """Operators' requests that can be carried out now. The next announcement does so."""
    cursor: Any = None
    """Position of this page, if the store keeps no status in its rows. The batch must then cover the rows of the page
    in their order, and may leave out only the last ones.
    """


class Failure(msgspec.Struct, frozen=True):
    """A delivery that was rejected, or that must be sent again without being at fault."""

    row: int
    attempts: int
    """Attempts, including this one if it counts."""
    error: str | None
    """Redacted reason. None for a row that shared a request with a rejected one, or that gets attempts back; such a
    failure is ignored if the row has changed meanwhile.
    """
    retry_after: float | None
    """Seconds until it is due. None: it is out of attempts and waits for an operator."""


class Batch(msgspec.Struct, frozen=True):
    """The decisions of a turn, before anything is sent."""

    items: Sequence[int] = ()
    """Row ids in send order; the i-th gets the number ``lane.next_number + i``."""
    failures: Sequence[Failure] = ()
    """Rows that fail without being sent, and rows that are put off or made due."""
    parked: Sequence[int] = ()
    """Rows that wait behind a failed one of their key."""
    requests: Sequence[int] = ()
    """Operators' requests that this announcement carries out."""
    cursor: Any = None
    """Cursor of the page."""
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)
    relaxed: bool = False
    """Whether the announcement, and the settlement in it, may be lost if the database crashes. The same rows are then
    sent again; at a destination without numbers, consumers must tolerate duplicates anyway.
    """


class Census(msgspec.Struct, frozen=True):
    """Routes, live relays and operators' settings, by the database's clock."""

    routes: Mapping[int, RouteRecord]
    """All routes that were ever registered."""
    relays: Mapping[str, frozenset[int]]
    """The live relays, and the routes that each of them serves."""
    shards: Mapping[str, frozenset[int]]
    """The relays that are limited to some shards."""
    shard_count: int = SHARDS
    """Number of lanes of each route."""
    paused: frozenset[LaneName] = frozenset()
    """Lanes that an operator has paused: their owners release them."""
    paused_tenants: frozenset[str] = frozenset()
    lane_rates: Mapping[LaneName, float] = msgspec.field(default_factory=dict)
    """Messages per second that a lane may send."""
    tenant_rates: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Messages per second that a tenant may send through one lane."""
    install: str = ""
    """Id of this installation: part of every producer name."""
    next_expiry: float | None = None
    """Seconds until the next lease expires unless it is renewed; None without leases."""


class Trouble(msgspec.Struct, frozen=True):
    """Why a lane does not send, as its owner reports it."""

    reason: str
    """Redacted."""
    seconds: float | None = None
    """Seconds until the owner tries again; None: it waits for an operator."""


class LaneStore(Protocol):
    """Leases of lanes. All times are the database's: no relay's clock decides about a lease."""

    async def census(self) -> Census:
        """Read the `Census`. Changes nothing."""
        ...

    async def take(
        self, relay: str, *, lease: float, wanted: Mapping[int, int], shards: Shards | None = None
    ) -> list[Lane]:
        """Lease free lanes: per route id up to the wanted number, and only these shards of a route, if any are named.

        A lane is free if it was never leased, was released, or its lease has expired; no other process is needed to
        free it. Each lane comes with a higher epoch, a new token and its unsettled batch, if it has one; ``tries`` has
        then risen. Two relays never get the same lane in the same epoch. Paused lanes are not leased.
        """
        ...

    async def renew(
        self,
        relay: str,
        lanes: Sequence[Lane],
        *,
        lease: float,
        serves: Collection[int],
        shards: Collection[int] | None = None,
        troubles: Mapping[LaneName, Trouble] | None = None,
    ) -> dict[LaneName, bool]:
        """Record that the relay is alive and which routes and shards it serves, and extend the leases of these lanes.
        Returns the lanes that it still owns, each with whether its lease was extended.

        A lease is not extended while another transaction locks the lane's row; other lanes do not wait for that lock.
        An expired lease is extended if no other relay has taken the lane. The troubles of the lanes are stored for
        operators.
        """
        ...

    async def release(self, relay: str, lanes: Sequence[Lane], *, leaving: bool = False) -> None:
        """Release lanes, fenced: a lane that already has another owner is left alone. Announced batches stay announced,
        and the release does not count as a lost owner, even if it comes late from a slow relay. ``leaving`` removes the
        relay from the census.
        """
        ...


class OutboxStore(Protocol):
    """Deliveries and their progress. All times are the database's."""

    async def ready(self, routes: Collection[int], *, relay: str | None = None) -> frozenset[LaneName]:
        """Lanes of these routes that have something to do now: fresh rows, rows that are due, a batch that is not
        settled, operators' requests. With ``relay``, only its lanes. Without paused lanes; rows of paused tenants may
        count or not.
        """
        ...

    async def poll(
        self,
        lane: Lane,
        *,
        limit: int,
        max_bytes: int = 4_194_304,
        paused: Collection[str] = (),
        detour: str | None = None,
    ) -> Page:
        """Read the next page: at most ``limit`` fresh rows and as many redone ones, each until their bodies reach
        ``max_bytes``. If the fresh rows reach neither limit, there are no more. Changes nothing and is repeatable.

        Leaves out rows of an announced batch, requests that name such rows, and rows of paused tenants. A row that
        commits late with a low id is still found. Rows of a key come in the order of their ids. Fresh rows of tenants
        on a detour are left out; with ``detour``, only rows of that tenant are returned, as far as the lane has skipped
        them.
        """
        ...

    async def part(self, lane: Lane, tenants: Collection[str]) -> Lane:
        """Give tenants a detour, fenced: from here on, the lane skips their rows. No batch may be announced."""
        ...

    async def join(self, lane: Lane, tenants: Collection[str]) -> Lane:
        """End the detours of these tenants that have caught up with the lane, fenced. No batch may be announced."""
        ...

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        """Make the batch durable in one fenced write. Returns the lane with its new batch number.

        With ``settle``, the same write settles the previous batch. A batch without items only records its failures,
        parked rows, requests and cursor. The write is atomic. Announcing over an unsettled batch is a `StoreError`.
        """
        ...

    async def amend(
        self,
        lane: Lane,
        failures: Sequence[Failure],
        *,
        parked: Sequence[int] = (),
        attempts: Mapping[int, int] | None = None,
    ) -> Lane:
        """Take rows out of the announced batch, fenced, before any higher number leaves.

        Their numbers stay unused. The rest can be rebuilt and settled. ``attempts`` are stored for rows that stay in
        the batch. Without changes, the call only checks whether the lane is still owned.
        """
        ...

    async def settle(self, lane: Lane) -> Lane:
        """Mark all rows that are left in the announced batch as sent, fenced. The destination has stored them."""
        ...

    async def asked(self, lane: Lane, rows: Collection[int]) -> frozenset[int]:
        """The given rows for which operators have requests. Such requests wait while their rows are in flight."""
        ...

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        """Read the announced batch with its numbers, in send order, without amended rows.

        Raises `BatchMismatchError` if its count or digest differs from the announced one.
        """
        ...


class Appends(Protocol):
    """The write side of a store: called by the session's flush, in the business transaction."""

    def register(self, connection: Any, records: Iterable[RouteRecord]) -> int:
        """Create missing route and lane rows, and update changed routes. Returns the number of shards.

        ``shard_by`` of a stored route cannot change: `RouteError`. Safe to call from many processes at once. Nothing is
        registered if the transaction rolls back.
        """
        ...

    def append(self, connection: Any, deliveries: Sequence[Delivery]) -> None:
        """Write the rows in this order. Raises `DuplicateEventError` if one of them exists already."""
        ...


def digest(items: Iterable[tuple[int, int]]) -> str:
    """Fingerprint of a batch: a hash of its numbers and row ids in send order."""
    text = "".join([f"{number}:{row};" for number, row in items])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
