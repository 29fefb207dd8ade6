"""FLOP formulas of the operators for `torch.utils.flop_counter.FlopCounterMode`, which cannot count inside an operator.

The formulas follow PyTorch's formulas for attention. They count the matrix products of the mathematics, independent of
the sizes of tiles. If a backward computes an intermediate result a second time, its products count twice. Most calls
compute gradients in forward: their count equals the count of `torch.nn.functional.linear` and its backward. A call that
defers gradients to backward (``reduction="none"``, ``strategy="vocab"``) counts the logits twice. `ChunkPlan.flops`
also includes the products that a budget adds.
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
    """Register the FLOP count of ``flce::name``: ``formula(*arguments, out_val=result)``."""
    _formulas[getattr(torch.ops.flce, name)] = formula
    _register()


def update_active_counters() -> None:
    """Register the formulas in active FLOP counters, before an operator is called.

    Importing PyTorch's counter imports Triton, which takes as long as all other imports of flce together, so flce does
    not import it. A counter that was imported after flce has copied PyTorch's formulas when it was constructed.
    """
    if not private.len_torch_dispatch_stack() or not _register():
        return
    for mode in private.dispatch_modes():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.update(_formulas)


def _register() -> bool:
    """Register the formulas with PyTorch. Return True if the module of the counter is imported."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return False
    for packet, formula in _formulas.items():
        if packet not in module.flop_registry:
            module.register_flop_formula(packet, get_raw=True)(formula)
    return True
