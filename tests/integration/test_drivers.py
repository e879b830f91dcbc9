"""Every driver writes the same rows, one at a time and many at once, from `AsyncSession` and `Session`."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from pillarbox import DuplicateEventError
from tests.conftest import FreshDatabase
from tests.domain import Order, OrderNoted, order_box, set_up, written

ASYNC = [
    ("embedded", "asyncpg"),
    ("system", "asyncpg"),
    ("embedded", "psycopg"),
    ("oldest", "asyncpg"),
    ("mariadb", "asyncmy"),
    ("mariadb", "aiomysql"),
    ("sqlite", "aiosqlite"),
]
SYNC = [
    ("embedded", "psycopg"),
    ("system", "psycopg2"),
    ("oldest", "psycopg2"),
    ("mariadb", "pymysql"),
    ("sqlite", "pysqlite"),
]
MANY = 250


@pytest.mark.parametrize(("kind", "driver"), ASYNC)
async def test_an_async_session(fresh_database: FreshDatabase, kind: str, driver: str) -> None:
    database = fresh_database(kind)
    async with order_box(database.url()) as box:
        await set_up(box)
        engine = create_async_engine(database.url(driver))
        sessions = box.bind(async_sessionmaker(engine))
        async with sessions.begin() as session:
            order = Order.place()
            session.add(order)
        async with sessions.begin() as session:
            for number in range(MANY):
                box.publish(session, OrderNoted(note=f"Ä {number}"), key=f"käy {number} ", tenant="acme")
        event = OrderNoted(note="twice")
        for _ in range(2):
            try:
                async with sessions.begin() as session:
                    box.publish(session, event, key="k")
            except DuplicateEventError:
                assert len(await written(box.engine)) == MANY + 2
        await engine.dispose()
        rows = await written(box.engine, "key", "tenant_id", "payload")
        assert rows[1:-1] == [(f"käy {number} ", "acme", f'{{"note":"Ä {number}"}}') for number in range(MANY)]


@pytest.mark.parametrize(("kind", "driver"), SYNC)
async def test_a_plain_session(fresh_database: FreshDatabase, kind: str, driver: str) -> None:
    database = fresh_database(kind)
    async with order_box(database.url()) as box:
        await set_up(box)
        engine = create_engine(database.url(driver))
        sessions = box.bind(sessionmaker(engine))
        with sessions.begin() as session:
            session.add(Order.place())
            with session.begin_nested() as savepoint:
                box.publish(session, OrderNoted(note="dropped"), key="k")
                session.flush()
                savepoint.rollback()
        with sessions.begin() as session:
            for number in range(MANY):
                box.publish(session, OrderNoted(note=str(number)), key="k")
        engine.dispose()
        rows = await written(box.engine, "payload")
        assert rows[1:] == [(f'{{"note":"{number}"}}',) for number in range(MANY)]
