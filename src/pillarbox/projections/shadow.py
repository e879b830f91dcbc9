"""The shadow of a projection's table: made like it, filled beside it, and put in its place.

After that everything has the names that it had before. What cannot be done without being noticed by others is refused
before anything is begun: see `Shadow.check`.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

from sqlalchemy import Connection, Dialect, MetaData, Table, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from ..errors import ConfigurationError, StoreError
from ..outbox import stable_hash

LOCK_SECONDS = 1
"""How long those who read may wait behind us when we want the table for ourselves. Then it is tried again."""
_MAX_NAME = 63


class Shadow(ABC):
    """A table that will stand in the place of another one. Every method works in the transaction of its connection."""

    is_transactional = True
    """Whether what is done to tables can be undone."""
    has_row_locks = False
    """Whether a transaction may keep the live one waiting while others go on."""

    def __init__(self, live: Table, generation: int, dialect: Dialect) -> None:
        self.live = live
        self.table = live.to_metadata(MetaData(), name=_with_ending(live.name, f"__{generation}"))
        self.retired = live.to_metadata(MetaData(), name=_with_ending(live.name, f"__{generation}_old"))
        self._quote = dialect.identifier_preparer.quote
        self._format = dialect.identifier_preparer.format_table

    def check(self, connection: Connection) -> None:
        """`ConfigurationError` if others would notice that it is another table, or something would be done twice."""
        if reason := next(iter(self._obstacles(connection)), None):
            raise ConfigurationError(f"{self.live.name} cannot be put in the place of another one: {reason}")

    @abstractmethod
    def create(self, connection: Connection) -> None:
        """Make it, empty; what is left of an earlier one goes first."""

    def freshen(self, connection: Connection) -> None:  # noqa: B027  not every planner has to be told
        """Let the planner know what is in it, before anybody asks."""

    @abstractmethod
    def swap(self, connection: Connection) -> None:
        """Put it in its place. The old one is gone, or stands aside as `retired`."""

    def drop(self, connection: Connection) -> None:
        """Remove what is left of it, and of the old one."""
        for table in (self.table, self.retired):
            if _is_there(connection, table):
                _run(connection, f"DROP TABLE {self._format(table)}")

    def is_there(self, connection: Connection) -> bool:
        """Whether it stands beside the other one."""
        return _is_there(connection, self.table)

    @abstractmethod
    def _obstacles(self, connection: Connection) -> Iterable[str]:
        """What others would notice."""


def shadow_of(live: Table, generation: int, dialect: Dialect) -> Shadow:
    """The shadow of a table, on this database."""
    kinds: dict[str, type[Shadow]] = {"postgresql": PostgresShadow, "sqlite": SqliteShadow}
    return kinds.get(dialect.name, MysqlShadow)(live, generation, dialect)


def _with_ending(name: str, ending: str) -> str:
    """A name that is not too long for any database, and no one else's."""
    if len((name + ending).encode()) <= _MAX_NAME:
        return name + ending
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    room = _MAX_NAME - len(ending) - len(digest) - 1
    return f"{name.encode()[:room].decode(errors='ignore')}_{digest}{ending}"


def _is_there(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name, schema=table.schema)


def _run(connection: Connection, sql: str) -> Any:
    return connection.exec_driver_sql(sql.replace("%", "%%") if connection.dialect.paramstyle == "format" else sql)


# -- PostgreSQL --------------------------------------------------------------------------------------------------------


