"""Projections that are written anew while they are read and go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from uuid import UUID, uuid4

import msgspec
import pytest
from sqlalchemy import (
    CheckConstraint,
    Computed,
    Connection,
    ForeignKey,
    Index,
    String,
    func,
    insert,
    inspect,
    select,
    text,
)
from sqlalchemy.event import listen
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Aggregate, IntegrationEvent, Pillarbox, Poison, RetryPolicy, Route, TenantScoped, UnitOfWork
from pillarbox.errors import ConfigurationError, StoreError
from pillarbox.inbox import consumer_id
from pillarbox.outbox import INBOUND, Direction, Status
from pillarbox.projections import Add, Change, Projection, ProjectionRow, history, on, rebuild
from pillarbox.projections.consumer import ProjectionConsumer
from pillarbox.projections.rebuild import Progress, Rebuild, Stage
from pillarbox.projections.shadow import alone
from pillarbox.stores import archive, inspection, operations
from pillarbox.stores import inbox as stored
from pillarbox.stores.archive_file import Writer
from pillarbox.stores.inspection import Filter
from pillarbox.stores.operations import Action, Run, Selection
from pillarbox.stores.retention import RowKey
from pillarbox.stores.tables import claims, deliveries, inbox, outbox
from pillarbox.tenancy import row_level_security
from pillarbox.transport import Message
from pillarbox.transports.memory import MemoryHistory, MemorySubscription, MemoryTransport
from pillarbox.transports.pulsar.names import spellings
from tests.conftest import EACH_DATABASE, FreshDatabase
from tests.domain import make_due
from tests.prove import rebuild as proof
from tests.questions import ANNA, dead_letters, edit
from tests.servers import Database

QUICKLY = RetryPolicy(base=0.001, cap=0.01)
TOPIC = "jars"
JSON = msgspec.json.Decoder()
inbound = deliveries[INBOUND]


class JarMade(IntegrationEvent, name="tests.rebuilt.made", version=1):
    jar_id: UUID
    label: str


class JarFilled(IntegrationEvent, name="tests.rebuilt.filled", version=1):
    jar_id: UUID
    label: str
    grams: int


class JarBroken(IntegrationEvent, name="tests.rebuilt.broken", version=1):
    jar_id: UUID


class Base(DeclarativeBase):
    pass


class Jar(Aggregate, Base):
    __tablename__ = "rebuilt_source"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    label: Mapped[str] = mapped_column(String(20))
    grams: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  SQLAlchemy's way

    @classmethod
    def make(cls, label: str) -> Jar:
        jar = cls(id=uuid4(), label=label, grams=0)
        jar.raise_event(JarMade(jar_id=jar.id, label=label))
        return jar

    def fill(self, grams: int) -> None:
        self.grams += grams
        self.raise_event(JarFilled(jar_id=self.id, label=self.label, grams=grams))

    def smash(self) -> None:
        self.grams = 0
        self.raise_event(JarBroken(jar_id=self.id))


class JarRow(ProjectionRow, Base):
    __tablename__ = "rebuilt_jars"
    __table_args__ = (
        Index("ix_rebuilt_label", "label", "grams"),
        CheckConstraint("grams >= 0", name="ck_rebuilt_grams"),
    )

    jar_id: Mapped[UUID] = mapped_column(primary_key=True)
    label: Mapped[str] = mapped_column(String(20))
    grams: Mapped[int] = mapped_column(default=0)
    code: Mapped[str | None] = mapped_column(String(40), unique=True)


class LabelRow(ProjectionRow, Base):
    """Counts that no version guards: an event that is applied twice, or not at all, shows."""

    __tablename__ = "rebuilt_labels"

    label: Mapped[str] = mapped_column(String(20), primary_key=True)
    fillings: Mapped[int] = mapped_column(default=0)
    grams: Mapped[int] = mapped_column(default=0)


class OwnLabelRow(ProjectionRow, TenantScoped, Base):
    __tablename__ = "rebuilt_own_labels"

    label: Mapped[str] = mapped_column(String(20), primary_key=True)
    grams: Mapped[int] = mapped_column(default=0)


class Jars(Projection, row=JarRow):
    @on(JarMade)
    def made(self, event: JarMade) -> Change:
        return self.put(jar_id=event.jar_id, label=event.label, grams=0, code=f"c{event.jar_id}")

    @on(JarFilled)
    def filled(self, event: JarFilled) -> Change:
        return self.put(jar_id=event.jar_id, label=event.label, grams=Add(event.grams))

    @on(JarBroken)
    def broken(self, event: JarBroken) -> Change:
        return self.remove(jar_id=event.jar_id)


class FaultyJars(Jars, row=JarRow, name="faulty jars"):
    away = False
    """Nothing can be filled now."""

    @on(JarFilled)
    def filled(self, event: JarFilled) -> Change:
        if self.away and event.grams < 10:
            raise ConnectionError("away")
        return self.put(jar_id=event.jar_id, label=event.label, grams=Add(event.grams))


class PickyJars(Jars, row=JarRow, name="picky jars"):
    refused = 1
    """Nobody can bear a filling of so many grams."""

    @on(JarFilled)
    def filled(self, event: JarFilled) -> Change:
        if event.grams == self.refused:
            raise Poison("too little")
        return self.put(jar_id=event.jar_id, label=event.label, grams=Add(event.grams))


class Labels(Projection, row=LabelRow, guarded=False):
    refused: frozenset[int] = frozenset()
    """Nobody can bear fillings of so many grams."""
    broken: type[Exception] | None = None

    @on(JarFilled)
    def filled(self, event: JarFilled) -> Change:
        if event.grams in self.refused:
            raise Poison("too much")
        if self.broken is not None:
            raise self.broken("nobody knows this")
        return self.put(label=event.label, fillings=Add(1), grams=Add(event.grams))


class OwnLabels(Projection, row=OwnLabelRow, guarded=False):
    @on(JarFilled)
    def filled(self, event: JarFilled) -> Change:
        return self.put(label=event.label, grams=Add(event.grams))


@asynccontextmanager
async def open_box(url: str, broker: MemoryTransport | None = None, *, topic: str = TOPIC) -> AsyncIterator[Pillarbox]:
    engine = create_async_engine(url)
    routes = [Route("tests.rebuilt.*", to="broker", topic=topic)]
    transports = {"broker": broker or MemoryTransport()}
    async with Pillarbox(engine, transports=transports, routes=routes, shards=2) as box:
        await box.migrate()
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield box
    await engine.dispose()


@pytest.fixture(params=EACH_DATABASE)
def database(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> Database:
    return fresh_database(request.param, shards=2)


on_postgres = pytest.mark.parametrize("database", ["embedded"], indirect=True)
"""For what does not depend on how a database changes tables: the past is the same rows in each."""


@pytest.fixture
def broker() -> MemoryTransport:
    return MemoryTransport()


@pytest.fixture
async def box(database: Database, broker: MemoryTransport) -> AsyncIterator[Pillarbox]:
    async with open_box(database.url(), broker) as box:
        yield box


@pytest.fixture
async def postgres_box(fresh_database: FreshDatabase) -> AsyncIterator[Pillarbox]:
    async with open_box(fresh_database("embedded", shards=2).url()) as box:
        yield box


def projected(box: Pillarbox, projection: type[Projection] | Projection, **options: Any) -> ProjectionConsumer:
    return box.projection(projection, source="outbox", retry=QUICKLY, **options)


async def fill_jars(box: Pillarbox, count: int, *, label: str = "plum", tenant: str | None = None) -> None:
    """Some jars, each with a life; every third one breaks."""
    jars = [Jar.make(f"{label} {number % 3}") for number in range(count)]
    async with box.unit_of_work(tenant=tenant) as uow:
        uow.add(*jars)
    for turn in range(3):
        async with box.unit_of_work(tenant=tenant) as uow:
            for number, jar in enumerate(jars):
                found = await uow.session.get_one(Jar, jar.id)
                if turn == 2 and number % 3 == 0:
                    found.smash()
                else:
                    found.fill(10 * turn + number)


async def rows_of(box: Pillarbox | AsyncEngine, row: Any) -> list[tuple[Any, ...]]:
    """All that events have written."""
    engine = box.engine if isinstance(box, Pillarbox) else box
    table = row.__table__
    columns = [column for column in table.c if column.name != "projected_at"]
    async with engine.connect() as connection:
        return [tuple(it) for it in await connection.execute(select(*columns).order_by(*table.primary_key))]


async def unsent(box: Pillarbox) -> int:
    """How much the projections have not dealt with."""
    counted = text(
        "SELECT count(*) FROM pillarbox_unsent u JOIN pillarbox_routes r ON r.id = u.route "
        "WHERE r.destination = 'local'"
    )
    async with box.engine.connect() as connection:
        return int((await connection.execute(counted)).scalar_one())


async def sent_all(box: Pillarbox, consumer: ProjectionConsumer) -> None:
    """Let it have what waits for another try, too."""
    async with asyncio.timeout(30):
        while True:
            await consumer.drain()
            if not await unsent(box):
                return
            await asyncio.sleep(0.05)


async def spoil(box: Pillarbox, table: str, change: str) -> None:
    async with box.engine.begin() as connection:
        await connection.execute(text(f"UPDATE {table} SET {change}"))


async def tables_of(box: Pillarbox) -> set[str]:
    async with box.engine.connect() as connection:
        return {name for name in await connection.run_sync(lambda it: inspect(it).get_table_names()) if "__" in name}


async def generation(box: Pillarbox, name: str) -> int:
    async with box.engine.connect() as connection:
        return await connection.run_sync(stored.hold_generation, name)


async def inbox_size(box: Pillarbox, name: str, generation: int) -> int:
    async with box.engine.connect() as connection:
        counted = select(func.count()).where(inbox.c.consumer == consumer_id(name, generation))
        return (await connection.execute(counted)).scalar_one()


def at(stage: Stage, work: Callable[[], Awaitable[object]]) -> Callable[[Progress], Awaitable[None]]:
    """Do this when the rebuild first comes to that stage."""
    done: list[Stage] = []

    async def tell(progress: Progress) -> None:
        if progress.stage is stage and not done:
            done.append(stage)
            await work()

    return tell


# -- what comes of it --------------------------------------------------------------------------------------------------


@pytest.mark.dialects
async def test_a_spoilt_table_is_again_what_the_events_say(box: Pillarbox) -> None:
    jars, labels = projected(box, Jars), projected(box, Labels)
    await fill_jars(box, 10)
    await jars.drain()
    await labels.drain()
    whole, counts = await rows_of(box, JarRow), await rows_of(box, LabelRow)
    await spoil(box, "rebuilt_jars", "grams = 7, label = 'wrong'")
    await spoil(box, "rebuilt_labels", "grams = 7")
    done = await jars.rebuild()
    assert (done.generation, done.events, done.left_out) == (2, 40, 0)
    await labels.rebuild()
    assert await rows_of(box, JarRow) == whole
    assert await rows_of(box, LabelRow) == counts
    assert await tables_of(box) == set()
    assert (await inbox_size(box, "rebuilt_jars", 1), await inbox_size(box, "rebuilt_jars", 2)) == (0, 40)


async def test_again_and_again_and_the_live_one_goes_on_each_time(box: Pillarbox) -> None:
    labels = projected(box, Labels)
    for number in range(1, 4):
        await fill_jars(box, 3)
        await labels.drain()
        whole = await rows_of(box, LabelRow)
        done = await labels.rebuild()
        assert (done.generation, done.events) == (number + 1, 8 * number)
        assert await rows_of(box, LabelRow) == whole
    again = await labels.drain()
    assert (again.handled, again.duplicates) == (0, 0)


@pytest.mark.dialects
async def test_names_of_indexes_and_constraints_stay(box: Pillarbox) -> None:
    jars = projected(box, Jars)

    def shape(connection: Connection) -> list[Any]:
        known, table = inspect(connection), "rebuilt_jars"
        return [
            known.get_pk_constraint(table),
            sorted(known.get_indexes(table), key=lambda it: str(it["name"])),
            sorted(known.get_unique_constraints(table), key=lambda it: str(it["name"])),
            known.get_check_constraints(table),
            [{**column, "type": str(column["type"])} for column in known.get_columns(table)],
        ]

    async with box.engine.connect() as connection:
        before = await connection.run_sync(shape)
    await fill_jars(box, 2)
    await jars.rebuild()
    await jars.rebuild()
    async with box.engine.connect() as connection:
        assert await connection.run_sync(shape) == before


@pytest.mark.dialects
async def test_foreign_keys_and_computed_columns_of_the_table(box: Pillarbox) -> None:
    """The database, and not an event, writes the one; the other table is not there for a temporary one."""

    class Own(DeclarativeBase):
        pass

    class Shelf(Own):
        __tablename__ = "rebuilt_shelves"

        label: Mapped[str] = mapped_column(String(20), primary_key=True)

    class StackRow(ProjectionRow, Own):
        __tablename__ = "rebuilt_stacks"

        label: Mapped[str] = mapped_column(ForeignKey(Shelf.label), primary_key=True)
        grams: Mapped[int] = mapped_column(default=0)
        double: Mapped[int] = mapped_column(Computed("grams * 2", persisted=True))

    class Stacks(Projection, row=StackRow, guarded=False):
        @on(JarFilled)
        def filled(self, event: JarFilled) -> Change:
            return self.put(label=event.label, grams=Add(event.grams))

    if box.engine.dialect.name == "sqlite":
        listen(box.engine.sync_engine, "connect", lambda made, _: made.execute("PRAGMA foreign_keys = ON"))
    async with box.engine.begin() as connection:
        await connection.run_sync(Own.metadata.create_all)
        await connection.execute(insert(Shelf), [{"label": f"plum {number}"} for number in range(3)])
    stacks = projected(box, Stacks)
    await fill_jars(box, 3)
    await stacks.drain()
    whole = await rows_of(box, StackRow)
    await spoil(box, "rebuilt_stacks", "grams = 7")
    await stacks.rebuild()
    assert await rows_of(box, StackRow) == whole
    assert all(row[2] == 2 * row[1] for row in whole)


async def test_what_waits_in_the_outbox_is_applied_once(box: Pillarbox) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 5)
    done = await labels.rebuild()
    assert done.events == 14 - 1
    whole = await rows_of(box, LabelRow)
    tally = await labels.drain()
    assert (tally.handled, tally.duplicates) == (0, 13)
    assert await rows_of(box, LabelRow) == whole


@pytest.mark.parametrize("stage", [Stage.REPLAYING, Stage.CATCHING_UP, Stage.SWITCHING, Stage.CLEARING])
async def test_what_comes_meanwhile_is_there_once(box: Pillarbox, stage: Stage) -> None:
    if stage is Stage.SWITCHING and box.engine.dialect.name == "sqlite":
        pytest.skip("writers take turns")
    labels = projected(box, Labels)
    await fill_jars(box, 4)
    await labels.drain()
    await spoil(box, "rebuilt_labels", "grams = 7")

    async def more() -> None:
        await fill_jars(box, 4, label="pear")
        if stage is not Stage.SWITCHING:  # then it waits
            await labels.drain()
        await fill_jars(box, 4, label="fig")

    await labels.rebuild(progress=at(stage, more))
    await labels.drain()
    assert [(row[0], *row[1:3]) for row in await rows_of(box, LabelRow)] == await folded(box)


async def folded(box: Pillarbox) -> list[tuple[str, int, int]]:
    """What the labels must be, from the events themselves."""
    totals: dict[str, tuple[int, int]] = {}
    async with box.engine.connect() as connection:
        named = select(outbox.c.body).where(outbox.c.event_type == "tests.rebuilt.filled", outbox.c.topic == TOPIC)
        for (body,) in await connection.execute(named):
            said = JSON.decode(bytes(body))
            fillings, grams = totals.get(said["label"], (0, 0))
            totals[said["label"]] = fillings + 1, grams + said["grams"]
    return sorted((label, *counts) for label, counts in totals.items())


async def test_with_writers_and_the_live_one_at_work_all_the_time(box: Pillarbox) -> None:
    labels = projected(box, Labels, batch=20)
    await fill_jars(box, 20)
    running = asyncio.create_task(labels.run())
    busy = True

    async def write() -> None:
        while busy:
            await fill_jars(box, 3, label="pear")
            await asyncio.sleep(0.01)  # SQLite has no queue: a writer that never rests keeps the others out

    writing = asyncio.create_task(write())
    try:
        for number in (2, 3):
            done = await labels.rebuild()
            assert done.generation == number
    finally:
        busy = False
        await writing
        labels.stop()
        await running
    await sent_all(box, labels)
    assert [(row[0], *row[1:3]) for row in await rows_of(box, LabelRow)] == await folded(box)


@pytest.mark.dialects
async def test_each_tenant_has_its_own_rows(box: Pillarbox) -> None:
    labels = projected(box, OwnLabels)
    for tenant in ("acme", "globex"):
        await fill_jars(box, 4, tenant=tenant)
    await labels.drain()
    whole = await rows_of(box, OwnLabelRow)
    await spoil(box, "rebuilt_own_labels", "grams = 7")
    await labels.rebuild()
    assert await rows_of(box, OwnLabelRow) == whole
    assert {row[0] for row in whole} == {"acme", "globex"}


# -- what cannot be applied --------------------------------------------------------------------------------------------


@on_postgres
async def test_an_event_that_nobody_can_bear_is_left_out(box: Pillarbox) -> None:
    projection = Labels()
    labels = await received(box, projection, refused={2})
    whole = await rows_of(box, LabelRow)
    done = await labels.rebuild()
    assert (done.events, done.left_out) == (12, 1)
    assert await rows_of(box, LabelRow) == whole
    assert [letter.reason for letter in await dead_letters(box)] == ["Poison: too much"]


@on_postgres
async def test_what_has_failed_in_the_outbox_is_left_to_the_live_one(box: Pillarbox) -> None:
    projection = Labels()
    projection.refused = frozenset({2})
    labels = projected(box, projection)
    await fill_jars(box, 5)
    await labels.drain()
    whole = await rows_of(box, LabelRow)
    projection.refused = frozenset()
    done = await labels.rebuild()
    assert (done.events, done.left_out) == (12, 0)
    assert await rows_of(box, LabelRow) == whole
    await ask_for(box, Action.REDRIVE, labels, Direction.OUTBOUND)
    await labels.drain()
    assert [row[:3] for row in await rows_of(box, LabelRow)] == await folded(box)
    assert await dead_letters(box) == []


@on_postgres
async def test_one_that_cannot_be_applied_any_more_is_said_in_the_log(
    box: Pillarbox, caplog: pytest.LogCaptureFixture
) -> None:
    projection = Labels()
    labels = projected(box, projection)
    await fill_jars(box, 5)
    await labels.drain()
    projection.refused = frozenset({2})
    assert (await labels.rebuild()).left_out == 1
    assert "is left out: Poison: too much" in caplog.text
    assert (await labels.drain()).handled == 0
    projection.refused = frozenset()
    await labels.rebuild()
    assert [row[:3] for row in await rows_of(box, LabelRow)] == await folded(box)


@on_postgres
async def test_an_error_that_nobody_knows_ends_it_and_leaves_everything(box: Pillarbox) -> None:
    projection = Labels()
    labels = projected(box, projection)
    await fill_jars(box, 3)
    await labels.drain()
    await spoil(box, "rebuilt_labels", "grams = 7")
    spoilt = await rows_of(box, LabelRow)
    projection.broken = RuntimeError
    with pytest.raises(StoreError, match=r"is as it was: event .* RuntimeError: nobody knows this"):
        await labels.rebuild()
    assert await rows_of(box, LabelRow) == spoilt
    assert await tables_of(box) == set()
    assert (await generation(box, labels.name), await inbox_size(box, labels.name, 2)) == (1, 0)


@on_postgres
async def test_an_event_that_cannot_be_built_is_treated_as_one_that_cannot_be_applied(
    box: Pillarbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 3)
    await labels.drain()
    whole = await rows_of(box, LabelRow)

    raised: Exception = RuntimeError("nobody knows this")
    make = JarFilled.__init__

    def refuse(event: JarFilled, **fields: Any) -> None:
        if fields["grams"] == 2:
            raise raised
        make(event, **fields)

    monkeypatch.setattr(JarFilled, "__init__", refuse)
    with pytest.raises(StoreError, match=r"is as it was: event \S+ \(tests.rebuilt.filled\) .* RuntimeError: nobody"):
        await labels.rebuild()
    assert await rows_of(box, LabelRow) == whole
    raised = Poison("too much")
    assert (await labels.rebuild()).left_out == 1


@on_postgres
async def test_what_a_failure_keeps_back_is_left_to_the_live_one(box: Pillarbox) -> None:
    projection = FaultyJars()
    jars = box.projection(projection, source="outbox", retry=RetryPolicy(base=3600, cap=3600))
    jar = Jar.make("plum")
    async with box.unit_of_work() as uow:
        uow.add(jar)
    projection.away = True
    for grams in (1, 20, 300):
        async with box.unit_of_work() as uow:
            (await uow.session.get_one(Jar, jar.id)).fill(grams)
        if grams < 300:
            await jars.drain()  # the first one is to be tried again, and the second one waits for it
    projection.away = False
    done = await jars.rebuild()
    assert done.events == 1
    await make_due(box.engine)
    await jars.drain()
    [row] = await rows_of(box, JarRow)
    assert 321 in row
    assert (await jars.rebuild()).events == 4
    assert await rows_of(box, JarRow) == [row]


@pytest.mark.dialects
async def test_what_was_edited_in_the_outbox_is_applied_as_edited(box: Pillarbox) -> None:
    jars = box.projection(PickyJars(), source="outbox", retry=QUICKLY)
    jar = Jar.make("plum")
    async with box.unit_of_work() as uow:
        uow.add(jar)
    async with box.unit_of_work() as uow:
        (await uow.session.get_one(Jar, jar.id)).fill(1)
    await jars.drain()
    [letter] = await dead_letters(box)
    assert letter.event_id is not None
    edited = msgspec.json.encode({**JSON.decode(letter.message.body), "grams": 5})
    async with box.engine.begin() as connection:
        found = await connection.run_sync(inspection.deliveries_of, UUID(letter.event_id), payload=False)
        [failed] = [each for each in found if each.status is Status.FAILED]
        await connection.run_sync(operations.edit, failed, ANNA, old=b"", new=edited, event_id=uuid4())
    await jars.drain()
    whole = await rows_of(box, JarRow)
    assert 5 in whole[0]
    done = await jars.rebuild()
    assert (done.events, done.left_out) == (2, 0)
    assert await rows_of(box, JarRow) == whole


# -- what waits in inbound lanes ---------------------------------------------------------------------------------------


async def received(box: Pillarbox, projection: Labels, *, refused: set[int]) -> ProjectionConsumer:
    """A projection behind the broker that has had the life of five jars, but for fillings of so many grams."""
    projection.refused = frozenset(refused)
    labels = box.projection(projection, source="broker", topics=[TOPIC], retry=QUICKLY)
    await fill_jars(box, 5)
    await box.relay().drain()
    await labels.drain()
    assert len(await dead_letters(box)) == len(refused)
    return labels


async def ask_for(
    box: Pillarbox,
    action: Action,
    consumer: ProjectionConsumer,
    direction: Direction = Direction.INBOUND,
    events: Sequence[UUID] = (),
) -> None:
    """Redrive or discard what has failed of it, as an operator does."""
    selection = Selection(action, Filter(direction=direction, status=Status.FAILED), tuple(events))
    async with box.engine.begin() as connection:
        run = await connection.run_sync(operations.request, selection, ANNA, Run(), 100)
    assert run.requested, consumer.name


async def delivery(box: Pillarbox, grams: int) -> UUID:
    """The id of the row of the inbound lane in which such a filling has failed."""
    [found] = [letter for letter in await dead_letters(box) if JSON.decode(letter.message.body)["grams"] == grams]
    async with box.engine.connect() as connection:
        [event] = await connection.scalars(select(inbound.c.event_id).where(inbound.c.id == found.row))
    return UUID(str(event))


async def edit_filling(box: Pillarbox, grams: int, other: int) -> None:
    """Let a failed filling be another one, as an operator does."""
    [found] = [letter for letter in await dead_letters(box) if JSON.decode(letter.message.body)["grams"] == grams]
    body = msgspec.json.encode({**JSON.decode(found.message.body), "grams": other})
    await edit(box, await delivery(box, grams), body)


async def waiting(box: Pillarbox) -> int:
    """How many claims there are."""
    async with box.engine.connect() as connection:
        return (await connection.execute(select(func.count()).select_from(claims))).scalar_one()


async def grams_of(box: Pillarbox) -> int:
    return sum(row[2] for row in await rows_of(box, LabelRow))


PASTS = pytest.mark.parametrize("source", ["outbox", "broker"])


@pytest.mark.dialects
@PASTS
async def test_what_waits_and_can_be_applied_counts_as_handled(
    box: Pillarbox, broker: MemoryTransport, source: Literal["outbox", "broker"]
) -> None:
    projection = Labels()
    labels = await received(box, projection, refused={2})
    projection.refused = frozenset()
    assert (await labels.rebuild(source)).events == 13
    whole = await rows_of(box, LabelRow)
    assert [row[:3] for row in whole] == await folded(box)
    assert await waiting(box) == 0
    broker.redeliver(TOPIC)
    assert (await labels.drain()).handled == 0
    assert await rows_of(box, LabelRow) == whole
    assert await dead_letters(box) == []


@pytest.mark.dialects
@PASTS
async def test_what_waits_and_cannot_be_applied_goes_on_waiting(
    box: Pillarbox, broker: MemoryTransport, source: Literal["outbox", "broker"]
) -> None:
    projection = Labels()
    labels = await received(box, projection, refused={2})
    for events in (12, 12):
        assert (await labels.rebuild(source)).events == events
        assert await waiting(box) == 1
        broker.redeliver(TOPIC)
        assert (await labels.drain()).handled == 0
    async with box.engine.connect() as connection:
        sizes = await connection.execute(select(func.count()).select_from(inbox).group_by(inbox.c.consumer))
        assert [*sizes.scalars()] == [13], "of the last generation alone"
    projection.refused = frozenset()
    await ask_for(box, Action.REDRIVE, labels)
    assert (await labels.drain()).handled == 1
    assert [row[:3] for row in await rows_of(box, LabelRow)] == await folded(box)
    assert (await waiting(box), await dead_letters(box)) == (0, [])


@pytest.mark.dialects
async def test_what_is_to_be_tried_again_keeps_its_place(box: Pillarbox) -> None:
    """Its key waits behind it, before and after."""
    projection = FaultyJars()
    jars = box.projection(projection, source="broker", topics=[TOPIC], retry=QUICKLY)
    jar = Jar.make("plum")
    async with box.unit_of_work() as uow:
        uow.add(jar)
    projection.away = True
    for grams in (1, 20, 300):
        async with box.unit_of_work() as uow:
            (await uow.session.get_one(Jar, jar.id)).fill(grams)
    await box.relay().drain()
    await jars.drain()
    assert await waiting(box) == 3
    projection.away = False
    await archive_jars(box)
    await jars.rebuild(incomplete=True)
    assert await waiting(box) == 3
    while await waiting(box):
        await jars.drain()
    [row] = await rows_of(box, JarRow)
    assert 321 in row


async def archive_jars(box: Pillarbox) -> None:
    """The outbox has lost all that was sent."""
    async with box.engine.begin() as connection:
        await connection.execute(outbox.delete().where(outbox.c.topic == TOPIC))


@pytest.mark.dialects
@PASTS
async def test_what_people_have_decided_about_dead_letters_holds(
    box: Pillarbox, broker: MemoryTransport, source: Literal["outbox", "broker"]
) -> None:
    projection = Labels()
    labels = await received(box, projection, refused={2, 3, 4})
    await edit_filling(box, 2, 50)
    await edit_filling(box, 4, 4_000)
    await ask_for(box, Action.DISCARD, labels, events=[await delivery(box, 3)])
    projection.refused = frozenset({2, 3, 4, 4_000})
    await labels.drain()
    assert await waiting(box) == 1, "4000 is too much, too"
    whole = await rows_of(box, LabelRow)
    projection.refused = frozenset({2, 4})
    for _ in range(2):
        done = await labels.rebuild(source)
        assert (done.events, done.left_out) == (12, 1)
        assert await grams_of(box) == sum(row[2] for row in whole) + 4_000
        assert await waiting(box) == 0
        broker.redeliver(TOPIC)
        assert (await labels.drain()).handled == 0
    assert await dead_letters(box) == []


@pytest.mark.dialects
async def test_what_a_rebuild_has_applied_before_it_died_is_not_lost(
    box: Pillarbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has a claim is not pruned. It must go all the same if it is of a generation that never came."""
    projection = Labels()
    labels = await received(box, projection, refused={2})
    projection.refused = frozenset()

    async def die() -> None:
        raise Killed

    async def nothing(_rebuild: Rebuild) -> None:
        """Who is dead does not clean up."""

    with monkeypatch.context() as patch:
        patch.setattr(Rebuild, "_end", nothing)
        with pytest.raises(Killed):
            await labels.rebuild(progress=at(Stage.CATCHING_UP, die))
    assert (await labels.rebuild()).events == 13
    assert [row[:3] for row in await rows_of(box, LabelRow)] == await folded(box)


