"""Lazy logits that leave a graph of ``torch.compile``, and that enter one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flce
from flce.huggingface import LazyLogits
from tests.huggingface.fuzz import Doubled

pytestmark = pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")

Build = Callable[..., Any]
IDS = torch.arange(18).view(2, 9) * 7 % 94 + 3


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def models(build: Build) -> tuple[Any, Any]:
    """Stock and patched."""
    stock = build("Llama", num_hidden_layers=1).double()
    return stock, flce.patch_model(copy.deepcopy(stock))


def own_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def checkpointed(logits: Tensor) -> Tensor:
    loss: Tensor = torch.utils.checkpoint.checkpoint(lambda x: own_loss(x * 2), logits, use_reentrant=True)
    return loss


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "labels": lambda model: model(IDS, labels=IDS).loss,
    "own": lambda model: own_loss(model(IDS).logits),
    "a function of C++": lambda model: (lambda o: o.loss + Doubled.apply(o.logits).square().mean())(
        model(IDS, labels=IDS)
    ),
    "checkpoint": lambda model: (lambda o: o.loss + checkpointed(o.logits))(model(IDS, labels=IDS)),
    "softmax": lambda model: (lambda o: o.loss + o.logits.softmax(-1).square().sum())(model(IDS, labels=IDS)),
    "tuple": lambda model: own_loss(model(IDS, return_dict=False)[0]),
    "a hook": lambda model: (lambda x: (x.register_hook(lambda g: g * 2), own_loss(x))[1])(model(IDS).logits),
}


def check_same(stock: nn.Module, patched: nn.Module, loss: Callable[[Any], Tensor], compiled: Any = None) -> None:
    results = [loss(stock), loss(patched if compiled is None else compiled)]
    for result in results:
        result.backward()
    torch.testing.assert_close(results[1], results[0])
    for (name, want), got in zip(stock.named_parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_a_compiled_model(loss: str, how: str, models: tuple[Any, Any]) -> None:
    stock, patched = models
    compiled = patched
    if how == "torch.compile":
        compiled = torch.compile(patched, backend="eager", fullgraph=True)
    else:
        patched.compile(backend="eager", fullgraph=True)
    check_same(stock, patched, LOSSES[loss], compiled)


def test_what_leaves_is_of_one_kind(models: tuple[Any, Any]) -> None:
    _, patched = models
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


def test_a_hook_after_the_loss_of_a_graph(models: tuple[Any, Any]) -> None:
    """Its gradient does not pass by the logits, which a hook would wait for in vain."""
    _, patched = models
    outputs = torch.compile(patched, backend="eager")(IDS, labels=IDS)
    with pytest.raises(RuntimeError, match="after the loss"):
        outputs.logits.register_hook(print)


READS: dict[str, Callable[[Any], Tensor]] = {
    "softmax": lambda x: x.softmax(-1).square().sum(),
    "topk": lambda x: x.topk(3).values.sum(),
    "write to a view": lambda x: (x.view(-1, x.shape[-1]).mul_(0.5), own_loss(x))[1],
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(),
    "cat": lambda x: torch.cat([x, torch.zeros_like(x)], -1).square().sum(),
    "split": lambda x: torch.split(x, split_size_or_sections=2, dim=1)[1].square().sum(),
}


@pytest.mark.parametrize("name", READS)
def test_logits_that_are_read_in_one_graph(name: str, models: tuple[Any, Any]) -> None:
    stock, patched = models

    def step(model: Any) -> Tensor:
        return READS[name](model(IDS).logits * 1)

    results = [step(stock), torch.compile(step, backend="eager", fullgraph=True)(patched)]
    for result in results:
        result.backward()
    torch.testing.assert_close(results[1], results[0])
    for want, got in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_a_step_in_one_graph(models: tuple[Any, Any], fused_calls: list[Any]) -> None:
    """Logits that do not leave it."""
    stock, patched = models

    def step(model: Any) -> Tensor:
        return own_loss(model(IDS).logits)

    check_same(stock, patched, torch.compile(step, backend="eager", fullgraph=True))
    assert len(fused_calls) == 1


@pytest.mark.parametrize("loss", ["own", "labels"])
def test_a_step_with_its_backward(loss: str, models: tuple[Any, Any]) -> None:
    """Nothing of flce's backward becomes a graph, which the compiler would warn of."""
    stock, patched = models
    counts = []
    for model in (stock, patched):

        def step(model: Any = model) -> Tensor:
            value = LOSSES[loss](model)
            value.backward()
            return value.detach()

        torch._dynamo.utils.counters.clear()
        counts.append((torch.compile(step, backend="eager")(), *(p.grad for p in model.parameters())))
        reasons = " ".join(torch._dynamo.utils.counters["graph_break"])
        assert "builtin" not in reasons, reasons
    torch.testing.assert_close(counts[1], counts[0])


