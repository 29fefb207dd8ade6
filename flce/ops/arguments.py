"""Checks and casts of the arguments of the public functions. Called by `functional`, `modules` and `ops`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_unary

from flce.core import private
from flce.core.numbers import check_float, check_int
from flce.core.options import ChunkOptions
from flce.core.problem import MAX_ENTRIES, LogprobSpec, LossSpec, accumulation_dtype
from flce.ops import vocabulary_parallel
from flce.ops.vocabulary_parallel import DivisionArguments
from flce.torch_ops import is_in_forward_ad, is_in_transform

P = ParamSpec("P")
R = TypeVar("R")

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INDEX_DTYPES = (torch.int64, torch.int32)
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
# Tensors that may be None, and the dtypes of tensors that are not floating.
_OPTIONAL = {"linear_bias", "weight", "token_weight"}
_DTYPES = {"target": _INDEX_DTYPES, "candidates": _INDEX_DTYPES, "mask": (torch.bool,)}
# Tensors that must be equal in all processes of a divided head.
_REPLICATED_TENSORS = {"target", "candidates", "mask", "weight", "token_weight", "temperature", "num_items"}
# A hint in messages: calls that were written for other libraries often have another order.
_ARGUMENT_ORDER = "hidden states come first, then linear_weight, then target"
# PyTorch's functions that support every kind of derivative, for messages.
_STOCK_LOSS = "torch.nn.functional.linear and torch.nn.functional.cross_entropy"
_STOCK_LOGPROBS = "torch.nn.functional.linear and torch.nn.functional.log_softmax"


def check_linear_arguments(
    operands: Mapping[str, Tensor],
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    token_weight: Tensor | None,
    options: ChunkOptions | None,
    spec: LossSpec,
) -> None:
    """Check the arguments of `flce.fused_linear_cross_entropy`, which documents the errors, before any work.

    Function calls cost host time: warm calls enter few functions, and error messages are built elsewhere.

    Args:
        operands: inputs and weights of all linear terms, by argument name, the head first.
        spec: the checked scalar arguments; a `LogprobSpec` for the arguments of `flce.linear_logprobs`.
    """
    tensors = {"linear_bias": linear_bias, "weight": weight, "token_weight": token_weight}
    check_tensors({**operands, "target": target, **tensors})
    input, linear_weight, *_ = operands.values()
    if input.dim() < 1 or linear_weight.dim() != 2 or input.shape[-1] != linear_weight.shape[-1]:
        _refuse_head(input, linear_weight, target, is_loss=not isinstance(spec, LogprobSpec))
    if weight is not None:
        refuse_class_weight_gradient(weight)
    if options is not None:
        check_options(options)
    if is_in_transform():
        # Checked before the input is gathered, because the gathered input has no tangent.
        is_logprobs = isinstance(spec, LogprobSpec)
        names = ("linear_logprobs", _STOCK_LOGPROBS) if is_logprobs else ("fused_linear_cross_entropy", _STOCK_LOSS)
        refuse_transforms(*names, (*operands.values(), target, linear_bias, token_weight), refuse_vmap=True)


def check_shapes(
    operands: Mapping[str, Tensor],
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    token_weight: Tensor | None,
    num_class_weights: int,
) -> None:
    """Check the shapes of the arguments, and that `operands`, which were gathered and cast, have one dtype."""
    input, linear_weight, *others = operands.values()
    for name, value in operands.items():
        if value.dtype != input.dtype or input.dtype not in FLOATING:
            _refuse_dtype_of_operand(name, value, input)
    tokens, local_vocab_size = input.shape[:-1], len(linear_weight)
    if not local_vocab_size or not input.shape[-1]:
        raise ValueError(f"linear_weight must have V > 0 and H > 0, got shape {tuple(linear_weight.shape)}")
    if others:
        _check_adapters(others, input, linear_weight)
    for name, tensor, shape in (
        ("target", target, tokens),
        ("linear_bias", linear_bias, (local_vocab_size,)),
        ("weight", weight, (num_class_weights,)),
        ("token_weight", token_weight, tokens),
    ):
        if tensor is not None and tensor.shape != shape:
            refuse_shape(name, tensor, shape, {"input": input, "linear_weight": linear_weight})


def check_logprob_tensors(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    candidates: Tensor | None,
    mask: Tensor | None,
    row_temperature: Tensor | None,
    division: DivisionArguments,
) -> None:
    """Check the tensors of `flce.linear_logprobs`, which documents the errors, except what its head has in common with
    the loss. `row_temperature`: the temperature, if it is a tensor with one number for each token."""
    optional = {"target": target, "candidates": candidates, "mask": mask, "temperature": row_temperature}
    check_tensors({"input": input, "linear_weight": linear_weight, **optional}, optional)
    refuse_transforms("linear_logprobs", _STOCK_LOGPROBS, (candidates, mask, row_temperature), refuse_vmap=True)
    tokens = division.tokens(input)
    name, shape = ("all tokens", tokens) if target is None else ("target", tuple(target.shape))
    if mask is not None and mask.shape != shape:
        raise ValueError(f"mask must have the shape of {name}, {shape}, got {tuple(mask.shape)}")
    if candidates is not None:
        if candidates.dim() == 0 or candidates.shape[:-1] not in ((), tokens):
            raise ValueError(
                f"candidates must have shape (K,) or ({', '.join(map(str, (*tokens, 'K')))}) with input "
                f"{tuple(input.shape)}, got {tuple(candidates.shape)}"
            )
        if candidates.shape[-1] > MAX_ENTRIES:
            raise ValueError(f"candidates must be at most {MAX_ENTRIES} for a token, got {candidates.shape[-1]}")
    if row_temperature is not None:
        if row_temperature.requires_grad:
            raise ValueError("temperature gets no gradient, got a tensor that requires grad: give temperature.detach()")
        if row_temperature.shape != tokens:
            raise ValueError(
                f"temperature must be a number or have shape {tokens} with input {tuple(input.shape)}, "
                f"got {tuple(row_temperature.shape)}"
            )


def check_logprob_arguments(
    target: Tensor | None, shift: int, options: ChunkOptions | None, spec: LogprobSpec, vocab_size: int, of: str
) -> None:
    """Check the other arguments of `flce.linear_logprobs`. `of`: the tensors that have `vocab_size` classes."""
    if target is None:
        for name in {"logprob", "correct"}.intersection(spec.stats):
            raise ValueError(f"outputs has {name!r}, which needs a target; got target=None")
        if shift:
            raise ValueError(f"shift={shift} needs a target, got target=None")
    if spec.top_k > vocab_size:
        raise ValueError(f"top_k must be at most the {vocab_size} classes of {of}, got {spec.top_k}")
    if options is not None and options.logits_dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            "linear_logprobs never rounds logits: options.logits_dtype must be None, torch.float32 or torch.float64, "
            f"got {options.logits_dtype}"
        )


# ---------------------------------------------------------------------------------------------------------
# Tensors


def check_tensors(tensors: Mapping[str, Any], optional: Collection[str] = _OPTIONAL, dtensors: bool = False) -> None:
    """Check that tensors, by argument name, are dense, on the device of the first tensor, and of a dtype that fits the
    name. `optional`: names of tensors that may be None. `dtensors`: True if a `DTensor` is allowed."""
    first: Any = None
    for name, value in tensors.items():
        if value is None and name in optional:
            continue
        if type(value) not in PLAIN_TENSORS or value.layout is not torch.strided or value.is_nested:
            check_tensor(name, value)
            _check_subclass(name, value, dtensors)
        first = value if first is None else first
        if value.device != first.device:
            raise ValueError(
                f"all tensors must be on one device, got {next(iter(tensors))} on {first.device} and {name} on "
                f"{value.device}"
            )
        if not (value.dtype in _DTYPES[name] if name in _DTYPES else value.is_floating_point()):
            _refuse_dtype(name, value, tensors)


def check_tensor(name: str, value: Any) -> Tensor:
    """Return the value; raise TypeError if it is not a dense tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    if value.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested tensor: give its tokens one after the other, "
            f"torch.cat({name}.unbind())"
        )
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one of layout {value.layout}: give {name}.to_dense()")
    return value


