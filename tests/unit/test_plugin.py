"""The pytest plugin: a service's own box in a test, with brokers in memory, in whatever way async tests are run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import String, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Event, IntegrationEvent, MessageContext, Pillarbox, Reject, RetryPolicy, Route, UnitOfWork
from pillarbox.errors import ConfigurationError
from pillarbox.testing.harness import HandlerFailedError, Harness, PillarboxConfig
from pillarbox.transport import Capabilities, Subscription
from pillarbox.transports.logging import LoggingTransport
from pillarbox.transports.memory import MemoryTransport
from tests.conftest import FreshDatabase

# -- a service as people have it: everything is made when the module is imported ---------------------------------------


class Ordered(IntegrationEvent, name="test.plugin.ordered"):
    order: str
    cents: int


class Invoiced(IntegrationEvent, name="test.plugin.invoiced"):
    order: str


class Archived(IntegrationEvent, name="test.plugin.archived"):
    order: str


class Counted(Event, name="test.plugin.counted"):
    order: str


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoices"

    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[str] = mapped_column(String(100))
    cents: Mapped[int]


real = LoggingTransport()
box = Pillarbox(
    "postgresql://nobody.invalid/orders",
    transports={"pulsar": MemoryTransport(Capabilities(max_body_bytes=5_000)), "audit": real},
    routes=[
        Route("test.plugin.ordered", to="pulsar", topic="orders"),
        Route("test.plugin.invoiced", to="pulsar", topic="invoices"),
        Route("test.plugin.*", to="audit", topic="audit"),
    ],
)
billing = box.consumer("billing", source="pulsar", topics=["orders"], retry=RetryPolicy(base=300, cap=300))
statistics = box.consumer("statistics", source="outbox")
mails: list[str] = []
counted: list[str] = []
trouble: dict[str, Exception] = {}


@billing.on(Ordered)
async def issue(event: Ordered, uow: UnitOfWork) -> None:
    if event.cents < 0:
        raise Reject("no money is owed")
    uow.add(Invoice(order=event.order, cents=event.cents))
    uow.publish(Invoiced(order=event.order), key=event.order)
    if error := trouble.get("billing"):
        raise error


@statistics.on(Counted)
async def count(event: Counted) -> None:
    if error := trouble.get("statistics"):
        raise error
    counted.append(event.order)


@box.subscribe(Invoiced, name="mail")
async def mail(event: Invoiced) -> None:
    if error := trouble.get("mail"):
        raise error
    mails.append(event.order)


async def place(*orders: str, cents: int = 100) -> None:
    async with box.unit_of_work() as uow:
        for order in orders:
            uow.publish(Ordered(order=order, cents=cents), key=order)
            uow.publish(Counted(order=order), key=order)


async def invoices() -> list[str]:
    async with box.unit_of_work() as uow:
        return [*await uow.session.scalars(select(Invoice.order).order_by(Invoice.id))]


# -- its tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pillarbox_config() -> PillarboxConfig:
    return PillarboxConfig(box=box, metadata=Base.metadata)


@pytest.fixture(autouse=True)
def as_before() -> None:
    for kept in (mails, counted, trouble):
        kept.clear()


async def test_what_a_command_publishes(pillarbox: Harness) -> None:
    await place("o-1")
    pillarbox.assert_nothing_published()
    done = await pillarbox.drain()
    [event] = pillarbox.assert_published(Ordered, order="o-1", times=1)
    assert event.cents == 100
    assert pillarbox.published(Ordered) == [Ordered(order="o-1", cents=100)]
    assert [type(event) for event in pillarbox.published()] == [Ordered, Invoiced]
    pillarbox.assert_nothing_published(Counted)
    assert (done.handled, done.duplicates, done.spilled, done.failures) == (3, 0, 0, 0)


async def test_a_drain_goes_on_until_nothing_is_left_anywhere(pillarbox: Harness) -> None:
    await place("o-1", "o-2")
    await pillarbox.drain()
    assert (await invoices(), mails, counted) == (["o-1", "o-2"], ["o-1", "o-2"], ["o-1", "o-2"])
    assert (await pillarbox.drain()).sent == 0


async def test_an_event_is_delivered_without_an_outbox(pillarbox: Harness) -> None:
    event = Ordered(order="o-1", cents=5)
    first = await pillarbox.deliver(event)
    again = await pillarbox.deliver(event, consumer="billing")
    assert (first.handled, again.handled, again.duplicates) == (1, 0, 1)
    assert await invoices() == ["o-1"]
    await pillarbox.deliver(Counted(order="o-2"), consumer=statistics)
    await pillarbox.deliver(Invoiced(order="o-3"))
    assert (counted, mails) == (["o-2"], ["o-3"])
    pillarbox.assert_nothing_published()
    await pillarbox.drain()
    pillarbox.assert_published(Invoiced, order="o-1", times=1)
    pillarbox.assert_nothing_published(Ordered)


async def test_nobody_is_there_for_an_event(pillarbox: Harness) -> None:
    with pytest.raises(ConfigurationError, match=r"has a handler for 'test\.plugin\.archived'"):
        await pillarbox.deliver(Archived(order="o-1"))
    with pytest.raises(
        ConfigurationError, match="no consumer is called 'bilings'; known are: billing, mail, statistics"
    ):
        await pillarbox.deliver(Ordered(order="o-1", cents=1), consumer="bilings")


async def test_what_another_service_sends_is_not_what_we_publish(pillarbox: Harness) -> None:
    await pillarbox.send(Ordered(order="o-1", cents=1), topic="orders", key="o-1", broker="pulsar")
    await pillarbox.drain()
    assert await invoices() == ["o-1"]
    assert pillarbox.published() == [Invoiced(order="o-1")]


# -- what it says ------------------------------------------------------------------------------------------------------


async def test_a_failed_assertion_shows_what_was_published_instead(pillarbox: Harness) -> None:
    await place("o-1")
    await pillarbox.drain()
    with pytest.raises(AssertionError) as caught:
        pillarbox.assert_published(Ordered, order="o-1", cents=99, times=1)
    assert str(caught.value).splitlines() == [
        "expected Ordered(order='o-1', cents=99) 1 times, found 0; published were:",
        "  Ordered(order='o-1', cents=100)",
        "    cents: 100, expected 99",
        "  Invoiced(order='o-1')",
    ]
    with pytest.raises(AssertionError, match="that nothing is published; published were:\n  Ordered"):
        pillarbox.assert_nothing_published()
    with pytest.raises(TypeError, match="Ordered has no field 'cent'; it has: cents, event_id, occurred_at, order"):
        pillarbox.assert_published(Ordered, cent=100)


async def test_a_test_that_forgot_to_drain_is_told_so(pillarbox: Harness) -> None:
    await place("o-1")
    with pytest.raises(AssertionError, match=r"found 0; nothing was published\. Was there an `await"):
        pillarbox.assert_published(Ordered)


@pytest.mark.parametrize("handler", ["billing", "statistics", "mail"])
async def test_a_handler_that_keeps_failing_fails_the_test_with_its_own_exception(
    pillarbox: Harness, handler: str
) -> None:
    trouble[handler] = KeyError("customer")
    await place("o-1")
    with pytest.raises(HandlerFailedError, match=f"{handler} cannot handle event .*: KeyError: 'customer'") as caught:
        await pillarbox.drain()
    assert caught.value.__cause__ is trouble[handler]


@pytest.mark.parametrize("handler", ["billing", "statistics", "mail"])
async def test_what_has_failed_is_there_for_the_next_drain_without_a_wait(pillarbox: Harness, handler: str) -> None:
    trouble[handler] = ConnectionError("away")
    await place("o-1")
    assert (await pillarbox.drain(strict=False)).failures >= 4
    trouble.clear()
    await pillarbox.drain()
    assert (await invoices(), counted, mails) == (["o-1"], ["o-1"], ["o-1"])


async def test_a_handler_that_delivers_with_an_error_says_so(pillarbox: Harness) -> None:
    trouble["billing"] = KeyError("customer")
    with pytest.raises(HandlerFailedError, match="KeyError: 'customer'"):
        await pillarbox.deliver(Ordered(order="o-1", cents=1))


async def test_dead_letters_can_be_read(pillarbox: Harness) -> None:
    await place("o-1", cents=-1)
    assert (await pillarbox.drain()).spilled == 1
    [letter] = await pillarbox.dead_letters(consumer="billing")
    assert (letter.reason, letter.attempts) == ("no money is owed", 1)
    assert await pillarbox.dead_letters(consumer="statistics") == []
    assert len(pillarbox.published()) == 1


# -- faults ------------------------------------------------------------------------------------------------------------


async def test_what_is_delivered_again_and_again_has_one_effect(pillarbox: Harness) -> None:
    pillarbox.duplicate(times=2)
    await place("o-1")
    done = await pillarbox.drain()
    assert (done.handled, done.duplicates) == (3, 6)
    assert (await invoices(), counted, mails) == (["o-1"], ["o-1"], ["o-1"])
    pillarbox.duplicate(times=0)
    await place("o-2")
    assert (await pillarbox.drain()).duplicates == 0


async def test_a_crash_between_the_effect_and_its_acknowledgement(pillarbox: Harness) -> None:
    pillarbox.crash_before_ack()
    done = await pillarbox.deliver(Ordered(order="o-1", cents=1))
    assert (done.handled, done.duplicates) == (1, 1)
    assert (await pillarbox.deliver(Ordered(order="o-2", cents=1))).duplicates == 0
    assert await invoices() == ["o-1", "o-2"]


async def test_a_crash_before_the_commit_undoes_the_effect_and_what_was_raised(pillarbox: Harness) -> None:
    pillarbox.crash_before_commit()
    await place("o-1")
    done = await pillarbox.drain()
    assert done.failures == 1
    assert await invoices() == ["o-1"]
    pillarbox.assert_published(Invoiced, times=1)


async def test_messages_of_different_keys_come_in_any_order(pillarbox: Harness) -> None:
    orders = [f"o-{number}" for number in range(10)]
    pillarbox.reorder(seed=1)
    for suffix in ("", " again"):
        for order in orders:
            await pillarbox.send(Ordered(order=order + suffix, cents=1), topic="orders", key=order, broker="pulsar")
    await pillarbox.drain()
    found = await invoices()
    assert sorted(found) == sorted([*orders, *(f"{order} again" for order in orders)])
    assert found[:10] != orders
    assert all(found.index(order) < found.index(f"{order} again") for order in orders)


async def test_messages_of_one_key_change_places_on_request(pillarbox: Harness) -> None:
    orders = [f"o-{number}" for number in range(10)]
    pillarbox.reorder(seed=1, within_keys=True)
    for order in orders:
        await pillarbox.send(Ordered(order=order, cents=1), topic="orders", key="same", broker="pulsar")
    await pillarbox.drain()
    found = await invoices()
    assert found != orders
    assert sorted(found) == orders


async def test_a_broker_that_is_away_gets_it_later(pillarbox: Harness) -> None:
    pillarbox.brokers["pulsar"].go_away()
    await place("o-1")
    await pillarbox.drain()
    assert await invoices() == []
    pillarbox.brokers["pulsar"].come_back()
    await pillarbox.drain()
    assert await invoices() == ["o-1"]


async def test_there_is_more_than_one_broker(pillarbox: Harness) -> None:
    with pytest.raises(ConfigurationError, match="which broker\\? known are: audit, pulsar"):
        _ = pillarbox.broker


# -- time --------------------------------------------------------------------------------------------------------------


async def test_time_stands_still_until_it_is_moved(pillarbox: Harness) -> None:
    noon = datetime(2031, 5, 1, 12, tzinfo=UTC)
    pillarbox.clock.move_to(noon)
    first = Ordered(order="o-1", cents=1)
    pillarbox.clock.advance(60)
    second = Ordered(order="o-2", cents=1)
    assert (first.occurred_at, second.occurred_at) == (noon, noon + timedelta(minutes=1))
    assert first.event_id < second.event_id
    with pytest.raises(ConfigurationError, match="has no time zone"):
        pillarbox.clock.move_to(datetime(2031, 5, 1))  # noqa: DTZ001  which is the point
    with pytest.raises(ConfigurationError, match="time does not go back"):
        pillarbox.clock.advance(-1)


async def test_a_consumer_gives_up_after_its_attempts(pillarbox: Harness) -> None:
    trouble["billing"] = KeyError("customer")
    await place("o-1")
    while not (found := await pillarbox.dead_letters(consumer="billing")):
        with pytest.raises(HandlerFailedError, match="KeyError: 'customer'"):
            await pillarbox.drain()
    [letter] = found
    assert letter.attempts > 1
    assert "KeyError" in letter.reason
    trouble.clear()
    assert (await pillarbox.drain()).handled == 0


# -- the box -----------------------------------------------------------------------------------------------------------


async def test_the_limits_of_the_real_transport_hold(pillarbox: Harness) -> None:
    assert pillarbox.brokers["pulsar"].capabilities.max_body_bytes == 5_000
    assert pillarbox.brokers["pulsar"] is box.transports["pulsar"]


def test_a_box_is_afterwards_what_it_was(tmp_path: Path) -> None:
    consumers = [billing, box.handlers["mail"]]
    before, of_consumers, routes = {**vars(box)}, [{**vars(it)} for it in consumers], [*box.router.records]
    threads = {*threading.enumerate()}

    def more(it: Pillarbox) -> None:
        it.subscribe(Ordered, name="handler of the test")(mails.append)
        it.consumer("of the test", source="pulsar", topics=["orders"]).on(Ordered)(issue)

    async def test(number: int) -> None:
        (tmp_path / str(number)).mkdir()
        config = PillarboxConfig(box=box, metadata=[Base.metadata], setup=more)
        async with Harness(config, tmp_path / str(number)) as harness:
            assert "of the test" in box.consumers
            await place("o-1")
            await harness.drain()
            assert sorted(await invoices()) == ["o-1", "o-1"]

    for number in range(2):  # each in a loop of its own
        asyncio.run(test(number))
    assert vars(box) == before
    assert [vars(it) for it in consumers] == of_consumers
    assert [*box.router.records] == routes
    for thread in {*threading.enumerate()} - threads:
        thread.join(10)  # a connection's thread ends a moment after it
    assert {*threading.enumerate()} <= threads


async def test_a_box_that_runs_already_is_left_alone(pillarbox: Harness, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the box is started already"):
        await Harness(PillarboxConfig(box=pillarbox.box), tmp_path).start()


async def test_a_setup_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(_box: Pillarbox) -> None:
        raise LookupError("no such thing")

    harness = Harness(PillarboxConfig(box=lambda: box, setup=fail), tmp_path)
    with pytest.raises(LookupError):
        await harness.start()
    assert not harness.started
    assert not box._started


async def test_a_new_box_has_the_transports_that_its_routes_and_consumers_name(tmp_path: Path) -> None:
    heard: list[str] = []

    async def listen(it: Pillarbox) -> None:
        @it.consumer("shipping", source="others", topics=["orders"]).on(Ordered)
        async def ship(event: Ordered) -> None:
            heard.append(event.order)

    routes = [Route("test.plugin.ordered", to="kafka", topic="orders", name="plugin orders")]
    config = PillarboxConfig(routes=routes, transports=["others"], setup=listen)
    async with Harness(config, tmp_path) as harness:
        assert sorted(harness.brokers) == ["kafka", "others"]
        await harness.send(Ordered(order="o-1", cents=1), topic="orders", broker="others")
        await harness.drain()
        late = harness.box.consumer("late", source="others", topics=["orders"])

        @late.on(Ordered)
        async def ship_late(event: Ordered) -> None:
            heard.append(f"late {event.order}")

        await harness.drain()
    assert heard == ["o-1", "late o-1"]
    with pytest.raises(ConfigurationError, match="give it alone"):
        Harness(PillarboxConfig(box=box, routes=routes), tmp_path)


async def test_a_box_with_tenants(tmp_path: Path) -> None:
    seen: list[tuple[str | None, str]] = []
    routes = [Route("test.plugin.ordered", to="broker", topic="{tenant}", name="by tenant")]
    strict = Pillarbox(
        transports={"broker": MemoryTransport()}, routes=routes, tenancy="required", row_security=True, shards=2
    )

    @strict.consumer("tenants", source="broker", topics=["acme", "globex"]).on(Ordered)
    async def see(_event: Ordered, context: MessageContext) -> None:
        seen.append((context.tenant, context.key))

    @strict.consumer("by-template", source="broker", topics=["orders.{tenant}.{aggregate}"]).on(Ordered)
    async def see_topic(_event: Ordered, context: MessageContext) -> None:
        seen.append((context.tenant, context.topic))

    async with Harness(PillarboxConfig(box=strict), tmp_path) as harness:
        async with strict.unit_of_work(tenant="acme") as uow:
            uow.publish(Ordered(order="o-1", cents=1), key="k-1")
        await harness.drain()
        await harness.deliver(Ordered(order="o-2", cents=1), consumer="tenants", key="k-2", tenant="globex")
        await harness.send(Ordered(order="o-3", cents=1), topic="acme", key="k-3", tenant="acme")
        await harness.drain()
        await harness.deliver(Ordered(order="o-4", cents=1), consumer="by-template", tenant="globex")
        harness.assert_published(Ordered, order="o-1", times=1)
    assert seen == [("acme", "k-1"), ("globex", "k-2"), ("acme", "k-3"), ("globex", "orders.globex.plugin")]
    assert strict._row_security


class Elsewhere:
    """A subscriber that is no transport."""

    async def subscribe(self, topics: Sequence[str], group: str) -> Subscription:
        raise AssertionError(f"{group} is not to connect for {topics}")


async def test_a_subscriber_that_is_no_transport_gets_what_is_routed_to_its_topics(tmp_path: Path) -> None:
    heard: list[str] = []

    def services() -> Pillarbox:
        routes = [Route("test.plugin.ordered", to="b", topic="orders", name="to b")]
        made = Pillarbox(transports={"a": MemoryTransport(), "b": MemoryTransport()}, routes=routes)
        for name, topic in (("ours", "orders"), ("theirs", "elsewhere")):

            @made.consumer(name, source=Elsewhere(), topics=[topic]).on(Ordered)
            async def hear(event: Ordered, context: MessageContext) -> None:
                heard.append(f"{context.consumer} {event.order}")

        return made

    async with Harness(PillarboxConfig(box=services), tmp_path) as harness:
        async with harness.box.unit_of_work() as uow:
            uow.publish(Ordered(order="o-1", cents=1), key="o-1")
        await harness.send(Ordered(order="o-2", cents=1), topic="elsewhere", broker="theirs")
        await harness.drain()
    assert sorted(heard) == ["ours o-1", "theirs o-2"]


@pytest.mark.parametrize("kind", ["embedded", pytest.param("mariadb", marks=pytest.mark.elsewhere)])
async def test_a_database_of_ones_own(fresh_database: FreshDatabase, kind: str, tmp_path: Path) -> None:
    config = PillarboxConfig(box=box, metadata=Base.metadata, url=fresh_database(kind, empty=True).url())
    async with Harness(config, tmp_path) as harness:
        trouble["statistics"] = trouble["mail"] = ConnectionError("away")
        await place("o-1", "o-2")
        await harness.drain(strict=False)
        assert (sorted(await invoices()), counted) == (["o-1", "o-2"], [])
        trouble.clear()
        await harness.drain()
        assert sorted(counted) == ["o-1", "o-2"]


# -- however tests are run ---------------------------------------------------------------------------------------------

SERVICE = """
import asyncio

