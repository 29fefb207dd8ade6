"""`flce.gathered` and `flce.global_num_items`: the full tensor of a sharded weight, and the labels of all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce.core.numbers import check_dtype, check_int
from flce.core.problem import accumulation_dtype
from flce.ops.arguments import check_shift, check_tensor
from flce.ops.vocabulary_parallel import check_group, is_dtensor


def gathered(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the full tensor of a sharded weight. Its gradient is averaged over the processes into the shards.

    For a head that FSDP2 has sharded, where each process has different tokens: ``fused_linear_cross_entropy(x,
    flce.gathered(head.weight), y)``. Backward reduce-scatters the gradients of all processes, in float32 (float64 for
    float64), and divides them by the number of processes, as FSDP does. Every backward reduces: gradients of several
    passes add up in the shards. On a mesh of two dimensions, replicated and sharded (HSDP), the average is over both.
    (The backward of ``weight.full_tensor()`` is different: each process keeps its shard of its local gradient, and no
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


def global_num_items(
    labels: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    shift: int = 0,
    ignore_index: int = -100,
) -> Tensor:
    """Return the number of labels that are not ignored, over all processes of a group.

    DDP and FSDP average gradients over their processes. So the loss of each process is the sum over its tokens, divided
    by the *mean* number of labels of a process: ``num_items=flce.global_num_items(labels, group) / group.size()``, or
    ``num_items_in_batch=`` of a model of Transformers. Then gradients are those of the mean over all tokens, for
    unequal numbers of labels and for a process without labels, and the mean of the processes' losses is that mean.

    All processes of the group call this function. It runs one collective, and the host does not wait for it.

    Args:
        labels: (...) labels of this process, int64 or int32; for gradient accumulation a sequence of tensors, the
            labels of all micro-batches of a step.
        group: processes with different tokens. Processes of tensor parallelism have the same tokens: leave them out.
            None: all processes, or only this one if ``torch.distributed`` is not initialized.
        shift: 1 for labels that the model or the loss shifts: the first label of each sequence is no target. 0 for
            ``shift_labels``, which are shifted before sequences are divided.
        ignore_index: the value of ignored labels.

    Returns:
        0-d int64 tensor, on the device of the labels, the same in all processes.

    Raises:
        TypeError: `labels` is neither a tensor nor a sequence of tensors, a dtype is not int64 or int32, or `group` is
            not a process group.
        ValueError: `labels` is empty or a DTensor, `shift` is negative, or the group does not contain this process.

    Examples:
        >>> labels = torch.tensor([[1, 2, -100], [3, -100, -100]])
        >>> flce.global_num_items(labels)
        tensor(3)
    """
    tensors: Sequence[Any] = labels if isinstance(labels, (list, tuple)) else (labels,)
    if not tensors:
        raise ValueError("labels must have at least one tensor, got an empty sequence")
    for tensor in tensors:
        check_tensor("labels", tensor)
        if is_dtensor(tensor):
            raise ValueError("labels must be a plain tensor, got a DTensor: give labels.to_local()")
        if tensor.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"labels must be int64 or int32, got {tensor.dtype}")
    shift, ignore_index = check_shift(shift, tensors[0]), check_int("ignore_index", ignore_index)
    count = sum((tensor[..., shift:] != ignore_index).sum() for tensor in tensors)
    assert isinstance(count, Tensor)
    if group is not None:
        check_group(group)
    if group is not None or (dist.is_available() and dist.is_initialized()):
        dist.all_reduce(count, group=group)
    return count
