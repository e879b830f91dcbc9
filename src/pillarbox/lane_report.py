"""Reports of a lane about its work: counts, log lines, metrics and spans.

Before this: a lane has sent something, or was rejected. After it: operators and monitoring see it. Metrics and spans
cost nothing without a listener.
"""

from __future__ import annotations

import logging
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from . import clock, telemetry
from .outbox import Lane, NewRows, Row
from .redaction import described, redacted
from .telemetry import Activity, Signals, trace_id
from .transport import Message, Outcome, Verdict

logger = logging.getLogger("pillarbox")

BUG = "bug in transport"
STUMBLED = "the lane failed"
TIMES_IN_A_ROW = "times in a row"
Tell = Callable[[Outcome], None]


@dataclass(slots=True)
class Counts:
    """Numbers of deliveries by result."""

    sent: int = 0
    rejected: int = 0
    dead: int = 0

    @property
    def total(self) -> int:
        """A number that changes whenever anything was done."""
        return self.sent + self.rejected

    def since(self, before: Counts) -> Counts:
        """The difference to an earlier count."""
        return Counts(self.sent - before.sent, self.rejected - before.rejected, self.dead - before.dead)


class Report:
    """Reports for one lane."""

    def __init__(self, lane: Lane, counts: Counts, signals: Signals) -> None:
        self._counts = counts
        self._signals = signals
        self._lane = str(lane)
        self._topic = lane.route.topic
        self._route = (lane.route.name,)
        self._way = (lane.route.name, lane.route.destination)
        self._bug = f"{BUG} {lane.route.destination}"
        self._refused: dict[str, str] = {}
        if signals:  # start counters at zero: without that, monitoring misses their first increase
            for metric in (telemetry.SENT, telemetry.REJECTED, telemetry.RETRIED, telemetry.DEAD, telemetry.FORGOTTEN):
                signals.count(metric, self._way, 0)
            signals.count(telemetry.LEASE_LOST, self._route, 0)

    def sending(self, producer: str, messages: Sequence[Message]) -> AbstractContextManager[Tell]:
        """Surround a request. The returned function takes its outcome."""
        return self._traced(producer, messages) if self._signals.traces else _NOBODY_LISTENS

    @contextmanager
    def _traced(self, producer: str, messages: Sequence[Message]) -> Iterator[Tell]:
        attributes: dict[str, str | int] = {
            "messaging.system": "pillarbox",
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": self._topic,
            "messaging.batch.message_count": len(messages),
            "messaging.client.id": producer,
            "pillarbox.lane": self._lane,
        }
        activity = Activity(telemetry.SEND, self._topic, attributes, [message.headers for message in messages])

        def tell(outcome: Outcome) -> None:
            if outcome.unfinished is not None:
                activity.error = outcome.unfinished.value
            activity.failures.update((rejection.index, "rejected") for rejection in outcome.rejected)
            answered = {*outcome.accepted, *activity.failures}
            for index in range(len(messages)):
                if index not in answered:
                    activity.failures[index] = activity.error or "not_tried"

        with self._signals.during(activity):
            yield tell

    def sent(self, messages: Sequence[Message], accepted: Collection[int]) -> None:
        """Report messages that the destination has stored."""
        self._counts.sent += len(accepted)
        if not self._signals:
            return
        stored = messages if len(accepted) == len(messages) else [messages[index] for index in accepted]
        for tenant, group in self._by_tenant(stored).items():
            self._signals.count(telemetry.SENT, self._way, len(group), tenant)
            self._signals.observe(telemetry.LATENCY, _ages(group), self._way, tenant)

    def _by_tenant(self, messages: Sequence[Message]) -> Mapping[str | None, Sequence[Message]]:
        if not self._signals.by_tenant:
            return {None: messages}
        groups: dict[str | None, list[Message]] = {}
        for message in messages:
            groups.setdefault(message.headers.get("tenant_id"), []).append(message)
        return groups

    def found_stored(self, count: int) -> None:
        """Report messages that the destination already had."""
        self._counts.sent += count
        if self._signals:
            self._signals.count(telemetry.SENT, self._way, count)

    def delivered(self, seconds: float) -> None:
        """Report a batch that is stored completely."""
        if self._signals:
            self._signals.observe(telemetry.BATCH, {seconds: 1}, self._way)

    def rejected(self, row: Row, number: int, attempts: int, reason: str) -> None:
        """Report a rejected delivery that will be retried."""
        self._counts.rejected += 1
        self._rejection()
        logger.warning(
            "%s: event %s was rejected (%d): %s",
            *(self._lane, row.event_id, attempts, reason),
            extra=self._about(telemetry.LOG_REJECTED, row, number, attempts, reason),
        )

    def postponed(self) -> None:
        """Count a delivery that the destination wants later."""
        if self._signals:
            self._signals.count(telemetry.RETRIED, self._way)

    def refused_like_all(self) -> None:
        """Count a rejection by a destination that rejects everything. It costs no attempt."""
        self._rejection()

    def _rejection(self) -> None:
        if self._signals:
            self._signals.count(telemetry.REJECTED, self._way)
            self._signals.count(telemetry.RETRIED, self._way)

    def dead(self, row: Row, number: int, attempts: int, reason: str, *, rejected: bool) -> None:
        """Report a failed delivery: out of attempts."""
        self._counts.rejected += rejected
        self._counts.dead += 1
        if self._signals:
            self._signals.count(telemetry.REJECTED, self._way, int(rejected))
            self._signals.count(telemetry.DEAD, self._way)
        logger.error(
            "%s: event %s has failed after %d %s: %s",
            *(self._lane, row.event_id, attempts, "attempt" if attempts == 1 else "attempts", reason),
            extra=self._about(telemetry.LOG_DEAD, row, number, attempts, reason),
        )

    def away(self, verdict: Verdict, reason: str, *, first: bool) -> str:
        """Report a destination that is unavailable or does not answer. Returns the text for the lane's trouble."""
        said = f"{self._way[1]} {'is unavailable' if verdict is Verdict.UNAVAILABLE else 'does not answer'}: {reason}"
        if self._signals:
            self._signals.count(telemetry.UNFINISHED, (*self._way, verdict.value))
        if first:
            logger.warning(
                "%s: %s",
                self._lane,
                said,
                extra=self._of_lane(telemetry.LOG_AWAY, verdict=verdict.value, reason=reason),
            )
        return said

    def topic_refused(self, topic: str, reason: str) -> None:
        """Report a topic that cannot be opened. Its deliveries wait without attempts."""
        if self._refused.get(topic) != reason:
            self._refused[topic] = reason
            extra = self._of_lane(telemetry.LOG_TOPIC_REFUSED, topic=topic, reason=reason)
            logger.error(
                "%s: %s cannot be opened, and what goes there waits: %s", self._lane, topic, reason, extra=extra
            )

    def topic_opened(self, topics: Collection[str]) -> None:
        """Forget that these topics could not be opened, so that a next failure is logged again."""
        for topic in self._refused.keys() & topics:
            del self._refused[topic]

    def forgotten(self, place: str, last: int, reached: int) -> None:
        """Report that the destination has forgotten its last number: the announced messages may arrive twice."""
        if self._signals:
            self._signals.count(telemetry.FORGOTTEN, self._way)
        extra = self._of_lane(telemetry.LOG_FORGOTTEN, place=place, last=last, reached=reached)
        if reached < 0:
            why = "may have forgotten this producer: it knows of none of its messages, and some were announced long ago"
        else:
            why = f"has forgotten this producer: it had stored message {reached} and now knows of none above {last}"
        logger.error("%s: %s %s; what is announced is sent at least once", self._lane, place, why, extra=extra)

    def bug(self, found: BaseException | str, *, first: bool) -> str:
        """Report a bug of the transport, with a traceback the first time. Returns the text for the reason."""
        error = found if isinstance(found, BaseException) else None
        said = f"{self._bug}: {redacted(found) if isinstance(found, str) else described(found)}"
        if self._signals:
            self._signals.count(telemetry.UNFINISHED, (*self._way, "bug"))
        extra = self._of_lane(telemetry.LOG_TRANSPORT_BUG, reason=said)
        where = traceback_of(error) if first and error is not None else ""
        logger.log(logging.ERROR if first else logging.DEBUG, "%s: %s%s", self._lane, said, where, extra=extra)
        return said

    def parted(self, tenants: Collection[str]) -> None:
        """Report that these tenants have a detour now."""
        for tenant in sorted(tenants):
            extra = self._of_lane(telemetry.LOG_DETOUR, tenant=tenant)
            logger.info("%s: tenant %s takes a detour", self._lane, tenant, extra=extra)

    def lease_lost(self) -> None:
        """Count a lost lease."""
        if self._signals:
            self._signals.count(telemetry.LEASE_LOST, self._route)

    def _of_lane(self, event: telemetry.LogEvent, **given: object) -> dict[str, object]:
        return telemetry.fields(event, lane=self._lane, destination=self._way[1], **given)

    def _about(self, event: telemetry.LogEvent, row: Row, number: int, attempts: int, reason: str) -> dict[str, object]:
        headers = row.headers
        return self._of_lane(
            event,
            event_id=str(row.event_id),
            event_type=headers.get("event_type"),
            aggregate_type=headers.get("aggregate_type"),
            aggregate_id=headers.get("aggregate_id"),
            tenant=row.tenant,
            message_id=f"{self._lane}#{number}" if number else None,
            trace_id=trace_id(headers.get("traceparent")),
            attempts=attempts,
            reason=reason,
        )


