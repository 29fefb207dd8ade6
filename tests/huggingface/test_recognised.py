"""Calls that compute a loss, by whatever way labels, hidden states and heads get there."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import flce
from flce.core import private
from flce.huggingface import NotFusedWarning, patch_model, unpatch_model

V = 97
IDS = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}
Build = Callable[..., Any]
Calls = list[dict[str, Any]]

pytestmark = pytest.mark.usefixtures("nothing_materialises")


def assert_same(stock: Any, patched: Any, loss_of: Callable[[Any], Tensor], tolerance: float = 1e-5) -> None:
    """The losses and all gradients of a stock model and a patched one."""
    losses = []
    for model in (stock, patched):
        model.zero_grad()
        losses.append(loss_of(model))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=tolerance)
    for (name, want), (other, got) in zip(stock.named_parameters(), patched.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(got.grad, want.grad, rtol=tolerance, atol=tolerance, msg=f"{name}: {{}}".format)


def loss(model: Any) -> Tensor:
    found: Tensor = model(**BATCH).loss
    return found


# ------------------------------------------------------------------------------------------------------- labels


class Wrapper(nn.Module):
    """Gets a batch in one piece."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def get_output_embeddings(self) -> Any:
        return self.inner.get_output_embeddings()

    def forward(self, inputs: Any) -> Any:
        return self.inner(**inputs)


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("by_name", [True, False])
def test_labels_within_a_batch(by_name: bool, kind: Any, build: Build, fused_calls: Calls) -> None:
    stock = Wrapper(build("Llama")).eval()
    patched = patch_model(copy.deepcopy(stock))

    def call(model: Any, **batch: Any) -> Any:
        return model(inputs=kind(batch)) if by_name else model(kind(batch))

    assert_same(stock, patched, lambda model: call(model, **BATCH).loss)
    with torch.no_grad():
        assert torch.equal(call(patched, **BATCH).loss, call(stock, **BATCH).loss)
        assert len(fused_calls) == 2
        assert type(call(patched, input_ids=IDS).logits) is Tensor
        assert type(call(patched, input_ids=IDS, labels=None).logits) is Tensor


@pytest.mark.parametrize("order", ["prepared, patched", "patched, prepared", "patched, prepared, unwrapped"])
def test_mixed_precision_by_accelerate(order: str, build: Build, fused_calls: Calls) -> None:
    """It keeps the class's forward within one on the instance."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    stock, patched = accelerator.prepare(build("Llama").eval()), build("Llama").eval()
    for change in order.split(", "):
        if change == "patched":
            patch_model(patched)
        elif change == "prepared":
            accelerator.prepare(patched)
        else:
            accelerator.unwrap_model(patched, keep_fp32_wrapper=False)
            accelerator.unwrap_model(stock, keep_fp32_wrapper=False)
    assert_same(stock, patched, loss, 2e-2)
    with torch.no_grad():
        torch.testing.assert_close(loss(patched), loss(stock), rtol=1e-3, atol=1e-3)
        assert len(fused_calls) == 2
        assert type(patched(input_ids=IDS).logits) is Tensor
        loss(unpatch_model(patched))
    assert len(fused_calls) == 2
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("order", ["patched, set up", "set up, patched"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_fabric(precision: Any, order: str, build: Build, fused_calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hook of every output runs once a backward, as on real logits."""
    lightning = pytest.importorskip("lightning.fabric", reason="it is in the extra `trainers`")
    ran: list[bool] = []
    hook: Callable[..., None] = lambda required, grad: ran.append(required)  # noqa: E731
    monkeypatch.setattr(private, "fabric_hook", hook)
    monkeypatch.setattr(lightning.wrappers, "_backward_hook", hook)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    stock, patched = fabric.setup(build("Llama")), build("Llama")
    for change in order.split(", "):
        patched = fabric.setup(patched) if change == "set up" else patch_model(patched, on_materialize="raise")
    tolerance = 1e-5 if precision == "32-true" else 2e-2
    assert_same(stock, patched, loss, tolerance)
    ran.clear()
    assert_same(stock, patched, lambda model: F.cross_entropy(model(input_ids=IDS).logits[0], IDS[0]), tolerance)
    assert len(ran) == len(fused_calls) == 2
    unpatch_model(patched)
    assert type(patched) is type(stock)
    assert_same(stock, patched, loss)


