"""Tables of docs/devices.md: the record of each kind of device, its default plans, and their predicted times."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

import flce
from benchmarks.runs import Run
from benchmarks.tables import Table
from flce.core.device_record import KNOWN_KINDS, DeviceRecord
from flce.core.gemm import ALIGNMENT
from flce.core.sizes import GIB, MIB
from flce.planning import cost_model
from flce.planning.plan import MEMORY_SHARE
from flce.planning.search import make_plan
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
    return plan.seconds / sum(cost_model.product_seconds(c.device, *shape, c.dtype.itemsize) for shape in shapes)


def plans() -> str:
    """Return a table with a row for each kind: predicted times over the products and, in brackets, MiB of workspace.
    A cell has the figures of a trained head, and then of a frozen head."""

    def cell(kind: str, head: Head) -> str:
        found = [planned(kind, head, frozen) for frozen in (False, True)]
        return ", ".join(f"{time_over_products(plan):.2f} ({plan.workspace_bytes / MIB:.0f})" for plan in found)

    rows = [[kind, *(cell(kind, head) for head in HEADS.values())] for kind in KNOWN_KINDS]
    return Table("", ["", *(f"{name}, predicted" for name in HEADS)], rows).grid()


def known() -> str:
    def row(device: DeviceRecord) -> list[str]:
        assert device.memory is not None
        sizes = [f"{device.shared_memory >> 10}", f"{device.cache >> 20}", f"{device.memory / GIB:.1f}"]
        rates = [f"{device.bandwidth / 1e9:.0f}", f"{device.half_flops / 1e12:.0f}", f"{device.flops_per_byte:.0f}"]
        products = "yes" if device.own_products else "no"
        return [device.name, device.arch, str(device.multiprocessors), *sizes, *rates, products]

    columns = ["kind", "compiled for", "multiprocessors", "shared memory, KiB", "L2, MiB", "memory, GiB", "GB/s"]
    columns += ["bfloat16, 1e12 flops a second", "flops a byte", "own products"]
    return Table("", columns, [row(device) for device in KNOWN_KINDS.values()]).grid()


def measured(run: Run) -> str:
    """Return a table of large calls that were measured on an H200 with today's default plan, and their predictions."""
    rows: dict[str, list[str]] = {}
    for entry in run.cases:
        case, names = entry.case, {result.contender for result in entry.results}
        trained = {"forward+backward": True, "frozen-head": False}.get(case.mode)
        if trained is None or case.feature or case.dtype != "bfloat16" or not {"floor", "ours"} <= names:
            continue
        # The bare products of sizes that are not aligned are slow.
        if case.tokens < TOKENS // 2 or case.vocab % ALIGNMENT or case.hidden % ALIGNMENT:
            continue
        floor, ours = (entry.by_name(name) for name in ("floor", "ours"))
        with use_backend(""):
            plan = flce.plan(
                case.tokens, case.hidden, case.vocab, torch.bfloat16, device_kind="H200", weight_grad=trained
            )
        if case.own_products is False:
            plan = make_plan(replace(plan.case, has_fused_products=False))
        ms, floor_ms = (result.alone_ms or result.median_ms for result in (ours, floor))
        if ours.planned_bytes == plan.workspace_bytes and ms is not None and floor_ms is not None:
            name = " x ".join(map(str, case.shape)) + ("" if trained else ", frozen head")
            figures = f"{ms / floor_ms:.2f}", f"{time_over_products(plan):.2f}", f"{plan.workspace_bytes / MIB:.0f}"
            rows.setdefault(name, [name, "no" if case.own_products is False else "yes", *figures])
    columns = ["on an H200", "own products", "measured", "predicted", "workspace, MiB"]
    return Table("", columns, list(rows.values())).grid()
