"""What failures of some keys say about their tenant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pillarbox import clock
from pillarbox.clock import SystemClock
from pillarbox.consumers.processing import _GATED_KEPT, Processor
from pillarbox.consumers.progress import MANY_LINES, RECENT, Progress


class Stopped(SystemClock):
    """A clock that somebody moves."""

    seconds = 1_000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def time() -> Iterator[Stopped]:
    stopped = Stopped()
    with clock.use(stopped):
        yield stopped


KEYS = [f"k{number}" for number in range(3 * MANY_LINES)]


def fail_all(progress: Progress) -> None:
    for key in KEYS:
        progress.failed("acme", key)


@pytest.mark.usefixtures("time")
def test_many_keys_that_fail_hold_their_tenant() -> None:
    progress = Progress(300.0)
    fail_all(progress)
    assert progress.is_held("acme")
    progress.succeeded("acme")
    assert not progress.is_held("acme")


def test_keys_that_failed_while_others_took_effect_hold_no_tenant(time: Stopped) -> None:
    progress = Progress(300.0)
    for _ in range(10):
        for first in range(0, len(KEYS), 5):
            for key in KEYS[first : first + 5]:
                progress.failed("acme", key)
            progress.succeeded("acme")
        time.seconds += RECENT / 2
        fail_all(progress)
        assert not progress.is_held("acme")
        progress.succeeded("acme")


def test_an_outage_of_such_keys_is_seen_in_the_end(time: Stopped) -> None:
    progress = Progress(300.0)
    fail_all(progress)
    progress.succeeded("acme")
    for _ in range(4):
        fail_all(progress)
        time.seconds += RECENT / 2
    fail_all(progress)
    assert progress.is_held("acme")


def test_a_tenant_of_which_the_last_failure_was_final_does_not_wait(time: Stopped) -> None:
    progress = Progress(patience=5)
    progress.failed("acme", "k")
    assert not progress.standstill(())
    time.seconds += 6
    assert progress.standstill(()) == {"acme": 6}
    progress.failed("acme", "k")
    progress.settled("acme")  # it was the last attempt
    time.seconds += 1
    assert not progress.standstill(())
    time.seconds += 6
    assert not progress.standstill(())
    progress.failed("acme", "other")
    assert not progress.standstill(())
    time.seconds += 6
    assert progress.standstill(()) == {"acme": 6}


def test_of_many_lines_that_were_gated_the_last_ones_are_known(time: Stopped) -> None:
    processor = Processor.__new__(Processor)
    processor._gated = {f"k{number}": time.seconds for number in range(3 * _GATED_KEPT)}
    processor.spilled([])
    assert [*processor._gated] == [f"k{number}" for number in range(2 * _GATED_KEPT, 3 * _GATED_KEPT)]
