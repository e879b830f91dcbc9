"""Creates Pillarbox's tables in your own Alembic revisions, by one line::

    import pillarbox.alembic

    def upgrade() -> None:
        pillarbox.alembic.upgrade(op, to=1)

``pillarbox migrate`` does the same without Alembic. Both ways can be mixed: each step runs once. Importing this module,
in a revision or in ``env.py``, also keeps ``alembic check`` and autogenerate away from Pillarbox's tables.
"""

from __future__ import annotations

from typing import Any

from alembic.autogenerate import comparators
from alembic.operations.ops import DropTableOp, ModifyTableOps
from alembic.util import DispatchPriority
from sqlalchemy.dialects.postgresql.base import ischema_names

from .errors import ConfigurationError
from .stores import migrations
from .stores.columns import TransactionId


def upgrade(op: Any, *, to: int) -> None:
    """Run Pillarbox's missing steps up to and including ``to``. ``op`` is Alembic's ``op``."""
    last = len(migrations.STEPS)
    if not 1 <= to <= last:
        known = "step 1" if last == 1 else f"the steps 1 to {last}"
        raise ConfigurationError(f"this release of pillarbox knows {known}, not {to}")
    for number in range(1, to + 1):
        migrations.run_step(op, number)


# Comparisons also read Pillarbox's tables, and SQLAlchemy would warn of an unknown type.
ischema_names.setdefault("xid8", TransactionId)


@comparators.dispatch_for("schema", priority=DispatchPriority.LAST)
def _leave_our_tables_alone(_context: Any, upgrade_ops: Any, _schemas: Any) -> None:
    """Keep autogenerate from dropping Pillarbox's tables, which are not in the user's metadata."""
    upgrade_ops.ops[:] = [op for op in upgrade_ops.ops if not _is_ours(op)]


def _is_ours(op: Any) -> bool:
    return isinstance(op, (DropTableOp, ModifyTableOps)) and op.table_name.startswith("pillarbox_")
