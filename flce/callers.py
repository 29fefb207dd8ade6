"""Which line of the user's has called, for warnings that name it."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, NamedTuple

# Between a user's line and flce; warnings name the user's.
_LIBRARIES = ("transformers", "accelerate", "trl", "peft", "lightning", "pytorch_lightning", "deepspeed")


class Caller(NamedTuple):
    """A line of the user's, and what led from there to flce."""

    frame: Any
    via: str | None
    """``file:line`` of the library that called flce; None: the user did."""
    in_evaluation: bool
    """Whether Transformers' ``Trainer`` was evaluating."""

    @property
    def line(self) -> str:
        return f"{self.frame.f_code.co_filename}:{self.frame.f_lineno}"

    def warn(self, message: str, category: type[Warning]) -> None:
        """Warn as if that line did. With the registry of its module Python's own filter shows each line once."""
        registry = self.frame.f_globals.setdefault("__warningregistry__", {})
        file, line = self.frame.f_code.co_filename, self.frame.f_lineno
        warnings.warn_explicit(message, category, file, line, registry=registry)


def caller() -> Caller:
    """The innermost line outside of flce and the libraries below; the outermost if there is none."""
    modules = map(sys.modules.get, ("torch", *_LIBRARIES))
    silent, *libraries = (
        os.path.dirname(os.path.abspath(file)) + os.sep
        for file in (__file__, *(getattr(module, "__file__", None) for module in modules))
        if file
    )
    frame, via, in_evaluation = sys._getframe(1), None, False
    while frame.f_back is not None and frame.f_code.co_filename.startswith((silent, *libraries)):
        if via is None and frame.f_code.co_filename.startswith(tuple(libraries[1:])):
            via = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        in_evaluation = in_evaluation or frame.f_code.co_name in ("evaluation_loop", "prediction_step")
        frame = frame.f_back
    return Caller(frame, via, in_evaluation)
