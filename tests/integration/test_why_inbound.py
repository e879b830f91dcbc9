"""`why` and `trace` about what came in, by the id that its sender knows, also where its outbox is elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast
from uuid import UUID

import pytest
from msgspec.structs import replace
from sqlalchemy import delete, text

from pillarbox import Pillarbox, Reject
from pillarbox.cli.trace import Step, life
from pillarbox.cli.why import Answer, explain
from pillarbox.outbox import Status
from pillarbox.stores.operations import Action
from pillarbox.stores.tables import deliveries, outbox
from pillarbox.transports.memory import MemoryTransport
from tests.conftest import EACH_DATABASE, FreshDatabase
from tests.questions import TOPIC, Asked, answering, ask, ask_for, edit, open_box, redrive
from tests.servers import Database

pytestmark = pytest.mark.dialects


@pytest.fixture(params=EACH_DATABASE)
def database(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> Database:
    return fresh_database(request.param, shards=2)


@pytest.fixture
async def box(database: Database) -> AsyncIterator[Pillarbox]:
    async with open_box(database) as (box, _):
        yield box


async def be_elsewhere(box: Pillarbox) -> None:
    """As if the outbox of the sender were in another database."""
    async with box.engine.begin() as connection:
        await connection.execute(delete(outbox))


async def why(box: Pillarbox, event: UUID) -> list[Answer]:
    async with box.engine.connect() as connection:
        return await connection.run_sync(explain, event)


async def trace(box: Pillarbox, event: UUID) -> list[Step]:
    async with box.engine.connect() as connection:
        return await connection.run_sync(life, event)


async def test_what_consumers_have_handled_is_known_by_their_inboxes_alone(box: Pillarbox) -> None:
    for name in ("answers", "others"):
        answering(box, name)
    of_tenants = {tenant: await ask(box, ("a", 1), tenant=tenant) for tenant in (None, "acme", "bolt", "cord")}
    for consumer in box.consumers.values():
        await consumer.drain()
    await be_elsewhere(box)
    for [event] in of_tenants.values():
        assert event.event_id is not None
        answers = await why(box, event.event_id)
        assert [(it.route, it.state, it.cause) for it in answers] == [
            ("consumer:answers", None, "handled"),
            ("consumer:others", None, "handled"),
        ]
        assert answers[0].detail.startswith("consumer answers has dealt with it; it came in at 20")
        assert [(it.route, it.what) for it in await trace(box, event.event_id)] == [
            ("consumer:answers", "handled"),
            ("consumer:others", "handled"),
        ]
    assert [it.cause for it in await why(box, UUID(int=7))] == ["absent"]
    assert await trace(box, UUID(int=7)) == []


async def test_what_has_come_to_its_end_is_found_by_the_id_that_its_sender_knows(box: Pillarbox) -> None:
    consumer, refused = answering(box), {"a": True, "b": True}

    @consumer.on(Asked)
    async def refuse(event: Asked) -> None:
        if refused.get(event.subject):
            raise Reject("not now")

    settled, gone = [event.event_id for event in await ask(box, ("a", 1), ("b", 2))]
    assert settled is not None
    assert gone is not None
    await consumer.drain()
    await be_elsewhere(box)
    assert [it.cause for it in await why(box, settled)] == ["failed"]
    refused["a"] = False
    await edit(box, settled, b'{"subject": "a", "number": 3}')
    await consumer.drain()
    await ask_for(box, Action.DISCARD)
    await consumer.drain()
    [answer] = await why(box, settled)
    assert (answer.state, answer.cause, answer.route) == (Status.SENT, "sent", "consumer:answers")
    [answer] = await why(box, gone)
    assert (answer.state, answer.cause, answer.route) == (Status.DISCARDED, "discarded", "consumer:answers")
    assert answer.detail.startswith("discarded by anna at ")
    steps = await trace(box, settled)
    assert [it.what for it in steps if it.what != "raised"] == ["written", "edit asked for by anna", "sent"]
    steps = await trace(box, gone)
    whole = ["written", "discard asked for by anna", "refused 1 time", "discarded"]
    assert [it.what for it in steps if it.what != "raised"] == whole
    async with box.engine.begin() as connection:
        await connection.execute(delete(deliveries["pillarbox_inbound"]))  # pruned
        await connection.execute(text("DELETE FROM pillarbox_failures"))
    assert [(it.route, it.cause) for it in await why(box, settled)] == [("consumer:answers", "handled")]


async def test_an_event_of_which_another_body_has_come_is_found(box: Pillarbox) -> None:
    """The inbox knows the second one by a hash."""
    consumer = answering(box)
    [event] = await ask(box, ("a", 1))
    await consumer.drain()
    broker = cast("MemoryTransport", box.transports["broker"])
    [sent] = broker.sent(TOPIC)
    await broker.send("a stranger", [replace(sent, body=b'{"subject": "a", "number": 2}')])
    await consumer.drain()
    await be_elsewhere(box)
    assert event.event_id is not None
    assert [it.cause for it in await why(box, event.event_id)] == ["failed"]
    await redrive(box, consumer)
    assert [it.cause for it in await why(box, event.event_id)] == ["sent"]
