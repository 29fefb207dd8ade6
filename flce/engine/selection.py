"""The selection of tokens that a pass processes: all tokens, or the tokens that are not ignored."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from flce.backends.contract import RowInputs, RowOutputs, RowProblem
from flce.core.options import SkipIgnored
from flce.core.problem import LinearCrossEntropyProblem
from flce.core.slices import slice_columns

# With "auto", rows that are not ignored are gathered if at least this share is dropped. Below, gathering is slower.
MIN_IGNORED_SHARE = 1 / 16


def _has_nonfinite_ignored_rows(p: LinearCrossEntropyProblem) -> bool:
    """Return True if the gradient of a weight is NaN unless ignored rows are dropped: the gradient of an ignored row's
    logits is 0, and 0 times an infinity in the row's input is NaN. The host waits for the device."""
    ignored = p.target == p.spec.ignore_index
    inputs = [term.input for term, needed in zip(p.terms, p.needs.weights, strict=True) if needed]
    largest = (torch.linalg.vector_norm(x.detach(), torch.inf, dim=1) for x in inputs)
    return not all(bool(norm.isfinite().logical_or_(~ignored).all()) for norm in largest)


class DeviceInt:
    """Integer on the device, of which a copy to the host is started."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._on_host, self._copy_event = value, None
        if value.is_cuda:
            self._on_host = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._on_host.copy_(value, non_blocking=True)
            self._copy_event = torch.cuda.current_stream(value.device).record_event()

    def wait(self) -> int:
        """Wait for the copy and return it."""
        if self._copy_event is not None:
            self._copy_event.synchronize()
        return int(self._on_host)


@dataclass(frozen=True)
class Selection:
    """Selected rows: all N rows, or the rows that are not ignored.

    Attributes:
        index: (max_num_rows,) into the N rows; None: all rows.
        num_rows_on_device: the number of selected rows, if the device counts them. `index` then has all N rows, the
            selected rows first.
    """

    problem: RowProblem
    index: Tensor | None
    num_rows_on_device: DeviceInt | None = None

    @staticmethod
    def from_problem(p: LinearCrossEntropyProblem, skip_ignored: SkipIgnored, count_on_device: bool) -> Selection:
        if not skip_ignored or p.num_tokens == 0 or (skip_ignored == "auto" and _has_nonfinite_ignored_rows(p)):
            return Selection(p, None)
        valid = p.target != p.spec.ignore_index
        if count_on_device:
            numbers = torch.arange(p.num_tokens, device=p.device)
            num_valid_up_to = valid.cumsum(0)
            count = num_valid_up_to[-1].clone()  # A clone, because kernels are compiled for aligned addresses.
            position = torch.where(valid, num_valid_up_to - 1, count + numbers - num_valid_up_to)
            return Selection(p, torch.empty_like(position).scatter_(0, position, numbers), DeviceInt(count))
        # The host waits for the number of rows, and the device is idle. The first logits should be launched as early as
        # possible afterwards, so the vectors of selected rows, loss scales, dX and dW are computed at their first use.
        index = valid.nonzero()[:, 0]
        min_dropped = MIN_IGNORED_SHARE * valid.numel() if skip_ignored == "auto" else 1
        return Selection(p, index if valid.numel() - index.numel() >= min_dropped else None)

    @functools.cached_property
    def max_num_rows(self) -> int:
        """Upper bound of `num_rows`, for allocation."""
        return self.problem.num_tokens if self.index is None else self.index.numel()

    @property
    def num_rows_without_waiting(self) -> int:
        """`num_rows` if the host has read it, else `max_num_rows`."""
        is_known = self.num_rows_on_device is None or "num_rows" in vars(self)
        return self.num_rows if is_known else self.max_num_rows

    @functools.cached_property
    def num_rows(self) -> int:
        """Number of selected rows. If the device counts them, the host waits for the number."""
        return self.max_num_rows if self.num_rows_on_device is None else self.num_rows_on_device.wait()

    @functools.cached_property
    def target(self) -> Tensor:
        """(rows,) targets of the selected rows."""
        return self.take(self.problem.target)

    @functools.cached_property
    def token_weight(self) -> Tensor | None:
        """(rows,) token weights of the selected rows."""
        token_weight = self.problem.token_weight
        return None if token_weight is None else self.take(token_weight)

    @functools.cached_property
    def inverse_temperature(self) -> Tensor | None:
        """(rows,) 1 / temperature of the selected rows."""
        inverse = self.problem.inverse_temperature
        return None if inverse is None else self.take(inverse)

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the selected rows of `x`, whose dimension `dim` has N rows."""
        return x if self.index is None else x.index_select(dim, self.index)

    def row_inputs(self, tokens: slice, scales: Tensor | None, weighted: bool = True) -> RowInputs:
        """Return the inputs of some of the selected rows. `weighted`: with token weights, if there are any."""
        p = self.problem
        token_weight = self.token_weight if weighted and p.token_weight is not None else None
        factor = self.inverse_temperature if p.inverse_temperature is not None else None
        token_weight, factor = (None if x is None else slice_columns(x, tokens) for x in (token_weight, factor))
        target = slice_columns(self.target, tokens)
        return RowInputs(target, token_weight, p.class_weight, p.linear_bias, scales, factor)

    def scatter_outputs(self, out: RowOutputs) -> RowOutputs:
        """Return results of all N rows from results of the selected rows. Other rows get the results of ignored
        rows."""
        if self.index is None:
            return out
        return out.map(lambda values: self.scatter(values[..., : self.num_rows], -1))

    def scatter(self, values: Tensor, dim: int = 0) -> Tensor:
        """Return values of all N rows along `dim` from values of the selected rows. Other rows get 0, or -1 for
        indices."""
        if self.index is None:
            return values
        shape, index = list(values.shape), self.index[: self.num_rows]
        shape[dim] = self.problem.num_tokens
        fill_value = 0 if values.is_floating_point() else -1
        return values.new_full(shape, fill_value).index_copy_(dim, index, values)
