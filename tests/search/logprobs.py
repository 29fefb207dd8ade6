"""Random calls of `flce.linear_logprobs`."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import flce
from flce.core.problem import OUTPUTS
from flce.testing.oracle import dense_logits, shifted_target, token_results
from tests.helpers import least_budget
from tests.search import arguments
from tests.search.arguments import HEAD_DEFAULTS, LOSS_DEFAULTS, Rows, compare_argmax
from tests.search.bounds import Gradients, RowGradient
from tests.search.driver import Call, Errors, Kind, Mismatch

ARGUMENTS: tuple[str, ...] = (
    "dtype",
    "backend",
    "vocab",
    "ignored",
    "ignore_index",
    "target_dtype",
    "std",
    "seed",
    "softcap",
)
ARGUMENTS += ("logit_scale", "temperature", "shift", "upstream")
DIFFERENTIABLE = ("logprob", "entropy", "lse", "candidate_logprob")
DEFAULTS: dict[str, Any] = {
    **{name: value for name, value in LOSS_DEFAULTS.items() if name in ARGUMENTS},
    **{name: value for name, value in HEAD_DEFAULTS.items() if name not in ("logits_dtype", "accum_dtype")},
    "outputs": ("logprob",),
    "candidates": 0,
    "top_k": 0,
    "row_temperature": False,
    "retained": False,
}
# Arguments of losses, for `arguments.problem_of`.
NO_LOSS = {name: value for name, value in LOSS_DEFAULTS.items() if name not in ARGUMENTS} | {"reduction": "none"}
HALF = {"logits_dtype": None, "accum_dtype": None}


def draw(rng: random.Random, device: str) -> Call:
    call = arguments.draw_head(rng, device)
    more = {
        "outputs": tuple(name for name in OUTPUTS if rng.random() < 0.35) or ("logprob",),
        "candidates": rng.choice([0, 0, 1, 5]),
        "top_k": min(call["vocab"], rng.choice([0, 0, 1, 4])),
        "row_temperature": rng.random() < 0.15,
        "retained": rng.random() < 0.1,
    }
    return {name: value for name, value in call.items() if name in DEFAULTS} | more


def check(call: dict[str, Any], device: str, errors: Errors) -> None:
    call = {**NO_LOSS, **HALF, **call}
    p = arguments.head_of(call, device)
    grads = "".join(letter for letter in call["grads"] if letter in "xw" + "b" * call["bias"] + "aB")
    shape, g = p.target.shape, torch.Generator().manual_seed(call["seed"] + 1)
    temperature: Any = call["temperature"]
    if call["row_temperature"]:
        temperature = (torch.rand(shape, generator=g, dtype=torch.float64) + 0.5).float().to(device)
    candidates = torch.randint(-1, call["vocab"], (*shape, call["candidates"]), generator=g).to(device)
    leaves = p.map(lambda t, letter: t.detach().requires_grad_(letter in grads))
    named = {"x": leaves.input, "w": leaves.linear_weight, "b": leaves.linear_bias}
    for k, pair in enumerate(leaves.adapters):
        named |= dict(zip((f"a{k}", f"B{k}"), pair, strict=True))
    needed = {name: t for name, t in named.items() if t is not None and t.requires_grad}

    def forward(budget: int | None) -> flce.LinearLogprobsOutput:
        options = {name: call[name] for name in ("chunk_rows", "strategy", "skip_ignored")}
        return flce.linear_logprobs(
            leaves.input,
            leaves.linear_weight,
            p.target,
            candidates=candidates if call["candidates"] else None,
            top_k=call["top_k"],
            outputs=call["outputs"],
            linear_bias=leaves.linear_bias,
            adapters=leaves.adapters,
            temperature=temperature,
            softcap=call["softcap"],
            logit_scale=call["logit_scale"],
            ignore_index=call["ignore_index"],
            shift=call["shift"],
            options=flce.ChunkOptions(max_workspace_bytes=budget, **options),
        )

    with arguments.backend(call["backend"]):
        budget = None
        if call["beyond"] is not None and p.target.numel():
            try:
                forward(1)
                budget = 1 + call["beyond"]
            except ValueError as error:
                budget = least_budget(str(error), forward) + call["beyond"]
        out = forward(budget)
        upstream = {
            name: torch.randn(value.shape, generator=g, dtype=torch.float64).to(value) * call["upstream"]
            for name in DIFFERENTIABLE
            if (value := getattr(out, name)) is not None
        }
        found: dict[str, Tensor] = {}
        if upstream and needed:
            total = torch.stack([(getattr(out, name) * each).sum() for name, each in upstream.items()]).sum()
            grads_of = torch.autograd.grad(total, list(needed.values()), retain_graph=call["retained"])
            found = dict(zip(needed, grads_of, strict=True))
            if call["retained"] and not all(
                map(torch.equal, grads_of, torch.autograd.grad(total, list(needed.values())))
            ):
                raise Mismatch("bits", "the second backward pass has other bits")

    # Expected results of the valid rows.
    how = arguments.arithmetic({**call, "upstream": 1.0}, p)
    transform = {name: call[name] for name in ("softcap", "logit_scale", "temperature")}
    if call["row_temperature"]:
        valid = shifted_target(p.target.long(), call["ignore_index"], call["shift"])[1]
        transform["temperature"] = temperature.double()[valid][:, None]
    rows = Rows(p, how, call["ignore_index"], call["shift"], **transform)
    logits, y, ids = rows.logits, rows.target, rows.of(candidates, 1)
    wide = [(x.clone().requires_grad_(), w.clone().requires_grad_()) for x, w in rows.terms]
    wide_bias = None if rows.bias is None else rows.bias.clone().requires_grad_()
    (x, w), *pairs = wide
    z = dense_logits(x, w, wide_bias, adapters=pairs, **transform)
    expected = token_results(z, y, ids, ignore_index=-(2**40))
    u, squares = how.u, (2.0 * logits.logp).softmax(-1)
    steps = u * (z.shape[1] + 4.0)
    bounds = {
        "logprob": logits.dlogprob(y[:, None], u)[:, 0],
        "entropy": logits.dentropy,
        "lse": logits.dlse + logits.of_oracle,
        "candidate_logprob": logits.dlogprob(ids.clamp(min=0), u),
        "mean_logit": logits.dz.square().mean(-1).sqrt() + steps * logits.z.abs().mean(-1),
        "log_sum_sq_prob": 2.0 * ((squares - logits.p) * logits.dz).square().sum(-1).sqrt()
        + 4.0 * logits.dsum
        + u * (squares * logits.logp.abs()).sum(-1) * 4.0
        + 2.0 * logits.of_oracle,
    }
    expected["mean_logit"], expected["log_sum_sq_prob"] = z.mean(-1), (2.0 * z.log_softmax(-1)).logsumexp(-1)
    prefix = f"logprobs {call['dtype']}"
    for name, bound in bounds.items():
        if getattr(out, name) is not None:
            rows.compare(errors, f"{prefix} {name}", getattr(out, name), expected[name], bound)
    if out.argmax is not None:
        compare_argmax(logits, rows.of(out.argmax), z.detach().argmax(-1))
    if call["top_k"]:
        assert out.top_k_logprob is not None
        assert out.top_k_ids is not None
        order = logits.logp.sort(-1, descending=True)
        bound = logits.dlogprob(order.indices[:, : call["top_k"]], u) + logits.dz.amax(-1, keepdim=True)
        rows.compare(errors, f"{prefix} top_k", out.top_k_logprob, order.values[:, : call["top_k"]], bound)
        taken = logits.logp.gather(1, rows.of(out.top_k_ids, 1))
        rows.compare(errors, f"{prefix} top_k_ids", out.top_k_logprob, taken, bound)
    if not found:
        return
    upstreams = {name: rows.of(each.double(), name == "candidate_logprob") for name, each in upstream.items()}
    wanted = [t for pair in wide for t in pair] + ([] if wide_bias is None else [wide_bias])
    names = ["x", "w", *(f"{letter}{k}" for k in range(len(p.adapters)) for letter in "aB")]
    total = torch.stack([(expected[name] * each).sum() for name, each in upstreams.items()]).sum()
    exact = dict(zip([*names, "b"], torch.autograd.grad(total, wanted), strict=False))
    exact = {name: rows.to_positions(grad) if name[0] in "xa" else grad for name, grad in exact.items()}
    zero = torch.zeros_like(logits.lse)
    direct = torch.zeros_like(logits.z)
    on_target, on_lse = upstreams.get("logprob", zero), upstreams.get("lse", zero)
    direct.scatter_add_(1, y[:, None], on_target[:, None])
    on_candidates = upstreams.get("candidate_logprob")
    softmax, size = on_lse - on_target, on_lse.abs() + on_target.abs()
    if on_candidates is not None:
        on_candidates = on_candidates * (ids >= 0)
        direct.scatter_add_(1, ids.clamp(min=0), on_candidates)
        softmax, size = softmax - on_candidates.sum(-1), size + on_candidates.abs().sum(-1)
    entropy = -upstreams["entropy"][:, None] if "entropy" in upstreams else None
    gradients = Gradients(logits, RowGradient(softmax[:, None], direct, entropy, size=size[:, None]), how)
    rows.compare_gradients(errors, prefix, gradients, found, exact)


KIND = Kind("logprobs", DEFAULTS, draw, check, share=2.0)
