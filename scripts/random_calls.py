"""Random calls of the operator on a GPU, compared with float64: random rows and options, logits that are never rounded.

    python scripts/random_calls.py --count 500 --seed 0

A call fails if its error of dX or dW is above the error of stock, above LIMITS *and* above a millionth of the norm of
the terms of the targets alone: if a model is certain, the gradient is far smaller than rounding errors. The program
prints the worst calls and, for calls that fail, all their arguments. Options are drawn from few combinations for each
seed, because each combination compiles separate kernels.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flce
from flce.testing.problem import ALL_GRADS, Problem, make_problem, relative_error, run_fused, run_oracle, run_stock

# Relative to the gradient's norm: half a percent. One rounding of each entry causes a quarter of that.
LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
OF_TARGETS = 1e-6
MAX_LOGITS = 1 << 27
COMBINATIONS = 12


class Call(NamedTuple):
    problem: Problem
    options: flce.ChunkOptions
    stats: tuple[str, ...]
    upstream: Tensor | float
    offset: float
    drawn: str


def combination(draw: random.Random) -> dict[str, Any]:
    """Return random arguments of a loss that differ from its defaults."""
    values = {
        "softcap": draw.choice([5.0, 30.0]),
        "temperature": draw.choice([0.7, 1.5]),
        "logit_scale": draw.choice([0.25, 2.0]),
        "label_smoothing": draw.choice([0.1, 0.5]),
        "z_loss": draw.choice([1e-4, 1e-2]),
        "class_weight": True,
        "token_weight": True,
        "bias": True,
        "adapter_ranks": draw.choice([(8,), (4, 16)]),
    }
    chosen = {name: value for name, value in values.items() if draw.random() < 0.2}
    return {"dtype": draw.choice(list(LIMITS)), "reduction": draw.choice(["mean", "sum", "none"]), **chosen}


def drawn_call(draw: random.Random, loss_options: dict[str, Any]) -> Call:
    """Return a call of random sizes and logits. Some of its rows are 0, 30 or 100 times the others."""
    tokens = round(2 ** draw.uniform(0, 12))
    vocab = min(round(2 ** draw.uniform(1, 18)), MAX_LOGITS // tokens)
    hidden = draw.choice([64, 128, 129, 256, 511, 512, 1023, 1024, 2048])
    std, seed = draw.choice([0.1, 1.0, 4.0, 12.0]), draw.randrange(1 << 30)
    times, offset, odd = draw.choice([None, 0.0, 30.0, 100.0]), draw.choice([0.0, 0.0, 50.0]), draw.random() < 0.15
    budget = draw.choice([None, None, 24 << 20, 64 << 20, 512 << 20])
    skip: Any = draw.choice([False, True, "auto"])
    strategy: Any = draw.choice(["auto", "auto", "tokens", "vocab"])
    stats = tuple(name for name in ("lse", "logprob", "entropy", "argmax") if draw.random() < 0.1)
    upstream = 2.0**14 if loss_options["dtype"] == torch.float16 else draw.choice([1.0, 1.7])
    words = {k: v for k, v in locals().items() if k not in ("draw", "loss_options")} | loss_options

    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(seed)
    ignored = draw.choice([0.0, 0.3])
    sizes: dict[str, Any] = {"std": std, "ignored": ignored, "device": device, "generator": generator}
    p = make_problem((tokens,), hidden, vocab, **sizes, **loss_options)
    x, weight = p.input, p.linear_weight
    if times is not None:
        x = torch.where(torch.rand(tokens, 1, device=device, generator=generator) < 0.2, x * times, x)
    if offset:  # of all logits
        x, weight = x.clone(), weight.clone()
        x[:, 0], weight[:, 0] = 1.0, offset
    if odd:
        x, weight = ((t.new_empty(t.numel() + 1)[1:].view(t.shape)).copy_(t) for t in (x, weight))
    per_token = loss_options["reduction"] == "none"
    given = torch.rand(tokens, device=device, generator=generator) * upstream if per_token else upstream
    options = flce.ChunkOptions(max_workspace_bytes=budget, skip_ignored=skip, strategy=strategy)
    return Call(replace(p, input=x, linear_weight=weight), options, stats, given, offset, f"{words} {ignored=}")


def weights_of(call: Call) -> Tensor:
    """Return the (N,) factors of each token's cross entropy in the loss, times the upstream gradient."""
    p, kwargs = call.problem, call.problem.kwargs
    valid = p.target != -100
    weight = valid.float() * kwargs.get("token_weight", 1.0)
    if kwargs["reduction"] == "mean":
        of_class = kwargs["weight"].float()[p.target.clamp_min(0)] if "weight" in kwargs else torch.ones_like(weight)
        weight = weight / (of_class * valid).sum()
    return weight * call.upstream


