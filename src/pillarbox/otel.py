"""Traces for OpenTelemetry: one trace from the request that raised an event to the destination that has stored it.

    box = Pillarbox(engine, ..., signals=[OtelSignals()])

The span `append` is stored with the events as their ``traceparent``; relays and handlers continue it in any process.
Names and attributes follow the semantic conventions for messaging and databases. The sampler of your tracer provider
decides which traces are kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from . import __version__
from .errors import MissingExtraError
from .telemetry import APPEND, PROCESS, SEND, SEND_ONE, Activity, Observer, trace_id

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    raise MissingExtraError("OtelSignals", extra="otel") from None

_PROPAGATOR = TraceContextTextMapPropagator()
_NOWHERE = Context()
"""The empty context: no parent span, whatever is active."""


class OtelSignals(Observer):
    """Creates spans for the activities of a box and its relays.

    ``tracer_provider`` is yours, or the global one. ``per_message=False`` leaves out the spans of single messages; the
    span of a request has links to all of them anyway.
    """

    def __init__(self, tracer_provider: trace.TracerProvider | None = None, *, per_message: bool = True) -> None:
        self._tracer = trace.get_tracer("pillarbox", __version__, tracer_provider)
        self._per_message = per_message

    def during(self, activity: Activity) -> AbstractContextManager[object]:
        """See `Observer.during`."""
        return {APPEND: self._append, SEND: self._send, PROCESS: self._process}[activity.span](activity)

    @contextmanager
    def _append(self, activity: Activity) -> Iterator[None]:
        stored = [_stored(headers) for headers in activity.messages]
        running = trace.get_current_span().get_span_context()
        parent = running if running.is_valid else next(filter(None, stored), None)
        elsewhere = {it.trace_id: it for it in stored if it and parent and it.trace_id != parent.trace_id}
        span = self._tracer.start_span(
            activity.span.name,
            _inside(parent),
            SpanKind.PRODUCER,
            activity.attributes,
            [Link(it) for it in elsewhere.values()],
        )
        for headers in activity.messages:
            span.add_event(
                "raise",
                {"messaging.message.id": headers["event_id"], "pillarbox.event_type": headers["event_type"]},
            )
        if running.is_valid or span.get_span_context() != parent:  # without a provider, the span is the parent itself
            carrier: dict[str, str] = {}
            _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
            activity.traceparent, activity.tracestate = carrier.get("traceparent"), carrier.get("tracestate")
        with self._running(span, activity):
            yield

    @contextmanager
    def _send(self, activity: Activity) -> Iterator[None]:
        stored = [_stored(headers) for headers in activity.messages]
        name = f"{activity.span.name} {activity.about}"
        links = [Link(it) for it in stored if it]
        request = self._tracer.start_span(name, _NOWHERE, SpanKind.CLIENT, activity.attributes, links)
        began = time.time_ns()
        try:
            with self._running(request, activity):
                yield
        finally:
            if self._per_message:
                self._send_each(activity, stored, Link(request.get_span_context()), began)

    def _send_each(self, activity: Activity, stored: list[SpanContext | None], request: Link, began: int) -> None:
        name, ended = f"{SEND_ONE.name} {activity.about}", time.time_ns()
        common = {key: value for key, value in activity.attributes.items() if key in SEND_ONE.attributes}
        for index, (headers, context) in enumerate(zip(activity.messages, stored, strict=True)):
            if context is None:
                continue
            one: dict[str, str | int] = {
                "messaging.message.id": headers["event_id"],
                "pillarbox.event_type": headers.get("event_type", ""),
            }
            span = self._tracer.start_span(
                name, _inside(context), SpanKind.PRODUCER, common | one, [request], start_time=began
            )
            _note_failure(span, activity.failures.get(index))
            span.end(ended)

    @contextmanager
    def _process(self, activity: Activity) -> Iterator[None]:
        stored = [_stored(headers) for headers in activity.messages]
        parent = _inside(stored[0] if len(stored) == 1 else None)
        name = f"{activity.span.name} {activity.about}"
        links = [Link(it) for it in stored if it]
        span = self._tracer.start_span(name, parent, SpanKind.CONSUMER, activity.attributes, links)
        with self._running(span, activity):
            yield

    @contextmanager
    def _running(self, span: Span, activity: Activity) -> Iterator[None]:
        """Activate the span for the block. Texts of errors may quote data, so only their class is recorded."""
        try:
            with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as error:
            activity.error = activity.error or type(error).__name__
            raise
        finally:
            _note_failure(span, activity.error)
            span.end()


def _note_failure(span: Span, why: str | None) -> None:
    if why is not None:
        span.set_attribute("error.type", why)
        span.set_status(Status(StatusCode.ERROR))


def _stored(headers: Mapping[str, str]) -> SpanContext | None:
    """The trace context in the headers of an event, if it is valid."""
    if trace_id(headers.get("traceparent")) is None:
        return None
    found = trace.get_current_span(_PROPAGATOR.extract(headers, _NOWHERE)).get_span_context()
    return found if found.is_valid else None


def _inside(parent: SpanContext | None) -> Context:
    return _NOWHERE if parent is None else trace.set_span_in_context(NonRecordingSpan(parent), _NOWHERE)
