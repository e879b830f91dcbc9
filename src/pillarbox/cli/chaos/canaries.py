"""Canaries: relays with a mistake in them, which the checker must find; a green run proves nothing if it cannot.

A mistake that another layer would hide (numbers hide a missing fence) is planted with that layer taken away.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ...errors import LeaseLostError
from ...lane import LaneWorker
from ...leased_lane import LeasedLane
from ...numbering import Numbering
from ...sending import Sender
from ...stores.log import LogStore

Options = dict[str, Any]
"""Those of the relay's `PulsarTransport`."""


def _row_id_as_number(_options: Options) -> None:
    """Numbers are given at insert, not when a batch is announced: a late row's number is lower than the last one."""
    deliver, message = Sender.deliver, Numbering.message

    async def unprepared(self: Sender, items: Any, _messages: Any = None) -> None:
        await deliver(self, items)

    setattr(Sender, "deliver", unprepared)  # noqa: B010  a type checker is right to refuse it
    setattr(Sender, "_check_lasts", lambda _self, _lasts: None)  # noqa: B010  it would notice
    setattr(Numbering, "message", lambda self, lane, _number, row: message(self, lane, row.id, row))  # noqa: B010


def _no_deduplication(options: Options) -> None:
    """The broker is given numbers that mean nothing to it: what is sent again is stored again."""
    options["guarantee"] = "at_least_once"


def _no_fence(options: Options) -> None:
    """Who has lost a lease goes on, and so does who has found out when writing. Numbers would hide it."""
    options["guarantee"] = "at_least_once"
    write = LogStore._write_at_once

    async def unfenced(self: LogStore, *place: Any, **also: Any) -> None:
        try:
            await write(self, *place, **also)
        except LeaseLostError:
            return

    setattr(LogStore, "_write_at_once", unfenced)  # noqa: B010
    setattr(LeasedLane, "check", lambda _self: None)  # noqa: B010
    setattr(LeasedLane, "within", lambda _self: nullcontext())  # noqa: B010
    setattr(LaneWorker, "lose", lambda _self: None)  # noqa: B010


def _settled_before_sent(_options: Options) -> None:
    """A batch is settled when it leaves, not when it has arrived."""
    deliver = Sender.deliver

    async def early(self: Sender, items: Any, messages: Any = None) -> None:
        if items is not None:
            await self._leased.settle()
        await deliver(self, items, messages)

    setattr(Sender, "deliver", early)  # noqa: B010


def _no_probe(_options: Options) -> None:
    """What a broker was pushed counts as stored. Only a bookie that dies with it shows the difference."""

    async def trusting(self: Sender, items: list[Any], place: str, last: int) -> tuple[list[Any], None]:
        lane, numbering = self._leased.lane, self.numbering
        return [it for it in items if numbering.place(lane, it[1]) != place or it[0] > last], None

    setattr(Sender, "_without_stored", trusting)  # noqa: B010


CANARIES: dict[str, Callable[[Options], None]] = {
    "row-id-numbers": _row_id_as_number,
    "no-deduplication": _no_deduplication,
    "no-fence": _no_fence,
    "settled-first": _settled_before_sent,
    "no-probe": _no_probe,
}
