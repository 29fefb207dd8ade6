"""What both kinds of lazy logits share: the state, what they are views or copies of, and the real logits."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from flce.huggingface.head_call import HeadCall, watch_gradient
from flce.huggingface.lazy.state import LazyState
from flce.huggingface.staleness import StaleLogitsError, versions_of
from flce.huggingface.usage import ASKED_FOR, forbid_materialized, say_materialized
from flce.huggingface.wrappers import outside_of_checkpoint

LazyT = TypeVar("LazyT")


class Source:
    """What lazy logits come from.

    Args:
        lazy: other lazy logits.
        repeat: makes these logits' real ones of real ones of `lazy`.
        is_view: they share their memory; else a copy, of what `lazy` is now.
    """

    def __init__(self, lazy: LazyBase, repeat: Callable[[Tensor], Tensor], is_view: bool) -> None:
        self.lazy, self.repeat, self.is_view, self._state = lazy, repeat, is_view, lazy._state
        self._given: Tensor | None = None

    def is_followed(self) -> bool:
        """Whether these logits are made of those of `lazy` as soon as they exist."""
        return self.is_view or self.lazy._is_awaited()

    def is_unchanged(self) -> bool:
        lazy = self.lazy
        return lazy._state is self._state and (lazy._real is None or lazy._made_as == versions_of(lazy._real))

    def give(self) -> Tensor | None:
        """The real logits, if they can be made of `lazy`'s."""
        memory = self.lazy._real
        if self._given is None and memory is not None and (self.is_view or self.is_unchanged()):
            self._given = self.repeat(memory)
        return self._given

    def _existing(self) -> Tensor | None:
        self.lazy._existing()
        return self.give()


class Hooked:
    """Whether a hook waits for the gradient of lazy logits. Their places in the autograd graph refer to it.

    Args:
        source: the same of what these logits come from.
    """

    def __init__(self, source: Hooked | None) -> None:
        self.now, self._source = False, source

    def anywhere(self) -> bool:
        """Whether one waits here, or at what these logits come from."""
        hooked: Hooked | None = self
        while hooked is not None and not hooked.now:
            hooked = hooked._source
        return hooked is not None


class _Family:
    """The views of one memory, and the copies of what is in it.

    Args:
        width: entries in a row of the memory.

    Attributes:
        waiting: those that are not real yet, and have to be before the memory is written to. A view without gradients
            is known by its source: `torch.utils.swap_tensors(x, logits.detach())` takes no tensor with weak references.
        views: those that are real, and the part of the memory that each lies in.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self.waiting: list[weakref.ref[LazyBase | Source]] = []
        self.views: list[tuple[weakref.ref[LazyBase], _Box]] = []

    def add_view(self, view: LazyBase, real: Tensor) -> None:
        self.views.append((weakref.ref(view), _box(real, self._width)))

    def make_real(self) -> None:
        """Make those that wait real, if the memory exists."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        self.views = [view for view in self.views if view[0]() is not None]
        for ref in waiting:
            one = ref()
            with contextlib.suppress(RuntimeError):  # a view that autograd no longer allows: an error where it is used
                if one is not None and one._existing() is None and _may_come(one):
                    self.waiting.append(ref)

    def overlapping(self, real: Tensor) -> list[LazyBase]:
        """The views that may have elements of ``real``."""
        first, end, left, right = _box(real, self._width)
        near = [ref() for ref, (f, e, lo, hi) in self.views if f < end and first < e and lo < right and left < hi]
        return [lazy for lazy in near if isinstance(lazy, LazyBase)]  # PyTorch may have swapped it for another tensor


def _may_come(one: LazyBase | Source) -> bool:
    """Whether this can still be made of what it comes from."""
    source = one if isinstance(one, Source) else one._source
    return source is not None and (source.is_view or source.is_unchanged())


_Box = tuple[int, int, int, int]


def _box(real: Tensor, width: int) -> _Box:
    """The elements of its memory that a tensor lies between, and the columns, if a row has ``width`` elements."""
    start, width = int(real.storage_offset()), max(width, 1)
    if not real.numel():
        return start, start, 0, 0
    steps = [(int((size - 1) * stride), stride) for size, stride in zip(real.shape, real.stride(), strict=True)]
    left = start % width
    right = left + 1 + sum(length for length, stride in steps if stride % width)
    return start, start + 1 + sum(length for length, _ in steps), *((left, right) if right <= width else (0, width))


