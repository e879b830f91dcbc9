"""``pillarbox dev``: servers for development."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from ..embedded import home
from ..testing.pulsar import VERSION, LocalPulsar, install, is_installed
from .arguments import Whole, options
from .database import embedded_postgres, load_settings
from .output import emit

_STOPS = {signal.SIGINT, signal.SIGTERM}
_PORT = Whole(1, 65_535)


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
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    with server:
        emit({"url": server.url}, server.url, as_json=as_json)
        signal.sigwait(_STOPS)


@command.command()
@click.option("--port", type=_PORT, default=6650, show_default=True, help="Where clients connect.")
@click.option("--admin-port", type=_PORT, default=8080, show_default=True, help="Where the admin REST API answers.")
@options
def pulsar(port: int, admin_port: int, config: Path | None, as_json: bool) -> None:
    """Run an Apache Pulsar until Ctrl-C or SIGTERM, and print its two addresses when it is ready.

    It listens on 127.0.0.1 only, and keeps its data for the next time. It needs Java 17 or newer; Pulsar itself is
    fetched by Maven when it is first asked for.
    """
    folder = (load_settings(config).home or home()) / "pulsar"
    server = LocalPulsar(folder, port=port, admin_port=admin_port, quick_start=True)
    if not is_installed():
        click.echo(f"fetching Apache Pulsar {VERSION} (245 MB); this is done once", err=True)
        install()
    # Handled as above. A server that dies by itself ends the command, too.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signals = {*_STOPS, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with server:
        addresses = {"url": server.url, "admin_url": server.admin_url}
        emit(addresses, "\n".join(addresses.values()), as_json=as_json)
        while signal.sigwait(signals) == signal.SIGCHLD:
            server.check()
