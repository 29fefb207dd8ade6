"""What logits are sums of: matrix products, and vectors that were added to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.lazy.fold import Op, fold
from flce.huggingface.staleness import Watched


@dataclass(frozen=True)
class Product:
    """One matrix product, and what was done to it before it was added to others.

    Attributes:
        hidden: the logits' shape, with the hidden size H in place of the vocabulary V. Everything that
            happens to the token dimensions of the logits happens to this tensor.
        weight: ``(V, H)``.
        bias: ``(V,)`` or None.
        dtype: the product's.
        watched: the hidden states at the call, if `hidden` is or views them; None: nothing else can change `hidden`.
            The head's call watches its parameters.
        ops: factors and casts.
        filled: ``(V,)`` bool, the classes whose rows of the weight were replaced by zeros, and their bias by a number;
            their logits get no gradient. None: no class.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    watched: Watched | None = field(default=None, compare=False, repr=False)
    ops: tuple[Op, ...] = ()
    filled: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.hidden, self.weight) if self.bias is None else (self.hidden, self.weight, self.bias)

    @property
    def factor(self) -> float:
        return _factor(self.ops)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Product:
        """The term on other tensors, which are not changed in place."""
        bias = None if self.bias is None else tensors[2]
        return replace(self, hidden=tensors[0], weight=tensors[1], bias=bias, watched=None)

    def with_hidden(self, hidden: Tensor) -> Product:
        """After an operation on the token dimensions, which made ``hidden`` of the hidden states."""
        watched = self.watched
        if watched is not None and not _same_memory(hidden, self.hidden):
            watched = watched.of_a_copy()
        return replace(self, hidden=hidden, watched=watched)

    def detach(self) -> Product:
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)

    def recorded(self) -> Product:
        """The term as it is now, whatever later becomes of its tensors' ``requires_grad``."""
        hidden, weight = recorded(self.hidden), recorded(self.weight)
        bias = None if self.bias is None else recorded(self.bias)
        watched = Watched(hidden, "the hidden states were")
        return replace(self, hidden=hidden, weight=weight, bias=bias, watched=watched)


@dataclass(frozen=True)
class BiasTerm:
    """A vector that was added to the logits of every token, as it was: it may be wider than they are.

    Attributes:
        bias: ``(V,)``.
        watched: the same vector; None: nothing else can change it.
        ops: factors and casts.
    """

    bias: Tensor
    watched: Watched | None = field(default=None, compare=False, repr=False)
    ops: tuple[Op, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.bias.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bias,)

    @property
    def factor(self) -> float:
        return _factor(self.ops)

    def with_tensors(self, tensors: Sequence[Tensor]) -> BiasTerm:
        return replace(self, bias=tensors[0], watched=None)

    def detach(self) -> BiasTerm:
        return replace(self, bias=self.bias.detach())

    def recorded(self) -> BiasTerm:
        """The vector as it is now, as a product is recorded."""
        bias = recorded(self.bias)
        return replace(self, bias=bias, watched=Watched(bias, "a vector that was added to the logits was"))


Term = Product | BiasTerm


def dealt_out(pieces: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The pieces on other tensors, which are dealt out in their order."""
    rest = iter(tensors)
    return tuple(piece.with_tensors([next(rest) for _ in piece.tensors]) for piece in pieces)


def recorded(tensor: Tensor) -> Tensor:
    """The same memory, at the place in the autograd graph that the tensor has now.

    A leaf's ``requires_grad`` may be changed later, as PEFT's ``disable_adapter()`` does for a while. Stock's logits
    have recorded by then whether it needs a gradient. The alias shares the leaf's version, and its storage also where a
    wrapper frees that and fills it again.
    """
    if not tensor.is_leaf:
        return tensor
    return tensor.view_as(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor.detach()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _factor(ops: tuple[Op, ...]) -> float:
    folded = fold(ops)
    assert folded is not None
    return folded.logit_scale
