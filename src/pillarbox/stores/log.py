"""The outbox as a log, on PostgreSQL: rows are written once by the business transaction and never touched again.

How far a lane has come stands in the lane's row, as a cursor (`pillarbox.cursor`). One fenced UPDATE of that row
settles a batch and announces the next one; what a batch consists of is told by the cursors before and after it, so it
can be read again at any time. Only what failed is written down by itself, in a narrow table, with the rules of the
queue: among the waiting rows of a key the first one decides.

Because nothing is kept with a row, what a look does not see is gone for good. So a look is one statement, on a primary,
that no policy filters; and a database that has other transaction numbers than it had, because it was restored or went
back in time, is refused.

A lane without a cursor is served as the queue that it still is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

from ..cursor import Cursor, RowAt, Snapshot, Window
from ..errors import BatchMismatchError, LaneHaltedError, StoreError
from ..outbox import Announcement, Batch, Failure, FailurePolicy, Lane, LaneName, Page, Row, digest
from . import log_sql as sql
from .announced import Contents, contents_of, position
from .failures import Failures, decode_headers, place, row_of
from .leases import fenced, lease_lost, stored, with_keys
from .queue import QueueStore

logger = logging.getLogger("pillarbox")

_LOOK, _REQUEST = 2, 3


class LogStore(QueueStore):
    """`LaneStore`, `OutboxStore` and `Appends` on PostgreSQL."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self._warned = False
        self._rows = RowReader()

    async def take(
        self, relay: str, *, lease: float, wanted: Mapping[int, int], shards: Collection[int] | None = None
    ) -> list[Lane]:
        taken = await super().take(relay, lease=lease, wanted=wanted, shards=shards)
        skipping = [it for it in taken if it.cursor and it.waiting and it.route.on_failure is FailurePolicy.SKIP]
        free = {lane.name: await self.all_or_nothing(_free_parked, lane) for lane in skipping}
        return [free.get(lane.name, lane) for lane in taken]

    def _take(self, connection: Connection, *arguments: Any) -> list[Lane]:
        guards = connection.execute(sql.GUARDS).one()
        if guards.standby:
            raise StoreError("this server is a standby: relays need the primary")
        taken = super()._take(connection, *arguments)
        if any(lane.cursor is not None for lane in taken):
            self._check(*guards)  # else nothing is taken, either
        return taken

    def with_waiting_keys(self, connection: Connection, taken: list[Lane]) -> list[Lane]:
        queues = [lane for lane in taken if lane.cursor is None]
        logs = [lane for lane in taken if lane.cursor is not None]
        found = super().with_waiting_keys(connection, queues) if queues else []
        if not logs:
            return found
        names = {"routes": [lane.route.id for lane in logs], "shards": [lane.shard for lane in logs]}
        discarded: dict[LaneName, set[RowAt]] = {}
        for route, shard, row, xid in connection.execute(sql.DISCARDED, names):
            discarded.setdefault(LaneName(route, shard), set()).add(RowAt(row, xid or 0))
        found += [
            replace(lane, discarded=frozenset(discarded.get(lane.name, ())))
            for lane in with_keys(logs, connection.execute(sql.WAITING, names))
        ]
        return sorted(found, key=attrgetter("name"))

    def _check(
        self, original: bool | None, cache: int, _standby: bool, filtered: bool, fsync: str, synchronous: str
    ) -> None:
        """Refuse a database in which a cursor would mean something else than it meant when it was written."""
        if not original:
            raise StoreError(
                "this database is a copy, from a dump or by replication, and its transactions have other numbers than "
                "those that lanes remember: run `pillarbox outbox rebase`"
            )
        if filtered:
            raise StoreError(_FILTERED)
        if cache != 1:
            raise StoreError(
                f"the ids of pillarbox_outbox are drawn {cache} at a time, so keys would lose their order: "
                "ALTER TABLE pillarbox_outbox ALTER COLUMN id SET CACHE 1"
            )
        if not self._warned and (fsync != "on" or synchronous == "off"):
            logger.warning(
                "fsync is %s and synchronous_commit is %s: after a crash of the server, events may have left whose "
                "transactions it has forgotten",
                fsync,
                synchronous,
            )
        self._warned = True

    async def ready(self, routes: Collection[int], *, relay: str | None = None) -> frozenset[LaneName]:
        queues = await super().ready(routes, relay=relay)
        return queues | await self.each_alone(_ready, sorted(routes), relay)

    async def poll(self, lane: Lane, *, limit: int, max_bytes: int = 4_194_304, paused: Collection[str] = ()) -> Page:
        if lane.cursor is None:
            return await super().poll(lane, limit=limit, max_bytes=max_bytes, paused=paused)
        return await self.each_alone(partial(_poll, reader=self._rows), lane, limit, max_bytes, sorted(paused))

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        if lane.cursor is None:
            return await super().announce(lane, batch, settle=settle)
        if (lane.announced is not None) != settle:
            raise StoreError(
                "a batch is announced over an unsettled one"
                if lane.announced
                else "there is no announced batch to settle"
            )
        following, skipped = _following(lane, batch)
        if not (lane.waiting or skipped or batch.failures or batch.parked or batch.requests):
            await self.each_alone(_write_at_once, lane, following, batch.cursor, batch.relaxed)
            return following
        return await self.all_or_nothing(_announce, lane, following, batch, skipped)

    async def amend(
        self,
        lane: Lane,
        failures: Sequence[Failure],
        *,
        parked: Sequence[int] = (),
        attempts: Mapping[int, int] | None = None,
    ) -> Lane:
        if lane.cursor is None or not (failures or parked or attempts):
            return await super().amend(lane, failures, parked=parked, attempts=attempts)
        if lane.announced is None:
            raise StoreError("there is no announced batch to amend")
        return await self.all_or_nothing(_amend, lane, failures, parked, attempts or {})

    async def settle(self, lane: Lane) -> Lane:
        if lane.cursor is None:
            return await super().settle(lane)
        if lane.announced is None:
            raise StoreError("there is no announced batch to settle")
        settled = replace(lane, announced=None, tries=0, cursor=position(lane))
        if not lane.waiting:
            await self.each_alone(_write_at_once, lane, settled)
            return settled
        return await self.all_or_nothing(_settle, lane, settled)

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        if lane.cursor is None:
            return await super().rebuild(lane)
        return await self.each_alone(_rebuild, lane)


