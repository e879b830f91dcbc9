"""The small form of ``make prove-bulkhead``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from pillarbox import RetryPolicy
from tests.conftest import FreshDatabase
from tests.prove import bulkhead

SEED = 7
QUICKLY = RetryPolicy(base=0.1, cap=1.0, attempts=12)
SMALL = {"away": 60, "plain-hangs": 10, "hangs": 10, "bug": 40, "one-key": 100, "poison": 200, "headers": 50}
SMALL |= {"hangs-on-one-key": 60, "plain-hangs-on-one-key": 60}
WINDOW = 25
FROM_THE_OUTBOX = ("away", "one-key")
"""What `make test` proves for consumers of the outbox as well."""


def _cases() -> Iterator[Any]:
    for name in SMALL:
        yield "memory", name
        if "outbox" in bulkhead.SCENARIOS[name].only:
            yield pytest.param("outbox", name, marks=[] if name in FROM_THE_OUTBOX else pytest.mark.full)


@pytest.mark.parametrize(("source", "name"), [*_cases()])
async def test_the_trouble_of_a_tenant_stays_that_tenants(
    fresh_database: FreshDatabase, source: str, name: str
) -> None:
    scenario = dataclasses.replace(
        bulkhead.SCENARIOS[name], events=SMALL[name], options={"retry": QUICKLY, "max_messages": WINDOW}
    )
    url = fresh_database("embedded", shards=4).url()
    _, world, _ = await bulkhead.run_world(url, source, scenario, troubled=True, seconds=1.0, seed=SEED)
    assert not world.wrong
