"""A session belongs to one tenant.

Models that inherit from `TenantScoped` have a ``tenant_id``. A session that touches one of them gets a tenant, which it
keeps: the given one, or else the context's. The tenant is stored in new rows, checked at flush and load, and added as a
condition to every ORM statement. Statements that cannot have that condition (Core and text statements, raw connections,
bulk writes) are refused on tenant tables unless marked. On PostgreSQL, `row_level_security` is a second line of
defence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, MetaData, event, false, inspect, text
from sqlalchemy.orm import (
    ORMExecuteState,
    QueryContext,
    Session,
    SessionTransaction,
    UOWTransaction,
    object_session,
    with_loader_criteria,
)
from sqlalchemy.orm.attributes import get_history

from .context import current_context
from .errors import ConfigurationError, TenancyError
from .route import check_tenant
from .tenant_scope import (
    TenantScoped,
    levels,
    raw_table,
    scoped_class,
    scoped_tables,
    table_in,
    unconditional,
    unnamed_class,
)

__all__ = ["SETTING", "UNSCOPED", "Tenancy", "TenantScoped", "check_role", "row_level_security", "session_tenant"]

UNSCOPED = "pillarbox_unscoped"
"""Execution option that lets a statement or connection see all tenants; in ``session.info``, the whole session."""

SETTING = "pillarbox.tenant"
"""The PostgreSQL setting that row level security reads."""

_TENANT = "pillarbox_tenant"
_ANNOUNCED = "pillarbox_announced"


class Tenancy:
    """The tenant rules of one box."""

    def __init__(self, mode: Literal["off", "required"] = "off", *, row_security: bool = False) -> None:
        if mode not in ("off", "required"):
            raise ConfigurationError(f"tenancy is 'off' or 'required', got {mode!r}")
        self.required = mode == "required"
        """Whether every session needs a tenant, also one that touches no tenant models."""
        self._row_security = row_security

    def assign(self, session: Session, tenant: str | None) -> None:
        """Give the session its tenant, which cannot change afterwards."""
        own = session_tenant(session)
        if tenant is None or tenant == own:
            return
        if own is not None:
            raise _turned(own, tenant)
        session.info[_TENANT] = check_tenant(tenant)
        if self._row_security and session.in_transaction():
            self._check_announced(session, tenant)

    def of(self, session: Session) -> str | None:
        """The tenant of a session, or else the context's."""
        return session_tenant(session) or current_context().tenant

    def tenant_of(self, session: Session, given: str | None, event_name: str) -> str | None:
        """The tenant of an event."""
        tenant = given or self.of(session)
        if (self.required or session_tenant(session) is not None) and not session.info.get(UNSCOPED):
            self.assign(session, tenant)
        if self.required and tenant is None:
            raise TenancyError(_MISSING.format(event_name))
        return tenant

    def connection_of(self, session: Session) -> Connection:
        """The connection of the session's transaction, for Pillarbox's own statements."""
        return Session.connection(session)

    def check_raw_connection(self, session: Session, options: Mapping[str, Any] | None) -> None:
        """Called when code requests the raw connection. Its statements are checked at execution; see `_on_begin`."""
        if self.required and not _is_unscoped(session, options or {}):
            self._claim(session, "a connection of this box")

    def check_get(self, session: Session, model: Any) -> None:
        """Called when an object is requested by id: if the session has it already, no statement is executed."""
        found: type = inspect(model).class_
        if issubclass(found, TenantScoped) and not session.info.get(UNSCOPED):
            self._claim(session, found.__name__)

    def listen(self, session_class: type[Session]) -> None:
        """Register the listeners for the sessions of this class."""
        event.listen(session_class, "after_begin", self._on_begin)
        event.listen(session_class, "do_orm_execute", self._on_execute)
        event.listen(session_class, "before_attach", self._before_attach)
        event.listen(session_class, "before_flush", self._before_flush)

    def _claim(self, session: Session, what: str) -> str:
        """Give the session a tenant before it touches tenant rows."""
        tenant = tenant_for(session, what)
        self.assign(session, tenant)
        return tenant

    # -- connections ---------------------------------------------------------------------------------------------------

    def _on_begin(self, session: Session, transaction: SessionTransaction, connection: Connection) -> None:
        if transaction.nested:
            return
        if self._row_security:
            self._announce(session, connection)
        if scoped_tables:
            _watch(connection, session)

    def _announce(self, session: Session, connection: Connection) -> None:
        tenant = session.info[_ANNOUNCED] = self.of(session)
        if tenant is not None:
            # Transaction-local, so a pooled connection never carries it into the next session.
            connection.execute(text("SELECT set_config(:name, :tenant, true)"), {"name": SETTING, "tenant": tenant})

    def _check_announced(self, session: Session, tenant: str) -> None:
        self.connection_of(session)
        if session.info[_ANNOUNCED] != tenant:
            # Setting it now is not enough: a savepoint that rolls back would undo it.
            del session.info[_TENANT]
            raise TenancyError(
                f"this transaction began without the tenant {tenant!r}, and row level security needs it then"
            )

    # -- statements ----------------------------------------------------------------------------------------------------

    def _on_execute(self, state: ORMExecuteState) -> None:
        if _is_unscoped(state.session, state.execution_options):
            state.update_execution_options(**{UNSCOPED: True})  # also for what it loads
            return
        if state.is_column_load:
            return  # of an object that is loaded already: `_check_owner` checks it
        if self.required:
            self._claim(state.session, "this box")
        if scoped_tables:
            self._restrict(state)

    def _restrict(self, state: ORMExecuteState) -> None:
        """Add the condition on the tenant to the statement, or refuse the statement."""
        scoped: type | None = None
        for level in levels(state.statement):
            scoped = scoped or next(filter(None, map(scoped_class, level)), None)
            if not state.is_relationship_load:  # the ORM builds these from mapped classes only
                _refuse(raw_table(level), "a Core or text statement, or a join made by hand, on")
        if unnamed := unnamed_class(state.statement):
            _refuse(unnamed.__name__, "on SQLAlchemy 2.0 a SELECT that names only in its conditions")
        tenant = self._claim(state.session, scoped.__name__) if scoped else self.of(state.session)
        if scoped and (kind := unconditional(state)):
            _refuse(scoped.__name__, kind)
        if state.is_select or state.is_update or state.is_delete:
            # For every statement: joined relationships do not show in it.
            state.statement = state.statement.options(_condition(tenant))

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _before_attach(self, session: Session, instance: object) -> None:
        if isinstance(instance, TenantScoped) and not session.info.get(UNSCOPED):
            owner, tenant = instance.__dict__.get("tenant_id"), session_tenant(session)
            if None not in (owner, tenant) and owner != tenant:
                raise _foreign(instance, owner, tenant)

    def _before_flush(self, session: Session, _context: UOWTransaction, _instances: object) -> None:
        if session.info.get(UNSCOPED):
            return
        if self.required:
            self._claim(session, "this box")
        if not scoped_tables:
            return
        for instance in (*session.new, *session.dirty, *session.deleted):
            if isinstance(instance, TenantScoped):
                self._check_row(session, instance)

    def _check_row(self, session: Session, instance: TenantScoped) -> None:
        tenant = self._claim(session, type(instance).__name__)
        if inspect(instance).pending and instance.tenant_id is None:
            instance.tenant_id = tenant
        # Loads the old value if necessary: a row that was never read may belong to another tenant.
        for owner in get_history(instance, "tenant_id").sum():
            if owner is not None and owner != tenant:
                raise _foreign(instance, owner, tenant)


