"""A profile: a JSON file, named by ``FLCE_PROFILE``, that changes what flce knows of the GPUs of this machine.

The file has one object. Its ``name`` is the device's, as PyTorch or the table of known kinds has it. Every other member
is a field of the record (`flce.core.device_record.Device`).
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flce.core.device_record import Device, normalized

_WHOLE = ("multiprocessors", "shared_memory", "registers", "cache", "memory")
_RATES = ("bandwidth", "half_flops", "wide_flops")
_FIELDS = ("name", "arch", *_WHOLE, *_RATES, "own_products")


@functools.cache
def profile() -> tuple[str, Mapping[str, Any]] | None:
    """The file and what it has, read at the first call; None: there is none.

    Raises:
        ValueError: it cannot be read, or is no profile. The message names the file.
    """
    path = os.environ.get("FLCE_PROFILE", "")
    if not path:
        return None
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # neither JSON nor UTF-8
        raise _wrong(path, f"is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise _wrong(path, "must be an object with the name of the device, such as {'name': 'RTX-4090', ...}")
    for field, value in found.items():
        if field not in _FIELDS:
            raise _wrong(path, f"has a field {field!r}, expected some of {', '.join(_FIELDS)}")
        expected = _expected(field, value)
        if expected is not None:
            raise _wrong(path, f"must have {expected} as {field}, got {value!r}")
    return path, found


def with_profile(device: Device, name: str) -> Device:
    """The record as the profile changes it.

    Args:
        name: the device's, as PyTorch has it.

    Raises:
        ValueError: as `profile`, or the profile is for another device.
    """
    known = profile()
    if known is None:
        return device
    path, fields = known
    if normalized(fields["name"]) not in (normalized(name), normalized(device.name)):
        raise _wrong(path, f"is for {fields['name']!r}, and this device is {name!r}")
    return device._replace(**{**fields, "name": device.name, "profile": path})


def _expected(field: str, value: Any) -> str | None:
    """What the field must have in the place of a wrong value."""
    if field == "own_products":
        return None if isinstance(value, bool) else "true or false"
    if field not in (*_WHOLE, *_RATES):
        fits = isinstance(value, str) and (field == "name" or re.fullmatch(r"sm_\d+|gfx\w+", value))
        return None if fits else "a text such as 'sm_89'"
    number = isinstance(value, int if field in _WHOLE else (int, float)) and not isinstance(value, bool)
    return None if number and 0 < value < math.inf else f"a positive {'whole ' if field in _WHOLE else ''}number"


def _wrong(path: str, what: str) -> ValueError:
    return ValueError(f"FLCE_PROFILE={path} {what}")
