"""The teacher of a divergence in one pass. `per_token` builds it; `PassContext` computes its logits beside the
student's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flce.backends.contract import DIVERGENCE, MEAN_WEIGHT, TEACHER_SLOTS, TeacherCall
from flce.core.problem import LinearCrossEntropyProblem, LinearTerm, LogprobSpec
from flce.core.slices import slice_columns
from flce.engine.arena import Arena


@dataclass
class Teacher:
    """The teacher's logits are ``term.input @ term.weight.T + bias``, of the classes of this process.

    Attributes:
        rows: (TEACHER_SLOTS, rows) of the selected tokens, see `TeacherCall.rows`.
        is_normalized: True if `rows` has the normalizer of all classes.
    """

    term: LinearTerm
    bias: Tensor | None
    spec: LogprobSpec
    rows: Tensor
    is_normalized: bool = False

    @staticmethod
    def from_problem(p: LinearCrossEntropyProblem, rows: Tensor | None) -> Teacher | None:
        """Return the teacher of a problem, or None without a teacher or without `rows`."""
        if p.teacher is None or p.teacher_weight is None or rows is None:
            return None
        assert isinstance(p.spec, LogprobSpec)
        return Teacher(LinearTerm(p.teacher, p.teacher_weight), p.teacher_bias, p.spec, rows)

    @staticmethod
    def allocate_rows(num_rows: int, like: Tensor, arena: Arena) -> Tensor:
        return arena.new((TEACHER_SLOTS, num_rows), like.dtype, zero=True)

    def call(self, tokens: slice) -> TeacherCall:
        """Return the teacher of a call for some of the selected rows."""
        spec, rows = self.spec, slice_columns(self.rows, tokens)
        assert spec.divergence is not None
        return TeacherCall(spec.teacher_spec, self.bias, rows, spec.divergence, spec.beta)

    @property
    def mean_weight(self) -> Tensor | float:
        """The mean of the weights w of `Backend.divergence_gradient` under the student, (rows,) or a number."""
        if self.spec.divergence == "forward_kl":
            return -1.0
        return self.rows[DIVERGENCE if self.spec.divergence == "reverse_kl" else MEAN_WEIGHT]
