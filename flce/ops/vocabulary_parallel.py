"""Vocabulary parallelism: the classes of each process, and merging of the statistics of rows over processes.

Every process of a group has the logits of the same tokens for a slice of the classes. Each process computes the
statistics of its slice. One collective (a few numbers per token) sends the statistics to all processes, and every
process merges them in the same way. Gradients need no other collective. `ops.arguments`, `ops.split_head` and
`ops.cross_entropy` call this module.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce.backends.formulas import RowResults, results_from_state
from flce.core.numbers import check_int
from flce.core.problem import LossSpec
from flce.core.shard import Shard, shard_bounds
from flce.engine.shards import gather_shard_results, merge_shard_results, unpack_shard_results
from flce.engine.vectors import can_read_values


def shard_from_group(
    cols: int, vocab_size: int | None, process_group: Any, holder: str = "logits", sequence_parallel: bool = False
) -> Shard:
    """Return the shard of this process, which has `cols` classes. `vocab_size` None: all processes have as many.

    Args:
        holder: name of the tensor that has the classes, for messages.

    Raises:
        TypeError: `process_group` is not a process group, or `vocab_size` is not an int.
        ValueError: this process is not in the group or should have another number of classes, or `vocab_size` is not
            positive.
    """
    check_group(process_group)
    rank, size = process_group.rank(), process_group.size()
    total, start = total_vocab_size(cols, vocab_size, process_group), rank * cols
    if vocab_size is not None:
        start, stop = shard_bounds(total, size, rank)
        if stop - start != cols:
            raise ValueError(
                f"rank {rank} of {size} must have {holder} of {stop - start} classes of vocab_size={total} (as "
                f"torch.chunk divides them), got {cols}"
            )
    return Shard(process_group.group_name, start, total, sequence_parallel)


def check_group(process_group: Any) -> None:
    """Raise TypeError if the value is not a process group, ValueError if this process is not in the group."""
    is_group = dist.is_available() and isinstance(process_group, dist.ProcessGroup)
    # `dist.new_group` returns a placeholder in processes that are not in the group.
    is_placeholder = dist.is_available() and process_group is dist.GroupMember.NON_GROUP_MEMBER
    if not (is_group or is_placeholder):
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, got {type(process_group).__name__}")
    if is_placeholder or process_group.rank() < 0:
        raise ValueError(
            "process_group must contain this process, got a group of other processes: call flce only in the processes "
            "of the group"
        )


def refuse_without_group(vocab_size: int | None = None, sequence_parallel: bool = False) -> None:
    """Raise ValueError that names the arguments that need a process group."""
    given = [f"vocab_size={vocab_size}"] if vocab_size is not None else []
    given += ["sequence_parallel=True"] if sequence_parallel else []
    raise ValueError(
        f"{' and '.join(given)} need{'' if given[1:] else 's'} a process_group: give the group over which the classes "
        "are divided, or give neither"
    )


def refuse_equal_slices(fingerprints: Sequence[Hashable | None], name: str, own: str) -> None:
    """Raise ValueError, in all processes, if two processes have the same fingerprint of their slice.

    Args:
        fingerprints: one for each rank; None is not compared.
        name: name of the argument.
        own: expression for the slice of a process, for the message.
    """
    for rank, fingerprint in enumerate(fingerprints):
        first = fingerprints.index(fingerprint)
        if fingerprint is not None and first < rank:
            raise ValueError(
                f"ranks {first} and {rank} of the group were given equal slices of {name}, probably all classes in "
                f"each. Give each process its own classes, {own}, and the number of all classes as vocab_size"
            )


def total_vocab_size(cols: int, vocab_size: int | None, process_group: Any) -> int:
    """Return V of a group in which this process has `cols` classes. `vocab_size` None: all processes have as many.

    Raises:
        TypeError, ValueError: `vocab_size` is not an int, or not positive.
    """
    if vocab_size is None:
        return cols * process_group.size()
    vocab_size = check_int("vocab_size", vocab_size, "None or an int")
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be positive, got {vocab_size}")
    return vocab_size


def merge_results(
    state: Tensor, cols: int, target: Tensor, class_weight: Tensor | None, spec: LossSpec, shard: Shard
) -> RowResults:
    """Return the results of rows over all classes, from the state of each shard, (STATE_SLOTS, rows). One collective.

    Processes also exchange their numbers of classes. If a number differs from the number that `shard` implies, the
    results are NaN in all processes; the host does not wait for the comparison.

    Raises:
        ValueError: a number of classes differs, on a CPU or with ``FLCE_DEBUG=1``.
    """
    weights = None if class_weight is None else class_weight[shard.start : shard.start + cols]
    weight_sum = cols if weights is None else weights.sum(dtype=state.dtype)
    gathered, names = gather_shard_results(results_from_state(state, spec, cols, weight_sum), cols, shard)
    widths, expected = gathered[:, -1], shard.local_vocab_sizes(gathered)
    if can_read_values(gathered.device) and not torch.equal(widths, expected):
        raise ValueError(
            f"the processes of the group have logits of {widths.int().tolist()} classes, expected "
            f"{expected.int().tolist()}: give vocab_size where torch.chunk divides them unevenly"
        )
    shards = unpack_shard_results(gathered, names, shard)
    if can_read_values(gathered.device):
        refuse_equal_logits(shards.offset, shards.log_sum, widths[:, None])
    return merge_shard_results(shards, target, class_weight, shard)


def refuse_equal_logits(offsets: Tensor, log_sums: Tensor, widths: Tensor) -> None:
    """Raise ValueError if two processes have the same log-sum-exps, unless the logits within each row are equal.

    Args:
        offsets, log_sums: (processes, rows) the largest logit m, and ``log(sum(exp(z - m)))``.
        widths: (processes, 1) the number of classes.
    """
    is_constant = ((log_sums > widths.log() - 1e-5) | ~offsets.isfinite()).all(1).tolist()
    numbers = torch.cat((offsets, log_sums), 1).tolist()
    fingerprints = [
        None if constant else (*fingerprint,) for constant, fingerprint in zip(is_constant, numbers, strict=True)
    ]
    refuse_equal_slices(fingerprints, "logits", "logits.chunk(n, -1)[rank]")


def local_logits(logits: Any) -> tuple[Tensor, Any, int | None]:
    """Return local logits, process group and vocabulary size of a DTensor.

    Raises:
        ValueError: the DTensor is not sharded by classes over exactly one dimension of its mesh, or replicated.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ShardPlacement

    by_class = [
        k
        for k, placement in enumerate(logits.placements)
        if type(placement) is ShardPlacement and placement.dim % logits.dim() == logits.dim() - 1
    ]
    others = [p for k, p in enumerate(logits.placements) if k not in by_class]
    if len(by_class) > 1 or not all(isinstance(p, Replicate) for p in others):
        raise ValueError(
            "logits that are a DTensor must be replicated, or sharded over their last dimension by one dimension of "
            f"the mesh, got placements {logits.placements}; for others give logits.to_local() and process_group"
        )
    local = logits.to_local()
    if not by_class:
        return local, None, None
    return local, logits.device_mesh.get_group(by_class[0]), logits.shape[-1]


def local_tensor(x: Any, name: str) -> Any:
    """Return the values of a replicated DTensor, or `x` itself if it is not a DTensor."""
    if not is_dtensor(x):
        return x
    if not all(placement.is_replicate() for placement in x.placements):
        raise ValueError(f"{name} that is a DTensor must be replicated, got placements {x.placements}")
    return x.to_local()


def is_dtensor(x: object) -> bool:
    # Compared by name, because importing DTensor is slow. If `x` is a DTensor, the class is already imported.
    return isinstance(x, Tensor) and type(x).__name__ == "DTensor"
