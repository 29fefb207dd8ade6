"""Fixtures for the scripts of `integrations/`, which tests run or import (see `pythonpath` in pyproject.toml)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.processes import ROOT, run_python


@pytest.fixture
def run_script() -> Callable[..., str]:
    """Return a function that runs a script and returns its output. An unexpected exit status fails the test."""

    def run(name: str, *arguments: str, gpu: str = "", status: int = 0) -> str:
        environment = {
            "CUDA_VISIBLE_DEVICES": gpu,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        done = run_python(f"integrations/{name}", *arguments, env=environment, status=status)
        return done.stderr if status else done.stdout

    return run


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore TF32 and the variables of Accelerate (precision, the compiler), which Trainer's arguments set."""
    import torch

    before = dict(os.environ)
    switches: tuple[Any, ...] = (torch.backends, torch.backends.cuda.matmul)
    precision, tf32 = torch.get_float32_matmul_precision(), [switch.fp32_precision for switch in switches]
    monkeypatch.setenv("FLCE_BACKEND", "torch")  # Triton's interpreter is too slow to train with
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    torch.set_float32_matmul_precision(precision)  # of PyTorch's older switch, which Accelerate uses
    for switch, before_tests in zip(switches, tf32, strict=True):
        switch.fp32_precision = before_tests
    for name in os.environ.keys() - before.keys():
        if name.startswith("ACCELERATE_"):
            del os.environ[name]


@pytest.fixture
def fresh_accelerator() -> None:
    """Reset the state of Accelerate, which other tests may have initialized differently."""
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
