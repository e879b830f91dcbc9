"""The codec port: encodes the content of an event when it is written to the outbox, and decodes it in a consumer."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

import msgspec

from .errors import UnknownEventError


class Content(msgspec.Struct, frozen=True, gc=False):
    """Content of an event, independent of bytes: the plain payload in one schema version."""

    name: str
    version: int
    event_id: UUID
    occurred_at: datetime
    payload: Mapping[str, Any]


class Codec(Protocol):
    """A format of bodies. Codecs are stateless and are called from any thread."""

    name: str
    """Unique among codecs; routes refer to it."""

    content_type: str
    """Media type of the bodies; consumers choose the codec by it."""

    def encode(self, content: Content, headers: Mapping[str, str]) -> bytes:
        """Encode a body. The same content and headers give the same bytes in every process."""
        ...

    def decode(self, body: bytes, headers: Mapping[str, str]) -> Content:
        """Decode a body of this codec. Raises `EventError` for others. Never imports or calls a name from the body."""
        ...


def content_from_headers(headers: Mapping[str, str], payload: Mapping[str, Any]) -> Content:
    """Content whose identity is in the headers, as for every codec without an envelope."""
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
    """Parse a point in time. Without a time zone it is ambiguous and raises `ValueError`."""
    found = datetime.fromisoformat(written)
    if found.utcoffset() is None:
        raise ValueError(f"the time {written!r} has no time zone")
    return found


def _uuid(written: str) -> UUID:
    try:
        return msgspec.convert(written, UUID)  # quicker than UUID, which also accepts braces and URNs
    except msgspec.ValidationError:
        return UUID(written)
