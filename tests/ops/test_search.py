"""Property-based search over the arguments of the functions: `make test` runs 20 calls of each test, `make fuzz` 1,000.

Most calls run in float64, so that a failure is a bug and not rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flce
from flce.testing.problem import ALL_GRADS, Problem, make_problem
from tests import helpers, logits
from tests.helpers import STATS, least_budget_for
from tests.ops import test_cross_entropy, test_softmax

FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
# Relative to the largest element. In half precision this checks the formulas; test_numerics.py checks the exactness.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
ASKED = st.sets(st.sampled_from(STATS)).map(lambda names: tuple(sorted(names)))
GRADS = st.sampled_from(
    [ALL_GRADS, ALL_GRADS, ALL_GRADS + "t", "xt", "t", "x", "w", "xw", "b", "xaB", "aB", "a", "B", ""]
)


@st.composite
def losses(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the arguments of all losses, as plain values so that a failing example prints itself."""
    vocab = draw(st.one_of(st.integers(1, 12), st.integers(13, 90)))
    reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float64, *TOLERANCES]))
    return {
        "vocab": vocab,
        "dtype": dtype,
        "class_weight": draw(st.booleans()),
        "token_weight": draw(st.booleans()),
        "ignored": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "ignore_index": draw(st.sampled_from([-100, 0, vocab - 1, vocab + 5, -1])),
        "target_dtype": draw(st.sampled_from([torch.int64, torch.int32])),
        "std": draw(st.sampled_from([0.0, 0.1, 2.0, 30.0] if dtype == torch.float64 else [0.0, 0.1, 2.0])),
        "seed": draw(st.integers(0, 5)),
        "reduction": reduction,
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 0.9, 1.0])),
        "softcap": draw(st.sampled_from([None, None, 0.5, 3.0, 30.0])),
        "logit_scale": draw(st.sampled_from([1.0, 0.0, -0.7, 0.1, 2.5])),
        "temperature": draw(st.sampled_from([1.0, 0.3, 3.0])),
        "z_loss": draw(st.sampled_from([0.0, 1e-4, 0.5])),
        "num_items": draw(st.sampled_from([None, 1, 13])) if reduction == "sum" else None,
        "shift": draw(st.integers(0, 3)),
    }


def expectation(problem: Problem, call: dict[str, Any], stats: tuple[str, ...]) -> dict[str, Any]:
    """Return statistics that can be compared, an upstream gradient and a tolerance."""
    if call["dtype"] != torch.float64:
        stats = ()
    elif call["std"] == 30.0 or call["softcap"] == 0.5:  # a saturated tanh gives ties, broken by rounding
        stats = tuple(s for s in stats if s not in ("argmax", "correct"))
    shape = problem.target.shape if call["reduction"] == "none" else ()
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tolerance = 1e-9 if call["std"] == 30.0 else TOLERANCES[call["dtype"]]
    return {"stats": stats, "grad_output": upstream, "tolerance": tolerance}


@st.composite
def heads(draw: st.DrawFn) -> dict[str, Any]:
    call = draw(losses())
    some = st.tuples(st.integers(1, 12)) | st.tuples(st.integers(1, 3), st.integers(1, 4))
    leading = draw(some | st.just(()) | st.tuples(st.integers(0, 2), st.integers(0, 3)))
    return {
        **call,
        "leading": leading,
        "shift": min(call["shift"], *leading[-1:]) if leading else 0,
        "hidden": draw(st.integers(1, 9)),
        "bias": draw(st.booleans()),
        "adapter_ranks": draw(st.just(()) | st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)),
    }


@st.composite
def chunkings(draw: st.DrawFn) -> dict[str, Any]:
    """Draw arguments of ChunkOptions. `beyond`: bytes above the smallest budget of the call."""
    strategy = draw(st.sampled_from(["auto", "tokens", "vocab"]))
    out: dict[str, Any] = {"strategy": strategy, "skip_ignored": draw(st.sampled_from(["auto", True, False]))}
    how = draw(st.sampled_from(["default", "rows", "least", "roomy"]))
    if how == "rows" and strategy != "vocab":
        out["chunk_rows"] = draw(st.integers(1, 14))
    elif how in ("least", "roomy"):
        out["beyond"] = draw(st.integers(0, 5000)) if how == "roomy" else 0
    return out


