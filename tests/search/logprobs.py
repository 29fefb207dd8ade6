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
from tests.search.arguments import HEAD_DEFAULTS, LOSS_DEFAULTS, compare_argmax
from tests.search.bounds import Gradients, Logits, RowGradient
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
    target, valid = shifted_target(p.target.long(), call["ignore_index"], call["shift"])
    rows = valid.reshape(-1).nonzero().flatten()
    count = p.target.numel()

    def of_rows(x: Tensor, trailing: int = 0) -> Tensor:
        """Return the valid rows of a tensor with a value, or `trailing` dimensions of values, for each position."""
        return x.reshape(count, *x.shape[x.dim() - trailing :])[rows]

    y, ids = of_rows(target), of_rows(candidates, 1)
    terms = [(of_rows(a.double(), 1), w.double()) for a, w in ((p.input, p.linear_weight), *p.adapters)]
    bias = None if p.linear_bias is None else p.linear_bias.double()
    each = of_rows(temperature.double())[:, None] if call["row_temperature"] else temperature
    transform = {"softcap": call["softcap"], "logit_scale": call["logit_scale"], "temperature": each}
    wide = [(x.clone().requires_grad_(), w.clone().requires_grad_()) for x, w in terms]
    wide_bias = None if bias is None else bias.clone().requires_grad_()
    (x, w), *pairs = wide
    z = dense_logits(x, w, wide_bias, adapters=pairs, **transform)
    expected = token_results(z, y, ids, ignore_index=-(2**40))
    logits = Logits(terms, bias, how, **transform)
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
        got = getattr(out, name)
        if got is not None:
            if got.detach()[~valid].count_nonzero():
                raise Mismatch(name, "an ignored position is not 0")
            errors.compare(f"{prefix} {name}", of_rows(got.detach(), bound.dim() - 1), expected[name], bound)
    if out.argmax is not None:
        compare_argmax(logits, of_rows(out.argmax), z.detach().argmax(-1))
    if call["top_k"]:
        assert out.top_k_logprob is not None
        assert out.top_k_ids is not None
        values, order = of_rows(out.top_k_logprob.detach(), 1), logits.logp.sort(-1, descending=True)
        bound = logits.dlogprob(order.indices[:, : call["top_k"]], u) + logits.dz.amax(-1, keepdim=True)
        errors.compare(f"{prefix} top_k", values, order.values[:, : call["top_k"]], bound)
        taken = logits.logp.gather(1, of_rows(out.top_k_ids, 1))
        errors.compare(f"{prefix} top_k_ids", values, taken, bound)

    if not found:
        return
    upstreams = {name: of_rows(each.double(), name == "candidate_logprob") for name, each in upstream.items()}
    wanted = [t for pair in wide for t in pair] + ([] if wide_bias is None else [wide_bias])
    names = ["x", "w", *(f"{letter}{k}" for k in range(len(p.adapters)) for letter in "aB")]
    total = torch.stack([(expected[name] * each).sum() for name, each in upstreams.items()]).sum()
    exact = dict(zip([*names, "b"], torch.autograd.grad(total, wanted), strict=False))
    zero = torch.zeros_like(logits.lse)
    direct = torch.zeros_like(logits.z)
    on_target, on_lse = upstreams.get("logprob", zero), upstreams.get("lse", zero)
    direct.scatter_add_(1, y[:, None], on_target[:, None])
    on_candidates = upstreams.get("candidate_logprob")
    softmax = on_lse - on_target
    if on_candidates is not None:
        on_candidates = on_candidates * (ids >= 0)
        direct.scatter_add_(1, ids.clamp(min=0), on_candidates)
        softmax = softmax - on_candidates.sum(-1)
    entropy = -upstreams["entropy"][:, None] if "entropy" in upstreams else None
    gradients = Gradients(logits, RowGradient(softmax[:, None], direct, entropy), how)
    largest = torch.finfo(p.input.dtype).max
    for name, got in found.items():
        if name[0] in "xa":
            if got[~valid].count_nonzero():
                raise Mismatch(f"gradient {name}", "an ignored position is not 0")
            w = p.linear_weight if name == "x" else p.adapters[int(name[1:])][1]
            got, bound = of_rows(got, 1), gradients.times_weight(w.double())
        elif name == "b":
            bound = gradients.transposed_times(logits.z.new_ones(len(rows), 1))[:, 0]
        else:
            bound = gradients.transposed_times(terms[0 if name == "w" else 1 + int(name[1:])][0])
        errors.compare(f"{prefix} gradient {name[0]}", got, exact[name], bound, largest)


KIND = Kind("logprobs", DEFAULTS, draw, check, share=2.0)
