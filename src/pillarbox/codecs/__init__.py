"""The codecs of Pillarbox, by name."""

from __future__ import annotations

import re

from ..codec import Codec
from ..errors import ConfigurationError, UnknownEventError
from .cloudevents import CloudEventsCodec
from .json import JsonCodec

BUILT_IN: tuple[Codec, ...] = (JsonCodec(), CloudEventsCodec())

_UTF8 = re.compile(r"""([^;\s]+)\s*(?:;\s*charset\s*=\s*(?:utf-?8|"utf-?8"))?\s*""", re.IGNORECASE)


class Codecs:
    """The codecs of a box: by name for writing, by content type for reading."""

    def __init__(self, more: tuple[Codec, ...] = ()) -> None:
        self._by_name: dict[str, Codec] = {}
        self._by_content_type: dict[str, Codec] = {}
        for codec in (*BUILT_IN, *more):
            self._by_name[codec.name] = self._by_content_type[codec.content_type] = codec

    def named(self, name: str) -> Codec:
        """The codec of this name."""
        try:
            return self._by_name[name]
        except KeyError:
            raise ConfigurationError(f"unknown codec {name!r}; known are: {', '.join(sorted(self._by_name))}") from None

    def reading(self, content_type: str) -> Codec:
        """The codec for bodies of this content type. The parameter ``charset=utf-8`` changes nothing."""
        found = self._by_content_type.get(content_type)
        if found is None and (utf8 := _UTF8.fullmatch(content_type)):
            found = self._by_content_type.get(utf8[1].lower())
        if found is None:
            raise UnknownEventError(f"no codec reads the content type {content_type!r}")
        return found
