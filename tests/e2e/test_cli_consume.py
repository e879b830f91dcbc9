"""``pillarbox consume`` and ``pillarbox consumers`` as they are run: real processes, on real databases."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from contextlib import suppress
from typing import Any

import httpx
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import IntegrationEvent, Pillarbox
from pillarbox.cli.output import Exit
from pillarbox.outbox import stable_hash
from tests.e2e import test_cli
from tests.e2e.test_cli import CommandLine, checks, execute, on_postgres, on_sqlite
from tests.servers import Database, wait_until

pillarbox = test_cli.pillarbox
database = test_cli.database
migrated = test_cli.migrated

SHOP = '''
"""Consumers of the outbox, which leave lines in a file; while a file called "hold" exists, they wait in the middle."""

import asyncio
import os
from datetime import timedelta
from pathlib import Path

from pillarbox import IntegrationEvent, Pillarbox, Reject
from pillarbox.transports.memory import MemoryTransport


class Paid(IntegrationEvent, name="tests.consume.paid"):
    number: int


class Forgetful(MemoryTransport):
    async def redelivery(self, topics):
        return 7 * 86_400.0

    async def unsubscribe(self, topics, group):
        if Path("member").exists():
            raise ConnectionError("the group has a member")
        Path("unsubscribed").write_text(f"{group} {topics}")


class Broken:
    async def redelivery(self, topics):
        return 40 * 86_400.0

    async def subscribe(self, topics, group):
        raise RuntimeError("no such thing as postgresql://app:geheim@db/x")


def note(what, event):
    with open("notes", "a") as file:
        file.write(f"{what} {event.number}\\n")


box = Pillarbox(os.environ["PILLARBOX_DATABASE_URL"], transports={"broker": Forgetful()})
empty = Pillarbox(os.environ["PILLARBOX_DATABASE_URL"])
doomed = Pillarbox(os.environ["PILLARBOX_DATABASE_URL"])
bills = box.consumer("bills", source="outbox")
stock = box.consumer("stock", source="broker", topics=["goods", "parts"], retention=timedelta(days=2))
lonely = doomed.consumer("lonely", source=Broken(), topics=["goods"])
fine = doomed.consumer("fine", source="outbox")
doomed.subscribe(Paid, name="mail")(print)


@bills.on(Paid)
async def bill(event: Paid) -> None:
    note("begun", event)
    while Path("hold").exists():
        await asyncio.sleep(0.005)
    if event.number < 0 and not Path("generous").exists():
        raise Reject("nobody pays less than nothing")
    note("done", event)


@stock.on(Paid)
@lonely.on(Paid)
@fine.on(Paid)
async def look(event: Paid) -> None:
    note("seen", event)
'''


class Paid(IntegrationEvent, name="tests.consume.paid"):
    number: int


def publish(database: Database, *numbers: int, tenant: str | None = None) -> None:
    """Commit events for the consumer "bills", each with a key of its own."""
    asyncio.run(_publish(database.url(), numbers, tenant))


async def _publish(url: str, numbers: tuple[int, ...], tenant: str | None) -> None:
    engine = create_async_engine(url)
    async with Pillarbox(engine) as box:

        @box.consumer("bills", source="outbox").on(Paid)
        async def bill(event: Paid) -> None:
            raise AssertionError(event)

        async with box.unit_of_work(tenant=tenant) as uow:
            for number in numbers:
                uow.publish(Paid(number=number), key=f"key-{number}")
    await engine.dispose()


@pytest.fixture
def shop(pillarbox: CommandLine, migrated: Database) -> Database:
    (pillarbox.folder / "shop.py").write_text(SHOP)
    return migrated


def notes(pillarbox: CommandLine) -> list[str]:
    file = pillarbox.folder / "notes"
    return file.read_text().splitlines() if file.exists() else []


def first_answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    said = ""
    while line := process.stdout.readline():
        said += line
        with suppress(json.JSONDecodeError):
            return json.loads(said)
    raise AssertionError(f"it ended with {process.wait(10)}: {said}")


class TestConsume:
    def test_all_that_is_there(self, pillarbox: CommandLine, shop: Database) -> None:
        publish(shop, 1, 2, -3)
        done = pillarbox.json("consume", "shop:box", "bills", "--drain")
        assert done == {
            "consumers": [{"consumer": "bills", "handled": 2, "duplicates": 0, "spilled": 0, "failures": 1}]
        }
        assert {*notes(pillarbox)} >= {"done 1", "done 2"}
        publish(shop, 4)
        by_the_module_alone = pillarbox.json("consume", "shop", "bills", "--drain")
        assert by_the_module_alone["consumers"][0]["handled"] == 1
        again = pillarbox("consume", "shop:box", "bills", "--drain").stdout.splitlines()
        assert [line.split() for line in again] == [
            ["CONSUMER", "HANDLED", "DUPLICATES", "SPILLED", "FAILURES"],
            ["bills", "0", "0", "0", "0"],
        ]

    @on_postgres
    def test_h91_sigterm_lets_it_finish_what_it_has_begun(self, pillarbox: CommandLine, shop: Database) -> None:
        (pillarbox.folder / "hold").touch()
        publish(shop, 1)
        process = pillarbox.start("consume", "shop:box", "--http", "0", "--json")
        ready = first_answer(process)
        assert ready["consumers"] == ["bills", "stock"]
        wait_until(lambda: notes(pillarbox) == ["begun 1"], "the event to be begun")
        wait_until(lambda: httpx.get(f"{ready['http']}/readyz").status_code == 200, "it to be ready")
        for path in ("livez", "readyz"):
            body = httpx.get(f"{ready['http']}/{path}").json()
            assert (body["healthy"], [each["consumer"] for each in body["consumers"]]) == (True, ["bills", "stock"])
        assert "consumer_spilled_total" in httpx.get(f"{ready['http']}/metrics").text
        process.send_signal(signal.SIGTERM)
        (pillarbox.folder / "hold").unlink()
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert json.loads(out)["consumers"][0] == {"consumer": "bills", "handled": 1, "duplicates": 0, "spilled": 0}
        assert notes(pillarbox) == ["begun 1", "done 1"]
        publish(shop, 2)
        assert (
            pillarbox.json("consume", "shop:box", "bills", "--drain")["consumers"][0]["handled"] == 1
        )  # 1 is not again

    @on_postgres
    def test_h91_a_second_signal_ends_it_at_once(self, pillarbox: CommandLine, shop: Database) -> None:
        (pillarbox.folder / "hold").touch()
        publish(shop, 1)
        process = pillarbox.start("consume", "shop:box", "--json", stderr=subprocess.PIPE)
        first_answer(process)
        wait_until(lambda: notes(pillarbox) == ["begun 1"], "the event to be begun")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=8)  # less than the grace
        assert (process.returncode, err.splitlines()[-1]) == (Exit.TERMINATED, "error: terminated")
        (pillarbox.folder / "hold").unlink()
        wait_until(
            lambda: pillarbox.json("consume", "shop:box", "bills", "--drain")["consumers"][0]["handled"] == 1,
            "the event to be dealt with by another one",
        )
        assert notes(pillarbox).count("done 1") == 1

    @on_sqlite
    @pytest.mark.usefixtures("shop")
    def test_h93_one_that_dies_takes_the_others_with_it_and_is_named(self, pillarbox: CommandLine) -> None:
        done = pillarbox("consume", "shop:doomed", code=Exit.PROBLEM)
        assert done.stdout == "running: lonely, fine\n"
        assert "\nerror: consumer lonely has died: RuntimeError: no such thing" in done.stderr
        assert "in subscribe" in done.stderr  # where it happened
        assert not re.search("consumer fine|geheim", done.stderr)

    @on_sqlite
    @pytest.mark.usefixtures("shop")
    def test_h81_an_inbox_that_forgets_too_soon_is_told_of(self, pillarbox: CommandLine) -> None:
        said = pillarbox("consume", "shop:box", "--drain").stderr
        assert "the inbox of stock remembers for 2.0 d, and its source may deliver again after 7.0 d: effects" in said
        assert "bills" not in said
        found = checks(pillarbox.json("doctor", "shop:box"))["retention"]
        assert (found["state"], found["found"]) == (
            "warning",
            "the inbox of stock remembers for 2.0 d, and its source may deliver again after 7.0 d",
        )
        found = checks(pillarbox.json("doctor", "shop:doomed"))["retention"]  # whose source is no transport
        assert found["found"].startswith("the inbox of lonely remembers for 30.0 d")

    @on_sqlite
    @pytest.mark.usefixtures("shop")
    def test_mistakes(self, pillarbox: CommandLine) -> None:
        complaint = pillarbox.complaint("consume", "shop:box", "bills", "goods", code=Exit.USAGE)
        assert complaint == "error: shop:box has no consumer 'goods': it has bills, stock"
        complaint = pillarbox.complaint("consume", "shop:doomed", "mail", code=Exit.USAGE)
        assert complaint == (
            "error: shop:doomed has no consumer 'mail': it has fine, lonely; "
            "`pillarbox relay shop:doomed` runs the handlers 'mail'"
        )
        assert "shop:empty has no consumers" in pillarbox.complaint("consume", "shop:empty", code=Exit.USAGE)
        assert "choose one" in pillarbox.complaint("consume", "shop", "--drain", "--http", "0", code=Exit.USAGE)
        assert "there is no module" in pillarbox.complaint("consume", "nowhere", code=Exit.USAGE)

    @on_sqlite
    def test_a_database_that_is_not_migrated(self, pillarbox: CommandLine, database: Database) -> None:
        (pillarbox.folder / "shop.py").write_text(SHOP)
        execute(database, "SELECT 1")
        assert "pillarbox migrate" in pillarbox.complaint("consume", "shop:box", code=Exit.NOT_MIGRATED)


class TestConsumers:
    def test_who_they_are_and_how_far_they_have_come(self, pillarbox: CommandLine, shop: Database) -> None:
        assert pillarbox("consumers", "list").stdout == "none\n"
        publish(shop, 1, -2)
        pillarbox("consume", "shop:box", "--drain")
        bills, stock = pillarbox.json("consumers", "list")["consumers"]
        assert (bills["name"], bills["kind"], bills["source"], bills["topics"]) == ("bills", "handlers", "outbox", [])
        assert (bills["generation"], bills["handled"], bills["waiting"]) == (1, 1, 1)
        assert bills["last_event_id"]
        publish(shop, 3, 4)
        assert [it["waiting"] for it in pillarbox.json("consumers", "list")["consumers"]] == [3, 0]
        assert bills["seen_at"].endswith("Z")
        assert (stock["source"], stock["topics"], stock["last_event_id"]) == ("broker", ["goods", "parts"], None)
        lines = pillarbox("consumers", "list").stdout.splitlines()
        assert lines[0].split()[:4] == ["NAME", "KIND", "SOURCE", "TOPICS"]
        assert lines[2].split()[:5] == ["stock", "handlers", "broker", "goods,", "parts"]

    def test_what_was_killed_before_it_could_report_is_counted_by_the_inbox(
        self, pillarbox: CommandLine, shop: Database
    ) -> None:
        publish(shop, *range(20))
        process = pillarbox.start("consume", "shop:box", "bills", "--json")
        wait_until(lambda: len(notes(pillarbox)) == 40, "all events to be handled")
        handled = "SELECT COUNT(*) FROM pillarbox_inbox"
        wait_until(lambda: execute(shop, handled) == [(20,)], "all effects to be committed")
        process.kill()
        process.communicate(timeout=60)
        [bills] = pillarbox.json("consumers", "list", "--exact")["consumers"]
        assert bills["handled"] < 20  # it had no time to say so
        assert bills["settled"] == 20
        pillarbox.json("consume", "shop:box", "bills", "--drain")  # settles what its lane had not heard of
        [bills] = pillarbox.json("consumers", "list", "--exact")["consumers"]
        assert (bills["settled"], bills["waiting"]) == (20, 0)
        [bills] = pillarbox.json("consumers", "list")["consumers"]
        assert bills["settled"] is None
        assert pillarbox("consumers", "list", "--exact").stdout.splitlines()[0].split()[4:8] == [
            *("GENERATION", "HANDLED", "SETTLED", "WAITING")
        ]


class TestForget:
    def test_a_consumer_that_is_gone(self, pillarbox: CommandLine, shop: Database) -> None:
        publish(shop, 1, 2, -3)
        pillarbox("consume", "shop:box", "--drain")
        forget: tuple[str, ...] = ("consumers", "forget", "bills", "--reason", "bills are written elsewhere")
        assert "was seen" in pillarbox.complaint(*forget, "--yes", code=Exit.PROBLEM)
        execute(shop, "UPDATE pillarbox_consumers SET seen_at = :past", past="2001-01-01 00:00:00")
        assert "messages wait for bills (1, " in pillarbox.complaint(*forget, "--yes", code=Exit.PROBLEM)
        forget += ("--discard",)
        said = pillarbox(*forget, "--dry-run").stdout
        assert said == "forget bills: 2 rows of its inbox, 3 deliveries (1 message discarded) would be removed\n"
        assert "say --yes" in pillarbox.complaint(*forget, code=Exit.USAGE)
        assert execute(shop, "SELECT COUNT(*) FROM pillarbox_inbox") == [(2,)]
        done = pillarbox.json(*forget, "--yes")
        assert (done["inbox"], done["deliveries"], done["waiting"], done["finished"]) == (2, 3, 1, True)
        assert done["subscription"] is None
        assert execute(shop, "SELECT COUNT(*) FROM pillarbox_inbox") == [(0,)]
        assert [it["name"] for it in pillarbox.json("consumers", "list")["consumers"]] == ["stock"]
        (entry,) = pillarbox.json("outbox", "audit")["entries"]
        assert (entry["id"], entry["action"], entry["target"]) == (done["audit"], "forget", "consumer bills")
        assert (entry["details"]["inbox"], entry["details"]["finished"]) == (2, True)
        assert "there is no consumer 'bills'" in pillarbox.complaint(*forget, "--yes", code=Exit.PROBLEM)

    @on_sqlite
    def test_its_subscription(self, pillarbox: CommandLine, shop: Database) -> None:
        pillarbox("consume", "shop:box", "stock", "--drain")
        execute(shop, "UPDATE pillarbox_consumers SET seen_at = :past", past="2001-01-01 00:00:00")
        columns = "on_failure, retry_base, retry_cap, retry_attempts, shard_by, updated_at"
        copies = f"INSERT INTO pillarbox_routes (id, name, destination, topic, {columns}) VALUES "
        copies += "(:id, 'dlq:stock', 'broker', 'stock.dlq', 'skip', 1, 1, 1, 'key', :at)"
        execute(shop, copies, id=stable_hash("dlq:stock"), at="2001-01-01 00:00:00")
        forget = ("consumers", "forget", "stock", "--yes")
        alone = pillarbox.json(*forget, "--dry-run")
        assert (alone["subscription"], alone["dead_letter_topics"]) == ("left", ["goods.dlq", "parts.dlq"])
        assert "the subscription 'stock' to goods, parts at broker is left" in pillarbox(*forget, "--dry-run").stdout
        said = pillarbox.complaint(*forget, "shop:empty", code=Exit.USAGE)
        assert "cannot be removed: shop:empty has no transport 'broker'; leave out shop:empty" in said
        (pillarbox.folder / "member").touch()
        said = pillarbox.complaint(*forget, "shop", code=Exit.UNREACHABLE)
        assert said == "error: nothing was forgotten: the group has a member"
        (pillarbox.folder / "member").unlink()
        done = pillarbox.json(*forget, "shop")
        assert (done["subscription"], done["finished"]) == ("removed", True)
        assert (pillarbox.folder / "unsubscribed").read_text() == "stock ('goods', 'parts')"


class TestDoctor:
    def test_consumers_that_are_not_seen_and_dead_letters(self, pillarbox: CommandLine, shop: Database) -> None:
        assert not {"consumers", "retention"} & checks(pillarbox.json("doctor")).keys()
        publish(shop, -1, -2)
        pillarbox("consume", "shop:box", "bills", "--drain")
        found = checks(pillarbox.json("doctor"))
        assert (found["consumers"]["state"], found["failures"]["state"]) == ("ok", "warning")
        assert found["failures"]["found"] == "2 dead letters of bills"
        assert "pillarbox dlq list --consumer bills" in found["failures"]["remedy"]

        execute(shop, "UPDATE pillarbox_consumers SET seen_at = :past", past="2001-01-01 00:00:00")
        found = checks(pillarbox.json("doctor"))
        assert found["consumers"]["state"] == "warning"
        assert found["consumers"]["found"].startswith("bills was last seen ")
