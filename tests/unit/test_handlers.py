"""What a handler may ask for, by its annotations."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any, cast
from uuid import uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import ConfigurationError, IntegrationEvent, MessageContext, UnitOfWork
from pillarbox.consumers.handling import Handlers, Incoming
from pillarbox.context import current_context
from pillarbox.errors import UnregisteredEventError


class Rung(IntegrationEvent, name="test.handlers.rung"):
    times: int


class Muted(IntegrationEvent, name="test.handlers.muted"):
    reason: str


class Unregistered:
    """Somebody's class that has no event name."""


class _Work:
    session = cast(AsyncSession, object())


WORK = cast(UnitOfWork, _Work())


def incoming(event: object) -> Incoming:
    headers = {"event_id": str(uuid4()), "tenant_id": "acme", "traceparent": "no trace at all"}
    context = MessageContext(
        consumer="bells",
        topic="bells",
        key="k",
        tenant="acme",
        event_id=uuid4(),
        event_type="test.handlers.rung",
        schema_version=1,
        occurred_at=datetime.now(UTC),
        attempt=1,
        headers=headers,
        version=None,
        event_index=0,
        event_count=1,
    )
    return Incoming(event, context)


async def called(handler: Any, *events: object, kinds: tuple[type, ...] = (Rung,)) -> None:
    handlers = Handlers()
    handlers.add(kinds, handler)
    await handlers.apply(WORK, [incoming(event) for event in events])


async def test_event_unit_of_work_session_and_context_by_annotation() -> None:
    seen: list[object] = []

    async def handle(context: MessageContext, rung: Rung, work: UnitOfWork, session: AsyncSession) -> None:
        seen.extend([rung.times, work, session, context.consumer])

    await called(handle, Rung(times=3))
    assert seen == [3, WORK, _Work.session, "bells"]


async def test_the_event_alone_and_without_annotation() -> None:
    seen: list[object] = []

    async def handle(event, note="unasked"):  # type: ignore[no-untyped-def]
        seen.append((event.times, note))

    await called(handle, Rung(times=1))
    assert seen == [(1, "unasked")]


async def test_a_union_takes_both() -> None:
    seen: list[type] = []

    async def handle(event: Rung | Muted) -> None:
        seen.append(type(event))

    await called(handle, Rung(times=1), Muted(reason="night"), kinds=(Rung, Muted))
    assert seen == [Rung, Muted]


async def test_plain_functions_and_objects_are_handlers() -> None:
    seen: list[int] = []

    def plain(event: Rung) -> None:
        seen.append(event.times)

    class Bell:
        async def __call__(self, event: Rung) -> None:
            seen.append(event.times * 10)

    await called(plain, Rung(times=1))
    await called(Bell(), Rung(times=2))
    assert seen == [1, 20]


async def test_whatever_can_be_called_with_an_event_is_a_handler() -> None:
    seen: list[object] = []

    async def append(where: list[object], event: Rung) -> None:
        where.append(event)

    async def by_position(event: Rung, work: UnitOfWork, /, context: MessageContext) -> None:
        seen.append((event, work, context.consumer))

    rung = Rung(times=1)
    for handler in (seen.append, lambda event: seen.extend([event]), functools.partial(append, seen)):
        await called(handler, rung)
    await called(lambda *events: seen.extend(events), rung)
    await called(by_position, rung)
    assert seen == [rung, rung, rung, rung, (rung, WORK, "bells")]


async def test_what_happens_inside_is_caused_by_the_message() -> None:
    seen: list[object] = []

    async def handle(_event: Rung, context: MessageContext) -> None:
        circumstances = current_context()
        seen.append((circumstances.tenant, circumstances.causation_id == context.headers["event_id"]))

    await called(handle, Rung(times=1))
    assert seen == [("acme", True)]


async def test_names_of_an_enclosing_function_are_known_by_their_text() -> None:
    class Nearby(IntegrationEvent, name="test.handlers.nearby"):
        pass

    async def handle(event: Nearby, uow: UnitOfWork) -> None:
        seen.append((type(event), uow))

    seen: list[object] = []
    await called(handle, Nearby(), kinds=(Nearby,))
    assert seen == [(Nearby, WORK)]

    class Elsewhere:
        pass

    async def mistaken(event: Elsewhere) -> None: ...

    with pytest.raises(ConfigurationError, match="nothing is known for its parameter 'event'"):
        Handlers().add([Nearby], mistaken)


async def _wants_a_number(event: Rung, number: int) -> None: ...
async def _wants_no_event(uow: UnitOfWork) -> None: ...
async def _wants_another(event: Muted) -> None: ...
async def _wants_no_event_type(event: int) -> None: ...
async def _wants_what_is_not_registered(event: Unregistered) -> None: ...
async def _wants_two(event, other) -> None: ...  # type: ignore[no-untyped-def]
async def _wants_another_by_position(event: Rung, number: int = 1, /) -> None: ...


