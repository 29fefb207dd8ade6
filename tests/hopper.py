"""Plans and fused products of Hopper GPUs, for tests that also run on other machines."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce import ChunkOptions
from flce.core import devices
from flce.core.devices import KNOWN_KINDS, load_profile
from flce.core.problem import LossSpec, Needs, accumulation_dtype
from flce.engine import case
from flce.engine.case import Case
from flce.planning import plan, search


def logits_dtypes_on_a_gpu(
    dtype: torch.dtype, device_type: str, options: ChunkOptions
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of logits and of their gradient on a GPU. Replaces `case.logits_dtypes` on the CPU."""
    return options.logits_dtype or accumulation_dtype(dtype), dtype


def plan_as_on_hopper(monkeypatch: pytest.MonkeyPatch, fused_products: bool = True) -> Iterator[None]:
    """Plan as on a Hopper GPU, also on the CPU, where half-precision logits are then possible. For fixtures."""
    if fused_products and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    for module in ("flce.ops.linear_operators", "flce.planning.plan", "tests.helpers"):
        monkeypatch.setattr(f"{module}.has_fused_products", lambda device: fused_products)
    monkeypatch.setattr(case, "logits_dtypes", logits_dtypes_on_a_gpu)
    clear_plans()
    yield
    clear_plans()


def clear_plans() -> None:
    """Clear the caches of plans, whose cases keep their dtypes."""
    search.plan_for_case.cache_clear()
    plan._cached_plan.cache_clear()


def fake_h100(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """Let PyTorch report an H100 with `memory` bytes. Clear the caches of device records."""
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=132,
        L2_cache_size=50 << 20,
        total_memory=memory,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: properties.name)
    monkeypatch.setattr(torch.version, "hip", None)
    clear_device_caches()


def clear_device_caches() -> None:
    """Clear the caches of device records, so that the next call reads PyTorch and the environment again."""
    load_profile.cache_clear()
    devices._gpu_record.cache_clear()
    clear_plans()


def misaligned(monkeypatch: pytest.MonkeyPatch, t: Tensor) -> Tensor:
    """Return a copy of `t` at an address that is not divisible by 16 bytes, and reduce COPY_BYTES.

    Descriptors cannot describe such operands. The product copies them, a weight in blocks of few classes.
    """
    monkeypatch.setattr("flce.backends.triton.product.COPY_BYTES", 256 * t.shape[-1] * 2)
    copy = t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)
    assert copy.data_ptr() % 16
    return copy


def case_on_hopper(
    tokens: int,
    hidden: int,
    vocab: int,
    *,
    grads: str = "xw",
    dtype: torch.dtype = torch.bfloat16,
    ranks: tuple[int, ...] = (),
    spec: LossSpec | None = None,
    **options: Any,
) -> Case:
    """Return the case of a call on a Hopper GPU, for plans that are not run."""
    adapters = (True,) * len(ranks)
    return Case(
        num_tokens=tokens,
        hidden_sizes=(hidden, *ranks),
        vocab_size=vocab,
        dtype=dtype,
        device_type="cuda",
        backend="triton",
        has_fused_products=True,
        device=KNOWN_KINDS["H200"]._replace(memory=None),
        spec=spec or LossSpec(),
        needs=Needs(("x" in grads, *adapters), ("w" in grads, *adapters), "b" in grads),
        options=ChunkOptions(**options),
    )
