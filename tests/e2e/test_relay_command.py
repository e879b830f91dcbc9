"""``pillarbox relay`` as it is run: real processes, which are told to stop, killed and frozen."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import IntegrationEvent, Pillarbox, Route
from pillarbox.cli import run, serving
from pillarbox.cli.output import Exit
from pillarbox.cli.serving import answering, no_metrics, observe, parse_address
from pillarbox.prometheus import PrometheusSignals
from pillarbox.relay import Pacing, Relay
from pillarbox.settings import Settings
from pillarbox.transport import Outcome, Verdict
from pillarbox.transports.logging import LoggingTransport
from tests import commands
from tests.conftest import FreshDatabase
from tests.memory.store import MemoryStore
from tests.relays import Line, World, running, soon
from tests.servers import Database, wait_until

PILLARBOX = str(Path(sys.executable).with_name("pillarbox"))
LEASE = 1.0

SHOP = '''
"""A service with a broker of its own: a file. What is being sent waits there while a file called "hold" exists."""

import asyncio
import json
import os
import time
from pathlib import Path

from pillarbox import Pillarbox
from pillarbox.transport import Capabilities, Outcome


class FileTransport:
    capabilities = Capabilities(max_messages=1)

    def preflight(self, message):
        return None

    async def open(self, producer, topics):
        return {}

    async def send(self, producer, messages):
        for message in messages:
            self.note("sending", message)
            while Path("hold").exists():
                await asyncio.sleep(0.005)
            self.note("sent", message)
        return Outcome(range(len(messages)))

    def note(self, what, message):
        line = json.dumps([what, message.key, json.loads(message.body)["number"], os.getpid(), time.time()])
        with open("broker", "a") as file:
            file.write(line + "\\n")

    async def close(self, producer=None):
        pass


box = Pillarbox(os.environ["SHOP_DATABASE"], transports={"broker": FileTransport()})
nothing = 1
'''


class Counted(IntegrationEvent, name="tests.relay.counted"):
    number: int


class Note(NamedTuple):
    """A line in the broker's file."""

    what: str
    key: str
    number: int
    process: int
    at: float