@pytest.mark.parametrize(
    ("handler", "complaint"),
    [
        (_wants_a_number, "nothing is known for its parameter 'number', annotated as int"),
        (_wants_no_event, "none of its parameters takes the event (Rung)"),
        (_wants_another, "nothing is known for its parameter 'event', annotated as Muted"),
        (_wants_no_event_type, "nothing is known for its parameter 'event', annotated as int"),
        (_wants_what_is_not_registered, "nothing is known for its parameter 'event', annotated as Unregistered"),
        (_wants_two, "nothing is known for its parameter 'other', which has no annotation"),
        (_wants_another_by_position, "nothing is known for its parameter 'number', annotated as int"),
    ],
)
def test_what_cannot_be_given_is_refused_at_once(handler: Any, complaint: str) -> None:
    handlers = Handlers()
    with pytest.raises(ConfigurationError, match=re.escape(f"{handler.__name__}: ")) as caught:
        handlers.add([Rung], handler)
    assert complaint in str(caught.value)
    if "nothing is known" in complaint:
        allowed = "the event (Rung), a UnitOfWork, an AsyncSession and a MessageContext"
        assert allowed in str(caught.value)
    assert not handlers.kinds


def test_only_event_types_have_handlers() -> None:
    with pytest.raises(ConfigurationError, match="_wants_a_number: on takes event types"):
        Handlers().add([cast(type, Rung(times=1))], _wants_a_number)
    with pytest.raises(ConfigurationError, match="_wants_a_number: on needs at least one"):
        Handlers().add([], _wants_a_number)
    with pytest.raises(UnregisteredEventError, match="_wants_a_number: Unregistered has no event name: declare it"):
        Handlers().add([Rung, Unregistered], _wants_a_number)


async def _yields(event: Rung) -> Any:
    yield event


def _yields_plainly(event: Rung) -> Any:
    yield event


class _YieldingBell:
    def __call__(self, event: Rung) -> Any:
        yield event


@pytest.mark.parametrize(
    "handler", [_yields, _yields_plainly, _YieldingBell(), _YieldingBell().__call__, functools.partial(_yields)]
)
def test_a_generator_is_refused_since_its_body_would_not_run(handler: Any) -> None:
    with pytest.raises(ConfigurationError, match="must not be a generator"):
        Handlers().add([Rung], handler)


async def test_a_generator_that_a_handler_returns_is_an_error_and_no_effect() -> None:
    def asynchronous(event: Rung) -> Any:
        return _yields(event)

    def plain(event: Rung) -> Any:
        return _yields_plainly(event)

    for handler in (asynchronous, plain):
        with pytest.raises(ConfigurationError, match=f"{handler.__name__}: a handler must not be a generator"):
            await called(handler, Rung(times=1))


def test_a_handler_is_a_callable_and_registered_once_for_a_type() -> None:
    handlers, seen = Handlers(), list[object]()
    with pytest.raises(ConfigurationError, match="a handler is a function, or another callable, got 5"):
        handlers.add([Rung], cast(Any, 5))

    async def handle(event: Rung | Muted) -> None: ...

    for handler in (handle, seen.append):
        handlers.add([Rung], handler)
        handlers.add([Muted], handler)
        with pytest.raises(ConfigurationError, match="is registered twice for Muted"):
            handlers.add([Muted], handler)


async def test_a_partial_is_read_by_the_annotations_of_its_function() -> None:
    seen: list[object] = []

    async def handle(where: list[object], event: Rung, uow: UnitOfWork, *, note: str) -> None:
        where.append((event, uow, note))

    rung = Rung(times=1)
    await called(functools.partial(handle, seen, note="ding"), rung)
    await called(functools.partial(functools.partial(handle, seen), note="dong"), rung)
    assert seen == [(rung, WORK, "ding"), (rung, WORK, "dong")]
    with pytest.raises(ConfigurationError, match="nothing is known for its parameter 'event', annotated as Muted"):
        Handlers().add([Rung], functools.partial(_wants_another))


def test_a_plain_function_is_refused_an_asyncsession_which_its_thread_cannot_use() -> None:
    def plain(event: Rung, session: AsyncSession) -> None: ...

    async def coroutine(event: Rung, session: AsyncSession) -> None: ...

    @functools.wraps(coroutine)
    def decorated(*given: Any, **named: Any) -> Any:
        return coroutine(*given, **named)

    def declared(event: Rung, session: AsyncSession) -> Awaitable[None]:
        return coroutine(event, session)

    for refused in (plain, functools.partial(plain)):
        with pytest.raises(ConfigurationError, match="plain function runs in a thread, where an AsyncSession cannot"):
            Handlers().add([Rung], refused)
    for handler in (coroutine, decorated, declared, functools.partial(coroutine)):
        Handlers().add([Rung], handler)
