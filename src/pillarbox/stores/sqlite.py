"""SQLite's transactions, put right.

The standard driver begins a transaction only at the first write and lets savepoints stand outside of it, so a released
savepoint survives a rollback. Here every transaction begins by an explicit BEGIN IMMEDIATE: writers wait for each other
instead of failing when a read turns into a write.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from .. import clock

BUSY_SECONDS = 5.0
"""How long others are waited for, as the driver waits for those who write."""


def configure_transactions(engine: Engine) -> None:
    """Make transactions on this engine real ones. Calling it twice is fine."""
    if engine.dialect.name == "sqlite" and not event.contains(engine, "begin", _begin):
        event.listen(engine, "begin", _begin)
        event.listen(engine, "invalidate", _roll_back)


async def use_write_ahead_log(engine: AsyncEngine) -> None:
    """Let readers and the writer go on side by side: without it, a forgotten cursor keeps every COMMIT out. Kept in the
    file.
    """
    if engine.dialect.name != "sqlite":
        return
    until = clock.current().monotonic() + BUSY_SECONDS
    while True:
        try:
            async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
                await connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        except OperationalError as error:
            # SQLite waits for others by itself, but not here: a relay may have been started before the first migration.
            if "locked" not in str(error.orig) or clock.current().monotonic() > until:
                raise
            await asyncio.sleep(BUSY_SECONDS / 100)
        else:
            return


def for_reading(engine: AsyncEngine) -> AsyncEngine:
    """The engine for those who only read: a statement needs no transaction, nor a turn to write."""
    return engine.execution_options(isolation_level="AUTOCOMMIT") if engine.dialect.name == "sqlite" else engine


def _begin(connection: Connection) -> None:
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return
    dbapi_connection = connection.connection.dbapi_connection
    if getattr(dbapi_connection, "isolation_level", None) is not None:
        dbapi_connection.isolation_level = None  # type: ignore[union-attr]  # the driver must not begin by itself
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _roll_back(dbapi_connection: Any, _record: object, _error: object) -> None:
    """A connection that is thrown away, after a cancellation say, may have a cursor that somebody still refers to.

    SQLite then keeps the closed connection alive, and with it the transaction and its lock on the file.
    """
    with suppress(Exception):
        dbapi_connection.rollback()
