"""What a look at a log asks PostgreSQL.

Every statement is led to its index whatever the statistics say. The lane's index and the one by transaction are both
partial: a statement that names a status can use only the first, one that names an xid only the second. What looks for
the first rows of many transactions probes for each of them; a limit, or an offset of nothing, keeps the planner from
making a join of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import text

from .statement import DirectStatement

ROW = "id, event_id, topic, key, tenant, headers, body"
COLUMNS = (
    "o.id, CAST(o.event_id AS text) AS event_id, o.topic, o.key, o.tenant, CAST(o.headers AS text) AS headers, o.body"
)
LANE = "o.route = :route AND o.shard = :shard"
FRESH = f"{LANE} AND o.status = 'PENDING' AND o.status <> 'SENT'"


# The planner does not know what a subquery will give. So it cannot think that the next values make another plan better,
# and keeps the one that it has: a look with a new plan each time takes ten times as long.
_PASSED = "(SELECT CAST(:high AS bigint))"
_MOST = "(SELECT CAST(:limit AS bigint))"


def sized(rows: str, columns: str) -> str:
    """Rows in the order of their ids, up to the one with which the bytes are reached."""
    return f"""
    SELECT {columns} FROM (
        SELECT page.*, length(body) AS size, sum(length(body)) OVER (ORDER BY id) AS total FROM ({rows}) page
    ) sized
    WHERE total - size < :max_bytes"""  # noqa: S608  constants


def _of_transactions(xids: str, conditions: str) -> str:
    """The first rows of each of these transactions."""
    return f"""
        SELECT one.* FROM {xids} AS x(xid) CROSS JOIN LATERAL (
            SELECT {COLUMNS}, o.xid FROM pillarbox_outbox o
            WHERE {LANE} AND o.xid = x.xid AND {conditions}
            ORDER BY o.id LIMIT {_MOST} + 1
        ) one"""  # noqa: S608  constants


# Where we look, and whether we may: a standby's snapshot does not know who is at work on the primary, and rows that a
# policy hides from us would be passed over for good. Then what people ask for, and the first row beyond the cursor that
# the failure book knows: it was discarded before the lane came to it.
_WITH_LOOK = """
    UNION ALL
    SELECT 2, {}, NULL, CAST(pg_current_snapshot() AS text), {},
           CASE WHEN pg_is_in_recovery() THEN 'standby'
                WHEN row_security_active('pillarbox_outbox') THEN 'filtered' END,
           CAST(extract(epoch FROM pg_postmaster_start_time()) AS text), NULL
    UNION ALL
    (SELECT 3, r.id, NULL, NULL, CAST(r.row_id AS text), NULL, NULL, NULL
     FROM pillarbox_requests r WHERE r.route = :route AND r.shard = :shard
     ORDER BY r.id LIMIT (SELECT CAST(:limit AS bigint)))
    UNION ALL
    (SELECT 5, f.row_id, NULL, NULL, NULL, NULL, NULL, NULL
     FROM pillarbox_failures f
     WHERE f.route = :route AND f.shard = :shard AND f.row_id > (SELECT CAST(:high AS bigint))
     ORDER BY f.row_id LIMIT 1)"""
_LOOK = _WITH_LOOK.format(
    "(SELECT count(*) FROM late)", "(SELECT string_agg(DISTINCT CAST(xid AS text), ',') FROM late)"
)

_XMAX = "(SELECT CAST(CAST(:xmax AS text) AS xid8))"
_RUNNING = "unnest(CAST(CAST(:running AS text[]) AS xid8[]))"
_LATE_XIDS = "unnest(CAST(CAST(:late AS text[]) AS xid8[]))"
_SMALL = (
    "id, event_id, topic, key, tenant, headers, "
    "CASE WHEN length(body) <= CAST(:max_bytes AS bigint) / CAST(:limit AS bigint) THEN body END AS body"
)

_ELSEWHERE = "id BETWEEN CAST(:elsewhere_from AS bigint) AND CAST(:elsewhere_to AS bigint)"
_PLACES = f"""
    id, CASE WHEN {_ELSEWHERE} THEN NULL ELSE event_id END,
    CASE WHEN {_ELSEWHERE} THEN CAST(xid AS text) ELSE topic END,
    CASE WHEN {_ELSEWHERE} THEN NULL ELSE key END, CASE WHEN {_ELSEWHERE} THEN NULL ELSE tenant END,
    CASE WHEN {_ELSEWHERE} THEN NULL ELSE headers END,
    CASE WHEN NOT {_ELSEWHERE} AND length(body) <= CAST(:max_bytes AS bigint) / CAST(:limit AS bigint) THEN body END
    AS body"""
"""The same, but of rows that may be at hand elsewhere only where they stand: no event id, and in the place of the topic
their transaction."""

_POLL = f"""
    WITH late AS MATERIALIZED (
        SELECT found.* FROM (
            {_of_transactions(_RUNNING, f"o.id <= {_PASSED}")}
            UNION ALL
            (SELECT {COLUMNS}, o.xid FROM pillarbox_outbox o
             WHERE {LANE} AND o.xid >= {_XMAX} AND o.id <= {_PASSED}
             ORDER BY o.xid, o.id LIMIT {_MOST} + 1)
        ) found ORDER BY found.id LIMIT {_MOST} + 1
    ), fresh AS (
        SELECT {COLUMNS}, o.xid FROM pillarbox_outbox o
        WHERE {FRESH} AND o.id > {_PASSED}
        ORDER BY o.id LIMIT {_MOST}
    )"""  # noqa: S608  constants
_PAGE = f"""
    WITH late AS MATERIALIZED (
        {_of_transactions(_LATE_XIDS, f"o.id > :done AND o.id <= {_PASSED}")}
        ORDER BY id LIMIT {_MOST} + 1
    )"""


def _fresh_rows(columns: str) -> str:
    return f"""
    (SELECT 1 AS part, {columns} FROM (
        SELECT {COLUMNS}, o.xid FROM pillarbox_outbox o
        WHERE {FRESH} AND o.id > {_PASSED}
        ORDER BY o.id LIMIT {_MOST}
    ) fresh)"""  # noqa: S608  constants


_OF_LATER = f"""
    (SELECT o.id FROM pillarbox_outbox o
     WHERE {LANE} AND o.xid >= {_XMAX} AND o.id <= {_PASSED} ORDER BY o.xid, o.id LIMIT 1)"""  # noqa: S608  constants
_OF_RUNNING = f"""
    (SELECT one.id FROM {_RUNNING} AS x(xid) CROSS JOIN LATERAL (
        SELECT o.id FROM pillarbox_outbox o
        WHERE {LANE} AND o.xid = x.xid AND o.id <= {_PASSED} ORDER BY o.id LIMIT 1
     ) one LIMIT 1)"""  # noqa: S608  constants


# The first row to be tried again, if its time has come: the rows behind it in the index are not looked at.
_TRY_AGAIN = """
    UNION ALL
    SELECT 6, NULL, NULL, NULL, NULL, NULL, NULL, NULL
    WHERE (SELECT f.available_at FROM pillarbox_failures f
           WHERE f.route = :route AND f.shard = :shard AND f.status = 'RETRYING'
           ORDER BY f.available_at LIMIT 1) <= clock_timestamp()"""


def _glances(columns: str) -> dict[bool, DirectStatement]:
    rows, late = _fresh_rows(columns), {False: _OF_LATER, True: f"coalesce({_OF_LATER}, {_OF_RUNNING})"}
    rest = {running: _WITH_LOOK.format(each, "NULL") + _TRY_AGAIN for running, each in late.items()}
    return {running: DirectStatement(text(rows + each)) for running, each in rest.items()}


GLANCES = _glances(_SMALL)
"""The look that is mostly enough: fresh rows, a late one, if there is any, and whether a failed row is due (6); then
one must look again, and closer. By whether somebody was at work when the lane last looked."""
GLANCES_AT_PLACES = _glances(_PLACES)


@dataclass(frozen=True, slots=True)
class Looks:
    """A statement in three forms. The light one leaves out bodies that are larger than their share of the bytes; then
    the sized one must be asked, which adds them up, and takes three times as long. The one of places leaves out rows
    that may be at hand elsewhere, too.
    """

    light: DirectStatement
    sized: DirectStatement
    places: DirectStatement


# A lane with detours passes over the rows of their tenants, and a detour sees only those, as far as the lane has come.
# It may have to look at many rows to find a few. So it looks at no more than so many at a time, and says how far it
# has come.
_OURS = """(CASE WHEN CAST(:detour AS text) IS NULL
    THEN o.tenant IS NULL OR o.tenant <> ALL (CAST(:passed_over AS text[]))
    ELSE o.tenant = CAST(:detour AS text) END)"""
_THEN = "(SELECT coalesce(CAST(CAST(:snapshot AS text) AS pg_snapshot), pg_current_snapshot()))"
_SHOWN = f"pg_visible_in_snapshot(o.xid, {_THEN})"
_LOOKED_AT = f"""
    SELECT {{}} FROM pillarbox_outbox o
    WHERE {FRESH} AND o.id > {_PASSED} AND o.id <= coalesce(CAST(:up_to AS bigint), 9223372036854775807)
    ORDER BY o.id LIMIT CAST(:scan AS bigint)"""  # noqa: S608  constants
_DIVIDED_POLL = f"""
    WITH late AS MATERIALIZED (
        SELECT found.* FROM (
            {_of_transactions(_RUNNING, f"o.id <= {_PASSED} AND {_OURS} AND {_SHOWN}")}
            UNION ALL
            (SELECT {COLUMNS}, o.xid FROM pillarbox_outbox o
             WHERE {LANE} AND o.xid >= {_XMAX} AND o.id <= {_PASSED}
               AND {_OURS} AND {_SHOWN}
             ORDER BY o.xid, o.id LIMIT {_MOST} + 1)
        ) found ORDER BY found.id LIMIT {_MOST} + 1
    ), fresh AS MATERIALIZED (
        SELECT {COLUMNS}, o.xid FROM ({_LOOKED_AT.format("o.*")}) o
        WHERE {_OURS} AND (o.xid IS NULL OR {_SHOWN})
        ORDER BY o.id LIMIT {_MOST}
    )"""  # noqa: S608  constants
_DIVIDED_PAGE = f"""
    WITH late AS MATERIALIZED (
        {_of_transactions(_LATE_XIDS, f"o.id > :done AND o.id <= {_PASSED} AND {_OURS}")}
        ORDER BY id LIMIT {_MOST} + 1
    )"""
_REACHED = f"""
    UNION ALL
    SELECT 4, max(looked_at.id), NULL, CAST(count(*) AS text),
           CASE WHEN CAST(:detour AS text) IS NULL
                THEN CAST(coalesce({_OF_LATER}, {_OF_RUNNING}) AS text) END, NULL, NULL, NULL
    FROM ({_LOOKED_AT.format("o.id")}) looked_at WHERE (SELECT count(*) FROM fresh) < {_MOST}"""  # noqa: S608  constants


def _looks(rows: str, found: str, rest: str) -> Looks:
    """All forms of a look."""
    return Looks(
        DirectStatement(text(rows + found.format(_SMALL) + rest)),
        DirectStatement(text(rows + sized(found.format(ROW), f"part, {ROW}") + rest)),
        DirectStatement(text(rows + found.format(_PLACES) + rest)),
    )


_LATE_ROWS = " SELECT 0 AS part, {0} FROM late"
_BOTH = _LATE_ROWS + " UNION ALL SELECT 1, {0} FROM fresh"  # noqa: S608  constants
POLL = _looks(_POLL, _BOTH, _LOOK)
"""A look: late rows (0), fresh rows (1), the snapshot with the number of late rows, their transactions, and whether we
may look at all (2), people's requests (3), and the first row beyond the cursor that was discarded (5)."""
PAGE = _looks(_PAGE, _LATE_ROWS, _LOOK)
"""The next page of late rows."""
DIVIDED_POLL = _looks(_DIVIDED_POLL, _BOTH, _LOOK + _REACHED)
"""The same, in a lane with detours, or in one of those. It also tells how far it has looked, at how many rows, and any
late row that it may have passed over (4)."""
DIVIDED_PAGE = _looks(_DIVIDED_PAGE, _LATE_ROWS, _LOOK)

