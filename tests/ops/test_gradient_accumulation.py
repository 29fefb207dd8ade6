"""`ChunkOptions(gradient_accumulation_fusion=True)`: dW is added to `main_grad` or `.grad` in backward."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import flce
from flce.testing.oracle import dense_logits
from tests.helpers import parametrize_pairs
from tests.planning.test_plan import peak_on_cpu
from tests.processes import in_processes, most_processes

N, H, V = 20, 16, 50
EPS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


class Call:
    """Hidden states, a head with an adapter and a bias, and the gradients of one call by float64 operators."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: Any = "cpu", more: bool = False) -> None:
        g = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(device, dtype)

        self.w: Any = nn.Parameter(draw(V, H) / 2)
        self.x = draw(N, H).requires_grad_()
        self.a, self.b, self.bias = draw(N, 3), nn.Parameter(draw(V, 3) / 2), nn.Parameter(draw(V))
        self.y = torch.randint(V, (N,), generator=g).to(device)
        self.leaves = (self.x, self.w, self.b, self.bias) if more else (self.x, self.w)
        self.head: Any = {"adapters": [(self.a, self.b)], "linear_bias": self.bias} if more else {}
        x, w, *rest = leaves = [t.detach().double().requires_grad_() for t in self.leaves]
        b, bias = cast(Any, rest or (None, None))
        z = dense_logits(x, w, bias, adapters=[(self.a.double(), b)] if more else [])
        loss = torch.nn.functional.cross_entropy(z, self.y)
        self.dx, self.dw, *self.others = torch.autograd.grad(loss, leaves)

    def loss(self, function: str = "mean", weight: Tensor | None = None, **options: Any) -> Tensor:
        chunking = flce.ChunkOptions(gradient_accumulation_fusion=True, **options)
        weight = self.w if weight is None else weight
        if function == "logprobs":
            out: Any = flce.linear_logprobs(self.x, weight, self.y, options=chunking, **self.head)
            return -out.logprob.mean()
        loss: Any = flce.fused_linear_cross_entropy(
            self.x, weight, self.y, reduction="none" if function == "none" else "mean", options=chunking, **self.head
        )
        return loss.mean()


def add_main_grad(parameter: Any, dtype: torch.dtype, **marks: bool) -> Tensor:
    parameter.main_grad = torch.full_like(parameter, 0.5, dtype=dtype, requires_grad=False)
    for name, value in marks.items():
        setattr(parameter, name, value)
    grad: Tensor = parameter.main_grad
    return grad


def assert_added(target: Tensor, start: float, added: Tensor, *dtypes: torch.dtype) -> None:
    """Assert that the target is `start + added`, but for the errors of two sums, and of numbers of these dtypes."""
    difference = (target.double() - start - added).abs()
    rounded_sum = 2 * EPS[target.dtype] * (abs(start) + added.abs())
    assert bool((difference <= rounded_sum + max(EPS[dtype] for dtype in dtypes) * added.abs().max()).all())


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks": {"strategy": "tokens", "chunk_rows": 7},
    "blocks": {"strategy": "vocab"},
    "blocks of chunks": {"strategy": "vocab", "chunk_rows": 16, "skip_ignored": True},
    # PyTorch's operators allocate more on a GPU.
    "budget": {"max_workspace_bytes": 50_000 if torch.cuda.is_available() else 9500},
    "sampled": {"sample_below": 2.0**-20},
}


@parametrize_pairs(
    kind=("torch_backend", "on_hopper"),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
    into=(torch.float32, torch.bfloat16, "grad"),
    how=tuple(OPTIONS),
)
def test_gradients_are_added(
    kind: str, dtype: torch.dtype, into: Any, how: str, request: pytest.FixtureRequest, device: torch.device
) -> None:
    """Two calls add to main_grad or .grad what float64 operators compute: dW of the head and of an adapter. The bias
    and the hidden states have their usual gradients."""
    request.getfixturevalue(kind)
    for function, more in (("mean", False), ("none", True), ("logprobs", True)):
        call = Call(dtype, device, more)
        weights: Any = [call.w, call.b] if more else [call.w]
        targets: list[Any] = []
        for weight in weights:
            if into == "grad":
                weight.grad = torch.full_like(weight, 0.5)
            targets.append(weight.grad if into == "grad" else add_main_grad(weight, into))
        losses = [call.loss(function, **OPTIONS[how]) for _ in range(2)]
        assert all(bool((target == 0.5).all()) for target in targets)
        for loss in losses:
            loss.backward()
        for weight, target, dw in zip(weights, targets, (call.dw, *call.others), strict=False):
            assert weight.grad is (target if into == "grad" else None)
            assert_added(target, 0.5, 2 * dw, dtype, target.dtype)
        assert call.x.grad is not None
        assert_added(call.x.grad, 0.0, 2 * call.dx, dtype)
        if more:
            assert call.bias.grad is not None
            assert_added(call.bias.grad, 0.0, 2 * call.others[1], dtype)


