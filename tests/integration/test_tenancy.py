"""Tenants do not see each other: hazards S01 to S04, and what has to go on working all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import (
    Column,
    Connection,
    Executable,
    ForeignKey,
    Integer,
    String,
    Table,
    column,
    delete,
    exists,
    func,
    insert,
    inspect,
    join,
    literal_column,
    select,
    table,
    text,
    true,
    union_all,
    update,
)
from sqlalchemy.event import listen
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    aliased,
    joinedload,
    make_transient_to_detached,
    mapped_column,
    registry,
    relationship,
    selectinload,
    subqueryload,
)

from pillarbox import IntegrationEvent, Pillarbox, Route, TenancyError, TenantScoped, event_context
from pillarbox.errors import ConfigurationError, HeaderError
from pillarbox.session import bound_session
from pillarbox.tenancy import UNSCOPED, check_role, row_level_security, session_tenant
from pillarbox.transports.memory import MemoryTransport
from tests.domain import written
from tests.servers import Database

pytestmark = pytest.mark.dialects

ALL = {UNSCOPED: True}


class NoteWritten(IntegrationEvent, name="tests.note.written", version=1):
    body: str


class Base(DeclarativeBase):
    pass


class Note(TenantScoped, Base):
    __tablename__ = "tenancy_notes"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    body: Mapped[str] = mapped_column(String(50))
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("tenancy_notes.id"))
    parent: Mapped[Note | None] = relationship(remote_side="Note.id", back_populates="children")
    children: Mapped[list[Note]] = relationship(back_populates="parent")


class Reminder(Base):
    """Belongs to nobody, and points at notes."""

    __tablename__ = "tenancy_reminders"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    note_id: Mapped[int] = mapped_column(ForeignKey("tenancy_notes.id"))
    rings: Mapped[int] = mapped_column(default=0)
    note: Mapped[Note | None] = relationship()


class Document(TenantScoped, Base):
    __tablename__ = "tenancy_documents"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(20))
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "document"}  # noqa: RUF012  SQLAlchemy's way


class Letter(Document):
    __tablename__ = "tenancy_letters"

    id: Mapped[int] = mapped_column(ForeignKey("tenancy_documents.id"), primary_key=True)
    address: Mapped[str] = mapped_column(String(50))
    __mapper_args__ = {"polymorphic_identity": "letter"}  # noqa: RUF012  SQLAlchemy's way


NOTES: Any = Note.__table__
LETTERS: Any = Letter.__table__
Again = aliased(Note)


def note_box(engine: AsyncEngine | str, **options: Any) -> Pillarbox:
    routes = [Route("tests.note.*", to="broker", topic="notes")]
    return Pillarbox(engine, transports={"broker": MemoryTransport()}, routes=routes, **options)


async def fill(engine: AsyncEngine) -> None:
    """Two notes of each tenant; the second hangs on the other tenant's first. A reminder and a letter for each."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with AsyncSession(engine) as session, session.begin():
        for number, tenant in ((1, "acme"), (2, "globex")):
            session.add(Note(id=number, tenant_id=tenant, body=f"of {tenant}"))
            session.add(Letter(id=number, tenant_id=tenant, address=f"of {tenant}"))
        await session.flush()
        session.add(Note(id=3, tenant_id="acme", body="of acme", parent_id=2))
        session.add(Note(id=4, tenant_id="globex", body="of globex", parent_id=1))
        session.add_all([Reminder(id=10, note_id=1), Reminder(id=20, note_id=2)])


UNTOUCHED = {1: "of acme", 2: "of globex", 3: "of acme", 4: "of globex"}


async def bodies(engine: AsyncEngine) -> dict[int, str]:
    """All notes, whosever they are."""
    async with engine.connect() as connection:
        return {row.id: row.body for row in await connection.execute(select(NOTES.c.id, NOTES.c.body))}


@pytest.fixture
async def box(sqlite_database: Database) -> AsyncIterator[Pillarbox]:
    async with note_box(sqlite_database.url()) as box:
        await box.migrate()
        await fill(box.engine)
        yield box


@pytest.fixture
async def acme(box: Pillarbox) -> AsyncIterator[AsyncSession]:
    """A session of acme."""
    async with session_of(box, "acme") as session:
        yield session


def session_of(box: Pillarbox, tenant: str | None, bind: AsyncConnection | None = None) -> AsyncSession:
    session = box.bind(async_sessionmaker(bind or box.engine))()
    box.tenancy.assign(session.sync_session, tenant)
    return session


