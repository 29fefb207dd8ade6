"""Problems and shares of processes that have one head.

Each process has some of the classes. All processes have the same tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flce
from flce.core.shard import all_gather, shard_bounds
from flce.engine import case
from flce.ops import linear_cross_entropy
from flce.planning import search
from flce.testing.problem import Problem, make_problem, relative_error, run_oracle
from tests import quick_interpreter
from tests.helpers import STATS
from tests.hopper import logits_dtypes_on_a_gpu, plan_as_on_hopper
from tests.interpreted_bfloat16 import fix_interpreter

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.2, "class_weight": True, "z_loss": 0.1},
    "none": {"reduction": "none", "token_weight": True, "ignored": 0.3, "softcap": 3.0, "label_smoothing": 0.1},
    "sum": {"reduction": "sum", "num_items": 7, "ignore_index": 3, "ignored": 0.2, "shift": 1, "bias": True},
    "mean": {"token_weight": True, "class_weight": True, "z_loss": 0.1, "ignored": 0.3, "adapter_ranks": (3, 2)},
    "softcap": {"softcap": 3.0, "logit_scale": 0.5, "temperature": 0.7, "bias": True},
    "all ignored": {"ignored": 1.0, "z_loss": 0.1, "empty_loss": "zero"},
}


@functools.cache
def groups() -> dict[str, Any]:
    """Return the group of all processes, and the pair of this process. The timeout is 60 seconds."""
    count, timeout = dist.get_world_size(), timedelta(seconds=60)
    full = {"all": dist.new_group(range(count), timeout=timeout)}
    pairs = [dist.new_group([k, k + 1], timeout=timeout) for k in range(0, count, 2)]
    return {**full, "pair": pairs[dist.get_rank() // 2]}


@functools.cache
def device() -> torch.device:
    """Return the device of this process. If processes share a GPU, wrap gloo's collectives, which need CPU tensors."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if dist.get_backend() == "gloo":
        for name in ("all_gather_into_tensor", "all_gather_single", "all_reduce", "reduce_scatter_tensor"):
            if hasattr(dist, name):
                setattr(dist, name, _via_cpu(getattr(dist, name)))
    return torch.device("cuda", dist.get_rank() % torch.cuda.device_count())


class FinishedWork:
    def wait(self) -> None:
        pass


