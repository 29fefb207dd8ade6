"""`flce.global_num_items`: the number of labels of all processes, for a mean over all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce.core.numbers import check_int
from flce.ops.arguments import check_shift, check_tensor
from flce.ops.vocabulary_parallel import check_group, is_dtensor


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