async def loaded_elsewhere(box: Pillarbox, ident: int) -> Note:
    """A note as it comes out of a session that knows nothing about tenants: detached."""
    async with AsyncSession(box.engine) as session:
        return await session.get_one(Note, ident)


class TestS01Refused:
    """What the condition on mapped classes does not reach."""

    async def test_s01_core_select_on_a_tenant_table_is_refused(self, acme: AsyncSession) -> None:
        with pytest.raises(TenancyError, match="'tenancy_notes'"):
            await acme.execute(select(NOTES))

    async def test_s01_text_on_a_tenant_table_is_refused(self, acme: AsyncSession) -> None:
        with pytest.raises(TenancyError, match="'tenancy_notes'"):
            await acme.execute(text("SELECT * FROM tenancy_notes"))

    async def test_s01_from_statement_with_a_text_is_refused(self, acme: AsyncSession) -> None:
        with pytest.raises(TenancyError):
            await acme.execute(select(Note).from_statement(text("SELECT * FROM tenancy_notes")))

    async def test_s01_from_statement_is_refused_also_if_its_text_names_no_tenant_table(
        self, box: Pillarbox, acme: AsyncSession
    ) -> None:
        async with box.engine.begin() as connection:
            await connection.execute(text("CREATE VIEW everything AS SELECT * FROM tenancy_notes"))
        with pytest.raises(TenancyError, match="a text that selects 'Note'"):
            await acme.execute(select(Note.body).from_statement(text("SELECT * FROM everything")))

    async def test_s01_a_tenant_switch_is_refused_so_get_finds_nothing_of_the_former_one(
        self, box: Pillarbox, acme: AsyncSession
    ) -> None:
        await acme.get_one(Note, 1)
        with pytest.raises(TenancyError, match="belongs to tenant 'acme', not to 'globex'"):
            box.tenancy.assign(acme.sync_session, "globex")

    async def test_s01_get_from_the_identity_map_by_code_for_another_tenant_is_refused(
        self, acme: AsyncSession
    ) -> None:
        note = await acme.get_one(Note, 1)
        with event_context(tenant="globex"), pytest.raises(TenancyError):
            await acme.get(Note, note.id)

    async def test_s01_core_writes_are_refused(self, acme: AsyncSession) -> None:
        for statement in (update(NOTES).values(body="x"), delete(NOTES), insert(NOTES).values(id=9)):
            with pytest.raises(TenancyError):
                await acme.execute(statement)

    async def test_s01_merge_of_a_foreign_object_is_refused(self, box: Pillarbox, acme: AsyncSession) -> None:
        foreign = await loaded_elsewhere(box, 2)
        for load in (True, False):
            with pytest.raises(TenancyError, match="belongs to tenant 'globex', and the session to 'acme'"):
                await acme.merge(foreign, load=load)
        assert list(acme) == []

    async def test_s01_merge_then_relationship_finds_nothing_foreign(self, box: Pillarbox, acme: AsyncSession) -> None:
        note = await loaded_elsewhere(box, 1)
        for load in (True, False):
            merged = await acme.merge(note, load=load)
            await acme.refresh(merged, ["children"])
            assert merged.children == []

    async def test_s01_what_is_executed_on_a_raw_connection_is_refused_on_tenant_tables(
        self, acme: AsyncSession
    ) -> None:
        connection = await acme.connection()
        for statement in (select(Note), select(NOTES), text("SELECT * FROM Tenancy_Notes")):
            with pytest.raises(TenancyError, match="raw connection"):
                await connection.execute(statement)
        with pytest.raises(TenancyError, match="raw connection"):
            await connection.exec_driver_sql('SELECT * FROM "tenancy_notes"')
        assert (await connection.execute(select(Reminder.id))).scalars().all() == [10, 20]
        assert await acme.scalar(select(func.count()).select_from(Note)) == 2, "the session itself goes on"

    async def test_our_own_statements_may_use_words_that_are_names_of_tenant_tables(self, acme: AsyncSession) -> None:
        def count(connection: Connection, tenant: str) -> int:
            return len(connection.execute(text("SELECT :tenant AS tenancy_notes"), {"tenant": tenant}).all())

        assert await acme.run_sync(lambda session: bound_session(session).lend_connection(count, "acme")) == 1

    async def test_sessions_that_were_given_one_connection_do_not_refuse_each_other(self, box: Pillarbox) -> None:
        async with box.engine.connect() as connection:
            for tenant in ("acme", "globex"):
                async with session_of(box, tenant, bind=connection) as session:
                    assert {note.tenant_id for note in await session.scalars(select(Note))} == {tenant}
            async with (
                session_of(box, "acme", bind=connection) as one,
                session_of(box, "globex", bind=connection) as other,
            ):
                for session in (one, other, one):
                    assert len((await session.scalars(select(Note))).all()) == 2
                with pytest.raises(TenancyError, match="raw connection"):
                    await connection.execute(select(NOTES))
            assert len((await connection.execute(select(NOTES))).all()) == 4, "nobody's session, nobody's rules"

    async def test_s01_an_update_may_not_move_rows_to_another_tenant(self, acme: AsyncSession) -> None:
        moves: list[tuple[Executable, Any]] = [
            (update(Note).values(tenant_id="globex"), None),
            (update(Note).values({Note.tenant_id: "globex"}), None),
            (update(Note).ordered_values((Note.body, "x"), (Note.tenant_id, "globex")), None),
            (update(Note).where(Note.id == 1), {"tenant_id": "globex"}),
        ]
        for statement, values in moves:
            with pytest.raises(TenancyError, match="an UPDATE of the tenant of 'Note'"):
                await acme.execute(statement, values)

    async def test_s01_an_object_may_not_move_to_another_tenant(self, acme: AsyncSession) -> None:
        note = await acme.get_one(Note, 1)
        note.tenant_id = "globex"
        with pytest.raises(TenancyError):
            await acme.flush()

    async def test_s01_insert_statements_are_refused(self, acme: AsyncSession) -> None:
        row = {"id": 9, "tenant_id": "globex", "body": "x"}
        with pytest.raises(TenancyError, match="an INSERT statement"):
            await acme.execute(insert(Note).values(row))
        with pytest.raises(TenancyError, match="an INSERT statement"):
            await acme.execute(insert(Note), [row])

    async def test_s01_adding_with_a_foreign_tenant_is_refused(self, acme: AsyncSession) -> None:
        with pytest.raises(TenancyError, match="belongs to tenant 'globex'"):
            acme.add(Note(id=9, tenant_id="globex", body="x"))
        late = Note(id=9, body="x")
        acme.add(late)
        late.tenant_id = "globex"
        with pytest.raises(TenancyError):
            await acme.flush()

    async def test_s01_a_foreign_detached_object_may_not_come_in(self, box: Pillarbox, acme: AsyncSession) -> None:
        foreign = await loaded_elsewhere(box, 2)
        with pytest.raises(TenancyError):
            acme.add(foreign)

    @pytest.mark.parametrize("values", [{"body": "stolen"}, {"tenant_id": "acme", "body": "stolen"}])
    async def test_s01_a_row_that_nobody_has_looked_at_is_looked_at_before_it_is_written(
        self, acme: AsyncSession, values: dict[str, str]
    ) -> None:
        def forge(session: Session) -> None:
            note = Note(id=2)
            make_transient_to_detached(note)
            session.add(note)
            for name, value in values.items():
                setattr(note, name, value)
            session.flush()

        with pytest.raises(TenancyError):
            await acme.run_sync(forge)

    async def test_s01_the_bulk_methods_of_the_session_are_refused(self, box: Pillarbox) -> None:
        def save(session: Session) -> None:
            session.bulk_save_objects([Note(id=9, tenant_id="globex", body="x")])

        def change(session: Session) -> None:
            session.bulk_update_mappings(inspect(Note), [{"id": 2, "body": "x"}])

        for bulk in (save, change):
            async with session_of(box, "acme") as session:
                with pytest.raises(TenancyError):
                    await session.run_sync(bulk)

    async def test_s01_a_row_that_was_moved_meanwhile_is_not_refreshed(
        self, box: Pillarbox, acme: AsyncSession
    ) -> None:
        note = await acme.get_one(Note, 1)
        await acme.commit()
        async with AsyncSession(box.engine) as session, session.begin():
            await session.execute(update(NOTES).where(NOTES.c.id == 1).values(tenant_id="globex"))
        with pytest.raises(TenancyError):
            await acme.refresh(note)
        assert note not in acme

    async def test_s01_marked_statements_and_connections_and_sessions_see_all(
        self, box: Pillarbox, acme: AsyncSession
    ) -> None:
        notes = (await acme.scalars(select(Note).execution_options(**ALL))).all()
        assert {note.tenant_id for note in notes} == {"acme", "globex"}
        assert len((await acme.execute(select(NOTES), execution_options=ALL)).all()) == 4
        await acme.close()
        async with session_of(box, None) as session:
            connection = await session.connection(execution_options=ALL)
            assert len((await connection.execute(select(Note))).all()) == 4
        async with session_of(box, None) as session:
            session.info[UNSCOPED] = True
            (await session.get_one(Note, 2)).body = "by an administrator"
            await session.commit()
        assert (await bodies(box.engine))[2] == "by an administrator"


