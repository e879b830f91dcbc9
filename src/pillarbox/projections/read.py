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
from contextlib import asynccontextmanager
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
    Result,
    Row,
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
from sqlalchemy.orm import Mapper
from sqlalchemy.orm.exc import UnmappedColumnError
from sqlalchemy.sql.operators import asc_op, desc_op

from ..cache import Cache
from ..consumers.failure import Failure, classify
from ..errors import ConfigurationError, PillarboxError
from ..interceptors.read_cache import cache_key, python_type, read_row
from ..scope import TenantScoped
from ..stores import sqlite
from ..tenancy import Tenancy, tenant_for

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
        self._model = _Model(model)
        self._cache = cache
        self._ttl = ttl

    async def get(self, key: Any, *, tenant: str | None = None) -> T | None:
        """The row with this primary key (a tuple if it has several columns), or None."""
        identity, model = self._model.identity(key), self._model
        async with self._session(tenant) as session:
            found: T | None
            if self._cache is not None:
                owner = model.tenant(session)
                found = await read_row(self._cache, session, model.type, owner, identity, ttl=self._ttl)
                return None if found is None or model.is_tombstone(found) else found
            wanted = [column == value for column, value in zip(model.primary_key, identity, strict=True)]
            found = (await session.execute(model.select(session).where(*wanted))).unique().scalar_one_or_none()
            return found

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
        order = _Order(self._model, order_by)
        start = order.values_of(after) if after else None
        async with self._session(tenant) as session:
            dialect = session.sync_session.get_bind(self._model.mapper).dialect.name
            statement = self._model.select(session, *(term.column for term in order.terms)).where(*where)
            if start is not None:
                statement = statement.where(order.beyond(start, dialect))
            statement = statement.order_by(*order.clauses(dialect)).limit(limit + 1)
            rows = await _rows(session, statement, is_continued=start is not None)
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
        async with self._session(tenant) as session:
            owner = self._model.tenant(session)
        await self._cache.delete([cache_key(self._model.type, owner, self._model.identity(key)) for key in keys])

    @asynccontextmanager
    async def _session(self, tenant: str | None) -> AsyncIterator[AsyncSession]:
        """A session of this tenant. It connects with its first statement, and ends with a rollback."""
        async with self._sessions()() as session:
            Tenancy().assign(session.sync_session, tenant)
            yield session


def _sessions_of(source: Box | async_sessionmaker[Any]) -> Callable[[], async_sessionmaker[Any]]:
    if isinstance(source, async_sessionmaker):
        return lambda: source
    bound = lru_cache(maxsize=1)(lambda engine: source.bind(async_sessionmaker(sqlite.for_reading(engine))))
    return lambda: bound(source.engine)  # a box that was started again has another one


async def _rows(session: AsyncSession, statement: Select[Any], *, is_continued: bool) -> Sequence[Row[Any]]:
    try:
        result: Result[Any] = await session.execute(statement)
        return result.unique().all()
    except (StatementError, OverflowError) as error:
        # A cursor may be made up, of the right shape and with values that no such column can have.
        refused = not isinstance(error, DBAPIError) or classify(error) is Failure.POISON
        if is_continued and refused:
            raise _invalid("the cursor holds values that no row can have") from error
        raise


class _Model:
    """The mapped class that is read."""

    def __init__(self, model: Any) -> None:
        self.type = model
        self.name: str = model.__name__
        self.mapper: Mapper[Any] = inspect(model)
        self.primary_key = [self.attribute(column) for column in self.mapper.primary_key]
        self._is_scoped = issubclass(model, TenantScoped)
        deleted = getattr(model, "deleted", None)
        self._deleted: Any = deleted if isinstance(getattr(deleted, "type", None), Boolean) else None

    def attribute(self, column: Any) -> Any:
        """The column as statements name it; `ConfigurationError` if the class does not have it."""
        try:
            return getattr(self.type, self.mapper.get_property_by_column(column).key)
        except UnmappedColumnError:
            raise ConfigurationError(f"order_by takes columns of {self.name}, got {column}") from None

    def identity(self, key: Any) -> tuple[Any, ...]:
        identity = key if isinstance(key, tuple) else (key,)
        if len(identity) != len(self.primary_key):
            raise ConfigurationError(f"the key of {self.name} has {len(self.primary_key)} columns, got {key!r}")
        return identity

    def tenant(self, session: AsyncSession) -> str | None:
        return tenant_for(session.sync_session, self.name) if self._is_scoped else None

    def select(self, session: AsyncSession, *more: Any) -> Select[Any]:
        """The rows that this session may see, with ``more`` columns at their end."""
        statement = select(self.type, *more)
        if self._is_scoped:  # sessions of a box add this condition, others do not
            statement = statement.where(self.type.tenant_id == self.tenant(session))
        return statement if self._deleted is None else statement.where(self._deleted.is_not(true()))

    def is_tombstone(self, item: Any) -> bool:
        return self._deleted is not None and bool(item.deleted)


