"""The command line in the hands of those who mend things: real processes, on real databases."""

from __future__ import annotations

import base64
import getpass
import json
import os
import pty
import re
import signal
import socket
import subprocess
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from pillarbox.cli.output import Exit
from pillarbox.outbox import Status
from pillarbox.stores.tables import outbox
from tests.e2e import test_cli
from tests.e2e.test_cli import HOSTILE_ERROR, CommandLine, checks, execute, leave, on_mariadb, on_postgres, on_sqlite
from tests.servers import Database, wait_until

pillarbox = test_cli.pillarbox
database = test_cli.database
migrated = test_cli.migrated
filled = test_cli.filled

BROKER, ARCHIVE = "broker:stock.events", "archive:stock.{tenant}"
ABSENT = "00000000-0000-7000-8000-000000000000"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e]")


@pytest.fixture
def dead(filled: Database) -> Database:
    """All six deliveries are dead."""
    leave(filled, Status.FAILED, attempts=5, last_error="too long")
    return filled


def requests(database: Database) -> list[Any]:
    return [action for (action,) in execute(database, "SELECT action FROM pillarbox_requests ORDER BY id")]


def relay(database: Database, name: str = "relay-1") -> None:
    """A relay that serves everything and holds every lane."""
    serves = json.dumps([route for (route,) in execute(database, "SELECT id FROM pillarbox_routes")])
    later = "2999-01-01 00:00:00"
    values = "VALUES (:name, :later, :later, :serves)"
    execute(
        database,
        f"INSERT INTO pillarbox_relays (name, started_at, expires_at, serves) {values}",
        name=name,
        later=later,
        serves=serves,
    )
    execute(database, "UPDATE pillarbox_lanes SET locked_by = :name, locked_until = :later", name=name, later=later)


def event_of(pillarbox: CommandLine, key: str) -> str:
    found: str = pillarbox.json("outbox", "list", "--key", key)["deliveries"][0]["event_id"]
    return found


