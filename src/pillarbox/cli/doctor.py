"""``pillarbox doctor``: what is wrong with the database and with those who empty it, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from shlex import quote

import click
from sqlalchemy import Connection, select

from ..app import Pillarbox
from ..consumers.box import OUTBOX
from ..errors import NotMigratedError, StoreError
from ..inbox import consumer_id
from ..lane_report import TIMES_IN_A_ROW
from ..outbox import INBOX_DESTINATION, LOCAL, TABLES, Status
from ..rejections import REJECTS_EVERYTHING
from ..settings import Settings, masked
from ..stores import claims, copy_check, inspection, overview, partitions, server
from ..stores.dead_letters import count_dead_letters
from ..stores.inbox import SqlInbox
from ..stores.inbox import consumers as registered
from ..stores.inspection import Group
from ..stores.overview import LaneState, RelayState
from ..stores.schema import check_schema, schema_version
from ..stores.slots import slot_states
from ..stores.tables import meta
from .arguments import options
from .consumers import TWICE, too_short
from .database import load_settings, opened, run
from .output import CommandError, Exit, age, emit, number, plain
from .serving import load_box
from .why import remedy_for, start_a_relay

_OLDEST = {"PostgreSQL": (14,), "MariaDB": (10, 6), "MySQL": (8, 0), "SQLite": (3, 35)}
# Settings under which a crash of the server can lose what it has said to be committed.
_RISKY = {
    "fsync": ("off",),
    "synchronous_commit": ("off",),
    "full_page_writes": ("off",),
    "innodb_flush_log_at_trx_commit": ("0", "2"),
}
_ENCODINGS = {
    "server_encoding": "UTF8",
    "character_set_connection": "utf8mb4",
    "encoding": "UTF-8",
}
_MANY = 10_000  # messages of a tenant that wait for a consumer, which are worth a warning
_LONG = 300.0  # seconds after which a pending delivery is worth a warning


class State(StrEnum):
    """How a check turned out."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: State
    found: str
    remedy: str | None = None


@click.command()
@click.argument("box", required=False, metavar="[MODULE:BOX]")
@options
def command(config: Path | None, as_json: bool, box: str | None) -> None:
    """Examine the database, relays, lanes and consumers. Exits with 1 if there is a problem; warnings do not count.

    With MODULE:BOX, also what only your code knows: how long the inboxes of its consumers remember, and whether as many
    messages wait for a consumer as may.
    """
    settings = load_settings(config)
    loaded = None if box is None else load_box(box)
    checks = run(_examine(settings, loaded))
    if loaded is not None:
        checks += run(_retention(loaded))
    counts = {f"{state}s": sum(check.state is state for check in checks) for state in (State.WARNING, State.PROBLEM)}
    text = "\n".join(map(_described, checks))
    code = Exit.PROBLEM if counts["problems"] else Exit.FINE
    emit({"checks": [asdict(check) for check in checks], **counts}, text, as_json=as_json, code=code)


def _described(check: Check) -> str:
    line = f"{check.state:<8} {check.name}: {plain(check.found)}"
    return line if check.remedy is None else f"{line}\n{'':<8} {plain(check.remedy)}"


async def _examine(settings: Settings, box: Pillarbox | None) -> list[Check]:
    try:
        async with opened(settings) as engine, engine.connect() as connection:
            return await connection.run_sync(lambda it: list(_checks(it, settings, box)))
    except (CommandError, StoreError) as error:
        return [Check("database", State.PROBLEM, str(error))]


def _checks(connection: Connection, settings: Settings, box: Pillarbox | None) -> Iterator[Check]:
    yield Check("database", State.OK, f"{masked(connection.engine.url)} answers")
    yield _version(connection)
    yield from _durability(connection)
    yield from _encoding(connection)
    try:
        check_schema(connection)
    except NotMigratedError as error:
        yield Check("schema", State.PROBLEM, str(error))
        return
    yield Check("schema", State.OK, f"version {schema_version(connection)}")
    yield from _original(connection)
    yield from _shards(connection, settings)
    yield from _ids(connection)
    yield from _days(connection)
    relays, lanes = overview.live_relays(connection), overview.lane_states(connection)
    groups = inspection.statistics(connection)
    yield from _relays(relays, groups)
    yield from _lanes(connection, relays, lanes)
    yield from _pauses(connection, lanes)
    yield from _backlog(groups)
    yield from _failures(connection, groups)
    yield from _slots(connection)
    yield from _consumers(connection)
    yield from _claims(connection)
    if box is not None:
        yield from _room(connection, box)


def _original(connection: Connection) -> Iterator[Check]:
    if copy_check.is_copy(connection):
        what = "this database is a copy, from a dump or by replication, and relays refuse it"
        yield Check("origin", State.PROBLEM, what, "`pillarbox outbox rebase`")


