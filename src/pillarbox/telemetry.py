"""Signals: every metric, span and log event of Pillarbox in one list, and the port for observers.

Before this: sessions, lanes, relays and handlers do something. After it: observers make metrics and traces of it. Code
reports to `Signals`, which is false without observers, so that nothing is reported. Metrics and spans have names of
routes, destinations and topics, ids and numbers: no payload, no key, no address and no secret. Log lines about single
deliveries also name the event, its aggregate and its tenant.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, Protocol

from .context import TRACEPARENT, EventContext
from .redaction import described

logger = logging.getLogger("pillarbox")


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A metric. Counters end in ``_total``; a histogram has upper bounds."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    by_tenant: bool = False
    """Whether observers may add a label ``tenant``."""
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A span of a trace. Its name is followed by its subject: a topic, or a handler."""

    name: str
    kind: Literal["producer", "client", "consumer"]
    help: str
    attributes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LogEvent:
    """A log line, with its fields beside the text."""

    name: str
    level: Literal["info", "warning", "error"]
    help: str
    fields: tuple[str, ...]


# -- metrics -----------------------------------------------------------------------------------------------------------

_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_WAY = ("route", "destination")

NEW = Metric(
    "outbox_new_total",
    "counter",
    "deliveries",
    "Deliveries that transactions of this process have committed.",
    ("route",),
    by_tenant=True,
)
COMMIT = Metric(
    "outbox_commit_duration_seconds",
    "histogram",
    "seconds",
    "From the beginning of the commit of a transaction with events, its last flush included, to the database's answer.",
    buckets=_QUICK,
)
COMMIT_UNKNOWN = Metric(
    "outbox_commit_unknown_total",
    "counter",
    "transactions",
    "Transactions with events whose COMMIT was not answered (CommitOutcomeUnknown).",
)
SENT = Metric(
    "outbox_publish_success_total",
    "counter",
    "deliveries",
    "Deliveries that the destination has stored, by its own word.",
    _WAY,
    by_tenant=True,
)
REJECTED = Metric(
    "outbox_publish_error_total",
    "counter",
    "deliveries",
    "Rejections of deliveries, by the destination or before they left.",
    _WAY,
)
RETRIED = Metric(
    "event_publish_retry_total", "counter", "deliveries", "Of these rejections, those that are tried again.", _WAY
)
DEAD = Metric(
    "outbox_err_total",
    "counter",
    "deliveries",
    "Deliveries that have died: nothing is tried any more, until a person asks for it.",
    _WAY,
)
UNFINISHED = Metric(
    "outbox_publish_unfinished_total",
    "counter",
    "requests",
    "Requests that the destination could not take (unavailable) or did not answer (unknown), or in which the transport "
    "had a bug.",
    (*_WAY, "verdict"),
)
LATENCY = Metric(
    "outbox_publish_latency_seconds",
    "histogram",
    "seconds",
    "From the making of an event, by its id, to the moment when the destination had stored it.",
    _WAY,
    by_tenant=True,
    buckets=_SLOW,
)
BATCH = Metric(
    "projector_batch_duration_seconds",
    "histogram",
    "seconds",
    "From the announcement of a batch to the moment when all that is left of it was stored.",
    _WAY,
    buckets=_SLOW,
)
FORGOTTEN = Metric(
    "outbox_forgotten_total",
    "counter",
    "places",
    "A destination that deduplicates had forgotten what a lane has sent: a batch may have arrived twice.",
    ("route", "destination"),
)
LEASE_LOST = Metric(
    "outbox_lease_lost_total", "counter", "leases", "Lanes that were lost to another relay or not renewed.", ("route",)
)
LANES_HELD = Metric("outbox_lanes_held", "gauge", "lanes", "Lanes that the relays of this process hold.", ("route",))
LANES_STOPPED = Metric(
    "outbox_lanes_stopped",
    "gauge",
    "lanes",
    "Of these, the ones that cannot send now: the destination is away or rejects everything, or the lane has halted.",
    _WAY,
)
CYCLE_AGE = Metric(
    "relay_last_cycle_age_seconds",
    "gauge",
    "seconds",
    "Since a relay of this process has last seen to its leases with success.",
)
PENDING = Metric(
    "outbox_pending_count",
    "gauge",
    "deliveries",
    "Deliveries in the database that are to be sent: PENDING, SENDING, RETRYING and PARKED.",
    ("route",),
)
OLDEST = Metric(
    "outbox_oldest_pending_age_seconds",
    "gauge",
    "seconds",
    "Age of the first of them, by the database's clock; 0 if there are none.",
    ("route",),
)
FAILED = Metric(
    "outbox_max_delivery_attempts",
    "gauge",
    "deliveries",
    "Deliveries in the database that have had all their attempts: FAILED.",
    ("route",),
)
LANES_UNOWNED = Metric(
    "outbox_lanes_unowned", "gauge", "lanes", "Lanes that no relay anywhere holds, paused ones not counted.", ("route",)
)

