"""A call of the linear operators as data: how it is planned, and the arguments that an operator of PyTorch gets for it.

An operator's schema takes tensors, scalars and lists of them only: `LinearCall.to_arguments` takes a call apart,
`OperatorArguments.to_call` puts it together again on the other side.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flce.backends import choose_backend, has_product
from flce.core.callers import find_caller
from flce.core.devices import device_record
from flce.core.numbers import specialize
from flce.core.options import ChunkOptions
from flce.core.problem import LinearCrossEntropyProblem, LinearTerm, LossSpec, Needs, accumulation_dtype
from flce.core.shard import Shard
from flce.engine.case import Case
from flce.planning.device_kinds import DescribedDevice
from flce.planning.plan import ChunkPlan
from flce.planning.search import make_plan, plan_for_case, plan_for_shard
from flce.torch_ops.registration import from_json, to_json

ResultT = TypeVar("ResultT")

SCHEMA = (
    "Tensor[] inputs, Tensor[] weights, Tensor target, Tensor? linear_bias, Tensor? class_weight, "
    "Tensor? token_weight, Tensor? num_items, Tensor? row_factor, Tensor? candidates, str settings"
)


class OperatorArguments(NamedTuple):
    """The arguments of an operator, in the order of `SCHEMA`; or, by the same names, their gradients."""

    inputs: Any = None
    weights: Any = None
    target: Any = None
    linear_bias: Tensor | None = None
    class_weight: Tensor | None = None
    token_weight: Tensor | None = None
    num_items: Tensor | None = None
    row_factor: Tensor | None = None
    candidates: Tensor | None = None
    settings: Any = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All in one list, as autograd saves them."""
        inputs, weights, *others, _ = self
        return (*inputs, *weights, *others)

    @staticmethod
    def from_tensors(tensors: Sequence[Any], settings: str) -> OperatorArguments:
        """Those with these `tensors`."""
        terms = (len(tensors) - len(OperatorArguments._fields) + 3) // 2
        return OperatorArguments._make(
            [list(tensors[:terms]), list(tensors[terms : 2 * terms]), *tensors[2 * terms :], settings]
        )

    @staticmethod
    def place_gradients(
        needs: tuple[bool, ...], gradients: Iterable[Tensor] = (), token_weight: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Gradients in the places of the arguments. `needs`: `Needs.flat`; `gradients`: those that are needed, or
        none."""
        each, terms = iter(gradients), len(needs) // 2
        *of_terms, bias = [next(each, None) if needed else None for needed in needs]
        return tuple(OperatorArguments(of_terms[:terms], of_terms[terms:], linear_bias=bias, token_weight=token_weight))

    def to_call(self, spec: type[LossSpec] = LossSpec) -> LinearCall:
        """The call, whose scalar arguments are of this class."""
        loss, options, constants = from_json(self.settings, (spec, ChunkOptions, _CallConstants))
        problem = LinearCrossEntropyProblem(
            terms=tuple(map(LinearTerm, self.inputs, self.weights)),
            **{name: getattr(self, name) for name in _VECTORS},
            spec=loss,
            needs=Needs.from_flat(constants.needs),
            shift=constants.shift,
            token_weight_grad=constants.token_weight_grad,
            shard=Shard(*constants.shard) if constants.shard else None,
        )
        return LinearCall(problem, options, constants.is_traced, self.candidates)


_VECTORS = "target", "linear_bias", "class_weight", "token_weight", "num_items", "row_factor"


@dataclass(frozen=True)
class _CallConstants:
    """Those of a call beside `LossSpec` and `ChunkOptions`."""

    needs: tuple[bool, ...]
    shift: int
    token_weight_grad: bool
    is_traced: bool
    shard: tuple[Any, ...]
    """Fields of `Shard`, or none."""


@dataclass(frozen=True)
class LinearCall:
    """A problem and how it is solved."""

    problem: LinearCrossEntropyProblem
    options: ChunkOptions
    is_traced: bool = False
    """Whether it is part of a graph, which is good for other numbers of tokens too."""
    candidates: Tensor | None = None
    gpu: DescribedDevice | None = None
    """What it is planned for, in the place of the device of its tensors."""

    def to_arguments(self) -> OperatorArguments:
        p, s = self.problem, self.problem.shard
        shard = (s.group, specialize(s.start), specialize(s.vocab_size), s.sequence_parallel) if s else ()
        constants = _CallConstants(p.needs.flat, p.shift, p.token_weight_grad, self.is_traced, shard)
        return OperatorArguments.from_tensors(self.tensors(), to_json(p.spec, self.options, constants))

    def tensors(self) -> tuple[Tensor | None, ...]:
        """As `OperatorArguments.tensors`."""
        p = self.problem
        optional = p.linear_bias, p.class_weight, p.token_weight, p.num_items, p.row_factor, self.candidates
        return (*[x for x, _ in p.terms], *[w for _, w in p.terms], p.target, *optional)

    @functools.cached_property
    def case(self) -> Case:
        p, options, gpu = self.problem, self.options, self.gpu
        most_classes, split = (p.shard.max_local_vocab_size, p.shard.split) if p.shard else (p.local_vocab_size, None)
        # Kernels beside products with an epilogue go along rows.
        row_major = all(x.stride(-1) == 1 == w.stride(-1) for x, w in p.terms)
        if self.is_traced and options.strategy == "auto" and p.dtype == torch.float16:
            # See `has_forward_gradients`. Gradients in float16 are to be rounded when the upstream gradient is known.
            options = replace(options, strategy="tokens" if options.max_workspace_bytes is None else "vocab")
        return Case(
            p.num_tokens,
            tuple([w.shape[1] for _, w in p.terms]),
            most_classes,
            p.dtype,
            "cuda" if gpu else p.device.type,
            gpu.backend if gpu else choose_backend(p.device).name,
            row_major and (gpu.has_product if gpu else has_product(p.device)),
            gpu.device if gpu else device_record(p.device),
            p.spec,
            p.needs,
            options,
            split,
        )

    @property
    def has_forward_gradients(self) -> bool:
        """Whether gradients are among the results of forward.

        A graph must know that without a plan, for any number of tokens. So with ``strategy="auto"`` forward makes them
        in any case there, also by a schedule that would leave them to backward.
        """
        c = self.case
        if not c.needs.any or c.spec.reduction == "none" or c.options.strategy != "auto":
            return c.needs.any and c.spec.reduction != "none" and c.options.strategy == "tokens"
        if self.is_traced:
            return True
        try:
            # Sizes may be symbols of another tracer than `torch.compile`. Its graph is for these sizes alone.
            sizes = int(c.num_tokens), tuple(map(int, c.hidden_sizes)), int(c.vocab_size)
            number, hidden, vocab = sizes
            return not plan_for_case(replace(c, num_tokens=number, hidden_sizes=hidden, vocab_size=vocab)).deferred
        except ValueError:  # no plan keeps the budget, as a call says
            return True

    def fake_gradients(self, forward: bool = False) -> list[Tensor]:
        """What the gradients look like that are needed, in the order of `Needs.flat`: as forward, or as backward makes
        them."""
        p = self.problem
        dtypes, accum = self.case.dtypes(deferred=not forward), accumulation_dtype(p.dtype)
        grads = (
            *(term.input.new_empty(term.input.shape, dtype=dtypes.input_grad) for term in p.terms),
            *(term.weight.new_empty(term.weight.shape, dtype=dtypes.weight_grad) for term in p.terms),
            p.terms[0].weight.new_empty(p.local_vocab_size, dtype=accum),
        )
        return [grad for grad, needed in zip(grads, p.needs.flat, strict=True) if needed]

    def flops(self) -> tuple[int, int]:
        """Flops of the products for the logits, and of those for the gradients that are needed."""
        needs = self.problem.needs
        of_terms = [2 * term.input.shape[0] * term.weight.numel() for term in self.problem.terms]
        wanted = zip(of_terms * 2, needs.inputs + needs.weights, strict=True)
        return sum(of_terms), sum(count for count, needed in wanted if needed)


def plan_for_problem(call: LinearCall) -> ChunkPlan:
    """The plan of a call."""
    plan, size = plan_for_case(call.case), call.problem.local_vocab_size
    return plan if size == plan.case.vocab_size else plan_for_shard(plan, size)


def run_plan(run: Callable[[ChunkPlan], ResultT], plan: ChunkPlan) -> ResultT:
    """`run` with the plan of a call; where its memory cannot be had, with a smaller one.

    Not with a budget, which says how much there is, nor while a graph is captured, whose memory is its own, nor where
    other processes go on with the plan.
    """
    limited = plan.case.options.max_workspace_bytes is not None or plan.case.split is not None
    while True:
        try:
            return run(plan)
        except torch.OutOfMemoryError:
            capturing = plan.case.device_type == "cuda" and torch.cuda.is_current_stream_capturing()
            smaller = None if limited or capturing else _find_smaller_plan(plan)
            if smaller is None:
                raise
        # Here, where the frames of the attempt are gone, and their tensors with them.
        find_caller().warn(
            f"flce could not have the {plan.workspace_bytes / 2**20:.0f} MiB of its plan, and goes on with "
            f"{smaller.workspace_bytes / 2**20:.0f} MiB. To save the attempt, give options=flce.ChunkOptions("
            f"max_workspace_bytes={smaller.workspace_bytes}).",
            RuntimeWarning,
        )
        plan = smaller


@functools.lru_cache(maxsize=64)
def _find_smaller_plan(plan: ChunkPlan) -> ChunkPlan | None:
    """A plan of a quarter of the workspace, or a half or more, with outputs that look the same; None: there is none."""
    for quarters in (1, 2, 3):
        options = replace(
            plan.case.options,
            chunk_rows=None,
            max_workspace_bytes=max(1, plan.workspace_bytes * quarters // 4),
            strategy=plan.strategy,  # type: ignore[arg-type]
        )
        with contextlib.suppress(ValueError):
            smaller = make_plan(replace(plan.case, options=options))
            return smaller if smaller.workspace_bytes < plan.workspace_bytes else None
    return None
