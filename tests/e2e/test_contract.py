"""The programs in ``tests/contract`` are written from a user's chair, and run unchanged on every database."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import FreshDatabase
from tests.servers import Pulsar, Server, Servers

CONTRACT = Path(__file__).parent.parent / "contract"
SYNC = {"embedded": "psycopg", "system": "psycopg2", "oldest": "psycopg", "mariadb": "pymysql", "sqlite": "pysqlite"}


def on(*kinds: str) -> pytest.MarkDecorator:
    """On these kinds by `make test`, and on the others by `make test-all`."""
    others = [pytest.param(kind, marks=pytest.mark.elsewhere) for kind in SYNC if kind not in kinds]
    return pytest.mark.parametrize("kind", [*kinds, *others])


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(CONTRACT / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@on("embedded", "mariadb", "sqlite")
def test_quickstart(fresh_database: FreshDatabase, kind: str) -> None:
    assert "2 sent, in order; 1 handled here" in run("quickstart.py", fresh_database(kind, empty=True).url())


@on("system")
def test_own_session(fresh_database: FreshDatabase, kind: str) -> None:
    database = fresh_database(kind, empty=True)
    assert "3 sent, in order" in run("own_session.py", database.url(), database.url(SYNC[kind]))


@on("embedded")
def test_consumer(fresh_database: FreshDatabase, kind: str) -> None:
    assert "3 invoices from 4 orders delivered twice; 1 rejected" in run(
        "consumer.py", fresh_database(kind, empty=True).url()
    )


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["embedded", "mariadb"])
def test_pulsar_exactly_once(fresh_database: FreshDatabase, pulsar: Pulsar, kind: str) -> None:
    """It takes more than a minute, as it kills 25 relays at its own pace."""
    said = run("pulsar_exactly_once.py", fresh_database(kind, empty=True).url(), pulsar.url, pulsar.admin_url)
    assert "25 relays killed: each once, in order" in said


@pytest.mark.full
def test_without_a_database_twice_in_a_row(
    use_server: Callable[[str], Server], servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server("embedded")
    monkeypatch.setenv("PILLARBOX_HOME", str(servers.folder / "contract"))
    for _ in range(2):
        assert "2 sent, in order" in run("quickstart.py")
        assert "2 sent, in order" in run("own_session.py")
        assert "3 invoices from 4 orders delivered twice" in run("consumer.py")
