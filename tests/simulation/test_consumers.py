"""The shipped consumer in hundreds of worlds, and proof that they would find a mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pillarbox.outbox import Status
from pillarbox.transport import Message
from tests.simulation.__main__ import main, run, told
from tests.simulation.consumer_broker import line_of
from tests.simulation.consumer_checker import Found, Lot, Sent, check_consumed
from tests.simulation.consumer_database import Record
from tests.simulation.consumer_mutants import MUTANTS
from tests.simulation.consumers import simulate_consumers
from tests.simulation.planted import Mutant

SEEDS = 300
PART = 50
CRASHES = 4
"""In how many parts the calls are at which a consumer crashes."""


@pytest.mark.parametrize("first", [0, *(pytest.param(it, marks=pytest.mark.full) for it in range(PART, SEEDS, PART))])
def test_every_message_has_one_effect_or_one_delivery_that_failed_in_any_world(first: int) -> None:
    report = run(range(first, first + PART), simulate_consumers)
    assert not report.failed, told(report, 1.0)


@pytest.mark.parametrize(
    ("seed", "options"),
    [(3, {"batch": 1, "ordered": True}), (4, {"batch": 4, "ordered": True}), (5, {"batch": 4, "ordered": False})],
    ids=["one by one", "batches", "without order"],
)
@pytest.mark.parametrize("moment", ["crash before", pytest.param("crash after", marks=pytest.mark.full)])
@pytest.mark.parametrize("first", [1, *(pytest.param(it, marks=pytest.mark.full) for it in range(2, CRASHES + 1))])
def test_h79_h80_a_consumer_may_crash_at_every_call(
    seed: int, options: dict[str, Any], moment: str, first: int
) -> None:
    calls = simulate_consumers(seed, calm=True, **options).calls
    for call in range(first, calls + 1, CRASHES):
        result = simulate_consumers(seed, calm=True, crash_at=(call, moment), **options)
        assert not result.violations, (call, result.violations, result.lines[-30:])


@pytest.mark.parametrize("call", ["admit", "commit", "spill"])
def test_h78_who_brings_a_message_waits_for_a_transaction_that_ends_late(call: str) -> None:
    results = [simulate_consumers(seed, focus=(call, ["late", "slow", "pause"])) for seed in range(15)]
    assert not [(result.seed, result.violations) for result in results if result.violations]
    assert sum(result.faults["waits for another transaction"] for result in results)


@pytest.mark.parametrize("call", ["write", "commit", "subscribe"])
def test_h87_no_healthy_message_fails_for_good_whatever_is_away(call: str) -> None:
    results = [
        simulate_consumers(seed, lots=[Lot.FINE, Lot.UNLUCKY], focus=(call, ["lose request", "lose answer", "late"]))
        for seed in range(15)
    ]
    assert not [(result.seed, result.violations) for result in results if result.violations]
    assert sum(result.faults.total() for result in results) > 100


def test_a_seed_of_consumers_leaves_the_same_trace_in_every_process() -> None:
    program = "from tests.simulation.consumers import *; print(simulate_consumers(7).digest)"
    digests = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": salt},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for salt in ("1", "2")
    ]
    assert digests == [simulate_consumers(7).digest] * 2


def test_the_command_runs_consumers_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "4", "--start", "60"]) == 0
    said = capsys.readouterr().out
    assert "relays: 4 seeds in" in said
    assert "consumers: 2 seeds in" in said


def sent(*lots: Lot) -> dict[int, Sent]:
    """Messages of one key."""
    message = Message("topic", "key", b"", {"tenant_id": "acme"})
    assert line_of(message) == ("acme", "key")
    return {mark: Sent(mark, message, lot) for mark, lot in enumerate(lots)}


EFFECT = ("effect", "follow-up")
DEAD = ("dead letter",)


def found(became: Sequence[Sequence[str]], rows: Mapping[int, Status] | None = None, **others: Any) -> Found:
    """What there is of messages, and the deliveries that are left of some of them."""
    log = [Record(what, mark) for mark, each in enumerate(became) for what in each]
    return Found(log, {mark: [status] for mark, status in (rows or {}).items()}, **others)


@pytest.mark.parametrize(
    ("lots", "became", "rows", "wrong"),
    [
        (
            [Lot.FINE, Lot.POISONOUS, Lot.REFUSED, Lot.UNLUCKY],
            [EFFECT, DEAD, (), EFFECT],
            {1: Status.FAILED, 2: Status.FAILED, 3: Status.SENT},
            [],
        ),
        ([Lot.FINE], [()], {}, ["C1 loss: message 0 (fine) of key acme/key has neither effect nor delivery"]),
        (
            [Lot.FINE],
            [()],
            {0: Status.SENT},
            ["C1 loss: message 0 (fine) of key acme/key has neither effect nor delivery"],
        ),
        ([Lot.FINE], [(*EFFECT, *EFFECT)], {}, ["C2 once: message 0 (fine) of key acme/key became effect and effect"]),
        (
            [Lot.REFUSED],
            [EFFECT],
            {0: Status.FAILED},
            ["C3 both: message 0 (refused) of key acme/key became effect and FAILED"],
        ),
        (
            [Lot.UNLUCKY],
            [()],
            {0: Status.DISCARDED},
            ["C4 kind: message 0 (unlucky) of key acme/key became DISCARDED"],
        ),
        ([Lot.FINE], [("effect",)], {}, ["C7 follow-up: message 0 (fine) of key acme/key has 0, and effect"]),
        (
            [Lot.POISONOUS],
            [()],
            {0: Status.FAILED},
            ["C8 dead letter: message 0 (poisonous) of key acme/key has 0, and FAILED"],
        ),
    ],
)
def test_the_checker_says_what_is_wrong(
    lots: list[Lot], became: list[tuple[str, ...]], rows: dict[int, Status], wrong: list[str]
) -> None:
    assert check_consumed(sent(*lots), found(became, rows), ordered=True) == wrong


def test_the_checker_asks_for_order_where_the_broker_kept_it() -> None:
    log = [Record(what, mark) for mark in (1, 0) for what in EFFECT]
    both = sent(Lot.FINE, Lot.PUZZLING)
    both[0], both[1] = replace(both[1], mark=0), replace(both[0], mark=1)
    assert check_consumed(both, Found(log, {}), ordered=False) == []
    inverted = ["C5 order: message 0 (puzzling) of key acme/key took effect after message 1 of its key"]
    assert check_consumed(both, Found(log, {}), ordered=True) == inverted
    assert check_consumed(both, Found(log, {}, late={0}), ordered=True) == [], "later ones do not wait for what failed"


def test_the_checker_asks_for_order_behind_what_has_failed_where_keys_park() -> None:
    log = [Record(what, mark) for mark in (1, 0) for what in EFFECT]
    both = sent(Lot.POISONOUS, Lot.FINE)
    both[0].asked.add("redrive")
    log.append(Record("dead letter", 0))
    assert check_consumed(both, Found(log, {}, late={0}), ordered=True) == []
    inverted = ["C5 order: message 0 (poisonous) of key acme/key took effect after message 1 of its key"]
    assert check_consumed(both, Found(log, {}, late={0}, parks=True), ordered=True) == inverted


def test_the_checker_counts_the_processes_that_a_message_kills() -> None:
    killing = sent(Lot.FATAL)
    killing[0].deaths = 41
    killed = ["C12 deaths: 41 processes died of 1 messages"]
    assert check_consumed(killing, found([()], {0: Status.FAILED}), ordered=True) == killed
    killing[0].deaths = 13
    assert check_consumed(killing, found([()], {0: Status.FAILED}), ordered=True) == []


def test_of_two_with_one_id_one_takes_effect() -> None:
    both = sent(Lot.FORGED, Lot.FORGED)
    both[0].twin, both[1].twin = 1, 0
    assert check_consumed(both, found([EFFECT, DEAD], {1: Status.FAILED}), ordered=True) == []
    assert {line[:7] for line in check_consumed(both, found([EFFECT, EFFECT]), ordered=True)} == {"C4 kind"}


def test_of_two_versions_of_an_event_one_takes_effect() -> None:
    both = sent(Lot.NEWER, Lot.NEWER)
    both[0].twin, both[1].twin = 1, 0
    assert check_consumed(both, found([EFFECT, DEAD], {1: Status.FAILED}, unread={1}), ordered=True) == []
    assert check_consumed(both, found([EFFECT, ()]), ordered=True) == []
    assert {line[:7] for line in check_consumed(both, found([EFFECT, EFFECT]), ordered=True)} == {"C2 once"}
    lost = found([(), DEAD], {1: Status.FAILED}, unread={1})
    assert {line[:7] for line in check_consumed(both, lost, ordered=True)} == {"C1 loss"}


@pytest.mark.filterwarnings("ignore")  # what a mutant breaks may be anything
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_planted_mistake_of_a_consumer_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.check(monkeypatch)
