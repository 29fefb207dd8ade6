"""The operator's schedules, its arguments, and its gradients over several calls. tests/search has random calls."""

from __future__ import annotations

import itertools

import pytest
import torch

import flce
from flce.planning.search import SCHEDULES
from flce.testing.problem import make_problem
from tests.forced import force
from tests.helpers import check, plan_for


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
