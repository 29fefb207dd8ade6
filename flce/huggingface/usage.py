"""What became of a patched model's logits: counted, reported, and said where nothing is fused."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.hooks import unserializable_hook

from flce.core.callers import Caller, WarningKey, find_caller
from flce.core.project import locate_page

EXPLICIT_MATERIALIZE = "materialize()"

EVALUATION = (
    "the model is in eval() mode, as from_pretrained() returns it, and was called without labels. Call model.train(), "
    "or pass labels"
)
OTHER_LOGITS = (
    "neither the forward of the output embedding nor a matrix product as wide as the vocabulary was called. Another "
    "forward is set on the layer, as tensor parallelism does (tp_plan), or the model computes its loss by itself"
)
_LOGITS_UNUSED = (
    "no loss was computed from the model's logits. A trainer may go round the head with a kernel of its own, as TRL's "
    "do since version 1.16 (flce.huggingface.trl.install(), called before such a trainer is made, takes its place; see "
    f"{locate_page('trainers.md')}), or the loss may come from hidden states"
)


calls_with_logits: weakref.WeakSet[Any] = weakref.WeakSet()
"""Calls of heads (`HeadCall`) whose logits still exist."""


class NotFusedWarning(UserWarning):
    """A patched model is trained, and its loss is not computed by flce."""


class MaterializedLogitsWarning(UserWarning):
    """An operation that has no lazy form has made the full logits."""


class MaterializedLogitsError(RuntimeError):
    """The same where ``patch_model(model, on_materialize="raise")`` forbids it."""


@dataclass
class Usage:
    """Counts of one patched model."""

    forwards: int = 0
    """Training forwards: in training mode, with gradients enabled."""
    fused: int = 0
    materialized: Counter[str] = field(default_factory=Counter)
    stock: Counter[str] = field(default_factory=Counter)
    trained_stock_reason: str | None = None
    """Why logits through which a gradient came back were stock's."""
    has_warned: bool = False
    is_compiled: bool = False
    """Whether the head has run under ``torch.compile``, where nothing is counted."""
    warned_lines: set[WarningKey] = field(default_factory=set)
    """Warnings that named a line."""
    has_gradient_use: bool = False
    """Whether something with a gradient was made from logits; evaluations tell nothing about training."""

    def on_forward_begin(self, training: bool) -> None:
        """At the start of every forward with gradients enabled, in training mode or not."""
        if self.trained_stock_reason is not None or (self.forwards >= 2 and not self.has_gradient_use):
            self.warn_if_not_fused()
        self.forwards += training

    def warn_if_not_fused(self) -> None:
        """Warn, once a model, if it was trained and its loss did not go through flce."""
        reason = self.trained_stock_reason
        if reason is None and self.forwards and not (self.has_gradient_use or self.is_compiled):
            kept = {call.forward for call in list(calls_with_logits) if call.usage is self}
            if len(kept) < self.forwards:  # else the loss of several forwards may come at the end
                reason = _LOGITS_UNUSED
        if reason is None or self.has_warned:
            return
        self.has_warned = True
        find_caller().warn(
            f"the loss of this model, which flce has patched, is not fused, and no memory is saved: {reason}. "
            "flce.report(model) counts what happened.",
            NotFusedWarning,
        )

    def count_stock(self, logits: Any, reason: str) -> None:
        """The head ran stock code with gradients enabled; whether that is training shows when a gradient comes back."""
        self.stock[reason] += 1
        self.has_gradient_use |= reason != EVALUATION
        if not isinstance(logits, Tensor) or not logits.requires_grad or self.has_warned:
            return

        def note(grad: Tensor) -> None:
            self.trained_stock_reason = reason

        logits.register_hook(unserializable_hook(note))


def forbid_materialized(func: Any, on_materialize: str, usage: Usage | None, with_gradient: bool) -> None:
    """The error of ``patch_model(..., on_materialize="raise")``. The arguments are those of `report_materialized`."""
    if on_materialize != "raise":
        return
    where, hint = _count_materialized(func, find_caller(), usage, with_gradient)
    raise MaterializedLogitsError(
        f"{where} needs the logits themselves, which patch_model(..., on_materialize='raise') forbids.{hint} Call "
        "logits.materialize() to ask for them all the same."
    )


def report_materialized(
    func: Any, on_materialize: str, usage: Usage | None, with_gradient: bool, values_before: bool = False
) -> None:
    """Count logits that were computed, and warn, as ``patch_model`` was told to.

    Args:
        func: what needs the logits: a function of torch, or text.
        on_materialize: as in ``patch_model``.
        usage: where to count.
        with_gradient: whether the logits have one.
        values_before: whether values were computed without them before.
    """
    by = find_caller()
    where, hint = _count_materialized(func, by, usage, with_gradient)
    if on_materialize == "ignore":
        return
    if values_before:
        hint += " Values that were read before may differ from these logits in the last bits."
    by.warn(
        f"{where} needs the logits themselves, so they were computed and no memory is saved here.{hint} Call "
        "logits.materialize() to ask for them without this warning.",
        MaterializedLogitsWarning,
        None if usage is None else usage.warned_lines,
    )


def _count_materialized(func: Any, by: Caller, usage: Usage | None, with_gradient: bool) -> tuple[str, str]:
    """What needs the logits, which is counted, and what would do without them."""
    where = f"{func if isinstance(func, str) else _qualified_name(func)} at {by.line}"
    if by.via is not None:
        where += f" (in {by.via})"
    if usage is not None:
        usage.materialized[where] += 1
        usage.has_gradient_use |= with_gradient
    if not by.is_evaluating:
        return where, ""
    return where, " Trainer(preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)) does without them."


def name_of(func: Any) -> str:
    """The name of a torch function or method; for the getter of a property, the property's name."""
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
    """What `flce.report` returns.

    Attributes:
        patched: the changed modules, by their names in the model; empty if the model is not patched.
        forwards: forwards in training mode with gradients enabled.
        fused: losses and values that were computed without the logits, with or without gradients.
        materialized: how often the logits were computed after all, by the operation and line that needed them;
            "materialize()" where they were asked for.
        stock: how often the head ran stock code with gradients enabled, by reason.
        left: models that could not be patched, by their names, and why.
    """

    patched: tuple[str, ...]
    forwards: int
    fused: int
    materialized: Mapping[str, int]
    stock: Mapping[str, int]
    left: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"patched: {', '.join(name or '(the model)' for name in self.patched) or 'nothing'}"]
        lines.append(f"training forwards: {self.forwards}")
        lines.append(f"fused: {self.fused}")
        for title, counts in (("materialized", self.materialized), ("stock", self.stock)):
            lines.append(f"{title}: {sum(counts.values())}")
            lines += [f"  {count} x {reason}" for reason, count in counts.items()]
        if self.left:
            lines.append(f"left: {format_unpatched(self.left)}")
        return "\n".join(lines)


def format_unpatched(left: Mapping[str, str]) -> str:
    """What `patch_model` has left, and why, as text."""
    return "; ".join(f"{name or '(the model)'}: {reason}" for name, reason in left.items())
