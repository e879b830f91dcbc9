"""Step 2: relays and what people tell them: who is alive, requests, pauses, rates, and the trail of all of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from ..columns import AutoId, ByteExact, LongBytes, LongText, Utc, now
from .step_0001 import VIEWS


def upgrade(op: Operations) -> None:
    """Add what relays and operators need. New columns are empty, so no busy table is rewritten."""
    op.add_column("pillarbox_lanes", sa.Column("rate", sa.Double))
    op.add_column("pillarbox_lanes", sa.Column("announced_low", sa.BigInteger))
    op.add_column("pillarbox_lanes", sa.Column("announced_high", sa.BigInteger))
    op.add_column("pillarbox_lanes", sa.Column("trouble", LongText))
    op.add_column("pillarbox_lanes", sa.Column("trouble_until", Utc))
    op.create_table(
        "pillarbox_relays",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("started_at", Utc, nullable=False, server_default=now()),
        sa.Column("expires_at", Utc, nullable=False),
        sa.Column("serves", LongText, nullable=False),
        sa.Column("shards", LongText),
        mysql_charset="utf8mb4",
    )
    op.create_table(
        "pillarbox_tenants",
        sa.Column("tenant", ByteExact(200), primary_key=True),
        sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("rate", sa.Double),
        mysql_charset="utf8mb4",
    )
    op.create_table(
        "pillarbox_requests",
        sa.Column("id", AutoId, sa.Identity(), primary_key=True),
        sa.Column("route", sa.BigInteger, nullable=False),
        sa.Column("shard", sa.Integer, nullable=False),
        sa.Column("row_id", sa.BigInteger, nullable=False),
        sa.Column("action", sa.String(10), nullable=False),
        sa.Column("event_id", sa.Uuid),
        sa.Column("body", LongBytes),
        sa.Column("audit", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
        mysql_charset="utf8mb4",
    )
    op.create_index("ix_pillarbox_requests_lane", "pillarbox_requests", ["route", "shard", "id"])
    op.create_table(
        "pillarbox_audit",
        sa.Column("id", AutoId, sa.Identity(), primary_key=True),
        sa.Column("at", Utc, nullable=False, server_default=now()),
        sa.Column("who", sa.String(200), nullable=False),
        sa.Column("action", sa.String(20), nullable=False),
        sa.Column("target", LongText, nullable=False),
        sa.Column("event_id", sa.Uuid),
        sa.Column("reason", LongText),
        sa.Column("details", LongText),
        sqlite_autoincrement=True,
        mysql_charset="utf8mb4",
    )
    op.create_index("ix_pillarbox_audit_event", "pillarbox_audit", ["event_id"])
    # Leads to the first waiting row of a key, however many are parked behind it. Only where an index can hold these few
    # rows alone: elsewhere every business transaction would pay for it.
    if op.get_context().dialect.name in ("postgresql", "sqlite"):
        waiting = sa.text("status IN ('RETRYING', 'PARKED', 'FAILED')")
        op.create_index(
            "ix_pillarbox_outbox_waiting",
            "pillarbox_outbox",
            ["key", "route", "shard", "id"],  # in this order nothing else is tempted to use it
            postgresql_where=waiting,
            sqlite_where=waiting,
        )
    _show_batches(op)


def _show_batches(op: Operations) -> None:
    """Which rows are on their way stands in the lane's row, so that they are written once, when they are sent."""
    dialect = "mysql" if op.get_context().dialect.name == "mariadb" else op.get_context().dialect.name
    on_its_way = (
        "(o.status IN ('PENDING', 'RETRYING', 'PARKED') AND o.id BETWEEN l.announced_low AND l.announced_high "
        f"AND {_IN_BATCH[dialect]})"
    )
    view = VIEWS[dialect][-1]
    for old, new in (
        ("o.status, ", f"{_STATUS[dialect].format(on_its_way)} AS status, "),
        ("WHEN o.status = 'SENDING' THEN", f"WHEN {on_its_way} THEN"),
        ("o.batch, ", f"CASE WHEN {on_its_way} THEN l.batch ELSE o.batch END AS batch, "),
    ):
        view = view.replace(old, new)
    if dialect == "sqlite":
        op.execute("DROP VIEW outbox_events")
    else:
        view = view.replace("CREATE VIEW", "CREATE OR REPLACE VIEW")  # what people were granted stays
    op.execute(sa.text(view.replace(":", r"\:")))


_IN_BATCH = {
    "postgresql": "(CAST(l.announced AS jsonb) -> 'items') @> to_jsonb(o.id)",
    "mysql": "JSON_CONTAINS(l.announced, CAST(o.id AS CHAR), '$.items')",
    "sqlite": "EXISTS (SELECT 1 FROM json_each(l.announced, '$.items') AS j WHERE j.value = o.id)",
}
_STATUS = {
    "postgresql": "CAST(CASE WHEN {} THEN 'SENDING' ELSE o.status END AS varchar(10))",
    "mysql": "CASE WHEN {} THEN 'SENDING' ELSE o.status END",
    "sqlite": "CASE WHEN {} THEN 'SENDING' ELSE o.status END",
}
