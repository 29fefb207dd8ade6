"""``patch_model``: make a model's output embedding return lazy logits while a loss is going to be computed.

The linear layers that make logits (``find_heads.py``) return lazy ones. The model notes whether it is called with
``labels``.

The layers are lazy when labels were given, or when they are in training mode with gradients enabled. So a model that
is evaluated with labels computes the fused loss, and a training loop that computes its own cross-entropy gets it too.
``generate()`` and inference run stock code. Within ``lazy_logits(model)`` all is lazy but ``generate()``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flce.core import private
from flce.core.callers import find_caller
from flce.core.options import ChunkOptions
from flce.huggingface.class_swap import MethodFactory, replace_class, restore_class
from flce.huggingface.find_heads import (
    HeadModules,
    VocabularyProductMode,
    backbone,
    embedding_layers,
    find_heads,
    find_owners,
    modules_except,
    vocabulary_sizes,
)
from flce.huggingface.head_call import HeadCall, is_exporting_or_tracing, reason_not_lazy
from flce.huggingface.lazy import TracedLazyLogits, is_lazy, make_lazy
from flce.huggingface.lazy.state import OnMaterialize, Settings, head_state
from flce.huggingface.lazy.terms import Term
from flce.huggingface.partitioned import is_partitioned
from flce.huggingface.staleness import optimizer_steps
from flce.huggingface.usage import EVALUATION, OTHER_LOGITS, MaterializedLogitsError, Report, Usage, format_unpatched
from flce.huggingface.wrappers import current_checkpoint, is_reentrant, reason_wrapper_not_lazy
from flce.ops.arguments import check_options
from flce.torch_ops.frames import can_break_graph, mark_frames, skip_frame, skip_frame_and_callees

ModelT = TypeVar("ModelT", bound=nn.Module)

_counts_lock = threading.Lock()


@dataclass
class _Patch:
    """What a patched model and its layers share."""

    settings: Settings
    compiled_call_has_labels: bool = False
    """Whether the call that is being compiled has labels. In Python `_thread_state` tells; the compiler knows no
    threads."""
    converts_outputs: bool = False
    """Whether what a graph makes of the model's outputs becomes tensors where it ends."""
    head_modules: HeadModules | None = field(default=None, init=False, repr=False)
    """The heads that were found last."""
    has_other_products: bool | None = None
    """Whether logits may be made by other products than the heads'; None: the next call will show."""
    is_head_called: bool = field(default=False, repr=False)
    usage: Usage = field(default_factory=Usage, repr=False)
    lazy_contexts: int = field(default_factory=int, init=False, repr=False)
    """How many `lazy_logits` are entered; of any thread, as other threads may run replicas of the model."""
    generations: int = field(default_factory=int, init=False, repr=False)
    """How many calls of ``generate()`` are running."""
    always_lazy: bool = field(default_factory=bool, init=False, repr=False)
    """Whether these two make logits lazy. A bool of its own: the compiler makes code for each value that it sees."""

    def change_counts(self, *, lazy_contexts: int = 0, generations: int = 0) -> None:
        """Change the two counts."""
        with _counts_lock:
            self.lazy_contexts += lazy_contexts
            self.generations += generations
            self.always_lazy = self.lazy_contexts > 0 and self.generations == 0

    def __getstate__(self) -> dict[str, Any]:
        """A model that is saved within a context is in none when it is loaded, and looks for its heads again."""
        return {**vars(self), "lazy_contexts": 0, "generations": 0, "always_lazy": False, "head_modules": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Patch:
        """A model's copy has a patch of its own. A layer that is copied by itself stays with its model: PEFT trains one
        in the place of the original (``modules_to_save``)."""
        root = next(iter(memo.values()), None)  # what the copy began with
        return self if isinstance(root, nn.Linear) else replace(self, usage=copy.deepcopy(self.usage, memo))

    def count_forward(self, below: nn.Module, args: Any) -> None:
        """Before a forward of what is below the head, which is called also where a trainer goes round the head."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and private.get_tracing_state() is None:
            self.usage.on_forward_begin(below.training)

    def expects_loss(self, module: nn.Module) -> bool:
        """Whether logits that ``module`` makes are to be lazy: it is being trained, or there are labels."""
        if module.training and torch.is_grad_enabled():
            return True
        if torch.compiler.is_compiling():
            return self.compiled_call_has_labels or self.always_lazy
        checkpoint = current_checkpoint()
        expected = self.always_lazy or id(self) in _thread_state.patches_with_labels
        expected = expected or (module.training and is_reentrant(checkpoint))
        if checkpoint is None:
            return expected
        # A recomputation does not see the labels, and has to make the same tensors as the first pass.
        made_lazy: set[int] = vars(checkpoint).setdefault("_flce_made_lazy", set())
        if expected:
            made_lazy.add(id(self))
        return id(self) in made_lazy


class _ThreadState(threading.local):
    """The calls of patched models that a thread is in."""

    owner: Any = None
    patches_with_labels: frozenset[int] = frozenset()
    """Patches of models that were given labels, by id: replicas of a model share the patch, in a thread each."""
    runs_stock = False
    """Whether the head runs as it is, so that its product stays one."""
    entered_call: _Call | None = None
    """What `__call__` has begun, until the `forward` of the same module runs."""


_thread_state = _ThreadState()


def _head_methods(original: type[nn.Linear]) -> dict[str, Callable[..., Any]]:
    """Methods for a linear layer of the output embedding."""
    forward = original.forward

    @functools.wraps(forward)
    def lazy_forward(self: Any, input: Tensor) -> Any:
        """Hidden states ``(..., H)`` to logits ``(..., V)``, lazy ones when a loss is expected."""
        patch: _Patch | None = getattr(self, "_flce", None)
        if patch is None or is_exporting_or_tracing():
            return forward(self, input)
        patch.is_head_called = True
        compiling = torch.compiler.is_compiling()
        if not patch.expects_loss(self):
            logits = forward(self, input)
            if not compiling and torch.is_grad_enabled():
                patch.usage.count_stock(logits, EVALUATION)
            return logits
        weight, bias = self.weight, self.bias  # read once: a parametrised weight is made when it is read
        reason = reason_not_lazy(input, weight, bias)
        if compiling:
            # What a wrapper's graph returns is no tensor, so others cannot register the hooks that training needs.
            is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            if (
                reason is not None
                or is_partitioned(weight)
                or (is_distributed and not (patch.compiled_call_has_labels or patch.converts_outputs))
            ):
                return F.linear(input, weight, bias)
            patch.usage.is_compiled = True
            return make_lazy(head_state(input, weight, bias, patch.settings))
        owner = _thread_state.owner
        reason = reason_wrapper_not_lazy(owner, weight) or reason
        if reason is not None:
            return _run_stock_head(patch, reason, input, weight, bias)
        call = HeadCall(weight, bias, patch.usage, self, owner)
        return make_lazy(head_state(input, weight, bias, patch.settings, call))

    return {"forward": lazy_forward}


def _run_stock_head(patch: _Patch, reason: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """Run the head as it is, where lazy logits were expected."""
    _raise_if_stock_forbidden(
        patch, f"the head would run stock code, which patch_model(..., on_materialize='raise') forbids: {reason}"
    )
    _thread_state.runs_stock = True
    try:
        logits = F.linear(input, weight, bias)
    finally:
        _thread_state.runs_stock = False
    if torch.is_grad_enabled():
        patch.usage.count_stock(logits, reason)
    return logits


def _raise_if_stock_forbidden(patch: _Patch, message: str) -> None:
    if (torch.is_grad_enabled() or patch.always_lazy) and patch.settings.on_materialize == "raise":
        raise MaterializedLogitsError(message)


def _count_other_logits(owner: Any, patch: _Patch, outputs: Any) -> None:
    """Count and warn, or raise: the outputs have a loss or logits that neither a head nor a wide product has made."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if type(outputs) in (tuple, list) else ()
    sizes = {0, *vocabulary_sizes(owner, owner.get_output_embeddings())}
    real_outputs = [
        v for v in values if isinstance(v, Tensor) and (v.shape[-1] if v.dim() else 0) in sizes and not is_lazy(v)
    ]
    if not real_outputs:
        return
    _raise_if_stock_forbidden(
        patch, f"patch_model(..., on_materialize='raise') forbids logits in memory: {OTHER_LOGITS}"
    )
    trained = [value for value in real_outputs if value.requires_grad]
    if trained:
        patch.usage.count_stock(trained[0], OTHER_LOGITS)
        if owner.training:
            patch.usage.trained_stock_reason = OTHER_LOGITS
            patch.usage.warn_if_not_fused()


def _model_methods(original: Any) -> dict[str, Callable[..., Any]]:
    """Methods for the model."""
    forward = original.forward
    labels_slice = _find_labels_slice(forward)

    @functools.wraps(forward)
    def patched_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch: _Patch | None = getattr(self, "_flce", None)
        if patch is None or is_exporting_or_tracing():
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            before, patch.compiled_call_has_labels = (
                patch.compiled_call_has_labels,
                _has_labels(args, kwargs, labels_slice),
            )
            try:
                return forward(self, *args, **kwargs)
            finally:
                patch.compiled_call_has_labels = before
        if not _prepare_heads(self, patch):
            return forward(self, *args, **kwargs)
        products = None if patch.has_other_products is False else _make_product_mode(self, patch)
        patch.is_head_called = False
        with products or contextlib.nullcontext():
            outputs = forward(self, *args, **kwargs)
        found = products is not None and bool(products.replaced)
        if products is not None and not (found or patch.is_head_called):
            _count_other_logits(self, patch, outputs)
        patch.has_other_products = (
            found
            or not patch.is_head_called
            or (patch.head_modules is not None and patch.head_modules.has_adapter_parameters)
        )
        return outputs

    # `__call__` for models with another `forward` on the instance, as mixed precision by Accelerate makes it.
    calls = {
        "forward": _wrap_outermost(patched_forward, labels_slice),
        "__call__": _wrap_outermost(original.__call__, labels_slice),
    }
    return calls | _generate_methods(original)


def _wrapper_methods(original: Any) -> dict[str, Callable[..., Any]]:
    """Methods for a wrapper that was patched together with its model: the wrapper may be compiled as a whole."""
    return {
        name: _wrap_outermost(getattr(original, name), None) for name in ("forward", "__call__")
    } | _generate_methods(original)


def _generate_methods(original: Any) -> dict[str, Callable[..., Any]]:
    """Those methods of a class that generate."""
    names = [name for name in ("generate", "generate_batch") if callable(getattr(original, name, None))]
    return {name: _with_stock_logits(getattr(original, name)) for name in names}


def _with_stock_logits(generate: Callable[..., Any]) -> Callable[..., Any]:
    """``generate()``, whose logits are sampled from: real ones, also within `lazy_logits`."""

    @functools.wraps(generate)
    def stock_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch: _Patch | None = getattr(self, "_flce", None)
        if patch is None:
            return generate(self, *args, **kwargs)
        patch.change_counts(generations=1)
        try:
            return generate(self, *args, **kwargs)
        finally:
            patch.change_counts(generations=-1)

    return stock_generate


def _wrap_outermost(method: Callable[..., Any], labels_slice: slice | None) -> Callable[..., Any]:
    """A method of the model, which may be where a graph of the compiler begins and ends."""

    @functools.wraps(method)
    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # We are inside a caller's graph. Break it, so that this method runs in Python and can turn lazy objects
            # into tensors.
            patch: _Patch | None = None if is_exporting_or_tracing() else getattr(self, "_flce", None)
            if patch is not None and not patch.converts_outputs:
                labels = labels_slice is not None and _has_labels(args, kwargs, labels_slice)
                expected = labels or patch.always_lazy or (self.training and torch.is_grad_enabled())
                if expected and can_break_graph():
                    torch._dynamo.graph_break()
            return method(self, *args, **kwargs)
        patch = None if private.get_tracing_state() is not None else getattr(self, "_flce", None)
        if patch is None:
            return method(self, *args, **kwargs)
        call = _thread_state.entered_call
        if call is not None and call.owner is self:  # Accelerate needs `__call__`, some wrappers call `forward`
            _thread_state.entered_call = None
            if not call.labels:
                call.note_labels(args, kwargs, labels_slice)
            return call.convert_outputs(method(self, *args, **kwargs))
        call = _Call(self, patch, args, kwargs, labels_slice)
        try:
            outputs = method(self, *args, **kwargs)
            return outputs if call.has_converted else call.convert_outputs(outputs)
        finally:
            call.restore()

    skip_frame(outer)
    mark_frames()  # before a model that is patched can run
    return outer


class _Call:
    """A call of a patched model, or of a wrapper that was patched with it, which has no ``labels_slice`` for labels.

    No graph of ``torch.compile`` can make a tensor of ours, so within one lazy logits are plain objects. Callers expect
    tensors. So the outermost frame of a patched model is left to Python, which changes what comes out of the graph.
    """

    @skip_frame_and_callees
    def __init__(self, owner: Any, patch: _Patch, args: Any, kwargs: Any, labels_slice: slice | None) -> None:
        self.owner, self.patch = owner, patch
        self.previous_thread_state, self.previous_converts_outputs = vars(_thread_state).copy(), patch.converts_outputs
        self.has_converted = self.labels = False
        patch.converts_outputs = True
        _thread_state.entered_call = self
        if labels_slice is not None:
            _thread_state.owner = owner
            self.note_labels(args, kwargs, labels_slice)

    @skip_frame_and_callees
    def note_labels(self, args: Any, kwargs: Any, labels_slice: slice | None) -> None:
        if labels_slice is not None and _has_labels(args, kwargs, labels_slice):
            self.labels = True
            _thread_state.patches_with_labels |= {id(self.patch)}

    @skip_frame_and_callees
    def convert_outputs(self, outputs: Any) -> Any:
        self.has_converted = True
        outputs = self._as_tensors(outputs)
        # `torch.nn.DataParallel` makes replicas for one call.
        gathered = self.labels and getattr(self.owner, "_is_replica", False) and torch.is_grad_enabled()
        return _without_logits(outputs) if gathered else outputs

    def _as_tensors(self, value: Any) -> Any:
        """The outputs with tensors for the plain objects that are lazy logits within a graph; a mapping is changed."""
        if isinstance(value, TracedLazyLogits):
            real, state = value._get_real(), value._state
            if real is not None:
                return real
            # From now on changes of what the logits are made from are noticed, and hooks of wrappers are called.
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
        layer = next((m for m in self.owner.modules() if m._parameters.get("weight") is term.weight), None)
        call = HeadCall(term.weight, term.bias, self.patch.usage, layer, self.owner)
        call.has_bypassing_gradient = (
            self.labels
        )  # the graph has computed a loss, whose gradient does not pass through the logits
        return call

    @skip_frame_and_callees
    def restore(self) -> None:
        vars(_thread_state).clear()
        vars(_thread_state).update(self.previous_thread_state)
        self.patch.converts_outputs = self.previous_converts_outputs


def _without_logits(outputs: Any) -> Any:
    """The outputs of a replica of ``nn.DataParallel``, which would gather all logits on one GPU."""
    named = isinstance(outputs, dict)
    values = outputs.values() if named else outputs if type(outputs) in (tuple, list) else ()
    if not any(map(is_lazy, values)):
        return outputs
    find_caller().warn(
        "nn.DataParallel would gather the logits of all GPUs on one, so a model patched by flce leaves them out of "
        "what it returns in training with labels. Use torchrun or accelerate launch to train on several GPUs",
        UserWarning,
    )
    if named:
        return type(outputs)(**{name: value for name, value in outputs.items() if not is_lazy(value)})
    return type(outputs)(None if is_lazy(value) else value for value in outputs)


def _has_labels(args: Any, kwargs: Any, labels_slice: slice) -> bool:
    """Whether labels are given: by name, at their place, or within an argument that holds a batch."""
    for labels in (kwargs.get("labels"), *args[labels_slice]):
        if labels is not None:
            return True
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Mapping)]
    return any(batch.get("labels") is not None for batch in batches)


