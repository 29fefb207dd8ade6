"""Frozen dataclasses that are looked up often: their hash is made once."""

from __future__ import annotations

import functools
from typing import Any


class HashedOnce:
    """A base of them. Each says ``__hash__ = HashedOnce.__hash__``, or else `dataclass` gives it another."""

    @property
    def _values(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in type(self).__dataclass_fields__])  # type: ignore[attr-defined]

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the hash: strings have another one in another process.
        return type(self), self._values
