"""``pillarbox consumers``: who consumes, and how far each has come."""

from __future__ import annotations

import math
from pathlib import Path

import click
import msgspec

from ..consumers.consumer import Consumer
from ..stores.inbox import ConsumerRecord
from ..stores.inbox import consumers as registered
from .arguments import options
from .database import ask, load_settings, run
from .output import age, emit, table


@click.group(no_args_is_help=False)
def command() -> None:
    """See who consumes, and how far each has come."""


@command.command("list")
@options
def list_consumers(config: Path | None, as_json: bool) -> None:
    """List the consumers and projections that were ever registered in this database."""
    found = run(ask(load_settings(config), registered))
    emit({"consumers": [msgspec.structs.asdict(each) for each in found]}, _listed(found), as_json=as_json)


def _listed(found: list[ConsumerRecord]) -> str:
    headings = ("NAME", "KIND", "SOURCE", "TOPICS", "GENERATION", "HANDLED", "LAG", "LAST EVENT", "SEEN")
    rows = [
        (
            *(it.name, it.kind, it.source, ", ".join(it.topics) or None, it.generation, it.handled),
            *(None if it.lag is None else age(it.lag), it.last_event_id, it.seen_at),
        )
        for it in found
    ]
    return table([headings, *rows]) if rows else "no consumers"


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
