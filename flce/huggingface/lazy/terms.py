"""`Term`: one summand of logits, a matrix product or an added vector. `state` and `elementwise` create terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.lazy.normal_form import Op, to_normal_form
from flce.huggingface.staleness import TensorSnapshot
from flce.huggingface.wrappers import is_partitioned, make_stand_in, resolve_stand_in, stand_in_parameters

TENSOR_NAMES = ("hidden", "weight", "bias")


@dataclass(frozen=True)
class Term:
    """One summand of logits: a matrix product, or a vector that was added to the logits of every token.

    Attributes:
        hidden: hidden states ``(..., H)`` with the token dimensions of the logits ``(..., V)``. Operations on the token
            dimensions of the logits are applied to this tensor. None for a vector.
        weight: ``(V, H)``; None for a vector.
        bias: ``(V,)``: the bias of the product, or the vector, whose dtype may be wider than the logits'; or None.
        ops: factors and casts that were applied before the term was added to others.
        snapshot: the snapshot of the first of `tensors` at the call; None if `tensors` has a copy, which other code
            cannot change. The `HeadCall` has the snapshots of the head's parameters.
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
        """Return the term with ``function`` applied to the named tensors that exist, and with other fields replaced."""
        for name in names:
            tensor = getattr(self, name)
            if tensor is not None:
                others[name] = function(tensor)
        return replace(self, **others)

    def with_tensors(self, tensors: Iterator[Tensor]) -> Term:
        """Return the term with the next of other tensors, which nothing changes in place."""
        return self.map_tensors(lambda _: next(tensors), *TENSOR_NAMES, snapshot=None)

    def with_hidden(self, function: Callable[[Tensor], Tensor]) -> Term:
        """Return the term after an operation on the token dimensions."""
        if self.hidden is None:
            return self
        hidden, snapshot = function(self.hidden), self.snapshot
        if snapshot is not None and hidden.untyped_storage()._cdata != self.hidden.untyped_storage()._cdata:
            snapshot = snapshot.for_copy()
        return replace(self, hidden=hidden, snapshot=snapshot)

    def detach(self) -> Term:
        return self.map_tensors(Tensor.detach, *TENSOR_NAMES)

    def resolve_stand_ins(self) -> Term:
        """Return the term with gathered ZeRO-3 parameters instead of their stand-ins."""
        return self.map_tensors(resolve_stand_in, "weight", "bias") if stand_in_parameters(self.tensors) else self

    def with_snapshot(self) -> Term:
        """Return the term with a snapshot, and with aliases that have the present ``requires_grad`` of its tensors."""
        aliases = [alias_in_graph(tensor) for tensor in self.tensors]
        name = "a vector that was added to the logits was" if self.hidden is None else "the hidden states were"
        return replace(self.with_tensors(iter(aliases)), snapshot=TensorSnapshot(aliases[0], name))


def alias_in_graph(tensor: Tensor) -> Tensor:
    """Return an alias of a leaf with the leaf's present ``requires_grad``, or the tensor if it is not a leaf.

    The ``requires_grad`` of a leaf may change later: PEFT's ``disable_adapter()`` changes it for a while. Stock logits
    record at the call whether the leaf needs a gradient. The alias shares the version and the storage of the leaf, even
    if a wrapper frees the storage and fills it again. The alias of a ZeRO-3 parameter is a stand-in.
    """
    if not tensor.is_leaf:
        return tensor
    alias = tensor.view_as(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor.detach()
    return make_stand_in(alias, tensor) if is_partitioned(tensor) else alias


def in_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32. Call it within :meth:`LazyState.gathered_weights`."""
    return tensor if tensor.dtype == torch.float32 else resolve_stand_in(tensor).float()
