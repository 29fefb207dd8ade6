"""Arguments of the operators of the linear losses, the choice of their plan, and their fake results and FLOPs.

The schema of an operator allows only tensors, scalars and lists of them. `OperatorArguments.from_problem` splits a
problem into such arguments, `to_problem` rebuilds it in the operator.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flce.backends import choose_backend, has_fused_products
from flce.backends.contract import Samples
from flce.core.devices import device_record
from flce.core.log import find_caller
from flce.core.options import ChunkOptions
from flce.core.problem import LinearCrossEntropyProblem, LinearTerm, LossSpec, Needs
from flce.core.shard import Shard
from flce.engine.case import Case, Dtypes
from flce.planning.plan import ChunkPlan, DescribedDevice
from flce.planning.search import BudgetError, make_plan, plan_for_case
from flce.torch_ops import from_json, to_json

ResultT = TypeVar("ResultT")

SCHEMA = (
    "Tensor[] inputs, Tensor[] weights, Tensor target, Tensor? linear_bias, Tensor? class_weight, "
    "Tensor? token_weight, Tensor? num_items, Tensor? inverse_temperature, Tensor? teacher_bias, Tensor? candidates, "
    "str constants"
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
    constants: Any = None
    """JSON of everything that is not a tensor."""

    @staticmethod
    def from_tensors(tensors: Sequence[Any], constants: str) -> OperatorArguments:
        """Return the arguments with these `tensors`, as ordered by `problem_tensors`."""
        others = len(OperatorArguments._fields) - len(("inputs", "weights", "constants"))
        terms = (len(tensors) - others) // 2
        inputs, weights = list(tensors[:terms]), list(tensors[terms : 2 * terms])
        return OperatorArguments._make([inputs, weights, *tensors[2 * terms :], constants])

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

    @staticmethod
    def from_problem(p: LinearCrossEntropyProblem) -> OperatorArguments:
        others = {name: getattr(p, name) for name in ("shift", "needs_token_weight", "is_traced")}
        constants = to_json({**others, "needs": p.needs.flat}, spec=p.spec, options=p.options, shard=p.shard)
        return OperatorArguments.from_tensors(problem_tensors(p), constants)

    def to_problem(self, spec: Any = LossSpec) -> LinearCrossEntropyProblem:
        """Return the problem. `spec` is the class of its scalar arguments."""
        constants = from_json(self.constants, spec=spec, options=ChunkOptions, shard=Shard)
        terms, needs = tuple(map(LinearTerm, self.inputs, self.weights)), Needs.from_flat(constants["needs"])
        num_terms = len(needs.inputs)
        return LinearCrossEntropyProblem(
            terms=terms[:num_terms],
            teacher_terms=terms[num_terms:],
            **{name: getattr(self, name) for name in _FIELDS},
            **{**constants, "needs": needs},
        )


def on_problem(
    function: Callable[..., ResultT], num_leading: int = 0, spec: type[LossSpec] = LossSpec
) -> Callable[..., ResultT]:
    """Return `function`, whose last argument is a problem, for the arguments of an operator: `num_leading` tensors and
    the arguments of `SCHEMA`."""

    def run(*args: Any, **kwargs: Any) -> ResultT:
        problem = OperatorArguments(*args[num_leading:]).to_problem(spec)
        return function(*args[:num_leading], problem, **kwargs)

    return run


# Other tensors of the problem.
_FIELDS = OperatorArguments._fields[2:-1]


def problem_tensors(p: LinearCrossEntropyProblem) -> tuple[Tensor | None, ...]:
    """Return all tensors of a problem in one tuple, in the order in which autograd saves them."""
    terms, others = (*p.terms, *p.teacher_terms), [getattr(p, name) for name in _FIELDS]
    return (*[x for x, _ in terms], *[w for _, w in terms], *others)


def as_saved(rows: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> tuple[Any, list[Any]]:
    """Return `rows` and the vectors of `problem_tensors` contiguous, as they were saved: a hook on saved tensors may
    have returned other strides."""
    rows, vectors = ([None if t is None else t.contiguous() for t in each] for each in (rows, tensors[-len(_FIELDS) :]))
    return rows, [*tensors[: -len(_FIELDS)], *vectors]


def make_case(p: LinearCrossEntropyProblem, gpu: DescribedDevice | None = None) -> Case:
    """Return the case of a call. `gpu`: GPU to plan for, instead of the device of the tensors."""
    options, most_classes, num_processes = p.options, p.local_vocab_size, None
    if p.shard:
        most_classes, num_processes = p.shard.max_local_vocab_size, p.shard.process_group.size()
    # Fused products read their operands along rows.
    row_major = all(x.stride(-1) == 1 == w.stride(-1) for x, w in p.terms)
    if p.is_traced and options.strategy == "auto" and p.dtype == torch.float16 and p.spec.reduction != "none":
        # With "auto", forward in a graph computes gradients even where the schedule defers them, and would round
        # them to float16 before the upstream gradient is known. So the strategy is fixed.
        options = replace(options, strategy="tokens" if options.max_workspace_bytes is None else "vocab")
    teacher_sizes = tuple([w.shape[1] for _, w in p.teacher_terms])
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
        num_processes,
        (teacher_sizes, p.teacher_terms[0].weight.dtype) if p.teacher_terms else None,
    )


def is_deferred(c: Case, is_traced: bool) -> bool:
    """Return True if backward computes the gradients; False if forward computes them.

    The number of results of the operator depends on it. Outside of a graph the plan decides. A graph needs the value
    without a plan, for any number of tokens: therefore, with ``strategy="auto"``, forward in a graph always computes
    the gradients, also with a schedule that otherwise defers them.
    """
    if not c.needs.any:
        return False
    if c.must_defer or c.samples:
        return True
    if c.options.strategy != "auto":
        return c.options.strategy == "vocab"
    if is_traced:
        return False
    try:
        # Sizes may be symbols of a tracer other than `torch.compile`. The graph of such a tracer has fixed sizes.
        hidden_sizes = tuple(map(int, c.hidden_sizes))
        fixed = replace(c, num_tokens=int(c.num_tokens), hidden_sizes=hidden_sizes, vocab_size=int(c.vocab_size))
        return plan_for_case(fixed).deferred
    except BudgetError:  # the call itself raises the error
        return False


def fake_gradients(p: LinearCrossEntropyProblem, dtypes: Dtypes) -> list[Tensor]:
    """Return empty tensors for the needed gradients, in the order of `Needs.flat`. `dtypes`: of the schedule."""
    grads = (
        *(term.input.new_empty(term.input.shape, dtype=dtypes.grads) for term in p.terms),
        *(term.weight.new_empty(term.weight.shape, dtype=dtypes.grads) for term in p.terms),
        p.terms[0].weight.new_empty(p.local_vocab_size, dtype=p.accum),
    )
    return [grad for grad, needed in zip(grads, p.needs.flat, strict=True) if needed]


def fake_deferred_gradients(p: LinearCrossEntropyProblem) -> list[Tensor]:
    """Return empty tensors for the needed gradients that backward computes."""
    return fake_gradients(p, make_case(p).dtypes(deferred=True))


def pack_samples(p: LinearCrossEntropyProblem, samples: Tensor | None) -> Tensor:
    """Return the samples of forward as an operator returns them, (0,) if there are none. In a graph the shape does not
    depend on the plan: if the plan does not sample, they have no values."""
    if samples is not None:
        return samples
    # Not a product with a bool: PyTorch 2.11 cannot multiply a symbol by it.
    size = sum(Samples.sizes(p.num_tokens, p.local_vocab_size)) if p.is_traced and make_case(p).samples else 0
    return p.target.new_empty(size, dtype=torch.int32)


def count_flops(p: LinearCrossEntropyProblem) -> tuple[int, int]:
    """Return the flops of the products for the logits, and of the products for the needed gradients."""
    term_flops = [2 * x.shape[0] * w.numel() for x, w in p.terms]
    gradient_flops = [n * (dx + dw) for n, dx, dw in zip(term_flops, p.needs.inputs, p.needs.weights, strict=True)]
    teacher_flops = [2 * p.num_tokens * term.weight.numel() for term in p.teacher_terms]
    return sum(term_flops) + sum(teacher_flops), sum(gradient_flops)


def plan_for_problem(p: LinearCrossEntropyProblem) -> ChunkPlan:
    return plan_for_case(make_case(p))


def run_plan(run: Callable[[ChunkPlan], ResultT], plan: ChunkPlan, can_repeat: bool = True) -> ResultT:
    """Call `run` with the plan of a call. If an allocation fails, call it with a smaller plan.

    An allocation error is raised without a second attempt if there is a budget (the user has set the limit), while a
    graph is captured (its memory is separate), if a head is divided (the other processes continue with the plan), and
    if not `can_repeat`: dW of some blocks was added to a gradient.
    """
    limited = not can_repeat or plan.case.options.max_workspace_bytes is not None or plan.case.num_processes is not None
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
