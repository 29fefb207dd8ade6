"""Elementwise operations on the state of lazy logits: casts, factors, sums, tanh, softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.lazy.fold import UNCHANGED, NoLazyFormError, needs
from flce.huggingface.lazy.state import LazyState, dimension
from flce.huggingface.lazy.terms import Term
from flce.huggingface.partitioned import whole
from flce.ops.arguments import FLOATING, widened


def scaled(state: LazyState, name: str, other: Any) -> Any:
    """Times or divided by a number, a 0-d tensor, or a temperature for each token."""
    if isinstance(other, Tensor):
        return _scale_by_tensor(state, name, other)
    if not isinstance(other, (int, float)) or isinstance(other, bool):
        raise NoLazyFormError
    return state.with_op(name, other)


def divide(state: LazyState, other: Any) -> Any:
    return scaled(state, "div", other)


def times(state: LazyState, other: Any) -> Any:
    """A factor, or probabilities times the logits or log-probabilities of the same logits."""
    if not isinstance(other, LazyState):
        return scaled(state, "mul", other)
    if state.requires_grad != other.requires_grad and not torch.is_grad_enabled():  # it was when one of them was made
        state, other = state.detach(), other.detach()
    needs(state.known is other.known and state.requires_grad == other.requires_grad and state.device == other.device)
    shorter, rows = sorted((state.rows, other.rows), key=len)
    needs(all(mine is theirs for mine, theirs in zip(shorter, rows, strict=False)))
    dtype = torch.promote_types(state.dtype, other.dtype)
    return replace(state, rows=rows, dtype=dtype).with_op("times", other.ops)


def _by_row(state: LazyState, name: str, other: Tensor) -> Any:
    """An operation with one number for each token, broadcast over its classes."""
    sizes = [*state.shape[:-1], 1]
    missing = state.ndim - other.dim()
    needs(other.dim() > 0 and missing >= 0 and other.device == state.device == state.home)
    needs(all(size in (1, wanted) for size, wanted in zip(other.shape, sizes[missing:], strict=True)))
    needs(other.dtype != torch.float64 or state.weight.dtype == torch.float64)  # else wider than flce computes
    copy = other.expand(sizes).clone()  # the vector may be written to later
    state = to_dtype(state, torch.promote_types(state.dtype, other.dtype))
    return replace(state, rows=(*state.rows, copy)).with_op(name, len(state.rows))


def _divide_by_row(state: LazyState, other: Tensor) -> Any:
    """A temperature for each token. Such a temperature gets no gradient."""
    needs(not (other.requires_grad and torch.is_grad_enabled()))
    if other.device.type == "cpu" and not torch.compiler.is_compiling():
        needs(bool((other > 0.0).all()))  # else no temperature; a GPU does not wait for that, and gives NaN
    return _by_row(state, "div_row", other.detach())


def _scale_by_tensor(state: LazyState, name: str, other: Tensor) -> Any:
    """A 0-d factor multiplies the inputs of the products, because reading its value would make the host wait."""
    needs(other.is_floating_point() and not (other.requires_grad and torch.is_grad_enabled()))
    if name == "div" and other.dim() > 0:
        return _divide_by_row(state, other)
    needs(other.dim() == 0 and state.folded.linear)
    scale, other = torch.mul if name == "mul" else torch.div, other.detach()
    with state.weights():
        terms = [term.with_hidden(lambda hidden: scale(hidden, other)) for term in state.terms]
        terms = [term.changed(lambda bias: scale(whole(bias), other), "bias") for term in terms]
    return state.with_terms([replace(term, watched=None) if term.hidden is None else term for term in terms])


def add(state: LazyState, other: Any) -> Any:
    """A head and its adapter, or logits and a vector that is the same for every token."""
    if isinstance(other, LazyState):
        return _add_adapter(state, other)
    needs(isinstance(other, Tensor) and other.is_floating_point() and other.device == state.device == state.home)
    needs(0 < other.dim() <= state.ndim and other.numel() == state.vocab_size == other.shape[-1])
    needs(other.dtype != torch.float64 or state.weight.dtype == torch.float64)  # else wider than flce computes
    term = Term(None, None, other.reshape(-1))
    if not torch.compiler.is_compiling():
        needs(other.device.type != "cpu" or bool(other.isfinite().all()))  # a GPU does not wait for that
        term = term.recorded()
    dtype = torch.promote_types(state.dtype, other.dtype)
    return state.with_terms((*_as_terms(state), term), ops=(), folded=UNCHANGED, dtype=dtype)


def _add_adapter(state: LazyState, other: LazyState) -> Any:
    """The sum of products that different layers have computed for the same tokens."""
    needs((state.shape, state.device) == (other.shape, other.device))
    needs(state.autocast_dtype == other.autocast_dtype and state.home == other.home)
    terms = (*_as_terms(state), *_as_terms(other))
    calls = tuple({id(call): call for call in (*state.calls, *other.calls)}.values())
    dtype = torch.promote_types(state.dtype, other.dtype)
    return state.with_terms(terms, ops=(), folded=UNCHANGED, dtype=dtype, calls=calls)


def subtract(state: LazyState, other: Any) -> Any:
    """Logits minus their own normalizer, as ``torch.distributions.Categorical`` normalizes them."""
    needs(isinstance(other, Tensor) and state.is_own_logsumexp(other))
    return _by_row(state, "sub_row", other)


def _as_terms(state: LazyState) -> tuple[Term, ...]:
    """The terms with the state's operations in them, if a sum of terms allows that."""
    needs(state.folded.linear)
    if not state.ops:
        return state.terms
    needs(len(state.terms) == 1)  # else rounded after the sum, which no term alone can repeat
    (term,) = state.terms
    return (replace(term, ops=(*term.ops, *state.ops)),)


