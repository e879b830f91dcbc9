"""What a handler may ask for, by its annotations."""

from __future__ import annotations

import functools
import re
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
