"""Those who write: transactions that overlap, commit late with low ids, or roll back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from pillarbox.outbox import Delivery, Key, LaneName, RouteRecord, stable_hash
from pillarbox.transport import Capabilities
from tests.simulation.brokers import FOR_EVER, UNSENDABLE
from tests.simulation.checker import Entry

if TYPE_CHECKING:
    from .store import SimulatedStore
    from .world import World

BITTERNESS = (0.05, 0.1, 0.4)
"""How many events are rejected at first."""
MANY_DEADLY = 5
"""Events that kill relays, at most: each takes half a minute of leases until it has failed."""


@dataclass(eq=False)
class Transaction:
    """Rows that have ids and are not visible yet. Its keys are locked: so their order is the order of commits."""

    xid: int
    ids: list[int]
    deliveries: list[Delivery]
    keys: set[Key]


class Writers:
    """A service that writes to the outbox."""

    def __init__(self, world: World) -> None:
        draw = world.draw
        count = draw.choice((1, 3, 3, 5, 25))
        self._world = world
        self._keys = [Key(draw.choice((None, "one", "two")), f"k{number * 2 // 3}") for number in range(count)]
        self._topics = draw.choice((1, 1, 2))
        self._bitterness = draw.choice(BITTERNESS)
        self.deadly = draw.random() < 0.1
        """Whether there are events that kill whoever sends them."""
        self._flood = draw.choice((10, 30)) if world.floods and not self.deadly else 0
        """How many times more than others a tenant writes, once."""
        self.open: list[Transaction] = []

    is_poisoned = False
    """Whether something is wrong with deliveries that nothing but their failure shows."""
    many_calls = 5_000
    """A world that needs more of them does not come to rest."""
    batches: tuple[int, ...] = (2, 4, 8)

    def capabilities(self, numbered: bool) -> Capabilities:
        """What the transport can do."""
        return Capabilities(numbered=numbered, max_messages=6)

    def plan(self, seconds: float) -> None:
        """Decide who writes when."""
        chaos = self._world.chaos
        for _ in range(chaos.draw.randrange(8, 20)):
            chaos.later(chaos.between(0, seconds), self._start)

    def _start(self) -> None:
        """A transaction may write something else long before it writes to the outbox."""
        chaos, store = self._world.chaos, self._world.store
        chaos.later(chaos.draw.choice((0.0, 0.0, chaos.between(0, 2))), self._begin, store, store.begin())

    def _begin(self, store: SimulatedStore, xid: int) -> None:
        if store is not self._world.store:
            return  # the database that it began in is gone
        chaos, draw = self._world.chaos, self._world.draw
        locked = {key for transaction in self.open for key in transaction.keys}
        free = [key for key in self._keys if key not in locked]
        keys = self._choose(free) if free else []
        if self._flood and keys and keys[0].tenant is not None:
            keys, self._flood = keys * self._flood, 0
        deliveries = [delivery for key in keys for delivery in self._event(key)]
        transaction = Transaction(xid, store.reserve(len(deliveries)), deliveries, set(keys))
        self.open.append(transaction)
        chaos.later(draw.choice((0.0, chaos.between(0, 4))), self._end, transaction, draw.random() < 0.15)

    def _choose(self, free: Sequence[Key]) -> list[Key]:
        """The keys of the events of a transaction."""
        draw = self._world.draw
        return [draw.choice(free) for _ in range(draw.choice((1, 1, 2, 4)))]

    def _event(self, key: Key) -> list[Delivery]:
        world, draw = self._world, self._world.draw
        event_id = world.new_id()
        body = b"x" * 70_000 if draw.random() < 0.02 else event_id.bytes
        if draw.random() < 0.02:
            body = UNSENDABLE + body
        self._burden(event_id)
        routes = [route for route in world.routes if draw.random() < 0.7] or world.routes[:1]
        return [self._delivery(event_id, route, key, body) for route in routes]

    def _burden(self, event_id: UUID) -> None:
        """Some events have a hard way before them."""
        draw = self._world.draw
        for broker in (self._world.broker, self._world.plain):
            if draw.random() < self._bitterness:
                broker.refusals[str(event_id)] = draw.choice((1, 1, 2, 3, FOR_EVER))
            if self.deadly and draw.random() < 0.1 and len(broker.deadly) < MANY_DEADLY:
                broker.deadly.add(str(event_id))

    def _delivery(self, event_id: UUID, route: RouteRecord, key: Key, body: bytes) -> Delivery:
        place = stable_hash(key.key)
        return Delivery(
            event_id=event_id,
            event_type="simulated",
            route=route.id,
            shard=place % self._world.shards,
            schema_version=1,
            topic=f"{route.topic}-{place // 2 % self._topics}",
            key=key.key,
            tenant=key.tenant,
            headers={"event_id": str(event_id)} | ({"tenant_id": key.tenant} if key.tenant else {}),
            body=body,
        )

    def _end(self, transaction: Transaction, rolls_back: bool) -> None:
        if transaction in self.open:
            self.open.remove(transaction)
            if rolls_back:
                self._world.store.end(transaction.xid)
            else:
                found = transaction.deliveries
                self.commit(transaction, [Entry(it.topic, it.tenant, it.key, it.event_id, it.body) for it in found])

    def go_on(self) -> None:
        """Fate has relented, and some deliveries have not found their end."""

    def overdue(self) -> list[str]:
        """Deliveries that wait though nothing is wrong with them."""
        return []

    def commit(self, transaction: Transaction, entries: Sequence[Entry]) -> None:
        """Put rows into the outbox, and into the ledger what must come of them."""
        world = self._world
        world.chaos.note("commit", transaction.ids)
        world.store.commit(transaction.xid, transaction.ids, transaction.deliveries)
        world.ledger.committed += entries
        world.ring({LaneName(it.route, it.shard) for it in transaction.deliveries})
