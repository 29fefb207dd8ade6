"""Heads whose weight is made by a parametrisation, or whose class something else changes too."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from flce.huggingface import is_patched, patch_model, unpatch_model

IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
Build = Callable[..., Any]
Calls = list[dict[str, Any]]


class Dropped(nn.Module):
    """A parametrisation that differs whenever it is evaluated."""

    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.dropout(weight, 0.5)


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "dropout": lambda head: parametrize.register_parametrization(head, "weight", Dropped()),
}


def step(model: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss and all gradients."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(stock: Any, patched: Any, calls: Calls, fused: int = 1) -> None:
    before = len(calls)
    torch.testing.assert_close(step(patched), step(stock), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(patched.named_buffers()), dict(stock.named_buffers()))
    assert len(calls) == before + fused


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_patching_evaluates_nothing(name: str, build: Build, fused_calls: Calls) -> None:
    """Not when it is patched, nor beside the model's own evaluation in each forward."""
    stock = build("Llama")
    PARAMETRIZATIONS[name](stock.lm_head)
    patched = copy.deepcopy(stock)
    state, random = copy.deepcopy(patched.state_dict()), torch.get_rng_state()
    patch_model(patched)
    torch.testing.assert_close(dict(patched.state_dict()), dict(state), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    for _ in range(3):
        assert_same(stock, patched, fused_calls)


def test_stock_code_evaluates_once(build: Build) -> None:
    """Where the head runs stock code, here in a transform."""
    stock = build("Llama")
    parametrizations.spectral_norm(stock.lm_head)
    patched = patch_model(copy.deepcopy(stock))
    for model in (stock, patched):
        torch.func.grad(lambda scale, model=model: scale * model(input_ids=IDS, labels=IDS).loss)(torch.tensor(1.0))
    torch.testing.assert_close(dict(patched.named_buffers()), dict(stock.named_buffers()), rtol=0, atol=0)


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("order", ["added, patched", "patched, added"])
@pytest.mark.parametrize("unpatched", ["before", "after"])
def test_removal(unpatched: str, order: str, leave: bool, build: Build, fused_calls: Calls) -> None:
    def add(model: Any) -> None:
        parametrize.register_parametrization(model.lm_head, "weight", _Doubled())

    def remove(model: Any) -> None:
        parametrize.remove_parametrizations(model.lm_head, "weight", leave_parametrized=leave)

    stock, patched = build("Llama"), build("Llama")
    for change in (add, patch_model) if order == "added, patched" else (patch_model, add):
        change(patched)
    add(stock)
    assert_same(stock, patched, fused_calls)
    if unpatched == "before":
        unpatch_model(patched)
        assert_same(stock, patched, fused_calls, 0)
    for model in (stock, patched):
        remove(model)
    assert_same(stock, patched, fused_calls, unpatched == "after")
    unpatch_model(patched)
    assert type(patched.lm_head) is nn.Linear
    assert_same(stock, patched, fused_calls, 0)
    assert_same(stock, patch_model(patched), fused_calls)


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_copies_of_a_parametrized_head(build: Build, fused_calls: Calls) -> None:
    """They share a class with the original, which must not be changed by what is done to one of them."""
    stock = build("Llama")
    parametrize.register_parametrization(stock.lm_head, "weight", _Doubled())
    patched = patch_model(copy.deepcopy(stock))
    other = copy.deepcopy(patched)
    assert not is_patched(stock)
    assert_same(stock, patched, fused_calls)
    parametrize.remove_parametrizations(unpatch_model(patched).lm_head, "weight")
    assert_same(stock, other, fused_calls)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamic_quantisation(build: Build) -> None:
    """It asks for the very class of a layer, so a model is to be unpatched first."""
    quantized = []
    for patched in (False, True):
        model = build("Llama").eval()
        if patched:
            unpatch_model(patch_model(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        assert "quantized" in type(model.lm_head).__module__
        with torch.no_grad():
            quantized.append(model(input_ids=IDS).logits)
    assert torch.equal(*quantized)
