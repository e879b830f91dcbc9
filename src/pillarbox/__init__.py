"""Pillarbox: what you post is delivered.

Domain events leave a service if and only if the transaction that raised them commits. Start with `Pillarbox`,
`IntegrationEvent`, `Aggregate` and `Route`; the tutorial shows them at work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .aggregate import Aggregate as Aggregate
    from .app import Pillarbox as Pillarbox
    from .codec import Codec as Codec
    from .consumers.handling import MessageContext as MessageContext
    from .context import EventContext as EventContext
    from .context import current_context as current_context
    from .context import event_context as event_context
    from .errors import CommitOutcomeUnknown as CommitOutcomeUnknown
    from .errors import ConcurrencyError as ConcurrencyError
    from .errors import ConfigurationError as ConfigurationError
    from .errors import DuplicateEventError as DuplicateEventError
    from .errors import EventError as EventError
    from .errors import PayloadError as PayloadError
    from .errors import PillarboxError as PillarboxError
    from .errors import Poison as Poison
    from .errors import Reject as Reject
    from .errors import TenancyError as TenancyError
    from .event import Event as Event
    from .event import IntegrationEvent as IntegrationEvent
    from .event import downcaster as downcaster
    from .event import register_event as register_event
    from .event import upcaster as upcaster
    from .outbox import FailurePolicy as FailurePolicy
    from .projections.change import Add as Add
    from .projections.change import Change as Change
    from .projections.projection import Projection as Projection
    from .projections.projection import ProjectionRow as ProjectionRow
    from .projections.projection import on as on
    from .repository import Repository as Repository
    from .retry import RetryPolicy as RetryPolicy
    from .route import Route as Route
    from .tenancy import TenantScoped as TenantScoped
    from .transport import Message as Message
    from .unit_of_work import EventPublisher as EventPublisher
    from .unit_of_work import UnitOfWork as UnitOfWork

_HOMES = {
    "Add": "projections.change",
    "Aggregate": "aggregate",
    "Change": "projections.change",
    "Codec": "codec",
    "CommitOutcomeUnknown": "errors",
    "ConcurrencyError": "errors",
    "ConfigurationError": "errors",
    "DuplicateEventError": "errors",
    "Event": "event",
    "EventContext": "context",
    "EventError": "errors",
    "EventPublisher": "unit_of_work",
    "FailurePolicy": "outbox",
    "IntegrationEvent": "event",
    "Message": "transport",
    "MessageContext": "consumers.handling",
    "PayloadError": "errors",
    "Pillarbox": "app",
    "PillarboxError": "errors",
    "Poison": "errors",
    "Projection": "projections.projection",
    "ProjectionRow": "projections.projection",
    "Reject": "errors",
    "Repository": "repository",
    "RetryPolicy": "retry",
    "Route": "route",
    "TenancyError": "errors",
    "TenantScoped": "tenancy",
    "UnitOfWork": "unit_of_work",
    "current_context": "context",
    "downcaster": "event",
    "event_context": "context",
    "on": "projections.projection",
    "register_event": "event",
    "upcaster": "event",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605  the names are strings
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Names are resolved on first use, so that importing pillarbox costs nothing."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pillarbox' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
