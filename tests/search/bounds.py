"""Bounds of rounding errors, for each element of a result. benchmarks/notes.md, "Error bounds", has the terms.

A bound is computed in float64 from the tensors of a call. u is the unit roundoff of a dtype. Independent errors add as
squares, and KAPPA is the number of deviations of such a sum. Errors of one row that are common to all classes, and
single roundings, add as absolute values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KAPPA = 4.0
# Products that one instruction of a tensor core adds to a sum, which it truncates.
PRODUCTS_OF_INSTRUCTION = 8
# Roundings of a chain of elementwise operations, such as scale, tanh and temperature.
CHAIN = 3.0


def unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Arithmetic:
    """Dtypes in which a call rounds."""

    result: torch.dtype  # of the returned gradients
    rows: torch.dtype  # of logits, statistics and losses
    logits: torch.dtype  # of logits in memory
    gradients: torch.dtype  # of the gradients of logits in memory
    sums: torch.dtype  # of sums of dX over blocks of classes, and of dW over chunks
    blocks: int = 1
    chunks: int = 1
    tiles: int = 1  # of classes, whose sums of exponentials are added one after the other
    roundings: int = 1  # of a result: 2 if the upstream gradient multiplies a rounded result
    upstream: float = 1.0  # multiplies numbers that may have been subnormal, at least 1
    subnormal: float = 0.0  # error of gradients in memory, in units of the largest factor: float16
    one_hot: bool = False  # most probabilities are nearly 0 or 1, so many gradients have the same rounding error
    coherent: bool = False  # terms of sums are equal, and so are their errors
    headroom: float = 0.0  # of the reference of exponentials above the largest logit
    tensor_cores: bool = False  # multiply: they truncate sums
    sample_below: float = 0.0  # smaller probabilities are sampled

    @property
    def u(self) -> float:
        # The oracle has the errors of float64, too.
        return unit(self.rows) * (2.5 if self.rows == torch.float64 else 1.0)

    def rounded(self, x: Tensor) -> Tensor:
        """Return the error of rounding a result: relative, or absolute below the normal numbers."""
        info = torch.finfo(self.result)
        least = info.tiny * (info.eps if self.result == torch.float16 else self.upstream)
        # The squares of smaller errors are 0 in float64.
        least = 1e-150 if self.result == torch.float64 else least
        # A result in the dtype of the sums is not rounded again.
        times = self.roundings - (self.result == self.rows)
        return times * max(unit(self.result), self.u) * x.abs() + self.roundings * least


def product_error(x: Tensor, w: Tensor, how: Arithmetic) -> Tensor:
    """Return the error of the sums of ``x @ w.T`` in any order of summation: each partial sum is rounded."""
    squares, total = x.square() @ w.square().T, x @ w.T
    error = sum_error(x.shape[-1], squares, total, how)
    if how.tensor_cores:
        # Differences of the partial sums of random terms from a straight line.
        error = error + truncation(x.shape[-1], KAPPA * (squares / 3).sqrt(), how)
    return error


def truncation(count: int, total: Tensor, how: Arithmetic) -> Tensor:
    """Return the mean error of a sum that tensor cores compute, for partial sums that grow to `total` on a line."""
    return how.u * (count / PRODUCTS_OF_INSTRUCTION / 2 if how.tensor_cores else 0.0) * total


def equal_part(rounding: Tensor, x: Tensor) -> Tensor:
    """Return the part of the rounding errors of a row's numbers `x` that is equal: all for equal numbers, half if their
    median distance from their median is the median of `rounding`, the largest errors."""
    if not x.numel():
        return torch.zeros_like(x)
    distances = (x - x.median(-1, keepdim=True).values).abs()
    distance = distances.kthvalue(x.shape[-1] // 2 + 1, dim=-1, keepdim=True).values  # not the lower median
    size = rounding.median(-1, keepdim=True).values
    return rounding / (1.0 + (distance / size.clamp(min=1e-150)).square())


def sum_error(count: int | Tensor, squares: Tensor, total: Tensor, how: Arithmetic) -> Tensor:
    """Return the error of sums of `count` terms. `squares`: of the terms, added."""
    error = KAPPA * how.u * (count * (squares / 2 + total.square() / 3)).sqrt()
    return error * count**0.5 if how.coherent else error


def added(errors: Tensor, right: Tensor, how: Arithmetic) -> Tensor:
    """Return the error of ``left @ right`` for errors of `left`, which are independent or equal."""
    return errors @ right.abs() if how.coherent else (errors.square() @ right.square()).sqrt()


def _sum_steps(count: int, how: Arithmetic) -> float:
    """Return the additions that an entry of a vector takes part in: programs add in trees. Sums of tiles are added one
    after the other, with errors that cancel, unless the terms are equal."""
    return count if how.coherent else math.log2(max(count, 1)) + 1.0


def tree_sum_error(terms: Tensor, how: Arithmetic) -> Tensor:
    """Return the error of the sum of positive terms over the last dimension, which programs add in a tree. A level with
    2^-j of the terms in each partial sum adds 2^-j sum^2 + (sum of squares) to the square."""
    steps, total = _sum_steps(terms.shape[-1], how), terms.sum(-1)
    if how.coherent:
        return how.u * steps * total
    return KAPPA * how.u * (4.0 * total.square() + steps * terms.square().sum(-1)).sqrt()


class Logits:
    """Logits of some rows, (N, V), and their errors. Terms: pairs (x, w) of float64 tensors."""

    def __init__(
        self,
        terms: Sequence[tuple[Tensor, Tensor]],
        bias: Tensor | None,
        how: Arithmetic,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: float | Tensor = 1.0,
        given: Tensor | None = None,
    ) -> None:
        self.u, self.how = how.u, how
        u = how.u
        products = [x @ w.T for x, w in terms] if given is None else [given]
        a = torch.stack(products).sum(0) + (0.0 if bias is None else bias)
        sizes = sum(product.abs() for product in products) + (0.0 if bias is None else bias.abs())
        error = (len(products) + 1) * u * sizes if given is None else torch.zeros_like(a)
        if given is None:
            error = error + sum(product_error(x, w, how).square() for x, w in terms).sqrt()  # type: ignore[union-attr]
        equal = torch.zeros_like(a)
        if how.logits != how.rows:
            rounding = len(terms) * unit(how.logits) * torch.as_tensor(sizes)
            error = error + KAPPA * rounding
            equal = rounding if how.coherent else equal_part(rounding, a)
        # Tensor cores truncate towards 0, so that this error does not cancel in sums.
        drift = torch.zeros_like(a)
        for (x, _), product in zip(terms, products, strict=False):  # Without a head there are no terms.
            drift = drift + truncation(x.shape[-1], product, how)
        error = error + drift.abs()
        cap = 1.0 if softcap is None else softcap
        self.scale = max(torch.as_tensor(abs(logit_scale) / temperature).flatten().tolist(), default=0.0)
        scaled = logit_scale * a / cap
        tanh = scaled if softcap is None else scaled.tanh()
        self.z = cap * tanh / temperature
        slope = torch.ones_like(a) if softcap is None else 1.0 - tanh.square()
        self.jacobian = logit_scale * slope / temperature
        # The formula of tanh subtracts from 1, so that its error is absolute.
        of_cap = 0.0 if softcap is None else CHAIN * u * cap / temperature
        self.drift = self.jacobian * drift
        self.dz = self.jacobian.abs() * error + CHAIN * u * self.z.abs() + of_cap
        self.equal = self.jacobian.abs() * equal
        self.djacobian = CHAIN * u * self.jacobian.abs()
        by_tanh = torch.zeros_like(a) if softcap is None else abs(logit_scale) / temperature * 2.0 * tanh.abs()
        if softcap is not None:
            of_tanh = slope * (abs(logit_scale) / cap * error + u * scaled.abs())
            self.djacobian = self.djacobian + by_tanh * of_tanh
        # The error of tanh near 1 is equal for many logits, so it does not cancel in sums over classes or rows.
        self.of_saturated = by_tanh * 2.0 * CHAIN * u

        self.lse = self.z.logsumexp(-1)
        self.logp = self.z - self.lse[:, None]
        self.p = self.logp.exp()
        # Exponentials are computed from the difference from a reference.
        below = self.z.amax(-1, keepdim=True) - self.z + how.headroom
        self.log_sum = self.lse - self.z.amax(-1)
        self.below = below
        self.dsum = self._of_exponentials(self.p, below, self.log_sum, how)
        self.dlog_sum = (self.p * self.dz).square().sum(-1).sqrt() + self.dsum + self.error_of_common(self.p)
        # The largest error of a logit is a bound, too, if it is so large that derivatives are no bounds.
        largest = self.dz.amax(-1)
        self.large_dz = torch.where(largest > 1.0, largest, 0.0)
        self.dlog_sum = torch.maximum(self.dlog_sum, self.large_dz)
        # With a reference the exponential of the target is also a factor: at most 1.5 times the headroom below it.
        self.dlse = self.dlog_sum + 2.0 * u * self.lse.abs() + 1.5 * u * how.headroom
        # The logits of candidates are computed as log-probability + log-sum-exp.
        sizes = self.logp.abs() + self.below + self.lse[:, None].abs() + self.z.abs()
        self.of_candidates = by_tanh * u * (2.0 * CHAIN + sizes * temperature / cap)
        # Of the logarithm of each probability, without the part that a row has in common.
        self.dlogp = self.dz + u * (3.0 + below + self.log_sum[:, None])
        self.entropy = -(self.p * self.logp).sum(-1)
        share = self.p * (self.logp + self.entropy[:, None])
        spread = (self.p * below).sum(-1)
        rounding = self.dsum * (1.0 + 2.0 * spread) + 2.0 * u * (self.log_sum + spread)
        self.dentropy = (share * self.dz).square().sum(-1).sqrt() + self.error_of_common(share) + rounding
        self.dentropy = self.dentropy + math.log(max(a.shape[-1], 1)) * (self.large_dz > 0.0)
        # The oracle subtracts logits from the log-sum-exp.
        steps_of_oracle = 4.0 * unit(torch.float64) * _sum_steps(a.shape[-1], how)
        self.of_oracle = steps_of_oracle * (self.lse.abs() + self.z.abs().amax(-1))
        self.dentropy = self.dentropy + self.of_oracle

    def _of_exponentials(self, p: Tensor, below: Tensor, log_sum: Tensor, how: Arithmetic) -> Tensor:
        """Return the roundings of exponentials with the shares `p` of their sum, of the sum, and of its logarithm."""
        exponentials = KAPPA * how.u * (p * (1.0 + below)).square().sum(-1).sqrt()
        # Some sums of tiles are less than half a unit in the last place of the sum, so that they are lost.
        of_tiles = KAPPA * (how.tiles / 3.0) ** 0.5 + how.tiles / 32.0
        return exponentials + tree_sum_error(p, how) + how.u * (of_tiles + log_sum)

    def error_of_common(self, derivative: Tensor) -> Tensor:
        """Return the errors of numbers of rows by errors that the logits of a row have in common. `derivative`: of the
        numbers with respect to the logits."""
        return (derivative * self.drift).sum(-1).abs() + (derivative.abs() * self.equal).sum(-1)

    def dlogprob(self, column: Tensor) -> Tensor:
        """Return the errors of log-probabilities of classes, (N, K). Another product may have computed the logits."""
        size = self.logp.gather(1, column).abs() + self.below.gather(1, column)
        return self.dz.gather(1, column) + (self.dlog_sum + self.of_oracle)[:, None] + self.u * size

    def results(self, target: Tensor, candidates: Tensor | None = None) -> dict[str, Tensor]:
        """Return the errors of the results of tokens, by name. `target`: (N,); `candidates`: (N, K)."""
        steps = self.u * (self.z.shape[1] + 4.0)
        found = {
            "logprob": self.dlogprob(target[:, None])[:, 0],
            "entropy": self.dentropy,
            "lse": self.dlse + self.of_oracle,
            "mean_logit": self.dz.square().mean(-1).sqrt()
            + steps * self.z.abs().mean(-1)
            + self.error_of_common(torch.full_like(self.z, 1.0 / max(self.z.shape[1], 1))),
        }
        return found if candidates is None else {**found, "candidate_logprob": self.dlogprob(candidates.clamp(min=0))}


@dataclass
class RowGradient:
    """Gradient of the logits z: ``p * (softmax + entropy * (log p + H)) + direct``."""

    softmax: Tensor  # (N, 1)
    direct: Tensor  # (N, V), of targets, candidates and all classes
    entropy: Tensor | None = None  # (N, 1)
    of_lse: Tensor | None = None  # (N, 1) the part of `softmax` that contains the log-sum-exp as a factor
    dsoftmax: Tensor | None = None  # (N, 1) error of `softmax`, if it is a sum
    ddirect: Tensor | None = None  # (N, V) error of `direct`, if it is a sum
    is_candidate: Tensor | None = None  # (N, V)
    roundings: float = CHAIN  # of `softmax` and `direct`, which are products of factors
    smoothed: bool = False  # by label smoothing: `direct` has all classes


class Gradients:
    """The gradient of the logits before scale and cap, (N, V), its errors, and the errors of its products."""

    def __init__(self, logits: Logits, row: RowGradient, how: Arithmetic) -> None:
        self.how, u = how, how.u
        p, jacobian = logits.p, logits.jacobian
        smooth, size = p * row.softmax, p * row.softmax.abs()
        if row.entropy is not None:
            distance = logits.logp + logits.entropy[:, None]
            smooth = smooth + p * row.entropy * distance
            size = size + p * row.entropy.abs() * (logits.logp.abs() + logits.entropy[:, None] + 1.0)
        self.smooth, self.direct = smooth * jacobian, row.direct * jacobian
        self.value = self.smooth + self.direct
        terms = size + row.direct.abs()
        # Errors of the classes, which are independent.
        error = jacobian.abs() * (size * torch.expm1(logits.dlogp.clamp(max=50.0)) + row.roundings * u * terms)
        factors = [t for t in (row.softmax, row.direct, row.entropy) if t is not None and t.numel()]
        largest = torch.stack([t.abs().amax() for t in factors]).amax() if factors else 0.0
        # Exponentials below the normal numbers may be 0, before they are multiplied.
        error = error + terms * logits.djacobian + self.tiny(logits, how) * (how.upstream + largest)
        if row.ddirect is not None:
            error = error + jacobian.abs() * row.ddirect
        self.equal = terms * logits.of_saturated + jacobian.abs() * size * torch.expm1(logits.equal.clamp(max=50.0))
        if row.is_candidate is not None:
            self.equal = self.equal + terms * logits.of_candidates * row.is_candidate
        if how.gradients != how.rows:
            # Exponentials, without the targets' classes. With label smoothing the gradient is rounded after them.
            others = self.smooth.abs() if row.smoothed else self.smooth.abs().masked_fill(row.direct != 0, 0.0)
            rounded = self.value.abs() + others if row.smoothed else torch.maximum(self.value.abs(), others)
            error = error + KAPPA * (2.0 if how.one_hot else 1.0) * unit(how.gradients) * rounded
            if row.smoothed:  # the same number for nearly all classes, with the same error
                self.equal = self.equal + unit(how.gradients) * self.direct.abs()
            for numbers in (self.value, self.smooth):
                self.equal = self.equal + equal_part(unit(how.gradients) * numbers.abs(), numbers)
        error = error + how.subnormal * logits.scale * largest
        if how.sample_below:
            # With s / p times its gradient at a probability of p / s: deviations, and one that is kept.
            ratio = torch.where(p < how.sample_below, how.sample_below / p.clamp(min=1e-150), 0.0)
            error = error + self.smooth.abs() * (6.0 * ratio.sqrt() + ratio)
        self.independent = error
        # In a row of equal logits the rounding errors are equal, too.
        is_equal = logits.z.amax(-1, keepdim=True) == logits.z.amin(-1, keepdim=True)
        self.coherence = torch.where(is_equal, p.shape[1] ** 0.5, 1.0)
        # Errors of the row, common to its classes: of the normalizer, of the entropy, of the log-sum-exp as a factor.
        common = size if row.entropy is not None else smooth
        # If logits are equal, the roundings of their exponentials are equal, too.
        of_rows = logits.dlog_sum + CHAIN * u
        self.common = [(common * jacobian, torch.expm1(of_rows.clamp(max=50.0)))]
        if row.entropy is not None:
            self.common.append((p * row.entropy * jacobian, logits.dentropy))
        if row.dsoftmax is not None:
            self.common.append((p * jacobian, row.dsoftmax[:, 0]))
        if row.of_lse is not None:
            self.common.append((p * row.of_lse * jacobian, logits.dlse))

    @staticmethod
    def tiny(logits: Logits, how: Arithmetic) -> float:
        """Return the number below which exponentials, times the logarithm of their probability, may be 0."""
        return 100.0 * max(1.0, logits.scale) * torch.finfo(how.rows).tiny * math.exp(how.headroom)

    def element(self) -> Tensor:
        """Return the error of the gradient of each logit."""
        return self.independent + self.equal + self._of_rows() + self.how.rounded(self.value)

    def _of_rows(self) -> Tensor:
        return sum((part.abs() * error[:, None] for part, error in self.common), torch.zeros_like(self.value))

    def times_weight(self, w: Tensor) -> Tensor:
        """Return the error of dX = gradient @ w, (N, H)."""
        squares = added(self.independent, w, self.how).square()
        for part, of_row in self.common:
            squares = squares + ((part @ w) * of_row[:, None]).square()
        of_sums = self._of_sums(squares, self.value, w.T, self.smooth @ w, self.direct @ w, self.how.blocks)
        return self.equal @ w.abs() + of_sums * self.coherence

    def transposed_times(self, x: Tensor) -> Tensor:
        """Return the error of dW = gradient.T @ x, (V, H). Errors of rows are independent."""
        squares = added((self.independent + self._of_rows()).T, x, self.how).square()
        if self.how.headroom:  # The factors of rows multiply x, which is rounded again.
            squares = squares + added(KAPPA * unit(self.how.gradients) * self.smooth.abs().T, x, self.how).square()
        if self.how.gradients != self.how.rows:
            squares = squares + self._of_equal_tokens(x)
        smooth, direct = self.smooth.T @ x, self.direct.T @ x
        error = self.equal.T @ x.abs() + self._of_sums(squares, self.value.T, x.T, smooth, direct, self.how.chunks)
        if self.how.headroom:  # The terms of targets may be added after the others were rounded.
            error = error + (direct != 0) * self.how.rounded(smooth)
        return error

    def _of_equal_tokens(self, x: Tensor) -> Tensor:
        """Return the squares of rounding errors of dW, (V, H), that nearly equal gradients of a class have in common.
        Only each token's two largest gradients are counted: of the target and of the most probable class."""
        u, shape = unit(self.how.gradients), (self.value.shape[1], x.shape[1])
        squares, sizes = x.new_zeros(shape), x.new_zeros(shape)
        for column in self.value.abs().topk(min(2, shape[0]), dim=1).indices.T:
            value = self.value.gather(1, column[:, None])
            nearly = torch.stack((column, (value[:, 0].abs().clamp(min=1e-300).log() / u).round().long()))
            (classes, _), group = nearly.unique(dim=1, return_inverse=True)
            of_groups = x.new_zeros(len(classes), shape[1]).index_add_(0, group, u * value * x)
            squares.index_add_(0, classes, of_groups.square())
            sizes.index_add_(0, classes, of_groups.abs())
        return torch.minimum(KAPPA**2 * squares, sizes.square())

    def _of_sums(
        self, squares: Tensor, left: Tensor, right: Tensor, smooth: Tensor, direct: Tensor, parts: int
    ) -> Tensor:
        """Return the error of ``left @ right.T = smooth + direct``, added in `parts`. `squares`: of the errors of
        `left`."""
        how = self.how
        squares = squares + product_error(left, right, how).square()
        drift = truncation(left.shape[-1], (smooth + direct).abs(), how)
        if how.sums != how.rows:
            size = left.square() @ right.square().T + (smooth + direct).square()
            squares = squares + (KAPPA * unit(how.sums)) ** 2 * parts * size
            # Parts of one sign that are below the rounding error of their sum are lost.
            drift = drift + min(1.0, (parts - 1) * unit(how.sums)) * smooth.abs()
        return squares.sqrt() + drift + CHAIN * how.u * (smooth.abs() + direct.abs()) + how.rounded(smooth + direct)


