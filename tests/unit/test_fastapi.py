"""The FastAPI integration as far as it needs no server: middlewares, lifespans, health, forks."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse

from pillarbox import ConfigurationError, IntegrationEvent, Pillarbox, Route, current_context
from pillarbox.errors import TenancyError
from pillarbox.fastapi import TenantMiddleware, TraceMiddleware, error_handlers, health, lifespan, unit_of_work
from pillarbox.projections.read import InvalidCursorError
from pillarbox.relay import Relay
from pillarbox.transports.memory import MemoryTransport
from tests.relays import Line, soon
from tests.web import TestClient, client

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path / 'box.db'}"


def migrated(box: Pillarbox) -> Any:
    @asynccontextmanager
    async def migrate(_app: Any) -> AsyncIterator[None]:
        await box.migrate()
        yield

    return migrate


async def circumstances(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the headers that an event would get."""
    await JSONResponse(current_context().headers())(scope, receive, send)


class TestTenantMiddleware:
    def app(self, tenancy: Any = "required", **options: Any) -> TenantMiddleware:
        return TenantMiddleware(circumstances, box=Pillarbox(tenancy=tenancy), **options)

    async def ask(self, app: Any, *headers: tuple[str, str | bytes], path: str = "/") -> httpx.Response:
        async with client(app) as asking:
            encoded = [(name.encode(), value.encode() if isinstance(value, str) else value) for name, value in headers]
            return await asking.get(path, headers=httpx.Headers(encoded))

    async def test_the_header_becomes_the_tenant(self) -> None:
        answer = await self.ask(self.app(), ("X-Tenant-Id", "acme"))
        assert (answer.status_code, answer.json()) == (200, {"tenant_id": "acme"})
        assert current_context().tenant is None

    async def test_a_header_of_another_name(self) -> None:
        answer = await self.ask(self.app(tenant="X-Org"), ("x-org", "acme"), ("x-tenant-id", "globex"))
        assert answer.json() == {"tenant_id": "acme"}

    async def test_a_function_finds_it_in_the_scope(self) -> None:
        answer = await self.ask(self.app(tenant=lambda scope: scope["path"].split("/")[1]), path="/acme/orders")
        assert answer.json() == {"tenant_id": "acme"}

    @pytest.mark.parametrize(
        "headers",
        [
            [],
            [("x-tenant-id", "")],
            [("x-tenant-id", "a\tb")],
            [("x-tenant-id", "a\x00b")],
            [("x-tenant-id", b"\xff\xfe")],
            [("x-tenant-id", "a" * 201)],
            [("x-tenant-id", "acme"), ("x-tenant-id", "globex")],
        ],
    )
    async def test_s04_a_missing_or_impossible_tenant_is_refused(self, headers: list[tuple[str, str | bytes]]) -> None:
        answer = await self.ask(self.app(), *headers)
        assert answer.status_code == 400
        assert answer.json()["detail"] in ("the tenant is missing", "the tenant is not valid")

    async def test_a_tenant_with_blanks_around_it_is_refused(self) -> None:
        assert (await self.ask(self.app(tenant=lambda _scope: " acme"))).status_code == 400

    async def test_where_tenants_are_not_required_only_a_bad_one_is_refused(self) -> None:
        assert (await self.ask(self.app("off"))).json() == {}
        assert (await self.ask(self.app("off"), ("x-tenant-id", ""))).status_code == 400

    async def test_health_needs_no_tenant(self) -> None:
        assert (await self.ask(self.app(), path="/readyz")).json() == {}
        assert (await self.ask(self.app(), path="/metrics/")).json() == {}  # as an application that is mounted there
        assert (await self.ask(self.app(exempt=["/open/"]), path="/open")).json() == {}
        assert (await self.ask(self.app(), path="/readyz/more")).status_code == 400

    def test_a_websocket_without_tenant_is_closed(self) -> None:
        app = FastAPI()

        @app.websocket("/")
        async def endpoint(socket: WebSocket) -> None:
            await socket.accept()
            await socket.send_json(current_context().headers())

        app.add_middleware(TenantMiddleware, box=Pillarbox(tenancy="required"))
        with TestClient(app) as asking:
            with pytest.raises(WebSocketDisconnect) as refused, asking.websocket_connect("/"):
                pass
            assert refused.value.code == 1008
            with asking.websocket_connect("/", headers={"x-tenant-id": "acme"}) as socket:
                assert socket.receive_json() == {"tenant_id": "acme"}


