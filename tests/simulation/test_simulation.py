"""The shipped relay in thousands of worlds, and proof that the simulation would find a mistake."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.simulation import simulate
from tests.simulation.__main__ import main, run, told
from tests.simulation.loop import SimulatedLoop
from tests.simulation.mutants import MUTANTS
from tests.simulation.planted import Mutant

SEEDS = 1_000
PART = 125


@pytest.mark.parametrize("first", [0, *(pytest.param(it, marks=pytest.mark.full) for it in range(PART, SEEDS, PART))])
def test_nothing_is_lost_doubled_or_out_of_order_in_any_world(first: int) -> None:
    report = run(range(first, first + PART))
    assert not report.failed, told(report, 1.0)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        pytest.param(8, {"numbered": True}, id="numbered"),
        pytest.param(36, {"numbered": False}, id="plain"),
        pytest.param(136, {"numbered": True, "floods": True}, id="detour", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("moment", ["crash before", pytest.param("crash after", marks=pytest.mark.full)])
def test_a_relay_may_crash_at_every_call(seed: int, options: dict[str, Any], moment: str) -> None:
    calls = simulate(seed, calm=True, **options).calls
    for call in range(1, calls + 1):
        result = simulate(seed, calm=True, crash_at=(call, moment), **options)
        assert not result.violations, (call, result.violations, result.lines[-30:])


@pytest.mark.parametrize("seed", [7, *(pytest.param(it, marks=pytest.mark.full) for it in (20, 33))])
def test_a_seed_leaves_the_same_trace_in_every_process(seed: int) -> None:
    program = f"from tests.simulation import simulate; print(simulate({seed}).digest)"
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
    assert digests == [simulate(seed).digest] * 2


def test_cleanup_at_the_end_of_a_world_is_within_its_loop() -> None:
    """Outside of it `gather` would be given a new loop, which nobody closes."""
    found = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            found.append(asyncio.get_running_loop())

    loop = SimulatedLoop()
    _working = loop.create_task(work())
    loop.run_until_complete(asyncio.sleep(1))
    loop.close()
    assert found == [loop]


def test_the_command_says_what_it_has_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "10", "--start", "40"]) == 0
    said = capsys.readouterr().out
    assert "10 seeds in" in said
    assert "0 seeds with violations" in said


def test_the_command_fails_and_shows_the_trace_if_something_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    next(it for it in MUTANTS if str(it) == "timeout_is_success").plant(monkeypatch)
    assert main(["--seeds", "10"]) == 1
    said = capsys.readouterr().out
    assert "I1 loss" in said
    assert "relay-" in said


@pytest.mark.filterwarnings("ignore")  # what a mutant breaks may be anything
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_planted_mistake_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.check(monkeypatch)
