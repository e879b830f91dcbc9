"""The read side: a row per plan that events write, and the queries that read it. It never looks into the tables of the
write side, and could live in a database and a service of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import date
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from pillarbox import Change, Projection, ProjectionRow, TenantScoped, on
from pillarbox.projections.read import ReadDao

from .box import PLANS, Id, Tenant, box, cache
from .domain import (
    Base,
    PlanCancelled,
    PlanCompleted,
    PlanDeleted,
    PlanDrafted,
    PlanStarted,
    Status,
    StopAdded,
    VehicleAssigned,
)


class PlanSummary(TenantScoped, ProjectionRow, Base):
    """What the overview shows of a plan. Its primary key is the tenant and the plan's id."""

    __tablename__ = "plan_summaries"
    __table_args__ = (Index("ix_plan_summaries_day", "tenant_id", "day", "plan_id"),)

    plan_id: Mapped[str] = mapped_column(String(50), primary_key=True)
    day: Mapped[date]
    depot: Mapped[str] = mapped_column(String(100))
    status: Mapped[Status] = mapped_column(String(20), default=Status.DRAFTED)
    stops: Mapped[int] = mapped_column(default=0)
    vehicle: Mapped[str | None] = mapped_column(String(100))


class PlanSummaries(Projection, row=PlanSummary):
    """What each event changes. An event that comes again, or too late, changes nothing."""

    @on(PlanDrafted)
    def drafted(self, event: PlanDrafted) -> Change:
        return self.put(plan_id=event.plan_id, day=event.day, depot=event.depot)

    @on(StopAdded)
    def stop_added(self, event: StopAdded) -> Change:
        return self.put(plan_id=event.plan_id, stops=event.stops)

    @on(VehicleAssigned)
    def assigned(self, event: VehicleAssigned) -> Change:
        return self.put(plan_id=event.plan_id, vehicle=event.vehicle)

    @on(PlanStarted)
    def started(self, event: PlanStarted) -> Change:
        return self.put(plan_id=event.plan_id, status=Status.STARTED)

    @on(PlanCompleted)
    def completed(self, event: PlanCompleted) -> Change:
        return self.put(plan_id=event.plan_id, status=Status.COMPLETED)

    @on(PlanCancelled)
    def cancelled(self, event: PlanCancelled) -> Change:
        return self.put(plan_id=event.plan_id, status=Status.CANCELLED)

    @on(PlanDeleted)
    def deleted(self, event: PlanDeleted) -> Change:
        return self.remove(plan_id=event.plan_id)


box.projection(PlanSummaries, source="broker", topics=[PLANS], cache=cache)


# -- queries -----------------------------------------------------------------------------------------------------------

summaries = ReadDao(box, PlanSummary, cache=cache)
router = APIRouter(prefix="/plans")

LOOKS, PAUSE = 20, 0.1
"""How often, and after how many seconds each, we look whether the read model has come far enough."""


class PlanView(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: str = Field(validation_alias="plan_id")
    day: date
    depot: str
    status: Status
    stops: int
    vehicle: str | None
    version: int = Field(validation_alias="projected_version")


class PageView(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    items: Sequence[PlanView]
    next: str | None
    """What to give as ``after`` for the next page."""


@router.get("/{plan_id}")
async def show(plan_id: Id, tenant: Tenant, at_least: int = 0) -> PlanView:
    """``at_least`` is the version that a command has answered with: we wait a moment until the read model has it."""
    key = (tenant, plan_id)
    found = await summaries.get(key)
    for _ in range(LOOKS if at_least else 0):
        if found is not None and found.projected_version >= at_least:
            break
        await asyncio.sleep(PAUSE)
        found = await summaries.get(key)
    if found is None:
        raise HTTPException(404, "there is no such plan")
    if found.projected_version < at_least:
        raise HTTPException(503, f"version {at_least} is not here yet: ask again", {"retry-after": "1"})
    return PlanView.model_validate(found)


@router.get("")
async def find(
    status: Status | None = None,
    vehicle: Id | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> PageView:
    where = []
    if status is not None:
        where.append(PlanSummary.status == status)
    if vehicle is not None:
        where.append(PlanSummary.vehicle == vehicle)
    page = await summaries.page(where=where, order_by=[PlanSummary.day], limit=limit, after=after)
    return PageView.model_validate(page)