def _find_labels_slice(forward: Callable[..., Any]) -> slice:
    """Where ``labels`` stand among the positional arguments behind ``self``; empty if nowhere."""
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    return slice(names.index("labels"), names.index("labels") + 1) if "labels" in names else slice(0)


@skip_frame_and_callees
def _prepare_heads(owner: Any, patch: _Patch) -> bool:
    """Whether this call's logits are to be lazy, before it."""
    embedding = owner.get_output_embeddings()
    if patch.head_modules is None or not patch.head_modules.still_match(embedding, patch):
        # Resizing the vocabulary replaces the layer, adapters add some.
        heads = find_heads(owner)
        _apply_patch(heads, _head_methods, patch)
        patch.head_modules, patch.has_other_products = HeadModules(embedding, heads), None
    return patch.expects_loss(owner)


@skip_frame_and_callees
def _make_product_mode(owner: Any, patch: _Patch) -> VocabularyProductMode | None:
    """A mode for a call: finds out where logits for a loss are made. None: an earlier call has."""
    is_enabled = patch.has_other_products
    if is_enabled is None:
        # Compiled layers would be compiled twice, with the mode and without. So the call before has to give a reason.
        is_enabled = not (
            embedding_layers(owner) and any(private.compiled_call(m) is not None for m in owner.modules())
        )

    def lazy_product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        # Right for any product, as lazy logits stand for its value. One that is no logits would be computed when it is
        # read, with a warning.
        if _thread_state.runs_stock or reason_not_lazy(hidden, weight, bias) is not None:
            return None
        call = HeadCall(weight, bias, patch.usage, None, owner)
        return make_lazy(head_state(hidden, weight, bias, patch.settings, call))

    return VocabularyProductMode(owner, lazy_product) if is_enabled else None