RAW: dict[str, Executable] = {
    "alias of the table": select(NOTES.alias()),
    "column of the table": select(NOTES.c.body),
    "lightweight table": select(table("TENANCY_NOTES", column("body"))),
    "text with columns": text("SELECT * FROM tenancy_notes").columns(NOTES.c.id),
    "text in a condition": select(Reminder).where(text("EXISTS (SELECT 1 FROM tenancy_notes)")),
    "literal column": select(literal_column("(SELECT max(body) FROM tenancy_notes)")),
    "table joined to a class": select(Reminder).join(NOTES, NOTES.c.id == Reminder.note_id),
    "table joined without a condition": select(Reminder).join(NOTES, true()),
    "join made by hand": select(Reminder).select_from(join(Reminder, Note, Note.id == Reminder.note_id)),
    "table in a subquery": select(Note.id).where(Note.id.in_(select(NOTES.c.id))),
    "table in EXISTS": select(Reminder).where(exists().where(NOTES.c.id == Reminder.note_id)),
    "table in a scalar subquery": select(Reminder.id, select(func.count()).select_from(NOTES).scalar_subquery()),
    "table in a CTE": select(select(NOTES.c.id).cte()),
    "table in a union": union_all(select(Note.body), select(NOTES.c.body)),
    "class over a subquery of the table": select(aliased(Note, select(NOTES).subquery())),
    "from_statement with the table": select(Note).from_statement(select(NOTES)),
    "from_statement with an UPDATE": select(Note).from_statement(update(Note).values(body="x").returning(Note)),
    "from_statement with a DELETE": select(Note).from_statement(delete(Note).returning(Note)),
    "from_statement with an INSERT": select(Note).from_statement(insert(Note).values(id=9).returning(Note)),
    "condition on its own children": select(Note).where(Note.children.any(Note.body == "of globex")),
    "table of a subclass": select(LETTERS),
    "INSERT from the class": insert(Reminder).from_select(["id", "note_id"], select(Note.id, Note.id)),
    "INSERT from the table": insert(Reminder).from_select(["id", "note_id"], select(NOTES.c.id, NOTES.c.id)),
    "UPDATE joined to the class": update(Reminder).where(Reminder.note_id == Note.id).values(rings=1),
    "DELETE joined to the class": delete(Reminder).where(Reminder.note_id == Note.id),
    "UPDATE joined to itself": update(Note).where(Note.parent_id == Again.id).values(body="x"),
    "UPDATE without the ORM": update(Note).values(body="x").execution_options(dml_strategy="core_only"),
}

