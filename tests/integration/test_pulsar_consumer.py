"""A consumer on a real Pulsar: what one box sends exactly once, another takes in once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import String, select, update
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import IntegrationEvent, Pillarbox, Poison, RetryPolicy, Route, UnitOfWork
from pillarbox.consumers.consumer import Consumer
from pillarbox.projections import Add, Change, Projection, ProjectionRow, on
from pillarbox.projections.rebuild import Progress, Stage
from pillarbox.transports.pulsar import PulsarSubscriber, PulsarTransport
from pillarbox.transports.pulsar.admin import Policies
from tests.servers import Database, Pulsar

PATIENCE = 60.0


class Metered(IntegrationEvent, name="test.pulsar-consumer.metered"):
    meter: str
    reading: int


class Base(DeclarativeBase):
    pass


class Reading(Base):
    __tablename__ = "readings"

    id: Mapped[int] = mapped_column(primary_key=True)
    meter: Mapped[str] = mapped_column(String(100))
    reading: Mapped[int]


class TotalRow(ProjectionRow, Base):
    __tablename__ = "meter_totals"

    meter: Mapped[str] = mapped_column(String(100), primary_key=True)
    readings: Mapped[int] = mapped_column(default=0)


class Totals(Projection, row=TotalRow, guarded=False):
    """Nothing but the inbox keeps a reading from being counted twice."""

    @on(Metered)
    def metered(self, event: Metered) -> Change:
        return self.put(meter=event.meter, readings=Add(1))


@pytest.fixture
def topic() -> str:
    return f"meters-{uuid4().hex}"


@pytest.fixture
async def box(postgres_database: Database, pulsar: Pulsar, topic: str) -> AsyncIterator[Pillarbox]:
    engine = create_async_engine(postgres_database.url())
    transport = PulsarTransport(pulsar.url, guarantee="at_least_once")
    routes = [Route("test.pulsar-consumer.*", to="pulsar", topic=topic + "-{tenant}")]
    async with Pillarbox(engine, transports={"pulsar": transport}, routes=routes) as box:
        await box.migrate()
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield box
    await engine.dispose()


async def publish(box: Pillarbox, tenant: str, *readings: int) -> None:
    async with box.unit_of_work(tenant=tenant) as uow:
        for reading in readings:
            uow.publish(Metered(meter=f"{tenant}-{reading % 3}", reading=reading), key=f"{tenant}-{reading % 3}")
    await box.relay().drain()


def reading_meters(box: Pillarbox, topics: list[str], enough: int, *, batch: int = 1) -> tuple[Consumer, asyncio.Event]:
    consumer = box.consumer("meters", source="pulsar", topics=topics, batch=batch, retry=RetryPolicy(0.01, 0.1))
    done, seen = asyncio.Event(), set[tuple[str, int]]()

    @consumer.on(Metered)
    async def note(event: Metered, uow: UnitOfWork) -> None:
        if event.reading == 13:
            raise Poison("nobody likes it")
        uow.add(Reading(meter=event.meter, reading=event.reading))
        seen.add((event.meter, event.reading))
        if len(seen) >= enough:
            done.set()

    return consumer, done


async def run_until(consumer: Consumer, done: asyncio.Event) -> None:
    running = asyncio.create_task(consumer.run())
    try:
        async with asyncio.timeout(PATIENCE):
            await done.wait()
    finally:
        consumer.stop()
        await running


async def readings(box: Pillarbox) -> list[tuple[str, int]]:
    async with box.unit_of_work() as uow:
        found = await uow.session.execute(select(Reading.meter, Reading.reading).order_by(Reading.id))
        return [(meter, reading) for meter, reading in found]


@pytest.mark.parametrize("batch", [1, 50])
@pytest.mark.every_loop
async def test_the_topics_of_all_tenants_by_one_template(box: Pillarbox, topic: str, batch: int) -> None:
    await publish(box, "acme", *range(10))
    await publish(box, "globex", *range(10))
    consumer, done = reading_meters(box, [topic + "-{tenant}"], 20, batch=batch)
    await run_until(consumer, done)
    found = await readings(box)
    for tenant in ("acme", "globex"):
        for key in range(3):
            meter = f"{tenant}-{key}"
            assert [reading for one, reading in found if one == meter] == list(range(key, 10, 3))


async def test_a_projection_of_a_template_is_rebuilt_from_the_topics_that_there_are(box: Pillarbox, topic: str) -> None:
    """Also if one of them comes into being while it is rebuilt."""
    totals = box.projection(Totals, source="pulsar", topics=[topic + "-{tenant}"], retry=RetryPolicy(0.01, 0.1))
    for tenant in ("acme", "globex"):
        await publish(box, tenant, *range(9))
    await totals.drain(idle=1)
    async with box.engine.begin() as connection:
        await connection.execute(update(TotalRow).values(readings=99))

    async def more(progress: Progress) -> None:
        if (progress.stage, progress.rounds) == (Stage.CATCHING_UP, 1) and "initech" not in published:
            published.append("initech")
            await publish(box, "initech", *range(9))
            await totals.drain(idle=1)

    published: list[str] = []
    done = await totals.rebuild("broker", progress=more)
    assert (done.events, done.left_out) == (27, 0)
    async with box.engine.connect() as connection:
        rows = (await connection.execute(select(TotalRow.meter, TotalRow.readings))).all()
    assert {*rows} == {(f"{tenant}-{meter}", 3) for tenant in ("acme", "globex", "initech") for meter in range(3)}
    assert (await totals.drain(idle=1)).handled == 0


async def test_poison_is_on_the_dead_letter_topic(box: Pillarbox, pulsar: Pulsar, topic: str) -> None:
    await publish(box, "acme", 12, 13, 14)
    consumer, done = reading_meters(box, [f"{topic}-acme"], 2)
    await run_until(consumer, done)
    await consumer.drain()
    dead = await PulsarSubscriber(pulsar.url).subscribe([f"{topic}-acme.dlq"], "undertaker")
    await box.relay().drain()
    async with asyncio.timeout(PATIENCE):
        [letter] = await dead.receive(10)
    await dead.close()
    assert letter.message.headers["dlq_reason"].endswith("nobody likes it")
    assert letter.message.headers["dlq_topic"] == f"{topic}-acme"


async def test_h81_the_broker_says_how_long_it_delivers_again(pulsar: Pulsar) -> None:
    transport = PulsarTransport(pulsar.url, admin_url=pulsar.admin_url)
    assert transport.admin is not None
    namespace = f"public/n-{uuid4().hex}"
    await transport.admin.create_namespace(namespace, Policies())
    topics = [f"persistent://{namespace}/orders", f"persistent://{namespace}/plans-{{tenant}}"]
    assert await transport.redelivery(topics) == math.inf
    async with httpx.AsyncClient(base_url=pulsar.admin_url) as client:
        (await client.post(f"/admin/v2/namespaces/{namespace}/messageTTL", json=3_600)).raise_for_status()
    assert await transport.redelivery(topics) == 3_600.0
    await transport.close()
