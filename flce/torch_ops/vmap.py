"""Batches of upstream gradients: a backward under `vmap`. The operators of `flce.ops` call this module.

PyTorch has two kinds of batched tensors. `torch.autograd.grad` with ``is_grads_batched=True``, and
``torch.autograd.functional.jacobian(vectorize=True)``, use the legacy kind. `torch.vmap` over a call of
`torch.autograd.grad` uses the newer kind. In both a tensor represents all elements of a batch.

flce processes a batch in a loop: one backward for each upstream gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flce.core import private

# Number of levels of the legacy kind.
_LEVELS = 64


def is_batched(x: Tensor) -> bool:
    """Return True if the tensor is a batch. A batch cannot change a tensor without batch dimension in place."""
    return private.is_batchedtensor(x) or private.is_legacy_batchedtensor(x)


def map_over_batch(function: Callable[..., Sequence[Tensor]], *upstream: Tensor | None) -> Sequence[Tensor]:
    """Call ``function(*upstream)``; if some of `upstream` are batches of the legacy kind, call it for each element.

    An operator with lists among its arguments cannot have a batching rule for the legacy kind. For the newer kind see
    `register_vmap_loop`.
    """
    batched = {k: t for k, t in enumerate(upstream) if t is not None and private.is_legacy_batchedtensor(t)}
    if not batched:
        return function(*upstream)
    for level in range(1, _LEVELS + 1):
        batches = {k: private.remove_batch_dim(t, level, 1, 0) for k, t in batched.items()}
        if not any(map(private.is_legacy_batchedtensor, batches.values())):  # batched at this level only
            elements = zip(*(t.unbind() for t in batches.values()), strict=True)
            calls = [dict(zip(batches, element, strict=True)) for element in elements]
            results = [function(*(call.get(k, t) for k, t in enumerate(upstream))) for call in calls]
            return [private.add_batch_dim(torch.stack(tensors), 0, level) for tensors in zip(*results, strict=True)]
    raise RuntimeError(
        "flce supports one batch of upstream gradients at a time, got a batch of batches: call torch.autograd.grad "
        "with is_grads_batched=True outside of vmap"
    )


def register_vmap_loop(name: str) -> None:
    """Register a rule for the newer kind: ``flce::name``, which mutates no argument, is called for each element."""
    packet = getattr(torch.ops.flce, name)

    def rule(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        results = [packet(*_element(args, in_dims, k)) for k in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = [torch.stack(tensors) for tensors in zip(*results, strict=True)]
        return stacked, [0] * len(stacked)

    torch.library.register_vmap(f"flce::{name}", rule)


def _element(value: Any, dims: Any, k: int) -> Any:
    """Return the k-th element of all tensors in `value`, also in lists, along their batch dimensions `dims`."""
    if dims is None:
        return value
    if isinstance(value, Sequence):
        return [_element(v, dim, k) for v, dim in zip(value, dims, strict=True)]
    return value.select(dims, k).contiguous()
