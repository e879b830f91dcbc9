"""What every `Inbox` and every `Letters` must do, one test per promise.

Bind them by subclasses with a ``world`` fixture::

    class TestMyInbox(InboxContract):
        @pytest.fixture
        def world(self) -> World: ...

A store without transactions says so in ``lacks``; the tests that need them are skipped with that reason.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol
from uuid import UUID, uuid4

import pytest

from ...inbox import (
    Admission,
    Arrival,
    Inbox,
    Letter,
    LetterFilter,
    LetterKind,
    Letters,
    LetterState,
    consumer_id,
    digest_of,
)
from ...transport import Message

NEW, DUPLICATE, ALTERED = Admission.NEW, Admission.DUPLICATE, Admission.ALTERED
OTHER_VERSION = Admission.OTHER_VERSION
CONSUMER = consumer_id("billing")
DAY = timedelta(days=1)
PATIENCE = 20.0
_A_WHILE = 0.2


class Transaction(Protocol):
    """Calls a method of a port in a transaction: the connection is its first argument."""

    async def __call__(self, method: Any, *arguments: Any, **options: Any) -> Any: ...


class World(ABC):
    """An inbox and letters, and the means to use them in transactions."""

    inbox: Inbox
    letters: Letters
    lacks: str | None = None
    """Why it has no transactions."""

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """One that commits at the end of the block, and rolls back if the block fails."""

    @abstractmethod
    async def age(self, by: timedelta) -> None:
        """Let every row of the inbox have been written that much earlier."""

    def needs_transactions(self) -> None:
        """Skip the test if there are none."""
        if self.lacks is not None:
            pytest.skip(self.lacks)

    @asynccontextmanager
    async def undone_transaction(self) -> AsyncIterator[Transaction]:
        """One that rolls back at the end of the block."""
        with suppress(_Undone):
            async with self.transaction() as run:
                yield run
                raise _Undone

    async def admit(
        self, arrivals: Sequence[Arrival], *, consumer: int = CONSUMER, tenant: str | None = "acme"
    ) -> list[Admission]:
        """In a transaction of its own."""
        async with self.transaction() as run:
            return list(await run(self.inbox.admit, consumer, tenant, arrivals))

    async def prune(self, older_than: timedelta, limit: int = 1000, *, consumer: int = CONSUMER) -> int:
        """In a transaction of its own."""
        async with self.transaction() as run:
            return int(await run(self.inbox.prune, consumer, older_than, limit))

    async def write(self, *letters: Letter) -> list[int]:
        """In a transaction of its own."""
        async with self.transaction() as run:
            return list(await run(self.letters.write, letters))

    async def find(self, wanted: LetterFilter, **options: Any) -> list[Letter]:
        """In a transaction of its own."""
        async with self.transaction() as run:
            return list(await run(self.letters.find, wanted, **options))

    async def letter(self, letter_id: int) -> Letter:
        """In whatever state it is."""
        [found] = await self.find(LetterFilter(ids=(letter_id,), states=()))
        return found


class _Undone(Exception):  # noqa: N818  an outcome, not a failure
    """Makes a transaction roll back."""


def arrival(body: bytes = b"{}", *, event_id: UUID | None = None, schema_version: int = 1) -> Arrival:
    """A message that was never seen, unless its id is given."""
    return Arrival(event_id or uuid4(), schema_version, digest_of(body))


def letter(kind: LetterKind = LetterKind.POISON, *, consumer: str = "billing", **changes: Any) -> Letter:
    """A letter with everything in it that a store might spoil."""
    event_id = uuid4()
    key = changes.pop("key", "Käy ")
    headers = {"event_id": str(event_id), "user_id": 'Ä✓ \\ "%0A="'}
    values: dict[str, Any] = {
        "reason": "it cannot be read",
        "message": Message("orders.events", key, bytes(range(256)), headers),
        "event_id": event_id,
        "event_type": "orders.order.placed",
        "schema_version": 3,
        "tenant": "acme",
        "attempts": 5,
    }
    return Letter(consumer=consumer, kind=kind, **(values | changes))


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

    async def test_another_schema_version_is_known_as_such_whatever_its_body(self, world: World) -> None:
        first = arrival(b"1")
        others = [arrival(body, event_id=first.event_id, schema_version=2) for body in (b"1", b"2")]
        assert await world.admit([first, *others]) == [NEW, OTHER_VERSION, OTHER_VERSION]
        assert await world.admit([*others, first]) == [OTHER_VERSION, OTHER_VERSION, DUPLICATE]

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
            assert await run(world.inbox.admit, CONSUMER, "acme", batch) == [NEW, NEW]
        assert await world.admit(batch) == [NEW, NEW]

    async def test_what_a_transaction_has_admitted_is_a_duplicate_within_it(self, world: World) -> None:
        batch = [arrival(), arrival()]
        async with world.transaction() as run:
            await run(world.inbox.admit, CONSUMER, "acme", batch[:1])
            assert list(await run(world.inbox.admit, CONSUMER, "acme", batch)) == [DUPLICATE, NEW]

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

    # -- forgetting ----------------------------------------------------------------------------------------------------

    async def test_what_is_forgotten_is_new_again_in_any_version(self, world: World) -> None:
        first, beside = arrival(b"1"), arrival()
        other = arrival(b"2", event_id=first.event_id, schema_version=2)
        await world.admit([first, beside])
        async with world.transaction() as run:
            assert await run(world.inbox.forget, CONSUMER, "acme", first)
            assert await run(world.inbox.admit, CONSUMER, "acme", [other]) == [NEW]
        assert await world.admit([first, other, beside]) == [OTHER_VERSION, DUPLICATE, DUPLICATE]

    async def test_only_what_was_admitted_itself_is_forgotten(self, world: World) -> None:
        first = arrival(b"1")
        await world.admit([first])
        others = [
            (CONSUMER, "acme", arrival(b"2", event_id=first.event_id)),
            (CONSUMER, "acme", arrival(b"1", event_id=first.event_id, schema_version=2)),
            (CONSUMER, "acme", arrival(b"1")),
            (CONSUMER, "globex", first),
            (CONSUMER, None, first),
            (consumer_id("shipping"), "acme", first),
        ]
        async with world.transaction() as run:
            for other in others:
                assert not await run(world.inbox.forget, *other)
        assert await world.admit([first]) == [DUPLICATE]

    async def test_what_is_forgotten_in_vain_is_still_known(self, world: World) -> None:
        world.needs_transactions()
        first = arrival()
        await world.admit([first])
        async with world.undone_transaction() as run:
            assert await run(world.inbox.forget, CONSUMER, "acme", first)
        assert await world.admit([first]) == [DUPLICATE]

    async def test_whoever_comes_while_it_is_forgotten_waits_for_the_outcome(self, world: World) -> None:
        world.needs_transactions()
        first = arrival(b"1")
        other = arrival(b"2", event_id=first.event_id, schema_version=2)
        await world.admit([first])
        async with world.transaction() as run:
            assert await run(world.inbox.forget, CONSUMER, "acme", first)
            assert await run(world.inbox.admit, CONSUMER, "acme", [other]) == [NEW]
            second = asyncio.ensure_future(world.admit([first]))
            await still_waiting(second)
        assert await asyncio.wait_for(second, PATIENCE) == [OTHER_VERSION]

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
        assert await world.prune(DAY, 3) == 0

    async def test_h81_pruning_is_about_one_consumer(self, world: World) -> None:
        first, other = arrival(), consumer_id("shipping")
        for consumer in (CONSUMER, other):
            await world.admit([first], consumer=consumer)
        await world.age(2 * DAY)
        assert await world.prune(DAY, consumer=other) == 1
        assert await world.admit([first]) == [DUPLICATE]


class LettersContract:
    """The promises of `Letters`."""

    # -- writing and finding -------------------------------------------------------------------------------------------

    async def test_a_letter_comes_back_exactly(self, world: World) -> None:
        written = [letter(), letter(tenant=None, event_id=None, event_type="", schema_version=0)]
        ids = await world.write(*written)
        found = await world.find(LetterFilter())
        assert [each.id for each in found] == ids == sorted(ids)
        for before, after in zip(written, found, strict=True):
            for name in ("consumer", "kind", "reason", "message", "event_id", "event_type", "schema_version", "tenant"):
                assert getattr(after, name) == getattr(before, name)
            assert (after.state, after.attempts, after.edited) == (LetterState.OPEN, 5, None)
            assert after.body == before.message.body
            assert after.created_at is not None
            assert after.updated_at is not None
            assert abs(datetime.now(UTC) - after.created_at) < timedelta(minutes=1)

    async def test_a_reason_is_kept_without_its_secrets(self, world: World) -> None:
        [one] = await world.write(letter(reason="no\nway: password=hunter2"))
        assert (await world.letter(one)).reason == "no way: password=***"
        async with world.transaction() as run:
            await run(world.letters.failed, one, LetterKind.POISON, "postgresql://me:hunter2@db")
        assert (await world.letter(one)).reason == "postgresql://me:***@db"

    async def test_nothing_is_written_as_nothing(self, world: World) -> None:
        assert await world.write() == []

    async def test_h79_a_rollback_takes_letters_with_it(self, world: World) -> None:
        world.needs_transactions()
        async with world.undone_transaction() as run:
            await run(world.letters.write, [letter()])
        assert await world.find(LetterFilter()) == []

    async def test_letters_are_found_by_what_they_are_about(self, world: World) -> None:
        this = letter()
        others = [
            letter(consumer="shipping"),
            letter(tenant="other"),
            letter(LetterKind.HELD),
            letter(event_type="orders.order.paid"),
            letter(message=Message("other.events", "Käy ", b"", {})),
            letter(key="käy "),
        ]
        [one, *_] = await world.write(this, *others)
        wanted = LetterFilter(
            consumer="billing",
            tenant="acme",
            kinds=(LetterKind.POISON, LetterKind.REJECTED),
            event_type="orders.order.placed",
            topic="orders.events",
            key="Käy ",
        )
        assert [each.id for each in await world.find(wanted)] == [one]
        assert [each.id for each in await world.find(LetterFilter(event_id=this.event_id))] == [one]
        assert [each.id for each in await world.find(LetterFilter(ids=(one,)))] == [one]
        assert await world.find(LetterFilter(ids=())) == []
        assert len(await world.find(LetterFilter())) == 7

    async def test_letters_are_found_in_pages(self, world: World) -> None:
        ids = await world.write(*(letter() for _ in range(5)))
        pages, after = [], 0
        while page := await world.find(LetterFilter(), after=after, limit=2):
            pages.append([each.id for each in page])
            after = page[-1].id
        assert pages == [ids[:2], ids[2:4], ids[4:]]

    async def test_only_open_letters_are_found_unless_others_are_wanted(self, world: World) -> None:
        first, second = await world.write(letter(), letter())
        async with world.transaction() as run:
            assert await run(world.letters.close, first, LetterState.DISCARDED)
        assert [each.id for each in await world.find(LetterFilter())] == [second]
        assert [each.id for each in await world.find(LetterFilter(states=(LetterState.DISCARDED,)))] == [first]
        assert [each.id for each in await world.find(LetterFilter(states=()))] == [first, second]

    async def test_letters_are_counted_by_consumer_and_kind(self, world: World) -> None:
        held = LetterKind.HELD
        await world.write(letter(), letter(), letter(held), letter(held, consumer="shipping"))
        async with world.transaction() as run:
            assert await run(world.letters.count, LetterFilter()) == {
                ("billing", LetterKind.POISON): 2,
                ("billing", held): 1,
                ("shipping", held): 1,
            }
            assert await run(world.letters.count, LetterFilter(consumer="shipping")) == {("shipping", held): 1}
            assert await run(world.letters.count, LetterFilter(consumer="nobody")) == {}

    # -- changing ------------------------------------------------------------------------------------------------------

    async def test_an_open_letter_can_be_taken_and_closed_once(self, world: World) -> None:
        [one] = await world.write(letter())
        async with world.transaction() as run:
            taken = await run(world.letters.take, one)
            assert (taken.id, taken.state) == (one, LetterState.OPEN)
            assert await run(world.letters.close, one, LetterState.REDRIVEN)
        async with world.transaction() as run:
            assert await run(world.letters.take, one) is None
            assert not await run(world.letters.close, one, LetterState.DISCARDED)
        assert (await world.letter(one)).state is LetterState.REDRIVEN

    async def test_a_closed_letter_is_not_changed_any_more(self, world: World) -> None:
        [one] = await world.write(letter())
        async with world.transaction() as run:
            await run(world.letters.close, one, LetterState.DISCARDED)
        before = await world.letter(one)
        async with world.transaction() as run:
            assert not await run(world.letters.failed, one, LetterKind.REJECTED, "no")
            assert not await run(world.letters.edit, one, b"other")
        assert await world.letter(one) == before

    async def test_a_letter_that_is_not_there_is_not_open(self, world: World) -> None:
        async with world.transaction() as run:
            assert await run(world.letters.take, 123_456_789) is None
            assert not await run(world.letters.close, 123_456_789, LetterState.REDRIVEN)

    async def test_each_failure_is_counted_with_its_kind_and_reason(self, world: World) -> None:
        [one] = await world.write(letter(LetterKind.UNKNOWN, attempts=1))
        for _ in range(2):
            async with world.transaction() as run:
                assert await run(world.letters.failed, one, LetterKind.REJECTED, "no stock")
        found = await world.letter(one)
        assert (found.kind, found.reason, found.attempts) == (LetterKind.REJECTED, "no stock", 3)
        assert found.state is LetterState.OPEN

    async def test_an_edit_keeps_the_original_body(self, world: World) -> None:
        [one] = await world.write(letter())
        for body in (b"\x00other", b""):
            async with world.transaction() as run:
                assert await run(world.letters.edit, one, body)
            found = await world.letter(one)
            assert (found.body, found.edited, found.message.body) == (body, body, bytes(range(256)))

    async def test_h81_closed_letters_are_pruned_and_open_ones_kept(self, world: World) -> None:
        closed, still_open, others = await world.write(letter(consumer="pruned"), letter(consumer="pruned"), letter())
        async with world.transaction() as run:
            for number in (closed, others):
                assert await run(world.letters.close, number, LetterState.DISCARDED)
        for older_than, gone in ((timedelta(days=1), 0), (timedelta(days=-1), 1)):
            async with world.transaction() as run:
                assert await run(world.letters.prune, "pruned", older_than, 10) == gone
        kept = await world.find(LetterFilter(ids=(closed, still_open, others), states=()))
        assert [each.id for each in kept] == [still_open, others]

    async def test_what_people_have_decided_about_events_can_be_kept(self, world: World) -> None:
        open_one, redriven, discarded, edited, altered, nameless = written = await world.write(
            *(letter(consumer="decided") for _ in range(4)),
            letter(consumer="decided", kind=LetterKind.ALTERED),
            letter(consumer="decided", event_id=None),
        )
        async with world.transaction() as run:
            assert await run(world.letters.edit, edited, b"better")
            for number in (redriven, edited):
                assert await run(world.letters.close, number, LetterState.REDRIVEN)
            for number in (discarded, altered, nameless):
                assert await run(world.letters.close, number, LetterState.DISCARDED)
        async with world.transaction() as run:
            prune = partial(world.letters.prune, keep_decisions=True)
            assert await run(prune, "decided", timedelta(days=-1), 10) == 3
        kept = await world.find(LetterFilter(ids=tuple(written), states=()))
        assert [each.id for each in kept] == [open_one, discarded, edited]
        assert [each.is_decision for each in kept] == [False, True, True]

    async def test_h89_of_two_who_take_a_letter_one_gets_it(self, world: World) -> None:
        world.needs_transactions()
        [one] = await world.write(letter())

        async def redrive() -> bool:
            async with world.transaction() as run:
                if await run(world.letters.take, one) is None:
                    return False
                return bool(await run(world.letters.close, one, LetterState.REDRIVEN))

        async with world.transaction() as run:
            assert await run(world.letters.take, one) is not None
            second = asyncio.ensure_future(redrive())
            await still_waiting(second)
            assert await run(world.letters.close, one, LetterState.DISCARDED)
        assert await asyncio.wait_for(second, PATIENCE) is False
        assert (await world.letter(one)).state is LetterState.DISCARDED

    async def test_h89_who_has_waited_gets_a_letter_that_stayed_open(self, world: World) -> None:
        world.needs_transactions()
        [one] = await world.write(letter())

        async def take() -> Any:
            async with world.transaction() as run:
                return await run(world.letters.take, one)

        async with world.transaction() as run:
            await run(world.letters.take, one)
            second = asyncio.ensure_future(take())
            await still_waiting(second)
            assert await run(world.letters.failed, one, LetterKind.REJECTED, "no")
        found = await asyncio.wait_for(second, PATIENCE)
        assert (found.kind, found.attempts) == (LetterKind.REJECTED, 6)

    async def test_h89_of_many_who_close_a_letter_at_once_one_has_done_it(self, world: World) -> None:
        [one] = await world.write(letter())

        async def close(state: LetterState) -> LetterState | None:
            async with world.transaction() as run:
                return state if await run(world.letters.close, one, state) else None

        states = [LetterState.REDRIVEN, LetterState.DISCARDED] * 2
        closed = await asyncio.wait_for(asyncio.gather(*map(close, states)), PATIENCE)
        assert [state for state in closed if state] == [(await world.letter(one)).state]


async def still_waiting(task: asyncio.Future[Any]) -> None:
    """It cannot get on as long as we do not."""
    done, _ = await asyncio.wait({task}, timeout=_A_WHILE)
    assert not done, task.result()
