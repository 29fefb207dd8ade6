"""Gradients whose products have E4M3 operands (`ChunkOptions.grad_dtype`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.backends import load_backend
from flce.backends.contract import E4M3, ENTRY_SLOTS, LARGE_SHARE, Entries, QuantizedTile
from flce.core.device_record import KNOWN_KINDS
from flce.core.gemm import e4m3_scale, matmul
from flce.engine.e4m3 import ChunkSizes
from flce.planning import search
from flce.testing.problem import Problem, make_problem, relative_error, run_fused, run_oracle, run_stock
from tests import interpreted_bfloat16, interpreted_e4m3
from tests.helpers import parametrize_pairs, plan_for
from tests.hopper import case_on_hopper, plan_as_on_hopper

CUDA = torch.cuda.is_available()
BF16 = torch.bfloat16
# Error of the gradients of small problems, relative to the norm.
LIMIT = 4e-3


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Divide chunks into groups, and groups into tiles. Correct the interpreter."""
    monkeypatch.setattr(
        "flce.engine.schedules.e4m3.chunk_sizes", lambda c, rows: ChunkSizes(rows, min(rows, 32), min(rows, 16))
    )
    monkeypatch.setattr("flce.engine.e4m3.BLOCK_BYTES", 4 * 64 * 70)  # several blocks of dW
    search.plan_for_case.cache_clear()
    if not CUDA:
        interpreted_bfloat16.fix_interpreter(monkeypatch)
        interpreted_e4m3.fix_interpreter(monkeypatch)
    yield
    search.plan_for_case.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, triton_backend: str) -> Iterator[None]:
    yield from plan_as_on_hopper(monkeypatch)


@pytest.fixture
def emulated(request: pytest.FixtureRequest, torch_backend: str, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the PyTorch backend emulates E4M3 only on a CPU")


def options_of(**options: Any) -> flce.ChunkOptions:
    return flce.ChunkOptions(grad_dtype=E4M3, **options)


def problem_of(device: torch.device, **settings: Any) -> Problem:
    settings = {"leading": (2, 35), "hidden": 64, "vocab": 517, **settings}
    return make_problem(**settings, dtype=BF16, device=device)


def check(problem: Problem, options: flce.ChunkOptions, grads: str = "xw", limit: float = LIMIT) -> Any:
    """Compare with the oracle."""
    plan = plan_for(problem, options, grads)
    assert type(plan.schedule).__name__.startswith("E4M3"), plan
    mine = run_fused(problem, options=options, grads=grads, grad_output=upstream(problem))
    exact = run_oracle(problem, grad_output=upstream(problem))
    assert relative_error(mine.loss, exact.loss) <= 1e-5
    for letter, name in (("x", "grad_input"), ("w", "grad_weight")):
        if letter in grads:
            got = getattr(mine, name)
            assert got.dtype == BF16
            assert relative_error(got, getattr(exact, name)) <= limit, name
    return mine


def upstream(problem: Problem) -> Tensor | float:
    if problem.kwargs.get("reduction") != "none":
        return 1.7
    return torch.linspace(-0.5, 2.0, problem.target.numel(), device=problem.target.device).view(problem.target.shape)


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few classes": {"vocab": 20},
    "one row": {"leading": (1,), "vocab": 300},
    "ignored": {"ignored": 0.4},
    "few not ignored": {"leading": (40,), "ignored": 0.9},
    "weights": {"z_loss": 0.05, "token_weight": True, "class_weight": True},
    "softcap": {"softcap": 3.0, "logit_scale": 0.5, "temperature": 1.3},
    "scale": {"logit_scale": -1.5, "token_weight": True, "ignored": 0.2},
    "num_items": {"reduction": "sum", "num_items": 77, "vocab": 320},
    "each token": {"reduction": "none", "softcap": 5.0, "ignored": 0.3},
}
PAIRS: dict[str, Any] = {
    "extras": list(EXTRAS),
    "skip": [False, True],
    "rows": [None, 37, 48],
    "grads": ["xw", "x", "w"],
}


@pytest.mark.parametrize("extras, rows", [("plain", None), ("softcap", None), ("scale", 17), ("each token", 20)])
def test_as_on_hopper(extras: str, rows: int | None, hopper: None, device: torch.device, monkeypatch: Any) -> None:
    """Exponentials in registers, and kernels."""
    monkeypatch.setattr("flce.engine.case.FEW_LOGITS_BYTES", 0)  # the default, too, has logits in registers
    problem = problem_of(device, **{**EXTRAS[extras], "leading": (22,), "vocab": 270})
    mine = check(problem, options_of(skip_ignored=extras != "plain", chunk_rows=rows))
    assert relative_error(run_fused(problem, grads="xw", grad_output=upstream(problem)).loss, mine.loss) <= 3e-7


