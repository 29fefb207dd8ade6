"""Comparisons of TRL's trainers with `flce.huggingface.trl.install()` and with TRL's kernel."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("trl", minversion="1.16", reason="it is in the extra `trainers`")
pytest.importorskip("typer", reason="the scripts' command line")

import flce
from demo import tiny_tokenizer, trl_installed
from flce.huggingface import FlceCallback, NotFusedWarning
from flce.huggingface.lazy import state as lazy_state
from tests.integrations import trl_trainers as trainers
from tests.integrations.trl_trainers import Run, create_model, train

STEPS = min(20, int(os.environ.get("RECIPE_STEPS", "3")))
DIVERGENCE = {"beta": 0.1, "temperature": 0.7, "num_iterations": 2}


def smoothed_sum(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return the loss of a user's function."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.2)
    return loss / num_items_in_batch


def lora(**more: Any) -> Any:
    peft = pytest.importorskip("peft", reason="it is in the extra `trainers`")
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **more)


def mixture() -> Any:
    return create_model(architecture="Mixtral", num_local_experts=4, num_experts_per_tok=2)


Case = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]
CASES: dict[str, Case] = {
    "SFT": (trainers.sft, lambda: {"gradient_accumulation_steps": 2}),
    "SFT, DFT": (trainers.sft, lambda: {"loss_type": "dft"}),
    "DPO": (trainers.dpo, lambda: {"use_weighting": True, "precompute_ref_log_probs": True}),
    "KTO": (trainers.kto, dict),
    "GRPO, divergence": (trainers.grpo, lambda: {**DIVERGENCE, "loss_type": "grpo"}),
    "GRPO, entropies": (trainers.grpo, lambda: {"loss_type": "dapo", "entropy_coef": 0.1, "top_entropy_quantile": 0.5}),
    "GRPO, DAPO": (trainers.grpo, lambda: {**DIVERGENCE, "loss_type": "dapo"}),
    "GRPO, CISPO": (trainers.grpo, lambda: {"loss_type": "cispo", "epsilon_high": 2.0, "num_iterations": 2}),
    "RLOO": (trainers.rloo, lambda: {"beta": 0.1, "temperature": 0.7, "learning_rate": 2e-4}),
    "label smoothing": (trainers.sft, lambda: {"label_smoothing_factor": 0.1}),
    "a loss of the user's": (trainers.sft, lambda: {"common": {"compute_loss_func": smoothed_sum}}),
    "experts": (
        trainers.sft,
        lambda: {"model": mixture(), "router_aux_loss_coef": 0.3, "gradient_accumulation_steps": 2},
    ),
    "an adapter": (trainers.sft, lambda: {"common": {"peft_config": lora()}}),
    "a saved head": (trainers.sft, lambda: {"common": {"peft_config": lora(modules_to_save=["lm_head"])}}),
    "a saved head, DPO": (trainers.dpo, lambda: {"common": {"peft_config": lora(modules_to_save=["lm_head"])}}),
    "checkpointing": (trainers.sft, lambda: {"gradient_checkpointing": True}),
    "padding-free": (trainers.sft, lambda: {"packing": True, "packing_strategy": "wrapped"}),
    "a head in float32": (trainers.grpo, lambda: {"cast_lm_head_to_fp32": True}),
}


def saved(folder: Path) -> Any:
    """Return a saved model, which its trainer can load again as a reference."""
    from transformers import AutoModelForCausalLM

    create_model().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def assert_alike(stock: Run, fused: Run, *, tolerance: float = 1e-5, least: float = 0.0) -> None:
    """Compare logged metrics to 1e-4, and gradients to a share of their norm, in each step."""
    assert len(stock.logs) == len(fused.logs) > 1
    for expected, log in zip(stock.logs, fused.logs, strict=True):
        assert log == pytest.approx(expected, rel=1e-4, abs=1e-4)
    for theirs, ours in zip(stock.gradients, fused.gradients, strict=True):
        assert theirs.keys() == ours.keys()
        for name, gradient in theirs.items():
            assert (ours[name] - gradient).norm() <= tolerance * gradient.norm() + least, name


@pytest.mark.usefixtures("fresh_accelerator", "fail_on_materialize")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_trains_alike(case: str, tmp_path: Path) -> None:
    create, more = CASES[case]
    runs: list[Run] = []
    for fused in (False, True):
        torch.manual_seed(0)
        settings = {"model": saved(tmp_path / "model"), "replay": runs[0] if runs else None, **more()}
        trainer, run = train(create, str(tmp_path), STEPS, fused=fused, **settings)
        runs.append(run)
    assert_alike(*runs)
    assert runs[0].completions[:1] == runs[1].completions[:1]  # flce does not change generation
    report = flce.report(trainer.model)
    assert report.fused >= STEPS
    assert not report.materialized
    assert not report.stock
    assert any(torch.count_nonzero(gradient) for gradient in runs[0].gradients[-1].values())
    heads = [name for name in runs[1].gradients[0] if "lm_head" in name]
    assert len(heads) == (case != "an adapter")


@pytest.mark.usefixtures("fresh_accelerator", "fail_on_materialize")
@pytest.mark.parametrize(
    "create, arguments",
    [(trainers.distillation, {"beta": 0.5}), (trainers.distillation, {"beta": 1.0}), (trainers.gkd, {"beta": 0.3})],
    ids=["distillation", "reverse", "GKD"],
)
def test_distillation(create: Any, arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers compute TRL's losses, entropies and gradients with `flce.linear_divergence`."""
    calls = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["kind"])
        return flce.linear_divergence(*args, **kwargs)

    for module in ("flce.huggingface.trl", "flce.huggingface.lazy.divergences"):
        monkeypatch.setattr(f"{module}.linear_divergence", recorded)
    _, theirs = train(create, str(tmp_path), 2, fused=False, **arguments)
    assert not calls
    _, ours = train(create, str(tmp_path), 2, fused=True, replay=theirs, **arguments)
    assert len(calls) >= 2
    assert_alike(theirs, ours, tolerance=1e-4, least=1e-9)