@pytest.mark.dialects
@pytest.mark.parametrize("action", [Action.DISCARD, Action.EDIT])
async def test_a_decision_that_comes_after_its_event_was_applied_ends_it(box: Pillarbox, action: Action) -> None:
    projection = Labels()
    labels = await received(box, projection, refused={2})
    spoilt = await rows_of(box, LabelRow)

    async def decide() -> None:
        if action is Action.EDIT:
            await edit_filling(box, 2, 50)
        else:
            await ask_for(box, action, labels)
        await labels.drain()

    projection.refused = frozenset()
    with pytest.raises(StoreError, match="a person edited or discarded it: rebuild again"):
        await labels.rebuild(progress=at(Stage.CATCHING_UP, decide))
    more = 50 if action is Action.EDIT else 0
    assert await grams_of(box) == sum(row[2] for row in spoilt) + more
    await labels.rebuild()
    assert await grams_of(box) == sum(row[2] for row in spoilt) + more


@on_postgres
async def test_a_decision_that_comes_too_late_is_found_after_a_lock_too(
    box: Pillarbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    projection = Labels()
    labels = await received(box, projection, refused={2})
    look, waits = rebuild._digest_in_inbox, [ConnectionError("locked")]

    def wait_once(consumer: int, place: rebuild.Place) -> Any:
        if waits:
            raise waits.pop()
        return look(consumer, place)

    async def decide() -> None:
        await edit_filling(box, 2, 50)
        await labels.drain()
        monkeypatch.setattr(rebuild, "_digest_in_inbox", wait_once)

    projection.refused = frozenset()
    with pytest.raises(StoreError, match="a person edited or discarded it: rebuild again"):
        await labels.rebuild(progress=at(Stage.CATCHING_UP, decide))
    assert waits == []


@pytest.mark.dialects
@PASTS
@pytest.mark.parametrize("action", [Action.DISCARD, Action.EDIT])
async def test_a_decision_that_comes_before_its_event_could_be_applied_holds(
    box: Pillarbox, source: Literal["outbox", "broker"], action: Action
) -> None:
    labels = await received(box, Labels(), refused={2})
    before = await grams_of(box)

    async def decide() -> None:
        if action is Action.EDIT:
            await edit_filling(box, 2, 50)
        else:
            await ask_for(box, action, labels)
        await labels.drain()

    rebuilding = labels.rebuild(source, progress=at(Stage.CATCHING_UP, decide))
    if (source, action) == ("broker", Action.EDIT):  # it is not read twice
        with pytest.raises(StoreError, match="it has had 1 events or more that are not found"):
            await rebuilding
        rebuilding = labels.rebuild(source)
    done = await rebuilding
    edited = action is Action.EDIT
    assert (done.events, done.left_out) == ((13, 0) if edited else (12, 1))
    assert await grams_of(box) == before + (50 if edited else 0)
    assert await waiting(box) == 0


FILLED = {"event_type": "tests.rebuilt.filled", "occurred_at": "2026-01-01T00:00:00Z"}


def filling(event_id: UUID, grams: int, version: str = "v1", body: bytes | None = None) -> Message:
    """From a stranger."""
    said = body or msgspec.json.encode({"jar_id": event_id, "label": "plum", "grams": grams})
    headers = {"event_id": str(event_id), "schema_version": version, **FILLED}
    return Message(TOPIC, "plum", said, headers)


@pytest.mark.dialects
@pytest.mark.parametrize("other", ["another body", "an unknown version", "one that cannot be read"])
async def test_a_discarded_form_of_an_event_is_no_decision_about_its_other_forms(
    box: Pillarbox, broker: MemoryTransport, other: str
) -> None:
    labels = box.projection(Labels, source="broker", topics=[TOPIC], retry=QUICKLY)
    event_id = uuid4()
    forms = {
        "another body": filling(event_id, 7),
        "an unknown version": filling(event_id, 7, "v9"),
        "one that cannot be read": filling(event_id, 7, "v9", b"nonsense"),
    }
    await broker.send("somebody", [filling(event_id, 5)])
    await labels.drain()
    await broker.send("somebody", [forms[other]])
    await labels.drain()
    assert len(await dead_letters(box)) == 1
    await ask_for(box, Action.DISCARD, labels)
    await labels.drain()
    for _ in range(2):
        assert (await labels.rebuild("broker")).events == 1
        assert await grams_of(box) == 5
        broker.redeliver(TOPIC)
        assert (await labels.drain()).handled == 0
        assert await dead_letters(box) == [], "what was discarded stays so"


@pytest.mark.dialects
async def test_what_could_not_be_read_and_was_edited_is_brought_in_as_edited(
    box: Pillarbox, broker: MemoryTransport
) -> None:
    labels = box.projection(Labels, source="broker", topics=[TOPIC], retry=QUICKLY)
    event_id = uuid4()
    await broker.send("somebody", [filling(event_id, 5, body=b"nonsense")])
    await labels.drain()
    async with box.engine.connect() as connection:
        [row] = await connection.scalars(select(inbound.c.event_id))
    await edit(box, UUID(str(row)), filling(event_id, 6).body)
    await labels.drain()
    assert await grams_of(box) == 6
    for _ in range(2):
        assert (await labels.rebuild("broker")).events == 1
        assert await grams_of(box) == 6
        broker.redeliver(TOPIC)
        assert (await labels.drain()).handled == 0
        assert await dead_letters(box) == []


@pytest.mark.dialects
async def test_what_strangers_wrote_and_a_person_discarded_stays_discarded(
    box: Pillarbox, broker: MemoryTransport
) -> None:
    """No database takes such a header: the message is one binary in its lane."""
    projection = Labels()
    projection.refused = frozenset({5})
    labels = box.projection(projection, source="broker", topics=[TOPIC], retry=QUICKLY)
    strange = filling(uuid4(), 5)
    await broker.send("somebody", [Message(TOPIC, "plum", strange.body, {**strange.headers, "note": "x\0y"})])
    await labels.drain()
    await ask_for(box, Action.DISCARD, labels)
    await labels.drain()
    projection.refused = frozenset()
    done = await labels.rebuild("broker")
    assert (done.events, done.left_out) == (0, 1)


async def too_late(box: Pillarbox, jars: ProjectionConsumer) -> None:
    """A jar whose first filling was poison, and whose second one was applied."""
    jar = Jar.make("plum")
    async with box.unit_of_work() as uow:
        uow.add(jar)
    for grams in (1, 20):
        async with box.unit_of_work() as uow:
            (await uow.session.get_one(Jar, jar.id)).fill(grams)
    await box.relay().drain()
    await jars.drain()
    assert len(await dead_letters(box)) == 1


@pytest.mark.parametrize("source", ["broker", "outbox"])
async def test_h85_a_redrive_that_is_too_late_changes_nothing_and_a_rebuild_brings_it_in_its_turn(
    box: Pillarbox, source: str
) -> None:
    projection = PickyJars()
    jars = box.projection(projection, source=source, topics=[TOPIC] if source == "broker" else [], retry=QUICKLY)
    await too_late(box, jars)
    projection.refused = 0
    before = await rows_of(box, JarRow)
    await ask_for(box, Action.REDRIVE, jars, Direction.INBOUND if source == "broker" else Direction.OUTBOUND)
    await jars.drain()
    assert await rows_of(box, JarRow) == before
    assert 20 in before[0]
    assert await dead_letters(box) == []
    await jars.rebuild()
    [row] = await rows_of(box, JarRow)
    assert 21 in row


@on_postgres
async def test_one_that_is_too_late_and_was_edited_is_brought_in_as_edited(box: Pillarbox) -> None:
    jars = box.projection(PickyJars(), source="broker", topics=[TOPIC], retry=QUICKLY)
    await too_late(box, jars)
    await edit_filling(box, 1, 5)
    await jars.drain()
    [row] = await rows_of(box, JarRow)
    assert 20 in row
    done = await jars.rebuild()
    assert (done.events, done.left_out) == (3, 0)
    [row] = await rows_of(box, JarRow)
    assert 25 in row


# -- other pasts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["v1", "v9"])
async def test_what_comes_in_an_unknown_version_too_is_applied_in_the_known_one(box: Pillarbox, first: str) -> None:
    broker = MemoryTransport()
    labels = box.projection(Labels, source=broker, topics=[TOPIC], retry=QUICKLY)
    headers = {"event_id": str(uuid4()), "event_type": "tests.rebuilt.filled", "occurred_at": "2026-01-01T00:00:00Z"}
    bodies = {"v1": msgspec.json.encode({"jar_id": uuid4(), "label": "plum", "grams": 5}), "v9": b"{}"}
    for version in sorted(bodies, reverse=first == "v9"):
        message = Message(TOPIC, "plum", bodies[version], {**headers, "schema_version": version})
        await broker.send("somebody", [message])
        await labels.drain()
    whole = await rows_of(box, LabelRow)
    assert whole[0][:3] == ("plum", 1, 5)
    for _ in range(2):
        assert (await labels.rebuild("broker")).events == 1
        assert await rows_of(box, LabelRow) == whole


@pytest.mark.parametrize("source", ["broker", "outbox"])
async def test_of_a_projection_behind_a_broker(box: Pillarbox, source: Literal["broker", "outbox"]) -> None:
    labels = box.projection(Labels, source="broker", topics=[TOPIC], retry=QUICKLY)
    await fill_jars(box, 4)
    await box.relay().drain()
    await labels.drain()
    await spoil(box, "rebuilt_labels", "grams = 7")

    async def more() -> None:
        await fill_jars(box, 4, label="pear")
        await box.relay().drain()
        await labels.drain()

    done = await labels.rebuild(source, progress=at(Stage.CATCHING_UP, more))
    assert done.events == 20
    await labels.drain()
    assert [(row[0], *row[1:3]) for row in await rows_of(box, LabelRow)] == await folded(box)
    done = await labels.rebuild(source)
    assert (done.generation, done.events) == (3, 20)


@on_postgres
async def test_what_the_live_one_ignores_is_not_left_out(box: Pillarbox, broker: MemoryTransport) -> None:
    labels = box.projection(Labels, source="broker", topics=[TOPIC], retry=QUICKLY, ignores=["tests.audit.*"])
    await fill_jars(box, 4)
    await box.relay().drain()
    named = {"event_type": "tests.audit.seen", "schema_version": "v1", "occurred_at": "2026-01-01T00:00:00Z"}
    await broker.send("x", [Message(TOPIC, "k", b"{}", {"event_id": str(uuid4()), **named})])
    await labels.drain()
    done = await labels.rebuild("broker")
    assert (done.events, done.left_out) == (10, 0)
    assert await dead_letters(box) == []


def archived(connection: Connection, file: Path, topic: str) -> None:
    """Move to a file what the outbox has for a topic."""
    rows = connection.execute(select(outbox).where(outbox.c.topic == topic).order_by(outbox.c.id)).all()
    keys = [RowKey(row.id, row.event_id, row.route, row.schema_version, 0) for row in rows]
    writer = Writer(file, archive.header(connection, datetime.now(UTC)))
    writer.add(archive.fetch(connection, keys))
    writer.close()
    writer.finish()
    connection.execute(outbox.delete().where(outbox.c.topic == topic))


async def test_from_archives_and_then_the_outbox(box: Pillarbox, tmp_path: Path) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 4)
    await labels.drain()
    file = tmp_path / "old.jsonl"
    async with box.engine.begin() as connection:
        await connection.run_sync(archived, file, labels.name)
    await fill_jars(box, 4, label="pear")
    await labels.drain()
    whole = await rows_of(box, LabelRow)
    await spoil(box, "rebuilt_labels", "grams = 7")
    with pytest.raises(StoreError, match="it has had 10 events or more"):
        await labels.rebuild()
    assert (await labels.rebuild([file])).events == 20
    assert await rows_of(box, LabelRow) == whole
    file.write_bytes(file.read_bytes().replace(b"plum 1", b"plum 2"))
    with pytest.raises(StoreError, match="is damaged"):
        await labels.rebuild([file])
    assert await rows_of(box, LabelRow) == whole