class LazyBase:
    """What both kinds of lazy logits share: the state, and the real logits once they exist.

    Views and copies refer to what they come from, their source. There is one memory for a root and all its views:
    whatever makes one of them real makes the root real, and repeats the views on it. So a write to one shows in all, as
    in stock. A copy is a root of its own, unless a hook waits for gradients at its source: then it is made from
    the source, if that was not written to since.
    """

    _state: LazyState
    _real: Tensor | None
    _source: Source | None
    # The values of a small view, in memory of their own, for operations that only read.
    _values: Tensor | None
    _viewed: bool  # has views
    _asked: bool  # for its place in the autograd graph, where gradients of copies have to pass then
    _family: _Family  # shared by a root and all its views
    _hooked: Hooked
    # A tensor without data that has the shape and strides of stock's logits: tells views from copies.
    _shadow: Tensor | None
    _made_as: Any  # the version of the real logits when their memory was made

    def _init(self, state: LazyState, source: Source | None, shadow: Tensor | None = None) -> None:
        self._state, self._source, self._shadow = state, source, shadow
        self._real, self._values, self._viewed, self._asked = None, None, False, False
        self._hooked = Hooked(None if source is None else source.lazy._hooked)
        root = self._viewed_source()
        self._family = _Family(state.shape[-1]) if root is None else root._family
        if root is not None:
            root._viewed = True

    def _viewed_source(self) -> LazyBase | None:
        """What this is a view of; None: it has memory of its own."""
        return self._source.lazy if self._source is not None and self._source.is_view else None

    def _root(self) -> LazyBase:
        """What this is a view of, or a view of a view; itself, if it has memory of its own."""
        root: LazyBase = self
        while (viewed := root._viewed_source()) is not None:
            root = viewed
        return root

    def _become(self, state: LazyState) -> None:
        """Change in place."""
        raise NotImplementedError

    def materialize(self) -> Tensor:
        """Compute the real logits, or return them if they have been computed before. No warning is given.

        Of a view all logits are computed, whose memory it shares; ``logits[:, -1].clone().materialize()`` computes the
        logits of these tokens only.

        Returns:
            An ordinary tensor of this object's shape, dtype and device, connected to the hidden states and
            the head in the autograd graph as stock logits are.

        Raises:
            RuntimeError: the hidden states or the head were changed since the model ran.
        """
        if self._existing() is None and self._state.calls:
            self._state.calls[0].usage.materialized[ASKED_FOR] += 1
            self._state.calls[0].usage.used |= self._state.requires_grad
        return self._make_real()

    @property
    def is_materialized(self) -> bool:
        """Whether the real logits exist."""
        return self._existing() is not None

    def _is_awaited(self) -> bool:
        """Whether a hook waits for gradients here, or at what this comes from."""
        lazy: LazyBase = self
        while not lazy._asked and lazy._source is not None:
            lazy = lazy._source.lazy
        return lazy._asked

    def _existing(self) -> Tensor | None:
        behind: list[LazyBase] = []
        lazy: LazyBase = self
        while lazy._real is None and lazy._source is not None and lazy._source.is_followed():
            behind.append(lazy)
            lazy = lazy._source.lazy
        lazy._look_around()
        for lazy in reversed(behind):
            source = lazy._source
            real = None if source is None else source.give()
            if source is not None and real is not None:
                lazy._set_real(real)
                if source.is_view:
                    lazy._made_as = source.lazy._made_as
            lazy._look_around()
        return self._real

    def _look_around(self) -> None:
        """Notice what was done to this object by code that asks no object."""

    def _set_real(self, real: Tensor) -> None:
        self._real, self._values, self._made_as = real, None, versions_of(real)

    def _moved(self) -> bool:
        """Whether the real logits were written to since this object last stood where they do in the autograd graph."""
        return False

    def _relatives(self) -> Sequence[tuple[LazyBase, Tensor]]:
        """What shares some of this object's memory, itself among them, with their real logits."""
        return []

    def _follow(self, func: Any) -> None:
        """After a write to the real logits: gives this object and its views the real ones' grad_fn."""

    def _make_real(self) -> Tensor:
        if self._existing() is None:
            root = self._root()
            root._set_real(root._compute())
            if root._source is not None:  # a copy, not made from what it is a copy of
                note_passing(root._state.calls, root._state)
        real = self._existing()
        assert real is not None
        return real

    def _compute(self) -> Tensor:
        state = self._state
        # In the mode of the head, not of who reads them first. What has no gradient is no less fit to be written to.
        inference = not torch.compiler.is_compiling() and state.tensors[0].is_inference()
        outside = any(call.is_outside for call in state.calls)  # a recomputation will find these logits, as stock's
        with grad_mode(True, inference), outside_of_checkpoint() if outside else contextlib.nullcontext():
            real = watch_gradient(state.logits(), state.calls)
            return real if self._shadow is None or self._viewed_source() is not None else _laid_out(real, self._shadow)

    def _read(self) -> Tensor:
        """The values of a small view."""
        if self._values is None:
            self._values = self._compute()
        return self._values

    def _is_small(self) -> bool:
        """Whether this is a view of so few logits that reading is no reason to compute all."""
        root = self._root()
        # A graph drops what it does not use: there each view is made by itself.
        return root is not self and (self._shadow is None or 4 * self._shadow.numel() <= math.prod(root._state.shape))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        state, values = self._state, self._values if self._existing() is None else self._real
        if values is not None:
            return repr(values)
        return f"LazyLogits(shape={tuple(state.shape)}, dtype={state.dtype}, device='{state.device}')"


