"""The module forms."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flce
from flce import modules
from flce.testing.problem import make_problem
from tests.helpers import STATS

LOSS_ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "softcap": 4.0, "logit_scale": 0.5, "temperature": 1.5},
    {"z_loss": 0.01, "shift": 1, "ignore_index": 3},
    {"options": flce.ChunkOptions(chunk_rows=4)},
    {"stats": STATS},
]


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [result.loss, *(getattr(result, s) for s in STATS)]


@pytest.mark.parametrize("kwargs", LOSS_ARGUMENTS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("class_weight", [False, True])
def test_modules_are_the_function(
    kwargs: dict[str, Any], bias: bool, class_weight: bool, torch_backend: str, device: torch.device
) -> None:
    p = make_problem((3, 5), 8, 30, dtype=torch.float32, device=device)
    weight = torch.rand(30, device=device) if class_weight else None
    owner = flce.LinearCrossEntropyLoss(8, 30, bias, weight=weight, device=device, **kwargs)
    stateless = flce.FusedLinearCrossEntropyLoss(weight=weight, **kwargs)
    w, b = owner.linear.weight, owner.linear.bias
    assert isinstance(owner.linear, nn.Linear)
    assert (b is not None) == bias
    expected = flce.fused_linear_cross_entropy(p.input, w, p.target, linear_bias=b, weight=weight, **kwargs)
    first, second = owner(p.input, p.target), stateless(p.input, w, p.target, b)
    for got in (first, second):
        assert type(got) is type(expected)
        for a, e in zip(flat(got), flat(expected), strict=True):
            assert torch.equal(a, e)
    flat(first)[0].sum().backward()
    assert w.grad is not None
    assert w.grad.any()
    assert b is None or b.grad is not None


# Another value than the default for each argument that a module fixes.
OTHER_VALUES: dict[str, Any] = {
    "weight": torch.ones(30),
    "reduction": "sum",
    "ignore_index": 3,
    "label_smoothing": 0.1,
    "softcap": 5.0,
    "logit_scale": 2.0,
    "temperature": 0.5,
    "z_loss": 0.01,
    "shift": 1,
    "stats": ("lse",),
    "options": flce.ChunkOptions(chunk_rows=4),
    "inplace": True,
    "process_group": object(),
    "vocab_size": 60,
}


@pytest.mark.parametrize(
    "name, module, made_with, called_with",
    [
        ("fused_linear_cross_entropy", flce.FusedLinearCrossEntropyLoss, (), 3),
        ("fused_linear_cross_entropy", flce.LinearCrossEntropyLoss, (8, 30), 2),
        ("cross_entropy", flce.CrossEntropyLoss, (), 2),
    ],
)
def test_every_argument_reaches_the_function(
    name: str, module: Any, made_with: tuple[int, ...], called_with: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, and those of `forward`: no argument that the function has is left at its default."""
    seen: dict[str, Any] = {}
    function = getattr(flce, name)
    arguments = inspect.signature(function).parameters
    shown = inspect.signature(module).parameters
    fixed = arguments.keys() & OTHER_VALUES.keys()
    of_forward = dict.fromkeys({"adapters", "token_weight", "num_items"} & arguments.keys(), 7)
    monkeypatch.setattr(modules, name, functools.wraps(function)(lambda *args, **kwargs: seen.update(kwargs)))
    for given in fixed:
        module(*made_with, **{given: OTHER_VALUES[given]})(*[torch.zeros(())] * called_with, **of_forward)
        for argument in fixed:
            want = OTHER_VALUES[argument] if argument == given else arguments[argument].default
            assert seen[argument] is want or seen[argument] == want
            assert shown[argument].default == arguments[argument].default
        assert {argument: seen[argument] for argument in of_forward} == of_forward
    assert seen.keys() | {"input", "linear_weight", "logits", "target"} >= arguments.keys()
    with pytest.raises(TypeError, match="smoothing"):
        module(*made_with, smoothing=0.1)


def test_adapters(torch_backend: str) -> None:
    p = make_problem((3, 5), 8, 30, dtype=torch.float32, bias=True, adapter_ranks=(2, 3))
    owner, stateless = flce.LinearCrossEntropyLoss(8, 30, bias=True), flce.FusedLinearCrossEntropyLoss()
    w, b = owner.linear.weight, owner.linear.bias
    expected = flce.fused_linear_cross_entropy(p.input, w, p.target, linear_bias=b, adapters=p.adapters)
    assert isinstance(expected, Tensor)
    assert torch.equal(owner(p.input, p.target, adapters=p.adapters), expected)
    assert torch.equal(stateless(p.input, w, p.target, b, adapters=p.adapters), expected)