class SpelledAsPulsarDoes(MemoryTransport):
    """A broker for which ``persistent://public/default/jars`` and ``jars`` are one topic."""

    async def subscribe(self, topics: Sequence[str], group: str) -> MemorySubscription:
        return await super().subscribe([self.spellings(topic)[0] for topic in topics], group)

    async def reread(self, topics: Sequence[str]) -> MemoryHistory:
        return await super().reread([self.spellings(topic)[0] for topic in topics])

    def spellings(self, topic: str) -> Sequence[str]:
        return spellings(topic)


async def test_of_a_template_of_topics_that_the_route_spells_otherwise(database: Database, tmp_path: Path) -> None:
    async with open_box(
        database.url(), SpelledAsPulsarDoes(), topic="persistent://public/default/jars-{tenant}"
    ) as box:
        labels = box.projection(Labels, source="broker", topics=["jars-{tenant}"], retry=QUICKLY)
        for tenant in ("acme", "globex"):
            await fill_jars(box, 4, tenant=tenant)
        await box.relay().drain()
        await labels.drain()
        whole = await rows_of(box, LabelRow)
        await spoil(box, "rebuilt_labels", "grams = 7")
        assert (await labels.rebuild()).events == 20
        assert await rows_of(box, LabelRow) == whole
        file = tmp_path / "acme.jsonl"
        async with box.engine.begin() as connection:
            await connection.run_sync(archived, file, "persistent://public/default/jars-acme")
        assert (await labels.rebuild([file])).events == 20
        assert await rows_of(box, LabelRow) == whole