_MISSING = "{} needs a tenant, and this session has none: say unit_of_work(tenant=...) or event_context(tenant=...)"


def session_tenant(session: Session) -> str | None:
    """The tenant of the session, if it has one."""
    tenant: str | None = session.info.get(_TENANT)
    return tenant


def tenant_for(session: Session, what: str) -> str:
    """The tenant for which the session touches ``what``: its own, which must not contradict the context's."""
    own, around = session_tenant(session), current_context().tenant
    tenant = own or around
    if tenant is None:
        raise TenancyError(_MISSING.format(what))
    if own is not None and around not in (None, own):
        raise _turned(own, around)
    return tenant


def check_role(connection: Connection) -> None:
    """Refuse superusers and roles with BYPASSRLS: row level security does not apply to them."""
    if connection.dialect.name != "postgresql":
        raise ConfigurationError(f"row level security needs PostgreSQL, and this is {connection.dialect.name}")
    asked = text("SELECT rolname, rolsuper OR rolbypassrls AS free FROM pg_roles WHERE rolname = current_user")
    role = connection.execute(asked).one()
    if role.free:
        raise TenancyError(
            f"row level security does not bind {role.rolname!r} (superuser or BYPASSRLS): use another role"
        )


def row_level_security(metadata: MetaData) -> list[str]:
    """The statements that protect every tenant table of this metadata on PostgreSQL, also from its owner."""
    statements = []
    # Once a connection has had the setting, PostgreSQL reads an unset one as ''.
    rule = f"tenant_id = nullif(current_setting('{SETTING}', true), '')"
    for table in metadata.sorted_tables:
        if table in scoped_tables and "tenant_id" in table.c:
            name = ".".join(_quoted(part) for part in (table.schema, table.name) if part)
            statements += [
                f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY",
                f"ALTER TABLE {name} FORCE ROW LEVEL SECURITY",
                f"DROP POLICY IF EXISTS pillarbox_tenant ON {name}",
                f"CREATE POLICY pillarbox_tenant ON {name} USING ({rule}) WITH CHECK ({rule})",
            ]
    return statements


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def _is_unscoped(session: Session, options: Mapping[str, Any]) -> bool:
    return bool(options.get(UNSCOPED) or session.info.get(UNSCOPED))


