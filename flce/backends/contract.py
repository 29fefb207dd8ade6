"""The contract between the engine and a backend: what is done to one tile of logits.

A *tile* is `rows` tokens x `cols` consecutive classes of the logits ``a = x W^T``, as the matrix product
left it, or as a user has them: one row stride, (rows, cols), or two, (outer, inner, cols) for outer * inner rows,
and stride 1 between classes. A backend turns it into row statistics, losses and gradients, and never sees more than
one tile. A `TileCall` has all that it needs beside the logits. A backend multiplies matrices only where that saves the
logits (`Backend.product_statistics`, `product_gradient` and `product_exponentials`) or a float32 sum of dW
(`weight_gradient`, `divided_weight_gradient`). Everything is computed in float32 (float64 for float64 logits).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flce.core.problem import LossSpec
from flce.core.slices import is_full_slice, slice_columns

# Rows of the running state that statistics keep between the tiles of a row of tiles.
STATE_SLOTS = 9
MAX, SUM, TARGET_LOGIT, ENTROPY_SUM, REFERENCE, SMOOTH_SUM, ARGMAX, LOGIT_SUM, SQUARE_SUM = range(STATE_SLOTS)

# `Backend.exponentials` keeps two more: the logit that exponentials are relative to, and dz/dlogits of the target.
EXPONENTIAL_SLOTS = STATE_SLOTS + 2
BASE, TARGET_JACOBIAN = range(STATE_SLOTS, EXPONENTIAL_SLOTS)
# Where exponentials are relative to the base: times SCALE, and the base is raised before they are larger than
# exp(HEADROOM) times that. float16 reaches from 2^-24 to 2^16.
EXPONENTIAL_SCALE = {torch.bfloat16: 1.0, torch.float16: 2.0**4}
# What the derivative of a capped logit is a multiple of, and exponentials are divided by; 1 where it is not larger.
LEAST_JACOBIAN_FACTOR = 1e-30
EXPONENTIAL_HEADROOM = {torch.bfloat16: 44.0, torch.float16: 7.6}

# The normalizer is what is kept of each row between forward and backward: some logit m, the largest as a rule, and
# log(sum(exp(z - m))). Slots that an option adds come behind these.
OFFSET, LOG_SUM = range(2)

# What a row's gradient is made of, see `TileCall.row_gradient`. The gradient of a loss has no ENTROPY, the last. A
# log-probability is taken for LEAST_LOGPROB at least: of a class that has none, the product with its probability is 0.
ROW_GRADIENT_SLOTS = 4
SOFTMAX, TARGET, CLASSES, ENTROPY = range(ROW_GRADIENT_SLOTS)
LOSS_GRADIENT_SLOTS = ENTROPY
LEAST_LOGPROB = -1e4


def normalizer_slots(spec: LossSpec) -> int:
    """The length of a row's normalizer."""
    return 2


def log_sum_exp(normalizer: Tensor) -> Tensor:
    """log(sum(exp(z))) of each row, from its normalizer, (slots, ...): inf where a logit is."""
    offset = normalizer[OFFSET]
    return torch.where(offset == torch.inf, offset, offset + normalizer[LOG_SUM])


# Classes of a block. `Backend.product_statistics` keeps `num_product_planes` numbers of the accumulation dtype for
# each row
# and block, `product_exponentials` one.
PRODUCT_BLOCK = 256
# Bytes for each row that `weight_gradient` and `add_target_terms` take to sort targets.
SORT_ROW_BYTES = 48
# Fields and statistics of a LossSpec that these and `Backend.product_gradient` can do. With any other, logits are
# written to memory.
PRODUCT_FIELDS = frozenset(
    [
        "reduction",
        "ignore_index",
        "softcap",
        "logit_scale",
        "temperature",
        "z_loss",
        "stats",
        "candidates",
        "top_k",
        "row_temperature",
    ]
)
# Those that `product_exponentials` makes. Where the gradients of each token are made in backward, `product_statistics`
# makes all.
EXPONENTIAL_STATS = frozenset({"lse", "logprob"})


