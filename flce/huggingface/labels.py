"""The labels among the arguments of a call of a model. ``patch.py`` calls this module."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def find_labels(args: Any, kwargs: Any, labels_slice: slice | None) -> Any:
    """Return the labels of a call of a model, an argument or a key of a batch that is a mapping; None: no labels."""
    if labels_slice is None:  # the call of a wrapper, whose model gets the labels
        return None
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Mapping)]
    for labels in (kwargs.get("labels"), *args[labels_slice], *[batch.get("labels") for batch in batches]):
        if labels is not None:
            return labels
    return None


def name_wrong_label(error: IndexError, labels: Any) -> None:
    """Add the row and the column of the label to the error of a target that is out of range."""
    found = re.match(r"target (-?\d+) at position", str(error))
    if found and isinstance(labels, Tensor) and (places := (labels == int(found[1])).nonzero().tolist()):
        error.args = (f"labels{places[0]}: {error}",)


def find_labels_slice(forward: Callable[..., Any]) -> slice:
    """Return a slice of the positional arguments after ``self`` that contains only ``labels``, or an empty slice."""
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    return slice(names.index("labels"), names.index("labels") + 1) if "labels" in names else slice(0)
