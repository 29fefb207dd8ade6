"""Masks under Triton's interpreter, where a comparison of scalars, broadcast to a tile, is a tile of integers.

Loads and stores of Triton 3.9 take no such mask ("mask has unsupported dtype"); those of before cast it.
"""

from __future__ import annotations

from typing import Any


def fix_interpreter() -> None:
    """For good: nothing else changes by it."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    builder: Any = interpreter.InterpreterBuilder
    create_splat = builder.create_splat

    def splat(self: Any, shape: Any, value: Any) -> Any:
        if value.data.dtype == bool:  # the handle has the dtype of what was compared
            value = interpreter.TensorHandle(value.data, tl.int1)
        return create_splat(self, shape, value)

    builder.create_splat = splat
