"""Comparison of the Triton kernels with the PyTorch backend, tile by tile, with many small blocks in a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flce.backends.contract import RowOutputs, TileClasses
from flce.backends.eager import TorchBackend
from flce.backends.formulas import Targets, write_state_results
from flce.core.gemm import padded_cols
from flce.core.problem import CrossEntropyProblem, LossSpec
from tests.extremes import every_extreme, has_softmax
from tests.helpers import allpairs
from tests.tiles import EVERY_FEATURE, Rows, assert_close, assert_same, random_rows

pytest.importorskip("triton")

STATS = ("logprob", "entropy", "argmax")
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0, "logit_scale": 1.5, "temperature": 0.7},
    "scale": {"logit_scale": 0.3},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.1},
    "stats": {"stats": STATS},
    "weights": {"class_weight": True, "token_weight": True, "bias": True},
    "all": EVERY_FEATURE,
}


@pytest.fixture
def kernels(triton_backend: str) -> ModuleType:
    from flce.backends import triton

    return triton


def small_blocks(monkeypatch: pytest.MonkeyPatch, kernels: ModuleType, block: tuple[int, int, int, int]) -> None:
    sizes = dict(zip(("PARTS", "LANES", "VECTOR", "num_warps"), block, strict=True))
    monkeypatch.setattr(kernels, "_launch_size", lambda *args: sizes)


@pytest.mark.parametrize("cols", [40, 100, 333])
def test_a_gradient_over_wider_logits(
    cols: int, monkeypatch: pytest.MonkeyPatch, kernels: ModuleType, device: torch.device
) -> None:
    """A half-precision gradient in the memory of float32 logits, in one, two and several blocks, equals a gradient in
    separate memory."""
    small_blocks(monkeypatch, kernels, (2, 8, 4, 1))
    rows = random_rows(4, cols, torch.float32, device, softcap=5.0)
    grads = []
    for backend in (TorchBackend(), kernels.TritonBackend()):
        for narrow in (False, True):
            logits, tile = rows.tile(0, cols)
            memory = logits.new_empty(len(logits), padded_cols(cols))
            memory[:, :cols] = logits
            separate = logits.new_empty(len(logits), padded_cols(cols), dtype=torch.float16)
            grad = (memory.view(torch.float16) if narrow else separate)[:, :cols]
            padded_tile = tile._replace(accessible_cols=padded_cols(cols))
            rows.loss_and_gradient(backend, memory[:, :cols], grad, padded_tile, rows.outputs())
            grads.append(grad)
        assert same_bits(grads[-1], grads[-2])
    assert_close(grads[0], grads[2], 1e-3)


@pytest.mark.parametrize("programs", [2, 2048])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scale_rows(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype, programs: int
) -> None:
    monkeypatch.setattr(kernels.reduction, "SCALE_BLOCK", 16)
    monkeypatch.setattr(kernels.reduction, "PROGRAMS", programs)
    accum = torch.promote_types(dtype, torch.float32)
    target = torch.tensor([0, 5, 7, 1, -3, 2], device=device)
    x = torch.randn(6, 37, device=device).to(dtype)
    x[0, 0] = torch.nan
    # The interpreter truncates when it rounds to bfloat16.
    tolerance = 8e-3 if dtype == torch.bfloat16 else 0.0
    for factor in (torch.tensor([1.0, 0.3, 0.0, -2.0, torch.nan, 4.0]), torch.tensor(0.3), torch.tensor(1.0)):
        factor = factor.to(device, accum)
        per_row = torch.where(target == -3, 1.0, factor)
        expected = (x.to(accum) * per_row[:, None]).to(dtype)
        for backend in (kernels.TritonBackend(), TorchBackend()):
            mine = x.clone()
            backend.scale_rows_(mine, factor, target, -3)
            torch.testing.assert_close(mine, expected, rtol=tolerance, atol=0.0, equal_nan=True)
            same = per_row == 1.0
            assert torch.equal(mine[same].nan_to_num(9.0), x[same].nan_to_num(9.0))


@pytest.mark.parametrize("number", [0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_scale(kernels: ModuleType, device: torch.device, dtype: torch.dtype, number: float) -> None:
    """Scale several tensors of different sizes in place, and one to another dtype."""
    accum = torch.promote_types(dtype, torch.float32)
    factor = torch.tensor(number, device=device, dtype=accum)
    xs = [torch.randn(size, device=device).to(dtype) for size in (5000, 0, 7, 1)]
    expected = [(x.to(accum) * factor).to(dtype) for x in xs]
    for backend in (kernels.TritonBackend(), TorchBackend()):
        mine = [x.clone() for x in xs]
        backend.scale_(mine, factor)
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)
        cast = backend.scale_cast(xs[0].to(accum), factor, dtype)
        torch.testing.assert_close(cast, expected[0], rtol=0, atol=0)


@pytest.mark.parametrize("rows", [0, 1, 16, 40, 65])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("z_loss, items, weighted", [(0.0, False, False), (0.1, True, False), (0.1, False, True)])
def test_scales_and_sums(
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    rows: int,
    reduction: Any,
    z_loss: float,
    items: bool,
    weighted: bool,
) -> None:
    """Rows in one block, in several, and more rows than the kernel supports; targets with gaps in memory."""
    monkeypatch.setattr(kernels.reduction, "BLOCK", 16)
    monkeypatch.setattr(kernels.reduction, "MAX_ROWS", 64)
    memory = torch.randint(0, 11, (rows, 2), device=device)
    memory[1::3, 0] = memory[:, 1] = -100
    target = memory[:, 0]
    p = CrossEntropyProblem(
        torch.empty(rows, 11, dtype=torch.float64, device=device),
        target,
        torch.rand(11, device=device, dtype=torch.float64) if weighted else None,
        None,
        torch.tensor(7, device=device) if items else None,
        LossSpec(reduction=reduction, z_loss=z_loss),
        None,
    )
    loss = torch.randn(rows, dtype=torch.float64, device=device)
    z = torch.randn(rows, dtype=torch.float64, device=device) if z_loss else None
    out = RowOutputs(loss, z, loss.new_empty(2, rows), *[None] * 4)
    count = (target != -100).sum().double()
    z_scale = count.reciprocal() if reduction == "mean" else count.new_tensor(1 / 7 if items else 1.0)
    ce_scale = z_scale
    if weighted and reduction == "mean":
        assert p.class_weight is not None
        ce_scale = p.class_weight[target[target != -100]].sum().reciprocal()
    weights = torch.tensor(11.0, device=device) if p.class_weight is None else p.class_weight.sum()
    scales = torch.stack((ce_scale, z_scale, weights)).double()
    z_sum = None if z is None else (z.sum() * z_scale).double()
    total = loss.sum() * ce_scale + (0.0 if z_sum is None else z_sum)
    for backend in (kernels.TritonBackend(), TorchBackend()):
        for given in (None, scales):
            results = backend.reduce(p, out, given)
            for mine, expected in zip(results, (total.double(), z_sum, scales), strict=True):
                assert (mine is None) == (expected is None)
                if mine is not None:
                    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(backend.loss_scales(p), scales, rtol=1e-12, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4095, 4096, 16384, 65536, 65537])
def test_sums_of_many_rows_on_cuda(kernels: ModuleType, rows: int) -> None:
    target = torch.randint(-1, 11, (rows,), device="cuda")
    logits = torch.empty(rows, 11, dtype=torch.bfloat16, device="cuda")
    p = CrossEntropyProblem(logits, target, None, None, None, LossSpec(ignore_index=-1, reduction="mean"), None)
    loss = torch.rand(rows, device="cuda")
    out = RowOutputs(loss, None, loss.new_empty(2, rows), *[None] * 4)
    total, _, scales = kernels.TritonBackend().reduce(p, out, None)
    count = int((target != -1).sum())
    if count:
        torch.testing.assert_close(total.double(), loss.double().sum() / count, rtol=1e-6, atol=0)
        assert torch.equal(scales, torch.tensor([1 / count, 1 / count, 11.0], dtype=torch.float64).float().cuda())


def extreme_rows(dtype: torch.dtype, device: torch.device, defined: bool, **spec: Any) -> Rows:
    """Return extreme rows with a defined softmax, or the other extreme rows, each with one or two of its targets."""
    logits, target = (t[::3] for t in every_extreme(37))
    some = has_softmax(logits) == defined
    plain = random_rows(int(some.sum()), 37, dtype, device, stats=STATS if defined else ("logprob",), **spec)
    inputs = plain.inputs._replace(target=target[some].to(device))
    return replace(plain, logits=logits[some].to(device, dtype), inputs=inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [50257, 128256])
def test_the_same_bits_every_time(kernels: ModuleType, device: torch.device, cols: int) -> None:
    """Results are reproducible although different threads read and overwrite the target's logit."""
    rows = random_rows(300, cols, torch.bfloat16, device, stats=STATS)
    results = []
    for _ in range(5):
        logits, tile = rows.tile(0, cols)
        out = rows.outputs()
        rows.loss_and_gradient(kernels.TritonBackend(), logits, logits, tile, out)
        again, _ = rows.tile(0, cols)
        row_gradient = rows.row_gradient(kernels.TritonBackend(), tile, out.normalizer, None)
        rows.gradient(kernels.TritonBackend(), again, again, tile, out.normalizer, row_gradient)
        results.append((out.loss, out.entropy, out.argmax, logits, again))
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert isinstance(a, Tensor)
            assert isinstance(b, Tensor)
            assert torch.equal(a, b)
    torch.testing.assert_close(results[0][3], results[0][4], rtol=8e-3, atol=0.0)


