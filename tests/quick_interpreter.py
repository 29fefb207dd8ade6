"""A patch of Triton's interpreter that avoids repeated work: the same results in a fifth of the time.

`tests/conftest.py` applies it. The interpreter searches all of `triton.language` for every call of every function in a
kernel, builds a table of dtypes for each lookup, builds the shape of every value again, converts bfloat16 part by part,
and calls the function of a reduction once for each element. These functions are private to Triton. If a version of
Triton has no such functions, nothing is patched, and the tests only take longer.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from types import SimpleNamespace
from typing import Any

import numpy as np


def speed_up_interpreter() -> None:
    """Patch the interpreter for the rest of this process."""
    from triton.runtime import interpreter

    call, scope = interpreter.InterpretedFunction.__call__, getattr(interpreter, "_LangPatchScope", None)
    if scope is not None and not hasattr(call, "is_sped_up"):
        _check_no_overflow(interpreter)
        _patch_once(interpreter)
        _launch_at_once(interpreter)
        _keep_dtypes(interpreter)
        _keep_shapes()
        _check_what_differs(interpreter)
        _convert_at_once(interpreter)
        _reduce_in_pairs(interpreter)


def _check_no_overflow(interpreter: Any) -> None:
    """Switch off the overflow check, which computes each sum of integers a second time in int64 and has no effect."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_once(interpreter: Any) -> None:
    """Patch the language at the first launch, for the rest of this process, instead of at each call of a function."""
    import triton.language as tl

    patch_lang = interpreter._patch_lang

    class Everything:
        __globals__ = {"tl": tl, "core": tl.core}  # noqa: RUF012 - the attribute of a function, which this replaces

    def with_semantic(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)  # without the check that a kernel calls it

        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return function(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

        return call

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in inspect.getmembers(package):
            if tl.core.is_builtin(member):
                setattr(package, name, with_semantic(member))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = self.rewrite()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    call.is_sped_up = True  # type: ignore[attr-defined]

    @functools.cache
    def patch() -> Any:
        patch_lang(Everything)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = lambda function: patch()
    interpreter.InterpretedFunction.__call__ = call


def _launch_at_once(interpreter: Any) -> None:
    """Inspect each kernel once. Copy no arguments, because all tensors are on the CPU."""
    import triton.language as tl
    from triton.runtime import jit

    argspec, signature = functools.cache(inspect.getfullargspec), functools.cache(inspect.signature)

    def arguments(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getfullargspec": argspec, "getcallargs": arguments})
    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda *args: None
    jit._normalize_ty, tl.str_to_ty = functools.cache(jit._normalize_ty), functools.cache(tl.str_to_ty)


def _keep_dtypes(interpreter: Any) -> None:
    import triton.language as tl

    look_up, cache = interpreter._get_np_dtype, {}

    def cached(dtype: Any) -> Any:
        if dtype.name not in cache:
            cache[dtype.name] = look_up(dtype)
        return cache[dtype.name]

    interpreter._get_np_dtype = cached
    equal = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    interpreter.TensorHandle.__post_init__ = lambda self: None  # instead of a check of the dtype


def _keep_shapes() -> None:
    """Build the attributes of a block or a value once for each shape."""
    import triton.language as tl

    first_block = tl.block_type.__init__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in blocks:
            first_block(self, element_ty, shape)
            blocks[key] = {**vars(self), "of_values": attributes(tuple(self.shape)), "of_dtypes": {}}
        self.__dict__.update(blocks[key], element_ty=element_ty)

    def with_dtype(self: Any, dtype: Any) -> Any:
        if dtype.is_ptr():
            return tl.block_type(dtype, self.shape)
        if dtype.name not in self.of_dtypes:
            self.of_dtypes[dtype.name] = tl.block_type(dtype, self.shape)
        return self.of_dtypes[dtype.name]

    @functools.cache
    def attributes(shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Return the attributes of a value of this shape: the same objects in each call."""
        return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    def value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_values if type.is_block() else attributes(())

    tl.block_type.__init__, tl.block_type.with_element_ty = block, with_dtype
    tl.tensor.__init__ = value


def _check_what_differs(interpreter: Any) -> None:
    """Convert and broadcast only operands of different dtypes or shapes. Build each constant once."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    semantic: Any = TritonSemantic
    broadcast, convert, first_constant = (
        semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl, semantic.scalar_constant,
    )  # fmt: skip
    constants: dict[Any, Any] = {}

    def of_two(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if left.shape is right.shape:
            return left, right
        if not right.type.is_block():
            return left, splat(self, right, left.type)
        if not left.type.is_block():
            return splat(self, left, right.type), right
        return broadcast(self, left, right)

    def splat(self: Any, x: Any, like: Any) -> Any:
        type = like.with_element_ty(x.type)
        return tl.tensor(self.builder.create_splat(type, x.handle), type)

    def operands(self: Any, left: Any, right: Any, *pointers: bool, **checks: bool) -> tuple[Any, Any]:
        if len(pointers) < 3 and not checks:  # not for a quotient
            left, right = of_dtype(self, left, right), of_dtype(self, right, left)
            same = isinstance(left, tl.tensor) and isinstance(right, tl.tensor) and left.dtype is right.dtype
            if same and not left.dtype.is_ptr():
                return of_two(self, left, right)
        return convert(self, left, right, *pointers, **checks)

    def of_dtype(self: Any, number: Any, other: Any) -> Any:
        """Return a number as a constant of the other operand's dtype, if Triton converts it to this dtype."""
        if type(number) not in (int, float) or not isinstance(other, tl.tensor):
            return number
        dtype = other.dtype
        fits = type(number) is int and 0 <= number < 1 << 31 and dtype.is_int() and dtype.int_bitwidth >= 32
        return constant(self, number, dtype) if fits or dtype.is_floating() else number

    def constant(self: Any, number: Any, dtype: Any) -> Any:
        key = number, type(number), dtype.name
        if key not in constants:
            constants[key] = first_constant(self, number, dtype)
        return constants[key]

    semantic.broadcast_impl_value = of_two
    semantic.binary_op_type_checking_impl = operands
    semantic.scalar_constant = constant


def _convert_at_once(interpreter: Any) -> None:
    """Convert bfloat16 as the upper half of float32."""
    import triton.language as tl

    by_parts = interpreter._convert_float

    def convert(x: Any, source: Any, result: Any, mode: Any) -> Any:
        if source == tl.bfloat16 and result == tl.float32:
            return x.view(np.uint16).astype(np.uint32) << np.uint32(16)
        if source == tl.float32 and result == tl.bfloat16 and mode is None:
            bits = np.ascontiguousarray(x).view(np.uint32)
            return (bits >> np.uint32(16)).astype(np.uint16).reshape(x.shape)
        return by_parts(x, source, result, mode)

    interpreter._convert_float = convert


def _reduce_in_pairs(interpreter: Any) -> None:
    """Reduce neighbours first, then the results of two neighbours, and so on, as a GPU does: a few calls with tiles."""
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
            combined = self.combine_fn.fn(*neighbours)
            parts = combined if isinstance(combined, tuple) else (combined,)
        return [self.to_tensor(x.handle.data.squeeze(self.axis), dtype) for x, dtype in zip(parts, dtypes, strict=True)]

    interpreter.ReduceOps.generic_reduce = in_pairs