# ----------------------------------------------------------------------------------------------- the public part


def check_on_materialize(value: object) -> None:
    """ValueError for anything but a way to treat logits that are read."""
    if value not in get_args(OnMaterialize):
        raise ValueError(f"on_materialize must be 'warn', 'ignore' or 'raise', got {value!r}")


def patch_model(
    model: ModelT,
    *,
    options: ChunkOptions | None = None,
    on_materialize: OnMaterialize = "warn",
) -> ModelT:
    """Compute a model's cross-entropy loss without its logits. The model is changed in place.

    Loss, gradients and generated text are the stock model's. Where a loss was computed ``outputs.logits`` is a
    `flce.huggingface.LazyLogits`, which turns into the real logits when something reads them.

    Adapters on the output embedding (PEFT's LoRA) may be added before or after; they are computed without their
    logits too. Where several models are in ``model``, a warning names those that cannot be patched. Call
    `unpatch_model` before what asks for the very class of a layer, as ``quantize_dynamic`` does.

    Args:
        model: a model of Transformers with a language-model head, or any with ``get_output_embeddings()``; also
            inside of a wrapper, such as PEFT's or ``torch.compile``'s.
        options: ``flce.ChunkOptions`` for the fused loss.
        on_materialize: what happens when an operation needs the logits themselves, and all of them are computed.
            "warn": a `flce.huggingface.MaterializedLogitsWarning` names the operation and the line that called
            it. "ignore": nothing. "raise": a `flce.huggingface.MaterializedLogitsError` does instead, and also
            where the head would run stock code in training or within `lazy_logits`.
            ``outputs.logits.materialize()`` is always allowed.

    Returns:
        ``model``. Patching a patched model only replaces its options.

    Raises:
        TypeError: no model has an output embedding, or all are quantised or not linear.
        ValueError: another ``on_materialize``.
    """
    check_options(options)
    check_on_materialize(on_materialize)
    settings = Settings(options, on_materialize)
    _check_model("patch_model", model)
    if private.make_wrapper_subclass is None:
        return model
    optimizer_steps.register()
    owners, left = find_owners(model)
    if not owners:
        missing = f"{type(model).__name__} has no output embedding: nothing in it has get_output_embeddings(). "
        remedy = "Patch a model of Transformers with a language-model head, or give yours that method"
        raise TypeError(next(iter(left.values()), missing + remedy))
    if left and not is_patched(model):
        find_caller().warn("flce.patch_model has left what it cannot patch. " + format_unpatched(left), UserWarning)
    for owner in owners:
        # A model within this one may have been patched before: they share their layers.
        patch = next(iter(_patches(owner).values()), None) or _Patch(settings)
        patch.settings = settings
        if "_flce" not in owner.__dict__:
            _apply_patch([owner], _model_methods, patch)
            backbone(owner).register_forward_pre_hook(patch.count_forward)
        others = modules_except(model, [*owners, *map(model.get_submodule, left)])
        _apply_patch(find_heads(owner, others), _head_methods, patch)
    if not any(model is owner for owner in owners) and not type(model).__module__.startswith("torch."):
        _apply_patch([model], _wrapper_methods, patch)
    return model


