"""`TracedLazyLogits`: the plain object that lazy logits are within a graph of ``torch.compile``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.lazy import tables
from flce.huggingface.lazy.base import CLASS_BY_COMPILING, LazyBase, running_function
from flce.huggingface.lazy.dispatch import dispatch, materialize_arguments
from flce.huggingface.lazy.state import LazyState


class TracedLazyLogits(LazyBase):
    """Lazy logits under ``torch.compile``: a plain object, which the compiler can create and trace."""

    @staticmethod
    def _wrap(state: LazyState, view: Any = None, meta_tensor: Tensor | None = None) -> TracedLazyLogits:
        lazy = TracedLazyLogits()
        lazy._init(state, view, meta_tensor)
        return lazy

    def _get_real(self) -> Tensor | None:
        if not torch.compiler.is_compiling() and self._state.requires_grad and not torch.is_grad_enabled():
            self._check_caller()
        return LazyBase._get_real(self)

    def _check_caller(self) -> None:
        """Raise TypeError within an ``autograd.Function`` with this object as argument: autograd would not see it."""
        function = running_function(self)
        if function is not None:
            raise TypeError(
                f"{function.__name__}.apply() of logits that a graph with fullgraph=True returned as a plain object "
                "would lose their gradient. Pass logits.materialize(), or patch the compiled module: "
                "flce.patch_model(module)"
            )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._state.ndim

    ndimension = dim

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.materialize(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        # Python calls this for attributes that the class does not define.
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"lazy logits have no attribute {name!r}")
        member = getattr(torch.Tensor, name)
        if callable(member):
            return lambda *args, **kwargs: dispatch(member, (self, *args), kwargs)
        return getattr(materialize_arguments(self, member), name)


def _define_methods() -> None:
    """Define the lazy operations and the operators as methods. Python looks operators up on the class."""

    def method(name: str, member: Any) -> Callable[..., Any]:
        def call(self: TracedLazyLogits, *args: Any, **kwargs: Any) -> Any:
            return dispatch(member, (self, *args), kwargs)

        call.__name__ = name
        return call

    operators = """
        add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv mod pow rpow matmul
        rmatmul neg abs eq ne lt le gt ge getitem setitem float int bool array
    """.split()  # noqa: SIM905
    members = [(name, getattr(torch.Tensor, name)) for name in dir(torch.Tensor)]
    operations = [name for name, member in members if callable(member) and member in tables.OPERATIONS]
    for name in ("shape", "dtype", "device", "ndim", "requires_grad"):
        setattr(TracedLazyLogits, name, property(lambda lazy, name=name: getattr(lazy._state, name)))  # type: ignore[misc]
    for name in [f"__{op}__" for op in operators] + operations:
        if name not in TracedLazyLogits.__dict__:
            setattr(TracedLazyLogits, name, method(name, getattr(torch.Tensor, name)))
    TracedLazyLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


_define_methods()
CLASS_BY_COMPILING[True] = TracedLazyLogits
