"""COMMIT: lost answers and cancelled tasks, with every driver."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, NullPool, create_engine, event, select, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import CommitOutcomeUnknown, Pillarbox, commit
from pillarbox.commit import guard_commits, was_answered
from pillarbox.errors import SessionError
from pillarbox.relay import Relay
from pillarbox.stores.turns import Turns
from tests.conftest import FreshDatabase
from tests.domain import Order, OrderNoted, order_box, set_up, until_somebody_waits, written
from tests.proxy import Mode, Proxy
from tests.servers import Database

pytestmark = pytest.mark.dialects

ASYNC_DRIVERS = [("system", "asyncpg"), ("system", "psycopg"), ("mariadb", "asyncmy"), ("mariadb", "aiomysql")]
SYNC_DRIVERS = [("system", "psycopg"), ("system", "psycopg2"), ("mariadb", "pymysql")]
LOST: list[tuple[Mode, bool]] = [("lose the answer", True), ("lose the question", False)]


class TestLostAnswers:
    """H10: the connection is lost after COMMIT was sent."""

    @pytest.mark.parametrize(("mode", "committed"), LOST)
    @pytest.mark.parametrize(("kind", "driver"), ASYNC_DRIVERS)
    async def test_h10_an_async_driver(
        self, fresh_database: FreshDatabase, kind: str, driver: str, mode: Mode, committed: bool
    ) -> None:
        database = fresh_database(kind)
        async with order_box(database.url()) as direct:
            await set_up(direct)
            with Proxy(database.url(driver)) as proxy:
                async with order_box(proxy.url) as box:
                    await box.register()
                    proxy.mode = mode
                    with pytest.raises(CommitOutcomeUnknown) as caught:
                        async with box.unit_of_work() as uow:
                            uow.add(order := Order.place())
            assert await direct.committed(caught.value) is committed
            assert await written(direct.engine) == ["placed"] * committed
            async with direct.unit_of_work() as uow:
                assert (await uow.session.get(Order, order.id) is not None) is committed

    @pytest.mark.parametrize(("mode", "committed"), LOST)
    @pytest.mark.parametrize(("kind", "driver"), SYNC_DRIVERS)
    async def test_h10_a_sync_driver(
        self, fresh_database: FreshDatabase, kind: str, driver: str, mode: Mode, committed: bool
    ) -> None:
        database = fresh_database(kind)
        async with order_box(database.url()) as box:
            await set_up(box)
            with Proxy(database.url(driver)) as proxy:
                engine = create_engine(proxy.url)
                sessions = box.bind(sessionmaker(engine))
                with pytest.raises(CommitOutcomeUnknown) as caught:
                    await asyncio.to_thread(self._publish, box, sessions, proxy, mode)
                engine.dispose()
            assert await box.committed(caught.value) is committed
            assert await written(box.engine) == ["noted"] * committed

    @staticmethod
    def _publish(box: Pillarbox, sessions: sessionmaker[Session], proxy: Proxy, mode: Mode) -> None:
        with sessions() as session:
            box.publish(session, OrderNoted(note="lost?"), key="k")
            session.flush()
            proxy.mode = mode
            session.commit()

    async def test_an_own_async_session_learns_it_too(self, fresh_database: FreshDatabase) -> None:
        database = fresh_database("system")
        async with order_box(database.url()) as direct:
            await set_up(direct)
            with Proxy(database.url()) as proxy:
                engine = create_async_engine(proxy.url)
                sessions = direct.bind(async_sessionmaker(engine))
                with pytest.raises(CommitOutcomeUnknown) as caught:
                    async with sessions.begin() as session:
                        direct.publish(session, OrderNoted(note="lost?"), key="k")
                        await session.flush()
                        proxy.mode = "lose the answer"
                await engine.dispose()
            assert await direct.committed(caught.value)

    async def test_a_connection_that_was_closed_before_is_no_error_of_the_one_who_commits(
        self, fresh_database: FreshDatabase
    ) -> None:
        async with order_box(fresh_database("system").url()) as box:
            await set_up(box)
            with pytest.raises(CommitOutcomeUnknown):
                async with box.unit_of_work() as uow:
                    uow.publish(OrderNoted(note="lost?"), key="k")
                    await uow.flush()
                    raw = await (await uow.session.connection()).get_raw_connection()
                    raw.driver_connection.terminate()  # type: ignore[union-attr]
            assert await written(box.engine) == []

    async def test_the_connection_is_never_used_again(self, fresh_database: FreshDatabase) -> None:
        database = fresh_database("system")
        async with order_box(database.url()) as direct:
            await set_up(direct)
        with Proxy(database.url()) as proxy:
            engine = create_async_engine(proxy.url, pool_size=1, max_overflow=0)
            async with order_box(engine) as box:
                await box.register()
                proxy.mode = "lose the answer"
                with pytest.raises(CommitOutcomeUnknown) as caught:
                    async with box.unit_of_work() as uow:
                        uow.publish(OrderNoted(note="lost?"), key="k")
                proxy.mode = "pass"
                assert await box.committed(caught.value)
            await engine.dispose()

    async def test_only_rows_that_survived_their_savepoint_are_asked_for(self, fresh_database: FreshDatabase) -> None:
        database = fresh_database("system")
        async with order_box(database.url()) as direct:
            await set_up(direct)
            with Proxy(database.url()) as proxy:
                async with order_box(proxy.url) as box:
                    await box.register()
                    proxy.mode = "lose the answer"
                    with pytest.raises(CommitOutcomeUnknown) as caught:
                        async with box.unit_of_work() as uow:
                            with pytest.raises(RuntimeError):
                                async with uow.nested():
                                    uow.publish(OrderNoted(note="dropped"), key="k")
                                    await uow.flush()
                                    raise RuntimeError
                            uow.publish(kept := OrderNoted(note="kept"), key="k")
            assert [event_id for event_id, _, _ in caught.value.written] == [kept.event_id]
            assert await direct.committed(caught.value)

    async def test_the_question_waits_for_a_transaction_that_is_still_at_work(
        self, postgres_database: Database
    ) -> None:
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            event = OrderNoted(note="slow")
            async with box.unit_of_work() as uow:
                uow.publish(event, key="k")
                await uow.flush()
                route = box.router.records[0].id
                asking = asyncio.create_task(box.committed(CommitOutcomeUnknown([(event.event_id, route, 1)])))
                await until_somebody_waits(box)
                assert not asking.done()
            assert await asking

    async def test_a_transaction_without_events_cannot_be_asked_for(self, sqlite_database: Database) -> None:
        async with order_box(sqlite_database.url()) as box:
            with pytest.raises(SessionError, match="wrote nothing"):
                await box.committed(CommitOutcomeUnknown())

    async def test_a_commit_that_the_server_refuses_is_a_plain_failure(self, postgres_database: Database) -> None:
        """A deferred constraint fails at COMMIT: the server has answered, and nothing is unknown."""
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            async with box.engine.begin() as connection:
                await connection.execute(text("CREATE TABLE once (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
            with pytest.raises(DBAPIError, match="once_n_key"):
                async with box.unit_of_work() as uow:
                    uow.publish(OrderNoted(note="never"), key="k")
                    await uow.session.execute(text("INSERT INTO once VALUES (1), (1)"))
            assert await written(box.engine) == []


class _PostgresError(Exception):
    def __init__(self, sqlstate: str | None) -> None:
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("dialect", "error", "answered"),
    [
        ("postgresql", _PostgresError("23505"), True),
        ("postgresql", _PostgresError("40001"), True),
        ("postgresql", _PostgresError("57P01"), False),
        ("postgresql", _PostgresError("08006"), False),
        ("postgresql", _PostgresError(None), False),
        ("postgresql", ConnectionResetError(), False),
        ("postgresql", TimeoutError(), False),
        ("mysql", Exception(1062, "Duplicate entry"), True),
        ("mysql", Exception(1213, "Deadlock"), True),
        ("mysql", Exception(2013, "Lost connection"), False),
        ("mysql", Exception(2006, "Server has gone away"), False),
        ("mysql", Exception(1053, "Server shutdown in progress"), False),
        ("mysql", Exception(0, ""), False),
        ("mariadb", Exception(), False),
        ("sqlite", Exception("database is locked"), True),
        ("oracle", Exception("whatever"), False),
    ],
)
def test_what_counts_as_an_answer(dialect: str, error: Exception, answered: bool) -> None:
    assert was_answered(dialect, error) is answered


def test_a_guard_costs_a_statement_nothing() -> None:
    """For one listener to a connection, SQLAlchemy asks for listeners at every statement: that was 2 % of a write."""
    engine = create_engine("postgresql+psycopg://")
    guard_commits(engine)
    assert not engine._has_events


@pytest.fixture
async def box(fresh_database: FreshDatabase, request: pytest.FixtureRequest) -> AsyncIterator[Pillarbox]:
    kind, driver = request.param
    async with order_box(fresh_database(kind).url(driver)) as box:
        await set_up(box)
        yield box


class TestCancellation:
    """H11: the task is cancelled while COMMIT is on its way."""

    @pytest.mark.parametrize("box", [*ASYNC_DRIVERS, ("embedded", "asyncpg"), ("sqlite", "aiosqlite")], indirect=True)
    async def test_h11_whoever_is_cancelled_can_tell_and_the_ledger_balances(self, box: Pillarbox) -> None:
        draw = random.Random(11)
        known: dict[str, bool] = {}

        async def work(number: int) -> None:
            uow = box.unit_of_work()
            try:
                async with uow:
                    uow.publish(OrderNoted(note=str(number)), key=f"k{number}")
            finally:
                known[f"k{number}"] = uow.committed

        async def cancelled_at_random(number: int) -> None:
            task = asyncio.create_task(work(number))
            for _ in range(draw.randrange(60)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

        for start in range(0, 120, 4):
            await asyncio.gather(*(cancelled_at_random(number) for number in range(start, start + 4)))
        rows = {key for (key,) in await written(box.engine, "key")}
        assert rows == {key for key, committed in known.items() if committed}

    async def test_h11_a_cancellation_during_commit_arrives_after_it(self, postgres_database: Database) -> None:
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            sending, go_on = asyncio.Event(), asyncio.Event()
            _slow_commit(box.engine.sync_engine, sending, go_on)
            uow = box.unit_of_work()

            async def work() -> None:
                async with uow:
                    uow.publish(OrderNoted(note="in flight"), key="k")

            task = asyncio.create_task(work())
            await sending.wait()
            task.cancel()
            go_on.set()
            await asyncio.wait([task])
            assert task.cancelled()
            assert uow.committed
            assert await written(box.engine) == ["noted"]

    async def test_h11_a_time_limit_is_still_a_timeout_error(self, postgres_database: Database) -> None:
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            sending, go_on = asyncio.Event(), asyncio.Event()
            _slow_commit(box.engine.sync_engine, sending, go_on)

            with pytest.raises(TimeoutError):
                async with _over_during_commit(sending, go_on), box.unit_of_work() as uow:
                    uow.publish(OrderNoted(note="in flight"), key="k")
            assert await written(box.engine) == ["noted"]

    async def test_h11_a_time_limit_that_ends_during_a_commit_of_the_store_ends_with_its_block(
        self, postgres_database: Database
    ) -> None:
        """Nothing is awaited between such a COMMIT and the end of the call, so it would come later, at anything."""
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            sending, go_on = asyncio.Event(), asyncio.Event()
            _slow_commit(box.engine.sync_engine, sending, go_on)
            made = text("CREATE TABLE made (id integer)")
            with pytest.raises(TimeoutError):
                async with _over_during_commit(sending, go_on):
                    await Turns(box.engine).change_apart(lambda connection: connection.execute(made))
            await _turns(3)  # nothing is left of the cancellation
            async with box.engine.connect() as connection:
                assert (await connection.exec_driver_sql("SELECT count(*) FROM made")).scalar() == 0

    async def test_h11_a_session_without_events_that_is_cancelled_during_commit_knows_that_it_has_committed(
        self, postgres_database: Database
    ) -> None:
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            sending, go_on = asyncio.Event(), asyncio.Event()
            _slow_commit(box.engine.sync_engine, sending, go_on)
            uow = box.unit_of_work()

            async def work() -> None:
                async with uow:
                    await uow.session.execute(text("CREATE TABLE made (id integer)"))
                    await uow.commit()

            task = asyncio.create_task(work())
            await sending.wait()
            task.cancel()
            await _turns(3)
            go_on.set()
            await asyncio.wait([task])
            assert (task.cancelled(), uow.committed) == (True, True)

    async def test_h11_a_transaction_that_never_ended_takes_no_cancellation_from_the_next_connection(self) -> None:
        """Python may put it where the one of that transaction was."""
        lost = _Connection()
        unended, place = commit.remember(lost, list), id(lost)
        del lost
        elsewhere = []
        while id(connection := _Connection()) != place:
            elsewhere.append(connection)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def send() -> None:
            await answer

        task = asyncio.create_task(commit._to_the_end(send(), connection))
        await asyncio.sleep(0)
        task.cancel()
        answer.set_result(None)
        await asyncio.wait([task])
        assert task.cancelled()
        assert not commit.forget(unended)

    async def test_h11_a_second_cancellation_that_comes_with_the_answer_is_not_lost(self) -> None:
        connection = _Connection()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def send() -> None:
            await answer

        task = asyncio.create_task(commit._to_the_end(send(), connection))
        await asyncio.sleep(0)
        task.cancel()
        answer.set_result(None)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    @pytest.mark.parametrize("of", ["a unit of work", "the store"])
    @pytest.mark.parametrize("after", ["some time", "a second cancellation"])
    async def test_h11_a_commit_that_hangs_is_given_up(
        self, postgres_database: Database, monkeypatch: pytest.MonkeyPatch, of: str, after: str
    ) -> None:
        """Its host may be gone without a word, and a task that was cancelled would wait until TCP gives up."""
        monkeypatch.setattr(commit, "ANSWER_SECONDS", 0.05 if after == "some time" else 60.0)
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            sending, never = asyncio.Event(), asyncio.Event()
            _slow_commit(box.engine.sync_engine, sending, never)

            async def work() -> None:
                if of == "the store":
                    await Turns(box.engine).change_apart(lambda connection: connection.execute(text("SELECT 1")))
                async with box.unit_of_work() as uow:
                    uow.publish(OrderNoted(note="never"), key="k")

            task = asyncio.create_task(work())
            await sending.wait()
            task.cancel()
            if after == "a second cancellation":
                await _turns(3)
                assert not task.done()
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert await written(box.engine) == []

    async def test_h11_a_cancellation_before_commit_is_sent_rolls_back(self, postgres_database: Database) -> None:
        """Leaving the block flushes first: as long as nothing can have committed, nobody has to wait for it."""
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            at_work, never = asyncio.Event(), asyncio.Event()

            @box.subscribe(OrderNoted, before_commit=True)
            async def hang(_event: OrderNoted, _session: AsyncSession) -> None:
                at_work.set()
                await never.wait()

            uow = box.unit_of_work()

            async def work() -> None:
                async with uow:
                    uow.publish(OrderNoted(note="never"), key="k")

            task = asyncio.create_task(work())
            await at_work.wait()
            task.cancel()
            await asyncio.wait([task], timeout=5)
            assert (task.cancelled(), uow.committed) == (True, False)
            assert await written(box.engine) == []

    @pytest.mark.parametrize("times", [1, 2, 3])
    async def test_h92_cancelled_again_and_again_leaves_no_open_transaction(
        self, postgres_database: Database, times: int
    ) -> None:
        async with order_box(create_async_engine(postgres_database.url(), pool_size=1, max_overflow=0)) as box:
            await set_up(box)
            opened, never = asyncio.Event(), asyncio.Event()

            async def work() -> None:
                async with box.unit_of_work() as uow:
                    uow.publish(OrderNoted(note="never"), key="k")
                    await uow.flush()
                    opened.set()
                    await never.wait()

            task = asyncio.create_task(work())
            await opened.wait()
            for _ in range(times):
                task.cancel()
                await asyncio.sleep(0)
            await asyncio.wait([task])
            async with box.unit_of_work() as uow:
                assert (await uow.session.execute(select(1))).scalar() == 1
            assert await written(box.engine) == []
            await box.engine.dispose()

    async def test_h11_a_task_that_is_started_during_a_commit_has_its_own_commit_protected(
        self, postgres_database: Database
    ) -> None:
        """What a listener starts inherits the context of a COMMIT that needs no protection."""
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            sending, go_on = asyncio.Event(), asyncio.Event()
            started: list[asyncio.Task[None]] = []

            async def beside() -> None:
                _slow_commit(box.engine.sync_engine, sending, go_on)
                async with box.engine.begin() as connection:
                    await connection.execute(text("CREATE TABLE made (id integer)"))

            async with box.unit_of_work() as uow:
                begin = lambda _: started.append(asyncio.get_running_loop().create_task(beside()))  # noqa: E731
                event.listen(uow.session.sync_session, "after_commit", begin)
            await sending.wait()
            started[0].cancel()
            await _turns(3)
            assert not started[0].done()
            go_on.set()
            await asyncio.wait(started)
            async with box.engine.connect() as connection:
                assert (await connection.exec_driver_sql("SELECT count(*) FROM made")).scalar() == 0


class TestRelays:
    """A relay has an engine of its own, with all of the guard, whatever the box was given."""

    @pytest.fixture(params=["an engine", "an engine with options", "a URL"])
    def given(self, request: pytest.FixtureRequest) -> Callable[[str], AsyncEngine | str]:
        def given(url: str) -> AsyncEngine | str:
            if request.param == "a URL":
                return url
            engine = create_async_engine(url, poolclass=NullPool)
            return engine.execution_options(x=1) if request.param == "an engine with options" else engine

        return given

    @pytest.mark.parametrize("run", ["transaction", "change_apart"])
    async def test_a_transaction_that_postgresql_has_given_up_does_not_commit(
        self, postgres_database: Database, given: Callable[[str], AsyncEngine | str], run: str
    ) -> None:
        def fail_quietly(connection: Connection) -> None:
            connection.execute(text("CREATE TABLE made (id integer)"))
            with suppress(DBAPIError):
                connection.execute(text("SELECT nothing"))

        async with order_box(given(postgres_database.url())) as box:
            await set_up(box)
            store = store_of(box.relay())
            with pytest.raises(DBAPIError, match="current transaction is aborted"):
                await getattr(store, run)(fail_quietly)
            await getattr(store, run)(lambda connection: connection.execute(text("CREATE TABLE made (id integer)")))

    @pytest.mark.parametrize("run", ["transaction", "change_apart"])
    @pytest.mark.parametrize(("kind", "driver"), ASYNC_DRIVERS)
    async def test_h10_a_lost_answer_is_known_and_its_connection_is_thrown_away(
        self, fresh_database: FreshDatabase, kind: str, driver: str, run: str
    ) -> None:
        database = fresh_database(kind)
        async with order_box(database.url()) as direct:
            await set_up(direct)
        with Proxy(database.url(driver)) as proxy:

            def lose(connection: Connection) -> None:
                connection.execute(text("DELETE FROM test_lines"))
                proxy.mode = "lose the answer"

            async with order_box(proxy.url) as box:
                store = store_of(box.relay())
                with pytest.raises(CommitOutcomeUnknown):
                    await getattr(store, run)(lose)
                proxy.mode = "pass"
                assert await getattr(store, run)(lambda connection: connection.scalar(select(1))) == 1

    @pytest.mark.parametrize("run", ["transaction", "change_apart"])
    async def test_h11_a_cancellation_during_commit_arrives_after_it(
        self, postgres_database: Database, given: Callable[[str], AsyncEngine | str], run: str
    ) -> None:
        async with order_box(given(postgres_database.url())) as box:
            await set_up(box)
            store, sending, go_on = store_of(box.relay()), asyncio.Event(), asyncio.Event()
            _slow_commit(store._engine.sync_engine, sending, go_on)
            made = text("CREATE TABLE made (id integer)")
            with pytest.raises(TimeoutError):
                async with _over_during_commit(sending, go_on):
                    await getattr(store, run)(lambda connection: connection.execute(made))
            async with box.engine.connect() as connection:
                assert (await connection.exec_driver_sql("SELECT count(*) FROM made")).scalar() == 0


class _Connection:
    """What it has beside its identity is of no interest."""


def store_of(relay: Relay) -> Turns:
    assert isinstance(relay._store, Turns)
    return relay._store


def _slow_commit(engine: Engine, sending: asyncio.Event, go_on: asyncio.Event) -> None:
    """The first COMMIT says when it is about to be sent and waits for a sign."""

    class Waiting:
        def __init__(self, plain: Any) -> None:
            self._plain = plain
            self.rollback = plain.rollback

        async def commit(self) -> None:
            sending.set()
            await go_on.wait()
            await self._plain.commit()

    def slow_down(connection: Connection) -> None:
        if not sending.is_set():
            driver: Any = connection.connection.dbapi_connection
            driver._transaction = Waiting(driver._transaction)

    event.listen(engine, "commit", slow_down)


@asynccontextmanager
async def _over_during_commit(sending: asyncio.Event, go_on: asyncio.Event) -> AsyncIterator[None]:
    """A time limit that ends while COMMIT is on its way."""

    async def end() -> None:
        await sending.wait()
        limit.reschedule(asyncio.get_running_loop().time() - 1)
        await asyncio.get_running_loop().create_task(_turns(3))
        go_on.set()

    ending = asyncio.create_task(end())
    try:
        async with asyncio.timeout(60) as limit:
            yield
    finally:
        await ending


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class TestRollbacksThatFail:
    """Nobody is told of a ROLLBACK that was cancelled; what was raised goes with the transaction all the same."""

    async def test_what_was_raised_is_not_written_later(self, database: Database) -> None:
        async with order_box(database.url()) as box:
            await set_up(box)
            async with box.unit_of_work() as uow:
                uow.add(taken := Order.place())
            async with box.bind(async_sessionmaker(box.engine))() as session:
                session.add(order := Order.place(order_id=taken.id))
                order.note("added")
                box.publish(session, OrderNoted(note="published"), key="k")
                with self._next_rollback_is_cancelled(box), pytest.raises(asyncio.CancelledError):
                    await session.flush()
                await session.rollback()
                order.id = uuid4()
                session.add(order)  # the same story again
                await session.commit()
            assert await written(box.engine) == ["placed", "placed"]

    async def test_a_change_that_is_undone_leaves_nothing(self, database: Database) -> None:
        async with order_box(database.url()) as box:
            await set_up(box)
            async with box.unit_of_work() as uow:
                uow.add(order := Order.place())
            with pytest.raises(asyncio.CancelledError):
                async with box.unit_of_work() as uow:
                    mine = await uow.session.get_one(Order, order.id)
                    await uow.session.execute(text("UPDATE test_orders SET version = 7"))  # as if by somebody else
                    mine.reprice(5)
                    with self._next_rollback_is_cancelled(box):
                        await uow.flush()
            assert await written(box.engine) == ["placed"]

    @staticmethod
    @contextmanager
    def _next_rollback_is_cancelled(box: Pillarbox) -> Iterator[None]:
        def cancel(_connection: object) -> None:
            raise asyncio.CancelledError

        event.listen(box.engine.sync_engine, "rollback", cancel)
        try:
            yield
        finally:
            event.remove(box.engine.sync_engine, "rollback", cancel)
