"""The command line: ``pillarbox COMMAND``.

A command is a module of this package, imported only when it is called for: what it needs is heavy, and ``--help`` must
not wait for it. Whatever goes wrong ends here: as one line that says what and what to do, and a documented exit code.
"""

from __future__ import annotations

import gc
import io
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import click

from .. import __version__
from ..errors import ConfigurationError, EmbeddedServerError, NotMigratedError, PillarboxError
from .output import CommandError, Exit, complain, unwritable

_COMMANDS = {
    "chaos": "Break servers, processes and links, and see that every event arrives once.",
    "config": "Show the settings and where they come from.",
    "consume": "Let the consumers of your box work.",
    "consumers": "See who consumes, and how far each has come.",
    "demo": "Write and send under load, let things go wrong, and see that nothing is lost.",
    "dev": "Servers for development.",
    "dlq": "Look into dead letters, and mend them.",
    "doctor": "Examine the database: what is wrong, and what to do.",
    "init": "Write a commented settings file.",
    "lanes": "See who sends what; pause, slow down or free lanes.",
    "migrate": "Bring the database to the schema of this release.",
    "outbox": "Look into the outbox, and mend what has failed.",
    "projections": "List projections, and rebuild one.",
    "relay": "Send what the outbox holds.",
    "topics": "Prepare Pulsar for the topics of your routes.",
    "trace": "Tell the life of an event.",
    "why": "Say what holds an event back.",
}


class _Commands(click.Group):
    """Knows its commands by name, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  click's signature
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f".{cmd_name}", __name__).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's signature
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="pillarbox %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Pillarbox: what you post is delivered."""
    if not gc.isenabled():  # the command has been imported
        gc.freeze()
        gc.enable()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    """Run the command line and exit."""
    # What is imported stays: to look for garbage in it takes a fifth of the start, and again and again a little of a
    # relay's time.
    gc.disable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # no answer fails for a terminal that cannot show it
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code."""
    try:
        code = cli.main(list(arguments), prog_name="pillarbox", standalone_mode=False)
        return code if isinstance(code, int) else Exit.FINE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "pillarbox"
        complain(f"{_message(error)} See `{path} --help`.")
        return Exit.USAGE
    except (CommandError, PillarboxError) as error:
        complain(str(error))
        return _code(error)
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and traceback.extract_tb(error.__traceback__)[-1].name == "echo":
            complain(str(unwritable(error)))  # click's own: --help and --version
            return Exit.PROBLEM
        complain("".join(f"  {line}\n" for line in "".join(traceback.format_exception(error)).splitlines()))
        complain("this is a bug in pillarbox: please report it, with the lines above")
        return Exit.INTERNAL


def _message(error: click.UsageError) -> str:
    if isinstance(error, click.NoSuchOption) and error.ctx and isinstance(error.ctx.command, click.Group):
        # What click would suggest is one of the few options that stand here.
        said = f"No such option {error.option_name!r} before the command."
        return f"{said} Options come after it, as in `pillarbox outbox list --json`."
    return " ".join(error.format_message().split())


def _code(error: CommandError | PillarboxError) -> Exit:
    if isinstance(error, CommandError):
        return error.code
    if isinstance(error, ConfigurationError):
        return Exit.SETTINGS
    if isinstance(error, NotMigratedError):
        return Exit.NOT_MIGRATED
    return Exit.UNREACHABLE if isinstance(error, EmbeddedServerError) else Exit.PROBLEM
