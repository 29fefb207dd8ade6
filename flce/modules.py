"""The public functions as modules with fixed arguments, with or without a head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from flce.core.numbers import check_bool, check_dtype, check_int
from flce.core.problem import LinearCrossEntropyOutput, LinearLogprobsOutput, LogprobSpec, LossSpec
from flce.functional import cross_entropy, fused_linear_cross_entropy, linear_logprobs
from flce.ops.arguments import check_options, check_shift, check_tensor, names_replacements

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flce.core.signatures import FixedLinearArguments, FixedLogitsArguments, FixedLogprobArguments

InitT = TypeVar("InitT", bound=Callable[..., None])


def _fixed_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that a module fixes: class weights, and all that are not tensors."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.name == "weight" or "Tensor" not in p.annotation]


def _signature_of(function: Callable[..., Any]) -> Callable[[InitT], InitT]:
    """Return a decorator that replaces ``**fixed`` by arguments of `function` in the signature that `help` shows."""

    def decorate(init: InitT) -> InitT:
        *own, _ = inspect.signature(init).parameters.values()
        names = {p.name for p in own}
        shown = [*own, *(p for p in _fixed_parameters(function) if p.name not in names)]
        init.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return names_replacements(init)  # type: ignore[return-value]

    return decorate


class _FixedArguments(nn.Module):
    """Base class of the modules: the fixed arguments of a public function, which are checked once, as attributes. Class
    weights are a buffer."""

    weight: Tensor | None
    reduction: str
    ignore_index: int
    label_smoothing: float

    def __init__(self, function: Callable[..., Any], arguments: Any) -> None:
        super().__init__()
        bound = inspect.Signature(_fixed_parameters(function)).bind(**arguments)
        bound.apply_defaults()
        fixed = bound.arguments
        if "weight" in fixed:
            if fixed["weight"] is not None:
                check_tensor("weight", fixed["weight"])
            self.register_buffer("weight", fixed["weight"])
        spec_type = LogprobSpec if "outputs" in fixed else LossSpec
        values = {"stats": fixed.get("outputs"), **fixed}
        spec = spec_type(**{f.name: values[f.name] for f in fields(spec_type) if f.name in values})
        fixed["shift"] = check_shift(fixed["shift"])
        check_options(fixed.get("options"))
        check_bool("inplace", fixed.get("inplace", False))
        self._names = tuple(fixed)
        for name, value in fixed.items():
            setattr(self, name, getattr(spec, "stats" if name == "outputs" else name, value))

    def _fixed(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def extra_repr(self) -> str:
        values = {name: value is not None if name == "weight" else value for name, value in self._fixed().items()}
        return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)


class FusedLinearCrossEntropyLoss(_FixedArguments):
    """Loss module: `flce.fused_linear_cross_entropy` with fixed scalar arguments. The module does not own the head.

    Args: the arguments of `flce.fused_linear_cross_entropy`. `weight` is a buffer, as in `torch.nn.CrossEntropyLoss`.

    Shape: ``forward(input, linear_weight, target)`` with (..., H), (V, H) and (...); other tensors as in
    `flce.fused_linear_cross_entropy`.

    Raises:
        TypeError, ValueError: in the constructor, for a scalar out of its range; in a call, as the function.
    """

    @_signature_of(fused_linear_cross_entropy)
    def __init__(self, **fixed: Unpack[FixedLinearArguments]) -> None:
        super().__init__(fused_linear_cross_entropy, fixed)

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
            num_items=num_items, **self._fixed(),
        )  # fmt: skip


class LinearCrossEntropyLoss(FusedLinearCrossEntropyLoss):
    """Language-model head and its loss in one module. It can load the state of `torch.nn.LinearCrossEntropyLoss`.

    Args:
        in_features: H.
        num_classes: V.
        bias: True if the head has a bias.
        device, dtype: device and dtype of the head.
        fixed: the keyword arguments of `FusedLinearCrossEntropyLoss`.

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
        **fixed: Unpack[FixedLinearArguments],
    ) -> None:
        super().__init__(**fixed)
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


class LinearLogprobs(_FixedArguments):
    """Module: `flce.linear_logprobs` with fixed options. The module does not own the head.

    Args: the arguments of `flce.linear_logprobs` that are not tensors, except the temperature.

    Shape: ``forward(input, linear_weight, target)`` with (..., H), (V, H) and (...); other tensors and the temperature
    as in `flce.linear_logprobs`.

    Raises:
        TypeError, ValueError: in the constructor, for an option out of its range; in a call, as the function.
    """

    @_signature_of(linear_logprobs)
    def __init__(self, **fixed: Unpack[FixedLogprobArguments]) -> None:
        super().__init__(linear_logprobs, fixed)

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor | None = None,
        *,
        candidates: Tensor | None = None,
        mask: Tensor | None = None,
        linear_bias: Tensor | None = None,
        adapters: Sequence[tuple[Tensor, Tensor]] = (),
        temperature: float | Tensor = 1.0,
    ) -> LinearLogprobsOutput:
        return linear_logprobs(
            input, linear_weight, target, candidates=candidates, mask=mask, linear_bias=linear_bias, adapters=adapters,
            temperature=temperature, **self._fixed(),
        )  # fmt: skip


class CrossEntropyLoss(_FixedArguments):
    """Loss module: `flce.cross_entropy` with fixed options, as `torch.nn.CrossEntropyLoss`.

    Args: the arguments of `flce.cross_entropy`. `weight` is a buffer.

    Shape: ``forward(logits, target)`` with (..., V), classes last, and (...); `token_weight` is (...).

    Raises:
        TypeError, ValueError: in the constructor, for a scalar out of its range; in a call, as the function.
    """

    @_signature_of(cross_entropy)
    def __init__(self, weight: Tensor | None = None, **fixed: Unpack[FixedLogitsArguments]) -> None:
        super().__init__(cross_entropy, {"weight": weight, **fixed})

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        num_items: int | Tensor | None = None,
    ) -> Tensor | LinearCrossEntropyOutput:
        return cross_entropy(logits, target, token_weight=token_weight, num_items=num_items, **self._fixed())
