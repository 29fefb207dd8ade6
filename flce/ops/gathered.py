"""`flce.gathered`: the full tensor of a sharded weight, for a call outside of the module that gathers the weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce.core.numbers import check_dtype
from flce.core.problem import accumulation_dtype
from flce.ops.arguments import check_tensor
from flce.ops.vocabulary_parallel import is_dtensor


def gathered(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the full tensor of a sharded weight. Its gradient is averaged over the processes into the shards.

    For a head that FSDP2 has sharded, where each process has different tokens: ``fused_linear_cross_entropy(x,
    flce.gathered(head.weight), y)``. Backward reduce-scatters the gradients of all processes, in float32 (float64 for
    float64), and divides them by the number of processes, as FSDP does. Every backward reduces: gradients of several
    passes add up in the shards. On a mesh of two dimensions, replicated and sharded (HSDP), the average is over both.
    (The backward of ``weight.full_tensor()`` is different: each process keeps its slice of its local gradient, and no
    gradient is summed over processes.)

    Forward allocates the full weight in `dtype`. Backward allocates the gradient of the full weight and a float32 copy
    of it.

    Args:
        weight: (V, H), a DTensor. A plain tensor is returned unchanged, or cast.
        dtype: dtype in which the weight is gathered, as with FSDP's `MixedPrecisionPolicy.param_dtype`; None: the dtype
            of `weight`. bfloat16 halves the bytes of float32 shards.

    Returns:
        (V, H), a plain tensor.

    Raises:
        TypeError: `weight` is not a tensor, or `dtype` is not a floating dtype.
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
        # For a replicated weight the full tensor is the parameter itself: return a view instead.
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
        from torch.distributed.tensor import DTensor, Partial

        wide = grad.to(accumulation_dtype(grad.dtype))
        shares = DTensor.from_local(wide, ctx.mesh, [Partial("avg")] * ctx.mesh.ndim, run_check=False)
        return shares.redistribute(placements=ctx.placements).to(ctx.dtype), None
