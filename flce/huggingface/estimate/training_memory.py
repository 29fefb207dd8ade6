"""Memory of a training step on a GPU, and the longest sequence that fits, without a GPU. ``flce plan`` calls it.

`TrainingMemory` creates the model on the meta device from its config, and runs a step (`rehearsal.py`). The peak
equals ``torch.cuda.max_memory_allocated`` on a GPU: weights, gradients, the optimizer's state, activations, the loss,
and temporary tensors of backward.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flce.core.devices import UNKNOWN_DEVICE
from flce.core.options import ChunkOptions
from flce.huggingface.estimate.language_model import (
    Lora,
    add_adapters,
    format_in_one_line,
    make_model,
    max_positions,
    output_embedding,
    quantize_linear_layers,
    step_inputs,
)
from flce.huggingface.estimate.rehearsal import Category, CudaOperatorsMode, StepMeter
from flce.huggingface.patch import patch_model, report, unpatch_model
from flce.planning.plan import DescribedDevice
from flce.planning.search import BudgetError

# Memory that cuBLAS and cuBLASLt allocate at the first matrix product: 32 MiB each on Hopper. We measured it as the
# allocated memory between two steps, minus weights and buffers.
LIBRARY_BYTES = 64 << 20
# Device memory that is not available to tensors: the CUDA context with its kernels, and gaps between tensors.
CONTEXT_BYTES = 512 << 20
# The search for the longest sequence ends at a length that uses this fraction of the memory, or that is this fraction
# of a length that does not fit.
CLOSE_ENOUGH = 0.99
MAX_TOKENS = 1 << 26


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of an optimizer's state for a parameter, and number of copies of all parameters during its step."""

    state_bytes: Callable[[Tensor], int]
    copies: int = 0


