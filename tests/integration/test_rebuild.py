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
from sqlalchemy import CheckConstraint, Connection, Index, String, func, inspect, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Aggregate, IntegrationEvent, Pillarbox, Poison, RetryPolicy, Route, TenantScoped, UnitOfWork
from pillarbox.consumers.consumer import Consumer
from pillarbox.errors import ConfigurationError, StaleLetterError, StoreError
from pillarbox.inbox import LetterFilter, LetterKind, LetterState, consumer_id
from pillarbox.projections import Add, Change, Projection, ProjectionRow, history, on
from pillarbox.projections import rebuild as rebuilding
from pillarbox.projections.rebuild import Progress, Rebuild, Stage
from pillarbox.projections.shadow import alone
from pillarbox.stores import archive
from pillarbox.stores import inbox as stored
from pillarbox.stores.archive_file import Writer
from pillarbox.stores.letters import SqlLetters
from pillarbox.stores.retention import RowKey
from pillarbox.stores.tables import inbox, letters, outbox
from pillarbox.tenancy import row_level_security
from pillarbox.transport import Message
from pillarbox.transports.memory import MemorySubscription, MemoryTransport
from pillarbox.transports.pulsar.names import spellings
from tests.conftest import EACH_DATABASE, FreshDatabase
from tests.domain import make_due, until_somebody_waits
from tests.prove import rebuild as proof
from tests.servers import Database

QUICKLY = RetryPolicy(base=0.001, cap=0.01)
TOPIC = "jars"
JSON = msgspec.json.Decoder()


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


class WholeJars(Jars, row=JarRow, name="whole jars", contiguous=True):
    """None of their events may be missing."""


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
"""For what does not depend on how a database changes tables: letters and the past are the same rows in each."""


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


def projected(box: Pillarbox, projection: type[Projection] | Projection, **options: Any) -> Consumer:
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


async def sent_all(box: Pillarbox, consumer: Consumer) -> None:
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
        return await connection.run_sync(stored.generation_of, name)


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


async def test_what_waits_in_the_outbox_is_applied_once(box: Pillarbox) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 5)
    done = await labels.rebuild()
    assert done.events == 14 - 1
    whole = await rows_of(box, LabelRow)
    tally = await labels.drain()
    assert (tally.handled, tally.duplicates) == (0, 13)
    assert await rows_of(box, LabelRow) == whole


@pytest.mark.parametrize("stage", [Stage.REPLAYING, Stage.CATCHING_UP, Stage.SWAPPING, Stage.CLEARING])
async def test_what_comes_meanwhile_is_there_once(box: Pillarbox, stage: Stage) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 4)
    await labels.drain()
    await spoil(box, "rebuilt_labels", "grams = 7")

    async def more() -> None:
        await fill_jars(box, 4, label="pear")
        if stage is not Stage.SWAPPING:  # then it is held
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


@pytest.mark.parametrize("database", ["mariadb", "sqlite"], indirect=True)  # on PostgreSQL it waits for a lock
@pytest.mark.parametrize("source", ["outbox", "broker"])
async def test_what_comes_while_it_is_held_is_not_at_fault(box: Pillarbox, source: str) -> None:
    topics = [TOPIC] if source == "broker" else []
    labels = box.projection(Labels, source=source, topics=topics, retry=QUICKLY, batch=20)
    await fill_jars(box, 4)
    await box.relay().drain()
    await labels.drain()

    async def more() -> None:
        await fill_jars(box, 4, label="pear")
        await box.relay().drain()
        assert (await labels.drain()).handled == 0

    await labels.rebuild(progress=at(Stage.SWAPPING, more))
    tally = await labels.drain()
    assert (tally.handled, tally.duplicates) == (0, 10)  # the rebuild has applied all: no failure kept any of them back
    assert await unsent(box) == 0
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


async def letters_of(box: Pillarbox, **wanted: Any) -> list[tuple[LetterKind, LetterState]]:
    states = tuple(LetterState)
    return [(it.kind, it.state) async for it in box.dead_letters(states=states, **wanted)]


