"""``patch_model``: make a model's output embedding return lazy logits while a loss is going to be computed.

Two kinds of modules are changed, both by giving the instance another ``__class__``: same parameters, same name,
another ``forward``. Tied weights, ``state_dict``, ``deepcopy``, ``pickle`` and ``save_pretrained`` do not see a
difference, and neither do wrappers that call ``model.forward`` directly, which would go round a hook:

* the linear layers of the output embedding return lazy logits. There may be several: adapters (LoRA, copies to
  be trained) wrap the original one and add to it, and as lazy logits can be added, their code runs as it is;
* the model notes whether it is called with ``labels``.

The layers are lazy when labels were given, or when they are in training mode with gradients enabled. So a model
that is evaluated with labels computes the fused loss, a training loop that computes its own cross-entropy gets
it too, and ``generate()`` and inference run stock code.

Some models make their logits elsewhere than in the layer that they call their output embedding, or in no layer
at all. The first call finds that out: it watches matrix products for one that is as wide as the vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flce.functional import check_options
from flce.huggingface.lazy_logits import make_lazy
from flce.huggingface.lazy_state import OnMaterialize, Settings, head_state
from flce.planning import ChunkOptions

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass
class _Patch:
    """What a patched model and its layers share."""

    settings: Settings
    loss_expected: bool = False
    """Whether the model is being called with labels."""
    watch_products: bool | None = None
    """Whether logits are made elsewhere than in the output embedding; None: the first call will tell."""
    head_called: bool = field(default=False, repr=False)
    head_id: int | None = field(default=None, repr=False)
    """Of the output embedding that `watch_products` is about."""


# ------------------------------------------------------------------------------------------- the changed modules


def _lazy_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a linear layer of the output embedding."""

    @functools.wraps(forward)
    def lazy_forward(self: Any, input: Tensor) -> Any:
        """Hidden states ``(..., H)`` to logits ``(..., V)``, lazy ones when a loss is expected."""
        patch: _Patch | None = getattr(self, "_flce", None)
        if patch is None:
            return forward(self, input)
        patch.head_called = True
        expected = patch.loss_expected or (self.training and torch.is_grad_enabled())
        if not expected or not _can_be_lazy(input, self.weight, self.bias):
            return forward(self, input)
        return make_lazy(head_state(input, self.weight, self.bias, patch.settings))

    return lazy_forward


def _watching_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of the model."""
    labels_position = _labels_position(forward)

    @functools.wraps(forward)
    def watching_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch: _Patch | None = getattr(self, "_flce", None)
        if patch is None:
            return forward(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            _change_layers(self, patch)  # resizing the vocabulary replaces the layer, adapters add some
        labels = kwargs.get("labels")
        if labels is None and labels_position is not None and len(args) > labels_position:
            labels = args[labels_position]
        before = patch.loss_expected
        patch.loss_expected = labels is not None
        try:
            if patch.watch_products is False or torch.compiler.is_compiling():
                return forward(self, *args, **kwargs)
            if labels is None and not (self.training and torch.is_grad_enabled()):
                return forward(self, *args, **kwargs)
            with _Products(self, patch):
                return forward(self, *args, **kwargs)
        finally:
            patch.loss_expected = before

    return watching_forward


class _Products(TorchFunctionMode):
    """Makes every matrix product lazy that is as wide as the vocabulary.

    Right whatever it catches, because lazy logits stand for their value; a product that is none of logits would
    be computed all the same, with a warning.
    """

    def __init__(self, owner: Any, patch: _Patch) -> None:
        super().__init__()
        self.patch, self.sizes = patch, _vocabulary_sizes(owner)
        # Where the model has a proper output embedding, another layer's parameter is none of its logits'.
        self.heads = [layer.weight for layer in _layers(owner)]
        # An adapter around it may make the logits of its layer in one call and by itself in another.
        self.plain = isinstance(owner.get_output_embeddings(), nn.Linear)
        self.caught: list[Tensor] = []  # inputs of such products: of others with them logits are made as well

    def __enter__(self) -> _Products:
        self.patch.head_called = False
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is not None:
            return
        if self.caught:
            self.patch.watch_products = True
        elif self.patch.head_called and self.plain:
            self.patch.watch_products = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        product = _as_linear(func, args, kwargs)
        if product is not None:
            hidden, weight, bias = product
            wide = weight.shape[0] in self.sizes or any(hidden is other for other in self.caught)
            source = weight if weight._base is None else weight._base
            foreign = isinstance(source, nn.Parameter) and not any(source is head for head in self.heads)
            if wide and not (self.heads and foreign) and hidden.dim() > 1 and _can_be_lazy(hidden, weight, bias):
                self.caught.append(hidden)
                return make_lazy(head_state(hidden, weight, bias, self.patch.settings))
        return func(*args, **kwargs)


def _as_linear(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """``(hidden, weight, bias)`` of a call that is a linear layer by its arguments, else None."""
    if func is F.linear:
        hidden, weight, bias = _linear_arguments(*args, **kwargs)
    elif func is torch.einsum and len(args) == 3 and not kwargs and isinstance(args[0], str):
        if not re.fullmatch(r"(\w+)(\w),(\w)\2->\1\3", args[0].replace(" ", "")):
            return None
        hidden, weight, bias = args[1], args[2], None
    elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and len(args) == 2 and not kwargs:
        hidden, weight, bias = args[0], args[1], None
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            return None
        weight = weight.t()
    else:
        return None
    return (hidden, weight, bias) if type(hidden) is Tensor and weight.dim() == 2 else None


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _can_be_lazy(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the fused loss can stand for this call. If not, stock code runs, and reports what is wrong."""
    if type(hidden) is not Tensor or type(weight) not in (Tensor, nn.Parameter):
        return False  # DTensor, fake and quantised tensors
    if not hidden.is_floating_point() or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[-1]:
        return False
    if hidden.device != weight.device:
        return False
    same_dtype = hidden.dtype == weight.dtype and (bias is None or bias.dtype == weight.dtype)
    if not same_dtype and not torch.is_autocast_enabled(hidden.device.type):
        return False
    if torch.compiler.is_compiling():
        return True
    # A transform (torch.func) or a tracer records what it sees and could not replay our objects.
    return torch._C._functorch.peek_interpreter_stack() is None and not torch._C._get_tracing_state()