def contiguous_shadow(state: LazyState) -> Tensor:
    return torch.empty(state.shape, dtype=state.dtype, device="meta")


def _laid_out(real: Tensor, shadow: Tensor) -> Tensor:
    """With the strides that stock's logits would have; those made from hidden states have their classes last."""
    sizes = zip(real.shape, real.stride(), shadow.stride(), strict=True)
    if all(size == 1 or mine == stocks for size, mine, stocks in sizes):
        return real
    return torch.empty_strided(shadow.shape, shadow.stride(), dtype=real.dtype, device=real.device).copy_(real)


def is_lazy(value: Any) -> bool:
    """Whether ``value`` is lazy logits of either kind."""
    return isinstance(value, LazyBase)


# Which class fits: by whether the compiler is at work.
_classes: dict[bool, Any] = {}


def made_when(compiling: bool) -> Callable[[type[LazyT]], type[LazyT]]:
    """A class decorator: `make_lazy` makes this class while a graph is traced, or else."""

    def register(kind: type[LazyT]) -> type[LazyT]:
        _classes[compiling] = kind
        return kind

    return register


def make_lazy(state: LazyState, source: Source | None = None, shadow: Tensor | None = None) -> Any:
    """Wrap a state in the class that fits: plain under the compiler, a tensor otherwise."""
    compiling = torch.compiler.is_compiling()
    if not torch.is_grad_enabled() and state.requires_grad:
        state = state.detach()
    # Graphs have no writes that would show: they need no shadow.
    return _classes[compiling]._wrap(state, source, None if compiling else shadow)


@contextlib.contextmanager
def grad_mode(grad: bool, inference: bool) -> Iterator[None]:
    other = not torch.compiler.is_compiling() and inference != torch.is_inference_mode_enabled()
    with torch.inference_mode(inference) if other else contextlib.nullcontext(), torch.set_grad_enabled(grad):
        yield


def note_passing(calls: Sequence[HeadCall], value: Any) -> None:
    """Note that gradients will pass by the logits, if ``value`` has some."""
    for call in calls:
        call.passed_by |= value.requires_grad


def state_of(logits: Any) -> LazyState | None:
    """What logits would be computed from; None where they are real."""
    lazy = isinstance(logits, LazyBase) and logits._existing() is None
    return logits._state if lazy else None


def made_of(state: LazyState, values: Iterable[Any]) -> None:
    """Say that ``values`` were made without the logits: wrappers wait for gradients, which come to these instead."""
    for value in values:
        if isinstance(value, Tensor):
            note_passing(state.calls, value)
            watch_gradient(value, state.calls)


def told(state: LazyState, func: Any, compute: Callable[[], Tensor]) -> Tensor:
    """The logits that ``compute`` returns, counted and with a warning, or an error, as ``patch_model`` was told to.

    Where they can no longer be computed, nothing is said of logits that were.

    Args:
        state: of the logits.
        func: what needs them.
        compute: computes them.
    """
    if torch.compiler.is_compiling():  # it has no frames to look at, and a warning would break the graph
        return compute()
    usage = state.calls[0].usage if state.calls else None
    needed = func, state.settings.on_materialize, usage, state.requires_grad
    forbid_materialized(*needed)
    try:
        logits = compute()
    except StaleLogitsError:
        raise
    except Exception:  # memory, as a rule, for want of which the warning is wanted
        say_materialized(*needed)
        raise
    say_materialized(*needed)
    return logits