# ---------------------------------------------------------------------------------------------------------
# Rows that begin and end at any address

# (PARTS, LANES, VECTOR, num_warps): heads of 16 bytes, and of 32
EDGE_BLOCKS = {
    torch.bfloat16: [(1, 16, 8, 1), (1, 32, 8, 1)],
    torch.float32: [(2, 8, 4, 1), (1, 16, 4, 1)],
    torch.float64: [(1, 2, 2, 1), (4, 4, 2, 1)],
}
EDGE_TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 3e-6, torch.float64: 1e-12}


def placed(x: Tensor, skip: int, gap: int) -> tuple[Tensor, Tensor]:
    """Return memory filled with a value that occurs nowhere else, and a view of it with the values of `x`. The view
    begins `skip` elements behind the aligned start. Its rows are `gap` elements apart."""
    n, cols = x.shape
    memory = x.new_full((skip + n * (cols + gap) + 64,), -99.0)
    assert memory.data_ptr() % 16 == 0
    view = memory.as_strided((n, cols), (cols + gap, 1), skip)
    view.copy_(x)
    return memory, view


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_intact(memory: Tensor, before: Tensor, view: Tensor) -> None:
    """Assert that `memory` outside of the view is unchanged."""
    inside = torch.zeros_like(memory, dtype=torch.bool)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    assert same_bits(memory[~inside], before[~inside])


