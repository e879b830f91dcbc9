"""A relay and a real Pulsar: what is on the topic, through everything that goes wrong between them."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import IntegrationEvent, Pillarbox, RetryPolicy, Route
from pillarbox.errors import StoreError
from pillarbox.outbox import Direction, Status
from pillarbox.stores import operations
from pillarbox.stores.audit import Author
from pillarbox.stores.identity import renew
from pillarbox.stores.inspection import VIEWS, Filter
from pillarbox.stores.operations import Action, Selection
from pillarbox.testing.link import Link
from pillarbox.testing.pulsar import PulsarCluster
from pillarbox.transports.pulsar import PulsarTransport
from pillarbox.transports.pulsar.connection import Endpoint
from pillarbox.transports.pulsar.names import TopicName
from tests.conftest import FreshDatabase
from tests.integration.test_pulsar_transport import limit_messages, new_topic
from tests.prove import ack_kill
from tests.prove.ack_kill import Acknowledged, Where, compare, read_topic
from tests.relays import soon
from tests.servers import Database, Pulsar, Servers

unsent = VIEWS[Direction.OUTBOUND].unsent
LEASE = 1.0


class Placed(IntegrationEvent, name="pulsar_lane.order.placed"):
    number: int
    filling: str = ""


@dataclass
class Shop:
    """A service whose events go to Pulsar."""

    database: str
    broker: Any
    topic: str
    options: dict[str, Any] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @asynccontextmanager
    async def open(self, transport: PulsarTransport | None = None, **route: Any) -> AsyncIterator[Pillarbox]:
        transport = transport or PulsarTransport(self.broker.url, admin_url=self.broker.admin_url, **self.options)
        routes = [Route("pulsar_lane.order.*", to="pulsar", topic=self.topic, name="orders", **route)]
        async with Pillarbox(
            create_async_engine(self.database), transports={"pulsar": transport}, routes=routes
        ) as box:
            await box.migrate()
            yield box
            await box.engine.dispose()

    async def write(self, box: Pillarbox, keys: str, *, size: int = 0, tenant: str | None = None) -> None:
        async with box.unit_of_work(tenant=tenant) as uow:
            for key in keys:
                self.written[key] += 1
                uow.publish(Placed(number=self.written[key], filling="x" * size), key=key)

    async def found(self) -> dict[str, list[int]]:
        return await asyncio.to_thread(read_topic, self.broker.url, self.topic)

    async def check(self) -> None:
        """Each event is on the topic, once, in order per key."""
        found = await self.found()
        assert compare(self.written, found) == {"missing": 0, "doubled": 0, "inverted": 0, "ghosts": 0}


@pytest.fixture
def shop(postgres_database: Database, pulsar: Pulsar) -> Shop:
    return Shop(postgres_database.url(), pulsar, new_topic())


@asynccontextmanager
async def relaying(box: Pillarbox, **options: Any) -> AsyncIterator[Any]:
    relay = box.relay(lease=LEASE, **options)
    running = asyncio.create_task(relay.run())
    try:
        yield relay
    finally:
        relay.stop()
        await running


async def statuses(box: Pillarbox) -> Counter[str]:
    """How many deliveries are in which state, without those that were sent."""
    async with box.engine.connect() as connection:
        counted = sa.select(unsent.c.status, sa.func.count()).group_by(unsent.c.status)
        return Counter({status: count for status, count in (await connection.execute(counted)).all()})  # noqa: C416


async def until_sent(box: Pillarbox, *, seconds: float = 60.0) -> None:
    async def all_sent() -> bool:
        return not await statuses(box)

    await soon(all_sent, seconds=seconds)


@pytest.mark.parametrize("options", [{}, {"entries": "mixed", "compression": "zstd", "compress_from": 0}])
async def test_events_arrive_once_and_in_order(shop: Shop, options: dict[str, Any]) -> None:
    shop.options = options
    async with shop.open() as box:
        for _ in range(5):
            await shop.write(box, "abcabcaab" * 20)
        await box.relay().drain()
    await shop.check()


async def test_properties_are_the_attributes_of_the_event(shop: Shop) -> None:
    import pulsar as official

    async with shop.open() as box:
        await shop.write(box, "a", tenant="acme")
        await box.relay().drain()

    def read() -> tuple[str, dict[str, str]]:
        client = official.Client(shop.broker.url, logger=official.ConsoleLogger(official.LoggerLevel.Error))
        message = client.create_reader(shop.topic, official.MessageId.earliest).read_next(timeout_millis=10_000)
        found = message.partition_key(), message.properties()
        client.close()
        return found

    key, properties = await asyncio.to_thread(read)
    assert key == "a"
    assert properties["event_type"] == "pulsar_lane.order.placed"
    assert properties["tenant_id"] == "acme"
    assert {"event_id", "schema_version"} <= properties.keys()


# -- relays that die ---------------------------------------------------------------------------------------------------


async def test_h34_relays_die_between_acknowledgement_and_settlement(
    postgres_database: Database, pulsar: Pulsar
) -> None:
    result = await ack_kill.prove(postgres_database.url(), pulsar.url, pulsar.admin_url, kills=10, seed=7)
    assert {kind: result[kind] for kind in ("missing", "doubled", "inverted", "ghosts")} == {
        "missing": 0, "doubled": 0, "inverted": 0, "ghosts": 0
    }  # fmt: skip
    assert result["on_topic"] == result["events"] > 0


async def write(box: Pillarbox, written: dict[str, int], keys: str, *, size: int = 0) -> None:
    async with box.unit_of_work() as uow:
        for key in keys:
            written[key] += 1
            uow.publish(Acknowledged(number=written[key], filling="x" * size), key=key)


@asynccontextmanager
async def prepared(database: Database, pulsar: Pulsar) -> AsyncIterator[tuple[Pillarbox, Where]]:
    where = Where(database.url(), pulsar.url, pulsar.admin_url, new_topic())
    transport = PulsarTransport(pulsar.url, admin_url=pulsar.admin_url)
    async with ack_kill.open_box(where.database, transport, where.topic) as box:
        await box.migrate()
        yield box, where
        await box.engine.dispose()


async def test_h99_a_rejected_row_is_not_taken_for_sent(postgres_database: Database, pulsar: Pulsar) -> None:
    """The relay dies when it has heard of the rejection, and has written nothing down."""
    written: dict[str, int] = defaultdict(int)
    async with prepared(postgres_database, pulsar) as (box, where):
        await write(box, written, "a")
        await box.relay().drain()
        await limit_messages(pulsar, where.topic, 20_000)
        await write(box, written, "b", size=50_000)
        await write(box, written, "acad")
        relay = await ack_kill.start_relay(where, "rejected")
        assert await relay.wait() == -signal.SIGKILL
        await box.relay().drain()
        assert sum((await statuses(box)).values()) == 1, "it is not lost"
    found = await asyncio.to_thread(read_topic, pulsar.url, where.topic)
    assert found == {"a": [1, 2, 3], "c": [1], "d": [1]}


async def test_h108_a_sleeper_wakes_before_it_opens(postgres_database: Database, pulsar: Pulsar) -> None:
    written: dict[str, int] = defaultdict(int)
    async with prepared(postgres_database, pulsar) as (box, where):
        await write(box, written, "abc")
        sleeper = await ack_kill.start_relay(where, "open")
        try:
            await soon(lambda: _is_stopped(sleeper.pid))
            async with relaying(box):
                await until_sent(box)
                await write(box, written, "abc" * 20)
                await until_sent(box)
                sleeper.send_signal(signal.SIGCONT)
                await write(box, written, "abc" * 20)
                await until_sent(box)
            assert sleeper.returncode is None, "it goes on, and leaves the lane alone"
            await write(box, written, "abc")
            await until_sent(box)  # it is the only one now
        finally:
            sleeper.kill()
            await sleeper.wait()
    found = await asyncio.to_thread(read_topic, pulsar.url, where.topic)
    assert compare(written, found) == {"missing": 0, "doubled": 0, "inverted": 0, "ghosts": 0}


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] == "T"


# -- brokers -----------------------------------------------------------------------------------------------------------


async def test_h98_two_services_share_a_topic(shop: Shop, servers: Servers) -> None:
    """Neither throws the other out, and neither takes the other's numbers for its own."""
    other = Shop(servers.create_database("embedded").url(), shop.broker, shop.topic)
    async with shop.open() as one, other.open() as two, relaying(one), relaying(two):
        for _ in range(20):
            await asyncio.gather(shop.write(one, "abc"), other.write(two, "xyz"))
        await until_sent(one)
        await until_sent(two)
    shop.written |= other.written
    await shop.check()


