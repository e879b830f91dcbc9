"""The outbox as a log, on PostgreSQL: rows are written once by the business transaction and never touched again.

How far a lane has come stands in the lane's row, as a cursor (`pillarbox.cursor`). One fenced UPDATE of that row
settles a batch and announces the next one; what a batch consists of is told by the cursors before and after it, so it
can be read again at any time. Only what failed is written down by itself, in a narrow table, with the rules of the
queue: among the waiting rows of a key the first one decides.

Because nothing is kept with a row, what a look does not see is gone for good. So a look is one statement, on a primary,
that no policy filters; and a database that has other transaction numbers than it had, because it was restored or went
back in time, is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

from ..cursor import Cursor, Snapshot, Window
from ..errors import LaneHaltedError, StoreError
from ..outbox import Announcement, Batch, Failure, Lane, LaneName, Page, Row, digest
from . import log_sql as sql
from .announced import Contents, contents_of, encode_detours, moved, position, settled, settled_at
from .append import Appender
from .failures import Failures, decode_headers, place, row_of
from .leases import Leases, confirm, fenced, lease_lost, stored, with_keys
from .origin import COPY
from .schema import SCHEMA_VERSION
from .statement import DirectStatement

logger = logging.getLogger("pillarbox")

_LOOK, _REQUEST, _REACHED, _IN_BOOK, _DUE = 2, 3, 4, 5, 6

SCAN = 20_000
"""How many rows a look goes through at most, where some of them are not for it."""
_WORTH_A_WRITE = 1_000
"""A detour that finds nothing moves on when this many rows, or more, lay between."""
_AT_ONCE = 500
"""How many rows of a detour are looked at together, to see whether any of them is to be sent."""


class LogStore(Appender, Leases):
    """`LaneStore`, `OutboxStore` and `Appends` on PostgreSQL."""

    def __init__(self, engine: AsyncEngine) -> None:
        Appender.__init__(self)
        Leases.__init__(self, engine)
        self._warned = False
        self._rows = RowReader()
        self._places: dict[LaneName, str] = {}
        """Where we have left the rows of lanes, on the disk."""

    def _take(self, connection: Connection, *arguments: Any) -> list[Lane]:
        guards = connection.execute(sql.GUARDS).one()
        if guards.standby:
            raise StoreError("this server is a standby: relays need the primary")
        taken = super()._take(connection, *arguments)
        if taken:
            self._check(guards)  # if it refuses, nothing is taken
        return taken

    def with_waiting_keys(self, connection: Connection, taken: list[Lane]) -> list[Lane]:
        names = {"routes": [lane.route.id for lane in taken], "shards": [lane.shard for lane in taken]}
        return with_keys(taken, connection.execute(sql.WAITING, names))

    def _check(self, guards: Any) -> None:
        """Refuse a database in which a cursor would mean something else than it meant when it was written."""
        _, original, cache, filtered, fsync, synchronous, schema = guards
        if schema > SCHEMA_VERSION:  # a newer release may keep in a lane what we would not look at
            raise StoreError(f"the database has schema version {schema}, newer than this relay: upgrade pillarbox")
        if not original:
            raise StoreError(COPY)
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

    def free_parked(self, connection: Connection, lane: Lane) -> None:
        confirm(connection, lane)
        connection.execute(sql.FREE_PARKED, place(lane))

    async def ready(self, routes: Collection[int], *, relay: str | None = None) -> frozenset[LaneName]:
        return await self.each_alone(_ready, sorted(routes), relay)

    async def poll(
        self,
        lane: Lane,
        *,
        limit: int,
        max_bytes: int = 4_194_304,
        paused: Collection[str] = (),
        detour: str | None = None,
    ) -> Page:
        try:
            return await self._look(lane, _Room(limit, max_bytes, self._rows), sorted(paused), detour)
        except LaneHaltedError:
            # A server that crashed may have forgotten what did not wait for its disk, and with it what we have seen.
            # Then the lane is where it was a moment before, for whoever takes it.
            if not await self._is_ours(lane):
                raise lease_lost(lane) from None
            raise

    async def _look(self, lane: Lane, room: _Room, paused: list[str], detour: str | None) -> Page:
        found: _Found | None = None
        if self._rows.at_a_glance and not (lane.detours or paused or detour):
            found, late = await self._glance(lane, room)
            if found is not None and not (found.asked or found.in_book or (found.due and lane.waiting)):
                return Page(redo=(), fresh=tuple(found.rows), passed=found.passed, cursor=found.look)
            room = room._replace(late=late)
        return await self.each_alone(_poll, lane, room, paused, detour, found)

    async def _glance(self, lane: Lane, room: _Room) -> tuple[_Found | None, bool | None]:
        start = position(lane)
        if start.paging is not None:
            return None, None
        question = _question(start, lane, room)
        return _Looked(start, room.limit, None).glance(await self.fetch(_glance(question), question))

    async def part(self, lane: Lane, tenants: Collection[str]) -> Lane:
        parted = {**(lane.detours or {}), **{it: lane.cursor for it in tenants if it not in (lane.detours or ())}}
        return await self.all_or_nothing(_divide, lane, parted)

    async def join(self, lane: Lane, tenants: Collection[str]) -> Lane:
        return await self.all_or_nothing(_join, lane, tenants)

    async def announce(self, lane: Lane, batch: Batch, *, settle: bool) -> Lane:
        lane.check_announced(wanted=settle)
        following, skipped = _following(lane, batch)
        if not (_redone(lane) or skipped or batch.failures or batch.parked or batch.requests):
            await self._write_at_once(lane, following, batch.cursor, relaxed=batch.relaxed)
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
        if failures or parked or attempts:
            if lane.announced is None:
                raise StoreError("there is no announced batch to amend")
            return await self.all_or_nothing(_amend, lane, failures, parked, attempts or {})
        if lane.announced is not None:
            await self.all_or_nothing(confirm, lane)
        elif not await self._is_ours(lane):  # nothing depends on it but whether we go on, so nothing is written
            raise lease_lost(lane)
        return lane

    async def settle(self, lane: Lane) -> Lane:
        lane.check_announced()
        following = settled(lane)
        if not _redone(lane):
            await self._write_at_once(lane, following)
            return following
        return await self.all_or_nothing(_settle, lane, following)

    async def rebuild(self, lane: Lane) -> list[tuple[int, Row]]:
        return await self.each_alone(_rebuild, lane)

    async def _is_ours(self, lane: Lane) -> bool:
        was_announced = stored(lane.announced)["announced"]
        return bool(await self.fetch(sql.STILL_OURS, {**_fence(lane), "was_announced": was_announced, "server": None}))

    async def _write_at_once(
        self, lane: Lane, following: Lane, look: Look | None = None, *, relaxed: bool = False
    ) -> None:
        """The common case, in one statement. If it is relaxed and the server crashes, a successor finds the lane as it
        was a moment before, and sends what came after it again. What is settled while nothing follows is never relaxed,
        so all of it is on the disk when a lane is idle.
        """
        parameters = {
            **_entry(lane),
            **_fence(lane),
            "was_announced": stored(lane.announced)["announced"],
            "announced": stored(following.announced)["announced"],
            "cursor": str(following.cursor),
            # None leaves them as they are: there may be many, and a batch moves one of them at most.
            "detours": None if following.detours is lane.detours else encode_detours(following.detours),
            "next_batch": following.batch,
            "next_number": following.next_number,
            "server": None if look is None else look.server,
        }
        settling = (sql.SETTLE, sql.SETTLE_RELAXED)[relaxed]
        announcing = (sql.ANNOUNCE, sql.ANNOUNCE_RELAXED)[relaxed]
        step = announcing if lane.announced is None else settling
        place = self._places.pop(lane.name, None)
        found: Sequence[Any] = ()
        if place is not None:
            found = await self.fetch(step.at_place, {**parameters, "place": place})
        if not found:  # somebody has changed it: we ourselves, who renew the lease, or one who owns it now
            found = await self.fetch(step.by_key, parameters)
        if not found:
            raise lease_lost(lane)
        self._places[lane.name] = found[0][0]


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
    detour: str | None = None
    """Whose rows they are, if it was a detour."""
    discarded: frozenset[int] = frozenset()
    """Those of the rows that are never to be sent."""


class RowReader:
    """How a look gets its rows: here all of them from the table, with the look itself."""

    at_a_glance: ClassVar[bool] = True
    """Whether a glance is one statement, and nothing else."""

    def glance(self, connection: Connection, parameters: dict[str, Any]) -> Sequence[Any]:
        """A look that is mostly enough; rows that are too large may lack their bodies."""
        return _glance(parameters).fetch(connection, parameters)

    def look(self, connection: Connection, looks: sql.Looks, parameters: dict[str, Any]) -> Sequence[Any]:
        """A closer look, with all bodies that the bytes allow."""
        found = looks.light.fetch(connection, parameters)
        if not _lacks_bodies(found):
            return found
        # It may leave out rows that were too much, so how far it has looked says nothing.
        return [values for values in looks.sized.fetch(connection, parameters) if values[0] != _REACHED]


class _Room(NamedTuple):
    """How much a page may hold, and where its rows come from."""

    limit: int
    max_bytes: int
    reader: RowReader
    late: bool | None = None
    """Whether a glance has shown late rows, if there was one already and it was not enough."""


class _Found(msgspec.Struct, frozen=True):
    look: Look
    rows: list[Row]
    asked: dict[int, int]
    """People's requests, each with the row that it is about."""
    passed: bool
    """Whether the cursor should move, even if there is nothing to send; else, whether there is more behind it."""
    in_a_crowd: bool = False
    due: bool = True
    """Whether failed rows may be due, as far as was looked."""
    in_book: bool = False
    """Whether some of the rows may have been discarded."""


