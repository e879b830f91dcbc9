"""The box: the database, the broker, and a topic per tenant."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, HTTPException
from pydantic import Field

from pillarbox import Pillarbox, Route, UnitOfWork, current_context
from pillarbox.fastapi import unit_of_work
from pillarbox.transport import Transport
from pillarbox.transports.memory import MemoryTransport

if TYPE_CHECKING:
    from pillarbox.caches.redis import RedisCache

PLANS = "route-plans.{tenant}"
NOTIFICATIONS = "notifications.{tenant}"


def _broker() -> Transport:
    """Pulsar if its address is given; else one in memory, which forgets with the process."""
    if url := os.environ.get("PULSAR_URL"):
        from pillarbox.transports.pulsar import PulsarTransport  # noqa: PLC0415  an extra, for those who use it

        return PulsarTransport(url)
    return MemoryTransport()


def _cache() -> RedisCache | None:
    """Redis if its address is given."""
    if url := os.environ.get("REDIS_URL"):
        from pillarbox.caches.redis import RedisCache  # noqa: PLC0415  an extra, too

        return RedisCache(url, prefix="route-plans:")
    return None


broker = _broker()
cache = _cache()
box = Pillarbox(
    os.environ.get("DATABASE_URL"),  # without one: an embedded PostgreSQL
    transports={"broker": broker},
    routes=[
        Route("routing.plan.*", to="broker", topic=PLANS),
        Route("routing.driver.*", to="broker", topic=NOTIFICATIONS),
    ],
    tenancy="required",
)


# -- what endpoints ask for --------------------------------------------------------------------------------------------


async def _tenant() -> str:
    tenant = current_context().tenant  # TenantMiddleware has put it there
    if tenant is None:
        raise HTTPException(400, "the tenant is missing")
    return tenant


Tenant = Annotated[str, Depends(_tenant)]
Work = Annotated[UnitOfWork, unit_of_work(box)]

# What the database cannot keep is refused here, as a 422.
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,50}$")]
Text = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00]*$")]
