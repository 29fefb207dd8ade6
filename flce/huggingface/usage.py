"""Counts of fused losses and of logits in memory of a patched model, with their warnings, errors and `Report`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from flce.core.log import WarningKey, find_caller
from flce.core.sizes import locate_page

EVALUATION = (
    "the model is in eval() mode, as from_pretrained() returns it, and was called without labels. Call model.train(), "
    "or pass labels"
)
COMPILED_DTENSOR = (
    "the compiled head is divided by tensor parallelism. Compile the layers: for layer in model.model.layers: "
    "layer.compile()"
)
_HEAD_BYPASSED = (
    "the head was not called. The trainer may call another kernel instead of the head, as TRL's trainers do since "
    "version 1.16 (to use flce there, call flce.huggingface.trl.install() before you create the trainer; see "
    f"{locate_page('trainers.md')}), or the loss may be computed from hidden states"
)


class NotFusedWarning(UserWarning):
    """A warning that flce does not compute the loss of a patched model in training."""


class MaterializedLogitsWarning(UserWarning):
    """A warning that an operation without a lazy form has computed all logits."""


class MaterializedLogitsError(RuntimeError):
    """An operation needs all logits, which ``patch_model(model, on_materialize="raise")`` forbids."""


@dataclass
class Usage:
    """Counts of one patched model."""

    forwards: int = 0
    """Number of forwards in training mode with gradients enabled."""
    forwards_of_head: int = 0
    """`forwards` at the last call of the head with gradients enabled that returned lazy logits."""
    fused: int = 0
    values: int = 0
    materialized: Counter[str] = field(default_factory=Counter)
    stock: Counter[str] = field(default_factory=Counter)
    trained_stock_reason: str | None = None
    """The reason why stock code computed logits that got a gradient."""
    has_warned: bool = False
    is_compiled: bool = False
    """True if the head has run under ``torch.compile``, where nothing is counted."""
    warned_lines: set[WarningKey] = field(default_factory=set)
    """Keys of the warnings that have named a line already."""
    has_gradient_use: bool = False
    """True if a result with a gradient was computed from logits. Evaluations do not set it."""

    def on_forward_begin(self, training: bool) -> None:
        """Count a forward with gradients enabled, in training mode or not. Warn if the last ones were not fused."""
        if self.trained_stock_reason is not None or (self.forwards >= 2 and not self.has_gradient_use):
            self.warn_if_not_fused()
        self.forwards += training

    def warn_if_not_fused(self) -> None:
        """Warn, once for each model, if the model was trained and flce has not computed its loss."""
        reason = self.trained_stock_reason
        # Lazy logits that nothing reads need no memory.
        is_head_used = self.has_gradient_use or self.is_compiled or self.forwards_of_head == self.forwards
        if reason is None and not is_head_used:
            reason = _HEAD_BYPASSED
        if reason is None or self.has_warned:
            return
        self.has_warned = True
        find_caller().warn(
            f"the loss of this model, which flce has patched, is not fused, and no memory is saved: {reason}. "
            "flce.report(model) counts what happened.",
            NotFusedWarning,
        )

    def count_stock(self, logits: Any, reason: str) -> None:
        """Count a run of stock code, if gradients are enabled. If the logits get a gradient, this was training."""
        if not torch.is_grad_enabled():
            return
        self.stock[reason] += 1
        self.has_gradient_use |= reason != EVALUATION
        if not isinstance(logits, Tensor) or not logits.requires_grad or self.has_warned:
            return

        def note(grad: Tensor) -> None:
            self.trained_stock_reason = reason

        logits.register_hook(unserializable_hook(note))


def report_materialized(state: Any, func: Any) -> None:
    """Count logits of a `LazyState` that ``func``, a function of torch or text, needs. Warn or raise
    `MaterializedLogitsError`, as ``on_materialize`` says."""
    caller, hint, on_materialize = find_caller(), "", state.settings.on_materialize
    usage = state.calls[0].usage if state.calls else None
    where = f"{func if isinstance(func, str) else _qualified_name(func)} at {caller.line}"
    where += "" if caller.via is None else f" (in {caller.via})"
    if usage is not None:
        usage.materialized[where] += 1
        usage.has_gradient_use |= state.requires_grad
    if caller.is_evaluating:
        hint = " Trainer(preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)) avoids this."
    if on_materialize == "raise":
        raise MaterializedLogitsError(
            f"{where} needs the logits themselves, which patch_model(..., on_materialize='raise') forbids.{hint} Call "
            "logits.materialize() to compute them nevertheless."
        )
    if on_materialize == "warn":
        caller.warn(
            f"{where} needs the logits themselves, so they were computed and no memory is saved here.{hint} Call "
            "logits.materialize() to compute them without this warning.",
            MaterializedLogitsWarning,
            None if usage is None else usage.warned_lines,
        )


def name_of(func: Any) -> str:
    """Return the name of a torch function or method, or of the property for the getter of a property."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__
    return name


def _qualified_name(func: Any) -> str:
    name = name_of(func)
    is_property = name != getattr(func, "__name__", name)
    if is_property or hasattr(func, "__objclass__") or str(getattr(func, "__qualname__", "")).startswith("Tensor."):
        return f"torch.Tensor.{name}"
    module = getattr(func, "__module__", None)
    return f"{module if isinstance(module, str) and not module.startswith('torch._') else 'torch'}.{name}"


@dataclass(frozen=True)
class Report:
    """The result of `flce.report`.

    Attributes:
        patched: names of the patched modules in the model; empty if the model is not patched.
        forwards: number of forwards in training mode with gradients enabled.
        fused: number of results that were computed without the logits: losses, and log-probabilities, entropies,
            logsumexps and logits of some classes that require a gradient.
        values: number of other values that were computed without all of the logits: the argmax, and results without a
            gradient.
        materialized: number of times that the logits were computed, by the operation and line that needed them;
            "materialize()" for calls of this method.
        stock: number of times that the head ran stock code with gradients enabled, by reason.
        left: models that could not be patched: the reason by the name of the model.
        sampled: if a patch has ``ChunkOptions(sample_below=...)``: backward passes with this option, of all models of
            this process, by their gradients: "sampled", or "dense" if there were too many entries.
    """

    patched: tuple[str, ...]
    forwards: int
    fused: int
    values: int
    materialized: Mapping[str, int]
    stock: Mapping[str, int]
    left: Mapping[str, str]
    sampled: Mapping[str, int]

    def __str__(self) -> str:
        lines = [f"patched: {', '.join(name or '(the model)' for name in self.patched) or 'nothing'}"]
        lines += [f"training forwards: {self.forwards}", f"fused: {self.fused}", f"values: {self.values}"]
        for title, counts in (("materialized", self.materialized), ("stock", self.stock)):
            lines.append(f"{title}: {sum(counts.values())}")
            lines += [f"  {count} x {reason}" for reason, count in counts.items()]
        if self.sampled:
            lines.append(f"with sample_below: {', '.join(f'{count} {kind}' for kind, count in self.sampled.items())}")
        if self.left:
            lines.append(f"left: {format_unpatched(self.left)}")
        return "\n".join(lines)


def format_unpatched(reasons: Mapping[str, str]) -> str:
    """Format the models that could not be patched, with the reasons."""
    return "; ".join(f"{name or '(the model)'}: {reason}" for name, reason in reasons.items())
