"""Checks of a head that is divided over processes: each runs in every process of a group."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flce
from flce.core.options import ChunkOptions
from flce.core.shard import all_gather, shard_bounds
from flce.testing.problem import CallResult, run_stock
from flce.tools.check.checks import (
    DEFAULT_OPTIONS,
    Check,
    CheckResult,
    Inputs,
    Results,
    Shape,
    plan_of,
    problem_of,
    results_by_name,
)
from flce.tools.check.suite import DTYPES, loss, usual_backend
from flce.tools.machine import why_no_dtype

# Seconds: of a collective that waits for another process, of all checks, and of the others once a process has ended.
COLLECTIVE_TIMEOUT, TOTAL_TIMEOUT, TIMEOUT_AFTER_FIRST_EXIT = 60.0, 300.0, 20.0
GROUPS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class SplitCheck(Check):
    """The loss and the gradients of this process of the default group; all processes have the same loss."""

    options: ChunkOptions = DEFAULT_OPTIONS
    sequence_parallel: bool = False

    @property
    def group(self) -> dict[str, Any]:
        return {"sequence_parallel": self.sequence_parallel, "options": self.options}

    def ours(self) -> Results:
        p = problem_of(self.inputs)
        given = {"input": p.input, "weight": p.linear_weight, "bias": p.linear_bias}
        mine = {n: None if t is None else self._part(n, t).clone().requires_grad_() for n, t in given.items()}
        x, weight, bias = mine.values()
        assert x is not None
        assert weight is not None
        how: dict[str, Any] = {"process_group": dist.group.WORLD, "vocab_size": self.inputs.shape.vocab, **self.group}
        value: Any = flce.fused_linear_cross_entropy(x, weight, p.target, linear_bias=bias, **how, **p.kwargs)
        value.backward(torch.as_tensor(self.inputs.grad_output).to(value))
        return results_by_name(CallResult(value.detach(), x.grad, weight.grad, None if bias is None else bias.grad))

    def references(self) -> tuple[Results, Results]:
        stock = run_stock(problem_of(self.inputs), self.inputs.grad_output, processes=dist.get_world_size())
        full = results_by_name(stock), super().references()[1]
        first, second = ({what: self._part(what, t) for what, t in each.items()} for each in full)
        return first, second

    def other_failures(self, ours: Results) -> list[str]:
        losses = all_gather(self.ours()["loss"], dist.group.WORLD)
        same = all(torch.equal(losses[0], each) for each in losses)
        return super().other_failures(ours) + ([] if same else ["The processes have different losses."])

    def plan(self) -> str:
        return plan_of(self.inputs, shards=dist.get_world_size(), bias_grad=self.inputs.bias, **self.group)

    def _part(self, what: str, full: Tensor) -> Tensor:
        """Return this process's part of a tensor or its gradient."""
        rank, processes = dist.get_rank(), dist.get_world_size()
        if what.startswith("input"):
            return full.chunk(processes, -2)[rank] if self.sequence_parallel else full
        if what.startswith(("weight", "bias")):
            return full[slice(*shard_bounds(self.inputs.shape.vocab, processes, rank))]
        return full


def choose_place(processes: int, device: torch.device | None) -> torch.device:
    """Return the GPUs' type where there are enough, unless a CPU is asked for; else the CPU.

    Raises:
        ValueError: the processes cannot run.
    """
    if not dist.is_available():
        raise ValueError("needs torch.distributed, which this PyTorch does not have")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is not None and device.type == "cuda" and gpus < processes:
        raise ValueError(f"there are {gpus} GPUs for {processes} processes")
    on_gpus = gpus >= processes and (device is None or device.type == "cuda") and dist.is_nccl_available()
    return torch.device("cuda" if on_gpus else "cpu")


def split_checks(processes: int, device: torch.device | None) -> list[SplitCheck]:
    """Return the checks on this device, or on any; see `choose_place`."""
    device, few = choose_place(processes, device), ChunkOptions(chunk_rows=20)
    even, uneven = 256 * processes, 256 * processes - 3
    cases: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
        ("equal slices", even, {}, {}),
        ("other slices, bias", uneven, {**loss(label_smoothing=0.1, z_loss=1e-3), "bias": True}, {}),
        ("reduction none", uneven, {**loss(reduction="none", softcap=6.0), "ignored": 0.3}, {}),
        ("sequence parallel", uneven, {}, {"sequence_parallel": True}),
        ("sequence parallel, chunks", even, {"ignored": 0.3}, {"sequence_parallel": True, "options": few}),
    ]
    found = []
    for dtype, (title, vocab, inputs, how) in itertools.product(DTYPES, cases):
        if why_no_dtype(device, dtype) is None:
            given = Inputs(Shape(32 * processes, 64, vocab), dtype, device, **inputs)
            found.append(SplitCheck(title, usual_backend(device), given, **how))
    return found


def run_split(checks: Sequence[SplitCheck], processes: int) -> list[CheckResult]:
    """Run each check in every process, up to the first check that some process did not finish."""
    context, ranks = multiprocessing.get_context("spawn"), range(processes)
    with tempfile.TemporaryDirectory() as folder:
        how = processes, folder, list(checks), COLLECTIVE_TIMEOUT
        started = [context.Process(target=_run_checks, args=(rank, *how), daemon=True) for rank in ranks]
        for process in started:
            process.start()
        wait([process.sentinel for process in started], TOTAL_TIMEOUT)  # for the first to end
        for process in started:
            process.join(TIMEOUT_AFTER_FIRST_EXIT)
            process.kill()
            process.join()
        results: list[CheckResult] = []
        for index, check in enumerate(checks):
            results.append(_merge_results(check, [Path(folder, f"{index}-{rank}") for rank in ranks]))
            if results[-1].status == "failed":
                break
    return results


def _run_checks(rank: int, processes: int, folder: str, checks: list[SplitCheck], silence: float) -> None:
    """Run the checks in one process."""
    torch.set_num_threads(1)
    device = checks[0].inputs.device
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    how: dict[str, Any] = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": processes}
    dist.init_process_group(GROUPS[device.type], timeout=timedelta(seconds=silence), **how)
    for index, check in enumerate(checks):
        result = replace(check, inputs=replace(check.inputs, device=device)).run()
        Path(folder, f"{index}-{rank}").write_bytes(pickle.dumps(result))
        if result.status == "failed":
            break


def _merge_results(check: SplitCheck, files: list[Path]) -> CheckResult:
    """Return one result of all processes: the figures that are furthest off, and what is wrong in any."""
    none = CheckResult("", "", "", "", "failed", wrong=(f"ended or gave no answer within {COLLECTIVE_TIMEOUT:.0f} s.",))
    answers: list[CheckResult] = [pickle.loads(file.read_bytes()) if file.exists() else none for file in files]
    figures = sorted((figure for each in answers for figure in each.figures), key=lambda figure: figure.share)
    worst = {figure.what: figure for figure in figures}
    wrong = tuple(f"rank {rank}: {sentence}" for rank, each in enumerate(answers) for sentence in each.wrong)
    device = f"{len(files)} processes, {check.inputs.device.type}, {GROUPS[check.inputs.device.type]}"
    first = max(answers, key=lambda each: ("right", "off", "failed").index(each.status))
    how: Any = {"backend": check.backend, "title": check.title, "figures": tuple(worst.values()), "wrong": wrong}
    return replace(first, device=device, **how)
