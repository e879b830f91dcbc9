"""Isolates tenants, also in sessions that do not belong to a box."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select
from sqlalchemy.orm import Session

from ..errors import TenancyError
from ..interceptor import Interceptor, Read
from ..tenancy import tenant_for
from ..tenant_scope import TenantScoped


class Tenant(Interceptor):
    """Stores the tenant in new `TenantScoped` entities, shows only the tenant's own, and refuses all others.

    A session of a box does the same at flush and execution. This interceptor refuses at once, and in any session.
    """

    def adding(self, session: Session, entity: Any) -> None:
        if isinstance(entity, TenantScoped) and entity.tenant_id is None:
            entity.tenant_id = tenant_for(session, type(entity).__name__)
        self._refuse_foreign(session, entity)

    def removing(self, session: Session, entity: Any) -> bool:
        self._refuse_foreign(session, entity)
        return False

    def restoring(self, session: Session, entity: Any) -> bool:
        self._refuse_foreign(session, entity)
        return False

    def restrict(self, session: Session, model: Any, statement: Select[Any], read: Read) -> Select[Any]:  # noqa: ARG002
        if not issubclass(model, TenantScoped):
            return statement
        return statement.where(model.tenant_id == tenant_for(session, model.__name__))

    def admits(self, session: Session, entity: Any, read: Read) -> bool:  # noqa: ARG002  the same for all reads
        return not isinstance(entity, TenantScoped) or entity.tenant_id == tenant_for(session, type(entity).__name__)

    def _refuse_foreign(self, session: Session, entity: Any) -> None:
        if not self.admits(session, entity, Read()):
            raise TenancyError(f"this {type(entity).__name__} belongs to tenant {entity.tenant_id!r}")
