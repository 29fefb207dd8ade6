"""The devices of this machine, and `DeviceRecord`: rates and sizes of a device, from the table of known kinds or from
PyTorch's device properties.

The rates are the rates of the vendors' data sheets: without sparsity, with sums in float32 (a GeForce then multiplies
at half speed). `flce.planning.dry_run` estimates the part of these rates that calls reach.

A *profile* is a JSON file, named by ``FLCE_PROFILE``, that changes the records of the GPUs of this machine. The file
has one object. Its ``name`` is the name of the device, as in PyTorch or in the table of known kinds. Every other member
is a field of `DeviceRecord`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch


class DeviceRecord(NamedTuple):
    """Rates and sizes of one kind of device."""

    name: str
    arch: str
    """Architecture for which kernels are compiled: "sm_90" (compute capability 9.0), "gfx942"; "": no GPU."""
    multiprocessors: int
    """Number of multiprocessors; on AMD, of compute units."""
    shared_memory: int
    """Bytes of shared memory that one program can use."""
    registers: int
    """Registers of a multiprocessor, 32 bits each."""
    cache: int
    """Bytes of the L2 cache."""
    memory: int | None
    """Bytes as PyTorch reports them: a few percent less than in the name. None: unknown, or no separate memory."""
    bandwidth: float
    """Bytes of memory per second."""
    half_flops: float
    """Flops per second of products in bfloat16 and float16."""
    wide_flops: float
    """Flops per second of products in float32, without TF32."""
    own_products: bool
    """True if flce's fused products are used. They are used on architectures where they were measured."""
    profile: str | None = None
    """The profile file that changed this record: see `apply_profile`."""

    @property
    def capability(self) -> int:
        """The compute capability times ten, such as 86; 0 if the device is not an NVIDIA GPU."""
        number = re.fullmatch(r"sm_(\d+)", self.arch)
        return int(number[1]) if number else 0

    @property
    def warp_size(self) -> int:
        """Threads of a warp; on AMD, of a wavefront."""
        return 64 if self.arch.startswith("gfx9") else 32


# Architecture on which flce's fused products were measured, and are as fast as the vendor's products.
_OWN_PRODUCTS_ARCH = "sm_90"
# Rates, L2 caches and multiprocessors: the sources in the table. Memory: PyTorch's out-of-memory messages and
# deviceQuery; for H100 and H200 memory and cache: `torch.cuda.get_device_properties`. Shared memory: CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability"; AMD's white paper.
_TABLE = """
kind       arch    multipr. shared, KiB  L2, MiB  memory, GiB  GB/s   bf16   float32, 1e12 flops a second; source
V100       sm_70   80       96           6        15.8         900    125    15.7   NVIDIA V100, data sheet: SXM2
V100-32GB  sm_70   80       96           6        31.7         900    125    15.7   NVIDIA V100, data sheet: SXM2
T4         sm_75   40       64           4        14.6         320    65     8.1    NVIDIA T4, data sheet
RTX-3060   sm_86   28       99           3        11.8         360    25.5   12.7   NVIDIA GeForce RTX 3060, NVIDIA.com
RTX-3080   sm_86   68       99           5        9.8          760    59.5   29.8   NVIDIA GA102 architecture, V2.1
RTX-3090   sm_86   82       99           6        23.6         936    71     35.6   NVIDIA GA102 architecture, V2.1
RTX-4080   sm_89   76       99           64       15.7         717    97.5   48.7   NVIDIA Ada architecture, V2.1
RTX-4090   sm_89   128      99           72       23.6         1008   165.2  82.6   NVIDIA Ada architecture, V2.1
RTX-5090   sm_120  170      99           96       31.3         1792   209.5  104.8  NVIDIA RTX Blackwell architecture
RTX-A6000  sm_86   84       99           6        47.5         768    154.8  38.7   NVIDIA RTX A6000, data sheet
A10        sm_86   72       99           6        22.0         600    125    31.2   NVIDIA A10, data sheet
L4         sm_89   58       99           48       22.0         300    121    30.3   NVIDIA L4, data sheet
L40S       sm_89   142      99           96       44.4         864    362    91.6   NVIDIA L40S, data sheet
A100-40GB  sm_80   108      163          40       39.4         1555   312    19.5   NVIDIA A100, data sheet
A100-80GB  sm_80   108      163          40       79.1         2039   312    19.5   NVIDIA A100, data sheet: SXM
H100       sm_90   132      227          50       79.1         3350   989    67     NVIDIA H100, data sheet: SXM
H200       sm_90   132      227          60       139.8        4800   989    67     NVIDIA H200, data sheet: SXM
B200       sm_100  148      227          126      178.3        8000   2250   75     NVIDIA HGX B200, an eighth of it
MI300X     gfx942  304      64           32       191.9        5300   1307   163.4  AMD MI300X, data sheet, white paper
"""


