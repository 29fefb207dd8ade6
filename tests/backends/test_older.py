"""Kernel tests with the code and the launch sizes of an A100 and a 4090, run on a newer GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flce

pytest.importorskip("triton")

ROOT = Path(flce.__file__).parents[1]
FILES = ("tests/backends/test_kernels.py", "tests/ops/test_softmax.py", "tests/ops/test_cross_entropy.py")
KERNELS = {"cross_entropy_kernel", "softmax_kernel", "scale_kernel"}


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", ["A100-80GB", "RTX-4090"])
def test_older_code_runs_here(device: str, tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    log = tmp_path / "log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables = kept | {
        "PYTHONPATH": str(ROOT),
        "OLDER_DEVICE": device,
        "OLDER_LOG": str(log),
        "OMP_NUM_THREADS": "1",
        # torch.compile also compiles for the older device: in the same process, with a separate cache.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    many = str(min(8, os.cpu_count() or 1))
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--maxfail=20", "-p", "tests.older", "-n", many]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *FILES], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    compiled = log.read_text().split()
    print(f"{device}: {len(compiled)} kernels")
    assert {*compiled} >= KERNELS
