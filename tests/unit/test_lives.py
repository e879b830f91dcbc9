"""Which processes of a consumer have died."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from pillarbox.consumers import lives


def test_this_process_lives() -> None:
    assert not lives.has_died(lives.this())
    earlier = lives.this().rpartition(":")[0] + ":a"
    assert lives.has_died(earlier), "an earlier one had our number, and we know nothing of it"


def test_a_process_that_is_no_more_has_died() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert lives.has_died(f"{socket.gethostname()}:{gone.pid}:a")
    assert not lives.has_died(f"{socket.gethostname()}:{os.getppid()}:a")


def test_of_other_hosts_nothing_is_known() -> None:
    assert not lives.has_died(f"not-{socket.gethostname()}:{os.getpid()}:a")
