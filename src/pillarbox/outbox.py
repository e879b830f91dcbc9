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
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import msgspec

from .cursor import RowAt
from .errors import BatchMismatchError, RouteError, StoreError
from .retry import RetryPolicy

SHARDS = 16
LOCAL = "local"
"""The destination of consumers of the outbox itself, and of handlers."""
INBOX_DESTINATION = "inbound"
"""The destination of messages that came in and wait for their consumer."""
OUTBOUND = "pillarbox_outbox"
"""The table of the deliveries that leave, to a transport or to a handler."""
INBOUND = "pillarbox_inbound"
"""The table of the deliveries that wait for a consumer. It has the same shape, and its lanes work in the same way."""
TABLES = (OUTBOUND, INBOUND)


class Direction(StrEnum):
    """Which way a delivery goes."""

    OUTBOUND = "outbound"
    """Out of the service, or to a handler of its own."""
    INBOUND = "inbound"
    """To a consumer, which could not take the message when it came."""

    @property
    def table(self) -> str:
        """Where its deliveries are."""
        return INBOUND if self is Direction.INBOUND else OUTBOUND


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


def shard_of(unit: str, shards: int) -> int:
    """Where the deliveries of a key, or of a tenant, are."""
    return stable_hash(unit) % shards


_route_id = lru_cache(maxsize=4096)(stable_hash)


class RouteRecord(msgspec.Struct, frozen=True):
    """A route as the database knows it: everything that a relay needs, so that it needs no configuration of its own."""

    name: str
    destination: str
    topic: str
    schema_version: int | None = None
    on_failure: FailurePolicy = FailurePolicy.PARK
    retry: RetryPolicy = msgspec.field(default_factory=RetryPolicy)
    shard_by: str = "key"
    """What is hashed to choose a lane: the key, or the tenant."""

    @property
    def id(self) -> int:
        """A number made from the name, so that a writer knows it without asking the database."""
        return _route_id(self.name)

    @property
    def needs(self) -> str:
        """What a relay must have in order to serve it: a transport, a handler, or a consumer."""
        named = self.destination in (LOCAL, INBOX_DESTINATION)
        return f"{self.destination}:{self.topic}" if named else self.destination

    @property
    def direction(self) -> Direction:
        """Which way its deliveries go."""
        return Direction.INBOUND if self.destination == INBOX_DESTINATION else Direction.OUTBOUND

    @property
    def table(self) -> str:
        """Where its deliveries are."""
        return self.direction.table

    def check_lanes(self, shard_by: str) -> None:
        """`RouteError` if the lanes of its rows were chosen by something else: new ones would overtake those."""
        if self.shard_by != shard_by:
            raise RouteError(
                f"the route {self.name!r} says shard_by={self.shard_by!r}, but its lanes are chosen by {shard_by!r}, "
                "and later rows would overtake those that wait: say that again, or, when none waits, give it a new name"
            )


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


class Key(msgspec.Struct, frozen=True, gc=False):
    """The unit of order: a key within its tenant."""

    tenant: str | None
    key: str


class LaneName(NamedTuple):
    """A route and one of its shards."""

    route: int
    shard: int


NewRows = dict[tuple[LaneName, str | None], int]
"""How many rows a transaction has written, by lane and tenant."""


def count_rows(deliveries: Iterable[Delivery], rows: NewRows) -> NewRows:
    """Count more of them."""
    for row in deliveries:
        place = LaneName(row.route, row.shard), row.tenant
        rows[place] = rows.get(place, 0) + 1
    return rows


Shards = Mapping[int, Collection[int]]
"""Some shards of some routes, by a route's id."""


class Row(msgspec.Struct, frozen=True, gc=False):
    """A stored delivery, as a relay reads it. It refers to nothing that could refer to it, so the collector need not
    look at it: a relay makes tens of thousands of them in a second.
    """

    id: int
    event: str
    """The id of its event, in a form that `UUID` takes: to make one for each row costs more than the rest of it."""
    topic: str
    key: str
    tenant: str | None
    headers: Mapping[str, str]
    body: bytes
    attempts: int

    @property
    def event_id(self) -> UUID:
        """Which event it is."""
        return UUID(self.event)

    @property
    def order_key(self) -> Key:
        """What this row is ordered by."""
        return Key(self.tenant, self.key)


class Ahead(NamedTuple):
    """A row that a cursor has not come to, and whose it is."""

    at: RowAt
    tenant: str | None


