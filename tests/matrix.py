"""The tests that touch a database, on all that we support: ``make test-matrix``, or some of it: ``CELLS=pg14,sa20``.

A cell is one version of one thing, the rest is as in `make test`. One that cannot be set up has failed, and so has one
whose tests ran on something else than it is named for. The result is a table, and ``build/matrix.json``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests import binaries, servers

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "matrix"
RESULT = ROOT / "build" / "matrix.json"
LIMIT_SECONDS = 1800
MAX_SHOWN = 20

TESTS = ("tests/conformance/test_outbox_store.py", "tests/integration", "tests/e2e/test_contract.py")
NOWHERE = tuple(
    f"--ignore=tests/integration/test_pulsar_{name}.py"
    for name in ("admin", "security", "server", "subscriber", "transport")
)
"""What needs no database at all."""
ELSEWHERE = (
    *NOWHERE,
    "--ignore=tests/integration/test_embedded.py",
    "--ignore=tests/integration/test_pgbouncer.py",
    "--deselect=tests/e2e/test_contract.py::test_without_a_database_twice_in_a_row",
)
"""What brings servers of its own, whatever the cell has."""
STALE = tuple(
    f"--deselect=tests/integration/test_operations.py::{name}[mariadb]"
    for name in ("TestTrace::test_a_life", "TestEdits::test_who_asks_for_the_old_event_is_led_to_the_new_one")
)
"""What compares times with those of the first row of a table: there MySQL 8.0.15 puts the time of the last ALTER TABLE,
if the default is an expression.
"""
UNCHECKED = ("--deselect=tests/integration/test_failure.py::TestTheMessagesFault::test_h87_check",)
"""MySQL knows CHECK since 8.0.16."""


class NotSetUpError(Exception):
    """A cell cannot be tested here; the message says why."""


@dataclass
class Result:
    """What became of a cell; ``versions`` is what its tests have run on."""

    cell: str
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    trouble: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return self.passed > 0 and self.failed == 0 and not self.trouble


@dataclass(frozen=True)
class Cell:
    """``prepare`` returns the interpreter; ``wanted`` is what must be among the versions that were tested."""

    prepare: Callable[[str], Path]
    wanted: tuple[str, str]
    arguments: tuple[str, ...] = TESTS


def with_binaries(name: str) -> Callable[[str], Path]:
    def prepare(_cell: str) -> Path:
        try:
            binaries.install(name)
        except binaries.UnavailableError as error:
            raise NotSetUpError(str(error)) from error
        return Path(sys.executable)

    return prepare


def as_it_is(_cell: str) -> Path:
    return Path(sys.executable)


def with_python(version: str | None) -> Callable[[str], Path]:
    """An environment from the lock, on this Python, or on the newest one there is."""
    return lambda cell: _environment(cell, _interpreter(version))


def with_sqlalchemy(wanted: str) -> Callable[[str], Path]:
    """An environment from the lock, but for the newest SQLAlchemy of this line."""
    return lambda cell: _environment(cell, Path(sys.executable), "--upgrade", wanted)


def _environment(cell: str, interpreter: Path, *instead: str) -> Path:
    uv, place = str(Path(sys.executable).with_name("uv")), BUILD / cell
    python = place / "bin" / "python"
    install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    _run(uv, "venv", "--quiet", "--clear", "--no-project", "--python", str(interpreter), str(place))
    _run(*install, "--require-hashes", "--requirements", "requirements/dev.txt")
    _run(*install, "--no-deps", "--no-build-isolation", "--editable", ".")
    if instead:
        _run(*install, *instead)
    return python


def _interpreter(version: str | None) -> Path:
    found = dict(_interpreters())
    fitting = [key for key in found if version is None or ".".join(map(str, key[:2])) == version]
    if not fitting or (version is None and max(fitting) < (3, 12)):
        raise NotSetUpError(f"there is no Python {version or 'newer than 3.11'} on this machine")
    return found[max(fitting)]


def _interpreters() -> Iterator[tuple[tuple[int, ...], Path]]:
    """Every final release on the path, or installed by pyenv or uv. A shim of pyenv may be there and not work."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "uv" / "python"
    on_path = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    for folder in [*on_path, *pyenv.glob("*/bin"), *data.glob("*/bin")]:
        for program in folder.glob("python3.*"):
            if re.fullmatch(r"python3\.\d+", program.name):
                ask = "import sys; print(sys.version_info.releaselevel, *sys.version_info[:3])"
                said = subprocess.run([program, "-c", ask], capture_output=True, text=True, check=False)
                if said.returncode == 0 and said.stdout.startswith("final "):
                    yield tuple(map(int, said.stdout.split()[1:])), program


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotSetUpError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")


