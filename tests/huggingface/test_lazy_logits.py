"""Lazy logits against the real ones: operation by operation, in eager mode and as plain objects."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flce.huggingface import LazyLogits, MaterializedLogitsError, MaterializedLogitsWarning
from flce.huggingface.head_call import HeadCall, add_hook
from flce.huggingface.lazy import TracedLazyLogits, is_lazy, make_lazy
from flce.huggingface.lazy.fold import Folded, fold
from flce.huggingface.lazy.state import LazyState, Settings, head_state
from flce.huggingface.usage import Usage

B, T, H, V = 2, 5, 8, 11
BIAS = torch.linspace(-1, 2, V, dtype=torch.float64)


class Pair:
    """The same logits twice: from stock's linear layer, and lazy, on separate leaves."""

    def __init__(self, kind: str = "tensor", dtype: torch.dtype = torch.float64, bias: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = [(B, T, H), (V, H)] + ([(V,)] if bias else [])
        values = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
        self.stock_leaves = [v.clone().requires_grad_() for v in values]
        self.lazy_leaves = [v.clone().requires_grad_() for v in values]
        self.stock = F.linear(*self.stock_leaves)
        hidden, weight, *rest = self.lazy_leaves
        bias_leaf = rest[0] if rest else None
        call = HeadCall(weight, bias_leaf, Usage(), None, None)
        state = head_state(hidden, weight, bias_leaf, call=call)
        shadow = torch.empty(state.shape, dtype=state.dtype, device="meta")
        self.lazy: Any = TracedLazyLogits._wrap(state, None, shadow) if kind == "plain" else make_lazy(state)
        self.target = torch.randint(V, (B, T), generator=generator)

    def check_gradients(self, stock: Tensor, lazy: Tensor, **tolerance: Any) -> None:
        assert stock.requires_grad == lazy.requires_grad
        if not stock.requires_grad:
            return
        stock.sum().backward()
        lazy.sum().backward()
        for want, got in zip(self.stock_leaves, self.lazy_leaves, strict=True):
            torch.testing.assert_close(got.grad, want.grad, **tolerance)


@pytest.fixture(params=["tensor", "plain"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


# ------------------------------------------------------------------------------------- stays lazy

STAYS_LAZY: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: x.float(),
    "to dtype": lambda x: x.to(torch.float32),
    "to keyword": lambda x: x.to(dtype=torch.bfloat16),
    "to copy": lambda x: x.to(copy=True, dtype=torch.float32, device=x.device),
    "to device": lambda x: x.to("cpu"),
    "to device, dtype": lambda x: x.to(torch.device("cpu"), torch.float32),
    "to other": lambda x: x.to(torch.ones(1, dtype=torch.float32)),
    "type_as": lambda x: x.type_as(torch.ones(1, dtype=torch.float32)),
    "half": lambda x: x.half(),
    "mul": lambda x: x * 3,
    "rmul": lambda x: 0.25 * x,
    "torch.mul": lambda x: torch.mul(x, 2.0),
    "div": lambda x: x / 7.0,
    "torch.div": lambda x: torch.div(x, 7),
    "neg": lambda x: -x,
    "tensor factor": lambda x: torch.tensor(1.5, dtype=torch.float64) * x,
    "add": lambda x: x + BIAS,
    "add scaled": lambda x: torch.add(x / 7.0, BIAS.view(1, 1, V)),
    "radd": lambda x: BIAS.view(1, V) + x,
    "radd float": lambda x: BIAS.float() + x,
    "add wider": lambda x: x.float() + BIAS,
    "sub": lambda x: (-2.0 * x - BIAS)[..., 2:9],
    "softcap": lambda x: 3.0 * torch.tanh(x / 3.0),
    "log_softmax": lambda x: x.float().log_softmax(-1),
    "F.log_softmax": lambda x: F.log_softmax(3.0 * torch.tanh(x / 3.0), dim=-1, dtype=torch.float32)[:, 1:].half(),
    "torch.log_softmax": lambda x: torch.log_softmax(x.transpose(0, 2), 0).log_softmax(0),
    "scaled log_softmax": lambda x: x.log_softmax(-1) * 2,
    "negative log_softmax": lambda x: -F.log_softmax(x, dim=-1),
    "add self": lambda x: x + x,
    "add and subtract scaled": lambda x: (x * 0.5).float() + x[...] - x / 3,
    "cat": lambda x: torch.cat([x, x], dim=1),
    "cat of classes": lambda x: torch.cat((x[..., :4], x), dim=-1),
    "masked_fill": lambda x: x.masked_fill(torch.arange(V) > 8, -1e9),
    "masked_fill of a cast": lambda x: x.float().masked_fill((torch.arange(V) % 3 == 0)[None], -math.inf),
    "softcap method": lambda x: (x / 3.0).tanh() * -3.0 / 2.0,
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "view": lambda x: x.view(-1, V),
    "view -1 last": lambda x: x.view(B * T, -1),
    "view size": lambda x: x.view(torch.Size([T, B, V])),
    "reshape": lambda x: x.reshape(1, B, T, V),
    "torch.reshape": lambda x: torch.reshape(x, (-1, V)),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten negative": lambda x: x.flatten(0, -2),
    "transpose": lambda x: x.transpose(1, 2),
    "mT": lambda x: x.mT,
    "transpose twice": lambda x: x.transpose(0, 1).transpose(-1, 0).transpose(0, -1),
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: torch.movedim(x, -1, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "shift": lambda x: x[..., :-1, :],
    "middle": lambda x: x[:, 1:4, :],
    "every second": lambda x: x[:, ::2],
    "last tokens": lambda x: x[:, -2:],
    "one row": lambda x: x[0],
    "one token": lambda x: x[:, -1],
    "negative": lambda x: x[-1, 2:],
    "new axis": lambda x: x[:, None],
    "ellipsis": lambda x: x[...],
    "vocabulary": lambda x: x[..., :7],
    "vocabulary and tokens": lambda x: x[:, 1:, 2:9],
    "mask": lambda x: x[torch.arange(B * T).view(B, T) % 3 != 0],
    "mask rows": lambda x: x[torch.tensor([True, False])],
    "indices": lambda x: x[:, torch.tensor([3, 0, 3])],
    "index pairs": lambda x: x[torch.tensor([0, 1, 1]), torch.tensor([4, 2, 2])],
    "select": lambda x: x.select(1, -1),
    "narrow": lambda x: x.narrow(1, 1, 3),
    "narrow vocabulary": lambda x: torch.narrow(x, -1, 0, 6),
    "index_select": lambda x: x.index_select(1, torch.tensor([1, 1])),
    "chain": lambda x: (x[:, :-1, :10].float() / 2.0).contiguous().view(-1, 10),
}


@pytest.mark.parametrize("name", STAYS_LAZY)
@pytest.mark.usefixtures("nothing_materialises")
def test_stays_lazy(name: str, pair: Pair) -> None:
    stock, lazy = STAYS_LAZY[name](pair.stock), STAYS_LAZY[name](pair.lazy)
    assert is_lazy(lazy)
    assert not lazy.is_materialized
    assert lazy.shape == stock.shape
    assert lazy.dtype == stock.dtype
    assert lazy.device == stock.device
    assert lazy.requires_grad == stock.requires_grad
    real = lazy.materialize()
    assert type(real) is Tensor
    assert lazy.materialize() is real
    tolerance: dict[str, Any] = (
        {"rtol": 0.02, "atol": 0.02} if stock.dtype.itemsize == 2 else {"rtol": 1e-6, "atol": 1e-6}
    )
    torch.testing.assert_close(real, stock, **tolerance)
    pair.check_gradients(stock, real, **tolerance)


# ------------------------------------------------------------------------------ values made from logits

PICK = torch.arange(B * T).view(B, T, 1) * 3 % V

VALUES: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "argmax keepdim": lambda x: torch.argmax(x / 2, dim=2, keepdim=True),
    "argmax, class second": lambda x: x.transpose(1, 2).argmax(1),
    "argmax of log_softmax": lambda x: x.log_softmax(-1).argmax(-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "logsumexp keepdim": lambda x: (x * 3).float().logsumexp(dim=-1, keepdim=True),
    "logsumexp, class second": lambda x: torch.tanh(x.transpose(1, 2)).logsumexp(1),
    "logsumexp one by one": lambda x: torch.stack([torch.logsumexp(row, dim=-1) for row in x]),
    "gather": lambda x: x.gather(-1, PICK),
    "gather, class second": lambda x: torch.gather(torch.tanh(x).transpose(1, 2), 1, PICK.transpose(1, 2)),
    "gather of log_softmax": lambda x: x.log_softmax(-1).gather(dim=-1, index=PICK).squeeze(-1),
    "gather of negative log_softmax": lambda x: (-F.log_softmax(x, dim=-1)).gather(-1, PICK),
    "take_along_dim": lambda x: torch.take_along_dim(x.log_softmax(-1), PICK, -1),
    "take_along_dim, class second": lambda x: x.mT.tanh().take_along_dim(indices=PICK.mT, dim=1),
    "take_along_dim, the same for all": lambda x: x.take_along_dim(PICK[:1, :1], 2),
    "sum of log_softmax": lambda x: (-F.log_softmax(x, dim=-1)).sum(dim=-1, keepdim=True, dtype=torch.float32),
    "log-probability by hand": lambda x: x.gather(-1, PICK)[..., 0] - x.logsumexp(-1),
    "few classes": lambda x: x[..., [7, -2]],
    "few classes, sliced tokens": lambda x: (x * 2)[:, -1, torch.tensor([3, 3, 0], dtype=torch.int32)],
    "few classes, index of two dimensions": lambda x: x[1, :, torch.tensor([[1], [4]])],
    "few classes, class second": lambda x: torch.tanh(x.transpose(1, 2))[:, [2, 1], 1:],
    "few classes, new axes": lambda x: x[:, None, ..., [2, 1], None],
    "no classes": lambda x: x[..., []],
    "few classes of log_softmax": lambda x: (x.log_softmax(-1) * -2)[..., [7, 2]],
    "few classes of log_softmax twice": lambda x: x.transpose(1, 2).log_softmax(1).log_softmax(1)[:, [7, 2]],
    "one class of some tokens": lambda x: x[torch.arange(B * T).view(B, T) % 3 != 0, 5],
    "one class of one token": lambda x: x[torch.tensor([1]), 2, 5].squeeze(0),
    "a class for each token, as a column": lambda x: x[torch.tensor([1, 0]), torch.tensor([4, 2]), -1],
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.usefixtures("nothing_materialises")
def test_values(name: str, grad: bool, pair: Pair) -> None:
    with torch.set_grad_enabled(grad):
        stock, lazy = VALUES[name](pair.stock), VALUES[name](pair.lazy)
    assert not pair.lazy.is_materialized
    assert type(lazy) is Tensor
    torch.testing.assert_close(lazy, stock)
    pair.check_gradients(stock, lazy, rtol=1e-5, atol=1e-5)  # some are made in float32


def test_values_of_a_sum_of_terms(fused_calls: list[dict[str, Any]]) -> None:
    """A head with an adapter, whose product is scaled."""
    results: list[list[Tensor]] = []
    for lazy in (False, True):
        generator = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
            for shape in ((B, T, H), (V, H), (V,), (B, T, 3), (V, 3))
        ]
        hidden, weight, bias, low, up = leaves
        if lazy:
            head: Any = make_lazy(head_state(hidden, weight, bias))
            adapter: Any = make_lazy(head_state(low, up, None))
            x: Any = head + adapter * 0.7
        else:
            x = F.linear(hidden, weight, bias) + F.linear(low, up) * 0.7
        losses = [function(x).sum() for name, function in VALUES.items() if "argmax" not in name]
        losses += [F.cross_entropy((x / 2)[:, 1:].flatten(0, 1), PICK[:, 1:].flatten())]
        torch.stack([loss.double() for loss in losses]).sum().backward()
        results.append([*losses, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert fused_calls
    assert all(len(call["adapters"]) == 1 for call in fused_calls)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)  # some are made in float32


@pytest.mark.parametrize("shape", [(-2, -2, V), (-1, -1, V), (0, V), (5, V), (2, -3, V)], ids=str)
def test_shapes_that_do_not_fit_are_errors_of_torch(shape: tuple[int, ...]) -> None:
    pair = Pair()
    with pytest.raises(RuntimeError) as expected:
        pair.stock.reshape(shape)
    with pytest.raises(RuntimeError) as raised:
        pair.lazy.reshape(shape)
    assert str(raised.value) == str(expected.value)


def test_gather_leaves_errors_to_torch() -> None:
    for index in (PICK - 100, PICK + V):
        with pytest.raises((IndexError, RuntimeError)):
            Pair().lazy.log_softmax(-1).gather(-1, index)


def _wide(lazy: bool, dtype: torch.dtype = torch.float64) -> tuple[Any, list[Tensor]]:
    """Logits of 40 classes, by a head with a bias, an adapter and a vector, of hidden states of 3; and their leaves."""
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for shape in ((B, T, 3), (40, 3), (40,), (B, T, 2), (40, 2), (40,))
    ]
    hidden, weight, bias, low, up, more = leaves
    head: Any = make_lazy(head_state(hidden, weight, bias)) if lazy else F.linear(hidden, weight, bias)
    adapter: Any = make_lazy(head_state(low, up, None)) if lazy else F.linear(low, up)
    return head * 0.9 + adapter * 0.7 + more, leaves


FEW = torch.arange(B * T * 4).view(B, T, 4) * 7 % 40
FEW_OF_EACH: dict[str, Callable[[Any], Any]] = {
    "logits": lambda x: x.gather(-1, FEW),
    "softcap, class second": lambda x: torch.tanh(x / 3.0).transpose(1, 2).gather(1, FEW.transpose(1, 2)),
    "log_softmax": lambda x: (-x[:, 1:].log_softmax(-1)).gather(-1, FEW[:, 1:]),
    "none": lambda x: x.gather(-1, FEW[..., :0]),
    "the same for all": lambda x: (x / 2.0).log_softmax(-1)[..., FEW[0, 0]],
}


@pytest.mark.parametrize("name", FEW_OF_EACH)
@pytest.mark.usefixtures("nothing_materialises")
def test_few_classes_of_a_sum_of_terms(name: str) -> None:
    (x, stock_leaves), (y, lazy_leaves) = _wide(lazy=False), _wide(lazy=True)
    stock, lazy = FEW_OF_EACH[name](x), FEW_OF_EACH[name](y)
    assert type(lazy) is Tensor
    torch.testing.assert_close(lazy, stock)
    upstream = torch.randn(stock.shape, dtype=stock.dtype)
    wanted = torch.autograd.grad(stock, stock_leaves, upstream)
    torch.testing.assert_close(torch.autograd.grad(lazy, lazy_leaves, upstream), wanted)


@pytest.mark.usefixtures("nothing_materialises")
def test_few_classes_under_autocast() -> None:
    """The head's autocast, which has been left since."""
    results = []
    for lazy in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, _ = _wide(lazy, torch.float32)
        results.append([logits[..., [1, 5]], logits.gather(-1, FEW), logits.float().log_softmax(-1)[..., [1, 5]]])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_many_classes_take_all_logits() -> None:
    """From where all of them cost no more; and indices that PyTorch rejects are rejected by it."""
    for function in (
        lambda x: x[..., list(range(4))],
        lambda x: x.index_select(-1, torch.arange(V)),
        lambda x: torch.take_along_dim(x, PICK),
        lambda x: x.take_along_dim(PICK % T, 1),
        lambda x: x.gather(-1, PICK.repeat(1, 1, 2)),  # two copies of 8 elements for each token's 11 logits
        lambda x: x[torch.arange(B), torch.tensor([0, 1]), torch.tensor([3, 4])],
    ):
        pair = Pair()
        with pytest.warns(MaterializedLogitsWarning):
            lazy = function(pair.lazy)
        assert torch.equal(lazy, function(pair.stock))
    for function in (lambda x: x[..., [V]], lambda x: x[..., [0, -V - 1]], lambda x: x[..., V]):
        for x in (pair.stock, pair.lazy):
            with pytest.raises(IndexError):
                function(x)


ONE_CLASS: dict[str, Callable[[Any], Any]] = {
    "int": lambda x: x[..., 5],
    "negative": lambda x: (x * 2).float()[:, -1, -2],
    "tensor": lambda x: x[..., torch.tensor(5)],
    "class second": lambda x: torch.tanh(x).transpose(1, 2)[:, 5, 1:],
    "select": lambda x: x[:1].select(-1, 5),
    "one logit": lambda x: x[0, 0, 5],
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ONE_CLASS)
@pytest.mark.usefixtures("nothing_materialises")
def test_one_class(name: str, grad: bool, pair: Pair) -> None:
    with torch.set_grad_enabled(grad):
        stock, lazy = ONE_CLASS[name](pair.stock), ONE_CLASS[name](pair.lazy)
        assert not pair.lazy.is_materialized
        assert lazy.shape == stock.shape
        torch.testing.assert_close(lazy + 0, stock + 0)
        assert repr(lazy).startswith("tensor(")  # values, as there are some
        pair.check_gradients(stock * 2, lazy * 2)
        with torch.no_grad():
            pair.lazy_leaves[1].mul_(3)  # an optimizer step: the values were there before
        torch.testing.assert_close(lazy + 0, stock + 0)


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize("name", ONE_CLASS)
def test_one_class_is_a_view(name: str) -> None:
    """Of which a cast or product is none."""
    with torch.no_grad():
        pair = Pair()
        for x in (pair.stock, pair.lazy):
            ONE_CLASS[name](x).fill_(-7.0)
        assert torch.equal(pair.lazy + 0, pair.stock)
        pair = Pair()
        for x in (pair.stock, pair.lazy):
            x[..., 5] -= 1
        assert torch.equal(pair.lazy + 0, pair.stock)


def test_few_classes_of_changed_weights_are_an_error() -> None:
    for function in (lambda x: x[..., [1, 2]], lambda x: x[..., 1]):
        pair = Pair()
        with torch.no_grad():
            pair.lazy_leaves[1].mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            function(pair.lazy)


def test_wrappers_hooks_fire_for_few_classes() -> None:
    for function in (lambda x: x[..., [1, 2]], lambda x: x[..., 1], lambda x: x.log_softmax(-1)[..., [1, 2]]):
        pair = Pair()
        seen: list[Tensor] = []
        add_hook(seen.append, pair.lazy._state.calls)
        function(pair.lazy).sum().backward()
        assert len(seen) == 1


@pytest.mark.usefixtures("nothing_materialises")
def test_stacks(pair: Pair) -> None:
    """As models with several heads make them."""

    def stack(x: Any) -> Any:
        return torch.stack([x, x * 2, -x], dim=1)

    for function in (
        lambda x: x,
        lambda x: x[:, :, -3:],
        lambda x: x[:, 1],
        lambda x: x[:, 1:].float()[:, 0].contiguous().view(-1, V),
        lambda x: x.unbind(1)[2],
        lambda x: x.select(1, -1).detach(),
        lambda x: x.reshape(-1, *x.shape[2:]),
        lambda x: x.view(3 * B, T, V),
    ):
        want, got = function(stack(pair.stock)), function(stack(pair.lazy))
        assert is_lazy(got)
        assert (got.shape, got.dtype, got.requires_grad) == (want.shape, want.dtype, want.requires_grad)
        torch.testing.assert_close(got.materialize(), want)
    stock, lazy = stack(pair.stock), stack(pair.lazy)
    with pytest.raises(MaterializedLogitsWarning):
        lazy.sum()
    pair.check_gradients(stock, lazy.materialize())


def test_pieces_stay_lazy(pair: Pair) -> None:
    functions: list[Callable[[Any], Any]] = [
        lambda x: x.split(2, dim=1),
        lambda x: torch.split(x, [1, 4], dim=1),
        lambda x: x.chunk(2, 1),
        lambda x: x.unbind(1),
        lambda x: tuple(iter(x)),
    ]
    pieces = [function(pair.lazy) for function in functions]
    for function, lazy in zip(functions, pieces, strict=True):
        stock = function(pair.stock)
        assert len(stock) == len(lazy)
        assert not any(is_lazy(got) and got.is_materialized for got in lazy)
        for want, got in zip(stock, lazy, strict=True):
            torch.testing.assert_close(got.clone().materialize(), want)
    pair.lazy.materialize()  # of which they then are views
    for function, lazy in zip(functions, pieces, strict=True):
        for want, got in zip(function(pair.stock), lazy, strict=True):
            torch.testing.assert_close(got.materialize(), want)


def test_elementwise_operations_are_replayed_bit_for_bit() -> None:
    pair = Pair(dtype=torch.bfloat16)

    def function(x: Any) -> Any:
        return torch.tanh(x / 3.0).float() * 3.0

    assert torch.equal(function(pair.lazy).materialize(), function(pair.stock))


@pytest.mark.usefixtures("nothing_materialises")
def test_metadata() -> None:
    pair = Pair()
    stock, lazy = pair.stock, pair.lazy
    assert isinstance(lazy, Tensor)
    assert torch.is_tensor(lazy)
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "is_leaf",
        "is_cuda",
        "layout",
        "nbytes",
    ):
        assert getattr(lazy, name) == getattr(stock, name), name
    for call in (
        lambda x: x.size(),
        lambda x: x.size(-1),
        lambda x: x.dim(),
        lambda x: x.numel(),
        lambda x: x.stride(),
        lambda x: x.is_floating_point(),
        lambda x: x.element_size(),
        lambda x: torch.numel(x),
        len,
    ):
        assert call(lazy) == call(stock)
    assert hash(lazy) == hash(lazy)
    assert "LazyLogits" in repr(lazy)
    assert "shape=(2, 5, 11)" in str(lazy)
    for function in (
        torch.zeros_like,
        torch.ones_like,
        lambda x: x.new_zeros(2),
        lambda x: x.new_full((1,), 2.0),
    ):
        torch.testing.assert_close(function(lazy), function(stock))
    assert torch.ones(1).to(lazy).dtype == stock.dtype
    assert torch.ones(1).expand_as(lazy).shape == stock.shape


def test_plain_metadata() -> None:
    pair = Pair("plain")
    stock, lazy = pair.stock, pair.lazy
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.ndim) == (stock.shape, stock.dtype, stock.device, 3)
    assert (lazy.size(), lazy.size(1), lazy.dim(), lazy.numel(), len(lazy)) == ((B, T, V), T, 3, B * T * V, B)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = lazy.no_such_thing


# --------------------------------------------------------------------------------------- the loss

WEIGHT = torch.linspace(0.5, 1.5, V, dtype=torch.float64)

LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flat": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1)),
    "keyword": lambda x, y: F.cross_entropy(input=x.view(-1, V), target=y.view(-1)),
    "module": lambda x, y: torch.nn.CrossEntropyLoss()(x.view(-1, V), y.view(-1)),
    "class second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "one token": lambda x, y: F.cross_entropy(x[0, 0], y[0, 0]),
    "shifted": lambda x, y: F.cross_entropy(x[..., :-1, :].reshape(-1, V), y[..., 1:].reshape(-1)),
    "ignore": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1).where(y.view(-1) > 3, -100)),
    "ignore_index": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1), ignore_index=int(y[0, 0])),
    "sum": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1), reduction="sum"),
    "none": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none") * torch.arange(T),
    "legacy": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1), None, False),
    "weight": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1), WEIGHT),
    "smoothing": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1), weight=WEIGHT, label_smoothing=0.2),
    "padded vocabulary": lambda x, y: F.cross_entropy(x[..., :9].reshape(-1, 9), y.view(-1) % 9),
    "scaled": lambda x, y: F.cross_entropy((x * 0.5 / 3).view(-1, V), y.view(-1)),
    "softcap": lambda x, y: F.cross_entropy((torch.tanh(x / 2.0) * 2.0).view(-1, V), y.view(-1)),
    "softcap with temperature": lambda x, y: F.cross_entropy(
        (torch.tanh(0.7 * x / 2.0) * -2.0 / 0.3).view(-1, V), y.view(-1)
    ),
    "masked": lambda x, y: F.cross_entropy(x[y > 3], y[y > 3]),
    "all ignored": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1) * 0 - 100, reduction="sum"),
    "in pieces": lambda x, y: torch.stack(
        [
            F.cross_entropy(a, b, reduction="sum")
            for a, b in zip(x.flatten(0, 1).split(3), y.flatten().split(3), strict=True)
        ]
    ).sum(),
    "tensor factor": lambda x, y: F.cross_entropy((x * torch.tensor(1.7)).view(-1, V), y.view(-1)),
    "added bias": lambda x, y: F.cross_entropy((x * 0.3 + BIAS).view(-1, V), y.view(-1)),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(-1).view(-1, V), y.view(-1)),
    "nll with arguments": lambda x, y: F.nll_loss(
        F.log_softmax(x.view(-1, V) / 2, -1), y.view(-1), weight=WEIGHT, ignore_index=int(y[0, 0]), reduction="sum"
    ),
    "nll, class second": lambda x, y: torch.nn.NLLLoss(reduction="none")(x.transpose(1, 2).log_softmax(1), y),
    "log-probabilities": lambda x, y: F.cross_entropy(x.log_softmax(-1).view(-1, V), y.view(-1), label_smoothing=0.1),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("nothing_materialises")