@pytest.mark.usefixtures("fresh_accelerator", "fail_on_materialize")
def test_evaluation(tmp_path: Path) -> None:
    """Compare losses, entropies and accuracies with TRL, also if the callback patches the model first."""
    metrics = []
    for callbacks in ([], [FlceCallback()]):
        trainer, _ = train(
            trainers.sft, str(tmp_path), 1, fused=bool(callbacks), eval_strategy="steps", eval_steps=1,
            common={"callbacks": callbacks},
        )  # fmt: skip
        logs = trainer.state.log_history
        metrics.append(
            [{k: v for k, v in log.items() if "loss" in k or "entropy" in k or "accuracy" in k} for log in logs]
        )
    for ours in metrics[1:]:
        for log, theirs in zip(ours, metrics[0], strict=True):
            assert log == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    assert any("eval_entropy" in log for log in metrics[0])


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize(
    "loss_type, before, calls",
    [("nll", False, "fused_linear_cross_entropy"), ("dft", False, "linear_logprobs"), ("nll", True, None)],
    ids=str,
)
def test_the_function_of_a_step(
    loss_type: str, before: bool, calls: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the called function: one loss or losses of tokens. A trainer created before `install` has TRL's head."""
    called = []

    def record_call(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return function(*args, **kwargs)

    for name in ("fused_linear_cross_entropy", "linear_logprobs"):
        monkeypatch.setattr(lazy_state, name, functools.partial(record_call, name, getattr(lazy_state, name)))
    with trl_installed(not before):
        common = {"model": create_model(), "processing_class": tiny_tokenizer()}
        trainer = trainers.sft(str(tmp_path), 1, common, loss_type=loss_type)
    names: set[str] = set()
    trainer.model.model.register_forward_pre_hook(lambda _, args, kwargs: names.update(kwargs), with_kwargs=True)
    with trl_installed(True):
        trainer.train()
    assert called == ([] if calls is None else [calls])
    assert "attention_mask" in names
    assert not names & {"summed", "labels", "num_items_in_batch", "fused_lm_head"}


@pytest.mark.usefixtures("fresh_accelerator", "fail_on_materialize")
@pytest.mark.filterwarnings("error::flce.huggingface.NotFusedWarning")
@pytest.mark.parametrize("loss_type, graphs", [("nll", 1), ("dft", 2)])
def test_compiled(loss_type: str, graphs: int, tmp_path: Path) -> None:
    runs = []
    for fused in (False, True):
        model = create_model()
        if graphs == 2:
            model.model.norm.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        compiled: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager", "loss_type": loss_type}
        trainer, run = train(trainers.sft, str(tmp_path), 2, fused=fused, model=model, **compiled)
        runs.append(run)
    assert_alike(*runs)
    report = flce.report(trainer.model)
    assert not report.stock
    assert not report.materialized


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize(
    "create, fused",
    [(trainers.sft, True), *((getattr(trainers, name), False) for name in ("sft", "dpo", "kto", "grpo", "rloo"))],
)
def test_trl_bypasses_the_head(create: Callable[..., Any], fused: bool, tmp_path: Path) -> None:
    """Check the warning after the first step if a patched model is not fused because `install` was not called."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = train(create, str(tmp_path), 2, fused=fused, common={"callbacks": [FlceCallback()]})
    messages = [str(w.message) for w in caught if w.category is NotFusedWarning]
    assert len(messages) == (0 if fused else 1)
    assert all(
        "another kernel instead of the head" in text and "flce.huggingface.trl.install()" in text for text in messages
    )
    assert (flce.report(trainer.model).fused > 0) == fused
