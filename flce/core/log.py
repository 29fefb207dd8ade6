"""The logger ``flce``. ``FLCE_LOG=debug`` in the environment sends its messages to stderr."""

from __future__ import annotations

import logging
import os
import warnings

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
