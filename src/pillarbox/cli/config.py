"""``pillarbox config``: what is set, and by whom."""

from __future__ import annotations

from pathlib import Path

import click

from .arguments import options
from .database import load_settings
from .output import emit, table


@click.group(no_args_is_help=False)
def command() -> None:
    """Show the settings and where they come from."""


@command.command()
@click.option("--origin", is_flag=True, help="Say where each value comes from: a variable, the file, or the default.")
@options
def show(config: Path | None, as_json: bool, origin: bool) -> None:
    """Show every setting. Passwords are masked."""
    settings = load_settings(config)
    values, origins = settings.shown(), settings.origins()
    described = {key: {"value": value, "origin": origins[key]} for key, value in values.items()}
    rows = [("KEY", "VALUE", "ORIGIN"), *((key, str(value or "-"), origins[key]) for key, value in values.items())]
    emit(described, table([row if origin else row[:2] for row in rows]), as_json=as_json)
