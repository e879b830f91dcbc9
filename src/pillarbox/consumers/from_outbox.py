"""A consumer without a broker: the outbox itself brings it what its own service has written.

The consumer is a destination of its own, like a durable handler: its events are written to the outbox under a route
with its name, a relay brings them in order per key, and what it has dealt with counts as delivered. A message that
fails for now is rejected for now: the relay lets its key wait, and brings it again. While its database is away, so is
the consumer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from ..relay import Relay
from ..transport import Capabilities, Message, Outcome, Received, Rejection, Verdict
from .desk import Line, Work
from .intake import STALLED, Deals, Flow
from .processing import Dealt

LEFT = 60.0
"""Seconds for which a drain leaves what has failed again and again."""
AT_ONCE = 20
"""How many messages a lane hands over to a consumer that has a transaction for each."""


class OutboxIntake:
    """`Intake` from the outbox of the same box. ``relay`` makes a relay for a destination."""

    def __init__(self, deals: Deals, flow: Flow, relay: Callable[[ConsumerDestination], Relay]) -> None:
        self._deals = deals
        self._flow = flow
        self._destination: ConsumerDestination | None = None
        self._make_relay = relay
        self._relay: Relay | None = None

    @property
    def connected(self) -> bool:
        return self._relay is not None and self._relay.healthy

    def backlog(self) -> int | None:
        return None

    def at_hand(self) -> list[Work]:
        return [] if self._destination is None else self._destination.at_hand()

    def stop(self) -> None:
        if self._relay is not None:
            self._relay.stop()

    async def run(self) -> None:
        self._relay = self._begin()
        try:
            await self._relay.run()
        finally:
            self._relay = None

    async def drain(self, idle: float) -> None:  # noqa: ARG002  the outbox knows when it is empty
        await self._begin(drains=True).drain()

    def _begin(self, *, drains: bool = False) -> Relay:
        self._destination = ConsumerDestination(self._deals, self._flow, drains=drains)
        return self._make_relay(self._destination)


class ConsumerDestination:
    """A `Publisher` that deals with what it is sent."""

    def __init__(self, deals: Deals, flow: Flow, *, drains: bool = False) -> None:
        self.capabilities = Capabilities(max_messages=max(flow.batch, AT_ONCE), timeout=None)  # `Consumer` has one
        self._deals = deals
        self._batch = flow.batch
        self._hands = asyncio.Semaphore(flow.concurrency)
        """Lanes send at the same time, and each of them at most once."""
        self._drains = drains
        self._failures: Counter[Line] = Counter()
        """How often each line has failed in a drain, which leaves those that fail again and again."""
        self._working: dict[int, Sequence[Work]] = {}

    def at_hand(self) -> list[Work]:
        """What is being dealt with."""
        return [work for works in [*self._working.values()] for work in works]

    def preflight(self, message: Message) -> str | None:  # noqa: ARG002  a consumer looks at everything
        return None

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:  # noqa: ARG002  nothing to open
        return {}

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:  # noqa: ARG002  there is one of us
        """Deal with them, those of one tenant together, and say what is left."""
        works = [Work(Received(message), (message.headers.get("tenant_id"), message.key)) for message in messages]
        places = {id(work): index for index, work in enumerate(works)}
        accepted: list[int] = []
        rejected: dict[Line, Rejection] = {}
        away = ""
        self._working[id(works)] = works
        try:
            for batch in _batches(works, self._batch):
                if not (free := [work for work in batch if work.line not in rejected]):
                    continue
                async with self._hands:
                    dealt = await self._deals.deal(free)
                accepted += [places[id(work)] for work in dealt.settled]
                for line, rejection in self._postponed(dealt, places).items():
                    rejected.setdefault(line, rejection)
                if away := dealt.away:
                    break
        finally:
            del self._working[id(works)]
        verdict = Verdict.UNAVAILABLE if away else None
        return Outcome(sorted(accepted), [*rejected.values()], unfinished=verdict, reason=away)

    def _postponed(self, dealt: Dealt, places: Mapping[int, int]) -> dict[Line, Rejection]:
        """What is to be offered again later, by line. If the database is away, only what a handler has failed at."""
        lines = dealt.reasons if dealt.away else dealt.delays
        other = next(iter(dealt.reasons.values()), "")
        if self._drains:
            self._failures.update(lines.keys())
        later: dict[Line, Rejection] = {}
        for work in dealt.left:
            if work.line in lines and work.line not in later:
                wait = LEFT if self._failures[work.line] >= STALLED else dealt.delays[work.line]
                later[work.line] = Rejection(places[id(work)], dealt.reasons.get(work.line, other), wait)
        return later

    async def close(self, producer: str | None = None) -> None:
        """Nothing is open."""


def _batches(works: Sequence[Work], size: int) -> list[list[Work]]:
    """Batches of one tenant each, in order per key."""
    by_tenant: dict[str | None, list[Work]] = {}
    for work in works:
        by_tenant.setdefault(work.tenant, []).append(work)
    return [theirs[start : start + size] for theirs in by_tenant.values() for start in range(0, len(theirs), size)]
