"""``pillarbox why``: the one thing that holds an event back, and what to do about it.

Questions are asked in the order in which the answers matter, and the first one that applies is the cause: what needs a
person comes before what needs a relay, and that before what only needs time.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import NamedTuple
from uuid import UUID

import click
from sqlalchemy import Connection

from .. import clock
from ..lane_report import BUG, STUMBLED
from ..outbox import INBOX_DESTINATION, LOCAL, RouteRecord, Status
from ..rejections import REJECTS_EVERYTHING
from ..stores import inbox as stored
from ..stores import inspection, overview
from ..stores.inspection import AuditEntry, Details, OpenRequest
from ..stores.overview import LaneState, TenantState
from .arguments import options
from .database import ask, load_settings, run
from .output import Exit, age, emit, number, plain, shown, when


class Cause(NamedTuple):
    """What holds a delivery back: a name that stays, the circumstances, and what to do, if anything."""

    slug: str
    detail: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The cause for one delivery."""

    event_id: UUID
    route: str | None
    state: Status | None
    cause: str
    detail: str
    remedy: str | None


@click.command()
@click.argument("event_id", type=click.UUID)
@options
def command(config: Path | None, as_json: bool, event_id: UUID) -> None:
    """Say for each delivery of an event what holds it back, and what to do. Exits with 1 if there is no such event."""
    answers = run(ask(load_settings(config), lambda it: explain(it, event_id)))
    text = "\n".join(map(_described, answers))
    code = Exit.PROBLEM if all(answer.cause == "absent" for answer in answers) else Exit.FINE
    emit({"event_id": event_id, "deliveries": [asdict(it) for it in answers]}, text, as_json=as_json, code=code)


def _described(answer: Answer) -> str:
    where = f"event {answer.event_id}" if answer.route is None else answer.route
    state = answer.state or ("in the inbox" if answer.cause == "handled" else "not in the outbox")
    lines = [f"{where}: {state} ({answer.cause})", answer.detail, answer.remedy]
    return "\n  ".join(plain(line) for line in lines if line)


def explain(connection: Connection, event_id: UUID) -> list[Answer]:
    """An answer for each delivery of the event, and for each that goes on as another event."""
    found = inspection.deliveries_of(connection, event_id, payload=False)
    answers = [Answer(event_id, it.route, it.status, *_cause(connection, it)) for it in found]
    here = {it.route for it in found}
    answers += [Answer(event_id, route, None, *it) for route, it in edited(connection, event_id) if route not in here]
    answers += [
        Answer(event_id, route, None, "handled", said, None) for route, _, said in handled(connection, event_id, here)
    ]
    return answers or [Answer(event_id, None, None, *_absent(event_id))]


def edited(connection: Connection, event_id: UUID) -> list[tuple[str, Cause]]:
    """The routes for which the event was to go on as another one, which the cause names."""
    trail = inspection.audit_trail(connection, event=event_id, actions=["edit"])
    return [(it.details["route"], _edited(it)) for it in trail if it.event_id == event_id]


def handled(connection: Connection, event_id: UUID, here: Set[str | None]) -> list[tuple[str, datetime, str]]:
    """The consumers that have dealt with an event, of which no delivery tells: the route by which it would come to
    each, since when the inbox knows it, and what can be said about that.
    """
    return [
        (f"consumer:{it.consumer}", it.at, f"consumer {it.consumer} has dealt with it; it came in at {when(it.at)}")
        for it in stored.dealt_with(connection, event_id)
        if here.isdisjoint((f"consumer:{it.consumer}", f"{LOCAL}:{it.consumer}"))
    ]


def _cause(connection: Connection, delivery: Details) -> Cause:
    if delivery.status is Status.SENT:
        numbered = "" if delivery.number is None else f", number {delivery.number}"
        return Cause("sent", f"sent at {shown(delivery.sent_at)}, batch {delivery.batch}{numbered}")
    if delivery.status is Status.DISCARDED:
        runs = inspection.discarded_by(connection, delivery)
        return Cause("discarded", " or ".join(_did(it, "discarded") for it in runs) or "the trail does not say by whom")
    if inspection.took_effect(connection, delivery):
        return Cause("took-effect", "its consumer has dealt with it, and its lane settles it when it comes to it")
    case = _case(connection, delivery)
    if case is None:
        return Cause(
            "no-lane",
            f"the database knows no route and lane for it (topic {delivery.topic!r}, shard {delivery.shard})",
            "start a service that has its route: it makes the lanes",
        )
    return next(cause for question in _QUESTIONS if (cause := question(case)))


def _edited(edit: AuditEntry) -> Cause:
    new = edit.details["new_event_id"]
    return Cause("edited", f"{_did(edit, 'edited')}: it goes on as event {new}", f"see `pillarbox why {new}`")


