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
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flce.core import private
from flce.core.log import find_caller, sampled_passes
from flce.core.options import ChunkOptions
from flce.huggingface.divided_head import divide_head, is_divided
from flce.huggingface.find_heads import (
    HeadModules,
    ProductMode,
    backbone,
    embedding_layers,
    find_heads,
    find_language_models,
    modules_except,
    vocabulary_sizes,
)
from flce.huggingface.head_call import HeadCall, optimizer_steps, reason_not_lazy
from flce.huggingface.lazy import is_lazy, make_lazy
from flce.huggingface.lazy.state import OnMaterialize, Settings, head_state
from flce.huggingface.model_call import (
    Patch,
    find_labels,
    find_labels_slice,
    is_exporting_or_tracing,
    name_wrong_label,
    thread_state,
    wrap_call_method,
)
from flce.huggingface.usage import COMPILED_DTENSOR, EVALUATION, Report, Usage, format_unpatched
from flce.huggingface.wrappers import is_partitioned, reason_wrapper_not_lazy
from flce.ops.arguments import names_replacements
from flce.ops.vocabulary_parallel import is_dtensor
from flce.torch_ops import skip_frame_and_callees

ModelT = TypeVar("ModelT", bound=nn.Module)
# Maps the original class to the methods of the subclass that replaces it.
MethodFactory = Callable[[Any], dict[str, Callable[..., Any]]]


def _head_methods(original: type[nn.Linear]) -> dict[str, Callable[..., Any]]:
    forward = original.forward

    @functools.wraps(forward)
    def lazy_forward(self: Any, input: Tensor) -> Any:
        """Return logits ``(..., V)`` of hidden states ``(..., H)``, lazy or ordinary."""
        patch: Patch | None = getattr(self, "_flce", None)
        if patch is None or is_exporting_or_tracing():
            return forward(self, input)
        compiling = torch.compiler.is_compiling()
        if compiling:
            patch.is_compiled_head_called = True
        else:
            thread_state.is_head_called = True
            if self is thread_state.head_in_mode:
                return forward(self, input)  # `ProductMode` returns the lazy logits
        if not patch.must_return_lazy(self):
            logits = forward(self, input)
            if not compiling:
                patch.usage.count_stock(logits, EVALUATION)
            return logits
        weight, bias = self.weight, self.bias  # read once: each read of a parametrised weight computes it
        reason = reason_not_lazy(input, weight, bias)
        if compiling:
            # Without labels the gradient passes through the logits that the graph returns. If no patched method
            # converts them (`Call`), they are plain objects: DDP and FSDP could not register their hooks on them.
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
            reason = "the head's weight is a DTensor, and it or its bias is not Shard(0) on a mesh of one dimension"
        model = thread_state.running_model
        reason = reason_wrapper_not_lazy(model, weight) or reason
        if reason is not None:
            return _run_stock_head(patch, reason, input, weight, bias)
        call = HeadCall(weight, bias, patch.usage, self, model)
        return make_lazy(head_state(input, weight, bias, patch.settings, call))

    return {"forward": lazy_forward}


def _lazy_divided_logits(head: Any, patch: Patch, parameters: tuple[Any, Any], *product: Any) -> Any:
    """Return lazy logits of a head that is divided by classes.

    Args:
        parameters: its weight and its bias or None, DTensors.
        product: the input, the weight and the bias of stock's product. They may be local tensors.
    """
    local, division = divide_head(product[0], *parameters)
    reason = reason_not_lazy(*local)
    if reason is not None:
        return _run_stock_head(patch, reason, *product)
    call = HeadCall(*local[1:], patch.usage, head, thread_state.running_model, parameters)
    return make_lazy(head_state(*local, patch.settings, call, division))


