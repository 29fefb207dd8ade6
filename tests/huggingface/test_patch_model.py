"""Patched models against stock ones: losses, every gradient, outputs, and all that surrounds a model."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import flce
from flce.huggingface import (
    LazyLogits,
    MaterializedLogitsError,
    MaterializedLogitsWarning,
    is_patched,
    patch_model,
    unpatch_model,
)
from flce.huggingface.lazy import is_lazy

transformers = pytest.importorskip("transformers")

ARCHITECTURES = ["Llama", "Qwen3", "Gemma2", "Granite", "Mixtral"]
V = 97
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}

Build = Callable[..., Any]
Calls = list[dict[str, Any]]


def batch(padding: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (2, 9), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    if padding:
        mask[1, 6:] = 0
        labels[mask == 0] = -100
        labels[:, :2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def shifted(labels: Tensor) -> Tensor:
    return nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()


INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": batch,
    "padding": lambda: batch(padding=True),
    "num_items int": lambda: {**batch(padding=True), "num_items_in_batch": 23},
    "num_items tensor": lambda: {**batch(padding=True), "num_items_in_batch": torch.tensor(23)},
    "shift_labels": lambda: {**batch(), "shift_labels": shifted(batch(padding=True)["labels"])},
    "all ignored": lambda: {
        **batch(),
        "labels": torch.full((2, 9), -100),
        "num_items_in_batch": 1,
    },
    "all ignored, and their number": lambda: {
        **batch(),
        "labels": torch.full((2, 9), -100),
        "num_items_in_batch": torch.tensor(0),
    },
    "hidden states": lambda: {**batch(), "output_hidden_states": True},
}


def pair(build: Build, name: str, **config: Any) -> tuple[Any, Any]:
    stock = build(name, **config)
    patched = build(name, **config)
    patched.load_state_dict(stock.state_dict())
    assert patch_model(patched) is patched
    return stock, patched


def assert_same_outputs(stock: Any, patched: Any) -> None:
    assert type(stock) is type(patched)
    assert list(stock.keys()) == list(patched.keys())
    for key, want in stock.items():
        got = patched[key]
        if is_lazy(got):
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            got = got.materialize()
        if isinstance(want, (Tensor, tuple)):
            torch.testing.assert_close(got, want, **TOLERANCE, equal_nan=True)


def assert_same_gradients(stock: nn.Module, patched: nn.Module) -> None:
    for (name, want), (other, got) in zip(stock.named_parameters(), patched.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(got.grad, want.grad, **TOLERANCE, msg=f"{name}: {{}}".format)


# ---------------------------------------------------------------------------- loss and gradients


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.usefixtures("nothing_materialises")
def test_training_step(name: str, inputs: str, build: Build, fused_calls: Calls) -> None:
    stock, patched = pair(build, name)
    wanted, outputs = stock(**INPUTS[inputs]()), patched(**INPUTS[inputs]())
    assert len(fused_calls) == 1
    assert isinstance(outputs.logits, LazyLogits)
    assert isinstance(outputs.logits, Tensor)
    wanted.loss.backward()
    outputs.loss.backward()
    assert not outputs.logits.is_materialized
    assert_same_outputs(wanted, outputs)
    assert_same_gradients(stock, patched)


def test_the_operator_does_what_lies_between_head_and_loss(build: Build, fused_calls: Calls) -> None:
    for name in ("Llama", "Gemma2", "Granite"):
        patch_model(build(name))(**batch())
    scales = [(call["logit_scale"], call["softcap"]) for call in fused_calls]
    assert scales == [(1.0, None), (1.0, 0.3), (0.25, None)]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.usefixtures("nothing_materialises")
def test_evaluation(name: str, build: Build, fused_calls: Calls) -> None:
    stock, patched = pair(build, name)
    stock.eval(), patched.eval()
    inputs = batch(padding=True)
    with torch.no_grad():
        wanted, outputs = stock(**inputs), patched(**inputs)
        assert len(fused_calls) == 1
        assert_same_outputs(wanted, outputs)
        del inputs["labels"]
        outputs = patched(**inputs)
    assert len(fused_calls) == 1
    assert type(outputs.logits) is Tensor  # no loss, so stock's own logits
    assert torch.equal(outputs.logits, stock(**inputs).logits)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.usefixtures("nothing_materialises")
def test_float64_oracle(name: str, build: Build) -> None:
    """In float32 as close to float64 as stock is; in float64 exact, where stock casts its logits to float32."""
    oracle = build(name).double()
    inputs = batch()
    logits = oracle(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
    exact = nn.functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten())
    exact.backward()
    stock, patched = pair(build, name)
    errors = []
    for model in (stock, patched, patch_model(copy.deepcopy(oracle))):
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        gradients = [
            (got.grad - want.grad).norm() / want.grad.norm()
            for want, got in zip(oracle.parameters(), model.parameters(), strict=True)
        ]
        errors.append(torch.stack([(loss - exact).abs().double(), *gradients]))
    assert (errors[1] <= 1.5 * errors[0] + 1e-6).all()
    assert errors[2][0] < 1e-6  # the loss itself is float32, as stock's
    assert errors[2][1:].max() < 1e-10


@pytest.mark.usefixtures("nothing_materialises")
def test_bfloat16(build: Build) -> None:
    stock, patched = (model.bfloat16() for model in pair(build, "Gemma2"))
    wanted, outputs = stock(**batch()), patched(**batch())
    outputs.loss.backward()
    assert outputs.loss.dtype == wanted.loss.dtype
    assert outputs.logits.dtype == wanted.logits.dtype
    torch.testing.assert_close(outputs.loss, wanted.loss, rtol=1e-2, atol=1e-2)
    assert torch.equal(outputs.logits.materialize(), wanted.logits)


@pytest.mark.usefixtures("nothing_materialises")
def test_autocast(build: Build) -> None:
    results = []
    for model in pair(build, "Llama"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(**batch())
        outputs.loss.backward()
        results.append((outputs.loss, outputs.logits.dtype, model.lm_head.weight.grad))
    assert results[0][1] == results[1][1] == torch.bfloat16
    torch.testing.assert_close(results[1][0], results[0][0], rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(results[1][2], results[0][2], rtol=5e-2, atol=5e-3)


@pytest.mark.usefixtures("nothing_materialises")
def test_return_dict_false(build: Build) -> None:
    stock, patched = pair(build, "Mixtral")
    wanted, outputs = stock(**batch(), return_dict=False), patched(**batch(), return_dict=False)
    assert isinstance(outputs, tuple)
    torch.testing.assert_close(outputs[0], wanted[0])
    assert [isinstance(value, LazyLogits) for value in outputs].count(True) == 1
    assert [value.shape for value in outputs[:3]] == [value.shape for value in wanted[:3]]


@pytest.mark.usefixtures("nothing_materialises")
def test_positional_labels_and_logits_to_keep(build: Build, fused_calls: Calls) -> None:
    stock, patched = (model.eval() for model in pair(build, "Llama"))
    position = list(inspect.signature(stock.forward).parameters).index("labels")
    inputs = batch()
    arguments = [inputs["input_ids"], inputs["attention_mask"], *[None] * (position - 2), inputs["labels"]]
    torch.testing.assert_close(patched(*arguments).loss, stock(*arguments).loss)
    assert len(fused_calls) == 1
    kept = {**inputs, "labels": inputs["labels"][:, -4:], "logits_to_keep": 4}
    wanted, outputs = stock(**kept), patched(**kept)
    assert_same_outputs(wanted, outputs)
    assert len(fused_calls) == 2


@pytest.mark.usefixtures("nothing_materialises")
def test_frozen_head_gets_no_gradient(build: Build) -> None:
    stock, patched = pair(build, "Llama")
    for model in (stock, patched):
        model.lm_head.weight.requires_grad_(False)
        model(**batch()).loss.backward()
    assert patched.lm_head.weight.grad is None
    assert_same_gradients(stock.model, patched.model)


@pytest.mark.usefixtures("nothing_materialises")
def test_head_with_bias(build: Build) -> None:
    stock, patched = pair(build, "Llama")
    bias = torch.randn(V)
    for model in (stock, patched):
        model.lm_head.bias = nn.Parameter(bias.clone())
        model(**batch()).loss.backward()
    assert_same_gradients(stock, patched)


@pytest.mark.usefixtures("nothing_materialises")
def test_own_loss_from_outputs(build: Build, fused_calls: Calls) -> None:
    """A training loop, or a trainer's label smoothing, that never gives the labels to the model."""
    stock, patched = pair(build, "Gemma2")
    inputs = batch()
    labels = inputs.pop("labels")
    for model in (stock, patched):
        logits = model(**inputs).logits
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
    assert len(fused_calls) == 1
    assert_same_gradients(stock, patched)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.usefixtures("nothing_materialises")
