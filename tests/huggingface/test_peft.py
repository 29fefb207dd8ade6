"""PEFT's adapters on the output embedding and elsewhere: patched models compared with stock models."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.huggingface import MaterializedLogitsWarning, patch_model
from flce.testing.problem import relative_error
from tests.helpers import parametrize_pairs
from tests.huggingface.scripts import Build, Calls, Compare, V, batch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = [
    # Warnings of PEFT about adapters on tied embeddings, and about biases that cannot be merged.
    pytest.mark.filterwarnings("ignore:(?!.* needs the logits)"),
]

NAMES = ["Llama", "Qwen3", "Gemma2"]  # an untied head, a tied head, a head with a softcap
WHEN = ["before", "after"]  # patched before or after `get_peft_model`
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HEAD = [*LAYERS, "lm_head"]


def lora(**settings: Any) -> Any:
    """Return a config of adapters with random weights, whose logits are about as large as the head's."""
    usual = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": HEAD}
    return peft.LoraConfig(**{**usual, **settings})


def wrap(model: Any, *configs: Any) -> Any:
    """Return the model with adapters "default", "adapter1", ..., with the same weights in each call."""
    torch.manual_seed(7)
    wrapped = peft.get_peft_model(model, configs[0])
    for i, config in enumerate(configs[1:], 1):
        wrapped.add_adapter(f"adapter{i}", config)
    return wrapped.train()


def adapted(patch: Callable[..., Any], model: Any, when: str, *configs: Any) -> Any:
    """Return a patched model with adapters."""
    if when == "before":
        patch(model)
    model = wrap(model, *configs)
    return patch(model) if when == "after" else model


def head_gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients of the parameters in the output embedding."""
    return {n: p.grad for n, p in model.get_output_embeddings().named_parameters() if p.grad is not None}


# ------------------------------------------------------------------------------------------------ one step

CONFIGS: dict[str, Callable[[], Any]] = {
    "backbone": lambda: lora(target_modules=LAYERS),
    "all-linear": lambda: lora(target_modules="all-linear"),  # all but the head
    "head too": lora,
    "head only": lambda: lora(target_modules=["lm_head"]),
    "dropout": lambda: lora(lora_dropout=0.3),
    "rslora": lambda: lora(use_rslora=True),
    "bias": lambda: lora(lora_bias=True),
    "modules_to_save": lambda: lora(target_modules=LAYERS, modules_to_save=["lm_head"]),
    "head and embedding": lambda: lora(target_modules=[*HEAD, "embed_tokens"]),
    "trainable tokens": lambda: lora(target_modules=LAYERS, trainable_token_indices=[5, 7]),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@parametrize_pairs(name=NAMES, config=list(CONFIGS), when=WHEN)
@pytest.mark.usefixtures("fail_on_materialize")
def test_training_step(name: str, config: str, when: str, compare: Compare) -> None:
    script = """
        model = adapted(patch, build(name), when, CONFIGS[config]())
        step()
        fused(1)
        assert all(gradient.abs().max() > 1e-3 for gradient in head_gradients(model).values())
        step()
        fused(1)"""
    compare(script, name=name, config=config, when=when)


@pytest.mark.parametrize("config, when", zip(CONFIGS, itertools.cycle(WHEN)))
@pytest.mark.usefixtures("fail_on_materialize")
def test_evaluation(config: str, when: str, compare: Compare) -> None:
    """Calls with labels are fused, also if the wrapper calls the inner forward. Other calls run stock code."""
    script = """
        model = adapted(patch, build("Gemma2"), when, CONFIGS[config]()).eval()
        inputs = batch()
        with torch.no_grad():
            outputs = model(**inputs)
            fused(1)
            lazy(outputs.logits)
            note(outputs)
            del inputs["labels"]
            logits = model(**inputs).logits
        assert type(logits) is Tensor
        note(logits, tolerance=0)
        fused(0)"""
    compare(script, config=config, when=when)


def test_the_operator_gets_the_adapters(build: Build, fused_calls: Calls) -> None:
    """Factors of the head apply to the adapters too, and the softcap is applied last."""
    model = adapted(patch_model, build("Gemma2"), "after", lora(), lora(r=2))
    model.base_model.set_adapter(["default", "adapter1"])
    model(**batch())
    (call,) = fused_calls
    assert call["softcap"] == 0.3
    assert [(hidden.shape[-1], weight.shape) for hidden, weight in call["adapters"]] == [(4, (V, 4)), (2, (V, 2))]


# ------------------------------------------------------------------------------- adapters that come and go

# One of each kind of model.
CHANGES = {
    "several adapters": """
        model = adapted(patch, build(name), when, lora(), lora(r=2, lora_alpha=6, lora_dropout=0.2))
        losses = set()
        for active in (["default", "adapter1"], ["adapter1"], ["default"], ["adapter1", "default"]):
            model.base_model.set_adapter(active)
            losses.add(step().loss.item())
            assert len(head_gradients(model)) == 2 * len(active)
            assert not patched or len(calls[-1]["adapters"]) == len(active)
            fused(1)
        assert len(losses) >= 3  # of the fourth, only the dropout differs from the first""",
    "disabled": """
        model = adapted(patch, build(name), when, lora())
        first = step().loss
        with model.disable_adapter():
            base = step().loss
        torch.testing.assert_close(base, build(name)(**batch()).loss)
        assert torch.equal(step().loss, first)
        assert abs(float(first - base)) > 1e-2
        fused(3)""",
    "merged and unmerged": """
        model = adapted(patch, build(name), when, lora())
        for change in (model.merge_adapter, model.unmerge_adapter):
            change()
            step()
            fused(1)""",
    # The model without PEFT is still patched, and all of its parameters are trained.
    **{
        method: f"""
        model = adapted(patch, build(name), when, lora()).{method}().requires_grad_(True)
        assert type(model.get_output_embeddings()).__name__ == "Linear"
        step()
        assert not patched or "adapters" not in calls[-1]
        fused(1)"""
        for method in ("merge_and_unload", "unload")
    },
}