class Town:
    """A folder with a shop in it, its database, and the relays that were started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self._numbers = 0
        self._started: list[subprocess.Popen[str]] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PILLARBOX_")}
        self.environment = kept | {
            "PILLARBOX_HOME": os.environ["PILLARBOX_HOME"],
            "PILLARBOX_RELAY__LEASE": str(LEASE),
        }
        (folder / "shop.py").write_text(SHOP)

    def use(self, database: Database) -> None:
        self.url = database.url()
        self.environment |= {"SHOP_DATABASE": self.url, "PILLARBOX_DATABASE_URL": self.url}
        asyncio.run(self._publish([]))

    def publish(self, *keys: str) -> None:
        """Commit one event for each of these keys, with rising numbers."""
        asyncio.run(self._publish(keys))

    def publish_for(self, *tenants: str) -> None:
        """Commit one event for each of these tenants, on a route that is sharded by tenant."""
        asyncio.run(self._publish(tenants, by_tenant=True))

    async def _publish(self, keys: Any, *, by_tenant: bool = False) -> None:
        engine = create_async_engine(self.url)
        shard_by: Literal["key", "tenant"] = "tenant" if by_tenant else "key"
        name = "counted-by-tenant" if by_tenant else "counted"
        route = Route("tests.relay.*", to="broker", topic="counted", name=name, shard_by=shard_by)
        async with Pillarbox(engine, transports={"broker": LoggingTransport()}, routes=[route]) as box:
            await box.migrate()
            for key in keys:
                self._numbers += 1
                async with box.unit_of_work(tenant=key if by_tenant else None) as uow:
                    uow.publish(Counted(number=self._numbers), key=key)
        await engine.dispose()

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start a relay, and wait until it says that it runs."""
        command = [PILLARBOX, "relay", *arguments, "--json"]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; it must exit with this code."""
        done = commands.run(["relay", *arguments], self.environment | variables, self.folder, timeout=60)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def complaint(self, *arguments: str, code: int, **variables: str) -> str:
        """Run a command that fails with one line, and says nothing else."""
        done = self.run(*arguments, code=code, **variables)
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        return line

    def hold(self, on: bool) -> None:
        if on:
            (self.folder / "hold").touch()
        else:
            (self.folder / "hold").unlink()

    def notes(self, what: str = "sent") -> list[Note]:
        file = self.folder / "broker"
        lines = file.read_text().splitlines() if file.exists() else []
        return [note for note in (Note(*json.loads(line)) for line in lines) if note.what == what]

    def wait_for(self, count: int, what: str = "sent") -> list[Note]:
        wait_until(lambda: len(self.notes(what)) >= count, f"{count} messages that are {what}")
        return self.notes(what)

    def select(self, statement: str) -> list[Any]:
        engine = create_engine(self.url.replace("+asyncpg", "+psycopg").replace("+aiosqlite", ""))
        with engine.connect() as connection:
            found = [tuple(row) for row in connection.execute(text(statement))]
        engine.dispose()
        return found

    def set(self, name: str, value: str | None) -> None:
        """Change a setting of PostgreSQL; None for its default."""
        engine = create_engine(self.url.replace("+asyncpg", "+psycopg"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            change = f"RESET {name}" if value is None else f"SET {name} = '{value}'"
            connection.execute(text(f"ALTER SYSTEM {change}"))
            connection.execute(text("SELECT pg_reload_conf()"))
        engine.dispose()

    def held(self) -> dict[str, int]:
        """How many lanes each relay has."""
        found = self.select("SELECT locked_by, count(*) FROM pillarbox_lanes WHERE locked_by IS NOT NULL GROUP BY 1")
        return dict(found)

    def until_held(self, **expected: int) -> None:
        wait_until(lambda: self.held() == expected, f"lanes to be held like {expected}")

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=60)


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    town = Town(tmp_path)
    yield town
    town.end()


@pytest.fixture
def postgres(town: Town, postgres_database: Database) -> Town:
    town.use(postgres_database)
    return town


@pytest.fixture
def sqlite(town: Town, sqlite_database: Database) -> Town:
    town.use(sqlite_database)
    return town


@pytest.fixture
def logical(town: Town, fresh_database: FreshDatabase) -> Town:
    town.use(fresh_database("logical"))
    return town


def finish(process: subprocess.Popen[str]) -> tuple[list[Any], str]:
    """Wait for its end; what it said on both streams."""
    out, err = process.communicate(timeout=30)
    said = []
    while out := out.lstrip():
        document, end = json.JSONDecoder().raw_decode(out)
        said.append(document)
        out = out[end:]
    return said, err


def first_answer(process: subprocess.Popen[str]) -> Any:
    """The first thing that it says."""
    assert process.stdout is not None
    said = ""
    while True:
        said += process.stdout.readline()
        with suppress(json.JSONDecodeError):
            return json.loads(said)


# -- stopping, killing, freezing ---------------------------------------------------------------------------------------


def test_h91_sigterm_lets_it_finish_and_release_its_lanes(postgres: Town) -> None:
    relay = postgres.start("shop:box", "--name", "r1", PILLARBOX_RELAY__LEASE="60")
    postgres.until_held(r1=16)
    postgres.hold(True)
    postgres.publish("a", "a")
    postgres.wait_for(1, "sending")
    relay.send_signal(signal.SIGTERM)
    postgres.hold(False)
    said, complaints = finish(relay)
    assert (relay.returncode, complaints) == (0, "")
    assert [line["relay"] for line in said] == ["r1", "r1"]
    assert said[-1]["sent"] == len(postgres.notes()) >= 1
    assert postgres.held() == {}
    assert postgres.select("SELECT name FROM pillarbox_relays") == []
    postgres.run("shop:box", "--drain")
    assert [note.number for note in postgres.notes()] == [1, 2]  # neither of them twice


def test_h91_a_second_sigterm_ends_it_at_once(postgres: Town) -> None:
    relay = postgres.start("shop:box", "--name", "r1")
    postgres.until_held(r1=16)
    postgres.hold(True)
    postgres.publish("a")
    postgres.wait_for(1, "sending")
    relay.send_signal(signal.SIGTERM)
    wait_until(lambda: sum(postgres.held().values()) <= 1, "the idle lanes to be released")
    relay.send_signal(signal.SIGTERM)
    finish(relay)
    assert relay.returncode == Exit.TERMINATED
    postgres.hold(False)
    assert json.loads(postgres.run("shop:box", "--drain", "--json").stdout)["sent"] == 1


def test_h45_after_kill_9_another_relay_goes_on_within_the_lease_and_a_second(postgres: Town) -> None:
    keys = [f"key-{number}" for number in range(40)]  # some in every lane
    victim = postgres.start("shop:box", "--name", "victim")
    postgres.until_held(victim=16)
    postgres.start("shop:box", "--name", "heir")
    postgres.until_held(victim=8, heir=8)
    postgres.publish(*keys)
    victim.kill()
    killed_at = time.time()
    postgres.publish(*keys)
    wait_until(lambda: len({note.number for note in postgres.notes()}) == 80, "all events to be sent")
    postgres.until_held(heir=16)
    notes = postgres.notes()
    first = {note.number: note for note in reversed(notes)}
    for key in keys:
        numbers = [note.number for note in notes if note.key == key]
        assert [*dict.fromkeys(numbers)] == sorted({*numbers})
    taken_over = postgres.select("SELECT count(*) FROM pillarbox_lanes WHERE epoch > 1")
    assert taken_over[0][0] >= 8
    assert max(note.at for note in first.values()) - killed_at < LEASE + 1.0 + 2.0  # two for a busy machine


def test_h31_h32_a_relay_that_was_frozen_sends_and_settles_nothing_when_it_wakes(postgres: Town) -> None:
    sleeper = postgres.start("shop:box", "--name", "sleeper")
    postgres.until_held(sleeper=16)
    postgres.hold(True)
    postgres.publish("a", "a", "a")
    postgres.wait_for(1, "sending")
    sleeper.send_signal(signal.SIGSTOP)
    heir = postgres.start("shop:box", "--name", "heir")
    postgres.until_held(heir=16)
    postgres.hold(False)
    postgres.wait_for(3)
    wait_until(lambda: _settled(postgres), "the heir to settle")
    before = postgres.select("SELECT route, shard, epoch, batch FROM pillarbox_lanes WHERE batch > 0")
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: len(postgres.held()) == 2, "the sleeper to be awake and to have its share again")
    mine = [note for note in postgres.notes("sending") if note.process == sleeper.pid]
    assert len(mine) == 1  # that was under way; nothing since
    sent = postgres.notes()
    assert [note.number for note in sent if note.process == heir.pid] == [1, 2, 3]
    assert len([note for note in sent if note.process == sleeper.pid]) <= 1
    after = postgres.select("SELECT route, shard, epoch, batch FROM pillarbox_lanes WHERE batch > 0")
    assert [row[3] for row in after] == [row[3] for row in before]


def _settled(town: Town) -> bool:
    return town.select("SELECT count(*) FROM outbox_events WHERE status <> 'SENT'") == [(0,)]


# -- what it serves ----------------------------------------------------------------------------------------------------


def test_d1_without_any_code_of_yours_it_serves_the_transports_of_the_settings(sqlite: Town) -> None:
    sqlite.publish("a", "b")
    (sqlite.folder / "pillarbox.yaml").write_text("transports:\n  broker: 'logging:'\nlog_level: info\n")
    done = sqlite.run("--drain")
    assert done.stdout == "2 sent, 0 rejected\n"
    assert done.stderr.count("topic='counted'") == 2
    assert _settled(sqlite)


def test_r6_it_keeps_to_its_shards(sqlite: Town) -> None:
    sqlite.publish(*(f"key-{number}" for number in range(40)))
    low = json.loads(sqlite.run("shop:box", "--shards", "0-7/16", "--drain", "--json").stdout)
    high = json.loads(sqlite.run("shop:box", "--shards", "8,9,10-15", "--drain", "--json").stdout)
    assert low["sent"] > 0
    assert low["sent"] + high["sent"] == 40


def test_it_keeps_to_its_tenants(sqlite: Town) -> None:
    sqlite.publish_for("acme", "globex", "initech", "acme")
    own = json.loads(sqlite.run("shop:box", "--tenants", "acme, globex", "--drain", "--json").stdout)
    assert own["sent"] == 3
    assert {note.key for note in sqlite.notes()} == {"acme", "globex"}
    assert sqlite.run("shop:box", "--drain").stdout == "1 sent, 0 rejected\n"


def test_tenants_need_a_route_that_is_sharded_by_tenant(sqlite: Town) -> None:
    done = sqlite.run("shop:box", "--tenants", "acme", "--drain", code=Exit.USAGE)
    assert done.stderr.endswith('no route in this database is sharded by tenant; say Route(..., shard_by="tenant")\n')


# -- health ------------------------------------------------------------------------------------------------------------


async def test_h93_health_is_200_while_it_sees_to_its_leases_and_503_otherwise() -> None:
    relay = Relay(MemoryStore(), {})
    async with answering(relay, no_metrics, "127.0.0.1", 0) as address:
        assert (await _get(f"{address}/readyz"))[0] == 503
        async with running(relay):
            await soon(lambda: relay.healthy)
            code, body = await _get(f"{address}/readyz")
        assert (code, json.loads(body)["relay"], json.loads(body)["healthy"]) == (200, relay.name, True)
        assert (await _get(f"{address}/other"))[0] == 404


async def test_h93_a_relay_whose_database_is_away_is_alive_and_not_ready() -> None:
    line = Line(MemoryStore())
    relay = Relay(line, {}, pacing=Pacing(lease=0.2))
    async with answering(relay, no_metrics, "127.0.0.1", 0) as address, running(relay):
        await soon(lambda: relay.healthy)
        line.fail(OSError("away"))
        await soon(lambda: not relay.healthy)
        assert [(await _get(f"{address}/{path}"))[0] for path in ("livez", "readyz")] == [200, 503]
        line.mend()
        line.cut()  # now it does not even answer: the relay hangs
        await soon(lambda: not relay.alive)
        assert (await _get(f"{address}/livez"))[0] == 503
        line.mend()
        await soon(lambda: relay.alive and relay.healthy)


def test_observers_of_the_box_are_kept_and_others_added_once() -> None:
    box, settings = Pillarbox("sqlite://"), Settings(tracing="otel")
    for _ in range(2):
        observe(box, settings, metrics=True)
        assert [type(each).__name__ for each in box.signals.observers] == ["OtelSignals", "PrometheusSignals"]
    own = PrometheusSignals()
    assert observe(Pillarbox("sqlite://", signals=[own]), Settings(), metrics=True) == own.render


async def test_without_the_extra_there_areno_metrics_and_it_says_what_to_install() -> None:
    async with answering(Relay(MemoryStore(), {}), no_metrics, "127.0.0.1", 0) as address:
        code, body = await _get(f"{address}/metrics")
        assert (code, body) == (501, b"metrics need a package: pip install 'pillarbox[prometheus]'\n")


async def test_what_is_no_http_does_the_endpoint_no_harm() -> None:
    relay = Relay(MemoryStore(), {})
    async with answering(relay, no_metrics, "127.0.0.1", 0) as address:
        port = urlsplit(address).port
        for rubbish in (b"", b"\x00\xff\r\n\r\n", b"GET " + b"x" * 100_000 + b"\r\n\r\n"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(rubbish)
            writer.close()
        assert (await _get(f"{address}/readyz"))[0] == 503


async def test_s38_of_lanes_in_trouble_only_the_names_are_told() -> None:
    async def away(_producer: str, _events: str) -> Outcome:
        return Outcome((), unfinished=Verdict.UNAVAILABLE, reason="cannot connect to 10.1.2.3:9092")

    world = World()
    world.write("a1")
    world.broker.before = away
    relay = world.relay()
    async with answering(relay, no_metrics, "127.0.0.1", 0) as address, running(relay):
        await soon(lambda: relay.status()["troubles"])
        for path in ("livez", "readyz"):
            _, body = await _get(f"{address}/{path}")
            assert json.loads(body)["troubles"] == ["orders/0"]
            assert b"10.1.2.3" not in body
        assert "10.1.2.3" in relay.status()["troubles"]["orders/0"]


async def test_metrics_that_cannot_be_shown_are_500_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_accept: str) -> tuple[bytes, str] | None:
        raise TypeError("at line 7")

    async with answering(Relay(MemoryStore(), {}), broken, "127.0.0.1", 0) as address:
        assert await _get(f"{address}/metrics") == (500, b"")
        assert (await _get(f"{address}/livez"))[0] == 503
    assert "GET /metrics failed: TypeError: at line 7" in caplog.text


@pytest.mark.parametrize("request_", [b"GET /metr", b"GET /metrics HTTP/1.1\r\n\r\n"], ids=["asks", "reads"])
async def test_who_is_slow_is_hung_up_on(request_: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def much(_accept: str) -> tuple[bytes, str] | None:
        return b"x" * 50_000_000, "text/plain"

    def served() -> bool:
        return any("answer" in repr(task.get_coro()) for task in asyncio.all_tasks())

    monkeypatch.setattr(serving, "EXCHANGE_SECONDS", 0.2)
    async with answering(Relay(MemoryStore(), {}), much, "127.0.0.1", 0) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(address).port)
        writer.write(request_)
        await soon(served)
        await soon(lambda: not served(), seconds=4)
        read = 0
        with suppress(ConnectionResetError):
            while chunk := await reader.read(1_000_000):
                read += len(chunk)
        assert read < 50_000_000
        writer.close()


async def test_an_address_of_ipv6() -> None:
    host, port = parse_address(None, None, "[::1]:0") or ("", 1)  # type: ignore[arg-type]
    assert (host, port) == ("::1", 0)
    try:
        socket.create_server((host, port), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    async with answering(Relay(MemoryStore(), {}), no_metrics, host, port) as address:
        assert address.startswith("http://[::1]:")
        assert (await _get(f"{address}/livez"))[0] == 503


def test_the_http_endpoint_of_a_process(sqlite: Town) -> None:
    relay = sqlite.start("shop:box", "--http", "0")
    address = first_answer(relay)["http"]
    for path in ("livez", "readyz", "metrics"):
        wait_until(lambda path=path: asyncio.run(_get(f"{address}/{path}"))[0] == 200, path)  # type: ignore[misc]
    relay.send_signal(signal.SIGINT)
    finish(relay)
    assert relay.returncode == 0


async def _get(address: str) -> tuple[int, bytes]:
    def get() -> tuple[int, bytes]:
        parts = urlsplit(address)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        connection.request("GET", parts.path)
        response = connection.getresponse()
        found = response.status, response.read()
        connection.close()
        return found

    return await asyncio.to_thread(get)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("nowhere:box", "error: nowhere:box: there is no module 'nowhere'"),
        ("shop:till", "error: shop:till: till in shop is no Pillarbox"),
        ("shop:nothing", "error: shop:nothing: nothing in shop is no Pillarbox"),
    ],
)
def test_a_box_that_is_not_there(sqlite: Town, reference: str, complaint: str) -> None:
    assert sqlite.complaint(reference, code=Exit.USAGE) == complaint


def test_nothing_to_send_to(sqlite: Town) -> None:
    complaint = sqlite.complaint(code=Exit.SETTINGS)
    assert complaint == "error: this relay has nothing to send to: set transports, or name your box as MODULE:BOX"


def test_an_address_that_is_not_known(sqlite: Town) -> None:
    (sqlite.folder / "pillarbox.yaml").write_text("transports:\n  broker: 'carrier-pigeon://loft'\n")
    assert "carrier-pigeon" in sqlite.complaint(code=Exit.SETTINGS)


@pytest.mark.parametrize("tenants", ["", ",", "acme,", "acme,,globex"])
def test_tenants_that_are_none(tenants: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["relay", f"--tenants={tenants}"]) == Exit.USAGE
    assert "are no tenants" in capsys.readouterr().err


def test_shards_or_tenants(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["relay", "--tenants=acme", "--shards=0"]) == Exit.USAGE
    assert "choose one" in capsys.readouterr().err


@pytest.mark.parametrize("shards", ["", "x", "3-1", "1,,2", "-1", "0-7/", "0-7/x", "0-7/7"])
def test_shards_that_are_none(shards: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["relay", f"--shards={shards}"]) == Exit.USAGE
    assert "are no shards" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["x", "70000", "host:"])
def test_an_http_address_that_is_none(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["relay", "--http", address]) == Exit.USAGE
    assert "write 9464, or 0.0.0.0:9464" in capsys.readouterr().err


def test_a_drain_serves_no_http(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["relay", "--drain", "--http", "0"]) == Exit.USAGE
    assert "choose one" in capsys.readouterr().err


def test_a_port_that_is_in_use(sqlite: Town) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in sqlite.complaint("shop:box", "--http", port, code=Exit.USAGE)


@pytest.mark.parametrize("mode", [(), ("--drain",)])
@pytest.mark.parametrize(
    "address", ["127.0.0.1:1/x", "nowhere.invalid/x", "/x?host=/nowhere"], ids=["port", "host", "socket"]
)
def test_a_database_that_is_away(town: Town, address: str, mode: tuple[str, ...]) -> None:
    town.environment["SHOP_DATABASE"] = f"postgresql+asyncpg://postgres@{address}"
    said = town.complaint("shop:box", *mode, code=Exit.UNREACHABLE)
    assert said.startswith("error: cannot reach postgresql+asyncpg://postgres@")
    assert said.endswith("see that the server runs and that the URL of shop:box is right")


def test_a_name_that_another_relay_has(postgres: Town) -> None:
    postgres.start("shop:box", "--name", "twin")
    postgres.until_held(twin=16)
    done = postgres.run("shop:box", "--name", "twin", "--drain")
    assert "a relay called twin was there a moment ago" in done.stderr


def test_a_database_that_is_not_migrated(town: Town, fresh_database: FreshDatabase) -> None:
    town.environment["SHOP_DATABASE"] = fresh_database("embedded", empty=True).url()
    assert "pillarbox migrate" in town.complaint("shop:box", code=Exit.NOT_MIGRATED)


# -- streaming ---------------------------------------------------------------------------------------------------------


def slots(town: Town) -> list[Any]:
    return town.select(
        "SELECT temporary, active_pid IS NOT NULL FROM pg_replication_slots WHERE database = current_database()"
    )


def test_h57_a_relay_that_was_killed_leaves_no_slot_behind(logical: Town) -> None:
    relay = logical.start("shop:box", "--source", "cdc")
    wait_until(lambda: slots(logical) == [(True, True)], "a temporary slot that is read")
    logical.publish("a", "b", "a")
    logical.wait_for(3)
    relay.kill()
    wait_until(lambda: slots(logical) == [], "the slot to end with its connection")


def _doctor_on_the_slot(town: Town) -> dict[str, Any]:
    command = [PILLARBOX, "doctor", "--json"]
    done = subprocess.run(command, env=town.environment, capture_output=True, text=True, check=False)
    checks: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
    [found] = [check for check in checks if check["name"] == "slots"]
    return found


def test_h57_doctor_names_a_slot_that_nobody_reads_or_nothing_bounds(logical: Town) -> None:
    relay = logical.start(
        "shop:box", "--http", "0", PILLARBOX_RELAY__SOURCE="cdc", PILLARBOX_RELAY__SLOT="pillarbox_e2e"
    )
    address = first_answer(relay)["http"]
    wait_until(lambda: json.loads(asyncio.run(_get(f"{address}/readyz"))[1])["stream"] == "up", "the stream to be up")
    check = _doctor_on_the_slot(logical)
    assert (check["state"], "nothing bounds that" in check["found"]) == ("warning", True)
    assert "set max_slot_wal_keep_size" in check["remedy"]
    logical.set("max_slot_wal_keep_size", "1GB")
    metrics = asyncio.run(_get(f"{address}/metrics"))[1].decode()
    assert _doctor_on_the_slot(logical)["state"] == "ok"
    logical.set("max_slot_wal_keep_size", None)
    for line in (
        "outbox_streams_down 0.0",
        "outbox_stream_buffer_bytes 0.0",
        'outbox_stream_lost_total{reason="slot"} 0.0',
        'outbox_stream_rows_total{source="stream"} 0.0',
        'outbox_slot_lag_bytes{slot="pillarbox_e2e"}',
        'outbox_slot_budget_bytes{slot="pillarbox_e2e"} 1.073741824e+09',
    ):
        assert line in metrics
    relay.send_signal(signal.SIGTERM)
    finish(relay)
    try:
        check = _doctor_on_the_slot(logical)
        assert (check["state"], check["found"].endswith("and nobody reads it")) == ("warning", True)
        assert "SELECT pg_drop_replication_slot('pillarbox_e2e')" in check["remedy"]
    finally:
        logical.select("SELECT pg_drop_replication_slot('pillarbox_e2e')")


def test_a_slot_without_a_stream_is_a_mistake(logical: Town) -> None:
    said = logical.complaint("shop:box", "--slot", "pillarbox_e2e", code=Exit.USAGE)
    assert "--slot is for a relay that reads a stream: say --source cdc, too" in said
