"""Pillarbox in a FastAPI application: start and stop, a unit of work per request, tenants and traces, and health.

    app = FastAPI(lifespan=lifespan(box, relay=True), exception_handlers=error_handlers)
    app.add_middleware(TraceMiddleware)
    app.include_router(health(box))
    Work = Annotated[UnitOfWork, unit_of_work(box)]

    @app.post("/orders", status_code=201)
    async def place(new: NewOrder, uow: Work) -> Placed: ...

Before this: a request. After it: its transaction has committed, with the events that it raised, and only then does the
client get its answer. The middlewares are plain ASGI and work with other frameworks as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import select

from .app import Pillarbox
from .consumers.consumer import Consumer
from .context import TRACEPARENT, event_context
from .errors import (
    CommitOutcomeUnknown,
    ConcurrencyError,
    ConfigurationError,
    HeaderError,
    MissingExtraError,
    NotFoundError,
    PayloadError,
    TenancyError,
)
from .projections.read import InvalidCursorError
from .redaction import described, redacted
from .relay import Relay
from .route import MAX_TENANT_BYTES, check_key
from .unit_of_work import UnitOfWork

try:
    import anyio
    from fastapi import APIRouter, Depends, HTTPException, Request
    from fastapi.requests import HTTPConnection
    from fastapi.responses import JSONResponse
except ImportError:
    raise MissingExtraError("the FastAPI integration", extra="fastapi") from None

__all__ = ["TenantMiddleware", "TraceMiddleware", "error_handlers", "health", "lifespan", "unit_of_work"]

logger = logging.getLogger("pillarbox")

PROBE_SECONDS = 2.0
"""Longest wait of a readiness probe for the database."""
MAX_CORRELATION = 128
MAX_TRACESTATE = 512

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
ASGIApp = Callable[[Any, Receive, Send], Awaitable[None]]
Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]

# -- start and stop ----------------------------------------------------------------------------------------------------


_SORTS = {"handlers": "consumers", "projection": "projections"}
"""Names of the kinds in `health`."""


class _Inside:
    """A relay or consumer inside the application. If it ends unexpectedly, that is logged, and `health` reports it."""

    def __init__(self, worker: Relay | Consumer) -> None:
        self.worker = worker
        self._what = f"{'relay' if isinstance(worker, Relay) else 'consumer'} {worker.name}"
        self.sort = "relay" if isinstance(worker, Relay) else _SORTS[worker.kind]
        self._told = False
        self._task = asyncio.create_task(worker.run(), name=self._what)
        self._task.add_done_callback(self._ended)

    @property
    def alive(self) -> bool:
        return not self._task.done() and self.worker.alive

    @property
    def healthy(self) -> bool:
        return self.alive and self.worker.healthy

    async def begun(self) -> None:
        """Raise the error of a worker that cannot run at all, so that the application does not start."""
        await asyncio.sleep(0)
        if self._task.done():
            self._told = True
            self._task.result()

    def stop(self) -> None:
        self._told = True
        self.worker.stop()

    async def ended(self) -> None:
        await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if not self._told:
            logger.critical(
                "%s has died inside the application; nothing is %s from here until it is restarted",
                self._what,
                "sent" if isinstance(self.worker, Relay) else "consumed",
                exc_info=error,
            )


_inside: WeakKeyDictionary[Pillarbox, list[_Inside]] = WeakKeyDictionary()
_living: WeakSet[Pillarbox] = WeakSet()


def lifespan(
    box: Pillarbox,
    *,
    relay: bool | Callable[[], Relay] = False,
    consumers: bool | Collection[str] = False,
    also: Lifespan | None = None,
) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
    """The lifespan of an application with a box: ``FastAPI(lifespan=lifespan(box, relay=True, also=yours))``.

    ``relay`` runs a relay inside the application: True, or a function that makes one, such as ``lambda:
    box.relay(lease=10)``. ``consumers`` runs consumers and projections of the box: True for all, or their names.
    ``also`` is a lifespan of your own, whose value is passed on. The box starts first, then yours, then the relay, then
    the consumers. They end in reverse order, so that handlers can use the resources of your lifespan. A box has one
    lifespan at a time: the second to end would find it stopped.
    """
    make = box.relay if relay is True else relay or None

    @asynccontextmanager
    async def live(app: Any) -> AsyncIterator[Any]:
        with _alone(box):
            async with box, (also or _nothing)(app) as state, _running(box, make, consumers):
                yield state

    return live


@contextmanager
def _alone(box: Pillarbox) -> Iterator[None]:
    if box in _living:
        raise ConfigurationError(
            "this box has a lifespan already, which is still running: give it to one application only, the outer one; "
            "applications inside use the same box without a lifespan"
        )
    _living.add(box)
    try:
        yield
    finally:
        _living.discard(box)


@asynccontextmanager
async def _nothing(_app: Any) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def _running(
    box: Pillarbox, make: Callable[[], Relay] | None, consumers: bool | Collection[str]
) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        if make is not None:
            await stack.enter_async_context(_beside(box, [make()]))
        # Only now, because a module may make consumers after the application.
        await stack.enter_async_context(_beside(box, _chosen(box, consumers)))
        yield


def _chosen(box: Pillarbox, consumers: bool | Collection[str]) -> list[Consumer]:
    if consumers is False:
        return []
    if isinstance(consumers, str):
        raise ConfigurationError(f"consumers is True, or a list of names, got {consumers!r}")
    names = [*box.consumers] if consumers is True else [*consumers]
    if not names:
        raise ConfigurationError("there are no consumers to run: make one with box.consumer(...)")
    if unknown := [name for name in names if name not in box.consumers]:
        known = ", ".join(sorted(box.consumers)) or "none"
        raise ConfigurationError(f"no consumer is called {', '.join(map(repr, unknown))}; known are: {known}")
    return [consumer for name, consumer in box.consumers.items() if name in names]


@asynccontextmanager
async def _beside(box: Pillarbox, workers: Sequence[Relay | Consumer]) -> AsyncIterator[None]:
    """Run these workers until the block ends."""
    ours = [_Inside(worker) for worker in workers]
    try:
        for each in ours:
            await each.begun()
        _inside[box] = [*_inside.get(box, ()), *ours]
        yield
    finally:
        try:
            for each in ours:
                each.stop()
            for each in ours:
                await each.ended()
        finally:
            _inside[box] = [each for each in _inside.get(box, ()) if each not in ours]


# -- a unit of work per request ----------------------------------------------------------------------------------------


def unit_of_work(box: Pillarbox, *, timeout: float | None = None) -> Any:
    """A dependency: ``uow: Annotated[UnitOfWork, unit_of_work(box)]``. A request is one transaction.

    It commits after the endpoint has returned and before the first byte of the response is sent; background tasks run
    after that. An error, also an `HTTPException`, rolls back, and so does a client that has disconnected by then. A
    failed COMMIT is a 500, and a COMMIT without an answer a 503: never a success. ``timeout`` is that of `UnitOfWork`.

    Behind a `BaseHTTPMiddleware` (``@app.middleware("http")``), which hides it, a disconnected client is not noticed,
    and the transaction commits. Write middlewares as plain ASGI where that matters. WebSockets have no unit of work by
    dependency.

    A ``def`` endpoint may `add` and `publish`. Operations that wait for the database need ``anyio.from_thread.run``.
    """

    async def transaction(connection: HTTPConnection) -> AsyncIterator[UnitOfWork]:
        if not isinstance(connection, Request):
            raise ConfigurationError(
                "unit_of_work(box) is a transaction per request, and a WebSocket lives for long: "
                "open one per message, with `async with box.unit_of_work() as uow:`"
            )
        try:
            async with box.unit_of_work(timeout=timeout) as uow:
                yield uow
                if await _has_gone(connection):
                    logger.debug("%s %r: the client has gone: rolled back", connection.method, connection.url.path)
                    raise HTTPException(499, "the client has gone: rolled back")
        except CommitOutcomeUnknown as unknown:
            raise HTTPException(503, _UNKNOWN) from unknown

    return Depends(transaction, scope="function")  # the default, "request", would commit after the response


async def _has_gone(request: Request) -> bool:
    """Whether the client has disconnected, as far as messages have arrived. Does not wait, so it cannot see a
    disconnect behind a `BaseHTTPMiddleware`.
    """
    while True:
        message = None
        with anyio.CancelScope() as now:
            now.cancel()
            message = await request.receive()
        if message is None:
            return False
        if message["type"] == "http.disconnect":
            return True


_UNKNOWN = "it is not known whether this was done, because the database did not answer: look before you try again"


def _answer(status: int, detail: str) -> Callable[[Request, Exception], JSONResponse]:
    def handle(_request: Request, _error: Exception) -> JSONResponse:
        return JSONResponse({"detail": detail}, status)

    return handle


def _refused(_request: Request, error: PayloadError) -> JSONResponse:
    # The error may quote the value, which need not be the client's, so the response has only the field.
    logger.warning("a request was refused with 422: an event cannot hold what is in its field %s", redacted(error.path))
    logger.debug("a request was refused with 422", exc_info=error)
    return JSONResponse({"detail": f"{error.path}: this value cannot be part of an event"}, 422)


def _bad_cursor(_request: Request, error: InvalidCursorError) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 422)  # its text may be shown


def _not_for_tenant(_request: Request, error: TenancyError) -> JSONResponse:
    # It may as well be a mistake in code, and its text names tables and tenants.
    logger.warning("a request was refused with 403: %s", described(error))
    return JSONResponse({"detail": "this is not possible for this tenant, or without a tenant"}, 403)


error_handlers: dict[int | type[Exception], Callable[[Request, Any], Any]] = {
    ConcurrencyError: _answer(409, "somebody else changed it first: load it again and redo"),
    NotFoundError: _answer(404, "there is no such thing"),
    CommitOutcomeUnknown: _answer(503, _UNKNOWN),
    PayloadError: _refused,
    InvalidCursorError: _bad_cursor,
    TenancyError: _not_for_tenant,
}
"""For ``FastAPI(exception_handlers=error_handlers)``: Pillarbox's errors that concern the client."""


