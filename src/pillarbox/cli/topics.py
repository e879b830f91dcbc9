"""``pillarbox topics``: what Pulsar must have for the topics of the routes, and how it gets it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from sqlalchemy import Connection

from ..consumers.dead_letters import SUFFIX, consumer_of
from ..errors import ConfigurationError
from ..outbox import RouteRecord
from ..route import TOPIC_PART
from ..settings import Settings
from ..stores import inbox as stored
from ..stores import overview
from ..stores.schema import check_schema
from ..transports.pulsar.address import parse_address
from ..transports.pulsar.admin import PulsarAdmin, Retention
from ..transports.pulsar.names import MAX_PARTITIONS, TopicName
from ..transports.pulsar.plan import Action, Desired, Step, apply, find, plan
from .arguments import Whole, check_text, confirm, confirmed, options, together
from .database import load_settings, opened, reached, run
from .output import CommandError, Exit, emit, number, plain, table
from .serving import load_box

_T = TypeVar("_T")

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class _Cluster:
    """What a transport that leads to Pulsar needs there."""

    transport: str
    admin: PulsarAdmin
    topics: Sequence[TopicName]
    missing: Sequence[str]
    """What we would have to know to name all topics."""
    steps: Sequence[Step] = ()


def _parse_names(_context: click.Context, parameter: click.Parameter, given: str | None) -> tuple[str, ...]:
    names = [each.strip() for each in given.split(",")] if given is not None else []
    if wrong := [each for each in names if not TOPIC_PART.fullmatch(each)]:
        raise click.BadParameter(f"{wrong[0]!r} cannot be part of a topic's name: write {parameter.metavar}.")
    return tuple(dict.fromkeys(names))


_COUNT, _TENANTS = "Of each topic; 0: not partitioned.", "For {tenant} in topics; by default those in the outbox."
_wanted = together(
    click.argument("box", required=False, metavar="[MODULE:BOX]"),
    click.option("--transport", metavar="NAME", callback=check_text, help="Only what leads to this one."),
    click.option("--tenants", metavar="T1,T2", callback=_parse_names, help=_TENANTS),
    click.option("--aggregates", metavar="A1,A2", callback=_parse_names, help="The same for {aggregate}."),
    click.option("--partitions", type=Whole(0, MAX_PARTITIONS), metavar="N", help=_COUNT),
    click.option("--retention-hours", type=Whole(-1), metavar="N", help="Keep messages so long; -1: for ever."),
    click.option("--retention-mb", type=Whole(-1), metavar="N", help="Keep at most so much; -1: no limit."),
    click.option("--dedup/--no-dedup", default=True, help="Deduplicate, or leave that as it is.  [default: dedup]"),
)
"""The options that say what there must be."""


@click.group()
def command() -> None:
    """Prepare Pulsar for the topics of your routes: tenants, namespaces, policies, topics. Nothing is taken away."""


@command.command("plan")
@_wanted
@options
def plan_topics(config: Path | None, as_json: bool, **given: Any) -> None:
    """Say what is missing in the cluster, and do nothing.

    Routes and transports are those of the database and the settings; with MODULE:BOX, of a Pillarbox in your code.
    """
    clusters = run(_survey(load_settings(config), **given))
    emit(_document(clusters), _text(clusters), as_json=as_json)
    _end(clusters)


@command.command("apply")
@_wanted
@confirmed
@options
def apply_topics(config: Path | None, as_json: bool, yes: bool, **given: Any) -> None:
    """Make what is missing in the cluster. Conflicts are left as they are.

    Routes and transports are those of the database and the settings; with MODULE:BOX, of a Pillarbox in your code.
    """
    clusters = run(_survey(load_settings(config), **given))
    total = sum(len(_doable(each)) for each in clusters)
    if not (as_json and yes):
        click.echo(_text(clusters), err=as_json)
    if total:
        confirm(f"do {number(total, 'step')} in {', '.join(each.admin.url for each in clusters)}", yes=yes)
        run(_apply(clusters, total))
    if total or as_json:
        emit(_document(clusters) | {"applied": total}, f"{number(total, 'step')} done", as_json=as_json)
    _end(clusters)


# -- what there must be ------------------------------------------------------------------------------------------------


async def _survey(
    settings: Settings,
    *,
    box: str | None,
    transport: str | None,
    tenants: Sequence[str],
    aggregates: Sequence[str],
    partitions: int | None,
    retention_hours: int | None,
    retention_mb: int | None,
    dedup: bool,
) -> list[_Cluster]:
    """Read the routes, and ask the clusters that they lead to."""
    retention = _retention(retention_hours, retention_mb)
    values = {"tenant": tenants, "aggregate": aggregates}
    async with AsyncExitStack() as stack:
        records = consumers = None
        if box is None:
            admins = _admins(settings, transport)
            engine = await stack.enter_async_context(opened(settings))
        else:
            loaded = load_box(box)
            leading = {name: getattr(each, "admin", None) for name, each in loaded.transports.items()}
            found = {name: each for name, each in leading.items() if isinstance(each, PulsarAdmin)}
            admins, records = _chosen(found, transport, box), loaded.router.records
            consumers = {each.name: each.topics for each in loaded.consumers.values()}
            engine = (await stack.enter_async_context(loaded)).engine
            await stack.enter_async_context(reached(engine, f"the URL of {box}"))
        async with engine.connect() as connection:
            survey = partial(_clusters, admins=admins, records=records, consumers=consumers, values=values)
            clusters = await connection.run_sync(survey)
    return [await _planned(each, Desired(tuple(each.topics), partitions, dedup, retention)) for each in clusters]


def _admins(settings: Settings, transport: str | None) -> dict[str, PulsarAdmin]:
    schemes = ("pulsar:", "pulsar+ssl:")
    addresses = {name: text for name, text in settings.transports.items() if text.startswith(schemes)}
    admins = {}
    for name, text in _chosen(addresses, transport, "the setting transports").items():
        address = parse_address(text)
        if address.admin_url is None:
            form = f"{address.service_url}?admin=http://host:8080"
            raise CommandError(f"transports: {name} names no REST interface; write {form}", Exit.SETTINGS)
        admins[name] = PulsarAdmin(address.admin_url, address.credentials, address.tls)
    return admins


def _chosen(found: Mapping[str, _T], name: str | None, where: str) -> dict[str, _T]:
    if not found:
        raise CommandError(f"{where}: no transport leads to Pulsar, so there is nothing to prepare", Exit.SETTINGS)
    if name is not None and name not in found:
        raise CommandError(f"--transport: {name!r} does not lead to Pulsar; say {' or '.join(found)}", Exit.USAGE)
    return {each: value for each, value in found.items() if name in (None, each)}


def _retention(hours: int | None, megabytes: int | None) -> Retention | None:
    if hours is None and megabytes is None:
        return None
    hours, megabytes = -1 if hours is None else hours, -1 if megabytes is None else megabytes
    if (hours == 0) != (megabytes == 0):
        raise click.UsageError("To keep nothing, say 0 for --retention-hours and --retention-mb; no limit is -1.")
    return Retention(hours if hours == -1 else hours * 60, megabytes)


def _clusters(
    connection: Connection,
    *,
    admins: Mapping[str, PulsarAdmin],
    records: Sequence[RouteRecord] | None,
    consumers: Mapping[str, Sequence[str]] | None,
    values: Mapping[str, Sequence[str]],
) -> list[_Cluster]:
    check_schema(connection)
    routes = overview.routes_to(connection, [*admins]) if records is None else records
    if consumers is None:
        consumers = {each.name: each.topics for each in stored.consumers(connection)}
    clusters = []
    for name, admin in admins.items():
        topics, missing = dict[TopicName, None](), []
        leading = [route for route in routes if route.destination == name]
        for route in leading:
            try:
                topics |= dict.fromkeys(map(TopicName.parse, _topics_of(connection, route, consumers, values)))
            except LookupError as error:
                missing.append(f"route {route.name}: {error.args[0]}")
        if not leading:
            remedy = "a box makes them known with its first event, or by register(); or name it as MODULE:BOX"
            missing.append(f"no route leads to {name}: {remedy}")
        clusters.append(_Cluster(name, admin, list(topics), missing))
    return clusters


def _topics_of(
    connection: Connection,
    route: RouteRecord,
    consumers: Mapping[str, Sequence[str]],
    values: Mapping[str, Sequence[str]],
) -> list[str]:
    """The topics of a route. A `LookupError` says what we would have to know to name them."""
    consumer = consumer_of(route.name)
    if consumer is None:
        found = _named(connection, route, route.topic, values)
        if not found:
            unknown = sorted(set(_PLACEHOLDER.findall(route.topic)))
            say = " and ".join(f"--{each}s" for each in unknown)
            raise LookupError(f"the outbox has none of its deliveries yet; say {say}")
        return found
    if consumer not in consumers:
        raise LookupError("its consumer has never run, so its topics are not known; name the box as MODULE:BOX")
    # A tenant without a dead letter needs no topic for them yet.
    return [each for topic in consumers[consumer] for each in _named(connection, route, topic + SUFFIX, values)]


def _named(connection: Connection, route: RouteRecord, template: str, values: Mapping[str, Sequence[str]]) -> list[str]:
    placeholders = set(_PLACEHOLDER.findall(template))
    unknown = sorted(each for each in placeholders if not values.get(each))
    given = sorted(placeholders.difference(unknown))
    if given and unknown:
        # The outbox cannot fill it in: in "a-b-c" nobody sees where the tenant ends.
        say = " and ".join(f"--{each}s" for each in unknown)
        raise LookupError(f"--{given[0]}s alone does not name its topics; say {say}, too")
    return overview.topics_of(connection, route) if unknown else _filled(template, values)


def _filled(template: str, values: Mapping[str, Sequence[str]]) -> list[str]:
    topics = [template]
    for name in sorted(set(_PLACEHOLDER.findall(template))):
        topics = [topic.replace(f"{{{name}}}", value) for topic in topics for value in values[name]]
    return topics


# -- the clusters ------------------------------------------------------------------------------------------------------


async def _planned(cluster: _Cluster, desired: Desired) -> _Cluster:
    try:
        async with cluster.admin as admin:
            steps = plan(desired, await find(admin, desired))
    except OSError as error:
        raise CommandError(f"{cluster.transport}: {error}", Exit.UNREACHABLE) from error
    return _Cluster(cluster.transport, cluster.admin, cluster.topics, cluster.missing, steps)


async def _apply(clusters: Sequence[_Cluster], total: int) -> None:
    done = 0
    for each in clusters:
        async with each.admin as admin:
            for step in _doable(each):
                try:
                    await apply(admin, step)
                except (OSError, ConfigurationError) as error:
                    code = Exit.UNREACHABLE if isinstance(error, OSError) else Exit.PROBLEM
                    so_far = f"{done} of {number(total, 'step')} done, and the same command goes on"
                    raise CommandError(f"{step.action} {step.target}: {error}; {so_far}", code) from error
                done += 1


def _doable(cluster: _Cluster) -> list[Step]:
    return [step for step in cluster.steps if step.action is not Action.CONFLICT]


def _document(clusters: Sequence[_Cluster]) -> dict[str, Any]:
    steps = [
        {"transport": each.transport, "action": step.action, "target": step.target, "detail": step.detail}
        for each in clusters
        for step in each.steps
    ]
    return {
        "topics": [str(topic) for each in clusters for topic in each.topics],
        "steps": [step for step in steps if step["action"] != Action.CONFLICT],
        "conflicts": [step for step in steps if step["action"] == Action.CONFLICT],
        "missing": [line for each in clusters for line in each.missing],
    }


def _text(clusters: Sequence[_Cluster]) -> str:
    rows = [(each.transport, step.action, step.target, step.detail) for each in clusters for step in each.steps]
    nothing = f"{number(sum(len(each.topics) for each in clusters), 'topic')}: nothing to do"
    shown = table([("TRANSPORT", "ACTION", "TARGET", "DETAIL"), *rows]) if rows else nothing
    return "\n".join([shown, *(plain(line) for each in clusters for line in each.missing)])


def _end(clusters: Sequence[_Cluster]) -> None:
    """A conflict, or a topic that we cannot name, is a problem."""
    if any(each.missing or len(_doable(each)) < len(each.steps) for each in clusters):
        click.get_current_context().exit(Exit.PROBLEM)
