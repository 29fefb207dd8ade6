"""Divided heads: checks, gathers and padding before a call. Called by `ops.arguments`."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flce.core import private
from flce.core.numbers import check_bool
from flce.core.shard import Shard, all_gather, shard_bounds
from flce.engine.vectors import can_read_values
from flce.ops.vocabulary_parallel import (
    check_group,
    refuse_equal_slices,
    refuse_without_group,
    shard_from_group,
    total_vocab_size,
)
from flce.torch_ops.registration import register_operator

# Rows and columns of the sample of a slice that is compared.
_SAMPLES = 16


class SplitHeadArguments(NamedTuple):
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


NOT_SPLIT = SplitHeadArguments()


def prepare_split_head(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    adapters: Sequence[tuple[Tensor, Tensor]],
    weight: Tensor | None,
    split_head: SplitHeadArguments,
    replicated: dict[str, Any],
) -> tuple[tuple[Tensor, Tensor, Tensor | None, Sequence[tuple[Tensor, Tensor]]], Shard]:
    """Return the first four arguments for the computation in this process, and its shard.

    Args:
        weight: class weights.
        replicated: arguments that must be equal in all processes.

    Raises:
        TypeError: the group is not a process group, or `sequence_parallel` is not a bool.
        ValueError: there is no group, this process is not in it or should have other classes, or, on a CPU or with
            ``FLCE_DEBUG=1``, processes were given different arguments or equal slices.
    """
    group, vocab_size, sequence_parallel = split_head
    check_bool("sequence_parallel", sequence_parallel)
    if group is None:
        refuse_without_group(vocab_size, sequence_parallel)
    if linear_weight.dim() != 2:
        raise ValueError(f"process_group needs a linear_weight of shape (V_local, H), got {tuple(linear_weight.shape)}")
    check_group(group)
    if can_read_values(input.device) and not torch.compiler.is_compiling():
        tensors = (input, linear_weight, linear_bias, *itertools.chain(*adapters))
        sliced = (linear_bias, *(b for _, b in adapters))
        has_local_classes = [None if t is None else t.shape[:1] == linear_weight.shape[:1] for t in sliced]
        arguments = {
            "the shape of input": tuple(input.shape),
            "H of linear_weight": linear_weight.shape[1],
            **_class_arguments(len(linear_weight), weight, split_head),
            "dtypes": [str(t.dtype) for t in (input, linear_weight)],
            "whether there is a linear_bias of the slice": has_local_classes[0],
            "shapes of adapters": [(tuple(a.shape), b.shape[1:]) for a, b in adapters] + has_local_classes[1:],
            "which tensors need a gradient": [
                torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors
            ],
            **replicated,
        }
        _check_agreement(group, arguments, linear_weight)
    shard = shard_from_group(len(linear_weight), vocab_size, group, "a linear_weight", sequence_parallel)
    if sequence_parallel:
        input = _gather_full_sequence("an input", input, shard)
        adapters = [(_gather_full_sequence(f"adapters[{k}][0]", a, shard), b) for k, (a, b) in enumerate(adapters)]
    if shard.is_empty:
        # A call needs at least one class. A process without classes computes one class of zeros and discards it.
        linear_weight = F.pad(linear_weight, (0, 0, 0, 1))
        linear_bias = None if linear_bias is None else F.pad(linear_bias, (0, 1))
        adapters = [(a, F.pad(b, (0, 0, 0, 1))) for a, b in adapters]
    return (input, linear_weight, linear_bias, adapters), shard


def _class_arguments(cols: int, weight: Tensor | None, split_head: SplitHeadArguments) -> dict[str, Any]:
    """Return V, and for each tensor with classes if its classes match this process."""
    group: Any = split_head.process_group
    total = total_vocab_size(cols, split_head.vocab_size, group)
    start, stop = shard_bounds(total, group.size(), group.rank())
    # If one process has all classes, weights of all classes and of the slice have the same length.
    one_has_all = shard_bounds(total, group.size(), 0)[1] >= total
    length = None if weight is None else tuple(weight.shape)
    classes = "all" if length == (total,) or one_has_all else "the slice's" if length == (cols,) else "neither"
    return {
        "V": total,
        f"whether linear_weight has its share of {total} classes, as torch.chunk divides them": stop - start == cols,
        "whether there is a weight, and of which classes": None if length is None else classes,
    }


def _check_agreement(group: Any, arguments: dict[str, Any], linear_weight: Tensor) -> None:
    """Raise ValueError, in all processes, if their arguments differ or their slices are equal. One collective."""
    numbers = [*map(_hash_value, arguments.values()), _fingerprint_of_slice(linear_weight)]
    fingerprints = all_gather(torch.tensor(numbers, device=linear_weight.device), group)
    is_equal = (fingerprints == fingerprints[0]).all(0).tolist()[:-1]
    differ = {name: value for (name, value), equal in zip(arguments.items(), is_equal, strict=True) if not equal}
    if differ:
        raise ValueError(
            f"the processes of the group were given different values of {', '.join(differ)}: rank {group.rank()} has "
            f"{differ}"
        )
    refuse_equal_slices(
        [fingerprint or None for fingerprint in fingerprints[:, -1].tolist()],
        "linear_weight",
        "linear_weight.chunk(n)[rank]",
    )


def _fingerprint_of_slice(linear_weight: Tensor) -> int:
    """Return a hash of some entries of the slice; 0, for no comparison, if its rows are equal or have a NaN."""
    rows, columns = ((torch.arange(_SAMPLES) * (size - 1) // (_SAMPLES - 1)).clamp(0) for size in linear_weight.shape)
    entries = linear_weight.detach()[rows][:, columns] if linear_weight.numel() else linear_weight[:0]
    is_constant = bool((entries == entries[:1]).all()) or bool(entries.isnan().any())
    return 0 if is_constant else _hash_value(entries.tolist())


def _hash_value(value: Any) -> int:
    """Return a hash that is equal for equal values in all processes."""
    return int.from_bytes(hashlib.sha256(json.dumps(value, default=str).encode()).digest()[:7], "big")


# ------------------------------------------------------------------------------------------- sequence parallelism


def _gather_full_sequence(name: str, x: Tensor, shard: Shard) -> Tensor:
    """Return (..., S, H) from the shares `x`, (..., S / processes, H). Backward sums and scatters the gradient."""
    if x.dim() < 2:
        raise ValueError(f"sequence_parallel needs {name} of shape (..., tokens, H), got {tuple(x.shape)}")
    full: Tensor = torch.ops.flce.gather_sequence(x, shard.group)
    return full


def _gather_sequence(x: Tensor, group: str) -> Tensor:
    shares = all_gather(x, private.resolve_process_group(group))  # (processes, ..., S / processes, H)
    return shares.movedim(0, -3).flatten(-3, -2).contiguous()


def _scatter_sequence(x: Tensor, group: str) -> Tensor:
    processes = private.resolve_process_group(group)
    count = processes.size()
    shares = x.unflatten(-2, (count, x.shape[-2] // count)).movedim(-3, 0).contiguous()
    out = x.new_empty(shares.shape[1:])
    # PyTorch versions with the newer name deprecate the older name.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out.view(-1), shares.view(-1), group=processes)
    return out


def _register() -> None:
    def shape(x: Tensor, group: str, gathered: bool) -> Tensor:
        count = int(private.resolve_process_group(group).size())
        length = x.shape[-2] * count if gathered else x.shape[-2] // count
        return x.new_empty((*x.shape[:-2], length, x.shape[-1]))

    def keep_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    schema = "(Tensor x, str group) -> Tensor"
    register_operator("scatter_sequence", schema, _scatter_sequence, lambda x, group: shape(x, group, False))
    register_operator(
        "gather_sequence",
        schema,
        _gather_sequence,
        lambda x, group: shape(x, group, True),
        backward=lambda ctx, grad: (torch.ops.flce.scatter_sequence(grad, ctx.group), None),
        setup_context=keep_group,
    )


_register()
