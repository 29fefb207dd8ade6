"""What a result was measured on and with: enough to judge it later, nothing that names a person's machine."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import flce

PACKAGES = ["triton", "transformers", "numpy", "liger-kernel", "cut-cross-entropy", "trl", "fla-core", "quack-kernels"]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "flce": flce.__version__}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def device_facts(device: torch.device) -> dict[str, Any]:
    cpu = cpu_name()
    facts: dict[str, Any] = {"type": device.type, "name": cpu, "cpu": cpu}
    facts |= {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if hasattr(os, "getloadavg"):
        facts["load_at_start"] = round(os.getloadavg()[0], 2)
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_mib": properties.total_memory >> 20,
        "multiprocessors": properties.multi_processor_count,
        "l2_cache_mib": properties.L2_cache_size >> 20,
    }


def source_version() -> str | None:
    """The commit of the checkout, with "-dirty" where files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, text=True, timeout=10, stderr=subprocess.DEVNULL).strip() or None
    return None


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe(device: torch.device, arguments: list[str]) -> dict[str, Any]:
    """The head of a result file. Of absolute paths in the command only the last part is kept."""
    shown = [Path(argument).name if os.path.isabs(argument) else argument for argument in arguments]
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python -m benchmarks", *shown]),
        "commit": source_version(),
        "versions": versions(),
        "device": device_facts(device),
    }
