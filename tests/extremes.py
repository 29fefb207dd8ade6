"""Rows of logits with extreme values: one table for the tests of all losses and softmaxes.

The float64 oracle has the correct results. If the largest logit of a row is not finite, the oracle has no result: then
PyTorch's result in float64 is correct.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flce.testing.problem import IGNORED

OFFSET = 2.0**15


def extremes(vocab: int) -> dict[str, Tensor]:
    """Return rows of float64, by name. Values of moderate size are multiples of 1/8, also after adding OFFSET."""
    usual = torch.randint(-24, 25, (vocab,), generator=torch.Generator().manual_seed(vocab)).double() / 8
    middle, last = vocab // 2, vocab - 1
    places: dict[str, slice | list[int]] = {
        "the first": [0],
        "the last": [last],
        "the middle": [middle],
        "a few at the edges": [0, 1, 2, last - 1, last],
        "every other": slice(None, None, 2),  # all columns of some lanes
        "a stretch": slice(vocab // 5, 2 * vocab // 3),  # full blocks, with the middle
        "all but a stretch": [*range(vocab // 5), *range(2 * vocab // 3, vocab)],
        "all but the last": slice(0, last),
        "all but the edges": slice(3, last),
        "all": slice(None),
    }
    rows = {
        "equal": torch.zeros(vocab, dtype=torch.float64),
        "sure of the middle": _with_value(torch.zeros(vocab, dtype=torch.float64), [middle], 200.0),
        "a tie of all blocks": _with_value(usual, [3, middle, last], 50.0),
        "a tie of neighbours": _with_value(usual, [middle - 1, middle], 50.0),
        "far up": usual + OFFSET,
        "far down": usual - OFFSET,
        "huge": torch.linspace(-1e6, 1e6, vocab, dtype=torch.float64),
        "one far above": _with_value(usual, [middle], 900.0),
        "few far above": _with_value(usual - 5000, slice(0, 3), 1.0),
        "far down, every other impossible": _with_value(usual - 120, slice(None, None, 2), -math.inf),
        "far down, a stretch impossible": _with_value(usual - 5000, places["a stretch"], -math.inf),
    }
    for value in (-math.inf, math.inf, math.nan):
        rows |= {f"{where} {value}": _with_value(usual, columns, value) for where, columns in places.items()}
    return rows


def targets(vocab: int) -> Tensor:
    """Return the targets of each row: its first, middle and last class, and IGNORED."""
    return torch.tensor([0, vocab // 2, vocab - 1, IGNORED])


def every_extreme(vocab: int) -> tuple[Tensor, Tensor]:
    """Return each row with each target: logits (rows, vocab) and targets (rows,)."""
    rows, each = torch.stack(list(extremes(vocab).values())), targets(vocab)
    return rows.repeat_interleave(len(each), 0), each.repeat(len(rows))


def has_softmax(logits: Tensor) -> Tensor:
    """Return a mask of the rows whose largest logit is finite."""
    return logits.amax(-1).isfinite()


def _with_value(row: Tensor, columns: slice | list[int], value: float) -> Tensor:
    changed = row.clone()
    changed[columns] = value
    return changed
