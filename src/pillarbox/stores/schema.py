"""The schema version of a database. Does not load Alembic; see `stores.migrations` for the steps."""

from __future__ import annotations

from sqlalchemy import Connection, inspect, select

from ..errors import NotMigratedError
from . import tables

SCHEMA_VERSION = 1
"""The schema of this release: the number of its last migration step."""


def schema_version(connection: Connection) -> int:
    """Number of steps that this database has run; 0 without Pillarbox."""
    if not inspect(connection).has_table(tables.meta.name):
        return 0
    return connection.execute(select(tables.meta.c.schema_version)).scalar() or 0


def check_schema(connection: Connection) -> None:
    """Raise `NotMigratedError` unless the database has exactly the schema of this release."""
    found = schema_version(connection)
    if found < SCHEMA_VERSION:
        raise NotMigratedError(
            f"the database has schema version {found} and this release needs {SCHEMA_VERSION}: run `pillarbox migrate`"
        )
    if found > SCHEMA_VERSION:
        raise NotMigratedError(
            f"the database has schema version {found}, newer than this release knows ({SCHEMA_VERSION}): "
            "upgrade pillarbox"
        )
