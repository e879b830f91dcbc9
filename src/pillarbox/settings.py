"""Settings: one YAML file and the environment, with every key documented and checked.

An environment variable overrides the file, and the file overrides the default; `Settings.origins` says where a value
comes from. Only the command line reads settings: the library takes arguments.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml  # type: ignore[import-untyped]  # has no stubs of its own
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError as VariableError
from sqlalchemy import URL, make_url

from .errors import SettingsError
from .redaction import redacted
from .stores.drivers import with_driver

PREFIX = "PILLARBOX_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
FILE = Path("pillarbox.yaml")
DEFAULT = "default"

# A Kubernetes service called "pillarbox" adds these variables to every pod beside it.
_KUBERNETES = re.compile(rf"{PREFIX}(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_.*)?)")
# Errors do not repeat their values.
_MAY_HOLD_SECRETS = ("database_url", "transports")
_SECRET_OPTION = re.compile(r"pass|secret|token", re.IGNORECASE)


def masked(url: str | URL) -> str:
    """A database URL without its password, wherever the URL has it."""
    parsed = make_url(url)
    if parsed.host and "@" in parsed.host:  # a password with a bare @: everything before the last one is secret
        parsed = parsed.set(host=parsed.host.rpartition("@")[2])
    hidden = {name: "***" for name in parsed.query if _SECRET_OPTION.search(name)}
    return parsed.update_query_dict(hidden).render_as_string(hide_password=True).replace("%2A%2A%2A", "***")


def _check_url(secret: SecretStr) -> SecretStr:
    return SecretStr(with_driver(secret.get_secret_value()).render_as_string(hide_password=False))


def _yaml_off(value: object) -> object:
    return "off" if value is False else value  # YAML reads a bare `off` as false


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a whole number")  # noqa: TRY004  pydantic takes no TypeError
    return value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


class Service(BaseModel):
    """The service that writes the events."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = Field(
        default=None, description="Name of this service: the header `source_service` of its events.", examples=["shop"]
    )
    version: str | None = Field(
        default=None, description="Its version: the header `source_version`.", examples=["1.4.2"]
    )


