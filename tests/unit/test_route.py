"""Routes: patterns, templates, and what is refused at start."""

from __future__ import annotations

from typing import Any

import pytest

from pillarbox import FailurePolicy, IntegrationEvent, Pillarbox, RetryPolicy, Route, TenancyError, event_context
from pillarbox.codecs import Codecs
from pillarbox.errors import ConfigurationError, HeaderError, PayloadTooLargeError, RouteError
from pillarbox.event import capture, downcaster
from pillarbox.outbox import Delivery, stable_hash
from pillarbox.route import Origin, Router, check_routes, may_come_to
from pillarbox.transport import Capabilities
from pillarbox.transports.memory import MemoryTransport


class Shipped(IntegrationEvent, name="tests.parcel.shipped", version=2):
    parcel: str
    weight: int = 0


downcaster("tests.parcel.shipped", from_version=2)(lambda new: {"parcel": new["parcel"]})

ORIGIN = Origin("parcel", "p-1", 3, 0, 1)


def route(*patterns: str, **options: Any) -> Route:
    return Route(*(patterns or ("tests.**",)), **{"to": "broker", "topic": "tests", **options})


def delivered(
    *routes: Route, tenant: str | None = None, event: Shipped | None = None, limits: Capabilities | None = None
) -> list[Delivery]:
    router = Router(routes, Codecs().named, {"broker": limits or Capabilities()}, 16)
    return router.deliveries(capture(event or Shipped(parcel="x")), ORIGIN, tenant)


class TestPatterns:
    @pytest.mark.parametrize(
        ("pattern", "name", "matches"),
        [
            ("orders.order.placed", "orders.order.placed", True),
            ("orders.order.*", "orders.order.placed", True),
            ("orders.*.placed", "orders.order.placed", True),
            ("orders.order.*", "orders.order", False),
            ("orders.order.*", "orders.order.placed.late", False),
            ("orders.**", "orders.order.placed.late", True),
            ("orders.**", "orders", False),
            ("**", "anything.at.all", True),
            ("orders.order.*", "billing.order.placed", False),
        ],
    )
    def test_what_matches(self, pattern: str, name: str, matches: bool) -> None:
        assert route(pattern).matches(name) is matches

    @pytest.mark.parametrize("pattern", ["", "orders.", "orders.**.placed", "Orders.*", "orders.pla*", "a b", 7])
    def test_bad_patterns_are_refused(self, pattern: str) -> None:
        with pytest.raises(RouteError, match="is not a pattern"):
            Route(pattern, to="broker", topic="t")

    def test_no_pattern_is_refused(self) -> None:
        with pytest.raises(RouteError, match="at least one pattern"):
            Route(to="broker", topic="t")


class TestTogether:
    @pytest.mark.parametrize(
        ("one", "other", "complaint"),
        [
            (route("a.*", topic="t", name="one"), route("b.*", topic="t", name="two"), "share one topic"),
            (route("a.**", topic="t1"), route("a.b.*", topic="t2"), "overlap"),
            (route("a.*.c", topic="t1"), route("a.b.*", topic="t2"), "overlap"),
            (route("a.*", topic="t1", name="same"), route("b.*", topic="t2", name="same"), "same name"),
            (route("a.*", topic="t1"), route("b.*", to="nowhere", topic="t2"), "no transport is called 'nowhere'"),
        ],
    )
    def test_what_cannot_work_is_refused_with_both_routes_named(self, one: Route, other: Route, complaint: str) -> None:
        with pytest.raises(RouteError, match=complaint) as refused:
            Pillarbox("sqlite+aiosqlite://", transports={"broker": MemoryTransport()}, routes=[one, other])
        assert repr(other) in str(refused.value)
        if "nowhere" not in complaint:
            assert repr(one) in str(refused.value)

    def test_what_can_work_is_accepted(self) -> None:
        check_routes(
            [
                route("a.*", "b.*", topic="t"),
                route("a.*", topic="t", version=1),
                route("a.**", topic="audit", copy=True),
                route("a.*", to="other", topic="t"),
            ],
            ["broker", "other"],
        )

    def test_a_route_whose_own_patterns_overlap_is_refused(self) -> None:
        with pytest.raises(RouteError, match=r"'a\.\*' and 'a\.b'"):
            route("a.*", "a.b")

    def test_the_name_of_the_local_handlers_is_taken(self) -> None:
        with pytest.raises(RouteError, match="local"):
            Pillarbox("sqlite+aiosqlite://", transports={"local": MemoryTransport()})

    def test_two_handlers_of_one_name_are_refused(self) -> None:
        box = Pillarbox("sqlite+aiosqlite://")
        box.subscribe(Shipped, name="mail")(print)
        with pytest.raises(ConfigurationError, match="two consumers or handlers are called 'mail'"):
            box.subscribe(Shipped, name="mail")(print)
        with pytest.raises(ConfigurationError, match="two consumers or handlers are called 'mail'"):
            box.consumer("mail", source="outbox")
        with pytest.raises(ConfigurationError, match="at least one"):
            box.subscribe()

    @pytest.mark.parametrize(
        "options",
        [
            {"topic": ""},
            {"topic": "a\nb"},
            {"topic": "x" * 401},
            {"topic": "{region}"},
            {"topic": "{tenant"},
            {"topic": "tenant}"},
            {"topic": "{{tenant}}"},
            {"version": 0},
            {"version": "v1"},
            {"key": "parcel"},
            {"retry": 3},
            {"shard_by": "colour"},
            {"on_failure": "panic"},
            {"to": ""},
            {"name": "a\tb"},
        ],
    )
    def test_bad_options_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(RouteError):
            route(**options)

    def test_an_unknown_codec_is_refused_at_start(self) -> None:
        with pytest.raises(ConfigurationError, match="unknown codec 'xml'"):
            Pillarbox("sqlite+aiosqlite://", transports={"broker": MemoryTransport()}, routes=[route(codec="xml")])


