"""The module forms of the losses."""

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
from flce.testing.problem import Problem, make_problem
from tests.helpers import OTHER_VALUES, STATS

# For the results. A test below checks that each argument reaches the function.
LOSS_ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01, "shift": 1, "ignore_index": 3},
    {"reduction": "none", "softcap": 4.0, "logit_scale": 0.5, "temperature": 1.5, "stats": STATS},
]


def check_module(module: nn.Module, arguments: tuple[Tensor | None, ...], more: dict[str, Any], expected: Any) -> None:
    """Check that a module, and copies of it, return the result of the function."""
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        got = each(*arguments, **more)
        assert type(got) is type(expected)
        for a, e in zip(*((x,) if isinstance(x, Tensor) else x for x in (got, expected)), strict=True):
            assert (a is e is None) or torch.equal(a, e)


def arguments_of_calls(p: Problem, reduction: str) -> dict[str, Any]:
    """Return the arguments that are given in each call."""
    return {"token_weight": p.kwargs["token_weight"], "num_items": torch.tensor(9) if reduction == "sum" else None}


@pytest.mark.parametrize("kwargs", LOSS_ARGUMENTS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_modules_with_a_head(kwargs: dict[str, Any], bias: bool, torch_backend: str, device: torch.device) -> None:
    p = make_problem((3, 5), 8, 30, dtype=torch.float32, device=device, token_weight=True, adapter_ranks=(2, 3))
    weight = torch.rand(30, device=device) if bias else None
    owner = flce.LinearCrossEntropyLoss(8, 30, bias, weight=weight, device=device, **kwargs)
    w, b = owner.linear.weight, owner.linear.bias
    assert (b is not None) == bias
    more = {**arguments_of_calls(p, owner.reduction), "adapters": p.adapters}
    expected = flce.fused_linear_cross_entropy(p.input, w, p.target, linear_bias=b, weight=weight, **more, **kwargs)
    check_module(owner, (p.input, p.target), more, expected)
    stateless = flce.FusedLinearCrossEntropyLoss(weight=weight, **kwargs)
    check_module(stateless, (p.input, w, p.target, b), more, expected)


# A value that differs from the default, for each argument that a module fixes.
OTHER_ARGUMENTS: dict[str, Any] = {
    **OTHER_VALUES,
    "weight": torch.ones(30),
    "reduction": "sum",
    "ignore_index": 3,
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
    """Each argument, including the arguments of `forward`, reaches the function: none keeps its default."""
    seen: dict[str, Any] = {}
    function = getattr(flce, name)
    arguments = inspect.signature(function).parameters
    shown = inspect.signature(module).parameters
    fixed = arguments.keys() & OTHER_ARGUMENTS.keys()
    of_forward = dict.fromkeys({"adapters", "token_weight", "num_items"} & arguments.keys(), 7)
    monkeypatch.setattr(modules, name, functools.wraps(function)(lambda *args, **kwargs: seen.update(kwargs)))
    for given in fixed:
        module(*made_with, **{given: OTHER_ARGUMENTS[given]})(*[torch.zeros(())] * called_with, **of_forward)
        for argument in fixed:
            want = OTHER_ARGUMENTS[argument] if argument == given else arguments[argument].default
            assert seen[argument] is want or seen[argument] == want
            assert shown[argument].default == arguments[argument].default
        assert {argument: seen[argument] for argument in of_forward} == of_forward
    assert seen.keys() | {"input", "linear_weight", "logits", "target"} >= arguments.keys()
    with pytest.raises(TypeError, match="smoothing"):
        module(*made_with, smoothing=0.1)


@pytest.mark.parametrize("kwargs", LOSS_ARGUMENTS, ids=str)
@pytest.mark.parametrize("class_weight", [False, True])
def test_module_of_logits(kwargs: dict[str, Any], class_weight: bool, torch_backend: str, device: torch.device) -> None:
    p = make_problem((3, 5), None, 30, dtype=torch.float32, device=device, token_weight=True)
    weight = torch.rand(30, device=device) if class_weight else None
    module = flce.CrossEntropyLoss(weight, **kwargs)
    more = arguments_of_calls(p, module.reduction)
    check_module(module, (p.input, p.target), more, flce.cross_entropy(p.input, p.target, weight, **more, **kwargs))
    torch.nn.CrossEntropyLoss(weight).load_state_dict(module.state_dict())


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
        flce.CrossEntropyLoss(weight),
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


def test_repr_says_what_differs() -> None:
    text = repr(flce.LinearCrossEntropyLoss(8, 30, softcap=5.0, reduction="sum", label_smoothing=0.25))
    for part in ("in_features=8", "30", "5.0", "sum", "0.25"):
        assert part in text
    assert "temperature" in repr(flce.FusedLinearCrossEntropyLoss(temperature=2.0))
    for part in ("shift=2", "weight=False", "inplace=True"):
        assert part in repr(flce.CrossEntropyLoss(shift=2, inplace=True))
