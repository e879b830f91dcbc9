"""Aggregates: the objects that raise events.

`Aggregate` is a mixin for SQLAlchemy classes (either order of bases) and for plain ones. It only records; the session
that the aggregate belongs to collects what was recorded, and writes it in the transaction that saves the aggregate.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from .errors import EventError
from .event import Raised, capture

_SLOT = "_pillarbox"


class Collects(Protocol):
    """Whoever wants to know that an aggregate has raised something: the session's collector."""

    def touched(self, aggregate: Aggregate) -> None:
        """The aggregate holds events that were not there before."""
        ...


class Recorded:
    """What one aggregate has raised and not handed over yet. Lives in the instance, beside the mapped attributes."""

    __slots__ = ("before", "collector", "events", "owner")

    def __init__(self, owner: int = 0) -> None:
        self.owner = owner
        """Whose record this is: a shallow copy of an aggregate refers to it, too, and has raised nothing."""
        self.events: list[Raised] = []
        self.before: tuple[Raised, ...] = ()
        """What a new object had raised before it was added to its session."""
        self.collector: Collects | None = None

    def __reduce__(self) -> tuple[type[Recorded], tuple[()]]:
        # A copy or a pickle of an aggregate (a cache keeps such) is another object: it has raised nothing.
        return (Recorded, ())


class Aggregate:
    """Something with an identity that changes by its own methods and says so in events."""

    def raise_event(self, event: object) -> None:
        """Record an event. Its content is taken now; it is written when, and only if, the aggregate's transaction
        commits.
        """
        recorded = recorded_by(self)
        recorded.events.append(capture(event))
        if recorded.collector is not None:
            recorded.collector.touched(self)

    def pull_events(self) -> list[object]:
        """Hand over what was raised and not yet written, and forget it. For code that works without a unit of work."""
        recorded = recorded_by(self)
        raised, recorded.events = recorded.events, []
        return [entry.event for entry in raised]

    @property
    def aggregate_type(self) -> str:
        """The kind of aggregate, as it appears in headers: by default the class name in snake case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def aggregate_id(self) -> str:
        """The identity, as it appears in headers and as ordering key: by default the primary key, else ``id``."""
        mapper: Any = getattr(type(self), "__mapper__", None)
        parts = mapper.primary_key_from_instance(self) if mapper is not None else [getattr(self, "id", None)]
        if any(part is None for part in parts):
            raise EventError(
                f"{type(self).__name__} has no identity yet: give it an id when it is made, or define `aggregate_id`"
            )
        if len(parts) == 1:
            return str(parts[0])
        # The parts of a composite key must stay apart: "x:y" and "z" are not "x" and "y:z".
        return ":".join(str(part).replace("%", "%25").replace(":", "%3A") for part in parts)

    @property
    def aggregate_version(self) -> int | None:
        """The version, if the class keeps one: the mapped ``version_id_col``, else an attribute ``version``."""
        mapper: Any = getattr(type(self), "__mapper__", None)
        if mapper is None:
            version: Any = getattr(self, "version", None)
        elif mapper.version_id_col is not None:
            version = getattr(self, mapper.get_property_by_column(mapper.version_id_col).key)
        else:
            version = None
        return version if type(version) is int else None


def recorded_by(aggregate: Aggregate) -> Recorded:
    """The record of an aggregate. SQLAlchemy makes instances without ``__init__``, so it is made on first use."""
    recorded: Recorded | None = aggregate.__dict__.get(_SLOT)
    if recorded is None or recorded.owner != id(aggregate):
        recorded = aggregate.__dict__[_SLOT] = Recorded(id(aggregate))
    return recorded
