"""Leases of lanes on PostgreSQL, MariaDB/MySQL and SQLite: one row per lane, one row per live relay.

A lease is a time on the database's clock. Taking a lane raises its epoch and draws a new token. Every later write of
its owner compares both, so an owner that slept through its lease changes nothing when it wakes up.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import msgspec
from msgspec.structs import replace
from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Connection,
    Integer,
    Text,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.exc import DBAPIError

from .. import clock
from ..cursor import Cursor
from ..errors import LeaseLostError, StoreError
from ..outbox import INBOUND, Announcement, Census, FailurePolicy, Key, Lane, LaneName, Shards, Status, Trouble
from ..redaction import redacted
from .announced import decode_detours
from .append import route_record
from .columns import from_now
from .failures import WAITING, Failures
from .tables import failures, lanes, meta, relays, requests, routes, tenants
from .turns import HUNG_SECONDS, Turns

logger = logging.getLogger("pillarbox")

_FORGET_AFTER_SECONDS = 3600.0
"""How long a dead relay stays in the table, for operators."""
_FEW = 4
_AGAIN_SECONDS = 0.02
_RELEASE_SECONDS = 0.5


class Leases(Turns):
    """`LaneStore` on a relational database."""

    failures: type[Failures]
    """The store's class of the failure book."""
    table: str
    """Table of the lanes' deliveries."""

    async def census(self) -> Census:
        return await self.ask_apart(_census)

    async def take(
        self, relay: str, *, lease: float, wanted: Mapping[int, int], shards: Shards | None = None
    ) -> list[Lane]:
        taken = await self.change_apart(self._take, relay, lease, wanted, shards)
        unready: list[Lane] = []
        for lane in taken:
            if lane.route.on_failure is FailurePolicy.SKIP and (lane.waiting or self.table == INBOUND):
                try:
                    await self.transaction(self._unpark_skipped, lane)
                except Exception as error:
                    logger.warning("lane %s cannot be made ready, and is left: %s", lane, redacted(str(error)))
                    unready.append(lane)
        if unready:
            with suppress(Exception):  # if it fails, their leases expire
                await self.release(relay, unready)
        return [lane for lane in taken if lane not in unready]

    def _take(
        self,
        connection: Connection,
        relay: str,
        lease: float,
        wanted: Mapping[int, int],
        shards: Shards | None,
    ) -> list[Lane]:
        lanes = _take(connection, relay, lease, wanted, shards)
        return _with_waiting_keys(connection, lanes) if lanes else []

    def _unpark_skipped(self, connection: Connection, lane: Lane) -> None:
        confirm(connection, lane)
        self.book(connection, lane).unpark_skipped()

    def book(self, connection: Connection, lane: Lane) -> Failures:
        """The failure book of one lane, in one transaction."""
        return self.failures(connection, lane, self.table)

    async def renew(
        self,
        relay: str,
        lanes: Sequence[Lane],
        *,
        lease: float,
        serves: Collection[int],
        shards: Collection[int] | None = None,
        troubles: Mapping[LaneName, Trouble] | None = None,
    ) -> dict[LaneName, bool]:
        self.keep()
        alive = {"expires_at": from_now(lease), "serves": _listed(serves), "shards": _listed(shards)}
        renew = partial(_renew, relay=relay, alive=alive, troubles=troubles or {})
        return await self._change_lanes(renew, lanes, min(lease / 5, HUNG_SECONDS / 2))

    async def release(self, relay: str, lanes: Sequence[Lane], *, leaving: bool = False) -> None:
        try:
            done = await self._change_lanes(partial(_release, relay=relay, leaving=leaving), lanes, _RELEASE_SECONDS)
            if locked := [str(lane) for lane in lanes if done.get(lane.name) is False]:
                raise StoreError(f"somebody else has locked {', '.join(locked)}")
        finally:
            if leaving:
                await self.let_go()

    async def asked(self, lane: Lane, rows: Collection[int]) -> frozenset[int]:
        return await self.autocommit(_asked, lane, sorted(rows))

    async def _change_lanes(
        self, change: Callable[..., dict[LaneName, bool]], held: Sequence[Lane], seconds: float
    ) -> dict[LaneName, bool]:
        """Change the rows of lanes. Unlocked rows come first, because another transaction may hold a lock for long, and
        waiting for it would cost the other leases. Locked rows are then waited for, a few at a time, for ``seconds`` in
        all. A row that this relay is writing is free as soon as that write has committed.
        """
        done = await self.change_apart(change, held)
        busy = [lane for lane in held if done.get(lane.name) is False]
        until = clock.current().monotonic() + seconds
        for first in range(0, len(busy), _FEW):
            few = busy[first : first + _FEW]
            found = await self._wait_for(few, change, until)
            # A missing name means that the lane has another owner.
            done = {name: it for name, it in done.items() if name not in {lane.name for lane in few}} | found
        return done

    async def _wait_for(
        self, few: Sequence[Lane], change: Callable[..., dict[LaneName, bool]], until: float
    ) -> dict[LaneName, bool]:
        """Change lanes that were locked, or give up. When no time is left, try once more without waiting."""
        left = until - clock.current().monotonic()
        whole_seconds = self._engine.dialect.name in ("mysql", "mariadb")
        if left >= (1.0 if whole_seconds else 0.001):
            try:
                return await self.change_apart(partial(change, wait=left), few)
            except DBAPIError as error:
                if error.connection_invalidated:
                    raise
        found = await self.change_apart(partial(change, wait=0.0), few)
        while whole_seconds and not all(found.values()) and clock.current().monotonic() < until:
            await asyncio.sleep(_AGAIN_SECONDS)
            found = await self.change_apart(partial(change, wait=0.0), few)
        return found


