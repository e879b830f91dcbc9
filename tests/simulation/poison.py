"""Writers whose events are poisoned in part: everything else must get through, and soon."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum
from itertools import count, cycle
from typing import TYPE_CHECKING, Any

from pillarbox.outbox import Delivery, Key, Status
from pillarbox.transport import Capabilities
from tests.simulation.brokers import FOR_EVER, UNSENDABLE
from tests.simulation.checker import Entry
from tests.simulation.writers import Transaction, Writers
from tests.transport_bugs import Bug

if TYPE_CHECKING:
    from .world import World

SHARES = (0.05, 0.2, 0.5, 0.95)
TENANTS = (None, "one", "two")
FEW, MANY = 10, 80
"""Keys: too few to be evidence against a destination, or enough."""
SOON = 40.0
"""Seconds within which a healthy event must arrive when nothing else goes wrong any more."""
LATER = "later-"


class Poison(StrEnum):
    """What is wrong."""

    SHARE = "share"
    """A share of the keys is rejected."""
    TENANT = "tenant"
    """All keys of a tenant are rejected, until a person finds out why."""
    BURSTS = "bursts"
    """Now and then everything of a tenant, or of a topic, is rejected for a while."""
    BUGS = "bugs"
    """Some events make the transport misbehave."""


class Poisoners(Writers):
    """They write more, and more at once, and go on until all that is poisoned has found its end."""

    many_calls = 50_000
    batches = (8, 100)

    def __init__(self, world: World, kind: Poison | None) -> None:
        super().__init__(world)
        self._draw = draw = random.Random(f"{world.seed} poison")
        self.kind = kind or draw.choice([*Poison])
        self.is_poisoned = self.kind in (Poison.SHARE, Poison.BUGS)
        self.deadly = False  # whoever dies of an event takes his time
        self._bitterness = draw.choice((0.0, 0.0, 0.05))
        self._tenants = draw.choice((TENANTS, TENANTS, (None,), ("one",)))
        self._keys = [Key(draw.choice(self._tenants), f"k{number}") for number in range(draw.choice((FEW, MANY)))]
        self._poisoned = self._choose_poisoned()
        self._begun: set[Key] = set()
        self._numbers = count()
        self._is_turn = cycle((True, False))
        self._well_since: dict[int, float] = {}
        """Since when rows wait though nothing is wrong with their keys any more."""
        self._is_told = False

    def _choose_poisoned(self) -> set[Key]:
        draw = self._draw
        match self.kind:
            case Poison.SHARE:
                return {*draw.sample(self._keys, max(1, round(len(self._keys) * draw.choice(SHARES))))}
            case Poison.TENANT:
                tenant = draw.choice(self._tenants)
                return {key for key in self._keys if key.tenant == tenant}
            case Poison.BUGS:
                return {*draw.sample(self._keys, draw.choice((1, 3)))}
        return set()

    def capabilities(self, numbered: bool) -> Capabilities:
        return Capabilities(numbered=numbered, max_messages=self._draw.choice((6, 100)), timeout=2.0)

    def plan(self, seconds: float) -> None:
        super().plan(seconds)
        if self.kind is Poison.BURSTS:
            chaos, draw = self._world.chaos, self._draw
            topics = [f"{it.topic}-{draw.randrange(2)}" for it in self._world.routes if it.destination == "broker"]
            for _ in range(draw.choice((1, 3))):
                victim = draw.choice([*self._tenants, *topics])
                rejected = self._world.broker.rejected
                began = draw.random() * seconds
                chaos.later(began, rejected.add, victim)
                chaos.later(began + draw.random() * seconds, rejected.discard, victim)

    def _choose(self, free: Sequence[Key]) -> list[Key]:
        return self._draw.sample(free, min(len(free), self._draw.choice((1, 4, MANY))))

    def _event(self, key: Key) -> list[Delivery]:
        deliveries, broker = super()._event(key), self._world.broker
        event = str(deliveries[0].event_id)
        if key not in self._poisoned or key in self._begun:
            return deliveries
        if self.kind is not Poison.TENANT:
            self._begun.add(key)  # the others of the key wait behind this one
        if self.kind is Poison.BUGS:
            broker.bugs[event] = self._draw.choice([*Bug])
        else:
            broker.refusals[event] = self._world.plain.refusals[event] = FOR_EVER
        return deliveries

    def go_on(self) -> None:
        """The service goes on as well: without any success nothing tells whose fault rejections are."""
        if not next(self._is_turn) or all(it.row.key.startswith(LATER) for it in self._waiting()):
            return
        store = self._world.store
        for tenant in self._tenants:
            if self.kind is not Poison.TENANT or tenant not in {key.tenant for key in self._poisoned}:
                deliveries = super()._event(Key(tenant, f"{LATER}{next(self._numbers)}"))
                entries = [Entry(it.topic, it.tenant, it.key, it.event_id, it.body) for it in deliveries]
                self.commit(Transaction(store.begin(), store.reserve(len(entries)), deliveries, set()), entries)

    def overdue(self) -> list[str]:
        waiting, now = self._waiting(), self._world.chaos.loop.time()
        ill = {(it.lane.route, it.row.order_key) for it in waiting if self._is_ill(it)}
        well = [it for it in waiting if (it.lane.route, it.row.order_key) not in ill]
        self._well_since = {it.id: self._well_since.get(it.id, now) for it in well}
        late = [it for it in well if self._well_since[it.id] + SOON < now and not self._world.store.is_halted(it.lane)]
        if not late or self._is_told:
            return []
        self._is_told = True
        return [f"I11 poison: row {it.id} waits, and nothing is wrong with it, nor with its key" for it in late]

    def _waiting(self) -> list[Any]:
        return [it for it in self._world.store.rows() if it.status not in (Status.SENT, Status.DISCARDED)]

    def _is_ill(self, stored: Any) -> bool:
        event, row = stored.row.headers["event_id"], stored.row
        return (
            Key(row.tenant, row.key) in self._poisoned
            or stored.status is Status.FAILED
            or row.body.startswith(UNSENDABLE)
            or event in self._world.broker.bugs
            or any(it.refusals.get(event, 0) > 0 for it in (self._world.broker, self._world.plain))
        )
