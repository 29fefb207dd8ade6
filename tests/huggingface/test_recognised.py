"""Calls that have to compute the fused loss: kinds of labels, heads, wrappers and checkpoints."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import flce
from flce.core import private
from flce.huggingface import NotFusedWarning, patch_model
from tests.helpers import parametrize_pairs
from tests.huggingface.fuzz import Doubled
from tests.huggingface.scripts import IDS, Around, Build, Compare, V
from tests.huggingface.test_entropies import Logits

pytestmark = pytest.mark.usefixtures("fail_on_materialize")

BATCH = {"input_ids": IDS, "labels": IDS}


# ----------------------------------------------------------------------------------------- labels and wrappers


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("by_name", [True, False])
def test_labels_within_a_batch(by_name: bool, kind: Any, compare: Compare) -> None:
    script = """
        model = patch(Wrapper(build("Llama"), lambda inner, inputs: inner(**inputs)).eval())
        def call(**batch):
            return model(inputs=kind(batch)) if by_name else model(kind(batch))
        backward(call(**BATCH).loss)
        with torch.no_grad():
            note(call(**BATCH).loss, tolerance=0)
            fused(2)
            assert type(call(input_ids=IDS).logits) is Tensor
            assert type(call(input_ids=IDS, labels=None).logits) is Tensor"""
    compare(script, by_name=by_name, kind=kind)


@pytest.mark.parametrize("order", ["prepared, patched", "patched, prepared", "patched, prepared, unwrapped"])
def test_mixed_precision_by_accelerate(order: str, compare: Compare) -> None:
    """Accelerate sets a forward on the instance that calls the forward of the class."""
    script = """
        accelerate = importorskip("accelerate")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        model = build("Llama").eval()
        for change in order.split(", "):
            if change == "patched":
                patch(model)
            elif change == "prepared":
                accelerator.prepare(model)
            else:
                accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        backward(model(**BATCH).loss, tolerance=2e-2)
        with torch.no_grad():
            note(model(**BATCH).loss, tolerance=1e-3)
            fused(2)
            assert type(model(input_ids=IDS).logits) is Tensor
            unpatch(model)(**BATCH)
        fused(0)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)"""
    compare(script, order=order)


@pytest.mark.parametrize("order", ["patched, set up", "set up, patched"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_fabric(precision: Any, order: str, compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fabric's hook on each output runs once in each backward, as on real logits."""
    lightning = pytest.importorskip("lightning.fabric", reason="it is in the extra `trainers`")
    ran: list[bool] = []
    hook: Callable[..., None] = lambda required, grad: ran.append(required)  # noqa: E731
    monkeypatch.setattr(private, "fabric_hook", hook)
    monkeypatch.setattr(lightning.wrappers, "_backward_hook", hook)
    script = """
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
        model = build("Llama")
        for change in order.split(", "):
            model = fabric.setup(model) if change == "set up" else patch(model, on_materialize="raise")
        backward(model(**BATCH).loss, tolerance=tolerance)
        ran.clear()
        backward(F.cross_entropy(model(input_ids=IDS).logits[0], IDS[0]), tolerance=tolerance)
        assert len(ran) == 1
        fused(2)
        unpatch(model)
        note(type(model))
        backward(model(**BATCH).loss)
        fused(0)"""
    tolerance = 1e-5 if precision == "32-true" else 2e-2
    compare(script, lightning=lightning, precision=precision, order=order, ran=ran, tolerance=tolerance)


