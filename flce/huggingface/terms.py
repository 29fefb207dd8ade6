"""What logits are sums of: matrix products, and vectors that were added to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.elementwise import Op, fold
from flce.huggingface.head_call import StaleLogitsError


@dataclass(frozen=True)
class Product:
    """One matrix product, and what was done to it before it was added to others.

    Attributes:
        hidden: the logits' shape, with the hidden size H in place of the vocabulary V. Everything that
            happens to the token dimensions of the logits happens to this tensor.
        weight: ``(V, H)``.
        bias: ``(V,)`` or None.
        dtype: of the product.
        versions: in-place versions of the tensors when the product was to be made, None where they cannot be
            had or do not matter.
        ops: factors and casts.
        filled: ``(V,)`` bool, the classes whose rows of the weight were replaced by zeros, and their bias by a number;
            their logits get no gradient. None: no class.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    versions: tuple[int, ...] | None = None
    ops: tuple[Op, ...] = ()
    filled: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.hidden, self.weight) if self.bias is None else (self.hidden, self.weight, self.bias)

    @property
    def factor(self) -> float:
        return _factor(self.ops)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Product:
        """The term on other tensors, which nobody changes in place."""
        bias = None if self.bias is None else tensors[2]
        return replace(self, hidden=tensors[0], weight=tensors[1], bias=bias, versions=None)

    def with_hidden(self, hidden: Tensor) -> Product:
        """After an operation on the token dimensions, which made ``hidden`` of the hidden states."""
        versions = self.versions
        if versions is not None and hidden.is_inference():
            versions = None
        elif versions is not None:
            # A view shares the counter of what it views; a copy counts from zero. Keep a change that came before.
            versions = (versions[0] + hidden._version - self.hidden._version, *versions[1:])
        return replace(self, hidden=hidden, versions=versions)

    def with_bias(self, bias: Tensor) -> Product:
        """With a bias that was made for this term."""
        versions = self.versions
        if versions is not None:
            versions = None if bias.is_inference() else (*versions[:2], bias._version)
        return replace(self, bias=bias, versions=versions)

    def detach(self) -> Product:
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)

    def check_unchanged(self) -> None:
        _check_versions(self.versions, self.tensors)


@dataclass(frozen=True)
class BiasTerm:
    """A vector that was added to the logits of every token, as it was: it may be wider than they are.

    Attributes:
        bias: ``(V,)``.
        versions, ops: as of a :class:`Product`.
    """

    bias: Tensor
    versions: tuple[int, ...] | None = None
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
        return replace(self, bias=tensors[0], versions=None)

    def detach(self) -> BiasTerm:
        return replace(self, bias=self.bias.detach())

    def check_unchanged(self) -> None:
        _check_versions(self.versions, self.tensors)


Term = Product | BiasTerm


def dealt_out(pieces: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The pieces on other tensors, which are dealt out in their order."""
    rest = iter(tensors)
    return tuple(piece.with_tensors([next(rest) for _ in piece.tensors]) for piece in pieces)


def _factor(ops: tuple[Op, ...]) -> float:
    folded = fold(ops)
    assert folded is not None
    return folded.logit_scale


def _check_versions(versions: tuple[int, ...] | None, tensors: tuple[Tensor, ...]) -> None:
    if versions is not None and versions != versions_of(*tensors):
        raise StaleLogitsError(
            "these lazy logits can no longer be computed: the hidden states or the output embedding were "
            "modified in place since the model ran (an optimizer step?). Read them before that, call "
            "outputs.logits.materialize() before it, or use patch_model(..., keep_logits=True), which computes the "
            "logits of outputs that are still referenced right before each optimizer step."
        )


def versions_of(*tensors: Tensor) -> tuple[int, ...] | None:
    if torch.compiler.is_compiling():
        return None
    versions = []
    for tensor in tensors:
        if tensor.is_inference():  # it does not count its changes
            return None
        versions.append(tensor._version)
    return tuple(versions)
