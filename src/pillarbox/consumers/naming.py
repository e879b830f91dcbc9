"""How the inbox and letters know a message: by its event, or by what it says if it names none."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from uuid import RFC_4122, UUID

from ..errors import EventError, TenancyError
from ..inbox import Arrival, Letter, LetterKind, digest_of
from ..redaction import redacted
from ..route import MAX_KEY_BYTES, MAX_TOPIC, check_tenant
from ..transport import Message
from .handling import Incoming

_MAX_NAME = 200
VERSIONS = 100_000_000
"""Nobody has so many, and every database takes their numbers."""


def identity(message: Message) -> tuple[str | None, UUID]:
    """Which message this is: by its event, or by all that it says if it names none."""
    headers = message.headers
    event_id = _event_id(headers)
    if event_id is None:
        said = [f"{name}={headers[name]}".encode() for name in sorted(headers)]
        event_id = _name(message.topic.encode(), message.key.encode(), *said, message.body)
    return headers.get("tenant_id"), event_id


def arrival_in(incoming: Incoming) -> Arrival:
    """An event that was read, as the inbox knows it. Some codecs keep its id in the body."""
    context = incoming.context
    return Arrival(known_as(context.event_id), context.schema_version, digest_of(context.message.body))


def arrival_of(message: Message) -> Arrival:
    """A message that cannot be read, as the inbox knows it."""
    return Arrival(identity(message)[1], _schema_version(message), digest_of(message.body))


def by_content(arrival: Arrival) -> Arrival:
    """Named by what it says, too, so that each of several messages with one name is told of once."""
    name = _name(arrival.event_id.bytes, arrival.digest)
    return Arrival(name, arrival.schema_version, arrival.digest)


def _event_id(headers: Mapping[str, str]) -> UUID | None:
    try:
        found = UUID(headers["event_id"])
    except (KeyError, ValueError):
        return None
    return known_as(found)


def known_as(event_id: UUID) -> UUID:
    """What the inbox calls an event: by its id, unless that is of a variant that nobody uses. MariaDB takes no such."""
    return event_id if event_id.variant == RFC_4122 else _name(event_id.bytes)


def _schema_version(message: Message) -> int:
    version = message.headers.get("schema_version", "").removeprefix("v")
    return int(version) if version.isdecimal() and len(version) < len(str(VERSIONS)) else 0


def _name(*parts: bytes) -> UUID:
    content = hashlib.blake2b(digest_size=16)
    for part in parts:
        content.update(len(part).to_bytes(8, "big") + part)
    return UUID(bytes=content.digest(), version=5)


def _fitting(text: str, limit: int) -> str:
    """As much of a stranger's text as a column takes."""
    return text.replace("\0", "?").encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def letter_about(
    consumer: str, message: Message, kind: LetterKind, reason: str, *, arrival: Arrival, attempts: int = 0
) -> Letter:
    """A letter that every database takes, whatever strangers have written into the message."""
    headers = message.headers
    topic, key = _fitting(message.topic, MAX_TOPIC), _fitting(message.key, MAX_KEY_BYTES)
    return Letter(
        consumer=consumer,
        kind=kind,
        reason=redacted(reason),
        message=Message(topic, key, message.body, headers),
        event_id=_event_id(headers) or (None if arrival.event_id == identity(message)[1] else arrival.event_id),
        event_type=_fitting(headers.get("event_type", ""), _MAX_NAME),
        schema_version=arrival.schema_version,
        tenant=_tenant_of(message),
        attempts=max(1, attempts),
    )


def _tenant_of(message: Message) -> str | None:
    """Whose it is; nobody's, if no tenant can be called so."""
    tenant = message.headers.get("tenant_id")
    try:
        return None if tenant is None else check_tenant(tenant)
    except (EventError, TenancyError):
        return None
