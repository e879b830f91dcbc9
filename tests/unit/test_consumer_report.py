"""What a consumer tells."""

from __future__ import annotations

import asyncio

import pytest

from pillarbox.consumers.failure import Failure
from pillarbox.consumers.handling import LeftOut
from pillarbox.consumers.report import A_LINE_EVERY, ConsumerReport
from pillarbox.telemetry import SILENT
from pillarbox.transport import Message
from tests.relays import in_virtual_time


def test_the_lag_of_versions_is_over_when_no_gap_is_found_any_more() -> None:
    report = ConsumerReport("summary", SILENT)
    report.left_out(LeftOut(gaps=1, version_lag=12))
    assert report.version_lag == 12
    report.left_out(LeftOut())
    assert report.version_lag == 0


@in_virtual_time
async def test_a_kind_of_failure_has_a_line_a_minute_for_each_tenant(caplog: pytest.LogCaptureFixture) -> None:
    report = ConsumerReport("billing", SILENT)

    def fail(tenant: str, error: Exception, times: int = 1) -> None:
        message = Message("orders", "k", b"", {"tenant_id": tenant, "event_id": "e1"})
        for _ in range(times):
            report.failed(message, Failure.UNKNOWN, str(error), error)

    fail("acme", ValueError("one"), 1_000)
    fail("acme", KeyError("two"))
    fail("globex", ValueError("three"))
    await asyncio.sleep(A_LINE_EVERY)
    fail("acme", ValueError("four"), 10)
    assert [record.message.partition("unknown): ")[2] for record in caplog.records] == [
        "one",
        "'two'",
        "three",
        "four (and 999 more of the kind since the last line)",
    ]
    assert caplog.records[-1].__dict__["times"] == 1_000
    assert report.tally.failures == 1_012
