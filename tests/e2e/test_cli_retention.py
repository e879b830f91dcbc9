"""Prune, archive and restore in the hands of people: real processes, on real databases."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import secrets
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import Pillarbox, Route
from pillarbox.cli.output import Exit
from pillarbox.transports.memory import MemoryTransport
from tests.e2e import test_cli
from tests.e2e.test_cli import CommandLine, execute, on_postgres, on_sqlite
from tests.servers import Database, wait_until

pillarbox = test_cli.pillarbox
database = test_cli.database
migrated = test_cli.migrated
filled = test_cli.filled

BROKER, ARCHIVE = "broker:stock.events", "archive:stock.{tenant}"
WEEK = ("--older-than", "7d")
COMMAND = "\nfrom pillarbox.cli import main\nmain()"
WAITS_FOR_ITS_NAME = """
import os, time, pillarbox.stores.archive_file as a
finish = a.Writer.finish
def slow(self):
    open("whole", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.01)
    return finish(self)
a.Writer.finish = slow
"""


async def _drain(url: str, rejected: str | None) -> int:
    """Send what there is; how many messages. The broker may reject a key."""
    engine = create_async_engine(url)
    broker, archive = MemoryTransport(), MemoryTransport()
    broker.reject(lambda message: message.key == rejected)
    routes = [
        Route("stock.**", to="broker", topic="stock.events"),
        Route("stock.item.*", to="archive", topic="stock.{tenant}"),
    ]
    async with Pillarbox(engine, transports={"broker": broker, "archive": archive}, routes=routes) as box:
        await box.relay().drain()
    await engine.dispose()
    return sum(map(len, (broker.sent("stock.events"), archive.sent("stock.acme"), archive.sent("stock.globex"))))


def drain(database: Database, rejected: str | None = None) -> int:
    return asyncio.run(_drain(database.url(), rejected))


@pytest.fixture
def old(filled: Database) -> Database:
    """All six deliveries were sent long ago."""
    assert drain(filled) == 6
    _make_old(filled)
    return filled


def _make_old(database: Database) -> None:
    execute(database, "UPDATE pillarbox_outbox SET created_at = '2020-01-01 00:00:00'")
    if database.is_postgres:
        execute(database, "UPDATE pillarbox_journal SET settled_at = '2020-01-01 00:00:00'")
    else:
        execute(database, "UPDATE pillarbox_outbox SET sent_at = '2020-01-01 00:00:00'")


def rows(database: Database) -> int:
    return int(execute(database, "SELECT count(*) FROM pillarbox_outbox")[0][0])


def trail(pillarbox: CommandLine) -> list[Any]:
    return [(it["action"], it["details"]["count"], it["reason"]) for it in pillarbox.json("outbox", "audit")["entries"]]


class TestPrune:
    def test_a_dry_run_then_the_real_one(self, pillarbox: CommandLine, old: Database) -> None:
        assert pillarbox("outbox", "prune", *WEEK, "--dry-run").stdout == "prune: 6 deliveries would be deleted\n"
        some = pillarbox.json("outbox", "prune", *WEEK, "--dry-run", "--route", BROKER)
        assert (some["selected"], some["done"], some["left"], some["audit"]) == (3, 0, 3, None)
        assert (rows(old), trail(pillarbox)) == (6, [])

        done = pillarbox.json("outbox", "prune", *WEEK, "--route", BROKER, "--yes", "--batch", "2")
        assert (done["done"], done["left"]) == (3, 0)
        printed = pillarbox("outbox", "prune", *WEEK, "--yes", "--reason", "tidy").stdout.splitlines()
        assert printed[0].startswith("prune: 3 deliveries deleted, audit entry ")
        assert (rows(old), trail(pillarbox)) == (0, [("prune", 3, "tidy"), ("prune", 3, None)])
        if old.is_postgres:
            assert execute(old, "SELECT * FROM pillarbox_journal") == []
        assert pillarbox("outbox", "prune", *WEEK, "--yes").stdout == "prune: nothing to do\n"

    @on_sqlite
    def test_what_is_young_or_not_sent_stays(self, pillarbox: CommandLine, filled: Database) -> None:
        execute(filled, "UPDATE pillarbox_outbox SET created_at = '2020-01-01 00:00:00'")
        assert pillarbox("outbox", "prune", *WEEK, "--yes").stdout == "prune: nothing to do\n"
        assert drain(filled) == 6
        assert pillarbox("outbox", "prune", *WEEK, "--yes").stdout == "prune: nothing to do\n"
        assert rows(filled) == 6

    @on_sqlite
    def test_asks_first(self, pillarbox: CommandLine, old: Database) -> None:
        said = pillarbox.complaint("outbox", "prune", *WEEK, code=Exit.USAGE)
        assert "this would delete 6 deliveries for ever: say --yes" in said
        said = pillarbox.complaint("outbox", "prune", "--older-than", "1s", "--yes", code=Exit.USAGE)
        assert "rows stay for 60 seconds at least" in said
        for command in (["prune"], ["archive", "--to", "old.jsonl"], ["redrive"], ["discard"]):
            for age in ("800000d", "999999999d", "876001h"):
                said = pillarbox.complaint("outbox", *command, "--older-than", age, code=Exit.USAGE)
                assert f"'{age}' is too long: at most '36500d'" in said
        said = pillarbox.complaint("outbox", "prune", *WEEK, "--route", "nowhere", code=Exit.PROBLEM)
        assert "there is no route 'nowhere'" in said
        assert rows(old) == 6

    @on_sqlite
    def test_shows_a_terminal_how_far_it_is(self, pillarbox: CommandLine, old: Database) -> None:
        main, terminal = pty.openpty()
        process = pillarbox.start("outbox", "prune", *WEEK, stdin=terminal, stderr=terminal)
        os.close(terminal)
        os.write(main, b"y\n")
        assert process.communicate(timeout=60)[0].startswith("prune: 6 deliveries deleted")
        shown = os.read(main, 10_000).decode()
        os.close(main)
        assert "Delete 6 deliveries for ever?" in shown
        assert "100%" in shown
        assert rows(old) == 0

    def test_stops_between_two_chunks(self, pillarbox: CommandLine, old: Database) -> None:
        process = pillarbox.start("outbox", "prune", *WEEK, "--yes", "--pace", "1")
        wait_until(lambda: rows(old) < 6, "the first chunk is gone")
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=60)[0].splitlines()
        assert process.returncode == Exit.INTERRUPTED
        left = rows(old)
        assert 0 < left < 6
        said = "1 delivery" if left == 1 else f"{left} deliveries"
        assert printed[-1] == f"stopped: {said} left; the same command goes on"
        assert pillarbox.json("outbox", "prune", *WEEK, "--yes")["done"] == left


class TestArchive:
    @pytest.mark.parametrize("name", ["old.jsonl", "old.jsonl.zst"])
    def test_to_a_file_and_back(self, pillarbox: CommandLine, old: Database, name: str) -> None:
        before = pillarbox.json("outbox", "list")["deliveries"]
        wanted = ["outbox", "archive", *WEEK, "--to", name]
        assert pillarbox.json(*wanted, "--dry-run")["selected"] == 6
        assert not (pillarbox.folder / name).exists()
        assert pillarbox.json(*wanted, "--yes", "--batch", "2")["done"] == 6
        assert rows(old) == 0
        assert stat.S_IMODE((pillarbox.folder / name).stat().st_mode) == 0o600
        assert [it.name for it in pillarbox.folder.glob("*old*")] == [name]
        assert "exists: choose another name" in pillarbox.complaint(*wanted, "--yes", code=Exit.PROBLEM)

        wanted = ["outbox", "restore", name]
        dry = pillarbox.json(*wanted, "--dry-run")
        assert (dry["selected"], dry["there"], dry["done"]) == (6, 0, 0)
        assert "say --yes" in pillarbox.complaint(*wanted, code=Exit.USAGE)
        assert pillarbox.json(*wanted, "--yes", "--route", BROKER)["done"] == 3
        printed = pillarbox(*wanted, "--yes").stdout.splitlines()
        assert printed[0].startswith("restore: 3 deliveries brought back as history, audit entry ")
        assert printed[1] == "3 deliveries: in the outbox already, left alone"
        after = pillarbox.json("outbox", "list")["deliveries"]
        assert _told(after) == _told(before)
        assert drain(old) == 0
        assert trail(pillarbox) == [("restore", 3, None), ("restore", 3, None), ("archive", 6, None)]

    def test_to_be_sent_again(self, pillarbox: CommandLine, old: Database) -> None:
        pillarbox("outbox", "archive", *WEEK, "--to", "old.jsonl", "--yes")
        line = json.loads((pillarbox.folder / "old.jsonl").read_text("utf-8").splitlines()[1])
        wanted = ["outbox", "restore", "old.jsonl", "--resend", "--yes"]
        assert pillarbox.json(*wanted, "--event", line["event_id"])["done"] == 2
        assert pillarbox(*wanted).stdout.startswith("restore: 4 deliveries to be sent again, audit entry ")
        assert drain(old) == 6
        said = pillarbox.complaint(*wanted, "--as-sent", code=Exit.USAGE)
        assert "--as-sent and --resend exclude each other" in said

    def test_what_was_discarded_is_not_sent_again(self, pillarbox: CommandLine, filled: Database) -> None:
        """Unless somebody names it."""
        assert drain(filled, rejected="A") == 5
        (bad,) = pillarbox.json("outbox", "list", "--status", "RETRYING")["deliveries"]
        pillarbox("outbox", "discard", bad["event_id"], "--yes")
        assert drain(filled, rejected="A") == 0
        _make_old(filled)
        assert pillarbox.json("outbox", "archive", *WEEK, "--to", "old.jsonl", "--yes")["done"] == 6

        wanted = ["outbox", "restore", "old.jsonl", "--resend", "--yes"]
        some = pillarbox.json(*wanted, "--route", ARCHIVE, "--dry-run")
        assert (some["selected"], some["discarded"]) == (3, 0)
        printed = pillarbox(*wanted).stdout.splitlines()
        assert printed[0].startswith("restore: 5 deliveries to be sent again, audit entry ")
        assert printed[1] == "1 delivery: discarded, left out; --event names what is to be sent all the same"
        assert drain(filled) == 5
        again = pillarbox.json(*wanted)
        assert (again["selected"], again["there"], again["discarded"]) == (0, 5, 1)
        named = pillarbox.json(*wanted, "--event", bad["event_id"])
        assert (named["done"], named["there"], named["discarded"]) == (1, 1, 0)
        assert drain(filled) == 1

    def test_what_was_edited_is_known_by_both_its_ids(self, pillarbox: CommandLine, filled: Database) -> None:
        assert drain(filled, rejected="A") == 5
        (bad,) = pillarbox.json("outbox", "list", "--status", "RETRYING")["deliveries"]
        (pillarbox.folder / "body.json").write_text('{"sku": "b"}', "utf-8")
        edit = ["outbox", "edit", bad["event_id"], "--route", BROKER, "--body", "body.json", "--reason", "wrong sku"]
        new = pillarbox.json(*edit)["new_event_id"]
        assert drain(filled) == 1
        _make_old(filled)
        pillarbox("outbox", "archive", *WEEK, "--to", "old.jsonl", "--yes")
        wanted = ["outbox", "restore", "old.jsonl", "--route", BROKER, "--event"]
        for event in (bad["event_id"], new):
            assert pillarbox.json(*wanted, event, "--dry-run")["selected"] == 1
        assert pillarbox.json(*wanted, bad["event_id"], "--yes")["done"] == 1

    def test_a_run_that_was_stopped_is_finished_by_the_next_one(self, pillarbox: CommandLine, old: Database) -> None:
        """The file is whole, and a part of its rows is gone: nothing is lost, and nothing is archived twice."""
        wanted = ["outbox", "archive", *WEEK, "--yes", "--to"]
        process = pillarbox.start(*wanted, "old.jsonl", "--pace", "1")
        wait_until(lambda: rows(old) < 6, "the first chunk is gone")
        process.kill()
        process.communicate(timeout=60)
        left = rows(old)
        assert 0 < left < 6
        said = pillarbox.complaint(*wanted, "other.jsonl", code=Exit.PROBLEM)
        assert f"say --to {pillarbox.folder / 'old.jsonl'} to finish that first" in said
        whole = (pillarbox.folder / "old.jsonl").read_bytes()
        assert pillarbox.json(*wanted, "old.jsonl")["done"] == 6
        assert (pillarbox.folder / "old.jsonl").read_bytes() == whole
        assert rows(old) == 0
        assert pillarbox.json("outbox", "restore", "old.jsonl", "--yes")["done"] == 6
        pillarbox(*wanted, "other.jsonl", "--dry-run")  # is not refused any more

    @on_postgres
    def test_a_crash_before_the_file_is_whole_costs_nothing(self, pillarbox: CommandLine, old: Database) -> None:
        die = "import os, pillarbox.stores.archive_file as a\na.Writer.finish = lambda self: os._exit(9)"
        wanted = ["outbox", "archive", *WEEK, "--yes", "--to"]
        pillarbox.python(die, *wanted, "old.jsonl", code=9)
        assert (rows(old), (pillarbox.folder / "old.jsonl").exists()) == (6, False)
        assert len([*pillarbox.folder.glob(".*.partial")]) == 1
        assert pillarbox.json(*wanted, "old.jsonl")["done"] == 6
        assert [*pillarbox.folder.glob(".*.partial")] == []

    @on_postgres
    @pytest.mark.usefixtures("old")
    def test_a_crash_whose_rows_have_gone_another_way_holds_nothing_up(self, pillarbox: CommandLine) -> None:
        die = "import os, pillarbox.stores.archive_file as a\na.Writer.finish = lambda self: os._exit(9)"
        wanted = ["outbox", "archive", *WEEK, "--yes", "--to"]
        pillarbox.python(die, *wanted, "old.jsonl", code=9)
        pillarbox("outbox", "prune", *WEEK, "--yes")
        for other in ("other.jsonl", "table:old_events"):
            assert "to finish that first" in pillarbox.complaint(*wanted, other, code=Exit.PROBLEM)
        assert pillarbox(*wanted, "old.jsonl", "--dry-run").stdout == "archive: nothing to do\n"
        closed = pillarbox(*wanted, "old.jsonl").stdout
        assert closed == "archive: nothing is left for old.jsonl, audit entry 1 is closed\n"
        assert trail(pillarbox)[-1] == ("archive", 0, None)
        for free in ("old.jsonl", "other.jsonl", "table:old_events"):
            assert pillarbox(*wanted, free).stdout == "archive: nothing to do\n"

    @on_postgres
    def test_a_table_takes_nothing_that_a_file_holds(self, pillarbox: CommandLine, old: Database) -> None:
        die = "import os, pillarbox.stores.retention as r\nr.remove = lambda *_: os._exit(9)"
        wanted = ["outbox", "archive", *WEEK, "--yes", "--to"]
        pillarbox.python(die, *wanted, "old.jsonl", code=9)
        said = pillarbox.complaint(*wanted, "table:old_events", code=Exit.PROBLEM)
        assert f"say --to {pillarbox.folder / 'old.jsonl'} to finish that first" in said
        assert rows(old) == 6

    @on_sqlite
    def test_two_at_once_do_not_archive_the_same(self, pillarbox: CommandLine, old: Database) -> None:
        other = "import pillarbox.stores.archive as a\nnumbers = iter((0, 1))\na.latest = lambda _: next(numbers)"
        done = pillarbox.python(other, "outbox", "archive", *WEEK, "--yes", "--to", "old.jsonl", code=Exit.PROBLEM)
        assert "somebody else has archived meanwhile" in done.stderr
        assert (rows(old), [*pillarbox.folder.glob("*.jsonl*"), *pillarbox.folder.glob(".*")]) == (6, [])

    @on_postgres
    def test_of_two_at_once_to_one_file_each_writes_its_own(self, pillarbox: CommandLine, old: Database) -> None:
        """One is whole and waits for its name while the other is killed half way."""
        dies = """
