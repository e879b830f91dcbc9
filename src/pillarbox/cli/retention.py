"""``pillarbox outbox prune``, ``archive`` and ``restore``: let go of what is at its end, keep it, bring it back.

All of them go chunk by chunk, each in a short transaction, beside writers and relays. SIGINT and SIGTERM stop between
two chunks, and the next run goes on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import click
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from ..errors import StoreError
from ..outbox import OUTBOUND, TABLES, Status
from ..settings import Settings
from ..stores import archive as archives
from ..stores import archive_file, partition_pruning, retention
from ..stores.archive import Unfinished
from ..stores.archive_file import Archived, Summary, Writer
from ..stores.audit import Author, note
from ..stores.retention import Page, Position, Scope, Stretch
from . import partitions
from .arguments import Number, Whole, check_text, confirm, confirmed, options, signed, together
from .database import ask, change, changing, load_settings, run, signals
from .outbox import command, duration
from .output import CommandError, Exit, emit, number

_TRIES = 5
_COUNTED = 5_000
_PASSING = ("deadlock", "lock wait timeout", "could not serialize", "database is locked")
_TABLE = "table:"

_T = TypeVar("_T")


def _check_age(context: click.Context, parameter: click.Parameter, text: str) -> float:
    age = duration(context, parameter, text) or 0.0
    if age < retention.MINIMUM_AGE:
        raise click.BadParameter(
            f"rows stay for {retention.MINIMUM_AGE:.0f} seconds at least: a service that lost the answer to its COMMIT "
            "looks for them."
        )
    return age


_CHUNK = "How many in one transaction."
_limits = together(
    click.option("--batch", type=Whole(1, 10_000), metavar="N", default=1000, show_default=True, help=_CHUNK),
    click.option("--pace", type=Number(0, min_open=True), metavar="N", help="At most N deliveries per second."),
)
"""How a run goes on."""
_chosen = together(
    click.option("--older-than", required=True, metavar="TIME", callback=_check_age, help="Age: 90s, 15min, 2h, 7d."),
    click.option("--route", metavar="NAME", callback=check_text, help="Only what was for this route."),
)
"""What a run is about."""


# -- a run -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Survey:
    """What may go."""

    scope: Scope
    places: Sequence[Stretch]
    count: int
    days: partitions.Days | None = None
    """Where the outbox has partitions, and they are what goes."""


async def _surveyed(
    settings: Settings, older_than: float, route: str | None, *, tables: tuple[str, ...] = TABLES, by_days: bool = False
) -> _Survey:
    async with changing(settings) as engine:
        async with engine.begin() as connection:
            scope = await connection.run_sync(
                lambda it: retention.scope(it, older_than=older_than, route=route, tables=tables)
            )
            lanes = places = await connection.run_sync(retention.stretches, scope)
            whole = None
            if by_days:
                found = await connection.run_sync(partition_pruning.survey, scope, places)
                places = [*found.places]
                whole = partitions.Days(found, scope, lanes) if found.layout.partitioned else None
        count = 0 if whole is None else whole.rows
        for place in places:
            page = Page((), ())
            while page.after is not None:
                async with engine.begin() as connection:
                    page = await connection.run_sync(retention.page, scope, place, page.after, _COUNTED)
                count += len(page.keys)
    return _Survey(scope, places, count, whole)


@dataclass(frozen=True, slots=True)
class _Order:
    """What a run is to do, and for whom."""

    author: Author
    action: str
    target: str
    batch: int
    pace: float | None


@dataclass(slots=True)
class _Run:
    """A run over the outbox, and how far it has come."""

    engine: AsyncEngine
    told: asyncio.Future[Exit]
    order: _Order
    step: Callable[[int], None]
    audit: int | None = None
    done: int = 0
    journal: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def chunk(self) -> int:
        """How many deliveries at a time."""
        pace, batch = self.order.pace, self.order.batch
        return batch if pace is None else min(batch, max(1, int(pace)))

    async def transaction(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run it in a transaction of its own; again, if another one was in its way."""
        audit = self.audit
        for _ in range(_TRIES - 1):
            try:
                async with self.engine.begin() as connection:
                    return await connection.run_sync(work, *arguments)
            except DBAPIError as error:
                self.audit = audit
                if not any(sign in str(error.orig).lower() for sign in _PASSING):
                    raise
        async with self.engine.begin() as connection:
            return await connection.run_sync(work, *arguments)

    async def walk(self, found: _Survey, work: Callable[[Connection, Stretch, Position], tuple[Page, int]]) -> None:
        """Do it page by page, over all that there is."""
        for place in found.places:
            page = Page((), ())
            while page.after is not None and not self.told.done():
                page, done = await self.transaction(work, place, page.after)
                await self.counted(done)

    async def counted(self, done: int) -> None:
        """So many more are done: show it, and keep the pace."""
        self.done += done
        self.step(done)
        if self.order.pace is not None and done:
            await asyncio.wait([self.told], timeout=done / self.order.pace)

    def note(self, connection: Connection, done: int, **more: Any) -> int:
        """The row of the trail, with what this transaction adds to it."""
        order, details = self.order, {"count": self.done + done, **self.details, **more}
        return note(connection, order.author, order.action, order.target, details=details, entry=self.audit)

    def note_days(self, connection: Connection, done: int, dropped: list[str]) -> int:
        """The same, about days that this transaction drops."""
        return self.note(connection, done, days=dropped)

    def counted_days(self, done: int, entry: int, dropped: list[str]) -> None:
        """They are gone. That was no work, so there is no pace to keep."""
        self.audit, self.details["days"] = entry, dropped
        self.done += done
        self.step(done)

    async def clear_journal(self, places: Iterable[Stretch]) -> None:
        """Let go of what the journal says about rows that are gone."""
        for place in places:
            after: Position | None = ()
            while after is not None and not self.told.done():
                gone, after = await self.transaction(retention.clear_journal, place, after, self.order.batch)
                self.journal += gone
        if self.journal:
            self.details["journal"] = self.journal
            self.audit = await self.transaction(self.note, 0)

    def ended(self, total: int) -> tuple[dict[str, Any], Exit]:
        """What has become of it."""
        left = max(0, total - self.done)
        code = self.told.result() if self.told.done() and left else Exit.FINE
        done = {"done": self.done, "left": left if code else 0, "journal": self.journal, "audit": self.audit}
        return done, code


