"""Checks of arguments that are numbers, bools or dtypes. Numbers of NumPy and 0-d tensors become Python numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_int(name: str, value: Any, expected: str = "an int") -> int:
    """Return an int, an integer of NumPy or an integer 0-d tensor as an int. Raise TypeError for any other value. A
    bool is not an int, as in PyTorch."""
    if type(value) is int:
        return value if not torch.compiler.is_compiling() else specialize(value)
    number = _python_number(value)
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        raise TypeError(f"{name} must be {expected}, got {_describe(value)}")
    return specialize(number)


def specialize(value: Any) -> Any:
    """Return the number for a symbol of `torch.compile`, any other value unchanged: a graph has constant options."""
    if type(value) not in (int, float, torch.SymInt) or not torch.compiler.is_compiling():
        return value
    return torch.fx.experimental.symbolic_shapes.guard_scalar(value)


def check_float(name: str, value: Any, *, may_be_bool: bool = False) -> float:
    """Return an int or a float, of Python, NumPy or a 0-d tensor, as a float. Raise TypeError for any other value, and
    for a tensor that requires grad, because it would get no gradient."""
    number = _python_number(value)
    is_bool = isinstance(number, bool)
    # While a graph is traced, numbers may be symbols.
    if not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)) or (is_bool and not may_be_bool):
        raise TypeError(f"{name} must be a number, got {_describe(value)}")
    return float(number)


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError if the value is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {_describe(value)}")


def check_dtype(name: str, value: Any, expected: str = "a torch.dtype") -> None:
    """Raise TypeError if the value is not a dtype. If it is the name of a dtype, the message contains the dtype."""
    if isinstance(value, torch.dtype):
        return
    named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    hint = f": give {named}" if isinstance(named, torch.dtype) else ""
    raise TypeError(f"{name} must be {expected}, got {value!r}{hint}")


def _python_number(value: Any) -> Any:
    """Return the number of a NumPy scalar (without importing NumPy) or of a 0-d tensor; other values unchanged."""
    if isinstance(value, (int, float)) or not hasattr(value, "item") or getattr(value, "shape", None) != ():
        return value
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            "flce reads the value of a number that is not a Python number, which is not possible in a graph"
        )
    return value if getattr(value, "requires_grad", False) else value.item()


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    grad = " that requires grad" if value.requires_grad else ""
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}{grad}"