class TestTraceMiddleware:
    async def ask(self, *headers: tuple[str, str]) -> httpx.Response:
        async with client(TraceMiddleware(circumstances)) as asking:
            encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
            return await asking.get("/", headers=httpx.Headers(encoded))

    async def test_what_comes_with_the_request_is_kept(self) -> None:
        answer = await self.ask(
            ("traceparent", TRACE), ("tracestate", "a=1"), ("tracestate", "b=2"), ("x-correlation-id", "call 7")
        )
        assert answer.json() == {
            "traceparent": TRACE,
            "tracestate": "a=1,b=2",
            "trace_id": TRACE[3:35],
            "span_id": TRACE[36:52],
            "correlation_id": "call 7",
        }
        assert answer.headers["x-correlation-id"] == "call 7"

    @pytest.mark.parametrize(
        "traceparent",
        [
            "",
            "nonsense",
            TRACE.upper(),
            TRACE.replace("00-", "ff-", 1),
            TRACE + "-more",
            f"00-{'0' * 32}-b7ad6b7169203331-01",
            f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        ],
    )
    async def test_a_malformed_trace_is_dropped(self, traceparent: str) -> None:
        found = (await self.ask(("traceparent", traceparent), ("tracestate", "a=1"))).json()
        assert found.keys() == {"correlation_id"}

    async def test_two_traces_are_none(self) -> None:
        found = (await self.ask(("traceparent", TRACE), ("traceparent", TRACE))).json()
        assert found.keys() == {"correlation_id"}

    @pytest.mark.parametrize("state", ["a=\x01", "a=" + "1" * 600, "a=\xe9", "\t"])
    async def test_a_malformed_state_is_dropped_alone(self, state: str) -> None:
        found = (await self.ask(("traceparent", TRACE), ("tracestate", state))).json()
        assert (found["traceparent"], "tracestate" in found) == (TRACE, False)

    @pytest.mark.parametrize("correlation", ["", " ", "a\r\nset-cookie: b", "a" * 129, "caf\xe9", "a\x7f"])
    async def test_s15_a_malformed_correlation_is_replaced(self, correlation: str) -> None:
        answer = await self.ask(("x-correlation-id", correlation))
        assert re.fullmatch(r"[0-9a-f-]{36}", answer.json()["correlation_id"])
        assert answer.headers["x-correlation-id"] == answer.json()["correlation_id"]

    async def test_two_requests_have_two_correlations_and_no_trace_that_nobody_began(self) -> None:
        first, second = (await self.ask()).json(), (await self.ask()).json()
        assert first["correlation_id"] != second["correlation_id"]
        assert first.keys() == second.keys() == {"correlation_id"}


class TestLifespan:
    def test_the_box_lives_with_the_application(self, url: str) -> None:
        box = Pillarbox(url)
        with TestClient(FastAPI(lifespan=box.lifespan)):
            assert box.engine is not None
        with pytest.raises(Exception, match="not started"):
            box.engine  # noqa: B018  says so

    def test_a_failure_of_yours_stops_the_box(self, url: str) -> None:
        box = Pillarbox(url)

        @asynccontextmanager
        async def mine(_app: Any) -> AsyncIterator[None]:
            raise RuntimeError("no licence")
            yield

        with pytest.raises(RuntimeError, match="no licence"), TestClient(FastAPI(lifespan=lifespan(box, also=mine))):
            pass
        with pytest.raises(Exception, match="not started"):
            box.engine  # noqa: B018  says so

    def test_a_relay_that_cannot_run_keeps_the_application_from_starting(self) -> None:
        app = FastAPI(lifespan=lifespan(Pillarbox("sqlite+aiosqlite://"), relay=True))
        with pytest.raises(ConfigurationError, match="in-memory"), TestClient(app):
            pass

    async def test_a_second_one_of_the_same_box_is_refused_and_the_first_lives_on(self, url: str) -> None:
        box, app = Pillarbox(url), FastAPI()
        app.include_router(health(box))
        for _ in range(2):
            async with lifespan(box, relay=True, also=migrated(box))(app), client(app) as asking:
                with pytest.raises(ConfigurationError, match="has a lifespan already"):
                    async with lifespan(box, relay=True)(app):
                        pass
                assert (await asking.get("/livez")).json() == {"ok": True, "relay": True}