def test_loss(name: str, pair: Pair, fused_calls: list[dict[str, Any]]) -> None:
    stock, lazy = LOSSES[name](pair.stock, pair.target), LOSSES[name](pair.lazy, pair.target)
    assert fused_calls
    assert not pair.lazy.is_materialized
    assert lazy.dtype == stock.dtype
    torch.testing.assert_close(lazy, stock)
    pair.check_gradients(stock, lazy)


def test_an_added_bias_gets_its_gradient(pair: Pair, fused_calls: list[dict[str, Any]]) -> None:
    biases = [BIAS.clone().requires_grad_() for _ in range(2)]
    losses = [
        F.cross_entropy((x / 3 - bias).view(-1, V), pair.target.view(-1))
        for x, bias in zip((pair.stock, pair.lazy), biases, strict=True)
    ]
    assert fused_calls
    pair.check_gradients(*losses)
    torch.testing.assert_close(biases[1].grad, biases[0].grad)


def test_log_softmax_under_autocast() -> None:
    results = []
    for lazy in (False, True):
        torch.manual_seed(0)
        hidden, head = torch.randn(6, H, requires_grad=True), torch.nn.Linear(H, V)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits: Any = make_lazy(head_state(hidden, head.weight, head.bias)) if lazy else head(hidden)
            results.append(logits.log_softmax(-1))
    assert results[1].dtype == results[0].dtype
    torch.testing.assert_close(results[1].materialize(), results[0])