STREAM_ROWS = Metric(
    "outbox_stream_rows_total",
    "counter",
    "deliveries",
    "Deliveries that relays with a stream have read, by where their bodies came from: `stream`, or else `table`.",
    ("source",),
)
STREAM_LOST = Metric(
    "outbox_stream_lost_total",
    "counter",
    "streams",
    "How often a stream was lost or unavailable: `connection`, `slot`, `publication`, or `refused` by the server.",
    ("reason",),
)
STREAMS_DOWN = Metric(
    "outbox_streams_down",
    "gauge",
    "relays",
    "Relays of this process that should have a stream and have none now: they read bodies from the table.",
)
STREAM_BUFFER = Metric(
    "outbox_stream_buffer_bytes",
    "gauge",
    "bytes",
    "What came by streams, and waits to be sent by relays of this process.",
)
SLOT_LAG = Metric(
    "outbox_slot_lag_bytes",
    "gauge",
    "bytes",
    "WAL that the server keeps for a replication slot of ours; the temporary ones are shown together, as `temporary`.",
    ("slot",),
)
SLOT_BUDGET = Metric(
    "outbox_slot_budget_bytes",
    "gauge",
    "bytes",
    "What it may keep for it, if `max_slot_wal_keep_size` is set: a slot that lags by more is lost.",
    ("slot",),
)

_CONSUMER = ("consumer",)
HANDLED = Metric(
    "projection_process_success_total",
    "counter",
    "events",
    "Events whose effect a consumer or projection has committed.",
    _CONSUMER,
    by_tenant=True,
)
HANDLING_FAILED = Metric(
    "projection_process_error_total",
    "counter",
    "attempts",
    "Attempts that have failed, by the class of the error: `transient`, `business`, `poison` or `unknown`.",
    (*_CONSUMER, "class"),
)
HANDLING_LATENCY = Metric(
    "projection_process_latency_seconds",
    "histogram",
    "seconds",
    "From the moment when an event occurred to the commit of its effect.",
    _CONSUMER,
    by_tenant=True,
    buckets=_SLOW,
)
HANDLING = Metric(
    "projection_process_duration_seconds",
    "histogram",
    "seconds",
    "How long the transactions of a consumer take, from the row of the inbox to the answer of COMMIT.",
    _CONSUMER,
    buckets=_QUICK,
)
DUPLICATES = Metric(
    "inbox_duplicate_total", "counter", "messages", "Messages that came again after their effect.", _CONSUMER
)
SPILLED = Metric(
    "consumer_spilled_total",
    "counter",
    "messages",
    "Messages that went on by an inbound lane, because they failed or waited behind others.",
    _CONSUMER,
)
STALE = Metric(
    "projection_stale_total",
    "counter",
    "events",
    "Events that a projection has left out because the row was further already.",
    _CONSUMER,
)
GAPS = Metric(
    "projection_gap_total", "counter", "events", "Events that came to a row without their predecessor.", _CONSUMER
)
VERSION_LAG = Metric(
    "projection_version_lag",
    "gauge",
    "versions",
    "How far the events that came last were ahead of their rows, at most: above 1, some are missing.",
    _CONSUMER,
)
DEAD_LETTERS = Metric(
    "dlq_message_count", "gauge", "messages", "Failed deliveries of consumers, which wait for a person.", _CONSUMER
)
UNDELIVERED = Metric(
    "subscription_num_undelivered_messages",
    "gauge",
    "messages",
    "Messages that wait for a consumer of this process: all, where the source can tell, else those at hand.",
    _CONSUMER,
)
OLDEST_UNACKED = Metric(
    "subscription_oldest_unacked_message_age_seconds",
    "gauge",
    "seconds",
    "Age of the oldest event at hand; 0 if there is none.",
    _CONSUMER,
)

