"""``pillarbox demo``: its parts, and the whole of it as people run it."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, inspect, text

from pillarbox import Pillarbox
from pillarbox.cli.demo.child import Child
from pillarbox.cli.demo.ledger import Balance, Entry, Fault, Kind, compare
from pillarbox.cli.demo.sink import POISONED, Arrival, Arrivals
from pillarbox.cli.demo.transport import SinkTransport
from pillarbox.cli.output import Exit
from pillarbox.testing.conformance.publisher import Feature, PublisherContract, World, message
from pillarbox.transport import Message
from tests import commands
from tests.conftest import EACH_DATABASE, FreshDatabase
from tests.servers import Database, Server, wait_until

PILLARBOX = str(Path(sys.executable).with_name("pillarbox"))
TIMEOUT = 0.5  # of the transport: a frozen sink is given up so quickly

# -- the sink and the way to it ----------------------------------------------------------------------------------------


class SinkWorld(World):
    lacks = {Feature.EXACT_READS: "the sink's file has no bodies"}  # noqa: RUF012  never changed

    def __init__(self, folder: Path) -> None:
        self._told: dict[str, Any] = {"file": str(folder / "sink.jsonl"), "port": 0, "rejects": True}
        self._log = folder / "log"
        self._topics = 0

    async def start(self) -> None:
        self.sink = await Child.start("sink", self._log, **self._told)
        self._told["port"] = await self.sink.answer()

    async def open(self) -> None:
        await self.start()
        self.publisher = SinkTransport(self._told["port"], "the test", timeout=TIMEOUT)

    async def new_topic(self) -> str:
        self._topics += 1
        return f"topic-{self._topics}"

    async def read(self, topic: str) -> Sequence[Message]:
        found = Arrivals(Path(self._told["file"])).more()
        return [Message(it.topic, it.key, b"", {"event_id": it.event_id}) for it in found if it.topic == topic]

    async def go_away(self) -> None:
        await self.sink.kill()

    async def come_back(self) -> None:
        await self.start()

    async def unwelcome(self, topic: str, key: str, number: int) -> Message:
        return message(topic, key, number, headers={"event_type": POISONED})

    async def lose_answer(self) -> None:
        self.sink.freeze()
        asyncio.get_running_loop().call_later(2 * TIMEOUT, self.sink.thaw)


class TestSinkTransport(PublisherContract):
    @pytest.fixture
    async def world(self, tmp_path: Path) -> AsyncIterator[SinkWorld]:
        world = SinkWorld(tmp_path)
        await world.open()
        yield world
        await world.publisher.close()
        await world.sink.kill()


async def test_a_sink_that_is_mended_takes_what_it_rejected(tmp_path: Path) -> None:
    world = SinkWorld(tmp_path)
    await world.open()
    poisoned = await world.unwelcome("topic", "k", 1)
    assert (await world.publisher.send("p", [poisoned])).rejected
    world.sink.tell(rejects=False)
    while not (await world.publisher.send("p", [poisoned])).accepted:
        await world.publisher.open("p", ["topic"])
    await world.publisher.close()
    await world.sink.kill()


async def test_a_sink_that_was_killed_within_a_line_takes_the_line_back(tmp_path: Path) -> None:
    file = tmp_path / "sink.jsonl"
    whole = Arrival("e1", "topic", None, "k", "1", "a1", "1/1", 1.0)
    file.write_bytes(json.dumps({name: getattr(whole, name) for name in whole.__struct_fields__}).encode() + b'\n{"ev')
    sink = await Child.start("sink", tmp_path / "log", file=str(file), port=0)
    await sink.answer()
    await sink.stop()
    assert Arrivals(file).more() == [whole]
    assert file.read_bytes().endswith(b"}\n")


def test_the_file_is_read_while_it_grows(tmp_path: Path) -> None:
    file = tmp_path / "sink.jsonl"
    arrivals = Arrivals(file)
    assert arrivals.more() == []
    line = (
        json.dumps(
            {
                "event_id": "e1",
                "topic": "t",
                "tenant": None,
                "key": "k",
                "version": None,
                "relay": "a",
                "connection": "1",
                "at": 1.5,
            }
        )
        + "\n"
    )
    file.write_text(line + line[:20])
    assert [it.at for it in arrivals.more()] == [1.5]
    assert arrivals.more() == []
    file.write_text(line + line)
    assert [it.event_id for it in arrivals.more()] == ["e1"]


# -- the ledger --------------------------------------------------------------------------------------------------------

COMMITTED = {"e1": Entry("acme", "k", 1), "e2": Entry("acme", "k", 2), "e3": Entry("acme", "other", 1)}


def arrival(event_id: str, at: float = 0.0, relay: str = "a1", key: str | None = None) -> Arrival:
    entry = COMMITTED.get(event_id, Entry("acme", "k", 0))
    return Arrival(event_id, "topic", entry.tenant, key or entry.key, str(entry.version), relay, "1/1", at)


def balance(*arrived: Arrival, faults: Sequence[Fault] = ()) -> Balance:
    return compare(COMMITTED, arrived, faults)


class TestLedger:
    def test_balances(self) -> None:
        assert balance(arrival("e3"), arrival("e1"), arrival("e2")) == Balance(3, 3, 0, 0, 0, 0, 0)
        assert balance(arrival("e3"), arrival("e1"), arrival("e2")).holds

    @pytest.mark.parametrize(
        ("arrived", "figure"),
        [
            ([arrival("e1"), arrival("e3")], "lost"),
            ([arrival("e1"), arrival("e2"), arrival("e3"), arrival("e4")], "ghosts"),
            ([arrival("e1"), arrival("e2"), arrival("e3"), arrival("e3", key="k")], "ghosts"),
            ([arrival("e2"), arrival("e1"), arrival("e3")], "out_of_order"),
            ([arrival("e1"), arrival("e2"), arrival("e3"), arrival("e1")], "duplicates"),
        ],
    )
    def test_finds_what_is_wrong(self, arrived: list[Arrival], figure: str) -> None:
        found = balance(*arrived)
        wrong = {name for name in ("lost", "ghosts", "duplicates", "out_of_order") if getattr(found, name)}
        assert wrong == {figure}
        assert not found.holds

    def test_order_counts_at_first_occurrence(self) -> None:
        killed = Fault(Kind.KILL, "a1", 10.0, 10.0)
        first = [arrival("e1", 9.0), arrival("e2", 9.5), arrival("e3", 9.5)]
        found = balance(*first, arrival("e1", 12.0, "b2"), arrival("e2", 12.0, "b2"), faults=[killed])
        assert (found.out_of_order, found.duplicates, found.duplicates_tied) == (0, 2, 2)
        assert found.holds

    @pytest.mark.parametrize(
        ("fault", "tied"),
        [
            (Fault(Kind.KILL, "a1", 10.1, 10.1), True),
            (Fault(Kind.KILL, "b2", 10.1, 10.1), False),  # it did not send the first copy
            (Fault(Kind.KILL, "a1", 20.0, 20.0), False),  # long after it
            (Fault(Kind.FREEZE, "a1", 10.1, 14.0), True),
            (Fault(Kind.FREEZE, "b2", 5.0, 11.0), True),  # it slept, and woke up to send it again
            (Fault(Kind.FREEZE, "c3", 10.1, 14.0), False),
            (Fault(Kind.STOP_SINK, "sink", 10.1, 12.0), True),
            (Fault(Kind.STOP_SINK, "sink", 1.0, 2.0), False),
            (Fault(Kind.STOP_SINK, "sink", 15.0, 16.0), False),  # after both
            (Fault(Kind.POISON, "e1", 10.1, 12.0), False),
        ],
    )
    def test_a_duplicate_is_tied_to_a_fault_that_explains_it(self, fault: Fault, tied: bool) -> None:
        first = [arrival("e1", 10.0, "a1"), arrival("e2", 10.0), arrival("e3", 10.0)]
        found = balance(*first, arrival("e1", 13.0, "b2"), faults=[fault])
        assert found.duplicates == 1
        assert (found.duplicates_tied == 1) is found.holds is tied


# -- all of it ---------------------------------------------------------------------------------------------------------

KEYS = {
    *("committed", "delivered", "lost", "ghosts", "duplicates", "duplicates_tied", "out_of_order", "faults"),
    *("rolled_back", "seconds", "events_per_second", "lag_ms", "balanced"),
}


class Demo:
    """Runs ``pillarbox demo`` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PILLARBOX_", "PYTHON"))}
        self._environment = kept | {"PILLARBOX_HOME": os.environ["PILLARBOX_HOME"], "TMPDIR": str(folder)}
        self._started: list[subprocess.Popen[str]] = []

    def use(self, database: Database) -> None:
        self._environment["PILLARBOX_DATABASE_URL"] = database.url()

    def start(self, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [PILLARBOX, "demo", *arguments],
            env=self._environment,
            cwd=self._folder,
            encoding="utf-8",
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | streams,
        )
        self._started.append(process)
        return process

    def __call__(self, *arguments: str, code: int = Exit.FINE) -> tuple[str, str]:
        """Run it to its end: what it printed, and what it complained about."""
        process = self.start(*arguments)
        printed, complaint = process.communicate(timeout=120)
        assert process.returncode == code, printed + complaint
        self.check_nothing_is_left()
        return printed, complaint

    def refused(self, *arguments: str) -> str:
        """What it complains about, and does nothing else."""
        done = commands.run(["demo", *arguments], self._environment, self._folder)
        assert (done.returncode, done.stdout) == (Exit.USAGE, "")
        self.check_nothing_is_left()
        return done.stderr

    def check_nothing_is_left(self) -> None:
        assert list(self._folder.iterdir()) == []

    def end(self) -> None:
        for process in self._started:
            with process:
                process.kill()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path)
    yield demo
    demo.end()


