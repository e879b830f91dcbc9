"""``pillarbox topics``: real processes, a real database, a real Pulsar."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from uuid import uuid4

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import Pillarbox, Route
from pillarbox.cli.output import Exit
from pillarbox.transports.memory import MemoryTransport
from tests.e2e import test_cli
from tests.e2e.test_cli import CommandLine, ItemStored, on_sqlite
from tests.servers import Database, Pulsar
from tests.web import free_port

pillarbox = test_cli.pillarbox
database = test_cli.database
migrated = test_cli.migrated

pytestmark = on_sqlite


@pytest.fixture
def tenants() -> tuple[str, str]:
    name = uuid4().hex[:10]
    return f"a-{name}", f"b-{name}"


@pytest.fixture
def routed(migrated: Database, pillarbox: CommandLine, pulsar: Pulsar, tenants: tuple[str, str]) -> CommandLine:
    """A box that has two routes to Pulsar, one of them with a topic per tenant, and one to somewhere else."""
    asyncio.run(_write(migrated.url(), [], tenants[0]))
    address = f"{pulsar.url}?admin={pulsar.admin_url}"
    transports = json.dumps({"broker": address, "archive": "logging:"})
    pillarbox.environment["PILLARBOX_TRANSPORTS"] = transports
    return pillarbox


async def _write(url: str, tenants: list[str], namespace: str, last: str = "events") -> None:
    engine = create_async_engine(url)
    routes = [
        Route("stock.**", to="broker", topic=f"persistent://{{tenant}}/stock/{last}"),
        Route("orders.**", to="broker", topic=f"{namespace}/orders/events"),
        Route("invoices.**", to="archive", topic="somewhere else"),
    ]
    box = Pillarbox(engine, transports={"broker": MemoryTransport(), "archive": MemoryTransport()}, routes=routes)
    await box.register()
    for tenant in tenants:
        async with box.unit_of_work(tenant=tenant) as uow:
            uow.publish(ItemStored(sku="a"), key="A")
    await engine.dispose()


def actions(document: dict[str, list[dict[str, str]]], part: str = "steps") -> list[str]:
    return [f"{each['action']} {each['target']}" for each in document[part]]


def test_plan_apply_plan(routed: CommandLine, tenants: tuple[str, str]) -> None:
    one, two = tenants
    options = ["--tenants", f"{one},{two}", "--partitions", "2", "--retention-hours", "72"]
    planned = routed.json("topics", "plan", *options)
    assert actions(planned) == [
        *(f"create tenant {each}" for each in (one, two)),
        *(f"create namespace {each}" for each in (f"{one}/orders", f"{one}/stock", f"{two}/stock")),
        *(f"create topic persistent://{each}/events" for each in (f"{one}/orders", f"{one}/stock", f"{two}/stock")),
    ]
    assert (planned["conflicts"], planned["missing"]) == ([], [])
    lines = routed("topics", "plan", *options).stdout.splitlines()
    assert lines[0].split() == ["TRANSPORT", "ACTION", "TARGET", "DETAIL"]
    assert lines[3].split(None, 4)[3:] == [f"{one}/orders", "deduplicates; keeps messages for 72 h"]

    asked = routed("topics", "apply", *options, code=Exit.USAGE)
    assert "this would do 8 steps in http://" in asked.stderr
    assert len(asked.stdout.splitlines()) == 9
    assert routed.json("topics", "apply", *options, "--yes")["applied"] == 8
    assert routed("topics", "plan", *options).stdout == "3 topics: nothing to do\n"
    assert routed("topics", "apply", *options).stdout == "3 topics: nothing to do\n"
    assert routed.json("topics", "apply", *options, "--transport", "broker")["applied"] == 0


def test_a_conflict_is_left_to_people(routed: CommandLine, tenants: tuple[str, str]) -> None:
    one, _ = tenants
    options = ["--tenants", one, "--partitions"]
    done = routed("topics", "apply", *options, "4", "--yes").stdout.splitlines()
    assert done[-1] == "5 steps done"
    found = routed.json("topics", "plan", *options, "2", code=Exit.PROBLEM)
    assert (found["steps"], len(found["conflicts"])) == ([], 2)
    assert "none can be taken away" in found["conflicts"][0]["detail"]
    more = routed.json("topics", "apply", *options, "6", "--retention-mb", "10", "--yes", code=Exit.PROBLEM)
    assert more["applied"] == 2
    assert actions(more) == [f"grow topic persistent://{one}/{each}/events" for each in ("orders", "stock")]
    assert actions(more, "conflicts") == [f"conflict {one}/{each}" for each in ("orders", "stock")]


def test_tenants_come_from_the_outbox(routed: CommandLine, migrated: Database, tenants: tuple[str, str]) -> None:
    missing = routed.json("topics", "plan", code=Exit.PROBLEM)["missing"]
    assert missing == [
        "route broker:persistent://{tenant}/stock/events: the outbox has none of its deliveries yet; say --tenants"
    ]
    asyncio.run(_write(migrated.url(), [*tenants, tenants[0]], tenants[0]))
    assert routed.json("topics", "plan")["topics"] == [
        f"persistent://{tenants[0]}/orders/events",
        *(f"persistent://{each}/stock/events" for each in tenants),
    ]


def test_one_of_two_placeholders_names_no_topic(
    routed: CommandLine, migrated: Database, tenants: tuple[str, str]
) -> None:
    one, two = tenants
    asyncio.run(_write(migrated.url(), [two], one, last="{aggregate}"))
    planned = routed.json("topics", "plan", "--tenants", one, code=Exit.PROBLEM)
    assert planned["topics"] == [f"persistent://{one}/orders/events", f"persistent://{one}/stock/events"]
    (missing,) = planned["missing"]
    assert missing.startswith("route broker:persistent://{tenant}/stock/{aggregate}: --tenants alone does not name its")
    assert missing.endswith("topics; say --aggregates, too")
    said = routed("topics", "plan", "--aggregates", "item", code=Exit.PROBLEM).stdout.splitlines()
    assert said[-1].endswith("--aggregates alone does not name its topics; say --tenants, too")
    planned = routed.json("topics", "plan", "--tenants", one, "--aggregates", "item")
    assert (planned["topics"][1:], planned["missing"]) == (
        [f"persistent://{one}/stock/events", f"persistent://{one}/stock/item"],
        [],
    )


def test_a_relay_of_the_settings_sends_there(routed: CommandLine, migrated: Database, tenants: tuple[str, str]) -> None:
    routed("topics", "apply", "--tenants", tenants[0], "--yes")
    asyncio.run(_write(migrated.url(), [tenants[0]], tenants[0]))
    routed("relay", "--drain")
    (delivery,) = routed.json("outbox", "list")["deliveries"]
    assert (delivery["status"], delivery["attempts"]) == ("SENT", 0)


def test_a_person_is_asked(routed: CommandLine, tenants: tuple[str, str]) -> None:
    ours, theirs = pty.openpty()
    process = routed.start("topics", "apply", "--tenants", tenants[0], stdin=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"n\n")
    shown, _ = process.communicate(timeout=60)
    os.close(ours)
    assert (process.returncode, len(shown.splitlines())) == (Exit.PROBLEM, 6)
    assert len(routed.json("topics", "plan", "--tenants", tenants[0])["steps"]) == 5


def test_a_box_in_code(routed: CommandLine, migrated: Database, pulsar: Pulsar, tenants: tuple[str, str]) -> None:
    program = f"""