def test_token_weight_and_num_items(torch_backend: str) -> None:
    p = make_problem((3, 5), 8, 30, dtype=torch.float32, token_weight=True, bias=True)
    kwargs: dict[str, Any] = {"token_weight": p.kwargs["token_weight"], "num_items": torch.tensor(9)}
    owner = flce.LinearCrossEntropyLoss(8, 30, bias=True, reduction="sum")
    stateless = flce.FusedLinearCrossEntropyLoss(reduction="sum")
    w, b = owner.linear.weight, owner.linear.bias
    expected = flce.fused_linear_cross_entropy(p.input, w, p.target, linear_bias=b, reduction="sum", **kwargs)
    assert isinstance(expected, Tensor)
    assert torch.equal(owner(p.input, p.target, **kwargs), expected)
    assert torch.equal(stateless(p.input, w, p.target, b, **kwargs), expected)


def test_parameters_device_and_dtype(device: torch.device) -> None:
    module = flce.LinearCrossEntropyLoss(8, 30, bias=True, device=device, dtype=torch.float64)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {"linear.weight": (30, 8), "linear.bias": (30,)}
    assert all(p.dtype == torch.float64 and p.device.type == device.type for p in module.parameters())
    assert not list(flce.FusedLinearCrossEntropyLoss().parameters())
    assert [n for n, _ in flce.LinearCrossEntropyLoss(8, 30).named_parameters()] == ["linear.weight"]
    meta = flce.LinearCrossEntropyLoss(8, 30, device="meta")
    assert meta.linear.weight.is_meta


def test_class_weight_is_a_buffer(device: torch.device) -> None:
    weight = torch.rand(30)
    for module in (
        flce.LinearCrossEntropyLoss(8, 30, weight=weight),
        flce.FusedLinearCrossEntropyLoss(weight=weight),
    ):
        buffers = dict(module.named_buffers())
        assert len(buffers) == 1
        assert torch.equal(next(iter(buffers.values())), weight)
        assert all(b.device.type == device.type for b in module.to(device).buffers())
        assert all(b.dtype == torch.float64 for b in module.double().buffers())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("class_weight", [False, True])
def test_state_moves_to_and_from_the_module_of_torch(bias: bool, class_weight: bool) -> None:
    if not hasattr(nn, "LinearCrossEntropyLoss"):
        pytest.skip("this PyTorch has no torch.nn.LinearCrossEntropyLoss")
    weight = torch.rand(30) if class_weight else None
    theirs = nn.LinearCrossEntropyLoss(8, 30, bias=bias, weight=weight)
    ours = flce.LinearCrossEntropyLoss(8, 30, bias=bias, weight=weight)
    ours.load_state_dict(theirs.state_dict())
    x, y = torch.randn(7, 8), torch.randint(0, 30, (7,))
    torch.testing.assert_close(ours(x, y), theirs(x, y), rtol=1e-5, atol=1e-6)
    theirs.load_state_dict(ours.state_dict())


def test_state_moves_to_and_from_itself(tmp_path: Any) -> None:
    a = flce.LinearCrossEntropyLoss(8, 30, bias=True, weight=torch.rand(30))
    b = flce.LinearCrossEntropyLoss(8, 30, bias=True, weight=torch.rand(30))
    torch.save(a.state_dict(), tmp_path / "state.pt")
    b.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(a.linear.weight, b.linear.weight)


def test_copies_and_pickles() -> None:
    x, y = torch.randn(7, 8), torch.randint(0, 30, (7,))
    module = flce.LinearCrossEntropyLoss(
        8, 30, bias=True, weight=torch.rand(30), softcap=5.0, options=flce.ChunkOptions(chunk_rows=3)
    )
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.linear.weight is not module.linear.weight
        assert torch.equal(other(x, y), module(x, y))


def test_repr_says_what_differs() -> None:
    text = repr(flce.LinearCrossEntropyLoss(8, 30, softcap=5.0, reduction="sum", label_smoothing=0.25))
    for part in ("in_features=8", "30", "5.0", "sum", "0.25"):
        assert part in text
    assert "temperature" in repr(flce.FusedLinearCrossEntropyLoss(temperature=2.0))


def test_training_converges(torch_backend: str) -> None:
    """A few steps of a real optimiser on a problem that can be learnt."""
    x, y = torch.randn(64, 16), torch.randint(0, 10, (64,))
    module = flce.LinearCrossEntropyLoss(16, 10, bias=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = module(x, y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def test_functional_call(backend: str) -> None:
    module = flce.LinearCrossEntropyLoss(8, 30)
    p = make_problem((5,), 8, 30, dtype=torch.float32)
    w = p.linear_weight.clone().requires_grad_()
    loss = torch.func.functional_call(module, {"linear.weight": w}, (p.input, p.target))
    loss.backward()
    v = p.linear_weight.clone().requires_grad_()
    expected = flce.fused_linear_cross_entropy(p.input, v, p.target)
    expected.backward()
    assert torch.equal(loss, expected)
    torch.testing.assert_close(w.grad, v.grad, rtol=0, atol=0)
    assert module.linear.weight.grad is None
