"""Statements of the log store about lanes. `stores.look_sql` has the statements that read rows, and
`stores.log_failures` those about failures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from sqlalchemy import TextClause, text

from .copy_check import IS_ORIGINAL
from .log_failures import DUE, first_of_its_key
from .statement import DirectStatement

# -- ready lanes -------------------------------------------------------------------------------------------------------

_HERE = "o.route = l.route AND o.shard = l.shard"
_HIGH = "CAST(split_part(l.cursor, ' ', 1) AS bigint)"
_SEEN = "CAST(split_part(l.cursor, ' ', 2) AS pg_snapshot)"


@cache
def ready(table: str) -> TextClause:
    """Lanes that have something to do."""
    return text(f"""
    SELECT l.route, l.shard FROM pillarbox_lanes l JOIN pillarbox_routes r ON r.id = l.route
    WHERE l.route = ANY (CAST(:routes AS bigint[])) AND NOT l.paused
      AND (CAST(:relay AS text) IS NULL OR (l.locked_by = CAST(:relay AS text) AND l.locked_until > clock_timestamp()))
      AND (
        l.announced IS NOT NULL OR split_part(l.cursor, ' ', 3) <> ''
        OR (SELECT o.id FROM {table} o
            WHERE {_HERE} AND o.status = 'PENDING' AND o.id > {_HIGH}
            ORDER BY o.id LIMIT 1) IS NOT NULL
        OR (SELECT o.id FROM pg_snapshot_xip({_SEEN}) AS x(xid) CROSS JOIN LATERAL (
                SELECT o.id FROM {table} o WHERE {_HERE} AND o.xid = x.xid AND o.id <= {_HIGH}
                ORDER BY o.id LIMIT 1
            ) o LIMIT 1) IS NOT NULL
        OR (SELECT o.id FROM {table} o
            WHERE {_HERE} AND o.xid >= pg_snapshot_xmax({_SEEN}) AND o.id <= {_HIGH}
            ORDER BY o.xid, o.id LIMIT 1) IS NOT NULL
        OR (SELECT f.row_id FROM pillarbox_failures f
            WHERE f.route = l.route AND f.shard = l.shard AND {DUE} AND {first_of_its_key("r.on_failure = 'park'")}
            ORDER BY f.available_at LIMIT 1) IS NOT NULL
        OR EXISTS (SELECT FROM pillarbox_requests q WHERE q.route = l.route AND q.shard = l.shard)
        OR EXISTS (
            SELECT FROM jsonb_each_text(CAST(l.detours AS jsonb)) d
            WHERE d.value <> l.cursor AND d.key <> ALL (ARRAY(SELECT t.tenant FROM pillarbox_tenants t WHERE t.paused)))
      )
    """)  # noqa: S608  constants


# -- progress ----------------------------------------------------------------------------------------------------------

_IS_OURS = """
    route = :route AND shard = :shard AND epoch = :epoch AND token = CAST(:token AS uuid) AND batch = :batch
    AND announced IS NOT DISTINCT FROM CAST(:was_announced AS text)
    AND coalesce(CAST(extract(epoch FROM pg_postmaster_start_time()) AS text) = CAST(:server AS text), true)"""
STILL_OURS = DirectStatement(text(f"SELECT 1 FROM pillarbox_lanes WHERE {_IS_OURS}"))  # noqa: S608  constants
TELLS_ABOUT = """
    CASE WHEN j.detour IS NULL THEN o.tenant IS NULL OR o.tenant <> ALL (j.passed_over) ELSE j.detour = o.tenant END"""
"""Whether a journal entry is about this tenant's rows."""
_ENTRY = """
    INSERT INTO pillarbox_journal
        (route, shard, high, batch, cursor, redone, skipped, first_number, count, detour, passed_over, relay)
"""
_SETTLED = """CAST(:route AS bigint), CAST(:shard AS integer), CAST(:settled_high AS bigint), CAST(:batch AS bigint),
    CAST(:settled AS text), CAST(:redone AS bigint[]), CAST(:skipped AS bigint[]), CAST(:first_number AS bigint),
    CAST(:count AS integer), CAST(:detour AS text), CAST(:passed_over AS text[])"""
# The setting is local to this statement's transaction: its COMMIT does not wait for the disk.
_RELAXED = "set_config('synchronous_commit', 'off', true)"


class Step(NamedTuple):
    """A statement that advances a lane and returns the physical place of its row, if the fence holds."""

    by_key: DirectStatement
    at_place: DirectStatement
    """Finds the row at its last place. While an old snapshot keeps dead versions from being removed, finding it by key
    means reading all of them.
    """


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
"""Settle the announced batch, and announce the next one, if there is one."""
SERVER = text("SELECT CAST(extract(epoch FROM pg_postmaster_start_time()) AS text)")
"""Identity and start time of the server. After a failover, another server may lack transactions that were read."""
JOURNAL = text(
    f"{_ENTRY} SELECT {_SETTLED}, locked_by FROM pillarbox_lanes WHERE route = :route AND shard = :shard"  # noqa: S608
)

# -- take-over ---------------------------------------------------------------------------------------------------------


@cache
def guards(table: str) -> TextClause:
    """Conditions that a database must meet before its lanes are taken."""
    return text(f"""
    SELECT pg_is_in_recovery() AS standby, {IS_ORIGINAL},
           (SELECT seqcache FROM pg_sequence
            WHERE seqrelid = CAST(pg_get_serial_sequence('{table}', 'id') AS regclass)),
           row_security_active('{table}'), current_setting('fsync'), current_setting('synchronous_commit'),
           (SELECT schema_version FROM pillarbox_meta)
    """)  # noqa: S608  constants
