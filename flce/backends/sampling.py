"""Gradients from sampled entries in plain PyTorch: the random numbers, and the operations of `TorchBackend`.

`triton/entries.py` has the same operations as kernels. See `flce/engine/schedules/sampled.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flce.backends.contract import WORD_CLASSES, ExactEntries, GradientCall, SampledEntries, Samples
from flce.backends.formulas import softmax_factor_with_entropy
from flce.core.problem import accumulation_dtype

# Multipliers of hashes: of the golden ratio, and of MurmurHash3's finalizer (A. Appleby, public domain).
GOLDEN, MIX_1, MIX_2 = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
# Odd multipliers of 64 bits: of SplitMix64 (S. Vigna, public domain).
MIX_ROWS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64, 0x9E3779B97F4A7C15 - 2**64
_UINT32 = 0xFFFFFFFF
# Numbers of targets: no class of this process, and ignored.
NO_TARGET, IGNORED = -1, -2
# Entries whose rows of x or of a weight are in memory at once.
ENTRIES_AT_ONCE = 1024
# Bytes for each class that the choice of frequent classes allocates, and of which the PyTorch backend marks and lists
# entries, if all are listed.
CHOICE_BYTES, MARK_BYTES, LIST_BYTES = 48, 48, 48
# Numbers of a hidden state whose bits its seed depends on, and the bytes that `row_seeds` allocates for a row.
SEED_COLUMNS = 32
SEED_BYTES = 8 * (SEED_COLUMNS + 6)


def uniform(seeds: Tensor, classes: Tensor) -> Tensor:
    """Return random numbers u of entries, float32, from the seed of their row and their class in the whole vocabulary:
    (k + 1/2) / 2^23 for an integer k, so that 0 < u < 1."""
    mixed = classes.long() * GOLDEN & _UINT32
    mixed = (mixed ^ (mixed >> 15)) * MIX_1 & _UINT32
    h = (mixed ^ (seeds.long() & _UINT32)) * MIX_2 & _UINT32
    return ((h >> 9).float() + 0.5) * 2.0**-23


def row_seeds(x: Tensor, positions: Tensor, bounds: Tensor) -> Tensor:
    """Return the seeds of rows, int64 numbers of 32 bits: a hash of the position in the call, of the first numbers of
    the hidden state, and of the bound, float32."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = x[:, :SEED_COLUMNS].view(integers[x.dtype.itemsize]).sum(1, dtype=torch.int64)
    # Products and sums wrap around. The upper half of a product depends on all bits of its factors.
    h = positions * MIX_ROWS[0] + bits * MIX_ROWS[1] + bounds.view(torch.int32).long() * MIX_ROWS[2]
    h = (h ^ (h >> 32)) * MIX_ROWS[0]
    return (h ^ (h >> 29)) * MIX_ROWS[1] >> 32


def temporary_bytes(hidden: int, classes: int = 0) -> int:
    """Return an upper bound of the temporary memory of an operation on entries: some rows in two dtypes, and a sum for
    each class."""
    return 8 * (3 * ENTRIES_AT_ONCE + classes) * hidden