def fenced(connection: Connection, lane: Lane, **values: Any) -> None:
    """The first write of every step: it fails if the lane has another owner, and the rest does not happen."""
    changed = connection.execute(
        update(lanes)
        .where(
            lanes.c.route == lane.route.id,
            lanes.c.shard == lane.shard,
            lanes.c.epoch == lane.epoch,
            lanes.c.token == lane.token,
            lanes.c.batch == lane.batch,
            # After a failover, the database may lack the last settlement.
            lanes.c.announced.is_not_distinct_from(stored(lane.announced)["announced"]),
        )
        .values(**values)
    )
    if changed.rowcount != 1:
        raise lease_lost(lane)


def confirm(connection: Connection, lane: Lane) -> None:
    """Change nothing, but fail if the lane has another owner."""
    fenced(connection, lane, batch=lane.batch)


def lease_lost(lane: Lane) -> LeaseLostError:
    """The error of a fenced write that finds another owner."""
    return LeaseLostError(f"lane {lane} has another owner than epoch {lane.epoch}, batch {lane.batch}")


def stored(announced: Announcement | None) -> dict[str, Any]:
    """An announcement in the form of the lane's row. The ids of its rows are only for operators' views."""
    if announced is None:
        return {"announced": None, "announced_low": None, "announced_high": None}
    rows = [row for row in announced.items if row]
    return {
        "announced": msgspec.json.encode(announced).decode(),
        "announced_low": min(rows, default=None),
        "announced_high": max(rows, default=None),
    }


# -- the census --------------------------------------------------------------------------------------------------------