CELLS: dict[str, Cell] = {
    **{
        f"pg{number}": Cell(
            with_binaries(f"postgresql-{number}"),
            ("PostgreSQL", f"{number}."),
            (*TESTS, *ELSEWHERE, "-k", "not mariadb and not mysql and not sqlite and not oldest"),
        )
        for number in (14, 15, 16, 17, 18)
    },
    "mysql8": Cell(
        with_binaries("mysql-8"),
        ("MySQL", "8."),
        (*TESTS, *ELSEWHERE, *STALE, *UNCHECKED, "-k", "mariadb or mysql or asyncmy or aiomysql or pymysql"),
    ),
    "pgbouncer": Cell(
        as_it_is,
        ("PgBouncer", ""),
        (
            *(f"tests/integration/test_{name}.py" for name in ("pgbouncer", "unit_of_work", "tenancy", "relay")),
            # A role is set at connect, and who cuts the connections of a relay cuts those of everybody.
            *("-k", "not mariadb and not mysql and not sqlite and not TestS02RowLevelSecurity and not test_h35"),
        ),
    ),
    "sa20": Cell(with_sqlalchemy("sqlalchemy>=2.0,<2.1"), ("SQLAlchemy", "2.0."), (*TESTS, *NOWHERE)),
    "sa21": Cell(with_sqlalchemy("sqlalchemy>=2.1,<2.2"), ("SQLAlchemy", "2.1."), (*TESTS, *NOWHERE)),
    "py311": Cell(with_python("3.11"), ("Python", "3.11.")),
    "pynewest": Cell(with_python(None), ("Python", "3.")),
}


def run(name: str, workers: int) -> Result:
    """One cell, from nothing to its result."""
    cell, result, started = CELLS[name], Result(name), time.monotonic()
    BUILD.mkdir(parents=True, exist_ok=True)
    report, log = BUILD / f"{name}.xml", BUILD / f"{name}.log"
    report.unlink(missing_ok=True)
    try:
        python = cell.prepare(name)
        command = [
            *(str(python), "-m", "pytest", "--full", "-n", str(workers), "-p", "no:cacheprovider"),
            f"--junitxml={report}",
        ]
        # Not PILLARBOX_...: commands refuse what they do not know.
        environment = os.environ | ({"MATRIX_CELL": name} if name in servers.CELLS else {})
        with log.open("wb") as output:
            done = subprocess.run(
                [*command, *cell.arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_SECONDS,
                check=False,
            )
        result.versions = _packages(python)
        if report.exists():
            _read(report, result)
        if done.returncode != 0 and not result.failed:
            result.trouble.append(f"pytest ended with {done.returncode}")
    except NotSetUpError as error:
        result.trouble.append(f"not set up: {error}")
    except subprocess.TimeoutExpired:
        result.trouble.append(f"not done after {LIMIT_SECONDS} s")
    else:
        what, version = cell.wanted
        if not result.versions.get(what, "none").startswith(version):
            result.trouble.append(f"ran on {what} {result.versions.get(what, 'not at all')}")
    result.seconds = round(time.monotonic() - started, 1)
    return result


def _packages(python: Path) -> dict[str, str]:
    ask = "import platform, sqlalchemy; print(platform.python_version(), sqlalchemy.__version__)"
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    return dict(zip(("Python", "SQLAlchemy"), said.stdout.split(), strict=True))


def _read(report: Path, result: Result) -> None:
    """Counts, and what tests/conftest.py noted about servers."""
    kinds = servers.KINDS | servers.CELLS.get(result.cell, {})
    for case in ET.parse(report).iter("testcase"):  # noqa: S314  pytest has written it
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
            result.trouble.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            result.skipped += 1
        else:
            result.passed += 1
        for noted in case.iter("property"):
            kind, said = ast.literal_eval(noted.get("value", ""))
            if noted.get("name") == "server missing":
                result.trouble.append(f"{kind} was missing: {said}")
            else:
                result.versions[kinds[kind].label] = said
    result.trouble = [*dict.fromkeys(result.trouble)]


def table(results: list[Result]) -> str:
    rows: list[tuple[str, ...]] = [("CELL", "", "PASSED", "FAILED", "SKIPPED", "SECONDS", "TESTED ON")]
    for each in results:
        tested = ", ".join(f"{what} {version}" for what, version in each.versions.items())
        counts = (each.passed, each.failed, each.skipped, each.seconds)
        rows.append((each.cell, "ok" if each.holds else "FAILED", *map(str, counts), tested))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-matrix", description=__doc__)
    parser.add_argument("--only", default="", help="cells, with commas between them")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name] or [*CELLS]
    if unknown := [name for name in names if name not in CELLS]:
        parser.error(f"no such cell: {', '.join(unknown)}; there are {', '.join(CELLS)}")
    results = []
    for name in names:
        sys.stdout.write(f"{name} ...\n")
        sys.stdout.flush()
        results.append(run(name, given.workers))
        for trouble in results[-1].trouble[:MAX_SHOWN]:
            sys.stdout.write(f"  {trouble}\n")
    RESULT.write_text(json.dumps([asdict(each) | {"holds": each.holds} for each in results], indent=2) + "\n")
    sys.stdout.write(f"\n{table(results)}\n\nlogs: {BUILD.relative_to(ROOT)}, result: {RESULT.relative_to(ROOT)}\n")
    return int(not all(each.holds for each in results))


if __name__ == "__main__":
    sys.exit(main())
