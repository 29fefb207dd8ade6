"""Lazy logits as objects: operations that compute them, warnings, and stored tensors."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flce.huggingface import LazyLogits, MaterializedLogitsWarning
from flce.huggingface.head_call import HeadCall, add_wrapper_hook
from flce.huggingface.lazy import make_lazy
from flce.huggingface.lazy.state import Settings, head_state
from flce.huggingface.usage import Usage

B, T, H, V = 2, 5, 8, 11


class Pair:
    """Logits of stock's linear layer and equal lazy logits, with separate leaves."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((B, T, H), (V, H), (V,))]
        self.stock_leaves = [v.clone().requires_grad_() for v in values]
        self.lazy_leaves = [v.clone().requires_grad_() for v in values]
        self.stock = F.linear(*self.stock_leaves)
        hidden, weight, bias = self.lazy_leaves
        call = HeadCall(weight, bias, Usage(), None, None)
        self.lazy: Any = make_lazy(head_state(hidden, weight, bias, call=call))
        self.target = torch.randint(V, (B, T), generator=generator)

    def check_gradients(self, stock: Tensor, lazy: Tensor) -> None:
        stock.sum().backward()
        lazy.sum().backward()
        for want, got in zip(self.stock_leaves, self.lazy_leaves, strict=True):
            torch.testing.assert_close(got.grad, want.grad)


# ---------------------------------------------------------------------------------------- values and losses


def test_wrappers_hooks_fire_for_few_classes() -> None:
    for function in (lambda x: x[..., [1, 2]], lambda x: x[..., 1], lambda x: x.log_softmax(-1)[..., [1, 2]]):
        pair = Pair()
        seen: list[Tensor] = []
        add_wrapper_hook(seen.append, pair.lazy._state.calls)
        function(pair.lazy).sum().backward()
        assert len(seen) == 1


def test_the_representation_needs_no_logits() -> None:
    pair = Pair()
    assert "LazyLogits" in repr(pair.lazy)
    assert "shape=(2, 5, 11)" in str(pair.lazy)
    assert not pair.lazy.is_materialized


# ----------------------------------------------------------------------------- operations that compute the logits


def test_one_warning_names_operation_and_line() -> None:
    pair = Pair()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        pair.lazy.sigmoid()
        torch.sigmoid(pair.lazy)
        pair.lazy.view(-1, V).sum()
    (warning,) = [w for w in caught if w.category is MaterializedLogitsWarning]
    assert "torch.Tensor.sigmoid" in str(warning.message)
    assert f"{__file__}:{line}" in str(warning.message)
    assert (warning.filename, warning.lineno) == (__file__, line)
    for call, name in (
        (lambda x: F.softmin(x, -1), "torch.nn.functional.softmin"),
        (lambda x: x.mH, "torch.Tensor.mH"),
        (lambda x: torch.sin(x), "torch.sin"),
    ):
        with pytest.warns(MaterializedLogitsWarning, match=name.replace(".", r"\.")):
            call(Pair().lazy)


def test_a_training_loop_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            Pair().lazy.sigmoid()
    assert len([w for w in caught if w.category is MaterializedLogitsWarning]) == 1


@pytest.mark.usefixtures("fail_on_materialize")
def test_materialize_does_not_warn() -> None:
    pair = Pair()
    real = pair.lazy.materialize()
    assert type(real) is Tensor
    assert pair.lazy.materialize() is real
    assert pair.lazy.sigmoid().shape == real.shape  # already real: no warning


def test_a_wide_bias_is_not_rounded(fused_calls: list[dict[str, Any]]) -> None:
    pair, prior = Pair(dtype=torch.bfloat16), torch.linspace(-12.3, 3.7, V)
    losses = [F.cross_entropy((x.float() + prior).view(-1, V), pair.target.view(-1)) for x in (pair.stock, pair.lazy)]
    assert fused_calls
    exact = F.linear(*(leaf.double() for leaf in pair.stock_leaves)) + prior
    want = F.cross_entropy(exact.view(-1, V), pair.target.view(-1))
    assert (losses[1] - want).abs() <= 1.05 * (losses[0] - want).abs() + 1e-6


def test_errors_of_the_operator_are_not_swallowed() -> None:
    hidden, weight = torch.randn(3, H), torch.randn(V, H)
    settings = Settings()
    vars(settings)["options"] = "fast"  # the constructor would raise an error
    lazy: Any = make_lazy(head_state(hidden, weight, None, settings))
    for function in (lambda x: x.argmax(-1), lambda x: x.logsumexp(-1)):
        with pytest.raises(TypeError, match="ChunkOptions"):
            function(lazy)


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
def test_factors_whose_product_overflows() -> None:
    pair = Pair()
    losses = [F.cross_entropy((x * 1e200 * 1e200)[0], pair.target[0]) for x in (pair.lazy, pair.stock)]
    torch.testing.assert_close(*losses, equal_nan=True)


# -------------------------------------------------------------------------------------- what they hold


def test_stale_logits_are_an_error() -> None:
    pair = Pair()
    part = pair.lazy[:, 1:]
    with torch.no_grad():
        pair.lazy_leaves[1].mul_(2.0)  # an optimizer step
    for lazy in (pair.lazy, part, pair.lazy * 2.0):
        for read in (LazyLogits.materialize, lambda x: x[..., [1, 2]], lambda x: x[..., 1].materialize()):
            with pytest.raises(RuntimeError, match="changed in place"):
                read(lazy)
    pair = Pair()
    with torch.no_grad():
        pair.lazy_leaves[0].mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        pair.lazy[:, torch.tensor([1, 2])].materialize()  # a copy, which has its own version


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
        lazy.sigmoid()
        lazy[0].mul_(2.0)
        return [weakref.ref(hidden), weakref.ref(lazy), weakref.ref(lazy.materialize())]

    gc.disable()
    try:
        assert [reference() for reference in use()] == [None, None, None]
    finally:
        gc.enable()
