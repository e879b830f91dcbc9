"""Somebody else who wants to know: when a plan starts, the driver of its vehicle gets a message, once.

The message, the event that says so, and the note that the plan's event was dealt with are one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from sqlalchemy import String, select
from sqlalchemy.orm import Mapped, mapped_column

from pillarbox import IntegrationEvent, MessageContext, Reject, TenantScoped, UnitOfWork

from .box import PLANS, Id, Tenant, Text, Work, box
from .domain import Base, PlanStarted


class DriverNotified(IntegrationEvent, name="routing.driver.notified", version=1):
    """For whoever sends it to a telephone."""

    plan_id: str
    driver: str
    text: str


class Driver(TenantScoped, Base):
    """Who drives a vehicle. Two tenants may call their vehicles the same."""

    __tablename__ = "drivers"

    tenant_id: Mapped[str] = mapped_column(String(200), primary_key=True, active_history=True)
    vehicle: Mapped[str] = mapped_column(String(50), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))


class Notification(TenantScoped, Base):
    """What a driver was told. Its id is that of the event."""

    __tablename__ = "notifications"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    driver: Mapped[str] = mapped_column(String(100))
    text: Mapped[str] = mapped_column(String(200))


notifications = box.consumer("notifications", source="broker", topics=[PLANS])


@notifications.on(PlanStarted)
async def notify_driver(event: PlanStarted, uow: UnitOfWork, message: MessageContext) -> None:
    driver = await uow.session.scalar(select(Driver).where(Driver.vehicle == event.vehicle))
    if driver is None:
        raise Reject(f"nobody drives {event.vehicle}")  # it becomes a dead letter, and others go on
    text = f"{event.plan_id} has started with {event.vehicle}, stops: {event.stops}"
    uow.add(Notification(id=event.event_id, driver=driver.name, text=text))
    uow.publish(DriverNotified(plan_id=event.plan_id, driver=driver.name, text=text), key=message.key)


# -- endpoints ---------------------------------------------------------------------------------------------------------

router = APIRouter()


class DriverName(BaseModel):
    name: Text


class NotificationView(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    driver: str
    text: str


@router.put("/drivers/{vehicle}", status_code=204)
async def employ(vehicle: Id, driver: DriverName, tenant: Tenant, uow: Work) -> None:
    await uow.session.merge(Driver(tenant_id=tenant, vehicle=vehicle, name=driver.name))


@router.get("/notifications")
async def sent(uow: Work) -> Sequence[NotificationView]:
    found = await uow.session.scalars(select(Notification).order_by(Notification.id).limit(100))
    return [NotificationView.model_validate(each) for each in found]
