"""Vocabulary parallelism: the classes of a head, or of logits, are divided over the processes of a group.

All processes have the same tokens, and each process has one shard of the classes. `ops.problems` calls this
module to check the shards, and to gather the tokens of sequence parallelism. `engine/rows.py` merges the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flce.core import private
from flce.core.numbers import check_bool, check_int
from flce.core.shard import Shard, all_gather, shard_bounds
from flce.torch_ops import register_operator


class DivisionArguments(NamedTuple):
    """Arguments that divide a head; documented by `flce.fused_linear_cross_entropy`."""

    process_group: dist.ProcessGroup | None = None
    vocab_size: int | None = None
    sequence_parallel: bool = False

    def tokens(self, input: Tensor) -> tuple[int, ...]:
        """Return the shape of all tokens."""
        *batch, length = input.shape[:-1] or (1,)
        if not self.sequence_parallel or self.process_group is None or input.dim() < 2:
            return tuple(input.shape[:-1])
        check_group(self.process_group)
        return (*batch, length * self.process_group.size())


NOT_DIVIDED = DivisionArguments()


def divide_head(
    operands: Mapping[str, Tensor], linear_bias: Tensor | None, division: DivisionArguments
) -> tuple[dict[str, Tensor], Tensor | None, Shard]:
    """Check the division of a head. Return the operands, by argument name, with the hidden states of all tokens, at
    least one class and contiguous rows; the bias; and the shard of this process."""
    group, vocab_size, sequence_parallel = division
    check_bool("sequence_parallel", sequence_parallel)
    if group is None:
        refuse_without_group(vocab_size, sequence_parallel)
    shard = shard_from_group(len(operands["linear_weight"]), vocab_size, group, "a linear_weight", sequence_parallel)
    divided = {}
    for name, x in operands.items():
        if sequence_parallel and has_hidden_states(name):  # Each process has a share of the tokens.
            if x.dim() < 2:
                raise ValueError(f"sequence_parallel needs {name} of shape (..., tokens, H), got {tuple(x.shape)}")
            x = torch.ops.flce.gather_sequence(x, shard.group)
        if shard.is_empty and has_classes(name):
            # A call needs at least one class. A process without classes computes one class of zeros and discards it.
            x = F.pad(x, (0, 0, 0, 1))
        # A plan depends on whether rows are contiguous, and a shard of one class or none has no stride that shows this.
        # So that all processes have the same plan, rows are contiguous in each of them.
        divided[name] = x if x.dim() < 2 or x.stride(-1) == 1 else x.contiguous()
    if shard.is_empty and linear_bias is not None:
        linear_bias = F.pad(linear_bias, (0, 1))
    return divided, linear_bias, shard


def has_classes(name: str) -> bool:
    """Return True if the tensor of this name has an entry, a row or a column for each class of this process."""
    of_head = name.endswith(("_weight", "_bias", "logits")) and name != "token_weight"
    return of_head or ("adapters[" in name and name.endswith("[1]"))


def has_hidden_states(name: str) -> bool:
    return name in ("input", "student", "teacher") or ("adapters[" in name and name.endswith("[0]"))


def shard_from_group(
    cols: int, vocab_size: int | None, process_group: Any, holder: str = "logits", sequence_parallel: bool = False
) -> Shard:
    """Return the shard of this process, which has `cols` classes. Raise ValueError if it should have another number.
    `vocab_size` None: all processes have as many. `holder`: the tensor that has the classes, for messages."""
    check_group(process_group)
    rank, size = process_group.rank(), process_group.size()
    total, start = size * cols, rank * cols
    if vocab_size is not None:
        total = check_int("vocab_size", vocab_size, "None or an int")
        if total < 1:
            raise ValueError(f"vocab_size must be positive, got {total}")
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


def refuse_without_group(vocab_size: int | None = None, sequence_parallel: bool = False) -> NoReturn:
    """Raise ValueError that names the arguments that need a process group."""
    given = [f"vocab_size={vocab_size}"] if vocab_size is not None else []
    given += ["sequence_parallel=True"] if sequence_parallel else []
    raise ValueError(
        f"{' and '.join(given)} need{'' if given[1:] else 's'} a process_group: give the group over which the classes "
        "are divided, or give neither"
    )


def refuse_equal_shards(fingerprints: Sequence[int], name: str) -> None:
    """Raise ValueError, in all processes, if two processes have the same fingerprint of their shard of the argument
    `name`. Fingerprints of 0 are not compared."""
    for rank, fingerprint in enumerate(fingerprints):
        first = fingerprints.index(fingerprint)
        if fingerprint and first < rank:
            raise ValueError(
                f"ranks {first} and {rank} of the group were given equal shards of {name}, probably all classes in "
                f"each. Give each process its own classes, {name}.chunk(n{', -1' * (name == 'logits')})[rank], and the "
                "number of all classes as vocab_size"
            )


# ------------------------------------------------------------------------------------------- sequence parallelism


def _gather_sequence(x: Tensor, group: str) -> Tensor:
    shares = all_gather(x, private.resolve_process_group(group))  # (processes, ..., S / processes, H)
    return shares.movedim(0, -3).flatten(-3, -2).contiguous()


def _reduce_scatter_sequence(x: Tensor, group: str) -> Tensor:
    processes = private.resolve_process_group(group)
    count = processes.size()
    shares = x.unflatten(-2, (count, x.shape[-2] // count)).movedim(-3, 0).contiguous()
    out = x.new_empty(shares.shape[1:])
    # PyTorch versions with the newer name deprecate the older name.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out.view(-1), shares.view(-1), group=processes)
    return out


def _with_tokens(x: Tensor, num_tokens: int) -> Tensor:
    """Return empty memory like `x` with another number of tokens."""
    return x.new_empty((*x.shape[:-2], num_tokens, x.shape[-1]))


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


register_operator(
    "scatter_sequence",
    "(Tensor x, str group) -> Tensor",
    _reduce_scatter_sequence,
    lambda x, group: _with_tokens(x, x.shape[-2] // private.resolve_process_group(group).size()),
)
register_operator(
    "gather_sequence",
    "(Tensor x, str group) -> Tensor",
    _gather_sequence,
    lambda x, group: _with_tokens(x, x.shape[-2] * private.resolve_process_group(group).size()),
    backward=lambda ctx, grad: (torch.ops.flce.scatter_sequence(grad, ctx.group), None),
    setup_context=_keep_group,
)


# ------------------------------------------------------------------------------------------- given logits


def local_logits(logits: Any) -> tuple[Tensor, Any, int | None]:
    """Return local logits, process group and vocabulary size of a DTensor; None for both if it is replicated. Raise
    ValueError if it is divided in another way than by classes over one dimension of its mesh."""
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