def _parse_record(line: str) -> DeviceRecord:
    name, arch, *numbers, _source = line.split(maxsplit=9)
    multiprocessors, shared, cache, memory, bandwidth, half, wide = map(float, numbers)
    return DeviceRecord(
        name=name,
        arch=arch,
        multiprocessors=int(multiprocessors),
        shared_memory=int(shared) << 10,
        registers=131072 if arch == "gfx942" else 65536,
        cache=int(cache) << 20,
        memory=int(memory * 2**30),
        bandwidth=bandwidth * 1e9,
        half_flops=half * 1e12,
        wide_flops=wide * 1e12,
        own_products=arch == _OWN_PRODUCTS_ARCH,
    )


KNOWN_KINDS = {device.name: device for device in map(_parse_record, _TABLE.strip().splitlines()[1:])}

# Rates of products were measured on two cores without instructions for half precision: benchmarks/results/cpu.json. For
# Triton's interpreter the CPU is one multiprocessor without a cache.
CPU = DeviceRecord("cpu", "", 1, 1 << 30, 65536, 0, None, 19e9, 150e9, 150e9, False)
# For unknown devices, and for plans without a GPU: the GPU of the measurements, without the features of Hopper.
UNKNOWN_DEVICE = KNOWN_KINDS["H200"]._replace(name="a GPU of unknown kind", memory=None, own_products=False)
# Flops per byte of a device with unknown bandwidth. Most known devices have fewer: a high number is cautious, because
# it raises the estimated cost of each pass over memory.
DEFAULT_FLOPS_PER_BYTE = 300


def normalize_name(name: str) -> str:
    """Return a name without spaces, hyphens and underscores, in lower case, for comparison."""
    return re.sub(r"[\s_-]+", "", name).lower()


def find_kinds(kind: str) -> list[DeviceRecord]:
    """Return the records that a kind names: "RTX-4090", PyTorch's "NVIDIA GeForce RTX 4090" and "4090" one record,
    "A100" and "24GB" several. A compute capability such as "sm_90" is a record whose memory is unknown."""
    arch = re.fullmatch(r"(sm\d{2,})[a-z]?", normalize_name(kind))
    if arch is not None:
        name = arch[1].replace("sm", "sm_")
        return [_nearest_record(name)._replace(name=name, memory=None)]
    model, gigabytes = _model_and_gigabytes(kind)
    same_name = [known for known in KNOWN_KINDS.values() if normalize_name(known.name) == normalize_name(kind)]
    return same_name or [
        record
        for record in KNOWN_KINDS.values()
        if (model or gigabytes)
        and model in ("", _model_and_gigabytes(record.name)[0])
        and (not gigabytes or abs((record.memory or 0) / 2**30 - gigabytes) < 0.1 * gigabytes)
    ]


def _model_and_gigabytes(name: str) -> tuple[str, int]:
    """Return the model in a GPU's name without vendor, series and form factor, and its memory (0: not in the name)."""
    words = re.sub(r"nvidia|geforce|tesla|rtx|amd|instinct|pcie|sxm\d?|hbm\d?e?|[^a-z0-9]", " ", name.lower()).split()
    sizes = [int(size[1]) for word in words if (size := re.fullmatch(r"(\d+)gi?b", word))]
    return "".join(word for word in words if not re.fullmatch(r"\d+gi?b", word)), max(sizes, default=0)


def record_from_properties(properties: Any, hip: bool) -> DeviceRecord:
    """Return the record of a device with these `torch.cuda.get_device_properties`. `hip`: True for an AMD GPU."""
    arch = properties.gcnArchName.partition(":")[0] if hip else f"sm_{properties.major}{properties.minor}"
    base = _nearest_record(arch)
    reported = {
        "multiprocessors": properties.multi_processor_count,
        "shared_memory": getattr(properties, "shared_memory_per_block_optin", 0) or base.shared_memory,
        "registers": getattr(properties, "regs_per_multiprocessor", 0) or base.registers,
        "cache": properties.L2_cache_size,
        "memory": properties.total_memory,
    }
    words = {*re.split(r"[^a-z0-9]+", properties.name.lower())}
    for kind in KNOWN_KINDS.values():
        if words >= {*kind.name.lower().split("-")} and kind.multiprocessors == reported["multiprocessors"]:
            return kind._replace(memory=properties.total_memory)
    half = base.half_flops * reported["multiprocessors"] / base.multiprocessors
    wide = base.wide_flops * reported["multiprocessors"] / base.multiprocessors
    rates = {"half_flops": half, "wide_flops": wide, "bandwidth": half / DEFAULT_FLOPS_PER_BYTE}
    return base._replace(name=properties.name, **reported, **rates)