OLD = sqlalchemy.__version__.startswith("2.0.")
HELD: dict[str, tuple[Executable, list[Any]]] = {
    "entity": (select(Note.id).order_by(Note.id), [(1,), (3,)]),
    "column": (select(Note.body), [("of acme",)]),
    "count": (select(func.count()).select_from(Note), [(2,)]),
    "count of a column": (select(func.count(Note.id)), [(2,)]),
    "aggregate": (select(func.max(Note.body)), [("of acme",)]),
    "plain column beside its class": (select(Note.id).select_from(Note).where(NOTES.c.id == 2), []),
    "alias": (select(Again.body), [("of acme",)]),
    "subquery": (select(select(Note.body).subquery()), [("of acme",)]),
    "class over a subquery": (select(aliased(Note, select(Note).subquery()).body), [("of acme",)]),
    "CTE": (select(select(Note.body).cte()), [("of acme",)]),
    "from_statement": (select(Note.body).from_statement(select(Note.body)), [("of acme",)]),
    "union": (union_all(select(Note.body), select(Again.body)), [("of acme",)]),
    "union in a subquery": (select(union_all(select(Note.body), select(Note.body)).subquery()), [("of acme",)]),
    "join by relationship": (select(Reminder.id, Note.body).join(Reminder.note), [(10, "of acme")]),
    "outer join": (
        select(Reminder.id, Note.body).outerjoin(Reminder.note).order_by(Reminder.id),
        [(10, "of acme"), (20, None)],
    ),
    "join to an alias": (select(Note.id, Again.body).join(Note.parent.of_type(Again)), []),
    "subquery in a condition": (select(Reminder.id).where(Reminder.note_id.in_(select(Note.id))), [(10,)]),
    "relationship in a condition": (select(Reminder.id).where(Reminder.note.has()), [(10,)]),
    "EXISTS": (select(Reminder.id).where(exists().where(Note.id == Reminder.note_id)), [(10,)]),
    "EXISTS alone": (select(exists().where(Note.id == 2)), [(False,)]),
    "scalar subquery": (
        select(Reminder.id, select(Note.body).where(Note.id == Reminder.note_id).scalar_subquery()).order_by(
            Reminder.id
        ),
        [(10, "of acme"), (20, None)],
    ),
    "subclass": (select(Letter.address), [("of acme",)]),
    "alias of a subclass": (select(aliased(Letter, flat=True).address), [("of acme",)]),
}