@pytest.mark.every_loop
async def test_a_topic_that_is_unloaded_goes_on_at_once(shop: Shop) -> None:
    unload = f"{shop.broker.admin_url}/admin/v2/{TopicName.parse(shop.topic).path}/unload"
    async with httpx.AsyncClient(trust_env=False) as client, shop.open() as box, relaying(box):
        await shop.write(box, "abc")
        await until_sent(box)
        for _ in range(5):
            await shop.write(box, "abc" * 30)
            (await client.put(unload)).raise_for_status()
            await shop.write(box, "abc" * 30)
        await until_sent(box)
    await shop.check()


async def test_h111_a_message_over_the_limit_of_the_broker_fails_by_itself(shop: Shop) -> None:
    """The transport was told that the broker takes more than it does."""
    shop.options = {"max_message_bytes": 16 * 1_048_576}
    async with shop.open(retry=RetryPolicy(attempts=1)) as box:
        await shop.write(box, "a")
        async with box.unit_of_work() as uow:
            uow.publish(Placed(number=1, filling="x" * 6_000_000), key="large")
        await shop.write(box, "abc")
        await box.relay().drain()
        assert await statuses(box) == {Status.FAILED: 1}
    await shop.check()


async def test_h99_a_limit_that_is_lowered_while_entries_are_on_their_way_loses_nothing(
    fresh_database: FreshDatabase, pulsar: Pulsar
) -> None:
    """The entry of b is larger than the topic takes from now on, and smaller than what it took before."""
    shop = Shop(fresh_database("embedded", shards=1).url(), pulsar, new_topic())
    async with shop.open(retry=RetryPolicy(base=0.1, cap=0.1)) as box, relaying(box):
        await shop.write(box, "a", size=60_000)
        await until_sent(box)
        await limit_messages(shop.broker, shop.topic, 20_000)
        await asyncio.sleep(0.5)  # the topic hears of it after the policy can be read
        await shop.write(box, "abbc", size=12_000)
        await until_sent(box)
    await shop.check()


