"""Warnings if no loss is fused, and counts of `flce.report`."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.core.log import sampled_passes
from flce.huggingface import (
    MaterializedLogitsError,
    MaterializedLogitsWarning,
    NotFusedWarning,
    lazy_logits,
    patch_model,
)
from tests.huggingface.scripts import IDS, Build, loss_of, own_loss


def hidden_of(model: Any) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=IDS).last_hidden_state
    return hidden


def losses_of_several(model: Any) -> Tensor:
    logits = [model(input_ids=IDS).logits for _ in range(4)]
    return torch.stack([F.cross_entropy(each.flatten(0, 1), IDS.flatten()) for each in logits]).sum()


class ExpectedWarnings(NamedTuple):
    """The expected warnings of a training step.

    Attributes:
        step: a function that returns the loss.
        counts: the number of warnings in each call.
        words: parts of the warning.
        training: the mode of the model.
        evaluated: whether an evaluation runs before.
    """

    step: Callable[[Any], Tensor]
    counts: list[int]
    words: tuple[str, ...] = ()
    training: bool = True
    evaluated: bool = False


WARNINGS = {
    # `from_pretrained` returns a model in evaluation mode.
    "an own loss in evaluation mode": ExpectedWarnings(
        own_loss, [0, 1, 0], ("eval() mode", "model.train()"), training=False
    ),
    "fused losses": ExpectedWarnings(own_loss, [0] * 4),
    "a kernel that bypasses the head": ExpectedWarnings(
        lambda model: F.cross_entropy((hidden_of(model) @ model.lm_head.weight.T).flatten(0, 1), IDS.flatten()),
        [0, 0, 1, 0],
        ("instead of the head",),
    ),
    # The loss is computed after all forwards, so no warning may be given before.
    "one loss of several forwards": ExpectedWarnings(losses_of_several, [0, 0]),
    # The logits are never computed: reward, value and embedding models.
    "logits that are not used": ExpectedWarnings(
        lambda model: model(input_ids=IDS, output_hidden_states=True).hidden_states[-1].sum(), [0] * 4
    ),
    "the logits of two classes": ExpectedWarnings(
        lambda model: F.cross_entropy(model(input_ids=IDS).logits[:, -1, [7, 9]], IDS[:, 0] % 2), [0] * 4
    ),
    "gathered logits": ExpectedWarnings(
        lambda model: model(input_ids=IDS).logits.gather(-1, IDS[..., None]).sum(), [0] * 4
    ),
    # This is not training.
    "an evaluation before": ExpectedWarnings(lambda model: hidden_of(model).sum(), [0, 0, 1, 0], evaluated=True),
    "evaluation": ExpectedWarnings(
        lambda model: model(input_ids=IDS).logits.argmax(-1).double().requires_grad_().sum(), [0] * 4, training=False
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_warnings(name: str, build: Build) -> None:
    expected = WARNINGS[name]
    model = patch_model(build("Llama").train(expected.training))
    if expected.evaluated:
        with torch.no_grad():
            model(input_ids=IDS, labels=IDS)
    messages = []
    for _ in expected.counts:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            expected.step(model).backward()
        messages.append([str(w.message) for w in caught if w.category is NotFusedWarning])
    assert [len(each) for each in messages] == expected.counts
    text = str(messages)
    assert all(word in text for word in expected.words)


def test_report_of_stock_and_fused_losses(build: Build) -> None:
    model = patch_model(build("Llama"))
    own_loss(model).backward()
    report = flce.report(model)
    assert (report.forwards, report.fused, report.patched) == (1, 1, ("", "lm_head"))
    assert not report.stock
    assert not report.materialized
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotFusedWarning)
        for _ in range(3):
            own_loss(model.eval()).backward()
    assert list(flce.report(model).stock.values()) == [3]


# Results, with `fused` and `values` of the report.
COUNTS: dict[str, tuple[Callable[[Any], Any], tuple[int, int], tuple[int, int]]] = {
    "loss": (loss_of, (1, 0), (1, 0)),
    "divergence": (lambda z: F.kl_div(z.log_softmax(-1), z.detach().log_softmax(-1), log_target=True), (2, 0), (2, 0)),
    "log-probabilities": (lambda z: z.log_softmax(-1).gather(-1, IDS[..., None]), (1, 0), (0, 1)),
    "entropy": (lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1), (1, 0), (0, 1)),
    "logsumexp": (lambda z: z.logsumexp(-1), (1, 0), (0, 1)),
    "sum of log-probabilities": (lambda z: z.log_softmax(-1).sum(-1), (1, 1), (0, 2)),
    "two classes": (lambda z: z[:, -1, [7, 9]], (1, 0), (0, 1)),
    "logits of classes": (lambda z: z.gather(-1, IDS[..., None]), (1, 0), (0, 1)),
    "argmax": (lambda z: z.argmax(-1), (0, 1), (0, 1)),
    "without a gradient": (lambda z: z.detach().logsumexp(-1), (0, 1), (0, 1)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_losses_and_gradients_are_fused_and_other_results_are_values(name: str, build: Build) -> None:
    """Accuracies that a loop logs do not count as fused."""
    function, *expected = COUNTS[name]
    for training, counts in zip((True, False), expected, strict=True):
        model = patch_model(build("Llama").train(training), on_materialize="raise")
        with lazy_logits(model), torch.set_grad_enabled(training):
            result = function(model(input_ids=IDS).logits)
        report = flce.report(model)
        assert (report.fused, report.values) == counts
        assert f"values: {counts[1]}" in str(report)
        if result.requires_grad:
            result.sum().backward()
        assert model.lm_head.weight.grad is None or training


def test_logits_of_evaluation_mode_can_be_saved(build: Build, tmp_path: Any) -> None:
    logits = patch_model(build("Llama").eval())(input_ids=IDS).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(logits, tmp_path / "logits.pt")


def test_a_head_that_runs_stock_code(build: Build) -> None:
    """The head runs stock code because the model runs in a transform."""
    model = patch_model(build("Llama"))

    def step() -> None:
        torch.func.grad(lambda scale: scale * own_loss(model))(torch.tensor(1.0))

    step()
    (reason,) = flce.report(model).stock
    assert "torch.func" in reason
    patch_model(model, on_materialize="raise")
    with pytest.raises(MaterializedLogitsError, match=r"stock code.*torch\.func"):
        step()


def test_another_forward_on_the_head(build: Build) -> None:
    """Another forward computes logits without a product as wide as the vocabulary, as tensor parallelism does."""

    def halves(hidden: Tensor) -> Tensor:
        return torch.cat([F.linear(hidden, half) for half in model.lm_head.weight.chunk(2)], -1)

    for run in (own_loss, lambda model: model(input_ids=IDS, labels=IDS).loss):
        model = patch_model(build("Llama"))
        model.lm_head.forward = halves
        with torch.no_grad():
            model(input_ids=IDS, labels=IDS)
        with pytest.warns(NotFusedWarning, match="Another forward") as caught:
            loss = run(model)
        torch.testing.assert_close(loss, run(build("Llama")))
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                run(model).backward()
        assert len([w for w in caught if w.category is NotFusedWarning]) == 1
        report = flce.report(model)
        assert (report.fused, list(report.stock.values())) == (0, [4])
        patch_model(model, on_materialize="raise")
        with pytest.raises(MaterializedLogitsError, match="Another forward"):
            run(model)
        with torch.no_grad():
            model(input_ids=IDS, labels=IDS)
        del model.lm_head.forward
        run(model)
        assert flce.report(model).fused == 1


def test_the_line_is_the_users(build: Build, tmp_path: Any) -> None:
    """The warning names the user's line, not the line of Transformers, with a remedy for metrics."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    data: Any = [{"input_ids": row, "labels": row} for row in IDS]
    model = patch_model(build("Llama"))
    trainer = Trainer(model, arguments, compute_metrics=lambda _: {})
    with pytest.warns(MaterializedLogitsWarning, match="preprocess_logits_for_metrics") as caught:
        trainer.evaluate(data)
    (warning,) = [w for w in caught if w.category is MaterializedLogitsWarning]
    assert warning.filename == __file__
    (where,) = flce.report(model).materialized
    assert f"{__file__}:" in where
    assert "transformers" in where.split(" (in ")[1]


