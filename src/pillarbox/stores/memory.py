"""The outbox in memory: the same promises without a database, for unit tests and the simulator.

It keeps the rules of the queue store (`stores.queue`): a status per row, and among the waiting rows of a key the first
one decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from msgspec.structs import replace

from .. import clock
from ..errors import BatchMismatchError, DuplicateEventError, LeaseLostError, StoreError
from ..outbox import (
    SHARDS,
    Announcement,
    Batch,
    Delivery,
    Failure,
    FailurePolicy,
    Key,
    Lane,
    Page,
    RouteRecord,
    Row,
    Status,
    digest,
)

_OPEN = (Status.PENDING, Status.SENDING, Status.RETRYING, Status.PARKED)


@dataclass(slots=True)
class _Stored:
    row: Row
    identity: tuple[UUID, int, int]
    route: int
    shard: int
    status: Status = Status.PENDING
    due_at: float = 0.0
    batch: int | None = None
    number: int | None = None
    error: str | None = None


NOBODY = UUID(int=0)


@dataclass(slots=True)
class _LaneRow:
    epoch: int = 0
    token: UUID = NOBODY
    locked_by: str | None = None
    locked_until: float = float("-inf")
    batch: int = 0
    next_number: int = 1
    announced: Announcement | None = None
    tries: int = 0


class MemoryStore:
    """`OutboxStore` and `Appends` without a database. Appending is committing."""

    def __init__(self, *, shards: int = SHARDS, draw_token: Callable[[], UUID] = uuid4) -> None:
        self._shards = shards
        self._draw_token = draw_token
        self._routes: dict[int, RouteRecord] = {}
        self._lanes: dict[tuple[int, int], _LaneRow] = {}
        self._rows: dict[int, _Stored] = {}
        self._identities: set[tuple[UUID, int, int]] = set()
        self._last_id = 0

    # -- the write side ------------------------------------------------------------------------------------------------

    def register(self, connection: Any, records: Iterable[RouteRecord]) -> int:  # noqa: ARG002  there is none
        for record in records:
            known = self._routes.get(record.id)
            if known is not None and known.name != record.name:
                raise StoreError(
                    f"the routes {known.name!r} and {record.name!r} have the same number: rename the newer one"
                )
            self._routes[record.id] = record
            for shard in range(self._shards):
                self._lanes.setdefault((record.id, shard), _LaneRow())
        return self._shards

    def append(self, connection: Any, deliveries: Sequence[Delivery]) -> None:  # noqa: ARG002  there is none
        identities = [(delivery.event_id, delivery.route, delivery.schema_version) for delivery in deliveries]
        if len({*identities}) < len(identities) or self._identities & {*identities}:
            raise DuplicateEventError("one of these events was written before")
        self._identities.update(identities)
        for delivery, identity in zip(deliveries, identities, strict=True):
            self._last_id += 1
            row = Row(
                id=self._last_id,
                event_id=delivery.event_id,
                topic=delivery.topic,
                key=delivery.key,
                tenant=delivery.tenant,
                headers=delivery.headers,
                body=delivery.body,
                attempts=0,
            )
            self._rows[row.id] = _Stored(row, identity, delivery.route, delivery.shard)

    # -- the relay's side ----------------------------------------------------------------------------------------------

    async def take(self, relay: str, *, lease: float, limit: int, destinations: Collection[str]) -> list[Lane]:
        now = clock.current().monotonic()
        taken: list[Lane] = []
        for (route, shard), lane in sorted(self._lanes.items()):
            if len(taken) < limit and lane.locked_until < now and self._routes[route].destination in destinations:
                lane.tries += lane.announced is not None and lane.locked_by is not None
                lane.epoch += 1
                lane.token = self._draw_token()
                lane.locked_by, lane.locked_until = relay, now + lease
                taken.append(self._lane(self._routes[route], shard, lane))
        return taken

    async def poll(self, lane: Lane, *, limit: int, cursor: Any = None, paused: Collection[str] = ()) -> Page:  # noqa: ARG002  the status is the cursor
        rows = [stored for stored in self._of(lane) if stored.row.tenant not in paused]
        fresh = [stored.row for stored in rows if stored.status is Status.PENDING]
        return Page(redo=tuple(self._redo(lane, rows, limit)), fresh=tuple(fresh[:limit]))

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        if (lane.announced is not None) != settle:
            raise StoreError(
                "a batch is announced over an unsettled one"
                if lane.announced
                else "there is no announced batch to settle"
            )
        kept = self._fenced(lane)
        self._check_rows(lane, batch.items, (Status.PENDING, Status.RETRYING, Status.PARKED))
        self._check_rows(lane, [*(failure.row for failure in batch.failures), *batch.parked], _OPEN)
        if settle:
            self._mark_sent(lane)
        self._fail(batch.failures)
        self._park(batch.parked)
        kept.batch += 1
        kept.tries = 0
        kept.announced = None
        if batch.items:
            numbered = list(enumerate(batch.items, start=kept.next_number))
            kept.announced = Announcement(kept.next_number, len(numbered), digest(numbered), batch.details)
            kept.next_number += len(numbered)
            for number, row in numbered:
                stored = self._rows[row]
                stored.status, stored.batch, stored.number = Status.SENDING, kept.batch, number
        return self._after(lane, kept)

    async def amend(self, lane: Lane, failures: Sequence[Failure], *, parked: Sequence[int] = ()) -> Lane:
        kept = self._fenced(lane)
        if kept.announced is None:
            raise StoreError("there is no announced batch to amend")
        self._check_rows(lane, [*(failure.row for failure in failures), *parked], _OPEN)
        self._fail(failures)
        self._park(parked)
        left = [(stored.number or 0, stored.row.id) for stored in self._items(lane)]
        kept.announced = replace(kept.announced, count=len(left), digest=digest(left))
        return self._after(lane, kept)

    async def settle(self, lane: Lane) -> Lane:
        kept = self._fenced(lane)
        if lane.announced is None:
            raise StoreError("there is no announced batch to settle")
        self._mark_sent(lane)
        kept.announced, kept.tries = None, 0
        return self._after(lane, kept)

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        if lane.announced is None:
            return []
        found = [(stored.number or 0, stored.row) for stored in self._items(lane)]
        if (
            len(found) != lane.announced.count
            or digest((number, row.id) for number, row in found) != lane.announced.digest
        ):
            raise BatchMismatchError(
                f"batch {lane.batch} of lane {lane.route.name}/{lane.shard} is not what was announced"
            )
        return found

    # -- small parts ---------------------------------------------------------------------------------------------------

    def status_of(self, row: int) -> Status:
        """What has become of a row, for tests."""
        return self._rows[row].status

    def _fenced(self, lane: Lane) -> _LaneRow:
        kept = self._lanes[lane.route.id, lane.shard]
        if (kept.epoch, kept.token, kept.batch) != (lane.epoch, lane.token, lane.batch):
            raise LeaseLostError(
                f"lane {lane.route.name}/{lane.shard} has another owner than epoch {lane.epoch}, batch {lane.batch}"
            )
        return kept

    def _check_rows(self, lane: Lane, rows: Sequence[int], allowed: Collection[Status]) -> None:
        mine = {stored.row.id for stored in self._of(lane) if stored.status in allowed}
        if not {*rows} <= mine:
            raise StoreError("a row of the batch does not belong to this lane, or is in no state to be changed")

    def _lane(self, route: RouteRecord, shard: int, kept: _LaneRow) -> Lane:
        lane = Lane(
            route, shard, kept.epoch, kept.token, kept.batch, kept.next_number, kept.announced, kept.tries, frozenset()
        )
        return replace(lane, waiting=frozenset(stored.row.order_key for stored in self._waiting(lane)))

    def _after(self, lane: Lane, kept: _LaneRow) -> Lane:
        first: dict[Key, _Stored] = {}
        for stored in self._waiting(lane):
            first.setdefault(stored.row.order_key, stored)
        for stored in first.values():
            if stored.status is Status.PARKED:
                stored.status, stored.due_at = Status.RETRYING, clock.current().monotonic()
        return self._lane(lane.route, lane.shard, kept)

    def _of(self, lane: Lane) -> Iterator[_Stored]:
        return (stored for stored in self._rows.values() if (stored.route, stored.shard) == (lane.route.id, lane.shard))

    def _waiting(self, lane: Lane) -> Iterator[_Stored]:
        blocking = {Status.RETRYING, Status.PARKED} | (
            {Status.FAILED} if lane.route.on_failure is FailurePolicy.PARK else set()
        )
        return (stored for stored in self._of(lane) if stored.status in blocking)

    def _items(self, lane: Lane) -> list[_Stored]:
        items = (stored for stored in self._of(lane) if stored.status is Status.SENDING and stored.batch == lane.batch)
        return sorted(items, key=lambda stored: stored.number or 0)

    def _redo(self, lane: Lane, rows: list[_Stored], limit: int) -> list[Row]:
        now = clock.current().monotonic()
        allowed = {stored.row.id for stored in rows}
        found: list[Row] = []
        stopped: set[Key] = set()
        open_keys = {s.row.order_key for s in rows if s.status is Status.RETRYING and s.due_at <= now}
        for stored in self._waiting(lane):
            key = stored.row.order_key
            if key not in open_keys or key in stopped or stored.row.id not in allowed:
                continue
            if stored.status is Status.PARKED or (stored.status is Status.RETRYING and stored.due_at <= now):
                found.append(stored.row)
            else:
                stopped.add(key)
        return found[:limit]

    def _mark_sent(self, lane: Lane) -> None:
        for stored in self._items(lane):
            stored.status = Status.SENT

    def _fail(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            stored = self._rows[failure.row]
            stored.row = replace(stored.row, attempts=failure.attempts)
            stored.error = failure.error or stored.error
            stored.batch = stored.number = None
            if failure.retry_after is None:
                stored.status = Status.FAILED
            else:
                stored.status, stored.due_at = Status.RETRYING, clock.current().monotonic() + failure.retry_after

    def _park(self, rows: Sequence[int]) -> None:
        for row in rows:
            stored = self._rows[row]
            stored.status, stored.batch, stored.number = Status.PARKED, None, None
