"""Keeps a user's ``alembic check`` and autogenerate away from Pillarbox's tables, which have migrations of their own."""

from __future__ import annotations

from typing import Any

from alembic.autogenerate import comparators
from alembic.operations.ops import DropIndexOp, DropTableOp, ModifyTableOps

from .. import tables

_registered = False


def leave_pillarbox_alone() -> None:
    """Called when Alembic loads our revisions, so every Alembic that includes them behaves. Calling it twice is fine."""
    global _registered  # noqa: PLW0603  Alembic's list of comparators is global, too
    if not _registered:
        comparators.dispatch_for("schema")(_withdraw)
        _registered = True


def _withdraw(_context: Any, upgrade_ops: Any, _schemas: Any) -> None:
    upgrade_ops.ops[:] = [op for op in upgrade_ops.ops if not _is_ours(op)]


def _is_ours(op: Any) -> bool:
    return isinstance(op, (DropTableOp, DropIndexOp, ModifyTableOps)) and op.table_name in tables.metadata.tables
