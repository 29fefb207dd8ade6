"""Random calls of `flce.linear_logprobs`."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

import flce
from flce.core.problem import OUTPUTS
from flce.testing.oracle import dense_logits, shifted_target, token_results
from tests.search import arguments
from tests.search.arguments import HEAD, LOSS, Rows, by_letter, compare_argmax, defaults
from tests.search.bounds import CHAIN, Gradients, RowGradient, sum_error
from tests.search.driver import Call, Errors, Kind, Mismatch

DIFFERENTIABLE = ("logprob", "entropy", "lse", "candidate_logprob")
OF_LOSSES = {"class_weight", "token_weight", "reduction", "label_smoothing", "z_loss", "num_items", "stats"}
OF_LOSSES |= {"empty_loss", "logits_dtype", "accum_dtype"}
HEADS = defaults(**LOSS, **HEAD)
DEFAULTS: Call = {
    **{name: value for name, value in HEADS.items() if name not in OF_LOSSES},
    "outputs": ("logprob",),
    "candidates": 0,
    "top_k": 0,
    "row_temperature": False,
    "mask": False,
    "retained": False,
    "unused": (),  # results without an upstream gradient
}


def draw(rng: random.Random, compiled: random.Random, device: str) -> Call:
    call = arguments.draw_head(rng, compiled, device)
    more = {
        "outputs": tuple(name for name in OUTPUTS if compiled.random() < 0.35) or ("logprob",),
        "candidates": compiled.choice([0, 0, 1, 5, 75]),
        "top_k": min(call["vocab"], compiled.choice([0, 0, 1, 4])),
        "row_temperature": compiled.random() < 0.15,
        "mask": compiled.random() < 0.15,
        "retained": rng.random() < 0.1,
        "unused": tuple(name for name in DIFFERENTIABLE if compiled.random() < 0.2),
    }
    return {name: value for name, value in call.items() if name in DEFAULTS} | more


def check(call: Call, device: str, errors: Errors) -> None:
    call = {**HEADS, "reduction": "none", **call}
    p, vocab = arguments.head_of(call, device), call["vocab"]
    shape, g = p.target.shape, torch.Generator().manual_seed(call["seed"] + 1)
    transform = {name: call[name] for name in ("softcap", "logit_scale", "temperature")}
    if call["row_temperature"]:
        transform["temperature"] = (torch.rand(shape, generator=g, dtype=torch.float64) + 0.5).float().to(device)
    candidates = torch.randint(-1, vocab, (*shape, call["candidates"]), generator=g).to(device)
    target, mask = p.target, None
    if call["mask"]:
        mask = (torch.rand(shape, generator=g) < 0.6).to(device)
        p = replace(p, target=target.masked_fill(~mask, call["ignore_index"]))
    leaves = arguments.leaves_of_call(call, p)
    needed = arguments.leaves_of(leaves)

    def forward(budget: int | None) -> flce.LinearLogprobsOutput:
        options = {name: call[name] for name in ("chunk_rows", "strategy", "skip_ignored")}
        return flce.linear_logprobs(
            leaves.input,
            leaves.linear_weight,
            target,
            mask=mask,
            candidates=candidates if call["candidates"] else None,
            linear_bias=leaves.linear_bias,
            adapters=leaves.adapters,
            options=flce.ChunkOptions(max_workspace_bytes=budget, **options),
            **{name: call[name] for name in ("top_k", "outputs", "ignore_index", "shift")},
            **transform,
        )

    with arguments.backend(call["backend"]):
        out = arguments.run_within_budget(call, p, forward)
        upstream = {
            name: torch.randn(value.shape, generator=g, dtype=torch.float64).to(value) * call["upstream"]
            for name in DIFFERENTIABLE
            if name not in call["unused"] and (value := getattr(out, name)) is not None
        }
        found = {}
        if upstream and needed:
            total = torch.stack([(getattr(out, name) * each).sum() for name, each in upstream.items()]).sum()
            grads = torch.autograd.grad(total, list(needed.values()), retain_graph=call["retained"])
            found = dict(zip(needed, grads, strict=True))
            if call["retained"] and not all(map(torch.equal, grads, torch.autograd.grad(total, list(needed.values())))):
                raise Mismatch("bits", "the second backward pass has other bits")

    # Results of the valid rows.
    how = arguments.arithmetic({**call, "upstream": 1.0}, p)
    if call["row_temperature"]:
        valid = shifted_target(p.target.long(), call["ignore_index"], call["shift"])[1]
        transform["temperature"] = transform["temperature"].double()[valid][:, None]
    rows = Rows(p, how, call["ignore_index"], call["shift"], **transform)
    logits, y, ids = rows.logits, rows.target, rows.of(candidates, 1)
    (x, w), *pairs = [(x.clone().requires_grad_(), w.clone().requires_grad_()) for x, w in rows.terms]
    bias = None if rows.bias is None else rows.bias.clone().requires_grad_()
    z = dense_logits(x, w, bias, adapters=pairs, **transform)
    expected = token_results(z, y, ids, ignore_index=-(2**40))
    expected["mean_logit"] = z.mean(-1)
    prefix = f"logprobs {call['dtype']}"
    for name, bound in logits.results(y, ids).items():
        got = getattr(out, name)
        if got is not None:
            rows.compare(errors, f"{prefix} {name}", got, expected[name], bound)
            if got.dtype != how.rows or got.requires_grad != (name in DIFFERENTIABLE and bool(needed)):
                raise Mismatch(name, f"{got.dtype}, requires_grad={got.requires_grad}")
    compare_argmax(logits, y, rows.of_indices(out.argmax), rows.of_indices(out.correct, 0))
    if call["top_k"]:
        order = logits.logp.sort(-1, descending=True)
        bound = logits.dlogprob(order.indices[:, : call["top_k"]]) + logits.dz.amax(-1, keepdim=True)
        rows.compare(errors, f"{prefix} top_k", out.top_k_logprob, order.values[:, : call["top_k"]], bound)
        ids_of_rows = rows.of_indices(out.top_k_ids, -1, 1)
        assert ids_of_rows is not None
        taken = logits.logp.gather(1, ids_of_rows)
        rows.compare(errors, f"{prefix} top_k_ids", out.top_k_logprob, taken, bound)
    if not found:
        return

    # Gradients.
    upstreams = {name: rows.of(each.double(), name == "candidate_logprob") for name, each in upstream.items()}
    total = torch.stack([(expected[name] * each).sum() for name, each in upstreams.items()]).sum()
    named = by_letter(x, w, bias, adapters=pairs)
    exact = dict(zip(found, torch.autograd.grad(total, [named[name] for name in found]), strict=True))
    exact = {name: rows.to_positions(grad) if name[0] in "xa" else grad for name, grad in exact.items()}
    zero = torch.zeros_like(logits.lse)
    on_candidates = upstreams.get("candidate_logprob", zero[:, None][:, :0])
    ids = torch.cat((y[:, None], ids[:, : on_candidates.shape[1]]), 1)
    on_classes = torch.cat((upstreams.get("logprob", zero)[:, None], on_candidates), 1) * (ids >= 0)
    terms = torch.cat((upstreams.get("lse", zero)[:, None], -on_classes), 1)

    def of_classes(values: Tensor) -> Tensor:
        return torch.zeros_like(logits.z).scatter_add(1, ids.clamp(min=0), values)

    softmax, direct, counts = terms.sum(1, keepdim=True), of_classes(on_classes), of_classes((ids >= 0).double())
    gradient = RowGradient(
        softmax,
        direct,
        entropy=-upstreams["entropy"][:, None] if "entropy" in upstreams else None,
        dsoftmax=sum_error(terms.shape[1], terms.square().sum(1, keepdim=True), softmax, how)
        + CHAIN * how.u * terms.abs().sum(1, keepdim=True),
        ddirect=sum_error(counts, of_classes(on_classes.square()), direct, how),
        is_candidate=counts > 0,
    )
    rows.compare_gradients(errors, prefix, Gradients(logits, gradient, how), found, exact)


KIND = Kind("logprobs", DEFAULTS, draw, check, share=2.0)
