"""Entropies and log-probabilities of lazy logits, in the formulas of libraries, without logits in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flce
from flce.huggingface import lazy_logits
from tests.huggingface.conftest import SIZES
from tests.huggingface.scripts import IDS, Build, V

pytestmark = pytest.mark.usefixtures("fail_on_materialize")

TEMPERATURES = torch.linspace(0.4, 1.9, IDS.numel()).view(IDS.shape)
SINGLE_ROWS = flce.ChunkOptions(chunk_rows=1, strategy="tokens")  # so that no tile has the logits of several tokens


class Logits(TorchDispatchMode):
    """A mode that finds allocated tensors with the logits of more than one token."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and V in tensor.shape:
                rows = tensor.untyped_storage().nbytes() // tensor.element_size() // V
                if rows not in (0, 1, SIZES["hidden_size"]):
                    self.found.append(f"{func} {tuple(tensor.shape)}")
        return result


def openrlhf(logits: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies with the operations of OpenRLHF's actor."""
    if temperature != 1.0:
        logits.div_(temperature)
    if logits.dtype != torch.float32:
        rows = [z.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1) for z, y in zip(logits, IDS, strict=True)]
        logprob = torch.stack(rows)
    else:
        size, lse = 5, torch.zeros(IDS.numel(), dtype=logits.dtype, device=logits.device)
        for start, z in enumerate(logits.reshape(-1, logits.size(-1)).split(size)):
            lse[start * size : (start + 1) * size] = z.logsumexp(-1)
        logprob = logits.gather(-1, IDS.unsqueeze(-1)).squeeze(-1) - lse.view(IDS.shape)
    return logprob, torch.logsumexp(logits, dim=-1) - torch.sum(torch.softmax(logits, dim=-1) * logits, dim=-1)