UNNAMED: dict[str, Executable] = {
    "relationship in a condition": HELD["relationship in a condition"][0],
    "EXISTS": HELD["EXISTS"][0],
    "EXISTS alone": HELD["EXISTS alone"][0],
    "count by a condition": select(func.count()).where(Note.id > 0),
    "count of an alias": select(func.count()).where(Again.id > 0),
    "implicit join": select(Reminder.id).where(Reminder.note_id == Note.id),
    "beside one that is named": select(Reminder.id).where(
        Reminder.note_id.in_(select(Note.id)), exists().where(Note.id == 2)
    ),
}
"""A class that stands in a condition alone. The condition on the tenant does not reach it on SQLAlchemy 2.0."""


class TestS01Held:
    """What the condition on mapped classes does reach, on every database."""

    @pytest.mark.parametrize("disguise", RAW)
    async def test_s01_a_tenant_table_is_refused_in_every_disguise(
        self, box: Pillarbox, acme: AsyncSession, disguise: str
    ) -> None:
        with pytest.raises(TenancyError):
            await acme.execute(RAW[disguise])
        await acme.commit()
        assert await bodies(box.engine) == UNTOUCHED

    async def test_s01_a_bulk_update_by_primary_key_is_refused(self, acme: AsyncSession) -> None:
        with pytest.raises(TenancyError, match="a bulk UPDATE by primary key of 'Note'"):
            await acme.execute(update(Note), [{"id": 2, "body": "x"}])

    async def test_s01_queries_see_their_tenant_only(self, database: Database) -> None:
        async with note_box(database.url()) as box:
            await fill(box.engine)
            async with session_of(box, "acme") as session:
                for form, (statement, expected) in HELD.items():
                    if form in UNNAMED and OLD:
                        continue
                    found = (await session.execute(statement)).unique().all()
                    assert [tuple(row) for row in found] == expected, form

    @pytest.mark.parametrize("form", UNNAMED)
    async def test_s01_a_class_in_a_condition_alone_is_held_or_refused(self, acme: AsyncSession, form: str) -> None:
        if OLD:
            with pytest.raises(TenancyError):
                await acme.execute(UNNAMED[form])
            return
        with_foreign_rows = {(20,), (4,)}
        assert with_foreign_rows.isdisjoint(tuple(row) for row in await acme.execute(UNNAMED[form]))

    async def test_s01_cold_get_finds_nothing_foreign(self, acme: AsyncSession) -> None:
        assert await acme.get(Note, 2) is None
        assert (await acme.get_one(Note, 1)).body == "of acme"

    async def test_s01_orm_bulk_writes_reach_their_tenant_only(self, database: Database) -> None:
        async with note_box(database.url()) as box:
            await fill(box.engine)
            async with session_of(box, "acme") as session, session.begin():
                await session.execute(update(Note).where(Note.id.in_([1, 2])).values(body="new"))
                notes_of_ours = select(Note.id).where(Note.body != "new")
                await session.execute(update(Reminder).where(Reminder.note_id.in_(notes_of_ours)).values(rings=1))
                await session.execute(delete(Note).where(Note.parent_id.is_not(None)))
            assert await bodies(box.engine) == {1: "new", 2: "of globex", 4: "of globex"}

    async def test_s01_objects_are_written_and_deleted(self, box: Pillarbox, acme: AsyncSession) -> None:
        acme.add(Note(id=5, body="new"))
        (await acme.get_one(Note, 1)).body = "changed"
        await acme.delete(await acme.get_one(Note, 3))
        await acme.commit()
        assert await bodies(box.engine) == {1: "changed", 2: "of globex", 4: "of globex", 5: "new"}

    async def test_s01_lazy_loads_see_their_tenant_only(self, acme: AsyncSession) -> None:
        notes = (await acme.scalars(select(Note).order_by(Note.id))).all()
        loaded = await acme.run_sync(lambda _: [(note.parent, list(note.children)) for note in notes])
        assert loaded == [(None, []), (None, [])]

    @pytest.mark.parametrize("load", [joinedload, selectinload, subqueryload])
    async def test_s01_eager_loads_see_their_tenant_only(self, acme: AsyncSession, load: Any) -> None:
        reminders = (await acme.scalars(select(Reminder).options(load(Reminder.note)).order_by(Reminder.id))).all()
        assert [reminder.note and reminder.note.body for reminder in reminders] == ["of acme", None]

    async def test_s01_refresh_goes_on(self, acme: AsyncSession) -> None:
        note, letter = await acme.get_one(Note, 1), await acme.get_one(Document, 1)
        for held in (note, letter):
            await acme.refresh(held)
            acme.expire(held)
        assert await acme.run_sync(lambda _: (note.body, letter.address)) == ("of acme", "of acme")  # type: ignore[attr-defined]

    async def test_s01_tenants_are_told_apart_by_case_on_every_database(self, database: Database) -> None:
        async with note_box(database.url()) as box:
            await fill(box.engine)
            async with session_of(box, "ACME") as session:
                assert (await session.scalars(select(Note.id))).all() == []


