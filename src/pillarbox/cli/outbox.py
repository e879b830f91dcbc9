"""``pillarbox outbox``: look into the outbox, without changing anything."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from uuid import UUID

import click

from ..outbox import Status
from ..stores import inspection
from ..stores.inspection import Details, Filter
from .database import ask, load_settings, run
from .output import CommandError, Exit, emit, options, shown, table


@click.group(no_args_is_help=False)
def command() -> None:
    """Look into the outbox."""


def _check_pattern(_context: click.Context, _parameter: click.Parameter, pattern: str | None) -> str | None:
    if pattern is not None and not inspection.TYPE_PATTERN.fullmatch(pattern):
        raise click.BadParameter(
            f"{pattern!r} is no pattern of event names: write 'orders.order.placed', 'orders.order.*' or 'orders.**'."
        )
    return pattern


@command.command("list")
@click.option("--status", type=click.Choice([each.value for each in Status]))
@click.option("--route", metavar="NAME")
@click.option(
    "--type", metavar="PATTERN", callback=_check_pattern, help="Event name; * is one part, ** at the end the rest."
)
@click.option("--tenant", metavar="TENANT")
@click.option("--key", metavar="KEY")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.option("--after", type=click.IntRange(0), metavar="ID", default=0, help="Begin after this id.")
@options
def list_deliveries(
    config: Path | None, as_json: bool, *, limit: int, after: int, status: str | None, **filters: str | None
) -> None:
    """List deliveries, oldest first."""
    wanted = Filter(Status(status) if status else None, **filters)
    settings = load_settings(config)
    found = run(ask(settings, lambda it: inspection.deliveries(it, wanted, after=after, limit=limit + 1)))
    page, following = found[:limit], found[limit - 1].id if len(found) > limit else None
    rows = [
        (it.id, it.status, it.route, it.event_type, it.tenant_id, it.key, it.attempts, it.created_at, it.event_id)
        for it in page
    ]
    headings = ("ID", "STATUS", "ROUTE", "TYPE", "TENANT", "KEY", "ATTEMPTS", "CREATED", "EVENT")
    text = table([headings, *rows]) if rows else "no deliveries"
    if following is not None:
        text += f"\nthere are more: --after {following}"
    emit({"deliveries": [asdict(it) for it in page], "next": following}, text, as_json=as_json)


@command.command()
@click.argument("event_id", type=click.UUID)
@click.option("--payload", is_flag=True, help="Show the payload, too. It may hold personal data.")
@options
def show(config: Path | None, as_json: bool, event_id: UUID, payload: bool) -> None:
    """Show all deliveries of one event."""
    found = run(ask(load_settings(config), lambda it: inspection.deliveries_of(it, event_id, payload=payload)))
    if not found:
        raise CommandError(
            f"the outbox has no event {event_id}: its transaction did not commit, no route takes it, or it was pruned",
            Exit.PROBLEM,
        )
    described = [{name: value for name, value in asdict(it).items() if payload or name != "payload"} for it in found]
    text = "\n\n".join(_described(it, payload=payload) for it in found)
    emit({"event_id": event_id, "deliveries": described}, text, as_json=as_json)


@command.command()
@options
def stats(config: Path | None, as_json: bool) -> None:
    """Count deliveries per route and status."""
    groups = run(ask(load_settings(config), inspection.statistics))
    rows = [(it.route, it.status, it.count, _age(it.oldest_age_seconds), it.oldest_at) for it in groups]
    text = table([("ROUTE", "STATUS", "COUNT", "OLDEST", "SINCE"), *rows]) if rows else "no deliveries"
    emit({"groups": [asdict(it) for it in groups]}, text, as_json=as_json)


def _described(delivery: Details, *, payload: bool) -> str:
    values = asdict(delivery)
    headers, body = values.pop("headers"), values.pop("payload")
    values |= {f"header {name}": value for name, value in sorted(headers.items())}
    if payload:
        values["payload"] = f"not JSON: {delivery.content_type}" if body is None else body
    return table([(name, shown(value)) for name, value in values.items()])


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