def _version(connection: Connection) -> Check:
    product, version = server.product(connection)
    found = f"{product} {'.'.join(map(str, version))}"
    oldest = _OLDEST[product]
    if version < oldest:
        return Check("version", State.PROBLEM, found, f"upgrade to {product} {'.'.join(map(str, oldest))} or newer")
    return Check("version", State.OK, found)


def _durability(connection: Connection) -> Iterator[Check]:
    for name, value in server.variables(connection, _RISKY).items():
        if value in _RISKY[name]:
            remedy = f"a crash of the server may lose committed events: set {name} to its default"
            yield Check("durability", State.WARNING, f"{name} is {value}", remedy)
        else:
            yield Check("durability", State.OK, f"{name} is {value}")


def _encoding(connection: Connection) -> Iterator[Check]:
    for name, value in server.variables(connection, _ENCODINGS).items():
        wanted = _ENCODINGS[name]
        if value == wanted:
            yield Check("encoding", State.OK, value)
        else:
            remedy = f"keys, tenants and names need {wanted}: use a database, and a connection, with that encoding"
            yield Check("encoding", State.PROBLEM, f"{name} is {value}", remedy)


def _shards(connection: Connection, settings: Settings) -> Iterator[Check]:
    shards: int = connection.execute(select(meta.c.shards)).scalar_one()
    if settings.shards in (None, shards):
        yield Check("shards", State.OK, f"there are {shards}")
    else:
        what = f"shards (from {settings.origins()['shards']}) is {settings.shards}, and the database has {shards}"
        remedy = f"the first migration has fixed it, and the next one would refuse: say {shards}, or take it out"
        yield Check("shards", State.PROBLEM, what, remedy)


def _ids(connection: Connection) -> Iterator[Check]:
    """Within a key, ids must rise in the order of locks: nobody may draw ids in advance or out of another series."""
    if connection.dialect.name == "postgresql":
        for table in TABLES:
            cache = server.id_cache(connection, table)
            remedy = f"events of a key may change places: ALTER TABLE {table} ALTER COLUMN id SET CACHE 1"
            yield _expected("ids", f"the cache of the sequence of {table}.id", cache, State.PROBLEM, remedy)
    for name, value in server.variables(connection, ["auto_increment_increment"]).items():
        remedy = "several nodes draw ids, and events of a key may change places: let all writers use one node"
        yield _expected("ids", name, int(value), State.WARNING, remedy)


def _expected(check: str, what: str, value: int, otherwise: State, remedy: str) -> Check:
    if value == 1:
        return Check(check, State.OK, f"{what} is 1")
    return Check(check, otherwise, f"{what} is {value}, and should be 1", remedy)


def _days(connection: Connection) -> Iterator[Check]:
    """Daily partitions. Nothing is said where there are none."""
    found = partitions.layout(connection)
    if not found.partitioned:
        return
    for day in partitions.missing_days(connection, found, first=1, ahead=1):
        what = f"{day} has no partition, so its deliveries will be in the default one, and go row by row"
        remedy = "let `pillarbox outbox prune` run every day, and see what keeps it from making days"
        yield Check("days", State.WARNING, what, remedy)
        return
    yield Check("days", State.OK, f"there are partitions up to {found.parts[-1]}")


def _relays(relays: list[RelayState], groups: list[Group]) -> Iterator[Check]:
    for relay in relays:
        shards = "" if relay.shards is None else f", {number(len(relay.shards), 'shard')} only"
        yield Check("relays", State.OK, f"{relay.name} serves {', '.join(relay.routes) or 'nothing'}{shards}")
    if relays:
        return
    waiting = [it.route for it in groups if it.status in (Status.PENDING, Status.SENDING, Status.RETRYING)]
    if waiting:
        remedy = "start one: `pillarbox relay`, or `pillarbox relay MODULE:BOX` for handlers and transports in code"
        of_consumers = [(route or "").startswith("consumer:") for route in waiting]
        if all(of_consumers):
            remedy = "start the consumers, which relay to themselves: `pillarbox consume MODULE:BOX`"
        elif any(of_consumers):
            remedy += "; and the consumers: `pillarbox consume MODULE:BOX`"
        yield Check("relays", State.WARNING, "no relay is alive, and deliveries wait", remedy)
    else:
        yield Check("relays", State.OK, "no relay is alive, and nothing waits for one")


def _lanes(connection: Connection, relays: list[RelayState], lanes: list[LaneState]) -> Iterator[Check]:
    found = [*_unserved(connection, relays), *_expired(relays, lanes), *_troubled(lanes)]
    yield from found or [Check("lanes", State.OK, "no delivery waits for a relay, and no lane is in trouble")]


