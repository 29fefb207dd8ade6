"""The table of docs/devices.md, the record of each kind of device; and predicted times of default plans, for tests."""

from __future__ import annotations

from typing import NamedTuple

import torch

import flce
from benchmarks.tables import Table
from flce.core.devices import KNOWN_KINDS, DeviceRecord
from flce.core.sizes import GIB
from flce.planning import dry_run
from flce.planning.plan import MEMORY_SHARE
from flce.tools.machine import use_backend

TOKENS = 8192


class Head(NamedTuple):
    hidden: int
    vocab: int
    softcap: float | None = None


HEADS = {
    "Llama-3.2-1B": Head(2048, 128256),
    "Llama-3-8B": Head(4096, 128256),
    "Qwen3-0.6B": Head(1024, 151936),
    "Qwen3-8B": Head(4096, 151936),
    "Gemma-2-2B": Head(2304, 256000, 30.0),
    "Llama-2-7B": Head(4096, 32000),
}


def planned(kind: str, head: Head, frozen: bool, share: float = MEMORY_SHARE) -> flce.ChunkPlan:
    """Return the default plan on a kind of device, whose workspace may have this share of the memory, in bfloat16."""
    memory = round((KNOWN_KINDS[kind].memory or 0) * share / MEMORY_SHARE)
    with use_backend(""):  # ignores FLCE_BACKEND
        sizes = TOKENS, head.hidden, head.vocab, torch.bfloat16
        return flce.plan(*sizes, device_kind=kind, device_memory=memory, weight_grad=not frozen, softcap=head.softcap)


def time_over_products(plan: flce.ChunkPlan) -> float:
    """Return the predicted time over the time of the bare products: logits and the needed gradients."""
    c = plan.case
    n, (h, *_), v = c.num_tokens, c.hidden_sizes, c.vocab_size
    shapes = [(n, v, h), (n, h, v), *([(v, h, n)] if c.needs.weights[0] else [])]
    return plan.seconds / sum(dry_run.product_seconds(c.device, *shape, c.dtype.itemsize) for shape in shapes)


def known() -> str:
    def row(device: DeviceRecord) -> list[str]:
        assert device.memory is not None
        sizes = [f"{device.shared_memory >> 10}", f"{device.cache >> 20}", f"{device.memory / GIB:.1f}"]
        flops_per_byte = device.half_flops / device.bandwidth
        rates = [f"{device.bandwidth / 1e9:.0f}", f"{device.half_flops / 1e12:.0f}", f"{flops_per_byte:.0f}"]
        products = "yes" if device.own_products else "no"
        return [device.name, device.arch, str(device.multiprocessors), *sizes, *rates, products]

    columns = ["kind", "architecture", "multiprocessors", "shared memory, KiB", "L2, MiB", "memory, GiB", "GB/s"]
    columns += ["bfloat16, 1e12 flops a second", "flops a byte", "own products"]
    return Table("", columns, [row(device) for device in KNOWN_KINDS.values()]).grid()
