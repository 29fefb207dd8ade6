"""Compare the losses of docs/rl.md with the formulas of their papers, written here with all logits in float64."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.core.problem import OUTPUTS

TEXT = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
LOSSES = {re.findall(r"def (\w+)", block)[0]: block for block in BLOCKS if block.startswith("def ")}
B, T, H, V = 4, 9, 16, 50
TEMPERATURE = 0.7


@dataclass
class Data:
    """A batch and the heads of several models."""

    hidden: Tensor
    heads: dict[str, Tensor]
    labels: Tensor
    advantage: Tensor  # (B,)
    token_advantages: Tensor  # (B, T)
    good: Tensor  # (B,)


def create_data(dtype: torch.dtype) -> Data:
    g = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    w = normal(V, H)
    heads = {"new": w, **{name: w + 0.1 * normal(V, H) for name in ("old", "ref", "teacher")}}
    labels = torch.randint(V, (B, T), generator=g)
    for row, prompt in enumerate((2, 3, 5, 1)):
        labels[row, :prompt] = -100
    labels[1, 7:] = -100  # after the end of an answer
    advantage, token_advantages = torch.tensor([-1.0, -1.5, 0.5, 1.3]), normal(B, T)
    x = normal(B, T, H).requires_grad_()
    heads["new"].requires_grad_()
    return Data(x, heads, labels, advantage.to(dtype), token_advantages, torch.tensor([True, False, True, False]))


# Expected values are computed from sequences of log-probabilities, one token after the other.


@dataclass
class Sequence:
    """Tokens of an answer, with their log-probabilities."""

    places: list[int]  # positions of the hidden states that predict the tokens
    logprobs: list[Tensor]  # (V,) of each token
    classes: list[int]

    @property
    def chosen(self) -> list[Tensor]:
        return [row[label] for row, label in zip(self.logprobs, self.classes, strict=True)]


def answers(x: Tensor, w: Tensor, labels: Tensor, temperature: float = TEMPERATURE) -> list[Sequence]:
    logits = x @ w.T / temperature
    sequences = []
    for row, ids in zip(logits, labels.tolist(), strict=True):
        places = [t for t in range(len(ids) - 1) if ids[t + 1] >= 0]
        logprobs = [row[t] - row[t].exp().sum().log() for t in places]
        sequences.append(Sequence(places, logprobs, [ids[t + 1] for t in places]))
    return sequences


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum() / len(values)


def clipped_gain(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """Return the smaller of the clipped and the unclipped gain, by cases."""
    if advantage >= 0:
        return advantage * (ratio if ratio < 1 + high else ratio.detach() * 0 + 1 + high)
    return advantage * (ratio if ratio > 1 - low else ratio.detach() * 0 + 1 - low)


def ratios(new: Sequence, old: Sequence) -> list[Tensor]:
    return [p.exp() / q.exp() for p, q in zip(new.chosen, old.chosen, strict=True)]


Dense = dict[str, list[Sequence]]


def expected_grpo(d: Dense, data: Data) -> Tensor:
    rows = []
    for new, old, ref, a in zip(d["new"], d["old"], d["ref"], data.advantage.tolist(), strict=True):
        divergences = [r - r.log() - 1 for r in ratios(ref, new)]
        gains = [clipped_gain(r, a, 0.2, 0.2) for r in ratios(new, old)]
        rows.append(mean([gain - 0.04 * kl for gain, kl in zip(gains, divergences, strict=True)]))
    return -mean(rows)


def expected_dapo(d: Dense, data: Data) -> Tensor:
    each = zip(d["new"], d["old"], data.advantage.tolist(), strict=True)
    return -mean([clipped_gain(r, a, 0.2, 0.28) for new, old, a in each for r in ratios(new, old)])


def expected_cispo(d: Dense, data: Data) -> Tensor:
    tokens = []
    for new, old, a in zip(d["new"], d["old"], data.advantage.tolist(), strict=True):
        for logprob, ratio in zip(new.chosen, ratios(new, old), strict=True):
            tokens.append(min(ratio.item(), 3.0) * a * logprob)
    return -mean(tokens)


def expected_gspo(d: Dense, data: Data) -> Tensor:
    rows = []
    for new, old, a in zip(d["new"], d["old"], data.advantage.tolist(), strict=True):
        product = torch.stack(ratios(new, old)).prod()
        rows.append(clipped_gain(product ** (1 / len(new.places)), a, 3e-4, 4e-4))
    return -mean(rows)


def expected_ppo(estimate: str) -> Callable[[Dense, Data], Tensor]:
    def loss(d: Dense, data: Data) -> Tensor:
        tokens = []
        for new, old, ref, advantages in zip(d["new"], d["old"], d["ref"], data.token_advantages.tolist(), strict=True):
            both = zip(new.places, new.logprobs, ratios(new, old), ratios(ref, new), strict=True)
            for place, row, ratio, r in both:
                kl = {"k1": -r.log(), "k2": 0.5 * r.log() ** 2, "k3": r - 1 - r.log()}[estimate]
                entropy = -sum(p * p.log() for p in row.exp())
                tokens.append(clipped_gain(ratio, advantages[place], 0.2, 0.2) - 0.05 * kl + 0.01 * entropy)
        return -mean(tokens)

    return loss


def log_ratio(p: Sequence, q: Sequence) -> Tensor:
    return torch.stack(p.chosen).sum() - torch.stack(q.chosen).sum()


def expected_dpo(d: Dense, data: Data) -> Tensor:
    r = [log_ratio(new, ref) for new, ref in zip(d["new"], d["ref"], strict=True)]
    return mean([(1 + (-0.1 * (r[i] - r[i + B // 2])).exp()).log() for i in range(B // 2)])


def expected_kto(p: str, q: str) -> Callable[[Dense, Data], Tensor]:
    def loss(d: Dense, data: Data) -> Tensor:
        z = max(0.0, mean([log_ratio(a, b) for a, b in zip(d[p], d[q], strict=True)]).item())
        rows = []
        for new, ref, good in zip(d["new"], d["ref"], data.good.tolist(), strict=True):
            gain, limit = 0.1 * (log_ratio(new, ref) - z), 2.0 if good else 1.5
            rows.append(limit - limit / (1 + (-gain if good else gain).exp()))
        return mean(rows)

    return loss


def expected_sampled(d: Dense, data: Data) -> Tensor:
    tokens = []
    for new, old, teacher in zip(d["new"], d["old"], d["teacher"], strict=True):
        tokens += [r * t.log() for r, t in zip(ratios(new, old), ratios(old, teacher), strict=True)]
    return mean(tokens)


def outputs(data: Data, head: str) -> Any:
    return flce.linear_logprobs(data.hidden, data.heads[head], data.labels, shift=1, temperature=TEMPERATURE)


def arguments(function: Callable[..., Tensor], data: Data, names: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function of the page: values by the parameter's name, or by another name in `names`."""
    out: Any = outputs(data, "new")
    values = {
        **vars(data),
        "W": data.heads["new"],
        "mask": torch.nn.functional.pad(data.labels[:, 1:] != -100, (0, 1)),
        "logprob": out.logprob,
        "entropy": out.entropy,
        **{name: outputs(data, name).logprob.detach() for name in ("old", "ref", "teacher")},
    }
    sources = {name: names.get(name, name) for name in inspect.signature(function).parameters}
    return {name: values.get(source, source) for name, source in sources.items() if source in values or name in names}


