"""Receiving from Pulsar: the promises of every subscriber, and what this one does beside, on a real broker."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any
from uuid import uuid4

import httpx
import pytest

from pillarbox.errors import ConfigurationError, MissingExtraError
from pillarbox.testing.conformance.publisher import PATIENCE, answer, by_key, messages
from pillarbox.testing.conformance.subscriber import SubscriberContract, World, received_by_key
from pillarbox.transport import Message, Received, Subscription
from pillarbox.transports.pulsar import Certificate, PulsarSubscriber, PulsarTransport, Token
from pillarbox.transports.pulsar import wire_pb2 as wire
from pillarbox.transports.pulsar.names import TopicName
from tests.servers import Pulsar


@pytest.fixture
async def publisher(pulsar: Pulsar) -> AsyncIterator[PulsarTransport]:
    publisher = PulsarTransport(pulsar.url, guarantee="at_least_once")
    yield publisher
    await publisher.close()


def new_topic() -> str:
    return f"persistent://public/default/t-{uuid4().hex}"


async def publish(publisher: PulsarTransport, messages: Sequence[Message]) -> None:
    outcome = await publisher.send("producer", messages)
    assert len(outcome.accepted) == len(messages), outcome


# -- the contract ------------------------------------------------------------------------------------------------------


class PulsarWorld(World):
    def __init__(self, subscriber: PulsarSubscriber, publisher: PulsarTransport) -> None:
        self.subscriber: PulsarSubscriber = subscriber
        self.publisher = publisher

    async def new_topic(self) -> str:
        return new_topic()

    async def publish(self, messages: Iterable[Message]) -> None:
        await publish(self.publisher, list(messages))


class TestKeyShared(SubscriberContract):
    @pytest.fixture
    def world(self, pulsar: Pulsar, publisher: PulsarTransport) -> World:
        return PulsarWorld(PulsarSubscriber(pulsar.url), publisher)


class TestFailover(SubscriberContract):
    @pytest.fixture
    def world(self, pulsar: Pulsar, publisher: PulsarTransport) -> World:
        return PulsarWorld(PulsarSubscriber(pulsar.url, kind="failover"), publisher)


# -- beside it ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def members() -> AsyncIterator[list[Subscription]]:
    """Whoever is in it leaves at the end, and no thread of theirs stays."""
    members: list[Subscription] = []
    yield members
    for member in members:
        await answer(member.close())
    assert not [each.name for each in threading.enumerate() if each.name.startswith("pillarbox-pulsar")]


async def receive(member: Subscription, count: int) -> list[Received]:
    found: list[Received] = []
    while len(found) < count:
        found += await answer(member.receive(count - len(found)))
    return found


async def nothing(member: Subscription) -> None:
    """It has nothing to offer."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(member.receive(1), 0.3)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  nobody is told of it
            await asyncio.sleep(0.01)


