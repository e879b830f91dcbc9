"""The bus: handlers of this process as a destination."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import pytest

from pillarbox.bus import Bus
from pillarbox.context import current_context
from pillarbox.transport import Message


def message(text: str, handler: str = "h", *, tenant: str | None = None, **headers: str) -> Message:
    """The first letter is the key."""
    known = {"event_id": f"id-{text}", **({"tenant_id": tenant} if tenant else {}), **headers}
    return Message(handler, text[0], text.encode(), known)


def decode(given: Message) -> str:
    return given.body.decode()


def bus(**handlers: Any) -> Bus:
    return Bus(handlers, decode)


async def test_r2_async_and_plain_handlers_run() -> None:
    seen: list[tuple[str, bool]] = []

    async def waits(event: str) -> None:
        await asyncio.sleep(0)
        seen.append((event, threading.current_thread() is threading.main_thread()))

    def blocks(event: str) -> None:
        seen.append((event, threading.current_thread() is threading.main_thread()))

    outcome = await bus(waits=waits, blocks=blocks).send("p", [message("a1", "waits"), message("b1", "blocks")])
    assert list(outcome.accepted) == [0, 1]
    assert seen == [("a1", True), ("b1", False)]  # what may block has a thread of its own


async def test_callable_objects_and_partials_are_handlers_too() -> None:
    seen: list[str] = []

    class Remember:
        async def __call__(self, event: str) -> None:
            seen.append(event)

    async def append(where: list[str], event: str) -> None:
        where.append(event)

    handlers = {"object": Remember(), "partial": functools.partial(append, seen), "lambda": seen.append}
    outcome = await bus(**handlers).send("p", [message(f"{name[0]}1", name) for name in handlers])
    assert list(outcome.accepted) == [0, 1, 2]
    assert seen == ["o1", "p1", "l1"]


async def test_h43_a_handler_that_fails_stops_its_key_and_nothing_else() -> None:
    seen: list[str] = []

    def handle(event: str) -> None:
        if event == "a1":
            raise ValueError("not today")
        seen.append(event)

    outcome = await bus(h=handle).send("p", [message(text) for text in ("a1", "b1", "a2", "b2")])
    assert list(outcome.accepted) == [1, 3]
    assert [(rejection.index, rejection.reason) for rejection in outcome.rejected] == [(0, "ValueError: not today")]
    assert outcome.unfinished is None
    assert seen == ["b1", "b2"]


async def test_the_same_key_of_another_tenant_goes_on() -> None:
    seen: list[str] = []

    def handle(event: str) -> None:
        if event == "a1":
            raise ValueError
        seen.append(event)

    messages = [message("a1", tenant="acme"), message("a2", tenant="ball"), message("a3", tenant="acme")]
    outcome = await bus(h=handle).send("p", messages)
    assert list(outcome.accepted) == [1]


async def test_an_event_that_cannot_be_read_is_rejected_with_its_reason() -> None:
    def unreadable(_message: Message) -> object:
        raise LookupError("no type is registered for shop.order.placed")

    outcome = await Bus({"h": print}, unreadable).send("p", [message("a1")])
    assert outcome.rejected[0].reason == "LookupError: no type is registered for shop.order.placed"


async def test_w6_a_handler_runs_in_the_context_of_its_event() -> None:
    contexts: list[Any] = []
    given = message("a1", tenant="acme", correlation_id="c-1", traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")

    async def waits(_event: str) -> None:
        contexts.append(current_context())

    def blocks(_event: str) -> None:
        contexts.append(current_context())

    await bus(h=waits).send("p", [given])
    await bus(h=blocks).send("p", [given])
    for context in contexts:
        assert (context.tenant, context.correlation_id, context.causation_id) == ("acme", "c-1", "id-a1")
        assert context.traceparent == given.headers["traceparent"]
    assert current_context().tenant is None


async def test_an_event_without_a_correlation_starts_one() -> None:
    contexts: list[Any] = []
    await bus(h=lambda _event: contexts.append(current_context())).send("p", [message("a1")])
    assert contexts[0].correlation_id == contexts[0].causation_id == "id-a1"


async def test_h72_a_handler_that_blocks_does_not_hold_up_the_loop() -> None:
    go = threading.Event()
    sending = asyncio.ensure_future(bus(h=lambda _event: go.wait(10)).send("p", [message("a1")]))
    await asyncio.sleep(0)  # the loop is free
    go.set()
    assert list((await sending).accepted) == [0]


async def test_being_cancelled_is_no_failure_of_the_handler() -> None:
    async def hang(_event: str) -> None:
        await asyncio.Event().wait()

    sending = asyncio.ensure_future(bus(h=hang).send("p", [message("a1")]))
    await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_it_has_nothing_to_open_or_close() -> None:
    nothing = bus()
    assert await nothing.open("p", ["h"]) == {}
    await nothing.close("p")
    await nothing.close()
    assert nothing.preflight(message("a1")) is None
    assert not nothing.capabilities.numbered
