"""The verdict: the ledger against the topic, as the official client reads it, and how long each fault was felt."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import sqlalchemy as sa

from ...stores.dead_letters import count_dead_letters
from ..demo.ledger import Balance, Entry, compare
from ..demo.sink import Arrival
from ..demo.stage import percentile
from .faults import SERVERS, Fault
from .shop import TOPIC, ThingRow, counters, effects, ledger
from .writer import Ending, Written

FELT = 0.5
"""Seconds after its beginning within which a fault may still hold up what is committed."""


def read_topic(url: str) -> list[Arrival]:
    """All that is on the topic, in its order."""
    import pulsar  # noqa: PLC0415  only here: relays speak for themselves

    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        reader = client.create_reader(TOPIC, pulsar.MessageId.earliest)
        found = []
        while reader.has_message_available():
            each = reader.read_next(timeout_millis=30_000)
            number = str(msgspec.json.decode(each.data())["number"])
            event_id, sent = each.properties()["event_id"], each.publish_timestamp() / 1000
            found.append(Arrival(event_id, TOPIC, None, each.partition_key(), number, "", "", sent))
        return found
    finally:
        client.close()


def read_effects(connection: sa.Connection) -> dict[str, int]:
    """What is wrong with what consumers have made of the events."""
    noted = sa.select(effects.c.event_id, sa.func.count().label("times")).group_by(effects.c.event_id).subquery()
    both = ledger.outerjoin(noted, noted.c.event_id == ledger.c.event_id)
    ghosts = noted.outerjoin(ledger, noted.c.event_id == ledger.c.event_id)
    things = counters.outerjoin(ThingRow.__table__, ThingRow.key == counters.c.key)
    wrong = {
        "effects_missing": sa.select(sa.func.count()).select_from(both).where(noted.c.times.is_(None)),
        "effects_doubled": sa.select(sa.func.count()).select_from(noted).where(noted.c.times > 1),
        "effects_invented": sa.select(sa.func.count()).select_from(ghosts).where(ledger.c.event_id.is_(None)),
        "projection_differences": sa.select(sa.func.count())
        .select_from(things)
        .where(sa.func.coalesce(ThingRow.number, 0) != counters.c.number),
    }
    found = {name: connection.scalar(statement) or 0 for name, statement in wrong.items()}
    return found | {"dead_letters": sum(count_dead_letters(connection).values())}


class Verdict(msgspec.Struct):
    """What the ledger, the topic and the writers say."""

    balance: Balance
    altered: int
    """Events on the topic with another number than in the ledger."""
    forgotten: int
    """Events whose COMMIT was answered, and that the database does not have."""
    undead: int
    """Events that were rolled back, and that the database has."""
    unknown: dict[str, int]
    """What became of the events whose COMMIT was not answered."""

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return self.balance.holds and not (self.altered or self.forgotten or self.undead)


def judge(committed: Mapping[str, Entry], arrived: Sequence[Arrival], written: Sequence[Written]) -> Verdict:
    """Hold them against each other. No duplicate is excused."""
    said = {ending: {it for each in written if each.ending is ending for it in each.events} for ending in Ending}
    unknown = said[Ending.UNKNOWN]
    resolved = sum(it in committed for it in unknown)
    return Verdict(
        compare(committed, arrived, ()),
        altered=sum(it.event_id in committed and str(committed[it.event_id].version) != it.version for it in arrived),
        forgotten=sum(it not in committed for it in said[Ending.COMMITTED]),
        undead=sum(it in committed for it in said[Ending.ROLLED_BACK]),
        unknown={"committed": resolved, "rolled_back": len(unknown) - resolved},
    )


def recoveries(faults: Sequence[Fault], arrived: Sequence[Arrival], written: Sequence[Written]) -> dict[str, Any]:
    """For each kind, the seconds from a fault until all that was committed by then, or just after, had been sent.

    Faults overlap, so one is blamed for others that strike while it is felt; but what happens while a server is away is
    left out, as only that would show. ``measured`` are the others. ``after_its_end`` counts from when the fault was
    over, and the server was back.
    """
    sent = {arrival.event_id: arrival.at for arrival in arrived}
    each_sent = ((each.at, [sent[it] for it in each.events if it in sent]) for each in written)
    commits = sorted((at, max(found)) for at, found in each_sent if found)
    moments, latest = [at for at, _ in commits], list(accumulate((until for _, until in commits), max))

    def until(moment: float) -> float:
        """When all had been sent that was committed by then, or just after."""
        index = bisect_right(moments, moment + FELT)
        return max(moment, latest[index - 1]) if index else moment

    away = [(fault.at, until(fault.at)) for fault in faults if fault.kind in SERVERS]
    felt: defaultdict[str, list[float]] = defaultdict(list)
    healed: defaultdict[str, list[float]] = defaultdict(list)
    for fault in faults:
        over = max(until(fault.at), until(fault.ended))
        if fault.kind in SERVERS or not any(fault.at <= back and gone <= over for gone, back in away):
            felt[fault.kind.value].append(until(fault.at) - fault.at)
            healed[fault.kind.value].append(until(fault.ended) - fault.ended)
    return {
        kind: {"measured": len(times), **_parts(times), "after_its_end": _parts(healed[kind])}
        for kind, times in felt.items()
    }


def _parts(times: Sequence[float]) -> dict[str, float]:
    parts = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(percentile(times, part), 2) for name, part in parts.items()}


def figures(
    verdict: Verdict, faults: Sequence[Fault], arrived: Sequence[Arrival], written: Sequence[Written]
) -> dict[str, Any]:
    """The report, but for what only the run knows."""
    balance = verdict.balance
    return {
        "faults": len(faults),
        "faults_by_kind": dict(sorted(Counter(fault.kind.value for fault in faults).items())),
        "events": balance.committed,
        "on_topic": len(arrived),
        "lost": balance.lost,
        "ghosts": balance.ghosts,
        "duplicates": balance.duplicates,
        "inversions": balance.out_of_order,
        "altered": verdict.altered,
        "forgotten": verdict.forgotten,
        "undead": verdict.undead,
        "unknown": verdict.unknown,
        "transactions": dict(Counter(each.ending.value for each in written)),
        "recovery_seconds": dict(sorted(recoveries(faults, arrived, written).items())),
    }
