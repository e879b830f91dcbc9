"""The contract of `Inbox`, one test per promise.

Bind it by a subclass with a ``world`` fixture::

    class TestMyInbox(InboxContract):
        @pytest.fixture
        def world(self) -> World: ...

A store without transactions sets ``lacks`` to the reason; tests that need them are skipped with that reason.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol
from uuid import UUID, uuid4

import pytest

from ...consumers.failure import Failure, classify
from ...inbox import Admission, Admitted, Arrival, Claim, Inbox, Spill, consumer_id, digest_of

NEW, DUPLICATE, ALTERED = Admission.NEW, Admission.DUPLICATE, Admission.ALTERED
CONSUMER = consumer_id("billing")
DAY = timedelta(days=1)
PATIENCE = 20.0
_A_WHILE = 0.2


class Transaction(Protocol):
    """Calls a method of a port in a transaction, with the connection as its first argument."""

    async def __call__(self, method: Any, *arguments: Any, **options: Any) -> Any: ...


class World(ABC):
    """An inbox, and its transactions."""

    inbox: Inbox
    lacks: str | None = None
    """Reason for which it has no transactions."""
    takes_turns = False
    """Whether only one transaction can write at a time."""

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """A transaction that commits at the end of the block, and rolls back if the block fails."""

    @abstractmethod
    async def age(self, by: timedelta) -> None:
        """Make every row of the inbox older."""

    def needs_transactions(self) -> None:
        """Skip the test without transactions."""
        if self.lacks is not None:
            pytest.skip(self.lacks)

    @asynccontextmanager
    async def undone_transaction(self) -> AsyncIterator[Transaction]:
        """A transaction that rolls back at the end of the block."""
        with suppress(_Undone):
            async with self.transaction() as run:
                yield run
                raise _Undone

    async def admit(
        self, arrivals: Sequence[Arrival], *, consumer: int = CONSUMER, tenant: str | None = "acme"
    ) -> list[Admission]:
        """Admit messages in a separate transaction."""
        async with self.transaction() as run:
            return list((await run(self.inbox.admit, consumer, tenant, arrivals)).admissions)

    async def ask(self, arrivals: Sequence[Arrival], *lines: int, consumer: int = CONSUMER) -> Admitted:
        """Admit messages in a separate transaction, and read the gates of these lines."""
        async with self.transaction() as run:
            found = await run(self.inbox.admit, consumer, "acme", arrivals, claims=consumer, lines=lambda: lines)
            assert isinstance(found, Admitted)
            return found

    async def gated(self, *lines: int, consumer: int = CONSUMER) -> set[int]:
        """The given lines that are gated."""
        return {*(await self.ask([arrival()], *lines, consumer=consumer)).gated}

    async def spill(
        self, spilled: Arrival | None = None, *, line: int, consumer: int = CONSUMER, **options: Any
    ) -> Claim:
        """Admit a message and spill it, in a separate transaction."""
        spilled = spilled or arrival()
        written = spill(spilled, line=line, **options)
        async with self.transaction() as run:
            await run(self.inbox.admit, consumer, "acme", [spilled])
            await run(self.inbox.spill, consumer, "acme", [written])
        return written.claim

    async def redeem(self, claim: Claim) -> tuple[bool, str | None]:
        """Redeem a claim in a separate transaction."""
        async with self.transaction() as run:
            is_there, refused = await run(self.inbox.redeem, CONSUMER, claim)
        return is_there, refused

    async def prune(self, older_than: timedelta, limit: int = 1000, *, consumer: int = CONSUMER) -> int:
        """Prune in a separate transaction."""
        async with self.transaction() as run:
            return int(await run(self.inbox.prune, consumer, older_than, limit))


class _Undone(Exception):  # noqa: N818  an outcome, not a failure
    """Rolls a transaction back."""


def arrival(body: bytes = b"{}", *, event_id: UUID | None = None, schema_version: int = 1) -> Arrival:
    """A new message, or one with this event id."""
    return Arrival(event_id or uuid4(), schema_version, digest_of(body))


def spill(spilled: Arrival, *, line: int, gate: bool = True, refused: str | None = None) -> Spill:
    """The spill of a message."""
    return Spill(Claim(line, spilled.event_id), uuid4(), gate, refused)


class InboxContract:
    """The promises of `Inbox`."""

    # -- admitting -----------------------------------------------------------------------------------------------------

    async def test_nothing_is_admitted_as_nothing(self, world: World) -> None:
        assert await world.admit([]) == []

    async def test_what_was_admitted_once_is_a_duplicate_from_then_on(self, world: World) -> None:
        first, second = arrival(), arrival()
        assert await world.admit([first]) == [NEW]
        assert await world.admit([first]) == [DUPLICATE]
        assert await world.admit([second, first]) == [NEW, DUPLICATE]

    async def test_h82_another_body_under_a_known_id_is_altered(self, world: World) -> None:
        first = arrival(b"1")
        await world.admit([first])
        changed = arrival(b"2", event_id=first.event_id)
        assert await world.admit([changed]) == [ALTERED]
        assert await world.admit([arrival(), changed, first]) == [NEW, ALTERED, DUPLICATE]

    async def test_another_schema_version_is_a_duplicate_whatever_its_body(self, world: World) -> None:
        first = arrival(b"1")
        others = [arrival(body, event_id=first.event_id, schema_version=2) for body in (b"1", b"2")]
        assert await world.admit([first, *others]) == [NEW, DUPLICATE, DUPLICATE]
        assert await world.admit([*others, first]) == [DUPLICATE, DUPLICATE, DUPLICATE]

    async def test_h83_tenants_are_independent(self, world: World) -> None:
        first = arrival(b"1")
        changed = arrival(b"2", event_id=first.event_id)
        await world.admit([first], tenant="acme")
        for tenant in ("Acme", "acme ", None):
            assert await world.admit([changed], tenant=tenant) == [NEW]
            assert await world.admit([changed], tenant=tenant) == [DUPLICATE]
        assert await world.admit([first], tenant="acme") == [DUPLICATE]

    async def test_h83_consumers_are_independent_and_so_are_their_generations(self, world: World) -> None:
        first = arrival()
        for consumer in (CONSUMER, consumer_id("shipping"), consumer_id("billing", 2)):
            assert await world.admit([first], consumer=consumer) == [NEW]
            assert await world.admit([first], consumer=consumer) == [DUPLICATE]

    async def test_no_tenant_and_one_without_a_name_are_the_same(self, world: World) -> None:
        first = arrival()
        assert await world.admit([first], tenant=None) == [NEW]
        assert await world.admit([first], tenant="") == [DUPLICATE]

    async def test_the_second_of_two_with_one_id_is_compared_with_the_first(self, world: World) -> None:
        one = arrival(b"1")
        same, changed = arrival(b"1", event_id=one.event_id), arrival(b"2", event_id=one.event_id)
        other = arrival()
        assert await world.admit([one, same, other, changed]) == [NEW, DUPLICATE, NEW, ALTERED]
        assert await world.admit([changed, one]) == [ALTERED, DUPLICATE]

    async def test_the_second_of_two_with_one_known_id_is_compared_with_what_was_stored(self, world: World) -> None:
        one = arrival(b"1")
        await world.admit([one])
        changed = arrival(b"2", event_id=one.event_id)
        assert await world.admit([changed, changed, one]) == [ALTERED, ALTERED, DUPLICATE]

    async def test_a_large_batch_is_answered_in_its_order(self, world: World) -> None:
        known = [arrival() for _ in range(60)]
        await world.admit(known[:50])
        changed = [arrival(b"other", event_id=each.event_id) for each in known[:10]]
        batch, expected = list[Arrival](), list[Admission]()
        for index in range(500):
            if index % 50 == 7:
                batch.append(changed[index // 50])
                expected.append(ALTERED)
            elif index % 10 == 3:
                batch.append(known[index // 10])
                expected.append(DUPLICATE)
            else:
                batch.append(arrival())
                expected.append(NEW)
        assert await world.admit(batch) == expected
        again = [ALTERED if answer is ALTERED else DUPLICATE for answer in expected]
        assert await world.admit(batch) == again

    async def test_digests_of_any_bytes_are_compared_exactly(self, world: World) -> None:
        first = [Arrival(uuid4(), 1, bytes([byte]) * 15 + b"\0") for byte in (0, 32, 39, 92, 255)]
        assert await world.admit(first) == [NEW] * 5
        assert await world.admit(first) == [DUPLICATE] * 5
        changed = [Arrival(each.event_id, 1, each.digest[:15] + b" ") for each in first]
        assert await world.admit(changed) == [ALTERED] * 5

    # -- transactions --------------------------------------------------------------------------------------------------

    async def test_h79_a_rollback_takes_the_rows_with_it(self, world: World) -> None:
        world.needs_transactions()
        batch = [arrival(), arrival()]
        async with world.undone_transaction() as run:
            assert [*(await run(world.inbox.admit, CONSUMER, "acme", batch)).admissions] == [NEW, NEW]
        assert await world.admit(batch) == [NEW, NEW]

    async def test_what_a_transaction_has_admitted_is_a_duplicate_within_it(self, world: World) -> None:
        batch = [arrival(), arrival()]
        async with world.transaction() as run:
            await run(world.inbox.admit, CONSUMER, "acme", batch[:1])
            assert [*(await run(world.inbox.admit, CONSUMER, "acme", batch)).admissions] == [DUPLICATE, NEW]

    @pytest.mark.parametrize("count", [1, 20])
    async def test_h78_who_brings_the_same_waits_and_skips_it_if_the_first_commits(
        self, world: World, count: int
    ) -> None:
        world.needs_transactions()
        batch = [arrival() for _ in range(count)]
        async with world.transaction() as run:
            await run(world.inbox.admit, CONSUMER, "acme", batch)
            second = asyncio.ensure_future(world.admit(batch))
            await still_waiting(second)
        assert await asyncio.wait_for(second, PATIENCE) == [DUPLICATE] * count

    @pytest.mark.parametrize("count", [1, 20])
    async def test_h78_who_brings_the_same_waits_and_does_it_if_the_first_rolls_back(
        self, world: World, count: int
    ) -> None:
        world.needs_transactions()
        batch = [arrival() for _ in range(count)]
        async with world.undone_transaction() as run:
            await run(world.inbox.admit, CONSUMER, "acme", batch)
            second = asyncio.ensure_future(world.admit(batch))
            await still_waiting(second)
        assert await asyncio.wait_for(second, PATIENCE) == [NEW] * count

    async def test_h82_an_altered_one_is_known_though_the_first_has_just_committed(self, world: World) -> None:
        world.needs_transactions()
        first, new = arrival(b"1"), arrival()
        async with world.transaction() as run:
            await run(world.inbox.admit, CONSUMER, "acme", [first])
            second = asyncio.ensure_future(world.admit([new, arrival(b"2", event_id=first.event_id)]))
            await still_waiting(second)
        assert await asyncio.wait_for(second, PATIENCE) == [NEW, ALTERED]

    async def test_h78_batches_in_opposite_order_never_wait_for_each_other(self, world: World) -> None:
        world.needs_transactions()
        batch = sorted((arrival() for _ in range(200)), key=lambda each: each.event_id)
        answers = await asyncio.wait_for(asyncio.gather(world.admit(batch[:150]), world.admit(batch[:49:-1])), PATIENCE)
        one, other = answers[0], answers[1][::-1]
        assert {*zip(one[50:], other[:100], strict=True)} in ({(NEW, DUPLICATE)}, {(DUPLICATE, NEW)})
        assert {*one[:50], *other[100:]} == {NEW}

    # -- spills --------------------------------------------------------------------------------------------------------

    async def test_a_claim_is_redeemed_once(self, world: World) -> None:
        claim = await world.spill(line=1)
        assert await world.redeem(claim) == (True, None)
        assert await world.redeem(claim) == (False, None)

    async def test_a_claim_says_why_its_message_was_refused(self, world: World) -> None:
        claim = await world.spill(line=1, gate=False, refused="it cannot be read")
        assert await world.redeem(claim) == (True, "it cannot be read")

    async def test_a_spilled_message_is_a_duplicate_before_and_after_it_took_effect(self, world: World) -> None:
        spilled = arrival()
        claim = await world.spill(spilled, line=1)
        assert await world.admit([spilled]) == [DUPLICATE]
        await world.redeem(claim)
        assert await world.admit([spilled]) == [DUPLICATE]

    async def test_a_line_is_gated_as_long_as_a_claim_of_it_gates(self, world: World) -> None:
        first, second = await world.spill(line=7), await world.spill(line=7)
        assert await world.gated(6, 7, 8) == {7}
        await world.redeem(first)
        assert await world.gated(6, 7, 8) == {7}
        await world.redeem(second)
        assert await world.gated(6, 7, 8) == set()

    async def test_a_claim_that_does_not_gate_holds_nobody_up(self, world: World) -> None:
        claims = [await world.spill(line=7, gate=False) for _ in range(3)]
        assert await world.gated(7) == set()
        assert await world.redeem(claims[1]) == (True, None)

    async def test_h83_claims_of_other_consumers_gate_nothing_here(self, world: World) -> None:
        claim = await world.spill(line=7, consumer=consumer_id("shipping"))
        assert await world.gated(7) == set()
        assert await world.redeem(claim) == (False, None)
        assert await world.gated(7, consumer=consumer_id("shipping")) == {7}

    async def test_the_gates_are_told_whether_all_are_new_or_none_is(self, world: World) -> None:
        known, lines = arrival(), [3, 2**62, 5]
        await world.admit([known])
        await world.spill(line=2**62)
        for batch in ([arrival()], [known], [known, arrival()]):
            async with world.transaction() as run:
                admitted = await run(world.inbox.admit, CONSUMER, "acme", batch, claims=CONSUMER, lines=lambda: lines)
            assert {*admitted.gated} == {2**62}

    async def test_nobody_asks_for_gates_who_names_no_lines(self, world: World) -> None:
        await world.spill(line=7)
        assert await world.gated() == set()

    async def test_h79_a_rollback_takes_claims_with_it_and_brings_redeemed_ones_back(self, world: World) -> None:
        world.needs_transactions()
        spilled = arrival()
        async with world.undone_transaction() as run:
            await run(world.inbox.admit, CONSUMER, "acme", [spilled])
            await run(world.inbox.spill, CONSUMER, "acme", [spill(spilled, line=1)])
        assert await world.gated(1) == set()
        assert await world.admit([spilled]) == [NEW]
        claim = await world.spill(line=2)
        async with world.undone_transaction() as run:
            assert tuple(await run(world.inbox.redeem, CONSUMER, claim)) == (True, None)
        assert await world.gated(2) == {2}
        assert await world.redeem(claim) == (True, None)

    async def test_h90_a_line_is_gated_until_the_effect_has_committed(self, world: World) -> None:
        world.needs_transactions()
        claim = await world.spill(line=1)
        async with world.transaction() as run:
            await run(world.inbox.redeem, CONSUMER, claim)
            second = asyncio.ensure_future(world.gated(1))
            done, _ = await asyncio.wait({second}, timeout=_A_WHILE)
            assert not done or second.result() == {1}
        assert await asyncio.wait_for(second, PATIENCE) == ({1} if done else set())

    async def test_h90_who_was_refused_by_a_spill_that_has_just_committed_sees_its_gate(self, world: World) -> None:
        """The message arrives twice, and the second batch has later ones of its line with it."""
        world.needs_transactions()
        spilled, later = arrival(), arrival()
        async with world.transaction() as run:
            await run(world.inbox.admit, CONSUMER, "acme", [spilled])
            second = asyncio.ensure_future(world.ask([spilled, later], 1))
            await still_waiting(second)
            await run(world.inbox.spill, CONSUMER, "acme", [spill(spilled, line=1)])
        admissions, gated = await asyncio.wait_for(second, PATIENCE)
        assert ([*admissions], {*gated}) == ([DUPLICATE, NEW], {1})

    async def test_h80_of_two_who_redeem_a_claim_one_gets_it_and_the_other_does_not_wait(self, world: World) -> None:
        """With one writer at a time, the second waits for its turn."""
        world.needs_transactions()
        claim = await world.spill(line=1)
        async with world.transaction() as run:
            assert tuple(await run(world.inbox.redeem, CONSUMER, claim)) == (True, None)
            second = asyncio.ensure_future(world.redeem(claim))
            done, _ = await asyncio.wait({second}, timeout=_A_WHILE if world.takes_turns else PATIENCE)
            assert bool(done) is not world.takes_turns
            assert not done or classify(second.exception() or AssertionError()) is Failure.TRANSIENT
        assert done or await asyncio.wait_for(second, PATIENCE) == (False, None)
        assert await world.redeem(claim) == (False, None)

    # -- pruning -------------------------------------------------------------------------------------------------------

    async def test_h81_only_what_is_old_is_pruned_and_it_is_new_again(self, world: World) -> None:
        old, young = [arrival(), arrival()], [arrival()]
        await world.admit(old)
        await world.age(2 * DAY)
        await world.admit(young)
        assert await world.prune(3 * DAY) == 0
        assert await world.prune(DAY) == 2
        assert await world.prune(DAY) == 0
        assert await world.admit([*old, *young]) == [NEW, NEW, DUPLICATE]

    async def test_h81_pruning_goes_by_portions_with_the_oldest_first(self, world: World) -> None:
        batches = [[arrival() for _ in range(4)] for _ in range(2)]
        for batch in batches:
            await world.admit(batch, tenant=str(batch is batches[0]))
            await world.age(2 * DAY)
        assert await world.prune(DAY, 4) == 4
        assert await world.admit(batches[1], tenant="False") == [DUPLICATE] * 4
        assert await world.prune(DAY, 3) == 3
        assert await world.prune(DAY, 3) == 1

    async def test_h81_what_has_a_claim_is_not_pruned(self, world: World) -> None:
        waiting, gone = arrival(), arrival()
        claim = await world.spill(waiting, line=1, gate=False)
        await world.admit([gone])
        await world.age(2 * DAY)
        assert await world.prune(DAY) == 1
        assert await world.admit([waiting, gone]) == [DUPLICATE, NEW]
        await world.redeem(claim)
        assert await world.prune(DAY) == 1
        assert await world.prune(DAY, 3) == 0

    async def test_h81_pruning_is_about_one_consumer(self, world: World) -> None:
        first, other = arrival(), consumer_id("shipping")
        for consumer in (CONSUMER, other):
            await world.admit([first], consumer=consumer)
        await world.age(2 * DAY)
        assert await world.prune(DAY, consumer=other) == 1
        assert await world.admit([first]) == [DUPLICATE]


async def still_waiting(task: asyncio.Future[Any]) -> None:
    """Assert that the task waits for this one."""
    done, _ = await asyncio.wait({task}, timeout=_A_WHILE)
    assert not done, task.result()
