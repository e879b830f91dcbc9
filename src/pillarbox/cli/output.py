"""What commands print: JSON for machines, aligned text for people, and no control characters out of anybody's data."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from enum import IntEnum
from shutil import get_terminal_size

import click

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


def emit(value: object, text: str, *, as_json: bool, code: Exit = Exit.FINE) -> None:
    """Print the result: ``value`` for machines or ``text`` for people. The command ends here if it has a ``code``."""
    try:
        # Escaped to ASCII, so JSON is harmless on a terminal, too.
        click.echo(json.dumps(value, indent=2, default=_jsonable) if as_json else text)
    except BrokenPipeError:
        raise  # who reads has seen enough: click knows what to do
    except OSError as error:
        raise unwritable(error) from error
    if code:
        click.get_current_context().exit(code)


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


def beside(lines: str, column: Sequence[str | None]) -> str:
    """A table with one more column of long texts, which end where the terminal does."""
    rows, width = lines.splitlines(), max(map(len, lines.splitlines()))
    room = max(24, get_terminal_size((width + 80, 0)).columns - width - 2)
    texts = [shown(text) for text in column]
    return "\n".join(
        f"{row:<{width}}  {text if len(text) <= room else text[: room - 1] + '…'}"
        for row, text in zip(rows, texts, strict=True)
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
