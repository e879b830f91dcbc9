"""Step 1: all tables, their indexes, and the views."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import sqlalchemy as sa
from alembic.operations import Operations

from ... import clock
from ...errors import StoreError
from ...outbox import SHARDS, TABLES
from .. import copy_check
from ..columns import (
    AutoId,
    ByteExact,
    EventName,
    Key,
    LongBytes,
    LongText,
    Name,
    Tenant,
    Topic,
    TransactionId,
    Utc,
    now,
)
from .views import VIEWS

OLDEST_POSTGRESQL = (14,)

_WAITING = sa.text("status IN ('RETRYING', 'PARKED', 'FAILED')")


def upgrade(op: Operations) -> None:
    """Make everything."""
    context = op.get_context()
    postgres = context.dialect.name == "postgresql"
    if postgres and not context.as_sql:
        version = context.dialect.server_version_info or ()
        if version < OLDEST_POSTGRESQL:
            raise StoreError(
                f"this is PostgreSQL {'.'.join(map(str, version))}, and the oldest that Pillarbox supports is "
                f"{OLDEST_POSTGRESQL[0]}: upgrade the server"
            )
    _make_lanes(op)
    for table in TABLES:
        _make_deliveries(op, table, postgres)
    _make_failures(op)
    if postgres:
        _make_log(op)
    _make_operations(op)
    _make_receiving_end(op)
    _install(op)
    for statement in VIEWS[context.dialect.name]:
        op.execute(sa.text(statement))


def _make_lanes(op: Operations) -> None:
    _make_table(
        op,
        "pillarbox_meta",
        sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("install_id", sa.Uuid, nullable=False),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("shards", sa.Integer, nullable=False),
        sa.Column("shard_generation", sa.Integer, nullable=False),
    )
    _make_table(
        op,
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
        sa.Column("shard_by", sa.String(10), nullable=False),
        sa.Column("updated_at", Utc, nullable=False),
    )
    _make_table(
        op,
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
        sa.Column("announced_low", sa.BigInteger),
        sa.Column("announced_high", sa.BigInteger),
        sa.Column("tries", sa.Integer, nullable=False, server_default="0"),
        sa.Column("cursor", LongText),
        sa.Column("detours", LongText),
        sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("rate", sa.Double),
        sa.Column("trouble", LongText),
        sa.Column("trouble_until", Utc),
        # Rows of lanes are written again with every batch. In a page with room a new version needs no entry in an
        # index. While an old snapshot keeps the dead ones, each entry costs a walk over all that were made since.
        postgresql_with={"fillfactor": 10},
    )


def _make_deliveries(op: Operations, name: str, postgres: bool) -> None:
    # Every index is paid for by every business transaction. On PostgreSQL the id needs none of its own, because the
    # lane's index leads to it; MySQL and SQLite keep their rows in the order of the primary key, and theirs is the id.
    identity = sa.PrimaryKeyConstraint if postgres else sa.UniqueConstraint
    xid = sa.Column("xid", TransactionId, server_default=sa.text("pg_current_xact_id()"))
    _make_table(
        op,
        name,
        sa.Column("id", AutoId, sa.Identity(), primary_key=not postgres, nullable=False),
        sa.Column("event_id", sa.Uuid, nullable=False),
        sa.Column("event_type", EventName, nullable=False),
        sa.Column("route", sa.BigInteger, nullable=False),
        sa.Column("shard", sa.Integer, nullable=False),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("topic", Topic, nullable=False),
        sa.Column("key", Key, nullable=False),
        sa.Column("tenant", Tenant),
        sa.Column("headers", LongText, nullable=False),
        sa.Column("body", LongBytes, nullable=False),
        sa.Column("created_at", Utc, nullable=False, server_default=now()),
        sa.Column("status", sa.String(10), nullable=False, server_default="PENDING"),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("batch", sa.BigInteger),
        sa.Column("number", sa.BigInteger),
        sa.Column("last_error", LongText),
        sa.Column("sent_at", Utc),
        *([xid] if postgres else []),
        identity("event_id", "route", "schema_version", name=f"uq_{name}_event"),
    )
    if postgres:
        # The first leads to the rows of a lane, the second to those of a transaction in it. Both are partial, so that
        # no statement can be planned with the wrong one, whatever the statistics say: only what names the status can
        # use the first, and only what names an xid the second. The status of a row never changes in a log: in the key
        # it would be dead weight.
        is_pending, has_xid = sa.text("status = 'PENDING'"), sa.text("xid IS NOT NULL")
        _make_index(op, f"ix_{name}_lane", name, "route", "shard", "id", where=is_pending)
        _make_index(op, f"ix_{name}_xid", name, "route", "shard", "xid", "id", where=has_xid)
    else:
        is_unsent = sa.text("status <> 'SENT'")
        _make_index(op, f"ix_{name}_lane", name, "route", "shard", "status", "id", where=is_unsent)


def _make_failures(op: Operations) -> None:
    _make_table(
        op,
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
        sa.Column("headers", LongText),
        sa.Column("body", LongBytes),
    )
    book, is_due, is_edited = "pillarbox_failures", sa.text("status = 'RETRYING'"), sa.text("event_id IS NOT NULL")
    # Leads to the first waiting row of a key, however many are parked behind it. Where an index has all rows, their
    # status in it tells which of them wait. In this order nothing else is tempted to use it.
    dialect = op.get_context().dialect.name
    tenant = sa.text("coalesce(tenant, '')") if dialect == "postgresql" else "tenant"
    status = ("status",) if dialect in ("mysql", "mariadb") else ()
    _make_index(
        op, "ix_pillarbox_failures_key", book, "key", tenant, "route", "shard", "row_id", *status, where=_WAITING
    )
    _make_index(op, "ix_pillarbox_failures_due", book, "route", "shard", "available_at", where=is_due)
    _make_index(op, "ix_pillarbox_failures_event", book, "event_id", where=is_edited)


def _make_log(op: Operations) -> None:
    """What only a log needs."""
    op.execute(
        """
