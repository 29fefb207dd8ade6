"""Choice of the backend: one contract (`contract.py`), two implementations."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from flce.backends.contract import Backend


def backend_name(device: torch.device) -> str:
    """ "triton" or "torch": ``FLCE_BACKEND`` if set, else by device (CUDA tensors: triton, where it exists).

    For meta tensors, of which no kernel sees anything, it is "torch" in any case.
    With ``TRITON_INTERPRET=1`` CPU tensors take the Triton backend too. AMD devices, "cuda" to PyTorch, do not:
    launches are made for warps of 32 threads.

    Raises:
        ValueError: ``FLCE_BACKEND`` has another value, or asks for Triton where it cannot run.
    """
    return _backend_name(device, os.environ.get("FLCE_BACKEND", ""), os.environ.get("TRITON_INTERPRET") == "1")


@functools.lru_cache(maxsize=256)
def _backend_name(device: torch.device, choice: str, interpreted: bool) -> str:
    if choice not in ("", "torch", "triton"):
        raise ValueError(f"FLCE_BACKEND must be 'torch' or 'triton', got {choice!r}")
    if device.type == "meta":
        return "torch"
    nvidia = device.type == "cuda" and torch.version.hip is None
    possible = (nvidia or (device.type == "cpu" and interpreted)) and _has_triton()
    if choice == "triton" and not possible:
        raise ValueError(
            f"FLCE_BACKEND=triton cannot run on {device.type} tensors here: it needs the triton package and "
            "an NVIDIA device, or TRITON_INTERPRET=1 and CPU tensors"
        )
    return choice or ("triton" if possible else "torch")


def has_product(device: torch.device) -> bool:
    """Whether the backend makes products whose logits never are in memory, and as fast as the vendor's.

    On Hopper: that is where it was measured.
    """
    return device.type == "cuda" and backend_name(device) == "triton" and capability(device) == 9


def capability(device: torch.device) -> int:
    """The major number of the compute capability of a CUDA device; 0: there is none."""
    return _properties(device.index)[0]


def total_memory(device: torch.device) -> int | None:
    """Bytes of a device that is there and has memory of its own."""
    return _properties(device.index)[1] if device.type == "cuda" else None


def _properties(index: int | None) -> tuple[int, int | None]:
    """Of a CUDA device, None being the current one: major number of its compute capability, bytes of memory."""
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


def get_backend(device: torch.device) -> Backend:
    return load(backend_name(device))


@functools.cache
def _has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules["triton"] is None
        return False


@functools.cache
def load(name: str) -> Backend:
    """ "triton" or "torch"."""
    # Imported late: importing Triton takes as long as everything else together.
    if name == "triton":
        from flce.backends.triton import TritonBackend

        return TritonBackend()
    from flce.backends.eager import TorchBackend

    return TorchBackend()
