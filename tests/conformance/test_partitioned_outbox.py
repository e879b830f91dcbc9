"""The log on an outbox in partitions: the same promises, a lane's rows in all of them."""

from __future__ import annotations

import pytest

from pillarbox.stores import partitions
from pillarbox.stores.audit import Author
from pillarbox.stores.log import LogStore
from pillarbox.testing.conformance.detours import DetourContract
from tests.conformance.test_outbox_store import DatabaseStoreContract, DatabaseWorld, migrated

__all__ = ["migrated"]

_RANGES = {"low": ("40000000", "80000000"), "middle": ("80000000", "c0000000")}
"""Of ids that tell no time, as the suite has them; the default partition takes the other half."""


class TestPartitionedLog(DetourContract, DatabaseStoreContract):
    """A store whose rows are in several partitions."""

    kind = LogStore

    @pytest.fixture(params=["embedded", pytest.param("oldest", marks=pytest.mark.elsewhere)])
    def database_kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture(autouse=True)
    async def partitioned(self, world: DatabaseWorld) -> None:
        async with world.engine.begin() as connection:
            if (await connection.run_sync(partitions.layout)).partitioned:
                return
            await connection.run_sync(partitions.partition, Author("tests", None), ahead=1)
            for name, (first, last) in _RANGES.items():
                bounds = f"FROM ('{first}-0000-0000-0000-000000000000') TO ('{last}-0000-0000-0000-000000000000')"
                made = f"CREATE TABLE pillarbox_outbox_{name} PARTITION OF pillarbox_outbox FOR VALUES {bounds}"
                await connection.exec_driver_sql(made)
                renamed = f"pillarbox_outbox_{name}_pkey RENAME TO uq_pillarbox_outbox_event_{name}"
                await connection.exec_driver_sql(f"ALTER INDEX {renamed}")  # by which writers know it
