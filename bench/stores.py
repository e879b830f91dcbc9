"""What a benchmark must know about a store: how to choose it, and how its rows look once they are delivered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.util import find_spec

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from pillarbox import Pillarbox

CHOICES = ("log", "queue") if find_spec("pillarbox.stores.log") else ("queue",)
"""On PostgreSQL. The first one is what a new database gets."""

_BECOME_QUEUE = (
    "UPDATE pillarbox_meta SET store = 'queue'",
    "UPDATE pillarbox_lanes SET cursor = NULL",
    "DROP INDEX IF EXISTS ix_pillarbox_outbox_xid",
)


async def choose(box: Pillarbox, store: str | None) -> None:
    """Let a new database use this store, before anything is written; None is the library's default.

    People cannot choose: a database that was a queue stays one. So it is made to look like that.
    """
    if store == "queue" and await name_of(box) == "log":
        async with box.engine.begin() as connection:
            for statement in _BECOME_QUEUE:
                await connection.execute(text(statement))


async def name_of(box: Pillarbox) -> str:
    """Which store the database was set up with."""
    async with box.engine.connect() as connection:
        return str((await connection.execute(text("SELECT store FROM pillarbox_meta"))).scalar_one())


async def mark_delivered(connection: AsyncConnection, store: str) -> None:
    """Take all rows that are there for delivered, in the way of the store."""
    await _DELIVERED[store](connection)


async def _queue_delivered(connection: AsyncConnection) -> None:
    """Nothing to do: they were written as what they are."""


async def _log_delivered(connection: AsyncConnection) -> None:
    """Every lane has come past them."""
    high = "(SELECT coalesce(max(id), 0) FROM pillarbox_outbox)"
    await connection.execute(text(f"UPDATE pillarbox_lanes SET cursor = {high} || ' ' || pg_current_snapshot()"))


_DELIVERED: dict[str, Callable[[AsyncConnection], Awaitable[None]]] = {
    "queue": _queue_delivered,
    "log": _log_delivered,
}

SENT_COLUMNS = {"queue": {"status": "'SENT'", "sent_at": "now()"}}
"""The columns in which a delivered row differs from a waiting one."""
