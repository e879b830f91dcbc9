"""Rebase: turns a copy of a log, made by a dump or by logical replication, into an original.

In a copy, rows and cursors have transaction ids of another server. They are consistent with each other, so unfinished
rows can still be determined. But new rows get ids of this server, which have no defined order to the old cursors.
`rebase` reads the old ids once more, and leaves none that a cursor would ever compare:

- A row that is finished, or that no cursor has reached, needs no id: `NULL` is older than every snapshot. Most rows of
  a large source have ids that were not reached here yet, so this writes the table once. It does not change the meaning
  of the copy, so it is done first, in portions: `forget`. It can be interrupted and repeated. Ids that are in the past
  here, too, may stay.
- An unfinished row that a cursor has passed, because it was late or in an announced batch, becomes a row of the
  rebasing transaction, which the new cursor does not show. So it is late again, and precedes all fresh rows, in the
  order of its id. It keeps its id, so references to it stay valid.
- An announced batch is dissolved. Its numbers are not used again. Those of its rows that precede a failed one of their
  key become failed rows that are due at once, because failed rows are sent in the order of their ids.

Everything but `forget` is one transaction, under locks that block all writers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, TextClause, select, text, update

from .. import clock
from ..cursor import Snapshot
from ..errors import StoreError
from ..outbox import TABLES
from . import copy_check
from .audit import Author, note, one_person_at_a_time
from .tables import lanes, meta

PORTION = 10_000
"""Rows that `forget` reads in one transaction."""

_LANES = """
    SELECT l.route, l.shard, l.cursor, l.detours, CAST(split_part(l.cursor, ' ', 1) AS bigint) AS high,
           CAST(split_part(l.cursor, ' ', 2) AS pg_snapshot) AS seen, l.announced IS NOT NULL AS sending,
           greatest(CAST(split_part(l.cursor, ' ', 1) AS bigint),
                    CAST(split_part(CAST(l.announced AS json) -> 'details' ->> 'to', ' ', 1) AS bigint)) AS reached
    FROM pillarbox_lanes l
"""
_HERE = "o.route = l.route AND o.shard = l.shard"
_FAILURE = "f.route = o.route AND f.shard = o.shard"
_COVERED = "pillarbox_covered(pillarbox_cursor(l.cursor, l.detours, o.tenant), o.id, o.xid)"


def _undone(table: str) -> str:
    """Unfinished rows that a cursor or an announcement has passed, each once: a row that the lane covers is unfinished
    only if its detour does not cover it. Failed rows need no change.
    """
    return f"""
    SELECT o.event_id, o.route, o.shard, o.schema_version, o.id, o.tenant, o.key
    FROM ({_LANES}) l CROSS JOIN LATERAL (
        SELECT o.* FROM {table} o
        WHERE {_HERE} AND o.status = 'PENDING' AND o.id > l.high AND o.id <= l.reached
        UNION ALL
        SELECT o.* FROM pg_snapshot_xip(l.seen) AS running(xid) JOIN {table} o ON o.xid = running.xid
        WHERE {_HERE} AND o.id <= l.high
          AND NOT {_COVERED} AND NOT pillarbox_covered(l.cursor, o.id, o.xid)
        UNION ALL
        SELECT o.* FROM {table} o
        WHERE {_HERE} AND o.xid >= pg_snapshot_xmax(l.seen) AND o.id <= l.high
          AND NOT {_COVERED} AND NOT pillarbox_covered(l.cursor, o.id, o.xid)
        UNION ALL
        SELECT o.* FROM jsonb_each_text(CAST(l.detours AS jsonb)) AS d(tenant, cursor)
        JOIN {table} o ON {_HERE} AND o.tenant = d.tenant
        WHERE o.status = 'PENDING' AND o.id <= l.high
          AND pillarbox_covered(l.cursor, o.id, o.xid) AND NOT pillarbox_covered(d.cursor, o.id, o.xid)
    ) o
    WHERE NOT EXISTS (SELECT FROM pillarbox_failures f WHERE {_FAILURE} AND f.row_id = o.id)
