"""What reshapes, indices and slices do to the state of lazy logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.lazy.elementwise import same_for_every_token
from flce.huggingface.lazy.fold import needs
from flce.huggingface.lazy.state import LazyState, StackState, State, dimension
from flce.huggingface.lazy.terms import BiasTerm, Product
from flce.huggingface.lazy.values import values_of


def _fill(state: LazyState, columns: Any, value: Any) -> Any:
    """Some classes' logits set to a number: their rows of the head become zero, and the bias that number.

    Costs a copy of the head. Exact, also in gradients.
    """
    needs(isinstance(value, (int, float)) and not isinstance(value, bool) and not torch.compiler.is_compiling())
    head, dtype = state.head, state.head.weight.dtype
    number = torch.tensor(value, dtype=state.dtype).double()
    # Else the sum of the products would not be that number.
    needs(all(name == "to" for name, _ in (*state.ops, *head.ops)) and bool(number.to(dtype).double() == number))
    mask = torch.zeros(state.vocab_size, dtype=torch.bool, device=state.home)
    mask[columns] = True
    with state.weights():
        return replace(state, terms=_filled_terms(state, mask, value))


def _filled_terms(state: LazyState, mask: Tensor, value: float) -> tuple[Product | BiasTerm, ...]:
    terms: list[Product | BiasTerm] = []
    for place, term in enumerate(state.whole_terms):
        if isinstance(term, BiasTerm):
            terms.append(replace(term, bias=term.bias.masked_fill(mask, 0.0), watched=None))
            continue
        first = place == 0
        everywhere = mask if term.filled is None else mask | term.filled
        weight = term.weight.masked_fill(mask[:, None], 0.0)
        filled = replace(term, weight=weight, bias=None, filled=everywhere)
        bias = term.weight.new_zeros(state.vocab_size) if first and term.bias is None else term.bias
        if bias is not None:
            filled = replace(filled, bias=bias.masked_fill(mask, value if first else 0.0))
        terms.append(filled)
    return tuple(terms)


def set_item(state: LazyState, index: Any, value: Any) -> Any:
    """``logits[..., columns] = number``."""
    items = expand_index(state, index)
    needs(len(items) == state.ndim)
    columns = items.pop(state.class_dim)
    needs(columns is not None and all(isinstance(item, slice) and item == slice(None) for item in items))
    # The logsumexp of nothing but -inf is not that of the fused loss.
    count = len(range(*columns.indices(state.vocab_size))) if isinstance(columns, slice) else 1
    all_classes = count == state.vocab_size
    needs(not (all_classes and isinstance(value, float) and math.isinf(value)))
    return _fill(state, columns, value)


def masked_fill(state: LazyState, mask: Tensor, value: Any) -> Any:
    """Masks that are the same for every token."""
    needs(isinstance(mask, Tensor) and mask.dtype == torch.bool and same_for_every_token(state, mask))
    return _fill(state, mask.reshape(-1), value)


def reshape(state: LazyState, *shape: Any) -> Any:
    """``view`` and ``reshape`` of the token dimensions; the vocabulary stays last."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    needs(bool(shape) and state.vocab_last and all(isinstance(size, int) for size in shape))
    sizes, vocab = shape[:-1], state.vocab_size
    if shape[-1] == -1:
        needs(-1 not in sizes and math.prod(sizes) == math.prod(state.shape[:-1]))
    else:
        needs(shape[-1] == vocab)
    if torch.compiler.is_compiling() or not (vocab and _fit(sizes, math.prod(state.shape[:-1]))):
        torch.empty(state.shape, device="meta").reshape(shape)  # PyTorch's error, if it is one
    return state.with_hidden(lambda hidden: hidden.reshape(*sizes, hidden.shape[-1]), len(sizes))