def pack_marks(marks: Tensor) -> Tensor:
    """Return bits of bools, (..., n), as int32 words, (..., n / WORD_CLASSES rounded up)."""
    words = -(-marks.shape[-1] // WORD_CLASSES)
    bits = torch.nn.functional.pad(marks, (0, words * WORD_CLASSES - marks.shape[-1])).unflatten(-1, (words, -1))
    return (bits * (1 << torch.arange(WORD_CLASSES, device=marks.device))).sum(-1).to(torch.int32)


def list_entries(words: Tensor, omitted: Tensor, out: Samples) -> None:
    bits = torch.arange(WORD_CLASSES, dtype=torch.int32, device=words.device)
    marks = ((words & ~omitted)[:, :, None] >> bits & 1).flatten(1)
    out.bounds[1:] = out.bounds[0] + marks.sum(1).cumsum(0)
    classes, room = marks.nonzero()[:, 1].to(torch.int32), out.classes[int(out.bounds[0]) :]
    room[: len(classes)] = classes[: len(room)]


def _entry_slabs(samples: Samples) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield some entries at a time: their positions in the list, and their rows and classes."""
    rows = torch.arange(len(samples.seeds), device=samples.bounds.device)
    rows = rows.repeat_interleave(samples.bounds.diff())
    first, last = int(samples.bounds[0]), int(samples.bounds[-1])
    for start in range(first, last, ENTRIES_AT_ONCE):
        part = slice(start, min(start + ENTRIES_AT_ONCE, last))
        yield part, rows[part.start - first : part.stop - first], samples.classes[part].long()


def sampled_gradient(
    x: Tensor, weight: Tensor, call: GradientCall, samples: Samples, exact: ExactEntries, out: SampledEntries,
    dense: Tensor | None, grad: Tensor | None, gradient_scale: Tensor | None, only_logits: bool,
) -> None:  # fmt: skip
    accum, inputs = accumulation_dtype(x.dtype), call.inputs
    dx = x.new_zeros(x.shape, dtype=accum) if dense is None else dense
    for part, rows, classes in _entry_slabs(samples):
        w = weight[classes].to(accum)
        a = torch.einsum("eh,eh->e", x[rows].to(accum), w) if out.logits is None or only_logits else out.logits[part]
        if out.logits is not None and only_logits:
            out.logits[part] += a
            continue
        a = a if inputs.bias is None else a + inputs.bias[classes]
        inverse = None if inputs.inverse_temperature is None else inputs.inverse_temperature[rows]
        z = call.spec.transform(a[:, None], inverse)
        jacobian = torch.as_tensor(call.spec.jacobian(z, inverse), dtype=accum, device=x.device)
        (offset, log_sum, _), factors = call.normalizer[:, rows], call.row_gradient[:, rows]
        logprob = (z[:, 0] - offset) - log_sum
        p = logprob.exp()
        is_kept = uniform(samples.seeds[rows], classes + out.first_class) < p / out.sample_below
        is_kept &= classes != inputs.target[rows]
        g = p.clamp(min=out.sample_below) * softmax_factor_with_entropy(factors, logprob)
        values = (g[:, None] * jacobian)[:, 0].masked_fill_(~is_kept, 0.0)
        out.rows[part] = exact.rows[rows, 0].to(torch.int32)
        out.values[part] = values
        out.classes[part] = torch.where(is_kept, classes, len(weight)).to(torch.int32)
        dx.index_add_(0, rows, w.mul_(values[:, None]))
    if grad is None:
        return
    for ids, value in zip(exact.classes.t(), exact.values.t(), strict=True):
        valid = ids < len(weight)
        dx.addcmul_(weight[ids.where(valid, 0)].to(accum), value.where(valid, 0.0)[:, None])
    dx = dx if gradient_scale is None else dx / gradient_scale
    grad.index_copy_(0, exact.rows[:, 0], dx.to(grad.dtype))


def sampled_weight_gradient(
    x: Tensor, entries: SampledEntries, order: Tensor, bounds: Tensor, place: Tensor, dense: Tensor, grad: Tensor,
    gradient_scale: Tensor | None, class_weight: Tensor | None, subtracted: Tensor | None,
) -> None:  # fmt: skip
    total, frequent = x.new_zeros(grad.shape, dtype=dense.dtype), (place[: len(grad)] >= 0).nonzero()[:, 0]
    total[frequent] = dense[place[frequent]]
    for part in order[: int(bounds[-1])].split(ENTRIES_AT_ONCE):
        rows = x[entries.rows[part].long()].to(total.dtype)
        total.index_add_(0, entries.classes[part].long(), rows.mul_(entries.values[part, None]))
    if class_weight is not None and subtracted is not None:
        total.addr_(class_weight, subtracted, alpha=-1.0)
    grad += total if gradient_scale is None else total.div_(gradient_scale)
