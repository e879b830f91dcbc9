"""Step 3: the outbox as a log, on PostgreSQL: which transaction wrote a row, cursors, failures, and the journal.

On every other database the outbox is a queue: there the new columns stay empty.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from ...errors import StoreError
from .. import origin
from ..columns import ByteExact, JsonText, LongBytes, LongText, Utc
from .step_0001 import VIEWS

FIRST_VERSION = (14,)
"""Of PostgreSQL, for the log."""


def upgrade(op: Operations) -> None:
    """Add what the log needs. New columns are empty, so no busy table is rewritten."""
    context = op.get_context()
    version = () if context.as_sql else op.get_bind().dialect.server_version_info or ()
    if context.dialect.name == "postgresql" and version and version < FIRST_VERSION:
        raise StoreError(f"PostgreSQL {'.'.join(map(str, version))} is too old: the oldest is {FIRST_VERSION[0]}")
    op.add_column("pillarbox_lanes", sa.Column("cursor", LongText))
    if op.get_context().dialect.name != "postgresql":
        op.execute(_UNSENT_QUEUE)
        return
    op.create_table(
        "pillarbox_failures",
        sa.Column("route", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("shard", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("row_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tenant", ByteExact(200)),
        sa.Column("key", ByteExact(512), nullable=False),
        sa.Column("status", sa.String(10), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("available_at", Utc),
        sa.Column("last_error", LongText),
        sa.Column("event_id", sa.Uuid),
        sa.Column("headers", JsonText),
        sa.Column("body", LongBytes),
    )
    for statement in (*_TABLES, *origin.WRITE, _COVERED, UNSENT, view()):
        op.execute(sa.text(statement))
    op.execute(INDEX)
    op.execute("UPDATE pillarbox_meta SET store = 'log'")


# The transaction is known by its top-level number, so savepoints make no difference. Rows from before this step have
# none: they are older than every snapshot.
_TABLES = (
    "ALTER TABLE pillarbox_outbox ADD COLUMN xid xid8",
    "ALTER TABLE pillarbox_outbox ALTER COLUMN xid SET DEFAULT pg_current_xact_id()",
    """
CREATE INDEX ix_pillarbox_failures_key ON pillarbox_failures (key, route, shard, row_id)
    WHERE status IN ('RETRYING', 'PARKED', 'FAILED')""",
    """
CREATE INDEX ix_pillarbox_failures_due ON pillarbox_failures (route, shard, available_at) WHERE status = 'RETRYING'""",
    "CREATE INDEX ix_pillarbox_failures_event ON pillarbox_failures (event_id) WHERE event_id IS NOT NULL",
    """
CREATE TABLE pillarbox_journal (
    route bigint NOT NULL,
    shard integer NOT NULL,
    high bigint NOT NULL,
    batch bigint NOT NULL,
    cursor text NOT NULL,
    redone bigint[] NOT NULL DEFAULT '{}',
    skipped bigint[] NOT NULL DEFAULT '{}',
    first_number bigint NOT NULL,
    count integer NOT NULL,
    relay varchar(200),
    settled_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (route, shard, high, batch)
)""",
    "CREATE TABLE pillarbox_origin (id smallint PRIMARY KEY, first_xmin bigint)",
)

INDEX = """
CREATE INDEX ix_pillarbox_outbox_xid ON pillarbox_outbox (route, shard, xid, id) WHERE xid IS NOT NULL
"""
"""Leads to the rows of a transaction in a lane. Both this and the lane's index are partial, so that no statement can be
planned with the wrong one, whatever the statistics say: only what names an xid can use this one, and only what names a
status the other."""

# What `pillarbox.cursor.Cursor.covers` says, for people's questions.
_COVERED = """
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
"""

COLUMNS = "o.id, o.event_id, o.event_type, o.route, o.shard, o.tenant, o.key, o.status, o.created_at"
_HERE = "o.route = l.route AND o.shard = l.shard"
_HIGH = "CAST(split_part(l.cursor, ' ', 1) AS bigint)"
_SEEN = "CAST(split_part(l.cursor, ' ', 2) AS pg_snapshot)"
AHEAD = f"""
    SELECT o.* FROM pillarbox_outbox o
    WHERE {_HERE} AND o.status = 'PENDING' AND o.status <> 'SENT' AND o.id > {_HIGH}
    UNION ALL
    SELECT o.* FROM pg_snapshot_xip({_SEEN}) AS running(xid) JOIN pillarbox_outbox o ON o.xid = running.xid
    WHERE {_HERE} AND o.id <= {_HIGH} AND NOT pillarbox_covered(l.cursor, o.id, o.xid)
    UNION ALL
    SELECT o.* FROM pillarbox_outbox o
    WHERE {_HERE} AND o.xid >= pg_snapshot_xmax({_SEEN}) AND o.id <= {_HIGH}
      AND NOT pillarbox_covered(l.cursor, o.id, o.xid)
"""  # noqa: S608  constants

# What is not sent, as far as it is settled: for counting, without a look at all that was ever written.
UNSENT = f"""
CREATE VIEW pillarbox_unsent AS
SELECT {COLUMNS}
FROM pillarbox_outbox o JOIN pillarbox_lanes l ON {_HERE} WHERE l.cursor IS NULL AND o.status <> 'SENT'
UNION ALL
SELECT {COLUMNS}
FROM pillarbox_lanes l CROSS JOIN LATERAL ({AHEAD}) o
WHERE l.cursor IS NOT NULL AND NOT EXISTS (
    SELECT FROM pillarbox_failures f WHERE f.route = o.route AND f.shard = o.shard AND f.row_id = o.id
)
UNION ALL
SELECT f.row_id, coalesce(f.event_id, o.event_id), o.event_type, f.route, f.shard, f.tenant, f.key, f.status,
       o.created_at
