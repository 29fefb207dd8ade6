"""Calls of the linear operators as data: the choice of a plan, and the conversion to arguments of custom operators.

The schema of an operator allows only tensors, scalars and lists of them. `LinearCall.to_arguments` splits a call into
such arguments, `OperatorArguments.to_call` rebuilds the call in the operator.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flce.backends import choose_backend, has_fused_products
from flce.core.devices import device_record
from flce.core.log import find_caller
from flce.core.numbers import specialize
from flce.core.options import ChunkOptions
from flce.core.problem import LinearCrossEntropyProblem, LinearTerm, LossSpec, Needs, accumulation_dtype
from flce.core.shard import Shard
from flce.engine.case import Case
from flce.planning.device_kinds import DescribedDevice
from flce.planning.plan import ChunkPlan
from flce.planning.search import BudgetError, make_plan, plan_for_case, plan_for_shard
from flce.torch_ops import from_json, to_json

ResultT = TypeVar("ResultT")

SCHEMA = (
    "Tensor[] inputs, Tensor[] weights, Tensor target, Tensor? linear_bias, Tensor? class_weight, "
    "Tensor? token_weight, Tensor? num_items, Tensor? inverse_temperature, Tensor? teacher_bias, Tensor? candidates, "
    "str settings"
)


class OperatorArguments(NamedTuple):
    """Arguments of an operator, in the order of `SCHEMA`, or their gradients under the same names. Inputs and weights
    of a teacher follow the inputs and weights of the head."""

    inputs: Any = None
    weights: Any = None
    target: Any = None
    linear_bias: Tensor | None = None
    class_weight: Tensor | None = None
    token_weight: Tensor | None = None
    num_items: Tensor | None = None
    inverse_temperature: Tensor | None = None
    teacher_bias: Tensor | None = None
    candidates: Tensor | None = None
    settings: Any = None
    """JSON of everything that is not a tensor: `LossSpec`, `ChunkOptions` and `_OtherSettings`."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors in one tuple, in the order in which autograd saves them."""
        inputs, weights, *others, _ = self
        return (*inputs, *weights, *others)

    @staticmethod
    def from_tensors(tensors: Sequence[Any], settings: str) -> OperatorArguments:
        """Return the arguments with these `tensors`, as ordered by `tensors()`."""
        others = len(OperatorArguments._fields) - len(("inputs", "weights", "settings"))
        terms = (len(tensors) - others) // 2
        inputs, weights = list(tensors[:terms]), list(tensors[terms : 2 * terms])
        return OperatorArguments._make([inputs, weights, *tensors[2 * terms :], settings])

    @staticmethod
    def place_gradients(
        needs: tuple[bool, ...],
        gradients: Iterable[Tensor] = (),
        token_weight: Tensor | None = None,
        num_teacher_terms: int = 0,
    ) -> tuple[Any, ...]:
        """Return the needed gradients, in the order of `needs` (`Needs.flat`), at the positions of the arguments."""
        remaining, terms = iter(gradients), len(needs) // 2
        *term_grads, bias = [next(remaining, None) if needed else None for needed in needs]
        inputs, weights = ([*grads, *[None] * num_teacher_terms] for grads in (term_grads[:terms], term_grads[terms:]))
        return tuple(OperatorArguments(inputs, weights, linear_bias=bias, token_weight=token_weight))

    def to_call(self, spec: type[LossSpec] = LossSpec) -> LinearCall:
        """Return the call. `spec` is the class of its scalar arguments."""
        loss, options, others = from_json(self.settings, (spec, ChunkOptions, _OtherSettings))
        terms, num_terms = tuple(map(LinearTerm, self.inputs, self.weights)), len(others.needs) // 2
        problem = LinearCrossEntropyProblem(
            terms=terms[:num_terms],
            teacher_terms=terms[num_terms:],
            **{name: getattr(self, name) for name in _FIELDS},
            spec=loss,
            needs=Needs.from_flat(others.needs),
            shift=others.shift,
            token_weight_grad=others.token_weight_grad,
            shard=Shard(*others.shard) if others.shard else None,
        )
        return LinearCall(problem, options, others.is_traced, self.candidates)


# Tensors of the problem.
_FIELDS = OperatorArguments._fields[2:-2]


@dataclass(frozen=True)
class _OtherSettings:
    """Settings of a call that are neither in `LossSpec` nor in `ChunkOptions`."""

    needs: tuple[bool, ...]
    shift: int
    token_weight_grad: bool
    is_traced: bool
    shard: tuple[Any, ...]
    """Fields of `Shard`; empty if the head is not divided."""