"""  # noqa: S608  constants


@dataclass(frozen=True, slots=True)
class Survey:
    """The unfinished rows of a copy."""

    lanes: int
    batches: int
    """Announced batches that are not settled."""
    late: int
    """Unfinished rows that were passed, including those of the batches."""
    fresh: int
    """Rows that no cursor has reached."""
    failed: int
    """Rows that are retrying, parked or failed."""


def survey(connection: Connection) -> Survey:
    """Count the unfinished rows. Raises an error if there is nothing to rebase, or if it is not possible now."""
    _check(connection)
    lanes, batches, failed = connection.execute(_LANES_AND_FAILED).one()
    counts = [connection.execute(each.survey).one() for each in _EACH.values()]
    return Survey(lanes, batches, sum(late for late, _ in counts), sum(fresh for _, fresh in counts), failed)


def _check(connection: Connection) -> None:
    if connection.dialect.name != "postgresql":
        raise StoreError("only a PostgreSQL has transactions with numbers: here there is nothing to rebase")
    state = copy_check.state(connection)
    if state.original:
        raise StoreError(
            "this database is no copy: its transactions have the numbers that lanes remember, so nothing is to be done"
        )
    if state.standby:
        raise StoreError("this server is a standby: promote it first")
    if state.filtered:
        raise StoreError("row level security hides rows of Pillarbox's tables from this role: rebase as their owner")
    leased = connection.execute(_LEASED).all()
    if leased:
        names = ", ".join(f"{row.name}/{row.shard}" for row in leased[:3]) + (", ..." if len(leased) > 3 else "")
        raise StoreError(
            f"lanes are leased until {leased[0].until:%Y-%m-%d %H:%M:%S} UTC ({names}): stop the relays, or wait until "
            "the leases that were copied are over"
        )


def forget(connection: Connection) -> int:
    """Remove transaction ids from rows that need none, each portion in its own transaction. Returns the number of rows.

    The meaning of a row does not depend on such an id, so an interrupted copy is still the same copy.
    """
    _check(connection)
    oldest = connection.execute(text("SELECT CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text)")).scalar_one()
    connection.commit()
    return sum(_forget(connection, each, oldest) for each in _EACH.values())


def _forget(connection: Connection, about: _Statements, oldest: str) -> int:
    event, route, version, forgotten = UUID(int=0), -(2**63), 0, 0
    while True:
        connection.execute(_IN_ORDER)
        behind = {"event": str(event), "route": route, "version": version}
        page = connection.execute(about.forget, {**behind, "oldest": oldest, "limit": PORTION}).first()
        connection.commit()
        if page is None:
            return forgotten
        event, route, version, count = page
        forgotten += count


def rebase(connection: Connection, author: Author, *, new_install_id: bool = False) -> tuple[Survey, UUID, int]:
    """Rebase in the caller's transaction. Returns the survey, the install id and the number of the audit entry."""
    # With these locks, all writers have committed or rolled back, and the next statement sees all rows.
    connection.execute(text("SET LOCAL lock_timeout = '10s'"))
    one_person_at_a_time(connection)
    connection.execute(text(f"LOCK TABLE pillarbox_lanes, {', '.join(TABLES)} IN SHARE ROW EXCLUSIVE MODE"))
    found = survey(connection)
    for each in _EACH.values():
        _draw_ids_above_all(connection, each)
    told, number = connection.execute(text("SELECT CAST(pg_current_snapshot() AS text), pg_current_xact_id()")).one()
    seen = _before(Snapshot.parse(told), int(number))
    for each in _EACH.values():
        connection.execute(each.before_failed)
        connection.execute(each.late)
        connection.execute(each.forget_the_rest, {"oldest": str(seen.xmin)})
    connection.execute(_MOVE, {"seen": str(seen)})
    connection.execute(
        update(lanes).values(
            epoch=lanes.c.epoch + 1, **dict.fromkeys(("token", "locked_by", "locked_until", "trouble", "trouble_until"))
        )
    )
    for statement in map(text, copy_check.WRITE):
        connection.execute(statement)
    before: UUID = connection.execute(select(meta.c.install_id)).scalar_one()
    install = clock.new_id() if new_install_id else before
    connection.execute(update(meta).values(install_id=install))
    details: dict[str, Any] = {**asdict(found), "install_id": str(install)}
    if new_install_id:
        details["old_install_id"] = str(before)
    return found, install, note(connection, author, "rebase", "database", details=details)


def _before(snapshot: Snapshot, number: int) -> Snapshot:
    """The snapshot without this transaction and all later ones. The own transaction id is in no readable list of
    running ones, so it would otherwise count as ended.
    """
    xmax = min(snapshot.xmax, number)
    return Snapshot(min(snapshot.xmin, xmax), xmax, tuple(xid for xid in snapshot.running if xid < xmax))


def _draw_ids_above_all(connection: Connection, about: _Statements) -> None:
    """Give new ids to rows that were written here too early. A dump copies the sequence, logical replication does not:
    rows written before the rebase then have ids from its beginning, far below the cursors.
    """
    sequence, drawn, highest = connection.execute(about.ids).one()
    if drawn >= highest:
        return
    moved = connection.execute(about.move_up, {"drawn": drawn, "highest": highest}).rowcount
    connection.execute(text("SELECT setval(CAST(:it AS regclass), :to)"), {"it": sequence, "to": highest + moved})


_LEASED = text(
    """
    SELECT r.name, l.shard, max(l.locked_until) OVER () AT TIME ZONE 'UTC' AS until
    FROM pillarbox_lanes l JOIN pillarbox_routes r ON r.id = l.route
    WHERE l.locked_until > clock_timestamp() ORDER BY 1, 2
    """
)
_LANES_AND_FAILED = text(
    f"""
    SELECT (SELECT count(*) FROM ({_LANES}) l), (SELECT count(*) FROM ({_LANES}) l WHERE sending),
           (SELECT count(*) FROM ({_LANES}) l JOIN pillarbox_failures f
                ON f.route = l.route AND f.shard = l.shard AND f.status IN ('RETRYING', 'PARKED', 'FAILED'))
    """  # noqa: S608  constants
)


