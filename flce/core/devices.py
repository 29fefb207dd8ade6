"""The devices of this machine."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from flce.core.device_profile import profile, with_profile
from flce.core.device_record import CPU, UNKNOWN, Device, device_told


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


def device_record(device: torch.device) -> Device:
    """What is known of a device of this machine, a GPU as the profile says.

    With a process group there is no profile: all ranks must plan alike, and each machine may have another file.

    Raises:
        ValueError: the profile is wrong, or of another device.
    """
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        return UNKNOWN._replace(name=device.type)
    index = torch.cuda.current_device() if device.index is None and torch.cuda.is_available() else device.index
    found = _profiled(index)
    in_a_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return _told(index) if found.profile is not None and in_a_group else found


@functools.cache
def _profiled(index: int | None) -> Device:
    told = _told(index)
    return told if told is UNKNOWN or profile() is None else with_profile(told, torch.cuda.get_device_name(index))


@functools.cache
def _told(index: int | None) -> Device:
    if not torch.cuda.is_available():
        return UNKNOWN
    return device_told(torch.cuda.get_device_properties(index), torch.version.hip is not None)
