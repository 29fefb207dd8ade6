"""Vocabulary parallelism: the classes of a head, or of logits, are divided over the processes of a group.

All processes have the same tokens, and each process has one slice of the classes. `ops.arguments` calls this module to
check the slices, and to gather the tokens of sequence parallelism. `ops.cross_entropy` calls `merge_results`, which
merges the statistics of rows of logits over the processes with one collective. `engine/shards.py` merges the results of
a divided head.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flce.backends.formulas import RowStatistics, results_from_state
from flce.core import private
from flce.core.numbers import check_bool, check_int
from flce.core.problem import LossSpec
from flce.core.shard import Shard, all_gather, shard_bounds
from flce.engine.shards import gather_shard_results, merge_shard_results, unpack_shard_results
from flce.engine.vectors import can_read_values
from flce.torch_ops.registration import register_operator

# Tensors of which each process has some of the classes: an entry or a row of each, or a column of logits.
CLASS_TENSORS = (
    "linear_weight", "linear_bias", "student_weight", "student_bias", "teacher_weight", "teacher_bias", "logits"
)  # fmt: skip
# Rows and columns of the sample of a slice that is compared.
_SAMPLES = 16
# Numbers that `compare_calls` sends in any call: hashes of texts, and of slices of weights.
_MAX_TEXTS, _MAX_SLICES = 62, 2


class ShardedHeadArguments(NamedTuple):
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


NOT_SHARDED = ShardedHeadArguments()


def prepare_sharded_head(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    adapters: Sequence[tuple[Tensor, Tensor]],
    sharded_head: ShardedHeadArguments,
) -> tuple[tuple[Tensor, Tensor, Tensor | None, Sequence[tuple[Tensor, Tensor]]], Shard]:
    """Check the division of the head, and gather the tokens with sequence parallelism. Return the first four arguments
    for the computation in this process, and its shard."""
    group, vocab_size, sequence_parallel = sharded_head
    check_bool("sequence_parallel", sequence_parallel)
    if group is None:
        refuse_without_group(vocab_size, sequence_parallel)
    if linear_weight.dim() != 2:
        raise ValueError(f"process_group needs a linear_weight of shape (V_local, H), got {tuple(linear_weight.shape)}")
    shard = shard_from_group(len(linear_weight), vocab_size, group, "a linear_weight", sequence_parallel)
    if sequence_parallel:
        input = _gather_full_sequence("an input", input, shard)
        adapters = [(_gather_full_sequence(f"adapters[{k}][0]", a, shard), b) for k, (a, b) in enumerate(adapters)]
    if shard.is_empty:
        # A call needs at least one class. A process without classes computes one class of zeros and discards it.
        linear_weight = F.pad(linear_weight, (0, 0, 0, 1))
        linear_bias = None if linear_bias is None else F.pad(linear_bias, (0, 1))
        adapters = [(a, F.pad(b, (0, 0, 0, 1))) for a, b in adapters]
    # A plan depends on whether rows are contiguous, and a slice of one class or none has no stride that shows this. So
    # that all processes have the same plan, rows are contiguous in each of them.
    input, linear_weight = _with_contiguous_rows(input), _with_contiguous_rows(linear_weight)
    adapters = [(_with_contiguous_rows(a), _with_contiguous_rows(b)) for a, b in adapters]
    return (input, linear_weight, linear_bias, adapters), shard


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.dim() < 2 or x.stride(-1) == 1 else x.contiguous()


def compare_calls(function: str, arguments: dict[str, Any], group: Any, device: torch.device) -> None:
    """Raise ValueError, in all processes of the group, if their calls do not fit together: different functions or
    arguments, or equal slices of a weight. Run one collective, on a CPU and with ``FLCE_DEBUG=1``; otherwise none.

    Called before all checks, so that no process raises an error while the others wait for its results.

    Args:
        arguments: all arguments by name, and other settings. Tensors of classes may have different lengths, and
            floating numbers of tensors are not compared. Everything else must be equal.
    """
    if group is None or not can_read_values(device):
        return
    check_group(group)
    try:
        texts, slices = _describe_call({"function": function, **arguments}, group)
    except Exception as error:  # The checks of the arguments refuse a value that cannot be described.
        texts, slices = {"error": repr(error)}, {}
    numbers = [_hash_value(text) for text in texts.values()]
    numbers += [0] * (_MAX_TEXTS - len(numbers)) + [*slices.values()] + [0] * (_MAX_SLICES - len(slices))
    fingerprints = all_gather(torch.tensor(numbers, device=device), group)
    is_equal = (fingerprints == fingerprints[0]).all(0).tolist()
    if not all(is_equal[:-_MAX_SLICES]):
        differ = [f"{name}={text}" for (name, text), equal in zip(texts.items(), is_equal, strict=False) if not equal]
        raise ValueError(
            f"the processes of the group were given different arguments or options: rank {group.rank()} has "
            f"{', '.join(differ)}"
        )
    for name, column in zip(slices, fingerprints[:, -_MAX_SLICES:].T.tolist(), strict=False):
        refuse_equal_slices([fingerprint or None for fingerprint in column], name, f"{name}.chunk(n)[rank]")


def _describe_call(arguments: dict[str, Any], group: Any) -> tuple[dict[str, str], dict[str, int]]:
    """Return texts by name, which are equal in processes whose calls fit together, and a hash of the slice of each
    weight. The text of an argument is at one position for all values of the argument."""
    of_classes, total = [name for name in arguments if name in CLASS_TENSORS], arguments["vocab_size"]
    holder = of_classes[0]
    lengths = lengths_of_weight = defaultdict(lambda: "its slice")  # `merge_results` compares numbers of logits
    if total is None and (holder != "logits" or arguments["weight"] is not None):
        total = arguments[holder].shape[_class_dim(holder)] * group.size()
    if total is not None:
        (_, most), (start, stop) = (shard_bounds(total, group.size(), rank) for rank in (0, group.rank()))
        lengths = defaultdict(lambda: f"not its slice of {total}", {stop - start: f"its slice of {total}"})
        # If one process has all classes, class weights of all classes and of its slice have the same length.
        lengths_of_weight = lengths | {total: "all"} | ({stop - start: "all"} if most >= total else {})
    texts, tensors = {}, {}
    for name, value in {**arguments, "vocab_size": total}.items():
        found = dict(_named_tensors(name, value))
        tensors.update(found)
        words = "" if not found else "the shape of " if name in found else "shapes of "
        words = "classes of " if has_classes(name) or name == "weight" else words
        shapes = [_text(each, x, lengths_of_weight if name == "weight" else lengths) for each, x in found.items()]
        # 1 and 1.0 are equal. A text may have an address.
        text = ", ".join(shapes) or re.sub(r" at 0x\w+", "", repr(value)).removesuffix(".0")
        texts["V" if name == "vocab_size" else words + name] = text
    texts["dtypes"] = str({name: f"{x.dtype} on {x.device.type}" for name, x in tensors.items()})
    needed = [name for name, x in tensors.items() if torch.is_grad_enabled() and x.requires_grad]
    weights = [name for name in of_classes if name in tensors and name.endswith("_weight")]
    slices = {name: _fingerprint_of_slice(tensors[name]) for name in weights}
    return {**texts, "required gradients": str(needed)}, slices


def _named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an argument by name, such as ``adapters[0][1]``."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for k, each in enumerate(value):
            yield from _named_tensors(f"{name}[{k}]", each)


def has_classes(name: str) -> bool:
    """Return True if the tensor of this name has an entry, a row or a column for each class."""
    return name in CLASS_TENSORS or ("adapters[" in name and name.endswith("[1]"))


def has_hidden_states(name: str) -> bool:
    return name in ("input", "student", "teacher") or ("adapters[" in name and name.endswith("[0]"))


def _class_dim(name: str) -> int:
    return -1 if name == "logits" else 0


def _text(name: str, x: Tensor, lengths: Mapping[int, str]) -> str:
    """Return the shape of a tensor in words, and what is compared of its values. `lengths`: words for the numbers of
    classes that a tensor of classes may have."""
    sizes, values = [*map(str, x.shape)], ""
    is_plain = type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided
    if has_classes(name) or name == "weight":
        sizes[_class_dim(name)] = lengths[x.shape[_class_dim(name)]]
    elif is_plain and not has_hidden_states(name):
        values = f" of {_text_of_values(x)}"
    return f"({', '.join(sizes)}){values}{'' if is_plain else f', {type(x).__name__} of layout {x.layout}'}"


def _text_of_values(x: Tensor) -> str:
    """Return the number of a 0-d tensor, a hash of integers, or, as floating numbers may differ by rounding errors, the
    number of those above 0."""
    if x.dim() == 0:
        return repr(x.item())
    if x.is_floating_point():
        return f"{int((x > 0).sum())} numbers above 0"
    factors = torch.randint(2**62, x.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return f"values with the hash {int((x.cpu() * factors).sum())}"


def _fingerprint_of_slice(linear_weight: Tensor) -> int:
    """Return a hash of some entries of the slice; 0, for no comparison, if its rows are equal or have a NaN."""
    rows, columns = ((torch.arange(_SAMPLES) * (size - 1) // (_SAMPLES - 1)).clamp(0) for size in linear_weight.shape)
    entries = linear_weight.detach()[rows][:, columns] if linear_weight.numel() else linear_weight[:0]
    is_constant = bool((entries == entries[:1]).all()) or bool(entries.isnan().any())
    return 0 if is_constant else _hash_value(entries.tolist())


def _hash_value(value: Any) -> int:
    """Return a hash that is equal for equal values in all processes."""
    return int.from_bytes(hashlib.sha256(json.dumps(value, default=str).encode()).digest()[:7], "big")


def shard_from_group(
    cols: int, vocab_size: int | None, process_group: Any, holder: str = "logits", sequence_parallel: bool = False
) -> Shard:
    """Return the shard of this process, which has `cols` classes. Raise ValueError if it should have another number.
    `vocab_size` None: all processes have as many. `holder`: the tensor that has the classes, for messages."""
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


def refuse_without_group(vocab_size: int | None = None, sequence_parallel: bool = False) -> NoReturn:
    """Raise ValueError that names the arguments that need a process group."""
    given = [f"vocab_size={vocab_size}"] if vocab_size is not None else []
    given += ["sequence_parallel=True"] if sequence_parallel else []
    raise ValueError(
        f"{' and '.join(given)} need{'' if given[1:] else 's'} a process_group: give the group over which the classes "
        "are divided, or give neither"
    )


def refuse_equal_slices(fingerprints: Sequence[Hashable | None], name: str, own: str) -> None:
    """Raise ValueError, in all processes, if two processes have the same fingerprint of their slice of the argument
    `name`. A fingerprint of None is not compared. `own`: an expression for the slice of a process."""
    for rank, fingerprint in enumerate(fingerprints):
        first = fingerprints.index(fingerprint)
        if fingerprint is not None and first < rank:
            raise ValueError(
                f"ranks {first} and {rank} of the group were given equal slices of {name}, probably all classes in "
                f"each. Give each process its own classes, {own}, and the number of all classes as vocab_size"
            )


def total_vocab_size(cols: int, vocab_size: int | None, process_group: Any) -> int:
    """Return V of a group in which this process has `cols` classes. `vocab_size` None: all processes have as many."""
    if vocab_size is None:
        return cols * process_group.size()
    vocab_size = check_int("vocab_size", vocab_size, "None or an int")
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be positive, got {vocab_size}")
    return vocab_size


# ------------------------------------------------------------------------------------------- sequence parallelism


def _gather_full_sequence(name: str, x: Tensor, shard: Shard) -> Tensor:
    """Return (..., S, H) from the shares `x`, (..., S / processes, H). Backward reduce-scatters the gradient."""
    if x.dim() < 2:
        raise ValueError(f"sequence_parallel needs {name} of shape (..., tokens, H), got {tuple(x.shape)}")
    full: Tensor = torch.ops.flce.gather_sequence(x, shard.group)
    return full


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


def _register() -> None:
    def shape(x: Tensor, group: str, gathered: bool) -> Tensor:
        count = int(private.resolve_process_group(group).size())
        length = x.shape[-2] * count if gathered else x.shape[-2] // count
        return x.new_empty((*x.shape[:-2], length, x.shape[-1]))

    def keep_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    schema = "(Tensor x, str group) -> Tensor"
    register_operator("scatter_sequence", schema, _reduce_scatter_sequence, lambda x, group: shape(x, group, False))
    register_operator(
        "gather_sequence",
        schema,
        _gather_sequence,
        lambda x, group: shape(x, group, True),
        backward=lambda ctx, grad: (torch.ops.flce.scatter_sequence(grad, ctx.group), None),
        setup_context=keep_group,
    )


_register()


# ------------------------------------------------------------------------------------------- given logits


def merge_results(
    state: Tensor, cols: int, target: Tensor, class_weight: Tensor | None, spec: LossSpec, shard: Shard
) -> RowStatistics:
    """Return the results of rows over all classes, from the state of each shard, (STATE_SLOTS, rows). One collective.

    Processes also exchange their numbers of classes. If a number differs from the number that `shard` implies, the
    results are NaN in all processes or, on a CPU and with ``FLCE_DEBUG=1``, a ValueError is raised.
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
        _refuse_equal_logits(shards.offset, shards.log_sum, widths[:, None])
    return merge_shard_results(shards, target, class_weight, shard)


def _refuse_equal_logits(offsets: Tensor, log_sums: Tensor, widths: Tensor) -> None:
    """Raise ValueError if two processes have the same log-sum-exps, unless the logits within each row are equal.
    offsets, log_sums: (processes, rows) of `RowStatistics`; widths: (processes, 1) numbers of classes."""
    is_constant = ((log_sums > widths.log() - 1e-5) | ~offsets.isfinite()).all(1).tolist()
    numbers = torch.cat((offsets, log_sums), 1).tolist()
    fingerprints = [
        None if constant else (*fingerprint,) for constant, fingerprint in zip(is_constant, numbers, strict=True)
    ]
    refuse_equal_slices(fingerprints, "logits", "logits.chunk(n, -1)[rank]")


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
