"""Tests of Transformers' `Trainer` with a patched model: its options, evaluation and checkpoints."""

from __future__ import annotations

import functools
import tempfile
import warnings
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Transformers' Trainer needs it")
pytest.importorskip("typer", reason="the scripts' command line")

import demo  # noqa: E402
import flce  # noqa: E402
from flce.huggingface import (  # noqa: E402
    FlceCallback,
    MaterializedLogitsError,
    MaterializedLogitsWarning,
)
from flce.ops import gradient_accumulation  # noqa: E402
from flce.testing import tiny_model  # noqa: E402

STEPS = 3


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on one of several GPUs. On all of them `Trainer` uses nn.DataParallel, which gathers the logits of calls
    without labels (label smoothing) and of evaluations, and whose replicas raise errors of other types."""
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", min(1, torch.cuda.device_count()))


def make_trainer(
    patched: bool,
    folder: str,
    *,
    steps: int,
    model: Any = None,
    trainer: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Return a trainer of the tiny model. `arguments` are `TrainingArguments`, `trainer` arguments of `Trainer`."""
    return transformers.Trainer(
        model=tiny_model() if model is None else model,
        args=transformers.TrainingArguments(**{**demo.trainer_settings(folder, steps), **arguments}),
        train_dataset=demo.examples(4 * 50),
        eval_dataset=demo.examples(8, seed=1),
        **{"callbacks": [FlceCallback()] if patched else [], **(trainer or {})},
    )


def train(patched: bool, **arguments: Any) -> demo.Curve:
    return demo.record_curve(make_trainer, patched, **arguments)


def train_both(**arguments: Any) -> tuple[demo.Curve, demo.Curve]:
    stock, patched = (train(patch, **{"steps": STEPS, **arguments}) for patch in (False, True))
    assert not any(stock.fused)
    return stock, patched


def assert_agree(stock: demo.Curve, patched: demo.Curve, tolerance: float = 1e-5) -> None:
    assert demo.max_difference(stock, patched) <= tolerance
    assert all(patched.fused)