@asynccontextmanager
async def _working(settings: Settings, order: _Order, total: int) -> AsyncIterator[_Run]:
    """A run on an open database, that stops when it is told to, with a bar for those who watch."""
    async with changing(settings) as engine:
        with signals() as told, _bar(total, order.action) as step:
            yield _Run(engine, told, order, step)


@contextmanager
def _bar(length: int, label: str) -> Iterator[Callable[[int], None]]:
    if not length or not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield bar.update


def _report(action: str, selected: int, *, dry_run: bool) -> dict[str, Any]:
    report = {"action": action, "selected": selected, "done": 0, "left": selected, "journal": 0, "audit": None}
    return report | {"dry_run": dry_run}


def _told(report: dict[str, Any], done: str) -> str:
    action, selected = report["action"], number(report["selected"], "delivery")
    if report["dry_run"] and report["selected"]:
        return f"{action}: {selected} would be {done}"
    lines = [f"{action}: nothing to do"]
    if report["done"] or report["left"] or report["audit"]:
        lines = [f"{action}: {number(report['done'], 'delivery')} {done}, audit entry {report['audit'] or '-'}"]
    if report["journal"]:
        lines.append(f"{number(report['journal'], 'line')} of the journal deleted")
    if report["left"]:
        lines.append(f"stopped: {number(report['left'], 'delivery')} left; the same command goes on")
    return "\n".join(lines)


# -- prune -------------------------------------------------------------------------------------------------------------


@command.command()
@_chosen
@_limits
@partitions.ahead
@partitions.patience
@signed
@confirmed
@options
def prune(
    config: Path | None,
    as_json: bool,
    *,
    older_than: float,
    route: str | None,
    ahead: int,
    patience: float,
    dry_run: bool,
    yes: bool,
    author: Author,
    **limits: Any,
) -> None:
    """Delete deliveries that were sent or discarded, and the journal about them.

    What waits, has failed, is on its way or may still appear stays, however old it is.
    """
    settings = load_settings(config)
    found = run(_surveyed(settings, older_than, route, by_days=True))
    report, code = _report("prune", found.count, dry_run=dry_run), Exit.FINE
    if not dry_run:
        if found.count:
            confirm(f"delete {number(found.count, 'delivery')} for ever", yes=yes)
        target = f"older than {older_than:g} s" + ("" if route is None else f", route {route}")
        order = _Order(author, "prune", target, **limits)
        done, code = run(_prune(settings, found, order, ahead=ahead, patience=patience))
        report |= done
    if found.days is not None:
        report |= found.days.report()
        code = code or (Exit.PROBLEM if found.days.left else Exit.FINE)
    emit(report, "\n".join([_told(report, "deleted"), *partitions.lines(report)]), as_json=as_json, code=code)


