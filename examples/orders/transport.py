"""The way to the warehouse: one POST per event. This is all that a transport of your own needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import httpx

from pillarbox import Message
from pillarbox.transport import Capabilities, Outcome, Rejection, Verdict

_LATER = (408, 425, 429)
"""Timeout, too early, too many: client errors by their numbers, but nothing is wrong with the event."""


class WarehouseTransport:
    """Tells three answers apart: the event is refused, the warehouse is away, and nobody knows."""

    capabilities = Capabilities(max_messages=50)

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: httpx.AsyncClient | None = None  # made when it is needed: the service may start a second time

    def preflight(self, message: Message) -> str | None:  # noqa: ARG002  only the warehouse knows what it refuses
        return None

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:  # noqa: ARG002  it has no numbers
        return {}

    async def send(self, producer: str, messages: Sequence[Message]) -> Outcome:  # noqa: ARG002  lanes need no name here
        if self._client is None:
            self._client = httpx.AsyncClient(base_url=self._url, timeout=5.0, trust_env=False)
        accepted: list[int] = []
        rejected: dict[str, Rejection] = {}
        for index, message in enumerate(messages):
            if message.key in rejected:
                continue  # nothing of an order overtakes what was refused
            headers = {name: message.headers[name] for name in ("event_id", "event_type")}
            headers["content-type"] = "application/json"
            try:
                answer = await self._client.post("/events", content=message.body, headers=headers)
            except httpx.ConnectError:
                return _unfinished(accepted, rejected, Verdict.UNAVAILABLE, "the warehouse cannot be reached")
            except httpx.TransportError as error:
                return _unfinished(accepted, rejected, Verdict.UNKNOWN, type(error).__name__)
            if answer.is_success:
                accepted.append(index)
            elif answer.is_client_error and answer.status_code not in _LATER:
                rejected[message.key] = Rejection(index, f"{answer.status_code}: {answer.text[:200]}")
            else:
                return _unfinished(accepted, rejected, Verdict.UNAVAILABLE, f"the warehouse says {answer.status_code}")
        return Outcome(accepted, [*rejected.values()])

    async def close(self, producer: str | None = None) -> None:
        if producer is None and self._client is not None:
            client, self._client = self._client, None
            await client.aclose()


def _unfinished(accepted: list[int], rejected: dict[str, Rejection], why: Verdict, reason: str) -> Outcome:
    return Outcome(accepted, [*rejected.values()], unfinished=why, reason=reason)