from pillarbox import Pillarbox, Route
from pillarbox.transports.memory import MemoryTransport
from pillarbox.transports.pulsar.admin import PulsarAdmin

broker = MemoryTransport()
broker.admin = PulsarAdmin({pulsar.admin_url!r})
box = Pillarbox({migrated.url()!r}, transports={{"pulsar": broker, "other": MemoryTransport()}}, routes=[
    Route("a.**", to="pulsar", topic="{tenants[0]}/{{aggregate}}/events"), Route("b.**", to="other", topic="x")])
"""
    (routed.folder / "shop.py").write_text(program)
    planned = routed.json("topics", "plan", "shop:box", "--aggregates", "order,item", "--no-dedup")
    assert actions(planned)[0] == f"create tenant {tenants[0]}"
    assert planned["topics"] == [f"persistent://{tenants[0]}/{each}/events" for each in ("order", "item")]
    assert "deduplicates" not in json.dumps(planned)


@pytest.mark.parametrize("by", ["database", "code"])
def test_dead_letters_go_beside_the_topics_of_their_consumer(
    migrated: Database, pillarbox: CommandLine, pulsar: Pulsar, tenants: tuple[str, str], by: str
) -> None:
    one, two = tenants
    program = f"""
import asyncio
from pillarbox import Pillarbox
from pillarbox.transports.pulsar import PulsarTransport

