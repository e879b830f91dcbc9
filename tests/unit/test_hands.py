"""How the tenants of a consumer share its transactions, and lanes share them with what comes from the broker."""

from __future__ import annotations

import asyncio

import pytest

from pillarbox.consumers.hands import Hands


def test_a_lone_tenant_may_use_all() -> None:
    hands = Hands(2)
    for _ in range(2):
        assert hands.is_free("a")
        hands.begin("a")
    assert not hands.is_free("a")


def test_of_several_tenants_none_may_take_the_last_one_besides_another() -> None:
    hands = Hands(2)
    assert hands.is_free("a")
    assert hands.is_free("b")
    hands.begin("a")
    assert not hands.is_free("a")
    assert hands.is_free("b")


async def test_those_that_wait_leave_every_second_turn_to_the_others() -> None:
    """Else a lane with much to do would keep out all that comes from the broker."""
    hands, turns = Hands(1), list[str]()

    async def lane() -> None:
        async with hands.one(None):
            turns.append("lane")
            await asyncio.sleep(0)

    async def received() -> None:
        turns.append("broker")
        await asyncio.sleep(0)
        hands.end(None)

    tasks: list[asyncio.Task[None]] = []

    def offer() -> bool:
        if turns.count("broker") == 3 or not hands.is_free(None):
            return False
        hands.begin(None)
        tasks.append(asyncio.ensure_future(received()))
        return True

    hands.offer = offer
    await asyncio.gather(*(lane() for _ in range(4)))
    await asyncio.gather(*tasks)
    assert turns[:6] == ["lane", "broker", "lane", "broker", "lane", "broker"]


async def test_one_that_is_cancelled_while_it_waits_holds_nothing() -> None:
    hands = Hands(1)
    hands.begin("a")

    async def wait() -> None:
        async with hands.one("a"):
            pytest.fail("it was cancelled")

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    hands.end("a")
    assert hands.is_free("a")