import os, pillarbox.stores.archive_file as a
add = a.Writer.add
def dying(self, rows):
    add(self, rows)
    if self.count >= 4:
        self._file.flush()
        os._exit(9)
a.Writer.add = dying
"""
        wanted = ["outbox", "archive", *WEEK, "--yes", "--batch", "2", "--to", "old.jsonl"]
        first = pillarbox.start(*wanted, program=WAITS_FOR_ITS_NAME + COMMAND)
        wait_until((pillarbox.folder / "whole").exists, "the first file is whole")
        pillarbox.python(dies, *wanted, code=9)
        (pillarbox.folder / "go").touch()
        assert "6 deliveries archived" in first.communicate(timeout=60)[0]
        assert (first.returncode, rows(old)) == (0, 0)
        assert pillarbox.json("outbox", "restore", "old.jsonl", "--yes")["done"] == 6

    @on_postgres
    @pytest.mark.parametrize("first", ["finishes", "is killed"])
    def test_of_two_at_once_the_second_to_be_whole_deletes_nothing(
        self, pillarbox: CommandLine, old: Database, first: str
    ) -> None:
        """The trail tells of one archive, and whoever was killed meanwhile is known to have begun it."""
        wanted = ["outbox", "archive", *WEEK, "--yes", "--to", "old.jsonl"]
        die = "import pillarbox.stores.retention as r\nr.remove = lambda *_: os._exit(9)"
        other = WAITS_FOR_ITS_NAME + (die if first == "is killed" else "") + COMMAND
        (pillarbox.folder / "other.py").write_text(other, "utf-8")
        second = """
