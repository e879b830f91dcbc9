"""A FastAPI application on PostgreSQL: when it commits, when it does not, and what its client hears of it."""

# No `from __future__ import annotations`: FastAPI could not see what an endpoint's annotation says of a local box.
import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID, uuid4

import anyio.from_thread
import httpx
import pytest
from fastapi import BackgroundTasks, FastAPI, HTTPException, Request
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox import ConcurrencyError, Pillarbox, Repository, UnitOfWork
from pillarbox.fastapi import TenantMiddleware, TraceMiddleware, error_handlers, health, lifespan, unit_of_work
from pillarbox.transports.memory import MemoryTransport
from tests.conftest import FreshDatabase
from tests.domain import Order, order_box, set_up, written
from tests.prove.http import Service, Wish, prove
from tests.proxy import Proxy
from tests.relays import soon
from tests.servers import Database, wait_until
from tests.web import TestClient, client

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Shop:
    """An application with one endpoint per kind of ending, and a look at the database from outside."""

    def __init__(self, box: Pillarbox) -> None:
        self.box = box
        self.outside: AsyncEngine = create_async_engine(box.engine.url)
        self.seen: dict[str, int] = {}
        self.app = app = FastAPI(exception_handlers=error_handlers)
        work = unit_of_work(box)
        self.entered = asyncio.Event()
        self.may_leave = asyncio.Event()

        @app.post("/orders", status_code=201)
        async def place(uow: Annotated[UnitOfWork, work]) -> UUID:
            order = Order.place()
            uow.add(order)
            return order.id

        @app.post("/sync", status_code=201)
        def place_in_a_thread(uow: Annotated[UnitOfWork, work]) -> int:
            order = Order.place()
            uow.add(order)
            anyio.from_thread.run(uow.flush)
            return anyio.from_thread.run(uow.session.get_one, Order, order.id).version

        @app.post("/background", status_code=201)
        async def place_and_look(uow: Annotated[UnitOfWork, work], tasks: BackgroundTasks) -> None:
            uow.add(Order.place())
            tasks.add_task(self.look, "background")

        @app.post("/refuse/{how}")
        async def refuse(how: str, uow: Annotated[UnitOfWork, work]) -> str:
            uow.add(Order.place())
            await uow.flush()
            if how == "http":
                raise HTTPException(422, "we do not like it")
            if how == "conflict":
                raise ConcurrencyError("somebody was faster")
            if how == "missing":
                await Repository(uow, Order).get_one(uuid4())
            if how == "result":
                return 5  # type: ignore[return-value]
            raise RuntimeError("a bug")

        @app.post("/commit-fails", status_code=201)
        async def commit_fails(uow: Annotated[UnitOfWork, work]) -> None:
            uow.add(Order.place())
            await uow.session.execute(text("INSERT INTO promises VALUES (4711)"))

        @app.post("/wait", status_code=201)
        async def wait(uow: Annotated[UnitOfWork, work]) -> None:
            uow.add(Order.place())
            await uow.flush()
            self.entered.set()
            await self.may_leave.wait()

        @app.post("/nested", status_code=201)
        async def nested(uow: Annotated[UnitOfWork, work]) -> bool:
            uow.add(Order.place())
            async with box.unit_of_work() as inner:
                return inner.session is uow.session

    async def count(self) -> int:
        """How many orders others can see."""
        async with self.outside.connect() as connection:
            return int((await connection.execute(text("SELECT count(*) FROM test_orders"))).scalar_one())

    async def look(self, name: str) -> None:
        self.seen[name] = await self.count()

    async def watched(self, scope: Any, receive: Any, send: Any) -> None:
        """The application, with a look outside at the moment when its response begins."""

        async def watch(message: Any) -> None:
            if message["type"] == "http.response.start":
                await self.look("response")
            await send(message)

        await self.app(scope, receive, watch)


