"""The bus: handlers of this process, each a destination of its own.

Before this: a delivery whose route is a handler. After it: the handler has run. A handler that fails is tried again by
itself, with the key waiting behind it; those that succeeded are not run again. A crash between the two runs a handler
twice, so handlers must bear that, as consumers of any broker must.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from . import telemetry
from .context import caused_by
from .outbox import Key
from .telemetry import SILENT, Activity, Signals
from .transport import Capabilities, Message, Outcome, Rejection

logger = logging.getLogger("pillarbox")

Handler = Callable[[Any], Any]

HANDLER_SECONDS = 300.0
"""A handler that takes longer hangs: it is given up, and tried again by itself, while others go on."""


class Bus:
    """A `Publisher` whose topics are the names of handlers."""

    capabilities = Capabilities(max_messages=20, timeout=HANDLER_SECONDS)  # what a crash may run again

    def __init__(
        self, handlers: Mapping[str, Handler], decode: Callable[[Message], object], signals: Signals = SILENT
    ) -> None:
        self._signals = signals
        self._handlers = handlers
        self._decode = decode

    def preflight(self, message: Message) -> str | None:  # noqa: ARG002  a handler may take anything
        return None

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:  # noqa: ARG002  nothing to open
        return {}

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:  # noqa: ARG002  there is one of us
        """Dispatch to the handlers, one after the other."""
        accepted: list[int] = []
        rejected: list[Rejection] = []
        stopped: set[Key] = set()
        for index, message in enumerate(messages):
            key = Key(message.headers.get("tenant_id"), message.key)
            if key in stopped:
                continue
            failure = await self._failure_of(message)
            if failure is None:
                accepted.append(index)
            else:
                logger.debug("handler %s failed", message.topic, exc_info=failure)
                rejected.append(Rejection(index, f"{type(failure).__name__}: {failure}"))
                stopped.add(key)
        return Outcome(accepted, rejected)

    async def close(self, producer: str | None = None) -> None:
        """Nothing is open."""

    async def _failure_of(self, message: Message) -> BaseException | None:
        try:
            if self._signals.traces:
                await self._dispatch_traced(message)
            else:
                await self._dispatch(message)
        except asyncio.CancelledError as cancelled:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return cancelled  # what the handler waited for was cancelled, not we
        except Exception as error:
            return error
        return None

    async def _dispatch_traced(self, message: Message) -> None:
        attributes: dict[str, str | int] = {
            "messaging.system": "pillarbox",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": message.topic,
            "messaging.message.id": message.headers["event_id"],
            "pillarbox.event_type": message.headers.get("event_type", ""),
        }
        activity = Activity(telemetry.PROCESS, message.topic, attributes, [message.headers])
        with self._signals.during(activity):
            try:
                await self._dispatch(message)
            except BaseException as error:
                activity.error = type(error).__name__
                raise

    async def _dispatch(self, message: Message) -> None:
        handler = self._handlers[message.topic]
        with caused_by(message.headers):
            event = self._decode(message)
            if inspect.iscoroutinefunction(handler):
                await handler(event)
            else:  # it may block, and our leases must be renewed meanwhile
                result = await asyncio.to_thread(handler, event)
                if inspect.isawaitable(result):
                    await result