class TestHealth:
    async def test_without_a_relay_only_the_database_counts(self, url: str) -> None:
        box = Pillarbox(url)
        app = FastAPI()
        app.include_router(health(box))
        async with box, client(app) as asking:
            assert (await asking.get("/readyz")).json() == {"ok": True, "database": True}
            assert (await asking.get("/livez")).json() == {"ok": True}

    async def test_s38_a_database_that_does_not_answer_is_red_and_no_secret_is_told(self) -> None:
        box = Pillarbox("postgresql+asyncpg://app:s3cret@127.0.0.1:1/shop")
        app = FastAPI()
        app.include_router(health(box))
        async with box, client(app) as asking:
            answer = await asking.get("/readyz")
            assert (answer.status_code, answer.json()) == (503, {"ok": False, "database": False})
            assert not re.search("s3cret|127.0.0.1|shop", answer.text + str(answer.headers))
            assert (await asking.get("/livez")).status_code == 200

    async def test_h93_a_relay_that_hangs_is_not_live(self, url: str) -> None:
        box, app = Pillarbox(url), FastAPI()
        app.include_router(health(box))
        lines = list[Line]()

        def relay() -> Relay:
            made = box.relay(lease=0.2)
            lines.append(Line(made._store))
            made._store = lines[0]
            return made

        async with lifespan(box, relay=relay, also=migrated(box))(app), client(app) as asking:

            async def live() -> bool:
                return (await asking.get("/livez")).status_code == 200

            async def hangs() -> bool:
                return not await live()

            assert await live()
            lines[0].cut()
            try:
                await soon(hangs, seconds=5)
                assert (await asking.get("/livez")).json() == {"ok": False, "relay": False}
            finally:
                lines[0].mend()
            await soon(live)


class Counted(IntegrationEvent, name="tests.fastapi.counted"):
    number: int


class TestConsumers:
    def box(self, url: str) -> tuple[Pillarbox, asyncio.Queue[int]]:
        """A box with two consumers of the same events, and what the first one has seen."""
        seen = asyncio.Queue[int]()
        routes = [Route("tests.fastapi.counted", to="broker", topic="counted")]
        box = Pillarbox(url, transports={"broker": MemoryTransport()}, routes=routes)

        @box.consumer("first", source="broker", topics=["counted"]).on(Counted)
        async def see(event: Counted) -> None:
            await seen.put(event.number)

        @box.consumer("second", source="broker", topics=["counted"]).on(Counted)
        async def overlook(event: Counted) -> None:
            pass

        return box, seen

    async def test_they_run_inside_with_a_relay_and_end_before_your_own_lifespan(self, url: str) -> None:
        box, seen = self.box(url)
        app, alive = FastAPI(), list[bool]()
        app.include_router(health(box))

        @asynccontextmanager
        async def mine(_app: Any) -> AsyncIterator[None]:
            await box.migrate()
            yield
            alive.extend(consumer.alive for consumer in box.consumers.values())

        async with lifespan(box, relay=True, consumers=True, also=mine)(app), client(app) as asking:
            async with box.unit_of_work() as uow:
                uow.publish(Counted(number=1), key="a")
            async with asyncio.timeout(20):
                assert await seen.get() == 1

            async def ready() -> bool:
                return (await asking.get("/readyz")).status_code == 200

            await soon(ready)
            assert (await asking.get("/readyz")).json() == {
                "ok": True,
                "database": True,
                "relay": True,
                "consumers": True,
            }
            assert (await asking.get("/livez")).json() == {"ok": True, "relay": True, "consumers": True}
        assert alive == [False, False]

    async def test_only_those_that_are_named(self, url: str) -> None:
        box, _ = self.box(url)
        async with lifespan(box, consumers=["second"], also=migrated(box))(None):
            assert [consumer.name for consumer in box.consumers.values() if consumer.alive] == ["second"]
        assert not box.consumers["second"].alive

    async def test_one_whose_source_is_away_lives_and_is_not_ready(self, url: str) -> None:
        class Away:
            async def subscribe(self, _topics: Any, _group: Any) -> Any:
                raise ConnectionRefusedError("10.1.2.3:6650")

        box, app = self.box(url)[0], FastAPI()
        app.include_router(health(box))

        @box.consumer("cut off", source=Away(), topics=["counted"]).on(Counted)
        async def never(event: Counted) -> None:
            pass

        async with lifespan(box, consumers=["cut off"], also=migrated(box))(app), client(app) as asking:
            assert (await asking.get("/livez")).json() == {"ok": True, "consumers": True}
            answer = await asking.get("/readyz")
            assert (answer.status_code, answer.json()) == (503, {"ok": False, "database": True, "consumers": False})

    async def test_h93_one_that_dies_is_said_and_seen(self, url: str, caplog: pytest.LogCaptureFixture) -> None:
        class Broken:
            async def subscribe(self, _topics: Any, _group: Any) -> Any:
                raise ArithmeticError("a bug")

        box, app = self.box(url)[0], FastAPI()
        app.include_router(health(box))

        @box.consumer("doomed", source=Broken(), topics=["counted"]).on(Counted)
        async def never(event: Counted) -> None:
            pass

        async with lifespan(box, consumers=True, also=migrated(box))(app), client(app) as asking:
            await soon(lambda: "consumer doomed has died inside the application; nothing is consumed" in caplog.text)
            answer = await asking.get("/livez")
            assert (answer.status_code, answer.json()) == (503, {"ok": False, "consumers": False})
            assert "doomed" not in answer.text
            assert box.consumers["first"].alive
        assert caplog.text.count("has died") == 1

    @pytest.mark.parametrize(
        ("consumers", "what"),
        [
            (["first", "third"], "no consumer is called 'third'; known are: first, second"),
            ("first", "a list of names"),
            ([], "there are no consumers to run"),
        ],
    )
    async def test_names_that_are_none(self, url: str, consumers: Any, what: str) -> None:
        box, _ = self.box(url)
        with pytest.raises(ConfigurationError, match=what):
            async with lifespan(box, consumers=consumers, also=migrated(box))(None):
                pass
        with pytest.raises(ConfigurationError, match="there are no consumers to run"):
            async with lifespan(Pillarbox(url), consumers=True)(None):
                pass

    async def test_one_that_cannot_run_keeps_the_application_from_starting(self, url: str) -> None:
        box, _ = self.box(url)
        box.consumer("idle", source="broker", topics=["counted"])
        with pytest.raises(ConfigurationError, match="consumer idle has no handler"):
            async with lifespan(box, consumers=True, also=migrated(box))(None):
                pass
        assert not any(consumer.alive for consumer in box.consumers.values())


