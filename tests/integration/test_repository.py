"""Repositories and their interceptors, on real databases."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import JSON, Enum, LargeBinary, Numeric, PickleType, Select, String, event, inspect, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column

from pillarbox import ConcurrencyError, Pillarbox, Repository, TenancyError, TenantScoped, clock, event_context
from pillarbox.cache import MemoryCache, Ticket
from pillarbox.caches.redis import RedisCache
from pillarbox.errors import ConfigurationError, NotFoundError
from pillarbox.interceptor import Interceptor, Read
from pillarbox.interceptors import Audit, Audited, OptimisticLock, ReadCache, SoftDeletable, SoftDelete, Tenant
from tests.domain import Order, order_box, set_up, written
from tests.servers import Database

pytestmark = pytest.mark.dialects


class Base(DeclarativeBase):
    pass


class Article(TenantScoped, SoftDeletable, Audited, Base):
    """Everything at once."""

    __tablename__ = "repository_articles"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    title: Mapped[str] = mapped_column(String(50))
    version: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  SQLAlchemy's way


class Size(enum.Enum):
    SMALL = "small"


class Parcel(Base):
    """Columns of many types, and no tenant."""

    __tablename__ = "repository_parcels"

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    price: Mapped[Decimal] = mapped_column(Numeric(10, 2))
    sent_at: Mapped[datetime | None]
    size: Mapped[Size] = mapped_column(Enum(Size, native_enum=False))
    label: Mapped[bytes] = mapped_column(LargeBinary)
    contents: Mapped[Any] = mapped_column(JSON)
    fragile: Mapped[bool]


class Riddle(Base):
    __tablename__ = "repository_riddles"

    id: Mapped[int] = mapped_column(primary_key=True)
    answer: Mapped[Any] = mapped_column(PickleType)


class Animal(Base):
    __tablename__ = "repository_animals"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "animal"}  # noqa: RUF012  SQLAlchemy's way


class Dog(Animal):
    __mapper_args__ = {"polymorphic_identity": "dog"}  # noqa: RUF012  SQLAlchemy's way


class At(clock.SystemClock):
    """A clock that stands where it was put."""

    def __init__(self, moment: datetime) -> None:
        super().__init__()
        self.moment = moment

    def now(self) -> datetime:
        return self.moment


NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
async def box(sqlite_database: Database) -> AsyncIterator[Pillarbox]:
    async with Pillarbox(sqlite_database.url()) as box:
        await create_tables(box.engine)
        yield box


async def create_tables(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


@pytest.fixture
async def order_books(database: Database) -> AsyncIterator[Pillarbox]:
    """A box with orders, on every database."""
    async with order_box(database.url()) as box:
        await set_up(box)
        yield box


async def keep(box: Pillarbox, *articles: Article, tenant: str = "acme") -> None:
    async with box.unit_of_work(tenant=tenant) as uow:
        Repository(uow, Article, [Audit()])
        uow.add(*articles)


class TestRepository:
    async def test_adds_gets_and_removes(self, order_books: Pillarbox) -> None:
        order = Order.place(100)
        async with order_books.unit_of_work() as uow:
            Repository(uow, Order).add(order)
        async with order_books.unit_of_work() as uow:
            orders = Repository(uow, Order)
            found = await orders.get_one(order.id)
            found.cancel()
            await orders.remove(found)
        async with order_books.unit_of_work() as uow:
            orders = Repository(uow, Order)
            assert await orders.get(order.id) is None
            with pytest.raises(NotFoundError, match=f"there is no Order .*{order.id}"):
                await orders.get_one(order.id)
        assert await written(order_books.engine) == ["placed", "cancelled"]

    async def test_lists_and_counts(self, order_books: Pillarbox) -> None:
        ids = sorted(uuid4() for _ in range(5))
        async with order_books.unit_of_work() as uow:
            orders = Repository(uow, Order)
            for index, ident in enumerate(ids):
                orders.add(Order.place(index, ident))
            falling = await orders.list(order_by=[Order.total_cents.desc()])
            assert [order.total_cents for order in falling] == [4, 3, 2, 1, 0]
            some = await orders.list(Order.total_cents > 1, limit=2, order_by=[Order.total_cents])
            assert [order.total_cents for order in some] == [2, 3]
            assert len(await orders.list(limit=3, offset=3)) == 2
            assert (await orders.count(), await orders.count(Order.total_cents > 2)) == (5, 2)

    async def test_works_in_a_session_of_ones_own(self, box: Pillarbox) -> None:
        async with AsyncSession(box.engine) as session:
            parcels = Repository(session, Parcel)
            parcels.add(parcel())
            await session.commit()
            assert await parcels.count() == 1

    async def test_save_writes_at_once(self, order_books: Pillarbox) -> None:
        async with order_books.unit_of_work() as uow:
            orders, order = Repository(uow, Order), Order.place(1)
            await orders.save(order)
            assert order.version == 1
            order.reprice(2)
            await orders.save(order)
            assert order.version == 2

    async def test_save_finds_out_that_somebody_was_faster(self, box: Pillarbox) -> None:
        await keep(box, Article(id=1, title="first"))
        async with AsyncSession(box.engine, expire_on_commit=False) as session:
            articles = Repository(session, Article)
            mine = await articles.get_one(1)
            await session.commit()
            async with box.unit_of_work(tenant="acme") as uow:
                (await Repository(uow, Article, [Audit()]).get_one(1)).title = "second"
            mine.title = "third"
            with pytest.raises(ConcurrencyError, match="somebody else"):
                await articles.save(mine)


class TestAddAll:
    """W9: portions in savepoints."""

    async def test_w9_a_portion_that_fails_is_undone_alone(self, order_books: Pillarbox) -> None:
        taken = uuid4()
        ids = [uuid4() for _ in range(8)]
        ids[4] = taken
        async with order_books.unit_of_work() as uow:
            uow.add(Order.place(0, taken))
        async with order_books.unit_of_work() as uow:
            added = await Repository(uow, Order).add_all((Order.place(1, ident) for ident in ids), portion=3)
        assert added.count == 5
        (failed,) = added.failed
        assert (failed.index, [order.id for order in failed.entities]) == (1, ids[3:6])
        assert isinstance(failed.error, IntegrityError)
        async with order_books.unit_of_work() as uow:
            assert await Repository(uow, Order).count() == 6
        assert await written(order_books.engine) == ["placed"] * 6, "no event of the portion that failed"

    async def test_w9_what_was_pending_before_is_not_part_of_the_first_portion(self, order_books: Pillarbox) -> None:
        before, ident = Order.place(1), uuid4()
        async with order_books.unit_of_work() as uow:
            orders = Repository(uow, Order)
            orders.add(before)
            added = await orders.add_all([Order.place(2, ident), Order.place(3, ident)], portion=2)
            assert (added.count, len(added.failed)) == (0, 1)
            assert [order.id for order in await orders.list()] == [before.id]

    async def test_w9_a_portion_of_nothing_is_refused(self, box: Pillarbox) -> None:
        async with box.unit_of_work() as uow:
            with pytest.raises(ConfigurationError, match="portion=0"):
                await Repository(uow, Parcel).add_all([parcel()], portion=0)

    async def test_w9_interceptors_refuse_a_portion_too(self, box: Pillarbox) -> None:
        async with box.unit_of_work(tenant="acme") as uow:
            articles = Repository(uow, Article, [Tenant(), Audit()])
            foreign = Article(id=2, tenant_id="globex", title="x")
            added = await articles.add_all([Article(id=1, title="x"), foreign, Article(id=3, title="x")], portion=1)
            assert [type(portion.error) for portion in added.failed] == [TenancyError]
            assert await articles.count() == added.count == 2

    async def test_w9_a_lost_connection_is_not_a_failed_portion(self, postgres_database: Database) -> None:
        async with order_box(postgres_database.url()) as box:
            await set_up(box)

            def portions(session: Session) -> Any:
                yield Order.place(1)
                session.connection().invalidate()
                yield Order.place(2)

            with pytest.raises(Exception, match="invalid"):
                async with box.unit_of_work() as uow:
                    await Repository(uow, Order).add_all(portions(uow.session.sync_session), portion=1)
            assert await written(box.engine) == []


class TestChain:
    async def test_hooks_are_called_in_the_order_of_the_interceptors(self, box: Pillarbox) -> None:
        calls: list[str] = []

        class Spy(Interceptor):
            def __init__(self, name: str) -> None:
                self._name = name

            def attach(self, session: Session, model: Any) -> None:  # noqa: ARG002
                calls.append(f"attach {self._name}")

            def adding(self, session: Session, entity: Any) -> None:  # noqa: ARG002
                calls.append(f"adding {self._name}")

            def removing(self, session: Session, entity: Any) -> bool:  # noqa: ARG002
                calls.append(f"removing {self._name}")
                return self._name == "first"

            def restrict(self, session: Session, model: Any, statement: Select[Any], read: Read) -> Select[Any]:  # noqa: ARG002
                calls.append(f"restrict {self._name}")
                return statement

            async def peek(self, session: Session, model: Any, ident: Any, ask: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ARG002
                calls.append(f"peek {self._name}")
                return await ask()

        async with box.unit_of_work() as uow:
            parcels = Repository(uow, Parcel, [Spy("first"), Spy("second")])
            sent = parcel()
            parcels.add(sent)
            await parcels.remove(sent)
            assert await parcels.count() == 1, "the first interceptor has dealt with it"
            assert await parcels.peek(sent.id) is sent, "without a cache it is a get"
        hooks = ["attach", "adding", "removing", "restrict", "peek"]
        assert calls == [f"{hook} {name}" for hook in hooks for name in ("first", "second")]


class TestTenant:
    async def test_stamps_at_once(self, box: Pillarbox) -> None:
        async with AsyncSession(box.engine) as session:
            with event_context(tenant="acme"):
                Repository(session, Article, [Tenant()]).add(article := Article(id=1, title="x"))
            assert article.tenant_id == "acme"

    async def test_refuses_entities_of_others(self, box: Pillarbox) -> None:
        await keep(box, Article(id=2, title="x"), tenant="globex")
        async with AsyncSession(box.engine) as session:
            articles = Repository(session, Article, [Tenant(), SoftDelete()])
            foreign = await session.get_one(Article, 2)
            with event_context(tenant="acme"):
                with pytest.raises(TenancyError, match="belongs to tenant 'globex'"):
                    articles.add(Article(id=1, tenant_id="globex", title="x"))
                with pytest.raises(TenancyError, match="belongs to tenant 'globex'"):
                    await articles.remove(foreign)
                with pytest.raises(TenancyError, match="belongs to tenant 'globex'"):
                    articles.restore(foreign)
                assert await articles.get(2) is None

    async def test_shows_its_own_also_in_sessions_that_know_no_tenants(self, box: Pillarbox) -> None:
        await keep(box, Article(id=1, title="x"))
        await keep(box, Article(id=2, title="x"), tenant="globex")
        async with AsyncSession(box.engine) as session:
            articles = Repository(session, Article, [Tenant()])
            with event_context(tenant="globex"):
                assert [article.id for article in await articles.list()] == [2]
                assert await articles.count() == 1
            with pytest.raises(TenancyError, match="Article needs a tenant"):
                await articles.list()

    async def test_leaves_all_others_alone(self, box: Pillarbox) -> None:
        async with box.unit_of_work() as uow:
            parcels = Repository(uow, Parcel, [Tenant()])
            parcels.add(sent := parcel())
            assert await parcels.list() == [sent]


class TestSoftDelete:
    async def test_a_removed_entity_stays_and_is_not_seen(self, box: Pillarbox) -> None:
        await keep(box, Article(id=1, title="x"), Article(id=2, title="x"))
        with clock.use(At(NOON)):
            async with box.unit_of_work(tenant="acme") as uow:
                articles = Repository(uow, Article, [SoftDelete()])
                removed = await articles.get_one(1)
                await articles.remove(removed)
                assert await articles.get(1) is None, "in the same session"
        async with box.unit_of_work(tenant="acme") as uow:
            articles = Repository(uow, Article, [SoftDelete()])
            assert [article.id for article in await articles.list()] == [2]
            assert (await articles.count(), await articles.count(include_deleted=True)) == (1, 2)
            assert len(await articles.list(include_deleted=True)) == 2
            removed = await articles.get_one(1, include_deleted=True)
            assert removed.deleted_at == NOON
            await articles.remove(removed)
            assert removed.deleted_at == NOON, "once is enough"
            articles.restore(removed)
            assert await articles.count() == 2

    async def test_other_classes_are_deleted(self, box: Pillarbox) -> None:
        async with box.unit_of_work() as uow:
            parcels = Repository(uow, Parcel, [SoftDelete()])
            parcels.add(sent := parcel())
            await uow.flush()
            await parcels.remove(sent)
            assert await parcels.count(include_deleted=True) == 0
            with pytest.raises(ConfigurationError, match="no interceptor of this repository keeps a removed Parcel"):
                parcels.restore(sent)


class TestAudit:
    async def test_says_who_and_when(self, box: Pillarbox) -> None:
        with clock.use(now := At(NOON)):
            with event_context(user_id="ann"):
                await keep(box, Article(id=1, title="x"))
            now.moment += timedelta(hours=1)
            with event_context(user_id="bob"):
                async with box.unit_of_work(tenant="acme") as uow:
                    article = await Repository(uow, Article, [Audit(), Audit()]).get_one(1)
                    article.title = "y"
        async with box.unit_of_work(tenant="acme") as uow:
            found = await Repository(uow, Article).get_one(1)
        assert (found.created_at, found.created_by) == (NOON, "ann")
        assert (found.updated_at, found.updated_by) == (NOON + timedelta(hours=1), "bob")

    async def test_nothing_changed_is_no_update(self, box: Pillarbox) -> None:
        await keep(box, Article(id=1, title="x"))
        async with box.unit_of_work(tenant="acme") as uow:
            article = await Repository(uow, Article, [Audit()]).get_one(1)
            before = article.updated_at
            article.title = "x"
            await uow.flush()
            assert (article.updated_at, article.version) == (before, 1)


class TestOptimisticLock:
    async def test_another_version_than_the_expected_one_is_refused(self, box: Pillarbox) -> None:
        await keep(box, Article(id=1, title="x"))
        async with box.unit_of_work(tenant="acme") as uow:
            articles = Repository(uow, Article, [OptimisticLock()])
            article = await articles.get_one(1, expected_version=1)
            article.title = "y"
            await articles.save(article, expected_version=1)
            with pytest.raises(ConcurrencyError, match="has version 2, and 1 was expected"):
                await articles.get(1, expected_version=1)
            with pytest.raises(ConcurrencyError, match="has version 2, and 1 was expected"):
                await articles.save(article, expected_version=1)

    async def test_needs_a_version_column_and_is_needed_for_expected_version(self, box: Pillarbox) -> None:
        async with box.unit_of_work(tenant="acme") as uow:
            with pytest.raises(ConfigurationError, match="Parcel has no version"):
                Repository(uow, Parcel, [OptimisticLock()])
            with pytest.raises(ConfigurationError, match="needs OptimisticLock"):
                await Repository(uow, Article).get(1, expected_version=1)


class TestMixins:
    def test_dataclasses_and_either_order_of_bases(self) -> None:
        class DataBase(MappedAsDataclass, DeclarativeBase):
            pass

        class Front(SoftDeletable, Audited, DataBase):
            __tablename__ = "front"
            id: Mapped[int] = mapped_column(primary_key=True)

        class Back(DataBase, SoftDeletable, Audited):
            __tablename__ = "back"
            id: Mapped[int] = mapped_column(primary_key=True)

        expected = ["id", "deleted_at", "created_at", "created_by", "updated_at", "updated_by"]
        assert Front.__table__.columns.keys() == Back.__table__.columns.keys() == expected
        assert Front(id=1) == Front(id=1)


def parcel() -> Parcel:
    return Parcel(
        price=Decimal("12.50"),
        sent_at=datetime(2030, 1, 1, 12, 30),  # noqa: DTZ001  a column without a zone
        size=Size.SMALL,
        label=b"\x00\xff",
        contents={"books": [1, 2.5, None, "ä"]},
        fragile=True,
    )


async def nothing() -> None:
    """What happens by default."""


class MeetingCache(MemoryCache):
    """Lets something happen before a row is kept, and before it is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()
        self.before_set = self.before_delete = nothing

    async def get(self, key: str) -> bytes | Ticket | None:
        self.keys.add(key)
        return await super().get(key)

    async def set(self, ticket: Ticket, value: bytes, *, ttl: float) -> None:
        await self.before_set()
        await super().set(ticket, value, ttl=ttl)

    async def delete(self, keys: Collection[str]) -> None:
        await self.before_delete()
        await super().delete(keys)


