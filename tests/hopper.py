"""Products with an epilogue, which are for Hopper, in tests that also run elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flce import case, planning


def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a fixture: plans as on such a GPU, on the CPU too, where logits of half precision are taken as well."""
    cuda = torch.cuda.is_available()
    if cuda and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    for module in ("flce.operators", "flce.planning", "tests.helpers"):
        monkeypatch.setattr(f"{module}.has_product", lambda device: True)
    if not cuda:
        monkeypatch.setattr(case, "logits_dtypes", lambda dtype, _, options: (options.logits_dtype or dtype, dtype))
    planning.make_plan.cache_clear()
    yield
    planning.make_plan.cache_clear()
