"""Replication slots as the database reports them: their WAL and their readers."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, text

_STATES = text(
    """
    SELECT slot_name, temporary, active_pid IS NOT NULL AS read, wal_status,
           CAST(coalesce(pg_wal_lsn_diff(
               CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END, restart_lsn
           ), 0) AS bigint) AS lag,
           (SELECT CAST(setting AS bigint) * 1048576 FROM pg_settings
            WHERE name = 'max_slot_wal_keep_size' AND CAST(setting AS bigint) >= 0) AS budget,
           CAST(to_jsonb(s) ->> 'failover' AS boolean) AS failover
    FROM pg_replication_slots s
    WHERE database = current_database() AND plugin = 'pgoutput' AND slot_name LIKE 'pillarbox%'
    ORDER BY slot_name
    """
)
_PUBLISHED = text(
    """
    SELECT CAST(c.oid AS bigint) FROM pg_publication p JOIN pg_publication_tables t ON t.pubname = p.pubname
    JOIN pg_namespace n ON n.nspname = t.schemaname
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
    WHERE p.pubname = 'pillarbox' AND p.pubinsert AND c.oid = to_regclass('pillarbox_outbox')
    """
)
"""A partitioned table is in that view if the publication has its rows as rows of the parent, not of the partitions."""
_BLOCKERS = text(
    """
    SELECT CASE b.pid WHEN 0 THEN 'one that is prepared' ELSE
               concat('process ', b.pid, ' (' || nullif(a.application_name, '') || ')', ', since ' || a.xact_start) END
    FROM unnest(pg_blocking_pids(:process)) AS b(pid) LEFT JOIN pg_stat_activity a ON a.pid = b.pid
    """
)

LARGE = 1 << 30
"""Alarm threshold for WAL in bytes, where the server sets no limit."""


class SlotState(NamedTuple):
    """A replication slot of Pillarbox."""

    name: str
    temporary: bool
    read: bool
    """Whether it has a reader now."""
    wal_status: str | None
    lag: int
    """WAL that the server keeps for it, in bytes."""
    budget: int | None
    """Limit of that WAL; None without a limit."""
    failover: bool | None = None
    """Whether it is copied to standbys; None where the server does not support that."""

    @property
    def is_lost(self) -> bool:
        """Whether the server has invalidated it."""
        return self.wal_status == "lost"

    @property
    def strains(self) -> bool:
        """Whether its WAL exceeds half of the limit."""
        return self.lag >= (LARGE if self.budget is None else self.budget / 2)


def slot_states(connection: Connection) -> list[SlotState]:
    """All slots of Pillarbox in this database. Empty on databases other than PostgreSQL."""
    if connection.dialect.name != "postgresql":
        return []
    return [SlotState(*row) for row in connection.execute(_STATES)]


def published(connection: Connection) -> list[int]:
    """The oid of the outbox, if the publication has its rows. Newer servers stream without it, and deliver nothing."""
    return [*connection.execute(_PUBLISHED).scalars()]


def blockers(connection: Connection, process: int) -> list[str]:
    """The transactions for which a server process waits."""
    return [*connection.execute(_BLOCKERS, {"process": process}).scalars()]
