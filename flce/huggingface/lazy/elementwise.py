"""Elementwise operations on the state of lazy logits: casts, factors, sums, tanh, softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.lazy.normal_form import IDENTITY, NoLazyFormError, require_lazy
from flce.huggingface.lazy.state import LazyState, normalized_dim
from flce.huggingface.lazy.terms import Term
from flce.huggingface.partitioned import resolve_stand_in
from flce.ops.arguments import FLOATING, autocast_result_dtype


def scaled(state: LazyState, name: str, other: Any) -> Any:
    """Times or divided by a number, a 0-d tensor, or a temperature for each token."""
    if isinstance(other, Tensor):
        return _scale_by_tensor(state, name, other)
    if not isinstance(other, (int, float)) or isinstance(other, bool):
        raise NoLazyFormError
    return state.with_op(name, other)


def divide(state: LazyState, other: Any) -> Any:
    return scaled(state, "div", other)


def multiply(state: LazyState, other: Any) -> Any:
    """A factor, or probabilities times the logits or log-probabilities of the same logits."""
    if not isinstance(other, LazyState):
        return scaled(state, "mul", other)
    if state.requires_grad != other.requires_grad and not torch.is_grad_enabled():  # it was when one of them was made
        state, other = state.detach(), other.detach()
    require_lazy(
        state.cached_results is other.cached_results
        and state.requires_grad == other.requires_grad
        and state.device == other.device
    )
    shorter, token_vectors = sorted((state.token_vectors, other.token_vectors), key=len)
    require_lazy(all(mine is theirs for mine, theirs in zip(shorter, token_vectors, strict=False)))
    dtype = torch.promote_types(state.dtype, other.dtype)
    return replace(state, token_vectors=token_vectors, dtype=dtype).with_op("times", other.ops)


def _apply_token_vector(state: LazyState, name: str, other: Tensor) -> Any:
    """An operation with one number for each token, broadcast over its classes."""
    sizes = [*state.shape[:-1], 1]
    missing = state.ndim - other.dim()
    require_lazy(other.dim() > 0 and missing >= 0 and other.device == state.device == state.product_device)
    require_lazy(all(size in (1, wanted) for size, wanted in zip(other.shape, sizes[missing:], strict=True)))
    require_lazy(other.dtype != torch.float64 or state.weight.dtype == torch.float64)  # else wider than flce computes
    copy = other.expand(sizes).clone()  # the vector may be written to later
    state = to_dtype(state, torch.promote_types(state.dtype, other.dtype))
    return replace(state, token_vectors=(*state.token_vectors, copy)).with_op(name, len(state.token_vectors))


def _divide_by_token_vector(state: LazyState, other: Tensor) -> Any:
    """A temperature for each token. Such a temperature gets no gradient."""
    require_lazy(not (other.requires_grad and torch.is_grad_enabled()))
    if other.device.type == "cpu" and not torch.compiler.is_compiling():
        require_lazy(bool((other > 0.0).all()))  # else no temperature; a GPU does not wait for that, and gives NaN
    return _apply_token_vector(state, "div_row", other.detach())


def _scale_by_tensor(state: LazyState, name: str, other: Tensor) -> Any:
    """A 0-d factor multiplies the inputs of the products, because reading its value would make the host wait."""
    require_lazy(other.is_floating_point() and not (other.requires_grad and torch.is_grad_enabled()))
    if name == "div" and other.dim() > 0:
        return _divide_by_token_vector(state, other)
    require_lazy(other.dim() == 0 and state.normal_form.is_linear)
    scale, other = torch.mul if name == "mul" else torch.div, other.detach()
    with state.gathered_weights():
        terms = [term.with_hidden(lambda hidden: scale(hidden, other)) for term in state.terms]
        terms = [term.map_tensors(lambda bias: scale(resolve_stand_in(bias), other), "bias") for term in terms]
    return state.with_terms([replace(term, snapshot=None) if term.hidden is None else term for term in terms])


def add(state: LazyState, other: Any) -> Any:
    """A head and its adapter, or logits and a vector that is the same for every token."""
    if isinstance(other, LazyState):
        return _add_adapter(state, other)
    require_lazy(
        isinstance(other, Tensor) and other.is_floating_point() and other.device == state.device == state.product_device
    )
    require_lazy(0 < other.dim() <= state.ndim and other.numel() == state.vocab_size == other.shape[-1])
    require_lazy(other.dtype != torch.float64 or state.weight.dtype == torch.float64)  # else wider than flce computes
    term = Term(None, None, other.reshape(-1))
    if not torch.compiler.is_compiling():
        require_lazy(other.device.type != "cpu" or bool(other.isfinite().all()))  # a GPU does not wait for that
        term = term.with_snapshot()
    dtype = torch.promote_types(state.dtype, other.dtype)
    return state.with_terms((*_as_terms(state), term), ops=(), normal_form=IDENTITY, dtype=dtype)


def _add_adapter(state: LazyState, other: LazyState) -> Any:
    """The sum of products that different layers have computed for the same tokens."""
    require_lazy((state.shape, state.device) == (other.shape, other.device))
    require_lazy(state.autocast_dtype == other.autocast_dtype and state.product_device == other.product_device)
    terms = (*_as_terms(state), *_as_terms(other))
    calls = tuple({id(call): call for call in (*state.calls, *other.calls)}.values())
    dtype = torch.promote_types(state.dtype, other.dtype)
    return state.with_terms(terms, ops=(), normal_form=IDENTITY, dtype=dtype, calls=calls)


def subtract(state: LazyState, other: Any) -> Any:
    """Logits minus their own normalizer, as ``torch.distributions.Categorical`` normalizes them."""
    require_lazy(isinstance(other, Tensor) and state.is_own_logsumexp(other))
    return _apply_token_vector(state, "sub_row", other)


def _as_terms(state: LazyState) -> tuple[Term, ...]:
    """The terms with the state's operations in them, if a sum of terms allows that."""
    require_lazy(state.normal_form.is_linear)
    if not state.ops:
        return state.terms
    require_lazy(len(state.terms) == 1)  # else rounded after the sum, which no term alone can repeat
    (term,) = state.terms
    return (replace(term, ops=(*term.ops, *state.ops)),)


