"""Daily partitions of the outbox on PostgreSQL: partitioning an existing table, and adding days in advance.

A partition is a range of event ids. A UUIDv7 begins with the time, so a day of ids is almost a day of rows, and the
primary key, which begins with the event id, does not change. The default partition takes all other rows: ids of other
versions, of deviating clocks, and of days without a partition. So writers depend on no maintenance, and relays need no
additional rights.

`partition` moves no row. The existing table becomes the default partition: rows keep their ids, transactions and
places, so no cursor is affected. A day gets a partition only while the default partition has no row of it: a partition
is never attached with rows in it. `stores.partition_pruning` drops days.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from uuid import UUID

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from ..clock import first_uuid7, time_of
from ..errors import StoreError
from .audit import Author, note
from .retention import alone

AHEAD = 7
"""Number of days that get their partitions in advance."""
LOCK_SECONDS = 0.2
"""Longest wait for a lock: other transactions queue behind it for as long."""
PATIENCE = 2.0
"""Longest scan of the default partition in seconds; writers and relays wait meanwhile."""
_BOUNDS = re.compile(r"FOR VALUES FROM \('([0-9a-f-]{36})'\) TO \('([0-9a-f-]{36})'\)")
_LIKE = "INCLUDING DEFAULTS INCLUDING GENERATED INCLUDING STORAGE INCLUDING COMPRESSION"
_LOCKED, _TOO_LONG, _THERE = "55P03", "57014", "23514"


@dataclass(frozen=True, slots=True)
class Part:
    """A partition: a range of event ids from the first one, without the last one."""

    name: str
    first: UUID
    last: UUID

    def __str__(self) -> str:
        return time_of(self.first).date().isoformat()


@dataclass(frozen=True, slots=True)
class Layout:
    """The partitions of the outbox."""

    schema: str
    partitioned: bool = False
    owned: bool = True
    """Whether this role may add and drop partitions."""
    parts: Sequence[Part] = ()

    @property
    def outbox(self) -> str:
        """The table name for statements."""
        return f"{self.schema}.pillarbox_outbox"

    def gaps(self) -> Iterator[tuple[UUID, UUID]]:
        """The ranges of ids without a partition of their own."""
        at = UUID(int=0)
        for part in self.parts:
            if at < part.first:
                yield at, part.first
            at = part.last
        yield at, UUID(int=2**128 - 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes that `partition` would make."""

    partitioned: bool
    """The table is partitioned already: only days are added."""
    rows: int
    """Estimated number of rows that become the default partition."""
    days: Sequence[date]
    """Days that get a partition."""
    taken: Sequence[date]
    """Days that stay in the default partition, because it has rows of them."""


def first_id(day: date) -> UUID:
    """The first event id of a day."""
    return first_uuid7(datetime.combine(day, time(), UTC).timestamp())


def layout(connection: Connection) -> Layout:
    """The current partitions of the outbox."""
    if connection.dialect.name != "postgresql":
        return Layout("")
    found = connection.execute(_LAYOUT).one()
    bounds = ((row.name, _BOUNDS.fullmatch(row.bounds)) for row in connection.execute(_PARTS).all())
    parts = [Part(name, UUID(it[1]), UUID(it[2])) for name, it in bounds if it]
    return Layout(found.schema, found.partitioned, found.owned, sorted(parts, key=lambda part: part.first))


def plan(connection: Connection, *, ahead: int) -> Plan:
    """Determine the changes. Raises `StoreError` if partitioning is not possible."""
    found = _checked(connection)
    missing = missing_days(connection, found, ahead=ahead)
    taken = [day for day in missing if _has_rows(connection, day)]
    rows = 0 if found.partitioned else max(0, connection.execute(_ROWS).scalar_one())
    return Plan(found.partitioned, rows, [day for day in missing if day not in taken], taken)


def missing_days(connection: Connection, found: Layout, *, ahead: int, first: int = 0) -> list[date]:
    """Days without a partition, from today or the ``first`` day on, up to this many days ahead."""
    today: date = connection.execute(text("SELECT CAST(clock_timestamp() AT TIME ZONE 'UTC' AS date)")).scalar_one()
    wanted = [today + timedelta(days=number) for number in range(first, ahead + 1)]
    return [day for day in wanted if not any(part.first <= first_id(day) < part.last for part in found.parts)]


