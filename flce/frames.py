"""Frames that ``torch.compile`` leaves to Python. Where a graph is being traced they are traced like any other."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

# What torch.compiler.disable and torch._dynamo do in the end, without the second that importing those takes.
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd import forward_ad

FunctionT = TypeVar("FunctionT", bound=Any)


def not_compiled(function: FunctionT) -> FunctionT:
    """The function's own frame is never the beginning of a graph. What it calls may be."""
    return _marked(function, _FrameAction.DEFAULT)


def never_compiled(function: FunctionT) -> FunctionT:
    """Neither the function's own frame nor what it calls is ever the beginning of a graph."""
    return _marked(function, _FrameAction.SKIP)


def _marked(function: FunctionT, what_it_calls: _FrameAction) -> FunctionT:
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, what_it_calls))
    return function


def graph_may_end() -> bool:
    """Within a trace: whether the compiler may end the graph here, rather than fail (``fullgraph=True``).

    The compiler calls this while it traces, and takes the result for a constant.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator  # loaded: the compiler is running

    translator: Any = InstructionTranslator.current_tx()
    return not (translator.one_graph or translator.error_on_graph_break or is_transformed())


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is running; within a trace, whether this code is traced for one."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_differentiated_forward() -> bool:
    """Whether this code runs within ``torch.autograd.forward_ad.dual_level()``."""
    return bool(getattr(forward_ad, "_current_level", -1) >= 0)


for _function in (graph_may_end, is_transformed, is_differentiated_forward):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch._dynamo.assume_constant_result
