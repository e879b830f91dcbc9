"""The inbox and the letters without a database, against the same promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from pillarbox.inbox import Admission, LetterFilter
from pillarbox.testing.conformance.inbox import (
    CONSUMER,
    InboxContract,
    LettersContract,
    Transaction,
    World,
    arrival,
    letter,
)
from tests.memory.inbox import MemoryInbox, MemoryLetters, MemoryTransaction, RowLockedError


class MemoryWorld(World):
    def __init__(self) -> None:
        self.inbox: MemoryInbox = MemoryInbox()
        self.letters: MemoryLetters = MemoryLetters()

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
        assert inbox.admit(None, CONSUMER, None, [one]) == [Admission.NEW]
        assert inbox.admit(None, CONSUMER, None, [one]) == [Admission.DUPLICATE]

    def test_whoever_has_to_wait_has_done_nothing_and_holds_nothing(self) -> None:
        inbox, free, taken = MemoryInbox(), arrival(), arrival()
        first, second = MemoryTransaction(), MemoryTransaction()
        inbox.admit(first, CONSUMER, None, [taken])
        with pytest.raises(RowLockedError) as locked:
            second.attempt(inbox.admit, CONSUMER, None, [free, taken])
        assert locked.value.owner is first
        assert inbox.admit(first, CONSUMER, None, [free]) == [Admission.NEW]


class TestMemoryLetters(LettersContract):
    @pytest.fixture
    def world(self) -> World:
        return MemoryWorld()

    def test_others_see_what_is_committed(self) -> None:
        letters, writer = MemoryLetters(), MemoryTransaction()
        [old] = letters.write(None, [letter()])
        letters.write(writer, [letter()])
        letters.edit(writer, old, b"other")
        assert [each.edited for each in letters.find(None, LetterFilter())] == [None]
        assert [each.edited for each in letters.find(writer, LetterFilter())] == [b"other", None]
        writer.commit()
        assert [each.edited for each in letters.find(None, LetterFilter())] == [b"other", None]
