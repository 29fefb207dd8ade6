"""Rows of logits, and calls of a backend's passes over their tiles. Tests of backends use no other calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flce.backends.contract import (
    CLASSES,
    LOSS_GRADIENT_SLOTS,
    STATE_SLOTS,
    GradientCall,
    RowInputs,
    RowOutputs,
    StatisticsCall,
    TileClasses,
)
from flce.core.problem import LossSpec, accumulation_dtype

IGNORE = -100
# Arguments of `random_rows`.
EVERY_FEATURE: dict[str, Any] = {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.01}
EVERY_FEATURE |= {"stats": ("logprob", "entropy", "argmax"), "class_weight": True, "token_weight": True, "bias": True}


@dataclass(frozen=True)
class Rows:
    """Logits of a few rows with their targets, weights and options."""

    logits: Tensor
    inputs: RowInputs
    spec: LossSpec

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    @property
    def accum(self) -> torch.dtype:
        return accumulation_dtype(self.logits.dtype)

    @property
    def upstream(self) -> Tensor:
        """Upstream gradients, different for each row."""
        return torch.linspace(0.5, 2.0, len(self.logits), dtype=self.accum, device=self.logits.device)

    def in_float64(self) -> Rows:
        wide = [t.double() if t is not None and t.is_floating_point() else t for t in self.inputs]
        return replace(self, logits=self.logits.double(), inputs=RowInputs(*wide))  # type: ignore[arg-type]

    def shard(self, start: int, stop: int) -> Rows:
        """Return the rows of a process that has these classes. Targets are shifted, ignored ones too."""
        given = self.inputs.class_weight, self.inputs.bias
        weight, bias = (None if t is None else t[start:stop] for t in given)
        inputs = self.inputs._replace(target=self.inputs.target - start, class_weight=weight, bias=bias)
        spec = replace(self.spec, ignore_index=self.spec.ignore_index - start)
        return Rows(self.logits[:, start:stop], inputs, spec)

    def tile(self, start: int, stop: int) -> tuple[Tensor, TileClasses]:
        """Return a copy of some columns and their tile. The buffer has accessible columns of NaN behind the copy."""
        room = -(-(stop - start) // 16) * 16
        buffer = self.logits.new_full((self.logits.shape[0], room), float("nan"))
        buffer[:, : stop - start] = self.logits[:, start:stop]
        return buffer[:, : stop - start], TileClasses(start, stop - start, self.vocab, room)

    def state(self) -> Tensor:
        return self.upstream.new_full((STATE_SLOTS, len(self.logits)), -55.0)

    def outputs(self) -> RowOutputs:
        def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.full(shape, -77, dtype=dtype, device=self.logits.device)

        return RowOutputs.allocate(self.spec, self.accum, (len(self.logits),), new)

    def call(self, tile: TileClasses, out: RowOutputs) -> StatisticsCall:
        return StatisticsCall(self.inputs, self.spec, tile, out)

    def statistics(
        self, backend: Any, logits: Tensor, tile: TileClasses, state: Tensor | None, out: RowOutputs
    ) -> None:
        backend.statistics(logits, self.call(tile, out), state)

    def row_gradient(self, backend: Any, tile: TileClasses, normalizer: Tensor, upstream: Tensor | None) -> Tensor:
        """Return the row gradient of the loss: the slots that the loss has."""
        out = normalizer.new_full((LOSS_GRADIENT_SLOTS, normalizer.shape[1]), -77.0)
        inputs = self.inputs._replace(upstream=upstream)
        backend.row_gradient(GradientCall(inputs, self.spec, tile, normalizer, out))
        return out if self.spec.label_smoothing else out[:CLASSES]

    def gradient(
        self, backend: Any, logits: Tensor, grad: Tensor, tile: TileClasses, normalizer: Tensor, row_gradient: Tensor
    ) -> None:
        inputs = self.inputs._replace(scales=None, token_weight=None)
        backend.gradient(logits, grad, GradientCall(inputs, self.spec, tile, normalizer, row_gradient))

    def loss_and_gradient(self, backend: Any, logits: Tensor, grad: Tensor, tile: TileClasses, out: RowOutputs) -> None:
        backend.loss_and_gradient(logits, grad, self.call(tile, out))


def random_rows(
    num_rows: int,
    vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    std: float = 3.0,
    class_weight: bool = False,
    token_weight: bool = False,
    bias: bool = False,
    **spec: Any,
) -> Rows:
    """Return random logits. Every fourth target is ignored; the other targets include the first and the last class."""
    g = torch.Generator().manual_seed(vocab)
    accum = accumulation_dtype(dtype)

    def rand(is_given: bool, size: int) -> Tensor | None:
        return torch.rand(size, generator=g, dtype=torch.float64).to(device, accum) if is_given else None

    logits = (torch.randn(num_rows, vocab, generator=g, dtype=torch.float64) * std).to(device, dtype)
    target = torch.randint(vocab, (num_rows,), generator=g)
    target[1::4] = IGNORE
    target[2], target[3] = 0, vocab - 1
    weights = rand(class_weight, vocab)
    total = vocab if weights is None else float(weights.sum())
    scales = torch.tensor([0.3, 0.7, total], dtype=accum, device=device)
    inputs = RowInputs(target.to(device), rand(token_weight, num_rows), weights, rand(bias, vocab), scales)
    return Rows(logits, inputs, LossSpec(**spec))


def assert_same(mine: RowOutputs, theirs: RowOutputs, tolerance: float) -> None:
    """Assert that all results of `theirs` equal the results of `mine` within the tolerance."""
    for name in RowOutputs._fields:
        a, b = getattr(mine, name), getattr(theirs, name)
        if name == "normalizer":  # values that are not finite may differ
            a, b = (x.where(x.isfinite().all(0), torch.nan) for x in (a, b))
        if b is not None:
            assert_close(a, b.to(a.dtype), tolerance, name)


def assert_close(a: Tensor, b: Tensor, tolerance: float, name: str = "gradient") -> None:
    named: Callable[[str], str] = lambda text: f"{name}: {text}"  # noqa: E731
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=named)