@pytest.fixture
async def shop(postgres_database: Database) -> AsyncIterator[Shop]:
    async with order_box(postgres_database.url()) as box:
        await set_up(box)
        async with box.engine.begin() as connection:
            await connection.execute(text("CREATE TABLE kept (id integer PRIMARY KEY)"))
            await connection.execute(
                text("CREATE TABLE promises (id integer REFERENCES kept DEFERRABLE INITIALLY DEFERRED)")
            )
        shop = Shop(box)
        yield shop
        await shop.outside.dispose()


class TestUnitOfWork:
    async def test_the_response_is_sent_after_the_commit(self, shop: Shop) -> None:
        async with client(shop.watched) as asking:
            answer = await asking.post("/orders")
        assert (answer.status_code, shop.seen) == (201, {"response": 1})
        assert await written(shop.outside) == ["placed"]

    async def test_background_tasks_run_after_the_commit(self, shop: Shop) -> None:
        async with client(shop.app) as asking:
            assert (await asking.post("/background")).status_code == 201
        assert shop.seen == {"background": 1}

    async def test_an_endpoint_in_a_thread(self, shop: Shop) -> None:
        async with client(shop.watched) as asking:
            answer = await asking.post("/sync")
        assert (answer.status_code, answer.json(), shop.seen) == (201, 1, {"response": 1})
        assert await written(shop.outside) == ["placed"]

    async def test_a_unit_of_work_in_the_endpoint_joins_it(self, shop: Shop) -> None:
        async with client(shop.app) as asking:
            assert (await asking.post("/nested")).json() is True
        assert await shop.count() == 1

    @pytest.mark.parametrize(
        ("how", "status"), [("http", 422), ("conflict", 409), ("missing", 404), ("result", 500), ("bug", 500)]
    )
    async def test_an_error_rolls_back(self, shop: Shop, how: str, status: int) -> None:
        async with client(shop.app, raise_app_exceptions=False) as asking:
            assert (await asking.post(f"/refuse/{how}")).status_code == status
        assert (await shop.count(), await written(shop.outside)) == (0, [])

    async def test_a_commit_that_fails_is_no_success(self, shop: Shop) -> None:
        async with client(shop.app, raise_app_exceptions=False) as asking:
            assert (await asking.post("/commit-fails")).status_code == 500
        assert (await shop.count(), await written(shop.outside)) == (0, [])

    async def test_a_cancelled_request_rolls_back(self, shop: Shop) -> None:
        async with client(shop.app) as asking:
            request = asyncio.create_task(asking.post("/wait"))
            await shop.entered.wait()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        assert (await shop.count(), await written(shop.outside)) == (0, [])

    async def test_a_client_that_has_gone_rolls_back(self, shop: Shop) -> None:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/wait", "headers": [], "query_string": b""}
        messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        serving = asyncio.create_task(shop.app(scope, messages.get, send))
        await shop.entered.wait()
        messages.put_nowait({"type": "http.disconnect"})
        shop.may_leave.set()
        await serving
        assert sent[0]["status"] == 499
        assert (await shop.count(), await written(shop.outside)) == (0, [])


@pytest.mark.parametrize("mode", ["lose the answer", "lose the question"])
async def test_a_lost_commit_is_503_and_never_a_success(fresh_database: FreshDatabase, mode: Any) -> None:
    with Proxy(fresh_database("system").url()) as proxy:
        async with order_box(proxy.url) as box:
            await set_up(box)
            app = FastAPI()

            @app.post("/orders", status_code=201)
            async def place(uow: Annotated[UnitOfWork, unit_of_work(box)]) -> None:
                uow.add(Order.place())
                proxy.mode = mode

            async with client(app, raise_app_exceptions=False) as asking:
                answer = await asking.post("/orders")
            proxy.mode = "pass"
            assert answer.status_code == 503
            assert "not known" in answer.json()["detail"]