def _has_rows(connection: Connection, day: date) -> bool:
    return connection.execute(_OF_DAY, _range(day)).first() is not None


def _range(day: date) -> dict[str, str]:
    return {"first": str(first_id(day)), "last": str(first_id(day + timedelta(days=1)))}


def _checked(connection: Connection) -> Layout:
    if connection.dialect.name != "postgresql":
        raise StoreError(f"{connection.dialect.name} has no partitions as they are meant here: only PostgreSQL has")
    if connection.execute(text("SELECT pg_is_in_recovery()")).scalar_one():
        raise StoreError("this server is a standby: partition the primary")
    found = layout(connection)
    if not found.owned:
        raise StoreError("only the owner of pillarbox_outbox can partition it: use that role")
    return found


# -- obstacles ---------------------------------------------------------------------------------------------------------


def is_busy(error: DBAPIError) -> bool:
    """Whether a lock was not granted in time. Nothing has changed, and a retry is possible."""
    return getattr(error.orig, "sqlstate", None) == _LOCKED


def took_too_long(error: DBAPIError) -> bool:
    """Whether the default partition is too large to be scanned in time. Nothing has changed."""
    return getattr(error.orig, "sqlstate", None) == _TOO_LONG


def was_taken(error: DBAPIError) -> bool:
    """Whether the default partition got a row of the day meanwhile. Nothing has changed."""
    return getattr(error.orig, "sqlstate", None) == _THERE


def waits_briefly(connection: Connection, patience: float = 0.0) -> None:
    """Limit lock waits in this transaction, and the duration of its statements by ``patience``, if given."""
    limit = max(1, round(patience * 1000)) if patience else 0  # PostgreSQL takes 0 for no limit
    connection.execute(_LIMITS, {"lock": f"{LOCK_SECONDS * 1000:.0f}ms", "statement": f"{limit}ms"})


# -- new days ----------------------------------------------------------------------------------------------------------


def make_day(connection: Connection, day: date, author: Author, *, patience: float = PATIENCE) -> int:
    """Add the partition of a day in the caller's transaction. Returns the number of the audit entry.

    Writers of other days are not blocked. `is_busy`, `took_too_long` and `was_taken` classify a `DBAPIError`.
    """
    alone(connection)
    waits_briefly(connection, patience)
    found = _checked(connection)
    made = _bare_day(connection, found, day)
    connection.exec_driver_sql(_attach(found, made, day))
    return note(connection, author, "partition", f"the day {day}", details={"made": made})


def _attach(found: Layout, made: str, day: date) -> str:
    bounds = _range(day)
    values = f"FOR VALUES FROM ('{bounds['first']}') TO ('{bounds['last']}')"
    return f"ALTER TABLE {found.outbox} ATTACH PARTITION {made} {values}"


def _bare_day(connection: Connection, found: Layout, day: date) -> str:
    """An empty table like the outbox. Its indexes come with the attachment, except the primary key: an error about a
    duplicate event is recognized by the name of its constraint.
    """
    name = f"pillarbox_outbox_{day:%Y%m%d}"
    made = f"{found.schema}.{name}"
    key = f"CONSTRAINT uq_pillarbox_outbox_event_{day:%Y%m%d} PRIMARY KEY (event_id, route, schema_version)"
    connection.exec_driver_sql(f"CREATE TABLE {made} (LIKE {found.outbox} {_LIKE}, {key})")
    settings = {"from": f"{found.schema}.pillarbox_outbox_default", "to": made}
    for statement in connection.scalars(_LIKE_DEFAULT, settings).all():
        connection.exec_driver_sql(statement)
    return made


# -- partitioning ------------------------------------------------------------------------------------------------------


