"""Who is measured on whole models. Each contender changes one and the same model for the time of its turn.

To add one, write a context manager that changes the model and puts it back, and list it in
`MODEL_CONTENDERS`. Optional packages are imported inside; a contender that cannot run here says why.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.cases import MIB
from benchmarks.contenders import anywhere, needs_package, ours_unavailable
from benchmarks.models import ModelCase


@dataclass(frozen=True)
class ModelContender:
    name: str
    title: str
    family: str  # "ours", "stock" or "peer"
    applied: Callable[[nn.Module], AbstractContextManager[None]]  # the model is changed inside
    unavailable: Callable[[torch.device], str | None] = anywhere  # why it cannot run on this device, if so
    call: dict[str, Any] = field(default_factory=dict)  # more arguments for the model's forward


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    yield


@contextlib.contextmanager
def ours(model: nn.Module, **options: Any) -> Iterator[None]:
    import flce

    flce.patch_model(model, options=flce.ChunkOptions(**options) if options else None)
    try:
        yield
    finally:
        flce.unpatch_model(model)


@contextlib.contextmanager
def liger(model: nn.Module, fused_linear_cross_entropy: bool = True, **kernels: bool) -> Iterator[None]:
    """Liger has no way back: it replaces methods of modules and names in the model's Python file."""
    patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    attributes = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    names = vars(sys.modules[type(model).__module__])
    before = [*attributes, (names, dict(names))]
    try:
        patch._apply_liger_kernel_to_instance(
            model=model, fused_linear_cross_entropy=fused_linear_cross_entropy, **kernels
        )
        yield
    finally:
        for present, saved in before:
            present.clear()
            present.update(saved)


@contextlib.contextmanager
def ours_and_ligers_layers(model: nn.Module) -> Iterator[None]:
    """The two go together: Liger's kernels for everything but the loss."""
    with liger(model, fused_linear_cross_entropy=False), ours(model):
        yield


only_the_loss = functools.partial(liger, rope=False, rms_norm=False, swiglu=False)
liger_unavailable = needs_package("liger_kernel.transformers.monkey_patch", "liger-kernel")

# In the order in which they are measured: what a deadline would cut off comes last.
MODEL_CONTENDERS = [
    ModelContender("ours", "flce", "ours", ours, ours_unavailable),
    ModelContender("ours-budget", "flce in a budget", "ours", ours, ours_unavailable),  # see `entrants`
    ModelContender("liger-loss", "Liger, only the loss", "peer", only_the_loss, liger_unavailable),
    ModelContender(
        "liger-loss-float32",
        "Liger, only the loss, float32 sums",
        "peer",
        only_the_loss,
        liger_unavailable,
        # What the model's forward does not know it hands on to the loss.
        {"accum_dtype": torch.float32},
    ),
    ModelContender("liger", "Liger, all its kernels", "peer", liger, liger_unavailable),
    ModelContender("ours-liger-layers", "flce, with Liger's layers", "peer", ours_and_ligers_layers, liger_unavailable),
    ModelContender("stock", "stock", "stock", unchanged),
]


def known_contenders(names: list[str]) -> tuple[str, ...]:
    known = [contender.name for contender in MODEL_CONTENDERS]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown contender {', '.join(unknown)}; there are: {', '.join(known)}")
    return tuple(names)


def entrants(case: ModelCase) -> list[ModelContender]:
    """The contenders of a case, with one for each budget."""
    found = []
    for contender in MODEL_CONTENDERS:
        if case.contenders is not None and contender.name not in case.contenders:
            continue
        if contender.name == "ours-budget":
            found += [in_budget(mib) for mib in case.budgets_mib]
        else:
            found.append(contender)
    return found


def in_budget(mib: int) -> ModelContender:
    applied = functools.partial(ours, max_workspace_bytes=mib * MIB)
    return ModelContender(f"ours-budget-{mib}", f"flce, {mib} MiB budget", "ours", applied, ours_unavailable)
