"""A pool of one's own on the same database: relays and services must not wait for each other's connections."""

from __future__ import annotations

from sqlalchemy import Engine, StaticPool
from sqlalchemy.ext.asyncio import AsyncEngine


def with_own_pool(engine: AsyncEngine) -> AsyncEngine:
    """An engine that connects as the given one does, with its own connections. An in-memory SQLite has only one: there
    it is the engine itself.
    """
    given = engine.sync_engine
    return engine if isinstance(given.pool, StaticPool) else AsyncEngine(own_pool(given))


def own_pool(given: Engine) -> Engine:
    """The same for an engine beneath an `AsyncEngine`, or without one."""
    own = Engine(given.pool.recreate(), given.dialect, given.url, hide_parameters=given.hide_parameters)
    own.update_execution_options(**given.get_execution_options())
    return own