import pytest

from pillarbox import IntegrationEvent, Pillarbox, Route
from pillarbox.testing.harness import PillarboxConfig
from pillarbox.transports.memory import MemoryTransport


class Placed(IntegrationEvent, name="test.plugin.placed"):
    order: str


box = Pillarbox(transports={"pulsar": MemoryTransport()}, routes=[Route("test.**", to="pulsar", topic="orders")])
billing = box.consumer("billing", source="pulsar", topics=["orders"])
handled = []


@billing.on(Placed)
async def handle(event):
    handled.append(event.order)


async def place(order):
    async with box.unit_of_work() as uow:
        uow.publish(Placed(order=order), key=order)


@pytest.fixture
def pillarbox_config():
    return PillarboxConfig(box=box)

"""
ASYNC_TESTS = """
@pytest.fixture
async def an_order(pillarbox):
    await pillarbox.start()  # the test has not begun
    await place("o-0")
    yield "o-0"


class TestOrders:
    @pytest.mark.parametrize("number", [1, 2])
    async def test_each_has_a_loop_of_its_own(self, pillarbox, number):
        await place(f"o-{number}")
        pillarbox.duplicate()
        await pillarbox.drain()
        pillarbox.assert_published(Placed, order=f"o-{number}", times=1)
        assert handled[-1] == f"o-{number}"


