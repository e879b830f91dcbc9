"""The temporary table that a rebuild writes, and the switch that replaces the live rows.

No other connection sees the temporary table, and the database drops it with its connection. The switch deletes and
inserts rows in one transaction: readers see all old rows or all new ones, and wait for neither. The live table is never
renamed, and keeps its grants, policies, views and indexes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

from sqlalchemy import Connection, MetaData, Table, delete, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import CreateTable

from ..errors import ConfigurationError, StoreError
from ..outbox import stable_hash
from ..stores.tables import inbox
from ..tenancy import SETTING, UNSCOPED

_ALL = {UNSCOPED: True}


class Shadow:
    """A temporary copy of a projection's table. Every method works in the transaction of its connection."""

    def __init__(self, live: Table) -> None:
        self.live = live
        # With its constraints: an event that violates one of the live table must violate it here.
        no_schema: Any = None
        self.table = live.to_metadata(MetaData(), schema=no_schema, name="pillarbox_shadow")

    def create(self, connection: Connection) -> None:
        """Create it. A `ConfigurationError` if the rows of the live table cannot be replaced."""
        known = inspect(connection)
        if not known.has_table(self.live.name, schema=self.live.schema):
            raise ConfigurationError(f"{self.live.name} cannot be rebuilt: there is no such table")
        for (_, other), keys in known.get_multi_foreign_keys(schema=self.live.schema).items():
            if other != self.live.name and any(key["referred_table"] == self.live.name for key in keys):
                raise ConfigurationError(
                    f"{self.live.name} cannot be rebuilt: a foreign key of {other} refers to it, and its rows are "
                    "deleted and inserted again"
                )
        if connection.dialect.name == "postgresql":
            # A plan that was made for the empty table would be used for the full one.
            connection.exec_driver_sql("SET plan_cache_mode = force_custom_plan")
        connection.exec_driver_sql(self._definition(connection))

    def _definition(self, connection: Connection) -> str:
        """CREATE TABLE, from the database's own definition of the live table where it can copy that."""
        if connection.dialect.name == "sqlite":
            made = str(CreateTable(self.table, include_foreign_key_constraints=[]).compile(connection)).lstrip()
            return made.replace("CREATE TABLE", "CREATE TEMPORARY TABLE", 1)
        like = f"LIKE {connection.dialect.identifier_preparer.format_table(self.live)}"
        if connection.dialect.name == "postgresql":
            like = f"({like} INCLUDING ALL)"
        return f"CREATE TEMPORARY TABLE {self.table.name} {like}"

    def switch(self, connection: Connection, consumers: Sequence[int]) -> None:
        """Replace the live rows. ``consumers`` are the numbers of the projection's generations in the inbox."""
        names = [column.name for column in self.live.columns if column.computed is None]
        for tenant in self._tenants(connection, consumers):
            old, new = delete(self.live), select(*(self.table.c[name] for name in names))
            if tenant is not None:
                connection.execute(_AS_TENANT, {"name": SETTING, "tenant": tenant})
                old, new = old.where(self.live.c.tenant_id == tenant), new.where(self.table.c.tenant_id == tenant)
            connection.execute(old, execution_options=_ALL)
            written = insert(self.live).from_select(names, new, include_defaults=False)
            connection.execute(written, execution_options=_ALL)

    def _tenants(self, connection: Connection, consumers: Sequence[int]) -> Sequence[str | None]:
        """None for all rows at once; each tenant where row level security applies to this role."""
        if connection.dialect.name != "postgresql" or "tenant_id" not in self.live.c:
            return [None]
        name = connection.dialect.identifier_preparer.format_table(self.live)
        if not connection.scalar(text("SELECT row_security_active(:name)"), {"name": name}):
            return [None]
        dealt_with = select(inbox.c.tenant).where(inbox.c.consumer.in_(consumers), inbox.c.tenant != "")
        return [*connection.scalars(dealt_with.union(select(self.table.c.tenant_id)))]


_LOCK = "CONCAT(:key, ':', MD5(DATABASE()))"
_AS_TENANT = text("SELECT set_config(:name, :tenant, true)")


@asynccontextmanager
async def alone(engine: AsyncEngine, name: str) -> AsyncIterator[None]:
    """Lock out other rebuilds of this projection. The lock ends with the process."""
    taken = StoreError(f"projection {name} is being rebuilt by another process: wait until that is done")
    number = stable_hash(f"rebuild {name}")
    if engine.dialect.name == "sqlite":
        file = f"{engine.url.database}-rebuild-{number & 0xFFFFFFFFFFFFFFFF:x}"
        with closing(sqlite3.connect(file, timeout=0, check_same_thread=False)) as lock:
            try:
                lock.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError:
                raise taken from None
            yield
        return
    take, release, key = (
        ("pg_try_advisory_lock(:key)", "pg_advisory_unlock(:key)", number)
        if engine.dialect.name == "postgresql"
        else (f"GET_LOCK({_LOCK}, 0)", f"RELEASE_LOCK({_LOCK})", f"pillarbox:{number:x}")
    )
    async with engine.connect() as connection:
        got = await connection.scalar(text(f"SELECT {take}"), {"key": key})
        await connection.commit()
        if not got:
            raise taken
        try:
            yield
        finally:
            # The lock belongs to the session, and the server may notice its end late.
            with suppress(DBAPIError):
                await connection.execute(text(f"SELECT {release}"), {"key": key})
            await connection.invalidate()
