"""Frames that ``torch.compile`` leaves to Python. While a graph is traced, these frames are traced like all others."""

from __future__ import annotations

import contextlib
from types import CodeType
from typing import Any, TypeVar

from flce.core import private

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
