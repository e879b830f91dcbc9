"""Planted mistakes, and what must find each of them.

A mutant changes the shipped code, the store in memory or the world. Where one layer would hide what another one does
wrong, the mutant is run in a world without that layer.

    python -m tests.simulation.mutants        search for the first seed that catches each of them
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy.orm import Session

from pillarbox import cursor as cursors
from pillarbox import lane as lanes
from pillarbox import plan as plans
from pillarbox import rejections, sending
from pillarbox import relay as relays
from pillarbox.collector import Collector
from pillarbox.cursor import Cursor, Snapshot, Window
from pillarbox.fairness import Detours
from pillarbox.lane import LaneWorker
from pillarbox.leased_lane import LeasedLane
from pillarbox.numbering import Numbering
from pillarbox.outbox import Lane, LaneName, Row, Status
from pillarbox.rejections import Accepted, Rejections
from pillarbox.relay import Relay
from pillarbox.retry import RetryPolicy
from pillarbox.sending import Sender
from pillarbox.session import BoundSession
from pillarbox.transport import Message, Outcome, Rejection, Verdict
from tests.memory import log as log_store
from tests.memory import store as memory_store
from tests.memory.log import MemoryLogStore
from tests.memory.store import MemoryStore
from tests.simulation import simulate, writers
from tests.simulation.brokers import NumberedBroker
from tests.simulation.planted import Mutant, Plant, search
from tests.simulation.poison import Poison

MUTANTS: list[Mutant] = []


def mutant(*shows: str, seed: int = 0, **world: Any) -> Callable[[Plant], Plant]:
    """Keep a mutant, with the invariants that may catch it."""

    def keep(plant: Plant) -> Plant:
        options = {"failover": False, "sessions": False, "log": False, "poison": False} | world
        MUTANTS.append(Mutant(plant, shows, simulate, options, seed))
        return plant

    return keep


# -- leases and fences -------------------------------------------------------------------------------------------------


@mutant("fence", seed=1, focus=("settle", ["late", "pause"]))
def _fence_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryStore, "_fenced", lambda self, lane: self._lanes[lane.name])


@mutant("fence", seed=26, focus=("settle", ["late", "pause"]))
def _owner_left_out_of_the_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryStore, "_owns", lambda _self, _lane: True)


@mutant("fence", seed=23, failover=True, focus=("settle", ["late", "slow"]))
def _token_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryStore, "_owns", lambda self, lane: self._lanes[lane.name].epoch == lane.epoch)


@mutant("I", seed=324, failover=True)
def _batch_left_out_of_the_fence(patch: pytest.MonkeyPatch) -> None:
    fenced = MemoryStore._fenced

    def lenient(self: MemoryStore, lane: Any) -> Any:
        return fenced(self, replace(lane, batch=self._lanes[lane.name].batch))

    patch.setattr(MemoryStore, "_fenced", lenient)


@mutant("lease", seed=517, focus=("renew", ["slow"]))
def _lease_taken_early(patch: pytest.MonkeyPatch) -> None:
    free = MemoryStore._is_free
    patch.setattr(MemoryStore, "_is_free", lambda self, lane, now: free(self, lane, now + 3.0))


@mutant("I9")
def _lease_never_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryStore, "_is_free", lambda _self, lane, _now: not lane.paused and lane.locked_by is None)


@mutant("lease", seed=5)
def _release_without_fence(patch: pytest.MonkeyPatch) -> None:
    release = MemoryStore.release

    async def careless(self: MemoryStore, relay: str, held: Sequence[Any], **options: Any) -> None:
        found = [(lane, self._lanes[lane.name]) for lane in held]
        now = [replace(lane, epoch=kept.epoch, token=kept.token) for lane, kept in found]
        await release(self, relay, now, **options)

    patch.setattr(MemoryStore, "release", careless)


@mutant("lease", "I9", seed=96)
def _renew_without_fence(patch: pytest.MonkeyPatch) -> None:
    renew = MemoryStore.renew

    async def careless(self: MemoryStore, relay: str, held: Sequence[Any], **options: Any) -> dict[LaneName, bool]:
        await renew(self, relay, held, **options)
        return {lane.name: True for lane in held}

    patch.setattr(MemoryStore, "renew", careless)


@mutant("lease", seed=5)
def _no_local_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeasedLane, "check", lambda _self: None)


@mutant("lease", seed=20)
def _deadline_after_the_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Relay, "_deadline", lambda self, before: before + 2 * self._pacing.lease)


@mutant("I3", seed=787, numbered=True, watched=False, focus=("amend", ["pause"]))
def _check_before_open(patch: pytest.MonkeyPatch) -> None:
    """A broker that gives a name to whoever asks, and no deadline of our own: these layers hide it. Rejections bring it
    out.
    """
    recover = Sender._recover

    async def hasty(self: Sender, care: Any) -> Any:
        store, self._leased._store = self._leased._store, _ChecksFirst(self._leased._store)  # type: ignore[assignment]
        try:
            return await recover(self, care)
        finally:
            self._leased._store = store

    patch.setattr(LeasedLane, "check", lambda _self: None)
    patch.setattr(LeasedLane, "within", nullcontext)
    patch.setattr(NumberedBroker, "_answers", lambda _self, _life: False)
    patch.setattr(Sender, "_recover", hasty)
    patch.setattr(writers, "BITTERNESS", (0.8,))


class _ChecksFirst:
    def __init__(self, store: Any) -> None:
        self._store = store

    async def rebuild(self, lane: Any) -> Any:
        found = await self._store.rebuild(lane)
        await self._store.amend(lane, ())
        return found

    async def amend(self, lane: Any, _failures: Any, **_more: Any) -> Any:
        return lane

    async def asked(self, lane: Any, rows: Any) -> Any:
        return await self._store.asked(lane, rows)


# -- announcing and numbering ------------------------------------------------------------------------------------------


@mutant("I1")
def _settle_before_send(patch: pytest.MonkeyPatch) -> None:
    deliver = Sender.deliver

    async def early(self: Sender, items: Any, messages: Any = None) -> None:
        if items is not None:
            await self._leased.settle()
        await deliver(self, items, messages)

    patch.setattr(Sender, "deliver", early)


@mutant("announce")
def _send_before_announce(patch: pytest.MonkeyPatch) -> None:
    carry_out = LaneWorker._carry_out

    async def eager(self: LaneWorker, plan: Any, page: Any) -> None:
        if plan.items and (not self._publisher.capabilities.numbered or self.lane.announced):
            first, message = self.lane.next_number, self._sender.numbering.message
            await self._sender._request(
                [message(self.lane, first + index, row) for index, row in enumerate(plan.items)]
            )
        await carry_out(self, plan, page)

    patch.setattr(LaneWorker, "_carry_out", eager)


@mutant("I1", seed=2, numbered=True, watched=False)
def _number_is_the_row_id(patch: pytest.MonkeyPatch) -> None:
    message = Numbering.message
    patch.setattr(Numbering, "message", lambda self, lane, _number, row: message(self, lane, row.id, row))
    patch.setattr(Sender, "_check_lasts", lambda _self, _lasts: None)


@mutant("I1", seed=3, numbered=True)
def _number_of_a_rejected_row_is_used_again(patch: pytest.MonkeyPatch) -> None:
    amend = MemoryStore.amend

    async def thrifty(self: MemoryStore, lane: Any, failures: Any, **options: Any) -> Any:
        await amend(self, lane, failures, **options)
        self._lanes[lane.name].next_number -= len(failures)
        return self._lane(lane.name)

    patch.setattr(MemoryStore, "amend", thrifty)


@mutant("I1", "I3", "announce", seed=30, numbered=True)
def _rebuilt_from_what_is_there_now(patch: pytest.MonkeyPatch) -> None:
    async def rebuild(self: MemoryStore, lane: Any) -> list[tuple[int, Any]]:
        rows = sorted(self._lanes[lane.name].sending.values(), key=lambda stored: stored.id)
        return [(lane.announced.first_number + place, stored.row) for place, stored in enumerate(rows)]

    patch.setattr(MemoryStore, "rebuild", rebuild)


@mutant("announce", seed=5)
def _unparked_between_announce_and_rebuild(patch: pytest.MonkeyPatch) -> None:
    rebuild = MemoryStore.rebuild

    async def generous(self: MemoryStore, lane: Any) -> list[tuple[int, Any]]:
        found = await rebuild(self, lane)
        free = self._redo(lane, self._lanes[lane.name], ())
        return found + [(lane.next_number + place, stored.row) for place, stored in enumerate(free)]

    patch.setattr(MemoryStore, "rebuild", generous)


@mutant("I1", seed=92, numbered=True)
def _pushed_is_taken_for_stored(patch: pytest.MonkeyPatch) -> None:
    async def trusting(_self: Any, items: list[Any], topic: str, last: int) -> tuple[list[Any], None]:
        return [item for item in items if item[1].topic != topic or item[0] > last], None

    patch.setattr(Sender, "_without_stored", trusting)


@mutant("I1", numbered=True, failover=True)
def _broker_ahead_of_the_database_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sender, "_check_lasts", lambda _self, _lasts: None)


@mutant("I3", seed=2, numbered=True)
def _broker_without_deduplication(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NumberedBroker, "is_new", lambda _self, _link, _message: True)


@mutant("I3", seed=6, numbered=True, focus=("send", ["late"]))
def _producer_name_is_not_held(patch: pytest.MonkeyPatch) -> None:
    def everybody(self: NumberedBroker, link: Any, messages: Sequence[Message], reply: Any) -> None:
        super(NumberedBroker, self).take(link, messages, reply)

    patch.setattr(NumberedBroker, "_answers", lambda _self, _life: False)
    patch.setattr(NumberedBroker, "take", everybody)
    patch.setattr(writers, "BITTERNESS", (0.8,))


# -- what a destination answers ----------------------------------------------------------------------------------------


def _answered(patch: pytest.MonkeyPatch, change: Callable[[Outcome, int], Outcome]) -> None:
    request = Sender._request

    async def changed(self: Sender, messages: Sequence[Message]) -> Outcome:
        return change(await request(self, messages), len(messages))

    patch.setattr(Sender, "_request", changed)


@mutant("I1", seed=10)
def _timeout_is_success(patch: pytest.MonkeyPatch) -> None:
    _answered(patch, lambda it, count: Outcome(range(count)) if it.unfinished is Verdict.UNKNOWN else it)


@mutant("attempt", seed=3)
def _timeout_is_failure(patch: pytest.MonkeyPatch) -> None:
    first = [Rejection(0, "no answer")]
    _answered(patch, lambda it, _: Outcome((), first) if it.unfinished is Verdict.UNKNOWN else it)


@mutant("attempt")
def _attempt_burnt_by_outage(patch: pytest.MonkeyPatch) -> None:
    first = [Rejection(0, "away")]
    _answered(patch, lambda it, _: Outcome((), first) if it.unfinished is Verdict.UNAVAILABLE else it)


@mutant("I1")
def _rejection_not_written(patch: pytest.MonkeyPatch) -> None:
    async def careless(_self: Any, items: list[Any], _asked: int, outcome: Outcome, *_: Any) -> list[Any]:
        over = {*outcome.accepted, *(rejection.index for rejection in outcome.rejected)}
        return [item for index, item in enumerate(items) if index not in over]

    patch.setattr(Sender, "_amend", careless)


@mutant("I5", seed=2)
def _key_goes_on_behind_a_failure(patch: pytest.MonkeyPatch) -> None:
    for module in (sending, plans):
        patch.setattr(module, "stops_key", lambda _failure, _lane: False)


@mutant("I1", seed=16, numbered=False)
def _abandoned_batch_counts_as_stored(patch: pytest.MonkeyPatch) -> None:
    async def abandon(self: Sender) -> None:
        self.stored = True

    patch.setattr(Sender, "_abandon", abandon)


@mutant("I9", seed=19)
def _deadly_message_is_sent_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sending, "DEADLY_TRIES", 1_000_000)


@mutant("I9", seed=19)
def _deaths_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    take = MemoryStore.take

    async def forgetful(self: MemoryStore, relay: str, **options: Any) -> list[Any]:
        taken = await take(self, relay, **options)
        for lane in taken:
            self._lanes[lane.name].tries = 0
        return [self._lane(lane.name) for lane in taken]

    patch.setattr(MemoryStore, "take", forgetful)


# -- poison ------------------------------------------------------------------------------------------------------------


@mutant("I11", seed=268, poison=Poison.SHARE)
def _suspicion_cleared_before_the_rejections_are_counted(patch: pytest.MonkeyPatch) -> None:
    rejected = Rejections.rejected

    def forgetful(self: Rejections, lane: Lane, row: Row, reason: str, _accepted: Accepted = ()) -> int | None:
        return rejected(self, lane, row, reason)

    patch.setattr(Rejections, "rejected", forgetful)


@mutant("I11", seed=13, poison=Poison.SHARE)
def _probes_only_what_failed_before(patch: pytest.MonkeyPatch) -> None:
    """What was rejected is due again at once."""

    def circling(place: rejections.Place, rows: Sequence[Row]) -> Row:
        return min(rows, key=lambda row: row.order_key not in place.keys)

    patch.setattr(sending, "PROBES", RetryPolicy(base=0.05, cap=0.05, attempts=1))
    patch.setattr(rejections, "_choose", circling)


@mutant("I9", "I11", seed=90, poison=Poison.BURSTS)
def _a_lane_keeps_its_turn_to_probe(patch: pytest.MonkeyPatch) -> None:
    """Whether it has anything to send or not."""
    patch.setattr(rejections, "PATIENCE", 10**9)
    patch.setattr(Rejections, "_next_turn", lambda *_: None)


@mutant("I9", "I11", seed=2, poison=Poison.BUGS)
def _a_bug_is_taken_for_an_outage(patch: pytest.MonkeyPatch) -> None:
    """That a batch without an answer is sent one message at a time would hide it."""
    ask = Sender._ask

    async def forgiving(self: Sender, messages: Sequence[Message]) -> Outcome:
        try:
            return await ask(self, messages)
        except sending._Fault as fault:
            return Outcome((), unfinished=Verdict.UNKNOWN, reason=fault.reason)

    patch.setattr(sending, "UNANSWERED_TRIES", 1_000_000)
    patch.setattr(Sender, "_ask", forgiving)


# -- order -------------------------------------------------------------------------------------------------------------


@mutant("I5", seed=5)
def _batch_in_any_order(patch: pytest.MonkeyPatch) -> None:
    def shuffled(*given: Any) -> Any:
        found = plans.make_plan(*given)
        found.items.reverse()
        return found

    patch.setattr(lanes, "make_plan", shuffled)


@mutant("I5", seed=1)
def _waiting_keys_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    lane = MemoryStore._lane
    patch.setattr(MemoryStore, "_lane", lambda self, name: replace(lane(self, name), waiting=frozenset()))


@mutant("I5")
def _retries_overtake_each_other(patch: pytest.MonkeyPatch) -> None:
    def due(rows: Any, now: float) -> list[Any]:
        return sorted((it for it in rows if it.due_at <= now and it.status != "FAILED"), key=lambda it: -it.id)

    patch.setattr(memory_store, "_due_prefix", due)


@mutant("I9")
def _high_water_poll(patch: pytest.MonkeyPatch) -> None:
    poll = MemoryStore.poll
    highest: dict[Any, int] = {}

    async def forward_only(self: MemoryStore, lane: Any, **options: Any) -> Any:
        page = await poll(self, lane, **options)
        mark = (id(self), lane.name)
        fresh = tuple(row for row in page.fresh if row.id > highest.get(mark, 0))
        highest[mark] = max([highest.get(mark, 0), *(row.id for row in fresh)])
        return replace(page, fresh=fresh)

    patch.setattr(MemoryStore, "poll", forward_only)


# -- people ------------------------------------------------------------------------------------------------------------


@mutant("I9", seed=103)
def _order_carried_out_by_somebody_else(patch: pytest.MonkeyPatch) -> None:
    """By whoever gives it, and not by the owner of the lane with its next announcement."""
    request = MemoryStore.request

    def at_once(self: MemoryStore, row: int, action: str, **options: Any) -> int:
        if action == "discard":
            self._move(row, Status.DISCARDED)
        return request(self, row, action, **options)

    patch.setattr(MemoryStore, "request", at_once)


@mutant("I9")
def _nobody_looks_after_the_bell_was_lost(patch: pytest.MonkeyPatch) -> None:
    async def deaf(_self: Relay, over: asyncio.Event) -> None:
        await over.wait()

    patch.setattr(Relay, "_keep_looking", deaf)


@mutant("I9", seed=9)
def _lanes_that_are_nobodys_share(patch: pytest.MonkeyPatch) -> None:
    share = relays.fair_share
    patch.setattr(relays, "fair_share", lambda *asked: min(1, share(*asked)))


# -- collecting --------------------------------------------------------------------------------------------------------


@mutant("I2", seed=10, sessions=True)
def _events_survive_a_savepoint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Collector, "rolled_back", lambda _self: None)


@mutant("I1", seed=1, sessions=True)
def _events_alone_are_not_flushed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundSession, "_is_clean", Session._is_clean)


@mutant("I5", sessions=True)
def _events_are_written_backwards(patch: pytest.MonkeyPatch) -> None:
    keep = Collector._without_repetitions
    patch.setattr(Collector, "_without_repetitions", lambda self, entries: keep(self, entries)[::-1])


# -- the log -----------------------------------------------------------------------------------------------------------


@mutant("I9", seed=1, log=True)
def _late_rows_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cursor, "is_late", lambda _self, _row: False)


@mutant("I9", seed=176, log=True)
def _only_those_that_were_listed_are_late(patch: pytest.MonkeyPatch) -> None:
    late = Cursor.is_late
    patch.setattr(Cursor, "is_late", lambda self, row: late(self, row) and row.xid < self.seen.xmax)


@mutant("I9", seed=23, log=True)
def _a_page_of_late_rows_taken_for_the_last(patch: pytest.MonkeyPatch) -> None:
    after = Window.after
    patch.setattr(Window, "after", lambda self, count: after(replace(self, more=False), count))


@mutant("I9", log=True)
def _seen_is_newer_than_the_look(patch: pytest.MonkeyPatch) -> None:
    """As if the snapshot were taken by a statement of its own, before which others have committed."""
    look = cursors.look

    def looked(start: Cursor, rows: Any, snapshot: Snapshot, limit: int, reach: int = 0) -> Window:
        window = look(start, rows, snapshot, limit, reach)
        everybody = Snapshot(snapshot.xmax + 2, snapshot.xmax + 2)
        return window if window.start.paging else replace(window, snapshot=everybody)

    patch.setattr(log_store, "look", looked)


@mutant("I5", seed=8, log=True)
def _rows_by_transaction(patch: pytest.MonkeyPatch) -> None:
    written = MemoryLogStore._written
    patch.setattr(MemoryLogStore, "_written", lambda self, lane: sorted(written(self, lane), key=lambda row: row.xid))


@mutant("I9", seed=3, log=True)
def _the_cursor_passes_what_was_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Window, "dealt_with", lambda self, _ids: self.after(len(self.ids)))


# -- detours -----------------------------------------------------------------------------------------------------------


def _ends_at_any_time(patch: pytest.MonkeyPatch) -> None:
    """Else two layers would have to be wrong: the lane asks for the end only when it knows of nothing more."""

    def everybody(self: Detours, _pace: Any) -> list[str]:
        return sorted({*self._waiting, *self._stuck, *self._empty_since})

    patch.setattr(Detours, "rested", everybody)


@mutant("I9", seed=19, log=True, floods=True)
def _a_detour_ends_before_it_has_arrived(patch: pytest.MonkeyPatch) -> None:
    _ends_at_any_time(patch)
    patch.setattr(MemoryLogStore, "_arrived", lambda _self, _lane, _detour: True)


@mutant("I", seed=5, log=True, floods=True)
def _a_detour_has_a_snapshot_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """It goes ahead of its lane, which sends the same rows again once the detour is over."""
    look = MemoryLogStore._look

    def looked(self: MemoryLogStore, lane: Any, start: Cursor, detour: str | None, *room: int) -> Any:
        if detour is not None and lane.announced is None:
            lane = replace(lane, cursor=Cursor(10**9, self.snapshot()))
        return look(self, lane, start, detour, *room)

    _ends_at_any_time(patch)
    patch.setattr(MemoryLogStore, "_look", looked)
    patch.setattr(Cursor, "has_passed", lambda _self, _other: True)


@mutant("I", seed=11, log=True, floods=True)
def _the_lane_sends_what_goes_by_a_detour(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(log_store, "detour_of", lambda _lane, _tenant: None)


if __name__ == "__main__":
    sys.exit(search(MUTANTS))
