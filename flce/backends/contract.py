"""The contract between the engine and a backend: the operations on one tile of logits.

A *tile* has `rows` tokens and `cols` consecutive classes of the logits ``a = x W^T``. The matrix product or a user
wrote these logits. The stride between classes is 1. A backend computes row statistics, losses and gradients from one
tile at a time. A `StatisticsCall` or `GradientCall` contains everything except the logits. A backend multiplies
matrices only where no logits are written to memory then (`Backend.fused_statistics`, `fused_gradient`,
`fused_exponentials`), or no float32 sum of dW (`weight_gradient`, `unscaled_weight_gradient`). Everything is computed
in float32 (float64 for float64 logits).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from flce.core.gemm import slice_columns
from flce.core.problem import CrossEntropyProblem, LinearCrossEntropyProblem, LinearTerm, LogprobSpec, LossSpec

# Slots (numbers of a row) of the running state, which statistics update tile by tile.
STATE_SLOTS = 8
MAX, SUM, TARGET_LOGIT, ENTROPY_SUM, REFERENCE, SMOOTH_SUM, ARGMAX, LOGIT_SUM = range(STATE_SLOTS)

# `Backend.exponentials` has two more slots: a reference, to which exponentials are relative, and dz/da of the target.
EXPONENTIAL_SLOTS = STATE_SLOTS + 2
EXP_REFERENCE, TARGET_JACOBIAN = range(STATE_SLOTS, EXPONENTIAL_SLOTS)
# Kernels store exp(z - EXP_REFERENCE) in bfloat16. EXP_REFERENCE is raised before a stored number exceeds
# exp(EXPONENTIAL_HEADROOM).
EXPONENTIAL_HEADROOM = 44.0
# With softcap kernels store exp(z - EXP_REFERENCE) * dz/da / (scale * cap), or without the division if abs(scale * cap)
# is at most this.
LEAST_JACOBIAN_FACTOR = 1e-30

# Slots of the normalizer, which is stored for each row from forward to backward: a logit m, usually the largest,
# log(sum(exp(z - m))), and the target's log-probability. Every kernel that ends rows writes all of them.
NORMALIZER_SLOTS = 3
OFFSET, LOG_SUM, LOGPROB = range(NORMALIZER_SLOTS)

# Slots of `GradientCall.row_gradient`. The gradient of a loss does not have the last two. Log-probabilities are clamped
# to LEAST_LOGPROB, so that the product of a log-probability of -inf and its probability is 0.
ROW_GRADIENT_SLOTS = 5
SOFTMAX, TARGET, CLASSES, ENTROPY, DIVERGENCE_FACTOR = range(ROW_GRADIENT_SLOTS)
LOSS_GRADIENT_SLOTS = ENTROPY
LEAST_LOGPROB = -1e4

# Slots of `Teacher.rows`: OFFSET and LOG_SUM of teacher and student, the divergence, and the mean under the student of
# the weights w of `Backend.divergence`. While statistics are computed, the slots of LOG_SUM are sums of exponentials,
# and DIVERGENCE is the sum of probabilities times differences of logits, all relative to the largest logits so far.
TEACHER, STUDENT, DIVERGENCE, MEAN_WEIGHT, DIVERGENCE_SLOTS = 0, 2, 4, 5, 6


def log_sum_exp(normalizer: Tensor) -> Tensor:
    """Return log(sum(exp(z))) of each row from its normalizer, (slots, ...); inf where a logit is inf."""
    offset = normalizer[OFFSET]
    return torch.where(offset == torch.inf, offset, offset + normalizer[LOG_SUM])


# Classes and rows of a block of a fused product. `Backend.fused_statistics` allocates `num_partial_statistics` numbers
# of the accumulation dtype for each row and block of classes, `fused_exponentials` one.
FUSED_PRODUCT_BLOCK = 256
FUSED_PRODUCT_ROWS = 128
# Bytes for each row that `weight_gradient` and `add_target_terms` allocate to sort targets.
SORT_ROW_BYTES = 48
# Bytes for each class that `weight_gradient` allocates.
SLOT_BYTES = 4
# Fields of a LossSpec that fused products support. With any other field, logits are written to memory.
FUSED_PRODUCT_FIELDS = frozenset(
    [
        "reduction",
        "ignore_index",
        "softcap",
        "logit_scale",
        "temperature",
        "z_loss",
        "stats",
        "empty_loss",
        "candidates",
        "top_k",
        "row_temperature",
    ]
)
# Statistics that `fused_exponentials` computes. With ``reduction="none"`` the schedule calls `fused_statistics`,
# which computes all of them.
EXPONENTIAL_STATS = frozenset({"lse", "logprob"})

# Sampled gradients (`ChunkOptions.sample_below`). At most this many classes have dense gradients, or a share of 1 /
# FREQUENT_DIVISOR of all classes. The list of the other entries has room for ENTRIES_PER_TOKEN for each token.
MAX_FREQUENT, FREQUENT_DIVISOR = 4096, 8
ENTRIES_PER_TOKEN = 512
# Classes of a word of marks: one bit each.
WORD_CLASSES = 32


def sort_scratch_bytes(entries: int, classes: int) -> int:
    """Return the bytes that `sort_entries` allocates: to sort the entries, or to search the sorted ones for a class."""
    # A stable sort has sorted classes and their order, the order before, copies of both, and CUB's counts.
    return max(33 * entries + 8192, 20 * entries + 4 * classes)


def fused_product_scratch_bytes(rows: int, vocab_size: int, numbers: int) -> int:
    """Return the bytes that a fused product allocates: `numbers` float32 numbers for each row and block, and three for
    each row."""
    return 4 * rows * (numbers * -(-vocab_size // FUSED_PRODUCT_BLOCK) + 3)


def unsupported_by_fused_products(spec: LossSpec) -> list[str]:
    """Return the names of requested fields and statistics that fused products do not support."""
    requested = {field.name for field in fields(spec) if getattr(spec, field.name) != field.default}
    stats = set() if spec.reduction == "none" else set(spec.stats) - EXPONENTIAL_STATS
    return sorted((requested - FUSED_PRODUCT_FIELDS) | stats)


def num_partial_statistics(spec: LossSpec) -> int:
    """Return how many numbers `Backend.fused_statistics` stores for each row and block: its largest logit, its sum of
    exponentials, and one for each additional statistic."""
    argmax = "argmax" in spec.stats or "correct" in spec.stats
    return 2 + argmax + ("entropy" in spec.stats) + ("mean_logit" in spec.stats)


# A call of a loss, with a head or with logits.
RowProblem: TypeAlias = LinearCrossEntropyProblem | CrossEntropyProblem


class RowInputs(NamedTuple):
    """Inputs of a tile's rows in addition to their logits."""

    target: Tensor  # (rows,) int64
    token_weight: Tensor | None  # (rows,) multiplies the loss of each row
    class_weight: Tensor | None  # (V,)
    bias: Tensor | None  # (V,)
    scales: Tensor | None  # (3,) of `Backend.loss_scales`; None for statistics of unweighted classes
    inverse_temperature: Tensor | None = None  # (rows,) 1 / temperature: multiplies z
    upstream: Tensor | None = None  # gradient of each row's loss, (rows,), or of the loss, (): multiplies `scales`

    def tile_bias(self, tile: TileClasses) -> Tensor | None:
        """Return the bias of the classes of a tile, (cols,)."""
        return None if self.bias is None else slice_columns(self.bias, tile.columns)

    def target_weight(self, vocab_size: int) -> Tensor | None:
        """Return the class weight of each target, (rows,)."""
        return None if self.class_weight is None else self.class_weight[self.target.clamp(0, vocab_size - 1)]

    def select_rows(self, rows: slice) -> RowInputs:
        token_weight = None if self.token_weight is None else self.token_weight[rows]
        factor = None if self.inverse_temperature is None else self.inverse_temperature[rows]
        upstream = self.upstream if self.upstream is None or self.upstream.dim() == 0 else self.upstream[rows]
        return self._replace(
            target=self.target[rows], token_weight=token_weight, inverse_temperature=factor, upstream=upstream
        )


