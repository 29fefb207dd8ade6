"""Logits that have not been computed: the head's inputs, and what has been done to the logits since.

A :class:`LazyLogits` stands where ``hidden @ weight.T + bias`` would. It goes through what model code does
between the head and the loss (casts, scalar factors, tanh, reshapes, slices), becomes the fused loss at
``torch.nn.functional.cross_entropy``, and turns into real logits, once and with a warning, under anything
else.

Two classes carry the same state, because no single kind of object serves both eager mode and the compiler:

* :class:`LazyLogits`, in eager mode, is a tensor without storage (a wrapper subclass). So ``isinstance(x,
  torch.Tensor)`` holds for trainers and ``ModelOutput``. An object that only *claims* to be a tensor
  through ``__class__`` would be cast to one by C++ code that skips ``__torch_function__``
  (``autograd.Function.apply``, DDP, collectives) and crash. Ours has a ``grad_fn`` that leads to the hidden
  states and the head, and a ``__torch_dispatch__``, so such code gets right values and right gradients too.
* :class:`TracedLazyLogits`, under ``torch.compile``, is a plain Python object with ``__torch_function__``:
  the compiler cannot build a wrapper subclass within a graph, but follows plain objects with
  ``fullgraph=True``.

Layers of this module, each knowing only those above it: the elementwise normal form (:func:`fold`); the
immutable :class:`LazyState` with the arithmetic; the table of operations that keep the state lazy; the two
classes.
"""

from __future__ import annotations

import copy
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.functional import fused_linear_cross_entropy

# One recorded operation: ("mul" | "div", number), ("tanh", None), ("to", dtype) or ("log_softmax", None), over
# the vocabulary.
Op = tuple[str, Any]


class MaterializedLogitsWarning(UserWarning):
    """An operation that has no lazy form has made the full logits."""


# ---------------------------------------------------------------------------------- elementwise normal form


def fold(ops: tuple[Op, ...]) -> tuple[float, float | None] | None:
    """Bring elementwise operations into the operator's form, ``softcap * tanh(logit_scale * x / softcap)``.

    Casts are skipped: the operator computes in float32 (or float64) whatever the model rounds to. So is a
    log-softmax with nothing but casts and more of them behind it, which the loss does not notice.

    Returns:
        ``(logit_scale, softcap)``, with ``softcap`` None where there is no tanh; None where the operations
        do not fit (two tanh, a factor that is not finite or behind a log-softmax).
    """
    inner, outer = 1.0, None  # outer * tanh(inner * x), or inner * x while outer is None
    normalised = False
    for name, value in ops:
        if name == "log_softmax":
            normalised = True
        elif normalised and name != "to":
            return None
        elif name == "tanh":
            if outer is not None:
                return None
            outer = 1.0
        elif name != "to":
            if name == "div" and value == 0:
                return None
            factor = float(value) if name == "mul" else 1.0 / float(value)
            if outer is None:
                inner *= factor
            else:
                outer *= factor
    if not math.isfinite(inner) or (outer is not None and not math.isfinite(outer)):
        return None
    if outer is None:
        return _snap(inner), None
    if outer == 0.0:
        return 0.0, None
    # |outer| is the softcap, whose division of the argument is undone; tanh is odd, so a sign can go inside.
    return _snap(inner * outer), abs(outer)


def _snap(scale: float) -> float:
    """``x / c * c`` multiplies by 1 up to a rounding error; let the operator see that there is no scale."""
    return 1.0 if abs(scale - 1.0) < 1e-14 else scale


# ---------------------------------------------------------------------------------------------------- state