class Announcement(msgspec.Struct, frozen=True):
    """All that the order and the numbers of a batch depend on. Stored before its first message leaves."""

    first_number: int
    count: int
    digest: str
    items: tuple[int, ...] = ()
    """Row ids in send order, 0 where one was taken out: its number stays unused. A store that finds its batches in
    another way leaves it empty.
    """
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
    cursor: Any = None
    """How far the lane has come, where that is not kept with each row. Only the store understands it."""
    detours: Mapping[str, Any] | None = None
    """The tenants that the lane passes over, and how far each of them has come; None if the store knows no detours."""

    @property
    def name(self) -> LaneName:
        """Which lane it is, whoever owns it."""
        return LaneName(self.route.id, self.shard)

    def check_announced(self, *, wanted: bool = True) -> None:
        """`StoreError` unless a batch is announced; or if one is, and none is wanted."""
        if (self.announced is not None) != wanted:
            raise StoreError(
                "there is no announced batch to settle" if wanted else "a batch is announced over an unsettled one"
            )

    def check_batch(self, found: Sequence[tuple[int, Row]]) -> None:
        """`BatchMismatchError` if these numbers and rows are not those that were announced."""
        announced, items = self.announced, [(number, row.id) for number, row in found]
        if announced is not None and (len(items) != announced.count or digest(items) != announced.digest):
            raise BatchMismatchError(
                f"batch {self.batch} of lane {self} had {announced.count} rows "
                f"when it was announced and has {len(items)} now, or others: somebody changed them by hand"
            )

    def __str__(self) -> str:
        return f"{self.route.name}/{self.shard}"


class Page(msgspec.Struct, frozen=True):
    """What a lane has to do next."""

    redo: tuple[Row, ...]
    """Failed rows that are due, per key a prefix in id order."""
    fresh: tuple[Row, ...]
    """Rows that were never tried, in id order."""
    held: frozenset[str] = frozenset()
    """Paused tenants whose rows come next, and cannot be left out: they need a detour, and the page has no fresh rows
    until they have one."""
    passed: bool = False
    """The lane moves on, even if it is only past rows that belong to a detour; and there may be more behind them."""
    scan_exhausted: bool = False
    """So many of them that the look has come to nothing else, nor to their end."""
    requests: tuple[int, ...] = ()
    """What people have asked for and can be done now: the next announcement does it."""
    cursor: Any = None
    """What the announcement needs to know about this page, if the store keeps no status with its rows. Then the batch
    must deal with the rows of the page as they come: none can be left out, but for the last ones.
    """


class Failure(msgspec.Struct, frozen=True):
    """A delivery that was rejected, or that must be tried again through no fault of its own."""

    row: int
    attempts: int
    """Including this one, if it counts."""
    error: str | None
    """Already redacted; None for a row that shared a request with a rejected one, or that gets attempts back: then it
    is passed over if it was dealt with meanwhile."""
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
    requests: Sequence[int] = ()
    """People's requests that this announcement carries out."""
    cursor: Any = None
    """The one of the page that it is made of."""
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)
    relaxed: bool = False
    """The announcement, and what it settles, may be lost if the database crashes: then the same rows are sent again,
    which is what a destination without numbers must bear anyhow."""


class Census(msgspec.Struct, frozen=True):
    """Who is there and what is to be served, by the database's clock."""

    routes: Mapping[int, RouteRecord]
    """Everything that ever wrote."""
    relays: Mapping[str, frozenset[int]]
    """The relays that are alive, and the routes that each of them serves."""
    shards: Mapping[str, frozenset[int]]
    """Those of them that keep to some shards."""
    shard_count: int = SHARDS
    """How many lanes each route has."""
    paused: frozenset[LaneName] = frozenset()
    """Lanes that a person has stopped: their owner lets them go."""
    paused_tenants: frozenset[str] = frozenset()
    lane_rates: Mapping[LaneName, float] = msgspec.field(default_factory=dict)
    """The most that a lane may send, in messages per second."""
    tenant_rates: Mapping[str, float] = msgspec.field(default_factory=dict)
    """The most that a tenant may send through one lane, in messages per second."""
    install: str = ""
    """Who this installation is: part of every producer's name."""
    next_expiry: float | None = None
    """Seconds until the next lease ends unless it is renewed; None if nobody holds one."""


