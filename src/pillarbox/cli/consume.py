"""``pillarbox consume``: let the consumers of your box work, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..app import Pillarbox
from ..consumers.consumer import Consumer
from ..errors import PillarboxError
from ..redaction import text_of
from .arguments import options
from .consumers import TWICE, too_short
from .database import load_settings, run
from .output import CommandError, Exit, emit, table
from .serving import Address, Render, http_option, observe, opened_box, serve

logger = logging.getLogger("pillarbox")


@click.command()
@click.argument("box", metavar="MODULE:BOX")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@http_option
@click.option("--drain", is_flag=True, help="Deal with what is there now, and exit.")
@options
def command(
    config: Path | None, as_json: bool, *, box: str, names: tuple[str, ...], http: Address | None, drain: bool
) -> None:
    """Run the consumers and projections of a Pillarbox in your code: all of them, or those that are named.

    SIGTERM and SIGINT let them finish what they have begun; a second one ends them at once, which loses nothing. If one
    of them dies, the others are stopped, and the command fails.
    """
    if drain and http is not None:
        raise click.UsageError("--http is for consumers that run on, and --drain for those that exit: choose one.")
    settings = load_settings(config)

    async def work() -> None:
        async with opened_box(box) as started:
            crew = Crew(_chosen(started, box, names))
            for consumer in crew.consumers:
                with suppress(OSError):  # the broker may come later
                    if (found := await too_short(consumer, limited=True)) is not None:
                        logger.warning("%s: %s", found, TWICE)
            metrics = observe(started, settings, metrics=http is not None)
            if drain:
                await _drain(crew, as_json=as_json)
            else:
                await _serve(crew, http, metrics, as_json=as_json)

    run(work())


def _chosen(box: Pillarbox, reference: str, names: Sequence[str]) -> list[Consumer]:
    if not box.consumers:
        raise CommandError(
            f"{reference} has no consumers: make one with box.consumer(...), in the module or in what it imports",
            Exit.USAGE,
        )
    if unknown := [name for name in names if name not in box.consumers]:
        known = ", ".join(sorted(box.consumers))
        said = f"{reference} has no consumer {', '.join(map(repr, unknown))}: it has {known}"
        if handlers := sorted(box.handlers.keys() & unknown):
            said += f"; `pillarbox relay {reference}` runs the handlers {', '.join(map(repr, handlers))}"
        raise CommandError(said, Exit.USAGE)
    return [consumer for name, consumer in box.consumers.items() if not names or name in names]


async def _serve(crew: Crew, http: Address | None, metrics: Render, *, as_json: bool) -> None:
    names = [consumer.name for consumer in crew.consumers]

    def announce(address: str | None) -> None:
        runs = f"running: {', '.join(names)}" + (f"; answers at {address}" if address else "")
        emit({"consumers": names, "http": address}, runs, as_json=as_json)

    await serve(crew, http, metrics, announce=announce)
    # Not whether it is healthy: what has stopped as it was told never is.
    counts = ("consumer", "handled", "duplicates", "spilled")
    done = [{name: consumer.status()[name] for name in counts} for consumer in crew.consumers]
    lines = [
        f"consumer {each['consumer']} has stopped: {each['handled']} handled, {each['duplicates']} duplicates, "
        f"{each['spilled']} spilled"
        for each in done
    ]
    emit({"consumers": done}, "\n".join(lines), as_json=as_json)


async def _drain(crew: Crew, *, as_json: bool) -> None:
    done = [{"consumer": each.name, **asdict(await each.drain())} for each in crew.consumers]
    headings = [name.upper() for name in done[0]]
    emit({"consumers": done}, table([headings, *([*each.values()] for each in done)]), as_json=as_json)


class Crew:
    """Consumers that work together, as one `Worker`. If one ends before it is told to, the others are stopped."""

    def __init__(self, consumers: Sequence[Consumer]) -> None:
        self.consumers = [*consumers]
        self._told = False

    @property
    def alive(self) -> bool:
        return all(consumer.alive for consumer in self.consumers)

    @property
    def healthy(self) -> bool:
        return all(consumer.healthy for consumer in self.consumers)

    def status(self) -> dict[str, Any]:
        return {"healthy": self.healthy, "consumers": [consumer.status() for consumer in self.consumers]}

    def stop(self) -> None:
        self._told = True
        for consumer in self.consumers:
            consumer.stop()

    async def run(self) -> None:
        tasks = {asyncio.create_task(consumer.run()): consumer.name for consumer in self.consumers}
        try:
            await asyncio.sleep(0)  # now they have begun, and can be stopped
            if self._told:
                self.stop()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            dead = [] if self._told else [name for task, name in tasks.items() if task.done()]
            self.stop()
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        errors = {name: None if task.cancelled() else task.exception() for task, name in tasks.items()}
        if complaints := [_death(name, error) for name, error in errors.items() if error or name in dead]:
            raise CommandError("\n".join(complaints), Exit.PROBLEM)


def _death(name: str, error: BaseException | None) -> str:
    if error is None:
        return f"consumer {name} has died: it has ended by itself"
    said = f"consumer {name} has died: {type(error).__name__}: {' '.join(text_of(error).split())}"
    if isinstance(error, PillarboxError):
        return said
    return "\n".join([said, *(f"  {line}" for line in "".join(traceback.format_exception(error)).splitlines())])
