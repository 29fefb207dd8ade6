"""Which line of the user's has called, for warnings that name it."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, NamedTuple

_PACKAGE = os.path.dirname(__file__)  # its folder is that of flce
# Between a user's line and flce; warnings name the user's.
_LIBRARIES = ("transformers", "accelerate", "trl", "peft", "lightning", "pytorch_lightning", "deepspeed")

WarningKey = tuple[str, type[Warning], str, int]
"""Message, class, file and line."""
# Python keeps a record too, by module. It is lost whenever anything in the process enters or leaves
# `warnings.catch_warnings`, as libraries do in every step of a training.
_shown_warnings: set[WarningKey] = set()


class Caller(NamedTuple):
    """A line of the user's, and what led from there to flce."""

    frame: Any
    via: str | None
    """``file:line`` of the library that called flce; None: the user did."""
    is_evaluating: bool
    """Whether Transformers' ``Trainer`` was evaluating."""

    @property
    def line(self) -> str:
        return f"{self.frame.f_code.co_filename}:{self.frame.f_lineno}"

    def warn(self, message: str, category: type[Warning], shown: set[WarningKey] | None = None) -> None:
        """Warn as if that line did: once, where Python's filters do not say otherwise.

        Args:
            message: the text.
            category: its class.
            shown: what has been shown already; None: in this process.
        """
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
    """The innermost line outside of flce and the libraries below; the outermost if there is none."""
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
    """What the filters of today say of a warning."""
    module = file.removesuffix(".py")  # as `warnings.warn_explicit` calls it
    entries: Any = warnings.filters
    for action, text, kind, place, at in entries:
        if _matches(text, message) and issubclass(category, kind) and _matches(place, module) and at in (0, line):
            return action
    return "default"


def _matches(pattern: Any, text: str) -> bool:
    """For a pattern of a filter: None, a compiled one or, in filters that Python starts with, a string."""
    if pattern is None or isinstance(pattern, str):
        return pattern is None or pattern == text
    return pattern.match(text) is not None
