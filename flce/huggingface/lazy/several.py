"""Operations on several lazy logits: stack and cat, and what can be done to a stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.lazy.fold import needs
from flce.huggingface.lazy.indexing import expand_index, getitem
from flce.huggingface.lazy.state import LazyState, StackState, dimension, merged_calls
from flce.huggingface.lazy.terms import Product, same


def stack(parts: Sequence[Any], dim: int = 0) -> Any:
    needs(all(isinstance(part, LazyState) for part in parts))
    first = parts[0]
    needs(all((p.shape, p.dtype, p.device) == (first.shape, first.dtype, first.device) for p in parts))
    return StackState(tuple(parts), dim % (first.ndim + 1))


def cat(parts: Sequence[Any], dim: int = 0) -> Any:
    """Tokens after tokens of one head, or classes after classes for the same tokens.

    The latter costs a copy of the heads.
    """
    first = parts[0]
    needs(all(isinstance(part, LazyState) and len(part.terms) == 1 and not part.rows for part in parts))
    needs(all(replace(p, terms=first.terms) == first and p.head.ops == first.head.ops for p in parts))
    terms = [part.head for part in parts]
    first = replace(first, terms=tuple(terms), calls=merged_calls(*parts))
    with first.weights():
        return _joined(replace(first, terms=(terms[0],)), terms, dim)


def _joined(first: LazyState, terms: Sequence[Product], dim: int) -> Any:
    if dimension(first, dim) != first.class_dim:
        needs(all(same(term.weight, terms[0].weight) and same(term.bias, terms[0].bias) for term in terms))
        return first.with_hidden(lambda _: torch.cat([term.hidden for term in terms], dim))
    needs(first.folded.form == "logits" and all(same(term.hidden, terms[0].hidden) for term in terms))
    terms = [term.whole() for term in terms]
    vectors: list[Tensor | None] = []
    for name, dtype in (("bias", terms[0].weight.dtype), ("filled", torch.bool)):
        pieces = [getattr(term, name) for term in terms]
        if all(piece is None for piece in pieces):
            vectors.append(None)
            continue
        zeros = (term.weight.new_zeros(term.weight.shape[0], dtype=dtype) for term in terms)
        vectors.append(torch.cat([zero if piece is None else piece for piece, zero in zip(pieces, zeros, strict=True)]))
    bias, filled = vectors
    weight = torch.cat([term.weight for term in terms])
    return replace(first, terms=(replace(terms[0], weight=weight, bias=bias, filled=filled),))


def stack_getitem(state: StackState, index: Any) -> Any:
    items = expand_index(state, index)
    needs(state.viewed_as is None and len(items) == state.ndim)
    which = items.pop(state.dim)
    if isinstance(which, int):
        return getitem(state.part(which), tuple(items))
    needs(all(isinstance(item, slice) for item in (which, *items)))
    parts = tuple(getitem(state.part(i), tuple(items)) for i in range(len(state.parts))[which])
    needs(bool(parts))
    return replace(state, parts=parts)


def stack_select(state: StackState, dim: int, index: int) -> Any:
    return stack_getitem(state, (*[slice(None)] * dimension(state, dim), index))


def stack_unbind(state: StackState, dim: int = 0) -> Any:
    return tuple(stack_select(state, dim, i) for i in range(state.shape[dimension(state, dim)]))


def stack_reshape(state: StackState, *shape: Any) -> Any:
    """Done when the logits are read."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    known, total = math.prod(size for size in shape if size != -1), math.prod(state.shape)
    needs(shape.count(-1) < 2 and known != 0 and total % known == 0 and (-1 in shape or known == total))
    return replace(state, viewed_as=tuple(total // known if size == -1 else size for size in shape))


def of_each(run: Callable[..., Any]) -> Callable[..., Any]:
    def handler(state: StackState, *args: Any, **kwargs: Any) -> Any:
        needs(state.viewed_as is None)
        parts = tuple(run(part, *args, **kwargs) for part in state.parts)
        nothing_done = all(new is old for new, old in zip(parts, state.parts, strict=True))
        return state if nothing_done else replace(state, parts=parts)

    return handler
