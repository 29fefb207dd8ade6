"""What the public functions do alike with their arguments before the work, and with its results after it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_unary

from flce.backends.contract import RowOutputs, log_sum_exp
from flce.core.numbers import integer, real
from flce.core.options import ChunkOptions
from flce.core.problem import (
    OUTPUTS,
    LinearCrossEntropyOutput,
    LinearLogprobsOutput,
    LogprobSpec,
    LossSpec,
    accumulation_dtype,
)
from flce.core.shard import Shard
from flce.ops import vocabulary_parallel
from flce.ops.split_head import NOT_SPLIT, Operands, SplitHead, refuse_dtensors, split
from flce.torch_ops.frames import is_differentiated_forward

P = ParamSpec("P")
R = TypeVar("R")

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LinearArguments(NamedTuple):
    """Checked arguments of `flce.fused_linear_cross_entropy`, in the dtypes in which they are computed with."""

    input: Tensor  # (..., H)
    linear_weight: Tensor  # (V, d_1, ..., d_K, H)
    target: Tensor  # (..., d_1, ..., d_K) indices or (..., V, d_1, ..., d_K) probabilities
    linear_bias: Tensor | None  # (V, d_1, ..., d_K)
    adapters: Sequence[tuple[Tensor, Tensor]]  # (..., r) and (V, r) each; none for K > 0
    weight: Tensor | None  # (V,)
    token_weight: Tensor | None  # (..., d_1, ..., d_K)
    num_items: Tensor | None  # ()
    shift: int
    composed: bool
    """Whether PyTorch's operators are what computes it, with logits in memory."""
    shard: Shard | None
    """What of the classes the weights have; None: all."""


def linear_arguments(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    adapters: Sequence[tuple[Tensor, Tensor]],
    weight: Tensor | None,
    token_weight: Tensor | None,
    num_items: int | Tensor | None,
    shift: int,
    options: ChunkOptions | None,
    spec: LossSpec,
    how: SplitHead = NOT_SPLIT,
    function: str = "fused_linear_cross_entropy",
) -> LinearArguments:
    """All checks of the arguments of `flce.fused_linear_cross_entropy` but those of `spec`. It documents the errors.

    `how`: the head is divided. `function`: the one that is called.
    """
    shard, weighted = None, 0
    instead = "torch.nn.functional.linear and torch.nn.functional.cross_entropy"
    operands = {"input": input, "linear_weight": linear_weight, **_by_name(adapters)}
    optional = {"linear_bias": linear_bias, "weight": weight, "token_weight": token_weight}
    check_tensors({**operands, "target": target}, optional)
    if input.dim() < 1:
        raise ValueError("input must have shape (..., H), got a 0-d tensor")
    if linear_weight.dim() < 2:
        raise ValueError(f"linear_weight must have shape (V, H), got {tuple(linear_weight.shape)}")
    if input.shape[-1] != linear_weight.shape[-1]:
        transposed = linear_weight.dim() == 2 and linear_weight.shape[0] == input.shape[-1]
        raise ValueError(
            f"linear_weight must have shape (V, H) with the H of input, {input.shape[-1]}, got "
            f"{tuple(linear_weight.shape)} with input {tuple(input.shape)}"
            f"{': give linear_weight.t()' if transposed else ''}"
        )
    refuse_dtensors(input, linear_weight)
    check_options(options)
    shift = check_shift(shift, target)
    if how != NOT_SPLIT:
        if target.is_floating_point():
            raise ValueError("process_group needs class-index targets, got class probabilities")
        told = {
            "the shape of target": tuple(target.shape),
            "the shape of token_weight": None if token_weight is None else tuple(token_weight.shape),
            "shift": shift,
            "options": (spec, options),
        }
        # Before the input is gathered, which would lose its tangent.
        refuse_forward_mode(function, instead, (*operands.values(), linear_bias, token_weight))
        size = len(linear_weight)
        given, shard = split(Operands(input, linear_weight, linear_bias, adapters), how, weight, told)
        input, linear_weight, linear_bias, adapters = given
        # Class weights are those of all classes, or of these.
        weighted = size if weight is not None and weight.shape == (size,) else shard.vocab_size
        operands = {"input": input, "linear_weight": linear_weight, **_by_name(adapters)}
    if autocast_dtype(input.device.type) is not None:
        operands = {name: _autocast(tensor) for name, tensor in operands.items()}
    input, linear_weight, *others = operands.values()
    if input.dtype not in FLOATING:
        raise TypeError(f"input must be float16, bfloat16, float32 or float64, got {input.dtype}")
    for name, value in operands.items():
        if value.dtype != input.dtype:
            raise TypeError(
                f"input and {name} must have one dtype (after autocast, where it is on), "
                f"got {input.dtype} and {value.dtype}"
            )
    if linear_bias is not None:
        linear_bias = _wide_bias(linear_bias, input)
    num_items = num_items_tensor(num_items, spec, input)
    adapters = tuple(zip(others[::2], others[1::2], strict=True))
    leading, (vocab_size, *inner) = input.shape[:-1], linear_weight.shape[:-1]
    weighted = vocab_size if shard is None else weighted
    tokens, probabilities = (*leading, *inner), target.is_floating_point()
    composed = probabilities or bool(inner)
    if adapters and inner:
        raise ValueError(f"adapters need a two-dimensional linear_weight, got shape {tuple(linear_weight.shape)}")
    _check_shapes(
        input,
        linear_weight,
        adapters,
        ("target", target, (*leading, vocab_size, *inner) if probabilities else tokens),
        ("linear_bias", linear_bias, (vocab_size, *inner)),
        ("weight", weight, (weighted,)),
        ("token_weight", token_weight, tokens),
    )
    if composed:
        if shift:
            raise ValueError("shift needs class-index targets and a two-dimensional linear_weight")
        _check_composed(spec, probabilities)
    elif shard is None:  # with one it was refused before
        refuse_forward_mode(function, instead, (input, linear_weight, linear_bias, token_weight, *others))
    return LinearArguments(
        input, linear_weight, target, linear_bias, adapters, weight, token_weight, num_items, shift, composed, shard
    )