def test_options_reach_the_operator(fused_calls: list[dict[str, Any]]) -> None:
    pair = Pair()
    options: Any = object()
    hidden, weight, bias = pair.lazy_leaves
    lazy: Any = make_lazy(head_state(hidden, weight, bias, Settings(options)))
    with pytest.raises(TypeError):  # an error of the operator is not taken for a reason to materialise
        F.cross_entropy(lazy.view(-1, V), pair.target.view(-1))
    assert fused_calls[0]["options"] is options


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loss_dtype_is_that_of_stock(dtype: torch.dtype) -> None:
    pair = Pair(dtype=dtype)
    for cast in (lambda x: x, lambda x: x.float(), lambda x: x.double()):
        stock, lazy = (F.cross_entropy(cast(x).view(-1, V), pair.target.view(-1)) for x in (pair.stock, pair.lazy))
        assert lazy.dtype == stock.dtype
        torch.testing.assert_close(lazy, stock, rtol=2e-2, atol=2e-2, check_dtype=True)


@pytest.mark.parametrize("loss_inside", [True, False])
def test_autocast(loss_inside: bool) -> None:
    results = []
    for lazy in (False, True):
        torch.manual_seed(0)
        hidden, head = torch.randn(6, H, requires_grad=True), torch.nn.Linear(H, V)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits: Any = make_lazy(head_state(hidden, head.weight, head.bias)) if lazy else head(hidden)
            if loss_inside:
                loss = F.cross_entropy(logits, torch.arange(6))
        if not loss_inside:
            loss = F.cross_entropy(logits, torch.arange(6))
        loss.backward()
        assert logits.dtype == torch.bfloat16
        results.append((loss, hidden.grad, head.weight.grad, head.bias.grad))
    for stock, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, stock, rtol=3e-2, atol=3e-3)