def _poll(  # noqa: PLR0917  what one statement asks
    connection: Connection, lane: Lane, room: _Room, paused: list[str], detour: str | None, found: _Found | None
) -> Page:
    if found is not None:
        found = _without_discarded(found, connection, lane)
    elif detour is None or _may_find(lane, detour):
        found = _look(connection, lane, detour, room)
    redo: tuple[Row, ...] = ()
    if lane.waiting and (found is None or found.due):
        redo = tuple(Failures(connection, lane).redo(room.limit, room.max_bytes, paused))
    if found is None:
        return Page(redo=redo, fresh=())
    held = {tenant for row in found.rows if (tenant := row.tenant) is not None and tenant in paused} if paused else ()
    asked = found.asked
    if asked and (contents := contents_of(lane)) is not None:
        known = Failures(connection, lane).know(asked.values())
        asked = {it: row for it, row in asked.items() if row not in known or not contents.holds(known[row].ahead, lane)}
    if held:
        return Page(redo=redo, fresh=(), held=frozenset(held), requests=tuple(sorted(asked)))
    return Page(
        redo=redo,
        fresh=tuple(found.rows),
        passed=found.passed,
        in_a_crowd=found.in_a_crowd,
        requests=tuple(sorted(asked)),
        cursor=found.look,
    )


