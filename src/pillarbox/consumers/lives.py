"""The lives of a consumer's processes: which of them have died before they could say that they end.

A process of this host that is no more has. Of those on other hosts nothing is known.
"""

from __future__ import annotations

import os
import socket
from uuid import uuid4

_here: set[str] = set()
"""Those of this process."""


def begin() -> str:
    """The name of a new life of this process."""
    life = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:12]}"
    _here.add(life)
    return life


def end(life: str) -> None:
    """It has ended."""
    _here.discard(life)


def has_died(life: str) -> bool:
    """Whether the process of this life is no more."""
    host, pid, _ = life.rsplit(":", 2)
    if host != socket.gethostname() or life in _here:
        return False
    return int(pid) == os.getpid() or not _is_alive(int(pid))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True
