"""An index more, or one less, on an outbox that has partitions: PostgreSQL cannot do that concurrently in one step.

The partitions get theirs one by one, while everything goes on. The index of the outbox itself is then made of them: a
change of the catalogs, under a lock that is tried for a moment and tried again.
"""

from __future__ import annotations

import asyncio

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from ..errors import StoreError
from .partitions import is_busy, waits_briefly

_TRIES = 50
_PAUSE = 0.2


async def build(engine: AsyncEngine, name: str, definition: str) -> None:
    """Build it on every partition, then on the outbox. What is left of a build that was ended is built again."""
    async with engine.connect() as opened:
        connection = await opened.execution_options(isolation_level="AUTOCOMMIT")
        for part in (await connection.execute(_PARTS, {"index": name})).all():
            if part.valid is False:
                await connection.exec_driver_sql(f"DROP INDEX CONCURRENTLY {part.index}")
            if not part.valid:
                own = definition.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY").replace(name, part.bare)
                await connection.exec_driver_sql(own.replace("ON pillarbox_outbox", f"ON {part.name}"))
    await _briefly_locked(engine, definition)


async def drop(engine: AsyncEngine, name: str) -> None:
    """Drop it everywhere."""
    await _briefly_locked(engine, f"DROP INDEX IF EXISTS {name}")


async def _briefly_locked(engine: AsyncEngine, statement: str) -> None:
    for _ in range(_TRIES):
        try:
            async with engine.begin() as connection:
                await connection.run_sync(waits_briefly)
                await connection.exec_driver_sql(statement)
                return
        except DBAPIError as error:
            if not is_busy(error):
                raise
        await asyncio.sleep(_PAUSE)
    raise StoreError("others hold locks on pillarbox_outbox all the time: run this again in a quiet moment")


_PARTS = text(
    """
    SELECT format('%I.%I', n.nspname, c.relname) AS name, format('%I.%I', n.nspname, own.name) AS index,
           quote_ident(own.name) AS bare, x.indisvalid AS valid
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    CROSS JOIN LATERAL (
        SELECT CAST(:index AS text) || replace(c.relname, 'pillarbox_outbox', '') AS name
    ) own
    LEFT JOIN pg_index x ON x.indexrelid = CAST(to_regclass(format('%I.%I', n.nspname, own.name)) AS oid)
    WHERE i.inhparent = CAST('pillarbox_outbox' AS regclass) ORDER BY c.relname
    """
)