async def _prune(
    settings: Settings, found: _Survey, order: _Order, *, ahead: int, patience: float
) -> tuple[dict[str, Any], Exit]:
    async with _working(settings, order, found.count) as work:
        if found.days is not None:
            await found.days.drop(work.engine, work.told, work.note_days, work.counted_days)
        await work.walk(found, partial(_delete_page, work=work, scope=found.scope))
        await work.clear_journal(found.places if found.days is None else found.days.lanes)
        if found.days is not None and found.days.found.layout.owned and not work.told.done():
            await found.days.make(work.engine, order.author, work.told, ahead=ahead, patience=patience)
    return work.ended(found.count)


def _delete_page(
    connection: Connection, place: Stretch, after: Position, *, work: _Run, scope: Scope
) -> tuple[Page, int]:
    page = retention.page(connection, scope, place, after, work.chunk)
    gone = retention.remove(connection, page.keys, place.table)
    if gone:
        work.audit = work.note(connection, gone)
    return page, gone


# -- archive -----------------------------------------------------------------------------------------------------------


@command.command()
@_chosen
@click.option("--to", required=True, metavar="FILE|table:NAME", callback=check_text, help="FILE.jsonl, FILE.jsonl.zst.")
@_limits
@signed
@confirmed
@options
def archive(
    config: Path | None,
    as_json: bool,
    *,
    to: str,
    older_than: float,
    route: str | None,
    dry_run: bool,
    yes: bool,
    author: Author,
    **limits: Any,
) -> None:
    """Write deliveries that were sent or discarded to a file or a table, then delete them as `prune` does.

    Rows are deleted when the file is whole and on the disk. A run that was stopped is finished by the same command.
    """
    if not to.startswith(_TABLE) and not to.endswith((".jsonl", ".jsonl.zst")):
        raise click.UsageError("--to names a file that ends in .jsonl or .jsonl.zst, or table:NAME.")
    settings, path = load_settings(config), None if to.startswith(_TABLE) else Path(to).absolute()
    if path is None:
        run(ask(settings, partial(archives.archive_table, name=to.removeprefix(_TABLE))))
    mine = run(_unfinished(settings, to if path is None else str(path)))
    begun = None if path is None else run(_begun(path, mine))
    found = run(_surveyed(settings, older_than, route, tables=(OUTBOUND,)))
    selected = found.count if begun is None else begun.count
    if path is not None and selected and not path.parent.is_dir():
        raise CommandError(f"{path.parent} is no folder", Exit.PROBLEM)
    report, code = _report("archive", selected, dry_run=dry_run), Exit.FINE
    if selected and not dry_run:
        what = f"{number(selected, 'delivery')} of the outbox"
        confirm(f"move {what} to {to}" if begun is None else f"delete {what}, which {to} holds", yes=yes)
        order = _Order(author, "archive", to if path is None else str(path), **limits)
        if path is None:
            done, code = run(_archive_to_table(settings, found, order))
        else:
            done, code = run(_archive_to_file(settings, found, order, path, begun))
        report |= done
    lines = [_told(report, f"archived to {to} and deleted")]
    if mine is not None and not selected and not dry_run:
        # It was killed before its file had its name, and its rows have gone another way: no other run could end it.
        run(change(settings, partial(_give_up, mine=mine, author=author)))
        report["audit"] = mine.entry
        lines = [f"archive: nothing is left for {to}, audit entry {mine.entry} is closed"]
    emit(report, "\n".join(lines), as_json=as_json, code=code)


