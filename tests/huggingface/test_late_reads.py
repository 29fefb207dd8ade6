"""Logits that are read after a possible change of weights: stock's value, or an error with a remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.huggingface import LazyLogits, MaterializedLogitsWarning, head_call, patch_model
from tests.helpers import parametrize_pairs
from tests.huggingface.scripts import IDS, Compare, loss_of

STALE = "no longer be computed: the output embedding was changed .* since the model ran.*in a forward hook of the model"

READS: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda logits: logits.argmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "view": lambda logits: logits[:, -1].topk(3).indices,
    "loss": loss_of,
    "logsumexp": lambda logits: logits.logsumexp(-1),
    "filled": lambda logits: logits.masked_fill(torch.arange(97) > 90, -1e4).argmax(-1),
}


def forward(model: Any, **kwargs: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS, **kwargs).logits
    return logits


def trained(model: Any) -> Tensor:
    outputs = model(input_ids=IDS, labels=IDS)
    outputs.loss.backward()
    logits: Tensor = outputs.logits
    assert type(logits) is LazyLogits
    return logits


@pytest.mark.filterwarnings("error::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize("read", READS)
def test_after_a_fused_optimizer_step(build: Callable[..., Any], read: str) -> None:
    """Trainer's default optimizer does not increase tensor versions. No warning about computed logits is given."""
    model = patch_model(build("Llama"))
    logits = trained(model)
    torch.optim.AdamW(model.parameters(), fused=True).step()
    with pytest.raises(RuntimeError, match=STALE):
        READS[read](logits)
    assert not flce.report(model).materialized