import pathlib, subprocess, sys, time, pillarbox.stores.archive as a, pillarbox.stores.archive_file as f
header, finish, others = a.header, f.Writer.finish, []
def behind(*given):
    others.append(subprocess.Popen([sys.executable, "other.py", *sys.argv[1:]]))
    while not pathlib.Path("whole").exists():
        time.sleep(0.01)
    return header(*given)
def late(self):
    pathlib.Path("go").touch()
    others[0].wait()
    return finish(self)
a.header, f.Writer.finish = behind, late
"""
        done = pillarbox.python(second, *wanted, code=Exit.PROBLEM)
        assert "old.jsonl has come into being meanwhile: choose another name" in done.stderr
        if first == "is killed":
            assert rows(old) == 6
            assert pillarbox.json(*wanted)["done"] == 6
        assert (rows(old), [*pillarbox.folder.glob(".*.partial")]) == (0, [])
        pillarbox("outbox", "archive", *WEEK, "--to", "next.jsonl", "--dry-run")  # is not refused
        assert pillarbox.json("outbox", "restore", "old.jsonl", "--yes")["done"] == 6

    @on_postgres
    def test_only_what_the_file_with_the_name_holds_is_deleted(self, pillarbox: CommandLine, old: Database) -> None:
        spoil = """
