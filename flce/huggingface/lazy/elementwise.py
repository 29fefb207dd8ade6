"""What casts, factors, sums, tanh and fills do to the state of lazy logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.lazy.state import LazyState, StackState, dimension, merged_calls
from flce.huggingface.lazy.terms import BiasTerm, Product
from flce.ops.arguments import widened

_STATES = (LazyState, StackState)


def scale(name: str) -> Callable[..., Any]:
    def handler(state: LazyState, other: Any) -> Any:
        if isinstance(other, Tensor):
            return _scale_by_tensor(state, name, other)
        if isinstance(other, bool) or not isinstance(other, (int, float)):
            return NotImplemented
        return state.with_op(name, other)

    return handler


def _scale_by_tensor(state: LazyState, name: str, other: Tensor) -> Any:
    """A 0-d factor goes onto the products' inputs: reading it synchronises, and it may need a gradient."""
    if other.dim() != 0 or not other.is_floating_point() or not state.folded.linear:
        return NotImplemented
    scale = torch.mul if name == "mul" else torch.div
    terms: list[Product | BiasTerm] = []
    with state.weights():
        for term in state.with_hidden(lambda hidden: scale(hidden, other)).terms:
            if isinstance(term, BiasTerm):
                terms.append(replace(term, bias=scale(term.bias, other), watched=None))
            else:
                terms.append(term if term.bias is None else replace(term, bias=scale(term.bias, other)))
    return replace(state, terms=tuple(terms))


def add(sign: int) -> Callable[..., Any]:
    def handler(state: LazyState, other: Any) -> Any:
        if isinstance(other, LazyState):
            return _add_terms(state, other, sign)
        if isinstance(other, Tensor) and other.is_floating_point():
            return _add_bias(state, other, sign)
        return NotImplemented

    return handler


def _add_terms(state: LazyState, other: LazyState, sign: int) -> Any:
    """The sum of two products of one shape, such as a head's and its adapter's."""
    if (state.shape, state.class_dim, state.device) != (other.shape, other.class_dim, other.device):
        return NotImplemented
    if state.autocast_dtype != other.autocast_dtype or state.home != other.home:
        return NotImplemented
    signed = other if sign == 1 else other.with_op("mul", sign)
    right = None if signed is NotImplemented else _as_terms(signed)
    return _with_terms(replace(state, calls=merged_calls(state, other)), right)


def _add_bias(state: LazyState, other: Tensor, sign: int) -> Any:
    """A tensor that is the same for every token."""
    if not same_for_every_token(state, other) or other.device != state.device:
        return NotImplemented
    if other.dtype == torch.float64 != state.head.dtype:
        return NotImplemented  # wider than what the loss is computed in
    bias = other.reshape(-1)
    term = BiasTerm(bias, ops=() if sign == 1 else (("mul", sign),))
    return _with_terms(state, (term if torch.compiler.is_compiling() else term.recorded(),))


def _with_terms(state: LazyState, more: tuple[Product | BiasTerm, ...] | None) -> Any:
    own = _as_terms(state)
    return NotImplemented if own is None or more is None else replace(state, terms=(*own, *more), ops=())


def _as_terms(state: LazyState) -> tuple[Product | BiasTerm, ...] | None:
    """The terms with the state's operations in them, None if a sum of terms does not allow that."""
    if not state.folded.linear:
        return None
    if not state.ops:
        return state.terms
    if len(state.terms) > 1:
        return None  # rounded after the sum, which no term alone can repeat
    (term,) = state.terms
    return (replace(term, ops=(*term.ops, *state.ops)),)


def same_for_every_token(state: LazyState, vector: Tensor) -> bool:
    """Whether a tensor broadcasts to the logits with one entry a class, and is where the products are made."""
    vocab = state.vocab_size
    fits = 0 < vector.dim() <= state.ndim and vector.numel() == vocab == vector.shape[-1]
    return state.vocab_last and fits and vector.device == state.home


def log_softmax(
    state: LazyState, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    if dim is None or dimension(state, dim) != state.class_dim:
        return NotImplemented
    kind = state.device.type
    if dtype is None and kind != "cpu":  # there autocast leaves it as it is
        dtype = widened(state.dtype, kind)
    state = state if dtype is None else to_dtype(state, dtype)
    return state if state is NotImplemented else state.with_op("log_softmax")


def recorded(name: str, value: Any = None) -> Callable[..., Any]:
    """An operation without arguments."""
    return lambda state: state.with_op(name, value)


def cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda state: to_dtype(state, dtype)


def to_dtype(state: LazyState, dtype: torch.dtype) -> Any:
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return NotImplemented
    return state if dtype == state.dtype else state.with_op("to", dtype)


def to(
    state: LazyState,
    *args: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    other: Any = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Any:
    if memory_format != torch.preserve_format:
        return NotImplemented
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, (Tensor, *_STATES)):
            other = arg
        elif isinstance(arg, (torch.device, str)) or (isinstance(arg, int) and not isinstance(arg, bool)):
            device = arg
    if other is not None:
        dtype, device = other.dtype, other.device
    if device is not None:
        state = _to_device(state, torch.device(device))
    if copy:
        state = replace(state)
    return state if dtype is None else to_dtype(state, dtype)


def _to_device(state: LazyState, device: torch.device) -> LazyState:
    if device.type == state.device.type and device.index is None:
        return state
    return state if device == state.device else replace(state, device=device)


def type_as(state: LazyState, other: Any) -> Any:
    return to(state, other.dtype, device=other.device)


def to_type(state: LazyState, dtype: Any) -> Any:
    return to_dtype(state, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


def contiguous(state: LazyState, *, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    return state if memory_format == torch.contiguous_format else NotImplemented


def clone(state: LazyState, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    return replace(state) if memory_format in (torch.preserve_format, torch.contiguous_format) else NotImplemented