@pytest.mark.parametrize("order", ["compiled, set up", "set up, compiled"])
def test_fabric_compiled(order: str, build: Build, fused_calls: Calls) -> None:
    lightning = pytest.importorskip("lightning.fabric", reason="it is in the extra `trainers`")
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    stock, patched = build("Llama"), patch_model(build("Llama"), on_materialize="raise")

    def own_loss(model: Any) -> Tensor:
        inner = torch.compile(model, backend="eager") if order.startswith("compiled") else model
        outer = fabric.setup(inner)
        outer = outer if order.startswith("compiled") else torch.compile(outer, backend="eager")
        return F.cross_entropy(outer(input_ids=IDS).logits[0], IDS[0])

    assert_same(stock, patched, own_loss)
    assert len(fused_calls) == 1


def test_fabric_insists_on_its_own_backward(build: Build) -> None:
    lightning = pytest.importorskip("lightning.fabric", reason="it is in the extra `trainers`")
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    for model in (build("Llama"), patch_model(build("Llama"))):
        logits = fabric.setup(model)(input_ids=IDS).logits
        with pytest.raises(RuntimeError, match=r"fabric\.backward"):
            F.cross_entropy(logits[0], IDS[0]).backward()


# -------------------------------------------------------------------------------------------------- checkpointing


class Checkpointed(nn.Module):
    """Computes head and loss of the model in a checkpoint, from labels that it is given itself."""

    def __init__(self, model: Any, reentrant: bool, only_head: bool = False) -> None:
        super().__init__()
        self.model, self.reentrant, self.only_head = model, reentrant, only_head

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def head_and_loss(self, hidden: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(hidden).flatten(0, 1), IDS.flatten())

    def forward(self, labels: Tensor | None = None) -> Tensor:
        hidden = self.model.model(input_ids=IDS).last_hidden_state
        if self.only_head:
            logits: Any = checkpoint(self.model.lm_head, hidden, use_reentrant=self.reentrant)
            return F.cross_entropy(logits.flatten(0, 1), IDS.flatten())
        found: Any = checkpoint(self.head_and_loss, hidden, use_reentrant=self.reentrant)
        return found


def wrapped(build: Build, *args: Any) -> tuple[Any, Any]:
    stock = Checkpointed(build("Llama"), *args)
    return stock, patch_model(copy.deepcopy(stock), on_materialize="raise")


@pytest.mark.filterwarnings("ignore::flce.huggingface.NotFusedWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("labels", [IDS, None])
@pytest.mark.parametrize("reentrant", [True, False])
def test_head_and_loss_in_a_checkpoint(
    reentrant: bool, labels: Any, training: bool, build: Build, fused_calls: Calls
) -> None:
    stock, patched = wrapped(build, reentrant)
    stock.train(training), patched.train(training)
    for _ in range(2):
        assert_same(stock, patched, lambda model: model(labels=labels))
    # In both passes or in none.
    assert len(fused_calls) == (4 if training or labels is not None else 0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore::flce.huggingface.NotFusedWarning")
def test_calls_with_and_without_labels_before_backward(reentrant: bool, build: Build, fused_calls: Calls) -> None:
    """Each is computed again as it was computed first."""
    stock, patched = wrapped(build, reentrant)
    stock.eval(), patched.eval()
    for labels in ((IDS, None), (None, IDS)):
        fused_calls.clear()
        assert_same(stock, patched, lambda model, labels=labels: sum(model(labels=each) for each in labels))  # type: ignore[misc]
        assert len(fused_calls) == 2


def test_only_the_head_in_a_checkpoint(build: Build, fused_calls: Calls) -> None:
    for reentrant in (True, False):
        stock = Checkpointed(build("Llama"), reentrant, True)
        patched = patch_model(copy.deepcopy(stock), on_materialize="ignore")
        assert_same(stock, patched, lambda model: model())


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_own_loss_in_a_checkpoint(reentrant: bool, build: Build, fused_calls: Calls) -> None:
    """The first pass of a reentrant one has no gradients, as inference."""
    stock = build("Llama")
    patched = patch_model(copy.deepcopy(stock), on_materialize="raise")

    def own_loss(model: Any) -> Tensor:
        embedded = model.get_input_embeddings()(IDS)

        def run(embedded: Tensor) -> Tensor:
            return F.cross_entropy(model(inputs_embeds=embedded).logits.flatten(0, 1), IDS.flatten())

        found: Any = checkpoint(run, embedded, use_reentrant=reentrant)
        return found

    for count in (2, 4):
        assert_same(stock, patched, own_loss)
        assert len(fused_calls) == count


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1).square().sum(),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(),
    "a view": lambda x: x.view(-1, x.shape[-1]).exp().sum() + x[:, -1].square().sum(),
    "a few": lambda x: x[:1, -1].exp().sum(),
    "and a loss": lambda x: x.softmax(-1).square().sum() + F.cross_entropy(x.flatten(0, 1), IDS.flatten()),
    "a product": lambda x: (x.softmax(-1) @ x.transpose(1, 2)).square().sum(),
}


