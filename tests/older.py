"""Code for an older NVIDIA device, run on the GPU that is here: a plugin of pytest, `-p tests.older`.

A driver compiles the PTX of an older device for its own. So kernels are compiled for the device that FLCE_OLDER names
(`tests.targets.TARGETS`), launched as they would be there, and their PTX goes to the loader in the binary's place. Each
kernel that is compiled so adds its name to the file FLCE_OLDER_LOG.
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

    target = TARGETS[os.environ["FLCE_OLDER"]]
    capability = divmod(target.capability, 10)
    asked = torch.cuda.get_device_properties
    told = {
        "major": capability[0],
        "minor": capability[1],
        "multi_processor_count": target.multiprocessors,
        "L2_cache_size": target.cache,
        "regs_per_multiprocessor": target.registers,
        "name": target.name,
    }

    def properties(device: Any = None) -> SimpleNamespace:
        real = asked(torch.cuda.current_device() if device is None else device)
        return SimpleNamespace(**{n: getattr(real, n) for n in dir(real) if not n.startswith("_")} | told)

    # Triton asks PyTorch for the capability, and PyTorch these properties.
    torch.cuda.get_device_properties = properties  # type: ignore[assignment]
    assert torch.cuda.get_device_capability() == capability
    compiler.max_shared_mem = lambda device: target.shared_memory
    log, cuda = os.environ["FLCE_OLDER_LOG"], _driver()
    knobs.cache.dir = f"{log}.kernels"  # what is no binary is to be found by nothing else

    def ptx_itself(self: Any, ptx: str, metadata: dict[str, Any], options: Any, capability: int) -> bytes:
        assert capability == target.capability
        with open(log, "a") as file:
            file.write(f"{metadata['name']}\n")
        return readable(ptx, cuda).encode() + b"\0"

    CUDABackend.make_cubin = ptx_itself


def readable(ptx: str, cuda: int) -> str:
    """With a version that a driver of this CUDA (12080: 12.8) knows. Code for an older device has nothing new in it."""
    major, minor = cuda // 1000, cuda % 1000 // 10
    # CUDA 11.x has PTX 7.x; 12.0 to 12.5 8.0 to 8.5, and from 12.6 on one less; 13.x 9.x.
    most = (major - 4, minor - (major == 12 and minor > 5))
    found = re.search(r"\.version (\d+)\.(\d+)", ptx)
    assert found is not None
    if (int(found[1]), int(found[2])) <= most:
        return ptx
    return ptx.replace(found[0], f".version {most[0]}.{most[1]}", 1)


def _driver() -> int:
    version = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    return version.value
