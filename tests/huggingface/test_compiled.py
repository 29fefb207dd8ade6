"""Lazy logits that leave a graph of ``torch.compile``, and that enter one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flce
from flce.huggingface import LazyLogits
from tests.huggingface.fuzz import Doubled
from tests.huggingface.scripts import IDS, Build, Compare, loss_of, own_loss

pytestmark = [
    pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]


def small(build: Build) -> Any:
    return build("Llama", num_hidden_layers=1).double()


def checkpointed(logits: Tensor) -> Tensor:
    loss: Tensor = torch.utils.checkpoint.checkpoint(lambda x: loss_of(x * 2), logits, use_reentrant=True)
    return loss


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "labels": lambda model: model(IDS, labels=IDS).loss,
    "own": own_loss,
    "a function of C++": lambda model: (lambda o: o.loss + Doubled.apply(o.logits).square().mean())(
        model(IDS, labels=IDS)
    ),
    "checkpoint": lambda model: (lambda o: o.loss + checkpointed(o.logits))(model(IDS, labels=IDS)),
    "tuple": lambda model: loss_of(model(IDS, return_dict=False)[0]),
    "a hook": lambda model: (lambda x: (x.register_hook(lambda g: g * 2), loss_of(x))[1])(model(IDS).logits),
}


@pytest.mark.parametrize(
    "loss, how",
    [*((loss, "torch.compile") for loss in LOSSES), ("labels", "Module.compile"), ("own", "Module.compile")],
)
def test_losses_of_a_compiled_model(loss: str, how: str, compare: Compare) -> None:
    script = """
        model = compiled = patch(small(build))
        if patched and how == "torch.compile":
            compiled = torch.compile(model, backend="eager", fullgraph=True)
        elif patched:
            model.compile(backend="eager", fullgraph=True)
        backward(LOSSES[loss](compiled))"""
    compare(script, loss=loss, how=how)


READS: dict[str, Callable[[Any], Tensor]] = {
    "write to a view": lambda x: (x.view(-1, x.shape[-1]).mul_(0.5), loss_of(x))[1],
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(),
    "split": lambda x: torch.split(x, split_size_or_sections=2, dim=1)[1].square().sum(),
}


@pytest.mark.parametrize("name", READS)
def test_logits_that_are_read_in_one_graph(name: str, compare: Compare) -> None:
    script = """
        model = patch(small(build))
        def whole(model):
            return READS[name](model(IDS).logits * 1)
        backward((torch.compile(whole, backend="eager", fullgraph=True) if patched else whole)(model))"""
    compare(script, name=name)


ENTERING: dict[str, Callable[[Any], Tensor]] = {
    "loss": loss_of,
    "accuracy": lambda x: (x.argmax(-1) == IDS).double().mean() + x.sum() * 0,
    "softmax": lambda x: x.softmax(-1).square().sum(),
    "shape": lambda x: x.view(-1, x.shape[-1])[IDS.view(-1) > 20].sum() * x.size(-1),
    "log-probabilities": lambda x: torch.log_softmax(x.float(), -1).gather(-1, IDS[..., None]).double().mean(),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ENTERING)
def test_eager_logits_in_a_compiled_function(name: str, grad: bool, compare: Compare) -> None:
    script = """
        model, function = patch(small(build)), torch.compile(ENTERING[name], backend="aot_eager")
        for _ in range(2):
            logits = model(IDS).logits
            with torch.set_grad_enabled(grad):
                value = function(logits)
            backward(value)"""
    compare(script, name=name, grad=grad)


class Body(nn.Module):
    """A model whose graph ends within its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(97, 16), nn.Linear(16, 16)
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        try:  # the compiler cannot continue this frame after a break, so the whole frame runs in Python
            hidden = self.embedding(ids)
            positions = torch.arange(hidden.shape[1], device=hidden.device)
            torch._dynamo.graph_break()
            return torch.tanh(self.layer(hidden) + positions[:, None])
        finally:
            self.calls += 1


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_model, self.head = Body(), nn.Linear(16, 97)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base_model(ids))
        return logits


def named(inner: Any, ids: Tensor, labels: Tensor | None) -> Any:
    return inner(input_ids=ids, labels=labels)