@dataclass(frozen=True)
class LazyState:
    """What the logits would be computed from.

    Attributes:
        hidden: the logits' shape, with the hidden size H in place of the vocabulary V. Everything that
            happens to the token dimensions of the logits happens to this tensor.
        weight: ``(V, H)``.
        bias: ``(V,)`` or None.
        class_dim: which dimension of the logits is the vocabulary.
        ops: elementwise operations since the head, in order, so that materialised logits are bit for bit
            the model's. Always such that :func:`fold` accepts them.
        head_dtype: dtype of the head's output.
        autocast_dtype: what the head ran under, None for no autocast.
        device: where the logits are wanted.
        versions: in-place versions of the three tensors at the head, None where they cannot be had.
        options: ``ChunkOptions`` for the fused loss.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    class_dim: int
    ops: tuple[Op, ...]
    head_dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    device: torch.device
    versions: tuple[int, ...] | None = None
    options: Any = None

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.hidden.shape)
        sizes[self.class_dim] = self.weight.shape[0]
        return torch.Size(sizes)

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    @property
    def vocab_last(self) -> bool:
        return self.class_dim == self.hidden.dim() - 1

    @property
    def dtype(self) -> torch.dtype:
        for name, value in reversed(self.ops):
            if name == "to":
                return value
        return self.head_dtype

    @property
    def normalised(self) -> bool:
        """Whether these are log-probabilities."""
        return any(name == "log_softmax" for name, _ in self.ops)

    @property
    def requires_grad(self) -> bool:
        bias = self.bias is not None and self.bias.requires_grad
        return self.hidden.requires_grad or self.weight.requires_grad or bias

    def with_op(self, name: str, value: Any = None) -> LazyState | None:
        """The state after one more elementwise operation, None if that has no lazy form."""
        ops = (*self.ops, (name, value))
        return None if fold(ops) is None else replace(self, ops=ops)

    def detach(self) -> LazyState:
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)

    def logits(self) -> Tensor:
        """Compute the logits as the model would have, with the same roundings."""
        self._check_unchanged()
        # What the logits depend on was decided when the head ran, not by the grad mode of whoever reads
        # them first.
        with torch.set_grad_enabled(self.requires_grad):
            hidden = self.hidden if self.vocab_last else self.hidden.movedim(self.class_dim, -1)
            z = self._in_head_autocast(F.linear, hidden, self.weight, self.bias)
            for name, value in self.ops:
                if name == "mul":
                    z = z * value
                elif name == "div":
                    z = z / value
                elif name == "tanh":
                    z = torch.tanh(z)
                elif name == "log_softmax":
                    z = torch.log_softmax(z, -1)
                else:
                    z = z.to(value)
            return (z if self.vocab_last else z.movedim(-1, self.class_dim)).to(self.device)

    def cross_entropy(self, target: Tensor, weight: Tensor | None, **spec: Any) -> Tensor:
        """The loss without the logits. ``target``: class indices, or probabilities with the classes last."""
        self._check_unchanged()
        folded = fold(self.ops)
        if folded is None:
            raise AssertionError("lazy logits hold operations without a normal form")
        logit_scale, softcap = folded
        home = self.hidden.device
        loss = self._in_head_autocast(
            fused_linear_cross_entropy,
            self.hidden.movedim(self.class_dim, -1),
            self.weight,
            target.to(home),
            linear_bias=self.bias,
            weight=None if weight is None else weight.to(home),
            logit_scale=logit_scale,
            softcap=softcap,
            options=self.options,
            **spec,
        )
        # Autocast would have run stock's cross-entropy in float32; without it the loss has the logits' dtype.
        under_autocast = torch.is_autocast_enabled(self.device.type) and self.dtype != torch.float64
        return loss.to(self.device, torch.float32 if under_autocast else self.dtype)

    def _in_head_autocast(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call with the autocast state the head was called with, which may have been left since."""
        kind = self.hidden.device.type
        now = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if now == self.autocast_dtype:
            return function(*args, **kwargs)
        enabled = self.autocast_dtype is not None
        with torch.autocast(kind, dtype=self.autocast_dtype if enabled else now, enabled=enabled):
            return function(*args, **kwargs)

    def _check_unchanged(self) -> None:
        if self.versions is not None and self.versions != _versions(self.hidden, self.weight, self.bias):
            raise RuntimeError(
                "these lazy logits can no longer be computed: the hidden states or the output embedding were "
                "modified in place since the model ran (an optimizer step?). Before that, call "
                "outputs.logits.materialize()."
            )


def head_state(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: Any = None) -> LazyState:
    """The state of ``F.linear(hidden, weight, bias)``, called now.

    Args:
        hidden: ``(..., H)``, floating.
        weight: ``(V, H)``.
        bias: ``(V,)`` or None.
        options: ``ChunkOptions`` for the fused loss.
    """
    kind = hidden.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    # Autocast leaves float64 alone.
    head_dtype = hidden.dtype if autocast is None or hidden.dtype == torch.float64 else autocast
    versions = None if torch.compiler.is_compiling() else _versions(hidden, weight, bias)
    return LazyState(hidden, weight, bias, hidden.dim() - 1, (), head_dtype, autocast, hidden.device, versions, options)


