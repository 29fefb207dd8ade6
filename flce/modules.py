"""The public losses as modules: `flce.functional` with fixed options, with or without a head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce.core.numbers import check_bool, check_dtype, check_int
from flce.core.options import ChunkOptions
from flce.core.problem import LinearCrossEntropyOutput, LinearLogprobsOutput, LogprobSpec, LossSpec
from flce.functional import cross_entropy, fused_linear_cross_entropy, linear_logprobs
from flce.ops.arguments import check_options, check_shift, check_tensor, names_replacements

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flce.core.signatures import FixedLinearArguments, FixedLogitsArguments

InitT = TypeVar("InitT", bound=Callable[..., None])

# `forward` has these arguments of the functions. A module fixes all others.
_FORWARD_ARGUMENTS = {
    "input",
    "linear_weight",
    "logits",
    "target",
    "linear_bias",
    "adapters",
    "token_weight",
    "num_items",
}


def _fixed_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name not in _FORWARD_ARGUMENTS]


def _signature_of(function: Callable[..., Any]) -> Callable[[InitT], InitT]:
    """Return a decorator that replaces ``**loss`` by the arguments of `function` in the signature that `help` shows."""

    def decorate(init: InitT) -> InitT:
        *own, _ = inspect.signature(init).parameters.values()
        names = {p.name for p in own}
        shown = [*own, *(p for p in _fixed_parameters(function) if p.name not in names)]
        init.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return names_replacements(init)  # type: ignore[return-value]

    return decorate


class _Loss(nn.Module):
    """Base class of the losses: fixed arguments of a function, checked once, and class weights as a buffer."""

    weight: Tensor | None
    shift: int

    def __init__(self, function: Callable[..., Any], loss: Mapping[str, Any]) -> None:
        super().__init__()
        bound = inspect.Signature(_fixed_parameters(function)).bind(**loss)
        bound.apply_defaults()
        fixed = bound.arguments
        weight = fixed.pop("weight")
        if weight is not None:
            check_tensor("weight", weight)
        self.register_buffer("weight", weight)
        spec = {field.name: fixed.pop(field.name) for field in fields(LossSpec)}
        spec["ignore_index"] = -100 if spec["ignore_index"] is None else spec["ignore_index"]
        self.spec = LossSpec(**spec)
        fixed["shift"] = check_shift(fixed["shift"])
        check_options(fixed.get("options"))
        check_bool("inplace", fixed.get("inplace", False))
        self._others = tuple(fixed)
        for name, value in fixed.items():
            setattr(self, name, value)

    def _arguments(self) -> dict[str, Any]:
        spec = {field.name: getattr(self.spec, field.name) for field in fields(self.spec)}
        return {**spec, "weight": self.weight, **{name: getattr(self, name) for name in self._others}}

    def extra_repr(self) -> str:
        others = [f"{name}={getattr(self, name)}" for name in self._others if getattr(self, name) is not None]
        return ", ".join([str(self.spec), f"weight={self.weight is not None}", *others])


class FusedLinearCrossEntropyLoss(_Loss):
    """Loss module: `flce.fused_linear_cross_entropy` with fixed scalar arguments. The module does not own the head.

    Args: the arguments of `flce.fused_linear_cross_entropy`. `weight` is a buffer, as in `torch.nn.CrossEntropyLoss`.

    Shape: ``forward(input, linear_weight, target)`` with (..., H), (V, H) and (...); other tensors as in
    `flce.fused_linear_cross_entropy`.

    Raises:
        TypeError, ValueError: in the constructor, for a scalar out of its range; in a call, as the function.
    """

    options: ChunkOptions | None

    @_signature_of(fused_linear_cross_entropy)
    def __init__(self, **loss: Unpack[FixedLinearArguments]) -> None:
        super().__init__(fused_linear_cross_entropy, loss)

    @names_replacements
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
            input, linear_weight, target, linear_bias=linear_bias, adapters=adapters, token_weight=token_weight,
            num_items=num_items, **self._arguments(),
        )  # fmt: skip


class LinearCrossEntropyLoss(FusedLinearCrossEntropyLoss):
    """Language-model head and its loss in one module. It can load the state of `torch.nn.LinearCrossEntropyLoss`.

    Args:
        in_features: H.
        num_classes: V.
        bias: True if the head has a bias.
        device, dtype: device and dtype of the head.
        loss: the keyword arguments of `FusedLinearCrossEntropyLoss`.

    Attributes:
        linear: the head, an `nn.Linear` with weight (V, H).

    Shape: ``forward(input, target)`` with (..., H) and (...).

    Raises:
        TypeError, ValueError: in the constructor, for a size that is not an int > 0, a `bias` that is not a bool or a
            scalar out of its range; in a call, as the function.
    """

    @_signature_of(fused_linear_cross_entropy)
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **loss: Unpack[FixedLinearArguments],
    ) -> None:
        super().__init__(**loss)
        sizes = {"in_features": in_features, "num_classes": num_classes}
        for name, size in sizes.items():
            if check_int(name, size) <= 0:
                raise ValueError(f"{name} must be > 0, got {size}")
        check_bool("bias", bias)
        if dtype is not None:
            check_dtype("dtype", dtype, "None or a torch.dtype")
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
        head = self.linear.weight, target, self.linear.bias
        return super().forward(input, *head, adapters=adapters, token_weight=token_weight, num_items=num_items)


class LinearLogprobs(nn.Module):
    """Module: `flce.linear_logprobs` with fixed options. The module does not own the head.

    Args: `outputs`, `top_k`, `softcap`, `logit_scale`, `ignore_index`, `shift` and `options` of `flce.linear_logprobs`.

    Shape: ``forward(input, linear_weight, target)`` with (..., H), (V, H) and (...); other tensors and the temperature
    as in `flce.linear_logprobs`.

    Raises:
        TypeError, ValueError: in the constructor, for an option out of its range; in a call, as the function.
    """

    def __init__(
        self,
        *,
        outputs: Sequence[str] = ("logprob", "entropy"),
        top_k: int = 0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        ignore_index: int | None = -100,
        shift: int = 0,
        options: ChunkOptions | None = None,
    ) -> None:
        super().__init__()
        ignore_index = -100 if ignore_index is None else ignore_index
        spec = LogprobSpec("none", ignore_index, 0.0, softcap, logit_scale, stats=outputs, top_k=top_k)  # type: ignore[arg-type]
        self.outputs, self.top_k, self.shift = spec.stats, spec.top_k, check_shift(shift)
        self.softcap, self.logit_scale, self.ignore_index = spec.softcap, spec.logit_scale, spec.ignore_index
        check_options(options)
        self.options = options

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor | None = None,
        *,
        candidates: Tensor | None = None,
        linear_bias: Tensor | None = None,
        adapters: Sequence[tuple[Tensor, Tensor]] = (),
        temperature: float | Tensor = 1.0,
    ) -> LinearLogprobsOutput:
        return linear_logprobs(
            input, linear_weight, target, candidates=candidates, linear_bias=linear_bias, adapters=adapters,
            temperature=temperature, **self._fixed_arguments(),
        )  # fmt: skip

    def _fixed_arguments(self) -> dict[str, Any]:
        names = ["outputs", "top_k", "softcap", "logit_scale", "ignore_index", "shift", "options"]
        return {name: getattr(self, name) for name in names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._fixed_arguments().items() if value is not None)


class CrossEntropyLoss(_Loss):
    """Loss module: `flce.cross_entropy` with fixed options, as `torch.nn.CrossEntropyLoss`.

    Args: the arguments of `flce.cross_entropy`. `weight` is a buffer.

    Shape: ``forward(logits, target)`` with (..., V), classes last, and (...); `token_weight` is (...).

    Raises:
        TypeError, ValueError: in the constructor, for a scalar out of its range; in a call, as the function.
    """

    inplace: bool
    process_group: dist.ProcessGroup | None
    vocab_size: int | None

    @_signature_of(cross_entropy)
    def __init__(self, weight: Tensor | None = None, **loss: Unpack[FixedLogitsArguments]) -> None:
        super().__init__(cross_entropy, {"weight": weight, **loss})

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        num_items: int | Tensor | None = None,
    ) -> Tensor | LinearCrossEntropyOutput:
        return cross_entropy(logits, target, token_weight=token_weight, num_items=num_items, **self._arguments())

    @property
    def reduction(self) -> str:
        """The `reduction` argument. It is read-only: construct another module to change it."""
        return self.spec.reduction

    @property
    def ignore_index(self) -> int:
        """The `ignore_index` argument."""
        return self.spec.ignore_index

    @property
    def label_smoothing(self) -> float:
        """The `label_smoothing` argument."""
        return self.spec.label_smoothing
