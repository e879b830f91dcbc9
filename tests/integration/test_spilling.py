"""What a consumer cannot do now: spilled, tried again, failed, brought back, and never done twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import func, select, update

from pillarbox import Message, MessageContext, Pillarbox, Poison, Reject, RetryPolicy, UnitOfWork
from pillarbox.cli import doctor
from pillarbox.consumers import intake, processing
from pillarbox.consumers.consumer import Consumer
from pillarbox.consumers.intake import SubscriptionIntake
from pillarbox.consumers.lanes import LaneDestination
from pillarbox.consumers.processing import Processor
from pillarbox.errors import ConfigurationError
from pillarbox.outbox import INBOUND, Status
from pillarbox.stores import tables
from pillarbox.stores.operations import Action
from pillarbox.stores.tables import claims, failures, outbox
from pillarbox.transport import Subscription
from pillarbox.transports.memory import MemorySubscription, MemoryTransport
from tests.conftest import EACH_DATABASE, FreshDatabase
from tests.questions import (
    QUICKLY,
    TOPIC,
    Asked,
    Effect,
    answering,
    ask,
    ask_for,
    dead_letters,
    delivery_of,
    edit,
    effects,
    open_box,
    redrive,
)
from tests.relays import until
from tests.servers import Database

PATIENCE = 60.0
AWAY = ConnectionError("its server is away")


@pytest.fixture(params=EACH_DATABASE)
def database(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> Database:
    return fresh_database(request.param, shards=2)


@pytest.fixture
async def opened(database: Database) -> AsyncIterator[tuple[Pillarbox, MemoryTransport]]:
    async with open_box(database) as found:
        yield found


@pytest.fixture
def box(opened: tuple[Pillarbox, MemoryTransport]) -> Pillarbox:
    return opened[0]


@pytest.fixture
def broker(opened: tuple[Pillarbox, MemoryTransport]) -> MemoryTransport:
    return opened[1]


@dataclass
class Mood:
    """What a handler raises for which question, and what it was called with."""

    raises: Callable[[Asked], Exception | None] = lambda _event: None
    about: UUID | None = None
    """The event that this is about."""
    calls: list[tuple[str, int]] = field(default_factory=list)


def moody(consumer: Consumer) -> Mood:
    """A handler beside the one that writes the effect."""
    mood = Mood()

    @consumer.on(Asked)
    async def feel(event: Asked) -> None:
        mood.calls.append((event.subject, event.number))
        if error := mood.raises(event):
            raise error

    return mood


async def receive(consumer: Consumer) -> None:
    """Take what the broker has, without serving the lanes."""
    await consumer.register()
    await consumer._intakes[0].drain(0.5)


async def waiting(box: Pillarbox, *, gate: bool | None = None) -> int:
    """How many claims there are."""
    this = claims.c.gate == gate if gate is not None else claims.c.gate.is_not(None)
    async with box.engine.connect() as connection:
        return int((await connection.execute(select(func.count()).select_from(claims).where(this))).scalar_one())


async def counted_attempts(box: Pillarbox) -> int:
    async with box.engine.connect() as connection:
        return int((await connection.execute(select(func.max(failures.c.attempts)))).scalar_one() or 0)


def of(subject: str, found: list[tuple[str, int]]) -> list[int]:
    return [number for each, number in found if each == subject]


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.dialects
@pytest.mark.parametrize("batch", [1, 50])
async def test_h90_a_key_keeps_its_order_through_its_lane_and_back(box: Pillarbox, batch: int) -> None:
    consumer = answering(box, batch=batch)
    mood, numbers = moody(consumer), count()
    mood.raises = lambda event: AWAY if event.subject == "a" else None
    running = asyncio.create_task(consumer.run())
    async with asyncio.timeout(PATIENCE):
        await ask(box, *[(key, next(numbers)) for _ in range(5) for key in "ab"])
        await until(lambda: consumer.status()["spilled"] >= 5)
        assert await waiting(box, gate=True) >= 5
        await ask(box, *[(key, next(numbers)) for _ in range(5) for key in "ab"])
        mood.raises = lambda _event: None
        while await waiting(box):
            await ask(box, *[(key, next(numbers)) for key in "ab"])
        spilled = consumer.status()["spilled"]
        await ask(box, *[(key, next(numbers)) for _ in range(5) for key in "ab"])
        last = next(numbers)
        await until(lambda: consumer.status()["handled"] == last)
    assert consumer.status()["spilled"] == spilled, "it does not go by its lane any more"
    consumer.stop()
    await running
    found = await effects(box)
    assert of("a", found) == [*range(0, last, 2)]
    assert of("b", found) == [*range(1, last, 2)]


async def test_h90_messages_of_a_gated_key_are_not_tried_before_those_in_its_lane(
    box: Pillarbox,
) -> None:
    consumer = answering(box)
    mood = moody(consumer)
    mood.raises = lambda _event: AWAY
    await ask(box, ("a", 1))
    await receive(consumer)
    mood.raises = lambda _event: None
    mood.calls.clear()
    await ask(box, ("a", 2), ("b", 1))
    await receive(consumer)
    assert mood.calls == [("b", 1)]
    assert await waiting(box, gate=True) == 2
    await consumer.drain()
    assert mood.calls == [("b", 1), ("a", 1), ("a", 2)]
    assert await waiting(box) == 0


async def test_what_waits_behind_others_is_spilled_with_the_effects_of_the_rest_of_its_batch(
    box: Pillarbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processing, "GATE_SECONDS", 0.0)
    consumer = answering(box, batch=50)
    mood = moody(consumer)
    mood.raises = lambda event: AWAY if event.subject == "a" else None
    await ask(box, ("a", 1))
    await receive(consumer)
    commits, commit = list[int](), Processor._commit

    async def count_them(self: Processor, opened: Any) -> Any:
        commits.append(len(opened))
        return await commit(self, opened)

    monkeypatch.setattr(Processor, "_commit", count_them)
    await ask(box, ("a", 2), ("b", 1), ("a", 3), ("b", 2))
    await receive(consumer)
    assert commits == [4]
    assert (of("b", await effects(box)), await waiting(box, gate=True)) == ([1, 2], 3)
    mood.raises = lambda _event: None
    await consumer.drain()
    assert of("a", await effects(box)) == [1, 2, 3]


async def test_messages_without_a_key_wait_for_nobody(box: Pillarbox, broker: MemoryTransport) -> None:
    mood = Mood()
    await ask(box, *[("a", number) for number in range(6)])
    sent = broker.sent(TOPIC)
    keyless = box.consumer("keyless", source="broker", topics=["keyless"], retry=QUICKLY)

    @keyless.on(Asked)
    async def write(event: Asked, uow: UnitOfWork) -> None:
        mood.calls.append((event.subject, event.number))
        if error := mood.raises(event):
            raise error
        uow.add(Effect(event_id=event.event_id, subject=event.subject, number=event.number))

    await broker.send("somebody", [Message("keyless", "", each.body, each.headers) for each in sent])
    mood.raises = lambda event: AWAY if event.number % 2 else None
    await receive(keyless)
    assert sorted(of("a", await effects(box))) == [0, 2, 4]
    assert (await waiting(box, gate=True), await waiting(box)) == (3, 3)
    mood.raises = lambda event: Reject("not five") if event.number == 5 else None
    broker.redeliver("keyless")
    await keyless.drain()
    assert sorted(of("a", await effects(box))) == [0, 1, 2, 3, 4]
    [letter] = await dead_letters(box)
    assert (letter.message.key, letter.message.body) == ("", sent[5].body)


# -- what takes long ---------------------------------------------------------------------------------------------------


async def test_what_hangs_and_fills_the_window_goes_by_its_lane_with_all_that_waits_behind_it(
    box: Pillarbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "HANGING", 0.0)
    consumer, ends = answering(box, max_messages=4), asyncio.Event()

    @consumer.on(Asked)
    async def hang(event: Asked) -> None:
        if (event.subject, event.number) == ("a", 0):
            await ends.wait()

    await ask(box, *[("a", number) for number in range(8)], ("b", 0))
    running = asyncio.create_task(consumer.run())
    async with asyncio.timeout(PATIENCE):
        await until(lambda: consumer.status()["handled"] == 1)
        assert await effects(box) == [("b", 0)]
        ends.set()
        await until(lambda: consumer.status()["handled"] == 9)
    consumer.stop()
    await running
    assert of("a", await effects(box)) == [*range(8)]
    assert await waiting(box) == 0


async def test_a_tenant_that_is_slow_and_alone_is_not_spilled(box: Pillarbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "LONG_WAIT", 0.0)
    consumer, ends, looks = answering(box, max_messages=4), asyncio.Event(), count()
    make_room = SubscriptionIntake._make_room

    def look(self: SubscriptionIntake, subscription: Subscription) -> None:
        make_room(self, subscription)
        if self._is_full and next(looks) == 10:
            ends.set()

    monkeypatch.setattr(SubscriptionIntake, "_make_room", look)

    @consumer.on(Asked)
    async def be_slow(_event: Asked) -> None:
        await ends.wait()

    await ask(box, *[("a", number) for number in range(8)])
    running = asyncio.create_task(consumer.run())
    async with asyncio.timeout(PATIENCE):
        await until(lambda: consumer.status()["handled"] == 8)
    consumer.stop()
    await running
    assert (consumer.status()["spilled"], of("a", await effects(box))) == (0, [*range(8)])


# -- the same message again --------------------------------------------------------------------------------------------


class States:
    """How a message comes into a state. Before it there is one of the same key, behind it nothing."""

    @staticmethod
    async def spilled(box: Pillarbox, consumer: Consumer, mood: Mood) -> None:
        mood.raises = lambda event: AWAY if event.number == 2 else None
        await receive(consumer)
        assert await waiting(box, gate=True) == 1

    @staticmethod
    async def retrying(box: Pillarbox, consumer: Consumer, mood: Mood) -> None:
        mood.raises = lambda event: AWAY if event.number == 2 else None
        await consumer.drain()
        assert await status_of(box, mood) is Status.RETRYING

    @staticmethod
    async def parked(box: Pillarbox, consumer: Consumer, mood: Mood) -> None:
        mood.raises = lambda event: AWAY if event.number == 1 else None
        await consumer.drain()
        assert await status_of(box, mood) is Status.PARKED

    @staticmethod
    async def rejected(box: Pillarbox, consumer: Consumer, mood: Mood) -> None:
        mood.raises = lambda event: Reject("not today") if event.number == 2 else None
        await consumer.drain()
        assert await status_of(box, mood) is Status.FAILED

    @staticmethod
    async def given_up(box: Pillarbox, consumer: Consumer, mood: Mood) -> None:
        mood.raises = lambda event: KeyError("a bug") if event.number == 2 else None
        while not await dead_letters(box):
            await consumer.drain()
        assert await status_of(box, mood) is Status.FAILED

    @staticmethod
    async def kept_from_pruning(box: Pillarbox, consumer: Consumer, mood: Mood) -> None:
        """The inbox forgets the one before it, which takes effect again."""
        await States.rejected(box, consumer, mood)
        async with box.engine.begin() as connection:
            number = await connection.run_sync(consumer.identify)
            await connection.run_sync(consumer._inbox.prune, number, timedelta(0), 100)

    @staticmethod
    async def to_be_redriven(box: Pillarbox, consumer: Consumer, mood: Mood) -> None:
        await States.rejected(box, consumer, mood)
        assert await ask_for(box, Action.REDRIVE) == 1

    @staticmethod
    async def redriven(box: Pillarbox, consumer: Consumer, mood: Mood) -> None:
        await States.rejected(box, consumer, mood)
        mood.raises = lambda _event: None
        await redrive(box, consumer)

    @staticmethod
    async def to_be_edited(box: Pillarbox, consumer: Consumer, mood: Mood) -> None:
        await States.rejected(box, consumer, mood)
        assert mood.about is not None
        await edit(box, mood.about, b'{"subject": "a", "number": 20}')

    @staticmethod
    async def edited(box: Pillarbox, consumer: Consumer, mood: Mood) -> None:
        await States.to_be_edited(box, consumer, mood)
        await consumer.drain()

    @staticmethod
    async def to_be_discarded(box: Pillarbox, consumer: Consumer, mood: Mood) -> None:
        await States.rejected(box, consumer, mood)
        assert await ask_for(box, Action.DISCARD) == 1

    @staticmethod
    async def discarded(box: Pillarbox, consumer: Consumer, mood: Mood) -> None:
        await States.to_be_discarded(box, consumer, mood)
        await consumer.drain()
        assert await waiting(box) == 0


async def status_of(box: Pillarbox, mood: Mood) -> Status:
    """Where it stands."""
    assert mood.about is not None
    return (await delivery_of(box, mood.about)).status


STATES = [name for name in vars(States) if not name.startswith("_")]
WAYS = [
    "another version, then again",
    "a redrive, then again",
    "again in a group of two",
    *(pytest.param(it, marks=pytest.mark.full) for it in ("again", "another version")),  # the first steps of the others
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", STATES)
async def test_h80_what_comes_again_in_any_state_has_one_effect(
    box: Pillarbox, broker: MemoryTransport, state: str, way: str
) -> None:
    await come_again(box, broker, state, way, batch=1)


@pytest.mark.dialects
@pytest.mark.parametrize("state", STATES)
async def test_h80_what_comes_again_in_any_state_has_one_effect_on_every_database(
    box: Pillarbox, broker: MemoryTransport, state: str
) -> None:
    await come_again(box, broker, state, "another version, then again", batch=50)


async def come_again(box: Pillarbox, broker: MemoryTransport, state: str, way: str, *, batch: int) -> None:
    consumer = answering(box, batch=batch, retry=RetryPolicy(base=0.001, cap=0.01, attempts=2))
    mood = moody(consumer)
    mood.about = (await ask(box, ("a", 1), ("a", 2)))[1].event_id
    async with asyncio.timeout(PATIENCE):
        await getattr(States, state)(box, consumer, mood)
        if "redrive" in way:
            await ask_for(box, Action.REDRIVE)
        if "another version" in way:
            sent = broker.sent(TOPIC)[1]
            older = {**sent.headers, "schema_version": "v1"}
            await broker.send("somebody", [Message(TOPIC, "a", b'{"subject": "a"}', older)])
        if "again" in way:
            broker.redeliver(TOPIC)
        if "two" in way:
            broker.redeliver(TOPIC, 1)
        await consumer.drain()
        mood.raises = lambda _event: None
        await consumer.drain()
        if await ask_for(box, Action.REDRIVE):
            await consumer.drain()
        broker.redeliver(TOPIC)
        await consumer.drain()
        broker.redeliver(TOPIC)
        assert (await consumer.drain()).handled == await waiting(box) == 0
    second = {"to_be_edited": [20], "edited": [20], "to_be_discarded": [], "discarded": []}.get(state, [2])
    found = [number for _, number in await effects(box) if state != "kept_from_pruning" or number != 1]
    assert found == [*([1] if state != "kept_from_pruning" else []), *second]
    assert await dead_letters(box) == []


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["broker", "outbox"])
async def test_h88_a_reject_is_called_once_and_holds_up_nothing(box: Pillarbox, source: str) -> None:
    consumer = answering(box) if source == "broker" else inside(box)
    mood = moody(consumer)
    mood.raises = lambda event: Reject("not one") if event.number == 1 else None
    await publish(box, consumer, *[("a", number) for number in range(4)])
    await consumer.drain()
    assert Counter(mood.calls) == Counter({("a", number): 1 for number in range(4)})
    assert of("a", await effects(box)) == [0, 2, 3]
    [letter] = await dead_letters(box)
    assert (letter.reason, letter.attempts) == ("not one", 1)
    assert await waiting(box, gate=True) == 0
    await publish(box, consumer, ("a", 4))
    assert (await consumer.drain()).handled == 1
    assert of("a", await effects(box)) == [0, 2, 3, 4]


def inside(box: Pillarbox, **options: Any) -> Consumer:
    """A consumer of the outbox itself."""
    consumer = box.consumer("inside", source="outbox", **{"retry": QUICKLY, **options})

    @consumer.on(Asked)
    async def write(event: Asked, uow: UnitOfWork) -> None:
        uow.add(Effect(event_id=event.event_id, subject=event.subject, number=event.number))

    return consumer


async def publish(box: Pillarbox, consumer: Consumer, *questions: tuple[str, int], tenant: str | None = "acme") -> None:
    if consumer.source == "broker":
        await ask(box, *questions, tenant=tenant)
        return
    async with box.unit_of_work(tenant=tenant) as uow:
        for subject, number in questions:
            uow.publish(Asked(subject=subject, number=number), key=subject)


@pytest.mark.dialects
@pytest.mark.parametrize("action", ["redrive", "edit", "discard"])
@pytest.mark.parametrize(
    "error", [LookupError("a bug"), Reject("not one"), Poison("never")], ids=["bug", "reject", "poison"]
)
async def test_a_key_that_parks_waits_for_a_person_behind_what_has_failed(
    box: Pillarbox, error: Exception, action: str
) -> None:
    consumer = answering(box, on_failure="park", retry=RetryPolicy(base=0.001, cap=0.01, attempts=2))
    mood = moody(consumer)
    mood.raises = lambda event: error if (event.subject, event.number) == ("a", 1) else None
    failing = (await ask(box, *[("a", number) for number in range(4)], ("b", 0)))[1]
    while not await dead_letters(box):
        await consumer.drain()
    await ask(box, ("a", 4), ("b", 1))
    await consumer.drain()
    assert (of("a", await effects(box)), of("b", await effects(box))) == ([0], [0, 1])
    mood.raises = lambda _event: None
    if action == "edit":
        await edit(box, failing.event_id, b'{"subject": "a", "number": 10}')
    else:
        assert await ask_for(box, Action(action), consumer.name, failing.event_id) == 1
    await consumer.drain()
    assert of("a", await effects(box)) == [0, *{"redrive": [1], "edit": [10], "discard": []}[action], 2, 3, 4]
    assert (await waiting(box), await dead_letters(box)) == (0, [])


async def test_a_key_that_parks_waits_in_the_lanes_of_the_outbox_too(box: Pillarbox) -> None:
    consumer = inside(box, on_failure="park")
    mood = moody(consumer)
    mood.raises = lambda event: Reject("not one") if event.number == 1 else None
    await publish(box, consumer, *[("a", number) for number in range(3)], ("b", 0))
    await consumer.drain()
    assert (of("a", await effects(box)), of("b", await effects(box))) == ([0], [0])


async def test_a_stranger_parks_no_key(box: Pillarbox, broker: MemoryTransport) -> None:
    """Its tenant cannot be believed, so nobody waits for what it says."""
    await ask(box, ("a", 1))
    [sent] = broker.sent(TOPIC)
    consumer = box.consumer("strangers", source="broker", topics=["of-{tenant}"], retry=QUICKLY, on_failure="park")
    handled = asyncio.Event()
    consumer.on(Asked)(lambda event: handled.set() if event.number else None)
    forged = Message("of-other", "a", sent.body, {**sent.headers, "event_id": str(uuid4())})
    await broker.send("somebody", [forged, Message("of-acme", "a", sent.body, sent.headers)])
    await consumer.drain()
    assert len(await dead_letters(box)) == 1
    assert (handled.is_set(), await waiting(box, gate=True)) == (True, 0)


@pytest.mark.parametrize("batch", [1, 10])
async def test_what_cannot_be_read_parks_those_behind_it_and_none_before_it(
    box: Pillarbox, broker: MemoryTransport, batch: int
) -> None:
    await ask(box, ("z", 0), *[("a", number) for number in range(1, 4)])
    strange, first, second, third = sorted(broker.sent(TOPIC), key=lambda it: (it.key != "z", it.body))
    consumer = box.consumer(
        "parking", source="broker", topics=["parking"], batch=batch, concurrency=1, retry=QUICKLY, on_failure="park"
    )
    numbers = list[int]()
    consumer.on(Asked)(lambda event: numbers.append(event.number))
    bodies = [(strange, b"not json"), (first, first.body), (second, b"not json"), (third, third.body)]
    await broker.send("somebody", [Message("parking", it.key, body, it.headers) for it, body in bodies])
    await consumer.drain()
    assert numbers == [1]
    assert sorted(letter.message.key for letter in await dead_letters(box)) == ["a", "z"]


@pytest.mark.dialects
@pytest.mark.parametrize("batch", [1, 10])
async def test_another_body_under_a_known_id_parks_those_behind_it_and_none_before_it(
    box: Pillarbox, broker: MemoryTransport, batch: int
) -> None:
    await ask(box, ("a", 1), ("a", 2), ("a", 3), ("b", 1))
    sent = {(it.key, number): it for it in broker.sent(TOPIC) for number in range(4) if b"%d" % number in it.body}
    first, second, third, other = (sent[it] for it in [("a", 1), ("a", 2), ("a", 3), ("b", 1)])
    consumer = box.consumer(
        "parking", source="broker", topics=["parking"], batch=batch, concurrency=1, retry=QUICKLY, on_failure="park"
    )
    taken = list[tuple[str, int]]()
    consumer.on(Asked)(lambda event: taken.append((event.subject, event.number)))
    altered = b'{"subject": "a", "number": 9}'
    bodies = [(first, first.body), (second, second.body), (first, altered), (third, third.body), (other, other.body)]
    await broker.send("somebody", [Message("parking", it.key, body, it.headers) for it, body in bodies])
    await consumer.drain()
    assert (of("a", taken), of("b", taken)) == ([1, 2], [1])
    [letter] = await dead_letters(box)
    assert letter.message.body == altered
    deliveries = tables.deliveries[INBOUND]
    async with box.engine.connect() as connection:
        failed = select(deliveries.c.event_id).where(deliveries.c.id == letter.row)
        event_id = (await connection.execute(failed)).scalar_one()
    assert await ask_for(box, Action.DISCARD, consumer.name, event_id) == 1
    await consumer.drain()
    assert (of("a", taken), await waiting(box)) == ([1, 2, 3], 0)


async def test_what_cannot_be_read_parks_those_behind_it_in_a_batch_of_the_outbox(box: Pillarbox) -> None:
    consumer = inside(box, batch=10, on_failure="park")
    await publish(box, consumer, *[("a", number) for number in range(3)], ("b", 0))
    async with box.engine.begin() as connection:
        garble = update(outbox).where(outbox.c.body == b'{"subject":"a","number":1}').values(body=b"not json")
        await connection.execute(garble)
    await consumer.drain()
    assert (of("a", await effects(box)), of("b", await effects(box))) == ([0], [0])
    assert len(await dead_letters(box)) == 1


async def test_a_policy_for_failures_is_park_or_skip(box: Pillarbox) -> None:
    with pytest.raises(ConfigurationError, match="consumer 'answers': on_failure is 'park' or 'skip', got 'panic'"):
        answering(box, on_failure="panic")


async def examined(box: Pillarbox) -> list[doctor.Check]:
    """What doctor says of full lanes."""
    async with box.engine.connect() as connection:
        return await connection.run_sync(lambda it: [*doctor._room(it, box)])


@pytest.mark.dialects
async def test_nothing_is_received_when_as_many_wait_as_may(box: Pillarbox, caplog: pytest.LogCaptureFixture) -> None:
    consumer = answering(box, max_spilled=3, max_messages=3)
    mood = moody(consumer)
    mood.raises = lambda event: AWAY if event.subject == "a" else None
    await ask(box, *[("a", number) for number in range(4)])
    await receive(consumer)
    await ask(box, ("b", 0))
    assert not consumer.status()["full"]
    running = asyncio.create_task(consumer.run())
    async with asyncio.timeout(PATIENCE):
        await until(lambda: consumer.status()["full"])
        assert not consumer.healthy
        [check] = await examined(box)
        assert check.found == "3 messages wait for answers, as many as may: it receives nothing more"
        mood.raises = lambda _event: None
        await until(lambda: consumer.status()["handled"] == 5)
        await until(lambda: consumer.healthy)
    consumer.stop()
    await running
    assert await examined(box) == []
    assert [record.getMessage() for record in caplog.records if "lanes" in record.getMessage()] == [
        "consumer answers: 3 messages wait in its lanes: none is received",
        "consumer answers: there is room in its lanes again",
    ]
    assert of("a", await effects(box)) == [*range(4)]


FAILING, KEYS, HEALTHY = 300, 150, 20


@pytest.mark.parametrize("source", ["broker", "outbox"])
async def test_h87_a_tenant_that_fails_for_now_stops_no_other_and_loses_nothing(box: Pillarbox, source: str) -> None:
    consumer = answering(box) if source == "broker" else inside(box)
    mended = asyncio.Event()

    @consumer.on(Asked)
    async def fail(context: MessageContext, _event: Asked) -> None:
        if context.tenant == "bad" and not mended.is_set():
            raise ConnectionError("its server is away")

    failing = [(f"bad {number % KEYS}", number) for number in range(FAILING)]
    await publish(box, consumer, *failing, tenant="bad")
    running = asyncio.create_task(consumer.run())
    async with asyncio.timeout(PATIENCE):
        for number in range(HEALTHY):
            await publish(box, consumer, ("good", number), tenant="good")
        await until(lambda: consumer.status()["handled"] == HEALTHY)
        assert await counted_attempts(box) == 0
        mended.set()
        await until(lambda: consumer.status()["handled"] == HEALTHY + FAILING)
    consumer.stop()
    await running
    found = await effects(box)
    assert of("good", found) == [*range(HEALTHY)]
    for key in range(KEYS):
        assert of(f"bad {key}", found) == [key, key + KEYS]
    assert await waiting(box) == 0
    assert await dead_letters(box) == []


FEW = 60


@pytest.mark.parametrize("tenants", [1, 5])
async def test_h87_if_everything_fails_the_backlog_stays_at_the_broker(
    box: Pillarbox, broker: MemoryTransport, tenants: int
) -> None:
    consumer = answering(box)
    mood = moody(consumer)
    mood.raises = lambda _event: AWAY
    names = [f"tenant {number}" for number in range(tenants)] if tenants > 1 else [None]
    for name in names:
        await ask(box, *[(f"{name} {number}", number) for number in range(300 // tenants)], tenant=name)
    running = asyncio.create_task(consumer.run())
    async with asyncio.timeout(PATIENCE):
        await until(lambda: consumer._progress.everything_fails)
        tried = len(mood.calls)
        await until(lambda: len(mood.calls) > tried + 2)  # it is tried now and then
        assert consumer.status()["spilled"] <= FEW
        other = await broker.subscribe([TOPIC], "answers")
        assert (other.backlog() or 0) >= 300 - FEW
        await other.close()
        mood.raises = lambda _event: None
        await until(lambda: consumer.status()["handled"] == 300)
    consumer.stop()
    await running
    assert len({*await effects(box)}) == len(await effects(box)) == 300
    assert await dead_letters(box) == []


async def test_concurrency_holds_over_broker_and_lanes_together(box: Pillarbox) -> None:
    consumer = answering(box, concurrency=1)
    at_work, most = 0, 0
    tries = Counter[str]()

    @consumer.on(Asked)
    async def work(event: Asked) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0.002)
        at_work -= 1
        tries[event.subject] += 1
        if event.subject.startswith("bad") and tries[event.subject] < 6:
            raise ConnectionError("its server is away")

    running = asyncio.create_task(consumer.run())
    async with asyncio.timeout(PATIENCE):
        for number in range(15):
            await ask(box, (f"bad {number}", number), (f"good {number}", number))
        await until(lambda: consumer.status()["handled"] == 30)
    consumer.stop()
    await running
    assert consumer.status()["spilled"] >= 15
    assert most == 1


# -- what strangers write ----------------------------------------------------------------------------------------------

STRANGE = {
    "a key with a NUL": ("a\0b", {}),
    "a header with a NUL": ("a", {"note": "x\0y"}),
    "a key with half a pair": ("a\ud800", {}),
    "a key of 10 kB": ("k" * 10_240, {}),
    "a key of 10 kB in letters of more bytes": ("é" * 5_120, {}),
    "a long header": ("a", {"note": "n" * 5_000}),
    "headers of our lanes": ("a", {f"pillarbox_{name}": "1" for name in ("inbox_id", "known_by", "failure", "whole")}),
}


@pytest.mark.dialects
@pytest.mark.parametrize("strange", STRANGE)
async def test_whatever_strangers_write_can_be_spilled(box: Pillarbox, broker: MemoryTransport, strange: str) -> None:
    key, headers = STRANGE[strange]
    consumer = answering(box)
    mood = moody(consumer)
    await ask(box, ("a", 0))
    await consumer.drain()
    [sent] = broker.sent(TOPIC)
    bodies = [f'{{"subject": "s", "number": {number}}}'.encode() for number in range(3)]
    ids = [{**sent.headers, **headers, "event_id": str(uuid4())} for _ in bodies]
    messages = [Message(TOPIC, key, body, theirs) for body, theirs in zip(bodies, ids, strict=True)]
    mood.raises = lambda event: AWAY if event.number == 0 else Reject("not two") if event.number == 2 else None
    await broker.send("a stranger", [*messages, Message(TOPIC, key, b"not json", ids[0])])
    await receive(consumer)
    assert of("s", await effects(box)) == []
    mood.raises = lambda event: Reject("not two") if event.number == 2 else None
    broker.redeliver(TOPIC)
    await consumer.drain()
    assert of("s", await effects(box)) == [0, 1]
    found = await dead_letters(box)
    assert {letter.message.body for letter in found} == {bodies[2], b"not json"}
    for letter in found:
        assert letter.message.key == key.encode(errors="replace").decode()
        assert letter.message.headers.get("note") == headers.get("note")
    mood.raises = lambda _event: None
    await redrive(box, consumer)
    broker.redeliver(TOPIC)
    await consumer.drain()
    assert of("s", await effects(box)) == [0, 1, 2]
    assert [letter.message.body for letter in await dead_letters(box)] == [b"not json"]


@pytest.mark.dialects
async def test_what_strangers_have_written_can_be_edited(box: Pillarbox, broker: MemoryTransport) -> None:
    key, headers = "a\0b", {"note": "x\0y"}
    consumer = answering(box)
    contexts: list[MessageContext] = []

    @consumer.on(Asked)
    async def refuse(event: Asked, context: MessageContext) -> None:
        contexts.append(context)
        if event.number < 0:
            raise Reject("less than nothing")

    [asked] = await ask(box, ("a", 0))
    [sent] = broker.sent(TOPIC)
    strange = {**sent.headers, **headers, "event_id": str(event_id := uuid4())}
    await broker.send("a stranger", [Message(TOPIC, key, b'{"subject": "s", "number": -1}', strange)])
    await consumer.drain()
    assert len(await dead_letters(box)) == 1
    await edit(box, event_id, b'{"subject": "s", "number": 7}')
    await consumer.drain()
    assert of("s", await effects(box)) == [7]
    assert await dead_letters(box) == []
    last = contexts[-1]
    assert (last.event_id, last.key, last.headers["note"]) == (event_id, key, headers["note"])
    assert last.event_id != asked.event_id


# -- kills -------------------------------------------------------------------------------------------------------------


async def test_h80_a_kill_between_spill_and_acknowledgement_has_no_second_effect(
    box: Pillarbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = answering(box)
    mood = moody(consumer)
    mood.raises = lambda event: AWAY if event.subject == "a" else None
    acknowledging = asyncio.Event()

    async def never(*_given: object) -> None:
        acknowledging.set()
        await asyncio.get_running_loop().create_future()

    await ask(box, ("a", 1), ("a", 2))
    with monkeypatch.context() as patched:
        patched.setattr(MemorySubscription, "ack", never)
        running = asyncio.create_task(consumer.run())
        async with asyncio.timeout(PATIENCE):
            await acknowledging.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
    assert await waiting(box) >= 1
    mood.raises = lambda _event: None
    tally = await consumer.drain()
    assert tally.duplicates >= 1
    assert await effects(box) == [("a", 1), ("a", 2)]
    assert await waiting(box) == 0


async def test_h80_a_kill_between_the_effect_and_the_settlement_of_its_lane_has_no_second_effect(
    box: Pillarbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = answering(box)
    mood = moody(consumer)
    mood.raises = lambda _event: AWAY
    await ask(box, ("a", 1), ("a", 2))
    await receive(consumer)
    mood.raises = lambda _event: None
    send = LaneDestination.send

    async def die(*given: Any) -> Any:
        await send(*given)
        running.cancel()
        await asyncio.get_running_loop().create_future()

    with monkeypatch.context() as patched:
        patched.setattr(LaneDestination, "send", die)
        running = asyncio.create_task(consumer.run())
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(asyncio.CancelledError):
                await running
    assert await effects(box) == [("a", 1), ("a", 2)]
    tally = await consumer.drain()
    assert (tally.handled, tally.duplicates) == (0, 2)
    assert await effects(box) == [("a", 1), ("a", 2)]
    assert len(mood.calls) == 2 + sum(call == ("a", 1) for call in mood.calls) - 1


async def test_a_claim_that_another_process_redeems_stops_its_key_alone(
    postgres_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """That has lost the lane, and does not know it yet."""
    async with open_box(postgres_database) as (box, _):
        consumer = answering(box)
        mood = moody(consumer)
        mood.raises = lambda _event: AWAY
        [asked] = await ask(box, ("a", 1))
        await receive(consumer)
        mood.raises = lambda _event: None
        async with box.engine.connect() as other:
            held = select(claims.c.line).where(claims.c.inbox_id == asked.event_id).with_for_update()
            assert len((await other.execute(held)).all()) == 1
            running = asyncio.create_task(consumer.run())
            await until(lambda: consumer._report.tally.failures > 4, seconds=PATIENCE)
            await other.rollback()
        await until(lambda: consumer.status()["handled"] == 1, seconds=PATIENCE)
        consumer.stop()
        await running
        assert await effects(box) == [("a", 1)]
    assert "is unavailable" not in caplog.text
