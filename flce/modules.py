"""The losses as modules: of hidden states, one that owns the head and one without state; and of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce.arguments import check_inplace, check_shift, check_tensor
from flce.functional import check_options, cross_entropy, fused_linear_cross_entropy
from flce.options import ChunkOptions
from flce.problem import LinearCrossEntropyOutput, LossSpec


class _Loss(nn.Module):
    """What the losses have in common: scalar arguments, checked once, and class weights as a buffer."""

    weight: Tensor | None

    def __init__(self, *, weight: Tensor | None, ignore_index: int | None, shift: int, **spec: Any) -> None:
        super().__init__()
        if weight is not None:
            check_tensor("weight", weight)
        self.spec = LossSpec(ignore_index=-100 if ignore_index is None else ignore_index, **spec)
        self.shift = check_shift(shift)
        self.register_buffer("weight", weight)

    def _arguments(self) -> dict[str, Any]:
        """Of the function, those that are fixed here."""
        fixed = {field.name: getattr(self.spec, field.name) for field in fields(self.spec)}
        return {**fixed, "weight": self.weight, "shift": self.shift}

    def extra_repr(self) -> str:
        return f"{self.spec}, shift={self.shift}, weight={self.weight is not None}"


class FusedLinearCrossEntropyLoss(_Loss):
    """`flce.fused_linear_cross_entropy` with its scalar arguments fixed; the head stays where it is.

    Args: as those of `flce.fused_linear_cross_entropy`. `weight` is a buffer, as in
    `torch.nn.CrossEntropyLoss`.

    Shape: ``forward(input, linear_weight, target)`` with (..., H), (V, H) and (...); further tensors as those of
    `flce.fused_linear_cross_entropy`.

    Raises:
        TypeError, ValueError: when constructed, for a scalar out of its range; when called, as the function.
    """

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: float = 1.0,
        z_loss: float = 0.0,
        shift: int = 0,
        stats: tuple[str, ...] = (),
        options: ChunkOptions | None = None,
    ) -> None:
        super().__init__(
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=temperature,
            z_loss=z_loss,
            shift=shift,
            stats=stats,
        )
        check_options(options)
        self.options = options

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        *,
        adapters: Sequence[tuple[Tensor, Tensor]] = (),
        token_weight: Tensor | None = None,
        num_items: int | Tensor | None = None,
    ) -> Tensor | LinearCrossEntropyOutput:
        return fused_linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            adapters=adapters,
            token_weight=token_weight,
            num_items=num_items,
            options=self.options,
            **self._arguments(),
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, options={self.options}"


class LinearCrossEntropyLoss(FusedLinearCrossEntropyLoss):
    """A language-model head and its loss in one, as `torch.nn.LinearCrossEntropyLoss`, whose state it can load.

    Args:
        in_features: H.
        num_classes: V.
        bias: whether the head has one.
        device, dtype: of the head.
        loss: the keyword arguments of `FusedLinearCrossEntropyLoss`.

    Attributes:
        linear: the head, an `nn.Linear` with weight (V, H).

    Shape: ``forward(input, target)`` with (..., H) and (...).
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **loss: Any,
    ) -> None:
        super().__init__(**loss)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        target: Tensor,
        *,
        adapters: Sequence[tuple[Tensor, Tensor]] = (),
        token_weight: Tensor | None = None,
        num_items: int | Tensor | None = None,
    ) -> Tensor | LinearCrossEntropyOutput:
        return super().forward(
            input,
            self.linear.weight,
            target,
            self.linear.bias,
            adapters=adapters,
            token_weight=token_weight,
            num_items=num_items,
        )


class CrossEntropyLoss(_Loss):
    """`flce.cross_entropy` with its options fixed, as `torch.nn.CrossEntropyLoss`.

    Args: as those of `flce.cross_entropy`. `weight` is a buffer.

    Shape: ``forward(logits, target)`` with (..., V), classes last, and (...) or, for class probabilities, (..., V);
    `token_weight` (...).

    Raises:
        TypeError, ValueError: when constructed, for a scalar out of its range; when called, as the function.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: float = 1.0,
        z_loss: float = 0.0,
        shift: int = 0,
        stats: tuple[str, ...] = (),
        inplace: bool = False,
        process_group: dist.ProcessGroup | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=temperature,
            z_loss=z_loss,
            shift=shift,
            stats=stats,
        )
        check_inplace(inplace)
        self.inplace = inplace
        self.process_group = process_group
        self.vocab_size = vocab_size

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        num_items: int | Tensor | None = None,
    ) -> Tensor | LinearCrossEntropyOutput:
        return cross_entropy(
            logits,
            target,
            token_weight=token_weight,
            num_items=num_items,
            inplace=self.inplace,
            process_group=self.process_group,
            vocab_size=self.vocab_size,
            **self._arguments(),
        )

    def extra_repr(self) -> str:
        divided = "" if self.process_group is None else f", process_group of {self.process_group.size()}"
        return f"{super().extra_repr()}, inplace={self.inplace}{divided}"

    @property
    def reduction(self) -> str:
        """As given; another takes another module."""
        return self.spec.reduction

    @property
    def ignore_index(self) -> int:
        """As given."""
        return self.spec.ignore_index

    @property
    def label_smoothing(self) -> float:
        """As given."""
        return self.spec.label_smoothing
