"""The whole of a weight of which each process has a shard, for a call outside of the module that gathers it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce.core.numbers import check_dtype
from flce.core.problem import accumulation_dtype
from flce.ops.arguments import check_tensor
from flce.ops.vocabulary_parallel import is_dtensor


def gathered(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """All of a sharded weight, whose gradient is averaged over the processes into the shards.

    For a head that FSDP2 has sharded, with tokens of its own in each process: ``fused_linear_cross_entropy(x,
    flce.gathered(head.weight), y)``. In backward the gradients of all processes are reduce-scattered, in float32
    (float64 for float64), and divided by their number, as FSDP does. Every backward reduces: gradients of several
    passes add up in the shards. On a mesh of two dimensions, replicated and sharded (HSDP), both are averaged
    over. (``weight.full_tensor()`` is not this: in its backward each process keeps its slice of its own gradient, and
    nothing is summed over processes.)

    Forward takes memory for the whole weight in `dtype`, backward for its gradient and a float32 copy of that.

    Args:
        weight: (V, H), a DTensor; a plain tensor is returned as it is, or cast.
        dtype: in which the weight is gathered, as with FSDP's `MixedPrecisionPolicy.param_dtype`; None: its own.
            bfloat16 of float32 shards halves the bytes.

    Returns:
        (V, H), a plain tensor.

    Raises:
        TypeError: `weight` is no tensor, or `dtype` no floating dtype.
    """
    check_tensor("weight", weight)
    if dtype is not None:
        check_dtype("dtype", dtype, "None or a torch.dtype")
        if not dtype.is_floating_point:
            raise TypeError(f"dtype must be None or a floating dtype, got {dtype}")
    if not is_dtensor(weight):
        return weight if dtype is None else weight.to(dtype)
    full: Tensor = _Gathered.apply(weight, dtype or weight.dtype)
    return full


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, dtype: torch.dtype) -> Tensor:
        ctx.mesh, ctx.placements, ctx.dtype = weight.device_mesh, weight.placements, weight.dtype
        full: Tensor = weight.detach().to(dtype).full_tensor()
        # Replicated, it is the parameter itself.
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
        from torch.distributed.tensor import DTensor, Partial

        wide = grad.to(accumulation_dtype(grad.dtype))
        shares = DTensor.from_local(wide, ctx.mesh, [Partial("avg")] * ctx.mesh.ndim, run_check=False)
        return shares.redistribute(placements=ctx.placements).to(ctx.dtype), None