def _fit(sizes: tuple[int, ...], rows: int) -> bool:
    """Whether it is plain that ``rows`` rows can be given these sizes, of which one may be -1."""
    if min(sizes, default=0) < -1:
        return False
    known = math.prod([size for size in sizes if size != -1])
    return known == rows if -1 not in sizes else sizes.count(-1) == 1 and known > 0 and rows % known == 0


def rearranged(name: str) -> Callable[..., Any]:
    """A method that rearranges dimensions, told no sizes: done to the hidden states as it would be to the logits."""
    method = getattr(Tensor, name)
    method = method if callable(method) else method.__get__

    def handler(state: LazyState, *args: Any, **kwargs: Any) -> Any:
        def shape(size: int) -> list[int]:
            """The result's shape for logits with ``size`` classes. Raises PyTorch's error, if it is one."""
            before = (*state.shape[: state.class_dim], size, *state.shape[state.class_dim + 1 :])
            return list(method(torch.empty(before, device="meta"), *args, **kwargs).shape)

        now, wider = shape(state.vocab_size), shape(state.vocab_size + 1)
        grown = [dim for dim, size in enumerate(now) if [size] != wider[dim : dim + 1]]
        # Else tokens and classes are in one dimension, or classes in none.
        needs(len(grown) == 1 and now[grown[0]] == state.vocab_size)
        result = state.with_hidden(lambda hidden: method(hidden, *args, **kwargs), grown[0])
        if result.head.hidden is state.head.hidden:
            return state  # there was nothing to do
        needs(result.ndim == len(now) and result.shape == torch.Size(now))  # a hidden size of 1 may be squeezed away
        return result

    return handler


