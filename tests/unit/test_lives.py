"""Which processes of a consumer have died."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from pillarbox.consumers import lives


def test_a_process_lives_until_it_ends() -> None:
    life = lives.begin()
    assert not lives.has_died(life)
    lives.end(life)
    assert lives.has_died(life), "an earlier one had our number, and we know nothing of it"


def test_a_process_that_is_no_more_has_died() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert lives.has_died(f"{socket.gethostname()}:{gone.pid}:a")
    assert not lives.has_died(f"{socket.gethostname()}:{os.getppid()}:a")


def test_of_other_hosts_nothing_is_known() -> None:
    assert not lives.has_died(f"not-{socket.gethostname()}:{os.getpid()}:a")
