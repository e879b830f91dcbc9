"""Letting go of whole days: a partition of the outbox goes when every row in it may go.

A day is dropped, not deleted from: no row is touched, nothing is left for vacuum, and the space is there at once. What
may go is what `stores.retention` says, asked of all rows of the partition. While they are asked, under a lock that lets
nobody write into this day, no row can come: a transaction that has written one and is not at its end holds a lock of
its own, and the day stays. Only then is the outbox itself locked, for as long as it takes to change the catalogs.

Days are kept whole, so that they can go whole: what is old in a day that is not yet over, or not yet old, stays until
all of it is. A day that could not go within a day more, since something in it waits for a person, loses the rest row by
row, and so does the default partition.
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
    """What becomes of a day."""

    part: Part
    rows: int
    stay: int
    """How many of them may not go, or not yet."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What goes by days, and where the rest is to be looked for."""

    layout: Layout
    fates: Sequence[Fate]
    places: Sequence[Stretch]

    @property
    def doomed(self) -> list[Fate]:
        """Days that go."""
        return [fate for fate in self.fates if not fate.stay]


def survey(connection: Connection, scope: Scope, places: Sequence[Stretch]) -> Survey:
    """Which days may go, of those that are over. Nothing changes where there are no days, or what is to go is no whole
    one, or this role may not drop them.
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
    """Drop a day, in a transaction of its caller, unless something in it must stay. `is_busy` tells about errors."""
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
    """Take the locks that dropping a day takes, and nothing else, in a transaction of its caller. Counting its rows may
    take long, and is in vain as long as somebody is in the way.
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
"""Every row of a day, and those that may not go: as `retention.page` has it, for all lanes at once."""
_RECORDS = """
    DELETE FROM pillarbox_failures f USING {} o
    WHERE f.route = o.route AND f.shard = o.shard AND f.row_id = o.id AND f.status IN ('DISCARDED', 'SENT')
"""
