"""``pillarbox trace``: the life of an event in the order of time, as far as the tables know it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from uuid import UUID

import click
from sqlalchemy import Connection

from ..codec import parse_moment
from ..outbox import Status
from ..stores import inspection
from ..stores.inspection import AuditEntry, Details
from .arguments import options
from .database import ask, load_settings, run
from .outbox import absent
from .output import CommandError, Exit, emit, number, table
from .why import handled

RAISED = "raised"


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happened, is so now (then it has no time), or will happen."""

    at: datetime | None
    event_id: UUID
    route: str | None
    what: str
    detail: str | None = None


@click.command()
@click.argument("event_id", type=click.UUID)
@options
def command(config: Path | None, as_json: bool, event_id: UUID) -> None:
    """Tell the life of an event: raised, written, tried, sent, and what people did with it.

    An event that was edited is followed, from the old one to the new one and back.
    """
    steps = run(ask(load_settings(config), lambda it: life(it, event_id)))
    if not steps:
        raise CommandError(absent(event_id), Exit.PROBLEM)
    rows = [(step.at or "now", step.route, step.what, step.detail) for step in steps]
    text = table([("AT", "ROUTE", "WHAT", "DETAIL"), *rows])
    emit({"event_id": event_id, "steps": [asdict(step) for step in steps]}, text, as_json=as_json)


def life(connection: Connection, event_id: UUID) -> list[Step]:
    """All that is known, oldest first; what is so now comes between what was and what will be."""
    identities, trail = _family(connection, event_id)
    now = inspection.database_time(connection)
    steps: list[Step] = []
    written: dict[tuple[UUID, str | None], datetime] = {}
    for identity in identities:
        for delivery in inspection.deliveries_of(connection, identity, payload=False):
            if (delivery.event_id, delivery.route) in written:
                continue
            written[delivery.event_id, delivery.route] = delivery.created_at
            trail |= {it.id: it for it in inspection.audit_trail(connection, event=delivery.event_id)}
            steps += _steps(delivery)
            steps += _asked(connection, delivery, trail)
            if delivery.status is Status.DISCARDED:
                trail |= {it.id: it for it in inspection.discarded_by(connection, delivery)}
    here = {route for _, route in written}
    for route, at, said in handled(connection, event_id, here):
        steps.append(Step(at, event_id, route, "handled", said))
    steps += [_done(it, event_id) for it in trail.values()]

    def place(step: Step) -> tuple[datetime, bool]:
        if step.what == RAISED and step.at is not None:  # by another clock, which may be ahead of the database's
            return min(step.at, written[step.event_id, step.route]), False
        return step.at or now, step.at is None

    return sorted(steps, key=place)


def _family(connection: Connection, event_id: UUID) -> tuple[list[UUID], dict[int, AuditEntry]]:
    """The event, those that it was edited into or from, and what people did with any of them."""
    identities, trail = [event_id], dict[int, AuditEntry]()
    for identity in identities:
        for entry in inspection.audit_trail(connection, event=identity):
            trail[entry.id] = entry
            if entry.action == "edit" and entry.event_id is not None:
                both = (entry.event_id, UUID(entry.details["new_event_id"]))
                identities += [each for each in both if each not in identities]
    return identities, trail


def _steps(delivery: Details) -> Iterator[Step]:
    def step(at: datetime | None, what: str, detail: str | None = None) -> Step:
        return Step(at, delivery.event_id, delivery.route, what, detail)

    if delivery.occurred_at is not None:
        with suppress(ValueError):  # a header, and people edit headers
            yield step(parse_moment(delivery.occurred_at), RAISED, delivery.event_type)
    yield step(delivery.created_at, "written", f"row {delivery.id}, shard {delivery.shard}, key {delivery.key}")
    if delivery.attempts:  # a redrive forgets them, and keeps the last error
        yield step(None, f"refused {number(delivery.attempts, 'time')}", delivery.last_error)
    batch = (
        f"batch {delivery.batch}" if delivery.number is None else f"batch {delivery.batch}, number {delivery.number}"
    )
    if delivery.status is Status.SENT:
        yield step(delivery.sent_at, "sent", batch)
    elif delivery.status is Status.SENDING:
        yield step(None, "being sent", f"{batch}, by {delivery.locked_by or 'nobody'}")
    else:
        yield step(None, delivery.status.lower())
    if delivery.status is Status.RETRYING:
        yield step(delivery.next_attempt_at, "next attempt")


def _asked(connection: Connection, delivery: Details, trail: dict[int, AuditEntry]) -> Iterator[Step]:
    """Requests that wait; those that the trail tells of by name are there already."""
    for request in inspection.open_requests(connection, delivery):
        if request.audit not in trail:
            what = f"{request.action} asked for by {request.who}"
            yield Step(request.at, delivery.event_id, delivery.route, what, f"audit entry {request.audit}")
        yield Step(None, delivery.event_id, delivery.route, f"{request.action} waits", "for the owner of the lane")


def _done(entry: AuditEntry, event_id: UUID) -> Step:
    what = f"{entry.action} asked for by {entry.who}"
    new = entry.details.get("new_event_id")
    new = None if new == str(entry.event_id) else new
    known = (entry.reason, new and f"goes on as {new}", f"audit entry {entry.id}")
    route = entry.details.get("route")
    return Step(entry.at, entry.event_id or event_id, route, what, "; ".join(filter(None, known)))