_FILTERED = (
    "row level security hides rows of pillarbox_outbox from this role, and what a relay does not see it passes over: "
    "give it a role with BYPASSRLS, or the table's owner"
)


# -- looking -----------------------------------------------------------------------------------------------------------


def _ready(connection: Connection, routes: list[int], relay: str | None) -> frozenset[LaneName]:
    return frozenset(LaneName(*row) for row in connection.execute(sql.READY, {"routes": routes, "relay": relay}))


class Look(msgspec.Struct, frozen=True):
    """What a page has to tell its announcement."""

    window: Window
    server: str
    """Where we looked. After a failover others may use the numbers that we have seen."""


class RowReader:
    """How a look gets its rows: here all of them from the table, with the look itself."""

    def glance(self, connection: Connection, parameters: dict[str, Any]) -> Sequence[Any]:
        """A look that is mostly enough; rows that are too large may lack their bodies."""
        return sql.GLANCES[bool(parameters["running"])].fetch(connection, parameters)

    def look(self, connection: Connection, looks: sql.Looks, parameters: dict[str, Any]) -> Sequence[Any]:
        """A closer look, with all bodies that the bytes allow."""
        found = looks.light.fetch(connection, parameters)
        return looks.sized.fetch(connection, parameters) if _lacks_bodies(found) else found


def _poll(
    connection: Connection, lane: Lane, limit: int, max_bytes: int, paused: list[str], *, reader: RowReader
) -> Page:
    start = position(lane)
    look, rows, asked = _look(connection, lane, start, limit, max_bytes, reader=reader)
    if start.paging is not None and not rows:  # what was left of the late rows has been discarded
        seen = Cursor(start.high, start.paging)
        look, rows, asked = _look(connection, lane, seen, limit, max_bytes, reader=reader)
    held: list[Row] = []
    if paused:
        held = [row for row in rows if row.tenant in paused]
        rows = [row for row in rows if row.tenant not in paused]
    failures = Failures(connection, lane)
    if asked and (contents := contents_of(lane)) is not None:
        known = failures.know(asked.values())
        asked = {it: row for it, row in asked.items() if row not in known or not contents.holds(known[row].at, lane)}
    return Page(
        redo=tuple(failures.redo(limit, max_bytes, paused)) if lane.waiting else (),
        fresh=tuple(rows),
        held=tuple(held),
        requests=tuple(sorted(asked)),
        cursor=look,
    )


