"""Rows of a head that is divided over processes: the kernel beside the formulas in PyTorch, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flce.backends import get_backend
from flce.backends.contract import log_sum_exp
from flce.core.problem import LinearCrossEntropyProblem, LinearTerm, LossSpec, Needs
from flce.core.shard import Shard
from flce.engine import vectors
from flce.engine.arena import Arena
from flce.engine.selection import Selection
from flce.engine.shards import Slice
from flce.engine.vectors import LossScales

VOCAB, CLASSES, PROCESSES, RANK = 20, 7, 3, 1
SPECS = {
    "plain": LossSpec("mean", stats=("logprob",)),
    "z-loss": LossSpec("sum", z_loss=0.1, ignore_index=3),
    "softcap": LossSpec("mean", softcap=30.0, logit_scale=0.5, temperature=0.7),
    "scale": LossSpec("mean", logit_scale=-0.5),
}


class _Group:
    def size(self) -> int:
        return PROCESSES

    def rank(self) -> int:
        return RANK


def sent_of(logits: Tensor, target: Tensor, wrong: bool = False) -> Tensor:
    """What processes send of rows with these logits z: an offset, which need not be the largest of their classes."""
    told = []
    for process in range(PROCESSES):
        mine = logits[:, process * CLASSES : (process + 1) * CLASSES].double()
        local = target - process * CLASSES
        here = (local >= 0) & (local < mine.shape[1])
        local = torch.where(here, local, torch.arange(len(local), device=local.device) % mine.shape[1])
        largest = mine.amax(1)
        offset = torch.where(torch.arange(len(local), device=local.device) % 2 == 0, largest, largest + 40.0)
        lse = mine.logsumexp(1)
        log_sum = torch.where(largest == -torch.inf, 0.0, lse - offset)
        logprob = mine.log_softmax(1).gather(1, local[:, None])[:, 0]
        width = mine.new_full((1,), mine.shape[1] + wrong * (process == 2))
        told.append(torch.cat((offset, log_sum, logprob, width)).float())
    return torch.stack(told)


def results(
    spec: LossSpec, logits: Tensor, target: Tensor, sent: Tensor, kernel: bool, patch: pytest.MonkeyPatch, **more: Any
) -> dict[str, Tensor]:
    rows, device = len(target), target.device
    patch.setattr(Shard, "process_group", _Group())
    patch.setattr(Slice, "_sent", lambda self, part: (sent, ["offset", "log_sum", "logprob"]))
    patch.setattr(Slice, "_has_kernel", kernel)
    term = LinearTerm(torch.zeros(rows, 8, device=device), torch.zeros(CLASSES, 8, device=device))
    needs = Needs((True,), (True,), False)
    problem = LinearCrossEntropyProblem(
        (term,),
        target,
        None,
        more.get("class_weight"),
        more.get("token_weight"),
        None,
        spec,
        needs,
        shard=Shard("none", RANK * CLASSES, VOCAB),
    )
    selection, arena = Selection(problem, None), Arena(device)
    out = vectors.allocate(problem, rows, arena)
    scales = LossScales(problem, get_backend(device), with_gradients=True)
    factors = torch.zeros(2, rows, device=device)
    factors[0] = torch.linspace(0.5, 2.0, rows, device=device)
    split = Slice(problem, selection, scales, arena, out.normalizer, out)
    split.complete_factors(slice(0, rows), factors)
    made = {"loss": out.loss.clone(), "lse": log_sum_exp(out.normalizer), "f": factors[0], "t": factors[1]}
    out.loss.fill_(torch.nan)
    split.complete(slice(0, rows))
    made["row gradient"] = split.row_gradient(slice(0, rows))[:2]
    assert torch.equal(made["loss"], out.loss) or made["loss"].isnan().any()
    return made | {name: t for name, t in (("z_loss", out.z_loss), ("logprob", out.logprob)) if t is not None}


def rows_of_all_kinds(device: torch.device) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(70, VOCAB, generator=draw) * 4
    target = torch.randint(VOCAB, (70,), generator=draw)
    row = torch.arange(70)
    logits[row[10:20], target[10:20]] += 60.0  # certain
    logits[row[20:30], target[20:30]] -= 60.0  # of hardly any probability
    logits[30:34, :CLASSES] = -torch.inf  # a process without any
    logits[34:38] += 5000.0
    logits[38:42, CLASSES : 2 * CLASSES] -= 200.0
    logits[row[42:44], target[42:44]] = -torch.inf
    logits[44], logits[45, 9], logits[46, 19] = -torch.inf, torch.inf, torch.inf
    target[50:54] = 3
    return logits.to(device), target.to(device)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("weights", [False, True])
def test_kernel(
    name: str, weights: bool, triton_backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, (logits, target) = SPECS[name], rows_of_all_kinds(device)
    z = spec.cap * torch.tanh(logits / spec.cap) if spec.softcap else logits
    more: dict[str, Any] = {}
    if weights:
        more["class_weight"] = torch.linspace(0.5, 2.0, VOCAB, device=device)
        more["token_weight"] = torch.linspace(-1.0, 2.0, len(target), device=device)
    sent = sent_of(z, target)
    made, right = (results(spec, z, target, sent, kernel, monkeypatch, **more) for kernel in (True, False))
    for key, value in right.items():
        torch.testing.assert_close(made[key], value, rtol=2e-5, atol=1e-12, equal_nan=True, msg=key)
    nll = torch.nn.functional.cross_entropy(z.double(), target, reduction="none")
    if name == "plain" and not weights:
        usual = torch.ones_like(target, dtype=torch.bool)
        usual[34:38] = False  # float32 has few digits of their logits
        torch.testing.assert_close(made["loss"].double()[usual], nll[usual], rtol=1e-5, atol=1e-12, equal_nan=True)
        lse = z.double().logsumexp(1).masked_fill(target == spec.ignore_index, 0.0)
        torch.testing.assert_close(made["lse"].double(), lse, rtol=1e-6, atol=1e-6)


def test_processes_with_other_numbers_of_classes(
    triton_backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, target = rows_of_all_kinds(device)
    sent = sent_of(logits, target, wrong=True)
    for kernel in (True, False):
        assert results(SPECS["plain"], logits, target, sent, kernel, monkeypatch)["loss"].isnan().all()