STANDSTILL = Metric(
    "consumer_standstill_tenants",
    "gauge",
    "tenants",
    "Tenants of which something waits, and nothing was dealt with for longer than the consumer's patience.",
    _CONSUMER,
)

METRICS = (
    *(NEW, COMMIT, COMMIT_UNKNOWN),
    *(SENT, REJECTED, RETRIED, DEAD, UNFINISHED, LATENCY, BATCH, FORGOTTEN),
    *(LEASE_LOST, LANES_HELD, LANES_STOPPED, CYCLE_AGE),
    *(PENDING, OLDEST, FAILED, LANES_UNOWNED),
    *(STREAM_ROWS, STREAM_LOST, STREAMS_DOWN, STREAM_BUFFER, SLOT_LAG, SLOT_BUDGET),
    *(HANDLED, HANDLING_FAILED, HANDLING_LATENCY, HANDLING, DUPLICATES, SPILLED),
    *(STALE, GAPS, VERSION_LAG, DEAD_LETTERS, UNDELIVERED, OLDEST_UNACKED, STANDSTILL),
)

# -- spans -------------------------------------------------------------------------------------------------------------

_MESSAGING = ("messaging.system", "messaging.operation.name", "messaging.operation.type")

APPEND = Span(
    "append",
    "producer",
    "A flush writes events to the outbox. A child of the running span, or of the trace that the first event was raised "
    "in; what is stored with the events, and what consumers see, is this span. Each event is a span event `raise`.",
    (
        *_MESSAGING,
        *("messaging.batch.message_count", "db.system.name", "db.operation.name", "db.collection.name", "error.type"),
    ),
)
SEND = Span(
    "send",
    "client",
    "One request to the destination, with a link to the `append` of each message. It begins a trace of its own.",
    (
        *_MESSAGING,
        "messaging.destination.name",
        *("messaging.batch.message_count", "messaging.client.id", "pillarbox.lane", "error.type"),
    ),
)
SEND_ONE = Span(
    "send",
    "producer",
    "One message of a request: a child of its `append`, linked to the request.",
    (*_MESSAGING, "messaging.destination.name", "messaging.message.id", "pillarbox.event_type", "error.type"),
)
PROCESS = Span(
    "process",
    "consumer",
    "A handler, consumer or projection deals with one message, as a child of the event's `append`, or with a batch; "
    "linked to the `append` of each. What handlers do belongs to it.",
    (
        *_MESSAGING,
        *("messaging.destination.name", "messaging.consumer.group.name", "messaging.message.id"),
        *("messaging.batch.message_count", "pillarbox.event_type", "error.type"),
    ),
)

SPANS = (APPEND, SEND, SEND_ONE, PROCESS)

# -- log events --------------------------------------------------------------------------------------------------------

_LANE = ("lane", "destination")
_ONE = ("event_id", "event_type", "aggregate_type", "aggregate_id", "tenant", *_LANE, "message_id", "trace_id")

