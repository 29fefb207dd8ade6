"""The labels among the arguments of a call of a model. ``patch.py`` calls this module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def has_labels(args: Any, kwargs: Any, labels_slice: slice | None) -> bool:
    """Return True if a call of a model has labels, as an argument or as a key of a batch that is a mapping."""
    if labels_slice is None:  # the call of a wrapper, whose model gets the labels
        return False
    for labels in (kwargs.get("labels"), *args[labels_slice]):
        if labels is not None:
            return True
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Mapping)]
    return any(batch.get("labels") is not None for batch in batches)


def find_labels_slice(forward: Callable[..., Any]) -> slice:
    """Return a slice of the positional arguments after ``self`` that contains only ``labels``, or an empty slice."""
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    return slice(names.index("labels"), names.index("labels") + 1) if "labels" in names else slice(0)