SCRIPTS = {
    # Only the first call runs in a `ProductMode`.
    "a break below the head": """
        model = patch(Broken(), on_materialize="raise")
        compiled = torch.compile(model, backend="eager") if patched else model
        for _ in range(2):
            backward(loss_of(compiled(IDS)))
            fused(1)""",
    "a step in one graph": """
        model = patch(small(build))
        backward((torch.compile(own_loss, backend="eager", fullgraph=True) if patched else own_loss)(model))
        fused(1)""",
    # The compiler would warn if it compiled a part of flce's backward.
    **{
        f"a step with its backward, {loss}": f"""
        model = patch(small(build))
        def whole():
            value = LOSSES["{loss}"](model)
            value.backward()
            return value.detach()
        torch._dynamo.utils.counters.clear()
        note(torch.compile(whole, backend="eager")(), [p.grad for p in model.parameters()])
        reasons = " ".join(torch._dynamo.utils.counters["graph_break"])
        assert "builtin" not in reasons, reasons"""
        for loss in ("own", "labels")
    },
    # Plain objects from a graph of a function that was not patched.
    **{
        f"what leaves {what}, {labels}": f"""
        model = patch(small(build))
        around = Around(model, named)
        outputs = torch.compile(around{what}, backend="aot_eager")(IDS, {labels})
        loss = loss_of(outputs.logits) if {labels} is None else outputs.loss
        backward(loss + Doubled.apply(outputs.logits).square().mean())
        assert (type(outputs.logits) is LazyLogits) == patched"""
        for what, labels in (("", None), (".forward", "IDS"))
    },
    "an inference in a compiled function is one graph": """
        model = patch(small(build))
        from torch._dynamo.testing import CompileCounter
        counter = CompileCounter()
        with torch.no_grad():
            logits = torch.compile(Around(model.eval(), named), backend=counter)(IDS, None).logits
        assert type(logits) is Tensor
        assert counter.frame_count == 1""",
    "a transform in a compiled function": """
        model = patch(small(build))
        def loss_of_each(model):
            return torch.vmap(lambda ids: model(ids[None], labels=ids[None]).loss)(IDS).sum()
        note(torch.compile(loss_of_each, backend="eager")(model))""",
    **{
        f"a compiled wrapper, {order} first": f"""
        peft = importorskip("peft")
        model = patch(small(build))
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).double()
        if "{order}" == "wrapped":
            patch(model)
        outputs = torch.compile(model, backend="eager", fullgraph=True)(input_ids=IDS, labels=IDS)
        backward(outputs.loss)
        note(torch.softmax(outputs.logits, -1))
        assert isinstance(outputs.logits, Tensor) == ("{order}" == "wrapped" or not patched)
        unpatch(model)
        assert type(model) is peft.PeftModel
        assert not flce.report(model).patched"""
        for order in ("patched", "wrapped")
    },
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_compiled(name: str, compare: Compare) -> None:
    compare(SCRIPTS[name])


def test_outputs_of_a_graph_are_tensors(build: Build) -> None:
    patched = flce.patch_model(small(build))
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(patched, backend=count, fullgraph=True)
    for model in (patched, compiled):
        for given in ({}, {"labels": IDS}, {"return_dict": False}):
            logits = model(IDS, **given)[len(given) if "labels" in given else 0]
            assert type(logits) is LazyLogits
            assert not logits.is_materialized
    assert len(graphs) == 3
    with torch.no_grad():
        patched.lm_head.weight.zero_()
    with pytest.raises(RuntimeError, match="can no longer be computed"):
        logits.sum()


def test_plain_objects_in_an_autograd_function(build: Build) -> None:
    """Plain objects come from a graph that cannot end with the model (``fullgraph=True``)."""
    patched = flce.patch_model(small(build))
    logits = torch.compile(lambda ids: patched(ids), backend="eager", fullgraph=True)(IDS).logits
    with pytest.raises(TypeError, match=r"Scaled.apply\(\) .* would lose their gradient"):
        Doubled.apply(logits)
    Doubled.apply(logits.materialize()).sum().backward()
    assert patched.lm_head.weight.grad is not None
    with torch.no_grad():
        assert Doubled.apply(logits.detach()).shape == logits.shape


def test_a_hook_after_the_loss_of_a_graph(build: Build) -> None:
    """The gradient of the loss does not pass through the logits, so the hook would never run."""
    outputs = torch.compile(flce.patch_model(small(build)), backend="eager", fullgraph=True)(IDS, labels=IDS)
    with pytest.raises(RuntimeError, match="after the loss"):
        outputs.logits.register_hook(print)


def test_a_partitioned_weight_is_stocks(build: Build) -> None:
    """DeepSpeed ZeRO-3 frees weights between a graph of the head and the following operations."""
    model = flce.patch_model(build("Llama", num_hidden_layers=1))
    model.lm_head.weight.ds_id = 0
    model.compile(backend="eager")
    outputs = model(IDS, labels=IDS)
    assert type(outputs.logits) is Tensor
    assert torch.isfinite(outputs.loss)