LOG_REJECTED = LogEvent(
    "delivery.rejected", "warning", "A delivery was rejected, and is tried again.", (*_ONE, "attempts", "reason")
)
LOG_DEAD = LogEvent("delivery.dead", "error", "A delivery has died.", (*_ONE, "attempts", "reason"))
LOG_AWAY = LogEvent(
    "destination.away",
    "warning",
    "A destination is unavailable or does not answer. Once per outage and lane.",
    (*_LANE, "verdict", "reason"),
)
LOG_TRANSPORT_BUG = LogEvent(
    "transport.bug",
    "error",
    "A transport raised an error that is neither an `OSError` nor a `TimeoutError`, or contradicted itself. Once per "
    "kind, with its traceback; at DEBUG after that.",
    (*_LANE, "reason"),
)
LOG_TOPIC_REFUSED = LogEvent(
    "destination.topic_refused",
    "error",
    "A topic cannot be opened while others can: what goes there waits.",
    (*_LANE, "topic", "reason"),
)
LOG_FORGOTTEN = LogEvent(
    "destination.forgotten",
    "error",
    "The destination does not know any more what a lane has sent: its batch may arrive twice.",
    (*_LANE, "place", "last", "reached"),
)
LOG_REFUSES = LogEvent(
    "destination.refuses",
    "error",
    "A topic rejects everything, or everything of a tenant: deliveries wait, and no attempt is counted.",
    ("destination", "topic", "tenant", "reason"),
)
LOG_TAKES = LogEvent(
    "destination.takes", "warning", "Such a topic accepts messages again.", ("destination", "topic", "tenant")
)
LOG_TAKEN_OVER = LogEvent("lane.taken_over", "warning", "Another relay owns the lane.", (*_LANE, "relay"))
LOG_LEASE_LOST = LogEvent(
    "lane.lease_lost", "warning", "A lane has noticed that it is not ours any more.", (*_LANE, "relay", "reason")
)
LOG_HALTED = LogEvent("lane.halted", "error", "A lane stands still until a person helps.", (*_LANE, "relay", "reason"))
LOG_STUMBLED = LogEvent(
    "lane.stumbled",
    "warning",
    "A turn of a lane failed; it is tried again. With its traceback once per kind.",
    (*_LANE, "relay", "reason"),
)
LOG_UNREACHABLE = LogEvent(
    "outbox.unreachable", "warning", "The relay cannot see to its leases. Once per outage.", ("relay", "reason")
)
LOG_REACHABLE = LogEvent("outbox.reachable", "warning", "It can again.", ("relay",))
LOG_DETOUR = LogEvent(
    "tenant.detour", "info", "A tenant floods a lane, or is held back: the others pass it.", (*_LANE, "tenant")
)
LOG_SLOW = LogEvent("unit_of_work.slow", "warning", "A unit of work stays open for long.", ("tenant",))
LOG_STREAM_DOWN = LogEvent(
    "stream.down",
    "error",
    "A relay has lost its stream, or gets none: it reads bodies from the table. Once per outage and reason.",
    ("relay", "slot", "reason"),
)
LOG_STREAM_UP = LogEvent("stream.up", "warning", "It has one again.", ("relay", "slot"))
LOG_SLOT_MADE = LogEvent(
    "stream.slot_made",
    "warning",
    "The named slot was not there and is made: the first time, or after somebody dropped it or a failover lost it.",
    ("relay", "slot"),
)
LOG_SLOT_LOST = LogEvent(
    "stream.slot_lost",
    "error",
    "The named slot was invalidated, or dropped while it was read. It is made anew; nothing is lost.",
    ("relay", "slot", "reason"),
)
LOG_SLOT_LAGS = LogEvent(
    "stream.slot_lags",
    "error",
    "The server keeps half of what it may keep for the slot, or more, or 1 GiB where nothing bounds it. Once, until it "
    "has caught up.",
    ("relay", "slot", "reason"),
)
LOG_SLOT_LEFT_BEHIND = LogEvent(
    "stream.slot_left_behind",
    "warning",
    "The named slot is no failover slot, on a server that has them: no standby takes it along. Once, at the start.",
    ("relay", "slot"),
)

