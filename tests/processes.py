"""New Python processes, which tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_python(
    *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with this checkout and without the variables of flce and Triton, and assert that it succeeds.

    Args:
        arguments: of the command line, such as ``"-c", code``.
        env: other variables of the environment.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FLCE_", "TRITON_"))}
    environment |= {"PYTHONPATH": str(ROOT), **(env or {})}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
