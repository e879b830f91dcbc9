"""The failure book of a log: its statements on PostgreSQL, and the failed rows that a lane's cursors have passed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from msgspec.structs import astuple
from sqlalchemy import text

from ..outbox import Lane
from .announced import contents_of, detour_of, position
from .failures import Book, Failures, Known, Written
from .look_sql import FRESH, ROW, sized

DUE = "f.status = 'RETRYING' AND f.available_at <= (SELECT clock_timestamp())"
_FAILURE = "f.route = :route AND f.shard = :shard"
_PARKS = "CAST(:parks AS boolean)"
_WAITING = "f.status IN ('RETRYING', 'PARKED', 'FAILED')"
_NOT_SENDING = "f.row_id <> ALL (CAST(:sending AS bigint[]))"


def _blocks(rows: str, tenant: str, parks: str = _PARKS) -> str:
    """Whether a row is of this tenant, in the form of the index, and later ones of its key must not overtake it."""
    same = f"coalesce({rows}.tenant, '') = coalesce({tenant}, '')"
    return f"{same} AND ({rows}.status <> 'FAILED' OR {parks})"


def first_of_its_key(parks: str = _PARKS) -> str:
    """Whether a failure is the first of its key that later ones must not overtake."""
    return f"""f.row_id = (
        SELECT b.row_id FROM pillarbox_failures b
        WHERE b.key = f.key AND b.route = f.route AND b.shard = f.shard AND b.status IN ('RETRYING', 'PARKED', 'FAILED')
          AND {_blocks("b", "f.tenant", parks)}
        ORDER BY b.row_id LIMIT 1)"""  # noqa: S608  constants


def _delivery_of(failures: str, table: str) -> str:
    """Failures with the content of their rows, or with the edited content."""
    return f"""
        SELECT f.row_id AS id, coalesce(f.event_id, o.event_id) AS event_id, o.topic, o.key, o.tenant,
               coalesce(f.headers, o.headers) AS headers, coalesce(f.body, o.body) AS body,
               f.attempts, f.status, o.schema_version
        FROM ({failures}) f CROSS JOIN LATERAL (
            SELECT o.* FROM {table} o WHERE {FRESH} AND o.id = f.row_id ORDER BY o.id LIMIT 1
        ) o"""  # noqa: S608  constants


_HEADS = f"""
    SELECT f.* FROM pillarbox_failures f
    WHERE {_FAILURE} AND {DUE} AND {_NOT_SENDING}
      AND (f.tenant IS NULL OR f.tenant <> ALL (CAST(:paused AS text[]))) AND {first_of_its_key()}
    ORDER BY f.available_at LIMIT :limit"""  # noqa: S608  constants
_FOLLOWERS = f"""
    SELECT f.row_id, f.event_id, f.headers, f.body, f.attempts,
           CASE WHEN f.status = 'PARKED' OR ({DUE}) THEN 'due' ELSE f.status END AS status
    FROM pillarbox_failures f
    WHERE {_FAILURE} AND f.key = :key AND f.row_id > :after AND {_WAITING} AND {_NOT_SENDING}
      AND {_blocks("f", "CAST(:tenant AS text)")}
    ORDER BY f.row_id LIMIT :limit"""  # noqa: S608  constants
_NAMED = f"SELECT f.* FROM pillarbox_failures f WHERE {_FAILURE} AND f.row_id = ANY (CAST(:ids AS bigint[]))"  # noqa: S608

_FAILED = text(
    f"SELECT f.row_id, f.status, f.attempts, f.tenant, f.key FROM pillarbox_failures f "  # noqa: S608
    f"WHERE {_FAILURE} AND f.row_id = ANY (CAST(:ids AS bigint[]))"
)

_WRITE = text(
    """
    INSERT INTO pillarbox_failures AS f
        (route, shard, row_id, tenant, key, status, attempts, available_at, last_error)
    SELECT :route, :shard, v.row_id, v.tenant, v.key, v.status, v.attempts,
           clock_timestamp() + make_interval(secs => v.available_in), v.last_error
    FROM unnest(CAST(:row AS bigint[]), CAST(:tenant AS text[]), CAST(:key AS text[]), CAST(:status AS text[]),
                CAST(:attempts AS integer[]), CAST(:available_in AS double precision[]), CAST(:last_error AS text[]))
        AS v(row_id, tenant, key, status, attempts, available_in, last_error)
    ON CONFLICT (route, shard, row_id) DO UPDATE
    SET status = excluded.status, attempts = excluded.attempts, available_at = excluded.available_at,
        last_error = coalesce(excluded.last_error, f.last_error)
    """
)

_FIRSTS = text(
    f"""
    SELECT k.tenant, k.key, first.row_id, first.status
    FROM unnest(CAST(:tenants AS text[]), CAST(:keys AS text[])) AS k(tenant, key) LEFT JOIN LATERAL (
        SELECT f.row_id, f.status FROM pillarbox_failures f
        WHERE f.key = k.key AND {_FAILURE} AND {_WAITING} AND {_blocks("f", "k.tenant")}
        ORDER BY f.row_id LIMIT 1
    ) first ON true
    """  # noqa: S608  constants
)
"""For keys: the first row that later ones must not overtake."""

_PROMOTE = text(
    f"""
    UPDATE pillarbox_failures f SET status = 'RETRYING', available_at = clock_timestamp()
    WHERE {_FAILURE} AND f.row_id = ANY (CAST(:ids AS bigint[])) AND f.status = 'PARKED'
    """  # noqa: S608  constants
)

_DONE = (
    # An edit is kept as long as its row, as the record of what was sent.
    text(
        f"UPDATE pillarbox_failures f SET status = 'SENT', available_at = NULL "  # noqa: S608
        f"WHERE {_FAILURE} AND f.row_id = ANY (CAST(:ids AS bigint[])) AND f.event_id IS NOT NULL"
    ),
    text(
        f"DELETE FROM pillarbox_failures f "  # noqa: S608
        f"WHERE {_FAILURE} AND f.row_id = ANY (CAST(:ids AS bigint[])) AND f.event_id IS NULL"
    ),
)
"""Mark failed rows as sent."""

_REDRIVE = text(
    f"""
    UPDATE pillarbox_failures f SET status = 'RETRYING', available_at = clock_timestamp(), attempts = 0
    WHERE {_FAILURE} AND f.row_id = ANY (CAST(:ids AS bigint[])) AND f.status IN ('RETRYING', 'FAILED')
    """  # noqa: S608  constants
)
_EDIT = text(
    f"""
    UPDATE pillarbox_failures f
    SET status = 'RETRYING', available_at = clock_timestamp(), attempts = 0,
        event_id = CAST(:event_id AS uuid), body = :body, headers = :headers
    WHERE {_FAILURE} AND f.row_id = :row_id AND f.status IN ('RETRYING', 'FAILED')
    """  # noqa: S608  constants
)
_FORGET = text("DELETE FROM pillarbox_requests WHERE id = ANY (CAST(:ids AS bigint[]))")


class LogFailures(Failures):
    """The failed rows of a lane in a log. Their rows in the outbox are never updated."""

    def statements(self) -> Book:
        return book_of(self.table)

    def columns(self, rows: Sequence[Written]) -> dict[str, Any]:
        columns = zip(*map(astuple, rows), strict=True)
        return dict(zip(Written.__struct_fields__, map(list, columns), strict=True))

    def redone(self) -> Sequence[int]:
        contents = contents_of(self.lane)
        return () if contents is None else contents.redo

    def settled(self) -> Sequence[int]:
        contents = contents_of(self.lane)
        return () if contents is None else [row for row in contents.redo if row not in contents.out]

    def is_sending(self, row: Known, lane: Lane) -> bool:
        contents = contents_of(lane)
        return contents is not None and contents.holds(row.ahead, lane)

    def is_passed(self, row: Known, lane: Lane) -> bool:
        return position(lane, detour_of(lane, row.key.tenant)).covers(row.at)


@cache
def book_of(table: str) -> Book:
    """The statements about the failure book for one table of deliveries."""
    return Book(
        known=text(
            f"""
            SELECT o.id, CAST(CAST(o.xid AS text) AS bigint), o.tenant, o.key
            FROM unnest(CAST(:ids AS bigint[])) AS i(id) CROSS JOIN LATERAL (
                SELECT o.id, o.xid, o.tenant, o.key FROM {table} o
                WHERE {FRESH} AND o.id = i.id ORDER BY o.id LIMIT 1
            ) o
            """  # noqa: S608  constants
        ),
        failed=_FAILED,
        heads=text(sized(_delivery_of(_HEADS, table), f"{ROW}, attempts, status")),
        followers=text(sized(_delivery_of(_FOLLOWERS, table), f"{ROW}, attempts, status")),
        redone=text(f"SELECT {ROW}, attempts, schema_version FROM ({_delivery_of(_NAMED, table)}) d"),  # noqa: S608
        taken=text(
            f"""
            SELECT 1 FROM {table}
            WHERE event_id = CAST(:event_id AS uuid) AND route = :route AND schema_version = :schema_version
            UNION ALL
            SELECT 1 FROM pillarbox_failures WHERE event_id = CAST(:event_id AS uuid) AND route = :route
            """  # noqa: S608  constants
        ),
        firsts=_FIRSTS,
        write=_WRITE,
        promote=_PROMOTE,
        done=_DONE,
        redrive=_REDRIVE,
        edit=_EDIT,
        forget=_FORGET,
    )
