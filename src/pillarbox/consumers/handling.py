"""Handlers: what is to be done with an event, and what a handler may ask for.

A handler says by its annotations what it wants: the event, the unit of work whose transaction holds the row of the
inbox, its session, the circumstances of the message. They are looked at once, when the handler is registered.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from ..context import caused_by
from ..errors import ConfigurationError, UnregisteredEventError
from ..event import EventType, registry
from ..redaction import described
from ..transport import Message
from ..unit_of_work import UnitOfWork
from .threads import Threads

_NO_MESSAGE = Message("", "", b"", {})


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

    def left_out(self) -> LeftOut:
        """What it has not done since it was last asked."""
        ...

    async def apply(self, uow: UnitOfWork, incoming: Sequence[Incoming]) -> None:
        """Do it, in the transaction of ``uow``, which the caller commits. All of one tenant, in order per key. Whatever
        is raised undoes all of it; several are then tried in halves, or without those that `EventsFailedError` names.
        """
        ...


Handler = Callable[..., Any]


class Handlers:
    """`Effects` by functions: each event goes to every handler of its type, in the order of their registration."""

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
