"""The codec port: an event's content to bytes, when it is written to the outbox, and back, at the other end."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

import msgspec

from .errors import UnknownEventError


class Content(msgspec.Struct, frozen=True, gc=False):
    """What an event says, independent of bytes: the plain payload in one version of its schema."""

    name: str
    version: int
    event_id: UUID
    occurred_at: datetime
    payload: Mapping[str, Any]


class Codec(Protocol):
    """One way to write content as bytes. Codecs are stateless and are called from any thread."""

    name: str
    """Unique among codecs; routes refer to it."""

    content_type: str
    """The media type of the bytes; readers choose the codec by it."""

    def encode(self, content: Content, headers: Mapping[str, str]) -> bytes:
        """The body. The same content and headers give the same bytes in every process."""
        ...

    def decode(self, body: bytes, headers: Mapping[str, str]) -> Content:
        """What `encode` was given. Raises `EventError` for bytes that are not of this codec; never imports or calls
        anything named by them.
        """
        ...


def content_from_headers(headers: Mapping[str, str], payload: Mapping[str, Any]) -> Content:
    """Content whose identity travels in the headers, as it does for every codec without an envelope."""
    try:
        return Content(
            name=headers["event_type"],
            version=int(headers["schema_version"].removeprefix("v")),
            event_id=_uuid(headers["event_id"]),
            occurred_at=parse_moment(headers["occurred_at"]),
            payload=payload,
        )
    except KeyError as missing:
        raise UnknownEventError(f"the message has no header {missing.args[0]!r}") from None
    except ValueError as error:
        raise UnknownEventError(f"the message has an unreadable header: {error}") from None


def parse_moment(written: str) -> datetime:
    """A point in time. Without a time zone it is none, and cannot be compared with others: `ValueError`."""
    found = datetime.fromisoformat(written)
    if found.utcoffset() is None:
        raise ValueError(f"the time {written!r} has no time zone")
    return found


def _uuid(written: str) -> UUID:
    try:
        return msgspec.convert(written, UUID)  # quicker than UUID, which knows braces and URNs, too
    except msgspec.ValidationError:
        return UUID(written)