def partition(connection: Connection, author: Author, *, ahead: int, patience: float = PATIENCE) -> tuple[Plan, int]:
    """Partition the outbox in the caller's transaction. Returns the changes and the number of the audit entry.

    Everything else waits from the lock to the COMMIT, so that time is kept short: catalogs change, and the rows are
    read once, for at most `patience` seconds, to check that none of them belongs to a new partition.
    """
    alone(connection)
    waits_briefly(connection, patience)
    connection.exec_driver_sql(f"LOCK TABLE {_checked(connection).outbox} IN ACCESS EXCLUSIVE MODE")
    wanted, found = plan(connection, ahead=ahead), _checked(connection)
    if found.partitioned:
        raise StoreError("somebody else has partitioned the outbox meanwhile: run this again")
    if obstacles := connection.scalars(_OBSTACLES).all():
        raise StoreError(
            f"the outbox cannot be partitioned while this depends on it: {', '.join(sorted({*obstacles}))}; "
            "drop it, and make it again afterwards"
        )
    default = f"{found.schema}.pillarbox_outbox_default"
    views = connection.scalars(_VIEWS).all()
    identity = _identity(connection, found)
    indexes = connection.execute(_INDEXES).all()
    carried = connection.scalars(_CARRIED, {"default": default}).all()
    statements = [
        f"ALTER TABLE {found.outbox} ALTER COLUMN id DROP IDENTITY",
        f"ALTER TABLE {found.outbox} RENAME TO pillarbox_outbox_default",
        *(f"ALTER INDEX {found.schema}.{it.name} RENAME TO {it.name}_default" for it in indexes),
        f"CREATE TABLE {found.outbox} (LIKE {default} {_LIKE} INCLUDING COMMENTS) PARTITION BY RANGE (event_id)",
        *identity,
        *(it.definition for it in indexes),
    ]
    for statement in statements:
        connection.exec_driver_sql(statement)
    for day in wanted.days:
        connection.exec_driver_sql(_attach(found, _bare_day(connection, found, day), day))
    connection.exec_driver_sql(f"ALTER TABLE {found.outbox} ATTACH PARTITION {default} DEFAULT")
    # Default privileges for new tables are not those of this table.
    for statement in (*connection.scalars(_REVOKED).all(), *carried, *views):
        connection.exec_driver_sql(statement)
    details = {"rows": wanted.rows, "days": [str(day) for day in wanted.days]}
    return wanted, note(connection, author, "partition", "the outbox, by days", details=details)


def _identity(connection: Connection, found: Layout) -> list[str]:
    """The column's sequence keeps its name and continues where the old one was."""
    it = connection.execute(_SEQUENCE).one()
    last = connection.exec_driver_sql(f"SELECT last_value, is_called FROM {it.name}").one()  # noqa: S608  its own name
    options = (
        f"INCREMENT {it.seqincrement} MINVALUE {it.seqmin} MAXVALUE {it.seqmax} START {it.seqstart} "
        f"CACHE {it.seqcache} {'CYCLE' if it.seqcycle else 'NO CYCLE'}"
    )
    column = f"ALTER TABLE {found.outbox} ALTER COLUMN id"
    return [
        f"{column} ADD GENERATED {it.kind} AS IDENTITY (SEQUENCE NAME {it.name} {options})",
        f"SELECT setval('{it.name}', {last.last_value}, {last.is_called})",
        *it.grants,
    ]


# -- statements --------------------------------------------------------------------------------------------------------

_OUTBOX = "CAST('pillarbox_outbox' AS regclass)"
_LIMITS = text("SELECT set_config('lock_timeout', :lock, true), set_config('statement_timeout', :statement, true)")
_LAYOUT = text(
    f"""
    SELECT quote_ident(n.nspname) AS schema, c.relkind = 'p' AS partitioned, pg_has_role(c.relowner, 'USAGE') AS owned
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = {_OUTBOX}
    """  # noqa: S608  constants
)
_PARTS = text(
    f"""
    SELECT format('%I.%I', n.nspname, c.relname) AS name, pg_get_expr(c.relpartbound, c.oid) AS bounds
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE i.inhparent = {_OUTBOX}
    """  # noqa: S608  constants
)
_ROWS = text(f"SELECT CAST(reltuples AS bigint) FROM pg_class WHERE oid = {_OUTBOX}")  # noqa: S608  constants
_OF_DAY = text(
    "SELECT 1 FROM pillarbox_outbox WHERE event_id >= CAST(:first AS uuid) AND event_id < CAST(:last AS uuid) "
    "ORDER BY event_id LIMIT 1"
)
_GRANTEE = "CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END"
_GRANT = f"""format('GRANT %s%s ON %s %s TO %s%s', a.privilege_type, {{columns}}, {{kind}}, {{name}}, {_GRANTEE},
                 CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)"""