async def make_partitioned(pulsar: Pulsar, topic: str, partitions: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        path = TopicName.parse(topic).path
        url = f"{pulsar.admin_url}/admin/v2/{path}/partitions"
        (await client.put(url, json=partitions)).raise_for_status()


class TestMembers:
    @pytest.mark.parametrize("leaving", [False, True], ids=["join", "join and leave"])
    async def test_members_come_and_go(
        self, pulsar: Pulsar, publisher: PulsarTransport, members: list[Subscription], leaving: bool
    ) -> None:
        """All of it comes, once. Per key in order, too, unless somebody leaves with messages: then Pulsar 4.0.8 itself
        now and then hands out a later message of a key before those that were left (seen with the bare client as well,
        on a topic that was in order), so order is not asserted there.
        """
        topic, keys, total = new_topic(), 50, 5_000
        subscriber = PulsarSubscriber(pulsar.url, prefetch=100)
        dice = random.Random(7)
        # No key twice in a row: of an entry of several, what a leaving member acknowledged may come again.
        steps = accumulate(dice.randrange(1, keys) for _ in range(total))
        sent = messages(topic, [f"k{step % keys}" for step in steps])
        found: list[Received] = []
        seen: set[str] = set()
        done = asyncio.Event()

        async def work(leave: asyncio.Event) -> None:
            member = await subscriber.subscribe([topic], "billing")
            members.append(member)
            told = asyncio.ensure_future(leave.wait())
            while not told.done():
                receiving = asyncio.ensure_future(member.receive(10))
                await asyncio.wait({receiving, told}, return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    receiving.cancel()
                    break
                await asyncio.sleep(0)  # others have their turn between the effect and the acknowledgement
                found.extend(some := receiving.result())
                seen.update(each.message.headers["event_id"] for each in some)
                await member.ack(some)
                if len(seen) == total:
                    done.set()
            await member.close()
            told.cancel()

        leaves = [asyncio.Event() for _ in range(6)]
        workers = [asyncio.ensure_future(work(leaves[0])), asyncio.ensure_future(work(leaves[1]))]
        for turn in range(5):
            await publish(publisher, sent[turn * 1000 : turn * 1000 + 1000])
            if turn:
                workers.append(asyncio.ensure_future(work(leaves[turn + 1])))
                if leaving:
                    leaves[turn - 1].set()
        await answer(done.wait())
        for leave in leaves:
            leave.set()
        await answer(asyncio.gather(*workers))
        copies = Counter(each.message.headers["event_id"] for each in found)
        assert len(copies) == total
        assert {*copies.values()} == {1}
        assert leaving or received_by_key(found) == by_key(sent)

    async def test_partitioned_topics_keep_the_name_that_they_were_given(
        self, pulsar: Pulsar, publisher: PulsarTransport, members: list[Subscription]
    ) -> None:
        short, whole = f"t-{uuid4().hex}", new_topic()
        await make_partitioned(pulsar, short, 4)
        members.append(member := await PulsarSubscriber(pulsar.url).subscribe([short, whole], "billing"))
        sent = [*messages(short, [f"k{number % 20}" for number in range(200)]), *messages(whole, "xyz")]
        await publish(publisher, sent)
        found = await receive(member, len(sent))
        assert received_by_key(found) == by_key(sent)
        assert Counter(each.message.topic for each in found) == {short: 200, whole: 3}
        assert len({each.message.place for each in found}) == 5
        await member.ack(found)
        await member.close()
        members.append(successor := await PulsarSubscriber(pulsar.url).subscribe([short, whole], "billing"))
        await publish(publisher, fresh := messages(short, "ab"))
        assert received_by_key(await receive(successor, 2)) == by_key(fresh)

    async def test_what_comes_in_is_bounded_and_all_of_it_comes(
        self, pulsar: Pulsar, publisher: PulsarTransport, members: list[Subscription]
    ) -> None:
        topic = new_topic()
        members.append(member := await PulsarSubscriber(pulsar.url, prefetch=5).subscribe([topic], "billing"))
        await publish(publisher, sent := messages(topic, [f"k{number}" for number in range(100)]))
        held = await receive(member, 50)
        found = [*held, *(await receive(member, 50))]
        assert received_by_key(found) == by_key(sent)

    async def test_a_new_group_may_begin_with_what_comes_from_now_on(
        self, pulsar: Pulsar, publisher: PulsarTransport, members: list[Subscription]
    ) -> None:
        await publish(publisher, messages(topic := new_topic(), "ab"))
        members.append(member := await PulsarSubscriber(pulsar.url, start="latest").subscribe([topic], "billing"))
        await publish(publisher, fresh := messages(topic, "c"))
        assert received_by_key(await receive(member, 1)) == by_key(fresh)


class TestClosing:
    async def test_under_load_nothing_is_lost_nor_acknowledged_by_itself(
        self, pulsar: Pulsar, publisher: PulsarTransport, members: list[Subscription]
    ) -> None:
        topic = new_topic()
        subscriber = PulsarSubscriber(pulsar.url, prefetch=50)
        members.append(leaving := await subscriber.subscribe([topic], "billing"))
        sent = messages(topic, [f"k{number % 10}" for number in range(1_000)])
        publishing = asyncio.ensure_future(publish(publisher, sent))
        done = await receive(leaving, 100)
        await leaving.ack(done)
        await receive(leaving, 30)
        waiting = asyncio.ensure_future(leaving.receive(10))
        await answer(leaving.close())
        waiting.cancel()
        await publishing
        members.append(staying := await subscriber.subscribe([topic], "billing"))
        left = await receive(staying, 900)
        assert received_by_key([*done, *left]) == by_key(sent)

    async def test_whoever_waits_is_told(self, pulsar: Pulsar, members: list[Subscription]) -> None:
        members.append(member := await PulsarSubscriber(pulsar.url).subscribe([new_topic()], "billing"))
        waiting = asyncio.ensure_future(member.receive(1))
        await asyncio.sleep(0)
        await member.close()
        for attempt in (waiting, member.receive(1), member.ack([])):
            with pytest.raises(ConnectionError, match="closed"):
                await attempt


# -- a broker that goes away -------------------------------------------------------------------------------------------


class Link:
    """Stands between a client and the broker: it can be cut, and it can swallow what is said."""

    def __init__(self, url: str) -> None:
        self._broker = url.removeprefix("pulsar://")
        self._port = 0
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.silent = False

    @property
    def url(self) -> str:
        return f"pulsar://127.0.0.1:{self._port}"

    async def restore(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        assert len(self._broker) == len(f"127.0.0.1:{self._port}"), "one must replace the other in the broker's frames"

    async def cut(self) -> None:
        assert self._server
        self._server.close()
        for connection, writer in self._connections.items():
            connection.cancel()
            writer.transport.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Not a coroutine: one that has not begun when the test ends would leave its connection open."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(self._connections.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._broker.split(":")
        try:
            upstream, upstream_writer = await asyncio.open_connection(host, int(port))
            try:
                await asyncio.gather(self._copy(reader, upstream_writer), self._copy(upstream, writer))
            finally:
                upstream_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The broker tells clients where it is: that is here."""
        here = f"127.0.0.1:{self._port}".encode()
        while data := await reader.read(65_536):
            if not self.silent:
                writer.write(data.replace(self._broker.encode(), here))
                await writer.drain()
        raise ConnectionResetError


@pytest.fixture
async def link(pulsar: Pulsar) -> AsyncIterator[Link]:
    link = Link(pulsar.url)
    await link.restore()
    yield link
    await link.cut()


class TestOutages:
    async def test_a_topic_that_moves_is_followed(
        self, pulsar: Pulsar, publisher: PulsarTransport, members: list[Subscription]
    ) -> None:
        topic = new_topic()
        members += [await PulsarSubscriber(pulsar.url).subscribe([topic], "billing") for _ in range(2)]
        sent = messages(topic, [f"k{number % 20}" for number in range(400)])
        await publish(publisher, sent[:200])
        first: dict[str, Received] = {}
        done = asyncio.Event()

        async def work(member: Subscription) -> None:
            while True:
                some = await member.receive(7)
                for each in some:
                    first.setdefault(each.message.headers["event_id"], each)
                await member.ack(some)
                if len(first) == len(sent):
                    done.set()

        workers = [asyncio.ensure_future(work(member)) for member in members]
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"{pulsar.admin_url}/admin/v2/{TopicName.parse(topic).path}/unload"
            (await client.put(url)).raise_for_status()
        while (await publisher.send("producer", sent[200:201])).unfinished:
            pass
        await publish(publisher, sent[201:])
        await answer(done.wait())
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers)
        assert received_by_key(first.values()) == by_key(sent)

    async def test_receiving_goes_on_by_itself(
        self, link: Link, publisher: PulsarTransport, members: list[Subscription]
    ) -> None:
        topic = new_topic()
        members.append(member := await PulsarSubscriber(link.url).subscribe([topic], "billing"))
        await publish(publisher, sent := messages(topic, "aba"))
        done, *left = await receive(member, 3)
        await member.ack([done])
        await asyncio.sleep(0.3)  # the client sends acknowledgements ten times a second, and says nothing about it
        waiting = asyncio.ensure_future(member.receive(1))
        await link.cut()
        await publish(publisher, late := messages(topic, "ab", first=4))
        assert not waiting.done()
        await link.restore()
        again = [*(await answer(waiting)), *(await receive(member, 3))]
        assert received_by_key([done, *again]) == by_key([*sent, *late])
        assert {each.attempt for each in again if each.message in [old.message for old in left]} == {2}
        await member.ack(left)  # by what was received before
        await member.ack(again)
        await member.close()
        members.append(successor := await PulsarSubscriber(link.url).subscribe([topic], "billing"))
        await nothing(successor)

    async def test_what_waits_here_is_not_offered_twice(
        self, link: Link, publisher: PulsarTransport, members: list[Subscription]
    ) -> None:
        topic = new_topic()
        members.append(member := await PulsarSubscriber(link.url).subscribe([topic], "billing"))
        await publish(publisher, sent := messages(topic, "aaaa"))
        await receive(member, 1)
        await link.cut()
        await link.restore()
        await publish(publisher, late := messages(topic, "a", first=5))
        await until(lambda: len(member._unacked) == 5)
        assert received_by_key(await receive(member, 5)) == by_key([*sent, *late])
        await nothing(member)

    async def test_an_entry_of_which_a_part_was_acknowledged_comes_again_and_can_be_finished(
        self, link: Link, publisher: PulsarTransport, members: list[Subscription]
    ) -> None:
        topic = new_topic()
        members.append(member := await PulsarSubscriber(link.url).subscribe([topic], "billing"))
        await publish(publisher, sent := messages(topic, "aaa"))
        [done, *left] = await receive(member, 3)
        await member.ack([done])
        await link.cut()
        await link.restore()
        again = await receive(member, 3)
        assert {each.message.headers["event_id"] for each in again} == {each.headers["event_id"] for each in sent}
        await member.ack(left)
        await member.ack(again)
        await member.close()
        members.append(successor := await PulsarSubscriber(link.url).subscribe([topic], "billing"))
        await nothing(successor)

    async def test_acknowledging_to_a_silent_broker_does_not_stop_the_loop(
        self, link: Link, publisher: PulsarTransport, members: list[Subscription]
    ) -> None:
        topic = new_topic()
        members.append(member := await PulsarSubscriber(link.url).subscribe([topic], "billing"))
        await publish(publisher, messages(topic, [f"k{number % 500}" for number in range(1_000)]))
        found = await receive(member, 1_000)
        link.silent = True
        now = asyncio.get_running_loop().time
        start = now()
        await member.ack(found)
        assert now() - start < 1
        await asyncio.wait_for(member.close(), 5)
        assert now() - start < 5

    @pytest.mark.parametrize("silent", [True, False])
    async def test_closing_does_not_wait_for_a_broker_that_is_away(
        self, link: Link, members: list[Subscription], silent: bool
    ) -> None:
        topics = [new_topic(), new_topic()]
        members.append(member := await PulsarSubscriber(link.url).subscribe(topics, "billing"))
        if silent:
            link.silent = True
        else:
            await link.cut()
        await asyncio.wait_for(member.close(), 5)
        if not silent:
            await link.restore()

    async def test_joining_says_why_it_cannot(self, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pillarbox.transports.pulsar.official_client.PATIENCE", 1)
        link.silent = True
        with pytest.raises(ConnectionError, match=r"group 'billing' cannot be joined at pulsar://127.0.0.1:\d+: "):
            await answer(PulsarSubscriber(link.url).subscribe([new_topic()], "billing"))

    async def test_joining_can_be_cancelled(self, link: Link) -> None:
        link.silent = True
        joining = asyncio.ensure_future(PulsarSubscriber(link.url).subscribe([new_topic()], "billing"))
        done, _ = await asyncio.wait({joining}, timeout=0.3)
        assert not done
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining

    async def test_joining_that_is_cancelled_leaves_no_member_behind(
        self, pulsar: Pulsar, publisher: PulsarTransport, members: list[Subscription], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the moment in which it was through, too: all that is to be received would go to that member."""
        topics = [new_topic(), new_topic()]
        subscriber = PulsarSubscriber(pulsar.url)

        async def join(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
            try:
                return await asyncio.get_running_loop().run_in_executor(None, partial(function, *given, **named))
            finally:
                asyncio.get_running_loop().call_soon(joining.cancel)

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "to_thread", join)
            joining = asyncio.ensure_future(subscriber.subscribe(topics, "billing"))
            with pytest.raises(asyncio.CancelledError):
                await answer(joining)
        members.append(member := await subscriber.subscribe(topics, "billing"))
        sent = [each for topic in topics for each in messages(topic, [f"k{number}" for number in range(50)])]
        await publish(publisher, sent)
        ids = {each.message.headers["event_id"] for each in await receive(member, len(sent))}
        assert ids == {each.headers["event_id"] for each in sent}


# -- settings ----------------------------------------------------------------------------------------------------------


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "what"),
        [
            ({"kind": "keyed"}, "kind is one of key_shared, failover, not 'keyed'"),
            ({"start": "now"}, "start is one of earliest, latest, not 'now'"),
            ({"prefetch": 0}, "prefetch must be above 0"),
            ({"credentials": Certificate()}, "cert_file"),
        ],
    )
    def test_mistakes_are_found_at_once(self, settings: dict[str, Any], what: str) -> None:
        with pytest.raises(ConfigurationError, match=what):
            PulsarSubscriber("pulsar://127.0.0.1:1", **settings)

    async def test_topics_are_checked(self) -> None:
        subscriber = PulsarSubscriber("pulsar://127.0.0.1:1?admin=http://127.0.0.1:2")
        for topics in ([], ["orders-partition-1"]):
            with pytest.raises(ConfigurationError):
                await subscriber.subscribe(topics, "billing")

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pulsar", None)
        with pytest.raises(MissingExtraError, match=r"pillarbox\[pulsar\]"):
            PulsarSubscriber("pulsar://127.0.0.1:1")

    def test_publishing_does_not_load_the_official_client(self) -> None:
        code = (
            "import sys; from pillarbox.transports.pulsar import PulsarSubscriber, PulsarTransport;"
            "PulsarTransport('pulsar://127.0.0.1:1', guarantee='at_least_once'); print('_pulsar' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == (
            "False\n"
        )

    async def test_tokens_are_asked_for_on_the_loop_for_each_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pillarbox.transports.pulsar.official_client.PATIENCE", 1)
        tokens = (f"token-{number}" for number in count())
        threads: set[str] = set()
        connects: list[wire.Connect] = []

        def token() -> str:
            threads.add(threading.current_thread().name)
            return next(tokens)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(4)
            size = int.from_bytes(await reader.readexactly(4), "big")
            connects.append(wire.Command.FromString(await reader.readexactly(size)).connect)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        subscriber = PulsarSubscriber(f"pulsar://127.0.0.1:{port}", credentials=Token(token))
        with pytest.raises(ConnectionError):
            await answer(subscriber.subscribe(["orders"], "billing"))
        server.close()
        assert threads == {"MainThread"}
        assert [each.auth_method_name for each in connects[:2]] == ["token", "token"]
        assert [each.auth_data for each in connects[:2]] == [b"token-1", b"token-2"]


# -- reading again -----------------------------------------------------------------------------------------------------


async def subscriptions(pulsar: Pulsar, topic: str) -> list[str]:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"{pulsar.admin_url}/admin/v2/{TopicName.parse(topic).path}/subscriptions")
        found: list[str] = answer.raise_for_status().json()
        return found