import pathlib, pillarbox.stores.archive_file as a
finish = a.Writer.finish
def spoilt(self):
    named = finish(self)
    lines = pathlib.Path("old.jsonl").read_bytes().splitlines(keepends=True)
    pathlib.Path("old.jsonl").write_bytes(b"".join(lines[:-1]))
    return named
a.Writer.finish = spoilt
"""
        wanted = ["outbox", "archive", *WEEK, "--yes", "--to", "old.jsonl"]
        assert "is damaged" in pillarbox.python(spoil, *wanted, code=Exit.PROBLEM).stderr
        assert rows(old) == 6

    def test_to_a_table(self, pillarbox: CommandLine, old: Database) -> None:
        done = pillarbox.json("outbox", "archive", *WEEK, "--to", "table:old_events", "--yes", "--batch", "4")
        assert (done["done"], rows(old)) == (6, 0)
        found = execute(old, "SELECT status, route FROM old_events ORDER BY id")
        assert sorted(found) == [("SENT", ARCHIVE)] * 3 + [("SENT", BROKER)] * 3
        said = pillarbox.complaint("outbox", "archive", *WEEK, "--to", "here", code=Exit.USAGE)
        assert "ends in .jsonl or .jsonl.zst, or table:NAME" in said

    @on_sqlite
    def test_a_damaged_file(self, pillarbox: CommandLine, old: Database) -> None:
        pillarbox("outbox", "archive", *WEEK, "--to", "old.jsonl", "--yes")
        path = pillarbox.folder / "old.jsonl"
        path.write_bytes(path.read_bytes().replace(b"SENT", b"Sent", 1))
        assert "is damaged" in pillarbox.complaint("outbox", "restore", "old.jsonl", "--yes", code=Exit.PROBLEM)
        assert "cannot read absent" in pillarbox.complaint("outbox", "restore", "absent", code=Exit.PROBLEM)
        assert rows(old) == 0

    @on_sqlite
    @pytest.mark.parametrize(
        ("target", "complaint"),
        [
            ("no/old.jsonl", "no is no folder"),
            ("table:Old", "'Old' cannot be the name of an archive: use a-z, 0-9 and _"),
            ("table:outbox_events", "it is one of the outbox's own"),
        ],
    )
    @pytest.mark.parametrize("how", ["--dry-run", "--yes"])
    def test_a_target_that_cannot_be(
        self, pillarbox: CommandLine, old: Database, target: str, complaint: str, how: str
    ) -> None:
        assert complaint in pillarbox.complaint("outbox", "archive", *WEEK, "--to", target, how, code=Exit.PROBLEM)
        assert rows(old) == 6

    @on_sqlite
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
    @pytest.mark.parametrize("size", [10, 40_000], ids=["at the end", "in the midst"])
    @pytest.mark.parametrize("name", ["old.jsonl", "old.jsonl.zst"])
    def test_a_full_disk(self, pillarbox: CommandLine, old: Database, name: str, size: int) -> None:
        """It is no fault of the database, and nothing is left of the file."""
        execute(old, f"UPDATE pillarbox_outbox SET body = CAST('{secrets.token_hex(size)}' AS BLOB)")
        full = """
