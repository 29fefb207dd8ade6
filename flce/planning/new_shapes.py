"""New shapes of calls, told to the logger ``flce``: each once, with its plan and how the call runs."""

from __future__ import annotations

import functools
from dataclasses import fields

from flce.core.log import logger
from flce.engine.case import Case
from flce.planning.plan import ChunkPlan

# How a call runs.
ROUND = "round the custom operators, as nothing watches it"
IN_GRAPH = "through the custom operators, in a graph"
WATCHED = "through the custom operators, watched by a mode, a transform or a subclass of tensors"


@functools.lru_cache(maxsize=4096)  # each is told once
def log_new_shape(plan: ChunkPlan, how: str) -> None:
    """Log the plan of a new shape. ``how``: one of ROUND, IN_GRAPH, WATCHED."""
    if plan.in_registers:
        where = "products keep logits in registers"
    else:
        where = f"logits in memory: {plan.case.why_not_in_registers or 'this schedule makes a pass over them'}"
    logger.debug("new shape: %s; %s; %s; %s", plan, _asked(plan.case), where, how)


def _asked(c: Case) -> str:
    """What the loss has beside its defaults, and which gradients are wanted."""
    told = [f for f in fields(c.spec) if f.name == "reduction" or getattr(c.spec, f.name) != f.default]
    needs = {"input": any(c.needs.inputs), "weight": any(c.needs.weights), "bias": c.needs.bias}
    grads = ", ".join(name for name, needed in needs.items() if needed)
    return ", ".join([*(f"{f.name}={getattr(c.spec, f.name)!r}" for f in told), f"gradients of {grads or 'nothing'}"])
