"""A hostile broker: what it has, it delivers again and again, to anybody, and in an order of its own.

What it keeps to is what every subscription promises: nothing that was not acknowledged is forgotten and, if it is
``ordered``, a message is not delivered for the first time before those of its key that were sent earlier.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import NamedTuple

from pillarbox.transport import Message, Received
from tests.simulation.loop import Life
from tests.simulation.wire import Chaos, Reply, Wire

Line = tuple[str | None, str]


class _Held(NamedTuple):
    line: Line
    message: Message
    until: float


class HostileBroker:
    """One topic, and one group of members."""

    def __init__(
        self,
        chaos: Chaos,
        *,
        ordered: bool,
        deadline: float | None,
        echoes: float,
        prefetch: int,
        counts: bool = True,
    ) -> None:
        self.ordered = ordered
        self.deadline = deadline
        self.away = False
        self.members: list[SimulatedSubscription] = []
        self._chaos = chaos
        self._draw = chaos.draw
        self._echoes = echoes
        """How likely a message is to be there more than once."""
        self._prefetch = prefetch
        """How many messages a member holds at most."""
        self._counts = counts
        """Whether it says how often it has delivered a message."""
        self._on_their_way = 0
        self._waiting: dict[Line, deque[Message]] = {}
        self._owners: dict[Line, SimulatedSubscription] = {}
        self._numbers = 0
        self._attempts: Counter[int] = Counter()
        """How often each message was delivered in vain."""

    def publish(self, message: Message) -> None:
        """Have one more message."""
        self._waiting.setdefault(line_of(message), deque()).append(message)
        if self._draw.random() < self._echoes:
            copies = self._draw.choice((1, 1, 2, 4))
            self._on_their_way += copies
            for _ in range(copies):
                self._chaos.later(self._chaos.between(0, 10), self._echo, message)

    def _echo(self, message: Message) -> None:
        self._on_their_way -= 1
        self._waiting.setdefault(line_of(message), deque()).append(message)

    @property
    def backlog(self) -> int:
        """What is not acknowledged, with what will be there again."""
        held = sum(len(member.held) for member in self.members)
        return sum(map(len, self._waiting.values())) + held + self._on_their_way

    # -- members -------------------------------------------------------------------------------------------------------

    def join(self, member: SimulatedSubscription, reply: Reply) -> None:
        """One more of them, if it is still there."""
        if self.away or member.is_lost or not member.life.alive:
            reply(ConnectionError("the broker is away"))
        else:
            self.members.append(member)
            reply(None)

    def drop(self, member: SimulatedSubscription) -> None:
        """It is gone; what it held goes to others."""
        member.lose()
        if member in self.members:
            self.members.remove(member)
            self._take_back(member, [*member.held])

    def lost(self, life: Life) -> None:
        """So are all of a process, when it is."""
        for member in [member for member in self.members if member.life is life]:
            self._chaos.later(self._chaos.between(0, 2), self.drop, member)

    def go_away(self) -> None:
        """Nobody is connected any more."""
        self.away = True
        for member in [*self.members]:
            self.drop(member)

    # -- delivering ----------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Deliver something to somebody, for ever."""
        now = self._chaos.loop.time()
        for member in self._draw.sample(self.members, len(self.members)):
            self._expire(member, now)
            if len(member.held) < self._prefetch:
                self._deliver(member, self._draw.randrange(1, 6), now)
        self._chaos.later(self._chaos.between(0.02, 0.3), self.work)

    def _deliver(self, member: SimulatedSubscription, limit: int, now: float) -> None:
        packet: list[Received] = []
        while len(packet) < limit:
            free = [line for line in self._waiting if self._owners.get(line, member) is member]
            if not free:
                break
            line = self._draw.choice(free)
            message = self._take(line)
            if self.ordered:
                self._owners[line] = member
            self._numbers += 1
            member.held[self._numbers] = _Held(line, message, now + (self.deadline or float("inf")))
            before = self._attempts[id(message)] if self._counts else 0
            packet.append(Received(message, attempt=1 + before, handle=self._numbers))
        if packet:
            member.arrives_at = max(member.arrives_at, now + self._draw.random() * 0.02)
            self._chaos.later(member.arrives_at - now, member.arrive, packet)

    def _take(self, line: Line) -> Message:
        queue = self._waiting[line]
        if not self.ordered:
            queue.rotate(-self._draw.randrange(len(queue)))
        message = queue.popleft()
        if not queue:
            del self._waiting[line]
        return message

    def _expire(self, member: SimulatedSubscription, now: float) -> None:
        """With a message that takes too long, all of its key go to somebody else."""
        lines = {held.line: None for held in member.held.values() if held.until < now}
        if lines:
            self._chaos.happened["deadline passes"] += len(lines)
            self._take_back(member, [number for number, held in member.held.items() if held.line in lines])

    def _take_back(self, member: SimulatedSubscription, numbers: Sequence[int]) -> None:
        for number in sorted(numbers, reverse=True):
            held = member.held[number]
            self._attempts[id(held.message)] += 1
            self._waiting.setdefault(held.line, deque()).appendleft(held.message)
        self._let_go(member, numbers)

    def _let_go(self, member: SimulatedSubscription, numbers: Sequence[int]) -> None:
        lines = {held.line: None for number in numbers if (held := member.held.pop(number, None)) is not None}
        for line in lines:
            if self._owners.get(line) is member and all(held.line != line for held in member.held.values()):
                del self._owners[line]

    # -- what members say ----------------------------------------------------------------------------------------------

    def ack(self, member: SimulatedSubscription, numbers: Sequence[int], reply: Reply) -> None:
        """These are dealt with."""
        if not member.is_lost:
            self._let_go(member, numbers)
        reply(ConnectionError("the connection is lost") if member.is_lost else None)

    def extend(self, member: SimulatedSubscription, numbers: Sequence[int], reply: Reply) -> None:
        """These take longer."""
        until = self._chaos.loop.time() + (self.deadline or float("inf"))
        for number in numbers:
            if number in member.held:
                member.held[number] = member.held[number]._replace(until=until)
        reply(ConnectionError("the connection is lost") if member.is_lost else None)