def _check_subclass(name: str, value: Tensor, dtensors: bool) -> None:
    if vocabulary_parallel.is_dtensor(value) and not dtensors:
        if name == "linear_weight":
            raise ValueError(
                "linear_weight is a DTensor, input is a plain tensor. If each process has different tokens, as with "
                "FSDP, give flce.gathered(linear_weight). If all have the same tokens (vocabulary parallelism), give "
                "linear_weight.to_local(), process_group=... and vocab_size=..."
            )
        placements: Any = getattr(value, "placements", ())
        is_part = name in _REPLICATED_TENSORS and not all(placement.is_replicate() for placement in placements)
        raise ValueError(
            f"{name} must be a plain tensor, got a DTensor: give {name}.{'full_tensor' if is_part else 'to_local'}()"
        )
    if name == "linear_weight" and is_quantised(value):
        _refuse_quantised(value)


def is_quantised(weight: Tensor) -> bool:
    """Return True if the elements of a head's weight are not its values: bitsandbytes, torchao, narrow dtypes."""
    own_dequantize = type(weight).dequantize is not Tensor.dequantize
    return weight.dtype not in FLOATING or own_dequantize or getattr(weight, "quant_state", None) is not None


def _refuse_quantised(weight: Tensor) -> NoReturn:
    kind = "" if type(weight) in PLAIN_TENSORS else f"{type(weight).__name__} of "
    raise TypeError(
        f"linear_weight must be float16, bfloat16, float32 or float64, got a {kind}{weight.dtype} tensor, as of a "
        "quantised head. Keep the head out of the quantisation (for example by listing it among the modules that the "
        "quantiser skips), or give a dequantised weight"
    )