def test_what_stock_rejects_is_rejected() -> None:
    pair = Pair()
    with pytest.warns(MaterializedLogitsWarning), pytest.raises((ValueError, RuntimeError)):
        F.cross_entropy(pair.lazy.view(-1, V), pair.target)
    with pytest.raises(IndexError):
        F.cross_entropy(Pair().lazy.view(-1, V), pair.target.view(-1) + V)
    with pytest.raises(IndexError):
        Pair().lazy.transpose(0, 7)


# ---------------------------------------------------------------------------------- anything else

BECOMES_REAL: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax over tokens": lambda x: F.log_softmax(x, dim=0),
    "shifted log_softmax": lambda x: x.log_softmax(-1) + BIAS,
    "log_softmax by a tensor": lambda x: x.log_softmax(-1) * torch.tensor(2.0),
    "part of log_softmax": lambda x: x.log_softmax(-1)[..., :4],
    "tanh of log_softmax": lambda x: x.log_softmax(-1).tanh(),
    "nll of logits": lambda x: F.nll_loss(x.view(-1, V), torch.zeros(B * T, dtype=torch.int64)),
    "add, then more": lambda x: (x * 0.5 + x) * 2.0 + BIAS,
    "masked_fill of a scaled": lambda x: (x / 4).masked_fill((torch.arange(V) % 3 == 0)[None], -math.inf),
    "topk": lambda x: x.topk(3).values,
    "max": lambda x: x.max(dim=-1),
    "add": lambda x: x + 1,
    "add with a factor": lambda x: torch.add(x, BIAS, alpha=2),
    "radd with a factor": lambda x: torch.add(BIAS, x, alpha=2),
    "add after tanh": lambda x: x.tanh() + BIAS,
    "add per token": lambda x: x + torch.arange(T, dtype=x.dtype)[:, None],
    "add another dimension": lambda x: x + BIAS.view(1, 1, 1, V),
    "add a number of no dimension": lambda x: x + torch.tensor(2.0),
    "add integers": lambda x: x + torch.arange(V),
    "sub from": lambda x: BIAS - x,
    "radd": lambda x: 1 + x,
    "sub": lambda x: x - x.mean(),
    "rsub": lambda x: 1 - x,
    "rdiv": lambda x: 1 / x,
    "pow": lambda x: x**2,
    "mul tensor": lambda x: x * torch.arange(V),
    "second argument": lambda x: torch.arange(V) - x,
    "mul int tensor": lambda x: x * torch.tensor(2),
    "two softcaps": lambda x: torch.tanh(torch.tanh(x)),
    "divide by zero": lambda x: x / 0,
    "rounding mode": lambda x: torch.div(x, 0.5, rounding_mode="floor"),
    "sin": torch.sin,
    "compare": lambda x: x > 0,
    "equal": lambda x: x == x,
    "where": lambda x: torch.where(torch.ones(V, dtype=torch.bool), 0.0, x),
    "stack": lambda x: torch.stack([x, torch.zeros(B, T, V, dtype=x.dtype)]),
    "matmul": lambda x: x @ torch.ones(V, 2, dtype=x.dtype),
    "long": lambda x: x.long(),
    "class list": lambda x: x[..., [1, 2]],
    "view across": lambda x: x.view(-1),
    "view mixed": lambda x: x.view(B, T * V),
    "flatten all": lambda x: x.flatten(),
    "T": lambda x: x[0].T,
    "expand": lambda x: x.unsqueeze(0).expand(3, B, T, V),
    "mean": lambda x: x.mean(),
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "nan": lambda x: torch.isnan(x).any(),
    "einsum": lambda x: torch.einsum("btv,btv->bt", x, x),
    "kl": lambda x: F.kl_div(x.log_softmax(-1), x.softmax(-1)),
    "cosine": lambda x: F.cosine_similarity(x, x.roll(1, 0), dim=-1),
    "embedding bag": lambda x: F.pad(x, (0, 1)),
    "cross entropy with probabilities": lambda x: F.cross_entropy(
        x.transpose(1, 2), F.one_hot(PICK[..., 0], V).double().transpose(1, 2)
    ),
    "cross entropy over tokens": lambda x: F.cross_entropy(x, torch.zeros(B, V, dtype=torch.int64)),
    "format": lambda x: f"{x[0, 0].sum():.6f}",
    "comparison in python": lambda x: bool((x[0, 0].abs() >= 0).all()),
}


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.filterwarnings("ignore:.*reduction. 'mean'.*")
@pytest.mark.parametrize("name", BECOMES_REAL)
def test_becomes_real(name: str, pair: Pair) -> None:
    stock, lazy = BECOMES_REAL[name](pair.stock), BECOMES_REAL[name](pair.lazy)
    assert not is_lazy(lazy)
    if isinstance(stock, str):
        assert lazy == stock
        return
    torch.testing.assert_close(lazy, stock)
    if isinstance(stock, Tensor) and stock.requires_grad and torch.isfinite(stock).all():
        pair.check_gradients(stock, lazy)


