"""Step 8: what a lane has paged over, and a detour has not, is counted once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from . import step_0004


def upgrade(op: Operations) -> None:
    """On PostgreSQL, leave what the lane covers to the part of the view that asks detours."""
    if op.get_context().dialect.name == "postgresql":
        by_lane = "NOT pillarbox_covered(l.cursor, o.id, o.xid)"
        op.execute(sa.text(step_0004.unsent().replace(step_0004.BY_TENANT, f"{step_0004.BY_TENANT} AND {by_lane}")))
