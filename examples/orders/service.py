"""The box, the handlers and the endpoints: an order service that tells the warehouse."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated
from uuid import UUID

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from pillarbox import Pillarbox, Repository, RetryPolicy, Route, UnitOfWork
from pillarbox.fastapi import TraceMiddleware, error_handlers, health, lifespan, unit_of_work
from pillarbox.interceptors.optimistic_lock import OptimisticLock

from .domain import Base, Notice, Order, OrderCancelled, OrderError, OrderPlaced, OrderRepriced, Status
from .transport import WarehouseTransport

warehouse = WarehouseTransport(os.environ.get("WAREHOUSE_URL", "http://127.0.0.1:8001"))
box = Pillarbox(
    os.environ.get("DATABASE_URL"),  # without one: an embedded PostgreSQL
    transports={"warehouse": warehouse},
    routes=[
        Route(
            *("orders.order.placed", "orders.order.cancelled"),
            to="warehouse",
            topic="orders",
            retry=RetryPolicy(attempts=3, base=0.5, cap=2.0),
        )
    ],
)


# -- notices to customers: a handler inside the service, which its relay runs after the commit -------------------------


@box.subscribe(OrderPlaced, OrderRepriced, OrderCancelled, name="notices")
async def write_notice(event: OrderPlaced | OrderRepriced | OrderCancelled, uow: UnitOfWork) -> None:
    uow.add(Notice(event_id=event.event_id, order_id=event.order_id, text=_wording(event)))


def _wording(event: OrderPlaced | OrderRepriced | OrderCancelled) -> str:
    match event:
        case OrderPlaced():
            return f"Thank you for ordering {event.quantity} x {event.article}."
        case OrderRepriced():
            return f"Your order costs {event.total_cents / 100:.2f} now."
        case OrderCancelled():
            return "Your order is cancelled."


# -- the application ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def ours(_app: FastAPI) -> AsyncIterator[None]:
    """What this service opens and closes beside the box."""
    await box.migrate()
    async with box.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    try:
        yield
    finally:
        await warehouse.close()


app = FastAPI(title="Orders", lifespan=lifespan(box, relay=True, also=ours), exception_handlers=error_handlers)
app.add_middleware(TraceMiddleware)
app.include_router(health(box))


@app.exception_handler(OrderError)
async def refuse(_request: Request, error: OrderError) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 409)


Work = Annotated[UnitOfWork, unit_of_work(box)]


async def repository(uow: Work) -> Repository[Order]:
    return Repository(uow, Order, [OptimisticLock()])


Orders = Annotated[Repository[Order], Depends(repository)]


# What the database cannot keep is refused here, as a 422: an INTEGER has 32 bits, and a text no NUL.
Text = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00]*$")]
Cents = Annotated[int, Field(ge=0, le=2**31 - 1)]


class NewOrder(BaseModel):
    customer: Text
    article: Text
    quantity: int = Field(gt=0, lt=1_000)
    total_cents: Cents


class NewPrice(BaseModel):
    total_cents: Cents
    version: int | None = None
    """The version that the client has seen; 409 if the order has another one by now."""


class OrderView(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: UUID
    customer: str
    article: str
    quantity: int
    total_cents: int
    status: Status
    version: int


@app.post("/orders", status_code=201)
async def place(new: NewOrder, orders: Orders) -> OrderView:
    order = Order.place(new.customer, new.article, new.quantity, new.total_cents)
    await orders.save(order)
    return OrderView.model_validate(order)


@app.put("/orders/{order_id}/price")
async def reprice(order_id: UUID, new: NewPrice, orders: Orders) -> OrderView:
    order = await orders.get_one(order_id, expected_version=new.version)
    order.reprice(new.total_cents)
    await orders.save(order)
    return OrderView.model_validate(order)


@app.post("/orders/{order_id}/cancel")
async def cancel(order_id: UUID, orders: Orders) -> OrderView:
    order = await orders.get_one(order_id)
    order.cancel()
    await orders.save(order)
    return OrderView.model_validate(order)


@app.get("/orders/{order_id}")
async def show(order_id: UUID, orders: Orders) -> OrderView:
    return OrderView.model_validate(await orders.get_one(order_id))


@app.get("/orders")
async def find(orders: Orders, customer: Text | None = None) -> list[OrderView]:
    criteria = () if customer is None else (Order.customer == customer,)
    return [OrderView.model_validate(order) for order in await orders.list(*criteria, limit=100)]


@app.get("/orders/{order_id}/notices")
async def notices(order_id: UUID, uow: Work) -> Sequence[str]:
    found = await uow.session.scalars(select(Notice).where(Notice.order_id == order_id).order_by(Notice.event_id))
    return [notice.text for notice in found]