async def test_a_dead_event_that_is_redriven_appears_once_behind_its_predecessors(shop: Shop) -> None:
    async with shop.open(retry=RetryPolicy(attempts=1)) as box:
        await shop.write(box, "ab")
        await box.relay().drain()
        await limit_messages(shop.broker, shop.topic, 20_000)
        await shop.write(box, "b", size=50_000)
        await shop.write(box, "abab")
        await box.relay().drain()
        assert await statuses(box) == {Status.FAILED: 1, Status.PARKED: 2}
        await limit_messages(shop.broker, shop.topic, 100_000)
        async with box.engine.begin() as connection:
            selection = Selection(Action.REDRIVE, Filter(status=Status.FAILED))
            await connection.run_sync(operations.request, selection, Author("me", "mended"), operations.Run(), 10)
        await box.relay().drain()
        assert not await statuses(box)
    assert await shop.found() == {"a": [1, 2, 3], "b": [1, 2, 3, 4]}


async def test_h115_a_broker_that_has_forgotten_is_noticed(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    async with shop.open() as box:
        await shop.write(box, "abc")
        async with relaying(box):
            await until_sent(box)
            await asyncio.to_thread(_delete, shop)
            await shop.write(box, "abc")
            with caplog.at_level(logging.ERROR, "pillarbox"):
                await until_sent(box)
                await soon(lambda: "has forgotten this producer" in caplog.text)
    assert await shop.found() == {"a": [2], "b": [2], "c": [2]}


def _delete(shop: Shop) -> None:
    path = TopicName.parse(shop.topic).path
    httpx.delete(f"{shop.broker.admin_url}/admin/v2/{path}", params={"force": "true"}).raise_for_status()


async def test_h07_a_database_that_went_back_in_time_halts_and_can_go_on(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    async with shop.open() as box:
        await shop.write(box, "ab")
        await box.relay().drain()
        async with box.engine.begin() as connection:
            await connection.execute(sa.text("CREATE TABLE backup AS SELECT shard, next_number FROM pillarbox_lanes"))
        await shop.write(box, "ab")
        await box.relay().drain()
        async with box.engine.begin() as connection:  # the lane is as it was; what it sent since is forgotten
            restore = "UPDATE pillarbox_lanes l SET next_number = b.next_number FROM backup b WHERE b.shard = l.shard"
            await connection.execute(sa.text(restore))
        await shop.write(box, "ab")
        async with relaying(box):
            await soon(lambda: "went back in time" in caplog.text)
            with pytest.raises(StoreError, match="stop them first"):
                await _rename(box)
        assert "new-install-id" in caplog.text
        assert await shop.found() == {"a": [1, 2], "b": [1, 2]}, "nothing was dropped, because nothing was sent"
        assert await _rename(box), "it is in the trail"
        await box.relay().drain()
    await shop.check()


async def _rename(box: Pillarbox) -> int:
    async with box.engine.begin() as connection:
        return (await connection.run_sync(renew, Author("me", "restored")))[2]


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
async def test_a_topic_that_cannot_be_opened_holds_up_no_other(
    shop: Shop, caplog: pytest.LogCaptureFixture, guarantee: str
) -> None:
    shop.options["guarantee"] = guarantee
    tenant = f"t{uuid4().hex[:10]}"
    shop.topic = "persistent://{tenant}/default/orders"
    async with shop.open() as box:
        await shop.write(box, "ab", tenant="public")
        await shop.write(box, "ab", tenant=tenant)  # of which the broker has never heard
        await shop.write(box, "a", tenant="public")
        async with relaying(box):
            await soon(lambda: "cannot be opened" in caplog.text)

            async def only_the_others_are_sent() -> bool:
                return await statuses(box) == {Status.RETRYING: 2}

            await soon(only_the_others_are_sent)


@pytest.mark.parametrize("partitions", [4])
async def test_partitions_are_numbered_by_themselves(shop: Shop, partitions: int) -> None:
    transport = PulsarTransport(shop.broker.url, admin_url=shop.broker.admin_url)
    assert transport.admin is not None
    await transport.admin.create_topic(TopicName.parse(shop.topic), partitions)
    async with shop.open(transport) as box:
        for _ in range(3):
            await shop.write(box, "abcdefghij" * 10)
            await box.relay().drain()
        await transport.admin.grow(TopicName.parse(shop.topic), partitions + 3)
        await box.relay().drain()
    await shop.check()


# -- a cluster that is broken ------------------------------------------------------------------------------------------


async def test_h100_what_was_pushed_and_not_stored_is_not_lost(
    postgres_database: Database, pulsar_cluster: PulsarCluster
) -> None:
    """The bookie hangs, the relay reopens and is told the number that was pushed; then broker and bookie die."""
    shop = Shop(postgres_database.url(), pulsar_cluster, new_topic())
    async with Link("127.0.0.1", int(pulsar_cluster.url.rpartition(":")[2])) as link:
        here = Endpoint("127.0.0.1", link.port)
        transport = PulsarTransport(f"pulsar://{here}", admin_url=pulsar_cluster.admin_url, timeout=2.0, keep_alive=1.0)
        transport._client._through = lambda *_: here  # type: ignore[method-assign]
        async with shop.open(transport) as box, relaying(box):
            await shop.write(box, "abc")
            await until_sent(box)
            await asyncio.to_thread(pulsar_cluster.freeze_bookie)
            await shop.write(box, "abc" * 20)
            await _sending(box)
            for _ in range(3):
                link.drop()
                await asyncio.sleep(0.5)  # time to reopen, be told a number, and probe
            await asyncio.to_thread(pulsar_cluster.kill_broker)
            await asyncio.to_thread(pulsar_cluster.kill_bookie)
            await asyncio.to_thread(pulsar_cluster.start_bookie)
            await asyncio.to_thread(pulsar_cluster.start_broker)
            await shop.write(box, "abc")
            await until_sent(box, seconds=90.0)
    await shop.check()


async def _sending(box: Pillarbox) -> None:
    async def sending() -> bool:
        async with box.engine.connect() as connection:
            announced = sa.text("SELECT count(*) FROM pillarbox_lanes WHERE announced IS NOT NULL")
            return bool((await connection.execute(announced)).scalar_one() == 3)

    await soon(sending)


async def test_a_broker_that_is_killed_costs_no_event_and_no_attempt(
    postgres_database: Database, pulsar_cluster: PulsarCluster
) -> None:
    shop = Shop(postgres_database.url(), pulsar_cluster, new_topic())
    async with shop.open() as box, relaying(box):
        await shop.write(box, "abc" * 50)
        await asyncio.to_thread(pulsar_cluster.kill_broker)
        await shop.write(box, "abc" * 50)
        await asyncio.to_thread(pulsar_cluster.start_broker)
        await until_sent(box, seconds=90.0)
    await shop.check()
