"""The desk: what has been received and is not dealt with yet, in a line per key.

A line is worked on by one at a time, from its front; that alone keeps the order. While its first message rests after a
failure, those behind it wait, and the other lines go on. Tenants take turns, so that one of them cannot keep all hands
busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ..transport import Message, Received

Line = Hashable


@dataclass(slots=True, eq=False)
class Work:
    """A message that is to be dealt with."""

    received: Received
    line: Line = None
    tenant: str | None = field(init=False)
    """Whose it is."""

    def __post_init__(self) -> None:
        self.tenant = self.received.message.headers.get("tenant_id")

    @property
    def message(self) -> Message:
        """What came in."""
        return self.received.message


class Desk:
    """Not for several event loops. Whoever takes work gives it back by `done`."""

    def __init__(self) -> None:
        self.count = 0
        """How many messages are on it, those that are being worked on included."""
        self.bytes = 0
        self._lines: dict[Line, deque[Work]] = {}
        self._ready: dict[str | None, dict[Line, None]] = {}
        """The lines of each tenant that somebody may take, in the order in which they became so."""
        self._stopped: set[Line] = set()
        """Lines that are worked on, or rest."""

    def put(self, received: Sequence[Received]) -> None:
        """Here is more. Messages without a key have no order: each is a line of its own."""
        for each in received:
            message = each.message
            work = Work(each)
            tenant = work.tenant
            work.line = line = (message.topic, tenant, message.key) if message.key else work
            waiting = self._lines.get(line)
            if waiting is None:
                waiting = self._lines[line] = deque()
            waiting.append(work)
            self.bytes += len(message.body)
            if line not in self._stopped:
                self._offer(tenant, line)
        self.count += len(received)

    def take(self, limit: int) -> list[Work]:
        """Up to so many messages of one tenant, in order per key, or nothing if all wait. Nobody else gets messages of
        their lines before they are `done`.
        """
        taken: list[Work] = []
        for tenant, lines in self._ready.items():
            begun: list[Line] = []
            for line in lines:
                if len(taken) == limit:
                    break
                begun.append(line)
                waiting = self._lines[line]
                while waiting and len(taken) < limit:
                    taken.append(waiting.popleft())
            self._stopped.update(begun)
            for line in begun:  # not one by one from the front: a dict looks at all that were deleted there before
                del lines[line]
            del self._ready[tenant]
            if lines:
                self._ready[tenant] = lines  # behind the others
            break
        return taken

    def done(self, taken: Sequence[Work], left: Sequence[Work] = ()) -> list[Line]:
        """These were taken, and these of them are left over, in their order: they go back to the front of their lines,
        which rest until `wake`. The lines that rest come back.
        """
        for work in reversed(left):
            self._lines[work.line].appendleft(work)
        resting = dict.fromkeys(work.line for work in left)
        remaining = set(map(id, left))
        for work in taken:
            if id(work) not in remaining:
                self.count -= 1
                self.bytes -= len(work.message.body)
        for line in dict.fromkeys(work.line for work in taken):
            if line not in resting:
                self.wake(line)
        return [*resting]

    def wake(self, line: Line) -> None:
        """The line may go on."""
        self._stopped.discard(line)
        if waiting := self._lines.get(line):
            self._offer(waiting[0].tenant, line)
        else:
            self._lines.pop(line, None)

    def waiting(self) -> list[Work]:
        """All that nobody works on now."""
        return [work for line in self._lines.values() for work in line]

    def _offer(self, tenant: str | None, line: Line) -> None:
        self._ready.setdefault(tenant, {})[line] = None
