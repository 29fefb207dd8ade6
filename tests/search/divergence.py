"""Random calls of `flce.linear_divergence`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flce
from flce.testing.oracle import dense_logits
from tests.ops.test_linear_divergence import OUTPUTS, divergence_of
from tests.search import arguments
from tests.search.arguments import DTYPES, HEAD, LOSS, Rows, by_letter, defaults
from tests.search.bounds import CHAIN, KAPPA, Arithmetic, Gradients, Logits, equal_part, unit
from tests.search.driver import Call, Errors, Kind, Mismatch
from tests.search.logprobs import OF_LOSSES

HEADS = defaults(**LOSS, **HEAD)
DEFAULTS: Call = {
    **{name: value for name, value in HEADS.items() if name not in OF_LOSSES},
    "kind": "forward_kl",
    "beta": 0.5,
    "teacher_dtype": None,
    "teacher_hidden": 4,
    "teacher_rank": 0,
    "teacher_bias": False,
    "teacher_softcap": None,
    "teacher_logit_scale": 1.0,
    "outputs": ("divergence",),
}


def draw(rng: random.Random, compiled: random.Random, device: str) -> Call:
    call = arguments.draw_head(rng, compiled, device)
    more = {
        "kind": compiled.choice(["forward_kl", "reverse_kl", "jsd"]),
        "beta": rng.choice([0.5, 0.1, 0.9]),
        # Logits of a half-precision teacher are float32, which is no error of a float64 student.
        "teacher_dtype": compiled.choice([None, None, "bfloat16", "float64"]) if call["dtype"] != "float64" else None,
        "teacher_hidden": compiled.choice([1, 4, 8, 24] if device == "cpu" else [8, 64, 129, 256]),
        "teacher_rank": compiled.choice([0, 0, 0, 3]),
        "teacher_bias": compiled.random() < 0.2,
        "teacher_softcap": rng.choice([3.0, 30.0]) if compiled.random() < 0.2 else None,
        "teacher_logit_scale": rng.choice([-0.7, 0.1, 2.5]) if compiled.random() < 0.2 else 1.0,
        "outputs": tuple(name for name in OUTPUTS if compiled.random() < 0.5) or ("divergence",),
    }
    return {name: value for name, value in call.items() if name in DEFAULTS} | more


class DivergenceGradients(Gradients):
    """Gradients of the student's logits, for upstream gradients of the divergence, the log-probability and entropy."""

    def __init__(
        self, student: Logits, teacher: Logits, value: Tensor, terms: Tensor, common: Tensor, how: Arithmetic
    ) -> None:
        """`value`: the gradient; `terms`: the sizes of its terms; `common`: (N, 1) errors of the row."""
        self.how, jacobian = how, student.jacobian
        self.value = self.smooth = value * jacobian
        self.direct = torch.zeros_like(value)
        relative = torch.expm1((student.dlogp + teacher.dlogp).clamp(max=50.0))
        error = jacobian.abs() * terms * (relative + CHAIN * how.u) + terms * student.djacobian
        error = error + self.tiny(student, how) * how.upstream
        self.equal = terms * student.of_saturated
        if how.gradients != how.rows:
            rounding = unit(how.gradients) * self.value.abs()
            error, self.equal = error + KAPPA * rounding, self.equal + equal_part(rounding, self.value)
        if len(terms):
            error = error + how.subnormal * student.scale * terms.amax()
        self.independent = error
        self.coherence = torch.ones_like(value[:, :1])
        of_rows = student.dlog_sum + teacher.dlog_sum + how.u * (6.0 + student.log_sum + teacher.log_sum)
        self.common = [(terms * jacobian, torch.expm1(of_rows.clamp(max=50.0))), (student.p * jacobian, common[:, 0])]


