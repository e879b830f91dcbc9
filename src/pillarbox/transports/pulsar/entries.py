"""Entries: groups of messages that are stored together, and the compression of their payload.

The broker stores, deduplicates and dispatches whole entries. Cut ``by_key``, an entry has one key, which suits every
kind of subscription. ``mixed`` entries are larger and so faster. A key_shared subscription dispatches by the key of the
entry, so with mixed entries keys lose their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

import lz4.block
import zstandard

from ...transport import Message
from . import wire_pb2 as wire
from .frames import Entry, packed

MAX_MESSAGES = 1_000
MAX_BYTES = 524_288
"""Approximate size of a full entry. A larger message has an entry to itself."""


class Cut(StrEnum):
    """The keys that an entry may have."""

    BY_KEY = "by_key"
    MIXED = "mixed"


class Compression(StrEnum):
    """Compression of payloads, where it saves space."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


_COMPRESSORS: dict[Compression, tuple[wire.Compression, Callable[[bytes], bytes]]] = {
    Compression.LZ4: (wire.LZ4, lambda payload: lz4.block.compress(payload, store_size=False)),
    Compression.ZSTD: (wire.ZSTD, zstandard.ZstdCompressor(level=1).compress),
}


class Cutter:
    """Cuts the messages of one topic into entries, in their order."""

    def __init__(self, cut: Cut, compression: Compression = Compression.NONE, compress_from: int = 4_096) -> None:
        self._by_key = cut is Cut.BY_KEY
        self._compressor = _COMPRESSORS.get(compression)
        self._compress_from = compress_from

    def entries(
        self, messages: Sequence[Message], indexes: Sequence[int], *, max_bytes: int, after: int = -1
    ) -> list[Entry]:
        """``indexes`` are the messages' positions in the request. No entry of several messages exceeds ``max_bytes``.
        No entry spans the number ``after``, which the broker has already: it would drop the whole entry.
        """
        return [self._entry(messages[start:end], indexes[start:end], parts)
                for start, end, parts in self._runs(messages, min(max_bytes, MAX_BYTES), after)]  # fmt: skip

    def _runs(self, messages: Sequence[Message], limit: int, after: int) -> Iterator[tuple[int, int, list[bytes]]]:
        parts: list[bytes] = []
        start = size = 0
        key = messages[0].key if messages else ""
        by_key, number = self._by_key, 0
        for index, message in enumerate(messages):
            head, body = packed(message)
            length = len(head) + len(body)
            full = size + length > limit or index - start >= MAX_MESSAGES or (by_key and message.key != key)
            if (full or number <= after < message.number) and index > start:
                yield start, index, parts
                parts, start, size = [], index, 0
            key, number = message.key, message.number
            parts += (head, body)
            size += length
        if parts:
            yield start, len(messages), parts

    def _entry(self, messages: Sequence[Message], indexes: Sequence[int], parts: list[bytes]) -> Entry:
        payload = b"".join(parts)
        size = len(payload)
        compression = wire.NONE
        if self._compressor is not None and size >= self._compress_from:
            kind, compress = self._compressor
            smaller = compress(payload)
            if len(smaller) < size:
                compression, payload = kind, smaller
        key = messages[0].key if self._by_key or len(messages) == 1 else None
        return Entry(messages, payload, indexes, key, compression, size)