_NAME = "format('%I.%I', n.nspname, c.relname)"
_TABLE = f"pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace AND c.oid = {_OUTBOX}"
_LIKE_DEFAULT = text(
    f"""
    SELECT format('ALTER TABLE %s OWNER TO %I', CAST(:to AS text), pg_get_userbyid(c.relowner))
    FROM pg_class c WHERE c.oid = CAST(CAST(:from AS text) AS regclass)
    UNION ALL
    SELECT format('ALTER TABLE %s SET (%s)', CAST(:to AS text), array_to_string(c.reloptions, ', '))
    FROM pg_class c WHERE c.oid = CAST(CAST(:from AS text) AS regclass) AND c.reloptions IS NOT NULL
    UNION ALL
    SELECT format('REVOKE ALL ON %s FROM %s', CAST(:to AS text), {_GRANTEE})
    FROM pg_class c CROSS JOIN aclexplode(c.relacl) a
    WHERE c.oid = CAST(CAST(:to AS text) AS regclass) AND a.grantee <> c.relowner
    """  # noqa: S608  constants
)
_REVOKED = text(
    f"""
    SELECT format('REVOKE ALL ON %s FROM %s', {_NAME}, {_GRANTEE})
    FROM {_TABLE} CROSS JOIN aclexplode(c.relacl) a WHERE a.grantee <> c.relowner
    """  # noqa: S608  constants
)
_SEQUENCE = text(
    f"""
    SELECT {_NAME} AS name, s.*, CASE a.attidentity WHEN 'a' THEN 'ALWAYS' ELSE 'BY DEFAULT' END AS kind,
           ARRAY(SELECT {_GRANT.format(columns="''", kind="'SEQUENCE'", name=_NAME)}
                 FROM aclexplode(c.relacl) a WHERE a.grantee <> c.relowner) AS grants
    FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_attribute a ON a.attrelid = {_OUTBOX} AND a.attname = 'id'
    WHERE s.seqrelid = CAST(pg_get_serial_sequence('pillarbox_outbox', 'id') AS regclass)
    """  # noqa: S608  constants
)
_INDEXES = text(
    f"""
    SELECT quote_ident(c.relname) AS name, coalesce(
        (SELECT format('ALTER TABLE %s ADD CONSTRAINT %I %s', {_OUTBOX}, k.conname, pg_get_constraintdef(k.oid))
         FROM pg_constraint k WHERE k.conindid = i.indexrelid AND k.conrelid = i.indrelid),
        pg_get_indexdef(i.indexrelid)) AS definition
    FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
    WHERE i.indrelid = {_OUTBOX} AND i.indisvalid ORDER BY i.indisprimary DESC, c.relname
    """  # noqa: S608  constants
)
_VIEWS = text(
    f"""
    SELECT DISTINCT format('CREATE OR REPLACE VIEW %I.%I %s AS %s', n.nspname, v.relname,
                           'WITH (' || array_to_string(v.reloptions, ', ') || ')', pg_get_viewdef(v.oid))
    FROM pg_depend d JOIN pg_rewrite r ON r.oid = d.objid AND d.classid = CAST('pg_rewrite' AS regclass)
    JOIN pg_class v ON v.oid = r.ev_class JOIN pg_namespace n ON n.oid = v.relnamespace
    WHERE d.refclassid = CAST('pg_class' AS regclass) AND d.refobjid = {_OUTBOX} AND v.relkind = 'v'
    """  # noqa: S608  constants
)
"""A view refers to tables by oid and would keep reading the old one, so it is created again from its own definition."""
_CARRIED = text(
    f"""
    SELECT format('ALTER TABLE %s OWNER TO %I', {_NAME}, pg_get_userbyid(c.relowner)) FROM {_TABLE}
    UNION ALL
    SELECT {_GRANT.format(columns="''", kind="'TABLE'", name=_NAME)}
    FROM {_TABLE} CROSS JOIN aclexplode(c.relacl) a WHERE a.grantee <> c.relowner
    UNION ALL
    SELECT {_GRANT.format(columns="format('(%I)', t.attname)", kind="'TABLE'", name=_NAME)}
    FROM {_TABLE} JOIN pg_attribute t ON t.attrelid = c.oid CROSS JOIN aclexplode(t.attacl) a
    WHERE a.grantee <> c.relowner
    UNION ALL
    SELECT format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', {_NAME}) FROM {_TABLE} WHERE c.relrowsecurity
    UNION ALL
    SELECT format('ALTER TABLE %s FORCE ROW LEVEL SECURITY', {_NAME}) FROM {_TABLE} WHERE c.relforcerowsecurity
    UNION ALL
    SELECT format('CREATE POLICY %I ON %s AS %s FOR %s TO %s', p.polname, {_NAME},
                  CASE WHEN p.polpermissive THEN 'PERMISSIVE' ELSE 'RESTRICTIVE' END,
                  CASE p.polcmd WHEN 'r' THEN 'SELECT' WHEN 'a' THEN 'INSERT' WHEN 'w' THEN 'UPDATE'
                                WHEN 'd' THEN 'DELETE' ELSE 'ALL' END,
                  (SELECT string_agg({_GRANTEE}, ', ') FROM unnest(p.polroles) AS a(grantee)))
           || coalesce(' USING (' || pg_get_expr(p.polqual, p.polrelid) || ')', '')
           || coalesce(' WITH CHECK (' || pg_get_expr(p.polwithcheck, p.polrelid) || ')', '')
    FROM {_TABLE} JOIN pg_policy p ON p.polrelid = c.oid
    UNION ALL
    SELECT unnest(ARRAY[
        format('ALTER PUBLICATION %I SET (publish_via_partition_root = true)', p.pubname),
        format('ALTER PUBLICATION %I DROP TABLE %s', p.pubname, CAST(:default AS text)),
        format('ALTER PUBLICATION %I ADD TABLE %s%s', p.pubname, {_NAME}, (
            SELECT format(' (%s)', string_agg(quote_ident(a.attname), ', ')) FROM pg_attribute a
            WHERE a.attrelid = c.oid AND to_jsonb(r) -> 'prattrs' @> to_jsonb(a.attnum) HAVING count(*) > 0))])
    FROM {_TABLE} JOIN pg_publication_rel r ON r.prrelid = c.oid JOIN pg_publication p ON p.oid = r.prpubid
    """  # noqa: S608  constants
)
"""Objects of the old table that the new one takes over."""
_OBSTACLES = text(
    f"""
    SELECT pg_describe_object(d.classid, d.objid, d.objsubid) FROM pg_depend d
    WHERE d.refclassid = CAST('pg_class' AS regclass) AND d.refobjid = {_OUTBOX} AND d.deptype = 'n'
      AND NOT (d.classid = CAST('pg_policy' AS regclass)
               AND EXISTS (SELECT FROM pg_policy p WHERE p.oid = d.objid AND p.polrelid = d.refobjid))
      AND d.classid <> CAST('pg_publication_rel' AS regclass)
      AND NOT (d.classid = CAST('pg_rewrite' AS regclass)
               AND EXISTS (SELECT FROM pg_rewrite r JOIN pg_class v ON v.oid = r.ev_class
                           WHERE r.oid = d.objid AND v.relkind = 'v'))
    UNION ALL
    SELECT format('trigger %I', t.tgname) FROM pg_trigger t WHERE t.tgrelid = {_OUTBOX} AND NOT t.tgisinternal
    UNION ALL
    SELECT format('rule %I', r.rulename) FROM pg_rewrite r WHERE r.ev_class = {_OUTBOX}
    UNION ALL
    SELECT format('foreign key %I', k.conname) FROM pg_constraint k
    WHERE k.contype = 'f' AND {_OUTBOX} IN (k.conrelid, k.confrelid)
    UNION ALL
    SELECT format('publication %I, which names rows', p.pubname)
    FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
    WHERE r.prrelid = {_OUTBOX} AND to_jsonb(r) ->> 'prqual' IS NOT NULL
    UNION ALL
    SELECT format('index %I, which is not valid', CAST(i.indexrelid AS regclass))
    FROM pg_index i WHERE i.indrelid = {_OUTBOX} AND NOT i.indisvalid
    UNION ALL
    SELECT 'a table that inherits' FROM pg_inherits i WHERE {_OUTBOX} IN (i.inhparent, i.inhrelid)
    """  # noqa: S608  constants
)
"""Objects that would stay with the old table, or cannot exist on a partitioned one."""