async def _archive_to_table(settings: Settings, found: _Survey, order: _Order) -> tuple[dict[str, Any], Exit]:
    async with _working(settings, order, found.count) as work:
        kept = await work.transaction(archives.archive_table, order.target.removeprefix(_TABLE))
        await work.transaction(kept.create, True)

        def move(connection: Connection, place: Stretch, after: Position) -> tuple[Page, int]:
            page = retention.page(connection, found.scope, place, after, work.chunk)
            for portion in archive_file.portions(page.keys):
                archives.keep(connection, kept, archives.fetch(connection, portion))
            gone = retention.remove(connection, page.keys)
            if gone != len(page.keys):
                raise StoreError("somebody else prunes, too: run this again when they are done")
            if gone:
                work.audit = work.note(connection, gone)
            return page, gone

        await work.walk(found, move)
        await work.clear_journal(found.places)
    return work.ended(found.count)


async def _archive_to_file(
    settings: Settings, found: _Survey, order: _Order, path: Path, begun: Unfinished | None
) -> tuple[dict[str, Any], Exit]:
    total = found.count if begun is None else begun.count
    async with _working(settings, order, total) as work:
        if begun is not None:
            work.audit, work.details["sha256"] = begun.entry, begun.sha256
        elif not await _write(work, path, found):
            return work.ended(total)
        await _delete_archived(work, path)
        await work.clear_journal(found.places)
    return work.ended(total)


async def _unfinished(settings: Settings, target: str) -> Unfinished | None:
    """The archive to this target that is not at its end, if there is one. No other one may be."""
    open_ones = await ask(settings, archives.unfinished)
    for other in open_ones:
        if other.target != target:
            raise CommandError(
                f"{other.target} was written, and its deliveries are still in the outbox: "
                f"say --to {other.target} to finish that first",
                Exit.PROBLEM,
            )
    return open_ones[0] if open_ones else None


async def _begun(path: Path, mine: Unfinished | None) -> Unfinished | None:
    """The archive that this file belongs to, if there is a file."""
    if not await asyncio.to_thread(path.exists):
        return None
    if mine is None:
        raise CommandError(f"{path} exists: choose another name", Exit.PROBLEM)
    await _check_file(path, mine.sha256)
    return mine


async def _check_file(path: Path, sha256: str) -> None:
    """That it is whole, and the one that the trail tells about: only what it holds is deleted."""
    summary = await asyncio.to_thread(archive_file.verify, path)
    if summary.trailer.sha256 != sha256:
        raise CommandError(f"{path} is not the file that was begun: move it away, and run this again", Exit.PROBLEM)


async def _write(work: _Run, path: Path, found: _Survey) -> bool:
    """Write the file; False if somebody wanted to stop. Nothing is deleted yet."""
    async with work.engine.begin() as connection:
        header = await connection.run_sync(archives.header, found.scope.now)
        before = await connection.run_sync(archives.latest)
    writer = Writer(path, header)
    try:
        for place in found.places:
            page = Page((), ())
            while page.after is not None and not work.told.done():
                async with work.engine.begin() as connection:
                    page = await connection.run_sync(retention.page, found.scope, place, page.after, work.order.batch)
                    for portion in archive_file.portions(page.keys):
                        writer.add(await connection.run_sync(archives.fetch, portion))
        if work.told.done():
            writer.discard()
            return False
        work.details["sha256"] = writer.close().trailer.sha256
        work.audit = await work.transaction(_begin, work, writer.count, before)
        named = writer.finish()
    except BaseException:
        writer.discard()
        raise
    if not named:
        writer.discard()
        await work.transaction(partial(work.note, done=0, withdrawn=True))
        raise StoreError(f"{writer.path} has come into being meanwhile: choose another name")
    return True


def _begin(connection: Connection, work: _Run, count: int, before: int) -> int:
    """From here on the next run knows which file is to be finished."""
    retention.alone(connection)
    if archives.latest(connection) != before:
        raise StoreError("somebody else has archived meanwhile, and the same deliveries perhaps: run this again")
    return work.note(connection, 0, count=count, finished=False)


def _give_up(connection: Connection, mine: Unfinished, author: Author) -> None:
    details = {"count": 0, "sha256": mine.sha256, "finished": True}
    note(connection, author, "archive", mine.target, details=details, entry=mine.entry)