def _may_find(lane: Lane, detour: str) -> bool:
    """Whether the lane may have passed over anything since the detour was last looked at."""
    start, main = position(lane, detour), position(lane)
    return start.paging is not None or (start != main and main.leads(start))


def _look(connection: Connection, lane: Lane, detour: str | None, room: _Room) -> _Found:
    """What comes next, and with it the rows."""
    start = position(lane, detour)
    found = _look_from(start, connection, lane, detour, room)
    if start.paging is not None and not found.rows:  # what was left of the late rows goes by a detour
        behind = Cursor(start.high, start.paging)
        if detour is None or position(lane).leads(behind):
            found = _look_from(behind, connection, lane, detour, room)
        else:
            found = replace(found, look=replace(found.look, window=Window(behind, behind.seen)))
        found = replace(found, passed=True)
    return _without_discarded(found, connection, lane)


def _without_discarded(found: _Found, connection: Connection, lane: Lane) -> _Found:
    """What was found, without the rows that are never to be sent: the cursor passes over them."""
    if not found.in_book:
        return found
    asked = {"route": lane.route.id, "shard": lane.shard, "ids": [row.id for row in found.rows]}
    discarded = frozenset(row for (row,) in sql.DISCARDED.fetch(connection, asked))
    if not discarded:
        return found
    rows = [row for row in found.rows if row.id not in discarded]
    return replace(found, look=replace(found.look, discarded=discarded), rows=rows, passed=True)


