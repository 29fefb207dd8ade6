"""Patched models compared with stock models: losses, gradients, outputs, saving, copying, wrappers."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flce
from flce.huggingface import LazyLogits, MaterializedLogitsError, is_patched, patch_model, unpatch_model
from tests.huggingface.scripts import IDS, Build, Calls, Compare, V, batch

transformers = pytest.importorskip("transformers")

ARCHITECTURES = ["Llama", "Qwen3", "Gemma2", "Granite", "Mixtral"]


def shifted(labels: Tensor) -> Tensor:
    return nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()


NOTHING = {"labels": torch.full((2, 9), -100)}
INPUTS: dict[str, dict[str, Any]] = {
    "plain": batch(),
    "padding": batch(padding=True),
    "num_items int": batch(padding=True, num_items_in_batch=23),
    "num_items tensor": batch(padding=True, num_items_in_batch=torch.tensor(23)),
    "shift_labels": batch(shift_labels=shifted(batch(padding=True)["labels"])),
    "all ignored": {**NOTHING, "num_items_in_batch": 1},
    "all ignored, and their number": {**NOTHING, "num_items_in_batch": torch.tensor(0)},
    "hidden states": {"output_hidden_states": True},
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.usefixtures("fail_on_materialize")
def test_training_step(name: str, inputs: str, compare: Compare) -> None:
    script = """
        model = patch(build(name))
        outputs = step(**INPUTS[inputs])
        fused(1)
        assert isinstance(outputs.logits, Tensor)"""
    compare(script, name=name, inputs=inputs)


@pytest.mark.parametrize("settings", [{}, {"empty_loss": "zero"}], ids=str)
def test_a_loss_without_labels(settings: dict[str, str], build: Build) -> None:
    """NaN as in stock, or 0. The gradients are 0 in both."""
    model = patch_model(build("Llama"), **settings)  # type: ignore[arg-type]
    for loss in (
        model(input_ids=IDS, **NOTHING).loss,
        flce.cross_entropy(model(input_ids=IDS).logits, NOTHING["labels"]),
    ):
        assert torch.equal(loss, torch.zeros(())) if settings else loss.isnan()
        loss.backward()
    assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def test_the_operator_does_what_lies_between_head_and_loss(build: Build, fused_calls: Calls) -> None:
    for name in ("Llama", "Gemma2", "Granite"):
        patch_model(build(name))(**batch())
    scales = [(call["logit_scale"], call["softcap"]) for call in fused_calls]
    assert scales == [(1.0, None), (1.0, 0.3), (0.25, None)]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.usefixtures("fail_on_materialize")
def test_evaluation(name: str, compare: Compare) -> None:
    """Without labels no loss is expected, so stock code computes the logits."""
    script = """
        model = patch(build(name)).eval()
        inputs = batch(padding=True)
        with torch.no_grad():
            note(model(**inputs))
            fused(1)
            del inputs["labels"]
            logits = model(**inputs).logits
        assert type(logits) is Tensor
        note(logits, tolerance=0)
        fused(0)"""
    compare(script, name=name)


def hooks_of(module: nn.Module) -> dict[str, dict[Any, Any]]:
    return {name: dict(value) for name, value in vars(module).items() if "hooks" in name and isinstance(value, dict)}


QUIET = {
    "bfloat16": """
        model = patch(build("Gemma2")).bfloat16()
        outputs = model(**batch())
        outputs.loss.backward()
        note(outputs.loss, tolerance=1e-2)
        note(outputs.logits, tolerance=0)""",
    "autocast": """
        model = patch(build("Llama"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(**batch())
        outputs.loss.backward()
        assert outputs.logits.dtype == torch.bfloat16
        note(outputs.loss, tolerance=5e-3)
        note(model.lm_head.weight.grad, tolerance=5e-2)""",
    "outputs as a tuple": """
        model = patch(build("Mixtral"))
        outputs = model(**batch(), return_dict=False)
        assert isinstance(outputs, tuple)
        assert sum(isinstance(value, LazyLogits) for value in outputs) == patched
        note(outputs[0], [tuple(value.shape) for value in outputs[:3]])""",
    "labels by position": """
        model = patch(build("Llama")).eval()
        position = list(inspect.signature(build("Llama").forward).parameters).index("labels")
        note(model(IDS, torch.ones_like(IDS), *[None] * (position - 2), IDS).loss)
        fused(1)""",
    "logits of the last tokens": """
        model = patch(build("Llama")).eval()
        note(model(**batch(logits_to_keep=4, labels=IDS[:, -4:])))
        fused(1)""",
    "a frozen head": """
        model = patch(build("Llama"))
        model.lm_head.weight.requires_grad_(False)
        step()
        fused(1)""",
    # The loss of a training loop or of label smoothing, which calls the model without labels.
    "an own loss": """
        model = patch(build("Gemma2"))
        backward(own_loss(model, attention_mask=torch.ones_like(IDS)))
        logits = model(IDS).logits
        backward(nn.CrossEntropyLoss(label_smoothing=0.1)(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()))
        fused(2)""",
    "checkpoints": """
        model = patch(build("Llama"))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        step(use_cache=False)
        fused(1)""",
    "copies": """
        original = patch(build("Qwen3"))
        for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), loaded):
            model = copied(original)
            assert is_patched(model) == patched
            head = model.get_output_embeddings()
            assert head is not original.get_output_embeddings()
            assert head.weight is model.get_input_embeddings().weight  # still tied
            step()
            fused(1)
            unpatch(model)
            assert type(head) is nn.Linear
        assert is_patched(original) == patched""",
    "resized": """
        for name in ("Llama", "Qwen3"):
            model = patch(build(name))
            torch.manual_seed(3)
            model.resize_token_embeddings(V + 7, mean_resizing=False)
            step()
            fused(1)
            assert type(unpatch(model).get_output_embeddings()) is nn.Linear""",
    # Calls the forward of the inner model without its hooks, as adapters do.
    "wrappers that call forward": """
        run = lambda inner, **inputs: inner.forward(**inputs)
        for model in (Wrapper(patch(build("Llama")), run), patch(Wrapper(build("Llama"), run))):
            step()
            fused(1)
            with torch.no_grad():
                note(model.eval()(**batch()).loss)
            fused(1)
            assert is_patched(model) == patched
            assert not is_patched(unpatch(model))
            assert type(model.inner.lm_head) is nn.Linear""",
    # Accelerate stores each module's forward on the instance if it dispatches a model over devices.
    "hooks of accelerate": """
        hooks = importorskip("accelerate.hooks")
        for patch_first in (True, False):
            model = build("Llama")
            if patch_first:
                patch(model)
            hooks.add_hook_to_module(model.lm_head, hooks.ModelHook())
            patch(model)
            step()
            fused(1)
            unpatch(model)
            assert type(model(**batch()).logits) is Tensor
            assert model.lm_head._old_forward.__func__ is nn.Linear.forward""",
    "compiled layers are compiled as often": """
        from torch._dynamo.testing import CompileCounter
        torch.compiler.reset()
        model, counter = patch(build("Llama")), CompileCounter()
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend=counter)
        step(), step()
        fused(2)
        note(counter.frame_count)""",
    # `ProductMode` finds the product with and without gradients. Inference is not changed.
    "a product with the embedding": """
        config = transformers.PerceiverConfig(
            vocab_size=V, max_position_embeddings=9, d_model=32, d_latents=32, num_latents=8, num_blocks=1,
            num_self_attends_per_block=1, num_self_attention_heads=2, num_cross_attention_heads=2,
        )
        model = patch(transformers.PerceiverForMaskedLM(config).eval())
        for grad in (False, True, True):
            with torch.set_grad_enabled(grad):
                outputs = model(inputs=IDS, labels=IDS)
                note(outputs)
                fused(1)
        assert not patched or model._flce.has_vocabulary_products
        assert type(model(inputs=IDS).logits) is Tensor
        backward(outputs.loss)
        assert type(unpatch(model)) is transformers.PerceiverForMaskedLM""",
    # Both models are called with labels, and share the head.
    "a model around a patched one": """
        model = patch(build("Llama"))
        wrapper = patch(Wrapper(model, lambda inner, **inputs: inner.forward(**inputs))).eval()
        with torch.no_grad():
            note(wrapper(**batch()).loss, model(**batch()).loss)
            assert type(model(input_ids=IDS).logits) is Tensor
        fused(2)
        assert not is_patched(unpatch(wrapper))""",
    # FSDP2 changes the class in this way. A model may be patched before or after.
}


@pytest.mark.parametrize("name", QUIET)
@pytest.mark.usefixtures("fail_on_materialize")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_without_logits(name: str, compare: Compare) -> None:
    compare(QUIET[name])


READING = {
    "hooks on the head": """
        model, seen = patch(build("Llama")), []
        model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
        step()
        note(seen)""",
    # They run stock's code.
    "transforms of functions": """
        model = patch(build("Llama"))
        def loss(parameters):
            return torch.func.functional_call(model, parameters, (), batch()).loss
        note(torch.func.grad(loss)({k: v.detach() for k, v in model.named_parameters()}))
        outputs = torch.func.functional_call(model, dict(model.named_parameters()), (), batch())
        assert isinstance(outputs.logits, LazyLogits) == patched""",
    # Operations of Trainer on the outputs of an evaluation step.
    "helpers of accelerate": """
        operations = importorskip("accelerate.utils.operations")
        model = patch(build("Llama")).eval().bfloat16()
        with torch.no_grad():
            outputs = operations.convert_outputs_to_fp32(model.__call__)(**batch())
        assert outputs.logits.dtype == torch.float32
        logits = outputs.logits.detach()
        lazy(logits)
        logits = operations.pad_across_processes(operations.send_to_device(logits, "cpu"), dim=1)
        note(operations.concatenate([logits, logits]))""",
}


@pytest.mark.parametrize("name", READING)
@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.filterwarnings("ignore::flce.huggingface.NotFusedWarning")
def test_with_logits(name: str, compare: Compare) -> None:
    compare(READING[name])


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.usefixtures("fail_on_materialize")
def test_generate(name: str, training: bool, compare: Compare) -> None:
    script = """
        model = patch(build(name)).train(training)
        for options in ({"num_beams": 1}, {"num_beams": 3}, {"do_sample": True}, {"do_sample": True, "num_beams": 2}):
            torch.manual_seed(3)
            options = {"max_new_tokens": 6, "do_sample": False, **options}
            texts = model.generate(IDS, return_dict_in_generate=True, output_logits=True, **options)
            assert all(type(logits) is Tensor for logits in texts.logits)
            note(texts.sequences, texts.logits, tolerance=0)"""
    compare(script, name=name, training=training)


def test_on_materialize(build: Build) -> None:
    model = patch_model(build("Llama"), on_materialize="raise")
    outputs = model(**batch())
    line = sys._getframe().f_lineno + 2
    with pytest.raises(MaterializedLogitsError, match=f"torch.Tensor.sigmoid at {__file__}:{line}"):
        (outputs.logits * 2).sigmoid()
    assert not outputs.logits.is_materialized
    outputs = patch_model(model, on_materialize="ignore")(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs.logits.sigmoid()
    with pytest.raises(ValueError, match="'warn', 'ignore' or 'raise', got 'print'"):
        patch_model(model, on_materialize="print")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ around the model


def test_unpatch_restores_the_original(build: Build) -> None:
    original = build("Llama")

    def state() -> tuple[Any, ...]:
        head = original.lm_head
        return is_patched(original), type(head), dict(vars(head)), dict(vars(original)), hooks_of(original)

    before = state()
    assert before[:2] == (False, nn.Linear)
    patch_model(original)
    assert is_patched(original)
    original(**batch()).loss.backward()
    assert unpatch_model(original) is original
    assert state() == before
    assert type(original(**batch()).logits) is Tensor
    unpatch_model(original)


def test_patching_twice_changes_the_options_only(build: Build, fused_calls: Calls) -> None:
    model = patch_model(build("Llama"))
    options = flce.ChunkOptions(chunk_rows=4)
    assert patch_model(model, options=options) is model
    model(**batch()).loss.backward()
    assert [call["options"] for call in fused_calls] == [options]
    unpatch_model(model)
    assert not is_patched(model)
    assert type(model) is type(build("Llama"))
    assert type(model.lm_head) is nn.Linear


def test_state_dict_and_save_pretrained(build: Build, tmp_path: Path) -> None:
    stock, patched = build("Llama"), patch_model(build("Llama"))
    assert list(patched.state_dict()) == list(stock.state_dict())
    assert [n for n, _ in patched.named_modules()] == [n for n, _ in stock.named_modules()]
    patched.save_pretrained(tmp_path)
    loaded = type(patched).from_pretrained(tmp_path)
    assert not is_patched(loaded)
    assert type(loaded.lm_head) is nn.Linear
    torch.testing.assert_close(loaded.state_dict(), dict(stock.state_dict()))
    patched.load_state_dict(loaded.state_dict())
    assert patched.config.architectures in (None, ["LlamaForCausalLM"])


def test_an_exception_leaves_no_trace(build: Build) -> None:
    model = patch_model(build("Llama")).eval()
    with pytest.raises(IndexError), torch.no_grad():
        model(**batch(labels=IDS + V))
    with torch.no_grad():
        assert type(model.lm_head(torch.randn(3, 32))) is Tensor


# ---------------------------------------------------------------------------- what cannot be patched


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def integers() -> nn.Linear:
    head = nn.Linear(32, V)
    head.weight = nn.Parameter(torch.zeros(V, 32, dtype=torch.int8), requires_grad=False)
    return head


def typed(name: str, **attributes: Any) -> nn.Linear:
    """Return a head whose weight has the class of a quantiser."""
    head = Own(32, V)
    head.weight = nn.Parameter(torch.zeros(V, 32).as_subclass(type(name, (Tensor,), attributes)), requires_grad=False)
    return head


def packed() -> nn.Module:
    head = nn.Module()
    head.register_buffer("qweight", torch.zeros(4, V, dtype=torch.int32))
    return head


UNFIT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no head": (lambda model: model.model, "LlamaModel has no output embedding"),
    "no linear layer of as many classes": (
        lambda model: nn.Sequential(nn.Linear(32, 7), nn.GELU()),
        r"is a .*Sequential, without a plain torch\.nn\.Linear",
    ),
    "another class of layer": (lambda model: Own(32, V), r"is a .*Own, without a plain torch\.nn\.Linear"),
    "integers": (lambda model: integers(), "int8 weights: a quantised head"),
    "another class of weight": (
        lambda model: typed("Packed", dequantize=lambda x: x),
        "Packed weights: a quantised head",
    ),
    "packed integers": (lambda model: packed(), "torch.int32 weights: a quantised head"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_models_that_cannot_be_patched(name: str, build: Build) -> None:
    make, message = UNFIT[name]
    model = build("Llama")
    what = make(model)
    if isinstance(what, nn.Module) and name not in ("no head", "one layer"):
        model.lm_head, what = what, model
    with pytest.raises(TypeError, match=message):
        patch_model(what)
    assert not is_patched(model)
    assert type(model).forward is type(build("Llama")).forward


@pytest.mark.parametrize("function", [patch_model, unpatch_model, is_patched, flce.report])
def test_arguments_that_are_not_models(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=rf"{function.__name__} expects a torch.nn.Module, got str"):
        function("x")


def test_threads(build: Build) -> None:
    """Two threads call the model with and without labels at the same time, as replicas do."""
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
        assert type(model(input_ids=IDS).logits) is Tensor
    go_on.set()
    thread.join()
    assert isinstance(seen[0], LazyLogits)
    with torch.no_grad():
        assert type(model.lm_head(torch.randn(3, 32))) is Tensor
