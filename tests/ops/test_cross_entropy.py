"""``flce.cross_entropy`` against the float64 oracle, and its use of the memory of the logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.testing.problem import CallResult, Problem, run_oracle
from tests.helpers import BACKENDS, assert_near, parametrize_pairs
from tests.logits import make, place_in_layout
from tests.planning.test_plan import peak_on_cpu

INPLACE = pytest.mark.parametrize("inplace", [False, True])
MIB = 1 << 20


def loss_of(logits: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    loss = flce.cross_entropy(logits, target, *args, **kwargs)
    assert isinstance(loss, Tensor)
    return loss


def run(
    p: Problem,
    layout: str = "contiguous",
    *,
    inplace: bool = False,
    stats: tuple[str, ...] = (),
    grad: bool = True,
    weigh: bool = False,
    grad_output: Tensor | float | None = None,
    **kwargs: Any,
) -> Any:
    """Return the `CallResult` of a call."""
    memory, view = place_in_layout(p.input, layout) if p.input.dim() == 3 else (p.input.clone(), lambda x: x)
    memory.requires_grad_(grad)
    logits = view(memory * 1)
    before, version = logits.detach().clone(), logits._version
    p = p.map(lambda t, letter: t.clone().requires_grad_() if weigh and letter == "t" else t)
    output: Any = flce.cross_entropy(logits, p.target, inplace=inplace, stats=stats, **p.kwargs, **kwargs)
    loss = output.loss if stats else output
    assert loss.requires_grad == (grad or weigh)
    if inplace and grad and logits.numel():
        assert logits._version > version
    else:
        torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    if grad or weigh:
        upstream = torch.ones_like(loss) if grad_output is None else torch.as_tensor(grad_output)
        loss.backward(upstream.to(loss.device, loss.dtype).expand_as(loss))
    if grad:
        assert memory.grad is not None
        # Elements outside of the view have no gradient.
        assert memory.grad.count_nonzero() == view(memory.grad).count_nonzero()
    of_logits = None if memory.grad is None else view(memory.grad)
    of_weights = None if p.token_weight is None else p.token_weight.grad
    return CallResult(loss.detach(), of_logits, None, None, output=output, grad_token_weight=of_weights)


@parametrize_pairs(inplace=[False, True], backend=BACKENDS)
def test_float16_stays_in_range(inplace: bool, backend: str, device: torch.device) -> None:
    """The gradient is stored before the upstream gradient is known. Class weights do not multiply the gradient of a
    z-loss, which grows with the log-sum-exp."""
    cases: list[tuple[str, float, dict[str, float]]] = [
        *((name, 1024.0, {}) for name in ("weight", "token_weight", "logit_scale")),
        ("weight", 1e-4, {"z_loss": 1e-4, "std": 50.0}),
        ("weight", 1e-2, {"z_loss": 1e-2, "std": 500.0}),
        ("weight", 1.0, {"z_loss": 1e-2, "std": 2.0**14}),
    ]
    for name, factor, settings in cases:
        p = make((16,), 64, torch.float16, device, class_weight=True, token_weight=True, reduction="sum", **settings)
        p.kwargs[name] = p.kwargs.get(name, 1.0) * factor
        outcome, expected = run(p, inplace=inplace), run_oracle(p)
        assert_near(outcome.grad_input, expected.grad_input, 2e-3, "gradient")


@INPLACE
def test_under_autocast(inplace: bool, torch_backend: str) -> None:
    p = make((9,), 30, torch.float32)
    x = p.input.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(x, torch.eye(30))
        assert logits.dtype == torch.bfloat16
        loss = loss_of(logits, p.target, inplace=inplace)
    assert loss.dtype == torch.float32
    loss.backward()
    expected = F.cross_entropy(p.input.bfloat16().float(), p.target)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_target_out_of_range_on_cuda() -> None:
    target = torch.tensor([0, 1, 20, 3, 4, 2**40], device="cuda")
    loss = loss_of(torch.randn(6, 20, device="cuda"), target, reduction="none")
    assert loss.isnan().tolist() == [False, False, True, False, False, True]


# ---------------------------------------------------------------------------------------------------------
# Autograd


def nonleaf(*shape: int, dtype: torch.dtype = torch.float64, device: Any = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Return a leaf, logits computed from it, and targets."""
    shape = shape or (9, 30)
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    return x, x * 2, torch.randint(shape[-1], shape[:-1], device=device)