def _refuse_dtype(name: str, value: Tensor, tensors: Mapping[str, Any]) -> NoReturn:
    if name == "mask":
        raise TypeError(f"mask must be True for targets that count, in torch.bool, got {value.dtype}: give mask.bool()")
    if name in _DTYPES:
        hint = ": for indices give target.long()" if name == "target" and value.is_floating_point() else ""
        if hint and "weight" in tensors:  # the arguments of a loss
            logits = "logits" if "logits" in tensors else "torch.nn.functional.linear(input, linear_weight)"
            hint += f", for class probabilities use torch.nn.functional.cross_entropy({logits}, target)"
        raise TypeError(f"{name} must hold class indices in int64 or int32, got {value.dtype}{hint}")
    target = tensors.get("target")
    swapped = value.dtype in _INDEX_DTYPES and isinstance(target, Tensor) and target.is_floating_point()
    if name == "linear_weight" and not swapped and value.dtype in (torch.int8, torch.uint8):
        _refuse_quantised(value)
    order = "logits come first, then target" if name == "logits" else _ARGUMENT_ORDER
    raise TypeError(f"{name} must have a floating dtype, got {value.dtype}{f': {order}' if swapped else ''}")


def _refuse_dtype_of_operand(name: str, value: Tensor, input: Tensor) -> NoReturn:
    if name == "linear_weight" and value.dtype not in FLOATING and input.dtype in FLOATING:
        _refuse_quantised(value)
    if input.dtype not in FLOATING:
        raise TypeError(f"input must be float16, bfloat16, float32 or float64, got {input.dtype}")
    raise TypeError(
        f"input and {name} must have one dtype (after autocast, where it is on), got {input.dtype} and {value.dtype}: "
        f"give {name}.to(input.dtype), or call under torch.autocast"
    )


def refuse_class_weight_gradient(weight: Tensor) -> None:
    """Raise ValueError if class weights require a gradient. PyTorch does not compute one either."""
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("weight gets no gradient, got a tensor that requires grad: give weight.detach()")


# ---------------------------------------------------------------------------------------------------------
# Shapes


def _refuse_head(input: Tensor, linear_weight: Tensor, target: Tensor, is_loss: bool) -> NoReturn:
    if input.dim() < 1:
        raise ValueError("input must have shape (..., H), got a 0-d tensor")
    shape, hint = tuple(linear_weight.shape), ""
    if len(shape) != 2:
        if len(shape) > 2 and target.shape == shape[:-1]:
            hint = f": {_ARGUMENT_ORDER}"
        elif len(shape) > 2 and is_loss:
            logits = "torch.tensordot(input, linear_weight, ([-1], [-1]))"
            hint = f": for a head of more dimensions use torch.nn.functional.cross_entropy({logits}, target)"
        raise ValueError(f"linear_weight must have shape (V, H), got {shape}{hint}")
    hint = ": give linear_weight.t()" if shape[0] == input.shape[-1] else ""
    raise ValueError(
        f"linear_weight must have shape (V, H) with the H of input, {input.shape[-1]}, got {shape} with input "
        f"{tuple(input.shape)}{hint}"
    )