def test_one_warning_names_operation_and_line() -> None:
    pair = Pair()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        pair.lazy.softmax(-1)
        F.softmax(pair.lazy, -1)
        pair.lazy.view(-1, V).sum()
    (warning,) = [w for w in caught if w.category is MaterializedLogitsWarning]
    assert "torch.Tensor.softmax" in str(warning.message)
    assert f"{__file__}:{line}" in str(warning.message)
    assert (warning.filename, warning.lineno) == (__file__, line)
    for call, name in (
        (lambda x: F.softmax(x, -1), "torch.nn.functional.softmax"),
        (lambda x: x.mH, "torch.Tensor.mH"),
        (lambda x: torch.sin(x), "torch.sin"),
    ):
        with pytest.warns(MaterializedLogitsWarning, match=name.replace(".", r"\.")):
            call(Pair().lazy)


def test_a_training_loop_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            Pair().lazy.softmax(-1)
    assert len([w for w in caught if w.category is MaterializedLogitsWarning]) == 1


@pytest.mark.usefixtures("nothing_materialises")
def test_materialize_does_not_warn() -> None:
    pair = Pair()
    real = pair.lazy.materialize()
    assert pair.lazy.softmax(-1).shape == real.shape  # already real: nothing to warn of


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_real_logits_have_a_graph_even_when_first_read_without_gradients() -> None:
    pair = Pair()
    with torch.no_grad():
        assert not pair.lazy.softmax(-1).requires_grad
    loss = F.cross_entropy(pair.lazy.view(-1, V), pair.target.view(-1))
    pair.check_gradients(F.cross_entropy(pair.stock.view(-1, V), pair.target.view(-1)), loss)