@pytest.fixture(params=EACH_DATABASE)
def migrated(request: pytest.FixtureRequest, fresh_database: FreshDatabase, demo: Demo) -> Database:
    database = fresh_database(request.param)
    asyncio.run(_migrate(database.url()))
    demo.use(database)
    return database


@pytest.fixture
def embedded(use_server: Callable[[str], Server]) -> None:
    """Commands without a database_url use the embedded PostgreSQL of this test run."""
    use_server("embedded")


on_postgres = pytest.mark.parametrize("migrated", ["embedded"], indirect=True)


async def _migrate(url: str) -> None:
    async with Pillarbox(url) as box:
        await box.migrate()


def execute(database: Database, statement: str) -> list[Any]:
    engine = create_engine(database.url(database.server.drivers[-1]))
    with engine.begin() as connection:
        done = connection.execute(text(statement))
        rows = list(done) if done.returns_rows else []
    engine.dispose()
    return rows


def tables(database: Database) -> set[str]:
    engine = create_engine(database.url(database.server.drivers[-1]))
    with engine.connect() as connection:
        found = set(inspect(connection).get_table_names())
    engine.dispose()
    return found


def processes() -> dict[int, tuple[int, str]]:
    """The parent and the state of every process on this machine."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="],  # noqa: S607  wherever it is
        capture_output=True,
        text=True,
        check=True,
    )
    lines = map(str.split, listed.stdout.splitlines())
    return {int(pid): (int(parent), state) for pid, parent, state in lines}


def children(process: subprocess.Popen[str]) -> list[int]:
    """The relays and the sink."""
    return [pid for pid, (parent, _) in processes().items() if parent == process.pid]


def running(pids: Sequence[int]) -> list[int]:
    alive = {pid for pid, (_, state) in processes().items() if not state.startswith("Z")}
    return [pid for pid in pids if pid in alive]


def has_written(database: Database) -> bool:
    return execute(database, "SELECT count(*) FROM pillarbox_outbox") != [(0,)]


def assert_nothing_is_left(database: Database) -> None:
    assert not {table for table in tables(database) if "demo" in table}
    for table in ("outbox", "routes", "lanes", "relays", "requests", "audit"):
        assert execute(database, f"SELECT count(*) FROM pillarbox_{table}") == [(0,)], table


class TestDemo:
    def test_balances_through_every_fault(self, demo: Demo, migrated: Database) -> None:
        printed, complaint = demo("--seconds", "5", "--json")
        report = json.loads(printed)
        assert report.keys() == KEYS
        assert report["balanced"]
        assert report["committed"] == report["delivered"] > 0
        assert report["lost"] == report["ghosts"] == report["out_of_order"] == 0
        assert report["duplicates"] == report["duplicates_tied"]
        assert report["rolled_back"] > 0
        assert {fault["kind"] for fault in report["faults"]} == {"poison", "kill", "freeze", "stop_sink"}
        assert complaint == ""
        assert_nothing_is_left(migrated)

    @pytest.mark.full
    @on_postgres
    @pytest.mark.usefixtures("pulsar")
    def test_on_pulsar_no_duplicate_is_forgiven(self, demo: Demo, migrated: Database) -> None:
        printed, complaint = demo("--broker", "pulsar", "--seconds", "5", "--json")
        report = json.loads(printed)
        assert report["balanced"]
        assert report["committed"] == report["delivered"] > 0
        assert report["duplicates"] == 0
        assert {fault["kind"] for fault in report["faults"]} == {"kill", "freeze", "stop_sink"}
        assert complaint == ""
        assert_nothing_is_left(migrated)

    @on_postgres
    @pytest.mark.usefixtures("migrated")
    def test_pulsar_cannot_be_poisoned(self, demo: Demo) -> None:
        assert "--poison goes with --broker sink" in demo.refused("--broker", "pulsar", "--poison")

    @pytest.mark.usefixtures("embedded")
    def test_without_a_database_in_one_of_its_own_line_by_line(self, demo: Demo) -> None:
        printed, complaint = demo("--seconds", "2.5", "--no-faults")
        lines = printed.splitlines()
        assert re.match(r" +1\.\d s  committed [\d,]+ \(\d+/s\)  delivered", lines[0])
        assert "\x1b" not in printed
        assert re.search(r"^lost +0$", printed, re.MULTILINE)
        assert re.search(r"^balanced +yes$", printed, re.MULTILINE)
        assert complaint == ""

    @pytest.mark.full
    @on_postgres
    def test_flags_choose_the_faults(self, demo: Demo, migrated: Database) -> None:
        printed, _ = demo("--seconds", "3", "--kill", "--poison")
        assert re.search(r"^ *\d+\.\d s  relay [ab] was killed", printed, re.MULTILINE)
        assert re.search(r"^ *\d+\.\d s  an event was poisoned", printed, re.MULTILINE)
        assert "frozen" not in printed
        assert "the sink was stopped" not in printed
        assert_nothing_is_left(migrated)

    @on_postgres
    @pytest.mark.usefixtures("migrated")
    def test_faults_and_none_do_not_go_together(self, demo: Demo) -> None:
        assert "--no-faults" in demo.refused("--no-faults", "--kill")

    @on_postgres
    def test_says_so_if_it_does_not_balance(self, demo: Demo, migrated: Database) -> None:
        execute(
            migrated,
            """
            CREATE FUNCTION cheat() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN DELETE FROM pillarbox_outbox WHERE id = NEW.id AND id % 10 = 0; RETURN NULL; END $$;
            CREATE TRIGGER cheat AFTER INSERT ON pillarbox_outbox FOR EACH ROW EXECUTE FUNCTION cheat()
            """,
        )
        printed, complaint = demo("--seconds", "2", "--no-faults", "--json", code=Exit.PROBLEM)
        report = json.loads(printed)
        assert report["lost"] > 0
        assert not report["balanced"]
        assert complaint == "error: ledger and sink do not agree: please report it, with the figures\n"

    @pytest.mark.parametrize(
        ("migrated", "number", "code"),
        [("embedded", signal.SIGINT, Exit.INTERRUPTED), ("mariadb", signal.SIGTERM, Exit.TERMINATED)],
        indirect=["migrated"],
    )
    def test_cleans_up_when_interrupted(
        self, demo: Demo, migrated: Database, number: signal.Signals, code: int
    ) -> None:
        process = demo.start("--seconds", "60", "--json")
        wait_until(lambda: has_written(migrated), "the demo to write")
        others = children(process)
        process.send_signal(number)
        printed, complaint = process.communicate(timeout=60)
        assert (process.returncode, printed) == (code, "")
        assert "Traceback" not in complaint
        assert len(others) == 3
        assert running(others) == []
        assert_nothing_is_left(migrated)
        demo.check_nothing_is_left()

    @on_postgres
    @pytest.mark.parametrize("frozen", [False, True])
    def test_a_killed_demo_leaves_no_process_behind(self, demo: Demo, migrated: Database, frozen: bool) -> None:
        process = demo.start("--seconds", "60")
        wait_until(lambda: has_written(migrated), "the demo to write")
        others = children(process)
        if frozen:
            for pid in others:
                os.kill(pid, signal.SIGSTOP)
        process.kill()
        wait_until(lambda: running(others) == [], "its processes to end")

    @on_postgres
    def test_a_relay_that_dies_by_itself_ends_the_demo(self, demo: Demo, migrated: Database) -> None:
        process = demo.start("--seconds", "60")
        wait_until(lambda: has_written(migrated), "the demo to write")
        os.kill(max(children(process)), signal.SIGKILL)
        _, complaint = process.communicate(timeout=60)
        assert process.returncode == Exit.PROBLEM
        assert "error: a process of the demo ended" in complaint
        assert_nothing_is_left(migrated)


class Terminal:
    """A terminal that the demo runs on."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, (30, 100))
        self.seen = ""

    def read_until(self, pattern: str) -> None:
        """Wait until something like that is on the screen."""
        deadline = time.monotonic() + 60
        while not re.search(pattern, self.seen):
            waiting = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert waiting[0], f"{pattern!r} was never shown: {self.seen[-3000:]}"
            self.seen += os.read(self._ours, 65_536).decode("utf-8", "replace")

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


@on_postgres
class TestOnATerminal:
    def test_draws_and_obeys(self, demo: Demo, migrated: Database, terminal: Terminal) -> None:
        before = termios.tcgetattr(terminal.theirs)
        process = demo.start("--seconds", "60", "--no-faults", stdin=terminal.theirs, stdout=terminal.theirs)
        terminal.read_until(r"q finish")
        terminal.read_until(r"delivered.*[▂-█].* \d+/s")
        for key, effect in (("k", r"relay [ab] was killed"), ("s", "the sink was stopped"), ("p", "poisoned")):
            terminal.press(key)
            terminal.read_until(effect)
        terminal.press("q")
        terminal.read_until("the ledger balances")
        assert process.wait(60) == 0
        assert termios.tcgetattr(terminal.theirs) == before
        assert_nothing_is_left(migrated)

    @pytest.mark.usefixtures("migrated")
    def test_with_json_the_picture_is_on_standard_error(self, demo: Demo, terminal: Terminal) -> None:
        process = demo.start("--seconds", "1.5", "--no-faults", "--json", stderr=terminal.theirs)
        terminal.read_until("the ledger balances")
        printed, _ = process.communicate(timeout=60)
        assert json.loads(printed).keys() == KEYS
