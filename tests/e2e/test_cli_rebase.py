"""``pillarbox outbox rebase`` in the hands of somebody who has restored a dump."""

from __future__ import annotations

import asyncio

import pytest

from pillarbox.cli.output import Exit
from tests.conftest import FreshDatabase
from tests.copies import dump, outbox
from tests.e2e import test_cli
from tests.e2e.test_cli import CommandLine, on_sqlite
from tests.servers import Database, Postgres

pillarbox = test_cli.pillarbox
database = test_cli.database

WHY = ("--reason", "moved house", "--by", "anna")


async def fill(url: str) -> None:
    async with outbox(url) as here:
        await here.set_up()
        await here.write("a1 b1")
        await here.send(await here.take())
        await here.write("a2 b2")
        await here.announce(await here.take())
        await here.write("a3")


async def drain(url: str) -> str:
    async with outbox(url) as here:
        return await here.drain()


@pytest.fixture
def copy(fresh_database: FreshDatabase, pillarbox: CommandLine) -> Database:
    """A dump with two deliveries on their way and one that nobody has looked at, restored."""
    source, copy = fresh_database("embedded"), fresh_database("embedded", empty=True)
    asyncio.run(fill(source.url()))
    assert isinstance(source.server, Postgres)
    dump(source.server.address(source.name), source.server.address(copy.name))
    pillarbox.use(copy.url())
    return copy


def test_a_dry_run_then_the_real_one(pillarbox: CommandLine, copy: Database) -> None:
    command = ("outbox", "rebase", *WHY)
    (origin,) = [it for it in pillarbox.json("doctor", code=Exit.PROBLEM)["checks"] if it["name"] == "origin"]
    assert (origin["state"], origin["remedy"]) == ("problem", "`pillarbox outbox rebase`")
    dry = pillarbox.json(*command, "--dry-run")
    counts = {"lanes": 16, "batches": 1, "late": 2, "fresh": 1, "failed": 0}
    assert dry == {**counts, "install_id": None, "audit": None, "dry_run": True}
    assert pillarbox(*command, "--dry-run").stdout.splitlines() == [
        "rebase: 16 lanes, 3 undone deliveries (1 not begun, 2 begun or late, 0 failed or parked)",
        "announced and not settled: 1 lane; what has left of it leaves again",
        "nothing was done",
    ]
    assert pillarbox.complaint(*command, code=Exit.USAGE) == (
        "error: this would rebase this copy, with 3 undone deliveries, and let relays send from it: say --yes, "
        "as there is no terminal to ask on"
    )
    assert pillarbox.json("outbox", "audit")["entries"] == []

    done = pillarbox.json(*command, "--yes", "--new-install-id")
    assert done == {**counts, "install_id": done["install_id"], "audit": done["audit"], "dry_run": False}
    (entry,) = pillarbox.json("outbox", "audit")["entries"]
    assert (entry["id"], entry["who"], entry["action"], entry["reason"]) == (
        done["audit"],
        "anna",
        "rebase",
        "moved house",
    )
    assert entry["details"]["install_id"] == done["install_id"] != entry["details"]["old_install_id"]
    assert sorted(asyncio.run(drain(copy.url())).split()) == ["a2", "a3", "b2"]
    assert "is no copy" in pillarbox.complaint(*command, "--yes", code=Exit.PROBLEM)


@pytest.mark.usefixtures("copy")
def test_a_reason_is_asked_for(pillarbox: CommandLine) -> None:
    assert "say where this copy comes from" in pillarbox.complaint("outbox", "rebase", "--yes", code=Exit.USAGE)


@on_sqlite
@pytest.mark.usefixtures("database")
def test_other_databases_have_nothing_to_rebase(pillarbox: CommandLine) -> None:
    pillarbox("migrate")
    assert "nothing to rebase" in pillarbox.complaint("outbox", "rebase", *WHY, code=Exit.PROBLEM)