def test_no_graph_under_no_grad() -> None:
    pair = Pair()
    with torch.no_grad():
        view = pair.lazy.view(-1, V)
        loss = F.cross_entropy(pair.lazy.view(-1, V), pair.target.view(-1))
    assert not loss.requires_grad
    assert not view.requires_grad
    assert view.materialize().grad_fn is None  # as stock's
    assert not Pair().lazy.detach().materialize().requires_grad
    with torch.inference_mode():
        hidden, weight = torch.randn(3, H), torch.randn(V, H)
        lazy: Any = make_lazy(head_state(hidden, weight, None))
        expected = F.cross_entropy(F.linear(hidden, weight), torch.arange(3))
        torch.testing.assert_close(F.cross_entropy(lazy, torch.arange(3)), expected)


# -------------------------------------------------------------------------------- in-place writes


def _scale_a_view(x: Any) -> Any:
    flat = x.view(-1, V)
    flat /= 2
    return x


def _fill(x: Any) -> Any:
    rows = x[0]
    x[..., 3] = -5.0
    return torch.stack([rows, x[1]])


def _fill_through_view(x: Any) -> Any:
    head, tail = x[:, :2], x.narrow(1, 1, 4)
    tail.mul_(0.0)
    return x + head.sum()


def _fill_a_view_that_was_read(x: Any) -> Any:
    view = x[:, 1:, :4]
    total = (view * 1.0).sum()
    view.fill_(1.0)
    return x + total


def _views_of_views(x: Any) -> Any:
    row = x[0]
    part, read = row[2:], row[:2]
    before = read.exp().sum()
    x.mul_(3.0)
    return torch.stack([before, read.sum(), part.sum(), row.sum()])


def _copy_is_not_a_view(x: Any) -> Any:
    picked, cast, copied = x[torch.tensor([1])], x.float(), x[:, :-1].contiguous()
    x.zero_()
    copied += 1
    return picked.sum() + cast.sum() + copied.sum() + x.sum()


def _write_twice(x: Any) -> Any:
    flat = x.view(-1, V)
    flat.clamp_(max=0.5)
    x[0, 0] *= 3
    return flat


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize(
    "function",
    [
        _scale_a_view,
        _fill,
        _fill_through_view,
        _fill_a_view_that_was_read,
        _views_of_views,
        _copy_is_not_a_view,
        _write_twice,
    ],
)
def test_in_place_writes_show_where_they_do_in_stock(function: Callable[[Any], Any], pair: Pair) -> None:
    # Sums need no exact tolerance: `cast` is float32.
    stock, lazy = function(pair.stock), function(pair.lazy)
    lazy = lazy.materialize() if is_lazy(lazy) else lazy
    torch.testing.assert_close(lazy, stock, rtol=1e-5, atol=1e-5, check_dtype=False)
    pair.check_gradients(stock, lazy, rtol=1e-5, atol=1e-5)


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "columns": lambda x: x.__setitem__((slice(None), slice(None), [1, 4]), -7.5),
    "no columns": lambda x: x.__setitem__((..., []), 0.0),
    "columns by mask": lambda x: x.__setitem__((..., torch.arange(V) > 8), torch.finfo(x.dtype).min),
    "one column": lambda x: x.__setitem__((..., 3), 0.0),
    "range": lambda x: x.__setitem__((..., slice(2, 5)), -1),
    "masked_fill_": lambda x: x.masked_fill_(torch.arange(V) == 2, -1e4),
    "add bias": lambda x: x.add_(BIAS),
    "sub bias": lambda x: x.sub_(BIAS),
    "mul": lambda x: x.mul_(0.5),
    "divide": lambda x: x.div_(3),
    "tanh": lambda x: x.tanh_(),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.usefixtures("nothing_materialises")
