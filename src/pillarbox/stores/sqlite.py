"""SQLite's transactions, put right.

The standard driver begins a transaction only at the first write and lets savepoints stand outside of it, so a released
savepoint survives a rollback. Here every transaction begins by an explicit BEGIN IMMEDIATE: writers wait for each other
instead of failing when a read turns into a write.
"""

from __future__ import annotations

from sqlalchemy import Connection, Engine, event


def put_right(engine: Engine) -> None:
    """Make transactions on this engine real ones. Calling it twice is fine."""
    if engine.dialect.name == "sqlite" and not event.contains(engine, "begin", _begin):
        event.listen(engine, "begin", _begin)


def _begin(connection: Connection) -> None:
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return
    dbapi_connection = connection.connection.dbapi_connection
    if getattr(dbapi_connection, "isolation_level", None) is not None:
        dbapi_connection.isolation_level = None  # type: ignore[union-attr]  # the driver must not begin by itself
    connection.exec_driver_sql("BEGIN IMMEDIATE")