class RowOutputs(NamedTuple):
    """Memory for the results of each row; None for results that the call does not request.

    `vectors.reduce` replaces `loss` by the total loss, and `z_loss` by its sum.
    """

    loss: Tensor  # (rows,) token_weight * cross entropy, not reduced; not written by calls of a shard
    z_loss: Tensor | None  # (rows,) token_weight * z_loss * lse^2, not reduced
    normalizer: Tensor  # (NORMALIZER_SLOTS, rows), read by backward
    logprob: Tensor | None  # (rows,)
    entropy: Tensor | None  # (rows,)
    argmax: Tensor | None  # (rows,) int64
    mean_logit: Tensor | None  # (rows,)

    @staticmethod
    def requested_fields(spec: LossSpec) -> tuple[bool, ...]:
        """Return for each field True if a call requests it."""
        argmax = "argmax" in spec.stats or "correct" in spec.stats
        needed = {"loss": True, "z_loss": spec.z_loss != 0.0, "normalizer": True, "argmax": argmax}
        return tuple([needed.get(name, name in spec.stats) for name in RowOutputs._fields])

    @staticmethod
    def allocate(
        spec: LossSpec,
        accum: torch.dtype,
        shape: tuple[int, ...],
        new: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> RowOutputs:
        """Allocate the requested results of rows of this shape with ``new(shape, dtype)``."""
        slots = NORMALIZER_SLOTS, *shape
        tensors = [
            new(slots if name == "normalizer" else shape, torch.int64 if name == "argmax" else accum)
            if requested
            else None
            for name, requested in zip(RowOutputs._fields, RowOutputs.requested_fields(spec), strict=True)
        ]
        return RowOutputs(*tensors)  # type: ignore[arg-type]

    @staticmethod
    def from_tensors(spec: LossSpec, tensors: Sequence[Tensor]) -> RowOutputs:
        """Return the outputs of a call from `tensors`, one for each field. Tensors that are not requested are
        dropped."""
        pairs = zip(tensors, RowOutputs.requested_fields(spec), strict=True)
        return RowOutputs(*(tensor if requested else None for tensor, requested in pairs))  # type: ignore[arg-type]

    def map(self, function: Callable[[Tensor], Tensor]) -> RowOutputs:
        return RowOutputs(*[None if t is None else function(t) for t in self])  # type: ignore[arg-type]

    def select_rows(self, rows: slice) -> RowOutputs:
        is_full = rows.start == 0 and rows.stop >= self.loss.shape[-1]
        return self if is_full else self.map(lambda t: t[..., rows])


class TileClasses(NamedTuple):
    """The classes of a tile: [start, start + cols) of the `vocab_size` classes of this process.

    Attributes:
        accessible_cols: columns of the buffer from the start of each row, at least `cols`. Columns behind `cols` may be
            read and written and have no meaning: a kernel is twice as fast if it accesses only full vectors.
        is_shard: True if the vocabulary is divided over processes. The result of statistics is then a state, which
            `formulas.results_from_state` reads, or the normalizer and other statistics of this process alone.
        keep_logits: True if the logits must not be overwritten, except by their gradient.
    """

    start: int
    cols: int
    vocab_size: int
    accessible_cols: int
    is_shard: bool = False
    keep_logits: bool = False

    @property
    def is_first(self) -> bool:
        """True if statistics begin with this tile."""
        return self.start == 0

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.cols)

    @property
    def is_last(self) -> bool:
        """True if statistics are complete after this tile."""
        return not self.is_shard and self.start + self.cols == self.vocab_size