class PostgresShadow(Shadow):
    """Has also the grants, the policies and the foreign keys of the other one."""

    has_row_locks = True

    def create(self, connection: Connection) -> None:
        self.drop(connection)
        live, shadow = self._format(self.live), self._format(self.table)
        _run(connection, f"CREATE TABLE {shadow} (LIKE {live} INCLUDING ALL)")
        _run(connection, f"ALTER TABLE {shadow} OWNER TO {self._quote(self._ask(connection, _OWNER).scalar_one())}")
        for (statement,) in self._ask(connection, _OPTIONS).all():
            _run(connection, f"ALTER TABLE {shadow} {statement}")
        self._copy_grants(connection)
        self._copy_policies(connection)

    def freshen(self, connection: Connection) -> None:
        _run(connection, f"ANALYZE {self._format(self.table)}")

    def swap(self, connection: Connection) -> None:
        names = self._pairs(connection)
        live, shadow = self._format(self.live), self._format(self.table)
        _run(connection, f"LOCK TABLE {live} IN ACCESS EXCLUSIVE MODE")
        _run(connection, f"DROP TABLE {live}")
        _run(connection, f"ALTER TABLE {shadow} RENAME TO {self._quote(self.live.name)}")
        schema = f"{self._quote(self.live.schema)}." if self.live.schema else ""
        for old, new in names:
            _run(connection, f"ALTER INDEX {schema}{self._quote(new)} RENAME TO {self._quote(old)}")

    def _pairs(self, connection: Connection) -> Sequence[tuple[str, str]]:
        """The indexes of the two tables that are alike, by name. Those of constraints bear their names."""
        mine: dict[Any, list[str]] = {}
        for name, *shape in self._ask(connection, _INDEXES, self.table):
            mine.setdefault(tuple(shape), []).append(name)
        try:
            return [(name, mine[tuple(shape)].pop(0)) for name, *shape in self._ask(connection, _INDEXES)]
        except (KeyError, IndexError):
            raise StoreError(
                f"the indexes of {self.live.name} have changed since the rebuild began: start it again"
            ) from None

    def _ask(self, connection: Connection, question: str, table: Table | None = None) -> Any:
        return connection.execute(text(question), {"table": self._format(self.live if table is None else table)})

    def _copy_grants(self, connection: Connection) -> None:
        shadow = self._format(self.table)
        for _privilege, grantee, _option, _columns in self._ask(connection, _GRANTS, self.table).all():
            _run(connection, f"REVOKE ALL ON {shadow} FROM {grantee}")
        for privilege, grantee, option, columns in self._ask(connection, _GRANTS).all():
            of = f" ({columns})" if columns else ""
            ending = " WITH GRANT OPTION" if option else ""
            _run(connection, f"GRANT {privilege}{of} ON {shadow} TO {grantee}{ending}")

    def _copy_policies(self, connection: Connection) -> None:
        shadow = self._format(self.table)
        for name, kind, command, roles, using, check in self._ask(connection, _POLICIES).all():
            policy = f"CREATE POLICY {name} ON {shadow} AS {kind} FOR {command} TO {roles}"
            policy += f" USING ({using})" if using else ""
            _run(connection, policy + (f" WITH CHECK ({check})" if check else ""))

    def _obstacles(self, connection: Connection) -> Iterable[str]:
        if not _is_there(connection, self.live):
            yield "it is not there"
        else:
            yield from self._ask(connection, _OBSTACLES).scalars()


