"""PEFT's adapters, around the output embedding and on it: patched models against stock ones."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flce
from flce.huggingface import LazyLogits, MaterializedLogitsWarning, is_patched, patch_model, unpatch_model
from flce.huggingface.lazy import is_lazy
from flce.testing.problem import relative_error
from tests.helpers import pairs

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = [
    # What PEFT says about adapters on tied embeddings, and about biases that cannot be merged.
    pytest.mark.filterwarnings("ignore:(?!.* needs the logits)"),
]

NAMES = ["Llama", "Qwen3", "Gemma2"]  # a head of its own, one tied to the embedding, a softcap behind it
WHEN = ["before", "after"]  # patched before or after `get_peft_model`
V = 97
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HEAD = [*LAYERS, "lm_head"]

Build = Callable[..., Any]
Calls = list[dict[str, Any]]


def lora(**settings: Any) -> Any:
    """Adapters with random weights, which change the logits by as much as the head makes them."""
    usual = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": HEAD}
    return peft.LoraConfig(**{**usual, **settings})


def batch(**more: Any) -> dict[str, Any]:
    ids = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, :3] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, **more}


def wrap(model: Any, *configs: Any) -> Any:
    """The model with adapters "default", "adapter1", ..., the same at every call."""
    torch.manual_seed(7)
    wrapped = peft.get_peft_model(model, configs[0])
    for i, config in enumerate(configs[1:], 1):
        wrapped.add_adapter(f"adapter{i}", config)
    return wrapped.train()


def patched_model(make: Callable[[], Any], when: str, *configs: Any) -> Any:
    model = make()
    if when == "before":
        patch_model(model)
    model = wrap(model, *configs)
    if when == "after":
        assert patch_model(model) is model
    assert is_patched(model)
    return model


def pair(build: Build, name: str, when: str, *configs: Any) -> tuple[Any, Any]:
    return wrap(build(name), *configs), patched_model(lambda: build(name), when, *configs)


def step(model: Any, **more: Any) -> Any:
    model.zero_grad()
    torch.manual_seed(11)  # of the dropout
    outputs = model(**batch(**more))
    if outputs.loss.requires_grad:
        outputs.loss.backward()
    return outputs


def assert_same_step(stock: Any, patched: Any, fused_calls: Calls, fused: int = 1, **more: Any) -> Any:
    """Loss, logits and gradients of one step; returns the patched model's outputs."""
    wanted = step(stock, **more)
    before = len(fused_calls)
    outputs = step(patched, **more)
    assert len(fused_calls) == before + fused
    if fused:
        assert isinstance(outputs.logits, LazyLogits)
        assert not outputs.logits.is_materialized
    assert_same_outputs(wanted, outputs)
    assert_same_gradients(stock, patched)
    return outputs


def assert_same_outputs(wanted: Any, outputs: Any) -> None:
    assert list(outputs.keys()) == list(wanted.keys())
    logits = outputs.logits.materialize() if isinstance(outputs.logits, LazyLogits) else outputs.logits
    torch.testing.assert_close(outputs.loss, wanted.loss, **TOLERANCE)
    torch.testing.assert_close(logits, wanted.logits, **TOLERANCE)


def assert_same_gradients(stock: nn.Module, patched: nn.Module) -> None:
    for (name, want), (other, got) in zip(stock.named_parameters(), patched.named_parameters(), strict=True):
        assert name == other
        assert got.requires_grad == want.requires_grad, name
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, **TOLERANCE, msg=f"{name}: {{}}".format)


def head_gradients(model: Any) -> dict[str, Tensor]:
    """Those of the parameters in the output embedding."""
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
TRAINED_HEADS = {
    "head too": 2,
    "head only": 2,
    "dropout": 2,
    "rslora": 2,
    "bias": 3,
    "modules_to_save": 1,
    "head and embedding": 2,
}


