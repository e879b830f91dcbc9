"""``pillarbox chaos``: a short run that must be clean, a canary that must be found, and the verdict by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pillarbox.cli.chaos.faults import DECK, Fault, Kind
from pillarbox.cli.chaos.report import judge, recoveries
from pillarbox.cli.chaos.writer import Ending, Written
from pillarbox.cli.demo.ledger import Entry
from pillarbox.cli.demo.sink import Arrival
from pillarbox.cli.output import Exit
from tests import commands
from tests.servers import Server

PILLARBOX = str(Path(sys.executable).with_name("pillarbox"))


@pytest.fixture
def chaos(use_server: Callable[[str], Server], tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run it; its exit code, and the report."""
    use_server("pulsar-cluster")
    use_server("embedded")

    def run(*options: str) -> tuple[int, dict[str, Any]]:
        ended = subprocess.run(
            [PILLARBOX, "chaos", "--json", *options], cwd=tmp_path, capture_output=True, timeout=400, check=False
        )
        assert ended.stdout, ended.stderr.decode()
        return ended.returncode, json.loads(ended.stdout)

    return run


@pytest.mark.full
def test_h34_under_fire_every_event_is_on_the_topic_once_and_in_order(chaos: Callable[..., Any]) -> None:
    code, report = chaos("--seconds", "60", "--seed", "7")
    wrong = (
        *("lost", "ghosts", "duplicates", "inversions", "altered", "forgotten", "undead"),
        *("effects_missing", "effects_doubled", "effects_invented", "projection_differences", "dead_letters"),
    )
    assert {name: report[name] for name in wrong} == dict.fromkeys(wrong, 0), report
    assert (code, report["clean"]) == (Exit.FINE, True), report
    assert report["on_topic"] == report["events"] > 500
    assert report["faults"] >= 30
    assert len(report["faults_by_kind"]) >= len(DECK) - 4, "what comes last in the deck may not have come"
    assert set(report["recovery_seconds"]) <= set(report["faults_by_kind"])
    assert 0 < report["peak_relay_memory_mb"] < 500


@pytest.mark.full
def test_a_relay_with_a_mistake_is_found(chaos: Callable[..., Any]) -> None:
    faults = ("--faults", "kill,cut,half-open")
    code, report = chaos("--seconds", "10", "--seed", "7", *faults, "--canary", "no-deduplication")
    assert code == Exit.PROBLEM
    assert report["duplicates"] > 0, report


@pytest.mark.parametrize("option", ["--faults", "--canary"])
def test_what_there_is_not_is_said_at_once(tmp_path: Path, option: str) -> None:
    ended = commands.run(["chaos", option, "nothing"], os.environ, tmp_path)
    assert ended.returncode == Exit.USAGE
    assert "'nothing'; there are " in ended.stderr


# -- the verdict -------------------------------------------------------------------------------------------------------


def arrival(event_id: str, key: str = "k", number: int = 1, at: float = 0.0) -> Arrival:
    return Arrival(event_id, "chaos", None, key, str(number), "", "", at)


LEDGER = {"e1": Entry(None, "k", 1), "e2": Entry(None, "k", 2)}
GOOD = [arrival("e1"), arrival("e2", number=2)]


def test_what_is_as_it_should_be_holds() -> None:
    verdict = judge(LEDGER, GOOD, [Written(Ending.COMMITTED, ["e1"], 1.0), Written(Ending.UNKNOWN, ["e2", "e3"], 2.0)])
    assert verdict.holds
    assert verdict.unknown == {"committed": 1, "rolled_back": 1}


def test_no_duplicate_is_excused() -> None:
    verdict = judge(LEDGER, [*GOOD, GOOD[0]], [])
    assert (verdict.balance.duplicates, verdict.holds) == (1, False)


def test_an_event_with_another_number_is_altered() -> None:
    verdict = judge(LEDGER, [GOOD[0], arrival("e2", number=3)], [])
    assert (verdict.altered, verdict.holds) == (1, False)


@pytest.mark.parametrize(
    ("ending", "event_id", "found"), [(Ending.COMMITTED, "e3", "forgotten"), (Ending.ROLLED_BACK, "e2", "undead")]
)
def test_the_database_must_agree_with_what_it_told_the_writers(ending: Ending, event_id: str, found: str) -> None:
    verdict = judge(LEDGER, GOOD, [Written(ending, [event_id], 1.0)])
    assert (getattr(verdict, found), verdict.holds) == (1, False)


def all_the_same(seconds: float) -> dict[str, float]:
    return dict.fromkeys(("p50", "p99", "max"), seconds)


def test_a_fault_lasts_until_all_that_it_held_up_has_been_sent() -> None:
    written = [Written(Ending.COMMITTED, [name], at) for name, at in (("e1", 9.0), ("e2", 10.3), ("e3", 11.0))]
    arrived = [arrival("e1", at=9.1), arrival("e3", at=11.1), arrival("e2", at=13.0)]
    found = recoveries([Fault(Kind.KILL, "a1", at=10.0, ended=12.0)], arrived, written)
    assert found == {"kill": {"measured": 1, **all_the_same(3.0), "after_its_end": all_the_same(1.0)}}


def test_what_happens_while_a_server_is_away_is_not_measured() -> None:
    written, arrived = [Written(Ending.COMMITTED, ["e1"], 10.0)], [arrival("e1", at=15.0)]
    faults = [Fault(Kind.BROKER, "server", at=10.0, ended=14.0), Fault(Kind.CUT, "a link", at=12.0, ended=12.5)]
    found = recoveries(faults, arrived, written)
    assert found == {"broker": {"measured": 1, **all_the_same(5.0), "after_its_end": all_the_same(1.0)}}