def test_gradient_checkpointing(reentrant: bool, build: Build) -> None:
    stock, patched = pair(build, "Llama")
    for model in (stock, patched):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model(**batch()).loss.backward()
    assert_same_gradients(stock, patched)


def test_reading_the_logits_warns_once_and_is_right(build: Build) -> None:
    stock, patched = pair(build, "Granite")
    outputs = patched(**batch())
    with pytest.warns(MaterializedLogitsWarning, match="topk") as caught:
        predictions = outputs.logits.topk(3).indices
    assert len(caught) == 1
    outputs["logits"].softmax(-1)
    assert len(caught) == 1
    assert torch.equal(predictions, stock(**batch()).logits.topk(3).indices)


@pytest.mark.usefixtures("nothing_materialises")
def test_predictions_without_logits(build: Build) -> None:
    stock, patched = pair(build, "Gemma2")
    assert torch.equal(patched(**batch()).logits.argmax(-1), stock(**batch()).logits.argmax(-1))


def test_on_materialize(build: Build) -> None:
    model = patch_model(build("Llama"), on_materialize="raise")
    with pytest.raises(MaterializedLogitsError, match="softmax"):
        model(**batch()).logits.softmax(-1)
    outputs = patch_model(model, on_materialize="ignore")(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs.logits.softmax(-1)
    with pytest.raises(ValueError, match="'warn', 'ignore' or 'raise', got 'print'"):
        patch_model(model, on_materialize="print")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_hooks_see_logits_and_gradients(build: Build) -> None:
    stock, patched = pair(build, "Llama")
    seen: list[Tensor] = []
    for model in (stock, patched):
        model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
        model(**batch()).loss.backward()
    torch.testing.assert_close(seen[1], seen[0], **TOLERANCE)
    assert_same_gradients(stock, patched)


def test_functional_transforms_run_stock(build: Build) -> None:
    stock, patched = pair(build, "Llama")

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, parameters, (), batch()).loss

        return torch.func.grad(loss)({k: v.detach() for k, v in model.named_parameters()})

    torch.testing.assert_close(gradients(patched), gradients(stock))
    assert type(torch.func.functional_call(patched, dict(patched.named_parameters()), (), batch()).logits) is LazyLogits


