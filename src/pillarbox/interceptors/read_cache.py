"""Reads by id from a cache, which holds committed rows and nothing else.

A miss is read in a session of its own: in the unit of work it could see changes that are not committed, or a snapshot
that is older than the cache's ticket. Changes are watched for in every session in which a repository with this
interceptor works, and forgotten by the cache when their transaction has ended, however it ended. So what is read may be
old for the moment between COMMIT and that; and for up to ``ttl`` seconds if the process dies in between, if the cache
is out of reach, or if rows are changed past all this, by bulk statements or in sessions without such a repository.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import cache as once
from typing import Any, Optional

import msgspec
from sqlalchemy import Column, TypeDecorator, inspect, select
from sqlalchemy import event as sqlalchemy_events
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Mapper, Session, SessionTransaction, UOWTransaction, make_transient_to_detached
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.util import await_only

from ..cache import Cache, Ticket
from ..context import current_context, event_context
from ..errors import ConfigurationError
from ..interceptor import Interceptor
from ..scope import TenantScoped
from ..tenancy import session_tenant, tenant_for

logger = logging.getLogger("pillarbox")


class ReadCache(Interceptor):
    """Answers `Repository.peek` from a cache, with detached snapshots of an entity's columns.

    ``reads`` makes the sessions for what is not there. It needs an engine of its own: a unit of work that waits for a
    second connection of its own pool may wait for ever.
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
        watches = session.info.setdefault("pillarbox_read_cache", {})
        if (id(self._cache), model) not in watches:
            watches[id(self._cache), model] = _Watch(session, self._cache, model)

    async def peek(
        self,
        session: Session,
        model: Any,
        ident: Any,
        ask: Callable[[], Awaitable[Any]],  # noqa: ARG002  whoever comes next would read in the unit of work
    ) -> Any:
        columns, identity = _columns_of(model), ident if isinstance(ident, tuple) else (ident,)
        tenant = tenant_for(session, model.__name__) if issubclass(model, TenantScoped) else None
        key = cache_key(model, tenant, identity)
        found = (await self._cache.get([key])).get(key)
        if isinstance(found, bytes):
            try:
                return columns.entity(columns.decoder.decode(found))
            except msgspec.MsgspecError:  # another release has other columns
                await self._cache.delete([key])
        with event_context(tenant=session_tenant(session) or current_context().tenant):
            row = await self._load(columns, tenant, identity)
        if isinstance(found, Ticket) and row is not None:
            await self._fill(columns, tenant, found, row)
        return None if row is None else columns.entity(row)

    async def _load(self, columns: _Columns, tenant: str | None, identity: Sequence[Any]) -> msgspec.Struct | None:
        statement = select(*columns.attributes).where(
            *(column == value for column, value in zip(columns.primary_key, identity, strict=True))
        )
        if tenant is not None:
            statement = statement.where(columns.model.tenant_id == tenant)
        async with self._reads() as session:
            row = (await session.execute(statement)).one_or_none()
        return None if row is None else columns.struct(*row)

    async def _fill(self, columns: _Columns, tenant: str | None, ticket: Ticket, row: msgspec.Struct) -> None:
        # A database may find a row by an id that it does not hold like that ("1" for 1): nobody would forget that key.
        identity = [getattr(row, name) for name in columns.key_names]
        value = columns.encode(row)
        if value is not None and cache_key(columns.model, tenant, identity) == ticket.key:
            await self._cache.set({ticket: value}, ttl=self._ttl)


class _Columns:
    """How the rows of a class go into the cache, and come back as entities."""

    def __init__(self, model: Any) -> None:
        mapper: Mapper[Any] = inspect(model)
        if mapper.polymorphic_on is not None or mapper.inherits is not None:
            raise ConfigurationError(f"{model.__name__} is part of a class hierarchy, which ReadCache cannot hold")
        self.model = model
        self._new: Callable[[], Any] = mapper.class_manager.new_instance
        first = {attribute.key: attribute.columns[0] for attribute in mapper.column_attrs}
        columns = {name: column for name, column in first.items() if isinstance(column, Column)}  # not expressions
        self._names = list(columns)
        self.attributes = [getattr(model, name) for name in self._names]
        self.primary_key = mapper.primary_key
        self.key_names = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
        self.struct = msgspec.defstruct(
            model.__name__, [(name, _type_of(column)) for name, column in columns.items()], forbid_unknown_fields=True
        )
        self.decoder = msgspec.json.Decoder(self.struct)

    def encode(self, row: msgspec.Struct) -> bytes | None:
        """The row as JSON, or None if it would not come back as it is."""
        try:
            value = msgspec.json.encode(row)
            if self.decoder.decode(value) == row:
                return value
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            logger.debug("%s: %s", self.model.__name__, error)
        _warn_once(self.model)
        return None

    def entity(self, row: msgspec.Struct) -> Any:
        entity = self._new()
        for name in self._names:
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
    """What the column gives, as a hint for the decoder: `_Columns.encode` finds out whether it is true."""
    kind = column.type.impl_instance if isinstance(column.type, TypeDecorator) else column.type
    try:
        python_type = kind.python_type
    except NotImplementedError:
        return Any
    return Any if python_type in (dict, object) else Optional[python_type]  # noqa: UP045  it is a value here


def cache_key(model: Any, tenant: str | None, identity: Sequence[Any]) -> str:
    """Where the cache keeps an entity."""
    return msgspec.json.encode([f"{model.__module__}.{model.__qualname__}", tenant, *identity]).decode()


class _Watch:
    """Collects which entities a session changes, and has them forgotten when the transaction has ended."""

    def __init__(self, session: Session, cache: Cache, model: Any) -> None:
        self._cache = cache
        self._model = model
        self._changed: set[str] = set()
        sqlalchemy_events.listen(session, "after_flush", self._flushed)
        sqlalchemy_events.listen(session, "after_transaction_end", self._ended)

    def _flushed(self, session: Session, _context: UOWTransaction) -> None:
        for entity in (*session.dirty, *session.deleted):
            if isinstance(entity, self._model):
                tenant = entity.tenant_id if isinstance(entity, TenantScoped) else None
                self._changed.add(cache_key(self._model, tenant, inspect(entity).identity or ()))

    def _ended(self, _session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None and self._changed:
            changed, self._changed = self._changed, set()
            await_only(forget(self._cache, changed))


def forget_afterwards(session: Session, cache: Cache, keys: Collection[str]) -> None:
    """Have these forgotten when the transaction of the session has ended, however it ends: for who writes rows by
    statements of his own, in a session that is not used again.
    """

    def ended(_session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:
            await_only(forget(cache, keys))

    sqlalchemy_events.listen(session, "after_transaction_end", ended)


async def forget(cache: Cache, keys: Collection[str]) -> None:
    """Have these forgotten, although the task is being cancelled. Does not fail."""
    await _to_the_end(_forget(cache, keys))


async def _forget(cache: Cache, keys: Collection[str]) -> None:
    try:
        await cache.delete(keys)
    except Exception:
        # The transaction has ended well. A cache may not make it look as if it had not.
        logger.exception("a cache could not forget %d keys; they live out their time", len(keys))


async def _to_the_end(work: Awaitable[None]) -> None:
    """Finish although the task is being cancelled: it learns of that at its next await."""
    working, task = asyncio.ensure_future(work), asyncio.current_task()
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        if task is None:
            raise
        task.uncancel()
        await working
        task.cancel()
