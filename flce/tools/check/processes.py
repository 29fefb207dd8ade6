"""Whether a head that is divided over processes is exact: the same checks in every process of a group, which ends."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce.core.options import ChunkOptions
from flce.core.problem import LossSpec
from flce.core.shard import bounds, gather
from flce.functional import fused_linear_cross_entropy, plan
from flce.testing import tolerances
from flce.testing.problem import CallResult, run_stock
from flce.testing.tolerances import Tolerance
from flce.tools.check.figures import Figure, Measurement, Results, named
from flce.tools.check.inputs import Inputs, InputsCheck, Shape, problem_of, truth
from flce.tools.check.operator import PLANNED
from flce.tools.check.run import CheckResult, Task, run_one
from flce.tools.check.suite import Missing, usual_backend
from flce.tools.machine import why_no_dtype

# Without a result for so long, processes hang. Once one has failed, the others are waited for less.
SILENCE, AFTER_FAILURE = 60.0, 5.0
_DEFAULT = ChunkOptions()


@dataclass(frozen=True)
class SplitCheck(InputsCheck):
    """Loss and gradients of what this process of the default group has, and that all have the same loss."""

    options: ChunkOptions = _DEFAULT
    sequence_parallel: bool = False

    def measure(self) -> Measurement:
        found = super().measure()
        losses = gather(self.call()["loss"], dist.group.WORLD)
        same = all(torch.equal(losses[0], each) for each in losses)
        return found if same else replace(found, wrong=(*found.wrong, "The processes have different losses."))

    def call(self) -> Results:
        p = problem_of(self.inputs)
        x, weight, bias = (
            None if t is None else self._part(name, t).clone().requires_grad_()
            for name, t in (("input", p.input), ("weight", p.linear_weight), ("bias", p.linear_bias))
        )
        assert x is not None
        assert weight is not None
        loss: Any = fused_linear_cross_entropy(
            x,
            weight,
            p.target,
            linear_bias=bias,
            options=self.options,
            process_group=dist.group.WORLD,
            vocab_size=self.inputs.shape.vocab,
            sequence_parallel=self.sequence_parallel,
            **p.kwargs,
        )
        loss.backward(torch.as_tensor(self.inputs.grad_output).to(loss))
        return named(CallResult(loss.detach(), x.grad, weight.grad, None if bias is None else bias.grad))

    def references(self) -> tuple[Results, Results]:
        stock = named(run_stock(problem_of(self.inputs), self.inputs.grad_output, processes=dist.get_world_size()))
        whole = stock, truth(self.inputs)
        first, second = ({what: self._part(what, t) for what, t in each.items()} for each in whole)
        return first, second

    def tolerance(self) -> Tolerance:
        return tolerances.RESULTS[self.dtype]

    def plan(self) -> str:
        tokens, hidden, vocab = self.inputs.shape
        assert hidden is not None
        how = {name: value for name, value in self.inputs.arguments.items() if name in PLANNED}
        group: dict[str, Any] = {"shards": dist.get_world_size(), "sequence_parallel": self.sequence_parallel}
        group |= {"device": self.inputs.device, "bias_grad": self.inputs.bias, "options": self.options}
        return str(plan(tokens, hidden, vocab, self.dtype, **how, **group))

    def _part(self, what: str, whole: Tensor) -> Tensor:
        """What this process has of a tensor or its gradient."""
        rank, processes = dist.get_rank(), dist.get_world_size()
        if what.startswith("input"):
            return whole.chunk(processes, -2)[rank] if self.sequence_parallel else whole
        if what.startswith(("weight", "bias")):
            return whole[slice(*bounds(self.inputs.shape.vocab, processes, rank))]
        return whole


def split_checks(processes: int, device: torch.device, backend: str) -> Iterator[SplitCheck]:
    """The checks of `processes` processes. `device`: that of each."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        if why_no_dtype(device, dtype) is not None:
            continue

        def made(title: str, vocab: int, dtype: torch.dtype = dtype, **more: Any) -> SplitCheck:
            how = {name: more.pop(name) for name in ("options", "sequence_parallel") if name in more}
            inputs = Inputs(Shape(32 * processes, 64, vocab), dtype, device, **more)
            return SplitCheck(title, inputs, backend, **how)

        even, uneven = 256 * processes, 256 * processes - 3
        yield made("equal slices", even)
        yield made("other slices, bias", uneven, bias=True, loss=LossSpec(label_smoothing=0.1, z_loss=1e-3))
        yield made("reduction none", uneven, loss=LossSpec(reduction="none", softcap=6.0), ignored=0.3)
        yield made("sequence parallel", uneven, sequence_parallel=True)
        few = ChunkOptions(chunk_rows=20)
        yield made("sequence parallel, chunks", even, sequence_parallel=True, options=few, ignored=0.3)


