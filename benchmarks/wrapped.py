"""Training steps of a model that Accelerate shards with FSDP2: stock, patched and Liger's loss, in one run.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.wrapped --out results/wrapped.json

Each contender has a model of its own, prepared as `accelerate launch` with FSDP2 does: decoder layers, embedding, and
final norm with head as units. The contenders take turns, in the same order in all processes. Memory is the most that
one process had allocated in a step, above the weights, gradients and states that lie between steps.
`python -m benchmarks table` reads the result.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.benchmark import save
from benchmarks.models import MODEL, SHORT, TINY, ModelContender, TrainingStep, build, entrants, make_batch, table
from flce.tools.bench.cases import Effort
from flce.tools.bench.measure import BenchMeter, Entrant, Sample, compete
from flce.tools.bench.results import BenchResult, Run
from flce.tools.machine import described_run

ROUNDS = 6
NAMES = ("ours", "liger-loss", "stock")


def prepared(model: torch.nn.Module, batch: torch.Tensor) -> TrainingStep:
    """With float32 weights and bfloat16 products, as Accelerate's mixed precision has it."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    wrap = "transformer_based_wrap"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=wrap, cpu_ram_efficient_loading=False)
    precision = "bf16" if batch.is_cuda else None
    accelerator: Any = Accelerator(cpu=not batch.is_cuda, mixed_precision=precision, fsdp_plugin=plugin)
    sharded, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    return TrainingStep(sharded, optimizer, batch, backward=accelerator.backward)


def keep(step: TrainingStep, result: BenchResult, sample: Sample) -> None:
    """The loss of the last step, and the most memory of all."""
    result.loss = None if step.loss is None else float(step.loss)
    if sample.workspace_bytes is not None:
        result.workspace_bytes = max(result.workspace_bytes or 0, sample.workspace_bytes)


def main(out: Annotated[Path, typer.Option(help="Result file.")] = Path("results/wrapped.json")) -> None:
    """Tokens a second and memory of a GPU, of a model that Accelerate shards with FSDP2; a tiny one without GPUs."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    case = replace(SHORT if cuda else TINY, dtype="float32", budgets_mib=(), contenders=NAMES)
    tokens = make_batch(case, device, seed=rank)
    meter = BenchMeter(device, dist.barrier)
    with contextlib.ExitStack() as changes:

        def enter(contender: ModelContender, result: BenchResult) -> Entrant:
            model = build(case, device)
            changes.enter_context(contender.applied(model))
            step = prepared(model, tokens)
            for _ in range(2):  # the first makes the states of the optimizer
                step()
            return Entrant(step, keep=functools.partial(keep, step, result))

        # All processes take every step: no clock decides who sits out.
        entry = compete(case, entrants(case), (meter, enter), Effort(ROUNDS, math.inf))
        if rank == 0:
            command = f"python -m torch.distributed.run --nproc-per-node {world} -m benchmarks.wrapped"
            save(Run(MODEL.kind, described_run(device, command, []), [entry]), out)
            print(table(entry).markdown())
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
