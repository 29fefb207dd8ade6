"""The public functions of heads that are divided over processes: with DTensors, or with a process group.

`run_on_local_tensors` calls a function that got DTensors with local tensors, and places the results. One dimension of
the mesh may divide the classes: its process group computes the results. Other dimensions may divide the tokens: losses
are summed over them after the call, and backward sums the gradients of the weights over them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from flce.core.problem import accumulation_dtype
from flce.ops.arguments import autocast_dtype, check_shift, check_tensor, shift_target
from flce.ops.vocabulary_parallel import compare_calls, has_classes, has_hidden_states, is_dtensor, local_logits

P = ParamSpec("P")
R = TypeVar("R")

# Arguments with one entry or row for each token, if they are tensors with dimensions.
_TOKEN_TENSORS = ("target", "token_weight", "candidates", "temperature", "teacher_topk[0]", "teacher_topk[1]")


def supports_divided_heads(function: Callable[P, R]) -> Callable[P, R]:
    """Return the public function with support for DTensors of a head, and with a comparison of its calls in all
    processes of a divided head. Both get all arguments of the signature."""
    parameters = inspect.signature(function).parameters
    first, second, *_ = names = tuple(parameters)
    defaults = {name: None if p.default is p.empty else p.default for name, p in parameters.items()}

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        x, group = given.get(first), kwargs.get("process_group")
        is_placed = is_dtensor(x)
        if is_placed and has_classes(second) and is_dtensor(given.get(second)):
            on_local: R = run_on_local_tensors(wrapper, (first, second), {**defaults, **given})
            return on_local
        if is_placed and first == "logits" and not torch.compiler.is_compiling():
            given["logits"], group, given["vocab_size"] = local_logits(x)
        if group is not None and not torch.compiler.is_compiling():
            device = x.device if isinstance(x, Tensor) else torch.device("cpu")
            settings = {**defaults, **given, "process_group": None, "autocast": autocast_dtype(device.type)}
            compare_calls(function.__name__, settings, group, device)
        return function(*args, **kwargs)

    return wrapper


def run_on_local_tensors(function: Callable[..., Any], head: tuple[str, str], arguments: dict[str, Any]) -> Any:
    """Return ``function(**arguments)`` for hidden states and a weight that are DTensors. The function gets local
    tensors.

    Args:
        function: the public function, which documents the arguments.
        head: the names of the hidden states and the weight.

    Raises:
        ValueError: placements do not fit, or another argument is a plain tensor that has no clear division.
    """
    for name in ("process_group", "vocab_size", "sequence_parallel"):
        if arguments.get(name):
            raise ValueError(f"{name} needs plain tensors: the placements of DTensors state how the head is divided")
    (input, weight), target = (arguments[name] for name in head), arguments.get("target")
    layout = _make_layout(input, weight, head)

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
        call |= _shift_before_division(target, arguments, layout)
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
    if isinstance(result, tuple):
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
        """Return placements for values that are sums over tokens, of which each process has a part."""
        from torch.distributed.tensor import Partial

        return [Partial() if k in self.token_dims else placement for k, placement in enumerate(placements)]

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of 0-d tensors over the dimensions that divide the tokens. Each process calls backward on the
        sum, so the gradient of its part is the gradient of the sum."""
        from torch.distributed.tensor import DTensor, Replicate

        if not self.token_dims:
            return part
        placements = self.partial([Replicate()] * self.mesh.ndim)
        return wait_for(DTensor.from_local(part, self.mesh, placements, run_check=False).full_tensor())

    def local_input(self, name: str, x: Any) -> Tensor:
        return wait_for(self._require_dtensor(name, x, self.head[0]).redistribute(placements=self.input).to_local())

    def local_weight(self, name: str, weight: Any) -> Tensor:
        """Return the slice of this process. Its gradient is summed over the dimensions that divide the tokens."""
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
        _refuse_placements(input, linear_weight, head)
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


def _refuse_placements(input: Any, linear_weight: Any, head: tuple[str, str]) -> NoReturn:
    raise ValueError(
        f"{head[0]} has placements {input.placements} on {input.device_mesh}, {head[1]} has "
        f"{linear_weight.placements} on {linear_weight.device_mesh}. Both must be on one mesh. {head[1]} must be "
        f"Shard(0) on at most one dimension of the mesh and Replicate() on the others. {head[0]} must be Replicate(), "
        "or Shard of a dimension of tokens, on each dimension of the mesh"
    )


def _shift_before_division(target: Any, arguments: dict[str, Any], layout: _Layout) -> dict[str, Any]:
    """Return the shifted target, and no shift: the next token of a process's last token may be in another process."""
    from torch.distributed.tensor import Replicate

    shift, ignore_index = check_shift(arguments["shift"], target), arguments["ignore_index"]
    if not shift or not is_dtensor(target):  # `local_tokens` refuses a plain tensor
        return {}
    last = target.dim() - 1
    placements = [p if p.is_replicate() or p.dim != last else Replicate() for p in layout.tokens]
    local = wait_for(target.redistribute(placements=placements).to_local())
    local = shift_target(local, shift, -100 if ignore_index is None else ignore_index)
    return {"shift": 0, "target": from_local(local, target.shape, layout.mesh, placements)}


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
    valid = target != (-100 if call["ignore_index"] is None else call["ignore_index"])
    # `long`: the function checks the dtype of targets after this.
    counted = valid if weight is None else valid * weight.detach()[target.clamp(0, len(weight) - 1).long()]
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
