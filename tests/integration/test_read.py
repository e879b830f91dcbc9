"""Reading a read model by key and in pages, with rows that come and go, on every database and through every cache."""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from sqlalchemy import String, delete, event, insert, inspect, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Pillarbox, TenancyError, TenantScoped, event_context
from pillarbox.cache import Cache, MemoryCache, Ticket
from pillarbox.caches.redis import RedisCache
from pillarbox.projections.read import InvalidCursorError, ReadDao
from pillarbox.stores.columns import Utc
from pillarbox.tenancy import row_level_security
from tests.servers import Database

pytestmark = pytest.mark.dialects


class Base(DeclarativeBase):
    pass


class Summary(Base):
    """A read model of orders, with many ties."""

    __tablename__ = "read_summaries"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    grade: Mapped[int]
    placed_at: Mapped[datetime] = mapped_column(Utc())
    note: Mapped[str | None] = mapped_column(String(20))
    deleted: Mapped[bool] = mapped_column(default=False)


class Slip(TenantScoped, Base):
    """One that belongs to tenants."""

    __tablename__ = "read_slips"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    title: Mapped[str] = mapped_column(String(20))
    deleted: Mapped[bool] = mapped_column(default=False)


NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
MANY = 1000


def row(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "grade": number * 31 % 7,
        "placed_at": NOON + timedelta(seconds=number * 17 % 13, microseconds=number % 3),
        "note": None if number % 5 == 0 else f"note {number % 11:02}",
        "deleted": False,
    }


@pytest.fixture
async def engine(database: Database) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database.url())
    await create_tables(engine)
    async with engine.begin() as connection:
        await connection.execute(insert(Summary), [row(number) for number in range(0, 2 * MANY, 2)])
    yield engine
    await engine.dispose()


@pytest.fixture
async def box(database: Database) -> AsyncIterator[Pillarbox]:
    async with Pillarbox(database.url()) as box:
        await create_tables(box.engine)
        for tenant, numbers in (("acme", (1, 2, 3)), ("globex", (4, 5))):
            async with box.unit_of_work(tenant=tenant) as uow:
                uow.add(*(Slip(id=number, title=f"{tenant} {number}") for number in numbers))
        yield box


