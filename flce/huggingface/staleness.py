"""Whether the tensors that lazy logits would be computed from are what they were when the model ran.

Three things show a change: the tensor's version, which in-place operations raise; a step of an optimizer that holds a
parameter, as fused optimizers raise no version (`OptimizerSteps` counts them); and a sample of its values, which
finds writes through ``.data`` or NumPy and in inference mode.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

# A sample has at most this many entries of each dimension, and its square of all: 64 rows of 64 columns.
_SAMPLE = 64

_REMEDY = (
    "Read them before that, or call outputs.logits.materialize() before it, for example in a forward hook of the model."
)


class StaleLogitsError(RuntimeError):
    """Something that lazy logits would be computed from has changed since the model ran."""


class TensorSnapshot:
    """A tensor as it was when the head was called.

    Args:
        tensor: a parameter of the head, the hidden states, or a vector that was added to the logits.
        name: what it is, for messages, with its verb: "the output embedding was".
    """

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor = tensor
        self._name = name
        self._version = versions_of(tensor)
        values = tensor.detach()
        self._layout_and_address = _layout_and_address(values)
        self._sample_index = _sample_slices(tensor.shape)
        # A meta tensor has no values.
        self._sample = (
            None if tensor.is_meta else values[self._sample_index].clone(memory_format=torch.contiguous_format)
        )

    def check_unchanged(self, can_synchronize: bool) -> None:
        """Raise `StaleLogitsError` if the tensor has changed.

        Args:
            can_synchronize: compare values also where that waits for a GPU and nothing points to a change.
        """
        tensor = self.tensor
        if self._version != versions_of(tensor):
            raise self.stale_error("in place")
        values = tensor.detach()
        place = _layout_and_address(values)
        if place[:3] != self._layout_and_address[:3]:
            raise self.stale_error(f"to {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}")
        # On a CPU a comparison waits for nothing.
        compare = can_synchronize or tensor.is_cpu or place != self._layout_and_address
        if self._sample is None or not compare or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        sample = values[self._sample_index]
        # NaN equals itself only as bytes.
        if not (torch.equal(sample, self._sample) or torch.equal(_as_bytes(sample), _as_bytes(self._sample))):
            how = "through .data or NumPy, in inference mode, by an exchange of weights, or by merging an adapter"
            raise self.stale_error(how)

    def for_copy(self) -> TensorSnapshot | None:
        """What watches a copy that was made just now: nothing, as later changes do not reach it.

        A change that came before the copy is in it, so then this object still watches.
        """
        try:
            self.check_unchanged(can_synchronize=False)
        except StaleLogitsError:
            return self
        return None

    def stale_error(self, how: str) -> StaleLogitsError:
        return StaleLogitsError(
            f"these lazy logits can no longer be computed: {self._name} changed {how} since the model ran. {_REMEDY}"
        )


def versions_of(*tensors: Tensor) -> tuple[int, ...] | None:
    """How often the tensors were changed in place; None where that is not counted."""
    if torch.compiler.is_compiling():
        return None
    versions = []
    for tensor in tensors:
        if tensor.is_inference():
            return None
        versions.append(tensor._version)
    return tuple(versions)


def _layout_and_address(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, None if tensor.is_meta else tensor.data_ptr()


@functools.lru_cache
def _sample_slices(shape: torch.Size) -> tuple[slice, ...]:
    """The index of a sample: entries at equal distances, of the last dimension first, then of the others in order."""
    remaining = _SAMPLE * _SAMPLE
    steps: dict[int, int] = {}
    for dim in [len(shape) - 1, *range(len(shape) - 1)]:
        steps[dim] = max(1, -(-shape[dim] // min(_SAMPLE, remaining)))
        remaining = max(1, remaining // max(1, -(-shape[dim] // steps[dim])))
    return tuple([slice(None, None, steps[dim]) for dim in range(len(shape))])


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


class OptimizerSteps:
    """Optimizer steps in this process: optimizers change weights without raising a tensor's version."""

    def __init__(self) -> None:
        self.count = 0
        self._last: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []

    def register(self) -> None:
        """From now on. Once a process."""
        if not self._handles:
            self._handles.append(register_optimizer_step_post_hook(self._on_step))

    def optimizers_since(self, count: int) -> list[Optimizer]:
        return [optimizer for optimizer, last in self._last.items() if last > count]

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.count += 1
        self._last[optimizer] = self.count


optimizer_steps = OptimizerSteps()
