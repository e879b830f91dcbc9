"""``pillarbox outbox``: look into the tables of deliveries, and mend what has failed.

Nothing here changes a delivery: the owner of its lane does what is asked for, in its next turn.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from uuid import UUID

import click
import msgspec
from sqlalchemy import Connection

from .. import clock
from ..codecs.json import parse_object
from ..consumers.spilling import with_body, work_of
from ..outbox import Direction, Status
from ..settings import Settings
from ..stores import inspection, operations
from ..stores.audit import Author
from ..stores.inspection import ANY_CONSUMER, AuditEntry, Details, Filter, Summary
from ..stores.operations import ELIGIBLE, Action, Run, Selection
from ..transport import Message
from .arguments import (
    MAX_ID,
    Whole,
    check_choice,
    check_text,
    confirm,
    confirmed,
    for_many,
    need_reason,
    one_direction,
    options,
    signed,
    together,
)
from .bodies import check_body
from .database import ask, change, changing, load_settings, run, signals
from .identity import command as new_install_id
from .output import CommandError, Exit, age, beside, emit, number, plain, shown, table
from .partitions import command as partition
from .rebase import command as rebase
from .why import edited, handled

_PORTION = 500
_SAMPLE = 10
PATTERN_HELP = "Event name; * is one part, ** at the end the rest."
_UNITS = {"s": 1, "min": 60, "h": 3_600, "d": 86_400}
_LONGEST = 36_500 * 86_400

_Command = TypeVar("_Command", bound=Callable[..., Any])
_T = TypeVar("_T")


@click.group(no_args_is_help=False)
def command() -> None:
    """Look into the outbox, and mend what has failed."""


command.add_command(rebase)
command.add_command(new_install_id)
command.add_command(partition)

# -- looking -----------------------------------------------------------------------------------------------------------


def check_pattern(_context: click.Context, _parameter: click.Parameter, pattern: str | None) -> str | None:
    if pattern is not None and not inspection.TYPE_PATTERN.fullmatch(pattern):
        raise click.BadParameter(
            f"{pattern!r} is no pattern of event names: write 'orders.order.placed', 'orders.order.*' or 'orders.**'."
        )
    return pattern


_filters = together(
    one_direction,
    click.option("--route", metavar="NAME", callback=check_text),
    click.option("--type", metavar="PATTERN", callback=check_pattern, help=PATTERN_HELP),
    click.option("--tenant", metavar="TENANT", callback=check_text),
    click.option("--key", metavar="KEY", callback=check_text),
)
"""The options that choose deliveries by what they are."""


@command.command("list")
@click.option("--status", type=click.Choice([each.value for each in Status]))
@_filters
@click.option("--limit", type=Whole(1, 10_000), metavar="N", default=50, show_default=True)
@click.option(
    "--after",
    type=Whole(0, MAX_ID),
    metavar="ID",
    default=0,
    help="Begin after this id, of the first direction that is listed.",
)
@options
def list_deliveries(
    config: Path | None, as_json: bool, *, limit: int, after: int, status: str | None, **filters: Any
) -> None:
    """List deliveries, oldest first: what goes out, then what is for consumers. Each has its own ids: to go on in the
    second, say --inbound.
    """
    wanted = Filter(Status(status) if status else None, **filters)
    show_page(load_settings(config), wanted, limit=limit, after=after, as_json=as_json)


def show_page(
    settings: Settings, wanted: Filter, *, limit: int, after: int, as_json: bool, with_reason: bool = False
) -> None:
    """Print the deliveries that match, from the first one after an id, and where the next page begins."""
    found = run(ask(settings, lambda it: inspection.deliveries(it, wanted, after=after, limit=limit + 1)))
    page, following = found[:limit], found[limit - 1] if len(found) > limit else None
    text = _listed(page, with_reason=with_reason)
    if following is not None:
        of = "--inbound " if following.direction is Direction.INBOUND else ""
        text += f"\nthere are more: {of}--after {following.id}"
    told = None if following is None else {"direction": following.direction, "after": following.id}
    emit({"deliveries": [asdict(it) for it in page], "next": told}, text, as_json=as_json)


def _listed(deliveries: list[Summary], *, with_reason: bool = False) -> str:
    rows = [
        (it.id, it.status, it.route, it.event_type, it.tenant_id, it.key, it.attempts, it.created_at, it.event_id)
        for it in deliveries
    ]
    headings = ("ID", "STATUS", "ROUTE", "TYPE", "TENANT", "KEY", "ATTEMPTS", "CREATED", "EVENT")
    if not rows:
        return "no deliveries"
    text = table([headings, *rows])
    return beside(text, ["REASON", *(it.last_error for it in deliveries)]) if with_reason else text


@command.command()
@click.argument("event_id", type=click.UUID)
@click.option("--payload", is_flag=True, help="Show the payload, too. It may hold personal data.")
@options
def show(config: Path | None, as_json: bool, event_id: UUID, payload: bool) -> None:
    """Show all deliveries of one event."""
    found = run(ask(load_settings(config), lambda it: _shown(it, event_id, payload=payload)))
    described = [{name: value for name, value in asdict(it).items() if payload or name != "payload"} for it in found]
    text = "\n\n".join(_described(it, payload=payload) for it in found)
    emit({"event_id": event_id, "deliveries": described}, text, as_json=as_json)


def _shown(connection: Connection, event_id: UUID, *, payload: bool) -> list[Details]:
    found = _deliveries_of(connection, event_id, payload=payload)
    return [_opened(connection, it) for it in found] if payload else found


def _opened(connection: Connection, delivery: Details) -> Details:
    """The view sees no JSON in a message that is stored as one binary."""
    row = _row(connection, delivery)
    message = work_of(row).message
    if delivery.payload is not None or message.body == row.body:
        return delivery
    ours = {name: value for name, value in row.headers.items() if name not in message.headers}
    text = message.body.decode(errors="backslashreplace")
    return replace(delivery, headers={**message.headers, **ours}, payload=text)


def _row(connection: Connection, delivery: Details) -> Message:
    """A delivery, as it stands in its lane."""
    return Message(delivery.topic, delivery.key, inspection.body_of(connection, delivery), delivery.headers)


def _deliveries_of(connection: Connection, event_id: UUID, *, payload: bool = False) -> list[Details]:
    if found := inspection.deliveries_of(connection, event_id, payload=payload):
        return found
    raise CommandError(_gone(connection, event_id), Exit.PROBLEM)


def _gone(connection: Connection, event_id: UUID) -> str:
    """Why there is no delivery to do anything with: it was edited, or dealt with, or see `absent`."""
    said = [f"event {event_id}, {route}: {it.detail}; {it.remedy}" for route, it in edited(connection, event_id)]
    found = inspection.deliveries_of(connection, event_id, payload=False)
    said += [f"event {event_id} is {it.status} for {it.route!r}" for it in found]
    said += [f"event {event_id}: {dealt}" for _, _, dealt in handled(connection, event_id, {it.route for it in found})]
    return "\n".join(said) or absent(event_id)


def absent(event_id: UUID) -> str:
    """What can be said about an event that is not there."""
    return f"the outbox has no event {event_id}: its transaction did not commit, no route takes it, or it was pruned"


@command.command()
@one_direction
@options
def stats(config: Path | None, as_json: bool, direction: Direction | None) -> None:
    """Count deliveries per route and status."""
    groups = run(ask(load_settings(config), lambda it: inspection.statistics(it, direction)))
    rows = [(it.route, it.status, it.count, age(it.oldest_age_seconds), it.oldest_at) for it in groups]
    text = table([("ROUTE", "STATUS", "COUNT", "OLDEST", "SINCE"), *rows]) if rows else "no deliveries"
    emit({"groups": [asdict(it) for it in groups]}, text, as_json=as_json)


@command.command()
@click.option("--event", type=click.UUID, metavar="EVENT_ID", help="Only what names this event.")
@click.option("--limit", type=Whole(1, 10_000), metavar="N", default=50, show_default=True)
@click.option("--payload", is_flag=True, help="Show bodies that were replaced, too. They may hold personal data.")
@options
def audit(config: Path | None, as_json: bool, event: UUID | None, limit: int, payload: bool) -> None:
    """List what people did, newest first."""
    trail = run(ask(load_settings(config), lambda it: inspection.audit_trail(it, event=event, limit=limit)))
    entries = [asdict(it) | {"details": _details(it, payload=payload)} for it in trail]
    headings = ("ID", "AT", "WHO", "ACTION", "TARGET", "REASON", "DETAILS")
    rows = [
        (it["id"], it["at"], it["who"], it["action"], it["target"], it["reason"], _flat(it["details"]))
        for it in entries
    ]
    emit({"entries": entries}, table([headings, *rows]) if rows else "no audit entries", as_json=as_json)


def _details(entry: AuditEntry, *, payload: bool) -> dict[str, Any]:
    return {name: value for name, value in entry.details.items() if payload or name != "old_body"}


def _flat(details: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in details.items() if name not in ("filter", "rows"))


def _described(delivery: Details, *, payload: bool) -> str:
    values = asdict(delivery)
    headers, body = values.pop("headers"), values.pop("payload")
    values |= {f"header {name}": value for name, value in sorted(headers.items())}
    if payload:
        values["payload"] = f"not JSON: {delivery.content_type}" if body is None else body
    return table([(name, shown(value)) for name, value in values.items()])


# -- asking ------------------------------------------------------------------------------------------------------------


def duration(_context: click.Context, _parameter: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)(s|min|h|d)", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no duration: write '90s', '15min', '2h' or '7d'.")
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > _LONGEST:
        raise click.BadParameter(f"{text!r} is too long: at most '{_LONGEST // 86_400}d'.")
    return seconds


def _selecting(action: Action) -> Callable[[_Command], _Command]:
    """The arguments of commands that ask for something for many deliveries."""
    return together(
        click.argument("event_ids", type=click.UUID, nargs=-1, metavar="[EVENT_ID]..."),
        click.option(
            "--status",
            type=click.Choice([each.value for each in ELIGIBLE[action]]),
            help="[default: FAILED; of events that are named, any of these]",
        ),
        _filters,
        click.option("--older-than", metavar="TIME", callback=duration, help="Age: 90s, 15min, 2h, 7d."),
        for_many,
    )


@command.command()
@_selecting(Action.REDRIVE)
@options
def redrive(config: Path | None, as_json: bool, **given: Any) -> None:
    """Have failed deliveries tried again, now and with all their attempts before them.

    Named by their events, or chosen by filters. Ctrl-C and SIGTERM stop between two portions.
    """
    request(Action.REDRIVE, load_settings(config), as_json=as_json, **given)


@command.command()
@_selecting(Action.DISCARD)
@confirmed
@options
def discard(config: Path | None, as_json: bool, **given: Any) -> None:
    """Have deliveries taken out: they are never sent, and their key goes on without them.

    Named by their events, or chosen by filters. Ctrl-C and SIGTERM stop between two portions.
    """
    request(Action.DISCARD, load_settings(config), as_json=as_json, **given)


def request(
    action: Action,
    settings: Settings,
    *,
    as_json: bool,
    event_ids: tuple[UUID, ...],
    everything: bool,
    status: str | None,
    limit: int | None,
    rate: float | None,
    dry_run: bool,
    author: Author,
    yes: bool = False,
    of_consumers: bool = False,
    **filters: Any,
) -> None:
    """Ask for something for the deliveries that are chosen, and print what became of it."""
    by = "--consumer, --topic" if of_consumers else "--route"
    instead = f"Name events, or choose by {by}, --type, --tenant, --key or --older-than"
    check_choice(event_ids, *filters.values(), everything=everything, instead=instead)
    if of_consumers:
        filters["consumer"] = filters["consumer"] or ANY_CONSUMER
    default = None if event_ids else Status.FAILED
    selection = Selection(action, Filter(Status(status) if status else default, **filters), event_ids)
    report = run(ask(settings, lambda it: _look(it, selection, limit)))
    code = Exit.FINE
    if report["selected"] and not dry_run:
        if action is Action.DISCARD:
            confirm(f"discard {number(report['selected'], 'delivery')} ({selection})", yes=yes)
        done, code = run(_run(settings, selection, author, total=report["selected"], rate=rate))
        report |= done
    report["dry_run"] = dry_run
    emit(report, _told(report), as_json=as_json, code=code)


def _look(connection: Connection, selection: Selection, limit: int | None) -> dict[str, Any]:
    """What is selected, before anything is done."""
    statuses = operations.left_alone(connection, selection) if selection.events else {}
    missing = [_gone(connection, event) for event in selection.events if event not in statuses]
    if missing:
        raise CommandError("\n".join(missing), Exit.PROBLEM)
    found, asked_before = operations.count(connection, selection)
    selected = min(found, limit or found)
    return {
        "action": selection.action,
        "selected": selected,
        "requested": 0,
        "left": selected,
        "asked_before": asked_before,
        "left_alone": {str(event): each for event, each in statuses.items() if each},
        "unserved": [],
        "audit": None,
        "sample": [asdict(it) for it in operations.sample(connection, selection, min(selected, _SAMPLE))],
    }


async def _run(
    settings: Settings, selection: Selection, author: Author, *, total: int, rate: float | None
) -> tuple[dict[str, Any], Exit]:
    """Portion by portion, each in a transaction of its own; never more than was counted, and shown, before."""
    size = _PORTION if rate is None else min(_PORTION, max(1, int(rate)))
    progress = Run()
    async with changing(settings) as engine:
        with signals() as told:
            while progress.requested < total and not told.done():
                before, portion = progress, min(size, total - progress.requested)
                async with engine.begin() as connection:
                    progress = await connection.run_sync(operations.request, selection, author, before, portion)
                if progress == before:  # others were quicker
                    break
                if rate is not None and progress.requested < total:
                    await asyncio.wait([told], timeout=portion / rate)
            code = told.result() if told.done() and progress.requested < total else Exit.FINE
        async with engine.connect() as connection:
            unserved = await connection.run_sync(operations.unserved_requests, progress)
    left = total - progress.requested if code else 0
    done = {"requested": progress.requested, "left": left, "unserved": unserved, "audit": progress.audit}
    return done, code


def _told(report: dict[str, Any]) -> str:
    action, selected = report["action"], number(report["selected"], "delivery")
    if report["dry_run"] or not report["selected"]:
        lines = [f"{action}: {selected} would be asked for" if report["selected"] else f"{action}: nothing to do"]
        if report["sample"]:
            lines.append(_listed([Summary(**it) for it in report["sample"]]))
    else:
        lines = [f"{action}: {report['requested']:,} of {selected} asked for, audit entry {report['audit'] or '-'}"]
    if report["left"] and not report["dry_run"]:
        lines.append(f"stopped: {number(report['left'], 'delivery')} left")
    if report["asked_before"]:
        lines.append(f"{number(report['asked_before'], 'delivery')}: asked for before, and not done yet")
    lines += [f"event {event} is {', '.join(each)}: left alone" for event, each in report["left_alone"].items()]
    lines += [_waits(route) for route in report["unserved"]]
    return "\n".join(lines)


def _waits(route: str) -> str:
    return plain(f"no live relay serves route {route!r}: what is asked for waits until one does")


@command.command()
@click.argument("event_id", type=click.UUID)
@click.argument("box", required=False, metavar="[MODULE:BOX]")
@click.option("--route", metavar="NAME", callback=check_text, help="Needed if several of its deliveries have failed.")
@click.option("--body", type=click.File("rb"), required=True, metavar="FILE", help="The new body; - is standard input.")
@signed
@options
def edit(
    config: Path | None,
    as_json: bool,
    event_id: UUID,
    *,
    box: str | None,
    route: str | None,
    body: BinaryIO,
    author: Author,
    dry_run: bool,
) -> None:
    """Have another body sent in place of one that failed, as a new event that names the old one.

    With MODULE:BOX, a Pillarbox in your code, the new body must make an event of its class. What waits for a consumer
    stays the event that it is. The old body is kept in the audit trail. --reason is required.
    """
    need_reason(author, "why the body is changed")
    settings, decode = load_settings(config), None if box is None else _decoder(box)
    delivery, row = run(ask(settings, lambda it: _editable(it, event_id, route)))
    new_id = delivery.event_id if delivery.direction is Direction.INBOUND else clock.new_id()
    old = work_of(row).message
    new = _checked(body.read(), old, in_body=None if new_id == delivery.event_id else new_id)
    if decode is not None:
        _check_class(decode, msgspec.structs.replace(old, body=new))
    report: dict[str, Any] = {"event_id": event_id, "new_event_id": new_id, "route": delivery.route}
    report |= {"bytes": len(new), "checked": box is not None, "audit": None, "unserved": [], "dry_run": dry_run}
    if not dry_run:
        bodies = {"old": old.body, "new": with_body(row, new)}
        entry, unserved = run(change(settings, lambda it: _edit(it, delivery, author, event_id=new_id, **bodies)))
        report |= {"audit": entry, "unserved": unserved}
    said = "the new body can be sent"
    if not dry_run:
        goes_on = "" if new_id == delivery.event_id else f", to go on as event {new_id}"
        said = f"asked for{goes_on}, audit entry {report['audit']}"
    lines = [f"edit: {said}", *([] if box else [_UNCHECKED]), *map(_waits, report["unserved"])]
    emit(report, "\n".join(lines), as_json=as_json)


_UNCHECKED = "the body was not held against the class of the event: MODULE:BOX does that"


def _editable(connection: Connection, event_id: UUID, route: str | None) -> tuple[Details, Message]:
    """The one failed delivery that is meant, and how it stands in its lane."""
    found = _deliveries_of(connection, event_id)
    meant = [it for it in found if it.route is not None and route in (None, it.route)]
    failed = [it for it in meant if it.status in ELIGIBLE[Action.EDIT] and not inspection.took_effect(connection, it)]
    if not failed and any(inspection.took_effect(connection, it) for it in meant):
        raise CommandError(f"event {event_id} was {operations.TOOK_EFFECT}: there is nothing to edit", Exit.PROBLEM)
    if not failed:
        states = ", ".join(f"{it.status} for {it.route!r}" for it in meant or found)
        raise CommandError(f"only a delivery that has failed can be edited; event {event_id} is {states}", Exit.PROBLEM)
    if len(failed) > 1:
        names = " or ".join(repr(it.route) for it in failed)
        raise CommandError(f"several deliveries of event {event_id} have failed: say --route {names}", Exit.USAGE)
    return failed[0], _row(connection, failed[0])


def _edit(connection: Connection, delivery: Details, author: Author, **bodies: Any) -> tuple[int, list[str]]:
    entry = operations.edit(connection, delivery, author, **bodies)
    if entry is None:
        raise CommandError(f"an edit of event {delivery.event_id} for {delivery.route!r} waits already", Exit.PROBLEM)
    return entry, operations.unserved_requests(connection, Run(audit=entry))


def _checked(new: bytes, old: Message, *, in_body: UUID | None) -> bytes:
    """The body as it will be sent. Some formats keep the identity there: with the old one, consumers would take a new
    event for a duplicate.
    """
    if check_body(new, old) is None or in_body is None:
        return new
    return msgspec.json.encode(parse_object(new) | {"id": str(in_body)})


def _decoder(reference: str) -> Callable[[Message], object]:
    from .serving import load_box  # noqa: PLC0415  the other commands need no code of users

    return load_box(reference).decode


def _check_class(decode: Callable[[Message], object], message: Message) -> None:
    try:
        decode(message)
    except Exception as error:  # by code of the event's own class, too
        name = message.headers.get("event_type", "event")
        raise CommandError(f"the body makes no {name}: {type(error).__name__}: {error}", Exit.PROBLEM) from None


from . import retention  # noqa: E402, F401  it adds its commands to ours, and needs what is above
