"""``patch_model``, ``unpatch_model``, ``lazy_logits`` and ``report``: the public functions for models of Transformers.

``patch_model`` replaces the classes of some modules: of each head (a linear layer that computes logits, see
``find_heads.py``), and of the model, whose new ``forward`` notes whether the call has ``labels``. The head of a patched
model returns lazy logits if the call has labels, or if the head is in training mode and gradients are enabled. Then
a loss that the model or the training loop computes from these logits is the fused loss. In all other calls the head
runs stock code (the unpatched code, here ``nn.Linear.forward``), which returns ordinary logits. Within
``lazy_logits(model)`` all calls except ``generate()`` return lazy logits.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flce.core import private
from flce.core.log import find_caller
from flce.core.options import ChunkOptions
from flce.huggingface.class_swap import MethodFactory, replace_class, restore_class
from flce.huggingface.divided_head import HeadProductMode, divide_head, is_divided
from flce.huggingface.find_heads import (
    HeadModules,
    VocabularyProductMode,
    backbone,
    embedding_layers,
    find_heads,
    find_language_models,
    modules_except,
    vocabulary_sizes,
)
from flce.huggingface.head_call import HeadCall, is_exporting_or_tracing, reason_not_lazy
from flce.huggingface.labels import find_labels, find_labels_slice, name_wrong_label
from flce.huggingface.lazy import TracedLazyLogits, is_lazy, make_lazy
from flce.huggingface.lazy.base import without_logits
from flce.huggingface.lazy.state import OnMaterialize, Settings, Term, head_state
from flce.huggingface.staleness import optimizer_steps
from flce.huggingface.usage import (
    COMPILED_DTENSOR,
    DIVIDED_DIFFERENTLY,
    EVALUATION,
    HEAD_NOT_CALLED,
    LINEAR_REPLACED,
    MaterializedLogitsError,
    Report,
    Usage,
    format_unpatched,
)
from flce.huggingface.wrappers import current_checkpoint, is_partitioned, is_reentrant, reason_wrapper_not_lazy
from flce.ops.arguments import names_replacements
from flce.ops.vocabulary_parallel import is_dtensor
from flce.torch_ops import can_break_graph, register_skipped_frames, skip_frame, skip_frame_and_callees

ModelT = TypeVar("ModelT", bound=nn.Module)

_counts_lock = threading.Lock()
_lazy_patches_of_checkpoint: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
"""For each running checkpoint (see `current_checkpoint`): ids of the patches with lazy logits in its first pass."""


@dataclass
class _Patch:
    """State of one patched model: the attribute ``_flce`` of the model and of each of its heads."""

    settings: Settings
    compiled_call_has_labels: bool = False
    """True if the call that ``torch.compile`` traces has labels. Outside of a trace, `_thread_state` stores this; a
    trace cannot read a thread-local variable."""
    running_calls: int = 0
    """Number of running `_Call`s in all threads. They will convert the outputs of a compiled graph to tensors."""
    head_modules: HeadModules | None = None
    """The modules of the output embedding at the last search for heads."""
    has_vocabulary_products: bool | None = None
    """True if a call may compute logits by a product as wide as the vocabulary outside of the heads, see
    `VocabularyProductMode`. None: unknown until the next call."""
    is_compiled_head_called: bool = False
    """True if a head has run in a compiled graph. A graph cannot write to `_thread_state`."""
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

    def __deepcopy__(self, memo: dict[int, Any]) -> _Patch:
        """Return a new patch for the copy of a model. The copy of a single layer shares this patch, because PEFT
        trains such copies within the same model (``modules_to_save``)."""
        root_copy = next(iter(memo.values()), None)  # copy of the object that deepcopy() was called with
        if isinstance(root_copy, nn.Linear):
            return self
        return _Patch(**self.__getstate__() | {"usage": copy.deepcopy(self.usage, memo)})

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
            or id(self) in _thread_state.patches_with_labels
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


class _ThreadState(threading.local):
    """Running calls of patched models in one thread."""

    running_model: Any = None
    """The patched model whose call is running."""
    patches_with_labels: frozenset[int] = frozenset()
    """Ids of the patches of running models that were called with labels. Replicas of a model share one patch, and each
    replica runs in a separate thread."""
    runs_stock = False
    """True while a head runs stock code, so that `VocabularyProductMode` leaves the head's product unchanged."""
    is_head_called = False
    """True if a head has run in the current call of a model."""
    head_in_mode: Any = None
    """The head that runs in a `HeadProductMode`."""
    entered_call: _Call | None = None
    """The call that a patched `__call__` has begun, until the `forward` of the same module runs."""