@dataclass
class Loss:
    """Losses of rows, and their errors: of the cross entropy and of the z-loss, without token weights."""

    gradient: RowGradient  # for an upstream gradient of 1, without token weights and divisors of the z-loss
    cross_entropy: Tensor
    dcross_entropy: Tensor
    drift: Tensor  # the part of the error that does not cancel in sums over rows
    z_loss: Tensor
    dz_loss: Tensor
    z_drift: Tensor  # the same of the z-loss


def loss_of_rows(
    logits: Logits, y: Tensor, how: Arithmetic, class_weight: Tensor | None, label_smoothing: float, z_loss: float
) -> Loss:
    """Return the losses of the rows with targets `y`, (N,)."""
    u, (count, classes) = how.u, logits.p.shape
    weights = logits.p.new_ones(classes) if class_weight is None else class_weight
    target, each = (1.0 - label_smoothing) * weights[y], label_smoothing / max(classes, 1)
    softmax = target + each * weights.sum()
    direct = -(each * weights).expand(count, classes).clone()
    direct = direct.scatter_add(1, y[:, None], -target[:, None])
    nll = -logits.logp.gather(1, y[:, None])[:, 0]
    every = (weights * -logits.logp).sum(-1)
    derivative = logits.p * softmax[:, None] + direct
    error = (derivative * logits.dz).square().sum(-1).sqrt()
    error = error + (target + each * weights.sum()) * (logits.of_oracle + 2.0 * logits.large_dz)
    below = logits.below.gather(1, y[:, None])[:, 0]
    error = error + target * (logits.dsum + u * (nll + below))
    if label_smoothing:
        spread = logits.log_sum + 2.0 * logits.below.amax(-1)
        error = error + each * weights.sum() * (logits.dsum + u * _sum_steps(classes, how) * spread)
    lse = logits.lse
    drift = (derivative * logits.drift).sum(-1)
    if how.headroom:  # Another product, without drift, has computed the logit of the target.
        of_others = (derivative * logits.drift).scatter(1, y[:, None], 0.0).sum(-1)
        drift = torch.where(of_others.abs() > drift.abs(), of_others, drift)
    z_drift = 2.0 * z_loss * lse * (logits.p * logits.drift).sum(-1)
    if how.logits != how.rows:
        drift = drift.abs() + (derivative.abs() * logits.equal).sum(-1)
        z_drift = z_drift.abs() + 2.0 * z_loss * lse.abs() * (logits.p * logits.equal).sum(-1)
    return Loss(
        RowGradient(softmax[:, None], direct),
        target * nll + each * every,
        error,
        drift,
        z_loss * lse.square(),
        z_loss * (2.0 * lse.abs() * logits.dlse + logits.dlse.square()) + 3.0 * u * z_loss * lse.square(),
        z_drift,
    )


def sum_of_rows(losses: Tensor, errors: Tensor, how: Arithmetic) -> Tensor:
    """Return the error of a sum over rows, for independent errors."""
    total = errors.sum() if how.coherent else errors.square().sum().sqrt()
    return total + tree_sum_error(losses.abs(), how)