# -- health ------------------------------------------------------------------------------------------------------------


def health(box: Pillarbox) -> APIRouter:
    """``/livez`` and ``/readyz``, for ``app.include_router(health(box))``: 200 or 503, without secrets.

    Live: the process answers, and the relay, consumers and projections inside it have not died; a relay has lately
    tried to renew its leases, too. If not, only a restart helps.

    Ready: the database answers, the relay has lately renewed its leases, no topic rejects everything, and the sources
    of consumers are available.
    """
    router = APIRouter(include_in_schema=False)

    @router.get("/livez")
    async def livez() -> JSONResponse:
        return _checked({}, box, lambda inside: inside.alive)

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        return _checked({"database": await _answers(box)}, box, lambda inside: inside.healthy)

    return router


def _checked(checks: dict[str, bool], box: Pillarbox, holds: Callable[[_Inside], bool]) -> JSONResponse:
    """Whether the check holds for all workers of a kind. The response has no names."""
    for inside in _inside.get(box, ()):
        checks[inside.sort] = checks.get(inside.sort, True) and holds(inside)
    well = all(checks.values())
    return JSONResponse({"ok": well, **checks}, 200 if well else 503, {"cache-control": "no-store"})


async def _answers(box: Pillarbox) -> bool:
    try:
        async with asyncio.timeout(PROBE_SECONDS), box.engine.connect() as connection:
            await connection.execute(select(1))
    except Exception as error:  # whatever it is, the database did not answer
        logger.debug("readiness: the database does not answer: %s", type(error).__name__)
        return False
    return True


