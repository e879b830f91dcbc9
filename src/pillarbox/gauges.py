"""What a box shows when somebody looks: its relays, from memory, and its backlog, from the database.

The database is asked when metrics are scraped, and not again for some seconds; the slower it answers, the more seldom
it is asked, so that this never takes more than a twentieth of its time. After a failure it is asked again sooner:
people look for what is missing then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from sqlalchemy import StaticPool
from sqlalchemy.ext.asyncio import AsyncEngine

from . import clock, telemetry
from .inbox import LetterFilter, LetterKind
from .redaction import redacted
from .telemetry import Sample

if TYPE_CHECKING:
    from .stores.inspection import Backlog
    from .stores.slots import SlotState

logger = logging.getLogger("pillarbox")

KEPT_SECONDS = 3.0
SHARE = 20
ANSWER_SECONDS = 5.0
FAILURE_SECONDS = 10.0
"""The longest pause after a question that was not answered."""


class Shown(Protocol):
    """A relay."""

    def samples(self) -> Iterable[Sample]:
        """What gauges show of it."""
        ...


class Gauges:
    """The `Source` of one box."""

    def __init__(self, engine: Callable[[], AsyncEngine | None], relays: Callable[[], Iterable[Shown]]) -> None:
        self._engine = engine
        self._relays = relays
        self._known: list[Sample] = []
        self._until = float("-inf")

    def samples(self) -> Iterable[Sample]:
        """See `Source.samples`."""
        return [sample for relay in [*self._relays()] for sample in relay.samples()]

    async def asked(self) -> Iterable[Sample]:
        """See `Source.asked`."""
        began = clock.current().monotonic()
        if began < self._until:
            return self._known
        longest = float("inf")
        self._until = began + KEPT_SECONDS  # who comes meanwhile gets what was known before
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                self._known = await self._ask()
        except Exception as error:
            self._known = []  # nothing, rather than what is not true any more
            longest = FAILURE_SECONDS
            logger.debug("the database does not say how much is pending: %s", redacted(str(error)))
        ended = clock.current().monotonic()
        self._until = ended + min(longest, max(KEPT_SECONDS, SHARE * (ended - began)))
        return self._known

    async def _ask(self) -> list[Sample]:
        engine = self._engine()
        # An in-memory SQLite has one connection: to give it back would undo what somebody else does on it.
        if engine is None or isinstance(engine.pool, StaticPool):
            return []
        from .stores.inspection import backlog  # noqa: PLC0415  for those who look
        from .stores.letters import SqlLetters  # noqa: PLC0415  as above
        from .stores.slots import slot_states  # noqa: PLC0415  as above

        async with engine.connect() as connection:
            shown = [sample for route in await connection.run_sync(backlog) for sample in _samples(route)]
            shown += _slots(await connection.run_sync(slot_states))
            return shown + _letters(await connection.run_sync(SqlLetters().count, LetterFilter()))


def _samples(route: Backlog) -> list[Sample]:
    labels = (route.route,)
    return [
        Sample(telemetry.PENDING, labels, route.pending),
        Sample(telemetry.OLDEST, labels, route.oldest_pending_seconds),
        Sample(telemetry.FAILED, labels, route.failed),
        Sample(telemetry.LANES_UNOWNED, labels, route.unowned_lanes),
    ]


def _letters(open_letters: Mapping[tuple[str, LetterKind], int]) -> list[Sample]:
    held = [Sample(telemetry.HELD, (it[0],), count) for it, count in open_letters.items() if it[1] is LetterKind.HELD]
    return held + [
        Sample(telemetry.LETTERS_OPEN, (consumer, kind.value), count)
        for (consumer, kind), count in open_letters.items()
        if kind is not LetterKind.HELD
    ]


def _slots(slots: list[SlotState]) -> list[Sample]:
    shown: dict[str, SlotState] = {}
    for slot in slots:  # each relay that comes brings another name
        name = "temporary" if slot.temporary else slot.name
        shown[name] = max(shown.get(name, slot), slot, key=lambda it: it.lag)
    samples = [Sample(telemetry.SLOT_LAG, (name,), slot.lag) for name, slot in shown.items()]
    return samples + [Sample(telemetry.SLOT_BUDGET, (name,), it.budget) for name, it in shown.items() if it.budget]
