"""Stores: where deliveries live and how progress is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from .queue import QueueStore


def store_on(engine: AsyncEngine) -> QueueStore:
    """The store for a database. On PostgreSQL each of its lanes is a log or a queue, as the database says."""
    if engine.dialect.name == "postgresql":
        from .log import LogStore  # noqa: PLC0415  others need not load it

        return LogStore(engine)
    from .queue import QueueStore  # noqa: PLC0415  as above

    return QueueStore(engine)
