"""The statements of every turn of a queue's lane, built once.

Two things make them fast. A status is written as a constant, so that the planner knows that the partial indexes of the
outbox hold all that is asked for; and a subquery that looks for one row orders and limits, so that it is always a probe
of an index and never a join, whatever the statistics say. Rows are read as the driver gives them: a conversion for each
column would cost more than everything else that a relay does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Select,
    and_,
    bindparam,
    case,
    column,
    false,
    func,
    literal_column,
    null,
    or_,
    select,
    table,
    text,
    union_all,
    update,
)

from ..outbox import FailurePolicy, Status
from .columns import from_now
from .tables import lanes, outbox, requests, routes

_ROUTE = bindparam("lane_route", type_=BigInteger)
_SHARD = bindparam("lane_shard", type_=Integer)
_LIMIT = bindparam("limit", type_=Integer)
_MAX_BYTES = bindparam("max_bytes", type_=BigInteger)

_PARKS = bindparam("parks", type_=Integer) == literal_column("1")

_ROW = ("id", "event_id", "topic", "key", "tenant", "headers", "body", "attempts")
_raw = table(outbox.name, *(column(name) for name in outbox.c.keys()))  # noqa: SIM118  not a dict
_OPEN = (Status.PENDING, Status.RETRYING, Status.PARKED)
_WAITING = (Status.RETRYING, Status.PARKED, Status.FAILED)


# -- conditions --------------------------------------------------------------------------------------------------------


def _is(rows: Any, *statuses: Status) -> ColumnElement[bool]:
    constants: list[ColumnElement[str]] = [literal_column(f"'{status}'") for status in statuses]
    found: ColumnElement[bool] = rows.c.status == constants[0] if len(statuses) == 1 else rows.c.status.in_(constants)
    return found


def _unsent(rows: Any) -> ColumnElement[bool]:
    """Says nothing that the status does not say; but SQLite uses a partial index only if its condition is repeated."""
    found: ColumnElement[bool] = rows.c.status != literal_column("'SENT'")
    return found


def _mine(rows: Any) -> ColumnElement[bool]:
    return and_(rows.c.route == _ROUTE, rows.c.shard == _SHARD, _unsent(rows))


def _due(rows: Any) -> ColumnElement[bool]:
    return and_(_is(rows, Status.RETRYING), rows.c.available_at <= from_now())


def _blocks(rows: Any, tenant: Any, parks: ColumnElement[bool] = _PARKS) -> ColumnElement[bool]:
    """This tenant's, and later rows of its key must not overtake it: a dead row holds its key up only where the route
    says so.

    The planner takes two equal tenants for a rarity, and would sort all rows of a key to find its first one. Of a CASE
    it thinks nothing, and reads them as they stand in the index.
    """
    blocks = or_(rows.c.status != literal_column("'FAILED'"), parks)
    return case((rows.c.tenant.is_not_distinct_from(tenant), blocks), else_=false())


def _is_head(rows: Any, parks: ColumnElement[bool] = _PARKS) -> ColumnElement[bool]:
    """Due, and nothing of its key is before it."""
    b = _raw.alias("b")
    before = and_(b.c.route == rows.c.route, b.c.shard == rows.c.shard, _unsent(b), b.c.id < rows.c.id)
    # The first one of a key is never PARKED, and there may be very many of these.
    waits = and_(_is(b, *_WAITING), _is(b, Status.RETRYING, Status.FAILED), b.c.key == rows.c.key)
    blocker = _first(b, before, waits, _blocks(b, rows.c.tenant, parks))
    return and_(_due(rows), blocker.correlate_except(b).scalar_subquery().is_(None))


def _first(rows: Any, *conditions: ColumnElement[bool]) -> Any:
    return select(rows.c.id).where(*conditions).order_by(rows.c.id).limit(literal_column("1"))


def _among(row_ids: ColumnElement[int], name: str = "ids") -> ColumnElement[bool]:
    """One of the ids of a parameter."""
    return row_ids.in_(bindparam(name, expanding=True))


UNSENT = _unsent(outbox)


# -- pages -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reads:
    """What a poll asks."""

    fresh: Any
    """Rows that were never tried, then a column that is 0; and ids of people's requests, where that is 1."""
    heads: Any
    """Rows that are due and the first of their key."""
    followers: Any
    """The waiting rows of a key behind a row of it, then their status and whether they are due."""


@cache
def reads(*, sending: bool, paused: bool) -> Reads:
    """The statements with or without rows that are on their way and paused tenants."""
    o = _raw.alias("o")
    here = _mine(o)
    if sending:
        here = and_(here, ~_among(o.c.id, "sending"))
    allowed = here
    if paused:
        names = bindparam("paused", expanding=True, type_=outbox.c.tenant.type)
        allowed = and_(allowed, or_(o.c.tenant.is_(None), o.c.tenant.not_in(names)))
    columns = [o.c[name] for name in _ROW]
    fresh = _page(o, columns, and_(allowed, _is(o, Status.PENDING)))
    feasible = and_(ASKED, ~_among(requests.c.row_id, "sending")) if sending else ASKED
    asked = select(requests.c.id).where(feasible).order_by(requests.c.id).limit(_LIMIT).subquery("asked")
    behind = and_(
        here,
        _is(o, *_WAITING),
        o.c.key == bindparam("key", type_=outbox.c.key.type),
        o.c.id > bindparam("after", type_=BigInteger),
        _blocks(o, bindparam("tenant", type_=outbox.c.tenant.type)),
    )
    both = union_all(
        fresh.add_columns(literal_column("0").label("is_request")),
        select(asked.c.id, *(null() for _ in _ROW[1:]), literal_column("1")),
    )
    return Reads(
        fresh=both,
        heads=_page(o, columns, and_(allowed, _is_head(o))),
        followers=_page(o, [*columns, o.c.status, _due(o).label("due")], behind),
    )