def _question(start: Cursor, lane: Lane, room: _Room) -> dict[str, Any]:
    return {
        "route": lane.route.id,
        "shard": lane.shard,
        "high": start.high,
        "limit": room.limit,
        "max_bytes": room.max_bytes,
        "xmax": str(start.seen.xmax),
        "running": [str(xid) for xid in start.seen.running],
    }


def _glance(question: dict[str, Any]) -> DirectStatement:
    return sql.GLANCES[bool(question["running"])]


def _look_from(start: Cursor, connection: Connection, lane: Lane, detour: str | None, room: _Room) -> _Found:
    limit, reader, late = room.limit, room.reader, room.late
    parameters = _question(start, lane, room)
    poll, page = sql.POLL, sql.PAGE
    main: Cursor | None = None
    if lane.detours:
        poll, page = sql.DIVIDED_POLL, sql.DIVIDED_PAGE
        parameters |= _side(lane, detour) | {"snapshot": None, "up_to": None, "scan": SCAN}
        if detour is not None:
            main = position(lane)
            parameters |= {"snapshot": str(main.seen), "up_to": main.high}
    window = _Looked(start, limit, detour)
    if start.paging is not None:
        found = reader.look(connection, page, {**parameters, **_late(start.late), "done": start.done})
        window.check(found)
        return window.of(found, start.paging, start.late)
    if late is None and not lane.detours:
        glanced, late = window.glance(reader.glance(connection, parameters))
        if glanced is not None:
            return glanced
    found = reader.look(connection, poll, parameters)
    count, snapshot, xids = window.check(found)
    if main is not None:
        snapshot = main.seen  # a detour sees what the lane has passed over, and nothing else
    if count <= limit:
        return window.of(found, snapshot, xids)
    # More late rows than one batch takes. Then all that is needed to page through them is whose they are.
    more = connection.execute(sql.LATE_XIDS, {**parameters, "snapshot": str(snapshot)}).scalars()
    xids = tuple(sorted({*more, *(xid for xid in start.seen.running if snapshot.shows(xid))}))
    found = reader.look(connection, page, {**parameters, **_late(xids), "done": 0})
    return window.of(found, snapshot, xids)


def _side(lane: Lane, detour: str | None) -> dict[str, Any]:
    """Which tenants a statement is about."""
    return {"detour": detour, "passed_over": [] if detour is not None else sorted(lane.detours or ())}


def _lacks_bodies(found: Sequence[Any]) -> bool:
    return any([values[7] is None and values[0] < _LOOK for values in found])  # noqa: C419  faster


def _late(xids: Iterable[int]) -> dict[str, list[str]]:
    return {"late": [str(xid) for xid in xids]}


