"""Planted mistakes of consumers, and what must find each of them.

python -m tests.simulation.consumer_mutants        search for the first seed that catches each of them
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from pillarbox.consumers import failure, naming, processing
from pillarbox.consumers.desk import Desk, Line, Work
from pillarbox.consumers.failure import Failure
from pillarbox.consumers.intake import SubscriptionIntake
from pillarbox.consumers.processing import Dealt, Processor
from pillarbox.errors import CommitOutcomeUnknown
from pillarbox.inbox import Admission
from tests.memory.inbox import MemoryInbox, MemoryTable
from tests.simulation.consumer_database import SimulatedUnitOfWork
from tests.simulation.consumers import simulate_consumers
from tests.simulation.planted import Mutant, Plant, search

MUTANTS: list[Mutant] = []


def mutant(*shows: str, seed: int = 0, **world: Any) -> Callable[[Plant], Plant]:
    """Keep a mutant, with the promises that it breaks."""

    def keep(plant: Plant) -> Plant:
        MUTANTS.append(Mutant(plant, shows, simulate_consumers, world, seed))
        return plant

    return keep


# -- one transaction ---------------------------------------------------------------------------------------------------


@mutant("C2 once", "C3 both", seed=2)
def _effect_first_and_the_row_in_another_transaction(patch: pytest.MonkeyPatch) -> None:
    async def take_effect(self: Processor, opened: Sequence[Any]) -> None:
        inbox: Any = self._inbox
        known = {place[2] for place, _ in inbox.table.seen(None)}
        async with self._home.unit_of_work() as uow:
            await self._effects.apply(uow, [it.incoming for it in opened if it.arrival.event_id not in known])
        await self._home.apart(self._admit, opened[0].work.tenant, [it.arrival for it in opened])

    patch.setattr(Processor, "_take_effect", take_effect)


@mutant("C1 loss", "C6 acked")
def _row_first_and_the_effect_in_another_transaction(patch: pytest.MonkeyPatch) -> None:
    async def take_effect(self: Processor, opened: Sequence[Any]) -> None:
        answers = await self._home.apart(self._admit, opened[0].work.tenant, [it.arrival for it in opened])
        async with self._home.unit_of_work() as uow:
            new = [it.incoming for it, answer in zip(opened, answers, strict=True) if answer is Admission.NEW]
            await self._effects.apply(uow, new)

    patch.setattr(Processor, "_take_effect", take_effect)


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


@mutant("C7 follow-up")
def _follow_up_outside_the_transaction(patch: pytest.MonkeyPatch) -> None:
    def publish(self: SimulatedUnitOfWork, mark: int) -> None:
        apart = SimulatedUnitOfWork(self._database, self._chaos, self.transaction.life, self._wire)
        apart.transaction.record("follow-up", mark)
        self._database.commit(apart.transaction, lambda _reply: None)

    patch.setattr(SimulatedUnitOfWork, "publish", publish)


@mutant("C2 once", "C3 both")
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

    def hasty(self: MemoryInbox, transaction: Any, consumer: int, tenant: Any, arrivals: Any) -> Any:
        held = [self.table._held.get((consumer, tenant or "", it.event_id), (transaction,))[0] for it in arrivals]
        if any(owner is not transaction for owner in held):
            return [Admission.DUPLICATE] * len(arrivals)
        return admit(self, transaction, consumer, tenant, arrivals)

    patch.setattr(MemoryInbox, "admit", hasty)


# -- acknowledging -----------------------------------------------------------------------------------------------------


@mutant("C6 acked", "C1 loss")
def _ack_before_commit(patch: pytest.MonkeyPatch) -> None:
    work = SubscriptionIntake._work

    async def hasty(self: SubscriptionIntake, subscription: Any, desk: Desk, works: Sequence[Work]) -> None:
        await subscription.ack([it.received for it in works])
        await work(self, subscription, desk, works)

    patch.setattr(SubscriptionIntake, "_work", hasty)


@mutant("C6 acked", seed=6)
def _unanswered_commit_taken_for_success(patch: pytest.MonkeyPatch) -> None:
    together = Processor._together

    async def careless(self: Processor, works: Sequence[Work]) -> None:
        with suppress(CommitOutcomeUnknown):
            await together(self, works)

    patch.setattr(Processor, "_together", careless)


@mutant("H93", seed=7)
def _failed_ack_not_borne(patch: pytest.MonkeyPatch) -> None:
    work = SubscriptionIntake._work

    async def proud(self: SubscriptionIntake, subscription: Any, desk: Desk, works: Sequence[Work]) -> None:
        ack = subscription.ack

        async def loud(received: Any) -> None:
            try:
                await ack(received)
            except OSError as error:
                raise RuntimeError("not acknowledged") from error

        subscription.ack = loud
        try:
            await work(self, subscription, desk, works)
        finally:
            subscription.ack = ack

    patch.setattr(SubscriptionIntake, "_work", proud)


# -- letters -----------------------------------------------------------------------------------------------------------


@mutant("C4 kind")
def _transient_errors_made_into_letters(patch: pytest.MonkeyPatch) -> None:
    def classify(error: BaseException) -> Failure:
        found = failure.classify(error)
        return Failure.POISON if found is Failure.TRANSIENT else found

    patch.setattr(processing, "classify", classify)


@mutant("C4 kind")
def _unknown_errors_given_up_at_once(patch: pytest.MonkeyPatch) -> None:
    classify = failure.classify
    patch.setitem(failure.CLASSES, "builtins.OSError", Failure.UNKNOWN)
    patch.setattr(Processor, "_is_its_own_fault", lambda _self, _trouble: True)
    assert classify(ConnectionError()) is Failure.UNKNOWN


@mutant("C9 liveness", seed=6)
def _unknown_errors_never_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Processor, "_is_its_own_fault", lambda _self, _trouble: False)


@mutant("C2 once", "C3 both")
def _letter_without_a_row(patch: pytest.MonkeyPatch) -> None:
    def write_letters(self: Processor, connection: Any, unfit: Sequence[Any]) -> Any:
        letters = [
            naming.letter_about(self._name, it.work.message, it.kind, it.reason, arrival=it.arrival) for it in unfit
        ]
        self._letters.write(connection, letters)
        return letters, [], None

    patch.setattr(Processor, "_write_letters", write_letters)


@mutant("C6 acked", seed=3)
def _letter_that_was_not_written_taken_for_written(patch: pytest.MonkeyPatch) -> None:
    park = Processor._park

    async def careless(self: Processor, unfit: Sequence[Any]) -> None:
        with suppress(Exception):
            await park(self, unfit)

    patch.setattr(Processor, "_park", careless)


@mutant("C1 loss", "C6 acked")
def _altered_taken_for_a_duplicate(patch: pytest.MonkeyPatch) -> None:
    admit = MemoryInbox.admit

    def blind(self: MemoryInbox, *arguments: Any) -> Any:
        answers = admit(self, *arguments)
        return [Admission.DUPLICATE if answer is Admission.ALTERED else answer for answer in answers]

    patch.setattr(MemoryInbox, "admit", blind)


# -- order -------------------------------------------------------------------------------------------------------------


@mutant("C5 order", ordered=True)
def _key_not_held_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    def done(self: Desk, taken: Sequence[Work], left: Sequence[Work] = ()) -> list[Line]:
        original(self, taken, ())
        self.put([work.received for work in left])  # behind the others
        return []

    original = Desk.done
    patch.setattr(Desk, "done", done)


@mutant("C5 order", ordered=True, batch=8)
def _rest_of_a_key_tried_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    async def one_by_one(self: Processor, works: Sequence[Work]) -> Dealt:
        dealt = Dealt()
        for work in works:
            dealt.add(await self.deal([work]))
        return dealt

    patch.setattr(Processor, "_one_by_one", one_by_one)


@mutant("C5 order", ordered=True)
def _line_worked_on_by_several(patch: pytest.MonkeyPatch) -> None:
    take = Desk.take

    def eager(self: Desk, limit: int) -> list[Work]:
        taken = take(self, limit)
        for work in taken:
            self.wake(work.line)
        return taken

    patch.setattr(Desk, "take", eager)


# -- its life ----------------------------------------------------------------------------------------------------------


@mutant("C9 liveness")
def _resting_line_not_woken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionIntake, "_wake", lambda _self, _desk, _line: None)


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