@parametrize_pairs(kind=("torch_backend", "on_hopper"), how=tuple(OPTIONS))
def test_sums_are_rounded_once(kind: str, how: str, request: pytest.FixtureRequest, device: torch.device) -> None:
    """dW of bfloat16 numbers is not rounded before it is added to a float32 gradient, of any memory format. A float64
    gradient is not rounded to float32."""
    request.getfixturevalue(kind)
    call = Call(torch.bfloat16, device)
    call.w.main_grad = target = torch.zeros(H, V, device=device).t()
    call.loss(**OPTIONS[how]).backward()
    assert_added(target, 0.0, call.dw, torch.bfloat16)
    assert not target.equal(target.bfloat16().float())
    call.w.main_grad = wide = torch.full((V, H), 1e8, dtype=torch.float64, device=device)
    call.loss(**OPTIONS[how]).backward()
    torch.testing.assert_close(wide - 1e8, target.double(), rtol=1e-5, atol=1e-7)


@parametrize_pairs(kind=("torch_backend", "on_hopper"), how=tuple(OPTIONS))
def test_wide_numbers_and_a_narrow_gradient(
    kind: str, how: str, request: pytest.FixtureRequest, device: torch.device
) -> None:
    request.getfixturevalue(kind)
    call = Call(torch.float64, device)
    target = add_main_grad(call.w, torch.bfloat16)
    call.loss(**OPTIONS[how]).backward()
    assert_added(target, 0.5, call.dw, torch.bfloat16)


def test_results_of_autograd_grad_are_not_added() -> None:
    """`torch.autograd.grad`, and backward for other inputs, change no gradient. A retained graph adds again."""
    call = Call()
    for target in (add_main_grad(call.w, torch.float32), torch.full_like(call.w, 0.5)):
        if target is not call.w.main_grad:
            del call.w.main_grad
            call.w.grad = target
        loss = call.loss()
        for inputs in ([call.w], [call.x, call.w]):
            torch.testing.assert_close(torch.autograd.grad(loss, inputs, retain_graph=True)[-1].double(), call.dw)
        loss.backward(inputs=[call.x], retain_graph=True)
        assert bool((target == 0.5).all())
        loss.backward(inputs=[call.w], retain_graph=True)
        loss.backward()
        assert_added(target, 0.5, 2 * call.dw, torch.float32)
        call.w.grad = None


def test_first_and_later_steps() -> None:
    """Without a gradient, backward allocates one. Later steps use its memory."""
    call = Call(torch.bfloat16)
    call.loss().backward()
    grad = call.w.grad
    assert grad is not None
    call.loss().backward()
    assert call.w.grad is grad
    assert_added(grad, 0.0, 2 * call.dw, torch.bfloat16)


@pytest.mark.parametrize("marks", [{}, {"grad_added_to_main_grad": False}, {"zero_out_wgrad": True}], ids=str)
def test_hooks_of_megatron(marks: dict[str, bool]) -> None:
    """Autograd gets what Megatron-Core's linear layers return: nothing, or a tensor for the hooks of its DDP."""
    call = Call(torch.bfloat16)
    target, seen = add_main_grad(call.w, torch.float32, **marks), []
    if marks:
        call.w.grad_added_to_main_grad = False
    call.w.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    call.loss().backward()
    assert_added(target, 0.5, call.dw, torch.bfloat16)
    assert [gradient is None for gradient in seen] == [not marks]
    assert getattr(call.w, "grad_added_to_main_grad", None) is (True if marks else None)
    if marks.get("zero_out_wgrad"):  # The gradient of a tied embedding is added to it.
        assert not bool(seen[0].any())


