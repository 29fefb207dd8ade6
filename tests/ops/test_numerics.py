"""Exactness of a large call on a GPU. tests/search compares small calls with bounds of their errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flce
from flce.testing.problem import EXACT_LOGITS, Problem, relative_error, run_fused, run_oracle


@pytest.mark.gpu
def test_the_case_of_the_design_on_cuda() -> None:
    """N 32768, H 1024, V 32000, logits of standard deviation 4, on a GPU: the table of exactness."""
    g = torch.Generator(device="cuda").manual_seed(0)
    n, h, v = 32768, 1024, 32000
    x = torch.randn(n, h, generator=g, device="cuda").bfloat16()
    w = (torch.randn(v, h, generator=g, device="cuda") * 4 / h**0.5).bfloat16()
    y = torch.randint(0, v, (n,), generator=g, device="cuda")
    p = Problem(x, w, y)
    expected = run_oracle(p)
    limits = {torch.bfloat16: (6e-5, 7.8e-3, 7.9e-3), None: (EXACT_LOGITS[x.dtype].loss, 2.5e-3, 2.5e-3)}
    for dtype, allowed in limits.items():
        found: Any = run_fused(p, options=flce.ChunkOptions(logits_dtype=dtype))
        for name, limit in zip(("loss", "grad_input", "grad_weight"), allowed, strict=True):
            assert relative_error(getattr(found, name), getattr(expected, name)) <= limit * (1.05 if dtype else 1.0)