class LogprobArguments(NamedTuple):
    """Checked arguments of `flce.linear_logprobs`, in the dtypes in which they are computed with."""

    linear: LinearArguments
    spec: LogprobSpec
    candidates: Tensor | None  # (N, K) int64
    row_factor: Tensor | None  # (N,) one over the temperature of each token


# The most candidates, and the largest `top_k`.
MOST_ENTRIES = 256


def logprob_arguments(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    candidates: Tensor | None,
    top_k: int,
    outputs: Sequence[str],
    linear_bias: Tensor | None,
    adapters: Sequence[tuple[Tensor, Tensor]],
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int | None,
    shift: int,
    options: ChunkOptions | None,
    how: SplitHead,
) -> LogprobArguments:
    """All checks of the arguments of `flce.linear_logprobs`, which documents the errors."""
    outputs = check_outputs(outputs)
    check_tensor("input", input), check_tensor("linear_weight", linear_weight)
    if target is None:
        for name in ("logprob", "correct"):
            if name in outputs:
                raise ValueError(f"outputs has {name!r}, which needs a target; got target=None")
        if shift:
            raise ValueError(f"shift={shift} needs a target, got target=None")
        # Any class: nothing that depends on it is asked for. No position is ignored.
        target, ignore_index = torch.zeros(how.tokens(input), dtype=torch.int64, device=input.device), -100
    elif isinstance(target, Tensor) and target.is_floating_point():
        raise TypeError(f"target must hold class indices in int64 or int32, got {target.dtype}")
    if linear_weight.dim() > 2:
        raise ValueError(f"linear_weight must have shape (V, H), got {tuple(linear_weight.shape)}")
    tokens = how.tokens(input)
    each, of_all = None, 1.0
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        each = _checked_temperature(temperature, tokens, input)
    else:
        of_all = real("temperature", temperature)
    top_k = check_top_k(top_k)
    if top_k > len(linear_weight) and how.process_group is None:
        raise ValueError(f"top_k must be at most the {len(linear_weight)} classes of linear_weight, got {top_k}")
    if candidates is not None:
        candidates = _checked_candidates(candidates, tokens, input)
    spec = LogprobSpec(
        ignore_index=-100 if ignore_index is None else ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=of_all,
        stats=outputs,
        candidates=0 if candidates is None else candidates.shape[-1],
        top_k=top_k,
        row_temperature=each is not None,
    )
    linear = linear_arguments(
        input, linear_weight, target, linear_bias, adapters, None, None, None, shift, options, spec, how,
        "linear_logprobs",
    )  # fmt: skip
    if linear.shard is not None and top_k > linear.shard.vocab_size:
        raise ValueError(f"top_k must be at most the {linear.shard.vocab_size} classes of all processes, got {top_k}")
    if options is not None and options.logits_dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            "linear_logprobs never rounds logits: options.logits_dtype must be None, torch.float32 or torch.float64, "
            f"got {options.logits_dtype}"
        )
    if each is not None:
        each = 1.0 / each.to(accumulation_dtype(linear.input.dtype)).reshape(-1)
    return LogprobArguments(linear, spec, candidates, each)


