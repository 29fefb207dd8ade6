"""Training steps of a model that Accelerate shards with FSDP2: stock, patched and Liger's loss, in one run.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.wrapped --out results/wrapped.json

Each contender has a model of its own, prepared as `accelerate launch` with FSDP2 does: decoder layers, embedding, and
final norm with head as units. The contenders take turns. Memory is the most that one process had allocated in a step,
above the weights, gradients and states that lie between steps.
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.environment import describe
from benchmarks.model_problem import ARCHITECTURES, ModelCase, build, make_batch


def stock(model: Any) -> None:
    pass


def patched(model: Any) -> None:
    import flce

    flce.patch_model(model)


def liger(model: Any) -> None:
    patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    patch._apply_liger_kernel_to_instance(model=model, rope=False, rms_norm=False, swiglu=False)


Change = Callable[[Any], None]
# The last is the error bar, as in the other benchmarks.
CONTENDERS: dict[str, Change] = {"stock": stock, "flce": patched, "Liger, only the loss": liger, "flce, again": patched}


class Run:
    """One contender's model and optimizer."""

    def __init__(self, change: Change, case: ModelCase, device: torch.device) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        wrap = "transformer_based_wrap"
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=wrap, cpu_ram_efficient_loading=False)
        cpu = device.type == "cpu"
        self.accelerator = Accelerator(cpu=cpu, mixed_precision=None if cpu else "bf16", fsdp_plugin=plugin)
        model = build(case, device)
        change(model)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
        self.seconds: list[float] = []
        self.bytes = 0
        self.losses: list[float] = []

    def step(self, batch: torch.Tensor) -> None:
        """Only the loss is kept of the outputs."""
        if batch.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        dist.barrier()
        start = time.perf_counter()
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if batch.is_cuda:
            torch.cuda.synchronize()
            self.bytes = max(self.bytes, torch.cuda.max_memory_allocated() - held)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def main(
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("results/wrapped.json"),
    name: Annotated[str, typer.Option("--model", help=f"Of {', '.join(ARCHITECTURES)}.")] = "Llama-3.2-1B",
    batch: Annotated[int, typer.Option(min=1)] = 4,
    sequence: Annotated[int, typer.Option(min=2)] = 8192,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each contender.")] = 6,
) -> None:
    """Tokens a second and memory of a GPU, of a model that Accelerate shards with FSDP2."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Weights in float32 and products in bfloat16, as Accelerate's mixed precision has it.
    case = ModelCase(name, batch, sequence, dtype="float32")
    tokens = make_batch(case, device, seed=rank)
    runs: dict[str, Run] = {}
    failures: dict[str, str] = {}
    for title, change in CONTENDERS.items():
        try:
            run = Run(change, case, device)
            for _ in range(2):
                run.step(tokens)
            run.seconds.clear()
            run.bytes, runs[title] = 0, run
        except Exception as error:
            failures[title] = f"{type(error).__name__}: {str(error)[:300]}"
    for _ in range(rounds):
        for run in runs.values():
            run.step(tokens)
    measured: dict[str, dict[str, Any]] = {
        title: {
            "tokens_per_second": batch * sequence / statistics.median(run.seconds),
            "step_gib": run.bytes / 2**30,
            "losses": run.losses,
        }
        for title, run in runs.items()
    }
    if rank == 0:
        launcher = f"python -m torch.distributed.run --nproc-per-node {world} -m benchmarks.wrapped"
        command = f"{launcher} --model {name} --batch {batch} --sequence {sequence} --rounds {rounds}"
        document = {
            "environment": {**describe(device, []), "command": command},
            "model": name,
            "tokens_per_gpu": [batch, sequence],
            "processes": world,
            "contenders": measured,
            "failures": failures,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
        for title, figures in measured.items():
            rate, gib, losses = figures.values()
            print(f"{title:24} {rate:10.0f} tokens/s a GPU  {gib:7.2f} GiB  loss {losses[0]:.4f} to {losses[-1]:.4f}")
        pair = [measured[title]["tokens_per_second"] for title in ("flce", "flce, again") if title in measured]
        print(
            "spread:", f"{max(pair) / min(pair) - 1:.1%}" if len(pair) == 2 else "not known", "between flce and again"
        )
        for title, failure in failures.items():
            print(f"{title:24} failed: {failure}")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
