"""Fixtures for real servers, and the report about which of them were tested."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import hypothesis
import pytest
import uvloop
from sqlalchemy import Dialect, Engine, event

from pillarbox.outbox import SHARDS
from pillarbox.testing.pulsar import PulsarCluster
from tests.servers import (
    CELL,
    DATABASES,
    KINDS,
    Database,
    Missing,
    PgBouncer,
    Prometheus,
    Pulsar,
    PulsarClusters,
    Redis,
    Server,
    Servers,
    installable,
)


class FreshDatabase(Protocol):
    def __call__(self, kind: str, *, empty: bool = False, shards: int = SHARDS) -> Database: ...


EACH_DATABASE = [DATABASES[0], *(pytest.param(kind, marks=pytest.mark.elsewhere) for kind in DATABASES[1:])]
"""Parameters of a fixture: `make test` takes the first only, unless the test is marked `dialects`."""

USED, MISSING = "server used", "server missing"  # what a test's report says about servers


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell lets its background jobs ignore SIGINT, and whatever they start inherits that: our commands, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=CELL == "pgbouncer")
def as_poolers_want_it() -> Iterator[None]:
    """Tests that know nothing of a pooler connect as one should through it."""

    def amend(dialect: Dialect, _record: object, _positional: object, settings: dict[str, Any]) -> None:
        settings.update(PgBouncer.settings.get(dialect.driver, {}))

    event.listen(Engine, "do_connect", amend)
    yield
    event.remove(Engine, "do_connect", amend)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers of this process, each started when it is first asked for."""
    # The folder of an xdist worker is in that of its run.
    folder = tmp_path_factory.getbasetemp()
    servers = Servers(shared=folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILLARBOX_HOME", str(servers.folder / "home"))
        yield servers
        servers.stop()


@pytest.fixture(scope="session", autouse=True)
def pillarbox_home(servers: Servers) -> Path:
    """No test, and no command that a test runs, touches the developer's own embedded server."""
    return servers.folder / "home"


@pytest.fixture
def use_server(servers: Servers, request: pytest.FixtureRequest) -> Callable[[str], Server]:
    """Ask for a server by its kind; skips the test if it is missing. The report learns of it either way."""

    def use(kind: str) -> Server:
        try:
            server = servers.get(kind)
        except Missing as missing:
            request.node.user_properties.append((MISSING, [kind, str(missing)]))
            pytest.skip(f"{KINDS[kind].label}: {missing}")
        request.node.user_properties.append((USED, [kind, server.version]))
        return server

    return use


@pytest.fixture
def fresh_database(servers: Servers, use_server: Callable[[str], Server]) -> Iterator[FreshDatabase]:
    """Make a new database: `fresh_database("mariadb")`. All are dropped at the end of the test.

    Whoever works in it migrates it, which may have been done, with so many shards: with ``empty=True`` it was not.
    """
    made: list[Database] = []

    def fresh(kind: str, *, empty: bool = False, shards: int = SHARDS) -> Database:
        use_server(kind)
        made.append(servers.create_database(kind, empty=empty, shards=shards))
        return made[-1]

    yield fresh
    for database in made:
        database.server.drop(database.name)


@pytest.fixture(params=EACH_DATABASE)
def database(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> Database:
    """A database of one's own; the test runs once for each kind, by `make test` only if it is marked `dialects`."""
    return fresh_database(request.param)


@pytest.fixture(params=EACH_DATABASE)
def empty_database(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> Database:
    """The same, for tests that make its tables themselves."""
    return fresh_database(request.param, empty=True)


@pytest.fixture
def postgres_database(fresh_database: FreshDatabase) -> Database:
    return fresh_database("embedded")


@pytest.fixture
def mariadb_database(fresh_database: FreshDatabase) -> Database:
    return fresh_database("mariadb")


@pytest.fixture
def sqlite_database(fresh_database: FreshDatabase) -> Database:
    return fresh_database("sqlite")


@pytest.fixture
def prometheus(use_server: Callable[[str], Server]) -> Prometheus:
    server = use_server("prometheus")
    assert isinstance(server, Prometheus)
    return server


@pytest.fixture
def redis_url(use_server: Callable[[str], Server]) -> str:
    """The address of an empty Redis."""
    server = use_server("redis")
    assert isinstance(server, Redis)
    server.empty()
    return server.url


@pytest.fixture
def pulsar(use_server: Callable[[str], Server]) -> Pulsar:
    """The Pulsar of this run. Other tests use it at the same time: give your topics names of their own."""
    server = use_server("pulsar")
    assert isinstance(server, Pulsar)
    return server


@pytest.fixture
def pulsar_cluster(use_server: Callable[[str], Server]) -> PulsarCluster:
    """A Pulsar cluster to be broken, and to be whole again at the end: the next test that wants one goes on with it."""
    clusters = use_server("pulsar-cluster")
    assert isinstance(clusters, PulsarClusters)
    return clusters.whole()


def _breaks_a_cluster(item: pytest.Item | None) -> bool:
    return "pulsar_cluster" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A cluster is three Javas: they go when the next test has no use for them."""
    if _breaks_a_cluster(item) and not _breaks_a_cluster(nextitem) and PulsarClusters.running is not None:
        PulsarClusters.running.stop()


class ServerReport:
    """Says at the end which servers were tested. All it knows came with the tests' reports: xdist makes no difference.

    With `CI=true`, a server that can be had here and that a test missed, or that a whole run never used, fails the run.
    """

    def __init__(self, config: pytest.Config) -> None:
        narrowed = (
            config.option.keyword or config.option.markexpr or config.option.collectonly or config.getoption("alone")
        )
        self.whole_run = config.args_source is not pytest.Config.ArgsSource.ARGS and not narrowed
        self.strict = os.environ.get("CI") == "true"
        self.tests: dict[str, set[str]] = {kind: set() for kind in KINDS}
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == USED:
                kind, self.versions[kind] = cast(list[str], value)
                self.tests[kind].add(report.nodeid)
            elif name == MISSING:
                kind, self.missing[kind] = cast(list[str], value)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and any(map(self.fails, KINDS)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("servers")
        for kind in KINDS:
            colour = {"red": self.fails(kind), "yellow": kind in self.missing and not self.fails(kind)}
            terminalreporter.write_line(self.line(kind), **colour)

    def line(self, kind: str) -> str:
        label, used = KINDS[kind].label, len(self.tests[kind])
        if used and kind not in self.missing:
            return f"{label} {self.versions[kind]} tested ({used} test{'s' if used > 1 else ''})"
        reason = self.missing.get(kind, "no test of this run asked for it")
        return f"{label} NOT TESTED: {reason}{', which fails this run as CI=true' if self.fails(kind) else ''}"

    def fails(self, kind: str) -> bool:
        missed = kind in self.missing or (self.whole_run and not self.tests[kind])
        return self.strict and missed and installable(kind)


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", action="store_true", help="only the tests that want the machine for themselves")
    parser.addoption("--full", action="store_true", help="also the tests that `make test` leaves to `make test-all`")
    parser.addoption("--loop", choices=LOOPS, default="asyncio", help="the event loop of async tests")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of ``--loop``; tests marked with `every_loop` run on each."""
    if item.get_closest_marker("every_loop") is not None:
        return LOOPS
    chosen = config.getoption("loop")
    return {chosen: LOOPS[chosen]}


def _is_left_to_test_all(item: pytest.Item) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    return "full" in marks or ("elsewhere" in marks and "dialects" not in marks)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose what runs: a test that is named by its id always does.

    Programs that go by the clock want the machine for themselves, and come with `--alone`.
    """
    alone, full = config.getoption("alone"), config.getoption("full")
    if not alone and any("::" in argument for argument in config.args):
        return
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        is_alone = item.get_closest_marker("alone") is not None
        chosen = is_alone if alone else not is_alone and (full or not _is_left_to_test_all(item))
        (kept if chosen else others).append(item)
    config.hook.pytest_deselected(items=others)
    # First those that break a cluster: one after the other they share it, and the long ones are not left for the end.
    items[:] = sorted(kept, key=_breaks_a_cluster, reverse=True)


def pytest_collection_finish() -> None:
    """Thousands of collected tests stay to the end: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


MEMORY = "/dev/shm"  # noqa: S108  by names that nobody else has
MEMORY_WANTED = 8 * 2**30


def _has_room_in_memory() -> bool:
    """Whether all that the tests write can be kept in memory, programs of servers among it."""
    try:
        place, known = os.statvfs(MEMORY), Path("/proc/meminfo").read_text("ascii")
    except OSError:
        return False
    available = 1024 * int(known.partition("MemAvailable:")[2].split()[0])
    return not place.f_flag & os.ST_NOEXEC and min(available, place.f_bavail * place.f_frsize) >= MEMORY_WANTED


def pytest_configure(config: pytest.Config) -> None:
    # Most of the time of a small test is a disk that is waited for, to make a database and to drop it. No test cuts the
    # power, so nothing is shown by waiting. Workers and commands inherit it.
    if "TMPDIR" not in os.environ and _has_room_in_memory():
        os.environ["TMPDIR"] = tempfile.tempdir = MEMORY
    # How long a drawn example takes says more about the machine than about what is tested.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")
    for marker in (
        "alone: a test that wants the machine for itself",
        "full: a test that `make test` leaves to `make test-all`",
        "elsewhere: on this database `make test` runs the test only if it is marked `dialects`",
        "dialects: a test of SQL that differs from database to database: `make test` runs it on every kind",
        "every_loop: an async test that runs on asyncio's own loop and on uvloop",
    ):
        config.addinivalue_line("markers", marker)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ServerReport(config), "server-report")
