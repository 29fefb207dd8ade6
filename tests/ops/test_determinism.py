"""Equal bits across runs, processes, GPUs of one kind, and beside other work."""

from __future__ import annotations

import hashlib

import pytest
import torch

from tests.processes import run_python
from tests.search import arguments, linear_loss
from tests.search.driver import Call

CALLS: list[Call] = [
    {"dtype": "bfloat16"},
    {"dtype": "float16", "softcap": 5.0, "bias": True, "adapter_ranks": (4,), "ignored": "some"},
    {"dtype": "float32", "reduction": "none", "token_weight": True, "class_weight": True},
]


def fingerprints(device: str) -> list[str]:
    """Return a hash of the bits of all results, for each call and strategy."""
    torch.set_num_threads(1)
    found, (n, h, v) = [], (300, 64, 2000) if device == "cpu" else (3000, 512, 32000)
    for given in CALLS:
        for strategy in ("tokens", "vocab"):
            sizes = {"leading": (n,), "hidden": h, "vocab": v, "strategy": strategy}
            call = {**linear_loss.KIND.defaults, **sizes, **given}
            p = arguments.head_of(call, device).map(lambda t, letter: t.requires_grad_())
            options, stats = linear_loss.options_of(call, p, call["grads"]), ("lse", "entropy", "argmax")
            step = linear_loss.Step(p, options, stats, arguments.upstream_of(call, p))
            loss, output, grads = linear_loss.run(step, "eager")
            hashed = hashlib.sha256()
            for t in (loss, *(getattr(output, name) for name in stats), *grads.values()):
                hashed.update(t.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
            found.append(hashed.hexdigest())
    return found


PROGRAM = """
import torch
from tests.ops.test_determinism import fingerprints
torch.use_deterministic_algorithms({})
print(fingerprints("{}"))
"""


def in_process(device: str, deterministic: bool) -> str:
    backend = "torch" if device == "cpu" else "triton"
    # With deterministic algorithms PyTorch requires a fixed workspace of cuBLAS. Another workspace may change bits.
    env = {"FLCE_BACKEND": backend, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return run_python("-c", PROGRAM.format(deterministic, device), env=env).stdout.strip().splitlines()[-1]


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