# ------------------------------------------------------------------------------ around the model


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.usefixtures("nothing_materialises")
def test_generate(name: str, training: bool, build: Build) -> None:
    stock, patched = pair(build, name)
    prompt = batch()["input_ids"]
    for options in ({"num_beams": 1}, {"num_beams": 3}, {"do_sample": True}, {"do_sample": True, "num_beams": 2}):
        texts = []
        for model in (stock, patched):
            model.train(training)
            torch.manual_seed(3)
            arguments = {"max_new_tokens": 6, "do_sample": False, **options}
            texts.append(model.generate(prompt, return_dict_in_generate=True, output_logits=True, **arguments))
        assert torch.equal(texts[0].sequences, texts[1].sequences)
        for want, got in zip(texts[0].logits, texts[1].logits, strict=True):
            assert torch.equal(got, want)


def hooks_of(module: nn.Module) -> dict[str, dict[Any, Any]]:
    return {name: dict(value) for name, value in vars(module).items() if "hooks" in name and isinstance(value, dict)}


def test_unpatch_restores_the_original(build: Build) -> None:
    original = build("Llama")
    before = {
        "class": type(original.lm_head),
        "head": dict(vars(original.lm_head)),
        "model": dict(vars(original)),
        "hooks": hooks_of(original),
    }
    assert not is_patched(original)
    patch_model(original)
    assert is_patched(original)
    original(**batch()).loss.backward()
    assert unpatch_model(original) is original
    assert not is_patched(original)
    assert type(original.lm_head) is before["class"] is nn.Linear
    assert vars(original.lm_head) == before["head"]
    assert vars(original) == before["model"]
    assert hooks_of(original) == before["hooks"]
    assert type(original(**batch()).logits) is Tensor
    unpatch_model(original)


