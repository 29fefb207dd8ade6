"""The Triton kernels against the PyTorch backend, tile by tile, with blocks so small that a row has many."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flce.backends.contract import STATE_SLOTS, RowInputs, RowOutputs, Tile
from flce.backends.torch_ import TorchBackend
from flce.problem import LossSpec

pytest.importorskip("triton")

IGNORE = -100
STATS = ("logprob", "entropy", "argmax")
# (PARTS, LANES, VECTOR, num_warps): a block is as many columns as the first three make together
BLOCKS = [(1, 2, 2, 1), (2, 4, 2, 1), (4, 1, 4, 1)]
WIDE_BLOCKS = [(2, 64, 2, 2), (4, 128, 8, 4), (4, 256, 4, 8)]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0, "logit_scale": 1.5, "temperature": 0.7},
    "scale": {"logit_scale": 0.3},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.1},
    "stats": {"stats": STATS},
    "weights": {"class_weight": True, "token_weight": True, "bias": True},
    "all": {
        "softcap": 5.0,
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "stats": STATS,
        "class_weight": True,
        "token_weight": True,
        "bias": True,
    },
}


@pytest.fixture
def kernels(triton_backend: str) -> ModuleType:
    from flce.backends import triton

    return triton


def small_blocks(monkeypatch: pytest.MonkeyPatch, kernels: ModuleType, block: tuple[int, int, int, int]) -> None:
    sizes = dict(zip(("PARTS", "LANES", "VECTOR", "num_warps"), block, strict=True))
    monkeypatch.setattr(kernels, "_launch_size", lambda *args: sizes)


class Rows:
    """Random logits of a few rows, in a buffer with room behind the columns, and all that goes with them."""

    def __init__(
        self,
        num_rows: int,
        vocab: int,
        dtype: torch.dtype,
        device: torch.device,
        std: float = 3.0,
        class_weight: bool = False,
        token_weight: bool = False,
        bias: bool = False,
        **spec: Any,
    ) -> None:
        g = torch.Generator().manual_seed(vocab)
        self.accum = torch.float64 if dtype == torch.float64 else torch.float32

        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=g, dtype=torch.float64).to(device, self.accum)

        self.vocab, self.spec = vocab, LossSpec(**spec)
        self.logits = (torch.randn(num_rows, vocab, generator=g, dtype=torch.float64) * std).to(device, dtype)
        target = torch.randint(vocab, (num_rows,), generator=g)
        target[1::4] = IGNORE
        target[2], target[3] = 0, vocab - 1
        self.inputs = RowInputs(
            target.to(device),
            rand(num_rows) if token_weight else None,
            rand(vocab) if class_weight else None,
            rand(vocab) if bias else None,
            torch.tensor([0.3, 0.7, 0.0], dtype=self.accum, device=device),
        )
        weights = self.inputs.class_weight
        self.inputs.constants[2] = vocab if weights is None else weights.sum()

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tile]:
        """What the columns behind the tile hold must not matter."""
        room = -(-(stop - start) // 16) * 16
        buffer = self.logits.new_full((self.logits.shape[0], room), float("nan"))
        buffer[:, : stop - start] = self.logits[:, start:stop]
        return buffer[:, : stop - start], Tile(start, stop - start, self.vocab, room)

    def outputs(self) -> RowOutputs:
        n, stats = self.logits.shape[0], self.spec.stats

        def new(*shape: int, dtype: torch.dtype = self.accum) -> Tensor:
            return torch.full((*shape, n), -77, dtype=dtype, device=self.logits.device)

        return RowOutputs(
            new(),
            new() if self.spec.z_loss else None,
            new(2),
            new() if "logprob" in stats else None,
            new() if "entropy" in stats else None,
            new(dtype=torch.int64) if "argmax" in stats else None,
        )


def assert_same(mine: RowOutputs, theirs: RowOutputs, tolerance: float) -> None:
    for name in (field.name for field in fields(RowOutputs)):
        a, b = getattr(mine, name), getattr(theirs, name)
        if name == "normalizer":  # of what is not finite, only that it is not is the same
            a, b = (x.sum(0).where(x.isfinite().all(0), torch.nan) for x in (a, b))
        if b is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=named(name))


def named(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


def compare(kernels: ModuleType, rows: Rows, tolerance: float = 1e-12, grad_dtype: torch.dtype | None = None) -> None:
    """All that the contract asks, in one tile and in three."""
    mine, theirs = kernels.TritonBackend(), TorchBackend()
    grad_dtype = grad_dtype or rows.logits.dtype
    device = rows.logits.device

    def gradient_buffer(logits: Tensor, tile: Tile) -> Tensor:
        if grad_dtype == logits.dtype:
            return logits
        return torch.full((logits.shape[0], tile.room), 55.0, dtype=grad_dtype, device=device)[:, : tile.cols]

    expected = rows.outputs()
    logits, tile = rows.tile(0, rows.vocab)
    expected_grad = gradient_buffer(logits, tile)
    theirs.loss_and_gradient(logits, expected_grad, rows.inputs, rows.spec, tile, expected)

    logits, tile = rows.tile(0, rows.vocab)
    grad, out = gradient_buffer(logits, tile), rows.outputs()
    mine.loss_and_gradient(logits, grad, rows.inputs, rows.spec, tile, out)
    assert_same(out, expected, tolerance)
    torch.testing.assert_close(grad, expected_grad, rtol=tolerance, atol=tolerance, equal_nan=True)

    upstream = torch.linspace(0.5, 2.0, len(rows.logits), dtype=rows.accum, device=device)
    edges = [0, rows.vocab // 3, rows.vocab // 3 + 1, rows.vocab]
    state = torch.full((STATE_SLOTS, len(rows.logits)), -55.0, dtype=rows.accum, device=device)
    out = rows.outputs()
    for start, stop in itertools.pairwise(edges):
        logits, tile = rows.tile(start, stop)
        mine.statistics(logits, rows.inputs, rows.spec, tile, state, out)
    assert_same(out, expected, tolerance)
    for start, stop in itertools.pairwise(edges):
        results = []
        for backend in (mine, theirs):
            logits, tile = rows.tile(start, stop)
            grad = gradient_buffer(logits, tile)
            backend.gradient(logits, grad, rows.inputs, rows.spec, tile, expected.normalizer, upstream)
            results.append(grad)
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_many_blocks(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device, feature: str, block: Any
) -> None:
    small_blocks(monkeypatch, kernels, block)
    compare(kernels, Rows(6, 37, torch.float64, device, **FEATURES[feature]))


@pytest.mark.gpu
@pytest.mark.parametrize("block", WIDE_BLOCKS, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_many_blocks_on_cuda(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device, feature: str, block: Any
) -> None:
    small_blocks(monkeypatch, kernels, block)
    compare(kernels, Rows(40, 20011, torch.float64, device, **FEATURES[feature]), 1e-10)


@pytest.mark.parametrize("layout", ["two levels", "one level into two", "in place"])
@pytest.mark.parametrize("feature", ["plain", "all"])
def test_rows_in_two_levels(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device, feature: str, layout: str
) -> None:
    """Rows of (outer, inner, cols) are those of (outer * inner, cols), and nothing between them is touched."""
    small_blocks(monkeypatch, kernels, (2, 4, 2, 1))
    rows = Rows(12, 37, torch.float64, device, **{k: v for k, v in FEATURES[feature].items() if k != "bias"})
    tile = Tile(0, 37, 37, room=37, keep=True)
    expected, grad = rows.outputs(), torch.empty_like(rows.logits)
    TorchBackend().statistics(rows.logits, rows.inputs, rows.spec, tile, None, expected)
    upstream = torch.linspace(0.5, 2.0, 12, dtype=rows.accum, device=device)
    TorchBackend().gradient(rows.logits, grad, rows.inputs, rows.spec, tile, expected.normalizer, upstream)
    for backend in (kernels.TritonBackend(), TorchBackend()):
        memory = rows.logits.new_full((3, 6, 40), 99.0)
        logits = memory[:, 1:5, 2:39]
        logits.copy_(rows.logits.view(3, 4, 37))
        out = rows.outputs()
        backend.statistics(logits, rows.inputs, rows.spec, tile, None, out)
        assert_same(out, expected, 1e-12)
        torch.testing.assert_close(logits, rows.logits.view(3, 4, 37), rtol=0, atol=0)
        mine = {
            "two levels": lambda logits=logits: logits.new_full((4, 3, 41), 55.0).transpose(0, 1)[..., :37],
            "one level into two": lambda logits=logits: torch.empty_like(logits),
            "in place": lambda logits=logits: logits,
        }[layout]()
        in_place = Tile(0, 37, 37, room=37)
        backend.gradient(logits, mine, rows.inputs, rows.spec, in_place, out.normalizer, upstream)
        torch.testing.assert_close(mine, grad.view(3, 4, 37), rtol=1e-12, atol=1e-12)
        factor = torch.ones_like(upstream)
        factor[2::3] = 0.25
        backend.scale_rows_(mine, factor)
        torch.testing.assert_close(mine, (grad * factor[:, None]).view(3, 4, 37), rtol=1e-12, atol=1e-12)
        assert (memory[:, [0, 5]] == 99.0).all()
        assert (memory[..., [0, 1, 39]] == 99.0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scale_rows(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(kernels, "SCALE_BLOCK", 16)
    factor = torch.tensor([1.0, 0.3, 0.0, -2.0], device=device, dtype=torch.promote_types(dtype, torch.float32))
    x = torch.randn(4, 37, device=device).to(dtype)
    x[0, 0] = torch.nan
    expected = (x.to(factor.dtype) * factor[:, None]).to(dtype)
    for backend in (kernels.TritonBackend(), TorchBackend()):
        mine = x.clone()
        backend.scale_rows_(mine, factor)
        # The interpreter rounds bfloat16 in its own way.
        tolerance = 8e-3 if dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=0.0, equal_nan=True)
        assert torch.equal(mine[0].isnan(), x[0].isnan())
        assert torch.equal(mine[0, 1:], x[0, 1:])


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 32, 33])
def test_edges_of_blocks(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device, vocab: int
) -> None:
    small_blocks(monkeypatch, kernels, (2, 4, 2, 1))
    compare(kernels, Rows(5, max(vocab, 3), torch.float64, device, **FEATURES["all"]))


@pytest.mark.parametrize(
    "dtype, grad_dtype",
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
    ids=str,
)
def test_dtypes(
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
) -> None:
    small_blocks(monkeypatch, kernels, (2, 4, 2, 1))
    narrow = grad_dtype or dtype
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[narrow]
    compare(kernels, Rows(6, 37, dtype, device), tolerance, grad_dtype)


@pytest.mark.parametrize("bad", [float("-inf"), float("inf"), float("nan")])
def test_what_is_not_finite(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device, bad: float
) -> None:
    """In one column, in all of some lanes, in all columns of some blocks, in a whole row."""
    small_blocks(monkeypatch, kernels, (2, 2, 2, 1))
    rows = Rows(12, 37, torch.float64, device, stats=("logprob",))
    rows.logits[4, 20] = bad
    rows.logits[6, ::2] = bad
    rows.logits[8, 8:24] = bad
    rows.logits[10] = bad
    rows.logits[5] = bad  # ignored
    compare(kernels, rows)


def test_a_tie_is_won_by_the_lowest_class(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    small_blocks(monkeypatch, kernels, (2, 2, 2, 1))
    rows = Rows(12, 37, torch.float64, device, stats=("argmax",))
    for row, ties in enumerate([(0, 36), (9, 10), (11, 20), (12, 13, 14), (3, 18, 35), (35, 36)]):
        rows.logits[2 * row, list(ties)] = 50.0
    compare(kernels, rows)


def test_a_large_common_offset(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    small_blocks(monkeypatch, kernels, (2, 2, 2, 1))
    rows = Rows(6, 37, torch.float32, device, stats=("logprob", "entropy"), label_smoothing=0.1)
    rows.logits = rows.logits.round()
    plain, shifted = rows.outputs(), rows.outputs()
    for offset, out in ((0.0, plain), (65536.0, shifted)):
        logits, tile = rows.tile(0, rows.vocab)
        logits += offset
        kernels.TritonBackend().loss_and_gradient(logits, logits, rows.inputs, rows.spec, tile, out)
    torch.testing.assert_close(shifted.loss, plain.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shifted.entropy, plain.entropy, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [50257, 128256])
def test_the_same_bits_every_time(kernels: ModuleType, device: torch.device, cols: int) -> None:
    """Also where another thread than the one that reads the target's logit writes over it."""
    rows = Rows(300, cols, torch.bfloat16, device, stats=STATS)
    results = []
    for _ in range(5):
        logits, tile = rows.tile(0, cols)
        out = rows.outputs()
        kernels.TritonBackend().loss_and_gradient(logits, logits, rows.inputs, rows.spec, tile, out)
        again, _ = rows.tile(0, cols)
        kernels.TritonBackend().gradient(again, again, rows.inputs, rows.spec, tile, out.normalizer, None)
        results.append((out.loss, out.entropy, out.argmax, logits, again))
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert isinstance(a, Tensor)
            assert isinstance(b, Tensor)
            assert torch.equal(a, b)
    torch.testing.assert_close(results[0][3], results[0][4], rtol=8e-3, atol=0.0)