def _patch_instance_forward(head: Any) -> None:
    """Wrap the ``forward`` that Transformers' tensor parallelism has set on the instance of a head.

    This ``forward`` has stored the ``forward`` of ``nn.Linear``, and without gradients it exchanges the DTensors of the
    head for local tensors. So its product is replaced.
    """
    original = head.__dict__.get("forward")
    if original is None or hasattr(original, "_flce_original") or not is_dtensor(head._parameters.get("weight")):
        return

    @functools.wraps(original)
    def divided_forward(*args: Any, **kwargs: Any) -> Any:
        patch: Patch | None = head.__dict__.get("_flce")
        weight, bias = head._parameters["weight"], head._parameters.get("bias")
        if patch is None or torch.compiler.is_compiling() or is_exporting_or_tracing() or not is_divided(weight, bias):
            return original(*args, **kwargs)
        thread_state.is_head_called = True
        if not patch.must_return_lazy(head):
            logits = original(*args, **kwargs)
            patch.usage.count_stock(logits, EVALUATION)
            return logits
        previous, thread_state.head_in_mode = thread_state.head_in_mode, head
        try:
            product = functools.partial(_lazy_divided_logits, head, patch, (weight, bias))
            with ProductMode(product, only_linear=True) as mode:
                logits = original(*args, **kwargs)
        finally:
            thread_state.head_in_mode = previous
        if not mode.replaced:
            reason = (
                "torch.nn.functional.linear is another function, so the product of the divided head was not found. "
                "DeepSpeed's zero.Init replaces it for the rest of the process"
            )
            patch.refuse_stock(reason)
            patch.usage.count_stock(logits, reason)
        return logits

    divided_forward._flce_original = original  # type: ignore[attr-defined]
    head.forward = divided_forward