def test_patching_twice_changes_the_options_only(build: Build, fused_calls: Calls) -> None:
    model = patch_model(build("Llama"))
    options = flce.ChunkOptions(chunk_rows=4)
    patch_model(model, options=options)
    model(**batch()).loss.backward()
    assert [call["options"] for call in fused_calls] == [options]
    unpatch_model(model)
    assert not is_patched(model)
    assert type(model) is type(build("Llama"))
    assert type(model.lm_head) is nn.Linear


@pytest.mark.usefixtures("nothing_materialises")
def test_deepcopy_and_pickle(build: Build, fused_calls: Calls, tmp_path: Path) -> None:
    stock, patched = pair(build, "Qwen3")
    stock(**batch()).loss.backward()
    file = io.BytesIO()
    torch.save(patched, file)
    file.seek(0)
    copies = [copy.deepcopy(patched), pickle.loads(pickle.dumps(patched)), torch.load(file, weights_only=False)]
    for count, copied in enumerate(copies, 1):
        assert is_patched(copied)
        head = copied.get_output_embeddings()
        assert head is not patched.get_output_embeddings()
        assert head.weight is copied.get_input_embeddings().weight  # still tied
        copied(**batch()).loss.backward()
        assert len(fused_calls) == count
        assert_same_gradients(stock, copied)
        unpatch_model(copied)
        assert type(head) is nn.Linear
    assert is_patched(patched)


def test_state_dict_and_save_pretrained(build: Build, tmp_path: Path) -> None:
    stock, patched = pair(build, "Llama")
    assert list(patched.state_dict()) == list(stock.state_dict())
    assert [n for n, _ in patched.named_modules()] == [n for n, _ in stock.named_modules()]
    patched.save_pretrained(tmp_path)
    loaded = type(patched).from_pretrained(tmp_path)
    assert not is_patched(loaded)
    assert type(loaded.lm_head) is nn.Linear
    torch.testing.assert_close(loaded.state_dict(), dict(stock.state_dict()))
    patched.load_state_dict(loaded.state_dict())
    assert patched.config.architectures in (None, ["LlamaForCausalLM"])


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
@pytest.mark.usefixtures("nothing_materialises")
def test_resize_after_patching(name: str, build: Build, fused_calls: Calls) -> None:
    stock, patched = pair(build, name)
    for model in (stock, patched):
        torch.manual_seed(3)
        model.resize_token_embeddings(V + 7, mean_resizing=False)
    patched.load_state_dict(stock.state_dict())
    wanted, outputs = stock(**batch()), patched(**batch())
    assert len(fused_calls) == 1
    wanted.loss.backward()
    outputs.loss.backward()
    assert_same_outputs(wanted, outputs)
    assert_same_gradients(stock, patched)
    assert type(unpatch_model(patched).get_output_embeddings()) is nn.Linear


