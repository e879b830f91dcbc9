"""What a spill writes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

from pillarbox import clock
from pillarbox.codecs import Codecs
from pillarbox.consumers import spilling
from pillarbox.consumers.box import Box
from pillarbox.consumers.spilling import Spiller, Trouble, work_of
from pillarbox.inbox import Arrival, KnownBy, digest_of
from pillarbox.outbox import INBOX_DESTINATION, Delivery, count_rows
from pillarbox.retry import RetryPolicy
from pillarbox.route import Router
from pillarbox.transport import Capabilities, Message
from tests.memory.inbox import MemoryInbox
from tests.unit.test_progress import Stopped


async def test_another_body_under_a_known_id_is_spilled_as_such() -> None:
    written: list[Delivery] = []

    async def apart(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(None, *arguments)

    posts = SimpleNamespace(prepare=lambda _connection: None, committed=lambda *_: None)
    inbound = SimpleNamespace(append=lambda _connection, deliveries: written.extend(deliveries))
    router = Router([], Codecs().named, {INBOX_DESTINATION: Capabilities()}, 1)
    box = cast(Box, SimpleNamespace(router=router, posts=posts, inbound=inbound, apart=apart))
    inbox = MemoryInbox()
    spiller = Spiller("billing", box, inbox, lambda _connection: 1, retry=RetryPolicy(), on_failure="skip")
    for body in (b"1", b"2", b"2", b"1"):
        arrival = Arrival(UUID(int=1), 1, digest_of(body))
        await spiller.spill([Trouble(Message("orders", "k", body, {}), arrival, None)])
    assert [delivery.body for delivery in written] == [b"1", b"2"]
    found = [work_of(Message(it.topic, it.key, it.body, it.headers)).known_by for it in written]
    assert found == [KnownBy.EVENT, KnownBy.BODY]
    refused = [(spill.gate, spill.refused is None) for spill in inbox.claims.rows.values()]
    assert refused == [(True, True), (False, False)]


def test_lanes_are_not_woken_at_once_for_what_waits_behind_others_but_all_of_it_is_counted() -> None:
    told: list[int] = []
    posts = SimpleNamespace(committed=lambda rows, _prepared: told.append(sum(rows.values())))
    router = Router([], Codecs().named, {INBOX_DESTINATION: Capabilities()}, 1)
    box = cast(Box, SimpleNamespace(router=router, posts=posts))
    time = Stopped()
    with clock.use(time):
        spiller = Spiller("billing", box, MemoryInbox(), lambda _: 1, retry=RetryPolicy(), on_failure="skip")
        message = Trouble(Message("orders", "k", b"", {}), Arrival(UUID(int=1), 1, b""), None)
        one = count_rows([spiller._delivery(message)], {}), None
        spiller.committed(one, behind=True)
        spiller.committed(one, behind=True)
        spiller.committed(one, behind=True)
        assert told == [1]
        spiller.committed(one)
        assert told == [1, 3]
        spiller.committed(one, behind=True)
        time.seconds += spilling.BEHIND_SECONDS
        spiller.committed(one, behind=True)
        assert told == [1, 3, 2]
