"""What the announcement of a batch says in a log: between which cursors its rows are, and what is left out of it; and
where the lane and its detours stand by that.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from ..cursor import Cursor
from ..errors import StoreError
from ..outbox import Ahead, Lane


class Contents(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an announcement says about its batch, beside its count and digest."""

    to: str
    """The cursor once the batch is settled."""
    start: str | None = None
    """The cursor before it, if it is not the lane's."""
    detour: str | None = None
    """The tenant whose cursor it moves; None: the lane's."""
    redo: tuple[int, ...] = ()
    """Failed rows that are sent again, before the others."""
    skip: tuple[int, ...] = ()
    """Rows that the cursor passes and that are no items."""
    out: tuple[int, ...] = ()
    """Items that were amended away. Their numbers stay unused."""
    attempts: dict[int, int] = msgspec.field(default_factory=dict)
    """Of items that are suspected of killing relays."""

    def ends(self, lane: Lane) -> tuple[Cursor, Cursor]:
        """The cursors before and after the batch."""
        return settled_at(lane, self.detour) if self.start is None else Cursor.parse(self.start), Cursor.parse(self.to)

    def holds(self, row: Ahead, lane: Lane) -> bool:
        """Whether the row is on its way."""
        number = row.at.id
        if number in self.out or number in self.skip:
            return False
        start, to = self.ends(lane)
        ours = detour_of(lane, row.tenant) == self.detour
        return number in self.redo or (ours and to.covers(row.at) and not start.covers(row.at))


def contents_of(lane: Lane) -> Contents | None:
    """What is announced."""
    return None if lane.announced is None else msgspec.convert(lane.announced.details, Contents, strict=False)


def detour_of(lane: Lane, tenant: str | None) -> str | None:
    """The detour that a tenant's rows take, if any."""
    return tenant if tenant is not None and tenant in (lane.detours or ()) else None


def refuse_detours(*tenants: str | None) -> None:
    """For lanes without cursors: there a tenant that waits is simply not asked for."""
    if any(tenant is not None for tenant in tenants):
        raise StoreError("a queue has no detours")


def settled_at(lane: Lane, detour: str | None = None) -> Cursor:
    """How far the lane, or one of its detours, has come."""
    cursor: Cursor = lane.cursor if detour is None else (lane.detours or {})[detour]
    return cursor


def position(lane: Lane, detour: str | None = None) -> Cursor:
    """Where the next look starts: behind what is announced."""
    announced = lane.announced
    if announced is not None and announced.details.get("detour") == detour:
        return Cursor.parse(announced.details["to"])
    return settled_at(lane, detour)


def moved(lane: Lane, detour: str | None, to: Cursor) -> Lane:
    """The lane, with one of its cursors there."""
    if detour is None:
        return replace(lane, cursor=to)
    return replace(lane, detours={**(lane.detours or {}), detour: to})


def settled(lane: Lane) -> Lane:
    """The lane once what is announced is settled."""
    if lane.announced is None:
        return lane
    detour = lane.announced.details.get("detour")
    return replace(moved(lane, detour, position(lane, detour)), announced=None, tries=0)


def encode_detours(detours: Mapping[str, Cursor] | None) -> str | None:
    """As the lane's row keeps them."""
    return msgspec.json.encode({tenant: str(at) for tenant, at in detours.items()}).decode() if detours else None


def decode_detours(text: str | None) -> dict[str, Cursor]:
    """From the form that the lane's row keeps."""
    told = msgspec.json.decode(text, type=dict[str, str]) if text else {}
    return {tenant: Cursor.parse(at) for tenant, at in told.items()}