class _Wrapper(nn.Module):
    """Calls the inner model's forward directly, past its hooks, as adapters do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def get_output_embeddings(self) -> Any:
        return self.inner.get_output_embeddings()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


@pytest.mark.parametrize("patch_before", [True, False])
@pytest.mark.usefixtures("nothing_materialises")
def test_wrappers_that_call_forward(patch_before: bool, build: Build, fused_calls: Calls) -> None:
    model = build("Llama")
    wanted = copy.deepcopy(model)(**batch()).loss
    wrapper = _Wrapper(patch_model(model)) if patch_before else patch_model(_Wrapper(model))
    torch.testing.assert_close(wrapper(**batch()).loss, wanted)
    assert len(fused_calls) == 1
    with torch.no_grad():
        torch.testing.assert_close(wrapper.eval()(**batch()).loss, wanted)
    assert len(fused_calls) == 2
    assert is_patched(wrapper)
    assert not is_patched(unpatch_model(wrapper))
    assert type(model.lm_head) is nn.Linear


def test_an_exception_leaves_no_trace(build: Build) -> None:
    model = patch_model(build("Llama")).eval()
    with pytest.raises(IndexError), torch.no_grad():
        model(input_ids=batch()["input_ids"], labels=batch()["labels"] + V)
    with torch.no_grad():
        assert type(model.lm_head(torch.randn(3, 32))) is Tensor


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize("prediction_loss_only", [True, False])
def test_accelerate_helpers(prediction_loss_only: bool, build: Build) -> None:
    """What Trainer does to the outputs of an evaluation step."""
    operations = pytest.importorskip("accelerate.utils.operations")
    stock, patched = (model.eval().bfloat16() for model in pair(build, "Llama"))
    results = []
    for model in (stock, patched):
        with torch.no_grad():
            outputs = operations.convert_outputs_to_fp32(model.__call__)(**batch())
        assert outputs.logits.dtype == torch.float32
        logits = outputs.logits.detach()
        if not prediction_loss_only:
            logits = operations.pad_across_processes(operations.send_to_device(logits, "cpu"), dim=1)
            results.append(operations.concatenate([logits, logits]))
    if results:
        torch.testing.assert_close(results[1], results[0])


def test_accelerate_hooks(build: Build, fused_calls: Calls) -> None:
    """Models dispatched over devices keep each module's forward on the instance."""
    hooks = pytest.importorskip("accelerate.hooks")
    for patch_first in (True, False):
        stock = build("Llama")
        wanted = stock(**batch()).loss
        if patch_first:
            patch_model(stock)
        hooks.add_hook_to_module(stock.lm_head, hooks.ModelHook())
        patch_model(stock)
        fused_calls.clear()
        torch.testing.assert_close(stock(**batch()).loss, wanted)
        assert len(fused_calls) == 1
        unpatch_model(stock)
        assert type(stock(**batch()).logits) is Tensor
        assert stock.lm_head._old_forward.__func__ is nn.Linear.forward


# ---------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_compile_fullgraph(name: str, build: Build) -> None:
    torch.compiler.reset()
    stock, patched = pair(build, name, num_hidden_layers=1)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    inputs = batch(padding=True)
    del inputs["attention_mask"]
    wanted, outputs = stock(**inputs), compiled(**inputs)
    wanted.loss.backward()
    outputs.loss.backward()
    assert isinstance(outputs.logits, LazyLogits)
    assert not outputs.logits.is_materialized
    torch.testing.assert_close(outputs.loss, wanted.loss, **TOLERANCE)
    torch.testing.assert_close(outputs.logits.materialize(), wanted.logits, **TOLERANCE)
    assert_same_gradients(stock, patched)


def test_compile_with_a_loss_of_ones_own(build: Build, fused_calls: Calls) -> None:
    """Made from what the compiled model returns."""
    torch.compiler.reset()
    stock, patched = pair(build, "Llama", num_hidden_layers=1)
    ids = batch()["input_ids"]
    losses = []
    for model in (stock, torch.compile(patched, fullgraph=True, backend="aot_eager")):
        logits = model(input_ids=ids).logits
        losses.append(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], **TOLERANCE)
    assert_same_gradients(stock, patched)
    assert len(fused_calls) == 1


