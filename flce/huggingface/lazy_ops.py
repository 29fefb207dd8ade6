"""What each torch operation does to lazy logits: one function an operation, and the tables that name them.

A function takes the state and the operation's own arguments, in which other lazy logits are states as well. It
returns the new state, a tuple of states, a finished result, or NotImplemented, which asks for real logits. They
run under the compiler as well, hence the plain code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flce import private
from flce.arguments import widened
from flce.functional import cross_entropy
from flce.huggingface.elementwise import replay
from flce.huggingface.lazy_state import LazyState, StackState, State, merged_calls
from flce.huggingface.terms import BiasTerm, Product, Term

_STATES = (LazyState, StackState)


# --------------------------------------------------------------------------------------------- elementwise


def _scale(name: str) -> Callable[..., Any]:
    def handler(state: LazyState, other: Any) -> Any:
        if isinstance(other, Tensor):
            return _scale_by_tensor(state, name, other)
        if isinstance(other, bool) or not isinstance(other, (int, float)):
            return NotImplemented
        return _or_real(state.with_op(name, other))

    return handler


def _scale_by_tensor(state: LazyState, name: str, other: Tensor) -> Any:
    """A 0-d factor goes onto the products' inputs: reading it synchronises, and it may need a gradient."""
    if other.dim() != 0 or not other.is_floating_point() or not state.folded.linear:
        return NotImplemented
    scale = torch.mul if name == "mul" else torch.div
    terms: list[Term] = []
    with state.weights():
        for term in state.with_hidden(lambda hidden: scale(hidden, other)).terms:
            if isinstance(term, BiasTerm):
                terms.append(BiasTerm(scale(term.bias, other), None, term.ops))
            else:
                terms.append(term if term.bias is None else replace(term, bias=scale(term.bias, other)))
    return replace(state, terms=tuple(terms))


def _add(sign: int) -> Callable[..., Any]:
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
    right = None if signed is None else _as_terms(signed)
    return _with_terms(replace(state, calls=merged_calls(state, other)), right)


def _add_bias(state: LazyState, other: Tensor, sign: int) -> Any:
    """A tensor that is the same for every token."""
    if not _same_for_every_token(state, other) or other.device != state.device:
        return NotImplemented
    if other.dtype == torch.float64 != state.head.dtype:
        return NotImplemented  # wider than what the loss is computed in
    bias = other.reshape(-1)
    term = BiasTerm(bias, None, () if sign == 1 else (("mul", sign),))
    return _with_terms(state, (term if torch.compiler.is_compiling() else term.recorded(),))


def _with_terms(state: LazyState, more: tuple[Term, ...] | None) -> Any:
    own = _as_terms(state)
    return NotImplemented if own is None or more is None else replace(state, terms=(*own, *more), ops=())


def _as_terms(state: LazyState) -> tuple[Term, ...] | None:
    """The terms with the state's operations in them, None if a sum of terms does not allow that."""
    if not state.folded.linear:
        return None
    if not state.ops:
        return state.terms
    if len(state.terms) > 1:
        return None  # rounded after the sum, which no term alone can repeat
    (term,) = state.terms
    return (replace(term, ops=(*term.ops, *state.ops)),)


def _fill(state: LazyState, columns: Any, value: Any) -> Any:
    """Some classes' logits set to a number: their rows of the head become zero, and the bias that number.

    Costs a copy of the head. Exact, also in gradients.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or torch.compiler.is_compiling():
        return NotImplemented
    head, dtype = state.head, state.head.weight.dtype
    number = torch.tensor(value, dtype=state.dtype).double()
    if any(name != "to" for name, _ in (*state.ops, *head.ops)) or number.to(dtype).double() != number:
        return NotImplemented  # the sum of the products would not be that number
    mask = torch.zeros(state.vocab_size, dtype=torch.bool, device=state.home)
    mask[columns] = True
    with state.weights():
        return replace(state, terms=_filled_terms(state, mask, value))


def _filled_terms(state: LazyState, mask: Tensor, value: float) -> tuple[Term, ...]:
    terms: list[Term] = []
    for place, term in enumerate(state.terms):
        if isinstance(term, BiasTerm):
            terms.append(BiasTerm(term.bias.masked_fill(mask, 0.0), None, term.ops))
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


def _set_item(state: LazyState, index: Any, value: Any) -> Any:
    """``logits[..., columns] = number``."""
    items = _expand_index(state, index)
    if items is None or len(items) != state.ndim:
        return NotImplemented
    columns = items.pop(state.class_dim)
    if any(not isinstance(item, slice) or item != slice(None) for item in items) or columns is None:
        return NotImplemented
    return _fill(state, columns, value)


def _masked_fill(state: LazyState, mask: Tensor, value: Any) -> Any:
    """Masks that are the same for every token."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not _same_for_every_token(state, mask):
        return NotImplemented
    return _fill(state, mask.reshape(-1), value)


