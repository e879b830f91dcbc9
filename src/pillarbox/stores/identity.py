"""The installation id: part of every producer name at brokers that deduplicate."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Connection, func, select, update

from .. import clock
from ..errors import StoreError
from .audit import Author, note
from .columns import from_now
from .tables import lanes, meta, routes


def renew(connection: Connection, author: Author) -> tuple[UUID, int, int]:
    """Draw a new installation id in the caller's transaction. Returns the id, the number of announced batches that were
    not settled, whose sent messages are sent again, and the id of the audit entry.
    """
    before: UUID = connection.execute(select(meta.c.install_id).with_for_update()).scalar_one()
    held = (
        select(routes.c.name, lanes.c.shard)
        .join(routes, routes.c.id == lanes.c.route)
        .where(lanes.c.locked_until > from_now())
        .order_by(routes.c.name, lanes.c.shard)
    )
    if found := [f"{route}/{shard}" for route, shard in connection.execute(held)]:
        names = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise StoreError(f"relays hold lanes ({names}), and know us by the old name: stop them first")
    install = clock.new_id()
    connection.execute(update(meta).values(install_id=install))
    batches = connection.execute(
        select(func.count()).select_from(lanes).where(lanes.c.announced.is_not(None))
    ).scalar_one()
    details = {"install_id": str(install), "old_install_id": str(before), "batches": batches}
    return install, batches, note(connection, author, "new-install-id", "database", details=details)
