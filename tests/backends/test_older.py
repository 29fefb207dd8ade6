"""Kernel tests with the code and the launch sizes of an A100 and a 4090, run on a newer GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.processes import run_python

pytest.importorskip("triton")

FILES = ("tests/backends/test_kernels.py", "tests/ops/test_softmax.py", "tests/ops/test_cross_entropy.py")
KERNELS = {"cross_entropy_kernel", "softmax_kernel", "scale_kernel"}


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", ["A100-80GB", "RTX-4090"])
def test_older_code_runs_here(device: str, tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    log = tmp_path / "log"
    variables = {
        "OLDER_DEVICE": device,
        "OLDER_LOG": str(log),
        "OMP_NUM_THREADS": "1",
        # torch.compile also compiles for the older device: in the same process, with a separate cache.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    many = str(min(8, os.cpu_count() or 1))
    command = ["-m", "pytest", "-q", "--tb=short", "--maxfail=20", "-p", "tests.older", "-n", many]
    done = run_python(*command, "-p", "no:cacheprovider", *FILES, env=variables, timeout=900)
    print(done.stdout[-3000:])
    compiled = log.read_text().split()
    print(f"{device}: {len(compiled)} kernels")
    assert {*compiled} >= KERNELS
