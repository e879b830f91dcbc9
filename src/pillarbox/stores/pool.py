"""Separate connection pools: relays and services must not wait for each other's connections."""

from __future__ import annotations

from sqlalchemy import Engine, StaticPool
from sqlalchemy.ext.asyncio import AsyncEngine


def with_own_pool(engine: AsyncEngine) -> AsyncEngine:
    """An engine that connects like the given one, with its own pool. An in-memory SQLite has only one connection, so
    there it is the same engine.
    """
    given = engine.sync_engine
    return engine if isinstance(given.pool, StaticPool) else AsyncEngine(own_pool(given))


def own_pool(given: Engine) -> Engine:
    """The same for an engine beneath an `AsyncEngine`, or without one."""
    own = Engine(given.pool.recreate(), given.dialect, given.url, hide_parameters=given.hide_parameters)
    own.update_execution_options(**given.get_execution_options())
    return own
