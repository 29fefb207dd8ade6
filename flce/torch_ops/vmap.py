"""Several upstream gradients at once: a backward under `vmap`.

PyTorch has two kinds of it. ``torch.autograd.grad(is_grads_batched=True)``, and with it
``torch.autograd.functional.jacobian(vectorize=True)``, hands out tensors of the older one, `torch.vmap` over a call of
`torch.autograd.grad` those of the newer. In both a tensor stands for each element of a batch.

Here a batch is a loop: each upstream gradient has a backward of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flce.core import private

# The levels of the older kind.
_LEVELS = 64


def is_batched(x: Tensor) -> bool:
    """Whether this stands for each element of a batch: then nothing that is no batch can be changed in place by it."""
    return private.is_batchedtensor(x) or private.is_legacy_batchedtensor(x)


def map_over_batch(function: Callable[..., Sequence[Tensor]], *upstream: Tensor | None) -> Sequence[Tensor]:
    """``function(*upstream)``, where some of `upstream` may be batches of the older kind, for which an operator with
    lists among its arguments can have no rule. For the newer one see `register_vmap_loop`."""
    batched = {k: t for k, t in enumerate(upstream) if t is not None and private.is_legacy_batchedtensor(t)}
    if not batched:
        return function(*upstream)
    for level in range(1, _LEVELS + 1):
        batches = {k: private.remove_batch_dim(t, level, 1, 0) for k, t in batched.items()}
        if not any(map(private.is_legacy_batchedtensor, batches.values())):  # of this level, and of no other
            elements = zip(*(t.unbind() for t in batches.values()), strict=True)
            calls = [dict(zip(batches, element, strict=True)) for element in elements]
            made = [function(*(call.get(k, t) for k, t in enumerate(upstream))) for call in calls]
            return [private.add_batch_dim(torch.stack(tensors), 0, level) for tensors in zip(*made, strict=True)]
    raise RuntimeError(
        "flce takes one batch of upstream gradients at a time, got a batch of batches: call torch.autograd.grad with "
        "is_grads_batched=True outside of vmap"
    )


def register_vmap_loop(name: str) -> None:
    """A rule for the newer kind: ``flce::name``, which changes no argument, is called for each element."""
    packet = getattr(torch.ops.flce, name)

    def rule(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        results = [packet(*_element(args, in_dims, k)) for k in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = [torch.stack(tensors) for tensors in zip(*results, strict=True)]
        return stacked, [0] * len(stacked)

    torch.library.register_vmap(f"flce::{name}", rule)


def _element(value: Any, dims: Any, k: int) -> Any:
    """The k-th element of all tensors in `value`, lists of them too, along their dimension of the batch."""
    if dims is None:
        return value
    if isinstance(value, Sequence):
        return [_element(v, dim, k) for v, dim in zip(value, dims, strict=True)]
    return value.select(dims, k).contiguous()
