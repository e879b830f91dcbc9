"""Retention: which deliveries have expired, and how they are found and deleted.

Age alone never deletes. A delivery must be final, so that no read can return to it:

- in a queue, and wherever the row itself has a status: it is SENT or DISCARDED;
- in a log: the settled cursor has passed it, and no read can find it again. Its id is not above ``high``, its
  transaction is older than all that were running at the lane's last read, and it waits in no failure row. A row with a
  low id that commits late is not final, and neither is a row of an announced batch.

The age of a row in a log is that of the batch that passed it, by the journal; after a failure, that of the first batch
that had it. Records of discards and edits are deleted with their rows. A journal entry is deleted when no row is left
that it is about.

Every function runs in a short transaction of its caller. A page of rows is found by an index behind the last one, so a
run reads each row once. Rows are deleted by their identity, if they are still expired. Relays and writers never touch
these rows, so neither side waits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, TextClause, and_, case, func, or_, select, text, tuple_

from ..clock import first_uuid7
from ..cursor import Cursor
from ..errors import StoreError
from ..outbox import OUTBOUND, TABLES, Status, stable_hash
from . import copy_check
from .append import route_record
from .audit import one_person_at_a_time
from .columns import from_now
from .log_sql import TELLS_ABOUT
from .queue_sql import with_json, words
from .tables import deliveries, lanes, routes

MINIMUM_AGE = 60.0
"""Minimum age in seconds: after a lost answer to COMMIT, the client searches for its row, which must still exist."""
_SCANNED = 5_000
_REMEMBERED = 1_000
_FIRST, _LAST = UUID(int=0), UUID(int=2**128 - 1)
_CLOCKS_DIFFER = 86_400.0


class RowKey(NamedTuple):
    """Identity of a row, and the size of its body."""

    id: int
    event_id: UUID
    route: int
    schema_version: int
    size: int


@dataclass(frozen=True, slots=True)
class Scope:
    """The deliveries to delete: of all routes or one, final before a time of the database's clock."""

    before: datetime
    now: datetime
    route: int | None = None
    tables: tuple[str, ...] = TABLES
    """Their tables."""


