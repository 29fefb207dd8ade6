"""What logits are sums of: matrix products, and vectors that were added to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.lazy.fold import Op, fold
from flce.huggingface.partitioned import is_partitioned, parameters_of, stand_in, whole
from flce.huggingface.staleness import Watched

TENSORS = ("hidden", "weight", "bias")


@dataclass(frozen=True)
class Term:
    """One summand of logits: a matrix product, or a vector that was added to the logits of every token.

    Attributes:
        hidden: the logits' shape, with the hidden size H in place of the vocabulary V. Everything that
            happens to the token dimensions of the logits happens to this tensor. None of a vector.
        weight: ``(V, H)``; None of a vector.
        bias: ``(V,)``, of a product or by itself, where it may be wider than the logits; or None.
        ops: factors and casts, before the term was added to others.
        watched: the first of `tensors` as it was at the call, if that or a view of it is the term's; None: nothing else
            can change it. The head's call watches its parameters.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    ops: tuple[Op, ...] = ()
    watched: Watched | None = field(default=None, compare=False, repr=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple([x for x in (self.hidden, self.weight, self.bias) if x is not None])

    @property
    def factor(self) -> float:
        folded = fold(self.ops)
        assert folded is not None
        return folded.logit_scale

    def changed(self, function: Callable[[Tensor], Tensor], *names: str, **others: Any) -> Term:
        """The term with ``function`` done to the tensors of these names, those that there are; others replaced."""
        for name in names:
            tensor = getattr(self, name)
            if tensor is not None:
                others[name] = function(tensor)
        return replace(self, **others)

    def with_tensors(self, tensors: Iterator[Tensor]) -> Term:
        """The term on the next of other tensors, which are not changed in place."""
        return self.changed(lambda _: next(tensors), *TENSORS, watched=None)

    def with_hidden(self, function: Callable[[Tensor], Tensor]) -> Term:
        """The term after an operation on the token dimensions."""
        if self.hidden is None:
            return self
        hidden, watched = function(self.hidden), self.watched
        if watched is not None and hidden.untyped_storage()._cdata != self.hidden.untyped_storage()._cdata:
            watched = watched.of_a_copy()
        return replace(self, hidden=hidden, watched=watched)

    def detach(self) -> Term:
        return self.changed(Tensor.detach, *TENSORS)

    def whole(self) -> Term:
        """The term with the values of parameters that are only gathered for a while, which they have to be now."""
        return self.changed(whole, "weight", "bias") if parameters_of(self.tensors) else self

    def recorded(self) -> Term:
        """The term as it is now, whatever later becomes of its tensors' ``requires_grad``."""
        now = [recorded(tensor) for tensor in self.tensors]
        what = "a vector that was added to the logits was" if self.hidden is None else "the hidden states were"
        return replace(self.with_tensors(iter(now)), watched=Watched(now[0], what))


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