def traceback_of(error: BaseException) -> str:
    """The traceback without the error's text: a formatter would print the text, which may contain secrets."""
    return "".join(
        f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {redacted(frame.line or '')}"
        for frame in traceback.extract_tb(error.__traceback__)
    )


def count_new(signals: Signals, rows: NewRows, routes: Mapping[int, str]) -> None:
    """Count the rows of a committed transaction."""
    new: Counter[tuple[int, str | None]] = Counter()
    for (lane, tenant), amount in rows.items():
        new[lane.route, tenant if signals.by_tenant else None] += amount
    for (route, tenant), amount in new.items():
        signals.count(telemetry.NEW, (routes.get(route, ""),), amount, tenant)


def _ages(messages: Sequence[Message]) -> dict[float, int]:
    """The ages of events in seconds: for each bucket the mean age and the number of events.

    A UUIDv7 begins with its milliseconds, so sorted ids are sorted by time. Ids chosen by the application may be
    anything and are left out; after sorting they are the first or the last ones.
    """
    ids = sorted([message.headers["event_id"] for message in messages])
    if not _is_v7(ids[0]) or not _is_v7(ids[-1]):
        ids = list(filter(_is_v7, ids))
    now = int(clock.now().timestamp() * 1000)
    ages: dict[float, int] = {}
    start = 0
    while start < len(ids):
        bucket = bisect_left(_BOUNDS, now - _made(ids[start]))
        end = len(ids)
        if bucket > 0:  # rows younger than the lower bound belong to other buckets
            edge = f"{now - _BOUNDS[bucket - 1]:012x}"
            end = bisect_left(ids, f"{edge[:8]}-{edge[8:]}", start)
        some = ids[start : end : (end - start) // 16 + 1]
        mean = now - sum(map(_made, some)) / len(some)
        ages[max(0.0, mean / 1000)] = end - start
        start = end
    return ages


def _is_v7(event_id: str) -> bool:
    return event_id[14:15] == "7"


def _made(event_id: str) -> int:
    """The milliseconds of a UUIDv7."""
    return int(event_id[:8] + event_id[9:13], 16)


_BOUNDS = tuple(round(bound * 1000) for bound in telemetry.LATENCY.buckets)
_NOBODY_LISTENS: AbstractContextManager[Tell] = nullcontext(lambda _outcome: None)
