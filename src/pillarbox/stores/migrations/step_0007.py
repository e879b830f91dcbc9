"""Step 7: what a route's lanes are chosen by, so that a relay can tell where a tenant's deliveries are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations


def upgrade(op: Operations) -> None:
    """Add a column. Whoever writes by a route says what it is when it starts the next time."""
    op.add_column("pillarbox_routes", sa.Column("shard_by", sa.String(10)))
