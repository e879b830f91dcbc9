"""Behind PgBouncer in transaction mode: every transaction may have another connection, and nothing outlives one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import sessionmaker

from pillarbox import Pillarbox
from pillarbox.outbox import Status
from pillarbox.stores import notify
from pillarbox.transport import Message
from pillarbox.transports.memory import MemoryTransport
from tests.conftest import FreshDatabase
from tests.domain import Order, OrderNoted, order_box, set_up, written
from tests.relays import running, soon
from tests.servers import Database, PgBouncer

TOPIC = "tests.order.events"


@pytest.fixture
def database(fresh_database: FreshDatabase) -> Database:
    return fresh_database("pgbouncer")


@pytest.fixture
def server(database: Database) -> PgBouncer:
    assert isinstance(database.server, PgBouncer)
    return database.server


@pytest.fixture
def person(database: Database, server: PgBouncer) -> Iterator[psycopg.Connection]:
    """Looks at the database past the pooler."""
    with closing(psycopg.connect(server.address(database.name), autocommit=True)) as connection:
        yield connection


@pytest.fixture(params=PgBouncer.settings)
async def engine(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(
        database.url(request.param), pool_pre_ping=True, connect_args=PgBouncer.settings[request.param]
    )
    yield engine
    await engine.dispose()


@pytest.fixture
async def box(engine: AsyncEngine) -> AsyncIterator[Pillarbox]:
    async with order_box(engine) as box:
        await set_up(box)
        yield box


async def place(box: Pillarbox, *, changes: int = 0) -> UUID:
    """An order that is repriced so many times, each in a transaction of its own."""
    async with box.unit_of_work() as uow:
        order = Order.place()
        uow.add(order)
    for number in range(changes):
        async with box.unit_of_work() as uow:
            (await uow.session.get_one(Order, order.id)).reprice(number)
    return order.id


async def arrived(box: Pillarbox, count: int) -> list[Message]:
    broker = box.transports["broker"]
    assert isinstance(broker, MemoryTransport)
    async with asyncio.timeout(20):
        return await broker.received(TOPIC, count)


async def versions(box: Pillarbox, count: int) -> dict[str, list[int]]:
    """What has arrived for each order, once that many messages have."""
    found: dict[str, list[int]] = {}
    for message in await arrived(box, count):
        found.setdefault(message.key, []).append(int(message.headers["version"]))
    return found


async def test_a_connection_has_another_backend_in_every_transaction(engine: AsyncEngine) -> None:
    """Otherwise these tests would prove nothing."""
    which = text("SELECT pg_backend_pid()")
    backends = set[int]()
    async with asyncio.timeout(20), engine.connect() as connection:
        async with engine.connect() as another:
            backends.add((await another.execute(which)).scalar_one())  # its transaction is still open:
            backends.add((await connection.execute(which)).scalar_one())  # here it must be the second one
        seen = set[int]()
        while not seen >= backends:
            await connection.rollback()
            seen.add((await connection.execute(which)).scalar_one())
    assert len(backends) == 2


async def test_units_of_work_and_relays_share_few_connections(
    box: Pillarbox, database: Database, person: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(*(box.relay(name=f"r{number}", batch=3) for number in range(2))):
        orders = await asyncio.gather(*(place(box, changes=4) for _ in range(12)))
        assert await versions(box, 60) == {str(order): [1, 2, 3, 4, 5] for order in orders}
        await soon(lambda: settled(box))
        backends = person.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", [database.name])
        assert backends.fetchall()[0][0] <= PgBouncer.connections + 1  # the person's
    complaints = [record for record in caplog.records if "LISTEN" not in record.getMessage()]
    said = [record.getMessage() for record in complaints if record.name == "pillarbox"]
    assert [message for message in said if "fsync is off" not in message] == []  # as the servers of tests are


async def settled(box: Pillarbox) -> bool:
    return {status for (status,) in await written(box.engine, "status")} <= {Status.SENT}


async def test_what_is_rolled_back_leaves_nothing_and_a_drain_sends_the_rest(box: Pillarbox) -> None:
    kept = await place(box)
    with pytest.raises(ZeroDivisionError):
        async with box.unit_of_work() as uow:
            uow.add(Order.place(1 // 0))
    assert (await box.relay().drain()).sent == 1
    assert await versions(box, 1) == {str(kept): [1]}


async def test_a_plain_session(box: Pillarbox, database: Database) -> None:
    engine = create_engine(database.url("psycopg2"))
    sessions = box.bind(sessionmaker(engine))
    with sessions.begin() as session:
        session.add(Order.place())
        box.publish(session, OrderNoted(note="beside it"), key="k")
    assert (await box.relay().drain()).sent == 2
    engine.dispose()


async def test_h50_no_lock_outlives_its_transaction(
    engine: AsyncEngine, database: Database, server: PgBouncer, person: psycopg.Connection
) -> None:
    person.execute(f"ALTER DATABASE {database.name} SET log_statement = 'all'")
    log = server.folder / "log"
    before = log.stat().st_size
    async with order_box(engine) as box:
        await set_up(box)
        async with running(box.relay()):
            async with box.unit_of_work() as uow:
                uow.publish(OrderNoted(note="in order"), key="k", ordered=True)
            await place(box, changes=1)
            await arrived(box, 3)
            assert person.execute("SELECT * FROM pg_locks WHERE locktype = 'advisory'").fetchall() == []
    said = log.read_bytes()[before:].decode()
    assert "pg_advisory_xact_lock" in said
    assert "pg_advisory_lock" not in said
    assert "pg_try_advisory_lock" not in said


@pytest.mark.usefixtures("box")
async def test_s03_no_tenant_stays_on_a_shared_connection(engine: AsyncEngine, person: psycopg.Connection) -> None:
    person.execute("CREATE ROLE application LOGIN")  # row level security does not bind superusers
    person.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO application")
    person.execute("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO application")
    settings = PgBouncer.settings[engine.dialect.driver]
    application = create_async_engine(engine.url.set(username="application"), connect_args=settings)
    asked = text("SELECT pg_backend_pid(), current_setting('pillarbox.tenant', true)")
    backends = set[int]()

    async def work(box: Pillarbox, tenant: str) -> None:
        for _ in range(5):
            async with box.unit_of_work(tenant=tenant) as uow:
                uow.add(Order.place())
                await uow.session.flush()
                backend, found = (await uow.session.execute(asked)).one()
                assert found == tenant
                backends.add(backend)

    try:
        async with order_box(application, row_security=True) as bound:
            await asyncio.gather(*(work(bound, f"t{number}") for number in range(8)))
        seen = set[int]()
        async with asyncio.timeout(20), application.connect() as connection:
            while not seen >= backends & {pid for (pid,) in person.execute("SELECT pid FROM pg_stat_activity")}:
                backend, found = (await connection.execute(asked)).one()
                assert found in (None, "")
                seen.add(backend)
                await connection.rollback()
        assert len(backends) > 1
    finally:
        await application.dispose()
        person.execute("DROP OWNED BY application CASCADE")
        person.execute("DROP ROLE application")


async def test_h52_listen_does_not_work_and_the_relay_says_so_and_looks_by_itself(
    box: Pillarbox, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(notify, "ECHO_SECONDS", 0.5)
    async with running(box.relay()), order_box(engine) as other:
        await soon(lambda: "LISTEN does not work on this connection" in caplog.text)
        order = await place(other)
        assert await versions(box, 1) == {str(order): [1]}
        assert not box.doorbell.reaches_everybody