def unpatch_model(model: ModelT) -> ModelT:
    """Undo `patch_model`, wherever in ``model`` it was applied, and return ``model``.

    Raises:
        TypeError: ``model`` is no module.
    """
    _check_model("unpatch_model", model)
    for module in model.modules():
        if "_flce" in module.__dict__:
            del module._flce
            restore_class(module)  # where that cannot be done: without `_flce` it does what the original does
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), _Patch):
                del module._forward_pre_hooks[key]
    return model


@contextlib.contextmanager
def lazy_logits(model: nn.Module, *models: nn.Module) -> Iterator[None]:
    """Within it calls of patched models return lazy logits in ``eval()`` mode and under ``torch.no_grad()`` too.

    Reinforcement learning computes the log-probabilities of the old policy and of a reference there. What is computed
    from these logits is computed without them, as in training, and has the same bits with and without gradients.
    ``generate()`` returns what it does elsewhere. All threads are within it; contexts may be nested.

    Args:
        model, models: patched models, or wrappers of them.

    Raises:
        TypeError: a model is no module.
        ValueError: a model is not patched.

    Examples:
        >>> with flce.huggingface.lazy_logits(model), torch.no_grad():
        ...     logprob = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    """
    patches: dict[int, _Patch] = {}
    for each in (model, *models):
        _check_model("lazy_logits", each)
        found = _patches(each).values()
        if not found:
            raise ValueError(
                f"lazy_logits expects models that flce.patch_model was called with, got a {type(each).__name__} that "
                "is not patched"
            )
        patches |= {id(patch): patch for patch in found}
    for patch in patches.values():
        patch.change_counts(lazy_contexts=1)
    try:
        yield
    finally:
        for patch in patches.values():
            patch.change_counts(lazy_contexts=-1)


