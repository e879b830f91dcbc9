"""``pillarbox demo``: an order service under load, two relays, a sink, and everything that goes wrong between them.

    shop  ->  database  ->  relays  ->  sink  ->  its file
      |                                              |
      +--------------- ledger -----------------------+

The relays and the sink are processes of their own (`processes`), so that they can be killed and frozen for real. At the
end the ledger, which the business transactions wrote, is compared with the sink's file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ..arguments import Number, options
from ..output import CommandError, Exit, emit, shown, table


@click.command()
@click.option("--seconds", type=Number(0, 3600, min_open=True), metavar="N", default=30.0, show_default=True)
@click.option(
    "--broker",
    type=click.Choice(["sink", "pulsar"]),
    default="sink",
    show_default=True,
    help="What relays send to: a process of the demo, or a real Pulsar, exactly once.",
)
@click.option("--kill", is_flag=True, help="Kill a relay.")
@click.option("--freeze", is_flag=True, help="Freeze a relay for longer than its lease.")
@click.option("--stop-sink", is_flag=True, help="Stop the sink, or the broker, for a while.")
@click.option(
    "--poison", is_flag=True, help="Send an event that the sink rejects, and redrive it later. Not on Pulsar."
)
@click.option("--no-faults", is_flag=True, help="Let nothing go wrong. Without any of these flags, everything does.")
@options
def command(config: Path | None, as_json: bool, seconds: float, broker: str, no_faults: bool, **faults: bool) -> None:
    """Write under load, let things go wrong, and see that nothing is lost.

    Runs on a database of its own within the embedded PostgreSQL or, if database_url is set, on that database, which
    must be migrated. Whatever the demo writes there it removes. Exits with 1 if the figures do not balance.
    With --broker pulsar, which takes Java 17, no duplicate is forgiven.
    """
    # Not above: the processes of the demo are modules of this package, too, and need none of this.
    from ..database import load_settings, run  # noqa: PLC0415
    from .ledger import Kind  # noqa: PLC0415
    from .play import audience, play  # noqa: PLC0415
    from .stage import PLAN  # noqa: PLC0415

    if no_faults and any(faults.values()):
        raise click.UsageError("--no-faults goes with none of the other flags.")
    pulsar = broker == "pulsar"
    if pulsar and faults["poison"]:
        raise click.UsageError("Pulsar rejects nothing: --poison goes with --broker sink.")
    every = [kind for kind in PLAN if not (pulsar and kind is Kind.POISON)]
    kinds = [] if no_faults else [Kind(name) for name, chosen in faults.items() if chosen] or every
    pictured = (sys.stderr if as_json else sys.stdout).isatty()
    stream = (sys.stderr if pictured else None) if as_json else sys.stdout
    report = run(play(load_settings(config), seconds, kinds, audience(stream), pulsar=pulsar))
    if as_json or not pictured:
        emit(report, table(_figures(report)), as_json=as_json)
    if not report["balanced"]:
        raise CommandError("ledger and sink do not agree: please report it, with the figures", Exit.PROBLEM)


def _figures(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The report, to be read."""
    faults = [f"{it['kind']} of {it['target']} at {it['at']} s, for {it['seconds']} s" for it in report["faults"]]
    told = report | {
        "faults": "; ".join(faults) or "none",
        "lag_ms": ", ".join(f"{value} {part}" for part, value in report["lag_ms"].items()),
        "balanced": "yes" if report["balanced"] else "no",
    }
    return [(name.replace("_", " "), shown(value)) for name, value in told.items()]
