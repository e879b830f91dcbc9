"""The database schema, step by step.

A step is a function of Alembic's operations. `migrate` runs the missing steps, without any knowledge of Alembic;
`pillarbox.alembic` runs the same steps inside a user's own revisions. ``pillarbox_meta`` records the steps that have
run, so both ways can be mixed. Steps wait for locks for a limited time only: on a busy table they give up, so that no
queue forms behind them.
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
# Any number, as long as all migrating processes use the same.
_ADVISORY_LOCK = 0x70696C6C61726278

Step = Callable[[Operations], None]
STEPS: tuple[Step, ...] = (step_0001.upgrade,)
"""All steps in their order. A released step is never changed: corrections are a new step."""


def migrate(connection: Connection, shards: int | None = None) -> int:
    """Run the missing steps in the connection's transaction. Returns their number. Concurrent processes take turns.
    ``shards`` applies to new tables only: in existing ones, rows stay in their lanes.
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
    """All steps as SQL text, for manual execution."""
    output = io.StringIO()
    context = MigrationContext.configure(
        dialect=dialect, opts={"as_sql": True, "output_buffer": output, "literal_binds": True}
    )
    operations = Operations(context)
    for number in range(1, len(STEPS) + 1):
        run_step(operations, number)
    return output.getvalue()


def run_step(operations: Operations, number: int) -> None:
    """Run one step, unless the database has it."""
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
    """Limit the wait for busy tables, and restore the setting afterwards: the transaction may be a user's."""
    if connection.dialect.name != "postgresql":
        yield
        return
    before = connection.execute(text("SELECT current_setting('lock_timeout')")).scalar_one()
    setting = text("SELECT set_config('lock_timeout', :value, true)")
    connection.execute(setting, {"value": f"{LOCK_TIMEOUT_SECONDS}s"})
    yield
    connection.execute(setting, {"value": before})


class _taking_turns:  # noqa: N801  used like a function
    """Let one process migrate at a time; on SQLite the write transaction does so already."""

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
            if error is None:  # MySQL commits each DDL statement, so the step must be recorded at once, too
                self._connection.exec_driver_sql("COMMIT")
            self._connection.execute(text("SELECT RELEASE_LOCK('pillarbox_migrate')"))
