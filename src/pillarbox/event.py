"""Events: immutable facts in the domain's language, under stable names and versions.

Before this: nothing; a user declares events. After it: aggregates raise them. An `Event` stays inside the process, an
`IntegrationEvent` may leave it. The name, not the Python class path, is what travels, so classes can move and be
renamed.

    class OrderPlaced(IntegrationEvent, name="orders.order.placed", version=1):
        order_id: UUID
        total_cents: int

Frozen dataclasses, msgspec Structs and pydantic models are events too, once `register_event` has given them a name.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import re
import typing
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from . import clock
from .context import EventContext, current_context
from .errors import ConfigurationError, PayloadError, UnknownEventError, UnregisteredEventError
from .payload import Plain, fields_of, plain_fields

NAME = re.compile(r"[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)+")
MAX_NAME = 200
_BIG_INTEGER = re.compile(r"-?\d{16,}")
IDENTITY = frozenset({"event_id", "occurred_at"})

Caster = Callable[[dict[str, Any]], dict[str, Any]]
_T = TypeVar("_T")
_Cast = TypeVar("_Cast", bound=Caster)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
class _Declared:
    """Makes every subclass a frozen dataclass and, if it has a name, registers it."""

    def __init_subclass__(cls, *, name: str | None = None, version: int = 1) -> None:
        super().__init_subclass__()
        taken = IDENTITY & inspect.get_annotations(cls).keys()
        if taken and cls.__qualname__ != "Event":
            raise ConfigurationError(f"{cls.__qualname__}: every event has a field {min(taken)!r} already")
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        if name is not None:
            registry.register(cls, name=name, version=version, integration=issubclass(cls, IntegrationEvent))


class Event(_Declared):
    """A domain event: frozen, with keyword fields. It stays inside the process; local handlers see it.

    Two events are equal when their own fields are: identity and time say which one it is, not what it says.
    """

    event_id: UUID = dataclasses.field(default_factory=clock.new_id, compare=False)
    occurred_at: datetime = dataclasses.field(default_factory=clock.now, compare=False, kw_only=True)


class IntegrationEvent(Event):
    """An event that other services may see: routes send it to brokers."""


@dataclasses.dataclass(frozen=True, eq=False)
class EventType:
    """A registered name and version, and the Python type behind them. There is one per registration."""

    name: str
    version: int
    cls: type
    integration: bool

    @cached_property
    def shape(self) -> type:
        """What plain values are checked against: the annotations, without the identity that our own events add."""
        return self._shape() if issubclass(self.cls, Event) else self.cls

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The fields of one of our own events that are its content."""
        return tuple(field.name for field in dataclasses.fields(self.cls) if field.name not in IDENTITY)

    @cached_property
    def read(self) -> Callable[[object], tuple[Any, ...]]:
        """The identity of one of our own events, and its content in the order of `names`."""
        return attrgetter("event_id", "occurred_at", *self.names)

    @cached_property
    def optional(self) -> bool:
        """Whether some of these may be left out."""
        return not all(_is_required(each) for each in dataclasses.fields(self.cls) if each.name not in IDENTITY)

    @cached_property
    def decimals(self) -> tuple[str, ...]:
        """Fields that must be exact: msgspec would take a float for a Decimal, and then its digits."""
        try:
            hints = typing.get_type_hints(self.cls)
        except (NameError, TypeError):
            return ()  # the shape has a better message
        return tuple(name for name, hint in hints.items() if hint in (Decimal, Decimal | None))

    def check(self, payload: Mapping[str, Any]) -> Any:
        """The payload by its annotations; `PayloadError` names the field that does not fit."""
        try:
            return msgspec.convert(payload, self.shape, dec_hook=_pydantic, str_keys=True)
        except msgspec.ValidationError as error:
            if not _has_big_integer(payload):
                raise _named(error) from None
            refusal = _named(error)
        try:
            # Integers beyond 2**53 travel as strings; only the lax mode reads them back.
            found: Any = msgspec.convert(payload, self.shape, dec_hook=_pydantic, str_keys=True, strict=False)
        except msgspec.ValidationError as error:
            raise _named(error) from None
        # It reads more than that, "12" for 12 say: what it read must say the same as what was written.
        for name, value in plain_fields(fields_of(found).items()).items():
            if name in payload and value != payload[name]:
                raise PayloadError(name, refusal.problem)
        return found

    def _shape(self) -> type[msgspec.Struct]:
        try:
            hints = typing.get_type_hints(self.cls, include_extras=True)
            fields = [
                (field.name, hints[field.name])
                if _is_required(field)
                else (field.name, hints[field.name] | msgspec.UnsetType, msgspec.UNSET)
                for field in dataclasses.fields(self.cls)
                if field.name not in IDENTITY
            ]
            shape = msgspec.defstruct(self.cls.__name__, fields, kw_only=True)
            msgspec.json.Decoder(shape)  # builds the decoder once, so that an unusable annotation is found here
        except (TypeError, NameError) as error:
            raise ConfigurationError(
                f"{self.cls.__qualname__} has an annotation that cannot be used in an event: {error}"
            ) from error
        return shape

    def build(self, payload: Mapping[str, Any], event_id: UUID, occurred_at: datetime) -> object:
        """The event that these plain values describe."""
        try:
            checked = self.check(dict(payload))
        except PayloadError as error:
            raise UnknownEventError(
                f"{self.name} v{self.version} does not fit {self.cls.__qualname__}: {error}"
            ) from error
        if self.shape is self.cls:
            return checked
        fields = msgspec.structs.asdict(checked)
        if self.optional:
            fields = {name: value for name, value in fields.items() if value is not msgspec.UNSET}
        return self.cls(**fields, event_id=event_id, occurred_at=occurred_at)