class TestModels:
    """How a model becomes one of tenants."""

    async def test_the_index_begins_with_the_tenant(self) -> None:
        (index,) = NOTES.indexes
        assert [each.name for each in index.columns] == ["tenant_id", "id"]
        assert LETTERS.indexes == set()

    async def test_dataclasses_either_order_of_bases_and_imperative_mappings(self, acme: AsyncSession) -> None:
        class DataBase(MappedAsDataclass, DeclarativeBase):
            pass

        class Front(TenantScoped, DataBase):
            __tablename__ = "tenancy_front"
            id: Mapped[int] = mapped_column(primary_key=True)

        class Back(DataBase, TenantScoped):
            __tablename__ = "tenancy_back"
            id: Mapped[int] = mapped_column(primary_key=True)

        class Plain(TenantScoped):
            pass

        columns = Column("id", Integer, primary_key=True), Column("tenant_id", String(200))
        registry().map_imperatively(Plain, Table("tenancy_plain", registry().metadata, *columns))
        for model in (Front, Back, Plain):
            with pytest.raises(TenancyError):
                await acme.execute(select(inspect(model).local_table))
        assert Front(id=1) == Front(id=1)


class TestS02RowLevelSecurity:
    """The second line, on PostgreSQL."""

    @pytest.fixture
    async def owner(self, postgres_database: Database) -> AsyncIterator[AsyncEngine]:
        """The superuser that has made the tables, and protected them."""
        engine = create_async_engine(postgres_database.url())
        await fill(engine)
        async with engine.begin() as connection:
            for statement in row_level_security(Base.metadata):
                await connection.execute(text(statement))
            for role in ("application", "table_owner"):
                await connection.execute(text(f"DROP ROLE IF EXISTS {role}"))
                await connection.execute(text(f"CREATE ROLE {role}"))
                await connection.execute(text(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}"))
            await connection.execute(text("ALTER TABLE tenancy_notes OWNER TO table_owner"))
        yield engine
        async with engine.begin() as connection:
            for role in ("application", "table_owner"):
                await connection.execute(text(f"DROP OWNED BY {role} CASCADE"))
                await connection.execute(text(f"DROP ROLE {role}"))
        await engine.dispose()

    @pytest.fixture
    async def application(self, owner: AsyncEngine) -> AsyncIterator[AsyncEngine]:
        """What a service should connect as, on one connection."""
        engine = as_role(owner, "application")
        yield engine
        await engine.dispose()

    async def test_s02_without_a_tenant_there_are_no_rows(self, application: AsyncEngine) -> None:
        assert await bodies(application) == {}

    async def test_s02_the_owner_of_the_table_is_bound_too(self, owner: AsyncEngine) -> None:
        engine = as_role(owner, "table_owner")
        assert await bodies(engine) == {}
        await engine.dispose()

    async def test_s02_with_a_tenant_there_are_its_rows_even_for_marked_statements(
        self, owner: AsyncEngine, application: AsyncEngine
    ) -> None:
        box = note_box(application, row_security=True)
        async with box, box.unit_of_work(tenant="acme") as uow:
            rows = await uow.session.execute(select(NOTES.c.id).order_by(NOTES.c.id), execution_options=ALL)
            assert rows.scalars().all() == [1, 3]
            uow.add(Note(id=5, body="new"))
        assert (await bodies(owner))[5] == "new"

    async def test_s02_a_foreign_insert_or_move_is_refused(self, owner: AsyncEngine, application: AsyncEngine) -> None:
        foreign = insert(NOTES).values(id=9, tenant_id="globex", body="x")
        move = update(NOTES).where(NOTES.c.id == 1).values(tenant_id="globex")
        async with note_box(application, row_security=True) as box:
            for statement in (foreign, move):
                async with session_of(box, "acme") as session:
                    with pytest.raises(DBAPIError, match="row-level security"):
                        await session.execute(statement, execution_options=ALL)
        assert await bodies(owner) == UNTOUCHED

    async def test_s02_a_role_that_is_not_bound_is_refused_at_start(self, owner: AsyncEngine) -> None:
        async with owner.connect() as connection:
            with pytest.raises(TenancyError, match="superuser or BYPASSRLS"):
                await connection.run_sync(check_role)
            await connection.execute(text("ALTER ROLE application BYPASSRLS"))
            await connection.execute(text("SET LOCAL ROLE application"))
            with pytest.raises(TenancyError, match="'application'"):
                await connection.run_sync(check_role)
        with pytest.raises(TenancyError, match="superuser or BYPASSRLS"):
            await note_box(owner, row_security=True).start()

    async def test_s02_other_databases_are_refused_at_start(self, sqlite_database: Database) -> None:
        box = note_box(sqlite_database.url(), row_security=True)
        with pytest.raises(ConfigurationError, match="needs PostgreSQL, and this is sqlite"):
            await box.start()
        await box.stop()

    async def test_s02_a_tenant_that_comes_after_the_transaction_began_is_refused(
        self, application: AsyncEngine
    ) -> None:
        box = note_box(application, row_security=True)
        async with box, session_of(box, None) as session:
            await session.execute(select(Reminder))
            with event_context(tenant="acme"), pytest.raises(TenancyError, match="began without the tenant 'acme'"):
                await session.execute(select(Note))
            await session.rollback()
            with event_context(tenant="acme"):
                assert len((await session.execute(select(Note))).all()) == 2

    async def test_s03_the_tenant_does_not_stay_on_a_pooled_connection(self, application: AsyncEngine) -> None:
        asked = text("SELECT pg_backend_pid(), current_setting('pillarbox.tenant', true)")
        seen: list[tuple[Any, ...]] = []
        async with note_box(application, row_security=True) as box:
            for tenant in ("acme", "globex"):
                async with box.unit_of_work(tenant=tenant) as uow:
                    notes = (await uow.session.scalars(select(Note.id).order_by(Note.id))).all()
                    seen.append((*(await uow.session.execute(asked)).one(), notes))
                async with application.connect() as connection:
                    seen.append((*(await connection.execute(asked)).one(), await notes_of(connection)))
        process = seen[0][0]
        assert seen == [(process, "acme", [1, 3]), (process, "", []), (process, "globex", [2, 4]), (process, "", [])]

    async def test_s03_the_tenant_is_said_once_and_holds_after_a_savepoint(self, application: AsyncEngine) -> None:
        statements: list[str] = []

        def note(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
            statements.append(statement)

        listen(application.sync_engine, "before_cursor_execute", note)
        box = note_box(application, row_security=True)
        async with box, box.unit_of_work(tenant="acme") as uow:
            for _ in range(3):
                savepoint = await uow.session.begin_nested()
                assert len((await uow.session.execute(select(Note))).all()) == 2
                await savepoint.rollback()
            assert len((await uow.session.execute(select(Note))).all()) == 2
        assert sum("set_config" in statement for statement in statements) == 1

    async def test_s03_the_tenant_does_not_outlive_a_rollback(self, application: AsyncEngine) -> None:
        async with note_box(application, row_security=True) as box:
            async with session_of(box, "acme") as session:
                assert len((await session.execute(select(Note))).all()) == 2
            assert await bodies(application) == {}


def as_role(owner: AsyncEngine, role: str) -> AsyncEngine:
    """The same database by another role, on one connection."""
    settings = {"server_settings": {"role": role}}
    return create_async_engine(owner.url, connect_args=settings, pool_size=1, max_overflow=0)


async def notes_of(connection: AsyncConnection) -> list[int]:
    return list((await connection.execute(select(NOTES.c.id))).scalars())


class TestS04OneTenant:
    """One session, one tenant; none is a refusal, not all of them."""

    async def test_s04_a_session_keeps_its_tenant(self, box: Pillarbox) -> None:
        async with box.unit_of_work() as uow:
            with event_context(tenant="acme"):
                await uow.session.execute(select(Note))
            assert session_tenant(uow.session.sync_session) == "acme"
            with event_context(tenant="globex"), pytest.raises(TenancyError, match="'acme', not to 'globex'"):
                await uow.session.execute(select(Note))
            uow.add(Note(id=9, body="x"))
            with event_context(tenant="globex"), pytest.raises(TenancyError, match="'acme', not to 'globex'"):
                await uow.flush()
            await uow.rollback()

    async def test_s04_an_event_for_another_tenant_is_refused(self, box: Pillarbox) -> None:
        with pytest.raises(TenancyError, match="'acme', not to 'globex'"):
            async with box.unit_of_work(tenant="acme") as uow:
                uow.publish(NoteWritten(body="x"), key="k", tenant="globex")

    async def test_s04_touching_a_tenant_model_without_a_tenant_is_refused(self, box: Pillarbox) -> None:
        async with session_of(box, None) as session:
            for statement in (select(Note), select(func.count(Note.id)), update(Note).values(body="x"), delete(Note)):
                with pytest.raises(TenancyError, match="Note needs a tenant, and this session has none"):
                    await session.execute(statement)
            with pytest.raises(TenancyError, match="Note needs a tenant"):
                await session.get(Note, 1)
            session.add(Note(id=9, tenant_id="acme", body="x"))
            with pytest.raises(TenancyError, match="Note needs a tenant"):
                await session.flush()

    async def test_s04_without_a_tenant_eager_joins_find_nothing(self, box: Pillarbox) -> None:
        async with session_of(box, None) as session:
            reminders = (await session.scalars(select(Reminder).options(joinedload(Reminder.note)))).all()
            assert [reminder.note for reminder in reminders] == [None, None]

    async def test_s04_what_is_not_of_tenants_needs_none(self, box: Pillarbox) -> None:
        async with box.unit_of_work() as uow:
            uow.session.add(Reminder(id=30, note_id=1))
            assert (await uow.session.scalars(select(Reminder.id).order_by(Reminder.id))).all() == [10, 20, 30]
            assert (await (await uow.session.connection()).execute(text("SELECT 1"))).scalar() == 1
            uow.publish(NoteWritten(body="x"), key="k")
            uow.publish(NoteWritten(body="x"), key="k", tenant="acme")
            uow.publish(NoteWritten(body="x"), key="k", tenant="globex")
        assert await written(box.engine, "tenant_id") == [(None,), ("acme",), ("globex",)]

    async def test_s04_events_carry_the_tenant_of_their_session(self, box: Pillarbox) -> None:
        async with box.unit_of_work() as uow:
            with event_context(tenant="acme"):
                await uow.session.execute(select(Note))
            uow.publish(NoteWritten(body="x"), key="k")
        assert await written(box.engine, "tenant_id") == [("acme",)]

    @pytest.mark.parametrize("tenant", ["", " acme", "acme ", "a\nb", "x" * 201])
    async def test_s04_a_tenant_that_could_be_taken_for_another_is_refused(self, box: Pillarbox, tenant: str) -> None:
        with pytest.raises((TenancyError, HeaderError)):
            async with box.unit_of_work(tenant=tenant):
                pass

    async def test_s04_required_refuses_everything_without_a_tenant(self, sqlite_database: Database) -> None:
        async with note_box(sqlite_database.url(), tenancy="required") as box:
            await box.migrate()
            await fill(box.engine)
            async with session_of(box, None) as session:
                for refused in (
                    session.execute(select(Reminder)),
                    session.execute(text("SELECT 1")),
                    session.get(Reminder, 10),
                    session.connection(),
                ):
                    with pytest.raises(TenancyError, match="needs a tenant"):
                        await refused
                session.add(Reminder(id=30, note_id=1))
                with pytest.raises(TenancyError, match="needs a tenant"):
                    await session.flush()
            with pytest.raises(TenancyError, match=r"tests\.note\.written needs a tenant"):
                async with box.unit_of_work() as uow:
                    uow.publish(NoteWritten(body="x"), key="k")
            assert await written(box.engine) == []

    async def test_s04_required_works_with_a_tenant(self, sqlite_database: Database) -> None:
        async with note_box(sqlite_database.url(), tenancy="required") as box:
            await box.migrate()
            await fill(box.engine)
            with event_context(tenant="acme"):
                async with box.unit_of_work() as uow:
                    assert len((await uow.session.scalars(select(Reminder))).all()) == 2
                    uow.publish(NoteWritten(body="x"), key="k")
            assert await written(box.engine, "tenant_id") == [("acme",)]

    async def test_s04_there_are_two_modes(self) -> None:
        with pytest.raises(ConfigurationError, match="'off' or 'required', got 'on'"):
            Pillarbox("sqlite://", tenancy="on")  # type: ignore[arg-type]
