"""The inbox without a database, against the same promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from pillarbox.inbox import Admission
from pillarbox.testing.conformance.inbox import CONSUMER, InboxContract, Transaction, World, arrival, spill
from tests.memory.inbox import ClaimLockedError, MemoryInbox, MemoryTransaction, RowLockedError


class MemoryWorld(World):
    def __init__(self) -> None:
        self.inbox: MemoryInbox = MemoryInbox()

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return _transaction()

    async def age(self, by: timedelta) -> None:
        rows = self.inbox.table.rows
        for place, (seen, at) in rows.items():
            rows[place] = seen, at - by


@asynccontextmanager
async def _transaction() -> AsyncIterator[Transaction]:
    transaction = MemoryTransaction()

    async def run(method: Any, *arguments: Any, **options: Any) -> Any:
        while True:
            try:
                return transaction.attempt(method, *arguments, **options)
            except RowLockedError as locked:
                over = asyncio.Event()
                locked.owner.when_over(over.set)
                await over.wait()

    try:
        yield run
    except BaseException:
        transaction.rollback()
        raise
    transaction.commit()


class TestMemoryInbox(InboxContract):
    @pytest.fixture
    def world(self) -> World:
        return MemoryWorld()

    def test_without_a_transaction_what_is_written_stays(self) -> None:
        inbox, one = MemoryInbox(), arrival()
        assert inbox.admit(None, CONSUMER, None, [one]).admissions == [Admission.NEW]
        assert inbox.admit(None, CONSUMER, None, [one]).admissions == [Admission.DUPLICATE]

    def test_whoever_has_to_wait_has_done_nothing_and_holds_nothing(self) -> None:
        inbox, free, taken = MemoryInbox(), arrival(), arrival()
        first, second = MemoryTransaction(), MemoryTransaction()
        inbox.admit(first, CONSUMER, None, [taken])
        with pytest.raises(RowLockedError) as locked:
            second.attempt(inbox.admit, CONSUMER, None, [free, taken])
        assert locked.value.owner is first
        assert inbox.admit(first, CONSUMER, None, [free]).admissions == [Admission.NEW]

    def test_nobody_waits_for_a_claim_that_another_one_redeems(self) -> None:
        inbox, spilled = MemoryInbox(), spill(arrival(), line=1)
        first, second = MemoryTransaction(), MemoryTransaction()
        inbox.spill(None, CONSUMER, None, [spilled])
        assert inbox.redeem(first, CONSUMER, spilled.claim) == (True, None)
        with pytest.raises(ClaimLockedError):
            second.attempt(inbox.redeem, CONSUMER, spilled.claim)
        first.rollback()
        assert second.attempt(inbox.redeem, CONSUMER, spilled.claim) == (True, None)
