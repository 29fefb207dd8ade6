"""verl's kernel replaced by `flce.linear_logprobs`: with a stand-in for verl, and with its own files where they are.

verl itself imports Ray and more, of which these files need nothing: `pip install --no-deps verl`, and empty packages in
the place of its own.
"""

from __future__ import annotations

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

KERNEL = "verl.utils.kernel.linear_cross_entropy"


class LinearCrossEntropy:
    """Of verl 0.9.1, without what it computes."""

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
    """verl's modules and the plugin are imported anew in the test, and are not there after it."""
    before = dict(sys.modules)
    for name in [name for name in before if name.partition(".")[0] in ("verl", "verl_plugin")]:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("verl", "verl_plugin")]:
        del sys.modules[name]
    sys.modules.update({name: before[name] for name in before.keys() - sys.modules.keys()})


@pytest.fixture
def stand_in(without_verl: None) -> Any:
    return put_stand_in()


def put_stand_in() -> Any:
    for end in range(len(KERNEL.split("."))):
        name = ".".join(KERNEL.split(".")[: end + 1])
        sys.modules[name] = ModuleType(name)
    module: Any = sys.modules[KERNEL]
    module.LinearCrossEntropy, module.linear_cross_entropy = LinearCrossEntropy, LinearCrossEntropy.apply
    return module


def needed(module: str) -> Any:
    """A module of verl that needs only PyTorch and Transformers, if verl is there."""
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
    """Packed sequences as verl has them: one row."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(101, (1, 24), generator=generator)
    hidden, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((1, 24, 16), (101, 16)))
    return hidden, weight, labels


def expected(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, reduction: str
) -> tuple[Tensor, Tensor]:
    """From all logits in float64."""
    z = hidden[0].double() @ weight.double().T / temperature
    probability = torch.exp(z - z.logsumexp(1, keepdim=True))
    logprob = probability.gather(1, labels[0][:, None])[:, 0].log()
    entropy = -torch.xlogy(probability, probability).sum(1)
    return logprob if reduction == "none" else getattr(logprob, reduction)(), entropy


def with_gradients(function: Any, hidden: Tensor, weight: Tensor, *call: Any) -> list[Tensor]:
    """Both results, and gradients of hidden states and weight for upstream gradients of both."""
    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    logprob, entropy = function(*leaves, *call)
    upstream = torch.linspace(-1.0, 1.0, 24, device=hidden.device, dtype=entropy.dtype)
    number = (logprob * upstream).sum() if logprob.dim() else 3 * logprob
    gradients = torch.autograd.grad(number + (entropy * upstream.flip(0)).sum(), leaves)
    return [logprob, entropy, *gradients]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ours_is_verls_function(temperature: float, reduction: str) -> None:
    hidden, weight, labels = problem(torch.float32)
    ours = with_gradients(plugin().linear_cross_entropy, hidden, weight, labels, temperature, reduction)
    exact = with_gradients(expected, hidden.double(), weight.double(), labels, temperature, reduction)
    assert ours[0].shape == (() if reduction != "none" else (24,))
    assert ours[1].shape == (24,)
    assert ours[2].shape == (1, 24, 16)
    for found, right in zip(ours, exact, strict=True):
        assert found.dtype == torch.float32
        assert relative_error(found, right) < 2e-6


@pytest.mark.usefixtures("stand_in")
def test_half_precision() -> None:
    """Results are float32, gradients have the dtype of what they are of."""
    hidden, weight, labels = problem(torch.bfloat16)
    ours = with_gradients(plugin().linear_cross_entropy, hidden, weight, labels, 0.7, "none", None)
    exact = with_gradients(expected, hidden.double(), weight.double(), labels, 0.7, "none")
    assert [t.dtype for t in ours] == [torch.float32] * 2 + [torch.bfloat16] * 2
    for found, right, tolerance in zip(ours, exact, (1e-5, 1e-5, 5e-3, 5e-3), strict=True):
        assert relative_error(found, right) < tolerance


def test_installing(stand_in: Any) -> None:
    """By importing it, twice, and back, twice; also where Megatron's models have looked it up."""
    of_megatron: Any = ModuleType("verl.models.mcore.model_forward_fused")
    sys.modules[of_megatron.__name__] = of_megatron
    assert stand_in.linear_cross_entropy == LinearCrossEntropy.apply
    ours = plugin()
    for _ in range(2):
        assert stand_in.linear_cross_entropy is of_megatron.linear_cross_entropy is ours.linear_cross_entropy
        ours.install()
    for _ in range(2):
        ours.uninstall()
        assert stand_in.linear_cross_entropy == of_megatron.linear_cross_entropy == LinearCrossEntropy.apply


