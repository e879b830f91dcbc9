"""What a `ReadDao` refuses before it asks the database, and what becomes of cursors that nobody gave out."""

from __future__ import annotations

import random
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import JSON, Float, Integer, Numeric, String, func, literal_column
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, aliased, column_property, mapped_column
from sqlalchemy.pool import StaticPool

from pillarbox.errors import ConfigurationError
from pillarbox.projections.read import InvalidCursorError, ReadDao
from pillarbox.stores.columns import Utc
from pillarbox.tenancy import TenantScoped


class Base(DeclarativeBase):
    pass


class Shelf(Base):
    """Columns of many types."""

    __tablename__ = "unit_read_shelves"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    place: Mapped[int]
    label: Mapped[str | None] = mapped_column(String(20))
    price: Mapped[Decimal] = mapped_column(Numeric(10, 2, asdecimal=True))
    stocked_at: Mapped[datetime] = mapped_column(Utc())
    weight: Mapped[float] = mapped_column(Float())
    contents: Mapped[Any] = mapped_column(JSON)
    twice = column_property(literal_column("2 * place", Integer))


class Other(Base):
    __tablename__ = "unit_read_others"

    id: Mapped[int] = mapped_column(primary_key=True)
    place: Mapped[int]


class Owned(TenantScoped, Base):
    __tablename__ = "unit_read_owned"

    id: Mapped[int] = mapped_column(primary_key=True)


class Pair(Base):
    __tablename__ = "unit_read_pairs"

    left: Mapped[int] = mapped_column(primary_key=True)
    right: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine("sqlite+aiosqlite://", poolclass=StaticPool)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield engine
    await engine.dispose()


@pytest.fixture
async def shelves(engine: AsyncEngine) -> ReadDao[Shelf]:
    async with async_sessionmaker(engine).begin() as session:
        session.add_all(
            Shelf(
                id=uuid4(),
                place=number,
                label=None if number % 2 else f"{number}",
                price=Decimal(number) / 4,
                stocked_at=datetime(2030, 1, 1, 12, 0, number, 123456, tzinfo=UTC),
                weight=1.5,
                contents={},
            )
            for number in range(4)
        )
    return ReadDao(async_sessionmaker(engine), Shelf)


ORDER = [Shelf.place, Shelf.label, Shelf.price, Shelf.stocked_at]


class TestWhatIsRefused:
    @pytest.mark.parametrize("limit", [0, -1, 1001])
    async def test_a_page_of_no_rows_or_of_too_many(self, shelves: ReadDao[Shelf], limit: int) -> None:
        with pytest.raises(ConfigurationError, match=f"limit is 1 to 1000, got {limit}"):
            await shelves.page(limit=limit)

    @pytest.mark.parametrize(
        "given",
        [
            "place",
            func.lower(Shelf.label),
            Other.place,
            aliased(Shelf).place,
            Shelf.place.desc().nulls_first(),
            Shelf.twice,
        ],
    )
    async def test_an_order_that_is_not_one_of_its_columns(self, shelves: ReadDao[Shelf], given: Any) -> None:
        with pytest.raises(ConfigurationError, match="order_by takes columns of Shelf"):
            await shelves.page(order_by=[given])

    @pytest.mark.parametrize(
        ("given", "why"), [(Shelf.weight, "which MySQL rounds"), (Shelf.contents, "no cursor can carry")]
    )
    async def test_columns_that_make_no_cursor(self, shelves: ReadDao[Shelf], given: Any, why: str) -> None:
        with pytest.raises(ConfigurationError, match=why):
            await shelves.page(order_by=[given])

    async def test_a_key_with_too_few_columns(self, engine: AsyncEngine) -> None:
        with pytest.raises(ConfigurationError, match="the key of Pair has 2 columns, got 1"):
            await ReadDao(async_sessionmaker(engine), Pair).get(1)


class TestCursors:
    async def test_values_of_many_types_come_back_as_they_are(self, shelves: ReadDao[Shelf]) -> None:
        seen = [row.place async for row in shelves.all(order_by=ORDER, portion=1)]
        assert seen == [0, 1, 2, 3]

    async def test_they_can_stand_in_an_address(self, shelves: ReadDao[Shelf]) -> None:
        page = await shelves.page(order_by=ORDER, limit=1)
        assert page.next is not None
        assert set(page.next) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")

    async def test_one_of_another_order_is_refused(self, shelves: ReadDao[Shelf], engine: AsyncEngine) -> None:
        page = await shelves.page(order_by=[Shelf.place], limit=1)
        for other in ([], [Shelf.place.desc()], [Shelf.stocked_at], [Shelf.place, Shelf.price]):
            with pytest.raises(InvalidCursorError, match="of another query"):
                await shelves.page(order_by=other, after=page.next)
        with pytest.raises(InvalidCursorError, match="of another query"):
            await ReadDao(async_sessionmaker(engine), Other).page(order_by=[Other.place], after=page.next)

    async def test_an_empty_one_is_none(self, shelves: ReadDao[Shelf]) -> None:
        first = await shelves.page(order_by=ORDER, limit=2)
        empty = await shelves.page(order_by=ORDER, limit=2, after="")
        assert [row.place for row in empty.items] == [row.place for row in first.items] == [0, 1]
        assert empty.next == first.next

    @pytest.mark.parametrize("cursor", [" ", "x", "Ä", "bm90IGpzb24", "W10", "WzEsMl0", "W" * 100_000, "WyJhIixbXV0=="])
    async def test_what_is_none_is_refused(self, shelves: ReadDao[Shelf], cursor: str) -> None:
        with pytest.raises(InvalidCursorError) as caught:
            await shelves.page(after=cursor)
        assert str(caught.value).startswith("the cursor is ")
        assert str(caught.value).endswith(": start without a cursor, and take each next one from the page before")
        assert isinstance(caught.value, ValueError)

    async def test_depth_without_end_is_refused(self, shelves: ReadDao[Shelf]) -> None:
        with pytest.raises(InvalidCursorError):
            await shelves.page(after=urlsafe_b64encode(b'["a",' + b"[" * 50_000).decode())

    async def test_what_is_no_text_is_refused(self, shelves: ReadDao[Shelf]) -> None:
        given: Any = 5
        with pytest.raises(InvalidCursorError, match="the cursor is no text, but int: start without"):
            await shelves.page(after=given)

    async def test_a_damaged_one_is_refused_or_says_where_to_go_on(self, shelves: ReadDao[Shelf]) -> None:
        page = await shelves.page(order_by=ORDER, limit=1)
        assert page.next is not None
        body = urlsafe_b64decode(page.next + "=" * (-len(page.next) % 4))
        dice = random.Random(7)
        refused = 0
        for _ in range(500):
            damaged = bytearray(body)
            for _ in range(dice.randint(1, 3)):
                damaged[dice.randrange(len(damaged))] = dice.randrange(256)
            try:
                await shelves.page(order_by=ORDER, after=urlsafe_b64encode(damaged).decode())
            except InvalidCursorError:
                refused += 1
        assert refused > 200

    async def test_a_value_that_would_not_come_back_is_said_at_once(self, engine: AsyncEngine) -> None:
        """SQLite holds anything in any column: here a text where numbers should be."""
        async with engine.begin() as connection:
            await connection.exec_driver_sql("INSERT INTO unit_read_others VALUES (1, 'first'), (2, 'second')")
        with pytest.raises(ConfigurationError, match="cannot carry the values of place, id exactly"):
            await ReadDao(async_sessionmaker(engine), Other).page(order_by=[Other.place], limit=1)