def _adamw_8bit_state_bytes(parameter: Tensor) -> int:
    # bitsandbytes stores two 8-bit states with a float32 for every 256 entries, or two float32 states if few entries.
    n = parameter.numel()
    return 2 * (n + 4 * -(-n // 256)) if n >= 4096 else 8 * n


OPTIMIZERS = {
    "adamw": OptimizerMemory(lambda p: 2 * p.nbytes),
    "adamw-foreach": OptimizerMemory(lambda p: 2 * p.nbytes, copies=1),
    "adamw-8bit": OptimizerMemory(_adamw_8bit_state_bytes),
    "sgd": OptimizerMemory(lambda p: 0),
    "sgd-momentum": OptimizerMemory(lambda p: p.nbytes),
    "none": OptimizerMemory(lambda p: 0),
}


@dataclass(frozen=True)
class Training:
    """Options of a training step on one GPU, except the length of its sequences."""

    batch_size: int
    dtype: torch.dtype = torch.bfloat16
    autocast: torch.dtype | None = None
    """The dtype of matrix products under ``torch.autocast``, with weights in float32; None: autocast is off."""
    optimizer: str = "adamw"
    """A key of `OPTIMIZERS`."""
    accumulation: bool = False
    """True if gradients of earlier steps exist when a step begins."""
    options: ChunkOptions | None = None
    sharding: Sharding | None = None
    lora: Lora | None = None
    load_in_4bit: bool = False
    """True if the frozen linear layers except the head are stored in 4 bits. Needs `lora`."""


@dataclass(frozen=True)
class StepMemory:
    """The memory of one training step, in bytes."""

    peak_bytes: int
    """The peak of ``torch.cuda.memory_allocated``."""
    parts: dict[str, int] = field(hash=False)
    """The bytes at the peak, by category."""
    fused: bool
    """True if the loss was computed without the logits."""

    def fits(self, memory: int) -> bool:
        """Return True if the step fits on a device with ``memory`` bytes."""
        return self.peak_bytes <= memory - CONTEXT_BYTES


@dataclass(frozen=True)
class Variant:
    patched: bool
    checkpointing: bool

    def __str__(self) -> str:
        return f"{'patched' if self.patched else 'stock'}, {'with' if self.checkpointing else 'without'} checkpointing"


VARIANTS = tuple(Variant(patched, checkpointing) for checkpointing in (True, False) for patched in (False, True))


class StepError(RuntimeError):
    """A model cannot run a step, or needs values to run it."""


class TrainingMemory:
    """The memory of training steps of one model on a simulated GPU.

    Raises ValueError if `make_model` of `language_model.py` cannot create a model, and AdapterError if PEFT cannot add
    the adapters.
    """

    def __init__(self, config: Any, training: Training, device: DescribedDevice) -> None:
        self.training, self.device, self.config = training, device, config
        with _without_warnings():
            self.model: Any = make_model(config, training.dtype)
            self.num_parameters = sum(p.numel() for p in self.model.parameters())
            """Without adapters."""
            if training.load_in_4bit:
                quantize_linear_layers(self.model)
            if training.lora is not None:
                add_adapters(self.model, training.lora)
        if min(self.head_shape) < 1:
            vocab, hidden = self.head_shape
            raise ValueError(f"the head has V = {vocab} and H = {hidden}: expected positive numbers")
        self.positions = max_positions(config)
        self._step_cache: dict[tuple[int, Variant], StepMemory] = {}

    @property
    def variants(self) -> list[Variant]:
        """Variants in which the model can be trained."""
        has_checkpointing = getattr(self.model, "supports_gradient_checkpointing", False)
        return [variant for variant in VARIANTS if has_checkpointing or not variant.checkpointing]

    @property
    def head_shape(self) -> tuple[int, int]:
        """V and H of the output embedding, or of the config if the model has no output embedding."""
        head: Any = output_embedding(self.model)
        if head is None:
            text = self.config.get_text_config(decoder=True)
            return getattr(text, "vocab_size", 0), getattr(text, "hidden_size", getattr(text, "d_model", 0))
        return tuple(head.weight.shape)

    def step(self, length: int, variant: Variant) -> StepMemory:
        """Return the memory of a step of sequences of ``length`` tokens, or raise `StepError`."""
        key = length, variant
        if key not in self._step_cache:
            try:
                with _without_warnings(), self._apply_variant(variant):
                    self._step_cache[key] = self._rehearse(length)
            except Exception as error:  # the model's code may raise any exception
                kind, positions = type(self.model).__name__, self.positions
                if positions is not None and length > positions and not isinstance(error, BudgetError):
                    raise StepError(f"a {kind} has {positions:,} positions, and {length:,} do not fit") from error
                sizes = f"{self.training.batch_size} x {length:,} tokens"
                raise StepError(f"{kind} cannot run a step of {sizes}: {format_in_one_line(error)}") from error
        return self._step_cache[key]

    def find_longest(self, variant: Variant, memory: int, start: int = 4096) -> tuple[int, str | None]:
        """Return the length of the longest sequence that fits in ``memory`` bytes, or 0 if no length fits, and the
        reason why a longer sequence cannot run, or None if the memory is the reason.

        A line through the last two lengths and peaks predicts the next length to try, after ``start``. The result is a
        length that was tried and fits. It uses 99% of the memory, or 1% more tokens do not fit or cannot be run.
        """
        available = memory - CONTEXT_BYTES
        low, high = 0, MAX_TOKENS // self.training.batch_size + 1  # `low` fits, `high` does not
        tried: list[tuple[int, int]] = []
        length, obstacle = start, None
        while high - low > max(1, low // 100):
            length = min(max(length, low + 1), high - 1)
            try:
                peak = self.step(length, variant).peak_bytes
            except StepError as error:
                high, obstacle = length, f"{error}"
                likely = [n for n in (self.positions, (self.positions or 0) + 1) if n is not None and low < n < high]
                length = likely[0] if likely else (low + high) // 2
                continue
            tried.append((length, peak))
            low, high, obstacle = (length, high, obstacle) if peak <= available else (low, length, None)
            if low == length and peak >= CLOSE_ENOUGH * available:
                break
            length = _next_length(tried, low, high, available)
        return low, obstacle

    # ------------------------------------------------------------------------------------------------- one step

    @contextlib.contextmanager
    def _apply_variant(self, variant: Variant) -> Iterator[None]:
        model = self.model
        if variant.patched:
            patch_model(model, options=self.training.options, on_materialize="ignore")
        if variant.checkpointing:
            # Autograd runs backward without function modes, so the recomputation enters a separate one.
            arguments = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": self._checkpoint_contexts}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        try:
            yield
        finally:
            if variant.checkpointing:
                model.gradient_checkpointing_disable()
            unpatch_model(model)

    def _checkpoint_contexts(self) -> tuple[Any, Any]:
        """Return the contexts of the first pass of a checkpoint and of its recomputation."""

        @contextlib.contextmanager
        def recomputation() -> Iterator[None]:
            previous, self._meter.category = self._meter.category, "activations"
            try:  # PyTorch ends a recomputation early by an exception
                with CudaOperatorsMode(self.training.autocast):
                    yield
            finally:
                self._meter.category = previous

        return contextlib.nullcontext(), recomputation()

    def _rehearse(self, length: int) -> StepMemory:
        training, model = self.training, self.model
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = OPTIMIZERS[training.optimizer]
        meter = self._meter = StepMeter(self.device, training.autocast)
        handles: list[Any] = []
        self._shards: Shards | None = None
        if training.sharding is not None:
            self._shards = Shards(model, training.sharding, meter, optimizer.state_bytes, training.accumulation)
            handles += self._shards.handles
        else:
            meter.add_bytes(sum(map(optimizer.state_bytes, trained)), "optimizer")
        for tensor in (*model.parameters(), *model.buffers()):
            meter.track_storage(tensor, "weights", is_permanent=True)
        meter.add_bytes(LIBRARY_BYTES, "temporary")
        inputs, values = step_inputs(model, training.batch_size, length)
        for name, value in values.items():
            meter.track_storage(inputs[name], "activations")
            meter.set_value(inputs[name], value)
        if training.accumulation and self._shards is None:
            for p in trained:
                p.grad = torch.empty_like(p)
                meter.track_storage(p.grad, "gradients")
        handles += [p.register_post_accumulate_grad_hook(self._on_gradient) for p in trained]
        head = output_embedding(self.model)
        if head is not None:
            handles.append(head.register_forward_pre_hook(self._on_loss_begin))
        try:
            with meter:
                with CudaOperatorsMode(training.autocast):
                    loss = model(**inputs).loss
                # If no layer computes the logits, `_on_loss_begin` did not run.
                if meter.category == "activations":
                    meter.category = "temporary"
                torch.autograd.backward([loss])
            if self._shards is None:
                meter.add_temporary_bytes(optimizer.copies * sum(p.nbytes for p in trained), "optimizer")
            else:
                self._shards.step(optimizer.copies)
        finally:
            for handle in handles:
                handle.remove()
            model.zero_grad(set_to_none=True)
        parts = {category: meter.peak[category] for category in get_args(Category)}
        return StepMemory(meter.peak_bytes, parts, fused=report(model).fused > 0)

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._meter.track_storage(parameter.grad, "gradients")
            if self._shards is not None:
                self._shards.on_gradient(parameter)

    def _on_loss_begin(self, head: nn.Module, args: tuple[Any, ...]) -> None:
        """Count new storages as loss: from the call of the head until backward has computed its input's gradient."""
        self._meter.category = "loss"

        def on_loss_end(grad: Tensor) -> None:
            self._meter.category = "temporary"

        if args and args[0].requires_grad:
            args[0].register_hook(on_loss_end)


def _next_length(tried: list[tuple[int, int]], low: int, high: int, available: int) -> int:
    """Return the next length to try, between ``low``, which fits, and ``high``, which does not."""
    length, peak = tried[-1]
    if len(tried) == 1:
        return length * 2 if low == length else length // 2
    before, peak_before = tried[-2]
    slope = (peak - peak_before) / (length - before)
    guess = int(length + ((1 + CLOSE_ENOUGH) / 2 * available - peak) / slope) if slope > 0 else 0
    if low == 0 and guess < 1:
        return 1  # the memory that does not depend on the length seems to be too much
    guess = min(guess, 64 * low) if low else guess  # extrapolation from two short lengths is inaccurate
    if not low < guess < high:
        guess = (low + high) // 2
    return guess // 64 * 64 if guess // 64 * 64 > low else guess


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Return a context without warnings: those of libraries about meta tensors do not concern the user's model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def stock_loss_bytes(num_tokens: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, weight_grad: bool) -> int:
    """Return the bytes of Transformers' stock loss beyond its inputs and the gradients of hidden states and head.

    At the peak these are logits in ``dtype`` and in float32, their log-softmax, and gradients of these tensors.
    """
    meter = StepMeter(DescribedDevice("torch", False, UNKNOWN_DEVICE))

    def meta_matrix(num_rows: int, requires_grad: bool) -> Tensor:
        return torch.empty(num_rows, hidden_size, dtype=dtype, device="meta", requires_grad=requires_grad)

    hidden, weight = meta_matrix(num_tokens, True), meta_matrix(vocab_size, weight_grad)
    target = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    for tensor in (hidden, weight, target):
        meter.track_storage(tensor, "weights", is_permanent=True)
    input_bytes = meter.peak_bytes
    with meter:
        F.cross_entropy(F.linear(hidden, weight).float(), target).backward()
    grad_bytes = sum(t.grad.nbytes for t in (hidden, weight) if t.grad is not None)
    return max(0, meter.peak_bytes - input_bytes - grad_bytes)


# ------------------------------------------------------------------------------------------------ several GPUs

# Each GPU stores a share of the weights, of the gradients and of the optimizer's state. The weights of a unit are
# gathered while the unit runs, forward and backward, and the weights of the next unit are gathered at the same time.
# The gradients of a unit are full until the last of them is computed. Then they are summed over the GPUs, and each GPU
# stores its share.
#
# Sources: DeepSpeed 0.19, ``deepspeed/runtime/zero``: ``partitioned_param_coordinator.py`` and ``stage3.py``, with the
# defaults of ``config.py``; PyTorch 2.13, ``torch/distributed/fsdp/_fully_shard``; the wrapping policy of Accelerate.

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
