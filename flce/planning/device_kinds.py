"""The device that `flce.plan` plans for: a device of this machine, or a device described by its kind."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flce.backends import choose_backend, device_has_fused_products, has_fused_products
from flce.core.devices import KNOWN_KINDS, DeviceRecord, device_record, find_device, find_kinds
from flce.core.numbers import check_int


class DescribedDevice(NamedTuple):
    """Properties of a device that a plan depends on: fields of a `Case`."""

    backend: str
    has_fused_products: bool
    device: DeviceRecord


def resolve_device(device: torch.device, kind: str | None, memory: int | None) -> DescribedDevice:
    """Check the arguments of `flce.plan`. Return a device of this machine, or, with a kind, a device that this machine
    may not have."""
    if memory is not None:
        memory = check_int("device_memory", memory)
        if memory < 1:
            raise ValueError(f"device_memory must be a positive number of bytes, got {memory}")
    if kind is None:
        if device.index is not None:
            find_device(device, hint="or device_kind for a GPU that is elsewhere" if device.type == "cuda" else "")
        record, backend, own = device_record(device), choose_backend(device).name, has_fused_products(device)
    else:
        record = _record_of_kind(device, kind)
        backend = choose_backend(device, target=record).name
        own = device_has_fused_products(backend, record)
    return DescribedDevice(backend, own, record if memory is None else record._replace(memory=memory))


def _record_of_kind(device: torch.device, kind: str) -> DeviceRecord:
    if not isinstance(kind, str):
        raise TypeError(f"device_kind must be a str, got {type(kind).__name__}")
    if device.type != "cuda":
        raise ValueError(f"device_kind={kind!r} is a kind of GPU, got device={str(device)!r}: give device='cuda'")
    records = find_kinds(kind)
    if len(records) == 1:
        return records[0]
    expected = ", ".join(record.name for record in records or KNOWN_KINDS.values())
    other = "" if records else ", or a compute capability such as 'sm_90'"
    raise ValueError(f"device_kind must be one of {expected}{other}, got {kind!r}")
