"""Training steps of a model that is divided over processes: stock, patched, and with Liger's loss.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks wrapped --preset h200    # or --preset tp

The model is divided in every way of `WAYS` that the number of processes allows. Each contender has a separate model.
Memory is the peak of one process in a step, above the weights, gradients and states that exist between steps.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import flce
from benchmarks.benchmark import Plan, plan_cases
from benchmarks.cases import check_processes, count_processes, needs_package
from benchmarks.measure import BenchMeter, Prepared, ReadyContender, Sample, do_nothing, release
from benchmarks.models import (
    ARCHITECTURES,
    MODEL,
    ModelCase,
    ModelContender,
    TrainingStep,
    build,
    contenders_of,
    make_batch,
)
from benchmarks.runs import BenchResult


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)  # foreach fails if only some are DTensors


def by_accelerate(model: torch.nn.Module, batch: torch.Tensor) -> TrainingStep:
    """Divide the model by FSDP2. Units are decoder layers, the embedding, and the final norm with the head."""
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
    """Divide the model by FSDP2 within each half of the processes. Units are decoder layers and the other modules."""
    mesh = init_device_mesh(batch.device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return shard_units(model, batch, mesh)


def shard_units(model: Any, batch: torch.Tensor, mesh: Any) -> TrainingStep:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if batch.is_cuda else None, reduce_dtype=torch.float32)
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return TrainingStep(model, adamw(model), batch)


def by_pytorch_in_pairs(model: Any, batch: torch.Tensor) -> TrainingStep:
    """Divide each layer over pairs of processes by tensor parallelism, and the model over the pairs by FSDP2."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(batch.device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("shard", "tp"))
    columns = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], plan)
    return shard_units(model, batch, mesh["shard"])


def by_transformers(model: torch.nn.Module, batch: torch.Tensor) -> TrainingStep:
    """Divide the model as `from_pretrained(..., distributed_config=DistributedConfig(tp_size=...))` does."""
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(tp_size=dist.get_world_size())
    kind: Any = type(model)
    config, _, mesh = kind.prepare_distribute_model(config)
    divided = kind.maybe_distribute_model(model, config, mesh)
    return TrainingStep(divided, adamw(divided), batch)


def by_deepspeed(model: torch.nn.Module, batch: torch.Tensor) -> TrainingStep:
    import deepspeed

    # On a CPU DeepSpeed would compile a collective in C++ for a minute. It also runs without that.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": len(batch),
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 50_000_000},  # each model allocates such a buffer
        "bf16": {"enabled": batch.is_cuda},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)
    return TrainingStep(engine, engine, batch, backward=engine.backward)


@dataclass(frozen=True)
class Way:
    title: str
    divide: Callable[[torch.nn.Module, torch.Tensor], TrainingStep]
    unavailable: Callable[[torch.device], str | None] = do_nothing
    processes: int = 1  # the number of processes is a multiple of this
    together: int = 1  # number of processes with the same tokens; 0: all
    dtype: str = "float32"  # of the weights on GPUs

    def missing(self, device: torch.device) -> str | None:
        world = dist.get_world_size()
        number = f"needs a multiple of {self.processes} processes, got {world}" if world % self.processes else None
        reason = number or self.unavailable(device)
        return None if reason is None else f"{self.title}: {reason}"


needs_accelerate, needs_deepspeed = (needs_package(name, name, cuda=False) for name in ("accelerate", "deepspeed"))
WAYS = {
    "fsdp2": Way("FSDP2 by Accelerate", by_accelerate, needs_accelerate),
    "tp": Way("TP by Transformers", by_transformers, processes=2, together=0, dtype="bfloat16"),
    "fsdp2-tp": Way("FSDP2 x TP by PyTorch", by_pytorch_in_pairs, processes=4, together=2),
    "hsdp": Way("HSDP by PyTorch", by_pytorch, processes=4),
    "zero3": Way("ZeRO-3 by DeepSpeed", by_deepspeed, needs_deepspeed),
}


@dataclass(frozen=True)
class WrappedCase(ModelCase):
    way: str = "fsdp2"  # one of `WAYS`


def divided(case: ModelCase, name: str) -> WrappedCase:
    way, world = WAYS[name], count_processes()
    processes = f" for every {way.together or world} of {world} processes, {way.title}"
    dtype = way.dtype if torch.cuda.is_available() else "float32"
    values = {**vars(case), "dtype": dtype, "processes": processes, "optimizer": "adamw"}
    return WrappedCase(**values, way=name)


def record(step: TrainingStep, result: BenchResult, sample: Sample) -> None:
    """Record the loss of the last step, the peak of all steps, and the counters of a patched model."""
    result.loss = None if step.loss is None else float(step.loss)
    if sample.workspace_bytes is not None:
        result.workspace_bytes = max(result.workspace_bytes or 0, sample.workspace_bytes)
    report = flce.report(step.model)
    if report.patched:
        result.forwards, result.fused = report.forwards, report.fused


def contenders(case: WrappedCase) -> list[ModelContender]:
    check_processes()
    way, found = WAYS[case.way], contenders_of(case)
    return [replace(c, unavailable=way.missing) for c in found] if way.missing(torch.device("cpu")) else found


def prepare(case: WrappedCase, device: torch.device) -> Prepared:
    release()
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # FSDP2 and DeepSpeed call deprecated names
    way = WAYS[case.way]
    tokens = make_batch(case, device, seed=dist.get_rank() // (way.together or dist.get_world_size()))
    changes = contextlib.ExitStack()  # undone when the models are freed

    def get_ready(contender: ModelContender, result: BenchResult) -> ReadyContender:
        model = build(case, device)
        changes.enter_context(contender.applied(model))
        step = way.divide(model, tokens)
        for _ in range(2):  # the first allocates the states of the optimizer
            step()
        return ReadyContender(step, on_sample=functools.partial(record, step, result))

    return BenchMeter(device, dist.barrier), get_ready


NAMES = ("ours", "liger-loss", "stock")
# Four models are allocated at once. A step of stock needs about 15 GiB more (predicted).
WIDE = ModelCase("Llama-3-8B, 2 layers", 2, 4096, contenders=NAMES)
SMALL = ModelCase("tiny-llama, untied", 2, 64, contenders=NAMES)


def plan(case: ModelCase, *names: str) -> Plan:
    return plan_cases([divided(case, name) for name in names or WAYS], rounds=6, seconds=8.0)


WRAPPED = replace(
    MODEL,
    kind="wrapped",
    about="Tokens a second and memory of a GPU, of models that are divided over processes.",
    case_type=WrappedCase,
    presets={
        "tiny": lambda: plan(SMALL),
        "h200": lambda: plan(WIDE),
        **{name: functools.partial(plan, WIDE, name) for name in WAYS},
    },
    contenders=contenders,
    prepare=prepare,
    choices={"model": ARCHITECTURES, "way": WAYS},
)
