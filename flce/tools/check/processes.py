"""Checks of a head that is divided over processes: each runs in every process of a group."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import flce
from flce.core.options import ChunkOptions
from flce.core.shard import bounds, gather
from flce.testing.problem import CallResult, run_stock
from flce.tools.check.checks import DEFAULT, PLANNED, Inputs, InputsCheck, Shape, named, problem_of, truth
from flce.tools.check.results import CheckResult, Missing, Results
from flce.tools.check.suite import loss, usual_backend
from flce.tools.machine import why_no_dtype

# Seconds: of a collective that waits for another process, of all checks, and of the others once a process has ended.
SILENCE, SECONDS, AFTER_THE_FIRST = 60.0, 300.0, 20.0


@dataclass(frozen=True)
class SplitCheck(InputsCheck):
    """The loss and the gradients of this process of the default group; all processes have the same loss."""

    options: ChunkOptions = DEFAULT
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
        return named(CallResult(value.detach(), x.grad, weight.grad, None if bias is None else bias.grad))

    def references(self) -> tuple[Results, Results]:
        stock = named(run_stock(problem_of(self.inputs), self.inputs.grad_output, processes=dist.get_world_size()))
        full = stock, truth(self.inputs)
        first, second = ({what: self._part(what, t) for what, t in each.items()} for each in full)
        return first, second

    def also_wrong(self, ours: Results) -> list[str]:
        losses = gather(self.ours()["loss"], dist.group.WORLD)
        same = all(torch.equal(losses[0], each) for each in losses)
        return super().also_wrong(ours) + ([] if same else ["The processes have different losses."])

    def plan(self) -> str:
        tokens, hidden, vocab = self.inputs.shape
        how: dict[str, Any] = {name: value for name, value in self.inputs.loss if name in PLANNED} | self.group
        how |= {"shards": dist.get_world_size(), "bias_grad": self.inputs.bias}
        return str(flce.plan(tokens, hidden or 0, vocab, self.dtype, device=self.device, **how))

    def _part(self, what: str, full: Tensor) -> Tensor:
        """Return this process's part of a tensor or its gradient."""
        rank, processes = dist.get_rank(), dist.get_world_size()
        if what.startswith("input"):
            return full.chunk(processes, -2)[rank] if self.sequence_parallel else full
        if what.startswith(("weight", "bias")):
            return full[slice(*bounds(self.inputs.shape.vocab, processes, rank))]
        return full


class Where(NamedTuple):
    """Where the processes run."""

    backend: str  # of the group
    device: str  # "cpu" or "cuda", of which each process has one


def place(processes: int, device: torch.device | None) -> Where | Missing:
    """Return GPUs where there are enough, unless a CPU is asked for; else the CPU."""
    if not dist.is_available():
        return Missing("a divided head", "this PyTorch has no torch.distributed")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is not None and device.type == "cuda" and gpus < processes:
        return Missing("a divided head", f"there are {gpus} GPUs for {processes} processes")
    on_gpus = gpus >= processes and (device is None or device.type == "cuda")
    return Where("nccl", "cuda") if on_gpus and dist.is_nccl_available() else Where("gloo", "cpu")


def split_checks(processes: int, where: Where) -> list[SplitCheck]:
    even, uneven, few = 256 * processes, 256 * processes - 3, ChunkOptions(chunk_rows=20)
    cases: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
        ("equal slices", even, {}, {}),
        ("other slices, bias", uneven, {**loss(label_smoothing=0.1, z_loss=1e-3), "bias": True}, {}),
        ("reduction none", uneven, {**loss(reduction="none", softcap=6.0), "ignored": 0.3}, {}),
        ("sequence parallel", uneven, {}, {"sequence_parallel": True}),
        ("sequence parallel, chunks", even, {"ignored": 0.3}, {"sequence_parallel": True, "options": few}),
    ]
    device = torch.device(where.device)
    return [
        SplitCheck.of(
            title, usual_backend(device), Inputs(Shape(32 * processes, 64, vocab), dtype, device, **inputs), **how
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        if why_no_dtype(device, dtype) is None
        for title, vocab, inputs, how in cases
    ]


def run_split(checks: Sequence[SplitCheck], processes: int, where: Where) -> list[CheckResult]:
    """Run each check in every process, up to the first check that some process did not finish."""
    context, until = multiprocessing.get_context("spawn"), time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory() as folder:
        how = processes, where, folder, list(checks), SILENCE
        started = [context.Process(target=_serve, args=(rank, *how), daemon=True) for rank in range(processes)]
        for process in started:
            process.start()
        while (alive := [process for process in started if process.is_alive()]) and time.monotonic() < until:
            if len(alive) < processes:
                until = min(until, time.monotonic() + AFTER_THE_FIRST)
            wait([process.sentinel for process in alive], 1.0)
        for process in started:
            process.kill()
            process.join()
        results: list[CheckResult] = []
        for index, check in enumerate(checks):
            answers = [_answer(Path(folder, f"{index}-{rank}")) for rank in range(processes)]
            together = _together(answers, f"{processes} processes, {where.device}, {where.backend}")
            results.append(replace(together, title=check.title, backend=check.backend))
            if results[-1].status == "failed":
                break
    return results


def _serve(rank: int, processes: int, where: Where, folder: str, checks: list[SplitCheck], silence: float) -> None:
    """Run the checks in one process."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if where.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    how: dict[str, Any] = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": processes}
    dist.init_process_group(where.backend, timeout=timedelta(seconds=silence), **how)
    for index, check in enumerate(checks):
        result = replace(check, device=device, inputs=replace(check.inputs, device=device)).run()
        Path(folder, f"{index}-{rank}").write_bytes(pickle.dumps(result))
        if result.status == "failed":
            break


def _answer(file: Path) -> CheckResult:
    if file.exists():
        found: CheckResult = pickle.loads(file.read_bytes())
        return found
    return CheckResult("", "", "", "", "failed", wrong=(f"ended or gave no answer within {SILENCE:.0f} s.",))


def _together(answers: list[CheckResult], device: str) -> CheckResult:
    """Return one result: the figures that are furthest off, and what is wrong in any process."""
    figures = sorted((figure for each in answers for figure in each.figures), key=lambda figure: figure.share)
    worst = {figure.what: figure for figure in figures}
    status = next((status for status in ("failed", "off") if status in [each.status for each in answers]), "right")
    wrong = tuple(f"rank {rank}: {sentence}" for rank, each in enumerate(answers) for sentence in each.wrong)
    how: Any = {"device": device, "status": status, "figures": tuple(worst.values()), "wrong": wrong}
    return replace(max(answers, key=lambda each: each.seconds), **how)