class RelaySettings(BaseModel):
    """Settings of `pillarbox relay`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lease: Annotated[float, Field(gt=0, le=3600), BeforeValidator(_no_boolean)] = Field(
        default=5.0, description="Seconds after which the lanes of a relay that died are taken over.", examples=[5.0]
    )
    batch: Annotated[int, Field(ge=1, le=10_000), BeforeValidator(_no_boolean)] = Field(
        default=500, description="Messages per lane and turn.", examples=[500]
    )
    window_bytes: Annotated[int, Field(ge=65_536), BeforeValidator(_no_boolean)] = Field(
        default=33_554_432, description="Bytes of message bodies that a relay may hold in memory.", examples=[33554432]
    )
    grace: Annotated[float, Field(gt=0, le=3600), BeforeValidator(_no_boolean)] = Field(
        default=10.0, description="Seconds that lanes may take to finish when the relay stops.", examples=[10.0]
    )
    source: Literal["cursor", "cdc"] = Field(
        default="cursor",
        description="`cdc` brings bodies and wake-ups by PostgreSQL's logical replication; else the table does.",
        examples=["cdc"],
    )
    slot: str | None = Field(
        default=None,
        description="Name of a replication slot that is kept for this relay, with `cdc`; by default a temporary one.",
        examples=["pillarbox_shop"],
    )


class Settings(BaseSettings):
    """All settings. `load` reads them."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", env_ignore_empty=True, extra="forbid", frozen=True
    )

    database_url: Annotated[SecretStr, AfterValidator(_check_url)] | None = Field(
        default=None,
        description="SQLAlchemy URL of the database; without one, an embedded PostgreSQL is used.",
        examples=["postgresql+asyncpg://app@localhost/shop"],
    )
    home: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        default=None,
        description="Folder for the embedded PostgreSQL; by default where the platform keeps such data.",
        examples=["~/.pillarbox"],
    )
    shards: Annotated[int, Field(ge=1, le=4096), BeforeValidator(_no_boolean)] | None = Field(
        default=None,
        description="Number of shards, fixed by the first migration (16 if not given); later the database must agree.",
        examples=[16],
    )
    tenancy: Annotated[Literal["off", "required"], BeforeValidator(_yaml_off)] = Field(
        default="off", description="`required` refuses events without a tenant.", examples=["required"]
    )
    transports: dict[str, str] = Field(
        default={},
        description="Destinations by the names that routes use, each with its address; `logging:` only logs.",
        examples=[{"broker": "logging:"}],
    )
    relay: RelaySettings = Field(default_factory=RelaySettings)
    service: Service = Field(default_factory=Service)
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = Field(
        default="warning", description="What is logged on standard error.", examples=["info"]
    )
    log_format: Annotated[Literal["text", "json"], BeforeValidator(_lower)] = Field(
        default="text", description="Lines for people, or one JSON object per line.", examples=["json"]
    )
    tracing: Annotated[Literal["off", "otel"], BeforeValidator(_yaml_off)] = Field(
        default="off",
        description="`otel` lets `pillarbox relay` make OpenTelemetry spans, for the global tracer provider.",
        examples=["otel"],
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  the interface
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  the interface
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003  the interface
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment variables first, then the constructor's arguments: in `load`, the content of the file."""
        return env_settings, init_settings

    @classmethod
    def load(cls, path: Path | None = None) -> Self:
        """Read the environment and the file: ``path``, or ``PILLARBOX_CONFIG``, or ``./pillarbox.yaml`` if it exists.

        Raises `SettingsError` with one line per mistake.
        """
        variables = {name.upper(): value for name, value in os.environ.items() if name.upper().startswith(PREFIX)}
        given = _Given(_find_file(path), {name: value for name, value in variables.items() if value})
        mistakes = list(given.unknown_variables())
        settings = None
        try:
            settings = cls(**given.written)
        except ValidationError as error:
            mistakes += [given.explain(details) for details in error.errors()]
        except VariableError as error:
            # The variable of a group that is not JSON counts as unknown, and has its line already.
            mistakes += given.without_json() or ([] if mistakes else [str(error)])
        if settings is None or mistakes:
            raise SettingsError("\n".join(mistakes))
        settings._origins.update((key, given.origin(key)) for key in KEYS)
        return settings

    def origins(self) -> dict[str, str]:
        """The origin of each value: the name of a variable, the path of the file, or ``default``."""
        return dict(self._origins)

    def shown(self) -> dict[str, str | int | None]:
        """The value of each key for display, without passwords."""
        return {key: _shown(attrgetter(key)(self)) for key in KEYS}


class _Given:
    """The given values and their origins."""

    def __init__(self, file: Path | None, variables: Mapping[str, str]) -> None:
        self.file = file
        self.written = _read(file) if file else {}
        self._variables = variables

    def origin(self, key: str) -> str:
        name = variable(key)
        if used := next((each for each in self._variables if each == name or each.startswith(f"{name}__")), None):
            return used
        group, _, rest = key.partition(".")
        with suppress(ValueError, TypeError):  # a value that is not a JSON object has no keys
            if rest in json.loads(self._variables.get(variable(group), "{}")):
                return variable(group)
        value: Any = self.written
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return DEFAULT
            value = value[part]
        return str(self.file)

    def unknown_variables(self) -> Iterator[str]:
        known = {variable(key): key for key in KEYS}
        groups = tuple(f"{name.rpartition('__')[0]}__" for name in known if "__" in name)
        for name in sorted(self._variables.keys() - known.keys() - {FILE_VARIABLE}):
            # Keys within a group are checked with the group.
            if not name.startswith(groups) and not _KUBERNETES.fullmatch(name):
                inside = [each for each in known if each.startswith(f"{name}__")]
                instead = f"write {' or '.join(inside)}" if inside else _suggestion(name, known)
                yield f"{name}: there is no such setting; {instead}"

    def without_json(self) -> list[str]:
        """A line for each variable that should be JSON and is not. Its value may be a secret and is left out."""
        lines = []
        for key, field in KEYS.items():
            if isinstance(field.default, dict) and (value := self._variables.get(variable(key))):
                try:
                    json.loads(value)
                except ValueError:
                    example = json.dumps(field.examples[0] if field.examples else {})
                    lines.append(f"{key} (from {variable(key)}): is no JSON; write {variable(key)}='{example}'")
        return lines

    def explain(self, details: ErrorDetails) -> str:
        key = ".".join(map(str, details["loc"]))
        where = f"{key} (from {self.origin(key)})"
        if details["type"] == "extra_forbidden":
            return f"{where}: there is no such key; {_suggestion(key, KEYS)}"
        what = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
        return f"{where}: {what}" + ("" if details["loc"][0] in _MAY_HOLD_SECRETS else f"; it is {details['input']!r}")


def variable(key: str) -> str:
    """The name of the environment variable of a key."""
    return PREFIX + key.upper().replace(".", "__")


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


KEYS: Mapping[str, FieldInfo] = dict(_keys(Settings))
"""Every key by its dotted name."""


def _find_file(path: Path | None) -> Path | None:
    if path is not None:
        return path
    if named := os.environ.get(FILE_VARIABLE):
        return Path(named)
    return FILE if FILE.exists() else None


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text("utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except OSError as error:
        raise SettingsError(
            f"{file}: cannot be read ({error.strerror}); correct --config or {FILE_VARIABLE}"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file}: is no UTF-8 text at byte {error.start}; save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SettingsError(f"{file}: is no YAML at line {line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{file}: is no YAML: {str(error).splitlines()[0]}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{file}: must hold keys and values, like `log_level: info`")
    if repeated := [f"{file}: {mistake}; keep one of them" for mistake in _repetitions(node)]:
        raise SettingsError("\n".join(repeated))
    return {str(key): value for key, value in content.items() if value is not None}  # a bare `service:` sets nothing


def _repetitions(mapping: Any) -> Iterator[str]:
    """Repeated keys: YAML silently uses the last one."""
    seen = set()
    for key, value in mapping.value:
        if key.value in seen:
            yield f"{key.value} stands there again at line {key.start_mark.line + 1}"
        seen.add(key.value)
        if isinstance(value, yaml.MappingNode):
            yield from _repetitions(value)


def _suggestion(name: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"take it out, or use one of {', '.join(known)}"


def _shown(value: SecretStr | Path | str | float | Mapping[str, str] | None) -> Any:
    if isinstance(value, SecretStr):
        return masked(value.get_secret_value())
    if isinstance(value, Mapping):
        return {name: redacted(address) for name, address in value.items()}
    return str(value) if isinstance(value, Path) else value
