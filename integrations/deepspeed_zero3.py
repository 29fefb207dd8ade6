"""DeepSpeed with a patched model, in two processes: losses are stock's with each stage of ZeRO.

    python integrations/deepspeed_zero3.py                 # starts two processes by itself
    python integrations/deepspeed_zero3.py --stage 2
    torchrun --nproc-per-node 2 integrations/deepspeed_zero3.py

With stages 0 to 2 the loss is fused. ZeRO-3 takes the head's weight away before the loss is computed. There the patched
model runs stock code and a `NotFusedWarning` says so; FSDP2, in accelerate_fsdp2.py, shards as much and is fused.

The script trains the same small model stock and patched, on GPUs with NCCL, without two of them on the CPU with gloo.
It ends with status 1 if the losses differ, or if the loss is not fused where it should be.
"""

from __future__ import annotations

import logging
import warnings
from typing import Annotated

import typer

from compare import Curve, compare, examples, need
from flce.testing.models import tiny_model
from processes import in_two_processes, of_all_processes


def train(patched: bool, steps: int, stage: int) -> Curve:
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
            "zero_optimization": {"stage": stage},
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


def in_each_process(steps: int, stage: int) -> int:
    import deepspeed
    import torch.distributed as dist

    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # of names that DeepSpeed calls
    # On a CPU it would compile a collective in C++ for a minute, and run without it as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    status = compare(
        f"DeepSpeed, ZeRO-{stage} in {dist.get_world_size()} processes",
        lambda patched: train(patched, steps, stage),
        fused=stage < 3,
    )
    dist.destroy_process_group()
    return status


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    stage: Annotated[int, typer.Option(min=0, max=3, help="Of ZeRO.")] = 3,
) -> None:
    """Train with DeepSpeed in two processes, stock and patched by flce, and compare the losses."""
    need("deepspeed")
    raise typer.Exit(in_two_processes(in_each_process, steps, stage))


if __name__ == "__main__":
    typer.run(main)
