"""The views of the schema, and their functions on PostgreSQL, as one text per database.

``outbox_events`` has all deliveries, for operators; ``pillarbox_unsent`` has those that are still to be sent, for
counts. Each joins an outbound and an inbound view. Pillarbox itself queries these two: where the joined view cannot be
merged into the query, a database reads all of it. A body that is not JSON, whatever its content type says, is shown as
null, so that it never fails the view.
"""

from __future__ import annotations

from collections.abc import Callable

_DIRECTIONS = {"outbound": "pillarbox_outbox", "inbound": "pillarbox_inbound"}


def _headers(extracted: str, *names: str) -> str:
    """Columns of headers."""
    return ",\n       ".join(f"{extracted.format(name)} AS {name}" for name in names)


# -- PostgreSQL: a log -------------------------------------------------------------------------------------------------

# The state of a delivery is not stored: the lane's cursor, the announced batch and the failure book determine it.
_POSTGRES_HEADERS = "CAST(coalesce(f.headers, o.headers) AS json)"
_POSTGRES_HEADER = f"{_POSTGRES_HEADERS} ->> '{{}}'"
_FUNCTIONS = (
    """
CREATE FUNCTION pillarbox_json_text(body bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN CAST(CAST(convert_from(body, 'UTF8') AS json) AS text);
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END
$$
""",
    # The same rule as `pillarbox.cursor.Cursor.covers`.
    """
CREATE FUNCTION pillarbox_covered(cursor text, row_id bigint, xid xid8) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE AS $$
SELECT row_id <= CAST(split_part(cursor, ' ', 1) AS bigint) AND (
    xid IS NULL
    OR pg_visible_in_snapshot(xid, CAST(split_part(cursor, ' ', 2) AS pg_snapshot))
    OR (
        row_id <= CAST(NULLIF(split_part(cursor, ' ', 5), '') AS bigint)
        AND CAST(xid AS text) = ANY (string_to_array(split_part(cursor, ' ', 4), ','))
    )
)
$$
""",
    # The cursor that applies to a tenant's rows: rows beyond it have not been sent.
    """
CREATE FUNCTION pillarbox_cursor(cursor text, detours text, tenant text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
SELECT coalesce(CAST(detours AS jsonb) ->> tenant, cursor)
$$
""",
)