def some_are_kept() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.bmm.default])


@pytest.mark.parametrize("contexts", [noop_context_fn, some_are_kept])
@pytest.mark.parametrize("name", READ)
def test_logits_that_are_read_in_a_checkpoint(name: str, contexts: Any, build: Build) -> None:
    """A recomputation is given the logits that the first pass computed."""
    stock = build("Llama", num_hidden_layers=1)
    patched = patch_model(copy.deepcopy(stock), on_materialize="ignore")
    results = []
    for model in (stock, patched):
        loss: Any = checkpoint(READ[name], model(input_ids=IDS).logits, use_reentrant=False, context_fn=contexts)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0])


def test_inference_in_training_mode_is_no_checkpoint(build: Build) -> None:
    model = patch_model(build("Llama"))
    with torch.no_grad():
        assert type(model(input_ids=IDS).logits) is Tensor
        assert type(checkpoint(lambda: model(input_ids=IDS).logits, use_reentrant=False)) is Tensor
    assert not flce.report(model).forwards


# --------------------------------------------------------------------------------------------------------- heads


class ResBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(width, width), nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.act(self.linear(hidden))
        return out


def medusa_heads(hidden: int = 32) -> nn.ModuleList:
    torch.manual_seed(5)
    return nn.ModuleList(
        nn.Sequential(*(ResBlock(hidden) for _ in range(count)), nn.Linear(hidden, V, bias=False)) for count in (1, 2)
    )


def loss_of_heads(model: Any, heads: Any, stacked: bool = False) -> Tensor:
    hidden = model.model(input_ids=IDS).last_hidden_state
    logits: Any = [head(hidden) for head in (model.lm_head, *heads)]
    if stacked:
        logits = torch.stack(logits, 0)
    losses = [F.cross_entropy(logits[i][:, : -1 - i].flatten(0, 1), IDS[:, i + 1 :].flatten()) for i in range(3)]
    return sum(losses[1:], losses[0])


class Medusa(nn.Module):
    """Holds the heads beside the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model, self.medusa_head = model, medusa_heads()

    def forward(self, stacked: bool = False) -> Tensor:
        return loss_of_heads(self.base_model, self.medusa_head, stacked)


@pytest.mark.parametrize("stacked", [False, True])
def test_heads_of_a_wrapper(stacked: bool, build: Build, fused_calls: Calls) -> None:
    stock = Medusa(build("Llama"))
    patched = patch_model(copy.deepcopy(stock), on_materialize="raise")
    for count in (3, 6):
        assert_same(stock, patched, lambda model: model(stacked))
        assert len(fused_calls) == count
    names = ("", "base_model", "base_model.lm_head", "medusa_head.0.1", "medusa_head.1.2")
    assert flce.report(patched).patched == names
    unpatch_model(patched)
    assert_same(stock, patched, lambda model: model(stacked))
    assert len(fused_calls) == 6
    assert type(patched.get_submodule("medusa_head.0.1")) is nn.Linear


@pytest.mark.parametrize("after", [False, True])
def test_heads_of_the_model(after: bool, build: Build, fused_calls: Calls) -> None:
    stock, patched = build("Llama"), build("Llama")
    for model in (stock, patched):
        if model is patched and after:
            patch_model(model, on_materialize="raise")
        model.medusa_head = medusa_heads()
    if not after:
        patch_model(patched, on_materialize="raise")
    if after:
        assert_same(stock, patched, loss)  # a forward finds what was added
        fused_calls.clear()
    assert_same(stock, patched, lambda model: loss_of_heads(model, model.medusa_head))
    assert len(fused_calls) == 3


def test_a_second_head_in_forward(build: Build, fused_calls: Calls) -> None:
    base: Any = type(build("Llama"))

    class Auxiliary(base):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            outputs = super().forward(input_ids=input_ids, labels=labels, output_hidden_states=True)
            if labels is not None:
                logits = self.lm_head2(outputs.hidden_states[-1])
                outputs.loss = outputs.loss + 0.5 * F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return outputs

    stock = build("Llama")
    stock.__class__ = Auxiliary
    stock.lm_head2 = nn.Linear(32, V)
    patched = patch_model(copy.deepcopy(stock), on_materialize="raise")
    for training in (True, False):
        fused_calls.clear()
        stock.train(training), patched.train(training)
        assert_same(stock, patched, loss)
        assert len(fused_calls) == 2


class TwoHeads(nn.Module):
    """Not of Transformers; its other layers may be as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(V, 16), nn.Linear(16, V)
        self.body = nn.Sequential(nn.GELU(), nn.Linear(V, 32), nn.GELU())
        self.lm_head, self.lm_head2 = nn.Linear(32, V), nn.Linear(32, V)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.body(self.up(self.embedding(input_ids)))
        heads = (self.lm_head, self.lm_head2)
        losses = [F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten()) for head in heads]
        return SimpleNamespace(loss=losses[0] + losses[1])


