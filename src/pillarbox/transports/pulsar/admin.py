"""Pulsar's REST interface, as far as Pillarbox needs it: reads what exists and its policies, and creates what is
missing.

It removes nothing. A request has one of four results: an answer; None or False if the object does not exist; an
`OSError` if the broker is unavailable; a `ConfigurationError`, with advice, if it refuses.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote, urljoin, urlsplit

from ...errors import ConfigurationError
from ...redaction import redacted
from .address import check_admin_url
from .credentials import Anonymous, Credentials, Tls, load_httpx, said, secret_of
from .names import TopicName

TIMEOUT = 15.0
"""Longest wait for an answer in seconds."""
_REDIRECTS = 5


@dataclass(frozen=True, slots=True)
class Retention:
    """How long acknowledged messages are kept. -1: without limit; both 0: not at all."""

    minutes: int
    megabytes: int

    def __str__(self) -> str:
        if not self.minutes and not self.megabytes:
            return "not at all"
        time = "for ever" if self.minutes == -1 else f"for {self.minutes / 60:g} h"
        return time if self.megabytes == -1 else f"{time}, up to {self.megabytes:,} MB"

    def covers(self, other: Retention) -> bool:
        """Whether it keeps everything that the other one keeps."""
        endless = float("inf")
        pairs = ((self.minutes, other.minutes), (self.megabytes, other.megabytes))
        return all((endless if mine == -1 else mine) >= (endless if its == -1 else its) for mine, its in pairs)


@dataclass(frozen=True, slots=True)
class Policies:
    """Policies of a namespace. None: not set, so the broker's settings apply."""

    deduplication: bool | None = None
    retention: Retention | None = None


