"""Tests of the GRPO benchmark: all contenders compute the same losses and gradients, and restore the model."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("trl", minversion="1.16", reason="it is in the extra `trainers`")

import flce
from benchmarks import grpo
from benchmarks.cases import Effort, StandIn, select_contenders, stand_ins
from benchmarks.contenders import TRL_UNUSED
from benchmarks.grpo import CONTENDERS, GRPO, OLD, PARTS, PRESETS, TRAINING, Completions, GrpoStep
from benchmarks.models import build
from flce.testing.problem import relative_error

CPU = torch.device("cpu")
CASE = PRESETS["tiny"]()[1][0]
HERE = [c.name for c in CONTENDERS if c.name != "liger" or importlib.util.find_spec("liger_kernel") is not None]


@pytest.fixture(scope="module")
def problem() -> tuple[Any, Completions]:
    model = build(CASE, CPU)
    return model, grpo.make_completions(CASE, model, CPU)


def step_of(name: str, problem: tuple[Any, Completions], part: str) -> GrpoStep:
    (contender,) = select_contenders(CONTENDERS, [name])
    return GrpoStep(*problem, part, contender)


def exact(model: Any, batch: Completions) -> tuple[Tensor, Tensor]:
    """Return the mean log-probability and the loss, from all logits in float64."""
    logits = model(input_ids=batch.ids, use_cache=False).logits.double()[:, CASE.prompt - 1 : -1]
    logprob = torch.log_softmax(logits / grpo.TEMPERATURE, -1).gather(2, batch.ids[:, CASE.prompt :, None])[..., 0]
    gains = []
    for row, advantage in enumerate(batch.advantages.double()):
        ratio = torch.exp(logprob[row] - batch.old[row].double())
        clipped = torch.minimum(ratio, 1.2 + 0 * ratio) if advantage > 0 else torch.maximum(ratio, 0.8 + 0 * ratio)
        gains.append(advantage * clipped)
    return logprob.detach().mean(), -torch.cat(gains).mean()


@pytest.mark.parametrize(
    "part, name", [(part, name) for part in PARTS for name in HERE if (part, name) != (OLD, "liger")]
)
def test_passes_are_exact(
    name: str, part: str, problem: tuple[Any, Completions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values, and the gradients of the training step, are exact."""
    if (name, part) == ("liger", OLD):
        pytest.skip("Liger has a loss only")
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)  # Liger compiles
    model, batch = problem
    logprob, loss = exact(model, batch)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    monkeypatch.setattr(type(model), "zero_grad", lambda self, **how: None)  # it would end the step
    step = step_of(name, problem, part)
    with step.contender.applied(model):
        step()
    monkeypatch.undo()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    assert step.loss is not None
    assert float(step.loss) == pytest.approx(float(logprob if part == OLD else loss.detach()), abs=1e-6)
    assert len(gradients) == (len(expected) if part == TRAINING else 0)
    for found, exact_gradient in zip(gradients, expected, strict=part == TRAINING):
        assert relative_error(found, exact_gradient) < 1e-5


def test_what_is_changed_is_put_back(problem: tuple[Any, Completions]) -> None:
    from trl.trainer import grpo_trainer

    model, _ = problem
    before, stock = dict(vars(model)), grpo_trainer.add_fused_lm_head
    for name in ("ours", "trl"):
        with step_of(name, problem, OLD).contender.applied(model):
            assert "forward" in vars(model)
            assert flce.is_patched(model) == (name == "ours")
            assert (grpo_trainer.add_fused_lm_head is not stock) == (name == "ours")
        assert vars(model) == before
        assert not flce.is_patched(model)
        assert grpo_trainer.add_fused_lm_head is stock


def test_ours_is_not_trls_kernel(problem: tuple[Any, Completions], monkeypatch: pytest.MonkeyPatch) -> None:
    """If a model cannot be patched, there are no figures."""
    from trl.trainer import utils

    import flce.huggingface.trl as integration

    monkeypatch.setattr(utils._ChunkedLogProbFunction, "forward", lambda *call: pytest.fail("TRL's kernel has run"))
    step = step_of("ours", problem, TRAINING)
    with step.contender.applied(problem[0]):
        step()

    def refuse(model: Any, options: Any) -> None:
        raise TypeError("a head of another kind")

    monkeypatch.setattr(integration, "patch_model", refuse)
    (result,) = GRPO.measure(CASE, CPU, Effort(1, 1.0), select_contenders(CONTENDERS, ["ours"])).results[:1]
    assert result.status == "failed"
    assert "NotFusedWarning: TRL's own kernel computes" in str(result.reason)


def test_trl_is_imported_without_packages_that_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed packages stay unchanged; stand-ins of missing packages are removed."""
    find, names = importlib.util.find_spec, ("pandas", "pyarrow")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find(name))
    there = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    for name in there:
        monkeypatch.delitem(sys.modules, name)
    with stand_ins(TRL_UNUSED):
        pandas, compute = (importlib.import_module(name) for name in ("pandas", "pyarrow.compute"))
        assert isinstance(pandas, StandIn)
        assert isinstance(compute, StandIn)
        assert isinstance(pandas.DataFrame, type)
        assert not hasattr(pandas, "__version__")
        assert not isinstance(sys.modules.get("datasets"), StandIn)
    assert not any(name.partition(".")[0] in names for name in sys.modules)


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
def test_contenders_agree_on_cuda(part: str) -> None:
    """Installed peers may fail."""
    case = replace(CASE, part=part, dtype="bfloat16", sequence=128, prompt=64)
    entry = GRPO.measure(case, torch.device("cuda"), Effort(2, 5.0))
    stock = entry.by_name("stock")
    for result in entry.results:
        if result.status == "ok" or result.family != "peer":
            assert result.status == "ok", (result.contender, result.reason)
            assert result.peak_bytes is not None
            assert result.loss == pytest.approx(stock.loss, abs=2e-3)
