"""The schema: made by ourselves or by a user's own Alembic, never fought over."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Column, Connection, Integer, create_engine, inspect, make_url, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import pillarbox.alembic
from pillarbox import Pillarbox
from pillarbox.errors import ConfigurationError, NotMigratedError, StoreError
from pillarbox.outbox import SHARDS
from pillarbox.stores import migrations, schema, store_on
from pillarbox.stores.migrations import STEPS, migrate, migration_sql, step_0001
from pillarbox.stores.schema import SCHEMA_VERSION, check_schema, schema_version
from pillarbox.stores.tables import meta, metadata, outbox
from pillarbox.testing.conformance.outbox import ROUTE
from tests.conftest import FreshDatabase
from tests.domain import Order, OrderNoted, order_box, set_up, written
from tests.servers import Database

pytestmark = pytest.mark.dialects

SYNC = {"embedded": "psycopg", "mariadb": "pymysql", "sqlite": "pysqlite"}


@pytest.fixture
async def engine(empty_database: Database) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(empty_database.url())
    yield engine
    await engine.dispose()


async def _migrate(engine: AsyncEngine) -> int:
    async with engine.begin() as connection:
        return await connection.run_sync(migrate)


def _add_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a release to come will have it."""

    def step(op: Operations) -> None:
        op.add_column("pillarbox_meta", Column("more", Integer))

    monkeypatch.setattr(migrations, "STEPS", (*STEPS, step))
    monkeypatch.setattr(schema, "SCHEMA_VERSION", SCHEMA_VERSION + 1)


