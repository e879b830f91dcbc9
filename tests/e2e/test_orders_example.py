"""``examples/orders`` over HTTP, in real processes; and its README, command by command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from uuid import uuid4

import httpx
import pytest

from examples.orders.transport import WarehouseTransport
from pillarbox import Message
from pillarbox.transport import Outcome, Verdict
from tests.readme import Reader, dead_links
from tests.servers import Database, DatabaseServer, Server, wait_until
from tests.web import ROOT, Process, environment, free_port

README = ROOT / "examples" / "orders" / "README.md"
TEA = {"customer": "Ada", "article": "tea", "quantity": 2, "total_cents": 840}


class Town:
    """The service and the warehouse, each to be started when it is time."""

    def __init__(self, folder: Path, **variables: str) -> None:
        ports = {"orders": free_port(), "orders.warehouse": free_port()}
        warehouse = f"http://127.0.0.1:{ports['orders.warehouse']}"
        self.environment = environment("DATABASE_URL") | {"WAREHOUSE_URL": warehouse} | variables
        self.service, self.warehouse = (
            Process(
                ["-m", f"examples.{name}", "--port", str(port)],
                port,
                folder / name,
                environment=self.environment,
                path="/openapi.json",
            )
            for name, port in ports.items()
        )
        self._started: list[Process] = []

    def start(self, process: Process) -> None:
        process.start()
        self._started.append(process)

    def stop(self) -> None:
        for process in self._started:
            process.stop()


class TestOverHTTP:
    @pytest.fixture
    def town(self, postgres_database: Database, tmp_path: Path) -> Iterator[Town]:
        town = Town(tmp_path, DATABASE_URL=postgres_database.url())
        try:
            yield town
        finally:
            town.stop()

    @pytest.fixture
    def service(self, town: Town) -> Iterator[httpx.Client]:
        town.start(town.service)
        with httpx.Client(base_url=town.service.url) as client:
            yield client

    def test_the_life_of_an_order(self, town: Town, service: httpx.Client) -> None:
        town.start(town.warehouse)
        placed = service.post("/orders", json=TEA)
        assert placed.status_code == 201
        order = f"/orders/{placed.json()['id']}"
        assert service.get(order).json() == placed.json()
        repriced = service.put(f"{order}/price", json={"total_cents": 800, "version": 1})
        assert (repriced.status_code, repriced.json()["total_cents"], repriced.json()["version"]) == (200, 800, 2)
        assert service.post(f"{order}/cancel").json()["status"] == "cancelled"
        assert [found["customer"] for found in service.get("/orders", params={"customer": "Ada"}).json()] == ["Ada"]
        assert service.get("/orders", params={"customer": "Bob"}).json() == []
        notices = ["Thank you for ordering 2 x tea.", "Your order costs 8.00 now.", "Your order is cancelled."]
        wait_until(lambda: service.get(f"{order}/notices").json() == notices, "three notices")
        events = ["orders.order.placed", "orders.order.cancelled"]
        wait_until(lambda: httpx.get(f"{town.warehouse.url}/events").json() == events, "the warehouse to know")

    def test_what_is_refused_changes_nothing(self, service: httpx.Client) -> None:
        order = f"/orders/{service.post('/orders', json=TEA).json()['id']}"
        assert service.put(f"{order}/price", json={"total_cents": 1, "version": 7}).status_code == 409
        assert service.post(f"{order}/cancel").status_code == 200
        refused = service.put(f"{order}/price", json={"total_cents": 1})
        assert (refused.status_code, refused.json()) == (409, {"detail": "the order is cancelled"})
        assert service.post(f"{order}/cancel").status_code == 409
        assert service.get(order).json()["total_cents"] == 840
        assert service.get(f"/orders/{uuid4()}").status_code == 404
        assert service.post("/orders", json=TEA | {"quantity": 0}).status_code == 422
        assert len(service.get("/orders").json()) == 1

    def test_what_the_database_cannot_keep_is_refused(self, service: httpx.Client) -> None:
        amounts: list[dict[str, object]] = [{"quantity": 1_000}, {"total_cents": 2**31}, {"total_cents": -1}]
        texts: list[dict[str, object]] = [{"customer": "A\0da"}, {"article": "\0"}, {"article": ""}]
        for wrong in amounts + texts:
            assert service.post("/orders", json=TEA | wrong).status_code == 422, wrong
        assert service.post("/orders", json=TEA | {"total_cents": 2**31 - 1}).status_code == 201
        assert service.put(f"/orders/{uuid4()}/price", json={"total_cents": 2**31}).status_code == 422
        assert service.get("/orders", params={"customer": "\0"}).status_code == 422


class TestTheWayToTheWarehouse:
    @pytest.fixture
    def warehouse(self) -> Iterator[Callable[[int], str]]:
        """Somebody who answers every event with this status; its URL comes back."""
        servers: list[ThreadingHTTPServer] = []

        def answering(status: int) -> str:
            class Answer(BaseHTTPRequestHandler):
                def do_POST(self) -> None:
                    self.rfile.read(int(self.headers["content-length"]))
                    self.send_response(status)
                    self.send_header("content-length", "0")
                    self.end_headers()

                def log_message(self, *_: object) -> None:
                    """Nothing is printed."""

            servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Answer))
            Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            return f"http://127.0.0.1:{servers[-1].server_port}"

        yield answering
        for server in servers:
            server.shutdown()
            server.server_close()

    async def send(self, transport: WarehouseTransport) -> Outcome:
        message = Message("orders", "o-1", b"{}", {"event_id": "1", "event_type": "orders.order.placed"})
        try:
            return await transport.send("lane", [message])
        finally:
            await transport.close()

    @pytest.mark.parametrize("status", [408, 425, 429, 503])
    async def test_come_back_later_is_no_refusal(self, warehouse: Callable[[int], str], status: int) -> None:
        outcome = await self.send(WarehouseTransport(warehouse(status)))
        assert (outcome.unfinished, list(outcome.rejected)) == (Verdict.UNAVAILABLE, [])
        assert str(status) in outcome.reason

    async def test_what_is_wrong_with_the_event_is_one(self, warehouse: Callable[[int], str]) -> None:
        outcome = await self.send(WarehouseTransport(warehouse(422)))
        assert (outcome.unfinished, [each.index for each in outcome.rejected]) == (None, [0])

    def test_it_has_more_lives_than_one(self, warehouse: Callable[[int], str]) -> None:
        transport = WarehouseTransport(warehouse(204))
        assert [list(asyncio.run(self.send(transport)).accepted) for _ in range(2)] == [[0], [0]]


class OrdersReader(Reader):
    """Knows the order that was placed last, and its event."""

    def __init__(self, town: Town) -> None:
        starts = {"make example": town.service, "python -m examples.orders.warehouse": town.warehouse}
        super().__init__(
            README, town.environment, {line: partial(town.start, process) for line, process in starts.items()}
        )
        self._addresses = {"localhost:8000": town.service.url, "localhost:8001": town.warehouse.url}
        self._order = ""

    def filled_in(self, command: str) -> str:
        for address, url in self._addresses.items():
            command = command.replace(address, url.removeprefix("http://"))
        if "EVENT_ID" in command:
            command = command.replace("EVENT_ID", self._newest_event())
        return command.replace("ORDER_ID", self._order)

    def note(self, command: str, printed: str) -> None:
        if " --json " in command:
            self._order = json.loads(printed)["id"]

    def _newest_event(self) -> str:
        """What a reader finds in the column EVENT."""
        listed = self.call("pillarbox outbox list --json --type orders.order.placed")
        event: str = max(json.loads(listed)["deliveries"], key=lambda found: int(found["id"]))["event_id"]
        return event


def test_the_links_of_the_readme_lead_somewhere() -> None:
    assert dead_links(README) == []


def test_the_readme_is_true(tmp_path: Path, use_server: Callable[[str], Server]) -> None:
    server = use_server("embedded")
    assert isinstance(server, DatabaseServer)
    server.drop("pillarbox")  # as a newcomer has it
    town = Town(tmp_path)
    try:
        OrdersReader(town).follow()
        assert f"open {town.service.url}/docs " in town.service.log.read_text("utf-8")
        assert httpx.get(f"{town.service.url}/docs").is_success
    finally:
        town.stop()