async def _delete_archived(work: _Run, path: Path) -> None:
    """Delete what the file holds, and nothing else. It makes no difference which of it is gone already."""
    await _check_file(path, work.details["sha256"])
    rows = archive_file.read(path)
    while not work.told.done():
        keys = [row.row for row in islice(rows, work.chunk)]
        if not keys:
            work.details["finished"] = True
            await work.transaction(work.note, 0)
            return
        await work.transaction(retention.remove, keys)
        await work.counted(len(keys))


# -- restore -----------------------------------------------------------------------------------------------------------


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--as-sent", is_flag=True, help="As the history that they are, which is the default.")
@click.option("--resend", is_flag=True, help="To be sent again, each as the event that it was.")
@click.option("--route", metavar="NAME", callback=check_text, help="Only what was for this route.")
@click.option("--event", "events", type=click.UUID, metavar="EVENT_ID", multiple=True, help="Only this; repeatable.")
@click.option("--foreign", is_flag=True, help="The file may be from another installation.")
@_limits
@signed
@confirmed
@options
def restore(
    config: Path | None,
    as_json: bool,
    *,
    file: Path,
    as_sent: bool,
    resend: bool,
    route: str | None,
    events: tuple[UUID, ...],
    foreign: bool,
    dry_run: bool,
    yes: bool,
    author: Author,
    **limits: Any,
) -> None:
    """Bring archived deliveries back into the outbox.

    The file is verified first. What is in the outbox already is left alone, so a run that was stopped can be run again.
    What a person has discarded is sent only if --event names it.
    """
    if as_sent and resend:
        raise click.UsageError("--as-sent and --resend exclude each other.")
    settings, summary = load_settings(config), archive_file.verify(file)

    def is_chosen(row: Archived) -> bool:
        return route in (None, row.route) and (not events or not row.known_as.isdisjoint(map(str, events)))

    def stays_out(row: Archived) -> bool:
        return resend and not events and row.status is Status.DISCARDED

    def wanted() -> Iterator[Archived]:
        rows = archive_file.read_in_order(file, summary) if resend else archive_file.read(file)
        return (row for row in rows if is_chosen(row) and not stays_out(row))

    selected, there = run(_missing(settings, summary, wanted(), foreign=foreign))
    discarded = sum(is_chosen(row) and stays_out(row) for row in archive_file.read(file)) if resend else 0
    report = _report("restore", selected, dry_run=dry_run) | {"there": there, "discarded": discarded, "resend": resend}
    code = Exit.FINE
    if selected and not dry_run:
        what = f"{number(selected, 'delivery')} of {file}"
        confirm(f"have {what} sent again" if resend else f"bring back {what} as history", yes=yes)
        order = _Order(author, "restore", str(file.absolute()), **limits)
        done, code = run(_restore(settings, order, wanted(), selected, resend=resend))
        report |= done
    lines = [_told(report, "to be sent again" if resend else "brought back as history")]
    if there:
        lines.append(f"{number(there, 'delivery')}: in the outbox already, left alone")
    if discarded:
        remedy = "--event names what is to be sent all the same"
        lines.append(f"{number(discarded, 'delivery')}: discarded, left out; {remedy}")
    emit(report, "\n".join(lines), as_json=as_json, code=code)


async def _missing(
    settings: Settings, summary: Summary, wanted: Iterator[Archived], *, foreign: bool
) -> tuple[int, int]:
    """How many are not in the outbox, and how many are."""
    there = missing = 0
    async with changing(settings) as engine:
        async with engine.begin() as connection:
            await connection.run_sync(partial(archives.check_origin, summary=summary, foreign=foreign))
        for rows in archive_file.portions(wanted, _COUNTED):
            async with engine.begin() as connection:
                found = len(await connection.run_sync(archives.absent, rows))
            missing, there = missing + found, there + len(rows) - found
    return missing, there


async def _restore(
    settings: Settings, order: _Order, wanted: Iterator[Archived], total: int, *, resend: bool
) -> tuple[dict[str, Any], Exit]:
    async with _working(settings, order, total) as work:
        work.details["resend"] = resend
        for rows in archive_file.portions(wanted, work.chunk):
            if work.told.done():
                break
            await work.counted(await work.transaction(partial(_bring_back, work=work, resend=resend), rows))
    return work.ended(total)


def _bring_back(connection: Connection, rows: list[Archived], *, work: _Run, resend: bool) -> int:
    count = archives.restore(connection, rows, resend=resend)
    if count:
        work.audit = work.note(connection, count)
    return count