def test_report(build: Build) -> None:
    model = patch_model(build("Llama"), on_materialize="ignore")
    outputs = model(input_ids=IDS, labels=IDS)
    outputs.logits.sigmoid()
    model(input_ids=IDS).logits.materialize()
    report = flce.report(torch.nn.Sequential(model))
    assert report.patched == ("0", "0.lm_head")
    assert (report.forwards, report.fused) == (2, 1)
    assert sorted(report.materialized.values()) == [1, 1]
    assert report.materialized["materialize()"] == 1
    text = str(report)
    assert "fused: 1" in text
    assert "materialized: 2" in text
    assert "1 x materialize()" in text
    assert str(flce.report(build("Llama"))).startswith("patched: nothing")


def test_copies_count_for_themselves(build: Build) -> None:
    model = patch_model(build("Llama"))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own_loss(other).backward()
        assert (flce.report(other).forwards, flce.report(other).fused) == (1, 1)
    assert (flce.report(model).forwards, flce.report(model).fused) == (0, 0)


@pytest.mark.parametrize("as_tuple", [False, True])
def test_replicas_of_data_parallel_return_no_logits(build: Build, as_tuple: bool) -> None:
    """The logits would be gathered on one GPU. The test creates a replica as `nn.DataParallel` does, without a GPU."""
    model = patch_model(build("Llama"))
    replica = model._replicate_for_data_parallel()
    for name, child in model._modules.items():
        replica._modules[name] = child
    for name, parameter in model._parameters.items():
        replica._parameters[name] = parameter
    with pytest.warns(UserWarning, match="nn.DataParallel would gather"):
        outputs = replica(input_ids=IDS, labels=IDS, return_dict=not as_tuple)
    loss, logits = outputs[:2] if as_tuple else (outputs.loss, outputs.get("logits"))
    assert logits is None
    torch.testing.assert_close(loss, build("Llama")(input_ids=IDS, labels=IDS).loss)
    loss.backward()
    assert model.lm_head.weight.grad is not None
    with torch.no_grad():
        assert replica(input_ids=IDS, labels=IDS).logits is not None
    assert replica(input_ids=IDS).logits is not None


def test_sampled_gradients_are_counted(build: Build) -> None:
    sampled_passes.clear()
    model = patch_model(build("Llama"), options=flce.ChunkOptions(sample_below=2.0**-20))
    own_loss(model).backward()
    assert flce.report(model).sampled == {"sampled": 1}
    assert "with sample_below: 1 sampled" in str(flce.report(model))
