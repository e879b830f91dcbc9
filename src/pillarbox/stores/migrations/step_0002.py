"""Step 2: relays and what people tell them: who is alive, requests, pauses, rates, and the trail of all of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from ..columns import AutoId, ByteExact, LongBytes, LongText, Utc, now


def upgrade(op: Operations) -> None:
    """Add what relays and operators need. New columns are empty, so no busy table is rewritten."""
    op.add_column("pillarbox_lanes", sa.Column("rate", sa.Double))
    op.add_column("pillarbox_lanes", sa.Column("trouble", LongText))
    op.add_column("pillarbox_lanes", sa.Column("trouble_until", Utc))
    op.create_table(
        "pillarbox_relays",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("started_at", Utc, nullable=False, server_default=now()),
        sa.Column("expires_at", Utc, nullable=False),
        sa.Column("serves", LongText, nullable=False),
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