@parametrize_pairs(name=NAMES, change=list(CHANGES), when=WHEN)
@pytest.mark.usefixtures("fail_on_materialize")
def test_changes(name: str, change: str, when: str, compare: Compare) -> None:
    compare(CHANGES[change], name=name, when=when)


SURROUNDED = {
    "an own loss": """
        model = adapted(patch, build("Llama"), when, lora())
        backward(own_loss(model))
        fused(1)""",
    "an adapter that is added and deleted": """
        model = adapted(patch, build("Llama"), when, lora(target_modules=LAYERS))
        torch.manual_seed(9)
        model.add_adapter("later", lora())
        model.set_adapter("later")
        step()
        assert not patched or len(calls[-1]["adapters"]) == 1
        model.set_adapter("default")
        model.delete_adapter("later")
        step()
        fused(2)""",
    # Each adapter with ``modules_to_save`` has a separate head.
    "copies of the head are switched": """
        config = lora(target_modules=LAYERS, modules_to_save=["lm_head"])
        model = adapted(patch, build("Llama"), when, config, copy.deepcopy(config))
        with torch.no_grad():
            model.get_output_embeddings().modules_to_save["adapter1"].weight.mul_(-1.0)
        for active in ("adapter1", "default"):
            model.set_adapter(active)
            step()
            assert list(head_gradients(model)) == [f"modules_to_save.{active}.weight"]
        with model.disable_adapter():
            step()
        fused(3)""",
    **{
        f"a compiled evaluation of a copied head, {fullgraph=}": f"""
        model = adapted(patch, build("Llama", num_hidden_layers=1), when, CONFIGS["modules_to_save"]()).eval()
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph={fullgraph}) if patched else model
        outputs = compiled(**batch())
        backward(outputs.loss)
        lazy(outputs.logits)"""
        for fullgraph in (True, False)
    },
}


@pytest.mark.parametrize("name, when", zip(SURROUNDED, itertools.cycle(WHEN)))
@pytest.mark.usefixtures("fail_on_materialize")
def test_around_one_model(name: str, when: str, compare: Compare) -> None:
    compare(SURROUNDED[name], when=when)


OF_EACH_CONFIG = {
    "generate": """
        model = adapted(patch, build("Gemma2", num_hidden_layers=1), when, CONFIGS[config]()).eval()
        note(model.generate(input_ids=IDS, max_new_tokens=6, min_new_tokens=6, do_sample=False))
        fused(0)""",
    "unpatch": """
        model = adapted(patch, build("Llama", num_hidden_layers=1), when, CONFIGS[config]())
        step()
        fused(1)
        assert unpatch(model) is model
        assert not is_patched(model)
        note([type(module) for module in model.modules()])
        step()
        fused(0)
        patch(model)
        step()
        fused(1)""",
    "compiled": """
        model = adapted(patch, build("Gemma2", num_hidden_layers=1), when, CONFIGS[config]())
        torch.compiler.reset()
        outputs = (torch.compile(model, backend="eager") if patched else model)(**batch())
        assert when == "before" or isinstance(outputs.logits, LazyLogits) == patched
        backward(outputs.loss)
        if when == "after":
            lazy(outputs.logits)""",
}