@on_postgres
async def test_an_event_that_nobody_can_bear_is_left_out(box: Pillarbox) -> None:
    projection = Labels()
    projection.refused = frozenset({2})
    labels = projected(box, projection)
    await fill_jars(box, 5)
    await labels.drain()
    whole = await rows_of(box, LabelRow)
    done = await labels.rebuild()
    assert (done.events, done.left_out) == (12, 1)
    assert await rows_of(box, LabelRow) == whole
    assert await letters_of(box) == [(LetterKind.POISON, LetterState.OPEN)]


@on_postgres
async def test_one_that_can_be_applied_now_has_its_letter_closed(box: Pillarbox) -> None:
    projection = Labels()
    projection.refused = frozenset({2})
    labels = projected(box, projection)
    await fill_jars(box, 5)
    await labels.drain()
    projection.refused = frozenset()
    await labels.rebuild()
    assert [(row[0], *row[1:3]) for row in await rows_of(box, LabelRow)] == await folded(box)
    assert await letters_of(box) == [(LetterKind.POISON, LetterState.REDRIVEN)]


@on_postgres
async def test_one_that_cannot_be_applied_any_more_gets_a_letter(box: Pillarbox) -> None:
    projection = Labels()
    labels = projected(box, projection)
    await fill_jars(box, 5)
    await labels.drain()
    projection.refused = frozenset({2})
    done = await labels.rebuild()
    assert done.left_out == 1
    assert await letters_of(box) == [(LetterKind.POISON, LetterState.OPEN)]
    projection.refused = frozenset()
    [letter] = [it async for it in box.dead_letters()]
    assert await labels.redrive(letter.id)
    assert [(row[0], *row[1:3]) for row in await rows_of(box, LabelRow)] == await folded(box)


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
    assert await letters_of(box) == [(LetterKind.POISON, LetterState.OPEN)]


@on_postgres
async def test_what_waits_for_its_predecessors_waits_in_the_new_one(box: Pillarbox) -> None:
    jars = projected(box, WholeJars)
    await fill_jars(box, 2)
    await jars.drain()
    whole = await rows_of(box, JarRow)
    async with box.engine.begin() as connection:
        await connection.execute(
            letters.insert().values(
                consumer=jars.name,
                kind=LetterKind.HELD,
                state=LetterState.OPEN,
                reason="of the old one",
                event_type="x",
                schema_version=1,
                topic="x",
                key="x",
                headers="{}",
                body=b"",
                attempts=1,
            )
        )
    await jars.rebuild()
    assert await rows_of(box, JarRow) == whole
    assert await letters_of(box) == []


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


@on_postgres
async def test_what_people_have_decided_about_letters_holds(box: Pillarbox) -> None:
    projection = Labels()
    projection.refused = frozenset({2, 3})
    labels = projected(box, projection)
    await fill_jars(box, 4)
    await labels.drain()
    found = {JSON.decode(it.body)["grams"]: it async for it in box.dead_letters()}
    async with box.engine.begin() as connection:
        edited = found[2].body.replace(b'"grams":2', b'"grams":5')
        assert await connection.run_sync(SqlLetters().edit, found[2].id, edited)
        assert await connection.run_sync(SqlLetters().close, found[3].id, LetterState.DISCARDED)
    assert await labels.redrive(found[2].id)
    whole = await rows_of(box, LabelRow)
    projection.refused = frozenset({2})
    done = await labels.rebuild()
    assert (done.events, done.left_out) == (9, 1)
    assert await rows_of(box, LabelRow) == whole
    assert {state for _, state in await letters_of(box)} == {LetterState.REDRIVEN, LetterState.DISCARDED}
    async with box.engine.begin() as connection:
        await connection.execute(letters.update().values(updated_at=datetime(2020, 1, 1, tzinfo=UTC)))
    await labels.drain()  # and lets go of what is older than its retention
    projection.refused = frozenset()
    done = await labels.rebuild()
    assert (done.events, done.left_out) == (9, 1)
    assert await rows_of(box, LabelRow) == whole


