"""``pillarbox dlq``: look into dead letters, the messages that a consumer could not turn into effects, and mend them.

A redrive calls the handlers of your box, in this process; everything else needs nothing but the database.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import click
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

from ..app import Pillarbox
from ..inbox import Letter, LetterFilter, LetterKind, LetterState
from ..redaction import redacted
from ..stores import correspondence
from ..stores.letters import SqlLetters
from ..stores.trail import Author
from .arguments import (
    MAX_ID,
    Whole,
    check_choice,
    check_text,
    confirm,
    confirmed,
    for_many,
    need_reason,
    options,
    signed,
    together,
)
from .bodies import check_body
from .database import ask, change, changing, load_settings, run
from .outbox import signals
from .output import CommandError, Exit, emit, number, plain, shown, table
from .serving import opened_box

PAGE = 100
"""Letters that are read at a time: each may have a body of a megabyte."""
_SAMPLE = 10

_letters = SqlLetters()


@click.group(no_args_is_help=False)
def command() -> None:
    """Look into dead letters, and mend them."""


# -- looking -----------------------------------------------------------------------------------------------------------


_filters = together(
    click.option("--consumer", metavar="NAME", callback=check_text),
    click.option("--tenant", metavar="TENANT", callback=check_text),
    click.option(
        "--kind",
        "kinds",
        type=click.Choice([each.value for each in LetterKind]),
        multiple=True,
        help="May be repeated.",
    ),
    click.option("--type", "event_type", metavar="NAME", callback=check_text, help="Event name."),
    click.option("--topic", metavar="TOPIC", callback=check_text),
    click.option("--key", metavar="KEY", callback=check_text),
)
"""The options that choose letters by what they are."""


@command.command("list")
@_filters
@click.option(
    "--state",
    "states",
    type=click.Choice([each.value for each in LetterState]),
    multiple=True,
    default=[LetterState.OPEN.value],
    show_default=True,
    help="May be repeated.",
)
@click.option("--limit", type=Whole(1, 10_000), metavar="N", default=50, show_default=True)
@click.option("--after", type=Whole(0, MAX_ID), metavar="ID", default=0, help="Begin after this id.")
@options
def list_letters(
    config: Path | None,
    as_json: bool,
    *,
    limit: int,
    after: int,
    kinds: tuple[str, ...],
    states: tuple[str, ...],
    **filters: Any,
) -> None:
    """List letters, oldest first."""
    wanted = LetterFilter(kinds=_kinds(kinds), states=tuple(map(LetterState, states)), **filters)
    found = run(ask(load_settings(config), lambda it: _summaries(it, wanted, after, limit + 1)))
    page, following = found[:limit], found[limit - 1]["id"] if len(found) > limit else None
    text = _listed(page)
    if following is not None:
        text += f"\nthere are more: --after {following}"
    emit({"letters": page, "next": following}, text, as_json=as_json)


def _kinds(given: Sequence[str]) -> tuple[LetterKind, ...]:
    return tuple(map(LetterKind, given))


def _summaries(connection: Connection, wanted: LetterFilter, after: int, limit: int) -> list[dict[str, Any]]:
    """What is to be seen of letters without their bodies, of which a page at a time is in memory."""
    found: list[dict[str, Any]] = []
    while len(found) < limit:
        page = _letters.find(connection, wanted, after=after, limit=min(PAGE, limit - len(found)))
        if not page:
            break
        found += map(_summary, page)
        after = page[-1].id
    return found


def _summary(letter: Letter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "state": letter.state,
        "kind": letter.kind,
        "consumer": letter.consumer,
        "event_type": letter.event_type,
        "tenant": letter.tenant,
        "topic": letter.message.topic,
        "key": letter.message.key,
        "attempts": letter.attempts,
        "edited": letter.edited is not None,
        "created_at": letter.created_at,
        "updated_at": letter.updated_at,
        "event_id": letter.event_id,
        "reason": letter.reason,
    }


def _listed(letters: Sequence[dict[str, Any]]) -> str:
    names = ("id", "state", "kind", "consumer", "event_type", "tenant", "key", "attempts", "created_at", "reason")
    headings = ("ID", "STATE", "KIND", "CONSUMER", "TYPE", "TENANT", "KEY", "ATTEMPTS", "CREATED", "REASON")
    return table([headings, *([it[name] for name in names] for it in letters)]) if letters else "no letters"


@command.command()
@click.argument("letter_id", type=Whole(1, MAX_ID), metavar="ID")
@click.option("--payload", is_flag=True, help="Show the bodies, too. They may hold personal data.")
@options
def show(config: Path | None, as_json: bool, letter_id: int, payload: bool) -> None:
    """Show one letter: its headers, why it is one, and how often it was tried."""
    letter = run(ask(load_settings(config), lambda it: _letter(it, letter_id)))
    described = _summary(letter) | {"schema_version": letter.schema_version, "headers": dict(letter.message.headers)}
    if payload:
        described["body"] = _text(letter.message.body)
        described["edited_body"] = None if letter.edited is None else _text(letter.edited)
    values = {name: value for name, value in described.items() if name != "headers"}
    values |= {f"header {name}": value for name, value in sorted(letter.message.headers.items())}
    emit(described, table([(name, shown(value)) for name, value in values.items()]), as_json=as_json)


def _letter(connection: Connection, letter_id: int) -> Letter:
    found = _letters.find(connection, LetterFilter(ids=(letter_id,), states=()))
    if not found:
        raise CommandError(_absent(letter_id), Exit.PROBLEM)
    return found[0]


def _absent(letter_id: int) -> str:
    return f"there is no letter {letter_id}: see `pillarbox dlq list`"


def _text(body: bytes) -> str:
    """As people can read it."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return f"not text: {number(len(body), 'byte')}"


