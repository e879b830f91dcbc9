"""The application: the write side, the read side and the notifications, with a relay and the consumers inside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from sqlalchemy.exc import IntegrityError

from pillarbox.errors import HeaderError
from pillarbox.fastapi import TenantMiddleware, TraceMiddleware, error_handlers, health, lifespan
from pillarbox.projections.read import InvalidCursorError

from . import commands, notifications, summaries
from .box import box, cache
from .domain import Base, PlanError


@asynccontextmanager
async def ours(_app: FastAPI) -> AsyncIterator[None]:
    """What this service opens and closes beside the box."""
    await box.migrate()
    async with box.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    try:
        yield
    finally:
        if cache is not None:
            await cache.aclose()


app = FastAPI(
    title="Route plans",
    lifespan=lifespan(box, relay=True, consumers=True, also=ours),
    exception_handlers=error_handlers,
)
app.add_middleware(TraceMiddleware)
app.add_middleware(TenantMiddleware, box=box, exempt=["/livez", "/readyz", "/docs", "/openapi.json"])
app.include_router(health(box))
app.include_router(commands.router)
app.include_router(summaries.router)
app.include_router(notifications.router)


@app.exception_handler(PlanError)
async def refuse(_request: Request, error: PlanError) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 409)


@app.exception_handler(IntegrityError)
async def refuse_twin(_request: Request, _error: IntegrityError) -> JSONResponse:
    return JSONResponse({"detail": "there is one already, or there was"}, 409)


@app.exception_handler(InvalidCursorError)
async def refuse_cursor(_request: Request, error: InvalidCursorError) -> JSONResponse:
    return JSONResponse({"detail": f"after: {error}"}, 422)


@app.exception_handler(HeaderError)
async def refuse_tenant(_request: Request, _error: HeaderError) -> JSONResponse:
    return JSONResponse({"detail": "this tenant cannot be part of a topic's name"}, 400)
