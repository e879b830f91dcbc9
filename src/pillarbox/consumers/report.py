"""What a consumer tells about its work: counts, log lines, metrics and spans, and how far it has come."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from .. import clock, telemetry
from ..telemetry import Activity, LogEvent, Signals, trace_id
from ..transport import Message
from .failure import Failure
from .handling import Incoming, LeftOut

logger = logging.getLogger("pillarbox")

_NOTHING = LeftOut()
A_LINE_EVERY = 60.0
"""Seconds between two lines about the same kind of failure of the same tenant."""
_KINDS_KEPT = 1_000


@dataclass(slots=True)
class Tally:
    """What a consumer has done since it was made."""

    handled: int = 0
    """Messages that took effect."""
    duplicates: int = 0
    """Messages that had taken effect before."""
    spilled: int = 0
    """Messages that went on by an inbound lane: they failed, or waited behind others."""
    failures: int = 0
    """Attempts that failed, whatever came of it."""

    def __sub__(self, before: Tally) -> Tally:
        return Tally(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(slots=True)
class Position:
    """How far it has come."""

    event_id: UUID | None = None
    occurred_at: datetime | None = None


class Outage(NamedTuple):
    """What lasts for a while: it has a line when it begins, and one when it ends."""

    begins: str
    """With the name of the consumer, and the reason."""
    ends: str
    events: tuple[LogEvent, LogEvent] | None = None


NO_SOURCE = Outage(
    "consumer %s: its source is unavailable: %s",
    "consumer %s: its source is there again",
    (telemetry.LOG_SOURCE_AWAY, telemetry.LOG_SOURCE_BACK),
)
NO_DATABASE = Outage(
    "consumer %s cannot start, as its database is unavailable, and tries again: %s", "consumer %s starts now"
)
NO_HOUSEKEEPING = Outage(
    "consumer %s cannot store its position or prune its inbox, and tries again every few seconds: %s",
    "consumer %s stores its position and prunes its inbox again",
)
FULL_LANES = Outage(
    "consumer %s: %s messages wait in its lanes: none is received", "consumer %s: there is room in its lanes again"
)


class _Lines:
    """One line a minute for each kind of thing that happens: a tenant with a million bad messages must not fill a disk,
    nor hide what else is said.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, tuple[float, int]] = {}
        """When each was told last, and how often it has happened since."""

    def due(self, kind: Hashable) -> int:
        """How often it has happened since the last line, now included; 0 if it is not to be told again yet."""
        now = clock.current().monotonic()
        told, since = self._kinds.pop(kind, (-math.inf, 0))
        is_due = now - told >= A_LINE_EVERY
        self._kinds[kind] = (now, 0) if is_due else (told, since + 1)
        if len(self._kinds) > _KINDS_KEPT:
            del self._kinds[next(iter(self._kinds))]
        return since + 1 if is_due else 0


