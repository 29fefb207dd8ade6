"""Tests of flce's replacement of TRL's `add_fused_lm_head`, called like TRL's trainers call it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("trl", minversion="1.16", reason="it is in the extra `trainers`")
pytest.importorskip("typer", reason="the scripts' command line")

import trl.trainer.sft_trainer
from trl.trainer.utils import add_fused_lm_head

import flce.huggingface.trl
from demo import trl_installed
from flce.huggingface import LazyLogits, NotFusedWarning
from tests.integrations.trl_trainers import create_model

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
T = 12
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"final_logit_softcapping": 2.0},
    "Cohere": {"logit_scale": 0.5},
    "Granite": {"logits_scaling": 3.0},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.3},
}


def build(name: str = "Llama", **sizes: Any) -> Any:
    return create_model(architecture=name, **{**MODELS[name], **sizes}).train()


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Return two sequences, the second padded. A third of the labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 1000, (2, T), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill((torch.arange(T) < 4) | (mask == 0), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.fixture
def ours() -> Iterator[Callable[..., None]]:
    """Install flce and return the function that trainers call."""
    with trl_installed(True):
        yield trl.trainer.sft_trainer.add_fused_lm_head


def weighted(outputs: Any) -> Tensor:
    """Return a number with a different gradient for each token."""
    weights = torch.linspace(-1.0, 2.0, outputs.log_probs.numel()).view_as(outputs.log_probs)
    value: Tensor = (weights * outputs.log_probs).sum() + (weights.flip(0) * outputs.entropy).sum() + outputs.loss
    return value


def gradients(model: Any, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: Any, theirs: Any) -> None:
    assert list(ours.keys()) == list(theirs.keys())
    for name, value in theirs.items():
        torch.testing.assert_close({name: ours[name]}, {name: value}, rtol=1e-4, atol=1e-5)


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.usefixtures("fail_on_materialize")
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_items_in_batch": torch.tensor(37)},
        {"num_items_in_batch": 37, "output_router_logits": True},
        {"shift_labels": batch(1)["labels"]},
    ],
    ids=["labels", "number of items", "router", "shifted labels"],
)
@pytest.mark.parametrize("name", MODELS)
def test_every_field_equals_trl(name: str, given: dict[str, Any], ours: Callable[..., None]) -> None:
    if name != "Mixtral":
        given = {key: value for key, value in given.items() if key != "output_router_logits"}
    results = []
    for add in (add_fused_lm_head, ours):
        model = build(name)
        add(model, temperature=0.7, outputs=OUTPUTS)
        inputs = {**batch(), **given}
        if "shift_labels" in given:
            del inputs["labels"]
        outputs = model(**inputs, fused_lm_head=True)
        results.append((outputs, gradients(model, weighted(outputs))))
    assert_same(results[1][0], results[0][0])
    assert_same_gradients(results[1][1], results[0][1])
    assert (results[1][0].aux_loss is None) == ("output_router_logits" not in given)


def expected_fields(model: Any, temperature: float, labels: Tensor) -> dict[str, Tensor]:
    """Return the expected fields, computed in float64 from all logits."""
    z = model(**{**batch(), "labels": None}).logits[:, :-1].double() / temperature
    logprob, mask, target = z.log_softmax(-1), labels[:, 1:] != -100, labels[:, 1:].clamp(min=0)
    fields = {
        "log_probs": logprob.gather(-1, target[..., None]).squeeze(-1),
        "entropy": -(logprob.exp() * logprob).sum(-1),
        "log_sum_sq_probs": (2 * logprob).logsumexp(-1),
        "mean_logits": z.mean(-1),
        "is_top1": z.argmax(-1) == target,
    }
    return {**{name: value.masked_fill(~mask, 0) for name, value in fields.items()}, "label_mask": mask}


def scaled(model: Any) -> Any:
    """Return the model with a forward that multiplies the logits by a number which is not in the configuration."""
    kind: Any = type(model)

    class ScaledModel(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits * 1.7
            return outputs

    model.__class__ = ScaledModel
    return model


@pytest.mark.usefixtures("fail_on_materialize")
def test_a_scale_without_a_name(ours: Callable[..., None]) -> None:
    """Check a scale that is not in the configuration. TRL reads scales only from there."""
    model = scaled(build())
    ours(model, temperature=0.7, outputs=OUTPUTS)
    outputs = model(**batch(), fused_lm_head=True)
    assert flce.report(model).stock == {}
    expected = expected_fields(flce.unpatch_model(model).eval(), 0.7, batch()["labels"])
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name], value, check_dtype=False, rtol=1e-5, atol=1e-5)


def cast_head(model: Any) -> Any:
    """Cast the head like TRL's GRPO trainer: the layer has another forward, in float32."""
    head = model.to(torch.bfloat16).lm_head.float()
    head.forward = lambda hidden: nn.functional.linear(hidden.float(), head.weight.float())
    return model


@pytest.mark.usefixtures("fail_on_materialize")
@pytest.mark.parametrize("patched_first", [False, True])
def test_a_patched_model_with_a_head_in_float32(patched_first: bool) -> None:
    """The cast leaves the log-probabilities of a bfloat16 head, and the gradients of hidden states, as they are."""

    def run(model: Any) -> list[Tensor]:
        outputs = model(**{**batch(), "labels": None})
        logprobs = outputs.logits[:, :-1].float().log_softmax(-1).gather(-1, batch()["input_ids"][:, 1:, None])
        (logprobs[..., 0] * torch.linspace(-1.0, 2.0, T - 1)).sum().backward()
        return [logprobs.detach(), model.lm_head.weight.grad.float(), model.model.norm.weight.grad.float()]

    stock, plain = run(cast_head(build())), run(flce.patch_model(build().to(torch.bfloat16)))
    model = cast_head(flce.patch_model(build())) if patched_first else flce.patch_model(cast_head(build()))
    found = run(model)
    assert flce.report(model).fused == 1
    for tolerance, expected in ((1e-5, stock), (1e-2, plain)):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
        for gradient, correct in zip(found[1:], expected[1:], strict=True):
            assert (gradient - correct).norm() <= tolerance * correct.norm()


