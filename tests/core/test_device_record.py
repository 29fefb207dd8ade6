"""Records of devices: of known kinds, and of devices with only PyTorch's properties."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flce.core.devices import (
    DEFAULT_FLOPS_PER_BYTE,
    KNOWN_KINDS,
    DeviceRecord,
    find_kinds,
    record_from_properties,
)


def properties(name: str, major: int, minor: int, multiprocessors: int, gib: float, **others: Any) -> SimpleNamespace:
    memory = int(gib * 2**30)
    counts = {"multi_processor_count": multiprocessors, "L2_cache_size": 7 << 20, "total_memory": memory}
    return SimpleNamespace(name=name, major=major, minor=minor, **counts, **others)


def detect(*args: Any, hip: bool = False, **others: Any) -> DeviceRecord:
    return record_from_properties(properties(*args, **others), hip)


@pytest.mark.parametrize(
    "name, flops_per_byte",
    [("H200", 206), ("RTX-4090", 164), ("RTX-3090", 76), ("L4", 403), ("A100-80GB", 153), ("MI300X", 247)],
)
def test_flops_of_a_byte_are_those_of_the_data_sheets(name: str, flops_per_byte: int) -> None:
    assert round(KNOWN_KINDS[name].half_flops / KNOWN_KINDS[name].bandwidth) == flops_per_byte


@pytest.mark.parametrize(
    "names, kinds",
    [
        (["RTX-4090", "rtx 4090", "RTX_4090", "Rtx4090", "4090", "NVIDIA GeForce RTX 4090"], ["RTX-4090"]),
        (["A6000", "NVIDIA RTX A6000"], ["RTX-A6000"]),
        (["NVIDIA A100-SXM4-40GB"], ["A100-40GB"]),
        (["NVIDIA H100 80GB HBM3", "H100"], ["H100"]),
        (["V100", "Tesla V100-SXM2-16GB"], ["V100"]),
        (["Tesla V100-SXM2-32GB"], ["V100-32GB"]),
        (["Tesla T4"], ["T4"]),
        (["A100"], ["A100-40GB", "A100-80GB"]),
        (["24GB", "24GiB"], ["RTX-3090", "RTX-4090", "A10", "L4"]),
        (["NVIDIA GeForce RTX 3080 Ti", "RTX 4080 SUPER", "RTX 4090 Laptop GPU", "A10G", "3080-12GB", "RTX", ""], []),
    ],
)
def test_names_of_kinds(names: list[str], kinds: list[str]) -> None:
    for name in names:
        assert [record.name for record in find_kinds(name)] == kinds, name


def test_a_compute_capability_stands_for_a_device_of_unknown_memory() -> None:
    assert find_kinds("sm_90a") == [KNOWN_KINDS["H200"]._replace(name="sm_90", memory=None)]
    assert find_kinds("sm_86") == [KNOWN_KINDS["A10"]._replace(name="sm_86", memory=None)]
    (newer,), (older,) = find_kinds("sm_103"), find_kinds("sm_61")
    assert newer == KNOWN_KINDS["B200"]._replace(name="sm_103", memory=None, arch="sm_103")
    assert older == KNOWN_KINDS["V100-32GB"]._replace(name="sm_61", memory=None, arch="sm_61")
    (near_hopper,) = find_kinds("sm_92")
    assert near_hopper == KNOWN_KINDS["H200"]._replace(name="sm_92", memory=None, arch="sm_92", own_products=False)
    assert (find_kinds("sm_"), find_kinds("H300")) == ([], [])


@pytest.mark.parametrize(
    "name, kind, args",
    [
        ("NVIDIA GeForce RTX 4090", "RTX-4090", (8, 9, 128, 23.5)),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", (8, 0, 108, 39.4)),
        ("NVIDIA A100 80GB PCIe", "A100-80GB", (8, 0, 108, 79.3)),
        ("NVIDIA H100 80GB HBM3", "H100", (9, 0, 132, 79.1)),
        ("NVIDIA A10", "A10", (8, 6, 72, 22.1)),
    ],
)
def test_a_device_that_is_there_is_of_a_known_kind(name: str, kind: str, args: tuple[Any, ...]) -> None:
    """The record of the kind gets the memory of this device."""
    assert detect(name, *args) == KNOWN_KINDS[kind]._replace(memory=int(args[-1] * 2**30))
    assert detect(name, *args)._replace(memory=None) == KNOWN_KINDS[kind]._replace(memory=None)


@pytest.mark.parametrize(
    "name, args",
    [
        ("NVIDIA A10G", (8, 6, 80, 22.1)),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9, 76, 15.7)),
        ("NVIDIA H100 PCIe", (9, 0, 114, 79.2)),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0, 14, 4.8)),
        ("NVIDIA TITAN RTX", (7, 5, 72, 23.6)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9, 142, 47.4)),
    ],
)
def test_a_device_of_no_known_kind(name: str, args: tuple[Any, ...]) -> None:
    """The record has PyTorch's properties, and rates in proportion to the multiprocessors."""
    found = detect(name, *args, shared_memory_per_block_optin=101376, regs_per_multiprocessor=65536)
    assert (found.name, found.arch) == (name, f"sm_{args[0]}{args[1]}")
    assert (found.multiprocessors, found.shared_memory, found.cache) == (args[2], 101376, 7 << 20)
    assert found.memory == int(args[3] * 2**30)
    assert found.half_flops / found.bandwidth == pytest.approx(DEFAULT_FLOPS_PER_BYTE)
    (like,) = find_kinds(found.arch)
    assert found.half_flops / found.multiprocessors == pytest.approx(like.half_flops / like.multiprocessors)
    assert found.own_products == (args[0] == 9)


def test_a_gpu_of_amd() -> None:
    args = "AMD Instinct MI300X", 9, 4, 304, 191.9
    assert detect(*args, hip=True, gcnArchName="gfx942:sramecc+:xnack-") == KNOWN_KINDS["MI300X"]
    other = detect("AMD Radeon PRO W7900", 11, 0, 96, 44.9, hip=True, gcnArchName="gfx1100")
    assert (other.arch, other.capability, other.warp_size, other.own_products) == ("gfx1100", 0, 32, False)
