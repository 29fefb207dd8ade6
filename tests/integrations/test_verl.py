"""Tests of verl's kernel replaced by `flce.linear_logprobs`: with a simulated verl, and with verl's files if installed.

verl imports Ray and other packages, which its files used here do not need. The tests import them from empty packages:
`pip install --no-deps verl` is enough.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flce.testing.problem import relative_error
from tests.processes import World

KERNEL = "verl.utils.kernel.linear_cross_entropy"


class LinearCrossEntropy:
    """Simulation of the class of verl 0.9.1, without its computation."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float | None = 1.0,
        reduction: str | None = "none",
        dist_process_group: Any = None,
    ) -> list[Tensor]:
        return [hidden, weight, labels]

    apply = forward


@pytest.fixture
def without_verl() -> Iterator[None]:
    """Remove verl's modules and the plugin from `sys.modules` before and after the test."""
    before = dict(sys.modules)
    for name in [name for name in before if name.partition(".")[0] in ("verl", "verl_plugin")]:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("verl", "verl_plugin")]:
        del sys.modules[name]
    sys.modules.update({name: before[name] for name in before.keys() - sys.modules.keys()})


@pytest.fixture
def simulated_verl(without_verl: None) -> Any:
    return simulate_verl()


def simulate_verl() -> Any:
    for end in range(len(KERNEL.split("."))):
        name = ".".join(KERNEL.split(".")[: end + 1])
        sys.modules[name] = ModuleType(name)
    module: Any = sys.modules[KERNEL]
    module.LinearCrossEntropy, module.linear_cross_entropy = LinearCrossEntropy, LinearCrossEntropy.apply
    return module


def import_verl(module: str) -> Any:
    """Import a module of verl that needs only PyTorch and Transformers, or skip the test."""
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed: see docs/trainers.md")
    packages = module.split(".")[:-1]
    for end in range(1, len(packages) + 1):
        name = ".".join(packages[:end])
        spec = importlib.util.find_spec(name)
        assert spec is not None
        sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    return importlib.import_module(module)


def plugin() -> Any:
    return importlib.import_module("verl_plugin")


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed sequences like verl: one row."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(101, (1, 24), generator=generator)
    hidden, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((1, 24, 16), (101, 16)))
    return hidden, weight, labels


def expected(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, reduction: str
) -> tuple[Tensor, Tensor]:
    """Return the results from all logits in float64."""
    z = hidden[0].double() @ weight.double().T / temperature
    probability = torch.exp(z - z.logsumexp(1, keepdim=True))
    logprob = probability.gather(1, labels[0][:, None])[:, 0].log()
    entropy = -torch.xlogy(probability, probability).sum(1)
    return logprob if reduction == "none" else getattr(logprob, reduction)(), entropy


def with_gradients(function: Any, hidden: Tensor, weight: Tensor, *call: Any) -> list[Tensor]:
    """Return both results, and the gradients of hidden states and weight for upstream gradients of both results."""
    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    logprob, entropy = function(*leaves, *call)
    upstream = torch.linspace(-1.0, 1.0, 24, device=hidden.device, dtype=entropy.dtype)
    number = (logprob * upstream).sum() if logprob.dim() else 3 * logprob
    gradients = torch.autograd.grad(number + (entropy * upstream.flip(0)).sum(), leaves)
    return [logprob, entropy, *gradients]


@pytest.mark.usefixtures("simulated_verl")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype, tolerances", [(torch.float32, [2e-6] * 4), (torch.bfloat16, [1e-5] * 2 + [5e-3] * 2)])
def test_the_function_equals_verls(
    dtype: torch.dtype, tolerances: list[float], temperature: float, reduction: str
) -> None:
    """Check values and dtypes: results are float32, gradients have the dtypes of their tensors."""
    hidden, weight, labels = problem(dtype)
    ours = with_gradients(plugin().linear_cross_entropy, hidden, weight, labels, temperature, reduction, None)
    exact = with_gradients(expected, hidden.double(), weight.double(), labels, temperature, reduction)
    shapes = (() if reduction != "none" else (24,)), (24,), (1, 24, 16), weight.shape
    for found, correct, tolerance, shape in zip(ours, exact, tolerances, shapes, strict=True):
        assert found.shape == shape
        assert relative_error(found, correct) < tolerance
    assert [t.dtype for t in ours] == [torch.float32] * 2 + [dtype] * 2