def _look(
    connection: Connection, lane: Lane, start: Cursor, limit: int, max_bytes: int, *, reader: RowReader
) -> tuple[Look, list[Row], dict[int, int]]:
    """What comes next, with its rows; and people's requests, each with the row that it is about."""
    parameters = {
        "route": lane.route.id,
        "shard": lane.shard,
        "high": start.high,
        "limit": limit,
        "max_bytes": max_bytes,
        "discarded": sorted(row.id for row in lane.discarded),
    }
    if start.paging is not None:
        found = reader.look(connection, sql.PAGE, {**parameters, **_late(start.late), "done": start.done})
        _looked(found, start)
        return _window(found, start, start.paging, start.late, limit)
    seen = start.seen
    before = {"xmax": str(seen.xmax), "running": [str(xid) for xid in seen.running]}
    found = reader.glance(connection, {**parameters, **before})
    late, snapshot, _ = _looked(found, start)
    if late is None and not _lacks_bodies(found):
        return _window(found, start, snapshot, (), limit)
    found = reader.look(connection, sql.POLL, {**parameters, **before})
    count, snapshot, xids = _looked(found, start)
    if count <= limit:
        return _window(found, start, snapshot, xids, limit)
    # More late rows than one batch takes. Then all that is needed to page through them is whose they are.
    more = connection.execute(sql.LATE_XIDS, {**parameters, **before, "snapshot": str(snapshot)}).scalars()
    xids = tuple(sorted({*more, *(xid for xid in seen.running if snapshot.shows(xid))}))
    found = reader.look(connection, sql.PAGE, {**parameters, **_late(xids), "done": 0})
    return _window(found, start, snapshot, xids, limit)


def _lacks_bodies(found: Sequence[Any]) -> bool:
    return any([values[7] is None and values[0] < _LOOK for values in found])  # noqa: C419  faster


def _late(xids: Iterable[int]) -> dict[str, list[str]]:
    return {"late": [str(xid) for xid in xids]}


def _looked(found: Sequence[Any], start: Cursor) -> tuple[Any, Snapshot, tuple[int, ...]]:
    """How many late rows there are, or after a glance one of them; when we looked; and whose rows they are."""
    _, count, _, told, xids, refused, *_ = next(values for values in found if values[0] == _LOOK)
    if refused == "standby":
        raise StoreError("this server is a standby: its snapshots do not show who is at work on the primary")
    if refused == "filtered":
        raise StoreError(_FILTERED)
    snapshot = Snapshot.parse(told)
    if snapshot.lies_below(start.paging or start.seen):
        raise LaneHaltedError(
            f"the lane has seen snapshot {start.paging or start.seen}, and the database is at {snapshot}: "
            "it went back in time, or is another one"
        )
    return count, snapshot, tuple(sorted(map(int, xids.split(",")))) if xids else ()


def _window(
    found: Sequence[Any], start: Cursor, snapshot: Snapshot, xids: tuple[int, ...], limit: int
) -> tuple[Look, list[Row], dict[int, int]]:
    """What was found, as far as a batch takes it."""
    rows = [
        Row(row_id, event_id, topic, key, tenant, decode_headers(headers), body, 0)
        for part, row_id, event_id, topic, key, tenant, headers, body in found
        if part < _LOOK
    ]
    rows.sort(key=attrgetter("id"))
    del rows[limit:]
    count, server = next((values[1] or 0, values[6]) for values in found if values[0] == _LOOK)
    late = min(count, sum(values[0] == 0 for values in found), limit)
    more = late < count
    if more:  # none of the fresh ones before the last late one
        del rows[late:]
    window = Window(
        start,
        snapshot,
        late=tuple(row.id for row in rows[:late]),
        fresh=tuple(row.id for row in rows[late:]),
        xids=xids,
        more=more,
    )
    return Look(window, server), rows, {values[1]: int(values[4]) for values in found if values[0] == _REQUEST}