class Around(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor | None) -> Any:
        return self.model(input_ids=ids, labels=labels)


@pytest.mark.parametrize("labels", [None, IDS])
@pytest.mark.parametrize("what", ["a wrapper", "a function"])
def test_what_leaves_a_graph_that_patch_model_has_not_seen(what: str, labels: Any, models: tuple[Any, Any]) -> None:
    results = []
    for model in models:
        around = Around(model)
        compiled = torch.compile(around if what == "a wrapper" else around.forward, backend="aot_eager")
        outputs = compiled(IDS, labels)
        loss = own_loss(outputs.logits) if labels is None else outputs.loss
        (loss + Doubled.apply(outputs.logits).square().mean()).backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert type(outputs.logits) is LazyLogits
    torch.testing.assert_close(results[1], results[0])


def test_graphs_are_whole_where_stock_code_runs(models: tuple[Any, Any]) -> None:
    """An inference in a compiled function."""
    counts = []
    for model in models:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        with torch.no_grad():
            logits = torch.compile(Around(model.eval()), backend=counter)(IDS, None).logits
        assert type(logits) is Tensor
        counts.append(counter.frame_count)
    assert counts == [1, 1]


def test_a_transform_in_a_compiled_function(models: tuple[Any, Any]) -> None:
    def loss_of_each(model: Any) -> Tensor:
        losses: Tensor = torch.vmap(lambda ids: model(ids[None], labels=ids[None]).loss)(IDS)
        return losses.sum()

    results = [torch.compile(loss_of_each, backend="eager")(model) for model in models]
    torch.testing.assert_close(results[1], results[0])


def test_plain_objects_in_an_autograd_function(models: tuple[Any, Any]) -> None:
    """Of a graph that may not end where the model does."""
    _, patched = models
    logits = torch.compile(Around(patched), backend="eager", fullgraph=True)(IDS, None).logits
    with pytest.raises(TypeError, match=r"Doubled.apply\(\) .* would lose their gradient"):
        Doubled.apply(logits)
    Doubled.apply(logits.materialize()).sum().backward()
    assert patched.lm_head.weight.grad is not None
    with torch.no_grad():
        assert Doubled.apply(logits.detach()).shape == logits.shape


@pytest.mark.parametrize("order", ["patched first", "wrapped first"])
def test_a_compiled_wrapper(order: str, models: tuple[Any, Any]) -> None:
    peft = pytest.importorskip("peft")
    stock, patched = models
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    results = []
    for model in (stock, patched):
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(model, config).double()
        if model is patched and order == "wrapped first":
            flce.patch_model(wrapped)
        compiled = torch.compile(wrapped, backend="eager", fullgraph=True)
        outputs = compiled(input_ids=IDS, labels=IDS)
        outputs.loss.backward()
        gradients = [p.grad for p in wrapped.parameters() if p.grad is not None]
        results.append([outputs.loss.detach(), torch.softmax(outputs.logits, -1).detach(), *gradients])
    assert isinstance(outputs.logits, Tensor) == (order == "wrapped first")
    torch.testing.assert_close(results[1], results[0])
    flce.unpatch_model(wrapped)
    assert type(wrapped) is peft.PeftModel
    assert not flce.report(wrapped).patched


ENTERING: dict[str, Callable[[Any], Tensor]] = {
    "loss": own_loss,
    "module": lambda x: nn.CrossEntropyLoss()(x.flatten(0, 1), IDS.flatten()),
    "accuracy": lambda x: (x.argmax(-1) == IDS).double().mean() + x.sum() * 0,
    "softmax": lambda x: x.softmax(-1).square().sum(),
    "shape": lambda x: x.view(-1, x.shape[-1])[IDS.view(-1) > 20].sum() * x.size(-1),
    "log-probabilities": lambda x: torch.log_softmax(x.float(), -1).gather(-1, IDS[..., None]).double().mean(),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ENTERING)
def test_eager_logits_in_a_compiled_function(name: str, grad: bool, models: tuple[Any, Any]) -> None:
    results = []
    for model in models:
        function = torch.compile(ENTERING[name], backend="aot_eager")
        for _ in range(2):
            model.zero_grad()
            logits = model(IDS).logits
            with torch.set_grad_enabled(grad):
                value = function(logits)
            if grad:
                value.backward()
        results.append([value.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_fused_in_a_compiled_function(models: tuple[Any, Any], fused_calls: list[Any]) -> None:
    _, patched = models
    logits = patched(IDS).logits
    torch.compile(own_loss, backend="eager")(logits).backward()
    assert len(fused_calls) == 1
    assert not logits.is_materialized