class SimulatedSubscription:
    """`Subscription` of one process, and the broker's end of it."""

    def __init__(
        self, broker: HostileBroker, chaos: Chaos, life: Life, wire: Wire, watch: Callable[[Sequence[Received]], None]
    ) -> None:
        self.life = life
        self.held: dict[int, _Held] = {}
        """What the broker takes for held, by the number of its delivery."""
        self.is_lost = False
        self.arrives_at = 0.0
        self._broker = broker
        self._chaos = chaos
        self._wire = wire
        self._watch = watch
        self._arrived: list[Received] = []
        self._change = asyncio.Event()

    @property
    def deadline(self) -> float | None:
        return self._broker.deadline

    def backlog(self) -> int | None:
        return None

    def arrive(self, packet: Sequence[Received]) -> None:
        """Messages have come, in the order in which they were sent."""
        self._arrived += packet
        self._change.set()

    def lose(self) -> None:
        """The connection is gone."""
        self.is_lost = True
        self._change.set()

    async def receive(self, limit: int, max_bytes: float = math.inf) -> Sequence[Received]:
        while not self._arrived and not self.is_lost:
            self._change.clear()
            await self._change.wait()
        if self.is_lost:
            raise ConnectionError("the connection is lost")
        sizes = accumulate((len(each.message.body) for each in self._arrived), initial=0)
        count = sum(size < max_bytes for size in islice(sizes, min(limit, len(self._arrived))))
        taken, self._arrived = self._arrived[:count], self._arrived[count:]
        return taken

    async def ack(self, received: Sequence[Received]) -> None:
        self._watch(received)
        await self._tell("ack", self._broker.ack, received)

    async def extend(self, received: Sequence[Received]) -> None:
        """And those that nobody has asked for yet: who has room for few would be brought them again and again."""
        await self._tell("extend", self._broker.extend, [*received, *self._arrived])

    async def close(self) -> None:
        self._chaos.later(self._draw_delay(), self._broker.drop, self)

    async def _tell(self, kind: str, call: Callable[..., None], received: Sequence[Received]) -> None:
        if self.is_lost:
            raise ConnectionError("the connection is lost")
        try:
            await self._wire.ask(kind, partial(call, self, [each.handle for each in received]))
        except ConnectionError:
            if self.deadline is None:  # what is held for as long as we are connected needs a connection that works
                self._broker.drop(self)
            raise

    def _draw_delay(self) -> float:
        return self._chaos.draw.random() * 0.05


class SimulatedSubscriber:
    """`Subscriber` of one process."""

    def __init__(
        self, broker: HostileBroker, chaos: Chaos, life: Life, wire: Wire, watch: Callable[[Sequence[Received]], None]
    ) -> None:
        self._broker = broker
        self._chaos = chaos
        self._wire = wire
        self._make = partial(SimulatedSubscription, broker, chaos, life, wire, watch)

    async def subscribe(self, topics: Sequence[str], group: str) -> SimulatedSubscription:  # noqa: ARG002  one of each
        member = self._make()
        try:
            await self._wire.ask("subscribe", partial(self._broker.join, member))
        except BaseException:
            self._broker.drop(member)  # whoever has given up does not join later
            raise
        return member


def line_of(message: Message) -> Line:
    """What its order counts within."""
    return message.headers.get("tenant_id"), message.key
