"""Training steps of a model that is divided over processes: stock, patched and Liger's loss, in one run.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.wrapped --out results/wrapped.json
    ... --sharding tp --sharding zero3

It is divided in every way of `WAYS` that these processes can take, one after the other. Each contender has a model of
its own. The contenders take turns, in the same order in all processes. Memory is the most that one process had
allocated in a step, above the weights, gradients and states that lie between steps. `python -m benchmarks table` reads
the result.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import flce
from benchmarks.benchmark import save
from benchmarks.cases import Effort, needs_package
from benchmarks.measure import BenchMeter, Entrant, Sample, compete, release
from benchmarks.models import MODEL, TINY, ModelCase, ModelContender, TrainingStep, build, entrants, make_batch
from benchmarks.runs import BenchResult, Entry, Run, described_run
from benchmarks.tables import absences

ROUNDS = 6
NAMES = ("ours", "liger-loss", "stock")
Sharding = Enum(
    "Sharding", {"fsdp2": "fsdp2", "tp": "tp", "fsdp2-tp": "fsdp2-tp", "hsdp": "hsdp", "zero3": "zero3"}
)  # the names of `WAYS`
# Four models lie side by side. A step of stock takes some 15 GiB more, predicted.
WIDE = ModelCase("Llama-3-8B, 2 layers", 2, 4096, contenders=NAMES)
SMALL = replace(TINY, model="tiny-llama, untied", budgets_mib=(), contenders=NAMES)


# --- ways to divide a model; on GPUs its products are of bfloat16 ---


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)  # with DTensors among others


def by_accelerate(model: torch.nn.Module, batch: torch.Tensor) -> TrainingStep:
    """Decoder layers, embedding, and final norm with head are FSDP2's units."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    wrap = "transformer_based_wrap"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=wrap, cpu_ram_efficient_loading=False)
    precision = "bf16" if batch.is_cuda else None
    accelerator: Any = Accelerator(cpu=not batch.is_cuda, mixed_precision=precision, fsdp_plugin=plugin)
    sharded, optimizer = accelerator.prepare(model, adamw(model))
    return TrainingStep(sharded, optimizer, batch, backward=accelerator.backward)


