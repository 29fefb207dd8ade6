"""Problems with given logits, and memory layouts of logits (B, S, V), for the tests of `flce.cross_entropy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flce.testing.problem import Problem, make_problem

# For (b, s, v): the shape of the memory, the view of the memory, and True if the gradient can be written in place.
Shape = Callable[[int, int, int], tuple[int, ...]]
View = Callable[[Tensor, int, int, int], Tensor]
LAYOUTS: dict[str, tuple[Shape, View, bool]] = {
    "contiguous": (lambda b, s, v: (b, s, v), lambda x, b, s, v: x, True),
    "padded vocabulary": (lambda b, s, v: (b, s, v + 9), lambda x, b, s, v: x[..., :v], True),
    "in the middle": (lambda b, s, v: (b + 1, s, v + 9), lambda x, b, s, v: x[1:, :, 4:-5], True),
    "transposed": (lambda b, s, v: (s, b, v), lambda x, b, s, v: x.transpose(0, 1), False),
    "without the first": (lambda b, s, v: (b, s + 1, v), lambda x, b, s, v: x[:, 1:], False),
    "class by class": (lambda b, s, v: (v, b, s), lambda x, b, s, v: x.permute(1, 2, 0), False),
    "every second class": (lambda b, s, v: (b, s, 2 * v), lambda x, b, s, v: x[..., ::2], False),
}  # fmt: skip


def place_in_layout(values: Tensor, layout: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return memory that has these values in a layout, and a function that returns the view of such memory."""
    b, s, v = values.shape
    shape, view, _ = LAYOUTS[layout]
    memory = values.new_full(shape(b, s, v), 77.0)
    view(memory, b, s, v).copy_(values)
    return memory, lambda x: view(x, b, s, v)


def make(
    leading: tuple[int, ...] = (3, 4),
    vocab: int = 37,
    dtype: torch.dtype = torch.float64,
    device: Any = "cpu",
    ignored: float = 0.0,
    class_weight: bool = False,
    token_weight: bool = False,
    **kwargs: Any,
) -> Problem:
    """Return a problem with given logits instead of a head."""
    kwargs |= {"ignored": ignored, "class_weight": class_weight, "token_weight": token_weight}
    return make_problem(leading, None, vocab, dtype=dtype, device=device, **kwargs)