# ----------------------------------------------------------------------------------------------- the public part


def patch_model(
    model: ModelT, *, options: ChunkOptions | None = None, on_materialize: OnMaterialize = "warn"
) -> ModelT:
    """Compute a model's cross-entropy loss without its logits. The model is changed in place.

    Loss, gradients and generated text are the stock model's. ``outputs.logits`` is a
    :class:`~flce.huggingface.LazyLogits` where a loss was computed, which turns into the real logits when
    something reads them.

    Adapters on the output embedding (PEFT's LoRA) may be added before or after; they are computed without their
    logits too.

    Args:
        model: a model of Transformers with a language-model head, or any with ``get_output_embeddings()``; also
            inside of a wrapper, such as PEFT's or ``torch.compile``'s.
        options: ``flce.ChunkOptions`` for the fused loss.
        on_materialize: what happens when an operation needs the logits themselves, and all of them are
            computed. "warn": a :class:`~flce.huggingface.MaterializedLogitsWarning` names the operation and the
            line that called it. "ignore": nothing. "raise": a
            :class:`~flce.huggingface.MaterializedLogitsError` does, instead of the logits.
            ``outputs.logits.materialize()`` is always allowed.

    Returns:
        ``model``. Patching a patched model only replaces its options.

    Raises:
        TypeError: the model has no output embedding, or one that is quantised or not linear.
        ValueError: another ``on_materialize``.
    """
    check_options(options)
    if on_materialize not in get_args(OnMaterialize):
        raise ValueError(f"on_materialize must be 'warn', 'ignore' or 'raise', got {on_materialize!r}")
    settings = Settings(options, on_materialize)
    owner = _patched_owner(model)
    if owner is not None:
        owner._flce.settings = settings
        return model
    owner = _owner(model)
    _check_head(owner)
    patch = _Patch(settings)
    _change(owner, _watching_forward, patch)
    _change_layers(owner, patch)
    return model


def unpatch_model(model: ModelT) -> ModelT:
    """Undo :func:`patch_model`, wherever in ``model`` it was applied. A model that is not patched is left
    as it is.

    Returns:
        ``model``.
    """
    for module in model.modules():
        if "_flce" in module.__dict__:
            _change_back(module)
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether :func:`patch_model` was applied to ``model`` or to a model that it wraps."""
    return _patched_owner(model) is not None


# ------------------------------------------------------------------------------------------- what is to be changed


def _owner(model: nn.Module) -> nn.Module:
    """The model itself, out of its wrappers: the outermost module that defines an output embedding."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch_model expects a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if hasattr(type(module), "get_output_embeddings"):
            return module
    raise TypeError(
        f"{type(model).__name__} has no output embedding: neither it nor a module in it has "
        "get_output_embeddings(). Patch a model of Transformers with a language-model head, or give yours that method"
    )