def check_top_k(top_k: int) -> int:
    """As an int; TypeError or ValueError for what is none from 0 to `MOST_ENTRIES`."""
    top_k = integer("top_k", top_k)
    if not 0 <= top_k <= MOST_ENTRIES:
        raise ValueError(f"top_k must be from 0 to {MOST_ENTRIES}, got {top_k}")
    return top_k


def check_outputs(outputs: Sequence[str]) -> tuple[str, ...]:
    """As a tuple; TypeError or ValueError for what are no names of results, each once."""
    if isinstance(outputs, str) or not isinstance(outputs, (tuple, list)):
        raise TypeError(f"outputs must be a tuple of names out of {OUTPUTS}, got {outputs!r}")
    for number, name in enumerate(outputs):
        if name not in OUTPUTS:
            raise ValueError(f"unknown output {name!r}; expected any of {OUTPUTS}")
        if name in outputs[:number]:
            raise ValueError(f"outputs has {name!r} twice, got {tuple(outputs)}")
    return tuple(outputs)


def _checked_temperature(temperature: Tensor, tokens: tuple[int, ...], input: Tensor) -> Tensor:
    """One of each token. Its values are looked at in the operator, which tracers do not see into."""
    if not temperature.is_floating_point():
        raise TypeError(f"temperature must be a number or have a floating dtype, got {temperature.dtype}")
    if temperature.device != input.device:
        raise ValueError(
            f"all tensors must be on one device, got input on {input.device} and temperature on {temperature.device}"
        )
    if temperature.requires_grad:
        raise ValueError("temperature gets no gradient, got a tensor that requires grad: give temperature.detach()")
    if temperature.shape != tokens:
        raise ValueError(
            f"temperature must be a number or have shape {tokens} with input {tuple(input.shape)}, "
            f"got {tuple(temperature.shape)}"
        )
    return temperature


def _checked_candidates(candidates: Tensor, tokens: tuple[int, ...], input: Tensor) -> Tensor:
    """(N, K) int64."""
    check_tensor("candidates", candidates)
    if candidates.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"candidates must hold class indices in int64 or int32, got {candidates.dtype}")
    if candidates.device != input.device:
        raise ValueError(
            f"all tensors must be on one device, got input on {input.device} and candidates on {candidates.device}"
        )
    if candidates.dim() == 0 or candidates.shape[:-1] not in ((), tokens):
        raise ValueError(
            f"candidates must have shape (K,) or {(*tokens, 'K')} with input {tuple(input.shape)}, "
            f"got {tuple(candidates.shape)}"
        )
    if candidates.shape[-1] > MOST_ENTRIES:
        raise ValueError(f"candidates must be at most {MOST_ENTRIES} for a token, got {candidates.shape[-1]}")
    size = candidates.shape[-1]
    return candidates.to(torch.int64).expand(*tokens, size).reshape(math.prod(tokens), size)