@dataclass(frozen=True, slots=True)
class Old:
    """Positions of a lane at the limit of age."""

    before: datetime
    passed: str
    """The cursor of its last batch before the limit."""
    told: Mapping[str, str | None]
    """The same for tenants whose detours are in the journal: their rows were sent later than the lane skipped them."""

    @property
    def reach(self) -> int:
        """The highest id that can be old enough."""
        cursors = [self.passed, *(cursor for cursor in self.told.values() if cursor is not None)]
        return max(int(cursor.partition(" ")[0]) for cursor in cursors)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a table that is read by one index: a lane of a log, or a range of the primary key."""

    route: int | None = None
    shard: int = 0
    old: Old | None = None
    """In a log, the positions of the journal. None in a lane whose journal is empty."""
    # Of event ids.
    first: UUID = _FIRST
    last: UUID = _LAST
    table: str = OUTBOUND


Position = tuple[Any, ...]
"""Key after which a read continues; empty at its start."""


@dataclass(frozen=True, slots=True)
class Page:
    """The expired rows of the next page, and the position after it; None at the end of the stretch."""

    keys: Sequence[RowKey]
    after: Position | None


# -- search ------------------------------------------------------------------------------------------------------------


def scope(
    connection: Connection, *, older_than: float, route: str | None = None, tables: tuple[str, ...] = TABLES
) -> Scope:
    """The scope for an age, now. Raises `StoreError` if this database cannot tell which rows are final, has no such
    route, or has its deliveries in none of these tables.
    """
    guard(connection)
    before, now = connection.execute(select(from_now(-older_than), from_now())).one()
    if route is None:
        return Scope(before, now, tables=tables)
    found = connection.execute(select(routes).where(routes.c.id == stable_hash(route))).one_or_none()
    if found is None:
        raise StoreError(f"there is no route {route!r}: see `pillarbox lanes list`")
    record = route_record(found._mapping)
    if record.table not in tables:
        raise StoreError(f"the deliveries of route {route!r} are in {record.table}, not in {', '.join(tables)}")
    return Scope(before, now, record.id, (record.table,))


def stretches(connection: Connection, scope: Scope) -> list[Stretch]:
    """The stretches to read, in this order: the lanes of a log, then ranges of ids, with few rows left by then."""
    if not _is_postgres(connection):
        return [Stretch(table=table) for table in scope.tables]
    found = []
    for row in connection.execute(_LOGS if scope.route is None else _LOGS.where(lanes.c.route == scope.route)).all():
        lane, table = {"route": row.id, "shard": row.shard}, route_record(row._mapping).table
        if table not in scope.tables:
            continue
        is_told = connection.execute(_JOURNALED, lane).first() is not None
        old = _old(connection, scope, lane) if is_told else None
        if old is None or old.reach:
            found.append(Stretch(row.id, row.shard, old, table=table))
    # Most event ids have the time of their event: between the limit of age and now, none is old enough.
    young, ahead = first_uuid7(scope.before.timestamp()), first_uuid7(scope.now.timestamp() + _CLOCKS_DIFFER)
    for table in scope.tables:
        found += [Stretch(last=young, table=table), Stretch(first=max(young, ahead), table=table)]
    return found


def page(connection: Connection, scope: Scope, stretch: Stretch, after: Position, limit: int) -> Page:
    """Read the next rows behind a position, at most ``limit``."""
    if stretch.route is not None:
        return _log_page(connection, scope, stretch, after, limit)
    # On PostgreSQL, row ids have no index of their own, and the identity is the primary key; elsewhere, the id is.
    postgres = _is_postgres(connection)
    o = deliveries[stretch.table].alias("o")
    position = (o.c.event_id, o.c.route, o.c.schema_version) if postgres else (o.c.id,)
    behind = []
    if after:
        behind = [tuple_(*position) > tuple_(*after) if postgres else o.c.id > after[0]]
    elif postgres and stretch.first != _FIRST:
        behind = [o.c.event_id >= stretch.first]
    if postgres and stretch.last != _LAST:
        behind.append(o.c.event_id < stretch.last)
    may_go = or_(
        and_(o.c.status == Status.SENT, func.coalesce(o.c.sent_at, o.c.created_at) < scope.before),
        and_(o.c.status == Status.DISCARDED, o.c.created_at < scope.before),
    )
    if scope.route is not None:
        may_go = and_(may_go, o.c.route == scope.route)
    rows = connection.execute(
        select(
            o.c.id,
            o.c.event_id,
            o.c.route,
            o.c.schema_version,
            func.length(o.c.body),
            case((may_go, 1), else_=0),
            case((o.c.created_at < scope.before, 1), else_=0).label("old"),
        )
        .where(*behind)
        .order_by(*position)
        .limit(limit)
    ).all()
    ends = len(rows) < limit or not (postgres or any(row.old for row in rows))  # ids rise with time
    last = rows[-1] if rows else None
    at = None if ends or last is None else (last.event_id, last.route, last.schema_version) if postgres else (last.id,)
    return Page(_keys(rows), at)


def _log_page(connection: Connection, scope: Scope, stretch: Stretch, after: Position, limit: int) -> Page:
    asked = {
        "route": stretch.route,
        "shard": stretch.shard,
        "after": after[0] if after else 0,
        "before": scope.before,
        "limit": limit,
        **by_journal(stretch.old),
    }
    of_range = (stretch.first, stretch.last) != (_FIRST, _LAST)
    if of_range:
        asked |= {"first": str(stretch.first), "last": str(stretch.last)}
    rows = connection.execute(_page_of(stretch.table, of_range=of_range), asked).all()
    return Page(_keys(rows), (rows[-1].id,) if len(rows) == limit else None)


def _keys(rows: Sequence[Any]) -> list[RowKey]:
    return [RowKey(*row[:5]) for row in rows if row[5]]


def by_journal(old: Old | None) -> dict[str, Any]:
    """The parameters of `OLD`."""
    if old is None:
        return {"passed": None, "told": None, "reach": None}
    return {"passed": old.passed, "told": json.dumps(dict(old.told)), "reach": old.reach}


def _old(connection: Connection, scope: Scope, lane: Mapping[str, Any]) -> Old:
    last: Any = None
    while True:
        at = {"high": -1, "batch": -1} if last is None else {"high": last.high, "batch": last.batch}
        rows = connection.execute(_SETTLED, {**lane, **at, "before": scope.before, "limit": _SCANNED}).all()
        old = [row for row in rows if row.old]
        last = old[-1] if old else last
        if len(old) < _SCANNED:
            break
    told = dict[str, str | None]()
    for tenant, cursor, batch in connection.execute(_BY_DETOUR, {**lane, "before": scope.before}):
        # The lane itself has sent a tenant's rows before its detour began or after it ended. So the later of the two
        # cursors covers the other one.
        ours = last is not None and tenant not in last.passed_over and last.batch > (batch or 0)
        told[tenant] = last.cursor if ours else cursor
    return Old(scope.before, str(Cursor()) if last is None else last.cursor, told)


def _is_postgres(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"


def guard(connection: Connection) -> None:
    """Refuse to prune a log whose cursors have lost their meaning, or whose failures are hidden by a row filter."""
    if not _is_postgres(connection):
        return
    state = copy_check.state(connection)
    if state.standby:
        raise StoreError("this server is a standby: retention needs the primary")
    if state.filtered:
        raise StoreError(
            "row level security hides rows of Pillarbox's tables from this role: use one with BYPASSRLS, or the owner"
        )
    if not state.original:
        raise StoreError(copy_check.COPY)


# -- deletion ----------------------------------------------------------------------------------------------------------


def remove(connection: Connection, keys: Sequence[RowKey], table: str = OUTBOUND) -> int:
    """Delete the given rows that are still expired, with the records about them. Returns their number."""
    alone(connection)
    if not keys:
        return 0
    if not _is_postgres(connection):
        told = {"ids": sorted(key.id for key in keys)}
        from_the_book, from_the_table = map(with_json, words(connection.dialect.name, table).remove)
        connection.execute(from_the_book, told)
        return int(connection.execute(from_the_table, told).rowcount)
    guard(connection)
    return int(connection.execute(_removal(table), identities(keys)).scalar_one())


def identities(keys: Sequence[RowKey]) -> dict[str, list[Any]]:
    """Keys as arrays."""
    return {
        "ids": [key.id for key in keys],
        "events": [str(key.event_id) for key in keys],
        "routes": [key.route for key in keys],
        "versions": [key.schema_version for key in keys],
    }


def clear_journal(connection: Connection, stretch: Stretch, after: Position, limit: int) -> tuple[int, Position | None]:
    """Read at most ``limit`` entries of a lane's journal, and delete those without a remaining row. Returns the number
    of deleted entries and the next position. For lanes whose rows were read to the end.
    """
    if stretch.route is None or stretch.old is None:
        return 0, None
    alone(connection)
    high = stretch.old.reach
    lane = {"route": stretch.route, "shard": stretch.shard, "high": high}
    rows = connection.execute(_remaining(stretch.table), {**lane, "limit": _REMEMBERED + 1}).all()
    bound = high + 1
    if len(rows) > _REMEMBERED:
        bound = max(row.id for row in rows)
        rows = [row for row in rows if row.id < bound]
    needed: Sequence[Any] = ()
    if rows:
        left = {"ids": [row.id for row in rows], "xids": [row.xid for row in rows]}
        left["tenants"] = [row.tenant for row in rows]
        needed = connection.execute(_NEEDED, {**lane, **left, "lowest": min(left["ids"])}).all()
    gone, seen, *last = connection.execute(
        _CLEAR,
        {
            **lane,
            "before": stretch.old.before,
            "bound": bound,
            "after_high": after[0] if after else -1,
            "after_batch": after[1] if after else -1,
            "needed_high": [row.high for row in needed],
            "needed_batch": [row.batch for row in needed],
            "limit": limit,
        },
    ).one()
    return gone, tuple(last) if seen == limit else None


def alone(connection: Connection) -> None:
    """Let operators take turns, and force indexes in this transaction."""
    one_person_at_a_time(connection)
    if _is_postgres(connection):
        connection.execute(_BY_INDEX)


# -- statements for logs -----------------------------------------------------------------------------------------------

_HIGH = "CAST(split_part(l.cursor, ' ', 1) AS bigint)"
_WAITS = """(
        SELECT f.row_id FROM pillarbox_failures f
        WHERE f.route = o.route AND f.shard = o.shard AND f.row_id = o.id
          AND f.status IN ('RETRYING', 'PARKED', 'FAILED')
        LIMIT 1
    )"""
_CURSOR = "pillarbox_cursor(l.cursor, l.detours, o.tenant)"
_XMIN = f"pg_snapshot_xmin(CAST(split_part({_CURSOR}, ' ', 2) AS pg_snapshot))"
BEHIND = f"""(
    o.status = 'PENDING' AND o.id <= CAST(split_part({_CURSOR}, ' ', 1) AS bigint)
    AND (o.xid IS NULL OR o.xid < {_XMIN}) AND {_XMIN} <= pg_snapshot_xmin(pg_current_snapshot()) AND {_WAITS} IS NULL
)"""
"""Whether no read can find a row of a log again. One statement reads the lane's row and the failures, and a cursor
passes a row in the transaction that writes its failure.
"""

_BY_INDEX = text("SELECT set_config('enable_seqscan', 'off', true)")
"""Force indexes in this transaction: every query has one, regardless of statistics."""
_LOGS = select(lanes.c.shard, routes).join(routes, routes.c.id == lanes.c.route).order_by(lanes.c.route, lanes.c.shard)
_JOURNALED = text("SELECT 1 FROM pillarbox_journal j WHERE j.route = :route AND j.shard = :shard LIMIT 1")
_SETTLED = text(
    """
    SELECT j.high, j.batch, j.cursor, j.passed_over, j.settled_at < :before AS old FROM pillarbox_journal j
    WHERE j.route = :route AND j.shard = :shard AND j.detour IS NULL
      AND (j.high, j.batch) > (CAST(:high AS bigint), CAST(:batch AS bigint))
    ORDER BY j.high, j.batch LIMIT :limit
    """
)
_BY_DETOUR = text(
    """
    SELECT DISTINCT ON (j.detour) j.detour, CASE WHEN j.settled_at < :before THEN j.cursor END,
           CASE WHEN j.settled_at < :before THEN j.batch END
    FROM pillarbox_journal j WHERE j.route = :route AND j.shard = :shard AND j.detour IS NOT NULL
    ORDER BY j.detour, j.settled_at < :before DESC, j.batch DESC
    """
)
OLD = """(CASE
    WHEN jsonb_exists(CAST({told} AS jsonb), o.tenant)
    THEN coalesce(pillarbox_covered(CAST({told} AS jsonb) ->> o.tenant, o.id, o.xid), false)
    ELSE {passed} IS NULL OR pillarbox_covered({passed}, o.id, o.xid)
END)"""
"""Whether, by the journal, a row was final before the limit of age. True if the journal is empty."""
_OLD = OLD.format(told="CAST(:told AS text)", passed="CAST(:passed AS text)")
_OF_RANGE = "AND o.event_id >= CAST(:first AS uuid) AND o.event_id < CAST(:last AS uuid)"


@cache
def _page_of(table: str, *, of_range: bool) -> TextClause:
    """The next rows of a lane; with ``of_range``, only in the partitions of a range."""
    return text(
        f"""
        SELECT o.id, o.event_id, o.route, o.schema_version, length(o.body), {BEHIND} AND o.created_at < :before
               AND {_OLD} AS may_go
        FROM pillarbox_lanes l CROSS JOIN LATERAL (
            SELECT o.* FROM {table} o
            WHERE o.route = l.route AND o.shard = l.shard AND o.status = 'PENDING'
              AND o.id > :after {_OF_RANGE if of_range else ""} AND o.id <= least({_HIGH}, CAST(:reach AS bigint))
            ORDER BY o.id LIMIT :limit
        ) o
        WHERE l.route = :route AND l.shard = :shard ORDER BY o.id
        """  # noqa: S608  constants
    )


@cache
def _removal(table: str) -> TextClause:
    """Delete rows by their physical places, which do not change: a final row, or a row of a log, is never updated."""
    return text(
        f"""
        WITH found AS MATERIALIZED (
            SELECT found.part, found.place
            FROM unnest(CAST(:ids AS bigint[]), CAST(:events AS uuid[]), CAST(:routes AS bigint[]),
                        CAST(:versions AS integer[])) AS w(id, event_id, route, schema_version)
            CROSS JOIN LATERAL (
                SELECT o.tableoid AS part, o.ctid AS place FROM {table} o
                LEFT JOIN pillarbox_lanes l ON l.route = o.route AND l.shard = o.shard
                WHERE o.event_id = w.event_id AND o.route = w.route AND o.schema_version = w.schema_version
                  AND o.id = w.id AND (o.status IN ('SENT', 'DISCARDED') OR {BEHIND})
                LIMIT 1
            ) found
        ), gone AS (
            DELETE FROM {table}
            WHERE ctid = ANY (ARRAY(SELECT place FROM found)) AND (tableoid, ctid) IN (SELECT part, place FROM found)
            RETURNING route, shard, id
        ), records AS (
            DELETE FROM pillarbox_failures f USING gone
            WHERE f.route = gone.route AND f.shard = gone.shard AND f.row_id = gone.id
              AND f.status IN ('DISCARDED', 'SENT')
        )
        SELECT count(*) FROM gone
        """  # noqa: S608  constants
    )


@cache
def _remaining(table: str) -> TextClause:
    """The rows that remain behind the cursors: failures, mostly."""
    return text(
        f"""
        SELECT o.id, CAST(o.xid AS text) AS xid, o.tenant
        FROM pillarbox_lanes l CROSS JOIN LATERAL (
            SELECT o.id, o.xid, o.tenant FROM {table} o
            WHERE o.route = l.route AND o.shard = l.shard AND o.status = 'PENDING'
              AND o.id <= :high AND pillarbox_covered({_CURSOR}, o.id, o.xid)
            ORDER BY o.id LIMIT :limit
        ) o
        WHERE l.route = :route AND l.shard = :shard ORDER BY o.id LIMIT :limit
        """  # noqa: S608  constants
    )


_NEEDED = text(
    f"""
    SELECT j.high, j.batch
    FROM unnest(CAST(:ids AS bigint[]), CAST(CAST(:xids AS text[]) AS xid8[]), CAST(:tenants AS text[]))
        AS o(id, xid, tenant) CROSS JOIN LATERAL (
        SELECT j.high, j.batch FROM pillarbox_journal j
        WHERE j.route = :route AND j.shard = :shard AND j.high >= o.id AND pillarbox_covered(j.cursor, o.id, o.xid)
          AND {TELLS_ABOUT}
        ORDER BY j.high, j.batch LIMIT 1
    ) j
    UNION
    SELECT j.high, j.batch FROM pillarbox_journal j
    WHERE j.route = :route AND j.shard = :shard AND j.high >= :lowest AND j.high <= :high
      AND j.redone && CAST(:ids AS bigint[])
    """  # noqa: S608  constants
)
_CLEAR = text(
    """
    WITH page AS (
        SELECT j.high, j.batch FROM pillarbox_journal j
        WHERE j.route = :route AND j.shard = :shard
          AND (j.high, j.batch) > (CAST(:after_high AS bigint), CAST(:after_batch AS bigint))
          AND j.high < :bound AND j.settled_at < :before
        ORDER BY j.high, j.batch LIMIT :limit
    ), gone AS (
        DELETE FROM pillarbox_journal j USING page
        WHERE j.route = :route AND j.shard = :shard AND j.high = page.high AND j.batch = page.batch
          AND NOT EXISTS (
            SELECT FROM unnest(CAST(:needed_high AS bigint[]), CAST(:needed_batch AS bigint[])) AS n(high, batch)
            WHERE n.high = page.high AND n.batch = page.batch
          )
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM page), last.high, last.batch
    FROM (SELECT) AS once LEFT JOIN (SELECT * FROM page ORDER BY high DESC, batch DESC LIMIT 1) AS last ON true
    """
)
