"""Proper transactions for SQLite.

The standard driver begins a transaction only at the first write, and leaves savepoints outside of it, so a released
savepoint survives a rollback. Here every transaction begins with an explicit BEGIN IMMEDIATE: writers wait for each
other, instead of failing when a read turns into a write.
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
"""Longest wait for locks, as long as the driver waits for writers."""


def configure_transactions(engine: Engine) -> None:
    """Give this engine proper transactions. May be called twice."""
    if engine.dialect.name == "sqlite" and not event.contains(engine, "begin", _begin):
        event.listen(engine, "begin", _begin)
        event.listen(engine, "invalidate", _roll_back)


async def use_write_ahead_log(engine: AsyncEngine) -> None:
    """Switch to WAL mode, so that readers do not block writers: without it, a forgotten cursor blocks every COMMIT. The
    mode is stored in the file.
    """
    if engine.dialect.name != "sqlite":
        return
    until = clock.current().monotonic() + BUSY_SECONDS
    while True:
        try:
            async with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
                await connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        except OperationalError as error:
            # SQLite does not wait for a lock here by itself: a relay may have been started before the first migration.
            if "locked" not in str(error.orig) or clock.current().monotonic() > until:
                raise
            await asyncio.sleep(BUSY_SECONDS / 100)
        else:
            return


def for_reading(engine: AsyncEngine) -> AsyncEngine:
    """The engine for reads only: a statement then needs no transaction and no turn to write."""
    return engine.execution_options(isolation_level="AUTOCOMMIT") if engine.dialect.name == "sqlite" else engine


def _begin(connection: Connection) -> None:
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return
    dbapi_connection = connection.connection.dbapi_connection
    if getattr(dbapi_connection, "isolation_level", None) is not None:
        dbapi_connection.isolation_level = None  # type: ignore[union-attr]  # the driver must not begin by itself
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _roll_back(dbapi_connection: Any, _record: object, _error: object) -> None:
    """Roll back a connection that is discarded, for example after a cancellation: a cursor of it may still be
    referenced.

    SQLite then keeps the closed connection alive, with its transaction and its lock on the file.
    """
    with suppress(Exception):
        dbapi_connection.rollback()
