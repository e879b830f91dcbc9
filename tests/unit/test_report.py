"""What a lane says of its work, in words."""

from __future__ import annotations

import asyncio
import logging
from uuid import UUID

import pytest

from pillarbox.lane_report import Counts, Report
from pillarbox.outbox import Lane, RouteRecord
from pillarbox.telemetry import SILENT


class UnspeakableError(Exception):
    """An error with a bug of its own."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def report() -> Report:
    route = RouteRecord("broker:orders", "broker", "orders")
    lane = Lane(route, 0, 1, UUID(int=1), batch=0, next_number=1, announced=None, tries=0, waiting=frozenset())
    return Report(lane, Counts(), SILENT)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ValueError("password=swordfish"), "ValueError: password=***"),
        (UnspeakableError(), "UnspeakableError: its text cannot be read"),
        (MemoryError(), "MemoryError"),
        (asyncio.CancelledError(), "CancelledError: what it waited for was cancelled"),
        ("its Outcome names a message twice", "its Outcome names a message twice"),
    ],
)
def test_a_bug_is_told_whatever_its_error_says(found: BaseException | str, said: str) -> None:
    assert report().bug(found, first=True) == f"bug in transport broker: {said}"


def test_each_outage_of_a_topic_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    lane = report()
    for _ in range(2):
        lane.topic_refused("orders", "no such topic")
        lane.topic_refused("orders", "no such topic")
        lane.topic_opened({"orders", "parcels"})
    told = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert told == ["broker:orders/0: orders cannot be opened, and what goes there waits: no such topic"] * 2
