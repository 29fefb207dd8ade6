"""The operator against the float64 oracle, over a selection of all combinations of options.

Every pair of levels of every two factors below occurs in at least one row of the grid.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

import flce
from flce.engine.schedules import SCHEDULES
from flce.testing.problem import Problem, make_problem, run_fused
from tests.forced import force
from tests.helpers import (
    LOSS_FACTORS,
    STATS,
    allpairs,
    check,
    least_budget_for,
    loss_arguments,
    num_blocks,
    plan_for,
    row_id,
    upstream_of,
)

INTERPRETED = not torch.cuda.is_available()
CHUNKING: dict[str, dict[str, Any]] = {
    "default": {},
    "rows1": {"strategy": "tokens", "chunk_rows": 1},
    "rows5": {"strategy": "tokens", "chunk_rows": 5},
    "rows999": {"strategy": "tokens", "chunk_rows": 999},
    "vocab": {"strategy": "vocab"},
    "vocab_least": {"strategy": "vocab", "budget": 1.0},
    "vocab_2x": {"strategy": "vocab", "budget": 2.0},
    "tokens_least": {"strategy": "tokens", "budget": 1.0},
}
LAYOUTS: dict[str, tuple[tuple[int, ...], int, int]] = {
    "17x16x71": ((17,), 16, 71),
    "3x5x8x640": ((3, 5), 8, 640),
    "2x2x4x5x300": ((2, 2, 4), 5, 300),
}
GRID = allpairs(
    {
        "layout": list(LAYOUTS),
        "chunking": list(CHUNKING),
        **LOSS_FACTORS,
        "bias": [False, True],
        "ranks": [(), (3,), (8, 16), (5, 1, 2), (40,)],
        "grads": ["xwb", "xwb", "xwbaB", "xbaB", "xB", "w", "b", ""],
        "skip": ["auto", True, False],
    }
)


def chunk_options(
    problem: Problem, spec: dict[str, Any], grads: str = "xwb", stats: Any = (), **more: Any
) -> flce.ChunkOptions:
    """Convert a row of CHUNKING into options; a budget is a multiple of the smallest budget of the call."""
    spec = dict(spec)
    factor = spec.pop("budget", None)
    if factor is None:
        return flce.ChunkOptions(**spec, **more)
    budget = int(factor * least_budget_for(problem, spec["strategy"], grads, stats, **more))
    while True:
        options = flce.ChunkOptions(**spec, max_workspace_bytes=budget, **more)
        blocks = num_blocks(plan_for(problem, options, grads, stats))
        if not INTERPRETED or os.environ["FLCE_BACKEND"] == "torch" or blocks <= 8:
            return options
        budget += budget // 4  # hundreds of launches in the interpreter would run for a minute


@pytest.mark.parametrize("row", GRID, ids=row_id)
def test_grid(row: dict[str, Any], backend: str, device: torch.device) -> None:
    leading, hidden, vocab = LAYOUTS[row["layout"]]
    arguments, stats = loss_arguments(row, device)
    bias, grads = row["bias"] or row["grads"] == "b", row["grads"]
    problem = make_problem(leading, hidden, vocab, bias=bias, adapter_ranks=row["ranks"], **arguments)
    grads = "".join(key for key in grads if (bias or key != "b") and (row["ranks"] or key not in "aB"))
    check(
        problem,
        options=chunk_options(problem, CHUNKING[row["chunking"]], grads, stats, skip_ignored=row["skip"]),
        stats=stats,
        grads=grads + "t" * ("T" in row["weights"]),
        grad_output=upstream_of(problem),
    )


@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 129, 511, 513, 1024, 1025])
def test_vocabulary_sizes_around_block_edges(vocab: int, backend: str, device: torch.device) -> None:
    problem = make_problem((6,), 8, vocab, bias=True, label_smoothing=0.05, z_loss=0.01, device=device)
    check(problem, stats=STATS)


@pytest.mark.parametrize("vocab", [4099, 32771])
def test_vocabulary_of_several_kernel_blocks(vocab: int, backend: str, device: torch.device) -> None:
    problem = make_problem((5,), 4, vocab, bias=True, label_smoothing=0.05, ignored=0.2, device=device)
    check(problem, stats=STATS)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 31, 32, 33])
def test_numbers_of_rows_around_chunk_edges(rows: int, backend: str, device: torch.device) -> None:
    problem = make_problem((rows,), 8, 40, ignored=0.2 if rows > 2 else 0.0, device=device)
    check(problem, options=flce.ChunkOptions(strategy="tokens", chunk_rows=16), stats=STATS)


@pytest.mark.parametrize("grads", ["x", "w", "b", "xw", "xwb"])
def test_every_schedule_makes_every_gradient(
    grads: str, torch_backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each schedule computes the gradients of the calls that it supports; the planner selects it for some budget."""
    plain = {"bias": True}
    hard = {"ignored": 0.4, "adapter_ranks": (3,), "dtype": torch.bfloat16, **plain}
    for reduction, arguments in itertools.product(("mean", "none"), (plain, hard)):
        p = make_problem((11,), 8, 300, reduction=reduction, device=device, **arguments)  # type: ignore[arg-type]
        p.target[0], p.target[1] = 0, 299
        options = flce.ChunkOptions(skip_ignored=arguments is hard)
        grads_of_all = grads + grads.translate(str.maketrans("xw", "aB", "b"))
        c = plan_for(p, options, grads_of_all).case
        for kind in SCHEDULES:
            sizes = kind.sizes(c)
            if sizes:
                schedule = kind.from_size(c, sizes[len(sizes) // 3])
                force(monkeypatch, lambda c, made=schedule: made)  # type: ignore[misc]
                check(p, options=options, grads=grads_of_all, tolerance=2e-2 if arguments is hard else None)


def test_nothing_is_written_into_the_arguments(backend: str, device: torch.device) -> None:
    p = make_problem(
        (17,), 8, 70, bias=True, class_weight=True, token_weight=True, ignored=0.2, softcap=4.0, device=device
    )
    tensors = [
        p.input,
        p.linear_weight,
        p.linear_bias,
        p.target,
        p.kwargs["weight"],
        p.kwargs["token_weight"],
    ]
    before = [t.clone() for t in tensors if t is not None]
    flat = p.input.detach().requires_grad_()
    loss = flce.fused_linear_cross_entropy(flat, p.linear_weight, p.target, linear_bias=p.linear_bias, **p.kwargs)
    loss.backward()
    after = [t for t in tensors if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_gradients_accumulate_over_calls(backend: str, device: torch.device) -> None:
    p = make_problem((12,), 8, 40, device=device)
    w = p.linear_weight.clone().requires_grad_()
    for part in (slice(0, 5), slice(5, 12)):
        flce.fused_linear_cross_entropy(p.input[part], w, p.target[part], reduction="sum", num_items=12).backward()
    whole = run_fused(p.with_(reduction="mean"))
    assert w.grad is not None
    assert whole.grad_weight is not None
    torch.testing.assert_close(w.grad, whole.grad_weight, rtol=1e-10, atol=1e-12)
