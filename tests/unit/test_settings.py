"""Settings: where values come from, what is refused, and what is never shown."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import SecretStr

from pillarbox.errors import SettingsError
from pillarbox.settings import KEYS, Settings, masked, variable

DOCS = Path(__file__).parents[2] / "docs" / "reference"

Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [each for each in os.environ if each.upper().startswith("PILLARBOX_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the settings file that is found by itself."""

    def write(text: str) -> Path:
        (tmp_path / "pillarbox.yaml").write_text(text, "utf-8")
        return tmp_path / "pillarbox.yaml"

    return write


def mistakes(path: Path | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        Settings.load(path)
    return str(caught.value).splitlines()


def test_without_anything_there_are_defaults() -> None:
    settings = Settings.load()
    assert settings.database_url is None
    assert settings.shown() == {
        "database_url": None,
        "home": None,
        "shards": None,
        "tenancy": "off",
        "transports": {},
        "relay.lease": 5.0,
        "relay.batch": 500,
        "relay.window_bytes": 33_554_432,
        "relay.grace": 10.0,
        "relay.source": "cursor",
        "relay.slot": None,
        "service.name": None,
        "service.version": None,
        "log_level": "warning",
        "log_format": "text",
        "tracing": "off",
    }
    assert set(settings.origins().values()) == {"default"}


def test_a_variable_wins_over_the_file_and_the_file_over_the_default(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("shards: 4\nlog_level: error\nservice:\n  name: shop\n  version: '1'\n")
    monkeypatch.setenv("PILLARBOX_SHARDS", "8")
    monkeypatch.setenv("PILLARBOX_SERVICE__VERSION", "2")
    settings = Settings.load()
    assert (settings.shards, settings.log_level, settings.tenancy) == (8, "error", "off")
    assert (settings.service.name, settings.service.version) == ("shop", "2")
    assert settings.origins() == {
        "database_url": "default",
        "home": "default",
        "shards": "PILLARBOX_SHARDS",
        "tenancy": "default",
        "transports": "default",
        **{f"relay.{name}": "default" for name in ("lease", "batch", "window_bytes", "grace", "source", "slot")},
        "service.name": "pillarbox.yaml",
        "service.version": "PILLARBOX_SERVICE__VERSION",
        "log_level": "pillarbox.yaml",
        "log_format": "default",
        "tracing": "default",
    }


def test_the_file_is_the_given_one_else_the_named_one_else_the_one_here(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("shards: 1")
    assert Settings.load().shards == 1
    (tmp_path / "named.yaml").write_text("shards: 2")
    monkeypatch.setenv("PILLARBOX_CONFIG", "named.yaml")
    assert Settings.load().shards == 2
    (tmp_path / "given.yaml").write_text("shards: 3")
    assert Settings.load(tmp_path / "given.yaml").shards == 3


@pytest.mark.parametrize("text", ["", "# nothing\n", "service:\nshards:\n"])
def test_a_file_may_set_nothing(write: Write, text: str) -> None:
    write(text)
    assert set(Settings.load().origins().values()) == {"default"}


def test_an_empty_variable_is_not_there(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("shards: 4")
    monkeypatch.setenv("PILLARBOX_SHARDS", "")
    assert Settings.load().origins()["shards"] == "pillarbox.yaml"


def test_yaml_reads_off_as_false_and_we_do_not(write: Write) -> None:
    write("tenancy: off")
    assert Settings.load().tenancy == "off"


def test_log_levels_are_taken_in_capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILLARBOX_LOG_LEVEL", "INFO")
    assert Settings.load().log_level == "info"


def test_home_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("PILLARBOX_HOME", "~/box")
    assert Settings.load().home == Path("/home/ada/box")
    monkeypatch.setenv("PILLARBOX_HOME", "box")
    assert Settings.load().home == tmp_path / "box"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("postgresql://app@db/shop", "postgresql+asyncpg://app@db/shop"),
        ("postgresql+psycopg://app@db/shop", "postgresql+psycopg://app@db/shop"),
        ("mysql://app@db/shop", "mysql+asyncmy://app@db/shop"),
        ("mariadb+aiomysql://app@db/shop", "mariadb+aiomysql://app@db/shop"),
        ("sqlite:///shop.db", "sqlite+aiosqlite:///shop.db"),
        ("postgresql://app:p%40ss%2F@db/shop?ssl=require", "postgresql+asyncpg://app:p%40ss%2F@db/shop?ssl=require"),
    ],
)
def test_a_url_gets_an_async_driver(monkeypatch: pytest.MonkeyPatch, given: str, used: str) -> None:
    monkeypatch.setenv("PILLARBOX_DATABASE_URL", given)
    assert Settings.load().database_url == SecretStr(used)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("geheim", "the database URL cannot be used; write one with an async driver, like postgresql+asyncpg://"),
        ("postgresql://app:geheim@db:port/shop", "with special characters as %XX"),
        ("postgres://app:geheim@db/shop", "postgres is not supported; write postgresql://"),
        ("postgresql+psycopg2://app:geheim@db/shop", "psycopg2 is no async driver; write postgresql+asyncpg://"),
        ("sqlite+pysqlite:///geheim.db", "pysqlite is no async driver; write sqlite+aiosqlite://"),
    ],
)
def test_a_url_that_cannot_be_used_is_explained_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, url: str, what: str
) -> None:
    monkeypatch.setenv("PILLARBOX_DATABASE_URL", url)
    (line,) = mistakes()
    assert line.startswith("database_url (from PILLARBOX_DATABASE_URL): ")
    assert what in line
    assert "geheim" not in line