def _unserved(connection: Connection, relays: list[RelayState]) -> Iterator[Check]:
    for route in overview.unserved(connection):
        where = f"{number(route.lanes, 'lane')} that nobody serves"
        what = f"{number(route.waiting, 'delivery')} of route {route.route!r} wait in {where}"
        serving = ", ".join(relay.name for relay in relays if route.route in relay.routes)
        remedy = f"{serving} should take them" if serving else start_a_relay(route.destination, route.topic)
        yield Check("lanes", State.WARNING, what, remedy)


def _expired(relays: list[RelayState], lanes: list[LaneState]) -> Iterator[Check]:
    ended: dict[str, list[float]] = {}
    for lane in lanes:
        if lane.owner is not None and not lane.held:
            ended.setdefault(lane.owner, []).append(-(lane.lease_seconds or 0.0))
    remedy = "another relay takes them over" if relays else "start a relay: it takes them over"
    for owner, ages in ended.items():
        what = f"{owner} holds {number(len(ages), 'lane')}, and its lease has expired {age(min(ages))} ago"
        yield Check("lanes", State.WARNING, what, remedy)


def _troubled(lanes: list[LaneState]) -> Iterator[Check]:
    troubles = Counter(
        (lane.route, lane.trouble, lane.trouble_seconds is None) for lane in lanes if lane.held and lane.trouble
    )
    for (route, trouble, halted), count in troubles.items():
        what = f"{number(count, 'lane')} of route {route!r} cannot send: {trouble}"
        if halted:
            remedy = "remove the cause, then `pillarbox lanes release` them one by one"
            yield Check("lanes", State.PROBLEM, what, remedy)
        else:
            stands = any(words in (trouble or "") for words in (REJECTS_EVERYTHING, TIMES_IN_A_ROW))
            remedy = f"they try again by themselves; {remedy_for(trouble or '', 'the destination')}"
            yield Check("lanes", State.PROBLEM if stands else State.WARNING, what, remedy)


def _pauses(connection: Connection, lanes: list[LaneState]) -> Iterator[Check]:
    routes = Counter(lane.route for lane in lanes if lane.paused)
    states = overview.tenant_states(connection)
    tenants = [each.tenant for each in states if each.paused]
    for route, count in routes.items():
        what = f"{number(count, 'lane')} of route {route!r} paused"
        yield Check("pauses", State.WARNING, what, f"to let them go on: `pillarbox lanes resume {quote(route)}`")
    for tenant in tenants:
        remedy = f"to let it go on: `pillarbox lanes resume --tenant {quote(tenant)}`"
        yield Check("pauses", State.WARNING, f"tenant {tenant!r} paused", remedy)
    for tenant, rate in ((each.tenant, each.rate) for each in states if each.rate is not None):
        yield Check("pauses", State.OK, f"tenant {tenant!r} held to {rate:g} per second in each lane")
    if not routes and not tenants:
        yield Check("pauses", State.OK, "nothing is paused")


def _backlog(groups: list[Group]) -> Iterator[Check]:
    pending = [group for group in groups if group.status is Status.PENDING]
    for group in pending:
        what = f"{number(group.count, 'delivery')} of route {group.route!r} pending, the oldest for "
        what += age(group.oldest_age_seconds)
        if group.oldest_age_seconds < _LONG:
            yield Check("backlog", State.OK, what)
        else:
            yield Check("backlog", State.WARNING, what, "see what holds them back: `pillarbox lanes list`")
    if not pending:
        yield Check("backlog", State.OK, "no delivery is pending")


def _failures(connection: Connection, groups: list[Group]) -> Iterator[Check]:
    """Those of consumers are dead letters, and counted by consumer."""
    names = [consumer.name for consumer in registered(connection)]
    of_consumers = {f"{kind}:{name}" for kind in ("consumer", LOCAL) for name in names}
    failed = [it for it in groups if it.status in (Status.FAILED, Status.PARKED) and it.route not in of_consumers]
    for group in failed:
        state = State.PROBLEM if group.status is Status.FAILED else State.WARNING
        what = f"{number(group.count, 'delivery')} of route {group.route!r} {group.status}"
        remedy = f"see `pillarbox outbox list --status {group.status}`, and for each `pillarbox why EVENT_ID`"
        if group.status is Status.FAILED:
            remedy += "; then redrive, edit or discard them"
        yield Check("failures", state, what, remedy)
    dead_letters = count_dead_letters(connection)
    for consumer, count in dead_letters.items():
        remedy = f"see `pillarbox dlq list --consumer {quote(consumer)}`; then redrive, edit or discard them"
        yield Check("failures", State.WARNING, f"{number(count, 'dead letter')} of {consumer}", remedy)
    if not failed and not dead_letters:
        yield Check("failures", State.OK, "no delivery has failed")


