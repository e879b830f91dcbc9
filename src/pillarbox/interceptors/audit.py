"""Records who made a change, and when."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import String, event
from sqlalchemy.orm import MappedColumn, Session, UOWTransaction, mapped_column

from .. import clock
from ..context import current_context
from ..interceptor import Interceptor
from ..stores.columns import Utc
from ..tenant_scope import mixin_column


def _moment() -> MappedColumn[datetime]:
    return mapped_column(Utc(), nullable=False, sort_order=1)


def _user() -> MappedColumn[str | None]:
    return mapped_column(String(200), nullable=True, sort_order=1)


class Audited:
    """Mixin for mapped classes that record who created them and who last changed them. Adds four columns."""

    created_at = mixin_column(_moment)
    created_by = mixin_column(_user)
    updated_at = mixin_column(_moment)
    updated_by = mixin_column(_user)


class Audit(Interceptor):
    """Stamps every `Audited` entity that the session writes, with the time and the user of the event context."""

    def attach(self, session: Session, model: Any) -> None:  # noqa: ARG002  the same for all classes
        event.listen(session, "before_flush", _stamp)  # registering it twice is harmless


def _stamp(session: Session, _context: UOWTransaction, _instances: object) -> None:
    now, user = clock.now(), current_context().user_id
    for entity in session.new:
        if isinstance(entity, Audited):
            entity.created_at = entity.updated_at = now
            entity.created_by = entity.updated_by = user
    for entity in session.dirty:
        if isinstance(entity, Audited) and session.is_modified(entity, include_collections=False):
            entity.updated_at, entity.updated_by = now, user