def _absent(event_id: UUID) -> Cause:
    raised = f"it was raised at {when(clock.time_of(event_id))}; " if event_id.version == 7 else ""
    detail = f"{raised}its transaction did not commit, or has not yet; or no route takes it; or it was pruned"
    return Cause("absent", detail, "see the log of the service that raised it, and its routes")


def _did(entry: AuditEntry, what: str) -> str:
    return f"{what} by {entry.who} at {when(entry.at)}" + (f" ({entry.reason})" if entry.reason else "")


# -- deliveries that are still to be sent ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Case:
    """A delivery, and all that may hold it back."""

    connection: Connection
    delivery: Details
    route: RouteRecord
    lane: LaneState
    tenant: TenantState | None
    serving: list[str]
    """Live relays that serve its lane."""
    asked: list[OpenRequest]
    """What people want done with it."""
    head: Details | None
    """The delivery of its key that goes before it."""
    now: datetime

    @property
    def needs(self) -> str:
        return _needs(self.route.destination, self.route.topic)

    @property
    def start_a_relay(self) -> str:
        return start_a_relay(self.route.destination, self.route.topic)


def _needs(destination: str, topic: str) -> str:
    if destination == INBOX_DESTINATION:
        return f"the consumer {topic!r}"
    return f"the handler {topic!r}" if destination == LOCAL else f"the destination {destination!r}"


def start_a_relay(destination: str, topic: str) -> str:
    """What to do about a route that nobody serves. Handlers are in a module of the user's, which we do not know."""
    if destination == INBOX_DESTINATION:
        return f"start the consumer: `pillarbox consume MODULE:BOX {quote(topic)}`"
    said = f"start a relay that has {_needs(destination, topic)}: `pillarbox relay"
    if destination != LOCAL:
        return f"{said}`"
    return f"{said} MODULE:BOX` with the module that has it, or `pillarbox consume MODULE:BOX` if it is a consumer"


def _case(connection: Connection, delivery: Details) -> _Case | None:
    route = overview.route_named(connection, delivery.route) if delivery.route else None
    lanes = overview.lane_states(connection, delivery.route, delivery.shard)
    if route is None or not lanes:
        return None
    tenants = [it for it in overview.tenant_states(connection) if it.tenant == delivery.tenant_id]
    return _Case(
        connection=connection,
        delivery=delivery,
        route=route,
        lane=lanes[0],
        tenant=tenants[0] if tenants else None,
        serving=[it.name for it in overview.live_relays(connection) if it.serves(route.name, delivery.shard)],
        asked=inspection.open_requests(connection, delivery),
        head=_head(connection, delivery, route),
        now=inspection.database_time(connection),
    )


def _head(connection: Connection, delivery: Details, route: RouteRecord) -> Details | None:
    if delivery.status not in (Status.PENDING, Status.PARKED):
        return None
    head = inspection.head_of_key(connection, delivery, route)
    # Behind one that is sent for the first time nothing waits: both may go in one batch.
    return None if head and (head.status, delivery.status) == (Status.SENDING, Status.PENDING) else head


def _failed(case: _Case) -> Cause | None:
    if case.delivery.status is not Status.FAILED or case.asked:
        return None
    return Cause("failed", _attempts(case.delivery), _mend(case.delivery))


def _behind_failed(case: _Case) -> Cause | None:
    head = case.head
    if head is None or head.status is not Status.FAILED or case.asked:
        return None
    if inspection.open_requests(case.connection, head):
        return None
    return Cause("parked", f"waits behind event {head.event_id} of the same key, which {_attempts(head)}", _mend(head))


def _attempts(delivery: Details) -> str:
    return f"failed after {number(delivery.attempts, 'attempt')}: {delivery.last_error or 'no error is known'}"


def _mend(delivery: Details) -> str:
    return (
        f"remove the cause, then `pillarbox outbox redrive {delivery.event_id}`; "
        "or `outbox edit` its body, or `outbox discard` it"
    )


def _lane_paused(case: _Case) -> Cause | None:
    lane = case.lane
    if not lane.paused or (case.delivery.status is Status.SENDING and lane.held):
        return None
    whole_route = f"route {lane.route}"
    entry = inspection.last_done(case.connection, "pause", [f"lane {lane}", whole_route])
    stopped = lane.route if entry is not None and entry.target == whole_route else str(lane)
    detail = f"{whole_route if stopped == lane.route else f'lane {lane}'} was {_paused(entry)}"
    return Cause("lane-paused", detail, f"`pillarbox lanes resume {quote(stopped)}`")


def _tenant_paused(case: _Case) -> Cause | None:
    if case.tenant is None or not case.tenant.paused or case.delivery.status is Status.SENDING:
        return None
    name = f"tenant {case.tenant.tenant}"
    remedy = f"`pillarbox lanes resume --tenant {quote(case.tenant.tenant)}`"
    entry = inspection.last_done(case.connection, "pause", [name])
    return Cause("tenant-paused", f"{name} was {_paused(entry)}", remedy)


