"""Pillarbox's tables in SQLAlchemy. The migrations create them; a test compares the two.

``pillarbox_meta``    one row: the installation id, the schema version and the number of shards
``pillarbox_routes``  every route and durable handler that was ever registered, with all that a relay needs
``pillarbox_lanes``   one row per route and shard: owner, position and trouble
``pillarbox_relays``  the live relays and the routes that they serve
``pillarbox_tenants`` paused and rate-limited tenants
``pillarbox_outbox``  outbound deliveries
``pillarbox_inbound`` deliveries that wait for a consumer
``pillarbox_claims``  the waiting messages of consumers, and which of them gate their lines
``pillarbox_failures`` the failure book: failed deliveries, and those that wait behind one
``pillarbox_requests`` operators' requests for deliveries; the owner of the lane carries them out and deletes the rows
``pillarbox_audit``   the actions of operators, kept permanently
``pillarbox_consumers`` every consumer that was ever registered, and its progress
``pillarbox_inbox``   the messages that a consumer knows
``pillarbox_unsent``  a view of unsent deliveries, for counts
``outbox_events``     a view of all deliveries, for operators

On PostgreSQL there are two more, known only to `stores.log` and the migrations: the journal of settled batches, and the
origin of the database.

Columns only. The migrations define indexes, constraints and dialect options: defining them here would load every
dialect of SQLAlchemy.
"""

from __future__ import annotations

from sqlalchemy import (
    BINARY,
    BigInteger,
    Boolean,
    Column,
    Double,
    Identity,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Uuid,
    text,
)

from ..outbox import OUTBOUND, TABLES
from .columns import AutoId, ByteExact, EventName, Key, LongBytes, LongText, Name, Tenant, Topic, Utc, now

metadata = MetaData()

meta = Table(
    "pillarbox_meta",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("install_id", Uuid, nullable=False),
    Column("schema_version", Integer, nullable=False),
    Column("shards", Integer, nullable=False),
    Column("shard_generation", Integer, nullable=False),
)

routes = Table(
    "pillarbox_routes",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("name", Name, nullable=False),
    Column("destination", String(100), nullable=False),
    Column("topic", Name, nullable=False),
    Column("schema_version", Integer),
    Column("on_failure", String(10), nullable=False),
    Column("retry_base", Double, nullable=False),
    Column("retry_cap", Double, nullable=False),
    Column("retry_attempts", Integer, nullable=False),
    Column("shard_by", String(10), nullable=False),
    Column("updated_at", Utc, nullable=False),
)

lanes = Table(
    "pillarbox_lanes",
    metadata,
    Column("route", BigInteger, primary_key=True, autoincrement=False),
    Column("shard", Integer, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False, server_default="0"),
    Column("token", Uuid),
    Column("locked_by", String(200)),
    Column("locked_until", Utc),
    Column("batch", BigInteger, nullable=False, server_default="0"),
    Column("next_number", BigInteger, nullable=False, server_default="1"),
    Column("announced", LongText),
    Column("announced_low", BigInteger),
    Column("announced_high", BigInteger),
    Column("tries", Integer, nullable=False, server_default="0"),
    Column("cursor", LongText),
    Column("detours", LongText),
    Column("paused", Boolean, nullable=False, server_default=text("false")),
    Column("rate", Double),
    Column("trouble", LongText),
    Column("trouble_until", Utc),
)

relays = Table(
    "pillarbox_relays",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("started_at", Utc, nullable=False, server_default=now()),
    Column("expires_at", Utc, nullable=False),
    Column("serves", LongText, nullable=False),
    Column("shards", LongText),
)

tenants = Table(
    "pillarbox_tenants",
    metadata,
    Column("tenant", ByteExact(200), primary_key=True),
    Column("paused", Boolean, nullable=False, server_default=text("false")),
    Column("rate", Double),
)


