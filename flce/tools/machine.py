"""This machine: its devices, what runs on them, and the facts that a bug report and a result file say of it."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import flce
from flce.backends import choose_backend, has_product
from flce.core.devices import device_name, device_record, list_devices

BACKENDS = ("triton", "torch")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
PACKAGES = (
    *("torch", "triton", "transformers", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes", "lightning"),
    *("pytorch-lightning", "numpy"),
)
PEERS = ("liger-kernel", "cut-cross-entropy", "fla-core", "quack-kernels", "verl")
VARIABLES = ("FLCE_BACKEND", "FLCE_DEBUG", "FLCE_LOG", "FLCE_PROFILE", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")

# --- devices ---


def distinct_devices() -> tuple[list[torch.device], dict[torch.device, torch.device]]:
    """One device of each name, and those that are as one of them."""
    first: dict[str, torch.device] = {}
    there = {device: first.setdefault(device_name(device), device) for device in list_devices()}
    return list(first.values()), {device: kept for device, kept in there.items() if kept != device}


def why_no_dtype(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a device cannot compute in a dtype; None: it can."""
    if device.type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        return f"{device_name(device)} has no bfloat16"
    if dtype == torch.float64 and exact_device(device) != device:
        return f"{device.type} devices have no float64"
    return None


def exact_device(device: torch.device) -> torch.device:
    """The device itself, or the CPU in the place of one that has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def why_no_backend(device: torch.device, backend: str) -> str | None:
    """Why a backend cannot run on a device; None: it can."""
    if backend == "torch":
        return None
    with use_backend(""):  # by flce, whatever the user has asked for
        if choose_backend(device).name != backend:
            return choose_backend(device).reason
    return "Triton's interpreter is for tests" if device.type == "cpu" else None


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within it every call takes this backend; "": the one that flce chooses."""
    before = os.environ.get("FLCE_BACKEND")
    os.environ["FLCE_BACKEND"] = backend
    try:
        yield
    finally:
        if before is None:
            del os.environ["FLCE_BACKEND"]
        else:
            os.environ["FLCE_BACKEND"] = before


@contextlib.contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Within it PyTorch uses this number on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- facts ---


TESTED = {
    "torch": ("2.11.0", "2.14.1"),
    "triton": ("3.6.0", "3.8.0"),
    "transformers": ("4.56.2", "5.24.0"),
}
"""The oldest and the newest version of each that the tests are run with."""

BY_HAND = {"torch": "2.15.0"}
"""Newer versions, which a part of the tests was run with once."""


def environment() -> dict[str, Any]:
    """Everything that a bug report needs to say of the machine; it can be written as JSON."""
    packages = dict.fromkeys((*PACKAGES, *PEERS[:2]))
    return {
        "flce": flce.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages | versions(packages),
        "cuda": torch.version.cuda,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "devices": [device_facts(device) for device in list_devices()],
    }


def versions(packages: Iterable[str] = (*PACKAGES, *PEERS)) -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if "torch" in found:
        found["torch"] = str(torch.__version__)  # says which build it is: +cpu, +cu132
    return found


def device_facts(device: torch.device) -> dict[str, Any]:
    """One device: its name, memory in bytes, compute capability, backend and why, fast paths and why not."""
    facts: dict[str, Any] = {"device": str(device), "type": device.type}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts |= {"name": found.name, "memory": found.total_memory, "capability": f"{found.major}.{found.minor}"}
        facts |= {"multiprocessors": found.multi_processor_count, "l2_cache": found.L2_cache_size}
    else:
        facts |= {"name": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    try:
        facts["backend"], record = choose_backend(device).name, device_record(device)
    except ValueError as error:  # FLCE_BACKEND asks for what cannot be, or the profile is wrong
        return facts | {"backend": None, "why": str(error)}
    facts |= {"kind": record.name, "profile": record.profile}
    return facts | {"why": choose_backend(device).reason, "logits_in_registers": has_product(device)}


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
