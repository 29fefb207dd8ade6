"""Devices of this machine: lookup by name, and their records."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from flce.core.device_record import CPU, UNKNOWN_DEVICE, DeviceRecord, apply_profile, record_from_properties


def list_devices() -> list[torch.device]:
    """Return the accelerators that PyTorch finds, which all have one type, and the CPU."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if current is not None else 0
    return [*(torch.device(current.type, i) for i in range(count) if current is not None), torch.device("cpu")]


def find_device(name: str | torch.device | None, types: Iterable[str] = (), hint: str = "") -> torch.device:
    """Return the device with this name. None: an accelerator if there is one, else the CPU.

    Args:
        name: as in `torch.device`; without a number the current device of the type.
        types: allowed device types; empty: all types.
        hint: other values that the caller accepts, for the error.

    Raises:
        ValueError: there is no such device.
    """
    available = [device for device in list_devices() if not types or device.type in types]
    try:
        requested = torch.device(available[0].type if name is None else name)
    except RuntimeError:  # PyTorch rejects the name or the number
        requested = torch.device("meta")  # never in `available`
    if requested.index is None and requested.type == available[0].type != "cpu":
        requested = torch.device(requested.type, torch.accelerator.current_device_index())
    for found in available:
        if (found.type, found.index or 0) == (requested.type, requested.index or 0):
            return found
    raise ValueError(
        f"there is no device {str(name)!r} here: give one of {', '.join(map(str, available))}{hint and f', {hint}'}"
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device. Devices with the same name are equal."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_record(device: torch.device) -> DeviceRecord:
    """Return the record of a device of this machine. A profile may change the record of a GPU.

    With a process group the profile is ignored: all ranks must compute the same plan, and each machine may have another
    file.
    """
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        return UNKNOWN_DEVICE._replace(name=device.type)
    index = torch.cuda.current_device() if device.index is None and torch.cuda.is_available() else device.index
    in_a_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return _gpu_record(index, with_profile=not in_a_group)


@functools.cache
def _gpu_record(index: int | None, with_profile: bool) -> DeviceRecord:
    if not torch.cuda.is_available():
        return UNKNOWN_DEVICE
    detected = record_from_properties(torch.cuda.get_device_properties(index), torch.version.hip is not None)
    return apply_profile(detected, torch.cuda.get_device_name(index)) if with_profile else detected
