"""The public functions of heads that are divided over processes: with DTensors, or with a process group.

`run_on_local_tensors` calls a function that got DTensors with local tensors, and places the results. One dimension of
the mesh may divide the classes: its process group computes the results. Other dimensions may divide the tokens: losses
are summed over them after the call, and backward sums the gradients of the weights over them.

`gathered` and `global_num_items` are for processes with different tokens.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flce.core.numbers import check_dtype, check_int
from flce.core.problem import accumulation_dtype
from flce.core.shard import all_gather, shard_bounds
from flce.engine import vectors
from flce.ops import vocabulary_parallel
from flce.ops.arguments import (
    PLAIN_TENSORS,
    autocast_dtype,
    check_shift,
    check_tensor,
    refuse_replaced_arguments,
    shift_target,
)
from flce.ops.vocabulary_parallel import check_group, has_classes, has_hidden_states, is_dtensor, local_logits

P = ParamSpec("P")
R = TypeVar("R")

# Rows and columns of the sample of a shard that is compared.
_SAMPLES = 16
# Arguments with one entry or row for each token, if they are tensors with dimensions.
_TOKEN_TENSORS = ("target", "mask", "token_weight", "candidates", "temperature", "teacher_topk[0]", "teacher_topk[1]")


def supports_divided_heads(function: Callable[P, R]) -> Callable[P, R]:
    """Return the public function with support for DTensors of a head, with a comparison of its calls in all processes
    of a divided head, and with the errors of `names_replacements`."""
    parameters = inspect.signature(function).parameters
    first, second, *_ = names = tuple(parameters)
    defaults = {name: None if p.default is p.empty else p.default for name, p in parameters.items()}

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments: dict[str, Any] = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        x, group = arguments[first], kwargs.get("process_group")
        is_placed = type(x) not in PLAIN_TENSORS and is_dtensor(x)
        if is_placed and has_classes(second) and is_dtensor(arguments[second]):
            return run_on_local_tensors(wrapper, (first, second), arguments)
        if is_placed and first == "logits" and not torch.compiler.is_compiling():
            arguments["logits"], group, arguments["vocab_size"] = local_logits(x)
        if group is not None:
            _compare_calls(function, arguments, [group])
        try:
            return function(*args, **kwargs)
        except TypeError:
            refuse_replaced_arguments(function, kwargs)
            raise

    return wrapper


def _compare_calls(function: Callable[..., Any], arguments: dict[str, Any], groups: Sequence[Any]) -> None:
    """Raise ValueError, in all processes, if their calls do not fit together: different functions, arguments or
    autocast, or equal shards of a weight or of logits. Numbers of classes may differ, and floating numbers of tensors
    are not compared. One collective, on a CPU and with ``FLCE_DEBUG=1``; otherwise, and if a compiler traces, none.

    Called before all checks, so that no process raises an error while the others wait for its results. `groups`: the
    group of the processes, or the groups of dimensions of a mesh, the last dimension first."""
    device = next((x.device for x in arguments.values() if isinstance(x, Tensor)), torch.device("cpu"))
    if not groups or torch.compiler.is_compiling() or not vectors.can_read_values(device):
        return
    check_group(groups[0])
    call, shards = {"function": function.__name__, "autocast": str(autocast_dtype(device.type))}, {}
    for name, value in arguments.items():
        try:
            call.update(_describe(name, value, arguments, groups[0]))
            if has_classes(name) and "bias" not in name and type(value) in PLAIN_TENSORS:
                shards[name] = _fingerprint_of_shard(name, value)
        except Exception as error:  # The checks of the arguments refuse a value that cannot be described.
            call[name] = repr(error)
    data = json.dumps(call).encode()
    numbers = torch.tensor([_hash(data), len(data), *[*shards.values(), 0, 0][:2]], device=device)
    hashes, sizes, *columns = functools.reduce(all_gather, groups, numbers).view(-1, len(numbers)).T.tolist()
    if len(set(hashes)) > 1:
        text = torch.tensor([*data.ljust(max(sizes))], dtype=torch.uint8, device=device)
        texts = functools.reduce(all_gather, groups, text).view(-1, len(text)).tolist()
        first, *others = [json.loads(bytes(text)) for text in texts]
        rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
        pairs = {name: (first.get(name), other.get(name)) for name in {**first, **other}}
        differ = ", ".join([f"{name}={one} and {two}" for name, (one, two) in pairs.items() if one != two])
        raise ValueError(
            f"the processes of the group were given different arguments or options: ranks 0 and {rank} have {differ}"
        )
    for name, fingerprints in zip(shards, columns, strict=False):
        if b"not its shard" not in data:  # otherwise each process raises an error that names its number of classes
            vocabulary_parallel.refuse_equal_shards(fingerprints, name)


def _text_of_classes(name: str, size: int, arguments: Mapping[str, Any], group: Any) -> str:
    """Return a text of the number of classes of a tensor, which is equal for the shards of all processes."""
    vocab_size = arguments["vocab_size"]
    if vocab_size is None:  # All shards have one length. `merge_results` compares the lengths of logits.
        return "its shard" if name == "logits" and arguments["weight"] is None else f"{size} of V"
    start, stop = shard_bounds(vocab_size, group.size(), group.rank())
    if name == "weight" and (size == vocab_size or size < vocab_size == 1):  # a shard of one class has all or none
        return "all"
    return f"{'' if size == stop - start else 'not '}its shard of {vocab_size}"


def _describe(name: str, value: Any, arguments: Mapping[str, Any], group: Any) -> Iterator[tuple[str, str]]:
    """Yield texts of an argument by name. They are equal in processes whose arguments fit together."""
    if isinstance(value, (tuple, list)) and any(isinstance(each, (Tensor, tuple, list)) for each in value):
        for k, each in enumerate(value):
            yield from _describe(f"{name}[{k}]", each, arguments, group)
    elif not isinstance(value, Tensor):  # 1 and 1.0 are equal. A text may have an address.
        yield name, re.sub(r" at 0x\w+", "", repr(value)).removesuffix(".0")
    else:
        if name == "target" and value.is_floating_point():  # so that the error names the process that must change
            raise TypeError(f"target must hold class indices, got {value.dtype}")
        sizes, values, is_of_classes = [*map(str, value.shape)], "", has_classes(name) or name == "weight"
        if is_of_classes:
            dim = -1 if name == "logits" else 0
            sizes[dim] = _text_of_classes(name, value.shape[dim], arguments, group)
        if type(value) not in PLAIN_TENSORS or value.layout != torch.strided:
            values = f" of {type(value).__name__}, {getattr(value, 'placements', value.layout)}"
        elif value.dim() == 0:
            values = f" of {value.item()}"
        elif not value.is_floating_point():
            factors = torch.randint(2**62, value.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
            values = f" with the hash {int((value.cpu() * factors).sum())}"
        elif not (is_of_classes or has_hidden_states(name)):  # The numbers may differ by rounding errors.
            values = f" with {int((value > 0).sum())} numbers above 0"
        words = "shapes of" if "[" in name else "classes of" if is_of_classes else "the shape of"
        yield f"{words} {name}", f"({', '.join(sizes)}){values}"
        yield f"dtypes of {name}", f"{value.dtype} on {value.device.type}"
        yield f"required gradients of {name}", str(torch.is_grad_enabled() and value.requires_grad)


def _fingerprint_of_shard(name: str, x: Tensor) -> int:
    """Return a hash of some entries of the shard; 0, for no comparison, if its classes are equal or have a NaN."""
    classes = x.detach().movedim(-1 if name == "logits" else 0, 0).unsqueeze(-1)
    classes = classes[:: 1 + len(classes) // _SAMPLES].flatten(1)
    classes = classes[:, :: 1 + classes.shape[1] // _SAMPLES]
    is_constant = bool((classes == classes[:1]).all()) or bool(classes.isnan().any())
    return 0 if is_constant else _hash(repr(classes.tolist()).encode())


def _hash(data: bytes) -> int:
    """Return a hash that is equal for equal data in all processes."""
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def run_on_local_tensors(function: Callable[..., Any], head: tuple[str, str], arguments: dict[str, Any]) -> Any:
    """Return ``function(**arguments)`` for hidden states and a weight, by the names in `head`, that are DTensors. The
    function gets local tensors. Raise ValueError for placements that do not fit, and for plain tensors that have no
    clear division."""
    for name in ("process_group", "vocab_size", "sequence_parallel"):
        if arguments.get(name):
            raise ValueError(f"{name} needs plain tensors: the placements of DTensors state how the head is divided")
    (input, weight), target = (arguments[name] for name in head), arguments.get("target")
    layout = _make_layout(input, weight, head)
    # Before tensors are redistributed. The last dimension comes first, so that calls are in the order of the ranks.
    dims = [k for k in reversed(range(layout.mesh.ndim)) if k == layout.class_dim or k in layout.token_dims]
    _compare_calls(function, arguments, [layout.mesh.get_group(k) for k in dims])

    def local(name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple([local(f"{name}[{k}]", each) for k, each in enumerate(value)])
        if has_hidden_states(name) and value is not None:
            return layout.local_input(name, value)
        if has_classes(name) and value is not None:
            return layout.local_weight(name, value)
        if name in _TOKEN_TENSORS and isinstance(value, Tensor) and value.dim():
            return layout.local_tokens(name, value)
        return full_tensor(value) if name in ("weight", "num_items") else value

    call = dict(arguments)
    if target is not None and layout.token_dims:
        call |= _shift_before_division(arguments, layout)
    call = {name: local(name, value) for name, value in call.items()}
    if layout.class_dim is not None:
        group = layout.mesh.get_group(layout.class_dim)
        call |= {"process_group": group, "vocab_size": len(weight)}
        call["sequence_parallel"] = not layout.input[layout.class_dim].is_replicate()
    if layout.token_dims and call.get("reduction") == "mean" and call["num_items"] is None:
        call |= _global_mean(call, layout)
    result = function(**call)
    is_reduced = arguments.get("reduction", "none") != "none"

    def with_placements(name: str, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        if is_reduced and name in ("loss", "z_loss"):
            return layout.sum(value)
        return layout.result(value, input if target is None else target)

    if isinstance(result, Tensor):
        return with_placements("loss", result)
    if hasattr(result, "_asdict"):
        return type(result)(*itertools.starmap(with_placements, result._asdict().items()))
    return replace(result, **{name: with_placements(name, value) for name, value in vars(result).items()})


class _Layout(NamedTuple):
    """Division of a call over a mesh."""

    head: tuple[str, str]  # names of the hidden states and of the weight, for messages
    mesh: Any
    class_dim: int | None  # the dimension of the mesh that divides the classes
    token_dims: tuple[int, ...]  # other dimensions of the mesh, which divide the tokens
    input: tuple[Any, ...]  # placements of `input` in the call
    tokens: tuple[Any, ...]  # placements of tensors of tokens in the call
    weight: tuple[Any, ...]  # placements of the weight
    shape: torch.Size  # of all tokens

    def partial(self, placements: Sequence[Any]) -> list[Any]:
        """Return placements for values that are sums over tokens, of which each process has a share."""
        from torch.distributed.tensor import Partial

        return [Partial() if k in self.token_dims else placement for k, placement in enumerate(placements)]

    def sum(self, share: Tensor) -> Tensor:
        """Return the sum of 0-d tensors over the dimensions that divide the tokens. Each process calls backward on the
        sum, so the gradient of its share is the gradient of the sum."""
        from torch.distributed.tensor import DTensor, Replicate

        if not self.token_dims:
            return share
        placements = self.partial([Replicate()] * self.mesh.ndim)
        return wait_for(DTensor.from_local(share, self.mesh, placements, run_check=False).full_tensor())

    def local_input(self, name: str, x: Any) -> Tensor:
        return wait_for(self._require_dtensor(name, x, self.head[0]).redistribute(placements=self.input).to_local())

    def local_weight(self, name: str, weight: Any) -> Tensor:
        """Return the shard of this process. Its gradient is summed over the dimensions that divide the tokens."""
        # Without this redistribute the gradient would stay Partial.
        divided = self._require_dtensor(name, weight, self.head[1]).redistribute(placements=self.weight)
        return wait_for(divided.to_local(grad_placements=self.partial(self.weight)))

    def local_tokens(self, name: str, x: Any) -> Tensor:
        """Return the entries of the tokens that this process has in the call."""
        if name.startswith(("candidates", "teacher_topk")) and x.dim() == 1:  # the same classes for all tokens
            return full_tensor(x)
        if not is_dtensor(x) and not self.token_dims:
            return x
        placed = self._require_dtensor(name, x, self.head[0])
        return wait_for(placed.redistribute(placements=self.tokens).to_local())

    def result(self, value: Tensor, like: Any) -> Tensor:
        """Return a result of each token with the placements of `like`; a plain tensor if `like` is plain."""
        if not is_dtensor(like):
            return value
        shape = (*self.shape, *value.shape[len(self.shape) :])
        placed: Tensor = from_local(value, shape, self.mesh, self.tokens).redistribute(placements=like.placements)
        return placed

    def _require_dtensor(self, name: str, x: Any, like: str) -> Any:
        check_tensor(name, x)
        if not is_dtensor(x):
            raise ValueError(f"{name} must be a DTensor on the mesh of {like}, got a plain tensor")
        if x.device_mesh != self.mesh:
            raise ValueError(f"{name} is on {x.device_mesh}, {self.head[1]} is on {self.mesh}: one mesh is needed")
        return x


def _make_layout(input: Any, linear_weight: Any, head: tuple[str, str]) -> _Layout:
    from torch.distributed.tensor import Replicate, Shard

    mesh, last = linear_weight.device_mesh, input.dim() - 1

    def is_shard(placement: Any, num_dims: int, ndim: int) -> bool:
        """Return True for a Shard of one of the first ``num_dims`` dimensions of a tensor."""
        return type(placement) is Shard and placement.dim % ndim < num_dims

    class_dims = [k for k, p in enumerate(linear_weight.placements) if is_shard(p, 1, linear_weight.dim())]
    others = [p for k, p in enumerate(linear_weight.placements) if k not in class_dims]
    fits = len(class_dims) <= 1 and all(p.is_replicate() for p in others) and input.device_mesh == mesh
    if not fits or not all(p.is_replicate() or is_shard(p, last, last + 1) for p in input.placements):
        raise ValueError(
            f"{head[0]} has placements {input.placements} on {input.device_mesh}, {head[1]} has "
            f"{linear_weight.placements} on {linear_weight.device_mesh}. Both must be on one mesh. {head[1]} must be "
            f"Shard(0) on at most one dimension of the mesh and Replicate() on the others. {head[0]} must be "
            "Replicate(), or Shard of a dimension of tokens, on each dimension of the mesh"
        )
    class_dim = class_dims[0] if class_dims else None
    placements = [*input.placements]
    tokens = [Replicate() if k == class_dim else p for k, p in enumerate(placements)]
    if class_dim is not None and not placements[class_dim].is_replicate():
        # The operator gathers equal shares along the last dimension of tokens. DTensor gathers others.
        dim = placements[class_dim].dim
        shares = [mesh.size(k) for k, p in enumerate(placements) if not p.is_replicate() and p.dim == dim]
        if dim != last - 1 or input.shape[dim] % torch.Size(shares).numel():
            placements[class_dim] = Replicate()
    token_dims = tuple(k for k, p in enumerate(tokens) if not p.is_replicate())
    weight = tuple(linear_weight.placements)
    return _Layout(head, mesh, class_dim, token_dims, tuple(placements), tuple(tokens), weight, input.shape[:-1])


def _shift_before_division(arguments: dict[str, Any], layout: _Layout) -> dict[str, Any]:
    """Return the shifted target and mask, and no shift: the next token of a process's last token may be in another
    process."""
    from torch.distributed.tensor import Replicate

    target, mask, ignore_index = arguments["target"], arguments.get("mask"), arguments["ignore_index"]
    shift, last = check_shift(arguments["shift"], target), target.dim() - 1
    placed: dict[str, Any] = {name: x for name, x in (("target", target), ("mask", mask)) if is_dtensor(x)}
    if not shift or "target" not in placed:  # `local_tokens` refuses a plain tensor
        return {}
    placements = [p if p.is_replicate() or p.dim != last else Replicate() for p in layout.tokens]
    shifted: dict[str, Any] = {"shift": 0}
    for name, x in placed.items():
        local = wait_for(x.redistribute(placements=placements).to_local())
        local = shift_target(local, shift, -100 if ignore_index is None else ignore_index)
        shifted[name] = from_local(local, x.shape, layout.mesh, placements)
    return shifted


def _global_mean(call: dict[str, Any], layout: _Layout) -> dict[str, Any]:
    """Return the arguments that divide the sum of this process's losses by the denominator of all tokens."""
    target, weight = call["target"], call["weight"]
    if weight is not None and call["z_loss"]:
        raise ValueError(
            "reduction='mean' of tokens that are divided over a mesh does not support weight together with z_loss: "
            "give reduction='sum' and num_items"
        )
    vocab_size = call["vocab_size"] or len(call["linear_weight"])
    if weight is not None and weight.shape != (vocab_size,):
        raise ValueError(f"weight must have shape {(vocab_size,)}, all classes, got {tuple(weight.shape)}")
    # `long`: the function checks the dtype of targets after this, and int32 would be compared modulo 2^32.
    target = target.long()
    valid = target != (-100 if call["ignore_index"] is None else call["ignore_index"])
    counted = valid if weight is None else valid * weight.detach()[target.clamp(0, len(weight) - 1)]
    count = counted.sum(dtype=accumulation_dtype(call["input"].dtype))
    return {"reduction": "sum", "num_items": layout.sum(count)}


def from_local(local: Tensor, shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Any:
    """Return a contiguous DTensor of this shape. PyTorch cannot infer the shape if shares have unequal sizes."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def full_tensor(x: Any) -> Any:
    """Return the values of a DTensor of all processes, or ``x`` if it is not a DTensor."""
    return wait_for(x.full_tensor()) if is_dtensor(x) else x


def wait_for(local: Any) -> Tensor:
    """Return the tensor after its collective: a DTensor may contain the result of a collective that is still running.
    In a graph of ``torch.compile`` there are none."""
    waited: Tensor = local if type(local).__name__ != "AsyncCollectiveTensor" else _Wait.apply(local)
    return waited


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        waited: Tensor = x.wait()
        return waited

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# ---------------------------------------------------------------------------------------------------------
# Heads that FSDP divides, and labels of all processes


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
    # `long`: PyTorch compares int32 with a number modulo 2^32.
    count = sum((tensor[..., shift:].long() != ignore_index).sum() for tensor in tensors)
    assert isinstance(count, Tensor)
    if group is not None:
        check_group(group)
    if group is not None or (dist.is_available() and dist.is_initialized()):
        dist.all_reduce(count, group=group)
    return count
