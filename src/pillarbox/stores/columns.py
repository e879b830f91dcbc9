"""Column types and clock expressions that mean the same on PostgreSQL, MariaDB/MySQL and SQLite."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    TIMESTAMP,
    VARBINARY,
    BigInteger,
    BindParameter,
    DateTime,
    Dialect,
    Integer,
    LargeBinary,
    String,
    Text,
    literal,
    types,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


class ByteExact(types.TypeDecorator[str]):
    """Text that is compared byte by byte: no collation, no padding, no folding of case or accents.

    MySQL's binary collations still ignore trailing spaces, so there the column is binary.
    """

    impl = String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length

    def load_dialect_impl(self, dialect: Dialect) -> types.TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(VARBINARY(self.length))
        return dialect.type_descriptor(String(self.length))

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any] | None:
        return super().bind_processor(dialect) if dialect.name in ("mysql", "mariadb") else None

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:  # noqa: ARG002  the interface
        return None if value is None else value.encode()

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ARG002  the interface
        return value.decode() if isinstance(value, (bytes, bytearray)) else value


class Utc(types.TypeDecorator[datetime]):
    """A time with zone in UTC, to the microsecond."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> types.TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(TIMESTAMP(timezone=True))
        if dialect.name in ("mysql", "mariadb"):
            from sqlalchemy.dialects import mysql  # noqa: PLC0415  loaded already, if this is the dialect

            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime())

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or dialect.name == "postgresql":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002  the interface
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class LongBytes(types.TypeDecorator[bytes]):
    """Bytes of any length; MySQL's default ends at 64 kB."""

    impl = LargeBinary
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> types.TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            from sqlalchemy.dialects import mysql  # noqa: PLC0415  loaded already, if this is the dialect

            return dialect.type_descriptor(mysql.LONGBLOB())
        return dialect.type_descriptor(LargeBinary())


class LongText(types.TypeDecorator[str]):
    """Text of any length; MySQL's default ends at 64 kB."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> types.TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            from sqlalchemy.dialects import mysql  # noqa: PLC0415  loaded already, if this is the dialect

            return dialect.type_descriptor(mysql.LONGTEXT())
        return dialect.type_descriptor(Text())


class TransactionId(types.UserDefinedType[int]):
    """A transaction id, on PostgreSQL."""

    cache_ok = True

    def get_col_spec(self, **_kw: Any) -> str:
        return "xid8"


AutoId = BigInteger().with_variant(Integer, "sqlite")
Name = String(400)

# The texts of a delivery. PostgreSQL would call a function for each that has a length, in every INSERT of a business
# transaction; it is checked before.
EventName = String(200).with_variant(Text(), "postgresql")
Topic = Name.with_variant(Text(), "postgresql")
Key = ByteExact(512).with_variant(Text(), "postgresql")
Tenant = ByteExact(200).with_variant(Text(), "postgresql")


class _FromNow(FunctionElement[datetime]):
    """The database's clock at the moment of evaluation, not at the start of the transaction, plus some seconds."""

    type = Utc()
    name = "from_now"
    inherit_cache = True


def from_now(seconds: float | BindParameter[float] = 0.0) -> _FromNow:
    """Now by the database's clock, plus some seconds."""
    return _FromNow(seconds if isinstance(seconds, BindParameter) else literal(float(seconds)))


class now(FunctionElement[datetime]):  # noqa: N801  reads like a SQL function
    """The database's clock at the moment of evaluation, in UTC."""

    type = Utc()
    name = "now"
    inherit_cache = True


@compiles(now, "postgresql")
def _postgres_plain_now(_element: now, _compiler: SQLCompiler, **_kw: Any) -> str:
    return "clock_timestamp()"


@compiles(now, "mysql")
@compiles(now, "mariadb")
def _mysql_plain_now(_element: now, _compiler: SQLCompiler, **_kw: Any) -> str:
    return "(UTC_TIMESTAMP(6))"


@compiles(now, "sqlite")
def _sqlite_plain_now(_element: now, _compiler: SQLCompiler, **_kw: Any) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now'))"


@compiles(_FromNow, "postgresql")
def _postgres_now(element: _FromNow, compiler: SQLCompiler, **kw: Any) -> str:
    return f"(clock_timestamp() + make_interval(secs => {compiler.process(element.clauses, **kw)}))"


@compiles(_FromNow, "mysql")
@compiles(_FromNow, "mariadb")
def _mysql_now(element: _FromNow, compiler: SQLCompiler, **kw: Any) -> str:
    return f"(UTC_TIMESTAMP(6) + INTERVAL ({compiler.process(element.clauses, **kw)}) * 1000000 MICROSECOND)"


@compiles(_FromNow, "sqlite")
def _sqlite_now(element: _FromNow, compiler: SQLCompiler, **kw: Any) -> str:
    return f"strftime('%Y-%m-%d %H:%M:%f', 'now', ({compiler.process(element.clauses, **kw)}) || ' seconds')"
