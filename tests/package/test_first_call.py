"""The time of a first call on a GPU, and the number of kernels that calls of other lengths compile.

Short and long calls have different schedules (see `case.FEW_LOGITS_BYTES`), so both have a first call.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.processes import run_python

pytestmark = pytest.mark.gpu

# A new process, in which Triton has compiled no kernel of this call. Before the clock starts, the libraries are loaded,
# PyTorch has created its context and handles, and Triton has hashed its own sources, which takes a second.
SCRIPT = """
    import time, torch, triton, flce

    def operands(n):
        x = torch.randn(n, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return x, torch.randint(50304, (n,), device="cuda")

    def call(n, **settings):
        x, y = operands(n)
        flce.fused_linear_cross_entropy(x, w, y, options=flce.ChunkOptions(**settings)).backward()
        torch.cuda.synchronize()

    w = torch.randn(50304, 2048, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    (operands(512)[0] @ w.T).float().sum().backward()
    flce.softmax(torch.zeros(4, 64, device="cuda"))
    torch.cuda.synchronize()
    start = time.perf_counter()
    call(4096)
    print("first", time.perf_counter() - start)

    call(2048)  # few logits: one pass; more logits: exponentials
    built = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *, repr, **_: (built.append(repr), print(repr))
    call(4096)
    for n in (4095, 2048, 777, 1, 10000):
        call(n)
    print("built", len(built))
    call(4096, strategy="vocab")
    built.clear()
    for n in (4095, 777, 10000):
        call(n, strategy="vocab")
    print("built", len(built))
"""


def test_first_call_and_other_lengths(tmp_path: Path) -> None:
    result = run_python("-c", textwrap.dedent(SCRIPT), env={"TRITON_CACHE_DIR": str(tmp_path)})
    lines = [line.split() for line in result.stdout.splitlines()]
    values = [float(words[1]) for words in lines if words and words[0] in ("first", "built")]
    first, *built = values
    assert first <= 10.0
    assert built == [0, 0], result.stdout
