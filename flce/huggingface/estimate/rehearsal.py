"""Modes that measure the memory of a training step on the meta device. ``training_memory.py`` enters them.

The model's code, autograd and checkpointing run unchanged, forward and backward. So no formula for an architecture is
needed. A :class:`StepMeter` counts the bytes of each storage from its allocation until it is freed. Three things would
differ on a GPU, and this module corrects them: the choice of kernels (`CudaOperatorsMode`), the memory that kernels
allocate for themselves, and the plan of the fused loss.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from types import FrameType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from flce.core import private
from flce.ops import linear_cross_entropy
from flce.planning.plan import DescribedDevice

# Unsharded: gathered shards of other GPUs.
Category = Literal["weights", "unsharded", "gradients", "optimizer", "activations", "loss", "temporary"]
# CUDA's caching allocator rounds each allocation up to a multiple of this.
ALLOCATION_BYTES = 512
# Tensors that are computed from tokens and constants have values, because models read positions and padding masks.
# The limit (larger for long sequences) excludes attention masks, whose size is quadratic in the number of tokens.
MAX_VALUE_ENTRIES = 1 << 20

_aten = torch.ops.aten


class StepMeter(TorchDispatchMode):
    """A mode that counts the bytes of meta tensors by category, now and at the peak.

    ``autocast`` is the dtype to which autocast casts float32 operands, or None if autocast is off.
    """

    def __init__(self, device: DescribedDevice, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.device, self.autocast = device, autocast
        self.category: Category = "activations"  # of new storages
        self.current: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.peak_bytes = self._current_bytes = 0
        self._sizes: dict[int, tuple[int, Category]] = {}  # size and category of each storage, by its address
        self._values, self._max_value_entries = WeakIdKeyDictionary(), MAX_VALUE_ENTRIES

    # ------------------------------------------------------------------------------------------------- counting

    def track_storage(self, tensor: Tensor, category: Category | None = None, is_permanent: bool = False) -> None:
        """Count a tensor's storage until it is freed, or always if ``is_permanent``. A second call moves the storage to
        another category. ``None`` is the current category."""
        storage, category = tensor.untyped_storage(), category or self.category
        key = storage._cdata
        known = self._sizes.get(key)
        if known is not None:
            self.current[known[1]] -= known[0]
            self.current[category] += known[0]
            self._sizes[key] = known[0], category
            return
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self._sizes[key] = size, category
        self.add_bytes(size, category)
        if not is_permanent:
            weakref.finalize(storage, self._release, key).atexit = False

    def add_temporary_bytes(self, size: int, category: Category | None = None) -> None:
        """Count memory that an operation allocates in addition to its results, and frees."""
        self.add_bytes(size, category or self.category)
        self.add_bytes(-size, category or self.category)

    def add_bytes(self, size: int, category: Category) -> None:
        """Count memory without a tensor."""
        self.current[category] += size
        self._current_bytes += size
        if self._current_bytes > self.peak_bytes:
            self.peak_bytes, self.peak = self._current_bytes, self.current.copy()

    def _release(self, key: int) -> None:
        size, category = self._sizes.pop(key)
        self.add_bytes(-size, category)

    # ----------------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return self._read_value(args[0])
        if func is torch.ops.flce.linear_cross_entropy.default:
            return self._count_fused_loss(args)
        if func is torch.ops.flce.linear_cross_entropy_backward.default:
            return self._count_fused_backward(func, args)
        if func is _aten.embedding.default:
            self._check_embedding_indices(*args[:2])
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            raise RuntimeError(f"the shape of a result of {func} depends on values of activations") from error
        outputs = _tensors(result)
        if self._is_on_simulated_device(inputs):
            for tensor in outputs:
                if tensor.untyped_storage()._cdata not in self._sizes:
                    self.track_storage(tensor)
        if func is _aten._scaled_dot_product_flash_attention_backward.default:
            self.add_temporary_bytes(_flash_backward_scratch(*args), "temporary")
        self._propagate_values(func, args, kwargs, inputs, outputs)
        return result

    def _is_on_simulated_device(self, inputs: list[Tensor]) -> bool:
        """Return True if the result would be on the simulated device, unlike meta tensors for shapes of lazy logits."""
        if inputs:
            return any(t.untyped_storage()._cdata in self._sizes for t in inputs)
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not str(frame.f_globals.get("__name__")).startswith("flce.huggingface.lazy."):
            frame = frame.f_back
        return frame is None

    def _count_fused_loss(self, args: Any) -> Any:
        args = self._apply_autocast(args)
        result, plan = linear_cross_entropy.fake_outputs_and_plan(args, self.device)
        *_, gradients, _unit, _token_weights, _samples = result
        for tensor in _tensors(result):
            self.track_storage(tensor, "loss")
        for grad in gradients:
            if any(grad.shape == weight.shape for weight in args[1]):
                self.track_storage(grad, "gradients")
        # Upper bound: deferred plans allocate less in forward, but a plan has no separate figure for forward.
        self.add_temporary_bytes(plan.workspace_bytes, "loss")
        return result

    def _count_fused_backward(self, func: Any, args: Any) -> Any:
        args = (*args[:3], *self._apply_autocast(args[3:]))
        result = func(*args)
        for tensor in _tensors(result):
            self.track_storage(tensor, "loss")
        _, plan = linear_cross_entropy.fake_outputs_and_plan(args[3:], self.device)
        self.add_temporary_bytes(plan.workspace_bytes, "loss")
        return result

    def _apply_autocast(self, args: Any) -> Any:
        """Return the arguments of the loss with operands and weights cast as by autocast, and count the copies."""
        if self.autocast is None:
            return args
        operands, weights, *others = args
        cast = [[autocast_to(t, self.autocast) for t in tensors] for tensors in (operands, weights)]
        for copy, original in zip(_tensors(cast), _tensors((operands, weights)), strict=True):
            if copy is not original:
                self.track_storage(copy, "loss")
        return (*cast, *others)

    # --------------------------------------------------------------------------------------------------- values

    def set_value(self, tensor: Tensor, value: Tensor) -> None:
        """Store the values of a tensor, for the values of tensors that are computed from it."""
        self._values[tensor] = value
        self._max_value_entries = max(self._max_value_entries, 2 * value.numel())

    def _read_value(self, tensor: Tensor) -> Any:
        if tensor not in self._values:
            raise RuntimeError("the model's forward reads the value of an activation")
        return self._values[tensor].item()

    def _check_embedding_indices(self, table: Tensor, indices: Tensor) -> None:
        """Raise IndexError for rows that an embedding does not have. On a GPU the kernel would fail."""
        known = self._values.get(indices)
        if known is not None and known.numel() and int(known.max()) >= len(table):
            raise IndexError(f"the model reads row {int(known.max()):,} of an embedding with {len(table):,} rows")

    def _propagate_values(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if not any(tensor.is_meta for tensor in outputs):
            return
        is_determined = not (torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.__name__)
        if not is_determined or not all(t in self._values or not t.is_meta for t in inputs):
            self._forget_values([tensor for tensor in outputs if any(tensor is other for other in inputs)])
            return
        if any(t.numel() > self._max_value_entries for t in outputs):
            return
        args, kwargs = tree_map_only(Tensor, lambda t: self._values.get(t, t), (args, dict(kwargs)))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        for tensor, value in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
            self._values[tensor] = value

    def _forget_values(self, written: list[Tensor]) -> None:
        """Remove the values of tensors that unknown values were written to, and of their views."""
        storages = {tensor.untyped_storage()._cdata for tensor in written}
        if not storages:
            return
        for tensor in [known for known in self._values if known.untyped_storage()._cdata in storages]:
            del self._values[tensor]


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


# -------------------------------------------------------------------------------------------- differences on a GPU


def _flash_backward_scratch(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *_: Any
) -> int:
    """Return the bytes that flash attention allocates beside its results: a float32 sum of dQ, row sums, and dK and dV
    by query head if heads share keys. Other kernels allocate no more than a few MiB."""
    size = 4 * query.numel() + 2 * lse.nbytes
    if key.shape[1] != query.shape[1]:
        size += 2 * key.nbytes * (query.shape[1] // key.shape[1])
    return size


class CudaOperatorsMode(TorchFunctionMode):
    """A mode that calls the operators of CUDA tensors where PyTorch would call other operators for meta tensors.

    It casts operands as ``torch.autocast("cuda", autocast)`` does, which has no effect on meta tensors.
    """

    def __init__(self, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.autocast = autocast
        self._casts = WeakIdKeyDictionary()  # casts of weights, which autocast caches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.autocast is not None and func in _AUTOCAST_TO_HALF:
            args, kwargs = tree_map_only(Tensor, self._to_autocast_dtype, (args, kwargs))
        elif self.autocast is not None and func in _AUTOCAST_TO_FLOAT32:
            args, kwargs = tree_map_only(Tensor, lambda t: autocast_to(t, torch.float32), (args, kwargs))
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            # PyTorch would create meta tensors without values from lists of numbers.
            args = args[0], tuple(torch.tensor(item) if isinstance(item, list) else item for item in args[1])
        return func(*args, **kwargs)

    def _to_autocast_dtype(self, tensor: Tensor) -> Tensor:
        assert self.autocast is not None
        if tensor in self._casts:
            cast: Tensor = self._casts[tensor]
            return cast
        cast = autocast_to(tensor, self.autocast)
        if cast is not tensor and tensor.is_leaf and tensor.requires_grad:
            self._casts[tensor] = cast
        return cast


# Functions of autocast's lists that language models call, https://docs.pytorch.org/docs/stable/amp.html.
_AUTOCAST_TO_HALF = {
    *(F.linear, F.conv1d, F.conv2d, F.bilinear, F.scaled_dot_product_attention),
    *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum),
    *(Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__, Tensor.__rmatmul__),
}
_AUTOCAST_TO_HALF |= {f for f in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)) if f is not None}
_AUTOCAST_TO_FLOAT32 = {F.layer_norm, F.cross_entropy, F.nll_loss, torch.pow, Tensor.pow, torch.cumsum, Tensor.cumsum}


def autocast_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` in ``dtype``. Integers and float64 are not cast, as in autocast."""
    return tensor if not tensor.is_floating_point() or tensor.dtype == torch.float64 else tensor.to(dtype)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0 or inplace:
        return F.dropout(input, p, training, inplace)
    dropped: Tensor = _aten.native_dropout(input, p, True)[0]
    return dropped


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` as on a GPU: by flash attention in half precision without a mask, by the
    memory-efficient kernel with a mask or in float32, else by operators that store the probabilities in memory."""
    dims = query.shape[-1], key.shape[-1], value.shape[-1]
    if attn_mask is None and query.element_size() == 2 and len(set(dims)) == 1 and dims[0] <= 256:
        padded = [F.pad(t, (0, -dims[0] % 8)) if dims[0] % 8 else t for t in (query, key, value)]
        if scale is None:
            scale = dims[0] ** -0.5
        out = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
        return out[..., : dims[0]] if dims[0] % 8 else out
    if key.shape[1] == query.shape[1] and query.element_size() <= 4 and not (dims[0] % 4 or dims[2] % 4):
        if attn_mask is not None:
            # The kernel expects a floating mask.
            bias = torch.empty_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
            attn_mask = bias.expand(*query.shape[:3], key.shape[2])
        efficient = _aten._scaled_dot_product_efficient_attention
        out = efficient(query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
        return out
    with private.disable_torch_function():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
