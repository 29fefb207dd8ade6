"""A search over the same space as the grid, in float64 so that what it finds is a bug and not rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flce
from flce.testing.problem import ALL_GRADS, make_problem, run_fused
from tests.helpers import STATS, check, least_for

# Multiplied up by HYPOTHESIS_PROFILE=search.
EXAMPLES = settings.default.max_examples if settings.default else 40
FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """One call, as plain values so that a failing example prints itself."""
    leading = draw(
        st.one_of(
            st.tuples(st.integers(1, 12)),
            st.tuples(st.integers(1, 3), st.integers(1, 4)),
            st.just(()),
            st.tuples(st.integers(0, 2), st.integers(0, 3)),
        )
    )
    vocab = draw(st.one_of(st.integers(1, 12), st.integers(13, 90)))
    reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    return {
        "leading": leading,
        "hidden": draw(st.integers(1, 9)),
        "vocab": vocab,
        "bias": draw(st.booleans()),
        "class_weight": draw(st.booleans()),
        "token_weight": draw(st.booleans()),
        "adapter_ranks": draw(st.just(()) | st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)),
        "ignored": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "ignore_index": draw(st.sampled_from([-100, 0, vocab - 1, vocab + 5, -1])),
        "target_dtype": draw(st.sampled_from([torch.int64, torch.int32])),
        "std": draw(st.sampled_from([0.0, 0.1, 2.0, 30.0])),
        "seed": draw(st.integers(0, 5)),
        "reduction": reduction,
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 0.9, 1.0])),
        "softcap": draw(st.sampled_from([None, None, 0.5, 3.0, 30.0])),
        "logit_scale": draw(st.sampled_from([1.0, 0.0, -0.7, 0.1, 2.5])),
        "temperature": draw(st.sampled_from([1.0, 0.3, 3.0])),
        "z_loss": draw(st.sampled_from([0.0, 1e-4, 0.5])),
        "num_items": draw(st.sampled_from([None, 1, 13])) if reduction == "sum" else None,
        "shift": draw(st.integers(0, 3)) if leading else 0,
    }


@st.composite
def chunkings(draw: st.DrawFn) -> dict[str, Any]:
    strategy = draw(st.sampled_from(["auto", "tokens", "vocab"]))
    how = draw(st.sampled_from(["default", "rows", "least", "roomy"]))
    out: dict[str, Any] = {"strategy": strategy, "skip_ignored": draw(st.sampled_from(["auto", True, False]))}
    if how == "rows" and strategy != "vocab":
        out["chunk_rows"] = draw(st.integers(1, 14))
    elif how in ("least", "roomy"):
        out["how"] = how
        out["extra"] = draw(st.integers(0, 5000)) if how == "roomy" else 0
    return out


def options_of(problem: Any, chunking: dict[str, Any], grads: str, stats: Any) -> flce.ChunkOptions:
    chunking = dict(chunking)
    how, extra = chunking.pop("how", None), chunking.pop("extra", 0)
    if how is not None and problem.target.numel():
        least = least_for(problem, chunking["strategy"], grads, stats, skip_ignored=chunking["skip_ignored"])
        chunking["max_workspace_bytes"] = least + extra
    return flce.ChunkOptions(**chunking)


def search(call: dict[str, Any], chunking: dict[str, Any], grads: str, stats: Any, device: Any) -> None:
    problem = make_problem(**call, device=device)
    if call["std"] == 30.0 or call["softcap"] == 0.5:  # a saturated tanh ties, and which way is rounding
        stats = tuple(s for s in stats if s not in ("argmax", "correct"))
    if call["std"] == 0.0 and not call["bias"]:
        assert not problem.linear_weight.any()  # all rows equal: ties everywhere
    shape = problem.target.shape if call["reduction"] == "none" else ()
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    check(
        problem,
        options=options_of(problem, chunking, grads, stats),
        stats=stats,
        grads=grads,
        grad_output=upstream,
        tolerance=1e-9 if call["std"] == 30.0 else 1e-10,
    )


GRADS = st.sampled_from([ALL_GRADS, ALL_GRADS, "x", "w", "xw", "b", "xaB", "aB", "a", "B", ""])


def possible(grads: str, call: dict[str, Any]) -> str:
    """Those of `grads` that the call has a tensor for."""
    missing = ("" if call["bias"] else "b") + ("" if call["adapter_ranks"] else "aB")
    return "".join(key for key in grads if key not in missing)


ASKED = st.sets(st.sampled_from(STATS)).map(lambda names: tuple(sorted(names)))


@settings(FIXTURES, max_examples=4 * EXAMPLES)
@given(call=calls(), chunking=chunkings(), grads=GRADS, stats=ASKED)
def test_search_torch(
    torch_backend: str, device: torch.device, call: Any, chunking: Any, grads: str, stats: Any
) -> None:
    search(call, chunking, possible(grads, call), stats, device)


@settings(FIXTURES, max_examples=3 * EXAMPLES // 2)
@given(call=calls(), chunking=chunkings(), grads=GRADS, stats=ASKED)
def test_search_triton(
    triton_backend: str, device: torch.device, call: Any, chunking: Any, grads: str, stats: Any
) -> None:
    search(call, chunking, possible(grads, call), stats, device)


@settings(FIXTURES, max_examples=EXAMPLES // 2)
@given(call=calls(), rows=st.integers(1, 14))
def test_strategies_and_backends_agree(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, call: dict[str, Any], rows: int
) -> None:
    """Whatever the plan and the backend, it is the same function."""
    pytest.importorskip("triton")
    problem = make_problem(**call, device=device)
    results = []
    for backend in ("torch", "triton"):
        for options in (
            flce.ChunkOptions(strategy="tokens", chunk_rows=rows),
            flce.ChunkOptions(strategy="vocab"),
        ):
            monkeypatch.setenv("FLCE_BACKEND", backend)
            results.append(run_fused(problem, options=options))
    first = results[0]
    for other in results[1:]:
        pairs = [
            (getattr(first, name), getattr(other, name)) for name in ("loss", "grad_input", "grad_weight", "grad_bias")
        ]
        for one, two in zip(first.grad_adapters, other.grad_adapters, strict=True):
            pairs += zip(one, two, strict=True)
        for a, b in pairs:
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, equal_nan=True)


@settings(FIXTURES, max_examples=EXAMPLES)
@given(call=calls(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_lower_precision_stays_near(
    torch_backend: str, device: torch.device, call: dict[str, Any], dtype: torch.dtype
) -> None:
    """Not the exactness (test_numerics.py has that) but the formulas: nothing may be off by more than rounding."""
    if call["std"] == 30.0:
        call = {**call, "std": 2.0}
    problem = make_problem(**call, dtype=dtype, device=device)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    check(problem, tolerance=tolerance)
