"""The lives of processes: which of those that ran a consumer have died before they could say that they end.

A process of this host that is no more has. Of those on other hosts nothing is known.
"""

from __future__ import annotations

import os
import socket
from uuid import uuid4

_drawn = uuid4().hex[:12]
"""Tells this process from one that had its number before."""


def this() -> str:
    """The name of the life of this process."""
    return f"{socket.gethostname()}:{os.getpid()}:{_drawn}"


def has_died(life: str) -> bool:
    """Whether the process of this life is no more."""
    host, pid, _ = life.rsplit(":", 2)
    if host != socket.gethostname() or life == this():
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