@pairs(name=NAMES, config=list(CONFIGS), when=WHEN)
@pytest.mark.usefixtures("nothing_materialises")
def test_training_step(name: str, config: str, when: str, build: Build, fused_calls: Calls) -> None:
    stock, patched = pair(build, name, when, CONFIGS[config]())
    assert_same_step(stock, patched, fused_calls)
    gradients = head_gradients(patched)
    if config != "trainable tokens":  # of a tied head, some rows are trained with the embedding
        assert len(gradients) == TRAINED_HEADS.get(config, 0)
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients.values())
    assert_same_step(stock, patched, fused_calls)  # the second call is as the first


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.usefixtures("nothing_materialises")
def test_evaluation(config: str, when: str, build: Build, fused_calls: Calls) -> None:
    """With labels fused, also where the wrapper calls the inner model's forward; without, stock's own logits."""
    stock, patched = (model.eval() for model in pair(build, "Gemma2", when, CONFIGS[config]()))
    inputs = batch()
    with torch.no_grad():
        wanted, outputs = stock(**inputs), patched(**inputs)
        assert len(fused_calls) == 1
        assert isinstance(outputs.logits, LazyLogits)
        assert_same_outputs(wanted, outputs)
        del inputs["labels"]
        logits = patched(**inputs).logits
    assert type(logits) is Tensor
    assert torch.equal(logits, wanted.logits)
    assert len(fused_calls) == 1


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.usefixtures("nothing_materialises")
def test_own_loss(when: str, build: Build, fused_calls: Calls) -> None:
    """A training loop that computes its own cross-entropy."""
    stock, patched = pair(build, "Llama", when, lora())
    inputs = batch()
    labels = inputs.pop("labels").flatten()
    losses = [nn.functional.cross_entropy(m(**inputs).logits.flatten(0, 1), labels) for m in (stock, patched)]
    assert len(fused_calls) == 1
    torch.testing.assert_close(losses[1], losses[0], **TOLERANCE)
    for loss in losses:
        loss.backward()
    assert_same_gradients(stock, patched)


def test_the_operator_gets_the_adapters(build: Build, fused_calls: Calls) -> None:
    """Factors of the head apply to the adapters as well: the softcap comes last."""
    _, patched = pair(build, "Gemma2", "after", lora(), lora(r=2))
    patched.base_model.set_adapter(["default", "adapter1"])
    step(patched)
    (call,) = fused_calls
    assert call["softcap"] == 0.3
    assert [(hidden.shape[-1], weight.shape) for hidden, weight in call["adapters"]] == [(4, (V, 4)), (2, (V, 2))]


# ------------------------------------------------------------------------------- adapters that come and go


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("nothing_materialises")
def test_several_adapters(name: str, when: str, build: Build, fused_calls: Calls) -> None:
    stock, patched = pair(build, name, when, lora(), lora(r=2, lora_alpha=6, lora_dropout=0.2))
    losses = []
    for active in (["default", "adapter1"], ["adapter1"], ["default"], ["adapter1", "default"]):
        for model in (stock, patched):
            model.base_model.set_adapter(active)
        losses.append(assert_same_step(stock, patched, fused_calls).loss.item())
        assert len(head_gradients(patched)) == 2 * len(active)
        assert len(fused_calls[-1]["adapters"]) == len(active)
    assert len(set(losses)) >= 3  # of the fourth, only the dropout differs from the first


@pytest.mark.usefixtures("nothing_materialises")
def test_an_adapter_added_after_patching(build: Build, fused_calls: Calls) -> None:
    stock, patched = pair(build, "Llama", "after", lora(target_modules=LAYERS))
    for model in (stock, patched):
        torch.manual_seed(9)
        model.add_adapter("later", lora())
        model.set_adapter("later")
    assert_same_step(stock, patched, fused_calls)
    assert len(fused_calls[-1]["adapters"]) == 1
    for model in (stock, patched):
        model.set_adapter("default")
        model.delete_adapter("later")
    assert_same_step(stock, patched, fused_calls)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.usefixtures("nothing_materialises")
def test_copies_of_the_head_switched(when: str, build: Build, fused_calls: Calls) -> None:
    """Each adapter with ``modules_to_save`` has a head of its own."""
    config = lora(target_modules=LAYERS, modules_to_save=["lm_head"])
    stock, patched = pair(build, "Llama", when, config, copy.deepcopy(config))
    for model in (stock, patched):
        copies = model.get_output_embeddings().modules_to_save
        with torch.no_grad():
            copies["adapter1"].weight.mul_(-1.0)
    for active in ("adapter1", "default"):
        for model in (stock, patched):
            model.set_adapter(active)
        assert_same_step(stock, patched, fused_calls)
        assert list(head_gradients(patched)) == [f"modules_to_save.{active}.weight"]
    with stock.disable_adapter(), patched.disable_adapter():
        assert_same_step(stock, patched, fused_calls)