# The function of the page, the expected loss, and parameters with other values than those of their names.
CASES: dict[str, tuple[str, Callable[[Dense, Data], Tensor], dict[str, Any]]] = {
    "GRPO": ("grpo", expected_grpo, {}),
    "DAPO": ("dapo", expected_dapo, {}),
    "CISPO": ("cispo", expected_cispo, {}),
    "GSPO": ("gspo", expected_gspo, {}),
    **{
        f"PPO {k}": ("ppo", expected_ppo(k), {"advantage": "token_advantages", "estimate": k})
        for k in ("k1", "k2", "k3")
    },
    "DPO": ("dpo", expected_dpo, {}),
    **{
        f"KTO, {p}": ("kto", expected_kto(p, q), {"other": p, "other_ref": q, "of_good": 2.0, "of_bad": 1.5})
        for p, q in (("teacher", "old"), ("old", "teacher"))  # with both signs of the divergence
    },
    "sampled": ("distill_sampled", expected_sampled, {}),
}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_a_loss_equals_its_paper(case: str, dtype: torch.dtype, tolerance: float, torch_backend: str) -> None:
    name, expected_loss, other_names = CASES[case]
    data, names = create_data(dtype), {"flce": flce, "torch": torch}
    exec(LOSSES[name], names)
    function: Any = names[name]
    ours = function(**arguments(function, data, other_names))

    x, w = (t.detach().double().requires_grad_() for t in (data.hidden, data.heads["new"]))
    dense = {k: answers(x.detach(), head.detach().double(), data.labels, TEMPERATURE) for k, head in data.heads.items()}
    dense["new"] = answers(x, w, data.labels, TEMPERATURE)
    expected = expected_loss(dense, data)

    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)
    got = torch.autograd.grad(ours, (data.hidden, data.heads["new"]))
    for gradient, correct in zip(got, torch.autograd.grad(expected, (x, w)), strict=True):
        assert correct.norm() > 0
        assert (gradient.double() - correct).norm() <= tolerance * correct.norm()


def test_each_has_at_most_twelve_lines() -> None:
    assert {*LOSSES} == {name for name, _, _ in CASES.values()}
    assert max(len(block.splitlines()) for block in LOSSES.values()) <= 12


def test_all_results_are_in_the_table() -> None:
    rows = dict(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|.* (yes|no) \|$", TEXT, re.M))
    differentiable = {
        name for names, gradient in rows.items() if gradient == "yes" for name in re.findall(r"\w+", names)
    }
    assert {name for names in rows for name in re.findall(r"\w+", names)} == {*vars(flce.LinearLogprobsOutput())}
    x, w, y = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4), torch.tensor([1, 2, 3])
    out = flce.linear_logprobs(x, w, y, candidates=y[:2], top_k=2, outputs=OUTPUTS)
    assert {name for name, value in vars(out).items() if value.requires_grad} == differentiable
