"""Views, indices and slices of the state of lazy logits; called by `tables`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.lazy.normal_form import NoLazyFormError, require_lazy
from flce.huggingface.lazy.state import LazyState, is_class_dim, normalized_dim
from flce.huggingface.lazy.values import class_values


def with_token_sizes(state: LazyState, sizes: Sequence[int]) -> LazyState:
    """Return the state of the same tokens with other token dimensions."""
    return state.with_hidden(lambda hidden: hidden.reshape(*sizes, hidden.shape[-1]))


def reshape(state: LazyState, *args: Any, method: Callable[..., Tensor], **kwargs: Any) -> Any:
    """Apply a method such as ``view`` that changes the token dimensions. Classes stay last."""
    before = state.shape
    after = method(torch.empty(before, device="meta"), *args, **kwargs).shape  # raises PyTorch's errors
    if after[-1:] != before[-1:]:
        raise NoLazyFormError
    if method is Tensor.flatten and after == before:
        return state  # stock returns the tensor itself
    return state.with_hidden(lambda hidden: hidden.reshape(*after[:-1], hidden.shape[-1]))


def transpose(state: LazyState, dim0: int, dim1: int) -> Any:
    """Transpose two token dimensions, or the tokens of sequences and the classes."""
    dims = normalized_dim(state, dim0), normalized_dim(state, dim1)
    if state.ndim == 3 and {*dims} == {1, 2}:
        return replace(state, class_dim=1)
    require_lazy(state.ndim - 1 not in dims)
    return state.with_hidden(lambda hidden: hidden.transpose(*dims))


def index_select(state: LazyState, dim: int, index: Tensor) -> Any:
    require_lazy(not is_class_dim(state, dim) and isinstance(index, Tensor) and index.device == state.device)
    return state.with_hidden(lambda hidden: hidden.index_select(dim, index.to(hidden.device)))


def roll(state: LazyState, shifts: Any, dims: Any = ()) -> Any:
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    require_lazy(dims and not any(is_class_dim(state, dim) for dim in dims))
    return state.with_hidden(lambda hidden: hidden.roll(shifts, dims))


def cat(state: LazyState, others: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate tokens of the same logits. ``others``: states of views of the same memory."""
    states = [state, *others]
    require_lazy(not is_class_dim(state, dim) and all([isinstance(other, LazyState) for other in others]))  # noqa: C419
    require_lazy(all([each.weight is state.weight and each.class_dim == -1 for each in states]))  # noqa: C419
    joined = iter([torch.cat(tensors, dim) for tensors in zip(*map(_token_tensors, states), strict=True)])
    # A state with a snapshot of the hidden states finds earlier changes.
    first = next((each for each in states if each.terms[0].snapshot is not None), state)
    return first.with_hidden(lambda _: next(joined))


def _token_tensors(state: LazyState) -> list[Tensor]:
    """Return the tensors of the state that have the dimensions of tokens, in the order of `LazyState.with_hidden`."""
    return [*[term.hidden for term in state.terms if term.hidden is not None], *state.token_vectors.values()]


