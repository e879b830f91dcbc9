"""``pillarbox consumers``: who consumes, how far each has come, and how one is forgotten."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec
from sqlalchemy import Connection

from ..app import Pillarbox
from ..consumers.box import OUTBOX
from ..consumers.consumer import Consumer
from ..consumers.dead_letters import SUFFIX, consumer_of
from ..outbox import LOCAL
from ..settings import Settings
from ..stores import claims, forgetting
from ..stores.audit import Author, note
from ..stores.forgetting import Remains
from ..stores.inbox import ConsumerRecord, count_settled
from ..stores.inbox import consumers as registered
from ..stores.overview import backlog
from ..transport import Unsubscribes
from .arguments import check_text, confirm, confirmed, options, signed
from .database import ask, changing, load_settings, run, signals
from .output import CommandError, Exit, age, emit, number, plain, table
from .serving import load_box


@click.group(no_args_is_help=False)
def command() -> None:
    """See who consumes, and how far each has come; forget one that is gone."""


# -- looking -----------------------------------------------------------------------------------------------------------


exactly = click.option(
    "--exact", is_flag=True, help="Count the inboxes, too: true whatever was killed, and slow if they are large."
)


@command.command("list")
@exactly
@options
def list_consumers(config: Path | None, as_json: bool, exact: bool) -> None:
    """List the consumers and projections that were ever registered in this database."""
    found = run(ask(load_settings(config), lambda it: look(it, exact=exact)))
    emit({"consumers": found}, listed(found, exact=exact), as_json=as_json)


def look(connection: Connection, *, exact: bool, kind: str | None = None) -> list[dict[str, Any]]:
    """All of them, or those of a kind, and what waits for each."""
    waiting = Counter[str]()
    for each in claims.waiting(connection):
        waiting[each.consumer] += each.messages
    of_routes = {each.route: each.pending + each.failed for each in backlog(connection)}
    found = []
    for it in registered(connection):
        if kind not in (None, it.kind):
            continue
        if it.source == OUTBOX:
            waiting[it.name] = of_routes.get(f"{LOCAL}:{it.name}", 0)
        settled = count_settled(connection, it) if exact else None
        found.append({**msgspec.structs.asdict(it), "settled": settled, "waiting": waiting[it.name]})
    return found


def listed(found: list[dict[str, Any]], *, exact: bool) -> str:
    """For people."""
    amounts = ("generation", "handled", *(["settled"] if exact else []), "waiting")
    headings = ("NAME", "KIND", "SOURCE", "TOPICS", *map(str.upper, amounts), "LAG", "LAST EVENT", "SEEN")
    rows = [
        (
            *(it["name"], it["kind"], it["source"], ", ".join(it["topics"]) or None, *(it[each] for each in amounts)),
            *(None if it["lag"] is None else age(it["lag"]), it["last_event_id"], it["seen_at"]),
        )
        for it in found
    ]
    return table([headings, *rows]) if rows else "none"


# -- forgetting --------------------------------------------------------------------------------------------------------


@command.command()
@click.argument("name", callback=check_text)
@click.argument("box", required=False, metavar="[MODULE:BOX]")
@click.option("--discard", is_flag=True, help="Discard what waits for it: none of that ever takes effect.")
@confirmed
@signed
@options
def forget(
    config: Path | None,
    as_json: bool,
    *,
    name: str,
    box: str | None,
    discard: bool,
    author: Author,
    dry_run: bool,
    yes: bool,
) -> None:
    """Remove what the database has of a consumer that is gone: its inbox, what waits for it, its routes and lanes.

    With MODULE:BOX, a Pillarbox in your code that has its source, its subscription at the broker is removed, too. Stop
    its processes, and take it out of your code first: it would come back. The table of a projection is left.
    """
    settings = load_settings(config)
    found = run(ask(settings, lambda it: forgetting.remains(it, name)))
    if found.waiting and not discard:
        raise CommandError(forgetting.waits(name, found.waiting), Exit.PROBLEM)
    source = None if box is None else _source(load_box(box), box, found.record)
    report = _report(found, dry_run=dry_run)
    code = Exit.FINE
    if not dry_run:
        confirm(f"forget the consumer {name}: {_amounts(report)}", yes=yes)
        if source is not None:
            run(_unsubscribe(source, found.record))
            report["subscription"] = "removed"
        done, code = run(_forget(settings, name, author, discard=discard, subscription=report["subscription"]))
        report |= done
    emit(report, "\n".join(map(plain, _told(report, found.record))), as_json=as_json, code=code)


def _report(found: Remains, *, dry_run: bool) -> dict[str, Any]:
    record = found.record
    has_copies = any(consumer_of(route.name) == record.name for route in found.routes)
    copied = [topic + SUFFIX for topic in record.topics] if has_copies else []
    return {
        "action": "forget",
        "consumer": record.name,
        "inbox": found.inbox,
        "deliveries": found.deliveries,
        "waiting": found.waiting,
        "subscription": None if record.source == OUTBOX else "left",
        "dead_letter_topics": copied,
        "finished": False,
        "audit": None,
        "dry_run": dry_run,
    }


def _source(box: Pillarbox, reference: str, record: ConsumerRecord) -> Unsubscribes | None:
    """Where it was subscribed; None if that is no broker."""
    if record.source == OUTBOX:
        return None
    declared = box.consumers.get(record.name)
    found: object = box.transports.get(record.source) if declared is None else declared.subscriber
    if isinstance(found, Unsubscribes):
        return found
    what = (
        f"{reference} has no transport {record.source!r}" if found is None else f"{type(found).__name__} cannot do it"
    )
    remedy = f"leave out {reference}, and remove the subscription {record.name!r} at the broker"
    raise CommandError(f"the subscription of {record.name} cannot be removed: {what}; {remedy}", Exit.USAGE)


async def _unsubscribe(source: Unsubscribes, record: ConsumerRecord) -> None:
    try:
        await source.unsubscribe(record.topics, record.name)
    except OSError as error:
        raise CommandError(f"nothing was forgotten: {error}", Exit.UNREACHABLE) from error


async def _forget(
    settings: Settings, name: str, author: Author, *, discard: bool, subscription: str | None
) -> tuple[dict[str, Any], Exit]:
    """Portion by portion, until all has gone or a signal comes."""
    removed, entry, finished = Counter[str](), None, False

    def remove(connection: Connection) -> tuple[str, int] | None:
        nonlocal entry
        gone = forgetting.forget(connection, name, discard=discard)
        details = {**removed, "subscription": subscription, "finished": gone is None}
        if gone is not None:
            details[gone[0]] = removed[gone[0]] + gone[1]
        entry = note(connection, author, "forget", f"consumer {name}", details=details, entry=entry)
        return gone

    async with changing(settings) as engine:
        with signals() as told:
            while not (finished or told.done()):
                async with engine.begin() as connection:
                    gone = await connection.run_sync(remove)
                if gone is not None:
                    removed[gone[0]] += gone[1]
                finished = gone is None
    code = Exit.FINE if finished else told.result()
    done = {"inbox": removed["inbox"], "deliveries": removed["deliveries"], "finished": finished, "audit": entry}
    return done, code


def _amounts(report: dict[str, Any]) -> str:
    waiting = f" ({number(report['waiting'], 'message')} discarded)" if report["waiting"] else ""
    return f"{number(report['inbox'], 'row')} of its inbox, {number(report['deliveries'], 'delivery')}{waiting}"


def _told(report: dict[str, Any], record: ConsumerRecord) -> list[str]:
    what = f"forget {record.name}: {_amounts(report)}"
    lines = [f"{what} would be removed" if report["dry_run"] else f"{what} removed, audit entry {report['audit']}"]
    if not (report["dry_run"] or report["finished"]):
        lines.append("stopped: the same command goes on")
    if report["subscription"] == "left":
        where = f"the subscription {record.name!r} to {', '.join(record.topics)} at {record.source}"
        lines.append(f"{where} is left, and keeps messages: name MODULE:BOX, or remove it at the broker")
    if report["subscription"] == "removed":
        lines.append(f"the subscription {record.name!r} to {', '.join(record.topics)} was removed")
    if report["dead_letter_topics"]:
        lines.append(f"copies of its dead letters stay at the broker: {', '.join(report['dead_letter_topics'])}")
    return lines


# -- retention ---------------------------------------------------------------------------------------------------------


async def too_short(consumer: Consumer, *, limited: bool) -> str | None:
    """What is wrong if the broker may bring a message again after the inbox has forgotten it. ``limited`` passes over
    brokers that have no limit at all, as most have none: whoever starts a consumer knows that.
    """
    redelivery = await consumer.redelivery()
    retention = consumer.terms.retention.total_seconds()
    if redelivery is None or retention > redelivery or (limited and redelivery == math.inf):
        return None
    until = "without any limit" if redelivery == math.inf else f"after {age(redelivery)}"
    return f"the inbox of {consumer.name} remembers for {age(retention)}, and its source may deliver again {until}"


TWICE = "effects may happen twice: give it a retention that is longer"
"""What comes of it."""