FROM pillarbox_failures f JOIN pillarbox_lanes l ON l.route = f.route AND l.shard = f.shard
CROSS JOIN unnest(ARRAY['PENDING', 'RETRYING', 'PARKED', 'FAILED']) AS s(status)
CROSS JOIN LATERAL (
    SELECT o.* FROM pillarbox_outbox o
    WHERE o.route = f.route AND o.shard = f.shard AND o.status = s.status AND o.status <> 'SENT' AND o.id = f.row_id
    ORDER BY o.id LIMIT 1
) o
WHERE l.cursor IS NOT NULL AND f.status IN ('RETRYING', 'PARKED', 'FAILED')
"""  # noqa: S608  constants

_UNSENT_QUEUE = """
CREATE VIEW pillarbox_unsent AS
SELECT id, event_id, event_type, route, shard, tenant, `key`, status, created_at
FROM pillarbox_outbox WHERE status <> 'SENT'
"""


def view() -> str:
    """The view for people, with the status of a delivery in a log: that is nowhere written down."""
    view = VIEWS["postgresql"][-1].replace("CREATE VIEW", "CREATE OR REPLACE VIEW")
    for old, new in (
        ("o.event_id, o.event_type", "coalesce(f.event_id, o.event_id) AS event_id, o.event_type"),
        ("o.status, o.attempts, o.available_at", f"{_STATUS} AS status, {_OF_FAILURE}"),
        ("CASE WHEN o.status = 'SENDING' THEN l.locked_by END", "CASE WHEN b.sending THEN l.locked_by END"),
        ("CASE WHEN o.status = 'SENDING' THEN l.locked_until END", "CASE WHEN b.sending THEN l.locked_until END"),
        ("o.last_error", "coalesce(f.last_error, o.last_error) AS last_error"),
        ("o.sent_at", "coalesce(o.sent_at, j.settled_at) AS sent_at"),
        ("o.headers ->>", "coalesce(f.headers, o.headers) ->>"),
        ("o.headers,", "coalesce(f.headers, o.headers) AS headers,"),
        ("o.body", "coalesce(f.body, o.body)"),
        ("o.batch,", "CASE WHEN b.sending THEN l.batch ELSE coalesce(o.batch, j.batch) END AS batch,"),
    ):
        if old not in view:
            raise AssertionError(old)
        view = view.replace(old, new)
    # What people have named by its first id is found by an index, though an edit may have given it another one.
    return view.replace("o.number\n", "o.number, o.event_id AS raised_event_id\n") + _JOINS


_OF_FAILURE = "coalesce(f.attempts, o.attempts) AS attempts, coalesce(f.available_at, o.available_at)"
_STATUS = """CAST(CASE
           WHEN b.sending THEN 'SENDING'
           WHEN l.cursor IS NULL THEN o.status
           WHEN f.status IS NOT NULL THEN f.status
           WHEN o.status <> 'PENDING' THEN o.status
           WHEN b.covered THEN 'SENT'
           ELSE 'PENDING'
       END AS varchar(10))"""
_JOINS = """
LEFT JOIN pillarbox_failures f ON f.route = o.route AND f.shard = o.shard AND f.row_id = o.id
CROSS JOIN LATERAL (
    SELECT l.cursor IS NOT NULL AND pillarbox_covered(l.cursor, o.id, o.xid) AS covered,
           CAST(l.announced AS jsonb) AS announced
) c
CROSS JOIN LATERAL (
    SELECT c.covered,
           CASE
               WHEN c.announced IS NULL OR o.status = 'SENT' THEN false
               WHEN l.cursor IS NULL THEN
                   o.status IN ('PENDING', 'RETRYING', 'PARKED')
                   AND o.id BETWEEN l.announced_low AND l.announced_high
                   AND (c.announced -> 'items') @> to_jsonb(o.id)
               WHEN (c.announced -> 'details' -> 'out') @> to_jsonb(o.id) THEN false
               ELSE
                   coalesce((c.announced -> 'details' -> 'redo') @> to_jsonb(o.id), false)
                   OR (
                       o.status = 'PENDING' AND NOT c.covered
                       AND pillarbox_covered(c.announced -> 'details' ->> 'to', o.id, o.xid)
                       AND NOT coalesce((c.announced -> 'details' -> 'skip') @> to_jsonb(o.id), false)
                   )
           END AS sending
) b
LEFT JOIN LATERAL (
    SELECT first.batch, first.settled_at
    FROM (
        SELECT j.batch, j.settled_at, o.id = ANY (j.skipped) AS skipped
        FROM pillarbox_journal j
        WHERE j.route = o.route AND j.shard = o.shard AND j.high >= o.id
          AND pillarbox_covered(j.cursor, o.id, o.xid)
        ORDER BY j.high, j.batch LIMIT 1
    ) first
    WHERE NOT first.skipped
    UNION ALL
    SELECT j.batch, j.settled_at
    FROM pillarbox_journal j
    WHERE j.route = o.route AND j.shard = o.shard AND j.redone @> ARRAY[o.id]
    LIMIT 1
) j ON b.covered AND NOT b.sending AND (f.status IS NULL OR f.status = 'SENT')
"""