WRAPPED = {
    **{
        f"Fabric, {order}": f"""
        lightning = importorskip("lightning.fabric", reason="it is in the extra `trainers`")
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        model = outer = patch(build("Llama"), on_materialize="raise")
        for change in "{order}".split(", "):
            outer = fabric.setup(outer) if change == "set up" else torch.compile(outer, backend="eager")
        backward(F.cross_entropy(outer(input_ids=IDS).logits[0], IDS[0]))
        fused(1)"""
        for order in ("compiled, set up", "set up, compiled")
    },
    "Fabric insists on its own backward": r"""
        lightning = importorskip("lightning.fabric", reason="it is in the extra `trainers`")
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        model = fabric.setup(patch(build("Llama")))
        loss = F.cross_entropy(model(input_ids=IDS).logits[0], IDS[0])
        with raises(RuntimeError, match=r"fabric\.backward"):
            loss.backward()""",
    # A model of Transformers whose get_output_embeddings() returns None.
    "a model without a head around one with a head": """
        class Outer(importorskip("transformers").PreTrainedModel):
            def __init__(self, model):
                super().__init__(model.config)
                self.inner = model
            def forward(self, **kwargs):
                return self.inner(**kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model = Outer(build("Llama"))
            assert model.get_output_embeddings() is None
            patch(model, on_materialize="raise")
            backward(model(**BATCH).loss)
        fused(1)
        assert not flce.report(model).left""",
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers(name: str, compare: Compare) -> None:
    compare(WRAPPED[name])


# -------------------------------------------------------------------------------------------------- checkpointing


def in_checkpoint(model: Any, reentrant: bool, labels: Tensor | None = None) -> Any:
    """Compute head and loss of the model in a checkpoint. The checkpointed function has the labels."""
    hidden = model.model(input_ids=IDS).last_hidden_state

    def head_and_loss(hidden: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(hidden).flatten(0, 1), IDS.flatten())

    return checkpoint(head_and_loss, hidden, use_reentrant=reentrant)


@pytest.mark.filterwarnings("ignore::flce.huggingface.NotFusedWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("labels", [IDS, None])
@pytest.mark.parametrize("reentrant", [True, False])
def test_head_and_loss_in_a_checkpoint(reentrant: bool, labels: Any, training: bool, compare: Compare) -> None:
    """Head and loss are fused in both passes or in none."""
    script = """
        model = patch(Wrapper(build("Llama"), in_checkpoint).train(training), on_materialize="raise")
        for _ in range(2):
            backward(model(reentrant, labels=labels))
        fused(4 if training or labels is not None else 0)"""
    compare(script, reentrant=reentrant, labels=labels, training=training)


CHECKPOINTED = {
    # The recomputation of each call returns the same kind of logits as its first pass.
    "calls with and without labels before backward": """
        model = patch(Wrapper(build("Llama"), in_checkpoint).eval(), on_materialize="raise")
        for labels in ((IDS, None), (None, IDS)):
            backward(sum(model(reentrant, labels=each) for each in labels))
            fused(2)""",
    "only the head": """
        model = patch(build("Llama"), on_materialize="ignore")
        logits = checkpoint(model.lm_head, model.model(input_ids=IDS).last_hidden_state, use_reentrant=reentrant)
        backward(F.cross_entropy(logits.flatten(0, 1), IDS.flatten()))""",
    "the result of a function": """
        model = patch(build("Llama"), on_materialize="ignore")
        logits = Doubled.apply(model(input_ids=IDS).logits)
        backward(checkpoint(lambda x: x.logsumexp(-1).sum(), logits, use_reentrant=reentrant))""",
    # The first pass of a reentrant checkpoint has no gradients, like inference.
    "an own loss": """
        model = patch(build("Llama"), on_materialize="raise")
        def run(embedded):
            return F.cross_entropy(model(inputs_embeds=embedded).logits.flatten(0, 1), IDS.flatten())
        for _ in range(2):
            backward(checkpoint(run, model.get_input_embeddings()(IDS), use_reentrant=reentrant))
            fused(2)""",
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.filterwarnings("ignore::flce.huggingface.NotFusedWarning")
def test_checkpoints(name: str, reentrant: bool, compare: Compare) -> None:
    compare(CHECKPOINTED[name], reentrant=reentrant)


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "log-probabilities": lambda x: x[:, :-1].float().log_softmax(-1).gather(-1, IDS[:, 1:, None]).square().sum(),
    "a view": lambda x: x.view(-1, x.shape[-1]).exp().sum() + x[:, -1].square().sum(),
    "logsumexp": lambda x: x.logsumexp(-1).square().mean(),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).square().sum(),
    "z-loss": lambda x: F.cross_entropy(x.flatten(0, 1), IDS.flatten()) + x.logsumexp(-1).square().mean(),
    "rows": lambda x: torch.stack([F.cross_entropy(row, ids) for row, ids in zip(x, IDS, strict=True)]).sum(),
    "in place": lambda x: x.clone().div_(0.7).logsumexp(-1).square().mean(),
    "a write": lambda x: F.cross_entropy(x[0].clone().fill_(0.5) + x[0], IDS[0]),
    "and a loss": lambda x: x.softmax(-1).square().sum() + F.cross_entropy(x.flatten(0, 1), IDS.flatten()),
}


FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy": lambda x: F.cross_entropy(x.view(-1, x.shape[-1]), IDS.flatten()),
    "log-probabilities": READ["log-probabilities"],
    "logsumexp": READ["logsumexp"],
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", FUSED)
def test_losses_of_logits_from_outside_are_fused(name: str, reentrant: bool, compare: Compare) -> None:
    script = """
        model = patch(build("Llama", num_hidden_layers=1), on_materialize="raise")
        logits = model(input_ids=IDS).logits
        backward(checkpoint(loss_of, logits, use_reentrant=reentrant))
        fused(2)
        lazy(logits)"""
    compare(script, loss_of=FUSED[name], reentrant=reentrant)


REENTRANT: dict[str, Callable[[Tensor], Tensor]] = {
    "chunks": lambda z: torch.stack([checkpoint(READ["entropy"], x, use_reentrant=True) for x in z.split(4, 1)]).sum(),
    "two checkpoints and the loss": lambda z: (
        checkpoint(READ["entropy"], z, use_reentrant=True)
        + checkpoint(READ["logsumexp"], z, use_reentrant=True)
        + F.cross_entropy(z.flatten(0, 1), IDS.flatten())
    ),
    "the same logits twice": lambda z: checkpoint(
        lambda x, y: READ["entropy"](x) + READ["logsumexp"](y), z, z, use_reentrant=True
    ),
    "a checkpoint within another": lambda z: checkpoint(
        lambda x: 2 * checkpoint(READ["entropy"], x, use_reentrant=True), z, use_reentrant=True
    ),
    "logits that are not used": lambda z: checkpoint(lambda x, y: READ["entropy"](x), z, z[:, 1:], use_reentrant=True),
    "temperatures": lambda z: checkpoint(READ["entropy"], z / torch.full((1, 9, 1), 0.7), use_reentrant=True),
}


@pytest.mark.parametrize("name", REENTRANT)
def test_reentrant_checkpoints_of_logits_are_fused(name: str, compare: Compare) -> None:
    """The gradients of the logits are never in memory."""
    script = """
        model = patch(build("Llama", num_hidden_layers=1), on_materialize="raise")
        with Logits() as mode:
            for _ in range(2):
                loss = function(model(input_ids=IDS).logits)
                loss.backward()
        note(loss, [p.grad for p in model.parameters()])
        assert bool(mode.found) != patched"""
    compare(script, function=REENTRANT[name], Logits=Logits)


@pytest.mark.parametrize("name", [*READ, "a function", "and a function"])
def test_logits_that_are_read_in_a_reentrant_checkpoint(name: str, compare: Compare) -> None:
    read = READ | {"a function": lambda x: Doubled.apply(x).sum(), "and a function": READ["entropy"]}
    script = """
        model = patch(build("Llama", num_hidden_layers=1), on_materialize="ignore")
        logits = model(input_ids=IDS).logits
        loss = checkpoint(read, logits, use_reentrant=True)
        backward(loss + Doubled.apply(logits).square().mean() if name == "and a function" else loss)"""
    compare(script, read=read[name], name=name)


def some_are_kept() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.bmm.default])


