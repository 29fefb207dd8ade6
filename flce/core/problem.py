"""A call as data: scalar arguments (`LossSpec`), needed gradients (`Needs`), the checked call
(`LinearCrossEntropyProblem`), results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from flce.core.numbers import check_float, check_int
from flce.core.options import ChunkOptions
from flce.core.shard import Shard

Reduction = Literal["none", "mean", "sum"]
STATS = ("lse", "logprob", "entropy", "argmax", "correct")
# Results of `flce.linear_logprobs`.
OUTPUTS = ("logprob", "entropy", "lse", "argmax", "correct", "mean_logit")
# Divergences of `flce.linear_divergence`, and its results.
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
DIVERGENCE_RESULTS = ("divergence", "logprob", "entropy")
# Largest number of candidates, and largest `top_k`.
MAX_ENTRIES = 256

# See `LossSpec.typical_gradient`. With the headroom of FLOAT16_GRAD_PEAK, the gradient of a z-loss is in the range of
# float16 for log-sum-exps up to the largest float16 number.
TYPICAL_LSE = 1024.0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of losses, statistics and row arithmetic: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Values that the fields of `LossSpec` may have.
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "reduction": (lambda x: x in get_args(Reduction), "be 'none', 'mean' or 'sum'"),
    "ignore_index": (lambda x: -(2**63) <= x < 2**63, "fit into 64 bits"),
    "label_smoothing": (lambda x: 0.0 <= x <= 1.0, "be in [0, 1]"),
    "softcap": (lambda x: x is None or 0.0 < x < math.inf, "be None or a finite number > 0"),
    "logit_scale": (lambda x: -math.inf < x < math.inf, "be finite"),
    "temperature": (lambda x: 0.0 < x < math.inf, "be a finite number > 0"),
    "z_loss": (lambda x: 0.0 <= x < math.inf, "be a finite number >= 0"),
    "empty_loss": (lambda x: x in ("nan", "zero"), "be 'nan' or 'zero'"),
}


@dataclass(frozen=True)
class LossSpec:
    """Scalar arguments of the loss, checked and converted to Python numbers in the constructor.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the right type and an impossible value.
    """

    reduction: str = "mean"
    ignore_index: int = -100  # None is converted, too
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    z_loss: float = 0.0
    stats: tuple[str, ...] = ()
    empty_loss: str = "nan"

    allowed_stats: ClassVar[tuple[str, ...]] = STATS
    stats_argument: ClassVar[str] = "stats"

    def __post_init__(self) -> None:
        for name, may_be_none in NUMERIC_FIELDS.items():
            value = getattr(self, name)
            if type(value) is not float and not (may_be_none and value is None):
                # PyTorch accepts a bool as `label_smoothing`. It does not have the other fields.
                object.__setattr__(self, name, check_float(name, value, may_be_bool=name == "label_smoothing"))
        if self.ignore_index is None:
            object.__setattr__(self, "ignore_index", -100)
        elif type(self.ignore_index) is not int:
            object.__setattr__(self, "ignore_index", check_int("ignore_index", self.ignore_index))
        for name, (fits, expected) in _EXPECTED.items():
            if not fits(getattr(self, name)):
                raise ValueError(f"{name} must {expected}, got {getattr(self, name)!r}")
        argument, known = self.stats_argument, self.allowed_stats
        if isinstance(self.stats, str) or not isinstance(self.stats, (tuple, list)):
            raise TypeError(f"{argument} must be a tuple of names out of {known}, got {self.stats!r}")
        for name in self.stats:
            if name not in known:
                raise ValueError(f"unknown {argument[:-1]} {name!r}; expected any of {known}")
        object.__setattr__(self, "stats", tuple(self.stats))

    @functools.cached_property
    def scale(self) -> float:
        """Factor of the logits a, bias included: ``z = scale * a``, or, with softcap, ``z = cap * tanh(scale * a)``."""
        return self.logit_scale / (self.temperature if self.softcap is None else self.softcap)

    @property
    def cap(self) -> float:
        """Factor of the tanh with softcap, see `scale`; 1 without softcap."""
        return 1.0 if self.softcap is None else self.softcap / self.temperature

    def transform(self, logits: Tensor, inverse_temperature: Tensor | None = None) -> Tensor:
        """Return z for logits a, (rows, K), bias included. `inverse_temperature`: (rows,)."""
        z = logits * self.scale if self.softcap is None else (logits * self.scale).tanh_() * self.cap
        return z if inverse_temperature is None else z * inverse_temperature[:, None]

    def jacobian(self, z: Tensor, inverse_temperature: Tensor | None = None) -> Tensor | float:
        """Return dz/da for the same rows."""
        jacobian: Tensor | float = self.scale
        if self.softcap is not None:
            bound = self.cap if inverse_temperature is None else self.cap * inverse_temperature[:, None]
            tanh = z / bound
            jacobian = self.scale * self.cap * (1.0 - tanh) * (1.0 + tanh)
        return jacobian if inverse_temperature is None else jacobian * inverse_temperature[:, None]

    def typical_gradient(self, of_cross_entropy: Tensor, of_z_loss: Tensor | float = 0.0) -> Tensor:
        """Return a large but plausible gradient of a logit for factors of the cross entropy and of the z-loss, and a
        log-sum-exp of TYPICAL_LSE."""
        of_logit = abs(self.logit_scale) / self.temperature
        return of_logit * (of_cross_entropy + 2.0 * self.z_loss * TYPICAL_LSE * of_z_loss)


@dataclass(frozen=True)
class LogprobSpec(LossSpec):
    """Scalar arguments of `linear_logprobs` and `linear_divergence`: the results of each token, instead of a loss.

    Gradients are computed for an upstream gradient of each token, as for a loss that is not reduced.
    """

    reduction: str = "none"
    candidates: int = 0
    """Number of candidates of each token."""
    top_k: int = 0
    """Number of most probable classes to return for each token."""
    row_temperature: bool = False
    """True if each token has a separate temperature."""
    divergence: str | None = None
    """Divergence from a teacher, one of DIVERGENCES; None: without a teacher."""
    beta: float = 0.5
    """Weight of the teacher: in the mixture of "jsd", between 0 and 1; 1 for "forward_kl", 0 for "reverse_kl"."""
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0

    allowed_stats: ClassVar[tuple[str, ...]] = OUTPUTS
    stats_argument: ClassVar[str] = "outputs"

    def __post_init__(self) -> None:
        super().__post_init__()
        for number, name in enumerate(self.stats):
            if name in self.stats[:number]:
                raise ValueError(f"outputs has {name!r} twice, got {self.stats}")
        object.__setattr__(self, "top_k", check_int("top_k", self.top_k))
        if not 0 <= self.top_k <= MAX_ENTRIES:
            raise ValueError(f"top_k must be from 0 to {MAX_ENTRIES}, got {self.top_k}")


def loss_spec(**values: Any) -> LossSpec:
    """Return ``LossSpec(**values)``. Equal constants return the same object, which is not checked again."""
    # `torch.compile` cannot trace a cache. A tensor cannot be a key, because its value may change.
    if torch.compiler.is_compiling() or not _CONSTANTS.issuperset(map(type, values.values())):
        return LossSpec(**values)
    try:
        return _cached_spec(**values)
    except TypeError:  # the error of the checks, or a stat that is not hashable
        return LossSpec(**values)


_CONSTANTS = frozenset({str, int, float, bool, tuple, type(None)})
_cached_spec = functools.lru_cache(maxsize=256, typed=True)(LossSpec)  # `typed`: some fields allow 1 but not True


# Numeric fields of `LossSpec`. True: the field may be None.
NUMERIC_FIELDS = {
    name: hint is not float for name, hint in get_type_hints(LossSpec).items() if hint in (float, float | None)
}


class LinearTerm(NamedTuple):
    """Linear term of the logits, ``input @ weight.T``: the head, or an adapter on the head."""

    input: Tensor  # (N, H_k)
    weight: Tensor  # (V, H_k)


class Needs(NamedTuple):
    """Needed gradients, as bools. Other gradients are neither computed nor allocated."""

    inputs: tuple[bool, ...]
    """One bool for each term."""
    weights: tuple[bool, ...]
    """One bool for each term."""
    bias: bool

    @property
    def flat(self) -> tuple[bool, ...]:
        """Inputs, weights, bias: the order of lists of gradients."""
        return (*self.inputs, *self.weights, self.bias)

    @staticmethod
    def from_flat(flat: Sequence[bool]) -> Needs:
        terms = len(flat) // 2
        return Needs(tuple(flat[:terms]), tuple(flat[terms:-1]), flat[-1])

    @property
    def any(self) -> bool:
        return self.bias or True in self.inputs or True in self.weights


@dataclass(frozen=True)
class LinearCrossEntropyProblem:
    """A call as checked, flattened to two dimensions. The logits are the sum of the terms, plus the bias.

    N tokens, V classes; H_k, the hidden size of a term, may differ between terms.
    """

    terms: tuple[LinearTerm, ...]  # the head first
    target: Tensor  # (N,) int64; `shift` is already applied
    linear_bias: Tensor | None  # (V,)
    class_weight: Tensor | None  # (V,)
    token_weight: Tensor | None  # (N,)
    num_items: Tensor | None  # ()
    spec: LossSpec
    needs: Needs
    # Fields below have only defaults that PyTorch 2.11 can trace: no objects.
    options: ChunkOptions
    shift: int = 0
    needs_token_weight: bool = False  # True if the gradient of token_weight is needed
    inverse_temperature: Tensor | None = None  # (N,) multiplies z: 1 / temperature of each token
    shard: Shard | None = None  # classes of weights, bias and their gradients; targets and V refer to all classes
    # The teacher of a divergence, of the same tokens and classes. It gets no gradients.
    teacher_terms: tuple[LinearTerm, ...] = ()
    teacher_bias: Tensor | None = None  # (V,)
    candidates: Tensor | None = None  # (N, K) int64
    # In backward: gradients of weights, by term, to which dW is added. Other dW are new tensors.
    dw_targets: Mapping[int, Tensor] = field(default_factory=dict)
    is_traced: bool = False  # True if the call is part of a graph, which may run with other numbers of tokens

    # Derived fields.
    needs_gradients: bool = field(init=False)
    num_tokens: int = field(init=False)
    local_vocab_size: int = field(init=False)  # number of classes of the weights
    vocab_size: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    accum: torch.dtype = field(init=False)  # `accumulation_dtype`
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        input, weight = self.terms[0]
        for name, value in (
            ("needs_gradients", self.needs.any),
            ("num_tokens", input.shape[0]),
            ("local_vocab_size", weight.shape[0]),
            ("vocab_size", weight.shape[0] if self.shard is None else self.shard.vocab_size),
            ("dtype", input.dtype),
            ("accum", accumulation_dtype(input.dtype)),
            ("device", input.device),
        ):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class CrossEntropyProblem:
    """A call as checked, with logits of all classes, or of the classes of one process."""

    logits: Tensor  # (..., cols)
    target: Tensor  # (N,) int64; `shift` is already applied
    class_weight: Tensor | None  # (V,), all classes
    token_weight: Tensor | None  # (N,)
    num_items: Tensor | None  # ()
    spec: LossSpec
    shard: Shard | None  # None: cols is V
    shift: int = 0
    needs_token_weight: bool = False  # True if the gradient of token_weight is needed

    linear_bias: ClassVar[None] = None
    inverse_temperature: ClassVar[None] = None

    @property
    def num_tokens(self) -> int:
        return len(self.target)

    @property
    def local_vocab_size(self) -> int:
        return self.logits.shape[-1]

    @property
    def vocab_size(self) -> int:
        return self.shard.vocab_size if self.shard else self.logits.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.logits.dtype

    @property
    def accum(self) -> torch.dtype:
        return accumulation_dtype(self.logits.dtype)

    @property
    def device(self) -> torch.device:
        return self.logits.device


@dataclass(frozen=True)
class LinearLogprobsOutput:
    """Results of `flce.linear_logprobs`. Fields that were not requested are None.

    Floating results are float32 (float64 for float64 inputs). Gradients flow through `logprob`, `entropy`, `lse` and
    `candidate_logprob`. At ignored positions floating results are 0, ids are -1 and `correct` is False.
    """

    logprob: Tensor | None = None
    """(...) log-probability of the target."""
    entropy: Tensor | None = None
    """(...) entropy of the predicted distribution, in nats."""
    lse: Tensor | None = None
    """(...) log-sum-exp of the logits."""
    argmax: Tensor | None = None
    """(...) int64 index of the largest logit, the lowest index where several are equal."""
    correct: Tensor | None = None
    """(...) bool: ``argmax == target``."""
    mean_logit: Tensor | None = None
    """(...) mean of the logits."""
    candidate_logprob: Tensor | None = None
    """(..., K) log-probabilities of `candidates`, 0 where a candidate is -1."""
    top_k_logprob: Tensor | None = None
    """(..., top_k) log-probabilities of the most probable classes, in descending order."""
    top_k_ids: Tensor | None = None
    """(..., top_k) int64 indices of the most probable classes."""


@dataclass(frozen=True)
class LinearDivergenceOutput:
    """Results of `flce.linear_divergence`, float32 (float64 for float64 students). Fields that were not requested are
    None. At ignored positions results are 0. Gradients flow through all fields to the student."""

    divergence: Tensor | None = None
    """(...) divergence of the student from the teacher, in nats. It may be below 0 by a rounding error."""
    logprob: Tensor | None = None
    """(...) log-probability of the target under the student."""
    entropy: Tensor | None = None
    """(...) entropy of the student's predicted distribution, in nats."""


class LinearCrossEntropyOutput(NamedTuple):
    """Results of `fused_linear_cross_entropy` and `cross_entropy` with `stats`.

    Fields that were not requested are ``None``. No gradient flows through any field except `loss`. At ignored positions
    `lse`, `logprob` and `entropy` are 0, `argmax` is -1 and `correct` is False.
    """

    loss: Tensor
    """() or, for ``reduction="none"``, the shape of `target`; float32 (float64 for float64 inputs)."""
    z_loss: Tensor | None = None
    """The z-loss, which is part of `loss` and reduced in the same way; None if ``z_loss=0``."""
    lse: Tensor | None = None
    """Log-sum-exp of each token's logits."""
    logprob: Tensor | None = None
    """Log-probability of the target."""
    entropy: Tensor | None = None
    """Entropy of the predicted distribution, in nats."""
    argmax: Tensor | None = None
    """int64 index of the largest logit, the lowest index where several are equal."""
    correct: Tensor | None = None
    """bool: ``argmax == target``."""