def _slots(connection: Connection) -> Iterator[Check]:
    """Replication slots of relays. Nothing is said where there are none."""
    for slot in slot_states(connection):
        what = f"{slot.name} keeps {slot.lag:,} bytes of WAL"
        if slot.is_lost:
            remedy = "a relay that is given this slot makes it anew, and loses nothing; without one, drop it"
            yield Check("slots", State.WARNING, f"{slot.name} was invalidated by the server", remedy)
        elif not slot.read:
            remedy = f"start its relay, or the disk fills up: SELECT pg_drop_replication_slot('{slot.name}')"
            yield Check("slots", State.WARNING, f"{what}, and nobody reads it", remedy)
        elif slot.strains:
            remedy = "its relay does not keep up: see to its processor and network, and to max_slot_wal_keep_size"
            bound = "without a bound" if slot.budget is None else f"of {slot.budget:,} that it may keep"
            yield Check("slots", State.WARNING, f"{what}, {bound}", remedy)
        elif slot.budget is None and not slot.temporary:
            remedy = "set max_slot_wal_keep_size: a slot that the server gives up loses nothing, and a full disk does"
            yield Check("slots", State.WARNING, f"{what}, and nothing bounds that while its relay is away", remedy)
        elif slot.failover is False and not slot.temporary:
            remedy = "drop it while its relay is stopped: it is made anew, as one that a standby can take along"
            yield Check("slots", State.WARNING, f"{what}, and is lost at a failover", remedy)
        else:
            yield Check("slots", State.OK, what)


def _consumers(connection: Connection) -> Iterator[Check]:
    """Consumers that were ever registered, and what waits for each. Nothing is said where there are none."""
    now = inspection.database_time(connection)
    waiting: dict[str, dict[str | None, int]] = {}
    for it in claims.waiting(connection):
        waiting.setdefault(it.consumer, {})[it.tenant] = it.messages
    for consumer in registered(connection):
        waited = (now - (consumer.seen_at or consumer.updated_at)).total_seconds()
        tenants = waiting.get(consumer.name, {})
        if waited < _LONG:
            yield Check("consumers", State.OK, f"{consumer.name} was seen {age(max(0.0, waited))} ago")
        else:
            what = f"{consumer.name} was last seen {age(waited)} ago"
            if tenants:
                what += f", and {number(sum(tenants.values()), 'message')} that came in wait for it"
            start = start_a_relay(LOCAL if consumer.source == OUTBOX else INBOX_DESTINATION, consumer.name)
            remedy = f"{start}; or `pillarbox consumers forget {quote(consumer.name)}`"
            yield Check("consumers", State.WARNING, what, remedy)
        yield from _waiting(consumer.name, tenants)


def _waiting(consumer: str, tenants: Mapping[str | None, int]) -> Iterator[Check]:
    """Tenants of which a consumer has put aside very much."""
    for tenant, count in sorted(tenants.items(), key=lambda it: -it[1]):
        if count < _MANY:
            return
        of = "" if tenant is None else f" of tenant {tenant!r}"
        remedy = f"see `pillarbox dlq list --consumer {quote(consumer)}`, also with --state RETRYING, and its log"
        yield Check(
            "waiting", State.WARNING, f"{number(count, 'message')}{of} wait for {consumer} in its lanes", remedy
        )


def _claims(connection: Connection) -> Iterator[Check]:
    """Claims whose delivery is gone. Nothing is said if there are none."""
    for consumer, count in claims.without_delivery(connection).items():
        what = f"{number(count, 'claim')} of {consumer} without a delivery in pillarbox_inbound: somebody deleted rows"
        remedy = "later messages of these keys are put aside one by one: delete these rows of pillarbox_claims, too"
        yield Check("claims", State.PROBLEM, what, remedy)


def _room(connection: Connection, box: Pillarbox) -> Iterator[Check]:
    """Consumers that receive nothing more."""
    for name, consumer in box.consumers.items():
        most = consumer.terms.max_spilled
        if SqlInbox().count_claims(connection, consumer_id(name), most) >= most:
            what = f"{number(most, 'message')} wait for {name}, as many as may: it receives nothing more"
            remedy = f"see `pillarbox outbox list --inbound --route {quote(f'consumer:{name}')}` for what fails"
            yield Check("waiting", State.PROBLEM, what, remedy)


async def _retention(box: Pillarbox) -> list[Check]:
    """What only the code and the broker know. A source that cannot say how long it delivers again is passed over."""
    try:
        found = [await too_short(consumer, limited=False) for consumer in box.consumers.values()]
    except OSError as error:
        return [Check("retention", State.WARNING, f"the broker does not say how long it delivers again: {error}")]
    finally:
        for transport in box.transports.values():
            await transport.close()
    return [Check("retention", State.WARNING, each, TWICE) for each in found if each is not None]
