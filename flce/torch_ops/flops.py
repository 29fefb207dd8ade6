"""Formulas for `torch.utils.flop_counter.FlopCounterMode`, which sees of a custom operator nothing but its call.

They count as those of PyTorch for attention do: the matrix products of the mathematics, whatever the sizes of tiles,
and where a backward makes an intermediate result once more, the products for that too. So a call that makes gradients
in forward, as most do, counts what `torch.nn.functional.linear` and its backward count. One that defers them to
backward (``reduction="none"``, ``strategy="vocab"``) counts the logits twice. `ChunkPlan.flops` also has what a budget
adds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from flce.core import private

Formula = Callable[..., int]

_formulas: dict[Any, Formula] = {}


def register_formula(name: str, formula: Formula) -> None:
    """``formula(*arguments, out_val=result)`` is the number of flops of a call of ``flce::name``."""
    _formulas[getattr(torch.ops.flce, name)] = formula
    _register()


def update_active_counters() -> None:
    """Give the formulas to the flop counters that run, before an operator is called.

    Importing PyTorch's counter imports Triton, which takes as long as all else together. So this package does not. A
    counter that was imported later has been made by now, with a copy of all formulas.
    """
    if not private.len_torch_dispatch_stack() or not _register():
        return
    for mode in private.dispatch_modes():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.update(_formulas)


def _register() -> bool:
    """Whether there is a counter: its module has been imported."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return False
    for packet, formula in _formulas.items():
        if packet not in module.flop_registry:
            module.register_flop_formula(packet, get_raw=True)(formula)
    return True
