"""Database URLs, their async drivers, and engines."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from ..errors import ConfigurationError, MissingExtraError

_USUAL = {"postgresql": "asyncpg", "mysql": "asyncmy", "mariadb": "asyncmy", "sqlite": "aiosqlite"}
_EXTRAS = {"asyncpg": "postgres", "asyncmy": "mysql", "aiosqlite": "sqlite"}
_WRITE_A_URL = (
    "the database URL cannot be used; write one with an async driver, like postgresql+asyncpg://host/database"
)


def with_driver(url: str | URL) -> URL:
    """The URL with an async driver, by default the usual one. Errors do not quote the URL: it may have a password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError(f"{_WRITE_A_URL}, with special characters as %XX") from None
    backend = parsed.get_backend_name()
    if backend not in _USUAL:
        instead = "write postgresql://" if backend == "postgres" else f"use {', '.join(_USUAL)}"
        raise ConfigurationError(f"the database URL: {backend} is not supported; {instead}")
    if "+" not in parsed.drivername:
        parsed = parsed.set(drivername=f"{backend}+{_USUAL[backend]}")
    try:
        usable = parsed.get_dialect().get_async_dialect_cls(parsed).is_async
    except ArgumentError:
        usable = False
    if not usable:
        usual = f"{backend}+{_USUAL[backend]}"
        raise ConfigurationError(f"the database URL: {parsed.drivername} is no async driver; write {usual}://...")
    return parsed


def engine_for(url: str | URL, **options: Any) -> AsyncEngine:
    """An engine for a URL, by default with the usual async driver. Opens no connection."""
    full = with_driver(url)
    try:
        return create_async_engine(full, **options)
    except (ArgumentError, InvalidRequestError) as error:
        raise ConfigurationError(f"{_WRITE_A_URL} ({str(error).partition('(Background')[0].strip()})") from error
    except ModuleNotFoundError as error:
        if error.name in _EXTRAS:
            raise MissingExtraError(f"the database driver {error.name}", extra=_EXTRAS[error.name]) from error
        raise ConfigurationError(
            f"{full.drivername} needs a package that is not installed: pip install {error.name}"
        ) from error
