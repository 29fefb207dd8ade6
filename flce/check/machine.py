"""What there is to check on this machine: devices, their dtypes, the backends that run on them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from flce.backends import backend_name, why_backend

BACKENDS = ("triton", "torch")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BACKEND_VARIABLE = "FLCE_BACKEND"


def accelerators() -> list[torch.device]:
    """Every one that PyTorch sees, which are of one type."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [] if current is None else [torch.device(current.type, i) for i in range(torch.accelerator.device_count())]


def devices() -> list[torch.device]:
    """The accelerators, and the CPU."""
    return [*accelerators(), torch.device("cpu")]


def devices_of_a_kind() -> tuple[list[torch.device], dict[torch.device, torch.device]]:
    """One device of each name, and those that are as one of them."""
    first: dict[str, torch.device] = {}
    same: dict[torch.device, torch.device] = {}
    for device in devices():
        kept = first.setdefault(device_name(device), device)
        if kept != device:
            same[device] = kept
    return list(first.values()), same


def device_name(device: torch.device) -> str:
    """What it is called. Devices of one name are equal."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def why_no_dtype(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a device cannot compute in a dtype; None: it can."""
    if device.type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        return f"{device_name(device)} has no bfloat16"
    if dtype == torch.float64 and not has_float64(device):
        return f"{device.type} devices have no float64"
    return None


def has_float64(device: torch.device) -> bool:
    return device.type != "mps"


def interpreted(device: torch.device, backend: str) -> bool:
    """Whether Triton's kernels run in its interpreter, which is slow."""
    return backend == "triton" and device.type == "cpu"


def repeatable(device: torch.device, backend: str) -> bool:
    """Whether a second run has to have the same bits.

    Where logits begin in memory, modulo 128 bytes, decides in which order a kernel adds. Memory of a GPU always begins
    alike there, but that of a CPU, which kernels see in the interpreter, does not.
    """
    return not interpreted(device, backend)


def why_no_backend(device: torch.device, backend: str) -> str | None:
    """Why a backend cannot run on a device; None: it can."""
    if backend == "torch":
        return None
    with chosen(""):  # by flce, whatever the user has asked for
        if backend_name(device) == backend:
            return None
        hint = ". TRITON_INTERPRET=1 runs them in Triton's interpreter" if device.type == "cpu" else ""
        return why_backend(device) + hint


@contextlib.contextmanager
def chosen(backend: str) -> Iterator[None]:
    """Within it every call takes this backend; "": the one that flce chooses."""
    before = os.environ.get(_BACKEND_VARIABLE)
    os.environ[_BACKEND_VARIABLE] = backend
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BACKEND_VARIABLE]
        else:
            os.environ[_BACKEND_VARIABLE] = before


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Within it PyTorch uses so many on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