class TestRedrive:
    def test_a_dry_run_then_the_real_one(self, pillarbox: CommandLine, dead: Database) -> None:
        wanted = ["outbox", "redrive", "--route", BROKER, "--type", "stock.item.*"]
        dry = pillarbox.json(*wanted, "--dry-run")
        assert (dry["selected"], dry["requested"], dry["left"], dry["audit"], dry["dry_run"]) == (3, 0, 3, None, True)
        assert [each["route"] for each in dry["sample"]] == [BROKER] * 3
        lines = pillarbox(*wanted, "--dry-run").stdout.splitlines()
        assert lines[0] == "redrive: 3 deliveries would be asked for"
        assert len(lines) == 5
        assert requests(dead) == pillarbox.json("outbox", "audit")["entries"] == []

        done = pillarbox.json(*wanted, "--reason", "broker mended")
        assert (done["requested"], done["left"], done["asked_before"], done["unserved"]) == (3, 0, 0, [BROKER])
        assert requests(dead) == ["redrive"] * 3
        (entry,) = pillarbox.json("outbox", "audit")["entries"]
        assert entry["id"] == done["audit"]
        assert entry["who"] == f"{getpass.getuser()}@{socket.gethostname()}"
        assert (entry["action"], entry["reason"], entry["details"]["count"]) == ("redrive", "broker mended", 3)
        assert entry["target"] == f"status FAILED, route {BROKER}, type stock.item.*"

        assert pillarbox.json(*wanted)["asked_before"] == 3
        relay(dead)
        again = pillarbox("outbox", "redrive", "--all", "--limit", "2").stdout.splitlines()
        assert again[0].startswith("redrive: 2 of 2 deliveries asked for, audit entry ")
        assert again[1:] == ["3 deliveries: asked for before, and not done yet"]

    @on_sqlite
    def test_says_that_the_requests_wait(self, pillarbox: CommandLine, dead: Database) -> None:
        printed = pillarbox("outbox", "redrive", "--all", "--by", "Anna").stdout.splitlines()
        assert printed[0] == "redrive: 6 of 6 deliveries asked for, audit entry 1"
        waits = "no live relay serves route '{}': what is asked for waits until one does"
        assert printed[1:] == [waits.format(ARCHIVE), waits.format(BROKER)]
        assert execute(dead, "SELECT who FROM pillarbox_audit") == [("Anna",)]

    @on_sqlite
    def test_named_events(self, pillarbox: CommandLine, dead: Database) -> None:
        first, second = event_of(pillarbox, "A"), event_of(pillarbox, "a")
        leave(dead, Status.SENT, outbox.c.key == "a")
        leave(dead, Status.RETRYING, outbox.c.key == "A")
        done = pillarbox.json("outbox", "redrive", first, second)
        assert done["requested"] == 2
        assert done["left_alone"] == {second: ["SENT", "SENT"]}
        assert pillarbox.json("outbox", "redrive", second, "--route", "other")["left_alone"] == {}
        assert f"event {second} is SENT, SENT: left alone" in pillarbox("outbox", "redrive", second).stdout
        for event, count in ((first, 1), (second, 1), (ABSENT, 0)):
            assert len(pillarbox.json("outbox", "audit", "--event", event)["entries"]) == count

    @on_sqlite
    def test_events_that_are_not_there_have_a_line_each(self, pillarbox: CommandLine, dead: Database) -> None:
        other = ABSENT.replace("8", "9")
        done = pillarbox("outbox", "redrive", event_of(pillarbox, "A"), ABSENT, other, code=Exit.PROBLEM)
        assert [line.split(":")[1] for line in done.stderr.splitlines()] == [
            f" the outbox has no event {ABSENT}",
            f" the outbox has no event {other}",
        ]
        assert requests(dead) == []

    @on_sqlite
    @pytest.mark.usefixtures("migrated")
    def test_nothing_to_do(self, pillarbox: CommandLine) -> None:
        assert pillarbox("outbox", "redrive", "--all").stdout == "redrive: nothing to do\n"

    @pytest.mark.parametrize(
        ("arguments", "what"),
        [
            ([], "Name events, or choose by --route"),
            (["--status", "RETRYING"], "or say --all"),
            (["--all", "--key", "A"], "--all goes with no ID and no filter"),
            (["--all", ABSENT], "--all goes with no ID and no filter"),
            (["--status", "PENDING", "--all"], "'PENDING' is not one of 'FAILED', 'RETRYING'"),
            (["--older-than", "7"], "'7' is no duration: write '90s'"),
            (["--all", "--rate", "0"], "0"),
            (["--all", "--rate", "nan"], "'nan' is not a finite number"),
            (["--key", "\udcff"], "not valid UTF-8"),
            (["--all", "--reason", "\udcff"], "not valid UTF-8"),
            (["--all", "--by", ""], "a name has 1 to 200 characters"),
        ],
    )
    def test_wrong_usage(self, pillarbox: CommandLine, arguments: list[str], what: str) -> None:
        line = pillarbox.complaint("outbox", "redrive", *arguments, code=Exit.USAGE)
        assert what in line
        assert line.endswith("See `pillarbox outbox redrive --help`.")

    @pytest.mark.parametrize(
        ("database", "number", "code"),
        [("sqlite", signal.SIGINT, Exit.INTERRUPTED), ("embedded", signal.SIGTERM, Exit.TERMINATED)],
        indirect=["database"],
    )
    def test_stops_between_two_portions(
        self, pillarbox: CommandLine, dead: Database, number: signal.Signals, code: int
    ) -> None:
        process = pillarbox.start("outbox", "redrive", "--all", "--rate", "0.02", "--json", stderr=subprocess.PIPE)
        wait_until(lambda: requests(dead) != [], "the first request")
        process.send_signal(number)
        printed, complaint = process.communicate(timeout=60)
        assert (process.returncode, complaint) == (code, "")
        report = json.loads(printed)
        assert (report["requested"], report["left"]) == (1, 5)
        assert requests(dead) == ["redrive"]
        (entry,) = pillarbox.json("outbox", "audit")["entries"]
        assert (entry["id"], entry["details"]["count"]) == (report["audit"], 1)

    @on_sqlite
    def test_keeps_to_a_rate(self, pillarbox: CommandLine, dead: Database) -> None:
        assert pillarbox.json("outbox", "redrive", "--all", "--rate", "50")["requested"] == 6
        assert len(requests(dead)) == 6


