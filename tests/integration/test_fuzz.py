"""The small form of ``make prove-fuzz``, and proof that it would find a mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.orm import Session

from pillarbox import collector as glue
from pillarbox.aggregate import recorded_by
from pillarbox.session import BoundSession
from tests.conftest import FreshDatabase
from tests.prove.fuzz import prove

RUNS = 300


@pytest.mark.parametrize("kind", [pytest.param("sqlite", marks=pytest.mark.elsewhere), "embedded"])
async def test_random_programs_leave_what_the_model_says(fresh_database: FreshDatabase, kind: str) -> None:
    assert await prove(fresh_database(kind).url(), range(RUNS)) == []


def _keep_after_rollback(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(glue.Collector, "rolled_back", lambda _self: None)


def _forget_what_was_raised_before_the_add(patch: pytest.MonkeyPatch) -> None:
    attach = glue.Collector.attach

    def forgetful(self: glue.Collector, aggregate: Any, *, new: bool) -> None:
        attach(self, aggregate, new=new)
        recorded_by(aggregate).before = ()

    patch.setattr(glue.Collector, "attach", forgetful)


def _keep_what_was_raised_after_the_add(patch: pytest.MonkeyPatch) -> None:
    write = glue.Collector._write

    def hoarding(self: glue.Collector) -> None:
        for aggregate in self._touched.values():
            recorded_by(aggregate).before += tuple(recorded_by(aggregate).events)
        write(self)

    patch.setattr(glue.Collector, "_write", hoarding)


def _never_touch_the_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(glue.Collector, "_prepare_row", lambda _self, _aggregate: None)


def _do_not_flush_for_events_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundSession, "_is_clean", Session._is_clean)


def _write_repetitions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(glue.Collector, "_without_repetitions", lambda _self, entries: entries)


def _write_in_any_order(patch: pytest.MonkeyPatch) -> None:
    keep = glue.Collector._without_repetitions
    patch.setattr(glue.Collector, "_without_repetitions", lambda self, entries: keep(self, entries)[::-1])


def _take_the_version_before_the_flush(patch: pytest.MonkeyPatch) -> None:
    origin = glue.Collector._origin
    patch.setattr(glue.Collector, "_origin", lambda self, entry: (*origin(self, entry)[:3], 1))


@pytest.mark.parametrize(
    "mistake",
    [
        _keep_after_rollback,
        _forget_what_was_raised_before_the_add,
        _keep_what_was_raised_after_the_add,
        _never_touch_the_row,
        _do_not_flush_for_events_alone,
        _write_repetitions,
        _write_in_any_order,
        _take_the_version_before_the_flush,
    ],
)
async def test_a_planted_mistake_is_found(
    fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mistake(monkeypatch)
    try:
        violations = await prove(fresh_database("sqlite").url(), range(60))
    except Exception as error:  # whatever it breaks
        violations = [repr(error)]
    assert violations
