"""Who is measured on whole models. Each contender changes one and the same model for the time of its turn.

To add one, write a context manager that changes the model and puts it back, and list it in
`CONTENDERS`. Optional packages are imported inside; a contender that cannot run here says why.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.cases import MIB
from benchmarks.contenders import Contender, known, needs_flce, needs_package
from benchmarks.model_problem import ModelCase


@dataclass(frozen=True)
class ModelContender(Contender):
    applied: Callable[[nn.Module], AbstractContextManager[None]]  # the model is changed inside
    call: dict[str, Any] = field(default_factory=dict, kw_only=True)  # more arguments for the model's forward


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
needs_liger = needs_package("liger_kernel.transformers.monkey_patch", "liger-kernel")


def peer(
    name: str, title: str, applied: Callable[[nn.Module], AbstractContextManager[None]], **call: Any
) -> ModelContender:
    return ModelContender(name, title, "peer", applied, unavailable=needs_liger, call=call)


# In the order in which they are measured: what a deadline would cut off comes last. What the model's forward does not
# know it hands on to the loss.
CONTENDERS = [
    ModelContender("ours", "flce", "ours", ours, unavailable=needs_flce),
    ModelContender("ours-budget", "flce in a budget", "ours", ours, unavailable=needs_flce),  # see `entrants`
    peer("liger-loss", "Liger, only the loss", only_the_loss),
    peer("liger-loss-float32", "Liger, only the loss, float32 sums", only_the_loss, accum_dtype=torch.float32),
    peer("liger", "Liger, all its kernels", liger),
    peer("ours-liger-layers", "flce, with Liger's layers", ours_and_ligers_layers),
    ModelContender("stock", "stock", "stock", unchanged),
]


def select(names: Sequence[str] | None) -> list[ModelContender]:
    """The contenders of these names, in the order of the table; all by default."""
    chosen = CONTENDERS if names is None else known(CONTENDERS, names)
    return [contender for contender in CONTENDERS if contender in chosen]


def entrants(case: ModelCase) -> list[ModelContender]:
    """The contenders of a case, with one for each budget."""
    found = []
    for contender in select(case.contenders):
        found += [in_budget(mib) for mib in case.budgets_mib] if contender.name == "ours-budget" else [contender]
    return found


def in_budget(mib: int) -> ModelContender:
    applied = functools.partial(ours, max_workspace_bytes=mib * MIB)
    title = f"flce, {mib} MiB budget"
    return ModelContender(f"ours-budget-{mib}", title, "ours", applied, unavailable=needs_flce)
