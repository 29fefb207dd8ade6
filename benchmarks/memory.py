"""The picture of README.md: allocated memory over a training step of a whole model, stock beside patched.

    CUDA_LAUNCH_BLOCKING=1 python -m benchmarks.memory docs/memory-h200.png > benchmarks/results/memory-h200.json

Llama-3.2-1B's shapes and random weights, 4 x 8192 tokens, bfloat16, gradient checkpointing, no optimizer. The host
waits for each kernel, so that the times are those of the device.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch

import flce
from benchmarks.models import SHORT, TrainingStep, build, make_batch, ours
from flce.tools.machine import described_run


def main(picture: Path) -> None:
    device = torch.device("cuda")
    model, batch = build(SHORT, device), make_batch(SHORT, device)
    profiles = {}
    for name, applied in (("stock", contextlib.nullcontext), ("flce.patch_model(model)", ours)):
        with applied(model):
            step = TrainingStep(model, None, batch)
            step()
            profiles[name] = flce.profile_memory(step)
    title = f"{SHORT.title}, gradient checkpointing, {torch.cuda.get_device_name()}"
    flce.MemoryProfile.plot_side_by_side(profiles, picture, title)
    peaks = {name: profile.peak for name, profile in profiles.items()}
    head = described_run(device, "python -m benchmarks.memory", sys.argv[1:])
    print(json.dumps({**head, "case": SHORT.to_dict(), "peak_bytes": peaks}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
