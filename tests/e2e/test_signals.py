"""A real Prometheus scrapes a real relay, and finds every metric of the list, with values that the sink confirms."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import urlopen

import pytest

from pillarbox.telemetry import METRICS, SPILLED
from tests.servers import Database, Prometheus, wait_until

PILLARBOX = str(Path(sys.executable).with_name("pillarbox"))

SHOP = '''
"""Orders, a sink that is a file, and a handler that answers each order with an invoice."""

import os
from pathlib import Path

from pillarbox import IntegrationEvent, Pillarbox, RetryPolicy, Route
from pillarbox.transport import Capabilities, Outcome, Rejection, Verdict


class Placed(IntegrationEvent, name="shop.order.placed"):
    number: int


class Billed(IntegrationEvent, name="shop.invoice.billed"):
    number: int


class Sink:
    capabilities = Capabilities(max_messages=1)
    away = True

    def preflight(self, message):
        return None

    async def open(self, producer, topics):
        return {}

    async def send(self, producer, messages):
        if self.away:
            self.away = False
            return Outcome((), unfinished=Verdict.UNAVAILABLE, reason="not yet")
        if messages[0].key == "poison":
            return Outcome((), [Rejection(0, "poison with password=geheim")])
        with open("sink", "a") as file:
            file.write(messages[0].key + "\\n")
        return Outcome([0])

    async def close(self, producer=None):
        pass


retry = RetryPolicy(base=0.01, cap=0.01, attempts=2)
box = Pillarbox(
    os.environ["SHOP_DATABASE"],
    transports={"sink": Sink()},
    routes=[Route("shop.**", to="sink", topic="shop.events", name="shop", retry=retry)],
)


@box.subscribe(Placed, name="bill")
async def bill(event):
    async with box.unit_of_work() as uow:
        uow.publish(Billed(number=event.number), key=f"invoice-{event.number}")


async def fill():
    async with box:
        await box.migrate()
        for number in range(5):
            async with box.unit_of_work(tenant="secret-tenant") as uow:
                uow.publish(Placed(number=number), key="poison" if number == 4 else f"secret-{number}")


if __name__ == "__main__":
    import asyncio

    asyncio.run(fill())
'''


@pytest.fixture
def environment(tmp_path: Path, postgres_database: Database) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PILLARBOX_")}
    (tmp_path / "shop.py").write_text(SHOP)
    url = postgres_database.url()
    return kept | {"PILLARBOX_HOME": os.environ["PILLARBOX_HOME"], "SHOP_DATABASE": url, "PILLARBOX_LOG_FORMAT": "json"}


@pytest.fixture
def relay(tmp_path: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    subprocess.run([sys.executable, "shop.py"], cwd=tmp_path, env=environment, check=True)
    process = subprocess.Popen(
        [PILLARBOX, "relay", "shop:box", "--http", "127.0.0.1:0", "--json"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=60)


def first_answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The document that a relay prints when it runs."""
    assert process.stdout is not None
    lines = ""
    for line in process.stdout:
        lines += line
        if line.startswith("}"):
            found: dict[str, Any] = json.loads(lines)
            return found
    raise AssertionError(f"it ended: {process.stderr.read() if process.stderr else ''}")


