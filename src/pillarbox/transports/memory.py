"""A broker in memory, for tests and first steps."""

from __future__ import annotations

from collections import defaultdict

from ..transport import Capabilities, Message


class MemoryTransport:
    """Keeps what was sent to it, per topic, in the order of arrival."""

    def __init__(self, capabilities: Capabilities | None = None) -> None:
        self._capabilities = capabilities or Capabilities()
        self._topics: defaultdict[str, list[Message]] = defaultdict(list)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def sent(self, topic: str) -> list[Message]:
        """All messages of a topic so far."""
        return list(self._topics[topic])