CREATE TABLE pillarbox_journal (
    route bigint NOT NULL,
    shard integer NOT NULL,
    high bigint NOT NULL,
    batch bigint NOT NULL,
    cursor text NOT NULL,
    detour text,
    passed_over text[] NOT NULL DEFAULT '{}',
    redone bigint[] NOT NULL DEFAULT '{}',
    skipped bigint[] NOT NULL DEFAULT '{}',
    first_number bigint NOT NULL,
    count integer NOT NULL,
    relay varchar(200),
    settled_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (route, shard, high, batch)
)"""
    )
    op.execute("CREATE TABLE pillarbox_origin (id smallint PRIMARY KEY, first_xmin bigint)")
    for statement in copy_check.WRITE:
        op.execute(sa.text(statement))


def _make_operations(op: Operations) -> None:
    """Who is at work, what people want, and what they have done."""
    _make_table(
        op,
        "pillarbox_relays",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("started_at", Utc, nullable=False, server_default=now()),
        sa.Column("expires_at", Utc, nullable=False),
        sa.Column("serves", LongText, nullable=False),
        sa.Column("shards", LongText),
    )
    _make_table(
        op,
        "pillarbox_tenants",
        sa.Column("tenant", ByteExact(200), primary_key=True),
        sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("rate", sa.Double),
    )
    _make_table(
        op,
        "pillarbox_requests",
        sa.Column("id", AutoId, sa.Identity(), primary_key=True),
        sa.Column("route", sa.BigInteger, nullable=False),
        sa.Column("shard", sa.Integer, nullable=False),
        sa.Column("row_id", sa.BigInteger, nullable=False),
        sa.Column("action", sa.String(10), nullable=False),
        sa.Column("event_id", sa.Uuid),
        sa.Column("body", LongBytes),
        sa.Column("audit", sa.BigInteger, nullable=False),
    )
    _make_index(op, "ix_pillarbox_requests_lane", "pillarbox_requests", "route", "shard", "id")
    _make_index(op, "ix_pillarbox_requests_row", "pillarbox_requests", "row_id")
    _make_table(
        op,
        "pillarbox_audit",
        sa.Column("id", AutoId, sa.Identity(), primary_key=True),
        sa.Column("at", Utc, nullable=False, server_default=now()),
        sa.Column("who", sa.String(200), nullable=False),
        sa.Column("action", sa.String(20), nullable=False),
        sa.Column("target", LongText, nullable=False),
        sa.Column("event_id", sa.Uuid),
        sa.Column("reason", LongText),
        sa.Column("details", LongText),
    )
    _make_index(op, "ix_pillarbox_audit_event", "pillarbox_audit", "event_id")


def _make_receiving_end(op: Operations) -> None:
    """Consumers, and the messages that they know."""
    _make_table(
        op,
        "pillarbox_consumers",
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("name", Name, nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("source", sa.String(100), nullable=False),
        sa.Column("topics", LongText, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False, server_default="1"),
        sa.Column("handled", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("last_event_id", sa.Uuid),
        sa.Column("last_occurred_at", Utc),
        sa.Column("lag", sa.Double),
        sa.Column("seen_at", Utc),
        sa.Column("updated_at", Utc, nullable=False),
        sa.Column("running", LongText),
    )
    # Every message that comes in pays for this row, so it is narrow: no name, no number of its own.
    _make_table(
        op,
        "pillarbox_inbox",
        sa.Column("consumer", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tenant", ByteExact(200), primary_key=True, server_default=""),
        sa.Column("event_id", sa.Uuid, primary_key=True),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("digest", sa.LargeBinary(16).with_variant(sa.BINARY(16), "mysql", "mariadb"), nullable=False),
        sa.Column("at", Utc, nullable=False, server_default=now()),
        sqlite_with_rowid=False,
    )
    # For pruning. On PostgreSQL it adds a quarter to what the server has to do for a row. A BRIN index adds next to
    # nothing, but only until the room of pruned rows is used again: then old and new moments stand in the same pages,
    # and every portion that is pruned would walk over the whole table. It has all rows, but only what names a moment
    # can use it: for want of statistics PostgreSQL may look for an event among all rows of its consumer.
    names_a_moment = sa.text("at > '-infinity'")
    op.create_index("ix_pillarbox_inbox_at", "pillarbox_inbox", ["consumer", "at"], postgresql_where=names_a_moment)
    # A row for each message that waits, none as a rule: each batch of messages looks for those of its lines.
    _make_table(
        op,
        "pillarbox_claims",
        sa.Column("consumer", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("line", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("inbox_id", sa.Uuid, primary_key=True),
        sa.Column("tenant", ByteExact(200), nullable=False, server_default=""),
        sa.Column("delivery", sa.Uuid, nullable=False),
        sa.Column("gate", sa.Boolean, nullable=False),
        sa.Column("refused", LongText),
    )
    gates = sa.text("gate")
    # A line may have many claims that gate nothing: failed ones, which wait for a person.
    _make_index(op, "ix_pillarbox_claims_gate", "pillarbox_claims", "consumer", "line", "gate", where=gates)
    _make_index(op, "ix_pillarbox_claims_delivery", "pillarbox_claims", "delivery")
    _make_index(op, "ix_pillarbox_claims_inbox", "pillarbox_claims", "inbox_id")


def _install(op: Operations) -> None:
    integers = ("id", "schema_version", "shards", "shard_generation")
    columns = [sa.column(name, sa.Integer()) for name in integers]
    meta = sa.table("pillarbox_meta", sa.column("install_id", sa.Uuid()), *columns)
    # Printed SQL may be run on many databases: there each one must draw its own id.
    drawn: UUID | sa.ColumnElement[UUID] = clock.new_id()
    if op.get_context().as_sql:
        drawn = _INSTALL_ID[op.get_context().dialect.name]
    op.execute(meta.insert().values(id=1, install_id=drawn, schema_version=0, shards=SHARDS, shard_generation=1))


_INSTALL_ID: dict[str, sa.ColumnElement[UUID]] = {
    "postgresql": sa.literal_column("gen_random_uuid()"),
    "mysql": sa.literal_column("REPLACE(UUID(), '-', '')"),
    "mariadb": sa.literal_column("UUID()"),
    "sqlite": sa.literal_column("lower(hex(randomblob(16)))"),
}


def _make_table(op: Operations, name: str, *columns: Any, **options: Any) -> None:
    drawn = any(isinstance(column, sa.Column) and column.identity is not None for column in columns)
    op.create_table(name, *columns, mysql_charset="utf8mb4", sqlite_autoincrement=drawn, **options)


def _make_index(
    op: Operations, name: str, table: str, *columns: str | sa.TextClause, where: sa.TextClause | None = None
) -> None:
    """An index of these columns; where the database can, only of the rows ``where`` this is true."""
    op.create_index(name, table, list(columns), postgresql_where=where, sqlite_where=where)
