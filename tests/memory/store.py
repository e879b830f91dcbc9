"""The outbox in memory: the same promises without a database, for unit tests and the simulator.

It keeps the rules of the failure book (`stores.failures`) with a status per row: among the waiting rows of a key the
first one decides. Nothing here depends on the order of a set or on the time of day, so a run can be repeated. A copy
(`copy.deepcopy`) is the store as it was, for those who want to go back to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Self
from uuid import UUID, uuid4

from msgspec.structs import replace

from pillarbox import clock
from pillarbox.errors import DuplicateEventError, LeaseLostError, StoreError
from pillarbox.outbox import (
    SHARDS,
    Announcement,
    Batch,
    Census,
    Delivery,
    Failure,
    FailurePolicy,
    Key,
    Lane,
    LaneName,
    Page,
    RouteRecord,
    Row,
    Shards,
    Status,
    Trouble,
    digest,
)
from pillarbox.stores.announced import refuse_detours

_UNTRIED_OR_WAITING = (Status.PENDING, Status.RETRYING, Status.PARKED)
_WAITING = (Status.RETRYING, Status.PARKED, Status.FAILED)
_NEVER = float("-inf")


@dataclass(slots=True)
class _Stored:
    row: Row
    schema_version: int
    lane: LaneName
    status: Status = Status.PENDING
    due_at: float = 0.0
    batch: int | None = None
    number: int = 0
    error: str | None = None

    @property
    def id(self) -> int:
        return self.row.id

    @property
    def identity(self) -> tuple[UUID, int, int]:
        return (self.row.event_id, self.lane.route, self.schema_version)

    def __deepcopy__(self, _memo: object) -> _Stored:
        return copy.copy(self)


@dataclass(slots=True)
class _Request:
    row: int
    action: str
    event_id: UUID | None = None
    body: bytes | None = None


_Rows = dict[int, _Stored]


@dataclass(slots=True)
class _LaneRow:
    epoch: int = 0
    token: UUID | None = None
    locked_by: str | None = None
    locked_until: float = _NEVER
    batch: int = 0
    next_number: int = 1
    announced: Announcement | None = None
    tries: int = 0
    paused: bool = False
    rate: float | None = None
    trouble: Trouble | None = None
    cursor: Any = None
    detours: dict[str, Any] = field(default_factory=dict)
    # The rows that are not at their end, by what they wait for: no call looks at all that was ever written.
    fresh: _Rows = field(default_factory=dict)
    sending: _Rows = field(default_factory=dict)
    keys: dict[Key, _Rows] = field(default_factory=dict)
    requests: dict[int, _Request] = field(default_factory=dict)


@dataclass(slots=True)
class _Relay:
    expires_at: float
    serves: frozenset[int]
    shards: frozenset[int] | None


class MemoryStore:
    """`LaneStore`, `OutboxStore` and `Appends` without a database. Appending is committing."""

    def __init__(
        self, *, shards: int = SHARDS, draw_token: Callable[[], UUID] = uuid4, install: str = "memory"
    ) -> None:
        self._shards = shards
        self._draw_token = draw_token
        self._install = install
        self._routes: dict[int, RouteRecord] = {}
        self._lanes: dict[LaneName, _LaneRow] = {}
        self._relays: dict[str, _Relay] = {}
        self._paused_tenants: dict[str, bool] = {}
        self._tenant_rates: dict[str, float] = {}
        self._rows: _Rows = {}
        self._identities: set[tuple[UUID, int, int]] = set()
        self._last_id = 0
        self._last_request = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A store that went back in time must not draw the same tokens again.
        memo[id(self._draw_token)] = self._draw_token
        twin = object.__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    # -- the write side ------------------------------------------------------------------------------------------------

    def register(self, connection: Any, records: Iterable[RouteRecord]) -> int:  # noqa: ARG002  there is none
        for record in records:
            known = self._routes.get(record.id)
            if known is not None and known.name != record.name:
                raise StoreError(
                    f"the routes {known.name!r} and {record.name!r} have the same number: rename the newer one"
                )
            if known is not None:
                record.check_lanes(known.shard_by)
            self._routes[record.id] = record
            for shard in range(self._shards):
                self._lanes.setdefault(LaneName(record.id, shard), _LaneRow())
        return self._shards

    def append(self, connection: Any, deliveries: Sequence[Delivery]) -> None:  # noqa: ARG002  there is none
        identities = [(delivery.event_id, delivery.route, delivery.schema_version) for delivery in deliveries]
        if len({*identities}) < len(identities) or self._identities & {*identities}:
            raise DuplicateEventError("one of these events was written before")
        self._identities.update(identities)
        for delivery in deliveries:
            self._last_id += 1
            row = Row(
                id=self._last_id,
                event=str(delivery.event_id),
                topic=delivery.topic,
                key=delivery.key,
                tenant=delivery.tenant,
                headers=delivery.headers,
                body=delivery.body,
                attempts=0,
            )
            stored = _Stored(row, delivery.schema_version, LaneName(delivery.route, delivery.shard))
            self._rows[row.id] = self._lanes[stored.lane].fresh[row.id] = stored

    # -- people's side -------------------------------------------------------------------------------------------------

    def request(self, row_id: int, action: str, *, body: bytes | None = None, event_id: UUID | None = None) -> int:
        """Ask for a redrive, a discard or an edit of a row; the number of the request comes back."""
        self._last_request += 1
        request = _Request(row_id, action, event_id, body)
        self._lanes[self._rows[row_id].lane].requests[self._last_request] = request
        return self._last_request

    def pause_lane(self, name: LaneName, paused: bool = True) -> None:
        """Stop a lane, or let it go on."""
        self._lanes[name].paused = paused

    def pause_tenant(self, tenant: str, paused: bool = True) -> None:
        """Stop a tenant in all lanes, or let it go on."""
        self._paused_tenants[tenant] = paused

    def set_rate(self, rate: float | None, *, lane: LaneName | None = None, tenant: str | None = None) -> None:
        """Hold a lane or a tenant to so many messages per second; None lifts the limit."""
        if lane is not None:
            self._lanes[lane].rate = rate
        if tenant is not None:
            self._tenant_rates.pop(tenant, None)
            if rate is not None:
                self._tenant_rates[tenant] = rate

    def status_of(self, row: int) -> Status:
        """What has become of a row."""
        return self._rows[row].status

    def trouble_of(self, name: LaneName) -> Trouble | None:
        """What keeps a lane from sending, as its owner has said."""
        return self._lanes[name].trouble

    # -- leases --------------------------------------------------------------------------------------------------------

    async def census(self) -> Census:
        now = clock.current().monotonic()
        living = {name: relay for name, relay in sorted(self._relays.items()) if relay.expires_at > now}
        expiries = [lane.locked_until for lane in self._lanes.values() if lane.locked_until > now]
        return Census(
            routes=dict(self._routes),
            relays={name: relay.serves for name, relay in living.items()},
            shards={name: relay.shards for name, relay in living.items() if relay.shards is not None},
            shard_count=self._shards,
            paused=frozenset(name for name, lane in self._lanes.items() if lane.paused),
            paused_tenants=frozenset(tenant for tenant, paused in self._paused_tenants.items() if paused),
            lane_rates={name: lane.rate for name, lane in self._lanes.items() if lane.rate is not None},
            tenant_rates=dict(self._tenant_rates),
            install=self._install,
            next_expiry=min(expiries) - now if expiries else None,
        )

    async def take(
        self, relay: str, *, lease: float, wanted: Mapping[int, int], shards: Shards | None = None
    ) -> list[Lane]:
        now = clock.current().monotonic()
        taken: list[Lane] = []
        for route, count in sorted(wanted.items()):
            names = [LaneName(route, shard) for shard in sorted((shards or {}).get(route, range(self._shards)))]
            free = [name for name in names if name in self._lanes and self._is_free(self._lanes[name], now)]
            for name in free[: max(0, count)]:
                lane = self._lanes[name]
                # A clean release leaves no owner behind: only an owner that was lost counts against its batch.
                lane.tries += lane.announced is not None and lane.locked_by is not None
                lane.epoch += 1
                lane.token = self._draw_token()
                lane.locked_by, lane.locked_until = relay, now + lease
                taken.append(self._lane(name))
        return taken

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
        until = clock.current().monotonic() + lease
        self._relays[relay] = _Relay(until, frozenset(serves), None if shards is None else frozenset(shards))
        ours = [lane.name for lane in lanes if self._owns(lane) and self._lanes[lane.name].locked_by == relay]
        for name in ours:
            self._lanes[name].locked_until = until
            self._lanes[name].trouble = (troubles or {}).get(name)
        return dict.fromkeys(ours, True)

    async def release(self, relay: str, lanes: Sequence[Lane], *, leaving: bool = False) -> None:
        for lane in lanes:
            if self._owns(lane):
                kept = self._lanes[lane.name]
                kept.token = kept.locked_by = kept.trouble = None
                kept.locked_until = _NEVER
            elif lane.announced is not None and self._lanes[lane.name].batch == lane.batch:
                self._lanes[lane.name].tries = max(0, self._lanes[lane.name].tries - 1)
        if leaving:
            self._relays.pop(relay, None)

    # -- one turn of a lane --------------------------------------------------------------------------------------------

    async def ready(self, routes: Collection[int], *, relay: str | None = None) -> frozenset[LaneName]:
        now = clock.current().monotonic()
        return frozenset(
            name
            for name, lane in self._lanes.items()
            if name.route in routes
            and not lane.paused
            and (relay is None or (lane.locked_by == relay and lane.locked_until > now))
            and self._has_work(name, now)
        )

    async def poll(
        self,
        lane: Lane,
        *,
        limit: int,
        max_bytes: int = 4_194_304,
        paused: Collection[str] = (),
        detour: str | None = None,
    ) -> Page:
        refuse_detours(detour)
        kept = self._lanes[lane.name]
        fresh = (stored for stored in kept.fresh.values() if stored.row.tenant not in paused)
        redo = _page(self._redo(lane, kept, paused), limit, max_bytes)
        return Page(
            redo=tuple(sorted(redo, key=attrgetter("id"))),
            fresh=tuple(_page(fresh, limit, max_bytes)),
            requests=tuple(self._feasible(kept))[:limit],
        )

    async def part(self, lane: Lane, tenants: Collection[str]) -> Lane:
        refuse_detours(*tenants)
        return lane

    async def join(self, lane: Lane, tenants: Collection[str]) -> Lane:
        refuse_detours(*tenants)
        return lane

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        lane.check_announced(wanted=settle)
        kept = self._fenced(lane)
        self._check_rows(lane, batch.items, _UNTRIED_OR_WAITING)
        self._check_rows(lane, batch.parked, _UNTRIED_OR_WAITING)
        open_rows = (*_UNTRIED_OR_WAITING, Status.FAILED)
        failures = [it for it in batch.failures if it.error or self._rows[it.row].status in open_rows]
        self._check_rows(lane, [failure.row for failure in failures], open_rows)
        self._mark_sent(kept)
        touched = [*self._keys_of(batch.items), *self._fail(failures), *self._park(batch.parked)]
        kept.batch += 1
        kept.tries = 0
        kept.announced = None
        if batch.items:
            numbered = list(enumerate(batch.items, start=kept.next_number))
            kept.announced = Announcement(kept.next_number, len(numbered), digest(numbered), details=batch.details)
            kept.next_number += len(numbered)
            for number, row in numbered:
                stored = self._move(row, Status.SENDING)
                stored.batch, stored.number = kept.batch, number
        touched += self._carry_out(kept, batch.requests)
        return self._after(lane, touched)

    async def amend(
        self,
        lane: Lane,
        failures: Sequence[Failure],
        *,
        parked: Sequence[int] = (),
        attempts: Mapping[int, int] | None = None,
    ) -> Lane:
        kept = self._fenced(lane)
        attempts = attempts or {}
        if kept.announced is None:
            if failures or parked or attempts:
                raise StoreError("there is no announced batch to amend")
            return lane
        self._check_rows(lane, [*attempts], (Status.SENDING,))
        self._check_rows(lane, parked, (*_UNTRIED_OR_WAITING, Status.SENDING))
        self._check_rows(
            lane, [failure.row for failure in failures], (*_UNTRIED_OR_WAITING, Status.SENDING, Status.FAILED)
        )
        for row, count in attempts.items():
            self._rows[row].row = replace(self._rows[row].row, attempts=count)
        touched = [*self._fail(failures), *self._park(parked)]
        left = [(stored.number, stored.id) for stored in _items(kept)]
        kept.announced = replace(kept.announced, count=len(left), digest=digest(left))
        return self._after(lane, touched)

    async def settle(self, lane: Lane) -> Lane:
        kept = self._fenced(lane)
        lane.check_announced()
        self._mark_sent(kept)
        kept.announced, kept.tries = None, 0
        return self._lane(lane.name)

    async def asked(self, lane: Lane, rows: Collection[int]) -> frozenset[int]:
        return frozenset(request.row for request in self._lanes[lane.name].requests.values() if request.row in {*rows})

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        if lane.announced is None:
            return []
        found = [(stored.number, stored.row) for stored in _items(self._lanes[lane.name]) if stored.batch == lane.batch]
        lane.check_batch(found)
        return found

    # -- whose lane it is ----------------------------------------------------------------------------------------------

    def _is_free(self, lane: _LaneRow, now: float) -> bool:
        return not lane.paused and lane.locked_until <= now

    def _owns(self, lane: Lane) -> bool:
        kept = self._lanes[lane.name]
        return (kept.epoch, kept.token) == (lane.epoch, lane.token)

    def _fenced(self, lane: Lane) -> _LaneRow:
        kept = self._lanes[lane.name]
        if not self._owns(lane) or (kept.batch, kept.announced) != (lane.batch, lane.announced):
            raise LeaseLostError(f"lane {lane} has another owner than epoch {lane.epoch}, batch {lane.batch}")
        return kept

    def _lane(self, name: LaneName) -> Lane:
        kept, route = self._lanes[name], self._routes[name.route]
        if kept.token is None:
            raise LeaseLostError(f"lane {route.name}/{name.shard} is nobody's")
        waiting = frozenset(key for key, rows in kept.keys.items() if any(_blocking(route, rows)))
        return Lane(
            route,
            name.shard,
            kept.epoch,
            kept.token,
            kept.batch,
            kept.next_number,
            kept.announced,
            kept.tries,
            waiting,
        )

    def _check_rows(self, lane: Lane, rows: Sequence[int], allowed: Collection[Status]) -> None:
        found = [self._rows[row] for row in dict.fromkeys(rows) if row in self._rows]
        if len(found) != len(rows) or any(row.lane != lane.name or row.status not in allowed for row in found):
            raise StoreError("a row of the batch does not belong to this lane, or is in no state to be changed")

    # -- what is to do -------------------------------------------------------------------------------------------------

    def _has_work(self, name: LaneName, now: float) -> bool:
        lane, route = self._lanes[name], self._routes[name.route]
        if lane.announced or lane.fresh or any(self._feasible(lane)):
            return True
        return any(_due_prefix(_blocking(route, rows), now) for rows in lane.keys.values())

    def _feasible(self, lane: _LaneRow) -> Iterator[int]:
        """A request waits while its row is on its way."""
        return (number for number, request in lane.requests.items() if request.row not in lane.sending)

    def _redo(self, lane: Lane, kept: _LaneRow, paused: Collection[str]) -> list[_Stored]:
        """The rows that are due and first of their keys, then those behind them."""
        now = clock.current().monotonic()
        prefixes = [
            prefix
            for key, rows in kept.keys.items()
            if key.tenant not in paused and (prefix := _due_prefix(_blocking(lane.route, rows), now))
        ]
        prefixes.sort(key=lambda prefix: prefix[0].id)
        return [*(prefix[0] for prefix in prefixes), *(stored for prefix in prefixes for stored in prefix[1:])]

    # -- what becomes of rows ------------------------------------------------------------------------------------------

    def _move(self, row: int, status: Status) -> _Stored:
        stored = self._rows[row]
        self._shelf(stored).pop(row, None)
        lane, key = self._lanes[stored.lane], stored.row.order_key
        if not lane.keys.get(key, True):
            del lane.keys[key]
        stored.status, stored.batch, stored.number = status, None, 0
        self._shelf(stored)[row] = stored
        return stored

    def _shelf(self, stored: _Stored) -> _Rows:
        """Where its lane keeps such a row; those that are at their end are kept nowhere."""
        lane = self._lanes[stored.lane]
        if stored.status in _WAITING:
            return lane.keys.setdefault(stored.row.order_key, {})
        return {Status.PENDING: lane.fresh, Status.SENDING: lane.sending}.get(stored.status, {})

    def _after(self, lane: Lane, touched: Iterable[Key]) -> Lane:
        """Whoever is first among the waiting rows of its key is due, unless it failed."""
        kept = self._lanes[lane.name]
        for key in dict.fromkeys(touched):
            first = min(_blocking(lane.route, kept.keys.get(key, {})), key=attrgetter("id"), default=None)
            if first is not None and first.status is Status.PARKED:
                self._move(first.id, Status.RETRYING).due_at = clock.current().monotonic()
        return self._lane(lane.name)

    def _mark_sent(self, lane: _LaneRow) -> None:
        for row in [*lane.sending]:
            self._move(row, Status.SENT)

    def _fail(self, failures: Sequence[Failure]) -> list[Key]:
        for failure in failures:
            dead = failure.retry_after is None
            stored = self._move(failure.row, Status.FAILED if dead else Status.RETRYING)
            # Without an error it is no attempt: then a person may have set them back meanwhile.
            attempts = failure.attempts if failure.error else min(failure.attempts, stored.row.attempts)
            stored.row = replace(stored.row, attempts=attempts)
            stored.error = failure.error or stored.error
            stored.due_at = clock.current().monotonic() + (failure.retry_after or 0.0)
        return self._keys_of(failure.row for failure in failures)

    def _park(self, rows: Sequence[int]) -> list[Key]:
        for row in rows:
            self._move(row, Status.PARKED)
        return self._keys_of(rows)

    def _keys_of(self, rows: Iterable[int]) -> list[Key]:
        return [self._rows[row].row.order_key for row in rows]

    # -- what people ask for -------------------------------------------------------------------------------------------

    def _carry_out(self, lane: _LaneRow, numbers: Sequence[int]) -> list[Key]:
        wanted = {*numbers}
        asked = [number for number in self._feasible(lane) if number in wanted]
        requests = [lane.requests.pop(number) for number in asked]
        for request in requests:
            status = self._rows[request.row].status
            if request.action == "discard":
                if status in (*_UNTRIED_OR_WAITING, Status.FAILED):
                    self._move(request.row, Status.DISCARDED)
            elif status in (Status.FAILED, Status.RETRYING) and (request.action == "redrive" or self._edit(request)):
                stored = self._move(request.row, Status.RETRYING)
                stored.row = replace(stored.row, attempts=0)
                stored.due_at = clock.current().monotonic()
        return self._keys_of(request.row for request in requests)

    def _edit(self, request: _Request) -> bool:
        stored = self._rows[request.row]
        old, new, body = stored.row.event_id, request.event_id, request.body
        if new is None or body is None:
            return False
        if new == old:  # what has come in stays the event that it is
            stored.row = replace(stored.row, body=body)
            return True
        if (new, *stored.identity[1:]) in self._identities:
            return False
        self._identities.discard(stored.identity)
        headers = {**stored.row.headers, "event_id": str(new), "original_event_id": str(old)}
        stored.row = replace(stored.row, event=str(new), body=body, headers=headers)
        self._identities.add(stored.identity)
        return True


def _blocking(route: RouteRecord, rows: _Rows) -> Iterator[_Stored]:
    """Those that later rows of their key must not overtake."""
    skips = route.on_failure is FailurePolicy.SKIP
    return (stored for stored in rows.values() if not (skips and stored.status is Status.FAILED))


def _due_prefix(rows: Iterable[_Stored], now: float) -> list[_Stored]:
    found: list[_Stored] = []
    for stored in sorted(rows, key=attrgetter("id")):
        if stored.status is not Status.PARKED and not (stored.status is Status.RETRYING and stored.due_at <= now):
            break
        found.append(stored)
    return found


def _page(rows: Iterable[_Stored], limit: int, max_bytes: int) -> list[Row]:
    found: list[Row] = []
    size = 0
    for stored in rows:
        if len(found) == limit or size >= max_bytes:
            break
        found.append(stored.row)
        size += len(stored.row.body)
    return found


def _items(lane: _LaneRow) -> list[_Stored]:
    return sorted(lane.sending.values(), key=attrgetter("number"))
