"""The logger ``flce``. ``FLCE_LOG=debug`` in the environment sends its messages to stderr."""

from __future__ import annotations

import logging
import os
import warnings

LEVELS = ("debug", "info", "warning", "error", "critical")

logger = logging.getLogger("flce")
logger.addHandler(logging.NullHandler())  # the application configures handlers, not the library


def configure_from_environment() -> None:
    """Configure the logger as ``FLCE_LOG`` sets it, when flce is imported. A wrong value only warns."""
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
