"""Every error that Pillarbox raises, in one tree.

    PillarboxError
    ├── ConfigurationError              (ValueError) a mistake in code or settings; found at start
    │   ├── RouteError                  routes that overlap, share a topic, name an unknown transport, ...
    │   ├── SettingsError               a settings file or variable that cannot be used
    │   ├── MissingExtraError           an optional package is not installed; the message has the command
    │   └── MissingProgramError         a program that a local server needs is not installed
    ├── EventError                      (ValueError) an event that cannot become a delivery
    │   ├── UnregisteredEventError      its type has no registered name
    │   ├── UnknownEventError           no type is registered for this name and version
    │   ├── PayloadError                a value that no consumer could read back exactly; has the field's path
    │   ├── PayloadTooLargeError        the encoded body is over the limit
    │   ├── HeaderError                 a header, key or tenant with forbidden characters
    │   └── DuplicateEventError         this event id was written by an earlier transaction
    ├── SessionError                    a session used in a way that would lose or duplicate events
    │   ├── SessionNotBoundError        publish on a session that Pillarbox does not know
    │   ├── SessionSharedError          two tasks or threads in one session at the same time
    │   └── BulkStatementError          a bulk statement on aggregates, which raises no events
    ├── ConcurrencyError                another transaction changed the aggregate first
    ├── NotFoundError                   (LookupError) a repository has no such entity
    ├── CommitOutcomeUnknown            COMMIT was sent and no answer arrived
    ├── TenancyError                    a missing, second or foreign tenant
    └── StoreError                      the outbox itself
        ├── NotMigratedError            its tables are missing or of another version
        ├── LeaseLostError              a fenced write found another owner; nothing was written
        ├── LaneHaltedError             a lane cannot continue without an operator
        │   └── BatchMismatchError      an announced batch could not be rebuilt exactly
        └── EmbeddedServerError         a local server for development or tests did not start

Failures end in ``Error``. ``CommitOutcomeUnknown`` does not, because the transaction may have succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID


class PillarboxError(Exception):
    """The root of the tree."""


class ConfigurationError(PillarboxError, ValueError):
    """A mistake in code or settings, found at start."""


class RouteError(ConfigurationError):
    """Invalid routes, alone or together."""


class SettingsError(ConfigurationError):
    """A settings file or environment variable that cannot be used."""


class MissingExtraError(ConfigurationError):
    """An optional package is not installed; the message has the install command."""

    def __init__(self, what: str, *, extra: str) -> None:
        super().__init__(f"{what} needs a package that is not installed: pip install 'pillarbox[{extra}]'")


class MissingProgramError(ConfigurationError):
    """A program that a local server needs, such as Java, is not installed; the message says how to get it."""


class EventError(PillarboxError, ValueError):
    """An event that cannot become a delivery."""


class UnregisteredEventError(EventError):
    """The event's type has no registered name."""


class UnknownEventError(EventError):
    """No type is registered for this name and version."""


class PayloadError(EventError):
    """A value in a payload that no consumer could read back exactly."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")


class PayloadTooLargeError(EventError):
    """The encoded body exceeds the limit of the codec or of the transport."""


class HeaderError(EventError):
    """A header, key or tenant that brokers would refuse or misread."""


class DuplicateEventError(EventError):
    """This event id was written to the outbox by an earlier transaction."""


class SessionError(PillarboxError):
    """A session used in a way that would lose or duplicate events."""


class SessionNotBoundError(SessionError):
    """The session was not made by a sessionmaker that ``box.bind`` has bound."""


class SessionSharedError(SessionError):
    """Two tasks or threads use one session at the same time."""


class BulkStatementError(SessionError):
    """A bulk statement on an aggregate's table: it changes state and raises no events."""


class ConcurrencyError(PillarboxError):
    """Another transaction changed the aggregate after this one had read it: load it again and repeat the change."""


class NotFoundError(PillarboxError, LookupError):
    """No entity with this id, or none that is visible to this repository."""


class CommitOutcomeUnknown(PillarboxError):  # noqa: N818  the transaction may have succeeded
    """COMMIT was sent, and its answer was lost.

    The transaction is either committed or not, and only the database knows: never retry blindly. ``await
    box.committed(error)`` finds out by the outbox rows of the transaction.
    """

    def __init__(self, written: Sequence[tuple[UUID, int, int]] = ()) -> None:
        self.written = tuple(written)
        """Event id, route and schema version of every outbox row of the transaction."""
        super().__init__(
            "COMMIT was sent but its answer was lost: the transaction may be committed or not. "
            "Ask with `await box.committed(error)` before doing it again."
        )


class TenancyError(PillarboxError):
    """A tenant that is missing, changed within a session, or not the owner of a row."""


class Reject(PillarboxError):  # noqa: N818  a decision of a handler, not a failure
    """Raised by a handler: the request of the event cannot be fulfilled, and a retry would not help. The handler's
    changes are rolled back, and the message is a dead letter with this reason; its key continues.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Poison(PillarboxError):  # noqa: N818  it says what the message is
    """Raised by a handler: no attempt with this message will ever succeed. It becomes a dead letter, and a copy goes to
    the dead-letter topic.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class StoreError(PillarboxError):
    """An error of the outbox itself."""


class NotMigratedError(StoreError):
    """Pillarbox's tables are missing or of another version: run ``pillarbox migrate``."""


class LeaseLostError(StoreError):
    """A fenced write changed no row: another relay owns the lane now, and nothing was written."""


class LaneHaltedError(StoreError):
    """Continuing would lose or duplicate messages: the lane waits for an operator."""


class BatchMismatchError(LaneHaltedError):
    """An announced batch could not be rebuilt: its count or hash differs. The lane halts."""


class EmbeddedServerError(StoreError):
    """The embedded PostgreSQL or the local Pulsar could not be fetched or started."""
