"""A destination without a broker: every message becomes a log line, for development and dry runs.

The line has the message's destination, never its content.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ..transport import Capabilities, Message, Outcome

logger = logging.getLogger("pillarbox.transports.logging")

NO_LIMITS = Capabilities(max_body_bytes=sys.maxsize, max_header_bytes=sys.maxsize)


class LoggingTransport:
    """A `Publisher` that logs one line per message, at INFO, to ``pillarbox.transports.logging``.

    It accepts every message. With the `Capabilities` of a real broker, events that are too large for that broker are
    refused when they are written, as with the broker itself.
    """

    def __init__(self, capabilities: Capabilities = NO_LIMITS) -> None:
        self._capabilities = replace(capabilities, numbered=False)  # a log remembers no numbers

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def preflight(self, message: Message) -> str | None:  # noqa: ARG002  it accepts every message
        return None

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:  # noqa: ARG002  nothing to open
        return {}

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:  # noqa: ARG002  any producer
        for message in messages:
            # %r escapes characters that could fake a line or a field, or control a terminal.
            logger.info(
                "topic=%r key=%r event_id=%r event_type=%r tenant=%r size=%d",
                message.topic,
                message.key,
                message.headers.get("event_id"),
                message.headers.get("event_type"),
                message.headers.get("tenant_id"),
                len(message.body),
            )
        return Outcome(range(len(messages)))

    async def close(self, producer: str | None = None) -> None:
        """Do nothing: there is nothing to close."""