def _same_for_every_token(state: LazyState, vector: Tensor) -> bool:
    """Whether a tensor broadcasts to the logits with one entry a class, and is where the products are made."""
    vocab = state.vocab_size
    fits = 0 < vector.dim() <= state.ndim and vector.numel() == vocab == vector.shape[-1]
    return state.vocab_last and fits and vector.device == state.home


def _log_softmax(
    state: LazyState, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    if dim is None or _dim(state, dim) != state.class_dim:
        return NotImplemented
    kind = state.device.type
    if dtype is None and kind != "cpu":  # there autocast leaves it as it is
        dtype = widened(state.dtype, kind)
    state = state if dtype is None else to_dtype(state, dtype)
    return state if state is NotImplemented else _or_real(state.with_op("log_softmax"))


def _or_real(state: LazyState | None) -> Any:
    return NotImplemented if state is None else state


def _tanh(state: LazyState) -> Any:
    return _or_real(state.with_op("tanh"))


def _neg(state: LazyState) -> Any:
    return _or_real(state.with_op("mul", -1))


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    def handler(state: LazyState) -> Any:
        return to_dtype(state, dtype)

    return handler


def to_dtype(state: LazyState, dtype: torch.dtype) -> Any:
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return NotImplemented
    return state if dtype == state.dtype else _or_real(state.with_op("to", dtype))


def _to(
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


def _type_as(state: LazyState, other: Any) -> Any:
    return _to(state, other.dtype, device=other.device)


def _type(state: LazyState, dtype: Any) -> Any:
    return to_dtype(state, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


def _contiguous(state: LazyState, *, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    return state if memory_format == torch.contiguous_format else NotImplemented


def _clone(state: LazyState, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    return replace(state) if memory_format in (torch.preserve_format, torch.contiguous_format) else NotImplemented


def _detach(state: LazyState) -> LazyState:
    return state.detach()


def _reshape(state: LazyState, *shape: Any) -> Any:
    """``view`` and ``reshape`` of the token dimensions; the vocabulary stays last."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    if not shape or not state.vocab_last or not all(isinstance(size, int) for size in shape):
        return NotImplemented
    sizes, vocab = shape[:-1], state.vocab_size
    if shape[-1] == -1:
        if -1 in sizes or math.prod(sizes) != math.prod(state.shape[:-1]):
            return NotImplemented
    elif shape[-1] != vocab:
        return NotImplemented
    if torch.compiler.is_compiling() or not (vocab and _fit(sizes, math.prod(state.shape[:-1]))):
        torch.empty(state.shape, device="meta").reshape(shape)  # PyTorch's error, if it is one
    return state.with_hidden(lambda hidden: hidden.reshape(*sizes, hidden.shape[-1]), len(sizes))


def _fit(sizes: tuple[int, ...], rows: int) -> bool:
    """Whether it is plain that so many rows can be given these sizes, of which one may be -1."""
    if any(size < -1 for size in sizes):
        return False
    known = math.prod([size for size in sizes if size != -1])
    return known == rows if -1 not in sizes else sizes.count(-1) == 1 and known > 0 and rows % known == 0


def _rearranged(name: str) -> Callable[..., Any]:
    """A method that rearranges dimensions, told no sizes: done to the hidden states as it would be to the logits."""
    method = getattr(Tensor, name)
    method = method if callable(method) else method.__get__

    def handler(state: LazyState, *args: Any, **kwargs: Any) -> Any:
        def shape(size: int) -> list[int]:
            """Of what would come of logits with so many classes. Raises PyTorch's error, if it is one."""
            before = (*state.shape[: state.class_dim], size, *state.shape[state.class_dim + 1 :])
            return list(method(torch.empty(before, device="meta"), *args, **kwargs).shape)

        now, wider = shape(state.vocab_size), shape(state.vocab_size + 1)
        grown = [dim for dim, size in enumerate(now) if [size] != wider[dim : dim + 1]]
        if len(grown) != 1 or now[grown[0]] != state.vocab_size:
            return NotImplemented  # tokens and classes are in one dimension, or classes in none
        result = state.with_hidden(lambda hidden: method(hidden, *args, **kwargs), grown[0])
        if result.head.hidden is state.head.hidden:
            return state  # there was nothing to do
        same = result.ndim == len(now) and result.shape == torch.Size(now)
        return result if same else NotImplemented  # a hidden size of 1 may be squeezed away

    return handler


def _split(state: LazyState, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    sizes = split_size_or_sections if split_size is None else split_size
    return _pieces(state, dim, lambda hidden: hidden.split(sizes, dim))


def _chunk(state: LazyState, chunks: int, dim: int = 0) -> Any:
    return _pieces(state, dim, lambda hidden: hidden.chunk(chunks, dim))


def _unbind(state: LazyState, dim: int = 0) -> Any:
    return _pieces(state, dim, lambda hidden: hidden.unbind(dim), lost=1)


def _pieces(state: LazyState, dim: int, cut: Callable[[Tensor], Sequence[Tensor]], lost: int = 0) -> Any:
    """Tokens cut apart along `dim`, which the pieces may have `lost`."""
    if _dim(state, dim) == state.class_dim:
        return NotImplemented
    class_dim = state.class_dim - (lost if _dim(state, dim) < state.class_dim else 0)
    hidden = [cut(term.hidden) for term in state.terms if isinstance(term, Product)]
    pieces = [iter(together) for together in zip(*hidden, strict=True)]
    return tuple(state.with_hidden(lambda _, rest=rest: next(rest), class_dim) for rest in pieces)  # type: ignore[misc]


def _index_select(state: LazyState, dim: int, index: Tensor) -> Any:
    if _dim(state, dim) == state.class_dim:
        return NotImplemented
    return state.with_hidden(lambda hidden: hidden.index_select(dim, index))


def _getitem(state: LazyState, index: Any) -> Any:
    """Index tokens as the logits would be indexed; an index of the vocabulary takes rows of the head instead."""
    items = _expand_index(state, index)
    if items is None:
        return NotImplemented
    kept, class_item, advanced, at, class_dim = 0, slice(None), False, 0, -1
    for place, item in enumerate(items):
        if item is None:
            kept += 1
        elif at == state.class_dim:
            class_item, items[place], class_dim = item, slice(None), kept
            at, kept = at + 1, kept + 1
        elif isinstance(item, Tensor):
            if item.dtype == torch.bool and item.shape != state.shape[at : at + item.dim()]:
                return NotImplemented  # an error that is PyTorch's to raise
            advanced = True
            at += item.dim() if item.dtype == torch.bool else 1
        else:
            at += 1
            kept += isinstance(item, slice)
    if class_dim < 0 or (advanced and not state.vocab_last):
        return NotImplemented
    if isinstance(class_item, Tensor) and class_item.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    if advanced and isinstance(class_item, Tensor) and class_item.dim() > 0:
        return NotImplemented  # goes together with the tokens' index
    if any(not isinstance(item, slice) or item != slice(None) for item in items):
        selected = state.with_hidden(lambda hidden: hidden[tuple(items)], class_dim)
        state = replace(selected, class_dim=selected.ndim - 1) if advanced else selected
    if isinstance(class_item, slice):
        return replace(state) if class_item == slice(None) else _slice_classes(state, class_item)
    if isinstance(class_item, Tensor):
        return _few_classes(state, class_item)
    # A view of one class, where nothing copies: writes to it have to reach the logits.
    if advanced or torch.compiler.is_compiling():
        return _few_classes(state, torch.tensor(class_item))
    return _one_class(state, class_item)


def _slice_classes(state: LazyState, classes: slice) -> Any:
    if state.folded.normalised:
        return NotImplemented  # over the whole vocabulary
    terms: list[Term] = []
    for term in state.terms:
        if isinstance(term, BiasTerm):
            terms.append(replace(term, bias=term.bias[classes]))
        else:
            bias = None if term.bias is None else term.bias[classes]
            filled = None if term.filled is None else term.filled[classes]
            terms.append(replace(term, weight=term.weight[classes], bias=bias, filled=filled))
    sliced = replace(state, terms=tuple(terms))
    return sliced if sliced.vocab_size else NotImplemented


def _one_class(state: LazyState, index: int) -> Any:
    vocab = state.vocab_size
    if not -vocab <= index < vocab:
        return NotImplemented  # an error that is PyTorch's to raise
    one = _slice_classes(state, slice(index % vocab, index % vocab + 1))
    shape = (*state.shape[: state.class_dim], *state.shape[state.class_dim + 1 :])
    return one if one is NotImplemented else StackState((one,), 0, shape)


def _few_classes(state: LazyState, index: Tensor) -> Any:
    """The same classes of all tokens: a product with a copy of their rows of the head.

    The copy is written, and read beside the rows: from a third of the classes on, all logits cost no more.
    """
    if 3 * index.numel() >= state.vocab_size:
        return NotImplemented
    if index.device.type != "cpu" and index.device != state.device:
        return NotImplemented  # an error that is PyTorch's to raise
    values = _values(state, lambda logits: logits.columns(index.flatten())).movedim(-1, state.class_dim).contiguous()
    return values.reshape((*values.shape[: state.class_dim], *index.shape, *values.shape[state.class_dim + 1 :]))


def _values(state: LazyState, take: Callable[[LazyState], Tensor]) -> Tensor:
    """What ``take`` makes of logits, classes last. Log-probabilities are those less their logsumexp."""
    names = [name for name, _ in state.ops]
    if "log_softmax" not in names:
        return take(state.copied())
    at = names.index("log_softmax")
    logits = replace(state, ops=state.ops[:at])
    with logits.weights():
        values = (take(logits) - _lse(logits).unsqueeze(-1)).to(logits.dtype)
    # They are normalised already, and not over these few classes.
    return replay(values, tuple(op for op in state.ops[at:] if op[0] != "log_softmax"))


def _expand_index(state: State, index: Any) -> list[Any] | None:
    """The index as one item per dimension (new axes and masks apart), None if we do not follow an item."""
    items = list(index) if isinstance(index, tuple) else [index]
    consumed, ellipsis_at = 0, None
    for place, item in enumerate(items):
        if item is Ellipsis:
            if ellipsis_at is not None:
                return None
            ellipsis_at = place
        elif isinstance(item, list) and all(type(i) is int for i in item):
            items[place] = torch.tensor(item, dtype=torch.int64)
            consumed += 1
        elif isinstance(item, Tensor):
            if item.dtype not in (torch.int64, torch.int32) and (item.dim() == 0 or item.dtype != torch.bool):
                return None
            if item.dim() == 0 and not torch.compiler.is_compiling():
                items[place] = int(item)  # a view, as of an int
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


def _dim(state: State, dim: int) -> int:
    if not -state.ndim <= dim < state.ndim:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-state.ndim}, {state.ndim - 1}], but got {dim})"
        )
    return dim % state.ndim


# ------------------------------------------------------------------------------------------- values and losses


def _argmax(state: LazyState, dim: int | None = None, keepdim: bool = False) -> Any:
    folded = state.folded
    if dim is None or _dim(state, dim) != state.class_dim or folded.factor <= 0.0:
        return NotImplemented
    (largest,) = state.statistics("argmax")
    return _tokens(state, largest, keepdim)


def _logsumexp(state: LazyState, dim: Any, keepdim: bool = False) -> Any:
    if not isinstance(dim, int) or _dim(state, dim) != state.class_dim or state.folded.normalised:
        return NotImplemented
    return _tokens(state, _lse(state).to(state.dtype), keepdim)


def _lse(state: LazyState) -> Tensor:
    """Its gradient is that of ``(lse - z_k) + z_k``, a fused loss and one logit of each token: the largest."""
    with state.weights():
        lse, largest = state.statistics("lse", "argmax")
        if torch.is_grad_enabled() and state.requires_grad:
            picked = state.picked(largest.unsqueeze(-1)).squeeze(-1)
            for part in (state.cross_entropy(largest, reduction="none"), picked):
                # Nothing but a gradient: the values are rounded in other places than the sum that they make.
                lse = lse + (part - part.detach()).to(lse.dtype)
    return lse


def _gather(state: LazyState, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """Some classes of each token, whose logits or log-probabilities are made without the others."""
    if _dim(state, dim) != state.class_dim or not isinstance(index, Tensor) or sparse_grad:
        return NotImplemented
    if index.dtype != torch.int64 or index.device != state.device or index.dim() != state.ndim:
        return NotImplemented
    sizes = list(state.shape)
    sizes[state.class_dim] = count = index.shape[state.class_dim]
    # Each token's rows of the head are copied for it: more than its logits, if they are many.
    if list(index.shape) != sizes or (count > 1 and count * state.head.weight.shape[1] >= state.vocab_size):
        return NotImplemented
    on_cpu = index.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and bool(((index < 0) | (index >= state.vocab_size)).any()):
        return NotImplemented  # an error that is PyTorch's to raise; -100 would mean "ignore" below
    if count != 1 or not state.folded.normalised:
        index = index.movedim(state.class_dim, -1)
        values = _values(state, lambda logits: logits.picked(index))
        if count == 1:
            return _tokens(state, values.squeeze(-1), keepdim=True)
        return values.movedim(-1, state.class_dim).contiguous()
    target = index.squeeze(state.class_dim)
    loss = state.cross_entropy(target, reduction="none")
    return _tokens(state, (loss * -state.folded.factor).to(state.dtype), keepdim=True)


def _take_along_dim(state: LazyState, indices: Tensor, dim: int | None = None) -> Any:
    """``gather`` of indices that are broadcast over the tokens."""
    if dim is None or not isinstance(indices, Tensor) or indices.dim() != state.ndim:
        return NotImplemented
    sizes = [-1 if at == _dim(state, dim) else size for at, size in enumerate(state.shape)]
    if any(given not in (1, size) for given, size in zip(indices.shape, sizes, strict=True) if size != -1):
        return NotImplemented
    return _gather(state, dim, indices.expand(sizes))


def _sum(state: LazyState, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Of log-probabilities over the vocabulary: the cross entropy with a uniform distribution, times -V."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or _dim(state, dim) != state.class_dim or not state.folded.normalised:
        return NotImplemented
    state = state if dtype is None else to_dtype(state, dtype)
    if state is NotImplemented:
        return NotImplemented
    # Any target would do, but for one whose logit is -inf.
    with state.weights():
        (target,) = state.statistics("argmax")
        loss = state.cross_entropy(target, reduction="none", label_smoothing=1.0)
    return _tokens(state, (loss * (-state.folded.factor * state.vocab_size)).to(state.dtype), keepdim)


def _tokens(state: LazyState, values: Tensor, keepdim: bool) -> Tensor:
    return values.unsqueeze(state.class_dim) if keepdim else values


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
        reduction = private.legacy_reduction(size_average, reduce)
    if not isinstance(target, Tensor) or state.folded.factor != 1.0 or state.class_dim != min(1, state.ndim - 1):
        return NotImplemented
    if target.device != state.device or getattr(weight, "device", state.device) != state.device:
        return NotImplemented
    if weight is not None and not isinstance(weight, Tensor):
        return NotImplemented
    sizes = list(state.shape)
    del sizes[state.class_dim]
    # Class probabilities are as large as the logits themselves: nothing is saved by doing without those.
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
    if not state.folded.normalised:
        return NotImplemented
    return _cross_entropy(state, target, weight, size_average, ignore_index, reduce, reduction)


def _own_cross_entropy(
    state: LazyState,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    inplace: bool = False,
    process_group: Any = None,
    vocab_size: int | None = None,
    **spec: Any,
) -> Any:
    """:func:`flce.cross_entropy`. There is nothing that ``inplace`` could save."""
    if process_group is not None or vocab_size is not None or not isinstance(target, Tensor):
        return NotImplemented
    scaled: LazyState | None = state if logit_scale == 1.0 else state.with_op("mul", logit_scale)
    if softcap is not None:
        for name, value in (("div", softcap), ("tanh", None), ("mul", softcap)):
            scaled = None if scaled is None else scaled.with_op(name, value)
    if scaled is None or scaled.folded.factor != 1.0 or not scaled.vocab_last or target.is_floating_point():
        return NotImplemented
    with scaled.weights():
        output = scaled.fused(target, weight, **spec)
    wide = torch.float64 if state.dtype == torch.float64 else torch.float32
    loss = output if isinstance(output, Tensor) else output.loss
    return output if (loss.dtype, loss.device) == (wide, state.device) else NotImplemented


# ------------------------------------------------------------------------------------------ several together


def _stack(parts: Sequence[Any], dim: int = 0) -> Any:
    if not all(isinstance(part, LazyState) for part in parts):
        return NotImplemented
    first = parts[0]
    if any((p.shape, p.dtype, p.device) != (first.shape, first.dtype, first.device) for p in parts):
        return NotImplemented
    return StackState(tuple(parts), dim % (first.ndim + 1))


def _cat(parts: Sequence[Any], dim: int = 0) -> Any:
    """Tokens after tokens of one head, or classes after classes for the same tokens.

    The latter costs a copy of the heads.
    """
    first = parts[0]
    if not all(isinstance(part, LazyState) and len(part.terms) == 1 for part in parts):
        return NotImplemented
    if any(replace(p, terms=first.terms) != first or p.head.ops != first.head.ops for p in parts):
        return NotImplemented
    terms = [part.head for part in parts]
    first = replace(first, terms=tuple(terms), calls=merged_calls(*parts))
    with first.weights():
        return _joined(replace(first, terms=(terms[0],)), terms, dim)


def _joined(first: LazyState, terms: Sequence[Product], dim: int) -> Any:
    if _dim(first, dim) != first.class_dim:
        if not all(_same(term.weight, terms[0].weight) and _same(term.bias, terms[0].bias) for term in terms):
            return NotImplemented
        return first.with_hidden(lambda _: torch.cat([term.hidden for term in terms], dim))
    if first.folded.normalised or any(not _same(term.hidden, terms[0].hidden) for term in terms):
        return NotImplemented
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


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are one, or recorded or detached from one."""
    if a is b or a is None or b is None or torch.compiler.is_compiling():
        return a is b
    if a.requires_grad or b.requires_grad:  # their gradients have to go to the same place, too
        leaf = a._base
        if leaf is None or leaf is not b._base or not leaf.is_leaf or a.requires_grad != b.requires_grad:
            return False
    places = [(x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype) for x in (a, b)]
    return places[0] == places[1]


def _stack_getitem(state: StackState, index: Any) -> Any:
    items = _expand_index(state, index)
    if state.viewed_as is not None or items is None or len(items) != state.ndim:
        return NotImplemented
    which = items.pop(state.dim)
    if isinstance(which, int):
        return _getitem(state.part(which), tuple(items))
    if not isinstance(which, slice) or not all(isinstance(item, slice) for item in items):
        return NotImplemented
    parts = tuple(_getitem(state.part(i), tuple(items)) for i in range(len(state.parts))[which])
    return NotImplemented if not parts or NotImplemented in parts else replace(state, parts=parts)


def _stack_select(state: StackState, dim: int, index: int) -> Any:
    return _stack_getitem(state, (*[slice(None)] * _dim(state, dim), index))


def _stack_unbind(state: StackState, dim: int = 0) -> Any:
    return tuple(_stack_select(state, dim, i) for i in range(state.shape[_dim(state, dim)]))


def _stack_reshape(state: StackState, *shape: Any) -> Any:
    """Put off until somebody reads the logits."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    known, total = math.prod(size for size in shape if size != -1), math.prod(state.shape)
    if shape.count(-1) > 1 or known == 0 or total % known or (-1 not in shape and known != total):
        return NotImplemented
    return replace(state, viewed_as=tuple(total // known if size == -1 else size for size in shape))


# ------------------------------------------------------------------------------------------------------- the table


def functions(names: str) -> list[Callable[..., Any]]:
    """The functions, methods and getters of PyTorch with these names, as ``__torch_function__`` is given them."""
    found = [getattr(Tensor, name, None) for name in names.split()]
    plain = [name for name in names.split() if not name.startswith("__")]  # Python gives modules the others, too
    found += [getattr(home, name, None) for name in plain for home in (torch, F, torch.special)]
    found = [member if callable(member) else getattr(member, "__get__", None) for member in found]
    return [member for member in found if member is not None and not isinstance(member, type)]


class Operation(NamedTuple):
    """What one function of PyTorch does to lazy logits.

    Attributes:
        of_logits: takes the state and the function's other arguments; of ``"join"`` the sequence of states.
        of_stack: the same for a :class:`StackState`; None: real logits are needed.
        kind: ``"new"``: the result has memory of its own. ``"elementwise"``: and the strides of the logits. ``"view"``:
            it shares the logits' memory, so that a write to one shows in the other. ``"in place"``: the result is what
            the logits become. ``"join"``: the first argument is a sequence of lazy logits.
    """

    of_logits: Callable[..., Any]
    of_stack: Callable[..., Any] | None = None
    kind: Literal["new", "elementwise", "view", "in place", "join"] = "new"


def _of_each(run: Callable[..., Any]) -> Callable[..., Any]:
    def handler(state: StackState, *args: Any, **kwargs: Any) -> Any:
        parts = tuple(run(part, *args, **kwargs) for part in state.parts)
        if state.viewed_as is not None or NotImplemented in parts:
            return NotImplemented
        nothing_done = all(new is old for new, old in zip(parts, state.parts, strict=True))
        return state if nothing_done else replace(state, parts=parts)

    return handler


_TABLE: dict[str, Operation] = {
    "view reshape": Operation(_reshape, _stack_reshape, "view"),
    "split": Operation(_split, None, "view"),
    "chunk": Operation(_chunk, None, "view"),
    "unbind": Operation(_unbind, _stack_unbind, "view"),
    "index_select": Operation(_index_select),
    "__getitem__": Operation(_getitem, _stack_getitem, "view"),
    "select": Operation(_select, _stack_select, "view"),
    "narrow": Operation(_narrow, None, "view"),
    "detach data": Operation(_detach, _of_each(_detach), "view"),
    "contiguous": Operation(_contiguous, _of_each(_contiguous)),
    "clone": Operation(_clone, None, "elementwise"),
    "to": Operation(_to, _of_each(_to), "elementwise"),
    "cpu": Operation(lambda state: _to(state, "cpu"), None, "elementwise"),
    "type": Operation(_type, None, "elementwise"),
    "type_as": Operation(_type_as, None, "elementwise"),
    "float": Operation(_cast(torch.float32), _of_each(_cast(torch.float32)), "elementwise"),
    "double": Operation(_cast(torch.float64), None, "elementwise"),
    "half": Operation(_cast(torch.float16), None, "elementwise"),
    "bfloat16": Operation(_cast(torch.bfloat16), None, "elementwise"),
    "mul multiply __mul__ __rmul__": Operation(_scale("mul"), None, "elementwise"),
    "div divide true_divide __truediv__": Operation(_scale("div"), None, "elementwise"),
    "add __add__ __radd__": Operation(_add(1), None, "elementwise"),
    "sub subtract __sub__": Operation(_add(-1), None, "elementwise"),
    "neg negative __neg__": Operation(_neg, None, "elementwise"),
    "tanh": Operation(_tanh, None, "elementwise"),
    "log_softmax": Operation(_log_softmax),
    "masked_fill": Operation(_masked_fill, None, "elementwise"),
    "argmax": Operation(_argmax),
    "logsumexp": Operation(_logsumexp),
    "gather": Operation(_gather),
    "take_along_dim": Operation(_take_along_dim),
    "sum": Operation(_sum),
    "cross_entropy": Operation(_cross_entropy),
    "nll_loss": Operation(_nll_loss),
    "stack": Operation(_stack, None, "join"),
    "cat concat concatenate": Operation(_cat, None, "join"),
    "__setitem__": Operation(_set_item, None, "in place"),
    "masked_fill_": Operation(_masked_fill, None, "in place"),
    "mul_ multiply_ __imul__": Operation(_scale("mul"), None, "in place"),
    "div_ divide_ true_divide_ __itruediv__": Operation(_scale("div"), None, "in place"),
    "add_ __iadd__": Operation(_add(1), None, "in place"),
    "sub_ subtract_ __isub__": Operation(_add(-1), None, "in place"),
    "neg_ negative_": Operation(_neg, None, "in place"),
    "tanh_": Operation(_tanh, None, "in place"),
}

for _name in "flatten permute transpose mT swapaxes swapdims movedim moveaxis squeeze unsqueeze".split():  # noqa: SIM905
    _TABLE[_name] = Operation(_rearranged(_name), None, "view")

OPERATIONS = {function: operation for names, operation in _TABLE.items() for function in functions(names)}
OPERATIONS[cross_entropy] = Operation(_own_cross_entropy)

COMMUTES = frozenset(functions("mul multiply __mul__ add __add__"))
# Answered by lazy logits themselves, which know their shape, dtype and device.
METADATA = frozenset(
    functions("""
    shape dtype device layout ndim requires_grad is_leaf grad names itemsize nbytes
    is_cpu is_cuda is_mps is_xpu is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_xla
    is_ipu is_maia is_vulkan size dim ndimension numel nelement stride storage_offset is_contiguous
    element_size is_floating_point is_complex is_signed is_inference get_device __len__ _version
    is_same_size is_conj is_neg is_shared _base _is_view retains_grad
    """)
)
# Ask for the logits' place in the autograd graph.
GRAPH = frozenset(functions("grad_fn register_hook retain_grad register_post_accumulate_grad_hook"))
# Make a new tensor of their first argument's shape, dtype or device, without reading it.
LIKE = frozenset(functions("empty_like zeros_like ones_like full_like rand_like randn_like randint_like"))
NEW = frozenset(functions("new_empty new_zeros new_ones new_full new_tensor"))
# Read no more than the shape, dtype or device of their second argument.
AS = frozenset(functions("to type_as view_as expand_as reshape_as"))


# Do not change their arguments, make memory of their own, do not ask for their place in the graph.
READING = frozenset(
    function
    for function in functions("""
    all any amin amax aminmax argmin argmax max min sum nansum mean nanmean std var std_mean var_mean median nanmedian
    mode prod norm quantile nanquantile logsumexp cumsum cumprod logcumsumexp topk sort argsort kthvalue count_nonzero
    nonzero unique histc bincount multinomial bernoulli softmax log_softmax softmin sigmoid logsigmoid exp exp2 expm1
    log log2 log10 log1p sqrt rsqrt square abs absolute sign reciprocal pow float_power clamp clip clamp_min clamp_max
    nan_to_num round floor ceil tanh sin cos relu gelu silu softplus elu neg negative isnan isfinite isinf isposinf
    isneginf eq equal ne not_equal lt less le less_equal gt greater ge greater_equal allclose isclose maximum minimum
    fmax fmin where masked_fill masked_select index_select gather take_along_dim add sub subtract mul multiply div
    divide true_divide rsub remainder fmod lerp addcmul addcdiv outer dot mv mm bmm matmul linear cat concat
    concatenate stack hstack vstack clone diff dist cdist cosine_similarity normalize layer_norm gumbel_softmax
    cross_entropy nll_loss kl_div mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits
    margin_ranking_loss __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__
    __floordiv__ __mod__ __pow__ __rpow__ __neg__ __abs__ __matmul__ __rmatmul__ __invert__ __eq__ __ne__ __lt__
    __le__ __gt__ __ge__ __contains__ __bool__ __int__ __float__ __index__ __format__ __repr__ item tolist scatter
    scatter_add index_fill repeat repeat_interleave tile roll flip inner addmm baddbmm logaddexp xlogy expit entr
    logical_not bucketize isin msort soft_margin_loss poisson_nll_loss gaussian_nll_loss multi_margin_loss
    hinge_embedding_loss triplet_margin_loss dstack column_stack int long bool leaky_relu
    """)
    if "inplace" not in getattr(getattr(function, "__code__", None), "co_varnames", ())
)