def adapters_by_name(adapters: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    if not isinstance(adapters, (tuple, list)):
        raise TypeError(f"adapters must be a sequence of pairs of tensors, got {type(adapters).__name__}")
    for k, pair in enumerate(adapters):
        is_sequence = isinstance(pair, (tuple, list))
        if not is_sequence or len(pair) != 2:
            got = f"{len(pair)} values" if is_sequence else type(pair).__name__
            raise TypeError(f"adapters[{k}] must be a pair of tensors (..., r) and (V, r), got {got}")
    return {f"adapters[{k}][{i}]": tensor for k, pair in enumerate(adapters) for i, tensor in enumerate(pair)}


def _check_adapters(adapters: Sequence[Tensor], input: Tensor, linear_weight: Tensor) -> None:
    vocab_size = len(linear_weight)
    for k, (a, b) in enumerate(zip(adapters[::2], adapters[1::2], strict=True)):
        if b.dim() != 2 or len(b) != vocab_size or not b.shape[1]:
            hint = f": give adapters[{k}][1].t()" if b.dim() == 2 and b.shape[1] == vocab_size else ""
            raise ValueError(
                f"adapters[{k}][1] must have shape (V, r) with the V of linear_weight, {vocab_size}, and r > 0, got "
                f"{tuple(b.shape)}{hint}"
            )
        if a.shape != (*input.shape[:-1], b.shape[1]):
            refuse_shape(
                f"adapters[{k}][0]", a, (*input.shape[:-1], b.shape[1]), {"input": input, f"adapters[{k}][1]": b}
            )


def refuse_shape(name: str, value: Tensor, shape: Sequence[int], related: Mapping[str, Tensor]) -> NoReturn:
    """Raise ValueError. `related`: the tensors that determine `shape`, the input or the logits first."""
    first, *others = related.values()
    hint = ""
    if name == "target":
        if others and value.shape == others[0].shape[:-1]:
            hint = f": {_ARGUMENT_ORDER}"
        elif not others and first.dim() > 2 and value.shape == (len(first), *first.shape[2:]):
            hint = ": classes are the last dimension of logits; where they are the second, give logits.movedim(1, -1)"
        elif value.dim() == len(shape) > 0 and value.shape[:-1] == shape[:-1] and abs(value.shape[-1] - shape[-1]) == 1:
            hint = ": to predict the next token, do not shift before the call; give shift=1"
    shapes = " and ".join(f"{other} {tuple(tensor.shape)}" for other, tensor in related.items())
    raise ValueError(f"{name} must have shape {tuple(shape)} with {shapes}, got {tuple(value.shape)}{hint}")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast on such devices; None if autocast is off or unsupported, as on meta."""
    # `is_autocast_enabled` raises for devices without autocast. The compiler cannot trace `is_autocast_available`, and
    # it only compiles for devices with autocast.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return torch.get_autocast_dtype(device_type) if available and torch.is_autocast_enabled(device_type) else None


def autocast_operand_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Return the dtype to which autocast casts an operand of a matrix product. float64 stays float64."""
    autocast = autocast_dtype(device_type)
    return dtype if autocast is None or dtype == torch.float64 else autocast


def autocast_result_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Return the dtype of float32 results under autocast, such as losses and softmax. float64 stays float64."""
    autocast = autocast_dtype(device_type)
    return dtype if autocast is None or dtype == torch.float64 else torch.float32


def cast_operand(tensor: Tensor) -> Tensor:
    """Return an operand of a matrix product as autocast casts it."""
    return tensor.to(autocast_operand_dtype(tensor.dtype, tensor.device.type))


def cast_bias(linear_bias: Tensor, input: Tensor) -> Tensor:
    """Return the bias in the accumulation dtype. Dtypes that autocast would cast are accepted and not rounded first."""
    accum = accumulation_dtype(input.dtype)
    autocast_accepts = cast_operand(linear_bias).dtype == input.dtype and linear_bias.dtype.itemsize <= accum.itemsize
    if not autocast_accepts and linear_bias.dtype not in (input.dtype, accum):
        raise TypeError(
            f"linear_bias must have the dtype of input, {input.dtype}, or {accum} (after autocast, where it is on), "
            f"got {linear_bias.dtype}"
        )
    return linear_bias.to(accum)


def refuse_transforms(function: str, instead: str, tensors: Iterable[Tensor | None], refuse_vmap: bool = False) -> None:
    """Raise RuntimeError if a tensor of the public `function` is in a transform of torch.func that its operators do not
    support. `instead`: functions of PyTorch that support it. `refuse_vmap`: True to refuse `torch.func.vmap`, too."""
    if not is_in_transform():
        return
    use = f"use {instead} for that, or"
    for tensor in tensors:
        if tensor is None:
            continue
        if is_in_forward_ad() and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"flce.{function} does not support forward-mode differentiation (torch.func.jvp, torch.func.jacfwd, "
                f"dual tensors of torch.autograd.forward_ad): {use} backward and torch.autograd.grad"
            )
        if refuse_vmap and private.is_batchedtensor(tensor):
            raise RuntimeError(
                f"flce.{function} does not support torch.func.vmap: {use} give all elements of the batch to one call, "
                "as more tokens, or call it for each element"
            )
        if torch.is_grad_enabled() and tensor.requires_grad and private.is_gradtrackingtensor(tensor):
            raise RuntimeError(
                f"flce.{function} does not support torch.func.grad, vjp and jacrev: {use} backward and "
                "torch.autograd.grad"
            )


def refuse_double_backward(function: str, instead: str) -> NoReturn:
    """Raise RuntimeError in a backward that is differentiated itself: gradients are enabled there."""
    raise RuntimeError(
        f"{function} cannot be differentiated twice (create_graph=True): its gradients are not part of the graph. "
        f"Use {instead} for that."
    )


# ---------------------------------------------------------------------------------------------------------
# Numbers and options


def check_shift(shift: int, target: Tensor | None = None) -> int:
    """Return `shift` as an int. Raise an error if it is not an int >= 0, or if it is > 0 and the target is 0-d."""
    if isinstance(shift, bool):
        raise TypeError(f"shift must be an int, got bool: give shift={shift:d}")
    shift = check_int("shift", shift)
    if shift < 0:
        raise ValueError(f"shift must be >= 0, got {shift}")
    if shift and target is not None and target.dim() == 0:
        raise ValueError("shift needs a target with at least one dimension, got a 0-d target")
    return shift


def check_options(options: ChunkOptions | None) -> None:
    if options is not None and not isinstance(options, ChunkOptions):
        hint = ": give flce.ChunkOptions(**options)" if isinstance(options, dict) else ""
        raise TypeError(f"options must be None or a flce.ChunkOptions, got {type(options).__name__}{hint}")


def shift_target(target: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Return target[..., t + shift] at position t, and `ignore_index` at the last `shift` positions. `shift` is > 0."""
    if shift > target.shape[-1]:
        raise ValueError(
            f"shift must be at most the length of the sequence, the last dimension of target {tuple(target.shape)}, "
            f"got {shift}"
        )
    return F.pad(target[..., shift:], (0, shift), value=ignore_index)


def num_items_tensor(num_items: int | Tensor, spec: LossSpec, input: Tensor) -> Tensor:
    """Return `num_items` as a 0-d tensor on the device of `input`, without waiting for the device."""
    if spec.reduction != "sum":
        raise ValueError(f"num_items needs reduction='sum', got reduction={spec.reduction!r}")
    if isinstance(num_items, Tensor):
        check_tensor("num_items", num_items)
        _check_subclass("num_items", num_items, dtensors=False)
        if num_items.numel() != 1:
            raise ValueError(f"num_items must be a number or a 0-d tensor, got shape {tuple(num_items.shape)}")
        if num_items.dtype == torch.bool or num_items.is_complex():
            raise TypeError(f"num_items must be a number or a tensor of real numbers, got a {num_items.dtype} tensor")
        return num_items.detach().reshape(()).to(input.device, non_blocking=True)
    number = check_float("num_items", num_items)
    if not 0 < number < float("inf") and (number != 0 or spec.empty_loss == "nan"):
        raise ValueError(f"num_items must be > 0 and finite, got {number}")
    return torch.full((), number, dtype=accumulation_dtype(input.dtype), device=input.device)


# Arguments of `ChunkOptions` and of other libraries: the argument that replaces each, and how to give it.
_OPTIONS: tuple[str, ...] = ChunkOptions.__match_args__
_REPLACEMENTS = {name: ("options", f"options=flce.ChunkOptions({name}=...)") for name in _OPTIONS}
_REPLACEMENTS |= {"chunk_size": _REPLACEMENTS["chunk_rows"], "bias": ("linear_bias", "linear_bias=...")}


def names_replacements(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with an error that names the argument that replaces an unknown argument."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            refuse_replaced_arguments(function, kwargs)
            raise

    return wrapper


def refuse_replaced_arguments(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise TypeError if the function has no argument of one of these names, and another argument that replaces it."""
    parameters = inspect.signature(function).parameters
    for name in names:
        argument, text = _REPLACEMENTS.get(name, ("", ""))
        if name not in parameters and argument in parameters:
            raise TypeError(f"{function.__qualname__} has no argument {name!r}: give {text}") from None


def dispatches_torch_function(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with dispatch to ``__torch_function__`` of its first argument, `logits`."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        logits: Any = args[0] if args else kwargs.get("logits")
        if not has_torch_function_unary(logits):
            return function(*args, **kwargs)
        rest: Any = (args[1:], {name: value for name, value in kwargs.items() if name != "logits"})
        overridden: R = handle_torch_function(wrapper, (logits,), logits, *rest[0], **rest[1])
        return overridden

    return wrapper
