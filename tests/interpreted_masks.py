"""A fix for masks under Triton's interpreter: a comparison of scalars, broadcast to a tile, becomes a tile of integers.

Loads and stores of Triton 3.9 reject such a mask ("mask has unsupported dtype"). Earlier versions cast the mask.
"""

from __future__ import annotations

from typing import Any


def fix_interpreter() -> None:
    """Convert scalar comparisons to tiles of booleans, for the rest of this process."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    builder: Any = interpreter.InterpreterBuilder
    create_splat = builder.create_splat

    def splat(self: Any, shape: Any, value: Any) -> Any:
        if value.data.dtype == bool:  # the handle has the dtype of the compared scalars
            value = interpreter.TensorHandle(value.data, tl.int1)
        return create_splat(self, shape, value)

    builder.create_splat = splat
