"""Fused products for statistics and gradients, whose logits are never in memory.

They are for Hopper. Under the interpreter they are tested in float16, because its bfloat16 products are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

import flce
from flce.backends import contract
from flce.core.problem import STATS, LogprobSpec, LossSpec
from flce.engine.schedules.unnormalized import Unnormalized
from flce.planning.plan import ChunkPlan
from flce.testing.problem import Problem, make_problem, run_fused
from tests import forced
from tests.helpers import case_of, plan_for
from tests.hopper import misaligned, plan_as_on_hopper

CUDA = torch.cuda.is_available()
DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.float16]


@pytest.fixture(autouse=True)
def fused_products(monkeypatch: pytest.MonkeyPatch, triton_backend: str) -> Iterator[None]:
    yield from plan_as_on_hopper(monkeypatch)


def problem_of(device: torch.device, dtype: torch.dtype, **settings: Any) -> Problem:
    settings = {"leading": (2, 35), "hidden": 72, "vocab": 517, **settings}
    return make_problem(**settings, dtype=dtype, device=device)


def test_operands_without_descriptors(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(device, DTYPES[0], leading=(20,), hidden=64, vocab=300)
    expected = run_fused(problem, grads="").loss
    weight = misaligned(monkeypatch, problem.linear_weight)
    mine = run_fused(replace(problem, linear_weight=weight), grads="").loss
    torch.testing.assert_close(mine, expected, rtol=1e-3, atol=0)


def test_calls_that_are_not_fused(device: torch.device) -> None:
    def plan(problem: Problem, grads: str = "xwb", stats: tuple[str, ...] = (), **options: Any) -> ChunkPlan:
        return plan_for(problem, flce.ChunkOptions(**options), grads, stats)

    plain = problem_of(device, DTYPES[0])
    assert plan(plain, "").in_registers
    assert not plan(plain, "", stats=("entropy",)).in_registers
    assert not plan(plain, strategy="tokens").in_registers  # the logits are computed once
    assert not plan(problem_of(device, DTYPES[0], label_smoothing=0.1), "").in_registers
    assert not plan(problem_of(device, DTYPES[0], adapter_ranks=(4,)), "").in_registers
    assert not plan(problem_of(device, DTYPES[0], hidden=60), "").in_registers
    assert not plan(problem_of(device, torch.float32), "").in_registers


@dataclass(frozen=True)
class _WithOption(LossSpec):
    """A loss with one more option, which no product supports."""

    unsupported: float = 0.0


def test_an_option_that_products_do_not_support(device: torch.device) -> None:
    """With an option that is not in FUSED_PRODUCT_FIELDS, logits are written to memory."""
    plain = case_of(problem_of(device, DTYPES[0]), flce.ChunkOptions(), "")
    assert plain.supports_fused_products
    assert replace(plain, spec=_WithOption()).supports_fused_products
    assert not replace(plain, spec=_WithOption(unsupported=2.0)).supports_fused_products
    assert not replace(plain, spec=LossSpec(stats=("argmax",))).supports_fused_products
    # The names are fields and statistics that exist.
    assert {field.name for field in fields(LogprobSpec)} > contract.FUSED_PRODUCT_FIELDS
    assert set(STATS) > contract.EXPONENTIAL_STATS


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [100, 1408])
def test_launches_that_begin_early(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that starts before the end of a product waits for it: the results are the same to the bit."""
    from flce.backends.triton import product, replay
    from flce.backends.triton.launch import overlap_options

    g = torch.Generator("cuda").manual_seed(0)
    w = torch.randn(33000, 1024, device="cuda", generator=g).mul(0.05).bfloat16().requires_grad_()
    xs = torch.randn(12, tokens, 1024, device="cuda", generator=g).bfloat16()
    y = torch.randint(33000, (tokens,), device="cuda", generator=g)
    plans = forced.force(monkeypatch, forced.unnormalized)  # otherwise logits of so few tokens are written to memory

    def results() -> list[torch.Tensor]:
        tensors: list[Any] = []
        for x in xs:
            with torch.no_grad():
                tensors.append(flce.fused_linear_cross_entropy(x, w, y, reduction="none"))
            loss: Any = flce.fused_linear_cross_entropy(x, w, y)
            tensors += torch.autograd.grad(loss, w)
        assert {type(plan.schedule) for plan in plans} >= {Unnormalized}
        return tensors

    assert overlap_options(w.device)["OVERLAP"]
    overlapping = [results() for _ in range(3)]
    monkeypatch.setattr(product, "overlap_options", lambda device: {"OVERLAP": False})
    replay.clear()  # stored launches overlap
    expected = results()
    for tensors in overlapping:
        assert all(torch.equal(mine, other) for mine, other in zip(tensors, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 1024, 32000), (4096, 512, 50257)], ids=str)
@pytest.mark.parametrize("settings_", [{"grads": ""}, {"reduction": "none"}, {}], ids=str)
@pytest.mark.parametrize("mib", [None, 32, 64])
def test_promise(shape: tuple[int, int, int], settings_: dict[str, Any], mib: int | None) -> None:
    from tests.planning.test_plan import assert_kept, promise_and_peak

    chunking: dict[str, Any] = {"max_workspace_bytes": None if mib is None else mib << 20}
    if "grads" not in settings_:
        chunking["strategy"] = "vocab"
    assert_kept(*promise_and_peak(*shape, "cuda", {"dtype": torch.bfloat16, **settings_}, chunking))
