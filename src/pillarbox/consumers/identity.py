"""How the inbox knows a message: by its event, or by all that it says if it cannot be read."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from uuid import RFC_4122, UUID

from ..inbox import Arrival, digest_of
from ..transport import Message
from .handling import Incoming


class KnownBy(StrEnum):
    """What the inbox knows a message by."""

    EVENT = "event"
    """The id of its event."""
    CONTENT = "content"
    """A hash of all that it says: it could not be read."""
    BODY = "body"
    """A hash of the id of its event and of its body: another body had come under that id before."""


def arrival_in(incoming: Incoming) -> Arrival:
    """An event that was read, as the inbox knows it. Some codecs keep its id in the body."""
    context = incoming.context
    return Arrival(_known_as(context.event_id), context.schema_version, digest_of(context.message.body))


def arrival_of(message: Message) -> Arrival:
    """A message that cannot be read, as the inbox knows it. Once it can, the inbox gets the id of its event, too."""
    headers = message.headers
    said = [f"{name}={headers[name]}".encode(errors="surrogatepass") for name in sorted(headers)]
    place = [part.encode(errors="surrogatepass") for part in (message.topic, message.key)]
    return Arrival(_name(*place, *said, message.body), 0, digest_of(message.body))


def named_event(message: Message) -> UUID:
    """Which event a message is about, by its header; of one without, a hash of all that it says."""
    try:
        return _known_as(UUID(message.headers["event_id"]))
    except (KeyError, ValueError):
        return arrival_of(message).event_id


def altered(arrival: Arrival) -> Arrival:
    """A message whose id was seen with another body, as the inbox knows it: each such body once."""
    return Arrival(_name(arrival.event_id.bytes, arrival.digest), arrival.schema_version, arrival.digest)


def why_altered(arrival: Arrival) -> str:
    """Why such a message fails."""
    return f"event {arrival.event_id} was seen before in version {arrival.schema_version}, with another body"


def line_of(message: Message) -> tuple[str, str | None, str] | None:
    """Its unit of order: a key of a tenant on a topic. A message without a key has none."""
    return (message.topic, message.headers.get("tenant_id"), message.key) if message.key else None


def _known_as(event_id: UUID) -> UUID:
    """By its id, unless that is of a variant that nobody uses. MariaDB takes no such."""
    return event_id if event_id.variant == RFC_4122 else _name(event_id.bytes)


def _name(*parts: bytes) -> UUID:
    content = hashlib.blake2b(digest_size=16)
    for part in parts:
        content.update(len(part).to_bytes(8, "big") + part)
    return UUID(bytes=content.digest(), version=5)