def in_another(read: Any, logits: Tensor, **options: Any) -> Tensor:
    return checkpoint(lambda x: 2 * checkpoint(read, x, **options), logits, **options)


@parametrize_pairs(
    name=list(READ),
    when=["never", "before", "after"],
    contexts=[noop_context_fn, some_are_kept],
    inner=[checkpoint, in_another],
)
def test_logits_that_are_read_in_a_checkpoint(
    name: str, when: str, contexts: Any, inner: Any, compare: Compare
) -> None:
    """A recomputation repeats the operations of the first pass, even if other code has read the logits since."""
    script = """
        model = patch(build("Llama", num_hidden_layers=1), on_materialize="ignore")
        logits = model(input_ids=IDS).logits
        if when == "before":
            note(logits.std())
        loss = inner(read, logits, use_reentrant=False, context_fn=contexts)
        if when == "after":
            note(logits.std())
        backward(loss)"""
    compare(script, read=READ[name], when=when, contexts=contexts, inner=inner)


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


def loss_of_heads(model: Any, heads: Any) -> Tensor:
    hidden = model.model(input_ids=IDS).last_hidden_state
    logits: Any = [head(hidden) for head in (model.lm_head, *heads)]
    losses = [F.cross_entropy(logits[i][:, : -1 - i].flatten(0, 1), IDS[:, i + 1 :].flatten()) for i in range(3)]
    return sum(losses[1:], losses[0])


