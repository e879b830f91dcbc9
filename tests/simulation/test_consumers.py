"""The shipped consumer in hundreds of worlds, and proof that they would find a mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pillarbox.testing.simulation.__main__ import main, run, told
from pillarbox.testing.simulation.consumers import simulate_consumers
from tests.simulation.consumer_mutants import MUTANTS, Mutant, seeds_to_catch

SEEDS = 300
PART = 100


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_every_message_has_one_effect_or_one_letter_in_any_world(first: int) -> None:
    report = run(range(first, first + PART), simulate_consumers)
    assert not report.failed, told(report, 1.0)


@pytest.mark.parametrize(
    ("seed", "options"),
    [(3, {"batch": 1, "ordered": True}), (4, {"batch": 4, "ordered": True}), (5, {"batch": 4, "ordered": False})],
    ids=["one by one", "batches", "without order"],
)
@pytest.mark.parametrize("moment", ["crash before", "crash after"])
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


def test_a_seed_of_consumers_leaves_the_same_trace_in_every_process() -> None:
    program = "from pillarbox.testing.simulation.consumers import *; print(simulate_consumers(7).digest)"
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


@pytest.mark.filterwarnings("ignore")  # what a mutant breaks may be anything
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_planted_mistake_of_a_consumer_is_caught(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    mutant.plant(monkeypatch)
    seeds, violation = seeds_to_catch(mutant)
    record_property("seeds", seeds)
    assert violation
