"""What is said where nothing is fused, and what `flce.report` counts."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.core import private
from flce.huggingface import MaterializedLogitsError, MaterializedLogitsWarning, NotFusedWarning, patch_model

IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))


def own_loss(model: Any) -> Tensor:
    return F.cross_entropy(model(input_ids=IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def said_by(step: Callable[[], Any], times: int) -> list[list[str]]:
    """The warnings of each of several calls."""
    said = []
    for _ in range(times):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        said.append([str(w.message) for w in caught if w.category is NotFusedWarning])
    return said


def test_own_loss_in_evaluation_mode(build: Callable[..., Any]) -> None:
    """What `from_pretrained` returns is in evaluation mode."""
    model = patch_model(build("Llama").eval())
    first, second, third = said_by(lambda: own_loss(model).backward(), 3)
    assert not first
    assert len(second) == 1
    assert "eval() mode" in second[0]
    assert "model.train()" in second[0]
    assert not third
    assert list(flce.report(model).stock.values()) == [3]


def test_evaluation_that_is_not_trained_is_no_reason(build: Callable[..., Any]) -> None:
    model = patch_model(build("Llama").eval())
    assert said_by(lambda: model(input_ids=IDS).logits.argmax(-1), 4) == [[]] * 4


def test_fused_losses_say_nothing(build: Callable[..., Any]) -> None:
    model = patch_model(build("Llama"))
    assert said_by(lambda: own_loss(model).backward(), 4) == [[]] * 4
    report = flce.report(model)
    assert (report.forwards, report.fused, report.patched) == (4, 4, ("", "lm_head"))
    assert not report.stock
    assert not report.materialized


def test_a_kernel_that_goes_round_the_head(build: Callable[..., Any]) -> None:
    model = patch_model(build("Llama"))

    def step() -> None:
        hidden = model.base_model(input_ids=IDS).last_hidden_state
        F.cross_entropy((hidden @ model.lm_head.weight.T).flatten(0, 1), IDS.flatten()).backward()

    said = said_by(step, 4)
    assert [len(messages) for messages in said] == [0, 0, 1, 0]
    assert "round the head" in said[2][0]


def test_an_evaluation_before_is_no_training(build: Callable[..., Any]) -> None:
    model = patch_model(build("Llama"))
    with torch.no_grad():
        model(input_ids=IDS, labels=IDS)

    def step() -> None:
        model.base_model(input_ids=IDS).last_hidden_state.sum().backward()

    assert [len(messages) for messages in said_by(step, 4)] == [0, 0, 1, 0]


def test_one_loss_of_several_forwards(build: Callable[..., Any]) -> None:
    """It is made when all of them are done, so until then there is nothing to say."""
    model = patch_model(build("Llama"))

    def step() -> None:
        logits = [model(input_ids=IDS).logits for _ in range(4)]
        sum(F.cross_entropy(each.flatten(0, 1), IDS.flatten()) for each in logits).backward()  # type: ignore[union-attr]

    assert said_by(step, 2) == [[], []]

    def unused() -> None:
        outputs = [model(input_ids=IDS, output_hidden_states=True)]
        outputs[0].hidden_states[-1].sum().backward()

    model = patch_model(build("Llama"))
    assert [len(messages) for messages in said_by(unused, 4)] == [0, 0, 1, 0]


def test_logits_of_evaluation_mode_can_be_saved(build: Callable[..., Any], tmp_path: Any) -> None:
    logits = patch_model(build("Llama").eval())(input_ids=IDS).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(logits, tmp_path / "logits.pt")


def test_a_head_that_runs_stock_code(build: Callable[..., Any]) -> None:
    """Here because the model runs in a transform."""
    model = patch_model(build("Llama"))

    def step() -> None:
        torch.func.grad(lambda scale: scale * own_loss(model))(torch.tensor(1.0))

    step()
    (reason,) = flce.report(model).stock
    assert "torch.func" in reason
    patch_model(model, on_materialize="raise")
    with pytest.raises(MaterializedLogitsError, match=r"stock code.*torch\.func"):
        step()


def test_the_line_is_the_users(build: Callable[..., Any], tmp_path: Any) -> None:
    """Behind a line of Transformers, and with a remedy for metrics."""
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


def test_report(build: Callable[..., Any]) -> None:
    model = patch_model(build("Llama"), on_materialize="ignore")
    outputs = model(input_ids=IDS, labels=IDS)
    outputs.logits.softmax(-1)
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


def test_copies_count_for_themselves(build: Callable[..., Any]) -> None:
    model = patch_model(build("Llama"))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own_loss(other).backward()
        assert (flce.report(other).forwards, flce.report(other).fused) == (1, 1)
    assert (flce.report(model).forwards, flce.report(model).fused) == (0, 0)


def test_a_head_of_another_model_counts_for_the_one_it_is_in(build: Callable[..., Any]) -> None:
    other, model = patch_model(build("Llama")), patch_model(build("Llama"))
    model.lm_head = copy.deepcopy(other.lm_head)
    own_loss(model).backward()
    assert (flce.report(model).fused, flce.report(other).fused) == (1, 0)
    assert model._flce.watch_products is False


def test_a_copy_that_meets_the_head_before_the_model(build: Callable[..., Any]) -> None:
    model = patch_model(build("Llama"))
    head, other = copy.deepcopy([model.lm_head, model])
    assert head._flce is other._flce is not model._flce


def test_unpatching_leaves_no_hook(build: Callable[..., Any]) -> None:
    model = patch_model(build("Llama"))
    flce.unpatch_model(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("as_tuple", [False, True])
def test_replicas_of_data_parallel_return_no_logits(build: Callable[..., Any], as_tuple: bool) -> None:
    """They would be gathered on one GPU. A replica, as `nn.DataParallel` makes it, needs no GPU."""
    stock = build("Llama")
    model = patch_model(copy.deepcopy(stock))
    replica = model._replicate_for_data_parallel()
    for name, child in model._modules.items():
        replica._modules[name] = child
    for name, parameter in model._parameters.items():
        replica._parameters[name] = parameter
    with pytest.warns(UserWarning, match="nn.DataParallel would gather"):
        outputs = replica(input_ids=IDS, labels=IDS, return_dict=not as_tuple)
    if as_tuple:
        loss, logits, *_ = outputs
    else:
        loss, logits = outputs.loss, outputs.get("logits")
    assert logits is None
    torch.testing.assert_close(loss, stock(input_ids=IDS, labels=IDS).loss)
    loss.backward()
    assert model.lm_head.weight.grad is not None
    with torch.no_grad():
        assert replica(input_ids=IDS, labels=IDS).logits is not None
    assert replica(input_ids=IDS).logits is not None


def test_hooks_of_fsdp1(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP1 needs a GPU, but for the hooks that it registers on outputs. Here they are its own, with other insides."""
    import functools

    seen: list[Tensor] = []

    def pre_backward(state: Any, module: Any, handle: Any, grad: Tensor, *unused: Any) -> Tensor:
        seen.append(grad)
        return grad

    monkeypatch.setattr(private, "fsdp1_hook", pre_backward)

    def registered(outputs: Any) -> Any:
        for tensor in outputs.values():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                hook = functools.partial(pre_backward, None, None, None)
                tensor.register_hook(torch.utils.hooks.unserializable_hook(hook))
        return outputs

    model = patch_model(build("Llama"), on_materialize="raise")
    registered(model(input_ids=IDS, labels=IDS)).loss.backward()
    assert len(seen) >= 1
    seen.clear()
    logits = registered(model(input_ids=IDS)).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    assert len(seen) == 1
    assert all(grad.untyped_storage().nbytes() <= 8 for grad in seen)


