"""The write side: commands change plans. They answer with the version that the plan has now, and with nothing else;
who wants to see the plan asks the read side.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict

from pillarbox import Repository
from pillarbox.interceptors.optimistic_lock import OptimisticLock
from pillarbox.interceptors.soft_delete import SoftDelete

from .box import Id, Tenant, Text, Work
from .domain import RoutePlan

router = APIRouter(prefix="/plans")


class Plans:
    """The plans of the tenant who asks, in the transaction of the request."""

    def __init__(self, uow: Work, tenant: Tenant) -> None:
        self._repository = Repository(uow, RoutePlan, [OptimisticLock(), SoftDelete()])
        self._tenant = tenant

    async def get(self, plan_id: str) -> RoutePlan:
        return await self._repository.get_one((self._tenant, plan_id))

    async def save(self, plan: RoutePlan) -> Changed:
        await self._repository.save(plan)
        return Changed.model_validate(plan)

    async def remove(self, plan: RoutePlan) -> Changed:
        await self._repository.remove(plan)
        return await self.save(plan)


Ours = Annotated[Plans, Depends()]


class NewPlan(BaseModel):
    id: Id
    day: date
    depot: Text = "main"


class NewStop(BaseModel):
    address: Text


class Assignment(BaseModel):
    vehicle: Id


class Changed(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: str
    version: int


@router.post("", status_code=201)
async def draft(new: NewPlan, plans: Ours) -> Changed:
    return await plans.save(RoutePlan.draft(new.id, new.day, new.depot))


@router.post("/{plan_id}/stops")
async def add_stop(plan_id: Id, new: NewStop, plans: Ours) -> Changed:
    plan = await plans.get(plan_id)
    plan.add_stop(new.address)
    return await plans.save(plan)


@router.put("/{plan_id}/vehicle")
async def assign(plan_id: Id, new: Assignment, plans: Ours) -> Changed:
    plan = await plans.get(plan_id)
    plan.assign(new.vehicle)
    return await plans.save(plan)


@router.post("/{plan_id}/start")
async def start(plan_id: Id, plans: Ours) -> Changed:
    plan = await plans.get(plan_id)
    plan.start()
    return await plans.save(plan)


@router.post("/{plan_id}/complete")
async def complete(plan_id: Id, plans: Ours) -> Changed:
    plan = await plans.get(plan_id)
    plan.complete()
    return await plans.save(plan)


@router.post("/{plan_id}/cancel")
async def cancel(plan_id: Id, plans: Ours) -> Changed:
    plan = await plans.get(plan_id)
    plan.cancel()
    return await plans.save(plan)


@router.delete("/{plan_id}")
async def delete(plan_id: Id, plans: Ours) -> Changed:
    plan = await plans.get(plan_id)
    plan.delete()
    return await plans.remove(plan)
