"""Divergences of a student from a teacher: `linear_divergence`, and `topk_kl` of stored log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flce.backends.contract import LEAST_LOGPROB
from flce.core.numbers import check_bool
from flce.core.options import ChunkOptions
from flce.core.problem import DIVERGENCE_RESULTS, LinearDivergenceOutput, LogprobSpec
from flce.functional import DEFAULT_OPTIONS, linear_logprobs, make_linear_problem
from flce.ops.arguments import check_tensors, shift_target
from flce.ops.divergence_arguments import (
    STUDENT_NAMES,
    check_divergence_arguments,
    divergence_spec,
    renamed_errors,
)
from flce.ops.linear_logprobs import linear_logprobs as run_linear_logprobs
from flce.ops.vocabulary_parallel import ShardedHeadArguments


def linear_divergence(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    kind: str = "forward_kl",
    beta: float | None = None,
    temperature: float = 1.0,
    target: Tensor | None = None,
    ignore_index: int | None = -100,
    shift: int = 0,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_adapters: Sequence[tuple[Tensor, Tensor]] = (),
    teacher_topk: tuple[Tensor, Tensor] | None = None,
    outputs: Sequence[str] = ("divergence",),
    options: ChunkOptions | None = None,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
) -> LinearDivergenceOutput:
    """Compute the divergence of each token between the predicted distributions of a student and a teacher.

    Neither the logits of the student nor the logits of the teacher are stored in memory. With p and q the probabilities
    of the student and the teacher over all classes, and m = (1 - beta) p + beta q:

        forward_kl = sum of q log(q / p)        reverse_kl = sum of p log(p / q)
        jsd = beta * sum of q log(q / m) + (1 - beta) * sum of p log(p / m)

    Logits are never rounded below float32, because p - q cancels as the student learns. The results are differentiable
    in `student`, `student_weight`, `student_bias` and `student_adapters`. The teacher gets no gradient, even if its
    tensors require one. A call runs six matrix products, forward and backward together; "jsd" runs eight.

    Args:
        student: (..., H) hidden states of the student; float16, bfloat16, float32 or float64.
        student_weight: (V, H) weight of the student's head, in the dtype of `student`. Autocast applies as to
            `torch.nn.functional.linear`.
        teacher: (..., H_t) hidden states of the teacher, of the same tokens. H_t and the dtype may differ from the
            student's.
        teacher_weight: (V, H_t) weight of the teacher's head, in the dtype of `teacher`. The classes are the classes of
            `student_weight`.
        kind: the divergence.
        beta: weight of the teacher in the mixture of "jsd", from 0 to 1; None: 0.5. As in TRL, 0 is "forward_kl", and 1
            is "reverse_kl".
        temperature: divides the logits of student and teacher after softcap, > 0. The divergence is not multiplied by
            ``temperature**2``.
        target: (...) class indices, int64 or int32. Positions equal to `ignore_index` have no results and no gradients.
            None: all positions count.
        ignore_index, shift: as in `linear_logprobs`.
        student_bias, teacher_bias: (V,) biases of the heads.
        student_softcap, teacher_softcap, student_logit_scale, teacher_logit_scale, student_adapters: as `softcap`,
            `logit_scale` and `adapters` in `fused_linear_cross_entropy`.
        teacher_topk: class indices and log-probabilities of the teacher's most probable classes, (..., K) each, instead
            of `teacher` and `teacher_weight`. All other classes count as one more class, whose probability is the
            rest. -1 and -inf are an empty entry. `temperature` divides only the student's logits. Not supported with
            `teacher_bias`, `teacher_softcap` and `teacher_logit_scale`.
        outputs: any of "divergence", "logprob" (needs `target`) and "entropy". The last two are of the student.
        options: as in `linear_logprobs`.
        process_group, vocab_size, sequence_parallel: as in `linear_logprobs`. Each process has a slice of the classes
            of both heads. With `sequence_parallel`, `student` and `teacher` are the shares of this process.

    Returns:
        A `LinearDivergenceOutput` with results of shape (...).

    Raises:
        TypeError, IndexError, RuntimeError: as `linear_logprobs`.
        ValueError: as `linear_logprobs`; also if the heads have different numbers of classes, student and teacher have
            different tokens, `kind` is unknown, `beta` is given for another kind than "jsd", or neither or both of a
            teacher and `teacher_topk` are given.

    Examples:
        >>> h, W = torch.randn(2, 6, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
        >>> teacher, teacher_W = torch.randn(2, 6, 32), torch.randn(100, 32)
        >>> linear_divergence(h, W, teacher, teacher_W, kind="jsd", beta=0.1).divergence.mean().backward()
    """
    ignore_index = -100 if ignore_index is None or target is None else ignore_index
    softcaps, scales = (student_softcap, teacher_softcap), (student_logit_scale, teacher_logit_scale)
    spec = divergence_spec(kind, beta, outputs, temperature, ignore_index, softcaps, scales)
    if (teacher is None) == (teacher_topk is None) or (teacher is None) != (teacher_weight is None):
        given = {"teacher": teacher, "teacher_weight": teacher_weight, "teacher_topk": teacher_topk}
        names = [name for name, value in given.items() if value is not None]
        raise ValueError(
            f"give either teacher and teacher_weight, or teacher_topk, got {' and '.join(names) or 'none'}"
        )
    sharded_head = ShardedHeadArguments(process_group, vocab_size, sequence_parallel)
    if teacher_topk is not None:
        if teacher_bias is not None or teacher_softcap is not None or teacher_logit_scale != 1.0:
            raise ValueError("teacher_topk replaces the teacher's head: give no bias, softcap or scale of the teacher")
        if not isinstance(teacher_topk, (tuple, list)) or len(teacher_topk) != 2:
            raise TypeError(f"teacher_topk must be a pair of tensors, got {type(teacher_topk).__name__}")
        with renamed_errors(STUDENT_NAMES | {"candidates": "teacher_topk"}):
            out = linear_logprobs(
                student, student_weight, target, candidates=teacher_topk[0], outputs=spec.stats,
                linear_bias=student_bias, adapters=student_adapters, temperature=temperature, softcap=student_softcap,
                logit_scale=student_logit_scale, ignore_index=ignore_index, shift=shift, options=options,
                process_group=process_group, vocab_size=vocab_size, sequence_parallel=sequence_parallel,
            )  # fmt: skip
        divergence = None
        if "divergence" in outputs:
            divergence = _topk_divergence(out.candidate_logprob, teacher_topk, spec)
            if target is not None:
                divergence = divergence.where(shift_target(target, shift, ignore_index) != ignore_index, 0.0)
        return LinearDivergenceOutput(divergence, out.logprob, out.entropy)
    assert teacher is not None
    assert teacher_weight is not None
    own, other = check_divergence_arguments(
        (student, student_weight, student_bias, student_adapters), (teacher, teacher_weight, teacher_bias), target,
        shift, options, spec, sharded_head,
    )  # fmt: skip
    if "divergence" not in outputs:
        spec = replace(spec, divergence=None)
    problem = make_linear_problem(own, spec)
    if spec.divergence is not None:
        problem = replace(
            problem,
            teacher=other.input.reshape(-1, other.input.shape[-1]),
            teacher_weight=other.linear_weight,
            teacher_bias=None if other.linear_bias is None else other.linear_bias.contiguous(),
        )
    results = run_linear_logprobs(problem, None, options or DEFAULT_OPTIONS)
    values = (results[name] for name in DIVERGENCE_RESULTS)
    return LinearDivergenceOutput(*(None if x is None else x.reshape(own.input.shape[:-1]) for x in values))


def _topk_divergence(
    candidate_logprob: Tensor | None, teacher_topk: tuple[Tensor, Tensor], spec: LogprobSpec
) -> Tensor:
    """Return the divergences from the teacher's most probable classes, whose log-probabilities for the student are
    given."""
    ids, teacher_logprob = teacher_topk
    assert candidate_logprob is not None
    check_tensors({"student": candidate_logprob, "teacher_topk[1]": teacher_logprob})
    if teacher_logprob.shape != candidate_logprob.shape:
        raise ValueError(
            "teacher_topk must be class indices and log-probabilities of the same shape, (..., K) for the tokens of "
            f"student, got {tuple(ids.shape)} and {tuple(teacher_logprob.shape)}"
        )
    teacher_logprob = teacher_logprob.detach().masked_fill(ids < 0, -torch.inf)
    assert spec.divergence is not None
    return _divergence_of_classes(candidate_logprob, teacher_logprob, spec.divergence, spec.beta, True)


def topk_kl(
    candidate_logprob: Tensor,
    teacher_logprob: Tensor,
    direction: Literal["forward", "reverse"] = "forward",
    tail: bool = True,
) -> Tensor:
    """Compute the Kullback-Leibler divergence of a student from a teacher whose top-k log-probabilities are stored.

    Args:
        candidate_logprob: (..., K) log-probabilities of the student at the classes of the teacher, as returned by
            `linear_logprobs`.
        teacher_logprob: (..., K) log-probabilities of the teacher, in any floating dtype; -inf in empty entries.
        direction: "forward" is KL(teacher || student), "reverse" is KL(student || teacher).
        tail: True: all other classes count as one more class, whose probability is 1 minus the sum of the K
            probabilities. False: the sum runs over the K classes only, and the probabilities are not normalized.

    Returns:
        (...) divergences, in nats, in the dtype of `candidate_logprob`. Differentiable in both arguments. Divergences
        of positions that `linear_logprobs` ignored are meaningless, because the log-probabilities there are 0: leave
        these positions out of a sum.

    Raises:
        TypeError: an argument is not a dense tensor of a floating dtype, or `tail` is not a bool.
        ValueError: shapes or devices differ, or `direction` is unknown.
    """
    check_tensors({"candidate_logprob": candidate_logprob, "teacher_logprob": teacher_logprob}, dtensors=True)
    check_bool("tail", tail)
    if candidate_logprob.shape != teacher_logprob.shape:
        raise ValueError(
            "candidate_logprob and teacher_logprob must have the same shape, got "
            f"{tuple(candidate_logprob.shape)} and {tuple(teacher_logprob.shape)}"
        )
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction must be 'forward' or 'reverse', got {direction!r}")
    kind = "forward_kl" if direction == "forward" else "reverse_kl"
    return _divergence_of_classes(candidate_logprob, teacher_logprob, kind, 0.5, tail)


def _divergence_of_classes(student: Tensor, teacher: Tensor, kind: str, beta: float, tail: bool) -> Tensor:
    """Return the divergences, (...), over K classes, and over all others as one class if `tail`.

    student, teacher: (..., K) log-probabilities; -inf for empty entries of the teacher.
    """
    present = teacher > -torch.inf
    student, teacher = (t.to(student.dtype).masked_fill(~present, 0.0) for t in (student, teacher))
    if tail:
        # The clamp avoids log(0): a sum of rounded probabilities may reach 1.
        least = torch.finfo(student.dtype).eps
        student, teacher = (
            torch.cat((t, (1.0 - (t.exp() * present).sum(-1, keepdim=True).clamp(max=1.0 - least)).log()), -1)
            for t in (student, teacher)
        )
        present = torch.nn.functional.pad(present, (0, 1), value=True)

    def relative_entropy(p: Tensor, q: Tensor) -> Tensor:
        # The clamp avoids 0 * -inf = NaN for classes to which the student gives probability 0.
        return (p.exp() * (p.clamp(min=LEAST_LOGPROB) - q)).masked_fill(~present, 0.0).sum(-1)

    if kind == "forward_kl":
        return relative_entropy(teacher, student)
    if kind == "reverse_kl":
        return relative_entropy(student, teacher)
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * relative_entropy(teacher, mixture) + (1.0 - beta) * relative_entropy(student, mixture)