def _run_stock_head(patch: Patch, reason: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """Return ordinary logits from a call that had to return lazy logits. Count the ``reason``, or raise."""
    patch.refuse_stock(reason)
    thread_state.runs_stock = True
    try:
        logits = F.linear(input, weight, bias)
    finally:
        thread_state.runs_stock = False
    patch.usage.count_stock(logits, reason)
    return logits


def _report_head_not_called(model: Any, patch: Patch, outputs: Any) -> None:
    """Count and warn, or raise, if a call that ran no head has returned a loss or logits."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if type(outputs) in (tuple, list) else ()
    sizes = vocabulary_sizes(model)
    # A loss has no dimensions.
    real_outputs = [
        v for v in values if isinstance(v, Tensor) and not is_lazy(v) and (v.dim() == 0 or v.shape[-1] in sizes)
    ]
    if not real_outputs:
        return
    reason = (
        "neither the forward of the output embedding nor a matrix product as wide as the vocabulary was called. "
        "Another forward is set on the layer, or the model computes its loss by itself"
    )
    patch.refuse_stock(reason)
    trained = [value for value in real_outputs if value.requires_grad]
    if trained:
        patch.usage.count_stock(trained[0], reason)
        if model.training:
            patch.usage.trained_stock_reason = reason
            patch.usage.warn_if_not_fused()


def _model_methods(original: Any) -> dict[str, Callable[..., Any]]:
    forward = original.forward
    labels_slice = find_labels_slice(forward)

    @functools.wraps(forward)
    def patched_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch: Patch | None = getattr(self, "_flce", None)
        if patch is None or is_exporting_or_tracing():
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            previous = patch.compiled_call_has_labels
            patch.compiled_call_has_labels = find_labels(args, kwargs, labels_slice) is not None
            try:
                return forward(self, *args, **kwargs)
            finally:
                patch.compiled_call_has_labels = previous
        must_return_lazy = patch.must_return_lazy(self)
        _find_new_heads(self, patch)
        if not must_return_lazy:
            return forward(self, *args, **kwargs)
        product_mode = _make_product_mode(self, patch)
        patch.is_compiled_head_called = thread_state.is_head_called = False
        try:
            with product_mode or contextlib.nullcontext():
                outputs = forward(self, *args, **kwargs)
        except IndexError as error:
            name_wrong_label(error, find_labels(args, kwargs, labels_slice))
            raise
        has_replaced = product_mode is not None and bool(product_mode.replaced)
        is_head_called = patch.is_compiled_head_called or thread_state.is_head_called
        if product_mode is not None and not (has_replaced or is_head_called):
            _report_head_not_called(self, patch, outputs)
        # Adapters outside of linear layers may be enabled later, see `has_adapter_parameters`.
        has_adapters = patch.head_modules is not None and patch.head_modules.has_adapter_parameters
        patch.has_vocabulary_products = has_replaced or not is_head_called or has_adapters
        return outputs

    return _wrapper_methods(original, patched_forward, labels_slice)


def _wrapper_methods(
    original: Any, forward: Callable[..., Any] | None = None, labels_slice: slice | None = None
) -> dict[str, Callable[..., Any]]:
    """Return the methods of a patched model, or of a wrapper of a model, which the compiler may compile with the model.

    Accelerate's mixed precision sets another `forward` on the instance. Only `__call__` of the class runs then.
    """
    calls = {"forward": forward or original.forward, "__call__": original.__call__}
    generates = [name for name in ("generate", "generate_batch") if callable(getattr(original, name, None))]
    return {name: wrap_call_method(method, labels_slice) for name, method in calls.items()} | {
        name: _with_stock_logits(getattr(original, name)) for name in generates
    }


def _with_stock_logits(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a ``generate()``: it samples from its logits, so they are ordinary logits also within `lazy_logits`."""

    @functools.wraps(generate)
    def stock_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch: Patch | None = getattr(self, "_flce", None)
        if patch is None:
            return generate(self, *args, **kwargs)
        patch.change_counts(running_generate_calls=1)
        try:
            return generate(self, *args, **kwargs)
        finally:
            patch.change_counts(running_generate_calls=-1)

    return stock_generate


@skip_frame_and_callees
def _find_new_heads(model: Any, patch: Patch) -> None:
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
def _make_product_mode(model: Any, patch: Patch) -> ProductMode | None:
    """Return a mode that replaces vocabulary products of one call by lazy logits, or None if there are none.

    If the output embedding has linear layers, products with parameters of other layers are not replaced.
    """
    if patch.has_vocabulary_products is False:
        return None
    layers = embedding_layers(model)
    # A model with a linear output embedding probably runs a head. If some of its layers are also compiled, they would
    # be compiled twice: with the mode in the first call, and without it later. Such a model gets the mode only after a
    # call that has not run its head.
    is_first = patch.has_vocabulary_products is None
    if is_first and layers and any(private.compiled_call(m) is not None for m in model.modules()):
        return None
    sizes, heads = vocabulary_sizes(model), [layer._parameters.get("weight") for layer in layers]

    def lazy_product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        # Products of the same inputs are logits too.
        has_vocabulary_size = weight.shape[0] in sizes or any(hidden is other for other in mode.replaced)
        parameter = weight if weight._base is None else weight._base
        is_of_other_layer = isinstance(parameter, nn.Parameter) and not any(parameter is head for head in heads)
        if not has_vocabulary_size or hidden.dim() <= 1 or (heads and is_of_other_layer):
            return None
        # This is correct for any product: lazy logits are computed when their values are read. If the product is not
        # the logits, only the warning about that read is wrong.
        if thread_state.runs_stock or reason_not_lazy(hidden, weight, bias) is not None:
            return None
        call = HeadCall(weight, bias, patch.usage, None, model)
        return make_lazy(head_state(hidden, weight, bias, patch.settings, call))

    mode = ProductMode(lazy_product, only_linear=False)
    return mode


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
        patch = next(iter(_patches(language_model).values()), None) or Patch(settings)
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
            # If other code has changed the class since, it stays. Without `_flce` the methods run stock code.
            _set_class(module, lambda other: vars(other).get("_flce_original_class", other))
            forward: Any = module.__dict__.get("forward")
            original = getattr(forward, "_flce_original", None)
            # `functools.update_wrapper` copies the attribute to a wrapper, such as Accelerate's, which must stay.
            if original is not None and forward.__wrapped__ is original:
                module.forward = original
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Patch):
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
    patches: dict[int, Patch] = {}
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
    options = [patch.settings.options for patch in _patches(model).values()]
    return Report(
        patched=tuple(_patches(model)),
        forwards=sum(usage.forwards for usage in usages),
        fused=sum(usage.fused for usage in usages),
        values=sum(usage.values for usage in usages),
        materialized=sum((usage.materialized for usage in usages), Counter()),
        stock=sum((usage.stock for usage in usages), Counter()),
        left=find_language_models(model)[1],
        sampled=Counter(sampled_passes if any(o is not None and o.sample_below for o in options) else ()),
    )