@pytest.mark.usefixtures("fail_on_materialize")
def test_a_head_in_float32_under_autocast(ours: Callable[..., None]) -> None:
    """Check the cast of GRPO, which runs in float32 also under autocast."""
    results = []
    for add in (add_fused_lm_head, ours):
        model = cast_head(build())
        add(model, cast_lm_head_to_fp32=True, outputs=OUTPUTS)
        for _ in range(2):  # the first call finds the head
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(**batch(), fused_lm_head=True)
        results.append((outputs, gradients(model, weighted(outputs))))
    assert_same(results[1][0], results[0][0])
    head = [grads["lm_head.weight"] for _, grads in results]
    assert (head[1] - head[0]).norm() <= 1e-5 * head[0].norm()
    assert flce.report(model).fused == 2


@pytest.mark.parametrize("summed", [False, True])
def test_all_labels_ignored(summed: bool, ours: Callable[..., None]) -> None:
    model = build()
    ours(model, outputs=("log_probs", "entropy", "is_top1"))
    inputs = {**batch(), "labels": torch.full((2, T), -100)}
    outputs = model(**inputs, fused_lm_head=True, summed=summed)
    assert outputs.loss.item() == 0
    assert not any(gradient.any() for gradient in gradients(model, outputs.loss).values())


def test_the_plain_forward_is_the_models(ours: Callable[..., None]) -> None:
    stock, model = build(), build()
    ours(model)
    assert inspect.signature(model.forward) == inspect.signature(type(stock).forward.__get__(stock))
    torch.testing.assert_close(model(**batch()).loss, stock(**batch()).loss)
    assert isinstance(model(**batch()).logits, LazyLogits)
    with torch.no_grad():
        ids = batch()["input_ids"]
        for kind in (stock, model):
            kind.generation_config.update(do_sample=False, max_new_tokens=4, pad_token_id=0)
        assert torch.equal(model.eval().generate(ids), stock.eval().generate(ids))


# -------------------------------------------------------------------------------------------- install and uninstall


def installed_functions() -> dict[str, Any]:
    names = ("sft", "dpo", "kto", "grpo", "rloo")
    found = {name: getattr(trl.trainer, f"{name}_trainer").add_fused_lm_head for name in names}
    return {**found, "compute_loss": trl.SFTTrainer.compute_loss, "utils": trl.trainer.utils.add_fused_lm_head}


def test_uninstall_restores_exactly() -> None:
    before = installed_functions()
    for times in (1, 2):
        for _ in range(times):
            flce.huggingface.trl.install()
        assert [name for name, value in installed_functions().items() if value is before[name]] == ["utils"]
        flce.huggingface.trl.uninstall()
        assert installed_functions() == before
        flce.huggingface.trl.uninstall()  # no effect
        assert installed_functions() == before


def test_another_signature_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_fused_lm_head(model: Any, temperature: float = 1.0) -> None: ...

    kto, sft, dpo = trl.trainer.kto_trainer, trl.SFTTrainer, trl.trainer.dpo_trainer
    name, theirs = "trl.trainer.kto_trainer.add_fused_lm_head", r"\(model, temperature=1.0\)"
    mine = r"\(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=\('log_probs',\)\)"
    for place, attribute, value, message in (
        (kto, "add_fused_lm_head", add_fused_lm_head, f"flce replaces {name}{mine}, but TRL .* has {name}{theirs}"),
        (
            sft,
            "compute_loss",
            lambda self, model: None,
            r"SFTTrainer.compute_loss\(self, model, inputs, return_outputs=",
        ),
        (dpo, "add_fused_lm_head", None, r"needs TRL 1.16 or newer: TRL .* has no trl.trainer.dpo_trainer.add"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, attribute, value)
            before = installed_functions()
            with pytest.raises(ImportError, match=message):
                flce.huggingface.trl.install()
            assert installed_functions() == before


# ------------------------------------------------------------------------------------------- heads with TRL's kernel


def warnings_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if w.category is NotFusedWarning]


def test_a_head_that_cannot_be_patched(ours: Callable[..., None]) -> None:
    model = build()
    model.lm_head = CustomHead(model.lm_head.weight)
    (message,) = warnings_of(lambda: ours(model, outputs=OUTPUTS))
    assert "TRL's own kernel" in message
    stock = build()
    add_fused_lm_head(stock, outputs=OUTPUTS)
    assert_same(model(**batch(), fused_lm_head=True), stock(**batch(), fused_lm_head=True))


class CustomHead(nn.Module):
    """Head that is not a linear layer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = weight, None

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T


def test_a_head_with_real_logits(ours: Callable[..., None]) -> None:
    """Check that TRL's kernel runs after the first forward pass found real logits, with one warning."""
    stock, model = build(), build()
    add_fused_lm_head(stock, outputs=OUTPUTS)
    ours(model, outputs=OUTPUTS)
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: forward(hidden).materialize().exp().log()

    def twice() -> None:
        for _ in range(2):
            for summed in (False, True):
                outputs = model(**batch(), fused_lm_head=True, summed=summed, num_items_in_batch=None)
                assert_same(outputs, stock(**batch(), fused_lm_head=True))

    (message,) = warnings_of(twice)
    assert "TRL's own kernel computes the loss of this model" in message
