"""Pillarbox: the outbox, its routes and lanes, and the view for people.

Include this folder in your own Alembic with one line of ``alembic.ini``::

    version_locations = %(here)s/versions pillarbox:stores/migrations/versions
"""

from alembic import op

from pillarbox.stores.migrations import run_step
from pillarbox.stores.migrations.autogenerate import leave_pillarbox_alone

revision = "pillarbox_0001"
down_revision = None
branch_labels = ("pillarbox",)
depends_on = None

leave_pillarbox_alone()


def upgrade() -> None:
    run_step(op, 1)  # type: ignore[arg-type]  # alembic's module stands for its operations


def downgrade() -> None:
    raise RuntimeError("pillarbox keeps committed events: its tables are not dropped by a downgrade")