def _postgresql(direction: str, table: str) -> tuple[str, ...]:
    return (
        f"""
CREATE VIEW pillarbox_{direction}_events AS
SELECT o.id, CAST('{direction}' AS varchar(10)) AS direction, coalesce(f.event_id, o.event_id) AS event_id,
       o.event_type, r.name AS route, r.destination, o.topic, o.shard, o.key, o.tenant AS tenant_id,
       {_headers(_POSTGRES_HEADER, "aggregate_type", "aggregate_id", "version")},
       o.schema_version,
       CAST(CASE
           WHEN b.sending THEN 'SENDING'
           WHEN f.status IS NOT NULL THEN f.status
           WHEN o.status <> 'PENDING' THEN o.status
           WHEN c.covered THEN 'SENT'
           ELSE 'PENDING'
       END AS varchar(10)) AS status,
       coalesce(f.attempts, o.attempts) AS attempts,
       f.available_at AS next_attempt_at,
       CASE WHEN b.sending THEN l.locked_by END AS locked_by,
       CASE WHEN b.sending THEN l.locked_until END AS locked_until,
       coalesce(f.last_error, o.last_error) AS last_error,
       o.created_at, {_headers(_POSTGRES_HEADER, "occurred_at")}, coalesce(o.sent_at, j.settled_at) AS sent_at,
       {_headers(_POSTGRES_HEADER, "trace_id", "correlation_id", "content_type")},
       {_POSTGRES_HEADERS} AS headers, pillarbox_json_text(coalesce(f.body, o.body)) AS payload,
       CASE WHEN b.sending THEN l.batch ELSE coalesce(o.batch, j.batch) END AS batch, o.number,
       o.event_id AS raised_event_id
FROM {table} o
LEFT JOIN pillarbox_routes r ON r.id = o.route
LEFT JOIN pillarbox_lanes l ON l.route = o.route AND l.shard = o.shard
LEFT JOIN pillarbox_failures f ON f.route = o.route AND f.shard = o.shard AND f.row_id = o.id
CROSS JOIN LATERAL (
    SELECT pillarbox_covered(pillarbox_cursor(l.cursor, l.detours, o.tenant), o.id, o.xid) AS covered,
           CAST(l.announced AS jsonb) -> 'details' AS announced
) c
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN c.announced IS NULL OR o.status = 'SENT' OR c.announced -> 'out' @> to_jsonb(o.id) THEN false
        ELSE coalesce(c.announced -> 'redo' @> to_jsonb(o.id), false) OR (
            o.status = 'PENDING' AND NOT c.covered
            AND c.announced ->> 'detour' IS NOT DISTINCT FROM
                CASE WHEN CAST(l.detours AS jsonb) ->> o.tenant IS NOT NULL THEN o.tenant END
            AND pillarbox_covered(c.announced ->> 'to', o.id, o.xid)
            AND NOT coalesce(c.announced -> 'skip' @> to_jsonb(o.id), false)
        )
    END AS sending
) b
LEFT JOIN LATERAL (
    SELECT first.batch, first.settled_at
    FROM (
        SELECT j.batch, j.settled_at, o.id = ANY (j.skipped) AS skipped
        FROM pillarbox_journal j
        WHERE j.route = o.route AND j.shard = o.shard AND j.high >= o.id
          AND CASE WHEN j.detour IS NULL THEN o.tenant IS NULL OR o.tenant <> ALL (j.passed_over)
                   ELSE j.detour = o.tenant END
          AND pillarbox_covered(j.cursor, o.id, o.xid)
        ORDER BY j.high, j.batch LIMIT 1
    ) first
    WHERE NOT first.skipped
    UNION ALL
    SELECT j.batch, j.settled_at
    FROM pillarbox_journal j
    WHERE j.route = o.route AND j.shard = o.shard AND j.redone @> ARRAY[o.id]
    LIMIT 1
) j ON c.covered AND NOT b.sending AND (f.status IS NULL OR f.status = 'SENT')
""",  # noqa: S608  constants
        # Unsent rows as of the last settlement, without reading the whole table. The parts are: fresh and late rows of
        # lanes; failed rows and the rows behind them; rows that lanes have skipped and their detours have not sent. Few
        # lanes have detours. A LIKE pattern makes the planner assume so; otherwise it expects so much work that it
        # compiles the whole view first, for many seconds.
        f"""
CREATE VIEW pillarbox_{direction}_unsent AS
SELECT o.id, o.event_id, o.event_type, o.route, o.shard, o.tenant, o.key, o.status, o.created_at
FROM pillarbox_lanes l CROSS JOIN LATERAL (
    SELECT CAST(split_part(l.cursor, ' ', 1) AS bigint) AS high,
           CAST(split_part(l.cursor, ' ', 2) AS pg_snapshot) AS seen
) c CROSS JOIN LATERAL (
    SELECT o.* FROM {table} o
    WHERE o.route = l.route AND o.shard = l.shard AND o.status = 'PENDING' AND o.id > c.high
    UNION ALL
    SELECT o.* FROM pg_snapshot_xip(c.seen) AS running(xid) JOIN {table} o ON o.xid = running.xid
    WHERE o.route = l.route AND o.shard = l.shard AND o.id <= c.high
      AND NOT pillarbox_covered(pillarbox_cursor(l.cursor, l.detours, o.tenant), o.id, o.xid)
      AND NOT pillarbox_covered(l.cursor, o.id, o.xid)
    UNION ALL
    SELECT o.* FROM {table} o
    WHERE o.route = l.route AND o.shard = l.shard AND o.xid >= pg_snapshot_xmax(c.seen) AND o.id <= c.high
      AND NOT pillarbox_covered(pillarbox_cursor(l.cursor, l.detours, o.tenant), o.id, o.xid)
      AND NOT pillarbox_covered(l.cursor, o.id, o.xid)
) o
WHERE NOT EXISTS (
    SELECT FROM pillarbox_failures f WHERE f.route = o.route AND f.shard = o.shard AND f.row_id = o.id
)
UNION ALL
SELECT f.row_id, coalesce(f.event_id, o.event_id), o.event_type, f.route, f.shard, f.tenant, f.key, f.status,
       o.created_at
FROM pillarbox_failures f CROSS JOIN LATERAL (
    SELECT o.* FROM {table} o
    WHERE o.route = f.route AND o.shard = f.shard AND o.status = 'PENDING' AND o.id = f.row_id
    ORDER BY o.id LIMIT 1
) o
WHERE f.status IN ('RETRYING', 'PARKED', 'FAILED')
UNION ALL
SELECT o.id, o.event_id, o.event_type, o.route, o.shard, o.tenant, o.key, o.status, o.created_at
FROM pillarbox_lanes l CROSS JOIN LATERAL jsonb_each_text(CAST(l.detours AS jsonb)) AS d(tenant, cursor)
CROSS JOIN LATERAL (
    SELECT CAST(split_part(d.cursor, ' ', 1) AS bigint) AS high,
           CAST(split_part(d.cursor, ' ', 2) AS pg_snapshot) AS seen
) c CROSS JOIN LATERAL (
    SELECT o.* FROM {table} o
    WHERE o.route = l.route AND o.shard = l.shard AND o.status = 'PENDING' AND o.id > c.high
    UNION ALL
    SELECT o.* FROM pg_snapshot_xip(c.seen) AS running(xid) JOIN {table} o ON o.xid = running.xid
    WHERE o.route = l.route AND o.shard = l.shard AND o.id <= c.high AND NOT pillarbox_covered(d.cursor, o.id, o.xid)
    UNION ALL
    SELECT o.* FROM {table} o
    WHERE o.route = l.route AND o.shard = l.shard AND o.xid >= pg_snapshot_xmax(c.seen) AND o.id <= c.high
      AND NOT pillarbox_covered(d.cursor, o.id, o.xid)
) o
WHERE l.detours LIKE '{{%' AND o.tenant = d.tenant AND pillarbox_covered(l.cursor, o.id, o.xid) AND NOT EXISTS (
    SELECT FROM pillarbox_failures f WHERE f.route = o.route AND f.shard = o.shard AND f.row_id = o.id
)
""",  # noqa: S608  constants
    )


