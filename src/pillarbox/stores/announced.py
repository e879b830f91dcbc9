"""The announcement of a batch in a log: the cursors before and after it, and the rows left out of it. Also the
positions of the lane and its detours, according to the announcement.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from ..cursor import Cursor
from ..errors import StoreError
from ..outbox import Ahead, Lane


class Contents(msgspec.Struct, frozen=True, omit_defaults=True):
    """The details of an announcement, beside count and digest."""

    to: str
    """The cursor once the batch is settled."""
    start: str | None = None
    """The cursor before the batch, if it differs from the lane's."""
    detour: str | None = None
    """The tenant whose detour it moves; None: the lane itself."""
    redo: tuple[int, ...] = ()
    """Failed rows that are sent again, before the others."""
    skip: tuple[int, ...] = ()
    """Rows that the cursor passes and that are not items."""
    out: tuple[int, ...] = ()
    """Items that were amended away. Their numbers stay unused."""
    attempts: dict[int, int] = msgspec.field(default_factory=dict)
    """Attempts of items that are suspected of killing relays."""

    def ends(self, lane: Lane) -> tuple[Cursor, Cursor]:
        """The cursors before and after the batch."""
        return settled_at(lane, self.detour) if self.start is None else Cursor.parse(self.start), Cursor.parse(self.to)

    def holds(self, row: Ahead, lane: Lane) -> bool:
        """Whether the row is in flight."""
        number = row.at.id
        if number in self.out or number in self.skip:
            return False
        start, to = self.ends(lane)
        ours = detour_of(lane, row.tenant) == self.detour
        return number in self.redo or (ours and to.covers(row.at) and not start.covers(row.at))


def contents_of(lane: Lane) -> Contents | None:
    """The details of the lane's announced batch."""
    return None if lane.announced is None else msgspec.convert(lane.announced.details, Contents, strict=False)


def detour_of(lane: Lane, tenant: str | None) -> str | None:
    """The detour of a tenant's rows, if it has one."""
    return tenant if tenant is not None and tenant in (lane.detours or ()) else None


def refuse_detours(*tenants: str | None) -> None:
    """Refuse detours for lanes without cursors: there, polls leave out a waiting tenant."""
    if any(tenant is not None for tenant in tenants):
        raise StoreError("a queue has no detours")


def settled_at(lane: Lane, detour: str | None = None) -> Cursor:
    """The settled cursor of the lane, or of one of its detours."""
    cursor: Cursor = lane.cursor if detour is None else (lane.detours or {})[detour]
    return cursor


def position(lane: Lane, detour: str | None = None) -> Cursor:
    """The cursor for the next read: behind the announced batch."""
    announced = lane.announced
    if announced is not None and announced.details.get("detour") == detour:
        return Cursor.parse(announced.details["to"])
    return settled_at(lane, detour)


def moved(lane: Lane, detour: str | None, to: Cursor) -> Lane:
    """The lane, with one of its cursors moved to ``to``."""
    if detour is None:
        return replace(lane, cursor=to)
    return replace(lane, detours={**(lane.detours or {}), detour: to})


def settled(lane: Lane) -> Lane:
    """The lane after its announced batch is settled."""
    if lane.announced is None:
        return lane
    detour = lane.announced.details.get("detour")
    return replace(moved(lane, detour, position(lane, detour)), announced=None, tries=0)


def encode_detours(detours: Mapping[str, Cursor] | None) -> str | None:
    """Detours in the form that is stored in a lane's row."""
    return msgspec.json.encode({tenant: str(at) for tenant, at in detours.items()}).decode() if detours else None


def decode_detours(text: str | None) -> dict[str, Cursor]:
    """Parse that form."""
    told = msgspec.json.decode(text, type=dict[str, str]) if text else {}
    return {tenant: Cursor.parse(at) for tenant, at in told.items()}
