"""Route plans, and what happens to them. Nothing here knows of HTTP, brokers or read models."""

from __future__ import annotations

from datetime import date
from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Aggregate, IntegrationEvent, TenantScoped, upcaster
from pillarbox.interceptors.soft_delete import SoftDeletable


class PlanDrafted(IntegrationEvent, name="routing.plan.drafted", version=2):
    """Version 1 knew of one depot only, and did not say so."""

    plan_id: str
    day: date
    depot: str


@upcaster("routing.plan.drafted", from_version=1)
def _main_depot(payload: dict[str, Any]) -> dict[str, Any]:
    return {**payload, "depot": "main"}


class StopAdded(IntegrationEvent, name="routing.plan.stop-added", version=1):
    """Says how many stops there are now, so that nobody needs to count events."""

    plan_id: str
    address: str
    stops: int


class VehicleAssigned(IntegrationEvent, name="routing.plan.vehicle-assigned", version=1):
    plan_id: str
    vehicle: str


class PlanStarted(IntegrationEvent, name="routing.plan.started", version=1):
    plan_id: str
    vehicle: str
    stops: int


class PlanCompleted(IntegrationEvent, name="routing.plan.completed", version=1):
    plan_id: str


class PlanCancelled(IntegrationEvent, name="routing.plan.cancelled", version=1):
    plan_id: str


class PlanDeleted(IntegrationEvent, name="routing.plan.deleted", version=1):
    plan_id: str


class PlanError(Exception):
    """The plan does not allow it."""


class Status(StrEnum):
    DRAFTED = "drafted"
    STARTED = "started"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


class Base(DeclarativeBase):
    pass


class RoutePlan(Aggregate, TenantScoped, SoftDeletable, Base):
    """Changes by its own methods only, and each of them raises an event.

    Tenants choose the ids of their plans, so two of them may choose the same. The row of a deleted plan stays: its id
    is not used again, and its versions go on.
    """

    __tablename__ = "route_plans"

    tenant_id: Mapped[str] = mapped_column(String(200), primary_key=True, active_history=True)
    id: Mapped[str] = mapped_column(String(50), primary_key=True)
    day: Mapped[date]
    depot: Mapped[str] = mapped_column(String(100))
    stops: Mapped[list[str]] = mapped_column(JSON)
    vehicle: Mapped[str | None] = mapped_column(String(100))
    status: Mapped[Status] = mapped_column(String(20))
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  SQLAlchemy's way

    @classmethod
    def draft(cls, plan_id: str, day: date, depot: str) -> RoutePlan:
        plan = cls(id=plan_id, day=day, depot=depot, stops=[], status=Status.DRAFTED)
        plan.raise_event(PlanDrafted(plan_id=plan_id, day=day, depot=depot))
        return plan

    def add_stop(self, address: str) -> None:
        self._must_be(Status.DRAFTED)
        self.stops = [*self.stops, address]
        self.raise_event(StopAdded(plan_id=self.id, address=address, stops=len(self.stops)))

    def assign(self, vehicle: str) -> None:
        self._must_be(Status.DRAFTED)
        self.vehicle = vehicle
        self.raise_event(VehicleAssigned(plan_id=self.id, vehicle=vehicle))

    def start(self) -> None:
        self._must_be(Status.DRAFTED)
        if self.vehicle is None or not self.stops:
            raise PlanError("a plan needs a vehicle and a stop before it starts")
        self.status = Status.STARTED
        self.raise_event(PlanStarted(plan_id=self.id, vehicle=self.vehicle, stops=len(self.stops)))

    def complete(self) -> None:
        self._must_be(Status.STARTED)
        self.status = Status.COMPLETED
        self.raise_event(PlanCompleted(plan_id=self.id))

    def cancel(self) -> None:
        self._must_be(Status.DRAFTED, Status.STARTED)
        self.status = Status.CANCELLED
        self.raise_event(PlanCancelled(plan_id=self.id))

    def delete(self) -> None:
        self._must_be(Status.DRAFTED, Status.COMPLETED, Status.CANCELLED)
        self.raise_event(PlanDeleted(plan_id=self.id))

    def _must_be(self, *allowed: Status) -> None:
        if self.status not in allowed:
            raise PlanError(f"the plan is {self.status}")
