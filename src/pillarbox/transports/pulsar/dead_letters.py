"""The dead-letter topic of a group, written to as Pulsar's own clients do."""

from __future__ import annotations

import asyncio
from typing import Any

from .official import PATIENCE
from .shelf import Copy


class DeadLetters:
    """Opens its producer with the first letter: most groups never write one."""

    def __init__(self, client: Any, topic: str, max_redeliveries: int) -> None:
        self.max_redeliveries = max_redeliveries
        self._client = client
        self._topic = topic
        self._producer: Any = None
        self._turn = asyncio.Lock()  # they are stored in the order of their refusal

    async def send(self, copy: Copy) -> None:
        """Returns when the broker has stored it. Whatever is raised, it may be sent again."""
        async with self._turn:
            await asyncio.to_thread(self._send, copy)

    def _send(self, copy: Copy) -> None:
        if self._producer is None:
            self._producer = self._client.create_producer(self._topic, send_timeout_millis=PATIENCE * 1_000)
        origin = {"ORIGIN_MESSAGE_ID": str(copy.id), "REAL_TOPIC": copy.physical}
        message = copy.message
        self._producer.send(message.body, {**message.headers, **origin}, message.key or None)
