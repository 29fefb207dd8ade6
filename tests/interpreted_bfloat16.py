"""A fix for bfloat16 under Triton's interpreter, which multiplies the bits as integers, truncates when it rounds, and
has no conversion from float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def fix_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute products in float32 and round to nearest, as on a GPU."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert: Any = interpreter._convert_float
    create_dot: Any = interpreter.InterpreterBuilder.create_dot
    cast: Any = interpreter.InterpreterBuilder.cast_impl

    def rounded(x: Any, source: Any, result: Any, mode: Any) -> Any:
        if source == tl.float32 and result == tl.bfloat16:
            bits = np.ascontiguousarray(x).view(np.uint32)
            up = bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)
            x = np.where(np.isfinite(x), up & 0xFFFF0000, bits).astype(np.uint32).view(np.float32)
        return convert(x, source, result, mode)

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle(convert(x.data, tl.bfloat16, tl.float32, None).view("float32"), tl.float32)

    def cast_in_steps(self: Any, x: Any, result: Any) -> Any:
        if (x.dtype.scalar, result.scalar) == (tl.float64, tl.bfloat16):
            x = interpreter.TensorHandle(x.data.astype(np.float32), tl.float32)
        return cast(self, x, result)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_in_steps)
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: create_dot(self, widened(a), widened(b), *rest),
    )
