"""Events: identity, names, versions, and what may be in them."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID, uuid4

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox import Event, IntegrationEvent, PayloadError, downcaster, event_context, register_event, upcaster
from pillarbox.clock import SystemClock, time_of, use, uuid7
from pillarbox.codec import Content
from pillarbox.codecs.cloudevents import CloudEventsCodec
from pillarbox.codecs.json import JsonCodec
from pillarbox.errors import ConfigurationError, UnknownEventError, UnregisteredEventError
from pillarbox.event import Registry, capture, registry
from pillarbox.payload import MAX_DEPTH, plain


class Listed(IntegrationEvent, name="tests.order.listed", version=1):
    names: list[str]


class Colour(enum.Enum):
    RED = "red"


class Money(msgspec.Struct, frozen=True):
    amount: Decimal
    currency: str = "EUR"


class Everything(IntegrationEvent, name="tests.kernel.everything", version=3):
    number: int
    real: float
    exact: Decimal
    name: str
    at: datetime
    day: date
    clock: time
    lasted: timedelta
    identity: UUID
    raw: bytes
    colour: Colour
    money: Money
    tags: frozenset[str]
    pairs: tuple[int, ...]
    table: dict[str, list[int]]
    maybe: str | None = None
    kind: Literal["a", "b"] = "a"
    bounded: Annotated[int, msgspec.Meta(ge=0)] = 0


def everything(**changes: Any) -> Everything:
    values: dict[str, Any] = {
        "number": 2**70,
        "real": 0.1,
        "exact": Decimal("12345678901234567890.123456789"),
        "name": "Ä✓ \U0001f600 \\u0000",
        "at": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "clock": time(1, 2, 3, 4),
        "lasted": timedelta(days=3, microseconds=5),
        "identity": uuid4(),
        "raw": bytes(range(256)),
        "colour": Colour.RED,
        "money": Money(Decimal("0.10")),
        "tags": frozenset({"b", "a"}),
        "pairs": (1, -(2**60)),
        "table": {"x": [1, 2**53]},
    }
    return Everything(**{**values, **changes})


def through(event: object, codec: JsonCodec | CloudEventsCodec) -> object:
    """Encode and decode."""
    raised = capture(event)
    headers = {
        "event_id": str(raised.event_id),
        "event_type": raised.type.name,
        "schema_version": f"v{raised.type.version}",
        "occurred_at": raised.occurred_at.isoformat(),
        "aggregate_id": "1",
    }
    body = codec.encode(
        Content(raised.type.name, raised.type.version, raised.event_id, raised.occurred_at, raised.payload), headers
    )
    content = codec.decode(body, headers)
    return registry.build(content.name, content.version, content.payload, content.event_id, content.occurred_at)


class TestEvents:
    def test_an_event_is_frozen_and_has_an_identity_from_the_start(self) -> None:
        before = datetime.now(UTC)
        event = Listed(names=["a"])
        assert event.event_id.version == 7
        assert before <= event.occurred_at <= datetime.now(UTC)
        assert abs(time_of(event.event_id) - event.occurred_at) < timedelta(seconds=1)
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.names = []  # type: ignore[misc]

    def test_events_are_equal_by_what_they_say(self) -> None:
        assert Listed(names=["a"]) == Listed(names=["a"])
        assert Listed(names=["a"]) != Listed(names=["b"])

    def test_fields_are_given_by_name(self) -> None:
        with pytest.raises(TypeError):
            Listed(["a"])  # type: ignore[call-arg, arg-type]

    def test_an_identity_can_be_given(self) -> None:
        event_id = uuid4()
        raised = capture(
            Listed(
                names=[], event_id=event_id, occurred_at=datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
            )
        )
        assert raised.event_id == event_id
        assert raised.occurred_at == datetime(2026, 1, 1, tzinfo=UTC)
        assert raised.payload == {"names": []}

    def test_a_naive_time_of_occurrence_is_refused(self) -> None:
        with pytest.raises(PayloadError, match="occurred_at"):
            capture(Listed(names=[], occurred_at=datetime(2026, 1, 1)))  # noqa: DTZ001

    def test_the_context_is_the_one_in_which_it_was_raised(self) -> None:
        with event_context(user_id="u1", correlation_id="c1"):
            raised = capture(Listed(names=[]))
        assert raised.context.headers() == {"user_id": "u1", "correlation_id": "c1"}

    @pytest.mark.parametrize(
        "name", ["placed", "Orders.placed", "orders..placed", "orders.placed ", "a." + "b" * 200, "1.a", ""]
    )
    def test_bad_names_are_refused(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="event name"):
            Registry().register(Listed, name=name)

    def test_bad_versions_are_refused(self) -> None:
        for version in (0, -1, True, "1"):
            with pytest.raises(ConfigurationError, match="version"):
                Registry().register(Listed, name="a.b", version=version)  # type: ignore[arg-type]

    def test_a_name_belongs_to_one_type(self) -> None:
        with pytest.raises(ConfigurationError, match="Listed"):

            class Other(IntegrationEvent, name="tests.order.listed", version=1):
                pass

    def test_a_module_that_is_loaded_again_replaces_its_own(self) -> None:
        def declare() -> type:
            class Reloaded(Event, name="tests.kernel.reloaded"):
                pass

            return Reloaded

        declare()
        assert registry.of_type(again := declare()).cls is again

    def test_an_event_without_a_name_cannot_be_raised(self) -> None:
        class Nameless(Event):
            pass

        with pytest.raises(UnregisteredEventError, match="Nameless"):
            capture(Nameless())
        with pytest.raises(UnregisteredEventError):
            capture(object())


class TestForeignEvents:
    def test_structs_pydantic_models_and_frozen_dataclasses_are_events_too(self) -> None:
        @register_event("tests.kernel.struct")
        class AsStruct(msgspec.Struct, frozen=True):
            amount: Decimal

        @register_event("tests.kernel.model")
        class AsModel(pydantic.BaseModel):
            amount: Decimal
            big: int

        @register_event("tests.kernel.dataclass")
        @dataclasses.dataclass(frozen=True)
        class AsDataclass:
            amount: Decimal

        for event in (
            AsStruct(Decimal("1.10")),
            AsModel(amount=Decimal("1.10"), big=2**60),
            AsDataclass(Decimal("1.10")),
        ):
            raised = capture(event)
            assert raised.event_id.version == 7
            assert through(event, JsonCodec()) == event

    def test_a_mutable_dataclass_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="frozen"):

            @register_event("tests.kernel.mutable")
            @dataclasses.dataclass
            class Mutable:
                a: int

        with pytest.raises(ConfigurationError, match="not a frozen dataclass"):
            register_event("tests.kernel.plain")(object)

    def test_pydantic_inside_an_event(self) -> None:
        class Address(pydantic.BaseModel):
            street: str

        class Moved(Event, name="tests.kernel.moved"):
            address: Any

        assert capture(Moved(address=Address(street="x"))).payload == {"address": {"street": "x"}}


class TestStrictness:
    @pytest.mark.parametrize("codec", [JsonCodec(), CloudEventsCodec()])
    def test_h74_everything_comes_back_exactly(self, codec: JsonCodec | CloudEventsCodec) -> None:
        event = everything()
        again = through(event, codec)
        assert again == event
        assert isinstance(again, Everything)
        assert (again.event_id, again.occurred_at) == (event.event_id, event.occurred_at)

    @pytest.mark.parametrize(
        ("changes", "path"),
        [
            ({"real": math.nan}, "real"),
            ({"real": math.inf}, "real"),
            ({"exact": Decimal("NaN")}, "exact"),
            ({"exact": Decimal("-Infinity")}, "exact"),
            ({"money": Money(Decimal("sNaN"))}, "money.amount"),
            ({"name": "a\0b"}, "name"),
            ({"name": "\ud800"}, "name"),
            ({"table": {"a\0": []}}, "table"),
            ({"at": datetime(2026, 1, 1)}, "at"),  # noqa: DTZ001
            ({"at": datetime.min.replace(tzinfo=timezone(timedelta(hours=14)))}, "at"),
            ({"maybe": object()}, "maybe"),
            ({"pairs": (1, 2j)}, "pairs[1]"),
            ({"table": {"x": [1, math.nan]}}, "table.x[1]"),
            ({"table": {None: []}}, "table"),
            ({"number": "many"}, "number"),
            ({"number": 1, "pairs": (), "table": {}, "bounded": "7"}, "bounded"),
            ({"name": None}, "name"),
            ({"kind": "c"}, "kind"),
            ({"bounded": -1}, "bounded"),
            ({"name": "1234567890123456", "bounded": "12"}, "bounded"),
        ],
    )
    def test_h73_what_could_not_be_read_back_is_refused_by_its_path(self, changes: dict[str, Any], path: str) -> None:
        with pytest.raises(PayloadError) as refused:
            capture(everything(**changes))
        assert refused.value.path == path

    def test_a_value_that_contains_itself_is_refused(self) -> None:
        loop: list[Any] = []
        loop.append(loop)
        with pytest.raises(PayloadError, match=f"deeper than {MAX_DEPTH}"):
            plain(loop, "loop")
        table: dict[str, Any] = {}
        table["self"] = table
        with pytest.raises(PayloadError, match="deeper"):
            plain(table, "table")

    def test_h24_the_content_is_a_snapshot(self) -> None:
        names = ["a"]
        raised = capture(Listed(names=names))
        names.append("b")
        assert raised.payload == {"names": ["a"]}

    def test_keys_that_are_numbers_or_ids_come_back(self) -> None:
        class Keyed(IntegrationEvent, name="tests.kernel.keyed"):
            counts: dict[int, str]
            owners: dict[UUID, int]

        event = Keyed(counts={1: "a", 2**60: "b"}, owners={uuid4(): 2**60})
        assert through(event, JsonCodec()) == event

    def test_sets_have_one_order(self) -> None:
        tags = [f"tag{number}" for number in range(50)]
        assert plain(set(tags)) == plain(frozenset(reversed(tags))) == sorted(tags)

    def test_an_unusable_annotation_is_named(self) -> None:
        class Odd(Event, name="tests.kernel.odd"):
            value: Missing  # type: ignore[name-defined]  # noqa: F821

        with pytest.raises(ConfigurationError, match="Odd"):
            capture(Odd(value=1))

    @given(
        st.decimals(allow_nan=False, allow_infinity=False),
        st.integers(),
        st.text(st.characters(exclude_characters="\0", codec="utf-8")),
    )
    def test_h74_numbers_and_texts_round_trip(self, exact: Decimal, number: int, name: str) -> None:
        event = everything(exact=exact, number=number, name=name)
        again = through(event, JsonCodec())
        assert isinstance(again, Everything)
        assert (again.exact, again.number, again.name) == (exact, number, name)
        assert str(again.exact) == str(exact)

    @given(st.datetimes(timezones=st.timezones()), st.timedeltas(), st.floats(allow_nan=False, allow_infinity=False))
    def test_h74_moments_and_floats_round_trip(self, at: datetime, lasted: timedelta, real: float) -> None:
        try:
            moment = at.astimezone(UTC)  # a time that a clock change makes ambiguous equals nothing in another zone
        except OverflowError:
            return
        again = through(everything(at=at, lasted=lasted, real=real), JsonCodec())
        assert isinstance(again, Everything)
        assert (again.at, again.lasted, again.real) == (moment, lasted, real)


class TestVersions:
    def test_old_messages_are_upcast_and_new_events_downcast(self) -> None:
        class Priced(IntegrationEvent, name="tests.kernel.priced", version=3):
            cents: int
            currency: str

        upcaster("tests.kernel.priced", from_version=1)(lambda old: {"cents": old["euros"] * 100})
        upcaster("tests.kernel.priced", from_version=2)(lambda old: {**old, "currency": "EUR"})
        downcaster("tests.kernel.priced", from_version=3)(lambda new: {"cents": new["cents"]})

        event_id, now = uuid4(), datetime.now(UTC)
        built = registry.build("tests.kernel.priced", 1, {"euros": 2}, event_id, now)
        assert built == Priced(cents=200, currency="EUR")
        assert registry.cast("tests.kernel.priced", {"cents": 1, "currency": "EUR"}, 3, 2) == {"cents": 1}
        with pytest.raises(UnknownEventError, match="downcaster from version 2"):
            registry.cast("tests.kernel.priced", {"cents": 1}, 3, 1)
        with pytest.raises(UnknownEventError, match="version 4"):
            registry.build("tests.kernel.priced", 4, {}, event_id, now)
        with pytest.raises(ConfigurationError, match="two casters"):
            upcaster("tests.kernel.priced", from_version=1)(dict)

    def test_h76_an_unknown_name_and_a_body_that_does_not_fit_are_errors(self) -> None:
        with pytest.raises(UnknownEventError, match=r"os\.system"):
            registry.build("os.system", 1, {}, uuid4(), datetime.now(UTC))
        with pytest.raises(UnknownEventError, match="names"):
            registry.build("tests.order.listed", 1, {"names": 7}, uuid4(), datetime.now(UTC))

    @pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
    def test_bodies_that_are_no_objects_are_errors(self, body: bytes) -> None:
        for codec in (JsonCodec(), CloudEventsCodec()):
            with pytest.raises(UnknownEventError):
                codec.decode(body, {})

    def test_a_message_without_its_headers_is_an_error(self) -> None:
        with pytest.raises(UnknownEventError, match="event_type"):
            JsonCodec().decode(b"{}", {})
        with pytest.raises(UnknownEventError, match="unreadable"):
            JsonCodec().decode(
                b"{}", {"event_type": "a.b", "schema_version": "vx", "event_id": "1", "occurred_at": "never"}
            )
        with pytest.raises(UnknownEventError, match="specversion"):
            CloudEventsCodec().decode(b"{}", {})

    def test_a_time_without_a_zone_is_an_error(self) -> None:
        when, event_id = "2026-01-01T00:00:00", str(uuid4())
        headers = {"event_type": "a.b", "schema_version": "v1", "event_id": event_id, "occurred_at": when}
        with pytest.raises(UnknownEventError, match=f"unreadable header.*{when}.*no time zone"):
            JsonCodec().decode(b"{}", headers)
        envelope = {"specversion": "1.0", "type": "a.b", "schemaversion": "v1", "id": event_id, "time": when}
        body = json.dumps({**envelope, "data": {}}).encode()
        with pytest.raises(UnknownEventError, match=f"cannot be read.*{when}.*no time zone"):
            CloudEventsCodec().decode(body, {})

    @pytest.mark.parametrize("form", ["{}", "{{{}}}", "urn:uuid:{}"])
    def test_an_id_may_be_written_in_all_ways(self, form: str) -> None:
        named = uuid4()
        headers = {
            "event_type": "tests.a.b",
            "schema_version": "v1",
            "event_id": form.format(named),
            "occurred_at": "2026-01-01T00:00:00Z",
        }
        assert JsonCodec().decode(b"{}", headers).event_id == named


class TestClock:
    def test_ids_rise_strictly_also_when_the_clock_stands_still(self) -> None:
        clock = SystemClock()
        ids = [clock.new_id() for _ in range(10_000)]
        assert ids == sorted(set(ids))

    def test_a_clock_can_be_put_in_its_place(self) -> None:
        class Still:
            def now(self) -> datetime:
                return datetime(2026, 1, 1, tzinfo=UTC)

            def monotonic(self) -> float:
                return 0.0

            def new_id(self) -> UUID:
                return uuid7(1 << 12, 0)

        with use(Still()):
            event = Listed(names=[])
        assert event.occurred_at == datetime(2026, 1, 1, tzinfo=UTC)
        assert event.event_id == UUID("00000000-0001-7000-8000-000000000000")


class TestUserMistakes:
    @pytest.mark.parametrize(
        ("identity", "path"),
        [
            ({"event_id": "abc"}, "event_id"),
            ({"event_id": None}, "event_id"),
            ({"occurred_at": "now"}, "occurred_at"),
            ({"occurred_at": None}, "occurred_at"),
        ],
    )
    def test_an_identity_of_the_wrong_kind_is_refused_by_name(self, identity: dict[str, Any], path: str) -> None:
        with pytest.raises(PayloadError) as refused:
            capture(Listed(names=[], **identity))
        assert refused.value.path == path

    def test_the_identity_cannot_be_declared_again(self) -> None:
        with pytest.raises(ConfigurationError, match="event_id"):

            class Own(Event, name="tests.kernel.own"):
                event_id: int  # type: ignore[assignment]

    @pytest.mark.parametrize("amount", [0.1 + 0.2, 3])
    def test_a_decimal_is_a_decimal(self, amount: Any) -> None:
        with pytest.raises(PayloadError, match="exact: expected Decimal"):
            capture(everything(exact=amount))