def distance(call: Call, name: str, got: Tensor, exact: Tensor) -> float:
    """Return the relative error. The column of an offset of all logits is excluded: its exact gradient is 0."""
    if name == "dX" and call.offset:
        got, exact = got[:, 1:], exact[:, 1:]
    return relative_error(got, exact)


def target_norms(call: Call) -> dict[str, float]:
    """Return the norms of the terms of the targets alone in dX and dW."""
    p, weight = call.problem, weights_of(call)
    scale = p.kwargs.get("logit_scale", 1.0) / p.kwargs.get("temperature", 1.0)
    y = p.target.clamp_min(0)
    of_x = (p.linear_weight[y].double() * weight[:, None] * scale).norm().item()
    return {"dX": of_x, "dW": (p.input.double() * weight[:, None] * scale).norm().item()}


def failures(call: Call) -> Iterator[tuple[str, float, float]]:
    """Yield for dX and dW the name, the error and, if the error is too large, the error of stock; else NaN."""
    p = call.problem
    mine = run_fused(p, options=call.options, stats=call.stats, grads=ALL_GRADS, grad_output=call.upstream)
    oracle = run_oracle(p, call.upstream)
    assert oracle.grad_input is not None
    assert oracle.grad_weight is not None
    exact = {"dX": oracle.grad_input, "dW": oracle.grad_weight}
    for name, got in (("dX", mine.grad_input), ("dW", mine.grad_weight)):
        assert got is not None
        size, dtype = exact[name].norm().item(), p.input.dtype
        error = distance(call, name, got, exact[name])
        if error <= LIMITS[dtype]:
            yield name, error, float("nan")
        elif exact[name].abs().max() < torch.finfo(dtype).max and error * size > OF_TARGETS * target_norms(call)[name]:
            stock = run_stock(p, call.upstream)
            of_stock = stock.grad_input if name == "dX" else stock.grad_weight
            assert of_stock is not None
            yield name, error, distance(call, name, of_stock, exact[name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no call begins after these seconds")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    combinations = [combination(draw) for _ in range(COMBINATIONS)]
    done, failed, worst = 0, 0, {"dX": (0.0, ""), "dW": (0.0, "")}
    end = time.monotonic() + arguments.seconds
    for number in range(arguments.count):
        if time.monotonic() > end:
            break
        call = drawn_call(draw, draw.choice(combinations))
        try:
            found = list(failures(call))
        except ValueError as refused:
            if "too small" not in str(refused):
                raise
            continue  # no plan fits the budget
        done += 1
        for name, error, stock in found:
            if stock == stock and not error <= stock:
                failed += 1
                print(f"FAILED seed {arguments.seed} call {number}: {name} {error:.2e}, stock {stock:.2e}", flush=True)
                print(call.drawn, flush=True)
            elif not error <= worst[name][0]:
                worst[name] = error, call.drawn
        torch.cuda.empty_cache()  # other processes may draw calls on the same device
    for name, (error, drawn) in worst.items():
        print(f"worst within the limits: {name} {error:.2e}: {drawn}")
    print(f"seed {arguments.seed}: {done} calls, {failed} failed", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
