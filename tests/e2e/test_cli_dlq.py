"""``pillarbox dlq`` in the hands of those who mend things: real processes, on real databases."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
from typing import Any
from uuid import uuid4

import pytest

from pillarbox.cli.output import Exit
from tests.e2e import test_cli, test_cli_consume
from tests.e2e.test_cli import HOSTILE_ERROR, CommandLine, execute, on_postgres, on_sqlite
from tests.e2e.test_cli_consume import notes, publish
from tests.servers import Database, wait_until

pillarbox = test_cli.pillarbox
database = test_cli.database
migrated = test_cli.migrated
shop = test_cli_consume.shop

ABSENT = "999"


@pytest.fixture
def rejected(pillarbox: CommandLine, shop: Database) -> Database:
    """Three letters of two tenants: what they ask for was rejected."""
    publish(shop, -1, -2, tenant="acme")
    publish(shop, -3, tenant="globex")
    pillarbox("consume", "shop:box", "bills", "--drain")
    return shop


def letters(pillarbox: CommandLine, *arguments: str) -> list[Any]:
    found: list[Any] = pillarbox.json("dlq", "list", *arguments)["letters"]
    return found


def ids(pillarbox: CommandLine, *arguments: str) -> list[str]:
    return [str(it["id"]) for it in letters(pillarbox, *arguments)]


def audit(pillarbox: CommandLine) -> list[Any]:
    entries: list[Any] = pillarbox.json("outbox", "audit", "--payload")["entries"]
    return entries


def be_generous(pillarbox: CommandLine) -> None:
    """From now on the handler takes everything."""
    (pillarbox.folder / "generous").touch()


class TestLook:
    @pytest.mark.usefixtures("rejected")
    def test_the_list_and_its_filters(self, pillarbox: CommandLine) -> None:
        found = letters(pillarbox)
        assert [(it["consumer"], it["kind"], it["state"], it["attempts"]) for it in found] == [
            ("bills", "rejected", "open", 1)
        ] * 3
        assert {it["reason"] for it in found} == {"nobody pays less than nothing"}
        assert len(letters(pillarbox, "--tenant", "acme")) == 2
        assert [it["tenant"] for it in letters(pillarbox, "--key", "key--3")] == ["globex"]
        assert len(letters(pillarbox, "--type", "tests.consume.paid", "--consumer", "bills")) == 3
        assert letters(pillarbox, "--kind", "poison", "--kind", "held") == []
        assert letters(pillarbox, "--topic", "elsewhere") == letters(pillarbox, "--state", "discarded") == []
        lines = pillarbox("dlq", "list", "--limit", "2").stdout.splitlines()
        assert lines[0].split()[:3] == ["ID", "STATE", "KIND"]
        assert lines[-1] == f"there are more: --after {found[1]['id']}"
        rest = pillarbox.json("dlq", "list", "--after", str(found[1]["id"]))
        assert ([it["id"] for it in rest["letters"]], rest["next"]) == ([found[2]["id"]], None)

    @pytest.mark.usefixtures("rejected")
    def test_one_letter_whose_body_is_shown_on_request(self, pillarbox: CommandLine) -> None:
        (letter,) = ids(pillarbox, "--key", "key--3")
        found = pillarbox.json("dlq", "show", letter)
        assert (found["headers"]["event_type"], found["headers"]["tenant_id"]) == ("tests.consume.paid", "globex")
        assert "body" not in found
        found = pillarbox.json("dlq", "show", letter, "--payload")
        assert (json.loads(found["body"])["number"], found["edited_body"]) == (-3, None)
        text = pillarbox("dlq", "show", letter, "--payload").stdout
        assert "header event_type" in text
        assert '"number":-3' in text

    @on_sqlite
    def test_what_strangers_say_does_nothing_to_the_terminal(self, pillarbox: CommandLine, rejected: Database) -> None:
        execute(
            rejected, "UPDATE pillarbox_letters SET reason = :reason, body = :body", reason=HOSTILE_ERROR, body=b"\xff"
        )
        said = [pillarbox("dlq", *it).stdout for it in (["list"], ["show", ids(pillarbox)[0], "--payload"])]
        assert not any("\x1b" in out or "\nerror: faked" in out for out in said)
        assert "not text: 1 byte" in said[1]

    @on_sqlite
    @pytest.mark.usefixtures("migrated")
    def test_nothing(self, pillarbox: CommandLine) -> None:
        assert pillarbox("dlq", "list").stdout == "no letters\n"
        complaint = pillarbox.complaint("dlq", "show", ABSENT, code=Exit.PROBLEM)
        assert complaint == "error: there is no letter 999: see `pillarbox dlq list`"


class TestRedrive:
    @pytest.mark.usefixtures("rejected")
    def test_a_dry_run_then_one_that_fails_then_one_that_succeeds(self, pillarbox: CommandLine) -> None:
        wanted = ["dlq", "redrive", "shop:box", "--consumer", "bills", "--tenant", "acme"]
        [bills] = [it for it in pillarbox.json("consumers", "list")["consumers"] if it["name"] == "bills"]
        handled = bills["handled"]
        dry = pillarbox.json(*wanted, "--dry-run")
        assert (dry["selected"], dry["done"], dry["left"], len(dry["sample"]), dry["results"]) == (2, 0, 2, 2, [])
        assert pillarbox(*wanted, "--dry-run").stdout.startswith("redrive: 2 letters would be taken\nID ")
        assert audit(pillarbox) == []

        failed = pillarbox.json(*wanted, code=Exit.PROBLEM)
        assert (failed["done"], failed["failed"], failed["left"]) == (0, 2, 0)
        assert failed["results"][0]["reason"] == "Reject: nobody pays less than nothing"
        assert [it["attempts"] for it in letters(pillarbox, "--tenant", "acme")] == [2, 2]

        be_generous(pillarbox)
        done = pillarbox.json(*wanted, "--reason", "we are generous now", "--by", "anna")
        assert (done["done"], done["failed"], done["gone"], done["left"]) == (2, 0, 0, 0)
        assert {"done -1", "done -2"} <= {*notes(pillarbox)}
        [bills] = [it for it in pillarbox.json("consumers", "list")["consumers"] if it["name"] == "bills"]
        assert bills["handled"] == handled + 2
        assert [it["state"] for it in letters(pillarbox, "--state", "redriven")] == ["redriven"] * 2
        assert len(letters(pillarbox)) == 1
        entry = audit(pillarbox)[0]
        assert (entry["who"], entry["action"], entry["reason"]) == ("anna", "letter-redrive", "we are generous now")
        assert entry["target"] == f"letter {entry['details']['letter']} of bills"
        assert entry["event_id"] in {it["event_id"] for it in done["results"]}
        assert entry["details"]["outcome"] == "done"
        assert [it["details"]["outcome"] for it in audit(pillarbox)] == ["done", "done", "failed", "failed"]
        assert pillarbox(*wanted).stdout == "redrive: nothing to do\n"
        # What people did with a letter is part of the life of its event.
        steps = pillarbox.json("trace", entry["event_id"])["steps"]
        assert "letter-redrive asked for by anna" in {it["what"] for it in steps}

    @on_sqlite
    @pytest.mark.usefixtures("rejected")
    def test_stop_on_error_and_limit(self, pillarbox: CommandLine) -> None:
        stopped = pillarbox.json("dlq", "redrive", "shop:box", "--all", "--stop-on-error", code=Exit.PROBLEM)
        assert (stopped["selected"], stopped["failed"], stopped["left"]) == (3, 1, 2)
        be_generous(pillarbox)
        assert pillarbox.json("dlq", "redrive", "shop:box", "--all", "--limit", "1")["done"] == 1
        said = pillarbox("dlq", "redrive", "shop:box", *ids(pillarbox), "--rate", "1000").stdout.splitlines()
        assert said[0] == "redrive: 2 of 2 letters done"
        assert [line.split(" of bills ")[1] for line in said[1:]] == ["done", "done"]

    @on_sqlite
    def test_h80_what_was_dealt_with_since_is_superseded(self, pillarbox: CommandLine, rejected: Database) -> None:
        be_generous(pillarbox)
        execute(rejected, "UPDATE pillarbox_letters SET kind = 'unknown', event_id = NULL WHERE tenant = 'acme'")
        said = pillarbox("dlq", "redrive", "shop:box", "--all").stdout.splitlines()
        assert said[0] == "redrive: 1 of 3 letters done"
        ends = "is closed as superseded: the same message came again, and was dealt with then"
        assert sum(line.endswith(ends) for line in said) == 2
        assert [it for it in notes(pillarbox) if it.startswith("done")] == ["done -3"]
        assert len(letters(pillarbox, "--state", "superseded")) == 2
        assert sorted(it["details"]["outcome"] for it in audit(pillarbox)) == ["done", "superseded", "superseded"]

    @on_postgres
    @pytest.mark.usefixtures("rejected")
    def test_h89_of_two_who_redrive_the_same_letter_one_succeeds_and_the_other_is_told(
        self, pillarbox: CommandLine
    ) -> None:
        be_generous(pillarbox)
        (pillarbox.folder / "hold").touch()
        (letter,) = ids(pillarbox, "--key", "key--3")
        before = len(notes(pillarbox))
        both = [
            pillarbox.start("dlq", "redrive", "shop:box", letter, "--by", name, "--json") for name in ("anna", "bert")
        ]
        wait_until(lambda: len(notes(pillarbox)) > before, "one of them to be at work")
        wait_until(lambda: len(audit(pillarbox)) == 2, "the other one to have asked, too")
        (pillarbox.folder / "hold").unlink()
        said = [json.loads(process.communicate(timeout=60)[0]) for process in both]
        assert sorted((it["done"], it["gone"]) for it in said) == [(0, 1), (1, 0)]
        assert notes(pillarbox).count("done -3") == 1
        assert sorted(it["details"]["outcome"] for it in audit(pillarbox)) == ["done", "gone"]
        late = pillarbox("dlq", "redrive", "shop:box", letter).stdout.splitlines()
        assert late == ["redrive: nothing to do", f"letter {letter} of bills is not open any more: it is redriven"]

    @on_sqlite
    def test_held_letters_are_left_to_the_projection_unless_they_are_asked_for(
        self, pillarbox: CommandLine, rejected: Database
    ) -> None:
        (letter,) = ids(pillarbox, "--key", "key--3")
        execute(rejected, "UPDATE pillarbox_letters SET kind = 'held' WHERE id = :id", id=int(letter))
        be_generous(pillarbox)
        assert pillarbox.json("dlq", "redrive", "shop:box", "--all")["done"] == 2
        discard = ["dlq", "discard", "--consumer", "bills", "--reason", "x", "--yes"]
        assert pillarbox.json(*discard)["selected"] == 0
        assert pillarbox.json(*discard, "--kind", "held")["done"] == 1

    @on_sqlite
    @pytest.mark.usefixtures("rejected")
    def test_a_letter_of_a_consumer_that_the_box_does_not_have(self, pillarbox: CommandLine) -> None:
        complaint = pillarbox.complaint("dlq", "redrive", "shop:doomed", "--all", code=Exit.USAGE)
        assert complaint.startswith("error: shop:doomed has no consumer 'bills' (3 letters): it has fine, lonely; ")
        assert pillarbox.complaint("dlq", "redrive", "shop:box", ABSENT, code=Exit.PROBLEM).endswith(
            "`pillarbox dlq list`"
        )
        assert "or say --all" in pillarbox.complaint("dlq", "redrive", "shop:box", code=Exit.USAGE)
        assert audit(pillarbox) == []

    @on_sqlite
    @pytest.mark.usefixtures("rejected")
    def test_all_and_a_filter_or_a_name(self, pillarbox: CommandLine) -> None:
        for more in (["1"], ["--kind", "poison"], ["--consumer", "bills"]):
            complaint = pillarbox.complaint("dlq", "redrive", "shop:box", "--all", *more, code=Exit.USAGE)
            assert "--all goes with no ID and no filter" in complaint

    @on_sqlite
    @pytest.mark.usefixtures("rejected")
    @pytest.mark.parametrize("outcome", ["done", "failed"])
    def test_a_signal_stops_between_two_letters_whatever_came_of_the_first(
        self, pillarbox: CommandLine, outcome: str
    ) -> None:
        if outcome == "done":
            be_generous(pillarbox)
        process = pillarbox.start("dlq", "redrive", "shop:box", "--all", "--rate", "0.01", "--json")
        wait_until(
            lambda: [it["details"].get("outcome") for it in audit(pillarbox)] == [outcome], "the first one to be noted"
        )
        process.send_signal(signal.SIGTERM)
        said = json.loads(process.communicate(timeout=60)[0])
        assert (process.returncode, said[outcome], said["left"]) == (Exit.TERMINATED, 1, 2)


class TestEdit:
    @pytest.mark.usefixtures("rejected")
    def test_another_body_is_used_and_the_original_kept(self, pillarbox: CommandLine) -> None:
        (letter,) = ids(pillarbox, "--key", "key--3")
        (pillarbox.folder / "better.json").write_text('{"number": 33}')
        command = ["dlq", "edit", letter, "--body", "better.json", "--reason", "a typing error", "--by", "anna"]
        assert pillarbox.json(*command, "--dry-run")["audit"] is None
        done = pillarbox.json(*command)
        (entry,) = audit(pillarbox)
        assert (entry["id"], entry["action"], entry["who"]) == (done["audit"], "letter-edit", "anna")
        assert json.loads(base64.b64decode(entry["details"]["old_body"]))["number"] == -3
        found = pillarbox.json("dlq", "show", letter, "--payload")
        assert (json.loads(found["body"])["number"], found["edited_body"]) == (-3, '{"number": 33}')
        pillarbox("dlq", "redrive", "shop:box", letter)
        assert "done 33" in notes(pillarbox)
        assert pillarbox.complaint(*command, code=Exit.PROBLEM).endswith("is not open any more: it is redriven")
        steps = pillarbox.json("trace", entry["event_id"])["steps"]
        assert "letter-edit asked for by anna" in {it["what"] for it in steps}

    @on_sqlite
    def test_what_nobody_could_read_is_refused(self, pillarbox: CommandLine, rejected: Database) -> None:
        (letter,) = ids(pillarbox, "--key", "key--3")
        body = pillarbox.folder / "bad.json"
        command = ["dlq", "edit", letter, "--body", "bad.json"]
        body.write_text("{")
        assert "Missing option '--reason'" in pillarbox.complaint(*command, code=Exit.USAGE)
        said = pillarbox.complaint(*command, "--reason", "x", code=Exit.PROBLEM)
        assert said.startswith("error: the body cannot be read as application/json: ")
        body.write_bytes(b'"' + b"x" * 1_048_576 + b'"')
        assert "1,048,576 are allowed" in pillarbox.complaint(*command, "--reason", "x", code=Exit.PROBLEM)

        event_id = letters(pillarbox, "--key", "key--3")[0]["event_id"]
        headers = {"content_type": "application/cloudevents+json", "event_id": event_id}
        execute(rejected, "UPDATE pillarbox_letters SET headers = :headers", headers=json.dumps(headers))
        cloud: dict[str, Any] = {
            "specversion": "1.0",
            "type": "tests.consume.paid",
            "schemaversion": "v1",
            "source": "x",
        }
        cloud |= {"time": "2024-01-01T00:00:00Z", "data": {"number": 1}}
        body.write_text(json.dumps(cloud | {"id": str(uuid4())}))
        said = pillarbox.complaint(*command, "--reason", "x", code=Exit.PROBLEM)
        assert said == f"error: the body is that of another event: its id must be {event_id}"
        body.write_text(json.dumps(cloud | {"id": event_id}))
        pillarbox(*command, "--reason", "x")


class TestDiscard:
    @pytest.mark.usefixtures("rejected")
    def test_for_good_and_with_a_reason(self, pillarbox: CommandLine) -> None:
        command = ["dlq", "discard", "--tenant", "acme"]
        assert "Missing option '--reason'" in pillarbox.complaint(*command, code=Exit.USAGE)
        command += ["--reason", "test orders", "--by", "anna"]
        assert pillarbox.json(*command, "--dry-run")["selected"] == 2
        complaint = pillarbox.complaint(*command, code=Exit.USAGE)
        assert complaint == "error: this would discard 2 letters: say --yes, as there is no terminal to ask on"
        done = pillarbox.json(*command, "--yes")
        assert (done["done"], done["gone"]) == (2, 0)
        assert [it["tenant"] for it in letters(pillarbox)] == ["globex"]
        trail = audit(pillarbox)
        assert [(it["who"], it["action"], it["reason"]) for it in trail] == [
            ("anna", "letter-discard", "test orders")
        ] * 2
        assert {it["event_id"] for it in trail} == {it["event_id"] for it in done["results"]}

    @on_sqlite
    @pytest.mark.usefixtures("rejected")
    def test_many_are_worked_through_page_by_page(self, pillarbox: CommandLine) -> None:
        before = "import pillarbox.cli.dlq as dlq; dlq.PAGE = 2"
        listed = pillarbox.python(before, "dlq", "list", "--json", code=0).stdout
        assert len(json.loads(listed)["letters"]) == 3
        done = pillarbox.python(before, "dlq", "discard", "--all", "--reason", "x", "--yes", "--json", code=0).stdout
        assert (json.loads(done)["done"], json.loads(done)["left"]) == (3, 0)
        assert letters(pillarbox) == []

    @on_postgres
    def test_h89_a_letter_that_is_being_redriven_is_not_discarded(
        self, pillarbox: CommandLine, rejected: Database
    ) -> None:
        be_generous(pillarbox)
        (pillarbox.folder / "hold").touch()
        (letter,) = ids(pillarbox, "--key", "key--3")
        before = len(notes(pillarbox))
        redriving = pillarbox.start("dlq", "redrive", "shop:box", letter, "--json")
        wait_until(lambda: len(notes(pillarbox)) > before, "the handler to be at work")
        discarding = pillarbox.start(
            "dlq", "discard", letter, "--reason", "x", "--yes", "--json", stderr=subprocess.PIPE
        )
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        wait_until(lambda: bool(execute(rejected, waiting)), "it to wait for the other one")
        (pillarbox.folder / "hold").unlink()
        assert json.loads(redriving.communicate(timeout=60)[0])["done"] == 1
        out, err = discarding.communicate(timeout=60)
        assert (json.loads(out)["gone"], err) == (1, "")
        assert [it["action"] for it in audit(pillarbox)] == ["letter-redrive"]
