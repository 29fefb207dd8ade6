"""Frames that ``torch.compile`` leaves to Python. Where a graph is being traced they are traced like any other."""

from __future__ import annotations

import contextlib
from types import CodeType
from typing import Any, TypeVar

from flce.core import private

FunctionT = TypeVar("FunctionT", bound=Any)

# Frames that the compiler has not been told of yet, and whether what they call is left to Python too.
_unmarked: list[tuple[CodeType, bool]] = []


def skip_frame(function: FunctionT) -> FunctionT:
    """The function's own frame is never the beginning of a graph. What it calls may be. See `mark_frames`."""
    _unmarked.append((function.__code__, False))
    return function


def skip_frame_and_callees(function: FunctionT) -> FunctionT:
    """Neither the function's own frame nor what it calls is ever the beginning of a graph. See `mark_frames`."""
    _unmarked.append((function.__code__, True))
    return function


def mark_frames() -> None:
    """Tell the compiler of the functions that were decorated: at the first use, not at the import, of this package.

    What torch.compiler.disable does in the end, without the second that importing torch._dynamo takes.
    """
    while _unmarked:
        with contextlib.suppress(IndexError):  # another thread may take the last one
            private.skip_frames(*_unmarked.pop())


def can_break_graph() -> bool:
    """Within a trace: whether the compiler may end the graph here, rather than fail (``fullgraph=True``).

    The compiler calls this while it traces, and takes the result for a constant.
    """
    translator = private.current_translator()
    if translator is None:
        return False
    return not (translator.one_graph or translator.error_on_graph_break or is_transformed())


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is running; within a trace, whether this code is traced for one."""
    return private.peek_interpreter_stack() is not None


def is_in_transform() -> bool:
    """Whether this code runs in a transform of ``torch.func`` or in ``torch.autograd.forward_ad.dual_level()``."""
    return bool(private.forward_ad._current_level >= 0) or private.peek_interpreter_stack() is not None


def is_in_forward_ad() -> bool:
    """Whether this code runs within ``torch.autograd.forward_ad.dual_level()``."""
    return bool(private.forward_ad._current_level >= 0)


def is_exported() -> bool:
    """Whether ``torch.export`` makes a program of this code: PyTorch 2.11 says so of any graph when asked in public."""
    return bool(private.is_exporting())


for _function in (can_break_graph, is_transformed, is_in_transform, is_in_forward_ad, is_exported):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result
