"""``pillarbox outbox new-install-id``: go on under another name at brokers that deduplicate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..stores import identity
from ..stores.audit import Author
from .arguments import confirm, confirmed, need_reason, options, signed
from .database import change, load_settings, run
from .output import emit, number


@click.command("new-install-id")
@confirmed
@signed
@options
def command(config: Path | None, as_json: bool, *, yes: bool, author: Author, dry_run: bool) -> None:
    """Be another installation to brokers.

    For a database that went back in time, where lanes halt: the broker knows numbers that the outbox would give again,
    and would drop new events as known. And for a copy of the files whose source goes on. Relays must be stopped.
    --reason is required.
    """
    need_reason(author, "what has happened to the database")
    settings = load_settings(config)
    report: dict[str, Any] = {"install_id": None, "batches": None, "audit": None, "dry_run": dry_run}
    told = "nothing was done"
    if not dry_run:
        confirm("send under a new name from now on", yes=yes)
        install, batches, entry = run(change(settings, lambda it: identity.renew(it, author)))
        report |= {"install_id": install, "batches": batches, "audit": entry}
        told = f"done, audit entry {entry}, install id {install}"
        if batches:
            told = f"announced and not settled: {number(batches, 'lane')}; what has left of it leaves again\n{told}"
    emit(report, told, as_json=as_json)