@lru_cache(maxsize=1024)
def _condition(tenant: str | None) -> Any:
    if tenant is None:
        return with_loader_criteria(TenantScoped, lambda _cls: false(), include_aliases=True)
    return with_loader_criteria(TenantScoped, lambda cls: cls.tenant_id == tenant, include_aliases=True)


def _turned(own: str, other: str | None) -> TenancyError:
    return TenancyError(f"this session belongs to tenant {own!r}, not to {other!r}: open another one")


def _foreign(instance: object, owner: str | None, tenant: str | None) -> TenancyError:
    return TenancyError(f"this {type(instance).__name__} belongs to tenant {owner!r}, and the session to {tenant!r}")


@event.listens_for(TenantScoped, "load", propagate=True)
@event.listens_for(TenantScoped, "refresh", propagate=True)
def _check_owner(instance: TenantScoped, context: QueryContext | None, _attributes: object = None) -> None:
    """Refuse rows that bypass the condition: a merge, or the refresh of a row whose tenant has changed."""
    session = object_session(instance)
    if session is None or _is_unscoped(session, context.execution_options if context else {}):
        return
    owner, tenant = instance.__dict__.get("tenant_id"), session_tenant(session)
    if None not in (owner, tenant) and owner != tenant:
        session.expunge(instance)
        raise _foreign(instance, owner, tenant)


def _refuse(name: str | None, kind: str) -> None:
    if name is not None:
        raise TenancyError(
            f"{kind} {name!r} is not held to one tenant; if that is meant, mark it: .execution_options({UNSCOPED}=True)"
        )


_sessions_on: WeakKeyDictionary[Connection, WeakSet[Session]] = WeakKeyDictionary()


def _watch(connection: Connection, session: Session) -> None:
    """Check the statements of a connection. It may serve several sessions, one after the other or at the same time."""
    if connection not in _sessions_on:
        sessions = _sessions_on[connection] = WeakSet()
        event.listen(connection, "before_cursor_execute", _refuse_strangers(sessions))
    _sessions_on[connection].add(session)


def _refuse_strangers(sessions: WeakSet[Session]) -> Callable[..., None]:
    """A listener for a connection. Statements of its sessions were checked already; all others are checked here."""

    def before_cursor_execute(_conn: Any, _cursor: Any, sql: str, _values: Any, context: Any, _many: bool) -> None:
        if any(getattr(session, "busy", False) for session in sessions):
            return
        if any(it.in_transaction() and not _is_unscoped(it, context.execution_options) for it in sessions):
            _refuse(table_in(sql), "what is executed on a raw connection, here on")

    return before_cursor_execute
