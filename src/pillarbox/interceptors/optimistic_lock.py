"""Refuses changes of an entity whose version is not the expected one."""

from __future__ import annotations

from typing import Any

from sqlalchemy import inspect
from sqlalchemy.orm import Session

from ..errors import ConcurrencyError, ConfigurationError
from ..interceptor import Interceptor, Read


class OptimisticLock(Interceptor):
    """Compares ``expected_version`` with the version of the entity. The class needs a ``version_id_col``.

    With that column, the database compares once more when the entity is written. This interceptor extends the
    comparison back to the time at which a user, or a remote client, read the entity.
    """

    checks_versions = True

    def attach(self, session: Session, model: Any) -> None:  # noqa: ARG002  the same in all sessions
        if inspect(model).version_id_col is None:
            raise ConfigurationError(
                f'{model.__name__} has no version: set __mapper_args__ = {{"version_id_col": ...}}'
            )

    def admits(self, session: Session, entity: Any, read: Read) -> bool:  # noqa: ARG002  the same in all sessions
        mapper: Any = inspect(type(entity))
        version = getattr(entity, mapper.get_property_by_column(mapper.version_id_col).key)
        if read.expected_version not in (None, version):
            raise ConcurrencyError(
                f"this {type(entity).__name__} has version {version}, and {read.expected_version} was expected: "
                "load it again and redo"
            )
        return True
