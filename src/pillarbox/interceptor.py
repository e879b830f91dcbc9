"""The interceptor port: hooks of a repository around everything that it loads and saves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlalchemy import Select
from sqlalchemy.orm import Session


@dataclass(frozen=True, slots=True)
class Read:
    """Options of a read."""

    include_deleted: bool = False
    expected_version: int | None = None


class Interceptor:
    """One concern of a repository. Override the hooks that it needs; the hooks of all interceptors are called in their
    order.

    An interceptor has no state of a single repository, so one instance may serve many. An exception in a hook refuses
    the operation.
    """

    checks_versions: ClassVar[bool] = False
    """Whether `admits` checks ``expected_version``."""

    def attach(self, session: Session, model: Any) -> None:
        """Called when a repository for this class is created in the session, so several times for the same session."""

    def adding(self, session: Session, entity: Any) -> None:
        """Called before the entity is added."""

    def removing(self, session: Session, entity: Any) -> bool:  # noqa: ARG002  for overriding methods
        """Called before the entity is removed. Returns True if that is done and no row is to be deleted."""
        return False

    def restoring(self, session: Session, entity: Any) -> bool:  # noqa: ARG002  for overriding methods
        """Called to restore a removed entity. Returns True if that is done."""
        return False

    def restrict(
        self,
        session: Session,  # noqa: ARG002  for overriding methods
        model: Any,  # noqa: ARG002  for overriding methods
        statement: Select[Any],
        read: Read,  # noqa: ARG002  for overriding methods
    ) -> Select[Any]:
        """Add the interceptor's conditions to a query."""
        return statement

    def admits(self, session: Session, entity: Any, read: Read) -> bool:  # noqa: ARG002  for overriding methods
        """Whether an entity that was found by its id is visible: the same conditions, for one object."""
        return True

    async def peek(
        self,
        session: Session,  # noqa: ARG002  for overriding methods
        model: Any,  # noqa: ARG002  for overriding methods
        ident: Any,  # noqa: ARG002  for overriding methods
        ask: Callable[[], Awaitable[Any]],
    ) -> Any:
        """Read an entity that may be out of date. ``ask`` calls the next interceptor and finally the database."""
        return await ask()