def test_a_template_means_the_topics_that_subscribers_find_by_it() -> None:
    feed = history.Feed((1,), ("jars", "b_x-{tenant}"), ("a.b",))
    fitting = ["jars", "b_x-acme", "b_x-a-b", "box-acme", "b_x-", "b_x-a.b", "b_x-acme/x", "Jars"]
    assert [topic for topic in fitting if feed.has_topic(topic)] == ["jars", "b_x-acme", "b_x-a-b"]


# -- who reads, and who may --------------------------------------------------------------------------------------------


@pytest.mark.dialects
async def test_readers_see_no_error_and_always_a_whole_table(box: Pillarbox) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 6)
    await labels.drain()
    total = sum(grams for _, _, grams in await folded(box))
    seen: set[int] = set()
    reading = True

    async def read() -> None:
        asked = text("SELECT sum(grams) FROM rebuilt_labels")
        while reading:
            async with box.engine.connect() as connection:  # drivers keep the prepared statement with the connection
                for _ in range(20):
                    seen.add(int((await connection.execute(asked)).scalar_one()))
                    await connection.commit()
            await asyncio.sleep(0)

    readers = [asyncio.create_task(read()) for _ in range(3)]
    try:
        for _ in range(3):
            await labels.rebuild()
    finally:
        reading = False
        await asyncio.gather(*readers)
    assert seen == {total}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_past_is_read_without_a_turn_to_write(box: Pillarbox) -> None:
    """A long read would keep all writers out, and many small writes keep it out."""
    labels = projected(box, Labels)
    await fill_jars(box, 3)
    async with box.engine.begin() as writer:
        feed = await writer.run_sync(history.feed_of, labels.name, "outbox", [], ["tests.rebuilt.filled"])
        pages = [page async for page in history.Outbox(box.engine, feed, live=1, new=2).pages()]
    assert [len(page) for page in pages] == [8]