@FIXTURES
@given(call=heads(), chunking=chunkings(), grads=GRADS, stats=ASKED)
def test_linear_cross_entropy(
    backend: str, device: torch.device, call: dict[str, Any], chunking: dict[str, Any], grads: str, stats: Any
) -> None:
    problem = make_problem(**call, device=device)
    how = expectation(problem, call, stats)
    missing = ("" if call["bias"] else "b") + ("" if call["adapter_ranks"] else "aB")
    missing += "" if call["token_weight"] else "t"
    how["grads"] = grads = "".join(key for key in grads if key not in missing)
    chunking = dict(chunking)
    beyond = chunking.pop("beyond", None)
    if beyond is not None and problem.target.numel():
        least = least_budget_for(
            problem, chunking["strategy"], grads, how["stats"], skip_ignored=chunking["skip_ignored"]
        )
        chunking["max_workspace_bytes"] = least + beyond
    helpers.check(problem, options=flce.ChunkOptions(**chunking), **how)


@FIXTURES
@given(
    call=losses(),
    leading=st.tuples(st.integers(1, 4), st.integers(1, 5)) | st.tuples(st.integers(0, 1), st.just(3)),
    layout=st.sampled_from(list(logits.LAYOUTS)),
    inplace=st.booleans(),
    grad=st.booleans(),
    weigh=st.booleans(),
    stats=ASKED,
)
def test_cross_entropy_of_logits(
    backend: str,
    device: torch.device,
    call: dict[str, Any],
    leading: tuple[int, int],
    layout: str,
    inplace: bool,
    grad: bool,
    weigh: bool,
    stats: Any,
) -> None:
    call = {**call, "shift": min(call["shift"], leading[1])}
    problem = logits.make(leading, **call, device=device)
    inplace = inplace and logits.LAYOUTS[layout][2]
    how = {"inplace": inplace, "grad": grad, "weigh": weigh and call["token_weight"]}
    test_cross_entropy.check(problem, layout, **how, **expectation(problem, call, stats))


@st.composite
def strided(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Draw an input and an upstream gradient with any dimension order, steps and expansion; and a dimension."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(sizes) - 1))
    sizes[dim] = draw(st.integers(1, 40))

    def tensor() -> Tensor:
        order = draw(st.permutations(range(len(sizes))))
        steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in sizes]
        seed = draw(st.integers(0, 3))
        x = torch.randn([sizes[d] * steps[d] for d in order], generator=torch.Generator().manual_seed(seed))
        x = x.double()[tuple(slice(None, None, steps[d]) for d in order)]
        x = x.permute([order.index(d) for d in range(len(sizes))])
        expanded = draw(st.sampled_from([None, None, *range(len(sizes))]))
        return x if expanded is None else x.narrow(expanded, 0, 1).expand(sizes)

    return tensor(), tensor(), dim - len(sizes) * draw(st.integers(0, 1))


@test_softmax.BOTH
@FIXTURES
@given(call=strided())
def test_softmax_of_any_strides(
    name: str, backend: str, device: torch.device, call: tuple[Tensor, Tensor, int]
) -> None:
    x, g, dim = call
    test_softmax.both(name, x.to(device), g.to(device), dim)


@test_softmax.BOTH
@FIXTURES
@given(
    call=strided(),
    rows=st.sampled_from([1, 1, 2, 8]),
    parts=st.sampled_from([1, 2]),
    vector=st.sampled_from([1, 2]),
    resident=st.booleans(),
)
def test_softmax_in_any_blocks(
    name: str,
    triton_backend: str,
    device: torch.device,
    call: tuple[Tensor, Tensor, int],
    rows: int,
    parts: int,
    vector: int,
    resident: bool,
) -> None:
    x, g, dim = call
    with pytest.MonkeyPatch.context() as patch:
        vector = vector if rows == 1 else 1
        test_softmax.launched(patch, resident=resident, warps=1, rows=rows, parts=parts, vector=vector)
        test_softmax.both(name, x.to(device), g.to(device), dim)
