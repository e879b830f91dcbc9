"""``pillarbox outbox rebase``: make a database that came from a dump or by logical replication its own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..settings import Settings
from ..stores import rebase
from ..stores.audit import Author
from ..stores.rebase import Survey
from .arguments import confirm, confirmed, need_reason, options, signed
from .database import ask, load_settings, opened, run
from .output import emit, number


@click.command("rebase")
@click.option(
    "--new-install-id",
    is_flag=True,
    help="Be another installation to brokers. Needed if the source goes on, or went on after the dump.",
)
@confirmed
@signed
@options
def command(
    config: Path | None,
    as_json: bool,
    *,
    new_install_id: bool,
    yes: bool,
    author: Author,
    dry_run: bool,
) -> None:
    """Let relays send from a copy: a restored dump, or a logical replica.

    What the source had not sent goes on from here, in its order. Refused on a database that is no copy. --reason is
    required. Can be stopped and begun again.
    """
    need_reason(author, "where this copy comes from")
    settings = load_settings(config)
    found = run(ask(settings, rebase.survey))
    report: dict[str, Any] = {**asdict(found), "install_id": None, "audit": None, "dry_run": dry_run}
    if not dry_run:
        confirm(f"rebase this copy, with {_left(found)}, and let relays send from it", yes=yes)
        found, install, entry = run(_rebase(settings, author, new_install_id=new_install_id))
        report |= {**asdict(found), "install_id": install, "audit": entry}
    emit(report, _told(found, report), as_json=as_json)


async def _rebase(settings: Settings, author: Author, *, new_install_id: bool) -> tuple[Survey, Any, int]:
    async with opened(settings) as engine:
        async with engine.connect() as connection:
            await connection.run_sync(rebase.forget)
        async with engine.begin() as connection:
            return await connection.run_sync(lambda it: rebase.rebase(it, author, new_install_id=new_install_id))


def _left(found: Survey) -> str:
    return number(found.late + found.fresh + found.failed, "undone delivery")


def _told(found: Survey, report: dict[str, Any]) -> str:
    counts = f"{found.fresh:,} not begun, {found.late:,} begun or late, {found.failed:,} failed or parked"
    lines = [f"rebase: {number(found.lanes, 'lane')}, {_left(found)} ({counts})"]
    if found.batches:
        lines.append(f"announced and not settled: {number(found.batches, 'lane')}; what has left of it leaves again")
    done = f"done, audit entry {report['audit']}, install id {report['install_id']}"
    return "\n".join([*lines, "nothing was done" if report["dry_run"] else done])
