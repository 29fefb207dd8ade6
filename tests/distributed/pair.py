"""Processes with a process group of gloo or NCCL, in which tests run functions.

A test calls :meth:`World.run` with a function of a module and its arguments. Every process calls the function. The
results are in the order of the ranks. An error in a process is raised in the test, with the traceback of the process.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

CALL_TIMEOUT = 120  # seconds of one call

# Each import takes seconds. Without a GPU one process imports these modules, and the others are forked from it.
SLOW_IMPORTS = ["tests.distributed.training", "transformers.models.llama.modeling_llama", "peft", "accelerate"]
SLOW_IMPORTS += ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "deepspeed", "lightning.fabric"]


def skip_with_fewer_gpus(processes: int) -> None:
    """Skip processes of Transformers' tensor parallelism: each uses its GPU if there is any, and never the CPU."""
    if 0 < torch.cuda.device_count() < processes:
        pytest.skip("needs a GPU for each process, or none")


class World:
    """Processes with one process group.

    Args:
        size: number of processes.
        backend: "gloo", or "cpu:gloo,cuda:nccl" with a GPU for each process.
        imports: modules that each process needs, if this is the first world.
    """

    def __init__(self, size: int, backend: str = "gloo", imports: Sequence[str] = SLOW_IMPORTS) -> None:
        self.size, self.backend, self.imports = size, backend, imports
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, survivors: int | None = None, **kwargs: Any) -> list[Any]:
        """Call a module-level function in every process, and return the results, of the first `survivors` processes."""
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send((function.__module__, function.__qualname__, args, kwargs))
        results = [_answer(end) for end in self._ends[:survivors]]
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(results) if text is not None]
        if failures:
            self.close()  # other processes may wait for the failed process
            raise AssertionError("\n".join(failures))
        return [value for _, value in results]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._ends = [], []

    def _start(self) -> None:
        # With a GPU the imports of the libraries initialize CUDA, which forbids forks after that.
        context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        context.set_forkserver_preload(list(self.imports))
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.size):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(child_end, rank, self.size, self.backend, str(store)), daemon=True
            )
            process.start()
            child_end.close()
            self._processes.append(process)
            self._ends.append(parent_end)


def _answer(end: Connection) -> tuple[str | None, Any]:
    try:
        return end.recv() if end.poll(CALL_TIMEOUT) else ("no answer", None)
    except EOFError:
        return "the process died", None


def _serve(end: Connection, rank: int, size: int, backend: str, store: str) -> None:
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), FLCE_BACKEND="torch"
    )
    if "nccl" in backend:
        del os.environ["FLCE_BACKEND"]
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    linear = F.linear
    while True:
        module, name, args, kwargs = end.recv()
        try:
            function = getattr(importlib.import_module(module), name)
            end.send((None, function(*args, **kwargs)))
        except BaseException:
            end.send((traceback.format_exc(), None))
        F.linear = linear  # DeepSpeed's zero.Init replaces it for the rest of the process
