"""What happens to a world: outages, crashes, failovers, jumping clocks, and people who give orders."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from pillarbox.outbox import LaneName, Status
from tests.simulation.brokers import NumberedBroker
from tests.simulation.checker import Entry
from tests.simulation.loop import Life

if TYPE_CHECKING:
    from .store import SimulatedStore
    from .world import World

EVENTS = (
    "broker goes away",
    "broker crashes",
    "broker rejects everything",
    "broker disk hangs",
    "store goes away",
    "network parts",
    "process is killed",
    "process is told to stop",
    "process is frozen",
    "process joins",
    "clock jumps",
    "database clock jumps",
    *["person gives an order"] * 4,
    "person pauses a lane",
    "person pauses a tenant",
    "person sets a rate",
)


class Fate:
    """Decides, and relents in the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._chaos = world.chaos
        self._draw = world.draw
        self._relented_at = 0.0

    def plan(self, seconds: float) -> None:
        """Decide what happens when."""
        for _ in range(self._draw.randrange(14)):
            self._chaos.later(self._chaos.between(0.5, seconds), self._happen, self._draw.choice(EVENTS))
        if self._world.failover:
            self._chaos.later(self._chaos.between(1, seconds / 2), self._save, self._chaos.between(0.01, seconds / 2))

    def relent(self) -> None:
        """From now on nothing goes wrong by itself."""
        self._chaos.note("fate relents")
        self._chaos.rate = 0.0
        self._relented_at = self._chaos.loop.time()
        self._mend()
        self._resume_all()

    def _resume_all(self) -> None:
        """Nothing is paused or slowed any more."""
        store = self._world.store
        for lane in store.lanes():
            store.pause_lane(lane, False)
            store.set_rate(None, lane=lane)
        for tenant in ("one", "two"):
            store.pause_tenant(tenant, False)
            store.set_rate(None, tenant=tenant)

    def _happen(self, what: str) -> None:
        self._chaos.happened[what] += 1
        self._chaos.note(what)
        getattr(self, f"_{what.replace(' ', '_')}")()

    # -- misfortunes ---------------------------------------------------------------------------------------------------

    def _mend_later(self) -> None:
        self._chaos.later(self._chaos.between(0.1, 12), self._mend)

    def _mend(self) -> None:
        self._world.store_away = False
        self._world.cut_off.clear()
        for broker in (self._world.broker, self._world.plain):
            broker.away = broker.rejects_everything = False
            broker.rejected.clear()

    def _broker_goes_away(self) -> None:
        self._world.broker.away = True
        self._mend_later()

    def _broker_crashes(self) -> None:
        self._world.broker.crash()

    def _broker_rejects_everything(self) -> None:
        self._draw.choice((self._world.broker, self._world.plain)).rejects_everything = True
        self._mend_later()

    def _broker_disk_hangs(self) -> None:
        if isinstance(self._world.broker, NumberedBroker):
            self._world.broker.disk_hangs_until = self._chaos.loop.time() + self._chaos.between(1, 12)
            if self._draw.random() < 0.5:
                self._chaos.later(self._chaos.between(0, 12), self._broker_crashes)

    def _store_goes_away(self) -> None:
        self._world.store_away = True
        self._mend_later()

    def _network_parts(self) -> None:
        if life := self._somebody():
            self._world.cut_off.add(life)
            self._mend_later()

    def _somebody(self) -> Life | None:
        awake = [life for life in self._world.living if life.paused_at is None]
        return self._draw.choice(awake) if awake else None

    def _process_is_killed(self) -> None:
        if life := self._somebody():
            self._world.kill(life)

    def _process_is_told_to_stop(self) -> None:
        if life := self._somebody():
            life.relay.stop()

    def _process_is_frozen(self) -> None:
        if life := self._somebody():
            self._world.pause(life, self._chaos.between(1, 15))

    def _process_joins(self) -> None:
        if len(self._world.living) < 4:
            self._world.start()

    def _clock_jumps(self) -> None:
        if life := self._somebody():
            life.clock.jump += self._chaos.between(-1e6, 1e6)

    def _database_clock_jumps(self) -> None:
        """Leases end early, or late: only a broker that knows who speaks can bear that."""
        if self._world.everything_once:
            self._world.watch.leases = False
            self._world.database_clock.offset += self._chaos.between(-4, 4)

    def _save(self, seconds: float) -> None:
        older = copy.deepcopy(self._world.store)
        if self._draw.random() < 0.5:
            self._chaos.later(seconds, self._fail_over, older)
        else:
            self._process_is_killed()
            self._await_heir(older)

    def _await_heir(self, older: SimulatedStore) -> None:
        """Fail over when a lane has changed hands and the older store knows nothing of it: two owners, one epoch."""
        inherited = any(
            lane.epoch > older.lanes()[name].epoch and lane.announced
            for name, lane in self._world.store.lanes().items()
        )
        if inherited:
            self._fail_over(older)
            self._process_joins()
        elif not self._relented_at:
            self._chaos.later(0.01, self._await_heir, older)

    def _fail_over(self, older: SimulatedStore) -> None:
        """The database is what it was some time ago. Open transactions are gone, and so is every connection."""
        world = self._world
        self._chaos.note("failover")
        self._chaos.happened["failover"] += 1
        kept = {stored.row.event_id for stored in older.rows()}
        world.ledger.may_be_missing |= {
            world.identity(stored.row) for stored in world.store.rows() if stored.row.event_id not in kept
        }
        if world.broker.numbered:
            world.forgotten |= {
                stored.id
                for lane in older.lanes().values()
                for stored in lane.sending.values()
                if self._was_rejected(stored)
            }
        world.ledger.may_be_missing |= {world.identity(older.row(row).row) for row in world.forgotten}
        world.store = older
        older.end_all()
        if self._relented_at:
            self._resume_all()  # what was paused in the older database would stay so
        world.writers.open.clear()
        world.disconnected.update(world.living)

    def _was_rejected(self, stored: Any) -> bool:
        """Whether a row has lost the number that an older database has given it."""
        now = self._world.store.row(stored.id)
        return now.status not in (Status.SENDING, Status.SENT) or now.number != stored.number

    # -- people --------------------------------------------------------------------------------------------------------

    def look_at_the_dead(self) -> None:
        """A person decides about every delivery that has failed for good, and finds out in the end why a destination
        rejects everything.
        """
        if self._chaos.loop.time() > self._relented_at + 60 and not self._world.writers.is_poisoned:
            self._world.broker.refusals.clear()
            self._world.plain.refusals.clear()
        for stored in self._world.store.rows():
            if stored.status is Status.FAILED and not self._world.store.is_requested(stored.id):
                for broker in (self._world.broker, self._world.plain):
                    broker.refusals.pop(stored.row.headers["event_id"], None)
                    broker.deadly.discard(stored.row.headers["event_id"])
                    broker.bugs.pop(stored.row.headers["event_id"], None)
                self._order(stored, self._draw.choice(("redrive", "discard", "edit")))

    def _person_gives_an_order(self) -> None:
        rows = [it for it in self._world.store.rows() if it.status not in (Status.SENT, Status.DISCARDED)]
        if rows:
            self._order(self._draw.choice(rows), self._draw.choice(("redrive", "redrive", "discard", "edit")))

    def _order(self, stored: Any, action: str) -> None:
        world, row, identity = self._world, stored.row, self._world.identity(stored.row)
        self._chaos.note("order", action, stored.id)
        if action == "edit" and identity not in world.ledger.edited:
            new = Entry(row.topic, row.tenant, row.key, world.new_id(), b"edited" + row.event_id.bytes)
            world.ledger.edited[identity] = new
            world.store.request(stored.id, action, body=new.body, event_id=new.event_id)
            return
        if action == "discard":
            world.ledger.may_be_missing.add(identity)
        world.store.request(stored.id, "discard" if action == "discard" else "redrive")

    def _some_lane(self) -> LaneName:
        return self._draw.choice([*self._world.store.lanes()])

    def _person_pauses_a_lane(self) -> None:
        lane = self._some_lane()
        self._world.store.pause_lane(lane)
        self._chaos.later(self._chaos.between(1, 10), lambda: self._world.store.pause_lane(lane, False))

    def _person_pauses_a_tenant(self) -> None:
        tenant = self._draw.choice(("one", "two"))
        self._world.store.pause_tenant(tenant)
        self._chaos.later(self._chaos.between(1, 10), lambda: self._world.store.pause_tenant(tenant, False))

    def _person_sets_a_rate(self) -> None:
        rate = self._draw.choice((0.5, 2.0, 10.0))
        if self._draw.random() < 0.5:
            self._world.store.set_rate(rate, lane=self._some_lane())
        else:
            self._world.store.set_rate(rate, tenant=self._draw.choice(("one", "two")))