def test_a_copy_of_a_patched_head_is_the_models(build: Build) -> None:
    """PEFT copies the layer, which patch_model has changed, to train the copy."""
    patched = patched_model(lambda: build("Llama"), "before", CONFIGS["modules_to_save"]())
    with warnings.catch_warnings():
        warnings.simplefilter("error", flce.huggingface.NotFusedWarning)
        for _ in range(4):
            step(patched)
    assert flce.report(patched).fused == 4
    assert patched.get_base_model()._flce.watch_products is False
    patch_model(patched, on_materialize="raise")
    with pytest.raises(flce.huggingface.MaterializedLogitsError):
        patched(**batch()).logits.softmax(-1)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_copied_head_in_a_compiled_evaluation(fullgraph: bool, build: Build) -> None:
    stock, patched = (model.eval() for model in pair(build, "Llama", "before", CONFIGS["modules_to_save"]()))
    wanted = step(stock)
    torch.compiler.reset()
    outputs = step(torch.compile(patched, backend="eager", fullgraph=fullgraph))
    assert is_lazy(outputs.logits)
    assert not outputs.logits.is_materialized
    torch.testing.assert_close(outputs.loss, wanted.loss, **TOLERANCE)
    assert_same_gradients(stock, patched)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("nothing_materialises")
def test_disabled(name: str, when: str, build: Build, fused_calls: Calls) -> None:
    stock, patched = pair(build, name, when, lora())
    first = assert_same_step(stock, patched, fused_calls).loss
    with stock.disable_adapter(), patched.disable_adapter():
        base = assert_same_step(stock, patched, fused_calls).loss
    torch.testing.assert_close(base, build(name)(**batch()).loss, **TOLERANCE)
    again = assert_same_step(stock, patched, fused_calls).loss
    assert torch.equal(first, again)
    assert abs(float(first - base)) > 1e-2


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("nothing_materialises")
def test_merged_and_unmerged(name: str, when: str, build: Build, fused_calls: Calls) -> None:
    stock, patched = pair(build, name, when, lora())
    for method in ("merge_adapter", "unmerge_adapter"):
        for model in (stock, patched):
            getattr(model, method)()
        assert_same_step(stock, patched, fused_calls)


@pairs(name=NAMES, method=["merge_and_unload", "unload"], when=WHEN)
@pytest.mark.usefixtures("nothing_materialises")
def test_unloaded(name: str, method: str, when: str, build: Build, fused_calls: Calls) -> None:
    """The plain model that remains is patched, and trains in full."""
    stock, patched = (getattr(model, method)().requires_grad_(True) for model in pair(build, name, when, lora()))
    assert type(patched.get_output_embeddings()).__name__ == "Linear"
    assert_same_step(stock, patched, fused_calls)
    assert "adapters" not in fused_calls[-1]


# --------------------------------------------------------------------------------------------- precision


@pairs(name=NAMES, target=["backbone", "head too"], when=WHEN)
@pytest.mark.usefixtures("nothing_materialises")
def test_half_precision_base(name: str, target: str, when: str, build: Build, fused_calls: Calls) -> None:
    """As with QLoRA: a frozen base in bfloat16, adapters in float32, activations checkpointed.

    The adapter's part of the logits is float32, and their sum is rounded to the base's dtype.
    """

    def make() -> Any:
        model = build(name).bfloat16()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        return model

    stock, patched = wrap(make(), CONFIGS[target]()), patched_model(make, when, CONFIGS[target]())
    dtypes = {p.dtype for p in patched.parameters() if p.requires_grad}
    assert dtypes == {torch.float32}
    wanted, outputs = step(stock, use_cache=False), step(patched, use_cache=False)
    assert len(fused_calls) == 1
    assert outputs.loss.dtype == wanted.loss.dtype
    assert outputs.logits.dtype == wanted.logits.dtype
    assert torch.equal(outputs.logits.materialize(), wanted.logits)
    assert_close_to_exact(stock, patched, wanted.loss, outputs.loss)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("nothing_materialises")
