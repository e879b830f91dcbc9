"""Strict JSON: the body is the payload; identity and context are in the headers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..codec import Content, content_from_headers
from ..errors import UnknownEventError


class JsonCodec:
    """Compact JSON objects in UTF-8, with fields in the order of their declaration."""

    name = "json"
    content_type = "application/json"

    def encode(self, content: Content, headers: Mapping[str, str]) -> bytes:  # noqa: ARG002  the interface
        return msgspec.json.encode(content.payload)

    def decode(self, body: bytes, headers: Mapping[str, str]) -> Content:
        return content_from_headers(headers, parse_object(body))


_objects = msgspec.json.Decoder(dict[str, object])  # created once: that takes longer than decoding a small body


def parse_object(body: bytes) -> dict[str, object]:
    """A JSON object. Raises `UnknownEventError` for other bodies."""
    try:
        return _objects.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UnknownEventError(f"the body is not a JSON object: {error}") from None
