"""The public function: checks and documents its arguments, flattens them to a problem, shapes the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flce import composition
from flce.autograd import linear_cross_entropy
from flce.planning import ChunkOptions
from flce.problem import (
    LinearCrossEntropyOutput,
    LinearCrossEntropyProblem,
    LinearTerm,
    LossSpec,
    Needs,
    accumulation_dtype,
    check_shapes,
)


def fused_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    adapters: Sequence[tuple[Tensor, Tensor]] = (),
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    num_items: int | Tensor | None = None,
    shift: int = 0,
    stats: tuple[str, ...] = (),
    options: ChunkOptions | None = None,
) -> Tensor | LinearCrossEntropyOutput:
    r"""``cross_entropy(input @ linear_weight.T, target)`` without the ``(tokens, vocabulary)`` logits.

    With :math:`a = x W^T + \sum_k a_k B_k^T + b`, where the sum runs over `adapters`, the logits are

    .. math:: z = \mathrm{softcap} \cdot \tanh(\mathrm{logit\_scale} \cdot a / \mathrm{softcap}) / \mathrm{temperature}

    (:math:`z = \mathrm{logit\_scale} \cdot a / \mathrm{temperature}` without `softcap`) and the loss of a token is

    .. math:: (1 - \epsilon)\, w_y (\mathrm{lse}(z) - z_y)
              + \frac{\epsilon}{V} \sum_k w_k (\mathrm{lse}(z) - z_k) + \mathrm{z\_loss} \cdot \mathrm{lse}(z)^2

    whose first two terms are those of :func:`torch.nn.functional.cross_entropy`. Logits are made and consumed a
    chunk at a time; gradients are exact. Differentiable once, in `input`, `linear_weight`, `linear_bias` and
    `adapters`; only the gradients of those that require one are computed.

    Args:
        input: (..., H) hidden states; float16, bfloat16, float32 or float64.
        linear_weight: (V, H) weight of the head, in the dtype of `input` (autocast applies as to
            :func:`torch.nn.functional.linear`). A K-dimensional head (V, d_1, ..., d_K, H) is computed with
            its logits in memory.
        target: (...) class indices in [0, V), int64 or int32; those equal to `ignore_index` contribute nothing.
            Or class probabilities (..., V) in a floating dtype, for which the logits are in memory.
        linear_bias: (V,) bias of the head, in the dtype of `input` or, for half precision, float32.
        adapters: (..., r) and (V, r) pairs, each adds ``a @ B.T`` to the logits before bias, `logit_scale` and
            `softcap`, as a LoRA adapter on the head does (``a = scale * A(x)``). Any r >= 1, which may be another
            for each; dtypes as of `linear_weight`. Not with a K-dimensional head.
        weight: (V,) class weights.
        reduction: "none": (...) losses. "sum": their sum. "mean": the sum of cross entropies over the sum of
            ``weight[target]``, plus the sum of z-losses over the number of tokens that are not ignored; NaN if
            there are none.
        ignore_index: the target value of tokens that do not count; None means -100.
        label_smoothing: :math:`\epsilon`, in [0, 1].
        softcap: bound of the logits, > 0.
        logit_scale: multiplies the logits before softcap.
        temperature: divides the logits after softcap, > 0.
        z_loss: coefficient of the squared log-sum-exp, >= 0.
        token_weight: (...) multiplies each token's loss, z-loss included; not the denominators of "mean". No
            gradient. Belongs to the positions of `input`, also with `shift`.
        num_items: divides the loss; needs ``reduction="sum"``. For gradient accumulation: the number of tokens
            over all micro-batches.
        shift: position t predicts ``target[..., t + shift]``; the last `shift` positions are ignored. Of the
            hidden states nothing is copied for it.
        stats: any of "lse", "logprob", "entropy", "argmax", "correct": per-token results without gradient.
        options: how memory and precision are used, see :class:`ChunkOptions`.

    Returns:
        The loss, float32 (float64 for float64 inputs): 0-d, or (...) for ``reduction="none"``. With `stats` a
        :class:`LinearCrossEntropyOutput`.

    Raises:
        TypeError: an argument has the wrong type or dtype, or `input`, `linear_weight`, `linear_bias` and `adapters`
            differ in dtype outside of autocast.
        ValueError: shapes do not fit, devices differ, a scalar is out of its range, or no plan keeps
            ``options.max_workspace_bytes``.
        IndexError: a target is out of range, on a CPU or with ``FLCE_DEBUG=1``; otherwise the loss of that token
            is NaN and nothing is read out of bounds.
        RuntimeError: in backward, for a second backward through the same result and for double backward; in
            forward, for forward-mode differentiation.

    Example::

        >>> h = torch.randn(2, 6, 16, requires_grad=True)
        >>> W = torch.randn(100, 16, requires_grad=True)
        >>> y = torch.randint(100, (2, 6))
        >>> fused_linear_cross_entropy(h, W, y, shift=1).backward()
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    spec = LossSpec(reduction, ignore_index, label_smoothing, softcap, logit_scale, temperature, z_loss, stats)
    _check_tensors(input, linear_weight, target, linear_bias, weight, token_weight, adapters)
    check_options(options)
    check_shift(shift)
    if shift and target.dim() == 0:
        raise ValueError("shift needs a target with at least one dimension, got a 0-d target")
    input, linear_weight = _autocast(input), _autocast(linear_weight)
    adapters = [(_autocast(a), _autocast(b)) for a, b in adapters]
    accum = accumulation_dtype(input.dtype)
    _check_dtypes(input, linear_weight, adapters)
    if linear_bias is not None:
        linear_bias = _wide_bias(linear_bias, input)
    num_items = _num_items(num_items, spec, input)
    probabilities = target.is_floating_point()
    if probabilities or linear_weight.dim() > 2:
        if shift:
            raise ValueError("shift needs class-index targets and a two-dimensional linear_weight")
        return composition.linear_cross_entropy(
            input, linear_weight, target, linear_bias, adapters, weight, token_weight, num_items, spec
        )
    tokens, vocab = tuple(input.shape[:-1]), (linear_weight.shape[0],)
    check_shapes(
        input,
        linear_weight,
        adapters,
        ("target", target, tokens),
        ("linear_bias", linear_bias, vocab),
        ("weight", weight, vocab),
        ("token_weight", token_weight, tokens),
    )

    shape = target.shape
    grad = torch.is_grad_enabled()
    terms = ((input, linear_weight), *adapters)
    problem = LinearCrossEntropyProblem(
        terms=tuple(LinearTerm(x.reshape(-1, x.shape[-1]), w) for x, w in terms),
        # Vectors are short: backends get them contiguous and in one dtype.
        target=_shifted(target.to(torch.int64), shift, ignore_index).reshape(-1).contiguous(),
        linear_bias=None if linear_bias is None else linear_bias.contiguous(),
        class_weight=None if weight is None else weight.detach().to(accum).contiguous(),
        token_weight=None if token_weight is None else token_weight.detach().reshape(-1).to(accum).contiguous(),
        num_items=num_items,
        spec=spec,
        needs=Needs(
            tuple(grad and x.requires_grad for x, _ in terms),
            tuple(grad and w.requires_grad for _, w in terms),
            grad and linear_bias is not None and linear_bias.requires_grad,
        ),
    )
    out = linear_cross_entropy(problem, options or ChunkOptions())
    loss = out.loss.reshape(shape) if reduction == "none" else out.loss
    if not spec.stats:
        return loss

    def stat(name: str, value: Tensor) -> Tensor | None:
        return value.detach().reshape(shape) if name in spec.stats else None

    z = None
    if spec.z_loss:
        z = out.z_loss.detach().reshape(shape) if reduction == "none" else out.z_loss.detach()
    correct = out.argmax
    if "correct" in spec.stats:  # argmax is -1 where ignored, which may be what ignore_index is
        correct = (out.argmax == problem.target) & (problem.target != ignore_index)
    return LinearCrossEntropyOutput(
        loss,
        z,
        stat("lse", out.normalizer.sum(0) if "lse" in spec.stats else out.loss),
        stat("logprob", out.logprob),
        stat("entropy", out.entropy),
        stat("argmax", out.argmax),
        stat("correct", correct),
    )


