"""Bodies that people put in the place of others."""

from __future__ import annotations

from ..codec import Content
from ..codecs.cloudevents import CloudEventsCodec
from ..codecs.json import parse_object
from ..errors import EventError
from ..payload import plain as exact
from ..transport import Capabilities, Message
from .output import CommandError, Exit


def check_body(new: bytes, old: Message) -> Content | None:
    """Refuse a body in place of the old one that no consumer could read. What a CloudEvent says comes back, as it has
    its identity in the body; None of anything else.
    """
    limit = max(len(old.body), Capabilities().max_body_bytes)
    if len(new) > limit:
        raise CommandError(f"the body has {len(new):,} bytes, and {limit:,} are allowed", Exit.PROBLEM)
    kind = old.headers.get("content_type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        return None
    try:
        exact(parse_object(new))
        return CloudEventsCodec().decode(new, old.headers) if kind == CloudEventsCodec.content_type else None
    except EventError as error:
        raise CommandError(f"the body cannot be read as {kind}: {error}", Exit.PROBLEM) from None
