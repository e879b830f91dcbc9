"""What a consumer tells."""

from __future__ import annotations

from pillarbox.consumers.handling import LeftOut
from pillarbox.consumers.report import ConsumerReport
from pillarbox.telemetry import SILENT


def test_the_lag_of_versions_is_over_when_no_gap_is_found_any_more() -> None:
    report = ConsumerReport("summary", SILENT)
    report.left_out(LeftOut(gaps=1, version_lag=12))
    assert report.version_lag == 12
    report.left_out(LeftOut())
    assert report.version_lag == 0