class _Looked(msgspec.Struct, frozen=True):
    """Makes sense of what a look has brought."""

    start: Cursor
    limit: int
    detour: str | None

    def check(self, found: Sequence[Any]) -> tuple[Any, Snapshot, tuple[int, ...]]:
        """How many late rows there are, or after a glance one of them; when we looked; and whose rows they are."""
        _, count, _, told, xids, refused, *_ = next(values for values in found if values[0] == _LOOK)
        if refused == "standby":
            raise StoreError("this server is a standby: its snapshots do not show who is at work on the primary")
        if refused == "filtered":
            raise StoreError(_FILTERED)
        snapshot, before = Snapshot.parse(told), self.start.paging or self.start.seen
        if snapshot.lies_below(before):
            raise LaneHaltedError(
                f"the lane has seen snapshot {before}, and the database is at {snapshot}: "
                "it went back in time, or is another one"
            )
        return count, snapshot, tuple(sorted(map(int, xids.split(",")))) if xids else ()

    def glance(self, found: Sequence[Any]) -> tuple[_Found | None, bool]:
        """What was found, if a glance is enough for it; and whether there are late rows."""
        late, snapshot, _ = self.check(found)
        if late is not None or _lacks_bodies(found):
            return None, late is not None
        return replace(self.of(found, snapshot), due=any(values[0] == _DUE for values in found)), False

    def of(self, found: Sequence[Any], snapshot: Snapshot, xids: tuple[int, ...] = ()) -> _Found:
        """What was found, as far as a batch takes it."""
        rows = [
            Row(row_id, event_id, topic, key, tenant, decode_headers(headers), body, 0)
            for part, row_id, event_id, topic, key, tenant, headers, body in found
            if part < _LOOK
        ]
        rows.sort(key=attrgetter("id"))
        cut = len(rows) > self.limit
        del rows[self.limit :]
        count, server = next((values[1] or 0, values[6]) for values in found if values[0] == _LOOK)
        late = min(count, sum(values[0] == 0 for values in found), self.limit)
        more = late < count
        if more:  # none of the fresh ones before the last late one
            del rows[late:]
        reach, seen, passed_late = next(
            ((it[1] or 0, int(it[3]), it[4]) for it in found if it[0] == _REACHED), (0, 0, None)
        )
        window = Window(
            self.start,
            snapshot,
            late=tuple(row.id for row in rows[:late]),
            fresh=tuple(row.id for row in rows[late:]),
            xids=xids,
            more=more,
            reach=0 if cut or more else reach,
        )
        step = 1 if self.detour is None else _WORTH_A_WRITE
        passed = self.start.paging is not None or seen >= SCAN  # what is behind them was not looked at
        if not rows:
            passed = passed or passed_late is not None or reach >= self.start.high + step
        in_book = next((values[1] for values in found if values[0] == _IN_BOOK), None)
        return _Found(
            Look(window, server, self.detour),
            rows,
            {values[1]: int(values[4]) for values in found if values[0] == _REQUEST},
            passed,
            in_a_crowd=seen >= SCAN and not rows,
            in_book=late > 0 or (bool(rows) and in_book is not None and in_book <= rows[-1].id),
        )