_thread_state = _ThreadState()


def _head_methods(original: type[nn.Linear]) -> dict[str, Callable[..., Any]]:
    forward = original.forward

    @functools.wraps(forward)
    def lazy_forward(self: Any, input: Tensor) -> Any:
        """Return logits ``(..., V)`` of hidden states ``(..., H)``, lazy or ordinary."""
        patch: _Patch | None = getattr(self, "_flce", None)
        if patch is None or is_exporting_or_tracing():
            return forward(self, input)
        compiling = torch.compiler.is_compiling()
        if compiling:
            patch.is_compiled_head_called = True
        else:
            _thread_state.is_head_called = True
            if self is _thread_state.head_in_mode:
                return forward(self, input)  # `HeadProductMode` returns the lazy logits
        if not patch.must_return_lazy(self):
            logits = forward(self, input)
            if not compiling and torch.is_grad_enabled():
                patch.usage.count_stock(logits, EVALUATION)
            return logits
        weight, bias = self.weight, self.bias  # read once: each read of a parametrised weight computes it
        reason = reason_not_lazy(input, weight, bias)
        if compiling:
            # Without labels the gradient passes through the logits that the graph returns. If no patched method
            # converts them (`_Call`), they are plain objects: DDP and FSDP could not register their hooks on them.
            is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            if (
                reason is not None
                or is_partitioned(weight)
                or (is_distributed and not (patch.compiled_call_has_labels or patch.running_calls))
            ):
                if is_dtensor(weight) and torch.is_grad_enabled():
                    patch.usage.trained_stock_reason = COMPILED_DTENSOR
                return F.linear(input, weight, bias)
            patch.usage.is_compiled = True
            return make_lazy(head_state(input, weight, bias, patch.settings))
        if is_dtensor(weight):
            if is_dtensor(input) and is_divided(weight, bias):
                return _lazy_divided_logits(self, patch, (weight, bias), input, weight, bias)
            reason = DIVIDED_DIFFERENTLY
        model = _thread_state.running_model
        reason = reason_wrapper_not_lazy(model, weight) or reason
        if reason is not None:
            return _run_stock_head(patch, reason, input, weight, bias)
        call = HeadCall(weight, bias, patch.usage, self, model)
        return make_lazy(head_state(input, weight, bias, patch.settings, call))

    return {"forward": lazy_forward}


def _lazy_divided_logits(head: Any, patch: _Patch, parameters: tuple[Any, Any], *product: Any) -> Any:
    """Return lazy logits of a head that is divided by classes.

    Args:
        parameters: its weight and its bias or None, DTensors.
        product: the input, the weight and the bias of stock's product. They may be local tensors.
    """
    local, division = divide_head(product[0], *parameters)
    reason = reason_not_lazy(*local)
    if reason is not None:
        return _run_stock_head(patch, reason, *product)
    call = HeadCall(*local[1:], patch.usage, head, _thread_state.running_model, parameters)
    return make_lazy(head_state(*local, patch.settings, call, division))


def _patch_instance_forward(head: Any) -> None:
    """Wrap the ``forward`` that Transformers' tensor parallelism has set on the instance of a head."""
    original = head.__dict__.get("forward")
    if original is None or hasattr(original, "_flce_original") or not is_dtensor(head._parameters.get("weight")):
        return

    @functools.wraps(original)
    def divided_forward(*args: Any, **kwargs: Any) -> Any:
        patch: _Patch | None = head.__dict__.get("_flce")
        weight, bias = head._parameters["weight"], head._parameters.get("bias")
        if patch is None or torch.compiler.is_compiling() or is_exporting_or_tracing() or not is_divided(weight, bias):
            return original(*args, **kwargs)
        _thread_state.is_head_called = True
        if not patch.must_return_lazy(head):
            logits = original(*args, **kwargs)
            if torch.is_grad_enabled():
                patch.usage.count_stock(logits, EVALUATION)
            return logits
        previous, _thread_state.head_in_mode = _thread_state.head_in_mode, head
        try:
            with HeadProductMode(functools.partial(_lazy_divided_logits, head, patch, (weight, bias))) as mode:
                logits = original(*args, **kwargs)
        finally:
            _thread_state.head_in_mode = previous
        if not mode.has_replaced:
            _raise_if_stock_forbidden(patch, LINEAR_REPLACED)
            if torch.is_grad_enabled():
                patch.usage.count_stock(logits, LINEAR_REPLACED)
        return logits

    divided_forward._flce_original = original  # type: ignore[attr-defined]
    head.forward = divided_forward


