"""A fix for E4M3 under Triton's interpreter, whose cast loses the carry of a rounded mantissa: 500 becomes 256."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def fix_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round float32 to E4M3 as PyTorch does. Numbers from 464 on become NaN there, and 448 on a GPU."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert: Any = interpreter._convert_float

    def rounded(x: Any, source: Any, result: Any, mode: Any) -> Any:
        if source != tl.float32 or result != tl.float8e4nv:
            return convert(x, source, result, mode)
        values = torch.from_numpy(np.ascontiguousarray(x).view(np.float32))
        assert not (values.abs() >= 464.0).any()
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