def _census(connection: Connection) -> Census:
    known = connection.execute(_ROUTES).all()
    living = connection.execute(_LIVING).all()
    slowed = connection.execute(_SLOWED_LANES).all()
    held = connection.execute(_SLOWED_TENANTS).all()
    install, shard_count, now, next_expiry = connection.execute(_NEXT_EXPIRY).one()
    return Census(
        routes={row.id: route_record(row._mapping) for row in known},
        relays={name: frozenset(msgspec.json.decode(serves)) for name, serves, _ in living},
        shards={name: frozenset(msgspec.json.decode(shards)) for name, _, shards in living if shards is not None},
        shard_count=shard_count,
        paused=frozenset(LaneName(row.route, row.shard) for row in slowed if row.paused),
        paused_tenants=frozenset(row.tenant for row in held if row.paused),
        lane_rates={LaneName(row.route, row.shard): row.rate for row in slowed if _is_rate(row.rate)},
        tenant_rates={row.tenant: row.rate for row in held if _is_rate(row.rate)},
        install=str(install),
        next_expiry=None if next_expiry is None else max(0.0, (next_expiry - now).total_seconds()),
    )


_ROUTES = select(routes).order_by(routes.c.id)
_LIVING = (
    select(relays.c.name, relays.c.serves, relays.c.shards)
    .where(relays.c.expires_at > from_now())
    .order_by(relays.c.name)
)
_SLOWED_LANES = select(lanes.c.route, lanes.c.shard, lanes.c.paused, lanes.c.rate).where(
    or_(lanes.c.paused, lanes.c.rate.is_not(None))
)
_SLOWED_TENANTS = select(tenants).where(or_(tenants.c.paused, tenants.c.rate.is_not(None)))
_NEXT_EXPIRY = select(
    meta.c.install_id,
    meta.c.shards,
    from_now(),
    select(func.min(lanes.c.locked_until)).where(lanes.c.locked_until > from_now()).scalar_subquery(),
)


# -- taking ------------------------------------------------------------------------------------------------------------


def _take(
    connection: Connection, relay: str, lease: float, wanted: Mapping[int, int], shards: Shards | None
) -> list[Lane]:
    only = shards or {}
    found = [
        LaneName(*row)
        for route, count in sorted(wanted.items())
        if count > 0
        for row in connection.execute(
            _FREE.where(lanes.c.shard.in_(sorted(only[route]))) if route in only else _FREE,
            {"route": route, "count": count},
        )
    ]
    if not found:
        return []
    # A clean release clears the owner: only a lost owner counts against its batch.
    lost = and_(lanes.c.announced.is_not(None), lanes.c.locked_by.is_not(None))
    connection.execute(
        update(lanes)
        .where(among(lanes, found))
        .ordered_values(  # MySQL assigns from left to right: tries must read the old owner
            (lanes.c.tries, lanes.c.tries + case((lost, 1), else_=0)),
            (lanes.c.epoch, lanes.c.epoch + 1),
            (lanes.c.token, uuid4()),
            (lanes.c.locked_by, relay),
            (lanes.c.locked_until, from_now(lease)),
        )
    )
    taken = connection.execute(
        select(lanes, routes)
        .join(routes, routes.c.id == lanes.c.route)
        .where(among(lanes, found))
        .order_by(lanes.c.route, lanes.c.shard)
    )
    return [lane_of(row._mapping) for row in taken]


_FREE = (
    select(lanes.c.route, lanes.c.shard)
    .where(
        lanes.c.route == bindparam("route", type_=BigInteger),
        ~lanes.c.paused,
        or_(lanes.c.locked_until.is_(None), lanes.c.locked_until <= from_now()),
    )
    .order_by(lanes.c.shard)
    .limit(bindparam("count", type_=Integer))
    .with_for_update(skip_locked=True)
)


def lane_of(row: Mapping[Any, Any]) -> Lane:
    """The lane from its row, joined with its route, without the waiting keys."""
    announced = row[lanes.c.announced]
    return Lane(
        route=route_record(row),
        shard=row[lanes.c.shard],
        epoch=row[lanes.c.epoch],
        token=row[lanes.c.token] or UUID(int=0),
        batch=row[lanes.c.batch],
        next_number=row[lanes.c.next_number],
        announced=None if announced is None else msgspec.json.decode(announced, type=Announcement),
        tries=row[lanes.c.tries],
        waiting=frozenset(),
        cursor=None if row[lanes.c.cursor] is None else Cursor.parse(row[lanes.c.cursor]),
        detours=None if row[lanes.c.cursor] is None else decode_detours(row[lanes.c.detours]),
    )


