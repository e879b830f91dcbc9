"""The context of an event: tenant, trace, correlation, causation, user, source.

Middleware, consumers and units of work set it for the code that runs inside; it becomes headers of the events raised
there. Header names follow the Pub/Sub conventions, the same for every transport and consumer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import HeaderError

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class EventContext:
    """The known causes of an event. Every value is optional and becomes one or several headers."""

    tenant: str | None = None
    correlation_id: str | None = None
    causation_id: str | None = None
    user_id: str | None = None
    source_service: str | None = None
    source_version: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None

    def __post_init__(self) -> None:
        if self.traceparent is not None and not TRACEPARENT.fullmatch(self.traceparent):
            raise HeaderError(f"traceparent: {self.traceparent!r} is not a W3C trace context of version 00")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check_header(field.name, value)

    def headers(self) -> dict[str, str]:
        """The headers for these values."""
        found = {_HEADERS.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}
        headers = {name: value for name, value in found.items() if value is not None}
        if self.traceparent is not None:
            _, headers["trace_id"], headers["span_id"], _ = self.traceparent.split("-")
        return headers


_HEADERS = {"tenant": "tenant_id"}
NO_CONTEXT = EventContext()
_current: ContextVar[EventContext] = ContextVar("pillarbox_context", default=NO_CONTEXT)


def current_context() -> EventContext:
    """The context of the running code."""
    return _current.get()


@contextmanager
def event_context(**values: Any) -> Iterator[EventContext]:
    """Set values for the block; others keep their value from outside."""
    context = replace(_current.get(), **{name: None if value is None else str(value) for name, value in values.items()})
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


@contextmanager
def caused_by(headers: Mapping[str, str]) -> Iterator[EventContext]:
    """Set the context to that of a message, which causes everything inside: the same tenant, correlation and trace. An
    invalid trace is left out.
    """
    event_id = headers.get("event_id")
    traceparent = headers.get("traceparent", "")
    traced = TRACEPARENT.fullmatch(traceparent) is not None
    with event_context(
        tenant=headers.get("tenant_id"),
        correlation_id=headers.get("correlation_id") or event_id,
        causation_id=event_id,
        traceparent=traceparent if traced else None,
        tracestate=headers.get("tracestate") if traced else None,
    ) as context:
        yield context


def check_header(name: str, value: str) -> str:
    """Refuse control characters and lone surrogates, which would break a header, a log line or a key."""
    if not isinstance(value, str):
        raise HeaderError(f"{name}: must be a string, got {type(value).__name__}")
    if not value.isprintable():
        bad = next((character for character in value if ord(character) < 32 or ord(character) == 127), None)
        if bad is not None:
            raise HeaderError(f"{name}: {value!r} holds the control character {bad!r}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise HeaderError(f"{name}: {value!r} holds a lone surrogate") from None
    return value
