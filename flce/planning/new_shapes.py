"""Log records for new shapes of calls. The linear losses call `log_new_shape`; each shape is logged once."""

from __future__ import annotations

import functools
from dataclasses import fields

from flce.core.log import logger
from flce.engine.case import Case
from flce.planning.plan import ChunkPlan

# Routes of a call.
DIRECT = "without the custom operators, because no mode, transform or tensor subclass needs them"
IN_GRAPH = "through the custom operators, in a graph"
DISPATCHED = "through the custom operators, for a mode, a transform or a tensor subclass"


@functools.lru_cache(maxsize=4096)  # Each plan and route is logged once.
def log_new_shape(plan: ChunkPlan, route: str) -> None:
    """Log the plan of a new shape. ``route``: one of DIRECT, IN_GRAPH, DISPATCHED."""
    if plan.in_registers:
        location = "products keep logits in registers"
    else:
        location = f"logits in memory: {plan.case.logits_in_memory_reason or 'this schedule makes a pass over them'}"
    logger.debug("new shape: %s; %s; %s; %s", plan, _describe_options(plan.case), location, route)


def _describe_options(c: Case) -> str:
    """Return the options that differ from the defaults, and the needed gradients."""
    changed = [f for f in fields(c.spec) if f.name == "reduction" or getattr(c.spec, f.name) != f.default]
    needs = {"input": any(c.needs.inputs), "weight": any(c.needs.weights), "bias": c.needs.bias}
    grads = ", ".join(name for name, needed in needs.items() if needed)
    return ", ".join(
        [*(f"{f.name}={getattr(c.spec, f.name)!r}" for f in changed), f"gradients of {grads or 'nothing'}"]
    )