class LogitsArguments(NamedTuple):
    """Checked arguments of `flce.cross_entropy`; of a DTensor what this process has of it."""

    logits: Tensor  # (..., cols)
    target: Tensor  # (...) indices or (..., V) probabilities
    weight: Tensor | None  # (V,)
    token_weight: Tensor | None  # (...)
    num_items: Tensor | None  # ()
    shift: int
    shard: Shard | None  # None: cols is V

    @property
    def composed(self) -> bool:
        """Whether PyTorch's operators are what computes it."""
        return self.target.is_floating_point()


def logits_arguments(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    num_items: int | Tensor | None,
    shift: int,
    inplace: bool,
    process_group: dist.ProcessGroup | None,
    vocab_size: int | None,
    spec: LossSpec,
) -> LogitsArguments:
    """All checks of the arguments of `flce.cross_entropy` but those of `spec`. It documents the errors."""
    check_tensors({"logits": logits, "target": target}, {"weight": weight, "token_weight": token_weight})
    shift = check_shift(shift, target)
    check_inplace(inplace)
    if logits.dim() < 1:
        raise ValueError("logits must have shape (..., V), got a 0-d tensor")
    if logits.dtype not in FLOATING:
        raise TypeError(f"logits must be float16, bfloat16, float32 or float64, got {logits.dtype}")
    if vocabulary_parallel.is_dtensor(logits):
        if process_group is not None or vocab_size is not None:
            raise ValueError("process_group and vocab_size are for plain tensors; a DTensor has them itself")
        logits, process_group, vocab_size = vocabulary_parallel.local_logits(logits)
    target = vocabulary_parallel.local_vector(target, "target")
    weight = vocabulary_parallel.local_vector(weight, "weight")
    token_weight = vocabulary_parallel.local_vector(token_weight, "token_weight")
    shard = None
    if process_group is not None:
        shard = vocabulary_parallel.shard_of(logits.shape[-1], vocab_size, process_group)
    elif vocab_size is not None:
        raise ValueError(f"vocab_size={vocab_size} needs a process_group")
    _check_logits_shapes(logits, target, weight, token_weight, logits.shape[-1] if shard is None else shard.vocab_size)
    num_items = num_items_tensor(num_items, spec, logits)
    if target.is_floating_point():
        for name, value in {"shift": shift, "inplace=True": inplace, "process_group": shard}.items():
            if value:
                raise ValueError(f"{name} needs class-index targets, got class probabilities")
        _check_composed(spec, probabilities=True)
    else:
        refuse_forward_mode("cross_entropy", "torch.nn.functional.cross_entropy", (logits, token_weight))
    return LogitsArguments(logits, target, weight, token_weight, num_items, shift, shard)


def check_tensor(name: str, value: Any) -> Tensor:
    """The value, or TypeError for anything but a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    return value


def check_tensors(required: Mapping[str, Tensor], optional: Mapping[str, Tensor | None]) -> None:
    """Tensors on the device of the first, all but the target in a floating dtype.

    Raises:
        TypeError, ValueError: what is wrong, by name.
    """
    first = next(iter(required))
    for name, given in {**required, **optional}.items():
        if given is None and name in optional:
            continue
        value = check_tensor(name, given)
        if value.device != required[first].device:
            raise ValueError(
                f"all tensors must be on one device, got {first} on {required[first].device} "
                f"and {name} on {value.device}"
            )
        if name != "target" and not value.is_floating_point():
            raise TypeError(f"{name} must have a floating dtype, got {value.dtype}")
    target = required["target"]
    if not target.is_floating_point() and target.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            "target must hold class indices in int64 or int32, or class probabilities in a floating dtype, "
            f"got {target.dtype}"
        )


def _by_name(adapters: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all adapters, named as messages name them."""
    if not isinstance(adapters, (tuple, list)):
        raise TypeError(f"adapters must be a sequence of pairs of tensors, got {type(adapters).__name__}")
    for k, pair in enumerate(adapters):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"adapters[{k}] must be a pair of tensors (..., r) and (V, r), got {_describe(pair)}")
    return {f"adapters[{k}][{i}]": tensor for k, pair in enumerate(adapters) for i, tensor in enumerate(pair)}