def test_hooks_of_a_wrapper_on_several_heads(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of a stack of logits runs whichever of them the loss takes, and once where it takes all."""
    import functools

    seen: list[Tensor] = []
    monkeypatch.setattr(private, "fsdp1_hook", lambda state, grad: seen.append(grad))
    model = patch_model(build("Llama"), on_materialize="raise")
    for which, removed in ((0, False), (1, False), (1, True)):
        seen.clear()
        logits = torch.stack([model(input_ids=IDS).logits for _ in range(2)], 1)
        handle = logits.register_hook(functools.partial(private.fsdp1_hook, None))
        if removed:
            handle.remove()
        F.cross_entropy(logits[:, which].flatten(0, 1), IDS.flatten()).backward()
        assert len(seen) == (0 if removed else 1)


def test_hooks_of_users_get_the_gradient_or_an_error(build: Callable[..., Any]) -> None:
    stock = build("Llama")
    model = patch_model(copy.deepcopy(stock), on_materialize="ignore")
    gradients: list[Tensor] = []
    for each in (stock, model):
        logits = each(input_ids=IDS).logits
        logits.register_hook(gradients.append)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    torch.testing.assert_close(gradients[1], gradients[0])
    outputs = model(input_ids=IDS, labels=IDS)
    with pytest.raises(RuntimeError, match="after the loss"):
        outputs.logits.register_hook(print)