def is_patched(model: nn.Module) -> bool:
    """Whether `patch_model` was applied to ``model`` or to a model that it wraps.

    Raises:
        TypeError: ``model`` is no module.
    """
    _check_model("is_patched", model)
    return any("_flce" in module.__dict__ for module in model.modules())


def report(model: nn.Module) -> Report:
    """What `patch_model` has changed in ``model``, and what has become of its logits since.

    Calls under ``torch.compile`` are not counted.

    Args:
        model: any module; what it wraps is looked at too.

    Raises:
        TypeError: ``model`` is no module.
    """
    _check_model("report", model)
    usages = usages_of(model)
    return Report(
        patched=tuple(_patches(model)),
        forwards=sum(usage.forwards for usage in usages),
        fused=sum(usage.fused for usage in usages),
        materialized=sum((usage.materialized for usage in usages), Counter()),
        stock=sum((usage.stock for usage in usages), Counter()),
        left=find_owners(model)[1],
    )


def _check_model(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function} expects a torch.nn.Module, got {type(model).__name__}")


def usages_of(model: nn.Module) -> list[Usage]:
    """The counts of the patched models in ``model``."""
    return list({id(patch): patch.usage for patch in _patches(model).values()}.values())


def _apply_patch(modules: Iterable[Any], methods: MethodFactory, patch: _Patch) -> None:
    for module in modules:
        if "_flce" not in module.__dict__:
            replace_class(module, methods)
        module.__dict__["_flce"] = patch  # also of a layer that comes from another patched model


def _patches(model: nn.Module) -> dict[str, _Patch]:
    """What each changed module in ``model`` has been given, by its name."""
    return {name: module.__dict__["_flce"] for name, module in model.named_modules() if "_flce" in module.__dict__}