_THIS = "CAST(CAST(:table AS text) AS regclass)"
_OWNER = f"SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = {_THIS}"  # noqa: S608  constants
# Foreign keys are checked by the database for each row, as they are for the other table.
_OPTIONS = f"""
SELECT 'ENABLE ROW LEVEL SECURITY' FROM pg_class WHERE oid = {_THIS} AND relrowsecurity
UNION ALL
SELECT 'FORCE ROW LEVEL SECURITY' FROM pg_class WHERE oid = {_THIS} AND relforcerowsecurity
UNION ALL
SELECT format('SET (%s)', array_to_string(reloptions, ', ')) FROM pg_class
WHERE oid = {_THIS} AND reloptions IS NOT NULL
UNION ALL
SELECT format('ADD CONSTRAINT %I %s', conname, pg_get_constraintdef(oid)) FROM pg_constraint
WHERE conrelid = {_THIS} AND contype = 'f'
"""  # noqa: S608  constants
_GRANTS = f"""
SELECT a.privilege_type, CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END,
       a.is_grantable, NULL
FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a WHERE c.oid = {_THIS}
UNION ALL
SELECT a.privilege_type, CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END,
       a.is_grantable, string_agg(quote_ident(c.attname), ', ')
FROM pg_attribute c CROSS JOIN LATERAL aclexplode(c.attacl) a
WHERE c.attrelid = {_THIS} AND NOT c.attisdropped GROUP BY a.privilege_type, a.grantee, a.is_grantable
"""  # noqa: S608  constants
_POLICIES = f"""
SELECT quote_ident(p.polname), CASE WHEN p.polpermissive THEN 'PERMISSIVE' ELSE 'RESTRICTIVE' END,
       CASE p.polcmd WHEN 'r' THEN 'SELECT' WHEN 'a' THEN 'INSERT' WHEN 'w' THEN 'UPDATE' WHEN 'd' THEN 'DELETE'
                     ELSE 'ALL' END,
       (SELECT string_agg(CASE WHEN r = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(r)) END, ', ')
        FROM unnest(p.polroles) r),
       pg_get_expr(p.polqual, p.polrelid), pg_get_expr(p.polwithcheck, p.polrelid)
FROM pg_policy p WHERE p.polrelid = {_THIS} ORDER BY p.oid
"""  # noqa: S608  constants
_INDEXES = f"""
SELECT c.relname, i.indisunique, i.indisprimary, c.relam, i.indnkeyatts, CAST(i.indclass AS text),
       CAST(i.indoption AS text), CAST(i.indcollation AS text), pg_get_expr(i.indpred, i.indrelid),
       (SELECT string_agg(pg_get_indexdef(i.indexrelid, n, false), ', ' ORDER BY n)
        FROM generate_series(1, i.indnatts) n),
       (SELECT con.contype FROM pg_constraint con WHERE con.conindid = c.oid AND con.conrelid = i.indrelid)
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE i.indrelid = {_THIS} ORDER BY c.oid
"""  # noqa: S608  constants
_OBSTACLES = f"""
SELECT 'it is no plain table' FROM pg_class c
WHERE c.oid = {_THIS} AND (c.relkind <> 'r' OR c.relispartition OR c.relhassubclass
                           OR EXISTS (SELECT FROM pg_inherits h WHERE h.inhrelid = c.oid))
UNION ALL
SELECT format('the foreign key %I of %s refers to it', conname, CAST(conrelid AS regclass)) FROM pg_constraint
WHERE contype = 'f' AND confrelid = {_THIS}
UNION ALL
SELECT format('the view or rule %s of %s refers to it', r.rulename, CAST(r.ev_class AS regclass))
FROM pg_depend d JOIN pg_rewrite r ON d.classid = CAST('pg_rewrite' AS regclass) AND r.oid = d.objid
WHERE d.refclassid = CAST('pg_class' AS regclass) AND d.refobjid = {_THIS}
UNION ALL
SELECT format('the function %s refers to it', CAST(d.objid AS regprocedure)) FROM pg_depend d
WHERE d.classid = CAST('pg_proc' AS regclass) AND d.refclassid = CAST('pg_class' AS regclass) AND d.refobjid = {_THIS}
UNION ALL
SELECT format('its column has the sequence %s', CAST(d.objid AS regclass)) FROM pg_depend d
JOIN pg_class s ON s.oid = d.objid AND s.relkind = 'S'
WHERE d.classid = CAST('pg_class' AS regclass) AND d.refclassid = d.classid AND d.refobjid = {_THIS} AND d.deptype = 'a'
UNION ALL
SELECT format('its trigger %I would fire again for all that has happened', tgname) FROM pg_trigger
WHERE tgrelid = {_THIS} AND NOT tgisinternal
UNION ALL
SELECT format('it is in the publication %I', p.pubname) FROM pg_publication_rel r
JOIN pg_publication p ON p.oid = r.prpubid WHERE r.prrelid = {_THIS}
"""  # noqa: S608  constants


# -- MariaDB and MySQL -------------------------------------------------------------------------------------------------


class MysqlShadow(Shadow):
    """Grants belong to names there, and stay. What is done to tables commits by itself."""

    is_transactional = False

    def create(self, connection: Connection) -> None:
        self.drop(connection)
        _run(connection, f"CREATE TABLE {self._format(self.table)} LIKE {self._format(self.live)}")

    def swap(self, connection: Connection) -> None:
        live, shadow, retired = (self._format(table) for table in (self.live, self.table, self.retired))
        _run(connection, f"SET SESSION lock_wait_timeout = {LOCK_SECONDS}")
        try:
            _run(connection, f"RENAME TABLE {live} TO {retired}, {shadow} TO {live}")
        finally:
            _run(connection, "SET SESSION lock_wait_timeout = DEFAULT")

    def _obstacles(self, connection: Connection) -> Iterable[str]:
        if not _is_there(connection, self.live):
            yield "it is not there"
        given = {"schema": self.live.schema, "table": self.live.name}
        yield from connection.execute(_MYSQL_OBSTACLES, given).scalars()


