"""A client of a cluster: finds the brokers and partitions of topics, and keeps one connection to each broker."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from urllib.parse import urlsplit

from . import wire_pb2 as wire
from .connection import BrokerError, Connection, Endpoint
from .credentials import Credentials, Tls
from .frames import ProtocolError
from .names import MAX_PARTITIONS, TopicName

MAX_REDIRECTS = 20
_Type = wire.Command.Type
_Lookup = wire.LookupResponse


class Client:
    """Shared by all producers of a transport. Opens connections on demand, also after a loss. No background tasks."""

    def __init__(
        self,
        service_url: str,
        credentials: Credentials,
        tls: Tls,
        *,
        timeout: float,
        keep_alive: float,
        listener_name: str | None = None,
    ) -> None:
        self.url = service_url
        scheme, _, hosts = service_url.partition("://")
        self._secure = scheme == "pulsar+ssl"
        self._seeds = [_endpoint(f"{scheme}://{host}") for host in hosts.split(",")]
        self._credentials = credentials
        self._tls = tls
        self._timeout = timeout
        self._keep_alive = keep_alive
        self._listener_name = listener_name
        self._connections: dict[Endpoint, Connection] = {}
        self._opening: dict[Endpoint, asyncio.Lock] = {}

    async def partitions(self, topic: TopicName) -> int:
        """Number of partitions of the topic; 0 if it is not partitioned."""
        connection = await self._any()
        answer: wire.PartitionedMetadataResponse = await connection.ask(
            _Type.PARTITIONED_METADATA,
            lambda number: wire.Command(
                partitioned_metadata=wire.PartitionedMetadata(topic=str(topic), request_id=number)
            ),
            patience=self._timeout,
        )
        if answer.response == wire.PartitionedMetadataResponse.Failed:
            raise BrokerError(answer.error, answer.message)
        if answer.partitions > MAX_PARTITIONS:  # each partition would need a producer
            raise ProtocolError(f"{topic} has {answer.partitions:,} partitions, and {MAX_PARTITIONS:,} are allowed")
        return answer.partitions

    async def topics_of(self, namespace: str, pattern: str, known: str | None) -> wire.TopicsOfNamespaceResponse:
        """The persistent topics of a namespace, with each partition listed separately; none if it does not exist.
        ``known`` is the hash of an earlier answer: if nothing has changed, the answer says so and lists none. Brokers
        may ignore the ``pattern``.
        """
        connection = await self._any()
        answer: wire.TopicsOfNamespaceResponse = await connection.ask(
            _Type.TOPICS_OF_NAMESPACE,
            lambda number: wire.Command(
                topics_of_namespace=wire.TopicsOfNamespace(
                    request_id=number, namespace=namespace, topics_pattern=pattern, topics_hash=known
                )
            ),
            patience=self._timeout,
        )
        return answer

    async def broker_of(self, topic: TopicName) -> Connection:
        """A connection to the broker that serves the topic. If no broker serves it yet, the lookup assigns one."""
        connection = await self._any()
        authoritative = False
        for _ in range(MAX_REDIRECTS):
            answer = await self._lookup(connection, topic, authoritative=authoritative)
            if answer.response == _Lookup.Failed:
                raise BrokerError(answer.error, answer.message)
            url = answer.broker_service_url_tls if self._secure else answer.broker_service_url
            if not url:
                wanted = "TLS" if self._secure else "unencrypted"
                raise ConnectionError(f"the broker of {topic} has no {wanted} address")
            connection = await self._connection(self._through(connection, url, answer.proxy_through_service_url))
            if answer.response == _Lookup.Connect:
                return connection
            authoritative = answer.authoritative
        raise ConnectionError(f"{topic}: the brokers sent us round in circles, {MAX_REDIRECTS} times")

    def message_limits(self) -> list[int]:
        """Message size limits of the connected brokers."""
        return [each.message_limit for each in self._connections.values() if each.lost is None]

    async def close(self) -> None:
        """Close all connections."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()
        await asyncio.gather(*(connection.closed() for connection in connections.values()))

    async def _lookup(self, connection: Connection, topic: TopicName, *, authoritative: bool) -> wire.LookupResponse:
        answer: wire.LookupResponse = await connection.ask(
            _Type.LOOKUP,
            lambda number: wire.Command(
                lookup=wire.Lookup(
                    topic=str(topic),
                    request_id=number,
                    authoritative=authoritative,
                    advertised_listener_name=self._listener_name,
                )
            ),
            patience=self._timeout,
        )
        return answer

    def _through(self, connection: Connection, url: str, proxied: bool) -> Endpoint:
        broker = _endpoint(url)
        if not proxied:
            return broker
        proxy = connection.address
        return Endpoint(proxy.host, proxy.port, f"{broker.host}:{broker.port}")

    async def _any(self) -> Connection:
        """Any broker of the service URL: a connected one, or the first that answers."""
        for seed in self._seeds:
            connection = self._connections.get(seed)
            if connection is not None and connection.lost is None:
                return connection
        *others, last = random.sample(self._seeds, len(self._seeds))
        for seed in others:
            with suppress(OSError):
                return await self._connection(seed)
        return await self._connection(last)

    async def _connection(self, endpoint: Endpoint) -> Connection:
        async with self._opening.setdefault(endpoint, asyncio.Lock()):
            connection = self._connections.get(endpoint)
            if connection is None or connection.lost is not None:
                connection = self._connections[endpoint] = await Connection.open(
                    endpoint,
                    self._credentials,
                    tls=await asyncio.to_thread(self._tls.context) if self._secure else None,
                    keep_alive=self._keep_alive,
                    patience=self._timeout,
                )
            return connection


def _endpoint(url: str) -> Endpoint:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise ConnectionError(f"the address {url!r} of a broker cannot be read")
    return Endpoint(host, port or (6651 if parts.scheme == "pulsar+ssl" else 6650))