def _with_waiting_keys(connection: Connection, taken: Sequence[Lane]) -> list[Lane]:
    """The lanes with the keys that have a failed or parked delivery. From here on, the owner maintains them."""
    skipping = [lane.route.id for lane in taken if lane.route.on_failure is FailurePolicy.SKIP]
    is_dead = and_(failures.c.status == Status.FAILED, failures.c.route.in_(skipping))
    here = (among(failures, [lane.name for lane in taken]), failures.c.status.in_(WAITING), ~is_dead)
    of = (failures.c.route, failures.c.shard, failures.c.tenant)
    waiting: dict[LaneName, list[Key]] = {}
    if connection.dialect.name == "postgresql":
        # A row per key would be more work for the garbage collector than the rest of a take-over.
        keys = func.array_agg(failures.c.key.distinct(), type_=ARRAY(Text))
        for route, shard, tenant, found in connection.execute(select(*of, keys).where(*here).group_by(*of)):
            waiting.setdefault(LaneName(route, shard), []).extend([Key(tenant, key) for key in found])
    else:
        for route, shard, tenant, key in connection.execute(select(*of, failures.c.key).where(*here).distinct()):
            waiting.setdefault(LaneName(route, shard), []).append(Key(tenant, key))
    return [replace(lane, waiting=frozenset(waiting.get(lane.name, ()))) for lane in taken]


def among(table: Any, names: Iterable[LaneName]) -> ColumnElement[bool]:
    shards: dict[int, list[int]] = {}
    for route, shard in names:
        shards.setdefault(route, []).append(shard)
    return or_(*(and_(table.c.route == route, table.c.shard.in_(found)) for route, found in shards.items()))


# -- renewal and release -----------------------------------------------------------------------------------------------


def _stay_alive(connection: Connection, relay: str, alive: Mapping[str, Any]) -> None:
    if not connection.execute(update(relays).where(relays.c.name == relay).values(alive)).rowcount:
        connection.execute(insert(relays).values(name=relay, **alive))
        _forget_the_dead(connection)


def _renew(
    connection: Connection,
    held: Sequence[Lane],
    *,
    relay: str,
    alive: Mapping[str, Any],
    troubles: Mapping[LaneName, Trouble],
    wait: float | None = None,
) -> dict[LaneName, bool]:
    if wait is None:
        _stay_alive(connection, relay, alive)
    if not held:
        return {}
    ours = and_(lanes.c.locked_by == relay, _fence(held))
    free = _locked(connection, ours, wait)
    if free:
        connection.execute(update(lanes).where(among(lanes, free)).values(locked_until=alive["expires_at"]))
    _record_troubles(connection, free, troubles)
    return _outcome(connection, ours, held, free)


def _locked(connection: Connection, ours: ColumnElement[bool], wait: float | None) -> dict[LaneName, str | None]:
    """Lock the rows of these lanes: all, or only unlocked ones. Returns the locked lanes with their troubles."""
    found = select(lanes.c.route, lanes.c.shard, lanes.c.trouble).where(ours).with_for_update(skip_locked=not wait)
    with _waiting(connection, wait or 0.0):
        return {LaneName(route, shard): trouble for route, shard, trouble in connection.execute(found)}


@contextmanager
def _waiting(connection: Connection, seconds: float) -> Iterator[None]:
    """Limit the wait for locks on the server: a statement that the client gives up would continue to wait."""
    dialect = connection.dialect.name if seconds else None
    if dialect == "postgresql":  # for all rows together, unlike `lock_timeout`
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {round(1000 * seconds)}")
    if dialect not in ("mysql", "mariadb"):
        yield
        return
    connection.exec_driver_sql(f"SET innodb_lock_wait_timeout = {int(seconds)}")
    try:
        yield
    finally:
        connection.exec_driver_sql("SET innodb_lock_wait_timeout = DEFAULT")