class TestDiscard:
    @on_postgres
    def test_needs_a_yes(self, pillarbox: CommandLine, filled: Database) -> None:
        wanted = ["outbox", "discard", "--status", "PENDING", "--tenant", "acme"]
        line = pillarbox.complaint(*wanted, code=Exit.USAGE)
        assert "this would discard 4 deliveries (status PENDING, tenant acme): say --yes" in line
        assert requests(filled) == []
        assert pillarbox.json(*wanted, "--dry-run")["selected"] == 4
        assert pillarbox.json(*wanted, "--yes")["requested"] == 4
        assert requests(filled) == ["discard"] * 4

    @on_sqlite
    @pytest.mark.parametrize(("answer", "code", "asked"), [("y", 0, 6), ("n", Exit.PROBLEM, 0), ("", Exit.PROBLEM, 0)])
    def test_asks_on_a_terminal(
        self, pillarbox: CommandLine, dead: Database, answer: str, code: int, asked: int
    ) -> None:
        ours, theirs = pty.openpty()
        process = pillarbox.start("outbox", "discard", "--all", stdin=theirs, stderr=theirs)
        os.close(theirs)
        with os.fdopen(ours, "r+b", buffering=0) as terminal:
            question = b""
            while b"[y/N]" not in question:
                question += terminal.read(100)
            assert b"Discard 6 deliveries (status FAILED)?" in question
            terminal.write(f"{answer}\n".encode())
            process.communicate(timeout=60)
        assert process.returncode == code
        assert len(requests(dead)) == asked


class TestEdit:
    def test_from_a_file(self, pillarbox: CommandLine, dead: Database) -> None:
        event = event_of(pillarbox, "A")
        (pillarbox.folder / "body.json").write_text('{"sku": "b"}')
        arguments = ["outbox", "edit", event, "--route", BROKER, "--body", "body.json", "--reason", "wrong sku"]
        checked = pillarbox.json(*arguments, "--dry-run")
        assert (checked["bytes"], checked["audit"]) == (12, None)
        assert requests(dead) == []
        done = pillarbox.json(*arguments)
        assert UUID(done["new_event_id"]).version == 7
        assert (done["event_id"], done["route"], done["unserved"]) == (event, BROKER, [BROKER])
        ((body,),) = execute(dead, "SELECT body FROM pillarbox_requests")
        assert bytes(body) == b'{"sku": "b"}'
        (entry,) = pillarbox.json("outbox", "audit", "--event", event)["entries"]
        assert entry["details"] == {"route": BROKER, "new_event_id": done["new_event_id"]}
        (entry,) = pillarbox.json("outbox", "audit", "--payload")["entries"]
        assert json.loads(base64.b64decode(entry["details"]["old_body"])) == {"sku": "a"}
        assert "waits already" in pillarbox.complaint(*arguments, code=Exit.PROBLEM)

    @on_sqlite
    def test_what_is_refused(self, pillarbox: CommandLine, dead: Database) -> None:
        event = event_of(pillarbox, "A")
        body = pillarbox.folder / "body"
        body.write_text("{}")
        arguments = ["outbox", "edit", event, "--body", "body"]
        line = pillarbox.complaint(*arguments, code=Exit.USAGE)
        assert "Missing option '--reason'" in line
        arguments += ["--reason", "because"]
        line = pillarbox.complaint(*arguments, code=Exit.USAGE)
        assert f"say --route '{BROKER}' or '{ARCHIVE}'" in line
        arguments += ["--route", ARCHIVE]
        for content, problem in (
            ("{", "the body is not a JSON object"),
            ("[1]", "the body is not a JSON object"),
            ('{"a": {"b": "\\u0000"}}', "a.b: holds a NUL character"),
            ("x" * 1_048_577, "the body has 1,048,577 bytes, and 1,048,576 are allowed"),
        ):
            body.write_text(content)
            assert problem in pillarbox.complaint(*arguments, code=Exit.PROBLEM)
        leave(dead, Status.SENT, outbox.c.topic != "stock.events")
        line = pillarbox.complaint(*arguments, code=Exit.PROBLEM)
        assert f"only a delivery that has failed can be edited; event {event} is SENT for '{ARCHIVE}'" in line
        arguments[2] = ABSENT
        assert "the outbox has no event" in pillarbox.complaint(*arguments, code=Exit.PROBLEM)
        assert requests(dead) == []

    @on_sqlite
    def test_from_standard_input_whatever_it_is(self, pillarbox: CommandLine, dead: Database) -> None:
        event = event_of(pillarbox, "A")
        headers = "json_set(headers, '$.content_type', 'application/x-protobuf')"
        execute(dead, f"UPDATE pillarbox_outbox SET headers = {headers}")
        process = pillarbox.start(
            *("outbox", "edit", event, "--route", BROKER, "--body", "-", "--reason", "because"), stdin=subprocess.PIPE
        )
        printed, _ = process.communicate("\x01\x02", timeout=60)
        assert process.returncode == 0
        assert re.match(r"edit: asked for, to go on as event [0-9a-f-]{36}, audit entry 1\n", printed)
        assert execute(dead, "SELECT body FROM pillarbox_requests") == [(b"\x01\x02",)]

    @on_sqlite
    def test_a_cloud_event_carries_its_new_identity(self, pillarbox: CommandLine, dead: Database) -> None:
        event = event_of(pillarbox, "A")
        headers = "json_set(headers, '$.content_type', 'application/cloudevents+json')"
        execute(dead, f"UPDATE pillarbox_outbox SET headers = {headers}")
        body = pillarbox.folder / "body"
        body.write_text('{"id": "old"}')
        arguments = ["outbox", "edit", event, "--route", BROKER, "--body", "body", "--reason", "because"]
        assert "has no attribute 'specversion'" in pillarbox.complaint(*arguments, code=Exit.PROBLEM)
        envelope = {"specversion": "1.0", "id": event, "type": "stock.item.stored", "schemaversion": "v1"}
        body.write_text(json.dumps(envelope | {"time": "2024-05-01T12:00:00Z", "data": {"sku": "b"}}))
        done = pillarbox.json(*arguments)
        ((sent,),) = execute(dead, "SELECT body FROM pillarbox_requests")
        assert json.loads(sent)["id"] == done["new_event_id"] != event