def statements_on(engine: AsyncEngine) -> list[str]:
    """What is executed on the engine from now on."""
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        statements.append(statement)

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    return statements


class Shelf:
    """Articles with a read cache, and a count of what is read from the database for it."""

    def __init__(self, box: Pillarbox, reads: AsyncEngine) -> None:
        self.box = box
        self.cache = MeetingCache()
        self.read_cache = ReadCache(self.cache, async_sessionmaker(reads))
        self.statements = statements_on(reads)

    def articles(self, work: Any) -> Repository[Article]:
        return Repository(work, Article, [Tenant(), SoftDelete(), Audit(), self.read_cache])

    async def peek(self, ident: Any = 1, tenant: str = "acme") -> Article | None:
        async with self.box.unit_of_work(tenant=tenant) as uow:
            return await self.articles(uow).peek(ident)

    async def title(self) -> str | None:
        found = await self.peek()
        return None if found is None else found.title

    async def rename(self, title: str) -> None:
        async with self.box.unit_of_work(tenant="acme") as uow:
            (await self.articles(uow).get_one(1)).title = title


@pytest.fixture
async def shelf(database: Database) -> AsyncIterator[Shelf]:
    reads = create_async_engine(database.url())
    async with Pillarbox(database.url()) as box:
        await create_tables(box.engine)
        await keep(box, Article(id=1, title="first"), Article(id=2, title="other"))
        yield Shelf(box, reads)
    await reads.dispose()


