"""The device that `flce.plan` plans for: one of this machine, or one that is described."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from flce.backends import backend_name, has_product, has_product_of
from flce.core.devices import device_name, find_device, total_memory
from flce.core.numbers import integer


class Kind(NamedTuple):
    capability: int
    """The major number of the compute capability."""
    memory: int | None
    """Bytes, as PyTorch counts them: a few percent less than what the name says. None: not known."""


def _gib(number: float) -> int:
    return int(number * 2**30)


# H100 and H200: `torch.cuda.get_device_properties`; the others: PyTorch's out-of-memory messages of such devices.
KINDS = {
    "A100-40GB": Kind(8, _gib(39.4)),
    "A100-80GB": Kind(8, _gib(79.1)),
    "L4": Kind(8, _gib(22.0)),
    "L40S": Kind(8, _gib(44.4)),
    "RTX-3090": Kind(8, _gib(23.6)),
    "RTX-4090": Kind(8, _gib(23.6)),
    "H100": Kind(9, _gib(79.1)),
    "H200": Kind(9, _gib(139.8)),
    "B200": Kind(10, _gib(178.3)),
}


class Described(NamedTuple):
    """What a plan depends on of a device."""

    backend: str
    has_product: bool
    memory: int | None


def described(device: torch.device, kind: str | None, memory: int | None) -> Described:
    """A device of this machine; with a kind, one that need not be there.

    Raises:
        TypeError, ValueError: what is wrong with the kind or the memory.
    """
    if memory is not None:
        memory = integer("device_memory", memory)
        if memory < 1:
            raise ValueError(f"device_memory must be a positive number of bytes, got {memory}")
    if kind is None:
        if device.index is not None:
            find_device(device, hint="or device_kind for a GPU that is elsewhere" if device.type == "cuda" else "")
        return Described(backend_name(device), has_product(device), total_memory(device) if memory is None else memory)
    if not isinstance(kind, str):
        raise TypeError(f"device_kind must be a str, got {type(kind).__name__}")
    if device.type != "cuda":
        raise ValueError(
            f"device_kind={kind!r} is a kind of NVIDIA GPU, got device={str(device)!r}: give device='cuda'"
        )
    known = _known(kind)
    backend = backend_name(device, there=True)
    return Described(backend, has_product_of(backend, known.capability), known.memory if memory is None else memory)


def kind_text(device: torch.device, kind: str | None) -> str:
    """The kind of a device that is described, in words."""
    if kind is not None:
        return next((name for name in KINDS if name.lower() == kind.lower()), kind)
    return "a GPU of unknown kind" if device.type == "cuda" and not torch.cuda.is_available() else device_name(device)


def _known(kind: str) -> Kind:
    for name, known in KINDS.items():
        if name.lower() == kind.lower():
            return known
    capability = re.fullmatch(r"sm_(\d+)\d[a-z]?", kind)
    if capability is None:
        raise ValueError(
            f"device_kind must be one of {', '.join(KINDS)}, or a compute capability such as 'sm_90', got {kind!r}"
        )
    return Kind(int(capability[1]), None)
