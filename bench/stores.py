"""What a benchmark must know about a store: how to choose it, and how its rows look once they are delivered."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from pillarbox import Pillarbox

CAN_CHOOSE = "store" in inspect.signature(Pillarbox).parameters
CHOICES = ("log", "queue") if CAN_CHOOSE else ("queue",)


def choice(store: str | None) -> dict[str, Any]:
    """The argument of `Pillarbox` that chooses a store; None is the library's default."""
    if store is None or (store == "queue" and not CAN_CHOOSE):
        return {}
    if not CAN_CHOOSE:
        raise SystemExit(f"error: this release has only the queue store, and {store!r} was asked for")
    return {"store": store}


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