def _paused(entry: AuditEntry | None) -> str:
    return "paused, the trail does not say by whom" if entry is None else _did(entry, "paused")


def _nobody_there(case: _Case) -> Cause | None:
    lane, some = case.lane, ", ".join(case.serving)
    if lane.held:
        return None
    if lane.owner is not None:
        since = age(-(lane.lease_seconds or 0.0))
        detail = f"lane {lane} belongs to {lane.owner}, whose lease has expired {since} ago"
        return Cause("lease-expired", detail, f"{some} will take it over" if some else case.start_a_relay)
    if case.serving:
        return Cause("lane-free", f"lane {lane} has no owner yet", f"{some} will take it; if not, see its log")
    return Cause("no-relay", f"no live relay serves lane {lane}, which needs {case.needs}", case.start_a_relay)


def _trouble(case: _Case) -> Cause | None:
    lane = case.lane
    if lane.trouble is None or _is_of_another_tenant(lane.trouble, case.delivery.tenant_id):
        return None
    said = f"{lane.owner} cannot send from lane {lane}: {lane.trouble}"
    if lane.trouble_seconds is None:
        remedy = f"it waits for a person: remove the cause, then `pillarbox lanes release {quote(str(lane))}`"
        return Cause("lane-halted", said, remedy)
    again = f"tries again in {age(lane.trouble_seconds)}" if lane.trouble_seconds > 0 else "is trying again"
    return Cause("destination-trouble", f"{said}; it {again}", remedy_for(lane.trouble, case.needs))


def _is_of_another_tenant(trouble: str, tenant: str | None) -> bool:
    return " of tenant " in trouble and f" of tenant {tenant} rejects" not in trouble


def remedy_for(trouble: str, needs: str) -> str:
    """What to do about a lane that tries again by itself."""
    if BUG in trouble:
        return "fix the transport: the log of the relay has the traceback; nothing is wrong with the destination"
    if STUMBLED in trouble:
        return "see that the database answers; else it is a bug: the log of the relay has the traceback"
    if REJECTS_EVERYTHING in trouble:
        return f"see why {needs} rejects it: missing rights, a schema, a topic that does not exist"
    return f"see that {needs} can be reached"


def _asked(case: _Case) -> Cause | None:
    if not case.asked:
        return None
    first = case.asked[0]
    detail = f"{first.who} asked for its {first.action} at {when(first.at)}, and {case.lane.owner} has not done it yet"
    return Cause("request-waiting", detail, "it is done in the next turn of the lane")


def _sending(case: _Case) -> Cause | None:
    if case.delivery.status is not Status.SENDING:
        return None
    tries = f", after {number(case.lane.tries, 'owner')} that did not finish" if case.lane.tries else ""
    where = f"batch {case.delivery.batch}"
    return Cause("sending", f"{case.lane.owner} is sending it: {where}{tries}")


def _retrying(case: _Case) -> Cause | None:
    if case.delivery.status is not Status.RETRYING:
        return None
    return Cause("retrying", _again(case, case.delivery))


def _again(case: _Case, delivery: Details) -> str:
    due = delivery.next_attempt_at
    next_one = "due now" if due is None or due <= case.now else f"next attempt at {when(due)}"
    tried = f"{delivery.attempts} of {case.route.retry.attempts} attempts"
    return f"{next_one}, after {tried}: {delivery.last_error or 'no error is known'}"


def _behind(case: _Case) -> Cause | None:
    if case.head is not None:
        state = "being sent" if case.head.status is Status.SENDING else _again(case, case.head)
        return Cause("parked", f"waits behind event {case.head.event_id} of the same key, which is {state}")
    if case.delivery.status is Status.PARKED:
        return Cause("parked", "what it waited for is gone: the next turn of the lane sends it")
    return None


def _slowed(case: _Case) -> Cause | None:
    if case.lane.rate is not None:
        rate, what, option = case.lane.rate, f"lane {case.lane}", quote(str(case.lane))
    elif case.tenant is not None and case.tenant.rate is not None:
        rate, what, option = case.tenant.rate, f"tenant {case.tenant.tenant}", f"--tenant {quote(case.tenant.tenant)}"
    else:
        return None
    detail = f"{what} is held to {rate:g} per second, and {_line(case)}"
    return Cause("rate-limited", detail, f"`pillarbox lanes rate {option} --none` lifts it")


def _in_line(case: _Case) -> Cause:
    return Cause("backlog", f"{case.lane.owner} works on lane {case.lane}, and {_line(case)}")


def _line(case: _Case) -> str:
    return f"{number(inspection.pending_before(case.connection, case.delivery), 'delivery')} of the lane go first"


_QUESTIONS: tuple[Callable[[_Case], Cause | None], ...] = (
    _failed,
    _behind_failed,
    _lane_paused,
    _tenant_paused,
    _nobody_there,
    _trouble,
    _asked,
    _sending,
    _behind,
    _retrying,
    _slowed,
    _in_line,
)
