"""``pillarbox outbox convert``: make a log of a queue, or a queue of a log, while everything runs."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..settings import Settings
from ..stores import convert
from ..stores.convert import Conversion, Plan, Store
from ..stores.trail import Author
from .arguments import confirm, confirmed, options, signed
from .database import ask, changing, load_settings, run
from .output import Exit, emit, number, plain

_SECONDS_BETWEEN_LINES = 1.0


@click.command("convert")
@click.option("--to", type=click.Choice([each.value for each in Store]), required=True, help="What it is to become.")
@confirmed
@signed
@options
def command(config: Path | None, as_json: bool, *, to: str, author: Author, dry_run: bool, yes: bool) -> None:
    """Make the outbox a log or a queue, on PostgreSQL, lane by lane, while writers and relays go on.

    Whatever ends it, nothing is lost: run it again, and it goes on where it was.
    """
    settings = load_settings(config)
    plan = run(ask(settings, lambda it: convert.plan(it, Store(to))))
    report: dict[str, Any] = {"plan": asdict(plan), "done": None, "dry_run": dry_run}
    if not plan.is_done and not dry_run:
        confirm(f"make the outbox a {to}: {_planned(plan)}", yes=yes)
        report["done"] = run(_convert(settings, plan, author))
    halfway = report["done"] and (report["done"]["left"] or report["done"]["unfinished"])
    emit(report, _told(plan, report["done"]), as_json=as_json, code=Exit.PROBLEM if halfway else Exit.FINE)


async def _convert(settings: Settings, plan: Plan, author: Author) -> dict[str, Any]:
    async with changing(settings) as engine:
        return asdict(await Conversion(engine, plan.to, author, tell=_Lines()).run())


class _Lines:
    """Progress on standard error, not more than a line in a second."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, line: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
            click.echo(plain(line), err=True)


def _planned(plan: Plan) -> str:
    parts = [number(plan.lanes, "lane")]
    if plan.announced:
        parts.append(f"{plan.announced:,} of them with a batch under way")
    if plan.waiting:
        parts.append(f"{number(plan.waiting, 'delivery')} failed or waiting behind one")
    if plan.passed:
        parts.append(f"up to {number(plan.passed, 'delivery')} to mark as sent")
    if plan.index:
        parts.append(f"the index ix_pillarbox_outbox_xid to {'build' if plan.to is Store.LOG else 'drop'}")
    return ", ".join(parts)


def _told(plan: Plan, done: dict[str, Any] | None) -> str:
    if plan.is_done:
        return f"convert: the outbox is a {plan.to} already"
    if done is None:
        return f"convert to a {plan.to}: {_planned(plan)}; nothing was done"
    lines = [f"convert to a {plan.to}: {number(done['lanes'], 'lane')}, audit entry {done['audit']}"]
    for count, what in (("waiting", "failed or waiting behind one"), ("marked", "marked as sent")):
        if done[count]:
            lines.append(f"{number(done[count], 'delivery')} {what}")
    if done["batches"]:
        lines.append(f"{done['batches']:,} with a batch under way, which goes on as it was announced")
    lines += [f"lane {lane} stays as it is: {reason}" for lane, reason in done["left"].items()]
    if done["unfinished"]:
        lines.append(f"not finished: {done['unfinished']}")
    return "\n".join(map(plain, lines))