def test_with_the_test_client(postgres_database: Database) -> None:
    box = order_box(postgres_database.url())
    app = FastAPI(lifespan=lifespan(box, also=prepared(box)))

    @app.post("/orders", status_code=201)
    def place(uow: Annotated[UnitOfWork, unit_of_work(box)]) -> None:
        uow.add(Order.place())

    with TestClient(app) as asking:
        assert asking.post("/orders").status_code == 201
    engine = create_engine(postgres_database.url("psycopg"))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outbox_events")).scalar_one() == 1
    engine.dispose()


async def test_tenant_and_trace_go_with_the_event(postgres_database: Database) -> None:
    box = order_box(postgres_database.url(), tenancy="required")
    app = FastAPI()
    app.add_middleware(TraceMiddleware)
    app.add_middleware(TenantMiddleware, box=box)

    @app.post("/orders", status_code=201)
    async def place(uow: Annotated[UnitOfWork, unit_of_work(box)]) -> None:
        uow.add(Order.place())

    headers = {"x-tenant-id": "acme", "traceparent": TRACE, "x-correlation-id": "call-7"}
    async with lifespan(box, relay=True, also=prepared(box))(app), client(app) as asking:
        assert (await asking.post("/orders")).status_code == 400
        assert (await asking.post("/orders", headers=headers)).status_code == 201
        broker = box.transports["broker"]
        assert isinstance(broker, MemoryTransport)
        [message] = await broker.received("tests.order.events")
    found = {name: message.headers[name] for name in ("tenant_id", "traceparent", "trace_id", "correlation_id")}
    assert found == {
        "tenant_id": "acme",
        "traceparent": TRACE,
        "trace_id": TRACE[3:35],
        "correlation_id": "call-7",
    }


def prepared(box: Pillarbox) -> Callable[[Any], Any]:
    @asynccontextmanager
    async def prepare(_app: Any) -> AsyncIterator[None]:
        await set_up(box)
        yield

    return prepare


def migrated(box: Pillarbox) -> Callable[[Any], Any]:
    @asynccontextmanager
    async def migrate(_app: Any) -> AsyncIterator[None]:
        await box.migrate()
        yield

    return migrate