def record_launches(monkeypatch: pytest.MonkeyPatch, kernels: ModuleType) -> list[tuple[int, bool]]:
    """Return a list that receives HEAD_BYTES and ONE_BLOCK of each later launch."""
    flags: list[tuple[int, bool]] = []
    real = kernels.cross_entropy_kernel

    class Kernel:
        arg_names, __name__ = real.arg_names, real.__name__

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                flags.append((kwargs["HEAD_BYTES"], kwargs["ONE_BLOCK"]))
                real[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(kernels, "cross_entropy_kernel", Kernel())
    return flags


def check_rows_anywhere(
    kernels: ModuleType,
    rows: Rows,
    skip: int = 0,
    gap: int = 0,
    *,
    mode: str = "both",  # or "statistics", "gradient"
    in_place: bool = True,
    shard: bool = False,  # the classes but the first five and the last four
) -> None:
    """Compare with PyTorch's backend in float64."""
    if shard:
        rows = rows.shard(5, rows.vocab - 4)
    tile = TileClasses(0, rows.vocab, rows.vocab, rows.vocab, is_shard=shard, keep_logits=mode != "both")

    def statistics(backend: Any, rows: Rows, logits: Tensor) -> RowOutputs:
        out, state = rows.outputs(), rows.state() if shard else None
        rows.statistics(backend, logits, tile, state, out)
        if state is not None:
            call = rows.call(tile, out)
            write_state_results(state, call, Targets.from_call(call))
        return out

    wide = rows.in_float64()
    expected_grad = wide.logits.clone()
    expected = statistics(TorchBackend(), wide, expected_grad.clone())
    up = None if mode == "both" else wide.upstream
    row_gradient = wide.row_gradient(TorchBackend(), tile, expected.normalizer, up)
    wide.gradient(TorchBackend(), expected_grad, expected_grad, tile, expected.normalizer, row_gradient)

    mine, out = kernels.TritonBackend(), rows.outputs()
    memory, logits = placed(rows.logits.contiguous(), skip, gap)
    before = memory.clone()
    grad_memory, grad = (memory, logits) if in_place else placed(logits, skip, gap)
    if mode == "both":
        rows.loss_and_gradient(mine, logits, grad, tile, out)
    elif mode == "statistics":
        out = statistics(mine, rows, logits)
        assert same_bits(memory, before)
    else:
        normalizer = expected.normalizer.to(rows.accum)
        row_gradient = rows.row_gradient(mine, tile, normalizer, rows.upstream)
        rows.gradient(mine, logits, grad, tile, normalizer, row_gradient)
    if mode != "gradient":
        assert_same(out, expected, 1e-12 if rows.accum == torch.float64 else 2e-5)
    if mode != "statistics":
        assert_close(grad.double(), expected_grad, EDGE_TOLERANCE[rows.logits.dtype])
        assert_intact(grad_memory, before, grad)
        if not in_place:
            assert same_bits(memory, before)


@pytest.mark.parametrize("dtype", EDGE_BLOCKS, ids=str)
def test_every_head_and_every_tail(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype
) -> None:
    """Each row begins one element later in a vector than the previous row."""
    block = EDGE_BLOCKS[dtype][1]
    small_blocks(monkeypatch, kernels, block)
    vector, sector = 16 // dtype.itemsize, 32 // dtype.itemsize
    flags = record_launches(monkeypatch, kernels)
    for tail in range(vector):
        cols = 3 * vector + tail
        gap = (1 - cols) % sector
        check_rows_anywhere(kernels, random_rows(sector, cols, dtype, device, std=2.0), tail, gap)
    assert set(flags) == {(32, True)}


ANYWHERE = allpairs(
    {
        "dtype": list(EDGE_BLOCKS),
        "block": [0, 1],
        "length": ["empty", "one", "several"],
        "tail": [0, 1, 3, 6],
        "skip": [0, 1, 6],
        "gap": [0, 1, 5],
        "feature": list(FEATURES),
        "mode": ["statistics", "gradient", "both"],
        "in_place": [True, False],
        "shard": [False, True],
    }
)


@pytest.mark.parametrize("row", ANYWHERE, ids=lambda row: "-".join(str(v).replace("torch.", "") for v in row.values()))
def test_rows_anywhere(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device, row: dict[str, Any]
) -> None:
    parts, lanes, vector, _ = block = EDGE_BLOCKS[row["dtype"]][row["block"]]
    small_blocks(monkeypatch, kernels, block)
    size = parts * lanes * vector
    cols = {"empty": 1, "one": size - vector, "several": 2 * size + 3}[row["length"]] + row["tail"] % vector
    shard = row["shard"] and row["mode"] != "both"
    rows = random_rows(9, cols + 9 * shard, row["dtype"], device, **FEATURES[row["feature"]])
    rows.inputs.target.clamp_(max=rows.vocab - 1)
    arguments = {key: row[key] for key in ("skip", "gap", "mode", "in_place")}
    flags = record_launches(monkeypatch, kernels)
    check_rows_anywhere(kernels, rows, **arguments, shard=shard)
    assert len(flags) == 1
    aligned = not (row["skip"] or row["gap"] or cols % 16)
    assert flags[0][0] == (0 if aligned else (16, 32)[row["block"]])
    assert flags[0][1] == (row["length"] != "several")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("defined", [True, False])
def test_extreme_logits_with_edges(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device, defined: bool, dtype: torch.dtype
) -> None:
    """A large common offset costs no digit of float32."""
    small_blocks(monkeypatch, kernels, EDGE_BLOCKS[dtype][0])
    rows = extreme_rows(dtype, device, defined, label_smoothing=0.1)
    for mode in ("both", "statistics"):
        check_rows_anywhere(kernels, rows, skip=1, mode=mode)


@pytest.mark.parametrize("one_block", [True, False])
def test_a_tie_with_an_edge(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device, one_block: bool
) -> None:
    """Ties between a lane's edge column and a column before or behind it, and between any two edges."""
    vector, lanes = 4, 8
    small_blocks(monkeypatch, kernels, (4 if one_block else 1, lanes, vector, 1))
    rows = random_rows(12, 75, torch.float32, device, stats=("argmax",))
    for row in range(12):  # with 75 columns each row begins 3 elements later in a vector
        head = -75 * row % vector
        tail = (75 - head) % vector
        edges = [*range(head), *range(75 - tail, 75)]
        e = row // 4 % len(edges)
        same_lane = head + e * vector + row % vector
        ties = {edges[e], same_lane, 73} if row % 3 else {edges[0], edges[-1]}
        rows.inputs.target[row] = row
        rows.logits[row, sorted(ties)] = 50.0
    check_rows_anywhere(kernels, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("feature", ["plain", "all"])
@pytest.mark.parametrize("mode", ["statistics", "gradient", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cols", [131, 1000, 3001, 20011, 50257])
def test_rows_anywhere_on_cuda(
    kernels: ModuleType, device: torch.device, cols: int, dtype: torch.dtype, mode: str, feature: str
) -> None:
    """Use the launch sizes for these numbers of columns."""
    rows = random_rows(48, cols, dtype, device, **FEATURES[feature])
    stats = tuple(set(rows.spec.stats) - {"argmax"})  # many rounded values are equal
    rows = replace(rows, spec=replace(rows.spec, stats=stats))
    for skip in (0, 3):
        check_rows_anywhere(kernels, rows, skip, in_place=mode == "both" and skip == 0, mode=mode)