class MyParam(nn.Parameter):
    pass


class OwnFunction(nn.Parameter):
    """A parameter with its own `__torch_function__`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


HEADS = {
    "heads outside of the model": """
        def run(inner):
            return loss_of_heads(inner, model.medusa_head)
        model = patch(Around(build("Llama"), run, medusa_head=medusa_heads()), on_materialize="raise")
        for _ in range(2):
            backward(model())
            fused(3)
        names = ("", "inner", "inner.lm_head", "medusa_head.0.1", "medusa_head.1.2")
        assert flce.report(model).patched == (names if patched else ())
        unpatch(model)
        backward(model())
        fused(0)
        assert type(model.get_submodule("medusa_head.0.1")) is nn.Linear""",
    # A forward finds and patches them.
    "heads that were added to a patched model": """
        model = patch(build("Llama"), on_materialize="raise")
        model.medusa_head = medusa_heads()
        backward(model(**BATCH).loss)
        fused(1)
        backward(loss_of_heads(model, model.medusa_head))
        fused(3)""",
    "a second head in forward": """
        model = build("Llama")
        class Auxiliary(type(model)):
            def forward(self, input_ids, labels=None):
                outputs = super().forward(input_ids=input_ids, labels=labels, output_hidden_states=True)
                if labels is not None:
                    logits = self.lm_head2(outputs.hidden_states[-1])
                    outputs.loss = outputs.loss + 0.5 * F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                return outputs
        model.__class__ = Auxiliary
        model.lm_head2 = nn.Linear(32, V)
        patch(model, on_materialize="raise")
        for training in (True, False):
            model.train(training)
            backward(model(**BATCH).loss)
            fused(2)""",
    **{
        f"an adapter on a second head, {patched_first=}": f"""
        peft = importorskip("peft")
        model = build("Llama")
        model.lm_head2 = nn.Linear(32, V)
        if {patched_first}:
            patch(model, on_materialize="raise")
        config = peft.LoraConfig(target_modules=["lm_head", "lm_head2"], r=4, init_lora_weights=False)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
        if not {patched_first}:
            patch(model, on_materialize="raise")
        inner = model.base_model.model
        inner(**BATCH)  # where what was added is found
        fused(1)
        backward(loss_of_heads(inner, [inner.lm_head2, inner.lm_head2]))
        fused(3)"""
        for patched_first in (True, False)
    },
    "a subclass of Parameter": """
        model = build("Llama")
        model.lm_head.weight = MyParam(model.lm_head.weight.data)
        assert type(model.lm_head.weight) is MyParam
        patch(model, on_materialize="raise")
        for _ in range(2):
            backward(model(**BATCH).loss)
            fused(1)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        backward((compiled if patched else model)(**BATCH).loss)""",
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str, compare: Compare) -> None:
    compare(HEADS[name])


def test_a_parameter_with_functions_of_its_own_is_named(build: Build) -> None:
    model = patch_model(build("Llama"))
    model.lm_head.weight = OwnFunction(model.lm_head.weight.data)
    model(**BATCH).loss.backward()
    with pytest.warns(NotFusedWarning, match="OwnFunction"):
        model(**BATCH)


# ----------------------------------------------------------------------------------------- what cannot be patched


def quantised(build: Build) -> Any:
    teacher = build("Llama")
    teacher.lm_head.weight = nn.Parameter(torch.zeros(V, 32, dtype=torch.int8), requires_grad=False)
    return teacher


@pytest.mark.parametrize("other", ["encoder", "teacher"])
def test_other_models_are_left_unpatched(other: str, build: Build, compare: Compare) -> None:
    make = quantised if other == "teacher" else lambda build: build("Llama").model
    reason = "LlamaModel has no output embedding" if other == "encoder" else "quantised"
    pair = Around(build("Llama"), lambda inner: inner(**BATCH).loss, other=make(build))
    with pytest.warns(UserWarning, match=f"could not patch.*other: .*{reason}") as caught:
        patch_model(patch_model(pair))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    report = flce.report(pair)
    assert report.patched == ("", "inner", "inner.lm_head")
    assert list(report.left) == ["other"]
    assert reason in str(report)
    with pytest.raises(TypeError, match=reason):
        patch_model(make(build))
    script = """
        model = Around(build("Llama"), lambda inner: inner(**BATCH).loss, other=make(build))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            patch(model)
        backward(model())
        fused(1)"""
    compare(script, make=make)