class TestLanes:
    @on_mariadb
    def test_list_is_the_default(self, pillarbox: CommandLine, filled: Database) -> None:
        relay(filled)
        listed = pillarbox.json("lanes")["lanes"]
        assert [each["route"] for each in listed] == [ARCHIVE] * 16 + [BROKER] * 16
        assert sum(each["pending"] for each in listed) == 6
        assert {each["owner"] for each in listed} == {"relay-1"}
        assert len(pillarbox.json("lanes", "list", "--route", BROKER)["lanes"]) == 16
        lines = pillarbox("lanes").stdout.splitlines()
        assert lines[0].split()[:8] == ["ROUTE", "SHARD", "OWNER", "LEASE", "EPOCH", "BATCH", "PENDING", "WAITING"]
        assert len(lines) == 33
        assert "pause" in pillarbox("lanes", "--help").stdout

    @on_mariadb
    def test_pause_rate_resume(self, pillarbox: CommandLine, filled: Database) -> None:
        dry = pillarbox.json("lanes", "pause", BROKER, "--dry-run")
        assert dry == {
            "action": "pause",
            "target": f"route {BROKER}",
            "changed": 16,
            "audit": None,
            "dry_run": True,
        }
        assert pillarbox("lanes", "pause", BROKER, "--reason", "night").stdout == (
            f"pause route {BROKER}: 16 lanes, audit entry 1\n"
        )
        assert pillarbox("lanes", "pause", f"{BROKER}/3").stdout == f"pause lane {BROKER}/3: nothing to do\n"
        assert pillarbox("lanes", "resume", f"{BROKER}/3").stdout == f"resume lane {BROKER}/3: 1 lane, audit entry 2\n"
        assert execute(filled, "SELECT count(*) FROM pillarbox_lanes WHERE paused") == [(15,)]
        printed = pillarbox("lanes", "rate", f"{BROKER}/3", "--per-second", "2.5").stdout
        assert printed == f"rate lane {BROKER}/3: 2.5 per second in each lane: 1 lane, audit entry 3\n"
        assert {each["rate"] for each in pillarbox.json("lanes")["lanes"]} == {None, 2.5}
        assert "rate 2.5/s" in pillarbox("lanes").stdout
        assert pillarbox.json("lanes", "rate", BROKER, "--none")["changed"] == 1
        assert pillarbox("lanes", "pause", "--tenant", "acme").stdout == "pause tenant acme, audit entry 5\n"
        assert pillarbox.json("lanes", "rate", "--tenant", "acme", "--per-second", "9")["changed"] == 1
        assert execute(filled, "SELECT paused, rate FROM pillarbox_tenants") == [(True, 9.0)]

    @on_postgres
    def test_release(self, pillarbox: CommandLine, filled: Database) -> None:
        relay(filled)
        lane = f"{BROKER}/3"
        line = pillarbox.complaint("lanes", "release", lane, code=Exit.USAGE)
        assert f"this would take lane {lane} from relay-1, whose lease has " in line
        assert pillarbox.json("lanes", "release", lane, "--dry-run")["changed"] == 1
        before = execute(filled, "SELECT sum(epoch) FROM pillarbox_lanes")[0][0]
        assert pillarbox.json("lanes", "release", lane, "--yes", "--reason", "stuck")["changed"] == 1
        assert execute(filled, "SELECT sum(epoch) FROM pillarbox_lanes")[0][0] == before + 1
        free = "locked_by IS NULL AND locked_until IS NULL AND token IS NULL"
        assert execute(filled, f"SELECT shard FROM pillarbox_lanes WHERE {free}") == [(3,)]
        assert "nothing to do" in pillarbox("lanes", "release", lane, "--yes").stdout
        assert "name one lane" in pillarbox.complaint("lanes", "release", BROKER, "--yes", code=Exit.USAGE)

    @on_sqlite
    @pytest.mark.usefixtures("filled")
    @pytest.mark.parametrize(
        ("arguments", "what", "code"),
        [
            (["pause"], "Name either a route or lane, or a --tenant", Exit.USAGE),
            (["pause", BROKER, "--tenant", "acme"], "Name either a route or lane, or a --tenant", Exit.USAGE),
            (["rate", BROKER], "Say either --per-second or --none", Exit.USAGE),
            (["rate", BROKER, "--per-second", "1", "--none"], "Say either --per-second or --none", Exit.USAGE),
            (["rate", "--tenant", "acme", "--per-second", "inf"], "'inf' is not a finite number", Exit.USAGE),
            (["release"], "Missing argument 'ROUTE/SHARD'", Exit.USAGE),
            (["pause", "nothing"], "there is no route or lane 'nothing': see `pillarbox lanes list`", Exit.PROBLEM),
            (["pause", f"{BROKER}/99"], f"route '{BROKER}' has no lane 99", Exit.PROBLEM),
            (["nonsense"], "No such command 'nonsense'", Exit.USAGE),
        ],
    )
    def test_mistakes(self, pillarbox: CommandLine, arguments: list[str], what: str, code: int) -> None:
        assert what in pillarbox.complaint("lanes", *arguments, code=code)


