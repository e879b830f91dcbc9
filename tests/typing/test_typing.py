"""What users write passes ``mypy --strict``, and what they get wrong does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACT = ROOT / "tests" / "contract"
PROGRAMS = ("quickstart.py", "own_session.py", "consumer.py", "pulsar_exactly_once.py")
WRONG = """
from pillarbox import IntegrationEvent, Pillarbox, Route

class Placed(IntegrationEvent, name="orders.order.placed", version="one"):
    total: int
    note: str = ""

Placed(total="much")
Placed(note="nothing else")
Placed(1)
event = Placed(total=1)
event.total = 2
Route("a.*", to="broker")
Pillarbox(tenancy="maybe")
reveal_type(event.event_id)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the checker says of all of it: most of its time goes into what they all import."""
    folder = tmp_path_factory.mktemp("typing")
    for program in PROGRAMS:
        (folder / program).write_text((CONTRACT / program).read_text())
    (folder / "wrong.py").write_text(WRONG)
    # One of them reads by the official client, which has no types: the one thing that a user's checker must be told.
    (folder / "mypy.ini").write_text("[mypy]\n[mypy-pulsar]\nignore_missing_imports = true\n")
    cache = f"--cache-dir={ROOT / '.mypy_cache' / 'contract'}"
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", cache]
    done = subprocess.run([*command, *PROGRAMS, "wrong.py"], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def test_the_contract_programs(said: list[str]) -> None:
    assert [line for line in said if not line.startswith("wrong.py:")] == []


def test_mistakes_are_seen_by_the_type_checker(said: list[str]) -> None:
    found = "\n".join(said)
    for complaint in (
        'wrong.py:4: error: Argument "version"',
        'wrong.py:8: error: Argument "total"',
        'wrong.py:9: error: Missing named argument "total"',
        "wrong.py:10: error: Too many positional arguments",
        'wrong.py:12: error: Property "total" defined in "Placed" is read-only',
        'wrong.py:13: error: Missing named argument "topic"',
        'wrong.py:14: error: Argument "tenancy"',
        'wrong.py:15: note: Revealed type is "uuid.UUID"',
    ):
        assert complaint in found, found