def _rebuild(connection: Connection, lane: Lane) -> list[tuple[int, Row]]:
    contents, announced = contents_of(lane), lane.announced
    if announced is None or contents is None:
        return []
    start, end = contents.ends(lane)
    parameters = {
        **place(lane),
        "xmax": str(start.seen.xmax),
        "running": [str(xid) for xid in start.seen.running],
        "snapshot": str(end.paging or end.seen),
        "late_after": start.done,
        "late_up_to": start.high if end.paging is None else end.done,
        "after": start.high,
        "up_to": start.high if end.paging is not None else end.high,
        "ids": [*contents.redo],
    }
    skip = {*contents.skip}
    rows = {values[0]: row_of(values) for values in connection.execute(sql.BETWEEN, parameters)}
    order = [*contents.redo, *(row for row in rows if row not in skip)]
    if contents.redo:
        rows |= {values[0]: row_of(values) for values in connection.execute(sql.REDONE, parameters)}
    numbered = enumerate(announced.items or order, start=announced.first_number)
    found = [(number, rows[row]) for number, row in numbered if row in rows and row not in contents.out]
    if len(found) != announced.count or digest((number, row.id) for number, row in found) != announced.digest:
        raise BatchMismatchError(
            f"batch {lane.batch} of lane {lane} had {announced.count} rows "
            f"when it was announced and has {len(found)} now, or others: somebody changed them by hand"
        )
    if contents.attempts:
        attempts = contents.attempts
        found = [(number, replace(row, attempts=attempts.get(row.id, row.attempts))) for number, row in found]
    return found


# -- progress ----------------------------------------------------------------------------------------------------------


def _following(lane: Lane, batch: Batch) -> tuple[Lane, tuple[int, ...]]:
    """The lane once the batch is announced, and the rows that its cursor passes without sending them."""
    reached, items = position(lane), tuple(batch.items)
    look: Look | None = batch.cursor
    window = Window(reached, reached.seen) if look is None else look.window
    redo: tuple[int, ...] = ()
    natural, skipped = window.ids, redo
    if look is not None and items == natural:  # the whole page and nothing else, as it mostly is
        to = window.after(len(items))
    else:
        sent = {*items}
        dealt = {*items, *batch.parked, *(failure.row for failure in batch.failures)}
        to = reached if look is None else window.dealt_with(dealt)
        passed = [row for row in natural if row in dealt]
        skipped = tuple(row for row in passed if row not in sent)
        redo = tuple(sorted(sent.difference(passed)))
        natural = (*redo, *(row for row in passed if row in sent))
    discarded = {row for row in lane.discarded if to.covers(row)}
    if discarded:  # then they are behind us
        lane = replace(lane, discarded=lane.discarded - discarded)
    if not items:
        return replace(lane, batch=lane.batch + 1, announced=None, tries=0, cursor=to), skipped
    first = lane.next_number
    contents = Contents(
        to=str(to),
        start=None if window.start == reached else str(window.start),
        redo=redo,
        skip=(*skipped, *sorted(row.id for row in discarded)),
    )
    announced = Announcement(
        first,
        len(items),
        digest(enumerate(items, start=first)),
        () if items == natural else items,
        {**batch.details, **msgspec.to_builtins(contents)},
    )
    following = replace(
        lane,
        batch=lane.batch + 1,
        next_number=first + len(items),
        announced=announced,
        tries=0,
        cursor=reached,
    )
    return following, skipped


def _write_at_once(
    connection: Connection, lane: Lane, following: Lane, look: Look | None = None, relaxed: bool = False
) -> None:
    """The common case, in one statement. If it is relaxed and the server crashes, a successor finds the lane as it was
    a moment before, and sends what came after it again. What is settled while nothing follows is never relaxed, so all
    of it is on the disk when a lane is idle.
    """
    parameters = {
        **_entry(lane),
        "was_announced": stored(lane.announced)["announced"],
        "announced": stored(following.announced)["announced"],
        "cursor": str(following.cursor),
        "epoch": lane.epoch,
        "token": str(lane.token),
        "next_batch": following.batch,
        "next_number": following.next_number,
        "server": None if look is None else look.server,
    }
    settling = (sql.SETTLE, sql.SETTLE_RELAXED)[relaxed]
    announcing = (sql.ANNOUNCE, sql.ANNOUNCE_RELAXED)[relaxed]
    owned = (announcing if lane.announced is None else settling).fetch(connection, parameters)
    if not owned:
        raise lease_lost(lane)


