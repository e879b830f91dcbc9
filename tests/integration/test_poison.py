"""The small form of ``make prove-poison``, and proof that it would find a mistake."""

from __future__ import annotations

import math

import pytest

from pillarbox.rejections import Rejections
from tests.conftest import EACH_DATABASE, FreshDatabase
from tests.prove import poison

SEED = 7


@pytest.fixture(params=EACH_DATABASE)
def url(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> str:
    return fresh_database(request.param, empty=True).url()


@pytest.mark.parametrize(
    ("share", "lanes"), [(5, 16), (50, 1), *(pytest.param(*it, marks=pytest.mark.full) for it in ((5, 1), (50, 16)))]
)
async def test_h118_healthy_events_pass_a_share_that_is_rejected(url: str, share: int, lanes: int) -> None:
    found = await poison.prove_share(url, share=share, lanes=lanes, events=300, seed=SEED)
    assert found["wrong"] == []


async def test_h119_healthy_tenants_pass_one_whose_events_are_all_rejected(url: str) -> None:
    found = await poison.prove_tenants(url, keys=1_000, seconds=2.0, seed=SEED, slower=math.inf)
    assert found["wrong"] == []


@pytest.mark.parametrize("restart", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_h120_healthy_events_pass_one_that_shows_a_bug_of_the_transport(url: str, restart: bool) -> None:
    found = await poison.prove_bugs(url, restart=restart, seed=SEED)
    assert found["wrong"] == []


async def test_a_lane_that_stands_still_is_found(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptances that do not count leave a topic suspected for good."""
    monkeypatch.setattr(Rejections, "accepted", lambda *_: None)
    monkeypatch.setattr(poison, "SOON", 2.0)
    monkeypatch.setattr(poison, "PATIENCE", 2.0)
    assert (await poison.prove_share(url, share=50, lanes=1, events=300, seed=SEED))["wrong"]
