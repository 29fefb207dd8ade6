"""Accelerate with FSDP2 and flce, in two processes: the only change is `patch_model` before `prepare`.

    python integrations/accelerate_fsdp2.py                                    # starts two processes by itself
    accelerate launch --multi_gpu --num_processes 2 integrations/accelerate_fsdp2.py
    torchrun --nproc-per-node 2 integrations/accelerate_fsdp2.py               # also without GPUs

The weights are divided over the processes: on two GPUs with NCCL, else on the CPU with gloo. The script trains the same
small model stock and patched, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from demo import Curve, compare_runs, examples, has_gpu, need_packages
from flce.testing import tiny_model
from processes import average_over_processes, run_in_two_processes

if TYPE_CHECKING:
    from accelerate import Accelerator

Precision = Enum("Precision", {"no": "no", "bf16": "bf16"})


def train(accelerator: Accelerator, patched: bool, steps: int) -> Curve:
    # These imports take seconds. They are here so that --help is fast.
    import torch
    from torch.utils.data import DataLoader

    import flce

    model = tiny_model().train()
    if patched:
        flce.patch_model(model)  # the only difference
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = DataLoader(examples(4 * steps * accelerator.num_processes), batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    curve = Curve()
    for batch in batches:
        loss = model(**batch).loss
        curve.add(loss)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    return average_over_processes(curve)


def run_process(steps: int, mixed_precision: str) -> int:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,  # the model was not loaded from files
    )
    accelerator = Accelerator(cpu=not has_gpu(), fsdp_plugin=plugin, mixed_precision=mixed_precision)
    status = compare_runs(
        f"Accelerate, FSDP2 in {accelerator.num_processes} processes",
        lambda patched: train(accelerator, patched, steps),
        tolerance=1e-5 if mixed_precision == "no" else 1e-2,
    )
    accelerator.end_training()
    return status


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    mixed_precision: Precision = Precision.no,
) -> None:
    """Train with Accelerate and FSDP2 in two processes, stock and patched by flce, and compare the losses."""
    need_packages("accelerate")
    raise typer.Exit(run_in_two_processes(run_process, steps, mixed_precision.value))


if __name__ == "__main__":
    typer.run(main)