# -- working through many ----------------------------------------------------------------------------------------------


_selecting = together(click.argument("ids", type=Whole(1, MAX_ID), nargs=-1, metavar="[ID]..."), _filters, for_many)
"""The arguments of commands that do something with many letters."""


def _selected(ids: Sequence[int], everything: bool, kinds: Sequence[str], filters: Mapping[str, Any]) -> LetterFilter:
    """The letters that are meant. Those that are held wait for their predecessors, and the projection ends that: they
    are meant only if they are named, or their kind is.
    """
    instead = "Name letters, or choose by --consumer, --tenant, --kind, --type, --topic or --key"
    check_choice(ids, kinds, *filters.values(), everything=everything, instead=instead)
    unheld = tuple(each for each in LetterKind if each is not LetterKind.HELD)
    chosen = _kinds(kinds) or (() if ids else unheld)
    return LetterFilter(kinds=chosen, ids=tuple(dict.fromkeys(ids)) if ids else None, **filters)


class Outcome(StrEnum):
    """What has become of a letter that something was done with."""

    DONE = "done"
    FAILED = "failed"
    """A handler has raised: the letter stays open."""
    SUPERSEDED = "superseded"
    """The same message had come again, and was dealt with then: it is closed."""
    GONE = "gone"
    """Somebody else was quicker: it is not open any more."""