def make_softmax(name: str) -> Callable[..., Any]:
    """``log_softmax`` or ``softmax``."""

    def handler(
        state: LazyState, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Any:
        require_lazy(dim is not None and normalized_dim(state, dim) == state.ndim - 1)
        state = _to_autocast_dtype(state) if dtype is None else to_dtype(state, dtype)
        return state.with_op(name, state.dtype)

    return handler


def exp(state: LazyState) -> Any:
    return _to_autocast_dtype(state).with_op("exp")


def _to_autocast_dtype(state: LazyState) -> LazyState:
    """In the dtype in which autocast computes a softmax, or an exponential."""
    kind = state.device.type
    return (
        state if kind == "cpu" else to_dtype(state, autocast_result_dtype(state.dtype, kind))
    )  # it leaves those of a CPU alone


def clamp(state: LazyState, min: Any = None, max: Any = None) -> Any:
    """By the least number of the dtype, as ``torch.distributions`` does it: only -inf is changed."""
    require_lazy(max is None and isinstance(min, (int, float)) and min <= torch.finfo(state.dtype).min)
    return state.with_op("clamp", min)


def make_unary(name: str, value: Any = None) -> Callable[..., Any]:
    """An operation without arguments."""
    return lambda state: state.with_op(name, value)


def make_cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda state: to_dtype(state, dtype)


def to_dtype(state: LazyState, dtype: Any) -> LazyState:
    require_lazy(dtype in FLOATING)
    return state if dtype == state.dtype else state.with_op("to", dtype)


def to(state: LazyState, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
    """``Tensor.to``: PyTorch reads the arguments, for a tensor without entries."""
    require_lazy(kwargs.pop("memory_format", torch.preserve_format) == torch.preserve_format)
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
    require_lazy(memory_format == torch.contiguous_format)
    return state


def clone(state: LazyState, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    require_lazy(memory_format in (torch.preserve_format, torch.contiguous_format))
    return replace(state)
