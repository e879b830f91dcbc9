"""What commands print: JSON for machines, aligned text for people, and no control characters out of anybody's data."""

from __future__ import annotations

import getpass
import json
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])

_PASSWORD_IN_URL = re.compile(r"(://[^:/@\s]*):\S*@")


class Exit(IntEnum):
    """How a command ends."""

    FINE = 0
    PROBLEM = 1
    USAGE = 2
    SETTINGS = 3
    UNREACHABLE = 4
    NOT_MIGRATED = 5
    INTERNAL = 70
    INTERRUPTED = 130
    TERMINATED = 143


class CommandError(Exception):
    """Ends the command with a message and an exit code of its own."""

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(message)
        self.code = code


class Whole(click.IntRange):
    """A whole number within bounds, by a name that people use."""

    name = "whole number"


class Number(click.FloatRange):
    """A number within bounds, by a name that people use; infinity is none, and `nan` is within all bounds."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        return found if math.isfinite(found) else self.fail(f"{value!r} is not a finite number.", param, ctx)


def options(command: _Command) -> _Command:
    """The options that every command has."""
    config = click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="The settings file.")
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on standard output.")
    return config(as_json(command))


def signed(command: _Command) -> _Command:
    """The options of commands that leave a row in the audit trail."""
    by = click.option(
        "--by", metavar="NAME", default=_somebody, callback=_check_name, help="Who does it.  [default: USER@HOST]"
    )
    reason = click.option("--reason", callback=check_text, help="Why; it is kept in the audit trail.")
    dry_run = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
    return by(reason(dry_run(command)))


def need_reason(reason: str | None, what: str) -> None:
    """For commands of which somebody will ask one day why it was done."""
    if not reason:
        raise click.UsageError(f"Missing option '--reason': say {what}.")


def for_many(command: _Command) -> _Command:
    """The options of commands that do something with many rows, and leave their traces in the audit trail."""
    everything = click.option("--all", "everything", is_flag=True, help="Needed if nothing else narrows the choice.")
    limit = click.option("--limit", type=Whole(1), metavar="N", help="At most N in all, oldest first.")
    rate = click.option("--rate", type=Number(0, min_open=True), metavar="N", help="At most N per second.")
    return everything(limit(rate(signed(command))))


def confirmed(command: _Command) -> _Command:
    """The option of commands that `confirm` what they do."""
    return click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal to ask on.")(command)


def confirm(what: str, *, yes: bool) -> None:
    """Let a person say yes to what cannot be taken back."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError(f"this would {what}: say --yes, as there is no terminal to ask on", Exit.USAGE)
    if not click.confirm(plain(f"{what[0].upper()}{what[1:]}?"), err=True):
        raise CommandError("nothing was done", Exit.PROBLEM)


def _somebody() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have a number and no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:200]


def check_text(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """An argument that a database takes as text; it may be any bytes."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise click.BadParameter("it is not valid UTF-8.") from None
    return value


def _check_name(context: click.Context, parameter: click.Parameter, name: str) -> str:
    if not 1 <= len(name) <= 200:
        raise click.BadParameter("a name has 1 to 200 characters.")
    return check_text(context, parameter, name) or name


def emit(value: object, text: str, *, as_json: bool) -> None:
    """Print the result: ``value`` for machines or ``text`` for people."""
    try:
        # Escaped to ASCII, so JSON is harmless on a terminal, too.
        click.echo(json.dumps(value, indent=2, default=_jsonable) if as_json else text)
    except BrokenPipeError:
        raise  # who reads has seen enough: click knows what to do
    except OSError as error:
        raise unwritable(error) from error


def unwritable(error: OSError) -> CommandError:
    """What to end with if standard output takes nothing, as on a full disk."""
    # What is left in the buffer would fail once more when the interpreter ends.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CommandError(f"cannot write to standard output: {error.strerror}; see where it goes", Exit.PROBLEM)


def complain(message: str) -> None:
    """Say on standard error what is wrong, one line per mistake; indented lines belong to the one above."""
    for line in message.splitlines():
        prefix = "" if line.startswith(" ") else "error: "
        click.echo(prefix + plain(redacted(line)), err=True)


def redacted(text: str) -> str:
    """The text without passwords in URLs: what others say may quote one."""
    return _PASSWORD_IN_URL.sub(r"\1:***@", text)


def plain(text: str) -> str:
    """The text with everything escaped that could move the cursor, hide or reorder what is shown, or fake a line."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns, headings included; a column whose last cell is a number is aligned to the right."""
    cells = [[shown(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    pads = [str.rjust if isinstance(value, int) else str.ljust for value in rows[-1]]
    return "\n".join(
        "  ".join(pad(cell, width) for cell, width, pad in zip(row, widths, pads, strict=True)).rstrip()
        for row in cells
    )


def shown(value: object) -> str:
    """A value as people read it."""
    if value is None:
        return "-"
    return when(value) if isinstance(value, datetime) else plain(str(value))


def when(moment: datetime) -> str:
    """A moment in UTC."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def age(seconds: float) -> str:
    """How long something lasts."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def number(count: int, what: str) -> str:
    """``1 delivery``, ``2 deliveries``."""
    if count == 1:
        return f"1 {what}"
    return f"{count:,} {what[:-1]}ies" if what.endswith("y") else f"{count:,} {what}s"


def _jsonable(value: object) -> str:
    return when(value) if isinstance(value, datetime) else str(value)
