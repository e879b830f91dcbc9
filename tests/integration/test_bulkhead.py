"""The small form of ``make prove-bulkhead``."""

from __future__ import annotations

import dataclasses

import pytest

from pillarbox import RetryPolicy
from tests.conftest import FreshDatabase
from tests.prove import bulkhead

SEED = 7
QUICKLY = RetryPolicy(base=0.1, cap=1.0, attempts=12)
SMALL = {"away": 60, "plain-hangs": 10, "hangs": 10, "bug": 40, "one-key": 100, "poison": 200, "headers": 50}
SMALL |= {"hangs-on-one-key": 60, "plain-hangs-on-one-key": 60}
WINDOW = 25


@pytest.mark.parametrize(
    ("source", "name"),
    [(source, name) for name in SMALL for source in ("memory", "outbox") if source in bulkhead.SCENARIOS[name].only],
)
async def test_the_trouble_of_a_tenant_stays_that_tenants(
    fresh_database: FreshDatabase, source: str, name: str
) -> None:
    scenario = dataclasses.replace(
        bulkhead.SCENARIOS[name], events=SMALL[name], options={"retry": QUICKLY, "max_messages": WINDOW}
    )
    url = fresh_database("embedded", shards=4).url()
    _, world, _ = await bulkhead.run_world(url, source, scenario, troubled=True, seconds=1.0, seed=SEED)
    assert not world.wrong
