"""The window: what has been received and is not settled yet, in a line per key.

A line is worked on by one at a time, from its front; that alone keeps the order. While its first message rests after a
failure, those behind it wait, and the other lines go on. Tenants take turns, so that one of them cannot keep all others
waiting.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from itertools import chain

import msgspec

from .. import clock
from ..inbox import Claim, KnownBy
from ..transport import Message, Received
from .failure import Failure

Line = Hashable


class Work(msgspec.Struct, eq=False, gc=False):
    """A message that is to take effect."""

    message: Message
    received: Received | None = None
    """As its subscription knows it."""
    redelivered: int = 0
    """How often its broker has brought it before, as far as that counts."""
    claim: Claim | None = None
    """If it was spilled."""
    known_by: KnownBy = KnownBy.EVENT
    """What the inbox then knows it by."""
    since: float = msgspec.field(default_factory=lambda: clock.current().monotonic())
    """When it came into this process."""
    refused_as: Failure | None = None
    """If it was spilled without being tried: in which way it fails."""
    row_key: str = ""
    """The key of its row in a lane."""
    tries: int = 0
    """How often it has failed since."""
    tenant: str | None = None
    line: Line = None

    def __post_init__(self) -> None:
        self.tenant = self.message.headers.get("tenant_id")
        self.line = line_of(self.message) or object()


def line_of(message: Message) -> tuple[str, str | None, str] | None:
    """Its unit of order: a key of a tenant on a topic. A message without a key has none."""
    return (message.topic, message.headers.get("tenant_id"), message.key) if message.key else None


class Window:
    """Not for several event loops. Whoever takes work gives it back by `done`."""

    def __init__(self) -> None:
        self.count = 0
        """How many messages are in it, those that are being worked on included."""
        self.bytes = 0
        self.tenants: Counter[str | None] = Counter()
        """How many of them each tenant has."""
        self._first: dict[Line, Work] = {}
        """The first message of each line that has some waiting."""
        self._behind: dict[Line, deque[Work]] = {}
        """Those behind it. Most lines have none, and a deque for each would be work for the garbage collector."""
        self._ready: dict[str | None, dict[Line, None]] = {}
        """The lines of each tenant that may be taken, in the order in which they became so."""
        self._stopped: set[Line] = set()
        """Lines that are worked on, or rest."""

    def put(self, works: Sequence[Work]) -> None:
        """Add messages, in their order."""
        for work in works:
            line = work.line
            if line not in self._first:
                self._first[line] = work
            else:
                self._behind.setdefault(line, deque()).append(work)
            self.bytes += len(work.message.body)
            self.tenants[work.tenant] += 1
            if line not in self._stopped:
                self._offer(work.tenant, line)
        self.count += len(works)

    def ready(self) -> list[str | None]:
        """The tenants with messages that may be taken; the one whose turn it is first."""
        return [*self._ready]

    def take(self, tenant: str | None, limit: int) -> list[Work]:
        """Up to so many messages of a tenant, in order per key. Their lines give out no more before they are
        `done`.
        """
        taken: list[Work] = []
        lines = self._ready.pop(tenant, {})
        begun: list[Line] = []
        for line in lines:
            if len(taken) == limit:
                break
            begun.append(line)
            taken += self.more_of(line, limit - len(taken))
        self._stopped.update(begun)
        for line in begun:  # not one by one from the front: a dict looks at all that were deleted there before
            del lines[line]
        if lines:
            self._ready[tenant] = lines  # behind the others
        return taken

    def more_of(self, line: Line, limit: int) -> list[Work]:
        """Up to so many messages more of a line of which some are taken."""
        taken: list[Work] = []
        while len(taken) < limit and (first := self._first.pop(line, None)) is not None:
            taken.append(first)
            if behind := self._behind.get(line):
                self._first[line] = behind.popleft()
                if not behind:
                    del self._behind[line]
        return taken

    def waiting_in(self, line: Line) -> int:
        """How many messages of a line are not taken."""
        return (line in self._first) + len(self._behind.get(line, ()))

    def oldest(self, tenant: str | None) -> Work | None:
        """The message of a tenant that has waited for its turn for the longest time."""
        line = next(iter(self._ready.get(tenant, ())), None)
        return None if line is None else self._first[line]

    def done(self, taken: Sequence[Work], left: Sequence[Work] = ()) -> list[Line]:
        """These were taken, and these of them are left over, in their order: they go back to the front of their lines,
        which rest until `wake`. The lines that rest come back.
        """
        for work in reversed(left):
            if (first := self._first.get(work.line)) is not None:
                self._behind.setdefault(work.line, deque()).appendleft(first)
            self._first[work.line] = work
        resting = dict.fromkeys(work.line for work in left)
        remaining = set(map(id, left))
        for work in taken:
            if id(work) not in remaining:
                self.count -= 1
                self.bytes -= len(work.message.body)
                self.tenants[work.tenant] -= 1
                if not self.tenants[work.tenant]:
                    del self.tenants[work.tenant]
        for line in dict.fromkeys(work.line for work in taken):
            if line not in resting:
                self.wake(line)
        return [*resting]

    def wake(self, line: Line) -> None:
        """The line may go on."""
        self._stopped.discard(line)
        if (first := self._first.get(line)) is not None:
            self._offer(first.tenant, line)

    def waiting(self) -> list[Work]:
        """All that nobody works on now."""
        return [*self._first.values(), *chain.from_iterable(self._behind.values())]

    def _offer(self, tenant: str | None, line: Line) -> None:
        self._ready.setdefault(tenant, {})[line] = None
