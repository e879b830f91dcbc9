"""When an alarm rings, on every event loop."""

from __future__ import annotations

import asyncio

import pytest

from pillarbox.alarm import Alarm
from tests.relays import in_virtual_time


class Bell:
    """Counts how often it is rung, and when it was rung last."""

    def __init__(self) -> None:
        self.alarm = Alarm(self._ring)
        self.times: list[float] = []
        self._rang = asyncio.Event()

    def _ring(self) -> None:
        self.times.append(asyncio.get_running_loop().time())
        self._rang.set()

    async def heard(self) -> float:
        """Wait for the next ring; when that was."""
        async with asyncio.timeout(20):
            await self._rang.wait()
        self._rang.clear()
        return self.times[-1]


@pytest.mark.every_loop
@pytest.mark.parametrize("seconds", [0.0, 0.0001, 0.0004, 0.0014, 0.0101])
async def test_h129_it_never_rings_too_early(seconds: float) -> None:
    bell, began = Bell(), asyncio.get_running_loop().time()
    for _ in range(3):
        bell.alarm.set(seconds)
    assert await bell.heard() >= began + seconds
    assert len(bell.times) == 1


@pytest.mark.every_loop
async def test_h129_a_handle_that_is_no_timer_is_replaced_and_kept_like_any_other() -> None:
    bell = Bell()
    bell.alarm.set(0.0001)
    bell.alarm.set(600.0)
    await bell.heard()
    bell.alarm.set(600.0)
    bell.alarm.set(0.0001)
    await bell.heard()
    bell.alarm.set(0.0001)
    bell.alarm.cancel()
    bell.alarm.set(0.002)
    await bell.heard()
    assert len(bell.times) == 3


@in_virtual_time
async def test_it_never_rings_too_early_by_the_last_digit_of_a_moment() -> None:
    bell, due = Bell(), 1023.2860000000001
    await asyncio.sleep(20)
    bell.alarm.set(due - asyncio.get_running_loop().time())
    assert due <= await bell.heard() < due + 0.002


@in_virtual_time
async def test_the_earliest_of_several_moments_counts() -> None:
    bell, began = Bell(), asyncio.get_running_loop().time()
    for seconds in (5.0, 2.0, 3.0):
        bell.alarm.set(seconds)
    assert await bell.heard() == began + 2.0
    bell.alarm.set(1.0)
    assert await bell.heard() == began + 3.0
    assert len(bell.times) == 2
