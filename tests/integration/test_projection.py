"""Projections on real databases: rows are what the events say, whatever order and number they come in."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import ARRAY, JSON, Connection, Enum, MetaData, String, Table, event, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import IntegrationEvent, Pillarbox, TenancyError, TenantScoped
from pillarbox.consumers.handling import Incoming, MessageContext
from pillarbox.errors import ConfigurationError, Poison
from pillarbox.projections import Add, Change, Projection, ProjectionRow, Tally, on
from pillarbox.transport import Message
from tests.conftest import FreshDatabase
from tests.domain import order_box, until_somebody_waits
from tests.servers import Database

pytestmark = pytest.mark.dialects


class ParcelPacked(IntegrationEvent, name="tests.projected.packed", version=1):
    parcel_id: UUID
    grams: int = 0


class ParcelSent(IntegrationEvent, name="tests.projected.sent", version=1):
    parcel_id: UUID
    town: str = ""


class ParcelGrew(IntegrationEvent, name="tests.projected.grew", version=1):
    parcel_id: UUID
    grams: int


class ParcelLost(IntegrationEvent, name="tests.projected.lost", version=1):
    parcel_id: UUID


class ParcelsMet(IntegrationEvent, name="tests.projected.met", version=1):
    parcels: list[UUID]


class Base(DeclarativeBase):
    pass


class ParcelRow(ProjectionRow, Base):
    __tablename__ = "projected_parcels"

    parcel_id: Mapped[UUID] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(20))
    town: Mapped[str | None] = mapped_column(String(20))
    grams: Mapped[int]


class OwnParcelRow(ProjectionRow, TenantScoped, Base):
    __tablename__ = "projected_own_parcels"

    parcel_id: Mapped[UUID] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(20))
    grams: Mapped[int] = mapped_column(default=0)


class TownRow(ProjectionRow, Base):
    """Counts: not about one aggregate."""

    __tablename__ = "projected_towns"

    town: Mapped[str] = mapped_column(String(20), primary_key=True)
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    parcels: Mapped[int] = mapped_column(default=0)
    grams: Mapped[int] = mapped_column(default=0)


class _Parcels(Projection):
    @on(ParcelPacked)
    def packed(self, event: ParcelPacked) -> Change:
        return self.put(parcel_id=event.parcel_id, status="packed", grams=event.grams)

    @on(ParcelSent)
    def sent(self, event: ParcelSent, context: MessageContext) -> Change:
        return self.put(parcel_id=event.parcel_id, status=f"sent {context.attempt}", town=event.town)

    @on(ParcelGrew)
    def grew(self, event: ParcelGrew) -> Change:
        return self.put(parcel_id=event.parcel_id, grams=Add(event.grams))

    @on(ParcelLost)
    def lost(self, event: ParcelLost) -> Change:
        return self.remove(parcel_id=event.parcel_id)


class Parcels(_Parcels, row=ParcelRow):
    @on(ParcelsMet)
    def met(self, event: ParcelsMet) -> Iterable[Change]:
        for parcel in event.parcels:
            yield self.put(parcel_id=parcel, status="met", grams=1)


class OwnParcels(Projection, row=OwnParcelRow):
    @on(ParcelPacked)
    def packed(self, event: ParcelPacked) -> Change:
        return self.put(parcel_id=event.parcel_id, status="packed", grams=event.grams)

    @on(ParcelSent)
    def sent(self, event: ParcelSent) -> Change:
        return self.put(parcel_id=event.parcel_id, status="sent")


class Towns(Projection, row=TownRow, guarded=False):
    @on(ParcelSent)
    def sent(self, event: ParcelSent) -> Change:
        return self.put(town=event.town, day=1, parcels=Add(1))

    @on(ParcelPacked)
    def packed(self, event: ParcelPacked) -> Iterable[Change]:
        for town in ("a", "b"):
            yield self.put(town=town, day=2, grams=Add(event.grams))

    @on(ParcelLost)
    def lost(self, _event: ParcelLost) -> Change:
        return self.remove(town="a", day=2)


def came(
    fact: Any, version: int | None = None, place: int = 0, *, count: int = 1, tenant: str | None = None
) -> Incoming:
    """The event has come in."""
    key = str(getattr(fact, "parcel_id", "none"))
    headers = {} if version is None else {"aggregate_id": key}
    return Incoming(
        fact,
        MessageContext(
            consumer="parcels",
            topic="parcels",
            key=key,
            tenant=tenant,
            event_id=fact.event_id,
            event_type="tests.projected",
            schema_version=1,
            occurred_at=datetime(2024, 1, 1, tzinfo=UTC),
            attempt=1,
            headers=headers,
            version=version,
            event_index=place,
            event_count=count,
            message=Message("parcels", key, fact.event_id.bytes, headers),
        ),
    )


@pytest.fixture
async def box(database: Database) -> AsyncIterator[Pillarbox]:
    async with order_box(database.url()) as box:
        await make_tables(box)
        yield box


@pytest.fixture
async def one_box(postgres_database: Database) -> AsyncIterator[Pillarbox]:
    async with order_box(postgres_database.url()) as box:
        await make_tables(box)
        yield box


async def make_tables(box: Pillarbox) -> None:
    async with box.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


async def apply(box: Pillarbox, projection: Projection, *incoming: Incoming) -> Tally:
    """As a consumer does it: in a transaction. What was counted."""
    projection.tally = Tally()
    async with box.unit_of_work(tenant=incoming[0].context.tenant) as uow:
        await projection.apply(uow, incoming)
    return projection.tally


async def rows_of(box: Pillarbox | AsyncEngine, row: Any, *columns: str) -> list[tuple[Any, ...]]:
    engine = box.engine if isinstance(box, Pillarbox) else box
    table = row if isinstance(row, Table) else row.__table__
    async with engine.connect() as connection:
        found = await connection.execute(select(*(table.c[name] for name in columns)).order_by(*table.primary_key))
        return [tuple(one) for one in found]


PARCEL = UUID(int=7)
STATE = ("status", "town", "grams", "deleted", "projected_version", "projected_index")


class TestRows:
    async def test_a_put_makes_a_row_and_the_next_one_changes_only_what_it_names(self, box: Pillarbox) -> None:
        parcels = Parcels()
        before = datetime.now(UTC)
        await apply(box, parcels, came(ParcelPacked(parcel_id=PARCEL, grams=100), 1))
        assert await rows_of(box, ParcelRow, *STATE) == [("packed", None, 100, False, 1, 0)]
        tally = await apply(box, parcels, came(ParcelSent(parcel_id=PARCEL, town="Ulm"), 2))
        assert await rows_of(box, ParcelRow, *STATE) == [("sent 1", "Ulm", 100, False, 2, 0)]
        assert tally == Tally(applied=1)
        [(moment,)] = await rows_of(box, ParcelRow, "projected_at")
        assert before <= moment <= datetime.now(UTC)

    async def test_many_events_of_one_row_in_one_batch(self, box: Pillarbox) -> None:
        tally = await apply(
            box,
            Parcels(),
            came(ParcelPacked(parcel_id=PARCEL, grams=5), 1, 0, count=2),
            came(ParcelGrew(parcel_id=PARCEL, grams=3), 1, 1, count=2),
            came(ParcelSent(parcel_id=PARCEL, town="Ulm"), 2),
            came(ParcelGrew(parcel_id=PARCEL, grams=2), 3),
        )
        assert await rows_of(box, ParcelRow, *STATE) == [("sent 1", "Ulm", 10, False, 3, 0)]
        assert tally == Tally(applied=4)

    async def test_what_is_added_is_added_to_what_is_there(self, box: Pillarbox) -> None:
        parcels = Parcels()
        await apply(box, parcels, came(ParcelPacked(parcel_id=PARCEL, grams=5), 1))
        await apply(box, parcels, came(ParcelGrew(parcel_id=PARCEL, grams=3), 2))
        await apply(box, parcels, came(ParcelGrew(parcel_id=PARCEL, grams=3), 2))
        assert await rows_of(box, ParcelRow, "grams") == [(8,)]

    async def test_several_rows_by_one_event_each_with_its_own_guard(self, box: Pillarbox) -> None:
        parcels, (first, second) = Parcels(), (UUID(int=1), UUID(int=2))
        await apply(box, parcels, came(ParcelPacked(parcel_id=second, grams=9), 5))
        tally = await apply(box, parcels, came(ParcelsMet(parcels=[first, second]), 1))
        assert await rows_of(box, ParcelRow, "status", "projected_version") == [("met", 1), ("packed", 5)]
        assert (tally.applied, tally.stale) == (1, 1)

    async def test_a_change_of_a_row_that_is_not_there_and_cannot_be_made(self, box: Pillarbox) -> None:
        with pytest.raises(Poison, match="says nothing about 'grams'"):
            await apply(box, Parcels(), came(ParcelSent(parcel_id=PARCEL, town="Ulm"), 2))
        assert await rows_of(box, ParcelRow, "status") == []

    async def test_five_hundred_events_are_what_a_plain_fold_says(self, box: Pillarbox) -> None:
        rng = random.Random(4)
        lives = {UUID(int=number): _life(rng, UUID(int=number), 5) for number in range(100)}
        turns = [parcel for parcel in lives for _ in range(5)]
        rng.shuffle(turns)
        waiting = {parcel: iter(life) for parcel, life in lives.items()}
        shuffled = [next(waiting[parcel]) for parcel in turns]
        parcels = Parcels()
        await apply(box, parcels, *shuffled[:300])
        tally = await apply(box, parcels, *shuffled[300:])
        assert await rows_of(box, ParcelRow, *STATE) == [_folded(life) for life in lives.values()]
        assert tally == Tally(applied=200)

    async def test_keys_of_several_columns(self, box: Pillarbox) -> None:
        class Visits(Projection, row=TownRow, name="visits"):
            @on(ParcelPacked)
            def packed(self, event: ParcelPacked) -> Iterable[Change]:
                for day in (1, 2):
                    yield self.put(town="Ulm", day=day, grams=Add(event.grams))
                    yield self.put(town="Ulm", day=day, parcels=Add(day))

            @on(ParcelLost)
            def lost(self, _event: ParcelLost) -> Change:
                return self.remove(town="Ulm", day=1)

        visits = Visits()
        for version in (1, 2, 2):
            await apply(box, visits, came(ParcelPacked(parcel_id=PARCEL, grams=5), version))
        await apply(box, visits, came(ParcelLost(parcel_id=PARCEL), 3))
        assert await rows_of(box, TownRow, "day", "parcels", "grams", "deleted", "projected_version") == [
            (1, 0, 0, True, 3),
            (2, 4, 10, False, 2),
        ]

    @pytest.mark.parametrize(("kind", "driver"), [("embedded", "psycopg"), ("mariadb", "aiomysql")])
    async def test_with_another_driver(self, fresh_database: FreshDatabase, kind: str, driver: str) -> None:
        async with order_box(fresh_database(kind).url(driver)) as box:
            await make_tables(box)
            parcels, towns = Parcels(), Towns()
            packed = [came(ParcelPacked(parcel_id=UUID(int=number), grams=1), 1) for number in range(3)]
            grown = [came(ParcelGrew(parcel_id=UUID(int=number), grams=1), 2) for number in range(3)]
            assert await apply(box, parcels, *packed) == Tally(applied=3)
            assert await apply(box, parcels, *grown) == Tally(applied=3)
            assert await apply(box, parcels, *grown) == Tally(stale=3)
            assert await rows_of(box, ParcelRow, "grams", "projected_version") == [(2, 2)] * 3
            for _ in range(2):
                await apply(box, towns, *packed)
            assert await rows_of(box, TownRow, "grams") == [(6,), (6,)]

    async def test_keys_must_be_given_as_the_table_has_them(self, one_box: Pillarbox) -> None:
        class Wrong(Projection, row=ParcelRow, name="wrong"):
            @on(ParcelSent)
            def sent(self, event: ParcelSent) -> Change:
                return self.put(parcel_id=str(event.parcel_id), status="sent", grams=1)

        await apply(one_box, Parcels(), came(ParcelPacked(parcel_id=PARCEL, grams=5), 1))
        with pytest.raises(ConfigurationError, match="of another type or spelling"):
            await apply(one_box, Wrong(), came(ParcelSent(parcel_id=PARCEL), 2))


class TestH84Gaps:
    async def test_h84_a_gap_is_counted(self, box: Pillarbox) -> None:
        parcels = Parcels()
        await apply(box, parcels, came(ParcelPacked(parcel_id=PARCEL), 1))
        tally = await apply(box, parcels, came(ParcelGrew(parcel_id=PARCEL, grams=2), 4))
        assert tally == Tally(applied=1, gaps=1, version_lag=2)
        assert await rows_of(box, ParcelRow, "grams", "projected_version") == [(2, 4)]

    async def test_h84_an_event_missing_within_a_version_is_a_gap(self, box: Pillarbox) -> None:
        parcels = Parcels()
        await apply(box, parcels, came(ParcelPacked(parcel_id=PARCEL), 1, 0, count=3))
        tally = await apply(box, parcels, came(ParcelGrew(parcel_id=PARCEL, grams=2), 1, 2, count=3))
        assert (tally.gaps, tally.version_lag) == (1, 0)
        tally = await apply(box, parcels, came(ParcelGrew(parcel_id=PARCEL, grams=2), 2))
        assert tally.gaps == 0


class TestH85OldAfterNew:
    async def test_h85_a_replay_changes_nothing(self, box: Pillarbox) -> None:
        life = [came(ParcelPacked(parcel_id=PARCEL, grams=1), 1)]
        life += [came(ParcelGrew(parcel_id=PARCEL, grams=version), version) for version in (2, 3, 4, 5)]
        parcels = Parcels()
        await apply(box, parcels, *life)
        before = await rows_of(box, ParcelRow, *STATE, "projected_at")
        assert await apply(box, parcels, *life) == Tally(stale=5)
        for one in life:
            assert await apply(box, parcels, one) == Tally(stale=1)
        assert await rows_of(box, ParcelRow, *STATE, "projected_at") == before

    async def test_h85_a_tombstone_stays(self, box: Pillarbox) -> None:
        parcels = Parcels()
        packed = came(ParcelPacked(parcel_id=PARCEL, grams=1), 1)
        sent = came(ParcelSent(parcel_id=PARCEL, town="Ulm"), 2)
        await apply(box, parcels, packed, sent)
        await apply(box, parcels, came(ParcelLost(parcel_id=PARCEL), 3))
        grave = [("", None, 0, True, 3, 0)]
        assert await rows_of(box, ParcelRow, *STATE) == grave
        assert await apply(box, parcels, packed, sent) == Tally(stale=2)
        assert await rows_of(box, ParcelRow, *STATE) == grave

    async def test_h85_also_if_the_removal_is_all_that_ever_comes(self, box: Pillarbox) -> None:
        parcels = Parcels()
        await apply(box, parcels, came(ParcelLost(parcel_id=PARCEL), 3))
        await apply(box, parcels, came(ParcelPacked(parcel_id=PARCEL, grams=1), 1))
        assert await rows_of(box, ParcelRow, *STATE) == [("", None, 0, True, 3, 0)]

    async def test_a_later_put_revives_and_nothing_of_before_is_left(self, box: Pillarbox) -> None:
        parcels = Parcels()
        sent = came(ParcelSent(parcel_id=PARCEL, town="Ulm"), 2)
        lost = came(ParcelLost(parcel_id=PARCEL), 3)
        again = came(ParcelPacked(parcel_id=PARCEL, grams=8), 4)
        await apply(box, parcels, came(ParcelPacked(parcel_id=PARCEL, grams=1), 1), sent)
        await apply(box, parcels, lost, again)
        assert await rows_of(box, ParcelRow, *STATE) == [("packed", None, 8, False, 4, 0)]
        await apply(box, parcels, came(ParcelLost(parcel_id=PARCEL), 5))
        await apply(box, parcels, came(ParcelPacked(parcel_id=PARCEL, grams=9), 6))
        assert await rows_of(box, ParcelRow, *STATE) == [("packed", None, 9, False, 6, 0)]


class TestWithoutVersions:
    async def test_events_without_a_version_are_applied_as_they_come(self, box: Pillarbox) -> None:
        parcels = Parcels()
        await apply(box, parcels, came(ParcelPacked(parcel_id=PARCEL, grams=1), 3))
        await apply(box, parcels, came(ParcelGrew(parcel_id=PARCEL, grams=5)))
        tally = await apply(
            box, parcels, came(ParcelGrew(parcel_id=PARCEL, grams=5)), came(ParcelGrew(parcel_id=PARCEL, grams=1), 2)
        )
        assert (tally.applied, tally.stale) == (1, 1)
        assert await rows_of(box, ParcelRow, *STATE) == [("packed", None, 11, False, 3, 0)]

    async def test_counters(self, box: Pillarbox) -> None:
        towns = Towns()
        for _ in range(2):
            await apply(
                box,
                towns,
                came(ParcelSent(parcel_id=PARCEL, town="Ulm"), 1),
                came(ParcelSent(parcel_id=PARCEL, town="Ulm"), 1),
                came(ParcelSent(parcel_id=PARCEL, town="Aalen"), 1),
                came(ParcelPacked(parcel_id=PARCEL, grams=3), 1),
            )
        columns = ("town", "day", "parcels", "grams", "deleted")
        assert sorted(await rows_of(box, TownRow, *columns)) == [
            ("Aalen", 1, 2, 0, False),
            ("Ulm", 1, 4, 0, False),
            ("a", 2, 0, 6, False),
            ("b", 2, 0, 6, False),
        ]
        await apply(box, towns, came(ParcelLost(parcel_id=PARCEL)))
        await apply(box, towns, came(ParcelPacked(parcel_id=PARCEL, grams=1)))
        found = await rows_of(box, TownRow, *columns)
        assert {("a", 2, 0, 1, False), ("b", 2, 0, 7, False)} <= set(found)

    async def test_removed_and_put_again_in_one_batch(self, box: Pillarbox) -> None:
        towns = Towns()
        grams = came(ParcelPacked(parcel_id=PARCEL, grams=3))
        await apply(box, towns, grams, came(ParcelLost(parcel_id=PARCEL)), grams, grams)
        await apply(box, towns, grams)
        assert await rows_of(box, TownRow, "grams", "deleted") == [(9, False), (12, False)]


class TestTenants:
    async def test_equal_ids_of_two_tenants_are_two_rows(self, box: Pillarbox) -> None:
        parcels = OwnParcels()
        for tenant, grams in (("acme", 1), ("globex", 2)):
            await apply(box, parcels, came(ParcelPacked(parcel_id=PARCEL, grams=grams), 1, tenant=tenant))
        await apply(box, parcels, came(ParcelSent(parcel_id=PARCEL), 2, tenant="globex"))
        assert await rows_of(box, OwnParcelRow, "tenant_id", "status", "grams", "projected_version") == [
            ("acme", "packed", 1, 1),
            ("globex", "sent", 2, 2),
        ]
        async with box.unit_of_work(tenant="acme") as uow:
            assert [row.status for row in await uow.session.scalars(select(OwnParcelRow))] == ["packed"]

    async def test_without_a_tenant_or_with_two_it_is_refused(self, one_box: Pillarbox) -> None:
        packed = ParcelPacked(parcel_id=PARCEL)
        with pytest.raises(TenancyError):
            await apply(one_box, OwnParcels(), came(packed, 1))
        with pytest.raises(TenancyError):
            await apply(one_box, OwnParcels(), came(packed, 1, tenant="acme"), came(packed, 1, tenant="globex"))
        async with one_box.unit_of_work(tenant="acme") as uow:
            with pytest.raises(TenancyError):
                await OwnParcels().apply(uow, [came(packed, 1, tenant="globex")])


class TestAtOnce:
    async def test_the_second_waits_for_the_first(self, one_box: Pillarbox) -> None:
        parcels = Parcels()
        await apply(one_box, parcels, came(ParcelPacked(parcel_id=PARCEL, grams=1), 1))
        async with asyncio.TaskGroup() as tasks, one_box.unit_of_work() as uow:
            await parcels.apply(uow, [came(ParcelGrew(parcel_id=PARCEL, grams=2), 2)])
            second = tasks.create_task(apply(one_box, Parcels(), came(ParcelGrew(parcel_id=PARCEL, grams=4), 3)))
            await until_somebody_waits(one_box)
        assert second.result() == Tally(applied=1)
        assert await rows_of(one_box, ParcelRow, "grams", "projected_version") == [(7, 3)]

    async def test_two_that_make_the_same_row(self, one_box: Pillarbox) -> None:
        packed = came(ParcelPacked(parcel_id=PARCEL, grams=1), 1)
        with pytest.raises(ExceptionGroup) as failure:
            async with asyncio.TaskGroup() as tasks, one_box.unit_of_work() as uow:
                await Parcels().apply(uow, [packed])
                tasks.create_task(apply(one_box, Parcels(), packed))
                await until_somebody_waits(one_box)
        assert failure.group_contains(IntegrityError, match="projected_parcels_pkey")
        assert await apply(one_box, Parcels(), packed) == Tally(stale=1)

    async def test_somebody_else_makes_the_row_between_read_and_write(self, box: Pillarbox) -> None:
        packed = came(ParcelPacked(parcel_id=PARCEL, grams=1), 1)
        with before_the_write(box, Connection.execute), pytest.raises(IntegrityError):
            await apply(box, Parcels(), packed)
        assert await apply(box, Parcels(), packed) == Tally(applied=1)

    async def test_counters_that_are_there_need_no_second_try(self, one_box: Pillarbox) -> None:
        sent = came(ParcelSent(parcel_id=PARCEL, town="Ulm"), 1)
        await apply(one_box, Towns(), sent)
        async with asyncio.TaskGroup() as tasks, one_box.unit_of_work() as uow:
            await Towns().apply(uow, [sent, sent])
            tasks.create_task(apply(one_box, Towns(), sent))
            await until_somebody_waits(one_box)
        assert await rows_of(one_box, TownRow, "parcels") == [(4,)]


class TestTables:
    async def test_into_another_table(self, box: Pillarbox) -> None:
        metadata = MetaData()
        shadow = ParcelRow.__table__.to_metadata(metadata, name="projected_parcels_anew")  # type: ignore[attr-defined]
        async with box.engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        parcels = Parcels()
        anew = parcels.into(shadow)
        assert (anew.table, parcels.table) == (shadow, ParcelRow.__table__)
        await apply(box, anew, came(ParcelPacked(parcel_id=PARCEL, grams=1), 1))
        await apply(box, anew, came(ParcelGrew(parcel_id=PARCEL, grams=1), 2))
        assert await rows_of(box, shadow, "grams") == [(2,)]
        assert await rows_of(box, ParcelRow, "grams") == []

    async def test_all_kinds_of_columns(self, one_box: Pillarbox) -> None:
        metadata = MetaData()

        class Other(DeclarativeBase):
            pass

        Other.metadata = metadata

        class Odd(ProjectionRow, Other):
            __tablename__ = "projected odd"

            id: Mapped[str] = mapped_column("the id", String(10), primary_key=True)
            mood: Mapped[str] = mapped_column(Enum("good", "bad", name="projected_mood"))
            kind: Mapped[str] = mapped_column(String(3))
            more: Mapped[dict[str, Any]] = mapped_column(JSON().with_variant(postgresql.JSONB(), "postgresql"))
            by: Mapped[str] = mapped_column(String(10), server_default="nobody")
            level: Mapped[int] = mapped_column("order", default=lambda: 7)

        class Odds(Projection, row=Odd):
            @on(ParcelSent)
            def sent(self, event: ParcelSent) -> Change:
                return self.put(id="a", mood="bad", kind=event.town, more={"a": [1]})

            @on(ParcelLost)
            def lost(self, _event: ParcelLost) -> Change:
                return self.remove(id="a")

        async with one_box.engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        await apply(one_box, Odds(), came(ParcelSent(parcel_id=PARCEL, town="Ulm"), 1))
        columns = ("mood", "kind", "more", "by", "order")
        assert await rows_of(one_box, Odd, *columns) == [("bad", "Ulm", {"a": [1]}, "nobody", 7)]
        with pytest.raises(Exception, match="too long"):
            await apply(one_box, Odds(), came(ParcelSent(parcel_id=PARCEL, town="Aalen"), 2))
        await apply(one_box, Odds(), came(ParcelLost(parcel_id=PARCEL), 3))
        assert await rows_of(one_box, Odd, *columns) == [("good", "", {}, "", 7)]

    async def test_columns_that_are_arrays(self, one_box: Pillarbox) -> None:
        class Other(DeclarativeBase):
            pass

        class Listed(ProjectionRow, Other):
            __tablename__ = "projected_lists"

            id: Mapped[UUID] = mapped_column(primary_key=True)
            tags: Mapped[list[str]] = mapped_column(ARRAY(String))

        class Lists(Projection, row=Listed):
            @on(ParcelSent)
            def sent(self, event: ParcelSent) -> Change:
                return self.put(id=event.parcel_id, tags=["sent", event.town])

        async with one_box.engine.begin() as connection:
            await connection.run_sync(Other.metadata.create_all)
        lists = Lists()
        for version, town in ((1, "Ulm"), (2, "Aalen")):
            sent = [came(ParcelSent(parcel_id=UUID(int=number), town=town), version) for number in (1, 2)]
            await apply(one_box, lists, *sent)
        assert await rows_of(one_box, Listed, "tags") == [(["sent", "Aalen"],)] * 2


@contextmanager
def before_the_write(box: Pillarbox, meddle: Callable[[Connection, Any, Any], object]) -> Iterator[None]:
    """Just before the next INSERT, do something on its connection: no other could, while the rows are locked."""
    meddled = False

    def before(connection: Connection, clause: Any, several: Any, one: Any, _options: Any) -> None:
        nonlocal meddled
        if str(clause).startswith("INSERT") and not meddled:
            meddled = True
            meddle(connection, clause, several or one)

    event.listen(box.engine.sync_engine, "before_execute", before)
    yield
    event.remove(box.engine.sync_engine, "before_execute", before)
    assert meddled


def _life(rng: random.Random, parcel: UUID, events: int) -> list[Incoming]:
    """A parcel is packed, and then things happen to it, sometimes several in one version."""
    facts: list[Any] = [ParcelPacked(parcel_id=parcel, grams=rng.randint(1, 9))]
    facts += [_happening(rng, parcel) for _ in range(events - 1)]
    if rng.random() < 0.3:
        facts[-1] = ParcelLost(parcel_id=parcel)
    life: list[Incoming] = []
    for version in itertools.count(1):
        together = facts[: rng.randint(1, 3)]
        facts = facts[len(together) :]
        life += [came(fact, version, place, count=len(together)) for place, fact in enumerate(together)]
        if not facts:
            return life
    raise AssertionError


def _happening(rng: random.Random, parcel: UUID) -> Any:
    grown = [ParcelGrew(parcel_id=parcel, grams=rng.randint(1, 9)) for _ in range(2)]
    return rng.choice([*grown, ParcelSent(parcel_id=parcel, town=rng.choice("abc")), ParcelPacked(parcel_id=parcel)])


def _folded(life: Sequence[Incoming]) -> tuple[Any, ...]:
    """What the row should be, in the plainest way."""
    status, town, grams, deleted = "", None, 0, True
    for fact in [one.event for one in life]:
        if isinstance(fact, ParcelPacked):
            status, grams, deleted = "packed", fact.grams, False
        elif isinstance(fact, ParcelSent):
            status, town = "sent 1", fact.town
        elif isinstance(fact, ParcelGrew):
            grams += fact.grams
        else:
            status, town, grams, deleted = "", None, 0, True
    last = life[-1].context
    return status, town, grams, deleted, last.version, last.event_index
