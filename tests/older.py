"""Code for an older NVIDIA device, run on the GPU that is here: a plugin of pytest, `-p tests.older`.

A driver compiles the PTX of an older device for its own. So kernels are compiled for the device that FLCE_OLDER names
(`tests.targets.TARGETS`), launched as they would be there, and their PTX is loaded in the binary's place. Each kernel
that is loaded so adds its name to the file FLCE_OLDER_LOG.
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
    import triton.compiler.compiler as compiler

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
    torch.cuda.get_device_properties = properties
    assert torch.cuda.get_device_capability() == capability
    compiler.max_shared_mem = lambda device: target.shared_memory
    make = compiler.CompiledKernel.__init__

    def with_ptx(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        assert self.metadata.target.arch == target.capability
        self.kernel = _readable(self.asm["ptx"]).encode() + b"\0"
        with open(os.environ["FLCE_OLDER_LOG"], "a") as log:
            log.write(f"{self.name}\n")

    compiler.CompiledKernel.__init__ = with_ptx


def _readable(ptx: str) -> str:
    """With a version that the driver knows. Code for an older device has nothing in it that is new."""
    version = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    major, minor = version.value // 1000, version.value % 1000 // 10
    # CUDA 11.x has PTX 7.x; 12.0 to 12.5 8.0 to 8.5, 12.6 on 8.5 on; 13.x 9.x.
    most = (major - 4, minor - (major == 12 and minor > 5))
    found = re.search(r"\.version (\d+)\.(\d+)", ptx)
    assert found is not None
    if (int(found[1]), int(found[2])) <= most:
        return ptx
    return ptx.replace(found[0], f".version {most[0]}.{most[1]}", 1)
