"""``pillarbox dev``: servers for development."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from .database import embedded_postgres, load_settings
from .output import emit, options


@click.group(no_args_is_help=False)
def command() -> None:
    """Servers for development."""


@command.command()
@options
def postgres(config: Path | None, as_json: bool) -> None:
    """Run the embedded PostgreSQL until Ctrl-C or SIGTERM, and print its URL when it is ready.

    It is the server that other commands use when no database_url is set. One that runs already is joined; it
    stops with its last user.
    """
    server = embedded_postgres(load_settings(config))
    # Blocked, not handled: a signal that comes early waits until the server is up and can be stopped in peace.
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with server:
        emit({"url": server.url}, server.url, as_json=as_json)
        signal.sigwait(signals)
