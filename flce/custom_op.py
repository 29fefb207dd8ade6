"""Custom operators: how they are registered, and how dataclasses are among their arguments."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from flce.frames import mark_frames, never_compiled

T = TypeVar("T")

_SCALARS = {str: "str", int: "int", float: "float", bool: "bool", torch.dtype: "ScalarType"}


def define(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> None:
    """Register ``flce::name``: what it does, what its results look like, and its derivative, if it has one."""
    torch.library.define(f"flce::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"flce::{name}", "CompositeExplicitAutograd", implementation)
    torch.library.register_fake(f"flce::{name}", fake)
    if backward is None or setup_context is None:
        return

    def prepare(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        mark_frames()
        setup_context(ctx, inputs, output)

    torch.library.register_autograd(f"flce::{name}", never_compiled(backward), setup_context=prepare)


@dataclass(frozen=True)
class _Field:
    """A field of a dataclass as an operator takes it: a scalar, perhaps None."""

    name: str
    schema: str
    none: str | None
    """The value that None stands for."""
    names: bool
    """Whether it is a tuple of names, which become one string."""

    @staticmethod
    def of(name: str, hint: Any) -> _Field:
        """Raises TypeError for a type that has no such form."""
        options = list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]
        words = [option for option in options if get_origin(option) is Literal]
        optional = len(options) == 2
        none = None
        if types.NoneType in options:
            options.remove(types.NoneType)
        elif optional and words and len(get_args(words[0])) == 1:
            (none,) = get_args(words[0])
            options.remove(words[0])
        kind = options[0]
        if get_origin(kind) is Literal and all(isinstance(word, str) for word in get_args(kind)):
            kind = str
        names = kind == tuple[str, ...]
        scalar = "str" if names else _SCALARS.get(kind)
        if len(options) != 1 or scalar is None or (names and optional):
            raise TypeError(f"{name}: {hint} is no type of an operator's argument")
        return _Field(name, f"{scalar}{'?' if optional else ''} {name}", none, names)

    def pack(self, value: Any) -> Any:
        if self.names:
            return ",".join(value)
        return None if self.none is not None and value == self.none else value

    def unpack(self, value: Any) -> Any:
        if self.names:
            return tuple(value.split(",")) if value else ()
        return self.none if value is None else value


class Flat(Generic[T]):
    """A dataclass of scalars among the arguments of an operator: one argument for each field, by its type.

    Attributes:
        schema: what declares them.
    """

    def __init__(self, of: type[T]) -> None:
        hints = get_type_hints(of)
        self._of = of
        self._fields = tuple(_Field.of(field.name, hints[field.name]) for field in fields(of))  # type: ignore[arg-type]
        self.schema = ", ".join(field.schema for field in self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def pack(self, value: T) -> tuple[Any, ...]:
        """The arguments."""
        return tuple([field.pack(getattr(value, field.name)) for field in self._fields])

    def unpack(self, arguments: Sequence[Any]) -> T:
        pairs = zip(self._fields, arguments, strict=True)
        return self._of(**{field.name: field.unpack(value) for field, value in pairs})