class ConsumerReport:
    """The voice of one consumer."""

    def __init__(self, consumer: str, signals: Signals) -> None:
        self.tally = Tally()
        self.position = Position()
        self.version_lag = 0
        """Of the events that came last: how far they were ahead of their rows."""
        self._consumer = consumer
        self._labels = (consumer,)
        self._lines = _Lines()
        self._outages: set[Outage] = set()
        self._signals = signals

    def begins(self) -> None:
        """A counter that is not there before it first rises is seen to rise by nobody."""
        if self._signals.observers:
            for metric in (telemetry.HANDLED, telemetry.DUPLICATES, telemetry.STALE, telemetry.GAPS):
                self._signals.count(metric, self._labels, 0)
            for failure in Failure:
                self._signals.count(telemetry.HANDLING_FAILED, (*self._labels, failure.value), 0)

    def processing(self, incoming: Sequence[Incoming]) -> AbstractContextManager[None]:
        """Surrounds what handlers do."""
        return self._traced(incoming) if self._signals.traces and incoming else nullcontext()

    @contextmanager
    def _traced(self, incoming: Sequence[Incoming]) -> Iterator[None]:
        first = incoming[0].context
        attributes: dict[str, str | int] = {
            "messaging.system": "pillarbox",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": first.topic,
            "messaging.consumer.group.name": self._consumer,
        }
        if len(incoming) == 1:
            attributes |= {"messaging.message.id": str(first.event_id), "pillarbox.event_type": first.event_type}
        else:
            attributes["messaging.batch.message_count"] = len(incoming)
        headers = [one.context.headers for one in incoming]
        with self._signals.during(Activity(telemetry.PROCESS, first.topic, attributes, headers)):
            yield

    def handled(self, new: Sequence[Incoming], duplicates: int, seconds: float) -> None:
        """These have taken effect; so many others had before."""
        self.tally.handled += len(new)
        self.tally.duplicates += duplicates
        if new:
            last = new[-1].context
            self.position = Position(last.event_id, last.occurred_at)
        if not self._signals.observers:
            return
        if duplicates:
            self._signals.count(telemetry.DUPLICATES, self._labels, duplicates)
        if new:
            tenant = new[0].context.tenant if self._signals.by_tenant else None
            self._signals.count(telemetry.HANDLED, self._labels, len(new), tenant)
            self._signals.observe(telemetry.HANDLING, {seconds: 1}, self._labels)
            self._signals.observe(telemetry.HANDLING_LATENCY, self._ages(new), self._labels, tenant)

    def left_out(self, amounts: LeftOut) -> None:
        """A projection had seen later events than these, or not their predecessors."""
        self.version_lag = amounts.version_lag  # back to 0 when no gap was found
        if self._signals.observers and amounts != _NOTHING:
            self._signals.count(telemetry.STALE, self._labels, amounts.stale)
            self._signals.count(telemetry.GAPS, self._labels, amounts.gaps)

    def _ages(self, new: Sequence[Incoming]) -> dict[float, int]:
        """How long ago the events occurred: a mean of some is enough."""
        now = clock.now()
        some = new[:: len(new) // 16 + 1]
        mean = sum((now - one.context.occurred_at).total_seconds() for one in some) / len(some)
        return {max(0.0, mean): len(new)}

    def failed(self, message: Message, failure: Failure, reason: str, error: BaseException) -> None:
        """An attempt has failed."""
        self.tally.failures += 1
        if self._signals.observers:
            self._signals.count(telemetry.HANDLING_FAILED, (*self._labels, failure.value))
        logger.debug("consumer %s failed", self._consumer, exc_info=error)
        if times := self._lines.due((failure, type(error), message.headers.get("tenant_id"))):
            logger.log(
                logging.INFO if failure is Failure.BUSINESS else logging.WARNING,
                "consumer %s: event %s failed (%s): %s%s",
                *(self._consumer, message.headers.get("event_id"), failure.value, reason, _and_others(times)),
                extra=self._about(
                    telemetry.LOG_HANDLING_FAILED, message, failure=failure.value, reason=reason, times=times
                ),
            )

    def spilled(self, number: int) -> None:
        """So many messages wait in an inbound lane now."""
        self.tally.spilled += number
        if self._signals.observers:
            self._signals.count(telemetry.SPILLED, self._labels, number)

    def not_spilled(self, number: int, reason: str) -> None:
        """So many messages could not be stored in an inbound lane: they stay unacknowledged."""
        if times := self._lines.due("not spilled"):
            logger.warning(
                "consumer %s: %d messages cannot be spilled now, and wait: %s%s",
                *(self._consumer, number, reason, _and_others(times)),
            )

    def outage(self, what: Outage, reason: str | None) -> None:
        """It lasts, for this reason; or there is none (any more)."""
        if (reason is None) != (what in self._outages):
            return
        self._outages ^= {what}
        began = reason is not None
        given = {"consumer": self._consumer, **({"reason": reason} if began else {})}
        extra = None if what.events is None else telemetry.fields(what.events[not began], **given)
        logger.warning(what.begins if began else what.ends, *given.values(), extra=extra)

    def _about(self, event: LogEvent, message: Message, **given: object) -> dict[str, object]:
        headers = message.headers
        return telemetry.fields(
            event,
            consumer=self._consumer,
            topic=message.topic,
            event_id=headers.get("event_id"),
            message_id=headers.get("event_id"),
            event_type=headers.get("event_type"),
            aggregate_type=headers.get("aggregate_type"),
            aggregate_id=headers.get("aggregate_id"),
            tenant=headers.get("tenant_id"),
            trace_id=trace_id(headers.get("traceparent")),
            **given,
        )


def _and_others(times: int) -> str:
    return f" (and {times - 1:,} more of the kind since the last line)" if times > 1 else ""
