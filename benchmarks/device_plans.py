"""Tables of docs/devices.md: what is known of each kind of device, how calls are planned there, and what is predicted.

Nothing is measured here. What was measured on an H200 stands beside what is predicted for it, as a measure of the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

import flce
from benchmarks.runs import Run
from benchmarks.tables import Table
from flce.core.device_record import KNOWN_KINDS, DeviceRecord
from flce.core.gemm import ALIGNMENT
from flce.core.sizes import GIB, MIB
from flce.planning import cost_model
from flce.planning.search import MEMORY_SHARE, make_plan
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
    """The default plan on a kind of device, in bfloat16.

    Args:
        frozen: the head is not trained.
        share: of the device's memory, which the workspace may take.
    """
    memory = round((KNOWN_KINDS[kind].memory or 0) * share / MEMORY_SHARE)
    how: dict[str, Any] = {"weight_grad": not frozen, "softcap": head.softcap}
    with use_backend(""):  # whatever FLCE_BACKEND asks for here
        sizes = TOKENS, head.hidden, head.vocab, torch.bfloat16
        return flce.plan(*sizes, device_kind=kind, device_memory=memory, **how)


def time_over_products(plan: flce.ChunkPlan) -> float:
    """The predicted time in times that of the bare products: logits, gradient of the inputs and, if the head is
    trained, of the weight."""
    c = plan.case
    n, (h, *_), v = c.num_tokens, c.hidden_sizes, c.vocab_size
    shapes = [(n, v, h), (n, h, v), *([(v, h, n)] if c.needs.weights[0] else [])]
    return plan.seconds / sum(cost_model.product_seconds(c.device, *shape, c.dtype.itemsize) for shape in shapes)


def _cell(plan: flce.ChunkPlan) -> str:
    return f"{time_over_products(plan):.2f} ({plan.workspace_bytes / MIB:.0f})"


def plans(frozen: bool, share: float = MEMORY_SHARE) -> str:
    """A row for each kind, of predicted times over the products and, in brackets, MiB of workspace."""
    rows = [[kind, *(_cell(planned(kind, head, frozen, share)) for head in HEADS.values())] for kind in KNOWN_KINDS]
    return Table("", ["", *(f"{name}, predicted" for name in HEADS)], rows).grid()


def known() -> str:
    """The records."""

    def row(device: DeviceRecord) -> list[str]:
        assert device.memory is not None
        return [
            device.name,
            device.arch,
            str(device.multiprocessors),
            f"{device.shared_memory >> 10}",
            f"{device.cache >> 20}",
            f"{device.memory / GIB:.1f}",
            f"{device.bandwidth / 1e9:.0f}",
            f"{device.half_flops / 1e12:.0f}",
            f"{device.flops_per_byte:.0f}",
            "yes" if device.own_products else "no",
        ]

    columns = ["kind", "compiled for", "multiprocessors", "shared memory, KiB", "L2, MiB", "memory, GiB", "GB/s"]
    columns += ["bfloat16, 1e12 flops a second", "flops a byte", "own products"]
    return Table("", columns, [row(device) for device in KNOWN_KINDS.values()]).grid()


def measured(run: Run) -> str:
    """Default plans of large calls that were measured on an H200 and still are the plans, and what is predicted of
    them. Vocabularies are aligned: the bare products of others are slow."""
    rows: dict[str, list[str]] = {}
    for entry in run.cases:
        case, names = entry.case, {result.contender for result in entry.results}
        trained = {"forward+backward": True, "frozen-head": False}.get(case.mode)
        shape = case.tokens, case.hidden, case.vocab
        if trained is None or case.feature or case.dtype != "bfloat16" or not {"floor", "ours"} <= names:
            continue
        if case.tokens < TOKENS // 2 or case.vocab % ALIGNMENT or case.hidden % ALIGNMENT:
            continue
        floor, ours = (entry.by_name(name) for name in ("floor", "ours"))
        with use_backend(""):
            plan = flce.plan(*shape, torch.bfloat16, device_kind="H200", weight_grad=trained)
        if case.own_products is False:
            plan = make_plan(replace(plan.case, has_product=False))
        ms, of_products = (result.alone_ms or result.median_ms for result in (ours, floor))
        if ours.planned_bytes == plan.workspace_bytes and ms is not None and of_products is not None:
            name = " x ".join(map(str, shape)) + ("" if trained else ", frozen head")
            figures = f"{ms / of_products:.2f}", f"{time_over_products(plan):.2f}", f"{plan.workspace_bytes / MIB:.0f}"
            rows.setdefault(name, [name, "no" if case.own_products is False else "yes", *figures])
    columns = ["on an H200", "own products", "measured", "predicted", "workspace, MiB"]
    return Table("", columns, list(rows.values())).grid()
