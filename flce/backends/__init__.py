"""The choice of the backend, Triton or plain PyTorch. Both implement the contract (`contract.py`)."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import NamedTuple

import torch

from flce.backends.contract import Backend
from flce.core.devices import DeviceRecord, device_record

# Ten times the oldest compute capability that the kernels are compiled for in the tests (`tests/targets.py`).
OLDEST = 75


class Choice(NamedTuple):
    """A backend, and why it was chosen."""

    name: str
    """ "triton" or "torch"."""
    reason: str


def choose_backend(device: torch.device, target: DeviceRecord | None = None) -> Choice:
    """Return ``FLCE_BACKEND`` if it is set, else the default of the device: "triton" for NVIDIA GPUs if Triton is
    installed and, with ``TRITON_INTERPRET=1``, for CPU tensors. Meta tensors have no values: their backend is "torch".

    Args:
        device: the device of the tensors.
        target: a GPU of another machine with Triton, for which the backend is chosen. None: the GPU of this machine.
    """
    requested, interpreted = os.environ.get("FLCE_BACKEND", ""), os.environ.get("TRITON_INTERPRET") == "1"
    return _choose(device, requested, interpreted, "" if target is None else target.arch)


@functools.lru_cache(maxsize=256)
def _choose(device: torch.device, requested: str, interpreted: bool, target: str) -> Choice:
    if requested not in ("", "torch", "triton"):
        raise ValueError(f"FLCE_BACKEND must be 'torch' or 'triton', got {requested!r}")
    arch = target or (device_record(device).arch if device.type == "cuda" else "")
    amd, capability = arch.startswith("gfx"), int(arch.removeprefix("sm_")) if arch.startswith("sm_") else 0
    if device.type == "meta" and not target:
        return Choice("torch", "meta tensors have no values")
    if not arch and not (device.type == "cpu" and interpreted):
        default = Choice("torch", f"the kernels are for NVIDIA GPUs, and the device is {device.type}")
    elif amd:
        default = Choice("torch", "the kernels have not been run on an AMD GPU; to run them, set FLCE_BACKEND=triton")
    elif arch and capability < OLDEST:
        limit = f"the kernels are for compute capability {OLDEST / 10} or newer, and the GPU has {capability / 10}"
        default = Choice("torch", limit)
    elif target:
        default = Choice("triton", "another machine, with an NVIDIA GPU and Triton")
    elif not _has_triton():
        default = Choice("torch", "Triton is not installed")
    elif arch:
        default = Choice("triton", "an NVIDIA GPU, and Triton is installed")
    else:
        default = Choice("triton", "TRITON_INTERPRET=1 runs the kernels in Triton's interpreter")
    if requested == "triton" and default.name != requested and not (amd and (target or _has_triton())):
        raise ValueError(
            f"FLCE_BACKEND=triton cannot run on {device.type} tensors here: it needs the triton package and a GPU of "
            f"AMD, or of NVIDIA from compute capability {OLDEST / 10} on; or TRITON_INTERPRET=1 and CPU tensors. "
            f"Without it: {default.reason}"
        )
    return Choice(requested, "FLCE_BACKEND selects it") if requested else default


def has_fused_products(device: torch.device) -> bool:
    """Return True if the backend has fused products for the device that are as fast as the vendor's products."""
    return device.type == "cuda" and device_has_fused_products(choose_backend(device).name, device_record(device))


def device_has_fused_products(backend: str, device: DeviceRecord) -> bool:
    """Return `has_fused_products` for a device that this machine may not have."""
    return backend == "triton" and device.own_products


def get_backend(device: torch.device) -> Backend:
    return load_backend(choose_backend(device).name)


@functools.cache
def _has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules["triton"] is None
        return False


@functools.cache
def load_backend(name: str) -> Backend:
    """Return the backend "triton" or "torch"."""
    # Imported late: importing Triton takes as long as all other imports together.
    if name == "triton":
        from flce.backends.triton import TritonBackend

        return TritonBackend()
    from flce.backends.eager import TorchBackend

    return TorchBackend()