def test_autocast(name: str, when: str, build: Build, fused_calls: Calls) -> None:
    stock, patched = pair(build, name, when, lora())
    results = []
    for model in (stock, patched):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(**batch())
        outputs.loss.backward()
        results.append(outputs)
    wanted, outputs = results
    assert len(fused_calls) == 1
    assert outputs.loss.dtype == wanted.loss.dtype
    assert outputs.logits.dtype == wanted.logits.dtype
    assert torch.equal(outputs.logits.materialize(), wanted.logits)
    assert_close_to_exact(stock, patched, wanted.loss, outputs.loss)


def assert_close_to_exact(stock: Any, patched: Any, wanted: Tensor, loss: Tensor) -> None:
    """The patched step is about as close to that of the same weights in float64 as stock's."""
    exact = copy.deepcopy(stock).double()
    exact_loss = step(exact).loss
    assert abs(float(loss - exact_loss)) <= 2 * abs(float(wanted - exact_loss)) + 5e-3
    for want, left, right in zip(exact.parameters(), stock.parameters(), patched.parameters(), strict=True):
        assert (right.grad is None) == (left.grad is None)
        if left.grad is not None and want.grad.norm() > 0:
            assert relative_error(right.grad, want.grad) <= 1.5 * relative_error(left.grad, want.grad) + 1e-2


# ------------------------------------------------------------------------- what has no form without logits


@pairs(name=NAMES, dropout=[0.0, 0.3], when=WHEN)
def test_dora_on_the_head(name: str, dropout: float, when: str, build: Build, fused_calls: Calls) -> None:
    """It scales each class by the norm of its row, which no factor of the operator stands for."""
    stock, patched = pair(build, name, when, lora(use_dora=True, lora_dropout=dropout))
    wanted = step(stock)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        outputs = step(patched)
        messages = [str(w.message) for w in caught if issubclass(w.category, MaterializedLogitsWarning)]
        assert any("dora.py" in message for message in messages)
        step(patched)
        assert len(messages) == len([w for w in caught if issubclass(w.category, MaterializedLogitsWarning)])
    assert not fused_calls
    assert_same_outputs(wanted, outputs)
    assert_same_gradients(stock, patched)


@pytest.mark.usefixtures("nothing_materialises")
def test_dora_on_the_backbone(build: Build, fused_calls: Calls) -> None:
    stock, patched = pair(build, "Llama", "after", lora(target_modules=LAYERS, use_dora=True))
    assert_same_step(stock, patched, fused_calls)


OTHERS: dict[str, Callable[[], Any]] = {
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["lm_head"], feedforward_modules=[], init_ia3_weights=False
    ),
    "ia3 feedforward": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["lm_head"], feedforward_modules=["lm_head"], init_ia3_weights=False
    ),
    "loha": lambda: peft.LoHaConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"], init_weights=False),
    "lokr": lambda: peft.LoKrConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"], init_weights=False),
    "oft": lambda: peft.OFTConfig(
        task_type="CAUSAL_LM", r=0, oft_block_size=4, target_modules=["lm_head"], init_weights=False
    ),
    "adalora": lambda: peft.AdaLoraConfig(
        task_type="CAUSAL_LM", init_r=4, target_r=2, total_step=9, target_modules=["lm_head"], init_lora_weights=False
    ),
    "fourierft": lambda: peft.FourierFTConfig(
        task_type="CAUSAL_LM", n_frequency=20, target_modules=["lm_head"], init_weights=False
    ),
    "vera": lambda: peft.VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["lm_head"], d_initial=0.5),
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("tuner", OTHERS)
def test_other_tuners_on_the_head(tuner: str, when: str, build: Build, fused_calls: Calls) -> None:
    """Right in any case; with the logits and a warning where a tuner needs them."""
    stock, patched = pair(build, "Llama", when, OTHERS[tuner]())
    for _ in range(2):
        before = len(fused_calls)
        wanted = step(stock)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outputs = step(patched)
        warned = any(issubclass(w.category, MaterializedLogitsWarning) for w in caught)
        assert warned == (len(fused_calls) == before)
        assert_same_outputs(wanted, outputs)
        assert_same_gradients(stock, patched)
    if tuner in ("ia3 feedforward", "oft"):  # change what goes into the head, not what comes out
        assert len(fused_calls) == 2


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_an_adapter_for_each_sequence(when: str, build: Build) -> None:
    """PEFT writes the adapters' parts into the base's logits."""
    stock, patched = (model.eval() for model in pair(build, "Llama", when, lora(), lora(r=2)))
    with torch.no_grad():
        wanted, outputs = (m(**batch(), adapter_names=["adapter1", "default"]) for m in (stock, patched))
    assert_same_outputs(wanted, outputs)


