"""Aggregates: objects that raise events.

`Aggregate` is a mixin for SQLAlchemy classes (either order of bases) and for plain ones. It only records events. The
aggregate's session collects them, and writes them in the transaction that saves the aggregate.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from .errors import EventError
from .event import Raised, capture

_SLOT = "_pillarbox"


class Collects(Protocol):
    """Receives notice of raised events: the session's collector."""

    def touched(self, aggregate: Aggregate) -> None:
        """Called when the aggregate has new events."""
        ...


class Recorded:
    """Events of one aggregate that were raised and not collected yet. Stored in the instance itself."""

    __slots__ = ("before", "collector", "events", "owner")

    def __init__(self, owner: int = 0) -> None:
        self.owner = owner
        """The aggregate itself: a shallow copy refers to the same record, but has raised nothing."""
        self.events: list[Raised] = []
        self.before: tuple[Raised, ...] = ()
        """Events that a new object raised before it was added to its session."""
        self.collector: Collects | None = None

    def __reduce__(self) -> tuple[type[Recorded], tuple[()]]:
        # A copy or a pickle of an aggregate (in a cache, for example) is another object, which has raised nothing.
        return (Recorded, ())


class Aggregate:
    """An object with an identity whose methods change it and raise events."""

    def raise_event(self, event: object) -> None:
        """Record an event, with its content now. It is written if, and only if, the transaction commits."""
        recorded = recorded_by(self)
        recorded.events.append(capture(event))
        if recorded.collector is not None:
            recorded.collector.touched(self)

    def pull_events(self) -> list[object]:
        """Return and forget the events that are not written yet. For code without a unit of work."""
        recorded = recorded_by(self)
        raised, recorded.events = recorded.events, []
        return [entry.event for entry in raised]

    @property
    def aggregate_type(self) -> str:
        """Type in headers: by default the class name in snake case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def aggregate_id(self) -> str:
        """Identity in headers, and ordering key: by default the primary key, or else ``id``."""
        mapper: Any = getattr(type(self), "__mapper__", None)
        parts = mapper.primary_key_from_instance(self) if mapper is not None else [getattr(self, "id", None)]
        if any(part is None for part in parts):
            raise EventError(
                f"{type(self).__name__} has no identity yet: give it an id when it is made, or define `aggregate_id`"
            )
        if len(parts) == 1:
            return str(parts[0])
        # The parts of a composite key must stay distinct: "x:y" and "z" are not "x" and "y:z".
        return ":".join(str(part).replace("%", "%25").replace(":", "%3A") for part in parts)

    @property
    def aggregate_version(self) -> int | None:
        """Version of the aggregate, if it has one: the mapped ``version_id_col``, or else the attribute ``version``."""
        mapper: Any = getattr(type(self), "__mapper__", None)
        if mapper is None:
            version: Any = getattr(self, "version", None)
        elif mapper.version_id_col is not None:
            version = getattr(self, mapper.get_property_by_column(mapper.version_id_col).key)
        else:
            version = None
        return version if type(version) is int else None


def recorded_by(aggregate: Aggregate) -> Recorded:
    """The record of an aggregate, created on first use, because SQLAlchemy creates instances without ``__init__``."""
    recorded: Recorded | None = aggregate.__dict__.get(_SLOT)
    if recorded is None or recorded.owner != id(aggregate):
        recorded = aggregate.__dict__[_SLOT] = Recorded(id(aggregate))
    return recorded