def by_pytorch(model: Any, batch: torch.Tensor) -> TrainingStep:
    """FSDP2 within each half of the processes. Decoder layers are units, and the rest of the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(batch.device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if batch.is_cuda else None, reduce_dtype=torch.float32)
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return TrainingStep(model, adamw(model), batch)


def by_transformers(model: torch.nn.Module, batch: torch.Tensor, together: int = 0) -> TrainingStep:
    """As `from_pretrained(..., distributed_config=DistributedConfig(tp_size=...))`."""
    from transformers.distributed.configuration_utils import DistributedConfig

    world = dist.get_world_size()
    together = together or world
    config = DistributedConfig(tp_size=together, fsdp_size=world // together, fsdp_mixed_precision=batch.is_cuda)
    kind: Any = type(model)
    config, _, mesh = kind.prepare_distribute_model(config)
    divided = kind.maybe_distribute_model(model, config, mesh)
    return TrainingStep(divided, adamw(divided), batch)


by_both = functools.partial(by_transformers, together=2)


def by_deepspeed(model: torch.nn.Module, batch: torch.Tensor) -> TrainingStep:
    import deepspeed

    # On a CPU it would compile a collective in C++ for a minute, and run without it as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": len(batch),
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 50_000_000},  # each model keeps such a buffer
        "bf16": {"enabled": batch.is_cuda},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)
    return TrainingStep(engine, engine, batch, backward=engine.backward)


def both_dimensions(device: torch.device) -> str | None:
    from transformers.distributed.configuration_utils import DistributedConfig

    known_to = hasattr(DistributedConfig, "dp_replicate_size")  # came with it
    return None if known_to else "this version of Transformers does not divide a model by FSDP2 and TP at once"


@dataclass(frozen=True)
class Way:
    name: str
    title: str
    divided: Callable[[torch.nn.Module, torch.Tensor], TrainingStep]
    unavailable: Callable[[torch.device], str | None]
    processes: int = 1  # a multiple of these
    together: int = 1  # processes that have the same tokens; 0: all
    dtype: str = "float32"  # of the weights on GPUs

    def missing(self, device: torch.device) -> str | None:
        """Why a model cannot be divided in this way here."""
        world = dist.get_world_size()
        few = f"takes {self.processes} processes or a multiple of it, not {world}" if world % self.processes else None
        reason = few or self.unavailable(device)
        return None if reason is None else f"{self.title}: {reason}"


def anywhere(device: torch.device) -> None:
    return None


needs_accelerate, needs_deepspeed = (needs_package(name, name, cuda=False) for name in ("accelerate", "deepspeed"))
WAYS = [
    Way("fsdp2", "FSDP2 by Accelerate", by_accelerate, needs_accelerate),
    Way("tp", "TP by Transformers", by_transformers, anywhere, 2, 0, "bfloat16"),
    Way("fsdp2-tp", "FSDP2 x TP by Transformers", by_both, both_dimensions, 4, 2),
    Way("hsdp", "HSDP by PyTorch", by_pytorch, anywhere, 4),
    Way("zero3", "ZeRO-3 by DeepSpeed", by_deepspeed, needs_deepspeed),
]


# --- measuring ---


@dataclass(frozen=True)
class Agreed(Effort):
    """All processes take every step: the deadline is by the clock of the first one."""

    def expired(self) -> bool:
        late = [super().expired()]
        dist.broadcast_object_list(late)
        return late[0]


def keep(step: TrainingStep, result: BenchResult, sample: Sample) -> None:
    """The loss of the last step, the most memory of all, and what a patched model has counted."""
    result.loss = None if step.loss is None else float(step.loss)
    if sample.workspace_bytes is not None:
        result.workspace_bytes = max(result.workspace_bytes or 0, sample.workspace_bytes)
    report = flce.report(step.model)
    if report.patched:
        result.forwards, result.fused = report.forwards, report.fused


def measure(way: Way, case: ModelCase, device: torch.device, effort: Effort) -> Entry:
    rank, world = dist.get_rank(), dist.get_world_size()
    together = way.together or world
    which = f"{world} processes together" if together == world else f"each of {world} processes"
    which = f"every {together} of {world} processes together" if 1 < together < world else which
    case = replace(case, processes=f" on {which}, {way.title}", optimizer="adamw")
    tokens = make_batch(case, device, seed=rank // together)
    with contextlib.ExitStack() as changes:

        def enter(contender: ModelContender, result: BenchResult) -> Entrant:
            model = build(case, device)
            changes.enter_context(contender.applied(model))
            step = way.divided(model, tokens)
            for _ in range(2):  # the first makes the states of the optimizer
                step()
            return Entrant(step, keep=functools.partial(keep, step, result))

        chosen = [replace(c, unavailable=way.missing) if way.missing(device) else c for c in entrants(case)]
        return compete(case, chosen, (BenchMeter(device, dist.barrier), enter), effort)


def main(
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("results/wrapped.json"),
    sharding: Annotated[list[Sharding] | None, typer.Option(help="Only this; several may be given.")] = None,
    seconds: Annotated[float, typer.Option(help="After these no further step begins.")] = 130.0,
) -> None:
    """Tokens a second and memory of a GPU, of a model that is divided over GPUs; a tiny one without GPUs."""
    until = time.monotonic() + seconds
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # of names that FSDP2 and DeepSpeed call
    chosen = [way for way in WAYS if sharding is None or Sharding(way.name) in sharding]
    command = f"python -m torch.distributed.run --nproc-per-node {dist.get_world_size()} -m benchmarks.wrapped"
    run = Run(MODEL.kind, described_run(device, command, []))
    left = sum(way.missing(device) is None for way in chosen)
    for way in chosen:
        # The first kernels take time to build: each has twice its share of what is left.
        share = 2 * (until - time.monotonic()) / max(1, left)
        left -= way.missing(device) is None
        case = replace(WIDE, dtype=way.dtype) if cuda else SMALL
        run.cases.append(measure(way, case, device, Agreed(ROUNDS, math.inf, min(until, time.monotonic() + share))))
        release()
        if dist.get_rank() == 0:
            save(run, out)
            for shown in MODEL.tables(replace(run, cases=run.cases[-1:]), False):
                print(shown.markdown(), flush=True)
    if dist.get_rank() == 0:
        print("\n".join(absences(run)))
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
