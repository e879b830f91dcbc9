"""What the log store tells PostgreSQL, and asks it about failures and lanes. How it looks for rows is in
`stores.look_sql`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sqlalchemy import text

from .look_sql import FRESH, ROW, sized
from .origin import IS_ORIGINAL
from .statement import DirectStatement

_DUE = """f.status = 'RETRYING' AND f.available_at <= (SELECT clock_timestamp())"""
_FAILURE = "f.route = :route AND f.shard = :shard"
_PARKS = "CAST(:parks AS boolean)"
_WAITING = "f.status IN ('RETRYING', 'PARKED', 'FAILED')"
_NOT_SENDING = "f.row_id <> ALL (CAST(:sending AS bigint[]))"


def _blocks(rows: str, tenant: str, parks: str = _PARKS) -> str:
    """Whether a row is this tenant's, and later ones of its key must not overtake it.

    The planner takes two equal tenants for a rarity, and would sort all rows of a key to find its first one. Of a CASE
    it thinks nothing, and reads them as they stand in the index.
    """
    same = f"{rows}.tenant IS NOT DISTINCT FROM {tenant}"
    return f"CASE WHEN {same} THEN {rows}.status <> 'FAILED' OR {parks} ELSE false END"


def _first_of_its_key(parks: str = _PARKS) -> str:
    return f"""f.row_id = (
        SELECT b.row_id FROM pillarbox_failures b
        WHERE b.key = f.key AND b.route = f.route AND b.shard = f.shard AND b.status IN ('RETRYING', 'PARKED', 'FAILED')
          AND {_blocks("b", "f.tenant", parks)}
        ORDER BY b.row_id LIMIT 1)"""  # noqa: S608  constants


def _delivery_of(failures: str) -> str:
    """Failures with what their rows hold, or what a person has put in its place."""
    return f"""
        SELECT f.row_id AS id, coalesce(f.event_id, o.event_id) AS event_id, o.topic, o.key, o.tenant,
               CAST(coalesce(f.headers, o.headers) AS text) AS headers, coalesce(f.body, o.body) AS body,
               f.attempts, f.status, o.schema_version
        FROM ({failures}) f CROSS JOIN LATERAL (
            SELECT o.* FROM pillarbox_outbox o WHERE {FRESH} AND o.id = f.row_id ORDER BY o.id LIMIT 1
        ) o"""  # noqa: S608  constants


HEADS = text(
    sized(
        _delivery_of(
            f"""
            SELECT f.* FROM pillarbox_failures f
            WHERE {_FAILURE} AND {_DUE} AND {_NOT_SENDING}
              AND (f.tenant IS NULL OR f.tenant <> ALL (CAST(:paused AS text[]))) AND {_first_of_its_key()}
            ORDER BY f.available_at LIMIT :limit"""  # noqa: S608  constants
        ),
        f"{ROW}, attempts, status",
    )
)
"""Rows that are due and the first of their key."""

FOLLOWERS = text(
    sized(
        _delivery_of(
            f"""
            SELECT f.row_id, f.event_id, f.headers, f.body, f.attempts,
                   CASE WHEN f.status = 'PARKED' OR ({_DUE}) THEN 'due' ELSE f.status END AS status
            FROM pillarbox_failures f
            WHERE {_FAILURE} AND f.key = :key AND f.row_id > :after AND {_WAITING} AND {_NOT_SENDING}
              AND {_blocks("f", "CAST(:tenant AS text)")}
            ORDER BY f.row_id LIMIT :limit"""  # noqa: S608  constants
        ),
        f"{ROW}, attempts, status",
    )
)
"""The waiting rows of a key behind a row of it, with 'due' if they may follow."""

REDONE = text(
    f"SELECT {ROW}, attempts, schema_version FROM ("  # noqa: S608  constants
    + _delivery_of(
        f"SELECT f.* FROM pillarbox_failures f WHERE {_FAILURE} AND f.row_id = ANY (CAST(:ids AS bigint[]))"  # noqa: S608
    )
    + ") d"
)
"""Failed rows, by their ids."""

# -- who has something to do -------------------------------------------------------------------------------------------

_HERE = "o.route = l.route AND o.shard = l.shard"
_HIGH = "CAST(split_part(l.cursor, ' ', 1) AS bigint)"
_SEEN = "CAST(split_part(l.cursor, ' ', 2) AS pg_snapshot)"
READY = text(
    f"""
    SELECT l.route, l.shard FROM pillarbox_lanes l JOIN pillarbox_routes r ON r.id = l.route
    WHERE l.route = ANY (CAST(:routes AS bigint[])) AND NOT l.paused
      AND (CAST(:relay AS text) IS NULL OR (l.locked_by = CAST(:relay AS text) AND l.locked_until > clock_timestamp()))
      AND (
        l.announced IS NOT NULL OR split_part(l.cursor, ' ', 3) <> ''
        OR (SELECT o.id FROM pillarbox_outbox o
            WHERE {_HERE} AND o.status = 'PENDING' AND o.status <> 'SENT' AND o.id > {_HIGH}
            ORDER BY o.id LIMIT 1) IS NOT NULL
        OR (SELECT o.id FROM pg_snapshot_xip({_SEEN}) AS x(xid) CROSS JOIN LATERAL (
                SELECT o.id FROM pillarbox_outbox o WHERE {_HERE} AND o.xid = x.xid AND o.id <= {_HIGH}
                ORDER BY o.id LIMIT 1
            ) o LIMIT 1) IS NOT NULL
        OR (SELECT o.id FROM pillarbox_outbox o
            WHERE {_HERE} AND o.xid >= pg_snapshot_xmax({_SEEN}) AND o.id <= {_HIGH}
            ORDER BY o.xid, o.id LIMIT 1) IS NOT NULL
        OR (SELECT f.row_id FROM pillarbox_failures f
            WHERE f.route = l.route AND f.shard = l.shard AND {_DUE} AND {_first_of_its_key("r.on_failure = 'park'")}
            ORDER BY f.available_at LIMIT 1) IS NOT NULL
        OR EXISTS (SELECT FROM pillarbox_requests q WHERE q.route = l.route AND q.shard = l.shard)
        OR EXISTS (
            SELECT FROM jsonb_each_text(CAST(l.detours AS jsonb)) d
            WHERE d.value <> l.cursor AND d.key <> ALL (ARRAY(SELECT t.tenant FROM pillarbox_tenants t WHERE t.paused)))
      )
    """  # noqa: S608  constants
)

# -- progress ----------------------------------------------------------------------------------------------------------

_IS_OURS = """
    route = :route AND shard = :shard AND epoch = :epoch AND token = CAST(:token AS uuid) AND batch = :batch
    AND announced IS NOT DISTINCT FROM CAST(:was_announced AS text)
    AND coalesce(CAST(extract(epoch FROM pg_postmaster_start_time()) AS text) = CAST(:server AS text), true)"""
STILL_OURS = DirectStatement(text(f"SELECT 1 FROM pillarbox_lanes WHERE {_IS_OURS}"))  # noqa: S608  constants
TELLS_ABOUT = """
    CASE WHEN j.detour IS NULL THEN o.tenant IS NULL OR o.tenant <> ALL (j.passed_over) ELSE j.detour = o.tenant END"""
"""Whether an entry of the journal is about this tenant's rows."""
_ENTRY = """
    INSERT INTO pillarbox_journal
        (route, shard, high, batch, cursor, redone, skipped, first_number, count, detour, passed_over, relay)
"""
_SETTLED = """CAST(:route AS bigint), CAST(:shard AS integer), CAST(:settled_high AS bigint), CAST(:batch AS bigint),
    CAST(:settled AS text), CAST(:redone AS bigint[]), CAST(:skipped AS bigint[]), CAST(:first_number AS bigint),
    CAST(:count AS integer), CAST(:detour AS text), CAST(:passed_over AS text[])"""
