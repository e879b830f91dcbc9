"""Real servers for the tests: started when first asked for, in a temporary folder, one set per pytest process.

A server whose programs are absent raises `Missing`, which the fixtures turn into a skip and the summary reports. One
that is there and does not start is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from base64 import b64encode
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import psycopg
import pymysql
import redis
from psycopg import sql
from sqlalchemy import create_engine

from pillarbox.embedded import EmbeddedPostgres
from pillarbox.errors import MissingExtraError, MissingProgramError
from pillarbox.outbox import SHARDS
from pillarbox.stores.migrations import migrate
from pillarbox.testing import maven, pulsar
from tests import binaries, jars, keeper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DATABASES: tuple[str, ...] = ("embedded", "mariadb", "sqlite")
"""The kinds that most tests run on. Where versions matter most, or drivers, there are more of PostgreSQL; and
`make test-matrix` runs everything on all that we support.
"""


class Missing(Exception):  # noqa: N818  an outcome, not a failure
    """A server is not installed on this machine."""


@dataclass(frozen=True)
class Database:
    """A database of its own for one test."""

    kind: str
    name: str
    server: DatabaseServer

    @property
    def is_postgres(self) -> bool:
        return isinstance(self.server, Postgres)

    def url(self, driver: str | None = None) -> str:
        """A SQLAlchemy URL, for the server's usual async driver or for another one."""
        return self.server.url(self.name, driver or self.server.drivers[0])