def _shifted(target: Tensor, shift: int, ignore_index: int) -> Tensor:
    """target[..., t + shift] at position t, and `ignore_index` at the last `shift` positions."""
    if shift == 0:
        return target
    shift = min(shift, target.shape[-1])
    return F.pad(target[..., shift:], (0, shift), value=ignore_index)


def _num_items(num_items: int | Tensor | None, spec: LossSpec, input: Tensor) -> Tensor | None:
    """As a 0-d tensor on the device of `input`, which nothing waits for."""
    if num_items is None:
        return None
    if spec.reduction != "sum":
        raise ValueError(f"num_items needs reduction='sum', got reduction={spec.reduction!r}")
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items must be a number or a 0-d tensor, got shape {tuple(num_items.shape)}")
        return num_items.detach().reshape(()).to(input.device, non_blocking=True)
    if isinstance(num_items, bool) or not isinstance(num_items, (int, float, torch.SymInt)):
        raise TypeError(f"num_items must be a number or a 0-d tensor, got {type(num_items).__name__}")
    if not num_items > 0:
        raise ValueError(f"num_items must be > 0, got {num_items}")
    return torch.full((), num_items, dtype=accumulation_dtype(input.dtype), device=input.device)


def _autocast(tensor: Tensor) -> Tensor:
    """Cast as autocast casts the arguments of `F.linear`: all floating ones but float64."""
    device_type = tensor.device.type
    # Asking about a device without autocast raises; the compiler, which has none such, cannot trace the question.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    if not (available and torch.is_autocast_enabled(device_type)) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


