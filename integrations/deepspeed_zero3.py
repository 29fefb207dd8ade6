"""DeepSpeed with a patched model, in two processes: losses are stock's with each stage of ZeRO, and the loss is fused.

    python integrations/deepspeed_zero3.py                       # ZeRO-3; starts two processes by itself
    python integrations/deepspeed_zero3.py --by accelerate       # by Accelerate's DeepSpeedPlugin
    python integrations/deepspeed_zero3.py --by trainer          # by Transformers' Trainer, with FlceCallback
    python integrations/deepspeed_zero3.py --stage 2
    torchrun --nproc-per-node 2 integrations/deepspeed_zero3.py

The script trains the same small model stock and patched, on GPUs with NCCL, without two of them on the CPU with gloo.
It ends with status 1 if the losses differ, or if a loss is not fused.
"""

from __future__ import annotations

import functools
import logging
import warnings
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

import accelerate_fsdp2
from demo import Curve, compare, curve_of, examples, has_gpu, keeping_losses, need, trainer_settings
from flce.testing.models import tiny_model
from processes import in_two_processes, of_all_processes

if TYPE_CHECKING:
    from accelerate import Accelerator

By = Enum("By", {"engine": "engine", "accelerate": "accelerate", "trainer": "trainer"})


def with_engine(patched: bool, steps: int, zero: dict[str, Any]) -> Curve:
    # These take seconds to import: here, so that --help does not wait for them.
    import deepspeed
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    import flce

    model = tiny_model().train()
    if patched:
        flce.patch_model(model)  # all that is different
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
    return of_all_processes(curve)


@functools.cache  # Accelerate allows one with a plugin
def accelerator(stage: int) -> Accelerator:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    PartialState(cpu=not has_gpu())  # else Accelerate knows one process where it finds no GPU
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=1))


def with_accelerate(patched: bool, steps: int, zero: dict[str, Any]) -> Curve:
    return accelerate_fsdp2.train(accelerator(zero["stage"]), patched, steps)


def with_trainer(patched: bool, steps: int, zero: dict[str, Any]) -> Curve:
    from transformers import Trainer, TrainingArguments

    from flce.huggingface import FlceCallback

    def make_trainer(patched: bool, folder: str) -> Any:
        config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"}
        return keeping_losses(Trainer)(
            model=tiny_model(),
            args=TrainingArguments(
                **trainer_settings(folder, steps), deepspeed={**config, "zero_allow_untested_optimizer": True}
            ),
            train_dataset=examples(4 * 50),
            callbacks=[FlceCallback()] if patched else [],  # all that is different
        )

    return of_all_processes(curve_of(make_trainer, patched))


def in_each_process(steps: int, stage: int, by: str) -> int:
    import deepspeed
    import torch.distributed as dist

    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # of names that DeepSpeed calls
    # On a CPU it would compile a collective in C++ for a minute, and run without it as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    train = {"engine": with_engine, "accelerate": with_accelerate, "trainer": with_trainer}[by]
    # Weights of less than 100,000 entries would not be taken apart, nor those that are needed again soon.
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    status = compare(
        f"DeepSpeed, ZeRO-{stage} by {by}, in {dist.get_world_size()} processes",
        lambda patched: train(patched, steps, zero),
    )
    dist.destroy_process_group()
    return status


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    stage: Annotated[int, typer.Option(min=0, max=3, help="Of ZeRO.")] = 3,
    by: Annotated[By, typer.Option(help="DeepSpeed's own engine, Accelerate, or Transformers' Trainer.")] = By.engine,
) -> None:
    """Train with DeepSpeed in two processes, stock and patched by flce, and compare the losses."""
    need("deepspeed", *(["accelerate"] if by != By.engine else []))
    raise typer.Exit(in_two_processes(in_each_process, steps, stage, by.value))


if __name__ == "__main__":
    typer.run(main)