H200, A100, SMALL = (132, 60 << 20), (108, 40 << 20), (82, 6 << 20)


@pytest.mark.parametrize(
    "facts, cols, warps",
    [
        (H200, 16384, 8),
        (H200, 50257, 8),
        (H200, 128256, 32),
        (H200, 256000, 32),
        (A100, 50257, 16),
        (A100, 128256, 32),
        (SMALL, 16384, 16),
        (SMALL, 128256, 32),
    ],
)
def test_rows_in_flight_fit_in_the_cache(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, facts: tuple[int, int], cols: int, warps: int
) -> None:
    monkeypatch.setattr(kernels, "_device_facts", lambda device: facts)
    launch = kernels._launch_size.__wrapped__(cols, torch.bfloat16, torch.bfloat16, True, False, torch.device("cuda"))
    assert launch["num_warps"] == warps
    assert launch["maxnreg"] * launch["num_warps"] * 32 <= 65536
    assert launch["PARTS"] * launch["LANES"] * launch["VECTOR"] < 2 * cols


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cols", [1, 2, 3, 70, 5000])
def test_short_rows_get_short_blocks(kernels: ModuleType, cols: int, dtype: torch.dtype) -> None:
    for grad, statistics in ((dtype, True), (dtype, False), (None, True)):
        launch = kernels._launch_size(cols, dtype, grad, statistics, False, torch.device("cpu"))
        assert launch["LANES"] == 1 or launch["PARTS"] * launch["LANES"] * launch["VECTOR"] < 2 * cols
        assert launch["LANES"] * launch["VECTOR"] * dtype.itemsize <= 512 * launch["num_warps"]
