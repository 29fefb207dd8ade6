"""Arguments that are numbers or dtypes: Python numbers of what PyTorch's own functions take for one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_int(name: str, value: Any, expected: str = "an int") -> int:
    """An int, or an integer of NumPy or of a 0-d tensor, as an int.

    Raises:
        TypeError: anything else. A bool is none, as for PyTorch.
    """
    if type(value) is int:
        return value if not torch.compiler.is_compiling() else specialize(value)
    number = _python_number(value)
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        raise TypeError(f"{name} must be {expected}, got {_describe(value)}")
    return specialize(number)


def specialize(value: Any) -> Any:
    """The number itself where `torch.compile` has made a symbol of it: a graph is for one value of each option."""
    if type(value) not in (int, float, torch.SymInt) or not torch.compiler.is_compiling():
        return value
    return torch.fx.experimental.symbolic_shapes.guard_scalar(value)


def check_float(name: str, value: Any, *, may_be_bool: bool = False) -> float:
    """An int or float, or one of NumPy or of a 0-d tensor, as a float.

    Raises:
        TypeError: anything else, and a tensor that requires grad: there would be none for it.
    """
    number = _python_number(value)
    is_bool = isinstance(number, bool)
    # The symbols are those of a graph that is being traced.
    if not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)) or (is_bool and not may_be_bool):
        raise TypeError(f"{name} must be a number, got {_describe(value)}")
    return float(number)


def check_bool(name: str, value: Any) -> None:
    """TypeError for anything but a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {_describe(value)}")


def check_dtype(name: str, value: Any, expected: str = "a torch.dtype") -> None:
    """TypeError for anything but a dtype. Of a string that names one it says which."""
    if isinstance(value, torch.dtype):
        return
    named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    hint = f": give {named}" if isinstance(named, torch.dtype) else ""
    raise TypeError(f"{name} must be {expected}, got {value!r}{hint}")


def _python_number(value: Any) -> Any:
    """The number of a NumPy scalar, which nothing here imports, or of a 0-d tensor; anything else as it is."""
    if isinstance(value, (int, float)) or not hasattr(value, "item") or getattr(value, "shape", None) != ():
        return value
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            "flce asks for the value of a number that is no Python number, which a graph has none of"
        )
    return value if getattr(value, "requires_grad", False) else value.item()


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    grad = " that requires grad" if value.requires_grad else ""
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}{grad}"
