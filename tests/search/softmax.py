"""Random calls of `flce.softmax` and `flce.log_softmax`: any order of dimensions, steps and expansion.

The tolerances are those of tests/ops/test_softmax.py, not bounds of each element.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_softmax import FUNCTIONS, both, launched
from tests.search import arguments
from tests.search.arguments import DTYPES
from tests.search.driver import Call, Errors, Kind

DEFAULTS: dict[str, Any] = {
    "function": "softmax",
    "backend": "torch",
    "dtype": "float64",
    "sizes": (3, 5),
    "dim": 1,
    "seed": 0,
    "std": 2.0,
    "order": (),
    "steps": (),
    "expanded": None,
    "launch": (),
}


def draw(rng: random.Random, device: str) -> Call:
    backend = rng.choice(["torch", "triton"])
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
    dim = rng.randrange(len(sizes))
    sizes[dim] = arguments.size(rng, 300 if device == "cpu" else 40_000)
    rows = rng.choice([1, 1, 2, 8])
    blocks = (rng.random() < 0.5, rows, rng.choice([1, 2]), rng.choice([1, 2]) if rows == 1 else 1)
    return {
        "function": rng.choice(list(FUNCTIONS)),
        "backend": backend,
        # PyTorch's backend calls PyTorch's functions, whose intermediate results on a CPU are in half precision.
        "dtype": rng.choice(list(DTYPES)[: 2 if backend == "torch" and device == "cpu" else 4]),
        "sizes": tuple(sizes),
        "dim": dim - len(sizes) * rng.randint(0, 1),
        "seed": rng.randrange(1 << 20),
        "std": rng.choice([0.0, 0.1, 2.0, 30.0]),
        "order": tuple(rng.sample(range(len(sizes)), len(sizes))),
        "steps": tuple(rng.choice([1, 1, 1, 2]) for _ in sizes),
        "expanded": rng.choice([None, None, None, *range(len(sizes))]),
        "launch": blocks if backend == "triton" and device == "cpu" and rng.random() < 0.5 else (),
    }


def strided(call: dict[str, Any], seed: int, device: str) -> Tensor:
    """Return a random tensor with the strides of a call."""
    sizes, rank = call["sizes"], len(call["sizes"])
    order = call["order"] if len(call["order"]) == rank else tuple(range(rank))
    steps = (*call["steps"], *(1 for _ in sizes))[:rank]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn([sizes[d] * steps[d] for d in order], generator=generator, dtype=torch.float64).mul(call["std"])
    x = x.to(device, DTYPES[call["dtype"]])[tuple(slice(None, None, steps[d]) for d in order)]
    x = x.permute([order.index(d) for d in range(rank)])
    expanded = call["expanded"]
    return x if expanded is None or expanded >= rank else x.narrow(expanded, 0, 1).expand(sizes)


def check(call: dict[str, Any], device: str, errors: Errors) -> None:
    x, g = (strided(call, 2 * call["seed"] + k, device) for k in range(2))
    dim = min(call["dim"], x.dim() - 1) % x.dim()
    with arguments.backend(call["backend"]), pytest.MonkeyPatch.context() as patch:
        if call["launch"]:
            resident, rows, parts, vector = call["launch"]
            launched(patch, resident=resident, warps=1, rows=rows, parts=parts, vector=vector)
        both(call["function"], x, g, dim)


KIND = Kind("softmax", DEFAULTS, draw, check, share=0.5)