def test_in_place_operations_that_stay_lazy(name: str, pair: Pair, fused_calls: list[dict[str, Any]]) -> None:
    for x in (pair.stock, pair.lazy):
        IN_PLACE[name](x)
    assert is_lazy(pair.lazy)
    stock, lazy = (
        F.cross_entropy(x.view(-1, V), pair.target.view(-1), reduction="sum") for x in (pair.stock, pair.lazy)
    )
    assert fused_calls
    torch.testing.assert_close(lazy, stock)
    torch.testing.assert_close(pair.lazy.materialize(), pair.stock)
    pair.check_gradients(stock, lazy, rtol=1e-6, atol=1e-6)


def test_in_place_operators_rebind() -> None:
    pair = Pair()
    stock, lazy = pair.stock, pair.lazy
    stock += BIAS
    lazy += BIAS
    assert lazy is pair.lazy
    with torch._C.DisableTorchFunctionSubclass(), pytest.warns(MaterializedLogitsWarning):
        got = torch.exp(lazy)  # below __torch_function__ the changed logits are seen, too
    torch.testing.assert_close(got, torch.exp(stock))
    pair.check_gradients(torch.exp(stock), got)


@pytest.mark.parametrize("on_materialize", ["warn", "ignore", "raise"])
def test_on_materialize(on_materialize: Any) -> None:
    hidden, weight = torch.randn(3, H), torch.randn(V, H)
    lazy: Any = make_lazy(head_state(hidden, weight, None, Settings(on_materialize=on_materialize)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if on_materialize == "raise":
            line = sys._getframe().f_lineno + 2
            with pytest.raises(MaterializedLogitsError, match=f"torch.Tensor.softmax at {__file__}:{line}"):
                (lazy * 2).softmax(-1)
            assert not lazy.is_materialized
        else:
            lazy.softmax(-1)
    assert len(caught) == (on_materialize == "warn")
    assert lazy.materialize().shape == (3, V)
    torch.testing.assert_close(lazy.softmax(-1), (hidden @ weight.T).softmax(-1))


ALIASES: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(-1, V),
    "reshape": lambda x: x.reshape(-1, V),
    "reshape that copies": lambda x: x[:, :-1].reshape(-1, V),
    "flatten that copies": lambda x: x[:, 1:].flatten(0, 1),
    "contiguous": lambda x: x.contiguous(),
    "contiguous view": lambda x: x.view(-1, V).contiguous(),
    "contiguous row": lambda x: x[0].contiguous(),
    "contiguous that copies": lambda x: x[:, 1:].contiguous(),
    "list index": lambda x: x[[0]],
    "tensor index": lambda x: x[torch.tensor([0])],
    "number as a tensor": lambda x: x[torch.tensor(1)],
    "same dtype": lambda x: x.double(),
    "other dtype": lambda x: x.float(),
    "transpose": lambda x: x.transpose(0, 1),
    "detach": lambda x: x.detach(),
}


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize("write_to_view", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ALIASES)
def test_memory_is_shared_where_it_is_in_stock(name: str, grad: bool, write_to_view: bool) -> None:
    pair = Pair()
    results: list[list[Tensor]] = []
    with torch.set_grad_enabled(grad):
        for x in (pair.stock, pair.lazy):
            y = ALIASES[name](x)
            layout = (y.stride(), y.is_contiguous(), y.storage_offset())
            (y if write_to_view else x).mul_(3.0)
            results.append([x * 1.0, y * 1.0, torch.tensor([*layout[0], layout[1], layout[2]])])
    torch.testing.assert_close(results[1], results[0])


class _Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        return how(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 3, None


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize("how", [torch.clone, torch.detach, lambda x: x * 1.0, lambda x: x.view(B, T, V)])
def test_copies_made_by_autograd_functions_are_theirs(how: Callable[[Tensor], Tensor]) -> None:
    """As DDP makes them of a model's outputs: the gradient has to go through the function."""
    pair = Pair()
    stock, lazy = (
        F.cross_entropy(_Triple.apply(x, how).view(-1, V), pair.target.view(-1)) for x in (pair.stock, pair.lazy)
    )
    torch.testing.assert_close(lazy, stock)
    pair.check_gradients(stock, lazy)


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_logits_can_be_made_a_leaf() -> None:
    pair = Pair()
    grads = []
    for x in (pair.stock.detach(), pair.lazy.detach()):
        x.requires_grad = True
        F.cross_entropy(x.view(-1, V), pair.target.view(-1)).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_hooks_after_the_loss_are_an_error() -> None:
    for hook in (lambda x: x.register_hook(print), lambda x: x.retain_grad()):
        pair = Pair()
        F.cross_entropy(pair.lazy.view(-1, V), pair.target.view(-1))
        with pytest.raises(RuntimeError, match="after the loss"):
            hook(pair.lazy)


@pytest.mark.parametrize("first", [-math.inf, -1e30])
def test_values_where_classes_are_masked(first: float, pair: Pair) -> None:
    for function in (
        lambda x: torch.logsumexp(x, -1).square(),
        lambda x: x.log_softmax(-1).gather(-1, PICK.clamp(min=2)),
        lambda x: x[..., 2:].log_softmax(-1).sum(-1),
    ):
        fresh = Pair("tensor" if isinstance(pair.lazy, Tensor) else "plain")
        for x in (fresh.stock, fresh.lazy):
            x[..., :2] = first
        stock, lazy = function(fresh.stock), function(fresh.lazy)
        torch.testing.assert_close(lazy, stock)
        fresh.check_gradients(stock, lazy, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_the_head_cannot_hold(dtype: torch.dtype) -> None:
    for function in (
        lambda x: x.float().masked_fill(torch.arange(V) < 3, torch.finfo(torch.float32).min),
        lambda x: x.float().masked_fill(torch.arange(V) < 3, 0.3),
        lambda x: (x / 2).masked_fill(torch.arange(V) < 3, torch.finfo(dtype).min),
        lambda x: x.masked_fill(torch.arange(V) < 3, 0.3),
        lambda x: x.float() + torch.linspace(-12.3, 3.7, V),
        lambda x: x + torch.linspace(-12.3, 3.7, V, dtype=torch.float64),
    ):
        pair = Pair(dtype=dtype)
        stock, lazy = function(pair.stock), function(pair.lazy)
        assert lazy.dtype == stock.dtype
        assert torch.equal(lazy.materialize() if is_lazy(lazy) else lazy, stock)


def test_a_wide_bias_is_not_rounded(fused_calls: list[dict[str, Any]]) -> None:
    pair, prior = Pair(dtype=torch.bfloat16), torch.linspace(-12.3, 3.7, V)
    losses = [F.cross_entropy((x.float() + prior).view(-1, V), pair.target.view(-1)) for x in (pair.stock, pair.lazy)]
    assert fused_calls
    exact = F.linear(*(leaf.double() for leaf in pair.stock_leaves)) + prior
    want = F.cross_entropy(exact.view(-1, V), pair.target.view(-1))
    assert (losses[1] - want).abs() <= 1.05 * (losses[0] - want).abs() + 1e-6


def test_errors_of_the_operator_are_not_swallowed() -> None:
    hidden, weight = torch.randn(3, H), torch.randn(V, H)
    options: Any = "fast"
    lazy: Any = make_lazy(head_state(hidden, weight, None, Settings(options)))
    for function in (lambda x: x.argmax(-1), lambda x: x.logsumexp(-1)):
        with pytest.raises(TypeError, match="ChunkOptions"):
            function(lazy)


def test_in_place_writes_warn() -> None:
    pair = Pair()
    with pytest.warns(MaterializedLogitsWarning, match="__setitem__"):
        pair.lazy[:, 0] = 0.0


# ------------------------------------------------------------------- code below __torch_function__


class _SquareMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x / x.numel()


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_autograd_functions_get_gradients() -> None:
    pair = Pair()
    stock, lazy = _SquareMean.apply(pair.stock * 2), _SquareMean.apply(pair.lazy * 2)
    torch.testing.assert_close(lazy, stock)
    pair.check_gradients(stock, lazy)


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_dispatch_below_torch_function() -> None:
    pair = Pair()
    with torch._C.DisableTorchFunctionSubclass():
        lazy = torch.exp(pair.lazy)
    stock = torch.exp(pair.stock)
    torch.testing.assert_close(lazy, stock)
    pair.check_gradients(stock, lazy)


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_backward_hooks_see_the_gradient() -> None:
    pair = Pair()
    grads: list[Any] = []
    for x in (pair.stock, pair.lazy):
        x.register_hook(grads.append)
        x.retain_grad()
        F.cross_entropy(x.view(-1, V), pair.target.view(-1)).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[2], grads[0])
    torch.testing.assert_close(grads[3], grads[1])


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize("kind", ["tensor", "plain"])
def test_copies_and_pickles_are_real_tensors(kind: str) -> None:
    pair = Pair(kind)
    lazy = pair.lazy.detach()
    stock = pair.stock.detach()
    file = io.BytesIO()
    torch.save(lazy, file)
    file.seek(0)
    for copied in (pickle.loads(pickle.dumps(lazy)), copy.deepcopy(lazy), torch.load(file)):
        assert type(copied) is Tensor
        torch.testing.assert_close(copied, stock)


def test_stale_logits_are_an_error() -> None:
    pair = Pair()
    part = pair.lazy[:, 1:]
    with torch.no_grad():
        pair.lazy_leaves[1].mul_(2.0)  # an optimizer step
    for lazy in (pair.lazy, part, pair.lazy * 2.0):
        with pytest.raises(RuntimeError, match="changed in place"):
            lazy.materialize()
    pair = Pair()
    with torch.no_grad():
        pair.lazy_leaves[0].mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        pair.lazy[:, torch.tensor([1, 2])].materialize()  # of a copy, which counts its own changes


def test_lazy_logits_hold_no_logits() -> None:
    hidden, weight = torch.randn(64, H), torch.randn(4096, H)
    lazy: Any = make_lazy(head_state(hidden, weight, None))
    assert isinstance(lazy, LazyLogits)
    with torch._C.DisableTorchFunctionSubclass():
        storage = lazy.untyped_storage()
    with pytest.raises(RuntimeError, match="invalid"):
        storage.data_ptr()


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_memory_is_freed_without_the_garbage_collector() -> None:
    def use() -> list[weakref.ref[Tensor]]:
        hidden = torch.randn(3, H, requires_grad=True) * 1
        lazy: Any = make_lazy(head_state(hidden, torch.randn(V, H, requires_grad=True), None))
        F.cross_entropy((lazy[:2] * 2.0).view(-1, V), torch.zeros(2, dtype=torch.int64)).backward()
        lazy.softmax(-1)
        lazy[0].mul_(2.0)
        return [weakref.ref(hidden), weakref.ref(lazy), weakref.ref(lazy.materialize())]

    gc.disable()
    try:
        assert [reference() for reference in use()] == [None, None, None]
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------ normal form


@pytest.mark.parametrize(
    "ops",
    [
        (),
        (("mul", 3), ("div", 2.0), ("to", torch.float32)),
        (("div", 30.0), ("tanh", None), ("mul", 30.0)),
        (("div", -0.7), ("tanh", None), ("mul", 2.0), ("div", -0.5)),
        (("mul", 2.0), ("tanh", None)),
        (("tanh", None), ("mul", 0.0)),
        (("mul", 0),),
    ],
)
def test_fold(ops: tuple[tuple[str, Any], ...]) -> None:
    folded = fold(ops)
    assert folded is not None
    scale, softcap, *_ = folded
    for x in (-3.0, 0.0, 0.4, 2.0):
        want = x
        for name, value in ops:
            if name == "tanh":
                want = math.tanh(want)
            elif name == "mul":
                want *= value
            elif name == "div":
                want /= value
        got = scale * x if softcap is None else softcap * math.tanh(scale * x / softcap)
        assert got == pytest.approx(want, abs=1e-12)


def test_fold_says_so_when_there_is_no_scale() -> None:
    for cap in (30.0, 49.0, 50.0, 0.3):
        assert fold((("div", cap), ("tanh", None), ("mul", cap))) == Folded(1.0, cap)


def test_fold_refuses() -> None:
    assert fold((("tanh", None), ("tanh", None))) is None
    assert fold((("mul", math.inf),)) is None
    assert fold((("div", 0),)) is None
    assert fold((("tanh", None), ("mul", math.nan))) is None
    assert fold((("log_softmax", None), ("mul", 2.0), ("log_softmax", None))) is None
    assert fold((("log_softmax", None), ("tanh", None))) is None


def test_state_is_immutable() -> None:
    state = head_state(torch.randn(2, H), torch.randn(V, H), None)
    assert isinstance(replace(state, class_dim=0), LazyState)
    with pytest.raises(AttributeError):
        state.class_dim = 0  # type: ignore[misc]
