"""``pillarbox init``: a settings file to begin with."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

import click
import yaml  # type: ignore[import-untyped]  # has no stubs of its own

from ..settings import FILE, KEYS, variable
from .arguments import options
from .output import CommandError, Exit, emit, plain


@click.command()
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
@options
def command(config: Path | None, as_json: bool, force: bool) -> None:
    """Write a commented settings file: pillarbox.yaml in the current folder, or the one that --config names."""
    path = config or FILE
    try:
        path.touch(mode=0o600, exist_ok=force)  # it may come to hold a password
        path.write_text(template(), "utf-8")
    except FileExistsError as error:
        raise CommandError(
            f"{path} is there already: keep it, or say --force to overwrite it", Exit.SETTINGS
        ) from error
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}", Exit.SETTINGS) from error
    emit({"path": str(path)}, f"wrote {plain(str(path))}", as_json=as_json)


def template() -> str:
    """Every key with its description and an example, commented out."""
    lines = [
        "# Settings of Pillarbox. A variable of the environment wins over this file; what is in effect, and why, says",
        "# `pillarbox config show --origin`. Take away the # in front of what you want to set.",
    ]
    group = ""
    for key, field in KEYS.items():
        above, _, name = key.rpartition(".")
        lines += ["", *wrap(f"# {field.description} ({variable(key)})", 118, subsequent_indent="# ")]
        if above and above != group:
            lines.append(f"#{above}:")
        group = above
        example = yaml.safe_dump((field.examples or [None])[0], default_flow_style=True).splitlines()[0]
        lines.append(f"#{'  ' if above else ''}{name}: {example}")
    return "\n".join(lines) + "\n"
