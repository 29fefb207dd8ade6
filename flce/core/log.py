"""What flce does, told by the logger ``flce``. ``FLCE_LOG=debug`` in the environment sends it to stderr."""

from __future__ import annotations

import logging
import os
import warnings

LEVELS = ("debug", "info", "warning", "error", "critical")

logger = logging.getLogger("flce")
logger.addHandler(logging.NullHandler())  # what a library's logger does by itself is left to the application


def configure_from_environment() -> None:
    """Do what ``FLCE_LOG`` asks for, once, when flce is imported. Nothing that it holds stops the import."""
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
    logger.propagate = False  # the application's own handlers would tell everything again


def is_debug_enabled() -> bool:
    """Whether new shapes are logged."""
    return logger.isEnabledFor(logging.DEBUG)