@parametrize_pairs(name=list(OF_EACH_CONFIG), config=["backbone", "head too", "modules_to_save"], when=WHEN)
@pytest.mark.usefixtures("fail_on_materialize")
def test_with_each_config(name: str, config: str, when: str, compare: Compare) -> None:
    compare(OF_EACH_CONFIG[name], config=config, when=when)


@parametrize_pairs(name=["Llama", "Qwen3"], config=["backbone", "head too", "modules_to_save"], when=WHEN)
@pytest.mark.usefixtures("fail_on_materialize")
def test_save_and_load(
    name: str, config: str, when: str, compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patched run loads the files of both runs."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # PEFT would search for the base model on the hub
    script = """
        model = adapted(patch, build(name), when, CONFIGS[config]())
        note(list(model.state_dict()))
        own = folder / str(patched)
        model.save_pretrained(own, save_embedding_layers=False)
        note(sorted(path.name for path in own.iterdir()))
        loss = step().loss
        fused(1)
        for saved, base in ((own, build(name)), (own, patch(build(name))), (folder / "False", patch(build(name)))):
            model = peft.PeftModel.from_pretrained(base, saved, is_trainable=True).train()
            torch.testing.assert_close(step().loss, loss)
        fused(2)"""
    compare(script, name=name, config=config, when=when, folder=tmp_path)


def test_a_copy_of_a_patched_head_is_the_models(build: Build) -> None:
    """PEFT trains a copy of the layer that patch_model has changed."""
    patched = adapted(patch_model, build("Llama"), "before", CONFIGS["modules_to_save"]())
    with warnings.catch_warnings():
        warnings.simplefilter("error", flce.huggingface.NotFusedWarning)
        for _ in range(4):
            patched(**batch()).loss.backward()
    assert flce.report(patched).fused == 4
    assert patched.get_base_model()._flce.has_vocabulary_products is False
    patch_model(patched, on_materialize="raise")
    with pytest.raises(flce.huggingface.MaterializedLogitsError):
        patched(**batch()).logits.sigmoid()


# --------------------------------------------------------------------------------------------- precision

PRECISIONS = {
    # As with QLoRA: a frozen base in bfloat16, adapters in float32, activations checkpointed. The adapter's part of
    # the logits is float32, and their sum is rounded to the base's dtype.
    **{
        f"half precision, {target}": f"""
        model = build(name).bfloat16()
        model.gradient_checkpointing_enable({{"use_reentrant": False}})
        model.enable_input_require_grads()
        model = adapted(patch, model, when, CONFIGS["{target}"]())
        assert {{p.dtype for p in model.parameters() if p.requires_grad}} == {{torch.float32}}
        outputs = model(**batch(), use_cache=False)"""
        for target in ("backbone", "head too")
    },
    "autocast": """
        model = adapted(patch, build(name), when, lora())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(**batch())""",
}


@parametrize_pairs(name=NAMES, precision=list(PRECISIONS), when=WHEN)
@pytest.mark.usefixtures("fail_on_materialize")
def test_precision(name: str, precision: str, when: str, compare: Compare) -> None:
    """The errors of the patched step, compared with float64, are similar to stock's."""
    script = """
        outputs.loss.backward()
        fused(1)
        note(outputs.loss.dtype)
        note(outputs.logits, tolerance=0)"""
    stock, patched = (run.names for run in compare(PRECISIONS[precision] + script, name=name, when=when))
    exact = copy.deepcopy(stock["model"]).double()
    exact.zero_grad()
    loss = exact(**batch()).loss
    loss.backward()
    errors = [abs(float(each["outputs"].loss - loss)) for each in (stock, patched)]
    assert errors[1] <= 2 * errors[0] + 5e-3
    models = (exact, stock["model"], patched["model"])
    for want, left, right in zip(*(model.parameters() for model in models), strict=True):
        assert (right.grad is None) == (left.grad is None)
        if left.grad is not None and want.grad.norm() > 0:
            assert relative_error(right.grad, want.grad) <= 1.5 * relative_error(left.grad, want.grad) + 1e-2


# ------------------------------------------------------------------------- what has no form without logits


def materialised(caught: Any) -> list[str]:
    return [str(each.message) for each in caught if issubclass(each.category, MaterializedLogitsWarning)]


@parametrize_pairs(name=NAMES, dropout=[0.0, 0.3], when=WHEN)
def test_dora_on_the_head(name: str, dropout: float, when: str, compare: Compare) -> None:
    """DoRA scales each class by the norm of its row, for which the operator has no argument."""
    script = """
        model = adapted(patch, build(name), when, lora(use_dora=True, lora_dropout=dropout))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            step()
            messages = materialised(caught)
            assert any("dora.py" in message for message in messages) == patched
            step()
            assert materialised(caught) == messages
        fused(0)"""
    compare(script, name=name, dropout=dropout, when=when)


def on_head(tuner: str, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(peft, f"{tuner}Config")(task_type="CAUSAL_LM", target_modules=["lm_head"], **settings)


OTHERS = {
    "ia3": on_head("IA3", feedforward_modules=[], init_ia3_weights=False),
    "ia3 feedforward": on_head("IA3", feedforward_modules=["lm_head"], init_ia3_weights=False),
    "loha": on_head("LoHa", r=2, init_weights=False),
    "oft": on_head("OFT", r=0, oft_block_size=4, init_weights=False),
    "adalora": on_head("AdaLora", init_r=4, target_r=2, total_step=9, init_lora_weights=False),
    "hra": on_head("HRA", r=4),
}
FUSED = ["ia3 feedforward", "loha", "oft", "hra"]


FIRST = {
    "a training step": "pass",
    "disabled": """
        with model.disable_adapter(), torch.no_grad():
            model(**batch())""",
    "merged": """
        model.merge_adapter()
        model(**batch())
        model.unmerge_adapter()""",
    "another adapter": """
        model.add_adapter("reference", OTHERS[tuner]())
        model.set_adapter("reference")
        model(**batch())
        model.set_adapter("default")""",
    "without adapters": "pass",
}


@pytest.mark.parametrize(
    "tuner, first, when",
    [
        *((tuner, "a training step", "before") for tuner in OTHERS),
        *((tuner, "disabled", "after") for tuner in OTHERS),
        *(("hra", first, "before") for first in list(FIRST)[2:]),
    ],
)
@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_other_tuners_on_the_head(tuner: str, first: str, when: str, compare: Compare) -> None:
    """Results are right, and fused whatever the first call was, unless a tuner needs logits (with a warning)."""
    script = f"""
        model = build("Llama")
        if first == "without adapters":
            patch(model)(**batch())
        model = adapted(patch, model, when, OTHERS[tuner]())
        {FIRST[first]}
        calls.clear()
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step()
            assert bool(materialised(caught)) == (patched and tuner not in FUSED)
            fused(1 if tuner in FUSED else 0)"""
    compare(script, tuner=tuner, when=when, first=first)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_an_adapter_for_each_sequence(when: str, compare: Compare) -> None:
    """PEFT adds the logits of the adapters to the logits of the base in place."""
    script = """
        model = adapted(patch, build("Llama"), when, lora(), lora(r=2)).eval()
        with torch.no_grad():
            note(model(**batch(), adapter_names=["adapter1", "default"]))"""
    compare(script, when=when)


# ------------------------------------------------------------------------------------------------- memory

WIDE, HIDDEN, TOKENS = 32768, 256, 512
OPTIONS = flce.ChunkOptions(chunk_rows=16)  # 2 MiB of logits at a time


@parametrize_pairs(target=["backbone", "head too"], dtype=[torch.float32, torch.bfloat16], when=WHEN)
def test_workspace(target: str, dtype: torch.dtype, when: str, build: Build) -> None:
    """No logits, and no copy, cast or gradient of the frozen head are allocated.

    The logits would be 64 MiB, and the logits of the adapter another 64 MiB. The head is 32 MiB in float32.
    """
    from tests.planning.test_plan import peak_on_cpu

    model = build("Llama", vocab_size=WIDE, hidden_size=HIDDEN).to(dtype)
    if when == "before":
        patch_model(model, options=OPTIONS)
    model = wrap(model, CONFIGS[target]())
    if when == "after":
        patch_model(model, options=OPTIONS)
    ids = torch.randint(3, WIDE, (4, TOKENS // 4))

    def train() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    peak = peak_on_cpu(train)
    assert [g.shape for g in head_gradients(model).values()] == (
        [(4, HIDDEN), (WIDE, 4)] if target == "head too" else []
    )
    assert peak < 0.85 * 4 * WIDE * HIDDEN, f"{peak / 2**20:.1f} MiB"
