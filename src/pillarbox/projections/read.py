"""The query side: rows of a read model by key, and in pages.

    orders = ReadDao(box, OrderSummary)
    order = await orders.get(order_id, tenant="acme")
    page = await orders.page(order_by=[OrderSummary.placed_at.desc()], limit=50, tenant="acme")
    page = await orders.page(order_by=[OrderSummary.placed_at.desc()], after=page.next, tenant="acme")

A page continues after the values of the last row: rows that come and go between two pages shift nothing, and the
hundredth page costs what the first does. Every read has its own session, which never commits; the rows are detached.
Rows with a column ``deleted`` that is true are tombstones, and not shown.

With a cache, `get` may return the old row for the moment between the commit of a change and the `ReadDao.forget` after
it. It may do so for up to ``ttl`` seconds if the writer dies in between, or does not have or cannot reach the cache,
and after a rebuild, which replaces all rows at once. A reader who read before the commit cannot bring the old row back.
"""

from __future__ import annotations

import binascii
import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import (
    Boolean,
    Column,
    ColumnElement,
    Double,
    Float,
    Select,
    UnaryExpression,
    and_,
    false,
    inspect,
    literal,
    or_,
    select,
    true,
    tuple_,
)
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm.exc import UnmappedColumnError
from sqlalchemy.sql.operators import asc_op, desc_op

from ..cache import Cache
from ..consumers.failure import Failure, classify
from ..errors import ConfigurationError, PillarboxError
from ..interceptors.read_cache import cache_key, python_type, read_row
from ..stores import sqlite
from ..tenancy import Tenancy, tenant_for
from ..tenant_scope import TenantScoped

MAX_LIMIT = 1000
"""The longest page."""

T = TypeVar("T")
_Maker = TypeVar("_Maker", bound="async_sessionmaker[Any]")


class InvalidCursorError(PillarboxError, ValueError):
    """A cursor that no page of this query gave out: damaged, made up, or of another order.

    Its text says what is wrong and what to do, holds no value of the cursor, and may be shown to the sender.
    """