async def create_tables(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


def watch(engine: AsyncEngine, what: str) -> list[str]:
    """What happens on the engine from now on."""
    seen: list[str] = []
    if what == "commit":
        event.listen(engine.sync_engine, "commit", lambda _connection: seen.append("commit"))
    else:

        def note(_conn: Any, _cursor: Any, sql: str, *_rest: Any) -> None:
            seen.append(sql)

        event.listen(engine.sync_engine, "before_cursor_execute", note)
    return seen


def sorted_rows(numbers: Collection[int], order: Sequence[tuple[str, bool]]) -> list[int]:
    """What the database should say: NULLs last, and ties by the primary key in the last direction."""
    rows = [row(number) for number in numbers]
    falls = order[-1][1] if order else False
    for name, falling in reversed([*order, ("id", falls)]):
        there = sorted((each for each in rows if each[name] is not None), key=lambda r: r[name], reverse=falling)
        rows = [*there, *(each for each in rows if each[name] is None)]
    return [each["id"] for each in rows]


ORDERS: list[list[tuple[str, bool]]] = [
    [],
    [("id", True)],
    [("grade", False)],
    [("grade", True)],
    [("grade", False), ("placed_at", False)],
    [("grade", True), ("placed_at", False)],
    [("placed_at", True), ("grade", False)],
    [("note", False)],
    [("note", True), ("grade", False)],
]


def said(order: Sequence[tuple[str, bool]]) -> list[Any]:
    return [getattr(Summary, name).desc() if falling else getattr(Summary, name) for name, falling in order]


class TestPages:
    async def test_every_row_comes_once_and_in_order(self, engine: AsyncEngine) -> None:
        dao = ReadDao(async_sessionmaker(engine), Summary)
        for order in ORDERS:
            after, seen, pages = None, list[int](), 0
            while pages == 0 or after is not None:
                page = await dao.page(order_by=said(order), limit=90, after=after)
                seen += [each.id for each in page.items]
                after, pages = page.next, pages + 1
            assert seen == sorted_rows(range(0, 2 * MANY, 2), order), order
            assert pages == 12

    async def test_rows_that_come_and_go_between_pages_shift_nothing(self, engine: AsyncEngine) -> None:
        dao = ReadDao(async_sessionmaker(engine), Summary)
        for order in ([("grade", False)], [("grade", True), ("placed_at", False)], [("note", False)]):
            stay, seen, after, turn = set(range(0, 2 * MANY, 2)), list[int](), None, 0
            while turn == 0 or after is not None:
                page = await dao.page(order_by=said(order), limit=100, after=after)
                seen += [each.id for each in page.items]
                after, turn = page.next, turn + 1
                # The row that the cursor stands on goes, and others come: everywhere, also right behind it.
                gone, new = page.items[-1].id, range(turn * 40 + 1, turn * 40 + 41, 2)
                async with engine.begin() as connection:
                    await connection.execute(delete(Summary).where(Summary.id == gone))
                    await connection.execute(insert(Summary), [row(number) for number in new])
                stay.discard(gone)
            assert len(seen) == len(set(seen)), "none twice"
            assert stay <= set(seen), "none is missing that was there all the time"
            assert seen == sorted_rows(seen, order), "in one order over all pages"
            async with engine.begin() as connection:
                await connection.execute(delete(Summary))
                await connection.execute(insert(Summary), [row(number) for number in range(0, 2 * MANY, 2)])

    async def test_one_direction_is_one_comparison_where_the_database_can(self, engine: AsyncEngine) -> None:
        dao, statements = ReadDao(async_sessionmaker(engine), Summary), watch(engine, "statements")
        first = await dao.page(order_by=[Summary.grade.desc()], limit=5)
        await dao.page(order_by=[Summary.grade.desc()], limit=5, after=first.next)
        assert (" OR " in statements[-1]) is (engine.dialect.name in ("mysql", "mariadb"))

    async def test_the_last_page_says_so_also_when_it_is_full(self, engine: AsyncEngine) -> None:
        dao = ReadDao(async_sessionmaker(engine), Summary)
        assert (await dao.page(where=[Summary.id < 20], limit=10)).next is None
        assert (await dao.page(where=[Summary.id < 22], limit=10)).next is not None
        empty = await dao.page(where=[Summary.id < 0])
        assert (empty.items, empty.next) == ([], None)

    async def test_tombstones_are_not_shown(self, engine: AsyncEngine) -> None:
        dao = ReadDao(async_sessionmaker(engine), Summary)
        assert await dao.get(2) is not None
        async with engine.begin() as connection:
            await connection.execute(update(Summary).where(Summary.id == 2).values(deleted=True))
        assert await dao.get(2) is None
        assert [each.id for each in (await dao.page(limit=2)).items] == [0, 4]

    async def test_nothing_is_ever_committed_and_rows_are_detached(self, engine: AsyncEngine) -> None:
        commits, dao = watch(engine, "commit"), ReadDao(async_sessionmaker(engine), Summary)
        found = await dao.get(2)
        assert found is not None
        assert inspect(found).detached
        assert all([inspect(each).detached async for each in dao.all()])
        assert commits == []

    async def test_made_up_values_are_the_callers_mistake(self, engine: AsyncEngine) -> None:
        dao, order = (
            ReadDao(async_sessionmaker(engine), Summary),
            [Summary.grade, Summary.placed_at, Summary.note.desc()],
        )
        page = await dao.page(order_by=order, limit=1)
        assert page.next is not None
        mark, values = msgspec.json.decode(urlsafe_b64decode(page.next + "=" * (-len(page.next) % 4)))
        far = ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2030-01-01T12:00:00"]
        for place, made_up in (
            *((place, number) for place in (0, 3) for number in (2**31, 2**63, -(2**63) - 1, 10**30)),
            *((1, moment) for moment in far),
            *((2, note) for note in ("a\0b", "x" * 100_000, "\N{PILE OF POO}", None)),
        ):
            changed = [*values[:place], made_up, *values[place + 1 :]]
            cursor = urlsafe_b64encode(msgspec.json.encode([mark, changed])).decode()
            with suppress(InvalidCursorError):  # any other error is the failure
                await dao.page(order_by=order, after=cursor)


class TestTenants:
    async def test_each_sees_its_own(self, box: Pillarbox) -> None:
        for source in (box, async_sessionmaker(box.engine)):
            dao = ReadDao(source, Slip)
            assert [each.id async for each in dao.all(tenant="acme", portion=2)] == [1, 2, 3]
            with event_context(tenant="globex"):
                assert [each.id async for each in dao.all()] == [4, 5]
            assert await dao.get(4, tenant="acme") is None
            found = await dao.get(4, tenant="globex")
            assert found is not None
            assert found.title == "globex 4"

    async def test_a_cursor_leads_to_nobody_elses_rows(self, box: Pillarbox) -> None:
        dao = ReadDao(box, Slip)
        page = await dao.page(limit=1, tenant="acme")
        assert [each.id for each in (await dao.page(after=page.next, tenant="globex")).items] == [4, 5]

    async def test_none_or_a_second_one_is_refused(self, box: Pillarbox) -> None:
        for source in (box, async_sessionmaker(box.engine)):
            for dao in (ReadDao(source, Slip), ReadDao(source, Slip, cache=MemoryCache())):
                with pytest.raises(TenancyError, match="needs a tenant"):
                    await dao.get(1)
                with pytest.raises(TenancyError, match="needs a tenant"):
                    await dao.page()
                with event_context(tenant="acme"), pytest.raises(TenancyError, match="belongs to tenant"):
                    await dao.get(4, tenant="globex")
        with pytest.raises(TenancyError, match="needs a tenant"):
            await ReadDao(box, Slip, cache=MemoryCache()).forget(1)

    async def test_a_box_that_requires_tenants_requires_them_here(self, box: Pillarbox) -> None:
        strict = Pillarbox(box.engine, tenancy="required")
        with pytest.raises(TenancyError, match="needs a tenant"):
            await ReadDao(strict, Summary).page()
        assert (await ReadDao(strict, Summary).page(tenant="acme")).items == []

    async def test_a_unit_of_work_around_it_is_not_joined_and_nobody_waits_for_it(self, box: Pillarbox) -> None:
        async with box.unit_of_work(tenant="acme") as uow:
            uow.add(Slip(id=9, title="not committed"))
            await uow.flush()
            for dao in (ReadDao(box, Slip), ReadDao(box, Slip, cache=MemoryCache())):
                assert await dao.get(9, tenant="acme") is None
            assert len((await ReadDao(box, Slip).page(tenant="acme")).items) == 3


class TestRowLevelSecurity:
    @pytest.fixture
    async def application(self, postgres_database: Database) -> AsyncIterator[Pillarbox]:
        """A box whose role sees rows of an announced tenant only."""
        role, owner = f"reader_{uuid4().hex}", create_async_engine(postgres_database.url())
        await create_tables(owner)
        async with owner.begin() as connection:
            await connection.execute(insert(Slip), [{"id": 1, "tenant_id": "acme", "title": "first", "deleted": False}])
            for statement in (
                *row_level_security(Base.metadata),
                f"CREATE ROLE {role}",
                f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}",
            ):
                await connection.execute(text(statement))
        engine = create_async_engine(owner.url, connect_args={"server_settings": {"role": role}})
        async with Pillarbox(engine, row_security=True) as box:
            yield box
        await engine.dispose()
        async with owner.begin() as connection:
            await connection.execute(text(f"DROP OWNED BY {role} CASCADE"))
            await connection.execute(text(f"DROP ROLE {role}"))
        await owner.dispose()

    async def test_the_tenant_is_announced_with_a_cache_and_without(self, application: Pillarbox) -> None:
        for dao in (ReadDao(application, Slip), ReadDao(application, Slip, cache=MemoryCache())):
            assert await dao.get(1, tenant="acme") is not None
            assert await dao.get(1, tenant="globex") is None
            assert len((await dao.page(tenant="acme")).items) == 1