def split(state: LazyState, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    sizes = split_size_or_sections if split_size is None else split_size
    return _pieces(state, dim, lambda hidden: hidden.split(sizes, dim))


def chunk(state: LazyState, chunks: int, dim: int = 0) -> Any:
    return _pieces(state, dim, lambda hidden: hidden.chunk(chunks, dim))


def unbind(state: LazyState, dim: int = 0) -> Any:
    return _pieces(state, dim, lambda hidden: hidden.unbind(dim), lost=1)


def _pieces(state: LazyState, dim: int, cut: Callable[[Tensor], Sequence[Tensor]], lost: int = 0) -> Any:
    """Tokens cut apart along `dim`, which the pieces may have `lost`."""
    needs(dimension(state, dim) != state.class_dim)
    class_dim = state.class_dim - (lost if dimension(state, dim) < state.class_dim else 0)
    pieces = [iter(together) for together in zip(*[cut(tensor) for tensor in state.of_tokens], strict=True)]
    return tuple(state.with_hidden(lambda _, rest=rest: next(rest), class_dim) for rest in pieces)  # type: ignore[misc]


def index_select(state: LazyState, dim: int, index: Tensor) -> Any:
    needs(dimension(state, dim) != state.class_dim)
    return state.with_hidden(lambda hidden: hidden.index_select(dim, index))


def getitem(state: LazyState, index: Any) -> Any:
    """Index tokens as the logits would be indexed; an index of the vocabulary takes rows of the head instead."""
    items = expand_index(state, index)
    kept, class_item, advanced, at, class_dim = 0, slice(None), False, 0, -1
    for place, item in enumerate(items):
        if item is None:
            kept += 1
        elif at == state.class_dim:
            class_item, items[place], class_dim = item, slice(None), kept
            at, kept = at + 1, kept + 1
        elif isinstance(item, Tensor):
            # Else an error that is PyTorch's to raise.
            needs(item.dtype != torch.bool or item.shape == state.shape[at : at + item.dim()])
            advanced = True
            at += item.dim() if item.dtype == torch.bool else 1
        else:
            at += 1
            kept += isinstance(item, slice)
    needs(class_dim >= 0 and (state.vocab_last or not advanced))
    if isinstance(class_item, Tensor):
        needs(class_item.dtype in (torch.int64, torch.int32))
        needs(not advanced or class_item.dim() == 0)  # else it goes together with the tokens' index
    all_tokens = all([isinstance(item, slice) and item == slice(None) for item in items])  # noqa: C419 - faster
    if not all_tokens:
        selected = state.with_hidden(lambda hidden: hidden[tuple(items)], class_dim)
        state = replace(selected, class_dim=selected.ndim - 1) if advanced else selected
    if isinstance(class_item, slice):
        if class_item != slice(None):
            return _slice_classes(state, class_item)
        return replace(state) if all_tokens else state
    if isinstance(class_item, Tensor):
        return _few_classes(state, class_item)
    # A view of one class, where nothing copies: writes to it have to reach the logits.
    if advanced or torch.compiler.is_compiling():
        return _few_classes(state, torch.tensor(class_item))
    return _one_class(state, class_item)


def _slice_classes(state: LazyState, classes: slice) -> Any:
    needs(state.folded.form == "logits")  # over the whole vocabulary
    names = ("weight", "bias", "filled")
    with state.weights():
        sliced = replace(state, terms=tuple([term.changed(lambda t: t[classes], *names) for term in state.whole_terms]))
    needs(sliced.vocab_size > 0)
    return sliced


def _one_class(state: LazyState, index: int) -> Any:
    vocab = state.vocab_size
    needs(-vocab <= index < vocab)  # else an error that is PyTorch's to raise
    one = _slice_classes(state, slice(index % vocab, index % vocab + 1))
    shape = (*state.shape[: state.class_dim], *state.shape[state.class_dim + 1 :])
    return StackState((one,), 0, shape)


def _few_classes(state: LazyState, index: Tensor) -> Any:
    """The same classes of all tokens: a product with a copy of their rows of the head.

    The copy is written, and read beside the rows: from a third of the classes on, all logits cost no more.
    """
    needs(3 * index.numel() < state.vocab_size)
    needs(index.device.type == "cpu" or index.device == state.device)  # else an error that is PyTorch's to raise
    columns = index.flatten()
    positive = columns.where(columns >= 0, columns + state.vocab_size)
    values = values_of(state, positive, lambda logits: logits.columns(columns))
    values = values.movedim(-1, state.class_dim).contiguous()
    return values.reshape((*values.shape[: state.class_dim], *index.shape, *values.shape[state.class_dim + 1 :]))


def expand_index(state: State, index: Any) -> list[Any]:
    """The index as one item per dimension (new axes and masks apart), if we follow all items."""
    items = list(index) if isinstance(index, tuple) else [index]
    consumed, ellipsis_at = 0, None
    for place, item in enumerate(items):
        if item is Ellipsis:
            needs(ellipsis_at is None)
            ellipsis_at = place
        elif isinstance(item, list) and all(type(i) is int for i in item):
            items[place] = torch.tensor(item, dtype=torch.int64)
            consumed += 1
        elif isinstance(item, Tensor):
            needs(item.dtype in (torch.int64, torch.int32) or (item.dtype == torch.bool and item.dim() > 0))
            if item.dim() == 0 and not torch.compiler.is_compiling():
                items[place] = int(item)  # a view, as of an int
            consumed += item.dim() if item.dtype == torch.bool else 1
        elif isinstance(item, slice) or (isinstance(item, int) and not isinstance(item, bool)):
            consumed += 1
        else:
            needs(item is None)
    missing = state.ndim - consumed
    needs(missing >= 0)
    if ellipsis_at is None:
        return items + [slice(None)] * missing
    return items[:ellipsis_at] + [slice(None)] * missing + items[ellipsis_at + 1 :]


def select(state: LazyState, dim: int, index: int) -> Any:
    return getitem(state, (*[slice(None)] * dimension(state, dim), index))


def narrow(state: LazyState, dim: int, start: int, length: int) -> Any:
    needs(isinstance(start, int) and start >= 0)
    return getitem(state, (*[slice(None)] * dimension(state, dim), slice(start, start + length)))
