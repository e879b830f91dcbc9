"""``pillarbox lanes``: who sends what, what holds it back, and the handles to stop, slow down and free it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from sqlalchemy import Connection

from ..outbox import Direction
from ..stores import operations, overview
from ..stores.audit import Author
from ..stores.operations import Change, Handle, Lanes, Tenant
from ..stores.overview import LaneState
from .arguments import Number, check_text, confirm, confirmed, one_direction, options, signed, together
from .database import ask, load_settings, run
from .database import change as changed
from .output import CommandError, Exit, age, emit, number, plain, table


class _ListByDefault(click.Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault)
def command() -> None:
    """See who sends what; pause, slow down or free lanes. Without a command: list."""


@command.command("list")
@click.option("--route", metavar="NAME", callback=check_text, help="Only the lanes of this route.")
@one_direction
@options
def list_lanes(config: Path | None, as_json: bool, route: str | None, direction: Direction | None) -> None:
    """List lanes: who holds them, what they have before them, what holds them back."""
    found = run(ask(load_settings(config), lambda it: overview.lane_states(it, route, direction=direction)))
    headings = ("ROUTE", "SHARD", "OWNER", "LEASE", "EPOCH", "BATCH", "PENDING", "WAITING", "OLDEST", "HELD BACK BY")
    rows = [
        (it.route, it.shard, it.owner, _lease(it), it.epoch, it.batch, it.pending, it.waiting, *_state(it))
        for it in found
    ]
    emit({"lanes": [asdict(it) for it in found]}, table([headings, *rows]) if rows else "no lanes", as_json=as_json)


def _lease(lane: LaneState) -> str | None:
    if lane.lease_seconds is None:
        return None
    return f"{lane.lease_seconds:.1f} s" if lane.held else f"expired {age(-lane.lease_seconds)} ago"


def _state(lane: LaneState) -> tuple[str | None, str | None]:
    oldest = None if lane.oldest_pending_seconds is None else age(lane.oldest_pending_seconds)
    reasons = ["paused"] if lane.paused else []
    if lane.rate is not None:
        reasons.append(f"rate {lane.rate:g}/s")
    if lane.trouble is not None:
        reasons.append(lane.trouble)
    return oldest, ", ".join(reasons) or None


_target = together(
    click.argument("lane", metavar="[ROUTE[/SHARD]]", required=False, callback=check_text),
    click.option("--tenant", metavar="TENANT", callback=check_text, help="A tenant, in all lanes."),
)
"""Lanes by name, or a tenant."""


@command.command()
@_target
@signed
@options
def pause(config: Path | None, as_json: bool, **given: Any) -> None:
    """Stop a route, one of its lanes, or a tenant. What is being sent is finished; the rest waits."""
    _apply(Handle.PAUSE, config, as_json=as_json, **given)


@command.command()
@_target
@signed
@options
def resume(config: Path | None, as_json: bool, **given: Any) -> None:
    """Let a route, one of its lanes, or a tenant go on."""
    _apply(Handle.RESUME, config, as_json=as_json, **given)


@command.command()
@_target
@click.option("--per-second", type=Number(0, min_open=True), metavar="N", help="Messages per second, for each lane.")
@click.option("--none", "unlimited", is_flag=True, help="Lift the limit.")
@signed
@options
def rate(config: Path | None, as_json: bool, per_second: float | None, unlimited: bool, **given: Any) -> None:
    """Hold each lane of a route, one of its lanes, or a tenant in each lane, to a rate."""
    if (per_second is None) != unlimited:
        raise click.UsageError("Say either --per-second or --none.")
    _apply(Handle.RATE, config, as_json=as_json, per_second=per_second, **given)


@command.command()
@click.argument("lane", metavar="ROUTE/SHARD", callback=check_text)
@confirmed
@signed
@options
def release(config: Path | None, as_json: bool, **given: Any) -> None:
    """Take a lane from an owner that is stuck. Its next write fails, and another relay takes the lane."""
    _apply(Handle.RELEASE, config, as_json=as_json, **given)


def _apply(
    handle: Handle,
    config: Path | None,
    *,
    as_json: bool,
    lane: str | None,
    author: Author,
    dry_run: bool,
    tenant: str | None = None,
    per_second: float | None = None,
    yes: bool = False,
) -> None:
    if bool(lane) == bool(tenant):
        raise click.UsageError("Name either a route or lane, or a --tenant.")
    settings = load_settings(config)

    def prepare(connection: Connection) -> tuple[Change, int, str]:
        target = operations.find_lanes(connection, lane) if lane else Tenant(tenant or "")
        change = Change(handle, target, per_second)
        return change, operations.affected(connection, change), _owner(connection, change)

    change, count, owner = run(ask(settings, prepare))
    entry = None
    if count and not dry_run:
        if handle is Handle.RELEASE:
            confirm(f"take {change.target} from {owner}", yes=yes)
        count, entry = run(changed(settings, lambda it: operations.apply(it, change, author)))
    report = {"action": handle, "target": str(change.target), "changed": count, "audit": entry, "dry_run": dry_run}
    emit(report, plain(_told(change, count, entry)), as_json=as_json)


def _owner(connection: Connection, change: Change) -> str:
    if change.handle is not Handle.RELEASE or not isinstance(change.target, Lanes):
        return ""
    if change.target.shard is None:
        raise CommandError(f"name one lane of {change.target}: ROUTE/SHARD", Exit.USAGE)
    (lane,) = overview.lane_states(connection, change.target.route, change.target.shard)
    return f"{lane.owner}, whose lease {'has ' if lane.held else ''}{_lease(lane)}{' left' if lane.held else ''}"


def _told(change: Change, count: int, entry: int | None) -> str:
    what = f"{change.handle} {change.target}"
    if change.handle is Handle.RATE:
        what += ": no limit" if change.rate is None else f": {change.rate:g} per second in each lane"
    if not count:
        return f"{what}: nothing to do"
    changed = what if isinstance(change.target, Tenant) else f"{what}: {number(count, 'lane')}"
    return f"{changed}, {'would be done' if entry is None else f'audit entry {entry}'}"
