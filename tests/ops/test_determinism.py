"""Equal bits across runs, processes, GPUs of one kind, and beside other work."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.testing.problem import make_problem, run_fused
from tests.processes import run_python

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"dtype": torch.bfloat16},
    "options": {"dtype": torch.float16, "softcap": 5.0, "bias": True, "adapter_ranks": (4,), "ignored": 0.3},
    "tokens": {"dtype": torch.float32, "reduction": "none", "token_weight": True, "class_weight": True},
}


def fingerprints(device: str) -> list[str]:
    """Return a hash of the bits of all results, for each kind and strategy."""
    torch.set_num_threads(1)
    found, size = [], (300, 64, 2000) if device == "cpu" else (3000, 512, 32000)
    for arguments in KINDS.values():
        p = make_problem(size[:1], *size[1:], device=device, **arguments)
        for strategy in ("tokens", "vocab"):
            options = flce.ChunkOptions(strategy=strategy)
            r = run_fused(p, options=options, stats=("lse", "entropy", "argmax"))
            values = [r.loss, r.grad_input, r.grad_weight, r.grad_bias, *(t for pair in r.grad_adapters for t in pair)]
            values += [r.output.lse, r.output.entropy, r.output.argmax]
            hashed = hashlib.sha256()
            for t in values:
                if isinstance(t, Tensor):
                    hashed.update(t.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
            found.append(hashed.hexdigest())
    return found


PROGRAM = """
import torch
from tests.ops.test_determinism import fingerprints
torch.use_deterministic_algorithms(DETERMINISTIC)
print(fingerprints("DEVICE"))
"""


def in_process(device: str, deterministic: bool) -> str:
    program = PROGRAM.replace("DETERMINISTIC", str(deterministic)).replace("DEVICE", device)
    backend = "torch" if device == "cpu" else "triton"
    # With deterministic algorithms PyTorch requires a fixed workspace of cuBLAS. Another workspace may change bits.
    done = run_python("-c", program, env={"FLCE_BACKEND": backend, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    return done.stdout.strip().splitlines()[-1]


def test_processes_and_deterministic_algorithms(torch_backend: str) -> None:
    """Equal bits in two processes, of which one runs under `torch.use_deterministic_algorithms(True)`."""
    if torch.cuda.is_available():
        assert in_process("cuda", False) == in_process("cuda", True)
        return
    threads = torch.get_num_threads()
    expected = fingerprints("cpu")
    torch.set_num_threads(threads)
    assert in_process("cpu", True) == str(expected)


@pytest.mark.gpu
def test_beside_other_work() -> None:
    expected, work = fingerprints("cuda"), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                work @ work
        assert fingerprints("cuda") == expected
    for other in range(1, torch.cuda.device_count()):
        if torch.cuda.get_device_name(other) == torch.cuda.get_device_name(0):
            assert fingerprints(f"cuda:{other}") == expected