class StatisticsCall(NamedTuple):
    """A call that computes statistics of a tile, or of all classes, and ends rows. It reads all `inputs`."""

    inputs: RowInputs
    spec: LossSpec
    tile: TileClasses
    out: RowOutputs  # memory for the results

    def select_rows(self, rows: slice) -> StatisticsCall:
        if rows.start == 0 and rows.stop >= len(self.inputs.target):
            return self
        return self._replace(inputs=self.inputs.select_rows(rows), out=self.out.select_rows(rows))


class GradientCall(NamedTuple):
    """A call that computes the gradient of a tile. Of the inputs it reads what changes logits and, with label
    smoothing, the class weights."""

    inputs: RowInputs
    spec: LossSpec
    tile: TileClasses
    normalizer: Tensor  # (slots, rows)
    # (slots, rows): factors of the gradient of each row's logits. They include scales, upstream gradients and token
    # weights. With log-probabilities l and p = exp(l), the gradient in z is
    #     row_gradient[SOFTMAX] * p
    #     - row_gradient[ENTROPY] * p * l, if there is this slot
    #     - row_gradient[TARGET] in the target's column
    #     - row_gradient[CLASSES] * class weight in each column, with label smoothing
    row_gradient: Tensor

    @property
    def has_entropy_gradient(self) -> bool:
        return len(self.row_gradient) > ENTROPY

    def select_rows(self, rows: slice) -> GradientCall:
        if rows.start == 0 and rows.stop >= len(self.inputs.target):
            return self
        normalizer, row_gradient = self.normalizer[:, rows], self.row_gradient[:, rows]
        return self._replace(inputs=self.inputs.select_rows(rows), normalizer=normalizer, row_gradient=row_gradient)