class Box(Protocol):
    """What reading needs of a `Pillarbox`."""

    @property
    def engine(self) -> AsyncEngine:
        """The engine that the box works with."""
        ...

    def bind(self, maker: _Maker) -> _Maker:
        """Apply the box's rules to the sessions of this maker."""
        ...


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some rows, and the cursor of the next page."""

    items: Sequence[T]
    next: str | None
    """The cursor for ``after``; None after the last page. It holds values of the last row, readable by its holder."""


class ReadDao(Generic[T]):
    """Reads rows of one mapped class.

    ``source`` is a box, whose rules about tenants then hold, or your own sessionmaker. ``cache`` keeps the rows that
    `get` has found.
    """

    def __init__(
        self,
        source: Box | async_sessionmaker[Any],
        model: type[T],
        *,
        cache: Cache | None = None,
        ttl: float = 60.0,
    ) -> None:
        self._sessions = _sessions_of(source)
        self._model: Any = model
        self._mapper: Any = inspect(model)
        self._primary_key = [self._attribute(column) for column in self._mapper.primary_key]
        deleted = getattr(model, "deleted", None)
        self._deleted: Any = deleted if isinstance(getattr(deleted, "type", None), Boolean) else None
        self._cache = cache
        self._ttl = ttl

    async def get(self, key: Any, *, tenant: str | None = None) -> T | None:
        """The row with this primary key (a tuple if it has several columns), or None."""
        identity = self._identity(key)
        async with self._session(tenant) as (session, owner):
            found: Any
            if self._cache is not None:
                found = await read_row(self._cache, session, self._model, owner, identity, ttl=self._ttl)
                return None if self._deleted is not None and found is not None and found.deleted else found
            wanted = [column == value for column, value in zip(self._primary_key, identity, strict=True)]
            found = await session.execute(self._select(owner).where(*wanted))
            row: T | None = found.unique().scalar_one_or_none()
            return row

    async def page(
        self,
        *,
        where: Sequence[ColumnElement[bool]] = (),
        order_by: Sequence[Any] = (),
        limit: int = 50,
        after: str | None = None,
        tenant: str | None = None,
    ) -> Page[T]:
        """Up to ``limit`` rows in this order, after a cursor: the ``next`` of the page before. Without one they are the
        first rows; an empty text is no cursor, as in ``?after=``.

        ``order_by`` takes columns of the class, each with ``.desc()`` or without; NULLs come last. The primary key is
        added to it, so that rows with the same values have an order too.
        """
        if not 1 <= limit <= MAX_LIMIT:
            raise ConfigurationError(f"limit is 1 to {MAX_LIMIT}, got {limit}")
        order = self._order(order_by)
        start = order.values_of(after) if after else None
        async with self._session(tenant) as (session, owner):
            dialect = session.sync_session.get_bind(self._mapper).dialect.name
            statement = self._select(owner, *(term.column for term in order.terms)).where(*where)
            if start is not None:
                statement = statement.where(order.beyond(start, dialect))
            try:
                found: Any = await session.execute(statement.order_by(*order.clauses(dialect)).limit(limit + 1))
                rows = found.unique().all()
            except (StatementError, OverflowError) as error:
                # A cursor may be made up, of the right shape and with values that no such column can have.
                if start is not None and (not isinstance(error, DBAPIError) or classify(error) is Failure.POISON):
                    raise _invalid("the cursor holds values that no row can have") from error
                raise
        there = rows[:limit]
        return Page([row[0] for row in there], order.cursor(there[-1][1:]) if len(rows) > limit else None)

    async def all(
        self,
        *,
        where: Sequence[ColumnElement[bool]] = (),
        order_by: Sequence[Any] = (),
        portion: int = 500,
        tenant: str | None = None,
    ) -> AsyncIterator[T]:
        """All rows in this order, read in pages of ``portion``. No connection is held while you work on them."""
        after: str | None = ""
        while after is not None:
            page = await self.page(where=where, order_by=order_by, limit=portion, after=after, tenant=tenant)
            for item in page.items:
                yield item
            after = page.next

    async def forget(self, *keys: Any, tenant: str | None = None) -> None:
        """Drop these rows from the cache. Call it after the commit of a change that no session of the box has made."""
        if self._cache is None or not keys:
            return
        async with self._session(tenant) as (_, owner):
            await self._cache.delete([cache_key(self._model, owner, self._identity(key)) for key in keys])

    @asynccontextmanager
    async def _session(self, tenant: str | None) -> AsyncIterator[tuple[AsyncSession, str | None]]:
        """A session of this tenant, and the tenant that owns the rows: None if the class belongs to no tenants. The
        session connects with its first statement, and ends with a rollback.
        """
        async with self._sessions()() as session:
            Tenancy().assign(session.sync_session, tenant)
            is_scoped = issubclass(self._model, TenantScoped)
            yield session, tenant_for(session.sync_session, self._model.__name__) if is_scoped else None

    def _identity(self, key: Any) -> tuple[Any, ...]:
        identity = key if isinstance(key, tuple) else (key,)
        if len(identity) != len(self._primary_key):
            raise ConfigurationError(
                f"the key of {self._model.__name__} has {len(self._primary_key)} columns, got {key!r}"
            )
        return identity

    def _select(self, owner: str | None, *more: Any) -> Select[Any]:
        """The rows of this tenant, with ``more`` columns at their end."""
        statement = select(self._model, *more)
        if owner is not None:  # sessions of a box add this condition, others do not
            statement = statement.where(self._model.tenant_id == owner)
        return statement if self._deleted is None else statement.where(self._deleted.is_not(true()))

    def _order(self, order_by: Sequence[Any]) -> _Order:
        terms, falls = dict[str, _Term](), False
        for given in order_by:
            expression, falls = getattr(given, "expression", given), False
            if isinstance(expression, UnaryExpression) and expression.modifier in (asc_op, desc_op):
                expression, falls = expression.element, expression.modifier is desc_op
            column = self._attribute(expression)
            terms.setdefault(column.key, _Term(column, falls, bool(expression.nullable)))  # a second time has no effect
        for column in self._primary_key:  # in the last direction: one index may serve all terms
            terms.setdefault(column.key, _Term(column, falls, is_nullable=False))
        return _Order(self._model.__name__, [*terms.values()])

    def _attribute(self, column: Any) -> Any:
        """The column as statements name it; `ConfigurationError` if the class does not have it."""
        try:
            if isinstance(column, Column):
                return getattr(self._model, self._mapper.get_property_by_column(column).key)
        except UnmappedColumnError:
            pass
        raise ConfigurationError(
            f"order_by takes columns of {self._model.__name__}, with .desc() or without, got {column}"
        )


def _sessions_of(source: Box | async_sessionmaker[Any]) -> Callable[[], async_sessionmaker[Any]]:
    if isinstance(source, async_sessionmaker):
        return lambda: source
    bound = lru_cache(maxsize=1)(lambda engine: source.bind(async_sessionmaker(sqlite.for_reading(engine))))
    return lambda: bound(source.engine)  # a box that was started again has another one


class _Term(NamedTuple):
    """A column that rows are sorted by. NULLs come last."""

    column: Any
    falls: bool
    is_nullable: bool

    def literal(self, value: Any) -> Any:
        return literal(value, self.column.type)

    def beyond(self, value: Any) -> ColumnElement[bool]:
        """The condition for rows after this value."""
        if value is None:
            return false()
        after = self.column < self.literal(value) if self.falls else self.column > self.literal(value)
        return or_(after, self.column.is_(None)) if self.is_nullable else after

    def clauses(self, dialect: str) -> Sequence[Any]:
        clause = self.column.desc() if self.falls else self.column.asc()
        if not self.is_nullable:
            return [clause]
        # MySQL has no NULLS LAST; elsewhere that lets an index be used.
        return [self.column.is_(None), clause] if dialect in ("mysql", "mariadb") else [clause.nulls_last()]

    @property
    def kind(self) -> Any:
        """The Python type of its values, for the decoder of cursors."""
        kind = getattr(self.column.type, "impl_instance", self.column.type)
        if isinstance(kind, Float) and not isinstance(kind, Double):
            raise ConfigurationError(
                f"order_by: {self.column.key} is a Float, which MySQL rounds: use Double or Numeric"
            )
        found = python_type(kind)
        if not (found in _KINDS or issubclass(found, Enum)):
            raise ConfigurationError(f"order_by: {self.column.key} has a type that no cursor can carry")
        return found | None if self.is_nullable else found


_KINDS = (bool, int, float, str, bytes, Decimal, UUID, date, datetime, time)


class _Order:
    """The order of a query, and the cursors that go with it."""

    def __init__(self, name: str, terms: Sequence[_Term]) -> None:
        self.terms = terms
        said = [name, *((term.column.key, term.falls) for term in terms)]
        self._mark = hashlib.blake2b(repr(said).encode(), digest_size=6).hexdigest()
        self._values: Any = tuple[tuple(term.kind for term in terms)]  # type: ignore[misc]

    def clauses(self, dialect: str) -> list[Any]:
        return [clause for term in self.terms for clause in term.clauses(dialect)]

    def beyond(self, values: Sequence[Any], dialect: str) -> ColumnElement[bool]:
        """The condition for rows after these values."""
        first, pairs = self.terms[0], list(zip(self.terms, values, strict=True))
        is_one_way = all(term.falls == first.falls and not term.is_nullable for term in self.terms)
        if is_one_way and dialect in ("postgresql", "sqlite"):
            ours, last = tuple_(*(term.column for term in self.terms)), tuple_(*(it.literal(v) for it, v in pairs))
            return ours < last if first.falls else ours > last
        ways, same = [], list[ColumnElement[bool]]()
        for term, value in pairs:
            ways.append(and_(*same, term.beyond(value)))
            same.append(term.column.is_(None) if value is None else term.column == term.literal(value))
        return or_(*ways)

    def cursor(self, values: Sequence[Any]) -> str:
        """The cursor of the row with these values."""
        with suppress(TypeError, ValueError):
            cursor = urlsafe_b64encode(msgspec.json.encode((self._mark, tuple(values)))).rstrip(b"=").decode()
            if self.values_of(cursor) == tuple(values):
                return cursor
        names = ", ".join(term.column.key for term in self.terms)
        raise ConfigurationError(f"order_by: a cursor cannot carry the values of {names} exactly: {values!r}")

    def values_of(self, cursor: str) -> tuple[Any, ...]:
        """The values that a cursor holds."""
        if not isinstance(cursor, str):
            raise _invalid(f"the cursor is no text, but {type(cursor).__name__}")
        try:
            said = urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4))
            mark, values = msgspec.json.decode(said, type=tuple[str, msgspec.Raw])
            if mark == self._mark:
                found: tuple[Any, ...] = msgspec.json.decode(values, type=self._values)
                return found
        except (UnicodeError, binascii.Error, msgspec.MsgspecError, RecursionError) as error:
            raise _invalid("the cursor is damaged, or no page has given it out") from error
        raise _invalid("the cursor is of another query, or of another order of this one")


def _invalid(wrong: str) -> InvalidCursorError:
    return InvalidCursorError(f"{wrong}: start without a cursor, and take each next one from the page before")
