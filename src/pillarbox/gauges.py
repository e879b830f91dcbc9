"""Gauges of a box: its relays, from memory, and its backlog, from the database.

The database is queried when metrics are scraped, and then not again for some seconds. A slower query runs less often,
so that it takes at most a twentieth of the time. A failed query is repeated sooner, because its gauges are
missing meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from sqlalchemy import Connection, StaticPool
from sqlalchemy.ext.asyncio import AsyncEngine

from . import clock, telemetry
from .redaction import redacted
from .telemetry import Sample

if TYPE_CHECKING:
    from .stores.slots import SlotState

logger = logging.getLogger("pillarbox")

KEPT_SECONDS = 3.0
SHARE = 20
ANSWER_SECONDS = 5.0
FAILURE_SECONDS = 10.0
"""Longest pause after a query that failed."""


class Shown(Protocol):
    """A relay."""

    def samples(self) -> Iterable[Sample]:
        """Its gauges."""
        ...


class Gauges:
    """The `Source` of one box."""

    def __init__(self, engine: Callable[[], AsyncEngine | None], relays: Callable[[], Iterable[Shown]]) -> None:
        self._engine = engine
        self._relays = relays
        self._questions = [
            Question("which lanes nobody holds", _unowned),
            Question("what is kept for replication slots", _slots),
            Question("how many dead letters there are", _dead_letters),
            Question("how much is pending", _backlog),
        ]

    def samples(self) -> Iterable[Sample]:
        """See `Source.samples`."""
        return [sample for relay in [*self._relays()] for sample in relay.samples()]

    async def asked(self) -> Iterable[Sample]:
        """See `Source.asked`."""
        engine = self._engine()
        # An in-memory SQLite has one connection: returning it to the pool would roll back a transaction of other code.
        if engine is None or isinstance(engine.pool, StaticPool):
            return []
        # One after the other: scraping takes at most one connection from the pool.
        return [sample for question in self._questions for sample in await question.asked(engine)]


class Question:
    """A query of gauges. Each is independent: a slow or failing one hides no other."""

    def __init__(self, what: str, answer: Callable[[Connection], list[Sample]]) -> None:
        self._what = what
        self._answer = answer
        self._known: list[Sample] = []
        self._until = float("-inf")
        self._is_answered = True

    async def asked(self, engine: AsyncEngine) -> list[Sample]:
        """The samples, or those of a moment ago; none after a failure."""
        began = clock.current().monotonic()
        if began < self._until:
            return self._known
        longest = float("inf")
        self._until = began + KEPT_SECONDS  # concurrent calls get the previous samples
        try:
            async with asyncio.timeout(ANSWER_SECONDS), engine.connect() as connection:
                self._known = await connection.run_sync(self._answer)
        except Exception as error:
            self._known = []  # no samples rather than wrong ones
            longest = FAILURE_SECONDS
            reason = redacted(str(error)) or f"no answer within {ANSWER_SECONDS:g} s"
            level = logging.WARNING if self._is_answered else logging.DEBUG
            logger.log(level, "the database does not say %s, and these gauges are missing: %s", self._what, reason)
            self._is_answered = False
        else:
            self._is_answered = True
        ended = clock.current().monotonic()
        self._until = ended + min(longest, max(KEPT_SECONDS, SHARE * (ended - began)))
        return self._known


def _backlog(connection: Connection) -> list[Sample]:
    from .stores.overview import backlog  # noqa: PLC0415  only where gauges are read

    return [
        sample
        for route in backlog(connection)
        for sample in (
            Sample(telemetry.PENDING, (route.route,), route.pending),
            Sample(telemetry.OLDEST, (route.route,), route.oldest_pending_seconds),
            Sample(telemetry.FAILED, (route.route,), route.failed),
        )
    ]


def _unowned(connection: Connection) -> list[Sample]:
    from .stores.overview import unowned_lanes  # noqa: PLC0415  as above

    return [Sample(telemetry.LANES_UNOWNED, (route,), lanes) for route, lanes in unowned_lanes(connection).items()]


def _dead_letters(connection: Connection) -> list[Sample]:
    from .stores.dead_letters import count_dead_letters  # noqa: PLC0415  as above

    counts = count_dead_letters(connection)
    return [Sample(telemetry.DEAD_LETTERS, (consumer,), count) for consumer, count in counts.items()]


def _slots(connection: Connection) -> list[Sample]:
    from .stores.slots import slot_states  # noqa: PLC0415  as above

    shown: dict[str, SlotState] = {}
    for slot in slot_states(connection):  # each relay adds another name
        name = "temporary" if slot.temporary else slot.name
        shown[name] = max(shown.get(name, slot), slot, key=lambda it: it.lag)
    samples = [Sample(telemetry.SLOT_LAG, (name,), slot.lag) for name, slot in shown.items()]
    return samples + [Sample(telemetry.SLOT_BUDGET, (name,), it.budget) for name, it in shown.items() if it.budget]
