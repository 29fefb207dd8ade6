"""What the public functions do alike with their arguments before the work, and with its results after it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_unary

from flce.backends.contract import RowOutputs, log_sum_exp
from flce.frames import is_differentiated_forward
from flce.options import ChunkOptions
from flce.problem import LinearCrossEntropyOutput, LossSpec, accumulation_dtype
from flce.scalars import integer, real

P = ParamSpec("P")
R = TypeVar("R")

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, value: Any) -> Tensor:
    """The value, or TypeError for anything but a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    return value


def check_tensors(required: Mapping[str, Tensor], optional: Mapping[str, Tensor | None]) -> None:
    """Tensors on the device of the first, all but the target in a floating dtype.

    Raises:
        TypeError, ValueError: what is wrong, by name.
    """
    first = next(iter(required))
    for name, given in {**required, **optional}.items():
        if given is None and name in optional:
            continue
        value = check_tensor(name, given)
        if value.device != required[first].device:
            raise ValueError(
                f"all tensors must be on one device, got {first} on {required[first].device} "
                f"and {name} on {value.device}"
            )
        if name != "target" and not value.is_floating_point():
            raise TypeError(f"{name} must have a floating dtype, got {value.dtype}")
    target = required["target"]
    if not target.is_floating_point() and target.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            "target must hold class indices in int64 or int32, or class probabilities in a floating dtype, "
            f"got {target.dtype}"
        )


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast casts to on such devices; None where it is off, or where there is none, as for meta tensors."""
    # Asking about a device without autocast raises; the compiler, which has none such, cannot trace the question.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return torch.get_autocast_dtype(device_type) if available and torch.is_autocast_enabled(device_type) else None


def narrowed(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """What autocast makes of an operand of a matrix product: it leaves float64 alone."""
    autocast = autocast_dtype(device_type)
    return dtype if autocast is None or dtype == torch.float64 else autocast


def widened(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype of what autocast makes in float32, losses and softmax among it: it leaves float64 alone."""
    autocast = autocast_dtype(device_type)
    return dtype if autocast is None or dtype == torch.float64 else torch.float32


def refuse_forward_mode(function: str, instead: str, tensors: Iterable[Tensor | None]) -> None:
    """RuntimeError for a tensor with a forward-mode tangent, which would be lost without a word."""
    # Looked up here, for what is asked in every call and traced with it: mostly there are no dual tensors anywhere.
    if not is_differentiated_forward():
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(
            f"flce.{function} does not support forward-mode differentiation (torch.func.jvp, torch.func.jacfwd, dual "
            f"tensors of torch.autograd.forward_ad): use {instead} for that, or backward and torch.autograd.grad"
        )


def refuse_double_backward(function: str, instead: str) -> None:
    """RuntimeError within a backward that is to be differentiated itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{function} cannot be differentiated twice (create_graph=True): its gradients are not part of the graph. "
            f"Use {instead} for that."
        )


def check_shift(shift: int) -> int:
    """As an int; TypeError or ValueError for what is none >= 0."""
    shift = integer("shift", shift)
    if shift < 0:
        raise ValueError(f"shift must be >= 0, got {shift}")
    return shift


def check_inplace(inplace: bool) -> None:
    """Raises TypeError for anything but a bool."""
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace must be a bool, got {type(inplace).__name__}")


def check_options(options: ChunkOptions | None) -> None:
    """Raises TypeError for options of another type."""
    if options is not None and not isinstance(options, ChunkOptions):
        raise TypeError(f"options must be None or a flce.ChunkOptions, got {type(options).__name__}")


def shifted(target: Tensor, shift: int, ignore_index: int) -> Tensor:
    """target[..., t + shift] at position t, and `ignore_index` at the last `shift` positions."""
    if shift == 0:
        return target
    shift = min(shift, target.shape[-1])
    return F.pad(target[..., shift:], (0, shift), value=ignore_index)


def num_items_tensor(num_items: int | Tensor | None, spec: LossSpec, input: Tensor) -> Tensor | None:
    """As a 0-d tensor on the device of `input`, which nothing waits for."""
    if num_items is None:
        return None
    if spec.reduction != "sum":
        raise ValueError(f"num_items needs reduction='sum', got reduction={spec.reduction!r}")
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items must be a number or a 0-d tensor, got shape {tuple(num_items.shape)}")
        return num_items.detach().reshape(()).to(input.device, non_blocking=True)
    number = real("num_items", num_items)
    if not 0 < number < float("inf"):
        raise ValueError(f"num_items must be > 0 and finite, got {number}")
    return torch.full((), number, dtype=accumulation_dtype(input.dtype), device=input.device)


def output(rows: RowOutputs, target: Tensor, shape: torch.Size, spec: LossSpec) -> Tensor | LinearCrossEntropyOutput:
    """The loss, or with statistics all that was asked for.

    Args:
        rows: of N tokens, the losses reduced.
        target: (N,) as the loss saw it.
        shape: of the losses of all tokens.
    """
    loss = rows.loss.reshape(shape) if spec.reduction == "none" else rows.loss
    if not spec.stats:
        return loss
    made: dict[str, Any] = {
        name: getattr(rows, name) for name in LinearCrossEntropyOutput._fields if hasattr(rows, name)
    }
    if "lse" in spec.stats:
        made["lse"] = log_sum_exp(rows.normalizer)
    if "correct" in spec.stats:  # argmax is -1 where ignored, which may be what ignore_index is
        made["correct"] = (made["argmax"] == target) & (target != spec.ignore_index)
    if "argmax" not in spec.stats:
        made["argmax"] = None

    for name, value in made.items():
        if value is not None:
            made[name] = value.detach().reshape(shape) if value.dim() else value.detach()
    made["loss"] = loss
    return LinearCrossEntropyOutput(**made)


def overridable(function: Callable[P, R]) -> Callable[P, R]:
    """A public function that asks ``__torch_function__`` of its first argument, `logits`, as those of PyTorch do."""

    @functools.wraps(function)
    def ask(*args: P.args, **kwargs: P.kwargs) -> R:
        logits: Any = args[0] if args else kwargs.get("logits")
        if not has_torch_function_unary(logits):
            return function(*args, **kwargs)
        rest: Any = (args[1:], {name: value for name, value in kwargs.items() if name != "logits"})
        overridden: R = handle_torch_function(ask, (logits,), logits, *rest[0], **rest[1])
        return overridden

    return ask