class Server(ABC):
    """One server, or for SQLite the library."""

    label: ClassVar[str]
    shared: ClassVar[bool] = False
    """Whether all processes of a pytest run have one together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = ""

    @abstractmethod
    def start(self) -> None:
        """Start, wait until it answers, and learn the version; raises `Missing`."""

    @abstractmethod
    def stop(self) -> None: ...


class DatabaseServer(Server):
    drivers: ClassVar[tuple[str, ...]]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._has_template = False

    @abstractmethod
    def create(self, name: str) -> None: ...

    def copy(self, name: str, shards: int) -> None:  # noqa: ARG002  what is empty has none
        """Create a database that may be migrated already, where a copy is quicker than to migrate it."""
        self.create(name)

    @abstractmethod
    def drop(self, name: str) -> None:
        """Drop a database, and whoever is still connected to it."""

    @abstractmethod
    def url(self, name: str, driver: str) -> str: ...


class Postgres(DatabaseServer):
    drivers = ("asyncpg", "psycopg", "psycopg2")

    def create(self, name: str) -> None:
        # To copy files is quicker than to write what is in them, twice, which has been the default since it is one.
        self._execute("CREATE DATABASE {}" + (" STRATEGY FILE_COPY" if self._has_strategies else ""), name)

    def copy(self, name: str, shards: int) -> None:
        if not self._has_template:
            self.create(_TEMPLATE)
            _migrate(self.address(_TEMPLATE).replace("postgresql:", "postgresql+psycopg:", 1))
            self._has_template = True
        files = " STRATEGY FILE_COPY" if self._has_strategies else ""
        self._execute(f"CREATE DATABASE {{}} TEMPLATE {_TEMPLATE}{files}", name)
        with psycopg.connect(self.address(name), autocommit=True) as connection:
            connection.execute("UPDATE pillarbox_meta SET install_id = gen_random_uuid(), shards = %s", [shards])

    @property
    def _has_strategies(self) -> bool:
        return int(self.version.partition(".")[0]) >= 15

    def drop(self, name: str) -> None:
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def url(self, name: str, driver: str) -> str:
        return self.address(name).replace("postgresql:", f"postgresql+{driver}:", 1)

    @abstractmethod
    def address(self, name: str) -> str:
        """The URL for libpq."""

    def _execute(self, statement: str, name: str) -> None:
        with psycopg.connect(self.address("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(sql.Identifier(name)))

    def _read_version(self) -> None:
        with psycopg.connect(self.address("postgres")) as connection:
            self.version = _numbers(connection.execute("SHOW server_version").fetchall()[0][0])


class Embedded(Postgres):
    """Through our own adapter, with its default durability."""

    label = "embedded PostgreSQL"

    def start(self) -> None:
        self._postgres = EmbeddedPostgres(database="postgres")
        try:
            self._postgres.start()
        except MissingExtraError as error:
            raise Missing(str(error)) from error
        self._read_version()

    def stop(self) -> None:
        self._postgres.stop()

    def address(self, name: str) -> str:
        return self._postgres.dsn().replace("@/postgres?", f"@/{name}?", 1)


class Logical(Embedded):
    """One whose WAL can be decoded, in a folder of its own."""

    label = "PostgreSQL with logical WAL"

    def start(self) -> None:
        self._postgres = EmbeddedPostgres(self.folder, database="postgres")
        try:
            self._postgres.start()
        except MissingExtraError as error:
            raise Missing(str(error)) from error
        try:
            with psycopg.connect(self.address("postgres"), autocommit=True) as connection:
                connection.execute("ALTER SYSTEM SET wal_level = 'logical'")
            self.restart()
        except BaseException:
            self._postgres.stop()
            raise

    def restart(self) -> None:
        self._postgres.stop()
        self._postgres.start()
        self._read_version()


class System(Postgres):
    """The machine's own PostgreSQL, over TCP."""

    label = "system PostgreSQL"
    fsync = False
    more: ClassVar[tuple[str, ...]] = ()
    """Settings beyond those that all have."""

    def start(self) -> None:
        data, account = self.folder / "data", _account("postgres")
        programs = self._programs(account)
        _make_folder(data, account)
        _run([programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"], account)
        self._port = _free_port()
        settings = (f"port={self._port}", "listen_addresses=127.0.0.1", "unix_socket_directories=")
        durable = "fsync=on" if self.fsync else "fsync=off"
        command = [
            str(programs / "postgres"),
            "-D",
            str(data),
            *(f"--{each}" for each in (*settings, durable, *self.more)),
        ]
        self._process = _spawn(command, account, self.folder / "log")
        _wait_for_answer(self._process, self._read_version, psycopg.OperationalError, self.folder / "log")

    def stop(self) -> None:
        _end(self._process, signal.SIGQUIT)

    def address(self, name: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/{name}"

    def _programs(self, account: pwd.struct_passwd | None) -> Path:  # noqa: ARG002  others need a copy for it
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
        return (found[-1] if found else Path(_program("initdb"))).parent


class Oldest(System):
    """A PostgreSQL of a certain version."""

    label = "oldest PostgreSQL"
    binaries = "postgresql-14"

    def _programs(self, account: pwd.struct_passwd | None) -> Path:
        return _installed(self.binaries, self.folder / "programs", account) / "bin"


class LogicalOldest(Oldest):
    """The same, of which the WAL can be decoded."""

    label = "oldest PostgreSQL with logical WAL"
    more = ("wal_level=logical",)


class PgBouncer(System):
    """A PostgreSQL behind PgBouncer, which shares few connections: every transaction may have another one."""

    label = "PgBouncer"
    connections = 5
    settings: ClassVar[dict[str, dict[str, Any]]] = {
        "asyncpg": {"statement_cache_size": 0, "prepared_statement_cache_size": 0},
        "psycopg": {"prepare_threshold": None},
    }
    """What docs/how-to/production.md tells users to give to these drivers."""

    def start(self) -> None:
        program, account = _program("pgbouncer"), _account("postgres")
        super().start()
        try:
            self._start_pooler(program, account)
        except BaseException:
            super().stop()
            raise

    def _start_pooler(self, program: str, account: pwd.struct_passwd | None) -> None:
        pooler = self.folder / "pooler"
        _make_folder(pooler, account)
        self._pooler_port = _free_port()
        (pooler / "users").write_text('"postgres" ""\n"pgbouncer" ""\n')  # others are looked up
        (pooler / "ini").write_text(
            f"""[databases]
* = host=127.0.0.1 port={self._port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self._pooler_port}
unix_socket_dir =
auth_type = trust
auth_file = {pooler / "users"}
auth_user = postgres
admin_users = pgbouncer
pool_mode = transaction
default_pool_size = {self.connections}
max_client_conn = 1000
server_round_robin = 1
"""
        )
        log = self.folder / "pooler-log"
        self._pooler = _spawn([program, pooler / "ini"], account, log)
        _wait_for_answer(self._pooler, self._read_pooler_version, psycopg.OperationalError, log)

    def stop(self) -> None:
        _end(self._pooler, signal.SIGKILL)
        super().stop()

    def url(self, name: str, driver: str) -> str:
        return super().url(name, driver).replace(f":{self._port}/", f":{self._pooler_port}/", 1)

    def _read_pooler_version(self) -> None:
        with psycopg.connect(f"postgresql://pgbouncer@127.0.0.1:{self._pooler_port}/pgbouncer", autocommit=True) as it:
            self.version = _numbers(it.execute("SHOW VERSION").fetchall()[0][0].removeprefix("PgBouncer "))


class MariaDB(DatabaseServer):
    label = "MariaDB"
    drivers = ("asyncmy", "aiomysql", "pymysql")

    def start(self) -> None:
        data, scratch, account = self.folder / "data", self.folder / "tmp", _account("mysql")
        # A starting server clears its scratch folder: in a shared one it would take the files of its neighbour.
        place = ["--no-defaults", f"--datadir={data}", f"--tmpdir={scratch}"]
        install, server = self._programs(account)
        _make_folder(data, account)
        _make_folder(scratch, account)
        _run([install[0], *place, *install[1:]], account)
        self._port = _free_port()
        command = [
            *(server[0], *place, *server[1:], "--bind-address=127.0.0.1", f"--port={self._port}"),
            *(f"--socket={data / 's'}", f"--pid-file={data / 'pid'}"),
            *("--innodb-flush-log-at-trx-commit=2", "--innodb-buffer-pool-size=64M"),
        ]
        self._process = _spawn(command, account, self.folder / "log")
        _wait_for_answer(self._process, self._read_version, pymysql.OperationalError, self.folder / "log")

    def _programs(self, account: pwd.struct_passwd | None) -> tuple[list[str], list[str]]:  # noqa: ARG002  as above
        """What makes the folder, and what runs in it."""
        install = [_program("mariadb-install-db"), "--auth-root-authentication-method=normal", "--skip-test-db"]
        return install, [_program("mariadbd"), "--skip-name-resolve"]

    def stop(self) -> None:
        _end(self._process, signal.SIGKILL)

    def create(self, name: str) -> None:
        self._execute(f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")

    def drop(self, name: str) -> None:
        users = self._execute(f"SELECT id FROM information_schema.processlist WHERE db = '{name}'")
        for (user,) in users:
            with contextlib.suppress(pymysql.OperationalError):  # gone in the meantime
                self._execute(f"KILL {user}")
        self._execute(f"DROP DATABASE IF EXISTS `{name}`")

    def url(self, name: str, driver: str) -> str:
        return f"mysql+{driver}://root@127.0.0.1:{self._port}/{name}?charset=utf8mb4"

    def _execute(self, statement: str) -> tuple[tuple[object, ...], ...]:
        connection = pymysql.connect(host="127.0.0.1", port=self._port, user="root", autocommit=True)
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()

    def _read_version(self) -> None:
        self.version = _numbers(str(self._execute("SELECT version()")[0][0]))


class MySQL(MariaDB):
    """In the place of MariaDB. Before 8.0.24, with NO_ZERO_DATE, it can alter no table that has an expression as the
    default of a DATETIME; so this one, which is 8.0.15, goes without that mode.
    """

    label = "MySQL"
    modes = "ONLY_FULL_GROUP_BY,STRICT_TRANS_TABLES,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION"

    def _programs(self, account: pwd.struct_passwd | None) -> tuple[list[str], list[str]]:
        place = _installed("mysql-8", self.folder / "programs", account)
        server = [str(place / "bin" / "mysqld"), f"--basedir={place}", f"--lc-messages-dir={place / 'share'}"]
        return [*server, "--initialize-insecure"], [*server, "--mysqlx=OFF", f"--sql-mode={self.modes}"]


class SQLite(DatabaseServer):
    label = "SQLite"
    drivers = ("aiosqlite", "pysqlite")

    def start(self) -> None:
        self.folder.mkdir()
        self.version = sqlite3.sqlite_version

    def stop(self) -> None:
        """Nothing runs."""

    def create(self, name: str) -> None:
        """The first connection creates it."""

    def copy(self, name: str, shards: int) -> None:
        if not self._has_template:
            _migrate(self.url(_TEMPLATE, "pysqlite"))
            self._has_template = True
        file = self.folder / f"{name}.db"
        shutil.copyfile(self.folder / f"{_TEMPLATE}.db", file)
        with contextlib.closing(sqlite3.connect(file)) as connection, connection:
            connection.execute("UPDATE pillarbox_meta SET install_id = ?, shards = ?", [uuid4().hex, shards])

    def drop(self, name: str) -> None:
        for file in self.folder.glob(f"{name}.db*"):
            file.unlink()

    def url(self, name: str, driver: str) -> str:
        return f"sqlite+{driver}:///{self.folder / name}.db"


class Redis(Server):
    label = "Redis"

    def start(self) -> None:
        server = _program("redis-server")
        self.folder.mkdir()
        self._port = _free_port()
        command = [server, "--bind", "127.0.0.1", "--port", str(self._port), "--dir", str(self.folder), "--save", ""]
        self._process = _spawn(command, None, self.folder / "log")
        _wait_for_answer(self._process, self._read_version, redis.ConnectionError, self.folder / "log")

    def stop(self) -> None:
        _end(self._process, signal.SIGKILL)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def empty(self) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def _read_version(self) -> None:
        with redis.Redis.from_url(self.url) as client:
            self.version = str(client.info("server")["redis_version"])


class Prometheus(Server):
    """Runs once per test that wants it, as it is told at its start whom to scrape; here it only says who it is."""

    label = "Prometheus"

    def start(self) -> None:
        self._program = _program("prometheus")
        self.folder.mkdir()
        said = subprocess.run([self._program, "--version"], capture_output=True, text=True, check=True)
        self.version = _numbers((said.stdout + said.stderr).partition("version ")[2])

    def stop(self) -> None:
        """Nothing runs between tests."""

    def check(self, metrics: str) -> str:
        """What promtool has against these metrics."""
        command = [_program("promtool"), "check", "metrics"]
        done = subprocess.run(command, input=metrics, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    @contextlib.contextmanager
    def scraping(self, target: str) -> Iterator[str]:
        """A server that scrapes ``host:port`` every fifth of a second; its address comes back."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        scrape = f"- job_name: pillarbox\n  static_configs:\n  - targets: ['{target}']\n"
        timing = "global:\n  scrape_interval: 200ms\n  scrape_timeout: 200ms\n"
        (folder / "prometheus.yml").write_text(f"{timing}scrape_configs:\n{scrape}")
        address = f"127.0.0.1:{_free_port()}"
        command = [
            *(self._program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
            f"--web.listen-address={address}",
        ]
        process = _spawn(command, None, folder / "log")

        def ready() -> None:
            with urllib.request.urlopen(f"http://{address}/-/ready", timeout=5):
                pass

        _wait_for_answer(process, ready, OSError, folder / "log")
        try:
            yield f"http://{address}"
        finally:
            _end(process, signal.SIGKILL)


class PulsarClusters(Server):
    """A cluster is there to be broken: it is made when a test wants one, and kept for the next while it is whole."""

    label = "Pulsar cluster"
    running: ClassVar[PulsarClusters | None] = None
    """Who keeps one in this process, if anybody."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._kept: pulsar.PulsarCluster | None = None
        self._exits = contextlib.ExitStack()

    def start(self) -> None:
        try:
            pulsar.java()
        except MissingProgramError as error:
            raise Missing(str(error)) from error
        if not pulsar.is_installed():
            raise Missing(maven.obstacle() or "Pulsar was not fetched: make servers")
        self.version = pulsar.VERSION

    def stop(self) -> None:
        PulsarClusters.running = self._kept = None
        self._exits.close()

    def whole(self) -> pulsar.PulsarCluster:
        """The one that the test before has left behind or, if there is none or it is broken, a new one."""
        if self._kept is None or not self._kept.is_whole():
            self.stop()
            self._kept = self._exits.enter_context(self.fresh())
            PulsarClusters.running = self
        return self._kept

    @contextlib.contextmanager
    def fresh(self) -> Iterator[pulsar.PulsarCluster]:
        """A new one, in a folder of its own."""
        with tempfile.TemporaryDirectory(prefix="pillarbox-pulsar-") as folder:
            cluster = pulsar.PulsarCluster(Path(folder), quick_start=True)
            cluster.start()
            try:
                yield cluster
            finally:
                cluster.kill()


class Pulsar(PulsarClusters):
    """One process, which all tests share: a test makes its topics unique."""

    label = "Pulsar"
    shared = True

    def start(self) -> None:
        super().start()
        self._claim, addresses = keeper.join(self.folder)
        self.url, self.admin_url = addresses["url"], addresses["admin_url"]

    def stop(self) -> None:
        self._claim.close()


class JavaClient(Server):
    """Pulsar's official client for Java, in a virtual machine that runs the commands of tests/java/ReadBack.java."""

    label = "Pulsar's client for Java"
    program = Path(__file__).parent / "java" / "ReadBack.java"

    def start(self) -> None:
        _program("javac")  # which java itself has inside, if it comes with a JDK
        if not jars.folder().is_dir():
            raise Missing(jars.obstacle() or "it was not fetched: make servers")
        self.folder.mkdir()
        self.version = jars.VERSION
        # It lives for seconds: what makes a virtual machine fast later only makes it slow now.
        options = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", "-Dslf4j.internal.verbosity=ERROR")
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [_program("java"), *options, "-cp", jars.classpath(), self.program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="ascii",
                start_new_session=True,
            )
        self.run("partitions", 1, keys=[])

    def stop(self) -> None:
        _end(self._process, signal.SIGKILL)
        self._process.communicate()

    def run(self, *words: str | int, keys: Sequence[str] | None = None) -> list[Any]:
        """The answer to one command, line by line, decoded. Blocks."""
        said, heard = self._process.stdin, self._process.stdout
        assert said is not None
        assert heard is not None
        lines = ["\t".join(map(str, words))]
        if keys is not None:
            lines += [*(b64encode(key.encode()).decode() for key in keys), "."]
        writing = threading.Thread(target=self._say, args=(said, lines))  # it answers before it has heard all
        writing.start()
        answer: list[Any] = []
        while (line := heard.readline()) != "\n":
            if not line:
                raise RuntimeError(f"{self.label} has ended:\n{(self.folder / 'log').read_text()}")
            answer.append(json.loads(line))
        writing.join()
        if answer and isinstance(answer[-1], dict) and "error" in answer[-1]:
            raise RuntimeError(f"{answer[-1]['error']}\n{(self.folder / 'log').read_text()}")
        return answer

    @staticmethod
    def _say(said: IO[str], lines: Sequence[str]) -> None:
        with contextlib.suppress(BrokenPipeError):  # whoever reads the answer sees that it has ended
            said.write("\n".join(lines) + "\n")
            said.flush()


KINDS: dict[str, type[Server]] = {
    "embedded": Embedded,
    "system": System,
    "oldest": Oldest,
    "logical": Logical,
    "logical-oldest": LogicalOldest,
    "pgbouncer": PgBouncer,
    "mariadb": MariaDB,
    "sqlite": SQLite,
    "redis": Redis,
    "prometheus": Prometheus,
    "pulsar": Pulsar,
    "pulsar-cluster": PulsarClusters,
    "java": JavaClient,
}


def _release(number: int, *, fsync: bool) -> type[Server]:
    return type("Release", (Oldest,), {"label": "PostgreSQL", "binaries": f"postgresql-{number}", "fsync": fsync})


CELLS: dict[str, dict[str, type[Server]]] = {
    **{
        f"pg{number}": {"embedded": _release(number, fsync=True), "system": _release(number, fsync=False)}
        for number in (14, 15, 16, 17, 18)
    },
    "mysql8": {"mariadb": MySQL},
    "pgbouncer": {"embedded": PgBouncer},
}
"""What `make test-matrix` puts in the place of which kind. Most tests then run on the first of these only."""

CELL = os.environ.get("MATRIX_CELL")
if CELL is not None:
    KINDS |= CELLS[CELL]
    DATABASES = (next(iter(CELLS[CELL])),)
QUEUES = tuple(kind for kind in ("mariadb", "sqlite") if kind in DATABASES) or ("sqlite",)
"""Those where the outbox is a queue."""


_TEMPLATE = "migrated"


def _migrate(url: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        migrate(connection)
    engine.dispose()


class Servers:
    """The servers of this pytest process; ``shared`` is a folder that others of the same run have, too."""

    def __init__(self, shared: Path | None = None) -> None:
        # Not pytest's own temporary folder: that is closed to the users that root's servers run as.
        self.folder = Path(tempfile.mkdtemp(prefix="pillarbox-tests-"))
        self.folder.chmod(0o711)
        self._shared = shared or self.folder / "shared"
        self._asked: dict[str, Server | Exception] = {}
        self._names = (f"t{number}" for number in count(1))
        self._exits = contextlib.ExitStack()
        self._exits.callback(shutil.rmtree, self.folder)

    def get(self, kind: str) -> Server:
        """The running server of that kind; raises `Missing`."""
        if kind not in self._asked:
            place = self._shared if KINDS[kind].shared else self.folder
            self._asked[kind] = self._start(KINDS[kind](place / kind))
        found = self._asked[kind]
        if isinstance(found, Exception):
            raise found
        return found

    def _start(self, server: Server) -> Server | Exception:
        try:
            server.start()
        except Exception as error:  # kept: the next test that asks shall not wait for it again
            return error
        self._exits.callback(server.stop)
        return server

    def create_database(self, kind: str, *, empty: bool = True, shards: int = SHARDS) -> Database:
        """A new database: empty, or as a migration with so many shards leaves it, where that is quicker."""
        server = self.get(kind)
        assert isinstance(server, DatabaseServer)
        database = Database(kind, next(self._names), server)
        if empty:
            server.create(database.name)
        else:
            server.copy(database.name, shards)
        return database

    def stop(self) -> None:
        self._exits.close()


def installable(kind: str) -> bool:
    """Whether `make setup` and `make servers` bring this server here."""
    if kind in ("oldest", "logical-oldest"):
        return binaries.obstacle() is None
    if kind in ("pulsar", "pulsar-cluster") and maven.obstacle() is None and shutil.which("java") is not None:
        return True
    if kind == "java":
        return jars.obstacle() is None
    return kind in ("embedded", "logical", "sqlite") or (os.geteuid() == 0 and shutil.which("apt-get") is not None)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    """Return as soon as the condition holds; fail with `what` if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s in vain: {what}")
        time.sleep(0.01)


def _wait_for_answer(
    process: subprocess.Popen[bytes], ask: Callable[[], None], refusal: type[Exception], log: Path
) -> None:
    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}:\n{log.read_text()}")
        try:
            ask()
        except refusal:
            return False
        return True

    try:
        wait_until(answers, f"{process.args!r} to answer")
    except BaseException:
        _end(process, signal.SIGKILL)
        raise


def _program(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")
    if path is None:
        raise Missing(f"{name} is not installed")
    return path


def _installed(name: str, copy: Path, account: pwd.struct_passwd | None) -> Path:
    """The folder of programs from the cache; for another user a copy, as he may not look into root's."""
    place = binaries.folder(name)
    if not place.is_dir():
        raise Missing(binaries.obstacle() or f"{name} was not fetched: make servers")
    if account is None:
        return place
    shutil.copytree(place, copy, symlinks=True)
    return copy


def _account(name: str) -> pwd.struct_passwd | None:
    """The user that runs a server for root; anybody else runs it himself."""
    return pwd.getpwnam(name) if os.geteuid() == 0 else None


def _make_folder(path: Path, account: pwd.struct_passwd | None) -> None:
    path.parent.mkdir(exist_ok=True)
    path.mkdir(mode=0o700)
    if account is not None:
        os.chown(path, account.pw_uid, account.pw_gid)


def _run(command: Sequence[str | Path], account: pwd.struct_passwd | None) -> None:
    done = subprocess.run(
        command,
        user=account and account.pw_uid,
        group=account and account.pw_gid,
        extra_groups=account and [],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command!r} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def _spawn(command: Sequence[str | Path], account: pwd.struct_passwd | None, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            user=account and account.pw_uid,
            group=account and account.pw_gid,
            extra_groups=account and [],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for pytest, which then stops us
        )


def _end(process: subprocess.Popen[Any], how: signal.Signals) -> None:
    """Nobody needs the data any more, so the quickest way is good enough."""
    process.send_signal(how)
    process.wait(30)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _numbers(version: str) -> str:
    found = re.match(r"[\d.]+", version)
    return found.group() if found else version