def _outcome(
    connection: Connection, ours: ColumnElement[bool], held: Sequence[Lane], changed: Collection[LaneName]
) -> dict[LaneName, bool]:
    """The lanes that are still owned, each with whether it was changed. A missing lane has another owner."""
    done = dict.fromkeys(changed, True)
    if len(done) == len(held):
        return done
    rest = connection.execute(select(lanes.c.route, lanes.c.shard).where(ours)).all()
    return {LaneName(*row): False for row in rest} | done


def _record_troubles(
    connection: Connection, known: Mapping[LaneName, str | None], troubles: Mapping[LaneName, Trouble]
) -> None:
    over = [name for name, trouble in known.items() if trouble is not None and name not in troubles]
    if over:
        connection.execute(update(lanes).where(among(lanes, over)).values(trouble=None, trouble_until=None))
    for name, trouble in troubles.items():
        if name in known:
            until = None if trouble.seconds is None else from_now(trouble.seconds)
            connection.execute(
                update(lanes).where(among(lanes, [name])).values(trouble=trouble.reason, trouble_until=until)
            )


def _release(
    connection: Connection, held: Sequence[Lane], *, relay: str, leaving: bool, wait: float | None = None
) -> dict[LaneName, bool]:
    if leaving and wait is None:
        connection.execute(delete(relays).where(relays.c.name == relay))
        _forget_the_dead(connection)
    if not held:
        return {}
    ours = _fence(held)
    free = _locked(connection, ours, wait)
    if free:
        connection.execute(
            update(lanes)
            .where(among(lanes, free))
            .values(token=None, locked_by=None, locked_until=None, trouble=None, trouble_until=None)
        )
    done = _outcome(connection, ours, held, free)
    for lane in held:
        if lane.announced is not None and lane.name not in done:
            _take_back_try(connection, lane)
    return done


def _take_back_try(connection: Connection, lane: Lane) -> None:
    """Take back the try that the next owner counted: the previous owner was not dead, but slow."""
    same = and_(among(lanes, [lane.name]), lanes.c.batch == lane.batch, lanes.c.tries > 0)
    if connection.execute(select(lanes.c.tries).where(same).with_for_update(skip_locked=True)).first() is not None:
        connection.execute(update(lanes).where(same).values(tries=lanes.c.tries - 1))


def _asked(connection: Connection, lane: Lane, rows: Sequence[int]) -> frozenset[int]:
    here = and_(requests.c.route == lane.route.id, requests.c.shard == lane.shard, requests.c.row_id.in_(rows))
    return frozenset(connection.scalars(select(requests.c.row_id).where(here)))


def _fence(held: Sequence[Lane]) -> ColumnElement[bool]:
    return tuple_(lanes.c.route, lanes.c.shard, lanes.c.epoch, lanes.c.token).in_(
        [(lane.route.id, lane.shard, lane.epoch, lane.token) for lane in held]
    )


def _forget_the_dead(connection: Connection) -> None:
    """Delete dead relays by name: MySQL would otherwise lock every row that it reads, including those of new relays."""
    is_dead = relays.c.expires_at < from_now(-_FORGET_AFTER_SECONDS)
    if dead := connection.scalars(select(relays.c.name).where(is_dead)).all():
        connection.execute(delete(relays).where(relays.c.name.in_(dead), is_dead))


def _listed(numbers: Collection[int] | None) -> str | None:
    return None if numbers is None else msgspec.json.encode(sorted(numbers)).decode()


def _is_rate(rate: float | None) -> bool:
    """Whether the rate is usable. Commands of Pillarbox write no others."""
    return rate is not None and math.isfinite(rate) and rate > 0