def _rebuild(connection: Connection, lane: Lane) -> list[tuple[int, Row]]:
    contents, announced = contents_of(lane), lane.announced
    if announced is None or contents is None:
        return []
    start, end = contents.ends(lane)
    parameters = {
        **place(lane),
        **_side(lane, contents.detour),
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
    lane.check_batch(found)
    if contents.attempts:
        attempts = contents.attempts
        found = [(number, replace(row, attempts=attempts.get(row.id, row.attempts))) for number, row in found]
    return found


# -- progress ----------------------------------------------------------------------------------------------------------


def _redone(lane: Lane) -> bool:
    """Whether failed rows are among what is announced: the book has something about them."""
    return lane.announced is not None and bool(lane.announced.details.get("redo"))


def _following(lane: Lane, batch: Batch) -> tuple[Lane, tuple[int, ...]]:
    """The lane once the batch is announced, and the rows that its cursor passes without sending them."""
    look: Look | None = batch.cursor
    detour = None if look is None else look.detour
    reached, items = position(lane, detour), tuple(batch.items)
    window = Window(reached, reached.seen) if look is None else look.window
    redo: tuple[int, ...] = ()
    natural, skipped = window.ids, redo
    if look is not None and items == natural:  # the whole page and nothing else, as it mostly is
        to = window.after(len(items))
    else:
        sent = {*items}
        dealt = {*items, *batch.parked, *(failure.row for failure in batch.failures)}
        if look is not None and (gone := look.discarded):
            dealt.update(takewhile(lambda row: row in dealt or row in gone, natural))
        to = reached if look is None else window.dealt_with(dealt)
        passed = [row for row in natural if row in dealt]
        skipped = tuple(row for row in passed if row not in sent)
        redo = tuple(sorted(sent.difference(passed)))
        natural = (*redo, *(row for row in passed if row in sent))
    following = replace(settled(lane), batch=lane.batch + 1, tries=0)
    if not items:
        return moved(following, detour, to), skipped
    first = lane.next_number
    contents = Contents(
        to=str(to),
        start=None if window.start == reached else str(window.start),
        detour=detour,
        redo=redo,
        skip=skipped,
    )
    announced = Announcement(
        first,
        len(items),
        digest(enumerate(items, start=first)),
        () if items == natural else items,
        {**batch.details, **msgspec.to_builtins(contents)},
    )
    return replace(following, next_number=first + len(items), announced=announced), skipped


def _fence(lane: Lane) -> dict[str, Any]:
    return {
        "route": lane.route.id,
        "shard": lane.shard,
        "batch": lane.batch,
        "epoch": lane.epoch,
        "token": str(lane.token),
    }


def _entry(lane: Lane, skipped: Sequence[int] = (), detour: str | None = None) -> dict[str, Any]:
    """What the journal says about the lane's batch."""
    entry: dict[str, Any] = {"route": lane.route.id, "shard": lane.shard, "batch": lane.batch}
    contents = contents_of(lane)
    if lane.announced is None or contents is None:
        cursor = settled_at(lane, detour)
        return entry | {
            "settled": str(cursor),
            "settled_high": cursor.high,
            "redone": [],
            "skipped": [*skipped],
            "first_number": lane.next_number,
            "count": 0,
            **_side(lane, detour),
        }
    out = {*contents.out}
    return entry | {
        "settled": contents.to,
        "settled_high": int(contents.to.partition(" ")[0]),
        "redone": [row for row in contents.redo if row not in out],
        "skipped": [*contents.skip, *contents.out],
        "first_number": lane.announced.first_number,
        "count": lane.announced.count,
        **_side(lane, contents.detour),
    }


def _announce(connection: Connection, lane: Lane, following: Lane, batch: Batch, skipped: tuple[int, ...]) -> Lane:
    if batch.cursor is not None and connection.execute(sql.SERVER).scalar_one() != batch.cursor.server:
        raise lease_lost(lane)
    _write(connection, lane, following)
    if skipped and following.announced is None:
        detour = None if batch.cursor is None else batch.cursor.detour
        connection.execute(sql.JOURNAL, _entry(following, skipped, detour))
    failures = Failures(connection, lane)
    failures.settle()
    failures.fail(batch.failures, skipped)
    failures.park(batch.parked, skipped)
    failures.carry_out(following, batch.requests)
    return failures.after(following)


def _write(connection: Connection, lane: Lane, following: Lane) -> None:
    fenced(
        connection,
        lane,
        batch=following.batch,
        next_number=following.next_number,
        tries=0,
        cursor=str(following.cursor),
        detours=encode_detours(following.detours),
        **stored(following.announced),
    )
    if lane.announced is not None:
        connection.execute(sql.JOURNAL, _entry(lane))


def _settle(connection: Connection, lane: Lane, following: Lane) -> Lane:
    _write(connection, lane, following)
    failures = Failures(connection, lane)
    failures.settle()
    return failures.after(following)


def _divide(connection: Connection, lane: Lane, detours: Mapping[str, Cursor]) -> Lane:
    """Change who has a detour. That is a batch without rows, so a successor of ours cannot take it for another one."""
    if lane.announced is not None:
        raise StoreError(f"lane {lane} has a batch under way: settle it first")
    following = replace(lane, batch=lane.batch + 1, tries=0, detours=detours)
    _write(connection, lane, following)
    return following


def _join(connection: Connection, lane: Lane, tenants: Collection[str]) -> Lane:
    detours = lane.detours or {}
    arrived = {it for it in tenants if it in detours and _has_arrived(connection, lane, it)}
    if not arrived:
        return lane
    return _divide(connection, lane, {tenant: at for tenant, at in detours.items() if tenant not in arrived})


def _has_arrived(connection: Connection, lane: Lane, detour: str) -> bool:
    """Whether the detour has nothing left of what the lane has passed over: then the lane's cursor speaks for it."""
    main, at = settled_at(lane), settled_at(lane, detour)
    while main.has_passed(at):
        found = _look(connection, lane, detour, _Room(_AT_ONCE, 1_048_576, RowReader()))
        if found.rows:
            return False
        if not found.passed:
            return True
        lane = moved(lane, detour, at := found.look.window.dealt_with(found.look.discarded))
    return False


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
    batch = {row for row in (*rows, *attempts) if row in known and contents.holds(known[row].ahead, lane)}
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
