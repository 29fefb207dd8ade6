"""Divergences of a student from a teacher: `linear_divergence`, and `topk_kl` of stored log-probabilities."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flce.backends.contract import LEAST_LOGPROB
from flce.backends.formulas import divergence_terms
from flce.core.numbers import check_bool, check_float
from flce.core.options import ChunkOptions
from flce.core.problem import DIVERGENCE_RESULTS, DIVERGENCES, LinearDivergenceOutput, LinearTerm, LogprobSpec
from flce.engine.per_token import logprob_spec
from flce.ops.arguments import check_tensors
from flce.ops.dtensors import supports_divided_heads
from flce.ops.linear_logprobs import linear_logprobs as run_linear_logprobs
from flce.ops.problems import make_linear_problem, make_logprob_problem
from flce.ops.vocabulary_parallel import DivisionArguments


@supports_divided_heads
def linear_divergence(
    student: Tensor, student_weight: Tensor, teacher: Tensor | None = None, teacher_weight: Tensor | None = None, *,
    kind: str = "forward_kl", beta: float | None = None, temperature: float = 1.0, target: Tensor | None = None,
    ignore_index: int | None = -100, shift: int = 0, student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None, student_softcap: float | None = None, teacher_softcap: float | None = None,
    student_logit_scale: float = 1.0, teacher_logit_scale: float = 1.0,
    student_adapters: Sequence[tuple[Tensor, Tensor]] = (), teacher_adapters: Sequence[tuple[Tensor, Tensor]] = (),
    teacher_topk: tuple[Tensor, Tensor] | None = None, outputs: Sequence[str] = ("divergence",),
    options: ChunkOptions | None = None,
    process_group: dist.ProcessGroup | None = None, vocab_size: int | None = None, sequence_parallel: bool = False,
) -> LinearDivergenceOutput:  # fmt: skip
    """Compute the divergence of each token between the predicted distributions of a student and a teacher.

    No logits are stored in memory. With p and q the probabilities of the student and the teacher over all classes, and
    m = (1 - beta) p + beta q:

        forward_kl = sum of q log(q / p)        reverse_kl = sum of p log(p / q)
        jsd = beta * sum of q log(q / m) + (1 - beta) * sum of p log(p / m)

    Logits are never rounded below float32, because p - q cancels as the student learns. The results are differentiable
    in `student`, `student_weight`, `student_bias` and `student_adapters`. The teacher gets no gradient, even if its
    tensors require one. A call runs six matrix products, or eight for "jsd" with a small budget or a divided head.

    Args:
        student: (..., H) hidden states of the student; float16, bfloat16, float32 or float64.
        student_weight: (V, H) weight of the student's head, in the dtype of `student`. Autocast applies as to
            `torch.nn.functional.linear`.
        teacher, teacher_weight: (..., H_t) and (V, H_t), hidden states and head of the teacher, of the same tokens and
            classes. H_t and the dtype may differ from the student's.
        kind: the divergence.
        beta: weight of the teacher in the mixture of "jsd", from 0 to 1; None: 0.5. As in TRL, 0 is "forward_kl", and 1
            is "reverse_kl".
        temperature: divides the logits of student and teacher after softcap, one number > 0 for all tokens. The
            divergence is not multiplied by ``temperature**2``.
        target: (...) class indices. Positions equal to `ignore_index` have no results and no gradients. None: all
            positions count.
        ignore_index, shift, options: as in `linear_logprobs`.
        student_bias, student_softcap, student_logit_scale, student_adapters: as `linear_bias`, `softcap`, `logit_scale`
            and `adapters` in `linear_logprobs`.
        teacher_bias, teacher_softcap, teacher_logit_scale, teacher_adapters: the same of the teacher.
        teacher_topk: class indices and log-probabilities of the teacher's most probable classes, (..., K) each, instead
            of the teacher and its head. All other classes count as one more class, whose probability is the rest. -1
            and -inf are an empty entry. `temperature` divides only the student's logits.
        outputs: any of "divergence", "logprob" (needs `target`) and "entropy". The last two are of the student.
        process_group, vocab_size, sequence_parallel: as in `linear_logprobs`. Each process has a shard of the classes
            of both heads. With `sequence_parallel`, `student` and `teacher` are the shares of this process.

    DTensors are supported as in `linear_logprobs`: `teacher` and `teacher_weight` are then DTensors, too.

    Returns:
        A `LinearDivergenceOutput` with results of shape (...).

    Raises:
        TypeError, IndexError, RuntimeError, ValueError: as `linear_logprobs`. ValueError also if the heads have
            different numbers of classes, student and teacher have different tokens, `kind` is unknown, `beta` is given
            for another kind than "jsd", or neither or both of a teacher and `teacher_topk` are given.

    Examples:
        >>> h, W = torch.randn(2, 6, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
        >>> teacher, teacher_W = torch.randn(2, 6, 32), torch.randn(100, 32)
        >>> linear_divergence(h, W, teacher, teacher_W, kind="jsd", beta=0.1).divergence.mean().backward()
    """
    if kind not in DIVERGENCES:
        raise ValueError(f"kind must be one of {DIVERGENCES}, got {kind!r}")
    if beta is not None and kind != "jsd":
        raise ValueError(f"beta needs kind='jsd', got beta={beta!r} with kind={kind!r}")
    beta = 0.5 if beta is None else check_float("beta", beta)
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, kind)
    beta = {"forward_kl": 1.0, "reverse_kl": 0.0}.get(kind, beta)
    if not isinstance(outputs, (tuple, list)) or not all(name in DIVERGENCE_RESULTS for name in outputs):
        raise ValueError(f"outputs must be names out of {DIVERGENCE_RESULTS}, got {outputs!r}")
    if outputs.count("divergence") > 1:
        raise ValueError(f"outputs has 'divergence' twice, got {outputs}")
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        raise ValueError("temperature must be one number for all tokens, got a tensor with one for each")
    teachers = {"teacher": teacher, "teacher_weight": teacher_weight, "teacher_topk": teacher_topk}
    given = [name for name, value in teachers.items() if value is not None]
    if given not in (["teacher", "teacher_weight"], ["teacher_topk"]):
        raise ValueError(f"give either teacher and teacher_weight, or teacher_topk, got {' and '.join(given) or None}")
    division = DivisionArguments(process_group, vocab_size, sequence_parallel)
    with _renamed_errors("teacher"):
        theirs = LogprobSpec(softcap=teacher_softcap, logit_scale=teacher_logit_scale)
    ids, teacher_logprob = None, None
    if teacher is not None and teacher_weight is not None:
        _check_sizes(student, student_weight, teacher, teacher_weight, teacher_bias)
    elif teacher_bias is not None or theirs != LogprobSpec() or teacher_adapters:
        raise ValueError("teacher_topk replaces the teacher's head: give no other arguments of the teacher's head")
    elif not isinstance(teacher_topk, (tuple, list)) or len(teacher_topk) != 2:
        raise TypeError(f"teacher_topk must be a pair of tensors, got {type(teacher_topk).__name__}")
    else:
        ids, teacher_logprob = teacher_topk
        with _renamed_errors("student"):
            check_tensors({"student": student, "candidates": ids, "teacher_topk[1]": teacher_logprob})
        if ids.shape != teacher_logprob.shape:
            shapes = f"{tuple(ids.shape)} and {tuple(teacher_logprob.shape)}"
            raise ValueError(f"teacher_topk must be class indices and log-probabilities of one shape, got {shapes}")
    with _renamed_errors("student"):
        problem = make_logprob_problem(
            student, student_weight, target, candidates=ids, outputs=[name for name in outputs if name != "divergence"],
            linear_bias=student_bias, adapters=student_adapters, temperature=temperature, softcap=student_softcap,
            logit_scale=student_logit_scale, ignore_index=ignore_index, shift=shift, options=options,
            division=division,
        )  # fmt: skip
    tokens, ids = division.tokens(student), problem.candidates
    if "divergence" in outputs and teacher is not None and teacher_weight is not None:
        bias = None if teacher_bias is None else teacher_bias.detach()
        with _renamed_errors("teacher"):
            other = make_linear_problem(
                teacher.detach(), teacher_weight.detach(), problem.target.view(tokens), theirs, linear_bias=bias,
                adapters=teacher_adapters, shift=0, options=options, division=division,
            )  # fmt: skip
        spec = replace(
            logprob_spec(problem), divergence=kind, beta=beta, teacher_softcap=theirs.softcap,
            teacher_logit_scale=theirs.logit_scale,
        )  # fmt: skip
        terms = tuple([LinearTerm(x.detach(), w.detach()) for x, w in other.terms])
        problem = replace(problem, teacher_terms=terms, teacher_bias=other.linear_bias, spec=spec)
    results = run_linear_logprobs(problem)
    logprob = results["candidate_logprob"]
    if ids is not None and teacher_logprob is not None and logprob is not None and "divergence" in outputs:
        teacher_logprob = teacher_logprob.detach().expand(*tokens, -1).reshape(ids.shape)
        teacher_logprob = teacher_logprob.masked_fill(ids < 0, -torch.inf)
        divergence = _divergence_of_classes(logprob, teacher_logprob, kind, beta, tail=True)
        results["divergence"] = divergence.where(problem.target != problem.spec.ignore_index, 0.0)
    values = (results[name] for name in DIVERGENCE_RESULTS)
    return LinearDivergenceOutput(*(None if x is None else x.reshape(tokens) for x in values))


def _check_sizes(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None
) -> None:
    tensors = {"student": student, "student_weight": student_weight, "teacher": teacher, "teacher_bias": teacher_bias}
    check_tensors({**tensors, "teacher_weight": teacher_weight}, optional={"teacher_bias"}, dtensors=True)
    if student.shape[:-1] != teacher.shape[:-1]:
        shapes = f"{tuple(student.shape)} and {tuple(teacher.shape)}"
        raise ValueError(f"student and teacher must have the same tokens, (..., H) with any H, got {shapes}")
    if student_weight.dim() == teacher_weight.dim() == 2 and len(student_weight) != len(teacher_weight):
        sizes = len(student_weight), len(teacher_weight)
        larger = ("student_weight", "teacher_weight")[sizes[1] > sizes[0]]
        raise ValueError(
            f"student_weight and teacher_weight must have the same number of classes V, got {sizes[0]} and {sizes[1]}. "
            f"If the additional classes are padding, give {larger}[:{min(sizes)}]"
        )


@contextlib.contextmanager
def _renamed_errors(model: str) -> Iterator[None]:
    """Replace the arguments of `linear_logprobs` in messages by the arguments of `linear_divergence`."""
    names = {"input": model, "candidates": "teacher_topk", "linear_logprobs": "linear_divergence"}
    for name in ("linear_weight", "linear_bias", "adapters", "softcap", "logit_scale"):
        names[name] = f"{model}_{name.removeprefix('linear_')}"
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if type(error) not in (TypeError, ValueError, RuntimeError):
            raise  # an error of an allocation or a budget
        message = re.sub(r"\b(" + "|".join(names) + r")\b", lambda match: names[match[0]], str(error))
        raise type(error)(message) from None


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
    kind, beta = f"{direction}_kl", float(direction == "forward")
    return _divergence_of_classes(candidate_logprob, teacher_logprob, kind, beta, tail)


def _divergence_of_classes(student: Tensor, teacher: Tensor, kind: str, beta: float, tail: bool) -> Tensor:
    """Return the divergences, (...), over K classes, and over all others as one class if `tail`.

    student, teacher: (..., K) log-probabilities; -inf for empty entries of the teacher.
    """
    present = teacher > -torch.inf
    p, q = (t.to(student.dtype).masked_fill(~present, 0.0) for t in (student, teacher))  # equal: they add 0
    if tail:
        # The clamp avoids log(0): a sum of rounded probabilities may reach 1.
        most = 1.0 - torch.finfo(student.dtype).eps
        p, q = (
            torch.cat((t, (1.0 - (t.exp() * present).sum(-1, keepdim=True).clamp(max=most)).log()), -1) for t in (p, q)
        )
    if kind != "forward_kl":
        # The clamp avoids 0 * -inf = NaN for classes to which the student gives probability 0.
        p = p.clamp(min=LEAST_LOGPROB)
    return torch.add(*divergence_terms(p, q, kind, beta))