def _page(o: Any, columns: Sequence[Any], found: ColumnElement[bool]) -> Select[Any]:
    """Rows in the order of their ids, up to the one with which a limit is reached."""
    sizes = select(o.c.id, func.length(o.c.body).label("size")).where(found).order_by(o.c.id).limit(_LIMIT)
    page = sizes.subquery("page")
    sized = select(page, func.sum(page.c.size).over(order_by=page.c.id).label("total")).subquery("sized")
    fits: ColumnElement[bool] = sized.c.total - sized.c.size < _MAX_BYTES
    return select(*columns).select_from(o.join(sized, sized.c.id == o.c.id)).where(fits)


# -- people's requests, and what is to do at all -----------------------------------------------------------------------


ASKED = and_(requests.c.route == _ROUTE, requests.c.shard == _SHARD)
"""The requests of a lane. Those for rows that are on their way wait."""


def _ready() -> Select[Any]:
    o = _raw.alias("o")
    here = and_(o.c.route == lanes.c.route, o.c.shard == lanes.c.shard, _unsent(o))
    asked = select(requests.c.id).where(requests.c.route == lanes.c.route, requests.c.shard == lanes.c.shard)
    reasons = (
        _first(o, here, _is(o, Status.PENDING)),
        _first(o, here, _is_head(o, routes.c.on_failure == literal_column(f"'{FailurePolicy.PARK}'"))),
        asked.order_by(requests.c.id).limit(literal_column("1")),
    )
    something = [reason.correlate(lanes, routes).scalar_subquery().is_not(None) for reason in reasons]
    found = select(lanes.c.route, lanes.c.shard).join(routes, routes.c.id == lanes.c.route)
    return found.where(
        lanes.c.route.in_(bindparam("routes", expanding=True)),
        ~lanes.c.paused,
        or_(lanes.c.announced.is_not(None), *something),
    )


READY = _ready()
READY_HERE = READY.where(lanes.c.locked_by == bindparam("relay"), lanes.c.locked_until > from_now())


# -- batches -----------------------------------------------------------------------------------------------------------


def _named(rows: Any, columns: Sequence[Any], statuses: Iterable[Status]) -> Select[Any]:
    """The rows ``ids`` that have one of these statuses."""
    return select(*columns).where(_mine(rows), _is(rows, *statuses), _among(rows.c.id))


ITEMS = _named(_raw, [_raw.c[name] for name in _ROW], _OPEN)
"""The rows of a batch, by their ids."""

WAITED = _named(outbox, [outbox.c[name] for name in ("id", "tenant", "key")], (Status.RETRYING, Status.PARKED))
"""Those of the rows ``ids`` that wait for another try."""

BY_ID = (
    update(outbox)
    .with_hint("FORCE INDEX (PRIMARY)", dialect_name="mysql")
    .with_hint("FORCE INDEX (PRIMARY)", dialect_name="mariadb")
)
"""An update of rows that are named by their ids. InnoDB locks all rows that it looks at, and waits for those that
business transactions have just written: it must look at no others than it changes."""

# The number of an item is its place in the send order, so ids and numbers go in as pairs.
_MYSQL = text("""
    UPDATE JSON_TABLE(:pairs, '$[*]' COLUMNS (id BIGINT PATH '$[0]', number BIGINT PATH '$[1]')) t
    STRAIGHT_JOIN pillarbox_outbox o FORCE INDEX (PRIMARY) ON o.id = t.id
    SET o.status = 'SENT', o.sent_at = UTC_TIMESTAMP(6), o.available_at = NULL, o.batch = :lane_batch,
        o.number = t.number
    WHERE o.route = :lane_route AND o.shard = :lane_shard AND o.status IN ('PENDING', 'RETRYING', 'PARKED')
""")
_SQLITE = text("""
    UPDATE pillarbox_outbox
    SET status = 'SENT', sent_at = strftime('%Y-%m-%d %H:%M:%f', 'now'), available_at = NULL, batch = :lane_batch,
        number = json_extract(t.value, '$[1]')
    FROM json_each(:pairs) AS t
    WHERE pillarbox_outbox.id = json_extract(t.value, '$[0]')
      AND route = :lane_route AND shard = :lane_shard AND status IN ('PENDING', 'RETRYING', 'PARKED')
""")
SENT = {"mysql": _MYSQL, "mariadb": _MYSQL, "sqlite": _SQLITE}


# -- who is first ------------------------------------------------------------------------------------------------------


@cache
def firsts(dialect: str, *, gone: bool) -> Any:
    """For the keys of the rows ``ids``: the first row that later ones must not overtake, and whether it is PARKED. Rows
    that are about to be marked as sent are not counted.
    """
    t, w = outbox.alias("t"), outbox.alias("w")
    unsent = [status for status in Status if status is not Status.SENT]
    keys = _named(t, [t.c.tenant, t.c.key], unsent).distinct().subquery("k")
    same = and_(_mine(w), _is(w, *_WAITING), w.c.key == keys.c.key, _blocks(w, keys.c.tenant))
    if gone:
        same = and_(same, ~_among(w.c.id, "gone"))
    if dialect == "sqlite":  # an index of the waiting rows leads to the first one of each key
        first = _first(w, same).correlate(keys)
        return select(keys, first.scalar_subquery(), first.with_only_columns(_is(w, Status.PARKED)).scalar_subquery())
    first_id, first_parked = func.min(w.c.id), func.min(case((_is(w, Status.PARKED), w.c.id)))
    found = select(keys.c.tenant, keys.c.key, first_id, first_id == first_parked).outerjoin_from(keys, w, same)
    return found.group_by(keys.c.tenant, keys.c.key)
