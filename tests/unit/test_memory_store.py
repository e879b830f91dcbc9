"""What only the memory store can do: go back to an earlier state, and be repeated exactly."""

from __future__ import annotations

import copy
import random
from uuid import UUID

import pytest

from pillarbox.errors import LeaseLostError
from pillarbox.outbox import Batch, Lane, RouteRecord, Status
from pillarbox.testing.conformance.outbox import ROUTE, delivery
from tests.memory.store import MemoryStore


async def _take(store: MemoryStore, route: RouteRecord = ROUTE) -> Lane:
    [lane] = await store.take("r", lease=-1.0, wanted={route.id: 1})
    return lane


async def test_a_copy_is_the_store_as_it_was() -> None:
    store = MemoryStore()
    store.register(None, [ROUTE])
    store.append(None, [delivery("a"), delivery("b")])
    lane = await _take(store)
    before = copy.deepcopy(store)
    one, two = (await store.poll(lane, limit=10)).fresh
    later = await store.settle(await store.announce(lane, Batch(items=[one.id, two.id]), settle=False))
    assert [before.status_of(row.id) for row in (one, two)] == [Status.PENDING, Status.PENDING]
    assert (await before.poll(lane, limit=10)).fresh == (one, two)
    with pytest.raises(LeaseLostError):  # who has seen the future finds that it never was
        await before.announce(later, Batch(items=[one.id]), settle=False)


async def test_a_store_that_went_back_draws_other_tokens() -> None:
    drawn = random.Random(1)

    def draw_token() -> UUID:
        return UUID(int=drawn.getrandbits(128))

    store = MemoryStore(draw_token=draw_token)
    store.register(None, [ROUTE])
    before = copy.deepcopy(store)
    assert (await _take(store)).token != (await _take(before)).token


async def test_bound_methods_may_draw_tokens_too() -> None:
    class Tokens:
        def __init__(self) -> None:
            self.last = 0

        def draw(self) -> UUID:
            self.last += 1
            return UUID(int=self.last)

    store = MemoryStore(draw_token=Tokens().draw)
    store.register(None, [ROUTE])
    before = copy.deepcopy(store)
    assert ((await _take(store)).token, (await _take(before)).token) == (UUID(int=1), UUID(int=2))
