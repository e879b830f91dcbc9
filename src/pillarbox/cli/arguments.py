"""What commands are given: the options and arguments that several of them have."""

from __future__ import annotations

import getpass
import math
import os
import socket
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..outbox import Direction
from .output import CommandError, Exit, plain

if TYPE_CHECKING:
    from ..stores.audit import Author

_Command = TypeVar("_Command", bound=Callable[..., Any])


class Whole(click.IntRange):
    """A whole number within bounds, by a name that people use."""

    name = "whole number"


class Number(click.FloatRange):
    """A number within bounds, by a name that people use; infinity is none, and `nan` is within all bounds."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        return found if math.isfinite(found) else self.fail(f"{value!r} is not a finite number.", param, ctx)


MAX_ID = 2**63 - 1
"""The largest number that a row may have."""


def together(*decorators: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    """Several options and arguments as one, in the order in which they are shown."""

    def decorate(command: _Command) -> _Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


options = together(
    click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="The settings file."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on standard output."),
)
"""The options that every command has."""


def need_reason(author: Author, what: str) -> None:
    """For commands of which somebody will ask one day why it was done."""
    if not author.reason:
        raise click.UsageError(f"Missing option '--reason': say {what}.")


def check_choice(*narrowing: object, everything: bool, instead: str) -> None:
    """Of commands `for_many`: either something narrows the choice, or ``--all`` says that nothing does."""
    if everything == any(value not in (None, ()) for value in narrowing):
        raise click.UsageError("--all goes with no ID and no filter." if everything else f"{instead}, or say --all.")


one_direction = together(
    click.option("--outbound", "direction", flag_value="outbound", type=Direction, help="Only what goes out."),
    click.option("--inbound", "direction", flag_value="inbound", type=Direction, help="Only what is for consumers."),
)
"""Options that narrow what is meant to deliveries of one direction."""

confirmed = click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal to ask on.")
"""The option of commands that `confirm` what they do."""


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


def signed(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of commands that leave a row in the audit trail: these are given an ``author``, and ``dry_run``."""

    @wraps(command)
    def sign(*arguments: Any, by: str, reason: str | None, **given: Any) -> Any:
        from ..stores.audit import Author  # noqa: PLC0415  others, and their --help, need not wait for it

        return command(*arguments, author=Author(by, reason), **given)

    whose = "Who does it.  [default: USER@HOST]"
    by = click.option("--by", metavar="NAME", default=_somebody, callback=_check_name, help=whose)
    reason = click.option("--reason", callback=check_text, help="Why; it is kept in the audit trail.")
    dry_run = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
    return by(reason(dry_run(sign)))


for_many = together(
    click.option("--all", "everything", is_flag=True, help="Needed if nothing else narrows the choice."),
    click.option("--limit", type=Whole(1), metavar="N", help="At most N in all, oldest first."),
    click.option("--rate", type=Number(0, min_open=True), metavar="N", help="At most N per second."),
    signed,
)
"""The options of commands that do something with many rows, and leave their traces in the audit trail."""