class TestWhy:
    def test_each_delivery_has_its_answer(self, pillarbox: CommandLine, filled: Database) -> None:
        event = event_of(pillarbox, "A")
        answers = pillarbox.json("why", event)
        assert answers["event_id"] == event
        assert [tuple(each) for each in answers["deliveries"]] == [
            ("event_id", "route", "state", "cause", "detail", "remedy")
        ] * 2
        assert {(each["route"], each["cause"]) for each in answers["deliveries"]} == {
            (BROKER, "no-relay"),
            (ARCHIVE, "no-relay"),
        }
        relay(filled)
        pillarbox("lanes", "pause", ARCHIVE, "--by", "Anna", "--reason", "night")
        lines = pillarbox("why", event).stdout.splitlines()
        assert lines[:2] == [
            f"{BROKER}: PENDING (backlog)",
            f"  relay-1 works on lane {lane_of(filled, BROKER)}, and 0 deliveries of the lane go first",
        ]
        assert lines[2] == f"{ARCHIVE}: PENDING (lane-paused)"
        assert re.fullmatch(r"  route \S+ was paused by Anna at \S+ \(night\)", lines[3])
        assert lines[4] == "  `pillarbox lanes resume 'archive:stock.{tenant}'`"

    @on_sqlite
    @pytest.mark.usefixtures("filled")
    def test_an_event_that_is_not_there(self, pillarbox: CommandLine) -> None:
        printed = pillarbox("why", ABSENT, code=Exit.PROBLEM).stdout
        assert printed.startswith(f"event {ABSENT}: not in the outbox (absent)\n  it was raised at 1970-01-01")
        (answer,) = pillarbox.json("why", ABSENT, code=Exit.PROBLEM)["deliveries"]
        assert (answer["cause"], answer["state"], answer["route"]) == ("absent", None, None)

    @on_sqlite
    def test_data_of_others_does_not_reach_the_terminal(self, pillarbox: CommandLine, filled: Database) -> None:
        relay(filled, "\x1b[2J")
        event = event_of(pillarbox, "A")
        pillarbox("lanes", "rate", "--tenant", "\x1b[2J", "--per-second", "1", "--reason", HOSTILE_ERROR)
        commands = (["why", event], ["trace", event], ["lanes"], ["outbox", "audit"])
        for status in (Status.FAILED, Status.RETRYING, Status.PENDING):
            leave(filled, status, last_error=HOSTILE_ERROR)
            for arguments in commands:
                printed = pillarbox(*arguments).stdout
                assert not CONTROL.search(printed)
                assert "\nerror: faked" not in printed
        execute(filled, "UPDATE pillarbox_lanes SET trouble = :e", e=HOSTILE_ERROR)
        for arguments in (["why", event], ["lanes"]):
            assert r"\x1b]0;owned\x07\nerror: faked" in pillarbox(*arguments).stdout
        assert not CONTROL.search(pillarbox("doctor", code=Exit.PROBLEM).stdout)