class Where(NamedTuple):
    """Where the processes run."""

    backend: str  # of the group
    device: str  # "cpu" or "cuda", of which each process has one


def place(processes: int, device: torch.device | None) -> Where | Missing:
    """GPUs where there are enough, unless a CPU is asked for; else the CPU."""
    if not dist.is_available():
        return Missing("a divided head", "this PyTorch has no torch.distributed")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is not None and device.type == "cuda" and gpus < processes:
        return Missing("a divided head", f"there are {gpus} GPUs for {processes} processes")
    on_gpus = gpus >= processes and (device is None or device.type == "cuda")
    return Where("nccl", "cuda") if on_gpus and dist.is_nccl_available() else Where("gloo", "cpu")


def run_split(
    checks: Sequence[SplitCheck], processes: int, where: Where, begun: Callable[[Task], None]
) -> list[CheckResult]:
    """Each check in every process; the figures of the process that is furthest off, and what is wrong in any. They end
    with the first check that some process did not finish."""
    context = multiprocessing.get_context("spawn")
    results: list[CheckResult] = []
    with tempfile.TemporaryDirectory() as folder:
        ends, started = [], []
        for rank in range(processes):
            mine, theirs = context.Pipe()
            arguments = theirs, rank, processes, where, str(Path(folder) / "store"), list(checks)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            ends.append(mine)
            started.append(process)
        try:
            for check in checks:
                task = Task(torch.device(where.device), check.backend, check)
                begun(task)
                answers = _answers(ends)
                results.append(_together(answers, f"{processes} processes, {where.device}, {where.backend}", task))
                if len(answers) < processes or any(each.status == "failed" for each in answers.values()):
                    break
        finally:
            for process in started:
                process.kill()
                process.join()
    return results


def _answers(ends: list[Connection]) -> dict[int, CheckResult]:
    """The answers to a check that came in time, by rank."""
    found: dict[int, CheckResult] = {}
    waiting: dict[Any, int] = {end: rank for rank, end in enumerate(ends)}
    until = time.monotonic() + SILENCE
    while waiting and (left := until - time.monotonic()) > 0:
        for end in wait(list(waiting), left):
            rank = waiting.pop(end)
            try:
                found[rank] = ends[rank].recv()
            except EOFError:  # the process has ended
                until = min(until, time.monotonic() + AFTER_FAILURE)
                continue
            if found[rank].status == "failed":
                until = min(until, time.monotonic() + AFTER_FAILURE)
    return found


def _together(answers: dict[int, CheckResult], device: str, task: Task) -> CheckResult:
    """One result of those of all processes."""
    processes = int(device.split()[0])
    silent = [rank for rank in range(processes) if rank not in answers]
    wrong = [f"rank {rank}: {sentence}" for rank, each in sorted(answers.items()) for sentence in each.wrong]
    wrong += [f"rank {rank} ended or gave no answer within {SILENCE:.0f} s." for rank in silent]
    figures: dict[str, Figure] = {}
    for figure in (figure for each in answers.values() for figure in each.figures):
        worst = figures.get(figure.what)
        figures[figure.what] = figure if worst is None or figure.share > worst.share else worst
    failed = bool(silent) or any(each.status == "failed" for each in answers.values())
    return CheckResult(
        device=device,
        backend=task.backend,
        title=task.check.title,
        dtype=str(task.check.dtype).removeprefix("torch."),
        status="failed" if failed else "off" if wrong else "right",
        figures=tuple(figures.values()),
        wrong=tuple(wrong),
        plan=next((each.plan for each in answers.values()), ""),
        seconds=max((each.seconds for each in answers.values()), default=SILENCE),
    )


def _serve(end: Connection, rank: int, processes: int, where: Where, store: str, checks: list[SplitCheck]) -> None:
    """What a process does."""
    torch.set_num_threads(1)
    device = torch.device(where.device, rank) if where.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    how: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": processes}
    dist.init_process_group(where.backend, timeout=timedelta(seconds=SILENCE), **how)
    for check in checks:
        result = run_one(Task(device, check.backend, replace(check, inputs=replace(check.inputs, device=device))))
        end.send(result)
        if result.status == "failed":
            break
    end.recv()  # until the parent ends all


def checks_of(processes: int, where: Where) -> list[SplitCheck]:
    """For every dtype of the device."""
    device = torch.device(where.device)
    return list(split_checks(processes, device, usual_backend(device)))
