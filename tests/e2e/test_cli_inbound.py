"""The command line about deliveries that wait for a consumer, beside those that go out."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID, uuid4

import msgspec
import pytest
from sqlalchemy import Connection, create_engine, insert
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import clock
from pillarbox.cli.output import Exit
from pillarbox.inbox import consumer_id
from pillarbox.outbox import INBOUND, INBOX_DESTINATION, Batch, Delivery, Failure, RouteRecord
from pillarbox.stores import sqlite, store_on
from pillarbox.stores.tables import claims
from tests.e2e import test_cli
from tests.e2e.test_cli import CommandLine, checks, execute, on_postgres, on_sqlite
from tests.servers import Database

pillarbox = test_cli.pillarbox
database = test_cli.database
migrated = test_cli.migrated
filled = test_cli.filled

BILLING = RouteRecord("consumer:billing", INBOX_DESTINATION, "billing")
EVENTS = [UUID(f"018f3c50-0000-7000-8000-00000000000{number}") for number in range(3)]


@pytest.fixture
def both(filled: Database) -> Database:
    """Six deliveries that go out, and three for a consumer, the first of which has failed."""
    asyncio.run(_spill(filled.url()))
    return filled


async def _spill(url: str) -> None:
    engine = create_async_engine(url)
    sqlite.configure_transactions(engine.sync_engine)
    store = store_on(engine, INBOUND)
    rows = [_row(key) for key in "abc"]
    async with engine.begin() as connection:
        await connection.run_sync(store.register, [BILLING])
        for row, event in zip(rows, EVENTS, strict=True):
            claim = {"consumer": 1, "line": 1, "inbox_id": event, "delivery": row.event_id, "gate": True}
            await connection.execute(insert(claims).values(claim))
        await connection.run_sync(store.append, rows)
    (lane,) = await store.take("r", lease=30, wanted={BILLING.id: 1})
    page = await store.poll(lane, limit=1)
    failed = [Failure(page.fresh[0].id, 5, "no such account", None)]
    lane = await store.announce(lane, Batch(failures=failed, cursor=page.cursor), settle=False)
    await store.release("r", [lane])
    await engine.dispose()


def _row(key: str) -> Delivery:
    headers = {"event_id": str(uuid4()), "content_type": "application/json"}
    event_id = clock.current().new_id()
    return Delivery(event_id, "orders.order.placed", BILLING.id, 0, 1, "orders", key, "acme", headers, b'{"total":1}')


@pytest.mark.usefixtures("both")
def test_what_is_listed_shows_both_directions_or_one(pillarbox: CommandLine) -> None:
    listed = pillarbox.json("outbox", "list")["deliveries"]
    assert [it["direction"] for it in listed] == ["outbound"] * 6 + ["inbound"] * 3
    inbound = pillarbox.json("outbox", "list", "--inbound")["deliveries"]
    assert inbound == listed[6:]
    assert [it["status"] for it in inbound] == ["FAILED", "PENDING", "PENDING"]
    assert pillarbox.json("outbox", "list", "--outbound")["deliveries"] == listed[:6]
    page = pillarbox.json("outbox", "list", "--limit", "7")
    assert (page["deliveries"], page["next"]) == (listed[:7], {"direction": "inbound", "after": inbound[0]["id"]})
    assert f"there are more: --inbound --after {inbound[0]['id']}" in pillarbox("outbox", "list", "--limit", "7").stdout
    rest = pillarbox.json("outbox", "list", "--inbound", "--after", str(page["next"]["after"]))
    assert (rest["deliveries"], rest["next"]) == (listed[7:], None)
    groups = pillarbox.json("outbox", "stats", "--inbound")["groups"]
    assert [(it["direction"], it["route"], it["status"], it["count"]) for it in groups] == [
        ("inbound", BILLING.name, "FAILED", 1),
        ("inbound", BILLING.name, "PENDING", 2),
    ]
    lanes = pillarbox.json("lanes", "--inbound")["lanes"]
    assert {(it["direction"], it["route"]) for it in lanes} == {("inbound", BILLING.name)}
    assert (sum(it["pending"] for it in lanes), sum(it["waiting"] for it in lanes)) == (2, 1)


@on_postgres
@pytest.mark.usefixtures("both")
def test_an_event_that_waits_is_found_by_the_id_that_its_sender_knows(pillarbox: CommandLine) -> None:
    (found,) = pillarbox.json("outbox", "show", str(EVENTS[0]))["deliveries"]
    assert (found["direction"], found["status"]) == ("inbound", "FAILED")
    (why,) = pillarbox.json("why", str(EVENTS[0]))["deliveries"]
    assert (why["cause"], why["route"]) == ("failed", BILLING.name)
    (why,) = pillarbox.json("why", str(EVENTS[1]))["deliveries"]
    assert (why["cause"], why["remedy"]) == (
        "no-relay",
        "start the consumer: `pillarbox consume MODULE:BOX billing`",
    )
    assert pillarbox.json("trace", found["event_id"])["steps"][-1]["what"] == "failed"


def test_what_took_effect_is_left_alone(pillarbox: CommandLine, both: Database) -> None:
    (failed,) = pillarbox.json("outbox", "list", "--inbound", "--status", "FAILED")["deliveries"]
    execute(both, "DELETE FROM pillarbox_claims")
    done = pillarbox.json("outbox", "redrive", failed["event_id"], "--reason", "mended")
    assert (done["selected"], done["left_alone"]) == (0, {failed["event_id"]: ["dealt with already"]})
    (why,) = pillarbox.json("why", failed["event_id"])["deliveries"]
    assert why["cause"] == "took-effect"
    body = pillarbox.folder / "body.json"
    body.write_text("{}")
    said = pillarbox.complaint(
        "outbox", "edit", failed["event_id"], "--body", str(body), "--reason", "x", code=Exit.PROBLEM
    )
    assert "was dealt with already: there is nothing to edit" in said


def test_a_request_names_the_direction_that_is_meant(pillarbox: CommandLine, both: Database) -> None:
    done = pillarbox.json("outbox", "redrive", "--inbound", "--reason", "mended")
    assert (done["requested"], done["unserved"]) == (1, [BILLING.name])
    assert execute(both, "SELECT action FROM pillarbox_requests") == [("redrive",)]
    (entry,) = pillarbox.json("outbox", "audit")["entries"]
    assert entry["details"]["filter"] == {"status": "FAILED", "direction": "inbound"}


@on_sqlite
def test_an_edit_keeps_the_event_that_came_in(pillarbox: CommandLine, both: Database) -> None:
    body = pillarbox.folder / "body.json"
    body.write_text('{"total":2}')
    (failed,) = pillarbox.json("outbox", "list", "--inbound", "--status", "FAILED")["deliveries"]
    edit = ("outbox", "edit", str(EVENTS[0]), "--body", str(body), "--reason", "wrong total")
    assert pillarbox(*edit).stdout.splitlines()[0] == "edit: asked for, audit entry 1"
    ((event, new),) = execute(both, "SELECT event_id, body FROM pillarbox_requests")
    assert (UUID(event), json.loads(new)) == (UUID(failed["event_id"]), {"total": 2})
    assert all("goes on" not in (it["detail"] or "") for it in pillarbox.json("trace", failed["event_id"])["steps"])


@on_sqlite
def test_a_message_that_is_stored_as_one_binary_is_edited_inside(pillarbox: CommandLine, both: Database) -> None:
    """Its key and its headers could not be stored."""
    headers = {"event_id": str(EVENTS[0]), "content_type": "application/json", "note": "a\0b"}
    whole = {"topic": "orders", "key": "a\0b", "headers": headers, "body": b'{"total":1}'}
    ours = {"pillarbox_whole": "1", "pillarbox_inbox_id": str(EVENTS[0]), "pillarbox_line": "1"}
    values = {"body": msgspec.msgpack.encode(whole), "headers": json.dumps(ours | {"pillarbox_known_by": "event"})}
    execute(both, "UPDATE pillarbox_inbound SET body = :body, headers = :headers WHERE id = 1", **values)
    (shown,) = pillarbox.json("dlq", "show", str(EVENTS[0]), "--payload")["deliveries"]
    assert (shown["payload"], shown["headers"]["note"]) == ('{"total":1}', "a\0b")
    body = pillarbox.folder / "body.json"
    edit = ("dlq", "edit", str(EVENTS[0]), "--body", str(body), "--reason", "wrong total")
    body.write_text("nonsense")
    assert "cannot be read as application/json" in pillarbox.complaint(*edit, code=Exit.PROBLEM)
    body.write_text('{"total":2}')
    pillarbox(*edit)
    ((new,),) = execute(both, "SELECT body FROM pillarbox_requests")
    assert msgspec.msgpack.decode(new) == whole | {"body": b'{"total":2}'}
    (entry,) = pillarbox.json("outbox", "audit", "--payload")["entries"]
    assert base64.b64decode(entry["details"]["old_body"]) == b'{"total":1}'


@on_sqlite
def test_an_edit_is_held_against_the_class_of_the_event(pillarbox: CommandLine, both: Database) -> None:
    (pillarbox.folder / "shop.py").write_text(SHOP)
    body = pillarbox.folder / "body.json"
    edit = ("outbox", "edit", str(EVENTS[0]), "--body", str(body), "--reason", "wrong total")
    headers = {"event_id": str(EVENTS[0]), "event_type": "orders.order.placed", "schema_version": "1"}
    headers |= {"occurred_at": "2024-05-01T12:00:00Z", "content_type": "application/json"}
    execute(both, "UPDATE pillarbox_inbound SET headers = :headers WHERE id = 1", headers=json.dumps(headers))
    for wrong, why in (('{"total":"2"}', "total"), ('{"total":-2}', "ValueError: less than nothing")):
        body.write_text(wrong)
        said = pillarbox.complaint(*edit, "shop", code=Exit.PROBLEM)
        assert "the body makes no orders.order.placed: " in said
        assert why in said
        assert pillarbox.json(*edit, "--dry-run")["checked"] is False
    assert execute(both, "SELECT body FROM pillarbox_requests") == []
    assert "was not held against the class of the event: MODULE:BOX does that" in pillarbox(*edit, "--dry-run").stdout
    body.write_text('{"total":2}')
    done = pillarbox.json(*edit, "shop:box")
    assert (done["checked"], done["audit"]) == (True, 1)


SHOP = """
from pillarbox import IntegrationEvent, Pillarbox