_INCOMING = (
    *("consumer", "topic", "event_id", "message_id", "event_type", "aggregate_type", "aggregate_id", "tenant"),
    "trace_id",
)
LOG_HANDLING_FAILED = LogEvent(
    "consumer.failed",
    "warning",
    "A handler has failed; the class says what follows. Of the class `business`, the level is info. One line a minute "
    "for each class, type of error and tenant; `times` counts since the last one.",
    (*_INCOMING, "failure", "reason", "times"),
)
LOG_SOURCE_AWAY = LogEvent(
    "consumer.source_away", "warning", "The source cannot be subscribed to. Once per outage.", ("consumer", "reason")
)
LOG_SOURCE_BACK = LogEvent("consumer.source_back", "warning", "It can again.", ("consumer",))

LOG_EVENTS = (
    *(LOG_REJECTED, LOG_DEAD, LOG_AWAY, LOG_TRANSPORT_BUG, LOG_REFUSES, LOG_TAKES),
    *(LOG_TOPIC_REFUSED, LOG_FORGOTTEN),
    *(LOG_TAKEN_OVER, LOG_LEASE_LOST, LOG_HALTED, LOG_STUMBLED, LOG_UNREACHABLE, LOG_REACHABLE),
    *(LOG_DETOUR, LOG_SLOW),
    *(LOG_STREAM_DOWN, LOG_STREAM_UP, LOG_SLOT_MADE, LOG_SLOT_LOST, LOG_SLOT_LAGS, LOG_SLOT_LEFT_BEHIND),
    *(LOG_HANDLING_FAILED, LOG_SOURCE_AWAY, LOG_SOURCE_BACK),
)
_FIELDS = tuple(dict.fromkeys(name for event in LOG_EVENTS for name in event.fields))


def fields(event: LogEvent, **given: object) -> dict[str, object]:
    """The ``extra=`` of a log call: the event's name and its known fields."""
    return {"event": event.name} | {name: given[name] for name in event.fields if given.get(name) is not None}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the fields of the event. Control characters are
    escaped, and fields that are not in the list are left out.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in ("event", *_FIELDS) if hasattr(record, name)}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = described(error)
            line["traceback"] = "".join(traceback.format_tb(error.__traceback__))
        return json.dumps(line, default=str)


# -- the port ----------------------------------------------------------------------------------------------------------

Labels = tuple[str, ...]
"""Label values, in the order of the metric's labels."""


class Sample(NamedTuple):
    """A value of a gauge."""

    metric: Metric
    labels: Labels
    value: float


@dataclass(slots=True)
class Activity:
    """An operation with a beginning and an end. Observers read it at both."""

    span: Span
    about: str
    attributes: dict[str, str | int]
    messages: Sequence[Mapping[str, str]]
    """The headers of its events, which have their identities and traces."""
    failures: dict[int, str] = field(default_factory=dict)
    """Reasons of failed messages in one word, by index."""
    error: str | None = None
    """Reason of a failed activity in one word."""
    traceparent: str | None = None
    """The trace context to store with the events, set by an observer that traces."""
    tracestate: str | None = None


class Source(Protocol):
    """A source of gauges, read on demand."""

    def samples(self) -> Iterable[Sample]:
        """Gauges from memory."""
        ...

    def asked(self) -> Awaitable[Iterable[Sample]]:
        """Gauges from the database, at most some seconds old. Empty without an answer."""
        ...


