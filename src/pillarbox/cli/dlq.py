"""``pillarbox dlq``: what consumers could not take.

These are deliveries as ``pillarbox outbox`` shows them, of consumers only: the same commands, by the name that people
look for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..errors import ConfigurationError
from ..outbox import Status
from ..stores.inspection import ANY_CONSUMER, Filter
from ..stores.operations import Action
from . import outbox
from .arguments import MAX_ID, Whole, check_text, confirmed, for_many, one_direction, options, together
from .database import load_settings

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group(no_args_is_help=False)
def command() -> None:
    """Look into what consumers could not take, and mend it."""


def _all_names(context: click.Context, parameter: click.Parameter, topic: str | None) -> tuple[str, ...] | None:
    """Pulsar knows a topic by several."""
    if check_text(context, parameter, topic) is None or topic is None:
        return None
    try:
        from ..transports.pulsar.names import spellings  # noqa: PLC0415  an extra

        return tuple(dict.fromkeys([topic, *spellings(topic)]))
    except ConfigurationError:  # the name is of another broker, or the extra is not installed
        return (topic,)


_STATES = (Status.FAILED, Status.RETRYING, Status.PARKED)
_filters = together(
    click.option("--consumer", metavar="NAME", callback=check_text),
    click.option("--topic", metavar="NAME", callback=_all_names, help="By which they came; Pulsar's full name, too."),
    click.option("--type", metavar="PATTERN", callback=outbox.check_pattern, help=outbox.PATTERN_HELP),
    click.option("--tenant", metavar="TENANT", callback=check_text),
    click.option("--key", metavar="KEY", callback=check_text),
)
"""The options that choose deliveries by what they are."""


@command.command("list")
@click.option("--state", type=click.Choice([*_STATES]), default=Status.FAILED.value, show_default=True)
@_filters
@click.option("--limit", type=Whole(1, 10_000), metavar="N", default=50, show_default=True)
@click.option("--after", type=Whole(0, MAX_ID), metavar="ID", default=0, help="Begin after this id.")
@one_direction
@options
def list_deliveries(
    config: Path | None, as_json: bool, *, limit: int, after: int, state: str, consumer: str | None, **filters: Any
) -> None:
    """List deliveries that consumers could not take, oldest first."""
    wanted = Filter(Status(state), consumer=consumer or ANY_CONSUMER, **filters)
    outbox.show_page(load_settings(config), wanted, limit=limit, after=after, as_json=as_json, with_reason=True)


def _selecting(*states: Status) -> Callable[[_Command], _Command]:
    return together(
        click.argument("event_ids", type=click.UUID, nargs=-1, metavar="[EVENT_ID]..."),
        click.option(
            "--state",
            "status",
            type=click.Choice([*states]),
            help="[default: FAILED; of events that are named, any of these]",
        ),
        _filters,
        click.option("--older-than", metavar="TIME", callback=outbox.duration, help="Age: 90s, 15min, 2h, 7d."),
        for_many,
    )


@command.command()
@_selecting(Status.FAILED, Status.RETRYING)
@options
def redrive(config: Path | None, as_json: bool, **given: Any) -> None:
    """Have consumers try again what they could not take, now and with all its attempts before it."""
    outbox.request(Action.REDRIVE, load_settings(config), as_json=as_json, of_consumers=True, **given)


@command.command()
@_selecting(*_STATES)
@confirmed
@options
def discard(config: Path | None, as_json: bool, **given: Any) -> None:
    """Have deliveries taken out: their consumers never get them, and their key goes on without them."""
    outbox.request(Action.DISCARD, load_settings(config), as_json=as_json, of_consumers=True, **given)


command.add_command(outbox.show)
command.add_command(outbox.edit)