# -- MariaDB, MySQL and SQLite: a queue --------------------------------------------------------------------------------


def _queue(
    direction: str,
    table: str,
    *,
    key: str,
    tenant: str,
    body: str,
    is_json: str,
    header: str,
    announced: str,
    quote: str,
) -> tuple[str, ...]:
    # The lane's row has the rows in flight, so that a delivery is updated once, when it is sent.
    sending = f"""(
           o.status IN ('PENDING', 'RETRYING', 'PARKED')
           AND o.id BETWEEN l.announced_low AND l.announced_high AND {announced}
       )"""
    return (
        f"""
CREATE VIEW pillarbox_{direction}_events AS
SELECT o.id, '{direction}' AS direction, coalesce(f.event_id, o.event_id) AS event_id, o.event_type, r.name AS route,
       r.destination, o.topic, o.shard, {key} AS {quote}key{quote}, {tenant} AS tenant_id,
       {_headers(header, "aggregate_type", "aggregate_id", "version")},
       o.schema_version,
       CASE WHEN {sending} THEN 'SENDING' ELSE o.status END AS status,
       coalesce(f.attempts, o.attempts) AS attempts,
       f.available_at AS next_attempt_at,
       CASE WHEN {sending} THEN l.locked_by END AS locked_by,
       CASE WHEN {sending} THEN l.locked_until END AS locked_until,
       coalesce(f.last_error, o.last_error) AS last_error,
       o.created_at, {_headers(header, "occurred_at")}, o.sent_at,
       {_headers(header, "trace_id", "correlation_id", "content_type")},
       coalesce(f.headers, o.headers) AS headers, CASE WHEN {is_json}({body}) THEN {body} END AS payload,
       CASE WHEN {sending} THEN l.batch ELSE o.batch END AS batch, o.number, o.event_id AS raised_event_id
FROM {table} o
LEFT JOIN pillarbox_routes r ON r.id = o.route
LEFT JOIN pillarbox_lanes l ON l.route = o.route AND l.shard = o.shard
LEFT JOIN pillarbox_failures f ON f.route = o.route AND f.shard = o.shard AND f.row_id = o.id
""",  # noqa: S608  constants
        f"""
CREATE VIEW pillarbox_{direction}_unsent AS
SELECT o.id, o.event_id, o.event_type, o.route, o.shard, o.tenant, o.{quote}key{quote}, o.status, o.created_at
FROM {table} o WHERE o.status <> 'SENT'
""",  # noqa: S608  constants
    )


def _mysql(direction: str, table: str) -> tuple[str, ...]:
    return _queue(
        direction,
        table,
        key="CONVERT(o.`key` USING utf8mb4)",
        tenant="CONVERT(o.tenant USING utf8mb4)",
        body="CONVERT(coalesce(f.body, o.body) USING utf8mb4)",
        is_json="JSON_VALID",
        header="JSON_UNQUOTE(JSON_EXTRACT(coalesce(f.headers, o.headers), '$.{}'))",
        announced="JSON_CONTAINS(l.announced, CAST(o.id AS CHAR), '$.items')",
        quote="`",
    )


def _sqlite(direction: str, table: str) -> tuple[str, ...]:
    return _queue(
        direction,
        table,
        key='o."key"',
        tenant="o.tenant",
        body="CAST(coalesce(f.body, o.body) AS TEXT)",
        is_json="json_valid",
        header="json_extract(coalesce(f.headers, o.headers), '$.{}')",
        announced="EXISTS (SELECT 1 FROM json_each(l.announced, '$.items') AS j WHERE j.value = o.id)",
        quote='"',
    )


# -- both tables -------------------------------------------------------------------------------------------------------

_BOTH = (
    """
CREATE VIEW outbox_events AS
SELECT * FROM pillarbox_outbound_events UNION ALL SELECT * FROM pillarbox_inbound_events
""",
    """
CREATE VIEW pillarbox_unsent AS
SELECT 'outbound' AS direction, o.* FROM pillarbox_outbound_unsent o
UNION ALL
SELECT 'inbound', i.* FROM pillarbox_inbound_unsent i
""",
)


def _views(of: Callable[[str, str], tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(view for direction, table in _DIRECTIONS.items() for view in of(direction, table)) + _BOTH


VIEWS = {
    "postgresql": _FUNCTIONS + _views(_postgresql),
    "mysql": _views(_mysql),
    "mariadb": _views(_mysql),
    "sqlite": _views(_sqlite),
}