def test_compiled_layers_are_compiled_as_often_as_by_stock(build: Build, fused_calls: Calls) -> None:
    counts = []
    for patched in (False, True):
        torch.compiler.reset()
        model, counter = build("Llama"), CompileCounter()
        if patched:
            patch_model(model)
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend=counter)
        for _ in range(2):
            model(**batch()).loss.backward()
        counts.append(counter.frame_count)
    assert len(fused_calls) == 2
    assert counts[1] == counts[0]


def test_compile_inference_is_stock(build: Build) -> None:
    torch.compiler.reset()
    stock, patched = (m.eval() for m in pair(build, "Llama", num_hidden_layers=1))
    compiled = torch.compile(patched, fullgraph=True, backend="eager")
    with torch.no_grad():
        ids = batch()["input_ids"]
        logits = compiled(input_ids=ids).logits
        assert type(logits) is Tensor
        torch.testing.assert_close(logits, stock(input_ids=ids).logits)


# ---------------------------------------------------------------------------- what cannot be patched


def test_models_without_a_head(build: Build) -> None:
    model = build("Llama")
    with pytest.raises(TypeError, match="LlamaModel has no output embedding"):
        patch_model(model.model)
    with pytest.raises(TypeError, match="Linear has no output embedding"):
        patch_model(nn.Linear(2, 2))

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    assert is_patched(patch_model(Parallel()))
    assert not is_patched(unpatch_model(model))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got str"):
        patch_model("gpt2")  # type: ignore[type-var]
    assert not is_patched(model)


class _Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_heads_that_are_not_linear(build: Build) -> None:
    model = build("Llama")
    model.lm_head = nn.Sequential(nn.Linear(32, 7), nn.GELU())
    with pytest.raises(TypeError, match=r"is a .*Sequential, with no plain torch\.nn\.Linear"):
        patch_model(model)
    model.lm_head = _Own(32, V)
    with pytest.raises(TypeError, match=r"is a .*_Own, with no plain torch\.nn\.Linear"):
        patch_model(model)
    model.lm_head = nn.Linear(32, V)
    model.lm_head.weight = nn.Parameter(torch.zeros(V, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match="int8"):
        patch_model(model)
    assert not is_patched(model)
    assert type(model).forward is type(build("Llama")).forward


def test_a_linear_layer_behind_others_in_the_head(build: Build, fused_calls: Calls) -> None:
    stock = build("Llama")
    stock.lm_head = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, V))
    patched = patch_model(copy.deepcopy(stock))
    wanted, outputs = stock(**batch()), patched(**batch())
    wanted.loss.backward()
    outputs.loss.backward()
    assert len(fused_calls) == 1
    assert_same_outputs(wanted, outputs)
    assert_same_gradients(stock, patched)


def test_only_the_first_call_looks_for_the_head(build: Build) -> None:
    model = patch_model(build("Llama"))
    with torch.no_grad():
        model.eval()(input_ids=batch()["input_ids"])
    assert model._flce.watch_products is None
    model(**batch())
    assert model._flce.watch_products is False


def test_a_head_that_is_a_product_with_the_embedding(fused_calls: Calls) -> None:
    """Found by watching, without and with gradients, and left alone in inference."""
    sizes = {
        "max_position_embeddings": 9,
        "d_model": 32,
        "d_latents": 32,
        "num_latents": 8,
        "num_blocks": 1,
        "num_self_attends_per_block": 1,
    }
    config = transformers.PerceiverConfig(
        **sizes, vocab_size=V, num_self_attention_heads=2, num_cross_attention_heads=2
    )
    stock = transformers.PerceiverForMaskedLM(config).eval()
    patched = patch_model(copy.deepcopy(stock))
    inputs = {"inputs": batch()["input_ids"], "labels": batch()["labels"]}
    for grad in (False, True, True):
        with torch.set_grad_enabled(grad):
            wanted, outputs = stock(**inputs), patched(**inputs)
        assert_same_outputs(wanted, outputs)
    assert len(fused_calls) == 3
    assert patched._flce.watch_products
    assert type(patched(inputs=inputs["inputs"]).logits) is Tensor
    outputs.loss.backward()
    wanted.loss.backward()
    assert_same_gradients(stock, patched)
    assert type(unpatch_model(patched)) is type(stock)