class TestReadCache:
    async def test_reads_once_and_gives_detached_snapshots(self, shelf: Shelf) -> None:
        first, second = await shelf.peek(), await shelf.peek()
        assert len(shelf.statements) == 1
        assert first is not None
        assert second is not None
        for snapshot in (first, second):
            assert inspect(snapshot).detached
            assert (snapshot.id, snapshot.tenant_id, snapshot.title, snapshot.version) == (1, "acme", "first", 1)
        assert first.created_at == second.created_at

    async def test_what_is_not_there_is_not_kept(self, shelf: Shelf) -> None:
        assert await shelf.peek(9) is None
        await keep(shelf.box, Article(id=9, title="late"))
        found = await shelf.peek(9)
        assert found is not None

    async def test_a_change_is_seen_after_its_commit(self, shelf: Shelf) -> None:
        assert await shelf.title() == "first"
        await shelf.rename("second")
        assert await shelf.title() == "second"

    async def test_nothing_is_seen_or_kept_before_its_commit(self, shelf: Shelf) -> None:
        async with shelf.box.unit_of_work(tenant="acme") as uow:
            articles = shelf.articles(uow)
            (await articles.get_one(1)).title = "never"
            await uow.flush()
            peeked = await articles.peek(1)
            assert peeked is not None
            assert peeked.title == "first", "not even by who has written it"
            assert await asyncio.create_task(shelf.title()) == "first"
            await uow.rollback()
        assert await shelf.title() == "first"

    async def test_a_removed_entity_is_gone(self, shelf: Shelf) -> None:
        await shelf.peek(1)
        await shelf.peek(2)
        async with shelf.box.unit_of_work(tenant="acme") as uow:
            articles = shelf.articles(uow)
            await articles.remove(await articles.get_one(1))
            await uow.session.delete(await articles.get_one(2))
        assert await shelf.peek(1) is None
        assert await shelf.peek(2) is None

    async def test_an_entity_that_another_repository_would_show_is_not_shown(self, shelf: Shelf) -> None:
        async with shelf.box.unit_of_work(tenant="acme") as uow:
            articles = shelf.articles(uow)
            await articles.remove(await articles.get_one(1))
        async with shelf.box.unit_of_work(tenant="acme") as uow:
            assert await Repository(uow, Article, [shelf.read_cache]).peek(1) is not None
        assert await shelf.peek(1) is None

    async def test_tenants_do_not_meet_in_the_cache(self, shelf: Shelf) -> None:
        assert await shelf.peek(1, "acme") is not None
        assert await shelf.peek(1, "globex") is None
        assert await shelf.peek(1, "acme") is not None

    async def test_a_late_fill_does_not_bring_back_what_was_changed_meanwhile(self, shelf: Shelf) -> None:
        async def change() -> None:
            shelf.cache.before_set = nothing
            await asyncio.create_task(shelf.rename("second"))

        shelf.cache.before_set = change
        assert await shelf.title() == "first", "it was read before"
        assert await shelf.title() == "second"

    async def test_a_cancelled_commit_is_forgotten_all_the_same(self, shelf: Shelf) -> None:
        await shelf.title()
        forgetting, go_on = asyncio.Event(), asyncio.Event()

        async def stop() -> None:
            forgetting.set()
            await go_on.wait()

        shelf.cache.before_delete = stop
        renaming = asyncio.create_task(shelf.rename("second"))
        await forgetting.wait()
        renaming.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await renaming
        assert await shelf.title() == "second"

    async def test_a_cache_that_fails_does_not_fail_the_transaction(
        self, shelf: Shelf, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def fail() -> None:
            raise RuntimeError("the cache has a bug")

        await shelf.title()
        shelf.cache.before_delete = fail
        await shelf.rename("second")
        assert "could not forget 1 keys" in caplog.text
        assert await shelf.title() == "first", "until its time is over"

    async def test_an_older_snapshot_of_the_unit_of_work_does_not_get_into_the_cache(
        self, mariadb_database: Database
    ) -> None:
        reads = create_async_engine(mariadb_database.url())
        async with Pillarbox(mariadb_database.url()) as box:
            await create_tables(box.engine)
            await keep(box, Article(id=1, title="first"))
            shelf = Shelf(box, reads)
            async with box.unit_of_work(tenant="acme") as uow:
                await uow.session.scalar(select(Article.title))
                await asyncio.create_task(shelf.rename("second"))
                assert await uow.session.scalar(select(Article.title)) == "first", "REPEATABLE READ"
                await shelf.articles(uow).peek(1)
            assert await shelf.title() == "second"
        await reads.dispose()

    async def test_a_value_of_another_release_is_read_anew(self, shelf: Shelf) -> None:
        await shelf.title()
        await shelf.cache.delete(shelf.cache.keys)
        (key,) = shelf.cache.keys
        ticket = await shelf.cache.get(key)
        assert isinstance(ticket, Ticket)
        await shelf.cache.set(ticket, b'{"id":1,"name":"first"}', ttl=60)
        shelf.statements.clear()
        assert [await shelf.title() for _ in range(3)] == ["first"] * 3
        assert len(shelf.statements) == 2, "once to throw it away, once to fill"


class TestReadCacheColumns:
    @pytest.fixture
    async def reads(self, sqlite_database: Database) -> AsyncIterator[AsyncEngine]:
        engine = create_async_engine(sqlite_database.url())
        yield engine
        await engine.dispose()

    async def test_values_come_back_as_they_are(self, box: Pillarbox, reads: AsyncEngine) -> None:
        read_cache = ReadCache(MemoryCache(), async_sessionmaker(reads))
        sent = parcel()
        async with box.unit_of_work() as uow:
            uow.add(sent)
        async with box.unit_of_work() as uow:
            parcels = Repository(uow, Parcel, [read_cache])
            await parcels.peek(sent.id)
            statements = statements_on(reads)
            found = await parcels.peek(sent.id)
            assert statements == []
        assert found is not None
        for name in Parcel.__table__.columns.keys():  # noqa: SIM118  not a dict
            assert getattr(found, name) == getattr(sent, name)
            assert type(getattr(found, name)) is type(getattr(sent, name))

    async def test_what_json_cannot_carry_exactly_is_not_kept(
        self, box: Pillarbox, reads: AsyncEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        statements = statements_on(reads)
        async with box.unit_of_work() as uow:
            uow.add(Riddle(id=1, answer={1, 2}))
        async with box.unit_of_work() as uow:
            riddles = Repository(uow, Riddle, [ReadCache(MemoryCache(), async_sessionmaker(reads))])
            for _ in range(2):
                found = await riddles.peek(1)
                assert found is not None
                assert found.answer == {1, 2}
        assert len(statements) == 2
        assert caplog.text.count("Riddle has a column that JSON cannot carry exactly") == 1

    async def test_an_id_that_only_the_database_takes_for_the_same_is_not_kept(
        self, box: Pillarbox, reads: AsyncEngine
    ) -> None:
        await keep(box, Article(id=1, title="first"))
        statements = statements_on(reads)
        async with box.unit_of_work(tenant="acme") as uow:
            articles = Repository(uow, Article, [ReadCache(MemoryCache(), async_sessionmaker(reads))])
            for ident in ("1", "1", 1, 1):
                assert await articles.peek(ident) is not None
        assert len(statements) == 3

    async def test_a_redis_that_is_down_fails_nothing(self, box: Pillarbox, reads: AsyncEngine) -> None:
        await keep(box, Article(id=1, title="first"))
        async with RedisCache("redis://127.0.0.1:1/0") as cache:
            for title in ("second", "third"):
                async with box.unit_of_work(tenant="acme") as uow:
                    articles = Repository(uow, Article, [ReadCache(cache, async_sessionmaker(reads))])
                    (await articles.get_one(1)).title = title
                async with box.unit_of_work(tenant="acme") as uow:
                    found = await Repository(uow, Article, [ReadCache(cache, async_sessionmaker(reads))]).peek(1)
                    assert found is not None
                    assert found.title == title

    async def test_h25_misses_need_connections_of_their_own(self, box: Pillarbox) -> None:
        async with box.unit_of_work() as uow:
            with pytest.raises(ConfigurationError, match="an engine of its own"):
                Repository(uow, Parcel, [ReadCache(MemoryCache(), async_sessionmaker(box.engine))])

    async def test_a_hierarchy_is_refused(self, box: Pillarbox, reads: AsyncEngine) -> None:
        async with box.unit_of_work() as uow:
            for model in (Animal, Dog):
                with pytest.raises(ConfigurationError, match="part of a class hierarchy"):
                    Repository(uow, model, [ReadCache(MemoryCache(), async_sessionmaker(reads))])