def _check_model(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = ": give transformers.AutoModelForCausalLM.from_pretrained(...)" if isinstance(model, str) else ""
        raise TypeError(f"{function} expects a torch.nn.Module, got {type(model).__name__}{hint}")


def usages_of(model: nn.Module) -> list[Usage]:
    """Return the counts of the patched models in ``model``."""
    return list({id(patch): patch.usage for patch in _patches(model).values()}.values())


def _apply_patch(modules: Iterable[Any], make_methods: MethodFactory, patch: Patch) -> None:
    for module in modules:
        if "_flce" not in module.__dict__:
            _set_class(module, lambda original: _subclass_with_methods(original, make_methods))
        module.__dict__["_flce"] = patch  # replaces the patch of a layer that another patched model had before


def _patches(model: nn.Module) -> dict[str, Patch]:
    """Return the patch of each patched module in ``model``, by the name of the module."""
    return {name: module.__dict__["_flce"] for name, module in model.named_modules() if "_flce" in module.__dict__}


# ---------------------------------------------------------------------------------------- classes of single modules


def _set_class(module: Any, replacement: Callable[[Any], Any]) -> None:
    """Set the class of ``module`` to ``replacement(class)``, and so its methods.

    Tied weights, ``state_dict``, ``deepcopy``, ``pickle`` and ``save_pretrained`` work as before. Wrappers that call
    ``model.forward`` directly call the replaced method, whereas they would bypass a hook.
    """
    current_class: Any = type(module)
    if nn.utils.parametrize.is_parametrized(module) and any(
        name in vars(current_class) for name in module.parametrizations
    ):
        # PyTorch has put a class with the parametrisations on top of the original class, and removes it together with
        # them. So the replacement has to be the base of this class.
        new_class = type(current_class.__name__, (replacement(current_class.__bases__[0]),), dict(vars(current_class)))
    else:
        new_class = replacement(current_class)
    # `module.x = ...` of a Lightning Fabric module sets x of the wrapped module instead.
    object.__setattr__(module, "__class__", new_class)
    # Accelerate's hooks store the method that they replace on the instance, where a change of class has no effect.
    old_forward = module.__dict__.get("_old_forward")
    if getattr(old_forward, "__func__", None) is current_class.forward:
        module._old_forward = types.MethodType(type(module).forward, module)


@functools.cache
def _subclass_with_methods(original: Any, make_methods: MethodFactory) -> Any:
    """Return a subclass with ``make_methods(original)`` and with the name, module and docstring of ``original``."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # pickle cannot import the subclass by its name, so `_new_instance` creates it again.
        _, _, *state = super(subclass, self).__reduce_ex__(max(2, protocol))
        return _new_instance, (original, make_methods), *state

    inherited = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    replaced = {"__reduce_ex__": __reduce_ex__, "_flce_original_class": original, **make_methods(original)}
    subclass: Any = type(original.__name__, (original,), {**inherited, **replaced})
    return subclass


def _new_instance(original: Any, make_methods: MethodFactory) -> Any:
    subclass = _subclass_with_methods(original, make_methods)
    return subclass.__new__(subclass)
