"""Takes over a service's own box for a test: replaces its transports by brokers in memory, and its database.

Modules make a box, routes, consumers and handlers when they are imported, and their functions refer to them. So a test
uses the existing box, and restores it afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from sqlalchemy import make_url

from ..app import Pillarbox
from ..consumers.consumer import Consumer
from ..consumers.handling import Handlers
from ..consumers.hands import Hands
from ..errors import ConfigurationError
from ..retry import RetryPolicy
from ..transports.memory import MemoryTransport
from .faults import Failures, Faults, FaultyEffects, FaultyProcessor

AT_ONCE = RetryPolicy(base=0.001, cap=0.001)
"""Tests do not wait for backoffs."""


class Takeover:
    """Takes over one box for one test."""

    def __init__(self, box: Pillarbox, faults: Faults, failures: Failures) -> None:
        self.box = box
        self.brokers = {name: MemoryTransport(given.capabilities) for name, given in box.transports.items()}
        self.processors: dict[str, FaultyProcessor] = {}
        """The processor of each consumer."""
        self._faults = faults
        self._failures = failures
        self._kept: list[_Kept] = []

    def begin(self, url: str) -> None:
        """Replace the transports and the database of the box, which is not started yet."""
        box = self.box
        if box._started:
            raise ConfigurationError("the box is started already: leave that to the fixture, and stop it before a test")
        self._kept = [_Kept(box), _Kept(box.router), _Kept(box._outbox), _Kept(box.tenancy)]
        box._given, box._engine, box._unit_sessions = url, None, None
        if box._shards is None:
            box._shards = 1  # a lane per route: there is little to do, and polls take time
        if make_url(url).get_backend_name() != "postgresql":
            box._row_security = box.tenancy._row_security = False  # only PostgreSQL has it
        given, box.transports = box.transports, {**self.brokers}
        for consumer in self.consumers.values():
            self._adopt(consumer, given)

    @property
    def consumers(self) -> dict[str, Consumer]:
        """The consumers of the box, including its durable handlers."""
        return self.box.consumers | self.box.handlers

    def adopt(self) -> None:
        """Take over consumers that were made since."""
        for name, consumer in self.consumers.items():
            if name not in self.processors:
                self._adopt(consumer, self.box.transports)

    def end(self) -> None:
        """Restore everything. The box must have been stopped."""
        for kept in reversed(self._kept):
            kept.put_back()
        self._kept = []

    def _adopt(self, consumer: Consumer, given: Mapping[str, Any]) -> None:
        processor, subscriber = consumer._processor, consumer.subscriber
        self._kept += [_Kept(consumer), _Kept(processor), _Kept(consumer._progress)]
        if isinstance(consumer.effects, Handlers):
            self._kept.append(_Kept(consumer.effects))
        effects = processor._effects = FaultyEffects(processor._effects, self._faults)
        faulty = FaultyProcessor(consumer.name, processor, effects, self._faults, self._failures)
        self.processors[consumer.name] = faulty
        # Primitives of asyncio belong to one loop, and the next test has another.
        consumer._finished = asyncio.Event()
        consumer._finished.set()
        consumer._hands = Hands(consumer._hands.concurrency)
        stand_in = None if subscriber is None else self._stand_in(consumer, subscriber, given)
        consumer._intakes = consumer._make_intakes(faulty, stand_in, AT_ONCE)

    def _stand_in(self, consumer: Consumer, subscriber: object, given: Mapping[str, Any]) -> MemoryTransport:
        """The broker in place of a subscriber. A subscriber that is not a transport, as for Pulsar, shares the broker
        of the routes to its topics; otherwise the only broker, or one with the consumer's name.
        """
        same = [name for name, transport in given.items() if transport is subscriber]
        routed = [route.to for route in self.box.router._routes if route.topic in consumer.topics]
        only = [*self.brokers] if len(self.brokers) == 1 else []
        return self.brokers.setdefault([*same, *routed, *only, consumer.name][0], MemoryTransport())


class _Kept:
    """The state of an object, to be restored. Until then, the object has copies of its mutable values."""

    def __init__(self, thing: object) -> None:
        self._thing = thing
        self._state = {**vars(thing)}
        vars(thing).update({name: _copy(value) for name, value in self._state.items()})

    def put_back(self) -> None:
        vars(self._thing).clear()
        vars(self._thing).update(self._state)


def _copy(value: Any) -> Any:
    """Copies lists and dicts, and lists in dicts, which may be changed in place."""
    if type(value) is list:
        return [*value]
    if type(value) is dict:
        return {key: [*each] if type(each) is list else each for key, each in value.items()}
    return value
