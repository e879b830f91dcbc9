"""Repositories: load and save entities of one class, with interceptors for shared concerns.

A repository works in the session of a unit of work: it opens nothing and commits nothing. Interceptors are called in
order for every entity::

    orders = Repository(uow, Order, [Tenant(), SoftDelete(), Audit()])
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from sqlalchemy import ColumnElement, Select, func, inspect, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm.exc import StaleDataError

from .errors import ConcurrencyError, ConfigurationError, NotFoundError
from .interceptor import Interceptor, Read

T = TypeVar("T")


class HasSession(Protocol):
    """The part of a `UnitOfWork` that a repository uses."""

    @property
    def session(self) -> AsyncSession:
        """The session of the repository."""
        ...


@dataclass(frozen=True, slots=True)
class FailedPortion:
    """A portion of `Repository.add_all` that was rolled back."""

    index: int
    entities: Sequence[Any]
    error: Exception


@dataclass(slots=True)
class Added:
    """Result of `Repository.add_all`."""

    count: int = 0
    failed: list[FailedPortion] = field(default_factory=list)


class Repository(Generic[T]):
    """Loads and saves entities of one mapped class, in the session of a unit of work or in your own."""

    def __init__(
        self, work: HasSession | AsyncSession, model: type[T], interceptors: Iterable[Interceptor] = ()
    ) -> None:
        self.session = work if isinstance(work, AsyncSession) else work.session
        self.model = model
        self._interceptors = tuple(interceptors)
        self._sync = self.session.sync_session
        for interceptor in self._interceptors:
            interceptor.attach(self._sync, model)

    # -- reading -------------------------------------------------------------------------------------------------------

    async def get(self, ident: Any, *, include_deleted: bool = False, expected_version: int | None = None) -> T | None:
        """The entity with this primary key (a tuple if it has several columns), or None.

        Raises `ConcurrencyError` if its version differs from ``expected_version``.
        """
        read = self._read(include_deleted, expected_version)
        return self._admitted(await self.session.get(self.model, ident), read)

    async def get_one(self, ident: Any, *, include_deleted: bool = False, expected_version: int | None = None) -> T:
        """Like `get`, but raises `NotFoundError` instead of returning None."""
        entity = await self.get(ident, include_deleted=include_deleted, expected_version=expected_version)
        if entity is None:
            raise NotFoundError(f"there is no {self.model.__name__} {ident!r}")
        return entity

    async def peek(self, ident: Any) -> T | None:
        """The entity for reading only. With a `ReadCache` it is a detached snapshot, which may be slightly
        out of date.
        """

        def asking(interceptors: Sequence[Interceptor]) -> Callable[[], Awaitable[T | None]]:
            async def ask() -> T | None:
                if not interceptors:
                    return await self.get(ident)
                found: T | None = await interceptors[0].peek(self._sync, self.model, ident, asking(interceptors[1:]))
                return found

            return ask

        return self._admitted(await asking(self._interceptors)(), Read())

    async def list(
        self,
        *criteria: ColumnElement[bool],
        order_by: Sequence[Any] = (),
        limit: int | None = None,
        offset: int | None = None,
        include_deleted: bool = False,
    ) -> Sequence[T]:
        """All entities that meet the criteria, ordered by primary key by default."""
        order = order_by or inspect(self.model).primary_key
        statement = self._restricted(select(self.model).where(*criteria), include_deleted)
        found = await self.session.scalars(statement.order_by(*order).limit(limit).offset(offset))
        return found.unique().all()

    async def count(self, *criteria: ColumnElement[bool], include_deleted: bool = False) -> int:
        """Number of entities that meet the criteria."""
        statement = select(func.count()).select_from(self.model).where(*criteria)
        return await self.session.scalar(self._restricted(statement, include_deleted)) or 0

    # -- writing -------------------------------------------------------------------------------------------------------

    def add(self, entity: T) -> None:
        """Add a new entity. It is written by the next flush."""
        for interceptor in self._interceptors:
            interceptor.adding(self._sync, entity)
        self.session.add(entity)

    async def save(self, entity: T, *, expected_version: int | None = None) -> None:
        """Flush now, so that a conflict is raised here and not at COMMIT: `ConcurrencyError` if the entity is stale."""
        read = self._read(True, expected_version)
        if inspect(entity).transient:
            self.add(entity)
        self._admitted(entity, read)
        await self._flush()

    async def remove(self, entity: T) -> None:
        """Remove an entity. Its row is deleted unless an interceptor keeps it."""
        done = [interceptor.removing(self._sync, entity) for interceptor in self._interceptors]
        if not any(done):
            await self.session.delete(entity)

    def restore(self, entity: T) -> None:
        """Restore a removed entity."""
        done = [interceptor.restoring(self._sync, entity) for interceptor in self._interceptors]
        if not any(done):
            raise ConfigurationError(f"no interceptor of this repository keeps a removed {self.model.__name__}")

    async def add_all(self, entities: Iterable[T], *, portion: int = 500) -> Added:
        """Add many entities, in savepoints of ``portion`` each. A failing portion is rolled back alone and reported."""
        if portion < 1:
            raise ConfigurationError(f"a portion holds at least one entity, got portion={portion}")
        await self._flush()
        added, remaining = Added(), iter(entities)
        for index, chunk in enumerate(iter(lambda: list(islice(remaining, portion)), [])):
            try:
                async with self.session.begin_nested():
                    for entity in chunk:
                        self.add(entity)
                    await self._flush()
            except Exception as error:
                if isinstance(error, DBAPIError) and error.connection_invalidated:
                    raise  # the transaction is gone, with all portions
                added.failed.append(FailedPortion(index, chunk, error))
            else:
                added.count += len(chunk)
        return added

    # -- details -------------------------------------------------------------------------------------------------------

    def _read(self, include_deleted: bool, expected_version: int | None) -> Read:
        if expected_version is not None and not any(each.checks_versions for each in self._interceptors):
            raise ConfigurationError("expected_version needs OptimisticLock() among the interceptors")
        return Read(include_deleted, expected_version)

    def _admitted(self, entity: T | None, read: Read) -> T | None:
        if entity is None or not all(each.admits(self._sync, entity, read) for each in self._interceptors):
            return None
        return entity

    def _restricted(self, statement: Select[Any], include_deleted: bool) -> Select[Any]:
        read = Read(include_deleted)
        for interceptor in self._interceptors:
            statement = interceptor.restrict(self._sync, self.model, statement, read)
        return statement

    async def _flush(self) -> None:
        try:
            await self.session.flush()
        except StaleDataError as error:  # a session of a box has translated the error already
            raise ConcurrencyError(f"somebody else changed or deleted it first: {error}") from error
