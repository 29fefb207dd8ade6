"""Profiles: a JSON file, named by ``FLCE_PROFILE``, that changes the records of the GPUs of this machine.

The file has one object. Its ``name`` is the name of the device, as in PyTorch or in the table of known kinds. Every
other member is a field of `flce.core.device_record.DeviceRecord`. `flce.core.devices` applies the profile.
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

from flce.core.device_record import DeviceRecord, normalize_name

_INTEGER_FIELDS = ("multiprocessors", "shared_memory", "registers", "cache", "memory")
_RATE_FIELDS = ("bandwidth", "half_flops", "wide_flops")
_FIELDS = ("name", "arch", *_INTEGER_FIELDS, *_RATE_FIELDS, "own_products")


@functools.cache
def load_profile() -> tuple[str, Mapping[str, Any]] | None:
    """Return the path and the contents of the profile, read at the first call, or None if there is no profile. Raise
    ValueError if the file is not a profile."""
    path = os.environ.get("FLCE_PROFILE", "")
    if not path:
        return None
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _profile_error(path, f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # neither JSON nor UTF-8
        raise _profile_error(path, f"is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise _profile_error(path, "must be an object with the name of the device, such as {'name': 'RTX-4090', ...}")
    for field, value in found.items():
        if field not in _FIELDS:
            raise _profile_error(path, f"has a field {field!r}, expected some of {', '.join(_FIELDS)}")
        expected = _describe_expected(field, value)
        if expected is not None:
            raise _profile_error(path, f"must have {expected} as {field}, got {value!r}")
    return path, found


def apply_profile(device: DeviceRecord, name: str) -> DeviceRecord:
    """Return the record with the changes of the profile. `name`: of the device in PyTorch. Raise ValueError if the
    profile is for another device."""
    loaded = load_profile()
    if loaded is None:
        return device
    path, fields = loaded
    if normalize_name(fields["name"]) not in (normalize_name(name), normalize_name(device.name)):
        raise _profile_error(path, f"is for {fields['name']!r}, and this device is {name!r}")
    return device._replace(**{**fields, "name": device.name, "profile": path})


def _describe_expected(field: str, value: Any) -> str | None:
    """Return a description of the values that the field may have, or None if the value is valid."""
    if field == "own_products":
        return None if isinstance(value, bool) else "true or false"
    if field not in (*_INTEGER_FIELDS, *_RATE_FIELDS):
        fits = isinstance(value, str) and (field == "name" or re.fullmatch(r"sm_\d+|gfx\w+", value))
        return None if fits else "a text such as 'sm_89'"
    number = isinstance(value, int if field in _INTEGER_FIELDS else (int, float)) and not isinstance(value, bool)
    return (
        None if number and 0 < value < math.inf else f"a positive {'whole ' if field in _INTEGER_FIELDS else ''}number"
    )


def _profile_error(path: str, problem: str) -> ValueError:
    return ValueError(f"FLCE_PROFILE={path} {problem}")
