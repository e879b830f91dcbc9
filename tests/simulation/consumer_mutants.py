"""Planted mistakes of consumers, and what must find each of them.

python -m tests.simulation.consumer_mutants        search for the first seed that catches each of them
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast
from uuid import UUID

import pytest
from sqlalchemy.exc import OperationalError

from pillarbox.consumers import failure, intake, processing, spilling
from pillarbox.consumers.consumer import Consumer
from pillarbox.consumers.failure import Failure
from pillarbox.consumers.handling import Incoming
from pillarbox.consumers.hands import Hands
from pillarbox.consumers.intake import SubscriptionIntake
from pillarbox.consumers.lanes import LaneDestination
from pillarbox.consumers.processing import Processed, Processor
from pillarbox.consumers.spilling import Spiller, Trouble
from pillarbox.consumers.window import Line, Window, Work
from pillarbox.errors import CommitOutcomeUnknown
from pillarbox.inbox import Admission, Admitted, Arrival, KnownBy
from pillarbox.retry import RetryPolicy
from pillarbox.transport import Message, Rejection
from tests.memory.inbox import MemoryInbox, MemoryTable
from tests.simulation.consumer_checker import Lot
from tests.simulation.consumer_database import SimulatedUnitOfWork
from tests.simulation.consumers import simulate_consumers
from tests.simulation.inbound import InboundStore
from tests.simulation.planted import Mutant, Plant, search

MUTANTS: list[Mutant] = []


def mutant(*shows: str, seed: int = 0, **world: Any) -> Callable[[Plant], Plant]:
    """Keep a mutant, with the promises that it breaks."""

    def keep(plant: Plant) -> Plant:
        MUTANTS.append(Mutant(plant, shows, simulate_consumers, world, seed))
        return plant

    return keep


# -- one transaction ---------------------------------------------------------------------------------------------------


@mutant("C2 once", "C3 both", seed=4)
def _effect_first_and_the_row_in_another_transaction(patch: pytest.MonkeyPatch) -> None:
    async def commit(self: Processor, opened: Mapping[Work, Incoming]) -> Any:
        if next(iter(opened)).claim is not None:
            return await original(self, opened)
        inbox: Any = self._inbox
        known = {place[2] for place, _ in inbox.table.seen(None)}
        self._begun += 1
        async with self._box.unit_of_work() as uow:
            await self._effects.apply(uow, [it for it in opened.values() if it.context.event_id not in known])
        await self._box.apart(self._admit, opened)
        return dict.fromkeys(opened, Admission.DUPLICATE)

    original = Processor._commit
    patch.setattr(Processor, "_commit", commit)


@mutant("C1 loss", "C6 acked")
def _row_first_and_the_effect_in_another_transaction(patch: pytest.MonkeyPatch) -> None:
    async def commit(self: Processor, opened: Mapping[Work, Incoming]) -> Any:
        if next(iter(opened)).claim is not None:
            return await original(self, opened)
        answers, _ = await self._box.apart(self._admit, opened)
        self._begun += 1
        async with self._box.unit_of_work() as uow:
            await self._effects.apply(uow, [it for work, it in opened.items() if answers[work] is Admission.NEW])
        return answers

    original = Processor._commit
    patch.setattr(Processor, "_commit", commit)


@mutant("C2 once", "C3 both")
def _effect_outside_the_transaction(patch: pytest.MonkeyPatch) -> None:
    flush_together = SimulatedUnitOfWork.flush

    async def flush(self: SimulatedUnitOfWork) -> None:
        pending, self._pending = self._pending, []
        if pending:
            async with SimulatedUnitOfWork(self._database, self._chaos, self.transaction.life, self._wire) as apart:
                apart._pending = pending
                await flush_together(apart)

    patch.setattr(SimulatedUnitOfWork, "flush", flush)


@mutant("C7 follow-up", seed=4)
def _follow_up_outside_the_transaction(patch: pytest.MonkeyPatch) -> None:
    def publish(self: SimulatedUnitOfWork, mark: int) -> None:
        apart = SimulatedUnitOfWork(self._database, self._chaos, self.transaction.life, self._wire)
        apart.transaction.record("follow-up", mark)
        self._database.commit(apart.transaction, lambda _reply: None)

    patch.setattr(SimulatedUnitOfWork, "publish", publish)


@mutant("C2 once", "C3 both", seed=3)
def _uncommitted_row_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    hold = MemoryTable.hold

    def careless(self: MemoryTable[Any, Any], transaction: Any, key: Any) -> Any:
        return hold(self, transaction, key) if key not in self._held or self._held[key][0] is transaction else None

    def write(self: MemoryTable[Any, Any], transaction: Any, key: Any, row: Any) -> None:
        if self._held.get(key, (transaction,))[0] is transaction:
            original(self, transaction, key, row)

    original = MemoryTable.write
    patch.setattr(MemoryTable, "hold", careless)
    patch.setattr(MemoryTable, "write", write)


@mutant("C1 loss", "C6 acked")
def _uncommitted_row_taken_for_a_duplicate(patch: pytest.MonkeyPatch) -> None:
    admit = MemoryInbox.admit

    def hasty(self: MemoryInbox, transaction: Any, consumer: int, tenant: Any, arrivals: Any, **lines: Any) -> Any:
        held = [self.table._held.get((consumer, tenant or "", it.event_id), (transaction,))[0] for it in arrivals]
        if any(owner is not transaction for owner in held):
            return Admitted([Admission.DUPLICATE] * len(arrivals))
        return admit(self, transaction, consumer, tenant, arrivals, **lines)

    patch.setattr(MemoryInbox, "admit", hasty)


@mutant("C1 loss", "C6 acked")
def _altered_taken_for_a_duplicate(patch: pytest.MonkeyPatch) -> None:
    admit = MemoryInbox.admit

    def blind(self: MemoryInbox, *arguments: Any, **lines: Any) -> Any:
        answers, gated = admit(self, *arguments, **lines)
        return Admitted([Admission.DUPLICATE if answer is Admission.ALTERED else answer for answer in answers], gated)

    patch.setattr(MemoryInbox, "admit", blind)


# -- acknowledging -----------------------------------------------------------------------------------------------------


@mutant("C6 acked", "C1 loss")
def _ack_before_commit(patch: pytest.MonkeyPatch) -> None:
    work = SubscriptionIntake._work

    async def hasty(self: SubscriptionIntake, subscription: Any, works: Any, handle: Any) -> None:
        await subscription.ack([it.received for it in works])
        await work(self, subscription, works, handle)

    patch.setattr(SubscriptionIntake, "_work", hasty)


@mutant("C6 acked", seed=21)
def _unanswered_commit_taken_for_success(patch: pytest.MonkeyPatch) -> None:
    together = Processor._together

    async def careless(self: Processor, works: Sequence[Work]) -> Processed:
        try:
            return await together(self, works)
        except CommitOutcomeUnknown:
            return Processed(settled=[*works])

    patch.setattr(Processor, "_together", careless)


@mutant("C6 acked", seed=3)
def _spill_acknowledged_before_its_commit(patch: pytest.MonkeyPatch) -> None:
    async def careless(self: Spiller, troubles: Sequence[Trouble]) -> int:
        with suppress(Exception):
            await spill(self, troubles)
        return len(troubles)

    spill = Spiller.spill
    patch.setattr(Spiller, "spill", careless)


@mutant("H93", seed=3)
def _failed_ack_not_borne(patch: pytest.MonkeyPatch) -> None:
    work = SubscriptionIntake._work

    async def proud(self: SubscriptionIntake, subscription: Any, *arguments: Any) -> None:
        ack = subscription.ack

        async def loud(received: Any) -> None:
            try:
                await ack(received)
            except OSError as error:
                raise RuntimeError("not acknowledged") from error

        subscription.ack = loud
        try:
            await work(self, subscription, *arguments)
        finally:
            subscription.ack = ack

    patch.setattr(SubscriptionIntake, "_work", proud)


# -- spilling ----------------------------------------------------------------------------------------------------------


@mutant("C2 once", "C3 both", seed=3)
def _spill_without_a_row_of_the_inbox(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Spiller, "_admit_and_write", Spiller.write)


@mutant("C1 loss", "C6 acked", seed=12)
def _altered_left_out_by_a_spill(patch: pytest.MonkeyPatch) -> None:
    def leave_out(self: Spiller, connection: Any, troubles: Sequence[Trouble]) -> Any:
        answers = self._admit(connection, self._identify(connection), troubles)
        new = [each for place, each in enumerate(troubles) if answers[place] is Admission.NEW]
        return self.write(connection, new) if new else None

    patch.setattr(Spiller, "_admit_and_write", leave_out)


@mutant("C1 loss", seed=3)
def _unreadable_known_by_the_id_of_its_event(patch: pytest.MonkeyPatch) -> None:
    def unreadable(self: Processor, message: Message, kind: Failure, reason: str) -> Trouble:
        trouble = original(self, message, kind, reason)
        version = int(message.headers["schema_version"][1:])
        arrival = Arrival(UUID(message.headers["event_id"]), version, Arrival.of_content(message).digest)
        return trouble._replace(arrival=arrival, known_by=KnownBy.EVENT)

    original = Processor._unreadable
    patch.setattr(Processor, "_unreadable", unreadable)


@mutant("C2 once", seed=6)
def _unreadable_that_can_be_read_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    def known(message: Message) -> Work:
        work = original(message)
        work.known_by = KnownBy.EVENT
        return work

    original = spilling.work_of
    patch.setattr("pillarbox.consumers.lanes.work_of", known)


@mutant("C11 gate")
def _reject_that_gates(patch: pytest.MonkeyPatch) -> None:
    def spill(self: MemoryInbox, connection: Any, claims: int, tenant: Any, spills: Iterable[Any]) -> None:
        original(self, connection, claims, tenant, [each._replace(gate=True) for each in spills])

    original = MemoryInbox.spill
    patch.setattr(MemoryInbox, "spill", spill)


@mutant("C11 gate", seed=3)
def _failed_that_gates(patch: pytest.MonkeyPatch) -> None:
    def gate(self: InboundStore, rows: Any, *, gate: bool) -> None:
        if gate:
            original(self, rows, gate=gate)

    original = InboundStore.gate
    patch.setattr(InboundStore, "gate", gate)


@mutant("C11 gate")
def _discarded_that_keeps_its_claim(patch: pytest.MonkeyPatch) -> None:
    def change(self: InboundStore, rows: Any, changes: Any) -> None:
        if changes is not None:
            original(self, rows, changes)

    original = InboundStore._change
    patch.setattr(InboundStore, "_change", change)


@mutant("C4 kind", seed=15)
def _redrive_that_keeps_why_it_was_refused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InboundStore, "gate", lambda self, rows, *, gate: self._change(rows, {"gate": gate}))


@mutant("C2 once", seed=15)
def _inbox_that_forgets_what_has_a_claim(patch: pytest.MonkeyPatch) -> None:
    def prune(self: MemoryInbox, *arguments: Any) -> int:
        claims, self.claims = self.claims, MemoryTable()
        try:
            return original(self, *arguments)
        finally:
            self.claims = claims

    original = MemoryInbox.prune
    patch.setattr(MemoryInbox, "prune", prune)


# -- keys that park ----------------------------------------------------------------------------------------------------


@mutant("C5 order", seed=3, parks=True, ordered=True)
def _refused_that_does_not_gate_though_its_key_parks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InboundStore, "wrong_gates", lambda _self: [])  # the order must show it
    patch.setattr(Spiller, "_gates", lambda _self, trouble: not trouble.is_final)


@mutant("C5 order", seed=0, parks=True, ordered=True)
def _gate_that_opens_before_a_person_has_decided(patch: pytest.MonkeyPatch) -> None:
    def fail(self: InboundStore, failures: Sequence[Any]) -> Any:
        keys = original(self, failures)
        self.gate([failure.row for failure in failures if failure.retry_after is None], gate=False)
        return keys

    original = InboundStore._fail
    patch.setattr(InboundStore, "wrong_gates", lambda _self: [])
    patch.setattr(InboundStore, "_fail", fail)


@mutant("C5 order", seed=6, parks=True, ordered=True, batch=8, lots=[Lot.GARBLED, Lot.FINE])
def _unreadable_passed_by_what_comes_with_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Processor, "_parks", property(lambda _self: False, lambda _self, _parks: None), raising=False)


# -- messages that kill ------------------------------------------------------------------------------------------------


@mutant("C9 liveness", "C12 deaths", counts=False, hosts=1, lots=[Lot.FATAL, Lot.FINE])
def _death_that_nobody_misses(patch: pytest.MonkeyPatch) -> None:
    async def begin_life(self: Consumer) -> None:
        await original(self)
        cast(Spiller, self._spiller).untrusted = 0

    original = Consumer._begin_life
    patch.setattr(Consumer, "_begin_life", begin_life)


@mutant("C9 liveness", "C12 deaths", seed=4, counts=True, hosts=100, lots=[Lot.FATAL, Lot.FINE])
def _redeliveries_that_nobody_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "_is_suspect", lambda _work: False)


@mutant("C9 liveness", "C12 deaths", seed=4, lots=[Lot.FATAL, Lot.FINE])
def _killer_that_its_lane_does_not_wait_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LaneDestination, "be_patient", lambda _self: None)


@mutant("C9 liveness", "C12 deaths", lots=[Lot.FATAL, Lot.FINE])
def _batch_that_killed_its_owners_sent_as_a_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pillarbox.sending.DEADLY_TRIES", 1_000_000)


# -- claims ------------------------------------------------------------------------------------------------------------


@mutant("C5 order", seed=3, ordered=True)
def _fresh_messages_that_do_not_wait_behind_a_claim(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryInbox, "_gated", lambda *_arguments: ())


@mutant(
    "C5 order",
    seed=152,
    ordered=True,
    batch=8,
    narrow=True,
    parks=False,
    lots=[Lot.PUZZLING, Lot.FINE, Lot.FINE],
    focus=("commit", ["late", "slow", "slow"]),
)
def _gate_not_asked_again_after_a_refusal(patch: pytest.MonkeyPatch) -> None:
    def admit(self: MemoryInbox, connection: Any, *arguments: Any, claims: int = 0, **lines: Any) -> Any:
        had_gates = self._has_gates(connection, claims) if connection.has_gates is None else connection.has_gates
        admitted = original(self, connection, *arguments, claims=claims, **lines)
        return admitted if had_gates else admitted._replace(gated=())

    original = MemoryInbox.admit
    patch.setattr(MemoryInbox, "admit", admit)


@mutant("C2 once", seed=9)
def _settled_rows_in_the_place_of_claims(patch: pytest.MonkeyPatch) -> None:
    """A lane that dies between the effect and the settling does it again."""

    def redeem(self: MemoryInbox, connection: Any, claims: int, claim: Any) -> tuple[bool, str | None]:
        return True, redeemed(self, connection, claims, claim)[1]

    redeemed = MemoryInbox.redeem
    patch.setattr(MemoryInbox, "redeem", redeem)


@mutant("C2 once", seed=3)
def _claim_deleted_in_another_transaction(patch: pytest.MonkeyPatch) -> None:
    async def commit(self: Processor, opened: Mapping[Work, Incoming]) -> Any:
        inbox: Any = self._inbox
        claims = {place[1]: claim for place, claim in inbox.claims.seen(None)}
        if any(work.claim not in claims or claims[work.claim].refused is not None for work in opened):
            return await original(self, opened)
        self._begun += 1
        async with self._box.unit_of_work() as uow:
            await self._effects.apply(uow, [*opened.values()])
        await self._box.apart(self._redeem_all, opened)
        return dict.fromkeys(opened, Admission.NEW)

    original = Processor._commit
    patch.setattr(Processor, "_commit", commit)


# -- what becomes of failures ------------------------------------------------------------------------------------------


@mutant("C4 kind")
def _transient_errors_made_into_poison(patch: pytest.MonkeyPatch) -> None:
    def classify(error: BaseException) -> Failure:
        found = failure.classify(error)
        return Failure.POISON if found is Failure.TRANSIENT and not isinstance(error, OperationalError) else found

    patch.setattr(processing, "classify", classify)


@mutant("C9 liveness")
def _unknown_errors_never_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RetryPolicy, "exhausted", lambda _self, _attempt: False)


@mutant("C9 liveness", seed=1, lots=[Lot.STUBBORN, Lot.PUZZLING])
def _rejections_of_a_lane_held_against_the_consumer(patch: pytest.MonkeyPatch) -> None:
    def rejection(*arguments: Any, alone: bool = False, **options: Any) -> Rejection:  # noqa: ARG001  that is it
        return Rejection(*arguments, **options)

    patch.setattr("pillarbox.consumers.lanes.Rejection", rejection)


# -- order -------------------------------------------------------------------------------------------------------------


@mutant("C5 order", seed=8, ordered=True)
def _key_not_held_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    def done(self: Window, taken: Sequence[Work], left: Sequence[Work] = ()) -> list[Line]:
        original(self, taken, ())
        self.put(left)  # behind the others
        return []

    original = Window.done
    patch.setattr(Window, "done", done)


@mutant("C5 order", seed=3, ordered=True, batch=8)
def _rest_of_a_key_tried_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    async def in_turn(self: Processor, parts: Sequence[Sequence[Work]]) -> Processed:
        processed = Processed()
        for part in parts:
            processed.add(await self.process(part))
        return processed

    patch.setattr(Processor, "_in_turn", in_turn)


@mutant("C5 order", seed=10, ordered=True, batch=8)
def _rest_of_a_key_goes_on_without_one_that_failed(patch: pytest.MonkeyPatch) -> None:
    async def without(self: Processor, works: Sequence[Work], errors: Mapping[Work, Exception]) -> Processed:
        processed = await self.process([work for work in works if work not in errors])
        processed.failed += [(work, self._failed(work, error)) for work, error in errors.items()]
        return processed

    patch.setattr(Processor, "_without", without)


@mutant("C5 order", seed=8, ordered=True)
def _line_worked_on_by_several(patch: pytest.MonkeyPatch) -> None:
    take = Window.take

    def eager(self: Window, tenant: str | None, limit: int) -> list[Work]:
        taken = take(self, tenant, limit)
        for work in taken:
            self.wake(work.line)
        return taken

    patch.setattr(Window, "take", eager)


@mutant("C5 order", seed=17, ordered=True)
def _suspects_spilled_before_those_in_front_of_them(patch: pytest.MonkeyPatch) -> None:
    async def handle(self: SubscriptionIntake, works: list[Work]) -> Any:
        if suspects := [work for work in works if intake._is_suspect(work)]:
            left = await self._spill_untried(suspects)
            spilled = {*suspects} - left.keys()
            return {work: left.get(work, 0.0) for work in works if work not in spilled}
        return await original(self, works)

    original = SubscriptionIntake._handle
    patch.setattr(SubscriptionIntake, "_handle", handle)


@mutant("C5 order", seed=145, ordered=True, batch=8)
def _rest_of_a_line_spilled_before_what_is_left_of_it(patch: pytest.MonkeyPatch) -> None:
    behind: dict[int, set[Line]] = {}

    async def see_to(self: SubscriptionIntake, processed: Processed) -> Any:
        behind[id(asyncio.current_task())] = {work.line for work in processed.behind}
        return await original(self, processed)

    async def handle(self: SubscriptionIntake, works: list[Work]) -> Any:
        left = await handle_well(self, works)
        for line in behind.pop(id(asyncio.current_task()), set[Line]()).intersection(it.line for it in left):
            if more := self._window.more_of(line, 500):
                works += more
                left |= await self._spill_untried(more)
        return left

    original, handle_well = SubscriptionIntake._see_to, SubscriptionIntake._handle
    patch.setattr(SubscriptionIntake, "_see_to", see_to)
    patch.setattr(SubscriptionIntake, "_handle", handle)


@mutant("C5 order", seed=2, ordered=True, batch=8, parks=True, lots=[Lot.FORGED, Lot.FINE])
def _rest_of_a_key_goes_on_behind_another_body(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Processor, "_parks", property(lambda _self: False, lambda _self, _parks: None), raising=False)


@mutant("C5 order", seed=37, ordered=True, parks=True)
def _another_body_spilled_behind_the_rest_of_its_key(patch: pytest.MonkeyPatch) -> None:
    def write(self: Spiller, connection: Any, troubles: Sequence[Trouble]) -> Any:
        return original(self, connection, sorted(troubles, key=lambda each: each.known_by is KnownBy.BODY))

    original = Spiller.write
    patch.setattr(Spiller, "write", write)


# -- its life ----------------------------------------------------------------------------------------------------------


@mutant("C9 liveness")
def _resting_line_not_woken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionIntake, "_wake", lambda _self, _window, _line: None)


@mutant("C9 liveness", seed=2)
def _free_hand_not_heard_of(patch: pytest.MonkeyPatch) -> None:
    def end(self: Hands, tenant: str | None) -> None:
        self.offer = lambda: False
        original(self, tenant)

    original = Hands.end
    patch.setattr(Hands, "end", end)


@mutant("H93")
def _lost_connection_not_borne(patch: pytest.MonkeyPatch) -> None:
    serve = SubscriptionIntake._serve

    async def proud(self: SubscriptionIntake, *arguments: Any) -> None:
        try:
            await serve(self, *arguments)
        except OSError as error:
            raise RuntimeError("lost") from error

    patch.setattr(SubscriptionIntake, "_serve", proud)


@mutant("C10 end")
def _stop_not_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionIntake, "stop", lambda _self: None)


@mutant("C10 end", "C9 liveness")
def _transaction_left_open(patch: pytest.MonkeyPatch) -> None:
    async def leave(self: SimulatedUnitOfWork, _kind: Any, error: Any, _trace: Any) -> None:
        if error is None:
            await self.flush()
            await self._commit()

    patch.setattr(SimulatedUnitOfWork, "__aexit__", leave)


if __name__ == "__main__":
    sys.exit(search(MUTANTS))
