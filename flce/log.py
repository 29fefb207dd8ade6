"""What flce does, told by the logger ``flce``. ``FLCE_LOG=debug`` in the environment sends it to stderr."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flce.case import Case
    from flce.plans import ChunkPlan

LEVELS = ("debug", "info", "warning", "error", "critical")
# How a call runs.
ROUND = "round the custom operators, as nothing watches it"
IN_GRAPH = "through the custom operators, in a graph"
WATCHED = "through the custom operators, watched by a mode, a transform or a subclass of tensors"

logger = logging.getLogger("flce")
logger.addHandler(logging.NullHandler())  # what a library's logger does by itself is left to the application


def follow_environment() -> None:
    """Do what ``FLCE_LOG`` asks for, once, when flce is imported. Nothing that it holds stops the import."""
    wanted = os.environ.get("FLCE_LOG", "")
    if not wanted:
        return
    if wanted.lower() not in LEVELS:
        warnings.warn(
            f"FLCE_LOG must be one of {', '.join(LEVELS)}, got {wanted!r}: nothing is logged",
            RuntimeWarning,
            stacklevel=3,  # the line that imports flce
        )
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(wanted.upper())
    logger.propagate = False  # the application's own handlers would tell everything again


def telling() -> bool:
    """Whether new shapes are logged."""
    return logger.isEnabledFor(logging.DEBUG)


@functools.lru_cache(maxsize=4096)  # each is told once
def tell(plan: ChunkPlan, how: str) -> None:
    """A new shape. ``how``: one of ROUND, IN_GRAPH, WATCHED."""
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
