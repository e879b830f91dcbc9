"""Statements that read rows of a log on PostgreSQL.

Every statement is forced onto its index, regardless of statistics. The lane's index and the index by transaction are
both partial: a statement that names a status can use only the first, one that names an xid only the second. The first
rows of many transactions are found by one probe for each; a LIMIT or an OFFSET 0 keeps the planner from turning that
into a join.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from sqlalchemy import TextClause, text

from .statement import DirectStatement

ROW = "id, event_id, topic, key, tenant, headers, body"
COLUMNS = "o.id, CAST(o.event_id AS text) AS event_id, o.topic, o.key, o.tenant, o.headers, o.body"
LANE = "o.route = :route AND o.shard = :shard"
FRESH = f"{LANE} AND o.status = 'PENDING'"


# The planner cannot know the value of a subquery, so it keeps one generic plan. With a new plan each time, a read takes
# ten times as long.
_PASSED = "(SELECT CAST(:high AS bigint))"
_MOST = "(SELECT CAST(:limit AS bigint))"


def sized(rows: str, columns: str) -> str:
    """Rows in the order of their ids, up to the one with which the bytes are reached."""
    return f"""
    SELECT {columns} FROM (
        SELECT page.*, length(body) AS size, sum(length(body)) OVER (ORDER BY id) AS total FROM ({rows}) page
    ) sized
    WHERE total - size < :max_bytes"""  # noqa: S608  constants


# Operators' requests, and the first row beyond the cursor that is in the failure book: it was discarded before the lane
# reached it.
_ASKED = """
    UNION ALL
    (SELECT 3, r.id, NULL, NULL, CAST(r.row_id AS text), NULL, NULL, NULL
     FROM pillarbox_requests r WHERE r.route = :route AND r.shard = :shard
     ORDER BY r.id LIMIT (SELECT CAST(:limit AS bigint)))
    UNION ALL
    (SELECT 5, f.row_id, NULL, NULL, NULL, NULL, NULL, NULL
     FROM pillarbox_failures f
     WHERE f.route = :route AND f.shard = :shard AND f.row_id > (SELECT CAST(:high AS bigint))
     ORDER BY f.row_id LIMIT 1)"""

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
"""The same, but rows that may be buffered have only places: no event id, and the transaction instead of the topic."""

# The first failed row, if it is due. The rows behind it in the index are not read.
_TRY_AGAIN = """
    UNION ALL
    SELECT 6, NULL, NULL, NULL, NULL, NULL, NULL, NULL
    WHERE (SELECT f.available_at FROM pillarbox_failures f
           WHERE f.route = :route AND f.shard = :shard AND f.status = 'RETRYING'
           ORDER BY f.available_at LIMIT 1) <= clock_timestamp()"""

# A lane with detours skips the rows of their tenants, and a detour reads only those, up to the lane's position. Finding
# a few rows may mean examining many. So a read examines a limited number, and returns how far it came.
_OURS = """(CASE WHEN CAST(:detour AS text) IS NULL
    THEN o.tenant IS NULL OR o.tenant <> ALL (CAST(:passed_over AS text[]))
    ELSE o.tenant = CAST(:detour AS text) END)"""
_THEN = "(SELECT coalesce(CAST(CAST(:snapshot AS text) AS pg_snapshot), pg_current_snapshot()))"
_SHOWN = f"pg_visible_in_snapshot(o.xid, {_THEN})"
_WAS_SHOWN = "pg_visible_in_snapshot(o.xid, CAST(CAST(:snapshot AS text) AS pg_snapshot))"

_LATE_ROWS = " SELECT 0 AS part, {0} FROM late"
_BOTH = _LATE_ROWS + " UNION ALL SELECT 1, {0} FROM fresh"  # noqa: S608  constants


@dataclass(frozen=True, slots=True)
class Looks:
    """A statement in three forms. ``light`` leaves out bodies that are larger than their share of the bytes; then
    ``sized`` is needed, which adds sizes up and takes three times as long. ``places`` also leaves out rows that may be
    buffered.
    """

    light: DirectStatement
    sized: DirectStatement
    places: DirectStatement


class Questions:
    """The statements that read one table of deliveries."""

    def __init__(self, table: str) -> None:
        self._table = table
        self.glances = self._glances(_SMALL)
        """Quick reads: fresh rows, one late row, if there is one, and whether a failed row is due (6). A late row
        requires a full read, a due one a read of the failure book. By whether transactions were running at the last
        read.
        """
        self.glances_at_places = self._glances(_PLACES)
        look = self._with_look(
            "(SELECT count(*) FROM late)", "(SELECT string_agg(DISTINCT CAST(xid AS text), ',') FROM late)"
        )
        self.poll = _looks(self._poll(), _BOTH, look)
        """A full read: late rows (0), fresh rows (1), the snapshot with the number of late rows, their transactions,
        and whether this server and role may be read (2), operators' requests (3), and the first discarded row beyond
        the cursor (5).
        """
        self.page = _looks(self._page(f"o.id > :done AND o.id <= {_PASSED}"), _LATE_ROWS, look)
        """The next page of late rows."""
        self.divided_poll = _looks(self._divided_poll(), _BOTH, look + self._reached())
        """The same in a lane with detours, or in a detour. Also returns how far the read came, how many rows it
        examined, and a late row that it may have skipped (4).
        """
        self.divided_page = _looks(self._page(f"o.id > :done AND o.id <= {_PASSED} AND {_OURS}"), _LATE_ROWS, look)
        self.named = self._named()
        """Rows that a read has named, as many as the bytes allow."""
        self.late_xids = self._late_xids()
        """The transactions of late rows, of those that were not listed as running."""
        self.between = self._between()
        """The rows of a batch: covered by one cursor, and not by the one before it."""

    def _of_transactions(self, xids: str, conditions: str) -> str:
        """The first rows of each of these transactions."""
        return f"""
        SELECT one.* FROM {xids} AS x(xid) CROSS JOIN LATERAL (
            SELECT {COLUMNS}, o.xid FROM {self._table} o
            WHERE {LANE} AND o.xid = x.xid AND {conditions}
            ORDER BY o.id LIMIT {_MOST} + 1
        ) one"""  # noqa: S608  constants

    def _with_look(self, late: str, xids: str) -> str:
        """The server, and whether it may be read. The snapshot of a standby lacks the transactions that run on the
        primary, and rows hidden by a row filter would be passed over for good.
        """
        return f"""
    UNION ALL
    SELECT 2, {late}, NULL, CAST(pg_current_snapshot() AS text), {xids},
           CASE WHEN pg_is_in_recovery() THEN 'standby'
                WHEN row_security_active('{self._table}') THEN 'filtered' END,
           CAST(extract(epoch FROM pg_postmaster_start_time()) AS text), NULL
    {_ASKED}"""  # noqa: S608

    def _glances(self, columns: str) -> dict[bool, DirectStatement]:
        rows = f"""
    (SELECT 1 AS part, {columns} FROM (
        SELECT {COLUMNS}, o.xid FROM {self._table} o
        WHERE {FRESH} AND o.id > {_PASSED}
        ORDER BY o.id LIMIT {_MOST}
    ) fresh)"""  # noqa: S608  constants
        late = {False: self._of_later(), True: f"coalesce({self._of_later()}, {self._of_running()})"}
        rest = {running: self._with_look(each, "NULL") + _TRY_AGAIN for running, each in late.items()}
        return {running: DirectStatement(text(rows + each)) for running, each in rest.items()}

    def _of_later(self) -> str:
        return f"""
    (SELECT o.id FROM {self._table} o
     WHERE {LANE} AND o.xid >= {_XMAX} AND o.id <= {_PASSED} ORDER BY o.xid, o.id LIMIT 1)"""  # noqa: S608  constants

    def _of_running(self) -> str:
        return f"""
    (SELECT one.id FROM {_RUNNING} AS x(xid) CROSS JOIN LATERAL (
        SELECT o.id FROM {self._table} o
        WHERE {LANE} AND o.xid = x.xid AND o.id <= {_PASSED} ORDER BY o.id LIMIT 1
     ) one LIMIT 1)"""  # noqa: S608  constants

    def _late(self, conditions: str) -> str:
        return f"""
    WITH late AS MATERIALIZED (
        SELECT found.* FROM (
            {self._of_transactions(_RUNNING, conditions)}
            UNION ALL
            (SELECT {COLUMNS}, o.xid FROM {self._table} o
             WHERE {LANE} AND o.xid >= {_XMAX} AND {conditions}
             ORDER BY o.xid, o.id LIMIT {_MOST} + 1)
        ) found ORDER BY found.id LIMIT {_MOST} + 1
    )"""  # noqa: S608  constants

    def _poll(self) -> str:
        return f"""{self._late(f"o.id <= {_PASSED}")}, fresh AS (
        SELECT {COLUMNS}, o.xid FROM {self._table} o
        WHERE {FRESH} AND o.id > {_PASSED}
        ORDER BY o.id LIMIT {_MOST}
    )"""  # noqa: S608  constants

    def _divided_poll(self) -> str:
        return f"""{self._late(f"o.id <= {_PASSED} AND {_OURS} AND {_SHOWN}")}, fresh AS MATERIALIZED (
        SELECT {COLUMNS}, o.xid FROM ({self._looked_at("o.*")}) o
        WHERE {_OURS} AND (o.xid IS NULL OR {_SHOWN})
        ORDER BY o.id LIMIT {_MOST}
    )"""  # noqa: S608  constants

    def _page(self, conditions: str) -> str:
        return f"""
    WITH late AS MATERIALIZED (
        {self._of_transactions(_LATE_XIDS, conditions)}
        ORDER BY id LIMIT {_MOST} + 1
    )"""

    def _looked_at(self, columns: str) -> str:
        return f"""
    SELECT {columns} FROM {self._table} o
    WHERE {FRESH} AND o.id > {_PASSED} AND o.id <= coalesce(CAST(:up_to AS bigint), 9223372036854775807)
    ORDER BY o.id LIMIT CAST(:scan AS bigint)"""  # noqa: S608  constants

    def _reached(self) -> str:
        late = f"coalesce({self._of_later()}, {self._of_running()})"
        return f"""
    UNION ALL
    SELECT 4, max(looked_at.id), NULL, CAST(count(*) AS text),
           CASE WHEN CAST(:detour AS text) IS NULL THEN CAST({late} AS text) END, NULL, NULL, NULL
    FROM ({self._looked_at("o.id")}) looked_at WHERE (SELECT count(*) FROM fresh) < {_MOST}"""  # noqa: S608  constants

    def _named(self) -> DirectStatement:
        rows = f"""
            SELECT one.* FROM unnest(CAST(:ids AS bigint[])) AS i(id) CROSS JOIN LATERAL (
                SELECT {COLUMNS} FROM {self._table} o WHERE {FRESH} AND o.id = i.id ORDER BY o.id LIMIT 1
            ) one"""  # noqa: S608  constants
        return DirectStatement(text(sized(rows, ROW)))

    def _late_xids(self) -> TextClause:
        return text(f"""
    SELECT DISTINCT CAST(CAST(o.xid AS text) AS bigint) FROM {self._table} o
    WHERE {LANE} AND o.xid >= {_XMAX} AND o.id <= :high AND {_WAS_SHOWN}
    """)  # noqa: S608  constants

    def _between(self) -> TextClause:
        late = f"o.id > :late_after AND o.id <= :late_up_to AND {_OURS} AND {_WAS_SHOWN}"
        return text(f"""
    WITH late AS (
        SELECT one.* FROM {_RUNNING} AS x(xid) CROSS JOIN LATERAL (
            SELECT {COLUMNS} FROM {self._table} o WHERE {LANE} AND o.xid = x.xid AND {late} OFFSET 0
        ) one
        UNION ALL
        SELECT {COLUMNS} FROM {self._table} o WHERE {LANE} AND o.xid >= {_XMAX} AND {late}
    ), fresh AS (
        SELECT {COLUMNS} FROM {self._table} o
        WHERE {FRESH} AND o.id > :after AND o.id <= :up_to AND {_OURS} AND (o.xid IS NULL OR {_WAS_SHOWN})
        ORDER BY o.id
    )
    SELECT found.*, 0 AS attempts FROM (SELECT * FROM late UNION ALL SELECT * FROM fresh) found ORDER BY id
    """)  # noqa: S608  constants


def _looks(rows: str, found: str, rest: str) -> Looks:
    """All forms of a read."""
    return Looks(
        DirectStatement(text(rows + found.format(_SMALL) + rest)),
        DirectStatement(text(rows + sized(found.format(ROW), f"part, {ROW}") + rest)),
        DirectStatement(text(rows + found.format(_PLACES) + rest)),
    )


questions_to = cache(Questions)

DISCARDED = DirectStatement(
    text(
        "SELECT f.row_id FROM pillarbox_failures f WHERE f.status = 'DISCARDED' "
        "AND f.route = :route AND f.shard = :shard AND f.row_id = ANY (CAST(:ids AS bigint[]))"
    )
)
"""The given rows that were discarded."""
