"""The box, before it is started: what its constructor refuses, and what it says."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any

import pytest

from pillarbox import ConfigurationError, Message, Pillarbox
from pillarbox.telemetry import Observer
from pillarbox.transport import Capabilities, Outcome
from pillarbox.transports.memory import MemoryTransport


class Plain:
    """Everything that a transport has, and its `send` is no coroutine."""

    capabilities = Capabilities()

    def preflight(self, message: Message) -> str | None:  # noqa: ARG002  the port has it
        return None

    async def open(self, producer: str, topics: Collection[str]) -> Mapping[str, int]:  # noqa: ARG002  the port has it
        return {}

    def send(self, producer: str, messages: Sequence[Message]) -> Any:  # noqa: ARG002  the port has it
        return Outcome(range(len(messages)))

    async def close(self, producer: str | None = None) -> None:
        """Nothing is open."""


class Delegating(MemoryTransport):
    """Its methods are no coroutines by themselves, and may be awaited."""

    def open(self, producer: str, topics: Collection[str]) -> Awaitable[Mapping[str, int]]:  # type: ignore[override]
        return super().open(producer, topics)

    @staticmethod
    def passed_on(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*given: Any) -> Any:
            return method(*given)

        return call

    close = passed_on(MemoryTransport.close)


@pytest.mark.parametrize(
    ("transport", "complaint"),
    [
        (MemoryTransport, "transports['broker'] is a class: give an instance, MemoryTransport(...)"),
        ("broker:9092", "str is no transport, it has no capabilities, preflight, open, send, close"),
        (Plain(), "transports['broker']: Plain.send is not async; write `async def send(...)`"),
    ],
)
def test_what_is_no_transport_is_refused(transport: Any, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        Pillarbox("sqlite://", transports={"broker": transport})


def test_the_side_of_consumers_is_no_transport() -> None:
    with pytest.raises(ConfigurationError, match=r"transports\['inbound'\]: 'inbound' is the name of the consumers"):
        Pillarbox("sqlite://", transports={"inbound": MemoryTransport()})


def test_a_transport_may_pass_on_what_is_to_be_awaited() -> None:
    transport: Any = Delegating()
    assert Pillarbox("sqlite://", transports={"broker": transport}).transports == {"broker": transport}


@pytest.mark.parametrize("routes", [["a.b"], "a.b", {"a.b": "broker"}, 3, None])
def test_routes_are_a_list_of_routes(routes: Any) -> None:
    with pytest.raises(ConfigurationError, match="routes is a list of Route, like"):
        Pillarbox("sqlite://", routes=routes)


@pytest.mark.parametrize("signals", [[object()], object(), Observer(), [Observer], None])
def test_signals_are_a_list_of_observers(signals: Any) -> None:
    with pytest.raises(ConfigurationError, match="signals is a list of observers, like"):
        Pillarbox("sqlite://", signals=signals)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("geheim", "the database URL cannot be used; write one with an async driver, like postgresql+asyncpg://"),
        ("postgresql://app:geheim@db:port/shop", "with special characters as %XX"),
        ("postgres://app:geheim@db/shop", "postgres is not supported; write postgresql://"),
        ("oracle://app:geheim@db/shop", "oracle is not supported; use postgresql, mysql, mariadb, sqlite"),
        ("postgresql+psycopg2://app:geheim@db/shop", "psycopg2 is no async driver; write postgresql+asyncpg://"),
        ("mysql+nonsense://app:geheim@db/shop", "mysql+nonsense is no async driver; write mysql+asyncmy://"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_at_once_and_not_shown(url: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(complaint)) as caught:
        Pillarbox(url)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://db/shop",
        "postgresql+psycopg://db/shop",
        "mysql+aiomysql://db/shop",
        "mariadb://db/shop",
        "sqlite:///shop.db",
    ],
)
def test_a_url_is_not_connected_to_before_the_start(url: str) -> None:
    Pillarbox(url)
