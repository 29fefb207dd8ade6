"""Errors of gradients of losses, log-probabilities and entropies on real heads, against float64: flce, sampled, stock.

python scripts/sampled_errors.py --out errors.txt
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flce

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "integrations"))
from benchmarks.real_heads import TEXTS, real_head
from flce.testing.problem import relative_error

METHODS: dict[str, flce.ChunkOptions | None] = {
    "flce": flce.ChunkOptions(),
    "flce, sampled": flce.ChunkOptions(sample_below=2.0**-12),
    "stock": None,
}
ROWS = 512  # tokens whose logits are in memory at once


def values(x: Tensor, w: Tensor, y: Tensor, name: str, options: flce.ChunkOptions | None) -> Tensor:
    """Return one number for each token. Options of None: from all logits."""
    if options is not None:
        result: Any = flce.linear_logprobs(x, w, y, outputs=(name,), options=options)
        found: Tensor = getattr(result, name)
        return found
    logits = x @ w.t()
    logprobs = (logits if x.dtype == torch.float64 else logits.float()).log_softmax(-1)
    return logprobs.gather(1, y[:, None])[:, 0] if name == "logprob" else -(logprobs.exp() * logprobs).sum(-1)


def gradients(x: Tensor, w: Tensor, y: Tensor, upstream: Tensor, name: str, options: Any = None) -> tuple[Tensor, ...]:
    """Return the gradients of the hidden states and of the head. In float64 the tokens are divided into chunks."""
    a, b = (tensor.detach().requires_grad_() for tensor in (x, w))
    rows = ROWS if x.dtype == torch.float64 else len(x)
    for part, labels, weights in zip(a.split(rows), y.split(rows), upstream.split(rows), strict=True):
        (values(part, b, labels, name, options) * weights).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    return a.grad, b.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3")
    parser.add_argument("--shape", type=int, nargs=3, default=(8192, 640, 262144), metavar=("N", "H", "V"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    lines = ["| head | value | method | dX | dW |", "|---|---|---|---:|---:|"]
    for text in TEXTS:
        x, w, y = real_head(f"{arguments.model} {text}", tuple(arguments.shape), device)
        x, w = x.bfloat16(), w.bfloat16()
        upstream = torch.rand(len(x), device=device, generator=torch.Generator(device).manual_seed(0)) + 0.5
        for name in ("logprob", "entropy"):
            exact = gradients(x.double(), w.double(), y, upstream.double(), name)
            for method, options in METHODS.items():
                found = gradients(x, w, y, upstream, name, options)
                errors = [relative_error(*pair) for pair in zip(found, exact, strict=True)]
                lines.append(f"| {arguments.model} {text} | {name} | {method} | {errors[0]:.1e} | {errors[1]:.1e} |")
                print(lines[-1], flush=True)
    arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