def lane_of(database: Database, route: str) -> str:
    found = "SELECT shard FROM pillarbox_outbox WHERE topic = 'stock.events' ORDER BY id"
    return f"{route}/{execute(database, found)[0][0]}"


class TestTrace:
    def test_a_life(self, pillarbox: CommandLine, dead: Database) -> None:
        event = event_of(pillarbox, "A")
        pillarbox("outbox", "redrive", event, "--route", BROKER, "--by", "Anna", "--reason", "mended")
        steps = pillarbox.json("trace", event)["steps"]
        ours = [(each["what"], each["detail"]) for each in steps if each["route"] in (BROKER, None)]
        assert [what for what, _ in ours] == [
            "raised",
            "written",
            "redrive asked for by Anna",
            "refused 5 times",
            "failed",
            "redrive waits",
        ]
        assert ours[2][1] == "mended; audit entry 1"
        assert ours[3][1] == "too long"
        lines = pillarbox("trace", event).stdout.splitlines()
        assert lines[0].split() == ["AT", "ROUTE", "WHAT", "DETAIL"]
        assert len(lines) == len(steps) + 1
        execute(dead, "DELETE FROM pillarbox_outbox")
        assert [each["what"] for each in pillarbox.json("trace", event)["steps"]] == ["redrive asked for by Anna"]

    @on_sqlite
    def test_what_a_redrive_has_forgotten_is_not_told(self, pillarbox: CommandLine, dead: Database) -> None:
        event = event_of(pillarbox, "A")
        leave(dead, Status.SENT, sent_at=datetime(2999, 1, 1, tzinfo=UTC), batch=7, number=3)
        steps = [each["what"] for each in pillarbox.json("trace", event)["steps"] if each["route"] == BROKER]
        assert steps == ["raised", "written", "sent"]
        assert "refused" not in pillarbox("trace", event).stdout

    @on_sqlite
    def test_a_time_that_is_none_is_not_told(self, pillarbox: CommandLine, filled: Database) -> None:
        event = event_of(pillarbox, "A")
        for time in ("2026-01-01T00:00:00", "yesterday"):
            execute(filled, f"UPDATE pillarbox_outbox SET headers = json_set(headers, '$.occurred_at', '{time}')")
            steps = [each["what"] for each in pillarbox.json("trace", event)["steps"] if each["route"] == BROKER]
            assert steps == ["written", "pending"]

    @on_sqlite
    @pytest.mark.usefixtures("filled")
    def test_an_event_that_is_not_there(self, pillarbox: CommandLine) -> None:
        assert f"the outbox has no event {ABSENT}" in pillarbox.complaint("trace", ABSENT, code=Exit.PROBLEM)


