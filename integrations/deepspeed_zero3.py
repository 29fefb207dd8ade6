"""DeepSpeed with a patched model, in two processes: with each stage of ZeRO the losses are equal to stock's losses.

    python integrations/deepspeed_zero3.py                       # ZeRO-3; starts two processes by itself
    python integrations/deepspeed_zero3.py --by accelerate       # by Accelerate's DeepSpeedPlugin
    python integrations/deepspeed_zero3.py --by trainer          # by Transformers' Trainer, with FlceCallback
    python integrations/deepspeed_zero3.py --stage 2
    torchrun --nproc-per-node 2 integrations/deepspeed_zero3.py

The script trains the same small model stock and patched: on two GPUs with NCCL, else on the CPU with gloo. It ends with
status 1 if the losses differ, or if a loss is not fused.
"""

from __future__ import annotations

import functools
import logging
import warnings
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

import accelerate_fsdp2
import qlora
from demo import Curve, compare_runs, examples, has_gpu, need_packages, record_curve
from flce.testing import tiny_model
from processes import average_over_processes, run_in_two_processes

if TYPE_CHECKING:
    from accelerate import Accelerator

By = Enum("By", {"engine": "engine", "accelerate": "accelerate", "trainer": "trainer"})


def train_with_engine(patched: bool, steps: int, zero: dict[str, Any]) -> Curve:
    # These imports take seconds. They are here so that --help is fast.
    import deepspeed
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    import flce

    model = tiny_model().train()
    if patched:
        flce.patch_model(model)  # the only difference
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": zero,
        },
    )
    data = examples(4 * steps * dist.get_world_size())
    curve = Curve()
    for batch in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        curve.add(loss)
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return average_over_processes(curve)


@functools.cache  # Accelerate allows only one accelerator with a plugin
def accelerator(stage: int) -> Accelerator:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    PartialState(cpu=not has_gpu())  # else Accelerate uses one process if it finds no GPU
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=1))


def train_with_accelerate(patched: bool, steps: int, zero: dict[str, Any]) -> Curve:
    return accelerate_fsdp2.train(accelerator(zero["stage"]), patched, steps)


def train_with_trainer(patched: bool, steps: int, zero: dict[str, Any]) -> Curve:
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"}
    arguments = {"model": tiny_model(), "steps": steps, "deepspeed": {**config, "zero_allow_untested_optimizer": True}}
    return average_over_processes(record_curve(qlora.create_trainer, patched, **arguments))


def run_process(steps: int, stage: int, by: str) -> int:
    import deepspeed
    import torch.distributed as dist

    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed calls deprecated functions
    # On a CPU DeepSpeed would compile an optional collective in C++ for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    train = {"engine": train_with_engine, "accelerate": train_with_accelerate, "trainer": train_with_trainer}[by]
    # By default DeepSpeed does not divide weights of less than 100,000 entries, nor weights that are needed again soon.
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    status = compare_runs(
        f"DeepSpeed, ZeRO-{stage} by {by}, in {dist.get_world_size()} processes",
        lambda patched: train(patched, steps, zero),
    )
    dist.destroy_process_group()
    return status


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    stage: Annotated[int, typer.Option(min=0, max=3, help="Stage of ZeRO.")] = 3,
    by: Annotated[By, typer.Option(help="DeepSpeed's engine, Accelerate, or Transformers' Trainer.")] = By.engine,
) -> None:
    """Train with DeepSpeed in two processes, stock and patched by flce, and compare the losses."""
    need_packages("deepspeed", *(["accelerate"] if by != By.engine else []))
    raise typer.Exit(run_in_two_processes(run_process, steps, stage, by.value))


if __name__ == "__main__":
    typer.run(main)