# The setting holds for this statement, which is a transaction of its own: its COMMIT does not wait for the disk.
_RELAXED = "set_config('synchronous_commit', 'off', true)"


class Step(NamedTuple):
    """A statement that moves a lane on, and answers where its row stands then, if it was ours."""

    by_key: DirectStatement
    at_place: DirectStatement
    """Straight to where the row was left. While an old snapshot keeps the server from clearing dead versions away, to
    find the row by its key means to walk over all of them."""


def _step(text_of: Callable[..., str], *also: str) -> Step:
    by_key, at_place = text_of("", *also), text_of("ctid = CAST(CAST(:place AS text) AS tid) AND", *also)
    return Step(DirectStatement(text(by_key)), DirectStatement(text(at_place)))


def _fence(place: str, *also: str) -> str:
    return f"""
        UPDATE pillarbox_lanes
        SET batch = :next_batch, next_number = :next_number, announced = :announced, cursor = :cursor,
            detours = coalesce(CAST(:detours AS text), detours), tries = 0
        WHERE {place} {_IS_OURS} RETURNING {", ".join(("CAST(ctid AS text) AS place", *also))}
    """  # noqa: S608  constants


def _settle(place: str, *also: str) -> str:
    return f"""
        WITH fence AS ({_fence(place, "locked_by", *also)}),
             entry AS ({_ENTRY} SELECT {_SETTLED}, locked_by FROM fence)
        SELECT place FROM fence
    """  # noqa: S608  constants