class Registry:
    """Names and versions of events, and the casters between versions."""

    def __init__(self) -> None:
        self._by_type: dict[type, EventType] = {}
        self._by_name: dict[tuple[str, int], EventType] = {}
        self._casters: dict[tuple[str, int, int], Caster] = {}

    def register(self, cls: type, *, name: str, version: int = 1, integration: bool = True) -> EventType:
        """Give a type its name. Name and version belong to one type; a module that is loaded again replaces its own."""
        if not NAME.fullmatch(name) or len(name) > MAX_NAME:
            raise ConfigurationError(
                f"{cls.__qualname__}: {name!r} is not an event name; "
                "write two or more lower-case parts with dots, like 'orders.order.placed'"
            )
        if type(version) is not int or version < 1:
            raise ConfigurationError(f"{cls.__qualname__}: version must be a whole number from 1, got {version!r}")
        known = self._by_name.get((name, version))
        if known and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigurationError(
                f"{name!r} version {version} is taken by {known.cls.__module__}.{known.cls.__qualname__}"
            )
        entry = EventType(name, version, cls, integration)
        self._by_type[cls] = self._by_name[name, version] = entry
        return entry

    def of(self, event: object) -> EventType:
        """The registered type of an event."""
        return self.of_type(type(event))

    def of_type(self, cls: type) -> EventType:
        """The registration of a class."""
        try:
            return self._by_type[cls]
        except KeyError:
            raise UnregisteredEventError(
                f"{cls.__qualname__} has no event name: declare it with name=..., or call register_event on it"
            ) from None

    def caster(self, name: str, from_version: int, to_version: int) -> Callable[[_Cast], _Cast]:
        """Register a function that turns a payload of one version into one of a neighbouring version."""

        def keep(function: _Cast) -> _Cast:
            if (name, from_version, to_version) in self._casters:
                raise ConfigurationError(f"{name!r} has two casters from version {from_version} to {to_version}")
            self._casters[name, from_version, to_version] = function
            return function

        return keep

    def cast(self, name: str, payload: Mapping[str, Any], from_version: int, to_version: int) -> dict[str, Any]:
        """The payload in another version of its schema."""
        step = 1 if to_version > from_version else -1
        current = copy.deepcopy(dict(payload))  # other routes send the payload as it is
        for version in range(from_version, to_version, step):
            caster = self._casters.get((name, version, version + step))
            if caster is None:
                kind = "upcaster" if step > 0 else "downcaster"
                raise UnknownEventError(f"{name!r} has no {kind} from version {version} to {version + step}")
            current = caster(current)
        return plain_fields(current.items())

    def build(
        self, name: str, version: int, payload: Mapping[str, Any], event_id: UUID, occurred_at: datetime
    ) -> object:
        """The event behind a name and version; an older version is upcast to the nearest one that has a type."""
        kind = self.nearest(name, version)
        if kind is None:
            raise UnknownEventError(f"no event type is registered for {name!r} version {version}")
        return self.build_as(kind, version, payload, event_id, occurred_at)

    def build_as(
        self, kind: EventType, version: int, payload: Mapping[str, Any], event_id: UUID, occurred_at: datetime
    ) -> object:
        """The event as a certain type of its name, which is not older."""
        if version != kind.version:
            payload = self.cast(kind.name, payload, version, kind.version)
        return kind.build(payload, event_id, occurred_at)

    def nearest(self, name: str, version: int, among: Collection[EventType] | None = None) -> EventType | None:
        """The oldest type of this name, among all or some, that is not older than the version."""
        found = [kind for kind in (self._by_name.values() if among is None else among) if kind.name == name]
        return min((kind for kind in found if kind.version >= version), key=lambda kind: kind.version, default=None)