class Observer:
    """The port for observers. Overrides the methods that it needs. Its methods may be called from any thread, and
    return at once.
    """

    by_tenant = False
    """Whether it wants amounts per tenant."""

    def count(self, metric: Metric, labels: Labels, amount: int, tenant: str | None = None) -> None:
        """Called when a counter has risen. An amount of 0 announces the counter."""

    def observe(self, metric: Metric, labels: Labels, values: Mapping[float, int], tenant: str | None = None) -> None:
        """Called with new values of a histogram, each with its number of occurrences."""

    def during(self, activity: Activity) -> AbstractContextManager[object]:  # noqa: ARG002  for overriding methods
        """A context manager that is entered when the activity begins, and left when it ends."""
        return nullcontext()

    def watch(self, source: Source) -> None:
        """Called with a source of gauges. The caller keeps the source alive."""


class Signals:
    """Passes reports to the observers. False without any, and then free of cost. A failing observer is logged once and
    does no harm.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self.observers = tuple(observers)
        """The observers."""
        self._sources: list[Source] = []
        self._failed: set[int] = set()
        self.by_tenant = any(observer.by_tenant for observer in self.observers)
        self.traces = any(map(_traces, self.observers))
        """Whether an observer wants activities."""

    def __bool__(self) -> bool:
        return bool(self.observers)

    def add(self, observer: Observer) -> None:
        """Add an observer."""
        self.observers += (observer,)
        self.by_tenant = self.by_tenant or observer.by_tenant
        self.traces = self.traces or _traces(observer)
        for source in self._sources:
            self._show(observer, source)

    def watch(self, source: Source) -> None:
        """Keep a source of gauges, and pass it to all observers."""
        self._sources.append(source)
        for observer in self.observers:
            self._show(observer, source)

    def _show(self, observer: Observer, source: Source) -> None:
        try:
            observer.watch(source)
        except Exception as error:
            self._report(observer, error)

    def count(self, metric: Metric, labels: Labels = (), amount: int = 1, tenant: str | None = None) -> None:
        """See `Observer.count`."""
        for observer in self.observers:
            try:
                observer.count(metric, labels, amount, tenant)
            except Exception as error:
                self._report(observer, error)

    def observe(
        self, metric: Metric, values: Mapping[float, int], labels: Labels = (), tenant: str | None = None
    ) -> None:
        """See `Observer.observe`."""
        for observer in self.observers:
            try:
                observer.observe(metric, labels, values, tenant)
            except Exception as error:
                self._report(observer, error)

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """See `Observer.during`."""
        entered = []
        for observer in self.observers:
            try:
                manager = observer.during(activity)
                manager.__enter__()
            except Exception as error:
                self._report(observer, error)
            else:
                entered.append((observer, manager))
        try:
            yield
        except BaseException as raised:
            self._leave(entered, raised)
            raise
        else:
            self._leave(entered, None)

    def _leave(
        self, entered: list[tuple[Observer, AbstractContextManager[object]]], raised: BaseException | None
    ) -> None:
        for observer, manager in reversed(entered):
            try:
                if raised is None:
                    manager.__exit__(None, None, None)
                else:
                    manager.__exit__(type(raised), raised, raised.__traceback__)
            except Exception as error:
                if error is not raised:
                    self._report(observer, error)

    def _report(self, observer: Observer, error: Exception) -> None:
        if id(observer) not in self._failed:
            self._failed.add(id(observer))
            logger.error("%s fails, and what it misses is lost", type(observer).__name__, exc_info=error)


def _traces(observer: Observer) -> bool:
    return type(observer).during is not Observer.during


SILENT = Signals()
"""No observers."""


def handed_on(context: EventContext, activity: Activity) -> EventContext:
    """The context to store: in the trace of the activity, unless the event was raised in another trace."""
    if activity.traceparent is None or trace_id(context.traceparent) not in (None, trace_id(activity.traceparent)):
        return context
    return replace(context, traceparent=activity.traceparent, tracestate=activity.tracestate)


def trace_id(traceparent: str | None) -> str | None:
    """The trace id in a W3C trace context; None if it is invalid."""
    found = TRACEPARENT.fullmatch(traceparent or "")
    return found[1] if found else None