ANNOUNCE, ANNOUNCE_RELAXED = _step(_fence), _step(_fence, _RELAXED)
SETTLE, SETTLE_RELAXED = _step(_settle), _step(_settle, _RELAXED)
"""Settle what was announced, and announce what follows, if anything does."""
SERVER = text("SELECT CAST(extract(epoch FROM pg_postmaster_start_time()) AS text)")
"""Which server this is, and since when. Another one may have less in it than the one where we looked."""
JOURNAL = text(
    f"{_ENTRY} SELECT {_SETTLED}, locked_by FROM pillarbox_lanes WHERE route = :route AND shard = :shard"  # noqa: S608
)

# -- failures ----------------------------------------------------------------------------------------------------------

KNOWN = text(
    f"""
    SELECT o.id, CAST(CAST(o.xid AS text) AS bigint), o.tenant, o.key
    FROM unnest(CAST(:ids AS bigint[])) AS i(id) CROSS JOIN LATERAL (
        SELECT o.id, o.xid, o.tenant, o.key FROM pillarbox_outbox o
        WHERE {FRESH} AND o.id = i.id ORDER BY o.id LIMIT 1
    ) o
    """  # noqa: S608  constants
)
"""Where rows stand, and their keys."""

FAILURES = text(
    f"SELECT f.row_id, f.status, f.attempts, f.tenant, f.key FROM pillarbox_failures f "  # noqa: S608
    f"WHERE {_FAILURE} AND f.row_id = ANY (CAST(:ids AS bigint[]))"
)

FAILURE_COLUMNS = ("row_id", "tenant", "key", "status", "attempts", "available_in", "last_error")
WRITE_FAILURES = text(
    """
    INSERT INTO pillarbox_failures AS f
        (route, shard, row_id, tenant, key, status, attempts, available_at, last_error)
    SELECT :route, :shard, v.row_id, v.tenant, v.key, v.status, v.attempts,
           clock_timestamp() + make_interval(secs => v.available_in), v.last_error
    FROM unnest(CAST(:row_id AS bigint[]), CAST(:tenant AS text[]), CAST(:key AS text[]), CAST(:status AS text[]),
                CAST(:attempts AS integer[]), CAST(:available_in AS double precision[]), CAST(:last_error AS text[]))
        AS v(row_id, tenant, key, status, attempts, available_in, last_error)
    ON CONFLICT (route, shard, row_id) DO UPDATE
    SET status = excluded.status, attempts = excluded.attempts, available_at = excluded.available_at,
        last_error = coalesce(excluded.last_error, f.last_error)
    """
)