class Interrupted:
    """A cache before whose filling something happens."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.before_set: Callable[[], Awaitable[None]] | None = None

    async def get(self, key: str) -> bytes | Ticket | None:
        return await self._cache.get(key)

    async def set(self, ticket: Ticket, value: bytes, *, ttl: float) -> None:
        if self.before_set is not None:
            happening, self.before_set = self.before_set, None
            await happening()
        await self._cache.set(ticket, value, ttl=ttl)

    async def delete(self, keys: Collection[str]) -> None:
        await self._cache.delete(keys)


@pytest.fixture(params=["memory", "redis"])
async def cache(request: pytest.FixtureRequest) -> AsyncIterator[Interrupted]:
    if request.param == "memory":
        yield Interrupted(MemoryCache())
    else:
        async with RedisCache(request.getfixturevalue("redis_url")) as cache:
            yield Interrupted(cache)


@pytest.fixture
async def slips(sqlite_database: Database) -> AsyncIterator[Pillarbox]:
    async with Pillarbox(sqlite_database.url()) as box:
        await create_tables(box.engine)
        async with box.unit_of_work(tenant="acme") as uow:
            uow.add(Slip(id=1, title="first"), Slip(id=2, title="second"))
        yield box


async def change(box: Pillarbox, number: int, **values: Any) -> None:
    """As a projection would, by a statement that no session's events show."""
    async with box.unit_of_work(tenant="acme") as uow:
        await uow.session.execute(update(Slip).where(Slip.id == number).values(**values))


