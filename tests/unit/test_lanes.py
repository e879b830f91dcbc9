"""A consumer as the destination of its lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast
from uuid import UUID

import pytest

from pillarbox.consumers import lanes
from pillarbox.consumers.dead_letters import DeadLetterRoute
from pillarbox.consumers.failure import Failure
from pillarbox.consumers.hands import Hands
from pillarbox.consumers.lanes import LaneDestination
from pillarbox.consumers.processing import Processed, Processor
from pillarbox.consumers.progress import Progress
from pillarbox.consumers.spilling import Trouble
from pillarbox.consumers.window import Work
from pillarbox.inbox import Arrival, KnownBy
from pillarbox.retry import RetryPolicy
from pillarbox.transport import Message


class Slow:
    """A processor whose handlers take their time."""

    knows_failures = False

    def __init__(self, failure: Failure | None = None) -> None:
        self.may_end = asyncio.Event()
        self.failure = failure
        self.calls = 0

    async def process(self, works: Sequence[Work]) -> Processed:
        self.calls += 1
        await self.may_end.wait()
        if self.failure is None:
            return Processed(settled=[*works])
        arrivals = [(it.message, Arrival.of_content(it.message)) for it in works]
        troubles = [Trouble(*each, None, KnownBy.EVENT, self.failure, "broken") for each in arrivals]
        return Processed(failed=[*zip(works, troubles, strict=True)])


class SlowCopies:
    """A dead-letter route whose database takes its time."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def copy(self, failed: Sequence[tuple[Work, Trouble]]) -> None:  # noqa: ARG002  all the same
        await self.may_end.wait()


def destination_for(slow: Slow, concurrency: int = 1, copies: SlowCopies | None = None) -> LaneDestination:
    return LaneDestination(
        cast(Processor, slow),
        progress=Progress(300.0),
        hands=Hands(concurrency),
        batch=1,
        grace=10.0,
        retry=RetryPolicy(),
        dead_letters=cast(DeadLetterRoute | None, copies),
    )


@pytest.mark.parametrize("concurrency", [1, 2], ids=["one waits for its turn", "both are at work"])
async def test_what_is_still_being_handled_is_put_off(concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SLOW", 0.01)
    slow = Slow()
    destination = destination_for(slow, concurrency)
    messages = [Message("orders", key, b"{}", {}) for key in "ab"]
    outcome = await destination.send("lane", messages)
    assert {each.index: each.retry_after for each in outcome.rejected} == {0: 0.01, 1: 0.01}
    slow.may_end.set()
    await destination.finish()
    assert [*(await destination.send("lane", messages)).accepted] == [0, 1]


async def test_what_takes_long_is_waited_for_after_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may die of it: its lane learns that only from a batch that has it."""
    monkeypatch.setattr(lanes, "SLOW", 0.01)
    slow = Slow()
    destination = destination_for(slow)
    destination.be_patient()
    sending = asyncio.ensure_future(destination.send("lane", [Message("orders", "a", b"{}", {})]))
    _, waiting = await asyncio.wait([sending], timeout=0.05)
    assert waiting
    slow.may_end.set()
    assert [*(await sending).accepted] == [0]


@pytest.mark.parametrize(("failure", "final"), [(Failure.UNKNOWN, False), (Failure.BUSINESS, True)])
async def test_what_was_not_waited_for_and_failed_counts_when_it_is_offered_again(
    failure: Failure, final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a handler that takes long to fail would be called for ever, and no attempt be counted."""
    monkeypatch.setattr(lanes, "SLOW", 0.01)
    slow = Slow(failure)
    destination = destination_for(slow)
    messages = [Message("orders", "a", b"{}", {"event_id": str(UUID(int=1))})]
    [put_off] = (await destination.send("lane", messages)).rejected
    assert put_off.retry_after is not None
    slow.may_end.set()
    while destination.at_hand():  # noqa: ASYNC110  nobody rings
        await asyncio.sleep(0)
    [failed] = (await destination.send("lane", messages)).rejected
    assert (failed.retry_after, failed.reason, failed.final) == (None, "broken", final)
    assert slow.calls == 1


async def test_what_failed_in_time_and_was_copied_too_late_counts_when_it_is_offered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a handler would be called again each time, as long as its database is slow."""
    monkeypatch.setattr(lanes, "SLOW", 0.01)
    slow, copies = Slow(Failure.POISON), SlowCopies()
    slow.may_end.set()
    destination = destination_for(slow, copies=copies)
    messages = [Message("orders", "a", b"{}", {"event_id": str(UUID(int=1))})]
    [put_off] = (await destination.send("lane", messages)).rejected
    assert put_off.retry_after is not None
    copies.may_end.set()
    for _ in range(5):
        await asyncio.sleep(0)
    [failed] = (await destination.send("lane", messages)).rejected
    assert (failed.retry_after, failed.reason, failed.final) == (None, "broken", True)
    assert slow.calls == 1
