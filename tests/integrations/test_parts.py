"""Tests of plugins for trainers that the tests do not install, with simulated classes of the trainers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("typer", reason="the scripts' command line")
pytest.importorskip("transformers")

import flce
from flce.huggingface import FlceCallback
from flce.testing import tiny_model

Part = Callable[..., Any]


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Part:
    """Return a function that imports a plugin with a simulated module: its name and the names in it."""

    def load(name: str, simulated: str, **names: Any) -> Any:
        packages = simulated.split(".")
        for end in range(len(packages)):
            package = ".".join(packages[: end + 1])
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[simulated]).update(names)
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        return module

    return load


def test_axolotl_s_plugin_patches_the_model(part: Part) -> None:
    plugin = part("axolotl_plugin", "axolotl.integrations.base", BasePlugin=object).FlcePlugin()
    model = tiny_model()
    plugin.post_model_load({}, model)
    assert flce.is_patched(model)


def test_ms_swift_s_plugin_registers_the_callback(part: Part) -> None:
    callbacks: dict[str, Callable[..., object]] = {"lisa": lambda args, trainer: None}
    part("swift_plugin", "swift.callbacks", callbacks_map=callbacks)
    assert callbacks.keys() == {"lisa", "flce"}
    assert isinstance(callbacks["flce"]("args", "trainer"), FlceCallback)


class Decoder(nn.Module):
    """Simulation of the end of torchtune's `TransformerDecoder`."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(8), output

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(hidden)).float()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.unembed(hidden)


class TiedLinear:
    """Simulation of torchtune's `TiedLinear`, which is not a module."""

    def __init__(self, tied_module: nn.Module) -> None:
        self.tied_module: Any = tied_module

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.tied_module.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_torchtune_s_loss(tied: bool) -> None:
    from torchtune_loss import FlceLoss

    torch.manual_seed(0)
    layer = nn.Embedding(20, 8) if tied else nn.Linear(8, 20, bias=False)
    model = Decoder(TiedLinear(layer) if tied else layer)
    names = model.state_dict().keys()
    hidden, target = torch.randn(2, 5, 8), torch.randint(20, (2, 5))
    target[0, :3] = 7
    expected = F.cross_entropy(model(hidden).flatten(0, 1), target.flatten(), ignore_index=7)
    gradients = torch.autograd.grad(expected, [layer.weight, model.norm.weight])

    loss = FlceLoss(ignore_index=7)
    loss.set_model_output(model)
    assert model(hidden).shape == hidden.shape
    assert model.state_dict().keys() == names  # checkpoints do not change
    actual = loss(model(hidden), target)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, [layer.weight, model.norm.weight]), gradients)
    del model.unembed
    assert model(hidden).shape == (2, 5, 20)


@pytest.mark.parametrize(
    "output", [nn.Linear(8, 20), nn.Sequential(nn.Linear(8, 20, bias=False))], ids=["bias", "other"]
)
def test_torchtune_s_loss_refuses_other_heads(output: nn.Module) -> None:
    from torchtune_loss import FlceLoss

    with pytest.raises(TypeError, match=r"expected a plain nn\.Linear without bias, or TiedLinear"):
        FlceLoss().set_model_output(Decoder(output))
