"""``pillarbox migrate``: the schema of this release."""

from __future__ import annotations

from pathlib import Path

import click
from sqlalchemy import make_url

from ..app import Pillarbox
from ..settings import Settings
from ..stores.migrations import migration_sql
from ..stores.schema import schema_version
from .arguments import options
from .database import load_settings, opened, run
from .output import emit


@click.command()
@click.option("--sql", is_flag=True, help="Print all statements instead of running them; connects to nothing.")
@click.option(
    "--dialect",
    type=click.Choice(["postgresql", "mysql", "mariadb", "sqlite"]),
    help="With --sql: the database that they are for.  [default: that of database_url]",
)
@options
def command(config: Path | None, as_json: bool, sql: bool, dialect: str | None) -> None:
    """Bring the database to the schema of this release. Repeating it is fine, at the same time too."""
    if dialect and not sql:
        raise click.UsageError("--dialect goes with --sql: without it, the database itself decides.")
    settings = load_settings(config)
    if sql:
        name = dialect or _dialect(settings)
        statements = migration_sql(make_url(f"{name}://").get_dialect()())
        emit({"dialect": name, "sql": statements}, statements.rstrip(), as_json=as_json)
        return
    steps, version = run(_migrate(settings))
    done = f"{steps} step{'s' if steps != 1 else ''} done" if steps else "nothing to do"
    emit({"steps": steps, "schema_version": version}, f"{done}: schema version {version}", as_json=as_json)


def _dialect(settings: Settings) -> str:
    url = settings.database_url
    return make_url(url.get_secret_value()).get_backend_name() if url else "postgresql"


async def _migrate(settings: Settings) -> tuple[int, int]:
    async with opened(settings, create=True) as engine:
        steps = await Pillarbox(engine, shards=settings.shards).migrate()
        async with engine.connect() as connection:
            return steps, await connection.run_sync(schema_version)
