"""Failure messages of assertions about published events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..event import Event, registry
from ..payload import fields_of


def contents(event: object) -> Mapping[str, Any]:
    """The fields of an event, without its identity."""
    if isinstance(event, Event):
        return {name: getattr(event, name) for name in registry.of(event).names}
    return fields_of(event)


def check_fields(kind: type, fields: Mapping[str, object]) -> None:
    """Refuse unknown fields: a misspelt one would never match."""
    registry.of_type(kind)
    known = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    if unknown := sorted(fields.keys() - known):
        raise TypeError(f"{kind.__qualname__} has no field {unknown[0]!r}; it has: {', '.join(sorted(known))}")


def differences(event: object, fields: Mapping[str, object]) -> list[str]:
    """The differences of an event from these fields."""
    return [name for name, expected in fields.items() if getattr(event, name) != expected]


def describe(
    kind: type | None, fields: Mapping[str, object], times: int | None, found: int, published: Sequence[object]
) -> str:
    """The expected event, and the published ones, one per line."""
    if kind is None:
        head = "expected that nothing is published"
    else:
        often = "at least once" if times is None else f"{times} times"
        head = f"expected {kind.__qualname__}({_said(fields)}) {often}, found {found}"
    if not published:
        return f"{head}; nothing was published. Was there an `await pillarbox.drain()`?"
    lines = [head + "; published were:"]
    for event in published:
        lines.append(f"  {type(event).__qualname__}({_said(contents(event))})")
        different = differences(event, fields) if kind is not None and isinstance(event, kind) else []
        lines += [f"    {name}: {getattr(event, name)!r}, expected {fields[name]!r}" for name in different]
    return "\n".join(lines)


def _said(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())
