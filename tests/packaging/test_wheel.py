"""The wheel is what users get: it installs into a clean environment and runs the tutorial's program there."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import Server, Servers

ROOT = Path(__file__).parent.parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_runs_the_tutorial_in_a_clean_environment(
    tmp_path: Path, use_server: Callable[[str], Server], servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server("embedded")
    monkeypatch.setenv("PILLARBOX_HOME", str(servers.folder / "wheel"))  # others have tables of the same names
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    [wheel] = tmp_path.glob("pillarbox-*.whl")
    venv.create(tmp_path / "clean")
    python, uv = tmp_path / "clean" / "bin" / "python", Path(sys.executable).with_name("uv")
    run(uv, "pip", "install", "--quiet", "--python", python, f"{wheel}[demo]", cwd=tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "tutorial.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "tutorial.py").write_text("\n".join(blocks))
    run(python, "-W", "error", "tutorial.py", cwd=tmp_path)
    assert run(tmp_path / "clean" / "bin" / "pillarbox", "--version", cwd=tmp_path).startswith("pillarbox")
    assert '"problem"' not in run(tmp_path / "clean" / "bin" / "pillarbox", "doctor", "--json", cwd=tmp_path)