async def too_late(box: Pillarbox, jars: Consumer) -> int:
    """A jar whose first filling was poison, and whose second one was applied; the number of the letter."""
    jar = Jar.make("plum")
    async with box.unit_of_work() as uow:
        uow.add(jar)
    for grams in (1, 20):
        async with box.unit_of_work() as uow:
            (await uow.session.get_one(Jar, jar.id)).fill(grams)
    await jars.drain()
    [letter] = [it async for it in box.dead_letters()]
    return letter.id


async def test_h85_a_letter_that_is_too_late_stays_open_until_its_event_has_had_its_turn(box: Pillarbox) -> None:
    projection = PickyJars()
    jars = projected(box, projection)
    letter = await too_late(box, jars)
    projection.refused = 0
    before = await rows_of(box, JarRow)
    for _ in range(2):
        with pytest.raises(StaleLetterError, match="rebuild the projection"):
            await jars.redrive(letter)
    assert await rows_of(box, JarRow) == before
    assert 20 in before[0]
    [found] = [it async for it in box.dead_letters()]
    assert (found.attempts, "a later event has changed the row" in found.reason) == (3, True)
    assert jars.status()["handled"] == 2
    await jars.rebuild()
    [row] = await rows_of(box, JarRow)
    assert 21 in row
    assert await letters_of(box) == [(LetterKind.POISON, LetterState.REDRIVEN)]


@on_postgres
async def test_a_letter_that_is_too_late_and_was_edited_is_brought_in_as_edited(box: Pillarbox) -> None:
    jars = projected(box, PickyJars())
    letter = await too_late(box, jars)
    async with box.engine.begin() as connection:
        body = (await connection.run_sync(SqlLetters().find, LetterFilter(ids=(letter,))))[0].body
        assert await connection.run_sync(SqlLetters().edit, letter, body.replace(b'"grams":1', b'"grams":5'))
    with pytest.raises(StaleLetterError):
        await jars.redrive(letter)
    done = await jars.rebuild()
    assert (done.events, done.left_out) == (3, 0)
    [row] = await rows_of(box, JarRow)
    assert 25 in row
    assert await letters_of(box) == [(LetterKind.POISON, LetterState.REDRIVEN)]


# -- other pasts -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker in memory needs no time."""
    monkeypatch.setattr(rebuilding, "QUIET", 0.1)


@pytest.mark.usefixtures("quick")
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
    assert LetterState.OPEN not in {state for _, state in await letters_of(box)}


@pytest.mark.usefixtures("quick")
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
@pytest.mark.usefixtures("quick")
async def test_what_the_live_one_ignores_is_not_left_out(box: Pillarbox, broker: MemoryTransport) -> None:
    labels = box.projection(Labels, source="broker", topics=[TOPIC], retry=QUICKLY, ignores=["tests.audit.*"])
    await fill_jars(box, 4)
    await box.relay().drain()
    named = {"event_type": "tests.audit.seen", "schema_version": "v1", "occurred_at": "2026-01-01T00:00:00Z"}
    await broker.send("x", [Message(TOPIC, "k", b"{}", {"event_id": str(uuid4()), **named})])
    await labels.drain()
    done = await labels.rebuild("broker")
    assert (done.events, done.left_out) == (10, 0)
    assert await letters_of(box) == []


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
    assert feed.likes == ["b_x-%"]
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
        pages = [page async for page in history.unseen(box.engine, feed, live=1, new=2)]
    assert [len(page) for page in pages] == [8]


