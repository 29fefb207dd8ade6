"""Exported and traced programs of a patched model. They run stock code and do not need flce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flce.huggingface import patch_model
from tests.helpers import parametrize_pairs, skip_where_old_transformers_fails
from tests.huggingface.scripts import IDS, Around, Build, Compare
from tests.processes import run_python

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def logits_and_loss(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    outputs = model(input_ids=ids, labels=ids, use_cache=False)
    return outputs.logits, outputs.loss


def logits_only(model: Any, ids: Tensor) -> tuple[Tensor]:
    return (model(input_ids=ids, use_cache=False).logits,)


@parametrize_pairs(strict=[True, False], training=[True, False], returned=[logits_and_loss, logits_only])
def test_export(strict: bool, training: bool, returned: Any, compare: Compare) -> None:
    """After an export, the next call is fused, and its gradients equal stock's."""
    script = """
        torch.compiler.reset()
        model = patch(build("Llama", num_hidden_layers=1).train(training), on_materialize="raise")
        around = Around(model, returned).train(training)
        if patched:
            program = torch.export.export(around, (IDS,), strict=strict)
            found = program.module()(IDS)
            assert "flce" not in str(program.graph)
        else:
            found = around(IDS)
        note(found)
        assert {type(each) for each in found} == {Tensor}
        fused(0)
        assert flce.report(model).forwards == 0
        step()
        fused(1)"""
    compare(script, strict=strict, training=training, returned=returned)


def test_an_exported_program_needs_no_flce(build: Build, tmp_path: Path) -> None:
    torch.compiler.reset()
    model = build("Llama", num_hidden_layers=1)
    exported = tmp_path / "stock.pt2"
    skip_where_old_transformers_fails(
        lambda: torch.export.save(torch.export.export(Around(model, logits_only), (IDS,)), exported)
    )
    patch_model(model)
    torch.export.save(torch.export.export(Around(model, logits_only), (IDS,)), tmp_path / "program.pt2")
    script = (
        "import sys, torch; sys.modules['flce'] = None\n"
        f"program = torch.export.load({str(tmp_path / 'program.pt2')!r})\n"
        f"print(program.module()(torch.tensor({IDS.tolist()}))[0].shape)"
    )
    assert "[2, 9, 97]" in run_python("-c", script).stdout


@parametrize_pairs(earlier=[False, True], training=[True, False], returned=[logits_and_loss, logits_only])
def test_jit_trace(earlier: bool, training: bool, returned: Any, build: Build, compare: Compare) -> None:
    stock = Around(build("Llama", num_hidden_layers=1).train(training), returned)
    skip_where_old_transformers_fails(lambda: torch.jit.trace(stock, (IDS,)))
    script = """
        model = patch(build("Llama", num_hidden_layers=1).train(training), on_materialize="raise")
        if earlier:
            model(input_ids=IDS, labels=IDS)
            fused(1)
        around = Around(model, returned)
        if patched:
            before = model._flce.has_vocabulary_products, flce.report(model)
            # The check calls the model itself, and reads its logits.
            around = torch.jit.trace(around, (IDS,), check_trace=returned is logits_only)
        note(around(IDS))
        fused(0)
        assert not patched or (model._flce.has_vocabulary_products, flce.report(model)) == before
        step()
        fused(1)"""
    compare(script, earlier=earlier, training=training, returned=returned)
