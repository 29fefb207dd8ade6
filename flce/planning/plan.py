"""Plans with their costs: what `flce.plan` returns and every linear loss runs; and the device that `flce.plan` plans
for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

import torch

from flce.backends import choose_backend, device_has_fused_products, has_fused_products
from flce.core.devices import KNOWN_KINDS, DeviceRecord, device_record, find_device, find_kinds
from flce.core.log import logger
from flce.core.numbers import check_int
from flce.core.problem import LogprobSpec
from flce.engine.case import Case, dtype_text
from flce.engine.passes import Plan
from flce.engine.schedules.schedule import Schedule
from flce.planning.dry_run import PlanCosts, count_costs

# Share of the device's memory within which plans without a budget stay, see `search`.
MEMORY_SHARE = 1 / 24


class ChunkPlan(Plan):
    """The plan of a call: its case, its schedule and their costs. Returned by `flce.plan`. ``str(plan)`` is a
    summary."""

    @functools.cached_property
    def _costs(self) -> PlanCosts:
        return count_costs(self)

    @property
    def workspace_bytes(self) -> int:
        """Peak bytes beyond the inputs and the returned gradients, over forward and backward. A backward with
        ``retain_graph=True`` returns copies of gradients that forward computed, which are not counted."""
        return self._costs.workspace_bytes

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products of forward and backward."""
        return self._costs.flops

    @property
    def seconds(self) -> float:
        """Estimated time on the device, if it is otherwise idle, without collectives."""
        return self._costs.seconds

    def __str__(self) -> str:
        c = self.case
        product_flops = 2 * c.num_tokens * sum(c.hidden_sizes) * c.vocab_size
        products = self.flops / product_flops if product_flops else 0
        logits = "in registers" if self.in_registers else f"in memory in {dtype_text(self.dtypes.logits)}"
        profile = f", profile {c.device.profile}" if c.device.profile else ""
        has_share = c.options.max_workspace_bytes is None and c.device.memory is not None
        # The loss of a model has few ignored tokens; log-probabilities are often of responses only.
        computes_ignored = isinstance(c.spec, LogprobSpec) and c.options.skip_ignored == "auto" and not c.skip_ignored
        excess = self.workspace_bytes - (c.device.memory or 0) * MEMORY_SHARE
        more = f", {excess / 2**20:.1f} MiB more than 1/24 of the memory" if has_share and excess > 0 else ""
        return (
            f"{c} on {c.device.name} ({c.backend} backend{profile}): strategy '{self.strategy}', "
            f"{type(self.schedule).__name__}: {self.schedule.describe(c)}; logits {logits}; "
            f"{products:.3g} matrix products ({self.flops / 1e12:.3g} TFLOP){self._describe_sampling()}; "
            f"{'dW is computed in backward and added to main_grad or .grad; ' if c.adds_dw else ''}"
            f"{'ignored tokens are left out only with skip_ignored=True; ' if computes_ignored else ''}"
            f"workspace {self.workspace_bytes / 2**20:.1f} MiB{more}"
        )

    def _describe_sampling(self) -> str:
        """Return whether gradients are sampled if an option requests it, and the reason if they are not."""
        c = self.case
        if c.options.sample_below is None or not c.needs.any:
            return ""
        if self.schedule.samples:
            return f", gradients sampled below {c.options.sample_below:g}"
        return f", gradients not sampled: {c.dense_reason or 'the budget'}"


def plan_for_size(c: Case, kind: type[Schedule], size: int) -> ChunkPlan:
    """Return the plan of a case with the schedule `kind` of a size."""
    strategy_without_gradients = "vocab" if c.options.strategy == "vocab" else "tokens"
    return _cached_plan(c, kind.strategy if c.needs.any else strategy_without_gradients, kind.from_size(c, size))


_cached_plan = functools.lru_cache(maxsize=4096)(ChunkPlan)  # The costs of a plan are counted once in a search.


def fastest_near(chosen: ChunkPlan, plans: Sequence[ChunkPlan]) -> ChunkPlan:
    """Return the fastest of the plans with at most about the workspace of `chosen`."""
    limit = 1.01 * chosen.workspace_bytes
    return min((plan for plan in plans if plan.workspace_bytes <= limit), key=lambda plan: plan.seconds)


def smallest_near(plans: Sequence[ChunkPlan], within: float) -> ChunkPlan:
    """Return the plan with the least workspace among the plans that take at most `within` times as long as the
    fastest."""
    limit = within * min(plan.seconds for plan in plans)
    return min((plan for plan in plans if plan.seconds <= limit), key=lambda plan: plan.workspace_bytes)


@functools.lru_cache(maxsize=4096)  # Each plan is logged once.
def log_new_shape(plan: ChunkPlan) -> None:
    """Log the plan of a new shape."""
    if plan.in_registers:
        location = "products keep logits in registers"
    else:
        location = f"logits in memory: {plan.case.logits_in_memory_reason or 'this schedule makes a pass over them'}"
    logger.debug("new shape: %s; %s; %s", plan, _describe_options(plan.case), location)


def _describe_options(c: Case) -> str:
    """Return the options that differ from the defaults, and the needed gradients."""
    changed = [f for f in fields(c.spec) if f.name == "reduction" or getattr(c.spec, f.name) != f.default]
    needs = {"input": any(c.needs.inputs), "weight": any(c.needs.weights), "bias": c.needs.bias}
    grads = ", ".join(name for name, needed in needs.items() if needed)
    return ", ".join(
        [*(f"{f.name}={getattr(c.spec, f.name)!r}" for f in changed), f"gradients of {grads or 'nothing'}"]
    )


# ---------------------------------------------------------------------------------------------------------
# The device of a plan


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
