"""Elementwise operations on the state of lazy logits: casts, factors, sums, tanh, softmax; called by `tables`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.divided_head import HeadDivision
from flce.huggingface.lazy import divergences
from flce.huggingface.lazy.normal_form import IDENTITY, NoLazyFormError, require_lazy
from flce.huggingface.lazy.state import LazyState, Term, is_class_dim
from flce.huggingface.wrappers import resolve_stand_in
from flce.ops.arguments import FLOATING, autocast_result_dtype


def divide(state: LazyState, other: Any, name: str = "div") -> Any:
    """Divide by a number, a 0-d tensor, or a temperature for each token. ``name``: "mul" multiplies."""
    if isinstance(other, Tensor):
        return _scale_by_tensor(state, name, other)
    if not isinstance(other, (int, float)) or isinstance(other, bool):
        raise NoLazyFormError
    return state.with_op(name, other)


def multiply(state: LazyState, other: Any) -> Any:
    """Multiply by a factor, or by other lazy logits."""
    return divergences.multiply(state, other) if isinstance(other, LazyState) else divide(state, other, "mul")


def _apply_token_vector(state: LazyState, name: str, other: Tensor) -> Any:
    """Apply an operation with one number for each token, broadcast over the classes."""
    sizes = [*state.shape[:-1], 1]
    missing = state.ndim - other.dim()
    require_lazy(other.dim() > 0 and missing >= 0 and other.device == state.device == state.product_device)
    require_lazy(all(size in (1, full_size) for size, full_size in zip(other.shape, sizes[missing:], strict=True)))
    require_lazy(other.dtype != torch.float64 or state.weight.dtype == torch.float64)  # flce computes in float32
    copy = other.expand(sizes).clone()  # a copy, because the vector may be written to later
    state = to_dtype(state, torch.promote_types(state.dtype, other.dtype))
    return replace(state, token_vectors={**state.token_vectors, name: copy}).with_op(name)


def _scale_by_tensor(state: LazyState, name: str, other: Tensor) -> Any:
    """Divide by a temperature for each token, or scale the inputs of the products by a 0-d tensor.

    A read of the 0-d tensor's value would make the host wait.
    """
    require_lazy(other.is_floating_point() and not (other.requires_grad and torch.is_grad_enabled()))
    scale, other = torch.mul if name == "mul" else torch.div, other.detach()
    if name == "div" and other.dim() > 0:
        if other.device.type == "cpu" and not torch.compiler.is_compiling():
            require_lazy(bool((other > 0.0).all()))  # not checked on a GPU, because the host would wait: NaN
        return _apply_token_vector(state, "div_row", other)
    require_lazy(other.dim() == 0 and state.normal_form.is_linear)
    if not torch.compiler.is_compiling() and not state.shape.numel():
        return replace(state)  # a bias would get the gradient 0 * NaN for the mean of no logits
    with state.gathered_weights():
        terms = [term.with_hidden(lambda hidden: scale(hidden, other)) for term in state.terms]
        terms = [term.map_tensors(lambda bias: scale(resolve_stand_in(bias), other), "bias") for term in terms]
    return state.with_terms([replace(term, snapshot=None) if term.hidden is None else term for term in terms])


def add(state: LazyState, other: Any) -> Any:
    """Add the logits of an adapter to those of a head, or add the same vector to the logits of each token."""
    if isinstance(other, LazyState):
        return _add_adapter(state, other)
    require_lazy(
        isinstance(other, Tensor) and other.is_floating_point() and other.device == state.device == state.product_device
    )
    require_lazy(state.division is None)
    require_lazy(0 < other.dim() <= state.ndim and other.numel() == state.vocab_size == other.shape[-1])
    require_lazy(other.dtype != torch.float64 or state.weight.dtype == torch.float64)  # flce computes in float32
    term = Term(None, None, other.reshape(-1))
    if not torch.compiler.is_compiling():
        # Not checked on a GPU, because the host would wait.
        require_lazy(other.device.type != "cpu" or bool(other.isfinite().all()))
        term = term.with_snapshot()
    dtype = torch.promote_types(state.dtype, other.dtype)
    return state.with_terms((*_as_terms(state), term), ops=(), normal_form=IDENTITY, dtype=dtype)


def _add_adapter(state: LazyState, other: LazyState) -> Any:
    """Add the products of several layers for the same tokens."""
    if state.division != other.division:
        require_lazy(not (state.is_dtensor or other.is_dtensor))
        state, other = _divided_as(state, other.division), _divided_as(other, state.division)
    require_lazy((state.shape, state.device) == (other.shape, other.device))
    require_lazy(state.autocast_dtype == other.autocast_dtype and state.product_device == other.product_device)
    terms = (*_as_terms(state), *_as_terms(other))
    calls = tuple({id(call): call for call in (*state.calls, *other.calls)}.values())
    dtype = torch.promote_types(state.dtype, other.dtype)
    return state.with_terms(terms, ops=(), normal_form=IDENTITY, dtype=dtype, calls=calls)


def _divided_as(state: LazyState, division: HeadDivision | None) -> LazyState:
    """Return the state with the classes of this process, if only the other state is divided: ``division``."""
    if division is None or state.division is not None:
        return state
    terms = [term.map_tensors(division.slice_of, "weight", "bias") for term in state.terms]
    return state.with_terms(terms, division=division)


def subtract(state: LazyState, other: Any) -> Any:
    """Subtract the logsumexp of the same logits, as ``Categorical`` does, or the log-probabilities of another model."""
    if isinstance(other, LazyState):
        return divergences.subtract_logprobs(state, other)
    require_lazy(isinstance(other, Tensor) and state.is_own_logsumexp(other))
    return _apply_token_vector(state, "sub_row", other)


def _as_terms(state: LazyState) -> tuple[Term, ...]:
    """Return the terms of the state, with the operations of the state as operations of its only term."""
    require_lazy(state.normal_form.is_linear)
    if not state.ops:
        return state.terms
    require_lazy(len(state.terms) == 1)  # the logits of several terms are rounded after the sum
    (term,) = state.terms
    return (replace(term, ops=(*term.ops, *state.ops)),)


def softmax(
    state: LazyState, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None, *, name: str
) -> Any:
    """Apply ``name``: "log_softmax" or "softmax"."""
    require_lazy(is_class_dim(state, dim))
    state = to_autocast_dtype(state) if dtype is None else to_dtype(state, dtype)
    return state.with_op(name, state.dtype)


def exp(state: LazyState) -> Any:
    return to_autocast_dtype(state).with_op("exp")


def to_autocast_dtype(state: LazyState) -> LazyState:
    """Cast to the dtype in which autocast computes a softmax or an exponential. On a CPU autocast casts neither."""
    device_type = state.device.type
    return state if device_type == "cpu" else to_dtype(state, autocast_result_dtype(state.dtype, device_type))


def clamp(state: LazyState, min: Any = None, max: Any = None) -> Any:
    """Clamp by the least number of the dtype, which changes only -inf, as ``torch.distributions`` does."""
    require_lazy(max is None and isinstance(min, (int, float)) and min <= torch.finfo(state.dtype).min)
    return state.with_op("clamp", min)


def to_dtype(state: LazyState, dtype: Any) -> LazyState:
    require_lazy(dtype in FLOATING)
    return state if dtype == state.dtype else state.with_op("to", dtype)


def to(state: LazyState, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
    """Apply ``Tensor.to``. A call with an empty tensor interprets the arguments."""
    require_lazy(kwargs.pop("memory_format", torch.preserve_format) == torch.preserve_format)
    args = tuple([_empty_like(arg) if isinstance(arg, LazyState) else arg for arg in args])
    before = _empty_like(state)
    after: Tensor = before.to(*args, copy=copy, **kwargs)  # type: ignore[call-overload]
    is_unchanged = (after.dtype, after.device) == (before.dtype, before.device)
    if is_unchanged and not copy and (after is before or torch.compiler.is_compiling()):
        return state
    return to_dtype(replace(state, device=after.device), after.dtype)


def _empty_like(state: LazyState) -> Tensor:
    return torch.empty(0, dtype=state.dtype, device=state.device)


def contiguous(state: LazyState, *, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    require_lazy(memory_format == torch.contiguous_format)
    return state


def clone(state: LazyState, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    require_lazy(memory_format in (torch.preserve_format, torch.contiguous_format))
    return replace(state)