def _deliveries(name: str) -> Table:
    return Table(
        name,
        metadata,
        Column("id", AutoId, Identity(), primary_key=True),
        Column("event_id", Uuid, nullable=False),
        Column("event_type", EventName, nullable=False),
        Column("route", BigInteger, nullable=False),
        Column("shard", Integer, nullable=False),
        Column("schema_version", Integer, nullable=False),
        Column("topic", Topic, nullable=False),
        Column("key", Key, nullable=False),
        Column("tenant", Tenant),
        Column("headers", LongText, nullable=False),
        Column("body", LongBytes, nullable=False),
        Column("created_at", Utc, nullable=False, server_default=now()),
        Column("status", String(10), nullable=False, server_default="PENDING"),
        Column("attempts", Integer, nullable=False, server_default="0"),
        Column("batch", BigInteger),
        Column("number", BigInteger),
        Column("last_error", LongText),
        Column("sent_at", Utc),
    )


deliveries = {name: _deliveries(name) for name in TABLES}
"""The tables of deliveries by name."""
outbox = deliveries[OUTBOUND]

failures = Table(
    "pillarbox_failures",
    metadata,
    Column("route", BigInteger, primary_key=True, autoincrement=False),
    Column("shard", Integer, primary_key=True, autoincrement=False),
    Column("row_id", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant", ByteExact(200)),
    Column("key", ByteExact(512), nullable=False),
    Column("status", String(10), nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("available_at", Utc),
    Column("last_error", LongText),
    Column("event_id", Uuid),
    Column("headers", LongText),
    Column("body", LongBytes),
)

requests = Table(
    "pillarbox_requests",
    metadata,
    Column("id", AutoId, Identity(), primary_key=True),
    Column("route", BigInteger, nullable=False),
    Column("shard", Integer, nullable=False),
    Column("row_id", BigInteger, nullable=False),
    Column("action", String(10), nullable=False),
    Column("event_id", Uuid),
    Column("body", LongBytes),
    Column("audit", BigInteger, nullable=False),
)

audit = Table(
    "pillarbox_audit",
    metadata,
    Column("id", AutoId, Identity(), primary_key=True),
    Column("at", Utc, nullable=False, server_default=now()),
    Column("who", String(200), nullable=False),
    Column("action", String(20), nullable=False),
    Column("target", LongText, nullable=False),
    Column("event_id", Uuid),
    Column("reason", LongText),
    Column("details", LongText),
)

consumers = Table(
    "pillarbox_consumers",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("name", Name, nullable=False),
    Column("kind", String(20), nullable=False),
    Column("source", String(100), nullable=False),
    Column("topics", LongText, nullable=False),
    Column("generation", Integer, nullable=False, server_default="1"),
    Column("handled", BigInteger, nullable=False, server_default="0"),
    Column("last_event_id", Uuid),
    Column("last_occurred_at", Utc),
    Column("lag", Double),
    Column("seen_at", Utc),
    Column("updated_at", Utc, nullable=False),
    Column("running", LongText),
)

inbox = Table(
    "pillarbox_inbox",
    metadata,
    Column("consumer", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant", ByteExact(200), primary_key=True, server_default=""),
    Column("event_id", Uuid, primary_key=True),
    Column("schema_version", Integer, nullable=False),
    Column("digest", LargeBinary(16).with_variant(BINARY(16), "mysql", "mariadb"), nullable=False),
    Column("at", Utc, nullable=False, server_default=now()),
)

claims = Table(
    "pillarbox_claims",
    metadata,
    Column("consumer", BigInteger, primary_key=True, autoincrement=False),
    Column("line", BigInteger, primary_key=True, autoincrement=False),
    Column("inbox_id", Uuid, primary_key=True),
    Column("tenant", ByteExact(200), nullable=False, server_default=""),
    Column("delivery", Uuid, nullable=False),
    Column("gate", Boolean, nullable=False),
    Column("refused", LongText),
)
