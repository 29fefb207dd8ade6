"""The inputs of a check: a description that can be compared, and the tensors made of it."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOGITS_STD = 4.0  # as of a trained model
IGNORED = -100


class Shape(NamedTuple):
    tokens: int
    hidden: int
    vocab: int


@dataclass(frozen=True)
class Loss:
    """Arguments that `flce.fused_linear_cross_entropy` and `flce.cross_entropy` share, under their names."""

    reduction: str = "mean"
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    z_loss: float = 0.0
    shift: int = 0

    def arguments(self) -> dict[str, Any]:
        return asdict(self)


PLAIN = Loss()


@dataclass(frozen=True)
class Problem:
    """Hidden states, a head and labels. With ``shape.hidden == 0`` there is no head: `input` are logits."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    loss: Loss = PLAIN
    bias: bool = False
    ignored: float = 0.0
    """Share of the labels."""
    adapter_ranks: tuple[int, ...] = ()

    @property
    def upstream(self) -> float:
        """Of a float16 loss a scale as in training, without which gradients are below the least float16."""
        return 2.0**16 if self.dtype == torch.float16 and self.loss.reduction == "mean" else 1.0


@dataclass(frozen=True)
class Tensors:
    """Of two sequences: (2, T, H), (V, H), (2, T), (V,), pairs of (2, T, r) and (V, r), and (2, T) or ()."""

    input: Tensor
    weight: Tensor | None
    target: Tensor
    bias: Tensor | None
    adapters: tuple[tuple[Tensor, Tensor], ...]
    upstream: Tensor

    def leaves(self) -> Tensors:
        """Copies that have no gradients yet and will have them."""

        def leaf(t: Tensor) -> Tensor:
            return t.detach().clone().requires_grad_()

        return Tensors(
            leaf(self.input),
            None if self.weight is None else leaf(self.weight),
            self.target,
            None if self.bias is None else leaf(self.bias),
            tuple((leaf(a), leaf(b)) for a, b in self.adapters),
            self.upstream,
        )

    def in_float64(self, device: torch.device) -> Tensors:
        def wide(t: Tensor) -> Tensor:
            return t.detach().to(device, torch.float64)

        return Tensors(
            wide(self.input),
            None if self.weight is None else wide(self.weight),
            self.target.to(device),
            None if self.bias is None else wide(self.bias),
            tuple((wide(a), wide(b)) for a, b in self.adapters),
            wide(self.upstream),
        )

    def gradients(self) -> dict[str, Tensor]:
        """By name, those that there are."""
        named = {"input gradient": self.input, "weight gradient": self.weight, "bias gradient": self.bias}
        for number, (a, b) in enumerate(self.adapters, 1):
            named |= {f"adapter {number} input gradient": a, f"adapter {number} weight gradient": b}
        return {name: t.grad for name, t in named.items() if t is not None and t.grad is not None}


@functools.lru_cache(maxsize=1)  # of many checks in a row they are the same
def make_tensors(p: Problem) -> Tensors:
    """The same numbers on every device, as far as the dtype has them. Not to be written to."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, vocab = p.shape
    leading = (2, tokens // 2)

    accum = torch.float64 if p.dtype == torch.float64 else torch.float32

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=accum).mul_(std).to(p.dtype).to(p.device)

    target = torch.randint(vocab, leading, generator=generator)
    target[torch.rand(leading, generator=generator) < p.ignored] = IGNORED
    upstream = torch.full((), p.upstream)
    if p.loss.reduction == "none":
        upstream = torch.rand(leading, generator=generator)
    return Tensors(
        input=normal(*leading, hidden) if hidden else normal(*leading, vocab, std=LOGITS_STD),
        weight=normal(vocab, hidden, std=LOGITS_STD / hidden**0.5) if hidden else None,
        target=target.to(p.device),
        bias=normal(vocab) if p.bias else None,
        adapters=tuple((normal(*leading, r), normal(vocab, r, std=LOGITS_STD / 2 / r**0.5)) for r in p.adapter_ranks),
        upstream=upstream.to(accum).to(p.device),
    )
