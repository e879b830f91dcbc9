"""Topic templates, and the existing topics that match them.

The official client searches for topics once a minute at best, in one namespace. A broker can watch a list of topics for
a client, but brokers up to 4.0 sometimes miss changes, and some refuse to watch. So the list is requested repeatedly: a
broker that is told the hash of the known list answers with a few bytes as long as nothing has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ...errors import ConfigurationError
from ...route import fill_template, topic_pattern
from .admin import PulsarAdmin
from .client import Client
from .names import TopicName

Values = Mapping[str, str]
"""Values of placeholders."""
Ask = Callable[[PulsarAdmin], Awaitable[list[str]]]


def check_topics(topics: Sequence[str], *, admin: bool) -> None:
    """Refuse topics that cannot be subscribed to, with or without a REST interface."""
    for topic in topics:
        topic_pattern(topic)  # refuses other braces
        name = TopicName.parse(topic, template=True)
        if "{" in name.namespace_name and not admin:
            raise ConfigurationError(
                f"topic {topic!r}: only the REST interface says which tenants and namespaces there are; give "
                "admin_url, or write ?admin=http://host:8080 behind the address, or use {tenant} in the last part only"
            )


class TopicFinder:
    """Finds the topics of some templates, and remembers them."""

    def __init__(self, templates: Sequence[str], client: Client, admin: PulsarAdmin | None) -> None:
        self.found: dict[TopicName, str] = {}
        """Found topics with their names by the template, which may omit the first parts."""
        self._templates = templates
        self._client = client
        self._admin = admin
        self._hashes: dict[TopicName, str] = {}

    async def look(self) -> None:
        """Search for new topics. Raises `OSError` if it is impossible now, `ConfigurationError` if forbidden."""
        await asyncio.gather(*map(self._look_for, self._templates))

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()
        if self._admin is not None:
            await self._admin.close()

    async def _look_for(self, template: str) -> None:
        name = TopicName.parse(template, template=True)
        omitted = len(str(name)) - len(template)
        places = await namespaces_of(name, self._admin)
        errors = []
        for topics in await asyncio.gather(*(self._topics(*each) for each in places), return_exceptions=True):
            if isinstance(topics, BaseException):
                errors.append(topics)
                continue
            for topic in topics:
                self.found.setdefault(topic, str(topic)[omitted:])
        if errors:  # a namespace that refuses does not keep the others from being searched
            raise errors[0]

    async def _topics(self, template: TopicName, values: Values) -> list[TopicName]:
        """The new topics of a namespace that match the template."""
        tenant, namespace = template.tenant, template.namespace
        wanted = TopicName(tenant, namespace, fill_template(template.topic, values))
        if wanted in self.found:
            return []
        start, placeholder, _ = str(wanted).partition("{")
        answer = await self._client.topics_of(
            wanted.namespace_name, start + (".*" if placeholder else "(-partition-.*)?"), self._hashes.get(wanted)
        )
        self._hashes[wanted] = answer.topics_hash
        pattern = topic_pattern(wanted.topic)
        names = [TopicName(tenant, namespace, each.rpartition("/")[2]).whole for each in answer.topics]
        return [each for each in names if (each == wanted if pattern is None else pattern.fullmatch(each.topic))]


async def namespaces_of(template: TopicName, admin: PulsarAdmin | None) -> list[tuple[TopicName, Values]]:
    """The template in each namespace that it matches, with the values of its placeholders there."""

    async def fill(part: str, values: Values, ask: Ask) -> list[tuple[str, Values]]:
        part = fill_template(part, values)
        pattern = topic_pattern(part)
        if pattern is None or admin is None:  # check_topics refuses templates without a REST interface
            return [(part, values)]
        matches = [(each, pattern.fullmatch(each)) for each in await ask(admin)]
        return [(each, {**values, **match.groupdict()}) for each, match in matches if match is not None]

    async def of_tenant(tenant: str, values: Values) -> list[tuple[TopicName, Values]]:
        namespaces = await fill(template.namespace, values, lambda it: it.namespaces(tenant))
        return [(TopicName(tenant, each, template.topic), known) for each, known in namespaces]

    tenants = await fill(template.tenant, {}, lambda it: it.tenants())
    found = await asyncio.gather(*(of_tenant(*each) for each in tenants))
    return [each for some in found for each in some]
