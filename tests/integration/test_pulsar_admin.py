"""Pulsar's REST interface, on a real broker; and brokers that are away, refuse, or send us elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import uuid4

import httpx
import pytest

from pillarbox.errors import ConfigurationError
from pillarbox.transports.pulsar.admin import Policies, PulsarAdmin, Retention
from pillarbox.transports.pulsar.credentials import Token
from pillarbox.transports.pulsar.names import TopicName
from pillarbox.transports.pulsar.plan import Desired, apply, find, plan
from tests.servers import Pulsar
from tests.web import free_port


@pytest.fixture
async def admin(pulsar: Pulsar) -> AsyncIterator[PulsarAdmin]:
    async with PulsarAdmin(pulsar.admin_url) as admin:
        yield admin


@pytest.fixture
def topic() -> TopicName:
    """In a tenant that nobody has made yet."""
    return TopicName.parse(f"t-{uuid4().hex[:12]}/orders/events")


async def set_policy(admin: PulsarAdmin, path: str, body: str) -> None:
    """What people do with tools of their own."""
    async with httpx.AsyncClient(headers={"Content-Type": "application/json"}, trust_env=False) as client:
        (await client.post(f"{admin.url}/admin/v2/{path}", content=body)).raise_for_status()


async def deduplicates(admin: PulsarAdmin, topic: TopicName) -> bool:
    applied = await admin.deduplication_of(topic, applied=True)
    return await admin.namespace_deduplicates(topic.namespace_name) if applied is None else applied


class TestAdmin:
    async def test_tenant_namespace_topic(self, admin: PulsarAdmin, topic: TopicName) -> None:
        assert not await admin.has_tenant(topic.tenant)
        assert await admin.policies(topic.namespace_name) is None
        assert [await admin.create_tenant(topic.tenant) for _ in range(2)] == [True, False]
        assert await admin.has_tenant(topic.tenant)

        wanted = Policies(True, Retention(60, -1))
        assert [await admin.create_namespace(topic.namespace_name, wanted) for _ in range(2)] == [True, False]
        assert await admin.policies(topic.namespace_name) == wanted
        await admin.set_retention(topic.namespace_name, Retention(-1, 512))
        assert await admin.policies(topic.namespace_name) == Policies(True, Retention(-1, 512))

        assert await admin.partitions(topic) is None
        assert [await admin.create_topic(topic, 2) for _ in range(2)] == [True, False]
        await admin.grow(topic, 3)
        assert await admin.partitions(topic) == 3
        assert await admin.stats(topic.partition(2)) is not None
        assert await admin.stats(topic.partition(3)) is None

        single = TopicName.parse(f"{topic.namespace_name}/single")
        assert await admin.create_topic(single)
        assert await admin.partitions(single) == 0

    async def test_what_is_refused_says_why(self, admin: PulsarAdmin, topic: TopicName) -> None:
        with pytest.raises(ConfigurationError, match="what it belongs to is not there"):
            await admin.create_namespace(topic.namespace_name, Policies())
        await admin.create_tenant(topic.tenant)
        with pytest.raises(ConfigurationError, match="Invalid retention policy"):
            await admin.create_namespace(topic.namespace_name, Policies(retention=Retention(0, -1)))
        with pytest.raises(ConfigurationError, match="it was removed, or never made"):
            await admin.enable_deduplication(topic.namespace_name)
        await admin.create_namespace(topic.namespace_name, Policies())
        await admin.create_topic(topic, 3)
        with pytest.raises(ConfigurationError, match=r"answers 422 .*can't be less than the current partitions"):
            await admin.grow(topic, 2)

    async def test_deduplication(self, admin: PulsarAdmin, topic: TopicName) -> None:
        # The broker of the tests says yes, for all who say nothing.
        assert await deduplicates(admin, topic)
        await admin.create_tenant(topic.tenant)
        await admin.create_namespace(topic.namespace_name, Policies())
        assert await deduplicates(admin, topic)
        await set_policy(admin, f"namespaces/{topic.namespace_name}/deduplication", "false")
        assert not await deduplicates(admin, topic)
        await admin.create_topic(topic, 2)
        assert not await deduplicates(admin, topic.partition(1))
        await admin.enable_deduplication(topic.namespace_name)
        assert await deduplicates(admin, topic.partition(1))
        await set_policy(admin, f"{topic.path}/deduplicationEnabled", "false")
        assert await admin.deduplication_of(topic) is False
        assert not await deduplicates(admin, topic)

    async def test_the_limit_of_the_broker(self, admin: PulsarAdmin) -> None:
        assert (await admin.runtime())["maxMessageSize"] == "5242880"
        await admin.close()
        await admin.close()
        assert (await admin.runtime())["maxMessageSize"] == "5242880"


class TestPlan:
    async def steps(self, admin: PulsarAdmin, desired: Desired) -> list[str]:
        return [f"{step.action} {step.target}" for step in plan(desired, await find(admin, desired))]

    async def make(self, admin: PulsarAdmin, desired: Desired) -> None:
        for step in plan(desired, await find(admin, desired)):
            await apply(admin, step)
            await apply(admin, step)  # by another one, at the same time

    async def test_plan_apply_plan(self, admin: PulsarAdmin, topic: TopicName) -> None:
        other = TopicName.parse(f"{topic.tenant}/stock/events")
        desired = Desired((topic, other), 2, retention=Retention(4320, -1))
        assert len(await self.steps(admin, desired)) == 5
        await self.make(admin, desired)
        assert await self.steps(admin, desired) == []
        assert await deduplicates(admin, topic)

        more = Desired((topic,), 3, retention=Retention(-1, -1))
        assert await self.steps(admin, more) == [f"retain {topic.namespace_name}", f"grow topic {topic}"]
        await self.make(admin, more)
        assert await self.steps(admin, more) == []
        assert await self.steps(admin, desired) == [f"conflict {topic.namespace_name}", f"conflict {topic}"]

    async def test_what_somebody_else_has_made(self, admin: PulsarAdmin, topic: TopicName) -> None:
        await admin.create_tenant(topic.tenant)
        await admin.create_namespace(topic.namespace_name, Policies())
        await admin.create_topic(topic)
        desired = Desired((topic,), 4)
        assert await self.steps(admin, desired) == [f"deduplicate {topic.namespace_name}", f"conflict {topic}"]
        await set_policy(admin, f"{topic.path}/deduplicationEnabled", "false")
        assert await self.steps(admin, Desired((topic,))) == [
            f"deduplicate {topic.namespace_name}",
            f"conflict {topic}",
        ]
        assert await self.steps(admin, Desired((topic,), deduplication=False)) == []


Serve = Callable[[Callable[[str], bytes]], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Something on loopback that answers to requests as it is told; its URL."""
    servers = []

    async def start(answer: Callable[[str], bytes]) -> str:
        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer((await reader.readuntil(b"\r\n\r\n")).decode()))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(exchange, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


def http(status: int, body: str = "", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", body]).encode()


class TestTrouble:
    async def test_nobody_there(self) -> None:
        async with PulsarAdmin(f"http://127.0.0.1:{free_port()}") as admin:
            with pytest.raises(ConnectionError, match="cannot be reached"):
                await admin.runtime()

    @pytest.mark.parametrize("status", [401, 403])
    async def test_not_allowed(self, serve: Serve, status: int) -> None:
        url = await serve(lambda _: http(status, '{"reason": "Unauthorized: token=abc"}'))
        async with PulsarAdmin(url, Token("secret-token")) as admin:
            with pytest.raises(ConfigurationError, match=r"give credentials whose role may do this") as caught:
                await admin.has_tenant("a")
        assert "abc" not in str(caught.value)

    @pytest.mark.parametrize("answer", [http(500), http(503, "<html>"), http(200, "<html>"), b"nonsense", b""])
    async def test_not_well(self, serve: Serve, answer: bytes) -> None:
        async with PulsarAdmin(await serve(lambda _: answer)) as admin:
            with pytest.raises(ConnectionError):
                await admin.has_tenant("a")

    async def test_another_broker_gets_our_token_too(self, serve: Serve) -> None:
        heard: list[str] = []

        def owner(head: str) -> bytes:
            heard.append(head)
            return http(200, '{"brokerDeduplicationEnabled": "true"}')

        there = await serve(owner)
        here = await serve(lambda head: http(307, Location=f"{there}{head.split(' ')[1]}"))
        async with PulsarAdmin(here, Token("the-token")) as admin:
            assert await admin.runtime() == {"brokerDeduplicationEnabled": "true"}
        assert "authorization: bearer the-token" in heard[0].lower()

    async def test_sent_around_in_circles(self, serve: Serve) -> None:
        url = await serve(lambda _: http(307, Location="/again"))
        async with PulsarAdmin(url) as admin:
            with pytest.raises(ConnectionError, match="from one broker to the next"):
                await admin.runtime()

    @pytest.mark.parametrize("location", ["file:///etc/passwd", "http://[::1", ""])
    async def test_sent_to_nowhere(self, serve: Serve, location: str) -> None:
        url = await serve(lambda _: http(307, Location=location))
        async with PulsarAdmin(url) as admin:
            with pytest.raises((ConfigurationError, ConnectionError), match=r"sends us|Invalid URL"):
                await admin.runtime()

    def test_what_is_no_address(self) -> None:
        with pytest.raises(ConfigurationError, match="no address of Pulsar's REST interface"):
            PulsarAdmin("pulsar://127.0.0.1:6650")
