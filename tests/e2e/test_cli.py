"""The command line as its users have it: real processes, on real databases."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from sqlalchemy import ColumnElement, create_engine, inspect, text
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import IntegrationEvent, Pillarbox, Route, event_context
from pillarbox.cli import cli as root
from pillarbox.cli.output import Exit
from pillarbox.embedded import EmbeddedPostgres
from pillarbox.outbox import Status
from pillarbox.settings import Settings
from pillarbox.stores.tables import outbox
from pillarbox.transports.memory import MemoryTransport
from tests import commands
from tests.conftest import EACH_DATABASE, FreshDatabase
from tests.deliveries import put
from tests.servers import Database, DatabaseServer, Server

PILLARBOX = str(Path(sys.executable).with_name("pillarbox"))
DOCS = Path(__file__).parents[2] / "docs" / "reference"

HOSTILE_KEY = "evil\u202eyek"
HOSTILE_ERROR = "\x1b]0;owned\x07\nerror: faked"


class ItemStored(IntegrationEvent, name="stock.item.stored"):
    sku: str


class ItemTaken(IntegrationEvent, name="stock.item.taken"):
    sku: str


class CommandLine:
    """Runs ``pillarbox`` in a folder of its own, with nothing of ours in its environment but what is given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PILLARBOX_", "PYTHON"))}
        self._started: list[subprocess.Popen[str]] = []
        self.environment = kept | {"PILLARBOX_HOME": os.environ["PILLARBOX_HOME"]}

    def use(self, url: str) -> None:
        self.environment["PILLARBOX_DATABASE_URL"] = url

    def __call__(self, *arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; it must exit with this code."""
        if any(not name.startswith("PILLARBOX_") for name in variables):  # for the interpreter itself
            return self.python("", *arguments, code=code, **variables)
        done = commands.run(arguments, self.environment | variables, self.folder)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def json(self, *arguments: str, code: int = 0, **variables: str) -> Any:
        return json.loads(self(*arguments, "--json", code=code, **variables).stdout)

    def complaint(self, *arguments: str, code: int, **variables: str) -> str:
        """Run a command that fails with one line, and says nothing else."""
        done = self(*arguments, code=code, **variables)
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        return line

    def python(self, before: str, *arguments: str, code: int, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in an interpreter that has done something else before."""
        start = [sys.executable, "-c", f"{before}\nfrom pillarbox.cli import main\nmain()"] if before else [PILLARBOX]
        done = subprocess.run(
            [*start, *arguments],
            env=self.environment | variables,
            cwd=self.folder,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def start(self, *arguments: str, program: str | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start a command that the test ends; by a program of its own, if one is given."""
        streams = {"stdout": subprocess.PIPE} | options
        start = [PILLARBOX] if program is None else [sys.executable, "-c", program]
        process = subprocess.Popen([*start, *arguments], env=self.environment, cwd=self.folder, text=True, **streams)
        self._started.append(process)
        return process

    def end(self) -> None:
        """Let nothing of a failed test live on."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=60)


@pytest.fixture
def pillarbox(tmp_path: Path) -> Iterator[CommandLine]:
    command_line = CommandLine(tmp_path)
    yield command_line
    command_line.end()


@pytest.fixture
def embedded(use_server: Callable[[str], Server]) -> None:
    """Commands without a database_url use the embedded PostgreSQL of this test run, which others may have used."""
    server = use_server("embedded")
    assert isinstance(server, DatabaseServer)
    server.drop("pillarbox")


@pytest.fixture(params=EACH_DATABASE)
def database(request: pytest.FixtureRequest, fresh_database: FreshDatabase, pillarbox: CommandLine) -> Database:
    """A database that commands use, once for each dialect; an empty one, unless the test wants it migrated."""
    database = fresh_database(request.param, empty="migrated" not in request.fixturenames)
    pillarbox.use(database.url())
    return database


@pytest.fixture
def migrated(database: Database) -> Database:
    asyncio.run(_migrate(database.url()))
    return database


@pytest.fixture
def filled(migrated: Database) -> Database:
    """With six deliveries: three events of two tenants, each for two routes."""
    asyncio.run(_fill(migrated.url()))
    return migrated


on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
on_postgres = pytest.mark.parametrize("database", ["embedded"], indirect=True)
on_mariadb = pytest.mark.parametrize("database", ["mariadb"], indirect=True)


async def _migrate(url: str) -> None:
    engine = create_async_engine(url)
    await Pillarbox(engine).migrate()
    await engine.dispose()


async def _fill(url: str) -> None:
    engine = create_async_engine(url)
    routes = [
        Route("stock.**", to="broker", topic="stock.events"),
        Route("stock.item.*", to="archive", topic="stock.{tenant}"),
    ]
    box = Pillarbox(engine, transports={"broker": MemoryTransport(), "archive": MemoryTransport()}, routes=routes)
    with event_context(correlation_id="c-1"):
        async with box.unit_of_work(tenant="acme") as uow:
            uow.publish(ItemStored(sku="a"), key="A")
            uow.publish(ItemTaken(sku="a"), key="a")
        async with box.unit_of_work(tenant="globex") as uow:
            uow.publish(ItemStored(sku="b"), key=HOSTILE_KEY)
    await engine.dispose()


async def _publish_to_a_handler(url: str) -> None:
    engine = create_async_engine(url)
    box = Pillarbox(engine)
    box.subscribe(ItemStored, name="shelves")(print)
    async with box.unit_of_work() as uow:
        uow.publish(ItemStored(sku="a"), key="A")
    await engine.dispose()


def execute(database: Database, statement: str, **values: object) -> list[Any]:
    engine = create_engine(database.url(database.server.drivers[-1]))
    with engine.begin() as connection:
        done = connection.execute(text(statement), values)
        rows = list(done) if done.returns_rows else []
    engine.dispose()
    return rows


def leave(database: Database, status: Status, *conditions: ColumnElement[bool], **values: object) -> None:
    """As a relay would have left these deliveries."""
    engine = create_engine(database.url(database.server.drivers[-1]))
    with engine.begin() as connection:
        put(connection, *conditions, status=status, **values)
    engine.dispose()


def file_of(database: Database) -> Path:
    """The file of a SQLite database."""
    return Path(database.url().partition("///")[2])


def tables(database: Database) -> set[str]:
    engine = create_engine(database.url(database.server.drivers[-1]))
    with engine.connect() as connection:
        found = set(inspect(connection).get_table_names())
    engine.dispose()
    return found


def checks(report: Any) -> dict[str, Any]:
    """What doctor found, by the name of the check; the worst if there are several."""
    order = ("ok", "warning", "problem")
    return {check["name"]: check for check in sorted(report["checks"], key=lambda check: order.index(check["state"]))}


class TestItself:
    def test_help_and_version(self, pillarbox: CommandLine) -> None:
        assert pillarbox("--help").stdout == pillarbox().stdout
        assert "doctor" in pillarbox("--help").stdout
        assert re.fullmatch(r"pillarbox \d+\.\d+\.\d+\n", pillarbox("--version").stdout)

    def test_help_imports_nothing_heavy(self, pillarbox: CommandLine) -> None:
        heavy = {"sqlalchemy", "alembic", "pydantic", "asyncio", "yaml"}
        before = f"import atexit, sys; atexit.register(lambda: print({heavy} & sys.modules.keys()))"
        assert pillarbox.python(before, "--help", code=0).stdout.endswith("set()\n")

    def test_every_command_takes_json_and_config(self) -> None:
        for path, command in _commands(root):
            options = {name for parameter in command.params for name in parameter.opts}
            assert options >= {"--json", "--config"}, path
            assert command.help, path

    def test_the_page_describes_every_command_and_option(self) -> None:
        page = (DOCS / "cli.md").read_text("utf-8")
        sections = {part.splitlines()[0]: part for part in page.split("\n## ")[1:]}
        assert sorted(sections) == sorted(path for path, _ in _commands(root))
        for path, command in _commands(root):
            for option in (name for parameter in command.params for name in parameter.opts if name.startswith("--")):
                assert option in (page if option in ("--json", "--config") else sections[path])

    def test_the_page_describes_every_exit_code(self) -> None:
        page = (DOCS / "cli.md").read_text("utf-8")
        documented = {
            int(code) for row in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for code in row.split(",")
        }
        assert documented == set(Exit)

    def test_the_page_of_tables_names_every_action_of_the_trail(self) -> None:
        """Whoever is asked who they are is written down."""
        page = (DOCS / "tables.md").read_text("utf-8")
        (listed,) = re.findall(r"^\| `action` \| of deliveries (.+) \|$", page, re.MULTILINE)
        signed = [path for path, command in _commands(root) if any("--by" in it.opts for it in command.params)]
        actions = {path.split()[-1] for path in signed}
        assert actions == {*re.findall("`([a-z-]+)`", listed)}


def _commands(command: click.Command, path: str = "pillarbox") -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _commands(inner, f"{path} {name}")
    else:
        yield path, command


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "what"),
        [
            (["nonsense"], "No such command 'nonsense'"),
            (["outbox"], "Missing command. See `pillarbox outbox --help`."),
            (["outbox", "list", "--nonsense"], "No such option"),
            (["outbox", "list", "--status", "LOST"], "'LOST' is not one of 'PENDING'"),
            (["outbox", "list", "--limit", "0"], "0 is not in the range"),
            (["outbox", "list", "--limit", "abc"], "'abc' is not a valid whole number."),
            (["lanes", "rate", "broker", "--per-second", "abc"], "'abc' is not a valid number."),
            (
                ["--json", "outbox", "list"],
                "'--json' before the command. Options come after it, as in `pillarbox outbox",
            ),
            (["outbox", "--config", "x.yaml", "list"], "'--config' before the command. Options come after it, as in"),
            (["outbox", "list", "--type", "a.*.b.**"], "'a.*.b.**' is no pattern of event names: write"),
            (["outbox", "list", "--type", "'; DROP TABLE"], "is no pattern of event names"),
            (["outbox", "show", "17"], "'17' is not a valid UUID"),
            (["migrate", "--dialect", "mysql"], "--dialect goes with --sql"),
            (["demo", "--seconds", "0"], "0"),
            (["outbox", "show", "\x1b[2J"], r"'\x1b[2J' is not a valid UUID"),
        ],
    )
    def test_usage(self, pillarbox: CommandLine, arguments: list[str], what: str) -> None:
        line = pillarbox.complaint(*arguments, code=Exit.USAGE)
        assert what in line
        assert line.endswith("--help`.")

    def test_each_wrong_setting_has_its_line(self, pillarbox: CommandLine) -> None:
        (pillarbox.folder / "other.yaml").write_text("shrads: 4\ntenancy: maybe\n")
        done = pillarbox("doctor", "--config", "other.yaml", code=Exit.SETTINGS)
        assert done.stdout == ""
        assert sorted(done.stderr.splitlines()) == [
            "error: shrads (from other.yaml): there is no such key; did you mean shards?",
            "error: tenancy (from other.yaml): should be 'off' or 'required'; it is 'maybe'",
        ]

    @pytest.mark.parametrize("command", [["config", "show"], ["doctor"], ["outbox", "list"]])
    def test_a_variable_that_holds_no_json(self, pillarbox: CommandLine, command: list[str]) -> None:
        line = pillarbox.complaint(*command, code=Exit.SETTINGS, PILLARBOX_TRANSPORTS='{"sink": ')
        assert line.startswith("error: transports (from PILLARBOX_TRANSPORTS): is no JSON; write ")

    def test_a_settings_file_that_is_not_there(self, pillarbox: CommandLine) -> None:
        assert "absent.yaml: cannot be read" in pillarbox.complaint(
            "migrate", "--config", "absent.yaml", code=Exit.SETTINGS
        )

    @pytest.mark.parametrize(
        "url",
        [
            "postgresql://app:geheim@127.0.0.1:1/shop",
            "postgresql+psycopg://app:geheim@127.0.0.1:1/shop?sslpassword=geheim",
            "mysql://app:geheim@127.0.0.1:1/shop",
            "postgresql://app:geheim@nowhere.invalid/shop",
        ],
    )
    def test_a_server_that_is_not_there(self, pillarbox: CommandLine, url: str) -> None:
        pillarbox.use(url)
        line = pillarbox.complaint("outbox", "stats", code=Exit.UNREACHABLE)
        assert line.startswith("error: cannot reach ")
        assert "app:***@" in line
        assert "(from PILLARBOX_DATABASE_URL)" in line
        assert "geheim" not in line

    @on_postgres
    def test_a_database_that_is_not_there(self, pillarbox: CommandLine, database: Database) -> None:
        pillarbox.use(database.url().replace(f"/{database.name}?", "/absent?"))
        assert 'database "absent" does not exist' in pillarbox.complaint("migrate", code=Exit.UNREACHABLE)

    @on_mariadb
    def test_a_login_that_is_refused(self, pillarbox: CommandLine, database: Database) -> None:
        pillarbox.use(database.url().replace("root@", "root:geheim@"))
        line = pillarbox.complaint("migrate", code=Exit.UNREACHABLE)
        assert "Access denied" in line
        assert "geheim" not in line

    def test_a_file_that_cannot_be_opened(self, pillarbox: CommandLine) -> None:
        pillarbox.use("sqlite:///.")
        assert "unable to open database file" in pillarbox.complaint("migrate", code=Exit.UNREACHABLE)

    def test_a_file_in_a_folder_that_is_not_there(self, pillarbox: CommandLine) -> None:
        pillarbox.use("sqlite:///absent/shop.db")
        what = "the folder absent for the SQLite file shop.db does not exist: make it, or correct database_url (from"
        for command in (["migrate"], ["outbox", "list"]):
            assert what in pillarbox.complaint(*command, code=Exit.UNREACHABLE)
        assert what in pillarbox("doctor", code=Exit.PROBLEM).stdout

    def test_a_file_that_is_no_database(self, pillarbox: CommandLine) -> None:
        (pillarbox.folder / "shop.db").write_text("something else entirely" * 100)
        pillarbox.use("sqlite:///shop.db")
        assert "file is not a database" in pillarbox.complaint("outbox", "list", code=Exit.UNREACHABLE)

    @on_postgres
    def test_a_database_that_refuses(self, pillarbox: CommandLine, database: Database) -> None:
        execute(database, f"ALTER DATABASE {database.name} SET default_transaction_read_only = on")
        line = pillarbox.complaint("migrate", code=Exit.UNREACHABLE)
        assert "rejected the statement" in line
        assert "read-only transaction" in line

    def test_a_database_that_is_not_migrated(self, pillarbox: CommandLine, database: Database) -> None:
        if database.kind == "sqlite":
            file_of(database).touch()
        for command in (["outbox", "list"], ["demo"]):
            assert "run `pillarbox migrate`" in pillarbox.complaint(*command, code=Exit.NOT_MIGRATED)

    @on_sqlite
    def test_a_newer_schema(self, pillarbox: CommandLine, migrated: Database) -> None:
        execute(migrated, "UPDATE pillarbox_meta SET schema_version = 99")
        assert "newer than this release knows" in pillarbox.complaint("outbox", "stats", code=Exit.NOT_MIGRATED)

    def test_a_sqlite_file_that_is_not_there_is_not_made(self, pillarbox: CommandLine) -> None:
        pillarbox.use("sqlite:///shop.db")
        assert "shop.db does not exist" in pillarbox.complaint("outbox", "list", code=Exit.NOT_MIGRATED)
        pillarbox("doctor", code=Exit.PROBLEM)
        assert not (pillarbox.folder / "shop.db").exists()

    @pytest.mark.parametrize(
        ("driver", "url", "install"),
        [
            ("asyncpg", "postgresql://db/shop", "pip install 'pillarbox[postgres]'"),
            ("asyncmy", "mysql://db/shop", "pip install 'pillarbox[mysql]'"),
            ("aiosqlite", "sqlite:///shop.db", "pip install 'pillarbox[sqlite]'"),
            ("aiomysql", "mariadb+aiomysql://db/shop", "pip install aiomysql"),
        ],
    )
    def test_a_driver_that_is_not_installed(self, pillarbox: CommandLine, driver: str, url: str, install: str) -> None:
        pillarbox.use(url)
        done = pillarbox.python(f"import sys; sys.modules[{driver!r}] = None", "migrate", code=Exit.SETTINGS)
        (line,) = done.stderr.splitlines()
        assert line.endswith(install)

    def test_an_embedded_server_that_does_not_start(self, pillarbox: CommandLine) -> None:
        (pillarbox.folder / "file").write_text("in the way")
        pillarbox.environment["PILLARBOX_HOME"] = str(pillarbox.folder / "file")
        assert "cannot keep a PostgreSQL in" in pillarbox.complaint("migrate", code=Exit.UNREACHABLE)
        assert "cannot keep a PostgreSQL in" in pillarbox("doctor", code=Exit.PROBLEM).stdout

    def test_our_own(self, pillarbox: CommandLine) -> None:
        before = (
            "import pillarbox.cli.output as output\n"
            "def emit(*_, **__): raise RuntimeError('\\x1b[2J postgresql://app:geheim@db')\n"
            "output.emit = emit"
        )
        done = pillarbox.python(before, "config", "show", code=Exit.INTERNAL)
        assert done.stdout == ""
        assert "Traceback" in done.stderr
        assert done.stderr.endswith("error: this is a bug in pillarbox: please report it, with the lines above\n")
        assert "\x1b" not in done.stderr
        assert "geheim" not in done.stderr

    def test_a_reader_that_has_seen_enough(self, pillarbox: CommandLine) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        process = pillarbox.start("migrate", "--sql", stdout=writing, stderr=subprocess.PIPE)
        os.close(writing)
        _, complaint = process.communicate(timeout=60)
        assert complaint == ""
        assert process.returncode == Exit.PROBLEM

    @pytest.mark.parametrize("command", [["migrate", "--sql"], ["config", "show", "--json"], ["--help"]])
    def test_a_disk_that_is_full(self, pillarbox: CommandLine, command: list[str]) -> None:
        with Path("/dev/full").open("w") as full:
            process = pillarbox.start(*command, stdout=full, stderr=subprocess.PIPE)
            _, complaint = process.communicate(timeout=60)
        assert complaint == "error: cannot write to standard output: No space left on device; see where it goes\n"
        assert process.returncode == Exit.PROBLEM


class TestInit:
    def test_writes_a_file_that_changes_nothing_and_is_private(self, pillarbox: CommandLine) -> None:
        assert pillarbox("init").stdout == "wrote pillarbox.yaml\n"
        file = pillarbox.folder / "pillarbox.yaml"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        shown = pillarbox.json("config", "show")
        assert {each["origin"] for each in shown.values()} == {"default", "PILLARBOX_HOME"}

    def test_its_examples_are_valid(self, pillarbox: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
        pillarbox("init")
        file = pillarbox.folder / "pillarbox.yaml"
        file.write_text(re.sub(r"^#( *[a-z])", r"\1", file.read_text("utf-8"), flags=re.MULTILINE))
        monkeypatch.delenv("PILLARBOX_HOME")
        assert set(Settings.load(file).origins().values()) == {str(file)}

    def test_keeps_a_file_that_is_there(self, pillarbox: CommandLine) -> None:
        file = pillarbox.folder / "pillarbox.yaml"
        file.write_text("shards: 4")
        assert "say --force" in pillarbox.complaint("init", code=Exit.SETTINGS)
        assert file.read_text() == "shards: 4"
        pillarbox("init", "--force")
        assert "#shards: 16" in file.read_text()

    def test_elsewhere(self, pillarbox: CommandLine) -> None:
        assert pillarbox.json("init", "--config", "other.yaml") == {"path": "other.yaml"}
        assert (pillarbox.folder / "other.yaml").exists()
        assert "cannot write absent/x.yaml: No such file" in pillarbox.complaint(
            "init", "--config", "absent/x.yaml", code=Exit.SETTINGS
        )


class TestConfig:
    def test_show(self, pillarbox: CommandLine) -> None:
        (pillarbox.folder / "pillarbox.yaml").write_text("shards: 4\n")
        pillarbox.use("postgresql://app:geheim@db/shop")
        plain = pillarbox("config", "show").stdout
        assert re.search(r"^database_url +postgresql\+asyncpg://app:\*\*\*@db/shop$", plain, re.MULTILINE)
        with_origin = pillarbox("config", "show", "--origin").stdout
        assert re.search(r"^database_url +\S+ +PILLARBOX_DATABASE_URL$", with_origin, re.MULTILINE)
        assert re.search(r"^shards +4 +pillarbox\.yaml$", with_origin, re.MULTILINE)
        assert re.search(r"^tenancy +off +default$", with_origin, re.MULTILINE)

    def test_json(self, pillarbox: CommandLine) -> None:
        shown = pillarbox.json("config", "show", PILLARBOX_SERVICE__NAME="shop")
        assert shown["service.name"] == {"value": "shop", "origin": "PILLARBOX_SERVICE__NAME"}
        assert shown["shards"] == {"value": None, "origin": "default"}


class TestMigrate:
    @pytest.mark.usefixtures("database")
    def test_twice(self, pillarbox: CommandLine) -> None:
        first = pillarbox.json("migrate")
        assert first["steps"] == first["schema_version"] > 0
        assert pillarbox.json("migrate") == {"steps": 0, "schema_version": first["schema_version"]}
        assert pillarbox("migrate").stdout == f"nothing to do: schema version {first['schema_version']}\n"

    @pytest.mark.parametrize("database", ["embedded", "mariadb"], indirect=True)
    def test_through_every_driver(self, pillarbox: CommandLine, database: Database) -> None:
        for driver in database.server.drivers[:2]:
            pillarbox.use(database.url(driver))
            pillarbox("migrate")
            pillarbox("outbox", "stats")

    def test_the_printed_statements_do_the_same(self, pillarbox: CommandLine, fresh_database: FreshDatabase) -> None:
        for kind, dialect in (("sqlite", "sqlite"), ("embedded", "postgresql")):
            database = fresh_database(kind, empty=True)
            pillarbox.use(database.url())
            statements = pillarbox("migrate", "--sql", "--dialect", dialect).stdout
            if database.is_postgres:
                with psycopg.connect(database.url().replace("+asyncpg", "")) as connection:
                    connection.execute(statements.encode())
            else:
                with sqlite3.connect(file_of(database)) as sqlite:
                    sqlite.executescript(statements)
                sqlite.close()
            assert pillarbox.json("migrate")["steps"] == 0
            assert pillarbox.json("outbox", "stats") == {"groups": []}

    def test_sql_is_for_the_configured_database_and_connects_to_nothing(self, pillarbox: CommandLine) -> None:
        pillarbox.use("mysql://app:geheim@127.0.0.1:1/shop")
        printed = pillarbox.json("migrate", "--sql")
        assert printed["dialect"] == "mysql"
        assert "utf8mb4" in printed["sql"]
        assert pillarbox.json("migrate", "--sql", "--dialect", "sqlite")["dialect"] == "sqlite"
        del pillarbox.environment["PILLARBOX_DATABASE_URL"]
        assert pillarbox.json("migrate", "--sql")["dialect"] == "postgresql"

    @on_sqlite
    @pytest.mark.usefixtures("database")
    def test_shards_are_decided_once(self, pillarbox: CommandLine) -> None:
        pillarbox("migrate", PILLARBOX_SHARDS="4")
        pillarbox("migrate", PILLARBOX_SHARDS="4")
        line = pillarbox.complaint("migrate", code=Exit.SETTINGS, PILLARBOX_SHARDS="8")
        assert "shards=8" in line
        assert "4" in line

    @pytest.mark.usefixtures("embedded")
    def test_without_a_database_the_embedded_one(self, pillarbox: CommandLine) -> None:
        assert pillarbox.json("migrate")["schema_version"] > 0
        assert pillarbox.json("outbox", "stats") == {"groups": []}


class TestOutbox:
    @pytest.mark.usefixtures("filled")
    def test_list(self, pillarbox: CommandLine) -> None:
        listed = pillarbox.json("outbox", "list")
        assert listed["next"] is None
        deliveries = listed["deliveries"]
        assert len(deliveries) == 6
        assert [each["id"] for each in deliveries] == sorted(each["id"] for each in deliveries)
        assert {(each["route"], each["status"], each["attempts"]) for each in deliveries} == {
            ("broker:stock.events", "PENDING", 0),
            ("archive:stock.{tenant}", "PENDING", 0),
        }
        assert {each["key"] for each in deliveries} == {"A", "a", HOSTILE_KEY}
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", deliveries[0]["created_at"])

        lines = pillarbox("outbox", "list").stdout.splitlines()
        assert lines[0].split() == ["ID", "STATUS", "ROUTE", "TYPE", "TENANT", "KEY", "ATTEMPTS", "CREATED", "EVENT"]
        assert len(lines) == 7
        assert r"evil\u202eyek" in lines[-1]

    @on_sqlite
    @pytest.mark.usefixtures("filled")
    def test_filters(self, pillarbox: CommandLine) -> None:
        first = ["--status", "PENDING", "--route", "broker:stock.events", "--type", "stock.item.*", "--tenant", "acme"]
        (delivery,) = pillarbox.json("outbox", "list", *first, "--key", "A")["deliveries"]
        assert (delivery["key"], delivery["tenant_id"], delivery["route"]) == ("A", "acme", "broker:stock.events")
        assert pillarbox.json("outbox", "list", "--key", "' OR 1=1 --")["deliveries"] == []

    @on_sqlite
    @pytest.mark.usefixtures("filled")
    def test_pages(self, pillarbox: CommandLine) -> None:
        everything = pillarbox.json("outbox", "list")["deliveries"]
        first = pillarbox.json("outbox", "list", "--limit", "4")
        assert first["next"] == {"direction": "outbound", "after": everything[3]["id"]}
        second = pillarbox.json("outbox", "list", "--limit", "4", "--after", str(first["next"]["after"]))
        assert "--after" in pillarbox.complaint("outbox", "list", "--after", str(2**63), code=Exit.USAGE)
        assert second["next"] is None
        assert first["deliveries"] + second["deliveries"] == everything
        assert f"there are more: --after {first['next']['after']}" in pillarbox("outbox", "list", "--limit", "4").stdout

    @pytest.mark.usefixtures("filled")
    def test_show(self, pillarbox: CommandLine) -> None:
        (event_id,) = {each["event_id"] for each in pillarbox.json("outbox", "list", "--key", "a")["deliveries"]}
        shown = pillarbox.json("outbox", "show", event_id)
        assert shown["event_id"] == event_id
        assert {each["topic"] for each in shown["deliveries"]} == {"stock.events", "stock.acme"}
        delivery = shown["deliveries"][0]
        assert delivery["headers"]["correlation_id"] == delivery["correlation_id"] == "c-1"
        assert delivery["tenant_id"] == "acme"
        assert delivery["aggregate_type"] == "item"
        assert "payload" not in delivery

        with_payload = pillarbox.json("outbox", "show", event_id, "--payload")
        assert [json.loads(each["payload"]) for each in with_payload["deliveries"]] == [{"sku": "a"}] * 2
        text = pillarbox("outbox", "show", event_id).stdout
        assert "correlation_id" in text
        assert "payload" not in text
        assert '{"sku":"a"}' in pillarbox("outbox", "show", event_id, "--payload").stdout

    @on_sqlite
    def test_data_of_others_does_not_reach_the_terminal(self, pillarbox: CommandLine, filled: Database) -> None:
        leave(filled, Status.FAILED, last_error=HOSTILE_ERROR)
        (event_id,) = {e["event_id"] for e in pillarbox.json("outbox", "list", "--tenant", "globex")["deliveries"]}
        for arguments in (["show", event_id, "--payload"], ["show", event_id, "--json"], ["list"], ["stats"]):
            printed = pillarbox("outbox", *arguments).stdout
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e]", printed)
            assert "\nerror: faked" not in printed
        assert r"\x1b]0;owned\x07\nerror: faked" in pillarbox("outbox", "show", event_id).stdout

    @on_sqlite
    def test_a_payload_that_is_no_json(self, pillarbox: CommandLine, filled: Database) -> None:
        execute(filled, "UPDATE pillarbox_outbox SET body = :body", body=b"\xff\x00")
        event_id = pillarbox.json("outbox", "list")["deliveries"][0]["event_id"]
        shown = pillarbox.json("outbox", "show", event_id, "--payload")
        assert [each["payload"] for each in shown["deliveries"]] == [None, None]
        assert "not JSON: application/json" in pillarbox("outbox", "show", event_id, "--payload").stdout

    @on_sqlite
    @pytest.mark.usefixtures("filled")
    def test_an_event_that_is_not_there(self, pillarbox: CommandLine) -> None:
        absent = "00000000-0000-7000-8000-000000000000"
        assert f"the outbox has no event {absent}" in pillarbox.complaint("outbox", "show", absent, code=Exit.PROBLEM)

    def test_stats(self, pillarbox: CommandLine, filled: Database) -> None:
        leave(filled, Status.SENT, outbox.c.tenant == "globex")
        groups = pillarbox.json("outbox", "stats")["groups"]
        assert [(each["route"], each["status"], each["count"]) for each in groups] == [
            ("archive:stock.{tenant}", "PENDING", 2),
            ("archive:stock.{tenant}", "SENT", 1),
            ("broker:stock.events", "PENDING", 2),
            ("broker:stock.events", "SENT", 1),
        ]
        assert all(0 <= each["oldest_age_seconds"] < 300 for each in groups)
        lines = pillarbox("outbox", "stats").stdout.splitlines()
        assert lines[0].split() == ["ROUTE", "STATUS", "COUNT", "OLDEST", "SINCE"]
        assert len(lines) == 5

    @on_sqlite
    @pytest.mark.usefixtures("migrated")
    def test_nothing(self, pillarbox: CommandLine) -> None:
        assert pillarbox("outbox", "list").stdout == pillarbox("outbox", "stats").stdout == "no deliveries\n"
        assert pillarbox.json("outbox", "list") == {"deliveries": [], "next": None}


class TestDoctor:
    def test_a_healthy_database(self, pillarbox: CommandLine, migrated: Database) -> None:
        report = pillarbox.json("doctor")
        assert report["problems"] == 0
        found = checks(report)
        assert found["version"]["found"].endswith(migrated.server.version)
        wanted = {"database", "version", "encoding", "schema", "shards", "relays", "lanes", "pauses", "backlog"}
        wanted |= {"failures"}
        assert found.keys() - {"durability", "ids"} == wanted
        assert {name for name in wanted if found[name]["state"] != "ok"} == set()
        # The other servers of the tests forget on a crash, to be quick; the embedded one is as users have it.
        states = {"embedded": "ok", "mariadb": "warning"}
        assert found.get("durability", {}).get("state") == states.get(migrated.kind)
        text = pillarbox("doctor").stdout
        assert re.search(r"^ok       schema: version \d+$", text, re.MULTILINE)

    def test_a_database_that_is_not_there(self, pillarbox: CommandLine) -> None:
        pillarbox.use("postgresql://app:geheim@127.0.0.1:1/shop")
        done = pillarbox("doctor", code=Exit.PROBLEM)
        assert done.stdout.startswith("problem  database: cannot reach postgresql+asyncpg://app:***@127.0.0.1:1/shop: ")
        assert done.stderr == ""
        assert pillarbox.json("doctor", code=Exit.PROBLEM)["problems"] == 1

    @on_postgres
    @pytest.mark.usefixtures("database")
    def test_a_database_that_is_not_migrated(self, pillarbox: CommandLine) -> None:
        found = checks(pillarbox.json("doctor", code=Exit.PROBLEM))
        assert found["schema"]["state"] == "problem"
        assert "run `pillarbox migrate`" in found["schema"]["found"]
        assert "lanes" not in found

    @on_sqlite
    @pytest.mark.usefixtures("migrated")
    def test_a_server_that_is_too_old(self, pillarbox: CommandLine) -> None:
        before = "import pillarbox.cli.doctor as doctor; doctor._OLDEST['SQLite'] = (99, 1)"
        done = pillarbox.python(before, "doctor", code=Exit.PROBLEM)
        assert "upgrade to SQLite 99.1 or newer" in done.stdout

    @on_postgres
    def test_h03_a_cached_sequence(self, pillarbox: CommandLine, migrated: Database) -> None:
        execute(migrated, "ALTER TABLE pillarbox_outbox ALTER COLUMN id SET CACHE 50")
        found = checks(pillarbox.json("doctor", code=Exit.PROBLEM))["ids"]
        assert found["state"] == "problem"
        assert "is 50, and should be 1" in found["found"]
        execute(migrated, found["remedy"].partition(": ")[2])
        assert checks(pillarbox.json("doctor"))["ids"]["state"] == "ok"

    @on_postgres
    def test_h09_commits_that_nobody_waits_for(self, pillarbox: CommandLine, migrated: Database) -> None:
        execute(migrated, f"ALTER DATABASE {migrated.name} SET synchronous_commit = off")
        report = pillarbox.json("doctor")
        assert (report["warnings"], report["problems"]) == (1, 0)
        assert checks(report)["durability"]["found"] == "synchronous_commit is off"

    @pytest.mark.parametrize(
        ("kind", "what"), [("system", "fsync is off"), ("mariadb", "innodb_flush_log_at_trx_commit is 2")]
    )
    def test_h09_a_server_that_forgets(
        self, pillarbox: CommandLine, fresh_database: FreshDatabase, kind: str, what: str
    ) -> None:
        pillarbox.use(fresh_database(kind, empty=True).url())
        found = checks(pillarbox.json("doctor", code=Exit.PROBLEM))["durability"]
        assert (found["state"], found["found"]) == ("warning", what)
        assert "may lose committed events" in found["remedy"]

    @on_mariadb
    def test_several_nodes_that_draw_ids(self, pillarbox: CommandLine, migrated: Database) -> None:
        pillarbox.use(migrated.url() + "&init_command=SET+auto_increment_increment%3D3")
        found = checks(pillarbox.json("doctor"))["ids"]
        assert found["state"] == "warning"
        assert found["found"] == "auto_increment_increment is 3, and should be 1"

    def test_another_encoding(self, pillarbox: CommandLine) -> None:
        with sqlite3.connect(pillarbox.folder / "shop.db") as connection:
            connection.execute("PRAGMA encoding = 'UTF-16le'")
            connection.execute("CREATE TABLE here (id INTEGER)")
        connection.close()
        pillarbox.use("sqlite:///shop.db")
        pillarbox("migrate")
        found = checks(pillarbox.json("doctor", code=Exit.PROBLEM))["encoding"]
        assert found["found"] == "encoding is UTF-16le"

    def test_deliveries_that_nobody_serves(self, pillarbox: CommandLine, filled: Database) -> None:
        found = checks(pillarbox.json("doctor"))["lanes"]
        assert found["state"] == "warning"
        assert re.search(r"3 deliveries of route '.*' wait in \d lanes that nobody serves", found["found"])
        assert found["remedy"] == "start a relay that has the destination 'broker': `pillarbox relay`"
        execute(filled, "UPDATE pillarbox_lanes SET locked_until = :later", later="2999-01-01 00:00:00")
        assert checks(pillarbox.json("doctor"))["lanes"]["state"] == "ok"
        execute(filled, "UPDATE pillarbox_lanes SET locked_until = :past", past="2001-01-01 00:00:00")
        assert checks(pillarbox.json("doctor"))["lanes"]["state"] == "warning"
        leave(filled, Status.SENT)
        assert checks(pillarbox.json("doctor"))["lanes"]["state"] == "ok"

    @on_sqlite
    def test_deliveries_to_handlers_that_nobody_runs(self, pillarbox: CommandLine, migrated: Database) -> None:
        asyncio.run(_publish_to_a_handler(migrated.url()))
        found = checks(pillarbox.json("doctor"))["lanes"]
        assert found["found"] == "1 delivery of route 'local:shelves' wait in 1 lane that nobody serves"
        assert found["remedy"] == (
            "start a relay that has the handler 'shelves': `pillarbox relay MODULE:BOX` with the module that has it, "
            "or `pillarbox consume MODULE:BOX` if it is a consumer"
        )

    @on_sqlite
    def test_deliveries_that_have_failed(self, pillarbox: CommandLine, filled: Database) -> None:
        leave(filled, Status.PARKED)
        report = pillarbox.json("doctor")
        assert (report["problems"], checks(report)["failures"]["state"]) == (0, "warning")
        leave(filled, Status.FAILED)
        report = pillarbox.json("doctor", code=Exit.PROBLEM)
        assert (report["problems"], checks(report)["failures"]["state"]) == (2, "problem")
        assert "outbox list --status FAILED" in pillarbox("doctor", code=Exit.PROBLEM).stdout


class TestDevPostgres:
    @pytest.mark.usefixtures("embedded")
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_runs_until_told(self, pillarbox: CommandLine, servers_place: Path, number: signal.Signals) -> None:
        pillarbox.environment["PILLARBOX_HOME"] = str(servers_place)
        process = pillarbox.start("dev", "postgres")
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with psycopg.connect(url.replace("+asyncpg", "")) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        process.send_signal(number)
        assert process.communicate(timeout=60)[0] == ""
        assert process.returncode == 0
        assert not (servers_place / "postgres" / "data" / "postmaster.pid").exists()

    @pytest.mark.usefixtures("embedded")
    def test_json_and_joining(self, pillarbox: CommandLine) -> None:
        with EmbeddedPostgres() as running:
            process = pillarbox.start("dev", "postgres", "--json")
            assert process.stdout is not None
            described = "".join(iter(process.stdout.readline, "}\n")) + "}"
            assert json.loads(described) == {"url": running.url}
            process.terminate()
            process.communicate(timeout=60)
            assert process.returncode == 0
            with psycopg.connect(running.dsn()) as connection:
                assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.fixture
def servers_place(pillarbox_home: Path) -> Path:
    """A home of its own, where a server of root may keep its data."""
    return pillarbox_home.with_name("cli")