@dataclass(frozen=True, slots=True)
class _Statements:
    """The statements about one table of deliveries."""

    survey: TextClause
    forget: TextClause
    before_failed: TextClause
    late: TextClause
    forget_the_rest: TextClause
    ids: TextClause
    move_up: TextClause


# A fresh copy has no statistics: without this, each portion might read and sort all remaining rows.
_IN_ORDER = text("SELECT set_config(name, 'off', true) FROM (VALUES ('enable_seqscan'), ('enable_bitmapscan')) s(name)")
_MOVE = text(
    f"""
    UPDATE pillarbox_lanes l
    SET cursor = p.reached || ' ' || CAST(:seen AS text), announced = NULL, announced_low = NULL, announced_high = NULL,
        detours = NULL, tries = 0, batch = batch + 1
    FROM ({_LANES}) p WHERE p.route = l.route AND p.shard = l.shard
    """  # noqa: S608  constants
)


def _statements(table: str) -> _Statements:
    undone = _undone(table)
    return _Statements(
        survey=text(
            f"""
            SELECT (SELECT count(*) FROM ({undone}) u),
                   (SELECT count(*) FROM ({_LANES}) l JOIN {table} o
                        ON {_HERE} AND o.status = 'PENDING' AND o.id > l.reached
                    WHERE NOT EXISTS (SELECT FROM pillarbox_failures f WHERE {_FAILURE} AND f.row_id = o.id))
            """  # noqa: S608  constants
        ),
        # By the primary key, so that the table is read once. Rows that were written here keep their transaction ids,
        # which later tell them from copied rows.
        forget=text(
            f"""
            WITH page AS MATERIALIZED (
                SELECT o.event_id, o.route, o.schema_version, o.shard, o.id, o.xid, o.tenant, o.tableoid AS part,
                       o.ctid AS place, CAST(o.xid AS xid) = o.xmin AS ours
                FROM {table} o
                WHERE (o.event_id, o.route, o.schema_version)
                      > (CAST(:event AS uuid), CAST(:route AS bigint), CAST(:version AS integer))
                ORDER BY o.event_id, o.route, o.schema_version LIMIT :limit
            ), done AS (
                UPDATE {table} o SET xid = NULL
                FROM page p JOIN ({_LANES}) l ON l.route = p.route AND l.shard = p.shard
                WHERE o.ctid = p.place AND o.tableoid = p.part
                  AND p.xid >= CAST(CAST(:oldest AS text) AS xid8) AND NOT p.ours
                  AND (p.id > l.reached
                       OR pillarbox_covered(pillarbox_cursor(l.cursor, l.detours, p.tenant), p.id, p.xid))
                RETURNING 1
            )
            SELECT event_id, route, schema_version, (SELECT count(*) FROM done) FROM page
            ORDER BY event_id DESC, route DESC, schema_version DESC LIMIT 1
            """  # noqa: S608  constants
        ),
        before_failed=text(
            f"""
            INSERT INTO pillarbox_failures (route, shard, row_id, tenant, key, status, available_at)
            SELECT o.route, o.shard, o.id, o.tenant, o.key, 'RETRYING', clock_timestamp() FROM ({undone}) o
            WHERE EXISTS (
                SELECT FROM pillarbox_failures f
                WHERE {_FAILURE} AND f.key = o.key AND f.tenant IS NOT DISTINCT FROM o.tenant AND f.row_id > o.id
                  AND f.status IN ('RETRYING', 'PARKED', 'FAILED')
            )
            """  # noqa: S608  constants
        ),
        late=text(
            f"""
            UPDATE {table} o SET xid = pg_current_xact_id() FROM ({undone}) u
            WHERE o.event_id = u.event_id AND o.route = u.route AND o.schema_version = u.schema_version
            """  # noqa: S608  constants
        ),
        # A transaction id of the source may equal the current one. Rows that were just written are recognized by their
        # xmin.
        forget_the_rest=text(
            f"""
            UPDATE {table} o SET xid = NULL FROM pillarbox_lanes l
            WHERE {_HERE} AND o.xid >= CAST(CAST(:oldest AS text) AS xid8)
              AND o.xmin <> CAST(pg_current_xact_id() AS xid)
            """  # noqa: S608  constants
        ),
        ids=text(
            f"""
            SELECT s.name, coalesce(pg_sequence_last_value(CAST(s.name AS regclass)), 0),
                   (SELECT coalesce(max(id), 0) FROM {table})
            FROM pg_get_serial_sequence('{table}', 'id') AS s(name)
            """  # noqa: S608  constants
        ),
        move_up=text(
            f"""
            UPDATE {table} o SET id = n.id
            FROM (
                SELECT event_id, route, schema_version, :highest + row_number() OVER (ORDER BY id) AS id FROM {table}
                WHERE id <= :drawn AND CAST(xid AS xid) = xmin
            ) n
            WHERE o.event_id = n.event_id AND o.route = n.route AND o.schema_version = n.schema_version
            """  # noqa: S608  constants
        ),
    )


_EACH = {table: _statements(table) for table in TABLES}