async def test_with_a_fixture(an_order, pillarbox):
    await pillarbox.drain()
    pillarbox.assert_published(Placed, order=an_order)


async def test_without_it():
    assert not box._started
"""


def run_pytest(folder: Path, source: str, *options: str) -> str:
    """Run a file of tests as its author would; what pytest prints comes back. Warnings are errors."""
    (folder / "test_orders.py").write_text(source, "utf-8")
    command = [sys.executable, "-W", "error", "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


ASYNCIO = ("-p", "no:anyio", "-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")
ANYIO = ("-p", "no:asyncio")
NEITHER = ("-p", "no:asyncio", "-p", "no:anyio")


def test_with_pytest_asyncio(tmp_path: Path) -> None:
    not_async = """

def test_that_does_not_run_what_a_fixture_has_started(an_order, pillarbox):
    assert pillarbox.started
"""
    printed = run_pytest(tmp_path, SERVICE + ASYNC_TESTS + not_async, *ASYNCIO)
    assert "5 passed in" in printed, printed


def test_with_anyio(tmp_path: Path) -> None:
    backend = """
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"

"""
    broken = """

@pytest.fixture
async def broken(an_order):
    raise LookupError("no such order")


async def test_that_never_begins(broken):
    pass
"""
    printed = run_pytest(tmp_path, SERVICE + backend + ASYNC_TESTS + broken, *ANYIO)
    assert "4 passed, 1 error in" in printed, printed
    assert "LookupError: no such order" in printed, printed


def test_without_a_plugin_for_async_tests(tmp_path: Path) -> None:
    tests = """