def test_without_the_memory_for_logits(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the operation that needs the logits, because the user has to change it."""
    logits = trained(patch_model(build("Llama")))
    monkeypatch.setattr(LazyLogits, "_compute", lambda self: torch.empty(1 << 60))
    with (
        pytest.warns(MaterializedLogitsWarning, match=r"sigmoid at .*test_late_reads"),
        pytest.raises(RuntimeError, match=r"memory|allocate"),
    ):
        logits.sigmoid()


def test_after_a_step_that_changes_no_sampled_value(build: Callable[..., Any]) -> None:
    model = patch_model(build("Llama"))
    logits, weight = trained(model), model.lm_head.weight
    assert weight.grad is not None
    assert len(weight) > head_call._SAMPLE
    weight.grad.zero_()[1] = 1.0
    optimizer = torch.optim.AdamW(
        model.parameters(), weight_decay=0.0, fused=True
    )  # which has to exist when the logits are read
    optimizer.step()
    with pytest.raises(RuntimeError, match="by an optimizer step"):
        logits.argmax(-1)


def exchange(model: Any) -> None:
    """Exchange the weights, as an average of weights does."""
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def copy_over(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 1.5)


@torch.no_grad()
def without_gradients(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.5)


def halve(model: Any) -> None:
    model.half()


CHANGES = [exchange, copy_over, without_gradients, halve]


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize("read", ["argmax", "sigmoid", "loss"])
@pytest.mark.parametrize("change", CHANGES)
def test_after_weights_were_exchanged(build: Callable[..., Any], change: Callable[[Any], None], read: str) -> None:
    model = patch_model(build("Llama"))
    logits = forward(model)
    change(model)
    with pytest.raises(RuntimeError, match=r"can no longer be computed.*materialize"):
        READS[read](logits)


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_forward_in_inference_mode(build: Callable[..., Any], change: Callable[[Any], None]) -> None:
    """Tensors of inference mode have no versions."""
    model = patch_model(build("Llama"))
    with torch.inference_mode():
        logits = forward(model, labels=IDS)
    change(model)
    with pytest.raises(RuntimeError, match="can no longer be computed"):
        logits.argmax(-1)


def test_after_an_adapter_was_merged(build: Callable[..., Any]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = patch_model(peft.get_peft_model(build("Llama"), config))
    logits = trained(model)
    model.merge_adapter()
    with pytest.raises(RuntimeError, match=STALE):
        logits.argmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_no_numbers_are_no_change(build: Callable[..., Any], dtype: torch.dtype) -> None:
    model = build("Llama").to(dtype)
    with torch.no_grad():
        model.lm_head.weight[0].fill_(float("nan"))
    logits = forward(patch_model(model))
    model.lm_head.weight.data = model.lm_head.weight.data.clone()  # equal values at another address
    assert logits.argmax(-1).eq(0).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_other_optimizers_change_nothing(frozen: bool, build: Callable[..., Any]) -> None:
    """Optimizers of another model, of other parameters, and of a frozen head do not change the head."""
    stock = build("Llama")
    model = patch_model(copy.deepcopy(stock))
    model.lm_head.requires_grad_(not frozen)
    other = torch.nn.Linear(3, 3)
    other(torch.ones(3)).sum().backward()
    logits = trained(model)
    torch.optim.AdamW(other.parameters(), fused=True).step()
    torch.optim.AdamW((model if frozen else model.model).parameters(), fused=True).step()
    assert torch.equal(logits.argmax(-1), forward(stock).argmax(-1))


# ------------------------------------------------------------------------------- hidden states, changed after the call


def rescaled(hidden: Tensor) -> None:
    hidden /= hidden.norm(dim=-1, keepdim=True)


def through_data(hidden: Tensor) -> None:
    hidden.data.mul_(3.0)


def through_numpy(hidden: Tensor) -> None:
    hidden.detach().numpy()[:] *= 3.0


HIDDEN_CHANGES = [rescaled, through_data, through_numpy]
HIDDEN_STALE = "no longer be computed: the hidden states were changed"


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@parametrize_pairs(
    mode=[torch.inference_mode, torch.no_grad, torch.enable_grad], change=HIDDEN_CHANGES, read=list(READS)
)
def test_after_hidden_states_were_changed(
    build: Callable[..., Any], mode: Any, change: Callable[[Tensor], None], read: str
) -> None:
    """A change is found without versions too. An earlier copy is not affected by the change."""
    stock = build("Llama", num_hidden_layers=1)
    model = patch_model(copy.deepcopy(stock))
    if mode is not torch.enable_grad:
        model.eval()
    with mode():
        want = stock(input_ids=IDS).logits[torch.tensor([1])]
        outputs = model(input_ids=IDS, labels=IDS, output_hidden_states=True)
        copied = outputs.logits[torch.tensor([1])]
        change(outputs.hidden_states[-1])
        with pytest.raises(RuntimeError, match=HIDDEN_STALE):
            READS[read](outputs.logits)
        with pytest.raises(RuntimeError, match=HIDDEN_STALE):
            outputs.logits[torch.tensor([1])].sigmoid()  # a read of a copy of the changed tensor
        torch.testing.assert_close(copied.sigmoid(), want.sigmoid())


def test_other_memory_in_hidden_states_changes_nothing(build: Callable[..., Any]) -> None:
    stock = build("Llama", num_hidden_layers=1)
    model = patch_model(copy.deepcopy(stock)).eval()
    with torch.no_grad():
        outputs = model(input_ids=IDS, labels=IDS, output_hidden_states=True)
        outputs.hidden_states[-1].data = torch.zeros(2, 9, 32)
        assert torch.equal(outputs.logits.argmax(-1), forward(stock).argmax(-1))


# ----------------------------------------------------------------------------- requires_grad, changed after the call


def with_adapters(model: Any, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(7)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **settings))
    model.add_adapter("other", peft.LoraConfig(r=2, init_lora_weights=False, **settings))
    return model.train()


MODELS: dict[str, Callable[[Any], Any]] = {
    "adapters on the head": lambda model: with_adapters(model, target_modules=["q_proj", "lm_head"]),
    "copies of the head": lambda model: with_adapters(model, target_modules=["q_proj"], modules_to_save=["lm_head"]),
}

# Code between the call and the loss.
CHANGES_BEFORE_THE_LOSS = {
    "distilled from the base": """
        with model.disable_adapter():
            with torch.no_grad():
                base = model(input_ids=IDS).logits
            loss = F.kl_div(logits.log_softmax(-1), base.sigmoid(), reduction="batchmean")""",
    "a loss with adapters disabled": """
        with model.disable_adapter():
            loss = loss_of(logits)""",
    "a read with adapters disabled": """
        with model.disable_adapter():
            logits.std().item()
        loss = loss_of(logits)""",
    "a loss with another adapter": """
        model.set_adapter("other")
        loss = loss_of(logits)
        model.set_adapter("default")""",
    "frozen for the loss": """
        loss = frozen_loss(model, logits)""",
    "frozen for the loss, in a checkpoint": """
        loss = checkpoint(lambda: frozen_loss(model, model(input_ids=IDS).logits), use_reentrant=False)""",
    "frozen for the call": """
        head = model.get_output_embeddings().requires_grad_(False)
        logits = model(input_ids=IDS).logits
        head.requires_grad_(True)
        loss = loss_of(logits) + logits[..., [1, 2]].square().mean()""",
    # Stock's graph tests `requires_grad` again when the gradient arrives.
    "frozen for backward": """
        loss = loss_of(logits)
        model.get_output_embeddings().requires_grad_(False)""",
}


def frozen_loss(model: Any, logits: Tensor) -> Tensor:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    loss = loss_of(logits) + logits.logsumexp(-1).square().mean()
    for parameter in trained:
        parameter.requires_grad_(True)
    return loss


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("change", CHANGES_BEFORE_THE_LOSS)
def test_parameters_trained_at_the_call_get_gradients(kind: str, change: str, compare: Compare) -> None:
    """Other parameters get no gradient, whatever their ``requires_grad`` is when the loss is computed."""
    script = """
        model = patch(MODELS[kind](build("Llama", num_hidden_layers=1, tie_word_embeddings="copies" not in kind)))
        logits = model(input_ids=IDS).logits"""
    compare(script + CHANGES_BEFORE_THE_LOSS[change] + "\n        backward(loss)", kind=kind)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu_on_the_way_to_a_loss(build: Callable[..., Any], monkeypatch: Any) -> None:
    """The weight is sampled on the device. The sample is compared only if logits are read late."""
    monkeypatch.delenv("FLCE_BACKEND")
    head = patch_model(build("Llama").cuda()).lm_head
    hidden = torch.randn(2, 9, 32, device="cuda", requires_grad=True)
    target = IDS[:, 1:].flatten().cuda()

    def loss() -> Tensor:
        logits = head(hidden)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), target) + logits.logsumexp(-1).square().mean()

    loss().backward()  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