def _describe(value: object) -> str:
    return f"{len(value)} values" if isinstance(value, (tuple, list)) else type(value).__name__


def _check_shapes(
    input: Tensor,
    linear_weight: Tensor,
    adapters: Sequence[tuple[Tensor, Tensor]],
    *expected: tuple[str, Tensor | None, tuple[int, ...]],
) -> None:
    """ValueError for an empty head or adapter, or for the first of (name, tensor, shape) that has another shape."""
    if linear_weight.shape[0] == 0 or linear_weight.shape[-1] == 0:
        raise ValueError(f"linear_weight must have V > 0 and H > 0, got shape {tuple(linear_weight.shape)}")
    for k, (a, b) in enumerate(adapters):
        rank = b.shape[-1] if b.dim() else 0
        if rank == 0:
            raise ValueError(f"adapters[{k}][1] must have shape (V, r) with r > 0, got {tuple(b.shape)}")
        expected += (
            (f"adapters[{k}][0]", a, (*input.shape[:-1], rank)),
            (f"adapters[{k}][1]", b, (linear_weight.shape[0], rank)),
        )
    for name, value, shape in expected:
        if value is not None and tuple(value.shape) != shape:
            hint = ""
            if name == "target":
                swapped = tuple(value.shape) == tuple(linear_weight.shape[:-1])
                hint = ": hidden states come first, then linear_weight" if swapped else _floating_hint(value, input)
            raise ValueError(
                f"{name} must have shape {shape} with input {tuple(input.shape)} and linear_weight "
                f"{tuple(linear_weight.shape)}, got {tuple(value.shape)}{hint}"
            )


def _floating_hint(target: Tensor, input: Tensor) -> str:
    """What to add where a floating target has the shape of class indices."""
    if not target.is_floating_point() or target.shape != input.shape[:-1]:
        return ""
    return ": a floating target is read as class probabilities, for indices call .long()"


def _check_logits_shapes(
    logits: Tensor, target: Tensor, weight: Tensor | None, token_weight: Tensor | None, vocab_size: int
) -> None:
    tokens = tuple(logits.shape[:-1])
    if vocab_size == 0:
        raise ValueError(f"logits must have V > 0 classes, got shape {tuple(logits.shape)}")
    expected = (*tokens, logits.shape[-1]) if target.is_floating_point() else tokens
    if tuple(target.shape) != expected:
        second_is_class = logits.dim() > 2 and tuple(target.shape) == (logits.shape[0], *logits.shape[2:])
        hint = ": for classes in the second dimension give logits.movedim(1, -1)" if second_is_class else ""
        hint = hint or _floating_hint(target, logits)
        raise ValueError(
            f"target must have shape {expected} with logits {tuple(logits.shape)}, whose last dimension are the "
            f"classes, got {tuple(target.shape)}{hint}"
        )
    for name, value, shape in (("weight", weight, (vocab_size,)), ("token_weight", token_weight, tokens)):
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape} with logits {tuple(logits.shape)}, got {tuple(value.shape)}"
            )


# The fields of `LossSpec` that `ops.composed` computes. It refuses an option that is not here.
COMPOSED_FIELDS = {
    "reduction", "ignore_index", "label_smoothing", "softcap", "logit_scale", "temperature", "z_loss", "stats"
}  # fmt: skip


