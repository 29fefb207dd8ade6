"""Random calls of `flce.fused_linear_cross_entropy`."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.backends.contract import EXPONENTIAL_HEADROOM
from flce.engine.schedules.unnormalized import Borrowed, Unnormalized
from flce.testing.problem import Problem
from tests import forced
from tests.helpers import plan_for
from tests.search import arguments
from tests.search.arguments import DTYPES, HEAD, LOSS, Expected, defaults
from tests.search.driver import Call, Errors, Kind, Mismatch

# How the call runs. retained: two backward passes; autocast: of float32 tensors; graph: captured in a CUDA graph.
MODES = ("eager", "retained", "autocast bfloat16", "autocast float16", "compiled", "graph")
MIB = 1 << 20


def draw(rng: random.Random, compiled: random.Random, device: str) -> Call:
    call = arguments.draw_head(rng, compiled, device)
    mode = compiled.choices(MODES, [80, 10, 4, 3, 1, 0])[0]
    if device == "cuda":  # Both are slow.
        mode = rng.choices((mode, *MODES[-2:]), [200, 1, 4])[0] if mode != "compiled" else "eager"
    if mode.startswith("autocast"):
        call |= {"dtype": "float32", "logits_dtype": None, "accum_dtype": None}
    if mode in ("compiled", "graph") and (call["beyond"] is not None or call["skip_ignored"] is True):
        mode = "eager"
    share = {("cpu", "hopper"): 0.75, ("cuda", "triton"): 0.3}.get((device, call["backend"]), 0.0)
    if compiled.random() < share and mode in ("eager", "retained"):
        call |= {"dtype": "bfloat16", "label_smoothing": 0.0, "beyond": None, "schedule": "unnormalized"}
        call |= {"logits_dtype": None, "accum_dtype": None, "strategy": "auto"}
        call["reduction"] = "mean" if call["reduction"] == "none" else call["reduction"]
    return {**call, "mode": mode}


def options_of(call: Call, p: Problem, grads: str) -> flce.ChunkOptions:
    given = {name: call[name] for name in ("chunk_rows", "strategy", "skip_ignored")}
    for name in ("logits_dtype", "accum_dtype"):
        if call[name] is not None:
            given[name] = getattr(torch, call[name])
    if call["sample_below"]:
        given["sample_below"] = call["sample_below"]
    if call["beyond"] is not None and p.target.numel():
        given["max_workspace_bytes"] = call["beyond"] + arguments.least_budget(
            lambda: plan_for(p, flce.ChunkOptions(**given, max_workspace_bytes=1), grads, call["stats"])
        )
    return flce.ChunkOptions(**given)


def in_half(p: Problem, dtype: torch.dtype) -> Problem:
    """Return the problem as autocast rounds it. The bias and the weights of tokens and classes are not rounded."""
    return p.map(lambda t, letter: t.to(dtype) if letter in "xwaB" else t)


# Scalars of autograd and of launches, beside the workspace and the results.
RESULT_BYTES = 4096


@dataclass
class Step:
    """A call and its backward pass. Gradients are by letter: x, w, b, t, and a0, B0, ... of adapters."""

    p: Problem  # with leaves
    options: flce.ChunkOptions
    stats: tuple[str, ...]
    upstream: Tensor
    half: torch.dtype | None = None  # of autocast

    def forward(self) -> tuple[Tensor, Any]:
        p, device = self.p, self.p.input.device.type
        with torch.autocast(device, self.half, enabled=self.half is not None):
            output: Any = flce.fused_linear_cross_entropy(
                p.input,
                p.linear_weight,
                p.target,
                linear_bias=p.linear_bias,
                adapters=p.adapters,
                options=self.options,
                stats=self.stats,
                **p.kwargs,
            )
        return (output.loss if self.stats else output), output

    def gradients(self, loss: Tensor, retain_graph: bool = False) -> dict[str, Tensor]:
        leaves = arguments.leaves_of(self.p)
        if not leaves:
            return {}
        upstream = self.upstream.to(loss.dtype).expand_as(loss)
        found = torch.autograd.grad(loss, list(leaves.values()), upstream, retain_graph=retain_graph)
        for (name, leaf), grad in zip(leaves.items(), found, strict=True):
            if grad.dtype != leaf.dtype:
                raise Mismatch(f"gradient {name}", f"{grad.dtype}, expected {leaf.dtype}")
        return dict(zip(leaves, found, strict=True))


Results = tuple[Tensor, Any, dict[str, Tensor]]


def run(step: Step, mode: str) -> Results:
    """Run a step. Return the loss, the value that the call returned, and the gradients."""
    if mode == "graph":
        return run_graph(step)
    forward = step.forward
    if mode == "compiled":
        torch.compiler.reset()
        forward = torch.compile(forward, fullgraph=True, backend="aot_eager")
    loss, output = forward()
    leaves = arguments.leaves_of(step.p)
    if loss.requires_grad != bool(leaves):
        raise Mismatch("requires_grad", f"{loss.requires_grad}, gradients of {list(leaves)}")
    if mode != "retained":
        return loss.detach(), output, step.gradients(loss)
    first = {name: grad.clone() for name, grad in step.gradients(loss, retain_graph=True).items()}
    assert_equal(first, step.gradients(loss), "second backward")
    return loss.detach(), output, first


def run_graph(step: Step) -> Results:
    """Return the results of a captured CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step.gradients(step.forward()[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, output = step.forward()
        grads = step.gradients(loss)
    graph.replay()
    torch.cuda.synchronize()
    return loss.detach(), output, grads


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, grad in expected.items():
        if not torch.equal(torch.nan_to_num(got[name]), torch.nan_to_num(grad)):
            raise Mismatch(f"bits of {name}", f"{what}: other bits")


def copied_bytes(p: Problem) -> int:
    """Return the bytes of copies that the budget does not include: a bias and class weights in the dtype of the logits,
    the gradient of the bias in both dtypes, and numbers of tokens if tokens or classes have weights."""
    number = max(4, p.input.dtype.itemsize)
    is_weighted = any(p.kwargs.get(name) is not None for name in ("weight", "token_weight"))
    token_bytes = is_weighted * p.target.numel() * (4 * number + 1)
    if p.input.dtype.itemsize > 2:
        return token_bytes
    vectors = (p.linear_bias is not None) + (p.kwargs.get("weight") is not None)
    has_gradient = p.linear_bias is not None and p.linear_bias.requires_grad
    return len(p.linear_weight) * (4 * vectors + 2 * has_gradient) + token_bytes


def check_again(step: Step, first: Results, plan: flce.ChunkPlan | None) -> None:
    """Run the step a second time: equal bits and, with a plan, the planned memory.

    The workspace must be at most the plan's, and the plan at most 2% + 2 MiB above it, unless tokens are skipped or
    PyTorch's functions allocate the temporary memory.
    """
    read = torch.cuda.memory_stats if plan else dict
    before = read().get("requested_bytes.all.current", 0)
    if plan:
        torch.cuda.reset_peak_memory_stats()
    loss, _, grads = run(step, "eager")
    workspace = read().get("requested_bytes.all.peak", 0) - before - sum(grad.nbytes for grad in grads.values())
    assert_equal({"loss": loss, **grads}, {"loss": first[0], **first[2]}, "second call")
    planned = plan.workspace_bytes if plan else workspace
    is_exact = plan is not None and plan.case.backend == "triton"
    is_exact = is_exact and step.options.skip_ignored is not True and not step.options.sample_below
    most = 1.02 * max(workspace, 0) + 2 * MIB if is_exact else planned
    results = first[1] if step.stats else first[:1]
    held = RESULT_BYTES + copied_bytes(step.p) + sum(t.nbytes for t in results if t is not None)
    if not workspace - held <= planned <= max(most, workspace):
        raise Mismatch("workspace", f"{workspace} bytes, planned {planned}: {plan}")


def memory_of(t: Tensor) -> Tensor:
    """Return the bytes of a tensor's memory, also around the tensor."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def check(call: Call, device: str, errors: Errors) -> None:
    p = arguments.head_of(call, device)
    grads, upstream, mode = call["grads"], arguments.upstream_of(call, p), call["mode"]
    half = DTYPES.get(mode.partition(" ")[2])
    rounded = p if half is None else in_half(p, half)
    parts = {}
    with arguments.backend(call["backend"]), pytest.MonkeyPatch.context() as patch:
        if call["schedule"]:
            forced.force(patch, getattr(forced, call["schedule"]))
        options = options_of(call, rounded, grads)
        plan = plan_for(rounded, options, grads, call["stats"]) if p.target.numel() else None
        if plan is not None and call["accum_dtype"] is not None:
            for_dx = getattr(plan.schedule, "dx_schedule", plan.schedule)
            (rows, _), (_, widths) = (each.tile_sizes(plan.case) for each in (plan.schedule, for_dx))
            parts = {"chunks": -(-p.target.numel() // rows), "blocks": len(widths)}
        leaves = arguments.leaves_of_call(call, p)
        step = Step(leaves, options, call["stats"], upstream, half)
        tensors = (leaves.target, p.kwargs.get("weight"), *arguments.named(leaves).values())
        memory = [memory_of(t) for t in tensors if t is not None]
        before = [each.clone() for each in memory]
        results = run(step, mode)
        if not all(map(torch.equal, memory, before)):
            raise Mismatch("arguments", "were written to")
        if mode == "eager" and (device == "cuda" or call["seed"] % 8 == 0):
            # A plan does not include copies of operands that are not aligned.
            check_again(step, results, plan if device == "cuda" and call["layout"] == "contiguous" else None)
    loss, output, got = results
    has_reference = plan is not None and isinstance(plan.schedule, (Unnormalized, Borrowed))
    how = arguments.arithmetic(call, rounded, **parts)
    how = replace(how, headroom=EXPONENTIAL_HEADROOM if has_reference else 0.0)
    if plan is not None and plan.case.samples:
        how = replace(how, sample_below=call["sample_below"])
    expected = Expected(rounded, upstream, how)
    prefix = f"operator {str(rounded.input.dtype).removeprefix('torch.')}"
    expected.compare_losses(errors, prefix, loss, output, call["stats"])
    expected.compare_gradients(errors, prefix, got)


KIND = Kind("operator", {**defaults(**LOSS, **HEAD), "mode": "eager", "schedule": None}, draw, check, share=4.0)
