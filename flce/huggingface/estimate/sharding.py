"""Memory of a training step on each GPU under ZeRO-3 or FSDP. ``training_memory.py`` creates `Shards` for a step.

Each GPU stores a share of the weights, of the gradients and of the optimizer's state. The weights of a unit are
gathered while the unit runs, forward and backward, and the weights of the next unit are gathered at the same time. The
gradients of a unit are full until the last of them is computed. Then they are summed over the GPUs, and each GPU stores
its share.

Sources: DeepSpeed 0.19, ``deepspeed/runtime/zero``: ``partitioned_param_coordinator.py`` and ``stage3.py``, with the
defaults of ``config.py``; PyTorch 2.13, ``torch/distributed/fsdp/_fully_shard``; the wrapping policy of Accelerate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flce.huggingface.estimate.language_model import output_embedding
from flce.huggingface.estimate.rehearsal import StepMeter

SHARDING_KINDS = ("fsdp", "zero3")
# DeepSpeed's defaults, in entries.
PERSISTENCE_THRESHOLD = 100_000  # stage3_param_persistence_threshold: smaller parameters are not divided
# stage3_max_reuse_distance: a parameter stays gathered if fewer entries are used before its next use
MAX_REUSE_DISTANCE = 1_000_000_000
PREFETCH_BUCKET_SIZE = 50_000_000  # stage3_prefetch_bucket_size
REDUCE_BUCKET_SIZE = 500_000_000  # reduce_bucket_size
SUB_GROUP_SIZE = 1_000_000_000  # sub_group_size


@dataclass(frozen=True)
class Sharding:
    """The division of a model over GPUs."""

    kind: str
    """One of `SHARDING_KINDS`."""
    gpus: int
    """The number of GPUs, at least 2."""

    def share(self, size: int) -> int:
        """Return the bytes of one GPU's share of ``size`` bytes."""
        return -(-size // self.gpus)


class _Unit:
    """A module whose weights (``parameters``) are gathered together, and optionally stay gathered until backward."""

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter], stays_gathered: bool) -> None:
        self.module, self.parameters, self.stays_gathered = module, parameters, stays_gathered
        self.trained = [p for p in parameters if p.requires_grad]
        self.size = sum(p.nbytes for p in parameters)
        self.missing_gradients, self.is_gathered, self.is_in_backward = len(self.trained), False, False