class TestUnsubscribe:
    @pytest.mark.parametrize("kind", ["key_shared", "failover"])
    @pytest.mark.parametrize("partitions", [0, 3])
    async def test_a_group_without_members_is_removed_from_its_topics_and_no_other_group(
        self, pulsar: Pulsar, publisher: PulsarTransport, kind: Any, partitions: int
    ) -> None:
        topic, group = new_topic(), uuid4().hex
        if partitions:
            await make_partitioned(pulsar, topic, partitions)
        transport = PulsarTransport(pulsar.url, guarantee="at_least_once", subscription=kind)
        member, other = await transport.subscribe([topic], group), await transport.subscribe([topic], "other")
        await publish(publisher, messages(topic, "abc"))
        with pytest.raises(ConnectionError, match=f"group '{group}' is left"):
            await transport.unsubscribe([topic], group)
        assert {*await subscriptions(pulsar, topic)} == {group, "other"}
        await member.close()
        for _ in range(2):  # one that is not there is fine
            await transport.unsubscribe([topic], group)
            assert await subscriptions(pulsar, topic) == ["other"]
        await other.close()

    async def test_the_topics_of_a_template(self, pulsar: Pulsar, publisher: PulsarTransport) -> None:
        unique, group = uuid4().hex, uuid4().hex
        topics = [f"t-{unique}-{tenant}" for tenant in ("acme", "globex")]
        await publish(publisher, [each for topic in topics for each in messages(topic, "a")])
        subscriber = PulsarSubscriber(pulsar.url)
        await (await subscriber.subscribe([f"t-{unique}-{{tenant}}"], group)).close()
        assert [await subscriptions(pulsar, topic) for topic in topics] == [[group], [group]]
        await subscriber.unsubscribe([f"t-{unique}-{{tenant}}"], group)
        assert [await subscriptions(pulsar, topic) for topic in topics] == [[], []]


