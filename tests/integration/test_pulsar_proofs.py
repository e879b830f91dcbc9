"""The long proofs on Pulsar, in small."""

from __future__ import annotations

import pytest

from pillarbox.testing.link import Link
from pillarbox.testing.pulsar import PulsarCluster
from tests.prove import pulsar_million, pulsar_outage, pulsar_tenants
from tests.prove.pulsar_outage import Outage
from tests.servers import Database, Pulsar


async def test_events_through_kills_of_relays_and_broker(
    postgres_database: Database, pulsar_cluster: PulsarCluster
) -> None:
    sizes = {"events": 5_000, "relay_kills": 2, "broker_kills": 1, "seed": 7}
    result = await pulsar_million.prove(postgres_database.url(), pulsar_cluster, **sizes)
    assert pulsar_million.holds(result), result
    assert (result["on_topic"], result["relay_kills"], result["broker_kills"]) == (5_000, 2, 1)


@pytest.mark.full
async def test_a_broker_that_is_cut_off_costs_no_event_and_no_attempt(
    postgres_database: Database, pulsar: Pulsar
) -> None:
    """Latencies are left to the long form: a second on a busy machine says nothing about them."""
    outages = {"cut": Outage(Link.cut, 1.0, rounds=1, slices=1), "swallow": Outage(Link.swallow, 1.0, 1, 1)}
    result = await pulsar_outage.prove(
        postgres_database.url(), pulsar.url, pulsar.admin_url, outages=outages, rate=50.0, seed=7
    )
    assert not [found for found in pulsar_outage.violations(result, outages) if "business" not in found], result
    assert result["on_topic"] == result["events"] > 0


@pytest.mark.full
async def test_tenants_with_topics_of_their_own(postgres_database: Database, pulsar: Pulsar) -> None:
    result = await pulsar_tenants.prove(postgres_database.url(), pulsar.url, pulsar.admin_url, tenants=20, seed=7)
    assert pulsar_tenants.holds(result), result
    assert result["tenants"] == 21
