"""The store in memory with transactions that commit late, and somebody who watches what is done to it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pillarbox.outbox import Delivery, FailurePolicy, Lane, LaneName, Status
from pillarbox.transport import Message, Outcome
from tests.memory.log import MemoryLogStore
from tests.simulation.brokers import event_of
from tests.simulation.loop import Life

if TYPE_CHECKING:
    from .world import World

PROGRESS = frozenset({"announce", "amend", "settle"})
"""The calls that write progress."""


class SimulatedStore(MemoryLogStore):
    """Ids are given when a transaction writes, and rows appear when it commits."""

    def reserve(self, count: int) -> list[int]:
        """The ids of rows that may commit later, or never."""
        self._last_id += count
        return list(range(self._last_id - count + 1, self._last_id + 1))

    def commit(self, xid: int, ids: Sequence[int], deliveries: Sequence[Delivery]) -> None:
        """Let the rows of a transaction appear."""
        newest = self._last_id
        for row, delivery in zip(ids, deliveries, strict=True):
            self._last_id = row - 1
            self.append(None, [delivery], xid=xid)
            lane = self._lanes[LaneName(delivery.route, delivery.shard)]
            lane.fresh = dict(sorted(lane.fresh.items()))
        self._last_id = newest
        self.end(xid)

    def end_all(self) -> None:
        """Nobody is at work any more."""
        for xid in sorted(self._running):
            self.end(xid)

    def rows(self) -> Collection[Any]:
        """All that was ever committed, as it is kept."""
        return self._rows.values()

    def row(self, row: int) -> Any:
        """One of them."""
        return self._rows[row]

    def lanes(self) -> Mapping[LaneName, Any]:
        """All lanes, as they are kept."""
        return self._lanes

    def is_requested(self, row: int) -> bool:
        """Whether a person's request for it waits."""
        return any(request.row == row for request in self._lanes[self._rows[row].lane].requests.values())

    def is_halted(self, lane: LaneName) -> bool:
        """Whether the lane waits for a person."""
        trouble = self.trouble_of(lane)
        return trouble is not None and trouble.seconds is None


class Watch:
    """Looks at every write of progress, and at every request that leaves: sees what no topic would show."""

    def __init__(self, world: World, *, quiet: bool = False) -> None:
        self._world = world
        self._quiet = quiet
        self._deaths: dict[str, int] = {}
        self._accepts: set[tuple[str, str, str | None]] = set()
        """Relays with the topics and tenants of which the newest answer was not that all was rejected."""
        self.leases = not world.failover
        """Whether leases are what they seem."""

    @contextmanager
    def over(self, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Iterator[None]:
        """Watch one of the calls that are `PROGRESS`."""
        lane: Lane = args[0]
        kept = self._world.store.lanes()[lane.name]
        owned = (kept.epoch, kept.token) == (lane.epoch, lane.token)
        sending = [*kept.sending.values()]
        self._count_deaths(lane, options.get("attempts") or {})
        yield
        for stored in sending:
            if stored.status is Status.SENT:
                self._sent(stored, owned, lane)
        failures = args[1] if name == "amend" else args[1].failures if name == "announce" else ()
        for failure in failures:
            self._failed(self._world.store.row(failure.row), lane, dead=failure.retry_after is None)

    def _count_deaths(self, lane: Lane, attempts: Mapping[int, int]) -> None:
        """Whoever dies cannot say so: an attempt is counted before a deadly message leaves."""
        for row, count in attempts.items():
            stored = self._world.store.row(row)
            if lane.tries >= 3 and count > stored.row.attempts:
                event = stored.row.headers["event_id"]
                self._deaths[event] = self._deaths.get(event, 0) + 1

    def _sent(self, stored: Any, owned: bool, lane: Lane) -> None:
        if not owned:
            self._complain(f"fence: row {stored.id} became SENT by epoch {lane.epoch} of {lane}, which was over")
        if not self._world.has_arrived(stored.row) and stored.id not in self._world.forgotten:
            self._complain(f"I1 loss: row {stored.id} became SENT before it was stored")

    def _failed(self, stored: Any, lane: Lane, *, dead: bool) -> None:
        event = stored.row.headers["event_id"]
        allowed = self._world.rejections(event) + self._deaths.get(event, 0)
        if stored.row.attempts > allowed:
            self._complain(f"attempt: row {stored.id} has {stored.row.attempts} and was rejected {allowed} times")
        if dead and lane.route.on_failure is FailurePolicy.SKIP:
            self._world.ledger.may_be_late.add(self._world.identity(stored.row))

    def sending(self, life: Life, producer: str, messages: Sequence[Message]) -> None:
        """A request leaves."""
        relay = life.name
        for topic in life.relay._rejections._topics.values():
            for tenant, place in topic.places.items():
                if place.blocked and not topic.blocked and (relay, topic.name, tenant) in self._accepts:
                    self._complain(f"I11 poison: {relay} says that {place} rejects everything, just as it accepts some")
        if not self.leases:
            return
        name = self._world.producers[producer]
        kept = self._world.store.lanes()[name]
        if kept.locked_by != relay or kept.locked_until <= self._world.database_clock.monotonic():
            self._complain(f"lease: {relay} sends on {producer}, which is held by {kept.locked_by}")
        numbers = {stored.number: stored.row.headers["event_id"] for stored in kept.sending.values()}
        for message in messages:
            if numbers.get(message.number) != event_of(message):
                self._complain(f"announce: {relay} sends number {message.number} of {producer} without announcing it")

    def answered(self, life: Life, messages: Sequence[Message], outcome: Outcome) -> None:
        """A request has come to an end."""
        for accepted, indexes in ((False, [it.index for it in outcome.rejected]), (True, outcome.accepted)):
            for message in (messages[index] for index in indexes):
                place = life.name, message.topic, message.headers.get("tenant_id")
                (self._accepts.add if accepted else self._accepts.discard)(place)

    def _complain(self, violation: str) -> None:
        if not self._quiet:
            self._world.violations.append(violation)