class _Counted(nn.Module):
    """A parametrisation with a state that changes whenever the weight is read, as `spectral_norm` has."""

    reads = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.reads += 1
        return weight * 1.0


def test_a_parametrised_weight_is_read_as_often_as_by_stock(build: Build, fused_calls: Calls) -> None:
    reads = []
    for patched in (False, True):
        model = build("Llama")
        nn.utils.parametrize.register_parametrization(model.lm_head, "weight", _Counted())
        if patched:
            patch_model(model)
        counter = model.lm_head.parametrizations.weight[0]
        before = counter.reads
        for _ in range(3):
            model(**batch()).loss.backward()
        reads.append(counter.reads - before)
    assert len(fused_calls) == 3
    assert reads[1] == reads[0]


def test_threads(build: Build) -> None:
    """Calls with and without labels at the same time, as replicas of a model make them."""
    model = patch_model(build("Llama")).eval()
    started, go_on = threading.Event(), threading.Event()
    seen = []

    def wait(*_: Any) -> None:
        started.set()
        assert go_on.wait(30)

    def evaluate() -> None:
        with torch.no_grad():
            seen.append(model(**batch()).logits)

    handle = model.model.norm.register_forward_hook(wait)
    thread = threading.Thread(target=evaluate)
    thread.start()
    assert started.wait(30)
    handle.remove()
    with torch.no_grad():  # while the other thread is within a call with labels
        assert type(model(input_ids=batch()["input_ids"]).logits) is Tensor
    go_on.set()
    thread.join()
    assert isinstance(seen[0], LazyLogits)
    with torch.no_grad():
        assert type(model.lm_head(torch.randn(3, 32))) is Tensor


def test_a_container_of_several_models(build: Build, fused_calls: Calls) -> None:
    container = nn.ModuleDict({"policy": build("Llama"), "reference": build("Gemma2")})
    patch_model(container)
    for model in container.values():
        model(**batch())
    assert len(fused_calls) == 2
    assert not is_patched(unpatch_model(container))
    assert type(container["reference"].lm_head) is nn.Linear


def test_a_model_around_a_patched_one(build: Build, fused_calls: Calls) -> None:
    """Both see labels; they share the head."""
    model = patch_model(build("Llama"))
    wrapper = patch_model(_Wrapper(model)).eval()
    with torch.no_grad():
        wrapper(**batch())
        model(**batch())
        assert type(model(input_ids=batch()["input_ids"]).logits) is Tensor
    assert len(fused_calls) == 2
    assert not is_patched(unpatch_model(wrapper))


def test_patching_again_after_a_change_of_class(build: Build, fused_calls: Calls) -> None:
    """As FSDP2 makes it, before and after which a model may be patched."""
    model = patch_model(build("Llama"))
    for module in (model, model.lm_head):
        module.__class__ = type("Sharded", (type(module),), {})
    unpatch_model(model)
    assert type(model(**batch()).logits) is Tensor
    patch_model(model)
    assert isinstance(model(**batch()).logits, LazyLogits)
    assert len(fused_calls) == 1


def test_parametrised_heads_stay_what_they_are(build: Build, fused_calls: Calls) -> None:
    stock = build("Llama")
    nn.utils.parametrizations.weight_norm(stock.lm_head)
    patched = patch_model(copy.deepcopy(stock))
    wanted, outputs = stock(**batch()), patched(**batch())
    wanted.loss.backward()
    outputs.loss.backward()
    assert len(fused_calls) == 1
    torch.testing.assert_close(outputs.loss, wanted.loss, **TOLERANCE)
    assert_same_gradients(stock, patched)
    assert type(unpatch_model(patched).lm_head) is not nn.Linear