async def test_the_past_ends_where_it_was_read_from_first(box: Pillarbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others write while pages are applied would keep a rebuild from its end, and the live one held."""
    monkeypatch.setattr(history, "PAGE", 3)
    labels = projected(box, Labels)
    await fill_jars(box, 3)
    async with box.engine.connect() as connection:
        feed = await connection.run_sync(history.feed_of, labels.name, "outbox", [], ["tests.rebuilt.filled"])
    read: list[int] = []
    async for page in history.unseen(box.engine, feed, live=1, new=2):
        if not read:
            await fill_jars(box, 3)
        read.append(len(page))
    assert read == [3, 3, 2]


async def test_somebody_reads_for_long_and_the_swap_waits_without_a_queue(postgres_box: Pillarbox) -> None:
    labels = projected(postgres_box, Labels)
    await fill_jars(postgres_box, 3)
    await labels.drain()
    asked = text("SELECT count(*) FROM rebuilt_labels")
    async with postgres_box.engine.connect() as reader:
        await reader.execute(asked)
        rebuild = asyncio.create_task(labels.rebuild())
        await until_somebody_waits(postgres_box)
        async with asyncio.timeout(30), postgres_box.engine.connect() as other:
            assert (await other.execute(asked)).scalar() == 3
        assert not rebuild.done()
        await reader.rollback()
        assert (await rebuild).generation == 2


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


@on_postgres
async def test_a_letter_that_is_mended_meanwhile_has_its_effect(box: Pillarbox) -> None:
    projection = Labels()
    projection.refused = frozenset({2})
    labels = projected(box, projection)
    await fill_jars(box, 3)
    await labels.drain()
    [letter] = [it async for it in box.dead_letters()]

    async def mend() -> None:
        async with box.engine.begin() as connection:
            edited = letter.body.replace(b'"grams":2', b'"grams":5')
            assert await connection.run_sync(SqlLetters().edit, letter.id, edited)
        assert await labels.redrive(letter.id)

    done = await labels.rebuild(progress=at(Stage.CATCHING_UP, mend))
    assert (done.events, done.left_out) == (8, 0)
    assert sum(row[2] for row in await rows_of(box, LabelRow)) == sum(row[2] for row in await folded(box)) + 3


# -- refused -----------------------------------------------------------------------------------------------------------


@on_postgres
async def test_h86_what_handlers_have_done_is_not_done_again(box: Pillarbox) -> None:
    mails = box.consumer("mails", source="outbox")

    @mails.on(JarFilled)
    async def send(_event: JarFilled, _uow: UnitOfWork) -> None: ...

    with pytest.raises(ConfigurationError, match="mails has handlers"):
        await mails.rebuild()


async def test_a_second_rebuild_at_the_same_time(box: Pillarbox) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 2)

    async def again() -> None:
        with pytest.raises(StoreError, match="is being rebuilt by somebody else"):
            await labels.rebuild()

    await labels.rebuild(progress=at(Stage.REPLAYING, again))
    assert (await labels.rebuild()).generation == 3


@on_postgres
async def test_a_past_that_is_not_whole(box: Pillarbox) -> None:
    labels = projected(box, Labels)
    await fill_jars(box, 3)
    await labels.drain()
    async with box.engine.begin() as connection:
        first = (await connection.execute(select(func.min(outbox.c.id)).where(outbox.c.topic == labels.name))).scalar()
        await connection.execute(outbox.delete().where(outbox.c.id == first))
    whole = await rows_of(box, LabelRow)
    with pytest.raises(StoreError, match=r"it has had 1 events or more that are not found"):
        await labels.rebuild()
    assert await rows_of(box, LabelRow) == whole
    assert (await labels.rebuild(incomplete=True)).events == 7


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("CREATE VIEW seen AS SELECT label FROM rebuilt_labels", "seen"),
        ("CREATE TABLE mine (label varchar(20) REFERENCES rebuilt_labels (label))", "mine"),
    ],
)
async def test_others_that_refer_to_the_table(postgres_box: Pillarbox, made: str, reason: str) -> None:
    labels = projected(postgres_box, Labels)
    async with postgres_box.engine.begin() as connection:
        await connection.execute(text(made))
    with pytest.raises(ConfigurationError, match=f"{reason}.* refers to it"):
        await labels.rebuild()


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
        patch.setattr(Rebuild, "_give_up", nothing)
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
    for stage in (Stage.REPLAYING, Stage.CATCHING_UP, Stage.SWAPPING):
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
