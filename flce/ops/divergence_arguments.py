"""Checks of the arguments of `flce.linear_divergence`. Called by `distillation`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flce.core.numbers import check_float
from flce.core.options import ChunkOptions
from flce.core.problem import DIVERGENCE_RESULTS, DIVERGENCES, LogprobSpec
from flce.ops.arguments import LinearArguments, check_linear_arguments, check_tensors, refuse_rounded_logits
from flce.ops.vocabulary_parallel import ShardedHeadArguments

# Names of arguments in the messages of `check_linear_arguments`, and in the messages of `flce.linear_divergence`.
STUDENT_NAMES = {
    "input": "student",
    "linear_weight": "student_weight",
    "linear_bias": "student_bias",
    "adapters": "student_adapters",
    "linear_logprobs": "linear_divergence",
}
_TEACHER_NAMES = {"input": "teacher", "linear_weight": "teacher_weight", "linear_bias": "teacher_bias"}


@contextlib.contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Replace names of arguments in the messages of errors."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if type(error) not in (TypeError, ValueError, RuntimeError):
            raise  # an error of an allocation or a budget
        message = re.sub(r"\b(" + "|".join(names) + r")\b", lambda match: names[match[0]], str(error))
        raise type(error)(message) from None


def divergence_spec(
    kind: str,
    beta: float | None,
    outputs: Sequence[str],
    temperature: float,
    ignore_index: int,
    softcaps: tuple[float | None, float | None],
    logit_scales: tuple[float, float],
) -> LogprobSpec:
    """Return the checked scalar arguments. Softcaps and scales are of the student and of the teacher."""
    if kind not in DIVERGENCES:
        raise ValueError(f"kind must be one of {DIVERGENCES}, got {kind!r}")
    if beta is not None and kind != "jsd":
        raise ValueError(f"beta needs kind='jsd', got beta={beta!r} with kind={kind!r}")
    weight = 0.5 if beta is None else check_float("beta", beta)
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"beta must be in [0, 1], got {weight}")
    if kind == "jsd" and weight in (0.0, 1.0):
        kind = "reverse_kl" if weight else "forward_kl"
    if isinstance(outputs, str) or not isinstance(outputs, (tuple, list)):
        raise TypeError(f"outputs must be a tuple of names out of {DIVERGENCE_RESULTS}, got {outputs!r}")
    for number, name in enumerate(outputs):
        if name not in DIVERGENCE_RESULTS or name in outputs[:number]:
            raise ValueError(f"outputs must be different names out of {DIVERGENCE_RESULTS}, got {tuple(outputs)}")
    with renamed_errors({"softcap": "student_softcap", "logit_scale": "student_logit_scale"}):
        spec = LogprobSpec(
            ignore_index=ignore_index,
            softcap=softcaps[0],
            logit_scale=logit_scales[0],
            temperature=temperature,
            stats=tuple(name for name in outputs if name != "divergence"),
        )
    with renamed_errors({"softcap": "teacher_softcap", "logit_scale": "teacher_logit_scale"}):
        teacher = LogprobSpec(softcap=softcaps[1], logit_scale=logit_scales[1])
    return replace(
        spec, divergence=kind, beta=weight, teacher_softcap=teacher.softcap, teacher_logit_scale=teacher.logit_scale
    )


def check_divergence_arguments(
    student: tuple[Tensor, Tensor, Tensor | None, Sequence[tuple[Tensor, Tensor]]],
    teacher: tuple[Tensor, Tensor, Tensor | None],
    target: Tensor | None,
    shift: int,
    options: ChunkOptions | None,
    spec: LogprobSpec,
    sharded_head: ShardedHeadArguments,
) -> tuple[LinearArguments, LinearArguments]:
    """Check the tensors and return the arguments of both heads. student: input, weight, bias and adapters; teacher:
    input, weight and bias."""
    teacher = tuple(x.detach() if isinstance(x, Tensor) else x for x in teacher)  # type: ignore[assignment]
    tensors = {"student": student[0], "student_weight": student[1], "target": target, "student_bias": student[2]}
    names = ("teacher", "teacher_weight", "teacher_bias")
    tensors |= dict(zip(names, teacher, strict=True))
    check_tensors(tensors, optional={"target", "student_bias", "teacher_bias"})
    if student[0].shape[:-1] != teacher[0].shape[:-1]:
        raise ValueError(
            "student and teacher must have the same tokens, (..., H) with any H, got "
            f"{tuple(student[0].shape)} and {tuple(teacher[0].shape)}"
        )
    if student[1].shape[:1] != teacher[1].shape[:1]:
        sizes = len(student[1]), len(teacher[1])
        larger = ("student_weight", "teacher_weight")[sizes[1] > sizes[0]]
        raise ValueError(
            f"student_weight and teacher_weight must have the same number of classes V, got {sizes[0]} and {sizes[1]}. "
            f"If the additional classes are padding, give {larger}[:{min(sizes)}]"
        )
    if target is None:
        if "logprob" in spec.stats or shift:
            name = "outputs has 'logprob', which needs" if "logprob" in spec.stats else f"shift={shift} needs"
            raise ValueError(f"{name} a target, got target=None")
        # No result depends on the class. No position is ignored.
        target = torch.zeros(sharded_head.tokens(student[0]), dtype=torch.int64, device=student[0].device)
    refuse_rounded_logits("linear_divergence", options)
    weights = None, None, None
    with renamed_errors(STUDENT_NAMES):
        own = check_linear_arguments(*student[:2], target, *student[2:], *weights, shift, options, spec, sharded_head)
    with renamed_errors(_TEACHER_NAMES):
        other = check_linear_arguments(
            *teacher[:2], target, teacher[2], (), *weights, shift, options, spec, sharded_head
        )
    return own, other