registry = Registry()


def register_event(name: str, *, version: int = 1, integration: bool = True) -> Callable[[type[_T]], type[_T]]:
    """Class decorator: a frozen dataclass, msgspec Struct or pydantic model becomes an event."""

    def register(cls: type[_T]) -> type[_T]:
        if dataclasses.is_dataclass(cls):
            if not vars(cls)["__dataclass_params__"].frozen:
                raise ConfigurationError(f"{cls.__qualname__}: an event is immutable; write @dataclass(frozen=True)")
        elif not (issubclass(cls, msgspec.Struct) or hasattr(cls, "model_fields")):
            raise ConfigurationError(f"{cls.__qualname__} is not a frozen dataclass, msgspec Struct or pydantic model")
        registry.register(cls, name=name, version=version, integration=integration)
        return cls

    return register


def upcaster(name: str, *, from_version: int) -> Callable[[_Cast], _Cast]:
    """Decorator: a payload of ``from_version`` becomes one of the next version, for readers of old messages."""
    return registry.caster(name, from_version, from_version + 1)


def downcaster(name: str, *, from_version: int) -> Callable[[_Cast], _Cast]:
    """Decorator: a payload of ``from_version`` becomes one of the version before, for routes that still send it."""
    return registry.caster(name, from_version, from_version - 1)


class Raised(msgspec.Struct, frozen=True, eq=False):
    """An event as it was when it was raised: its identity, its time and its exact content."""

    event: object
    type: EventType
    event_id: UUID
    occurred_at: datetime
    payload: dict[str, Plain]
    context: EventContext
    sequence: int
    """Position among everything raised in this process: the order in which rows are written."""


_sequence = itertools.count(1)


def capture(event: object) -> Raised:
    """Take the event as it is now, checked. Later changes to what it refers to are not seen."""
    kind = registry.of_type(type(event))
    if isinstance(event, Event):
        event_id, occurred_at, *values = kind.read(event)
        payload = plain_fields(zip(kind.names, values, strict=True))
    else:
        event_id, occurred_at = _foreign_identity(event)
        payload = plain_fields(fields_of(event).items())
    if not (type(event_id) is UUID and type(occurred_at) is datetime and occurred_at.tzinfo is UTC):
        _check_identity(event_id, occurred_at)
        occurred_at = occurred_at.astimezone(UTC)
    for name in kind.decimals:
        if isinstance(payload.get(name), (int, float)):
            raise PayloadError(name, f"expected Decimal, got {type(getattr(event, name)).__name__}")
    kind.check(payload)
    return Raised(event, kind, event_id, occurred_at, payload, current_context(), next(_sequence))


def _check_identity(event_id: object, occurred_at: object) -> None:
    if not isinstance(event_id, UUID):
        raise PayloadError("event_id", f"expected UUID, got {type(event_id).__name__}")
    if not isinstance(occurred_at, datetime):
        raise PayloadError("occurred_at", f"expected datetime, got {type(occurred_at).__name__}")
    if occurred_at.utcoffset() is None:
        raise PayloadError(
            "occurred_at", f"is the naive datetime {occurred_at.isoformat()}: give it a time zone, best UTC"
        )


def _foreign_identity(event: object) -> tuple[UUID, datetime]:
    """Classes that are not ours may carry an identity of their own."""
    event_id, occurred_at = getattr(event, "event_id", None), getattr(event, "occurred_at", None)
    return (
        event_id if isinstance(event_id, UUID) else clock.new_id(),
        occurred_at if isinstance(occurred_at, datetime) else clock.now(),
    )


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _has_big_integer(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_big_integer, value.values()))
    if isinstance(value, list):
        return any(map(_has_big_integer, value))
    return isinstance(value, str) and _BIG_INTEGER.fullmatch(value) is not None


def _pydantic(target: type, value: Any) -> Any:
    """Pydantic models, which msgspec does not know."""
    if isinstance(value, target):
        return value
    validate = getattr(target, "model_validate", None)
    if validate is None:
        raise TypeError(f"{target!r} is not supported")
    try:
        return validate(value)
    except ValueError as error:
        problems: list[Any] = getattr(error, "errors", list)()
        if not problems:
            raise
        path = ".".join(str(part) for part in problems[0]["loc"])
        raise PayloadError(path, problems[0]["msg"]) from None


def _named(error: msgspec.ValidationError) -> PayloadError:
    """msgspec says "Expected `int`, got `str` - at `$.total`"; we name the field first."""
    problem, _, path = str(error).partition(" - at `$")
    return PayloadError(path.strip("`.") or "payload", problem[:1].lower() + problem[1:])
