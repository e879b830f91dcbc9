"""Removes entities without deleting their rows."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Select
from sqlalchemy.orm import MappedColumn, Session, mapped_column

from .. import clock
from ..interceptor import Interceptor, Read
from ..stores.columns import Utc
from ..tenant_scope import mixin_column


def _moment() -> MappedColumn[datetime | None]:
    return mapped_column(Utc(), nullable=True, sort_order=1)


class SoftDeletable:
    """Mixin for mapped classes whose rows stay when they are removed. Adds ``deleted_at``."""

    deleted_at = mixin_column(_moment)


class SoftDelete(Interceptor):
    """Marks a `SoftDeletable` entity instead of deleting its row. Reads need ``include_deleted`` to see it."""

    def removing(self, session: Session, entity: Any) -> bool:  # noqa: ARG002  the same in all sessions
        if isinstance(entity, SoftDeletable) and entity.deleted_at is None:
            entity.deleted_at = clock.now()
        return isinstance(entity, SoftDeletable)

    def restoring(self, session: Session, entity: Any) -> bool:  # noqa: ARG002  the same in all sessions
        if isinstance(entity, SoftDeletable):
            entity.deleted_at = None
        return isinstance(entity, SoftDeletable)

    def restrict(self, session: Session, model: Any, statement: Select[Any], read: Read) -> Select[Any]:  # noqa: ARG002
        if read.include_deleted or not issubclass(model, SoftDeletable):
            return statement
        return statement.where(model.deleted_at.is_(None))

    def admits(self, session: Session, entity: Any, read: Read) -> bool:  # noqa: ARG002  the same in all sessions
        return read.include_deleted or not isinstance(entity, SoftDeletable) or entity.deleted_at is None
