"""Registration of custom operators with PyTorch: operators, FLOP formulas, frames that `torch.compile` skips.

FLOP formulas are for `torch.utils.flop_counter.FlopCounterMode`, which cannot count inside an operator. The formulas
follow PyTorch's formulas for attention. They count the matrix products of the mathematics, independent of the sizes of
tiles. If a backward computes an intermediate result a second time, its products count twice. Most calls compute
gradients in forward: their count equals the count of `torch.nn.functional.linear` and its backward. A call that defers
gradients to backward (``reduction="none"``, ``strategy="vocab"``) counts the logits twice. `ChunkPlan.flops` also
includes the products that a budget adds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import CodeType
from typing import Any, TypeVar

import torch

from flce.core import private
from flce.core.numbers import specialize

# ---------------------------------------------------------------------------------------------------------
# Frames that ``torch.compile`` leaves to Python. While a graph is traced, these frames are traced like all others.

FunctionT = TypeVar("FunctionT", bound=Any)

# Frames that are not registered yet; True: the functions that they call are left to Python, too.
_unregistered: list[tuple[CodeType, bool]] = []


def skip_frame(function: FunctionT) -> FunctionT:
    """Mark a function: no graph begins in its frame. A graph may begin in its callees.
    See `register_skipped_frames`."""
    _unregistered.append((function.__code__, False))
    return function


def skip_frame_and_callees(function: FunctionT) -> FunctionT:
    """Mark a function: no graph begins in its frame or in its callees. See `register_skipped_frames`."""
    _unregistered.append((function.__code__, True))
    return function


def register_skipped_frames() -> None:
    """Pass the decorated functions to the compiler, at the first use of this package and not at its import.

    `torch.compiler.disable` has the same effect, but imports torch._dynamo, which takes a second.
    """
    while _unregistered:
        with contextlib.suppress(IndexError):  # another thread may have removed the last one
            private.skip_frames(*_unregistered.pop())


def can_break_graph() -> bool:
    """Return True if the compiler may end the graph at this point of a trace (not with ``fullgraph=True``).

    The compiler calls this function while it traces, and treats the result as a constant.
    """
    translator = private.current_translator()
    if translator is None:
        return False
    return not (translator.one_graph or translator.error_on_graph_break or is_transformed())


def is_transformed() -> bool:
    """Return True if a transform of ``torch.func`` is active; in a trace, if the code is traced for a transform."""
    return private.peek_interpreter_stack() is not None


def is_in_transform() -> bool:
    """Return True if a transform of ``torch.func`` or ``torch.autograd.forward_ad.dual_level()`` is active."""
    return bool(private.forward_ad._current_level >= 0) or private.peek_interpreter_stack() is not None


def is_in_forward_ad() -> bool:
    """Return True if ``torch.autograd.forward_ad.dual_level()`` is active."""
    return bool(private.forward_ad._current_level >= 0)


def is_exported() -> bool:
    """Return True if ``torch.export`` traces. PyTorch 2.11's public function returns True in any graph."""
    return bool(private.is_exporting())


for _function in (can_break_graph, is_transformed, is_in_transform, is_in_forward_ad, is_exported):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result


# ---------------------------------------------------------------------------------------------------------
# Operators, and dataclasses of constants as their arguments


def register_operator(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> None:
    """Register ``flce::name``: its implementation, its fake implementation and, if there is one, its derivative."""
    torch.library.define(f"flce::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"flce::{name}", "CompositeExplicitAutograd", implementation)
    torch.library.register_fake(f"flce::{name}", fake)
    if backward is None or setup_context is None:
        return

    def prepare(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        register_skipped_frames()
        setup_context(ctx, inputs, output)

    torch.library.register_autograd(f"flce::{name}", skip_frame_and_callees(backward), setup_context=prepare)


def to_json(constants: Mapping[str, Any], **records: Any) -> str:
    """Return constants and dataclasses of constants (or None), by name, as one argument of an operator: JSON that
    `from_json` decodes."""
    encoded = {
        name: None if record is None else {f.name: specialize(getattr(record, f.name)) for f in fields(record)}
        for name, record in records.items()
    }
    return _encode({**constants, **encoded})


def _encode(values: dict[str, Any]) -> str:
    return _encoder.encode(values)


_encoder = json.JSONEncoder(default=str)  # `str` encodes dtypes
_encode._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result


@functools.lru_cache(maxsize=1024)
def from_json(text: str, **kinds: Any) -> Mapping[str, Any]:
    """Return the values that `to_json` encoded, by name. `kinds`: the classes of the dataclasses."""
    values = json.loads(text)
    decoded = {name: _decode_value(value) for name, value in values.items()}
    for name, kind in kinds.items():
        if values[name] is not None:
            decoded[name] = kind(**{field: _decode_value(value) for field, value in values[name].items()})
    return decoded


def _decode_value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    is_dtype = isinstance(value, str) and value.startswith("torch.")
    return getattr(torch, value.removeprefix("torch.")) if is_dtype else value


# ---------------------------------------------------------------------------------------------------------
# FLOP formulas

Formula = Callable[..., int]

_formulas: dict[Any, Formula] = {}


def register_formula(name: str, formula: Formula) -> None:
    """Register the FLOP count of ``flce::name``: ``formula(*arguments, out_val=result)``."""
    _formulas[getattr(torch.ops.flce, name)] = formula
    _register_formulas()


def update_active_counters() -> None:
    """Register the formulas in active FLOP counters, before an operator is called.

    Importing PyTorch's counter imports Triton, which takes as long as all other imports of flce together, so flce does
    not import it. A counter that was imported after flce has copied PyTorch's formulas when it was constructed.
    """
    if not private.len_torch_dispatch_stack() or not _register_formulas():
        return
    for mode in private.dispatch_modes():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.update(_formulas)


def _register_formulas() -> bool:
    """Register the formulas with PyTorch. Return True if the module of the counter is imported."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return False
    for packet, formula in _formulas.items():
        if packet not in module.flop_registry:
            module.register_flop_formula(packet, get_raw=True)(formula)
    return True