_MYSQL_OBSTACLES = text(
    """
    SELECT CONCAT('its foreign key ', CONSTRAINT_NAME, ' cannot be copied') FROM information_schema.KEY_COLUMN_USAGE
    WHERE TABLE_SCHEMA = COALESCE(:schema, DATABASE()) AND TABLE_NAME = :table AND REFERENCED_TABLE_NAME IS NOT NULL
    UNION ALL
    SELECT CONCAT('the foreign key ', CONSTRAINT_NAME, ' of ', TABLE_NAME, ' refers to it')
    FROM information_schema.KEY_COLUMN_USAGE
    WHERE REFERENCED_TABLE_SCHEMA = COALESCE(:schema, DATABASE()) AND REFERENCED_TABLE_NAME = :table
    UNION ALL
    SELECT CONCAT('its trigger ', TRIGGER_NAME, ' would fire again for all that has happened')
    FROM information_schema.TRIGGERS
    WHERE EVENT_OBJECT_SCHEMA = COALESCE(:schema, DATABASE()) AND EVENT_OBJECT_TABLE = :table
    """
)


# -- SQLite ------------------------------------------------------------------------------------------------------------


class SqliteShadow(Shadow):
    """Made by the words that the other one was made by. Its indexes come at the end: they cannot be renamed."""

    def create(self, connection: Connection) -> None:
        self.drop(connection)
        [(_, made)] = self._words(connection, "table")
        _run(connection, _renamed(made, self._format(self.table)))

    def swap(self, connection: Connection) -> None:
        indexes = self._words(connection, "index")
        _run(connection, f"DROP TABLE {self._format(self.live)}")
        _run(connection, f"ALTER TABLE {self._format(self.table)} RENAME TO {self._quote(self.live.name)}")
        for _, made in indexes:
            _run(connection, made)

    def _words(self, connection: Connection, kind: str) -> list[tuple[str, str]]:
        found = connection.execute(_SQLITE_WORDS, {"kind": kind, "table": self.live.name})
        return [(name, made) for name, made in found]

    def _obstacles(self, connection: Connection) -> Iterable[str]:
        if not self._words(connection, "table"):
            yield "it is not there"
        for name, _ in self._words(connection, "trigger"):
            yield f"its trigger {name} would fire again for all that has happened"
        known = inspect(connection)
        for table in known.get_table_names():
            if any(key["referred_table"] == self.live.name for key in known.get_foreign_keys(table)):
                yield f"a foreign key of {table} refers to it"
        views = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE type = 'view'"))
        for name, made in views:
            if re.search(rf"\b{re.escape(self.live.name)}\b", made, re.IGNORECASE):
                yield f"the view {name} refers to it"


_SQLITE_WORDS = text(
    "SELECT name, sql FROM sqlite_master WHERE type = :kind AND tbl_name = :table AND sql IS NOT NULL ORDER BY rowid"
)
_SQLITE_TABLE = re.compile(r"""CREATE TABLE\s+("(?:[^"]|"")+"|`[^`]+`|\[[^\]]+\]|\w+)""")


def _renamed(made: str, name: str) -> str:
    found = _SQLITE_TABLE.match(made)
    if found is None:
        raise StoreError(f"a table was made by words that are not understood: {made[:60]}")
    return f"CREATE TABLE {name}{made[found.end() :]}"


# -- one at a time -----------------------------------------------------------------------------------------------------


_LOCK = "CONCAT(:key, ':', MD5(DATABASE()))"


@asynccontextmanager
async def alone(engine: AsyncEngine, name: str) -> AsyncIterator[None]:
    """Rebuild this projection and nobody else. Whoever dies lets go of it."""
    taken = StoreError(f"projection {name} is being rebuilt by somebody else: wait until that is done")
    if engine.dialect.name == "sqlite":
        with closing(sqlite3.connect(f"{engine.url.database}-rebuild", timeout=0, check_same_thread=False)) as lock:
            try:
                lock.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError:
                raise taken from None
            yield
        return
    key = {"key": f"pillarbox:{stable_hash(f'rebuild {name}'):x}"}
    async with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            # Of the transaction, not of the session: a pooler may lend the session to others.
            number = stable_hash(f"rebuild {name}")
            got = await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:number)"), {"number": number})
            # It comes last: the server keeps the snapshot of a query until the next statement, and with it every row
            # that is updated meanwhile.
            await connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
        else:
            got = await connection.scalar(text(f"SELECT GET_LOCK({_LOCK}, 0)"), key)
        if not got:
            raise taken
        try:
            yield
        finally:
            if engine.dialect.name != "postgresql":
                with suppress(DBAPIError):  # MySQL ends a session, and its lock, a while after the connection is closed
                    await connection.execute(text(f"SELECT RELEASE_LOCK({_LOCK})"), key)
            await connection.invalidate()  # for MySQL, which would keep the lock with a connection in the pool