TileCall: TypeAlias = StatisticsCall | GradientCall


class Teacher(NamedTuple):
    """The teacher of a divergence. Its logits are the sum of the terms and the bias, of the classes of this process."""

    terms: tuple[LinearTerm, ...]  # all N tokens
    bias: Tensor | None  # (V,)
    spec: LossSpec  # softcap, scale and temperature
    kind: str  # one of `problem.DIVERGENCES`
    beta: float  # weight of the teacher's term: 1 for "forward_kl", 0 for "reverse_kl"
    rows: Tensor  # (DIVERGENCE_SLOTS, rows) of the selected tokens

    @staticmethod
    def from_problem(p: LinearCrossEntropyProblem, rows: Tensor, kind: str | None = None) -> Teacher:
        """`kind` replaces the kind of the problem: the normalizers for "jsd" are statistics of another kind."""
        assert isinstance(p.spec, LogprobSpec)
        spec = replace(p.spec, softcap=p.spec.teacher_softcap, logit_scale=p.spec.teacher_logit_scale)
        return Teacher(p.teacher_terms, p.teacher_bias, spec, kind or str(p.spec.divergence), p.spec.beta, rows)

    def select_rows(self, rows: slice) -> Teacher:
        return self._replace(rows=slice_columns(self.rows, rows))

    def tile_call(self, call: TileCall) -> TileCall:
        """Return the call of the teacher's logits for the tile of `call`."""
        return call._replace(spec=self.spec, inputs=call.inputs._replace(bias=self.bias))


@dataclass(frozen=True)
class TargetTerms:
    """The targets' terms of a weight gradient: ``factor[i] * x[index[i]]`` is added to its row ``target[i]`` for all i,
    except where the target is `ignore_index` or not a class."""

    x: Tensor  # (N, H)
    index: Tensor | None  # (rows,) int64; None: all of x, in its order
    target: Tensor  # (rows,) int64
    factor: Tensor  # (rows,)
    ignore_index: int


