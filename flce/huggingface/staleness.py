"""Detection of changes of the tensors that lazy logits are computed from. ``head_call.py`` and ``lazy/`` call it.

Three things show a change. In-place operations increase the version of a tensor. Fused optimizers do not, so
`OptimizerSteps` counts the steps of each optimizer. A sample of values finds writes through ``.data`` or NumPy and
writes in inference mode.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

# A sample has at most 64 entries along each dimension, and at most 64 x 64 entries.
_SAMPLE = 64


class StaleLogitsError(RuntimeError):
    """A tensor that lazy logits are computed from has changed since the model ran."""


class TensorSnapshot:
    """A tensor as it was when the head was called.

    Args:
        tensor: the tensor.
        name: for messages, "the output embedding was".
        parameter: the DTensor that `tensor` is the local tensor of. PyTorch increases only the version of the DTensor,
            and optimizers have the DTensor.
    """

    def __init__(self, tensor: Tensor, name: str, parameter: Tensor | None = None) -> None:
        self.tensor = tensor
        self.parameter = tensor if parameter is None else parameter
        self._name = name
        self._record = self._read()
        self._sample_index = _sample_slices(tensor.shape)
        # A meta tensor has no values.
        self._sample = (
            None if tensor.is_meta else tensor.detach()[self._sample_index].clone(memory_format=torch.contiguous_format)
        )

    def _read(self) -> tuple[Any, Any, int | None]:
        """Return the version, as `version_of` does; shape, dtype and device; and the address."""
        tensor, parameter = self.tensor, self.parameter
        version = None if torch.compiler.is_compiling() or parameter.is_inference() else parameter._version
        address = None if tensor.is_meta else tensor.detach().data_ptr()
        return version, (tensor.shape, tensor.dtype, tensor.device), address

    def check_unchanged(self, can_synchronize: bool) -> None:
        """Raise `StaleLogitsError` if the tensor has changed.

        ``can_synchronize``: compare values on a GPU, for which the host waits, even if nothing indicates a change.
        """
        tensor, (version, layout, address), record = self.tensor, self._record, self._read()
        if record[0] != version:
            raise self.stale_error("in place")
        if record[1] != layout:
            raise self.stale_error(f"to {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}")
        compare = can_synchronize or tensor.is_cpu or record[2] != address
        if self._sample is None or not compare or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        sample = tensor.detach()[self._sample_index]
        # NaN != NaN, so equal samples with NaN are found by their bytes.
        if not (torch.equal(sample, self._sample) or torch.equal(_as_bytes(sample), _as_bytes(self._sample))):
            raise self.stale_error(
                "through .data or NumPy, in inference mode, by an exchange of weights, or by merging an adapter"
            )

    def for_copy(self) -> TensorSnapshot | None:
        """Return None for a copy of the tensor, which later changes do not reach, or this snapshot if the tensor has
        changed already: the copy contains the change."""
        try:
            self.check_unchanged(can_synchronize=False)
        except StaleLogitsError:
            return self
        return None

    def stale_error(self, cause: str) -> StaleLogitsError:
        return StaleLogitsError(
            f"these lazy logits can no longer be computed: {self._name} changed {cause} since the model ran. Read them "
            "before that, or call outputs.logits.materialize() before it, for example in a forward hook of the model."
        )


def version_of(tensor: Tensor) -> int | None:
    """Return the version of a tensor, or None in a graph and for a tensor of inference mode, which has none."""
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


@functools.lru_cache
def _sample_slices(shape: torch.Size) -> tuple[slice, ...]:
    """Return the index of a sample: entries at equal distances. The last dimension is sampled most densely."""
    remaining = _SAMPLE * _SAMPLE
    steps: dict[int, int] = {}
    for dim in [len(shape) - 1, *range(len(shape) - 1)]:
        steps[dim] = max(1, -(-shape[dim] // min(_SAMPLE, remaining)))
        remaining = max(1, remaining // max(1, -(-shape[dim] // steps[dim])))
    return tuple([slice(None, None, steps[dim]) for dim in range(len(shape))])


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


class OptimizerSteps:
    """Counts of optimizer steps in this process. Fused optimizers change weights without increasing their version."""

    def __init__(self) -> None:
        self.count = 0
        self._last: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []

    def register(self) -> None:
        """Start counting, if it has not been started in this process."""
        if not self._handles:
            self._handles.append(register_optimizer_step_post_hook(self._on_step))

    def optimizers_since(self, count: int) -> list[Optimizer]:
        return [optimizer for optimizer, last in self._last.items() if last > count]

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.count += 1
        self._last[optimizer] = self.count


optimizer_steps = OptimizerSteps()