class TestMigrate:
    def test_the_release_knows_its_last_step(self) -> None:
        assert len(STEPS) == SCHEMA_VERSION

    async def test_steps_are_run_once(self, engine: AsyncEngine) -> None:
        async with engine.connect() as connection:
            assert await connection.run_sync(schema_version) == 0
            with pytest.raises(NotMigratedError, match="pillarbox migrate"):
                await connection.run_sync(check_schema)
        assert await _migrate(engine) == len(STEPS)
        assert await _migrate(engine) == 0
        async with engine.connect() as connection:
            await connection.run_sync(check_schema)

    async def test_a_step_more_is_run_alone(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        await _migrate(engine)
        _add_step(monkeypatch)
        async with engine.connect() as connection:
            with pytest.raises(NotMigratedError, match=f"version {SCHEMA_VERSION} and this release needs"):
                await connection.run_sync(check_schema)
        assert await _migrate(engine) == 1
        assert await _migrate(engine) == 0
        async with engine.connect() as connection:
            await connection.run_sync(check_schema)

    async def test_a_postgresql_that_is_too_old_is_refused(
        self, fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(step_0001, "OLDEST_POSTGRESQL", (99,))
        engine = create_async_engine(fresh_database("embedded", empty=True).url())
        with pytest.raises(StoreError, match="the oldest that Pillarbox supports is 99"):
            await _migrate(engine)
        async with engine.connect() as connection:
            assert await connection.run_sync(schema_version) == 0
        await engine.dispose()

    async def test_processes_that_migrate_at_once_take_turns(self, engine: AsyncEngine) -> None:
        if engine.dialect.name == "sqlite":
            from pillarbox.stores.sqlite import configure_transactions

            configure_transactions(engine.sync_engine)
        assert sorted(await asyncio.gather(*(_migrate(engine) for _ in range(4)))) == [0, 0, 0, len(STEPS)]

    async def test_a_database_that_lacks_a_step_says_what_to_do(self, engine: AsyncEngine) -> None:
        await _migrate(engine)
        async with engine.begin() as connection:  # as if a step to come added this column
            await connection.execute(text("ALTER TABLE pillarbox_routes DROP COLUMN shard_by"))
        async with engine.begin() as connection:
            with pytest.raises(NotMigratedError, match="pillarbox migrate"):
                await connection.run_sync(store_on(engine).register, [ROUTE])

    async def test_the_steps_make_what_the_tables_say(
        self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Once it is imported, by whichever test, it keeps Alembic away from our tables; here we want to see them.
        monkeypatch.setattr(pillarbox.alembic, "_is_ours", lambda _op: False)
        await _migrate(engine)

        def differences(connection: Connection) -> list[Any]:
            context = MigrationContext.configure(
                connection, opts={"compare_type": True, "compare_server_default": False}
            )
            with warnings.catch_warnings():  # SQLAlchemy has no type for numbers of transactions
                warnings.filterwarnings("ignore", "Did not recognize type 'xid8'")
                found = compare_metadata(context, metadata)
            return [difference for difference in found if difference[0] not in ("remove_index", "remove_constraint")]

        async with engine.connect() as connection:
            found = await connection.run_sync(differences)
        of_the_log = {"pillarbox_journal", "pillarbox_origin", "xid"}
        expected = of_the_log if engine.dialect.name == "postgresql" else set[str]()
        assert {difference[-1].name for difference in found} == expected
        assert {difference[0] for difference in found} <= {"remove_table", "remove_column"}

    async def test_a_newer_database_is_not_touched(self, engine: AsyncEngine) -> None:
        await _migrate(engine)
        async with engine.begin() as connection:
            await connection.execute(text("UPDATE pillarbox_meta SET schema_version = 99"))
            with pytest.raises(NotMigratedError, match="upgrade pillarbox"):
                await connection.run_sync(check_schema)

    @pytest.mark.parametrize("url", ["postgresql://", "mysql://", "mariadb://", "sqlite://"])
    def test_the_printed_sql_draws_an_install_id_of_its_own(self, url: str) -> None:
        printed = migration_sql(make_url(url).get_dialect()())
        assert "CREATE TABLE pillarbox_outbox" in printed
        assert "CREATE VIEW outbox_events" in printed
        assert any(function in printed for function in ("gen_random_uuid()", "UUID()", "randomblob(16)"))

    async def test_the_printed_sql_makes_the_same_schema(self, empty_database: Database) -> None:
        database = empty_database
        engine = create_engine(database.url(SYNC[database.kind]))
        with engine.begin() as connection:
            for statement in _statements(migration_sql(engine.dialect)):
                connection.exec_driver_sql(statement.replace("%", "%%") if database.kind == "mariadb" else statement)
            check_schema(connection)
        engine.dispose()
        async with order_box(database.url()) as box:
            await set_up(box)
            async with box.unit_of_work() as uow:
                uow.add(Order.place())
            assert await written(box.engine) == ["placed"]

    async def test_h63_a_busy_table_makes_it_give_up(
        self, postgres_database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with order_box(postgres_database.url()) as box:
            await set_up(box)
            monkeypatch.setattr(migrations, "LOCK_TIMEOUT_SECONDS", 0.1)
            monkeypatch.setattr(
                migrations, "STEPS", (*STEPS, lambda op: op.execute(text("ALTER TABLE pillarbox_outbox ADD extra int")))
            )
            async with box.engine.connect() as reader:
                await reader.execute(select(outbox))
                with pytest.raises(Exception, match="lock timeout"):
                    await _migrate(box.engine)

    async def test_the_rest_of_the_transaction_waits_as_long_as_before(self, fresh_database: FreshDatabase) -> None:
        engine = create_async_engine(fresh_database("embedded", empty=True).url())
        async with engine.begin() as connection:
            await connection.execute(text("SET LOCAL lock_timeout = '77s'"))
            await connection.run_sync(migrate)
            assert (await connection.execute(text("SHOW lock_timeout"))).scalar() == "77s"
        await engine.dispose()


def _statements(printed: str) -> list[str]:
    """Split at the ends of statements; the function's body has none of its own at the end of a line."""
    return [statement for statement in printed.replace("END\n$$;", "END\n$$;\n").split(";\n\n") if statement.strip()]


class TestShards:
    async def test_h96_the_number_of_shards_is_fixed_when_the_tables_are_made(
        self, fresh_database: FreshDatabase
    ) -> None:
        url = fresh_database("sqlite", empty=True).url()
        async with order_box(url, shards=4) as box:
            await set_up(box)
            [route] = (await box.store.census()).routes
            assert len(await box.store.take("r", lease=5, wanted={route: 100})) == 4
        async with order_box(url) as box:  # whoever says nothing takes what is there
            async with box.unit_of_work() as uow:
                uow.add(*(Order.place() for _ in range(30)))
            assert {shard for (shard,) in await written(box.engine, "shard")} == {0, 1, 2, 3}
        async with order_box(url, shards=8) as box:
            with pytest.raises(ConfigurationError, match="shards=8"):
                async with box.unit_of_work() as uow:
                    uow.add(Order.place())

    async def test_an_upgrade_does_not_change_it(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        await _migrate(engine)
        _add_step(monkeypatch)
        async with order_box(engine, shards=2 * SHARDS) as box:
            with pytest.raises(ConfigurationError, match=f"shards={2 * SHARDS}.*set up with {SHARDS}"):
                await box.migrate()
        async with engine.connect() as connection:
            assert (await connection.execute(select(meta.c.shards))).scalar_one() == SHARDS

    def test_senseless_numbers_are_refused(self) -> None:
        for shards in (0, -1, 5000):
            with pytest.raises(ConfigurationError, match="shards"):
                Pillarbox("sqlite+aiosqlite://", shards=shards)


class TestView:
    async def test_people_see_one_table(self, engine: AsyncEngine) -> None:
        async with order_box(engine) as box:
            await set_up(box)
            async with box.unit_of_work(tenant="acme") as uow:
                uow.add(order := Order.place(7))
        [row] = await written(
            engine,
            "status",
            "attempts",
            "route",
            "destination",
            "tenant_id",
            "key",
            "aggregate_type",
            "payload",
            "sent_at",
        )
        assert row == (
            "PENDING", 0, "broker:tests.order.events", "broker", "acme", str(order.id), "order",
            f'{{"order_id":"{order.id}","total_cents":7}}', None,
        )  # fmt: skip

    async def test_a_bad_body_never_fails_the_view(self, engine: AsyncEngine) -> None:
        async with order_box(engine) as box:
            await set_up(box)
            async with box.unit_of_work() as uow:
                for note in ("utf-8", "json", "good"):
                    uow.publish(OrderNoted(note=note), key="k")
        async with engine.begin() as connection:
            await connection.execute(update(outbox).where(outbox.c.id == 1).values(body=b"\xff\xfe\x00"))
            await connection.execute(update(outbox).where(outbox.c.id == 2).values(body=b"{not json"))
        assert await written(engine, "payload") == [(None,), (None,), ('{"note":"good"}',)]


ENV = """
from alembic import context
from sqlalchemy import Column, Integer, MetaData, NullPool, Table, create_engine

target_metadata = MetaData()
Table("mine", target_metadata, Column("id", Integer, primary_key=True))
url = context.config.get_main_option("sqlalchemy.url")
with create_engine(url, poolclass=NullPool).connect() as connection:
    context.configure(connection=connection, target_metadata=target_metadata)
    with context.begin_transaction():
        context.run_migrations()
"""
SCRIPT = '''
"""${message}"""
from alembic import op
import pillarbox.alembic
import sqlalchemy as sa

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}
def upgrade():
    ${upgrades if upgrades else "pass"}
def downgrade():
    ${downgrades if downgrades else "pass"}
'''


class TestOwnAlembic:
    """A user's Alembic that includes ours by one line."""

    @pytest.fixture
    def project(self, database: Database, tmp_path: Path) -> Path:
        url = database.url(SYNC[database.kind]).replace("%", "%%")
        (tmp_path / "versions").mkdir()
        (tmp_path / "env.py").write_text(ENV)
        (tmp_path / "script.py.mako").write_text(SCRIPT)
        (tmp_path / "alembic.ini").write_text(
            f"[alembic]\nscript_location = %(here)s\npath_separator = os\nsqlalchemy.url = {url}\n"
        )
        return tmp_path

    def test_upgrade_check_and_autogenerate_leave_our_tables_alone(
        self, project: Path, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _add_step(monkeypatch)
        for step in (1, 2):  # a revision for each release of ours
            _alembic(project, command.revision, f"step{step}", autogenerate=True)
            [revision] = (project / "versions").glob(f"*_step{step}.py")
            included = f"def upgrade():\n    pillarbox.alembic.upgrade(op, to={step})"
            revision.write_text(revision.read_text().replace("def upgrade():", included))
            _alembic(project, command.upgrade, "head")
        assert "No new upgrade operations" in _alembic(project, command.check)
        _alembic(project, command.revision, "nothing", autogenerate=True)
        [nothing] = (project / "versions").glob("*_nothing.py")
        assert "drop" not in nothing.read_text()
        engine = create_engine(database.url(SYNC[database.kind]))
        with engine.connect() as connection:
            check_schema(connection)
            assert {"mine", "pillarbox_outbox"} <= set(inspect(connection).get_table_names())
            assert migrate(connection) == 0  # both ways can be mixed
        engine.dispose()

    def test_a_step_that_this_release_does_not_know_is_refused(self) -> None:
        import pillarbox.alembic

        with pytest.raises(ConfigurationError, match="knows step 1, not 2"):
            pillarbox.alembic.upgrade(None, to=len(STEPS) + 1)


def _alembic(project: Path, action: Callable[..., Any], *arguments: str, **options: Any) -> str:
    said = StringIO()
    action(Config(project / "alembic.ini", stdout=said), *arguments, **options)
    return said.getvalue()