def _via_cpu(collective: Any) -> Any:
    """Wrap a collective whose first tensor is the output: it runs on copies in CPU memory."""

    @functools.wraps(collective)
    def run_on_cpu(out: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        on_cpu = [out.cpu(), *(t.cpu() if isinstance(t, Tensor) else t for t in args)]
        collective(*on_cpu, **kwargs)
        out.copy_(on_cpu[0])
        return FinishedWork() if async_op else None

    return run_on_cpu


class LocalShare:
    """The tensors of a problem that this process has, as leaves."""

    def __init__(self, p: Problem, group: Any, sequence_parallel: bool = False, slices: bool = False) -> None:
        self.p, self.group, self.sequence_parallel = p, group, sequence_parallel
        weight = p.linear_weight
        self.vocab_size = len(weight)
        self.classes = slice(*shard_bounds(self.vocab_size, group.size(), group.rank()))
        self.input = self.leaf(self.tokens(p.input))
        self.weight = self.leaf(weight[self.classes])
        self.bias = None if p.linear_bias is None else self.leaf(p.linear_bias[self.classes])
        self.adapters = [(self.leaf(self.tokens(a)), self.leaf(b[self.classes])) for a, b in p.adapters]
        self.kwargs = dict(p.kwargs)
        if slices and "weight" in self.kwargs:
            self.kwargs["weight"] = self.kwargs["weight"][self.classes]
        if "token_weight" in self.kwargs:
            self.kwargs["token_weight"] = self.leaf(self.kwargs["token_weight"])

    @staticmethod
    def leaf(t: Tensor) -> Tensor:
        return t.detach().clone().requires_grad_()

    def tokens(self, x: Tensor) -> Tensor:
        """Return the tokens of this process."""
        if not self.sequence_parallel:
            return x
        return x.chunk(self.group.size(), dim=-2)[self.group.rank()]

    @property
    def group_arguments(self) -> dict[str, Any]:
        return {"process_group": self.group, "vocab_size": self.vocab_size, "sequence_parallel": self.sequence_parallel}

    def loss(self, **kwargs: Any) -> Any:
        return flce.fused_linear_cross_entropy(
            self.input,
            self.weight,
            self.p.target,
            linear_bias=self.bias,
            adapters=self.adapters,
            **self.kwargs,
            **self.group_arguments,
            **kwargs,
        )

    def errors(self, expected: Any) -> dict[str, float]:
        """Return the errors of the gradients, relative to the gradients of all classes and tokens."""

        def relative(got: Tensor | None, local: Tensor, full: Tensor) -> float:
            assert got is not None
            return float((got.double() - local).norm() / full.norm().clamp(min=1e-6))

        dx, dw = expected.grad_input, expected.grad_weight
        errors = {"dX": relative(self.input.grad, self.tokens(dx), dx)}
        if len(self.weight):
            errors["dW"] = relative(self.weight.grad, dw[self.classes], dw)
        if self.bias is not None and expected.grad_bias is not None and len(self.bias):
            errors["bias"] = relative(self.bias.grad, expected.grad_bias[self.classes], expected.grad_bias)
        for k, ((a, b), (da, db)) in enumerate(zip(self.adapters, expected.grad_adapters, strict=True)):
            errors[f"a{k}"] = relative(a.grad, self.tokens(da), da)
            if len(b):
                errors[f"B{k}"] = relative(b.grad, db[self.classes], db)
        if expected.grad_token_weight is not None:
            gradient = expected.grad_token_weight
            errors["token_weight"] = relative(self.kwargs["token_weight"].grad, gradient, gradient)
        return errors


def problem(*sizes: Any, **kwargs: Any) -> Problem:
    return make_problem(*sizes, device=device(), **kwargs)


def upstream_gradient(p: Problem) -> Tensor:
    each = torch.linspace(0.5, 2.0, p.target.numel(), dtype=torch.float64, device=device()).view(p.target.shape)
    return each if p.kwargs.get("reduction") == "none" else each.mean()


def check(
    p: Problem, group: Any, limit: float, options: dict[str, Any], result_limit: float = 1e-9, **settings: Any
) -> list[Tensor]:
    """Compare the loss, statistics and gradients of a call with the float64 oracle.

    Return the tensors that must be equal bit for bit in all processes.
    """
    local, upstream = LocalShare(p, group, **settings), upstream_gradient(p)
    stats = options.pop("stats", STATS)
    out = local.loss(stats=stats, options=flce.ChunkOptions(**options))
    out.loss.backward(upstream.to(out.loss.dtype))
    full_problem = p.map(lambda t, letter: LocalShare.leaf(t) if letter == "t" else t)
    expected = run_oracle(full_problem, grad_output=upstream)
    errors = local.errors(expected)
    for name in ("loss", *stats):
        errors[name] = relative_error(getattr(out, name), getattr(expected, name))
    wrong = {k: v for k, v in errors.items() if not v <= (limit if k[0] in "daBbt" else result_limit)}
    assert not wrong, f"{wrong}, {options}, {settings}, {p.kwargs}"
    return [out.loss.detach(), *(getattr(out, name) for name in stats)]


def assert_equal_on_all_ranks(values: list[Tensor], group: Any) -> None:
    for value in values:
        for other in all_gather(value.contiguous(), group):
            assert torch.equal(value, other) or bool(value.isnan().any())


def padded(p: Problem, classes: int) -> Problem:
    """Return the problem with a bias of -inf on the last classes, like a padded vocabulary, and other targets."""
    assert p.linear_bias is not None
    first = len(p.linear_weight) - classes
    bias = torch.where(torch.arange(len(p.linear_bias), device=p.target.device) < first, p.linear_bias, -torch.inf)
    ignored = p.kwargs.get("ignore_index", -100)
    return replace(p, linear_bias=bias, target=torch.where(p.target == ignored, ignored, p.target % first))


def uneven(p: Problem) -> Problem:
    """Return the problem with extreme rows: targets of probability near 1 or 0, very large logits, and first classes
    without probability."""
    x, weight, n = p.input.clone(), p.linear_weight.clone(), len(p.target)
    x[:, :n], weight[:, :n] = torch.eye(n, dtype=x.dtype, device=x.device), 0.0
    weight[p.target[0], 0] = weight[p.target[1], 1] = 60.0
    weight[p.target[2], 2] = weight[p.target[3], 3] = -60.0
    weight[:140, 4], weight[:, 5] = -200.0, 16.0
    return replace(p, input=x, linear_weight=weight)


def grad_of(t: Tensor) -> Tensor:
    assert t.grad is not None
    return t.grad


@contextlib.contextmanager
def as_on_a_gpu(hopper: bool) -> Iterator[list[flce.ChunkPlan]]:
    """Run kernels in the interpreter with the dtypes of a GPU. Yield the list of plans that run."""
    quick_interpreter.speed_up_interpreter()
    plans: list[flce.ChunkPlan] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLCE_BACKEND", "triton")
        fix_interpreter(patch)
        hopper_plans = plan_as_on_hopper(patch) if hopper else iter((None,))
        next(hopper_plans)
        patch.setattr(case, "logits_dtypes", logits_dtypes_on_a_gpu)
        search.plan_for_case.cache_clear()
        plan_for_problem = vars(linear_cross_entropy)["plan_for_problem"]

        def record_plan(*args: Any) -> Any:
            plans.append(plan_for_problem(*args))
            return plans[-1]

        patch.setattr(linear_cross_entropy, "plan_for_problem", record_plan)
        yield plans
        next(hopper_plans, None)
    search.plan_for_case.cache_clear()


LIMIT = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
