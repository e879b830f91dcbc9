"""The shipped relay and lane code in a world of virtual time, chance and faults.

    python -m tests.simulation --seeds 50000

A seed decides everything: who writes what and when, how long each call takes, what gets lost, who dies. Relays and
lanes are the shipped code; the store is `tests.memory`, the brokers and the network are made up here. After the faults
have stopped all that was committed must arrive, and `checker` compares what arrived with the ledger. The same seed
gives the same trace.

`consumers` has the other half: the shipped intake and processor between a hostile broker and a database that fails.
"""

from tests.simulation.course import Result
from tests.simulation.world import World, simulate

__all__ = ["Result", "World", "simulate"]