def ask(address: str, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(get(f"{address}/api/v1/query?query={quote(query)}"))["data"]["result"]
    return found


def get(url: str) -> bytes:
    with urlopen(url, timeout=10) as answer:  # noqa: S310  it is on loopback
        body: bytes = answer.read()
    return body


def total(address: str, query: str) -> float | None:
    found = ask(address, f"sum({query})")
    return float(found[0]["value"][1]) if found else None


def test_m1_every_metric_is_found_by_a_real_prometheus(
    tmp_path: Path, relay: subprocess.Popen[str], prometheus: Prometheus
) -> None:
    http = first_answer(relay)["http"]
    sent = 4 + 5  # the orders but for the dead one, and an invoice for each of them
    with prometheus.scraping(urlsplit(http).netloc) as address:
        wait_until(lambda: total(address, 'outbox_publish_success_total{route="shop"}') == sent, "all to be sent")
        wait_until(lambda: total(address, "outbox_max_delivery_attempts") == 1, "the dead one to be counted")
        for metric in METRICS:
            if metric.name.startswith(("outbox_stream", "outbox_slot")):
                continue  # this relay has no stream: test_relay_command.py has one that does
            if metric.labels[:1] == ("consumer",):
                continue  # of consumers: see below
            name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
            found = ask(address, name)
            assert found, metric.name
            labels = set(found[0]["metric"]) - {"__name__", "instance", "job"}
            assert labels == {*metric.labels}, metric.name
        assert len((tmp_path / "sink").read_text().splitlines()) == sent
        assert total(address, "outbox_new_total") == 5  # those of this process: the invoices
        assert total(address, "outbox_err_total") == 1
        assert total(address, "outbox_publish_error_total") == 2
        assert total(address, "outbox_publish_unfinished_total") == 1
        assert total(address, "outbox_pending_count") == 0
        assert total(address, "outbox_lanes_held") == 32
        assert total(address, "outbox_lanes_unowned") == 0
        assert total(address, 'outbox_publish_latency_seconds_count{route="shop"}') == sent
    text = get(f"{http}/metrics").decode()
    # The one name that promtool does not like is the one that the name's readers expect.
    complaints = prometheus.check(text).splitlines()
    assert [line for line in complaints if not line.startswith("outbox_pending_count ")] == []
    assert "secret" not in text
    assert "geheim" not in text
    relay.send_signal(signal.SIGTERM)
    _, errors = relay.communicate(timeout=60)
    logged = [json.loads(line) for line in errors.splitlines()]
    assert [line["attempts"] for line in logged if line.get("event") == "delivery.dead"] == [2]
    assert "geheim" not in errors


DESK = '''
"""A projection that gets the service's own events, a hole in them, and a consumer that refuses some."""

import os

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Aggregate, IntegrationEvent, Pillarbox, Projection, ProjectionRow, Reject, on


class Counted(IntegrationEvent, name="desk.item.counted"):
    item: int
    amount: int


class Base(DeclarativeBase):
    pass


class Item(Aggregate, Base):
    __tablename__ = "items"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}


class ItemRow(ProjectionRow, Base):
    __tablename__ = "item_amounts"
    item: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]


class Amounts(Projection, row=ItemRow):
    @on(Counted)
    def counted(self, event):
        return self.put(item=event.item, amount=event.amount)


box = Pillarbox(os.environ["SHOP_DATABASE"])
box.projection(Amounts, source="outbox")
clerk = box.consumer("clerk", source="outbox")


@clerk.on(Counted)
async def refuse(event: Counted):
    if event.amount == 2:
        raise Reject("two is refused")


async def fill():
    async with box:
        await box.migrate()
        async with box.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with box.unit_of_work() as uow:
            uow.session.add(Item(id=1, amount=0))  # a version of which nobody is told: a gap
        for amount in range(1, 4):
            async with box.unit_of_work() as uow:
                item = await uow.session.get(Item, 1)
                item.amount = amount
                item.raise_event(Counted(item=1, amount=amount))


if __name__ == "__main__":
    import asyncio

    asyncio.run(fill())
'''


def test_m1_every_metric_of_consumers_is_found_by_a_real_prometheus(
    tmp_path: Path, environment: dict[str, str], prometheus: Prometheus
) -> None:
    (tmp_path / "desk.py").write_text(DESK)
    subprocess.run([sys.executable, "desk.py"], cwd=tmp_path, env=environment, check=True)
    command = [PILLARBOX, "consume", "desk:box", "--http", "127.0.0.1:0", "--json"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        http = first_answer(process)["http"]
        with prometheus.scraping(urlsplit(http).netloc) as address:
            wait_until(lambda: total(address, "dlq_message_count") == 1, "the refused one to be a letter")
            applied = 'projection_process_success_total{consumer="item_amounts"}'
            wait_until(lambda: total(address, applied) == 3, "three events to be applied")
            for metric in METRICS:
                if metric.labels[:1] == ("consumer",) and metric is not SPILLED:  # what the outbox brings waits there
                    found = ask(address, f"{metric.name}_count" if metric.kind == "histogram" else metric.name)
                    assert found, metric.name
                    assert set(found[0]["metric"]) - {"__name__", "instance", "job"} == {*metric.labels}, metric.name
            assert total(address, 'projection_process_success_total{consumer="clerk"}') == 2
            assert total(address, 'projection_process_error_total{class="business"}') == 1
            assert total(address, "projection_gap_total") == 1
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate(timeout=60)
