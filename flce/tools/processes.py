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
from flce.testing.problem import run_fused, run_stock
from flce.tools.check import DTYPES, Check, CheckResult, Figure, Results, Shape, results_by_name, usual_backend
from flce.tools.machine import why_no_dtype

# Seconds: for a collective, for all checks, and for the other processes after the first process has ended.
COLLECTIVE_TIMEOUT, TOTAL_TIMEOUT, TIMEOUT_AFTER_FIRST_EXIT = 60.0, 300.0, 20.0
GROUPS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class SplitCheck(Check):
    """A call with this process's shard of the head. The group has all processes, which have equal losses."""

    sequence_parallel: bool = False

    def ours(self) -> Results:
        names = {"x": "input", "w": "weight", "b": "bias"}
        p = self.problem.map(lambda t, letter: self._shard(names[letter], t))
        divided = {"process_group": dist.group.WORLD, "vocab_size": self.shape.vocab}
        p = p.with_(**divided, sequence_parallel=self.sequence_parallel)
        return results_by_name(run_fused(p, grad_output=self.upstream, **self.call))

    def references(self) -> tuple[Results, Results]:
        stock = results_by_name(run_stock(self.problem, self.upstream, processes=dist.get_world_size()))
        first, second = (
            {what: self._shard(what, t) for what, t in each.items()} for each in (stock, super().references()[1])
        )
        return first, second

    def other_faults(self, ours: Results) -> list[str]:
        losses = all_gather(self.ours()["loss"], dist.group.WORLD)
        same = all(torch.equal(losses[0], each) for each in losses)
        return super().other_faults(ours) + ([] if same else ["The processes have different losses."])

    def plan_arguments(self) -> dict[str, Any]:
        shards = {"shards": dist.get_world_size(), "sequence_parallel": self.sequence_parallel}
        return super().plan_arguments() | shards

    def _shard(self, what: str, full: Tensor) -> Tensor:
        """Return the shard of a tensor, or of its gradient, of this process."""
        rank, processes = dist.get_rank(), dist.get_world_size()
        if what.startswith("input"):
            return full.chunk(processes, -2)[rank] if self.sequence_parallel else full
        if what.startswith(("weight", "bias")):
            return full[slice(*shard_bounds(self.shape.vocab, processes, rank))]
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
    device, chunks = choose_device(processes, device), {"options": ChunkOptions(chunk_rows=20)}
    even, uneven = (Shape(32 * processes, 64, vocab) for vocab in (256 * processes, 256 * processes - 3))
    smoothed = {"label_smoothing": 0.1, "z_loss": 1e-3, "bias": True}
    checks = (
        SplitCheck("equal shards", shape=even),
        SplitCheck("other shards, bias", smoothed, shape=uneven),
        SplitCheck("reduction none", {"reduction": "none", "softcap": 6.0, "ignored": 0.3}, shape=uneven),
        SplitCheck("sequence parallel", {"ignored": 0.3}, chunks, even, sequence_parallel=True),
    )
    dtypes = [dtype for dtype in DTYPES if why_no_dtype(device, dtype) is None]
    place = {"device": device, "backend": usual_backend(device)}
    return [replace(check, dtype=dtype, **place) for check, dtype in itertools.product(checks, dtypes)]


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
    device = checks[0].device
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    settings: dict[str, Any] = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": processes}
    dist.init_process_group(GROUPS[device.type], timeout=timedelta(seconds=timeout), **settings)
    for index, check in enumerate(checks):
        result = replace(check, device=device).run()
        Path(folder, f"{index}-{rank}").write_text(json.dumps(asdict(result)))
        if result.status == "failed":
            break


def _read_result(file: Path) -> CheckResult:
    if not file.exists():
        message = f"ended or gave no result within {COLLECTIVE_TIMEOUT:.0f} s."
        return CheckResult("", "", "", "", "failed", wrong=(message,))
    fields: dict[str, Any] = json.loads(file.read_text())
    return CheckResult(**fields | {"figures": tuple(Figure(**figure) for figure in fields["figures"])})


def _merge_results(check: SplitCheck, files: list[Path]) -> CheckResult:
    """Return one result for all processes: of each figure the worst, and the faults of all processes."""
    answers = [_read_result(file) for file in files]
    figures = sorted((figure for each in answers for figure in each.figures), key=lambda figure: figure.share)
    device = f"{len(files)} processes, {check.device.type}, {GROUPS[check.device.type]}"
    return replace(
        max(answers, key=lambda each: ("right", "off", "failed").index(each.status)),
        device=device,
        backend=check.backend,
        title=check.title,
        figures=tuple({figure.what: figure for figure in figures}.values()),
        wrong=tuple(f"rank {rank}: {sentence}" for rank, each in enumerate(answers) for sentence in each.wrong),
    )
