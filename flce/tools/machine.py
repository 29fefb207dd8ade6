"""Facts of this machine for commands, bug reports and result files: devices, backends, versions."""

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
from flce.backends import choose_backend, has_fused_products
from flce.core import log
from flce.core.devices import device_name, device_record, list_devices

BACKENDS = ("triton", "torch")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
PACKAGES = (
    *("torch", "triton", "transformers", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes", "lightning"),
    *("pytorch-lightning", "numpy"),
)
PEERS = ("liger-kernel", "cut-cross-entropy", "fla-core", "quack-kernels", "nvidia-cutlass-dsl", "verl")
VARIABLES = (*log.VARIABLES, "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")

# --- devices ---


def why_no_dtype(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason a device cannot compute in a dtype, or None if it can."""
    if device.type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        return f"{device_name(device)} has no bfloat16"
    if dtype == torch.float64 and exact_device(device) != device:
        return f"{device.type} devices have no float64"
    return None


def exact_device(device: torch.device) -> torch.device:
    """Return the device, or the CPU if the device has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def why_no_backend(device: torch.device, backend: str) -> str | None:
    """Return the reason a backend cannot run on a device, or None if it can."""
    if backend == "torch":
        return None
    with use_backend(""):  # the choice of flce without the user's FLCE_BACKEND
        if choose_backend(device).name != backend:
            return choose_backend(device).reason
    return "Triton's interpreter is for tests" if device.type == "cpu" else None


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Set the backend of every call in the context. "": flce chooses the backend."""
    before = os.environ.get("FLCE_BACKEND")
    os.environ["FLCE_BACKEND"] = backend
    try:
        yield
    finally:
        if before is None:
            del os.environ["FLCE_BACKEND"]
        else:
            os.environ["FLCE_BACKEND"] = before


# --- facts ---


TESTED = {
    "torch": ("2.11.0", "2.14.1"),
    "triton": ("3.6.0", "3.8.0"),
    "transformers": ("4.56.2", "5.24.0"),
}
"""The oldest and the newest version of each package that the tests run with."""

BY_HAND = {"torch": "2.15.0"}
"""Newer versions with which a part of the tests was run once."""


def environment() -> dict[str, Any]:
    """Return the facts of the machine for a bug report, as values for JSON."""
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
    """Return the versions of the packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if "torch" in found:
        found["torch"] = str(torch.__version__)  # with the build: +cpu, +cu132
    return found


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return the facts of a device: name, memory in bytes, compute capability, backend, the reason, fast paths."""
    facts: dict[str, Any] = {"device": str(device), "type": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"name": properties.name, "memory": properties.total_memory}
        facts |= {"capability": f"{properties.major}.{properties.minor}"}
        facts |= {"multiprocessors": properties.multi_processor_count, "l2_cache": properties.L2_cache_size}
    else:
        facts |= {"name": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    try:
        facts["backend"], record = choose_backend(device).name, device_record(device)
    except ValueError as error:  # FLCE_BACKEND requests a backend that cannot run, or the profile is wrong
        return facts | {"backend": None, "why": str(error)}
    facts |= {"kind": record.name, "profile": record.profile}
    return facts | {"why": choose_backend(device).reason, "logits_in_registers": has_fused_products(device)}


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