def _patched_owner(model: Any) -> Any:
    """The model, perhaps inside of ``model``, that was patched; None: none was."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((m for m in modules if "_flce" in m.__dict__ and not isinstance(m, nn.Linear)), None)


def _layers(owner: Any) -> list[nn.Linear]:
    """The linear layers in the output embedding that make logits; none where it has no such."""
    head = owner.get_output_embeddings()
    if not isinstance(head, nn.Module):
        return []
    sizes = _vocabulary_sizes(owner)
    return [module for module in head.modules() if _is_plain_linear(module) and len(module.weight) in sizes]


def _is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    if not isinstance(module, nn.Linear) or not _is_plain(module.weight):
        return False
    return "_flce" in module.__dict__ or type(module).forward is nn.Linear.forward


def _is_plain(weight: Tensor) -> bool:
    return weight.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_head(owner: Any) -> None:
    name, head = type(owner).__name__, owner.get_output_embeddings()
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    weight = getattr(head, "weight", None)
    if _layers(owner):
        return
    if isinstance(weight, Tensor) and not _is_plain(weight):
        raise TypeError(
            f"the output embedding of {name} is a {kind} with {weight.dtype} weights: a quantised head. Keep the head "
            "a plain torch.nn.Linear (for example by listing it among the modules that the quantiser skips) and patch "
            "again"
        )
    own = head is None or isinstance(head, nn.Embedding) or type(head).__module__.startswith("transformers.")
    if own and name in _names_of_language_models():
        return  # makes its logits in its own way, which the first call will find
    if head is None:
        raise TypeError(
            f"{name} has no output embedding (get_output_embeddings() returns None); patch the model with the "
            "language-model head (for example the class ...ForCausalLM)"
        )
    raise TypeError(
        f"the output embedding of {name} is a {kind}, with no plain torch.nn.Linear in it that makes the logits; only "
        "such a layer can be patched. Compute the loss with flce.fused_linear_cross_entropy, or let "
        "get_output_embeddings() return the layer"
    )


@functools.cache
def _names_of_language_models() -> frozenset[str]:
    """Classes of Transformers with a language-model head, by its own account."""
    from transformers.models.auto import modeling_auto

    names: set[str] = set()
    for kind in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        for value in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).values():
            names.update((value,) if isinstance(value, str) else value)
    return frozenset(names)


def _vocabulary_sizes(owner: Any) -> frozenset[int]:
    weight = getattr(owner.get_output_embeddings(), "weight", None)
    if isinstance(weight, Tensor):
        return frozenset({weight.shape[0]})
    config: Any = getattr(owner, "config", None)
    configs = [] if config is None else [config, config.get_text_config(decoder=True)]
    return frozenset(c.vocab_size for c in configs if isinstance(getattr(c, "vocab_size", None), int))


def _labels_position(forward: Callable[..., Any]) -> int | None:
    """Where ``labels`` stands among the positional arguments behind ``self``; None: nowhere."""
    names = []
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        names.append(parameter.name)
    return names.index("labels") if "labels" in names else None


# ------------------------------------------------------------------------------------------------ how it is changed


def _change_layers(owner: nn.Module, patch: _Patch) -> None:
    head_id = id(owner.get_output_embeddings())  # type: ignore[operator]
    if head_id != patch.head_id:
        patch.head_id, patch.watch_products = head_id, None
    for layer in _layers(owner):
        if layer.__dict__.get("_flce") is not patch:
            if "_flce" in layer.__dict__:  # of a model that it was taken from
                _change_back(layer)
            _change(layer, _lazy_forward, patch)


def _change(module: Any, make_forward: Callable[[Callable[..., Any]], Callable[..., Any]], patch: _Patch) -> None:
    original: Any = type(module)
    module.__class__ = _changed_class(original, make_forward)
    module._flce = patch
    # Accelerate's hooks keep the method they replaced on the instance, out of reach of the class.
    kept = module.__dict__.get("_old_forward")
    if getattr(kept, "__func__", None) is original.forward:
        module._old_forward = types.MethodType(type(module).forward, module)


def _change_back(module: Any) -> None:
    del module._flce
    changed = type(module)
    original = changed.__dict__.get("_flce_original")
    if original is None:
        return  # something else has changed the class since; without `_flce` ours does what the original does
    module.__class__ = original
    kept = module.__dict__.get("_old_forward")
    if getattr(kept, "__func__", None) is changed.forward:
        module._old_forward = types.MethodType(original.forward, module)


@functools.cache
def _changed_class(original: Any, make_forward: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A subclass that looks like `original` and runs another forward."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # The class cannot be found by its name; make it anew.
        _, _, *state = super(changed, self).__reduce_ex__(max(2, protocol))
        return _new, (original, make_forward), *state

    changed: Any = type(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": __reduce_ex__,
            "forward": make_forward(original.forward),
            "_flce_original": original,
        },
    )
    return changed


def _new(original: Any, make_forward: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    changed = _changed_class(original, make_forward)
    return changed.__new__(changed)
