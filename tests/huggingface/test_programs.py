"""Programs that are made of a patched model: they run stock code, also where flce is not installed."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flce
from flce.huggingface import patch_model
from tests.helpers import skip_where_old_transformers_fails

IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
Build = Callable[..., Any]
Calls = list[dict[str, Any]]


class Returned(nn.Module):
    """The logits of a model, and its loss."""

    def __init__(self, model: Any, labels: bool) -> None:
        super().__init__()
        self.model, self.labels = model, labels

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        outputs = self.model(input_ids=ids, labels=ids if self.labels else None, use_cache=False)
        return (outputs.logits, outputs.loss) if self.labels else (outputs.logits,)


with_labels = pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
in_training = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


@with_labels
@in_training
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export(strict: bool, training: bool, labels: bool, build: Build, fused_calls: Calls) -> None:
    torch.compiler.reset()
    stock = build("Llama", num_hidden_layers=1).train(training)
    patched = patch_model(copy.deepcopy(stock), on_materialize="raise")
    program = torch.export.export(Returned(patched, labels).train(training), (IDS,), strict=strict)
    expected = Returned(stock, labels)(IDS)
    found = program.module()(IDS)
    torch.testing.assert_close(found, expected)
    assert {type(each) for each in found} == {Tensor}
    assert not fused_calls
    assert flce.report(patched).forwards == 0
    assert "flce" not in str(program.graph)
    # As nothing was decided, the next call is fused, and its gradients are stock's.
    for model in (stock, patched):
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert len(fused_calls) == 1
    for want, got in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-5)


def test_an_exported_program_needs_no_flce(build: Build, tmp_path: Path) -> None:
    torch.compiler.reset()
    model = build("Llama", num_hidden_layers=1)
    exported = tmp_path / "stock.pt2"
    skip_where_old_transformers_fails(
        lambda: torch.export.save(torch.export.export(Returned(model, False), (IDS,)), exported)
    )
    patch_model(model)
    torch.export.save(torch.export.export(Returned(model, False), (IDS,)), tmp_path / "program.pt2")
    script = (
        "import sys, torch; sys.modules['flce'] = None\n"
        f"program = torch.export.load({str(tmp_path / 'program.pt2')!r})\n"
        f"print(program.module()(torch.tensor({IDS.tolist()}))[0].shape)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "[2, 9, 97]" in done.stdout, done.stderr


@with_labels
@in_training
@pytest.mark.parametrize("earlier", [False, True], ids=["first call", "later call"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace(earlier: bool, training: bool, labels: bool, build: Build, fused_calls: Calls) -> None:
    stock = build("Llama", num_hidden_layers=1).train(training)
    skip_where_old_transformers_fails(lambda: torch.jit.trace(Returned(stock, labels), (IDS,)))
    patched = patch_model(copy.deepcopy(stock), on_materialize="raise")
    if earlier:
        patched(input_ids=IDS, labels=IDS)
    fused_calls.clear()
    before = (patched._flce.watch_products, flce.report(patched))
    # The check calls the model itself, and reads its logits.
    traced = torch.jit.trace(Returned(patched, labels), (IDS,), check_trace=not labels)
    torch.testing.assert_close(traced(IDS), Returned(stock, labels)(IDS))
    assert not fused_calls
    assert (patched._flce.watch_products, flce.report(patched)) == before
    for model in (stock, patched):
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert len(fused_calls) == 1
    for want, got in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_checks_itself(build: Build) -> None:
    """With a call that is not traced, whose logits are lazy."""
    model = build("Llama", num_hidden_layers=1)
    skip_where_old_transformers_fails(lambda: torch.jit.trace(Returned(model, True), (IDS,)))
    patch_model(model, on_materialize="ignore")
    logits, loss = torch.jit.trace(Returned(model, True), (IDS,))(IDS)
    torch.testing.assert_close(logits, build("Llama", num_hidden_layers=1)(input_ids=IDS).logits)
    loss.backward()
    assert model.lm_head.weight.grad is not None