class Measured(IntegrationEvent, name="tests.fastapi.measured"):
    value: float | datetime | str


class TestUnitOfWork:
    @pytest.mark.parametrize("value", [float("nan"), datetime(1999, 1, 1), "secret\0"])  # noqa: DTZ001  that is the point
    async def test_what_no_event_can_hold_is_422_and_only_its_place_is_told(
        self, url: str, value: float | datetime | str
    ) -> None:
        app = FastAPI(exception_handlers=error_handlers)

        @app.post("/")
        async def measure() -> None:
            async with box.unit_of_work() as uow:
                uow.publish(Measured(value=value), key="k")

        async with Pillarbox(url) as box, client(app) as asking:
            answer = await asking.post("/")
        assert answer.status_code == 422
        assert answer.json() == {"detail": "value: this value cannot be part of an event"}

    @pytest.mark.parametrize(
        ("error", "status", "detail"),
        [
            (InvalidCursorError("this cursor is damaged"), 422, "this cursor is damaged"),
            (
                TenancyError("table orders, tenant acme"),
                403,
                "this is not possible for this tenant, or without a tenant",
            ),
        ],
    )
    async def test_a_bad_cursor_is_422_and_what_a_tenant_may_not_do_is_403(
        self, error: Exception, status: int, detail: str
    ) -> None:
        app = FastAPI(exception_handlers=error_handlers)

        @app.get("/")
        async def fail() -> None:
            raise error

        async with client(app) as asking:
            answer = await asking.get("/")
        assert (answer.status_code, answer.json()) == (status, {"detail": detail})

    def test_a_websocket_is_told_how_to_do_it(self, url: str) -> None:
        work, app = unit_of_work(Pillarbox(url)), FastAPI()

        async def endpoint(socket: WebSocket, uow: Any = work) -> None:  # noqa: ARG001  never reached
            await socket.accept()

        app.add_api_websocket_route("/", endpoint)
        refused = pytest.raises(ConfigurationError, match="open one per message")
        with TestClient(app) as asking, refused, asking.websocket_connect("/"):
            pass


FORKED = """
import asyncio, os, sys
from sqlalchemy import text
from pillarbox import Pillarbox

box = Pillarbox(sys.argv[1])

async def use():
    async with box.unit_of_work() as uow:
        await uow.session.execute(text("SELECT 1"))

def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
            print("fine", flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)

async def alive():
    async with box:
        await use()

in_child(lambda: asyncio.run(alive()))   # made before the fork, started after it

async def preloaded():
    async with box:
        await use()
        for work in (box.unit_of_work, box.relay, lambda: box.engine):
            in_child(work)
        await use()

asyncio.run(preloaded())
in_child(lambda: asyncio.run(alive()))   # stopped before the fork
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_h95_a_box_that_was_started_before_a_fork_is_refused_after_it(url: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    first, *refused, last = done.stdout.splitlines()
    assert (first, last, len(refused)) == ("fine", "fine", 3)
    for line in refused:
        assert re.match(r"SessionError the box was started by process \d+, and this is process \d+", line)


def test_without_fastapi_the_command_is_named() -> None:
    program = "import sys; sys.modules['fastapi'] = None; import pillarbox.fastapi"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "MissingExtraError" in done.stderr
    assert "pip install 'pillarbox[fastapi]'" in done.stderr