class TestDeliveries:
    def test_headers_are_named_as_in_the_conventions(self) -> None:
        trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        with event_context(
            user_id="u",
            correlation_id="c",
            causation_id="d",
            source_service="s",
            source_version="v",
            traceparent=trace,
            tracestate="a=b",
        ):
            [row] = delivered(route(), tenant="acme")
        assert row.headers == {
            "event_id": str(row.event_id),
            "event_type": "tests.parcel.shipped",
            "aggregate_id": "p-1",
            "aggregate_type": "parcel",
            "version": "3",
            "occurred_at": row.headers["occurred_at"],
            "schema_version": "v2",
            "content_type": "application/json",
            "event_index": "0",
            "event_count": "1",
            "tenant_id": "acme",
            "user_id": "u",
            "correlation_id": "c",
            "causation_id": "d",
            "source_service": "s",
            "source_version": "v",
            "traceparent": trace,
            "tracestate": "a=b",
            "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
            "span_id": "00f067aa0ba902b7",
        }
        assert row.headers["occurred_at"].endswith("Z")

    def test_two_schema_versions_go_side_by_side(self) -> None:
        new, old = delivered(route(), route(version=1))
        assert (new.schema_version, new.body) == (2, b'{"parcel":"x","weight":0}')
        assert (old.schema_version, old.body, old.headers["schema_version"]) == (1, b'{"parcel":"x"}', "v1")
        assert new.event_id == old.event_id
        assert new.route != old.route

    def test_a_route_for_an_old_version_rests_while_the_event_is_at_it(self) -> None:
        assert len(delivered(route(), route(version=2))) == 1
        assert len(delivered(route(), route(version=2, topic="elsewhere"))) == 2

    def test_a_key_of_ones_own_decides_the_shard(self) -> None:
        [row] = delivered(route(key=lambda event: event.parcel), event=Shipped(parcel="box-7"))
        assert (row.key, row.shard) == ("box-7", stable_hash("box-7") % 16)
        [row] = delivered(route(shard_by="tenant"), tenant="acme")
        assert row.shard == stable_hash("acme") % 16
        with pytest.raises(TenancyError, match="sharded by tenant"):
            delivered(route(shard_by="tenant"))

    def test_h41_hashes_are_the_same_for_ever(self) -> None:
        assert [stable_hash(text) for text in ("", "a", "Ä", "order-1")] == [
            8238016292129134938,
            2340832890917691671,
            7939144648074683237,
            1354598356660093214,
        ]

    def test_h42_keys_are_taken_byte_by_byte(self) -> None:
        composed, decomposed = "\u00c4", "A\u0308"
        keys = [
            delivered(route(key=lambda event: event.parcel), event=Shipped(parcel=key))[0].key
            for key in (composed, decomposed, "a ", "a")
        ]
        assert keys == [composed, decomposed, "a ", "a"]

    def test_topics_name_tenant_and_aggregate(self) -> None:
        [row] = delivered(route(topic="{tenant}.{aggregate}.events"), tenant="acme")
        assert row.topic == "acme.parcel.events"
        with pytest.raises(TenancyError, match="names the tenant"):
            delivered(route(topic="{tenant}.events"))

    def test_a_topic_that_grows_too_long_is_refused(self) -> None:
        with pytest.raises(HeaderError, match="characters"):
            delivered(route(topic="x" * 380 + "{tenant}"), tenant="t" * 50)

    @pytest.mark.parametrize("tenant", ["a.b", "a/b", ".a", "persistent://x", "a b", "Ä", "x" * 101, "-a"])
    def test_s07_tenants_that_could_meet_in_a_topic_are_refused(self, tenant: str) -> None:
        with pytest.raises(HeaderError, match="topic name"):
            delivered(route(topic="{tenant}.events"), tenant=tenant)

    @pytest.mark.parametrize(
        ("template", "topic", "tenant", "may"),
        [
            ("orders-{tenant}", "orders-acme", "acme", True),
            ("orders-{tenant}", "orders-evil", "acme", False),
            ("orders-{tenant}", "orders-evil-acme", "acme", False),
            ("orders-{tenant}", "orders-acme.dlq", "acme", False),
            ("orders-{tenant}", "orders-a.me", "a.me", False),
            ("orders-{tenant}", "orders-{tenant}", "{tenant}", False),
            ("{tenant}.{aggregate}", "acme.order", "acme", True),
            ("{tenant}.{aggregate}", "evil.acme", "acme", False),
            ("a/b/orders-{tenant}", "a/b/orders-acme", "acme", True),
            ("a/b/orders-{tenant}", "a/c/orders-acme", "acme", False),
            ("persistent://{tenant}/pay/events", "persistent://acme/pay/events", "acme", True),
            ("persistent://{tenant}/pay/events", "persistent://evil/pay/events", "acme", False),
            ("{tenant}/{aggregate}/of-{tenant}", "acme/order/of-acme", "acme", True),
            ("{tenant}/{aggregate}/of-{tenant}", "acme/order/of-evil", "acme", False),
            ("{aggregate}/{aggregate}", "order/order", "acme", True),
            ("{aggregate}/{aggregate}", "order/bill", "acme", False),
            ("events", "evil/pay/events", "acme", False),
            ("{tenant}/orders", "acme/orders", "acme", True),
            ("{tenant}/orders", "evil/orders", "acme", False),
            ("orders", "orders", "acme", True),
            ("orders", "orders-acme", "acme", False),
            ("{aggregate}", "order", "acme", True),
        ],
    )
    def test_s54_a_topic_tells_whose_it_is(self, template: str, topic: str, tenant: str, may: bool) -> None:
        assert may_come_to(template, topic, tenant) is may

    def test_h69_too_large_is_refused_here_and_the_largest_field_is_named(self) -> None:
        with pytest.raises(PayloadTooLargeError, match="parcel: the body has"):
            delivered(route(), event=Shipped(parcel="x" * 2000), limits=Capabilities(max_body_bytes=1000))
        with event_context(user_id="u" * 2000), pytest.raises(PayloadTooLargeError, match="headers"):
            delivered(route(), limits=Capabilities(max_header_bytes=1000))

    @pytest.mark.parametrize("value", ["a\r\nb", "a\0", "\x1b[31m", "\ud800", "a\x7f"])
    def test_s15_headers_cannot_be_broken_out_of(self, value: str) -> None:
        with pytest.raises(HeaderError, match="user_id"), event_context(user_id=value):
            pass

    def test_s41_a_trace_context_that_is_none_is_refused(self) -> None:
        with pytest.raises(HeaderError, match="traceparent"), event_context(traceparent="00-xyz"):
            pass


class TestRecords:
    def test_the_name_is_stable_and_carries_destination_topic_and_version(self) -> None:
        assert route("a.*").name == route("b.*").name == "broker:tests"
        assert route(version=1).name == "broker:tests:v1"
        record = route(on_failure="skip", retry=RetryPolicy(base=1, cap=2, attempts=3)).record
        assert record.on_failure is FailurePolicy.SKIP
        assert record.retry == RetryPolicy(1, 2, 3)


class TestRetryPolicy:
    def test_waits_grow_to_the_cap_with_full_jitter(self) -> None:
        policy = RetryPolicy(base=10, cap=600, attempts=5)
        assert [policy.ceiling(attempt) for attempt in (1, 2, 3, 7, 10_000)] == [10, 20, 40, 600, 600]
        assert policy.delay(3, lambda: 0.5) == 20
        assert [policy.exhausted(attempt) for attempt in (4, 5)] == [False, True]

    @pytest.mark.parametrize("options", [{"base": 0}, {"base": 2, "cap": 1}, {"cap": float("inf")}, {"attempts": 0}])
    def test_senseless_policies_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            RetryPolicy(**options)