def _versions(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, ...] | None:
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    if any(t.is_inference() for t in tensors):
        return None  # inference tensors do not count their changes
    return tuple(t._version for t in tensors)


def _hidden_changed(state: LazyState, hidden: Tensor, class_dim: int | None = None) -> LazyState:
    """The state after an operation on the token dimensions, which made ``hidden`` of the hidden states."""
    class_dim = state.class_dim if class_dim is None else class_dim
    versions = state.versions
    if versions is not None and hidden.is_inference():
        versions = None
    elif versions is not None:
        # A view shares the counter of what it views; a copy counts from zero. Keep a change that came before.
        versions = (versions[0] + hidden._version - state.hidden._version, *versions[1:])
    return replace(state, hidden=hidden, class_dim=class_dim, versions=versions)


# ----------------------------------------------------------------------------- operations that keep it lazy
#
# Each takes the state and the operation's own arguments, and returns the new state, a tuple of states, a
# finished result, or NotImplemented, which asks for real logits. They run under the compiler as well, hence
# the plain code.


def _scale(name: str) -> Callable[..., Any]:
    def handler(state: LazyState, other: Any) -> Any:
        if isinstance(other, Tensor):
            return _scale_by_tensor(state, name, other)
        if isinstance(other, bool) or not isinstance(other, (int, float)):
            return NotImplemented
        return _or_real(state.with_op(name, other))

    return handler


def _scale_by_tensor(state: LazyState, name: str, other: Tensor) -> Any:
    """A 0-d factor goes onto the head's inputs: reading it synchronises, and it may need a gradient."""
    if is_lazy(other) or other.dim() != 0 or not other.is_floating_point():
        return NotImplemented
    if any(op in ("tanh", "log_softmax") for op, _ in state.ops):
        return NotImplemented
    scale = torch.mul if name == "mul" else torch.div
    scaled = _hidden_changed(state, scale(state.hidden, other))
    if state.bias is None:
        return scaled
    # The new bias is ours alone; nobody can change it in place.
    return replace(scaled, bias=scale(state.bias, other), versions=None)


def _shift(sign: int) -> Callable[..., Any]:
    def handler(state: LazyState, other: Any) -> Any:
        """A tensor that is the same for every token becomes part of the bias."""
        if is_lazy(other) or not isinstance(other, Tensor) or not other.is_floating_point():
            return NotImplemented
        vocab = state.weight.shape[0]
        if not state.vocab_last or not 0 < other.dim() <= state.ndim or other.numel() != vocab:
            return NotImplemented
        if other.shape[-1] != vocab or other.device != state.device or other.device != state.hidden.device:
            return NotImplemented
        factor, softcap = fold(state.ops) or (0.0, None)
        if state.normalised or softcap is not None or factor == 0.0:
            return NotImplemented
        added = other.reshape(vocab).to(state.weight.dtype) / (sign * factor)
        bias = added if state.bias is None else state.bias + added
        # The new bias is ours alone; nobody can change it in place.
        versions = None if state.versions is None or bias.is_inference() else (*state.versions[:2], bias._version)
        dtype = torch.promote_types(state.dtype, other.dtype)
        return _to_dtype(replace(state, bias=bias, versions=versions), dtype)

    return handler