def normalised(name: str) -> Callable[..., Any]:
    """``log_softmax`` or ``softmax``."""

    def handler(
        state: LazyState, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Any:
        needs(dim is not None and dimension(state, dim) == state.ndim - 1)
        state = _autocast(state) if dtype is None else to_dtype(state, dtype)
        return state.with_op(name, state.dtype)

    return handler


def exp(state: LazyState) -> Any:
    return _autocast(state).with_op("exp")


def _autocast(state: LazyState) -> LazyState:
    """In the dtype in which autocast computes a softmax, or an exponential."""
    kind = state.device.type
    return state if kind == "cpu" else to_dtype(state, widened(state.dtype, kind))  # it leaves those of a CPU alone


def clamp(state: LazyState, min: Any = None, max: Any = None) -> Any:
    """By the least number of the dtype, as ``torch.distributions`` does it: only -inf is changed."""
    needs(max is None and isinstance(min, (int, float)) and min <= torch.finfo(state.dtype).min)
    return state.with_op("clamp", min)


def recorded(name: str, value: Any = None) -> Callable[..., Any]:
    """An operation without arguments."""
    return lambda state: state.with_op(name, value)


def cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda state: to_dtype(state, dtype)


def to_dtype(state: LazyState, dtype: Any) -> LazyState:
    needs(dtype in FLOATING)
    return state if dtype == state.dtype else state.with_op("to", dtype)


def to(state: LazyState, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
    """``Tensor.to``: PyTorch reads the arguments, for a tensor without entries."""
    needs(kwargs.pop("memory_format", torch.preserve_format) == torch.preserve_format)
    args = tuple([_empty_like(arg) if isinstance(arg, LazyState) else arg for arg in args])
    before = _empty_like(state)
    after: Tensor = before.to(*args, copy=copy, **kwargs)  # type: ignore[call-overload]
    same = (after.dtype, after.device) == (before.dtype, before.device)
    if same and not copy and (after is before or torch.compiler.is_compiling()):
        return state
    return to_dtype(replace(state, device=after.device), after.dtype)


def _empty_like(state: LazyState) -> Tensor:
    return torch.empty(0, dtype=state.dtype, device=state.device)


def contiguous(state: LazyState, *, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    needs(memory_format == torch.contiguous_format)
    return state


def clone(state: LazyState, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    needs(memory_format in (torch.preserve_format, torch.contiguous_format))
    return replace(state)