def _nearest_record(arch: str) -> DeviceRecord:
    """Return the record for an architecture: the last in the table with this architecture, or else the nearest.

    An older architecture is preferred to a newer one. Fused products are used only on the architecture where they were
    measured.
    """
    if not arch.startswith("sm_"):
        return KNOWN_KINDS["MI300X"]._replace(arch=arch)
    number = int(arch.removeprefix("sm_"))
    known_gpus = [device for device in reversed(KNOWN_KINDS.values()) if device.capability]
    nearest = min(known_gpus, key=lambda device: (device.capability > number, abs(device.capability - number)))
    return nearest._replace(arch=arch, own_products=arch == _OWN_PRODUCTS_ARCH)


# ---------------------------------------------------------------------------------------------------------
# Profiles

_INTEGER_FIELDS = ("multiprocessors", "shared_memory", "registers", "cache", "memory")
_RATE_FIELDS = ("bandwidth", "half_flops", "wide_flops")
_FIELDS = ("name", "arch", *_INTEGER_FIELDS, *_RATE_FIELDS, "own_products")


@functools.cache
def load_profile() -> tuple[str, Mapping[str, Any]] | None:
    """Return the path and the contents of the profile, read at the first call, or None if there is no profile. Raise
    ValueError if the file is not a profile."""
    path = os.environ.get("FLCE_PROFILE", "")
    if not path:
        return None
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _profile_error(path, f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # neither JSON nor UTF-8
        raise _profile_error(path, f"is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise _profile_error(path, "must be an object with the name of the device, such as {'name': 'RTX-4090', ...}")
    for field, value in found.items():
        if field not in _FIELDS:
            raise _profile_error(path, f"has a field {field!r}, expected some of {', '.join(_FIELDS)}")
        expected = _describe_expected(field, value)
        if expected is not None:
            raise _profile_error(path, f"must have {expected} as {field}, got {value!r}")
    return path, found


def apply_profile(device: DeviceRecord, name: str) -> DeviceRecord:
    """Return the record with the changes of the profile. `name`: of the device in PyTorch. Raise ValueError if the
    profile is for another device."""
    loaded = load_profile()
    if loaded is None:
        return device
    path, fields = loaded
    if normalize_name(fields["name"]) not in (normalize_name(name), normalize_name(device.name)):
        raise _profile_error(path, f"is for {fields['name']!r}, and this device is {name!r}")
    return device._replace(**{**fields, "name": device.name, "profile": path})


def _describe_expected(field: str, value: Any) -> str | None:
    """Return a description of the values that the field may have, or None if the value is valid."""
    if field == "own_products":
        return None if isinstance(value, bool) else "true or false"
    if field not in (*_INTEGER_FIELDS, *_RATE_FIELDS):
        fits = isinstance(value, str) and (field == "name" or re.fullmatch(r"sm_\d+|gfx\w+", value))
        return None if fits else "a text such as 'sm_89'"
    number = isinstance(value, int if field in _INTEGER_FIELDS else (int, float)) and not isinstance(value, bool)
    return (
        None if number and 0 < value < math.inf else f"a positive {'whole ' if field in _INTEGER_FIELDS else ''}number"
    )


def _profile_error(path: str, problem: str) -> ValueError:
    return ValueError(f"FLCE_PROFILE={path} {problem}")


# ---------------------------------------------------------------------------------------------------------
# Devices of this machine


def list_devices() -> list[torch.device]:
    """Return the accelerators that PyTorch finds, which all have one type, and the CPU."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if current is not None else 0
    return [*(torch.device(current.type, i) for i in range(count) if current is not None), torch.device("cpu")]


def find_device(name: str | torch.device | None, hint: str = "") -> torch.device:
    """Return the device with this name. None: an accelerator if there is one, else the CPU.

    Args:
        name: as in `torch.device`; without a number the current device of the type.
        hint: other values that the caller accepts, for the error.

    Raises:
        ValueError: there is no such device.
    """
    available = list_devices()
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