def test_installing(simulated_verl: Any) -> None:
    """Install and uninstall twice, also in Megatron's module, which has looked the function up."""
    megatron_module: Any = ModuleType("verl.models.mcore.model_forward_fused")
    sys.modules[megatron_module.__name__] = megatron_module
    assert simulated_verl.linear_cross_entropy == LinearCrossEntropy.apply
    ours = plugin()
    for _ in range(2):
        assert simulated_verl.linear_cross_entropy is megatron_module.linear_cross_entropy is ours.linear_cross_entropy
        ours.install()
    for _ in range(2):
        ours.uninstall()
        assert simulated_verl.linear_cross_entropy == megatron_module.linear_cross_entropy == LinearCrossEntropy.apply


def run_rank() -> list[Tensor]:
    """Return both results, and the gradients: of the hidden states (summed over ranks) and of the shard."""
    import torch.distributed as dist

    simulate_verl()
    hidden, weight, labels = problem(torch.float32)
    weight = weight[:100].chunk(2)[dist.get_rank()]
    call = weight, labels % 100, 0.7, "none", dist.group.WORLD
    results = with_gradients(plugin().linear_cross_entropy, hidden, *call)
    dist.all_reduce(results[2])
    return [t.detach() for t in results]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
def test_a_vocabulary_that_is_split() -> None:
    with contextlib.closing(World(2)) as world:
        found = world.run(run_rank)
    hidden, weight, labels = problem(torch.float64)
    hidden, weight = hidden.float().double(), weight.float().double()
    *exact, weight_grad = with_gradients(expected, hidden, weight[:100], labels % 100, 0.7, "none")
    for results, shard_grad in zip(found, weight_grad.chunk(2), strict=True):
        for result, correct in zip(results, [*exact, shard_grad], strict=True):
            assert relative_error(result, correct) < 2e-6


def test_another_signature_is_refused(simulated_verl: Any) -> None:
    class Other:
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 2.0) -> None: ...

    simulated_verl.LinearCrossEntropy = Other
    theirs, ours = r"\(hidden, weight, labels, temperature=2\.0\)", r"\(hidden, weight, labels, temperature=1\.0, redu"
    with pytest.raises(
        ImportError, match=rf"verl has linear_cross_entropy{theirs}, expected linear_cross_entropy{ours}"
    ):
        plugin()
    del simulated_verl.LinearCrossEntropy
    with pytest.raises(ImportError, match="verl has no LinearCrossEntropy, expected linear_cross_entropy"):
        plugin()
    assert simulated_verl.linear_cross_entropy == LinearCrossEntropy.apply


# --- with verl's files ---


def test_the_simulation_equals_verl(without_verl: None) -> None:
    module = import_verl(KERNEL)
    names = [list(inspect.signature(c.forward).parameters) for c in (module.LinearCrossEntropy, LinearCrossEntropy)]
    assert names[0] == names[1]
    assert module.linear_cross_entropy == module.LinearCrossEntropy.apply


def test_a_model_of_verl(without_verl: None) -> None:
    """Check a model's forward if the function was replaced after its import."""
    pytest.importorskip("transformers")
    from flce.testing import VOCAB_SIZE, tiny_model

    import_verl(KERNEL)
    forward = import_verl("verl.models.transformers.dense_common").forward_with_triton_backend
    plugin()
    model: Any = tiny_model().train()
    ids = torch.randint(VOCAB_SIZE, (1, 20), generator=torch.Generator().manual_seed(0))
    rolled = ids.roll(-1, 1)
    out = forward(model, input_ids=ids, shift_labels=rolled, temperature=0.7, return_dict=True)
    (out.log_probs.sum() + out.entropy.sum()).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0] / 0.7, -1)
    logprob, entropy = logprobs.gather(1, rolled[0][:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)
    (logprob.sum() + entropy.sum()).backward()
    # verl's engine also squeezes the packed row.
    torch.testing.assert_close(out.log_probs.squeeze(0), logprob, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.entropy.squeeze(0), entropy, rtol=0, atol=1e-5)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert relative_error(gradient, parameter.grad) < 1e-5