NAMED = DirectStatement(
    text(
        sized(
            f"""
            SELECT one.* FROM unnest(CAST(:ids AS bigint[])) AS i(id) CROSS JOIN LATERAL (
                SELECT {COLUMNS} FROM pillarbox_outbox o WHERE {FRESH} AND o.id = i.id ORDER BY o.id LIMIT 1
            ) one""",  # noqa: S608  constants
            ROW,
        )
    )
)
"""Rows that a look has named, as many as the bytes allow."""

LATE_XIDS = text(
    f"""
    SELECT DISTINCT CAST(CAST(o.xid AS text) AS bigint) FROM pillarbox_outbox o
    WHERE {LANE} AND o.xid >= {_XMAX} AND o.id <= :high
      AND pg_visible_in_snapshot(o.xid, CAST(CAST(:snapshot AS text) AS pg_snapshot))
    """  # noqa: S608  constants
)
"""Which transactions brought late rows, of those that were not listed as running."""

BETWEEN = text(
    f"""
    WITH late AS (
        SELECT one.* FROM {_RUNNING} AS x(xid) CROSS JOIN LATERAL (
            SELECT {COLUMNS} FROM pillarbox_outbox o
            WHERE {LANE} AND o.xid = x.xid AND o.id > :late_after AND o.id <= :late_up_to AND {_OURS}
              AND pg_visible_in_snapshot(o.xid, CAST(CAST(:snapshot AS text) AS pg_snapshot))
            OFFSET 0
        ) one
        UNION ALL
        SELECT {COLUMNS} FROM pillarbox_outbox o
        WHERE {LANE} AND o.xid >= {_XMAX} AND o.id > :late_after AND o.id <= :late_up_to AND {_OURS}
          AND pg_visible_in_snapshot(o.xid, CAST(CAST(:snapshot AS text) AS pg_snapshot))
    ), fresh AS (
        SELECT {COLUMNS} FROM pillarbox_outbox o
        WHERE {FRESH} AND o.id > :after AND o.id <= :up_to AND {_OURS}
          AND (o.xid IS NULL OR pg_visible_in_snapshot(o.xid, CAST(CAST(:snapshot AS text) AS pg_snapshot)))
        ORDER BY o.id
    )
    SELECT found.*, 0 AS attempts FROM (SELECT * FROM late UNION ALL SELECT * FROM fresh) found ORDER BY id
    """  # noqa: S608  constants
)
"""The rows of a batch: what one cursor covers and the one before it does not."""

DISCARDED = DirectStatement(
    text(
        "SELECT f.row_id FROM pillarbox_failures f WHERE f.status = 'DISCARDED' "
        "AND f.route = :route AND f.shard = :shard AND f.row_id = ANY (CAST(:ids AS bigint[]))"
    )
)
"""Which of these rows are never to be sent."""