def test_a_second_head_of_any_model(fused_calls: Calls) -> None:
    stock = TwoHeads()
    patched = patch_model(copy.deepcopy(stock), on_materialize="raise")
    for count in (2, 4):
        assert_same(stock, patched, loss)
        assert len(fused_calls) == count


@pytest.mark.parametrize("patched_first", [True, False])
def test_an_adapter_on_a_second_head(patched_first: bool, build: Build, fused_calls: Calls) -> None:
    peft = pytest.importorskip("peft")
    models = []
    for patched in (False, True):
        model = build("Llama")
        torch.manual_seed(5)
        model.lm_head2 = nn.Linear(32, V)
        if patched and patched_first:
            patch_model(model, on_materialize="raise")
        config = peft.LoraConfig(target_modules=["lm_head", "lm_head2"], r=4, init_lora_weights=False)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
        if patched and not patched_first:
            patch_model(model, on_materialize="raise")
        models.append(model)

    def two_losses(model: Any) -> Tensor:
        inner = model.base_model.model
        inner(**BATCH)  # where what was added is found
        return loss_of_heads(inner, [inner.lm_head2, inner.lm_head2])

    assert_same(models[0], models[1], two_losses)
    assert len(fused_calls) == 4


class MyParam(nn.Parameter):
    pass


def test_a_subclass_of_parameter(build: Build, fused_calls: Calls) -> None:
    stock, patched = build("Llama"), build("Llama")
    for model in (stock, patched):
        model.lm_head.weight = MyParam(model.lm_head.weight.data)
        assert type(model.lm_head.weight) is MyParam
    patch_model(patched, on_materialize="raise")
    for count in (1, 2):
        assert_same(stock, patched, loss)
        assert len(fused_calls) == count
    torch.compiler.reset()
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    assert_same(stock, patched, lambda model: loss(compiled if model is patched else model))


class OwnFunction(nn.Parameter):
    """Sees what is done with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_parameter_with_functions_of_its_own_runs_stock_code(build: Build, fused_calls: Calls) -> None:
    stock, patched = build("Llama"), build("Llama")
    for model in (stock, patched):
        model.lm_head.weight = OwnFunction(model.lm_head.weight.data)
    assert_same(stock, patch_model(patched), loss)
    assert not fused_calls
    with pytest.warns(NotFusedWarning, match="OwnFunction"):
        loss(patched)


# ----------------------------------------------------------------------------------------- what cannot be patched


class Pair(nn.Module):
    """A language model beside something else."""

    def __init__(self, model: Any, other: Any) -> None:
        super().__init__()
        self.lm, self.other = model, other

    def forward(self) -> Tensor:
        return loss(self.lm)


def quantised(build: Build) -> Any:
    teacher = build("Llama")
    teacher.lm_head.weight = nn.Parameter(torch.zeros(V, 32, dtype=torch.int8), requires_grad=False)
    return teacher


@pytest.mark.parametrize("other", ["encoder", "teacher"])
def test_what_is_beside_the_language_model_is_left(other: str, build: Build, fused_calls: Calls) -> None:
    stock = Pair(build("Llama"), build("Llama").model if other == "encoder" else quantised(build))
    patched = copy.deepcopy(stock)
    reason = "LlamaModel has no output embedding" if other == "encoder" else "quantised"
    with pytest.warns(UserWarning, match=f"left.*other: .*{reason}") as caught:
        patch_model(patch_model(patched))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert_same(stock, patched, lambda model: model())
    assert len(fused_calls) == 1
    report = flce.report(patched)
    assert report.patched == ("", "lm", "lm.lm_head")
    assert list(report.left) == ["other"]
    assert reason in str(report)
    with pytest.raises(TypeError, match=reason):
        patch_model(stock.other)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_model_without_a_head_around_one_with_a_head(build: Build, fused_calls: Calls) -> None:
    """It is one of Transformers', and says that it has no output embedding."""
    base: Any = pytest.importorskip("transformers").PreTrainedModel

    class Outer(base):
        def __init__(self, model: Any) -> None:
            super().__init__(model.config)
            self.inner = model

        def forward(self, **kwargs: Any) -> Any:
            return self.inner(**kwargs)

    stock = Outer(build("Llama"))
    assert stock.get_output_embeddings() is None
    patched = patch_model(copy.deepcopy(stock), on_materialize="raise")
    assert_same(stock, patched, loss)
    assert len(fused_calls) == 1
    assert not flce.report(patched).left
