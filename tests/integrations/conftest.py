"""The scripts of `integrations/`: run as a user runs them, or imported (see `pythonpath` in pyproject.toml)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_script() -> Callable[..., str]:
    """``run_script("qlora.py", "--steps=15")``: what the script said. Another exit status fails the test."""

    def run(name: str, *arguments: str, gpu: str = "", status: int = 0) -> str:
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": gpu,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        environment.pop("TRITON_INTERPRET", None)  # as a user has it
        if gpu:
            environment.pop("FLCE_BACKEND", None)
        done = subprocess.run(
            [sys.executable, f"integrations/{name}", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr if status else done.stdout

    return run


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainer's arguments set variables of Accelerate (precision, the compiler) and TF32, and leave them so."""
    import torch

    before, tf32 = dict(os.environ), torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setenv("FLCE_BACKEND", "torch")  # Triton's interpreter is too slow to train with
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    torch.backends.cuda.matmul.allow_tf32 = tf32
    for name in os.environ.keys() - before.keys():
        if name.startswith("ACCELERATE_"):
            del os.environ[name]


@pytest.fixture
def fresh_accelerator() -> None:
    """Accelerate keeps what a process began with, and other tests may have begun otherwise."""
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def fail_on_materialize() -> Iterator[None]:
    """Fails the test where lazy logits become real without having been asked to."""
    from flce.huggingface import MaterializedLogitsWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", MaterializedLogitsWarning)
        yield
