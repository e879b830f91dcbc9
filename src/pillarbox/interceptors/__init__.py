"""Interceptors: the concerns that repositories share."""

from .audit import Audit, Audited
from .optimistic_lock import OptimisticLock
from .read_cache import ReadCache
from .soft_delete import SoftDeletable, SoftDelete
from .tenant import Tenant

__all__ = ["Audit", "Audited", "OptimisticLock", "ReadCache", "SoftDeletable", "SoftDelete", "Tenant"]
