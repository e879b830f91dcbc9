"""Step 5: room for the rows of lanes, which are written again with every batch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations


def upgrade(op: Operations) -> None:
    """On PostgreSQL, let the versions of a lane's row stay in one page.

    There a new version needs no entry in an index. While an old snapshot keeps the dead ones, each entry costs a walk
    over all that were made since.
    """
    if op.get_context().dialect.name == "postgresql":
        op.execute(sa.text("ALTER TABLE pillarbox_lanes SET (fillfactor = 10)"))
