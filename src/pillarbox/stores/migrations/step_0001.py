"""Step 1: the outbox as a queue, its routes and lanes, and the view for people."""

from __future__ import annotations

from uuid import UUID

import sqlalchemy as sa
from alembic.operations import Operations

from ... import clock
from ...outbox import SHARDS
from ..columns import AutoId, ByteExact, JsonText, LongBytes, LongText, Name, Utc, now


def upgrade(op: Operations) -> None:
    """Make everything."""
    # Every index is paid for by every business transaction. On PostgreSQL the id needs none of its own, because the
    # lane's index leads to it; MySQL and SQLite keep their rows in the order of the primary key, and theirs is the id.
    lean = op.get_context().dialect.name == "postgresql"
    identity = sa.PrimaryKeyConstraint if lean else sa.UniqueConstraint
    op.create_table(
        "pillarbox_meta",
        sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("install_id", sa.Uuid, nullable=False),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("store", sa.String(20), nullable=False),
        sa.Column("shards", sa.Integer, nullable=False),
        sa.Column("shard_generation", sa.Integer, nullable=False),
    )
    op.create_table(
        "pillarbox_routes",
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("name", Name, nullable=False),
        sa.Column("destination", sa.String(100), nullable=False),
        sa.Column("topic", Name, nullable=False),
        sa.Column("schema_version", sa.Integer),
        sa.Column("on_failure", sa.String(10), nullable=False),
        sa.Column("retry_base", sa.Double, nullable=False),
        sa.Column("retry_cap", sa.Double, nullable=False),
        sa.Column("retry_attempts", sa.Integer, nullable=False),
        sa.Column("updated_at", Utc, nullable=False),
        mysql_charset="utf8mb4",
    )
    op.create_table(
        "pillarbox_lanes",
        sa.Column("route", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("shard", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("token", sa.Uuid),
        sa.Column("locked_by", sa.String(200)),
        sa.Column("locked_until", Utc),
        sa.Column("batch", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("next_number", sa.BigInteger, nullable=False, server_default="1"),
        sa.Column("announced", LongText),
        sa.Column("tries", sa.Integer, nullable=False, server_default="0"),
        sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.text("false")),
        mysql_charset="utf8mb4",
    )
    op.create_table(
        "pillarbox_outbox",
        sa.Column("id", AutoId, sa.Identity(), primary_key=not lean, nullable=False),
        sa.Column("event_id", sa.Uuid, nullable=False),
        sa.Column("event_type", sa.String(200), nullable=False),
        sa.Column("route", sa.BigInteger, nullable=False),
        sa.Column("shard", sa.Integer, nullable=False),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("topic", Name, nullable=False),
        sa.Column("key", ByteExact(512), nullable=False),
        sa.Column("tenant", ByteExact(200)),
        sa.Column("headers", JsonText, nullable=False),
        sa.Column("body", LongBytes, nullable=False),
        sa.Column("created_at", Utc, nullable=False, server_default=now()),
        sa.Column("status", sa.String(10), nullable=False, server_default="PENDING"),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("available_at", Utc),
        sa.Column("batch", sa.BigInteger),
        sa.Column("number", sa.BigInteger),
        sa.Column("last_error", LongText),
        sa.Column("sent_at", Utc),
        identity("event_id", "route", "schema_version", name="uq_pillarbox_outbox_event"),
        sqlite_autoincrement=True,
        mysql_charset="utf8mb4",
    )
    op.create_index(
        "ix_pillarbox_outbox_lane",
        "pillarbox_outbox",
        ["route", "shard", "status", "id"],
        postgresql_where=sa.text("status <> 'SENT'"),
        sqlite_where=sa.text("status <> 'SENT'"),
    )
    _install(op)
    for statement in VIEWS["mysql" if op.get_context().dialect.name == "mariadb" else op.get_context().dialect.name]:
        op.execute(sa.text(statement.replace(":", r"\:")))


def _install(op: Operations) -> None:
    meta = sa.table(
        "pillarbox_meta",
        *(
            sa.column(name, kind)
            for name, kind in (("id", sa.SmallInteger()), ("install_id", sa.Uuid()), ("schema_version", sa.Integer()))
        ),
        *(
            sa.column(name, kind)
            for name, kind in (("store", sa.String()), ("shards", sa.Integer()), ("shard_generation", sa.Integer()))
        ),
    )
    # Printed SQL may be run on many databases: there each one must draw its own id.
    drawn: UUID | sa.ColumnElement[UUID] = clock.current().new_id()
    if op.get_context().as_sql:
        drawn = _INSTALL_ID[op.get_context().dialect.name]
    op.execute(
        meta.insert().values(id=1, install_id=drawn, schema_version=0, store="queue", shards=SHARDS, shard_generation=1)
    )


_INSTALL_ID: dict[str, sa.ColumnElement[UUID]] = {
    "postgresql": sa.literal_column("gen_random_uuid()"),
    "mysql": sa.literal_column("REPLACE(UUID(), '-', '')"),
    "mariadb": sa.literal_column("UUID()"),
    "sqlite": sa.literal_column("lower(hex(randomblob(16)))"),
}

_SELECT = """
CREATE VIEW outbox_events AS
SELECT o.id, o.event_id, o.event_type, r.name AS route, r.destination, o.topic, o.shard,
       {key} AS {quoted_key}, {tenant} AS tenant_id,
       {aggregate_type} AS aggregate_type, {aggregate_id} AS aggregate_id, {version} AS version, o.schema_version,
       o.status, o.attempts, o.available_at AS next_attempt_at,
       CASE WHEN o.status = 'SENDING' THEN l.locked_by END AS locked_by,
       CASE WHEN o.status = 'SENDING' THEN l.locked_until END AS locked_until,
       o.last_error, o.created_at, {occurred_at} AS occurred_at, o.sent_at,
       {trace_id} AS trace_id, {correlation_id} AS correlation_id,
       {content_type} AS content_type, o.headers, {payload} AS payload, o.batch, o.number
FROM pillarbox_outbox o
LEFT JOIN pillarbox_routes r ON r.id = o.route
LEFT JOIN pillarbox_lanes l ON l.route = o.route AND l.shard = o.shard
"""
_FROM_HEADERS = (
    "aggregate_type",
    "aggregate_id",
    "version",
    "occurred_at",
    "trace_id",
    "correlation_id",
    "content_type",
)


def _view(header: str, key: str, tenant: str, payload: str, quoted_key: str = "key") -> str:
    headers = {name: header.format(name) for name in _FROM_HEADERS}
    return _SELECT.format(key=key, tenant=tenant, payload=payload, quoted_key=quoted_key, **headers)


# A body that is no JSON, whatever its content type says, is shown as null: it must never fail the view.
VIEWS: dict[str, tuple[str, ...]] = {
    "postgresql": (
        """
CREATE FUNCTION pillarbox_json_text(body bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN (convert_from(body, 'UTF8')::json)::text;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END
$$
""",
        _view("o.headers ->> '{}'", "o.key", "o.tenant", "pillarbox_json_text(o.body)"),
    ),
    "mysql": (
        _view(
            "JSON_UNQUOTE(JSON_EXTRACT(o.headers, '$.{}'))",
            "CONVERT(o.`key` USING utf8mb4)",
            "CONVERT(o.tenant USING utf8mb4)",
            "CASE WHEN JSON_VALID(CONVERT(o.body USING utf8mb4)) THEN CONVERT(o.body USING utf8mb4) END",
            "`key`",
        ),
    ),
    "sqlite": (
        _view(
            "json_extract(o.headers, '$.{}')",
            'o."key"',
            "o.tenant",
            "CASE WHEN json_valid(CAST(o.body AS TEXT)) THEN CAST(o.body AS TEXT) END",
            '"key"',
        ),
    ),
}
