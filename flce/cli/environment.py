"""What this machine has: versions, devices, and which of flce's fast paths they get."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from typing import TYPE_CHECKING, Any

import flce

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "trl", "deepspeed", "liger-kernel", "numpy")
VARIABLES = ("FLCE_BACKEND", "FLCE_DEBUG", "FLCE_LOG", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")


def environment() -> dict[str, Any]:
    """Everything that a bug report needs to say of the machine; it can be written as JSON."""
    import torch

    return {
        "flce": flce.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "devices": [device_facts(device) for device in devices()],
    }


def version(package: str) -> str | None:
    """None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def devices() -> list[torch.device]:
    """The GPUs, then the CPU."""
    import torch

    return [*(torch.device("cuda", index) for index in range(torch.cuda.device_count())), torch.device("cpu")]


def device_facts(device: torch.device) -> dict[str, Any]:
    """One device: its name, memory in bytes, compute capability, backend and why, fast paths and why not."""
    import torch

    from flce.backends import backend_name, has_product, why_backend

    facts: dict[str, Any] = {"device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        facts |= {"name": properties.name, "memory": properties.total_memory, "capability": capability}
    else:
        facts |= {"name": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    try:
        facts["backend"] = backend_name(device)
    except ValueError as error:  # FLCE_BACKEND asks for what cannot be
        return facts | {"backend": None, "why": str(error)}
    return facts | {"why": why_backend(device), "logits_in_registers": has_product(device)}


def known_problems(facts: dict[str, Any]) -> list[str]:
    """Of the combination that `environment` tells: a sentence for each."""
    gpus = [device for device in facts["devices"] if device["device"] != "cpu"]
    installed = {name: _numbers(found) for name, found in facts["packages"].items() if found is not None}
    found = [f"{device['device']}: {device['why']}" for device in facts["devices"] if device["backend"] is None]
    for name, oldest in (("torch", (2, 8)), ("triton", (3, 4)), ("transformers", (4, 56))):
        if installed.get(name, oldest) < oldest:
            found.append(
                f"{name} {facts['packages'][name]} is older than flce supports: install {name} "
                f"{'.'.join(map(str, oldest))} or newer."
            )
    if any(device["backend"] == "torch" for device in gpus):
        found.append("A GPU runs PyTorch's operators in place of the Triton kernels, which is slower: see why above.")
    if any(device["backend"] == "triton" and not device["logits_in_registers"] for device in gpus):
        found.append(
            "The kernels that keep logits in registers are for compute capability 9 (H100, H200). Other GPUs make the "
            "logits of a chunk in memory: exact, and slower."
        )
    interpreted = facts["variables"].get("TRITON_INTERPRET") == "1"
    if interpreted:
        found.append("TRITON_INTERPRET=1 is for tests: kernels take a thousand times longer.")
    if interpreted and installed.get("triton", (3, 7)) < (3, 7) and installed.get("numpy", (0,)) >= (2, 4):
        found.append("The interpreter of Triton before 3.7 does not work with NumPy 2.4 or newer: install numpy<2.4.")
    if gpus and installed.get("triton", (3, 7)) < (3, 7) and not _c_compiler():
        found.append("Triton before 3.7 needs a C compiler for its first launch, and none was found: install gcc.")
    if installed.get("trl", (0,)) >= (1, 16):
        found.append(
            "TRL 1.16 and newer multiplies by the head's weight in a kernel of its own, so its trainers do not use a "
            "patched head. docs/trainers.md has the subclass of SFTTrainer that does."
        )
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (2, 11, 0) of "2.11.0+cu130"."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _c_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang"))