def test_overwriting_a_leaf(backend: str, device: torch.device) -> None:
    x, _, y = nonleaf(device=device)
    before = x.detach().clone()
    for leaf, message in ((x, "leaf that requires grad"), (x[:, :20], "view of a leaf"), (x.view(9, 30), "view of a")):
        with pytest.raises(RuntimeError, match=message):
            flce.cross_entropy(leaf, y % 20, inplace=True)
    assert torch.equal(x, before)
    # Without a gradient, the logits are not overwritten.
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            flce.cross_entropy(x, y, inplace=True)
    flce.cross_entropy(x.detach(), y, inplace=True)
    assert torch.equal(x, before)


NEEDED: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "a view of tanh": lambda x: torch.tanh(x)[:, :20],
    "relu": torch.relu,
    "exp": torch.exp,
}


@pytest.mark.parametrize("operation", list(NEEDED))
def test_overwriting_what_its_maker_needs(operation: str, backend: str, device: torch.device) -> None:
    """The error is raised at once, before the first write."""
    x, _, y = nonleaf(device=device)
    logits = NEEDED[operation](x)
    before = logits.detach().clone()
    with pytest.raises(RuntimeError, match=r"Backward.* still needs"):
        flce.cross_entropy(logits, y % 20, inplace=True)
    assert torch.equal(logits, before)
    loss_of(logits, y % 20).backward()


@pytest.mark.parametrize("first", [True, False])
def test_overwriting_what_another_needs(first: bool, backend: str, device: torch.device) -> None:
    """Autograd's version check must detect the writes of kernels."""
    _, logits, y = nonleaf(device=device)
    other = logits.square().mean()
    loss = loss_of(logits, y, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (other + loss if first else loss + other).backward()


def test_overwriting_what_nobody_needs(backend: str, device: torch.device) -> None:
    """Operators that use the logits but save other tensors raise no error."""
    x, logits, y = nonleaf(device=device)
    other = F.cross_entropy(logits.float(), y) + logits.sum() / 7
    (loss_of(logits, y, inplace=True) + other).backward()
    z = x.detach().clone().requires_grad_()
    (2 * F.cross_entropy(2 * z, y) + (2 * z).sum() / 7).backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-5, atol=1e-7)


def test_parts_of_one_tensor(backend: str, device: torch.device) -> None:
    """Autograd cannot distinguish parts from the full tensor: it raises an error and returns no wrong gradient."""
    _, logits, y = nonleaf(device=device)
    losses = [loss_of(logits[part], y[part], inplace=True) for part in (slice(0, 5), slice(5, 9))]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.stack(losses).sum().backward()
    x, logits, y = nonleaf(device=device)
    sum(loss_of(logits[part], y[part], reduction="sum") for part in (slice(0, 5), slice(5, 9))).backward()  # type: ignore[union-attr]
    expected = x.detach().clone().requires_grad_()
    F.cross_entropy(2 * expected, y, reduction="sum").backward()
    torch.testing.assert_close(x.grad, expected.grad)


@INPLACE
def test_saved_tensor_hooks(inplace: bool, backend: str, device: torch.device) -> None:
    """A hook may store tensors elsewhere until backward, and return them with other strides."""

    def class_by_class(t: Tensor) -> Tensor:
        return t.movedim(-1, 0).contiguous().movedim(0, -1)

    unpacks: list[Callable[[Tensor], Tensor]] = [lambda t: t.contiguous(), class_by_class]
    for leading, reduction, unpack in itertools.product(((3, 4), (1, 12)), ("mean", "none"), unpacks):
        p = make(leading, reduction=reduction, device=device)
        memory, view = place_in_layout(p.input, "in the middle")
        x = memory.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), unpack):
            loss = loss_of(view(x * 1), p.target, reduction=reduction, inplace=inplace)
        upstream = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype, device=device).view(loss.shape)
        loss.backward(upstream)
        torch.testing.assert_close(view(x.grad), run_oracle(p, grad_output=upstream).grad_input)  # type: ignore[arg-type]


