"""What users write passes ``mypy --strict``, and what they get wrong does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONTRACT = Path(__file__).parent.parent / "contract"


def mypy(*arguments: str, cwd: Path) -> list[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False).stdout.splitlines()


def test_the_contract_programs(tmp_path: Path) -> None:
    programs = ("quickstart.py", "own_session.py", "consumer.py", "pulsar_exactly_once.py")
    for program in programs:
        (tmp_path / program).write_text((CONTRACT / program).read_text())
    # One of them reads by the official client, which has no types: the one thing that a user's checker must be told.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-pulsar]\nignore_missing_imports = true\n")
    assert mypy(*programs, cwd=tmp_path) == []


def test_mistakes_are_seen_by_the_type_checker(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        """
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
    )
    found = "\n".join(mypy("wrong.py", cwd=tmp_path))
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
