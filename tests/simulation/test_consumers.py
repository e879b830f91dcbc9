"""The shipped consumer in hundreds of worlds, and proof that they would find a mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from pillarbox.transport import Message
from tests.simulation.__main__ import main, run, told
from tests.simulation.consumer_broker import line_of
from tests.simulation.consumer_checker import Lot, Sent, check_consumed
from tests.simulation.consumer_database import Record
from tests.simulation.consumer_mutants import MUTANTS
from tests.simulation.consumers import simulate_consumers
from tests.simulation.planted import Mutant

SEEDS = 300
PART = 100


@pytest.mark.parametrize("first", [0, *(pytest.param(it, marks=pytest.mark.full) for it in range(PART, SEEDS, PART))])
def test_every_message_has_one_effect_or_one_letter_in_any_world(first: int) -> None:
    report = run(range(first, first + PART), simulate_consumers)
    assert not report.failed, told(report, 1.0)


@pytest.mark.parametrize(
    ("seed", "options"),
    [(3, {"batch": 1, "ordered": True}), (4, {"batch": 4, "ordered": True}), (5, {"batch": 4, "ordered": False})],
    ids=["one by one", "batches", "without order"],
)
@pytest.mark.parametrize("moment", ["crash before", pytest.param("crash after", marks=pytest.mark.full)])
def test_h79_h80_a_consumer_may_crash_at_every_call(seed: int, options: dict[str, Any], moment: str) -> None:
    calls = simulate_consumers(seed, calm=True, **options).calls
    for call in range(1, calls + 1):
        result = simulate_consumers(seed, calm=True, crash_at=(call, moment), **options)
        assert not result.violations, (call, result.violations, result.lines[-30:])


@pytest.mark.parametrize("call", ["admit", "commit", "park"])
def test_h78_who_brings_a_message_waits_for_a_transaction_that_ends_late(call: str) -> None:
    results = [simulate_consumers(seed, focus=(call, ["late", "slow", "pause"])) for seed in range(15)]
    assert not [(result.seed, result.violations) for result in results if result.violations]
    assert sum(result.faults["waits for another transaction"] for result in results)


@pytest.mark.parametrize("call", ["write", "commit", "subscribe"])
def test_h87_no_healthy_message_becomes_a_letter_whatever_is_away(call: str) -> None:
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
POISON = ("letter poison", "dead letter")


@pytest.mark.parametrize(
    ("lots", "became", "wrong"),
    [
        ([Lot.FINE, Lot.POISONOUS, Lot.REFUSED], [EFFECT, POISON, ("letter rejected",)], []),
        ([Lot.FINE], [()], ["C1 loss: message 0 (fine) of key acme/key has neither effect nor letter"]),
        ([Lot.FINE], [(*EFFECT, *EFFECT)], ["C2 once: message 0 (fine) of key acme/key became effect and effect"]),
        (
            [Lot.REFUSED],
            [(*EFFECT, "letter rejected")],
            ["C3 both: message 0 (refused) of key acme/key became effect and letter rejected"],
        ),
        ([Lot.UNLUCKY], [POISON], ["C4 kind: message 0 (unlucky) of key acme/key became letter poison"]),
        ([Lot.FINE], [("effect",)], ["C7 follow-up: message 0 (fine) of key acme/key has 0, and effect"]),
        (
            [Lot.POISONOUS],
            [("letter poison",)],
            ["C8 dead letter: message 0 (poisonous) of key acme/key has 0, and letter poison"],
        ),
    ],
)
def test_the_checker_says_what_is_wrong(lots: list[Lot], became: list[tuple[str, ...]], wrong: list[str]) -> None:
    log = [Record(what, mark) for mark, each in enumerate(became) for what in each]
    assert check_consumed(sent(*lots), log, ordered=True) == wrong


def test_the_checker_asks_for_order_where_the_broker_kept_it() -> None:
    log = [Record(what, mark) for mark in (1, 0) for what in EFFECT]
    both = sent(Lot.FINE, Lot.FINE)
    assert check_consumed(both, log, ordered=False) == []
    inverted = ["C5 order: message 0 (fine) of key acme/key became effect after a later one of its key"]
    assert check_consumed(both, log, ordered=True) == inverted


def test_of_two_with_one_id_one_takes_effect() -> None:
    both = sent(Lot.FORGED, Lot.FORGED)
    both[0].twin, both[1].twin = 1, 0
    altered = ("letter altered", "dead letter")
    log = [Record(what, mark) for mark, each in ((0, EFFECT), (1, altered)) for what in each]
    assert check_consumed(both, log, ordered=True) == []
    log = [Record(what, mark) for mark in (0, 1) for what in EFFECT]
    assert [line[:7] for line in check_consumed(both, log, ordered=True)] == ["C4 kind", "C4 kind"]


@pytest.mark.filterwarnings("ignore")  # what a mutant breaks may be anything
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_planted_mistake_of_a_consumer_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.check(monkeypatch)
