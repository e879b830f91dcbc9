"""The inbox and the letters without a database, against the same promises."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from pillarbox.stores.memory_inbox import MemoryInbox, MemoryLetters
from pillarbox.testing.conformance.inbox import InboxContract, LettersContract, Transaction, World


class MemoryWorld(World):
    lacks = "memory has no transactions"

    def __init__(self) -> None:
        self.inbox: MemoryInbox = MemoryInbox()
        self.letters = MemoryLetters()

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return _no_transaction()

    async def age(self, by: timedelta) -> None:
        for rows in self.inbox._rows.values():
            for event_id, (seen, at) in rows.items():
                rows[event_id] = seen, at - by


@asynccontextmanager
async def _no_transaction() -> AsyncIterator[Transaction]:
    async def run(method: Any, *arguments: Any, **options: Any) -> Any:
        return method(None, *arguments, **options)

    yield run


class TestMemoryInbox(InboxContract):
    @pytest.fixture
    def world(self) -> World:
        return MemoryWorld()


class TestMemoryLetters(LettersContract):
    @pytest.fixture
    def world(self) -> World:
        return MemoryWorld()