class TestDoctor:
    @on_postgres
    def test_relays_and_what_they_serve(self, pillarbox: CommandLine, filled: Database) -> None:
        found = checks(pillarbox.json("doctor"))
        assert found["relays"]["state"] == "warning"
        assert "`pillarbox relay`, or `pillarbox relay MODULE:BOX`" in found["relays"]["remedy"]
        relay(filled)
        found = checks(pillarbox.json("doctor"))
        assert (found["relays"]["state"], found["lanes"]["state"]) == ("ok", "ok")
        assert found["relays"]["found"] == f"relay-1 serves {ARCHIVE}, {BROKER}"
        execute(filled, "UPDATE pillarbox_relays SET shards = '[1, 2]'")
        assert checks(pillarbox.json("doctor"))["relays"]["found"].endswith(", 2 shards only")

    @on_sqlite
    def test_lanes_that_do_not_move(self, pillarbox: CommandLine, filled: Database) -> None:
        relay(filled)
        execute(filled, "UPDATE pillarbox_lanes SET locked_until = '2001-01-01 00:00:00' WHERE shard < 2")
        found = [each for each in pillarbox.json("doctor")["checks"] if each["name"] == "lanes"]
        assert re.match(r"relay-1 holds 4 lanes, and its lease has expired \d+\.\d d ago", found[-1]["found"])
        assert found[-1]["remedy"] == "another relay takes them over"
        execute(
            filled,
            "UPDATE pillarbox_lanes SET locked_until = '2999-01-01', trouble = 'refused', trouble_until = '2999-01-01'",
        )
        report = pillarbox.json("doctor")
        assert (report["problems"], checks(report)["lanes"]["state"]) == (0, "warning")
        assert "16 lanes of route" in checks(report)["lanes"]["found"]
        execute(filled, "UPDATE pillarbox_lanes SET trouble_until = NULL WHERE shard = 5")
        report = pillarbox.json("doctor", code=Exit.PROBLEM)
        assert checks(report)["lanes"]["found"] == f"1 lane of route '{BROKER}' cannot send: refused"

    @on_sqlite
    def test_pauses_and_a_backlog(self, pillarbox: CommandLine, filled: Database) -> None:
        relay(filled)
        found = checks(pillarbox.json("doctor"))
        assert (found["pauses"]["state"], found["backlog"]["state"]) == ("ok", "ok")
        assert re.search(r"3 deliveries of route '.*' pending, the oldest for \d", found["backlog"]["found"])
        pillarbox("lanes", "pause", f"{BROKER}/3")
        pillarbox("lanes", "pause", "--tenant", "acme")
        execute(filled, "UPDATE pillarbox_outbox SET created_at = '2001-01-01 00:00:00'")
        report = pillarbox.json("doctor")
        pauses = [each for each in report["checks"] if each["name"] == "pauses"]
        assert [each["found"] for each in pauses] == [f"1 lane of route '{BROKER}' paused", "tenant 'acme' paused"]
        assert checks(report)["backlog"]["state"] == "warning"
        pillarbox("lanes", "resume", "--tenant", "acme")
        pillarbox("lanes", "rate", "--tenant", "acme", "--per-second", "2.5")
        pillarbox("lanes", "resume", BROKER)
        held, _ = [each for each in pillarbox.json("doctor")["checks"] if each["name"] == "pauses"]
        assert (held["state"], held["found"]) == ("ok", "tenant 'acme' held to 2.5 per second in each lane")

    @on_sqlite
    @pytest.mark.usefixtures("migrated")
    def test_shards_that_the_database_does_not_have(self, pillarbox: CommandLine) -> None:
        assert checks(pillarbox.json("doctor", PILLARBOX_SHARDS="16"))["shards"]["state"] == "ok"
        found = checks(pillarbox.json("doctor", code=Exit.PROBLEM, PILLARBOX_SHARDS="8"))["shards"]
        assert found["found"] == "shards (from PILLARBOX_SHARDS) is 8, and the database has 16"
        assert found["remedy"].endswith("say 16, or take it out")

    @on_sqlite
    @pytest.mark.usefixtures("dead")
    def test_what_it_tells_to_look_at_shows_the_error(self, pillarbox: CommandLine) -> None:
        remedy = checks(pillarbox.json("doctor", code=Exit.PROBLEM))["failures"]["remedy"]
        assert remedy.startswith(
            "see `pillarbox outbox list --status FAILED`, and for each `pillarbox why EVENT_ID`; then redrive"
        )
        listed = pillarbox("outbox", "list", "--status", "FAILED").stdout.splitlines()
        assert "too long" in pillarbox("why", listed[1].split()[-1]).stdout