FIRSTS = text(
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

PROMOTE = text(
    f"""
    UPDATE pillarbox_failures f SET status = 'RETRYING', available_at = clock_timestamp()
    WHERE {_FAILURE} AND f.row_id = ANY (CAST(:ids AS bigint[])) AND f.status = 'PARKED'
    """  # noqa: S608  constants
)

DONE = (
    # An edit is kept as long as its row: it is what was sent.
    text(
        f"UPDATE pillarbox_failures f SET status = 'SENT', available_at = NULL "  # noqa: S608
        f"WHERE {_FAILURE} AND f.row_id = ANY (CAST(:ids AS bigint[])) AND f.event_id IS NOT NULL"
    ),
    text(
        f"DELETE FROM pillarbox_failures f "  # noqa: S608
        f"WHERE {_FAILURE} AND f.row_id = ANY (CAST(:ids AS bigint[])) AND f.event_id IS NULL"
    ),
)
"""Failed rows that are at the destination."""

REDRIVE = text(
    f"""
    UPDATE pillarbox_failures f SET status = 'RETRYING', available_at = clock_timestamp(), attempts = 0
    WHERE {_FAILURE} AND f.row_id = ANY (CAST(:ids AS bigint[])) AND f.status IN ('RETRYING', 'FAILED')
    """  # noqa: S608  constants
)
EDIT = text(
    f"""
    UPDATE pillarbox_failures f
    SET status = 'RETRYING', available_at = clock_timestamp(), attempts = 0,
        event_id = CAST(:event_id AS uuid), body = :body, headers = CAST(:headers AS json)
    WHERE {_FAILURE} AND f.row_id = :row_id AND f.status IN ('RETRYING', 'FAILED')
    """  # noqa: S608  constants
)
TAKEN = text(
    """
    SELECT 1 FROM pillarbox_outbox
    WHERE event_id = CAST(:event_id AS uuid) AND route = :route AND schema_version = :schema_version
    UNION ALL
    SELECT 1 FROM pillarbox_failures WHERE event_id = CAST(:event_id AS uuid) AND route = :route
    """
)

# -- taking over -------------------------------------------------------------------------------------------------------

WAITING = text(
    f"""
    SELECT DISTINCT f.route, f.shard, f.tenant, f.key
    FROM pillarbox_failures f JOIN pillarbox_routes r ON r.id = f.route
    JOIN unnest(CAST(:routes AS bigint[]), CAST(:shards AS integer[])) AS l(route, shard)
      ON l.route = f.route AND l.shard = f.shard
    WHERE {_WAITING} AND (f.status <> 'FAILED' OR r.on_failure = 'park')
    """  # noqa: S608  constants
)
FREE_PARKED = text(
    f"""
    UPDATE pillarbox_failures f SET status = 'RETRYING', available_at = clock_timestamp()
    WHERE {_FAILURE} AND f.status = 'PARKED' AND {_first_of_its_key()} AND f.row_id = ANY (ARRAY(
        SELECT min(p.row_id) FROM pillarbox_failures p
        WHERE p.route = :route AND p.shard = :shard AND p.status = 'PARKED' GROUP BY p.tenant, p.key))
    """  # noqa: S608  constants
)
"""What waits and is the first of its key, now that dead rows are skipped."""
GUARDS = text(
    f"""
    SELECT pg_is_in_recovery() AS standby, {IS_ORIGINAL},
           (SELECT seqcache FROM pg_sequence
            WHERE seqrelid = CAST(pg_get_serial_sequence('pillarbox_outbox', 'id') AS regclass)),
           row_security_active('pillarbox_outbox'), current_setting('fsync'), current_setting('synchronous_commit'),
           (SELECT schema_version FROM pillarbox_meta)
    """  # noqa: S608  constants
)
