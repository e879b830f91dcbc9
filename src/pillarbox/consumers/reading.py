"""From a message to an event: decoded, and brought to the version that somebody wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ..codec import Content
from ..codecs import Codecs
from ..context import check_header
from ..errors import HeaderError, PayloadError, TenancyError, UnknownEventError
from ..event import EventType, registry
from ..route import check_tenant, matches, may_come_to
from ..transport import Message
from .handling import Effects, Incoming, MessageContext

_HANDED_ON = ("event_id", "correlation_id", "tracestate")


class Reader:
    """What one consumer makes of messages."""

    def __init__(
        self,
        consumer: str,
        effects: Effects,
        codecs: Codecs,
        ignores: Sequence[str] = (),
        topics: Sequence[str] = (),
    ) -> None:
        self._consumer = consumer
        self._effects = effects
        self._codecs = codecs
        self._topics = [*topics]
        self._names_tenants = any("{tenant}" in topic for topic in topics)
        self._is_from: Callable[[str, str], bool] = lru_cache(maxsize=1024)(self._may_be_from)
        self._ignores = [pattern.split(".") for pattern in ignores]
        self._target: Callable[[str, int], EventType | None] = lru_cache(maxsize=1024)(self._find_target)

    def read(self, message: Message, attempt: int = 1) -> Incoming | None:
        """The event, or None if it is known and nobody here wants it. `EventError` says why it cannot be read;
        `UnknownEventError`, that its name or its version is not known. What an upcaster or the event's own class raises
        is raised.
        """
        headers = message.headers
        tenant = self.tenant_of(message)
        for name in _HANDED_ON:  # to the events that the handlers raise
            if name in headers:
                check_header(name, headers[name])
        try:
            content = self.decode(message)
            kind = self._target(content.name, content.version)
            if kind is None:
                return None
            event = registry.build_as(kind, content.version, content.payload, content.event_id, content.occurred_at)
        except RecursionError:
            raise PayloadError("body", "is nested too deep to be read") from None
        version = headers.get("version")
        try:
            context = MessageContext(
                consumer=self._consumer,
                topic=message.topic,
                key=message.key,
                tenant=tenant,
                event_id=content.event_id,
                event_type=content.name,
                schema_version=content.version,
                occurred_at=content.occurred_at,
                attempt=attempt,
                headers=headers,
                version=None if version is None else int(version),
                event_index=int(headers.get("event_index", "0")),
                event_count=int(headers.get("event_count", "1")),
                message=message,
            )
        except ValueError as error:
            raise UnknownEventError(f"the message has an unreadable header: {error}") from None
        return Incoming(event, context)

    def tenant_of(self, message: Message) -> str | None:
        """Whose it is. `HeaderError` if nobody can be called so, or if it came by the topic of another tenant: who may
        write to a topic is up to the broker, and what stands in a header is up to whoever writes.
        """
        tenant = message.headers.get("tenant_id")
        if tenant is None:
            if self._names_tenants and not self._is_from("", message.topic):
                raise HeaderError(f"tenant: none is named, and {message.topic!r} is a tenant's topic")
            return None
        try:
            check_tenant(tenant)
        except TenancyError as error:
            raise HeaderError(f"tenant: {error}") from None
        if self._names_tenants and not self._is_from(tenant, message.topic):
            raise HeaderError(f"tenant: {tenant!r} does not fit the topic {message.topic!r}, by which it came")
        return tenant

    def decode(self, message: Message) -> Content:
        """What the message says, whoever may want that."""
        headers = message.headers
        return self._codecs.reading(headers.get("content_type", "application/json")).decode(message.body, headers)

    def refresh(self) -> None:
        """The effects want other events than before."""
        self._target = lru_cache(maxsize=1024)(self._find_target)

    def _may_be_from(self, tenant: str, topic: str) -> bool:
        return any(may_come_to(template, topic, tenant) for template in self._topics)

    def _find_target(self, name: str, version: int) -> EventType | None:
        kinds = self._effects.kinds
        if (kind := registry.nearest(name, version, kinds)) is not None:
            return kind
        if any(kind.name == name for kind in kinds):
            newest = max(kind.version for kind in kinds if kind.name == name)
            raise UnknownEventError(f"{name!r} comes in version {version}, and {newest} is the newest that is known")
        parts = name.split(".")
        if registry.nearest(name, 0) is None and not any(matches(pattern, parts) for pattern in self._ignores):
            raise UnknownEventError(f"no event type is registered for {name!r} version {version}")
        return None