def product_scratch_bytes(rows: int, vocab_size: int, numbers: int) -> int:
    """Memory that these take: float32 numbers, `numbers` for each row and block and three more for each row."""
    return 4 * rows * (numbers * -(-vocab_size // PRODUCT_BLOCK) + 3)


def unsupported_by_products(spec: LossSpec) -> list[str]:
    """What is asked for, by name, that products with an epilogue do not make."""
    requested = {field.name for field in fields(spec) if getattr(spec, field.name) != field.default}
    stats = set() if spec.reduction == "none" else set(spec.stats) - EXPONENTIAL_STATS
    return sorted((requested - PRODUCT_FIELDS) | stats)


def num_product_planes(spec: LossSpec) -> int:
    """Numbers that `Backend.product_statistics` keeps for each row and block: its largest logit, the sum of
    exponentials, and one for each of these statistics."""
    argmax = "argmax" in spec.stats or "correct" in spec.stats
    return 2 + argmax + len({"entropy", "mean_logit", "log_sum_sq_prob"}.intersection(spec.stats))


class RowProblem(Protocol):
    """What is known of N rows of logits, wherever these come from. N may be several dimensions here."""

    @property
    def target(self) -> Tensor: ...  # (N,) int64
    @property
    def class_weight(self) -> Tensor | None: ...  # (V,)
    @property
    def token_weight(self) -> Tensor | None: ...  # (N,)
    @property
    def num_items(self) -> Tensor | None: ...  # ()
    @property
    def spec(self) -> LossSpec: ...
    @property
    def shift(self) -> int: ...  # of the target, which was the user's at that many positions later
    @property
    def token_weight_grad(self) -> bool: ...  # whether it is asked for
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...  # of the logits
    @property
    def device(self) -> torch.device: ...


class RowInputs(NamedTuple):
    """What a tile's rows need beside their logits."""

    target: Tensor  # (rows,) int64
    token_weight: Tensor | None  # (rows,) multiplies the loss of each row
    class_weight: Tensor | None  # (V,)
    bias: Tensor | None  # (V,)
    scales: Tensor | None  # (3,) of `Backend.loss_scales`; None: statistics of unweighted classes need none
    row_factor: Tensor | None = None  # (rows,) multiplies the logits z

    def tile_bias(self, tile: Tile) -> Tensor | None:
        """(cols,) of the classes of a tile."""
        return None if self.bias is None else slice_columns(self.bias, tile.columns)

    def target_weight(self, vocab_size: int) -> Tensor | None:
        """(rows,) the class weight of each target."""
        return None if self.class_weight is None else self.class_weight[self.target.clamp(0, vocab_size - 1)]

    def weight_sum(self, vocab_size: int) -> Tensor | float:
        """The sum of the weights of all classes."""
        return float(vocab_size) if self.scales is None else self.scales[2]

    def select_rows(self, part: slice) -> RowInputs:
        """Some of the rows."""
        weight = None if self.token_weight is None else self.token_weight[part]
        factor = None if self.row_factor is None else self.row_factor[part]
        return self._replace(target=self.target[part], token_weight=weight, row_factor=factor)


class RowOutputs(NamedTuple):
    """Memory for the results of each row; None for those that the call does not ask for."""

    loss: Tensor  # (rows,) token_weight * cross entropy, not reduced
    z_loss: Tensor | None  # (rows,) token_weight * z_loss * lse^2, not reduced
    normalizer: Tensor  # (`normalizer_slots`, rows) what backward needs to know of a row
    logprob: Tensor | None  # (rows,)
    entropy: Tensor | None  # (rows,)
    argmax: Tensor | None  # (rows,) int64
    mean_logit: Tensor | None  # (rows,)
    log_sum_sq_prob: Tensor | None  # (rows,)

    @staticmethod
    def requested_fields(spec: LossSpec) -> tuple[bool, ...]:
        """For each field, whether a call asks for it."""
        stats = spec.stats
        argmax = "argmax" in stats or "correct" in stats
        named = [name in stats for name in ("logprob", "entropy", "mean_logit", "log_sum_sq_prob")]
        return True, spec.z_loss != 0.0, True, *named[:2], argmax, *named[2:]

    @staticmethod
    def allocate(
        spec: LossSpec, accum: torch.dtype, new: Callable[[tuple[int, ...], torch.dtype], Tensor]
    ) -> RowOutputs:
        """What a call asks for: ``new((n,), dtype)`` is memory for n values of each row, ``new((), dtype)`` for one."""
        tensors = [
            new((normalizer_slots(spec),) if name == "normalizer" else (), torch.int64 if name == "argmax" else accum)
            if requested
            else None
            for name, requested in zip(RowOutputs._fields, RowOutputs.requested_fields(spec), strict=True)
        ]
        return RowOutputs(*tensors)  # type: ignore[arg-type]

    @staticmethod
    def from_tensors(spec: LossSpec, tensors: Sequence[Tensor]) -> RowOutputs:
        """Those of `tensors`, one for each field, that a call asks for."""
        pairs = zip(tensors, RowOutputs.requested_fields(spec), strict=True)
        return RowOutputs(*(tensor if requested else None for tensor, requested in pairs))  # type: ignore[arg-type]

    @property
    def losses(self) -> tuple[Tensor, Tensor | None]:
        """What the loss is the sum of: cross entropy and another. Each has its scale, the first and the second of
        `Backend.loss_scales`."""
        return self.loss, self.z_loss

    def replace_losses(self, loss: Tensor, z_loss: Tensor | None) -> RowOutputs:
        """With the whole loss in the place of the first of `losses`, and its second part."""
        return self._replace(loss=loss, z_loss=z_loss)

    def map(self, function: Callable[[Tensor], Tensor]) -> RowOutputs:
        return RowOutputs(*[None if t is None else function(t) for t in self])  # type: ignore[arg-type]

    def select_rows(self, part: slice) -> RowOutputs:
        """Some of the rows."""
        return self if is_full_slice(part, self.loss.shape[-1]) else self.map(lambda t: t[..., part])


class Tile(NamedTuple):
    """Which classes a tile holds: [start, start + cols) of `vocab_size`.

    `accessible_cols`: columns of the buffer behind the start of each row, `cols` or more. Those behind `cols` may be
    read and
    written and mean nothing: a kernel whose accesses are whole vectors is twice as fast.

    `is_shard`: a process has these classes and no others. Its statistics begin with this tile and end as a state, which
    `formulas.results_from_state` goes on from.

    `keep_logits`: logits are left as they are, but where the gradient is written over them.
    """

    start: int
    cols: int
    vocab_size: int
    accessible_cols: int
    is_shard: bool = False
    keep_logits: bool = False

    @property
    def is_first(self) -> bool:
        """Whether statistics begin with this tile."""
        return self.is_shard or self.start == 0

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.cols)

    @property
    def is_last(self) -> bool:
        """Whether statistics are complete after this tile."""
        return not self.is_shard and self.start + self.cols == self.vocab_size


class TileCall(NamedTuple):
    """What is done to a tile of logits, and with what. Statistics are written to `out`; gradients are made of the
    `normalizer` that they left and of a `row_gradient`, or together with them."""

    inputs: RowInputs
    spec: LossSpec
    tile: Tile
    out: RowOutputs | None = None  # None: no statistics
    normalizer: Tensor | None = None  # (slots, rows); None: there is `out`
    # (rows,) the gradient of each row's loss, or () of all, or None for 1: it multiplies the scales of the inputs.
    upstream: Tensor | None = None
    # (slots, rows) the gradient of a row as a whole, in which scales, upstream and weights of tokens are; None: it is
    # made of these, where the tile is. With log-probabilities l and p = exp(l) the gradient in z is
    # ``row_gradient[SOFTMAX] * p``, with that slot less ``row_gradient[ENTROPY] * p * l``, in the target's column less
    # ``row_gradient[TARGET]``, and with label smoothing in each column less ``row_gradient[CLASSES]`` times the weight
    # of its class.
    row_gradient: Tensor | None = None

    @property
    def has_entropy_gradient(self) -> bool:
        return self.row_gradient is not None and len(self.row_gradient) > ENTROPY

    def select_rows(self, part: slice) -> TileCall:
        """The call for some of the rows."""
        if is_full_slice(part, len(self.inputs.target)):
            return self
        return self._replace(
            inputs=self.inputs.select_rows(part),
            out=None if self.out is None else self.out.select_rows(part),
            normalizer=None if self.normalizer is None else self.normalizer[:, part],
            upstream=self.upstream if self.upstream is None or self.upstream.dim() == 0 else self.upstream[part],
            row_gradient=None if self.row_gradient is None else self.row_gradient[:, part],
        )


@dataclass(frozen=True)
class TargetTerms:
    """The targets' own share of a weight gradient: ``factor[i] * x[index[i]]`` is added to row ``target[i]`` of it for
    all i, but where the target is `ignore_index` or no class."""

    x: Tensor  # (N, H)
    index: Tensor | None  # (rows,) int64; None: all of x, in its order
    target: Tensor  # (rows,) int64
    factor: Tensor  # (rows,)
    ignore_index: int


class Backend(Protocol):
    name: str

    def statistics(self, logits: Tensor, call: TileCall, state: Tensor | None) -> None:
        """Merge a tile into `state` (STATE_SLOTS, rows); at the last tile write ``call.out``.

        `state` may be None where one tile holds all classes. `logits` may be overwritten, unless ``tile.keep_logits``.
        """

    def row_gradient(self, call: TileCall, out: Tensor) -> None:
        """Write ``call.row_gradient`` of a loss to `out`, (LOSS_GRADIENT_SLOTS, rows), from ``call.normalizer``; 0 for
        ignored rows, NaN for wrong targets. Of a tile of some classes TARGET is 0 where the target is not there."""

    def gradient(self, logits: Tensor, grad: Tensor, call: TileCall) -> None:
        """Write the gradient with respect to the tile's logits to `grad`, which may be `logits` itself.

        `grad` has the dimensions of `logits`, and may have other strides.
        """

    def loss_and_gradient(self, logits: Tensor, grad: Tensor, call: TileCall) -> None:
        """`statistics` and `gradient` at once, for a tile that holds all classes."""

    def exponentials(self, logits: Tensor, exps: Tensor, call: TileCall, state: Tensor, factors: Tensor) -> None:
        """`statistics`, and the gradient of the logits before it is multiplied by what is known at the last tile:
        ``factors[0][:, None] * exps``, but in the target's column, where `exps` is 0, ``factors[1]``; with label
        smoothing less ``factors[2][:, None] * class_weight``.

        logits: float32; exps: of half precision, the tile's part of contiguous columns of all classes, of which those
        before may be written to; state: (EXPONENTIAL_SLOTS, rows); factors: (3, rows) float32, or (2, rows) without
        label smoothing, written at the last tile. Softcap and label smoothing do not go together here.
        """

    def gradient_of_exponentials(self, exps: Tensor, factors: Tensor, call: TileCall) -> None:
        """The gradient of the logits of all classes, in the place of what `exponentials` left."""

    def product_statistics(self, x: Tensor, weight: Tensor, call: TileCall) -> None:
        """`statistics` of the logits ``x weight^T`` of all classes, which are never in memory.

        x: (rows, H), weight: (V, H), of half precision. `PRODUCT_BLOCK` says what it takes.
        """

    def product_gradient(self, x: Tensor, weight: Tensor, grad: Tensor, call: TileCall) -> None:
        """`gradient` of the logits ``x weight^T`` of a tile, which are never in memory; weight: (cols, H).

        ``call.row_gradient`` is given.
        """

    def product_exponentials(
        self,
        x: Tensor,
        weight: Tensor,
        exps: Sequence[Tensor],
        call: TileCall,
        factors: Tensor,
        count: Tensor | None,
    ) -> None:
        """`statistics` of the logits ``x weight^T`` of all classes, which are never in memory, and their gradient:
        ``factors[0][:, None] * exps``, but in the target's column, where `exps` is 0, ``factors[1]``.

        x: (rows, H), weight: (V, H), exps: (rows, V), all bfloat16; factors: (2, rows) float32. `exps` may be several
        pieces of consecutive classes, of which all but the last have a multiple of `PRODUCT_BLOCK`. `count`: (), if it
        is known that all rows from there on are ignored: nothing is written to their `exps`.
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
        """``out[index] = factors[0][:, None] * x + factors[1][:, None] * weight[target]``; 0 for ignored rows.

        x: (rows, H); out: (N, H), perhaps x; weight: None for nothing; index: (rows,), or None for the same rows.
        """

    def weight_gradient(
        self, grads: Sequence[Tensor], exps: Sequence[Tensor], scaled: Tensor, terms: TargetTerms
    ) -> None:
        """``grad = exps^T scaled``, and `terms`. Both sums are one, in float32 and rounded once, and the same bits
        every time.

        grad: (V, H), exps: (rows, V), in equally many pieces of consecutive classes; scaled: (rows, H). The last piece
        comes first: `exps` of a later piece may be where an earlier one's gradient is written.
        """

    def divided_weight_gradient(self, grad: Tensor, dlogits: Tensor, x: Tensor, unit: Tensor | None) -> None:
        """``grad = dlogits^T x / unit``, summed in float32 and rounded once: where logits stay in registers.

        grad: (classes, H), dlogits: (rows, classes), x: (rows, H), of half precision; unit: () float32, or None for
        1.
        """

    def add_target_terms(self, grads: Sequence[Tensor], terms: TargetTerms) -> None:
        """`terms` to what is there: `grads`, contiguous, together have a row for each class from the first on, of which
        some of the last may be missing. Their targets have no part in it."""

    def finish_sharded_rows(
        self, sent: Tensor, rank: int, classes: int, call: TileCall, factors: Tensor | None
    ) -> None:
        """The results of rows of a head that is divided over processes and, if there are `factors`, the factors of
        `product_exponentials` for the classes of this one, from those of its classes alone.

        sent: (processes, 3 * rows + 1) float32, of each process offset, log_sum and log-probability of the target of
        each row, among its own classes, and how many it has; classes: those of the first process; call: of the whole
        loss, its tile that of this process; factors: (2, rows), of which the first is of its classes alone.
        """

    def row_products(self, x: Tensor, weight: Tensor, ids: Tensor, out: Tensor) -> None:
        """``out[i, k] += x[i] @ weight[ids[i, k]]`` where `ids` is a class.

        x: (rows, H), weight: (V, H), ids: (rows, K) int64, out: (rows, K) of the accumulation dtype.

        The sum is the same for any number of rows.
        """

    def sum_equal(self, ids: Tensor, values: Tensor, out: Tensor) -> None:
        """``out[i, k] = sum of values[i, j] over j with ids[i, j] == ids[i, k]``; all (rows, K)."""

    def write_entries(self, tile: Tensor, ids: Tensor, values: Tensor, start: int) -> None:
        """``tile[i, ids[i, k] - start] = values[i, k]`` where that is a column. Equal ids have equal values."""

    def loss_scales(self, p: RowProblem) -> Tensor:
        """(3,): what the sums of both `RowOutputs.losses` are multiplied by; sum of the class weights.

        Here and in `reduce` nothing may wait for the device.
        """

    def reduce(self, p: RowProblem, out: RowOutputs, scales: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """The whole loss of all rows and its second part, () each, if `RowOutputs.losses` has one; and `scales`, which
        are made if they are None."""

    def scale_(self, xs: Sequence[Tensor], factor: Tensor) -> None:
        """``x *= factor`` of each, for a 0-d `factor` on their device; reads and writes nothing if it is 1."""

    def scale_rows_(self, x: Tensor, factor: Tensor, target: Tensor, ignore_index: int) -> None:
        """``x[row] *= factor[row]`` for x as logits may be, `factor` (rows,) or (), `target` (rows,).

        Nothing is done to a row of factor 1, or that is ignored.
        """

    def scale_cast(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """``(x * factor).to(dtype)`` in one pass, rounded once."""

    def softmax(self, x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
        """Softmax or log-softmax along `dim` >= 0, with the strides of ``torch.empty_like(x)``."""

    def softmax_backward(self, grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
        """The gradient, of `dtype`, with respect to what `y` is the (log-)softmax of, with the strides of
        ``torch.empty_like(y)``."""
