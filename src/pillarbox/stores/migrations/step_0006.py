"""Step 6: the receiving end: consumers, what they have dealt with, and letters about what they could not."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from ..columns import AutoId, ByteExact, JsonText, LongBytes, LongText, Name, Utc, now


def upgrade(op: Operations) -> None:
    """Make three tables; nothing that is there is touched."""
    op.create_table(
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
        sa.Column("held", sa.Integer, nullable=False, server_default="0"),
        sa.Column("seen_at", Utc),
        sa.Column("updated_at", Utc, nullable=False),
        mysql_charset="utf8mb4",
    )
    _make_inbox(op)
    op.create_table(
        "pillarbox_letters",
        sa.Column("id", AutoId, sa.Identity(), primary_key=True),
        sa.Column("consumer", Name, nullable=False),
        sa.Column("kind", sa.String(10), nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("reason", LongText, nullable=False),
        sa.Column("tenant", ByteExact(200)),
        sa.Column("event_id", sa.Uuid),
        sa.Column("event_type", sa.String(200), nullable=False),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("topic", Name, nullable=False),
        sa.Column("key", ByteExact(512), nullable=False),
        sa.Column("headers", JsonText, nullable=False),
        sa.Column("body", LongBytes, nullable=False),
        sa.Column("edited", LongBytes),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("created_at", Utc, nullable=False, server_default=now()),
        sa.Column("updated_at", Utc, nullable=False, server_default=now()),
        sqlite_autoincrement=True,
        mysql_charset="utf8mb4",
    )
    op.create_index("ix_pillarbox_letters_consumer", "pillarbox_letters", ["consumer", "state", "id"])
    # Leads to the open letters of a key, however many of it were closed: a projection looks for those that it holds.
    op.create_index("ix_pillarbox_letters_key", "pillarbox_letters", ["consumer", "state", "key", "tenant", "id"])


def _make_inbox(op: Operations) -> None:
    """Every message that comes in pays for this row, so it is narrow: no name, no number of its own."""
    op.create_table(
        "pillarbox_inbox",
        sa.Column("consumer", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tenant", ByteExact(200), primary_key=True, server_default=""),
        sa.Column("event_id", sa.Uuid, primary_key=True),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("digest", sa.LargeBinary(16).with_variant(sa.BINARY(16), "mysql", "mariadb"), nullable=False),
        sa.Column("at", Utc, nullable=False, server_default=now()),
        sqlite_with_rowid=False,
        mysql_charset="utf8mb4",
    )
    # For pruning. On PostgreSQL it adds a quarter to what the server has to do for a row. A BRIN index adds next to
    # nothing, but only until the room of pruned rows is used again: then old and new moments stand in the same pages,
    # and every portion that is pruned would walk over the whole table. It has all rows, but only what names a moment
    # can use it: for want of statistics PostgreSQL may look for an event among all rows of its consumer.
    op.create_index(
        "ix_pillarbox_inbox_at", "pillarbox_inbox", ["consumer", "at"], postgresql_where=sa.text("at > '-infinity'")
    )