class TestRelayInside:
    def test_the_order_of_lives_and_the_state_of_yours(self, postgres_database: Database) -> None:
        box, order = Pillarbox(postgres_database.url()), list[str]()

        @asynccontextmanager
        async def mine(app: FastAPI) -> AsyncIterator[dict[str, str]]:
            assert isinstance(app, FastAPI)
            await box.migrate()
            order.append("mine begins")
            yield {"mine": "found"}
            order.append("mine ends")
            assert box.engine is not None

        def relay() -> Any:
            order.append("the relay begins")
            return box.relay()

        app = FastAPI(lifespan=lifespan(box, relay=relay, also=mine))

        @app.get("/")
        async def state(request: Request) -> str:
            return str(request.state.mine)

        with TestClient(app) as asking:
            assert asking.get("/").json() == "found"
        assert order == ["mine begins", "the relay begins", "mine ends"]

    def test_it_may_live_again(self, postgres_database: Database) -> None:
        box = Pillarbox(postgres_database.url())
        app = FastAPI(lifespan=lifespan(box, relay=True, also=migrated(box)))
        app.include_router(health(box))
        for _ in range(2):
            with TestClient(app) as asking:
                assert asking.get("/livez").json() == {"ok": True, "relay": True}

    async def test_ready_when_the_relay_has_seen_to_its_leases(self, postgres_database: Database) -> None:
        box = Pillarbox(postgres_database.url())
        app = FastAPI()
        app.include_router(health(box))
        async with lifespan(box, relay=True, also=migrated(box))(app), client(app) as asking:

            async def ready() -> bool:
                return (await asking.get("/readyz")).status_code == 200

            await soon(ready)
            assert (await asking.get("/readyz")).json() == {"ok": True, "database": True, "relay": True}
            assert (await asking.get("/livez")).json() == {"ok": True, "relay": True}
        assert "/readyz" not in app.openapi()["paths"]

    async def test_h93_a_relay_that_dies_is_said_and_seen(
        self, postgres_database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        box = Pillarbox(postgres_database.url())
        app = FastAPI()
        app.include_router(health(box))

        def dying() -> Any:
            relay = box.relay()

            async def break_down(_over: asyncio.Event) -> None:
                raise ArithmeticError("a bug")

            monkeypatch.setattr(relay, "_keep_looking", break_down)
            return relay

        with caplog.at_level(logging.CRITICAL, "pillarbox"):
            async with lifespan(box, relay=dying, also=migrated(box))(app), client(app) as asking:

                async def red() -> bool:
                    return (await asking.get("/readyz")).status_code == 503

                await soon(lambda: "has died" in caplog.text)
                await soon(red)
                assert (await asking.get("/readyz")).json() == {"ok": False, "database": True, "relay": False}
                assert (await asking.get("/livez")).status_code == 503
        assert "a bug" in caplog.text

    async def test_a_relay_that_is_stopped_by_the_application_is_no_news(
        self, postgres_database: Database, caplog: pytest.LogCaptureFixture
    ) -> None:
        box = Pillarbox(postgres_database.url())
        with caplog.at_level(logging.CRITICAL, "pillarbox"):
            async with lifespan(box, relay=True, also=migrated(box))(None):
                await asyncio.sleep(0)
        assert caplog.text == ""


class TestInAProcess:
    """A real uvicorn, and clients that hang up."""

    def test_workers_have_relays_of_their_own_and_stop_in_time(
        self, postgres_database: Database, tmp_path: Path
    ) -> None:

        with Service(postgres_database.url(), tmp_path, workers=2) as service:
            engine = create_engine(postgres_database.url("psycopg"))
            relays = text("SELECT count(*) FROM pillarbox_relays")

            def count() -> int:
                with engine.connect() as connection:
                    return int(connection.execute(relays).scalar_one())

            wait_until(lambda: count() == 2, "two relays to be there")
            assert service.stop() == 0
            assert count() == 0
            engine.dispose()

    def test_who_hangs_up_has_ordered_nothing(self, postgres_database: Database, tmp_path: Path) -> None:
        with Service(postgres_database.url(), tmp_path) as service:
            engine = create_engine(postgres_database.url("psycopg"), isolation_level="AUTOCOMMIT")
            at_work = text(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND state = 'idle in transaction' AND query LIKE '%INTO pillarbox_outbox%'"
            )
            with engine.connect() as looking:
                body = Wish(id=uuid4(), way="until hung up", seconds=0).model_dump_json().encode()
                address = httpx.URL(service.url)
                with socket.create_connection((address.host, address.port or 0)) as connection:
                    head = "POST /notes HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
                    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                    wait_until(lambda: looking.execute(at_work).scalar_one() == 1, "the note to be written")
                wait_until(lambda: looking.execute(at_work).scalar_one() == 0, "its transaction to end")
                stays = Wish(id=uuid4(), way="well", seconds=0)
                answer = httpx.post(f"{service.url}/notes", json=stays.model_dump(mode="json"))
                assert answer.status_code == 201
                rows = looking.execute(text("SELECT id FROM prove_notes")).scalars().all()
                events = looking.execute(text("SELECT aggregate_id FROM outbox_events")).scalars().all()
            engine.dispose()
            assert (rows, events) == ([stays.id], [str(stays.id)])

    async def test_the_books_balance(self, postgres_database: Database, tmp_path: Path) -> None:
        """The small form of ``make prove-http``."""
        result = await prove(postgres_database.url(), tmp_path, requests=60, seed=7)
        assert result["holds"], result
        assert min(result["done"], result["failed"], result["unknown"]) > 0