class TestCache:
    async def test_a_row_is_read_once_until_it_is_forgotten(self, slips: Pillarbox, cache: Interrupted) -> None:
        dao, statements = ReadDao(slips, Slip, cache=cache), watch(slips.engine, "statements")
        for _ in range(3):
            found = await dao.get(1, tenant="acme")
            assert found is not None
            assert (found.id, found.title, found.tenant_id) == (1, "first", "acme")
            assert inspect(found).detached
        assert len(statements) == 1
        await change(slips, 1, title="changed")
        await dao.forget(1, 2, tenant="acme")
        found = await dao.get(1, tenant="acme")
        assert found is not None
        assert found.title == "changed"

    async def test_a_reader_who_was_first_does_not_bring_the_old_row_back(
        self, slips: Pillarbox, cache: Interrupted
    ) -> None:
        dao = ReadDao(slips, Slip, cache=cache)

        async def meanwhile() -> None:
            await change(slips, 1, title="changed")
            await dao.forget(1, tenant="acme")

        await dao.get(2, tenant="acme")
        cache.before_set = lambda: asyncio.create_task(meanwhile())
        titles = [found.title for _ in range(2) if (found := await dao.get(1, tenant="acme"))]
        assert titles == ["first", "changed"]

    async def test_a_tombstone_is_not_shown_from_the_cache_either(self, slips: Pillarbox, cache: Interrupted) -> None:
        dao = ReadDao(slips, Slip, cache=cache)
        await change(slips, 1, deleted=True)
        for _ in range(2):
            assert await dao.get(1, tenant="acme") is None

    async def test_tenants_do_not_meet_in_it(self, slips: Pillarbox, cache: Interrupted) -> None:
        dao = ReadDao(slips, Slip, cache=cache)
        assert await dao.get(1, tenant="acme") is not None
        assert await dao.get(1, tenant="globex") is None
        await change(slips, 1, title="changed")
        await dao.forget(1, tenant="globex")
        found = await dao.get(1, tenant="acme")
        assert found is not None
        assert found.title == "first", "somebody else's row was forgotten"

    async def test_one_that_is_down_fails_nothing(self, slips: Pillarbox) -> None:
        async with RedisCache("redis://127.0.0.1:1/0") as down:
            dao = ReadDao(slips, Slip, cache=down)
            for title in ("changed", "again"):
                await change(slips, 1, title=title)
                await dao.forget(1, tenant="acme")
                found = await dao.get(1, tenant="acme")
                assert found is not None
                assert found.title == title

    async def test_without_one_there_is_nothing_to_forget(self, slips: Pillarbox) -> None:
        await ReadDao(slips, Slip).forget(1, tenant="acme")
