"""The database server behind a connection, for `doctor`."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import BindParameter, Connection, bindparam, text


def product(connection: Connection) -> tuple[str, tuple[int, ...]]:
    """The product behind the connection, and its version."""
    dialect = connection.dialect
    name = {"postgresql": "PostgreSQL", "sqlite": "SQLite"}.get(dialect.name)
    if name is None:
        name = "MariaDB" if getattr(dialect, "is_mariadb", False) else "MySQL"
    return name, tuple(part for part in dialect.server_version_info or () if isinstance(part, int))


def variables(connection: Connection, names: Collection[str]) -> dict[str, str]:
    """Settings of the server as this connection sees them; unknown ones are left out."""
    statement = _VARIABLES[connection.dialect.name if connection.dialect.name != "mariadb" else "mysql"]
    found = connection.execute(statement, {"names": list(names)})
    return {name: str(value) for name, value in found}


def id_cache(connection: Connection, table: str) -> int:
    """Number of ids of a table that a PostgreSQL session reserves at once."""
    cache: int = connection.execute(_ID_CACHE, {"table": table}).scalar_one()
    return cache


_NAMES: BindParameter[list[str]] = bindparam("names", expanding=True)
_VARIABLES = {
    "postgresql": text("SELECT name, setting FROM pg_settings WHERE name IN :names").bindparams(_NAMES),
    "mysql": text("SHOW VARIABLES WHERE Variable_name IN :names").bindparams(_NAMES),
    "sqlite": text("SELECT 'encoding', encoding FROM pragma_encoding() WHERE 'encoding' IN :names").bindparams(_NAMES),
}
_ID_CACHE = text(
    "SELECT seqcache FROM pg_sequence "
    "WHERE seqrelid = CAST(pg_get_serial_sequence(CAST(:table AS text), 'id') AS regclass)"
)
