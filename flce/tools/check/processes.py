"""Checks of a head that is divided over processes, for `flce check --processes`. Each process runs every check."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce.core.options import ChunkOptions
from flce.core.shard import all_gather, shard_bounds
from flce.ops.dtensors import from_local
from flce.testing.problem import run_fused, run_stock
from flce.tools.check.checks import (
    DEFAULT_OPTIONS,
    Check,
    CheckResult,
    Figure,
    Inputs,
    Results,
    Shape,
    create_problem,
    plan_text,
    results_by_name,
)
from flce.tools.check.suite import DTYPES, loss, usual_backend
from flce.tools.machine import why_no_dtype

# Seconds: for a collective, for all checks, and for the other processes after the first process has ended.
COLLECTIVE_TIMEOUT, TOTAL_TIMEOUT, TIMEOUT_AFTER_FIRST_EXIT = 60.0, 300.0, 20.0
GROUPS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class SplitCheck(Check):
    """Check of the loss and the gradients of this process in the default group. All processes have equal losses."""

    options: ChunkOptions = DEFAULT_OPTIONS
    sequence_parallel: bool = False
    dtensors: bool = False

    def ours(self) -> Results:
        names = {"x": "input", "w": "weight", "b": "bias"}
        full = create_problem(self.inputs)
        p = full.map(lambda t, letter: self._shard(names[letter], t))
        settings: dict[str, Any] = {"options": self.options, "grad_output": self.inputs.grad_output}
        if self.dtensors:
            shapes = {"x": full.input.shape, "w": full.linear_weight.shape, "b": full.linear_weight.shape[:1]}
            settings["place"] = lambda t, letter: self._dtensor(t, letter == "x", shapes[letter])
        else:
            group, vocab_size = dist.group.WORLD, self.inputs.shape.vocab
            p = p.with_(process_group=group, vocab_size=vocab_size, sequence_parallel=self.sequence_parallel)
        return results_by_name(run_fused(p, **settings))

    def _dtensor(self, local: Tensor, is_input: bool, shape: torch.Size) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor import Shard as ShardPlacement

        mesh = init_device_mesh(local.device.type, (dist.get_world_size(),))
        dim = local.dim() - 2 if is_input else 0
        is_replicated = is_input and not self.sequence_parallel
        return from_local(local, shape, mesh, [Replicate() if is_replicated else ShardPlacement(dim)])

    def references(self) -> tuple[Results, Results]:
        stock = run_stock(create_problem(self.inputs), self.inputs.grad_output, processes=dist.get_world_size())
        full = results_by_name(stock), super().references()[1]
        first, second = ({what: self._shard(what, t) for what, t in each.items()} for each in full)
        return first, second

    def other_failures(self, ours: Results) -> list[str]:
        losses = all_gather(self.ours()["loss"], dist.group.WORLD)
        same = all(torch.equal(losses[0], each) for each in losses)
        return super().other_failures(ours) + ([] if same else ["The processes have different losses."])

    def plan(self) -> str:
        settings: Any = {"sequence_parallel": self.sequence_parallel, "options": self.options}
        return plan_text(self.inputs, shards=dist.get_world_size(), bias_grad=self.inputs.bias, **settings)

    def _shard(self, what: str, full: Tensor) -> Tensor:
        """Return the shard of a tensor, or of its gradient, of this process."""
        rank, processes = dist.get_rank(), dist.get_world_size()
        if what.startswith("input"):
            return full.chunk(processes, -2)[rank] if self.sequence_parallel else full
        if what.startswith(("weight", "bias")):
            return full[slice(*shard_bounds(self.inputs.shape.vocab, processes, rank))]
        return full


def choose_device(processes: int, device: torch.device | None) -> torch.device:
    """Return the device type of the processes: GPUs if there are enough and `device` is not a CPU, else the CPU."""
    if not dist.is_available():
        raise ValueError("needs torch.distributed, which this PyTorch does not have")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is not None and device.type == "cuda" and gpus < processes:
        raise ValueError(f"there are {gpus} GPUs for {processes} processes")
    on_gpus = gpus >= processes and (device is None or device.type == "cuda") and dist.is_nccl_available()
    return torch.device("cuda" if on_gpus else "cpu")


def split_checks(processes: int, device: torch.device | None) -> list[SplitCheck]:
    """Return the checks on the device type that `choose_device` returns."""
    device, few = choose_device(processes, device), ChunkOptions(chunk_rows=20)
    even, uneven = 256 * processes, 256 * processes - 3
    cases: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
        ("equal slices", even, {}, {}),
        ("other slices, bias", uneven, {**loss(label_smoothing=0.1, z_loss=1e-3), "bias": True}, {}),
        ("reduction none", uneven, {**loss(reduction="none", softcap=6.0), "ignored": 0.3}, {}),
        ("sequence parallel", uneven, {}, {"sequence_parallel": True}),
        ("sequence parallel, chunks", even, {"ignored": 0.3}, {"sequence_parallel": True, "options": few}),
        ("DTensors, bias", uneven, {**loss(z_loss=1e-3), "bias": True}, {"dtensors": True}),
        ("DTensors, sequence parallel", even, {}, {"dtensors": True, "sequence_parallel": True}),
    ]
    found = []
    for dtype, (title, vocab, inputs, settings) in itertools.product(DTYPES, cases):
        if why_no_dtype(device, dtype) is None:
            all_inputs = Inputs(Shape(32 * processes, 64, vocab), dtype, device, **inputs)
            found.append(SplitCheck(title, usual_backend(device), all_inputs, **settings))
    return found


def run_split(checks: Sequence[SplitCheck], processes: int) -> list[CheckResult]:
    """Run each check in every process. Stop after the first check that failed in a process."""
    context, ranks = multiprocessing.get_context("spawn"), range(processes)
    with tempfile.TemporaryDirectory() as folder:
        arguments = processes, folder, list(checks), COLLECTIVE_TIMEOUT
        started = [context.Process(target=_run_checks, args=(rank, *arguments), daemon=True) for rank in ranks]
        for process in started:
            process.start()
        wait([process.sentinel for process in started], TOTAL_TIMEOUT)  # until the first process ends
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


def _run_checks(rank: int, processes: int, folder: str, checks: list[SplitCheck], timeout: float) -> None:
    torch.set_num_threads(1)
    device = checks[0].inputs.device
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    settings: dict[str, Any] = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": processes}
    dist.init_process_group(GROUPS[device.type], timeout=timedelta(seconds=timeout), **settings)
    for index, check in enumerate(checks):
        result = replace(check, inputs=replace(check.inputs, device=device)).run()
        Path(folder, f"{index}-{rank}").write_text(json.dumps(asdict(result)))
        if result.status == "failed":
            break


def _read_result(file: Path) -> CheckResult:
    fields: dict[str, Any] = json.loads(file.read_text())
    figures = tuple(Figure(**figure) for figure in fields.pop("figures"))
    return CheckResult(**{**fields, "figures": figures, "wrong": tuple(fields["wrong"])})


def _merge_results(check: SplitCheck, files: list[Path]) -> CheckResult:
    """Return one result for all processes: of each figure the worst, and the faults of all processes."""
    message = f"ended or gave no result within {COLLECTIVE_TIMEOUT:.0f} s."
    no_result = CheckResult("", "", "", "", "failed", wrong=(message,))
    answers = [_read_result(file) if file.exists() else no_result for file in files]
    figures = sorted((figure for each in answers for figure in each.figures), key=lambda figure: figure.share)
    worst = {figure.what: figure for figure in figures}
    wrong = tuple(f"rank {rank}: {sentence}" for rank, each in enumerate(answers) for sentence in each.wrong)
    device = f"{len(files)} processes, {check.inputs.device.type}, {GROUPS[check.inputs.device.type]}"
    worst_answer = max(answers, key=lambda each: ("right", "off", "failed").index(each.status))
    fields: Any = {"backend": check.backend, "title": check.title, "figures": tuple(worst.values()), "wrong": wrong}
    return replace(worst_answer, device=device, **fields)
