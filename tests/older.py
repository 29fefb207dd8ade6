"""A pytest plugin, `-p tests.older`, that runs code for an older NVIDIA device on the local GPU.

A driver compiles the PTX of an older device for the local device. Kernels are compiled for the device that OLDER_DEVICE
names (`tests.targets.TARGETS`) and launched with its launch sizes. The loader receives their PTX instead of a binary.
Each kernel that is compiled this way appends its name to the file OLDER_LOG.
"""

from __future__ import annotations

import ctypes
import os
import re
from types import SimpleNamespace
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    import torch
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import compiler

    from tests.targets import TARGETS

    target = TARGETS[os.environ["OLDER_DEVICE"]]
    capability = divmod(target.capability, 10)
    get_properties = torch.cuda.get_device_properties
    replaced = {
        "major": capability[0],
        "minor": capability[1],
        "multi_processor_count": target.multiprocessors,
        "L2_cache_size": target.cache,
        "regs_per_multiprocessor": target.registers,
        "name": target.name,
    }

    def properties(device: Any = None) -> SimpleNamespace:
        real = get_properties(torch.cuda.current_device() if device is None else device)
        return SimpleNamespace(**{n: getattr(real, n) for n in dir(real) if not n.startswith("_")} | replaced)

    # Triton reads the capability from PyTorch, and PyTorch reads it from these properties.
    torch.cuda.get_device_properties = properties  # type: ignore[assignment]
    assert torch.cuda.get_device_capability() == capability
    compiler.max_shared_mem = lambda device: target.shared_memory
    log, cuda = os.environ["OLDER_LOG"], _driver()
    knobs.cache.dir = f"{log}.kernels"  # a separate cache, because its files are PTX and not binaries

    def return_ptx(self: Any, ptx: str, metadata: dict[str, Any], options: Any, capability: int) -> bytes:
        assert capability == target.capability
        with open(log, "a") as file:
            file.write(f"{metadata['name']}\n")
        return limit_ptx_version(ptx, cuda).encode() + b"\0"

    CUDABackend.make_cubin = return_ptx


def limit_ptx_version(ptx: str, cuda: int) -> str:
    """Return the PTX with a version that a driver of this CUDA (12080: 12.8) supports. Code for an older device uses no
    newer instructions."""
    major, minor = cuda // 1000, cuda % 1000 // 10
    # CUDA 11.x has PTX 7.x, 12.0 to 12.5 have 8.0 to 8.5, later 12.x have one minor version less, 13.x has 9.x.
    newest = (major - 4, minor - (major == 12 and minor > 5))
    version = re.search(r"\.version (\d+)\.(\d+)", ptx)
    assert version is not None
    if (int(version[1]), int(version[2])) <= newest:
        return ptx
    return ptx.replace(version[0], f".version {newest[0]}.{newest[1]}", 1)


def _driver() -> int:
    version = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    return version.value
