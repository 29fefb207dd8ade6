"""The teacher of a divergence in one pass. `per_token` builds it; `PassContext` computes its logits beside the
student's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flce.backends.contract import DIVERGENCE, LOG_SUM, MEAN_WEIGHT, SUM_SLOTS, TEACHER_SLOTS
from flce.core.problem import LinearCrossEntropyProblem, LinearTerm
from flce.engine.arena import Arena


@dataclass
class Teacher:
    """The teacher's logits are ``term.input @ term.weight.T + bias``, of the classes of this process.

    Attributes:
        rows: (TEACHER_SLOTS, rows) of the selected tokens, see `TeacherCall.rows`.
        sums: (SUM_SLOTS, rows), for the sums of a KL.
        is_normalized: True if `rows` has the normalizer of all classes.
    """

    term: LinearTerm
    bias: Tensor | None
    rows: Tensor
    sums: Tensor | None = None
    is_normalized: bool = False

    @staticmethod
    def from_problem(p: LinearCrossEntropyProblem, rows: Tensor, sums: Tensor | None = None) -> Teacher:
        assert p.teacher is not None
        assert p.teacher_weight is not None
        return Teacher(LinearTerm(p.teacher, p.teacher_weight), p.teacher_bias, rows, sums)

    @staticmethod
    def allocate(p: LinearCrossEntropyProblem, num_rows: int, like: Tensor, arena: Arena) -> Teacher:
        rows, sums = (arena.new((slots, num_rows), like.dtype, zero=True) for slots in (TEACHER_SLOTS, SUM_SLOTS))
        return Teacher.from_problem(p, rows, sums)

    @property
    def normalizer(self) -> Tensor:
        """(slots, rows)."""
        return self.rows[: LOG_SUM + 1]

    def mean_weight(self, kind: str) -> Tensor | float:
        """Return the mean of the weights w of `Backend.divergence_gradient` under the student, (rows,) or a number."""
        return -1.0 if kind == "forward_kl" else self.rows[DIVERGENCE if kind == "reverse_kl" else MEAN_WEIGHT]
