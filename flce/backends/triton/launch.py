"""What launches of different kernels have in common: facts of memory and of devices, and flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flce.backends.contract import RowInputs
from flce.problem import LossSpec

# A thread loads this many bytes at a time.
VECTOR_BYTES = 16
# A cache line, and a sector of memory: two threads that write to one make it be read first.
LINE_BYTES = 128
SECTOR_BYTES = 32
# Of a thread, so that a multiprocessor with 65,536 of them has 1,024 threads to hide the latency of memory.
MAX_REGISTERS = 64


class DeviceFacts(NamedTuple):
    multiprocessors: int
    cache: int  # bytes that all of them share (L2)
    registers: int  # of a multiprocessor, 32 bits each


def device_facts(device: torch.device) -> DeviceFacts:
    if device.type != "cuda":  # the interpreter
        return DeviceFacts(1, 0, 65536)
    properties = torch.cuda.get_device_properties(device)
    # Every device that Triton supports has 65,536; PyTorch says so since 2.5.
    registers = getattr(properties, "regs_per_multiprocessor", 65536)
    return DeviceFacts(properties.multi_processor_count, properties.L2_cache_size, registers)


def fewest_warps(choice: Sequence[int], row_bytes: int, device: torch.device) -> int:
    """Of a row that is read twice: the fewest with which the rows in flight fit in the L2 cache, in which the second
    pass then finds its row; the most, if none do."""
    facts = device_facts(device)
    threads = facts.registers // MAX_REGISTERS
    fitting = [w for w in choice if facts.multiprocessors * (threads // (32 * w)) * row_bytes <= facts.cache]
    return min(fitting, default=max(choice))


def features(rows: RowInputs, spec: LossSpec, upstream: Tensor | None) -> dict[str, bool]:
    """Of what kernels know to do with logits, what a call asks for."""
    return {
        "HAS_SCALE": spec.scale != 1.0,
        "HAS_BIAS": rows.bias is not None,
        "HAS_SOFTCAP": spec.softcap is not None,
        "HAS_CLASS_WEIGHT": rows.class_weight is not None,
        "HAS_TOKEN_WEIGHT": rows.token_weight is not None,
        "HAS_UPSTREAM": upstream is not None,
        "HAS_Z_LOSS": spec.z_loss != 0.0,
    }