async def test_the_past_ends_where_it_was_read_from_first(box: Pillarbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others write while pages are applied would keep a rebuild from its end, and the live one held."""
    monkeypatch.setattr(history, "PAGE", 3)
    labels = projected(box, Labels)
    await fill_jars(box, 3)
    async with box.engine.connect() as connection:
        feed = await connection.run_sync(history.feed_of, labels.name, "outbox", [], ["tests.rebuilt.filled"])
    read: list[int] = []
    async for page in history.Outbox(box.engine, feed, live=1, new=2).pages():
        if not read:
            await fill_jars(box, 3)
        read.append(len(page))
    assert read == [3, 3, 2]


@pytest.mark.parametrize("database", ["embedded", "mariadb"], indirect=True)
async def test_a_reader_and_the_switch_do_not_wait_for_each_other(box: Pillarbox) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 3)
    await labels.drain()
    await spoil(box, "rebuilt_labels", "grams = 7")
    asked = text("SELECT max(grams) FROM rebuilt_labels")
    async with box.engine.execution_options(isolation_level="REPEATABLE READ").connect() as reader:
        assert (await reader.execute(asked)).scalar() == 7
        async with asyncio.timeout(20):
            await labels.rebuild()
        assert (await reader.execute(asked)).scalar() == 7
        await reader.rollback()
        assert (await reader.execute(asked)).scalar() != 7


async def test_no_snapshot_is_kept_that_would_keep_dead_rows(postgres_box: Pillarbox) -> None:
    labels = projected(postgres_box, Labels)
    await fill_jars(postgres_box, 3)
    kept = text(
        "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND state = 'idle in transaction' AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)"
    )
    found: list[Any] = []

    async def look(progress: Progress) -> None:
        if progress.stage is Stage.REPLAYING:
            async with postgres_box.engine.connect() as connection:
                found.extend(await connection.scalars(kept))

    await labels.rebuild(progress=look)
    assert found == []


async def test_grants_and_policies_stay(postgres_box: Pillarbox) -> None:
    box = postgres_box
    role = f"reader_{uuid4().hex[:8]}"
    labels = projected(box, OwnLabels)
    for tenant in ("acme", "globex"):
        await fill_jars(box, 3, tenant=tenant)
    await labels.drain()
    told = text(
        "SELECT CAST(relacl AS text), relrowsecurity, relforcerowsecurity, relowner, reloptions, "
        "(SELECT array_agg(ROW(policyname, permissive, roles, cmd, qual, with_check)::text ORDER BY policyname) "
        " FROM pg_policies WHERE tablename = relname), "
        "(SELECT array_agg(CAST(attacl AS text) ORDER BY attnum) FROM pg_attribute "
        " WHERE attrelid = pg_class.oid AND attacl IS NOT NULL) "
        "FROM pg_class WHERE relname = 'rebuilt_own_labels'"
    )
    async with box.engine.begin() as connection:
        await connection.execute(text(f"CREATE ROLE {role}"))
        await connection.execute(text(f"GRANT SELECT ON rebuilt_own_labels TO {role} WITH GRANT OPTION"))
        await connection.execute(text(f"GRANT UPDATE (grams) ON rebuilt_own_labels TO {role}"))
        await connection.execute(text("ALTER TABLE rebuilt_own_labels SET (fillfactor = 70)"))
        await connection.execute(
            text(f"CREATE POLICY few ON rebuilt_own_labels AS RESTRICTIVE FOR SELECT TO {role} USING (grams < 999)")
        )
        for statement in row_level_security(Base.metadata):
            await connection.execute(text(statement))
        before = (await connection.execute(told)).one()
    whole = await rows_of(box, OwnLabelRow)
    try:
        await labels.rebuild()
        async with box.engine.connect() as connection:
            assert (await connection.execute(told)).one() == before
        assert await rows_of(box, OwnLabelRow) == whole
    finally:
        async with box.engine.begin() as connection:
            await connection.execute(text(f"DROP OWNED BY {role}"))
            await connection.execute(text(f"DROP ROLE {role}"))


async def test_the_small_form_of_the_proof(fresh_database: FreshDatabase) -> None:
    """See ``make prove-rebuild``."""
    url, begun, over = fresh_database("embedded", empty=True).url(), asyncio.Event(), asyncio.Event()
    await proof.set_up(url, 3_000)
    living = asyncio.create_task(proof.live(url, 100, 7, over.is_set, begun.set))
    try:
        async with asyncio.timeout(60):
            await begun.wait()
        done = await proof.rebuild(url)
    finally:
        over.set()
        life = await living
    assert await proof.violations(url, done, life) == []
    assert life.queries
    assert life.written


# -- refused -----------------------------------------------------------------------------------------------------------


@on_postgres
async def test_h86_what_handlers_have_done_is_not_done_again(box: Pillarbox) -> None:
    mails = box.consumer("mails", source="outbox")

    @mails.on(JarFilled)
    async def send(_event: JarFilled, _uow: UnitOfWork) -> None: ...

    assert not hasattr(mails, "rebuild")


async def test_a_second_rebuild_at_the_same_time(box: Pillarbox) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 2)

    async def again() -> None:
        with pytest.raises(StoreError, match="is being rebuilt by another process"):
            await labels.rebuild()

    await labels.rebuild(progress=at(Stage.REPLAYING, again))
    assert (await labels.rebuild()).generation == 3


async def test_two_projections_at_the_same_time(box: Pillarbox) -> None:
    labels, jars = projected(box, Labels), projected(box, Jars)
    await fill_jars(box, 2)
    done = []

    async def other() -> None:
        done.append(await jars.rebuild())

    await labels.rebuild(progress=at(Stage.REPLAYING, other))
    assert [it.generation for it in done] == [2]


@on_postgres
async def test_the_wrong_way_names_the_right_option(box: Pillarbox) -> None:
    foreign = box.projection(Labels, source=MemoryTransport(), topics=[TOPIC])
    with pytest.raises(ConfigurationError, match="`--from broker`"):
        await foreign.rebuild()
    with pytest.raises(ConfigurationError, match="`--from outbox`"):
        await projected(box, Jars).rebuild("broker")


@on_postgres
async def test_what_the_broker_has_lost_may_be_in_the_outbox(box: Pillarbox, broker: MemoryTransport) -> None:
    labels = box.projection(Labels, source="broker", topics=[TOPIC], retry=QUICKLY)
    await fill_jars(box, 3)
    await box.relay().drain()
    await labels.drain()
    whole = await rows_of(box, LabelRow)
    broker._topics[TOPIC].clear()
    with pytest.raises(StoreError, match=r"it has had 8 events or more.* use `--from outbox` if the outbox has them, "):
        await labels.rebuild("broker")
    assert await rows_of(box, LabelRow) == whole
    assert (await labels.rebuild("outbox")).events == 8


@on_postgres
async def test_h140_a_rebuild_from_a_broker_leaves_no_group_there(box: Pillarbox, broker: MemoryTransport) -> None:
    labels = box.projection(Labels, source="broker", topics=[TOPIC], retry=QUICKLY)
    await fill_jars(box, 2)
    await box.relay().drain()
    await labels.drain()
    await labels.rebuild("broker")
    assert [*broker._groups[TOPIC]] == [labels.name]


async def test_under_row_level_security_each_tenant_keeps_its_rows(fresh_database: FreshDatabase) -> None:
    url, role = fresh_database("embedded", shards=2).url(), f"service_{uuid4().hex[:8]}"
    async with open_box(url) as owner:
        projected(owner, OwnLabels)
        for tenant in ("acme", "globex"):
            await fill_jars(owner, 3, tenant=tenant)
        async with owner.engine.begin() as connection:
            await connection.execute(text(f"CREATE ROLE {role}"))
            for kind in ("TABLES", "SEQUENCES"):
                await connection.execute(text(f"GRANT ALL ON ALL {kind} IN SCHEMA public TO {role}"))
            for statement in row_level_security(Base.metadata):
                await connection.execute(text(statement))
        engine = create_async_engine(url, connect_args={"server_settings": {"role": role}})
        try:
            async with Pillarbox(engine, row_security=True, shards=2) as box:
                labels = projected(box, OwnLabels)
                tally = await labels.drain()
                assert (tally.handled, tally.failures) == (16, 0), tally
                whole = await rows_of(owner, OwnLabelRow)
                assert {row[0] for row in whole} == {"acme", "globex"}
                assert await rows_of(box, OwnLabelRow) == []
                await spoil(owner, "rebuilt_own_labels", "grams = 7")
                await labels.rebuild()
                assert await rows_of(owner, OwnLabelRow) == whole
        finally:
            await engine.dispose()
            async with owner.engine.begin() as connection:
                await connection.execute(text(f"DROP OWNED BY {role}"))
                await connection.execute(text(f"DROP ROLE {role}"))


@on_postgres
async def test_a_past_that_is_not_whole(box: Pillarbox) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 3)
    await labels.drain()
    async with box.engine.begin() as connection:
        first = (await connection.execute(select(func.min(outbox.c.id)).where(outbox.c.topic == labels.name))).scalar()
        await connection.execute(outbox.delete().where(outbox.c.id == first))
    whole = await rows_of(box, LabelRow)
    with pytest.raises(StoreError, match=r"it has had 1 events or more that are not found.*`--incomplete`"):
        await labels.rebuild()
    assert await rows_of(box, LabelRow) == whole
    assert (await labels.rebuild(incomplete=True)).events == 7


async def test_a_foreign_key_of_others_refers_to_the_table(postgres_box: Pillarbox) -> None:
    labels = projected(postgres_box, Labels)
    async with postgres_box.engine.begin() as connection:
        made = "CREATE TABLE mine (label varchar(20) REFERENCES rebuilt_labels (label) ON DELETE CASCADE)"
        await connection.execute(text(made))
    with pytest.raises(ConfigurationError, match="a foreign key of mine refers to it"):
        await labels.rebuild()


async def test_a_view_goes_on(postgres_box: Pillarbox) -> None:
    labels = projected(postgres_box, Labels)
    await fill_jars(postgres_box, 3)
    async with postgres_box.engine.begin() as connection:
        await connection.execute(text("CREATE VIEW seen AS SELECT sum(fillings) FROM rebuilt_labels"))
    await labels.rebuild()
    async with postgres_box.engine.connect() as connection:
        assert (await connection.execute(text("SELECT * FROM seen"))).scalar() == 8


# -- crashes -----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process has died."""


@pytest.mark.dialects
@pytest.mark.parametrize("stage", [*Stage])
async def test_a_rebuild_that_dies_is_mended_by_the_next_one(
    box: Pillarbox, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 4)
    await labels.drain()
    whole = await rows_of(box, LabelRow)
    await spoil(box, "rebuilt_labels", "grams = 7")

    async def die() -> None:
        raise Killed

    async def nothing(_rebuild: Rebuild) -> None:
        """Who is dead does not clean up."""

    with monkeypatch.context() as patch:
        patch.setattr(Rebuild, "_end", nothing)
        with suppress(Killed):
            await labels.rebuild(progress=at(stage, die))
    await fill_jars(box, 1, label="plum")
    await labels.rebuild()
    await labels.drain()
    assert [(row[0], *row[1:3]) for row in await rows_of(box, LabelRow)] == await folded(box)
    assert len(await rows_of(box, LabelRow)) == len(whole)
    assert await tables_of(box) == set()
    left = {number: await inbox_size(box, labels.name, number) for number in (1, 2, 3)}
    assert [number for number, size in left.items() if size] == [await generation(box, labels.name)]


@on_postgres
async def test_one_that_cannot_clear_the_inbox_has_rebuilt_the_table(
    box: Pillarbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 4)
    await labels.drain()

    def fail(*_given: object) -> int:
        raise ConnectionError("away")

    with monkeypatch.context() as patch:

        async def cut() -> None:
            patch.setattr(rebuild, "forget_inbox", fail)

        assert (await labels.rebuild(progress=at(Stage.CLEARING, cut))).generation == 2
    assert "the next rebuild clears the inbox: ConnectionError: away" in caplog.text
    assert await inbox_size(box, labels.name, 1) == 10
    await labels.rebuild()
    assert [await inbox_size(box, labels.name, number) for number in (1, 2, 3)] == [0, 0, 10]


@pytest.mark.dialects
@pytest.mark.parametrize("database", ["embedded", "mariadb"], indirect=True)
async def test_one_that_ends_while_its_commit_is_on_its_way_waits_for_what_becomes_of_it(box: Pillarbox) -> None:
    """Without an inbox, the new generation would apply again what comes again."""
    labels = projected(box, Labels)
    await fill_jars(box, 4)
    await labels.drain()
    async with box.engine.begin() as switch:  # as the server goes on with a transaction whose connection is lost

        async def lose() -> None:
            await switch.run_sync(stored.set_generation, labels.name, 2)
            raise ConnectionError("lost")

        ending = asyncio.create_task(labels.rebuild(progress=at(Stage.CATCHING_UP, lose)))
        await asyncio.wait([ending], timeout=0.5)
        assert await inbox_size(box, labels.name, 2) == 10
    with pytest.raises(ConnectionError, match="lost"):
        await ending
    assert [await inbox_size(box, labels.name, number) for number in (1, 2, 3)] == [0, 10, 0]


async def test_one_may_begin_as_soon_as_another_one_has_ended(box: Pillarbox) -> None:
    engine = create_async_engine(box.engine.url, pool_size=20)
    for _ in range(20):
        for connection in [await engine.connect() for _ in range(20)]:  # to connect would give the server time
            await connection.close()
        for _ in range(20):
            async with alone(engine, "tests"):
                pass
    await engine.dispose()


async def test_one_that_is_told_to_stop_leaves_nothing(box: Pillarbox) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 4)
    await labels.drain()
    whole = await rows_of(box, LabelRow)
    for stage in (Stage.REPLAYING, Stage.CATCHING_UP, Stage.SWITCHING):
        reached = asyncio.Event()

        async def wait(reached: asyncio.Event = reached) -> None:
            reached.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(labels.rebuild(progress=at(stage, wait)))
        task.add_done_callback(lambda *_: reached.set())  # noqa: B023  it has failed
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await tables_of(box) == set()
        assert await rows_of(box, LabelRow) == whole
        assert (await generation(box, labels.name), await inbox_size(box, labels.name, 2)) == (1, 0)