def split(state: LazyState, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    sizes = split_size_or_sections if split_size is None else split_size
    return _split_tokens(state, dim, lambda hidden: hidden.split(sizes, dim))


def chunk(state: LazyState, chunks: int, dim: int = 0) -> Any:
    return _split_tokens(state, dim, lambda hidden: hidden.chunk(chunks, dim))


def unbind(state: LazyState, dim: int = 0) -> Any:
    return _split_tokens(state, dim, lambda hidden: hidden.unbind(dim))


def _split_tokens(state: LazyState, dim: int, cut: Callable[[Tensor], Sequence[Tensor]]) -> Any:
    """Split the tokens along ``dim``."""
    require_lazy(not is_class_dim(state, dim))
    views = [iter(tensors_of_view) for tensors_of_view in zip(*map(cut, _token_tensors(state)), strict=True)]
    return tuple(state.with_hidden(lambda _, view=view: next(view)) for view in views)  # type: ignore[misc]


def getitem(state: LazyState, index: Any) -> Any:
    """Index tokens by indexing the hidden states, and classes by indexing the rows of the head."""
    items, classes = _expand_index(state, index)
    advanced = any([isinstance(item, Tensor) for item in items])  # noqa: C419 - faster
    if advanced and isinstance(classes, Tensor):  # PyTorch combines both indices
        raise NoLazyFormError
    tokens = state
    if not all([isinstance(item, slice) and item == slice(None) for item in items]):  # noqa: C419 - faster
        tokens = state.with_hidden(lambda hidden: hidden[tuple(items)])
    if isinstance(classes, Tensor):
        return _select_classes(tokens, classes)
    if isinstance(classes, slice):
        if classes != slice(None):
            return _slice_classes(tokens, classes)
        return replace(state) if tokens is state else tokens
    if advanced or torch.compiler.is_compiling():  # a copy, or in a graph, which has no writes
        return _select_classes(tokens, torch.tensor(classes))
    require_lazy(-state.vocab_size <= classes < state.vocab_size)  # PyTorch raises an error
    first = classes % state.vocab_size
    return replace(_slice_classes(tokens, slice(first, first + 1)), class_dim=None)


def _slice_classes(state: LazyState, classes: slice) -> LazyState:
    require_lazy(state.normal_form.form == "logits")  # other forms depend on all classes
    require_lazy(state.division is None and not state.normal_form.has_normalizer)
    with state.gathered_weights():
        terms = [term.map_tensors(lambda rows: rows[classes], "weight", "bias") for term in state.resolved_terms]
    sliced = state.with_terms(terms)
    require_lazy(sliced.vocab_size > 0)
    return sliced


def _select_classes(state: LazyState, index: Tensor) -> Any:
    """Select the same classes of all tokens, by a product with a copy of their rows of the head.

    The copy reads and writes the rows, and the product reads them again. With a third of the classes or more, computing
    all logits is not slower.
    """
    require_lazy(index.dtype in (torch.int64, torch.int32) and 3 * index.numel() < state.vocab_size)
    require_lazy(index.device.type == "cpu" or index.device == state.device)  # PyTorch raises an error
    columns = index.flatten()
    is_kept = (columns >= 0) | (columns < -state.vocab_size)  # the latter is an error
    values = class_values(state, columns.where(is_kept, columns + state.vocab_size))
    return values.contiguous().reshape((*values.shape[:-1], *index.shape))


def _expand_index(state: LazyState, index: Any) -> tuple[list[Any], Any]:
    """Split an index into one item for each token dimension (and new axes, masks) and the item of the classes."""
    items = list(index) if isinstance(index, tuple) else [index]
    dim, ellipsis_position, ndim = 0, None, state.hidden.dim()
    for position, item in enumerate(items):
        if isinstance(item, slice) or type(item) is int:
            dim += 1
        elif item is Ellipsis and ellipsis_position is None:
            ellipsis_position = position
        elif isinstance(item, list) and all(type(i) is int for i in item):
            items[position] = torch.tensor(item, dtype=torch.int64)
            dim += 1
        elif isinstance(item, Tensor) and item.dtype == torch.bool and item.dim() > 0:
            # PyTorch raises an error for a mask of another shape.
            require_lazy(ellipsis_position is None and item.shape == state.shape[dim : dim + item.dim()])
            dim += item.dim()
        elif isinstance(item, Tensor) and item.dtype in (torch.int64, torch.int32):
            if item.dim() == 0 and not torch.compiler.is_compiling():
                items[position] = int(item)  # a view, as of an int
            dim += 1
        else:
            require_lazy(item is None)
    position = len(items) if ellipsis_position is None else ellipsis_position
    items[position : position + 1] = [slice(None)] * (ndim - dim)
    last = items.pop() if dim <= ndim and items else None
    if last is None or (isinstance(last, Tensor) and last.dtype == torch.bool):
        raise NoLazyFormError
    return items, last