def _run_stock_head(patch: _Patch, reason: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """Return ordinary logits from a call that had to return lazy logits. Count the ``reason``, or raise."""
    _raise_if_stock_forbidden(patch, reason)
    _thread_state.runs_stock = True
    try:
        logits = F.linear(input, weight, bias)
    finally:
        _thread_state.runs_stock = False
    if torch.is_grad_enabled():
        patch.usage.count_stock(logits, reason)
    return logits


def _raise_if_stock_forbidden(patch: _Patch, reason: str) -> None:
    if (torch.is_grad_enabled() or patch.always_lazy) and patch.settings.on_materialize == "raise":
        raise MaterializedLogitsError(
            f"the head would run stock code, which patch_model(..., on_materialize='raise') forbids: {reason}"
        )


def _report_head_not_called(model: Any, patch: _Patch, outputs: Any) -> None:
    """Count and warn, or raise, if a call that ran no head has returned a loss or logits."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if type(outputs) in (tuple, list) else ()
    sizes = vocabulary_sizes(model)
    # A loss has no dimensions.
    real_outputs = [
        v for v in values if isinstance(v, Tensor) and not is_lazy(v) and (v.dim() == 0 or v.shape[-1] in sizes)
    ]
    if not real_outputs:
        return
    _raise_if_stock_forbidden(patch, HEAD_NOT_CALLED)
    trained = [value for value in real_outputs if value.requires_grad]
    if trained:
        patch.usage.count_stock(trained[0], HEAD_NOT_CALLED)
        if model.training:
            patch.usage.trained_stock_reason = HEAD_NOT_CALLED
            patch.usage.warn_if_not_fused()


def _model_methods(original: Any) -> dict[str, Callable[..., Any]]:
    forward = original.forward
    labels_slice = find_labels_slice(forward)

    @functools.wraps(forward)
    def patched_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch: _Patch | None = getattr(self, "_flce", None)
        if patch is None or is_exporting_or_tracing():
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            previous = patch.compiled_call_has_labels
            patch.compiled_call_has_labels = find_labels(args, kwargs, labels_slice) is not None
            try:
                return forward(self, *args, **kwargs)
            finally:
                patch.compiled_call_has_labels = previous
        _find_new_heads(self, patch)
        if not patch.must_return_lazy(self):
            return forward(self, *args, **kwargs)
        product_mode = _make_product_mode(self, patch)
        patch.is_compiled_head_called = _thread_state.is_head_called = False
        try:
            with product_mode or contextlib.nullcontext():
                outputs = forward(self, *args, **kwargs)
        except IndexError as error:
            name_wrong_label(error, find_labels(args, kwargs, labels_slice))
            raise
        has_replaced = product_mode is not None and bool(product_mode.replaced)
        is_head_called = patch.is_compiled_head_called or _thread_state.is_head_called
        if product_mode is not None and not (has_replaced or is_head_called):
            _report_head_not_called(self, patch, outputs)
        # Adapters outside of linear layers may be enabled later, see `has_adapter_parameters`.
        has_adapters = patch.head_modules is not None and patch.head_modules.has_adapter_parameters
        patch.has_vocabulary_products = has_replaced or not is_head_called or has_adapters
        return outputs

    # Accelerate's mixed precision sets another `forward` on the instance. Only `__call__` of the class runs then.
    call_methods = {
        "forward": _wrap_call_method(patched_forward, labels_slice),
        "__call__": _wrap_call_method(original.__call__, labels_slice),
    }
    return call_methods | _generate_methods(original)


def _wrapper_methods(original: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods of a patched wrapper of a model. ``torch.compile`` may compile the wrapper with the model."""
    return {
        name: _wrap_call_method(getattr(original, name), None) for name in ("forward", "__call__")
    } | _generate_methods(original)


def _generate_methods(original: Any) -> dict[str, Callable[..., Any]]:
    names = [name for name in ("generate", "generate_batch") if callable(getattr(original, name, None))]
    return {name: _with_stock_logits(getattr(original, name)) for name in names}


def _with_stock_logits(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a ``generate()``: it samples from its logits, so they are ordinary logits also within `lazy_logits`."""

    @functools.wraps(generate)
    def stock_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch: _Patch | None = getattr(self, "_flce", None)
        if patch is None:
            return generate(self, *args, **kwargs)
        patch.change_counts(running_generate_calls=1)
        try:
            return generate(self, *args, **kwargs)
        finally:
            patch.change_counts(running_generate_calls=-1)

    return stock_generate


def _wrap_call_method(method: Callable[..., Any], labels_slice: slice | None) -> Callable[..., Any]:
    """Wrap ``forward`` or ``__call__`` of one module. The first of the two that runs begins a `_Call`. ``forward``
    converts the outputs; if the class's ``forward`` does not run, ``__call__`` does."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # A caller of the model is compiled. End the caller's graph here, so that this method runs in Python and
            # can convert plain objects to tensors (see `_Call`).
            patch: _Patch | None = None if is_exporting_or_tracing() else getattr(self, "_flce", None)
            if patch is not None and not patch.running_calls:
                must_be_lazy = patch.always_lazy or (self.training and torch.is_grad_enabled())
                if (must_be_lazy or find_labels(args, kwargs, labels_slice) is not None) and can_break_graph():
                    torch._dynamo.graph_break()
            return method(self, *args, **kwargs)
        patch = None if private.get_tracing_state() is not None else getattr(self, "_flce", None)
        if patch is None:
            return method(self, *args, **kwargs)
        call = _thread_state.entered_call
        if call is not None and call.model is self:  # `__call__` has begun this call
            _thread_state.entered_call = None
            if not call.has_labels:
                call.note_labels(args, kwargs, labels_slice)
            return call.convert_outputs(method(self, *args, **kwargs))
        call = _Call(self, patch, args, kwargs, labels_slice)
        try:
            outputs = method(self, *args, **kwargs)
            return outputs if call.has_converted else call.convert_outputs(outputs)
        finally:
            call.restore()

    skip_frame(wrapped)
    register_skipped_frames()  # must happen before a patched model runs
    return wrapped


class _Call:
    """A running call of a patched model, or of a patched wrapper (``labels_slice`` is None).

    A graph of ``torch.compile`` cannot create a tensor subclass of flce. Within a graph lazy logits are plain objects
    (`TracedLazyLogits`), but the caller of a model expects tensors. So the compiler skips the outermost frame of a
    patched model. This frame runs in Python and converts the objects in the outputs of the graph to tensors.
    """

    @skip_frame_and_callees
    def __init__(self, model: Any, patch: _Patch, args: Any, kwargs: Any, labels_slice: slice | None) -> None:
        self.model, self.patch = model, patch
        self.previous_thread_state = vars(_thread_state).copy()
        self.has_converted = self.has_labels = False
        patch.change_counts(running_calls=1)
        _thread_state.entered_call = self
        if labels_slice is not None:
            _thread_state.running_model = model
            self.note_labels(args, kwargs, labels_slice)

    @skip_frame_and_callees
    def note_labels(self, args: Any, kwargs: Any, labels_slice: slice | None) -> None:
        if find_labels(args, kwargs, labels_slice) is not None:
            self.has_labels = True
            _thread_state.patches_with_labels |= {id(self.patch)}

    @skip_frame_and_callees
    def convert_outputs(self, outputs: Any) -> Any:
        self.has_converted = True
        if self.patch.usage.trained_stock_reason == COMPILED_DTENSOR:  # a graph cannot warn
            _raise_if_stock_forbidden(self.patch, COMPILED_DTENSOR)
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
        vars(_thread_state).clear()
        vars(_thread_state).update(self.previous_thread_state)
        self.patch.change_counts(running_calls=-1)


@skip_frame_and_callees
def _find_new_heads(model: Any, patch: _Patch) -> None:
    """Patch heads that were added since the last call."""
    embedding = model.get_output_embeddings()
    if patch.head_modules is None or not patch.head_modules.still_match(embedding, patch):
        # Resizing the vocabulary replaces the head, and adapters add linear layers to it.
        heads = find_heads(model)
        _apply_patch(heads, _head_methods, patch)
        patch.head_modules, patch.has_vocabulary_products = HeadModules(embedding, heads), None
    for head in patch.head_modules.heads():  # tensor parallelism may be applied after `patch_model`
        _patch_instance_forward(head)


@skip_frame_and_callees
def _make_product_mode(model: Any, patch: _Patch) -> VocabularyProductMode | None:
    """Return a mode that replaces vocabulary products of one call by lazy logits, or None if there are none."""
    is_enabled = patch.has_vocabulary_products
    if is_enabled is None:
        # A model with a linear output embedding probably runs a head. If some of its layers are also compiled, they
        # would be compiled twice: with the mode in the first call, and without it later. Such a model gets the mode
        # only after a call that has not run its head.
        is_enabled = not (
            embedding_layers(model) and any(private.compiled_call(m) is not None for m in model.modules())
        )

    def lazy_product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        # This is correct for any product: lazy logits are computed when their values are read. If the product is not
        # the logits, only the warning about that read is wrong.
        if _thread_state.runs_stock or reason_not_lazy(hidden, weight, bias) is not None:
            return None
        call = HeadCall(weight, bias, patch.usage, None, model)
        return make_lazy(head_state(hidden, weight, bias, patch.settings, call))

    return VocabularyProductMode(model, lazy_product) if is_enabled else None


# ------------------------------------------------------------------------------------------------ public functions


@names_replacements
def patch_model(
    model: ModelT, *, options: ChunkOptions | None = None, on_materialize: OnMaterialize = "warn",
    empty_loss: str = "nan",
) -> ModelT:  # fmt: skip
    """Change a model in place, so that its cross-entropy loss is computed without its logits in memory.

    Loss, gradients and generated text equal those of the stock model. In calls with a loss, ``outputs.logits`` is a
    `flce.huggingface.LazyLogits`: an operation that needs the real logits computes them.

    You may add adapters on the output embedding (PEFT's LoRA) before or after patching. Their logits are not stored
    either. If ``model`` contains several models, a warning names the models that cannot be patched. Call
    `unpatch_model` before code that compares the exact class of a layer, such as ``quantize_dynamic``.

    Args:
        model: a model of Transformers with a language-model head, or any with ``get_output_embeddings()``; also
            inside of a wrapper, such as PEFT's or ``torch.compile``'s.
        options: ``flce.ChunkOptions`` for the fused loss.
        on_materialize: the reaction if an operation needs the logits themselves, so that all of them are computed.
            "warn": a `flce.huggingface.MaterializedLogitsWarning` names the operation and the line that called
            it. "ignore": no warning. "raise": a `flce.huggingface.MaterializedLogitsError` names them, and is also
            raised if the head would run stock code in training or within `lazy_logits`.
            ``outputs.logits.materialize()`` is always allowed.
        empty_loss: "nan" or "zero", see `flce.fused_linear_cross_entropy`: the mean of a loss without any label. If the
            model's code divides a sum, such as by ``num_items_in_batch``, it divides by 0.

    Returns:
        ``model``. Patching a patched model only replaces its options.

    Raises:
        TypeError: no model has an output embedding, or all output embeddings are quantised or not linear.
        ValueError: ``on_materialize`` or ``empty_loss`` is not one of its options.
    """
    settings = Settings(options, on_materialize, empty_loss)
    _check_model("patch_model", model)
    if private.make_wrapper_subclass is None:  # Lazy logits cannot exist; `core.private` has warned.
        return model
    optimizer_steps.register()
    language_models, unpatchable = find_language_models(model)
    if not language_models:
        missing = f"{type(model).__name__} has no output embedding: no module in it has get_output_embeddings(). "
        remedy = "Patch a model of Transformers with a language-model head, or add this method to your model"
        raise TypeError(next(iter(unpatchable.values()), missing + remedy))
    if unpatchable and not is_patched(model):
        find_caller().warn(
            "flce.patch_model could not patch some models. " + format_unpatched(unpatchable), UserWarning
        )
    for language_model in language_models:
        # If a model within this one is already patched, both have to share one patch, because they share their heads.
        patch = next(iter(_patches(language_model).values()), None) or _Patch(settings)
        patch.settings = settings
        if "_flce" not in language_model.__dict__:
            _apply_patch([language_model], _model_methods, patch)
            backbone(language_model).register_forward_pre_hook(patch.count_forward)
        others = modules_except(model, [*language_models, *map(model.get_submodule, unpatchable)])
        heads = find_heads(language_model, others)
        _apply_patch(heads, _head_methods, patch)
        for head in heads:
            _patch_instance_forward(head)
    if not any(model is other for other in language_models) and not type(model).__module__.startswith("torch."):
        _apply_patch([model], _wrapper_methods, patch)
    return model


def unpatch_model(model: ModelT) -> ModelT:
    """Undo `patch_model` in all modules of ``model``, and return ``model``.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check_model("unpatch_model", model)
    for module in model.modules():
        if "_flce" in module.__dict__:
            del module._flce
            restore_class(module)  # if the class cannot be restored: without `_flce` the methods run stock code
            forward: Any = module.__dict__.get("forward")
            original = getattr(forward, "_flce_original", None)
            # `functools.update_wrapper` copies the attribute to a wrapper, such as Accelerate's, which must stay.
            if original is not None and forward.__wrapped__ is original:
                module.forward = original
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), _Patch):
                del module._forward_pre_hooks[key]
    return model


@contextlib.contextmanager
def lazy_logits(model: nn.Module, *models: nn.Module) -> Iterator[None]:
    """Return a context in which patched models return lazy logits in ``eval()`` mode and under ``torch.no_grad()`` too.

    Use it for log-probabilities of the old policy and of a reference model in reinforcement learning. Values of these
    logits are computed as in training: without logits in memory, and with the same bits with and without gradients.
    ``generate()`` is not affected. The context holds for all threads. Contexts may be nested.

    Args:
        model, models: patched models, or wrappers of them.

    Raises:
        TypeError: a model is not a module.
        ValueError: a model is not patched.

    Examples:
        >>> with flce.huggingface.lazy_logits(model), torch.no_grad():
        ...     logprob = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    """
    patches: dict[int, _Patch] = {}
    for patched_model in (model, *models):
        _check_model("lazy_logits", patched_model)
        patches_by_name = _patches(patched_model)
        if not patches_by_name:
            raise ValueError(
                f"lazy_logits expects models that flce.patch_model was called with, got a "
                f"{type(patched_model).__name__} that is not patched"
            )
        patches |= {id(patch): patch for patch in patches_by_name.values()}
    for patch in patches.values():
        patch.change_counts(lazy_contexts=1)
    try:
        yield
    finally:
        for patch in patches.values():
            patch.change_counts(lazy_contexts=-1)


def is_patched(model: nn.Module) -> bool:
    """Return True if `patch_model` was applied to ``model`` or to a model that it wraps.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check_model("is_patched", model)
    return any("_flce" in module.__dict__ for module in model.modules())


def report(model: nn.Module) -> Report:
    """Return the patched modules of ``model``, and counts of fused losses and of logits in memory since patching.

    Calls under ``torch.compile`` are not counted.

    Args:
        model: any module. Models that it wraps are included.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check_model("report", model)
    usages = usages_of(model)
    return Report(
        patched=tuple(_patches(model)),
        forwards=sum(usage.forwards for usage in usages),
        fused=sum(usage.fused for usage in usages),
        values=sum(usage.values for usage in usages),
        materialized=sum((usage.materialized for usage in usages), Counter()),
        stock=sum((usage.stock for usage in usages), Counter()),
        left=find_language_models(model)[1],
    )


def _check_model(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = ": give transformers.AutoModelForCausalLM.from_pretrained(...)" if isinstance(model, str) else ""
        raise TypeError(f"{function} expects a torch.nn.Module, got {type(model).__name__}{hint}")


def usages_of(model: nn.Module) -> list[Usage]:
    """Return the counts of the patched models in ``model``."""
    return list({id(patch): patch.usage for patch in _patches(model).values()}.values())


def _apply_patch(modules: Iterable[Any], make_methods: MethodFactory, patch: _Patch) -> None:
    for module in modules:
        if "_flce" not in module.__dict__:
            replace_class(module, make_methods)
        module.__dict__["_flce"] = patch  # replaces the patch of a layer that another patched model had before


def _patches(model: nn.Module) -> dict[str, _Patch]:
    """Return the patch of each patched module in ``model``, by the name of the module."""
    return {name: module.__dict__["_flce"] for name, module in model.named_modules() if "_flce" in module.__dict__}
