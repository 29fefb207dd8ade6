"""Random calls of `flce.softmax` and `flce.log_softmax`, with the tolerances of tests/ops/test_softmax.py."""

from __future__ import annotations

import random

import pytest
import torch

from tests.ops.test_softmax import FUNCTIONS, LAYOUTS, both, launched
from tests.search import arguments
from tests.search.arguments import DTYPES
from tests.search.driver import Call, Errors, Kind

DEFAULTS: Call = {
    "function": "softmax",
    "backend": "torch",
    "dtype": "float64",
    "result": None,
    "std": 2.0,
    "launch": (),
}
DEFAULTS |= {"sizes": (3, 5), "dim": 1, "seed": 0, "layout": "contiguous", "upstream": "contiguous"}


def draw(rng: random.Random, compiled: random.Random, device: str) -> Call:
    backend = compiled.choice(["torch", "triton"])
    sizes = [compiled.randint(1, 4) for _ in range(compiled.randint(1, 4))]
    dim = compiled.randrange(len(sizes))
    sizes[dim] = arguments.smaller(rng, compiled, arguments.size(compiled, 300 if device == "cpu" else 40_000), 1 / 8)
    # Resident with some rows in a program, or online with some parts and elements of a vector.
    blocks = (compiled.choice([1, 2, 8]), 0, 1) if compiled.random() < 0.5 else (1, *compiled.choices([1, 2], k=2))
    # PyTorch's backend calls PyTorch's functions, whose intermediate results on a CPU are in half precision.
    dtypes = list(DTYPES)[: 2 if backend == "torch" and device == "cpu" else 4]
    dtype, result = compiled.choice(dtypes), compiled.choice([None, None, *dtypes])
    if device == "cpu" and {dtype, result} == {"float64", "bfloat16"}:
        result = None  # Triton's interpreter cannot convert these
    return {
        "function": compiled.choice(list(FUNCTIONS)),
        "backend": backend,
        "dtype": dtype,
        "result": result,
        "sizes": tuple(sizes),
        "dim": dim - len(sizes) * compiled.randint(0, 1),
        "seed": rng.randrange(1 << 20),
        "std": rng.choice([0.0, 0.1, 2.0, 30.0]),
        "layout": compiled.choice(list(LAYOUTS)),
        "upstream": compiled.choice(list(LAYOUTS)),
        "launch": blocks if backend == "triton" and device == "cpu" and compiled.random() < 0.5 else (),
    }


def check(call: Call, device: str, errors: Errors) -> None:
    g = torch.Generator().manual_seed(call["seed"])
    normal = [torch.randn(call["sizes"], generator=g, dtype=torch.float64) for _ in range(2)]
    x = LAYOUTS[call["layout"]]((call["std"] * normal[0]).to(device, DTYPES[call["dtype"]]))
    upstream = LAYOUTS[call["upstream"]](normal[1].to(device))
    with arguments.backend(call["backend"]), pytest.MonkeyPatch.context() as patch:
        if call["launch"]:
            rows, parts, vector = call["launch"]
            launched(patch, warps=1, rows=rows, parts=parts, vector=vector)
        dim = min(call["dim"], x.dim() - 1) % x.dim()
        both(call["function"], x, upstream, dim, DTYPES.get(call["result"]))


KIND = Kind("softmax", DEFAULTS, draw, check, share=0.5)