def test_logits_changed_before_backward(backend: str, device: torch.device) -> None:
    for inplace in (False, True):
        _, logits, y = nonleaf(device=device)
        loss = loss_of(logits, y, inplace=inplace)
        with torch.no_grad():
            logits.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_overlapping_logits(backend: str, device: torch.device) -> None:
    x = torch.randn(1, 30, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.arange(4, device=device)
    for overlapping in ((x * 1).expand(4, 30), (x * 1).as_strided((4, 20), (2, 1))):
        with pytest.raises(RuntimeError, match="share memory"):
            flce.cross_entropy(overlapping, y, inplace=True)
    classes_apart = (x * 1).view(30, 1).expand(30, 4).contiguous().t(), (x * 1).repeat(4, 1)[:, ::2]
    for apart in (*classes_apart, (x * 1).expand(2, 3, 30).contiguous()[:, :-1]):
        with pytest.raises(RuntimeError, match=r"one stride.*Give shift=1"):
            flce.cross_entropy(apart, y.view(apart.shape[:-1]), inplace=True)
    loss_of((x * 1).expand(4, 30), y).backward()
    expected = torch.autograd.grad(F.cross_entropy(x.expand(4, 30), y), x)[0]
    torch.testing.assert_close(x.grad, expected)


def test_a_hook_and_retain_grad(backend: str, device: torch.device) -> None:
    x, logits, y = nonleaf(device=device)
    logits.retain_grad()
    loss_of(logits, y, inplace=True).backward()
    assert x.grad is not None
    torch.testing.assert_close(2 * logits.grad, x.grad)  # type: ignore[operator]


# ---------------------------------------------------------------------------------------------------------
# Memory


class SourceOfLogits(torch.autograd.Function):
    """Autograd function that returns logits in existing memory, without a gradient for them."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@parametrize_pairs(
    reduction=["mean", "none"],
    dtype=[torch.float32, torch.bfloat16],
    layout=["contiguous", "in the middle"],
)
def test_no_second_logits(layout: str, dtype: torch.dtype, reduction: str, torch_backend: str) -> None:
    """In place, forward and backward allocate no memory of the size of the logits."""
    rows, vocab = 768, 16384
    x, view = place_in_layout(torch.zeros(2, rows // 2, vocab, dtype=dtype), layout)
    x.requires_grad_()
    y = torch.randint(vocab, (2, rows // 2))
    size = rows * vocab * dtype.itemsize
    peaks = {}
    for inplace in (True, False):
        logits = view(x * 1).detach().requires_grad_()

        def step(logits: Tensor = logits, inplace: bool = inplace) -> None:
            loss = loss_of(SourceOfLogits.apply(logits), y, reduction=reduction, inplace=inplace)
            loss.backward(torch.full_like(loss, 0.5))

        peaks[inplace] = peak_on_cpu(step)
    # Slabs of 8 MiB, at most two at a time, and a few vectors.
    assert peaks[True] <= 20 * MIB < size
    assert size <= peaks[False] <= size + 20 * MIB


# ---------------------------------------------------------------------------------------------------------
# CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [512, 20001], ids=lambda n: f"{n} columns")  # resident and online softmaxes
def test_kernels_that_start_early(columns: int) -> None:
    """A kernel reads the values of the previous kernel, also if their launches overlap: the bits equal a run with a
    wait after each kernel.

    Softmaxes, losses and targets, which are the argmax of other logits, follow directly on kernels that let their
    successor begin early. The number of ignored targets differs from call to call.
    """
    num_rows = 2**23 // columns
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(num_rows, columns, device="cuda", generator=g)
    scores = torch.randn(6, num_rows, columns, device="cuda", generator=g)
    for number, of_call in enumerate(scores):
        of_call[:: number + 2, 0] = 100.0  # the ignored class
    some = torch.zeros(num_rows, dtype=torch.int64, device="cuda")

    def calls(pause: Callable[[], None]) -> list[Tensor]:
        logits, results = x.clone().requires_grad_(), []
        for of_call in scores:
            with torch.no_grad():
                out: Any = flce.cross_entropy(of_call, some, reduction="none", stats=("argmax",))
                target = out.argmax
                pause()
                results.append(loss_of(logits, target, ignore_index=0))
            pause()
            inner = flce.softmax(logits, -1)
            pause()
            rows = flce.log_softmax(inner, -1)
            pause()
            (grad,) = torch.autograd.grad(loss_of(rows, target, ignore_index=0), logits)
            pause()
            loss = loss_of(flce.softmax(logits, -1) * 1, target, ignore_index=0, inplace=True)
            pause()
            results += [grad, loss.detach(), *torch.autograd.grad(loss, logits)]
        return results

    expected = calls(torch.cuda.synchronize)
    for _ in range(3):
        for mine, waited in zip(calls(lambda: None), expected, strict=True):
            assert torch.equal(mine, waited)


@INPLACE
def test_whatever_arrives_for_an_ignored_row(inplace: bool, backend: str) -> None:
    """sqrt has an infinite derivative at 0, the loss of an ignored row."""
    x = torch.randn(3, 5, requires_grad=True)
    losses = loss_of(x * 1, torch.tensor([1, -100, 3]), reduction="none", inplace=inplace)
    losses.sqrt().sum().backward()
    exact = x.detach().clone().requires_grad_()
    F.cross_entropy(exact, torch.tensor([1, -100, 3]), reduction="none")[[0, 2]].sqrt().sum().backward()
    torch.testing.assert_close(x.grad, exact.grad)


@pytest.mark.parametrize("later", ["sum", "loss", "inplace"])
def test_logits_used_after_they_were_overwritten(later: str, torch_backend: str) -> None:
    x, y = torch.randn(6, 20, requires_grad=True), torch.randint(20, (6,))
    logits = x * 2
    before = logits.sum()
    loss = loss_of(logits, y, inplace=True) + before  # no operator saved this tensor
    more = logits.square().mean() if later == "sum" else loss_of(logits, y, inplace=later == "inplace")
    with pytest.raises(RuntimeError, match="used after"):
        (loss + more).backward()


@pytest.mark.gpu
@INPLACE
@pytest.mark.parametrize("cut", [0, 1])
def test_beyond_32_bits(cut: int, inplace: bool) -> None:
    """More than 2^31 logits; 32-bit addresses of the last rows would be wrong."""
    if torch.cuda.get_device_properties(0).total_memory < 16 * 2**30:
        pytest.skip("needs 16 GiB of GPU memory")
    logits = torch.zeros(3, 5667, 131072, dtype=torch.float16, device="cuda")
    logits[:, -3:].normal_()
    y = torch.randint(131072, logits.shape[:-1], device="cuda")
    tail = logits[:, -3:].float().requires_grad_()
    expected = F.cross_entropy(tail.flatten(0, 1), y[:, -3:].flatten(), reduction="none").view(3, 3)
    expected.sum().backward()
    assert tail.grad is not None
    view = SourceOfLogits.apply(logits.requires_grad_()).flatten(0, 1)[cut:]
    grads: list[Tensor] = []
    view.register_hook(grads.append)  # the overwritten tensor becomes a new view in autograd: `view` itself
    loss = loss_of(view, y.flatten()[cut:], reduction="none", inplace=inplace)
    loss.sum().backward()
    (grad,) = grads
    torch.testing.assert_close(loss[-3:], expected[-1])
    torch.testing.assert_close(grad[-3:].float(), tail.grad[-1], rtol=2e-3, atol=1e-6)
