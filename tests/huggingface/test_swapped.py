"""`torch.utils.swap_tensors` refuses tensors with weak references, which lazy logits keep of their views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flce


@pytest.mark.parametrize("read", [lambda logits, detached: logits.exp(), lambda logits, detached: detached.exp()])
def test_a_view_without_gradients_that_was_read(read: Callable[[Tensor, Tensor], Tensor], build: Any) -> None:
    stock, patched = build("Llama"), flce.patch_model(build("Llama"), on_materialize="ignore")
    ids = torch.arange(3, 12)[None]

    def swapped(model: Any) -> list[Tensor]:
        logits, other = model(input_ids=ids).logits, torch.zeros(1, 9, 97)
        detached = logits.detach()
        read(logits, detached)
        torch.utils.swap_tensors(other, detached)
        other[0, 3] = 7.0
        return [other, detached, logits]

    for wanted, found in zip(swapped(stock), swapped(patched), strict=True):
        torch.testing.assert_close(found.exp(), wanted.exp())