# -- tenants and traces ------------------------------------------------------------------------------------------------


class TenantMiddleware:
    """Sets the tenant of a request, for its sessions and events.

    ``tenant`` is the name of a header, which a gateway in front of the application must set or remove, or a function
    that finds the tenant in the ASGI scope, for example as an authentication has stored it. An invalid tenant is
    refused with 400, and so is a missing one if the box has ``tenancy="required"``. ``exempt`` are paths that need no
    tenant, with or without a trailing slash. A request without a tenant sees no tenant's rows, so ``exempt`` opens
    nothing.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        box: Pillarbox,
        tenant: str | Callable[[Scope], str | None] = "x-tenant-id",
        exempt: Collection[str] = ("/livez", "/readyz", "/metrics"),
    ) -> None:
        self.app = app
        self._required = box.tenancy.required
        self._find = tenant
        self._exempt = frozenset(map(_path, exempt))

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] not in ("http", "websocket") or _path(scope["path"]) in self._exempt:
            await self.app(scope, receive, send)
            return
        try:
            tenant = self._tenant_of(scope)
        except HeaderError:
            await _refuse(scope, receive, send, "the tenant is not valid")
            return
        if tenant is None and self._required:
            await _refuse(scope, receive, send, "the tenant is missing")
            return
        with event_context(tenant=tenant):
            await self.app(scope, receive, send)

    def _tenant_of(self, scope: Scope) -> str | None:
        if callable(self._find):
            tenant = self._find(scope)
        else:
            found = _headers(scope, self._find)
            if len(found) > 1:
                raise HeaderError(f"{self._find}: is there {len(found)} times")
            tenant = _decoded(found[0]) if found else None
        if tenant is not None and check_key("tenant", tenant, MAX_TENANT_BYTES) != tenant.strip():
            raise HeaderError("tenant: begins or ends with a space")
        return tenant


class TraceMiddleware:
    """Sets the trace and the correlation of a request, for its events: from its headers (``traceparent``,
    ``tracestate``, ``x-correlation-id``), if they are well formed. A missing correlation is created; a missing trace is
    not, because no span would belong to it. The response has the correlation in the same header. These values connect
    events, and grant no rights.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        with _traced(scope) as correlation:

            async def told(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", ()), (b"x-correlation-id", correlation.encode())]
                await send(message)

            await self.app(scope, receive, told)


@contextmanager
def _traced(scope: Scope) -> Iterator[str]:
    correlation = _only(scope, "x-correlation-id")
    if correlation is None or len(correlation) > MAX_CORRELATION or not _is_printable(correlation):
        correlation = str(uuid4())
    with event_context(correlation_id=correlation, **_trace(scope)):
        yield correlation


def _trace(scope: Scope) -> dict[str, str | None]:
    """The trace context of the request, if it has one."""
    traceparent = _only(scope, "traceparent")
    if traceparent is None or not _is_trace(traceparent):
        return {}
    tracestate = ",".join(value.decode("latin-1") for value in _headers(scope, "tracestate"))
    well = len(tracestate) <= MAX_TRACESTATE and _is_printable(tracestate)
    return {"traceparent": traceparent, "tracestate": tracestate if well else None}


def _path(path: str) -> str:
    return path.rstrip("/") or "/"


def _is_trace(traceparent: str) -> bool:
    found = TRACEPARENT.fullmatch(traceparent)
    return found is not None and int(found[1], 16) != 0 and int(found[2], 16) != 0


def _is_printable(value: str) -> bool:
    return value.isascii() and value.isprintable() and value.strip() != ""


def _headers(scope: Scope, name: str) -> list[bytes]:
    wanted = name.lower().encode()
    return [value for header, value in scope["headers"] if header == wanted]


def _only(scope: Scope, name: str) -> str | None:
    """The value of a header that occurs once."""
    found = _headers(scope, name)
    return found[0].decode("latin-1") if len(found) == 1 else None


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise HeaderError("a header is not UTF-8") from None


async def _refuse(scope: Any, receive: Receive, send: Send, detail: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": detail})
    else:
        await JSONResponse({"detail": detail}, 400)(scope, receive, send)
