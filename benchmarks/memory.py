"""The picture of README.md: allocated memory over a training step of a model, stock and patched.

    CUDA_LAUNCH_BLOCKING=1 python -m benchmarks.memory memory-h200.png      # and memory-h200.json

The host waits for each kernel, so that the times are times of the device. On a CPU the model is tiny.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import flce
from benchmarks.models import SHORT, TINY, TrainingStep, build, make_batch, ours
from benchmarks.runs import describe_run
from flce.core.devices import find_device


def main(picture: Path) -> None:
    device = find_device(None, ("cuda", "cpu"))
    case = SHORT if device.type == "cuda" else TINY
    model, batch = build(case, device), make_batch(case, device)
    profiles = {}
    for name, applied in (("stock", contextlib.nullcontext), ("flce.patch_model(model)", ours)):
        with applied(model):
            step = TrainingStep(model, None, batch)
            step()
            profiles[name] = flce.profile_memory(step, device=device)
    head = describe_run(device, "python -m benchmarks.memory", sys.argv[1:])
    title = f"{case.title}, gradient checkpointing, {head['device']['name']}"
    flce.MemoryProfile.plot_side_by_side(profiles, picture, title)
    peaks = {name: profile.peak for name, profile in profiles.items()}
    document = {**head, "case": case.to_dict(), "peak_bytes": peaks}
    picture.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
