"""The database schema, step by step.

A step is a function of Alembic's operations. `migrate` runs the steps that are missing, for people who know nothing of
Alembic; `pillarbox.alembic` runs the same steps inside a user's own revisions. Which steps have been run is kept in
``pillarbox_meta``, so both ways can be mixed. Steps take locks for a bounded time only: a busy table makes them give
up, not queue everybody behind them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, Dialect, text

from ...errors import StoreError
from .. import tables
from ..schema import schema_version
from . import step_0001

LOCK_TIMEOUT_SECONDS = 5
_TURN_SECONDS = 60
# Any number will do, as long as all migrating processes use the same.
_ADVISORY_LOCK = 0x70696C6C61726278

Step = Callable[[Operations], None]
STEPS: tuple[Step, ...] = (step_0001.upgrade,)
"""All of them, in their order. One that was released is never changed: what it lacks is a step of its own."""


def migrate(connection: Connection, shards: int | None = None) -> int:
    """Run the steps that are missing, in the connection's transaction; how many they were. Processes that do it at once
    take turns. ``shards`` is for tables that are made here: rows of others wait in the lanes that they were given.
    """
    with _taking_turns(connection):
        operations = Operations(MigrationContext.configure(connection))
        found = schema_version(connection)
        for number in range(found + 1, len(STEPS) + 1):
            run_step(operations, number)
            if number == 1 and shards is not None:
                connection.execute(tables.meta.update().values(shards=shards))
        return max(0, len(STEPS) - found)


def migration_sql(dialect: Dialect) -> str:
    """All steps as SQL text, for people who run it themselves."""
    output = io.StringIO()
    context = MigrationContext.configure(
        dialect=dialect, opts={"as_sql": True, "output_buffer": output, "literal_binds": True}
    )
    operations = Operations(context)
    for number in range(1, len(STEPS) + 1):
        run_step(operations, number)
    return output.getvalue()


def run_step(operations: Operations, number: int) -> None:
    """Run one step, unless the database has seen it."""
    if operations.get_context().as_sql:
        _run(operations, number)
        return
    connection = operations.get_bind()
    if schema_version(connection) < number:
        with _bounded_waiting(connection):
            _run(operations, number)


def _run(operations: Operations, number: int) -> None:
    STEPS[number - 1](operations)
    operations.execute(tables.meta.update().values(schema_version=number))


@contextmanager
def _bounded_waiting(connection: Connection) -> Iterator[None]:
    """Give up on a table that is busy, and leave the rest of the transaction, which may be a user's, as it was."""
    if connection.dialect.name != "postgresql":
        yield
        return
    before = connection.execute(text("SELECT current_setting('lock_timeout')")).scalar_one()
    setting = text("SELECT set_config('lock_timeout', :value, true)")
    connection.execute(setting, {"value": f"{LOCK_TIMEOUT_SECONDS}s"})
    yield
    connection.execute(setting, {"value": before})


class _taking_turns:  # noqa: N801  used like a function
    """One migrating process at a time; on SQLite the write transaction already is that."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        if self._connection.dialect.name == "postgresql":
            self._connection.execute(text(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})"))
        elif self._connection.dialect.name in ("mysql", "mariadb"):
            ours = self._connection.execute(text(f"SELECT GET_LOCK('pillarbox_migrate', {_TURN_SECONDS})")).scalar()
            if ours != 1:
                raise StoreError(f"somebody else has been migrating this database for {_TURN_SECONDS} seconds")

    def __exit__(self, error: object, *_more: object) -> None:
        if self._connection.dialect.name in ("mysql", "mariadb"):
            if error is None:  # tables are there for everybody at once; which step they belong to must be, too
                self._connection.exec_driver_sql("COMMIT")
            self._connection.execute(text("SELECT RELEASE_LOCK('pillarbox_migrate')"))
