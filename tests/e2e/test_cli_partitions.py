"""Daily partitions in the hands of people: real processes, on a real PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pillarbox.cli.output import Exit
from pillarbox.stores.partitions import first_id
from tests.e2e import test_cli
from tests.e2e.test_cli import CommandLine, checks, execute, on_postgres, on_sqlite
from tests.e2e.test_cli_retention import WEEK, drain, rows
from tests.servers import Database

pillarbox = test_cli.pillarbox
database = test_cli.database
migrated = test_cli.migrated
filled = test_cli.filled

TODAY = datetime.now(UTC).date()
OLD = TODAY - timedelta(days=30)
_MANY = """
    INSERT INTO pillarbox_outbox (event_id, event_type, route, shard, schema_version, topic, key, headers, body)
    SELECT CAST('ffffffff-ffff-4fff-8fff-' || lpad(to_hex(number), 12, '0') AS uuid), 'x', 1, 0, 1, 't', 'k', '{}', '{}'
    FROM generate_series(1, 50000) AS number
"""
"""Rows of no coming day: a random id would be of one of three in every twentieth run."""


@pytest.fixture
def old(pillarbox: CommandLine, filled: Database) -> Database:
    """Six deliveries of a day that has a partition, all sent long ago."""
    assert drain(filled) == 6
    pillarbox("outbox", "partition", "--yes", "--ahead", "1")
    name, bounds = f"pillarbox_outbox_{OLD:%Y%m%d}", (first_id(OLD), first_id(OLD + timedelta(days=1)))
    execute(
        filled, f"CREATE TABLE {name} PARTITION OF pillarbox_outbox FOR VALUES FROM ('{bounds[0]}') TO ('{bounds[1]}')"
    )
    rest = "substr(replace(CAST(event_id AS text), '-', ''), 13)"
    moved = f"CAST(lpad(to_hex({bounds[0].int >> 80} + id), 12, '0') || {rest} AS uuid)"
    execute(filled, f"UPDATE pillarbox_outbox SET event_id = {moved}, created_at = '2020-01-01 00:00:00'")
    execute(filled, "UPDATE pillarbox_journal SET settled_at = '2020-01-01 00:00:00'")
    return filled


@on_postgres
class TestPartition:
    def test_a_dry_run_then_the_real_one_then_nothing(self, pillarbox: CommandLine, filled: Database) -> None:
        last = TODAY + timedelta(days=3)
        planned = pillarbox("outbox", "partition", "--ahead", "3", "--dry-run").stdout.splitlines()
        assert planned[0].endswith(f"3 days ({TODAY + timedelta(days=1)} to {last}) to be made; nothing was done")
        assert planned[1] == f"{TODAY}: the default partition has rows of this day, and keeps it"
        assert "say --yes" in pillarbox.complaint("outbox", "partition", "--ahead", "3", code=Exit.USAGE)
        done = pillarbox.json("outbox", "partition", "--ahead", "3", "--yes", "--by", "ben", "--reason", "room")
        assert (len(done["made"]), done["dry_run"]) == (3, False)
        again = pillarbox("outbox", "partition", "--ahead", "3").stdout.splitlines()
        assert again[0] == "partition: nothing to do"
        assert "1 day" in pillarbox("outbox", "partition", "--ahead", "4").stdout
        entries = pillarbox.json("outbox", "audit")["entries"]
        assert [(it["action"], it["who"] == "ben") for it in entries] == [("partition", False), ("partition", True)]
        assert drain(filled) == 6
        pillarbox("migrate")
        pillarbox("doctor")

    def test_prune_drops_days_and_makes_new_ones(self, pillarbox: CommandLine, old: Database) -> None:
        planned = pillarbox("outbox", "prune", *WEEK, "--dry-run").stdout.splitlines()
        assert planned == ["prune: 6 deliveries would be deleted", f"would be dropped whole: {OLD}"]
        done = pillarbox.json("outbox", "prune", *WEEK, "--yes", "--ahead", "2")
        assert (done["selected"], done["done"], done["left"]) == (6, 6, 0)
        assert done["days"]["dropped"] == [str(OLD)]
        assert done["days"]["made"][-1] == str(TODAY + timedelta(days=2))
        assert rows(old) == 0
        assert execute(old, "SELECT * FROM pillarbox_journal") == []
        assert execute(old, f"SELECT to_regclass('pillarbox_outbox_{OLD:%Y%m%d}')") == [(None,)]
        assert pillarbox("outbox", "prune", *WEEK, "--yes", "--ahead", "2").stdout == "prune: nothing to do\n"

    def test_one_route_goes_row_by_row(self, pillarbox: CommandLine, old: Database) -> None:
        done = pillarbox.json("outbox", "prune", *WEEK, "--yes", "--route", "broker:stock.events")
        assert (done["done"], done["days"]["dropped"], rows(old)) == (3, [], 3)

    def test_an_archive_and_back(self, pillarbox: CommandLine, old: Database) -> None:
        pillarbox("outbox", "archive", *WEEK, "--to", "old.jsonl", "--yes")
        assert rows(old) == 0
        pillarbox("outbox", "restore", "old.jsonl", "--yes")
        assert rows(old) == 6

    def test_a_default_partition_that_is_too_large_is_tried_once(self, pillarbox: CommandLine, old: Database) -> None:
        """Everybody waits while it is looked through: for no day in vain, and never in silence."""
        execute(old, _MANY)
        hasty = ("outbox", "prune", "--older-than", "30d", "--yes", "--patience", "0.001", "--ahead", "3")
        done = pillarbox.json(*hasty, code=Exit.PROBLEM)
        coming = [TODAY + timedelta(days=number) for number in (0, 2, 3)]
        why = "looking through the default partition takes longer than 0.001 s; prune it first, or say --patience"
        assert done["days"]["made"] == []
        assert [it for it in done["days"]["notes"] if "longer" in it] == [f"3 days ({TODAY} to {coming[-1]}): {why}"]
        patient = pillarbox.json("outbox", "prune", "--older-than", "30d", "--yes", "--patience", "60", "--ahead", "3")
        assert patient["days"]["made"] == [str(day) for day in coming]

    @pytest.mark.usefixtures("old")
    def test_no_patience_is_not_endless_patience(self, pillarbox: CommandLine, filled: Database) -> None:
        execute(filled, _MANY)
        done = pillarbox("outbox", "partition", "--ahead", "3", "--patience", "0.0001", code=Exit.PROBLEM)
        assert "takes longer than 0.0001 s" in done.stdout

    def test_doctor_says_when_the_coming_day_has_no_partition(self, pillarbox: CommandLine, filled: Database) -> None:
        assert "days" not in checks(pillarbox.json("doctor"))
        pillarbox("outbox", "partition", "--yes", "--ahead", "1")
        tomorrow = TODAY + timedelta(days=1)
        found = checks(pillarbox.json("doctor"))["days"]
        assert (found["state"], found["found"]) == ("ok", f"there are partitions up to {tomorrow}")
        execute(filled, f"DROP TABLE pillarbox_outbox_{tomorrow:%Y%m%d}")
        found = checks(pillarbox.json("doctor"))["days"]
        assert found["state"] == "warning"
        assert found["found"].startswith(f"{tomorrow} has no partition")

    def test_senseless_numbers_are_refused(self, pillarbox: CommandLine, migrated: Database) -> None:
        assert migrated.is_postgres
        for wrong in (
            ("--ahead", "0"),
            ("--ahead", "91"),
            ("--patience", "0"),
            ("--patience", "1e9"),
            ("--ahead", "x"),
        ):
            assert "Invalid value" in pillarbox("outbox", "partition", *wrong, code=Exit.USAGE).stderr


@on_sqlite
def test_only_postgresql_has_partitions(pillarbox: CommandLine, migrated: Database) -> None:
    assert migrated.kind == "sqlite"
    assert "only PostgreSQL has" in pillarbox.complaint("outbox", "partition", code=Exit.PROBLEM)
