"""Pruning of whole days: a partition of the outbox is dropped when all its rows have expired.

Dropping touches no row, leaves nothing to vacuum, and frees the space at once. `stores.retention` decides about all
rows of the partition, under a lock that excludes writers of this day, so no row can be added meanwhile. A running
transaction that has written a row holds a conflicting lock, and the day stays. The outbox itself is locked only then,
while the catalogs change.

Rows of a day stay until the whole day can be dropped, even if some of them have expired. If something in it still waits
for an operator a day later, the other rows are deleted one by one. So are rows of the default partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from sqlalchemy import Connection, text

from ..clock import time_of
from ..outbox import OUTBOUND
from .partitions import Layout, Part, layout, waits_briefly
from .retention import BEHIND, OLD, Scope, Stretch, alone, by_journal, guard

_GRACE = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Fate:
    """The decision about a day."""

    part: Part
    rows: int
    stay: int
    """Number of rows that may not be deleted, or not yet."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The days to drop, and the stretches for the remaining rows."""

    layout: Layout
    fates: Sequence[Fate]
    places: Sequence[Stretch]

    @property
    def doomed(self) -> list[Fate]:
        """Days to drop."""
        return [fate for fate in self.fates if not fate.stay]


def survey(connection: Connection, scope: Scope, places: Sequence[Stretch]) -> Survey:
    """Find the expired days among those that are over. Without partitions, for a single route, or without the rights
    of this role, the stretches stay as they are.
    """
    found = layout(connection)
    if not found.partitioned or not found.owned or scope.route is not None:
        return Survey(found, (), places)
    over = [part for part in found.parts if time_of(part.last) <= scope.before]
    fates = [_fate(connection, part, scope, places) for part in over]
    ranges = [*found.gaps()]
    ranges += [(it.part.first, it.part.last) for it in fates if it.stay and _is_late(it.part, scope)]
    within = [place for place in places if place.table != OUTBOUND]
    within += [
        replace(place, first=max(place.first, first), last=min(place.last, last))
        for place in places
        for first, last in sorted(ranges)
        if place.table == OUTBOUND and max(place.first, first) < min(place.last, last)
    ]
    return Survey(found, fates, within)


def drop(connection: Connection, part: Part, scope: Scope, places: Sequence[Stretch]) -> Fate:
    """Drop a day in the caller's transaction, unless a row in it must stay. See `is_busy` for errors."""
    alone(connection)
    guard(connection)
    waits_briefly(connection)
    connection.exec_driver_sql(f"LOCK TABLE {part.name} IN SHARE MODE")
    fate = _fate(connection, part, scope, places)
    if not fate.stay:
        connection.exec_driver_sql(_RECORDS.format(part.name))
        connection.exec_driver_sql(f"DROP TABLE {part.name}")
    return fate


def probe(connection: Connection, part: Part) -> None:
    """Take only the locks that dropping a day takes, in the caller's transaction. Counting its rows may take long, and
    is useless while another transaction holds a lock.
    """
    waits_briefly(connection)
    connection.exec_driver_sql(
        f"LOCK TABLE ONLY {layout(connection).outbox}, ONLY {part.name} IN ACCESS EXCLUSIVE MODE"
    )


def _is_late(part: Part, scope: Scope) -> bool:
    return time_of(part.last) <= scope.before - _GRACE


def _fate(connection: Connection, part: Part, scope: Scope, places: Sequence[Stretch]) -> Fate:
    lanes = {(place.route, place.shard): by_journal(place.old) for place in places if place.route is not None}
    asked = {
        "before": scope.before,
        "routes": [route for route, _ in lanes],
        "shards": [shard for _, shard in lanes],
        "passed": [it["passed"] for it in lanes.values()],
        "told": [it["told"] for it in lanes.values()],
    }
    connection.execute(_BY_SCAN)
    rows, stay = connection.execute(text(_COUNT.format(part.name)), asked).one()
    return Fate(part, rows, stay)


_BY_SCAN = text("SELECT set_config('enable_seqscan', 'on', true)")
_COUNT = f"""
    SELECT count(*), count(*) FILTER (WHERE (
        o.created_at < :before AND (
            o.status = 'SENT' AND coalesce(o.sent_at, o.created_at) < :before OR o.status = 'DISCARDED'
            OR {BEHIND} AND p.route IS NOT NULL AND {OLD.format(told="p.told", passed="p.passed")}
        )
    ) IS NOT TRUE)
    FROM {{}} o LEFT JOIN pillarbox_lanes l ON l.route = o.route AND l.shard = o.shard
    LEFT JOIN unnest(CAST(:routes AS bigint[]), CAST(:shards AS integer[]), CAST(:passed AS text[]),
                     CAST(:told AS text[])) AS p(route, shard, passed, told) ON p.route = o.route AND p.shard = o.shard
"""  # noqa: S608  constants
"""Number of rows of a day, and of those that may not be deleted: as in `retention.page`, for all lanes at once."""
_RECORDS = """
    DELETE FROM pillarbox_failures f USING {} o
    WHERE f.route = o.route AND f.shard = o.shard AND f.row_id = o.id AND f.status IN ('DISCARDED', 'SENT')
"""
