"""The device that `flce.plan` plans for: one of this machine, or one that is described."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flce.backends import choose_backend, device_has_product, has_product
from flce.core.device_record import KNOWN_KINDS, UNKNOWN_DEVICE, DeviceRecord, normalize_name, record_of_kind
from flce.core.devices import device_name, device_record, find_device
from flce.core.numbers import check_int


class DescribedDevice(NamedTuple):
    """What a plan depends on of a device: fields of a `Case`."""

    backend: str
    has_product: bool
    device: DeviceRecord


def resolve_device(device: torch.device, kind: str | None, memory: int | None) -> DescribedDevice:
    """A device of this machine; with a kind, one that need not be there.

    Raises:
        TypeError, ValueError: what is wrong with the kind or the memory.
    """
    if memory is not None:
        memory = check_int("device_memory", memory)
        if memory < 1:
            raise ValueError(f"device_memory must be a positive number of bytes, got {memory}")
    if kind is None:
        if device.index is not None:
            find_device(device, hint="or device_kind for a GPU that is elsewhere" if device.type == "cuda" else "")
        found, backend, own = device_record(device), choose_backend(device).name, has_product(device)
    else:
        found = _record_of_named_kind(device, kind)
        backend = choose_backend(device, target=found).name
        own = device_has_product(backend, found)
    return DescribedDevice(backend, own, found if memory is None else found._replace(memory=memory))


def kind_text(device: torch.device, kind: str | None) -> str:
    """The kind of a device that is described, in words."""
    if kind is not None:
        found = _record_of_named_kind(device, kind)
        return found.name if normalize_name(found.name) == normalize_name(kind) else kind
    return UNKNOWN_DEVICE.name if device.type == "cuda" and not torch.cuda.is_available() else device_name(device)


def _record_of_named_kind(device: torch.device, kind: str) -> DeviceRecord:
    if not isinstance(kind, str):
        raise TypeError(f"device_kind must be a str, got {type(kind).__name__}")
    if device.type != "cuda":
        raise ValueError(f"device_kind={kind!r} is a kind of GPU, got device={str(device)!r}: give device='cuda'")
    found = record_of_kind(kind)
    if found is None:
        raise ValueError(
            f"device_kind must be one of {', '.join(KNOWN_KINDS)}, or a compute capability such as 'sm_90', "
            f"got {kind!r}"
        )
    return found
