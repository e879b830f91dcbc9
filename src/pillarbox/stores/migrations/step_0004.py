"""Step 4: detours. A tenant may have a cursor of its own in a lane, and what people see goes by it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

from ..columns import LongText
from . import step_0003


def upgrade(op: Operations) -> None:
    """Add a column for detours; on PostgreSQL the journal says whose cursor a batch has moved."""
    op.add_column("pillarbox_lanes", sa.Column("detours", LongText))
    if op.get_context().dialect.name != "postgresql":
        return
    for statement in (*_JOURNAL, _CURSOR, unsent(), _view()):
        op.execute(sa.text(statement))


_JOURNAL = (
    "ALTER TABLE pillarbox_journal ADD COLUMN detour text",
    "ALTER TABLE pillarbox_journal ADD COLUMN passed_over text[] NOT NULL DEFAULT '{}'",
)

# The cursor that tells about a tenant's rows: what it has not covered has not been sent.
_CURSOR = """
CREATE FUNCTION pillarbox_cursor(cursor text, detours text, tenant text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
SELECT coalesce(CAST(detours AS jsonb) ->> tenant, cursor)
$$
"""

# Few lanes have any. The planner believes that if it is told by a pattern; else it takes this for so much work that it
# compiles the whole view first, for many seconds.
_DETOURS = f"""
UNION ALL
SELECT {step_0003.COLUMNS}
FROM pillarbox_lanes l CROSS JOIN LATERAL jsonb_each_text(CAST(l.detours AS jsonb)) AS d(tenant, cursor)
CROSS JOIN LATERAL ({step_0003.AHEAD.replace("l.cursor", "d.cursor")}) o
WHERE l.detours LIKE '{{%%' AND o.tenant = d.tenant AND pillarbox_covered(l.cursor, o.id, o.xid) AND NOT EXISTS (
    SELECT FROM pillarbox_failures f WHERE f.route = o.route AND f.shard = o.shard AND f.row_id = o.id
)
"""  # noqa: S608  constants


BY_TENANT = "NOT pillarbox_covered(pillarbox_cursor(l.cursor, l.detours, o.tenant), o.id, o.xid)"


def unsent() -> str:
    """The view of what is not sent."""
    view = step_0003.UNSENT.replace("CREATE VIEW", "CREATE OR REPLACE VIEW")
    ahead = step_0003.AHEAD.replace("NOT pillarbox_covered(l.cursor, o.id, o.xid)", BY_TENANT)
    return view.replace(step_0003.AHEAD, ahead) + _DETOURS


# Whether an entry of the journal is about this tenant's rows.
_TELLS_ABOUT = (
    "CASE WHEN j.detour IS NULL THEN o.tenant IS NULL OR o.tenant <> ALL (j.passed_over) ELSE j.detour = o.tenant END"
)
_IS_DETOUR = "IS NOT DISTINCT FROM CASE WHEN CAST(l.detours AS jsonb) ->> o.tenant IS NOT NULL THEN o.tenant END"


def _view() -> str:
    view = step_0003.view()
    for old, new in (
        (
            "pillarbox_covered(l.cursor, o.id, o.xid) AS covered",
            "pillarbox_covered(pillarbox_cursor(l.cursor, l.detours, o.tenant), o.id, o.xid) AS covered",
        ),
        (
            "o.status = 'PENDING' AND NOT c.covered",
            f"o.status = 'PENDING' AND NOT c.covered AND c.announced -> 'details' ->> 'detour' {_IS_DETOUR}",
        ),
        ("j.shard = o.shard AND j.high >= o.id", f"j.shard = o.shard AND j.high >= o.id AND {_TELLS_ABOUT}"),
    ):
        if old not in view:
            raise AssertionError(old)
        view = view.replace(old, new)
    return view
