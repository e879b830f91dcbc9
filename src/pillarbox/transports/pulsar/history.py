"""Reads the stored messages of topics without a group, by readers with non-durable subscriptions. The broker removes
these with the connection, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ...transport import Message
from . import official_client
from .credentials import said
from .names import TopicName
from .templates import TopicFinder

PAGE = 2_000
"""Number of messages that are read at a time."""
_PATIENCE_MS = 30_000
"""How long the broker may take to deliver a message that it has."""
_log = logging.getLogger(__name__)

_Place = tuple[int, int]
"""Ledger and entry of a message."""


class PulsarHistory:
    """Some topics, and the existing topics of templates, from their first message on."""

    def __init__(self, client: Any, plain: Mapping[TopicName, str], finder: TopicFinder | None) -> None:
        self._pulsar = official_client.load()
        self._client = client
        self._plain = plain
        """Topics with the names that the user gave them."""
        self._finder = finder
        self._readers: dict[str, Any] = {}

    async def pages(self) -> AsyncGenerator[Sequence[Message], None]:
        names = self._plain
        if self._finder is not None:
            await self._finder.look()
            names = {**self._finder.found, **self._plain}
        topic = ""
        try:
            for topic, reader, end in await asyncio.to_thread(self._open, names):
                more = True
                while more:
                    page, more = await asyncio.to_thread(self._page, topic, reader, end)
                    if page:
                        yield page
        except self._pulsar.PulsarException as error:
            raise ConnectionError(f"{topic or ', '.join(names.values())} cannot be read again: {said(error)}") from None

    async def aclose(self) -> None:
        await asyncio.to_thread(self._client.shutdown)
        if self._finder is not None:
            await self._finder.close()

    def _open(self, names: Mapping[TopicName, str]) -> list[tuple[str, Any, _Place]]:
        """The partitions that have more messages, each with a reader and the place of its last message."""
        found = []
        for name, topic in names.items():
            for partition in self._client.get_topic_partitions(str(name)):
                if partition not in self._readers:
                    self._readers[partition] = self._reader(partition, self._pulsar.MessageId.earliest)
                reader = self._readers[partition]
                if reader.has_message_available() and (end := self._end(partition)) is not None:
                    found.append((topic, reader, end))
        return found

    def _end(self, partition: str) -> _Place | None:
        last = self._reader(partition, self._pulsar.MessageId.latest, start_message_id_inclusive=True)
        try:
            return _place(last.read_next(_PATIENCE_MS)) if last.has_message_available() else None
        finally:
            last.close()

    def _reader(self, partition: str, start: Any, **options: Any) -> Any:
        return self._client.create_reader(partition, start, **options)

    def _page(self, topic: str, reader: Any, end: _Place) -> tuple[list[Message], bool]:
        """Read some messages. Returns them and whether there may be more up to the end. A message published after the
        end does no harm.
        """
        page: list[Message] = []
        while reader.has_message_available():
            found = reader.read_next(_PATIENCE_MS)
            try:
                page.append(Message(topic, found.partition_key(), found.data(), found.properties()))
            except UnicodeDecodeError as error:
                _log.error("message %s of %s is left out, its key or properties are no text: %s",
                           found.message_id(), topic, said(error))  # fmt: skip
            if _place(found) > end:
                return page, False
            if len(page) >= PAGE:
                return page, True
        return page, False


def _place(found: Any) -> _Place:
    return found.message_id().ledger_id(), found.message_id().entry_id()
