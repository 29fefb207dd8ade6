"""New Python processes, and process groups in which tests run.

A test with the decorator :func:`in_processes` runs in every process of a group. An error in a process is raised in the
test, with the traceback of the process. The processes are started by the first test that needs them.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
CALL_TIMEOUT = 120  # seconds of one call in a process group

# Each import takes seconds. Without a GPU one process imports these modules, and the others are forked from it.
SLOW_IMPORTS = ["tests.distributed.training", "transformers.models.llama.modeling_llama", "peft", "accelerate"]
SLOW_IMPORTS += ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "deepspeed", "lightning.fabric"]
SLOW_IMPORTS += ["megatron.core.models.gpt"]


def run_python(
    *arguments: Any, cwd: Path = ROOT, env: Mapping[str, str] | None = None, status: int = 0, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run Python with this checkout and without the variables of flce and Triton, and assert its exit status.

    Args:
        arguments: of the command line, such as ``"-c", code``.
        env: other variables of the environment.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FLCE_", "TRITON_", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(ROOT), **(env or {})}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=timeout
    )
    assert done.returncode == status, done.stdout[-20000:] + done.stderr[-20000:]
    return done


class World:
    """Processes with one process group: of NCCL with a GPU for each process, otherwise of gloo."""

    running: ClassVar[set[World]] = set()

    def __init__(self, size: int) -> None:
        self.size = size
        self.backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= size else "gloo"
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, survivors: int | None = None, **kwargs: Any) -> list[Any]:
        """Call a module-level function in every process, and return the results, of the first `survivors` processes."""
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send((function.__module__, function.__qualname__, args, kwargs))
        results = [_answer(end) for end in self._ends[:survivors]]
        skipped = [text for kind, text in results if kind == "skipped"]
        failures = [f"rank {rank}: {text}" for rank, (kind, text) in enumerate(results) if kind == "failed"]
        if failures or 0 < len(skipped) < len(results):
            self.close()  # other processes may wait for the failed process
            raise AssertionError("\n".join([*failures, *skipped]))
        if skipped:
            pytest.skip(skipped[0])
        return [value for _, value in results]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._ends = [], []
        self.running.discard(self)

    def _start(self) -> None:
        # With a GPU the imports of the libraries initialize CUDA, which forbids forks after that.
        context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        context.set_forkserver_preload(SLOW_IMPORTS)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        for rank in range(self.size):
            parent_end, child_end = context.Pipe()
            arguments = child_end, rank, self.size, self.backend, self._store.port
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            child_end.close()
            self._processes.append(process)
            self._ends.append(parent_end)
        self.running.add(self)


def _answer(end: Connection) -> tuple[str, Any]:
    try:
        return end.recv() if end.poll(CALL_TIMEOUT) else ("failed", "no answer")
    except EOFError:
        return "failed", "the process died"


def _serve(end: Connection, rank: int, size: int, backend: str, port: int) -> None:
    gc.freeze()  # exclude the libraries from garbage collections
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    if not torch.cuda.is_available():
        os.environ["FLCE_BACKEND"] = "torch"  # instead of Triton's interpreter
    elif "nccl" in backend:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    linear, environment = F.linear, dict(os.environ)
    while True:
        module, name, args, kwargs = end.recv()
        try:
            function = inspect.unwrap(getattr(importlib.import_module(module), name))
            with warnings.catch_warnings():
                end.send(("done", function(*args, **kwargs)))
        except pytest.skip.Exception as skipped:
            end.send(("skipped", str(skipped)))
        except BaseException:
            end.send(("failed", traceback.format_exc()))
        F.linear = linear  # DeepSpeed's zero.Init replaces it for the rest of the process
        for variable in os.environ.keys() - environment.keys():
            del os.environ[variable]
        os.environ.update(environment)


world = functools.cache(World)  # of a number of processes, for all tests


def most_processes() -> int:
    """Return an even number: one process for each GPU, two that share one GPU, or four without a GPU."""
    gpus = torch.cuda.device_count()
    return gpus // 2 * 2 if gpus >= 2 else 2 if gpus else 4


def in_processes(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: the test runs in every process of a group. It has parameters, but no fixtures."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            world(size).run(test, **arguments)

        return run

    return decorate


def skip_with_fewer_gpus(processes: int) -> None:
    """Skip processes of Transformers' tensor parallelism: each uses its GPU if there is any, and never the CPU."""
    if 0 < torch.cuda.device_count() < processes:
        pytest.skip("needs a GPU for each process, or none")