class PulsarAdmin:
    """A client of the REST interface. Connects at the first request; `close` it, or use ``async with``."""

    def __init__(self, url: str, credentials: Credentials | None = None, tls: Tls | None = None) -> None:
        self.url = check_admin_url(url)
        self._credentials = credentials or Anonymous()
        self._tls = tls or Tls()
        self._client: Any = None

    def __repr__(self) -> str:
        return f"PulsarAdmin({self.url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. May be called twice."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    # -- tenants and namespaces ----------------------------------------------------------------------------------------

    async def has_tenant(self, tenant: str) -> bool:
        """Whether the tenant exists."""
        return await self._get(f"tenants/{quote(tenant, safe='')}") is not None

    async def create_tenant(self, tenant: str) -> bool:
        """Create a tenant for all clusters. Returns False if it exists already."""
        body = {"allowedClusters": await self._get("clusters") or [], "adminRoles": []}
        return await self._create(f"tenants/{quote(tenant, safe='')}", body)

    async def tenants(self) -> list[str]:
        """All tenants. Brokers answer superusers only."""
        return await self._get("tenants") or []

    async def namespaces(self, tenant: str) -> list[str]:
        """The namespaces of a tenant, without its name; none if the tenant does not exist."""
        found = await self._get(f"namespaces/{quote(tenant, safe='')}") or []
        return [each.partition("/")[2] for each in found]

    async def policies(self, namespace: str) -> Policies | None:
        """The policies of ``tenant/namespace``; None if it does not exist."""
        found = await self._get(f"namespaces/{quote(namespace)}")
        if found is None:
            return None
        kept = found.get("retention_policies")
        retention = Retention(kept["retentionTimeInMinutes"], kept["retentionSizeInMB"]) if kept else None
        return Policies(found.get("deduplicationEnabled"), retention)

    async def create_namespace(self, namespace: str, policies: Policies) -> bool:
        """Create ``tenant/namespace`` with these policies. Returns False if it exists already, with any policies."""
        body: dict[str, Any] = {}
        if policies.deduplication is not None:
            body["deduplicationEnabled"] = policies.deduplication
        if policies.retention is not None:
            body["retention_policies"] = _retention(policies.retention)
        return await self._create(f"namespaces/{quote(namespace)}", body)

    async def enable_deduplication(self, namespace: str) -> None:
        """Enable deduplication for all topics of ``tenant/namespace`` without a policy of their own."""
        await self._tell("POST", f"namespaces/{quote(namespace)}/deduplication", body=True)

    async def set_retention(self, namespace: str, retention: Retention) -> None:
        """Set the retention for all topics of ``tenant/namespace`` without a policy of their own."""
        await self._tell("POST", f"namespaces/{quote(namespace)}/retention", _retention(retention))

    async def message_ttl(self, namespace: str) -> float | None:
        """Seconds after which a message of ``tenant/namespace`` counts as acknowledged, infinite if never; None if the
        namespace does not exist.
        """
        found = await self._get(f"namespaces/{quote(namespace)}")
        return None if found is None else float(found.get("message_ttl_in_seconds") or math.inf)

    # -- topics --------------------------------------------------------------------------------------------------------

    async def partitions(self, topic: TopicName) -> int | None:
        """Number of partitions, 0 for a topic without; None if the topic does not exist."""
        found = await self._get(f"{topic.path}/partitions")
        count = None if found is None else int(found["partitions"])
        # Older brokers answer 0 for a missing topic that they would create at its first use.
        return None if count == 0 and await self.stats(topic) is None else count

    async def create_topic(self, topic: TopicName, partitions: int = 0) -> bool:
        """Create a topic with or without partitions. Returns False if it exists already, with any partitions."""
        path = f"{topic.path}/partitions" if partitions else topic.path
        return await self._create(path, partitions or None)

    async def grow(self, topic: TopicName, partitions: int) -> None:
        """Add partitions to a partitioned topic. Keys then move to other partitions."""
        await self._tell("POST", f"{topic.path}/partitions", partitions)

    async def stats(self, topic: TopicName) -> dict[str, Any] | None:
        """Statistics of a topic without partitions, or of one partition; None if it does not exist."""
        found: dict[str, Any] | None = await self._get(f"{topic.path}/stats")
        return found

    async def deduplication_of(self, topic: TopicName, *, applied: bool = False) -> bool | None:
        """The deduplication policy of the topic or, with ``applied``, the effective one; None if it cannot be read."""
        path = f"{topic.whole.path}/deduplicationEnabled?applied={'true' if applied else 'false'}"
        # 405: this broker has no topic policies. 412: this topic has none.
        response = await self._request("GET", path, also=(405, 412))
        return None if response is None or response.status_code != 200 else _decoded(response)

    async def namespace_deduplicates(self, namespace: str) -> bool:
        """Whether topics without a policy are deduplicated: by the namespace's policy, or else the broker's setting."""
        found = await self.policies(namespace)
        if found is not None and found.deduplication is not None:
            return found.deduplication
        return (await self.runtime()).get("brokerDeduplicationEnabled") == "true"

    # -- the broker ----------------------------------------------------------------------------------------------------

    async def runtime(self) -> dict[str, str]:
        """The broker's own settings. Many brokers show them to superusers only."""
        return await self._get("brokers/configuration/runtime") or {}

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _get(self, path: str) -> Any:
        response = await self._request("GET", path)
        return None if response is None else _decoded(response)

    async def _create(self, path: str, body: Any) -> bool:
        response = await self._request("PUT", path, body, also=(409,))
        if response is None:
            raise ConfigurationError(f"{self.url} cannot make {path}: what it belongs to is not there")
        return bool(response.status_code != 409)

    async def _tell(self, method: str, path: str, body: Any) -> None:
        if await self._request(method, path, body) is None:
            raise ConfigurationError(f"{self.url} has no {path}: it was removed, or never made")

    async def _request(self, method: str, path: str, body: Any = None, also: tuple[int, ...] = ()) -> Any:
        """The answer; None for a 404. Statuses in ``also`` are answers, too."""
        httpx = load_httpx("Pulsar's REST interface")
        url = f"{self.url}/admin/v2/{path}"
        content = None if body is None else json.dumps(body)
        try:
            for _ in range(_REDIRECTS):
                headers = await self._headers()
                if self._client is None:
                    self._client = httpx.AsyncClient(verify=self._tls.context(), timeout=TIMEOUT, trust_env=False)
                response = await self._client.request(method, url, content=content, headers=headers)
                if response.status_code not in (302, 307, 308):
                    return self._checked(response, f"{method} {path}", also)
                url = self._elsewhere(url, response.headers.get("location", ""))
        except httpx.HTTPError as error:
            if not isinstance(error, httpx.TimeoutException):
                await self.close()  # the next request reads the certificates again, which may have been replaced
            raise ConnectionError(f"{self.url} cannot be reached: {said(error)}") from None
        raise ConnectionError(f"{self.url} sends us from one broker to the next")

    async def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json, */*"}
        if self._credentials.method == "token":
            headers["Authorization"] = f"Bearer {(await secret_of(self._credentials)).decode()}"
        return headers

    def _elsewhere(self, url: str, location: str) -> str:
        """The target of a redirect by a broker that does not own the topic. The HTTP client itself would follow it
        without the token.
        """
        target = urljoin(url, location)  # the HTTP client has checked that it is a URL
        scheme = urlsplit(target).scheme
        if scheme not in ("http", "https") or (scheme == "http" and self.url.startswith("https:")):
            raise ConfigurationError(f"{self.url} sends us to {redacted(target)}, which is less safe than itself")
        return target

    def _checked(self, response: Any, what: str, also: tuple[int, ...]) -> Any:
        status = response.status_code
        if 200 <= status < 300 or status in also:
            return response
        if status == 404:
            return None
        try:
            reason = response.json()["reason"]
        except (ValueError, KeyError, TypeError):
            reason = response.reason_phrase
        told = f"{self.url} answers {status} to {what}: {redacted(str(reason))}"
        if status in (401, 403):
            raise ConfigurationError(f"{told}; give credentials whose role may do this (an admin of the tenant)")
        if status >= 500 or status in (408, 429):
            raise ConnectionError(told)
        raise ConfigurationError(told)


def _decoded(response: Any) -> Any:
    """Brokers return an empty body for a policy that is not set."""
    try:
        return response.json() if response.content else None
    except ValueError:
        raise ConnectionError(f"{redacted(str(response.url))} answers with something that is no JSON") from None


def _retention(retention: Retention) -> dict[str, int]:
    return {"retentionTimeInMinutes": retention.minutes, "retentionSizeInMB": retention.megabytes}
