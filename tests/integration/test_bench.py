"""The benchmark measures what it says, or fails."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as program
from bench import cdc
from bench.load import Sink, box_on
from bench.proof import PathNotTakenError, doorbell_heard, without_warnings
from bench.servers import Bench
from bench.sizes import QUICK
from pillarbox.retry import RetryPolicy
from pillarbox.stores import feed as feeds
from pillarbox.stores.feed import Feed
from tests.conftest import FreshDatabase
from tests.servers import Database

SIZES = replace(QUICK, rounds=1, relays_backlog=400, drain=400)


async def test_h130_the_stream_fails_if_it_is_lost_while_it_is_measured(
    fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The relay goes on from the table, and every event arrives."""

    def stumble(_feed: Feed) -> None:
        raise AttributeError("'Handle' object has no attribute 'when'")

    url = fresh_database("logical").url()
    monkeypatch.setattr(Feed, "_ring", stumble)
    monkeypatch.setattr(feeds, "AGAIN", RetryPolicy(base=0.05, cap=0.05))
    monkeypatch.setattr(cdc, "_server", lambda _bench: nullcontext(url))
    with pytest.raises(PathNotTakenError, match="stream"):
        await cdc.measure(Bench(url, tmp_path, SIZES))


async def test_h130_latency_fails_without_a_doorbell(sqlite_database: Database) -> None:
    async with box_on(sqlite_database.url(), Sink()) as box:
        with pytest.raises(PathNotTakenError, match="does not hear"):
            async with doorbell_heard(box, 1.0):
                pass


def test_h130_whatever_pillarbox_warns_of_fails_what_is_measured() -> None:
    with pytest.raises(PathNotTakenError, match="it reads bodies from the table"), without_warnings():
        logging.getLogger("pillarbox").warning("it reads bodies from the table")


def test_h130_a_benchmark_that_measured_something_else_exits_with_1_and_says_why(tmp_path: Path) -> None:
    def run(work: Coroutine[Any, Any, Any]) -> None:
        work.close()
        raise PathNotTakenError("the stream was lost")

    with pytest.raises(SystemExit) as ended:
        program._measure("cdc", Bench("", tmp_path, SIZES), run)
    assert ended.value.code == "error: cdc was not measured: the stream was lost"  # which is exit status 1
