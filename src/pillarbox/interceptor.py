"""The interceptor port: what a repository asks about everything that passes through it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlalchemy import Select
from sqlalchemy.orm import Session


@dataclass(frozen=True, slots=True)
class Read:
    """What was asked for along with an entity."""

    include_deleted: bool = False
    expected_version: int | None = None


class Interceptor:
    """One concern of a repository. Override what it is about; the hooks of all interceptors are called in their order.

    Interceptors keep nothing about one repository: an instance may serve many. An exception in a hook refuses.
    """

    checks_versions: ClassVar[bool] = False
    """Whether `admits` looks at ``expected_version``."""

    def attach(self, session: Session, model: Any) -> None:
        """A repository for this class begins to work in the session. Happens again with the next one."""

    def adding(self, session: Session, entity: Any) -> None:
        """The entity is about to be added."""

    def removing(self, session: Session, entity: Any) -> bool:  # noqa: ARG002  for those who override it
        """The entity is about to be removed. True: it is done, and no row is to be deleted."""
        return False

    def restoring(self, session: Session, entity: Any) -> bool:  # noqa: ARG002  for those who override it
        """A removed entity is wanted back. True: here it is."""
        return False

    def restrict(
        self,
        session: Session,  # noqa: ARG002  for those who override it
        model: Any,  # noqa: ARG002  for those who override it
        statement: Select[Any],
        read: Read,  # noqa: ARG002  for those who override it
    ) -> Select[Any]:
        """Give a query its conditions."""
        return statement

    def admits(self, session: Session, entity: Any, read: Read) -> bool:  # noqa: ARG002  for those who override it
        """Whether an entity that was found by its id may be seen: the same conditions, for one object."""
        return True

    async def peek(
        self,
        session: Session,  # noqa: ARG002  for those who override it
        model: Any,  # noqa: ARG002  for those who override it
        ident: Any,  # noqa: ARG002  for those who override it
        ask: Callable[[], Awaitable[Any]],
    ) -> Any:
        """Read an entity that need not be current. ``ask`` asks the next interceptor and, at last, the database."""
        return await ask()