broker = PulsarTransport({pulsar.url!r}, admin_url={pulsar.admin_url!r})
box = Pillarbox({migrated.url()!r}, transports={{"broker": broker}})
topics = ["persistent://{one}/orders/events", "{{tenant}}/stock/events"]
consumer = box.consumer("billing", source="broker", topics=topics)

async def register():
    async with box:
        await box.register()
        await consumer.register()

if __name__ == "__main__":
    asyncio.run(register())
"""
    (pillarbox.folder / "shop.py").write_text(program)
    pillarbox.environment["PILLARBOX_TRANSPORTS"] = json.dumps({"broker": f"{pulsar.url}?admin={pulsar.admin_url}"})
    where = ["shop:box"] if by == "code" else []
    if by == "database":
        subprocess.run([sys.executable, pillarbox.folder / "shop.py"], check=True)
    dead = f"persistent://{one}/orders/events.dlq"
    assert named(pillarbox, "plan", *where) == [dead]
    assert named(pillarbox, "apply", *where, "--yes") == [dead]
    assert pillarbox("topics", "plan", *where).stdout == "1 topic: nothing to do\n"
    tenanted = [dead, f"persistent://{one}/stock/events.dlq", f"persistent://{two}/stock/events.dlq"]
    assert named(pillarbox, "plan", *where, "--tenants", f"{one},{two}") == tenanted


def named(pillarbox: CommandLine, *arguments: str) -> list[str]:
    topics: list[str] = pillarbox.json("topics", *arguments)["topics"]
    return topics


class TestMistakes:
    @pytest.mark.usefixtures("migrated")
    def test_no_pulsar(self, pillarbox: CommandLine) -> None:
        for transports in ("{}", '{"broker": "logging:"}'):
            said = pillarbox.complaint("topics", "plan", code=Exit.SETTINGS, PILLARBOX_TRANSPORTS=transports)
            assert "no transport leads to Pulsar" in said

    @pytest.mark.usefixtures("migrated")
    def test_addresses(self, pillarbox: CommandLine) -> None:
        for address, what in (
            ("pulsar://127.0.0.1:1", "write pulsar://127.0.0.1:1?admin=http://host:8080"),
            ("pulsar://127.0.0.1:1?token=hidden", "holds a secret (token)"),
        ):
            transports = json.dumps({"broker": address})
            said = pillarbox.complaint("topics", "plan", code=Exit.SETTINGS, PILLARBOX_TRANSPORTS=transports)
            assert what in said
            assert "hidden" not in said

    def test_nobody_there(self, routed: CommandLine, tenants: tuple[str, str]) -> None:
        transports = json.dumps({"broker": f"pulsar://127.0.0.1?admin=http://127.0.0.1:{free_port()}"})
        arguments = ["topics", "plan", "--tenants", tenants[0]]
        said = routed.complaint(*arguments, code=Exit.UNREACHABLE, PILLARBOX_TRANSPORTS=transports)
        assert "cannot be reached" in said

    def test_options(self, routed: CommandLine) -> None:
        for arguments, what in (
            (["--transport", "archive"], "'archive' does not lead to Pulsar; say broker"),
            (["--tenants", "a,../b"], "'../b' cannot be part of a topic's name: write T1,T2."),
            (["--tenants", "a,"], "'' cannot be part of a topic's name"),
            (["--retention-hours", "0"], "say 0 for --retention-hours and --retention-mb"),
            (["--partitions", "-1"], "--partitions"),
        ):
            assert what in routed.complaint("topics", "plan", *arguments, code=Exit.USAGE)

    @pytest.mark.usefixtures("migrated")
    def test_no_routes(self, pillarbox: CommandLine, pulsar: Pulsar) -> None:
        transports = json.dumps({"other": f"{pulsar.url}?admin={pulsar.admin_url}"})
        found = pillarbox.json("topics", "plan", code=Exit.PROBLEM, PILLARBOX_TRANSPORTS=transports)
        assert found["missing"][0].startswith("no route leads to other: a box makes them known")
