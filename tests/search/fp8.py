"""Random calls whose gradients have E4M3 products (`ChunkOptions.grad_dtype`). docs/fp8.md says what is rounded."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from flce.backends.contract import E4M3_SAMPLES, LARGE_SHARE
from flce.backends.e4m3 import PEAK
from flce.backends.triton.e4m3 import LIMIT_FACTOR
from flce.core.gemm import ALIGNMENT
from tests import interpreted_e4m3
from tests.search import linear_loss
from tests.search.bounds import KAPPA, Arithmetic, Gradients, Logits, RowGradient
from tests.search.driver import Call, Errors, Kind

E4M3_CALL = {"grad_dtype": "float8_e4m3fn", "dtype": "bfloat16", "label_smoothing": 0.0, "adapter_ranks": ()}
E4M3_CALL |= {"strategy": "auto", "schedule": None, "logits_dtype": None, "accum_dtype": None}
DEFAULTS: Call = {**linear_loss.KIND.defaults, **E4M3_CALL, "hidden": 16}
# The largest relative error of rounding to E4M3, the largest error below its normal numbers, and the largest number.
U, SUBNORMAL, LARGEST = 2.0**-4, 2.0**-10, 448.0
# A logit that is further above all logits of a sample of classes is out of the range of exponentials.
MAX_ABOVE_SAMPLE = 88.0


def without_large(sizes: Tensor) -> Tensor:
    """Return the sizes of entries, with 0 for those that are certainly not rounded to E4M3."""
    return sizes.masked_fill(sizes > 2.0 * 17 / 16 / LARGE_SHARE * sizes.sum(1, keepdim=True), 0.0)


class E4M3Gradients(Gradients):
    """Gradients of logits, rounded to bfloat16 and to E4M3."""

    def __init__(self, logits: Logits, row: RowGradient, how: Arithmetic) -> None:
        super().__init__(logits, row, how)
        # A tile has exponentials, or gradients with the entries of targets. The factor of a row is for four times the
        # sum that a sample of classes predicts, which may be too large.
        sizes = torch.maximum(self.smooth.abs(), self.value.abs())
        step = max(1, -(-sizes.shape[1] // E4M3_SAMPLES))
        without_targets = self.smooth.abs().masked_fill(row.direct != 0, 0.0)
        samples = without_targets[:, ::step]
        samples = samples[:, : max(1, samples.shape[1] // ALIGNMENT * ALIGNMENT)]
        sampled = step * samples.sum(1, keepdim=True)
        sums = sizes.sum(1, keepdim=True)
        predicted = 4.0 * torch.maximum(sums, sampled)
        # It may also be too small, for example because the sample is rounded. Then more entries are large, and others
        # are larger numbers of E4M3.
        margin = torch.exp(-(2.0**-7) * logits.z.abs().amax(1, keepdim=True))
        self.least_scale = torch.minimum(sums, 4.0 * margin * sampled) / PEAK / 2.0
        # Exponentials out of range: the second product is for a sum of V times the largest.
        is_beyond = logits.z.amax(1, keepdim=True) - logits.z.mean(1, keepdim=True) > MAX_ABOVE_SAMPLE
        predicted = torch.where(is_beyond, sizes.shape[1] * sizes.amax(1, keepdim=True), predicted)
        self.scale = 2.0 * predicted / PEAK
        # If probabilities differ by less than a step of E4M3, their errors are correlated with the operands.
        spread = (logits.z - logits.z.mean(1, keepdim=True)).square().mean(1, keepdim=True).sqrt()
        self.correlated = (2.0 * U / spread.clamp(min=U)).clamp(max=1.0, min=float(how.coherent))
        self.small = torch.maximum(without_large(self.smooth.abs()), without_large(self.value.abs()))

    def times_weight(self, w: Tensor) -> Tensor:
        step = (w.abs().amax(0) if len(w) else w.new_zeros(w.shape[1])) * LIMIT_FACTOR * SUBNORMAL / LARGEST
        found = self._of_e4m3(self.small, self.scale.expand_as(self.small), w, step)
        return super().times_weight(w) + found + U * (self.correlated * self.small) @ w.abs()

    def transposed_times(self, x: Tensor) -> Tensor:
        # The scales of rows are factors of x before x is rounded.
        scaled = self.scale * x.abs()
        step = (scaled.amax(0) if len(x) else x.new_zeros(x.shape[1])) * LIMIT_FACTOR * SUBNORMAL / LARGEST
        entries = (self.small / self.least_scale.clamp(min=1e-300)).clamp(max=LARGEST)
        of_step = KAPPA * entries.square().sum(0).sqrt()[:, None] * step
        found = self._of_e4m3(self.small.T, self.scale.T.expand_as(self.small.T), x, torch.zeros_like(step))
        return super().transposed_times(x) + found + of_step + U * (self.correlated * self.small).T @ x.abs()

    def _of_e4m3(self, small: Tensor, scale: Tensor, right: Tensor, step: Tensor) -> Tensor:
        """Return the error of ``left @ right`` by rounding both. `step`: largest error of small numbers of `right`."""
        squares = (U * small + SUBNORMAL * scale).square() @ right.square()
        squares = squares + small.square() @ (U * right.abs() + step).square()
        return KAPPA * squares.sqrt() + U * (small @ right).abs()


def draw(rng: random.Random, compiled: random.Random, device: str) -> Call:
    call = linear_loss.draw(rng, compiled, device)
    backends = ["torch", "torch", "torch", "hopper"] if device == "cpu" else ["triton"]
    backend = compiled.choice(backends)
    if backend == "hopper":
        call |= {"vocab": min(call["vocab"], 100), "leading": (rng.randint(1, 16),), "shift": 0}
    return {
        **call,
        **E4M3_CALL,
        "backend": backend,
        "hidden": compiled.choice([16, 32, 64] if device == "cpu" else [16, 64, 256, 512]),
        "grads": compiled.choice(["xw", "xw", "xwt", "x", "w"]),
        "mode": "retained" if call["mode"] == "retained" else "eager",
    }


def check(call: Call, device: str, errors: Errors) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu" and call["backend"] != "torch":
            interpreted_e4m3.fix_interpreter(patch)
        linear_loss.check(call, device, errors, E4M3Gradients)


KIND = Kind("fp8", DEFAULTS, draw, check, share=0.5)