def _log_softmax(
    state: LazyState, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    if dim is None or _dim(state, dim) != state.class_dim:
        return NotImplemented
    kind = state.device.type
    if dtype is None and kind != "cpu" and torch.is_autocast_enabled(kind) and state.dtype != torch.float64:
        dtype = torch.float32  # as autocast has it, but on the CPU
    state = state if dtype is None else _to_dtype(state, dtype)
    return state if state is NotImplemented else _or_real(state.with_op("log_softmax"))


def _or_real(state: LazyState | None) -> Any:
    return NotImplemented if state is None else state


def _tanh(state: LazyState) -> Any:
    return _or_real(state.with_op("tanh"))


def _neg(state: LazyState) -> Any:
    return _or_real(state.with_op("mul", -1))


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    def handler(state: LazyState) -> Any:
        return _to_dtype(state, dtype)

    return handler


def _to_dtype(state: LazyState, dtype: torch.dtype) -> Any:
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return NotImplemented
    return state if dtype == state.dtype else _or_real(state.with_op("to", dtype))


def _to(
    state: LazyState,
    *args: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    other: Tensor | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Any:
    if memory_format != torch.preserve_format:
        return NotImplemented
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, Tensor):
            other = arg
        elif isinstance(arg, (torch.device, str)) or (isinstance(arg, int) and not isinstance(arg, bool)):
            device = arg
    if other is not None:
        dtype, device = other.dtype, other.device
    if device is not None:
        state = _to_device(state, torch.device(device))
    if copy:
        state = replace(state)
    return state if dtype is None else _to_dtype(state, dtype)


def _to_device(state: LazyState, device: torch.device) -> LazyState:
    if device.type == state.device.type and device.index is None:
        return state
    return state if device == state.device else replace(state, device=device)


def _type_as(state: LazyState, other: Tensor) -> Any:
    return _to(state, other.dtype, device=other.device)


def _type(state: LazyState, dtype: Any) -> Any:
    return _to_dtype(state, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


def _contiguous(state: LazyState, *, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    return state if memory_format == torch.contiguous_format else NotImplemented


def _clone(state: LazyState, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return replace(state)


def _detach(state: LazyState) -> LazyState:
    return state.detach()


def _reshape(state: LazyState, *shape: Any) -> Any:
    """``view`` and ``reshape`` of the token dimensions; the vocabulary stays last."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    if not shape or not state.vocab_last or not all(isinstance(size, int) for size in shape):
        return NotImplemented
    vocab = state.weight.shape[0]
    if shape[-1] == -1:
        rows, known = math.prod(state.shape[:-1]), math.prod(shape[:-1])
        if any(size == -1 for size in shape[:-1]) or known != rows:
            return NotImplemented
    elif shape[-1] != vocab:
        return NotImplemented
    return _hidden_changed(state, state.hidden.reshape(*shape[:-1], state.hidden.shape[-1]), len(shape) - 1)


def _flatten(state: LazyState, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = _dim(state, start_dim), _dim(state, end_dim)
    if not state.vocab_last or end >= state.class_dim or start > end:
        return NotImplemented
    hidden = state.hidden.flatten(start, end)
    return _hidden_changed(state, hidden, hidden.dim() - 1)


def _transpose(state: LazyState, dim0: int, dim1: int) -> LazyState:
    order = list(range(state.ndim))
    a, b = _dim(state, dim0), _dim(state, dim1)
    order[a], order[b] = order[b], order[a]
    return _permute(state, *order)


def _permute(state: LazyState, *dims: Any) -> LazyState:
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    order = [_dim(state, dim) for dim in dims]
    return _hidden_changed(state, state.hidden.permute(order), order.index(state.class_dim))


def _movedim(state: LazyState, source: Any, destination: Any) -> Any:
    if not isinstance(source, int) or not isinstance(destination, int):
        return NotImplemented
    order = list(range(state.ndim))
    moved = order.pop(_dim(state, source))
    order.insert(_dim(state, destination), moved)
    return _permute(state, *order)


def _unsqueeze(state: LazyState, dim: int) -> LazyState:
    at = dim if dim >= 0 else dim + state.ndim + 1
    return _hidden_changed(state, state.hidden.unsqueeze(dim), state.class_dim + (at <= state.class_dim))


def _squeeze(state: LazyState, dim: Any = None) -> Any:
    if not isinstance(dim, int) or _dim(state, dim) == state.class_dim:
        return NotImplemented
    hidden = state.hidden.squeeze(dim)
    gone = hidden.dim() < state.ndim and _dim(state, dim) < state.class_dim
    return _hidden_changed(state, hidden, state.class_dim - gone)


def _getitem(state: LazyState, index: Any) -> Any:
    """Index tokens as the logits would be indexed; a slice of the vocabulary slices the head instead."""
    items = _expand_index(state, index)
    if items is None:
        return NotImplemented
    kept, class_item, advanced, at, class_dim = 0, slice(None), False, 0, -1
    for place, item in enumerate(items):
        if isinstance(item, Tensor):
            advanced = True
            at += item.dim() if item.dtype == torch.bool else 1
        elif item is None:
            kept += 1
        else:
            if at == state.class_dim:
                if not isinstance(item, slice):
                    return NotImplemented
                class_item, items[place], class_dim = item, slice(None), kept
            at += 1
            kept += isinstance(item, slice)
    if class_dim < 0 or (advanced and not state.vocab_last):
        return NotImplemented
    if class_item != slice(None):
        if state.normalised:
            return NotImplemented  # over the whole vocabulary
        narrowed = replace(
            state,
            weight=state.weight[class_item],
            bias=None if state.bias is None else state.bias[class_item],
        )
        if narrowed.weight.shape[0] == 0:
            return NotImplemented
        state = narrowed
    hidden = state.hidden[tuple(items)]
    return _hidden_changed(state, hidden, hidden.dim() - 1 if advanced else class_dim)


def _expand_index(state: LazyState, index: Any) -> list[Any] | None:
    """The index as one item per dimension (new axes and masks apart), None if we do not follow an item."""
    items = list(index) if isinstance(index, tuple) else [index]
    consumed, ellipsis_at = 0, None
    for place, item in enumerate(items):
        if item is Ellipsis:
            if ellipsis_at is not None:
                return None
            ellipsis_at = place
        elif isinstance(item, Tensor):
            if is_lazy(item) or (item.dtype == torch.bool and item.dim() == 0):
                return None
            consumed += item.dim() if item.dtype == torch.bool else 1
        elif isinstance(item, slice) or (isinstance(item, int) and not isinstance(item, bool)):
            consumed += 1
        elif item is not None:
            return None
    missing = state.ndim - consumed
    if missing < 0:
        return None
    if ellipsis_at is None:
        return items + [slice(None)] * missing
    return items[:ellipsis_at] + [slice(None)] * missing + items[ellipsis_at + 1 :]


def _select(state: LazyState, dim: int, index: int) -> Any:
    return _getitem(state, (*[slice(None)] * _dim(state, dim), index))


def _narrow(state: LazyState, dim: int, start: int, length: int) -> Any:
    if not isinstance(start, int) or start < 0:
        return NotImplemented
    return _getitem(state, (*[slice(None)] * _dim(state, dim), slice(start, start + length)))


def _index_select(state: LazyState, dim: int, index: Tensor) -> Any:
    if _dim(state, dim) == state.class_dim:
        return NotImplemented
    return _hidden_changed(state, state.hidden.index_select(dim, index))


def _unbind(state: LazyState, dim: int = 0) -> Any:
    if _dim(state, dim) == state.class_dim:
        return NotImplemented
    return tuple(_select(state, dim, i) for i in range(state.shape[_dim(state, dim)]))


def _split(state: LazyState, split_size_or_sections: Any, dim: int = 0) -> Any:
    if _dim(state, dim) == state.class_dim:
        return NotImplemented
    return tuple(_hidden_changed(state, part) for part in state.hidden.split(split_size_or_sections, dim))


def _chunk(state: LazyState, chunks: int, dim: int = 0) -> Any:
    if _dim(state, dim) == state.class_dim:
        return NotImplemented
    return tuple(_hidden_changed(state, part) for part in state.hidden.chunk(chunks, dim))


def _dim(state: LazyState, dim: int) -> int:
    if not -state.ndim <= dim < state.ndim:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-state.ndim}, {state.ndim - 1}], but got {dim})"
        )
    return dim % state.ndim


def _cross_entropy(
    state: LazyState,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``torch.nn.functional.cross_entropy``. What stock would reject goes to stock, for stock's own error."""
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    if is_lazy(target) or not isinstance(target, Tensor) or state.class_dim != min(1, state.ndim - 1):
        return NotImplemented
    if target.device != state.device or (weight is not None and weight.device != state.device):
        return NotImplemented
    if target.is_floating_point():
        if target.shape != state.shape:
            return NotImplemented
        target = target.movedim(state.class_dim, -1)
    else:
        sizes = list(state.shape)
        del sizes[state.class_dim]
        if target.dtype != torch.int64 or list(target.shape) != sizes:
            return NotImplemented
    return state.cross_entropy(
        target, weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )


def _nll_loss(
    state: LazyState,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """``torch.nn.functional.nll_loss`` of log-probabilities."""
    if not state.normalised or not isinstance(target, Tensor) or target.is_floating_point():
        return NotImplemented
    return _cross_entropy(state, target, weight, size_average, ignore_index, reduce, reduction)


# Operations whose results share memory with their input, so that a later in-place write shows in both.
_VIEWS: dict[str, Callable[..., Any]] = {
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "swapdims": _transpose,
    "permute": _permute,
    "movedim": _movedim,
    "moveaxis": _movedim,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "__getitem__": _getitem,
    "select": _select,
    "narrow": _narrow,
    "unbind": _unbind,
    "split": _split,
    "chunk": _chunk,
    "detach": _detach,
    "data": _detach,
}

_LOSSES: dict[str, Callable[..., Any]] = {"cross_entropy": _cross_entropy, "nll_loss": _nll_loss}

_LAZY: dict[str, Callable[..., Any]] = {
    **_VIEWS,
    "mul": _scale("mul"),
    "multiply": _scale("mul"),
    "__mul__": _scale("mul"),
    "__rmul__": _scale("mul"),
    "div": _scale("div"),
    "divide": _scale("div"),
    "true_divide": _scale("div"),
    "__truediv__": _scale("div"),
    "add": _shift(1),
    "__add__": _shift(1),
    "__radd__": _shift(1),
    "sub": _shift(-1),
    "subtract": _shift(-1),
    "__sub__": _shift(-1),
    "tanh": _tanh,
    "log_softmax": _log_softmax,
    "neg": _neg,
    "negative": _neg,
    "__neg__": _neg,
    "float": _cast(torch.float32),
    "double": _cast(torch.float64),
    "half": _cast(torch.float16),
    "bfloat16": _cast(torch.bfloat16),
    "to": _to,
    "type": _type,
    "type_as": _type_as,
    "contiguous": _contiguous,
    "clone": _clone,
    "index_select": _index_select,
    **_LOSSES,
}

# Answered by the wrapper itself, which knows its shape, dtype, device and place in the graph.
_METADATA = frozenset(
    """
    shape dtype device layout ndim requires_grad is_leaf grad_fn grad output_nr names itemsize nbytes
    is_cpu is_cuda is_mps is_xpu is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_xla
    is_ipu is_maia is_vulkan size dim ndimension numel nelement stride storage_offset is_contiguous
    element_size is_floating_point is_complex is_signed is_inference get_device __len__ __hash__ _version
    is_same_size is_conj is_neg is_shared _base _is_view retains_grad
    """.split()  # noqa: SIM905
)
# Make a new tensor of their first argument's shape, dtype or device, without reading it.
_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
_NEW = {"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"}
# Read no more than the shape, dtype or device of their second argument.
_AS = {"to", "type_as", "view_as", "expand_as", "reshape_as"}
_COMMUTES = {"mul", "multiply", "__mul__", "add", "__add__"}
# Begin as in-place operators do.
_NOT_IN_PLACE = {"__int__", "__index__", "__iter__", "__invert__"}


# -------------------------------------------------------------------------------------------------- classes


class LazyBase:
    """What both kinds of lazy logits share: the state, the real logits once they exist, and their views.

    Stock logits and their views share memory, so an in-place write to one shows in all. Lazy ones remember
    where they came from: the first write makes the root of the family real, the others views of that.
    """

    _state: LazyState
    _real: Tensor | None
    # Where a view came from: its parent, and how to repeat the view on the parent's real logits.
    _source: tuple[LazyBase, Callable[[Tensor], Tensor]] | None
    _written: bool  # on the root of a family of views: written to in place
    _follows_source: bool  # on a view: `_real` is a view of the parent's real logits

    def _init(self, state: LazyState, source: tuple[LazyBase, Callable[[Tensor], Tensor]] | None) -> None:
        self._state, self._source = state, source
        self._real, self._written, self._follows_source = None, False, False

    def materialize(self) -> Tensor:
        """Compute the real logits, or return them if they have been computed before. No warning is given.

        Returns:
            An ordinary tensor of this object's shape, dtype and device, connected to the hidden states and
            the head in the autograd graph as stock logits are.

        Raises:
            RuntimeError: the hidden states or the head were modified in place since the model ran.
        """
        real = self._existing()
        if real is None:
            real = self._state.logits()
            self._real = real
        return real

    @property
    def is_materialized(self) -> bool:
        """Whether the real logits exist."""
        return self._existing() is not None

    def _existing(self) -> Tensor | None:
        if self._source is not None and not self._follows_source and self._root()._written:
            parent, repeat = self._source
            self._real, self._follows_source = repeat(parent.materialize()), True
        return self._real

    def _root(self) -> LazyBase:
        root: LazyBase = self
        while root._source is not None:
            root = root._source[0]
        return root

    def _prepare_write(self, func: Any) -> None:
        """Before an in-place operation: from now on this family's real logits share memory."""
        root = self._root()
        if root._existing() is None:
            _warn_materialized(func)
        root.materialize()
        root._written = True

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        state = self._state
        return f"LazyLogits(shape={tuple(state.shape)}, dtype={state.dtype}, device='{state.device}')"


def is_lazy(value: Any) -> bool:
    """Whether ``value`` is lazy logits of either kind."""
    return isinstance(value, LazyBase)


class LazyLogits(LazyBase, torch.Tensor):  # type: ignore[misc]
    """Lazy logits in eager mode: a tensor without storage. Made by a patched output embedding."""

    @staticmethod
    def _wrap(state: LazyState, source: Any = None) -> LazyLogits:
        lazy: LazyLogits = _LazyHead.apply(state, state.hidden, state.weight, state.bias)
        lazy._source = source
        return lazy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, _name(func), args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # C++ code that does not ask __torch_function__. Gradients are recorded above this level.
        return func(*_realise(args, func, detach=True), **_realise(kwargs or {}, func, detach=True))


class _LazyHead(torch.autograd.Function):
    """A :class:`LazyLogits`'s place in the autograd graph, for code that skips ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, state: LazyState, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.state = state
        lazy: LazyLogits = torch.Tensor._make_wrapper_subclass(
            LazyLogits, state.shape, dtype=state.dtype, device=state.device
        )
        lazy._init(state, None)
        return lazy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        state, wanted = ctx.state, ctx.needs_input_grad[1:]
        leaves = [
            t if t is None else t.detach().requires_grad_(need)
            for t, need in zip((state.hidden, state.weight, state.bias), wanted, strict=True)
        ]
        logits = replace(state, hidden=leaves[0], weight=leaves[1], bias=leaves[2]).logits()
        inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        grads = iter(torch.autograd.grad(logits, inputs, grad))
        return None, *(next(grads) if need else None for need in wanted)


class TracedLazyLogits(LazyBase):
    """Lazy logits under ``torch.compile``: a plain object, which the compiler can make and follow.

    It is not a ``torch.Tensor``; where a compiled model returns it, call :meth:`materialize` or use it in
    any torch function.
    """

    @staticmethod
    def _wrap(state: LazyState, source: Any = None) -> TracedLazyLogits:
        lazy = TracedLazyLogits()
        lazy._init(state, source)
        return lazy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, _name(func), args, kwargs or {})

    @property
    def shape(self) -> torch.Size:
        return self._state.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._state.dtype

    @property
    def device(self) -> torch.device:
        return self._state.device

    @property
    def ndim(self) -> int:
        return self._state.ndim

    @property
    def requires_grad(self) -> bool:
        return self._state.requires_grad

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._state.ndim

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.materialize(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        # Only what the class does not define gets here.
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"lazy logits have no attribute {name!r}")
        member = getattr(torch.Tensor, name)
        if callable(member):
            return lambda *args, **kwargs: _dispatch(member, name, (self, *args), kwargs)
        return getattr(_realise(self, member), name)


def _define_methods() -> None:
    """Give the plain class the lazy operations, and the operators, which Python looks up on classes."""

    def method(name: str, member: Any) -> Callable[..., Any]:
        def call(self: TracedLazyLogits, *args: Any, **kwargs: Any) -> Any:
            return _dispatch(member, name, (self, *args), kwargs)

        call.__name__ = name
        return call

    operators = """
        add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv mod pow rpow matmul
        rmatmul neg abs eq ne lt le gt ge getitem setitem float int bool array
    """.split()  # noqa: SIM905
    for name in [f"__{op}__" for op in operators] + [n for n in _LAZY if n != "data" and n not in _LOSSES]:
        if hasattr(torch.Tensor, name) and name not in TracedLazyLogits.__dict__:
            setattr(TracedLazyLogits, name, method(name, getattr(torch.Tensor, name)))
    TracedLazyLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def make_lazy(state: LazyState, source: Any = None) -> LazyLogits | TracedLazyLogits:
    """Wrap a state in the class that fits: plain under the compiler, a tensor otherwise."""
    if not torch.is_grad_enabled():
        state = state.detach()
    if torch.compiler.is_compiling():
        return TracedLazyLogits._wrap(state, source)
    return LazyLogits._wrap(state, source)


# ------------------------------------------------------------------------------------------------- dispatch


def _dispatch(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation with lazy logits among its arguments."""
    if not args and is_lazy(kwargs.get("input")):
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    if name in _COMMUTES and len(args) == 2 and not kwargs and not is_lazy(args[0]):
        args = (args[1], args[0])
    if args and is_lazy(args[0]) and args[0]._existing() is None:
        lazy = args[0]
        if name in _METADATA and isinstance(lazy, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "__repr__":
            return LazyBase.__repr__(lazy)
        if name == "__iter__":
            return iter(torch.unbind(lazy))
        if name in _LAZY:
            result = _run_lazily(lazy, func, name, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        elif _writes(name):
            lazy._prepare_write(func)
    if name in _LIKE:
        return func(*_stand_ins(args), **{"memory_format": torch.contiguous_format, **kwargs})
    if name in _NEW:
        return func(*_stand_ins(args[:1]), *args[1:], **kwargs)
    if name in _AS and not is_lazy(args[0]):
        return func(args[0], *_stand_ins(args[1:]), **_stand_ins(kwargs))
    return func(*_realise(args, func), **_realise(kwargs, func))


def _run_lazily(lazy: LazyBase, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    if name in _LOSSES:
        return _LOSSES[name](lazy._state, *args, **kwargs)
    try:
        result = _LAZY[name](lazy._state, *args, **kwargs)
    except TypeError:
        return NotImplemented  # arguments that we do not know; torch will judge them
    if isinstance(result, LazyState):
        # `contiguous` of a view is a copy, in stock as here.
        if result is lazy._state and torch.is_grad_enabled() and (name != "contiguous" or lazy._source is None):
            return lazy
        if name not in _VIEWS or (name == "__getitem__" and _copies(args[0])):
            return make_lazy(result)
        return make_lazy(result, (lazy, lambda real: func(real, *args, **kwargs)))
    if isinstance(result, tuple):
        if any(part is NotImplemented for part in result):
            return NotImplemented
        return tuple(
            make_lazy(part, (lazy, lambda real, i=i: func(real, *args, **kwargs)[i])) for i, part in enumerate(result)
        )
    return result


def _copies(index: Any) -> bool:
    """Whether indexing copies, rather than views."""
    return any(isinstance(item, Tensor) for item in (index if isinstance(index, tuple) else (index,)))


def _writes(name: str) -> bool:
    in_place_operator = name.startswith("__i") and name not in _NOT_IN_PLACE
    return name == "__setitem__" or in_place_operator or (name.endswith("_") and not name.endswith("__"))


def _name(func: Any) -> str:
    """The name of a torch function or method; for the getter of a property, the property's name."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__
    return name


def _realise(value: Any, func: Any, detach: bool = False) -> Any:
    """Replace lazy logits by real ones in arguments, however nested, and say so the first time."""
    if is_lazy(value):
        if value._existing() is None:
            _warn_materialized(func)
        real = value.materialize()
        return real.detach() if detach else real
    if isinstance(value, (tuple, list)):
        items = [_realise(item, func, detach) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return {key: _realise(item, func, detach) for key, item in value.items()}
    return value


def _stand_ins(value: Any) -> Any:
    """Replace lazy logits by one element, expanded: enough for operations that only read metadata."""
    if is_lazy(value):
        state = value._state
        return torch.empty((), dtype=state.dtype, device=state.device).expand(state.shape)
    if isinstance(value, tuple):
        return tuple(_stand_ins(item) for item in value)
    if isinstance(value, dict):
        return {key: _stand_ins(item) for key, item in value.items()}
    return value


_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, os.path.abspath(__file__))


def _warn_materialized(func: Any) -> None:
    if torch.compiler.is_compiling():
        return  # there are no frames to look at, and the compiler would have to break the graph for a warning
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    message = (
        f"{_qualified_name(func)} at {file}:{line} needs the logits themselves, so all of them were computed "
        "and no memory is saved here. Call logits.materialize() to ask for them without this warning."
    )
    # With the registry of the calling module Python's own filter shows each line once.
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, MaterializedLogitsWarning, file, line, registry=registry)


def _qualified_name(func: Any) -> str:
    name = _name(func)
    if name != getattr(func, "__name__", name) or hasattr(func, "__objclass__"):
        return f"torch.Tensor.{name}"
    if str(getattr(func, "__qualname__", "")).startswith("Tensor."):
        return f"torch.Tensor.{name}"
    module = getattr(func, "__module__", None)
    return f"{module if isinstance(module, str) and not module.startswith('torch._') else 'torch'}.{name}"


_define_methods()