def test_by_hand(pillarbox):
    async def test():
        async with pillarbox:
            await place("o-1")
            await pillarbox.drain()

    asyncio.run(test())
    pillarbox.assert_published(Placed, order="o-1", times=1)


def test_that_never_starts_it(pillarbox):
    assert not pillarbox.started
"""
    printed = run_pytest(tmp_path, SERVICE + tests, *NEITHER)
    assert "2 passed in" in printed, printed


def test_a_failure_is_shown_in_the_words_of_the_test(tmp_path: Path) -> None:
    tests = """
async def test_wrong(pillarbox):
    await place("o-1")
    await pillarbox.drain()
    pillarbox.assert_published(Placed, order="o-2")
"""
    printed = run_pytest(tmp_path, SERVICE + tests, *ASYNCIO)
    assert "E           order: 'o-1', expected 'o-2'" in printed, printed
    assert "harness.py" not in printed, printed


def test_those_who_do_not_use_it_load_nothing(tmp_path: Path) -> None:
    tests = """
import sys


def test_what_is_loaded():
    assert "pillarbox.testing.plugin" in sys.modules
    assert not {"sqlalchemy", "msgspec", "alembic", "pydantic", "aiosqlite"} & sys.modules.keys()
    assert not {"pillarbox.app", "pillarbox.testing.harness"} & sys.modules.keys()
"""
    printed = run_pytest(tmp_path, tests, *NEITHER)
    assert "1 passed in" in printed, printed