def _check_tensors(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    token_weight: Tensor | None,
    adapters: Sequence[tuple[Tensor, Tensor]],
) -> None:
    required = {"input": input, "linear_weight": linear_weight, "target": target, **_by_name(adapters)}
    optional = {"linear_bias": linear_bias, "weight": weight, "token_weight": token_weight}
    for name, value in {**required, **optional}.items():
        if value is None and name in optional:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
        if value.device != input.device:
            raise ValueError(
                f"all tensors must be on one device, got input on {input.device} and {name} on {value.device}"
            )
        if name != "target" and not value.is_floating_point():
            raise TypeError(f"{name} must have a floating dtype, got {value.dtype}")
    if not target.is_floating_point() and target.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            "target must hold class indices in int64 or int32, or class probabilities in a floating dtype, "
            f"got {target.dtype}"
        )
    if input.dim() < 1:
        raise ValueError("input must have shape (..., H), got a 0-d tensor")
    if linear_weight.dim() < 2:
        raise ValueError(f"linear_weight must have shape (V, H), got {tuple(linear_weight.shape)}")
    if input.shape[-1] != linear_weight.shape[-1]:
        raise ValueError(
            "input and linear_weight must agree in their last dimension H, got "
            f"{tuple(input.shape)} and {tuple(linear_weight.shape)}"
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


def _check_dtypes(input: Tensor, linear_weight: Tensor, adapters: Sequence[tuple[Tensor, Tensor]]) -> None:
    if input.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"input must be float16, bfloat16, float32 or float64, got {input.dtype}")
    for name, value in {"linear_weight": linear_weight, **_by_name(adapters)}.items():
        if value.dtype != input.dtype:
            raise TypeError(
                f"input and {name} must have one dtype (after autocast, where it is on), "
                f"got {input.dtype} and {value.dtype}"
            )


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


def check_options(options: ChunkOptions | None) -> None:
    """Raises TypeError for options of another type."""
    if options is not None and not isinstance(options, ChunkOptions):
        raise TypeError(f"options must be None or a flce.ChunkOptions, got {type(options).__name__}")


def check_shift(shift: int) -> None:
    """Raises TypeError or ValueError for a shift that is not an int >= 0."""
    if isinstance(shift, bool) or not isinstance(shift, int):
        raise TypeError(f"shift must be an int, got {type(shift).__name__}")
    if shift < 0:
        raise ValueError(f"shift must be >= 0, got {shift}")
