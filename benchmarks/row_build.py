"""Kernels of rows, compiled ahead in several processes, each for a share of the tasks.

Every number of columns has kernels of its own, and compiling them one after the other takes longer than measuring. The
processes fill the caches on disk of Triton and of torch.compile, where the process that measures finds them. Nothing
depends on it: what is missing there is compiled later.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Sequence

import torch

from benchmarks.measure import release
from benchmarks.row_contenders import make_calls, row_contenders
from benchmarks.row_problem import TASKS, RowCase, Task, make_rows

MOST_WORKERS = 16


def default_workers(device: torch.device) -> int:
    return min(MOST_WORKERS, os.cpu_count() or 1) if device.type == "cuda" else 0


def build_ahead(cases: Sequence[RowCase], device: torch.device, workers: int, seconds: float) -> int:
    """The number of kernel sets that were built in the given time, in as many processes."""
    # One size after the other, so that the largest, which need much memory, are not built at the same time.
    units = [(case, task, str(device)) for task in TASKS for case in cases if task in case.tasks]
    units.sort(key=lambda unit: not unit[0].compiled)  # what takes longest first
    if not workers or not units:
        return 0
    ends, done = time.monotonic() + seconds, 0
    # Leaving the block ends the processes, whatever they are at.
    with multiprocessing.get_context("spawn").Pool(workers, begin) as pool:
        results = pool.imap_unordered(build, units)
        for _ in units:
            try:
                done += results.next(max(ends - time.monotonic(), 0.1))
            except multiprocessing.TimeoutError:
                break
    return done


def begin() -> None:
    """One thread in each process: they are many."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    torch.set_num_threads(1)


def build(unit: tuple[RowCase, Task, str]) -> int:
    """Calls everybody once. What fails here fails again where it is measured, and is reported there."""
    case, task, name = unit
    done = 0
    with contextlib.suppress(Exception):  # such as no memory beside the other processes
        device = torch.device(name)
        problem = make_rows(case, device, calls=1)
        for contender in row_contenders(case, task):
            if contender.builds and contender.unavailable(device) is None:
                with contextlib.suppress(Exception):
                    make_calls(contender, problem, task).once()
                    done += 1
    release()
    return done
