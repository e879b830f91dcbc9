"""Reads by id from a cache that holds committed rows only.

A miss is read in a separate session: a unit of work could see its own uncommitted changes, or a snapshot that is older
than the cache's ticket. Sessions note which rows they change, and the cache forgets these rows when the transaction has
ended. So a row may be old for the moment between COMMIT and that. It may be old for up to ``ttl`` seconds if the
process dies in between, if the cache is unavailable, or if the row was changed by a bulk statement or in a session
without a repository with this interceptor.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import cache as once
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Column, TypeDecorator, inspect, select
from sqlalchemy import event as sqlalchemy_events
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Mapper, Session, SessionTransaction, UOWTransaction, make_transient_to_detached
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.types import TypeEngine
from sqlalchemy.util import await_only

from ..cache import Cache, Ticket
from ..errors import ConfigurationError
from ..interceptor import Interceptor
from ..tenancy import Tenancy, tenant_for
from ..tenant_scope import TenantScoped

logger = logging.getLogger("pillarbox")

_WATCHED, _CHANGED = "pillarbox_read_caches", "pillarbox_cached_changes"


class ReadCache(Interceptor):
    """Answers `Repository.peek` from a cache, with detached snapshots of an entity's columns.

    ``reads`` makes the sessions that read missing rows. It needs a separate engine: a unit of work that waits for a
    second connection from its own pool may wait forever.
    """

    def __init__(self, cache: Cache, reads: async_sessionmaker[AsyncSession], *, ttl: float = 60.0) -> None:
        self._cache = cache
        self._reads = reads
        self._ttl = ttl

    def attach(self, session: Session, model: Any) -> None:
        _columns_of(model)
        engine = self._reads.kw.get("bind")
        if not isinstance(engine, AsyncEngine) or engine.sync_engine is session.get_bind():
            raise ConfigurationError("ReadCache: reads needs an engine of its own, not that of the unit of work")
        watched = session.info.setdefault(_WATCHED, set())
        if (self._cache, model) not in watched:
            watched.add((self._cache, model))
            sqlalchemy_events.listen(session, "after_flush", partial(_note_changes, self._cache, model))

    async def peek(
        self,
        session: Session,
        model: Any,
        ident: Any,
        ask: Callable[[], Awaitable[Any]],  # noqa: ARG002  another interceptor would read in the unit of work
    ) -> Any:
        tenant = tenant_for(session, model.__name__) if issubclass(model, TenantScoped) else None
        identity = ident if isinstance(ident, tuple) else (ident,)
        async with self._reads() as reading:
            Tenancy().assign(reading.sync_session, Tenancy().of(session))
            return await read_row(self._cache, reading, model, tenant, identity, ttl=self._ttl)


async def read_row(
    cache: Cache, session: AsyncSession, model: Any, tenant: str | None, identity: Sequence[Any], *, ttl: float
) -> Any:
    """A detached snapshot of the row with this primary key, or None. ``session`` reads a missing row; it must be new,
    so that it sees nothing older than the cache's ticket.
    """
    columns, key = _columns_of(model), cache_key(model, tenant, identity)
    found = await cache.get(key)
    if isinstance(found, bytes):
        try:
            return columns.entity(columns.decoder.decode(found))
        except msgspec.MsgspecError:  # another release has other columns
            await cache.delete([key])
    wanted = [column == value for column, value in zip(columns.primary_key, identity, strict=True)]
    if tenant is not None:
        wanted.append(model.tenant_id == tenant)
    values = (await session.execute(select(*columns.attributes).where(*wanted))).one_or_none()
    if values is None:
        return None
    row = columns.struct(*values)
    # A database may find a row by an equal id of another type ("1" for 1). No change would delete that key.
    is_exact = cache_key(model, tenant, [getattr(row, name) for name in columns.key_names]) == key
    if isinstance(found, Ticket) and is_exact and (value := columns.encode(row)) is not None:
        await cache.set(found, value, ttl=ttl)
    return columns.entity(row)


def cache_key(model: Any, tenant: str | None, identity: Sequence[Any]) -> str:
    """The key of a row in the cache."""
    return msgspec.json.encode([f"{model.__module__}.{model.__qualname__}", tenant, *identity]).decode()


class _Columns:
    """Encodes the rows of a class for the cache, and decodes them into entities."""

    def __init__(self, model: Any) -> None:
        mapper: Mapper[Any] = inspect(model)
        if mapper.polymorphic_on is not None or mapper.inherits is not None:
            raise ConfigurationError(f"{model.__name__} is part of a class hierarchy, which no cache can hold")
        self._model = model
        self._new: Callable[[], Any] = mapper.class_manager.new_instance
        first = {attribute.key: attribute.columns[0] for attribute in mapper.column_attrs}
        columns = {name: column for name, column in first.items() if isinstance(column, Column)}  # not expressions
        self.attributes = [getattr(model, name) for name in columns]
        self.key_names = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
        self.primary_key = [getattr(model, name) for name in self.key_names]
        self.struct = msgspec.defstruct(
            model.__name__, [(name, _type_of(column)) for name, column in columns.items()], forbid_unknown_fields=True
        )
        self.decoder = msgspec.json.Decoder(self.struct)

    def encode(self, row: msgspec.Struct) -> bytes | None:
        """The row as JSON, or None if JSON cannot represent it exactly."""
        try:
            value = msgspec.json.encode(row)
            if self.decoder.decode(value) == row:
                return value
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            logger.debug("%s: %s", self._model.__name__, error)
        _warn_once(self._model)
        return None

    def entity(self, row: msgspec.Struct) -> Any:
        entity = self._new()
        for name in row.__struct_fields__:
            set_committed_value(entity, name, getattr(row, name))
        make_transient_to_detached(entity)
        return entity


@once
def _columns_of(model: Any) -> _Columns:
    return _Columns(model)


@once
def _warn_once(model: Any) -> None:
    logger.warning("%s has a column that JSON cannot carry exactly: such rows are never cached", model.__name__)


def _type_of(column: Column[Any]) -> Any:
    """The Python type of a column, as a hint for the decoder: `_Columns.encode` checks it."""
    found = python_type(column.type)
    return Any if found in (dict, object) else found | None


def python_type(kind: TypeEngine[Any]) -> type:
    """The Python type of columns of this type; `object` if SQLAlchemy does not know it."""
    try:
        return (kind.impl_instance if isinstance(kind, TypeDecorator) else kind).python_type
    except NotImplementedError:
        return object


# -- invalidation ------------------------------------------------------------------------------------------------------


def forget_at_end(session: Session, cache: Cache, keys: Collection[str]) -> None:
    """Delete these keys from the cache when the session's transaction has ended, by COMMIT or ROLLBACK."""
    if _CHANGED not in session.info:
        session.info[_CHANGED] = defaultdict(set)
        sqlalchemy_events.listen(session, "after_transaction_end", _ended)
    session.info[_CHANGED][cache].update(keys)


def _note_changes(cache: Cache, model: Any, session: Session, _context: UOWTransaction) -> None:
    changed = [entity for entity in (*session.dirty, *session.deleted) if isinstance(entity, model)]
    tenants = [entity.tenant_id if isinstance(entity, TenantScoped) else None for entity in changed]
    keys = [cache_key(model, tenant, inspect(it).identity or ()) for it, tenant in zip(changed, tenants, strict=True)]
    if keys:
        forget_at_end(session, cache, keys)


def _ended(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None and (changed := dict(session.info[_CHANGED])):
        session.info[_CHANGED].clear()
        for cache, keys in changed.items():
            await_only(_to_the_end(_forget(cache, keys)))


async def _forget(cache: Cache, keys: Collection[str]) -> None:
    try:
        await cache.delete(keys)
    except Exception:
        # The transaction has ended successfully, and an error of the cache must not hide that.
        logger.exception("a cache could not forget %d keys; they live out their time", len(keys))


async def _to_the_end(work: Awaitable[None]) -> None:
    """Finish the work even if the task is cancelled; the cancellation arrives at its next await."""
    working, task = asyncio.ensure_future(work), asyncio.current_task()
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        if task is None:
            raise
        task.uncancel()
        await working
        task.cancel()
