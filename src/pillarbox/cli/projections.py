"""``pillarbox projections``: list projections, and rebuild one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..app import Pillarbox
from ..errors import StoreError
from ..projections.consumer import ProjectionConsumer
from ..projections.rebuild import From, Progress, Rebuilt
from ..stores import inbox as stored
from ..stores.audit import Author, note
from .arguments import check_text, options, signed
from .consumers import exactly, listed, look
from .database import ask, load_settings, run
from .output import CommandError, Exit, age, emit, number
from .serving import opened_box


@click.group(no_args_is_help=False)
def command() -> None:
    """List projections, and rebuild one."""


# -- looking -----------------------------------------------------------------------------------------------------------


@command.command("list")
@exactly
@options
def list_projections(config: Path | None, as_json: bool, exact: bool) -> None:
    """List the projections that were ever run on this database."""
    kind = ProjectionConsumer.kind
    found = run(ask(load_settings(config), lambda it: look(it, exact=exact, kind=kind)))
    emit({"projections": found}, listed(found, exact=exact), as_json=as_json)


# -- rebuilding --------------------------------------------------------------------------------------------------------


@command.command()
@click.argument("box", metavar="MODULE:BOX")
@click.argument("name", callback=check_text)
@click.option(
    "--from",
    "source",
    multiple=True,
    metavar="outbox|broker|FILE",
    default=("outbox",),
    show_default="outbox",
    help="Where its events are. Archives are read before the outbox; there may be several.",
)
@click.option("--incomplete", is_flag=True, help="Rebuild even if events that the projection has had are missing.")
@signed
@options
def rebuild(
    config: Path | None,
    as_json: bool,
    *,
    box: str,
    name: str,
    source: tuple[str, ...],
    incomplete: bool,
    author: Author,
    dry_run: bool,
) -> None:
    """Compute the rows of a projection again from its events, and replace the live ones.

    BOX is a Pillarbox in your code that has the projection NAME. The projection goes on meanwhile, and its table can be
    read all the time. Ctrl-C leaves everything as it was.
    """
    load_settings(config)
    past = _past(source)
    done = run(_rebuild(box, name, past, author, incomplete=incomplete, dry_run=dry_run))
    if isinstance(done, int):
        emit(
            {"projection": name, "generation": done, "dry_run": True},
            f"rebuild: {name} would get generation {done}",
            as_json=as_json,
        )
        return
    rebuilt, entry = done
    emit({**asdict(rebuilt), "audit": entry, "dry_run": False}, _told(rebuilt, entry), as_json=as_json)


def _past(given: tuple[str, ...]) -> From:
    if len(given) == 1 and given[0] == "broker":
        return "broker"
    files = [Path(each) for each in given if each != "outbox"]
    if Path("broker") in files:
        raise click.BadParameter("the broker has everything, or nothing: name it alone.", param_hint="--from")
    return files or "outbox"


async def _rebuild(
    reference: str, name: str, past: From, author: Author, *, incomplete: bool, dry_run: bool
) -> tuple[Rebuilt, int] | int:
    async with opened_box(reference) as box:
        consumer = box.consumers.get(name)
        if not isinstance(consumer, ProjectionConsumer):
            names = sorted(it.name for it in box.consumers.values() if isinstance(it, ProjectionConsumer))
            raise CommandError(f"this box has no projection {name!r}; it has: {', '.join(names) or 'none'}", Exit.USAGE)
        if dry_run:
            async with box.engine.connect() as connection:
                known = {it.name: it.generation for it in await connection.run_sync(stored.consumers)}
            return known.get(name, 1) + 1
        said = {"from": past if isinstance(past, str) else [str(file) for file in past], "incomplete": incomplete}
        entry = await _note(box, author, name, {**said, "finished": False})
        with _bar(name) as progress:
            try:
                done = await consumer.rebuild(past, incomplete=incomplete, progress=progress)
            except StoreError as error:
                await _note(box, author, name, {**said, "finished": False, "error": str(error)}, entry)
                raise
        await _note(box, author, name, {**said, "finished": True, **asdict(done)}, entry)
        return done, entry


async def _note(box: Pillarbox, author: Author, name: str, details: dict[str, Any], entry: int | None = None) -> int:
    """The row of the trail."""
    async with box.engine.begin() as connection:
        return await connection.run_sync(
            lambda it: note(it, author, "rebuild", f"projection {name}", details=details, entry=entry)
        )


@contextmanager
def _bar(name: str) -> Iterator[Callable[[Progress], None]]:
    """For those who watch. If nobody knows how many events there are, only how far it has come is shown."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(
        length=1, label=name, file=sys.stderr, item_show_func=lambda it: it and f"{it.stage}, {it.events:,} events"
    ) as bar:

        def show(progress: Progress) -> None:
            bar.length = max(progress.total or 0, progress.events, 1)
            bar.update(progress.events - bar.pos, progress)

        yield show


def _told(done: Rebuilt, entry: int) -> str:
    came = f"{number(done.events, 'event')} in {age(done.seconds)}"
    lines = [f"rebuild: {done.projection} has generation {done.generation}: {came}, audit entry {entry}"]
    if done.left_out:
        lines.append(f"left out: {number(done.left_out, 'event')}; the log names each")
    return "\n".join(lines)
