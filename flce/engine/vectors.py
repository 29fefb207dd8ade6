"""The allocator of a pass, and vectors of one value per row: loss scales, reduction, largest logits, and checks of
targets. The linear losses, the loss of given logits, the results of tokens and dry runs call it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flce.backends.contract import Backend, RowOutputs, RowProblem
from flce.backends.formulas import scale_losses
from flce.core.problem import LossSpec

# The largest entry that the gradient of float16 logits should have. The range of float16 is 6e-8 to 65504. The headroom
# of 2^6 is for factors that `LossSpec.typical_gradient` does not include.
FLOAT16_GRAD_PEAK = 2.0**10
# Maximum number of logits to which a bias is added at a time, because the sum is a copy.
BIASED_ENTRIES = 1 << 20


class Arena:
    """Allocator on a device for all memory of a schedule. Memory is freed with the last view of it."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device

    def new(self, shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
        allocate = torch.zeros if zero else torch.empty
        return allocate(shape, dtype=dtype, device=self.device)


def pack(results: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Return the results as custom operators return them: results that are not requested have shape (0,), and the dtype
    and the device of `like`. No two tensors share memory."""
    return tuple(like.new_empty(0) if t is None else t for t in results)


def fake_outputs(p: RowProblem, like: Tensor) -> tuple[Tensor, ...]:
    """Return tensors with the shapes and dtypes of the packed outputs after the reduction, on the device of `like`."""

    def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return like.new_empty(shape, dtype=dtype)

    outputs = RowOutputs.allocate(p.spec, p.accum, tuple(p.target.shape), new)
    if p.spec.reduction != "none":
        loss, z_loss = outputs.loss.new_empty(()), outputs.z_loss
        outputs = outputs._replace(loss=loss, z_loss=None if z_loss is None else z_loss.new_empty(()))
    return pack(outputs, outputs.loss)


@dataclass
class LossScales:
    """Loss scales of a pass, (3,): factor of the cross entropy, factor of the z-loss, sum of the class weights.

    They are computed at first use, so that the first matmul is launched before these small kernels.

    Attributes:
        needs_scales: True if kernels of the pass read the scales.
        has_gradient_scale: True if gradients are multiplied by `gradient_scale`.
        upstream: upstream gradient of the loss, (), or of each row's loss, (N,); None: 1.
    """

    problem: RowProblem
    backend: Backend
    needs_scales: bool
    has_gradient_scale: bool = False
    upstream: Tensor | None = None

    @functools.cached_property
    def for_loss(self) -> Tensor | None:
        """Scales of the loss. None if no kernel of the pass reads them and there are no class weights: `reduce`
        then computes them in its own kernel."""
        needed = self.needs_scales or self.problem.class_weight is not None
        return self.backend.loss_scales(self.problem) if needed else None

    @functools.cached_property
    def gradient_scale(self) -> Tensor | None:
        """Scalar to divide the gradients by, (), or None for 1."""
        if not self.has_gradient_scale or self.for_loss is None:
            return None
        if self.upstream is None or self.upstream.dim():
            return compute_gradient_scale(self.problem, self.for_loss, self.upstream)
        return compute_gradient_scale(self.problem, self.for_loss * self.upstream)

    @functools.cached_property
    def for_gradient(self) -> Tensor | None:
        """Scales times the gradient scale and the upstream gradient of the loss."""
        factors, scales = (self.gradient_scale, self.upstream), self.for_loss
        for factor in factors:
            if scales is not None and factor is not None and factor.dim() == 0:
                scales = torch.cat((scales[:2] * factor, scales[2:]))
        return scales


def compute_gradient_scale(p: RowProblem, scales: Tensor, upstream: Tensor | None = None) -> Tensor:
    """Return the gradient scale, (), with which the largest gradient of float16 logits is near FLOAT16_GRAD_PEAK. The
    host does not wait for the device.

    ``1 / N``, a small weight or a small upstream gradient would make float16 gradients subnormal. Sums of them are
    divided by the gradient scale in float32. The factor of the cross entropy times the gradient scale is a power of
    two: the gradients of many targets' logits are nearly minus this number, and would otherwise all have the same
    rounding error.

    Args:
        scales: (3,) loss scales.
        upstream: (N,) upstream gradient of each row's loss; None: 1.
    """
    of_cross_entropy, of_z_loss, _ = scales.abs()
    if p.class_weight is not None:  # The norm does not copy the weights.
        of_cross_entropy = of_cross_entropy * torch.linalg.vector_norm(p.class_weight, torch.inf)
    peak, ignored = p.spec.typical_gradient(of_cross_entropy, of_z_loss), p.target == p.spec.ignore_index
    for factor in (p.token_weight, upstream):
        if factor is not None and factor.numel():
            peak = peak * factor.masked_fill(ignored, 0.0).nan_to_num(0.0, 0.0, 0.0).abs().max()
    mantissa = torch.frexp(scales[0])[0].abs() * 2.0
    gradient_scale = floor_power_of_two(FLOAT16_GRAD_PEAK / peak)
    return torch.where((mantissa >= 1.0) & (mantissa < 2.0), gradient_scale / mantissa, gradient_scale)


def floor_power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two that is at most ``abs(x)``, clamped to 2^-60 ... 2^60; 1 if x is 0, inf or
    NaN."""
    # x is not finite if there is no valid row or all weights are 0. Then any gradient scale is correct.
    return torch.exp2(torch.log2(x.abs()).floor().nan_to_num(0.0, 0.0, 0.0).clamp(-60.0, 60.0))


def reduce(
    p: RowProblem, backend: Backend, out: RowOutputs, scales: Tensor | None
) -> tuple[RowOutputs, Tensor | None, Tensor | None]:
    """Return the results with the reduced loss; the scales, if they were computed; the gradient of the token weights,
    if it is needed.

    The gradient of the token weights is for an upstream gradient of 1, or of 1 for each row's loss. If it is needed,
    the losses of `out`, of all rows, do not contain the token weights: they are multiplied here, in place.
    """
    grad = None
    if p.needs_token_weight:
        assert p.token_weight is not None
        if scales is None and p.spec.reduction != "none":
            scales = backend.loss_scales(p)
        ignored = p.target == p.spec.ignore_index
        grad = _token_weight_gradient(p.spec, out, scales, ignored)
        # Losses of ignored rows are 0. They must stay 0 for weights of inf or NaN.
        token_weight = p.token_weight.masked_fill(ignored, 0.0)
        for losses in (out.loss, out.z_loss):
            if losses is not None:
                losses.mul_(token_weight)
    if p.spec.reduction == "none":
        loss, z_loss = out.loss if out.z_loss is None else out.loss + out.z_loss, out.z_loss
    else:
        loss, z_loss, scales = backend.reduce(p, out, scales)
    return out._replace(loss=loss, z_loss=z_loss), scales, grad


def _token_weight_gradient(spec: LossSpec, out: RowOutputs, scales: Tensor | None, ignored: Tensor) -> Tensor:
    """Compute the gradient of the token weights, see `reduce`, in new memory."""
    cross_entropy, z_loss = out.loss, out.z_loss
    if spec.reduction == "none":
        return cross_entropy.clone() if z_loss is None else cross_entropy + z_loss
    assert scales is not None
    total = scale_losses(cross_entropy, scales[0], spec)
    if z_loss is not None:
        total += scale_losses(z_loss, scales[1], spec)
    # If all tokens are ignored, the scales of a mean are infinite.
    return total.masked_fill_(ignored, 0.0)


@dataclass(frozen=True)
class TopK:
    """The k largest logits of each row so far, bias included, before scale and softcap. The k smallest if the scale is
    negative, because they have the largest z. If fewer than k classes were added, only as many columns are written."""

    logits: Tensor  # (rows, k)
    ids: Tensor  # (rows, k) int64
    largest: bool

    @staticmethod
    def allocate(rows: int, k: int, dtype: torch.dtype, scale: float, arena: Arena) -> TopK:
        """Allocate the results. `scale`: factor of z."""
        return TopK(arena.new((rows, k), dtype), arena.new((rows, k), torch.int64), scale >= 0)

    def add(self, logits: Tensor, bias: Tensor | None, tokens: slice, classes: slice) -> None:
        """Merge the logits of some rows and classes. Classes must be added in their order. bias: (cols,)."""
        k = self.ids.shape[1]
        num_before, num_after = min(k, classes.start), min(k, classes.stop)
        step = len(logits) if bias is None else max(1, BIASED_ENTRIES // logits.shape[1])
        for start in range(0, len(logits), max(1, step)):
            biased = logits[start : start + step]
            if bias is not None:
                biased = biased + bias
            best, column = biased.topk(min(k, biased.shape[1]), largest=self.largest)
            rows = slice(tokens.start + start, tokens.start + start + len(biased))
            values = torch.cat((self.logits[rows, :num_before], best), 1)
            ids = torch.cat((self.ids[rows, :num_before], column + classes.start), 1)
            merged, position = values.topk(num_after, largest=self.largest)
            self.logits[rows, :num_after], self.ids[rows, :num_after] = merged, ids.gather(1, position)


def can_read_values(device: torch.device) -> bool:
    """Return True if the host may read values: on a CPU, or with FLCE_DEBUG=1."""
    debug = os.environ.get("FLCE_DEBUG", "")
    if debug not in ("", "0", "1"):
        raise ValueError(f"FLCE_DEBUG must be 0 or 1, got {debug!r}")
    return device.type == "cpu" or (debug == "1" and device.type != "meta")  # Meta tensors have no values.


def check_candidates(ids: Tensor | None, vocab_size: int) -> None:
    """Raise IndexError for a candidate that is neither a class nor -1, if the host may read values."""
    if ids is None or not can_read_values(ids.device):
        return
    wrong = (ids < -1) | (ids >= vocab_size)
    if bool(wrong.any()):
        position = tuple(wrong.nonzero()[0].tolist())
        raise IndexError(
            f"candidate {int(ids[position])} at {position} of `candidates` or `teacher_topk`, as (tokens, K), is out "
            f"of range: expected 0 <= candidate < {vocab_size}, or -1 for none"
        )


def check_inverse_temperature(inverse: Tensor | None) -> Tensor | None:
    """Return ``1 / temperature`` of each row. Where it is not a finite number > 0, raise ValueError, or return NaN if
    the host must not read values."""
    if inverse is None:
        return None
    is_valid = (inverse > 0) & (inverse < torch.inf)
    if not can_read_values(inverse.device):
        return torch.where(is_valid, inverse, torch.nan)
    if not bool(is_valid.all()):
        position = int((~is_valid).nonzero()[0, 0])
        temperature = float(1.0 / inverse[position])
        raise ValueError(
            f"temperature must be a finite number > 0 for each token, got {temperature:g} at position {position} of "
            "the flattened temperature"
        )
    return inverse


def check_targets(p: RowProblem) -> bool:
    """Raise IndexError for a target that is out of range, and ValueError for a negative `num_items`, if the host may
    read values. Return True if no target is ignored; False if some are or values were not read."""
    if not can_read_values(p.target.device):
        return False
    if p.num_items is not None and bool(p.num_items < 0):
        raise ValueError(f"num_items must be >= 0, got {p.num_items.item()}")
    vocab_size, target = p.vocab_size, p.target
    if target.numel():
        lowest, highest = [bound.item() for bound in target.aminmax()]
        if 0 <= lowest <= highest < vocab_size:
            return not lowest <= p.spec.ignore_index <= highest
    wrong = ((target < 0) | (target >= vocab_size)) & (target != p.spec.ignore_index)
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0, 0])
        value = int(target[position])
        hint = f". To ignore it, give ignore_index={value}" if value < 0 else ""
        raise IndexError(
            f"target {value} at position {position + p.shift} of the flattened target is out of range: "
            f"expected 0 <= target < {vocab_size}, or ignore_index={p.spec.ignore_index}{hint}"
        )
    return False