class TestReread:
    @pytest.mark.parametrize("partitions", [0, 3])
    async def test_all_that_is_stored_when_it_is_asked_and_then_what_came_since(
        self, pulsar: Pulsar, publisher: PulsarTransport, partitions: int
    ) -> None:
        topic = new_topic()
        if partitions:
            await make_partitioned(pulsar, topic, partitions)
        history = await PulsarSubscriber(pulsar.url).reread([topic])
        assert [page async for page in history.pages()] == []
        await publish(publisher, sent := messages(topic, "abcab"))
        pages = history.pages()
        first = [*await anext(pages)]
        await publish(publisher, later := messages(topic, "abc", first=6))
        rest = [each async for page in pages for each in page]
        more = [each async for page in history.pages() for each in page]
        assert by_key([*first, *rest, *more]) == by_key([*sent, *later])
        assert [page async for page in history.pages()] == []
        await history.aclose()

    async def test_h140_nothing_stays_at_the_broker_after_a_kill(
        self, pulsar: Pulsar, publisher: PulsarTransport
    ) -> None:
        topic = new_topic()
        await publish(publisher, messages(topic, "ab"))
        program = (
            "import asyncio, os, signal, sys\n"
            "from pillarbox.transports.pulsar import PulsarSubscriber\n"
            "async def main():\n"
            "    history = await PulsarSubscriber(sys.argv[1]).reread([sys.argv[2]])\n"
            "    async for page in history.pages():\n"
            "        print(len(page), flush=True)\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "asyncio.run(main())\n"
        )
        command = [sys.executable, "-c", program, pulsar.url, topic]
        done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stdout) == (-9, "2\n")
        async with asyncio.timeout(20):
            while await subscriptions(pulsar, topic):  # noqa: ASYNC110  the broker tells nobody
                await asyncio.sleep(0.1)

    async def test_a_template_means_the_topics_that_there_are_when_it_is_asked(
        self, pulsar: Pulsar, publisher: PulsarTransport
    ) -> None:
        base = new_topic()
        acme, globex, other = f"{base}-acme", f"{base}-globex", f"{base}x-acme"
        await make_partitioned(pulsar, acme, 2)
        sent = [*messages(acme, "abab"), *messages(globex, "xy", first=5)]
        await publish(publisher, [*sent, *messages(other, "a")])
        history = await PulsarSubscriber(pulsar.url).reread([f"{base}-{{tenant}}", globex])
        first = [each for page in [page async for page in history.pages()] for each in page]
        assert by_key(first) == by_key(sent)
        assert {each.topic for each in first} == {acme, globex}, "each once, as it is called"
        await publish(publisher, later := [*messages(f"{base}-initech", "cd"), *messages(globex, "x", first=7)])
        more = [each for page in [page async for page in history.pages()] for each in page]
        assert by_key(more) == by_key(later)
        assert [page async for page in history.pages()] == []
        await history.aclose()
        await history.aclose()

    async def test_a_template_that_cannot_be_looked_for_is_refused(self, pulsar: Pulsar) -> None:
        with pytest.raises(ConfigurationError, match="admin_url"):
            await PulsarSubscriber(pulsar.url).reread(["persistent://{tenant}/default/orders"])