class Trouble(msgspec.Struct, frozen=True):
    """What keeps a lane from sending, in its owner's words."""

    reason: str
    """Already redacted."""
    seconds: float | None = None
    """Until the owner tries again; None: it needs a person."""


class LaneStore(Protocol):
    """Who owns which lane. Times are the database's own: no relay's clock decides about a lease."""

    async def census(self) -> Census:
        """See `Census`. Changes nothing."""
        ...

    async def take(
        self, relay: str, *, lease: float, wanted: Mapping[int, int], shards: Shards | None = None
    ) -> list[Lane]:
        """Claim lanes that nobody holds: of each route, by its id, up to the wanted number, and only these shards of
        it, if any are named.

        A lane is free when it was never held, was released, or its lease has expired; no other process is needed to
        free it. Each lane comes with a higher epoch, a new token and its unsettled batch, if it has one; then ``tries``
        has risen. Two relays never get the same lane in the same epoch. Paused lanes are not given out.
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
        """Say that the relay is alive and which routes and shards it serves, and extend the leases of these lanes;
        those that are still ours come back, each with whether its lease was extended.

        It was not if somebody else has locked the lane's row; no other lane waits for that. A lease that has expired
        but that nobody has taken is extended, too. What troubles a lane, or that nothing does, is kept for people to
        see.
        """
        ...

    async def release(self, relay: str, lanes: Sequence[Lane], *, leaving: bool = False) -> None:
        """Let lanes go, fenced: one that has another owner already is left to it. Their batches stay announced, and it
        does not count against them, nor if it comes late, from a relay that was only slow. ``leaving`` takes the relay
        out of the census.
        """
        ...


class OutboxStore(Protocol):
    """Where deliveries live and how progress is kept. Times are the database's own."""

    async def ready(self, routes: Collection[int], *, relay: str | None = None) -> frozenset[LaneName]:
        """Lanes of these routes that have something to do now: fresh rows, rows that are due, a batch that is not
        settled, people's requests. With ``relay`` only those that it holds. Paused lanes are not among them. Rows of
        paused tenants may be counted or not.
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
        """Read what comes next: at most ``limit`` fresh rows and as many to redo, and of each no more than it takes to
        have ``max_bytes`` of bodies. So there is nothing behind fresh rows that reach neither. Changes nothing; asking
        twice gives the same.

        Rows of an announced batch, and of paused tenants, are not in it. A request that names a row of an announced
        batch waits. A row that commits late with a low id is still found. Within a key rows come in the order of their
        ids. Fresh rows of tenants on a detour are left out; with ``detour`` they are only those of that tenant, as far
        as the lane has passed over them.
        """
        ...

    async def part(self, lane: Lane, tenants: Collection[str]) -> Lane:
        """Give tenants a detour, fenced: from here on the lane passes over their rows, and does not wait for them.
        There must be nothing announced.
        """
        ...

    async def join(self, lane: Lane, tenants: Collection[str]) -> Lane:
        """End the detours of those tenants that have come as far as the lane, fenced. There must be nothing
        announced.
        """
        ...

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        """Make the batch durable, in one fenced write; the lane with its new batch number comes back.

        With ``settle`` the same write settles the batch before. A batch without items only records its failures, its
        parked rows, the requests that it carries out and its cursor. Either all of it is stored or nothing. Announcing
        over an unsettled batch is a `StoreError`.
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
        """Take rows out of the announced batch, fenced, before anything with a higher number leaves.

        Their numbers stay unused. What remains can be rebuilt and settled. ``attempts`` are counted for rows that stay
        in the batch. With nothing to change it still tells whether the lane is ours.
        """
        ...

    async def settle(self, lane: Lane) -> Lane:
        """Everything that is left of the announced batch is stored at the destination: mark it sent, fenced."""
        ...

    async def asked(self, lane: Lane, rows: Collection[int]) -> frozenset[int]:
        """Those of the rows that people have requests about, which wait as long as the rows are on their way."""
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

        What lanes are chosen by stays as it is: `RouteError` for a route that says otherwise. Safe to call from many
        processes at once. Nothing is registered if the transaction rolls back.
        """
        ...

    def append(self, connection: Any, deliveries: Sequence[Delivery]) -> None:
        """Write the rows, in this order, by one statement. `DuplicateEventError` if one of them is there already."""
        ...


def digest(items: Iterable[tuple[int, int]]) -> str:
    """The fingerprint of a batch: its numbers and row ids in send order."""
    text = "".join([f"{number}:{row};" for number, row in items])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
