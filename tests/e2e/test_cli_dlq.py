"""`pillarbox dlq` shows and mends what consumers could not take, and nothing else."""

from __future__ import annotations

import pytest

from pillarbox.cli.output import Exit
from pillarbox.outbox import Status
from tests.e2e import test_cli, test_cli_inbound
from tests.e2e.test_cli import CommandLine, checks, execute, leave, on_sqlite
from tests.e2e.test_cli_inbound import BILLING, EVENTS
from tests.servers import Database

pillarbox = test_cli.pillarbox
database = test_cli.database
migrated = test_cli.migrated
filled = test_cli.filled
both = test_cli_inbound.both


@pytest.fixture
def failed(both: Database) -> Database:
    """What goes out has failed, too."""
    leave(both, Status.FAILED, attempts=5, last_error="too long")
    return both


@pytest.mark.usefixtures("failed")
def test_lists_what_consumers_could_not_take(pillarbox: CommandLine) -> None:
    (found,) = pillarbox.json("dlq", "list")["deliveries"]
    assert (found["route"], found["status"], found["last_error"]) == (BILLING.name, "FAILED", "no such account")
    assert pillarbox.json("dlq", "list", "--consumer", "billing")["deliveries"] == [found]
    assert pillarbox.json("dlq", "list", "--consumer", "shipping")["deliveries"] == []
    assert pillarbox.json("dlq", "list", "--state", "PARKED")["deliveries"] == []
    assert pillarbox.json("dlq", "show", str(EVENTS[0]))["deliveries"][0]["event_id"] == found["event_id"]
    headings, row = pillarbox("dlq", "list").stdout.splitlines()
    assert headings.endswith("  REASON")
    assert row[headings.index("REASON") :] == "no such account"


def test_a_topic_by_any_of_its_names(pillarbox: CommandLine, failed: Database) -> None:
    for name in ("orders", "public/default/orders", "persistent://public/default/orders"):
        assert len(pillarbox.json("dlq", "list", "--topic", name)["deliveries"]) == 1
    assert pillarbox.json("dlq", "list", "--topic", "parts")["deliveries"] == []
    assert pillarbox.json("dlq", "list", "--topic", "projects/shop/topics/orders")["deliveries"] == []
    assert pillarbox.json("dlq", "discard", "--topic", "persistent://public/default/parts", "--yes")["requested"] == 0
    full = "persistent://public/default/orders"
    assert pillarbox.json("dlq", "redrive", "--topic", full, "--reason", "mended")["requested"] == 1
    (entry,) = pillarbox.json("outbox", "audit")["entries"]
    assert entry["target"] == f"status FAILED, consumer *, topic {full}"
    refused = pillarbox.complaint("dlq", "redrive", "--all", "--topic", full, code=Exit.USAGE)
    assert "--all goes with no ID and no filter" in refused
    assert len(execute(failed, "SELECT 1 FROM pillarbox_requests")) == 1


@on_sqlite
def test_what_was_discarded_by_its_topic_is_known_to_be(pillarbox: CommandLine, failed: Database) -> None:
    (found,) = pillarbox.json("dlq", "list")["deliveries"]
    pillarbox("dlq", "discard", "--topic", "orders", "--yes", "--by", "anna")
    execute(failed, "UPDATE pillarbox_failures SET status = 'DISCARDED'")
    execute(failed, "UPDATE pillarbox_inbound SET status = 'DISCARDED' WHERE status = 'FAILED'")
    (why,) = pillarbox.json("why", found["event_id"])["deliveries"]
    assert (why["cause"], why["detail"].partition(" at ")[0]) == ("discarded", "discarded by anna")


def test_asks_for_nothing_else(pillarbox: CommandLine, failed: Database) -> None:
    assert "choose by --consumer" in pillarbox.complaint("dlq", "redrive", code=Exit.USAGE)
    assert pillarbox.json("dlq", "redrive", "--all", "--reason", "mended")["requested"] == 1
    assert pillarbox.json("dlq", "discard", "--all", "--yes", "--reason", "never")["requested"] == 1
    routes = "SELECT DISTINCT r.name FROM pillarbox_requests q JOIN pillarbox_routes r ON r.id = q.route"
    assert execute(failed, routes) == [(BILLING.name,)]


def test_doctor_says_to_start_consumers_where_only_they_have_deliveries(pillarbox: CommandLine, both: Database) -> None:
    remedy = checks(pillarbox.json("doctor", code=Exit.PROBLEM))["relays"]["remedy"]
    assert "`pillarbox relay`" in remedy
    assert "`pillarbox consume MODULE:BOX`" in remedy
    execute(both, "DELETE FROM pillarbox_outbox")
    remedy = checks(pillarbox.json("doctor", code=Exit.PROBLEM))["relays"]["remedy"]
    assert "`pillarbox relay" not in remedy
    assert "`pillarbox consume MODULE:BOX`" in remedy