class _Term(NamedTuple):
    """A column that rows are sorted by."""

    column: Any
    falls: bool
    is_nullable: bool

    def beyond(self, value: Any) -> ColumnElement[bool]:
        """The condition for rows after this value. NULLs come last."""
        if value is None:
            return false()
        after = self.column < self.literal(value) if self.falls else self.column > self.literal(value)
        return or_(after, self.column.is_(None)) if self.is_nullable else after

    def same(self, value: Any) -> ColumnElement[bool]:
        same: ColumnElement[bool] = self.column.is_(None) if value is None else self.column == self.literal(value)
        return same

    def clauses(self, dialect: str) -> Sequence[Any]:
        clause = self.column.desc() if self.falls else self.column.asc()
        if not self.is_nullable:
            return [clause]
        # MySQL has no NULLS LAST; elsewhere that lets an index be used.
        return [self.column.is_(None), clause] if dialect in ("mysql", "mariadb") else [clause.nulls_last()]

    def literal(self, value: Any) -> Any:
        return literal(value, self.column.type)


class _Order:
    """The order of a query, and the cursors that go with it."""

    def __init__(self, model: _Model, order_by: Sequence[Any]) -> None:
        given = [_term(model, each) for each in order_by]
        falls = given[-1].falls if given else False  # in the last direction: one index may serve all terms
        keys = [_Term(column, falls, is_nullable=False) for column in model.primary_key]
        terms = dict[str, _Term]()
        for term in (*given, *keys):
            terms.setdefault(term.column.key, term)  # a second time it has no effect
        self.terms = tuple(terms.values())
        said = [model.name, *((term.column.key, term.falls) for term in self.terms)]
        self._mark = hashlib.blake2b(repr(said).encode(), digest_size=6).hexdigest()
        self._values: Any = tuple[tuple(_kind(term) for term in self.terms)]  # type: ignore[misc]

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
            same.append(term.same(value))
        return or_(*ways)

    def cursor(self, values: Sequence[Any]) -> str:
        """The cursor of the row with these values."""
        try:
            cursor = urlsafe_b64encode(msgspec.json.encode((self._mark, tuple(values)))).rstrip(b"=").decode()
            if self.values_of(cursor) == tuple(values):
                return cursor
        except (InvalidCursorError, TypeError, ValueError):
            pass
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


def _term(model: _Model, given: Any) -> _Term:
    expression, falls = getattr(given, "expression", given), False
    if isinstance(expression, UnaryExpression) and expression.modifier in (asc_op, desc_op):
        expression, falls = expression.element, expression.modifier is desc_op
    if not isinstance(expression, Column):
        raise ConfigurationError(f"order_by takes columns of {model.name}, with .desc() or without, got {given}")
    return _Term(model.attribute(expression), falls, bool(expression.nullable))


_KINDS = (bool, int, float, str, bytes, Decimal, UUID, date, datetime, time)


def _kind(term: _Term) -> Any:
    """The Python type of a column, for the decoder of cursors."""
    kind = getattr(term.column.type, "impl_instance", term.column.type)
    if isinstance(kind, Float) and not isinstance(kind, Double):
        raise ConfigurationError(f"order_by: {term.column.key} is a Float, which MySQL rounds: use Double or Numeric")
    found = python_type(kind)
    if not (found in _KINDS or issubclass(found, Enum)):
        raise ConfigurationError(f"order_by: {term.column.key} has a type that no cursor can carry")
    return found | None if term.is_nullable else found