def _check_composed(spec: LossSpec, probabilities: bool) -> None:
    """ValueError for what PyTorch's operators do not compute here, or is defined for class indices only."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name not in COMPOSED_FIELDS and value != field.default:
            raise ValueError(f"{field.name}={value!r} needs class-index targets and a weight of two dimensions")
    if not probabilities:
        return
    if {"logprob", "correct"} & set(spec.stats):
        raise ValueError("stats 'logprob' and 'correct' need class-index targets, got class probabilities")
    if spec.ignore_index >= 0:
        raise ValueError(f"ignore_index={spec.ignore_index} needs class-index targets, got class probabilities")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast casts to on such devices; None where it is off, or where there is none, as for meta tensors."""
    # Asking about a device without autocast raises; the compiler, which has none such, cannot trace the question.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return torch.get_autocast_dtype(device_type) if available and torch.is_autocast_enabled(device_type) else None


def narrowed(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """What autocast makes of an operand of a matrix product: it leaves float64 alone."""
    autocast = autocast_dtype(device_type)
    return dtype if autocast is None or dtype == torch.float64 else autocast


def widened(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype of what autocast makes in float32, losses and softmax among it: it leaves float64 alone."""
    autocast = autocast_dtype(device_type)
    return dtype if autocast is None or dtype == torch.float64 else torch.float32


def _autocast(tensor: Tensor) -> Tensor:
    """Cast as autocast casts the arguments of `F.linear`: all floating ones but float64."""
    return tensor.to(narrowed(tensor.dtype, tensor.device.type))


def _wide_bias(linear_bias: Tensor, input: Tensor) -> Tensor:
    """In the dtype in which it is added to the logits, not rounded to a narrower one by autocast on the way."""
    accum = accumulation_dtype(input.dtype)
    narrow = _autocast(linear_bias).dtype == input.dtype and linear_bias.dtype.itemsize <= accum.itemsize
    if not narrow and linear_bias.dtype not in (input.dtype, accum):
        raise TypeError(
            f"linear_bias must have the dtype of input, {input.dtype}, or {accum} (after autocast, where it is on), "
            f"got {linear_bias.dtype}"
        )
    return linear_bias.to(accum)


def refuse_forward_mode(function: str, instead: str, tensors: Iterable[Tensor | None]) -> None:
    """RuntimeError for a tensor with a forward-mode tangent, which would be lost without a word."""
    # Looked up here, for what is asked in every call and traced with it: mostly there are no dual tensors anywhere.
    if not is_differentiated_forward():
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(
            f"flce.{function} does not support forward-mode differentiation (torch.func.jvp, torch.func.jacfwd, dual "
            f"tensors of torch.autograd.forward_ad): use {instead} for that, or backward and torch.autograd.grad"
        )


def refuse_double_backward(function: str, instead: str) -> None:
    """RuntimeError within a backward that is to be differentiated itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{function} cannot be differentiated twice (create_graph=True): its gradients are not part of the graph. "
            f"Use {instead} for that."
        )


def check_shift(shift: int, target: Tensor | None = None) -> int:
    """As an int; TypeError or ValueError for what is none >= 0, or not for a target that is there."""
    shift = integer("shift", shift)
    if shift < 0:
        raise ValueError(f"shift must be >= 0, got {shift}")
    if shift and target is not None and target.dim() == 0:
        raise ValueError("shift needs a target with at least one dimension, got a 0-d target")
    return shift


def check_inplace(inplace: bool) -> None:
    """Raises TypeError for anything but a bool."""
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace must be a bool, got {type(inplace).__name__}")


def check_options(options: ChunkOptions | None) -> None:
    """Raises TypeError for options of another type."""
    if options is not None and not isinstance(options, ChunkOptions):
        raise TypeError(f"options must be None or a flce.ChunkOptions, got {type(options).__name__}")


def shifted(target: Tensor, shift: int, ignore_index: int) -> Tensor:
    """target[..., t + shift] at position t, and `ignore_index` at the last `shift` positions.

    Raises:
        ValueError: the sequence is shorter than that.
    """
    if shift == 0:
        return target
    if shift > target.shape[-1]:
        raise ValueError(
            f"shift must be at most the length of the sequence, the last dimension of target {tuple(target.shape)}, "
            f"got {shift}"
        )
    return F.pad(target[..., shift:], (0, shift), value=ignore_index)


def num_items_tensor(num_items: int | Tensor | None, spec: LossSpec, input: Tensor) -> Tensor | None:
    """As a 0-d tensor on the device of `input`, which nothing waits for."""
    if num_items is None:
        return None
    if spec.reduction != "sum":
        raise ValueError(f"num_items needs reduction='sum', got reduction={spec.reduction!r}")
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items must be a number or a 0-d tensor, got shape {tuple(num_items.shape)}")
        return num_items.detach().reshape(()).to(input.device, non_blocking=True)
    number = real("num_items", num_items)
    if not 0 < number < float("inf"):
        raise ValueError(f"num_items must be > 0 and finite, got {number}")
    return torch.full((), number, dtype=accumulation_dtype(input.dtype), device=input.device)


def output(rows: RowOutputs, target: Tensor, shape: torch.Size, spec: LossSpec) -> Tensor | LinearCrossEntropyOutput:
    """The loss, or with statistics all that was asked for.

    Args:
        rows: of N tokens, the losses reduced.
        target: (N,) as the loss saw it.
        shape: of the losses of all tokens.
    """
    loss = rows.loss.reshape(shape) if spec.reduction == "none" else rows.loss
    if not spec.stats:
        return loss
    made: dict[str, Any] = {
        name: getattr(rows, name) for name in LinearCrossEntropyOutput._fields if hasattr(rows, name)
    }
    if "lse" in spec.stats:
        made["lse"] = log_sum_exp(rows.normalizer)
    if "correct" in spec.stats:  # argmax is -1 where ignored, which may be what ignore_index is
        made["correct"] = (made["argmax"] == target) & (target != spec.ignore_index)
    if "argmax" not in spec.stats:
        made["argmax"] = None

    for name, value in made.items():
        if value is not None:
            made[name] = value.detach().reshape(shape) if value.dim() else value.detach()
    made["loss"] = loss
    return LinearCrossEntropyOutput(**made)


# A compiler cannot look at fields.
_OF_LOGPROBS = tuple(field.name for field in fields(LinearLogprobsOutput))


def logprob_output(
    made: Mapping[str, Tensor | None], target: Tensor, tokens: torch.Size, spec: LogprobSpec
) -> LinearLogprobsOutput:
    """The results that were asked for, in the shape of the tokens.

    Args:
        made: those of N tokens by name; the argmax is there for "correct", too.
        target: (N,) as the call saw it.
    """
    named = dict(made)
    argmax = made["argmax"]
    if "correct" in spec.stats:
        assert argmax is not None
        named["correct"] = (argmax == target) & (target != spec.ignore_index)
    if "argmax" not in spec.stats:
        named["argmax"] = None
    shaped = {}
    for name in _OF_LOGPROBS:
        value = named.get(name)
        if value is not None:
            shaped[name] = value.reshape((*tokens, *value.shape[1:]))
    return LinearLogprobsOutput(**shaped)


def overridable(function: Callable[P, R]) -> Callable[P, R]:
    """A public function that asks ``__torch_function__`` of its first argument, `logits`, as those of PyTorch do."""

    @functools.wraps(function)
    def ask(*args: P.args, **kwargs: P.kwargs) -> R:
        logits: Any = args[0] if args else kwargs.get("logits")
        if not has_torch_function_unary(logits):
            return function(*args, **kwargs)
        rest: Any = (args[1:], {name: value for name, value in kwargs.items() if name != "logits"})
        overridden: R = handle_torch_function(ask, (logits,), logits, *rest[0], **rest[1])
        return overridden

    return ask
