"""What the public functions do alike with their arguments before the work, and with its results after it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.problem import LinearCrossEntropyOutput, LossSpec, accumulation_dtype

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(required: Mapping[str, Tensor], optional: Mapping[str, Tensor | None]) -> None:
    """Tensors on the device of the first, all but the target in a floating dtype.

    Raises:
        TypeError, ValueError: what is wrong, by name.
    """
    first = next(iter(required))
    for name, value in {**required, **optional}.items():
        if value is None and name in optional:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
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


def check_shift(shift: int) -> None:
    """Raises TypeError or ValueError for a shift that is not an int >= 0."""
    if isinstance(shift, bool) or not isinstance(shift, int):
        raise TypeError(f"shift must be an int, got {type(shift).__name__}")
    if shift < 0:
        raise ValueError(f"shift must be >= 0, got {shift}")


def check_inplace(inplace: bool) -> None:
    """Raises TypeError for anything but a bool."""
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace must be a bool, got {type(inplace).__name__}")


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
    if isinstance(num_items, bool) or not isinstance(num_items, (int, float, torch.SymInt)):
        raise TypeError(f"num_items must be a number or a 0-d tensor, got {type(num_items).__name__}")
    if not 0 < num_items < float("inf"):
        raise ValueError(f"num_items must be > 0 and finite, got {num_items}")
    return torch.full((), num_items, dtype=accumulation_dtype(input.dtype), device=input.device)


def output(
    loss: Tensor,
    z_loss: Tensor,
    normalizer: Tensor,  # (2, N)
    logprob: Tensor,  # (N,), as entropy and argmax; anything where it was not asked for
    entropy: Tensor,
    argmax: Tensor,
    target: Tensor,  # (N,) as the loss saw it
    shape: torch.Size,  # of the losses of all tokens
    spec: LossSpec,
) -> Tensor | LinearCrossEntropyOutput:
    """The loss, or with statistics all that was asked for."""
    loss = loss.reshape(shape) if spec.reduction == "none" else loss
    if not spec.stats:
        return loss

    def stat(name: str, value: Tensor) -> Tensor | None:
        return value.detach().reshape(shape) if name in spec.stats else None

    z = None
    if spec.z_loss:
        z = z_loss.detach().reshape(shape) if spec.reduction == "none" else z_loss.detach()
    correct = argmax
    if "correct" in spec.stats:  # argmax is -1 where ignored, which may be what ignore_index is
        correct = (argmax == target) & (target != spec.ignore_index)
    return LinearCrossEntropyOutput(
        loss,
        z,
        stat("lse", normalizer.sum(0) if "lse" in spec.stats else loss),
        stat("logprob", logprob),
        stat("entropy", entropy),
        stat("argmax", argmax),
        stat("correct", correct),
    )