@pytest.mark.parametrize(
    "arguments",
    [
        # Micro-batches have different numbers of tokens. Each loss is divided by the number of tokens of the step.
        {"gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=lambda arguments: "-".join(arguments),
)
@pytest.mark.usefixtures("fail_on_materialize")
def test_same_losses_as_stock(arguments):
    assert_agree(*train_both(**arguments))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.usefixtures("fail_on_materialize", "one_gpu")
def test_label_smoothing(steps):
    assert_agree(*train_both(label_smoothing_factor=0.1, gradient_accumulation_steps=steps))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("fail_on_materialize")
def test_autocast(precision):
    assert_agree(*train_both(**{precision: True}), tolerance=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.usefixtures("fail_on_materialize")
def test_a_model_split_over_devices(tmp_path, head):
    """Check a head on the device of the last layer, and a head on the other device."""
    accelerate = pytest.importorskip("accelerate")
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1}
    curves = []
    for patched in (False, True):
        model = accelerate.dispatch_model(tiny_model(), {**places, "lm_head": head})
        trainer = make_trainer(patched, str(tmp_path), steps=STEPS, model=model)
        with demo.record_losses() as curve:
            trainer.train()
        curves.append(curve)
    assert_agree(curves[0], curves[1])


@pytest.mark.usefixtures("fail_on_materialize", "one_gpu")
def test_compiled():
    """Look for flce's operator in a profile: the autograd graph of a compiled model does not show it."""
    torch.compiler.reset()
    stock = train(False, steps=3)
    with torch.profiler.profile() as profile:
        patched = train(True, steps=3, torch_compile=True, torch_compile_backend="aot_eager")
    # A Trainer with torch_compile switches TF32 on.
    assert demo.max_difference(stock, patched) <= (1e-4 if torch.cuda.is_available() else 1e-5)
    assert any(event.name == "flce::linear_cross_entropy" for event in profile.events())


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_compiled_evaluation_before_training(tmp_path):
    """Check that the trainer, which gathers the logits, receives plain tensors."""
    results = []
    for patched in (False, True):
        torch.compiler.reset()
        compiled: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"} if patched else {}
        trainer = make_trainer(patched, str(tmp_path), steps=1, use_cpu=True, **compiled)
        before, predicted = trainer.evaluate()["eval_loss"], trainer.predict(trainer.eval_dataset)
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        results.append([before, predicted.metrics["test_loss"], predicted.predictions, after])
    for expected, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fail_on_materialize")
def test_auto_find_batch_size(tmp_path):
    """Check that training restarts with smaller batches and the patched model if the first batches do not fit."""

    def run(patched: bool) -> tuple[demo.Curve, int]:
        trainer = make_trainer(patched, str(tmp_path), steps=STEPS, auto_find_batch_size=True, use_cpu=True)
        sizes: list[int] = []

        def check_size(module: Any, args: Any, kwargs: Any) -> None:
            sizes.append(len(kwargs["input_ids"]))
            if sizes[-1] > 2:
                raise RuntimeError("CUDA out of memory.")

        trainer.model.register_forward_pre_hook(check_size, with_kwargs=True)
        with demo.record_losses() as curve:
            trainer.train()
        return curve, sizes[-1]

    (stock, size), (patched, patched_size) = run(False), run(True)
    assert size == patched_size <= 2
    assert_agree(stock, patched)


def accuracy(prediction: Any) -> dict[str, float]:
    guesses = prediction.predictions if prediction.predictions.ndim == 2 else prediction.predictions.argmax(-1)
    labels = prediction.label_ids[:, 1:]
    return {"accuracy": float(np.mean((guesses[:, :-1] == labels)[labels != -100]))}


@functools.cache
def trained_weights() -> dict[str, torch.Tensor]:
    """Return the weights of a model after some training: some of its predictions are correct."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(False, folder, steps=20, learning_rate=3e-3)
        trainer.train()
    state: dict[str, torch.Tensor] = trainer.model.state_dict()
    return state


def evaluate(folder: Any, trainer: dict[str, Any] | None = None, **arguments: Any) -> list[dict[str, float]]:
    """Return the metrics of a stock and of a patched trainer for the same trained model."""
    found = []
    for patched in (False, True):
        each = make_trainer(patched, str(folder), steps=1, trainer=trainer, **arguments)
        each.model.load_state_dict(trained_weights())
        found.append({name: value for name, value in each.evaluate().items() if name in ("eval_loss", "eval_accuracy")})
    return found


def predicted(logits: Any, labels: Any) -> Any:
    return logits.argmax(dim=-1)


@pytest.mark.parametrize(
    "trainer, arguments",
    [
        ({"compute_metrics": accuracy}, {}),
        ({"compute_metrics": accuracy, "preprocess_logits_for_metrics": predicted}, {}),
        ({}, {"prediction_loss_only": True}),
        ({}, {"prediction_loss_only": True, "label_smoothing_factor": 0.1}),
    ],
    ids=["all logits", "predicted tokens", "loss", "smoothed loss"],
)
@pytest.mark.usefixtures("one_gpu")
def test_evaluate(trainer, arguments, tmp_path):
    """Check that logits are computed for metrics of all logits, not for predicted tokens or the loss."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stock, patched = evaluate(tmp_path, trainer, **arguments)
    assert "compute_metrics" not in trainer or stock["eval_accuracy"] > 0
    assert patched == pytest.approx(stock, abs=1e-5)
    materialized = any(w.category is MaterializedLogitsWarning for w in caught)
    assert materialized == (trainer == {"compute_metrics": accuracy})


def test_save_and_resume(tmp_path):
    """Check that a checkpoint of a patched run is a stock checkpoint, and that a resumed run is patched."""

    def run(folder: Any, steps: int, resume: bool = False) -> Any:
        trainer = make_trainer(True, str(folder), steps=steps, save_strategy="steps", save_steps=2)
        with demo.record_losses() as curve:
            trainer.train(resume_from_checkpoint=resume)
        return trainer, curve

    full, curve = run(tmp_path / "full", 4)
    run(tmp_path / "parts", 2)
    # The scheduler is linear in `steps`, so the run resumes from a checkpoint of the full run.
    (tmp_path / "full" / "checkpoint-4").rename(tmp_path / "last")
    _, rest = run(tmp_path / "full", 4, resume=True)
    assert rest.losses == pytest.approx(curve.losses[2:], abs=1e-5)
    assert all(rest.fused)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    assert not flce.is_patched(reloaded)
    for name, tensor in full.model.state_dict().items():
        torch.testing.assert_close(reloaded.state_dict()[name], tensor.cpu())


class TestCallback:
    @pytest.mark.parametrize("kwargs", [{"on_materialize": "zzz"}, {"empty_loss": 0}, {"options": {}}], ids=str)
    def test_wrong_arguments(self, kwargs: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError), match=f"^{next(iter(kwargs))} must be"):
            FlceCallback(**kwargs)

    def create(self, folder: Any, callback: Any, arguments: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        args = transformers.TrainingArguments(**{**demo.trainer_settings(str(folder), 1), **(arguments or {})})
        return transformers.Trainer(args=args, train_dataset=demo.examples(4), callbacks=[callback], **kwargs)

    def test_patches_when_the_trainer_is_created(self, tmp_path):
        model = tiny_model()
        trainer = self.create(tmp_path, FlceCallback(), model=model)
        assert flce.is_patched(model)
        trainer.train()
        assert flce.is_patched(model)

    def test_patches_when_training_begins(self, tmp_path):
        """Check a model that is created for each run, and a callback that is added later."""
        trainer = self.create(tmp_path, FlceCallback(), model_init=lambda: tiny_model())
        first = trainer.model
        later = self.create(tmp_path, transformers.TrainerCallback(), model=tiny_model())
        later.add_callback(FlceCallback)
        for each in (trainer, later):
            each.train()
            assert flce.is_patched(each.model)
        assert trainer.model is not first

    @pytest.mark.usefixtures("fail_on_materialize", "one_gpu")
    def test_a_model_created_for_a_run_in_mixed_precision(self, tmp_path):
        """Check a model whose forward Accelerate has replaced before the callback runs."""
        losses, data = [], demo.examples(8, seed=1)
        for callback in (transformers.TrainerCallback(), FlceCallback()):
            arguments = {"bf16": True, "prediction_loss_only": True}
            trainer = self.create(tmp_path, callback, arguments, model_init=lambda: tiny_model(), eval_dataset=data)
            trainer.train()
            before = flce.report(trainer.model).fused
            losses.append(trainer.evaluate()["eval_loss"])
        assert losses[1] == pytest.approx(losses[0], abs=1e-2)
        assert flce.report(trainer.model).fused > before

    @pytest.mark.usefixtures("one_gpu")
    def test_options_reach_the_loss(self, tmp_path):
        options = flce.ChunkOptions(max_workspace_bytes=1)
        trainer = self.create(tmp_path, FlceCallback(options=options), model=tiny_model())
        with pytest.raises(ValueError, match="max_workspace_bytes"):
            trainer.train()

    @pytest.mark.parametrize("instead", ["", "options", "one step", "a hook"])
    @pytest.mark.usefixtures("fail_on_materialize", "one_gpu")
    def test_adds_to_accumulated_gradients(self, instead: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        """Compare losses and weights with stock's. From the second micro-batch of a step on, dW is added to `.grad`,
        or autograd adds dW."""
        added, results = [], []

        def spy(gradients: Any, problem: Any) -> Any:
            added.append(len(problem.dw_targets or {}))
            return gradient_accumulation.replace_added(gradients, problem)

        monkeypatch.setattr("flce.ops.linear_cross_entropy.replace_added", spy)
        callback = FlceCallback(options=flce.ChunkOptions() if instead == "options" else None)
        for callbacks in ([], [callback]):
            accumulation = 1 if instead == "one step" else 3
            arguments: Any = {"gradient_accumulation_steps": accumulation, "optim": "sgd", "learning_rate": 1.0}
            trainer = make_trainer(False, str(tmp_path), steps=2, **arguments, trainer={"callbacks": callbacks})
            if instead == "a hook":
                trainer.model.get_output_embeddings().weight.register_hook(torch.clone)
            with demo.record_losses() as curve:
                trainer.train()
            results.append((curve, [parameter.detach() for parameter in trainer.model.parameters()]))
        assert_agree(results[0][0], results[1][0])
        torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=1e-6)
        assert not any(added) if instead else added == [0, 1, 1] * 2

    def test_on_materialize_reaches_the_logits(self, tmp_path):
        callback = FlceCallback(on_materialize="raise")
        trainer = self.create(tmp_path, callback, model=tiny_model(), eval_dataset=demo.examples(4))
        trainer.compute_metrics = accuracy
        with pytest.raises(MaterializedLogitsError):
            trainer.evaluate()

    def test_a_model_that_cannot_be_patched(self, tmp_path):
        with pytest.raises(TypeError, match="output embedding"):
            self.create(tmp_path, FlceCallback(), model=torch.nn.Linear(2, 2))
