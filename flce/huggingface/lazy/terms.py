"""What logits are sums of: matrix products, and vectors that were added to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.lazy.normal_form import Op, to_normal_form
from flce.huggingface.partitioned import is_partitioned, make_stand_in, resolve_stand_in, stand_in_parameters
from flce.huggingface.staleness import TensorSnapshot

TENSOR_NAMES = ("hidden", "weight", "bias")


@dataclass(frozen=True)
class Term:
    """One summand of logits: a matrix product, or a vector that was added to the logits of every token.

    Attributes:
        hidden: the logits' shape, with the hidden size H in place of the vocabulary V. Everything that
            happens to the token dimensions of the logits happens to this tensor. None of a vector.
        weight: ``(V, H)``; None of a vector.
        bias: ``(V,)``, of a product or by itself, where it may be wider than the logits; or None.
        ops: factors and casts, before the term was added to others.
        snapshot: the first of `tensors` as it was at the call, if that or a view of it is the term's; None: nothing
        else
            can change it. The head's call watches its parameters.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    ops: tuple[Op, ...] = ()
    snapshot: TensorSnapshot | None = field(default=None, compare=False, repr=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple([x for x in (self.hidden, self.weight, self.bias) if x is not None])

    @property
    def factor(self) -> float:
        normal_form = to_normal_form(self.ops)
        assert normal_form is not None
        return normal_form.logit_scale

    def map_tensors(self, function: Callable[[Tensor], Tensor], *names: str, **others: Any) -> Term:
        """The term with ``function`` done to the tensors of these names, those that there are; others replaced."""
        for name in names:
            tensor = getattr(self, name)
            if tensor is not None:
                others[name] = function(tensor)
        return replace(self, **others)

    def with_tensors(self, tensors: Iterator[Tensor]) -> Term:
        """The term on the next of other tensors, which are not changed in place."""
        return self.map_tensors(lambda _: next(tensors), *TENSOR_NAMES, snapshot=None)

    def with_hidden(self, function: Callable[[Tensor], Tensor]) -> Term:
        """The term after an operation on the token dimensions."""
        if self.hidden is None:
            return self
        hidden, snapshot = function(self.hidden), self.snapshot
        if snapshot is not None and hidden.untyped_storage()._cdata != self.hidden.untyped_storage()._cdata:
            snapshot = snapshot.for_copy()
        return replace(self, hidden=hidden, snapshot=snapshot)

    def detach(self) -> Term:
        return self.map_tensors(Tensor.detach, *TENSOR_NAMES)

    def resolve_stand_ins(self) -> Term:
        """The term with the values of parameters that are only gathered for a while, which they have to be now."""
        return self.map_tensors(resolve_stand_in, "weight", "bias") if stand_in_parameters(self.tensors) else self

    def with_snapshot(self) -> Term:
        """The term as it is now, whatever later becomes of its tensors' ``requires_grad``."""
        now = [alias_in_graph(tensor) for tensor in self.tensors]
        what = "a vector that was added to the logits was" if self.hidden is None else "the hidden states were"
        return replace(self.with_tensors(iter(now)), snapshot=TensorSnapshot(now[0], what))


def alias_in_graph(tensor: Tensor) -> Tensor:
    """The same memory, at the place in the autograd graph that the tensor has now.

    A leaf's ``requires_grad`` may be changed later, as PEFT's ``disable_adapter()`` does for a while. Stock's logits
    have recorded by then whether it needs a gradient. The alias shares the leaf's version, and its storage also where a
    wrapper frees that and fills it again. Of a parameter of ZeRO-3 it is a stand-in.
    """
    if not tensor.is_leaf:
        return tensor
    alias = tensor.view_as(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor.detach()
    return make_stand_in(alias, tensor) if is_partitioned(tensor) else alias


def in_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, within :meth:`LazyState.gathered_weights`."""
    return tensor if tensor.dtype == torch.float32 else resolve_stand_in(tensor).float()