@pytest.mark.parametrize("case", ["too small", "too large", "out of range", "-inf"])
def test_samples_that_mislead(case: str, hopper: None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample of a row predicts a sum that is too small, and more than 255 entries are large; or another sum."""
    monkeypatch.setattr("flce.backends.triton.exponentials.E4M3_SAMPLES", 16)
    z, bias = torch.randn(20, 600, generator=torch.Generator().manual_seed(0)), torch.zeros(600)
    z[::2, 1::2] += 9.0
    if case == "too large":
        z[:, 0] = 12.0
    elif case == "out of range":
        z[3, 1:9], z[4, 5] = torch.linspace(107.0, 110.0, 8), 250.0
    elif case == "-inf":
        bias[::2] = -torch.inf
    x, w = torch.eye(20, 32), torch.cat((z.t(), torch.ones(600, 12)), 1)  # x w^T is z
    x, w, bias = (t.to(device, BF16) for t in (x, w, bias))
    problem = Problem(x, w, torch.arange(20, device=device) * 2 + 1, bias)
    check(problem, options_of(), limit=0.015)  # 300 equal classes: E4M3 has this error


@pytest.mark.gpu
@parametrize_pairs(**PAIRS, vocab=[5003, 5008])
def test_on_a_gpu(
    extras: str, skip: bool, rows: int | None, grads: str, vocab: int, hopper: None, device: torch.device,
    monkeypatch: Any,
) -> None:  # fmt: skip
    monkeypatch.undo()
    problem = problem_of(device, **{"leading": (2, 700), "hidden": 256, "vocab": vocab, **EXTRAS[extras]})
    options = options_of(skip_ignored=skip, chunk_rows=rows and 10 * rows)
    outcomes = [check(problem, options, grads) for _ in range(2)]
    for name in ("loss", "grad_input", "grad_weight"):
        first, second = (getattr(outcome, name) for outcome in outcomes)
        assert first is None or torch.equal(first, second)


@pytest.mark.parametrize("vocab", [150, 160])
def test_the_backends_round_alike(vocab: int, device: torch.device, triton_backend: str) -> None:
    """Large entries have slots, in order; all other entries are rounded to E4M3."""
    g, rows = torch.Generator().manual_seed(0), 70
    tile = (torch.randn(rows, 192, generator=g) * 2.0).exp()
    tile[1], tile[2, 7] = 0.0, 1e4
    tile[3, :20], tile[4, 5] = -300.0, math.nan
    tile = tile.bfloat16().to(device)
    results = []
    for name in ("torch", "triton"):
        matrix = torch.full((rows, 192), 9.0, device=device).to(E4M3)
        transposed = torch.full((vocab, 128), 9.0, device=device).to(E4M3)
        classes = torch.zeros(rows, ENTRY_SLOTS, dtype=torch.int32, device=device)
        entries = Entries(None, classes, torch.zeros(rows, ENTRY_SLOTS, device=device))
        out = QuantizedTile(matrix, transposed, torch.zeros(rows, device=device), entries)
        load_backend(name).quantize_tile(tile[:, :vocab], out)
        results.append((matrix[:, :vocab].float(), transposed.float(), classes, entries.values, out.scales))
    assert all(matrix[4].isnan().all() for matrix, *_ in results)
    for matrix, transposed, *_ in results:  # compare the other rows
        matrix[4], transposed[:, 4] = 0.0, 0.0
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=0.0, equal_nan=True)
    matrix, transposed, classes, values, scales = results[1]
    assert torch.equal(matrix.t(), transposed[:, :rows])
    assert not transposed[:, rows:].any()
    exact = tile[:, :vocab].float()
    share = exact.abs() / exact.abs().sum(1, keepdim=True)
    for row in {*range(rows)} - {4}:
        used = classes[row] < vocab
        assert not used[0]
        assert bool((classes[row, 1:].diff() >= 0).all())
        large = torch.zeros(vocab, dtype=torch.bool, device=device).index_fill(0, classes[row][used].long(), True)
        assert not ((share[row] > 17 / 16 / LARGE_SHARE) & ~large).any()
        assert not ((share[row] < 15 / 16 / LARGE_SHARE) & large).any()
        total = (matrix[row] * scales[row]).index_add(0, classes[row][used].long(), values[row][used])
        assert bool(((total - exact[row]).abs() <= exact[row].abs() * 2.0**-4 + 4e-8 * exact[row].abs().sum()).all())


@pytest.mark.parametrize("value", [0.0, 1e-12, 1.0])
def test_columns_beyond_their_limit(value: float, device: torch.device, triton_backend: str) -> None:
    """The scales of columns fit rows that are not in the sample."""
    x = torch.full((600, 80), value, dtype=BF16, device=device)
    x[1, :70], x[301, 3] = 2e3 * torch.randn(70).to(x), 1e5
    out, scales = torch.empty(80, 640, device=device).to(E4M3), torch.empty(80, device=device)
    load_backend("triton").quantize_transposed(x, None, None, out, scales)
    assert not out[:, 600:].float().any()
    total, exact = out[:, :600].t().float() * scales, x.float()
    assert bool(((total - exact).abs() <= exact.abs() / 16 + scales * 2.0**-9).all())
    assert bool((exact.abs().amax(0) <= scales * 448 * 1.001).all())


def test_extreme_rows(emulated: None) -> None:
    """A certain row, equal logits, one logit far above all others, logits of -inf: finite and right."""
    x = torch.eye(16, dtype=BF16).repeat(3, 1)
    w = torch.randn(400, 16, generator=torch.Generator().manual_seed(0)) * 4.0
    w[:, 0], w[5, 0] = torch.linspace(-1.0, 1.0, 400), 28.0
    w[:, 1] = 3.0
    w[7, 2] = 30.0
    y = torch.arange(48) * 7 % 400
    y[0], y[16], y[2] = 5, 5, 7
    bias = torch.zeros(400, dtype=BF16)
    bias[100:200] = -torch.inf
    bias[y] = 0.0
    problem = Problem(x, w.bfloat16(), y, bias)
    outcome, exact = run_fused(problem, options=options_of(), grads="xw"), run_oracle(problem)
    default = run_fused(problem, grads="xw")
    assert torch.equal(outcome.loss, default.loss)
    for name in ("grad_input", "grad_weight"):
        assert relative_error(getattr(outcome, name), getattr(exact, name)) <= LIMIT
        rows, expected = getattr(outcome, name).double(), getattr(exact, name)
        errors = (rows - expected).norm(dim=1) / expected.norm(dim=1)
        default_errors = (getattr(default, name).double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert bool((errors <= 1.1 * default_errors + 0.05)[expected.norm(dim=1) > 0.0].all()), name


@pytest.mark.parametrize("std", [0.5, 2.0, 6.0])
def test_errors_of_heads(std: float, emulated: None) -> None:
    """Errors are at most the errors of stock code, or 10% above if these are small."""
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(160, 128, generator=g), torch.randn(5000, 128, generator=g) * std / 128**0.5
    target = torch.multinomial(torch.softmax(x @ w.t(), 1), 1, generator=g)[:, 0]
    target[::2] = -100
    problem = Problem(x.bfloat16(), w.bfloat16(), target)
    mine, stock, exact = run_fused(problem, options=options_of(), grads="xw"), run_stock(problem), run_oracle(problem)
    for name in ("grad_input", "grad_weight"):
        error, limit = (relative_error(getattr(r, name), getattr(exact, name)) for r in (mine, stock))
        assert error <= limit * (1.1 if limit < 2.5e-3 else 1.0), (name, error, limit)


@pytest.mark.parametrize("outputs", [("logprob",), ("logprob", "entropy", "lse")])
def test_results_of_tokens(outputs: tuple[str, ...], emulated: None) -> None:
    """Gradients of `linear_logprobs`, with entropies and candidates. Values have the default's bits."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 64, generator=g).bfloat16().requires_grad_() for n in (70, 300))
    y, candidates = (torch.randint(300, shape, generator=g) for shape in ((70,), (70, 4)))
    results = []
    for options in (None, options_of()):
        out = flce.linear_logprobs(x, w, y, candidates=candidates, outputs=outputs, options=options)
        names = (*outputs, "candidate_logprob")
        total = sum((getattr(out, name) * (k + 1)).sum() for k, name in enumerate(names))
        results.append((*(getattr(out, name) for name in names), *torch.autograd.grad(total, (x, w))))
    for exact, value in zip(*results, strict=True):
        if exact.requires_grad:
            assert torch.equal(exact, value)
        else:
            assert relative_error(value, exact) <= LIMIT


@pytest.mark.parametrize(
    "reason, settings, grads",
    [
        ("adapters", {"adapter_ranks": (3,)}, "xwaB"),
        ("a gradient of the bias", {"bias": True}, "xwb"),
        ("label smoothing", {"label_smoothing": 0.1}, "xw"),
        ("H is not divisible by 16", {"hidden": 72}, "xw"),
    ],
)
def test_bfloat16_instead(reason: str, settings: dict[str, Any], grads: str, emulated: None) -> None:
    """Calls without E4M3 products have the default's bits, and the plan names the reason."""
    problem = problem_of(torch.device("cpu"), **settings)
    plan = plan_for(problem, options_of(), grads)
    assert f"for gradients in bfloat16, not in float8_e4m3fn: {reason};" in str(plan)
    mine, default = (run_fused(problem, options=options, grads=grads) for options in (options_of(), None))
    assert mine.grad_weight is not None
    assert default.grad_weight is not None
    assert torch.equal(mine.grad_weight, default.grad_weight)


def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans name the dtype of the operands. E4M3 products take less time, and a small budget has other schedules."""
    monkeypatch.undo()
    c = case_on_hopper(8192, 4096, 128256, grad_dtype=E4M3)
    plan, default = (search.make_plan(case) for case in (c, case_on_hopper(8192, 4096, 128256)))
    assert "3 matrix products (25.8 TFLOP), for gradients in float8_e4m3fn; " in str(plan)
    assert plan.seconds < 0.8 * default.seconds
    small = case_on_hopper(8192, 4096, 128256, grad_dtype=E4M3, max_workspace_bytes="100MiB")
    assert "in bfloat16, not in float8_e4m3fn: faster within the budget" in str(search.make_plan(small))
    vocab = case_on_hopper(8192, 4096, 128256, grad_dtype=E4M3, strategy="vocab")
    assert "not in float8_e4m3fn: strategy 'vocab'" in str(search.make_plan(vocab))
    assert "float8" not in str(default)


@pytest.mark.parametrize(
    "shape",
    [
        (4096, 4096, 128256),
        (8192, 4096, 128256),
        (4096, 8192, 128256),
        (8192, 3584, 152064),
        (8192, 2304, 256000),
        (16384, 1024, 151936),
        (16384, 640, 262144),
    ],
    ids=str,
)
def test_workspace_is_not_much_larger(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.5 times the default's workspace, or 1 GiB more."""
    monkeypatch.undo()
    for grads in ("xw", "x"):
        cases = [case_on_hopper(*shape, grads=grads, grad_dtype=grad_dtype) for grad_dtype in (E4M3, None)]
        plan, default = map(search.make_plan, cases)
        assert plan.schedule.multiplies_e4m3
        assert plan.workspace_bytes <= max(1.5 * default.workspace_bytes, default.workspace_bytes + (1 << 30))


def test_errors_name_what_the_option_needs(emulated: None) -> None:
    with pytest.raises(ValueError, match=r"grad_dtype must be None or torch.float8_e4m3fn, got torch.float8_e5m2"):
        flce.ChunkOptions(grad_dtype=torch.float8_e5m2)
    with pytest.raises(TypeError, match=r"grad_dtype must be None or a torch.dtype, got 'fp8'"):
        flce.ChunkOptions(grad_dtype="fp8")  # type: ignore[arg-type]
    needs = "grad_dtype=torch.float8_e4m3fn needs bfloat16 inputs and the Triton backend on a Hopper GPU"
    problem = make_problem((5,), 16, 30, dtype=torch.float32)
    with pytest.raises(ValueError, match=needs):
        run_fused(problem, options=options_of())
    for changes in ({"device": KNOWN_KINDS["A100-80GB"]}, {"backend": "torch"}, {"dtype": torch.float16}):
        c = case_on_hopper(64, 64, 500, grad_dtype=E4M3)
        with pytest.raises(ValueError, match=needs):
            search.make_plan(c.__class__(**{**vars_of(c), **changes}))


def vars_of(c: Any) -> dict[str, Any]:
    return {name: getattr(c, name) for name in c.__dataclass_fields__}


@pytest.mark.parametrize("largest", [False, True])
def test_products(largest: bool, device: torch.device) -> None:
    """Products with float16 results have a scale, with which the largest sums are finite."""
    a, b = (torch.randn(n, 2048, generator=torch.Generator().manual_seed(n), device="cpu") for n in (32, 48))
    a, b = ((x.fill_(448.0) if largest else x).to(device, E4M3) for x in (a, b))
    exact = a.double() @ b.double().t()
    for dtype, scale in ((torch.float32, 1.0), (torch.float16, e4m3_scale(2048))):
        out = torch.empty(32, 48, dtype=dtype, device=device)
        matmul(a, b.t(), out)
        assert relative_error(out.double() / scale, exact) <= 1e-3