def in_a_process() -> list[Tensor]:
    """Both results, and gradients: of the hidden states, summed as Megatron-Core sums them, and of the slice."""
    import torch.distributed as dist

    put_stand_in()
    hidden, weight, labels = problem(torch.float32)
    weight = weight[:100].chunk(2)[dist.get_rank()]
    call = weight, labels % 100, 0.7, "none", dist.group.WORLD
    made = with_gradients(plugin().linear_cross_entropy, hidden, *call)
    dist.all_reduce(made[2])
    return [t.detach() for t in made]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
def test_a_vocabulary_that_is_split() -> None:
    from tests.distributed.pair import World

    world = World(2)
    try:
        found = world.run(in_a_process)
    finally:
        world.close()
    hidden, weight, labels = problem(torch.float64)
    hidden, weight = hidden.float().double(), weight.float().double()
    *exact, of_weight = with_gradients(expected, hidden, weight[:100], labels % 100, 0.7, "none")
    for mine, of_slice in zip(found, of_weight.chunk(2), strict=True):
        for result, right in zip(mine, [*exact, of_slice], strict=True):
            assert relative_error(result, right) < 2e-6


@pytest.mark.usefixtures("stand_in")
def test_what_it_cannot_do() -> None:
    hidden, weight, labels = problem(torch.float32)
    with pytest.raises(TypeError, match=r"process_group must be a torch.distributed.ProcessGroup, got str"):
        plugin().linear_cross_entropy(hidden, weight, labels, 1.0, "none", "group")
    with pytest.raises(ValueError, match="'none', 'sum' or 'mean', got 'max'"):
        plugin().linear_cross_entropy(hidden, weight, labels, 1.0, "max")


def test_another_signature_is_refused(stand_in: Any) -> None:
    class Other:
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 2.0) -> None: ...

    stand_in.LinearCrossEntropy = Other
    theirs, ours = r"\(hidden, weight, labels, temperature=2\.0\)", r"\(hidden, weight, labels, temperature=1\.0, redu"
    with pytest.raises(ImportError, match=rf"verl has linear_cross_entropy{theirs}.*put linear_cross_entropy{ours}"):
        plugin()
    del stand_in.LinearCrossEntropy
    with pytest.raises(ImportError, match="verl has no LinearCrossEntropy where flce was to put"):
        plugin()
    assert stand_in.linear_cross_entropy == LinearCrossEntropy.apply


# --- with verl's own files ---


def test_the_stand_in_is_as_verl_is(without_verl: None) -> None:
    module = needed(KERNEL)
    names = [list(inspect.signature(c.forward).parameters) for c in (module.LinearCrossEntropy, LinearCrossEntropy)]
    assert names[0] == names[1]
    assert module.linear_cross_entropy == module.LinearCrossEntropy.apply


def test_a_model_of_verl(without_verl: None) -> None:
    """Its forward, with the function that was replaced after it had been imported."""
    pytest.importorskip("transformers")
    from flce.testing.models import VOCAB_SIZE, tiny_model

    needed(KERNEL)
    forward = needed("verl.models.transformers.dense_common").forward_with_triton_backend
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
    # As the engine takes them: the packed row is squeezed.
    torch.testing.assert_close(out.log_probs.squeeze(0), logprob, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.entropy.squeeze(0), entropy, rtol=0, atol=1e-5)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert relative_error(gradient, parameter.grad) < 1e-5