@dataclass(frozen=True)
class LinearCall:
    """Problem with its options, and the device for which it is planned."""

    problem: LinearCrossEntropyProblem
    options: ChunkOptions
    is_traced: bool = False
    """True if the call is part of a graph, which may run with other numbers of tokens."""
    candidates: Tensor | None = None
    gpu: DescribedDevice | None = None
    """GPU to plan for, instead of the device of the tensors."""

    def to_arguments(self) -> OperatorArguments:
        p, s = self.problem, self.problem.shard
        shard = (s.group, specialize(s.start), specialize(s.vocab_size), s.sequence_parallel) if s else ()
        others = _OtherSettings(p.needs.flat, p.shift, p.token_weight_grad, self.is_traced, shard)
        return OperatorArguments.from_tensors(self.tensors(), to_json(p.spec, self.options, others))

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors as `OperatorArguments.tensors` does."""
        p = self.problem
        others = [getattr(p, name) for name in _FIELDS]
        terms = (*p.terms, *p.teacher_terms)
        return (*[x for x, _ in terms], *[w for _, w in terms], *others, self.candidates)

    @functools.cached_property
    def case(self) -> Case:
        p, options, gpu = self.problem, self.options, self.gpu
        most_classes, sharding = p.local_vocab_size, None
        if p.shard:
            most_classes, sharding = p.shard.max_local_vocab_size, p.shard.sharding
        teacher_sizes = tuple([w.shape[1] for _, w in p.teacher_terms])
        # Fused products read their operands along rows.
        row_major = all(x.stride(-1) == 1 == w.stride(-1) for x, w in p.terms)
        if self.is_traced and options.strategy == "auto" and p.dtype == torch.float16:
            # With "auto", forward in a graph computes gradients even where the schedule defers them, and would round
            # them to float16 before the upstream gradient is known. So the strategy is fixed.
            options = replace(options, strategy="tokens" if options.max_workspace_bytes is None else "vocab")
        return Case(
            p.num_tokens,
            tuple([w.shape[1] for _, w in p.terms]),
            most_classes,
            p.dtype,
            "cuda" if gpu else p.device.type,
            gpu.backend if gpu else choose_backend(p.device).name,
            row_major and (gpu.has_fused_products if gpu else has_fused_products(p.device)),
            gpu.device if gpu else device_record(p.device),
            p.spec,
            p.needs,
            options,
            sharding,
            (teacher_sizes, p.teacher_terms[0].weight.dtype) if p.teacher_terms else None,
        )

    @property
    def has_forward_gradients(self) -> bool:
        """True if forward computes the gradients; False if backward computes them, or if there are none.

        The number of results of the operator depends on it. Outside of a graph the plan decides. A graph needs the
        value without a plan, for any number of tokens: therefore, with ``strategy="auto"``, forward in a graph always
        computes the gradients, also with a schedule that otherwise defers them.
        """
        c = self.case
        if not c.needs.any or c.spec.reduction == "none":
            return False
        if c.options.strategy != "auto":
            return c.options.strategy == "tokens"
        if self.is_traced:
            return True
        try:
            # Sizes may be symbols of a tracer other than `torch.compile`. The graph of such a tracer has fixed sizes.
            hidden_sizes = tuple(map(int, c.hidden_sizes))
            fixed = replace(c, num_tokens=int(c.num_tokens), hidden_sizes=hidden_sizes, vocab_size=int(c.vocab_size))
            return not plan_for_case(fixed).deferred
        except BudgetError:  # the call itself raises the error
            return True

    def fake_gradients(self, forward: bool = False) -> list[Tensor]:
        """Return empty tensors for the needed gradients of forward or backward, in the order of `Needs.flat`."""
        p = self.problem
        dtypes, accum = self.case.dtypes(deferred=not forward), accumulation_dtype(p.dtype)
        grads = (
            *(term.input.new_empty(term.input.shape, dtype=dtypes.grads) for term in p.terms),
            *(term.weight.new_empty(term.weight.shape, dtype=dtypes.grads) for term in p.terms),
            p.terms[0].weight.new_empty(p.local_vocab_size, dtype=accum),
        )
        return [grad for grad, needed in zip(grads, p.needs.flat, strict=True) if needed]

    def flops(self) -> tuple[int, int]:
        """Return the flops of the products for the logits, and of the products for the needed gradients."""
        needs = self.problem.needs
        term_flops = [2 * term.input.shape[0] * term.weight.numel() for term in self.problem.terms]
        gradient_flops = [
            flops * (dx + dw) for flops, dx, dw in zip(term_flops, needs.inputs, needs.weights, strict=True)
        ]
        teacher_flops = [2 * self.problem.num_tokens * term.weight.numel() for term in self.problem.teacher_terms]
        return sum(term_flops) + sum(teacher_flops), sum(gradient_flops)


def plan_for_problem(call: LinearCall) -> ChunkPlan:
    plan, size = plan_for_case(call.case), call.problem.local_vocab_size
    return plan if size == plan.case.vocab_size else plan_for_shard(plan, size)


def run_plan(run: Callable[[ChunkPlan], ResultT], plan: ChunkPlan) -> ResultT:
    """Call `run` with the plan of a call. If an allocation fails, call it with a smaller plan.

    An allocation error is raised without a second attempt if there is a budget (the user has set the limit), while a
    graph is captured (its memory is separate), and if a head is divided (the other processes continue with the plan).
    """
    limited = plan.case.options.max_workspace_bytes is not None or plan.case.sharding is not None
    while True:
        try:
            return run(plan)
        except torch.OutOfMemoryError:
            capturing = plan.case.device_type == "cuda" and torch.cuda.is_current_stream_capturing()
            smaller = None if limited or capturing else _find_smaller_plan(plan)
            if smaller is None:
                raise
        # Outside of the except clause the frames of the failed attempt, and their tensors, are freed.
        find_caller().warn(
            f"flce could not allocate the {plan.workspace_bytes / 2**20:.0f} MiB of its plan and continues with "
            f"{smaller.workspace_bytes / 2**20:.0f} MiB. To avoid the failed attempt, give options=flce.ChunkOptions("
            f"max_workspace_bytes={smaller.workspace_bytes}).",
            RuntimeWarning,
        )
        plan = smaller


@functools.lru_cache(maxsize=64)
def _find_smaller_plan(plan: ChunkPlan) -> ChunkPlan | None:
    """Return a plan with 1/4, 1/2 or 3/4 of the workspace and the same output shapes, or None if there is none."""
    for quarters in (1, 2, 3):
        options = replace(
            plan.case.options,
            chunk_rows=None,
            max_workspace_bytes=max(1, plan.workspace_bytes * quarters // 4),
            strategy=plan.strategy,  # type: ignore[arg-type]
        )
        with contextlib.suppress(BudgetError):
            smaller = make_plan(replace(plan.case, options=options))
            return smaller if smaller.workspace_bytes < plan.workspace_bytes else None
    return None
