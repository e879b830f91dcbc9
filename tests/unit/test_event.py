"""Events: identity, names, versions, and what may be in them."""

from __future__ import annotations

from pillarbox import IntegrationEvent


class Listed(IntegrationEvent, name="tests.order.listed", version=1):
    names: list[str]
