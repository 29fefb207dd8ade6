"""The devices of this machine."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch


def devices() -> list[torch.device]:
    """The accelerators that PyTorch sees, which are of one type, and the CPU."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if current is not None else 0
    return [*(torch.device(current.type, i) for i in range(count) if current is not None), torch.device("cpu")]


def find_device(name: str | torch.device | None, types: Iterable[str] = (), hint: str = "") -> torch.device:
    """The device of this name; without a number the current one. None: an accelerator if there is one, else the CPU.

    Args:
        name: as PyTorch writes it.
        types: only of one of these.
        hint: what else can be given, for the error.

    Raises:
        ValueError: there is no such device.
    """
    there = [device for device in devices() if not types or device.type in types]
    try:
        wanted = torch.device(there[0].type if name is None else name)
    except RuntimeError:  # a name or a number that PyTorch does not know
        wanted = torch.device("meta")  # which is none of them
    if wanted.index is None and wanted.type == there[0].type != "cpu":
        wanted = torch.device(wanted.type, torch.accelerator.current_device_index())
    for found in there:
        if (found.type, found.index or 0) == (wanted.type, wanted.index or 0):
            return found
    raise ValueError(
        f"there is no device {str(name)!r} here: give one of {', '.join(map(str, there))}{hint and f', {hint}'}"
    )


def device_name(device: torch.device) -> str:
    """Devices of one name are equal."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def capability(device: torch.device) -> int:
    """The major number of the compute capability of an NVIDIA GPU; 0: there is none. AMD's also have numbers, up to 12,
    which say something else."""
    return 0 if torch.version.hip is not None else _properties(device.index)[0]


def total_memory(device: torch.device) -> int | None:
    """Bytes of a device that is there and has memory of its own."""
    return _properties(device.index)[1] if device.type == "cuda" else None


def _properties(index: int | None) -> tuple[int, int | None]:
    """The major number of the compute capability and the bytes of memory of a CUDA device; None: the current one."""
    if index is None:
        if not torch.cuda.is_available():
            return 0, None
        index = torch.cuda.current_device()
    return _properties_of(index)


@functools.cache
def _properties_of(index: int) -> tuple[int, int | None]:
    if not torch.cuda.is_available():
        return 0, None
    properties = torch.cuda.get_device_properties(index)
    return properties.major, properties.total_memory