def check(call: Call, device: str, errors: Errors) -> None:
    call = {**HEADS, "reduction": "none", **call}
    p, vocab, shape = arguments.head_of(call, device), call["vocab"], call["leading"]
    dtype, g = DTYPES[call["teacher_dtype"] or call["dtype"]], torch.Generator().manual_seed(call["seed"] + 1)

    def normal(*size: int, std: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=g, dtype=torch.float64) * std).to(device, dtype)

    hidden = call["teacher_hidden"]
    widths = [hidden, call["teacher_rank"]] if call["teacher_rank"] else [hidden]
    std = min(call["std"], 4.0)
    teacher, *adapters = [(normal(*shape, size), normal(vocab, size, std=std / size**0.5)) for size in widths]
    their_pairs = [(arguments.spoil(call, x, p.target), w) for x, w in (teacher, *adapters)]
    teacher_bias = normal(vocab) if call["teacher_bias"] else None
    leaves = arguments.leaves_of_call(call, p)
    needed = arguments.leaves_of(leaves)
    needed.pop("t", None)
    transform = {name: call[name] for name in ("softcap", "logit_scale", "temperature")}
    theirs = {"softcap": call["teacher_softcap"], "logit_scale": call["teacher_logit_scale"]}
    theirs["temperature"] = call["temperature"]

    def forward(budget: int | None) -> Any:
        options = {name: call[name] for name in ("chunk_rows", "strategy", "skip_ignored")}
        return flce.linear_divergence(
            leaves.input,
            leaves.linear_weight,
            *their_pairs[0],
            kind=call["kind"],
            beta=call["beta"] if call["kind"] == "jsd" else None,
            temperature=call["temperature"],
            target=p.target,
            student_bias=leaves.linear_bias,
            teacher_bias=teacher_bias,
            student_softcap=call["softcap"],
            student_logit_scale=call["logit_scale"],
            teacher_softcap=call["teacher_softcap"],
            teacher_logit_scale=call["teacher_logit_scale"],
            student_adapters=leaves.adapters,
            teacher_adapters=their_pairs[1:],
            options=flce.ChunkOptions(max_workspace_bytes=budget, **options),
            **{name: call[name] for name in ("outputs", "ignore_index", "shift")},
        )

    with arguments.backend(call["backend"]):
        out = arguments.run_within_budget(call, p, forward)
        upstream = {
            name: torch.randn(shape, generator=g, dtype=torch.float64).to(getattr(out, name)) * call["upstream"]
            for name in call["outputs"]
        }
        found = {}
        if needed:
            total = torch.stack([(getattr(out, name) * each).sum() for name, each in upstream.items()]).sum()
            found = dict(zip(needed, torch.autograd.grad(total, list(needed.values())), strict=True))

    how = arguments.arithmetic({**call, "upstream": 1.0}, p)
    rows = Rows(p, how, call["ignore_index"], call["shift"], **transform)
    student, y = rows.logits, rows.target
    teacher_terms = [(rows.of(x.double(), 1), w.double()) for x, w in (teacher, *adapters)]
    bias = None if teacher_bias is None else teacher_bias.double()
    other = Logits(teacher_terms, bias, how, **theirs)
    (x, w), *pairs = [(x.clone().requires_grad_(), w.clone().requires_grad_()) for x, w in rows.terms]
    own_bias = None if rows.bias is None else rows.bias.clone().requires_grad_()
    z = dense_logits(x, w, own_bias, adapters=pairs, **transform)
    leaf, t = z.detach().requires_grad_(), other.z.detach().requires_grad_()
    divergence, logprob = divergence_of(leaf, t, call["kind"], call["beta"]), leaf.log_softmax(-1)
    expected = {"divergence": divergence, "logprob": logprob.gather(1, y[:, None])[:, 0]}
    expected["entropy"] = -(logprob.exp() * logprob).sum(-1)
    ds, dt = torch.autograd.grad(divergence.sum(), (leaf, t), retain_graph=True)
    ratio = (student.logp - other.logp).abs()
    weights = {"forward_kl": other.p, "reverse_kl": student.p}.get(call["kind"], student.p + other.p)
    sizes = 3.0 + ratio + student.below + other.below + (student.log_sum + other.log_sum)[:, None]
    bound = (ds * student.dz).square().sum(-1).sqrt() + (dt * other.dz).square().sum(-1).sqrt()
    bound = bound + (ds * student.drift).sum(-1).abs() + (dt * other.drift).sum(-1).abs()
    bound = bound + how.u * (weights * sizes).sum(-1) + (student.dsum + other.dsum) * (1.0 + (weights * ratio).sum(-1))
    bound = bound + 2.0 * (student.of_oracle + other.of_oracle)
    bounds = {"divergence": bound, **student.results(y)}
    prefix = f"divergence {call['dtype']}"
    for name in OUTPUTS:
        got = getattr(out, name)
        if (got is None) == (name in call["outputs"]):
            raise Mismatch(name, "is missing or was not requested")
        if got is not None:
            rows.compare(errors, f"{prefix} {name}", got, expected[name], bounds[name])
    if not found:
        return
    ups = {name: rows.of(each.double()) for name, each in upstream.items()}
    zero = torch.zeros_like(student.lse)
    total = torch.stack([(expected[name] * each).sum() for name, each in ups.items()]).sum()
    (value,) = torch.autograd.grad(total, leaf)
    named = by_letter(x, w, own_bias, adapters=pairs)
    grads = torch.autograd.grad(z, [named[name] for name in found], value)
    exact = dict(zip(found, grads, strict=True))
    exact = {name: rows.to_positions(grad) if name[0] in "xa" else grad for name, grad in exact.items()}
    of_kl, of_y, of_entropy = (ups.get(name, zero).abs()[:, None] for name in OUTPUTS)
    own = student.p * (1.0 + ratio + divergence.detach()[:, None])
    terms = of_kl * (student.p + other.p if call["kind"] == "forward_kl" else own)
    terms = terms + of_y * (student.p + torch.zeros_like(student.p).scatter(1, y[:, None], 1.0))
    terms = terms + of_entropy * student.p * (student.logp.abs() + student.entropy[:, None] + 1.0)
    common = of_kl * bound[:, None] + of_entropy * student.dentropy[:, None]
    largest = max(1.0, sum(each.abs().amax().item() for each in ups.values() if each.numel()))
    how = replace(how, roundings=1, upstream=largest)
    gradients = DivergenceGradients(student, other, value, terms, common, how)
    rows.compare_gradients(errors, prefix, gradients, found, exact)


KIND = Kind("divergence", DEFAULTS, draw, check)
