"""The k largest logits of each row, collected from blocks of classes by `PassContext.collect_top_k`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flce.engine.arena import Arena

# Maximum number of logits to which a bias is added at a time, because the sum is a copy.
BIASED_ENTRIES = 1 << 20


@dataclass(frozen=True)
class TopK:
    """The k largest logits of each row so far, bias included, before scale and softcap. The k smallest if the scale is
    negative, because they have the largest z. If fewer than k classes were added, only as many columns are written."""

    logits: Tensor  # (rows, k)
    ids: Tensor  # (rows, k) int64
    largest: bool

    @staticmethod
    def allocate(rows: int, k: int, dtype: torch.dtype, scale: float, arena: Arena) -> TopK:
        """Allocate the results. `scale`: factor of z."""
        return TopK(arena.new((rows, k), dtype), arena.new((rows, k), torch.int64), scale >= 0)

    def add(self, logits: Tensor, bias: Tensor | None, tokens: slice, classes: slice) -> None:
        """Merge the logits of some rows and classes. Classes must be added in their order. bias: (cols,)."""
        k = self.ids.shape[1]
        num_before, num_after = min(k, classes.start), min(k, classes.stop)
        step = len(logits) if bias is None else max(1, BIASED_ENTRIES // logits.shape[1])
        for start in range(0, len(logits), max(1, step)):
            biased = logits[start : start + step]
            if bias is not None:
                biased = biased + bias
            best, column = biased.topk(min(k, biased.shape[1]), largest=self.largest)
            rows = slice(tokens.start + start, tokens.start + start + len(biased))
            values = torch.cat((self.logits[rows, :num_before], best), 1)
            ids = torch.cat((self.ids[rows, :num_before], column + classes.start), 1)
            merged, position = values.topk(num_after, largest=self.largest)
            self.logits[rows, :num_after], self.ids[rows, :num_after] = merged, ids.gather(1, position)