class OrderPlaced(IntegrationEvent, name="orders.order.placed"):
    total: int

    def __post_init__(self):
        if self.total < 0:
            raise ValueError("less than nothing")

box = Pillarbox()
"""


@on_sqlite
def test_doctor_names_claims_without_a_delivery(pillarbox: CommandLine, both: Database) -> None:
    assert "claims" not in checks(pillarbox.json("doctor", code=Exit.PROBLEM))
    execute(both, "DELETE FROM pillarbox_inbound WHERE status = 'PENDING'")
    check = checks(pillarbox.json("doctor", code=Exit.PROBLEM))["claims"]
    assert check["found"] == "2 claims of 1 without a delivery in pillarbox_inbound: somebody deleted rows"


def test_doctor_names_consumers_that_are_away_while_messages_wait(pillarbox: CommandLine, both: Database) -> None:
    consumer = "(:id, 'billing', 'handlers', 'broker', '[]', :at)"
    execute(
        both,
        f"INSERT INTO pillarbox_consumers (id, name, kind, source, topics, updated_at) VALUES {consumer}",
        id=consumer_id("billing"),
        at="2001-01-01 00:00:00",
    )
    execute(both, "UPDATE pillarbox_claims SET consumer = :id", id=consumer_id("billing"))
    found = checks(pillarbox.json("doctor"))
    assert (found["consumers"]["state"], found["consumers"]["found"].partition(" ago, ")[2]) == (
        "warning",
        "and 3 messages that came in wait for it",
    )
    assert found["consumers"]["remedy"].endswith("or `pillarbox consumers forget billing`")
    rows = 9_999
    with open_connection(both) as connection:
        values = {"consumer": consumer_id("billing"), "line": 2, "tenant": "acme", "gate": False}
        connection.execute(insert(claims), [{**values, "inbox_id": uuid4(), "delivery": uuid4()} for _ in range(rows)])
    assert "waiting" not in checks(pillarbox.json("doctor", code=Exit.PROBLEM))
    with open_connection(both) as connection:
        connection.execute(insert(claims).values({**values, "inbox_id": uuid4(), "delivery": uuid4()}))
    found = checks(pillarbox.json("doctor", code=Exit.PROBLEM))
    assert found["waiting"]["found"] == "10,000 messages of tenant 'acme' wait for billing in its lanes"


@contextmanager
def open_connection(database: Database) -> Iterator[Connection]:
    engine = create_engine(database.url(database.server.drivers[-1]))
    with engine.begin() as connection:
        yield connection
    engine.dispose()