class Shards:
    """The shares of a model in one step on the meta device. Create it before the meter counts the full weights.

    ``state`` returns the bytes of the optimizer's state of a parameter. ``accumulation``: gradients exist before.
    """

    def __init__(
        self, model: Any, sharding: Sharding, meter: StepMeter, state: Callable[[Tensor], int], accumulation: bool
    ) -> None:
        self._sharding, self._meter, self._state = sharding, meter, state
        self._zero3, self._accumulation = sharding.kind == "zero3", accumulation
        divided = [p for p in model.parameters() if not (self._zero3 and p.numel() <= PERSISTENCE_THRESHOLD)]
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._sharded_bytes = sum(p.nbytes for p in divided)
        units = _units_of_zero3(model, divided) if self._zero3 else _units_of_fsdp(model)
        self._prefetched = PREFETCH_BUCKET_SIZE * max((p.itemsize for p in divided), default=0) if self._zero3 else 0
        self._gathered_bytes = self._bucket_bytes = self._buffer_bytes = 0
        self._unit_of = {id(p): unit for unit in units for p in unit.parameters}
        share, size = sharding.share, max((p.itemsize for p in self._trained), default=0)
        meter.add_bytes(share(self._sharded_bytes) - self._sharded_bytes, "weights")
        meter.add_bytes(share(sum(map(self._optimizer_bytes, self._trained))), "optimizer")
        if self._zero3:
            meter.add_bytes(REDUCE_BUCKET_SIZE * size, "temporary")
        if self._zero3 or self._accumulation:
            meter.add_bytes(share(sum(p.nbytes for p in self._trained)), "gradients")
        self.handles = [handle for unit in units for handle in self._register_hooks(unit)]
        """Handles of hooks, which the caller removes after the step."""

    def on_gradient(self, parameter: Tensor) -> None:
        """Reduce the gradients of a unit to shares, and free its weights, if this gradient is the last of the unit."""
        unit = self._unit_of.get(id(parameter))
        parameters: list[Any] = [parameter] if unit is None else unit.trained
        if unit is not None:
            unit.missing_gradients -= 1
            if unit.missing_gradients:
                return
        size = sum(p.nbytes for p in parameters)
        if not self._zero3:
            self._meter.add_temporary_bytes(size, "temporary")  # the reduction reads one copy of all gradients
        elif self._bucket_bytes + size > REDUCE_BUCKET_SIZE * parameter.itemsize:
            self._reduce_bucket(size)
        else:
            self._bucket_bytes += size
        for p in parameters:
            p.grad = None
        if not (self._zero3 or self._accumulation):
            self._meter.add_bytes(self._sharding.share(size), "gradients")
        if unit is not None:
            self._set_gathered(unit, False)

    def step(self, copies: int) -> None:
        """Count the temporary memory of the optimizer's step, with ``copies`` copies of all parameters."""
        size = sum(4 * p.numel() if self._zero3 else p.nbytes for p in self._trained)
        temporary = copies * self._sharding.share(size)
        if self._zero3:  # gradients in float32
            self._reduce_bucket(0)
            temporary += min(self._sharding.share(size), 4 * SUB_GROUP_SIZE)
        self._meter.add_temporary_bytes(temporary, "optimizer")

    def _reduce_bucket(self, new_bytes: int) -> None:
        """Count the reduction of DeepSpeed's bucket, which copies it, and begin a bucket with ``new_bytes`` bytes."""
        self._meter.add_temporary_bytes(self._bucket_bytes, "temporary")
        self._bucket_bytes = new_bytes

    def _optimizer_bytes(self, parameter: Tensor) -> int:
        """Return the bytes of a parameter's optimizer state. DeepSpeed adds a float32 copy, even of float32 weights."""
        if not self._zero3:
            return self._state(parameter)
        return self._state(parameter.detach().float()) + 4 * parameter.numel()

    def _register_hooks(self, unit: _Unit) -> Iterator[RemovableHandle]:
        def before(module: nn.Module, args: Any) -> None:
            self._set_gathered(unit, True)
            if not unit.trained and args and torch.is_tensor(args[0]) and args[0].requires_grad:
                args[0].register_hook(on_backward_end)  # no gradient of a weight ends the backward of the unit

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if unit.stays_gathered or unit.is_in_backward:
                return
            self._set_gathered(unit, False)
            first = next((x for x in (output if isinstance(output, tuple) else (output,)) if torch.is_tensor(x)), None)
            if first is not None and first.requires_grad:
                first.register_hook(on_backward_begin)

        def on_backward_begin(grad: Tensor) -> None:
            unit.is_in_backward = unit.missing_gradients > 0 or not unit.trained
            if unit.is_in_backward:
                self._set_gathered(unit, True)

        def on_backward_end(grad: Tensor) -> None:
            unit.is_in_backward = False
            self._set_gathered(unit, False)

        yield unit.module.register_forward_pre_hook(before)
        yield unit.module.register_forward_hook(after)

    def _set_gathered(self, unit: _Unit, gathered: bool) -> None:
        if unit.is_gathered == gathered:
            return
        before, unit.is_gathered = self._bytes_of_gathered, gathered
        # FSDP gathers the next layer, of the same size, at the same time.
        size = unit.size if self._zero3 or unit.stays_gathered else 2 * unit.size
        self._gathered_bytes += size if gathered else -size
        self._meter.add_bytes(self._bytes_of_gathered - before, "unsharded")
        if gathered and not self._zero3:  # It frees the buffer of a gather, whose contents it copies, after the next.
            self._meter.add_temporary_bytes(self._buffer_bytes, "unsharded")
            self._buffer_bytes = unit.size if unit.stays_gathered else 0

    @property
    def _bytes_of_gathered(self) -> int:
        """Bytes of gathered weights, with ZeRO-3 including prefetched ones, up to the bytes of all divided weights."""
        return min(self._gathered_bytes + self._prefetched, self._sharded_bytes) if self._gathered_bytes else 0


def _units_of_fsdp(model: Any) -> list[_Unit]:
    """Return a unit for each layer that Transformers names, and one for the rest, which stays gathered."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [_Unit(m, list(m.parameters()), False) for m in model.modules() if type(m).__name__ in names]
    layer_parameters = {id(p) for layer in layers for p in layer.parameters}
    return [*layers, _Unit(model, [p for p in model.parameters() if id(p) not in layer_parameters], True)]


def _units_of_zero3(model: Any, divided: list[nn.Parameter]) -> list[_Unit]:
    """Return a unit for each module with parameters. The head and the last modules stay gathered until backward."""
    head = output_embedding(model)
    units, entries_after, remaining = [], 0, {id(p): p for p in divided}
    for module in reversed(list(model.modules())):
        parameters = [remaining.pop(id(p)) for p in module.parameters(recurse=False) if id(p) in remaining]
        if parameters:
            units.append(_Unit(module, parameters, module is head or 2 * entries_after < MAX_REUSE_DISTANCE))
            entries_after += sum(p.numel() for p in parameters)
    return units
