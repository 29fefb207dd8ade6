"""The logger ``flce``, and warnings that name the line of user code that called flce.

``FLCE_LOG=debug`` in the environment sends the logger's messages to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import Counter
from typing import Any, NamedTuple

LEVELS = ("debug", "info", "warning", "error", "critical")
VARIABLES = ("FLCE_BACKEND", "FLCE_DEBUG", "FLCE_LOG", "FLCE_PROFILE")

logger = logging.getLogger("flce")
logger.addHandler(logging.NullHandler())  # the application configures handlers, not the library


def configure_from_environment() -> None:
    """Configure the logger as ``FLCE_LOG`` sets it, when flce is imported. A wrong value or variable only warns."""
    unknown = [name for name in os.environ if name.startswith("FLCE_") and name not in VARIABLES]
    if unknown:
        text = f"flce does not read {', '.join(unknown)}: it reads {', '.join(VARIABLES)}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    level = os.environ.get("FLCE_LOG", "")
    if not level:
        return
    if level.lower() not in LEVELS:
        warnings.warn(
            f"FLCE_LOG must be one of {', '.join(LEVELS)}, got {level!r}: nothing is logged",
            RuntimeWarning,
            stacklevel=3,  # the line that imports flce
        )
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False  # otherwise handlers of the application would print each message again


def is_debug_enabled() -> bool:
    """Return True if new shapes are logged."""
    return logger.isEnabledFor(logging.DEBUG)


# ---------------------------------------------------------------------------------------------------------
# Callers

_PACKAGE = os.path.dirname(__file__)  # the parent folder of this one is the package
# Libraries that may be between user code and flce; warnings name the line of user code.
_LIBRARIES = ("transformers", "accelerate", "trl", "peft", "lightning", "pytorch_lightning", "deepspeed")

WarningKey = tuple[str, type[Warning], str, int]
"""Message, class, file and line."""
# Python records shown warnings by module, too. It discards the record whenever code enters or leaves
# `warnings.catch_warnings`, as libraries do in every training step.
_shown_warnings: set[WarningKey] = set()

sampled_passes: Counter[str] = Counter()
"""Backward passes of this process with `ChunkOptions.sample_below`, by the gradients: "sampled" or "dense"."""


class Caller(NamedTuple):
    """Line of user code that called flce, and the library in between."""

    frame: Any
    via: str | None
    """``file:line`` of the library that called flce; None: user code called flce."""
    is_evaluating: bool
    """True if Transformers' ``Trainer`` was evaluating."""

    @property
    def line(self) -> str:
        return f"{self.frame.f_code.co_filename}:{self.frame.f_lineno}"

    def warn(self, message: str, category: type[Warning], shown: set[WarningKey] | None = None) -> None:
        """Warn as if this line did. The warning is shown once, unless Python's filters set something else. `shown`:
        warnings that were already shown; None: the warnings of this process."""
        shown = _shown_warnings if shown is None else shown
        file, line = self.frame.f_code.co_filename, self.frame.f_lineno
        key = (message, category, file, line)
        if _action(*key) in ("default", "module", "once"):
            if key in shown:
                return
            shown.add(key)
        registry = self.frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, category, file, line, registry=registry)


def find_caller() -> Caller:
    """Return the innermost line outside of flce and `_LIBRARIES`, or the outermost line if there is none."""
    modules = map(sys.modules.get, ("torch", *_LIBRARIES))
    package_folder, *libraries = (
        os.path.dirname(os.path.abspath(file)) + os.sep
        for file in (_PACKAGE, *(getattr(module, "__file__", None) for module in modules))
        if file
    )
    frame, via, is_evaluating = sys._getframe(1), None, False
    while frame.f_back is not None and frame.f_code.co_filename.startswith((package_folder, *libraries)):
        if via is None and frame.f_code.co_filename.startswith(tuple(libraries[1:])):
            via = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        is_evaluating = is_evaluating or frame.f_code.co_name in ("evaluation_loop", "prediction_step")
        frame = frame.f_back
    return Caller(frame, via, is_evaluating)


def _action(message: str, category: type[Warning], file: str, line: int) -> str:
    """Return the action of the current warning filters for a warning."""
    module = file.removesuffix(".py")  # as `warnings.warn_explicit` calls it
    entries: Any = warnings.filters
    for action, text, kind, place, at in entries:
        if _matches(text, message) and issubclass(category, kind) and _matches(place, module) and at in (0, line):
            return action
    return "default"


def _matches(pattern: Any, text: str) -> bool:
    """Return True if a pattern of a filter matches: None, a compiled pattern or (in Python's initial filters) a
    string."""
    if pattern is None or isinstance(pattern, str):
        return pattern is None or pattern == text
    return pattern.match(text) is not None