import os
opened = os.open
def onto_a_full_disk(path, *rest):
    file = opened(path, *rest)
    if str(path).endswith(".partial"):
        os.dup2(opened("/dev/full", os.O_WRONLY), file)
    return file
os.open = onto_a_full_disk
"""
        done = pillarbox.python(full, "outbox", "archive", *WEEK, "--to", name, "--yes", code=Exit.PROBLEM)
        assert done.stderr == f"error: cannot write {pillarbox.folder / name}: No space left on device\n"
        assert (rows(old), [*pillarbox.folder.glob("*.jsonl*"), *pillarbox.folder.glob(".*")]) == (6, [])

    @on_sqlite
    def test_a_package_that_is_not_there(self, pillarbox: CommandLine, old: Database) -> None:
        absent = "import sys\nsys.modules['zstandard'] = None"
        wanted = ["outbox", "archive", *WEEK, "--to", "old.jsonl.zst", "--yes"]
        assert "pillarbox[archive]" in pillarbox.python(absent, *wanted, code=Exit.SETTINGS).stderr
        assert (rows(old), [*pillarbox.folder.glob(".*")]) == (6, [])


def _told(deliveries: list[dict[str, Any]]) -> list[Any]:
    """What does not depend on the place in the table."""
    return sorted(
        (it["event_id"], it["route"], it["status"], it["key"], it["tenant_id"], it["created_at"]) for it in deliveries
    )
