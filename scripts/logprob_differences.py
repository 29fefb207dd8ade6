"""Differences and errors of `flce.linear_logprobs` on a CPU: the tables of docs/rl.md and docs/numerics.md.

python scripts/logprob_differences.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flce
from flce.testing.problem import make_problem

SHAPES = ((256, 256, 2000), (512, 1024, 32000), (64, 2048, 50000))  # N, H, V
SMALL_BUDGET = flce.ChunkOptions(max_workspace_bytes=4 << 20)


def differences(x: Tensor, w: Tensor, y: Tensor) -> dict[str, float]:
    """Return the largest difference of a `logprob` from its value in the whole batch, for each change."""

    def logprob(rows: Tensor, candidates: Tensor | None = None, **more: object) -> Tensor:
        named: Any = {"outputs": ("logprob",), **more}
        out = flce.linear_logprobs(x[rows], w, y[rows], candidates=candidates, **named)
        result = out.logprob if out.candidate_logprob is None else out.candidate_logprob[:, 0]
        assert result is not None
        return result

    everything = torch.arange(len(x))
    batch, order = logprob(everything), torch.randperm(len(x))
    found = {
        "another order": logprob(order) - batch[order],
        "other outputs and top_k": logprob(everything, outputs=("logprob", "entropy", "correct"), top_k=4) - batch,
        "the first 32 alone": logprob(everything[:32]) - batch[:32],
        "the first 7 alone": logprob(everything[:7]) - batch[:7],
        "each of the first 32 alone": torch.cat([logprob(row[None]) for row in everything[:32]]) - batch[:32],
        "4 MiB": logprob(everything, options=SMALL_BUDGET) - batch,
        "the target as a candidate": logprob(everything, y[:, None]) - batch,
    }
    return {name: difference.abs().max().item() for name, difference in found.items()}


def errors(x: Tensor, w: Tensor, y: Tensor) -> dict[str, float]:
    """Return the relative errors of the norm over tokens, against float64."""
    out = flce.linear_logprobs(x, w, y)
    logp = (x.double() @ w.double().t()).log_softmax(-1)
    exact = {"logprob": logp.gather(-1, y[:, None])[:, 0], "entropy": -(logp.exp() * logp).sum(-1)}
    return {name: ((getattr(out, name) - value).norm() / value.norm()).item() for name, value in exact.items()}


def main() -> None:
    torch.manual_seed(0)
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    for n, h, v in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            p = make_problem((n,), h, v, dtype=dtype, std=4.0)
            tensors = p.input, p.linear_weight, p.target
            with torch.no_grad():
                figures = {**differences(*tensors), **errors(*tensors)}
            print(f"{n} x {h} x {v}, {str(dtype)[6:]}:", ", ".join(f"{k} {f:.1e}" for k, f in figures.items()))


if __name__ == "__main__":
    main()