class _Passage:
    """A way through letters, from the oldest on, and what becomes of each."""

    def __init__(self, action: str, wanted: LetterFilter, limit: int | None) -> None:
        self._action = action
        self._wanted = wanted
        self._limit = limit
        self.by_consumer: Counter[str] = Counter()
        self.selected = 0
        """How many open letters are meant."""
        self._sample: list[dict[str, Any]] = []
        self._results: list[dict[str, Any]] = []
        self._left = 0

    def look(self, connection: Connection) -> None:
        """See what is meant, before anything is done. Letters that are named must be there."""
        if self._wanted.ids is not None:
            anyhow = LetterFilter(ids=self._wanted.ids, states=())
            there = {it["id"]: it for it in _summaries(connection, anyhow, 0, len(self._wanted.ids))}
            if missing := [each for each in self._wanted.ids if each not in there]:
                raise CommandError("\n".join(map(_absent, missing)), Exit.PROBLEM)
            closed = [it for it in there.values() if it["state"] is not LetterState.OPEN]
            self._results = [_result(it, Outcome.GONE, f"it is {it['state']}") for it in closed]
        for (consumer, _), count in _letters.count(connection, self._wanted).items():
            self.by_consumer[consumer] += count
        found = self.by_consumer.total()
        self.selected = self._left = min(found, self._limit or found)
        self._sample = _summaries(connection, self._wanted, 0, min(self.selected, _SAMPLE))

    async def go(
        self,
        engine: AsyncEngine,
        work: Callable[[Letter], Awaitable[tuple[Outcome, str | None]]],
        *,
        rate: float | None,
        stop_on_error: bool = False,
    ) -> Exit:
        """Work through them one by one, never more than were counted before. A signal stops between two.

        ``work`` does something with a letter in transactions of its own; outcome and reason come back.
        """
        with signals() as told:
            async for letter in self._in_pages(engine):
                if told.done():
                    return told.result()
                outcome, reason = await work(letter)
                self._left -= 1
                self._results.append(_result(_summary(letter), outcome, reason))
                if not self._left or (outcome is Outcome.FAILED and stop_on_error):
                    return Exit.FINE
                if rate is not None:
                    await asyncio.wait([told], timeout=1 / rate)
        self._left = 0  # the others were closed by somebody else meanwhile
        return Exit.FINE

    async def _in_pages(self, engine: AsyncEngine) -> AsyncIterator[Letter]:
        page: Sequence[Letter] = ()
        while True:
            async with engine.connect() as connection:
                last = page[-1].id if page else 0
                page = await connection.run_sync(_letters.find, self._wanted, after=last, limit=PAGE)
            for letter in page:
                yield letter
            if not page:
                return

    def finish(self, code: Exit, *, as_json: bool, dry_run: bool) -> None:
        """Say what has become of all, and end with 1 if something has failed."""
        counts = Counter(it["outcome"] for it in self._results)
        report = {"action": self._action, "dry_run": dry_run, "selected": self.selected}
        report |= {outcome.value: counts[outcome] for outcome in Outcome}
        report |= {"left": self._left, "results": self._results, "sample": self._sample}
        if counts[Outcome.FAILED]:
            code = code or Exit.PROBLEM
        emit(report, self._told(counts, dry_run=dry_run), as_json=as_json, code=code)

    def _told(self, counts: Counter[str], *, dry_run: bool) -> str:
        selected = number(self.selected, "letter")
        if not self.selected:
            lines = [f"{self._action}: nothing to do"]
        elif dry_run:
            lines = [f"{self._action}: {selected} would be taken", _listed(self._sample)]
        else:
            lines = [f"{self._action}: {counts[Outcome.DONE]:,} of {selected} done"]
        words = {
            Outcome.DONE: "done",
            Outcome.FAILED: "failed again",
            Outcome.SUPERSEDED: "is closed as superseded: the same message came again, and was dealt with then",
            Outcome.GONE: "is not open any more",
        }
        for it in self._results:
            reason = f": {it['reason']}" if it["reason"] else ""
            lines.append(plain(f"letter {it['id']} of {it['consumer']} {words[it['outcome']]}{reason}"))
        if self._left and not dry_run:
            lines.append(f"stopped: {number(self._left, 'letter')} left")
        return "\n".join(lines)


def _result(summary: Mapping[str, Any], outcome: Outcome, reason: str | None) -> dict[str, Any]:
    known = {name: summary[name] for name in ("id", "consumer", "kind", "event_id")}
    return known | {"outcome": outcome, "reason": reason}


# -- redriving ---------------------------------------------------------------------------------------------------------


@command.command()
@click.argument("box", metavar="MODULE:BOX")
@_selecting
@click.option("--stop-on-error", is_flag=True, help="Stop at the first letter that fails again.")
@options
def redrive(
    config: Path | None,
    as_json: bool,
    *,
    box: str,
    ids: tuple[int, ...],
    everything: bool,
    kinds: tuple[str, ...],
    limit: int | None,
    rate: float | None,
    stop_on_error: bool,
    dry_run: bool,
    author: Author,
    **filters: Any,
) -> None:
    """Give letters to the handlers of your box once more, in this process: named by their ids, or chosen by filters.

    The effect of a letter and its closing are one transaction. Ctrl-C and SIGTERM stop between two letters.
    """
    passage = _Passage("redrive", _selected(ids, everything, kinds, filters), limit)
    load_settings(config)

    async def work() -> Exit:
        async with opened_box(box) as started:
            async with started.engine.connect() as connection:
                await connection.run_sync(passage.look)
            _check_consumers(started, box, passage.by_consumer)
            if dry_run or not passage.selected:
                return Exit.FINE
            again = partial(_redrive, started, author)
            return await passage.go(started.engine, again, rate=rate, stop_on_error=stop_on_error)

    passage.finish(run(work()), as_json=as_json, dry_run=dry_run)