# ----------------------------------------------------------------------------------- all that surrounds it


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("config", ["backbone", "head too", "modules_to_save"])
@pytest.mark.usefixtures("nothing_materialises")
def test_generate(config: str, when: str, build: Build, fused_calls: Calls) -> None:
    stock, patched = (model.eval() for model in pair(build, "Gemma2", when, CONFIGS[config]()))
    inputs = batch()
    del inputs["labels"]
    wanted, got = (m.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False) for m in (stock, patched))
    assert torch.equal(got, wanted)
    assert not fused_calls


@pairs(name=["Llama", "Qwen3"], config=["backbone", "head too", "modules_to_save"], when=WHEN)
@pytest.mark.usefixtures("nothing_materialises")
def test_save_and_load(
    name: str, config: str, when: str, build: Build, fused_calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # it would look the base model up
    stock, patched = pair(build, name, when, CONFIGS[config]())
    assert list(patched.state_dict()) == list(stock.state_dict())
    for folder, model in (("stock", stock), ("patched", patched)):
        model.save_pretrained(tmp_path / folder, save_embedding_layers=False)
    files = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("stock", "patched")]
    assert files[0] == files[1]
    plain = peft.PeftModel.from_pretrained(build(name), tmp_path / "patched", is_trainable=True).train()
    loaded = peft.PeftModel.from_pretrained(patch_model(build(name)), tmp_path / "stock", is_trainable=True).train()
    wanted = step(stock)
    assert_same_outputs(wanted, step(plain))
    assert_same_step(plain, loaded, fused_calls)
    assert_same_outputs(wanted, step(loaded))


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("config", ["backbone", "head too", "modules_to_save"])
@pytest.mark.usefixtures("nothing_materialises")
def test_unpatch(config: str, when: str, build: Build, fused_calls: Calls) -> None:
    stock, patched = pair(build, "Llama", when, CONFIGS[config]())
    assert_same_step(stock, patched, fused_calls)
    assert unpatch_model(patched) is patched
    assert not is_patched(patched)
    assert [type(m) for m in patched.modules()] == [type(m) for m in stock.modules()]
    assert_same_step(stock, patched, fused_calls, fused=0)
    patch_model(patched)
    assert_same_step(stock, patched, fused_calls)


@pytest.mark.parametrize("config", ["head too", "modules_to_save"])
@pytest.mark.usefixtures("nothing_materialises")
def test_copied(config: str, build: Build, fused_calls: Calls) -> None:
    stock, patched = pair(build, "Llama", "after", CONFIGS[config]())
    assert_same_step(stock, copy.deepcopy(patched), fused_calls)


@pytest.mark.parametrize("config", ["head too", "modules_to_save"])
def test_compiled(config: str, build: Build) -> None:
    small = functools.partial(build, num_hidden_layers=1)
    stock, patched = pair(small, "Gemma2", "after", CONFIGS[config]())
    wanted = step(stock)
    torch.compiler.reset()
    compiled = torch.compile(patched, backend="eager")
    outputs = compiled(**batch())
    outputs.loss.backward()
    assert isinstance(outputs.logits, LazyLogits)
    assert not outputs.logits.is_materialized
    torch.testing.assert_close(outputs.loss, wanted.loss, **TOLERANCE)
    assert_same_gradients(stock, patched)


# ------------------------------------------------------------------------------------------------- memory

WIDE, HIDDEN, TOKENS = 32768, 256, 512
OPTIONS = flce.ChunkOptions(chunk_rows=16)  # 2 MiB of logits at a time


@pairs(target=["backbone", "head too"], dtype=[torch.float32, torch.bfloat16], when=WHEN)
def test_workspace(target: str, dtype: torch.dtype, when: str, build: Build) -> None:
    """No V-wide term is made, nor is there a copy, a cast or a gradient of the frozen head.

    The logits would be 64 MiB, and the adapter's part of them as much again. The head is 32 MiB in float32.
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
