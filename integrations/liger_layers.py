"""Liger's layers with flce's loss: two arguments of `Trainer`, and the callback. It needs a GPU.

    python integrations/liger_layers.py

Liger's RMSNorm, RoPE and SwiGLU replace those of Transformers, and its loss is left out. Without a `Trainer`, call
`apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False, model=model)` before `flce.patch_model(model)`. The
script takes one GPU: of several `Trainer` makes a `nn.DataParallel`, in which Liger's layers fail.

It trains the same small model stock, and with Liger's layers and flce. It ends with status 1 if the losses differ by
more than 1e-4: Liger's layers round otherwise than Transformers'.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from demo import Curve, cannot_run, compare, curve_of, has_gpu, need
from trainer import make_trainer

LAYERS: dict[str, Any] = {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False}}


def train(patched: bool, **arguments: Any) -> Curve:
    return curve_of(make_trainer, patched, **(LAYERS if patched else {}), **arguments)


def main(steps: Annotated[int, typer.Option(min=1)] = 50) -> None:
    """Train stock, and with Liger's layers and flce's loss, and compare the losses."""
    if not has_gpu():
        cannot_run("Liger's layers are Triton kernels and need a GPU, and PyTorch sees none.")
    need("liger-kernel")
    raise typer.Exit(compare("Liger's layers", lambda patched: train(patched, steps=steps), tolerance=1e-4))


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    typer.run(main)
