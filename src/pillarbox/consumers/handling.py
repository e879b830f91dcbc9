"""From a message to the arguments of a handler.

A message is decoded, and brought to the version that its consumer wants. A handler says by its annotations what it
asks for: the event, the unit of work whose transaction holds the row of the inbox, its session, the circumstances of
the message. They are looked at once, when the handler is registered.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from ..codec import Content
from ..codecs import Codecs
from ..context import caused_by, check_header
from ..errors import (
    ConfigurationError,
    HeaderError,
    PayloadError,
    TenancyError,
    UnknownEventError,
    UnregisteredEventError,
)
from ..event import EventType, registry
from ..inbox import Arrival
from ..redaction import described
from ..route import check_tenant, matches, may_come_to
from ..transport import Message
from ..unit_of_work import UnitOfWork
from .threads import Threads

_NO_MESSAGE = Message("", "", b"", {})
_HANDED_ON = ("event_id", "correlation_id", "tracestate")


class MessageContext(msgspec.Struct, frozen=True, gc=False):
    """The circumstances of a message that is being handled."""

    consumer: str
    topic: str
    key: str
    tenant: str | None
    event_id: UUID
    event_type: str
    schema_version: int
    """As it was sent; the event may have been brought to a newer one."""
    occurred_at: datetime
    attempt: int
    """How often this consumer has tried, this time included."""
    headers: Mapping[str, str]
    version: int | None
    """The version of the aggregate that raised it; None if there is no aggregate."""
    event_index: int
    """Its place among the events of that version, from 0."""
    event_count: int
    """How many that version has."""
    message: Message = _NO_MESSAGE
    """The message itself, as it came."""

    @property
    def aggregate_id(self) -> str | None:
        """Whose event it is."""
        return self.headers.get("aggregate_id")


class Incoming(msgspec.Struct, frozen=True, gc=False):
    """An event that has come in."""

    event: Any
    context: MessageContext

    @property
    def arrival(self) -> Arrival:
        """As the inbox knows it. Some codecs keep its id in the body."""
        context = self.context
        return Arrival.of_event(context.event_id, context.schema_version, context.message.body)


class LeftOut(NamedTuple):
    """Events that a projection has not applied, or not in their turn."""

    stale: int = 0
    """Not later than what their row had seen."""
    gaps: int = 0
    """Came without their predecessor."""
    version_lag: int = 0
    """By how many versions one was ahead of its row, at most."""


class EventsFailedError(Exception):
    """Some events of several failed by themselves, and nothing was written: the others may go on without these."""

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        super().__init__("; ".join(map(described, errors.values())))
        self.errors = errors
        """By the places of the events."""


class Effects(Protocol):
    """What a consumer does with events: its handlers, or a projection."""

    @property
    def kinds(self) -> Collection[EventType]:
        """The events that it wants, in the versions that it wants them in."""
        ...

    @property
    def names_failures(self) -> bool:
        """Whether it raises `EventsFailedError`, and nothing that it does takes long."""
        ...

    def left_out(self) -> LeftOut:
        """What it has not done since it was last asked."""
        ...

    async def apply(self, uow: UnitOfWork, incoming: Sequence[Incoming]) -> None:
        """Do it, in the transaction of ``uow``, which the caller commits. All of one tenant, in order per key. Whatever
        is raised undoes all of it; several are then tried in halves, or without those that `EventsFailedError` names.
        """
        ...


# -- reading -----------------------------------------------------------------------------------------------------------


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
        self._codec_of = lru_cache(maxsize=64)(codecs.reading)
        self._topics = [*topics]
        self._names_tenants = any("{tenant}" in topic for topic in topics)
        self._is_from: Callable[[str, str], bool] = lru_cache(maxsize=1024)(self._may_be_from)
        self._ignores = [pattern.split(".") for pattern in ignores]
        self.refresh()

    def read(self, message: Message, attempt: int = 1) -> Incoming | None:
        """The event, or None if it is known and has no handler here. `EventError` says why it cannot be read;
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
        """The tenant of a message. `HeaderError` if the name is invalid, or if the message came by the topic of another
        tenant: the broker decides who may write to a topic, and a sender can write any header.
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
        """The content of a message, whether or not a handler wants it."""
        headers = message.headers
        return self._codec_of(headers.get("content_type", "application/json")).decode(message.body, headers)

    def refresh(self) -> None:
        """The effects want other events than before."""
        self._target: Callable[[str, int], EventType | None] = lru_cache(maxsize=1024)(self._find_target)

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


# -- handlers ----------------------------------------------------------------------------------------------------------

Handler = Callable[..., Any]


class Handlers:
    """`Effects` by functions: each event goes to every handler of its type, in the order of their registration."""

    names_failures = False

    def __init__(self) -> None:
        self._calls: dict[type, list[_Call]] = {}
        self._kinds: dict[type, EventType] = {}
        self._threads = Threads()

    @property
    def kinds(self) -> Collection[EventType]:
        return self._kinds.values()

    def add(self, kinds: Sequence[type], handler: Handler) -> None:
        """Register a handler for these events."""
        where = _name_of(handler)
        if not kinds:
            raise ConfigurationError(f"{where}: on needs at least one event type")
        for kind in kinds:
            if not isinstance(kind, type):
                raise ConfigurationError(f"{where}: on takes event types, got {kind!r}")
        try:
            known = {kind: registry.of_type(kind) for kind in kinds}
        except UnregisteredEventError as error:
            raise UnregisteredEventError(f"{where}: {error}") from None
        check_handler(handler)
        for kind in known:
            if any(call.handler == handler for call in self._calls.get(kind, ())):
                raise ConfigurationError(f"{where} is registered twice for {kind.__qualname__}")
        call = _Call(handler, kinds, self._threads)
        self._kinds |= known
        for kind in known:
            self._calls.setdefault(kind, []).append(call)

    def left_out(self) -> LeftOut:
        return LeftOut()

    async def apply(self, uow: UnitOfWork, incoming: Sequence[Incoming]) -> None:
        for one in incoming:
            with caused_by(one.context.headers):
                for call in self._calls[type(one.event)]:
                    await call(one.event, uow, one.context)


def check_handler(handler: object) -> None:
    """Refuse what would never run. The body of a generator runs only if its values are asked for."""
    if not callable(handler):
        raise ConfigurationError(f"a handler is a function, or another callable, got {handler!r}")
    for function in (handler, handler.__call__):
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(f"{_name_of(handler)}: {_GENERATOR}")


_GENERATOR = "a handler must not be a generator, whose body would not run: remove its `yield`"


class _Call:
    """A handler, and where in its signature everything belongs."""

    def __init__(self, handler: Handler, kinds: Sequence[type], threads: Threads) -> None:
        self.handler = handler
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004  an object with an async __call__
        )
        self._wants, self._by_position = _wants(handler, kinds)
        if _find_session in self._wants.values() and not self._is_async and _is_surely_plain(handler):
            raise ConfigurationError(
                f"{_name_of(handler)}: a plain function runs in a thread, where an AsyncSession cannot be used: make "
                "it `async def`, or ask for a UnitOfWork, for `add` and `publish` alone"
            )
        self._threads = threads

    async def __call__(self, event: object, uow: UnitOfWork, context: MessageContext) -> None:
        given = {name: find(event, uow, context) for name, find in self._wants.items()}
        by_position = [given.pop(name) for name in self._by_position]
        if self._is_async:
            await self.handler(*by_position, **given)
            return
        call = self, context.topic, context.tenant, context.event_id
        result = await self._threads.call(call, partial(self.handler, *by_position, **given))
        if inspect.isawaitable(result):
            await result
        elif inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise ConfigurationError(f"{_name_of(self.handler)}: {_GENERATOR}")


_Find = Callable[[object, UnitOfWork, MessageContext], object]


def _find_session(_event: object, uow: UnitOfWork, _context: MessageContext) -> object:
    return uow.session


_BY_TYPE: Mapping[type, _Find] = {
    UnitOfWork: lambda _event, uow, _context: uow,
    AsyncSession: _find_session,
    MessageContext: lambda _event, _uow, context: context,
}


def _wants(handler: Handler, kinds: Sequence[type]) -> tuple[Mapping[str, _Find], Sequence[str]]:
    """What each parameter of a handler gets, and which of them get it by their position. The first one that says
    nothing, or names an event, gets the event.
    """
    where = _name_of(handler)
    events = " | ".join(kind.__qualname__ for kind in kinds)
    hints = _hints(handler, kinds)
    wants: dict[str, _Find] = {}
    by_position: list[str] = []
    has_event = False
    for name, parameter in inspect.signature(handler).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD or (parameter.kind is parameter.VAR_POSITIONAL and wants):
            continue
        find = _by_type(hints.get(name))
        if find is None and not has_event and _may_be_event(hints.get(name), kinds):
            find, has_event = _event_itself, True
        if find is not None:
            wants[name] = find
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                by_position.append(name)
        elif parameter.default is parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigurationError(
                f"{where}: nothing is known for its parameter {name!r}, {_annotated(parameter)}; a handler may ask, by "
                f"annotation, for the event ({events}), a UnitOfWork, an AsyncSession and a MessageContext"
            )
    if not has_event:
        raise ConfigurationError(f"{where}: none of its parameters takes the event ({events})")
    return wants, by_position


def _name_of(handler: Handler) -> str:
    return getattr(handler, "__qualname__", None) or repr(handler)


def _function_of(handler: Handler) -> Any:
    """What its annotations are written on."""
    while isinstance(handler, partial):
        handler = handler.func
    return handler if inspect.isroutine(handler) else getattr(handler, "__call__", handler)  # noqa: B004


def _is_surely_plain(handler: Handler) -> bool:
    """Whether it returns nothing to be awaited. A decorator may hide that from `inspect.iscoroutinefunction`."""
    function = inspect.unwrap(_function_of(handler))
    returns = str(getattr(function, "__annotations__", {}).get("return", ""))
    awaited = any(each in returns for each in ("Awaitable", "Coroutine", "Future", "Task"))
    return not awaited and not inspect.iscoroutinefunction(function)


def _annotated(parameter: inspect.Parameter) -> str:
    given = parameter.annotation
    if given is parameter.empty:
        return "which has no annotation"
    return f"annotated as {given if isinstance(given, str) else inspect.formatannotation(given)}"


def _by_type(hint: object) -> _Find | None:
    return _BY_TYPE.get(hint) if isinstance(hint, type) else None


def _event_itself(event: object, _uow: UnitOfWork, _context: MessageContext) -> object:
    return event


def _may_be_event(hint: object, kinds: Sequence[type]) -> bool:
    """No annotation, or one that all of these events have: their class, a base of it, or a union of them."""
    if hint is None or hint is Any or hint is object:
        return True
    parts = tuple(part for part in (typing.get_args(hint) or (hint,)) if isinstance(part, type))
    return bool(parts) and all(issubclass(kind, parts) for kind in kinds)


def _hints(handler: Handler, kinds: Sequence[type]) -> Mapping[str, object]:
    function = _function_of(handler)
    try:
        return typing.get_type_hints(function)
    except NameError as error:
        # Names of an enclosing function, as in tests, are unavailable: annotations stay texts there.
        known: Mapping[str, object] = {**_BY_NAME, "Any": Any, "object": object, **{it.__name__: Any for it in kinds}}
        found = _annotations(function, error).items()
        return {name: known.get(next(iter(_NAMES.findall(str(hint))), ""), _Nothing) for name, hint in found}


def _annotations(function: Any, error: NameError) -> Mapping[str, object]:
    found = getattr(inspect.unwrap(function), "__annotations__", None)
    if found is None:
        raise ConfigurationError(f"the annotations of {function!r} cannot be read: {error}") from error
    return typing.cast("Mapping[str, object]", found)


class _Nothing:
    """What a name stands for that nobody knows."""


_NAMES = re.compile(r"\w+(?=[^\w.]|$)")
_BY_NAME: Mapping[str, type] = {kind.__name__: kind for kind in _BY_TYPE}