def test_no_password_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILLARBOX_DATABASE_URL", "postgresql://app:geheim@db/shop?sslpassword=geheim&ssl=require")
    settings = Settings.load()
    assert settings.shown()["database_url"] == "postgresql+asyncpg://app:***@db/shop?ssl=require&sslpassword=***"
    assert "geheim" not in repr(settings) + str(settings) + settings.model_dump_json()


@pytest.mark.parametrize(
    "content",
    [
        "transports: {broker: {url: 'pulsar://host', token: geheim}}",
        "transports: {broker: ['pulsar://host?token=geheim']}",
        "transports: pulsar://host?token=geheim",
        "database_url: {password: geheim}",
    ],
)
def test_a_mistake_beside_a_secret_does_not_show_it(write: Write, content: str) -> None:
    write(content)
    (line,) = mistakes()
    assert line.startswith(content.partition(":")[0])
    assert "should be a valid" in line
    assert "geheim" not in line


def test_a_url_without_a_password_is_shown_as_it_is() -> None:
    assert masked("sqlite+aiosqlite:///shop.db") == "sqlite+aiosqlite:///shop.db"


def test_every_mistake_has_a_line_of_its_own(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("shrads: 4\nshards: yes\ntenancy: maybe\nservice: {naem: shop}\n17: 4\n")
    monkeypatch.setenv("PILLARBOX_LOG_LEVEL", "loud")
    monkeypatch.setenv("PILLARBOX_DATABASE", "x")
    monkeypatch.setenv("PILLARBOX_SERVICE__VRESION", "x")
    assert sorted(mistakes()) == [
        "17 (from pillarbox.yaml): there is no such key; take it out, or use one of " + ", ".join(KEYS),
        "PILLARBOX_DATABASE: there is no such setting; did you mean PILLARBOX_DATABASE_URL?",
        "log_level (from PILLARBOX_LOG_LEVEL): should be 'debug', 'info', 'warning' or 'error'; it is 'loud'",
        "service.naem (from pillarbox.yaml): there is no such key; did you mean service.name?",
        "service.vresion (from PILLARBOX_SERVICE__VRESION): there is no such key; did you mean service.version?",
        "shards (from pillarbox.yaml): must be a whole number; it is True",
        "shrads (from pillarbox.yaml): there is no such key; did you mean shards?",
        "tenancy (from pillarbox.yaml): should be 'off' or 'required'; it is 'maybe'",
    ]


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("SHARDS", "0", "greater than or equal to 1; it is '0'"),
        ("SHARDS", "4097", "less than or equal to 4096; it is '4097'"),
        ("SHARDS", "many", "valid integer"),
        ("SHARDS__MAX", "1", "no such setting; did you mean PILLARBOX_SHARDS?"),
        ("SERVICE", "shop", "no such setting; write PILLARBOX_SERVICE__NAME or PILLARBOX_SERVICE__VERSION"),
        ("RELAY", '{"lease": 3}', "no such setting; write PILLARBOX_RELAY__LEASE or PILLARBOX_RELAY__BATCH or"),
        ("TRANSPORTS", '{"sink": 3}', "transports.sink (from PILLARBOX_TRANSPORTS): should be a valid string"),
        ("TRANSPORTS", "[]", "transports (from PILLARBOX_TRANSPORTS): should be a valid dictionary"),
        ("TRANSPORTS", '{"sink": ', """is no JSON; write PILLARBOX_TRANSPORTS='{"broker": "logging:"}'"""),
        ("TRANSPORTS", "sink", "transports (from PILLARBOX_TRANSPORTS): is no JSON; write"),
        ("SERVICE__NAME__FIRST", "shop", "valid string"),
    ],
)
def test_variables_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, name: str, value: str, what: str) -> None:
    monkeypatch.setenv(f"PILLARBOX_{name}", value)
    (line,) = mistakes()
    assert f"PILLARBOX_{name}" in line
    assert what in line