def _check_consumers(box: Pillarbox, reference: str, wanted: Counter[str]) -> None:
    """Before anything is done: nobody wants half of it."""
    missing = [name for name in sorted(wanted) if name not in box.consumers]
    if missing:
        named = ", ".join(f"{name!r} ({number(wanted[name], 'letter')})" for name in missing)
        known = ", ".join(sorted(box.consumers)) or "none"
        raise CommandError(
            f"{reference} has no consumer {named}: it has {known}; name another box, or choose by --consumer",
            Exit.USAGE,
        )


async def _redrive(box: Pillarbox, author: Author, letter: Letter) -> tuple[Outcome, str | None]:
    async with box.engine.begin() as connection:
        entry = await connection.run_sync(correspondence.begin_redrive, letter, author)
    reason = None
    try:
        outcome = Outcome((await box.consumers[letter.consumer].redrive(letter.id)).value)
    except Exception as error:  # whatever a handler may raise
        outcome, reason = Outcome.FAILED, redacted(f"{type(error).__name__}: {error}")
    async with box.engine.begin() as connection:
        await connection.run_sync(correspondence.end_redrive, entry, letter, outcome)
    return outcome, reason


# -- discarding --------------------------------------------------------------------------------------------------------


@command.command()
@_selecting
@confirmed
@options
def discard(
    config: Path | None,
    as_json: bool,
    *,
    ids: tuple[int, ...],
    everything: bool,
    kinds: tuple[str, ...],
    limit: int | None,
    rate: float | None,
    dry_run: bool,
    author: Author,
    yes: bool,
    **filters: Any,
) -> None:
    """Close letters for good: what they ask for is never done. Named by their ids, or chosen by filters.

    --reason is required. Ctrl-C and SIGTERM stop between two letters.
    """
    need_reason(author, "why the letters are discarded")
    passage = _Passage("discard", _selected(ids, everything, kinds, filters), limit)
    settings = load_settings(config)
    run(ask(settings, passage.look))

    async def work() -> Exit:
        async with changing(settings) as engine:
            return await passage.go(engine, partial(_discard, engine, author), rate=rate)

    code = Exit.FINE
    if passage.selected and not dry_run:
        confirm(f"discard {number(passage.selected, 'letter')}", yes=yes)
        code = run(work())
    passage.finish(code, as_json=as_json, dry_run=dry_run)


async def _discard(engine: AsyncEngine, author: Author, letter: Letter) -> tuple[Outcome, str | None]:
    async with engine.begin() as connection:
        closed = await connection.run_sync(correspondence.discard, letter, author)
    return Outcome.DONE if closed else Outcome.GONE, None


# -- editing -----------------------------------------------------------------------------------------------------------


@command.command()
@click.argument("letter_id", type=Whole(1, MAX_ID), metavar="ID")
@click.option("--body", type=click.File("rb"), required=True, metavar="FILE", help="The new body; - is standard input.")
@signed
@options
def edit(
    config: Path | None,
    as_json: bool,
    letter_id: int,
    *,
    body: BinaryIO,
    author: Author,
    dry_run: bool,
) -> None:
    """Let a redrive use another body. The original one is kept. --reason is required."""
    need_reason(author, "why the body is changed")
    settings = load_settings(config)
    letter = run(ask(settings, lambda it: _letter(it, letter_id)))
    if letter.state is not LetterState.OPEN:
        raise CommandError(_closed(letter_id, f"it is {letter.state}"), Exit.PROBLEM)
    new = body.read()
    _check_body(new, letter)
    entry = None
    if not dry_run:
        entry = run(change(settings, lambda it: correspondence.edit(it, letter_id, new, author)))
        if entry is None:
            raise CommandError(_closed(letter_id, "somebody else was quicker"), Exit.PROBLEM)
    report = {"id": letter_id, "bytes": len(new), "audit": entry, "dry_run": dry_run}
    said = "the new body can be used" if dry_run else f"done, audit entry {entry}; now `pillarbox dlq redrive` it"
    emit(report, f"edit: {said}", as_json=as_json)


def _closed(letter_id: int, why: str) -> str:
    return f"letter {letter_id} is not open any more: {why}"


def _check_body(new: bytes, letter: Letter) -> None:
    """Which event it is cannot be changed: the inbox knows it by its id."""
    message = letter.message
    event = check_body(new, message.body, message.headers.get("content_type", "application/json"), message.headers)
    if event is not None and letter.event_id not in (None, event.event_id):
        raise CommandError(f"the body is that of another event: its id must be {letter.event_id}", Exit.PROBLEM)
