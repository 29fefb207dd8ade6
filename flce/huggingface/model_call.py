"""A call of a patched model: its labels, the state of its patch, and its outputs. ``patch.py`` calls this module."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flce.core import private
from flce.huggingface.find_heads import HeadModules
from flce.huggingface.head_call import HeadCall
from flce.huggingface.lazy import TracedLazyLogits, make_lazy
from flce.huggingface.lazy.base import without_logits
from flce.huggingface.lazy.state import Settings, Term
from flce.huggingface.usage import COMPILED_DTENSOR, MaterializedLogitsError, Usage
from flce.huggingface.wrappers import current_checkpoint, is_reentrant
from flce.torch_ops import can_break_graph, is_exported, register_skipped_frames, skip_frame, skip_frame_and_callees

_counts_lock = threading.Lock()
_lazy_patches_of_checkpoint: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
"""For each running checkpoint (see `current_checkpoint`): ids of the patches with lazy logits in its first pass."""


@dataclass
class Patch:
    """State of one patched model: the attribute ``_flce`` of the model and of each of its heads."""

    settings: Settings
    compiled_call_has_labels: bool = False
    """True if the call that ``torch.compile`` traces has labels. Outside of a trace, `thread_state` stores this; a
    trace cannot read a thread-local variable."""
    running_calls: int = 0
    """Number of running `Call`s in all threads. They will convert the outputs of a compiled graph to tensors."""
    head_modules: HeadModules | None = None
    """The modules of the output embedding at the last search for heads."""
    has_vocabulary_products: bool | None = None
    """True if a call may compute logits by a product as wide as the vocabulary outside of the heads, see
    `ProductMode`. None: unknown until the next call."""
    is_compiled_head_called: bool = False
    """True if a head has run in a compiled graph. A graph cannot write to `thread_state`."""
    usage: Usage = field(default_factory=Usage)
    """Counts of fused losses, of computed logits, and of runs of stock code."""
    lazy_contexts: int = 0
    """Number of entered `lazy_logits` contexts in all threads, because other threads may run replicas of the model."""
    running_generate_calls: int = 0
    """Number of running calls of ``generate()``."""
    always_lazy: bool = False
    """True if `lazy_contexts` > 0 and `running_generate_calls` == 0. Stored, because the compiler would compile the
    model again for each new value of the two counts."""

    def change_counts(self, *, lazy_contexts: int = 0, running_generate_calls: int = 0, running_calls: int = 0) -> None:
        with _counts_lock:
            self.lazy_contexts += lazy_contexts
            self.running_generate_calls += running_generate_calls
            self.running_calls += running_calls
            self.always_lazy = self.lazy_contexts > 0 and self.running_generate_calls == 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle. A loaded model is in no `lazy_logits` context, and searches its heads again."""
        counts = {"lazy_contexts": 0, "running_generate_calls": 0, "running_calls": 0, "always_lazy": False}
        return {**vars(self), **counts, "head_modules": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        """Return a new patch for the copy of a model. The copy of a single layer shares this patch, because PEFT
        trains such copies within the same model (``modules_to_save``)."""
        root_copy = next(iter(memo.values()), None)  # copy of the object that deepcopy() was called with
        if isinstance(root_copy, nn.Linear):
            return self
        return Patch(**self.__getstate__() | {"usage": copy.deepcopy(self.usage, memo)})

    def count_forward(self, backbone_module: nn.Module, args: Any) -> None:
        """Count a forward. It is counted at the backbone because a trainer with its own loss kernel calls only that."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and private.get_tracing_state() is None:
            self.usage.on_forward_begin(backbone_module.training)

    def must_return_lazy(self, module: nn.Module) -> bool:
        """Return True if ``module`` (a head or the model) has to return lazy logits in the current call."""
        if module.training and torch.is_grad_enabled():
            return True
        if torch.compiler.is_compiling():
            return self.compiled_call_has_labels or self.always_lazy
        checkpoint = current_checkpoint()
        must_be_lazy = (
            self.always_lazy
            or id(self) in thread_state.patches_with_labels
            # The first pass of a reentrant checkpoint has gradients disabled in training.
            or (module.training and is_reentrant(checkpoint))
        )
        if checkpoint is None:
            return must_be_lazy
        # Checkpointing runs the head twice. The second pass, without labels, must return logits of the same kind.
        lazy_patches = _lazy_patches_of_checkpoint.setdefault(checkpoint, set())
        if must_be_lazy:
            lazy_patches.add(id(self))
        return id(self) in lazy_patches

    def refuse_stock(self, reason: str) -> None:
        """Raise `MaterializedLogitsError` if stock code would run, and ``on_materialize="raise"`` forbids it."""
        if (torch.is_grad_enabled() or self.always_lazy) and self.settings.on_materialize == "raise":
            raise MaterializedLogitsError(
                f"the head would run stock code, which patch_model(..., on_materialize='raise') forbids: {reason}"
            )


class ThreadState(threading.local):
    """Running calls of patched models in one thread."""

    running_model: Any = None
    """The patched model whose call is running."""
    patches_with_labels: frozenset[int] = frozenset()
    """Ids of the patches of running models that were called with labels. Replicas of a model share one patch, and each
    replica runs in a separate thread."""
    runs_stock = False
    """True while a head runs stock code, so that `ProductMode` leaves the head's product unchanged."""
    is_head_called = False
    """True if a head has run in the current call of a model."""
    head_in_mode: Any = None
    """The head that runs in a `ProductMode`."""
    entered_call: Call | None = None
    """The call that a patched `__call__` has begun, until the `forward` of the same module runs."""


thread_state = ThreadState()


def is_exporting_or_tracing() -> bool:
    """Return True if torch.export or torch.jit is tracing the model. The traced program has to run without flce."""
    return is_exported() if torch.compiler.is_compiling() else private.get_tracing_state() is not None


def wrap_call_method(method: Callable[..., Any], labels_slice: slice | None) -> Callable[..., Any]:
    """Wrap ``forward`` or ``__call__`` of one module. The first of the two that runs begins a `Call`. ``forward``
    converts the outputs; if the class's ``forward`` does not run, ``__call__`` does."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch: Patch | None = getattr(self, "_flce", None)
        if patch is None or is_exporting_or_tracing():
            return method(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            # A caller of the model is compiled. End the caller's graph here, so that this method runs in Python and
            # can convert plain objects to tensors (see `Call`).
            if not patch.running_calls:
                has_labels = find_labels(args, kwargs, labels_slice) is not None
                if (has_labels or patch.must_return_lazy(self)) and can_break_graph():
                    torch._dynamo.graph_break()
            return method(self, *args, **kwargs)
        call = thread_state.entered_call
        if call is not None and call.model is self:  # `__call__` has begun this call
            thread_state.entered_call = None
            if not call.has_labels:
                call.note_labels(args, kwargs, labels_slice)
            return call.convert_outputs(method(self, *args, **kwargs))
        call = Call(self, patch, args, kwargs, labels_slice)
        try:
            outputs = method(self, *args, **kwargs)
            return outputs if call.has_converted else call.convert_outputs(outputs)
        finally:
            call.restore()

    skip_frame(wrapped)
    register_skipped_frames()  # must happen before a patched model runs
    return wrapped


class Call:
    """A running call of a patched model, or of a patched wrapper (``labels_slice`` is None).

    A graph of ``torch.compile`` cannot create a tensor subclass of flce. Within a graph lazy logits are plain objects
    (`TracedLazyLogits`), but the caller of a model expects tensors. So the compiler skips the outermost frame of a
    patched model. This frame runs in Python and converts the objects in the outputs of the graph to tensors.
    """

    @skip_frame_and_callees
    def __init__(self, model: Any, patch: Patch, args: Any, kwargs: Any, labels_slice: slice | None) -> None:
        self.model, self.patch = model, patch
        self.previous_thread_state = vars(thread_state).copy()
        self.has_converted = self.has_labels = False
        patch.change_counts(running_calls=1)
        thread_state.entered_call = self
        if labels_slice is not None:
            thread_state.running_model = model
            self.note_labels(args, kwargs, labels_slice)

    @skip_frame_and_callees
    def note_labels(self, args: Any, kwargs: Any, labels_slice: slice | None) -> None:
        if find_labels(args, kwargs, labels_slice) is not None:
            self.has_labels = True
            thread_state.patches_with_labels |= {id(self.patch)}

    @skip_frame_and_callees
    def convert_outputs(self, outputs: Any) -> Any:
        self.has_converted = True
        if self.patch.usage.trained_stock_reason == COMPILED_DTENSOR:  # a graph cannot warn
            self.patch.refuse_stock(COMPILED_DTENSOR)
            self.patch.usage.warn_if_not_fused()
        outputs = self._as_tensors(outputs)
        # `torch.nn.DataParallel` runs replicas of the model, and gathers their outputs on one GPU.
        is_gathered = self.has_labels and getattr(self.model, "_is_replica", False) and torch.is_grad_enabled()
        return without_logits(outputs) if is_gathered else outputs

    def _as_tensors(self, value: Any) -> Any:
        """Replace each `TracedLazyLogits` in ``value`` by a tensor. Mappings are changed in place."""
        if isinstance(value, TracedLazyLogits):
            real, state = value._get_real(), value._state
            if real is not None:
                return real
            # A graph cannot create a `HeadCall`, which detects changes of the weight and runs the hooks of wrappers.
            return make_lazy(state.with_calls(tuple(self._head_call(t) for t in state.terms if t.weight is not None)))
        if isinstance(value, MutableMapping):
            for key, item in list(value.items()):
                if not (item is None or isinstance(item, Tensor)) and (new := self._as_tensors(item)) is not item:
                    value[key] = new
        elif type(value) in (tuple, list):
            return type(value)(item if isinstance(item, Tensor) else self._as_tensors(item) for item in value)
        return value

    def _head_call(self, term: Term) -> HeadCall:
        assert term.weight is not None
        layer = next((m for m in self.model.modules() if m._parameters.get("weight") is term.weight), None)
        call = HeadCall(term.weight, term.bias, self.patch.usage, layer, self.model)
        # If there are labels, the graph has computed a loss. Its gradient does not pass through the logits.
        call.has_bypassing_gradient = self.has_labels
        return call

    @skip_frame_and_callees
    def restore(self) -> None:
        vars(thread_state).clear()
        vars(thread_state).update(self.previous_thread_state)
        self.patch.change_counts(running_calls=-1)


# --------------------------------------------------------------------------------------------------------- labels


def find_labels(args: Any, kwargs: Any, labels_slice: slice | None) -> Any:
    """Return the labels of a call of a model, an argument or a key of a batch that is a mapping; None: no labels."""
    if labels_slice is None:  # the call of a wrapper, whose model gets the labels
        return None
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Mapping)]
    for labels in (kwargs.get("labels"), *args[labels_slice], *[batch.get("labels") for batch in batches]):
        if labels is not None:
            return labels
    return None


def name_wrong_label(error: IndexError, labels: Any) -> None:
    """Add the row and the column of the label to the error of a target that is out of range."""
    found = re.match(r"target (-?\d+) at position", str(error))
    if found and isinstance(labels, Tensor) and (places := (labels == int(found[1])).nonzero().tolist()):
        error.args = (f"labels{places[0]}: {error}",)


def find_labels_slice(forward: Callable[..., Any]) -> slice:
    """Return a slice of the positional arguments after ``self`` that contains only ``labels``, or an empty slice."""
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    return slice(names.index("labels"), names.index("labels") + 1) if "labels" in names else slice(0)