def prime_rl(logits: Any, size: int = 4) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies with the operations of prime-rl: pieces of a sequence."""
    logprob, entropy = [], []
    logits = logits / TEMPERATURES.unsqueeze(-1)
    for z, y in zip(logits.split(size, dim=1), IDS.split(size, dim=1), strict=True):
        logprob.append(z.log_softmax(dim=-1).gather(dim=-1, index=y.unsqueeze(-1)).squeeze(-1))
        with torch.no_grad():
            entropy.append(torch.logsumexp(z, dim=-1) - torch.sum(torch.softmax(z, dim=-1) * z, dim=-1))
    return torch.cat(logprob, 1), torch.cat(entropy, 1)


CALLS: dict[str, Callable[[Any], tuple[Tensor, ...]]] = {
    "OpenRLHF": lambda logits: openrlhf(logits.to(torch.float32), 1.0),
    "OpenRLHF, a temperature": lambda logits: openrlhf(logits, 0.7),
    "OpenRLHF, bfloat16": lambda logits: openrlhf(logits.bfloat16(), 0.7),
    "prime-rl": prime_rl,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("architecture", ["Llama", "Gemma2"])
@pytest.mark.parametrize("name", CALLS)
def test_functions_of_trainers_make_no_logits(name: str, architecture: str, training: bool, build: Build) -> None:
    tolerance = 5e-2 if "bfloat16" in name else 1e-5  # the roundings of both models, of which stock's is larger

    def run(model: Any) -> tuple[list[Tensor], list[Tensor], list[str]]:
        within = lazy_logits(model) if flce.is_patched(model) and not training else contextlib.nullcontext()
        with within, torch.set_grad_enabled(training):
            logits = model(input_ids=IDS).logits
            with Logits() as logits_mode:
                values = CALLS[name](logits)
                loss = torch.stack([value.float().square().sum() for value in values]).sum()
                gradients = torch.autograd.grad(loss, [*model.parameters()]) if training else []
        return [*values], [*gradients], logits_mode.found

    want, right, there = run(build(architecture, num_hidden_layers=1).train(training))
    got, gradients, found = run(
        flce.patch_model(
            build(architecture, num_hidden_layers=1).train(training), options=SINGLE_ROWS, on_materialize="raise"
        )
    )
    assert there
    assert not found
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for gradient, other in zip(gradients, right, strict=True):
        assert (gradient - other).norm() <= tolerance * other.norm() + 1e-12


# Formulas with their number of calls of `flce.linear_logprobs` in a graph. Outside of a graph there is one call.
FORMULAS: dict[str, tuple[Callable[[Any], Tensor], int]] = {
    "softmax, log_softmax": (lambda z: -(F.softmax(z, -1) * F.log_softmax(z, -1)).sum(-1), 1),
    "exp": (lambda z: (lambda logp: -(logp.exp() * logp).sum(-1))(z.log_softmax(-1)), 1),
    "exp second, keepdim": (
        lambda z: (lambda logp: -torch.sum(logp * torch.exp(logp), dim=-1, keepdim=True))(
            torch.log_softmax(z.float() / 0.7, dim=-1)
        ),
        1,
    ),
    "logsumexp": (lambda z: z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1), 2),
    "logits first": (lambda z: torch.logsumexp(z, dim=-1) - torch.sum(z * torch.softmax(z, dim=-1), dim=-1), 2),
    "a temperature for each token": (
        lambda z: (lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1))(z / TEMPERATURES.unsqueeze(-1)),
        1,
    ),
    "Categorical": (lambda z: Categorical(logits=z, validate_args=False).entropy(), 2),
    "log_prob": (lambda z: Categorical(logits=z / 0.7, validate_args=False).log_prob(IDS), 1),
}


# Means, and selections of tokens and classes, with their number of calls in a graph.
SELECTIONS: dict[str, tuple[Callable[[Any], Tensor], int]] = {
    "mean": (lambda z: z[:, 2:].float().mean(-1) / 2, 0),
    "mean of all logits": (lambda z: (z / TEMPERATURES.unsqueeze(-1)).mean(), 0),
    "mean of log-probabilities": (lambda z: z.log_softmax(-1).mean(-1, keepdim=True), 1),
    "smoothing by hand": (lambda z: z.logsumexp(-1) - 0.9 * z.gather(-1, IDS[..., None])[..., 0] - 0.1 * z.mean(-1), 1),
    "take_along_dim": (lambda z: z.log_softmax(-1).take_along_dim(IDS[..., None], -1), 1),
    "index_select": (lambda z: z.flatten(0, 1).index_select(0, IDS.flatten() % 18).logsumexp(-1), 1),
    "shifted to the right": (lambda z: torch.cat([z[:, :1], z[:, :-1]], dim=1).logsumexp(-1), 1),
    "rolled": (lambda z: torch.roll(z, 1, 1)[:, 1:].logsumexp(-1), 1),
    "classes in dimension 1": (lambda z: F.cross_entropy(z.transpose(1, 2), IDS, reduction="none"), 0),
}


def check_formulas(
    formulas: list[Callable[[Any], Tensor]],
    build: Build,
    wrap: Callable[[Any], Any],
    architecture: str = "Gemma2",
    modes: tuple[bool, ...] = (True, False),
) -> None:
    """Compare values and gradients with stock, in training or without gradients, with ``wrap(patched model)``."""
    for training in modes:
        stock, model = (build(architecture, num_hidden_layers=1).train(training) for _ in range(2))
        flce.patch_model(model, on_materialize="raise")

        def run(model: Any) -> list[Tensor]:
            logits = model(input_ids=IDS, use_cache=False).logits
            return [formula(logits) for formula in formulas]

        with lazy_logits(model), torch.set_grad_enabled(training):
            got, want = wrap(run)(model), run(stock)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for values, of in ((got, model), (want, stock)) if training else ():
            weighted = [(x.square() * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in values]
            torch.autograd.backward(torch.stack(weighted).sum(), inputs=[*of.parameters()])
        for (name, ours), right in zip(model.named_parameters(), stock.parameters(), strict=True) if training else ():
            assert ours.grad is not None, name
            assert right.grad is not None, name
            assert (ours.grad - right.grad).norm() <= 1e-5 * right.grad.norm() + 1e-12, name


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula(name: str, build: Build, fused_calls: list[Any]) -> None:
    check_formulas([FORMULAS[name][0]], build, lambda run: run)
    assert len(fused_calls) == 2


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection(name: str, build: Build) -> None:
    check_formulas([SELECTIONS[name][0]], build, lambda run: run, "Llama")


@pytest.mark.parametrize("architecture, formulas, training", [("Gemma2", FORMULAS, True), ("Llama", SELECTIONS, False)])
@pytest.mark.usefixtures("fresh_compiler")
def test_formulas_in_a_graph(architecture: str, formulas: Any, training: bool, build: Build) -> None:
    calls, logits = 0, []

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal calls
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            calls += "linear_logprobs" in str(node.target)
            is_float = isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta
            if is_float and value.shape[-1:] == (V,):
                logits.append(node)
        return graph.forward

    check_formulas(
        [formula for formula, _ in formulas.values()],
        build,
        lambda run: torch.compile(run, backend=backend, fullgraph=True),
        architecture,
        (training,),
    )
    assert calls == sum(number for _, number in formulas.values())
    assert not logits


def test_categorical_validates_its_logits(build: Build) -> None:
    model = flce.patch_model(build("Llama", num_hidden_layers=1), options=SINGLE_ROWS, on_materialize="raise")
    logits = model(input_ids=IDS).logits
    with Logits() as logits_mode:
        policy = Categorical(logits=logits, validate_args=True)
        value = policy.log_prob(IDS) + policy.entropy()
    assert not logits_mode.found
    stock = Categorical(logits=build("Llama", num_hidden_layers=1)(input_ids=IDS).logits)
    torch.testing.assert_close(value, stock.log_prob(IDS) + stock.entropy())
    with pytest.raises(ValueError, match="value"):
        policy.log_prob(IDS + V)
    flce.patch_model(model, on_materialize="ignore").model.norm.weight.data[:] = float("nan")
    with pytest.raises(ValueError, match="invalid values"):
        Categorical(logits=model(input_ids=IDS).logits, validate_args=True)


@pytest.mark.usefixtures("fresh_compiler")
def test_reflected_operations_of_a_graph(build: Build, fused_calls: list[Any]) -> None:
    """The compiler exchanges the operands of `logits - tensor`."""
    model = flce.patch_model(build("Llama", num_hidden_layers=1), on_materialize="raise")
    bias, scale = torch.linspace(-1, 1, V), torch.tensor(1.7)
    for function in (lambda z: (z - bias).logsumexp(-1), lambda z: (z / scale).logsumexp(-1)):

        def run(model: Any, function: Callable[[Any], Tensor] = function) -> Tensor:
            return function(model(input_ids=IDS, use_cache=False).logits)

        got = torch.compile(run, backend="eager", fullgraph=True)(model)
        torch.testing.assert_close(got, run(build("Llama", num_hidden_layers=1)))


SMALL: dict[str, Callable[[Tensor], Tensor]] = {
    "lse": lambda z: z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1),
    "Categorical": lambda z: Categorical(logits=z).entropy(),
    "Categorical, temperatures": lambda z: Categorical(logits=z / TEMPERATURES[..., None]).entropy(),
}


@pytest.mark.parametrize("name", SMALL)
def test_gradients_where_probabilities_are_nearly_equal(name: str, build: Build) -> None:
    """One call has to compute the normalizer and the rest. The results of two calls would be rounded separately: in
    bfloat16 the error of their difference is half of its norm."""
    gradients = []
    for fused in (False, True):
        model = build("Llama", num_hidden_layers=1).to(torch.bfloat16)
        embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
        model.lm_head.weight.data.mul_(0.1)
        if fused:
            flce.patch_model(model, on_materialize="raise")
        else:
            model.double()
        entropy = SMALL[name](
            model(inputs_embeds=embedded.to(model.dtype)).logits.to(torch.promote_types(model.dtype, torch.float32))
        )
        (gradient,) = torch.autograd.grad(entropy.sum(), embedded)
        gradients.append(gradient.double())
        if fused:
            assert flce.report(model).fused == 1
    exact, ours = gradients
    assert (ours - exact).norm() <= 0.03 * exact.norm()


def test_zeros_of_one_class(build: Build) -> None:
    """With one class all log-probabilities are zero. A divisor makes the sign of a zero visible."""
    model = flce.patch_model(build("Llama", vocab_size=1), on_materialize="raise").train()
    logprobs = model(torch.zeros_like(IDS)).logits.log_softmax(-1)
    sums = {
        "log-probabilities": logprobs.sum(-1),
        "weighted": (logprobs.exp() * logprobs).sum(-1),
        "negative": -(logprobs.exp() * logprobs).sum(-1),
        "of negatives": (logprobs.exp() * -logprobs).sum(-1),
    }
    signs = {name: bool(value.signbit().any()) for name, value in sums.items()}
    assert signs == {"log-probabilities": False, "weighted": False, "negative": True, "of negatives": False}


@pytest.mark.gpu
def test_autocast_on_a_gpu(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast computes logsumexps and sums in float32."""
    monkeypatch.delenv("FLCE_BACKEND")
    for model in (build("Llama"), flce.patch_model(build("Llama"))):
        logits = model.cuda().bfloat16().train()(input_ids=IDS.cuda()).logits
        logprobs = logits.log_softmax(-1)
        with torch.autocast("cuda", torch.bfloat16):
            assert logits.logsumexp(-1).dtype == logprobs.sum(-1).dtype == torch.float32
