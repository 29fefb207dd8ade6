"""Accelerate with FSDP2 and flce, in two processes: the loop of accelerate_loop.py, and nothing else changes.

    python integrations/accelerate_fsdp2.py                                    # starts two processes by itself
    accelerate launch --multi_gpu --num_processes 2 integrations/accelerate_fsdp2.py
    torchrun --nproc-per-node 2 integrations/accelerate_fsdp2.py               # also without GPUs

The weights are split over the processes: on GPUs with NCCL, without two of them on the CPU with gloo. The script trains
the same small model stock and patched, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from accelerate_loop import train_with
from demo import Curve, compare, has_gpu, need
from processes import in_two_processes, of_all_processes

if TYPE_CHECKING:
    from accelerate import Accelerator

Precision = Enum("Precision", {"no": "no", "bf16": "bf16"})


def train(accelerator: Accelerator, patched: bool, steps: int) -> Curve:
    return of_all_processes(train_with(accelerator, patched, steps))


def in_each_process(steps: int, mixed_precision: str) -> int:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,  # the model was not loaded from files
    )
    accelerator = Accelerator(cpu=not has_gpu(), fsdp_plugin=plugin, mixed_precision=mixed_precision)
    status = compare(
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
    need("accelerate")
    raise typer.Exit(in_two_processes(in_each_process, steps, mixed_precision.value))


if __name__ == "__main__":
    typer.run(main)
