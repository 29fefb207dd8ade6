"""`integrations/processes.py`: two processes, and what they make of their curves and statuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the scripts' command line")
if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

import processes

INTEGRATIONS = Path(__file__).parents[2] / "integrations"

# The second process has another loss and was not fused, and ends with the larger status.
PROGRAM = """
import os, sys

from demo import Curve
from processes import in_two_processes, of_all_processes


def in_each_process(status):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    curve = of_all_processes(Curve([float(rank), 4.0], [True, rank == 0]))
    dist.destroy_process_group()
    assert curve == Curve([0.5, 4.0], [True, False]), curve
    return status + rank


if __name__ == "__main__":
    sys.exit(in_two_processes(in_each_process, 3))
"""


def test_two_processes_have_one_curve_and_the_worse_status(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(INTEGRATIONS), *sys.path])}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4, done.stderr


def test_a_process_of_a_launcher_starts_no_others(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert processes.in_two_processes(max, 1, 2) == 2