def test_views_and_casts_of_a_parameter() -> None:
    call = Call(torch.bfloat16)
    parameter = nn.Parameter(call.w.detach().float())
    target = add_main_grad(parameter, torch.float32)
    call.loss(weight=parameter.view_as(parameter).to(torch.bfloat16)).backward()
    assert_added(target, 0.5, call.dw, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        call.loss(weight=parameter).backward()
    assert_added(target, 0.5, 2 * call.dw, torch.bfloat16)


def test_a_graph_has_the_gradient() -> None:
    """In a graph of `torch.compile`, autograd gets dW, which DDP of Megatron-Core adds to main_grad."""
    call = Call()
    target = add_main_grad(call.w, torch.float32, grad_added_to_main_grad=False)
    torch.compile(call.loss, fullgraph=True, backend="aot_eager")().backward()
    assert call.w.grad is not None
    torch.testing.assert_close(call.w.grad.double(), call.dw)
    assert bool((target == 0.5).all())
    assert not call.w.grad_added_to_main_grad


REFUSED: dict[str, tuple[str, Any]] = {
    "hook": (r"needs a main_grad, or no hooks", lambda w: w.register_hook(lambda grad: grad)),
    "late hook": (r"needs a main_grad, or no hooks", lambda w: w.register_post_accumulate_grad_hook(lambda w: None)),
    "ZeRO": ("a parameter that FSDP and ZeRO do not divide", lambda w: setattr(w, "ds_id", 0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_parameters(name: str) -> None:
    message, change = REFUSED[name]
    call = Call()
    change(call.w)
    with pytest.raises(ValueError, match=rf"gradient of linear_weight, which {message}|which needs {message}"):
        call.loss()
    with torch.no_grad():
        call.loss()


def test_refused_weights_and_options() -> None:
    call = Call()
    with pytest.raises(ValueError, match="needs a parameter, got the result of MulBackward0"):
        call.loss(weight=call.w * 2)
    call.w.grad, loss = torch.zeros_like(call.w), call.loss()
    call.w.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match="no hooks"):
        loss.backward()
    wrong: Any = 1
    with pytest.raises(TypeError, match="gradient_accumulation_fusion must be a bool"):
        flce.ChunkOptions(gradient_accumulation_fusion=wrong)


def test_plan(torch_backend: str) -> None:
    """The plan counts no dW, and no matrix of this size is allocated."""
    sizes: Any = (512, 256, 8192, torch.bfloat16)
    options = flce.ChunkOptions(gradient_accumulation_fusion=True)
    plan = flce.plan(*sizes, device="cpu", options=options)
    assert "dW is computed in backward and added to main_grad or .grad" in str(plan)
    assert "4 matrix products" in str(plan)
    x, w = (torch.randn(n, 256).bfloat16().requires_grad_() for n in (512, 8192))
    w.grad, y = torch.zeros_like(w), torch.randint(8192, (512,))

    def step() -> None:
        flce.fused_linear_cross_entropy(x, w, y, options=options).backward()

    step()
    x.grad = None
    returned = x.numel() * 2
    assert peak_on_cpu(step) <= plan.workspace_bytes + returned


@in_processes(most_processes())
def test_processes() -> None:
    """A divided head adds its classes to main_grad. Without main_grad, several processes are refused."""
    call, size = Call(torch.float64), dist.get_world_size()
    with pytest.raises(ValueError, match=f"a main_grad, or one process: hooks may sum gradients of the {size} proc"):
        call.loss()
    start, stop = flce.core.shard.shard_bounds(V, size, dist.get_rank())
    for sequence_parallel in (False, True):
        shard = nn.Parameter(call.w.detach()[start:stop].clone())
        target, per = add_main_grad(shard, torch.float64), N // size
        x = call.x.detach()[dist.get_rank() * per :][:per] if sequence_parallel else call.x.detach()
        flce.fused_linear_cross_entropy(
            x[None].requires_grad_(), shard, call.y[None], options=flce.ChunkOptions(gradient_accumulation_fusion=True),
            process_group=dist.group.WORLD, vocab_size=V, sequence_parallel=sequence_parallel,
        ).backward()  # fmt: skip
        assert_added(target, 0.5, call.dw[start:stop], torch.float64)
