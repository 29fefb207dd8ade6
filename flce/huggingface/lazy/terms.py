"""What logits are sums of: matrix products, and vectors that were added to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from flce.huggingface.lazy.fold import Op, fold
from flce.huggingface.partitioned import is_partitioned, parameters_of, stand_in, whole
from flce.huggingface.staleness import Watched

TENSORS = ("hidden", "weight", "bias")


@dataclass(frozen=True)
class Term:
    """One summand of logits.

    Attributes:
        watched: the first of `tensors` as it was at the call, if that or a view of it is the term's; None: nothing else
            can change it. The head's call watches its parameters.
        ops: factors and casts, before the term was added to others.
    """

    watched: Watched | None = field(default=None, compare=False, repr=False, kw_only=True)
    ops: tuple[Op, ...] = field(default=(), kw_only=True)
    what: ClassVar[str]
    """What is watched, for messages."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    @property
    def factor(self) -> float:
        folded = fold(self.ops)
        assert folded is not None
        return folded.logit_scale

    def changed(self, function: Callable[[Tensor], Tensor], *names: str, **others: Any) -> Self:
        """The term with ``function`` done to the tensors of these names, those that there are; others replaced."""
        for name in names:
            tensor = getattr(self, name, None)
            if tensor is not None:
                others[name] = function(tensor)
        return replace(self, **others)

    def with_tensors(self, tensors: Iterator[Tensor]) -> Self:
        """The term on the next of other tensors, which are not changed in place."""
        return self.changed(lambda _: next(tensors), *TENSORS, watched=None)

    def detach(self) -> Self:
        return self.changed(Tensor.detach, *TENSORS)

    def whole(self) -> Self:
        """The term with the values of parameters that are only gathered for a while, which they have to be now."""
        return self.changed(whole, "weight", "bias") if parameters_of(self.tensors) else self

    def recorded(self) -> Self:
        """The term as it is now, whatever later becomes of its tensors' ``requires_grad``."""
        now = [recorded(tensor) for tensor in self.tensors]
        rest = iter(now)
        return self.changed(lambda _: next(rest), *TENSORS, watched=Watched(now[0], self.what))


@dataclass(frozen=True)
class Product(Term):
    """One matrix product, and what was done to it before it was added to others.

    Attributes:
        hidden: the logits' shape, with the hidden size H in place of the vocabulary V. Everything that
            happens to the token dimensions of the logits happens to this tensor.
        weight: ``(V, H)``.
        bias: ``(V,)`` or None.
        dtype: the product's.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    what = "the hidden states were"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.hidden, self.weight) if self.bias is None else (self.hidden, self.weight, self.bias)

    def with_hidden(self, hidden: Tensor) -> Product:
        """After an operation on the token dimensions, which made ``hidden`` of the hidden states."""
        watched = self.watched
        if watched is not None and hidden.untyped_storage()._cdata != self.hidden.untyped_storage()._cdata:
            watched = watched.of_a_copy()
        return replace(self, hidden=hidden, watched=watched)


@dataclass(frozen=True)
class BiasTerm(Term):
    """A vector that was added to the logits of every token, as it was: it may be wider than they are.

    Attributes:
        bias: ``(V,)``.
    """

    bias: Tensor
    what = "a vector that was added to the logits was"

    @property
    def dtype(self) -> torch.dtype:
        return self.bias.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bias,)


def recorded(tensor: Tensor) -> Tensor:
    """The same memory, at the place in the autograd graph that the tensor has now.

    A leaf's ``requires_grad`` may be changed later, as PEFT's ``disable_adapter()`` does for a while. Stock's logits
    have recorded by then whether it needs a gradient. The alias shares the leaf's version, and its storage also where a
    wrapper frees that and fills it again. Of a parameter of ZeRO-3 it is a stand-in.
    """
    if not tensor.is_leaf:
        return tensor
    alias = tensor.view_as(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor.detach()
    return stand_in(alias, tensor) if is_partitioned(tensor) else alias


def in_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, within :meth:`LazyState.weights`."""
    return tensor if tensor.dtype == torch.float32 else whole(tensor).float()


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are one, or recorded or detached from one."""
    if a is b or a is None or b is None or torch.compiler.is_compiling():
        return a is b
    if a.requires_grad or b.requires_grad:  # their gradients have to go to the same place, too
        base = a._base
        if base is None or base is not b._base or a.requires_grad != b.requires_grad:
            return False
    places = [(x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype) for x in (a, b)]
    return places[0] == places[1]


def same_sum(terms: tuple[Term, ...], others: tuple[Term, ...]) -> bool:
    """Whether two sums of terms are one, or recorded or detached from one."""
    return len(terms) == len(others) and all(_same_term(*both) for both in zip(terms, others, strict=True))


def _same_term(term: Term, other: Term) -> bool:
    if type(term) is not type(other) or term.ops != other.ops or len(term.tensors) != len(other.tensors):
        return False
    return all(same(*both) for both in zip(term.tensors, other.tensors, strict=True))