def _entry(lane: Lane, skipped: Sequence[int] = ()) -> dict[str, Any]:
    """What the journal says about the lane's batch."""
    entry: dict[str, Any] = {"route": lane.route.id, "shard": lane.shard, "batch": lane.batch}
    contents = contents_of(lane)
    if lane.announced is None or contents is None:
        cursor = lane.cursor
        return entry | {
            "settled": str(cursor),
            "settled_high": cursor.high,
            "redone": [],
            "skipped": [*skipped],
            "first_number": lane.next_number,
            "count": 0,
        }
    out = {*contents.out}
    return entry | {
        "settled": contents.to,
        "settled_high": int(contents.to.partition(" ")[0]),
        "redone": [row for row in contents.redo if row not in out],
        "skipped": [*contents.skip, *contents.out],
        "first_number": lane.announced.first_number,
        "count": lane.announced.count,
    }


def _announce(connection: Connection, lane: Lane, following: Lane, batch: Batch, skipped: tuple[int, ...]) -> Lane:
    if batch.cursor is not None and connection.execute(sql.SERVER).scalar_one() != batch.cursor.server:
        raise lease_lost(lane)
    _write(connection, lane, following)
    if skipped and following.announced is None:
        connection.execute(sql.JOURNAL, _entry(following, skipped))
    failures = Failures(connection, lane)
    failures.settle()
    failures.fail(batch.failures, skipped)
    failures.park(batch.parked, skipped)
    return failures.after(failures.carry_out(following, batch.requests))


def _write(connection: Connection, lane: Lane, following: Lane) -> None:
    fenced(
        connection,
        lane,
        batch=following.batch,
        next_number=following.next_number,
        tries=0,
        cursor=str(following.cursor),
        **stored(following.announced),
    )
    if lane.announced is not None:
        connection.execute(sql.JOURNAL, _entry(lane))


def _settle(connection: Connection, lane: Lane, settled: Lane) -> Lane:
    _write(connection, lane, settled)
    failures = Failures(connection, lane)
    failures.settle()
    return failures.after(settled)


def _amend(
    connection: Connection,
    lane: Lane,
    failures: Sequence[Failure],
    parked: Sequence[int],
    attempts: Mapping[int, int],
) -> Lane:
    contents, announced = contents_of(lane), lane.announced
    if contents is None or announced is None:
        raise StoreError("there is no announced batch to amend")
    rows = {*(failure.row for failure in failures), *parked}
    book = Failures(connection, lane)
    known = book.know([*rows, *attempts])
    batch = {row for row in (*rows, *attempts) if row in known and contents.holds(known[row].at, lane)}
    if strange := [row for row in attempts if row not in batch]:
        raise StoreError(f"row {strange[0]} is not in the announced batch of lane {lane}")
    again = {row: count for row, count in attempts.items() if row in contents.redo}
    counted = contents.attempts | {row: count for row, count in attempts.items() if row not in again}
    changed = replace(contents, out=tuple(sorted({*contents.out, *rows})), attempts=counted)
    amended = replace(announced, details={**announced.details, **msgspec.to_builtins(changed, str_keys=True)})
    if rows:
        left = [(number, row.id) for number, row in _rebuild(connection, lane) if row.id not in rows]
        amended = replace(amended, count=len(left), digest=digest(left))
    fenced(connection, lane, **stored(amended))
    book.count_attempts(again)
    book.fail(failures, batch, contents.attempts)
    book.park(parked, batch)
    return book.after(replace(lane, announced=amended))


def _free_parked(connection: Connection, lane: Lane) -> Lane:
    fenced(connection, lane, tries=lane.tries)
    failures = Failures(connection, lane)
    failures.free_parked()
    return failures.after(lane)