def test_a_variable_without_json_does_not_hide_other_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILLARBOX_TRANSPORTS", "amqp://app:geheim@broker")
    monkeypatch.setenv("PILLARBOX_SHRADS", "4")
    lines = mistakes()
    assert [line.partition(" ")[0] for line in lines] == ["PILLARBOX_SHRADS:", "transports"]
    assert "geheim" not in "".join(lines)


def test_the_file_and_the_variable_may_each_bring_transports(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("transports: {one: 1}")
    monkeypatch.setenv("PILLARBOX_TRANSPORTS", '{"other": 2}')
    assert sorted(line.partition(":")[0] for line in mistakes()) == [
        "transports.one (from pillarbox.yaml)",
        "transports.other (from PILLARBOX_TRANSPORTS)",
    ]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"shards: [", "pillarbox.yaml: is no YAML at line 1: "),
        (b"shards: 1\n\thome: x", "pillarbox.yaml: is no YAML at line 2: "),
        (b"home: \x07", "pillarbox.yaml: is no YAML: "),
        (b"!!python/object/apply:os.system [ls]", "could not determine a constructor"),
        (b"- shards", "pillarbox.yaml: must hold keys and values"),
        (b"shards", "pillarbox.yaml: must hold keys and values"),
        (b"home: \xff", "pillarbox.yaml: is no UTF-8 text at byte 6"),
        (b"shards: 1\nshards: 2", "pillarbox.yaml: shards stands there again at line 2; keep one of them"),
        (b"service:\n  name: a\n  name: b", "name stands there again at line 3"),
        (b"service: shop", "service (from pillarbox.yaml): should be a valid dictionary"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "pillarbox.yaml").write_bytes(content)
    (line,) = mistakes()
    assert what in line


def test_a_file_that_was_asked_for_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        "cannot be read (No such file or directory); correct --config or PILLARBOX_CONFIG"
        in mistakes(tmp_path / "absent.yaml")[0]
    )
    assert "cannot be read (Is a directory)" in mistakes(tmp_path)[0]
    monkeypatch.setenv("PILLARBOX_CONFIG", "absent.yaml")
    assert mistakes()[0].startswith("absent.yaml: cannot be read")


def test_variables_that_kubernetes_makes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR"):
        monkeypatch.setenv(f"PILLARBOX_{name}", "10.0.0.1")
    assert set(Settings.load().origins().values()) == {"default"}


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings.load().shards = 3


@pytest.mark.parametrize("module", ["pillarbox", "pillarbox.app"])
def test_the_library_knows_nothing_of_settings(module: str) -> None:
    heavy = ["pydantic", "pydantic_settings", "yaml", "pillarbox.settings"]
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_page_describes_every_key() -> None:
    page = (DOCS / "settings.md").read_text("utf-8").splitlines()
    rows = [line for line in page if line.startswith("| `")]
    assert rows == [
        f"| `{key}` | `{variable(key)}` | {f'`{field.default}`' if field.default else 'none'} | {field.description} |"
        for key, field in KEYS.items()
    ]
