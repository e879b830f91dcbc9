"""``pillarbox outbox partition``, and what `prune` does where the outbox has days.

Everything that needs a lock which others could wait for is tried for a fifth of a second, and again after a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from ..errors import StoreError
from ..settings import Settings
from ..stores import partition_pruning, partitions
from ..stores.audit import Author
from ..stores.partitions import Plan
from ..stores.retention import Scope, Stretch
from .arguments import Number, Whole, confirm, confirmed, options, signed
from .database import ask, changing, load_settings, run
from .output import Exit, emit, number

_TRIES = 20
_PAUSE = 0.5
_BUSY = "somebody else holds a lock: left for the next run"

_T = TypeVar("_T")


ahead = click.option(
    "--ahead",
    type=Whole(1, 90),
    metavar="DAYS",
    default=partitions.AHEAD,
    show_default=True,
    help="Partitions to make for days that come.",
)
"""How far days are made."""
patience = click.option(
    "--patience",
    type=Number(0, 3600, min_open=True),
    metavar="SECONDS",
    default=partitions.PATIENCE,
    show_default=True,
    help="How long writers may have to wait while rows are looked through.",
)
"""How long others may be kept waiting."""


async def in_turn(
    engine: AsyncEngine,
    work: Callable[[Connection], _T],
    told: asyncio.Future[Any],
    *,
    probe: Callable[[Connection], None] | None = None,
) -> _T | None:
    """Run it in a transaction, when nobody is in its way; None if somebody always was. Before it is tried again, the
    probe sees, in a transaction of its own, whether somebody still is.
    """
    for tries in range(_TRIES):
        try:
            if tries and probe is not None:
                async with engine.begin() as connection:
                    await connection.run_sync(probe)
            async with engine.begin() as connection:
                return await connection.run_sync(work)
        except DBAPIError as error:
            if not partitions.is_busy(error):
                raise
        await asyncio.wait([told], timeout=_PAUSE)
        if told.done():
            break
    return None


# -- partition ---------------------------------------------------------------------------------------------------------


@click.command("partition")
@ahead
@patience
@confirmed
@signed
@options
def command(
    config: Path | None,
    as_json: bool,
    *,
    ahead: int,
    patience: float,
    author: Author,
    dry_run: bool,
    yes: bool,
) -> None:
    """Keep the outbox in daily partitions, on PostgreSQL, so that `prune` can drop whole days; or make more days.

    No row is moved: what is there becomes the default partition. It can be run again at any time.
    """
    settings = load_settings(config)
    plan = run(ask(settings, lambda it: partitions.plan(it, ahead=ahead)))
    report: dict[str, Any] = {
        **asdict(plan),
        "made": [],
        "left": [],
        "notes": _taken(plan),
        "audit": None,
        "dry_run": dry_run,
    }
    if not dry_run and not (plan.partitioned and not plan.days):
        if not plan.partitioned:
            confirm(f"keep the outbox in daily partitions: {_planned(plan)}", yes=yes)
        report |= run(_partition(settings, plan, author, ahead=ahead, patience=patience))
    code = Exit.PROBLEM if len(report["notes"]) > len(report["taken"]) else Exit.FINE
    emit(report, _told(plan, report), as_json=as_json, code=code)


async def _partition(settings: Settings, plan: Plan, author: Author, *, ahead: int, patience: float) -> dict[str, Any]:
    async with changing(settings) as engine:
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if plan.partitioned:
            made = await make_days(engine, plan, author, told, patience=patience)
            return asdict(made)
        try:
            work = partial(partitions.partition, author=author, ahead=ahead, patience=patience)
            done = await in_turn(engine, work, told)
        except DBAPIError as error:
            if not partitions.took_too_long(error):
                raise
            raise StoreError(
                f"looking through the rows takes longer than {patience:g} s, and everybody would wait: nothing was "
                "done; prune first, or say --patience"
            ) from error
    if done is None:
        raise StoreError("others hold locks on pillarbox_outbox all the time: nothing was done; try in a quiet moment")
    wanted, entry = done
    return {**asdict(wanted), "made": wanted.days, "notes": _taken(wanted), "audit": entry}


def _taken(plan: Plan) -> list[str]:
    return [f"{day}: the default partition has rows of this day, and keeps it" for day in plan.taken]


def _planned(plan: Plan) -> str:
    rows = f"about {number(plan.rows, 'row')} become the default partition" if plan.rows else "no row is moved"
    return f"{rows}, {_days(plan.days)} to be made"


def _days(found: Any) -> str:
    if len(found) < 2:
        return f"1 day ({found[0]})" if found else "no day"
    return f"{len(found)} days ({found[0]} to {found[-1]})"


def _told(plan: Plan, report: dict[str, Any]) -> str:
    if report["audit"] is not None:
        first = f"partition: {_days(report['made'])} made, audit entry {report['audit']}"
    elif plan.partitioned and not plan.days:
        first = "partition: nothing to do"
    elif report["dry_run"]:
        first = f"partition: {_days(plan.days)} to be made" if plan.partitioned else f"partition: {_planned(plan)}"
        first += "; nothing was done"
    else:
        first = "partition: nothing was done"
    return "\n".join([first, *report["notes"]])


# -- days --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Made:
    """What has become of the days that were to be made."""

    made: list[date] = field(default_factory=list)
    taken: list[date] = field(default_factory=list)
    """That stay in the default partition, because it has rows of them."""
    left: list[date] = field(default_factory=list)
    """That could not be made this time."""
    notes: list[str] = field(default_factory=list)
    audit: int | None = None


async def make_days(
    engine: AsyncEngine, plan: Plan, author: Author, told: asyncio.Future[Any], *, patience: float
) -> Made:
    """Make the days of a plan, each in a transaction of its own. What cannot be made is left to the default. If looking
    through that takes too long for one of them, it does for all: everybody would wait again, each time in vain.
    """
    done = Made(taken=[*plan.taken], notes=_taken(plan))
    for at, day in enumerate(plan.days):
        try:
            work = partial(partitions.make_day, day=day, author=author, patience=patience)
            entry = await in_turn(engine, work, told)
        except DBAPIError as error:
            if partitions.was_taken(error):
                done.taken.append(day)
                done.notes.append(f"{day}: the default partition has rows of this day, and keeps it")
                continue
            if not partitions.took_too_long(error):
                raise
            why = f"looking through the default partition takes longer than {patience:g} s"
            done.left += plan.days[at:]
            done.notes.append(f"{_days(plan.days[at:])}: {why}; prune it first, or say --patience")
            break
        if entry is None:
            done.left.append(day)
            done.notes.append(f"{day}: {_BUSY}")
        else:
            done.made.append(day)
            done.audit = entry
    return done


@dataclass(slots=True)
class Days:
    """What a run of `prune` does with days."""

    found: partition_pruning.Survey
    scope: Scope
    lanes: list[Stretch]
    dropped: list[str] = field(default_factory=list)
    made: list[date] = field(default_factory=list)
    left: list[date] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """How many deliveries go with their days."""
        return sum(fate.rows for fate in self.found.doomed)

    async def drop(
        self,
        engine: AsyncEngine,
        told: asyncio.Future[Any],
        note: Callable[[Connection, int, list[str]], int],
        counted: Callable[[int, int, list[str]], None],
    ) -> None:
        """Drop what may go. Each is written into the trail in the transaction that drops it."""
        for doomed in self.found.doomed:
            if told.done():
                return
            dropped = [*self.dropped, str(doomed.part)]

            def work(connection: Connection, part: Any = doomed.part, dropped: list[str] = dropped) -> tuple[Any, int]:
                fate = partition_pruning.drop(connection, part, self.scope, self.lanes)
                return fate, 0 if fate.stay else note(connection, fate.rows, dropped)

            done = await in_turn(engine, work, told, probe=partial(partition_pruning.probe, part=doomed.part))
            if done is None:
                self.notes.append(f"{doomed.part}: {_BUSY}")
            elif done[0].stay:
                self.notes.append(_stays(done[0]))
            else:
                self.dropped = dropped
                counted(done[0].rows, done[1], dropped)

    async def make(
        self, engine: AsyncEngine, author: Author, told: asyncio.Future[Any], *, ahead: int, patience: float
    ) -> None:
        """Make the days that come."""
        async with engine.connect() as connection:
            plan = await connection.run_sync(partial(partitions.plan, ahead=ahead))
        done = await make_days(engine, plan, author, told, patience=patience)
        self.made, self.left = done.made, done.left
        self.notes += done.notes

    def report(self) -> dict[str, Any]:
        """For machines."""
        doomed = [str(fate.part) for fate in self.found.doomed]
        notes = [*(_stays(fate) for fate in self.found.fates if fate.stay), *self.notes]
        return {"days": {"selected": doomed, "dropped": self.dropped, "made": self.made, "notes": notes}}


def _stays(fate: partition_pruning.Fate) -> str:
    return f"{fate.part}: stays, {fate.stay:,} of {number(fate.rows, 'delivery')} may not go yet"


def lines(report: dict[str, Any]) -> list[str]:
    """For people."""
    found = report.get("days")
    if found is None:
        return []
    told = [f"dropped whole: {', '.join(found['dropped'])}"] if found["dropped"] else []
    if report["dry_run"] and found["selected"]:
        told = [f"would be dropped whole: {', '.join(found['selected'])}"]
    if found["made"]:
        told.append(f"{_days(found['made'])} made")
    return [*told, *found["notes"]]