class Marks(NamedTuple):
    """The choice of entries of the gradient of the logits, made while statistics are computed, and its output. With
    u = `sampling.uniform(seeds, class)`, 0 < u < 1, an entry is marked if u < exp(z - threshold)."""

    threshold: Tensor  # (rows,) logarithm of s times a lower bound of the sum of exp(z); inf for ignored rows
    seeds: Tensor  # (rows,) int32
    first_class: int  # the class of column 0, in the whole vocabulary
    words: Tensor  # (rows, words of all classes) int32: bit k of word i is 1 if class 32 i + k is marked

    def select_classes(self, start: int) -> Marks:
        """Return the marks of a tile that begins with the class `start`, divisible by WORD_CLASSES."""
        return self._replace(first_class=self.first_class + start, words=self.words[:, start // WORD_CLASSES :])


class Samples(NamedTuple):
    """The entries of the gradient of the logits of all rows, by rows: each row has its marked classes in ascending
    order, without frequent classes. Backward thins them with the complete sums of exponentials."""

    bounds: Tensor  # (N + 1,) int64: row i has the entries [bounds[i], bounds[i + 1])
    frequent: Tensor  # (K,) int64: the classes with dense gradients
    seeds: Tensor  # (N,) int32
    classes: Tensor  # (capacity,) int32

    @staticmethod
    def sizes(num_tokens: int, vocab_size: int) -> list[int]:
        """Return the numbers of int32 of each field."""
        return [2 * (num_tokens + 1), 2 * num_frequent(vocab_size), num_tokens, ENTRIES_PER_TOKEN * num_tokens]

    @staticmethod
    def from_memory(memory: Tensor, num_tokens: int, vocab_size: int) -> Samples:
        """Return the fields as views of one memory of int32."""
        bounds, frequent, seeds, classes = memory.split(Samples.sizes(num_tokens, vocab_size))
        return Samples(bounds.view(torch.int64), frequent.view(torch.int64), seeds, classes)

    def select_rows(self, rows: slice) -> Samples:
        return self._replace(bounds=self.bounds[rows.start : rows.stop + 1], seeds=self.seeds[rows])


class SampledEntries(NamedTuple):
    """The values of a list of entries, in its order. Behind them exact entries of all rows, which backends do not
    write."""

    rows: Tensor  # (entries,) int32 rows of the call
    values: Tensor  # (entries,) of the accumulation dtype, 0 for entries that were dropped
    classes: Tensor  # (entries,) int32; V for entries that were dropped
    logits: Tensor | None  # (listed entries,) of all terms; None: of the only term, not stored
    first_class: int  # see `Marks`
    sample_below: float


class ExactEntries(NamedTuple):
    """Entries of some rows that are not sampled: their target and candidates. Contiguous."""

    rows: Tensor  # (rows, 1) int64 rows of the call
    values: Tensor  # (rows, K)
    classes: Tensor  # (rows, K) int64; V for none


def num_frequent(vocab_size: int) -> int:
    """Return the number of classes whose gradients are dense if the others are sampled."""
    return max(1, min(MAX_FREQUENT, vocab_size // FREQUENT_DIVISOR))


class Backend(Protocol):
    name: str

    def statistics(self, logits: Tensor, call: StatisticsCall, state: Tensor | None) -> None:
        """Merge a tile into `state` (STATE_SLOTS, rows); at the last tile write ``call.out``.

        `state` may be None if one tile has all classes. `logits` may be overwritten, unless ``tile.keep_logits``.
        """

    def row_gradient(self, call: GradientCall) -> None:
        """End rows again, from all inputs and ``call.normalizer``. Write their row gradient to ``call.row_gradient``,
        (LOSS_GRADIENT_SLOTS, rows): 0 for ignored rows, NaN for wrong targets."""

    def gradient(self, logits: Tensor, grad: Tensor, call: GradientCall) -> None:
        """Write the gradient with respect to the tile's logits to `grad`, which may be `logits` itself. It follows from
        ``call.normalizer`` and ``call.row_gradient``.

        `grad` has the dimensions of `logits`, and may have other strides.
        """

    def loss_and_gradient(self, logits: Tensor, grad: Tensor, call: StatisticsCall) -> None:
        """Run `statistics` and `gradient` in one pass, for a tile that has all classes."""

    def divergence(
        self, logits: Tensor, teacher_logits: Tensor, call: TileCall, teacher: Teacher, grad: Tensor | None = None
    ) -> None:
        """Process a tile of student and teacher. Logits may be overwritten.

        p and q are the probabilities of the student and the teacher, s and t their logarithms, and m is
        ``(1 - beta) p + beta q``. w is ``-q / p`` for "forward_kl", ``s - t`` for "reverse_kl" and
        ``(1 - beta) (s - log m)`` for "jsd".

        * With `grad`, and a `GradientCall`: run `gradient`, and add ``f * p * w`` to the gradient in z. f is the slot
          DIVERGENCE_FACTOR of ``call.row_gradient``. The slot SOFTMAX subtracts the mean of w under the student.
        * Otherwise for "jsd": add the terms of the tile's classes to DIVERGENCE and MEAN_WEIGHT of ``teacher.rows``.
        * Otherwise: merge the tile's statistics into ``teacher.rows``.
        """

    def exponentials(self, logits: Tensor, exps: Tensor, call: StatisticsCall, state: Tensor, factors: Tensor) -> None:
        """Run `statistics`, and write exponentials and factors, from which the gradient of the logits is computed.

        The factors are the row gradient of exponentials, with the slots SOFTMAX and TARGET. The gradient is
        ``factors[SOFTMAX][:, None] * exps``, except in the target's column: there `exps` is 0, and the gradient is
        ``factors[TARGET]``. Label smoothing is not supported here.

        Args:
            logits: float32.
            exps: bfloat16, the tile's columns of contiguous columns of all classes. Columns of earlier tiles may be
                written, too.
            state: (EXPONENTIAL_SLOTS, rows).
            factors: (2, rows) float32; written at the last tile, not in a shard.
        """

    def fused_statistics(self, x: Tensor, weight: Tensor, call: StatisticsCall, marks: Marks | None = None) -> None:
        """Run `statistics` of the logits ``x weight^T`` of all classes, which are never in memory, and `mark_entries`
        if `marks` are given.

        x: (rows, H), weight: (V, H), of half precision. Temporary memory: `fused_product_scratch_bytes`.
        """

    def mark_entries(self, logits: Tensor, call: StatisticsCall, marks: Marks) -> None:
        """Write the words of ``marks.words`` of the classes of a tile, whose logits are not changed."""

    def list_entries(self, words: Tensor, omitted: Tensor, out: Samples) -> None:
        """Append the entries of some rows to a list. Entries beyond the capacity are counted in the bounds, and not
        written.

        Args:
            words: (rows, words of all classes) of `mark_entries`.
            omitted: (words of all classes,) int32: the bits of frequent classes. There are none behind the classes.
            out: the list. ``bounds[0]`` is set, the other bounds of these rows are written.
        """

    def sampled_gradient(
        self, x: Tensor, weight: Tensor, call: GradientCall, samples: Samples, exact: ExactEntries,
        out: SampledEntries, dense: Tensor | None, grad: Tensor | None, gradient_scale: Tensor | None,
        only_logits: bool,
    ) -> None:  # fmt: skip
        """Compute the values of the entries of some rows, and dX.

        With p the probability of an entry, computed from ``call.normalizer``, g its gradient and q = min(1, p /
        ``out.sample_below``), the value is g / q if u < q (see `Marks`), and 0 otherwise. It is also 0 for the target,
        whose gradient is in `exact`.

        Args:
            x: (rows, H); weight: (V, H).
            call: of all classes, with `row_gradient`.
            samples, exact: of these rows.
            out: of all rows.
            dense: (rows, H) added to dX; None: 0.
            grad: (N, H) ``grad[exact.rows] = (dense + sum of value * weight[class]) / gradient_scale``, the sum over
                all entries; None: not requested.
            only_logits: add ``x[row] @ weight[class]`` of each entry to ``out.logits``, and write nothing else.
        """

    def sampled_weight_gradient(
        self, x: Tensor, entries: SampledEntries, order: Tensor, bounds: Tensor, place: Tensor, dense: Tensor,
        grad: Tensor, gradient_scale: Tensor | None, class_weight: Tensor | None, subtracted: Tensor | None,
    ) -> None:  # fmt: skip
        """Add ``(dense[place] + sum of value * x[row]) / gradient_scale`` to `grad`, rounded once. Deterministic.
        With a `class_weight`, (V,), ``class_weight[class] * subtracted``, (H,), is subtracted. Without it, rows of
        classes that have neither entries nor a row of `dense` need not be read.

        Args:
            x: (rows, H).
            order: (entries,) int64, a stable sort of the entries by classes.
            bounds: (V + 1,) int64: class k has the entries [bounds[k], bounds[k + 1]) of this order.
            place: (V,) or longer, int64: the row of `dense` of each class, or -1.
            dense: (K, H) of the accumulation dtype; grad: (V, H) of any dtype.
        """

    def fused_gradient(self, x: Tensor, weight: Tensor, grad: Tensor, call: GradientCall) -> None:
        """Run `gradient` of the logits ``x weight^T`` of a tile, which are never in memory; weight: (cols, H)."""

    def fused_exponentials(
        self,
        x: Tensor,
        weight: Tensor,
        exps: Sequence[Tensor],
        call: StatisticsCall,
        factors: Tensor,
        count: Tensor | None,
        scales: Callable[[], Tensor | None],
    ) -> None:
        """Run `statistics` of the logits ``x weight^T`` of all classes, which are never in memory, and write
        exponentials and factors, from which the gradient is computed as in `exponentials`.

        Args:
            x: (rows, H) bfloat16.
            weight: (V, H) bfloat16.
            exps: (rows, V) bfloat16, in one or several tiles of consecutive classes. The number of classes of each
                tile except the last is divisible by `FUSED_PRODUCT_BLOCK`.
            factors: (2, rows) float32. In a shard the derivative of the shard's log-sum-exp is ``factors[SOFTMAX] *
                exps``, and ``factors[TARGET]`` is dz/da of the target.
            count: () if all rows from this number on are ignored: their `exps` are not written.
            scales: returns `RowInputs.scales`, which are None in `call`. It is called after the first product was
                launched: an idle device then starts earlier.
        """

    def combine_rows(
        self,
        x: Tensor,
        out: Tensor,
        weight: Tensor | None,
        target: Tensor,
        factors: Tensor,
        ignore_index: int,
        index: Tensor | None,
    ) -> None:
        """Write ``out[index] = factors[0][:, None] * x + factors[1][:, None] * weight[target]``; 0 for ignored rows.

        x: (rows, H); out: (N, H), may be x; weight: None to omit its term; index: (rows,), or None for the same rows.
        """

    def weight_gradient(
        self, grad: Tensor, exps: Sequence[Tensor], scaled: Tensor, residual: Tensor, terms: TargetTerms
    ) -> None:
        """Write ``grad = exps^T scaled`` plus `terms`, as one sum that is rounded once. It is deterministic.

        grad: (V, H); exps: (rows, V), in tiles of consecutive classes; scaled: (rows, H). The last tile is used
            first, because `exps` of a later tile may lie in the memory of `grad` of the classes before it.
        residual: (rows, H), contiguous, of grad's dtype: temporary memory.
        """

    def unscaled_weight_gradient(self, grad: Tensor, dlogits: Tensor, x: Tensor, gradient_scale: Tensor | None) -> None:
        """Write ``grad = dlogits^T x / gradient_scale``, summed in float32 and rounded once. Used if logits stay in
        registers.

        grad: (classes, H), dlogits: (rows, classes), x: (rows, H), of half precision; gradient_scale: () float32, or
        None for 1.
        """

    def add_target_terms(self, grads: Sequence[Tensor], terms: TargetTerms) -> None:
        """Add `terms` to `grads`, contiguous, which together have a row for each class from the first on. Rows of the
        last classes may be missing: terms of these targets are dropped."""

    def row_products(self, x: Tensor, weight: Tensor, ids: Tensor, out: Tensor) -> None:
        """Add ``x[i] @ weight[ids[i, k]]`` to ``out[i, k]`` where `ids` is a class.

        x: (rows, H), weight: (V, H), ids: (rows, K) int64, out: (rows, K) of the accumulation dtype. The sum is the
        same for any number of rows.
        """

    def sum_equal(self, ids: Tensor, values: Tensor, out: Tensor) -> None:
        """Write ``out[i, k] = sum of values[i, j] over j with ids[i, j] == ids[i, k]``; all (rows, K)."""

    def write_entries(self, tile: Tensor, ids: Tensor, values: Tensor, start: int) -> None:
        """Write ``tile[i, ids[i, k] - start] = values[i, k]`` for columns of the tile. Equal ids have equal values."""

    def loss_scales(self, p: RowProblem) -> Tensor:
        """Return (3,): the factor of the cross entropy, the factor of the z-loss, the sum of the class weights. A
        factor is 1 / divisor; for a divisor of 0 it is inf or, with ``empty_loss="zero"``, 0.

        The host must not wait for the device here and in `reduce`.
        """

    def reduce(self, p: RowProblem, out: RowOutputs, scales: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the total loss of all rows, (), the z-loss, () or None, and `scales`, computed here if they are
        None."""

    def scale_(self, xs: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply each tensor by the 0-d `factor`, which is on their device. If it is 1, no tensor is read or
        written."""

    def scale_rows_(self, x: Tensor, factor: Tensor, target: Tensor, ignore_index: int) -> None:
        """Multiply ``x[row]`` by ``factor[row]``. x has the shape of a tile; factor: (rows,) or (); target: (rows,).

        Ignored rows and rows of factor 1 are not accessed.
        """

    def scale_cast(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``(x * factor).to(dtype)``, computed in one pass and rounded once."""

    def softmax(self, x: Tensor, dtype: torch.dtype, log: bool) -> Tensor:
        """Return the softmax or log-softmax of contiguous `x` along the last dimension."""

    def softmax_backward(self, grad: Tensor, y: Tensor, dtype: torch.dtype, log: bool) -> Tensor:
        """Return the gradient, of `dtype`, with respect to the input whose (log-)softmax is `y`. `grad` and `y` are
        contiguous and have one dtype."""
