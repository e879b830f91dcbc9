"""What an event may hold: a strict, exact translation into plain JSON values.

This runs when an event is raised, so it is also the snapshot that later changes to a list inside the event cannot
reach. Whatever a consumer could not read back exactly is refused here, by the path of the field: NaN and infinities,
NUL and lone surrogates, naive datetimes, keys that are not strings, unknown types, cycles. Decimals, and integers
beyond 2**53 (which other languages would round), travel as strings.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, TypeAlias
from uuid import UUID

import msgspec

from .errors import PayloadError

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

MAX_DEPTH = 64
SAFE_INTEGER = 2**53 - 1


def plain(value: object, path: str = "", depth: int = 0) -> Plain:
    """The value as JSON would carry it; `PayloadError` names the field that cannot be carried."""
    return _CONVERTERS.get(type(value), _by_kind)(value, path, depth)


def fields_of(event: object) -> Mapping[str, object]:
    """The named fields of a dataclass, msgspec Struct or pydantic model."""
    if dataclasses.is_dataclass(event):
        return {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if isinstance(event, msgspec.Struct):
        return {name: getattr(event, name) for name in event.__struct_fields__}
    names: Mapping[str, object] | None = getattr(type(event), "model_fields", None)
    if names is None:
        raise TypeError(f"{type(event).__name__} is not a dataclass, msgspec Struct or pydantic model")
    return {name: getattr(event, name) for name in names}


def plain_fields(fields: Iterable[tuple[str, object]], path: str = "", depth: int = 0) -> dict[str, Plain]:
    """`plain` for the fields of an object."""
    if depth > MAX_DEPTH:
        raise PayloadError(path, f"is nested deeper than {MAX_DEPTH} levels, or contains itself")
    prefix = f"{path}." if path else ""
    of, depth = _CONVERTERS.get, depth + 1  # `plain`, without a call for each
    return {name: of(type(value), _by_kind)(value, prefix + name, depth) for name, value in fields}


def _text(value: Any, path: str, _depth: int) -> str:
    text = str.__str__(value)
    if "\0" in text:
        raise PayloadError(path, "holds a NUL character, which databases and brokers refuse")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PayloadError(
                path, f"holds a lone surrogate at position {error.start}, which is not valid Unicode"
            ) from None
    return text


def _integer(value: Any, _path: str, _depth: int) -> int | str:
    number = int(value)
    return number if -SAFE_INTEGER <= number <= SAFE_INTEGER else str(number)


def _float(value: Any, path: str, _depth: int) -> float:
    if not math.isfinite(value):
        raise PayloadError(path, f"is {value!r}, which JSON cannot carry")
    return float(value)


def _decimal(value: Any, path: str, _depth: int) -> str:
    if not value.is_finite():
        raise PayloadError(path, f"is {value!r}, which JSON cannot carry")
    return str(value)


def _datetime(value: Any, path: str, _depth: int) -> str:
    if value.utcoffset() is None:
        raise PayloadError(path, f"is the naive datetime {value.isoformat()}: give it a time zone, best UTC")
    try:
        text: str = value.astimezone(UTC).isoformat()
    except OverflowError:
        raise PayloadError(
            path, f"is {value.isoformat()}, which has no UTC form between the years 1 and 9999"
        ) from None
    return text.removesuffix("+00:00") + "Z"


def _time(value: Any, path: str, _depth: int) -> str:
    if value.tzinfo is not None and value.utcoffset() is None:
        raise PayloadError(path, "is a time whose zone depends on the date")
    text: str = value.isoformat()
    return text


def _native(value: Any, _path: str, _depth: int) -> str:
    text: str = msgspec.to_builtins(value)
    return text


def _bytes(value: Any, _path: str, _depth: int) -> str:
    return base64.b64encode(value).decode()


def _array(value: Any, path: str, depth: int) -> list[Plain]:
    if depth > MAX_DEPTH:
        raise PayloadError(path, f"is nested deeper than {MAX_DEPTH} levels, or contains itself")
    return [plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]


def _set(value: Any, path: str, depth: int) -> list[Plain]:
    items = _array(value, path, depth)
    # Sets have no order; the same event must give the same bytes in every process.
    return sorted(items, key=msgspec.json.encode)


def _object(value: Any, path: str, depth: int) -> dict[str, Plain]:
    def named() -> Iterable[tuple[str, object]]:
        for key, item in value.items():
            if not isinstance(key, (str, UUID, int)) or isinstance(key, bool):
                raise PayloadError(path, f"has the key {key!r}: JSON objects have strings as keys")
            yield _text(str(key.value if isinstance(key, Enum) else key), path, depth), item

    return plain_fields(named(), path, depth)


def _by_kind(value: object, path: str, depth: int) -> Plain:
    """Subclasses and structured objects: found by kind, not by exact type."""
    if isinstance(value, Enum):
        return plain(value.value, path, depth)
    if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct) or hasattr(type(value), "model_fields"):
        return plain_fields(fields_of(value).items(), path, depth)
    for kind, convert in _KINDS:
        if isinstance(value, kind):
            return convert(value, path, depth)
    raise PayloadError(path, f"is a {type(value).__name__}, which has no exact JSON form")


_Converter = Callable[[Any, str, int], Plain]

_KINDS: tuple[tuple[type, _Converter], ...] = (
    (bool, lambda value, _path, _depth: bool(value)),
    (str, _text),
    (int, _integer),
    (float, _float),
    (Decimal, _decimal),
    (UUID, _native),
    (datetime, _datetime),
    (date, lambda value, _path, _depth: value.isoformat()),
    (time, _time),
    (timedelta, _native),
    (bytes, _bytes),
    (bytearray, _bytes),
    (list, _array),
    (tuple, _array),
    (set, _set),
    (frozenset, _set),
    (Mapping, _object),
)
_CONVERTERS: dict[type, _Converter] = {
    type(None): lambda _value, _path, _depth: None,
    dict: _object,
    **{kind: convert for kind, convert in _KINDS if kind is not Mapping},
}
