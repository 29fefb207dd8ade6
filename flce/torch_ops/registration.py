"""Registration of custom operators, and conversion of dataclasses of constants to operator arguments."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from flce.core.numbers import specialize
from flce.torch_ops.frames import register_skipped_frames, skip_frame_and_callees


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


def to_json(*records: Any) -> str:
    """Return dataclasses of constants as one argument of an operator: JSON that `from_json` decodes."""
    return _encode([{f.name: specialize(getattr(record, f.name)) for f in fields(record)} for record in records])


def _encode(values: Any) -> str:
    return _encoder.encode(values)


_encoder = json.JSONEncoder(default=str)  # `str` encodes dtypes
_encode._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result


@functools.lru_cache(maxsize=1024)
def from_json(text: str, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the dataclasses that `to_json` encoded. `kinds`: their classes."""
    pairs = zip(kinds, json.loads(text), strict=True)
    return tuple(kind(**{name: _decode_value(value) for name, value in values.items()}) for kind, values in pairs)


def _decode_value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    is_dtype = isinstance(value, str) and value.startswith("torch.")
    return getattr(torch, value.removeprefix("torch.")) if is_dtype else value
